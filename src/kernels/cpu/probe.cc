// SPDX-License-Identifier: BSD-3-Clause
// Guess of a buffer's type: the codec's cost, computed from a sample for each type that it can be.
#include <algorithm>
#include <cstring>

#include "kernels/codec.h"
#include "kernels/cpu/internal.h"
#include "kernels/cpu/table.h"

namespace zip::cpu {
namespace {

// Half of what the interface allows: 3 to 6 us, most of it cache misses (Sapphire Rapids).
constexpr size_t PIECES = 32;
constexpr size_t PIECE = 256;
static_assert(PIECES * PIECE <= ZIP_CODEC_PROBE_BYTES);

// Neighbouring pieces that are judged together. Tables are local to a tile, so several parts of a
// buffer with a table each are nearer to the truth than one table for all, as long as each part has
// many more values than symbols.
constexpr size_t PART_PIECES = 8;

// A gain below this is not worth the time.
constexpr double WORTHWHILE = 0.98;

// Difference in ratio that is beyond doubt, with at least SURE_WORDS 32-bit words seen.
constexpr double SURE_GAP = 0.08;
constexpr double SURE_WORDS = 1024;

// Exponents of the upper and lower halves of 32-bit words. The former are those of fp32 values,
// both those of bf16.
struct Histogram {
    uint32_t upper[256] = {}, lower[256] = {};
    uint32_t words = 0;

    void add(const uint8_t *src, size_t n)
    {
        for (size_t i = 0; i < n; ++i) {
            uint32_t x;
            memcpy(&x, src + i * sizeof(x), sizeof(x));
            ++lower[x >> 7 & 0xff];
            ++upper[x >> 23 & 0xff];
        }
        words += uint32_t(n);
    }
};

// Bits behind level 1 for all values seen.
double tail_bits(const uint32_t (&count)[256], uint32_t values)
{
    TopSymbols top;
    for (uint32_t s = 0; s < 256; ++s) {
        if (count[s] != 0)
            top.offer(count[s], s);
    }
    return std::min(bits_behind_level1(top, values), 6 * values);
}

// Ratio of coding `length` bytes with a tail of `bits` a value.
double coded_ratio(uint8_t dtype, uint64_t length, double bits)
{
    const format::Layout l = format::layout_of(dtype, length);
    return (double(l.tail) + double(l.values) * bits / 8) / double(length);
}

zip_status_t probe(const void *src, size_t length, zip_probe_t *probe_p)
{
    if ((src == nullptr && length != 0) || probe_p == nullptr)
        return ZIP_ERR_INVALID_PARAM;

    const auto *const bytes = static_cast<const uint8_t *>(src);
    const bool all = length <= PIECES * PIECE;
    const size_t pieces = all ? format::div_up(length, PIECE) : PIECES;
    double bf16_bits = 0, fp32_bits = 0, words = 0;
    for (size_t part = 0; part < pieces; part += PART_PIECES) {
        Histogram h;
        for (size_t i = part; i < std::min(part + PART_PIECES, pieces); ++i) {
            // The quotient first: no overflow; multiples of 8 keep values of any type whole.
            const size_t at = all ? i * PIECE : (length - PIECE) / (PIECES - 1) * i / 8 * 8;
            h.add(bytes + at, std::min(PIECE, length - at) / sizeof(uint32_t));
        }
        fp32_bits += tail_bits(h.upper, h.words);
        for (uint32_t s = 0; s < 256; ++s)
            h.upper[s] += h.lower[s];
        bf16_bits += tail_bits(h.upper, 2 * h.words);
        words += h.words;
    }

    *probe_p = {ZIP_DTYPE_BYTES, 1, 0};
    if (words == 0)
        return ZIP_OK;
    const double bf16 = coded_ratio(ZIP_DTYPE_BF16, length, bf16_bits / (2 * words));
    const double fp32 = coded_ratio(ZIP_DTYPE_FP32, length, fp32_bits / words);
    const double best = std::min(bf16, fp32);
    double gap = best - WORTHWHILE;
    if (best <= WORTHWHILE) {
        probe_p->dtype = bf16 <= fp32 ? ZIP_DTYPE_BF16 : ZIP_DTYPE_FP32;
        probe_p->ratio = float(best);
        gap = std::min(std::max(bf16, fp32), 1.0) - best;
    }
    probe_p->confidence = float(std::min(gap / SURE_GAP, 1.0) * std::min(words / SURE_WORDS, 1.0));
    return ZIP_OK;
}

} // namespace
} // namespace zip::cpu

zip_status_t zip_codec_probe(const void *src, size_t length, zip_probe_t *probe_p)
{
    return zip::cpu::probe(src, length, probe_p);
}
