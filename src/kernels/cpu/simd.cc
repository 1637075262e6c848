// SPDX-License-Identifier: BSD-3-Clause
// Fast coder: a block's bit planes in vectors, its escapes in 64-bit words. Compiled once for each
// instruction set.
#include <algorithm>

#include "kernels/cpu/internal.h"
#include "kernels/cpu/table.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/simd.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace zip::cpu {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR
// No vectors: the reference does it.
size_t EncodeTiles(zip_dtype_t dtype, const uint8_t *src, size_t length, uint8_t *dst, size_t limit)
{
    return encode_scalar(dtype, src, length, dst, limit);
}

zip_status_t DecodeTiles(const format::ChunkHeader &header, const uint8_t *src, uint8_t *dst)
{
    return decode_scalar(header, src, dst);
}
#else

namespace hn = hwy::HWY_NAMESPACE;
// A vector holds a nibble for each of at most 128 values of a stripe of 256.
using Bytes = hn::CappedTag<uint8_t, 64>;
using Halves = hn::Repartition<uint16_t, Bytes>;
using Words = hn::Repartition<uint32_t, Bytes>;
using ByteVec = hn::Vec<Bytes>;
using WordVec = hn::Vec<Words>;

constexpr uint32_t STRIPES = 4; // of a block, each 256 code positions: bit & 3 of a plane word
constexpr uint32_t STRIPE = BLOCK_VALUES / STRIPES;

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

constexpr uint32_t STREAM_BYTES = TILE_VALUES / 8; // a bit for each value
constexpr uint32_t SLOP = 16;                      // what 64-bit accesses may touch behind a stream

// Keeps the compiler from pairing integers in vectors: moving them there and back halves the speed
// (GCC 12, -O2).
template <class T>
HWY_INLINE void keep_scalar(T &x)
{
    asm("" : "+r"(x));
}

// Appends to K bit streams that grow alike. Each buffer has SLOP bytes more than its bits need.
template <uint32_t K>
class BitWriter {
public:
    using Buffers = uint8_t[K][STREAM_BYTES + SLOP];

    HWY_INLINE void put(uint64_t (&&bits)[K], uint32_t n, Buffers &out)
    {
        const uint32_t shift = size_ & 7, end = shift + n, at = size_ >> 3;
        size_ += n;
        for (uint32_t k = 0; k < K; ++k) {
            uint64_t x = pending_[k] | bits[k] << shift;
            keep_scalar(x);
            memcpy(out[k] + at, &x, sizeof(x));
            pending_[k] = x >> (end & 56);
        }
        if (HWY_UNLIKELY(end >= 64)) {
            for (uint32_t k = 0; k < K; ++k) {
                pending_[k] = bits[k] >> (63 - shift) >> 1;
                keep_scalar(pending_[k]);
            }
        }
    }
    // Completes the last bytes; zero up to a multiple of 64 bits.
    HWY_INLINE void finish(Buffers &out) const
    {
        uint64_t zero_above[2] = {0, 0}; // up to 15 bytes
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
    uint64_t x;
    memcpy(&x, stream + (at >> 3), sizeof(x));
    x >>= at & 7;
    if (HWY_UNLIKELY(n > 56)) {
        const uint64_t next = stream[(at >> 3) + 8];
        x |= next << 1 << (63 - (at & 7));
    }
    keep_scalar(x);
    return x;
}

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

// Exponent -> rank (level << 2 | code). A step looks a symbol up by its low four bits and compares;
// symbols that share those take a step each.
struct RankTable {
    alignas(16) uint8_t symbol[TABLE_SYMBOLS][16];
    alignas(16) uint8_t flip[TABLE_SYMBOLS][16]; // rank ^ RANK_RAW
    uint32_t steps;

    explicit RankTable(const TileSymbols &symbols)
    {
        uint8_t used[16] = {};
        steps = 0;
        for (uint32_t r = 0; r < RANK_RAW; ++r) {
            if ((r & 3) == ESCAPE)
                continue;
            const uint8_t s = symbols.symbol[r], low = s & 15;
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

// A block's ranks as bit planes; words without values are 0.
struct Planes {
    alignas(64) uint32_t code0[BLOCK_WORDS],
            code1[BLOCK_WORDS]; // code of the level at which the value ends
    alignas(64) uint32_t level0[BLOCK_WORDS], level1[BLOCK_WORDS];
};

// Splits values into RAW bytes, lower halves (fp32) and exponents. `n` is a multiple of 64.
template <bool kFp32>
void split(const uint8_t *src, uint32_t n, uint8_t *exponents, uint8_t *raw, uint8_t *raw2)
{
    const Bytes d8;
    const Halves d16;
    const uint32_t step = uint32_t(hn::Lanes(d8));
    const ByteVec low7 = hn::Set(d8, 0x7f);
    for (uint32_t v = 0; v < n; v += step) {
        ByteVec low, high; // of the upper 16 bits
        if constexpr (kFp32) {
            const uint32_t half = step / 2;
            const auto a = hn::BitCast(d16, hn::LoadU(d8, src + 4 * v));
            const auto b = hn::BitCast(d16, hn::LoadU(d8, src + 4 * v + step));
            const auto c = hn::BitCast(d16, hn::LoadU(d8, src + 4 * v + 2 * step));
            const auto d = hn::BitCast(d16, hn::LoadU(d8, src + 4 * v + 3 * step));
            hn::StoreU(hn::BitCast(d8, hn::ConcatEven(d16, b, a)), d8, raw2 + 2 * v);
            hn::StoreU(hn::BitCast(d8, hn::ConcatEven(d16, d, c)), d8, raw2 + 2 * (v + half));
            const ByteVec first = hn::BitCast(d8, hn::ConcatOdd(d16, b, a));
            const ByteVec second = hn::BitCast(d8, hn::ConcatOdd(d16, d, c));
            low = hn::ConcatEven(d8, second, first);
            high = hn::ConcatOdd(d8, second, first);
        } else {
            hn::LoadInterleaved2(d8, src + 2 * v, low, high);
        }
        hn::StoreU(hn::Or(hn::And(low, low7), hn::AndNot(low7, high)), d8, raw + v);
        // high << 1 | low >> 7; a set top bit is -1 as a comparison's result
        const hn::RebindToSigned<Bytes> i8;
        const auto top = hn::VecFromMask(i8, hn::Lt(hn::BitCast(i8, low), hn::Zero(i8)));
        hn::StoreU(hn::Sub(hn::Add(high, high), hn::BitCast(d8, top)), d8, exponents + v);
    }
}

// The inverse.
template <bool kFp32>
void merge(const uint8_t *exponents, const uint8_t *raw, const uint8_t *raw2, uint32_t n,
           uint8_t *dst)
{
    const Bytes d8;
    const Halves d16;
    const uint32_t step = uint32_t(hn::Lanes(d8));
    const ByteVec low7 = hn::Set(d8, 0x7f), top = hn::Set(d8, 0x80);
    for (uint32_t v = 0; v < n; v += step) {
        const ByteVec e = hn::LoadU(d8, exponents + v), r = hn::LoadU(d8, raw + v);
        const auto e16 = hn::BitCast(d16, e);
        const ByteVec low =
                hn::Or(hn::And(r, low7), hn::And(hn::BitCast(d8, hn::ShiftLeft<7>(e16)), top));
        const ByteVec high =
                hn::Or(hn::And(r, top), hn::And(hn::BitCast(d8, hn::ShiftRight<1>(e16)), low7));
        if constexpr (kFp32) {
            alignas(64) uint8_t halves[2 * 64];
            hn::StoreInterleaved2(low, high, d8, halves);
            for (uint32_t i = 0; i < 2; ++i) {
                const auto upper = hn::BitCast(d16, hn::Load(d8, halves + i * step));
                const auto lower = hn::BitCast(d16, hn::LoadU(d8, raw2 + 2 * v + i * step));
                alignas(64) uint16_t out[2 * 32];
                hn::StoreInterleaved2(lower, upper, d16, out);
                hn::StoreU(hn::BitCast(d8, hn::Load(d16, out)), d8, dst + 4 * v + 2 * i * step);
                hn::StoreU(hn::BitCast(d8, hn::Load(d16, out + step / 2)), d8,
                           dst + 4 * v + (2 * i + 1) * step);
            }
        } else {
            hn::StoreInterleaved2(low, high, d8, dst + 2 * v);
        }
    }
}

HWY_INLINE ByteVec ranks_of(ByteVec exponents, const RankTable &table)
{
    const Bytes d8;
    const ByteVec low = hn::And(exponents, hn::Set(d8, 15));
    ByteVec rank = hn::Set(d8, RANK_RAW);
    for (uint32_t s = 0; s < table.steps; ++s) {
        const ByteVec symbol = hn::TableLookupBytes(hn::LoadDup128(d8, table.symbol[s]), low);
        const ByteVec flip = hn::TableLookupBytes(hn::LoadDup128(d8, table.flip[s]), low);
        const ByteVec same = hn::VecFromMask(d8, hn::Eq(symbol, exponents));
        rank = hn::Xor(rank, hn::And(flip, same));
    }
    return rank;
}

// Exponents by code position -> planes.
void rank_planes(const uint8_t *exponents, const RankTable &table, Planes &planes)
{
    const Bytes d8;
    const Halves d16;
    const Words d32;
    for (uint32_t lane = 0; lane < BLOCK_WORDS; lane += uint32_t(hn::Lanes(d32))) {
        WordVec w[4];
        for (uint32_t i = 0; i < STRIPES; ++i) {
            ByteVec even, odd;
            hn::LoadInterleaved2(d8, exponents + i * STRIPE + lane * 8, even, odd);
            even = ranks_of(even, table);
            odd = ranks_of(odd, table);
            const auto odd4 = hn::BitCast(d8, hn::ShiftLeft<4>(hn::BitCast(d16, odd)));
            w[i] = hn::BitCast(d32, hn::Or(even, odd4));
        }
        transpose_nibbles(w);
        hn::Store(w[0], d32, planes.code0 + lane);
        hn::Store(w[1], d32, planes.code1 + lane);
        hn::Store(w[2], d32, planes.level0 + lane);
        hn::Store(w[3], d32, planes.level1 + lane);
    }
}

// Planes -> exponents by code position.
void exponents_of(const Planes &planes, const TileSymbols &table, uint8_t *exponents)
{
    const Bytes d8;
    const Halves d16;
    const Words d32;
    const ByteVec symbols = hn::LoadDup128(d8, table.symbol), low4 = hn::Set(d8, 15);
    for (uint32_t lane = 0; lane < BLOCK_WORDS; lane += uint32_t(hn::Lanes(d32))) {
        WordVec w[4] = {hn::Load(d32, planes.code0 + lane), hn::Load(d32, planes.code1 + lane),
                        hn::Load(d32, planes.level0 + lane), hn::Load(d32, planes.level1 + lane)};
        transpose_nibbles(w);
        for (uint32_t i = 0; i < STRIPES; ++i) {
            const ByteVec even = hn::And(hn::BitCast(d8, w[i]), low4);
            const ByteVec odd =
                    hn::And(hn::BitCast(d8, hn::ShiftRight<4>(hn::BitCast(d16, w[i]))), low4);
            hn::StoreInterleaved2(hn::TableLookupBytes(symbols, even),
                                  hn::TableLookupBytes(symbols, odd), d8,
                                  exponents + i * STRIPE + lane * 8);
        }
    }
}

// Sets level 1's words from the planes: an escape is 3.
void level1_words(const Planes &p, uint32_t (&level1)[2 * BLOCK_WORDS])
{
    const Words d32;
    for (uint32_t lane = 0; lane < BLOCK_WORDS; lane += uint32_t(hn::Lanes(d32))) {
        const WordVec escape =
                hn::Or(hn::Load(d32, p.level0 + lane), hn::Load(d32, p.level1 + lane));
        hn::StoreInterleaved2(hn::Or(hn::Load(d32, p.code0 + lane), escape),
                              hn::Or(hn::Load(d32, p.code1 + lane), escape), d32,
                              level1 + 2 * lane);
    }
}

// Code position of a bit in two neighbouring words of a plane, and so the index of its exponent in
// a full block.
HWY_INLINE uint32_t position_of(uint32_t pair, uint32_t bit)
{
    const uint32_t word = 2 * pair + (bit >> 5);
    return (bit & 3) * STRIPE + 8 * word + (bit >> 2 & 7);
}

HWY_INLINE uint64_t pair_at(const uint32_t *plane, uint32_t pair)
{
    uint64_t x;
    memcpy(&x, plane + 2 * pair, sizeof(x));
    return x;
}

HWY_INLINE uint32_t count_bits(uint64_t x)
{
    return uint32_t(hwy::PopCount(x));
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
            visit(i, position_of(pair_[word], uint32_t(hwy::Num0BitsBelowLS1Bit_Nonzero64(bits))));
            bits &= bits - 1;
            word += bits == 0;
            bits = bits == 0 ? bits_[word] : bits;
        }
    }

private:
    uint64_t bits_[BLOCK_WORDS / 2 + 1] =
            {}; // one more: words without bits are written and then overwritten
    uint32_t pair_[BLOCK_WORDS / 2 + 1];
    uint32_t words_ = 0, size_ = 0;
};

// A tile's tail while it grows.
class TailWriter {
public:
    void start()
    {
        level2_ = {};
        level3_ = {};
        level4_ = {};
        level4_codes_ = raws_ = 0;
    }

    // Appends the escapes of a block whose exponents by code position these are.
    void append(const Planes &p, const uint8_t *exponents)
    {
        BitWriter<2> level2 = level2_; // in registers
        BitWriter<3> level3 = level3_;
        SparseBits raw_at;
        for (uint32_t j = 0; j < BLOCK_WORDS / 2; ++j) {
            const uint64_t code0 = pair_at(p.code0, j), code1 = pair_at(p.code1, j);
            const uint64_t is1or3 = pair_at(p.level0, j), from2 = pair_at(p.level1, j);
            const uint64_t from1 = is1or3 | from2, is3 = is1or3 & from2;
            const BitSelector at2(from1), at3(from2);
            level2.put({at2.compress(code0 | from2), at2.compress(code1 | from2)},
                       count_bits(from1), bits2_);
            level3.put({at3.compress(code0), at3.compress(code1), at3.compress(is3)},
                       count_bits(from2), bits3_);
            level4_codes_ += count_bits(is3);
            raw_at.add(j, is3 & code0 & code1);
        }
        uint8_t *const raw = raw_ + raws_;
        raw_at.visit([&](uint32_t i, uint32_t position) { raw[i] = exponents[position]; });
        raws_ += raw_at.size();
        level2_ = level2;
        level3_ = level3;
    }

    // Codes so far.
    void sizes(uint32_t (&codes)[LEVELS]) const
    {
        codes[0] = level2_.size();
        codes[1] = level3_.size();
        codes[2] = level4_codes_;
        codes[3] = raws_;
    }

    // Writes the whole tail.
    void store(uint8_t *out)
    {
        level2_.finish(bits2_);
        level3_.finish(bits3_);
        // So far level 3 has its values' last codes, and where those are of level 4; that is split
        // here, where few are left.
        for (uint32_t at = 0; at < div_up(level3_.size(), 64); ++at) {
            uint64_t code[2], is3;
            memcpy(&code[0], bits3_[0] + 8 * at, 8);
            memcpy(&code[1], bits3_[1] + 8 * at, 8);
            memcpy(&is3, bits3_[2] + 8 * at, 8);
            const BitSelector at4(is3);
            level4_.put({at4.compress(code[0]), at4.compress(code[1])}, count_bits(is3), bits4_);
            for (uint32_t k = 0; k < 2; ++k) {
                code[k] |= is3;
                memcpy(bits3_[k] + 8 * at, &code[k], 8);
            }
        }
        level4_.finish(bits4_);

        auto stream = [&out](const uint8_t *bits, uint32_t size) {
            const size_t n = TAIL_WORD * div_up(size, 32);
            memcpy(out, bits, n);
            out += n;
        };
        for (uint32_t k = 0; k < 2; ++k)
            stream(bits2_[k], level2_.size());
        for (uint32_t k = 0; k < 2; ++k)
            stream(bits3_[k], level3_.size());
        for (uint32_t k = 0; k < 2; ++k)
            stream(bits4_[k], level4_.size());
        memcpy(out, raw_, raws_);
        memset(out + raws_, 0, (0 - raws_) % TAIL_WORD);
    }

private:
    BitWriter<2> level2_, level4_;
    BitWriter<3> level3_;
    uint32_t level4_codes_, raws_;
    BitWriter<2>::Buffers bits2_, bits4_;
    BitWriter<3>::Buffers bits3_;
    uint8_t raw_[TILE_VALUES];
};

// A tile's tail while it is read. Works on a private copy, since escapes are found to match the
// counts only after use: whatever level 1 says, a tile has TILE_VALUES escapes at most, and so far
// behind each stream's start there is memory.
class TailReader {
public:
    // Takes the tail of a tile with these (valid) sums of counts.
    void start(const uint8_t *tail, const uint32_t (&codes)[LEVELS])
    {
        snapshot(tail_, tail, coded_tile_words(codes) * TAIL_WORD);
        const uint8_t *at = tail_;
        auto stream = [&at](uint32_t size) {
            const uint8_t *start = at;
            at += TAIL_WORD * div_up(size, 32);
            return start;
        };
        for (auto &plane : level2_)
            plane = stream(codes[0]);
        const uint8_t *const level3[2] = {stream(codes[1]), stream(codes[1])};
        const uint8_t *const level4[2] = {stream(codes[2]), stream(codes[2])};
        raw_ = at;
        memset(taken_, 0, sizeof(taken_));

        // Resolve level 4 while only level 3's codes need looking at. What is behind the last of
        // them does no harm: nothing takes it.
        uint32_t n4 = 0;
        for (uint32_t i = 0; i < codes[1]; i += 64) {
            const uint64_t y0 = get_bits(level3[0], i, 64), y1 = get_bits(level3[1], i, 64);
            const uint64_t is3 = y0 & y1;
            const BitSelector at4(is3);
            const uint64_t code[3] = {(y0 & ~is3) | at4.expand(get_bits(level4[0], n4, 64)),
                                      (y1 & ~is3) | at4.expand(get_bits(level4[1], n4, 64)), is3};
            n4 += count_bits(is3);
            for (uint32_t k = 0; k < 3; ++k)
                memcpy(bits3_[k] + i / 8, &code[k], 8);
        }
    }

    // Reads the escapes of a block into planes, and where raw exponents are.
    HWY_INLINE void take(const uint32_t (&level1)[2 * BLOCK_WORDS], Planes &p, SparseBits &raw_at)
    {
        uint32_t n2 = taken_[0], n3 = taken_[1], n4 = taken_[2];
        // Copies, since as far as the compiler knows `p` might be these members.
        const uint8_t *const level2[2] = {level2_[0], level2_[1]};
        for (uint32_t j = 0; j < BLOCK_WORDS / 2; ++j) {
            const uint64_t a = pair_at(level1, 2 * j), b = pair_at(level1, 2 * j + 1);
            const uint64_t w0 = (a & 0xffffffff) | b << 32, w1 = a >> 32 | (b >> 32 << 32);
            const uint64_t from1 = w0 & w1;
            const BitSelector at2(from1);
            const uint32_t from1s = count_bits(from1);
            const uint64_t x0 = at2.expand(get_bits(level2[0], n2, from1s));
            const uint64_t x1 = at2.expand(get_bits(level2[1], n2, from1s));
            const uint64_t from2 = x0 & x1;
            const BitSelector at3(from2);
            const uint32_t from2s = count_bits(from2);
            const uint64_t y0 = at3.expand(get_bits(bits3_[0], n3, from2s));
            const uint64_t y1 = at3.expand(get_bits(bits3_[1], n3, from2s));
            const uint64_t is3 = at3.expand(get_bits(bits3_[2], n3, from2s));
            n2 += from1s;
            n3 += from2s;
            keep_scalar(n2);
            keep_scalar(n3);
            n4 += count_bits(is3);
            uint64_t code0 = (w0 & ~from1) | (x0 & ~from2) | y0,
                     code1 = (w1 & ~from1) | (x1 & ~from2) | y1;
            uint64_t level0 = (from1 & ~from2) | is3, level1_plane = from2;
            keep_scalar(code0);
            keep_scalar(code1);
            keep_scalar(level0);
            keep_scalar(level1_plane);
            raw_at.add(j, is3 & code0 & code1);
            memcpy(p.code0 + 2 * j, &code0, 8);
            memcpy(p.code1 + 2 * j, &code1, 8);
            memcpy(p.level0 + 2 * j, &level0, 8);
            memcpy(p.level1 + 2 * j, &level1_plane, 8);
        }
        taken_[0] = n2;
        taken_[1] = n3;
        taken_[2] = n4;
    }

    // The next raw exponents.
    const uint8_t *take_raw(uint32_t n)
    {
        const uint8_t *const raw = raw_ + taken_[LEVELS - 1];
        taken_[LEVELS - 1] += n;
        return raw;
    }

    bool has_taken(const uint32_t (&codes)[LEVELS]) const
    {
        return memcmp(codes, taken_, sizeof(codes)) == 0;
    }

private:
    const uint8_t *level2_[2], *raw_;
    uint32_t taken_[LEVELS];
    BitWriter<3>::Buffers bits3_ =
            {}; // level 3's codes where those end, level 4's elsewhere; which are of level 4
    // A valid coded tail is no longer than a raw tile's.
    uint8_t tail_[raw_tile_words(TILE_VALUES) * TAIL_WORD + TILE_VALUES + SLOP] = {};
};

// Pieces of a block that are contiguous both in element order and by code position: whole stripes
// (bf16), half stripes in groups of four (fp32). These two copy the exponents of a block of
// `values` values to and from code positions.
template <bool kFp32>
void to_positions(const uint8_t *exponents, uint32_t values, uint8_t *positions)
{
    if (values == BLOCK_VALUES) {
        const Words d32;
        const Bytes d8;
        const uint32_t step = uint32_t(hn::Lanes(d8));
        for (uint32_t i = 0; i < STRIPES; ++i) {
            for (uint32_t v = 0; v < STRIPE / 2; v += step) {
                const auto a = hn::BitCast(d32, hn::LoadU(d8, exponents + i * STRIPE + v));
                const auto b =
                        hn::BitCast(d32, hn::LoadU(d8, exponents + i * STRIPE + STRIPE / 2 + v));
                hn::StoreInterleaved2(a, b, d32,
                                      reinterpret_cast<uint32_t *>(positions + i * STRIPE + 2 * v));
            }
        }
        return;
    }
    const uint32_t words = uint32_t(div_up(values, WORD_VALUES));
    for (uint32_t w = 0; w < words; ++w) {
        for (uint32_t bit = 0; bit < WORD_VALUES; ++bit) {
            const uint32_t v = value_at(kFp32 ? DTYPE_FP32 : DTYPE_BF16, words, w, bit);
            positions[(bit & 3) * STRIPE + 8 * w + (bit >> 2)] = v < values ? exponents[v] : 0;
        }
    }
}

template <bool kFp32>
void from_positions(const uint8_t *positions, uint32_t values, uint8_t *exponents)
{
    if (values == BLOCK_VALUES) {
        const Words d32;
        const Bytes d8;
        const uint32_t step = uint32_t(hn::Lanes(d8));
        for (uint32_t i = 0; i < STRIPES; ++i) {
            for (uint32_t v = 0; v < STRIPE / 2; v += step) {
                WordVec a, b;
                hn::LoadInterleaved2(
                        d32, reinterpret_cast<const uint32_t *>(positions + i * STRIPE + 2 * v), a,
                        b);
                hn::StoreU(hn::BitCast(d8, a), d8, exponents + i * STRIPE + v);
                hn::StoreU(hn::BitCast(d8, b), d8, exponents + i * STRIPE + STRIPE / 2 + v);
            }
        }
        return;
    }
    const uint32_t words = uint32_t(div_up(values, WORD_VALUES));
    for (uint32_t w = 0; w < words; ++w) {
        for (uint32_t bit = 0; bit < WORD_VALUES; ++bit) {
            const uint32_t v = value_at(kFp32 ? DTYPE_FP32 : DTYPE_BF16, words, w, bit);
            if (v < values)
                exponents[v] = positions[(bit & 3) * STRIPE + 8 * w + (bit >> 2)];
        }
    }
}

// Clears what is no value in a ragged block's planes: its code is 0 at level 1.
template <bool kFp32>
void clear_padding(uint32_t values, Planes &p)
{
    const uint32_t words = uint32_t(div_up(values, WORD_VALUES));
    for (uint32_t w = 0; w < BLOCK_WORDS; ++w) {
        uint32_t keep = 0;
        for (uint32_t bit = 0; bit < WORD_VALUES; ++bit) {
            const bool exists =
                    w < words && value_at(kFp32 ? DTYPE_FP32 : DTYPE_BF16, words, w, bit) < values;
            keep |= uint32_t(exists) << bit;
        }
        p.code0[w] &= keep;
        p.code1[w] &= keep;
        p.level0[w] &= keep;
        p.level1[w] &= keep;
    }
}

template <bool kFp32>
size_t encode_tiles(const uint8_t *src, size_t length, uint8_t *dst, size_t limit)
{
    constexpr uint8_t dtype = kFp32 ? DTYPE_FP32 : DTYPE_BF16;
    constexpr uint32_t size = value_size(dtype);
    const Layout l = layout_of(dtype, length);
    if (length > MAX_CODED_LENGTH || l.tail >= limit)
        return 0;

    ChunkHeader header = new_header(dtype, SHAPE_22228, length);
    clear_section_padding(l, kFp32, dst);
    snapshot(header.trailing, src + length - l.trailing, l.trailing);

    alignas(64) uint8_t exponents[TILE_VALUES];
    alignas(64) uint8_t positions[BLOCK_VALUES];
    TailWriter tail;
    for (uint64_t t = 0; t < l.tiles; ++t) {
        const uint64_t first = t * TILE_VALUES;
        const uint32_t values = uint32_t(std::min<uint64_t>(l.values - first, TILE_VALUES));
        const uint32_t blocks = uint32_t(div_up(values, BLOCK_VALUES));

        // The vectors' share, then the rest through a buffer that ends on a vector's boundary.
        const uint32_t whole = values / 64 * 64, rest = values % 64;
        split<kFp32>(src + size * first, whole, exponents, dst + l.raw + first,
                     dst + l.raw2 + 2 * first);
        if (rest != 0) {
            uint8_t in[4 * 64] = {}, raw[64], raw2[2 * 64];
            memcpy(in, src + size * (first + whole), size_t(size) * rest);
            split<kFp32>(in, 64, exponents + whole, raw, raw2);
            memcpy(dst + l.raw + first + whole, raw, rest);
            if constexpr (kFp32)
                memcpy(dst + l.raw2 + 2 * (first + whole), raw2, 2 * rest);
        }
        asm volatile("" : : "r"(exponents) : "memory"); // from here on the source is not read again

        TileSymbols symbols = {};
        const bool worthwhile = choose_symbols(exponents, values, symbols);
        const RankTable ranks(symbols);
        GroupCounts counts[TILE_GROUPS] = {};
        uint32_t before[LEVELS] = {}, codes[LEVELS] = {};
        uint8_t *const level1 = dst + l.level1 + level1_bytes(first);
        tail.start();
        for (uint32_t b = 0; worthwhile && b < blocks; ++b) {
            const uint32_t n = std::min(values - b * BLOCK_VALUES, BLOCK_VALUES);
            const uint8_t *by_position = exponents + b * BLOCK_VALUES;
            if (kFp32 || n < BLOCK_VALUES) {
                to_positions<kFp32>(by_position, n, positions);
                by_position = positions;
            }
            Planes planes;
            rank_planes(by_position, ranks, planes);
            if (n < BLOCK_VALUES)
                clear_padding<kFp32>(n, planes);
            alignas(64) uint32_t words[2 * BLOCK_WORDS];
            level1_words(planes, words);
            memcpy(level1 + level1_bytes(BLOCK_VALUES) * b, words, level1_bytes(n));
            tail.append(planes, by_position);
            if (b % GROUP_BLOCKS == GROUP_BLOCKS - 1 || b == blocks - 1) {
                tail.sizes(codes);
                for (uint32_t s = 0; s < LEVELS; ++s) {
                    counts[b / GROUP_BLOCKS].codes[s] = uint16_t(codes[s] - before[s]);
                    before[s] = codes[s];
                }
            }
        }

        const bool coded = worthwhile && coded_tile_words(codes) < raw_tile_words(values);
        const uint32_t words = coded ? coded_tile_words(codes) : raw_tile_words(values);
        uint8_t *const out = dst + l.tail + header.tail_length;
        if (l.tail + header.tail_length + words * TAIL_WORD >= limit)
            return 0;
        if (coded) {
            tail.store(out);
        } else {
            const uint32_t kept = uint32_t(level1_bytes(values)), n = std::min(values, kept);
            memcpy(level1, exponents, n);
            memset(level1 + n, 0, kept - n);
            memcpy(out, exponents + n, values - n);
            memset(out + (values - n), 0, words * TAIL_WORD - (values - n));
            memset(counts, 0, sizeof(counts));
            symbols = {};
        }
        const uint64_t tile =
                tile_header(header.tail_length / TAIL_WORD, words, coded ? TILE_CODED : TILE_RAW);
        memcpy(dst + l.counts + sizeof(GroupCounts) * TILE_GROUPS * t, counts,
               sizeof(GroupCounts) * div_up(blocks, GROUP_BLOCKS));
        memcpy(dst + l.tile_headers + sizeof(tile) * t, &tile, sizeof(tile));
        memcpy(dst + l.symbols + sizeof(symbols) * t, &symbols, sizeof(symbols));
        header.tail_length += words * TAIL_WORD;
    }
    memcpy(dst, &header, sizeof(header));
    return l.tail + header.tail_length;
}

template <bool kFp32>
zip_status_t decode_tiles(const ChunkHeader &header, const uint8_t *src, uint8_t *dst)
{
    constexpr uint8_t dtype = kFp32 ? DTYPE_FP32 : DTYPE_BF16;
    constexpr uint32_t size = value_size(dtype);
    const Layout l = layout_of(dtype, header.original_length);
    memcpy(dst + header.original_length - l.trailing, header.trailing, l.trailing);

    alignas(64) uint8_t exponents[TILE_VALUES];
    alignas(64) uint8_t positions[BLOCK_VALUES];
    TailReader reader;
    for (uint64_t t = 0; t < l.tiles; ++t) {
        const uint64_t first = t * TILE_VALUES;
        const uint32_t values = uint32_t(std::min<uint64_t>(l.values - first, TILE_VALUES));
        const uint32_t blocks = uint32_t(div_up(values, BLOCK_VALUES));
        const auto tile = snapshot_value<uint64_t>(src + l.tile_headers + sizeof(uint64_t) * t);
        if (!valid_tile_header(tile, values, header.tail_length))
            return ZIP_ERR_CORRUPT;
        const uint8_t *const level1 = src + l.level1 + level1_bytes(first);
        const uint8_t *const in = src + l.tail + TAIL_WORD * tile_offset(tile);

        if (tile_mode(tile) == TILE_RAW) {
            const uint32_t kept = std::min(values, uint32_t(level1_bytes(values)));
            memcpy(exponents, level1, kept);
            memcpy(exponents + kept, in, values - kept);
        } else {
            alignas(16) TileSymbols symbols;
            snapshot(&symbols, src + l.symbols + sizeof(symbols) * t, sizeof(symbols));
            GroupCounts counts[TILE_GROUPS] = {};
            snapshot(counts, src + l.counts + sizeof(GroupCounts) * TILE_GROUPS * t,
                     sizeof(GroupCounts) * div_up(blocks, GROUP_BLOCKS));
            const TileClaim claim = check_counts(counts, values, tile_words(tile));
            if (!claim.valid)
                return ZIP_ERR_CORRUPT;
            reader.start(in, claim.codes);
            uint32_t end[LEVELS] = {};
            for (uint32_t b = 0; b < blocks; ++b) {
                const uint32_t n = std::min(values - b * BLOCK_VALUES, BLOCK_VALUES);
                uint32_t words[2 * BLOCK_WORDS];
                if (n < BLOCK_VALUES)
                    memset(words, 0, sizeof(words));
                snapshot(words, level1 + level1_bytes(BLOCK_VALUES) * b, level1_bytes(n));

                Planes planes;
                SparseBits raw_at;
                reader.take(words, planes, raw_at);
                uint8_t *const out = exponents + b * BLOCK_VALUES;
                uint8_t *const by_position = kFp32 || n < BLOCK_VALUES ? positions : out;
                exponents_of(planes, symbols, by_position);
                const uint8_t *const raw = reader.take_raw(raw_at.size());
                raw_at.visit(
                        [&](uint32_t i, uint32_t position) { by_position[position] = raw[i]; });
                if (kFp32 || n < BLOCK_VALUES)
                    from_positions<kFp32>(positions, n, out);

                if (b % GROUP_BLOCKS == GROUP_BLOCKS - 1 || b == blocks - 1) {
                    for (uint32_t s = 0; s < LEVELS; ++s)
                        end[s] += counts[b / GROUP_BLOCKS].codes[s];
                    if (!reader.has_taken(end))
                        return ZIP_ERR_CORRUPT;
                }
            }
        }

        const uint32_t whole = values / 64 * 64, rest = values % 64;
        merge<kFp32>(exponents, src + l.raw + first, src + l.raw2 + 2 * first, whole,
                     dst + size * first);
        if (rest != 0) {
            uint8_t out[4 * 64], raw[64] = {}, raw2[2 * 64] = {};
            memcpy(raw, src + l.raw + first + whole, rest);
            if constexpr (kFp32)
                memcpy(raw2, src + l.raw2 + 2 * (first + whole), 2 * rest);
            memset(exponents + values, 0, 64 - rest);
            merge<kFp32>(exponents + whole, raw, raw2, 64, out);
            memcpy(dst + size * (first + whole), out, size_t(size) * rest);
        }
    }
    return ZIP_OK;
}

size_t EncodeTiles(zip_dtype_t dtype, const uint8_t *src, size_t length, uint8_t *dst, size_t limit)
{
    return dtype == ZIP_DTYPE_FP32 ? encode_tiles<true>(src, length, dst, limit)
                                   : encode_tiles<false>(src, length, dst, limit);
}

zip_status_t DecodeTiles(const ChunkHeader &header, const uint8_t *src, uint8_t *dst)
{
    return header.dtype == DTYPE_FP32 ? decode_tiles<true>(header, src, dst)
                                      : decode_tiles<false>(header, src, dst);
}

#endif // HWY_SCALAR
} // namespace HWY_NAMESPACE
} // namespace zip::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zip::cpu {

HWY_EXPORT(EncodeTiles);
HWY_EXPORT(DecodeTiles);

size_t encode_simd(zip_dtype_t dtype, const uint8_t *src, size_t length, uint8_t *dst, size_t limit)
{
    return HWY_DYNAMIC_DISPATCH(EncodeTiles)(dtype, src, length, dst, limit);
}

zip_status_t decode_simd(const format::ChunkHeader &header, const uint8_t *src, uint8_t *dst)
{
    return HWY_DYNAMIC_DISPATCH(DecodeTiles)(header, src, dst);
}

} // namespace zip::cpu
#endif
