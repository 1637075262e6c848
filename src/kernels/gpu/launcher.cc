// SPDX-License-Identifier: BSD-3-Clause
// Launches the codec's kernels: what is common to all drivers.
#include "kernels/gpu/launcher.h"

#include <algorithm>
#include <cinttypes>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#include "kernels/format.h"
#include "kernels/gpu/items.h"

namespace zip::gpu {

namespace {

thread_local char last_error[ERROR_TEXT_SIZE] = "no error";

static_assert(INLINE_ITEMS == ZIP_GPU_INLINE_ITEMS);

// Grids have at most 2^31 - 1 blocks.
constexpr uint64_t MAX_TILES = std::numeric_limits<int32_t>::max();
// Blocks of TILE_THREADS threads that a multiprocessor holds.
constexpr uint32_t RESIDENT_BLOCKS = 8;

} // namespace

zip_status_t fail(zip_status_t status, const char *pattern, ...)
{
    va_list list;
    va_start(list, pattern);
    vsnprintf(last_error, sizeof last_error, pattern, list);
    va_end(list);
    return status;
}

const char *error_text()
{
    return last_error;
}

ErrorKept::ErrorKept()
{
    std::memcpy(text_, last_error, sizeof text_);
}
ErrorKept::~ErrorKept()
{
    std::memcpy(last_error, text_, sizeof text_);
}

std::string name_of(Kernel k)
{
    if (k.action == Kernel::Action::PROBE)
        return "zip_probe";
    constexpr const char *DTYPE_NAMES[format::DTYPES] = {"bytes", "bf16", "fp32", "fp16",
                                                         "fp64",  "e4m3", "e5m2"};
    constexpr const char *SHAPE_NAMES[format::SHAPES] = {"",    "_22228", "_11238",
                                                         "_38", "_dense", "_columns"};
    if (k.action == Kernel::Action::COLUMNS)
        return std::string("zip_columns_") + DTYPE_NAMES[k.dtype];
    return std::string(k.action == Kernel::Action::ENCODE ? "zip_encode_" : "zip_decode_") +
           (k.few ? "few_" : "") + (k.whole ? "whole_" : "") + DTYPE_NAMES[k.dtype] +
           SHAPE_NAMES[k.shape];
}

namespace {

using Action = Kernel::Action;

// The driver's context, for the length of a call.
class Inside {
public:
    explicit Inside(Driver &driver) : driver_(driver), status_(driver.enter()) {}
    ~Inside()
    {
        if (status_ == ZIP_OK)
            driver_.leave();
    }
    Inside(const Inside &) = delete;
    Inside &operator=(const Inside &) = delete;
    zip_status_t status() const { return status_; }

private:
    Driver &driver_;
    zip_status_t status_;
};

// Items of unknown type in a batch; each takes many places in the table.
constexpr uint32_t MAX_UNKNOWN = 64;
constexpr uint32_t UNKNOWN_PLACES =
        2 + 2 * (format::DTYPES - 1); // probe, stored, two shapes a type

// A batch's table on the host, which is free again when the copy from it is done.
struct Slot {
    void *memory = nullptr; // pinned
    void *copied = nullptr; // event
};

// Where a batch's items are written to: to the launches' arguments, or to a table, which is its
// items and behind them the layouts that they share.
struct Places {
    InlineItem *inline_items; // null: a table
    TableItem *items;
    ItemLayout *layouts;
    uint32_t layout_count; // so far
};
// `items` in the table and at least as much room for layouts.
constexpr size_t table_bytes(size_t items, size_t layouts)
{
    return items * sizeof(TableItem) + layouts * sizeof(ItemLayout);
}

class Queue {
public:
    explicit Queue(Driver &driver) : driver_(driver) {}
    ~Queue();
    Queue(const Queue &) = delete;
    Queue &operator=(const Queue &) = delete;
    zip_status_t create(const zip_gpu_queue_params_t &params);
    zip_status_t submit(Action action, const zip_gpu_item_t *in, size_t count,
                        zip_gpu_launch_t launch, zip_probe_t *results);
    zip_status_t copy(void *to, const void *from, size_t size, uint64_t *progress, uint16_t seq);
    zip_status_t query(bool *idle_p);
    void *stream() const { return stream_; }

private:
    // DEVICE, if an earlier call failed.
    zip_status_t usable() const;
    // A launch of the batch that is being made: `count` neighbours in the table.
    struct Part {
        uint32_t count;       // its items
        uint32_t first, next; // its first place in the table, and that of its next item
        uint64_t tiles;       // of the items before that one
        uint64_t chunks;      // likewise
        bool whole;           // all tiles are
        bool aligned;         // all originals are, to 16 bytes
        bool offered;         // to several kernels, most of which find that a probe chose another
    };
    zip_status_t count_parts(Action action, const zip_gpu_item_t *in, size_t count);
    zip_status_t fill(Action action, const zip_gpu_item_t *in, size_t count, zip_probe_t *results,
                      Places &places);
    uint32_t layout_number(Kind &kind, Places &places) const;
    zip_status_t put(Part &part, const Pattern &pattern, const Addresses &addresses, size_t number,
                     uint32_t layout, Places &places);
    zip_status_t put_unknown(Kind &kind, uint8_t shape, Addresses addresses, size_t number,
                             Places &places);
    zip_status_t launch_part(Kernel kernel, const Part &part, uint32_t table_items, bool is_short,
                             zip_gpu_launch_t params);
    // Passes on what a call of the driver returned. After an error nobody knows what of the batch
    // is under way, nor whether a slot is free: the queue has failed.
    zip_status_t noting(zip_status_t status);
    // Most items in a table: an item has one place, one of unknown type many. Each may have a
    // layout of its own.
    size_t most_places() const
    {
        return max_items_ + std::min(max_items_, MAX_UNKNOWN) * (UNKNOWN_PLACES - 1);
    }

    Driver &driver_;
    void *stream_ = nullptr;
    bool own_stream_ = false;
    uint32_t max_items_ = 0, max_chunks_ = 0;
    ChunkState *states_ = nullptr;  // max_chunks_ of them; device memory, as the next two
    zip_probe_t *probes_ = nullptr; // MAX_UNKNOWN, for encodes of unknown types
    // Table of a long batch. One is enough: the stream's launches are done with it when its next
    // copy into it begins.
    void *table_ = nullptr;
    std::vector<Slot> slots_;
    size_t next_slot_ = 0;
    Kinds kinds_;
    uint64_t batch_ = 0; // number of the last one
    Part parts_[PARTS];
    std::vector<InlineItem> inline_items_; // of a batch that needs no table
    Launch launch_{};                      // the last one
    bool failed_ = false;
    char failure_[ERROR_TEXT_SIZE] = ""; // the driver's first error
};

Queue::~Queue()
{
    const ErrorKept kept;         // of a create() that failed
    const Inside inside(driver_); // where that fails the context is gone, and all of this with it
    if (inside.status() != ZIP_OK)
        return;
    // A create() or a batch that failed may leave work behind that uses what is freed here. An
    // error of that work ends it, too.
    if (stream_ != nullptr)
        driver_.stream_synchronize(stream_);
    for (const Slot &slot : slots_) {
        if (slot.copied != nullptr)
            driver_.event_destroy(slot.copied);
        if (slot.memory != nullptr)
            driver_.free_pinned(slot.memory);
    }
    for (void *memory : {static_cast<void *>(states_), static_cast<void *>(probes_), table_}) {
        if (memory != nullptr)
            driver_.free_device(memory);
    }
    if (own_stream_)
        driver_.stream_destroy(stream_);
}

zip_status_t Queue::create(const zip_gpu_queue_params_t &params)
{
    const Inside inside(driver_);
    if (inside.status() != ZIP_OK)
        return inside.status();
    max_items_ = params.max_items;
    max_chunks_ = params.max_chunks;
    inline_items_.resize(std::min(most_places(), size_t(PARTS) * INLINE_ITEMS));
    stream_ = params.stream;
    zip_status_t status = ZIP_OK;
    auto step = [&status](zip_status_t s) { return (status = s) == ZIP_OK; };
    auto device = [&](auto **memory_p, size_t size) {
        void *memory = nullptr;
        if (!step(driver_.allocate_device(size, &memory)))
            return false;
        *memory_p = static_cast<std::remove_pointer_t<decltype(memory_p)>>(memory);
        return step(driver_.clear(memory, size, stream_));
    };
    if (stream_ == nullptr) {
        if (!step(driver_.stream_create(&stream_)))
            return status;
        own_stream_ = true;
    }
    if (!device(&states_, max_chunks_ * sizeof *states_) ||
        !device(&probes_, MAX_UNKNOWN * sizeof *probes_))
        return status;
    if (params.slots != 0) {
        const size_t size = table_bytes(most_places(), most_places());
        if (!device(&table_, size))
            return status;
        slots_.resize(params.slots);
        for (Slot &slot : slots_) {
            if (!step(driver_.allocate_pinned(size, &slot.memory)) ||
                !step(driver_.event_create(&slot.copied)))
                return status;
        }
    }
    return driver_.stream_synchronize(stream_);
}

zip_status_t Queue::noting(zip_status_t status)
{
    if (status != ZIP_OK && !failed_) {
        failed_ = true;
        std::memcpy(failure_, last_error, sizeof failure_);
    }
    return status;
}

zip_status_t Queue::usable() const
{
    return !failed_ ? ZIP_OK // why comes last: the text may be cut short
                    : fail(ZIP_ERR_DEVICE,
                           "this queue failed in an earlier call: destroy it and make another; the "
                           "error was: %s",
                           failure_);
}

zip_status_t Queue::copy(void *to, const void *from, size_t size, uint64_t *progress, uint16_t seq)
{
    zip_status_t status = usable();
    if (status != ZIP_OK)
        return status;
    if ((size != 0 && (to == nullptr || from == nullptr)) || (progress != nullptr && seq == 0))
        return fail(ZIP_ERR_INVALID_PARAM, "to or from is null, or seq is 0");
    const Inside inside(driver_);
    status = noting(inside.status());
    if (status == ZIP_OK && size != 0)
        status = noting(driver_.copy(to, from, size, stream_));
    if (status == ZIP_OK && progress != nullptr)
        status = noting(driver_.write(progress, uint64_t(seq) << 48, stream_));
    return status;
}

zip_status_t Queue::query(bool *idle_p)
{
    *idle_p = false;
    const zip_status_t status = usable();
    if (status != ZIP_OK)
        return status;
    const Inside inside(driver_);
    return noting(inside.status() == ZIP_OK ? driver_.stream_query(stream_, idle_p)
                                            : inside.status());
}

zip_status_t Queue::submit(Action action, const zip_gpu_item_t *in, size_t count,
                           zip_gpu_launch_t params, zip_probe_t *results)
{
    const zip_status_t before = usable();
    if (before != ZIP_OK || count == 0)
        return before;
    if (in == nullptr)
        return fail(ZIP_ERR_INVALID_PARAM, "items is null");
    if (action != Action::PROBE && params.seq == 0)
        return fail(ZIP_ERR_INVALID_PARAM, "seq is 0");
    if (count > max_items_)
        return fail(ZIP_ERR_NO_SPACE, "%zu items in a batch, but the queue was made for %" PRIu32,
                    count, max_items_);

    zip_status_t status = count_parts(action, in, count);
    if (status != ZIP_OK)
        return status;
    const bool is_short = std::all_of(std::begin(parts_), std::end(parts_),
                                      [](const Part &part) { return part.count <= INLINE_ITEMS; });

    const Inside inside(driver_);
    if (noting(inside.status()) != ZIP_OK)
        return inside.status();
    ++batch_;
    Places places{};
    const uint32_t table_items = parts_[PARTS - 1].first + parts_[PARTS - 1].count;
    if (is_short) {
        places.inline_items = inline_items_.data();
        status = fill(action, in, count, results, places);
        if (status != ZIP_OK)
            return status;
    } else {
        if (slots_.empty())
            return fail(ZIP_ERR_NO_SPACE,
                        "the queue has no slots for batches of more than %" PRIu32 " items",
                        INLINE_ITEMS);
        Slot &slot = slots_[next_slot_];
        bool done = false;
        status = noting(driver_.event_query(slot.copied, &done));
        if (status != ZIP_OK)
            return status;
        if (!done)
            return fail(ZIP_ERR_NO_SPACE, "all %zu slots are in use", slots_.size());
        places.items = static_cast<TableItem *>(slot.memory);
        places.layouts = reinterpret_cast<ItemLayout *>(places.items + table_items);
        status = fill(action, in, count, results, places);
        if (status != ZIP_OK)
            return status;
        status = noting(driver_.copy_to_device(
                table_, slot.memory, table_bytes(table_items, places.layout_count), stream_));
        if (status == ZIP_OK)
            status = noting(driver_.event_record(slot.copied, stream_));
        if (status != ZIP_OK)
            return status;
        next_slot_ = (next_slot_ + 1) % slots_.size();
    }

    for (uint32_t p = 0; p < PARTS; ++p) {
        if (parts_[p].count == 0)
            continue;
        status = noting(
                launch_part(kernel_of_part(p, action), parts_[p], table_items, is_short, params));
        if (status != ZIP_OK)
            return status;
    }
    return ZIP_OK;
}

// Finds how many items each launch has, and where in the table. What is wrong with items is
// fill()'s to say.
zip_status_t Queue::count_parts(Action action, const zip_gpu_item_t *in, size_t count)
{
    std::fill(std::begin(parts_), std::end(parts_), Part{0, 0, 0, 0, 0, true, true, false});
    if (action == Action::PROBE)
        parts_[PROBE_PART].count = uint32_t(count);
    for (size_t i = 0, first = 0; i < count && action != Action::PROBE; first = i) {
        // neighbours are mostly of one type
        const zip_coding_t coding = in[first].coding;
        while (i < count && in[i].coding.dtype == coding.dtype &&
               in[i].coding.shape == coding.shape)
            ++i;
        const auto alike = uint32_t(i - first);
        const uint32_t part = part_of(in[first]);
        if (part != NO_PART) {
            parts_[part].count += alike;
        } else if (is_unknown(in[first], action)) {
            uint32_t &unknown = parts_[PROBE_PART].count;
            if (unknown + alike > MAX_UNKNOWN)
                return fail(ZIP_ERR_NO_SPACE,
                            "item %zu: more than %" PRIu32 " items of unknown type",
                            first + MAX_UNKNOWN - unknown, MAX_UNKNOWN);
            unknown += alike;
            for_each_offer(uint8_t(coding.shape), [&](uint8_t dtype, uint8_t shape) {
                parts_[part_of(dtype, shape)].count += alike;
            });
        }
    }
    uint32_t first = 0;
    for (Part &part : parts_) {
        part.first = part.next = first;
        first += part.count;
    }
    return ZIP_OK;
}

// Checks the items and writes them to their places.
zip_status_t Queue::fill(Action action, const zip_gpu_item_t *in, size_t count,
                         zip_probe_t *results, Places &places)
{
    uint64_t chunks = 0;
    Kind *kind = nullptr;
    for (size_t i = 0; i < count; ++i) {
        kind = kinds_.of(in[i], i, action, kind);
        if (kind == nullptr)
            return ZIP_ERR_INVALID_PARAM;
        const Addresses addresses{in[i].data, in[i].chunks, states_ + chunks, in[i].progress,
                                  action == Action::PROBE ? results + i : nullptr};
        chunks += kind->geometry.chunk_count;
        if (chunks > max_chunks_)
            return fail(ZIP_ERR_NO_SPACE,
                        "item %zu: the batch has more chunks than the %" PRIu32
                        " that the queue was made for",
                        i, max_chunks_);
        const zip_status_t status =
                kind->part != NO_PART
                        ? put(parts_[kind->part], kind->pattern, addresses, i,
                              layout_number(*kind, places), places)
                        : put_unknown(*kind, uint8_t(in[i].coding.shape), addresses, i, places);
        if (status != ZIP_OK)
            return status;
    }
    return ZIP_OK;
}

// Another layout of a table.
uint32_t add_layout(const ItemLayout &layout, Places &places)
{
    if (places.layouts == nullptr)
        return 0;
    places.layouts[places.layout_count] = layout;
    return places.layout_count++;
}

// The number of a kind's layout in the batch's table.
uint32_t Queue::layout_number(Kind &kind, Places &places) const
{
    if (kind.batch != batch_) {
        kind.batch = batch_;
        kind.layout = add_layout(kind.pattern.layout, places);
    }
    return kind.layout;
}

// The next item of a launch.
zip_status_t Queue::put(Part &part, const Pattern &pattern, const Addresses &addresses,
                        size_t number, uint32_t layout, Places &places)
{
    const auto first_tile = uint32_t(part.tiles), first_chunk = uint32_t(part.chunks);
    if (places.inline_items != nullptr)
        places.inline_items[part.next++] =
                inline_item(addresses, pattern.layout, first_tile, first_chunk);
    else
        places.items[part.next++] = table_item(addresses, layout, first_tile, first_chunk);
    part.tiles += pattern.tiles;
    part.chunks += pattern.layout.chunk_count;
    part.whole = part.whole && pattern.whole;
    part.aligned = part.aligned && reinterpret_cast<uintptr_t>(addresses.data) % 16 == 0;
    part.offered = part.offered || addresses.probe != nullptr;
    return part.tiles <= MAX_TILES
                   ? ZIP_OK
                   : fail(ZIP_ERR_INVALID_PARAM, "item %zu: the batch has more than 2^31 - 1 tiles",
                          number);
}

// An item of unknown type: a probe, and an item of each launch that it may find to be the best.
zip_status_t Queue::put_unknown(Kind &kind, uint8_t shape, Addresses addresses, size_t number,
                                Places &places)
{
    Part &probes = parts_[PROBE_PART];
    addresses.probe = probes_ + (probes.next - probes.first);
    zip_status_t status =
            put(probes, kind.pattern, addresses, number, layout_number(kind, places), places);
    for_each_offer(shape, [&](uint8_t dtype, uint8_t s) {
        Pattern pattern{};
        make_pattern(kind.geometry, {dtype, s, kind.geometry.small_tiles}, &pattern);
        if (status == ZIP_OK)
            status = put(parts_[part_of(dtype, s)], pattern, addresses, number,
                         add_layout(pattern.layout, places), places);
    });
    return status;
}

zip_status_t Queue::launch_part(Kernel kernel, const Part &part, uint32_t table_items,
                                bool is_short, zip_gpu_launch_t params)
{
    Launch &launch = launch_;
    launch.states = states_;
    launch.items = part.count;
    launch.tiles = uint32_t(part.tiles);
    launch.chunks = uint32_t(part.chunks);
    launch.seq = params.seq;
    launch.four = 4;
    const auto *const table = static_cast<const TableItem *>(table_);
    launch.table = is_short ? nullptr : table + part.first;
    launch.layouts = is_short ? nullptr : reinterpret_cast<const ItemLayout *>(table + table_items);
    if (is_short)
        std::copy_n(inline_items_.data() + part.first, part.count, launch.inline_items);
    if (kernel.action == Action::PROBE)
        return driver_.launch(kernel, launch.items, PROBE_THREADS, false, stream_, launch);
    if (kernel.action == Action::ENCODE && kernel.shape == format::SHAPE_COLUMNS) {
        const zip_status_t status = driver_.launch(
                {Action::COLUMNS, false, false, kernel.dtype, kernel.shape},
                params.max_sms != 0 ? std::min(launch.chunks, params.max_sms) : launch.chunks,
                COLUMNS_THREADS, false, stream_, launch);
        if (status != ZIP_OK)
            return status;
    }

    const DeviceInfo &info = driver_.info();
    const bool dense = kernel.shape == format::SHAPE_DENSE,
               limited = params.max_sms != 0 && params.max_sms < info.multiprocessors;
    // The kernels for whole tiles, a block each, are for one item whose type is known (and, to
    // decode, whose original is aligned). What may have nothing to do is offered to no more blocks
    // than the GPU holds.
    const bool encode = kernel.action == Action::ENCODE;
    const bool one = part.count == 1 && !part.offered && is_short && (encode || part.aligned);
    kernel.few = limited || (part.whole && !one);
    kernel.whole = part.whole && (part.aligned || !encode || !kernel.few);
    if (!exists(kernel))
        kernel.whole = false;
    if (!exists(kernel))
        kernel.few = false;
    // A block a tile is fastest (H200: 4% at 256 MiB against blocks that take turns), but not where
    // blocks have nothing to do.
    const uint32_t resident = // blocks that the GPU holds
            info.multiprocessors *
            (kernel.few ? std::max(RESIDENT_BLOCKS * TILE_THREADS / info.few_threads, 1u)
                        : RESIDENT_BLOCKS);
    const uint32_t most_blocks = limited                      ? params.max_sms
                                 : kernel.few || part.offered ? resident
                                                              : launch.tiles;
    return driver_.launch(kernel, std::min(most_blocks, launch.tiles),
                          dense        ? DENSE_TILE_THREADS
                          : kernel.few ? info.few_threads
                                       : TILE_THREADS,
                          dense && limited, stream_, launch);
}

} // namespace

} // namespace zip::gpu

struct zip_gpu {
    std::unique_ptr<zip::gpu::Driver> driver;
};

struct zip_gpu_queue : zip::gpu::Queue {
    using Queue::Queue;
};

namespace zip::gpu {

namespace {

// Nothing may be thrown across the C boundary: what allocates is wrapped in this.
template <class F>
zip_status_t guarded(F &&f)
{
    try {
        return f();
    } catch (const std::bad_alloc &) {
        return fail(ZIP_ERR_DEVICE, "out of host memory");
    }
}

void api_close(zip_gpu_t *gpu)
{
    delete gpu;
}

uint32_t api_multiprocessors(zip_gpu_t *gpu)
{
    return gpu->driver->info().multiprocessors;
}

// Calls `f` of the driver in its context.
template <class F>
zip_status_t in_context(zip_gpu_t *gpu, F &&f)
{
    if (gpu == nullptr)
        return fail(ZIP_ERR_INVALID_PARAM, "gpu is null");
    const Inside inside(*gpu->driver);
    return inside.status() == ZIP_OK ? f(*gpu->driver) : inside.status();
}

zip_status_t api_memory_allocate(zip_gpu_t *gpu, zip_gpu_place_t place, size_t size,
                                 void **memory_p)
{
    if (memory_p == nullptr || size == 0)
        return fail(ZIP_ERR_INVALID_PARAM, "memory_p is null or size is 0");
    return in_context(gpu, [&](Driver &driver) {
        return place == ZIP_GPU_DEVICE ? driver.allocate_device(size, memory_p)
                                       : driver.allocate_pinned(size, memory_p);
    });
}

void api_memory_free(zip_gpu_t *gpu, zip_gpu_place_t place, void *memory)
{
    in_context(gpu, [&](Driver &driver) {
        if (place == ZIP_GPU_DEVICE)
            driver.free_device(memory);
        else
            driver.free_pinned(memory);
        return ZIP_OK;
    });
}

zip_status_t api_memory_pin(zip_gpu_t *gpu, void *memory, size_t size)
{
    return in_context(gpu, [&](Driver &driver) { return driver.pin(memory, size); });
}

void api_memory_unpin(zip_gpu_t *gpu, void *memory)
{
    in_context(gpu, [&](Driver &driver) {
        driver.unpin(memory);
        return ZIP_OK;
    });
}

zip_status_t api_memory_dmabuf(zip_gpu_t *gpu, void *memory, size_t size, int *fd_p)
{
    return in_context(gpu, [&](Driver &driver) { return driver.dmabuf(memory, size, fd_p); });
}

zip_status_t api_queue_create(zip_gpu_t *gpu, const zip_gpu_queue_params_t *params,
                              zip_gpu_queue_t **queue_p)
{
    if (gpu == nullptr || params == nullptr || queue_p == nullptr)
        return fail(ZIP_ERR_INVALID_PARAM, "gpu, params or queue_p is null");
    if (params->max_items == 0 || params->max_chunks == 0)
        return fail(ZIP_ERR_INVALID_PARAM, "max_items or max_chunks is 0");
    return guarded([&] {
        auto queue = std::make_unique<zip_gpu_queue>(*gpu->driver);
        const zip_status_t status = queue->create(*params);
        if (status == ZIP_OK)
            *queue_p = queue.release();
        return status;
    });
}

void api_queue_destroy(zip_gpu_queue_t *queue)
{
    delete queue;
}

void *api_queue_stream(zip_gpu_queue_t *queue)
{
    return queue->stream();
}

zip_status_t api_queue_query(zip_gpu_queue_t *queue, int *idle_p)
{
    if (queue == nullptr || idle_p == nullptr)
        return fail(ZIP_ERR_INVALID_PARAM, "queue or idle_p is null");
    bool idle;
    const zip_status_t status = queue->query(&idle);
    *idle_p = idle;
    return status;
}

zip_status_t api_copy(zip_gpu_queue_t *queue, void *to, const void *from, size_t size,
                      uint64_t *progress, uint16_t seq)
{
    if (queue == nullptr)
        return fail(ZIP_ERR_INVALID_PARAM, "queue is null");
    return queue->copy(to, from, size, progress, seq);
}

zip_status_t submit(Action action, zip_gpu_queue_t *queue, const zip_gpu_item_t *items,
                    size_t count, zip_gpu_launch_t launch, zip_probe_t *results)
{
    if (queue == nullptr)
        return fail(ZIP_ERR_INVALID_PARAM, "queue is null");
    return queue->submit(action, items, count, launch, results);
}

zip_status_t api_encode(zip_gpu_queue_t *queue, const zip_gpu_item_t *items, size_t count,
                        zip_gpu_launch_t launch)
{
    return submit(Action::ENCODE, queue, items, count, launch, nullptr);
}

zip_status_t api_decode(zip_gpu_queue_t *queue, const zip_gpu_item_t *items, size_t count,
                        zip_gpu_launch_t launch)
{
    return submit(Action::DECODE, queue, items, count, launch, nullptr);
}

zip_status_t api_probe(zip_gpu_queue_t *queue, const zip_gpu_item_t *items, size_t count,
                       zip_probe_t *results)
{
    if (results == nullptr && count != 0)
        return fail(ZIP_ERR_INVALID_PARAM, "results is null");
    return submit(Action::PROBE, queue, items, count, {}, results);
}

} // namespace

zip_status_t open_with(std::unique_ptr<Driver> driver, zip_gpu_t **gpu_p)
{
    return guarded([&] {
        *gpu_p = new zip_gpu{std::move(driver)};
        return ZIP_OK;
    });
}

zip_gpu_api_t make_api(const char *name,
                       zip_status_t (*memory_query)(const void *, zip_gpu_memory_t *),
                       zip_status_t (*open)(const zip_gpu_memory_t *, zip_gpu_t **))
{
    return {ZIP_GPU_API_VERSION,
            name,
            error_text,
            memory_query,
            open,
            api_close,
            api_multiprocessors,
            api_memory_allocate,
            api_memory_free,
            api_memory_pin,
            api_memory_unpin,
            api_memory_dmabuf,
            api_queue_create,
            api_queue_destroy,
            api_queue_stream,
            api_queue_query,
            api_encode,
            api_decode,
            api_probe,
            api_copy};
}

} // namespace zip::gpu
