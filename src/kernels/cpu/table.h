// SPDX-License-Identifier: BSD-3-Clause
// Choice of a tile's symbols from a sample of it, as format.md recommends to encoders.
#ifndef ZIP_KERNELS_CPU_TABLE_H
#define ZIP_KERNELS_CPU_TABLE_H

#include <bit>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "kernels/format.h"

namespace zip::cpu {

// Up to TABLE_SYMBOLS keys (count << 8 | 255 - symbol), largest first.
class TopSymbols {
public:
    void offer(uint32_t count, uint32_t symbol)
    {
        const uint32_t key = count << 8 | (255 - symbol);
        if (size_ == format::TABLE_SYMBOLS) {
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
    uint8_t symbol(uint32_t rank) const { return uint8_t(255 - (keys_[rank] & 255)); }
    uint32_t count(uint32_t rank) const { return keys_[rank] >> 8; }

private:
    uint32_t keys_[format::TABLE_SYMBOLS + 1] = {};
    uint32_t size_ = 0;
};

// Exponents of a tile that are sampled: one in `step`, at a place that moves through the step so
// that data with a period (rows of a matrix) is not met at one phase only.
constexpr uint32_t SAMPLE_VALUES = format::TILE_VALUES / 8;
constexpr uint32_t sample_step(uint32_t values)
{
    return values < SAMPLE_VALUES ? 1 : std::bit_floor(values / SAMPLE_VALUES);
}
constexpr uint32_t sample_at(uint32_t j, uint32_t step)
{
    return j * step + (5 * j) % step;
}

// Bits behind level 1 that coding takes for `values` values with these commonest symbols.
inline uint32_t bits_behind_level1(const TopSymbols &top, uint32_t values)
{
    uint32_t bits = 0, escaped = values;
    for (uint32_t r = 0; r < format::TABLE_SYMBOLS; ++r) {
        if (r != 0 && r % format::LEVEL_SYMBOLS == 0)
            bits += 2 * escaped;
        escaped -= r < top.size() ? top.count(r) : 0;
    }
    return bits + 8 * escaped;
}

// Chooses the symbols of a tile with these exponents, `values` >= 1 in element order. Returns false
// if not even the sample would gain from coding.
inline bool choose_symbols(const uint8_t *exponents, uint32_t values, format::TileSymbols &table)
{
    // Four histograms, since successive increments of one counter would wait for each other.
    alignas(64) uint16_t h[4][256];
    memset(h, 0, sizeof(h));
    const uint32_t step = sample_step(values);
    const uint32_t samples = values / step; // NOLINT(*DivideZero): a step is at least 1
    uint32_t j = 0;
    if (step == 8) { // a whole tile; the places repeat every eight steps
        for (; j + 8 <= samples; j += 8) {
            const uint8_t *e = exponents + 8 * j;
            ++h[0][e[sample_at(0, 8)]];
            ++h[1][e[sample_at(1, 8)]];
            ++h[2][e[sample_at(2, 8)]];
            ++h[3][e[sample_at(3, 8)]];
            ++h[0][e[sample_at(4, 8)]];
            ++h[1][e[sample_at(5, 8)]];
            ++h[2][e[sample_at(6, 8)]];
            ++h[3][e[sample_at(7, 8)]];
        }
    }
    for (; j < samples; ++j)
        ++h[j & 3][exponents[sample_at(j, step)]];

    TopSymbols top;
    for (uint32_t s = 0; s < 256; s += 4) {
        uint64_t sum = 0; // four counters at once; none exceeds SAMPLE_VALUES * 2
        for (const auto &counts : h) {
            uint64_t four;
            memcpy(&four, counts + s, sizeof(four));
            sum += four;
        }
        for (; sum != 0; sum &= ~(uint64_t(0xffff) << (std::countr_zero(sum) & 48))) {
            const uint32_t lane = uint32_t(std::countr_zero(sum)) / 16;
            top.offer(uint32_t(sum >> (16 * lane)) & 0xffff, s + lane);
        }
    }

    if (bits_behind_level1(top, samples) >= 6 * samples)
        return false;

    uint8_t symbols[format::TABLE_SYMBOLS];
    uint32_t n = 0, nibbles = 0;
    for (; n < top.size(); ++n) {
        symbols[n] = top.symbol(n);
        nibbles |= 1u << (symbols[n] & 15);
    }
    // Free ranks go to neighbours of the commonest symbol, the likeliest that a sample misses.
    // Their low four bits differ from all others, which keeps the SIMD look-up at one step; there
    // are 16, so d <= 8 finds enough.
    for (uint32_t d = 1; n < format::TABLE_SYMBOLS; ++d) {
        for (const uint8_t s : {uint8_t(symbols[0] - d), uint8_t(symbols[0] + d)}) {
            if (n < format::TABLE_SYMBOLS && !(nibbles >> (s & 15) & 1)) {
                symbols[n++] = s;
                nibbles |= 1u << (s & 15);
            }
        }
    }

    table = {};
    for (uint32_t r = 0; r < format::TABLE_SYMBOLS; ++r)
        table.symbol[(r / 3) << 2 | r % 3] = symbols[r];
    return true;
}

} // namespace zip::cpu
#endif
