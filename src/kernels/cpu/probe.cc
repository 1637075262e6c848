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

// Less than the interface allows: 7 to 9 us, warm (Sapphire Rapids).
constexpr size_t PIECES = 24;
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

// Exponents of the values that the bytes of a part of the sample can be. Counters are many and
// small, since successive increments of one would wait for each other.
class Histograms {
public:
    // `n` is a multiple of 8.
    void add(const uint8_t *src, size_t n)
    {
        for (size_t i = 0; i < n; i += 8) {
            uint64_t x;
            memcpy(&x, src + i, sizeof(x));
            ++half_[0][x >> 7 & 0xff];
            ++half_[1][x >> 23 & 0xff];
            ++half_[2][x >> 39 & 0xff];
            ++half_[3][x >> 55 & 0xff];
            fp64_[fp64s_++] = uint16_t(x >> 52 & 0x7ff);
            // Types of few symbols need no more than half of the values.
            if (i % 16 != 0)
                continue;
            ++byte_[0][x >> 2 & 0x1f];
            ++byte_[1][x >> 10 & 0x1f];
            ++byte_[2][x >> 18 & 0x1f];
            ++byte_[3][x >> 26 & 0x1f];
            ++byte_[4][x >> 34 & 0x1f];
            ++byte_[5][x >> 42 & 0x1f];
            ++byte_[6][x >> 50 & 0x1f];
            ++byte_[7][x >> 58 & 0x1f];
        }
    }

    // Adds the bits behind level 1 for each type and shape to `bits`, the values to `values`.
    void add_tail_bits(double (&bits)[std::size(TYPES)][std::size(SHAPES)],
                       uint32_t (&values)[std::size(TYPES)]) const
    {
        for (size_t t = 0; t < std::size(TYPES); ++t) {
            uint16_t count[256];
            const uint32_t symbols = count_symbols(TYPES[t], count);
            TopSymbols top(MOST_SYMBOLS);
            uint32_t counted = 0;
            for (uint32_t s = 0; s < symbols; s += 4) {
                uint64_t four;
                memcpy(&four, count + s, sizeof(four));
                if (four == 0)
                    continue;
                for (uint32_t i = s; i < s + 4; ++i) {
                    counted += count[i];
                    if (count[i] != 0)
                        top.offer(count[i], i);
                }
            }
            if (symbols == 0) // raw tiles
                counted = fp64s_;
            values[t] += counted;
            for (size_t s = 0; s < std::size(SHAPES); ++s)
                bits[t][s] += double(tail_bits(top, counted, TYPES[t], SHAPES[s]));
        }
    }

private:
    static constexpr uint32_t MOST_SYMBOLS = shape_traits(SHAPE_22228).symbols;
    static_assert(MOST_SYMBOLS == shape_traits(SHAPE_11238).symbols);

    // Returns how many symbols there may be; 0: some value has none.
    uint32_t count_symbols(uint8_t dtype, uint16_t (&count)[256]) const
    {
        switch (dtype) {
        case DTYPE_BF16:
            for (uint32_t s = 0; s < 256; ++s)
                count[s] = uint16_t(half_[0][s] + half_[1][s] + half_[2][s] + half_[3][s]);
            return 256;
        case DTYPE_FP32:
            for (uint32_t s = 0; s < 256; ++s)
                count[s] = uint16_t(half_[1][s] + half_[3][s]);
            return 256;
        case DTYPE_FP16:
            for (uint32_t s = 0; s < 32; ++s)
                count[s] = uint16_t(byte_[1][s] + byte_[3][s] + byte_[5][s] + byte_[7][s]);
            return 32;
        case DTYPE_FP64: {
            uint32_t largest = 0;
            for (uint32_t i = 0; i < fp64s_; ++i)
                largest = fp64_[i] < format::FP64_INFINITY ? std::max<uint32_t>(largest, fp64_[i])
                                                           : largest;
            const uint32_t base = format::fp64_base(largest);
            memset(count, 0, sizeof(count));
            for (uint32_t i = 0; i < fp64s_; ++i) {
                const uint32_t symbol = format::fp64_symbol(fp64_[i], base);
                if (symbol == format::NO_SYMBOL)
                    return 0;
                ++count[symbol];
            }
            return 256;
        }
        default: {
            uint16_t all[32];
            for (uint32_t s = 0; s < 32; ++s)
                all[s] = uint16_t(byte_[0][s] + byte_[1][s] + byte_[2][s] + byte_[3][s] +
                                  byte_[4][s] + byte_[5][s] + byte_[6][s] + byte_[7][s]);
            if (dtype == DTYPE_E5M2) {
                memcpy(count, all, sizeof(all));
                return 32;
            }
            for (uint32_t s = 0; s < 16; ++s) // the fifth bit is of the mantissa
                count[s] = uint16_t(all[2 * s] + all[2 * s + 1]);
            return 16;
        }
        }
    }

    uint16_t half_[4][256] = {}; // bits 7..14 of 16-bit words, by their place in 64 bits
    uint16_t byte_[8][32] = {};  // bits 2..6 of bytes, by their place in 64 bits
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
    double bits[std::size(TYPES)][std::size(SHAPES)] = {};
    uint32_t values[std::size(TYPES)] = {};
    size_t seen = 0;
    for (size_t part = 0; part < pieces; part += PART_PIECES) {
        Histograms h;
        for (size_t i = part; i < std::min(part + PART_PIECES, pieces); ++i) {
            // The quotient first: no overflow; multiples of 8 keep values of any type whole.
            const size_t at = all ? i * PIECE : (length - PIECE) / (PIECES - 1) * i / 8 * 8;
            const size_t n = std::min(PIECE, length - at) / 8 * 8;
            h.add(bytes + at, n);
            seen += n;
        }
        h.add_tail_bits(bits, values);
    }

    // The best, and how far from it the best of another type is.
    double best = 2, other = 2;
    for (size_t t = 0; t < std::size(TYPES); ++t) {
        double of_type = 2;
        zip_shape_t shape = ZIP_SHAPE_DEFAULT;
        for (size_t s = 0; s < std::size(SHAPES); ++s) {
            const double ratio =
                    coded_ratio({TYPES[t], SHAPES[s], false}, length, bits[t][s] / values[t]);
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
