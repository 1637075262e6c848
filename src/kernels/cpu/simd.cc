// SPDX-License-Identifier: BSD-3-Clause
// Fast coder: a block's bit planes in vectors, its escapes in 64-bit words. Compiled once for each
// instruction set.
//
// A type's part takes values apart into bytes in element order (exponents, and sign and mantissa
// where those are planes) and puts them together again; a shape's part codes exponents in code
// order. Between them the bytes of a block are moved "by code position": bit b of plane word w is
// byte (b & 3) * STRIPE + 8 * w + (b >> 2).
#include <algorithm>

#include "kernels/cpu/internal.h"
#include "kernels/cpu/table.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/simd.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#if HWY_TARGET != HWY_SCALAR
#include "kernels/cpu/planes-inl.h"
#include "kernels/cpu/sample-inl.h"
#include "kernels/cpu/shapes-inl.h"
#include "kernels/cpu/types-inl.h"
#endif

HWY_BEFORE_NAMESPACE();
namespace zip::cpu {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR
// No vectors: the reference does it.
size_t EncodeTiles(Coding coding, const uint8_t *src, size_t length, uint8_t *dst, size_t limit)
{
    return encode_scalar(coding, src, length, dst, limit);
}

zip_status_t DecodeTiles(const ChunkHeader &header, const uint8_t *src, uint8_t *dst)
{
    return decode_scalar(header, src, dst);
}
#else

// Moves a tile's bytes from element order to code positions, where they are or to `buffer`. Returns
// where they are then.
const uint8_t *to_positions(const TypeOps &type, uint8_t *elements, uint32_t values,
                            uint8_t *buffer)
{
    uint8_t *const to = type.in_place ? elements : buffer;
    for (uint32_t b = type.in_place ? values / BLOCK_VALUES : 0; b * BLOCK_VALUES < values; ++b) {
        uint8_t block[BLOCK_VALUES];
        const uint32_t n = std::min(values - b * BLOCK_VALUES, BLOCK_VALUES);
        const uint8_t *from = elements + b * BLOCK_VALUES;
        if (type.in_place) {
            memcpy(block, from, n);
            from = block;
        }
        type.to_positions(from, n, to + b * BLOCK_VALUES);
    }
    return to;
}

// The inverse: bytes that were written to positions_of() get to `elements`.
uint8_t *positions_of(const TypeOps &type, uint8_t *elements, uint8_t *buffer)
{
    return type.in_place ? elements : buffer;
}
void from_positions(const TypeOps &type, uint32_t values, uint8_t *elements, uint8_t *buffer)
{
    for (uint32_t b = type.in_place ? values / BLOCK_VALUES : 0; b * BLOCK_VALUES < values; ++b) {
        uint8_t block[BLOCK_VALUES];
        const uint8_t *from = buffer + b * BLOCK_VALUES;
        if (type.in_place) {
            memcpy(block, elements + b * BLOCK_VALUES, BLOCK_VALUES);
            from = block;
        }
        type.from_positions(from, std::min(values - b * BLOCK_VALUES, BLOCK_VALUES),
                            elements + b * BLOCK_VALUES);
    }
}

// Planes of a raw tile's exponents: plane q of block b is at plane(q) + that block's words.
class RawPlanes {
public:
    RawPlanes(Coding coding, uint32_t values)
        : words_(uint32_t(div_up(values, WORD_VALUES))), w1_(shape_traits(coding.shape).width[0]),
          counts_(tile_counts_bytes(coding, values) / TAIL_WORD * TAIL_WORD),
          all_(raw_words(coding, values) * TAIL_WORD)
    {
    }
    // Addresses of a block's planes from `first` on.
    template <class Byte>
    void planes(uint32_t block, uint32_t first, uint32_t n, Byte *level1, Byte **to)
    {
        const uint32_t words = block_words(block);
        for (uint32_t q = first; q < first + n; ++q)
            to[q - first] =
                    q < w1_ ? level1 + sizeof(uint32_t) * (w1_ * BLOCK_WORDS * block + q * words)
                            : words_of_others_ +
                                      sizeof(uint32_t) * ((q - w1_) * words_ + block * BLOCK_WORDS);
    }
    uint32_t block_words(uint32_t block) const
    {
        return std::min(words_ - block * BLOCK_WORDS, BLOCK_WORDS);
    }

    // What LEVEL1 does not hold: first in COUNTS, then in SYMBOLS, then in the tail.
    void store(uint8_t *counts, size_t counts_bytes, uint8_t *symbols, uint8_t *tail) const
    {
        memset(counts, 0, counts_bytes);
        memset(symbols, 0, TABLE_BYTES);
        const uint32_t a = std::min(all_, counts_), b = std::min(all_ - a, TABLE_BYTES);
        memcpy(counts, words_of_others_, a);
        memcpy(symbols, words_of_others_ + a, b);
        memcpy(tail, words_of_others_ + a + b, all_ - a - b);
    }
    void load(const uint8_t *counts, const uint8_t *symbols, const uint8_t *tail)
    {
        const uint32_t a = std::min(all_, counts_), b = std::min(all_ - a, TABLE_BYTES);
        snapshot(words_of_others_, counts, a);
        snapshot(words_of_others_ + a, symbols, b);
        snapshot(words_of_others_ + a + b, tail, all_ - a - b);
    }

private:
    const uint32_t words_, w1_, counts_, all_;
    uint8_t words_of_others_[raw_words({DTYPE_FP64, SHAPE_11238, false}, MAX_TILE_VALUES) *
                             TAIL_WORD];
};

// fp64: the base of a tile, from the same sample; exponents in element order.
uint32_t choose_base(const uint16_t *exponents, uint32_t values, uint8_t shape)
{
    uint32_t largest = 0;
    const auto take = [&](uint32_t v) {
        const uint32_t e = exponents[v];
        largest = e < format::FP64_INFINITY ? std::max(largest, e) : largest;
    };
    if (values < format::SAMPLE_ALL_BELOW) {
        for (uint32_t v = 0; v < values; ++v)
            take(v);
        return format::fp64_base(largest);
    }
    for (uint32_t b = 0; b * BLOCK_VALUES < values; ++b) {
        const uint32_t n = std::min(values - b * BLOCK_VALUES, BLOCK_VALUES);
        const uint32_t words = uint32_t(div_up(n, WORD_VALUES));
        for (uint32_t w = 0; w < words; ++w) {
            for (uint32_t s = 0; s < STRIPES; ++s) {
                for (uint32_t flip = 0; flip <= (shape == SHAPE_DENSE ? 16u : 0u); flip += 16) {
                    const uint32_t v =
                            value_at(DTYPE_FP64, words, w, format::sample_bit(b, w, s) ^ flip);
                    if (v < n)
                        take(b * BLOCK_VALUES + v);
                }
            }
        }
    }
    return format::fp64_base(largest);
}

// fp64: symbols of exponents. Returns whether all have one.
bool symbols_of_fp64(const uint16_t *exponents, uint32_t values, uint32_t base, uint8_t *symbols)
{
    const Bytes d8;
    const Halves d16;
    const uint32_t step = uint32_t(hn::Lanes(d8)), half = step / 2;
    const HalfVec zero = hn::Zero(d16), infinity = hn::Set(d16, format::FP64_INFINITY);
    const HalfVec above = hn::Set(d16, uint16_t(base)), most = hn::Set(d16, 254);
    uint32_t v = 0;
    HalfVec wrong = zero;
    const auto symbols_at = [&](const uint16_t *e16) {
        const HalfVec e = hn::LoadU(d16, e16), s = hn::Sub(e, above);
        const auto is_zero = hn::Eq(e, zero), is_infinity = hn::Eq(e, infinity);
        // s - 1 wraps where e <= base
        const HalfVec too_far = hn::VecFromMask(
                d16, hn::Gt(hn::Sub(s, hn::Set(d16, 1)), hn::Sub(most, hn::Set(d16, 1))));
        wrong = hn::Or(wrong, hn::IfThenZeroElse(hn::Or(is_zero, is_infinity), too_far));
        return hn::IfThenElse(is_infinity, hn::Set(d16, 255), hn::IfThenZeroElse(is_zero, s));
    };
    for (; v + step <= values; v += step) {
        const auto a = hn::BitCast(d8, symbols_at(exponents + v));
        const auto b = hn::BitCast(d8, symbols_at(exponents + v + half));
        hn::StoreU(hn::ConcatEven(d8, b, a), d8, symbols + v);
    }
    bool ok = hn::AllTrue(d16, hn::Eq(wrong, zero));
    for (; v < values; ++v) {
        const uint32_t s = format::fp64_symbol(exponents[v], base);
        ok &= s != format::NO_SYMBOL;
        symbols[v] = uint8_t(s);
    }
    return ok;
}

void fp64_exponents_of(const uint8_t *symbols, uint32_t values, uint32_t base, uint16_t *exponents)
{
    const Halves d16;
    const hn::Half<Bytes> half8;
    const uint32_t step = uint32_t(hn::Lanes(d16));
    const HalfVec zero = hn::Zero(d16), above = hn::Set(d16, uint16_t(base));
    uint32_t v = 0;
    for (; v + step <= values; v += step) {
        const HalfVec s = hn::PromoteTo(d16, hn::LoadU(half8, symbols + v));
        const HalfVec e = hn::IfThenElse(hn::Eq(s, hn::Set(d16, 255)),
                                         hn::Set(d16, format::FP64_INFINITY), hn::Add(s, above));
        hn::StoreU(hn::IfThenZeroElse(hn::Eq(s, zero), e), d16, exponents + v);
    }
    for (; v < values; ++v)
        exponents[v] = uint16_t(format::fp64_exponent(symbols[v], base));
}

// Shape columns: symbols of a tile's exponents, where they are, or (kBack) exponents of its
// symbols.
template <bool kBack>
void move_by_columns(const uint8_t (&base)[format::COLUMNS], uint32_t exponent_bits,
                     uint32_t values, uint8_t *exponents)
{
    const Bytes d8;
    const uint32_t step = uint32_t(hn::Lanes(d8));
    const auto mask = hn::Set(d8, uint8_t((1u << exponent_bits) - 1));
    for (uint32_t v = 0; v < values; v += step) {
        const auto x = hn::LoadU(d8, exponents + v);
        const auto b = hn::LoadU(d8, base + v % format::COLUMNS);
        hn::StoreU(hn::And(kBack ? hn::Add(x, b) : hn::Sub(x, b), mask), d8, exponents + v);
    }
}

// How a chunk is coded, and where its sections are.
struct Plan {
    Plan(Coding c, uint64_t length)
        : coding(c), l(layout_of(c, length)), traits(type_traits(c.dtype)),
          shape(shape_traits(c.shape)), type(type_ops_of(c.dtype)), ops(shape_ops_of(c.shape)),
          tile_size(tile_values(c)), group_blocks(group_values(c) / BLOCK_VALUES)
    {
    }
    const Coding coding;
    const Layout l;
    const TypeTraits traits;
    const ShapeTraits shape;
    const TypeOps &type;
    const ShapeOps ops;
    const uint32_t tile_size, group_blocks;
};

// A tile's share of the values, and of each section of a chunk that is written or read.
template <class Byte>
struct Tile {
    Tile(const Plan &p, Byte *chunk, uint64_t t)
        : first(t * p.tile_size),
          values(uint32_t(std::min<uint64_t>(p.l.values - first, p.tile_size))),
          blocks(uint32_t(div_up(values, BLOCK_VALUES))),
          mantissa_planes(p.traits.mantissa_is_bytes() ? 0 : p.traits.sign_mantissa_bits()),
          level1(chunk + p.l.level1 + plane_bytes(p.shape.width[0], first)),
          counts(chunk + p.l.counts + sizeof(uint16_t) * p.shape.counts * p.shape.tile_groups * t),
          header(chunk + p.l.tile_headers + sizeof(uint64_t) * t),
          symbols(chunk + p.l.symbols + sizeof(TileSymbols) * t)
    {
        const uint32_t low = std::min(p.traits.low_bytes, 2u);
        sections = {chunk + p.l.mantissa +
                            (mantissa_planes == 0 ? first : plane_bytes(mantissa_planes, first)),
                    chunk + p.l.low + low * first,
                    chunk + p.l.low2 + (p.traits.low_bytes - low) * first};
    }
    // Addresses of a block's planes of sign and mantissa, and the words of one.
    uint32_t planes(uint32_t block, Byte **to) const
    {
        const uint32_t n = std::min(values - block * BLOCK_VALUES, BLOCK_VALUES);
        const uint32_t words = uint32_t(div_up(n, WORD_VALUES));
        for (uint32_t q = 0; q < mantissa_planes; ++q)
            to[q] = sections.mantissa +
                    sizeof(uint32_t) * (mantissa_planes * BLOCK_WORDS * block + q * words);
        return words;
    }

    // Its signs and mantissas, for a whole tile.
    Ahead::Range mantissa() const
    {
        return {sections.mantissa, mantissa_planes == 0
                                           ? BLOCK_VALUES
                                           : uint32_t(plane_bytes(mantissa_planes, BLOCK_VALUES))};
    }

    const uint64_t first;
    const uint32_t values, blocks, mantissa_planes;
    TypeSections<Byte> sections; // `mantissa`: also where its planes are
    Byte *const level1, *const counts, *const header, *const symbols;
};

size_t EncodeTiles(Coding coding, const uint8_t *src, size_t length, uint8_t *dst, size_t limit)
{
    if (length > MAX_CODED_LENGTH)
        return 0;
    const Plan p(coding, length);
    const Layout &l = p.l;
    if (l.tail >= limit)
        return 0;
    const TypeOps &type = p.type;

    ChunkHeader header = new_header(coding, length);
    clear_section_padding(coding, l, dst);
    snapshot(header.trailing, src + length - l.trailing, l.trailing);

    uint8_t column_base[format::COLUMNS];
    if (coding.shape == SHAPE_COLUMNS) {
        choose_bases(coding.dtype, src, l.values, column_base);
        memcpy(dst + l.columns, column_base, sizeof(column_base));
    }

    TileBytes bytes;
    TailWriter tail;
    alignas(64) uint8_t buffer[MAX_TILE_VALUES];
    for (uint64_t t = 0; t < l.tiles; ++t) {
        const Tile<uint8_t> tile(p, dst, t);
        const uint32_t values = tile.values;
        type.split(src + p.traits.size * tile.first, values, tile.sections, bytes);
        if (coding.shape == SHAPE_COLUMNS)
            move_by_columns<false>(column_base, p.traits.exponent_bits, values, bytes.exponent);
        // What the next tile, if it is whole, writes and reads: not all that of a long type, whose
        // tiles would push each other out of the caches.
        Ahead ahead;
        if (p.traits.size <= 4 && (t + 2) * p.tile_size <= l.values) {
            const Tile<uint8_t> next(p, dst, t + 1);
            ahead.near[0] = next.mantissa();
            ahead.near[1] = {next.sections.low, p.traits.low_bytes * BLOCK_VALUES};
            if (p.traits.size <= 2)
                ahead.far = {src + p.traits.size * next.first, p.traits.size * BLOCK_VALUES};
        }

        uint32_t base = 0;
        bool all_have_symbols = true;
        if (coding.dtype == DTYPE_FP64) {
            base = choose_base(bytes.exponent64, values, coding.shape);
            all_have_symbols = symbols_of_fp64(bytes.exponent64, values, base, bytes.exponent);
        }
        Sample sample;
        if (values < format::SAMPLE_ALL_BELOW) {
            for (uint32_t v = 0; v < values; ++v)
                sample.add(bytes.exponent[v]);
        }
        const uint8_t *const positions = to_positions(type, bytes.exponent, values, buffer);
        if (values >= format::SAMPLE_ALL_BELOW)
            sample_tile(type, positions, values, coding.shape, sample);

        uint8_t *const out = dst + l.tail + header.tail_length;
        RankedSymbols ranked;
        bool coded = all_have_symbols;
        uint32_t words = raw_tail_words(coding, values);
        if (coded) {
            ranked = sample.rank(coding.shape);
            coded = p.ops.encode(type, positions, values, p.group_blocks, RankTable(ranked),
                                 words * TAIL_WORD, tile.level1, ahead, tail);
            words = coded ? coded_tail_words(tail.bits, tail.raws) : words;
        }
        if (l.tail + header.tail_length + words * TAIL_WORD >= limit)
            return 0;
        if (coded) {
            memcpy(out, tail.bytes, size_t(words) * TAIL_WORD);
            if (coding.dtype == DTYPE_FP64) {
                ranked.table.symbol[format::BASE_LOW] = uint8_t(base);
                ranked.table.symbol[format::BASE_HIGH] = uint8_t(base >> 8);
            }
            memcpy(tile.symbols, &ranked.table, sizeof(ranked.table));
            uint16_t group_counts[MAX_GROUPS * MAX_COUNTS];
            uint32_t n = 0;
            for (uint32_t g = 0; g * p.group_blocks < tile.blocks; ++g) {
                for (uint32_t c = 0; c < p.shape.counts; ++c)
                    group_counts[n++] =
                            uint16_t(tail.end[c][g] - (g == 0 ? 0 : tail.end[c][g - 1]));
            }
            memcpy(tile.counts, group_counts, sizeof(uint16_t) * n);
        } else {
            RawPlanes raw(coding, values);
            const uint32_t bits = p.traits.exponent_bits;
            uint8_t *planes[8];
            if (coding.dtype == DTYPE_FP64) { // two bytes
                for (uint32_t part = 0; part < 2; ++part) {
                    for (uint32_t v = 0; v < values; ++v)
                        bytes.exponent[v] = uint8_t(bytes.exponent64[v] >> 8 * part);
                    const uint8_t *const at = to_positions(type, bytes.exponent, values, buffer);
                    for (uint32_t b = 0; b < tile.blocks; ++b) {
                        raw.planes(b, 8 * part, part == 0 ? 8 : bits - 8, tile.level1, planes);
                        store_planes(at + b * BLOCK_VALUES, part == 0 ? 8 : bits - 8,
                                     raw.block_words(b), planes);
                    }
                }
            } else {
                for (uint32_t b = 0; b < tile.blocks; ++b) {
                    raw.planes(b, 0, bits, tile.level1, planes);
                    store_planes(positions + b * BLOCK_VALUES, bits, raw.block_words(b), planes);
                }
            }
            raw.store(tile.counts, tile_counts_bytes(coding, values), tile.symbols, out);
        }
        const uint64_t tile_word =
                tile_header(header.tail_length / TAIL_WORD, words, coded ? TILE_CODED : TILE_RAW);
        memcpy(tile.header, &tile_word, sizeof(tile_word));
        header.tail_length += words * TAIL_WORD;

        if (tile.mantissa_planes != 0) {
            const uint8_t *const at = to_positions(type, bytes.sign_mantissa, values, buffer);
            for (uint32_t b = 0; b < tile.blocks; ++b) {
                uint8_t *planes[8];
                const uint32_t block_words = tile.planes(b, planes);
                store_planes(at + b * BLOCK_VALUES, tile.mantissa_planes, block_words, planes);
            }
        }
    }
    memcpy(dst, &header, sizeof(header));
    return l.tail + header.tail_length;
}

zip_status_t DecodeTiles(const ChunkHeader &header, const uint8_t *src, uint8_t *dst)
{
    const Coding coding = coding_of(header);
    const Plan p(coding, header.original_length);
    const Layout &l = p.l;
    const TypeOps &type = p.type;
    memcpy(dst + header.original_length - l.trailing, header.trailing, l.trailing);
    uint8_t column_base[format::COLUMNS];
    if (coding.shape == SHAPE_COLUMNS)
        snapshot(column_base, src + l.columns, sizeof(column_base));

    TileBytes bytes;
    TailReader tail;
    alignas(64) uint8_t buffer[MAX_TILE_VALUES];
    for (uint64_t t = 0; t < l.tiles; ++t) {
        const Tile<const uint8_t> tile(p, src, t);
        const uint32_t values = tile.values;
        const auto tile_word = snapshot_value<uint64_t>(tile.header);
        if (!valid_tile_header(coding, tile_word, values, header.tail_length))
            return ZIP_ERR_CORRUPT;
        const uint8_t *const in = src + l.tail + TAIL_WORD * tile_offset(tile_word);
        uint8_t *const to = dst + p.traits.size * tile.first;

        if (tile_mode(tile_word) == TILE_CODED) {
            CodedTile coded = {values,      p.group_blocks, tile_words(tile_word),
                               tile.level1, tile.counts,    in,
                               {}};
            snapshot(&coded.symbols, tile.symbols, sizeof(coded.symbols));
            const uint32_t base = coded.symbols.symbol[format::BASE_LOW] +
                                  256u * coded.symbols.symbol[format::BASE_HIGH];
            if (coding.dtype == DTYPE_FP64 && base > format::MAX_BASE)
                return ZIP_ERR_CORRUPT;
            Ahead ahead;
            if (values == p.tile_size) {
                ahead.near[0] = tile.mantissa();
                ahead.far = {to, p.traits.size * BLOCK_VALUES};
            }
            if (!p.ops.decode(coded, ahead, tail, positions_of(type, bytes.exponent, buffer)))
                return ZIP_ERR_CORRUPT;
            from_positions(type, values, bytes.exponent, buffer);
            if (coding.dtype == DTYPE_FP64)
                fp64_exponents_of(bytes.exponent, values, base, bytes.exponent64);
        } else {
            RawPlanes raw(coding, values);
            raw.load(tile.counts, tile.symbols, in);
            const uint32_t bits = p.traits.exponent_bits;
            for (uint32_t part = 0; 8 * part < bits; ++part) {
                const uint32_t n = std::min(bits - 8 * part, 8u);
                uint8_t *const at = positions_of(type, bytes.exponent, buffer);
                for (uint32_t b = 0; b < tile.blocks; ++b) {
                    const uint8_t *planes[8];
                    raw.planes(b, 8 * part, n, tile.level1, planes);
                    load_planes(planes, n, raw.block_words(b), at + b * BLOCK_VALUES);
                }
                from_positions(type, values, bytes.exponent, buffer);
                for (uint32_t v = 0; coding.dtype == DTYPE_FP64 && v < values; ++v)
                    bytes.exponent64[v] = uint16_t((part == 0 ? 0 : bytes.exponent64[v]) |
                                                   bytes.exponent[v] << 8 * part);
            }
        }
        if (tile.mantissa_planes != 0) {
            uint8_t *const at = positions_of(type, bytes.sign_mantissa, buffer);
            for (uint32_t b = 0; b < tile.blocks; ++b) {
                const uint8_t *planes[8];
                const uint32_t block_words = tile.planes(b, planes);
                load_planes(planes, tile.mantissa_planes, block_words, at + b * BLOCK_VALUES);
            }
            from_positions(type, values, bytes.sign_mantissa, buffer);
        }
        if (coding.shape == SHAPE_COLUMNS)
            move_by_columns<true>(column_base, p.traits.exponent_bits, values, bytes.exponent);
        type.merge(values, tile.sections, bytes, to);
    }
    return ZIP_OK;
}

#endif // HWY_SCALAR
} // namespace HWY_NAMESPACE
} // namespace zip::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zip::cpu {

HWY_EXPORT(EncodeTiles);
HWY_EXPORT(DecodeTiles);

size_t encode_simd(Coding coding, const uint8_t *src, size_t length, uint8_t *dst, size_t limit)
{
    return HWY_DYNAMIC_DISPATCH(EncodeTiles)(coding, src, length, dst, limit);
}

zip_status_t decode_simd(const ChunkHeader &header, const uint8_t *src, uint8_t *dst)
{
    return HWY_DYNAMIC_DISPATCH(DecodeTiles)(header, src, dst);
}

} // namespace zip::cpu
#endif
