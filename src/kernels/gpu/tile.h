// SPDX-License-Identifier: BSD-3-Clause
// Which tile of which chunk a worker has, and where its parts are. One lane group finds that out
// and leaves it in shared memory for all: registers are short, and so are issue slots. Device code.
#ifndef ZIP_KERNELS_GPU_TILE_H
#define ZIP_KERNELS_GPU_TILE_H

#include <cstdint>

#include "kernels/codec.h"
#include "kernels/format.h"
#include "kernels/gpu/job.h"
#include "kernels/gpu/simt.h"

namespace zip::gpu {

// The item that has tile `tile` of the launch: the last one that does not begin after it. A lane
// group's: all lanes look at once, 32 places a step.
SIMT_DEVICE const Item &find_item(const Launch &launch, uint32_t tile)
{
    const Item *const items = launch.table != nullptr ? launch.table : launch.inline_items;
    uint32_t first = 0, count = launch.items;
    while (count > 1) {
        const uint32_t step = (count + simt::LANES - 1) / simt::LANES;
        const uint32_t at = simt::lane_index() * step;
        const uint32_t below = simt::ballot(at < count && items[first + at].first_tile <= tile);
        const uint32_t last = simt::popcount(below) - 1; // lane 0's item does not begin after it
        first += last * step;
        count = count - last * step < step ? count - last * step : step;
    }
    return items[first];
}

// What a worker knows of its tile, wherever that is: Derived has word_of().
template <class Derived>
struct JobWords {
    SIMT_DEVICE uint64_t of(JobWord w) const
    {
        return static_cast<const Derived *>(this)->word_of(w);
    }
    template <class P>
    SIMT_DEVICE P *pointer(JobWord w) const
    {
        return reinterpret_cast<P *>(of(w));
    }
    SIMT_DEVICE uint8_t *data() const { return pointer<uint8_t>(JOB_DATA); }
    SIMT_DEVICE uint8_t *mantissa() const { return pointer<uint8_t>(JOB_MANTISSA); }
    SIMT_DEVICE uint8_t *low() const { return pointer<uint8_t>(JOB_LOW); }
    SIMT_DEVICE uint8_t *low2() const { return pointer<uint8_t>(JOB_LOW2); }
    SIMT_DEVICE uint32_t *level1() const { return pointer<uint32_t>(JOB_LEVEL1); }
    SIMT_DEVICE uint16_t *counts() const { return pointer<uint16_t>(JOB_COUNTS); }
    SIMT_DEVICE uint64_t *tile_header() const { return pointer<uint64_t>(JOB_TILE_HEADER); }
    SIMT_DEVICE uint32_t *symbols() const { return pointer<uint32_t>(JOB_SYMBOLS); }
    SIMT_DEVICE uint32_t *tail() const { return pointer<uint32_t>(JOB_TAIL); }
    SIMT_DEVICE uint8_t *chunk() const { return pointer<uint8_t>(JOB_CHUNK); }
    SIMT_DEVICE uint8_t *chunk_data() const { return pointer<uint8_t>(JOB_CHUNK_DATA); }
    SIMT_DEVICE ChunkState *state() const { return pointer<ChunkState>(JOB_STATE); }
    SIMT_DEVICE uint64_t *progress() const { return pointer<uint64_t>(JOB_PROGRESS); }
    SIMT_DEVICE uint64_t length() const { return of(JOB_LENGTH); }
    SIMT_DEVICE uint64_t tail_room() const { return of(JOB_TAIL_ROOM); }
    SIMT_DEVICE uint32_t tiles() const { return uint32_t(of(JOB_TILES)); }
    SIMT_DEVICE uint64_t left() const { return of(JOB_LEFT); }
    SIMT_DEVICE uint32_t tile() const { return uint32_t(of(JOB_TILE)); }
    SIMT_DEVICE bool last() const { return (of(JOB_FLAGS) & JOB_LAST) != 0; }
    SIMT_DEVICE bool small() const { return (of(JOB_FLAGS) & JOB_SMALL) != 0; }
    SIMT_DEVICE bool add() const { return (of(JOB_FLAGS) & JOB_ADD) != 0; }
};

// Where a tile of a launch is.
struct Place {
    uint32_t chunk, tile, last; // of the item; of the chunk; 1: the item's last chunk

    SIMT_DEVICE Place(const Item &item, uint32_t launch_tile)
    {
        const uint32_t of_item = launch_tile - item.first_tile, chunk_tiles = item.chunk_tiles,
                       chunk_count = item.chunk_count, log2 = item.chunk_log2;
        chunk = log2 < 32 ? of_item >> log2 : of_item / chunk_tiles;
        chunk = chunk < chunk_count ? chunk : chunk_count - 1;
        last = chunk + 1 == chunk_count;
        tile = of_item - chunk * chunk_tiles;
    }
};

// In the kernel's argument, of the one item of a launch of whole tiles: nobody waits for another
// thread or for memory, and most of it is the same for all threads of a block.
template <class T>
struct InlineJob : JobWords<InlineJob<T>> {
    const Item &item;
    Place place;

    SIMT_DEVICE InlineJob(const Launch &launch, uint32_t tile)
        : item(launch.inline_items[0]), place(item, tile)
    {
    }
    SIMT_DEVICE uint64_t word_of(JobWord w) const
    {
        return item.value[place.last][w] +
               (steps_by_chunk(w) ? place.chunk * item.chunk_step[chunk_step_of(w)] : 0) +
               place.tile * tile_step(T::CODING, w);
    }
};

// In shared memory.
struct Job : JobWords<Job> {
    uint64_t word[JOB_WORDS];
    uint32_t exists; // 0: nothing to do

    SIMT_DEVICE uint64_t word_of(JobWord w) const { return word[w]; }
};
static_assert(JOB_WORDS < simt::LANES);

// Leaves a worker's job in shared memory; a lane group's, a lane a word. A barrier has to follow.
SIMT_DEVICE void leave_job(const Launch &launch, uint32_t tile, Job &job)
{
    const uint32_t lane = simt::lane_index();
    const Item &item = find_item(launch, tile);
    const Place place(item, tile);
    if (lane < JOB_WORDS) {
        job.word[lane] = item.value[place.last][lane] + place.chunk * item.chunk_step[lane] +
                         place.tile * item.tile_step[lane];
    } else if (lane == JOB_WORDS) {
        const auto *const probe = static_cast<const zip_probe_t *>(item.probe);
        job.exists =
                probe == nullptr || (uint32_t(probe->dtype) == item.dtype &&
                                     (item.dtype == format::DTYPE_BYTES || item.any_shape != 0 ||
                                      uint32_t(probe->shape) == item.shape));
    }
}

// Likewise for the tile that the worker has next, by its second lane group.
SIMT_DEVICE void leave_next_job(const Launch &launch, uint32_t tile, Job &job, uint32_t group)
{
    if (group == 1 && tile < launch.tiles)
        leave_job(launch, tile, job);
}

// Brings the first `bytes` bytes of a part of the next tile to L2: a hint, after leave_next_job()
// and a barrier.
SIMT_DEVICE void prefetch_part(const Launch &launch, uint32_t tile, const Job &job, JobWord part,
                               uint32_t bytes, uint32_t thread, uint32_t threads)
{
    constexpr uint32_t LINE = 128;
    // Ragged tiles are left out: the part may end before.
    if (tile >= launch.tiles || job.tile() + 1 >= job.tiles())
        return;
    SIMT_UNROLL
    for (uint32_t at = 0; at < bytes; at += threads * LINE) {
        if (at + thread * LINE < bytes)
            simt::prefetch(job.pointer<uint8_t>(part) + at + thread * LINE);
    }
}

} // namespace zip::gpu
#endif
