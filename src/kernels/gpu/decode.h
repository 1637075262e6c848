// SPDX-License-Identifier: BSD-3-Clause
// Decodes one tile. Device code.
//
// The chunk is not trusted and may change while it is read. So each lane group loads what steers it
// once, checks it, and goes by its own copy; it comes to every barrier whatever it found, for
// another group may have found something else. (In shape dense, whose levels have barriers, one
// group finds it out for all.) No index made from codes leaves the copy of the tail in shared
// memory; a group's codes are held against its counts before its raw symbols are looked at.
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
#include "kernels/gpu/columns.h"
#include "kernels/gpu/encode.h"
#include "kernels/gpu/split.h"
#include "kernels/gpu/tile.h"

namespace zip::gpu {

// Words around a tile's part of the tail: up to 3 before it, and behind it what a group's codes may
// reach before its counts are known to be wrong, a bit for each of its values, and what get_bits
// touches.
constexpr uint32_t TAIL_SLOP = 2 * format::BLOCK_WORDS + 8;

// What steers a lane group, a lane a field of 8 bytes: counts of groups 0..3, the table (2), the
// tile's header, then the first three words of the chunk's.
constexpr uint32_t FIELD_TABLE = 4, FIELD_TILE = 6, FIELD_HEADER = 7, FIELD_LENGTH = 8,
                   FIELD_TAIL = 9, FIELDS = 10;

template <uint32_t kGroups, uint32_t kTailWords>
struct DecodeShared {
    alignas(16) uint32_t pairs[256]; // by two rank indices, spread: exponents in place in two heads
    alignas(16) uint32_t expand[256];
    alignas(16) uint32_t tail[kTailWords + TAIL_SLOP];
    alignas(16) U32x4 rows[kGroups * 4 * simt::LANES]; // four rows a group
    alignas(16) U32x2 fields[kGroups][FIELDS];         // a group's own copy
    uint32_t totals[7][kGroups];                       // dense: codes of a tail level
    Job job, next;
    uint32_t status; // dense: what group 0 found
    uint32_t bad;    // a group found a status other than DONE
    uint32_t last_to_begin;
};

// Negated zip_status_t values, as in progress words.
constexpr uint32_t DONE = 0, UNSUPPORTED = uint32_t(-int(ZIP_ERR_UNSUPPORTED)),
                   CORRUPT = uint32_t(-int(ZIP_ERR_CORRUPT));

constexpr uint64_t OPTIONAL_FLAGS = uint64_t(format::FLAGS_OPTIONAL) << 48;

// Why a chunk is refused. Another coding than the caller was told is a lie, another version is not.
SIMT_DEVICE uint32_t header_status(uint64_t header, bool as_expected)
{
    return !as_expected && (header & 0xffff) == format::MAGIC &&
                           (header >> 16 & 0xff) != format::VERSION
                   ? UNSUPPORTED
                   : CORRUPT;
}

// One thread, once the worker is through with its tile: the tile that began last says how the chunk
// went.
template <class AnyJob>
SIMT_DEVICE void decode_done(const AnyJob &job, bool last_to_begin, uint32_t status, uint16_t seq)
{
    ChunkState *const state = job.state();
    // Each tile finds the same header, but in a chunk that changes.
    if (status == UNSUPPORTED)
        simt::atomic_add(&state->begun, 1);
    const uint64_t done = end_tile(state, job.tiles(), last_to_begin,
                                   1 + (status == CORRUPT ? uint64_t(1) << 32 : 0));
    if (done == 0)
        return;
    const bool unsupported = (simt::load_acquire(&state->begun) & BEGUN_MASK) != 0;
    const uint32_t result = done >> 32 != 0 ? CORRUPT : unsupported ? UNSUPPORTED : DONE;
    state->begun = 0;
    state->done = 0;
    simt::publish(job.progress(), progress_word(0, result, seq));
}

// The bytes behind a chunk's last whole value.
template <class AnyJob>
SIMT_DEVICE void copy_trailing(const AnyJob &job, uint32_t value_size)
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

// A lane's field; 0 for counts that there are none of.
template <class T, class AnyJob>
SIMT_DEVICE U32x2 load_field(const AnyJob &job, uint32_t groups, uint32_t lane)
{
    const uint32_t counts = T::CASCADE.counts == 4 ? groups : T::CASCADE.counts;
    const uint64_t base = lane < FIELD_TABLE   ? job.of(JOB_COUNTS)
                          : lane < FIELD_TILE  ? job.of(JOB_SYMBOLS) - 8 * FIELD_TABLE
                          : lane == FIELD_TILE ? job.of(JOB_TILE_HEADER) - 8 * FIELD_TILE
                                               : job.of(JOB_CHUNK) - 8 * FIELD_HEADER;
    U32x2 field{0, 0};
    if (lane < counts || (lane >= FIELD_TABLE && lane < FIELDS))
        field = simt::load_hostile(reinterpret_cast<const U32x2 *>(base + 8 * lane));
    if (T::CASCADE.counts == 1 && lane == 0) { // 2 bytes a group: what is behind is no count
        field.x &= groups >= 2 ? ~uint32_t(0) : 0xffff;
        field.y &= groups >= 4 ? ~uint32_t(0) : groups == 3 ? 0xffff : 0;
    }
    return field;
}

// Number of the tile's codes at each level, of those before the group's, and of the group's; raw
// symbols are the last level. Fields that say too much make numbers that mean nothing.
template <class T>
class Counts {
public:
    SIMT_DEVICE Counts(const U32x2 (&fields)[FIELDS], uint32_t own)
    {
        if constexpr (T::CASCADE.counts == 4) {
            SIMT_UNROLL
            for (uint32_t g = 0; g < T::GROUPS; ++g) {
                const U32x2 x = fields[g];
                all_.x += x.x;
                all_.y += x.y;
                before_.x += g < own ? x.x : 0;
                before_.y += g < own ? x.y : 0;
            }
            own_ = fields[own];
        } else if constexpr (T::CASCADE.counts == 1) {
            const U32x2 x = fields[0];
            SIMT_UNROLL
            for (uint32_t g = 0; g < T::GROUPS; ++g) {
                const uint32_t count = of(x, g);
                all_.x += count;
                before_.x += g < own ? count : 0;
                own_.x = g == own ? count : own_.x;
            }
        }
    }
    SIMT_DEVICE uint32_t total(uint32_t t) const { return of(all_, t); }
    SIMT_DEVICE uint32_t before(uint32_t t) const { return of(before_, t); }
    SIMT_DEVICE uint32_t group(uint32_t t) const { return of(own_, t); }

private:
    U32x2 all_{0, 0}, before_{0, 0}, own_{0, 0}; // four numbers of 16 bits each

    SIMT_DEVICE static uint32_t of(U32x2 x, uint32_t t)
    {
        const uint32_t pair = t < 2 ? x.x : x.y;
        return t & 1 ? pair >> 16 : pair & 0xffff;
    }
};

// fp64: where the tile's window of exponents begins.
SIMT_DEVICE uint32_t table_base(const U32x2 (&fields)[FIELDS])
{
    return fields[FIELD_TABLE].x >> 24 | fields[FIELD_TABLE + 1].y >> 24 << 8;
}

// Whether a tile may be decoded, by a lane group that has its fields in shared memory, `x` being
// the lane's own. `values`, `blocks`: of the tile, of a lane group.
template <class T, bool kWhole, class AnyJob>
SIMT_DEVICE uint32_t check_fields(U32x2 x, const U32x2 (&fields)[FIELDS], const Counts<T> &counts,
                                  const AnyJob &job, bool small, uint32_t values, uint32_t blocks,
                                  uint32_t lane)
{
    using C = Cascade<T::SHAPE>;
    const uint64_t tile = joined(fields[FIELD_TILE]), header = joined(fields[FIELD_HEADER]),
                   tail_length = joined(fields[FIELD_TAIL]),
                   tail_words = tail_length / format::TAIL_WORD, offset = format::tile_offset(tile);
    const uint32_t words = format::tile_words(tile), mode = format::tile_mode(tile);
    const uint32_t raw_words = kWhole ? most_tail_words<T>()
                                      : format::raw_tail_words({T::DTYPE, T::SHAPE, small}, values);
    // No branches but for the mode: what is not so costs more than what is.
    const bool as_expected = (header & ~OPTIONAL_FLAGS) == header_word(T::DTYPE, T::SHAPE, small);
    bool ok = as_expected & (joined(fields[FIELD_LENGTH]) == job.length()) &
              (tail_length % format::TAIL_WORD == 0) & (tail_length <= job.tail_room()) &
              (offset <= tail_words) & (words <= tail_words - offset) &
              (mode == format::TILE_CODED ? words <= raw_words : words == raw_words) &
              (mode <= format::TILE_RAW);
    if (mode == format::TILE_CODED) {
        if constexpr (T::DTYPE == format::DTYPE_FP64)
            ok = ok & (table_base(fields) <= format::MAX_BASE);
        // A lane a group: its counts fall, and all together make the length.
        uint32_t positions = blocks * format::BLOCK_VALUES; // of the lane's group
        if constexpr (!kWhole) {
            const uint32_t former = lane * positions, left = values > former ? values - former : 0;
            positions = left < positions ? (left + 31) / 32 * 32 : positions;
        }
        if constexpr (T::CASCADE.counts == 4) {
            const uint32_t c0 = x.x & 0xffff, c1 = x.x >> 16, c2 = x.y & 0xffff, c3 = x.y >> 16;
            ok = ok & ((lane >= FIELD_TABLE) |
                       ((c0 <= positions) & (c1 <= c0) & (c2 <= c1) & (c3 <= c2)));
        } else if constexpr (T::CASCADE.counts == 1) {
            const U32x2 all = fields[0];
            const uint32_t count = (lane & 2 ? all.y : all.x) >> (16 * (lane & 1)) & 0xffff;
            ok = ok & ((lane >= FIELD_TABLE) | (count <= positions));
        }
        if constexpr (T::CASCADE.counts != 0) {
            uint32_t bits = 0;
            SIMT_UNROLL
            for (uint32_t t = 0; t < C::LEVELS; ++t)
                bits += C::width(t) * counts.total(t);
            ok = ok & (format::coded_tail_words(bits, counts.total(C::LEVELS)) == words);
        }
    }
    return !simt::any(!ok) ? DONE : header_status(header, as_expected);
}

// kWhole: the tile is whole and not small. kAhead: the worker has another tile next, maybe; without
// it the original is aligned to 16 bytes. `start()` is called once the first loads are under way.
template <class T, bool kWhole, bool kAhead, class Shared, class AnyJob, class Barrier, class Start>
SIMT_DEVICE void decode_tile(const Launch &launch, const AnyJob &job, uint32_t next_tile,
                             Shared &shared, uint32_t thread, Barrier barrier, Start start)
{
    using C = Cascade<T::SHAPE>;
    constexpr uint32_t H = T::GROUP_BLOCKS, L = C::LEVELS, M = T::TYPE.mantissa_bits;
    constexpr bool FP64 = T::DTYPE == format::DTYPE_FP64,
                   HEAD16 = T::TYPE.size - T::TYPE.low_bytes == 2;
    constexpr bool DENSE = T::SHAPE == format::SHAPE_DENSE;
    constexpr uint32_t COUNTED = L + 1;
    const uint32_t lane = thread % simt::LANES, group = thread / simt::LANES;

    const bool add = can_add<T>() && job.add();
    const TileExtent tile =
            kWhole ? whole_tile<T>() : tile_extent<T>(job.left(), !DENSE && job.small());
    const bool small = tile.small;
    const uint32_t values = tile.values, blocks = tile.blocks, groups = tile.groups;
    const uint32_t first_block = group * blocks;
    const uint32_t at_block = first_block * format::BLOCK_VALUES;

    BlockExtent extent[H];
    SIMT_UNROLL
    for (uint32_t h = 0; h < H; ++h)
        extent[h] = group_block<kWhole>(tile, group, h);

    const auto *const level1 = job.level1() + T::WIDTH1 * format::BLOCK_WORDS * first_block;

    // 1.
    U32x2 field{0, 0};
    if (!DENSE || group == 0)
        field = load_field<T>(job, groups, lane);

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
    uint64_t begun_before = 0;
    if (thread == 0 && job.progress() != nullptr)
        begun_before = begin_tile(job.state(), 0);
    start();
    if (thread == 0)
        shared.bad = 0;
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

    const U32x2(&fields)[FIELDS] = shared.fields[DENSE ? 0 : group];
    if (!DENSE || group == 0) {
        if (lane < FIELDS)
            shared.fields[group][lane] = field;
        simt::sync_lanes();
    }
    const Counts<T> counts(fields, group); // dense: it has none
    uint32_t status = DONE;
    if (!DENSE || group == 0)
        status = check_fields<T, kWhole>(field, fields, counts, job, small, values, blocks, lane);
    if constexpr (DENSE) {
        if (thread == 0)
            shared.status = status;
        barrier.sync();
        status = shared.status;
    }

    const uint64_t tile_field = joined(fields[FIELD_TILE]);
    const uint32_t words = format::tile_words(tile_field);
    const bool raw = format::tile_mode(tile_field) == format::TILE_RAW;
    const uint32_t *const tail = job.tail() + format::tile_offset(tile_field);
    const uint32_t base = FP64 ? table_base(fields) : 0;
    // Where the tail begins in its copy, which is one of 16-byte pieces.
    const uint32_t phase = uint32_t(reinterpret_cast<uintptr_t>(tail)) / 4 & 3;
    if (status == DONE && !raw) {
        // 2.
        const uint32_t bytes = 4 * (phase + words);
        const auto *const pieces = reinterpret_cast<const U32x4 *>(tail - phase);
        for (uint32_t i = thread; i < (bytes + 15) / 16; i += T::THREADS)
            simt::copy_async_16(reinterpret_cast<U32x4 *>(shared.tail) + i, pieces + i,
                                bytes - 16 * i < 16 ? bytes - 16 * i : 16);
        // A thread's pairs have the same first index, and second indices that differ by 8 (or, with
        // 256 threads, only one pair).
        const U32x2 low = fields[FIELD_TABLE], high = fields[FIELD_TABLE + 1];
        auto exponent = [&](U32x2 half, uint32_t index) {
            const uint32_t symbol = simt::byte_perm(half.x, half.y, index & 7) & 255;
            return FP64 ? format::fp64_exponent(symbol, base) : symbol & ((1u << T::E) - 1);
        };
        const uint32_t first = thread & 15, second = thread >> 4;
        const uint32_t e =
                first == format::RANK_RAW ? 0 : exponent(first & 8 ? high : low, first) << M;
        constexpr uint32_t UP = M + (HEAD16 ? 16 : 8);
        if constexpr (T::THREADS == 128) {
            shared.pairs[spread_bytes(thread)] = e | exponent(low, second) << UP;
            shared.pairs[spread_bytes(thread + 128)] =
                    e | (second == format::RANK_RAW - 8 ? 0 : exponent(high, second) << UP);
        } else {
            static_assert(T::THREADS == 256);
            shared.pairs[spread_bytes(thread)] =
                    e |
                    (second == format::RANK_RAW ? 0
                                                : exponent(second & 8 ? high : low, second) << UP);
        }
    }
    simt::copy_async_wait();
    if (thread == 0)
        shared.last_to_begin = is_last_to_begin(begun_before, job.tiles());
    barrier.sync();

    if (status != DONE && lane == 0)
        shared.bad = status;
    uint8_t *const target = job.data() + at_block * T::SIZE;
    const bool direct = !kAhead || (kWhole && is_aligned_16(target));
    if constexpr (kAhead) {
        constexpr uint32_t MANTISSA = T::MANTISSA_BYTES ? T::VALUES : T::VALUES / 8 * T::K;
        prefetch_part(launch, next_tile, shared.next, JOB_MANTISSA, MANTISSA, thread, T::THREADS);
        prefetch_part(launch, next_tile, shared.next, JOB_LEVEL1, T::VALUES / 8 * T::WIDTH1, thread,
                      T::THREADS);
        if (group == 0 && next_tile < launch.tiles && lane >= JOB_COUNTS && lane <= JOB_SYMBOLS)
            simt::prefetch(reinterpret_cast<const void *>(shared.next.word[lane]));
    }
    U32x4 *const rows = shared.rows + group * 4 * simt::LANES;
    // Heads by stripe: four words of two (16 bits), or two words of four (8 bits).
    constexpr uint32_t HEAD_WORDS = HEAD16 ? 4 : 2;
    // 4., but for the exponents: those of block h are in place in its heads. raw_symbols: where the
    // symbols go that follow each other in the copy of the tail from byte raw_at on.
    auto store_block = [&](uint32_t h, uint32_t(&head)[4][HEAD_WORDS], uint32_t raw_symbols,
                           uint32_t raw_at) {
        if constexpr (!T::MANTISSA_BYTES) { // planes to nibbles by stripe
            uint32_t n[4] = {mantissa[h][0], mantissa[h][1], mantissa[h][2], mantissa[h][3]};
            transpose_nibbles(n);
            SIMT_UNROLL
            for (uint32_t i = 0; i < 4; ++i)
                mantissa[h][i] = n[i];
        }
        SIMT_UNROLL
        for (uint32_t i = 0; i < 4; ++i) {
            uint32_t(&e)[HEAD_WORDS] = head[i]; // exponents in place so far
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
                    const uint32_t n = mantissa[h][i] >> (8 * j), s = mantissa[h][4] >> (8 * j + i);
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
        // Raw symbols of whole tiles are patched into what has been stored, where they are few:
        // behind several levels. (The worker must not say that it is done before such stores have
        // arrived: then it costs more than it saves.)
        const bool late = T::MANTISSA_BYTES && kWhole && L != 0 && direct && !add && !T::COLUMNS &&
                          job.progress() == nullptr;
        if (!late && simt::any(raw_symbols != 0)) {
            // Through a lane's own piece of shared memory: the only accesses at an index that
            // is not known.
            SIMT_UNROLL
            for (uint32_t i = 0; i < 4; ++i) {
                if constexpr (HEAD16)
                    rows[i * simt::LANES + lane] = {head[i][0], head[i][1], head[i][2], head[i][3]};
                else
                    reinterpret_cast<U32x2 *>(rows)[i * simt::LANES + lane] = {head[i][0],
                                                                               head[i][1]};
            }
            while (raw_symbols != 0) {
                const uint32_t bit = simt::find_first(raw_symbols), stripe = bit & 3, k = bit >> 2;
                raw_symbols &= raw_symbols - 1;
                const uint32_t symbol = reinterpret_cast<const uint8_t *>(shared.tail)[raw_at++];
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
                    const U32x2 q = reinterpret_cast<const U32x2 *>(rows)[i * simt::LANES + lane];
                    head[i][0] = q.x;
                    head[i][1] = q.y;
                }
            }
            simt::sync_lanes();
        }

        if constexpr (T::COLUMNS) {
            SIMT_UNROLL
            for (uint32_t i = 0; i < 4; ++i) {
                const U32x2 bases = column_bases<T>(job.chunk() + format::HEADER_LENGTH,
                                                    extent[h].words, i, lane);
                SIMT_UNROLL
                for (uint32_t j = 0; j < HEAD_WORDS; ++j)
                    head[i][j] = add_bases<T>(head[i][j], bases, j);
            }
        }

        // Rows of the original, four at a time.
        constexpr uint32_t BATCH = T::ROWS < 4 ? T::ROWS : 4;
        uint8_t *const block = target + h * T::BLOCK_BYTES;
        const uint32_t row_bytes = extent[h].words * 16;
        const uint8_t *const low = job.low() + (at_block + h * format::BLOCK_VALUES) * T::LOW;
        const uint8_t *const low2 = job.low2() + (at_block + h * format::BLOCK_VALUES) * 4;
        SIMT_UNROLL
        for (uint32_t batch = 0; batch < T::ROWS / BATCH; ++batch) {
            U32x4 v[BATCH];
            SIMT_UNROLL
            for (uint32_t b = 0; b < BATCH; ++b) {
                const uint32_t row = batch * BATCH + b, vector = row * extent[h].words + lane;
                const bool exists = kWhole || vector_bytes<T>(extent[h], row, lane) != 0;
                U32x2 a{0, 0}, c{0, 0};
                if constexpr (T::DTYPE == format::DTYPE_FP32 || T::DTYPE == format::DTYPE_FP16) {
                    if (exists)
                        a = simt::load_stream(reinterpret_cast<const U32x2 *>(low) + vector);
                } else if constexpr (FP64) {
                    if (exists) {
                        a.x = simt::load_stream(reinterpret_cast<const uint32_t *>(low) + vector);
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
                const uint32_t done = batch * BATCH * row_bytes, bytes = extent[h].values * T::SIZE;
                if (done < bytes) {
                    const uint32_t here =
                            bytes - done < BATCH * row_bytes ? bytes - done : BATCH * row_bytes;
                    copy_out(block + done, rows, here, lane);
                }
                simt::sync_lanes();
            }
        }
        if constexpr (T::MANTISSA_BYTES && kWhole && L != 0) {
            while (late && raw_symbols != 0) {
                const uint32_t bit = simt::find_first(raw_symbols), stripe = bit & 3, k = bit >> 2;
                raw_symbols &= raw_symbols - 1;
                const uint32_t symbol = reinterpret_cast<const uint8_t *>(shared.tail)[raw_at++];
                uint32_t column[4];
                SIMT_UNROLL
                for (uint32_t j = 0; j < 4; ++j)
                    column[j] = stripe & 2 ? (stripe & 1 ? head[3][j] : head[2][j])
                                           : (stripe & 1 ? head[1][j] : head[0][j]);
                const uint32_t at = format::value_at(T::DTYPE, simt::LANES, lane, bit);
                *reinterpret_cast<uint16_t *>(block + (at + 1) * T::SIZE - 2) =
                        uint16_t(half_of(column, k) | symbol << M);
            }
        }
    };
    if (status == DONE && raw) {
        SIMT_UNROLL
        for (uint32_t h = 0; h < H; ++h) {
            if (h >= blocks)
                break;
            uint32_t exponent[FP64 ? 11 : 8]; // planes (fp64), or two words a stripe
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
            uint32_t head[4][HEAD_WORDS];
            SIMT_UNROLL
            for (uint32_t i = 0; i < 4; ++i) {
                if constexpr (FP64) {
                    SIMT_UNROLL
                    for (uint32_t j = 0; j < 4; ++j) {
                        head[i][j] = 0;
                        SIMT_UNROLL
                        for (uint32_t q = 0; q < 11; ++q)
                            head[i][j] |= (exponent[q] >> (8 * j + i) & 1) << (M + q) |
                                          (exponent[q] >> (8 * j + 4 + i) & 1) << (M + 16 + q);
                    }
                } else if constexpr (HEAD16) {
                    const uint32_t a = exponent[2 * i], b = exponent[2 * i + 1];
                    head[i][0] = simt::byte_perm(a, 0, 0x4140) << M;
                    head[i][1] = simt::byte_perm(a, 0, 0x4342) << M;
                    head[i][2] = simt::byte_perm(b, 0, 0x4140) << M;
                    head[i][3] = simt::byte_perm(b, 0, 0x4342) << M;
                } else {
                    head[i][0] = exponent[2 * i] << M;
                    head[i][1] = exponent[2 * i + 1] << M;
                }
            }
            store_block(h, head, 0, 0);
        }
    } else if (status == DONE) {
        uint32_t r[H][4];
        uint32_t raw_mask[H] = {};
        uint32_t raw_at[H] = {}; // byte in the copy of the tail
        // 3.
        const uint32_t *const codes = shared.tail + phase;
        uint32_t m[H][COUNTED];
        SIMT_UNROLL
        for (uint32_t h = 0; h < H; ++h)
            C::start(code1[h], r[h], m[h]);
        uint32_t stream = 0;
        bool wrong = false;
        // Number of the tile's codes at a level before the group, and of all in the tile.
        uint32_t before[COUNTED], total[COUNTED];
        SIMT_UNROLL
        for (uint32_t t = 0; t < COUNTED; ++t) {
            before[t] = counts.before(t);
            total[t] = counts.total(t);
        }
        SIMT_UNROLL
        for (uint32_t t = 0; t < COUNTED; ++t) {
            // Block 0 in the lower half, block 1 in the upper.
            const uint32_t own = simt::popcount(m[0][t]) | simt::popcount(m[1][t]) << 16;
            const bool some = DENSE || t != L || simt::any(own != 0);
            const uint32_t sum = some ? prefix_sum(own) : 0,
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
            } else {
                wrong = wrong || of_group != counts.group(t);
            }
            const uint32_t within = sum - own + (last << 16);
            const uint32_t at[H] = {before[t] + (within & 0xffff), before[t] + (within >> 16)};
            if (t == L) {
                SIMT_UNROLL
                for (uint32_t h = 0; h < H; ++h)
                    raw_at[h] = 4 * phase + (stream + 7) / 8 + at[h];
                break;
            }
            SIMT_UNROLL
            for (uint32_t h = 0; h < H; ++h) {
                if (t != 0 && !simt::any(m[h][t] != 0)) {
                    uint32_t none[max_tail_width<T::SHAPE>()] = {};
                    C::next(t, none, r[h], m[h]);
                    continue;
                }
                uint32_t x[max_tail_width<T::SHAPE>()] = {};
                SIMT_UNROLL
                for (uint32_t q = 0; q < C::width(t); ++q)
                    x[q] = get_bits(codes, stream + q * total[t] + at[h]);
                // Deep levels are rarely used: then it is cheaper code by code.
                if (t >= 2 && !DENSE && !simt::any(simt::popcount(m[h][t]) > 2)) {
                    const uint32_t first = m[h][t] & -m[h][t], second = m[h][t] ^ first;
                    SIMT_UNROLL
                    for (uint32_t q = 0; q < C::width(t); ++q)
                        x[q] = (x[q] & 1 ? first : 0) | (x[q] & 2 ? second : 0);
                } else {
                    const Moves moves = moves_of(shared.expand, m[h][t], launch.four);
                    SIMT_UNROLL
                    for (uint32_t q = 0; q < C::width(t); ++q)
                        x[q] = expand_bits(moves, x[q]);
                }
                C::next(t, x, r[h], m[h]);
            }
            stream += C::width(t) * total[t];
        }
        if (wrong) { // the same for all lanes
            shared.bad = CORRUPT;
        } else {
            SIMT_UNROLL
            for (uint32_t h = 0; h < H; ++h)
                raw_mask[h] = m[h][L];
        }
        SIMT_UNROLL
        for (uint32_t h = 0; h < H; ++h)
            transpose_nibbles(r[h]);
        SIMT_UNROLL
        for (uint32_t h = 0; h < H; ++h) {
            if (h >= blocks)
                break;
            uint32_t head[4][HEAD_WORDS];
            SIMT_UNROLL
            for (uint32_t i = 0; i < 4; ++i) {
                const uint32_t x = spread_bytes(r[h][i]);
                const uint32_t p0 = simt::lookup_word(shared.pairs, x, 0, launch.four),
                               p1 = simt::lookup_word(shared.pairs, x, 1, launch.four),
                               p2 = simt::lookup_word(shared.pairs, x, 2, launch.four),
                               p3 = simt::lookup_word(shared.pairs, x, 3, launch.four);
                if constexpr (HEAD16) {
                    head[i][0] = p0;
                    head[i][1] = p1;
                    head[i][2] = p2;
                    head[i][3] = p3;
                } else {
                    head[i][0] = p0 | p1 << 16;
                    head[i][1] = p2 | p3 << 16;
                }
            }
            store_block(h, head, raw_mask[h], raw_at[h]);
        }
    }
    if (job.tile() == 0 && thread == 0 && status == DONE) {
        copy_trailing(job, T::SIZE);
    }
    if (job.progress() == nullptr)
        return;
    barrier.sync();
    if (thread == 0)
        decode_done(job, shared.last_to_begin != 0, shared.bad, launch.seq);
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
            (word & ~OPTIONAL_FLAGS) == header_word(T::DTYPE, T::SHAPE, job.small());
    const bool ok = as_expected && length == job.length() && tail_length % format::TAIL_WORD == 0 &&
                    tail_length <= job.tail_room();
    if (ok)
        copy_trailing(job, T::SIZE);
    if (job.progress() != nullptr)
        simt::publish(job.progress(),
                      progress_word(0, ok ? DONE : header_status(word, as_expected), launch.seq));
}

} // namespace zip::gpu
#endif
