// SPDX-License-Identifier: BSD-3-Clause
// The shapes' cascades on plane words: which bits have a code at which level, and the codes. The
// planes r[0..3] hold the rank indices of 32 code positions (format.md, section 3); padding has
// rank index 0. Device code.
#ifndef ZIP_KERNELS_GPU_CASCADE_H
#define ZIP_KERNELS_GPU_CASCADE_H

#include <cstdint>

#include "kernels/format.h"
#include "kernels/gpu/simt.h"

namespace zip::gpu {

// Per shape:
//   LEVELS                 levels behind level 1 ("tail levels", from 0), then raw symbols
//   width(t)               bits of a code at tail level t
//   level1(r, code)        planes of level 1's codes
//   masks(r, m)            m[t]: who has a code at tail level t; m[LEVELS]: who is raw
//   code(r, m, t, q)       bit q of the codes at tail level t, right under m[t]
// and for decoding, given a tail level's code bits in place:
//   start(level1, r, m)    r and m[0] from level 1; r as if nobody escaped further
//   next(t, x, r, m)       r and m[t + 1] from the codes x at tail level t (undefined outside m)
template <uint8_t kShape>
struct Cascade;

template <>
struct Cascade<format::SHAPE_22228> {
    static constexpr uint32_t LEVELS = 3, WIDTH1 = 2;
    ZIP_HOST_DEVICE static constexpr uint32_t width(uint32_t) { return 2; }

    SIMT_DEVICE static void masks(const uint32_t (&r)[4], uint32_t (&m)[LEVELS + 1])
    {
        m[0] = r[2] | r[3];
        m[1] = r[3];
        m[2] = r[3] & r[2];
        m[3] = r[3] & r[2] & r[1] & r[0];
    }
    SIMT_DEVICE static void level1(const uint32_t (&r)[4], const uint32_t (&m)[LEVELS + 1],
                                   uint32_t (&code)[WIDTH1])
    {
        code[0] = r[0] | m[0];
        code[1] = r[1] | m[0];
    }
    SIMT_DEVICE static uint32_t code(const uint32_t (&r)[4], const uint32_t (&m)[LEVELS + 1],
                                     uint32_t t, uint32_t q)
    {
        return t == 2 ? r[q] : r[q] | m[t + 1];
    }
    SIMT_DEVICE static void start(const uint32_t (&code)[WIDTH1], uint32_t (&r)[4],
                                  uint32_t (&m)[LEVELS + 1])
    {
        r[0] = code[0];
        r[1] = code[1];
        m[0] = code[0] & code[1];
        r[2] = m[0];
        r[3] = 0;
    }
    SIMT_DEVICE static void next(uint32_t t, const uint32_t (&x)[2], uint32_t (&r)[4],
                                 uint32_t (&m)[LEVELS + 1])
    {
        r[0] = (x[0] & m[t]) | (r[0] & ~m[t]);
        r[1] = (x[1] & m[t]) | (r[1] & ~m[t]);
        m[t + 1] = m[t] & x[0] & x[1];
        if (t == 0) { // from 4 | code to 8 | code
            r[3] = m[1];
            r[2] ^= m[1];
        } else if (t == 1) { // to 12 | code
            r[2] ^= m[2];
        }
    }
};

template <>
struct Cascade<format::SHAPE_COLUMNS> : Cascade<format::SHAPE_22228> {
};

template <>
struct Cascade<format::SHAPE_11238> {
    static constexpr uint32_t LEVELS = 3, WIDTH1 = 1;
    ZIP_HOST_DEVICE static constexpr uint32_t width(uint32_t t) { return t + 1; }

    SIMT_DEVICE static void masks(const uint32_t (&r)[4], uint32_t (&m)[LEVELS + 1])
    {
        m[0] = r[1] | r[2] | r[3];
        m[1] = r[2] | r[3];
        m[2] = r[3];
        m[3] = r[3] & r[2] & r[1] & r[0];
    }
    SIMT_DEVICE static void level1(const uint32_t (&)[4], const uint32_t (&m)[LEVELS + 1],
                                   uint32_t (&code)[WIDTH1])
    {
        code[0] = m[0];
    }
    SIMT_DEVICE static uint32_t code(const uint32_t (&r)[4], const uint32_t (&m)[LEVELS + 1],
                                     uint32_t t, uint32_t q)
    {
        return t == 0 ? m[1] : t == 1 ? r[q] | m[2] : r[q];
    }
    SIMT_DEVICE static void start(const uint32_t (&code)[WIDTH1], uint32_t (&r)[4],
                                  uint32_t (&m)[LEVELS + 1])
    {
        m[0] = code[0];
        r[0] = r[2] = r[3] = 0;
        r[1] = m[0];
    }
    SIMT_DEVICE static void next(uint32_t t, const uint32_t (&x)[3], uint32_t (&r)[4],
                                 uint32_t (&m)[LEVELS + 1])
    {
        if (t == 0) { // from 2 to 4 | code
            m[1] = m[0] & x[0];
            r[1] ^= m[1];
            r[2] = m[1];
        } else if (t == 1) {
            r[0] = x[0] & m[1];
            r[1] = (x[1] & m[1]) | (r[1] & ~m[1]);
            m[2] = m[1] & x[0] & x[1];
            r[2] ^= m[2];
            r[3] = m[2];
        } else {
            r[0] = (x[0] & m[2]) | (r[0] & ~m[2]);
            r[1] = (x[1] & m[2]) | (r[1] & ~m[2]);
            r[2] |= x[2] & m[2];
            m[3] = m[2] & x[0] & x[1] & x[2];
        }
    }
};

template <>
struct Cascade<format::SHAPE_38> {
    static constexpr uint32_t LEVELS = 0, WIDTH1 = 3;
    ZIP_HOST_DEVICE static constexpr uint32_t width(uint32_t) { return 0; }

    SIMT_DEVICE static void masks(const uint32_t (&r)[4], uint32_t (&m)[LEVELS + 1])
    {
        m[0] = r[0] & r[1] & r[2];
    }
    SIMT_DEVICE static void level1(const uint32_t (&r)[4], const uint32_t (&)[LEVELS + 1],
                                   uint32_t (&code)[WIDTH1])
    {
        code[0] = r[0];
        code[1] = r[1];
        code[2] = r[2];
    }
    SIMT_DEVICE static uint32_t code(const uint32_t (&)[4], const uint32_t (&)[LEVELS + 1],
                                     uint32_t, uint32_t)
    {
        return 0;
    }
    SIMT_DEVICE static void start(const uint32_t (&code)[WIDTH1], uint32_t (&r)[4],
                                  uint32_t (&m)[LEVELS + 1])
    {
        r[0] = code[0];
        r[1] = code[1];
        r[2] = code[2];
        r[3] = ~uint32_t(0);
        m[0] = code[0] & code[1] & code[2];
    }
    SIMT_DEVICE static void next(uint32_t, const uint32_t (&)[1], uint32_t (&)[4],
                                 uint32_t (&)[LEVELS + 1])
    {
    }
};

template <>
struct Cascade<format::SHAPE_DENSE> {
    static constexpr uint32_t LEVELS = 6, WIDTH1 = 2;
    ZIP_HOST_DEVICE static constexpr uint32_t width(uint32_t t) { return t < 4 ? 1 : 2; }

    SIMT_DEVICE static void masks(const uint32_t (&r)[4], uint32_t (&m)[LEVELS + 1])
    {
        m[0] = r[2] | r[3];
        m[1] = r[3] | (r[2] & (r[1] | r[0]));
        m[2] = r[3] | (r[2] & r[1]);
        m[3] = r[3] | (r[2] & r[1] & r[0]);
        m[4] = r[3];
        m[5] = r[3] & r[2];
        m[6] = r[3] & r[2] & r[1] & r[0];
    }
    SIMT_DEVICE static void level1(const uint32_t (&r)[4], const uint32_t (&m)[LEVELS + 1],
                                   uint32_t (&code)[WIDTH1])
    {
        code[0] = r[0] | m[0];
        code[1] = r[1] | m[0];
    }
    SIMT_DEVICE static uint32_t code(const uint32_t (&r)[4], const uint32_t (&m)[LEVELS + 1],
                                     uint32_t t, uint32_t q)
    {
        return t < 4 ? m[t + 1] : t == 4 ? r[q] | m[5] : r[q];
    }
    SIMT_DEVICE static void start(const uint32_t (&code)[WIDTH1], uint32_t (&r)[4],
                                  uint32_t (&m)[LEVELS + 1])
    {
        m[0] = code[0] & code[1];
        r[0] = code[0] & ~m[0];
        r[1] = code[1] & ~m[0];
        r[2] = m[0]; // 4
        r[3] = 0;
    }
    SIMT_DEVICE static void next(uint32_t t, const uint32_t (&x)[2], uint32_t (&r)[4],
                                 uint32_t (&m)[LEVELS + 1])
    {
        if (t < 4) {
            m[t + 1] = m[t] & x[0];
            const uint32_t e = m[t + 1];
            if (t == 0) { // 4 -> 5
                r[0] |= e;
            } else if (t == 1) { // 5 -> 6
                r[0] ^= e;
                r[1] |= e;
            } else if (t == 2) { // 6 -> 7
                r[0] |= e;
            } else { // 7 -> 8 | code
                r[0] ^= e;
                r[1] ^= e;
                r[2] ^= e;
                r[3] |= e;
            }
        } else {
            r[0] = (x[0] & m[t]) | (r[0] & ~m[t]);
            r[1] = (x[1] & m[t]) | (r[1] & ~m[t]);
            m[t + 1] = m[t] & x[0] & x[1];
            if (t == 4) // to 12 | code
                r[2] |= m[5];
        }
    }
};

// The bits of a code at the widest tail level, at least 1.
template <uint8_t kShape>
ZIP_HOST_DEVICE constexpr uint32_t max_tail_width()
{
    uint32_t widest = 1;
    for (uint32_t t = 0; t < Cascade<kShape>::LEVELS; ++t)
        widest = Cascade<kShape>::width(t) > widest ? Cascade<kShape>::width(t) : widest;
    return widest;
}

// A shape's rank indices, commonest symbol first, as nibbles.
template <uint8_t kShape>
ZIP_HOST_DEVICE constexpr uint64_t packed_ranks()
{
    uint64_t packed = 0;
    for (uint32_t i = 0; i < format::shape_traits(kShape).symbols; ++i)
        packed |= uint64_t(format::shape_traits(kShape).rank[i]) << (4 * i);
    return packed;
}

} // namespace zip::gpu
#endif
