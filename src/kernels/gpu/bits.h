// SPDX-License-Identifier: BSD-3-Clause
// Bit work of a lane group: transposes, compress and expand of plane words, bit streams in shared
// memory. Device code.
#ifndef ZIP_KERNELS_GPU_BITS_H
#define ZIP_KERNELS_GPU_BITS_H

#include <cstdint>

#include "kernels/gpu/simt.h"

namespace zip::gpu {

// Where the entry for a byte is in a table in shared memory, for all four bytes: spread over the
// banks, for bytes that lanes look up at once are alike (H200, bf16: 2.1 instead of 3.6 turns for
// pairs of rank indices, 2.5 instead of 4.3 for masks).
ZIP_HOST_DEVICE constexpr uint32_t spread_bytes(uint32_t x)
{
    return x ^ (x >> 3 & 0x1f1f1f1f);
}

// Tables for moving bits inside a byte, by the spread byte of the mask. Byte 0 of an entry: bits
// set in the mask; bytes 1, 2, 3: the places to which a bit comes (compress) or from which it goes
// (expand) in the move by 1, 2, 4.
struct alignas(16) MoveTables {
    uint32_t compress[256], expand[256];
};

constexpr MoveTables make_move_tables()
{
    MoveTables t{};
    for (uint32_t mask = 0; mask < 256; ++mask) {
        uint32_t set = 0, zeros = 0, compress[3] = {}, expand[3] = {};
        for (uint32_t bit = 0; bit < 8; ++bit) {
            if ((mask >> bit & 1) == 0) {
                ++zeros;
                continue;
            }
            uint32_t at = bit; // moves down by `zeros`, a power of two at a time
            for (uint32_t s = 0; s < 3; ++s) {
                if (zeros >> s & 1) {
                    expand[s] |= 1u << at;
                    at -= 1u << s;
                    compress[s] |= 1u << at;
                }
            }
            ++set;
        }
        t.compress[spread_bytes(mask)] =
                set | compress[0] << 8 | compress[1] << 16 | compress[2] << 24;
        t.expand[spread_bytes(mask)] = set | expand[0] << 8 | expand[1] << 16 | expand[2] << 24;
    }
    return t;
}

SIMT_TABLE MoveTables MOVE_TABLES = make_move_tables();

// How a mask's bits move; made once for the streams that share the mask.
struct Moves {
    uint32_t by1, by2, by4; // places in all four bytes
    uint32_t count[4]; // byte 0: bits set in that byte of the mask; the rest is ignored by shifts
                       // mod 32
};

// `table`: compress or expand of the tables, in shared memory. `four`: Launch::four.
SIMT_DEVICE Moves moves_of(const uint32_t *table, uint32_t mask, uint32_t four)
{
    Moves m;
    const uint32_t at = spread_bytes(mask);
    SIMT_UNROLL
    for (uint32_t k = 0; k < 4; ++k)
        m.count[k] = simt::lookup_word(table, at, k, four);
    const uint32_t a = simt::byte_perm(m.count[0], m.count[1], 0x6251);
    const uint32_t b = simt::byte_perm(m.count[2], m.count[3], 0x6251);
    m.by1 = simt::byte_perm(a, b, 0x5410);
    m.by2 = simt::byte_perm(a, b, 0x7632);
    m.by4 = simt::byte_perm(simt::byte_perm(m.count[0], m.count[1], 0x0073),
                            simt::byte_perm(m.count[2], m.count[3], 0x0073), 0x5410);
    return m;
}

// The bits of x under the mask, in order, at the top of the result; zeros below.
SIMT_DEVICE uint32_t compress_bits(const Moves &m, uint32_t x)
{
    x = simt::select(m.by1, x >> 1, x);
    x = simt::select(m.by2, x >> 2, x);
    x = simt::select(m.by4, x >> 4, x);
    uint32_t top = simt::funnel_right(0, x, m.count[0]);
    top = simt::funnel_right(top, x >> 8, m.count[1]);
    top = simt::funnel_right(top, x >> 16, m.count[2]);
    return simt::funnel_right(top, x >> 24, m.count[3]);
}

// The low bits of x spread over the mask; what is outside the mask is undefined.
SIMT_DEVICE uint32_t expand_bits(const Moves &m, uint32_t x)
{
    const uint32_t b1 = simt::funnel_right(x, 0, m.count[0]);
    const uint32_t b2 = simt::funnel_right(b1, 0, m.count[1]);
    const uint32_t b3 = simt::funnel_right(b2, 0, m.count[2]);
    x = simt::byte_perm(simt::byte_perm(x, b1, 0x0040), simt::byte_perm(b2, b3, 0x0040), 0x5410);
    x = simt::select(m.by4, x << 4, x);
    x = simt::select(m.by2, x << 2, x);
    return simt::select(m.by1, x << 1, x);
}

// ORs the bits at the top of x (zeros below) into a stream of zeros in shared memory so that they
// end before bit `end`. Without a branch: a lane with nothing to add aims at a word of its own,
// `dummy`.
SIMT_DEVICE void put_bits(uint32_t *stream, uint32_t *dummy, uint32_t x, uint32_t end)
{
    const uint32_t high = simt::funnel_left(x, 0, end), low = simt::funnel_left(0, x, end);
    uint32_t *const word = stream + (end >> 5);
    simt::atomic_or_shared(high != 0 ? word : dummy, high);
    simt::atomic_or_shared(low != 0 ? word - 1 : dummy, low);
}

// 32 bits of a stream in shared memory from bit `at` on. Touches the word behind them.
SIMT_DEVICE uint32_t get_bits(const uint32_t *stream, uint32_t at)
{
    const uint32_t *const word = stream + (at >> 5);
    return simt::funnel_right(word[0], word[1], at);
}

// Sums over the lanes up to and with this one, side by side: one's latency hides the others'.
template <uint32_t N>
SIMT_DEVICE void prefix_sums(uint32_t (&x)[N])
{
    SIMT_UNROLL
    for (uint32_t d = 1; d < simt::LANES; d *= 2) {
        SIMT_UNROLL
        for (uint32_t i = 0; i < N; ++i)
            x[i] = simt::add_up(x[i], d);
    }
}
SIMT_DEVICE uint32_t prefix_sum(uint32_t x)
{
    uint32_t sum[1] = {x};
    prefix_sums(sum);
    return sum[0];
}

// 4x4 bit transpose in every nibble lane: w[i] nibble k bit q <-> w[q] bit 4k + i. Its own inverse.
SIMT_DEVICE void transpose_nibbles(uint32_t (&w)[4])
{
    SIMT_UNROLL
    for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t x = w[i], y = w[i + 2];
        w[i] = simt::select(0x33333333, x, y << 2);
        w[i + 2] = simt::select(0x33333333, x >> 2, y);
    }
    SIMT_UNROLL
    for (uint32_t i = 0; i < 4; i += 2) {
        const uint32_t x = w[i], y = w[i + 1];
        w[i] = simt::select(0x55555555, x, y << 1);
        w[i + 1] = simt::select(0x55555555, x >> 1, y);
    }
}

// The low nibbles of the four bytes of a and of the four of b, packed in order; upper nibbles must
// be 0.
SIMT_DEVICE uint32_t pack_nibbles(uint32_t a, uint32_t b)
{
    return simt::byte_perm(a | a >> 4, b | b >> 4, 0x6420);
}

// The inverse.
SIMT_DEVICE void unpack_nibbles(uint32_t n, uint32_t &a, uint32_t &b)
{
    const uint32_t lower = n & 0x0f0f0f0f, upper = n >> 4 & 0x0f0f0f0f;
    a = simt::byte_perm(lower, upper, 0x5140);
    b = simt::byte_perm(lower, upper, 0x7362);
}

} // namespace zip::gpu
#endif
