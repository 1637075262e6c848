// SPDX-License-Identifier: BSD-3-Clause
// Shape columns: the bases that symbols are told from. Device code.
#ifndef ZIP_KERNELS_GPU_COLUMNS_H
#define ZIP_KERNELS_GPU_COLUMNS_H

#include <cstdint>

#include "kernels/format.h"
#include "kernels/gpu/job.h"
#include "kernels/gpu/simt.h"
#include "kernels/gpu/split.h"
#include "kernels/gpu/tile.h"

namespace zip::gpu {

// Every byte's lowest bits.
template <class T>
constexpr uint32_t EXPONENTS = 0x01010101u * ((1u << T::E) - 1);

// Bases of the columns of a lane's values k = 0..7 of a stripe, in a block of `words` plane words.
// A lane behind the last word gets those of some columns.
template <class T>
SIMT_DEVICE U32x2 column_bases(const uint8_t *columns, uint32_t words, uint32_t stripe,
                               uint32_t lane)
{
    const uint8_t *const first = columns + format::value_at(T::DTYPE, words, lane, stripe);
    U32x2 base;
    if constexpr (T::TYPE.run() == 8) {
        base = simt::load_hostile(reinterpret_cast<const U32x2 *>(first));
    } else {
        static_assert(T::TYPE.run() == 4);
        const uint8_t *const second =
                columns + format::value_at(T::DTYPE, words, lane, 16 + stripe);
        base = {simt::load_hostile(reinterpret_cast<const uint32_t *>(first)),
                simt::load_hostile(reinterpret_cast<const uint32_t *>(second))};
    }
    return {base.x & EXPONENTS<T>, base.y & EXPONENTS<T>};
}

// a - b of every byte, mod 256.
SIMT_DEVICE uint32_t bytes_minus(uint32_t a, uint32_t b)
{
    constexpr uint32_t TOP = 0x80808080;
    return ((a | TOP) - (b & ~TOP)) ^ ((a ^ ~b) & TOP);
}

// Symbols of four exponents, mod 2^E each.
template <class T>
SIMT_DEVICE uint32_t tell_from_bases(uint32_t exponents, uint32_t bases)
{
    if constexpr (T::E == 8) {
        return bytes_minus(exponents, bases);
    } else {
        return ((exponents | (EXPONENTS<T> + 0x01010101)) - bases) & EXPONENTS<T>;
    }
}

// Adds the bases to the symbols that are where heads have their exponents: two heads of 16 bits in
// a word, `bases` being those of k = 2 * pair and the next, or four of 8 bits.
template <class T>
SIMT_DEVICE uint32_t add_bases(uint32_t heads, U32x2 bases, uint32_t word)
{
    constexpr uint32_t M = T::TYPE.mantissa_bits;
    constexpr bool HEAD16 = T::TYPE.size - T::TYPE.low_bytes == 2;
    constexpr uint32_t FIELDS_OF_HEADS =
            HEAD16 ? 0x00010001u * (((1u << T::E) - 1) << M) : EXPONENTS<T> << M;
    uint32_t base;
    if constexpr (HEAD16)
        base = simt::byte_perm(word < 2 ? bases.x : bases.y, 0, word % 2 != 0 ? 0x4342 : 0x4140);
    else
        base = word == 0 ? bases.x : bases.y;
    // A sum that is too large goes to the bit above the field, which is another's, but no further.
    return simt::select(FIELDS_OF_HEADS, (heads & FIELDS_OF_HEADS) + (base << M), heads);
}

// Exponents of four neighbouring values, a byte each, from their bytes.
template <class T>
SIMT_DEVICE uint32_t four_exponents(const uint32_t (&w)[T::SIZE])
{
    uint32_t four = 0;
    SIMT_UNROLL
    for (uint32_t j = 0; j < 4; ++j) {
        const uint32_t bit = 8 * (T::SIZE * j + T::TYPE.low_bytes) + T::TYPE.mantissa_bits;
        four |= (w[bit / 32] >> (bit % 32) & ((1u << T::E) - 1)) << (8 * j);
    }
    return four;
}

// The bytes of four values at an address that is aligned to them.
template <uint32_t kSize>
SIMT_DEVICE void load_four(const uint8_t *p, uint32_t (&w)[kSize])
{
    if constexpr (kSize == 1) {
        w[0] = *reinterpret_cast<const uint32_t *>(p);
    } else if constexpr (kSize == 2) {
        const U32x2 v = *reinterpret_cast<const U32x2 *>(p);
        w[0] = v.x;
        w[1] = v.y;
    } else {
        const U32x4 v = *reinterpret_cast<const U32x4 *>(p);
        w[0] = v.x;
        w[1] = v.y;
        w[2] = v.z;
        w[3] = v.w;
    }
}

// Every byte's highest bit: set where a's byte is less than b's.
SIMT_DEVICE uint32_t bytes_less(uint32_t a, uint32_t b)
{
    return ((~a & b) | ((~a | b) & bytes_minus(a, b))) & 0x80808080;
}

// Of each sampled block the exponents of each thread's four columns, a byte each.
struct ColumnsMemory {
    uint32_t sample[format::COLUMN_SAMPLES][COLUMNS_THREADS];
};

// Bases of a thread's four columns. What is not there is 255, less than nothing; `n` are those that
// are, a byte a column. Little code rather than the fewest instructions: it is cold.
SIMT_DEVICE uint32_t medians(const ColumnsMemory &m, uint32_t n, uint32_t thread)
{
    constexpr uint32_t TOP = 0x80808080, ONES = 0x01010101;
    const uint32_t half = n >> 1 & 0x7f7f7f7f;
    // The largest number that no more than half are less than, from its highest bit on.
    uint32_t bases = 0;
    for (uint32_t bit = TOP; bit != 0; bit = bit >> 1 & ~TOP) {
        uint32_t less = 0;
        SIMT_UNROLL
        for (uint32_t k = 0; k < format::COLUMN_SAMPLES; ++k)
            less += bytes_less(m.sample[k][thread], bases | bit) >> 7;
        const uint32_t fits = ((half | TOP) - less) >> 7 & ONES;
        bases |= fits * 255 & bit;
    }
    return ((n + ~TOP) >> 7 & ONES) * 255 & bases; // 0 where there is none
}

// Writes the bases of the columns of a chunk that has that many values.
template <class T>
SIMT_DEVICE void write_bases(const uint8_t *data, uint64_t values, uint32_t *bases,
                             ColumnsMemory &m, uint32_t thread)
{
    constexpr uint32_t SAMPLES = format::COLUMN_SAMPLES, OWN = 4;
    static_assert(OWN * COLUMNS_THREADS == format::COLUMNS);
    const uint64_t blocks = (values + format::BLOCK_VALUES - 1) / format::BLOCK_VALUES;
    const uint32_t samples = format::column_samples(blocks);
    const auto place = [&](uint32_t k) {
        return format::column_sample(blocks, k) * format::BLOCK_VALUES + OWN * thread;
    };
    uint32_t n = 0;
    if (samples == SAMPLES && reinterpret_cast<uintptr_t>(data) % (OWN * T::SIZE) == 0 &&
        place(SAMPLES - 1) + OWN <= values) {
        uint32_t w[SAMPLES][T::SIZE]; // all loads first
        SIMT_UNROLL
        for (uint32_t k = 0; k < SAMPLES; ++k)
            load_four(data + place(k) * T::SIZE, w[k]);
        SIMT_UNROLL
        for (uint32_t k = 0; k < SAMPLES; ++k)
            m.sample[k][thread] = four_exponents<T>(w[k]);
        n = SAMPLES * 0x01010101;
    } else {
        for (uint32_t k = 0; k < SAMPLES; ++k) {
            uint32_t four = ~uint32_t(0);
            const uint64_t first = place(k);
            if (k < samples && first < values) {
                const uint32_t there = values - first < OWN ? uint32_t(values - first) : OWN;
                uint32_t w[T::SIZE];
                SIMT_UNROLL
                for (uint32_t i = 0; i < T::SIZE; ++i) {
                    w[i] = 0;
                    for (uint32_t b = 0; b < 4 && 4 * i + b < there * T::SIZE; ++b)
                        w[i] |= uint32_t(data[first * T::SIZE + 4 * i + b]) << (8 * b);
                }
                const uint32_t bytes = ~uint32_t(0) >> (32 - 8 * there);
                four = four_exponents<T>(w) | ~bytes;
                n += 0x01010101 & bytes;
            }
            m.sample[k][thread] = four;
        }
    }
    bases[thread] = medians(m, n, thread); // of its own samples
}

// Writes the bases of the columns of one of the launch's chunks, with a block of COLUMNS_THREADS
// threads.
template <class T>
SIMT_DEVICE void write_bases_of(const Launch &launch, uint32_t number, ColumnsMemory &m,
                                uint32_t thread)
{
    const uint8_t *data = nullptr;
    uint32_t *bases = nullptr; // null: there is nothing to do
    uint64_t values = 0;
    with_item_of<&ItemPlace::first_chunk>(launch, number, [&](const auto &item) {
        const ItemLayout &layout = layout_of(launch, item);
        if (!item_exists(item.place, layout))
            return;
        const uint32_t chunk = number - item.place.first_chunk,
                       last = chunk + 1 == layout.chunk_count;
        const auto word = [&](JobWord w) {
            return address_in(item, w) + layout.value[last][w] + chunk * layout.chunk_step[w];
        };
        data = reinterpret_cast<const uint8_t *>(word(JOB_CHUNK_DATA));
        bases = reinterpret_cast<uint32_t *>(word(JOB_CHUNK) + format::HEADER_LENGTH);
        values = layout.value[last][JOB_LENGTH] / T::SIZE;
    });
    if (bases != nullptr)
        write_bases<T>(data, values, bases, m, thread);
}

} // namespace zip::gpu
#endif
