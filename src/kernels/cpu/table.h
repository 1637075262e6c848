// SPDX-License-Identifier: BSD-3-Clause
// Choice of a tile's symbols from the counts of a sample of it: format.md's rules for encoders.
#ifndef ZIP_KERNELS_CPU_TABLE_H
#define ZIP_KERNELS_CPU_TABLE_H

#include <bit>
#include <cstdint>

#include "kernels/format.h"

namespace zip::cpu {

// Up to `capacity` symbols: the commonest, the smaller first of equally common ones.
class TopSymbols {
public:
    explicit TopSymbols(uint32_t capacity) : capacity_(capacity) {}
    void offer(uint32_t count, uint32_t symbol)
    {
        const uint32_t key = count << 8 | (255 - symbol);
        if (size_ == capacity_) {
            if (key < keys_[size_ - 1])
                return;
            --size_;
        }
        uint32_t at = size_++;
        for (; at > 0 && keys_[at - 1] < key; --at)
            keys_[at] = keys_[at - 1];
        keys_[at] = key;
    }
    uint32_t size() const { return size_; }
    uint8_t symbol(uint32_t i) const { return uint8_t(255 - (keys_[i] & 255)); }
    uint32_t count(uint32_t i) const { return keys_[i] >> 8; }

private:
    uint32_t keys_[format::TABLE_BYTES] = {}; // count << 8 | 255 - symbol, falling
    uint32_t size_ = 0;
    const uint32_t capacity_;
};

// A tile's table and the rank index that each symbol has in it.
struct RankedSymbols {
    format::TileSymbols table;
    uint32_t size;                     // symbols in the table
    uint8_t rank[format::TABLE_BYTES]; // of symbol i, commonest first
};

// Ranks symbols by the counts of a sample of `samples` values. Bit s of `present` is set where
// counts[s], of 256, is not 0.
template <class Count>
inline RankedSymbols rank_symbols(const Count *counts, const uint64_t (&present)[4],
                                  uint32_t samples, uint8_t shape)
{
    const format::ShapeTraits traits = format::shape_traits(shape);
    int different = 0;
    for (const uint64_t bits : present)
        different += std::popcount(bits);
    const uint32_t least =
            different > int(format::SAMPLE_MANY_SYMBOLS) ? format::sample_rare(samples) : 1;
    TopSymbols top(traits.symbols);
    for (uint32_t i = 0; i < 4; ++i) {
        for (uint64_t bits = present[i]; bits != 0; bits &= bits - 1) {
            const uint32_t s = 64 * i + uint32_t(std::countr_zero(bits));
            if (counts[s] >= least)
                top.offer(counts[s], s);
        }
    }
    RankedSymbols ranked{};
    ranked.size = top.size();
    for (uint32_t i = 0; i < top.size(); ++i) {
        ranked.rank[i] = traits.rank[i];
        ranked.table.symbol[traits.rank[i]] = top.symbol(i);
    }
    return ranked;
}

} // namespace zip::cpu
#endif
