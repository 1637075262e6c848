// SPDX-License-Identifier: BSD-3-Clause
// Guess of a buffer's type and shape: cpu/probe.cc in a block of threads, with the same sample and
// the same result. Device code.
#ifndef ZIP_KERNELS_GPU_PROBE_H
#define ZIP_KERNELS_GPU_PROBE_H

#include <cstdint>

#include "kernels/codec.h"
#include "kernels/format.h"
#include "kernels/gpu/job.h"
#include "kernels/gpu/simt.h"

namespace zip::gpu {

// As in cpu/probe.cc, which says why.
constexpr uint32_t PROBE_PIECES = 24, PROBE_PIECE = 256, PROBE_PART_PIECES = 8;
constexpr uint32_t PROBE_PARTS = PROBE_PIECES / PROBE_PART_PIECES;
constexpr uint32_t PROBE_PART_WORDS = PROBE_PART_PIECES * PROBE_PIECE / 8; // of 64 bits
constexpr double PROBE_WORTHWHILE = 0.98, PROBE_SURE_GAP = 0.08, PROBE_SURE_BYTES = 4096;
constexpr uint32_t PROBE_TYPES = format::DTYPES - 1,
                   PROBE_SHAPES = 2; // types from 1, shapes 22228 and 11238
constexpr uint32_t PROBE_RANKS = format::shape_traits(format::SHAPE_22228).symbols;
static_assert(PROBE_RANKS == format::shape_traits(format::SHAPE_11238).symbols);
static_assert(PROBE_TYPES * PROBE_SHAPES <= simt::LANES);

struct ProbeMemory {
    // Of each part of the sample, counts by exponent: of 16-bit words at even and odd places, of
    // bytes (bits 2 to 6) at even and odd places, of 64-bit words (symbols of fp64).
    struct Part {
        uint32_t half[2][256], byte[2][32], wide[256];
    };
    Part part[PROBE_PARTS];
    uint32_t largest[PROBE_PARTS], words[PROBE_PARTS], no_symbol[PROBE_PARTS]; // fp64
    uint32_t bits[PROBE_TYPES][PROBE_SHAPES], values[PROBE_TYPES];
};

// 8 bytes at any address.
SIMT_DEVICE uint64_t load_word(const uint8_t *p)
{
    if ((reinterpret_cast<uintptr_t>(p) & 7) == 0)
        return *reinterpret_cast<const uint64_t *>(p);
    uint64_t x = 0;
    SIMT_UNROLL
    for (uint32_t i = 0; i < 8; ++i)
        x |= uint64_t(p[i]) << (8 * i);
    return x;
}

// Values of a type with that symbol in a part.
SIMT_DEVICE uint32_t probe_count(const ProbeMemory &m, uint32_t part, uint32_t dtype,
                                 uint32_t symbol)
{
    const ProbeMemory::Part &p = m.part[part];
    switch (dtype) {
    case format::DTYPE_BF16:
        return p.half[0][symbol] + p.half[1][symbol];
    case format::DTYPE_FP32:
        return p.half[1][symbol];
    case format::DTYPE_FP64:
        return m.no_symbol[part] != 0 ? 0 : p.wide[symbol];
    case format::DTYPE_FP16:
        return symbol < 32 ? p.byte[1][symbol] : 0;
    case format::DTYPE_E5M2:
        return symbol < 32 ? p.byte[0][symbol] + p.byte[1][symbol] : 0;
    default: // the fifth bit is of the mantissa
        return symbol < 16 ? p.byte[0][2 * symbol] + p.byte[0][2 * symbol + 1] +
                                     p.byte[1][2 * symbol] + p.byte[1][2 * symbol + 1]
                           : 0;
    }
}

// Adds a part's bits behind level 1 under one type; a lane group's.
SIMT_DEVICE void probe_type(ProbeMemory &m, uint32_t part, uint32_t dtype, uint32_t lane)
{
    constexpr uint32_t OWN = 256 / simt::LANES;
    uint32_t count[OWN], sum = 0;
    SIMT_UNROLL
    for (uint32_t i = 0; i < OWN; ++i) {
        count[i] = probe_count(m, part, dtype, lane + simt::LANES * i);
        sum += count[i];
    }
    SIMT_UNROLL
    for (uint32_t d = 1; d < simt::LANES; d *= 2)
        sum += simt::shuffle_xor(sum, d);
    if (dtype == format::DTYPE_FP64 && m.no_symbol[part] != 0)
        sum = m.words[part];
    // The commonest counts, by turns: the largest, and the lane that had it gives it away.
    uint32_t top = 0; // lane r: that of rank r
    for (uint32_t rank = 0; rank < PROBE_RANKS; ++rank) {
        uint32_t best = 0;
        SIMT_UNROLL
        for (uint32_t i = 0; i < OWN; ++i)
            best = count[i] > best ? count[i] : best;
        const uint32_t own = best;
        SIMT_UNROLL
        for (uint32_t d = 1; d < simt::LANES; d *= 2) {
            const uint32_t other = simt::shuffle_xor(best, d);
            best = other > best ? other : best;
        }
        const uint32_t winner = simt::find_first(simt::ballot(own == best));
        if (lane == winner) {
            bool taken = false;
            SIMT_UNROLL
            for (uint32_t i = 0; i < OWN; ++i) {
                if (!taken && count[i] == best) {
                    count[i] = 0;
                    taken = true;
                }
            }
        }
        if (lane == rank)
            top = best;
    }
    const uint8_t shapes[PROBE_SHAPES] = {format::SHAPE_22228, format::SHAPE_11238};
    SIMT_UNROLL
    for (uint32_t s = 0; s < PROBE_SHAPES; ++s) {
        const format::ShapeTraits shape = format::shape_traits(shapes[s]);
        uint32_t bits = 0, escaped = sum, rank = 0;
        for (uint32_t level = 0; level < shape.levels; ++level) {
            if (level != 0)
                bits += shape.width[level] * escaped;
            for (uint32_t end = rank + (1u << shape.width[level]) - 1; rank < end; ++rank)
                escaped -= simt::shuffle(top, rank);
        }
        bits += 8 * escaped;
        const uint32_t raw =
                (format::type_traits(uint8_t(dtype)).exponent_bits - shape.width[0]) * sum;
        if (lane == 0)
            simt::atomic_add_shared(&m.bits[dtype - 1][s], bits < raw ? bits : raw);
    }
    if (lane == 0)
        simt::atomic_add_shared(&m.values[dtype - 1], sum);
}

// Judges one item with a block of TILE_THREADS threads.
template <class Barrier>
SIMT_DEVICE void probe_item(const Item &item, ProbeMemory &m, uint32_t thread, Barrier barrier)
{
    const auto *const data = reinterpret_cast<const uint8_t *>(item.value[1][JOB_DATA]);
    const uint64_t length = item.value[1][JOB_LENGTH];
    auto *const result = static_cast<zip_probe_t *>(const_cast<void *>(item.probe));
    const uint32_t lane = thread % simt::LANES, group = thread / simt::LANES;
    if (length < 8 || length > format::MAX_CODED_LENGTH) { // the same for all threads
        if (thread == 0)
            *result = {ZIP_DTYPE_BYTES, ZIP_SHAPE_DEFAULT, 1, 0};
        return;
    }
    for (uint32_t i = thread; i < sizeof(m) / 4; i += TILE_THREADS)
        reinterpret_cast<uint32_t *>(&m)[i] = 0;

    // All loads first: their latency is most of the time.
    constexpr uint32_t OWN =
            PROBE_PARTS * PROBE_PART_WORDS / TILE_THREADS; // words of the sample a thread
    const bool all = length <= PROBE_PIECES * PROBE_PIECE;
    const uint64_t step = all ? PROBE_PIECE : (length - PROBE_PIECE) / (PROBE_PIECES - 1);
    uint64_t word[OWN];
    uint32_t exists = 0;
    SIMT_UNROLL
    for (uint32_t i = 0; i < OWN; ++i) {
        const uint32_t w = thread + i * TILE_THREADS, piece = w / (PROBE_PIECE / 8),
                       in_piece = w % (PROBE_PIECE / 8);
        const uint64_t at = step * piece / 8 * 8 + 8 * in_piece;
        word[i] = 0;
        if (at + 8 <= length) {
            word[i] = load_word(data + at);
            exists |= 1u << i;
        }
    }
    barrier.sync();
    SIMT_UNROLL
    for (uint32_t i = 0; i < OWN; ++i) {
        if ((exists >> i & 1) == 0)
            continue;
        const uint32_t w = thread + i * TILE_THREADS, part = w / PROBE_PART_WORDS;
        ProbeMemory::Part &p = m.part[part];
        const uint64_t x = word[i];
        SIMT_UNROLL
        for (uint32_t k = 0; k < 4; ++k)
            simt::atomic_add_shared(&p.half[k & 1][x >> (16 * k + 7) & 0xff], 1);
        if (w % 2 == 0) {
            SIMT_UNROLL
            for (uint32_t k = 0; k < 8; ++k)
                simt::atomic_add_shared(&p.byte[k & 1][x >> (8 * k + 2) & 0x1f], 1);
        }
        simt::atomic_add_shared(&m.words[part], 1);
        const uint32_t exponent = uint32_t(x >> 52) & 0x7ff;
        if (exponent != format::FP64_INFINITY)
            simt::atomic_max_shared(&m.largest[part], exponent);
    }
    barrier.sync();
    SIMT_UNROLL
    for (uint32_t i = 0; i < OWN; ++i) {
        if ((exists >> i & 1) == 0)
            continue;
        const uint32_t part = (thread + i * TILE_THREADS) / PROBE_PART_WORDS;
        const uint32_t symbol = format::fp64_symbol(uint32_t(word[i] >> 52) & 0x7ff,
                                                    format::fp64_base(m.largest[part]));
        if (symbol == format::NO_SYMBOL)
            m.no_symbol[part] = 1;
        else
            simt::atomic_add_shared(&m.part[part].wide[symbol], 1);
    }
    barrier.sync();
    for (uint32_t i = group; i < PROBE_PARTS * PROBE_TYPES; i += TILE_THREADS / simt::LANES)
        probe_type(m, i / PROBE_TYPES, 1 + i % PROBE_TYPES, lane);
    barrier.sync();
    if (group != 0)
        return;

    // A lane a type and shape; then lane 0 compares.
    double ratio = 2;
    if (lane < PROBE_TYPES * PROBE_SHAPES) {
        const uint32_t t = lane / PROBE_SHAPES, s = lane % PROBE_SHAPES;
        const format::Coding coding{uint8_t(1 + t),
                                    s == 0 ? format::SHAPE_22228 : format::SHAPE_11238, false};
        const format::Layout l = format::layout_of(coding, length);
        ratio = (double(l.tail) + double(l.values) * (double(m.bits[t][s]) / m.values[t]) / 8) /
                double(length);
    }
    auto *const ratios = reinterpret_cast<double *>(&m.part[0]); // whose counts are read no more
    simt::sync_lanes();
    if (lane < PROBE_TYPES * PROBE_SHAPES)
        ratios[lane] = ratio;
    simt::sync_lanes();
    if (lane != 0)
        return;
    zip_probe_t probe = {ZIP_DTYPE_BYTES, ZIP_SHAPE_DEFAULT, 1, 0};
    double best = 2, other = 2;
    // The host's order of types, for equal ratios.
    for (uint32_t t = 0; t < PROBE_TYPES; ++t) {
        const bool first = ratios[2 * t] <= ratios[2 * t + 1];
        const double of_type = first ? ratios[2 * t] : ratios[2 * t + 1];
        if (of_type < best) {
            other = best;
            best = of_type;
            if (best <= PROBE_WORTHWHILE)
                probe = {zip_dtype_t(1 + t), first ? ZIP_SHAPE_22228 : ZIP_SHAPE_11238, float(best),
                         0};
        } else if (of_type < other) {
            other = of_type;
        }
    }
    const double gap =
            best <= PROBE_WORTHWHILE ? (other < 1 ? other : 1) - best : best - PROBE_WORTHWHILE;
    const double seen = 8.0 * (m.words[0] + m.words[1] + m.words[2]);
    const double sure_gap = gap < PROBE_SURE_GAP ? gap / PROBE_SURE_GAP : 1,
                 sure_seen = seen < PROBE_SURE_BYTES ? seen / PROBE_SURE_BYTES : 1;
    probe.confidence = float(sure_gap * sure_seen);
    *result = probe;
}

} // namespace zip::gpu
#endif
