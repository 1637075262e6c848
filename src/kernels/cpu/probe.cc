// SPDX-License-Identifier: BSD-3-Clause
// Guess of a buffer's type and shape: the codec's cost, computed from a sample for each that it can
// be.
#include <algorithm>
#include <cstring>
#include <iterator>

#include "kernels/codec.h"
#include "kernels/cpu/internal.h"
#include "kernels/cpu/table.h"

namespace zip::cpu {
namespace {

// Half of what the interface allows.
constexpr size_t PIECES = 32;
constexpr size_t PIECE = 256;
static_assert(PIECES * PIECE <= ZIP_CODEC_PROBE_BYTES);

// Neighbouring pieces that are judged together. Tables are local to a tile, so several parts of a
// buffer with a table each are nearer to the truth than one table for all, as long as each part has
// many more values than symbols.
constexpr size_t PART_PIECES = 8;
constexpr size_t PART = PART_PIECES * PIECE;

// A gain below this is not worth the time.
constexpr double WORTHWHILE = 0.98;

// Difference in ratio that is beyond doubt, with at least SURE_BYTES bytes seen.
constexpr double SURE_GAP = 0.08;
constexpr double SURE_BYTES = 4096;

// What a probe chooses from. At equal ratios the first is taken.
constexpr uint8_t TYPES[] = {DTYPE_BF16, DTYPE_FP32, DTYPE_FP16,
                             DTYPE_FP64, DTYPE_E4M3, DTYPE_E5M2};
constexpr uint8_t SHAPES[] = {SHAPE_22228, SHAPE_11238};

// Bits behind level 1 that coding, or else keeping, takes for `values` values with these commonest
// symbols.
uint64_t tail_bits(const TopSymbols &top, uint32_t values, uint8_t dtype, uint8_t shape)
{
    const ShapeTraits traits = shape_traits(shape);
    uint64_t bits = 0;
    uint32_t escaped = values, symbol = 0;
    for (uint32_t level = 0; level < traits.levels; ++level) {
        if (level != 0)
            bits += traits.width[level] * escaped;
        for (uint32_t end = symbol + (1u << traits.width[level]) - 1; symbol < end; ++symbol)
            escaped -= symbol < top.size() ? top.count(symbol) : 0;
    }
    bits += 8 * escaped;
    return std::min<uint64_t>(bits, (type_traits(dtype).exponent_bits - traits.width[0]) * values);
}

// Exponents of the values that the bytes of a part of the sample can be.
class Histograms {
public:
    // `n` is a multiple of 8.
    void add(const uint8_t *src, size_t n)
    {
        for (size_t i = 0; i < n; i += 8) {
            uint64_t x;
            memcpy(&x, src + i, sizeof(x));
            for (uint32_t k = 0; k < 8; k += 2) {
                ++even_[x >> 8 * k & 0xff];
                ++odd_[x >> 8 * (k + 1) & 0xff];
            }
            for (uint32_t k = 0; k < 64; k += 32) {
                ++lower_[x >> (k + 7) & 0xff];
                ++upper_[x >> (k + 23) & 0xff];
            }
            fp64_[fp64s_++] = uint16_t(x >> 52 & 0x7ff);
        }
    }

    // Bits behind level 1 for each type and shape, added to `bits`.
    void add_tail_bits(uint64_t (&bits)[std::size(TYPES)][std::size(SHAPES)]) const
    {
        for (size_t t = 0; t < std::size(TYPES); ++t) {
            uint32_t count[256] = {};
            const bool has_symbols = count_symbols(TYPES[t], count);
            TopSymbols top(MOST_SYMBOLS);
            for (uint32_t s = 0; s < 256; ++s) {
                if (count[s] != 0 && has_symbols)
                    top.offer(count[s], s);
            }
            const uint32_t values = 8 * fp64s_ / value_size(TYPES[t]);
            for (size_t s = 0; s < std::size(SHAPES); ++s)
                bits[t][s] += tail_bits(top, values, TYPES[t], SHAPES[s]);
        }
    }

private:
    static constexpr uint32_t MOST_SYMBOLS = shape_traits(SHAPE_22228).symbols;
    static_assert(MOST_SYMBOLS == shape_traits(SHAPE_11238).symbols);

    // False: some value has no symbol.
    bool count_symbols(uint8_t dtype, uint32_t (&count)[256]) const
    {
        switch (dtype) {
        case DTYPE_BF16:
            for (uint32_t s = 0; s < 256; ++s)
                count[s] = lower_[s] + upper_[s];
            return true;
        case DTYPE_FP32:
            std::copy(std::begin(upper_), std::end(upper_), count);
            return true;
        case DTYPE_FP16:
            for (uint32_t b = 0; b < 256; ++b)
                count[b >> 2 & 0x1f] += odd_[b];
            return true;
        case DTYPE_FP64: {
            uint32_t largest = 0;
            for (uint32_t i = 0; i < fp64s_; ++i)
                largest = fp64_[i] < format::FP64_INFINITY ? std::max<uint32_t>(largest, fp64_[i])
                                                           : largest;
            const uint32_t base = format::fp64_base(largest);
            for (uint32_t i = 0; i < fp64s_; ++i) {
                const uint32_t symbol = format::fp64_symbol(fp64_[i], base);
                if (symbol == format::NO_SYMBOL)
                    return false;
                ++count[symbol];
            }
            return true;
        }
        case DTYPE_E4M3:
            for (uint32_t b = 0; b < 256; ++b)
                count[b >> 3 & 0x0f] += even_[b] + odd_[b];
            return true;
        default:
            for (uint32_t b = 0; b < 256; ++b)
                count[b >> 2 & 0x1f] += even_[b] + odd_[b];
            return true;
        }
    }

    uint32_t even_[256] = {}, odd_[256] = {};    // bytes at even and odd addresses
    uint32_t lower_[256] = {}, upper_[256] = {}; // bf16 exponents in the halves of 32-bit words
    uint16_t fp64_[PART / 8];
    uint32_t fp64s_ = 0;
};

// Ratio of coding `length` bytes with a tail of `bits` a value.
double coded_ratio(Coding coding, uint64_t length, double bits)
{
    const Layout l = layout_of(coding, length);
    return (double(l.tail) + double(l.values) * bits / 8) / double(length);
}

zip_status_t probe(const void *src, size_t length, zip_probe_t *probe_p)
{
    if ((src == nullptr && length != 0) || probe_p == nullptr)
        return ZIP_ERR_INVALID_PARAM;
    *probe_p = {ZIP_DTYPE_BYTES, ZIP_SHAPE_DEFAULT, 1, 0};
    if (length < sizeof(uint64_t) || length > MAX_CODED_LENGTH)
        return ZIP_OK;

    const auto *const bytes = static_cast<const uint8_t *>(src);
    const bool all = length <= PIECES * PIECE;
    const size_t pieces = all ? div_up(length, PIECE) : PIECES;
    uint64_t bits[std::size(TYPES)][std::size(SHAPES)] = {}, seen = 0;
    for (size_t part = 0; part < pieces; part += PART_PIECES) {
        Histograms h;
        for (size_t i = part; i < std::min(part + PART_PIECES, pieces); ++i) {
            // The quotient first: no overflow; multiples of 8 keep values of any type whole.
            const size_t at = all ? i * PIECE : (length - PIECE) / (PIECES - 1) * i / 8 * 8;
            const size_t n = std::min(PIECE, length - at) / 8 * 8;
            h.add(bytes + at, n);
            seen += n;
        }
        h.add_tail_bits(bits);
    }

    // The best, and how far from it the best of another type is.
    double best = 2, other = 2;
    for (size_t t = 0; t < std::size(TYPES); ++t) {
        double of_type = 2;
        zip_shape_t shape = ZIP_SHAPE_DEFAULT;
        for (size_t s = 0; s < std::size(SHAPES); ++s) {
            const double values = double(seen / value_size(TYPES[t]));
            const double ratio =
                    coded_ratio({TYPES[t], SHAPES[s], false}, length, double(bits[t][s]) / values);
            if (ratio < of_type) {
                of_type = ratio;
                shape = zip_shape_t(SHAPES[s]);
            }
        }
        if (of_type < best) {
            other = best;
            best = of_type;
            if (best <= WORTHWHILE)
                *probe_p = {zip_dtype_t(TYPES[t]), shape, float(best), 0};
        } else {
            other = std::min(other, of_type);
        }
    }
    const double gap = best <= WORTHWHILE ? std::min(other, 1.0) - best : best - WORTHWHILE;
    probe_p->confidence =
            float(std::min(gap / SURE_GAP, 1.0) * std::min(double(seen) / SURE_BYTES, 1.0));
    return ZIP_OK;
}

} // namespace
} // namespace zip::cpu

zip_status_t zip_codec_probe(const void *src, size_t length, zip_probe_t *probe_p)
{
    return zip::cpu::probe(src, length, probe_p);
}
