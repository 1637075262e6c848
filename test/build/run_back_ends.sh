#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# What was built for GPUs: the back ends need no driver to be opened, and say what is missing where there is none.
# usage: run_back_ends.sh BUILD
set -u
build=$(cd "$1" && pwd)
failed=0

check() { # NAME COMMAND...
    local name=$1
    shift
    if "$@"; then
        echo "ok - $name"
    else
        echo "not ok - $name"
        failed=1
    fi
}

links_no_driver() { ! readelf -d "$1" | grep -E 'NEEDED.*(libcuda|libcudart|libamdhip|libhsa)'; }
exports() { nm -D --defined-only "$1" | awk '{ print $3 }'; }
exports_one_name() { [ "$(exports "$1")" = "$2" ] || { echo "# it exports $(exports "$1" | head -n 5 | xargs) ..."; return 1; }; }

found=0
for kind in cuda hip; do
    library=$build/src/kernels/$kind/.libs/libzip_$kind.so
    [ -f "$library" ] || continue
    found=1
    check "libzip_$kind links no driver" links_no_driver "$library"
    check "libzip_$kind exports one function" exports_one_name "$library" zip_gpu_back_end
done
[ $found = 1 ] || echo "ok - no back end was built: nothing to look at"

exports_the_interface() {
    local names name
    names=$(exports "$build/src/kernels/.libs/libzipcodec.so")
    for name in zip_codec_encode zip_codec_plan zip_dtype_name zip_shape_name zip_status_string zip_gpu_load; do
        grep -qx "$name" <<<"$names" || { echo "# libzipcodec lacks $name"; return 1; }
    done
}
exports_nothing_else() { ! exports "$build/src/kernels/.libs/libzipcodec.so" | grep -vE '^zip_(codec|dtype|shape|status|gpu)_'; }
check "libzipcodec exports its interface" exports_the_interface
check "libzipcodec exports nothing else" exports_nothing_else
plugin=$build/src/uct/zip/.libs/libuct_zip.so
[ -f "$plugin" ] && check "libuct_zip exports one function" exports_one_name "$plugin" ucs_module_global_init
exit $failed
