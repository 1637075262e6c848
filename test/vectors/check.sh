#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# The decoder that is written from format.md alone agrees with every vector, and the vectors are those that make_vectors writes.
set -uo pipefail
vectors=$(cd "$(dirname "$0")" && pwd)
[ $# -eq 1 ] || { echo "usage: test/vectors/check.sh BUILD" >&2; exit 2; }
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
status=0
"$vectors/decode.py" --verify "$vectors" || status=1
if "$1/test/vectors/make_vectors" "$made" && diff -r -x '*.py' -x '*.md' -x '*.cc' -x '*.h' -x '*.sh' -x __pycache__ "$vectors" "$made"; then
    echo "ok vectors are those that make_vectors writes"
else
    echo "not ok vectors: make_vectors writes others"
    status=1
fi
exit $status
