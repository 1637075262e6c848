// SPDX-License-Identifier: BSD-3-Clause
// The shapes' part of the fast coder: exponents by code position to the cascade of codes, and back.
// Compiled once for each instruction set: the guard flips each time that Highway includes simd.cc.
#if defined(ZIP_KERNELS_CPU_SHAPES_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef ZIP_KERNELS_CPU_SHAPES_INL_H
#undef ZIP_KERNELS_CPU_SHAPES_INL_H
#else
#define ZIP_KERNELS_CPU_SHAPES_INL_H
#endif

#include <algorithm>

#include "hwy/highway.h"
#include "kernels/cpu/internal.h"
#include "kernels/cpu/planes-inl.h"
#include "kernels/cpu/types-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zip::cpu {
namespace HWY_NAMESPACE {

// The code, at level kLevel (from 0), of values whose rank index has these planes; the escape is
// all ones. Only values that have a code at that level matter; index 0 has the code 0.
template <uint8_t kShape, uint32_t kLevel, class T, class Or>
HWY_INLINE void codes_of(const T (&p)[4], Or either, T (&code)[3])
{
    if constexpr (kShape == SHAPE_38) {
        code[0] = p[0], code[1] = p[1], code[2] = p[2];
    } else if constexpr (kShape == SHAPE_11238) {
        if constexpr (kLevel == 0)
            code[0] = either(p[1], either(p[2], p[3]));
        else if constexpr (kLevel == 1)
            code[0] = either(p[2], p[3]);
        else if constexpr (kLevel == 2)
            code[0] = either(p[0], p[3]), code[1] = either(p[1], p[3]);
        else
            code[0] = p[0], code[1] = p[1], code[2] = p[2];
    } else if constexpr (kLevel == 0) { // 22228 and dense
        const T escape = either(p[2], p[3]);
        code[0] = either(p[0], escape), code[1] = either(p[1], escape);
    } else if constexpr (kShape == SHAPE_22228) {
        if constexpr (kLevel == 1)
            code[0] = either(p[0], p[3]), code[1] = either(p[1], p[3]);
        else if constexpr (kLevel == 2)
            code[0] = either(p[0], p[2]), code[1] = either(p[1], p[2]);
        else
            code[0] = p[0], code[1] = p[1];
    } else {
        if constexpr (kLevel == 1)
            code[0] = either(p[0], either(p[1], p[3]));
        else if constexpr (kLevel == 2)
            code[0] = either(p[1], p[3]);
        else if constexpr (kLevel == 3)
            code[0] = either(p[0], p[3]);
        else if constexpr (kLevel == 4)
            code[0] = p[3];
        else if constexpr (kLevel == 5)
            code[0] = either(p[0], p[2]), code[1] = either(p[1], p[2]);
        else
            code[0] = p[0], code[1] = p[1];
    }
}

// The planes of the rank indices of values with these codes at level kLevel. `deeper`: the planes
// of those that escape from it, 0 elsewhere.
template <uint8_t kShape, uint32_t kLevel>
HWY_INLINE void ranks_of_codes(const uint64_t (&code)[3], uint64_t escape,
                               const uint64_t (&deeper)[4], uint64_t (&p)[4])
{
    constexpr uint32_t width = shape_traits(kShape).width[kLevel];
    // The rank indices of the level's codes are, or differ from, the first by the code.
    constexpr auto first_rank = [] {
        uint32_t symbol = 0;
        for (uint32_t l = 0; l < kLevel; ++l)
            symbol += (1u << shape_traits(kShape).width[l]) - 1;
        return uint32_t(shape_traits(kShape).rank[symbol]);
    }();
    ZIP_UNROLL
    for (uint32_t q = 0; q < 4; ++q) {
        p[q] = deeper[q];
        if (first_rank >> q & 1)
            p[q] |= ~escape;
        if (width > 1 && q < width)
            p[q] |= code[q] & ~escape;
    }
}

template <uint32_t kWidth>
HWY_INLINE uint64_t escapes_of(const uint64_t (&code)[3])
{
    uint64_t escape = code[0];
    ZIP_UNROLL
    for (uint32_t q = 1; q < kWidth; ++q)
        escape &= code[q];
    return escape;
}

constexpr uint32_t MAX_GROUPS = 4; // of a tile

// A coded tile's part of the tail while it grows, and the counts of its groups.
struct TailWriter {
    // Behind level 1 a value has at most 8 bits (shape 4) and a raw symbol.
    uint8_t bytes[2 * MAX_TILE_VALUES + 2 * SLOP];
    uint32_t bits;                        // of the streams
    uint32_t end[MAX_COUNTS][MAX_GROUPS]; // of each column of COUNTS: sums up to a group's end
    Streams streams[2];                   // of two levels in turn
    uint8_t raw[MAX_TILE_VALUES];
    uint32_t raws;

    HWY_INLINE void or_bits(uint32_t at, uint64_t x)
    {
        uint8_t *const to = bytes + (at >> 3);
        store64(to, load64(to) | x << (at & 7));
        to[8] |= uint8_t(x >> 1 >> (63 - (at & 7)));
    }
};

// Codes the `n` values that have a code at level kLevel >= 1, whose planes are in a stream, and
// then those that escape from it.
template <uint8_t kShape, uint32_t kLevel>
void write_level(TailWriter &tail, uint32_t n, uint32_t groups)
{
    constexpr ShapeTraits S = shape_traits(kShape);
    constexpr uint32_t width = S.width[kLevel];
    const Streams &in = tail.streams[kLevel & 1];
    Streams &out = tail.streams[(kLevel + 1) & 1];
    const uint32_t first = tail.bits;
    tail.bits += width * n;
    // or_bits() needs zeros up to the last bit's word.
    memset(tail.bytes + (first + 7) / 8, 0, (tail.bits + 7) / 8 + SLOP - (first + 7) / 8);

    BitWriter<4> deeper;
    uint32_t escapes = 0, group = 0;
    for (uint32_t i = 0; i < n; i += 64) {
        const uint64_t p[4] = {load64(in[0] + i / 8), load64(in[1] + i / 8), load64(in[2] + i / 8),
                               load64(in[3] + i / 8)};
        uint64_t code[3];
        codes_of<kShape, kLevel>(
                p, [](uint64_t a, uint64_t b) { return a | b; }, code);
        ZIP_UNROLL
        for (uint32_t q = 0; q < width; ++q)
            tail.or_bits(first + q * n + i, code[q]);
        const uint64_t escape = escapes_of<width>(code);
        if constexpr (S.counts != 0) {
            for (; group < groups && tail.end[kLevel - 1][group] < i + 64; ++group)
                tail.end[kLevel][group] =
                        escapes +
                        count_bits(escape &
                                   ((uint64_t(1) << (tail.end[kLevel - 1][group] - i)) - 1));
        }
        const uint32_t count = count_bits(escape);
        if constexpr (kLevel + 1 < S.levels) {
            const BitSelector at(escape);
            deeper.put({at.compress(p[0]), at.compress(p[1]), at.compress(p[2]), at.compress(p[3])},
                       count, out);
        }
        escapes += count;
    }
    if constexpr (S.counts != 0) {
        for (; group < groups; ++group)
            tail.end[kLevel][group] = escapes;
    }
    if constexpr (kLevel + 1 < S.levels) {
        deeper.finish(out);
        write_level<kShape, kLevel + 1>(tail, escapes, groups);
    }
}

// Codes a tile: LEVEL1 at `level1`, the rest in `tail`, whole. `positions` are its exponents by
// code position. Returns false if that takes `most` bytes of the tail or more; it may stop before
// the end then.
template <uint8_t kShape>
bool encode_shape(const TypeOps &type, const uint8_t *positions, uint32_t values,
                  uint32_t group_blocks, const RankTable &table, uint32_t most, uint8_t *level1,
                  const Ahead &ahead, TailWriter &tail)
{
    constexpr ShapeTraits S = shape_traits(kShape);
    constexpr uint32_t w1 = S.width[0];
    const Words d32;
    const uint32_t blocks = uint32_t(div_up(values, BLOCK_VALUES));
    BitWriter<4> escaped;
    tail.bits = tail.raws = 0;
    for (uint32_t b = 0; b < blocks; ++b) {
        const uint32_t n = std::min(values - b * BLOCK_VALUES, BLOCK_VALUES);
        const uint32_t words = uint32_t(div_up(n, WORD_VALUES));
        const uint8_t *const exponents = positions + b * BLOCK_VALUES;
        ahead.fetch(b);
        Planes ranks;
        rank_planes(exponents, table, ranks);
        if (HWY_UNLIKELY(n < BLOCK_VALUES)) { // padding has the code 0
            uint32_t exist[BLOCK_WORDS];
            type.values_of_words(n, exist);
            for (uint32_t w = 0; w < BLOCK_WORDS; ++w) {
                for (auto &plane : ranks.plane)
                    plane[w] &= exist[w];
            }
        }

        alignas(64) uint32_t code_words[3][BLOCK_WORDS], escape_words[BLOCK_WORDS];
        WordVec any_raw = hn::Zero(d32);
        for (uint32_t lane = 0; lane < BLOCK_WORDS; lane += uint32_t(hn::Lanes(d32))) {
            const WordVec p[4] = {
                    hn::Load(d32, ranks.plane[0] + lane), hn::Load(d32, ranks.plane[1] + lane),
                    hn::Load(d32, ranks.plane[2] + lane), hn::Load(d32, ranks.plane[3] + lane)};
            WordVec code[3] = {p[0], p[0], p[0]};
            codes_of<kShape, 0>(
                    p, [](WordVec x, WordVec y) { return hn::Or(x, y); }, code);
            WordVec escape = code[0];
            ZIP_UNROLL
            for (uint32_t q = 0; q < w1; ++q) {
                escape = hn::And(escape, code[q]);
                hn::Store(code[q], d32, code_words[q] + lane);
            }
            hn::Store(escape, d32, escape_words + lane);
            any_raw = hn::Or(any_raw, hn::And(hn::And(p[0], p[1]), hn::And(p[2], p[3])));
        }
        uint8_t *const to = level1 + plane_bytes(w1, BLOCK_VALUES) * b;
        if (HWY_LIKELY(words == BLOCK_WORDS)) {
            for (uint32_t q = 0; q < w1; ++q)
                memcpy(to + sizeof(code_words[0]) * q, code_words[q], sizeof(code_words[0]));
        } else {
            for (uint32_t q = 0; q < w1; ++q)
                memcpy(to + sizeof(uint32_t) * words * q, code_words[q], sizeof(uint32_t) * words);
        }

        if constexpr (S.levels > 1) {
            BitWriter<4> writer = escaped; // in registers
            for (uint32_t j = 0; j < PAIRS; ++j) {
                const uint64_t escape = load64(escape_words + 2 * j);
                const BitSelector at(escape);
                writer.put({at.compress(ranks.pair(0, j)), at.compress(ranks.pair(1, j)),
                            at.compress(ranks.pair(2, j)), at.compress(ranks.pair(3, j))},
                           count_bits(escape), tail.streams[1]);
            }
            escaped = writer;
        }
        if (!hn::AllTrue(d32, hn::Eq(any_raw, hn::Zero(d32)))) {
            SparseBits raw_at;
            for (uint32_t j = 0; j < PAIRS; ++j)
                raw_at.add(j, ranks.pair(0, j) & ranks.pair(1, j) & ranks.pair(2, j) &
                                      ranks.pair(3, j));
            uint8_t *const raw = tail.raw + tail.raws;
            raw_at.visit([&](uint32_t i, uint32_t position) { raw[i] = exponents[position]; });
            tail.raws += raw_at.size();
        }
        if (HWY_UNLIKELY(S.width[1] * escaped.size() / 8 + tail.raws >= most))
            return false; // whatever follows, the tail does not get shorter
        if constexpr (S.counts != 0) {
            if (b % group_blocks == group_blocks - 1 || b == blocks - 1)
                tail.end[0][b / group_blocks] = S.levels > 1 ? escaped.size() : tail.raws;
        }
    }
    if constexpr (S.levels > 1) {
        escaped.finish(tail.streams[1]);
        write_level<kShape, 1>(tail, escaped.size(), uint32_t(div_up(blocks, group_blocks)));
    }
    const uint32_t at = uint32_t(div_up(tail.bits, 8));
    memcpy(tail.bytes + at, tail.raw, tail.raws);
    memset(tail.bytes + at + tail.raws, 0, TAIL_WORD - 1);
    return coded_tail_words(tail.bits, tail.raws) * TAIL_WORD < most;
}

// A coded tile's part of the tail while it is read. Works on a private copy, since escapes are
// found to match the counts only after use: whatever level 1 says, a tile has as many escapes as
// code positions at most, and so far behind each stream's start there is memory.
struct TailReader {
    uint32_t codes[MAX_LEVELS + 1];       // at each level; behind the last one: raw symbols
    uint32_t start[MAX_LEVELS + 1];       // of each level's streams, in bits; their end
    uint32_t end[MAX_COUNTS][MAX_GROUPS]; // what COUNTS claims, summed up to a group's end
    Streams streams[2] = {};              // of two levels in turn
    // A valid coded tail is no longer than a raw tile's.
    uint8_t bytes[raw_words({DTYPE_FP64, SHAPE_11238, false}, MAX_TILE_VALUES) * TAIL_WORD +
                  MAX_TILE_VALUES + SLOP] = {};
};

// Reads the planes of the values that have a code at level kLevel >= 1 to streams[kLevel & 1].
// Returns whether the escapes are as many as COUNTS says.
template <uint8_t kShape, uint32_t kLevel>
bool read_level(TailReader &tail, uint32_t groups)
{
    constexpr ShapeTraits S = shape_traits(kShape);
    constexpr uint32_t width = S.width[kLevel];
    bool ok = true;
    if constexpr (kLevel + 1 < S.levels)
        ok = read_level<kShape, kLevel + 1>(tail, groups);
    const Streams &in = tail.streams[(kLevel + 1) & 1];
    Streams &out = tail.streams[kLevel & 1];
    const uint32_t n = tail.codes[kLevel], first = tail.start[kLevel];
    uint32_t escapes = 0, group = 0;
    for (uint32_t i = 0; i < n; i += 64) {
        uint64_t code[3] = {};
        ZIP_UNROLL
        for (uint32_t q = 0; q < width; ++q)
            code[q] = get_bits(tail.bytes, first + q * n + i, 64);
        const uint64_t escape = escapes_of<width>(code);
        if constexpr (S.counts != 0) {
            for (; group < groups && tail.end[kLevel - 1][group] < i + 64; ++group)
                ok &= tail.end[kLevel][group] ==
                      escapes +
                              count_bits(escape &
                                         ((uint64_t(1) << (tail.end[kLevel - 1][group] - i)) - 1));
        }
        uint64_t deeper[4] = {escape, escape, escape, escape}, p[4];
        const uint32_t count = count_bits(escape);
        if constexpr (kLevel + 1 < S.levels) {
            const BitSelector at(escape);
            ZIP_UNROLL
            for (uint32_t q = 0; q < 4; ++q)
                deeper[q] = at.expand(get_bits(in[q], escapes, 64));
        }
        escapes += count;
        ranks_of_codes<kShape, kLevel>(code, escape, deeper, p);
        ZIP_UNROLL
        for (uint32_t q = 0; q < 4; ++q)
            store64(out[q] + i / 8, p[q]);
    }
    if constexpr (S.counts != 0) {
        for (; group < groups; ++group)
            ok &= tail.end[kLevel][group] == escapes;
    }
    return ok;
}

// What a tile's header, table and sections say, as far as its shape's part needs it.
struct CodedTile {
    uint32_t values, group_blocks, tail_words;
    const uint8_t *level1, *counts, *tail;
    TileSymbols symbols;
};

// Takes what COUNTS claims. Returns false if that cannot be.
template <uint8_t kShape>
bool take_counts(const CodedTile &tile, TailReader &tail)
{
    constexpr ShapeTraits S = shape_traits(kShape);
    constexpr uint32_t columns = S.counts != 0 ? S.counts : 1;
    const uint32_t group_values = tile.group_blocks * BLOCK_VALUES;
    uint16_t counts[MAX_GROUPS][columns] = {};
    const uint32_t groups = uint32_t(div_up(tile.values, group_values));
    snapshot(counts, tile.counts, sizeof(counts[0]) * groups);
    uint32_t sum[columns] = {};
    bool ok = true;
    for (uint32_t g = 0; g < groups; ++g) {
        const uint32_t left = std::min(tile.values - g * group_values, group_values);
        uint32_t most = uint32_t(div_up(left, WORD_VALUES)) * WORD_VALUES;
        for (uint32_t c = 0; c < columns; ++c) {
            ok &= counts[g][c] <= most;
            most = counts[g][c];
            sum[c] += most;
            tail.end[c][g] = sum[c];
        }
    }
    uint32_t bits = 0;
    for (uint32_t l = 1; l < S.levels; ++l) {
        tail.codes[l] = sum[l - 1];
        tail.start[l] = bits;
        bits += S.width[l] * sum[l - 1];
    }
    tail.codes[S.levels] = sum[columns - 1];
    tail.start[S.levels] = bits;
    return ok && tile.tail_words == coded_tail_words(bits, sum[columns - 1]);
}

// Finds level by level how many codes there are, `n` at level 2. Returns false if they do not fit
// the tile's part of the tail.
template <uint8_t kShape>
bool count_codes(const CodedTile &tile, uint32_t n, TailReader &tail)
{
    constexpr ShapeTraits S = shape_traits(kShape);
    const uint32_t tail_bits = 8 * TAIL_WORD * tile.tail_words;
    uint32_t bits = 0;
    for (uint32_t l = 1; l < S.levels; ++l) {
        tail.codes[l] = n;
        tail.start[l] = bits;
        if (S.width[l] * n > tail_bits - bits)
            return false;
        uint32_t escapes = 0;
        for (uint32_t i = 0; i < n; i += 64) {
            uint64_t escape = n - i < 64 ? (uint64_t(1) << (n - i)) - 1 : ~uint64_t(0);
            for (uint32_t q = 0; q < S.width[l]; ++q)
                escape &= get_bits(tail.bytes, bits + q * n + i, 64);
            escapes += count_bits(escape);
        }
        bits += S.width[l] * n;
        n = escapes;
    }
    tail.codes[S.levels] = n;
    tail.start[S.levels] = bits;
    return tile.tail_words == coded_tail_words(bits, n);
}

// Decodes a tile's exponents, by code position. Returns false if the tile is corrupt.
template <uint8_t kShape>
bool decode_shape(const CodedTile &tile, const Ahead &ahead, TailReader &tail, uint8_t *positions)
{
    constexpr ShapeTraits S = shape_traits(kShape);
    constexpr uint32_t w1 = S.width[0];
    const uint32_t blocks = uint32_t(div_up(tile.values, BLOCK_VALUES));
    const uint32_t groups = uint32_t(div_up(blocks, tile.group_blocks));
    snapshot(tail.bytes, tile.tail, size_t(tile.tail_words) * TAIL_WORD);
    // Shape 4 needs level 1 twice.
    constexpr uint32_t COPY_WORDS =
            S.counts == 0 ? w1 * BLOCK_WORDS * S.tile_groups * S.group_blocks : 1;
    uint32_t copy[COPY_WORDS];
    const uint8_t *level1 = tile.level1;
    if constexpr (S.counts != 0) {
        if (!take_counts<kShape>(tile, tail))
            return false;
    } else {
        snapshot(copy, level1, plane_bytes(w1, tile.values));
        level1 = reinterpret_cast<const uint8_t *>(copy);
        uint32_t n = 0;
        for (uint32_t b = 0; b < blocks; ++b) {
            const uint32_t words = std::min(
                    uint32_t(div_up(tile.values, WORD_VALUES)) - b * BLOCK_WORDS, BLOCK_WORDS);
            const uint32_t *const block = copy + w1 * BLOCK_WORDS * b;
            for (uint32_t w = 0; w < words; ++w) {
                uint32_t escape = block[w];
                for (uint32_t q = 1; q < w1; ++q)
                    escape &= block[q * words + w];
                n += count_bits(escape);
            }
        }
        if (!count_codes<kShape>(tile, n, tail))
            return false;
    }
    if constexpr (S.levels > 1) {
        if (!read_level<kShape, 1>(tail, groups))
            return false;
    }

    const uint8_t *raw = tail.bytes + div_up(tail.start[S.levels], 8);
    uint32_t taken = 0, raws = 0;
    for (uint32_t b = 0; b < blocks; ++b) {
        const uint32_t n = std::min(tile.values - b * BLOCK_VALUES, BLOCK_VALUES);
        const uint32_t words = uint32_t(div_up(n, WORD_VALUES));
        const uint8_t *const from = level1 + plane_bytes(w1, BLOCK_VALUES) * b;
        uint32_t code_words[w1][BLOCK_WORDS];
        if (HWY_LIKELY(words == BLOCK_WORDS)) {
            snapshot(code_words, from, sizeof(code_words));
        } else {
            memset(code_words, 0, sizeof(code_words));
            for (uint32_t q = 0; q < w1; ++q)
                snapshot(code_words[q], from + sizeof(uint32_t) * words * q,
                         sizeof(uint32_t) * words);
        }

        ahead.fetch(b);
        Planes ranks;
        uint32_t n2 = taken;
        uint64_t any_raw = 0;
        for (uint32_t j = 0; j < PAIRS; ++j) {
            uint64_t code[3] = {}, p[4];
            ZIP_UNROLL
            for (uint32_t q = 0; q < w1; ++q)
                code[q] = load64(code_words[q] + 2 * j);
            const uint64_t escape = escapes_of<w1>(code);
            uint64_t deeper[4] = {escape, escape, escape, escape};
            if constexpr (S.levels > 1) {
                const BitSelector at(escape);
                const uint32_t count = count_bits(escape);
                ZIP_UNROLL
                for (uint32_t q = 0; q < 4; ++q)
                    deeper[q] = at.expand(get_bits(tail.streams[1][q], n2, count));
                n2 += count;
                keep_scalar(n2);
            }
            ranks_of_codes<kShape, 0>(code, escape, deeper, p);
            ZIP_UNROLL
            for (uint32_t q = 0; q < 4; ++q) {
                keep_scalar(p[q]);
                ranks.set_pair(q, j, p[q]);
            }
            any_raw |= deeper[0] & deeper[1] & deeper[2] & deeper[3];
        }
        taken = n2;

        uint8_t *const out = positions + b * BLOCK_VALUES;
        symbols_of(ranks, tile.symbols, out);
        if (any_raw != 0) {
            SparseBits raw_at;
            for (uint32_t j = 0; j < PAIRS; ++j)
                raw_at.add(j, ranks.pair(0, j) & ranks.pair(1, j) & ranks.pair(2, j) &
                                      ranks.pair(3, j));
            raw_at.visit([&](uint32_t i, uint32_t position) { out[position] = raw[i]; });
            raw += raw_at.size();
            raws += raw_at.size();
        }
        if constexpr (S.counts != 0) {
            if ((b % tile.group_blocks == tile.group_blocks - 1 || b == blocks - 1) &&
                tail.end[0][b / tile.group_blocks] != (S.levels > 1 ? taken : raws))
                return false;
        }
    }
    return true;
}

struct ShapeOps {
    bool (*encode)(const TypeOps &, const uint8_t *, uint32_t, uint32_t, const RankTable &,
                   uint32_t, uint8_t *, const Ahead &, TailWriter &);
    bool (*decode)(const CodedTile &, const Ahead &, TailReader &, uint8_t *);
};

ShapeOps shape_ops_of(uint8_t shape)
{
    switch (shape) {
    case SHAPE_11238:
        return {encode_shape<SHAPE_11238>, decode_shape<SHAPE_11238>};
    case SHAPE_38:
        return {encode_shape<SHAPE_38>, decode_shape<SHAPE_38>};
    case SHAPE_DENSE:
        return {encode_shape<SHAPE_DENSE>, decode_shape<SHAPE_DENSE>};
    default:
        return {encode_shape<SHAPE_22228>, decode_shape<SHAPE_22228>};
    }
}

} // namespace HWY_NAMESPACE
} // namespace zip::cpu
HWY_AFTER_NAMESPACE();

#endif
