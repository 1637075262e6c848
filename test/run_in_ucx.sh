#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Runs a program that was linked against libucp.so.0 and its kin in a UCX whose files are called otherwise, as Python wheels bundle it:
# a copy of the program gets those names. The plugin stays as it is.
# usage: run_in_ucx.sh FOLDER_WITH_libucp-*.so.0.0.0 PROGRAM [ARGUMENT...]
set -eu
folder=$(cd "$1" && pwd)
program=$2
shift 2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
copy=$work/$(basename "$program")
cp "$program" "$copy"
for name in ucm ucs uct ucp; do
    files=("$folder/lib$name"-*.so.0.0.0)
    if [ ${#files[@]} -ne 1 ] || [ ! -f "${files[0]}" ]; then
        echo "run_in_ucx.sh: $folder does not hold one lib$name-*.so.0.0.0" >&2
        exit 2
    fi
    patchelf --replace-needed "lib$name.so.0" "$(basename "${files[0]}")" "$copy"
done
chmod +x "$copy"
# UCX's EFA module and a libefa of the system would load libnl twice, which crashes at exit, with or without the plugin.
LD_LIBRARY_PATH=$folder UCX_MODULES=^efa "$copy" "$@"
