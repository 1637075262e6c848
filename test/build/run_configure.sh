#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# What configure says to a UCX that is missing or too old, and that the codec builds without any UCX.
# usage: run_configure.sh PREFIX_OF_UCX   (configure exists; nothing is written to the source folder)
set -u
top=$(cd "$(dirname "$0")/../.." && pwd)
ucx=$(cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

# configure NAME ARGUMENT...: runs configure in a folder of its own; output in $work/NAME.log. What the first that ends well has found out
# about the compilers and headers the others believe.
configure() {
    local name=$1
    shift
    mkdir -p "$work/$name"
    (cd "$work/$name" && "$top/configure" --cache-file="$work/cache" "$@") >"$work/$name.log" 2>&1
}

# refused NAME TEXT ARGUMENT...: configure fails and its one error line has TEXT
refused() {
    local name=$1 text=$2 lines
    shift 2
    if configure "$name" "$@"; then
        echo "not ok - $name: configure accepted it"
        failed=1
        return
    fi
    lines=$(grep -c 'error:' "$work/$name.log")
    if [ "$lines" = 1 ] && grep 'error:' "$work/$name.log" | grep -qF -- "$text"; then
        echo "ok - $name: $(grep 'error:' "$work/$name.log")"
    else
        echo "not ok - $name: $lines error lines, wanted one with '$text'"
        tail -n 5 "$work/$name.log" | sed 's/^/#   /'
        failed=1
    fi
}

if configure "codec only" --without-ucx --without-cuda --without-rocm && grep -q 'UCX plugin (libuct_zip) *no' "$work/codec only.log" &&
    make -C "$work/codec only" -j"$(nproc)" CXXFLAGS=-O0 CPPFLAGS=-DHWY_COMPILE_ONLY_STATIC src/kernels/libzipcodec.la src/tools/zipperf >"$work/make.log" 2>&1 &&
    [ -f "$work/codec only/src/kernels/.libs/libzipcodec.so.0" ]; then
    echo "ok - the codec and its tool build without UCX"
else
    echo "not ok - the codec and its tool do not build without UCX"
    tail -n 5 "$work/codec only.log" "$work/make.log" 2>/dev/null | sed 's/^/#   /'
    failed=1
fi
# but not about the user's variables, which differ
[ ! -f "$work/cache" ] || sed -i '/^ac_cv_env_/d' "$work/cache"

refused "no UCX there" "run contrib/setup" --with-ucx="$work/nothing"

mkdir -p "$work/old/lib"
cp -r "$ucx/include" "$work/old/include"
sed -i 's/^#define UCP_API_MINOR .*/#define UCP_API_MINOR 21/' "$work/old/include/ucp/api/ucp_version.h"
refused "UCX 1.21" "UCX 1.21 in $work/old is too old: 1.22 or later is needed" --with-ucx="$work/old"

mkdir -p "$work/bare/lib"
cp -r "$ucx/include" "$work/bare/include"
rm "$work/bare/include/uct/api/uct.h"
refused "UCX without transport headers" "lacks uct/api/uct.h" --with-ucx="$work/bare"

refused "CUDA for what it cannot do" "ZIP_CUDA_ARCHS names 7, for which this compiler makes no kernels" \
    --without-ucx --without-rocm --with-cuda ZIP_CUDA_ARCHS=7
refused "CUDA that is not there" "no usable CUDA toolkit in $work/nothing" --without-ucx --without-rocm --with-cuda="$work/nothing"
refused "ROCm for what it cannot do" "ZIP_HIP_ARCHS names gfx7, for which this compiler makes no kernels" \
    --without-ucx --without-cuda --with-rocm ZIP_HIP_ARCHS=gfx7

exit $failed
