// SPDX-License-Identifier: BSD-3-Clause
// The kernels (job.h names them): which code a worker runs for its tile. Device code.
#ifndef ZIP_KERNELS_GPU_KERNELS_H
#define ZIP_KERNELS_GPU_KERNELS_H

#include <cstdint>

#include "kernels/gpu/decode.h"
#include "kernels/gpu/encode.h"
#include "kernels/gpu/job.h"
#include "kernels/gpu/probe.h"
#include "kernels/gpu/tile.h"

namespace zip::gpu {

// Most words of a part of the tail: raw tiles of the type with the widest exponents.
constexpr uint32_t TAIL_WORDS = most_tail_words<TileTraits<format::DTYPE_FP64, format::SHAPE_11238>>();
constexpr uint32_t DENSE_TAIL_WORDS = most_tail_words<TileTraits<format::DTYPE_FP64, format::SHAPE_DENSE>>();
using EncodeMemory = EncodeShared<4, TAIL_WORDS>;
using DecodeMemory = DecodeShared<4, TAIL_WORDS>;
using DenseEncodeMemory = EncodeShared<8, DENSE_TAIL_WORDS>;
using DenseDecodeMemory = DecodeShared<8, DENSE_TAIL_WORDS>;

// A piece of a stored chunk: the same copy in both directions.
SIMT_DEVICE void copy_piece(uint8_t *to, const uint8_t *from, uint64_t length, uint32_t piece, uint32_t thread, uint32_t threads)
{
    const uint64_t first = uint64_t(piece) * STORED_TILE_BYTES;
    const uint32_t bytes = length - first < STORED_TILE_BYTES ? uint32_t(length - first) : STORED_TILE_BYTES;
    to += first;
    from += first;
    uint32_t done = 0;
    if (((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) & 15) == 0) {
        done = bytes / 16 * 16;
        for (uint32_t i = thread; i < bytes / 16; i += threads)
            simt::store_stream(reinterpret_cast<U32x4 *>(to) + i, simt::load_stream(reinterpret_cast<const U32x4 *>(from) + i));
    }
    for (uint32_t i = done + thread; i < bytes; i += threads)
        to[i] = from[i];
}

struct StoredMemory {
    Job job;
    uint32_t status;
};

template <class Barrier>
SIMT_DEVICE void encode_stored(const Launch &launch, const Job &job, uint32_t thread, uint32_t threads, Barrier barrier)
{
    copy_piece(job.mantissa(), job.chunk_data, job.length, job.tile, thread, threads);
    if (job.tile == 0 && thread == 0)
        write_header(job, format::DTYPE_BYTES, format::SHAPE_STORED, false, 1, 0);
    if (job.progress == nullptr)
        return;
    barrier.sync();
    if (thread == 0)
        encode_done(job, 0, launch.seq);
}

template <class Barrier>
SIMT_DEVICE void decode_stored(const Launch &launch, const Job &job, uint32_t &shared_status, uint32_t thread, uint32_t threads,
                               Barrier barrier)
{
    if (thread == 0) {
        const auto *const header = reinterpret_cast<const uint64_t *>(job.chunk);
        const uint64_t word = simt::load_hostile(header);
        const bool as_expected = (word & ~OPTIONAL_FLAGS) == expected_header(format::DTYPE_BYTES, format::SHAPE_STORED, false);
        // No tail; and the room holds the original, or the launcher would have refused the item.
        const bool ok = as_expected && simt::load_hostile(header + 1) == job.length && simt::load_hostile(header + 2) == 0;
        shared_status = ok ? DONE : header_status(word, as_expected);
    }
    barrier.sync();
    const uint32_t status = shared_status;
    if (status == DONE)
        copy_piece(job.chunk_data, job.mantissa(), job.length, job.tile, thread, threads);
    if (job.progress == nullptr)
        return;
    barrier.sync();
    if (thread == 0)
        decode_done(job, status, launch.seq);
}

// Calls visit.template operator()<Traits>() with the traits of the coding.
template <uint8_t kDtype, bool kDense, class Visit>
SIMT_DEVICE void with_shape(uint32_t shape, Visit visit)
{
    if constexpr (kDense)
        visit.template operator()<TileTraits<kDtype, format::SHAPE_DENSE>>();
#ifdef ZIP_ONLY
    else visit.template operator()<TileTraits<kDtype, ZIP_ONLY>>();
#else
    else if (shape == format::SHAPE_22228)
        visit.template operator()<TileTraits<kDtype, format::SHAPE_22228>>();
    else if (shape == format::SHAPE_11238)
        visit.template operator()<TileTraits<kDtype, format::SHAPE_11238>>();
    else
        visit.template operator()<TileTraits<kDtype, format::SHAPE_38>>();
#endif
}

template <uint8_t kDtype, bool kDense, class Shared, class Barrier>
SIMT_DEVICE void encode_one(const Launch &launch, uint32_t tile, Shared &shared, uint32_t thread, Barrier barrier)
{
    constexpr uint32_t THREADS = kDense ? DENSE_TILE_THREADS : TILE_THREADS;
    prefetch_data<THREADS>(launch, tile, thread);
    if (thread < simt::LANES)
        leave_job(launch, tile, shared.job);
    clear_shared<THREADS, most_tail_words<TileTraits<kDtype, kDense ? format::SHAPE_DENSE : format::SHAPE_11238>>()>(shared, thread);
    barrier.sync();
    if (shared.job.exists == 0)
        return;
    with_shape<kDtype, kDense>(shared.job.shape, [&]<class T>() { encode_any_extent<T>(launch, shared, thread, barrier); });
}

template <uint8_t kDtype, bool kDense, class Shared, class Barrier>
SIMT_DEVICE void decode_one(const Launch &launch, uint32_t tile, Shared &shared, uint32_t thread, Barrier barrier)
{
    if (thread < simt::LANES)
        leave_job(launch, tile, shared.job);
    barrier.sync();
    with_shape<kDtype, kDense>(shared.job.shape, [&]<class T>() {
        if (shared.job.left >= T::VALUES && (kDense || shared.job.small == 0))
            decode_tile<T, true>(launch, shared, thread, barrier);
        else
            decode_tile<T, false>(launch, shared, thread, barrier);
    });
}

// All tiles of a worker that takes one in `workers`.
template <class Barrier, class One>
SIMT_DEVICE void take_turns(const Launch &launch, uint32_t worker, uint32_t workers, Barrier barrier, One one)
{
    for (uint32_t tile = worker; tile < launch.tiles; tile += workers) {
        if (tile != worker)
            barrier.sync(); // shared memory is the former tile's until all are through with it
        one(tile);
    }
}

} // namespace zip::gpu

#ifdef ZIP_KERNEL_DTYPE // name of the type in lower case and in upper case
#define ZIP_CONCAT_(a, b) a##b
#define ZIP_CONCAT(a, b) ZIP_CONCAT_(a, b)
#define ZIP_KERNEL_NAME(name) ZIP_CONCAT(name, ZIP_KERNEL_DTYPE)
#define ZIP_DTYPE_VALUE ZIP_CONCAT(zip::format::DTYPE_, ZIP_KERNEL_DTYPE_UPPER)
#endif

#ifdef ZIP_KERNEL_DTYPE
SIMT_KERNEL(ZIP_KERNEL_NAME(zip_encode_), zip::gpu::TILE_THREADS, ZIP_BLOCKS)
{
    using namespace zip;
    SIMT_SHARED(gpu::EncodeMemory, shared);
    const uint32_t thread = simt::thread_index();
    gpu::load_table(shared.compress, reinterpret_cast<const simt::U32x4 *>(gpu::MOVE_TABLES.compress), thread);
    gpu::take_turns(launch, simt::block_index(), simt::block_count(), simt::BlockBarrier{}, [&](uint32_t tile) {
        gpu::encode_one<ZIP_DTYPE_VALUE, false>(launch, tile, shared, thread, simt::BlockBarrier{});
    });
}

SIMT_KERNEL(ZIP_KERNEL_NAME(zip_decode_), zip::gpu::TILE_THREADS, ZIP_BLOCKS)
{
    using namespace zip;
    SIMT_SHARED(gpu::DecodeMemory, shared);
    const uint32_t thread = simt::thread_index();
    gpu::load_table(shared.expand, reinterpret_cast<const simt::U32x4 *>(gpu::MOVE_TABLES.expand), thread);
    gpu::take_turns(launch, simt::block_index(), simt::block_count(), simt::BlockBarrier{}, [&](uint32_t tile) {
        gpu::decode_one<ZIP_DTYPE_VALUE, false>(launch, tile, shared, thread, simt::BlockBarrier{});
    });
}

#ifdef ZIP_FEW
SIMT_KERNEL(ZIP_KERNEL_NAME(zip_encode_few_), zip::simt::FEW_THREADS, 1)
{
    using namespace zip;
    SIMT_DYNAMIC_SHARED(gpu::EncodeMemory, memory);
    const uint32_t own = simt::thread_index() / gpu::TILE_THREADS, thread = simt::thread_index() % gpu::TILE_THREADS;
    const uint32_t workers = simt::thread_count() / gpu::TILE_THREADS;
    const simt::WorkerBarrier barrier{1 + own, gpu::TILE_THREADS};
    gpu::EncodeMemory &shared = memory[own];
    gpu::load_table(shared.compress, reinterpret_cast<const simt::U32x4 *>(gpu::MOVE_TABLES.compress), thread);
    gpu::take_turns(launch, own * simt::block_count() + simt::block_index(), simt::block_count() * workers, barrier, [&](uint32_t tile) {
        gpu::encode_one<ZIP_DTYPE_VALUE, false>(launch, tile, shared, thread, barrier);
    });
}

SIMT_KERNEL(ZIP_KERNEL_NAME(zip_decode_few_), zip::simt::FEW_THREADS, 1)
{
    using namespace zip;
    SIMT_DYNAMIC_SHARED(gpu::DecodeMemory, memory);
    const uint32_t own = simt::thread_index() / gpu::TILE_THREADS, thread = simt::thread_index() % gpu::TILE_THREADS;
    const uint32_t workers = simt::thread_count() / gpu::TILE_THREADS;
    const simt::WorkerBarrier barrier{1 + own, gpu::TILE_THREADS};
    gpu::DecodeMemory &shared = memory[own];
    gpu::load_table(shared.expand, reinterpret_cast<const simt::U32x4 *>(gpu::MOVE_TABLES.expand), thread);
    gpu::take_turns(launch, own * simt::block_count() + simt::block_index(), simt::block_count() * workers, barrier, [&](uint32_t tile) {
        gpu::decode_one<ZIP_DTYPE_VALUE, false>(launch, tile, shared, thread, barrier);
    });
}
#endif

#ifdef ZIP_DENSE
SIMT_KERNEL(ZIP_KERNEL_NAME(zip_encode_dense_), zip::gpu::DENSE_TILE_THREADS, ZIP_BLOCKS / 2)
{
    using namespace zip;
    SIMT_SHARED(gpu::DenseEncodeMemory, shared);
    const uint32_t thread = simt::thread_index();
    gpu::load_table(shared.compress, reinterpret_cast<const simt::U32x4 *>(gpu::MOVE_TABLES.compress), thread);
    gpu::take_turns(launch, simt::block_index(), simt::block_count(), simt::BlockBarrier{}, [&](uint32_t tile) {
        gpu::encode_one<ZIP_DTYPE_VALUE, true>(launch, tile, shared, thread, simt::BlockBarrier{});
    });
}

SIMT_KERNEL(ZIP_KERNEL_NAME(zip_decode_dense_), zip::gpu::DENSE_TILE_THREADS, ZIP_BLOCKS / 2)
{
    using namespace zip;
    SIMT_SHARED(gpu::DenseDecodeMemory, shared);
    const uint32_t thread = simt::thread_index();
    gpu::load_table(shared.expand, reinterpret_cast<const simt::U32x4 *>(gpu::MOVE_TABLES.expand), thread);
    gpu::take_turns(launch, simt::block_index(), simt::block_count(), simt::BlockBarrier{}, [&](uint32_t tile) {
        gpu::decode_one<ZIP_DTYPE_VALUE, true>(launch, tile, shared, thread, simt::BlockBarrier{});
    });
}
#endif
#endif

#ifdef ZIP_STORED
SIMT_KERNEL(zip_encode_bytes, zip::gpu::TILE_THREADS, ZIP_BLOCKS)
{
    using namespace zip;
    SIMT_SHARED(gpu::StoredMemory, shared);
    gpu::take_turns(launch, simt::block_index(), simt::block_count(), simt::BlockBarrier{}, [&](uint32_t tile) {
        if (simt::thread_index() < simt::LANES)
            gpu::leave_job(launch, tile, shared.job);
        simt::BlockBarrier{}.sync();
        if (shared.job.exists != 0)
            gpu::encode_stored(launch, shared.job, simt::thread_index(), gpu::TILE_THREADS, simt::BlockBarrier{});
    });
}

SIMT_KERNEL(zip_decode_bytes, zip::gpu::TILE_THREADS, ZIP_BLOCKS)
{
    using namespace zip;
    SIMT_SHARED(gpu::StoredMemory, shared);
    gpu::take_turns(launch, simt::block_index(), simt::block_count(), simt::BlockBarrier{}, [&](uint32_t tile) {
        if (simt::thread_index() < simt::LANES)
            gpu::leave_job(launch, tile, shared.job);
        simt::BlockBarrier{}.sync();
        gpu::decode_stored(launch, shared.job, shared.status, simt::thread_index(), gpu::TILE_THREADS, simt::BlockBarrier{});
    });
}
#endif

#endif
