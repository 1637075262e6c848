// SPDX-License-Identifier: BSD-3-Clause
// Encodes one tile. Device code.
//
// 1. Load the values; store low parts, signs and mantissas; keep symbols in registers, and in
// shared memory for the few that are raw.
// 2. Count a sample of the symbols, rank them, make a table symbol -> rank index.
// 3. Look every symbol up; transpose the rank indices into planes; level 1 is done.
// 4. Count the codes of each level (prefix sums over lanes and groups) and take a part of the
// chunk's tail.
// 5. Compress the codes of each level into the tail in shared memory, then copy it out.
//
// Performance (doc/performance.md): bound by what shared memory and the integer pipe give, then by
// memory.
#ifndef ZIP_KERNELS_GPU_ENCODE_H
#define ZIP_KERNELS_GPU_ENCODE_H

#include <cstdint>

#include "kernels/gpu/bits.h"
#include "kernels/gpu/cascade.h"
#include "kernels/gpu/columns.h"
#include "kernels/gpu/split.h"
#include "kernels/gpu/tile.h"

namespace zip::gpu {

// Shared memory of a worker. kTailWords: most words of a tile's part of the tail.
template <uint32_t kGroups, uint32_t kTailWords>
struct EncodeShared {
    alignas(16) uint32_t histogram[256];
    // Keys (count << 8 | 255 - symbol) of the symbols in the sample, and of those that are not
    // rare; zeros behind.
    alignas(16) uint32_t seen[256];
    alignas(16) uint32_t frequent[256];
    alignas(16) uint32_t tail[kTailWords + 4];
    alignas(16) U32x4 symbols[kGroups * 4 * simt::LANES]; // of a group's block h, stripes 2i and 2i
                                                          // + 1: [(h * 2 + i) * 32 + lane]
    alignas(16) uint32_t compress[256];
    alignas(256) uint8_t rank_of[256]; // for simt::lookup_byte()
    uint32_t dummy[simt::LANES];
    uint32_t totals[kGroups][4];   // codes of tail levels t and t + 1 in a word
    alignas(16) uint32_t table[4]; // SYMBOLS
    Job job, next;
    uint64_t tail_offset;
    uint32_t seen_count, frequent_count, samples, largest, no_symbol, last_to_begin;
};

template <class T>
ZIP_HOST_DEVICE constexpr uint32_t most_tail_words()
{
    return format::raw_tail_words(T::CODING, T::VALUES);
}

// Starts to bring a table to shared memory, once a worker.
SIMT_DEVICE void start_table(uint32_t (&shared)[256], const uint32_t (&table)[256], uint32_t thread)
{
    if (thread < 64)
        simt::copy_async_16(reinterpret_cast<U32x4 *>(shared) + thread,
                            reinterpret_cast<const U32x4 *>(table) + thread, 16);
}

// The word of a raw tile's sequence (format.md, section 7), wherever it belongs.
struct RawTarget {
    uint32_t *counts, *symbols, *tail;
    uint32_t counts_words;

    SIMT_DEVICE uint32_t *at(uint32_t i) const
    {
        return i < counts_words       ? counts + i
               : i < counts_words + 4 ? symbols + (i - counts_words)
                                      : tail + (i - counts_words - 4);
    }
};

// Planes of exponents from a block's symbol words (stripe i in [2i, 2i + 2)): bit 4k + i of plane q
// is bit q of stripe i's value k.
SIMT_DEVICE void exponent_planes(const uint32_t (&symbol)[8], uint32_t (&plane)[8])
{
    uint32_t lower[4], upper[4]; // of the nibbles
    SIMT_UNROLL
    for (uint32_t i = 0; i < 4; ++i) {
        lower[i] = pack_nibbles(symbol[2 * i] & 0x0f0f0f0f, symbol[2 * i + 1] & 0x0f0f0f0f);
        upper[i] =
                pack_nibbles(symbol[2 * i] >> 4 & 0x0f0f0f0f, symbol[2 * i + 1] >> 4 & 0x0f0f0f0f);
    }
    transpose_nibbles(lower);
    transpose_nibbles(upper);
    SIMT_UNROLL
    for (uint32_t q = 0; q < 4; ++q) {
        plane[q] = lower[q];
        plane[4 + q] = upper[q];
    }
}

// One of the eight values of a stripe, from its two symbol words.
SIMT_DEVICE uint32_t byte_of(uint32_t a, uint32_t b, uint32_t k)
{
    return simt::byte_perm(a, b, k) & 255;
}

// Element k (0..7) of four words of two 16-bit halves.
SIMT_DEVICE uint32_t half_of(const uint32_t *w, uint32_t k)
{
    const uint32_t pair = k & 4 ? (k & 2 ? w[3] : w[2]) : (k & 2 ? w[1] : w[0]);
    return k & 1 ? pair >> 16 : pair & 0xffff;
}

// Stores the exponents of a raw tile (format.md, section 7), from shared memory.
template <class T, class Shared, class AnyJob, class Barrier>
SIMT_DEVICE void store_raw_tile(Shared &shared, const AnyJob &job, const TileExtent &tile,
                                uint32_t thread, Barrier barrier)
{
    constexpr uint32_t H = T::GROUP_BLOCKS;
    constexpr bool FP64 = T::DTYPE == format::DTYPE_FP64;
    const uint32_t lane = thread % simt::LANES, group = thread / simt::LANES;
    const uint32_t first_block = group * tile.blocks;
    uint32_t *const level1 = job.level1() + T::WIDTH1 * format::BLOCK_WORDS * first_block;
    const RawTarget target{reinterpret_cast<uint32_t *>(job.counts()), job.symbols(),
                           job.tail() + shared.tail_offset, T::CASCADE.counts * tile.groups / 2};
    // What the sequence may leave of COUNTS and SYMBOLS is 0.
    for (uint32_t i = thread; i < T::CASCADE.counts * tile.groups; i += T::THREADS)
        job.counts()[i] = 0;
    if (thread < 4)
        job.symbols()[thread] = 0;
    barrier.sync();
    const U32x4 *const symbols = shared.symbols + group * (2 * H) * simt::LANES + lane;
    for (uint32_t h = 0; h < tile.blocks; ++h) {
        const BlockExtent extent = group_block<false>(tile, group, h);
        uint32_t plane[FP64 ? 11 : 8];
        if constexpr (FP64) {
            SIMT_UNROLL
            for (uint32_t q = 0; q < 11; ++q)
                plane[q] = shared.tail[((group * H + h) * 11 + q) * simt::LANES + lane];
        } else {
            uint32_t symbol[8];
            SIMT_UNROLL
            for (uint32_t i = 0; i < 2; ++i) {
                const U32x4 q = symbols[(2 * h + i) * simt::LANES];
                symbol[4 * i] = q.x;
                symbol[4 * i + 1] = q.y;
                symbol[4 * i + 2] = q.z;
                symbol[4 * i + 3] = q.w;
            }
            exponent_planes(symbol, plane);
        }
        if (lane < extent.words) {
            SIMT_UNROLL
            for (uint32_t q = 0; q < T::E; ++q) {
                if (q < T::WIDTH1)
                    level1[h * T::WIDTH1 * format::BLOCK_WORDS + q * extent.words + lane] =
                            plane[q];
                else
                    *target.at((q - T::WIDTH1) * ((tile.values + 31) / 32) +
                               (first_block + h) * format::BLOCK_WORDS + lane) = plane[q];
            }
        }
    }
}

// First 8 bytes of a chunk's header, the optional flags being 0.
ZIP_HOST_DEVICE constexpr uint64_t header_word(uint32_t dtype, uint32_t shape, bool small)
{
    return uint64_t(format::MAGIC) | uint64_t(format::VERSION) << 16 | uint64_t(dtype) << 24 |
           uint64_t(shape) << 32 | uint64_t(format::HEADER_LENGTH / format::HEADER_UNIT) << 40 |
           uint64_t(small ? format::FLAG_SMALL_TILES : 0) << 48;
}

// Writes the header of a chunk whose tail is known, but for `trailing`'s source, which it reads.
template <class AnyJob>
SIMT_DEVICE void write_header(const AnyJob &job, uint8_t dtype, uint8_t shape, bool small,
                              uint32_t value_size, uint64_t tail_words)
{
    const uint32_t trailing = uint32_t(job.length()) & (value_size - 1);
    const uint8_t *const end = job.chunk_data() + (job.length() - trailing);
    uint64_t rest = 0;
    for (uint32_t i = 0; i < trailing; ++i)
        rest |= uint64_t(end[i]) << (8 * i);
    auto *const header = reinterpret_cast<uint64_t *>(job.chunk());
    header[0] = header_word(dtype, shape, small);
    header[1] = job.length();
    header[2] = tail_words * format::TAIL_WORD;
    header[3] = header[4] = 0;
    header[5] = rest;
}

// An encode's coding, in its progress word.
template <class T>
SIMT_DEVICE uint32_t progress_coding(bool small)
{
    return T::DTYPE | T::SHAPE << 4 | uint32_t(small) << 7;
}

SIMT_DEVICE uint64_t progress_word(uint64_t tail_words, uint32_t coding, uint16_t seq)
{
    return tail_words | uint64_t(coding) << 32 | uint64_t(seq) << 48;
}

// The bytes between a chunk's sections, which are 0, by the worker of its last tile. Shape and type
// as in `T`.
template <class T, bool kWhole, class AnyJob>
SIMT_DEVICE void clear_gaps(const AnyJob &job, const TileExtent &tile, uint32_t thread)
{
    constexpr uint32_t SECTIONS = JOB_SYMBOLS - JOB_MANTISSA; // SYMBOLS ends where the tail begins
    if (job.tile() + 1 != job.tiles())
        return;
    const uint32_t words = (tile.values + 31) / 32;
    const uint32_t bytes[SECTIONS] = {T::MANTISSA_BYTES ? tile.values : 4 * T::K * words,
                                      T::LOW * tile.values,
                                      (T::TYPE.low_bytes - T::LOW) * tile.values,
                                      4 * T::WIDTH1 * words,
                                      2 * T::CASCADE.counts * tile.groups,
                                      8};
    SIMT_UNROLL
    for (uint32_t i = 0; i < SECTIONS; ++i) {
        if (thread != i || (kWhole && bytes[i] % format::SECTION_ALIGN == 0))
            continue;
        uint8_t *end = job.template pointer<uint8_t>(JobWord(JOB_MANTISSA + i)) + bytes[i];
        for (; (reinterpret_cast<uintptr_t>(end) & (format::SECTION_ALIGN - 1)) != 0; ++end)
            *end = 0;
    }
}

// One thread, once the worker has written all of its tile: the tile that began last says that the
// chunk is done. tail_words: of the chunk, if it is that one.
template <class AnyJob>
SIMT_DEVICE void encode_done(const AnyJob &job, bool last_to_begin, uint64_t tail_words,
                             uint32_t coding, uint16_t seq)
{
    if (end_tile(job.state(), job.tiles(), last_to_begin, 1) == 0)
        return;
    job.state()->done = 0;
    simt::publish(job.progress(), progress_word(tail_words, coding, seq));
}

// Before each tile. No barrier at the end. kTailWords: most that the kernel's type needs.
template <uint32_t kThreads, uint32_t kTailWords, class Shared>
SIMT_DEVICE void clear_shared(Shared &shared, uint32_t thread)
{
    constexpr uint32_t LISTS = 192, TAIL = (kTailWords + 3) / 4; // vectors
    static_assert(sizeof(shared.histogram) + sizeof(shared.seen) + sizeof(shared.frequent) ==
                  16 * LISTS);
    auto *const lists = reinterpret_cast<U32x4 *>(shared.histogram);
    auto *const tail = reinterpret_cast<U32x4 *>(shared.tail);
    SIMT_UNROLL
    for (uint32_t i = 0; i < LISTS; i += kThreads) {
        if (i + kThreads <= LISTS || i + thread < LISTS)
            lists[i + thread] = {0, 0, 0, 0};
    }
    SIMT_UNROLL
    for (uint32_t i = 0; i < TAIL; i += kThreads) {
        if (i + kThreads <= TAIL || i + thread < TAIL)
            tail[i + thread] = {0, 0, 0, 0};
    }
    if (thread < 4)
        shared.table[thread] = 0;
    if (thread == 0)
        shared.seen_count = shared.frequent_count = shared.samples = shared.largest =
                shared.no_symbol = 0;
}

// kWhole: the tile is whole, not small, and reached otherwise than in parts. kAhead: the worker has
// another tile next, maybe. `start()` is called once the first loads are under way.
template <class T, bool kWhole, bool kAhead, class Shared, class AnyJob, class Barrier, class Start>
SIMT_DEVICE void encode_tile(const Launch &launch, const AnyJob &job, uint32_t next_tile,
                             Shared &shared, uint32_t thread, Reach reach, Barrier barrier,
                             Start start)
{
    using C = Cascade<T::SHAPE>;
    constexpr uint32_t H = T::GROUP_BLOCKS, L = C::LEVELS;
    constexpr bool FP64 = T::DTYPE == format::DTYPE_FP64;
    constexpr bool DENSE = T::SHAPE == format::SHAPE_DENSE;
    const uint32_t lane = thread % simt::LANES, group = thread / simt::LANES;

    const TileExtent tile =
            kWhole ? whole_tile<T>() : tile_extent<T>(job.left(), !DENSE && job.small());
    const bool small = tile.small;
    const uint32_t values = tile.values, blocks = tile.blocks;
    const uint32_t first_block = group * blocks; // of the tile
    const uint32_t at_block = first_block * format::BLOCK_VALUES;

    const uint8_t *const source = job.data() + at_block * T::SIZE;
    BlockExtent extent[H];
    SIMT_UNROLL
    for (uint32_t h = 0; h < H; ++h)
        extent[h] = group_block<kWhole>(tile, group, h);

    // 1. Rows come in batches of at most 8 vectors a lane, for registers' sake.
    constexpr uint32_t ALL_ROWS = H * T::ROWS, BATCH = ALL_ROWS < 8 ? ALL_ROWS : 8;
    U32x4 v[BATCH];
    // SHIFTED: the aligned vectors around the rows, and the one behind them.
    const uint32_t off = kWhole && reach == Reach::SHIFTED
                                 ? uint32_t(reinterpret_cast<uintptr_t>(source)) & 15
                                 : 0;
    U32x4 behind{0, 0, 0, 0};
    auto load = [&](uint32_t batch) {
        SIMT_UNROLL
        for (uint32_t i = 0; i < BATCH; ++i) {
            const uint32_t row = batch * BATCH + i, h = row / T::ROWS;
            v[i] = load_row<T>(source - off + h * T::BLOCK_BYTES,
                               kWhole ? Reach::ALIGNED : Reach::PARTS, extent[h], row % T::ROWS,
                               lane);
        }
        if (off != 0 && lane == 0) {
            const uint8_t *const end = source - off + (batch + 1) * BATCH * (16 * simt::LANES);
            // Behind the tile there may be less than a vector, even nothing.
            const bool scarce = batch + 1 == ALL_ROWS / BATCH && group + 1 == T::GROUPS &&
                                job.left() < T::VALUES + T::ROW_VALUES;
            behind = scarce ? load_part(end, off)
                            : simt::load_stream(reinterpret_cast<const U32x4 *>(end));
        }
    };
    load(0);
    start();

    Split<T> split[H];
    U32x4 *const symbols = shared.symbols + group * (2 * H) * simt::LANES + lane;
    SIMT_UNROLL
    for (uint32_t h = 0; h < H; ++h)
        start_split(split[h]);
    const BlockSections to{job.mantissa() + at_block, job.low() + at_block * T::LOW,
                           job.low2() + at_block * 4};
    SIMT_UNROLL
    for (uint32_t batch = 0; batch < ALL_ROWS / BATCH; ++batch) {
        if (batch != 0)
            load(batch);
        if (off != 0)
            shift_rows(v, behind, off, lane);
        SIMT_UNROLL
        for (uint32_t i = 0; i < BATCH; ++i) {
            const uint32_t row = batch * BATCH + i, h = row / T::ROWS;
            const BlockSections block{to.mantissa + h * format::BLOCK_VALUES,
                                      to.low + h * format::BLOCK_VALUES * T::LOW,
                                      to.low2 + h * format::BLOCK_VALUES * 4};
            if constexpr (kWhole) {
                split_row<T>(v[i], row % T::ROWS, row % T::ROWS * simt::LANES + lane, true,
                             T::ROW_VALUES, block, split[h]);
            } else {
                const uint32_t bytes = vector_bytes<T>(extent[h], row % T::ROWS, lane);
                split_row<T>(v[i], row % T::ROWS, row % T::ROWS * extent[h].words + lane,
                             bytes == 16, bytes / T::SIZE, block, split[h]);
            }
        }
    }
    if constexpr (!T::MANTISSA_BYTES) {
        SIMT_UNROLL
        for (uint32_t h = 0; h < H; ++h) {
            finish_split(split[h]);
            auto *const planes = reinterpret_cast<uint32_t *>(job.mantissa()) +
                                 T::K * format::BLOCK_WORDS * (first_block + h);
            if (lane < extent[h].words) {
                SIMT_UNROLL
                for (uint32_t q = 0; q < T::K; ++q)
                    simt::store_stream(planes + q * extent[h].words + lane, split[h].mantissa[q]);
            }
        }
    }

    uint32_t exists[H]; // of a ragged tile's positions
    SIMT_UNROLL
    for (uint32_t h = 0; h < H; ++h)
        exists[h] = kWhole ? ~uint32_t(0) : existing<T>(extent[h], lane);
    const bool sample_all = !kWhole && values < format::SAMPLE_ALL_BELOW;

    if constexpr (T::COLUMNS) {
        SIMT_UNROLL
        for (uint32_t h = 0; h < H; ++h) {
            SIMT_UNROLL
            for (uint32_t i = 0; i < 4; ++i) {
                const U32x2 bases = column_bases<T>(job.chunk() + format::HEADER_LENGTH,
                                                    extent[h].words, i, lane);
                uint32_t(&s)[8] = split[h].symbol;
                s[2 * i] = tell_from_bases<T>(s[2 * i], bases.x);
                s[2 * i + 1] = tell_from_bases<T>(s[2 * i + 1], bases.y);
                if constexpr (!kWhole) { // padding's symbols are 0
                    uint32_t bytes[2] = {};
                    SIMT_UNROLL
                    for (uint32_t k = 0; k < 8; ++k)
                        bytes[k / 4] |= (exists[h] >> (4 * k + i) & 1) * (0xffu << (8 * (k % 4)));
                    s[2 * i] &= bytes[0];
                    s[2 * i + 1] &= bytes[1];
                }
            }
        }
    }

    // fp64: the tile's window of exponents, from the largest one in the sample.
    uint32_t base = 0;
    if constexpr (FP64) {
        uint32_t largest = 0;
        SIMT_UNROLL
        for (uint32_t h = 0; h < H; ++h) {
            SIMT_UNROLL
            for (uint32_t i = 0; i < 4; ++i) {
                for (uint32_t n = 0; n < (sample_all ? 8u : DENSE ? 2u : 1u); ++n) {
                    const uint32_t k =
                            sample_all ? n
                                       : format::sample_bit(first_block + h, lane, i) / 4 ^ 4 * n;
                    const uint32_t e = half_of(split[h].wide + 4 * i, k);
                    if ((exists[h] >> (4 * k + i) & 1) != 0 && e != format::FP64_INFINITY &&
                        e > largest)
                        largest = e;
                }
            }
        }
        largest = simt::max_all(largest);
        if (lane == 0)
            simt::atomic_max_shared(&shared.largest, largest);
        barrier.sync();
        base = format::fp64_base(shared.largest);
        bool missing = false;
        SIMT_UNROLL
        for (uint32_t h = 0; h < H; ++h) {
            SIMT_UNROLL
            for (uint32_t j = 0; j < 8; ++j) {
                uint32_t packed = 0;
                SIMT_UNROLL
                for (uint32_t c = 0; c < 4; ++c) {
                    const uint32_t k = 4 * (j & 1) + c;
                    const uint32_t e =
                            split[h].wide[4 * (j / 2) + k / 2] >> (16 * (k & 1)) & 0xffff;
                    const uint32_t s = format::fp64_symbol(e, base);
                    missing = missing ||
                              (s == format::NO_SYMBOL && (exists[h] >> (4 * k + j / 2) & 1) != 0);
                    packed |= (s & 255) << (8 * c);
                }
                split[h].symbol[j] = packed;
            }
        }
        if (missing)
            shared.no_symbol = 1;
    }

    // 2. The sample's histogram.
    SIMT_UNROLL
    for (uint32_t h = 0; h < H; ++h) {
        SIMT_UNROLL
        for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t a = split[h].symbol[2 * i], b = split[h].symbol[2 * i + 1];
            const uint32_t k = format::sample_bit(first_block + h, lane, i) / 4;
            if constexpr (kWhole) {
                simt::atomic_add_shared(&shared.histogram[byte_of(a, b, k)], 1);
                if constexpr (DENSE)
                    simt::atomic_add_shared(&shared.histogram[byte_of(a, b, k ^ 4)], 1);
            } else {
                for (uint32_t n = 0; n < (sample_all ? 8u : DENSE ? 2u : 1u); ++n) {
                    const uint32_t kn = sample_all ? n : k ^ 4 * n;
                    if ((exists[h] >> (4 * kn + i) & 1) != 0) {
                        simt::atomic_add_shared(&shared.histogram[byte_of(a, b, kn)], 1);
                        simt::atomic_add_shared(&shared.samples, 1);
                    }
                }
            }
        }
        SIMT_UNROLL
        for (uint32_t i = 0; i < 2; ++i)
            symbols[(2 * h + i) * simt::LANES] = {
                    split[h].symbol[4 * i], split[h].symbol[4 * i + 1], split[h].symbol[4 * i + 2],
                    split[h].symbol[4 * i + 3]};
    }
    barrier.sync();

    if constexpr (kAhead)
        prefetch_part(launch, next_tile, shared.next, JOB_DATA, T::VALUES * T::SIZE, thread,
                      T::THREADS);

    // Rank by count: a key's rank is the number of larger keys.
    constexpr uint32_t OWN = 256 / T::THREADS; // symbols a thread
    const uint32_t rare =
            format::sample_rare(kWhole ? T::VALUES / (DENSE ? 4 : 8) : shared.samples);
    uint32_t key[OWN];
    SIMT_UNROLL
    for (uint32_t u = 0; u < OWN; ++u) {
        const uint32_t symbol = thread + u * T::THREADS, count = shared.histogram[symbol];
        key[u] = count != 0 ? count << 8 | (255 - symbol) : 0;
        if (count != 0)
            shared.seen[simt::atomic_add_shared(&shared.seen_count, 1)] = key[u];
        if (count >= rare)
            shared.frequent[simt::atomic_add_shared(&shared.frequent_count, 1)] = key[u];
    }
    barrier.sync();
    {
        const bool many = shared.seen_count > format::SAMPLE_MANY_SYMBOLS;
        const uint32_t length = many ? shared.frequent_count : shared.seen_count;
        const auto *const list =
                reinterpret_cast<const U32x4 *>(many ? shared.frequent : shared.seen);
        SIMT_UNROLL
        for (uint32_t u = 0; u < OWN; ++u) {
            uint32_t rank = T::CASCADE.symbols;
            if (key[u] != 0 && (!many || key[u] >> 8 >= rare)) {
                rank = 0;
                for (uint32_t j = 0; j < (length + 3) / 4; ++j) {
                    const U32x4 q = list[j];
                    rank += (q.x > key[u]) + (q.y > key[u]) + (q.z > key[u]) + (q.w > key[u]);
                }
            }
            const uint32_t symbol = thread + u * T::THREADS;
            uint32_t index = format::RANK_RAW;
            if (rank < T::CASCADE.symbols) {
                index = uint32_t(packed_ranks<T::SHAPE>() >> (4 * rank)) & 15;
                reinterpret_cast<uint8_t *>(shared.table)[index] = uint8_t(symbol);
            }
            shared.rank_of[symbol] = uint8_t(index);
        }
    }
    barrier.sync();

    // 3. Rank indices, and their planes.
    uint32_t r[H][4];
    SIMT_UNROLL
    for (uint32_t h = 0; h < H; ++h) {
        SIMT_UNROLL
        for (uint32_t i = 0; i < 4; ++i) {
            uint32_t n = 0;
            SIMT_UNROLL
            for (uint32_t k = 0; k < 8; ++k) {
                n += simt::lookup_byte(shared.rank_of, split[h].symbol[2 * i + k / 4], k % 4)
                     << (4 * k);
            }
            r[h][i] = n;
        }
        transpose_nibbles(r[h]);
        if constexpr (!kWhole) {
            SIMT_UNROLL
            for (uint32_t q = 0; q < 4; ++q)
                r[h][q] &= exists[h];
        }
    }

    // 4. Who has codes where, raw symbols being the last level. before[t]: the tile's codes at tail
    // level t before this lane's in block 0 (lower half) and in block 1.
    constexpr uint32_t COUNTED = L + 1, PAIRS = (COUNTED + 1) / 2;
    uint32_t m[H][COUNTED], before[COUNTED];
    SIMT_UNROLL
    for (uint32_t h = 0; h < H; ++h)
        C::masks(r[h], m[h]);
    uint32_t own[COUNTED], sum[COUNTED];
    SIMT_UNROLL
    for (uint32_t t = 0; t < COUNTED; ++t)
        sum[t] = own[t] = simt::popcount(m[0][t]) | simt::popcount(m[1][t]) << 16;
    prefix_sums(sum);
    uint32_t of_group = 0;
    SIMT_UNROLL
    for (uint32_t t = 0; t < COUNTED; ++t) {
        const uint32_t last = simt::shuffle(sum[t], simt::LANES - 1);
        before[t] = sum[t] - own[t] + (last << 16);
        of_group |= ((last & 0xffff) + (last >> 16)) << (16 * (t & 1));
        if (t % 2 == 1 || t + 1 == COUNTED) {
            if (lane == 0)
                shared.totals[group][t / 2] = of_group;
            of_group = 0;
        }
    }
    simt::copy_async_wait(); // for the worker's table
    barrier.sync();
    uint32_t total[PAIRS] = {}, of_former[PAIRS] = {}; // of the tile, of the groups before
    SIMT_UNROLL
    for (uint32_t g = 0; g < T::GROUPS; ++g) {
        SIMT_UNROLL
        for (uint32_t p = 0; p < PAIRS; ++p) {
            const uint32_t n = shared.totals[g][p];
            of_former[p] += g < group ? n : 0;
            total[p] += n;
        }
    }
    SIMT_UNROLL
    for (uint32_t t = 0; t < COUNTED; ++t) // twice the half that is meant
        before[t] += simt::byte_perm(of_former[t / 2], 0, t & 1 ? 0x3232 : 0x1010);
    auto count_of = [&total](uint32_t t) {
        return t & 1 ? total[t / 2] >> 16 : total[t / 2] & 0xffff;
    };
    auto before_of = [&before](uint32_t t, uint32_t h) {
        return h != 0 ? before[t] >> 16 : before[t] & 0xffff;
    };
    uint32_t bits = 0;
    SIMT_UNROLL
    for (uint32_t t = 0; t < L; ++t)
        bits += C::width(t) * count_of(t);
    const uint32_t raw_words = kWhole ? most_tail_words<T>()
                                      : format::raw_tail_words({T::DTYPE, T::SHAPE, small}, values);
    const uint32_t coded_words = format::coded_tail_words(bits, count_of(L));
    const bool raw = coded_words >= raw_words || (FP64 && shared.no_symbol != 0);
    const uint32_t words = raw ? raw_words : coded_words;
    if (thread == 0) {
        const uint64_t old = begin_tile(job.state(), words), offset = old & BEGUN_MASK;
        shared.tail_offset = offset;
        *job.tile_header() =
                format::tile_header(offset, words, raw ? format::TILE_RAW : format::TILE_CODED);
        const bool last = is_last_to_begin(old, job.tiles());
        shared.last_to_begin = last;
        if (last) {
            job.state()->begun = 0;
            write_header(job, T::DTYPE, T::SHAPE, small, T::SIZE, offset + words);
        }
    }

    auto *const level1 = job.level1() + T::WIDTH1 * format::BLOCK_WORDS * first_block;
    if (!raw) {
        SIMT_UNROLL
        for (uint32_t h = 0; h < H; ++h) {
            uint32_t code[T::WIDTH1];
            C::level1(r[h], m[h], code);
            if (lane < extent[h].words) {
                SIMT_UNROLL
                for (uint32_t q = 0; q < T::WIDTH1; ++q)
                    simt::store_stream(level1 + (h * T::WIDTH1 * format::BLOCK_WORDS +
                                                 q * extent[h].words + lane),
                                       code[q]);
            }
        }
        if (T::CASCADE.counts != 0 && thread < (kWhole ? T::GROUPS : tile.groups)) {
            if constexpr (T::CASCADE.counts == 4)
                reinterpret_cast<U32x2 *>(job.counts())[thread] = {shared.totals[thread][0],
                                                                   shared.totals[thread][1]};
            else
                job.counts()[thread] = uint16_t(shared.totals[thread][0]);
        }
        if (thread < 4) {
            uint32_t word = shared.table[thread];
            if constexpr (FP64) {
                if (thread == format::BASE_LOW / 4)
                    word |= (base & 255) << (8 * (format::BASE_LOW % 4));
                if (thread == format::BASE_HIGH / 4)
                    word |= (base >> 8) << (8 * (format::BASE_HIGH % 4));
            }
            job.symbols()[thread] = word;
        }
        // 5.
        uint32_t *const dummy = &shared.dummy[lane];
        uint32_t stream = 0; // bits before it
        SIMT_UNROLL
        for (uint32_t t = 0; t < L; ++t) {
            const uint32_t count = count_of(t);
            SIMT_UNROLL
            for (uint32_t h = 0; h < H; ++h) {
                const uint32_t end = before_of(t, h) + simt::popcount(m[h][t]);
                if (t != 0 && !simt::any(m[h][t] != 0))
                    continue;
                // Deep levels are rarely used: then it is cheaper code by code.
                if (t >= 2 && !DENSE && !simt::any(simt::popcount(m[h][t]) > 3)) {
                    uint32_t left = m[h][t], at = stream + before_of(t, h);
                    while (left != 0) {
                        const uint32_t bit = simt::find_first(left);
                        left &= left - 1;
                        SIMT_UNROLL
                        for (uint32_t q = 0; q < C::width(t); ++q) {
                            const uint32_t place = at + q * count;
                            simt::atomic_or_shared(&shared.tail[place >> 5],
                                                   (C::code(r[h], m[h], t, q) >> bit & 1)
                                                           << (place & 31));
                        }
                        ++at;
                    }
                    continue;
                }
                const Moves moves = moves_of(shared.compress, m[h][t], launch.four);
                SIMT_UNROLL
                for (uint32_t q = 0; q < C::width(t); ++q)
                    put_bits(shared.tail, dummy, compress_bits(moves, C::code(r[h], m[h], t, q)),
                             stream + q * count + end);
            }
            stream += C::width(t) * count;
        }
        SIMT_UNROLL
        for (uint32_t h = 0; h < H; ++h) {
            const auto *const own_symbols =
                    reinterpret_cast<const uint8_t *>(symbols + 2 * h * simt::LANES);
            uint32_t left_raw = m[h][L], raw_at = (stream + 7) / 8 + before_of(L, h); // in bytes
            while (left_raw != 0) {
                const uint32_t bit = simt::find_first(left_raw), stripe = bit & 3, k = bit >> 2;
                left_raw &= left_raw - 1;
                const uint32_t symbol =
                        own_symbols[(stripe >> 1) * (16 * simt::LANES) + (stripe & 1) * 8 + k];
                simt::atomic_or_shared(&shared.tail[raw_at / 4], symbol << (8 * (raw_at & 3)));
                ++raw_at;
            }
        }
    }
    barrier.sync();
    uint32_t *const tail = job.tail() + shared.tail_offset;
    if (!raw) {
        for (uint32_t i = thread; i < words; i += T::THREADS)
            simt::store_stream(tail + i, shared.tail[i]);
    } else {
        if constexpr (FP64) {
            // Planes of exponents through the tail's room, which holds nothing now.
            static_assert(T::BLOCKS * 11 * simt::LANES <= sizeof(shared.tail) / 4);
            SIMT_UNROLL
            for (uint32_t h = 0; h < H; ++h) {
                for (uint32_t q = 0; q < 11; ++q) {
                    uint32_t word = 0;
                    SIMT_UNROLL
                    for (uint32_t b = 0; b < 32; ++b)
                        word |= (split[h].wide[4 * (b & 3) + (b >> 2) / 2] >>
                                         (16 * (b >> 2 & 1) + q) &
                                 1)
                                << b;
                    shared.tail[((group * H + h) * 11 + q) * simt::LANES + lane] = word;
                }
            }
        }
        store_raw_tile<T>(shared, job, tile, thread, barrier);
    }
    clear_gaps<T, kWhole>(job, tile, thread);
    if (job.progress() != nullptr) {
        barrier.sync();
        if (thread == 0)
            encode_done(job, shared.last_to_begin != 0, shared.tail_offset + words,
                        progress_coding<T>(small), launch.seq);
    }
}

// A chunk without a whole value is its header.
template <class T, class Shared>
SIMT_DEVICE void encode_empty(const Launch &launch, uint32_t next_tile, Shared &shared,
                              uint32_t thread)
{
    const Job &job = shared.job;
    leave_next_job(launch, next_tile, shared.next, thread / simt::LANES);
    if (thread != 0)
        return;
    write_header(job, T::DTYPE, T::SHAPE, job.small(), T::SIZE, 0);
    if (job.progress() != nullptr)
        simt::publish(job.progress(),
                      progress_word(0, progress_coding<T>(job.small()), launch.seq));
}

// The tile in shared.job. kWholeOnly: it is whole, not small, and aligned to 16 bytes.
template <class T, bool kWholeOnly, class Shared, class Barrier>
SIMT_DEVICE void encode_any_extent(const Launch &launch, uint32_t next_tile, Shared &shared,
                                   uint32_t thread, Barrier barrier)
{
    const Job &job = shared.job;
    const bool aligned = is_aligned_16(job.data());
    auto start = [&] { leave_next_job(launch, next_tile, shared.next, thread / simt::LANES); };
    if constexpr (!kWholeOnly) {
        if (job.left() == 0)
            return encode_empty<T>(launch, next_tile, shared, thread);
        const bool small = T::SHAPE != format::SHAPE_DENSE && job.small();
        if (small || job.left() < T::VALUES)
            return encode_tile<T, false, true>(launch, job, next_tile, shared, thread, Reach::PARTS,
                                               barrier, start);
    }
    encode_tile<T, true, true>(launch, job, next_tile, shared, thread,
                               kWholeOnly || aligned ? Reach::ALIGNED : Reach::SHIFTED, barrier,
                               start);
}

} // namespace zip::gpu
#endif
