// SPDX-License-Identifier: BSD-3-Clause
// Which tile of which chunk a worker has, and where its parts are. Device code.
#ifndef ZIP_KERNELS_GPU_TILE_H
#define ZIP_KERNELS_GPU_TILE_H

#include <cstdint>

#include "kernels/codec.h"
#include "kernels/format.h"
#include "kernels/gpu/job.h"
#include "kernels/gpu/simt.h"

namespace zip::gpu {

// A worker's place in a launch.
struct Place {
    const Item *item;
    uint32_t dtype, shape; // of the item; the probe's, where it was asked
    uint32_t chunk;        // of the item
    uint32_t chunk_tiles;  // in a full chunk
    uint32_t tile;         // of the chunk
    bool last;             // the item's last chunk
    bool exists;
};

// The item that has tile `tile` of the launch: the last one that does not begin after it.
SIMT_DEVICE const Item *find_item(const Launch &launch, uint32_t tile)
{
    if (launch.table == nullptr) {
        uint32_t i = 0;
        while (i + 1 < launch.items && launch.inline_items[i + 1].first_tile <= tile)
            ++i;
        return &launch.inline_items[i];
    }
    // All lanes of a group look at once: 32 places a step.
    const Item *const table = launch.table;
    uint32_t first = 0, count = launch.items;
    while (count > 1) {
        const uint32_t step = (count + simt::LANES - 1) / simt::LANES;
        const uint32_t at = simt::lane_index() * step;
        const uint32_t below = simt::ballot(at < count && table[first + at].first_tile <= tile);
        const uint32_t last = simt::popcount(below) - 1; // lane 0's item does not begin after it
        first += last * step;
        count = count - last * step < step ? count - last * step : step;
    }
    return table + first;
}

// Tiles of a chunk of that many values: one at least.
SIMT_DEVICE uint32_t tiles_of(uint64_t values, uint32_t tile_values)
{
    return values == 0 ? 1 : uint32_t((values + tile_values - 1) / tile_values);
}

// Tiles of a chunk of `length` bytes whose coding is not known when the kernel is compiled.
SIMT_DEVICE uint32_t tiles_of_length(uint32_t dtype, uint32_t shape, bool small, uint64_t length)
{
    if (dtype == format::DTYPE_BYTES)
        return tiles_of(length, STORED_TILE_BYTES);
    return tiles_of(length / format::value_size(uint8_t(dtype)), format::tile_values({uint8_t(dtype), uint8_t(shape), small}));
}

SIMT_DEVICE Place place_of(const Launch &launch, uint32_t tile)
{
    Place p;
    p.item = find_item(launch, tile);
    p.dtype = p.item->dtype;
    p.shape = p.item->shape;
    p.chunk_tiles = p.item->chunk_tiles;
    if (p.item->probe != nullptr) {
        const auto *const probe = static_cast<const zip_probe_t *>(p.item->probe);
        p.dtype = uint32_t(probe->dtype);
        p.shape = uint32_t(probe->shape);
        p.chunk_tiles = tiles_of_length(p.dtype, p.shape, p.item->small_tiles, p.item->chunk_length);
    }
    const uint32_t of_item = tile - p.item->first_tile;
    p.chunk = of_item < p.chunk_tiles ? 0 : of_item / p.chunk_tiles;
    if (p.chunk >= p.item->chunk_count)
        p.chunk = p.item->chunk_count - 1;
    p.last = p.chunk + 1 == p.item->chunk_count;
    p.tile = of_item - p.chunk * p.chunk_tiles;
    // A launch whose types are not known yet has tiles for the worst of them.
    p.exists = p.item->probe == nullptr || !p.last ||
               p.tile < tiles_of_length(p.dtype, p.shape, p.item->small_tiles, p.item->last_length);
    return p;
}

// A chunk as a worker sees it.
struct Chunk {
    uint8_t *data;   // its piece of the original
    uint8_t *out;    // the chunk
    ChunkState *state;
    uint64_t *progress; // or null
    uint64_t length; // original bytes
    uint64_t room;   // bytes at `out`
    Sections sections;
    uint32_t tiles;
};

// The chunk's piece of the original.
SIMT_DEVICE uint8_t *data_of(const Place &p)
{
    return p.item->data + p.chunk * p.item->chunk_length;
}
SIMT_DEVICE uint64_t length_of(const Place &p)
{
    return p.last ? p.item->last_length : p.item->chunk_length;
}

SIMT_DEVICE Sections sections_of(const format::Layout &l)
{
    return {uint32_t(l.low / 16), uint32_t(l.low2 / 16), uint32_t(l.level1 / 16), uint32_t(l.counts / 16),
            uint32_t(l.tile_headers / 16), uint32_t(l.symbols / 16), uint32_t(l.tail / 16)};
}

SIMT_DEVICE Chunk chunk_of(const Launch &launch, const Place &p, uint32_t value_size, uint32_t tile_values)
{
    const Item &item = *p.item;
    Chunk c;
    c.data = data_of(p);
    c.out = item.chunks + p.chunk * item.chunk_stride;
    c.state = launch.states + item.first_chunk + p.chunk;
    c.progress = item.progress == nullptr ? nullptr : item.progress + p.chunk;
    c.length = length_of(p);
    c.room = p.last ? item.last_room : item.chunk_stride;
    c.sections = item.sections[p.last];
    if (item.probe != nullptr && p.dtype != format::DTYPE_BYTES)
        c.sections = sections_of(format::layout_of({uint8_t(p.dtype), uint8_t(p.shape), item.small_tiles != 0}, c.length));
    c.tiles = p.last ? tiles_of(c.length / value_size, tile_values) : p.chunk_tiles;
    return c;
}

} // namespace zip::gpu
#endif
