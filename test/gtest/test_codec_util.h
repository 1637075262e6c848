// SPDX-License-Identifier: BSD-3-Clause
// Data and memory for the codec's tests: kinds of tensors, and buffers that end at inaccessible
// pages.
#ifndef ZIP_TEST_CODEC_UTIL_H
#define ZIP_TEST_CODEC_UTIL_H

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "kernels/codec.h"
#include "kernels/format.h"

namespace zip::test {

using Bytes = std::vector<uint8_t>;

// Memory between two inaccessible pages, so that a single byte too far is a fault in any build.
class GuardedMemory {
public:
    explicit GuardedMemory(size_t capacity)
    {
        const size_t page = size_t(sysconf(_SC_PAGESIZE));
        inner_ = (capacity + page - 1) / page * page;
        total_ = inner_ + 2 * page;
        void *p = mmap(nullptr, total_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED)
            throw std::bad_alloc();
        base_ = static_cast<uint8_t *>(p);
        begin_ = base_ + page;
        if (mprotect(begin_, inner_, PROT_READ | PROT_WRITE) != 0)
            throw std::bad_alloc();
    }
    ~GuardedMemory() { munmap(base_, total_); }
    GuardedMemory(const GuardedMemory &) = delete;
    GuardedMemory &operator=(const GuardedMemory &) = delete;

    // `n` bytes that begin right behind, or end right before, an inaccessible page.
    uint8_t *first(size_t) { return begin_; }
    uint8_t *last(size_t n) { return begin_ + inner_ - n; }
    uint8_t *at(bool front, size_t n) { return front ? first(n) : last(n); }
    size_t capacity() const { return inner_; }

private:
    uint8_t *base_, *begin_;
    size_t inner_, total_;
};

enum class Data {
    NORMAL,
    UNIFORM,
    RANDOM_BITS,
    EQUAL,
    OUTLIER,     // equal but for one value a tile or so
    ALTERNATING, // two values
    DENORMAL,
    HALF_ZERO, // as behind a ReLU
    NANS,
    WIDE,      // exponents of many sizes, as gradients
    COLLIDING, // exponents equal in their low four bits
    FLAT,      // 16 exponents, equally frequent: just coded, and most values escape
    STEPS,     // runs of one exponent: words of 64 escapes
    RAMP,      // every bit pattern of the upper half in turn
    MIXED,     // tiles of different kinds: coded and raw
    COLUMNS,   // normal, 64 columns of different scale
};

constexpr Data ALL_DATA[] = {Data::NORMAL,  Data::UNIFORM,     Data::RANDOM_BITS, Data::EQUAL,
                             Data::OUTLIER, Data::ALTERNATING, Data::DENORMAL,    Data::HALF_ZERO,
                             Data::NANS,    Data::WIDE,        Data::COLLIDING,   Data::FLAT,
                             Data::STEPS,   Data::RAMP,        Data::MIXED,       Data::COLUMNS};

inline const char *name_of(Data data)
{
    constexpr const char *NAMES[] = {"Normal",  "Uniform",     "RandomBits", "Equal",
                                     "Outlier", "Alternating", "Denormal",   "HalfZero",
                                     "Nans",    "Wide",        "Colliding",  "Flat",
                                     "Steps",   "Ramp",        "Mixed",      "Columns"};
    return NAMES[size_t(data)];
}

inline uint32_t bits_of(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof(u));
    return u;
}

// The i-th value as fp32 bits.
inline uint32_t value_bits(Data data, size_t i, std::mt19937 &random)
{
    const auto uniform = [&random] { return float(random() >> 8) * 0x1p-24f; };
    const auto normal = [&] {
        float sum = -6; // Irwin-Hall: the same on every machine
        for (int k = 0; k < 12; ++k)
            sum += uniform();
        return sum;
    };
    switch (data) {
    case Data::NORMAL:
        return bits_of(0.02f * normal());
    case Data::UNIFORM:
        return bits_of(2 * uniform() - 1);
    case Data::RANDOM_BITS:
        return uint32_t(random());
    case Data::EQUAL:
        return 0x3f8ccccd;
    case Data::OUTLIER:
        return i % 7919 == 777 ? 0xff7fffffu : 0x3f800000u;
    case Data::ALTERNATING:
        return i % 2 == 0 ? 0xbf800000u : 0x42c80001u;
    case Data::DENORMAL:
        return uint32_t(random()) & 0x807fffff;
    case Data::HALF_ZERO:
        return bits_of(std::max(0.0f, normal()));
    case Data::NANS:
        return (uint32_t(random()) & 0x807fffff) | 0x7f800000;
    case Data::WIDE:
        return bits_of(normal() * std::exp2(-float(random() % 5 * (random() % 5))));
    case Data::COLLIDING:
        return (uint32_t(random()) & 0x807fffff) | uint32_t(random() % 5 * 16 + 7) << 23;
    case Data::FLAT:
        return (uint32_t(random()) & 0x807fffff) | (120 + uint32_t(random() % 16)) << 23;
    case Data::STEPS:
        return (uint32_t(random()) & 0x807fffff) | uint32_t(110 + i / 301 * 7 % 13) << 23;
    case Data::RAMP:
        return uint32_t(i) << 16 | (uint32_t(i) & 0xffff);
    case Data::MIXED:
        return value_bits(i / 8192 % 3 == 1 ? Data::RANDOM_BITS : Data::NORMAL, i, random);
    case Data::COLUMNS:
        return bits_of(normal() * std::exp2(float(i % 64 * 37 % 64) / 8 - 8));
    }
    return 0;
}

// A value of a type with that fp32 value's sign and, as far as it has them, exponent and mantissa.
// Its mantissa's bits below fp32's are those of `below`.
inline uint64_t convert(zip_dtype_t dtype, uint32_t fp32, uint32_t below)
{
    const uint32_t sign = fp32 >> 31, exponent = fp32 >> 23 & 0xff, mantissa = fp32 & 0x7fffff;
    // `scale` moves small values to where a short exponent has room.
    const auto narrow = [&](uint32_t e_bits, uint32_t m_bits, int scale) {
        const int most = (1 << e_bits) - 1, e = int(exponent) - 127 + most / 2 + scale;
        const uint32_t fits = exponent == 0     ? 0
                              : exponent == 255 ? uint32_t(most)
                                                : uint32_t(std::clamp(e, 0, most - 1));
        return uint64_t(sign << (e_bits + m_bits) | fits << m_bits | mantissa >> (23 - m_bits));
    };
    switch (dtype) {
    case ZIP_DTYPE_FP32:
        return fp32;
    case ZIP_DTYPE_FP16:
        return narrow(5, 10, 0);
    case ZIP_DTYPE_FP64: {
        const uint64_t wide = exponent == 0 ? 0 : exponent == 255 ? 2047 : exponent + 1023 - 127;
        return uint64_t(sign) << 63 | wide << 52 | uint64_t(mantissa) << 29 | below >> 3;
    }
    case ZIP_DTYPE_E4M3:
        return narrow(4, 3, 6);
    case ZIP_DTYPE_E5M2:
        return narrow(5, 2, 0);
    default:
        return fp32 >> 16;
    }
}

inline Bytes make_data(Data data, zip_dtype_t dtype, size_t length, uint32_t seed = 1)
{
    std::mt19937 random(seed);
    const size_t size = zip_dtype_size(dtype);
    Bytes bytes(length + size);
    for (size_t i = 0; i * size < length; ++i) {
        const uint32_t x = value_bits(data, i, random);
        const uint32_t below = uint32_t(i) * 0x9e3779b1u;
        const bool any_bits =
                data == Data::RANDOM_BITS || (data == Data::MIXED && i / 8192 % 3 == 1);
        uint64_t value = convert(dtype, x, below);
        if (any_bits)
            value = x | uint64_t(random()) << 32;
        else if (data == Data::RAMP) // every bit pattern of the head
            value = size >= 4 ? uint64_t(i) << (8 * size - 16) | below >> 16 : i;
        memcpy(bytes.data() + i * size, &value, size);
    }
    bytes.resize(length);
    return bytes;
}

// Every way to code, and its name in a test's.
inline std::vector<zip_coding_t> all_codings()
{
    std::vector<zip_coding_t> all;
    for (int dtype = ZIP_DTYPE_BF16; dtype < ZIP_DTYPE_LAST; ++dtype) {
        for (int shape = ZIP_SHAPE_22228; shape < ZIP_SHAPE_LAST; ++shape) {
            for (uint32_t small = 0; small < 2; ++small) {
                if (format::valid_coding({uint8_t(dtype), uint8_t(shape), small != 0}))
                    all.push_back({zip_dtype_t(dtype), zip_shape_t(shape), small});
            }
        }
    }
    return all;
}

inline std::string name_of(zip_coding_t c)
{
    return std::string(zip_dtype_name(c.dtype)) + "_" + zip_shape_name(c.shape) +
           (c.small_tiles != 0 ? "_small" : "");
}

inline format::Coding format_coding(zip_coding_t c)
{
    return {uint8_t(c.dtype), uint8_t(c.shape), c.small_tiles != 0};
}

} // namespace zip::test
#endif
