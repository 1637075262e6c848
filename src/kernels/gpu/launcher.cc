// SPDX-License-Identifier: BSD-3-Clause
// Launches the codec's kernels: what is common to all drivers.
#include "kernels/gpu/launcher.h"

#include <algorithm>
#include <bit>
#include <cinttypes>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#include "kernels/format.h"

namespace zip::gpu {

namespace {

thread_local char last_error[ERROR_TEXT_SIZE] = "no error";

static_assert(INLINE_ITEMS == ZIP_GPU_INLINE_ITEMS);

// Grids have at most 2^31 - 1 blocks.
constexpr uint64_t MAX_TILES = std::numeric_limits<int32_t>::max();
constexpr uint64_t CHUNKS_ALIGN = 16;
// Blocks a multiprocessor of a launch that may have nothing to do: as many as it holds.
constexpr uint32_t OFFERED_BLOCKS = 8;

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
    constexpr const char *SHAPE_NAMES[format::SHAPES] = {"", "_22228", "_11238", "_38", "_dense"};
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

// Whether an item is in the launch for a type and a shape. One of unknown type is in the launches
// of all that its probe may find, and does something in one of them.
bool belongs(const zip_gpu_item_t &item, uint8_t dtype, uint8_t shape)
{
    const bool any_type = item.coding.dtype == ZIP_DTYPE_AUTO,
               no_shape = item.coding.shape == ZIP_SHAPE_DEFAULT;
    if (!any_type && item.coding.dtype != dtype)
        return false;
    if (dtype == ZIP_DTYPE_BYTES)
        return shape == format::SHAPE_STORED;
    if (!no_shape)
        return item.coding.shape == shape;
    return shape == format::SHAPE_22228 || (any_type && shape == format::SHAPE_11238);
}

// Items of unknown type in a batch; each takes many places in the table.
constexpr uint32_t MAX_UNKNOWN = 64;
constexpr uint32_t UNKNOWN_PLACES =
        2 + 2 * (format::DTYPES - 1); // probe, stored, two shapes a type

// A piece of a launch's table that is free again when the copy from it is done.
struct Slot {
    Item *items = nullptr;  // pinned
    void *copied = nullptr; // event
};

format::Coding coding_of(uint8_t dtype, uint8_t shape, bool small_tiles)
{
    return {dtype, shape == ZIP_SHAPE_DEFAULT ? uint8_t(format::SHAPE_22228) : shape, small_tiles};
}

// Most bytes of a chunk of `length` bytes that a GPU makes.
uint64_t bound_of(uint8_t dtype, uint8_t shape, bool small_tiles, uint64_t length)
{
    const uint64_t stored = format::HEADER_LENGTH + length;
    if (dtype == ZIP_DTYPE_BYTES)
        return stored;
    if (dtype != ZIP_DTYPE_AUTO) {
        const format::Coding coding = coding_of(dtype, shape, small_tiles);
        const format::Layout layout = format::layout_of(coding, length);
        return layout.tail + format::max_tail(coding, layout.values);
    }
    uint64_t bound = stored;
    for (uint8_t d = ZIP_DTYPE_BF16; d < ZIP_DTYPE_LAST; ++d) {
        for (uint8_t s = ZIP_SHAPE_22228; s < ZIP_SHAPE_LAST; ++s) {
            const bool possible = shape == ZIP_SHAPE_DEFAULT
                                          ? s == ZIP_SHAPE_22228 || s == ZIP_SHAPE_11238
                                          : s == shape;
            if (possible)
                bound = std::max(bound, bound_of(d, s, small_tiles, length));
        }
    }
    return bound;
}

// Tiles of a chunk.
uint64_t tiles_of(uint8_t dtype, uint8_t shape, bool small_tiles, uint64_t length)
{
    if (dtype == ZIP_DTYPE_BYTES)
        return std::max<uint64_t>(format::div_up(length, STORED_TILE_BYTES), 1);
    const format::Coding coding = coding_of(dtype, shape, small_tiles);
    const uint64_t values = length / format::value_size(dtype);
    return std::max<uint64_t>(format::div_up(values, format::tile_values(coding)), 1);
}

// Bytes of a chunk before its tail; of a stored one, all.
uint64_t fixed_of(uint8_t dtype, uint8_t shape, bool small_tiles, uint64_t length)
{
    return dtype == ZIP_DTYPE_BYTES
                   ? format::HEADER_LENGTH + length
                   : format::layout_of(coding_of(dtype, shape, small_tiles), length).tail;
}

// An item's geometry, before it is under a coding.
struct Geometry {
    uint8_t *data, *chunks;
    uint64_t *progress;
    void *probe; // of an item of unknown type
    uint64_t chunk_stride;
    uint64_t chunk_length; // of every chunk but the last
    uint64_t last_length, last_room;
    uint32_t chunk_count, first_chunk;
    bool small_tiles, add, any_shape;

    uint64_t data_size() const { return (chunk_count - 1) * chunk_length + last_length; }
};

// Layouts of chunks of one length after the other: in a batch most are the one before.
class LayoutMemo {
public:
    const format::Layout &of(format::Coding c, uint64_t length)
    {
        if (length != length_ || c.dtype != coding_.dtype || c.shape != coding_.shape ||
            c.small_tiles != coding_.small_tiles) {
            coding_ = c;
            length_ = length;
            layout_ = format::layout_of(c, length);
        }
        return layout_;
    }

private:
    format::Coding coding_{};
    uint64_t length_ = 0;
    format::Layout layout_{};
};

// The item under one coding; job.h says what the words are.
Item item_of(const Geometry &g, uint8_t dtype, uint8_t shape, ChunkState *states, LayoutMemo &memo)
{
    const bool stored = dtype == ZIP_DTYPE_BYTES, small_tiles = g.small_tiles && !stored;
    Item item{};
    auto address = [](const void *p) { return reinterpret_cast<uintptr_t>(p); };
    for (const bool last : {false, true}) {
        if (!last && g.chunk_count == 1)
            continue; // nobody reads it
        const uint64_t length = last ? g.last_length : g.chunk_length, chunks = address(g.chunks);
        const uint64_t room = last ? g.last_room : g.chunk_stride;
        uint64_t(&w)[JOB_WORDS] = item.value[last];
        uint64_t fixed = format::HEADER_LENGTH + length;
        w[JOB_DATA] = w[JOB_CHUNK_DATA] = address(g.data);
        w[JOB_CHUNK] = chunks;
        w[JOB_MANTISSA] = chunks + format::HEADER_LENGTH;
        if (stored) {
            w[JOB_TILES] = tiles_of(dtype, shape, small_tiles, length);
            w[JOB_LEFT] = length;
        } else {
            const format::Layout &l = memo.of(coding_of(dtype, shape, small_tiles), length);
            w[JOB_LOW] = chunks + l.low;
            w[JOB_LOW2] = chunks + l.low2;
            w[JOB_LEVEL1] = chunks + l.level1;
            w[JOB_COUNTS] = chunks + l.counts;
            w[JOB_TILE_HEADER] = chunks + l.tile_headers;
            w[JOB_SYMBOLS] = chunks + l.symbols;
            w[JOB_TAIL] = chunks + l.tail;
            w[JOB_TILES] = std::max<uint64_t>(l.tiles, 1);
            w[JOB_LEFT] = l.values;
            fixed = l.tail;
        }
        w[JOB_STATE] = address(states + g.first_chunk);
        w[JOB_PROGRESS] = address(g.progress);
        w[JOB_LENGTH] = length;
        w[JOB_TAIL_ROOM] = room > fixed ? room - fixed : 0;
        w[JOB_FLAGS] =
                (last ? JOB_LAST : 0) | (small_tiles ? JOB_SMALL : 0) | (g.add ? JOB_ADD : 0);
    }
    uint64_t(&chunk)[JOB_WORDS] = item.chunk_step;
    for (uint32_t w = JOB_MANTISSA; w <= JOB_CHUNK; ++w)
        chunk[w] = g.chunk_stride;
    chunk[JOB_DATA] = chunk[JOB_CHUNK_DATA] = g.chunk_length;
    chunk[JOB_STATE] = sizeof(ChunkState);
    chunk[JOB_PROGRESS] = g.progress != nullptr ? sizeof(uint64_t) : 0;

    uint64_t(&tile)[JOB_WORDS] = item.tile_step;
    if (!stored) {
        const format::Coding c = coding_of(dtype, shape, small_tiles);
        const format::TypeTraits type = format::type_traits(dtype);
        const uint64_t values = format::tile_values(c), low = std::min(type.low_bytes, 2u);
        tile[JOB_DATA] = values * type.size;
        tile[JOB_MANTISSA] = type.mantissa_is_bytes()
                                     ? values
                                     : format::plane_bytes(type.sign_mantissa_bits(), values);
        tile[JOB_LOW] = values * low;
        tile[JOB_LOW2] = values * (type.low_bytes - low);
        tile[JOB_LEVEL1] = format::plane_bytes(format::shape_traits(shape).width[0], values);
        tile[JOB_COUNTS] = format::tile_counts_bytes(c, uint32_t(values));
        tile[JOB_TILE_HEADER] = sizeof(uint64_t);
        tile[JOB_SYMBOLS] = sizeof(format::TileSymbols);
        tile[JOB_LEFT] = -values;
    }
    tile[JOB_TILE] = 1;

    item.chunk_tiles = uint32_t(item.value[g.chunk_count == 1][JOB_TILES]);
    item.chunk_count = g.chunk_count;
    item.chunk_log2 = std::has_single_bit(item.chunk_tiles)
                              ? uint32_t(std::countr_zero(item.chunk_tiles))
                              : 32;
    item.probe = g.probe;
    item.dtype = dtype;
    item.shape = stored ? uint8_t(format::SHAPE_STORED) : shape;
    item.any_shape = g.any_shape;
    return item;
}

// Whether the kernels for whole tiles alone may have it.
bool only_whole_tiles(const Geometry &g, uint8_t dtype, uint8_t shape, bool encode)
{
    if (dtype == ZIP_DTYPE_BYTES || g.small_tiles)
        return false;
    const uint64_t tile = uint64_t(format::tile_values(coding_of(dtype, shape, false))) *
                          format::value_size(dtype);
    // NOLINTNEXTLINE(*DivideZero): type and shape are valid
    auto whole = [tile](uint64_t length) { return length % tile == 0; };
    return g.last_length != 0 && whole(g.last_length) && whole(g.chunk_length) &&
           (!encode || reinterpret_cast<uintptr_t>(g.data) % CHUNKS_ALIGN == 0);
}

// The item as the kernels want it, but for its coding and its place in the launch; or what is wrong
// with it.
zip_status_t translate(const zip_gpu_item_t &in, size_t number, Action action, Geometry *out)
{
    auto invalid = [number](const char *what) {
        return fail(ZIP_ERR_INVALID_PARAM, "item %zu: %s", number, what);
    };
    const int dtype = int(in.coding.dtype);
    int op; // a C caller may put more in an enumeration than C++ lets it hold
    std::memcpy(&op, &in.op, sizeof op);
    if (in.data == nullptr && in.data_size != 0)
        return invalid("data is null");
    if (action == Action::PROBE) {
        *out = {};
        out->data = static_cast<uint8_t *>(in.data);
        out->last_length = out->chunk_length = in.data_size;
        out->chunk_count = 1;
        return ZIP_OK;
    }
    if (dtype != ZIP_DTYPE_AUTO && (dtype < ZIP_DTYPE_BYTES || dtype >= ZIP_DTYPE_LAST))
        return fail(ZIP_ERR_INVALID_PARAM, "item %zu: %d is no type", number, dtype);
    if (dtype == ZIP_DTYPE_AUTO && action == Action::DECODE)
        return invalid("type AUTO is for encodes");
    uint8_t shape = uint8_t(in.coding.shape);
    if (dtype != ZIP_DTYPE_BYTES && (in.coding.shape < 0 || in.coding.shape >= ZIP_SHAPE_LAST))
        return fail(ZIP_ERR_INVALID_PARAM, "item %zu: %d is no shape", number,
                    int(in.coding.shape));
    bool small_tiles = in.coding.small_tiles != 0;
    if (dtype == ZIP_DTYPE_BYTES) {
        shape = format::SHAPE_STORED;
        small_tiles = false;
    } else if (dtype != ZIP_DTYPE_AUTO && shape == ZIP_SHAPE_DEFAULT) {
        shape = format::SHAPE_22228;
    }
    if (small_tiles && shape == format::SHAPE_DENSE)
        return invalid("shape dense has no small tiles");
    if (in.chunks == nullptr)
        return invalid("chunks is null");
    if (reinterpret_cast<uintptr_t>(in.chunks) % CHUNKS_ALIGN != 0)
        return invalid("chunks is not aligned to 16 bytes");
    if (reinterpret_cast<uintptr_t>(in.progress) % sizeof(uint64_t) != 0)
        return invalid("progress is not aligned to 8 bytes");
    if (in.chunk_length % CHUNKS_ALIGN != 0)
        return invalid("chunk_length is no multiple of 16");
    const bool several = in.chunk_length != 0 && in.data_size > in.chunk_length;
    const uint64_t full = several ? in.chunk_length : in.data_size; // of the first chunk
    if (full > ZIP_GPU_MAX_CHUNK)
        return invalid("a chunk has more than ZIP_GPU_MAX_CHUNK bytes");
    const uint64_t count = several ? format::div_up(in.data_size, full) : 1;
    if (count > std::numeric_limits<int32_t>::max())
        return invalid("more than 2^31 - 1 chunks");
    if (several && in.chunk_stride % CHUNKS_ALIGN != 0)
        return invalid("chunk_stride is no multiple of 16");
    const uint64_t last = in.data_size - (count - 1) * full;
    const uint64_t last_room = in.last_room != 0 ? in.last_room : in.chunk_stride;
    auto too_small = [&](const char *what, uint64_t room, uint64_t need) {
        return fail(ZIP_ERR_INVALID_PARAM,
                    "item %zu: %s is %" PRIu64 " bytes, but a chunk needs %" PRIu64, number, what,
                    room, need);
    };
    if (action == Action::ENCODE) {
        if (several && in.chunk_stride < bound_of(uint8_t(dtype), shape, small_tiles, full))
            return too_small("chunk_stride", in.chunk_stride,
                             bound_of(uint8_t(dtype), shape, small_tiles, full));
        if (last_room < bound_of(uint8_t(dtype), shape, small_tiles, last))
            return too_small(in.last_room != 0 ? "last_room" : "chunk_stride", last_room,
                             bound_of(uint8_t(dtype), shape, small_tiles, last));
    }
    if (action == Action::DECODE) {
        // what comes behind the fixed parts is the chunk's to say, and the kernel's to check
        if (several && in.chunk_stride < fixed_of(uint8_t(dtype), shape, small_tiles, full))
            return too_small("chunk_stride", in.chunk_stride,
                             fixed_of(uint8_t(dtype), shape, small_tiles, full));
        if (last_room < fixed_of(uint8_t(dtype), shape, small_tiles, last))
            return too_small(in.last_room != 0 ? "last_room" : "chunk_stride", last_room,
                             fixed_of(uint8_t(dtype), shape, small_tiles, last));
        if (op != ZIP_GPU_STORE && op != ZIP_GPU_ADD)
            return fail(ZIP_ERR_INVALID_PARAM, "item %zu: %d is no operation", number, op);
        if (op == ZIP_GPU_ADD) {
            if (dtype != ZIP_DTYPE_BF16 && dtype != ZIP_DTYPE_FP16 && dtype != ZIP_DTYPE_FP32)
                return invalid("only bf16, fp16 and fp32 can be added");
            if (in.data_size % format::value_size(uint8_t(dtype)) != 0)
                return invalid("data_size is no multiple of the type's, so the rest cannot be "
                               "added");
        }
    }

    *out = {};
    out->data = static_cast<uint8_t *>(in.data);
    out->chunks = static_cast<uint8_t *>(in.chunks);
    out->progress = in.progress;
    out->chunk_stride = in.chunk_stride;
    out->chunk_length = full;
    out->last_length = last;
    out->last_room = last_room;
    out->chunk_count = uint32_t(count);
    out->add = action == Action::DECODE && op == ZIP_GPU_ADD;
    out->small_tiles = small_tiles;
    return ZIP_OK;
}

// For the probe of an item: its whole data is one piece.
Item probe_of(const Geometry &g)
{
    Geometry whole = g;
    whole.last_length = whole.chunk_length = g.data_size();
    whole.chunk_count = 1;
    LayoutMemo memo;
    return item_of(whole, ZIP_DTYPE_BYTES, format::SHAPE_STORED, nullptr, memo);
}

uint64_t tiles_of(const Item &item)
{
    return uint64_t(item.chunk_count - 1) * item.chunk_tiles + item.value[1][JOB_TILES];
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
    void *stream() const { return stream_; }

private:
    // A launch: its items are items_[first, first + count).
    struct Part {
        size_t first, count;
        uint64_t tiles;
        Kernel kernel;
        bool whole;   // all its tiles are
        bool offered; // to several kernels, most of which find that a probe chose another
    };
    zip_status_t launch_part(const Part &part, const Item *device_items, zip_gpu_launch_t params);
    // Passes on what a call of the driver returned. After an error nobody knows what of the batch
    // is under way, nor whether a slot is free: the queue has failed.
    zip_status_t noting(zip_status_t status);
    // Places in the table: an item has one, one of unknown type many.
    size_t places() const
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
    Item *table_ = nullptr;
    std::vector<Slot> slots_;
    size_t next_slot_ = 0;
    // of the batch that is being made; they never grow
    std::vector<Geometry> translated_;
    std::vector<Item> items_;
    std::vector<Part> parts_;
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
        if (slot.items != nullptr)
            driver_.free_pinned(slot.items);
    }
    for (void *memory : {static_cast<void *>(states_), static_cast<void *>(probes_),
                         static_cast<void *>(table_)}) {
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
    translated_.reserve(max_items_);
    items_.reserve(places());
    parts_.reserve(KERNELS);
    stream_ = params.stream;
    zip_status_t status = ZIP_OK;
    auto step = [&status](zip_status_t s) { return (status = s) == ZIP_OK; };
    auto device = [&](auto **memory_p, size_t count) {
        void *memory = nullptr;
        const size_t size = count * sizeof **memory_p;
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
    if (!device(&states_, max_chunks_) || !device(&probes_, MAX_UNKNOWN))
        return status;
    if (params.slots != 0) {
        if (!device(&table_, places()))
            return status;
        slots_.resize(params.slots);
        for (Slot &slot : slots_) {
            void *memory = nullptr;
            if (!step(driver_.allocate_pinned(places() * sizeof(Item), &memory)))
                return status;
            slot.items = static_cast<Item *>(memory);
            if (!step(driver_.event_create(&slot.copied)))
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

zip_status_t Queue::submit(Action action, const zip_gpu_item_t *in, size_t count,
                           zip_gpu_launch_t params, zip_probe_t *results)
{
    if (failed_) // why comes last: the text may be cut short
        return fail(ZIP_ERR_DEVICE,
                    "this queue failed in an earlier call: destroy it and make another; the error "
                    "was: %s",
                    failure_);
    if (count == 0)
        return ZIP_OK;
    if (in == nullptr)
        return fail(ZIP_ERR_INVALID_PARAM, "items is null");
    if (action != Action::PROBE && params.seq == 0)
        return fail(ZIP_ERR_INVALID_PARAM, "seq is 0");
    if (count > max_items_)
        return fail(ZIP_ERR_NO_SPACE, "%zu items in a batch, but the queue was made for %" PRIu32,
                    count, max_items_);

    // Items that share a launch lie together; those of probes come first.
    items_.clear();
    parts_.clear();
    translated_.clear();
    uint64_t chunks = 0;
    size_t unknown = 0;
    bool present[format::DTYPES] = {};
    for (size_t i = 0; i < count; ++i) {
        Geometry item{};
        const zip_status_t status = translate(in[i], i, action, &item);
        if (status != ZIP_OK)
            return status;
        item.first_chunk = uint32_t(chunks);
        if (action != Action::PROBE)
            chunks += item.chunk_count;
        if (chunks > max_chunks_)
            return fail(ZIP_ERR_NO_SPACE,
                        "item %zu: the batch has more chunks than the %" PRIu32
                        " that the queue was made for",
                        i, max_chunks_);
        if (action == Action::PROBE)
            item.probe = results + i;
        else if (in[i].coding.dtype == ZIP_DTYPE_AUTO && unknown == MAX_UNKNOWN)
            return fail(ZIP_ERR_NO_SPACE, "item %zu: more than %" PRIu32 " items of unknown type",
                        i, MAX_UNKNOWN);
        else if (in[i].coding.dtype == ZIP_DTYPE_AUTO)
            item.probe = probes_ + unknown++;
        item.any_shape = in[i].coding.shape != ZIP_SHAPE_DEFAULT;
        translated_.push_back(item);
        if (in[i].coding.dtype != ZIP_DTYPE_AUTO && action != Action::PROBE)
            present[in[i].coding.dtype] = true;
        if (item.probe != nullptr)
            items_.push_back(probe_of(item));
    }
    if (!items_.empty())
        parts_.push_back({0, items_.size(), 0, {Action::PROBE, false, false, 0, 0}, false, false});
    for (uint32_t k = 0; k < KERNELS && action != Action::PROBE; ++k) {
        const Kernel kernel = kernel_of(k);
        if (kernel.action != action || kernel.few || kernel.whole || !exists(kernel))
            continue;
        if (unknown == 0 && !present[kernel.dtype])
            continue; // a look at each item of a long batch costs more than the launch
        Part part{items_.size(), 0, 0, kernel, true, false};
        LayoutMemo memo;
        for (size_t i = 0; i < count; ++i) {
            if (!belongs(in[i], kernel.dtype, kernel.shape))
                continue;
            Item item = item_of(translated_[i], kernel.dtype, kernel.shape, states_, memo);
            part.whole = part.whole && only_whole_tiles(translated_[i], kernel.dtype, kernel.shape,
                                                        action == Action::ENCODE);
            item.first_tile = uint32_t(part.tiles);
            part.tiles += tiles_of(item);
            part.offered = part.offered || item.probe != nullptr;
            if (part.tiles > MAX_TILES)
                return fail(ZIP_ERR_INVALID_PARAM,
                            "item %zu: the batch has more than 2^31 - 1 tiles", i);
            items_.push_back(item);
            ++part.count;
        }
        if (part.count != 0)
            parts_.push_back(part);
    }

    const Inside inside(driver_);
    if (noting(inside.status()) != ZIP_OK)
        return inside.status();
    const Item *device_items = nullptr;
    const bool fits = std::all_of(parts_.begin(), parts_.end(),
                                  [](const Part &part) { return part.count <= INLINE_ITEMS; });
    if (!fits) {
        if (slots_.empty())
            return fail(ZIP_ERR_NO_SPACE,
                        "the queue has no slots for batches of more than %" PRIu32 " items",
                        INLINE_ITEMS);
        Slot &slot = slots_[next_slot_];
        bool done = false;
        zip_status_t status = noting(driver_.event_query(slot.copied, &done));
        if (status != ZIP_OK)
            return status;
        if (!done)
            return fail(ZIP_ERR_NO_SPACE, "all %zu slots are in use", slots_.size());
        const size_t size = items_.size() * sizeof(Item);
        std::memcpy(slot.items, items_.data(), size);
        status = noting(driver_.copy_to_device(table_, slot.items, size, stream_));
        if (status == ZIP_OK)
            status = noting(driver_.event_record(slot.copied, stream_));
        if (status != ZIP_OK)
            return status;
        next_slot_ = (next_slot_ + 1) % slots_.size();
        device_items = table_;
    }

    for (const Part &part : parts_) {
        const zip_status_t status = noting(launch_part(part, device_items, params));
        if (status != ZIP_OK)
            return status;
    }
    return ZIP_OK;
}

zip_status_t Queue::launch_part(const Part &part, const Item *device_items, zip_gpu_launch_t params)
{
    Launch launch{};
    launch.states = states_;
    launch.items = uint32_t(part.count);
    launch.tiles = uint32_t(part.tiles);
    launch.seq = params.seq;
    if (device_items != nullptr)
        launch.table = device_items + part.first;
    else
        std::copy_n(items_.data() + part.first, part.count, launch.inline_items);
    if (part.kernel.action == Action::PROBE)
        return driver_.launch(part.kernel, launch.items, TILE_THREADS, false, stream_, launch);

    const DeviceInfo &info = driver_.info();
    const bool dense = part.kernel.shape == format::SHAPE_DENSE,
               limited = params.max_sms != 0 && params.max_sms < info.multiprocessors;
    Kernel kernel = part.kernel;
    kernel.few = limited;
    kernel.whole = part.whole;
    if (!exists(kernel))
        kernel.whole = false;
    if (!exists(kernel))
        kernel.few = false;
    const bool use_few = kernel.few;
    // A block a tile is fastest (H200: 4% at 256 MiB against blocks that take turns), but not where
    // blocks have nothing to do.
    const uint32_t most_blocks = limited        ? params.max_sms
                                 : part.offered ? info.multiprocessors * OFFERED_BLOCKS
                                                : launch.tiles;
    return driver_.launch(kernel, std::min(most_blocks, launch.tiles),
                          dense     ? DENSE_TILE_THREADS
                          : use_few ? info.few_threads
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

zip_gpu_api_t make_api(const char *name, zip_status_t (*open)(zip_gpu_t **))
{
    return {ZIP_GPU_API_VERSION,
            name,
            error_text,
            open,
            api_close,
            api_queue_create,
            api_queue_destroy,
            api_queue_stream,
            api_encode,
            api_decode,
            api_probe};
}

} // namespace zip::gpu
