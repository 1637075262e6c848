// SPDX-License-Identifier: BSD-3-Clause
// Decodes one tile. Device code.
//
// The chunk is not trusted and may change while it is read. So each of its fields is loaded once:
// what steers a worker by one lane group, which checks it and hands it on in shared memory (all
// threads must go the same way), the rest by the thread that uses it. No index made from codes
// leaves the copy of the tail in shared memory; a group's codes are held against its counts before
// its raw symbols are looked at.
//
// 1. Start the loads of level 1, signs and mantissas; check header, tile header, counts.
// 2. Copy the tile's part of the tail to shared memory; make a table of pairs: two rank indices ->
// two exponents in place.
// 3. Expand the codes of each level; the planes are then rank indices; transpose them.
// 4. Look exponents up, join, patch raw symbols in, store (or add).
#ifndef ZIP_KERNELS_GPU_DECODE_H
#define ZIP_KERNELS_GPU_DECODE_H

#include <cstdint>

#include "kernels/codec_gpu.h"
#include "kernels/gpu/bits.h"
#include "kernels/gpu/cascade.h"
#include "kernels/gpu/encode.h"
#include "kernels/gpu/split.h"
#include "kernels/gpu/tile.h"

namespace zip::gpu {

// Words behind a tile's part of the tail that a group's codes may reach before its counts are known
// to be wrong: a bit for each of its values, and what get_bits touches.
constexpr uint32_t TAIL_SLOP = 2 * format::BLOCK_WORDS + 4;

template <uint32_t kGroups, uint32_t kTailWords>
struct DecodeShared {
    alignas(16) uint32_t pairs[256]; // by two rank indices: exponents in place in two heads
    alignas(16) uint32_t expand[256];
    alignas(16) uint32_t tail[kTailWords + TAIL_SLOP];
    alignas(16) U32x4 rows[kGroups * 4 * simt::LANES]; // four rows a group
    U32x2 counts[kGroups];
    uint32_t totals[7][kGroups]; // dense: codes of a tail level
    alignas(16) uint32_t table[4];
    Job job, next;
    uint64_t tail_offset;
    uint32_t words, mode, status, bad;
};

// Negated zip_status_t values, as in progress words.
constexpr uint32_t DONE = 0, UNSUPPORTED = uint32_t(-int(ZIP_ERR_UNSUPPORTED)),
                   CORRUPT = uint32_t(-int(ZIP_ERR_CORRUPT));

constexpr uint64_t OPTIONAL_FLAGS = uint64_t(format::FLAGS_OPTIONAL) << 48;

// First 8 bytes of a chunk's header, the optional flags being 0.
ZIP_HOST_DEVICE constexpr uint64_t expected_header(uint32_t dtype, uint32_t shape, bool small)
{
    return uint64_t(format::MAGIC) | uint64_t(format::VERSION) << 16 | uint64_t(dtype) << 24 |
           uint64_t(shape) << 32 | uint64_t(format::HEADER_LENGTH / format::HEADER_UNIT) << 40 |
           uint64_t(small ? format::FLAG_SMALL_TILES : 0) << 48;
}

// Why a chunk is refused. Another coding than the caller was told is a lie, another version is not.
SIMT_DEVICE uint32_t header_status(uint64_t header, bool as_expected)
{
    return !as_expected && (header & 0xffff) == format::MAGIC &&
                           (header >> 16 & 0xff) != format::VERSION
                   ? UNSUPPORTED
                   : CORRUPT;
}

// One thread, once the worker is through with its tile.
SIMT_DEVICE void decode_done(const Job &job, uint32_t status, uint16_t seq)
{
    // Corrupt tiles count from bit 32, unsupported chunks from bit 48 (each tile finds the same
    // header, but in a chunk that changes).
    const uint64_t add = 1 + (status == CORRUPT ? uint64_t(1) << 32 : 0);
    if (status == UNSUPPORTED)
        simt::atomic_add(&job.state()->tail, 1);
    const uint64_t done = simt::atomic_add_acq_rel(&job.state()->done, add) + add;
    if (uint32_t(done) != job.tiles())
        return;
    const uint32_t result = done >> 32 != 0 ? CORRUPT : job.state()->tail != 0 ? UNSUPPORTED : DONE;
    job.state()->tail = 0;
    job.state()->done = 0;
    simt::publish(job.progress(), progress_word(0, result, seq));
}

// The bytes behind a chunk's last whole value.
SIMT_DEVICE void copy_trailing(const Job &job, uint32_t value_size)
{
    const uint32_t trailing = uint32_t(job.length()) & (value_size - 1);
    for (uint32_t i = 0; i < trailing; ++i)
        job.chunk_data()[job.length() - trailing + i] = job.chunk()[format::HEADER_LENGTH - 8 + i];
}

// Copies `bytes` bytes from shared memory (aligned to 16; up to 19 bytes behind them are touched)
// to anywhere, with a lane group.
SIMT_DEVICE void copy_out(uint8_t *to, const U32x4 *from, uint32_t bytes, uint32_t lane)
{
    const auto *const words = reinterpret_cast<const uint32_t *>(from);
    const auto *const all = reinterpret_cast<const uint8_t *>(from);
    const uint32_t off = (16 - (uint32_t(reinterpret_cast<uintptr_t>(to)) & 15)) & 15,
                   head = off < bytes ? off : bytes;
    const uint32_t vectors = (bytes - head) / 16;
    for (uint32_t i = lane; i < vectors; i += simt::LANES) {
        const uint32_t at = head + 16 * i, shift = 8 * (at & 3);
        const uint32_t *const w = words + at / 4;
        const uint32_t w1 = w[1], w2 = w[2], w3 = w[3];
        simt::store_stream(reinterpret_cast<U32x4 *>(to + at),
                           U32x4{simt::funnel_right(w[0], w1, shift),
                                 simt::funnel_right(w1, w2, shift),
                                 simt::funnel_right(w2, w3, shift),
                                 simt::funnel_right(w3, w[shift != 0 ? 4 : 3], shift)});
    }
    if (lane < head)
        to[lane] = all[lane];
    const uint32_t tail = head + 16 * vectors;
    if (lane < bytes - tail)
        to[tail + lane] = all[tail + lane];
}

// Sum of a row of values with what is there.
template <class T>
SIMT_DEVICE U32x4 add_row(U32x4 a, U32x4 b)
{
    if constexpr (T::DTYPE == format::DTYPE_BF16)
        return {simt::add_bf16x2(a.x, b.x), simt::add_bf16x2(a.y, b.y), simt::add_bf16x2(a.z, b.z),
                simt::add_bf16x2(a.w, b.w)};
    else if constexpr (T::DTYPE == format::DTYPE_FP16)
        return {simt::add_fp16x2(a.x, b.x), simt::add_fp16x2(a.y, b.y), simt::add_fp16x2(a.z, b.z),
                simt::add_fp16x2(a.w, b.w)};
    else
        return {simt::add_fp32(a.x, b.x), simt::add_fp32(a.y, b.y), simt::add_fp32(a.z, b.z),
                simt::add_fp32(a.w, b.w)};
}
template <class T>
ZIP_HOST_DEVICE constexpr bool can_add()
{
    return T::DTYPE == format::DTYPE_BF16 || T::DTYPE == format::DTYPE_FP16 ||
           T::DTYPE == format::DTYPE_FP32;
}

// kWhole: the tile is whole and not small.
template <class T, bool kWhole, class Shared, class Barrier>
SIMT_DEVICE void decode_tile(const Launch &launch, uint32_t next_tile, Shared &shared,
                             uint32_t thread, Barrier barrier)
{
    using C = Cascade<T::SHAPE>;
    constexpr uint32_t H = T::GROUP_BLOCKS, L = C::LEVELS, M = T::TYPE.mantissa_bits;
    constexpr bool FP64 = T::DTYPE == format::DTYPE_FP64,
                   HEAD16 = T::TYPE.size - T::TYPE.low_bytes == 2;
    constexpr bool DENSE = T::SHAPE == format::SHAPE_DENSE;
    constexpr uint32_t COUNTED = L + 1;
    const uint32_t lane = thread % simt::LANES, group = thread / simt::LANES;

    const Job &job = shared.job;
    const bool add = can_add<T>() && job.add();
    const TileExtent tile = tile_extent<T>(job.left(), !DENSE && job.small());
    const bool small = !kWhole && tile.small;
    const uint32_t values = kWhole ? T::VALUES : tile.values, blocks = kWhole ? H : tile.blocks,
                   groups = kWhole ? T::GROUPS : tile.groups;
    const uint32_t first_block = group * blocks;
    const uint32_t at_block = first_block * format::BLOCK_VALUES;
    constexpr uint32_t LOW = T::TYPE.low_bytes > 2 ? 2 : T::TYPE.low_bytes;

    BlockExtent extent[H];
    SIMT_UNROLL
    for (uint32_t h = 0; h < H; ++h)
        extent[h] = group_block<kWhole>(tile, group, h);

    const auto *const level1 = job.level1() + T::WIDTH1 * format::BLOCK_WORDS * first_block;

    // 1. What steers the worker, in one load: lanes 0..3 counts, 4 and 5 the table, then tile
    // header and chunk header.
    if (group == 0) {
        const void *field = nullptr;
        if (lane < 4) {
            if (T::CASCADE.counts == 4 ? lane < groups : T::CASCADE.counts != 0 && lane == 0)
                field = job.counts() + 4 * lane;
        } else if (lane < 6) {
            field = job.symbols() + 2 * (lane - 4);
        } else if (lane == 6) {
            field = job.tile_header();
        } else if (lane < 10) {
            field = job.chunk() + 8 * (lane - 7);
        }
        U32x2 x{0, 0};
        if (field != nullptr)
            x = simt::load_hostile(static_cast<const U32x2 *>(field));
        // A lane a field; then any one's doubt is all's.
        const uint64_t field_value = joined(x);
        const uint32_t tile_high = simt::shuffle(x.y, 6);
        const uint32_t words = tile_high >> 16 & 0x3fff, mode = tile_high >> 30;
        const uint64_t tail_length = simt::shuffle(x.x, 9) | uint64_t(simt::shuffle(x.y, 9)) << 32;
        const uint32_t raw_words =
                kWhole ? most_tail_words<T>()
                       : format::raw_tail_words({T::DTYPE, T::SHAPE, small}, values);
        bool ok = true;
        if (lane == 6) {
            const uint64_t offset = format::tile_offset(field_value),
                           tail_words = tail_length / format::TAIL_WORD;
            ok = offset <= tail_words && words <= tail_words - offset &&
                 (mode == format::TILE_CODED ? words <= raw_words : words == raw_words) &&
                 mode <= format::TILE_RAW;
            shared.tail_offset = offset;
            shared.words = words;
            shared.mode = mode;
            shared.bad = 0;
        } else if (lane == 7) {
            ok = (field_value & ~OPTIONAL_FLAGS) == expected_header(T::DTYPE, T::SHAPE, small);
        } else if (lane == 8) {
            ok = field_value == job.length();
        } else if (lane == 9) {
            ok = field_value % format::TAIL_WORD == 0 && field_value <= job.tail_room();
        } else if (lane == 4 || lane == 5) {
            reinterpret_cast<U32x2 *>(shared.table)[lane - 4] = x;
        }
        if constexpr (FP64) {
            const uint32_t low = simt::shuffle(x.x, 4), high = simt::shuffle(x.y, 5);
            ok = ok &&
                 (mode == format::TILE_RAW || (low >> 24 | high >> 24 << 8) <= format::MAX_BASE);
        }
        uint32_t positions = blocks * format::BLOCK_VALUES; // of the lane's group
        if constexpr (!kWhole) {
            const uint32_t former = lane * positions, left = values > former ? values - former : 0;
            positions = left < positions ? (left + 31) / 32 * 32 : positions;
        }
        if constexpr (T::CASCADE.counts == 4) {
            // A lane a group: its counts fall, and all together make the length.
            const uint32_t c0 = x.x & 0xffff, c1 = x.x >> 16, c2 = x.y & 0xffff, c3 = x.y >> 16;
            if (mode == format::TILE_CODED) {
                if (lane < 4)
                    ok = c0 <= positions && c1 <= c0 && c2 <= c1 && c3 <= c2;
                uint32_t bits = C::width(0) * c0 + C::width(1) * c1 + C::width(2) * c2, raws = c3;
                SIMT_UNROLL
                for (uint32_t d = 1; d < 4; d *= 2) {
                    bits += simt::shuffle_xor(bits, d);
                    raws += simt::shuffle_xor(raws, d);
                }
                if (lane == 0)
                    ok = ok && format::coded_tail_words(bits, raws) == words;
                if (lane < 4)
                    shared.counts[lane] = x;
            }
        } else if constexpr (T::CASCADE.counts == 1) {
            const uint32_t lower = simt::shuffle(x.x, 0), upper = simt::shuffle(x.y, 0);
            const uint32_t own = (lane & 2 ? upper : lower) >> (16 * (lane & 1)) & 0xffff;
            const uint32_t count = lane < groups ? own : 0;
            if (mode == format::TILE_CODED) {
                if (lane < 4)
                    ok = ok && count <= positions;
                uint32_t raws = lane < 4 ? count : 0;
                SIMT_UNROLL
                for (uint32_t d = 1; d < 4; d *= 2)
                    raws += simt::shuffle_xor(raws, d);
                if (lane == 0)
                    ok = ok && format::coded_tail_words(0, raws) == words;
                if (lane < 4)
                    shared.counts[lane] = {count, 0};
            }
        }
        const uint32_t doubts = simt::ballot(!ok);
        if (lane == 7)
            shared.status = doubts == 0 ? DONE : header_status(field_value, ok);
    }

    uint32_t code1[H][T::WIDTH1];
    SIMT_UNROLL
    for (uint32_t h = 0; h < H; ++h) {
        SIMT_UNROLL
        for (uint32_t q = 0; q < T::WIDTH1; ++q)
            code1[h][q] =
                    lane < extent[h].words
                            ? simt::load_stream(level1 + (h * T::WIDTH1 * format::BLOCK_WORDS +
                                                          q * extent[h].words + lane))
                            : 0;
    }
    // Signs and mantissas: 8 bytes a stripe (two vectors of 4 for fp32), or planes.
    constexpr uint32_t KEPT = T::MANTISSA_BYTES ? 8 : T::K < 4 ? 4 : T::K;
    uint32_t mantissa[H][KEPT];
    SIMT_UNROLL
    for (uint32_t h = 0; h < H; ++h) {
        if constexpr (T::MANTISSA_BYTES) {
            const uint8_t *const bytes = job.mantissa() + at_block + h * format::BLOCK_VALUES;
            constexpr uint32_t N = T::ROW_VALUES; // bytes a vector: 8 or 4
            SIMT_UNROLL
            for (uint32_t row = 0; row < T::ROWS; ++row) {
                U32x2 x{0, 0};
                // The section is padded to 16 bytes, so a vector that begins in it may be read
                // whole.
                if constexpr (kWhole) {
                    if constexpr (N == 8)
                        x = simt::load_stream(reinterpret_cast<const U32x2 *>(bytes) +
                                              row * simt::LANES + lane);
                    else
                        x.x = simt::load_stream(reinterpret_cast<const uint32_t *>(bytes) +
                                                row * simt::LANES + lane);
                } else if (vector_bytes<T>(extent[h], row, lane) != 0) {
                    if constexpr (N == 8)
                        x = simt::load_stream(reinterpret_cast<const U32x2 *>(bytes) +
                                              row * extent[h].words + lane);
                    else
                        x.x = simt::load_stream(reinterpret_cast<const uint32_t *>(bytes) +
                                                row * extent[h].words + lane);
                }
                if constexpr (N == 8) {
                    mantissa[h][2 * row] = x.x;
                    mantissa[h][2 * row + 1] = x.y;
                } else {
                    mantissa[h][row] = x.x;
                }
            }
        } else {
            const auto *const planes = reinterpret_cast<const uint32_t *>(job.mantissa()) +
                                       T::K * format::BLOCK_WORDS * (first_block + h);
            SIMT_UNROLL
            for (uint32_t q = 0; q < KEPT; ++q)
                mantissa[h][q] = q < T::K && lane < extent[h].words
                                         ? simt::load_stream(planes + q * extent[h].words + lane)
                                         : 0;
        }
    }
    leave_next_job(launch, next_tile, shared.next, group); // while the loads are under way
    // What is needed last comes to L2 meanwhile, at no cost in registers.
    if (kWhole && add && lane % 8 == 0) {
        SIMT_UNROLL
        for (uint32_t row = 0; row < H * T::ROWS; ++row)
            simt::prefetch(job.data() + at_block * T::SIZE + row * 512 + lane * 16);
    }
    if (kWhole && (T::DTYPE == format::DTYPE_FP32 || T::DTYPE == format::DTYPE_FP16) &&
        lane % 8 == 0) {
        SIMT_UNROLL
        for (uint32_t row = 0; row < H * T::ROWS; ++row)
            simt::prefetch(job.low() + at_block * T::TYPE.low_bytes + row * 256 + lane * 8);
    }
    barrier.sync();

    uint8_t *const target = job.data() + at_block * T::SIZE;
    const bool direct = kWhole && (reinterpret_cast<uintptr_t>(target) & 15) == 0;
    const uint32_t status = shared.status;
    constexpr uint32_t MANTISSA = T::MANTISSA_BYTES ? T::VALUES : T::VALUES / 8 * T::K;
    prefetch_part(launch, next_tile, shared.next, JOB_MANTISSA, MANTISSA, thread, T::THREADS);
    prefetch_part(launch, next_tile, shared.next, JOB_LEVEL1, T::VALUES / 8 * T::WIDTH1, thread,
                  T::THREADS);
    if (group == 0 && next_tile < launch.tiles && lane >= JOB_COUNTS && lane <= JOB_SYMBOLS)
        simt::prefetch(reinterpret_cast<const void *>(shared.next.word[lane]));
    if (status == DONE) {
        const uint32_t words = shared.words;
        const bool raw = shared.mode == format::TILE_RAW;
        const uint32_t *const tail = job.tail() + shared.tail_offset;
        const uint32_t base = FP64 ? shared.table[0] >> 24 | shared.table[3] >> 24 << 8 : 0;
        uint32_t r[H][4];
        uint32_t raw_mask[H] = {};
        uint32_t raw_at[H] = {}; // byte in the copy of the tail
        if (!raw) {
            // 2.
            for (uint32_t i = thread; i < words; i += T::THREADS)
                simt::copy_async_4(&shared.tail[i], tail + i);
            SIMT_UNROLL
            for (uint32_t u = 0; u < 256 / T::THREADS; ++u) {
                const uint32_t pair = thread + u * T::THREADS;
                auto exponent_at = [&](uint32_t index) {
                    const uint32_t half = index & 8;
                    const uint32_t symbol =
                            simt::byte_perm(half ? shared.table[2] : shared.table[0],
                                            half ? shared.table[3] : shared.table[1], index & 7) &
                            255;
                    if (index == format::RANK_RAW)
                        return uint32_t(0);
                    return FP64 ? format::fp64_exponent(symbol, base) : symbol & ((1u << T::E) - 1);
                };
                shared.pairs[pair] = exponent_at(pair & 15) << M |
                                     exponent_at(pair >> 4) << (M + (HEAD16 ? 16 : 8));
            }
            simt::copy_async_wait();
            barrier.sync();

            // 3.
            uint32_t m[H][COUNTED];
            SIMT_UNROLL
            for (uint32_t h = 0; h < H; ++h)
                C::start(code1[h], r[h], m[h]);
            uint32_t stream = 0;
            bool wrong = false;
            // Number of the group's codes before this lane at a level, of the tile's before the
            // group, and of all in the tile.
            uint32_t before[COUNTED], total[COUNTED];
            if constexpr (!DENSE) {
                SIMT_UNROLL
                for (uint32_t t = 0; t < COUNTED; ++t)
                    before[t] = total[t] = 0;
                SIMT_UNROLL
                for (uint32_t g = 0; g < T::GROUPS; ++g) {
                    const U32x2 c = g < groups ? shared.counts[g] : U32x2{0, 0};
                    SIMT_UNROLL
                    for (uint32_t t = 0; t < COUNTED; ++t) {
                        const uint32_t count =
                                L == 0 ? c.x : (t < 2 ? c.x : c.y) >> (16 * (t & 1)) & 0xffff;
                        before[t] += g < group ? count : 0;
                        total[t] += count;
                    }
                }
            }
            SIMT_UNROLL
            for (uint32_t t = 0; t < COUNTED; ++t) {
                // Block 0 in the lower half, block 1 in the upper.
                const uint32_t own = simt::popcount(m[0][t]) | simt::popcount(m[1][t]) << 16;
                const bool some = DENSE || t != L || simt::any(own != 0);
                const uint32_t sum = some ? prefix_sum(own, lane) : 0,
                               last = some ? simt::shuffle(sum, simt::LANES - 1) : 0;
                const uint32_t of_group = (last & 0xffff) + (last >> 16);
                if constexpr (DENSE) {
                    if (lane == simt::LANES - 1)
                        shared.totals[t][group] = of_group;
                    barrier.sync();
                    before[t] = total[t] = 0;
                    SIMT_UNROLL
                    for (uint32_t g = 0; g < T::GROUPS; ++g) {
                        const uint32_t n = shared.totals[t][g];
                        before[t] += g < group ? n : 0;
                        total[t] += n;
                    }
                    // The same for all threads.
                    const uint32_t bits = stream + (t < L ? C::width(t) * total[t] : 0);
                    wrong = wrong || (t < L ? (bits + 31) / 32 > words
                                            : format::coded_tail_words(bits, total[t]) != words);
                    if (wrong)
                        break;
                } else if (lane == simt::LANES - 1) {
                    const U32x2 c = group < groups ? shared.counts[group] : U32x2{0, 0};
                    const uint32_t claimed =
                            L == 0 ? c.x : (t < 2 ? c.x : c.y) >> (16 * (t & 1)) & 0xffff;
                    wrong = wrong || of_group != claimed;
                }
                const uint32_t within = sum - own + (last << 16);
                const uint32_t at[H] = {before[t] + (within & 0xffff), before[t] + (within >> 16)};
                if (t == L) {
                    SIMT_UNROLL
                    for (uint32_t h = 0; h < H; ++h)
                        raw_at[h] = (stream + 7) / 8 + at[h];
                    break;
                }
                SIMT_UNROLL
                for (uint32_t h = 0; h < H; ++h) {
                    if (t != 0 && !simt::any(m[h][t] != 0)) {
                        uint32_t none[max_tail_width<T::SHAPE>()] = {};
                        C::next(t, none, r[h], m[h]);
                        continue;
                    }
                    const Moves moves = moves_of(shared.expand, m[h][t]);
                    uint32_t x[max_tail_width<T::SHAPE>()] = {};
                    SIMT_UNROLL
                    for (uint32_t q = 0; q < C::width(t); ++q)
                        x[q] = expand_bits(moves,
                                           get_bits(shared.tail, stream + q * total[t] + at[h]));
                    C::next(t, x, r[h], m[h]);
                }
                stream += C::width(t) * total[t];
            }
            if (DENSE ? wrong : simt::any(wrong)) {
                shared.bad = 1;
            } else {
                SIMT_UNROLL
                for (uint32_t h = 0; h < H; ++h)
                    raw_mask[h] = m[h][L];
            }
            SIMT_UNROLL
            for (uint32_t h = 0; h < H; ++h)
                transpose_nibbles(r[h]);
        }

        // 4.
        U32x4 *const rows = shared.rows + group * 4 * simt::LANES;
        SIMT_UNROLL
        for (uint32_t h = 0; h < H; ++h) {
            if (h >= blocks)
                break;
            if constexpr (!T::MANTISSA_BYTES) { // planes to nibbles by stripe
                uint32_t n[4] = {mantissa[h][0], mantissa[h][1], mantissa[h][2], mantissa[h][3]};
                transpose_nibbles(n);
                SIMT_UNROLL
                for (uint32_t i = 0; i < 4; ++i)
                    mantissa[h][i] = n[i];
            }
            uint32_t exponent[FP64 ? 11 : 8]; // of a raw tile: planes (fp64), or two words a stripe
            if (raw) {
                const RawTarget from{reinterpret_cast<uint32_t *>(job.counts()), job.symbols(),
                                     const_cast<uint32_t *>(tail), T::CASCADE.counts * groups / 2};
                SIMT_UNROLL
                for (uint32_t q = 0; q < (FP64 ? 11 : 8); ++q) {
                    if (q < T::WIDTH1)
                        exponent[q] = code1[h][q];
                    else if (q < T::E && lane < extent[h].words)
                        exponent[q] = simt::load_hostile(
                                from.at((q - T::WIDTH1) * ((values + 31) / 32) +
                                        (first_block + h) * format::BLOCK_WORDS + lane));
                    else
                        exponent[q] = 0;
                }
                if constexpr (!FP64) {
                    uint32_t lower[4] = {exponent[0], exponent[1], exponent[2], exponent[3]},
                             upper[4] = {exponent[4], exponent[5], exponent[6], exponent[7]};
                    transpose_nibbles(lower);
                    transpose_nibbles(upper);
                    SIMT_UNROLL
                    for (uint32_t i = 0; i < 4; ++i) {
                        uint32_t a, b, c, d;
                        unpack_nibbles(lower[i], a, b);
                        unpack_nibbles(upper[i], c, d);
                        exponent[2 * i] = a | c << 4;
                        exponent[2 * i + 1] = b | d << 4;
                    }
                }
            }
            // Heads by stripe: four words of two (16 bits), or two words of four (8 bits).
            constexpr uint32_t HEAD_WORDS = HEAD16 ? 4 : 2;
            uint32_t head[4][HEAD_WORDS];
            SIMT_UNROLL
            for (uint32_t i = 0; i < 4; ++i) {
                uint32_t e[HEAD_WORDS];
                if (!raw) {
                    const uint32_t x = r[h][i];
                    const uint32_t p0 = shared.pairs[simt::byte_perm(x, 0, 0x4440)],
                                   p1 = shared.pairs[simt::byte_perm(x, 0, 0x4441)],
                                   p2 = shared.pairs[simt::byte_perm(x, 0, 0x4442)],
                                   p3 = shared.pairs[x >> 24];
                    if constexpr (HEAD16) {
                        e[0] = p0;
                        e[1] = p1;
                        e[2] = p2;
                        e[3] = p3;
                    } else {
                        e[0] = p0 | p1 << 16;
                        e[1] = p2 | p3 << 16;
                    }
                } else if constexpr (FP64) {
                    SIMT_UNROLL
                    for (uint32_t j = 0; j < 4; ++j) {
                        e[j] = 0;
                        SIMT_UNROLL
                        for (uint32_t q = 0; q < 11; ++q)
                            e[j] |= (exponent[q] >> (8 * j + i) & 1) << (M + q) |
                                    (exponent[q] >> (8 * j + 4 + i) & 1) << (M + 16 + q);
                    }
                } else if constexpr (HEAD16) {
                    const uint32_t a = exponent[2 * i], b = exponent[2 * i + 1];
                    e[0] = simt::byte_perm(a, 0, 0x4140) << M;
                    e[1] = simt::byte_perm(a, 0, 0x4342) << M;
                    e[2] = simt::byte_perm(b, 0, 0x4140) << M;
                    e[3] = simt::byte_perm(b, 0, 0x4342) << M;
                } else {
                    e[0] = exponent[2 * i] << M;
                    e[1] = exponent[2 * i + 1] << M;
                }
                if constexpr (T::MANTISSA_BYTES) {
                    const uint32_t a = mantissa[h][2 * i], b = mantissa[h][2 * i + 1];
                    constexpr uint32_t MASK = 0x807f807f;
                    head[i][0] = (simt::byte_perm(a, 0, 0x1100) & MASK) | e[0];
                    head[i][1] = (simt::byte_perm(a, 0, 0x3322) & MASK) | e[1];
                    head[i][2] = (simt::byte_perm(b, 0, 0x1100) & MASK) | e[2];
                    head[i][3] = (simt::byte_perm(b, 0, 0x3322) & MASK) | e[3];
                } else if constexpr (FP64) {
                    SIMT_UNROLL
                    for (uint32_t j = 0; j < 4; ++j) {
                        const uint32_t n = mantissa[h][i] >> (8 * j),
                                       s = mantissa[h][4] >> (8 * j + i);
                        head[i][j] = (n & 15) | (n >> 4 & 15) << 16 | (s & 1) << 15 |
                                     (s >> 4 & 1) << 31 | e[j];
                    }
                } else {
                    constexpr uint32_t SIGN = 0x01010101u << M, REST = SIGN - 0x01010101u;
                    uint32_t a, b;
                    unpack_nibbles(mantissa[h][i], a, b);
                    head[i][0] = (a & SIGN) << (7 - M) | (a & REST) | e[0];
                    head[i][1] = (b & SIGN) << (7 - M) | (b & REST) | e[1];
                }
            }
            if (simt::any(raw_mask[h] != 0)) {
                // Through a lane's own piece of shared memory: the only accesses at an index that
                // is not known.
                SIMT_UNROLL
                for (uint32_t i = 0; i < 4; ++i) {
                    if constexpr (HEAD16)
                        rows[i * simt::LANES + lane] = {head[i][0], head[i][1], head[i][2],
                                                        head[i][3]};
                    else
                        reinterpret_cast<U32x2 *>(rows)[i * simt::LANES + lane] = {head[i][0],
                                                                                   head[i][1]};
                }
                uint32_t bits = raw_mask[h];
                while (bits != 0) {
                    const uint32_t bit = simt::find_first(bits), stripe = bit & 3, k = bit >> 2;
                    bits &= bits - 1;
                    const uint32_t symbol =
                            reinterpret_cast<const uint8_t *>(shared.tail)[raw_at[h]++];
                    if constexpr (HEAD16) {
                        const uint32_t e = FP64 ? format::fp64_exponent(symbol, base) : symbol;
                        reinterpret_cast<uint16_t *>(&rows[stripe * simt::LANES + lane])[k] |=
                                uint16_t(e << M);
                    } else {
                        reinterpret_cast<uint8_t *>(
                                &reinterpret_cast<U32x2 *>(rows)[stripe * simt::LANES + lane])[k] |=
                                uint8_t((symbol & ((1u << T::E) - 1)) << M);
                    }
                }
                SIMT_UNROLL
                for (uint32_t i = 0; i < 4; ++i) {
                    if constexpr (HEAD16) {
                        const U32x4 q = rows[i * simt::LANES + lane];
                        head[i][0] = q.x;
                        head[i][1] = q.y;
                        head[i][2] = q.z;
                        head[i][3] = q.w;
                    } else {
                        const U32x2 q =
                                reinterpret_cast<const U32x2 *>(rows)[i * simt::LANES + lane];
                        head[i][0] = q.x;
                        head[i][1] = q.y;
                    }
                }
                simt::sync_lanes();
            }

            // Rows of the original, four at a time.
            constexpr uint32_t BATCH = T::ROWS < 4 ? T::ROWS : 4;
            uint8_t *const block = target + h * T::BLOCK_BYTES;
            const uint32_t row_bytes = extent[h].words * 16;
            const uint8_t *const low = job.low() + (at_block + h * format::BLOCK_VALUES) * LOW;
            const uint8_t *const low2 = job.low2() + (at_block + h * format::BLOCK_VALUES) * 4;
            SIMT_UNROLL
            for (uint32_t batch = 0; batch < T::ROWS / BATCH; ++batch) {
                U32x4 v[BATCH];
                SIMT_UNROLL
                for (uint32_t b = 0; b < BATCH; ++b) {
                    const uint32_t row = batch * BATCH + b, vector = row * extent[h].words + lane;
                    const bool exists = kWhole || vector_bytes<T>(extent[h], row, lane) != 0;
                    U32x2 a{0, 0}, c{0, 0};
                    if constexpr (T::DTYPE == format::DTYPE_FP32 ||
                                  T::DTYPE == format::DTYPE_FP16) {
                        if (exists)
                            a = simt::load_stream(reinterpret_cast<const U32x2 *>(low) + vector);
                    } else if constexpr (FP64) {
                        if (exists) {
                            a.x = simt::load_stream(reinterpret_cast<const uint32_t *>(low) +
                                                    vector);
                            c = simt::load_stream(reinterpret_cast<const U32x2 *>(low2) + vector);
                        }
                    }
                    if constexpr (T::DTYPE == format::DTYPE_BF16) {
                        v[b] = {head[row][0], head[row][1], head[row][2], head[row][3]};
                    } else if constexpr (T::DTYPE == format::DTYPE_FP32) {
                        const uint32_t x = head[row / 2][2 * (row % 2)],
                                       y = head[row / 2][2 * (row % 2) + 1];
                        v[b] = {simt::byte_perm(a.x, x, 0x5410), simt::byte_perm(a.x, x, 0x7632),
                                simt::byte_perm(a.y, y, 0x5410), simt::byte_perm(a.y, y, 0x7632)};
                    } else if constexpr (FP64) {
                        const uint32_t x = head[row / 4][row % 4];
                        v[b] = {c.x, simt::byte_perm(a.x, x, 0x5410), c.y,
                                simt::byte_perm(a.x, x, 0x7632)};
                    } else if constexpr (T::DTYPE == format::DTYPE_FP16) {
                        const uint32_t x = head[row][0], y = head[row][1];
                        v[b] = {simt::byte_perm(a.x, x, 0x5140), simt::byte_perm(a.x, x, 0x7362),
                                simt::byte_perm(a.y, y, 0x5140), simt::byte_perm(a.y, y, 0x7362)};
                    } else {
                        v[b] = {head[2 * row][0], head[2 * row][1], head[2 * row + 1][0],
                                head[2 * row + 1][1]};
                    }
                }
                if constexpr (can_add<T>()) {
                    if (add) {
                        SIMT_UNROLL
                        for (uint32_t b = 0; b < BATCH; ++b)
                            v[b] = add_row<T>(v[b],
                                              direct ? load_row<T>(block, Reach::ALIGNED, extent[h],
                                                                   batch * BATCH + b, lane)
                                                     : load_row<T>(block, Reach::PARTS, extent[h],
                                                                   batch * BATCH + b, lane));
                    }
                }
                if (direct) {
                    SIMT_UNROLL
                    for (uint32_t b = 0; b < BATCH; ++b)
                        simt::store_stream(reinterpret_cast<U32x4 *>(block) +
                                                   (batch * BATCH + b) * simt::LANES + lane,
                                           v[b]);
                } else {
                    if (lane < extent[h].words) {
                        SIMT_UNROLL
                        for (uint32_t b = 0; b < BATCH; ++b)
                            rows[b * extent[h].words + lane] = v[b];
                    }
                    simt::sync_lanes();
                    const uint32_t start = batch * BATCH * row_bytes,
                                   bytes = extent[h].values * T::SIZE;
                    if (start < bytes) {
                        const uint32_t here = bytes - start < BATCH * row_bytes ? bytes - start
                                                                                : BATCH * row_bytes;
                        copy_out(block + start, rows, here, lane);
                    }
                    simt::sync_lanes();
                }
            }
        }
    }
    if (job.tile() == 0 && thread == 0 && status == DONE) {
        copy_trailing(job, T::SIZE);
    }
    if (job.progress() == nullptr)
        return;
    barrier.sync();
    if (thread == 0)
        decode_done(job, status == DONE && shared.bad != 0 ? CORRUPT : status, launch.seq);
}

// A chunk without a whole value is its header.
template <class T, class Shared>
SIMT_DEVICE void decode_empty(const Launch &launch, uint32_t next_tile, Shared &shared,
                              uint32_t thread)
{
    const Job &job = shared.job;
    leave_next_job(launch, next_tile, shared.next, thread / simt::LANES);
    if (thread != 0)
        return;
    const auto *const header = reinterpret_cast<const uint64_t *>(job.chunk());
    const uint64_t word = simt::load_hostile(header), length = simt::load_hostile(header + 1),
                   tail_length = simt::load_hostile(header + 2);
    const bool as_expected =
            (word & ~OPTIONAL_FLAGS) == expected_header(T::DTYPE, T::SHAPE, job.small());
    const bool ok = as_expected && length == job.length() && tail_length % format::TAIL_WORD == 0 &&
                    tail_length <= job.tail_room();
    if (ok)
        copy_trailing(job, T::SIZE);
    if (job.progress() != nullptr)
        decode_done(job, ok ? DONE : header_status(word, as_expected), launch.seq);
}

} // namespace zip::gpu
#endif
