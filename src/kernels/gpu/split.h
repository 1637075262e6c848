// SPDX-License-Identifier: BSD-3-Clause
// A block of values in a lane group's registers: loads and stores of its rows, and the split of
// values into symbols, sign and mantissa, and low parts. Device code.
//
// A block of W plane words is a sequence of rows of W vectors of 16 bytes; lane w has vector w of
// each row, and that is plane word w (format.md, section 4): row rho, lane w, component c is the
// block's value (rho * W + w) * V + c.
#ifndef ZIP_KERNELS_GPU_SPLIT_H
#define ZIP_KERNELS_GPU_SPLIT_H

#include <cstdint>

#include "kernels/format.h"
#include "kernels/gpu/bits.h"
#include "kernels/gpu/simt.h"

namespace zip::gpu {

using simt::U32x2;
using simt::U32x4;

template <uint8_t kDtype, uint8_t kShape>
struct TileTraits {
    static constexpr uint8_t DTYPE = kDtype, SHAPE = kShape;
    static constexpr bool COLUMNS = SHAPE == format::SHAPE_COLUMNS;
    static constexpr format::Coding CODING{kDtype, kShape, false};
    static constexpr format::TypeTraits TYPE = format::type_traits(kDtype);
    static constexpr format::ShapeTraits CASCADE = format::shape_traits(kShape);
    static constexpr uint32_t VALUES = format::tile_values(CODING);
    static constexpr uint32_t BLOCKS = VALUES / format::BLOCK_VALUES;
    static constexpr uint32_t GROUP_BLOCKS = 2; // most blocks of a lane group; 1 in small tiles
    static constexpr uint32_t GROUPS = BLOCKS / GROUP_BLOCKS; // lane groups of a worker
    static constexpr uint32_t THREADS = GROUPS * simt::LANES;
    static constexpr uint32_t SIZE = TYPE.size;
    static constexpr uint32_t ROWS = 2 * SIZE;        // of a block
    static constexpr uint32_t ROW_VALUES = 16 / SIZE; // in a vector
    static constexpr uint32_t BLOCK_BYTES = format::BLOCK_VALUES * SIZE;
    static constexpr uint32_t K = TYPE.sign_mantissa_bits();
    static constexpr bool MANTISSA_BYTES = TYPE.mantissa_is_bytes();
    static constexpr uint32_t WIDTH1 = CASCADE.width[0];
    static constexpr uint32_t E = TYPE.exponent_bits;
    static constexpr uint32_t LOW = TYPE.low_bytes > 2 ? 2 : TYPE.low_bytes; // bytes in section LOW
};

// A tile's geometry: what the format calls a group is a lane group's blocks (but in shape dense).
struct TileExtent {
    bool small, whole;
    uint32_t values;
    uint32_t blocks; // of a lane group: 2, or 1 in small tiles
    uint32_t groups; // of the tile that exist
};

// What exists of a block.
struct BlockExtent {
    uint32_t values; // 0..1024
    uint32_t words;  // W
};

SIMT_DEVICE BlockExtent block_extent(uint32_t tile_values, uint32_t block)
{
    const uint32_t before = block * format::BLOCK_VALUES;
    const uint32_t left = tile_values > before ? tile_values - before : 0;
    const uint32_t values = left < format::BLOCK_VALUES ? left : format::BLOCK_VALUES;
    return {values, (values + 31) / 32};
}

// The tile from whose first value there are `left` values to the chunk's end.
template <class T>
SIMT_DEVICE TileExtent tile_extent(uint64_t left, bool small)
{
    TileExtent t;
    t.small = small;
    t.blocks = small ? 1 : 2;
    const uint32_t all = small ? T::VALUES / 2 : T::VALUES;
    t.whole = left >= all;
    t.values = t.whole ? all : uint32_t(left);
    t.groups = t.whole ? T::GROUPS
                       : (t.values + t.blocks * format::BLOCK_VALUES - 1) /
                                 (t.blocks * format::BLOCK_VALUES);
    return t;
}

template <class T>
SIMT_DEVICE constexpr TileExtent whole_tile()
{
    return {false, true, T::VALUES, T::GROUP_BLOCKS, T::GROUPS};
}

// Block h of lane group `group`.
template <bool kWhole>
SIMT_DEVICE BlockExtent group_block(const TileExtent &tile, uint32_t group, uint32_t h)
{
    if constexpr (kWhole)
        return {format::BLOCK_VALUES, format::BLOCK_WORDS};
    if (h >= tile.blocks)
        return {0, 0};
    return block_extent(tile.values, group * tile.blocks + h);
}

// 16 bytes of the 32 bytes a, b, from byte `from` (0..15) on, kWord being from / 4.
template <uint32_t kWord>
SIMT_DEVICE U32x4 window(const uint32_t (&a)[4], const uint32_t (&b)[4], uint32_t from)
{
    const uint32_t bits = 8 * (from & 3);
    uint32_t w[5];
    SIMT_UNROLL
    for (uint32_t j = 0; j < 5; ++j)
        w[j] = j + kWord < 4 ? a[(j + kWord) & 3] : b[(j + kWord) & 3];
    return {simt::funnel_right(w[0], w[1], bits), simt::funnel_right(w[1], w[2], bits),
            simt::funnel_right(w[2], w[3], bits), simt::funnel_right(w[3], w[4], bits)};
}

// f<word>(), for a word (0..3) that is the same for all lanes.
template <class F>
SIMT_DEVICE void with_word(uint32_t word, F f)
{
    if (word == 0)
        f.template operator()<0>();
    else if (word == 1)
        f.template operator()<1>();
    else if (word == 2)
        f.template operator()<2>();
    else
        f.template operator()<3>();
}

// Rows that follow each other in memory and begin `off` bytes (1..15, the same for all lanes)
// behind `v`, a lane's aligned vectors: `behind` is, for lane 0, the vector behind the last row.
template <uint32_t kRows>
SIMT_DEVICE void shift_rows(U32x4 (&v)[kRows], U32x4 behind, uint32_t off, uint32_t lane)
{
    with_word(off / 4, [&]<uint32_t kWord>() {
        SIMT_UNROLL
        for (uint32_t i = 0; i < kRows; ++i) {
            // Lane 31 takes the rest from lane 0's vector of the next row.
            const U32x4 give = lane != 0 ? v[i] : i + 1 < kRows ? v[i + 1] : behind;
            const uint32_t own[4] = {v[i].x, v[i].y, v[i].z, v[i].w},
                           given[4] = {give.x, give.y, give.z, give.w};
            uint32_t next[4] = {};
            SIMT_UNROLL
            for (uint32_t j = 0; j <= kWord; ++j)
                next[j] = simt::shuffle(given[j], lane + 1);
            v[i] = window<kWord>(own, next, off);
        }
    });
}

// The first `bytes` (1..15) bytes at any address, then zeros.
SIMT_DEVICE U32x4 load_part(const uint8_t *p, uint32_t bytes)
{
    uint32_t w[4] = {};
    for (uint32_t i = 0; i < 4; ++i) {
        for (uint32_t j = 0; j < 4; ++j) {
            if (4 * i + j < bytes)
                w[i] |= uint32_t(p[4 * i + j]) << (8 * j);
        }
    }
    return {w[0], w[1], w[2], w[3]};
}

SIMT_DEVICE bool is_aligned_16(const void *p)
{
    return (reinterpret_cast<uintptr_t>(p) & 15) == 0;
}

// How a tile's original is reached.
enum class Reach : uint32_t {
    ALIGNED, // whole tile, 16-byte aligned
    SHIFTED, // whole tile
    PARTS,   // anything else
};

// Bytes of a vector of a ragged block that exist.
template <class T>
SIMT_DEVICE uint32_t vector_bytes(const BlockExtent &block, uint32_t row, uint32_t lane)
{
    if (lane >= block.words)
        return 0;
    const uint32_t first = (row * block.words + lane) * T::ROW_VALUES;
    const uint32_t left = block.values > first ? block.values - first : 0;
    return (left < T::ROW_VALUES ? left : T::ROW_VALUES) * T::SIZE;
}

// A lane's vector of a row.
template <class T>
SIMT_DEVICE U32x4 load_row(const uint8_t *block, Reach reach, const BlockExtent &extent,
                           uint32_t row, uint32_t lane)
{
    if (reach == Reach::ALIGNED)
        return simt::load_stream(reinterpret_cast<const U32x4 *>(block) + row * simt::LANES + lane);
    const uint32_t bytes = vector_bytes<T>(extent, row, lane);
    if (bytes == 0)
        return {0, 0, 0, 0};
    const uint8_t *const p = block + (row * extent.words + lane) * 16;
    if (bytes == 16 && is_aligned_16(p))
        return simt::load_stream(reinterpret_cast<const U32x4 *>(p));
    return load_part(p, bytes);
}

SIMT_DEVICE void store_bytes(uint8_t *p, uint64_t x, uint32_t bytes)
{
    for (uint32_t i = 0; i < bytes; ++i)
        p[i] = uint8_t(x >> (8 * i));
}

SIMT_DEVICE uint64_t joined(U32x2 v)
{
    return v.x | uint64_t(v.y) << 32;
}

// Stores what a vector gives to a section of elements, `N` bytes in all, or the part of it of a
// ragged vector of `values` values.
template <uint32_t N, class T>
SIMT_DEVICE void store_elements(uint8_t *section, uint32_t vector, U32x2 x, bool whole,
                                uint32_t values)
{
    uint8_t *const p = section + vector * N;
    if (!whole) {
        store_bytes(p, joined(x), values * (N / T::ROW_VALUES));
    } else if constexpr (N == 8) {
        simt::store_stream(reinterpret_cast<U32x2 *>(p), x);
    } else {
        simt::store_stream(reinterpret_cast<uint32_t *>(p), x.x);
    }
}

// Where a block's sections are.
struct BlockSections {
    uint8_t *mantissa, *low, *low2;
};

// Four heads of 16 bits as 8 bits each: sign and 7 bits of mantissa.
SIMT_DEVICE uint32_t mantissa_bytes(uint32_t a, uint32_t b)
{
    return simt::select(0x7f7f7f7f, simt::byte_perm(a, b, 0x6420), simt::byte_perm(a, b, 0x7531));
}

// Sign and mantissa of four heads of 8 bits, as the low nibbles of bytes.
template <class T>
SIMT_DEVICE uint32_t mantissa_nibbles(uint32_t heads)
{
    constexpr uint32_t M = T::TYPE.mantissa_bits;
    constexpr uint32_t SIGN = 0x01010101u << M, REST = SIGN - 0x01010101u;
    return (heads >> (7 - M) & SIGN) | (heads & REST);
}
template <class T>
SIMT_DEVICE uint32_t exponent_bytes(uint32_t heads)
{
    constexpr uint32_t MASK = 0x01010101u * ((1u << T::E) - 1);
    return heads >> T::TYPE.mantissa_bits & MASK;
}

// A lane's 32 values of a block, split.
template <class T>
struct Split {
    // Symbols (fp64: set by map_exponents) of stripe i: values 0..3 in symbol[2 * i], 4..7 in the
    // next.
    uint32_t symbol[8];
    // K < 8: plane words of sign and mantissa, once finish() was called.
    uint32_t mantissa[T::MANTISSA_BYTES ? 1 : T::K];
    // fp64: exponents, two in a word, stripe i in [4 * i, 4 * i + 4).
    uint32_t wide[T::DTYPE == format::DTYPE_FP64 ? 16 : 1];
};

// Splits a row: stores what goes raw into sections of elements, keeps the rest.
template <class T>
SIMT_DEVICE void split_row(U32x4 v, uint32_t row, uint32_t vector, bool whole, uint32_t values,
                           const BlockSections &to, Split<T> &s)
{
    if constexpr (T::DTYPE == format::DTYPE_BF16) {
        store_elements<8, T>(to.mantissa, vector,
                             {mantissa_bytes(v.x, v.y), mantissa_bytes(v.z, v.w)}, whole, values);
        s.symbol[2 * row] = simt::byte_perm(v.x << 1, v.y << 1, 0x7531);
        s.symbol[2 * row + 1] = simt::byte_perm(v.z << 1, v.w << 1, 0x7531);
    } else if constexpr (T::DTYPE == format::DTYPE_FP32) {
        const uint32_t a = simt::byte_perm(v.x, v.y, 0x7632), b = simt::byte_perm(v.z, v.w, 0x7632);
        store_elements<8, T>(to.low, vector,
                             {simt::byte_perm(v.x, v.y, 0x5410), simt::byte_perm(v.z, v.w, 0x5410)},
                             whole, values);
        store_elements<4, T>(to.mantissa, vector, {mantissa_bytes(a, b), 0}, whole, values);
        s.symbol[row] = simt::byte_perm(a << 1, b << 1, 0x7531);
    } else if constexpr (T::DTYPE == format::DTYPE_FP64) {
        // Stripe row / 4, values 2 * (row % 4) and the next.
        store_elements<8, T>(to.low2, vector, {v.x, v.z}, whole, values);
        store_elements<4, T>(to.low, vector, {simt::byte_perm(v.y, v.w, 0x5410), 0}, whole, values);
        const uint32_t heads = simt::byte_perm(v.y, v.w, 0x7632);
        s.wide[row] = heads >> 4 & 0x07ff07ff;
        const uint32_t stripe = row / 4, k = 2 * (row % 4);
        SIMT_UNROLL
        for (uint32_t q = 0; q < 4; ++q)
            s.mantissa[q] |= (heads >> q & 1) << (4 * k + stripe) | (heads >> (16 + q) & 1)
                                                                            << (4 * k + 4 + stripe);
        s.mantissa[4] |=
                (heads >> 15 & 1) << (4 * k + stripe) | heads >> 31 << (4 * k + 4 + stripe);
    } else if constexpr (T::DTYPE == format::DTYPE_FP16) {
        const uint32_t a = simt::byte_perm(v.x, v.y, 0x7531), b = simt::byte_perm(v.z, v.w, 0x7531);
        store_elements<8, T>(to.low, vector,
                             {simt::byte_perm(v.x, v.y, 0x6420), simt::byte_perm(v.z, v.w, 0x6420)},
                             whole, values);
        s.symbol[2 * row] = exponent_bytes<T>(a);
        s.symbol[2 * row + 1] = exponent_bytes<T>(b);
        const uint32_t n = pack_nibbles(mantissa_nibbles<T>(a), mantissa_nibbles<T>(b));
        if (row < T::K)
            s.mantissa[row] = n;
        else
            s.wide[0] = n; // the fourth stripe's, until finish()
    } else {
        const uint32_t heads[4] = {v.x, v.y, v.z, v.w};
        SIMT_UNROLL
        for (uint32_t i = 0; i < 2; ++i) {
            s.symbol[4 * row + 2 * i] = exponent_bytes<T>(heads[2 * i]);
            s.symbol[4 * row + 2 * i + 1] = exponent_bytes<T>(heads[2 * i + 1]);
            const uint32_t n = pack_nibbles(mantissa_nibbles<T>(heads[2 * i]),
                                            mantissa_nibbles<T>(heads[2 * i + 1]));
            const uint32_t stripe = 2 * row + i;
            if (stripe < T::K)
                s.mantissa[stripe] = n;
            else
                s.wide[0] = n;
        }
    }
}

template <class T>
SIMT_DEVICE void start_split(Split<T> &s)
{
    if constexpr (T::DTYPE == format::DTYPE_FP64) {
        SIMT_UNROLL
        for (uint32_t q = 0; q < T::K; ++q)
            s.mantissa[q] = 0;
    }
}

// After a block's last row: the planes of sign and mantissa.
template <class T>
SIMT_DEVICE void finish_split(Split<T> &s)
{
    if constexpr (T::TYPE.size <= 2 && !T::MANTISSA_BYTES) {
        uint32_t n[4] = {s.mantissa[0], s.mantissa[1], s.mantissa[2],
                         T::K > 3 ? s.mantissa[T::K - 1] : s.wide[0]};
        transpose_nibbles(n);
        SIMT_UNROLL
        for (uint32_t q = 0; q < T::K; ++q)
            s.mantissa[q] = n[q];
    }
}

// Bits of plane words at positions that exist, for lane `lane` of a ragged block.
template <class T>
SIMT_DEVICE uint32_t existing(const BlockExtent &block, uint32_t lane)
{
    if (lane >= block.words)
        return 0;
    uint32_t mask = 0;
    for (uint32_t bit = 0; bit < 32; ++bit)
        mask |= uint32_t(format::value_at(T::DTYPE, block.words, lane, bit) < block.values) << bit;
    return mask;
}

} // namespace zip::gpu
#endif
