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
constexpr uint32_t INLINE_ITEMS = 16;

// Section offsets of a chunk (format::Layout) in units of 16 bytes; MANTISSA always starts behind
// the header.
struct Sections {
    uint32_t low, low2, level1, counts, tile_headers, symbols, tail;
};

// One zip_gpu_item_t. A chunk without a whole value (and so without tiles) counts as one tile: somebody must write its header.
struct Item {
    uint8_t *data;
    uint8_t *chunks;
    uint64_t *progress;     // or null
    const void *probe;      // zip_probe_t on the device that says dtype and shape, or null
    uint64_t chunk_stride;
    uint64_t chunk_length;  // original bytes of every chunk but the last
    uint64_t last_length;   // of the last one
    uint64_t last_room;     // bytes at the last chunk; the others have chunk_stride
    Sections sections[2];   // of a full chunk, of the last one
    uint32_t first_tile;    // of the launch's tiles
    uint32_t chunk_tiles;   // in a full chunk
    uint32_t chunk_count;
    uint32_t first_chunk;   // of the queue's ChunkStates
    uint8_t dtype, shape, small_tiles, op; // as in zip_coding_t and zip_gpu_op_t
    uint32_t reserved;
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
    uint32_t workers;  // that take the tiles in turn; 0: a block for each tile
    uint16_t seq;
    uint16_t reserved;
    Item inline_items[INLINE_ITEMS];
};
static_assert(sizeof(Launch) <= 4096, "kernel arguments are at most 4 KiB on every back end");

// Names of the kernels in the images; TYPE is bytes, bf16, fp32, fp16, fp64, e4m3 or e5m2. All items of a launch have the kernel's type, or
// a type that a probe finds: then every type has its launch, which passes over the tiles of others.
//   zip_encode_TYPE, zip_decode_TYPE              TILE_THREADS threads, grid: tiles
//   zip_encode_few_TYPE, zip_decode_few_TYPE      FEW_SM_THREADS threads (simt::FEW_THREADS), grid: multiprocessors allowed
//   zip_encode_dense_TYPE, zip_decode_dense_TYPE  DENSE_TILE_THREADS threads, not for bytes; grid: tiles, or multiprocessors allowed, each with so
//                                                 much dynamic shared memory that a multiprocessor holds one
//   zip_probe                                     one block of TILE_THREADS threads an item; writes its result to the item's `probe`
// A batch takes a launch for each type, dense and not.

} // namespace zip::gpu
#endif
