// SPDX-License-Identifier: BSD-3-Clause
// Wire format of a chunk in constants and helpers; format.md says the same in words and is the
// authority. Knows no instruction set: host and device code share it.
#ifndef ZIP_KERNELS_FORMAT_H
#define ZIP_KERNELS_FORMAT_H

#include <bit>
#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define ZIP_HOST_DEVICE __host__ __device__
#elif defined(__HIP__)
#define ZIP_HOST_DEVICE __attribute__((host, device))
#else
#define ZIP_HOST_DEVICE
#endif

namespace zip::format {

static_assert(std::endian::native == std::endian::little,
              "the wire is little endian, and so are all hosts that have a codec so far");

constexpr uint16_t MAGIC = 0x505a; // "ZP" in memory
constexpr uint8_t VERSION = 1;

enum Dtype : uint8_t {
    DTYPE_BYTES = 0,
    DTYPE_BF16 = 1,
    DTYPE_FP32 = 2,
    DTYPE_FP16 = 3,
    DTYPE_FP64 = 4,
    DTYPE_E4M3 = 5,
    DTYPE_E5M2 = 6,
    DTYPES
};

enum Shape : uint8_t {
    SHAPE_STORED = 0,
    SHAPE_22228 = 1,
    SHAPE_11238 = 2,
    SHAPE_38 = 3,
    SHAPE_DENSE = 4,   // 2,1,1,1,1,2,2,8
    SHAPE_COLUMNS = 5, // 22228 of symbols that are told from a base a column
    SHAPES
};

// A decoder may ignore a flag of FLAGS_OPTIONAL that it does not know, and must refuse any other.
constexpr uint16_t FLAGS_OPTIONAL = 0x00ff;
constexpr uint16_t FLAG_CHECKSUM = 0x0001;    // reserved: `checksum` is set
constexpr uint16_t FLAG_REFERENCE = 0x0100;   // reserved: coded against `reference_version`
constexpr uint16_t FLAG_SMALL_TILES = 0x0400; // groups of one block

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

constexpr uint32_t WORD_VALUES = 32; // code positions in a plane word
constexpr uint32_t BLOCK_WORDS = 32; // words a plane in a full block
constexpr uint32_t BLOCK_VALUES = WORD_VALUES * BLOCK_WORDS;
constexpr uint32_t STRIPES = 4; // of a block: bit & 3 of a code position
constexpr uint32_t MAX_TILE_BLOCKS = 16;
constexpr uint32_t MAX_TILE_VALUES = MAX_TILE_BLOCKS * BLOCK_VALUES;
constexpr uint32_t TAIL_WORD = 4;

// How a type's values are split; format.md section 2.
struct TypeTraits {
    uint32_t size;          // bytes of a value; 0: no coded type
    uint32_t low_bytes;     // below the head
    uint32_t exponent_bits; // E
    uint32_t mantissa_bits; // M, of the head

    // Bits of sign and mantissa, K.
    ZIP_HOST_DEVICE constexpr uint32_t sign_mantissa_bits() const { return 1 + mantissa_bits; }
    // Whether MANTISSA holds bytes rather than planes.
    ZIP_HOST_DEVICE constexpr bool mantissa_is_bytes() const { return mantissa_bits == 7; }
    // Neighbouring values that a code position's lane holds, V.
    ZIP_HOST_DEVICE constexpr uint32_t run() const { return size <= 2 ? 8 : 16 / size; }
};

ZIP_HOST_DEVICE constexpr TypeTraits type_traits(uint8_t dtype)
{
    switch (dtype) {
    case DTYPE_BF16:
        return {2, 0, 8, 7};
    case DTYPE_FP32:
        return {4, 2, 8, 7};
    case DTYPE_FP16:
        return {2, 1, 5, 2};
    case DTYPE_FP64:
        return {8, 6, 11, 4};
    case DTYPE_E4M3:
        return {1, 0, 4, 3};
    case DTYPE_E5M2:
        return {1, 0, 5, 2};
    default:
        return {0, 0, 0, 0};
    }
}

constexpr uint32_t MAX_LEVELS = 7;
constexpr uint32_t MAX_COUNTS = 4;
constexpr uint32_t TABLE_BYTES = 16;
constexpr uint8_t RANK_RAW = 15; // rank index of a raw symbol

// A cascade; format.md section 3.
struct ShapeTraits {
    uint32_t levels; // 0: no coded shape
    uint8_t width[MAX_LEVELS];
    uint32_t symbols;
    uint8_t rank[TABLE_BYTES]; // rank index of the symbols, commonest first
    uint32_t counts;           // of a group
    uint32_t tile_groups, group_blocks;
};

ZIP_HOST_DEVICE constexpr ShapeTraits shape_traits(uint8_t shape)
{
    switch (shape) {
    case SHAPE_22228:
    case SHAPE_COLUMNS:
        return {4, {2, 2, 2, 2}, 12, {0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14}, 4, 4, 2};
    case SHAPE_11238:
        return {4, {1, 1, 2, 3}, 12, {0, 2, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14}, 4, 4, 2};
    case SHAPE_38:
        return {1, {3}, 7, {8, 9, 10, 11, 12, 13, 14}, 1, 4, 2};
    case SHAPE_DENSE:
        return {7, {2, 1, 1, 1, 1, 2, 2}, 13, {0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 12, 13, 14}, 0, 1,
                16};
    default:
        return {};
    }
}

// The level (from 0) at which a rank index ends, and its code there. RANK_RAW: the last level and
// its escape. An index that the shape does not use has level MAX_LEVELS.
struct LevelCode {
    uint32_t level, code;
};
ZIP_HOST_DEVICE constexpr LevelCode level_code(uint8_t shape, uint32_t rank)
{
    const ShapeTraits t = shape_traits(shape);
    uint32_t s = 0;
    for (uint32_t l = 0; l < t.levels; ++l) {
        for (uint32_t c = 0; c + 1 < (1u << t.width[l]); ++c, ++s) {
            if (t.rank[s] == rank)
                return {l, c};
        }
    }
    if (rank == RANK_RAW && t.levels != 0)
        return {t.levels - 1, (1u << t.width[t.levels - 1]) - 1};
    return {MAX_LEVELS, 0};
}

// Bytes of SYMBOLS that hold fp64's base, low byte first, and the base's largest value.
constexpr uint32_t BASE_LOW = 3, BASE_HIGH = 15;
constexpr uint32_t MAX_BASE = 1792;
constexpr uint32_t BASE_BELOW_LARGEST = 200; // where an encoder puts it
constexpr uint32_t FP64_INFINITY = 2047;     // exponent of infinities and NaNs

// Symbol of an fp64 exponent under a base, or NO_SYMBOL.
constexpr uint32_t NO_SYMBOL = 256;
ZIP_HOST_DEVICE constexpr uint32_t fp64_symbol(uint32_t exponent, uint32_t base)
{
    return exponent == 0                               ? 0
           : exponent == FP64_INFINITY                 ? 255
           : exponent > base && exponent - base <= 254 ? exponent - base
                                                       : NO_SYMBOL;
}
ZIP_HOST_DEVICE constexpr uint32_t fp64_exponent(uint32_t symbol, uint32_t base)
{
    return symbol == 0 ? 0 : symbol == 255 ? FP64_INFINITY : base + symbol;
}
ZIP_HOST_DEVICE constexpr uint32_t fp64_base(uint32_t largest_exponent)
{
    return largest_exponent <= BASE_BELOW_LARGEST ? 0
           : largest_exponent - BASE_BELOW_LARGEST > MAX_BASE
                   ? MAX_BASE
                   : largest_exponent - BASE_BELOW_LARGEST;
}

// Shape columns: a chunk's columns, one for each place in a block, whose bases are of a byte; and
// of how many blocks an encoder takes the mean.
constexpr uint32_t COLUMNS = BLOCK_VALUES;
constexpr uint32_t COLUMN_SAMPLES = 16;
// Number k (below column_samples()) of the sampled blocks of a chunk that has so many.
ZIP_HOST_DEVICE constexpr uint32_t column_samples(uint64_t blocks)
{
    return blocks < COLUMN_SAMPLES ? uint32_t(blocks) : COLUMN_SAMPLES;
}
ZIP_HOST_DEVICE constexpr uint64_t column_sample(uint64_t blocks, uint32_t k)
{
    return blocks < COLUMN_SAMPLES ? k : k * blocks / COLUMN_SAMPLES;
}
// Symbols of a tile by rank index.
struct TileSymbols {
    uint8_t symbol[TABLE_BYTES];
};
static_assert(sizeof(TileSymbols) == 16);

// Tile header: bits 0..47 offset in the tail, 48..61 length there, both in words; 62..63 mode.
enum TileMode : uint8_t { TILE_CODED = 0, TILE_RAW = 1 };

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

// What a chunk's header says of how it is coded.
struct Coding {
    uint8_t dtype, shape;
    bool small_tiles;
};

ZIP_HOST_DEVICE constexpr bool valid_coding(Coding c)
{
    return type_traits(c.dtype).size != 0 && shape_traits(c.shape).levels != 0 &&
           !(c.small_tiles && c.shape == SHAPE_DENSE) &&
           !(c.dtype == DTYPE_FP64 && c.shape == SHAPE_COLUMNS);
}

// Bytes of a value of a type that can be coded, else 0.
ZIP_HOST_DEVICE constexpr uint32_t value_size(uint8_t dtype)
{
    return type_traits(dtype).size;
}
ZIP_HOST_DEVICE constexpr uint32_t group_values(Coding c)
{
    return (c.small_tiles ? 1 : shape_traits(c.shape).group_blocks) * BLOCK_VALUES;
}
ZIP_HOST_DEVICE constexpr uint32_t tile_values(Coding c)
{
    return shape_traits(c.shape).tile_groups * group_values(c);
}

ZIP_HOST_DEVICE constexpr uint64_t div_up(uint64_t a, uint64_t b)
{
    return a / b + (a % b != 0); // NOLINT(*DivideZero): no size of a valid coding is 0
}

// Bytes of `planes` planes of that many values, which start at a block.
ZIP_HOST_DEVICE constexpr uint64_t plane_bytes(uint32_t planes, uint64_t values)
{
    return planes * sizeof(uint32_t) * div_up(values, WORD_VALUES);
}

// Bytes of COUNTS of one tile of that many values.
ZIP_HOST_DEVICE constexpr uint32_t tile_counts_bytes(Coding c, uint32_t values)
{
    return uint32_t(sizeof(uint16_t) * shape_traits(c.shape).counts *
                    div_up(values, group_values(c)));
}

// Words of a raw tile that LEVEL1 does not hold, and those of them that are in COUNTS and SYMBOLS.
ZIP_HOST_DEVICE constexpr uint32_t raw_words(Coding c, uint32_t values)
{
    return uint32_t(plane_bytes(type_traits(c.dtype).exponent_bits - shape_traits(c.shape).width[0],
                                values) /
                    TAIL_WORD);
}
ZIP_HOST_DEVICE constexpr uint32_t raw_words_before_tail(Coding c, uint32_t values)
{
    return tile_counts_bytes(c, values) / TAIL_WORD + TABLE_BYTES / TAIL_WORD;
}
// Words of its part of the tail.
ZIP_HOST_DEVICE constexpr uint32_t raw_tail_words(Coding c, uint32_t values)
{
    const uint32_t all = raw_words(c, values), before = raw_words_before_tail(c, values);
    return all > before ? all - before : 0;
}

// Words of a coded tile's part of the tail: `bits` in the streams of level 2 and up, then raw
// symbols.
ZIP_HOST_DEVICE constexpr uint32_t coded_tail_words(uint32_t bits, uint32_t raws)
{
    return ((bits + 7) / 8 + raws + TAIL_WORD - 1) / TAIL_WORD;
}

// Where everything is in a coded chunk. Offsets are from the chunk's first byte; all are known
// before encoding.
struct Layout {
    uint64_t values, trailing; // whole values; bytes behind them
    uint64_t groups, tiles;
    uint64_t columns, mantissa, low, low2, level1, counts, tile_headers, symbols, tail;
};

// The coding must be valid, `length` at most MAX_LENGTH.
ZIP_HOST_DEVICE constexpr Layout layout_of(Coding c, uint64_t length)
{
    Layout l{};
    const TypeTraits type = type_traits(c.dtype);
    const ShapeTraits shape = shape_traits(c.shape);
    if (type.size == 0 || shape.levels == 0)
        return l;
    l.values = length / type.size;
    l.trailing = length % type.size;
    l.groups = div_up(l.values, group_values(c));
    l.tiles = div_up(l.values, tile_values(c));
    uint64_t at = HEADER_LENGTH;
    auto section = [&at](uint64_t bytes) {
        const uint64_t start = at;
        at += div_up(bytes, SECTION_ALIGN) * SECTION_ALIGN;
        return start;
    };
    l.columns = section(c.shape == SHAPE_COLUMNS ? COLUMNS : 0);
    l.mantissa = section(
            type.mantissa_is_bytes() ? l.values : plane_bytes(type.sign_mantissa_bits(), l.values));
    l.low = section(l.values * (type.low_bytes > 2 ? 2 : type.low_bytes));
    l.low2 = section(l.values * (type.low_bytes > 2 ? type.low_bytes - 2 : 0));
    l.level1 = section(plane_bytes(shape.width[0], l.values));
    l.counts = section(sizeof(uint16_t) * shape.counts * l.groups);
    l.tile_headers = section(sizeof(uint64_t) * l.tiles);
    l.symbols = section(sizeof(TileSymbols) * l.tiles);
    l.tail = at;
    return l;
}

// Most bytes that the tail of a coded chunk can have: all tiles raw.
ZIP_HOST_DEVICE constexpr uint64_t max_tail(Coding c, uint64_t values)
{
    const uint32_t tile = tile_values(c);
    const uint64_t whole = values / tile; // NOLINT(*DivideZero): the coding is valid
    return TAIL_WORD *
           (whole * raw_tail_words(c, tile) + raw_tail_words(c, uint32_t(values - whole * tile)));
}

// Value, counted from its block's first, at code position `bit` of plane word `word` in a block of
// `words` words.
ZIP_HOST_DEVICE constexpr uint32_t value_at(uint8_t dtype, uint32_t words, uint32_t word,
                                            uint32_t bit)
{
    const uint32_t s = bit & 3, k = bit >> 2;
    if (value_size(dtype) == 1)
        return (s >> 1) * 16 * words + 16 * word + 8 * (s & 1) + k;
    const uint32_t run = type_traits(dtype).run();
    return s * 8 * words + k / run * run * words + run * word + k % run;
}

// Sample of a tile that an encoder ranks symbols by; format.md section 10. `word` and `block`
// count in the block and the tile; the sampled bit of that word in stripe `s`.
constexpr uint32_t SAMPLE_ALL_BELOW = 1024;   // values of a tile
constexpr uint32_t SAMPLE_MANY_SYMBOLS = 64;  // above which the rare ones are left out:
constexpr uint32_t SAMPLE_RARE_DIVISOR = 128; // those below 1 in so many
ZIP_HOST_DEVICE constexpr uint32_t sample_bit(uint32_t block, uint32_t word, uint32_t s)
{
    return ((5 * word + s + 4 * block) & 7) * 4 + s;
}
ZIP_HOST_DEVICE constexpr uint32_t sample_rare(uint32_t samples)
{
    return samples / SAMPLE_RARE_DIVISOR > 1 ? samples / SAMPLE_RARE_DIVISOR : 1;
}

} // namespace zip::format
#endif
