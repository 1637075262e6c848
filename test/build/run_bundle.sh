#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# make bundle: what it says where something is missing; that a bundle runs from another folder and with nothing of its maker's environment.
# usage: run_bundle.sh BUILD UCX
set -u
build=$(cd "$1" && pwd) ucx=$(cd "$2" && pwd)
top=$(cd "$(dirname "$0")/../.." && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
failed=0

check() { # NAME COMMAND...
    local name=$1
    shift
    if "$@" >"$scratch/log" 2>&1; then
        echo "ok - $name"
    else
        echo "not ok - $name"
        sed 's/^/# /' "$scratch/log" | tail -n 20
        failed=1
    fi
}

# refuses TEXT ARGUMENT...: contrib/bundle fails, says TEXT, and leaves nothing behind
refuses() {
    local text=$1 said
    shift
    ! said=$("$top/contrib/bundle" "$@" 2>&1) || { echo "it made one"; return 1; }
    grep -qF "$text" <<<"$said" || { echo "it said: $said"; return 1; }
    [ -z "$(find "$scratch" -maxdepth 1 -name 'out*')" ] || { echo "it left $(ls "$scratch")"; return 1; }
}
mkdir "$scratch/other" "$scratch/no-ucx" "$scratch/build"
touch "$scratch/other/file"
cp -rs "$build/src" "$build/test" "$scratch/build"
rm -f "$scratch/build/src/kernels/cuda/.libs/libzip_cuda.so"
check "it says that the kernels are missing, and what makes them" refuses 'libzip_cuda.so, which needs a CUDA compiler: put nvcc' "$scratch/build" "$ucx" "$scratch/out"
check "it says that there is no build" refuses 'there is no build folder' "$scratch/nowhere" "$ucx" "$scratch/out"
check "it says that there is no UCX" refuses 'run contrib/setup' "$build" "$scratch/no-ucx" "$scratch/out"
check "it leaves a folder alone that is no bundle" refuses 'is no bundle' "$build" "$ucx" "$scratch/other"

if [ ! -f "$build/src/kernels/cuda/.libs/libzip_cuda.so" ]; then
    echo "ok - no kernels for CUDA were built here: no bundle"
    exit $failed
fi
check "make bundle" make -C "$build" bundle BUNDLE_UCX="$ucx" BUNDLE_DIR="$scratch/first"
check "once more, over the older one" make -C "$build" bundle BUNDLE_UCX="$ucx" BUNDLE_DIR="$scratch/first"
mkdir "$scratch/elsewhere"
mv "$scratch/first" "$scratch/elsewhere/bundle"
cd / || exit 1
bundle="$scratch/elsewhere/bundle"
is_small() { [ "$(du -sm --apparent-size "$bundle" | cut -f 1 | tee /dev/stderr)" -le 60 ]; }
check "it is no larger than 60 MB" is_small
prints() { "${@:2}" | tee /dev/stderr | grep -qF "$1"; } # TEXT COMMAND...
check "UCX is its own" prints "$bundle/lib/libucs" env -i "$bundle/run" ucx_info -v
check "UCX finds its modules" prints 'Transport: cma' env -i "$bundle/run" ucx_info -d
check "UCX finds the software verbs device" prints 'Transport: rc_verbs' env -i VERBS=1 "$bundle/run" ucx_info -d
check "ucx_perftest runs" prints 'Usage: ucx_perftest' env -i "$bundle/run" ucx_perftest -h
has_all_libraries() { # but the driver's
    local file
    find "$bundle" -type f \( -name '*.so*' -o -path "$bundle/bin/*" \) | while read -r file; do
        ! env -i LD_LIBRARY_PATH="$bundle/lib" ldd "$file" | grep -E 'not found|undefined' | grep -vE '^\s*(libcuda|libcudart|libnvidia-ml)\.so' || { echo "of $file"; exit 1; }
    done
}
check "it has all libraries" has_all_libraries
transfers() { # WIRE: messages of host memory, through zip
    env -i "$bundle/gpu-bench" p2p --memory host --wire "$1" --wire-gbps 0.5 --size 1M --rounds 2 --iterations 2 --strategy ucx,auto
}
check "gpu-bench sends host memory over tcp" transfers tcp
check "gpu-bench sends host memory over rc" transfers rc
says_that_there_is_no_gpu() { ! env -i "$bundle/gpu-test" && env -i "$bundle/gpu-test" 2>&1 | grep -qF 'finds no GPU'; }
command -v nvidia-smi >/dev/null || check "gpu-test says that there is no GPU" says_that_there_is_no_gpu
# gpu-test itself, with a GPU and a program of tests that are played
mkdir "$scratch/played"
printf '#!/bin/sh\necho GPU 0: played\n' >"$scratch/played/nvidia-smi"
printf '#!/bin/sh\necho "[       OK ] A.One (1 ms)"\necho "why"\necho "[  FAILED  ] A.Two (2 ms)"\nexit 1\n' >"$scratch/played/test"
chmod +x "$scratch"/played/*
counts() {
    local said
    cp "$scratch/played/test" "$bundle/bin/test_transport_gpu"
    ! said=$(PATH="$scratch/played:$PATH" "$bundle/gpu-test" 'A.*') || { echo "it succeeded: $said"; return 1; }
    [ "$(sed -n 2,3p <<<"$said")" = $'[       OK ] A.One (1 ms)\n[  FAILED  ] A.Two (2 ms)' ] && grep -qx why <<<"$said" &&
        [ "$(tail -n 1 <<<"$said")" = "1 passed, 1 failed" ] || { echo "it said: $said"; return 1; }
}
check "gpu-test shows tests as they end, counts them, and says why one failed" counts
exit $failed
