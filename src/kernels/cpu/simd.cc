// SPDX-License-Identifier: BSD-3-Clause
// Fast coder: a block's bit planes in vectors, its escapes in 64-bit words. Compiled once for each
// instruction set.
//
// A type's part takes values apart into bytes in element order (exponents, and sign and mantissa
// where those are planes) and puts them together again; a shape's part codes exponents in code
// order. Between them the bytes of a block are moved "by code position": bit b of plane word w is
// byte (b & 3) * STRIPE + 8 * w + (b >> 2).
#include <algorithm>
#include <bit>

#include "kernels/cpu/internal.h"
#include "kernels/cpu/table.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/simd.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

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

#if HWY_TARGET == HWY_SCALAR
// No vectors: the reference does it.
size_t EncodeTiles(Coding coding, const uint8_t *src, size_t length, uint8_t *dst, size_t limit)
{
    return encode_scalar(coding, src, length, dst, limit);
}

zip_status_t DecodeTiles(const ChunkHeader &header, const uint8_t *src, uint8_t *dst)
{
    return decode_scalar(header, src, dst);
}
#else

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

// ---- bits in 64-bit words

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

// ---- types

// A tile's bytes between the parts.
struct TileBytes {
    alignas(64) uint8_t exponent[MAX_TILE_VALUES];      // fp64: symbols
    alignas(64) uint8_t sign_mantissa[MAX_TILE_VALUES]; // of types that have planes of them
    alignas(64) uint16_t exponent64[MAX_TILE_VALUES];   // fp64: exponents
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

// ---- shapes

// The code, at level kLevel (from 0), of values whose rank index has these planes; the escape is
// all ones. Only values that have a code at that level matter; index 0 has the code 0.
template <uint8_t kShape, uint32_t kLevel, class T, class Or>
HWY_INLINE void codes_of(const T (&p)[4], Or either, T (&code)[3])
{
    if constexpr (kShape == SHAPE_38) {
        code[0] = p[0], code[1] = p[1], code[2] = p[2];
    } else if constexpr (kShape == SHAPE_11238) {
        if constexpr (kLevel == 0)
            code[0] = either(p[1], either(p[2], p[3]));
        else if constexpr (kLevel == 1)
            code[0] = either(p[2], p[3]);
        else if constexpr (kLevel == 2)
            code[0] = either(p[0], p[3]), code[1] = either(p[1], p[3]);
        else
            code[0] = p[0], code[1] = p[1], code[2] = p[2];
    } else if constexpr (kLevel == 0) { // 22228 and dense
        const T escape = either(p[2], p[3]);
        code[0] = either(p[0], escape), code[1] = either(p[1], escape);
    } else if constexpr (kShape == SHAPE_22228) {
        if constexpr (kLevel == 1)
            code[0] = either(p[0], p[3]), code[1] = either(p[1], p[3]);
        else if constexpr (kLevel == 2)
            code[0] = either(p[0], p[2]), code[1] = either(p[1], p[2]);
        else
            code[0] = p[0], code[1] = p[1];
    } else {
        if constexpr (kLevel == 1)
            code[0] = either(p[0], either(p[1], p[3]));
        else if constexpr (kLevel == 2)
            code[0] = either(p[1], p[3]);
        else if constexpr (kLevel == 3)
            code[0] = either(p[0], p[3]);
        else if constexpr (kLevel == 4)
            code[0] = p[3];
        else if constexpr (kLevel == 5)
            code[0] = either(p[0], p[2]), code[1] = either(p[1], p[2]);
        else
            code[0] = p[0], code[1] = p[1];
    }
}

// The planes of the rank indices of values with these codes at level kLevel. `deeper`: the planes
// of those that escape from it, 0 elsewhere.
template <uint8_t kShape, uint32_t kLevel>
HWY_INLINE void ranks_of_codes(const uint64_t (&code)[3], uint64_t escape,
                               const uint64_t (&deeper)[4], uint64_t (&p)[4])
{
    constexpr uint32_t width = shape_traits(kShape).width[kLevel];
    // The rank indices of the level's codes are, or differ from, the first by the code.
    constexpr auto first_rank = [] {
        uint32_t symbol = 0;
        for (uint32_t l = 0; l < kLevel; ++l)
            symbol += (1u << shape_traits(kShape).width[l]) - 1;
        return uint32_t(shape_traits(kShape).rank[symbol]);
    }();
    ZIP_UNROLL
    for (uint32_t q = 0; q < 4; ++q) {
        p[q] = deeper[q];
        if (first_rank >> q & 1)
            p[q] |= ~escape;
        if (width > 1 && q < width)
            p[q] |= code[q] & ~escape;
    }
}

template <uint32_t kWidth>
HWY_INLINE uint64_t escapes_of(const uint64_t (&code)[3])
{
    uint64_t escape = code[0];
    ZIP_UNROLL
    for (uint32_t q = 1; q < kWidth; ++q)
        escape &= code[q];
    return escape;
}

constexpr uint32_t MAX_GROUPS = 4; // of a tile

// A coded tile's part of the tail while it grows, and the counts of its groups.
struct TailWriter {
    // Behind level 1 a value has at most 8 bits (shape 4) and a raw symbol.
    uint8_t bytes[2 * MAX_TILE_VALUES + 2 * SLOP];
    uint32_t bits;                        // of the streams
    uint32_t end[MAX_COUNTS][MAX_GROUPS]; // of each column of COUNTS: sums up to a group's end
    Streams streams[2];                   // of two levels in turn
    uint8_t raw[MAX_TILE_VALUES];
    uint32_t raws;

    HWY_INLINE void or_bits(uint32_t at, uint64_t x)
    {
        uint8_t *const to = bytes + (at >> 3);
        store64(to, load64(to) | x << (at & 7));
        to[8] |= uint8_t(x >> 1 >> (63 - (at & 7)));
    }
};

// Codes the `n` values that have a code at level kLevel >= 1, whose planes are in a stream, and
// then those that escape from it.
template <uint8_t kShape, uint32_t kLevel>
void write_level(TailWriter &tail, uint32_t n, uint32_t groups)
{
    constexpr ShapeTraits S = shape_traits(kShape);
    constexpr uint32_t width = S.width[kLevel];
    const Streams &in = tail.streams[kLevel & 1];
    Streams &out = tail.streams[(kLevel + 1) & 1];
    const uint32_t first = tail.bits;
    tail.bits += width * n;
    // or_bits() needs zeros up to the last bit's word.
    memset(tail.bytes + (first + 7) / 8, 0, (tail.bits + 7) / 8 + SLOP - (first + 7) / 8);

    BitWriter<4> deeper;
    uint32_t escapes = 0, group = 0;
    for (uint32_t i = 0; i < n; i += 64) {
        const uint64_t p[4] = {load64(in[0] + i / 8), load64(in[1] + i / 8), load64(in[2] + i / 8),
                               load64(in[3] + i / 8)};
        uint64_t code[3];
        codes_of<kShape, kLevel>(
                p, [](uint64_t a, uint64_t b) { return a | b; }, code);
        ZIP_UNROLL
        for (uint32_t q = 0; q < width; ++q)
            tail.or_bits(first + q * n + i, code[q]);
        const uint64_t escape = escapes_of<width>(code);
        if constexpr (S.counts != 0) {
            for (; group < groups && tail.end[kLevel - 1][group] < i + 64; ++group)
                tail.end[kLevel][group] =
                        escapes +
                        count_bits(escape &
                                   ((uint64_t(1) << (tail.end[kLevel - 1][group] - i)) - 1));
        }
        const uint32_t count = count_bits(escape);
        if constexpr (kLevel + 1 < S.levels) {
            const BitSelector at(escape);
            deeper.put({at.compress(p[0]), at.compress(p[1]), at.compress(p[2]), at.compress(p[3])},
                       count, out);
        }
        escapes += count;
    }
    if constexpr (S.counts != 0) {
        for (; group < groups; ++group)
            tail.end[kLevel][group] = escapes;
    }
    if constexpr (kLevel + 1 < S.levels) {
        deeper.finish(out);
        write_level<kShape, kLevel + 1>(tail, escapes, groups);
    }
}

// Codes a tile: LEVEL1 at `level1`, the rest in `tail`, whole. `positions` are its exponents by
// code position. Returns false if that takes `most` bytes of the tail or more; it may stop before
// the end then.
template <uint8_t kShape>
bool encode_shape(const TypeOps &type, const uint8_t *positions, uint32_t values,
                  uint32_t group_blocks, const RankTable &table, uint32_t most, uint8_t *level1,
                  TailWriter &tail)
{
    constexpr ShapeTraits S = shape_traits(kShape);
    constexpr uint32_t w1 = S.width[0];
    const Words d32;
    const uint32_t blocks = uint32_t(div_up(values, BLOCK_VALUES));
    BitWriter<4> escaped;
    tail.bits = tail.raws = 0;
    for (uint32_t b = 0; b < blocks; ++b) {
        const uint32_t n = std::min(values - b * BLOCK_VALUES, BLOCK_VALUES);
        const uint32_t words = uint32_t(div_up(n, WORD_VALUES));
        const uint8_t *const exponents = positions + b * BLOCK_VALUES;
        Planes ranks;
        rank_planes(exponents, table, ranks);
        if (HWY_UNLIKELY(n < BLOCK_VALUES)) { // padding has the code 0
            uint32_t exist[BLOCK_WORDS];
            type.values_of_words(n, exist);
            for (uint32_t w = 0; w < BLOCK_WORDS; ++w) {
                for (auto &plane : ranks.plane)
                    plane[w] &= exist[w];
            }
        }

        alignas(64) uint32_t code_words[3][BLOCK_WORDS], escape_words[BLOCK_WORDS];
        WordVec any_raw = hn::Zero(d32);
        for (uint32_t lane = 0; lane < BLOCK_WORDS; lane += uint32_t(hn::Lanes(d32))) {
            const WordVec p[4] = {
                    hn::Load(d32, ranks.plane[0] + lane), hn::Load(d32, ranks.plane[1] + lane),
                    hn::Load(d32, ranks.plane[2] + lane), hn::Load(d32, ranks.plane[3] + lane)};
            WordVec code[3] = {p[0], p[0], p[0]};
            codes_of<kShape, 0>(
                    p, [](WordVec x, WordVec y) { return hn::Or(x, y); }, code);
            WordVec escape = code[0];
            ZIP_UNROLL
            for (uint32_t q = 0; q < w1; ++q) {
                escape = hn::And(escape, code[q]);
                hn::Store(code[q], d32, code_words[q] + lane);
            }
            hn::Store(escape, d32, escape_words + lane);
            any_raw = hn::Or(any_raw, hn::And(hn::And(p[0], p[1]), hn::And(p[2], p[3])));
        }
        uint8_t *const to = level1 + plane_bytes(w1, BLOCK_VALUES) * b;
        if (HWY_LIKELY(words == BLOCK_WORDS)) {
            for (uint32_t q = 0; q < w1; ++q)
                memcpy(to + sizeof(code_words[0]) * q, code_words[q], sizeof(code_words[0]));
        } else {
            for (uint32_t q = 0; q < w1; ++q)
                memcpy(to + sizeof(uint32_t) * words * q, code_words[q], sizeof(uint32_t) * words);
        }

        if constexpr (S.levels > 1) {
            BitWriter<4> writer = escaped; // in registers
            for (uint32_t j = 0; j < PAIRS; ++j) {
                const uint64_t escape = load64(escape_words + 2 * j);
                const BitSelector at(escape);
                writer.put({at.compress(ranks.pair(0, j)), at.compress(ranks.pair(1, j)),
                            at.compress(ranks.pair(2, j)), at.compress(ranks.pair(3, j))},
                           count_bits(escape), tail.streams[1]);
            }
            escaped = writer;
        }
        if (!hn::AllTrue(d32, hn::Eq(any_raw, hn::Zero(d32)))) {
            SparseBits raw_at;
            for (uint32_t j = 0; j < PAIRS; ++j)
                raw_at.add(j, ranks.pair(0, j) & ranks.pair(1, j) & ranks.pair(2, j) &
                                      ranks.pair(3, j));
            uint8_t *const raw = tail.raw + tail.raws;
            raw_at.visit([&](uint32_t i, uint32_t position) { raw[i] = exponents[position]; });
            tail.raws += raw_at.size();
        }
        if (HWY_UNLIKELY(S.width[1] * escaped.size() / 8 + tail.raws >= most))
            return false; // whatever follows, the tail does not get shorter
        if constexpr (S.counts != 0) {
            if (b % group_blocks == group_blocks - 1 || b == blocks - 1)
                tail.end[0][b / group_blocks] = S.levels > 1 ? escaped.size() : tail.raws;
        }
    }
    if constexpr (S.levels > 1) {
        escaped.finish(tail.streams[1]);
        write_level<kShape, 1>(tail, escaped.size(), uint32_t(div_up(blocks, group_blocks)));
    }
    const uint32_t at = uint32_t(div_up(tail.bits, 8));
    memcpy(tail.bytes + at, tail.raw, tail.raws);
    memset(tail.bytes + at + tail.raws, 0, TAIL_WORD - 1);
    return coded_tail_words(tail.bits, tail.raws) * TAIL_WORD < most;
}

// A coded tile's part of the tail while it is read. Works on a private copy, since escapes are
// found to match the counts only after use: whatever level 1 says, a tile has as many escapes as
// code positions at most, and so far behind each stream's start there is memory.
struct TailReader {
    uint32_t codes[MAX_LEVELS + 1];       // at each level; behind the last one: raw symbols
    uint32_t start[MAX_LEVELS + 1];       // of each level's streams, in bits; their end
    uint32_t end[MAX_COUNTS][MAX_GROUPS]; // what COUNTS claims, summed up to a group's end
    Streams streams[2] = {};              // of two levels in turn
    // A valid coded tail is no longer than a raw tile's.
    uint8_t bytes[raw_words({DTYPE_FP64, SHAPE_11238, false}, MAX_TILE_VALUES) * TAIL_WORD +
                  MAX_TILE_VALUES + SLOP] = {};
};

// Reads the planes of the values that have a code at level kLevel >= 1 to streams[kLevel & 1].
// Returns whether the escapes are as many as COUNTS says.
template <uint8_t kShape, uint32_t kLevel>
bool read_level(TailReader &tail, uint32_t groups)
{
    constexpr ShapeTraits S = shape_traits(kShape);
    constexpr uint32_t width = S.width[kLevel];
    bool ok = true;
    if constexpr (kLevel + 1 < S.levels)
        ok = read_level<kShape, kLevel + 1>(tail, groups);
    const Streams &in = tail.streams[(kLevel + 1) & 1];
    Streams &out = tail.streams[kLevel & 1];
    const uint32_t n = tail.codes[kLevel], first = tail.start[kLevel];
    uint32_t escapes = 0, group = 0;
    for (uint32_t i = 0; i < n; i += 64) {
        uint64_t code[3];
        ZIP_UNROLL
        for (uint32_t q = 0; q < width; ++q)
            code[q] = get_bits(tail.bytes, first + q * n + i, 64);
        const uint64_t escape = escapes_of<width>(code);
        if constexpr (S.counts != 0) {
            for (; group < groups && tail.end[kLevel - 1][group] < i + 64; ++group)
                ok &= tail.end[kLevel][group] ==
                      escapes +
                              count_bits(escape &
                                         ((uint64_t(1) << (tail.end[kLevel - 1][group] - i)) - 1));
        }
        uint64_t deeper[4] = {escape, escape, escape, escape}, p[4];
        const uint32_t count = count_bits(escape);
        if constexpr (kLevel + 1 < S.levels) {
            const BitSelector at(escape);
            ZIP_UNROLL
            for (uint32_t q = 0; q < 4; ++q)
                deeper[q] = at.expand(get_bits(in[q], escapes, 64));
        }
        escapes += count;
        ranks_of_codes<kShape, kLevel>(code, escape, deeper, p);
        ZIP_UNROLL
        for (uint32_t q = 0; q < 4; ++q)
            store64(out[q] + i / 8, p[q]);
    }
    if constexpr (S.counts != 0) {
        for (; group < groups; ++group)
            ok &= tail.end[kLevel][group] == escapes;
    }
    return ok;
}

// What a tile's header, table and sections say, as far as its shape's part needs it.
struct CodedTile {
    uint32_t values, group_blocks, tail_words;
    const uint8_t *level1, *counts, *tail;
    TileSymbols symbols;
};

// Takes what COUNTS claims. Returns false if that cannot be.
template <uint8_t kShape>
bool take_counts(const CodedTile &tile, TailReader &tail)
{
    constexpr ShapeTraits S = shape_traits(kShape);
    constexpr uint32_t columns = S.counts != 0 ? S.counts : 1;
    const uint32_t group_values = tile.group_blocks * BLOCK_VALUES;
    uint16_t counts[MAX_GROUPS][columns] = {};
    const uint32_t groups = uint32_t(div_up(tile.values, group_values));
    snapshot(counts, tile.counts, sizeof(counts[0]) * groups);
    uint32_t sum[columns] = {};
    bool ok = true;
    for (uint32_t g = 0; g < groups; ++g) {
        const uint32_t left = std::min(tile.values - g * group_values, group_values);
        uint32_t most = uint32_t(div_up(left, WORD_VALUES)) * WORD_VALUES;
        for (uint32_t c = 0; c < columns; ++c) {
            ok &= counts[g][c] <= most;
            most = counts[g][c];
            sum[c] += most;
            tail.end[c][g] = sum[c];
        }
    }
    uint32_t bits = 0;
    for (uint32_t l = 1; l < S.levels; ++l) {
        tail.codes[l] = sum[l - 1];
        tail.start[l] = bits;
        bits += S.width[l] * sum[l - 1];
    }
    tail.codes[S.levels] = sum[columns - 1];
    tail.start[S.levels] = bits;
    return ok && tile.tail_words == coded_tail_words(bits, sum[columns - 1]);
}

// Finds level by level how many codes there are, `n` at level 2. Returns false if they do not fit
// the tile's part of the tail.
template <uint8_t kShape>
bool count_codes(const CodedTile &tile, uint32_t n, TailReader &tail)
{
    constexpr ShapeTraits S = shape_traits(kShape);
    const uint32_t tail_bits = 8 * TAIL_WORD * tile.tail_words;
    uint32_t bits = 0;
    for (uint32_t l = 1; l < S.levels; ++l) {
        tail.codes[l] = n;
        tail.start[l] = bits;
        if (S.width[l] * n > tail_bits - bits)
            return false;
        uint32_t escapes = 0;
        for (uint32_t i = 0; i < n; i += 64) {
            uint64_t escape = n - i < 64 ? (uint64_t(1) << (n - i)) - 1 : ~uint64_t(0);
            for (uint32_t q = 0; q < S.width[l]; ++q)
                escape &= get_bits(tail.bytes, bits + q * n + i, 64);
            escapes += count_bits(escape);
        }
        bits += S.width[l] * n;
        n = escapes;
    }
    tail.codes[S.levels] = n;
    tail.start[S.levels] = bits;
    return tile.tail_words == coded_tail_words(bits, n);
}

// Decodes a tile's exponents, by code position. Returns false if the tile is corrupt.
template <uint8_t kShape>
bool decode_shape(const CodedTile &tile, TailReader &tail, uint8_t *positions)
{
    constexpr ShapeTraits S = shape_traits(kShape);
    constexpr uint32_t w1 = S.width[0];
    const uint32_t blocks = uint32_t(div_up(tile.values, BLOCK_VALUES));
    const uint32_t groups = uint32_t(div_up(blocks, tile.group_blocks));
    snapshot(tail.bytes, tile.tail, size_t(tile.tail_words) * TAIL_WORD);
    // Shape 4 needs level 1 twice.
    constexpr uint32_t COPY_WORDS =
            S.counts == 0 ? w1 * BLOCK_WORDS * S.tile_groups * S.group_blocks : 1;
    uint32_t copy[COPY_WORDS];
    const uint8_t *level1 = tile.level1;
    if constexpr (S.counts != 0) {
        if (!take_counts<kShape>(tile, tail))
            return false;
    } else {
        snapshot(copy, level1, plane_bytes(w1, tile.values));
        level1 = reinterpret_cast<const uint8_t *>(copy);
        uint32_t n = 0;
        for (uint32_t b = 0; b < blocks; ++b) {
            const uint32_t words = std::min(
                    uint32_t(div_up(tile.values, WORD_VALUES)) - b * BLOCK_WORDS, BLOCK_WORDS);
            const uint32_t *const block = copy + w1 * BLOCK_WORDS * b;
            for (uint32_t w = 0; w < words; ++w) {
                uint32_t escape = block[w];
                for (uint32_t q = 1; q < w1; ++q)
                    escape &= block[q * words + w];
                n += count_bits(escape);
            }
        }
        if (!count_codes<kShape>(tile, n, tail))
            return false;
    }
    if constexpr (S.levels > 1) {
        if (!read_level<kShape, 1>(tail, groups))
            return false;
    }

    const uint8_t *raw = tail.bytes + div_up(tail.start[S.levels], 8);
    uint32_t taken = 0, raws = 0;
    for (uint32_t b = 0; b < blocks; ++b) {
        const uint32_t n = std::min(tile.values - b * BLOCK_VALUES, BLOCK_VALUES);
        const uint32_t words = uint32_t(div_up(n, WORD_VALUES));
        const uint8_t *const from = level1 + plane_bytes(w1, BLOCK_VALUES) * b;
        uint32_t code_words[w1][BLOCK_WORDS];
        if (HWY_LIKELY(words == BLOCK_WORDS)) {
            snapshot(code_words, from, sizeof(code_words));
        } else {
            memset(code_words, 0, sizeof(code_words));
            for (uint32_t q = 0; q < w1; ++q)
                snapshot(code_words[q], from + sizeof(uint32_t) * words * q,
                         sizeof(uint32_t) * words);
        }

        Planes ranks;
        uint32_t n2 = taken;
        uint64_t any_raw = 0;
        for (uint32_t j = 0; j < PAIRS; ++j) {
            uint64_t code[3], p[4];
            ZIP_UNROLL
            for (uint32_t q = 0; q < w1; ++q)
                code[q] = load64(code_words[q] + 2 * j);
            const uint64_t escape = escapes_of<w1>(code);
            uint64_t deeper[4] = {escape, escape, escape, escape};
            if constexpr (S.levels > 1) {
                const BitSelector at(escape);
                const uint32_t count = count_bits(escape);
                ZIP_UNROLL
                for (uint32_t q = 0; q < 4; ++q)
                    deeper[q] = at.expand(get_bits(tail.streams[1][q], n2, count));
                n2 += count;
                keep_scalar(n2);
            }
            ranks_of_codes<kShape, 0>(code, escape, deeper, p);
            ZIP_UNROLL
            for (uint32_t q = 0; q < 4; ++q) {
                keep_scalar(p[q]);
                ranks.set_pair(q, j, p[q]);
            }
            any_raw |= deeper[0] & deeper[1] & deeper[2] & deeper[3];
        }
        taken = n2;

        uint8_t *const out = positions + b * BLOCK_VALUES;
        symbols_of(ranks, tile.symbols, out);
        if (any_raw != 0) {
            SparseBits raw_at;
            for (uint32_t j = 0; j < PAIRS; ++j)
                raw_at.add(j, ranks.pair(0, j) & ranks.pair(1, j) & ranks.pair(2, j) &
                                      ranks.pair(3, j));
            raw_at.visit([&](uint32_t i, uint32_t position) { out[position] = raw[i]; });
            raw += raw_at.size();
            raws += raw_at.size();
        }
        if constexpr (S.counts != 0) {
            if ((b % tile.group_blocks == tile.group_blocks - 1 || b == blocks - 1) &&
                tail.end[0][b / tile.group_blocks] != (S.levels > 1 ? taken : raws))
                return false;
        }
    }
    return true;
}

struct ShapeOps {
    bool (*encode)(const TypeOps &, const uint8_t *, uint32_t, uint32_t, const RankTable &,
                   uint32_t, uint8_t *, TailWriter &);
    bool (*decode)(const CodedTile &, TailReader &, uint8_t *);
};

ShapeOps shape_ops_of(uint8_t shape)
{
    switch (shape) {
    case SHAPE_11238:
        return {encode_shape<SHAPE_11238>, decode_shape<SHAPE_11238>};
    case SHAPE_38:
        return {encode_shape<SHAPE_38>, decode_shape<SHAPE_38>};
    case SHAPE_DENSE:
        return {encode_shape<SHAPE_DENSE>, decode_shape<SHAPE_DENSE>};
    default:
        return {encode_shape<SHAPE_22228>, decode_shape<SHAPE_22228>};
    }
}

// ---- tiles

// Moves a tile's bytes from element order to code positions, where they are or to `buffer`. Returns
// where they are then.
const uint8_t *to_positions(const TypeOps &type, uint8_t *elements, uint32_t values,
                            uint8_t *buffer)
{
    uint8_t *const to = type.in_place ? elements : buffer;
    for (uint32_t b = type.in_place ? values / BLOCK_VALUES : 0; b * BLOCK_VALUES < values; ++b) {
        uint8_t block[BLOCK_VALUES];
        const uint32_t n = std::min(values - b * BLOCK_VALUES, BLOCK_VALUES);
        const uint8_t *from = elements + b * BLOCK_VALUES;
        if (type.in_place) {
            memcpy(block, from, n);
            from = block;
        }
        type.to_positions(from, n, to + b * BLOCK_VALUES);
    }
    return to;
}

// The inverse: bytes that were written to positions_of() get to `elements`.
uint8_t *positions_of(const TypeOps &type, uint8_t *elements, uint8_t *buffer)
{
    return type.in_place ? elements : buffer;
}
void from_positions(const TypeOps &type, uint32_t values, uint8_t *elements, uint8_t *buffer)
{
    for (uint32_t b = type.in_place ? values / BLOCK_VALUES : 0; b * BLOCK_VALUES < values; ++b) {
        uint8_t block[BLOCK_VALUES];
        const uint8_t *from = buffer + b * BLOCK_VALUES;
        if (type.in_place) {
            memcpy(block, elements + b * BLOCK_VALUES, BLOCK_VALUES);
            from = block;
        }
        type.from_positions(from, std::min(values - b * BLOCK_VALUES, BLOCK_VALUES),
                            elements + b * BLOCK_VALUES);
    }
}

// Planes of a raw tile's exponents: plane q of block b is at plane(q) + that block's words.
class RawPlanes {
public:
    RawPlanes(Coding coding, uint32_t values)
        : values_(values), words_(uint32_t(div_up(values, WORD_VALUES))),
          w1_(shape_traits(coding.shape).width[0]),
          counts_(tile_counts_bytes(coding, values) / TAIL_WORD * TAIL_WORD),
          all_(raw_words(coding, values) * TAIL_WORD)
    {
    }
    // Addresses of a block's planes from `first` on.
    void planes(uint32_t block, uint32_t first, uint32_t n, uint8_t *level1, uint8_t **to)
    {
        const uint32_t words = block_words(block);
        for (uint32_t q = first; q < first + n; ++q)
            to[q - first] =
                    q < w1_ ? level1 + sizeof(uint32_t) * (w1_ * BLOCK_WORDS * block + q * words)
                            : words_of_others_ +
                                      sizeof(uint32_t) * ((q - w1_) * words_ + block * BLOCK_WORDS);
    }
    uint32_t block_words(uint32_t block) const
    {
        return std::min(words_ - block * BLOCK_WORDS, BLOCK_WORDS);
    }
    uint32_t blocks() const { return uint32_t(div_up(values_, BLOCK_VALUES)); }

    // What LEVEL1 does not hold: first in COUNTS, then in SYMBOLS, then in the tail.
    void store(uint8_t *counts, size_t counts_bytes, uint8_t *symbols, uint8_t *tail) const
    {
        memset(counts, 0, counts_bytes);
        memset(symbols, 0, TABLE_BYTES);
        const uint32_t a = std::min(all_, counts_), b = std::min(all_ - a, TABLE_BYTES);
        memcpy(counts, words_of_others_, a);
        memcpy(symbols, words_of_others_ + a, b);
        memcpy(tail, words_of_others_ + a + b, all_ - a - b);
    }
    void load(const uint8_t *counts, const uint8_t *symbols, const uint8_t *tail)
    {
        const uint32_t a = std::min(all_, counts_), b = std::min(all_ - a, TABLE_BYTES);
        snapshot(words_of_others_, counts, a);
        snapshot(words_of_others_ + a, symbols, b);
        snapshot(words_of_others_ + a + b, tail, all_ - a - b);
    }

private:
    const uint32_t values_, words_, w1_, counts_, all_;
    uint8_t words_of_others_[raw_words({DTYPE_FP64, SHAPE_11238, false}, MAX_TILE_VALUES) *
                             TAIL_WORD];
};

// 255 where a block's sample is, in each stripe of an even or odd block: the places repeat every 64
// bytes.
struct Places {
    uint8_t mask[2][STRIPES][64] = {};
    constexpr Places()
    {
        for (uint32_t odd = 0; odd < 2; ++odd) {
            for (uint32_t s = 0; s < STRIPES; ++s) {
                for (uint32_t w = 0; w < 8; ++w)
                    mask[odd][s][8 * w + (format::sample_bit(odd, w, s) >> 2)] = 255;
            }
        }
    }
};
constexpr Places PLACES;

// A tile's sampled symbols, and how many there are of each.
class Sample {
public:
    HWY_INLINE void add(uint8_t symbol) { symbol_[size_++] = symbol; }

    // The values of a whole block, an odd one of its tile or an even one.
    void add_block(const uint8_t *positions, bool odd)
    {
        const Bytes d8;
        const Doubles d64;
        const uint32_t step = uint32_t(hn::Lanes(d8));
        for (uint32_t at = 0; at < BLOCK_VALUES;) {
            // One byte of each eight is sampled; those of eight vectors fill one.
            auto all = hn::Zero(d64);
            for (uint32_t i = 0; i < 8; ++i, at += step) {
                const ByteVec place = hn::LoadU(d8, PLACES.mask[odd][at / STRIPE] + at % 64);
                const auto sampled = hn::SumsOf8(hn::And(hn::LoadU(d8, positions + at), place));
                all = hn::Or(hn::ShiftLeft<8>(all), sampled);
            }
            hn::StoreU(hn::BitCast(d8, all), d8, symbol_ + size_);
            size_ += step;
        }
    }

    RankedSymbols rank(uint8_t shape)
    {
        alignas(64) uint16_t counts[256];
        uint64_t present[4] = {};
        memset(counts, 0, sizeof(counts));
        if (!count_range(counts, present))
            count_all(counts, present);
        return rank_symbols(counts, present, size_, shape);
    }

private:
    // Most symbols in a row that are counted one by one.
    static constexpr uint32_t MAX_RANGE = 32;

    // Counts symbol by symbol, if all but 0 are in a short range, as bell-shaped data's are.
    bool count_range(uint16_t (&counts)[256], uint64_t (&present)[4])
    {
        const Bytes d8;
        const uint32_t step = uint32_t(hn::Lanes(d8));
        const uint32_t end = size_ / step * step;
        const ByteVec one = hn::Set(d8, 1);
        ByteVec least = hn::Set(d8, 255), most = hn::Zero(d8); // of symbol - 1; 0 is the largest
        for (uint32_t i = 0; i < end; i += step) {
            const ByteVec x = hn::Sub(hn::Load(d8, symbol_ + i), one);
            least = hn::Min(least, x);
            most = hn::Max(most, hn::AndNot(hn::VecFromMask(d8, hn::Eq(x, hn::Set(d8, 255))), x));
        }
        uint8_t lanes[2][64];
        hn::StoreU(least, d8, lanes[0]);
        hn::StoreU(most, d8, lanes[1]);
        const uint32_t from = *std::min_element(lanes[0], lanes[0] + step);
        const uint32_t to = *std::max_element(lanes[1], lanes[1] + step);
        if (from != 255 && to - from > MAX_RANGE)
            return false;
        const auto count = [&](uint32_t s) {
            const ByteVec symbol = hn::Set(d8, uint8_t(s));
            uint32_t n = 0;
#if HWY_TARGET <= HWY_AVX3
            for (uint32_t i = 0; i < end; i += step) // masks are in registers of their own
                n += uint32_t(hn::CountTrue(d8, hn::Eq(hn::Load(d8, symbol_ + i), symbol)));
#else
            for (uint32_t i = 0; i < end;) {
                ByteVec equal = hn::Zero(d8); // minus the lane's count
                const uint32_t part = std::min(end, i + 255 * step);
                for (; i < part; i += step)
                    equal = hn::Add(equal,
                                    hn::VecFromMask(d8, hn::Eq(hn::Load(d8, symbol_ + i), symbol)));
                const hn::Repartition<uint64_t, Bytes> d64;
                n += uint32_t(hn::GetLane(
                        hn::SumOfLanes(d64, hn::SumsOf8(hn::Sub(hn::Zero(d8), equal)))));
            }
#endif
            set(counts, present, s, n);
        };
        count(0);
        for (uint32_t s = from; from != 255 && s <= to; ++s)
            count(s + 1);
        for (uint32_t i = end; i < size_; ++i)
            set(counts, present, symbol_[i], counts[symbol_[i]] + 1u);
        return true;
    }

    void count_all(uint16_t (&counts)[256], uint64_t (&present)[4])
    {
        // Four, since successive increments of one counter would wait for each other.
        uint16_t more[3][256] = {};
        uint32_t i = 0;
        for (; i + 4 <= size_; i += 4) {
            ++counts[symbol_[i]];
            ++more[0][symbol_[i + 1]];
            ++more[1][symbol_[i + 2]];
            ++more[2][symbol_[i + 3]];
        }
        for (; i < size_; ++i)
            ++counts[symbol_[i]];
        for (uint32_t s = 0; s < 256; ++s)
            set(counts, present, s, uint32_t(counts[s]) + more[0][s] + more[1][s] + more[2][s]);
    }

    static HWY_INLINE void set(uint16_t (&counts)[256], uint64_t (&present)[4], uint32_t s,
                               uint32_t n)
    {
        counts[s] = uint16_t(n);
        present[s / 64] |= uint64_t(n != 0) << s % 64;
    }

    alignas(64) uint8_t symbol_[MAX_TILE_VALUES / 4 + 64];
    uint32_t size_ = 0;
};

// The sample of a tile whose symbols by code position these are.
void sample_tile(const TypeOps &type, const uint8_t *positions, uint32_t values, uint8_t shape,
                 Sample &sample)
{
    const bool both = shape == SHAPE_DENSE;
    for (uint32_t b = 0; b * BLOCK_VALUES < values; ++b) {
        const uint32_t n = std::min(values - b * BLOCK_VALUES, BLOCK_VALUES);
        const uint8_t *const block = positions + b * BLOCK_VALUES;
        if (n == BLOCK_VALUES) {
            sample.add_block(block, b % 2 != 0);
            if (both)
                sample.add_block(block, b % 2 == 0);
            continue;
        }
        uint32_t exist[BLOCK_WORDS];
        type.values_of_words(n, exist);
        for (uint32_t w = 0; w < BLOCK_WORDS; ++w) {
            for (uint32_t s = 0; s < STRIPES; ++s) {
                for (uint32_t flip = 0; flip <= (both ? 16u : 0u); flip += 16) {
                    const uint32_t bit = format::sample_bit(b, w, s) ^ flip;
                    if ((exist[w] >> bit & 1) != 0)
                        sample.add(block[s * STRIPE + 8 * w + (bit >> 2)]);
                }
            }
        }
    }
}

// fp64: the base of a tile, from the same sample; exponents in element order.
uint32_t choose_base(const uint16_t *exponents, uint32_t values, uint8_t shape)
{
    uint32_t largest = 0;
    const auto take = [&](uint32_t v) {
        const uint32_t e = exponents[v];
        largest = e < format::FP64_INFINITY ? std::max(largest, e) : largest;
    };
    if (values < format::SAMPLE_ALL_BELOW) {
        for (uint32_t v = 0; v < values; ++v)
            take(v);
        return format::fp64_base(largest);
    }
    for (uint32_t b = 0; b * BLOCK_VALUES < values; ++b) {
        const uint32_t n = std::min(values - b * BLOCK_VALUES, BLOCK_VALUES);
        const uint32_t words = uint32_t(div_up(n, WORD_VALUES));
        for (uint32_t w = 0; w < words; ++w) {
            for (uint32_t s = 0; s < STRIPES; ++s) {
                for (uint32_t flip = 0; flip <= (shape == SHAPE_DENSE ? 16u : 0u); flip += 16) {
                    const uint32_t v =
                            value_at(DTYPE_FP64, words, w, format::sample_bit(b, w, s) ^ flip);
                    if (v < n)
                        take(b * BLOCK_VALUES + v);
                }
            }
        }
    }
    return format::fp64_base(largest);
}

// fp64: symbols of exponents. Returns whether all have one.
bool symbols_of_fp64(const uint16_t *exponents, uint32_t values, uint32_t base, uint8_t *symbols)
{
    const Bytes d8;
    const Halves d16;
    const uint32_t step = uint32_t(hn::Lanes(d8)), half = step / 2;
    const HalfVec zero = hn::Zero(d16), infinity = hn::Set(d16, format::FP64_INFINITY);
    const HalfVec above = hn::Set(d16, uint16_t(base)), most = hn::Set(d16, 254);
    uint32_t v = 0;
    HalfVec wrong = zero;
    const auto symbols_at = [&](const uint16_t *e16) {
        const HalfVec e = hn::LoadU(d16, e16), s = hn::Sub(e, above);
        const auto is_zero = hn::Eq(e, zero), is_infinity = hn::Eq(e, infinity);
        // s - 1 wraps where e <= base
        const HalfVec too_far = hn::VecFromMask(
                d16, hn::Gt(hn::Sub(s, hn::Set(d16, 1)), hn::Sub(most, hn::Set(d16, 1))));
        wrong = hn::Or(wrong, hn::IfThenZeroElse(hn::Or(is_zero, is_infinity), too_far));
        return hn::IfThenElse(is_infinity, hn::Set(d16, 255), hn::IfThenZeroElse(is_zero, s));
    };
    for (; v + step <= values; v += step) {
        const auto a = hn::BitCast(d8, symbols_at(exponents + v));
        const auto b = hn::BitCast(d8, symbols_at(exponents + v + half));
        hn::StoreU(hn::ConcatEven(d8, b, a), d8, symbols + v);
    }
    bool ok = hn::AllTrue(d16, hn::Eq(wrong, zero));
    for (; v < values; ++v) {
        const uint32_t s = format::fp64_symbol(exponents[v], base);
        ok &= s != format::NO_SYMBOL;
        symbols[v] = uint8_t(s);
    }
    return ok;
}

void fp64_exponents_of(const uint8_t *symbols, uint32_t values, uint32_t base, uint16_t *exponents)
{
    const Halves d16;
    const hn::Half<Bytes> half8;
    const uint32_t step = uint32_t(hn::Lanes(d16));
    const HalfVec zero = hn::Zero(d16), above = hn::Set(d16, uint16_t(base));
    uint32_t v = 0;
    for (; v + step <= values; v += step) {
        const HalfVec s = hn::PromoteTo(d16, hn::LoadU(half8, symbols + v));
        const HalfVec e = hn::IfThenElse(hn::Eq(s, hn::Set(d16, 255)),
                                         hn::Set(d16, format::FP64_INFINITY), hn::Add(s, above));
        hn::StoreU(hn::IfThenZeroElse(hn::Eq(s, zero), e), d16, exponents + v);
    }
    for (; v < values; ++v)
        exponents[v] = uint16_t(format::fp64_exponent(symbols[v], base));
}

size_t EncodeTiles(Coding coding, const uint8_t *src, size_t length, uint8_t *dst, size_t limit)
{
    const Layout l = layout_of(coding, length);
    if (length > MAX_CODED_LENGTH || l.tail >= limit)
        return 0;
    const TypeTraits traits = type_traits(coding.dtype);
    const ShapeTraits shape = shape_traits(coding.shape);
    const TypeOps &type = type_ops_of(coding.dtype);
    const ShapeOps ops = shape_ops_of(coding.shape);
    const uint32_t k_planes = traits.sign_mantissa_bits(), tile_size = tile_values(coding);
    const uint32_t low = std::min(traits.low_bytes, 2u), low2 = traits.low_bytes - low;
    const uint32_t mantissa = traits.mantissa_is_bytes() ? 1 : 0;

    ChunkHeader header = new_header(coding, length);
    clear_section_padding(coding, l, dst);
    snapshot(header.trailing, src + length - l.trailing, l.trailing);

    TileBytes tile;
    TailWriter tail;
    alignas(64) uint8_t buffer[MAX_TILE_VALUES];
    for (uint64_t t = 0; t < l.tiles; ++t) {
        const uint64_t first = t * tile_size;
        const uint32_t values = uint32_t(std::min<uint64_t>(l.values - first, tile_size));
        type.split(src + traits.size * first, values,
                   {dst + l.mantissa + mantissa * first, dst + l.low + low * first,
                    dst + l.low2 + low2 * first},
                   tile);

        uint32_t base = 0;
        bool all_have_symbols = true;
        if (coding.dtype == DTYPE_FP64) {
            base = choose_base(tile.exponent64, values, coding.shape);
            all_have_symbols = symbols_of_fp64(tile.exponent64, values, base, tile.exponent);
        }
        Sample sample;
        if (values < format::SAMPLE_ALL_BELOW) {
            for (uint32_t v = 0; v < values; ++v)
                sample.add(tile.exponent[v]);
        }
        const uint8_t *const positions = to_positions(type, tile.exponent, values, buffer);
        if (values >= format::SAMPLE_ALL_BELOW)
            sample_tile(type, positions, values, coding.shape, sample);

        uint8_t *const level1 = dst + l.level1 + plane_bytes(shape.width[0], first);
        uint8_t *const tile_counts =
                dst + l.counts + sizeof(uint16_t) * shape.counts * shape.tile_groups * t;
        uint8_t *const tile_symbols = dst + l.symbols + sizeof(TileSymbols) * t;
        uint8_t *const out = dst + l.tail + header.tail_length;
        RankedSymbols ranked;
        bool coded = all_have_symbols;
        uint32_t words = raw_tail_words(coding, values);
        const uint32_t group_blocks = group_values(coding) / BLOCK_VALUES;
        if (coded) {
            ranked = sample.rank(coding.shape);
            coded = ops.encode(type, positions, values, group_blocks, RankTable(ranked),
                               words * TAIL_WORD, level1, tail);
            words = coded ? coded_tail_words(tail.bits, tail.raws) : words;
        }
        if (l.tail + header.tail_length + words * TAIL_WORD >= limit)
            return 0;
        if (coded) {
            memcpy(out, tail.bytes, size_t(words) * TAIL_WORD);
            if (coding.dtype == DTYPE_FP64) {
                ranked.table.symbol[format::BASE_LOW] = uint8_t(base);
                ranked.table.symbol[format::BASE_HIGH] = uint8_t(base >> 8);
            }
            memcpy(tile_symbols, &ranked.table, sizeof(ranked.table));
            uint16_t group_counts[MAX_GROUPS * MAX_COUNTS];
            uint32_t n = 0;
            for (uint32_t g = 0; g * group_blocks * BLOCK_VALUES < values; ++g) {
                for (uint32_t c = 0; c < shape.counts; ++c)
                    group_counts[n++] =
                            uint16_t(tail.end[c][g] - (g == 0 ? 0 : tail.end[c][g - 1]));
            }
            memcpy(tile_counts, group_counts, sizeof(uint16_t) * n);
        } else {
            RawPlanes raw(coding, values);
            const uint32_t bits = traits.exponent_bits;
            uint8_t *planes[8];
            if (coding.dtype == DTYPE_FP64) { // two bytes
                for (uint32_t part = 0; part < 2; ++part) {
                    for (uint32_t v = 0; v < values; ++v)
                        tile.exponent[v] = uint8_t(tile.exponent64[v] >> 8 * part);
                    const uint8_t *const at = to_positions(type, tile.exponent, values, buffer);
                    for (uint32_t b = 0; b < raw.blocks(); ++b) {
                        raw.planes(b, 8 * part, part == 0 ? 8 : bits - 8, level1, planes);
                        store_planes(at + b * BLOCK_VALUES, part == 0 ? 8 : bits - 8,
                                     raw.block_words(b), planes);
                    }
                }
            } else {
                for (uint32_t b = 0; b < raw.blocks(); ++b) {
                    raw.planes(b, 0, bits, level1, planes);
                    store_planes(positions + b * BLOCK_VALUES, bits, raw.block_words(b), planes);
                }
            }
            raw.store(tile_counts, tile_counts_bytes(coding, values), tile_symbols, out);
        }
        const uint64_t tile_word =
                tile_header(header.tail_length / TAIL_WORD, words, coded ? TILE_CODED : TILE_RAW);
        memcpy(dst + l.tile_headers + sizeof(tile_word) * t, &tile_word, sizeof(tile_word));
        header.tail_length += words * TAIL_WORD;

        if (!traits.mantissa_is_bytes()) {
            uint8_t *const section = dst + l.mantissa + plane_bytes(k_planes, first);
            const uint8_t *const at = to_positions(type, tile.sign_mantissa, values, buffer);
            for (uint32_t b = 0; b * BLOCK_VALUES < values; ++b) {
                const uint32_t n = std::min(values - b * BLOCK_VALUES, BLOCK_VALUES);
                const uint32_t block_words = uint32_t(div_up(n, WORD_VALUES));
                uint8_t *planes[8];
                for (uint32_t q = 0; q < k_planes; ++q)
                    planes[q] = section +
                                sizeof(uint32_t) * (k_planes * BLOCK_WORDS * b + q * block_words);
                store_planes(at + b * BLOCK_VALUES, k_planes, block_words, planes);
            }
        }
    }
    memcpy(dst, &header, sizeof(header));
    return l.tail + header.tail_length;
}

zip_status_t DecodeTiles(const ChunkHeader &header, const uint8_t *src, uint8_t *dst)
{
    const Coding coding = coding_of(header);
    const Layout l = layout_of(coding, header.original_length);
    const TypeTraits traits = type_traits(coding.dtype);
    const ShapeTraits shape = shape_traits(coding.shape);
    const TypeOps &type = type_ops_of(coding.dtype);
    const ShapeOps ops = shape_ops_of(coding.shape);
    const uint32_t k_planes = traits.sign_mantissa_bits(), tile_size = tile_values(coding);
    const uint32_t low = std::min(traits.low_bytes, 2u), low2 = traits.low_bytes - low;
    const uint32_t mantissa = traits.mantissa_is_bytes() ? 1 : 0;
    memcpy(dst + header.original_length - l.trailing, header.trailing, l.trailing);

    TileBytes tile;
    TailReader tail;
    alignas(64) uint8_t buffer[MAX_TILE_VALUES];
    for (uint64_t t = 0; t < l.tiles; ++t) {
        const uint64_t first = t * tile_size;
        const uint32_t values = uint32_t(std::min<uint64_t>(l.values - first, tile_size));
        const uint32_t blocks = uint32_t(div_up(values, BLOCK_VALUES));
        const auto tile_word = snapshot_value<uint64_t>(src + l.tile_headers + 8 * t);
        if (!valid_tile_header(coding, tile_word, values, header.tail_length))
            return ZIP_ERR_CORRUPT;
        const uint8_t *const level1 = src + l.level1 + plane_bytes(shape.width[0], first);
        const uint8_t *const counts =
                src + l.counts + sizeof(uint16_t) * shape.counts * shape.tile_groups * t;
        const uint8_t *const symbols = src + l.symbols + sizeof(TileSymbols) * t;
        const uint8_t *const in = src + l.tail + TAIL_WORD * tile_offset(tile_word);

        if (tile_mode(tile_word) == TILE_CODED) {
            CodedTile coded = {values,
                               group_values(coding) / BLOCK_VALUES,
                               tile_words(tile_word),
                               level1,
                               counts,
                               in,
                               {}};
            snapshot(&coded.symbols, symbols, sizeof(coded.symbols));
            const uint32_t base = coded.symbols.symbol[format::BASE_LOW] +
                                  256u * coded.symbols.symbol[format::BASE_HIGH];
            if (coding.dtype == DTYPE_FP64 && base > format::MAX_BASE)
                return ZIP_ERR_CORRUPT;
            if (!ops.decode(coded, tail, positions_of(type, tile.exponent, buffer)))
                return ZIP_ERR_CORRUPT;
            from_positions(type, values, tile.exponent, buffer);
            if (coding.dtype == DTYPE_FP64)
                fp64_exponents_of(tile.exponent, values, base, tile.exponent64);
        } else {
            RawPlanes raw(coding, values);
            raw.load(counts, symbols, in);
            const uint32_t bits = traits.exponent_bits;
            for (uint32_t part = 0; 8 * part < bits; ++part) {
                const uint32_t n = std::min(bits - 8 * part, 8u);
                uint8_t *const at = positions_of(type, tile.exponent, buffer);
                for (uint32_t b = 0; b < blocks; ++b) {
                    uint8_t *planes[8];
                    raw.planes(b, 8 * part, n, const_cast<uint8_t *>(level1), planes);
                    load_planes(planes, n, raw.block_words(b), at + b * BLOCK_VALUES);
                }
                from_positions(type, values, tile.exponent, buffer);
                for (uint32_t v = 0; coding.dtype == DTYPE_FP64 && v < values; ++v)
                    tile.exponent64[v] = uint16_t((part == 0 ? 0 : tile.exponent64[v]) |
                                                  tile.exponent[v] << 8 * part);
            }
        }
        if (!traits.mantissa_is_bytes()) {
            const uint8_t *const section = src + l.mantissa + plane_bytes(k_planes, first);
            uint8_t *const at = positions_of(type, tile.sign_mantissa, buffer);
            for (uint32_t b = 0; b < blocks; ++b) {
                const uint32_t n = std::min(values - b * BLOCK_VALUES, BLOCK_VALUES);
                const uint32_t block_words = uint32_t(div_up(n, WORD_VALUES));
                const uint8_t *planes[8];
                for (uint32_t q = 0; q < k_planes; ++q)
                    planes[q] = section +
                                sizeof(uint32_t) * (k_planes * BLOCK_WORDS * b + q * block_words);
                load_planes(planes, k_planes, block_words, at + b * BLOCK_VALUES);
            }
            from_positions(type, values, tile.sign_mantissa, buffer);
        }
        type.merge(values,
                   {src + l.mantissa + mantissa * first, src + l.low + low * first,
                    src + l.low2 + low2 * first},
                   tile, dst + traits.size * first);
    }
    return ZIP_OK;
}

#endif // HWY_SCALAR
} // namespace HWY_NAMESPACE
} // namespace zip::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zip::cpu {

HWY_EXPORT(EncodeTiles);
HWY_EXPORT(DecodeTiles);

size_t encode_simd(Coding coding, const uint8_t *src, size_t length, uint8_t *dst, size_t limit)
{
    return HWY_DYNAMIC_DISPATCH(EncodeTiles)(coding, src, length, dst, limit);
}

zip_status_t decode_simd(const ChunkHeader &header, const uint8_t *src, uint8_t *dst)
{
    return HWY_DYNAMIC_DISPATCH(DecodeTiles)(header, src, dst);
}

} // namespace zip::cpu
#endif
