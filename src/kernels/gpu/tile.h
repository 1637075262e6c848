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

// What items in the argument and in the table have, each in its way: a pointer that is to one or
// the other would make all accesses slower.
SIMT_DEVICE const ItemLayout &layout_of(const Launch &, const InlineItem &item)
{
    return item.layout;
}
SIMT_DEVICE const ItemLayout &layout_of(const Launch &launch, const TableItem &item)
{
    return launch.layouts[item.place.layout];
}
// What a layout's word has yet to be added to.
SIMT_DEVICE uint64_t address_in(const InlineItem &, uint32_t)
{
    return 0;
}
SIMT_DEVICE uint64_t address_in(const TableItem &item, uint32_t word)
{
    return item.address[address_of(word)];
}

// Whether there is anything to do for it: not if a probe found another type or shape.
SIMT_DEVICE bool item_exists(const ItemPlace &place, const ItemLayout &layout)
{
    const auto *const probe = static_cast<const zip_probe_t *>(place.probe);
    return probe == nullptr || (uint32_t(probe->dtype) == layout.dtype &&
                                (layout.dtype == format::DTYPE_BYTES || layout.any_shape != 0 ||
                                 uint32_t(probe->shape) == layout.shape));
}

// The item that has tile or chunk `number` of the launch: the last one that does not begin after
// it. A lane group's: all lanes look at once, 32 places a step.
template <uint32_t ItemPlace::*kFirst, class AnyItem>
SIMT_DEVICE const AnyItem &find_item(const AnyItem *items, uint32_t count, uint32_t number)
{
    uint32_t first = 0;
    while (count > 1) {
        const uint32_t step = (count + simt::LANES - 1) / simt::LANES;
        const uint32_t at = simt::lane_index() * step;
        const uint32_t below =
                simt::ballot(at < count && items[first + at].place.*kFirst <= number);
        const uint32_t last = simt::popcount(below) - 1; // lane 0's item does not begin after it
        first += last * step;
        count = count - last * step < step ? count - last * step : step;
    }
    return items[first];
}
// f(item) of the item that has the tile or the chunk.
template <uint32_t ItemPlace::*kFirst, class F>
SIMT_DEVICE void with_item_of(const Launch &launch, uint32_t number, F f)
{
    if (launch.table == nullptr)
        f(find_item<kFirst>(launch.inline_items, launch.items, number));
    else
        f(find_item<kFirst>(launch.table, launch.items, number));
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
    SIMT_DEVICE bool small() const { return (of(JOB_FLAGS) & JOB_SMALL) != 0; }
    SIMT_DEVICE bool add() const { return (of(JOB_FLAGS) & JOB_ADD) != 0; }
};

// Where a tile of an item is.
struct TilePlace {
    uint32_t chunk, tile, last; // of the item; of the chunk; 1: the item's last chunk

    SIMT_DEVICE TilePlace(const ItemLayout &layout, uint32_t of_item)
    {
        const uint32_t chunk_tiles = layout.chunk_tiles, chunk_count = layout.chunk_count,
                       log2 = layout.chunk_log2;
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
    const ItemLayout &layout;
    TilePlace place;

    SIMT_DEVICE InlineJob(const Launch &launch, uint32_t tile)
        : layout(launch.inline_items[0].layout),
          place(layout, tile - launch.inline_items[0].place.first_tile)
    {
    }
    SIMT_DEVICE uint64_t word_of(JobWord w) const
    {
        return layout.value[place.last][w] +
               (steps_by_chunk(w) ? place.chunk * layout.chunk_step[chunk_step_of(w)] : 0) +
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

constexpr uint32_t BEGUN_SHIFT = 40; // in ChunkState::begun
constexpr uint64_t BEGUN_MASK = (uint64_t(1) << BEGUN_SHIFT) - 1;

// One thread of a worker: its tile begins, so far as who finishes the chunk is concerned. Adds
// `below` to the rest of `begun`, and returns what was there before.
SIMT_DEVICE uint64_t begin_tile(ChunkState *state, uint64_t below)
{
    return simt::atomic_add(&state->begun, uint64_t(1) << BEGUN_SHIFT | below);
}
// Whether that makes it the one that began last.
SIMT_DEVICE bool is_last_to_begin(uint64_t begun_before, uint32_t tiles)
{
    return uint32_t(begun_before >> BEGUN_SHIFT) + 1 == tiles;
}
// The same thread, once the worker has written all of its tile and met at a barrier; `done`: 1, and
// what it has to say. Returns 0, but for the tile that began last: that waits for the others, which
// are all under way and wait for nobody, and returns what they all say together. So nobody else
// waits for memory to answer. (A fence a lane group instead of a barrier costs more.)
SIMT_DEVICE uint64_t end_tile(ChunkState *state, uint32_t tiles, bool last_to_begin, uint64_t done)
{
    if (!last_to_begin) {
        simt::add_release(&state->done, done);
        return 0;
    }
    uint64_t all;
    do
        all = simt::load_acquire(&state->done) + done;
    while (uint32_t(all) != tiles);
    return all;
}

// Leaves a worker's job in shared memory; a lane group's, a lane a word. A barrier has to follow.
SIMT_DEVICE void leave_job(const Launch &launch, uint32_t tile, Job &job)
{
    with_item_of<&ItemPlace::first_tile>(launch, tile, [&](const auto &item) {
        const uint32_t lane = simt::lane_index();
        const ItemLayout &layout = layout_of(launch, item);
        const TilePlace place(layout, tile - item.place.first_tile);
        if (lane < JOB_WORDS)
            job.word[lane] = address_in(item, lane) + layout.value[place.last][lane] +
                             place.chunk * layout.chunk_step[lane] +
                             place.tile * layout.tile_step[lane];
        else if (lane == JOB_WORDS)
            job.exists = item_exists(item.place, layout);
    });
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
