// SPDX-License-Identifier: BSD-3-Clause
// The sample of a tile that its table is chosen by, in vectors.
// Compiled once for each instruction set: the guard flips each time that Highway includes simd.cc.
#if defined(ZIP_KERNELS_CPU_SAMPLE_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef ZIP_KERNELS_CPU_SAMPLE_INL_H
#undef ZIP_KERNELS_CPU_SAMPLE_INL_H
#else
#define ZIP_KERNELS_CPU_SAMPLE_INL_H
#endif

#include <algorithm>

#include "hwy/highway.h"
#include "kernels/cpu/internal.h"
#include "kernels/cpu/planes-inl.h"
#include "kernels/cpu/table.h"
#include "kernels/cpu/types-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zip::cpu {
namespace HWY_NAMESPACE {

// 255 where a block's sample is, in each stripe of an even or odd block: the places repeat every 64
// bytes.
struct Places {
    uint8_t mask[2][STRIPES][64] = {};
    constexpr Places()
    {
        for (uint32_t odd = 0; odd < 2; ++odd) {
            for (uint32_t s = 0; s < STRIPES; ++s) {
                for (uint32_t w = 0; w < 8; ++w)
                    mask[odd][s][8 * w + (format::sample_bit(odd, w, s) >> 2)] = 255;
            }
        }
    }
};
constexpr Places PLACES;

// A tile's sampled symbols, and how many there are of each.
class Sample {
public:
    HWY_INLINE void add(uint8_t symbol) { symbol_[size_++] = symbol; }

    // The values of a whole block, an odd one of its tile or an even one.
    void add_block(const uint8_t *positions, bool odd)
    {
        const Bytes d8;
        const Doubles d64;
        const uint32_t step = uint32_t(hn::Lanes(d8));
        for (uint32_t at = 0; at < BLOCK_VALUES;) {
            // One byte of each eight is sampled; those of eight vectors fill one.
            auto all = hn::Zero(d64);
            for (uint32_t i = 0; i < 8; ++i, at += step) {
                const ByteVec place = hn::LoadU(d8, PLACES.mask[odd][at / STRIPE] + at % 64);
                const auto sampled = hn::SumsOf8(hn::And(hn::LoadU(d8, positions + at), place));
                all = hn::Or(hn::ShiftLeft<8>(all), sampled);
            }
            hn::StoreU(hn::BitCast(d8, all), d8, symbol_ + size_);
            size_ += step;
        }
    }

    RankedSymbols rank(uint8_t shape)
    {
        alignas(64) uint16_t counts[256];
        uint64_t present[4] = {};
        memset(counts, 0, sizeof(counts));
        if (!count_range(counts, present))
            count_all(counts, present);
        return rank_symbols(counts, present, size_, shape);
    }

private:
    // Most symbols in a row that are counted one by one.
    static constexpr uint32_t MAX_RANGE = 32;

    // Counts symbol by symbol, if all but 0 are in a short range, as bell-shaped data's are.
    bool count_range(uint16_t (&counts)[256], uint64_t (&present)[4])
    {
        const Bytes d8;
        const uint32_t step = uint32_t(hn::Lanes(d8));
        const uint32_t end = size_ / step * step;
        const ByteVec one = hn::Set(d8, 1);
        ByteVec least = hn::Set(d8, 255), most = hn::Zero(d8); // of symbol - 1; 0 is the largest
        for (uint32_t i = 0; i < end; i += step) {
            const ByteVec x = hn::Sub(hn::Load(d8, symbol_ + i), one);
            least = hn::Min(least, x);
            most = hn::Max(most, hn::AndNot(hn::VecFromMask(d8, hn::Eq(x, hn::Set(d8, 255))), x));
        }
        uint8_t lanes[2][64];
        hn::StoreU(least, d8, lanes[0]);
        hn::StoreU(most, d8, lanes[1]);
        const uint32_t from = *std::min_element(lanes[0], lanes[0] + step);
        const uint32_t to = *std::max_element(lanes[1], lanes[1] + step);
        if (from != 255 && to - from > MAX_RANGE)
            return false;
        const auto count = [&](uint32_t s) {
            const ByteVec symbol = hn::Set(d8, uint8_t(s));
            uint32_t n = 0;
#if HWY_TARGET <= HWY_AVX3
            for (uint32_t i = 0; i < end; i += step) // masks are in registers of their own
                n += uint32_t(hn::CountTrue(d8, hn::Eq(hn::Load(d8, symbol_ + i), symbol)));
#else
            for (uint32_t i = 0; i < end;) {
                ByteVec equal = hn::Zero(d8); // minus the lane's count
                const uint32_t part = std::min(end, i + 255 * step);
                for (; i < part; i += step)
                    equal = hn::Add(equal,
                                    hn::VecFromMask(d8, hn::Eq(hn::Load(d8, symbol_ + i), symbol)));
                const hn::Repartition<uint64_t, Bytes> d64;
                n += uint32_t(hn::GetLane(
                        hn::SumOfLanes(d64, hn::SumsOf8(hn::Sub(hn::Zero(d8), equal)))));
            }
#endif
            set(counts, present, s, n);
        };
        count(0);
        for (uint32_t s = from; from != 255 && s <= to; ++s)
            count(s + 1);
        for (uint32_t i = end; i < size_; ++i)
            set(counts, present, symbol_[i], counts[symbol_[i]] + 1u);
        return true;
    }

    void count_all(uint16_t (&counts)[256], uint64_t (&present)[4])
    {
        // Four, since successive increments of one counter would wait for each other.
        uint16_t more[3][256] = {};
        uint32_t i = 0;
        for (; i + 4 <= size_; i += 4) {
            ++counts[symbol_[i]];
            ++more[0][symbol_[i + 1]];
            ++more[1][symbol_[i + 2]];
            ++more[2][symbol_[i + 3]];
        }
        for (; i < size_; ++i)
            ++counts[symbol_[i]];
        for (uint32_t s = 0; s < 256; ++s)
            set(counts, present, s, uint32_t(counts[s]) + more[0][s] + more[1][s] + more[2][s]);
    }

    static HWY_INLINE void set(uint16_t (&counts)[256], uint64_t (&present)[4], uint32_t s,
                               uint32_t n)
    {
        counts[s] = uint16_t(n);
        present[s / 64] |= uint64_t(n != 0) << s % 64;
    }

    alignas(64) uint8_t symbol_[MAX_TILE_VALUES / 4 + 64];
    uint32_t size_ = 0;
};

// The sample of a tile whose symbols by code position these are.
void sample_tile(const TypeOps &type, const uint8_t *positions, uint32_t values, uint8_t shape,
                 Sample &sample)
{
    const bool both = shape == SHAPE_DENSE;
    for (uint32_t b = 0; b * BLOCK_VALUES < values; ++b) {
        const uint32_t n = std::min(values - b * BLOCK_VALUES, BLOCK_VALUES);
        const uint8_t *const block = positions + b * BLOCK_VALUES;
        if (n == BLOCK_VALUES) {
            sample.add_block(block, b % 2 != 0);
            if (both)
                sample.add_block(block, b % 2 == 0);
            continue;
        }
        uint32_t exist[BLOCK_WORDS];
        type.values_of_words(n, exist);
        for (uint32_t w = 0; w < BLOCK_WORDS; ++w) {
            for (uint32_t s = 0; s < STRIPES; ++s) {
                for (uint32_t flip = 0; flip <= (both ? 16u : 0u); flip += 16) {
                    const uint32_t bit = format::sample_bit(b, w, s) ^ flip;
                    if ((exist[w] >> bit & 1) != 0)
                        sample.add(block[s * STRIPE + 8 * w + (bit >> 2)]);
                }
            }
        }
    }
}

} // namespace HWY_NAMESPACE
} // namespace zip::cpu
HWY_AFTER_NAMESPACE();

#endif
