// SPDX-License-Identifier: BSD-3-Clause
// The types' part of the fast coder: takes values apart and puts them together.
// Compiled once for each instruction set: the guard flips each time that Highway includes simd.cc.
#if defined(ZIP_KERNELS_CPU_TYPES_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef ZIP_KERNELS_CPU_TYPES_INL_H
#undef ZIP_KERNELS_CPU_TYPES_INL_H
#else
#define ZIP_KERNELS_CPU_TYPES_INL_H
#endif

#include <algorithm>

#include "hwy/highway.h"
#include "kernels/cpu/internal.h"
#include "kernels/cpu/planes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zip::cpu {
namespace HWY_NAMESPACE {

// A tile's bytes between the parts.
struct TileBytes {
    alignas(64) uint8_t exponent[MAX_TILE_VALUES];      // fp64: symbols
    alignas(64) uint8_t sign_mantissa[MAX_TILE_VALUES]; // of types that have planes of them
    alignas(64) uint16_t exponent64[MAX_TILE_VALUES];   // fp64: exponents
};

// Memory that is wanted after a tile's blocks, called to the caches a share with each block: it
// comes while that is coded. Measured on a Xeon with AVX-512, bf16: where it comes from memory (16
// MiB and above) encode takes a tenth less time and decode a sixth; at 128 KiB, which the
// second-level cache holds, encode 8% less and decode 5% more.
struct Ahead {
    struct Range {
        const uint8_t *at;
        uint32_t block_bytes;
    };
    Range near[2] = {}; // to the first level
    Range far = {};     // to the second

    // Inlined, since GCC drops calls of a function that does nothing else.
    HWY_INLINE void fetch(uint32_t block) const
    {
        constexpr uint32_t LINE = 64;
        for (const Range &r : near) {
            for (uint32_t i = 0; i < r.block_bytes; i += LINE)
                __builtin_prefetch(r.at + r.block_bytes * block + i, 0, 3);
        }
        for (uint32_t i = 0; i < far.block_bytes; i += LINE)
            __builtin_prefetch(far.at + far.block_bytes * block + i, 0, 2);
    }
};

// Sections of a chunk at a tile's first value, what the type's part reads or writes there.
template <class Byte>
struct TypeSections {
    Byte *mantissa, *low, *low2;
};

// x >> kShift in every byte, with a neighbour's bits in its upper kShift bits.
template <int kShift>
HWY_INLINE ByteVec shift_right(ByteVec x)
{
    return hn::BitCast(Bytes(), hn::ShiftRight<kShift>(hn::BitCast(Halves(), x)));
}
template <int kShift>
HWY_INLINE ByteVec shift_left(ByteVec x)
{
    return hn::BitCast(Bytes(), hn::ShiftLeft<kShift>(hn::BitCast(Halves(), x)));
}

// Sign and mantissa, and exponent, of heads of 8 bits; and the inverse.
template <uint32_t kMantissa>
HWY_INLINE void split_heads(ByteVec head, ByteVec &sign_mantissa, ByteVec &exponent)
{
    const Bytes d8;
    exponent = hn::And(shift_right<kMantissa>(head), hn::Set(d8, 0x7f >> kMantissa));
    sign_mantissa = hn::Or(hn::And(shift_right<7 - kMantissa>(head), hn::Set(d8, 1 << kMantissa)),
                           hn::And(head, hn::Set(d8, (1 << kMantissa) - 1)));
}
template <uint32_t kMantissa>
HWY_INLINE ByteVec merge_heads(ByteVec sign_mantissa, ByteVec exponent)
{
    const Bytes d8;
    const ByteVec mantissa = hn::And(sign_mantissa, hn::Set(d8, (1 << kMantissa) - 1));
    const ByteVec sign = hn::And(shift_left<7 - kMantissa>(sign_mantissa), hn::Set(d8, 0x80));
    const ByteVec e = hn::And(shift_left<kMantissa>(exponent),
                              hn::Set(d8, uint8_t(0x7f >> kMantissa << kMantissa)));
    return hn::Or(hn::Or(sign, mantissa), e);
}

// Takes `n` values, a multiple of VECTOR, apart.
template <uint8_t kType>
void split_vectors(const uint8_t *src, uint32_t n, TypeSections<uint8_t> out, uint8_t *exponents,
                   uint8_t *sign_mantissa, uint16_t *exponents64)
{
    const Bytes d8;
    const Halves d16;
    const Words d32;
    const uint32_t step = uint32_t(hn::Lanes(d8));
    for (uint32_t v = 0; v < n; v += step) {
        if constexpr (kType == DTYPE_BF16 || kType == DTYPE_FP32) {
            ByteVec low, high; // of the upper 16 bits
            if constexpr (kType == DTYPE_FP32) {
                const auto a = hn::BitCast(d16, hn::LoadU(d8, src + 4 * v));
                const auto b = hn::BitCast(d16, hn::LoadU(d8, src + 4 * v + step));
                const auto c = hn::BitCast(d16, hn::LoadU(d8, src + 4 * v + 2 * step));
                const auto d = hn::BitCast(d16, hn::LoadU(d8, src + 4 * v + 3 * step));
                hn::StoreU(hn::BitCast(d8, hn::ConcatEven(d16, b, a)), d8, out.low + 2 * v);
                hn::StoreU(hn::BitCast(d8, hn::ConcatEven(d16, d, c)), d8, out.low + 2 * v + step);
                const ByteVec first = hn::BitCast(d8, hn::ConcatOdd(d16, b, a));
                const ByteVec second = hn::BitCast(d8, hn::ConcatOdd(d16, d, c));
                low = hn::ConcatEven(d8, second, first);
                high = hn::ConcatOdd(d8, second, first);
            } else {
                const ByteVec a = hn::LoadU(d8, src + 2 * v);
                const ByteVec b = hn::LoadU(d8, src + 2 * v + step);
                low = hn::ConcatEven(d8, b, a);
                high = hn::ConcatOdd(d8, b, a);
            }
            const ByteVec low7 = hn::Set(d8, 0x7f);
            hn::StoreU(hn::Or(hn::And(low, low7), hn::AndNot(low7, high)), d8, out.mantissa + v);
            // high << 1 | low >> 7; a set top bit is -1 as a comparison's result
            const hn::RebindToSigned<Bytes> i8;
            const auto top = hn::VecFromMask(i8, hn::Lt(hn::BitCast(i8, low), hn::Zero(i8)));
            hn::StoreU(hn::Sub(hn::Add(high, high), hn::BitCast(d8, top)), d8, exponents + v);
        } else if constexpr (kType == DTYPE_FP64) {
            ByteVec half_sm[2];
            for (uint32_t h = 0; h < 2; ++h) { // half a vector of values: 4 vectors
                WordVec upper[2];
                for (uint32_t i = 0; i < 2; ++i) {
                    const uint8_t *const from = src + 8 * v + (2 * h + i) * 2 * step;
                    const auto a = hn::BitCast(d32, hn::LoadU(d8, from));
                    const auto b = hn::BitCast(d32, hn::LoadU(d8, from + step));
                    hn::StoreU(hn::BitCast(d8, hn::ConcatEven(d32, b, a)), d8,
                               out.low2 + 4 * v + (2 * h + i) * step);
                    upper[i] = hn::ConcatOdd(d32, b, a);
                }
                const auto a = hn::BitCast(d16, upper[0]), b = hn::BitCast(d16, upper[1]);
                hn::StoreU(hn::BitCast(d8, hn::ConcatEven(d16, b, a)), d8,
                           out.low + 2 * v + h * step);
                const HalfVec head = hn::ConcatOdd(d16, b, a);
                hn::StoreU(hn::And(hn::ShiftRight<4>(head), hn::Set(d16, 0x7ff)), d16,
                           exponents64 + v + h * step / 2);
                half_sm[h] = hn::BitCast(d8, hn::Or(hn::ShiftLeft<4>(hn::ShiftRight<15>(head)),
                                                    hn::And(head, hn::Set(d16, 0x0f))));
            }
            hn::StoreU(hn::ConcatEven(d8, half_sm[1], half_sm[0]), d8, sign_mantissa + v);
        } else {
            ByteVec head;
            if constexpr (kType == DTYPE_FP16) {
                const ByteVec a = hn::LoadU(d8, src + 2 * v);
                const ByteVec b = hn::LoadU(d8, src + 2 * v + step);
                hn::StoreU(hn::ConcatEven(d8, b, a), d8, out.low + v);
                head = hn::ConcatOdd(d8, b, a);
            } else {
                head = hn::LoadU(d8, src + v);
            }
            ByteVec sm, exponent;
            split_heads<type_traits(kType).mantissa_bits>(head, sm, exponent);
            hn::StoreU(exponent, d8, exponents + v);
            hn::StoreU(sm, d8, sign_mantissa + v);
        }
    }
}

// The inverse.
template <uint8_t kType>
void merge_vectors(uint32_t n, TypeSections<const uint8_t> in, const uint8_t *exponents,
                   const uint8_t *sign_mantissa, const uint16_t *exponents64, uint8_t *dst)
{
    const Bytes d8;
    const Halves d16;
    const Words d32;
    const uint32_t step = uint32_t(hn::Lanes(d8));
    for (uint32_t v = 0; v < n; v += step) {
        if constexpr (kType == DTYPE_BF16 || kType == DTYPE_FP32) {
            const ByteVec low7 = hn::Set(d8, 0x7f), top = hn::Set(d8, 0x80);
            const ByteVec e = hn::LoadU(d8, exponents + v), m = hn::LoadU(d8, in.mantissa + v);
            const ByteVec low = hn::Or(hn::And(m, low7), hn::And(shift_left<7>(e), top));
            const ByteVec high = hn::Or(hn::And(m, top), hn::And(shift_right<1>(e), low7));
            if constexpr (kType == DTYPE_FP32) {
                alignas(64) uint8_t halves[2 * 64];
                hn::StoreInterleaved2(low, high, d8, halves);
                for (uint32_t i = 0; i < 2; ++i) {
                    const auto upper = hn::BitCast(d16, hn::Load(d8, halves + i * step));
                    const auto lower = hn::BitCast(d16, hn::LoadU(d8, in.low + 2 * v + i * step));
                    alignas(64) uint16_t out[2 * 32];
                    hn::StoreInterleaved2(lower, upper, d16, out);
                    memcpy(dst + 4 * v + 2 * i * step, out, 2 * step);
                }
            } else {
                hn::StoreInterleaved2(low, high, d8, dst + 2 * v);
            }
        } else if constexpr (kType == DTYPE_FP64) {
            const hn::Half<Bytes> half8;
            for (uint32_t h = 0; h < 2; ++h) {
                const HalfVec sm =
                        hn::PromoteTo(d16, hn::LoadU(half8, sign_mantissa + v + h * step / 2));
                const HalfVec e = hn::LoadU(d16, exponents64 + v + h * step / 2);
                const HalfVec head = hn::Or(
                        hn::Or(hn::ShiftLeft<15>(hn::ShiftRight<4>(sm)), hn::ShiftLeft<4>(e)),
                        hn::And(sm, hn::Set(d16, 0x0f)));
                const auto low = hn::BitCast(d16, hn::LoadU(d8, in.low + 2 * v + h * step));
                alignas(64) uint16_t upper[2 * 32];
                hn::StoreInterleaved2(low, head, d16, upper);
                for (uint32_t i = 0; i < 2; ++i) {
                    const auto u = hn::BitCast(d32, hn::Load(d16, upper + i * step / 2));
                    const auto l =
                            hn::BitCast(d32, hn::LoadU(d8, in.low2 + 4 * v + (2 * h + i) * step));
                    alignas(64) uint32_t out[2 * 16];
                    hn::StoreInterleaved2(l, u, d32, out);
                    memcpy(dst + 8 * v + (2 * h + i) * 2 * step, out, 2 * step);
                }
            }
        } else {
            const ByteVec head = merge_heads<type_traits(kType).mantissa_bits>(
                    hn::LoadU(d8, sign_mantissa + v), hn::LoadU(d8, exponents + v));
            if constexpr (kType == DTYPE_FP16)
                hn::StoreInterleaved2(hn::LoadU(d8, in.low + v), head, d8, dst + 2 * v);
            else
                hn::StoreU(head, d8, dst + v);
        }
    }
}

template <uint8_t kType>
struct Type {
    static constexpr TypeTraits T = type_traits(kType);
    static constexpr uint32_t LOW = T.low_bytes > 2 ? 2 : T.low_bytes, LOW2 = T.low_bytes - LOW;
    static constexpr bool HAS_BYTES = T.mantissa_is_bytes();

    // Takes a tile of `values` values apart: the vectors' share, then the rest through buffers that
    // end on a vector's boundary.
    static void split(const uint8_t *src, uint32_t values, TypeSections<uint8_t> out,
                      TileBytes &tile)
    {
        const uint32_t whole = values / VECTOR * VECTOR, rest = values % VECTOR;
        split_vectors<kType>(src, whole, out, tile.exponent, tile.sign_mantissa, tile.exponent64);
        if (rest != 0) {
            uint8_t in[8 * VECTOR] = {}, mantissa[VECTOR], low[2 * VECTOR], low2[4 * VECTOR];
            memcpy(in, src + T.size * whole, T.size * rest);
            split_vectors<kType>(in, VECTOR, {mantissa, low, low2}, tile.exponent + whole,
                                 tile.sign_mantissa + whole, tile.exponent64 + whole);
            if constexpr (HAS_BYTES)
                memcpy(out.mantissa + whole, mantissa, rest);
            if constexpr (LOW != 0)
                memcpy(out.low + LOW * whole, low, LOW * rest);
            if constexpr (LOW2 != 0)
                memcpy(out.low2 + LOW2 * whole, low2, LOW2 * rest);
        }
        // From here on the source is not read again.
        asm volatile("" : : "r"(&tile) : "memory");
    }

    static void merge(uint32_t values, TypeSections<const uint8_t> in, const TileBytes &tile,
                      uint8_t *dst)
    {
        const uint32_t whole = values / VECTOR * VECTOR, rest = values % VECTOR;
        merge_vectors<kType>(whole, in, tile.exponent, tile.sign_mantissa, tile.exponent64, dst);
        if (rest != 0) {
            uint8_t out[8 * VECTOR], mantissa[VECTOR] = {}, low[2 * VECTOR] = {},
                                     low2[4 * VECTOR] = {};
            if constexpr (HAS_BYTES)
                memcpy(mantissa, in.mantissa + whole, rest);
            if constexpr (LOW != 0)
                memcpy(low, in.low + LOW * whole, LOW * rest);
            if constexpr (LOW2 != 0)
                memcpy(low2, in.low2 + LOW2 * whole, LOW2 * rest);
            merge_vectors<kType>(VECTOR, {mantissa, low, low2}, tile.exponent + whole,
                                 tile.sign_mantissa + whole, tile.exponent64 + whole, out);
            memcpy(dst + T.size * whole, out, T.size * rest);
        }
    }

    // Moves a block of `values` bytes in element order to their code positions. The bytes of
    // padding are 0.
    static void to_positions(const uint8_t *elements, uint32_t values, uint8_t *positions)
    {
        if (values < BLOCK_VALUES) {
            const uint32_t words = uint32_t(div_up(values, WORD_VALUES));
            memset(positions, 0, BLOCK_VALUES);
            for (uint32_t w = 0; w < words; ++w) {
                for (uint32_t bit = 0; bit < WORD_VALUES; ++bit) {
                    const uint32_t v = value_at(kType, words, w, bit);
                    positions[(bit & 3) * STRIPE + 8 * w + (bit >> 2)] =
                            v < values ? elements[v] : 0;
                }
            }
            return;
        }
        const Bytes d8;
        const uint32_t step = uint32_t(hn::Lanes(d8));
        if constexpr (T.size == 1) { // two stripes, a word's 8 bytes of each in turn
            const Doubles d64;
            for (uint32_t h = 0; h < STRIPES / 2; ++h) {
                for (uint32_t v = 0; v < STRIPE; v += step) {
                    const uint8_t *const from = elements + 2 * (h * STRIPE + v);
                    const auto a = hn::BitCast(d64, hn::LoadU(d8, from));
                    const auto b = hn::BitCast(d64, hn::LoadU(d8, from + step));
                    uint8_t *const to = positions + 2 * h * STRIPE + v;
                    hn::StoreU(hn::BitCast(d8, hn::ConcatEven(d64, b, a)), d8, to);
                    hn::StoreU(hn::BitCast(d8, hn::ConcatOdd(d64, b, a)), d8, to + STRIPE);
                }
            }
        } else if constexpr (T.run() == 4) { // half stripes
            const Words d32;
            for (uint32_t i = 0; i < STRIPES; ++i) {
                for (uint32_t v = 0; v < STRIPE / 2; v += step) {
                    const uint8_t *const from = elements + i * STRIPE + v;
                    const auto a = hn::BitCast(d32, hn::LoadU(d8, from));
                    const auto b = hn::BitCast(d32, hn::LoadU(d8, from + STRIPE / 2));
                    hn::StoreInterleaved2(
                            a, b, d32,
                            reinterpret_cast<uint32_t *>(positions + i * STRIPE + 2 * v));
                }
            }
        } else if constexpr (T.run() == 2) { // quarter stripes
            const Halves d16;
            for (uint32_t i = 0; i < STRIPES; ++i) {
                for (uint32_t v = 0; v < STRIPE / 4; v += step) {
                    HalfVec q[4];
                    for (uint32_t k = 0; k < 4; ++k)
                        q[k] = hn::BitCast(
                                d16, hn::LoadU(d8, elements + i * STRIPE + k * STRIPE / 4 + v));
                    hn::StoreInterleaved4(
                            q[0], q[1], q[2], q[3], d16,
                            reinterpret_cast<uint16_t *>(positions + i * STRIPE + 4 * v));
                }
            }
        } else {
            memcpy(positions, elements, BLOCK_VALUES);
        }
    }

    static void from_positions(const uint8_t *positions, uint32_t values, uint8_t *elements)
    {
        if (values < BLOCK_VALUES) {
            const uint32_t words = uint32_t(div_up(values, WORD_VALUES));
            for (uint32_t w = 0; w < words; ++w) {
                for (uint32_t bit = 0; bit < WORD_VALUES; ++bit) {
                    const uint32_t v = value_at(kType, words, w, bit);
                    if (v < values)
                        elements[v] = positions[(bit & 3) * STRIPE + 8 * w + (bit >> 2)];
                }
            }
            return;
        }
        const Bytes d8;
        const uint32_t step = uint32_t(hn::Lanes(d8));
        if constexpr (T.size == 1) {
            const Doubles d64;
            for (uint32_t h = 0; h < STRIPES / 2; ++h) {
                for (uint32_t v = 0; v < STRIPE; v += step) {
                    const uint8_t *const from = positions + 2 * h * STRIPE + v;
                    const auto a = hn::BitCast(d64, hn::LoadU(d8, from));
                    const auto b = hn::BitCast(d64, hn::LoadU(d8, from + STRIPE));
                    hn::StoreInterleaved2(
                            a, b, d64,
                            reinterpret_cast<uint64_t *>(elements + 2 * (h * STRIPE + v)));
                }
            }
        } else if constexpr (T.run() == 4) {
            const Words d32;
            for (uint32_t i = 0; i < STRIPES; ++i) {
                for (uint32_t v = 0; v < STRIPE / 2; v += step) {
                    WordVec a, b;
                    hn::LoadInterleaved2(
                            d32, reinterpret_cast<const uint32_t *>(positions + i * STRIPE + 2 * v),
                            a, b);
                    hn::StoreU(hn::BitCast(d8, a), d8, elements + i * STRIPE + v);
                    hn::StoreU(hn::BitCast(d8, b), d8, elements + i * STRIPE + STRIPE / 2 + v);
                }
            }
        } else if constexpr (T.run() == 2) {
            const Halves d16;
            for (uint32_t i = 0; i < STRIPES; ++i) {
                for (uint32_t v = 0; v < STRIPE / 4; v += step) {
                    HalfVec q[4];
                    hn::LoadInterleaved4(
                            d16, reinterpret_cast<const uint16_t *>(positions + i * STRIPE + 4 * v),
                            q[0], q[1], q[2], q[3]);
                    for (uint32_t k = 0; k < 4; ++k)
                        hn::StoreU(hn::BitCast(d8, q[k]), d8,
                                   elements + i * STRIPE + k * STRIPE / 4 + v);
                }
            }
        } else {
            memcpy(elements, positions, BLOCK_VALUES);
        }
    }

    // For each word of a block the bits that are values.
    static void values_of_words(uint32_t values, uint32_t (&exist)[BLOCK_WORDS])
    {
        const uint32_t words = uint32_t(div_up(values, WORD_VALUES));
        memset(exist, 0, sizeof(exist));
        for (uint32_t w = 0; w < words; ++w) {
            for (uint32_t bit = 0; bit < WORD_VALUES; ++bit)
                exist[w] |= uint32_t(value_at(kType, words, w, bit) < values) << bit;
        }
    }
};

// A type's part, chosen at run time.
struct TypeOps {
    bool in_place; // a full block's elements are at their code positions
    void (*split)(const uint8_t *, uint32_t, TypeSections<uint8_t>, TileBytes &);
    void (*merge)(uint32_t, TypeSections<const uint8_t>, const TileBytes &, uint8_t *);
    void (*to_positions)(const uint8_t *, uint32_t, uint8_t *);
    void (*from_positions)(const uint8_t *, uint32_t, uint8_t *);
    void (*values_of_words)(uint32_t, uint32_t (&)[BLOCK_WORDS]);
};

template <uint8_t kType>
constexpr TypeOps type_ops = {type_traits(kType).size == 2, Type<kType>::split,
                              Type<kType>::merge,           Type<kType>::to_positions,
                              Type<kType>::from_positions,  Type<kType>::values_of_words};

const TypeOps &type_ops_of(uint8_t dtype)
{
    switch (dtype) {
    case DTYPE_FP32:
        return type_ops<DTYPE_FP32>;
    case DTYPE_FP16:
        return type_ops<DTYPE_FP16>;
    case DTYPE_FP64:
        return type_ops<DTYPE_FP64>;
    case DTYPE_E4M3:
        return type_ops<DTYPE_E4M3>;
    case DTYPE_E5M2:
        return type_ops<DTYPE_E5M2>;
    default:
        return type_ops<DTYPE_BF16>;
    }
}

} // namespace HWY_NAMESPACE
} // namespace zip::cpu
HWY_AFTER_NAMESPACE();

#endif
