#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
# Leaves of x86-64 programs and shared objects what is loaded, byte for byte, and drops the rest: debug information, symbol and section
# tables, and the holes of megabytes that patchelf leaves in libraries which were linked for large pages. (strip breaks programs that
# patchelf has changed.)
# usage: shrink_elf.py FILE...
import struct
import sys

PAGE = 4096
PT_NULL, PT_LOAD = 0, 1
FIELDS = ("type", "flags", "offset", "vaddr", "paddr", "filesz", "memsz", "align")
ENTRY = struct.Struct("<IIQQQQQQ")


def shrink(old):
    if old[:6] != b"\x7fELF\x02\x01" or struct.unpack_from("<H", old, 18)[0] != 62:
        raise ValueError("not an x86-64 ELF file")
    (table,) = struct.unpack_from("<Q", old, 32)
    size, count = struct.unpack_from("<HH", old, 54)
    entries = [dict(zip(FIELDS, ENTRY.unpack_from(old, table + i * size))) for i in range(count)]
    loads = [entry for entry in entries if entry["type"] == PT_LOAD]
    if size != ENTRY.size or not loads or loads[0]["offset"] != 0 or loads[0]["filesz"] < 64:
        raise ValueError("its headers are not part of what is loaded")
    new = bytearray()
    for load in loads:
        if (load["offset"] - load["vaddr"]) % PAGE:
            raise ValueError("a segment that is not aligned to pages")
        load["place"] = len(new) + (load["vaddr"] - len(new)) % PAGE
        new += bytes(load["place"] - len(new)) + old[load["offset"] : load["offset"] + load["filesz"]]

    def moved(offset, length):
        for load in loads:
            if load["offset"] <= offset and offset + length <= load["offset"] + load["filesz"]:
                return offset - load["offset"] + load["place"]
        return None

    new_table = moved(table, size * count)
    if new_table is None:
        raise ValueError("its program headers are not part of what is loaded")
    places = [entry.get("place", moved(entry["offset"], entry["filesz"])) for entry in entries]
    for i, (entry, place) in enumerate(zip(entries, places)):
        if place is None and entry["filesz"] > 0:
            entry["type"] = PT_NULL  # a note that is not loaded
        if entry["type"] == PT_LOAD:
            entry["align"] = PAGE
        entry["offset"] = place or 0
        ENTRY.pack_into(new, new_table + i * size, *(entry[field] for field in FIELDS))
    struct.pack_into("<QQ", new, 32, new_table, 0)  # no section headers
    struct.pack_into("<HHH", new, 58, 64, 0, 0)
    return new


for name in sys.argv[1:]:
    with open(name, "rb") as file:
        contents = file.read()
    try:
        contents = shrink(contents)
    except (ValueError, struct.error) as error:
        sys.exit(f"shrink_elf.py: error: {name}: {error}")
    with open(name, "wb") as file:
        file.write(contents)
