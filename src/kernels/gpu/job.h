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
constexpr uint32_t PROBE_THREADS = 768;      // on a probe
constexpr uint32_t COLUMNS_THREADS = 256;    // on the bases of a chunk's columns
// With a limit on multiprocessors a thread block holds several workers of TILE_THREADS threads, so
// many that it fills a multiprocessor: only then does the number of blocks bound the number of
// multiprocessors.
constexpr uint32_t FEW_SM_THREADS = 1024;
constexpr uint32_t STORED_TILE_BYTES =
        16384; // piece of a stored chunk (ZIP_DTYPE_BYTES) that a worker copies
constexpr uint32_t INLINE_ITEMS = 6; // as many as fit the argument

// What a worker has to know of its tile, 64-bit words. Each is a linear function of the chunk's
// number in its item and of the tile's number in its chunk, and differs for the last chunk: so a
// lane a word finds them all at once, without a branch.
enum JobWord : uint32_t {
    JOB_DATA,     // the tile's place in the original
    JOB_MANTISSA, // its parts of the chunk's sections (a stored chunk: MANTISSA is the original)
    JOB_LOW,
    JOB_LOW2,
    JOB_LEVEL1,
    JOB_COUNTS,
    JOB_TILE_HEADER,
    JOB_SYMBOLS,
    JOB_TAIL,       // the chunk's tail
    JOB_CHUNK,      // the chunk's header
    JOB_CHUNK_DATA, // the chunk's original
    JOB_STATE,      // the chunk's ChunkState
    JOB_PROGRESS,   // its progress word, or 0
    JOB_LENGTH,     // its original bytes
    JOB_TAIL_ROOM,  // bytes that may be touched from the tail's start (a stored chunk's end) on
    JOB_TILES,      // in the chunk
    JOB_LEFT,       // values from the tile's first one to the chunk's end
    JOB_TILE,       // the tile's number
    JOB_FLAGS,      // see below
    JOB_WORDS
};
// Whether a word has a step from chunk to chunk (the others differ for the last chunk alone).
ZIP_HOST_DEVICE constexpr bool steps_by_chunk(JobWord w)
{
    return w <= JOB_PROGRESS;
}
// The first word whose step from chunk to chunk is the same: so that it is multiplied once.
ZIP_HOST_DEVICE constexpr JobWord chunk_step_of(JobWord w)
{
    return w == JOB_CHUNK_DATA ? JOB_DATA : w > JOB_MANTISSA && w <= JOB_CHUNK ? JOB_MANTISSA : w;
}
// Step of a word from tile to tile, mod 2^64; of coded chunks.
ZIP_HOST_DEVICE constexpr uint64_t tile_step(format::Coding c, JobWord w)
{
    const format::TypeTraits type = format::type_traits(c.dtype);
    const uint64_t values = format::tile_values(c), low = type.low_bytes < 2 ? type.low_bytes : 2;
    switch (w) {
    case JOB_DATA:
        return values * type.size;
    case JOB_MANTISSA:
        return type.mantissa_is_bytes() ? values
                                        : format::plane_bytes(type.sign_mantissa_bits(), values);
    case JOB_LOW:
        return values * low;
    case JOB_LOW2:
        return values * (type.low_bytes - low);
    case JOB_LEVEL1:
        return format::plane_bytes(format::shape_traits(c.shape).width[0], values);
    case JOB_COUNTS:
        return format::tile_counts_bytes(c, uint32_t(values));
    case JOB_TILE_HEADER:
        return sizeof(uint64_t);
    case JOB_SYMBOLS:
        return sizeof(format::TileSymbols);
    case JOB_LEFT:
        return -values;
    case JOB_TILE:
        return 1;
    default:
        return 0;
    }
}
constexpr uint64_t JOB_SMALL = 1, JOB_ADD = 2; // small tiles; ZIP_GPU_ADD

// What a zip_gpu_item_t is under one coding. A chunk without a whole value (and so without tiles)
// counts as one tile: somebody must write its header. A stored chunk's tiles are pieces of
// STORED_TILE_BYTES.
struct alignas(16) ItemLayout {
    uint32_t chunk_tiles; // in every chunk but the last
    uint32_t chunk_count;
    uint32_t chunk_log2; // of chunk_tiles, or 32 if that is no power of two
    uint16_t dtype, shape;
    uint32_t any_shape; // not 0: a probe's shape does not matter
    // Word k of a job is value[last chunk][k] + chunk * chunk_step[k] + tile * tile_step[k], mod
    // 2^64. Where there is one chunk, value[0] and chunk_step hold anything; words of sections that
    // a stored chunk lacks mean nothing.
    uint64_t value[2][JOB_WORDS];
    uint64_t chunk_step[JOB_WORDS];
    uint64_t tile_step[JOB_WORDS];
};

// What an item of a launch has of its own.
struct ItemPlace {
    uint32_t first_tile, first_chunk; // of the launch's
    uint32_t layout;                  // TableItem: its number in the launch's `layouts`
    // zip_probe_t on the device, or null. If it says another dtype or shape than the layout, there
    // is nothing to do. zip_probe writes it, of the JOB_LENGTH bytes at JOB_DATA of the last chunk.
    const void *probe;
};

// An item in the kernel's argument: its layout has its addresses in it.
struct InlineItem {
    ItemPlace place;
    ItemLayout layout;
};

// An item in device memory. A batch is often a thousand items of a few lengths: items that differ
// in their addresses alone share a layout, whose words do not have the item's address in them yet.
struct TableItem {
    ItemPlace place;
    uint64_t address[5]; // by address_of(); the last is 0
};
static_assert(sizeof(TableItem) == 64, "two to a line of 128 bytes, none over two");

// Which address of its item a word is counted from.
enum Address : uint32_t {
    ADDRESS_DATA,
    ADDRESS_CHUNKS,
    ADDRESS_STATES,
    ADDRESS_PROGRESS,
    NO_ADDRESS
};
ZIP_HOST_DEVICE constexpr Address address_of(uint32_t w)
{
    return w == JOB_DATA || w == JOB_CHUNK_DATA ? ADDRESS_DATA
           : w <= JOB_CHUNK                     ? ADDRESS_CHUNKS
           : w == JOB_STATE                     ? ADDRESS_STATES
           : w == JOB_PROGRESS                  ? ADDRESS_PROGRESS
                                                : NO_ADDRESS;
}

// What workers on one chunk share. All zero between launches: the worker that begins a chunk's last
// tile (in time) clears it.
struct ChunkState {
    // Tiles begun << 40. Below: words of the tail that are given out (encode), tiles that found
    // their chunk unsupported (decode).
    uint64_t begun;
    // Of the tiles but the one that began last: those that are done, and, from bit 32, those that
    // found the chunk corrupt.
    uint64_t done;
};

// Argument of every kernel, by value.
struct Launch {
    const TableItem *table;    // device memory; null: `inline_items`
    const ItemLayout *layouts; // of the table's items
    ChunkState *states;
    uint32_t items;
    uint32_t tiles, chunks; // of all items
    uint32_t four;          // 4, so that no compiler knows: see simt::lookup_word()
    uint16_t seq;
    uint16_t reserved;
    InlineItem inline_items[INLINE_ITEMS];
};
static_assert(sizeof(Launch) <= 4096, "kernel arguments are at most 4 KiB on every back end");

// Names of the kernels in the images, <type> and <shape> being names of zip_dtype_name() and
// zip_shape_name():
//   zip_encode_<type>_<shape>, zip_decode_...
//       blocks of TILE_THREADS threads (shape dense: DENSE_TILE_THREADS)
//   zip_encode_few_<type>_<shape>, zip_decode_...
//       blocks of workers of TILE_THREADS threads, at most simt::FEW_THREADS in all, each worker
//       with as much dynamic shared memory as a block of the first kernel has
//   zip_encode_few_whole_<type>_<shape>, zip_decode_...
//       likewise, for launches whose tiles are all whole, not small and (encode) aligned to 16
//       bytes: less code is faster code
//   zip_encode_whole_<type>_<shape>, zip_decode_...
//       likewise, but a block a tile, for launches of one item in the argument, whose type is
//       known, with whole tiles that are not small and (decode) aligned to 16 bytes
//   zip_encode_bytes, zip_decode_bytes
//       blocks of TILE_THREADS threads
//   zip_probe
//       blocks of PROBE_THREADS threads, one an item
//   zip_columns_<type>
//       blocks of COLUMNS_THREADS threads, one a chunk: before zip_encode_..._columns
// But for zip_encode_whole_... and zip_decode_whole_... the blocks take the tiles in turn, whatever
// their number. A batch takes a launch for each type and shape. driver.h says which exist.

} // namespace zip::gpu
#endif
