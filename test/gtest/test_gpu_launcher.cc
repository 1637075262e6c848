// SPDX-License-Identifier: BSD-3-Clause
// The launcher of the GPU codec, on a driver that only notes what it is asked for: what it refuses,
// what it launches, and what it tells the kernels. No kernel runs here.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "kernels/format.h"
#include "simt/driver_cpu.h"

namespace {

using zip::gpu::CpuDriver;
using zip::gpu::Item;
using zip::gpu::name_of;
namespace format = zip::format;

alignas(16) uint8_t data[16], chunks[16]; // addresses only: nothing is read or written
uint64_t progress[4];

class Launcher : public testing::Test {
protected:
    void SetUp() override
    {
        ASSERT_EQ(ZIP_OK, api_.open(&gpu_)) << api_.error_text();
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
    refuses(with([](auto &i) { i.coding.shape = ZIP_SHAPE_LAST; }), "5 is no shape");
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
    ASSERT_EQ(1u + ZIP_DTYPE_LAST, driver_->launches.size());
    const auto &probe = driver_->launches[0];
    EXPECT_EQ("zip_probe", name_of(probe.kernel));
    EXPECT_EQ(1u, probe.blocks);
    const Item &probed = probe.launch.inline_items[0];
    ASSERT_NE(nullptr, probed.probe);
    EXPECT_EQ(1u, probed.chunk_count);
    EXPECT_EQ(100000u, probed.last_length);
    for (uint8_t d = 0; d < ZIP_DTYPE_LAST; ++d) {
        const auto &l = driver_->launches[1 + d];
        EXPECT_EQ(d, l.kernel.dtype);
        const Item *items = l.launch.inline_items;
        ASSERT_EQ(d == ZIP_DTYPE_BYTES ? 1u : d == ZIP_DTYPE_FP16 ? 3u : 2u, l.launch.items);
        if (d == ZIP_DTYPE_FP16) {
            EXPECT_EQ(nullptr, items->probe);
            ++items;
        }
        // the same item in two shapes: its state is the same, its tiles are not
        for (uint32_t s = 0; s < (d == ZIP_DTYPE_BYTES ? 1u : 2u); ++s) {
            EXPECT_EQ(probed.probe, items[s].probe);
            EXPECT_EQ(d, items[s].dtype);
            EXPECT_EQ(d == ZIP_DTYPE_BYTES ? 0u : 1 + s, items[s].shape);
            EXPECT_EQ(1u, items[s].first_chunk);
            EXPECT_EQ(4u, items[s].chunk_count);
            EXPECT_EQ(0, items[s].any_shape);
        }
    }
}

TEST_F(Launcher, AnUnknownTypeInAShapeOfChoice)
{
    ASSERT_EQ(ZIP_OK, encode({item(ZIP_DTYPE_AUTO, 100000, ZIP_SHAPE_DENSE)}));
    ASSERT_EQ(1u + ZIP_DTYPE_LAST, driver_->launches.size());
    EXPECT_EQ("zip_encode_bytes", name_of(driver_->launches[1].kernel));
    EXPECT_EQ("zip_encode_dense_bf16", name_of(driver_->launches[2].kernel));
    for (size_t k = 1; k < driver_->launches.size(); ++k) {
        ASSERT_EQ(1u, driver_->launches[k].launch.items);
        EXPECT_NE(0, driver_->launches[k].launch.inline_items[0].any_shape);
    }
}

TEST_F(Launcher, ManyUnknownTypesGoThroughTheTable)
{
    const std::vector<zip_gpu_item_t> items(64, item(ZIP_DTYPE_AUTO, 1000, ZIP_SHAPE_DEFAULT));
    ASSERT_EQ(ZIP_OK, encode(items)) << api_.error_text();
    const auto &launches = driver_->launches;
    ASSERT_EQ(8u, launches.size());
    EXPECT_EQ(64u, launches[0].launch.items);
    EXPECT_EQ(64u, launches[1].launch.items);
    EXPECT_EQ(128u, launches[7].launch.items);
    EXPECT_EQ(launches[0].launch.table + 64 + 64 + 5 * 128, launches[7].launch.table);
    driver_->run(api_.queue_stream(queue_), 8); // the copy and its event
    EXPECT_EQ(ZIP_DTYPE_E5M2, launches[7].launch.table[127].dtype);
}

TEST_F(Launcher, TellsKernelsWhereEverythingIs)
{
    zip_gpu_item_t i = item(ZIP_DTYPE_FP32, 1000003);
    i.chunk_length = 400000;
    i.chunk_stride = 401600;
    i.last_room = 300000;
    const zip_gpu_item_t j = item(ZIP_DTYPE_FP32, 40000);
    ASSERT_EQ(ZIP_OK, encode({i, j})) << api_.error_text();
    ASSERT_EQ(1u, driver_->launches.size());
    const auto &l = driver_->launches[0];
    EXPECT_EQ("zip_encode_fp32", name_of(l.kernel));
    EXPECT_EQ(zip::gpu::TILE_THREADS, l.threads);
    EXPECT_EQ(2u, l.launch.items);
    EXPECT_EQ(7u, l.launch.seq);
    EXPECT_EQ(nullptr, l.launch.table);
    const Item &a = l.launch.inline_items[0], &b = l.launch.inline_items[1];
    EXPECT_EQ(data, a.data);
    EXPECT_EQ(chunks, a.chunks);
    EXPECT_EQ(progress, a.progress);
    EXPECT_EQ(3u, a.chunk_count);
    EXPECT_EQ(400000u, a.chunk_length);
    EXPECT_EQ(200003u, a.last_length);
    EXPECT_EQ(401600u, a.chunk_stride);
    EXPECT_EQ(300000u, a.last_room);
    EXPECT_EQ(13u, a.chunk_tiles); // of 8192 values of 4 bytes
    EXPECT_EQ(7u, a.last_tiles);
    EXPECT_EQ(255u, a.chunk_log2);
    EXPECT_EQ(2u, a.value_log2);
    EXPECT_EQ(13u, a.tile_log2);
    EXPECT_EQ(0u, a.first_tile);
    EXPECT_EQ(0u, a.first_chunk);
    EXPECT_EQ(33u, b.first_tile);
    EXPECT_EQ(3u, b.first_chunk);
    EXPECT_EQ(2u, b.chunk_tiles);
    EXPECT_EQ(1u, b.chunk_log2);
    EXPECT_EQ(35u, l.blocks);
    EXPECT_EQ(35u, l.launch.tiles);
}

// A part's bytes of a tile, measured as where the parts of a chunk of one tile and of two end.
TEST_F(Launcher, PartsOfTilesAreWhereTheFormatSays)
{
    using namespace zip::gpu;
    for (uint8_t dtype = ZIP_DTYPE_BF16; dtype < ZIP_DTYPE_LAST; ++dtype) {
        for (uint8_t shape = ZIP_SHAPE_22228; shape < ZIP_SHAPE_LAST; ++shape) {
            const format::Coding c{dtype, shape, shape == ZIP_SHAPE_38};
            const uint64_t tile = uint64_t(format::tile_values(c)) * format::value_size(dtype);
            zip_gpu_item_t i = item(zip_dtype_t(dtype), 32 * tile + 5, zip_shape_t(shape));
            i.coding.small_tiles = c.small_tiles;
            driver_->launches.clear();
            ASSERT_EQ(ZIP_OK, encode({i})) << api_.error_text();
            const Item &a = driver_->launches.at(0).launch.inline_items[0];
            const format::Layout l = format::layout_of(c, 32 * tile + 5),
                                 one = format::layout_of(c, 16 * tile);
            const uint64_t at[PARTS] = {
                    0, 48, l.low, l.low2, l.level1, l.counts, l.tile_headers, l.symbols, l.tail};
            for (uint32_t p = 0; p < PARTS; ++p)
                EXPECT_EQ(at[p], 16ul * a.offset[1][p]) << p;
            // 16 tiles fill their sections without gaps
            EXPECT_EQ(tile, a.stride[PART_DATA]);
            EXPECT_EQ((one.low - one.mantissa) / 16, a.stride[PART_MANTISSA]);
            EXPECT_EQ((one.low2 - one.low) / 16, a.stride[PART_LOW]);
            EXPECT_EQ((one.level1 - one.low2) / 16, a.stride[PART_LOW2]);
            EXPECT_EQ((one.counts - one.level1) / 16, a.stride[PART_LEVEL1]);
            EXPECT_EQ((one.tile_headers - one.counts) / 16, a.stride[PART_COUNTS]);
            EXPECT_EQ(8u, a.stride[PART_TILE_HEADERS]);
            EXPECT_EQ(16u, a.stride[PART_SYMBOLS]);
            EXPECT_EQ(0u, a.stride[PART_TAIL]);
        }
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
    const char *names[] = {"zip_encode_bytes", "zip_encode_bf16", "zip_encode_e5m2"};
    const uint32_t tiles[] = {64, 128, 129}, first_chunks[] = {2, 1, 0};
    for (size_t k = 0; k < 3; ++k) {
        const auto &l = driver_->launches[k];
        EXPECT_EQ(names[k], name_of(l.kernel));
        EXPECT_EQ(k == 0 ? 1u : 2u, l.launch.items);
        EXPECT_EQ(tiles[k], l.launch.tiles);
        EXPECT_EQ(first_chunks[k], l.launch.inline_items[0].first_chunk);
        EXPECT_EQ(0u, l.launch.inline_items[0].first_tile);
    }
}

TEST(LauncherKernels, HaveNumbersAndNames)
{
    std::set<std::string> names;
    for (uint32_t k = 0; k < zip::gpu::KERNELS; ++k) {
        EXPECT_EQ(k, number_of(zip::gpu::kernel_of(k)));
        EXPECT_TRUE(names.insert(name_of(zip::gpu::kernel_of(k))).second);
    }
    EXPECT_TRUE(names.count("zip_decode_dense_fp16"));
}

TEST_F(Launcher, ABatchOfDenseAndOthersTakesTwoLaunches)
{
    ASSERT_EQ(ZIP_OK, encode({item(ZIP_DTYPE_BF16, 65536, ZIP_SHAPE_DENSE), item(),
                              item(ZIP_DTYPE_BF16, 32768, ZIP_SHAPE_DENSE)}));
    ASSERT_EQ(2u, driver_->launches.size());
    const auto &others = driver_->launches[0], &dense = driver_->launches[1];
    EXPECT_EQ("zip_encode_bf16", name_of(others.kernel));
    EXPECT_EQ(64u, others.blocks);
    EXPECT_EQ("zip_encode_dense_bf16", name_of(dense.kernel));
    EXPECT_EQ(zip::gpu::DENSE_TILE_THREADS, dense.threads);
    EXPECT_EQ(3u, dense.blocks);
    EXPECT_EQ(2u, dense.launch.items);
    EXPECT_EQ(0u, dense.launch.inline_items[0].first_tile);
    EXPECT_EQ(2u, dense.launch.inline_items[1].first_tile);
    EXPECT_EQ(0u, dense.launch.inline_items[0].first_chunk);
    EXPECT_EQ(2u, dense.launch.inline_items[1].first_chunk);
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
    EXPECT_EQ("zip_encode_few_bf16", name_of(few.kernel));
    EXPECT_EQ("zip_decode_few_bf16", name_of(driver_->launches[1].kernel));
    EXPECT_EQ(driver_->info().few_threads, few.threads);
    EXPECT_FALSE(few.filling);
    EXPECT_EQ("zip_encode_dense_bf16", name_of(dense.kernel));
    EXPECT_EQ("zip_decode_dense_bf16", name_of(driver_->launches[3].kernel));
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
    EXPECT_EQ("zip_encode_bf16", name_of(driver_->launches[0].kernel));
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
    for (uint32_t i = 0; i < 39; ++i)
        EXPECT_EQ(i, l.table[i].first_tile);
    EXPECT_EQ(ZIP_SHAPE_DENSE, dense.table[0].shape);
}

TEST_F(Launcher, SlotsAreReusedWhenTheirCopyIsDone)
{
    const std::vector<zip_gpu_item_t> items(17, item(ZIP_DTYPE_BF16, 16384));
    ASSERT_EQ(ZIP_OK, encode(items));
    ASSERT_EQ(ZIP_OK, encode(items));
    EXPECT_EQ(ZIP_ERR_NO_SPACE, encode(items));
    EXPECT_STREQ("all 2 slots are in use", api_.error_text());
    EXPECT_EQ(2u, driver_->launches.size());
    EXPECT_EQ(ZIP_OK, encode({16, item()})) << "short batches need none";
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
    EXPECT_STREQ("the queue has no slots for batches of more than 16 items", api_.error_text());
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
        EXPECT_EQ(results + i, l.launch.table[i].probe);
        EXPECT_EQ(1u << 20, l.launch.table[i].last_length);
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

TEST_F(Launcher, ADriversErrorIsTheCallers)
{
    driver_->fail_after = 0;
    EXPECT_EQ(ZIP_ERR_DEVICE, encode({item()}));
    EXPECT_STREQ("told to fail", api_.error_text());
    EXPECT_EQ(ZIP_OK, encode({item()}));
}

TEST_F(Launcher, AQueueThatCannotBeMadeLeavesNothingBehind)
{
    // the driver aborts when it is closed with something in use
    zip_gpu_queue_params_t params{nullptr, 64, 10, 2};
    int failures = 0;
    for (int n = 0; n < 40; ++n) {
        zip_gpu_queue_t *queue = nullptr;
        driver_->fail_after = n;
        if (api_.queue_create(gpu_, &params, &queue) == ZIP_OK) {
            api_.queue_destroy(queue);
            break;
        }
        ++failures;
        EXPECT_EQ(nullptr, queue);
    }
    driver_->fail_after = -1;
    EXPECT_EQ(12, failures); // stream, 3 x (memory, clear), 2 x (memory, event), synchronize
}

} // namespace
