// SPDX-License-Identifier: BSD-3-Clause
// What a launcher hands to the kernels. Shared by host and device code of CUDA, HIP and the CPU
// shim; plain data, the same layout everywhere.
#ifndef ZIP_KERNELS_GPU_JOB_H
#define ZIP_KERNELS_GPU_JOB_H

#include <cstdint>

#include "kernels/format.h"

namespace zip::gpu {

constexpr uint32_t TILE_THREADS = 128;       // that work on a tile, all shapes but dense
constexpr uint32_t DENSE_TILE_THREADS = 256; // on a tile of shape dense
// With a limit on multiprocessors a thread block holds several workers of TILE_THREADS threads, so many that
// it fills a multiprocessor: only then does the number of blocks bound the number of multiprocessors.
constexpr uint32_t FEW_SM_THREADS = 1024;
constexpr uint32_t STORED_TILE_BYTES = 16384; // piece of a stored chunk (ZIP_DTYPE_BYTES) that a worker copies
constexpr uint32_t INLINE_ITEMS = 16; // as many as fit the argument

// What a tile has a part of. Each begins `offset` units of 16 bytes behind the chunk (DATA: the original), a tile's part `stride` bytes
// behind the former tile's. So a lane can find each.
enum Part : uint32_t { PART_DATA, PART_MANTISSA, PART_LOW, PART_LOW2, PART_LEVEL1, PART_COUNTS, PART_TILE_HEADERS, PART_SYMBOLS, PART_TAIL, PARTS };

// One zip_gpu_item_t, under one coding. A chunk without a whole value (and so without tiles) counts as one tile: somebody must write
// its header. A stored chunk's tiles are pieces of STORED_TILE_BYTES.
struct Item {
    uint8_t *data;
    uint8_t *chunks;
    uint64_t *progress;     // or null
    const void *probe;      // zip_probe_t on the device, or null. If it says another dtype or shape, the item has nothing to do. zip_probe writes it.
    uint64_t chunk_stride;
    uint64_t chunk_length;  // original bytes of every chunk but the last
    uint64_t last_length;   // of the last one
    uint64_t last_room;     // bytes at the last chunk; the others have chunk_stride
    uint32_t offset[2][PARTS]; // in a full chunk, in the last one
    uint32_t stride[PARTS];
    uint32_t first_tile;    // of the launch's tiles
    uint32_t chunk_tiles;   // in a full chunk
    uint32_t last_tiles;    // in the last one
    uint32_t chunk_count;
    uint32_t first_chunk;   // of the queue's ChunkStates
    uint8_t dtype, shape, small_tiles, op; // as in zip_coding_t and zip_gpu_op_t
    uint8_t value_log2, tile_log2;         // of a value's bytes, of a tile's values
    uint8_t chunk_log2; // of chunk_tiles, or 255 if that is no power of two
    uint8_t any_shape;  // not 0: the probe's shape does not matter
};

// What workers on one chunk share. All zero between launches: who finishes a chunk clears it.
struct ChunkState {
    uint64_t tail; // encode: tiles that have their part of the tail << 40 | words given out
    uint64_t done; // tiles done, and, from bit 32, one for each that found its chunk corrupt
};

// Argument of every kernel, by value.
struct Launch {
    const Item *table; // device memory; null: `inline_items`
    ChunkState *states;
    uint32_t items;
    uint32_t tiles;    // of all items
    uint32_t reserved0;
    uint16_t seq;
    uint16_t reserved;
    Item inline_items[INLINE_ITEMS];
};
static_assert(sizeof(Launch) <= 4096, "kernel arguments are at most 4 KiB on every back end");

// Names of the kernels in the images, <type> being a name of zip_dtype_name() but "auto":
//   zip_encode_<type>, zip_decode_<type>              blocks of TILE_THREADS threads
//   zip_encode_dense_<type>, zip_decode_dense_<type>  blocks of DENSE_TILE_THREADS threads (not "bytes")
//   zip_encode_few_<type>, zip_decode_few_<type>      blocks of simt::FEW_THREADS threads, each with shared memory (dynamic) for
//                                                     FEW_THREADS / TILE_THREADS workers (not "bytes")
//   zip_probe                                         blocks of TILE_THREADS threads, one an item
// The blocks take the tiles in turn, whatever their number. A batch takes a launch for each type, and one for each shape class (dense or not).

} // namespace zip::gpu
#endif
