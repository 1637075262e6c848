// SPDX-License-Identifier: BSD-3-Clause
// Bits in 64-bit words and bit planes in vectors: what the fast coder is made of.
// Compiled once for each instruction set: the guard flips each time that Highway includes simd.cc.
#if defined(ZIP_KERNELS_CPU_PLANES_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef ZIP_KERNELS_CPU_PLANES_INL_H
#undef ZIP_KERNELS_CPU_PLANES_INL_H
#else
#define ZIP_KERNELS_CPU_PLANES_INL_H
#endif

#include <algorithm>

#include "hwy/highway.h"
#include "kernels/cpu/internal.h"
#include "kernels/cpu/table.h"

// In front of a loop over planes: what it indexes then is in registers (GCC 12 at -O2 leaves such
// loops be).
#undef ZIP_UNROLL
#if HWY_COMPILER_CLANG
#define ZIP_UNROLL _Pragma("clang loop unroll(full)")
#else
#define ZIP_UNROLL _Pragma("GCC unroll 4")
#endif

HWY_BEFORE_NAMESPACE();
namespace zip::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
// A vector holds a nibble for each of at most 128 values of a stripe of 256.
using Bytes = hn::CappedTag<uint8_t, 64>;
using Halves = hn::Repartition<uint16_t, Bytes>;
using Words = hn::Repartition<uint32_t, Bytes>;
using Doubles = hn::Repartition<uint64_t, Bytes>;
using ByteVec = hn::Vec<Bytes>;
using HalfVec = hn::Vec<Halves>;
using WordVec = hn::Vec<Words>;

constexpr uint32_t STRIPE = BLOCK_VALUES / STRIPES;
constexpr uint32_t VECTOR = 64;             // values that the type's parts take at a time, at least
constexpr uint32_t PAIRS = BLOCK_WORDS / 2; // 64-bit words of a block's plane

// Gathers the bits of x under a mask at the bottom (compress), or spreads the bottom bits over the
// mask (expand).
#if HWY_ARCH_X86_64 && HWY_TARGET <= HWY_AVX2
class BitSelector {
public:
    explicit HWY_INLINE BitSelector(uint64_t mask) : mask_(mask) {}
    HWY_INLINE uint64_t compress(uint64_t x) const { return _pext_u64(x, mask_); }
    HWY_INLINE uint64_t expand(uint64_t x) const { return _pdep_u64(x, mask_); }

private:
    uint64_t mask_;
};
#else
// Few bits one by one. Many as in Hacker's Delight, 2nd edition, 7-4 and 7-5: each bit moves by the
// number of zeros of the mask below it, by 1, 2, 4, ... in turn; move_[i] are the bits that move by
// 2^i.
class BitSelector {
public:
    explicit HWY_INLINE BitSelector(uint64_t mask) : mask_(mask), few_(hwy::PopCount(mask) <= FEW)
    {
        if (few_)
            return;
        uint64_t m = mask, zeros = ~mask << 1;
        for (int i = 0; i < 6; ++i) {
            uint64_t parity = zeros;
            for (int s = 1; s < 64; s *= 2)
                parity ^= parity << s;
            move_[i] = parity & m;
            m = (m ^ move_[i]) | move_[i] >> (1 << i);
            zeros &= ~parity;
        }
    }
    HWY_INLINE uint64_t compress(uint64_t x) const
    {
        if (few_) {
            uint64_t bits = 0;
            int n = 0;
            for (uint64_t m = mask_; m != 0; m &= m - 1)
                bits |= uint64_t((x & m & (0 - m)) != 0) << n++;
            return bits;
        }
        x &= mask_;
        for (int i = 0; i < 6; ++i) {
            const uint64_t moving = x & move_[i];
            x = (x ^ moving) | moving >> (1 << i);
        }
        return x;
    }
    HWY_INLINE uint64_t expand(uint64_t x) const
    {
        if (few_) {
            uint64_t bits = 0;
            for (uint64_t m = mask_; m != 0; m &= m - 1, x >>= 1)
                bits |= m & (0 - m) & (0 - (x & 1));
            return bits;
        }
        for (int i = 5; i >= 0; --i)
            x = (x & ~move_[i]) | (x << (1 << i) & move_[i]);
        return x & mask_;
    }

private:
    static constexpr size_t FEW = 6; // level 3 of normal data has 2 of 64
    uint64_t mask_, move_[6];
    bool few_;
};
#endif

constexpr uint32_t STREAM_BYTES = MAX_TILE_VALUES / 8; // a bit for each value
constexpr uint32_t SLOP = 16; // what 64-bit accesses may touch behind a stream

// Bit planes of values that escaped from one level, in code order; SLOP bytes more than bits.
using Streams = uint8_t[4][STREAM_BYTES + SLOP];

// Keeps the compiler from pairing integers in vectors: moving them there and back halves the speed
// (GCC 12, -O2).
template <class T>
HWY_INLINE void keep_scalar(T &x)
{
    asm("" : "+r"(x));
}

HWY_INLINE uint32_t count_bits(uint64_t x)
{
    return uint32_t(hwy::PopCount(x));
}

HWY_INLINE uint64_t load64(const void *p)
{
    uint64_t x;
    memcpy(&x, p, sizeof(x));
    return x;
}

HWY_INLINE void store64(void *p, uint64_t x)
{
    memcpy(p, &x, sizeof(x));
}

// Appends to K bit streams that grow alike.
template <uint32_t K>
class BitWriter {
public:
    HWY_INLINE void put(const uint64_t (&bits)[4], uint32_t n, Streams &out)
    {
        const uint32_t shift = size_ & 7, end = shift + n, at = size_ >> 3;
        size_ += n;
        ZIP_UNROLL
        for (uint32_t k = 0; k < K; ++k) {
            uint64_t x = pending_[k] | bits[k] << shift;
            keep_scalar(x);
            store64(out[k] + at, x);
            pending_[k] = x >> (end & 56);
        }
        if (HWY_UNLIKELY(end >= 64)) {
            ZIP_UNROLL
            for (uint32_t k = 0; k < K; ++k) {
                pending_[k] = bits[k] >> (63 - shift) >> 1;
                keep_scalar(pending_[k]);
            }
        }
    }
    // Completes the last bytes; zero up to a multiple of 64 bits.
    HWY_INLINE void finish(Streams &out) const
    {
        uint64_t zero_above[2] = {0, 0}; // up to 15 bytes
        ZIP_UNROLL
        for (uint32_t k = 0; k < K; ++k) {
            zero_above[0] = pending_[k];
            memcpy(out[k] + (size_ >> 3), zero_above, sizeof(zero_above));
        }
    }
    HWY_INLINE uint32_t size() const { return size_; }

private:
    uint64_t pending_[K] = {}; // the last, unfinished byte
    uint32_t size_ = 0;        // bits
};

// The `n` bits from bit `at` on, and others above them.
HWY_INLINE uint64_t get_bits(const uint8_t *stream, uint32_t at, uint32_t n)
{
    uint64_t x = load64(stream + (at >> 3));
    x >>= at & 7;
    if (HWY_UNLIKELY(n > 56)) {
        const uint64_t next = stream[(at >> 3) + 8];
        x |= next << 1 << (63 - (at & 7));
    }
    keep_scalar(x);
    return x;
}

// Bits set in a block's planes, few as a rule: collected and then visited without a branch for each
// word.
class SparseBits {
public:
    HWY_INLINE void add(uint32_t pair, uint64_t bits)
    {
        bits_[words_] = bits;
        pair_[words_] = pair;
        words_ += bits != 0;
        size_ += count_bits(bits);
    }
    HWY_INLINE uint32_t size() const { return size_; }

    // Calls visit(index, code position) in code order.
    template <class Visit>
    HWY_INLINE void visit(Visit visit) const
    {
        uint32_t word = 0;
        uint64_t bits = bits_[0];
        for (uint32_t i = 0; i < size_; ++i) {
            const auto bit = uint32_t(hwy::Num0BitsBelowLS1Bit_Nonzero64(bits));
            const uint32_t plane_word = 2 * pair_[word] + (bit >> 5);
            visit(i, (bit & 3) * STRIPE + 8 * plane_word + (bit >> 2 & 7));
            bits &= bits - 1;
            word += bits == 0;
            bits = bits == 0 ? bits_[word] : bits;
        }
    }

private:
    uint64_t bits_[PAIRS + 1] = {}; // one more: words without bits are written and then overwritten
    uint32_t pair_[PAIRS + 1];
    uint32_t words_ = 0, size_ = 0;
};

// ---- planes

// A block's bit planes; words that it lacks are 0.
struct Planes {
    alignas(64) uint32_t plane[4][BLOCK_WORDS];

    HWY_INLINE uint64_t pair(uint32_t q, uint32_t j) const { return load64(plane[q] + 2 * j); }
    HWY_INLINE void set_pair(uint32_t q, uint32_t j, uint64_t x) { store64(plane[q] + 2 * j, x); }
};

// Exchanges x's bits under ~mask with y's bits under mask, `shift` apart.
template <int kShift>
HWY_INLINE void swap_bits(WordVec &x, WordVec &y, uint32_t mask)
{
    const WordVec t = hn::And(hn::Xor(hn::ShiftRight<kShift>(x), y), hn::Set(Words(), mask));
    y = hn::Xor(y, t);
    x = hn::Xor(x, hn::ShiftLeft<kShift>(t));
}

// 4x4 bit transpose in every nibble lane: w[i] nibble k bit q <-> w[q] bit 4k+i. Its own inverse.
HWY_INLINE void transpose_nibbles(WordVec (&w)[4])
{
    swap_bits<2>(w[0], w[2], 0x33333333);
    swap_bits<2>(w[1], w[3], 0x33333333);
    swap_bits<1>(w[0], w[1], 0x55555555);
    swap_bits<1>(w[2], w[3], 0x55555555);
}

// Planes of a nibble of each of a block's bytes by code position. `nibble_of` makes vectors of the
// nibbles of vectors of the bytes.
template <class NibbleOf>
HWY_INLINE void to_planes(const uint8_t *bytes, NibbleOf nibble_of, Planes &planes)
{
    const Bytes d8;
    const Halves d16;
    const Words d32;
    const uint32_t step = uint32_t(hn::Lanes(d8));
    for (uint32_t lane = 0; lane < BLOCK_WORDS; lane += uint32_t(hn::Lanes(d32))) {
        WordVec w[4];
        ZIP_UNROLL
        for (uint32_t i = 0; i < STRIPES; ++i) {
            const uint8_t *const from = bytes + i * STRIPE + lane * 8;
            // The nibbles of two neighbours in the lower of their bytes
            const HalfVec a = hn::BitCast(d16, nibble_of(hn::LoadU(d8, from)));
            const HalfVec b = hn::BitCast(d16, nibble_of(hn::LoadU(d8, from + step)));
            const auto two_a = hn::BitCast(d8, hn::Or(a, hn::ShiftRight<4>(a)));
            const auto two_b = hn::BitCast(d8, hn::Or(b, hn::ShiftRight<4>(b)));
            w[i] = hn::BitCast(d32, hn::ConcatEven(d8, two_b, two_a));
        }
        transpose_nibbles(w);
        ZIP_UNROLL
        for (uint32_t q = 0; q < 4; ++q)
            hn::Store(w[q], d32, planes.plane[q] + lane);
    }
}

// The inverse: calls put(index of the first byte, vector of nibbles, one a byte).
template <class Put>
HWY_INLINE void from_planes(const Planes &planes, Put put)
{
    const Bytes d8;
    const Halves d16;
    const Words d32;
    const hn::Half<Bytes> half8;
    const uint32_t step = uint32_t(hn::Lanes(d8));
    const ByteVec low4 = hn::Set(d8, 15);
    for (uint32_t lane = 0; lane < BLOCK_WORDS; lane += uint32_t(hn::Lanes(d32))) {
        WordVec w[4] = {
                hn::Load(d32, planes.plane[0] + lane), hn::Load(d32, planes.plane[1] + lane),
                hn::Load(d32, planes.plane[2] + lane), hn::Load(d32, planes.plane[3] + lane)};
        transpose_nibbles(w);
        ZIP_UNROLL
        for (uint32_t i = 0; i < STRIPES; ++i) {
            const ByteVec two = hn::BitCast(d8, w[i]);
            const auto spread = [&](auto half) {
                const HalfVec x = hn::PromoteTo(d16, half);
                return hn::And(hn::BitCast(d8, hn::Or(x, hn::ShiftLeft<4>(x))), low4);
            };
            put(i * STRIPE + lane * 8, spread(hn::LowerHalf(half8, two)));
            put(i * STRIPE + lane * 8 + step, spread(hn::UpperHalf(half8, two)));
        }
    }
}

// Stores `n` planes, of `words` words each, of a block's bytes by code position.
void store_planes(const uint8_t *bytes, uint32_t n, uint32_t words, uint8_t *const *to)
{
    const Bytes d8;
    const ByteVec low4 = hn::Set(d8, 15);
    Planes planes;
    for (uint32_t q = 0; q < n; ++q) {
        if (q == 0)
            to_planes(
                    bytes, [&](ByteVec x) { return hn::And(x, low4); }, planes);
        else if (q == 4)
            to_planes(
                    bytes,
                    [&](ByteVec x) {
                        const Halves d16;
                        return hn::And(hn::BitCast(d8, hn::ShiftRight<4>(hn::BitCast(d16, x))),
                                       low4);
                    },
                    planes);
        memcpy(to[q], planes.plane[q & 3], sizeof(uint32_t) * words);
    }
}

// The inverse.
void load_planes(const uint8_t *const *from, uint32_t n, uint32_t words, uint8_t *bytes)
{
    const Bytes d8;
    const Halves d16;
    for (uint32_t first = 0; first < n; first += 4) {
        Planes planes;
        memset(&planes, 0, sizeof(planes));
        for (uint32_t q = first; q < std::min(n, first + 4); ++q)
            snapshot(planes.plane[q - first], from[q], sizeof(uint32_t) * words);
        from_planes(planes, [&](uint32_t at, ByteVec x) {
            if (first != 0) {
                const auto high = hn::BitCast(d8, hn::ShiftLeft<4>(hn::BitCast(d16, x)));
                x = hn::Or(hn::LoadU(d8, bytes + at), high);
            }
            hn::StoreU(x, d8, bytes + at);
        });
    }
}

// Exponent -> rank index. A step looks a symbol up by its low four bits and compares; symbols that
// share those take a step each.
struct RankTable {
    alignas(16) uint8_t symbol[TABLE_BYTES][16];
    alignas(16) uint8_t flip[TABLE_BYTES][16]; // rank index ^ RANK_RAW
    uint32_t steps = 0;

    explicit RankTable(const RankedSymbols &ranked)
    {
        uint8_t used[16] = {};
        for (uint32_t i = 0; i < ranked.size; ++i) {
            const uint8_t r = ranked.rank[i], s = ranked.table.symbol[r], low = s & 15;
            const uint32_t step = used[low]++;
            for (; steps <= step; ++steps) { // what is in no slot keeps RANK_RAW
                memset(symbol[steps], 0, sizeof(symbol[steps]));
                memset(flip[steps], 0, sizeof(flip[steps]));
            }
            symbol[step][low] = s;
            flip[step][low] = uint8_t(r ^ RANK_RAW);
        }
    }
};

// Planes of the rank indices of a block's exponents by code position.
void rank_planes(const uint8_t *exponents, const RankTable &table, Planes &planes)
{
    const Bytes d8;
    const ByteVec low4 = hn::Set(d8, 15), raw = hn::Set(d8, RANK_RAW);
    const auto step = [&](ByteVec e, ByteVec low, ByteVec rank, ByteVec symbols, ByteVec flips) {
        const ByteVec same = hn::VecFromMask(d8, hn::Eq(hn::TableLookupBytes(symbols, low), e));
        return hn::Xor(rank, hn::And(hn::TableLookupBytes(flips, low), same));
    };
    if (HWY_LIKELY(table.steps == 1)) {
        const ByteVec symbols = hn::LoadDup128(d8, table.symbol[0]);
        const ByteVec flips = hn::LoadDup128(d8, table.flip[0]);
        to_planes(
                exponents,
                [&](ByteVec e) { return step(e, hn::And(e, low4), raw, symbols, flips); }, planes);
        return;
    }
    to_planes(
            exponents,
            [&](ByteVec e) {
                const ByteVec low = hn::And(e, low4);
                ByteVec rank = raw;
                for (uint32_t s = 0; s < table.steps; ++s)
                    rank = step(e, low, rank, hn::LoadDup128(d8, table.symbol[s]),
                                hn::LoadDup128(d8, table.flip[s]));
                return rank;
            },
            planes);
}

// The inverse, but for raw symbols.
void symbols_of(const Planes &planes, const TileSymbols &table, uint8_t *exponents)
{
    const Bytes d8;
    const ByteVec symbols = hn::LoadDup128(d8, table.symbol);
    from_planes(planes, [&](uint32_t at, ByteVec rank) {
        hn::StoreU(hn::TableLookupBytes(symbols, rank), d8, exponents + at);
    });
}

} // namespace HWY_NAMESPACE
} // namespace zip::cpu
HWY_AFTER_NAMESPACE();

#endif
