# SPDX-License-Identifier: BSD-3-Clause
"""Rows of the JSON that this project's benchmarks write: reading them, and naming what they measured."""
import json
import math
import os
import sys


def fail(text):
    sys.exit(f"{os.path.basename(sys.argv[0])}: error: {text}")


def size_label(size, _=None):
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size:g} B"


def number(row, key):
    """A positive number, or None."""
    value = row.get(key)
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return value if good and value > 0 else None


def load(paths):
    """The documents of the files, and all their rows."""
    docs, rows = [], []
    for path in paths:
        try:
            with open(path, encoding="utf-8") as file:
                doc = json.load(file)
        except (OSError, ValueError) as error:
            fail(f"cannot read {path}: {error}")
        found = doc.get("rows") if isinstance(doc, dict) else None
        if not isinstance(found, list):
            fail(f"{path} has no rows: it is not the JSON of one of this project's benchmarks")
        docs.append(doc)
        rows += [r for r in found if isinstance(r, dict)]
    return docs, rows


def codec_rows(rows):
    """Those of `zipperf codec` and its like."""
    return [r for r in rows if r.get("op") and number(r, "size") and number(r, "us_median") and number(r, "gbps_median")]


def p2p_rows(docs):
    """Those of `zipperf p2p`."""
    rows = [r for doc in docs if doc.get("tool") == "zipperf p2p" for r in doc["rows"] if isinstance(r, dict)]
    return [r for r in rows if r.get("strategy") and number(r, "size") and number(r, "gbps_median")]


def how(row):
    """What a codec's row is beside codec, operation and chunk, as words."""
    parts = []
    if row.get("shape") not in (None, "default"):
        parts.append(row["shape"] + (f" ({row['picked']})" if row.get("picked") else ""))
    if row.get("tiles") == "small":
        parts.append("small tiles")
    if row.get("simd"):
        parts.append(row["simd"])
    if (row.get("threads") or 1) > 1:
        parts.append(f"{row['threads']} threads")
    if row.get("max_sms"):
        parts.append(f"{row['max_sms']} SMs")
    if row.get("misalign"):
        parts.append(f"{row['misalign']} bytes misaligned")
    if row.get("batch"):
        parts.append(f"batch of {row['batch']}")
    if row.get("chunks_in") == "host":
        parts.append("chunks in pinned host memory")
    if row.get("progress") is False:
        parts.append("no progress words")
    return ", ".join(parts)


def chunk_label(row):
    chunk = row.get("chunk")
    return "" if chunk is None else "one chunk" if chunk == 0 else size_label(chunk) + " chunks"


def fastest(rows):
    return min(rows, key=lambda r: r["us_median"]) if rows else None
