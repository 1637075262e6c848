// SPDX-License-Identifier: BSD-3-Clause
// Which tile of which chunk a worker has, and where its parts are. One lane group finds that out and leaves it in shared memory
// for all: registers are short, and so are issue slots. Device code.
#ifndef ZIP_KERNELS_GPU_TILE_H
#define ZIP_KERNELS_GPU_TILE_H

#include <cstdint>

#include "kernels/codec.h"
#include "kernels/format.h"
#include "kernels/gpu/job.h"
#include "kernels/gpu/simt.h"

namespace zip::gpu {

// The item of a table that has tile `tile` of the launch: the last one that does not begin after it. A lane group's: all lanes look at once, 32
// places a step.
SIMT_DEVICE uint32_t find_in_table(const Item *table, uint32_t count, uint32_t tile)
{
    uint32_t first = 0;
    while (count > 1) {
        const uint32_t step = (count + simt::LANES - 1) / simt::LANES;
        const uint32_t at = simt::lane_index() * step;
        const uint32_t below = simt::ballot(at < count && table[first + at].first_tile <= tile);
        const uint32_t last = simt::popcount(below) - 1; // lane 0's item does not begin after it
        first += last * step;
        count = count - last * step < step ? count - last * step : step;
    }
    return first;
}

SIMT_DEVICE uint32_t find_inline(const Launch &launch, uint32_t tile)
{
    uint32_t i = 0;
    while (i + 1 < launch.items && launch.inline_items[i + 1].first_tile <= tile)
        ++i;
    return i;
}

// Where a worker's tile is, in shared memory.
struct Job {
    uint8_t *part[PARTS]; // of the tile; PART_TAIL: the chunk's tail
    uint8_t *chunk;       // its header
    uint8_t *chunk_data;  // its original
    ChunkState *state;
    uint64_t *progress;   // or null
    uint64_t length;      // the chunk's original bytes
    uint64_t tail_room;   // bytes that may be touched from the tail's start (a stored chunk's end) on
    uint32_t left;        // values from the tile's first one to the chunk's end; at most 2^31
    uint32_t tile, tiles; // of the chunk
    uint32_t dtype, shape, small, op;
    uint32_t last;        // the item's last chunk
    uint32_t exists;      // 0: nothing to do

    SIMT_DEVICE uint8_t *data() const { return part[PART_DATA]; }
    SIMT_DEVICE uint8_t *mantissa() const { return part[PART_MANTISSA]; }
    SIMT_DEVICE uint8_t *low() const { return part[PART_LOW]; }
    SIMT_DEVICE uint8_t *low2() const { return part[PART_LOW2]; }
    SIMT_DEVICE uint32_t *level1() const { return reinterpret_cast<uint32_t *>(part[PART_LEVEL1]); }
    SIMT_DEVICE uint16_t *counts() const { return reinterpret_cast<uint16_t *>(part[PART_COUNTS]); }
    SIMT_DEVICE uint64_t *tile_header() const { return reinterpret_cast<uint64_t *>(part[PART_TILE_HEADERS]); }
    SIMT_DEVICE uint32_t *symbols() const { return reinterpret_cast<uint32_t *>(part[PART_SYMBOLS]); }
    SIMT_DEVICE uint32_t *tail() const { return reinterpret_cast<uint32_t *>(part[PART_TAIL]); }
};

// Fills in a worker's job; each lane finds one part.
SIMT_DEVICE void fill_job(const Launch &launch, const Item &item, uint32_t tile, Job &job)
{
    const uint32_t lane = simt::lane_index();
    const uint32_t of_item = tile - item.first_tile, chunk_tiles = item.chunk_tiles, chunk_count = item.chunk_count;
    uint32_t chunk = 0;
    if (chunk_count > 1) {
        chunk = item.chunk_log2 < 32 ? of_item >> item.chunk_log2 : of_item / chunk_tiles;
        chunk = chunk < chunk_count ? chunk : chunk_count - 1;
    }
    const uint32_t last = chunk + 1 == chunk_count, of_chunk = of_item - chunk * chunk_tiles;
    uint8_t *const base = item.chunks + chunk * item.chunk_stride, *const data = item.data + chunk * item.chunk_length;
    if (lane < PARTS) {
        const uint32_t offset = item.offset[last][lane], stride = item.stride[lane];
        job.part[lane] = (lane == PART_DATA ? data : base) + uint64_t(offset) * 16 + uint64_t(stride) * of_chunk;
    } else if (lane == PARTS) {
        job.chunk = base;
        job.chunk_data = data;
        job.state = launch.states + item.first_chunk + chunk;
        job.progress = item.progress == nullptr ? nullptr : item.progress + chunk;
    } else if (lane == PARTS + 1) {
        const uint64_t length = last != 0 ? item.last_length : item.chunk_length, room = last != 0 ? item.last_room : item.chunk_stride;
        const uint64_t left = (length >> item.value_log2) - (uint64_t(of_chunk) << item.tile_log2);
        job.length = length;
        job.left = left < uint32_t(1) << 31 ? uint32_t(left) : uint32_t(1) << 31;
        const uint64_t tail_at =
                item.dtype == format::DTYPE_BYTES ? format::HEADER_LENGTH + length : uint64_t(item.offset[last][PART_TAIL]) * 16;
        job.tail_room = room > tail_at ? room - tail_at : 0; // launchers refuse less room than that
    } else if (lane == PARTS + 2) {
        job.tile = of_chunk;
        job.tiles = last != 0 ? item.last_tiles : chunk_tiles;
        job.last = last;
        job.dtype = item.dtype;
        job.shape = item.shape;
        job.small = item.small_tiles;
        job.op = item.op;
        const auto *const probe = static_cast<const zip_probe_t *>(item.probe);
        job.exists = probe == nullptr || (uint32_t(probe->dtype) == item.dtype && (item.dtype == format::DTYPE_BYTES || item.any_shape != 0 || uint32_t(probe->shape) == item.shape));
    }
}

// Leaves the job in shared memory; a lane group's. A barrier has to follow.
SIMT_DEVICE void leave_job(const Launch &launch, uint32_t tile, Job &job)
{
    // Two calls: arguments are in another memory than tables.
    if (launch.table == nullptr)
        fill_job(launch, launch.inline_items[find_inline(launch, tile)], tile, job);
    else
        fill_job(launch, launch.table[find_in_table(launch.table, launch.items, tile)], tile, job);
}

// Brings the original of a tile to L2 while its worker finds its job. Only where that is simple; a hint.
template <uint32_t kThreads>
SIMT_DEVICE void prefetch_data(const Launch &launch, uint32_t tile, uint32_t thread)
{
    constexpr uint32_t LINE = 128;
    const Item &item = launch.inline_items[0];
    if (launch.items != 1 || launch.table != nullptr || item.chunk_count != 1)
        return;
    const uint64_t tile_bytes = item.stride[PART_DATA], first = tile * tile_bytes;
    for (uint32_t at = thread * LINE; at < tile_bytes; at += kThreads * LINE) {
        if (first + at < item.last_length)
            simt::prefetch(item.data + first + at);
    }
}

} // namespace zip::gpu
#endif
