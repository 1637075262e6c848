// SPDX-License-Identifier: BSD-3-Clause
// Items as the kernels want them: checks what the caller gave and lays its chunks out. A batch is
// often a thousand items of a few lengths, whose layouts cost more than everything else of a call:
// they are made once for all items that differ in their addresses alone.
#ifndef ZIP_KERNELS_GPU_ITEMS_H
#define ZIP_KERNELS_GPU_ITEMS_H

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/codec_gpu.h"
#include "kernels/gpu/driver.h"
#include "kernels/gpu/job.h"

namespace zip::gpu {

constexpr uint64_t CHUNKS_ALIGN = 16;

// What an item is, whatever its type.
struct Geometry {
    uint64_t chunk_length; // of every chunk but the last
    uint64_t chunk_stride;
    uint64_t last_length, last_room;
    uint32_t chunk_count;
    bool small_tiles, add, any_shape, has_progress;
};

// What items that are alike have in common.
struct Pattern {
    ItemLayout layout; // words that hold an address: what is added to the item's own
    uint64_t tiles;    // of all chunks
    bool whole;        // they are whole, and not small
};

struct Addresses {
    const void *data, *chunks;
    ChunkState *states; // of the item's first chunk
    const uint64_t *progress;
    const void *probe; // see ItemPlace
};

// The item under one coding.
void make_pattern(const Geometry &geometry, format::Coding coding, Pattern *pattern);
// For zip_probe: the whole data is one piece, and there are no tiles.
void make_probe_pattern(uint64_t data_size, Pattern *pattern);

inline TableItem table_item(const Addresses &addresses, uint32_t layout, uint32_t first_tile,
                            uint32_t first_chunk)
{
    const auto address = [](const void *p) { return reinterpret_cast<uintptr_t>(p); };
    static_assert(ADDRESS_DATA == 0 && ADDRESS_CHUNKS == 1 && ADDRESS_STATES == 2 &&
                  ADDRESS_PROGRESS == 3 && NO_ADDRESS == 4);
    return {{first_tile, first_chunk, layout, addresses.probe},
            {address(addresses.data), address(addresses.chunks), address(addresses.states),
             address(addresses.progress), 0}};
}

inline InlineItem inline_item(const Addresses &addresses, const ItemLayout &layout,
                              uint32_t first_tile, uint32_t first_chunk)
{
    const TableItem of_table = table_item(addresses, 0, first_tile, first_chunk);
    InlineItem item{of_table.place, layout};
    for (uint32_t w = 0; w < JOB_WORDS; ++w) {
        for (auto &value : item.layout.value)
            value[w] += of_table.address[address_of(w)];
    }
    return item;
}

// Launches of a batch: one for each type and shape, and one for the probes of unknown types, which
// comes first. A part's number says which.
constexpr uint32_t PROBE_PART = 0, PARTS = 1 + uint32_t(format::DTYPES) * format::SHAPES,
                   NO_PART = PARTS;
constexpr uint32_t part_of(uint8_t dtype, uint8_t shape)
{
    return 1 + dtype * format::SHAPES + shape;
}
// The part of an item of known type; NO_PART of any other, or if there is no such type or shape.
uint32_t part_of(const zip_gpu_item_t &item);
// Whether it is of unknown type; not where that is invalid.
bool is_unknown(const zip_gpu_item_t &item, Kernel::Action action);
// The kernel of a part, for any multiprocessors and tiles.
constexpr Kernel kernel_of_part(uint32_t part, Kernel::Action action)
{
    if (part == PROBE_PART)
        return {Kernel::Action::PROBE, false, false, 0, 0};
    return {action, false, false, uint8_t((part - 1) / format::SHAPES),
            uint8_t((part - 1) % format::SHAPES)};
}
// Calls f(dtype, shape) for every coding that may be found best for an item of unknown type.
template <class F>
void for_each_offer(uint8_t shape, F &&f)
{
    f(uint8_t(format::DTYPE_BYTES), uint8_t(format::SHAPE_STORED));
    for (uint8_t dtype = format::DTYPE_BF16; dtype < format::DTYPES; ++dtype) {
        if (shape != ZIP_SHAPE_DEFAULT) {
            f(dtype,
              format::valid_coding({dtype, shape, false}) ? shape : uint8_t(format::SHAPE_22228));
            continue;
        }
        f(dtype, uint8_t(format::SHAPE_22228));
        f(dtype, uint8_t(format::SHAPE_11238));
    }
}

// What items that differ in their addresses alone have in common.
struct Kind {
    // All that decides it, as whole words: coding and op with whatever numbers they hold.
    static std::array<uint64_t, 7> key_of(const zip_gpu_item_t &item, Kernel::Action action)
    {
        static_assert(offsetof(zip_gpu_item_t, coding) == 0 &&
                      offsetof(zip_gpu_item_t, data) == 2 * sizeof(uint64_t));
        uint64_t coding[2];
        std::memcpy(coding, &item, sizeof coding);
        return {coding[0],
                coding[1],
                item.data_size,
                item.chunk_length,
                item.chunk_stride,
                item.last_room,
                uint64_t(action) | uint64_t(item.progress != nullptr) << 8};
    }
    bool is_of(const zip_gpu_item_t &item, Kernel::Action action) const
    {
        const std::array<uint64_t, 7> k = key_of(item, action);
        return ((k[0] ^ key[0]) | (k[1] ^ key[1]) | (k[2] ^ key[2]) | (k[3] ^ key[3]) |
                (k[4] ^ key[4]) | (k[5] ^ key[5]) | (k[6] ^ key[6])) == 0;
    }

    std::array<uint64_t, 7> key{};
    bool valid = false;
    Geometry geometry{};
    uint32_t part = NO_PART; // NO_PART: of unknown type
    Pattern pattern{};       // under its coding; of unknown type: its probe's
    // Its layout's number in the table of the batch with this number.
    uint64_t batch = 0;
    uint32_t layout = 0;
};

// Kinds of the last items.
class Kinds {
public:
    // The kind of a batch's item, good until the next call; or null, and the calling thread's last
    // error says what is wrong with the item. `last` is null or what the call before returned.
    Kind *of(const zip_gpu_item_t &item, size_t number, Kernel::Action action, Kind *last)
    {
        const bool same = last != nullptr && last->is_of(item, action);
        return same && has_good_addresses(item, action) ? last : find(item, number, action);
    }

private:
    static constexpr uint32_t LOG2_KINDS = 6;
    // All that there is to check of an item whose kind is known.
    static bool has_good_addresses(const zip_gpu_item_t &item, Kernel::Action action)
    {
        return (item.data != nullptr || item.data_size == 0) &&
               (action == Kernel::Action::PROBE ||
                (item.chunks != nullptr &&
                 reinterpret_cast<uintptr_t>(item.chunks) % CHUNKS_ALIGN == 0 &&
                 reinterpret_cast<uintptr_t>(item.progress) % sizeof(uint64_t) == 0));
    }
    Kind *find(const zip_gpu_item_t &item, size_t number, Kernel::Action action);

    std::array<Kind, 1 << LOG2_KINDS> kinds_;
};

} // namespace zip::gpu
#endif
