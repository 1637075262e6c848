// SPDX-License-Identifier: BSD-3-Clause
// Wire format of a chunk in constants and helpers; format.md says the same in words and is the
// authority. Knows no instruction set: host and device code share it.
#ifndef ZIP_KERNELS_FORMAT_H
#define ZIP_KERNELS_FORMAT_H

#include <bit>
#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__) || defined(__HIPCC__)
#define ZIP_HOST_DEVICE __host__ __device__
#else
#define ZIP_HOST_DEVICE
#endif

namespace zip::format {

static_assert(std::endian::native == std::endian::little,
              "the wire is little endian, and so are all hosts that have a codec so far");

constexpr uint16_t MAGIC = 0x505a; // "ZP" in memory
constexpr uint8_t VERSION = 1;

// Types on the wire. Only those of zip_dtype_t are coded by version 1; the others are reserved.
enum Dtype : uint8_t {
    DTYPE_BYTES = 0,
    DTYPE_BF16 = 1,
    DTYPE_FP32 = 2,
    DTYPE_FP16 = 3,
    DTYPE_FP64 = 4,
    DTYPE_E4M3 = 5,
    DTYPE_E5M2 = 6,
};

// Widths of the levels of the cascade. Version 1 has one; the others are reserved.
enum Shape : uint8_t {
    SHAPE_STORED = 0,
    SHAPE_22228 = 1,
    SHAPE_12238 = 2,
    SHAPE_38 = 3,
    SHAPE_DENSE = 4, // 2,1,1,1,2,2,8
};

// A decoder may ignore a flag of FLAGS_OPTIONAL that it does not know, and must refuse any other.
constexpr uint16_t FLAGS_OPTIONAL = 0x00ff;
constexpr uint16_t FLAG_CHECKSUM = 0x0001;   // `checksum` is set
constexpr uint16_t FLAG_REFERENCE = 0x0100;  // coded against `reference_version`
constexpr uint16_t FLAG_COL_TABLES = 0x0200; // a table per column instead of per tile

struct ChunkHeader {
    uint16_t magic;
    uint8_t version;
    uint8_t dtype;
    uint8_t shape;
    uint8_t header_units; // length of this header in units of HEADER_UNIT
    uint16_t flags;
    uint64_t original_length;
    uint64_t tail_length; // bytes of the tail, the chunk's last section
    uint64_t checksum;
    uint64_t reference_version;
    uint8_t trailing[8]; // the original's bytes behind the last whole value
};
static_assert(sizeof(ChunkHeader) == 48);

constexpr size_t HEADER_UNIT = 16;
constexpr size_t HEADER_LENGTH = sizeof(ChunkHeader);
constexpr size_t SECTION_ALIGN = 16;

// Longest original of a chunk: lengths stay positive as int64_t, and sums of sections fit a
// uint64_t.
constexpr uint64_t MAX_LENGTH = (uint64_t(1) << 63) - 1;
// Longest original that is coded rather than stored: its tail's offsets fit 48 bits of 4-byte
// words.
constexpr uint64_t MAX_CODED_LENGTH = uint64_t(1) << 50;

constexpr uint32_t WORD_VALUES = 32; // code positions in one word of a bit plane
constexpr uint32_t BLOCK_WORDS = 32; // words a plane in a full block
constexpr uint32_t BLOCK_VALUES = WORD_VALUES * BLOCK_WORDS;
constexpr uint32_t GROUP_BLOCKS = 2;
constexpr uint32_t GROUP_VALUES = BLOCK_VALUES * GROUP_BLOCKS;
constexpr uint32_t TILE_GROUPS = 4;
constexpr uint32_t TILE_BLOCKS = GROUP_BLOCKS * TILE_GROUPS;
constexpr uint32_t TILE_VALUES = GROUP_VALUES * TILE_GROUPS;

// Shape 22228: four levels of 2-bit codes, three symbols and an escape each; then a raw exponent.
constexpr uint32_t LEVELS = 4;
constexpr uint32_t LEVEL_SYMBOLS = 3;
constexpr uint32_t TABLE_SYMBOLS = LEVELS * LEVEL_SYMBOLS;
constexpr uint8_t ESCAPE = 3;
constexpr uint8_t RANK_RAW = 15; // level << 2 | code of a raw exponent: level 3, ESCAPE

// Codes of a group behind level 1: levels 2, 3, 4, raw exponents.
struct GroupCounts {
    uint16_t codes[LEVELS];
};
static_assert(sizeof(GroupCounts) == 8);

// Symbols of a tile by level << 2 | code; the four escapes are 0.
struct TileSymbols {
    uint8_t symbol[4 * LEVELS];
};
static_assert(sizeof(TileSymbols) == 16);

// Tile header: bits 0..47 offset in the tail, 48..61 length there, both in words; 62..63 mode.
enum TileMode : uint8_t { TILE_CODED = 0, TILE_RAW = 1 };
constexpr uint32_t TAIL_WORD = 4;

ZIP_HOST_DEVICE constexpr uint64_t tile_header(uint64_t offset, uint32_t words, TileMode mode)
{
    return offset | uint64_t(words) << 48 | uint64_t(mode) << 62;
}
ZIP_HOST_DEVICE constexpr uint64_t tile_offset(uint64_t header)
{
    return header & ((uint64_t(1) << 48) - 1);
}
ZIP_HOST_DEVICE constexpr uint32_t tile_words(uint64_t header)
{
    return uint32_t(header >> 48) & 0x3fff;
}
ZIP_HOST_DEVICE constexpr uint32_t tile_mode(uint64_t header)
{
    return uint32_t(header >> 62);
}

// Bytes of a value of a type that this version codes, else 0.
ZIP_HOST_DEVICE constexpr uint32_t value_size(uint8_t dtype)
{
    return dtype == DTYPE_BF16 ? 2 : dtype == DTYPE_FP32 ? 4 : 0;
}

ZIP_HOST_DEVICE constexpr uint64_t div_up(uint64_t a, uint64_t b)
{
    return a / b + (a % b != 0);
}

// Bytes that level 1 takes for that many values; also those of a raw tile's exponents kept there.
ZIP_HOST_DEVICE constexpr uint64_t level1_bytes(uint64_t values)
{
    return 2 * sizeof(uint32_t) * div_up(values, WORD_VALUES);
}

// Words that a raw tile of that many values has in the tail: the exponents that level 1's space
// does not hold.
ZIP_HOST_DEVICE constexpr uint32_t raw_tile_words(uint32_t values)
{
    const uint64_t kept = level1_bytes(values);
    return values > kept ? uint32_t(div_up(values - kept, TAIL_WORD)) : 0;
}

// Words of a coded tile's tail; `codes` are the sums over its groups.
ZIP_HOST_DEVICE constexpr uint32_t coded_tile_words(const uint32_t (&codes)[LEVELS])
{
    return uint32_t(2 * (div_up(codes[0], 32) + div_up(codes[1], 32) + div_up(codes[2], 32)) +
                    div_up(codes[3], TAIL_WORD));
}

// Where everything is in a coded chunk. Offsets are from the chunk's first byte; all are known
// before encoding.
struct Layout {
    uint64_t values, trailing; // whole values; bytes behind them
    uint64_t blocks, groups, tiles;
    uint64_t raw;          // uint8_t[values]: sign << 7 | upper 7 bits of the mantissa
    uint64_t raw2;         // fp32: uint16_t[values], lower 16 bits
    uint64_t level1;       // uint32_t[words][2]
    uint64_t counts;       // GroupCounts[groups]
    uint64_t tile_headers; // uint64_t[tiles]
    uint64_t symbols;      // TileSymbols[tiles]
    uint64_t tail;
};

// `dtype` must have a value_size, `length` be at most MAX_LENGTH.
ZIP_HOST_DEVICE constexpr Layout layout_of(uint8_t dtype, uint64_t length)
{
    Layout l{};
    const uint64_t size = value_size(dtype);
    if (size == 0) {
        return l;
    }
    l.values = length / size;
    l.trailing = length % size;
    l.blocks = div_up(l.values, BLOCK_VALUES);
    l.groups = div_up(l.blocks, GROUP_BLOCKS);
    l.tiles = div_up(l.groups, TILE_GROUPS);
    uint64_t at = HEADER_LENGTH;
    auto section = [&at](uint64_t bytes) {
        const uint64_t start = at;
        at += div_up(bytes, SECTION_ALIGN) * SECTION_ALIGN;
        return start;
    };
    l.raw = section(l.values);
    l.raw2 = section(dtype == DTYPE_FP32 ? 2 * l.values : 0);
    l.level1 = section(level1_bytes(l.values));
    l.counts = section(sizeof(GroupCounts) * l.groups);
    l.tile_headers = section(sizeof(uint64_t) * l.tiles);
    l.symbols = section(sizeof(TileSymbols) * l.tiles);
    l.tail = at;
    return l;
}

// Value, counted from its block's first, at code position `bit` of plane word `word` in a block of
// `words` words.
ZIP_HOST_DEVICE constexpr uint32_t value_at(uint8_t dtype, uint32_t words, uint32_t word,
                                            uint32_t bit)
{
    const uint32_t stripe = bit & 3, k = bit >> 2;
    return dtype == DTYPE_FP32 ? (2 * stripe + (k >> 2)) * (4 * words) + 4 * word + (k & 3)
                               : stripe * (8 * words) + 8 * word + k;
}

} // namespace zip::format
#endif
