// SPDX-License-Identifier: BSD-3-Clause
// `zipperf codec`: its data sets, its rows, and that it finds what is wrong. The GPU's part runs on
// a driver for tests (fake_cuda.cc) with the host codec behind the GPU codec's interface: all of it
// but the kernels.
#include "kernels/codec_gpu.h"
#include "kernels/format.h"
#include "simt/driver_cpu.h"
#include "tools/codec_bench.h"
#include "tools/cuda_driver.h"
#include "tools/data_set.h"
#include "tools/error.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <bit>
#include <cmath>
#include <cstring>
#include <dlfcn.h>
#include <fstream>
#include <map>
#include <memory>
#include <unistd.h>

namespace {

using nlohmann::json;
using tools::Values;

// What the codec below does wrong.
enum class Fault { kNone, kFlippedBit, kNoProgress, kWrongSum, kNoChunk, kWrongProbe };
Fault fault = Fault::kNone;

// ------------------------------------------------------------ the host codec behind the GPU's
// interface

struct Piece {
    std::byte *data;
    size_t size;
    std::byte *chunk;
    size_t room;
    uint64_t *progress;
};

std::vector<Piece> pieces_of(const zip_gpu_item_t &item)
{
    const uint64_t length = item.chunk_length == 0 ? item.data_size : item.chunk_length;
    std::vector<Piece> pieces;
    for (uint64_t at = 0; at < item.data_size; at += length) {
        const size_t i = pieces.size();
        pieces.push_back({static_cast<std::byte *>(item.data) + at,
                          static_cast<size_t>(std::min(length, item.data_size - at)),
                          static_cast<std::byte *>(item.chunks) + i * item.chunk_stride,
                          static_cast<size_t>(item.chunk_stride),
                          item.progress == nullptr ? nullptr : item.progress + i});
    }
    return pieces;
}

void finish(const Piece &piece, uint64_t word, zip_gpu_launch_t launch)
{
    if (piece.progress != nullptr && fault != Fault::kNoProgress) {
        *piece.progress = word | uint64_t{launch.seq} << 48;
    }
}

void encode_piece(const zip_gpu_item_t &item, const Piece &piece, zip_gpu_launch_t launch)
{
    size_t encoded = 0;
    ASSERT_EQ(zip_codec_encode(item.coding, piece.data, piece.size, piece.chunk, piece.room,
                               &encoded),
              ZIP_OK);
    zip::format::ChunkHeader header{};
    std::memcpy(&header, piece.chunk, sizeof(header));
    if (fault == Fault::kNoChunk) {
        std::memset(piece.chunk, 0, sizeof(header));
    }
    const uint64_t small = (header.flags & zip::format::FLAG_SMALL_TILES) != 0;
    const uint64_t coding = header.dtype | uint64_t{header.shape} << 4 | small << 7;
    finish(piece, header.tail_length / 4 | coding << 32, launch);
}

void decode_piece(const zip_gpu_item_t &item, const Piece &piece, zip_gpu_launch_t launch)
{
    std::vector<std::byte> values(piece.size);
    ASSERT_EQ(zip_codec_decode(piece.chunk, piece.room, values.data(), values.size()), ZIP_OK);
    if (item.op == ZIP_GPU_ADD) {
        ASSERT_EQ(item.coding.dtype, ZIP_DTYPE_BF16);
        for (size_t i = 0; i + 2 <= piece.size; i += 2) {
            uint16_t a, b;
            std::memcpy(&a, piece.data + i, 2);
            std::memcpy(&b, values.data() + i, 2);
            const float sum = std::bit_cast<float>(uint32_t{a} << 16) +
                              std::bit_cast<float>(uint32_t{b} << 16);
            const uint16_t rounded =
                    static_cast<uint16_t>(tools::bf16_from_fp32(sum) + (fault == Fault::kWrongSum));
            std::memcpy(values.data() + i, &rounded, 2);
        }
    }
    if (fault == Fault::kFlippedBit && item.op == ZIP_GPU_STORE) {
        values.back() ^= std::byte{1};
    }
    std::memcpy(piece.data, values.data(), piece.size);
    finish(piece, 0, launch);
}

zip_status_t run(const zip_gpu_item_t *items, size_t count, zip_gpu_launch_t launch,
                 void (*one)(const zip_gpu_item_t &, const Piece &, zip_gpu_launch_t))
{
    for (size_t i = 0; i < count; ++i) {
        for (const Piece &piece : pieces_of(items[i])) {
            one(items[i], piece, launch);
        }
    }
    return ZIP_OK;
}

const zip_gpu_api_t host_api = {
        ZIP_GPU_API_VERSION,
        "host",
        [] { return "no error"; },
        [](const void *, zip_gpu_memory_t *memory_p) {
            *memory_p = {};
            return ZIP_OK;
        },
        [](const zip_gpu_memory_t *, zip_gpu_t **gpu_p) {
            *gpu_p = nullptr;
            return ZIP_OK;
        },
        [](zip_gpu_t *) {},
        [](zip_gpu_t *) { return uint32_t{1}; },
        [](zip_gpu_t *, zip_gpu_place_t, size_t, void **) { return ZIP_ERR_UNSUPPORTED; },
        [](zip_gpu_t *, zip_gpu_place_t, void *) {},
        [](zip_gpu_t *, void *, size_t) { return ZIP_ERR_UNSUPPORTED; },
        [](zip_gpu_t *, void *) {},
        [](zip_gpu_t *, void *, size_t, int *) { return ZIP_ERR_UNSUPPORTED; },
        [](zip_gpu_t *, const zip_gpu_queue_params_t *, zip_gpu_queue_t **queue_p) {
            *queue_p = nullptr;
            return ZIP_OK;
        },
        [](zip_gpu_queue_t *) {},
        [](zip_gpu_queue_t *) -> void * { return nullptr; },
        [](zip_gpu_queue_t *, int *idle_p) {
            *idle_p = 1;
            return ZIP_OK;
        },
        [](zip_gpu_queue_t *, const zip_gpu_item_t *items, size_t count, zip_gpu_launch_t launch) {
            return run(items, count, launch, encode_piece);
        },
        [](zip_gpu_queue_t *, const zip_gpu_item_t *items, size_t count, zip_gpu_launch_t launch) {
            return run(items, count, launch, decode_piece);
        },
        [](zip_gpu_queue_t *, const zip_gpu_item_t *items, size_t count, zip_probe_t *results) {
            for (size_t i = 0; i < count; ++i) {
                zip_codec_probe(items[i].data, items[i].data_size, results + i);
            }
            if (fault == Fault::kWrongProbe) {
                results[0].ratio += 0.01F;
            }
            return ZIP_OK;
        },
        [](zip_gpu_queue_t *, void *, const void *, size_t, uint64_t *, uint16_t) {
            return ZIP_ERR_UNSUPPORTED;
        },
};

// ------------------------------------------------------------ the kernels on the CPU

const zip_gpu_api_t &kernels()
{
    constexpr uint32_t kWave = 32;
    return *zip::gpu::CpuDriver::api(kWave);
}

// Their driver knows only its own streams, and does nothing before it is told to.
zip_status_t finish_kernels(zip_status_t status, zip_gpu_queue_t *queue)
{
    zip::gpu::CpuDriver &driver = *zip::gpu::CpuDriver::opened();
    driver.run(kernels().queue_stream(queue));
    EXPECT_EQ(driver.error, "");
    return status;
}

zip_gpu_api_t kernels_api()
{
    zip_gpu_api_t api = kernels();
    api.queue_create = [](zip_gpu_t *gpu, const zip_gpu_queue_params_t *params,
                          zip_gpu_queue_t **queue_p) {
        zip_gpu_queue_params_t own = *params;
        own.stream = nullptr;
        return kernels().queue_create(gpu, &own, queue_p);
    };
    api.encode = [](zip_gpu_queue_t *queue, const zip_gpu_item_t *items, size_t count,
                    zip_gpu_launch_t launch) {
        return finish_kernels(kernels().encode(queue, items, count, launch), queue);
    };
    api.decode = [](zip_gpu_queue_t *queue, const zip_gpu_item_t *items, size_t count,
                    zip_gpu_launch_t launch) {
        return finish_kernels(kernels().decode(queue, items, count, launch), queue);
    };
    api.probe = [](zip_gpu_queue_t *queue, const zip_gpu_item_t *items, size_t count,
                   zip_probe_t *results) {
        return finish_kernels(kernels().probe(queue, items, count, results), queue);
    };
    return api;
}

} // namespace

// In the place of the loader: no file is opened here.
extern "C" const zip_gpu_api_t *zip_gpu_load(const char *name, const char **error_p)
{
    if (std::strcmp(name, "host codec of the test") == 0) {
        return &host_api;
    }
    if (std::strcmp(name, "kernels on the CPU") == 0) {
        static const zip_gpu_api_t api = kernels_api();
        return &api;
    }
    *error_p = "the test has no such codec";
    return nullptr;
}

namespace {

// ------------------------------------------------------------ data sets

double fp32_of(const tools::ValuePool &pool, size_t i)
{
    const std::byte *at = pool.bytes.data() + i * tools::value_bytes(pool.dtype);
    if (pool.dtype == "fp64") {
        double value;
        std::memcpy(&value, at, sizeof(value));
        return value;
    }
    if (pool.dtype == "fp32") {
        float value;
        std::memcpy(&value, at, sizeof(value));
        return static_cast<double>(value);
    }
    uint16_t value;
    std::memcpy(&value, at, sizeof(value));
    return static_cast<double>(pool.dtype == "bf16" ? tools::fp32_from_bf16(value)
                                                    : tools::fp32_from_fp16(value));
}

TEST(ValuePool, has_the_distribution_of_its_name)
{
    for (const char *dtype : {"bf16", "fp16", "fp32", "fp64"}) {
        const uint64_t bytes = 400000 * tools::value_bytes(dtype);
        for (const Values values : {Values::kNormal, Values::kUniform}) {
            const tools::ValuePool pool = tools::make_value_pool(values, dtype, bytes, {});
            const size_t count = pool.bytes.size() / tools::value_bytes(dtype);
            ASSERT_GE(count, 400000U);
            double sum = 0, squares = 0, top = 0;
            for (size_t i = 0; i < count; ++i) {
                const double value = fp32_of(pool, i);
                sum += value;
                squares += value * value;
                top = std::max(top, std::fabs(value));
            }
            const double n = static_cast<double>(count);
            const double deviation = values == Values::kNormal ? 0.02 : 1 / std::sqrt(3.0);
            EXPECT_NEAR(sum / n, 0, 5 * deviation / std::sqrt(n)) << dtype;
            EXPECT_NEAR(std::sqrt(squares / n), deviation, 0.01 * deviation) << dtype;
            EXPECT_LE(top, values == Values::kNormal ? 0.13 : 1.0) << dtype;
        }
    }
}

TEST(ValuePool, has_a_scale_a_channel)
{
    const tools::ValuePool pool = tools::make_value_pool(Values::kKv, "fp32", 4096 * 128 * 4, {});
    std::vector<double> deviations;
    for (size_t channel = 0; channel < tools::kKvChannels; ++channel) {
        double squares = 0;
        for (size_t row = 0; row < 4096; ++row) {
            const double value = fp32_of(pool, row * tools::kKvChannels + channel);
            squares += value * value;
        }
        deviations.push_back(std::log(std::sqrt(squares / 4096)));
    }
    double mean = 0, spread = 0;
    for (const double d : deviations) {
        mean += d / 128;
    }
    for (const double d : deviations) {
        spread += (d - mean) * (d - mean) / 128;
    }
    EXPECT_NEAR(std::sqrt(spread), 1.0, 0.25);
}

TEST(ValuePool, fp8_uses_the_range_of_its_type)
{
    for (const auto &[dtype, largest] : {std::pair{"e4m3", 0x7e}, std::pair{"e5m2", 0x7b}}) {
        const tools::ValuePool pool = tools::make_value_pool(Values::kUniform, dtype, 1 << 20, {});
        int top = 0;
        for (const std::byte value : pool.bytes) {
            top = std::max(top, std::to_integer<int>(value & std::byte{0x7f}));
        }
        EXPECT_EQ(top, largest) << dtype;
    }
}

TEST(ValuePool, a_longer_buffer_repeats_it_from_other_places)
{
    const tools::ValuePool pool = tools::make_value_pool(Values::kKv, "bf16", 1 << 16, {});
    const size_t length = pool.bytes.size();
    std::vector<std::byte> buffer(3 * length + 100), other(buffer.size());
    tools::fill_from_pool(pool, 0, buffer.data(), buffer.size());
    EXPECT_EQ(std::memcmp(buffer.data(), pool.bytes.data(), length), 0) << "first from its start";
    EXPECT_NE(std::memcmp(buffer.data() + length, pool.bytes.data(), length), 0);
    EXPECT_NE(std::memcmp(buffer.data() + length, buffer.data() + 2 * length, length), 0);
    std::map<std::byte, int> wanted, got;
    for (size_t i = 0; i < length; ++i) {
        ++wanted[pool.bytes[i]];
        ++got[buffer[length + i]];
    }
    EXPECT_EQ(got, wanted) << "the same values";
    tools::fill_from_pool(pool, 7, other.data(), other.size());
    EXPECT_NE(std::memcmp(buffer.data(), other.data(), length), 0);
    // Channels stay where they are: a whole row is found again at a multiple of its length.
    const size_t row = tools::kKvChannels * 2;
    bool found = false;
    for (size_t i = 0; i < length && !found; i += row) {
        found = std::memcmp(pool.bytes.data() + i, buffer.data() + length, row) == 0;
    }
    EXPECT_TRUE(found);
}

TEST(Fp16, rounds_to_nearest_even)
{
    const auto round = [](float value) { return tools::fp16_from_fp32(value); };
    EXPECT_EQ(round(1.0F), 0x3c00);
    EXPECT_EQ(round(-2.0F), 0xc000);
    EXPECT_EQ(round(0x1.002p0F), 0x3c00);    // middle, even below
    EXPECT_EQ(round(0x1.006p0F), 0x3c02);    // middle, even above
    EXPECT_EQ(round(0x1.002002p0F), 0x3c01); // above the middle
    EXPECT_EQ(round(65504.0F), 0x7bff);      // the largest
    EXPECT_EQ(round(65519.0F), 0x7bff);
    EXPECT_EQ(round(65520.0F), 0x7c00); // beyond: infinity
    EXPECT_EQ(round(0x1p-24F), 0x0001); // the smallest
    EXPECT_EQ(round(0x1p-25F), 0x0000); // its half: to even
    EXPECT_EQ(round(0x1.000002p-25F), 0x0001);
    EXPECT_EQ(round(0x1.ffcp-15F), 0x0400); // carries into the normal numbers
    EXPECT_EQ(round(0x1p-149F), 0x0000);
    EXPECT_EQ(round(-0.0F), 0x8000);
    EXPECT_EQ(round(INFINITY), 0x7c00);
    EXPECT_EQ(round(NAN) & 0x7c00, 0x7c00);
    EXPECT_NE(round(NAN) & 0x3ff, 0);
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
        const float value = tools::fp32_from_fp16(static_cast<uint16_t>(bits));
        if (!std::isnan(value)) {
            ASSERT_EQ(round(value), bits);
        }
    }
}

// ------------------------------------------------------------ rows

class CodecBench : public testing::Test {
protected:
    CodecBench()
    {
        const char *base = std::getenv("TMPDIR");
        path_ = std::string(base != nullptr ? base : "/tmp") + "/zip_codec_bench_" +
                std::to_string(getpid());
        options.json = path_;
        options.repeats = 2;
        options.chunks = {"64K"};
        options.gpu_codec = "host codec of the test";
        options.zstd = false;
        fault = Fault::kNone;
    }
    ~CodecBench() override
    {
        unlink(path_.c_str());
        fault = Fault::kNone;
    }

    json run()
    {
        tools::run_codec_bench(options);
        std::ifstream in(path_);
        return json::parse(in)["rows"];
    }

    // The exit status of a run that must fail.
    int failure()
    {
        try {
            tools::run_codec_bench(options);
        } catch (const tools::Error &error) {
            message = error.what();
            return error.status();
        }
        return tools::kExitOk;
    }

    tools::CodecOptions options;
    std::string message;

private:
    std::string path_;
};

TEST_F(CodecBench, host_rows_say_what_was_measured)
{
    options.where = {"host"};
    options.sizes = "200001";
    options.dtypes = {"bf16", "e5m2"};
    options.shapes = {"default", "dense"};
    options.data = {"normal", "random"};
    options.ops = {"encode", "decode"};
    const json rows = run();
    ASSERT_EQ(rows.size(), 2U * 2 * 2 * 2 * 2); // types, data, shapes, caches, operations
    for (const json &row : rows) {
        EXPECT_EQ(row["size"], 200001);
        EXPECT_EQ(row["verified"], true);
        EXPECT_EQ(row["codec"], "zip");
        EXPECT_EQ(row["where"], "host");
        EXPECT_GT(row["gbps_median"], 0);
        EXPECT_GT(row["us_median"], 0);
        EXPECT_TRUE(row.contains("simd"));
        EXPECT_FALSE(row.contains("max_sms"));
        EXPECT_FALSE(row.contains("host_us_median"));
        if (row["data"] == "random") {
            EXPECT_GE(row["ratio"], 1.0);
            EXPECT_LT(row["ratio"], 1.01);
        } else {
            const bool wide = row["dtype"] == "bf16";
            const bool dense = row["shape"] == "dense";
            EXPECT_NEAR(row["ratio"], wide ? (dense ? 0.665 : 0.671) : (dense ? 0.704 : 0.715),
                        0.006)
                    << row;
        }
    }
}

TEST_F(CodecBench, a_copy_on_the_host_is_beside_each_chunk_length)
{
    options.where = {"host"};
    options.sizes = "200001";
    options.chunks = {"0", "64K"};
    options.ops = {"copy", "decode"};
    options.threads = 2;
    std::map<std::string, int> ops;
    for (const json &row : run()) {
        ++ops[row["op"]];
        EXPECT_EQ(row["verified"], true);
        EXPECT_EQ(row["threads"], 2);
        EXPECT_EQ(row["codec"], row["op"] == "copy" ? "copy" : "zip");
        EXPECT_EQ(row.contains("ratio"), row["op"] != "copy");
    }
    EXPECT_EQ(ops, (std::map<std::string, int>{{"copy", 4}, {"decode", 4}})); // chunks, caches
}

TEST_F(CodecBench, auto_says_what_was_picked)
{
    options.where = {"host"};
    options.sizes = "1M";
    options.shapes = {"auto"};
    options.caches = {"warm"};
    options.data = {"uniform"};
    options.ops = {"encode", "decode"};
    const json rows = run();
    ASSERT_EQ(rows.size(), 2U);
    EXPECT_EQ(rows[0]["picked"], "bf16/11238");
}

class CodecBenchGpu : public CodecBench {
protected:
    static void SetUpTestSuite()
    {
        // Its name inside is libcuda.so.1: who asks for that later gets this one.
        library = dlopen(FAKE_CUDA_PATH, RTLD_NOW);
        ASSERT_NE(library, nullptr) << dlerror();
    }
    CodecBenchGpu()
    {
        options.where = {"gpu"};
        options.sizes = "256K";
    }
    static size_t allocations()
    {
        return reinterpret_cast<size_t (*)()>(dlsym(library, "fake_cuda_allocations"))();
    }

    static void *library;
};
void *CodecBenchGpu::library = nullptr;

TEST_F(CodecBenchGpu, rows_say_what_was_measured)
{
    options.sizes = "256K,1M";
    options.max_sms = {0, 16};
    const json rows = run();
    ASSERT_EQ(rows.size(), 2U * (1 + 2 * 3)); // sizes; a copy; limits, operations
    std::map<std::string, int> ops;
    for (const json &row : rows) {
        ++ops[row["op"]];
        EXPECT_EQ(row["where"], "gpu");
        EXPECT_EQ(row["verified"], true);
        EXPECT_EQ(row["cache"], "cold");
        EXPECT_EQ(row["repeats"], 2);
        EXPECT_FALSE(row.contains("misalign"));
        EXPECT_GT(row["memory_gbps"].get<double>(), row["gbps_median"].get<double>());
        // The driver of the test does everything within the call.
        EXPECT_GT(row["host_us_median"].get<double>(), 0);
        EXPECT_LE(row["host_us_median"].get<double>(), row["us_median"].get<double>());
        if (row["op"] != "copy") {
            EXPECT_GT(row["host_us_median"].get<double>(), 0.5 * row["us_median"].get<double>());
            EXPECT_NEAR(row["ratio"], 0.671, 0.005);
            EXPECT_EQ(row["chunk"], 65536);
            EXPECT_EQ(row["progress"], true);
        }
    }
    EXPECT_EQ(ops,
              (std::map<std::string, int>{{"copy", 2}, {"encode", 4}, {"decode", 4}, {"add", 4}}));
    EXPECT_EQ(allocations(), 0U) << "all memory was returned";
}

TEST_F(CodecBenchGpu, odd_sizes_places_and_batches_stay_inside_their_memory)
{
    options.sizes = "100001,65536,17";
    options.misalign = 3;
    options.batch = 3;
    for (const char *chunk : {"0", "64K", "32K"}) {
        for (const char *memory : {"device", "host"}) {
            for (const bool progress : {true, false}) {
                options.chunks = {chunk};
                options.chunks_in = memory;
                options.progress = progress;
                const json rows = run();
                // No sums of half a value.
                ASSERT_EQ(rows.size(), 3U * 3 + 1) << chunk << memory << progress;
                for (const json &row : rows) {
                    EXPECT_EQ(row["batch"], 3);
                    EXPECT_EQ(row["misalign"], 3);
                    EXPECT_EQ(row["verified"], true);
                }
            }
        }
    }
    EXPECT_EQ(allocations(), 0U);
}

TEST_F(CodecBenchGpu, every_type_and_shape_is_taken)
{
    options.dtypes = {"bf16", "fp32", "fp16", "fp64", "e4m3", "e5m2"};
    options.shapes = {"default", "11238", "38", "dense", "columns", "auto"};
    options.tiles = {"default", "small"};
    options.ops = {"encode", "decode"};
    EXPECT_EQ(run().size(), (6U * 9 + 5 * 2) * 2); // no small tiles with dense, no fp64 by columns
}

TEST_F(CodecBenchGpu, a_probe_is_the_hosts)
{
    options.gpu_codec = "kernels on the CPU";
    options.sizes = "17,100K";
    options.data = {"uniform", "random"};
    options.ops = {"probe"};
    options.batch = 2;
    const json rows = run();
    ASSERT_EQ(rows.size(), 4U);
    std::vector<std::string> picked;
    for (const json &row : rows) {
        EXPECT_EQ(row["op"], "probe");
        EXPECT_EQ(row["verified"], true);
        EXPECT_GT(row["us_median"].get<double>(), 0);
        if (row["size"] == 102400) {
            picked.push_back(row["picked"]);
        }
    }
    EXPECT_EQ(picked, (std::vector<std::string>{"bf16/11238", "bytes"}));
}

TEST_F(CodecBenchGpu, a_wrong_probe_is_found)
{
    options.ops = {"probe"};
    EXPECT_EQ(run().size(), 1U);
    fault = Fault::kWrongProbe;
    EXPECT_EQ(failure(), tools::kExitMismatch);
    EXPECT_NE(message.find("a probe of 256 KiB found bf16/22228 on the GPU"), std::string::npos)
            << message;
}

TEST_F(CodecBenchGpu, the_kernels_are_driven_as_they_want)
{
    options.gpu_codec = "kernels on the CPU";
    options.sizes = "40002";
    options.dtypes = {"bf16", "fp16"};
    options.data = {"normal", "random"};
    options.shapes = {"default", "dense"};
    options.tiles = {"default", "small"};
    options.chunks = {"0", "16K"};
    options.max_sms = {0, 2};
    options.misalign = 2;
    options.batch = 2;
    options.repeats = 1;
    const json rows = run();
    size_t coded = 0, sums = 0;
    for (const json &row : rows) {
        EXPECT_EQ(row["verified"], true);
        sums += row["op"] == "add";
        if (row["op"] == "encode" && row["data"] == "normal" && row["dtype"] == "bf16") {
            EXPECT_NEAR(row["ratio"], 0.672, 0.012) << row;
            ++coded;
        }
    }
    // Codings, chunk lengths, limits.
    EXPECT_EQ(coded, 3U * 2 * 2);
    EXPECT_EQ(sums, 2 * coded);
}

TEST_F(CodecBenchGpu, nvcomp_is_measured_on_the_same_buffers)
{
    options.nvcomp = FAKE_NVCOMP_PATH;
    options.ops = {"encode", "decode"};
    options.nvcomp_chunks = "32K,1M";
    options.sizes = "200000";
    options.batch = 2;
    options.dtypes = {"bf16", "fp32"};
    const json rows = run();
    std::map<std::string, int> peers;
    for (const json &row : rows) {
        const std::string codec = row["codec"];
        if (codec.rfind("nvcomp", 0) != 0) {
            continue;
        }
        ++peers[codec + " " + row["op"].get<std::string>()];
        EXPECT_EQ(row["dtype"], "bf16") << "the library of the test refuses all but float16";
        EXPECT_EQ(row["chunk"], 32768);
        EXPECT_EQ(row["verified"], true);
        EXPECT_DOUBLE_EQ(row["ratio"], (200000 + 7 * 16) / 200000.0); // 16 bytes a chunk
    }
    EXPECT_EQ(peers, (std::map<std::string, int>{{"nvcomp-ans decode", 1},
                                                 {"nvcomp-ans encode", 1},
                                                 {"nvcomp-bitcomp decode", 1},
                                                 {"nvcomp-bitcomp encode", 1}}));
    EXPECT_EQ(allocations(), 0U);
}

TEST_F(CodecBenchGpu, random_bits_are_measured_without_sums)
{
    options.data = {"random"};
    const json rows = run();
    ASSERT_EQ(rows.size(), 3U);
    EXPECT_GE(rows[1]["ratio"], 1.0);
}

TEST_F(CodecBenchGpu, a_changed_bit_is_found)
{
    fault = Fault::kFlippedBit;
    EXPECT_EQ(failure(), tools::kExitMismatch);
    EXPECT_NE(message.find("did not give the original's bits"), std::string::npos) << message;
    EXPECT_EQ(allocations(), 0U);
}

TEST_F(CodecBenchGpu, a_wrong_sum_is_found)
{
    fault = Fault::kWrongSum;
    EXPECT_EQ(failure(), tools::kExitMismatch);
    EXPECT_NE(message.find("add of"), std::string::npos) << message;
}

TEST_F(CodecBenchGpu, a_missing_progress_word_is_found)
{
    fault = Fault::kNoProgress;
    EXPECT_EQ(failure(), tools::kExitMismatch);
    EXPECT_NE(message.find("no progress word"), std::string::npos) << message;
}

TEST_F(CodecBenchGpu, a_missing_chunk_is_found)
{
    fault = Fault::kNoChunk;
    EXPECT_EQ(failure(), tools::kExitMismatch);
    EXPECT_NE(message.find("left no chunk"), std::string::npos) << message;
}

TEST_F(CodecBenchGpu, what_does_not_fit_is_left_out)
{
    options.sizes = "256K";
    options.batch = 4096; // of the 1 GiB that the test's driver says it has
    EXPECT_TRUE(run().empty());
}

TEST_F(CodecBenchGpu, an_unknown_codec_and_gpu_are_errors)
{
    options.gpu_codec = "nothing";
    EXPECT_EQ(failure(), tools::kExitFailed);
    EXPECT_NE(message.find("the test has no such codec"), std::string::npos) << message;
    options.device = 5;
    EXPECT_EQ(failure(), tools::kExitFailed);
    EXPECT_NE(message.find("there is no GPU 5"), std::string::npos) << message;
    options.device = 0;
    options.gpu_codec = "host codec of the test";
    options.nvcomp = "/no/such/libnvcomp.so.6";
    EXPECT_EQ(failure(), tools::kExitFailed);
    EXPECT_NE(message.find("cannot open nvCOMP"), std::string::npos) << message;
}

} // namespace
