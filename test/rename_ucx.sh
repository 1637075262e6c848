#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Copies a program that was linked against libucp.so.0 and its kin so that it runs in a UCX whose files are called otherwise, as Python
# wheels bundle it. The plugin needs no such thing.
# usage: rename_ucx.sh FOLDER_WITH_libucp-*.so.0.0.0 PROGRAM COPY
set -eu
folder=$(cd "$1" && pwd)
cp "$2" "$3"
for name in ucm ucs uct ucp; do
    files=("$folder/lib$name"-*.so.0.0.0)
    if [ ${#files[@]} -ne 1 ] || [ ! -f "${files[0]}" ]; then
        echo "rename_ucx.sh: $folder does not hold one lib$name-*.so.0.0.0" >&2
        exit 2
    fi
    patchelf --replace-needed "lib$name.so.0" "$(basename "${files[0]}")" "$3"
done
chmod +x "$3"
