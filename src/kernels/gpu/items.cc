// SPDX-License-Identifier: BSD-3-Clause
// Checks items and lays them out.
#include "kernels/gpu/items.h"

#include <algorithm>
#include <bit>
#include <cinttypes>
#include <limits>
#include <utility>

#include "kernels/format.h"

namespace zip::gpu {

namespace {

using Action = Kernel::Action;

// What a chunk's length decides under a coding, beside where its sections are.
struct ChunkPlan {
    uint64_t fixed; // bytes before the tail; of a stored chunk, all
    uint64_t bound; // most bytes that a GPU makes
    uint64_t tiles; // at least one: somebody must write the header
    bool whole;     // it has tiles, and all are whole
};
// The words of a chunk's first tile, in an item whose addresses are 0; but for TAIL_ROOM and FLAGS.
using Words = uint64_t[JOB_WORDS];

ChunkPlan plan_stored(uint64_t length, Words &w)
{
    std::fill_n(w, size_t(JOB_WORDS), 0);
    w[JOB_MANTISSA] = format::HEADER_LENGTH;
    w[JOB_LENGTH] = w[JOB_LEFT] = length;
    w[JOB_TILES] = std::max<uint64_t>(format::div_up(length, STORED_TILE_BYTES), 1);
    const uint64_t bytes = format::HEADER_LENGTH + length;
    return {bytes, bytes, w[JOB_TILES], false};
}

// A function for each coding, in which the layout's divisions are by constants. (Sanitizers' checks
// in all of it would take the compiler most of a minute.)
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define ZIP_FLATTEN
#else
#define ZIP_FLATTEN [[gnu::flatten]]
#endif
template <uint8_t dtype, uint8_t shape, bool small_tiles>
ZIP_FLATTEN ChunkPlan plan_coded(uint64_t length, Words &w)
{
    constexpr format::Coding coding{dtype, shape, small_tiles};
    constexpr uint64_t tile = uint64_t(format::tile_values(coding)) * format::value_size(dtype);
    const format::Layout l = format::layout_of(coding, length);
    w[JOB_DATA] = 0;
    w[JOB_MANTISSA] = l.mantissa;
    w[JOB_LOW] = l.low;
    w[JOB_LOW2] = l.low2;
    w[JOB_LEVEL1] = l.level1;
    w[JOB_COUNTS] = l.counts;
    w[JOB_TILE_HEADER] = l.tile_headers;
    w[JOB_SYMBOLS] = l.symbols;
    w[JOB_TAIL] = l.tail;
    w[JOB_CHUNK] = 0;
    w[JOB_CHUNK_DATA] = 0;
    w[JOB_STATE] = 0;
    w[JOB_PROGRESS] = 0;
    w[JOB_LENGTH] = length;
    w[JOB_TILES] = std::max<uint64_t>(l.tiles, 1);
    w[JOB_LEFT] = l.values;
    w[JOB_TILE] = 0;
    return {l.tail, l.tail + format::max_tail(coding, l.values), w[JOB_TILES],
            length != 0 && length % tile == 0};
}

// From a tile to the next one in its chunk.
constexpr std::array<uint64_t, JOB_WORDS> tile_steps(format::Coding c)
{
    std::array<uint64_t, JOB_WORDS> step{};
    step[JOB_TILE] = 1;
    for (uint32_t w = 0; w < JOB_WORDS && c.dtype != format::DTYPE_BYTES; ++w)
        step[w] = tile_step(c, JobWord(w));
    return step;
}

struct CodingRules {
    ChunkPlan (*plan)(uint64_t length, Words &words); // null: there is no such coding
    std::array<uint64_t, JOB_WORDS> tile_step;
};

template <size_t number>
constexpr CodingRules make_rules()
{
    constexpr format::Coding c{uint8_t(number / 2 / format::SHAPES),
                               uint8_t(number / 2 % format::SHAPES), number % 2 != 0};
    if constexpr (c.dtype == format::DTYPE_BYTES && c.shape == format::SHAPE_STORED)
        return {plan_stored, tile_steps(c)};
    else if constexpr (format::valid_coding(c))
        return {plan_coded<c.dtype, c.shape, c.small_tiles>, tile_steps(c)};
    else
        return {};
}

template <size_t... number>
constexpr std::array<CodingRules, sizeof...(number)> make_all_rules(std::index_sequence<number...>)
{
    return {make_rules<number>()...};
}
constexpr auto RULES =
        make_all_rules(std::make_index_sequence<size_t(format::DTYPES) * format::SHAPES * 2>());

const CodingRules &rules_of(format::Coding c)
{
    return RULES[(c.dtype * format::SHAPES + c.shape) * 2 + c.small_tiles];
}

struct Plans {
    ChunkPlan full, last; // an item of one chunk has no full one
};

// Plans an item's chunks, and writes their words.
Plans plan_item(const Geometry &g, format::Coding coding, ItemLayout &layout)
{
    const auto plan = rules_of(coding).plan;
    Plans plans;
    plans.last = plan(g.last_length, layout.value[1]);
    if (g.chunk_count != 1)
        plans.full = plan(g.chunk_length, layout.value[0]);
    return plans;
}

// Makes the rest of a pattern whose item is planned.
void finish_pattern(const Geometry &g, format::Coding coding, const Plans &plans, Pattern *pattern)
{
    const auto room = [](uint64_t all, uint64_t fixed) { return all > fixed ? all - fixed : 0; };
    const uint64_t flags = (coding.small_tiles ? JOB_SMALL : 0) | (g.add ? JOB_ADD : 0);
    ItemLayout &layout = pattern->layout;
    layout.value[1][JOB_TAIL_ROOM] = room(g.last_room, plans.last.fixed);
    layout.value[1][JOB_FLAGS] = flags;
    uint64_t chunk_tiles = plans.last.tiles;
    pattern->tiles = plans.last.tiles;
    pattern->whole = plans.last.whole && !coding.small_tiles;
    if (g.chunk_count != 1) {
        layout.value[0][JOB_TAIL_ROOM] = room(g.chunk_stride, plans.full.fixed);
        layout.value[0][JOB_FLAGS] = flags;
        chunk_tiles = plans.full.tiles;
        pattern->tiles += (g.chunk_count - 1) * chunk_tiles;
        pattern->whole = pattern->whole && plans.full.whole;
        std::fill_n(layout.chunk_step, size_t(JOB_WORDS), 0);
        std::fill(layout.chunk_step + JOB_MANTISSA, layout.chunk_step + JOB_CHUNK + 1,
                  g.chunk_stride);
        layout.chunk_step[JOB_DATA] = layout.chunk_step[JOB_CHUNK_DATA] = g.chunk_length;
        layout.chunk_step[JOB_STATE] = sizeof(ChunkState);
        layout.chunk_step[JOB_PROGRESS] = g.has_progress ? sizeof(uint64_t) : 0;
    }
    std::copy_n(rules_of(coding).tile_step.data(), size_t(JOB_WORDS), layout.tile_step);
    layout.chunk_tiles = uint32_t(chunk_tiles);
    layout.chunk_count = g.chunk_count;
    const uint32_t log2 = uint32_t(std::countr_zero(layout.chunk_tiles));
    layout.chunk_log2 = layout.chunk_tiles == uint32_t(1) << log2 ? log2 : 32;
    layout.dtype = coding.dtype;
    layout.shape = coding.shape;
    layout.any_shape = g.any_shape;
}

constexpr format::Coding STORED = {format::DTYPE_BYTES, format::SHAPE_STORED, false};

// Most bytes of a chunk whose type its encoder finds.
uint64_t unknown_bound(uint8_t shape, bool small_tiles, uint64_t length)
{
    uint64_t bound = 0;
    for_each_offer(shape, [&](uint8_t d, uint8_t s) {
        Words unused;
        const format::Coding c{d, s, small_tiles && d != format::DTYPE_BYTES};
        bound = std::max(bound, rules_of(c).plan(length, unused).bound);
    });
    return bound;
}

// Checks all that an item says. Makes its geometry and, of an encode or a decode whose type is
// known, the pattern; of an invalid one they hold anything.
zip_status_t check(const zip_gpu_item_t &in, size_t number, Action action, Kind *kind)
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
        kind->geometry = {}; // no chunks
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
    if (dtype == ZIP_DTYPE_FP64 && shape == format::SHAPE_COLUMNS)
        return invalid("shape columns is not for fp64");
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

    Geometry &g = kind->geometry;
    g.chunk_length = full;
    g.chunk_stride = in.chunk_stride;
    g.last_length = in.data_size - (count - 1) * full;
    g.last_room = in.last_room != 0 ? in.last_room : in.chunk_stride;
    g.chunk_count = uint32_t(count);
    g.small_tiles = small_tiles;
    g.add = action == Action::DECODE && op == ZIP_GPU_ADD;
    g.any_shape = in.coding.shape != ZIP_SHAPE_DEFAULT;
    g.has_progress = in.progress != nullptr;
    const bool known = dtype != ZIP_DTYPE_AUTO;
    const format::Coding coding{uint8_t(dtype), shape, small_tiles};
    Plans plans{};
    if (known)
        plans = plan_item(g, coding, kind->pattern.layout);

    // What a decode finds behind the fixed parts is the chunk's to say, and the kernel's to check.
    auto need = [&](const ChunkPlan &plan, uint64_t length) {
        return !known                     ? unknown_bound(shape, small_tiles, length)
               : action == Action::ENCODE ? plan.bound
                                          : plan.fixed;
    };
    auto too_small = [number](const char *what, uint64_t room, uint64_t needed) {
        return fail(ZIP_ERR_INVALID_PARAM,
                    "item %zu: %s is %" PRIu64 " bytes, but a chunk needs %" PRIu64, number, what,
                    room, needed);
    };
    if (several) {
        const uint64_t needed = need(plans.full, full);
        if (in.chunk_stride < needed)
            return too_small("chunk_stride", in.chunk_stride, needed);
    }
    const uint64_t needed = need(plans.last, g.last_length);
    if (g.last_room < needed)
        return too_small(in.last_room != 0 ? "last_room" : "chunk_stride", g.last_room, needed);
    if (action == Action::DECODE && op != ZIP_GPU_STORE && op != ZIP_GPU_ADD)
        return fail(ZIP_ERR_INVALID_PARAM, "item %zu: %d is no operation", number, op);
    if (g.add) {
        if (dtype != ZIP_DTYPE_BF16 && dtype != ZIP_DTYPE_FP16 && dtype != ZIP_DTYPE_FP32)
            return invalid("only bf16, fp16 and fp32 can be added");
        if (in.data_size % format::value_size(uint8_t(dtype)) != 0)
            return invalid("data_size is no multiple of the type's, so the rest cannot be added");
    }
    if (known)
        finish_pattern(g, coding, plans, &kind->pattern);
    return ZIP_OK;
}

} // namespace

void make_pattern(const Geometry &geometry, format::Coding coding, Pattern *pattern)
{
    if (coding.dtype == format::DTYPE_BYTES)
        coding = STORED; // has no small tiles
    finish_pattern(geometry, coding, plan_item(geometry, coding, pattern->layout), pattern);
}

void make_probe_pattern(uint64_t data_size, Pattern *pattern)
{
    Geometry whole{};
    whole.chunk_length = whole.last_length = data_size;
    whole.chunk_count = 1;
    make_pattern(whole, STORED, pattern);
    pattern->tiles = 0;
}

uint32_t part_of(const zip_gpu_item_t &item)
{
    const int dtype = int(item.coding.dtype), shape = int(item.coding.shape);
    if (dtype == ZIP_DTYPE_BYTES)
        return part_of(format::DTYPE_BYTES, format::SHAPE_STORED);
    if (dtype < 0 || dtype >= ZIP_DTYPE_LAST || shape < 0 || shape >= ZIP_SHAPE_LAST)
        return NO_PART;
    return part_of(uint8_t(dtype),
                   shape == ZIP_SHAPE_DEFAULT ? uint8_t(format::SHAPE_22228) : uint8_t(shape));
}

bool is_unknown(const zip_gpu_item_t &item, Action action)
{
    return item.coding.dtype == ZIP_DTYPE_AUTO && action == Action::ENCODE &&
           int(item.coding.shape) >= 0 && int(item.coding.shape) < ZIP_SHAPE_LAST;
}

Kind *Kinds::find(const zip_gpu_item_t &item, size_t number, Action action)
{
    // factors are odd: no bit of a word is lost
    uint64_t hash = 0, factor = UINT64_C(0x9e3779b97f4a7c15); // 2^64 over the golden ratio
    for (uint64_t word : Kind::key_of(item, action)) {
        hash += word * factor;
        factor = factor * 3 + 2;
    }
    Kind &kind = kinds_[hash >> (64 - LOG2_KINDS)];
    if (kind.valid && kind.is_of(item, action) && has_good_addresses(item, action))
        return &kind;
    kind.valid = false;
    kind.batch = 0;
    if (check(item, number, action, &kind) != ZIP_OK)
        return nullptr;
    kind.part = action == Action::PROBE ? PROBE_PART : part_of(item);
    if (kind.part == PROBE_PART || kind.part == NO_PART)
        make_probe_pattern(item.data_size, &kind.pattern);
    kind.key = Kind::key_of(item, action);
    kind.valid = true;
    return &kind;
}

} // namespace zip::gpu
