#!/usr/bin/python3
# SPDX-License-Identifier: BSD-3-Clause
"""Decodes a chunk of format version 1. Written from src/kernels/format.md alone, to keep that document honest: the names, the order and
the section numbers are the document's. It checks all that section 8 asks for, and nothing else; speed is no aim.

usage: decode.py CHUNK OUT      decodes the file CHUNK into the file OUT
       decode.py --verify DIR   checks every vector that DIR/index.json names
"""
import hashlib
import json
import pathlib
import struct
import sys
from collections import namedtuple

import numpy as np


class Refused(Exception):
    """A chunk that a decoder must refuse; `rule` is the number in section 8."""

    def __init__(self, rule, why):
        super().__init__(f"rule {rule}: {why}")
        self.rule = rule


# Section 2. size and low: bytes of a value and of its low part; e, m: bits of the exponent and of the head's mantissa.
Type = namedtuple("Type", "name size low e m")
TYPES = {
    1: Type("bf16", 2, 0, 8, 7),
    2: Type("fp32", 4, 2, 8, 7),
    3: Type("fp16", 2, 1, 5, 2),
    4: Type("fp64", 8, 6, 11, 4),
    5: Type("fp8_e4m3", 1, 0, 4, 3),
    6: Type("fp8_e5m2", 1, 0, 5, 2),
}
BYTES = 0

# Section 3. ranks: for each level, the places in the tile's table that its codes 0, 1, ... stand for.
Shape = namedtuple("Shape", "name widths groups blocks counts ranks")
SHAPES = {
    1: Shape("22228", (2, 2, 2, 2), 4, 2, 4, ((0, 1, 2), (4, 5, 6), (8, 9, 10), (12, 13, 14))),
    2: Shape("11238", (1, 1, 2, 3), 4, 2, 4, ((0,), (2,), (4, 5, 6), (8, 9, 10, 11, 12, 13, 14))),
    3: Shape("38", (3,), 4, 2, 1, ((8, 9, 10, 11, 12, 13, 14),)),
    4: Shape("dense", (2, 1, 1, 1, 1, 2, 2), 1, 16, 0,
             ((0, 1, 2), (4,), (5,), (6,), (7,), (8, 9, 10), (12, 13, 14))),
    5: Shape("columns", (2, 2, 2, 2), 4, 2, 4, ((0, 1, 2), (4, 5, 6), (8, 9, 10), (12, 13, 14))),
}
DENSE, COLUMNS = 4, 5
FP64 = 4

SMALL_TILES = 0x0400  # section 9; of the upper byte's flags version 1 has this one
HEADER = struct.Struct("<HBBBBHQQQQ8s")  # section 1
BLOCK = 1024  # values
CODED, RAW = 0, 1  # modes of a tile
FP64_MAX_BASE = 1792


def bits_of(data):
    """The bits of some bytes, bit 0 of byte 0 first. Of a plane's words: its bits in code order."""
    return np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").astype(np.uint32)


def from_planes(planes):
    """Numbers from their bits; planes[q] is the bit q of all of them."""
    return sum(plane << q for q, plane in enumerate(planes))


def positions(size, words):
    """Section 4: the value of a block at each code position, words after words and bit after bit; numbers past the end are padding."""
    w, b = np.divmod(np.arange(32 * words), 32)
    k, s = np.divmod(b, 4)
    if size == 1:
        return s // 2 * 16 * words + 16 * w + 8 * (s % 2) + k
    v = min(16 // size, 8)
    return s * 8 * words + k // v * v * words + v * w + k % v


class Decoder:
    def __init__(self, chunk, expected_length=None):
        self.chunk = chunk
        if len(chunk) < HEADER.size:
            raise Refused(1, f"{len(chunk)} bytes are less than a header")
        (magic, version, self.dtype, self.shape_id, header_units, self.flags, self.length, self.tail_length, _, _,
         self.trailing) = HEADER.unpack_from(chunk)
        if magic != 0x505A:
            raise Refused(1, f"magic {magic:#06x}")
        if version != 1:
            raise Refused(2, f"version {version}")
        if header_units != 3:
            raise Refused(2, f"header of {16 * header_units} bytes")
        if self.flags & 0xFF00 & ~SMALL_TILES:
            raise Refused(2, f"flags {self.flags:#06x}")
        if self.dtype != BYTES and self.dtype not in TYPES:
            raise Refused(2, f"type {self.dtype}")
        if self.shape_id != 0 and self.shape_id not in SHAPES:
            raise Refused(2, f"shape {self.shape_id}")
        if self.length > 2**63 - 1:
            raise Refused(3, "original_length is more than 2^63 - 1")
        if expected_length is not None and self.length != expected_length:
            raise Refused(3, f"original_length {self.length}, expected {expected_length}")
        if self.dtype == BYTES:
            if self.shape_id != 0 or self.tail_length != 0:
                raise Refused(4, "stored chunk with a shape or a tail")
            return
        if self.shape_id == 0:
            raise Refused(4, "coded chunk without a shape")
        if self.shape_id == DENSE and self.flags & SMALL_TILES:
            raise Refused(4, "shape dense with small tiles")
        if self.shape_id == COLUMNS and self.dtype == FP64:
            raise Refused(4, "shape columns with fp64")
        if self.length > 2**50:
            raise Refused(4, "coded chunk of more than 2^50 bytes")
        if self.tail_length % 4:
            raise Refused(4, f"tail_length {self.tail_length}")

    def decode(self):
        if self.dtype == BYTES:
            if self.length > len(self.chunk) - HEADER.size:
                raise Refused(5, "the stored bytes are not all there")
            return self.chunk[HEADER.size:HEADER.size + self.length]
        self.lay_out()
        exponents = np.empty(self.n, np.uint32)
        for tile in range(self.tiles):
            first = tile * self.tile_values
            count = min(self.tile_values, self.n - first)
            self.decode_tile(tile, exponents[first:first + count])
        if self.shape_id == COLUMNS:  # section 6
            bases = np.frombuffer(self.section["COLUMNS"], np.uint8)[np.arange(self.n) % BLOCK]
            exponents = exponents + bases & 2**self.type.e - 1
        return self.join(exponents)

    def lay_out(self):
        """Section 5: where the sections are."""
        self.type, self.shape = TYPES[self.dtype], SHAPES[self.shape_id]
        t, shape, n = self.type, self.shape, self.length // TYPES[self.dtype].size
        self.group_blocks = 1 if self.flags & SMALL_TILES else shape.blocks
        self.group_values = self.group_blocks * BLOCK
        self.tile_values = shape.groups * self.group_values
        self.n = n
        self.tiles = -(-n // self.tile_values)
        words, k = -(-n // 32), 1 + t.m
        sizes = {
            "COLUMNS": BLOCK if self.shape_id == COLUMNS else 0,
            "MANTISSA": n if k == 8 else 4 * k * words,
            "LOW": min(t.low, 2) * n,
            "LOW2": max(t.low - 2, 0) * n,
            "LEVEL1": 4 * shape.widths[0] * words,
            "COUNTS": 2 * shape.counts * -(-n // self.group_values),
            "TILES": 8 * self.tiles,
            "SYMBOLS": 16 * self.tiles,
            "TAIL": self.tail_length,
        }
        self.section = {}
        at = HEADER.size
        for name, size in sizes.items():
            at = -(-at // 16) * 16
            if size > len(self.chunk) - at:
                raise Refused(5, f"section {name} does not fit in the {len(self.chunk)} bytes")
            self.section[name] = self.chunk[at:at + size]
            at += size

    def blocks(self, count):
        """The plane words of each block of `count` values."""
        return [-(-min(BLOCK, count - at) // 32) for at in range(0, count, BLOCK)]

    def planes_of(self, name, p, first_block, blocks):
        """Numbers of p bits from a section of p planes, in code order."""
        numbers, at = [], 128 * p * first_block
        for words in blocks:
            planes = [bits_of(self.section[name][at + 4 * words * q:at + 4 * words * (q + 1)]) for q in range(p)]
            numbers.append(from_planes(planes))
            at += 4 * p * words
        return np.concatenate(numbers)

    def to_elements(self, codes, blocks, out):
        """Brings numbers from the code order of `blocks` into the order of values, without padding."""
        at = 0
        for j, words in enumerate(blocks):
            block = np.empty(32 * words, np.uint32)
            block[positions(self.type.size, words)] = codes[at:at + 32 * words]
            values = out[j * BLOCK:(j + 1) * BLOCK]
            values[:] = block[:len(values)]
            at += 32 * words

    def decode_tile(self, tile, out):
        """Writes the exponents of a tile to out; in shape columns its symbols."""
        shape, w1 = self.shape, self.shape.widths[0]
        blocks = self.blocks(len(out))
        groups = -(-len(blocks) // self.group_blocks)
        counts_at = 2 * shape.counts * shape.groups * tile
        counts = self.section["COUNTS"][counts_at:counts_at + 2 * shape.counts * groups]
        symbols = self.section["SYMBOLS"][16 * tile:16 * tile + 16]
        entry, = struct.unpack_from("<Q", self.section["TILES"], 8 * tile)
        offset, length, mode = entry & 2**48 - 1, entry >> 48 & 2**14 - 1, entry >> 62
        if mode not in (CODED, RAW):
            raise Refused(6, f"tile {tile} has mode {mode}")
        if 4 * (offset + length) > self.tail_length:
            raise Refused(7, f"tile {tile} has its part of the tail at {4 * offset}..{4 * (offset + length)}")
        part = self.section["TAIL"][4 * offset:4 * (offset + length)]
        # section 7
        sequence = 4 * (self.type.e - w1) * sum(blocks)
        in_front = counts[:len(counts) // 4 * 4] + symbols
        raw_length = max(sequence - len(in_front), 0)
        if mode == RAW and len(part) != raw_length or len(part) > raw_length:
            raise Refused(8, f"tile {tile} of mode {mode} has a part of {len(part)} bytes, a raw one {raw_length}")
        level1 = self.planes_of("LEVEL1", w1, tile * shape.groups * self.group_blocks, blocks)
        if mode == CODED:
            codes = self.decode_levels(tile, level1, blocks, counts, symbols, part)
        else:
            rest = bits_of((in_front + part)[:sequence]).reshape(self.type.e - w1, -1)
            codes = level1 | from_planes(rest) << w1
        self.to_elements(codes, blocks, out)

    def decode_levels(self, tile, codes, blocks, counts, symbols, part):
        """Section 6: the exponents of a coded tile from its codes at level 1; in code order."""
        shape = self.shape
        base = symbols[3] + 256 * symbols[15]
        if self.type.name == "fp64" and base > FP64_MAX_BASE:
            raise Refused(9, f"tile {tile} has the base {base}")
        group_words = [sum(blocks[at:at + self.group_blocks]) for at in range(0, len(blocks), self.group_blocks)]
        group = np.repeat(np.arange(len(group_words)), [32 * words for words in group_words])
        if shape.counts > 0:
            counts = np.frombuffer(counts, "<u2").reshape(-1, shape.counts).astype(np.uint32)
            before = np.column_stack([32 * np.array(group_words), counts[:, :-1]])
            if (counts > before).any():
                raise Refused(10, f"tile {tile} has a count greater than the one before it")
            totals = counts.sum(axis=0)
            bits = sum(int(w * c) for w, c in zip(shape.widths[1:], totals))
            self.check_length(tile, part, bits, int(totals[-1]))

        stream = bits_of(part)
        symbol = np.zeros(len(codes), np.uint32)
        active = np.arange(len(codes))  # code positions that have a code at this level
        at = 0
        for level, (width, ranks) in enumerate(zip(shape.widths, shape.ranks)):
            if level > 0:
                if at + width * len(active) > len(stream):  # shape dense: the length cannot be that of section 6
                    raise Refused(10, f"tile {tile} has a part of {len(part)} bytes, its level {level + 1} needs more")
                codes = from_planes(stream[at:at + width * len(active)].reshape(width, -1))
                at += width * len(active)
            escapes = codes == 2**width - 1
            table = np.array([symbols[rank] for rank in ranks], np.uint32)
            symbol[active[~escapes]] = table[codes[~escapes]]
            active = active[escapes]
            if shape.counts > 0:
                found = np.bincount(group[active], minlength=len(group_words))
                if (found != counts[:, level]).any():
                    raise Refused(11, f"tile {tile} has other escapes from level {level + 1} than its counts say")
        if shape.counts == 0:
            self.check_length(tile, part, at, len(active))
        raw_at = -(-at // 8)
        symbol[active] = np.frombuffer(part[raw_at:raw_at + len(active)], np.uint8)
        if self.type.name == "fp64":
            return np.where(symbol == 0, 0, np.where(symbol == 255, 2047, base + symbol))
        return symbol & 2**self.type.e - 1

    @staticmethod
    def check_length(tile, part, bits, raw_symbols):
        length = -(-(-(-bits // 8) + raw_symbols) // 4) * 4
        if len(part) != length:
            raise Refused(10, f"tile {tile} has a part of {len(part)} bytes, section 6 says {length}")

    def join(self, exponents):
        """Section 2: values from their parts."""
        t, n = self.type, self.n
        if t.m == 7:
            mantissa = np.frombuffer(self.section["MANTISSA"], np.uint8).astype(np.uint64)
        else:
            blocks = self.blocks(n)
            mantissa = np.empty(n, np.uint64)
            if n > 0:
                self.to_elements(self.planes_of("MANTISSA", 1 + t.m, 0, blocks), blocks, mantissa)
        sign, mantissa = mantissa >> np.uint64(t.m), mantissa & np.uint64(2**t.m - 1)
        head = sign << np.uint64(t.e + t.m) | exponents.astype(np.uint64) << np.uint64(t.m) | mantissa
        values = head << np.uint64(8 * t.low)
        for name, low_bytes, shift in (("LOW", min(t.low, 2), 8 * max(t.low - 2, 0)), ("LOW2", max(t.low - 2, 0), 0)):
            if low_bytes > 0:
                values |= np.frombuffer(self.section[name], f"<u{low_bytes}").astype(np.uint64) << np.uint64(shift)
        return values.astype(f"<u{t.size}").tobytes() + self.trailing[:self.length % t.size]


def decode(chunk, expected_length=None):
    """The original bytes of a chunk. Raises Refused."""
    return Decoder(bytes(chunk), expected_length).decode()


def verify(folder):
    """Decodes all vectors of folder, prints what differs; true if nothing does."""
    failures = 0
    index = json.loads((folder / "index.json").read_text())

    def result(vector, problem):
        nonlocal failures
        failures += problem is not None
        print(f"not ok {vector['file']}: {problem}" if problem else f"ok {vector['file']}")

    for vector in index["good"]:
        chunk = (folder / vector["file"]).read_bytes()
        try:
            original = decode(chunk, vector["original_length"])
            same = hashlib.sha256(original).hexdigest() == vector["sha256"]
            result(vector, None if same else "decodes to other bytes than the original")
        except Refused as refused:
            result(vector, f"refused: {refused}")
    for vector in index["bad"]:
        chunk = (folder / vector["file"]).read_bytes()
        try:
            decode(chunk, vector["original_length"])
            result(vector, f"not refused; it violates rule {vector['rule']}")
        except Refused as refused:
            result(vector, None if refused.rule == vector["rule"] else f"violates rule {vector['rule']}, refused for {refused}")
    if not index["good"] or not index["bad"]:
        print("not ok the index names no vectors")
        failures += 1
    return failures == 0


def main(arguments):
    if len(arguments) != 2 or arguments[0] in ("-h", "--help"):
        print(__doc__, file=sys.stderr)
        return 2
    if arguments[0] == "--verify":
        return 0 if verify(pathlib.Path(arguments[1])) else 1
    try:
        original = decode(pathlib.Path(arguments[0]).read_bytes())
    except Refused as refused:
        print(f"{arguments[0]} refused: {refused}", file=sys.stderr)
        return 1
    pathlib.Path(arguments[1]).write_bytes(original)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
