#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# A plugin built with a wrong declaration of UCX's structures: UCX says so in one line, and works on without it.
# usage: run_refused_plugin.sh BUILD_FOLDER PREFIX_OF_UCX   (compiler: $CXX, g++)
set -u
top=$(cd "$(dirname "$0")/../.." && pwd)
build=$(cd "$1" && pwd)
ucx=$(cd "$2" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for name in $(compgen -e UCX_); do unset "$name"; done
export LD_LIBRARY_PATH=$ucx/lib

cp -r "$top/src" "$work/src"
# as if another release had put a word in front of the memory domain
sed -i 's/^    InternalOps \*internal_ops;$/    InternalOps *internal_ops;\n    void *new_in_another_release;/' "$work/src/uct/zip/ucx_abi.h"
if cmp -s "$top/src/uct/zip/ucx_abi.h" "$work/src/uct/zip/ucx_abi.h"; then
    echo "not ok - the declaration to break is not there any more"
    exit 1
fi
mkdir "$work/plugin"
if ! "${CXX:-g++}" -std=c++20 -O0 -fPIC -fvisibility=hidden -shared -I"$work/src" -isystem "$ucx/include" \
    "$work"/src/uct/zip/*.cc "$build/src/kernels/.libs/libcodec.a" -lhwy -o "$work/plugin/libuct_zip.so.0" >"$work/log" 2>&1; then
    echo "not ok - the broken plugin does not build"
    tail -n 5 "$work/log"
    exit 1
fi

export UCX_PLUGIN_PATH=$work/plugin UCX_ZIP_MEM_TYPES=host UCX_TLS=zip,tcp
"$ucx/bin/ucx_info" -d >"$work/out" 2>&1
status=$?
failed=0
check() { # NAME CONDITION-STATUS
    if [ "$2" = 0 ]; then echo "ok - $1"; else echo "not ok - $1"; failed=1; fi
}
check "UCX goes on" $status
[ "$(grep -c 'zip: not used' "$work/out")" = 1 ] && grep 'zip: not used' "$work/out" | grep -q 'BaseIface'
check "one line says what differs: $(grep -o 'zip: not used.*' "$work/out" | sed "s,$ucx,UCX,")" $?
! grep -q 'Transport: zip' "$work/out"
check "nothing was registered" $?
grep -q 'Transport: tcp' "$work/out"
check "the other transports are there" $?
exit $failed
