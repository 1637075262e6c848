// SPDX-License-Identifier: BSD-3-Clause
// The kernels (job.h names them): which code a worker runs for its tile. Device code.
#ifndef ZIP_KERNELS_GPU_KERNELS_H
#define ZIP_KERNELS_GPU_KERNELS_H

#include <cstdint>

#include "kernels/gpu/columns.h"
#include "kernels/gpu/decode.h"
#include "kernels/gpu/encode.h"
#include "kernels/gpu/job.h"
#include "kernels/gpu/probe.h"
#include "kernels/gpu/tile.h"

namespace zip::gpu {

// Most words of a part of the tail: raw tiles of the type with the widest exponents.
constexpr uint32_t TAIL_WORDS =
        most_tail_words<TileTraits<format::DTYPE_FP64, format::SHAPE_11238>>();
// An encoder needs room for fp64's planes of exponents instead, of 11 bits each.
constexpr uint32_t ENCODE_TAIL_WORDS = 8 * 11 * simt::LANES,
                   DENSE_ENCODE_TAIL_WORDS = 16 * 11 * simt::LANES;
constexpr uint32_t DENSE_TAIL_WORDS =
        most_tail_words<TileTraits<format::DTYPE_FP64, format::SHAPE_DENSE>>();
using EncodeMemory = EncodeShared<4, ENCODE_TAIL_WORDS>;
using DecodeMemory = DecodeShared<4, TAIL_WORDS>;
using DenseEncodeMemory = EncodeShared<8, DENSE_ENCODE_TAIL_WORDS>;
using DenseDecodeMemory = DecodeShared<8, DENSE_TAIL_WORDS>;

// A piece of a stored chunk: the same copy in both directions.
SIMT_DEVICE void copy_piece(uint8_t *to, const uint8_t *from, uint64_t length, uint32_t piece,
                            uint32_t thread, uint32_t threads)
{
    const uint64_t first = uint64_t(piece) * STORED_TILE_BYTES;
    const uint32_t bytes =
            length - first < STORED_TILE_BYTES ? uint32_t(length - first) : STORED_TILE_BYTES;
    to += first;
    from += first;
    uint32_t done = 0;
    if (((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) & 15) == 0) {
        done = bytes / 16 * 16;
        for (uint32_t i = thread; i < bytes / 16; i += threads)
            simt::store_stream(reinterpret_cast<U32x4 *>(to) + i,
                               simt::load_stream(reinterpret_cast<const U32x4 *>(from) + i));
    }
    for (uint32_t i = done + thread; i < bytes; i += threads)
        to[i] = from[i];
}

struct StoredMemory {
    Job job, next;
    uint32_t status;
};

template <class Barrier>
SIMT_DEVICE void encode_stored(const Launch &launch, const Job &job, uint32_t thread,
                               Barrier barrier)
{
    uint64_t begun_before = 0;
    if (thread == 0 && job.progress() != nullptr)
        begun_before = begin_tile(job.state(), 0);
    copy_piece(job.mantissa(), job.chunk_data(), job.length(), job.tile(), thread, TILE_THREADS);
    if (job.tile() == 0 && thread == 0)
        write_header(job, format::DTYPE_BYTES, format::SHAPE_STORED, false, 1, 0);
    if (job.progress() == nullptr)
        return;
    barrier.sync();
    if (thread != 0)
        return;
    const bool last = is_last_to_begin(begun_before, job.tiles());
    if (last)
        job.state()->begun = 0;
    encode_done(job, last, 0, 0, launch.seq);
}

template <class Barrier>
SIMT_DEVICE void decode_stored(const Launch &launch, const Job &job, uint32_t &shared_status,
                               uint32_t thread, Barrier barrier)
{
    uint64_t begun_before = 0;
    if (thread == 0) {
        if (job.progress() != nullptr)
            begun_before = begin_tile(job.state(), 0);
        const auto *const header = reinterpret_cast<const uint64_t *>(job.chunk());
        const uint64_t word = simt::load_hostile(header);
        const bool as_expected = (word & ~OPTIONAL_FLAGS) ==
                                 header_word(format::DTYPE_BYTES, format::SHAPE_STORED, false);
        // No tail; and the room holds the original, or the launcher would have refused the item.
        const bool ok = as_expected && simt::load_hostile(header + 1) == job.length() &&
                        simt::load_hostile(header + 2) == 0;
        shared_status = ok ? DONE : header_status(word, as_expected);
    }
    barrier.sync();
    const uint32_t status = shared_status;
    if (status == DONE)
        copy_piece(job.chunk_data(), job.mantissa(), job.length(), job.tile(), thread,
                   TILE_THREADS);
    if (job.progress() == nullptr)
        return;
    barrier.sync();
    if (thread == 0)
        decode_done(job, is_last_to_begin(begun_before, job.tiles()), status, launch.seq);
}

// A worker's tiles: one in `workers`. While it has a tile it finds its next job.
template <class Shared, class Barrier, class Clear, class One>
SIMT_DEVICE void take_turns(const Launch &launch, uint32_t worker, uint32_t workers, Shared &shared,
                            uint32_t thread, Barrier barrier, Clear clear, One one)
{
    if (worker >= launch.tiles)
        return;
    if (thread < simt::LANES)
        leave_job(launch, worker, shared.job);
    for (uint32_t tile = worker;;) {
        clear();
        barrier.sync();
        if (launch.items == 1 && shared.job.exists == 0)
            return; // a probe found another type for the one item that there is
        const uint32_t next = launch.tiles - tile > workers ? tile + workers : launch.tiles;
        one(next);
        if (next == launch.tiles)
            return;
        tile = next;
        barrier.sync(); // shared memory is the former tile's until all are through with it
        static_assert(sizeof(Job) / 4 <= TILE_THREADS);
        if (thread < sizeof(Job) / 4)
            reinterpret_cast<uint32_t *>(&shared.job)[thread] =
                    reinterpret_cast<const uint32_t *>(&shared.next)[thread];
    }
}

template <class T, bool kWholeOnly, class Shared, class Barrier>
SIMT_DEVICE void encode_all(const Launch &launch, uint32_t worker, uint32_t workers, Shared &shared,
                            uint32_t thread, Barrier barrier)
{
    start_table(shared.compress, MOVE_TABLES.compress, thread);
    auto clear = [&] { clear_shared<T::THREADS, most_tail_words<T>()>(shared, thread); };
    take_turns(launch, worker, workers, shared, thread, barrier, clear, [&](uint32_t next) {
        if (shared.job.exists == 0)
            return leave_next_job(launch, next, shared.next, thread / simt::LANES);
        encode_any_extent<T, kWholeOnly>(launch, next, shared, thread, barrier);
    });
    simt::copy_async_wait(); // who had nothing to do did not
}

template <class T, bool kWholeOnly, class Shared, class Barrier>
SIMT_DEVICE void decode_all(const Launch &launch, uint32_t worker, uint32_t workers, Shared &shared,
                            uint32_t thread, Barrier barrier)
{
    start_table(shared.expand, MOVE_TABLES.expand, thread);
    take_turns(
            launch, worker, workers, shared, thread, barrier, [] {},
            [&](uint32_t next) {
                const Job &job = shared.job;
                auto start = [&] {
                    leave_next_job(launch, next, shared.next, thread / simt::LANES);
                };
                if (!kWholeOnly && job.left() == 0)
                    return decode_empty<T>(launch, next, shared, thread);
                if (kWholeOnly ||
                    (job.left() >= T::VALUES && (T::SHAPE == format::SHAPE_DENSE || !job.small())))
                    decode_tile<T, true, true>(launch, job, next, shared, thread, barrier, start);
                else if constexpr (!kWholeOnly)
                    decode_tile<T, false, true>(launch, job, next, shared, thread, barrier, start);
            });
    simt::copy_async_wait(); // who had nothing to do did not
}

// A block a tile of one item, all of them whole; decode: and aligned to 16 bytes.
template <class T, class Shared, class Barrier>
SIMT_DEVICE void encode_whole(const Launch &launch, uint32_t tile, Shared &shared, uint32_t thread,
                              Barrier barrier)
{
    const InlineJob<T> job(launch, tile);
    encode_tile<T, true, false>(launch, job, launch.tiles, shared, thread,
                                is_aligned_16(job.data()) ? Reach::ALIGNED : Reach::SHIFTED,
                                barrier, [&] {
                                    start_table(shared.compress, MOVE_TABLES.compress, thread);
                                    clear_shared<T::THREADS, most_tail_words<T>()>(shared, thread);
                                    barrier.sync();
                                });
}

template <class T, class Shared, class Barrier>
SIMT_DEVICE void decode_whole(const Launch &launch, uint32_t tile, Shared &shared, uint32_t thread,
                              Barrier barrier)
{
    decode_tile<T, true, false>(launch, InlineJob<T>(launch, tile), launch.tiles, shared, thread,
                                barrier,
                                [&] { start_table(shared.expand, MOVE_TABLES.expand, thread); });
}

} // namespace zip::gpu

// The kernels of one coding, for a source file that has ZIP_KERNEL_TYPE (bf16), ZIP_KERNEL_DTYPE
// (BF16) and ZIP_KERNEL_BLOCKS (of TILE_THREADS threads, that shall fit a multiprocessor: 8 leave
// 64 registers a thread).
#ifdef ZIP_KERNEL_TYPE
#define ZIP_JOIN_(a, b, c) a##b##_##c
#define ZIP_JOIN(a, b, c) ZIP_JOIN_(a, b, c)
#define ZIP_DTYPE_(type) zip::format::DTYPE_##type
#define ZIP_DTYPE(type) ZIP_DTYPE_(type)

#define ZIP_KERNEL_(direction, Memory, prefix, shape, SHAPE, whole_only, threads, blocks)          \
    SIMT_KERNEL(ZIP_JOIN(zip_##direction##_##prefix, ZIP_KERNEL_TYPE, shape), threads, blocks)     \
    {                                                                                              \
        using namespace zip;                                                                       \
        SIMT_SHARED(gpu::Memory, shared);                                                          \
        gpu::direction##_all<gpu::TileTraits<ZIP_DTYPE(ZIP_KERNEL_DTYPE), format::SHAPE>,          \
                             whole_only>(launch, simt::block_index(), simt::block_count(), shared, \
                                         simt::thread_index(), simt::BlockBarrier{});              \
    }
#define ZIP_KERNEL_FEW_(direction, Memory, prefix, shape, SHAPE, whole_only)                       \
    SIMT_KERNEL(ZIP_JOIN(zip_##direction##_##prefix, ZIP_KERNEL_TYPE, shape),                      \
                zip::simt::FEW_THREADS, 1)                                                         \
    {                                                                                              \
        using namespace zip;                                                                       \
        SIMT_DYNAMIC_SHARED(gpu::Memory, memory);                                                  \
        const uint32_t workers =                                                                   \
                simt::thread_count() / gpu::TILE_THREADS; /* as many as there was memory for */    \
        const uint32_t own = simt::thread_index() / gpu::TILE_THREADS;                             \
        gpu::direction##_all<gpu::TileTraits<ZIP_DTYPE(ZIP_KERNEL_DTYPE), format::SHAPE>,          \
                             whole_only>(launch, own * simt::block_count() + simt::block_index(),  \
                                         simt::block_count() * workers, memory[own],               \
                                         simt::thread_index() % gpu::TILE_THREADS,                 \
                                         simt::WorkerBarrier{1 + own, gpu::TILE_THREADS});         \
    }
// For every type all shapes but columns, which fp64 does not have. What is for whole tiles alone is
// not for fp64 either, which takes a compiler long and is rare: ZIP_KERNEL_COMMON is a type's that
// is not fp64.
#define ZIP_KERNELS_ANY(direction, Memory, shape, SHAPE)                                           \
    ZIP_KERNEL_(direction, Memory, , shape, SHAPE, false, zip::gpu::TILE_THREADS,                  \
                ZIP_KERNEL_BLOCKS)                                                                 \
    ZIP_KERNEL_FEW_(direction, Memory, few_, shape, SHAPE, false)
#define ZIP_KERNEL_WHOLE_(direction, Memory, shape, SHAPE, threads, blocks)                        \
    SIMT_KERNEL(ZIP_JOIN(zip_##direction##_whole_, ZIP_KERNEL_TYPE, shape), threads, blocks)       \
    {                                                                                              \
        using namespace zip;                                                                       \
        SIMT_SHARED(gpu::Memory, shared);                                                          \
        gpu::direction##_whole<gpu::TileTraits<ZIP_DTYPE(ZIP_KERNEL_DTYPE), format::SHAPE>>(       \
                launch, simt::block_index(), shared, simt::thread_index(), simt::BlockBarrier{});  \
    }

ZIP_KERNELS_ANY(encode, EncodeMemory, 22228, SHAPE_22228)
ZIP_KERNELS_ANY(encode, EncodeMemory, 11238, SHAPE_11238)
ZIP_KERNELS_ANY(encode, EncodeMemory, 38, SHAPE_38)
ZIP_KERNELS_ANY(decode, DecodeMemory, 22228, SHAPE_22228)
ZIP_KERNELS_ANY(decode, DecodeMemory, 11238, SHAPE_11238)
ZIP_KERNELS_ANY(decode, DecodeMemory, 38, SHAPE_38)
ZIP_KERNEL_(encode, DenseEncodeMemory, , dense, SHAPE_DENSE, false, zip::gpu::DENSE_TILE_THREADS,
            ZIP_KERNEL_BLOCKS / 2)
ZIP_KERNEL_(decode, DenseDecodeMemory, , dense, SHAPE_DENSE, false, zip::gpu::DENSE_TILE_THREADS,
            ZIP_KERNEL_BLOCKS / 2)
#ifdef ZIP_KERNEL_COMMON
ZIP_KERNELS_ANY(encode, EncodeMemory, columns, SHAPE_COLUMNS)
ZIP_KERNELS_ANY(decode, DecodeMemory, columns, SHAPE_COLUMNS)
SIMT_KERNEL(ZIP_JOIN(zip_, columns, ZIP_KERNEL_TYPE), zip::gpu::COLUMNS_THREADS, 2)
{
    using namespace zip;
    SIMT_SHARED(gpu::ColumnsMemory, shared);
    for (uint32_t i = simt::block_index(); i < launch.chunks; i += simt::block_count())
        gpu::write_bases_of<gpu::TileTraits<ZIP_DTYPE(ZIP_KERNEL_DTYPE), format::SHAPE_COLUMNS>>(
                launch, i, shared, simt::thread_index());
}
// H200, bf16, 256 MiB: 7 blocks are 6% faster than 8 for the encoder, whose tiles wait for each
// other less; 6% slower for the decoder.
constexpr uint32_t ENCODE_WHOLE_BLOCKS = 7;
ZIP_KERNEL_WHOLE_(encode, EncodeMemory, 22228, SHAPE_22228, zip::gpu::TILE_THREADS,
                  ENCODE_WHOLE_BLOCKS)
ZIP_KERNEL_WHOLE_(encode, EncodeMemory, 11238, SHAPE_11238, zip::gpu::TILE_THREADS,
                  ENCODE_WHOLE_BLOCKS)
ZIP_KERNEL_WHOLE_(encode, EncodeMemory, 38, SHAPE_38, zip::gpu::TILE_THREADS, ENCODE_WHOLE_BLOCKS)
ZIP_KERNEL_WHOLE_(decode, DecodeMemory, 22228, SHAPE_22228, zip::gpu::TILE_THREADS,
                  ZIP_KERNEL_BLOCKS)
ZIP_KERNEL_WHOLE_(decode, DecodeMemory, 11238, SHAPE_11238, zip::gpu::TILE_THREADS,
                  ZIP_KERNEL_BLOCKS)
ZIP_KERNEL_WHOLE_(decode, DecodeMemory, 38, SHAPE_38, zip::gpu::TILE_THREADS, ZIP_KERNEL_BLOCKS)
ZIP_KERNEL_WHOLE_(encode, EncodeMemory, columns, SHAPE_COLUMNS, zip::gpu::TILE_THREADS,
                  ENCODE_WHOLE_BLOCKS)
ZIP_KERNEL_WHOLE_(decode, DecodeMemory, columns, SHAPE_COLUMNS, zip::gpu::TILE_THREADS,
                  ZIP_KERNEL_BLOCKS)
ZIP_KERNEL_WHOLE_(encode, DenseEncodeMemory, dense, SHAPE_DENSE, zip::gpu::DENSE_TILE_THREADS,
                  ZIP_KERNEL_BLOCKS / 2)
ZIP_KERNEL_WHOLE_(decode, DenseDecodeMemory, dense, SHAPE_DENSE, zip::gpu::DENSE_TILE_THREADS,
                  ZIP_KERNEL_BLOCKS / 2)
ZIP_KERNEL_FEW_(encode, EncodeMemory, few_whole_, 22228, SHAPE_22228, true)
ZIP_KERNEL_FEW_(encode, EncodeMemory, few_whole_, 38, SHAPE_38, true)
ZIP_KERNEL_FEW_(decode, DecodeMemory, few_whole_, 22228, SHAPE_22228, true)
ZIP_KERNEL_FEW_(decode, DecodeMemory, few_whole_, 38, SHAPE_38, true)
#endif
#endif

// The kernels of stored chunks.
#ifdef ZIP_KERNEL_STORED
SIMT_KERNEL(zip_encode_bytes, zip::gpu::TILE_THREADS, ZIP_KERNEL_BLOCKS)
{
    using namespace zip;
    SIMT_SHARED(gpu::StoredMemory, shared);
    const uint32_t thread = simt::thread_index();
    gpu::take_turns(
            launch, simt::block_index(), simt::block_count(), shared, thread, simt::BlockBarrier{},
            [] {},
            [&](uint32_t next) {
                gpu::leave_next_job(launch, next, shared.next, thread / simt::LANES);
                if (shared.job.exists != 0)
                    gpu::encode_stored(launch, shared.job, thread, simt::BlockBarrier{});
            });
}

SIMT_KERNEL(zip_decode_bytes, zip::gpu::TILE_THREADS, ZIP_KERNEL_BLOCKS)
{
    using namespace zip;
    SIMT_SHARED(gpu::StoredMemory, shared);
    const uint32_t thread = simt::thread_index();
    gpu::take_turns(
            launch, simt::block_index(), simt::block_count(), shared, thread, simt::BlockBarrier{},
            [] {},
            [&](uint32_t next) {
                gpu::leave_next_job(launch, next, shared.next, thread / simt::LANES);
                gpu::decode_stored(launch, shared.job, shared.status, thread, simt::BlockBarrier{});
            });
}

SIMT_KERNEL(zip_probe, zip::gpu::PROBE_THREADS, 1)
{
    using namespace zip;
    SIMT_SHARED(gpu::ProbeMemory, shared);
    for (uint32_t i = simt::block_index(); i < launch.items; i += simt::block_count()) {
        gpu::probe_item(launch, i, shared, simt::thread_index(), simt::BlockBarrier{});
        simt::BlockBarrier{}.sync();
    }
}
#endif

#endif
