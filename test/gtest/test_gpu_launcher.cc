// SPDX-License-Identifier: BSD-3-Clause
// The launcher of the GPU codec, on a driver that only notes what it is asked for: what it refuses,
// what it launches, and what it tells the kernels. No kernel runs here.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kernels/format.h"
#include "simt/driver_cpu.h"

namespace {

using zip::gpu::CpuDriver;
using zip::gpu::InlineItem;
using zip::gpu::name_of;
namespace format = zip::format;

alignas(16) uint8_t data[16], chunks[16]; // addresses only: nothing is read or written
uint64_t progress[4];

// Word of the job that a tile's worker has.
uint64_t word(const InlineItem &item, zip::gpu::JobWord w, uint64_t chunk = 0, uint64_t tile = 0)
{
    const zip::gpu::ItemLayout &l = item.layout;
    return l.value[chunk + 1 == l.chunk_count ? 1 : 0][w] + chunk * l.chunk_step[w] +
           tile * l.tile_step[w];
}
// Item of a launch with a table, whose copy has been made, as it would be in an argument.
InlineItem table_item(const zip::gpu::Launch &launch, size_t number)
{
    const zip::gpu::TableItem &from = launch.table[number];
    InlineItem item{from.place, launch.layouts[from.place.layout]};
    for (uint32_t w = 0; w < zip::gpu::JOB_WORDS; ++w) {
        for (auto &value : item.layout.value)
            value[w] += from.address[zip::gpu::address_of(w)];
    }
    return item;
}
uint64_t address(const void *p)
{
    return reinterpret_cast<uintptr_t>(p);
}

class Launcher : public testing::Test {
protected:
    void SetUp() override
    {
        ASSERT_EQ(ZIP_OK, api_.open(nullptr, &gpu_)) << api_.error_text();
        driver_ = CpuDriver::opened();
        make_queue({nullptr, 64, 200, 2});
    }
    void TearDown() override
    {
        drop_queue();
        EXPECT_EQ("", driver_->error);
        api_.close(gpu_);
    }
    void make_queue(zip_gpu_queue_params_t params)
    {
        drop_queue();
        ASSERT_EQ(ZIP_OK, api_.queue_create(gpu_, &params, &queue_)) << api_.error_text();
    }
    void drop_queue()
    {
        if (queue_ == nullptr)
            return;
        // kernels are not what is tested here, and there are none
        driver_->enter();
        driver_->run(api_.queue_stream(queue_));
        driver_->leave();
        if (driver_->error.starts_with("no kernel"))
            driver_->error.clear();
        api_.queue_destroy(queue_);
        queue_ = nullptr;
    }
    static zip_gpu_item_t item(zip_dtype_t dtype = ZIP_DTYPE_BF16, uint64_t size = 1 << 20,
                               zip_shape_t shape = ZIP_SHAPE_22228)
    {
        zip_gpu_item_t i{};
        i.coding = {dtype, shape, 0};
        i.data = data;
        i.data_size = size;
        i.chunks = chunks;
        i.chunk_stride = (size + size / 64 + 2048) / 16 * 16;
        i.progress = progress;
        return i;
    }
    zip_status_t encode(const std::vector<zip_gpu_item_t> &items, uint32_t max_sms = 0)
    {
        return api_.encode(queue_, items.data(), items.size(), {max_sms, 7});
    }
    zip_status_t decode(const std::vector<zip_gpu_item_t> &items, uint32_t max_sms = 0)
    {
        return api_.decode(queue_, items.data(), items.size(), {max_sms, 7});
    }
    // Refused by both with that text.
    void refuses(const zip_gpu_item_t &i, const std::string &text)
    {
        refuses_encode(i, text);
        refuses_decode(i, text);
    }
    void refuses_encode(const zip_gpu_item_t &i, const std::string &text)
    {
        EXPECT_EQ(ZIP_ERR_INVALID_PARAM, encode({item(), i}));
        EXPECT_NE(std::string::npos, std::string(api_.error_text()).find("item 1: " + text))
                << api_.error_text();
        EXPECT_TRUE(driver_->launches.empty());
    }
    void refuses_with(zip_status_t status, const std::vector<zip_gpu_item_t> &items,
                      const std::string &text)
    {
        EXPECT_EQ(status, encode(items));
        EXPECT_EQ(text, api_.error_text());
        EXPECT_TRUE(driver_->launches.empty());
    }
    void refuses_decode(const zip_gpu_item_t &i, const std::string &text)
    {
        EXPECT_EQ(ZIP_ERR_INVALID_PARAM, decode({item(), i}));
        EXPECT_NE(std::string::npos, std::string(api_.error_text()).find("item 1: " + text))
                << api_.error_text();
        EXPECT_TRUE(driver_->launches.empty());
    }

    const zip_gpu_api_t &api_ = *CpuDriver::api(32);
    zip_gpu_t *gpu_ = nullptr;
    zip_gpu_queue_t *queue_ = nullptr;
    CpuDriver *driver_ = nullptr;
};

TEST_F(Launcher, RefusesWrongItemsByName)
{
    auto with = [](auto change) {
        zip_gpu_item_t i = item();
        change(i);
        return i;
    };
    refuses(with([](auto &i) { i.coding.dtype = ZIP_DTYPE_LAST; }), "7 is no type");
    refuses(with([](auto &i) { i.coding.shape = ZIP_SHAPE_LAST; }), "6 is no shape");
    refuses(with([](auto &i) {
                i.coding = {ZIP_DTYPE_BF16, ZIP_SHAPE_DENSE, 1};
            }),
            "shape dense has no small tiles");
    refuses(with([](auto &i) { i.data = nullptr; }), "data is null");
    refuses(with([](auto &i) { i.chunks = nullptr; }), "chunks is null");
    refuses(with([](auto &i) { i.chunks = chunks + 8; }), "chunks is not aligned");
    refuses(with([](auto &i) { i.progress = reinterpret_cast<uint64_t *>(chunks + 4); }),
            "progress is not aligned");
    refuses(with([](auto &i) { i.chunk_length = 1000; }), "chunk_length is no multiple");
    refuses(with([](auto &i) { i.chunk_length = 4096, i.chunk_stride += 8; }),
            "chunk_stride is no multiple");
    refuses(with([](auto &i) { i.data_size = ZIP_GPU_MAX_CHUNK + 1; }),
            "a chunk has more than ZIP_GPU_MAX_CHUNK");
    refuses(with([](auto &i) { i.chunk_length = 16, i.data_size = uint64_t(1) << 40; }),
            "more than 2^31 - 1 chunks");
    refuses_decode(with([](auto &i) { i.coding.dtype = ZIP_DTYPE_AUTO; }), "type AUTO");
    refuses_decode(with([](auto &i) { i.op = zip_gpu_op_t(2); }), "2 is no operation");
    refuses_decode(with([](auto &i) { i.op = ZIP_GPU_ADD, i.coding.dtype = ZIP_DTYPE_FP64; }),
                   "only bf16, fp16 and fp32");
    refuses_decode(with([](auto &i) { i.op = ZIP_GPU_ADD, i.data_size = 1001; }),
                   "data_size is no multiple");
}

TEST_F(Launcher, RefusesRoomBelowTheBound)
{
    for (int dtype = 0; dtype < ZIP_DTYPE_LAST; ++dtype) {
        for (uint64_t length : {0ul, 1ul, 100ul, 100001ul, 1ul << 20}) {
            const auto t = zip_dtype_t(dtype);
            uint64_t bound = 48 + length;
            if (t != ZIP_DTYPE_BYTES) {
                const format::Coding c{uint8_t(dtype), format::SHAPE_22228, false};
                const format::Layout l = format::layout_of(c, length);
                bound = l.tail + format::max_tail(c, l.values);
            }
            zip_gpu_item_t i = item(t, length);
            i.last_room = bound;
            EXPECT_EQ(ZIP_OK, encode({i})) << api_.error_text();
            driver_->launches.clear();
            i.last_room = bound - 1;
            refuses_encode(i, "last_room is");
            i.last_room = 0;
            i.chunk_stride = bound - 1;
            refuses_encode(i, "chunk_stride is");
            i.chunk_stride = 0;
            i.last_room = bound;
            EXPECT_EQ(ZIP_OK, encode({i})) << "one chunk needs no stride: " << api_.error_text();
            driver_->launches.clear();
        }
    }
}

TEST_F(Launcher, RefusesRoomBelowTheFixedPartsOfWhatItDecodes)
{
    for (zip_dtype_t dtype : {ZIP_DTYPE_BYTES, ZIP_DTYPE_FP16}) {
        zip_gpu_item_t i = item(dtype, 100001);
        uint64_t fixed = 48 + 100001;
        if (dtype != ZIP_DTYPE_BYTES)
            fixed = format::layout_of({uint8_t(dtype), format::SHAPE_22228, false}, 100001).tail;
        i.last_room = fixed - 1;
        refuses_decode(i, "last_room is");
        i.last_room = fixed;
        EXPECT_EQ(ZIP_OK, decode({i}));
        driver_->launches.clear();
        i.chunk_length = 50000;
        i.chunk_stride = 40000;
        refuses_decode(i, "chunk_stride is");
    }
}

TEST_F(Launcher, AnUnknownTypeNeedsTheLargestBound)
{
    for (zip_shape_t shape : {ZIP_SHAPE_DEFAULT, ZIP_SHAPE_38}) {
        const uint64_t length = 1000001;
        uint64_t bound = 0;
        for (uint8_t d = ZIP_DTYPE_BF16; d < ZIP_DTYPE_LAST; ++d) {
            for (uint8_t s : {format::SHAPE_22228, format::SHAPE_11238, format::SHAPE_38}) {
                if (shape == ZIP_SHAPE_DEFAULT ? s == format::SHAPE_38 : s != format::SHAPE_38)
                    continue;
                const format::Layout l = format::layout_of({d, s, false}, length);
                bound = std::max(bound, l.tail + format::max_tail({d, s, false}, l.values));
            }
        }
        zip_gpu_item_t i = item(ZIP_DTYPE_AUTO, length, shape);
        i.chunk_stride = 0;
        i.last_room = bound - 1;
        refuses_encode(i, "last_room is");
        i.last_room = bound;
        EXPECT_EQ(ZIP_OK, encode({i})) << api_.error_text();
        driver_->launches.clear();
    }
}

TEST_F(Launcher, AnUnknownTypeIsProbedAndOfferedToAllKernels)
{
    const zip_gpu_item_t known = item(ZIP_DTYPE_FP16, 16384);
    zip_gpu_item_t i = item(ZIP_DTYPE_AUTO, 100000, ZIP_SHAPE_DEFAULT);
    i.chunk_length = 32768;
    ASSERT_EQ(ZIP_OK, encode({known, i})) << api_.error_text();
    ASSERT_EQ(2u + 2 * (ZIP_DTYPE_LAST - 1), driver_->launches.size());
    const auto &probe = driver_->launches[0];
    EXPECT_EQ("zip_probe", name_of(probe.kernel));
    EXPECT_EQ(1u, probe.blocks);
    const InlineItem &probed = probe.launch.inline_items[0];
    ASSERT_NE(nullptr, probed.place.probe);
    EXPECT_EQ(1u, probed.layout.chunk_count);
    EXPECT_EQ(100000u, word(probed, zip::gpu::JOB_LENGTH));
    EXPECT_EQ(address(data), word(probed, zip::gpu::JOB_DATA));
    const uint64_t state = word(driver_->launches[1].launch.inline_items[0], zip::gpu::JOB_STATE);
    std::set<std::string> names;
    for (size_t k = 1; k < driver_->launches.size(); ++k) {
        const auto &l = driver_->launches[k];
        names.insert(name_of(l.kernel));
        const bool both = name_of(l.kernel) == "zip_encode_fp16_22228";
        ASSERT_EQ(both ? 2u : 1u, l.launch.items);
        EXPECT_TRUE(!both || l.launch.inline_items[0].place.probe == nullptr);
        const InlineItem &offered = l.launch.inline_items[both ? 1 : 0];
        EXPECT_EQ(probed.place.probe, offered.place.probe);
        EXPECT_EQ(l.kernel.dtype, offered.layout.dtype);
        EXPECT_EQ(l.kernel.shape, offered.layout.shape);
        // the same in all launches: one of them uses it
        EXPECT_EQ(state, word(offered, zip::gpu::JOB_STATE));
        EXPECT_EQ(4u, offered.layout.chunk_count);
        EXPECT_EQ(0, offered.layout.any_shape);
    }
    EXPECT_EQ(13u, names.size());
    EXPECT_TRUE(names.count("zip_encode_bytes") && names.count("zip_encode_e5m2_11238"));
}

TEST_F(Launcher, AnUnknownTypeInAShapeOfChoice)
{
    ASSERT_EQ(ZIP_OK, encode({item(ZIP_DTYPE_AUTO, 100000, ZIP_SHAPE_DENSE)}));
    ASSERT_EQ(1u + ZIP_DTYPE_LAST, driver_->launches.size());
    EXPECT_EQ("zip_encode_bytes", name_of(driver_->launches[1].kernel));
    EXPECT_EQ("zip_encode_bf16_dense", name_of(driver_->launches[2].kernel));
    for (size_t k = 1; k < driver_->launches.size(); ++k) {
        ASSERT_EQ(1u, driver_->launches[k].launch.items);
        EXPECT_NE(0, driver_->launches[k].launch.inline_items[0].layout.any_shape);
    }
}

TEST_F(Launcher, ManyUnknownTypesGoThroughTheTable)
{
    const std::vector<zip_gpu_item_t> items(64, item(ZIP_DTYPE_AUTO, 1000, ZIP_SHAPE_DEFAULT));
    ASSERT_EQ(ZIP_OK, encode(items)) << api_.error_text();
    const auto &launches = driver_->launches;
    ASSERT_EQ(14u, launches.size());
    for (size_t k = 0; k < 14; ++k) {
        EXPECT_EQ(64u, launches[k].launch.items);
        EXPECT_EQ(launches[0].launch.table + 64 * k, launches[k].launch.table);
    }
    driver_->run(api_.queue_stream(queue_), 14); // the copy and its event
    EXPECT_EQ(ZIP_DTYPE_E5M2, table_item(launches[13].launch, 63).layout.dtype);
}

TEST_F(Launcher, TellsKernelsWhatTheItemIs)
{
    using namespace zip::gpu;
    zip_gpu_item_t i = item(ZIP_DTYPE_FP32, 1000003);
    i.chunk_length = 400000;
    i.chunk_stride = 401600;
    i.last_room = 300000;
    const zip_gpu_item_t j = item(ZIP_DTYPE_FP32, 40000);
    ASSERT_EQ(ZIP_OK, encode({i, j})) << api_.error_text();
    ASSERT_EQ(1u, driver_->launches.size());
    const auto &l = driver_->launches[0];
    EXPECT_EQ("zip_encode_fp32_22228", name_of(l.kernel));
    EXPECT_EQ(TILE_THREADS, l.threads);
    EXPECT_EQ(2u, l.launch.items);
    EXPECT_EQ(7u, l.launch.seq);
    EXPECT_EQ(nullptr, l.launch.table);
    const InlineItem &a = l.launch.inline_items[0], &b = l.launch.inline_items[1];
    EXPECT_EQ(3u, a.layout.chunk_count);
    EXPECT_EQ(13u, a.layout.chunk_tiles); // of 8192 values of 4 bytes
    EXPECT_EQ(32u, a.layout.chunk_log2);
    EXPECT_EQ(0u, a.place.first_tile);
    EXPECT_EQ(13u + 13 + 7, b.place.first_tile);
    EXPECT_EQ(2u, b.layout.chunk_tiles);
    EXPECT_EQ(1u, b.layout.chunk_log2);
    EXPECT_EQ(35u, l.blocks);
    EXPECT_EQ(35u, l.launch.tiles);
    const uint64_t states = word(a, JOB_STATE);
    for (uint64_t c = 0; c < 3; ++c) {
        const bool last = c == 2;
        const uint64_t length = last ? 200003 : 400000, tile = 5;
        const format::Layout layout =
                format::layout_of({format::DTYPE_FP32, format::SHAPE_22228, false}, length);
        EXPECT_EQ(states + c * sizeof(ChunkState), word(a, JOB_STATE, c, tile));
        EXPECT_EQ(address(progress + c), word(a, JOB_PROGRESS, c, tile));
        EXPECT_EQ(address(data) + c * 400000, word(a, JOB_CHUNK_DATA, c, tile));
        EXPECT_EQ(address(chunks) + c * 401600, word(a, JOB_CHUNK, c, tile));
        EXPECT_EQ(length, word(a, JOB_LENGTH, c, tile));
        EXPECT_EQ((last ? 300000 : 401600) - layout.tail, word(a, JOB_TAIL_ROOM, c, tile));
        EXPECT_EQ(layout.tiles, word(a, JOB_TILES, c, tile));
        EXPECT_EQ(length / 4 - tile * 8192, word(a, JOB_LEFT, c, tile));
        EXPECT_EQ(tile, word(a, JOB_TILE, c, tile));
        EXPECT_EQ(0u, word(a, JOB_FLAGS, c, tile));
    }
    EXPECT_EQ(states + 3 * sizeof(ChunkState), word(b, JOB_STATE));
}

TEST_F(Launcher, AnItemWithoutProgressHasNoneInAnyChunk)
{
    zip_gpu_item_t i = item(ZIP_DTYPE_BF16, 100000);
    i.chunk_length = 16384;
    i.progress = nullptr;
    ASSERT_EQ(ZIP_OK, encode({i}));
    EXPECT_EQ(0u, word(driver_->launches[0].launch.inline_items[0], zip::gpu::JOB_PROGRESS, 3, 2));
}

TEST_F(Launcher, SumsAndSmallTilesAreFlags)
{
    using namespace zip::gpu;
    zip_gpu_item_t i = item();
    i.op = ZIP_GPU_ADD;
    i.coding.small_tiles = 1;
    ASSERT_EQ(ZIP_OK, decode({i}));
    EXPECT_EQ(JOB_SMALL | JOB_ADD, word(driver_->launches[0].launch.inline_items[0], JOB_FLAGS));
}

// A tile's parts are measured as where 16 tiles, which fill their sections without gaps, end.
TEST_F(Launcher, PartsOfTilesAreWhereTheFormatSays)
{
    using namespace zip::gpu;
    for (uint8_t dtype = ZIP_DTYPE_BF16; dtype < ZIP_DTYPE_LAST; ++dtype) {
        for (uint8_t shape = ZIP_SHAPE_22228; shape < ZIP_SHAPE_LAST; ++shape) {
            const format::Coding c{dtype, shape, shape == ZIP_SHAPE_38};
            if (!format::valid_coding(c))
                continue;
            const uint64_t tile = uint64_t(format::tile_values(c)) * format::value_size(dtype);
            zip_gpu_item_t i = item(zip_dtype_t(dtype), 32 * tile + 5, zip_shape_t(shape));
            i.coding.small_tiles = c.small_tiles;
            driver_->launches.clear();
            ASSERT_EQ(ZIP_OK, encode({i})) << api_.error_text();
            const InlineItem &a = driver_->launches.back().launch.inline_items[0];
            const format::Layout l = format::layout_of(c, 32 * tile + 5),
                                 one = format::layout_of(c, 16 * tile);
            const struct {
                JobWord word;
                uint64_t at, step;
            } parts[] = {
                    {JOB_MANTISSA, shape == ZIP_SHAPE_COLUMNS ? 48u + 1024 : 48u,
                     (one.low - one.mantissa) / 16},
                    {JOB_LOW, l.low, (one.low2 - one.low) / 16},
                    {JOB_LOW2, l.low2, (one.level1 - one.low2) / 16},
                    {JOB_LEVEL1, l.level1, (one.counts - one.level1) / 16},
                    {JOB_COUNTS, l.counts, (one.tile_headers - one.counts) / 16},
                    {JOB_TILE_HEADER, l.tile_headers, 8},
                    {JOB_SYMBOLS, l.symbols, 16},
                    {JOB_TAIL, l.tail, 0},
            };
            EXPECT_EQ(address(data) + 3 * tile, word(a, JOB_DATA, 0, 3));
            for (const auto &part : parts)
                EXPECT_EQ(address(chunks) + part.at + 3 * part.step, word(a, part.word, 0, 3))
                        << part.word << " of type " << int(dtype) << ", shape " << int(shape);
        }
    }
}

TEST_F(Launcher, WholeTilesHaveKernelsOfTheirOwn)
{
    auto kernel_of_item = [this](const zip_gpu_item_t &i, bool decodes = false, uint32_t sms = 0) {
        driver_->launches.clear();
        EXPECT_EQ(ZIP_OK, decodes ? decode({i}, sms) : encode({i}, sms)) << api_.error_text();
        return name_of(driver_->launches.at(0).kernel);
    };
    zip_gpu_item_t i = item(ZIP_DTYPE_BF16, 10 * 16384);
    EXPECT_EQ("zip_encode_whole_bf16_22228", kernel_of_item(i));
    EXPECT_EQ("zip_decode_whole_bf16_22228", kernel_of_item(i, true));
    EXPECT_EQ("zip_encode_few_whole_bf16_22228", kernel_of_item(i, false, 2));
    i.data = data + 2;
    EXPECT_EQ("zip_encode_whole_bf16_22228", kernel_of_item(i));
    EXPECT_EQ("zip_encode_few_bf16_22228", kernel_of_item(i, false, 2));
    EXPECT_EQ("zip_decode_few_whole_bf16_22228", kernel_of_item(i, true));
    i.data = data;
    i.data_size += 2;
    EXPECT_EQ("zip_encode_bf16_22228", kernel_of_item(i));
    i.data_size = 0;
    EXPECT_EQ("zip_encode_bf16_22228", kernel_of_item(i));
    i.data_size = 10 * 16384;
    i.chunk_length = 3 * 16384;
    EXPECT_EQ("zip_encode_whole_bf16_22228", kernel_of_item(i));
    i.chunk_length += 16;
    EXPECT_EQ("zip_encode_bf16_22228", kernel_of_item(i));
    i.chunk_length = 0;
    i.coding.small_tiles = 1;
    EXPECT_EQ("zip_encode_bf16_22228", kernel_of_item(i));
    i = item(ZIP_DTYPE_FP64, 8 * 65536);
    EXPECT_EQ("zip_encode_fp64_22228", kernel_of_item(i)) << "there is none for fp64";
    driver_->launches.clear();
    ASSERT_EQ(ZIP_OK, encode({item(ZIP_DTYPE_BF16, 16384), item(ZIP_DTYPE_BF16, 16386)}));
    EXPECT_EQ("zip_encode_bf16_22228", name_of(driver_->launches[0].kernel)) << "nor for mixtures";
}

// Blocks that take turns, as many as the GPU holds, where it is not one item of a known type.
TEST_F(Launcher, WholeTilesOfSeveralItemsTakeTurns)
{
    const uint32_t resident =
            driver_->info().multiprocessors * std::max(1024 / driver_->info().few_threads, 1u);
    ASSERT_EQ(ZIP_OK, encode({item(ZIP_DTYPE_BF16, 1 << 24), item(ZIP_DTYPE_BF16, 16384)}));
    ASSERT_EQ(1u, driver_->launches.size());
    EXPECT_EQ("zip_encode_few_whole_bf16_22228", name_of(driver_->launches[0].kernel));
    EXPECT_EQ(resident, driver_->launches[0].blocks);
    EXPECT_EQ(driver_->info().few_threads, driver_->launches[0].threads);
    driver_->launches.clear();
    ASSERT_EQ(ZIP_OK, encode({item(ZIP_DTYPE_AUTO, 1 << 24)}));
    for (const auto &l : driver_->launches) {
        EXPECT_TRUE(l.kernel.action == zip::gpu::Kernel::Action::PROBE || !l.kernel.whole ||
                    l.kernel.few)
                << name_of(l.kernel);
        EXPECT_LE(l.blocks, driver_->info().multiprocessors * 8);
    }
}

TEST_F(Launcher, AChunkWithoutValuesIsATile)
{
    ASSERT_EQ(ZIP_OK, encode({item(ZIP_DTYPE_FP64, 0), item(ZIP_DTYPE_FP64, 7),
                              item(ZIP_DTYPE_BYTES, 0), item(ZIP_DTYPE_FP64, 8)}));
    ASSERT_EQ(2u, driver_->launches.size());
    EXPECT_EQ(1u, driver_->launches[0].launch.tiles);
    EXPECT_EQ(3u, driver_->launches[1].launch.tiles);
}

TEST_F(Launcher, EachTypeOfABatchTakesALaunch)
{
    ASSERT_EQ(ZIP_OK, encode({item(ZIP_DTYPE_E5M2), item(), item(ZIP_DTYPE_BYTES), item(),
                              item(ZIP_DTYPE_E5M2, 100)}));
    ASSERT_EQ(3u, driver_->launches.size());
    const char *names[] = {"zip_encode_bytes", "zip_encode_few_whole_bf16_22228",
                           "zip_encode_e5m2_22228"};
    const InlineItem &last = driver_->launches[2].launch.inline_items[0]; // the batch's first
    const uint32_t tiles[] = {64, 128, 129}, first_chunks[] = {2, 1, 0};
    for (size_t k = 0; k < 3; ++k) {
        const auto &l = driver_->launches[k];
        EXPECT_EQ(names[k], name_of(l.kernel));
        EXPECT_EQ(k == 0 ? 1u : 2u, l.launch.items);
        EXPECT_EQ(tiles[k], l.launch.tiles);
        EXPECT_EQ(word(last, zip::gpu::JOB_STATE) + first_chunks[k] * sizeof(zip::gpu::ChunkState),
                  word(l.launch.inline_items[0], zip::gpu::JOB_STATE));
        EXPECT_EQ(0u, l.launch.inline_items[0].place.first_tile);
    }
}

TEST(LauncherKernels, HaveNumbersAndNames)
{
    std::set<std::string> names;
    for (uint32_t k = 0; k < zip::gpu::KERNELS; ++k) {
        EXPECT_EQ(k, number_of(zip::gpu::kernel_of(k)));
        EXPECT_TRUE(names.insert(name_of(zip::gpu::kernel_of(k))).second);
    }
    EXPECT_TRUE(names.count("zip_decode_fp16_dense"));
}

TEST_F(Launcher, ABatchOfDenseAndOthersTakesTwoLaunches)
{
    ASSERT_EQ(ZIP_OK, encode({item(ZIP_DTYPE_BF16, 65536, ZIP_SHAPE_DENSE), item(),
                              item(ZIP_DTYPE_BF16, 32768, ZIP_SHAPE_DENSE)}));
    ASSERT_EQ(2u, driver_->launches.size());
    const auto &others = driver_->launches[0], &dense = driver_->launches[1];
    EXPECT_EQ("zip_encode_whole_bf16_22228", name_of(others.kernel));
    EXPECT_EQ(64u, others.blocks);
    EXPECT_EQ("zip_encode_bf16_dense", name_of(dense.kernel));
    EXPECT_EQ(zip::gpu::DENSE_TILE_THREADS, dense.threads);
    EXPECT_EQ(3u, dense.blocks);
    EXPECT_EQ(2u, dense.launch.items);
    EXPECT_EQ(0u, dense.launch.inline_items[0].place.first_tile);
    EXPECT_EQ(2u, dense.launch.inline_items[1].place.first_tile);
    EXPECT_EQ(word(dense.launch.inline_items[0], zip::gpu::JOB_STATE) +
                      2 * sizeof(zip::gpu::ChunkState),
              word(dense.launch.inline_items[1], zip::gpu::JOB_STATE));
}

TEST_F(Launcher, ALimitOfMultiprocessorsBoundsTheGrid)
{
    ASSERT_EQ(ZIP_OK, encode({item()}, 3));
    ASSERT_EQ(ZIP_OK, decode({item()}, 3));
    ASSERT_EQ(ZIP_OK, encode({item(ZIP_DTYPE_BF16, 1 << 20, ZIP_SHAPE_DENSE)}, 3));
    ASSERT_EQ(ZIP_OK, decode({item(ZIP_DTYPE_BF16, 1 << 20, ZIP_SHAPE_DENSE)}, 3));
    ASSERT_EQ(4u, driver_->launches.size());
    for (const auto &l : driver_->launches)
        EXPECT_EQ(3u, l.blocks);
    const auto &few = driver_->launches[0], &dense = driver_->launches[2];
    EXPECT_EQ("zip_encode_few_whole_bf16_22228", name_of(few.kernel));
    EXPECT_EQ("zip_decode_few_whole_bf16_22228", name_of(driver_->launches[1].kernel));
    EXPECT_EQ(driver_->info().few_threads, few.threads);
    EXPECT_FALSE(few.filling);
    EXPECT_EQ("zip_encode_bf16_dense", name_of(dense.kernel));
    EXPECT_EQ("zip_decode_bf16_dense", name_of(driver_->launches[3].kernel));
    EXPECT_TRUE(dense.filling);
}

TEST_F(Launcher, StoredBytesAreCopiedByOneKernelOnAnyNumberOfMultiprocessors)
{
    ASSERT_EQ(ZIP_OK, encode({item(ZIP_DTYPE_BYTES)}, 3));
    EXPECT_EQ("zip_encode_bytes", name_of(driver_->launches[0].kernel));
    EXPECT_EQ(3u, driver_->launches[0].blocks);
    EXPECT_EQ(zip::gpu::TILE_THREADS, driver_->launches[0].threads);
}

TEST_F(Launcher, ALimitThatIsNoneIsNone)
{
    ASSERT_EQ(ZIP_OK, encode({item()}, CpuDriver::MULTIPROCESSORS));
    EXPECT_EQ("zip_encode_whole_bf16_22228", name_of(driver_->launches[0].kernel));
}

TEST_F(Launcher, ALongBatchGoesThroughTheTable)
{
    std::vector<zip_gpu_item_t> items(40, item(ZIP_DTYPE_BF16, 16384));
    items[5] = item(ZIP_DTYPE_BF16, 32768, ZIP_SHAPE_DENSE);
    ASSERT_EQ(ZIP_OK, encode(items)) << api_.error_text();
    ASSERT_EQ(2u, driver_->launches.size());
    const auto &l = driver_->launches[0].launch, &dense = driver_->launches[1].launch;
    ASSERT_NE(nullptr, l.table);
    EXPECT_EQ(39u, l.items);
    EXPECT_EQ(l.table + 39, dense.table);
    EXPECT_EQ(1u, dense.items);
    driver_->run(api_.queue_stream(queue_), 2); // the copy and its event
    EXPECT_EQ(l.layouts, dense.layouts);
    for (uint32_t i = 0; i < 39; ++i) {
        EXPECT_EQ(i, l.table[i].place.first_tile);
        EXPECT_EQ(0u, l.table[i].place.layout) << "alike items share one";
    }
    EXPECT_EQ(1u, dense.table[0].place.layout);
    EXPECT_EQ(ZIP_SHAPE_DENSE, table_item(dense, 0).layout.shape);
}

TEST_F(Launcher, BasesOfColumnsComeBeforeTheirEncode)
{
    zip_gpu_item_t i = item(ZIP_DTYPE_BF16, 100000, ZIP_SHAPE_COLUMNS), j = i;
    i.chunk_length = 32768; // 4 chunks
    ASSERT_EQ(ZIP_OK, encode({i, item(), j}));
    ASSERT_EQ(3u, driver_->launches.size());
    const auto *l = driver_->launches.data();
    EXPECT_EQ(ZIP_SHAPE_22228, l[0].kernel.shape);
    EXPECT_EQ("zip_columns_bf16", name_of(l[1].kernel));
    EXPECT_EQ(zip::gpu::COLUMNS_THREADS, l[1].threads);
    EXPECT_EQ(5u, l[1].blocks);
    EXPECT_EQ("zip_encode_bf16_columns", name_of(l[2].kernel));
    for (const auto *both : {l + 1, l + 2}) {
        EXPECT_EQ(2u, both->launch.items);
        EXPECT_EQ(5u, both->launch.chunks);
        EXPECT_EQ(0u, both->launch.inline_items[0].place.first_chunk);
        EXPECT_EQ(4u, both->launch.inline_items[1].place.first_chunk);
    }
    driver_->launches.clear();
    ASSERT_EQ(ZIP_OK, encode({i}, 3));
    ASSERT_EQ(2u, driver_->launches.size());
    EXPECT_EQ(3u, driver_->launches[0].blocks);
    EXPECT_EQ("zip_encode_few_bf16_columns", name_of(driver_->launches[1].kernel));
    driver_->launches.clear();
    ASSERT_EQ(ZIP_OK, decode({i}));
    ASSERT_EQ(1u, driver_->launches.size());
    EXPECT_EQ("zip_decode_bf16_columns", name_of(driver_->launches[0].kernel));
    driver_->launches.clear();
    ASSERT_EQ(ZIP_OK, encode({item(ZIP_DTYPE_AUTO, 100000, ZIP_SHAPE_COLUMNS)}));
    std::set<std::string> names;
    for (const auto &launched : driver_->launches)
        names.insert(name_of(launched.kernel));
    EXPECT_EQ(1u + 1 + 2 * 5 + 1, names.size());
    EXPECT_TRUE(names.count("zip_columns_e4m3") && names.count("zip_encode_fp64_22228"));
}

TEST_F(Launcher, SlotsAreReusedWhenTheirCopyIsDone)
{
    const std::vector<zip_gpu_item_t> items(17, item(ZIP_DTYPE_BF16, 16384));
    ASSERT_EQ(ZIP_OK, encode(items));
    ASSERT_EQ(ZIP_OK, encode(items));
    EXPECT_EQ(ZIP_ERR_NO_SPACE, encode(items));
    EXPECT_STREQ("all 2 slots are in use", api_.error_text());
    EXPECT_EQ(2u, driver_->launches.size());
    EXPECT_EQ(ZIP_OK, encode({6, item()})) << "short batches need none";
    driver_->run(api_.queue_stream(queue_), 5); // first copy and its event are done, not its kernel
    EXPECT_EQ(ZIP_OK, encode(items)) << api_.error_text();
    EXPECT_EQ(ZIP_ERR_NO_SPACE, encode(items));
}

TEST_F(Launcher, RefusesBatchesThatTheQueueWasNotMadeFor)
{
    const std::vector<zip_gpu_item_t> items(65, item(ZIP_DTYPE_BF16, 16384));
    EXPECT_EQ(ZIP_ERR_NO_SPACE, encode(items));
    EXPECT_STREQ("65 items in a batch, but the queue was made for 64", api_.error_text());
    zip_gpu_item_t many = item(ZIP_DTYPE_BF16, 201 * 1024);
    many.chunk_length = 1024;
    EXPECT_EQ(ZIP_ERR_NO_SPACE, encode({many}));
    EXPECT_STREQ("item 0: the batch has more chunks than the 200 that the queue was made for",
                 api_.error_text());
    many.data_size -= 1024;
    EXPECT_EQ(ZIP_OK, encode({many}));
    make_queue({nullptr, 64, 200, 0});
    EXPECT_EQ(ZIP_ERR_NO_SPACE, encode({17, item()}));
    EXPECT_STREQ("the queue has no slots for batches of more than 6 items", api_.error_text());
}

TEST_F(Launcher, RefusesWrongArguments)
{
    const zip_gpu_item_t i = item();
    EXPECT_EQ(ZIP_ERR_INVALID_PARAM, api_.encode(nullptr, &i, 1, {0, 1}));
    EXPECT_EQ(ZIP_ERR_INVALID_PARAM, api_.encode(queue_, nullptr, 1, {0, 1}));
    EXPECT_EQ(ZIP_ERR_INVALID_PARAM, api_.encode(queue_, &i, 1, {0, 0}));
    EXPECT_EQ(ZIP_ERR_INVALID_PARAM, api_.probe(queue_, &i, 1, nullptr));
    EXPECT_EQ(ZIP_OK, api_.encode(queue_, nullptr, 0, {0, 1}));
    const zip_gpu_queue_params_t none{};
    zip_gpu_queue_t *queue = nullptr;
    EXPECT_EQ(ZIP_ERR_INVALID_PARAM, api_.queue_create(gpu_, &none, &queue));
    EXPECT_TRUE(driver_->launches.empty());
}

TEST_F(Launcher, ProbesGetTheirResultsPlaces)
{
    zip_probe_t results[20];
    const std::vector<zip_gpu_item_t> items(20, item());
    ASSERT_EQ(ZIP_OK, api_.probe(queue_, items.data(), 20, results));
    ASSERT_EQ(1u, driver_->launches.size());
    const auto &l = driver_->launches[0];
    EXPECT_EQ("zip_probe", name_of(l.kernel));
    EXPECT_EQ(20u, l.blocks);
    driver_->run(api_.queue_stream(queue_), 1);
    for (size_t i = 0; i < 20; ++i) {
        EXPECT_EQ(results + i, l.launch.table[i].place.probe);
        EXPECT_EQ(1u << 20, word(table_item(l.launch, i), zip::gpu::JOB_LENGTH));
    }
}

TEST_F(Launcher, AQueueOnAStreamOfTheCallersLeavesItAlone)
{
    void *stream = nullptr;
    driver_->enter();
    ASSERT_EQ(ZIP_OK, driver_->stream_create(&stream));
    driver_->leave();
    make_queue({stream, 4, 4, 0});
    EXPECT_EQ(stream, api_.queue_stream(queue_));
    drop_queue();
    driver_->enter();
    EXPECT_EQ(ZIP_OK, driver_->stream_synchronize(stream));
    driver_->stream_destroy(stream);
    driver_->leave();
}

// Items of many kinds, many of them alike, as they come in batches.
std::vector<zip_gpu_item_t> mixed_items(size_t count, bool encodes, std::mt19937 &random)
{
    std::vector<zip_gpu_item_t> items;
    while (items.size() < count) {
        zip_gpu_item_t i{};
        if (!items.empty() && random() % 2 == 0) {
            i = items[random() % items.size()]; // but for its addresses
        } else {
            i.coding = {zip_dtype_t(random() % ZIP_DTYPE_LAST),
                        zip_shape_t(random() % ZIP_SHAPE_LAST), 0};
            i.coding.small_tiles = i.coding.shape != ZIP_SHAPE_DENSE && random() % 3 == 0;
            if (i.coding.dtype == ZIP_DTYPE_FP64 && i.coding.shape == ZIP_SHAPE_COLUMNS)
                continue;
            i.data_size = random() % 3 == 0 ? 16384 * (random() % 8) : random() % 200000;
            if (random() % 3 == 0)
                i.chunk_length = 16384 * (1 + random() % 3);
            i.chunk_stride = i.data_size / 16 * 16 + i.data_size / 64 / 16 * 16 + 2048;
            if (random() % 2 == 0)
                i.last_room = i.chunk_stride + random() % 100;
            if (!encodes && i.coding.dtype == ZIP_DTYPE_BF16 && i.data_size % 2 == 0)
                i.op = zip_gpu_op_t(random() % 2);
        }
        i.data = reinterpret_cast<void *>(uintptr_t(0x100000 + random() % 0x100000));
        i.chunks = reinterpret_cast<void *>(uintptr_t(0x1000000 + random() % 0x100000 * 16));
        i.progress = random() % 3 == 0 ? nullptr : progress + random() % 4;
        items.push_back(i);
    }
    return items;
}

// Every word that a kernel can ask for, and what else it reads of an item. `states` is where the
// item's states begin.
std::vector<uint64_t> all_of(const InlineItem &item, uint64_t states)
{
    std::vector<uint64_t> all = {item.layout.chunk_tiles, item.layout.chunk_count,
                                 item.layout.chunk_log2, item.layout.dtype, item.layout.shape};
    for (uint64_t chunk = 0; chunk < item.layout.chunk_count; ++chunk) {
        for (uint64_t tile : {0, 1, 5}) {
            for (uint32_t w = 0; w < zip::gpu::JOB_WORDS; ++w)
                all.push_back(word(item, zip::gpu::JobWord(w), chunk, tile) -
                              (w == zip::gpu::JOB_STATE ? states : 0));
        }
    }
    return all;
}

TEST_F(Launcher, AnItemIsTheSameInAnyCompany)
{
    std::mt19937 random(1);
    make_queue({nullptr, 200, 4000, 2});
    for (int round = 0; round < 40; ++round) {
        const bool encodes = round % 2 == 0;
        const std::vector<zip_gpu_item_t> items = mixed_items(200, encodes, random);
        driver_->launches.clear();
        ASSERT_EQ(ZIP_OK, encodes ? encode(items) : decode(items)) << api_.error_text();
        const auto with_bases = driver_->launches;
        std::vector<CpuDriver::Launched> launches;
        std::copy_if(with_bases.begin(), with_bases.end(), std::back_inserter(launches),
                     [](const auto &l) { return l.kernel.codes(); });
        // the tables are what the copy makes of them
        driver_->run(api_.queue_stream(queue_), with_bases.size());
        struct Next { // of a launch
            const zip::gpu::Launch *launch;
            uint32_t item;
            uint64_t tiles;
        };
        std::map<std::pair<int, int>, Next> next;
        size_t found = 0;
        for (const auto &l : launches) {
            ASSERT_NE(nullptr, l.launch.table);
            next[{l.kernel.dtype, l.kernel.shape}] = {&l.launch, 0, 0};
            found += l.launch.items;
        }
        EXPECT_EQ(items.size(), found);
        uint64_t before = 0; // chunks
        for (const zip_gpu_item_t &i : items) {
            // a queue that knows no other item
            zip_gpu_queue_t *alone = nullptr;
            const zip_gpu_queue_params_t params{nullptr, 1, 100, 0};
            ASSERT_EQ(ZIP_OK, api_.queue_create(gpu_, &params, &alone));
            driver_->launches.clear();
            ASSERT_EQ(ZIP_OK, (encodes ? api_.encode : api_.decode)(alone, &i, 1, {0, 1}));
            const bool columns = encodes && i.coding.shape == ZIP_SHAPE_COLUMNS &&
                                 i.coding.dtype != ZIP_DTYPE_BYTES;
            ASSERT_EQ(columns ? 2u : 1u, driver_->launches.size());
            const auto &l = driver_->launches.back();
            const InlineItem &expected = l.launch.inline_items[0];
            auto &[launch, number, tiles] = next.at({l.kernel.dtype, l.kernel.shape});
            const InlineItem item = table_item(*launch, number);
            const uint64_t states =
                    address(launches[0].launch.states) + before * sizeof(zip::gpu::ChunkState);
            EXPECT_EQ(all_of(expected, address(l.launch.states)), all_of(item, states));
            EXPECT_EQ(nullptr, item.place.probe);
            EXPECT_EQ(tiles, item.place.first_tile);
            tiles += l.launch.tiles;
            before += expected.layout.chunk_count;
            ++number;
            driver_->error.clear(); // the kernel that there is not
            api_.queue_destroy(alone);
        }
        for (const auto &l : launches) {
            const auto &[launch, number, tiles] = next.at({l.kernel.dtype, l.kernel.shape});
            EXPECT_EQ(l.launch.items, number);
            EXPECT_EQ(tiles, l.launch.tiles);
        }
        driver_->run(api_.queue_stream(queue_));
        driver_->error.clear();
    }
}

TEST_F(Launcher, WhatIsKnownOfAnItemIsKnownForOneDirectionAlone)
{
    zip_gpu_item_t i = item(ZIP_DTYPE_BF16, 100000);
    i.last_room = format::layout_of({format::DTYPE_BF16, format::SHAPE_22228, false}, 100000).tail;
    zip_probe_t result;
    for (int again = 0; again < 2; ++again) {
        EXPECT_EQ(ZIP_OK, api_.probe(queue_, &i, 1, &result));
        EXPECT_EQ(ZIP_OK, decode({i, i}));
        driver_->launches.clear();
        refuses_encode(i, "last_room is");
    }
    i.last_room = 0;
    i.op = zip_gpu_op_t(2); // an encode has none
    EXPECT_EQ(ZIP_OK, encode({i}));
    driver_->launches.clear();
    refuses_decode(i, "2 is no operation");
}

TEST_F(Launcher, ARefusedBatchLeavesNoTraceInTheNext)
{
    std::vector<zip_gpu_item_t> bad(30, item(ZIP_DTYPE_FP32, 40000)), good(30, item());
    bad[20].chunks = chunks + 8;
    good[7] = item(ZIP_DTYPE_FP32, 50000);
    for (int again = 0; again < 5; ++again) {
        driver_->launches.clear();
        EXPECT_EQ(ZIP_ERR_INVALID_PARAM, encode(bad));
        EXPECT_STREQ("item 20: chunks is not aligned to 16 bytes", api_.error_text());
        EXPECT_TRUE(driver_->launches.empty());
        ASSERT_EQ(ZIP_OK, encode(good)) << api_.error_text();
        ASSERT_EQ(2u, driver_->launches.size());
        const auto &bf16 = driver_->launches[0].launch, &fp32 = driver_->launches[1].launch;
        driver_->run(api_.queue_stream(queue_), 2);
        ASSERT_EQ(29u, bf16.items);
        for (uint32_t k = 0; k < 29; ++k)
            EXPECT_EQ(1u << 20, word(table_item(bf16, k), zip::gpu::JOB_LENGTH));
        ASSERT_EQ(1u, fp32.items);
        EXPECT_EQ(50000u, word(table_item(fp32, 0), zip::gpu::JOB_LENGTH));
        driver_->run(api_.queue_stream(queue_));
        driver_->error.clear();
    }
}

TEST_F(Launcher, RefusesMoreTilesThanAGridHasBlocks)
{
    // small tiles of e4m3 are 4096 bytes: 2^22 in a chunk
    make_queue({nullptr, 2, 600, 0});
    zip_gpu_item_t i = item(ZIP_DTYPE_E4M3, 300 * ZIP_GPU_MAX_CHUNK);
    i.chunk_length = ZIP_GPU_MAX_CHUNK;
    i.chunk_stride = ZIP_GPU_MAX_CHUNK + ZIP_GPU_MAX_CHUNK / 64;
    i.coding.small_tiles = 1;
    EXPECT_EQ(ZIP_OK, encode({i})) << api_.error_text();
    EXPECT_EQ(300u << 22, driver_->launches.at(0).launch.tiles);
    driver_->launches.clear();
    refuses_with(ZIP_ERR_INVALID_PARAM, {i, i}, "item 1: the batch has more than 2^31 - 1 tiles");
}

TEST_F(Launcher, RefusesMoreUnknownTypesThanItProbes)
{
    std::vector<zip_gpu_item_t> items(70, item(ZIP_DTYPE_AUTO, 1000, ZIP_SHAPE_DEFAULT));
    for (size_t i : {3, 4, 60})
        items[i] = item();
    make_queue({nullptr, 100, 200, 2});
    refuses_with(ZIP_ERR_NO_SPACE, items, "item 67: more than 64 items of unknown type");
    items.resize(67);
    EXPECT_EQ(ZIP_OK, encode(items)) << api_.error_text();
}

// What a batch asks of the driver, in order, and which of it are launches.
struct Batch {
    const char *name;
    std::vector<zip_gpu_item_t> items;
    std::vector<std::string> calls;
};

TEST_F(Launcher, AQueueTakesNothingAfterAnErrorOfItsDriver)
{
    std::vector<zip_gpu_item_t> many(20, item(ZIP_DTYPE_BF16, 16384)), both = many;
    both.insert(both.begin() + 7, item(ZIP_DTYPE_FP16, 16384));
    both.insert(both.begin() + 9, item(ZIP_DTYPE_BYTES, 100));
    const std::vector<std::string> table = {"enter", "event_query", "copy_to_device",
                                            "event_record"};
    auto with_launches = [](std::vector<std::string> calls, size_t launches) {
        calls.insert(calls.end(), launches, "launch");
        return calls;
    };
    const Batch batches[] = {
            {"one item", {item()}, with_launches({"enter"}, 1)},
            {"two types", {item(), item(ZIP_DTYPE_FP32)}, with_launches({"enter"}, 2)},
            {"a table", many, with_launches(table, 1)},
            {"a table of three types", both, with_launches(table, 3)},
            {"an unknown type",
             {item(ZIP_DTYPE_AUTO, 100000, ZIP_SHAPE_DEFAULT)},
             with_launches({"enter"}, 2 + 2 * (ZIP_DTYPE_LAST - 1))},
    };
    for (const Batch &batch : batches) {
        for (size_t n = 0; n <= batch.calls.size(); ++n) {
            SCOPED_TRACE(batch.name + std::string(", call ") + std::to_string(n));
            make_queue({nullptr, 64, 200, 2});
            driver_->launches.clear();
            driver_->fail_after = int(n);
            const zip_status_t status = encode(batch.items);
            const size_t launched = driver_->launches.size();
            if (n == batch.calls.size()) { // these are all its calls
                EXPECT_EQ(ZIP_OK, status) << api_.error_text();
                EXPECT_EQ(0, std::exchange(driver_->fail_after, -1));
                continue;
            }
            const std::string first = batch.calls[n] + " was told to fail";
            EXPECT_EQ(ZIP_ERR_DEVICE, status);
            EXPECT_EQ(first, api_.error_text());
            EXPECT_EQ(size_t(std::count(batch.calls.begin(), batch.calls.begin() + n, "launch")),
                      launched);

            // whatever comes is refused before the driver hears of it
            const uint64_t calls = driver_->calls;
            zip_probe_t result;
            const zip_gpu_item_t one = item();
            const auto refuses_all = [&](zip_status_t later) {
                EXPECT_EQ(ZIP_ERR_DEVICE, later);
                EXPECT_EQ("this queue failed in an earlier call: destroy it and make another; the "
                          "error was: " +
                                  first,
                          api_.error_text());
            };
            refuses_all(encode(batch.items));
            refuses_all(encode({one}));
            refuses_all(decode({one}));
            refuses_all(decode({item(ZIP_DTYPE_LAST)}));
            refuses_all(encode({}));
            refuses_all(api_.probe(queue_, &one, 1, &result));
            EXPECT_EQ(calls, driver_->calls);
            EXPECT_EQ(launched, driver_->launches.size());
        }
    }
}

TEST_F(Launcher, OtherQueuesDoNotFailWithOne)
{
    zip_gpu_queue_t *other = nullptr;
    const zip_gpu_queue_params_t params{nullptr, 64, 200, 2};
    ASSERT_EQ(ZIP_OK, api_.queue_create(gpu_, &params, &other));
    driver_->fail_after = 1;
    EXPECT_EQ(ZIP_ERR_DEVICE, encode({item()}));
    std::swap(queue_, other);
    EXPECT_EQ(ZIP_OK, encode({item()})) << api_.error_text();
    std::swap(queue_, other);
    EXPECT_EQ(ZIP_ERR_DEVICE, encode({item()}));
    drop_queue();
    queue_ = other;
}

TEST_F(Launcher, AnErrorOfTheCallersLeavesTheQueueAsItWas)
{
    const std::vector<zip_gpu_item_t> items(17, item(ZIP_DTYPE_BF16, 16384));
    ASSERT_EQ(ZIP_OK, encode(items));
    ASSERT_EQ(ZIP_OK, encode(items));
    EXPECT_EQ(ZIP_ERR_NO_SPACE, encode(items));
    EXPECT_EQ(ZIP_ERR_INVALID_PARAM, encode({item(ZIP_DTYPE_LAST)}));
    EXPECT_EQ(ZIP_ERR_NO_SPACE, encode(std::vector<zip_gpu_item_t>(65, item())));
    EXPECT_EQ(ZIP_OK, encode({item()})) << api_.error_text();
    driver_->run(api_.queue_stream(queue_));
    driver_->error.clear(); // of kernels that are not there
    EXPECT_EQ(ZIP_OK, encode(items)) << api_.error_text();
}

TEST_F(Launcher, AFailedQueueIsDestroyedWithWhatIsUnderWay)
{
    // Its first launches and the copy before them are still to run, and use what is freed.
    std::vector<zip_gpu_item_t> items(20, item(ZIP_DTYPE_BF16, 16384));
    items.push_back(item(ZIP_DTYPE_FP16, 16384));
    for (const bool breaks : {false, true}) {
        driver_->breaks = breaks;
        driver_->fail_after = 5; // enter, query, copy, record, launch
        EXPECT_EQ(ZIP_ERR_DEVICE, encode(items));
        EXPECT_STREQ("launch was told to fail", api_.error_text());
        api_.queue_destroy(queue_);
        queue_ = nullptr;
        EXPECT_STREQ("launch was told to fail", api_.error_text()) << "destroying says nothing";
        driver_->broken = false;
        if (driver_->error.starts_with("no kernel"))
            driver_->error.clear();
        make_queue({nullptr, 64, 200, 2});
        EXPECT_EQ(ZIP_OK, encode(items)) << api_.error_text();
    }
}

TEST_F(Launcher, AQueueThatCannotBeMadeLeavesNothingBehind)
{
    // the driver aborts when it is closed with something in use
    const zip_gpu_queue_params_t params{nullptr, 64, 10, 2};
    const char *calls[] = {"enter",
                           "stream_create",
                           "allocate_device",
                           "clear",
                           "allocate_device",
                           "clear",
                           "allocate_device",
                           "clear",
                           "allocate_pinned",
                           "event_create",
                           "allocate_pinned",
                           "event_create",
                           "stream_synchronize"};
    for (const bool breaks : {false, true}) {
        driver_->breaks = breaks;
        for (size_t n = 0; n <= std::size(calls); ++n) {
            zip_gpu_queue_t *queue = nullptr;
            driver_->fail_after = int(n);
            const zip_status_t status = api_.queue_create(gpu_, &params, &queue);
            driver_->broken = false;
            if (n == std::size(calls)) {
                EXPECT_EQ(0, std::exchange(driver_->fail_after, -1));
                ASSERT_EQ(ZIP_OK, status) << api_.error_text();
                api_.queue_destroy(queue);
                continue;
            }
            EXPECT_EQ(ZIP_ERR_DEVICE, status);
            EXPECT_EQ(nullptr, queue);
            EXPECT_EQ(calls[n] + std::string(" was told to fail"), api_.error_text())
                    << "what fails while it is cleaned up is not why";
        }
    }
}

TEST(LoadingBackEnds, SaysWhatIsMissing)
{
    const char *error = nullptr;
    EXPECT_EQ(nullptr, zip_gpu_load("metal", &error));
    EXPECT_STREQ("no GPU back end \"metal\": there are cuda and hip", error);
    EXPECT_EQ(nullptr, zip_gpu_load(nullptr, &error));
    EXPECT_STREQ("no name of a GPU back end", error);
    EXPECT_EQ(nullptr, zip_gpu_load("/nowhere/libzip_cuda.so", &error));
    EXPECT_NE(nullptr, strstr(error, "cannot open the GPU back end: /nowhere/libzip_cuda.so"))
            << error;
    EXPECT_EQ(nullptr, zip_gpu_load("metal", nullptr)) << "the text is optional";
}

TEST(LoadingBackEnds, RefusesWhatIsNone)
{
    Dl_info info;
    ASSERT_NE(0, dladdr(reinterpret_cast<void *>(&malloc_usable_size), &info)); // any library's
    const char *error = nullptr;
    EXPECT_EQ(nullptr, zip_gpu_load(info.dli_fname, &error));
    EXPECT_NE(nullptr, strstr(error, "is no GPU back end of this codec")) << error;
}

// ---- copies, queries, memory

TEST_F(Launcher, CopiesInTheStreamsOrderAndSaysSo)
{
    std::vector<uint8_t> from(1000, 7), to(1000);
    uint64_t word = 0;
    ASSERT_EQ(ZIP_OK, api_.copy(queue_, to.data(), from.data(), from.size(), &word, 12));
    int idle = 1;
    ASSERT_EQ(ZIP_OK, api_.queue_query(queue_, &idle));
    EXPECT_EQ(0, idle);
    EXPECT_EQ(0u, word) << "before it is done";
    driver_->run(api_.queue_stream(queue_));
    EXPECT_EQ(12, ZIP_GPU_PROGRESS_SEQ(word));
    EXPECT_EQ(ZIP_OK, ZIP_GPU_PROGRESS_STATUS(word));
    EXPECT_EQ(from, to);
    ASSERT_EQ(ZIP_OK, api_.queue_query(queue_, &idle));
    EXPECT_EQ(1, idle);
    // nothing to copy: a word alone
    ASSERT_EQ(ZIP_OK, api_.copy(queue_, nullptr, nullptr, 0, &word, 13));
    driver_->run(api_.queue_stream(queue_));
    EXPECT_EQ(13, ZIP_GPU_PROGRESS_SEQ(word));
}

TEST_F(Launcher, CopiesThatCannotBeAreRefused)
{
    uint8_t byte = 0;
    uint64_t word = 0;
    EXPECT_EQ(ZIP_ERR_INVALID_PARAM, api_.copy(nullptr, &byte, &byte, 1, nullptr, 0));
    EXPECT_EQ(ZIP_ERR_INVALID_PARAM, api_.copy(queue_, nullptr, &byte, 1, nullptr, 0));
    EXPECT_EQ(ZIP_ERR_INVALID_PARAM, api_.copy(queue_, &byte, nullptr, 1, nullptr, 0));
    EXPECT_EQ(ZIP_ERR_INVALID_PARAM, api_.copy(queue_, &byte, &byte, 1, &word, 0));
    int idle;
    EXPECT_EQ(ZIP_ERR_INVALID_PARAM, api_.queue_query(nullptr, &idle));
    EXPECT_EQ(ZIP_ERR_INVALID_PARAM, api_.queue_query(queue_, nullptr));
    EXPECT_EQ(ZIP_OK, api_.queue_query(queue_, &idle)) << "the queue is as it was";
}

TEST_F(Launcher, AFailedQuerysQueueHasFailed)
{
    driver_->fail_after = 1; // enter, stream_query
    int idle = 1;
    EXPECT_EQ(ZIP_ERR_DEVICE, api_.queue_query(queue_, &idle));
    EXPECT_EQ(0, idle);
    uint8_t byte = 0;
    EXPECT_EQ(ZIP_ERR_DEVICE, api_.copy(queue_, &byte, &byte, 1, nullptr, 0));
    EXPECT_EQ(ZIP_ERR_DEVICE, api_.queue_query(queue_, &idle));
}

TEST_F(Launcher, GivesMemoryOfBothKindsAndTakesItBack)
{
    for (const zip_gpu_place_t place : {ZIP_GPU_DEVICE, ZIP_GPU_PINNED}) {
        void *memory = nullptr;
        ASSERT_EQ(ZIP_OK, api_.memory_allocate(gpu_, place, 4096, &memory)) << api_.error_text();
        EXPECT_NE(nullptr, memory);
        api_.memory_free(gpu_, place, memory);
        EXPECT_EQ(ZIP_ERR_INVALID_PARAM, api_.memory_allocate(gpu_, place, 0, &memory));
        EXPECT_EQ(ZIP_ERR_INVALID_PARAM, api_.memory_allocate(gpu_, place, 1, nullptr));
    }
    std::vector<uint8_t> others(4096);
    ASSERT_EQ(ZIP_OK, api_.memory_pin(gpu_, others.data(), others.size()));
    EXPECT_EQ(ZIP_ERR_DEVICE, api_.memory_pin(gpu_, others.data(), others.size()));
    api_.memory_unpin(gpu_, others.data());
    int fd = -1;
    EXPECT_EQ(ZIP_ERR_DEVICE, api_.memory_dmabuf(gpu_, others.data(), others.size(), &fd));
    EXPECT_EQ(uint32_t{CpuDriver::MULTIPROCESSORS}, api_.multiprocessors(gpu_));
}

} // namespace
