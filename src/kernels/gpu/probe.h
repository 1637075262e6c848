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
#include "kernels/gpu/tile.h"

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

static_assert(PROBE_PARTS * PROBE_PART_WORDS == PROBE_THREADS, "a thread a word");
constexpr uint32_t PROBE_GROUPS = PROBE_THREADS / simt::LANES;
static_assert(PROBE_PART_WORDS % simt::LANES == 0, "a lane group's words are of one part");

struct ProbeMemory {
    // Of each part of the sample, counts by exponent: of 16-bit words at even and odd places, of
    // bytes (bits 2 to 6) at even and odd places, of 64-bit words (symbols of fp64).
    struct Part {
        uint32_t half[2][256], byte[2][32], wide[256];
    };
    Part part[PROBE_PARTS];
    uint32_t largest[PROBE_PARTS], words[PROBE_PARTS], no_symbol[PROBE_PARTS]; // fp64
    uint32_t bits[PROBE_TYPES][PROBE_SHAPES], values[PROBE_TYPES];
    double ratio[PROBE_TYPES * PROBE_SHAPES];
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

// Bits behind level 1 of `values` values with these commonest counts, coded or else kept.
template <uint8_t kShape>
SIMT_DEVICE uint32_t probe_bits(const uint32_t (&top)[PROBE_RANKS], uint32_t values, uint32_t dtype)
{
    constexpr format::ShapeTraits SHAPE = format::shape_traits(kShape);
    uint32_t bits = 0, escaped = values, rank = 0;
    SIMT_UNROLL
    for (uint32_t level = 0; level < SHAPE.levels; ++level) {
        if (level != 0)
            bits += SHAPE.width[level] * escaped;
        SIMT_UNROLL
        for (uint32_t i = 0; i + 1 < 1u << SHAPE.width[level]; ++i)
            escaped -= top[rank++];
    }
    bits += 8 * escaped;
    const uint32_t raw =
            (format::type_traits(uint8_t(dtype)).exponent_bits - SHAPE.width[0]) * values;
    return bits < raw ? bits : raw;
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
    uint32_t top[PROBE_RANKS];
    SIMT_UNROLL
    for (uint32_t rank = 0; rank < PROBE_RANKS; ++rank) {
        uint32_t own = 0;
        SIMT_UNROLL
        for (uint32_t i = 0; i < OWN; ++i)
            own = count[i] > own ? count[i] : own;
        const uint32_t best = simt::max_all(own * simt::LANES + lane);
        top[rank] = best / simt::LANES;
        bool mine = best % simt::LANES == lane;
        SIMT_UNROLL
        for (uint32_t i = 0; i < OWN; ++i) {
            const bool taken = mine && count[i] == own;
            count[i] = taken ? 0 : count[i];
            mine = mine && !taken;
        }
    }
    if (lane != 0)
        return;
    simt::atomic_add_shared(&m.bits[dtype - 1][0],
                            probe_bits<format::SHAPE_22228>(top, sum, dtype));
    simt::atomic_add_shared(&m.bits[dtype - 1][1],
                            probe_bits<format::SHAPE_11238>(top, sum, dtype));
    simt::atomic_add_shared(&m.values[dtype - 1], sum);
}

// f<dtype>() for every type that is coded.
template <class F>
SIMT_DEVICE void for_each_type(F f)
{
    f.template operator()<format::DTYPE_BF16>();
    f.template operator()<format::DTYPE_FP32>();
    f.template operator()<format::DTYPE_FP16>();
    f.template operator()<format::DTYPE_FP64>();
    f.template operator()<format::DTYPE_E4M3>();
    f.template operator()<format::DTYPE_E5M2>();
}

// The ratio to expect under a type and a shape.
template <uint8_t kDtype, uint8_t kShape>
SIMT_DEVICE double probe_ratio(uint64_t length, uint32_t bits, uint32_t values)
{
    const format::Layout l = format::layout_of({kDtype, kShape, false}, length);
    return (double(l.tail) + double(l.values) * (double(bits) / values) / 8) / double(length);
}

// Judges a buffer with a block of PROBE_THREADS threads.
template <class Barrier>
SIMT_DEVICE void probe_data(const uint8_t *data, uint64_t length, zip_probe_t *result,
                            ProbeMemory &m, uint32_t thread, Barrier barrier)
{
    const uint32_t lane = thread % simt::LANES, group = thread / simt::LANES;
    if (length < 8 || length > format::MAX_CODED_LENGTH) { // the same for all threads
        if (thread == 0)
            *result = {ZIP_DTYPE_BYTES, ZIP_SHAPE_DEFAULT, 1, 0};
        return;
    }
    // The load first: its latency is much of the time.
    const bool all = length <= PROBE_PIECES * PROBE_PIECE;
    const uint64_t step = all ? PROBE_PIECE : (length - PROBE_PIECE) / (PROBE_PIECES - 1);
    const uint32_t part = thread / PROBE_PART_WORDS;
    const uint64_t at =
            step * (thread / (PROBE_PIECE / 8)) / 8 * 8 + 8 * (thread % (PROBE_PIECE / 8));
    const bool exists = at + 8 <= length;
    const uint64_t x = exists ? load_word(data + at) : 0;
    for (uint32_t i = thread; i < sizeof(m) / 4; i += PROBE_THREADS)
        reinterpret_cast<uint32_t *>(&m)[i] = 0;
    barrier.sync();
    ProbeMemory::Part &p = m.part[part];
    if (exists) {
        SIMT_UNROLL
        for (uint32_t k = 0; k < 4; ++k)
            simt::atomic_add_shared(&p.half[k & 1][x >> (16 * k + 7) & 0xff], 1);
        if (thread % 2 == 0) {
            SIMT_UNROLL
            for (uint32_t k = 0; k < 8; ++k)
                simt::atomic_add_shared(&p.byte[k & 1][x >> (8 * k + 2) & 0x1f], 1);
        }
    }
    const uint32_t exponent = uint32_t(x >> 52) & 0x7ff;
    const uint32_t words = simt::popcount(simt::ballot(exists)),
                   largest = simt::max_all(exponent != format::FP64_INFINITY ? exponent : 0);
    if (lane == 0) {
        simt::atomic_add_shared(&m.words[part], words);
        simt::atomic_max_shared(&m.largest[part], largest);
    }
    barrier.sync();
    if (exists) {
        const uint32_t symbol = format::fp64_symbol(exponent, format::fp64_base(m.largest[part]));
        if (symbol == format::NO_SYMBOL)
            m.no_symbol[part] = 1;
        else
            simt::atomic_add_shared(&p.wide[symbol], 1);
    }
    barrier.sync();
    static_assert(PROBE_PARTS * PROBE_TYPES <= PROBE_GROUPS);
    if (group < PROBE_PARTS * PROBE_TYPES)
        probe_type(m, group / PROBE_TYPES, 1 + group % PROBE_TYPES, lane);
    barrier.sync();

    // A lane group a type and shape; then one thread compares.
    static_assert(PROBE_TYPES * PROBE_SHAPES <= PROBE_GROUPS);
    for_each_type([&]<uint8_t kDtype>() {
        const uint32_t t = kDtype - 1;
        if (group / PROBE_SHAPES != t || lane != 0)
            return;
        m.ratio[group] = group % PROBE_SHAPES == 0
                                 ? probe_ratio<kDtype, format::SHAPE_22228>(length, m.bits[t][0],
                                                                            m.values[t])
                                 : probe_ratio<kDtype, format::SHAPE_11238>(length, m.bits[t][1],
                                                                            m.values[t]);
    });
    barrier.sync();
    if (thread != 0)
        return;
    zip_probe_t probe = {ZIP_DTYPE_BYTES, ZIP_SHAPE_DEFAULT, 1, 0};
    double best = 2, other = 2;
    // The host's order of types, for equal ratios.
    for (uint32_t t = 0; t < PROBE_TYPES; ++t) {
        const bool first = m.ratio[2 * t] <= m.ratio[2 * t + 1];
        const double of_type = first ? m.ratio[2 * t] : m.ratio[2 * t + 1];
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

// Judges one of the launch's items.
template <class Barrier>
SIMT_DEVICE void probe_item(const Launch &launch, uint32_t number, ProbeMemory &m, uint32_t thread,
                            Barrier barrier)
{
    uint64_t data = 0, length = 0;
    const void *result = nullptr;
    const auto take = [&](const auto &item) {
        const ItemLayout &layout = layout_of(launch, item);
        data = address_in(item, JOB_DATA) + layout.value[1][JOB_DATA];
        length = layout.value[1][JOB_LENGTH];
        result = item.place.probe;
    };
    if (launch.table == nullptr)
        take(launch.inline_items[number]);
    else
        take(launch.table[number]);
    probe_data(reinterpret_cast<const uint8_t *>(data), length,
               static_cast<zip_probe_t *>(const_cast<void *>(result)), m, thread, barrier);
}

} // namespace zip::gpu
#endif
