// SPDX-License-Identifier: BSD-3-Clause
// The GPU codec by its public interface, the same tests on every back end: its kernels on the CPU
// in waves of 32 and 64, and on CUDA where there is a GPU. The host codec is the judge of what it
// encodes and decodes.
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <iterator>

#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "gpu_back_end.h"
#include "kernels/cpu/internal.h"
#include "kernels/format.h"
#include "simt/driver_cpu.h"
#include "simt/executor.h"

namespace {

using namespace zip::test;
namespace format = zip::format;

constexpr zip_gpu_queue_params_t QUEUE = {nullptr, 64, 1024, 4};

// A buffer to encode: its bytes begin `offset` bytes behind a multiple of 16.
struct Original {
    zip_coding_t coding;
    Bytes bytes;
    size_t offset = 0;
    uint64_t chunk_length = 0;
};

// Chunks of one item.
using Chunks = std::vector<Bytes>;

uint64_t up_to_16(uint64_t n)
{
    return (n + 15) / 16 * 16;
}

format::ChunkHeader header_of(const Bytes &chunk)
{
    format::ChunkHeader h{};
    // an empty chunk too, whose data() is null
    std::copy_n(chunk.begin(), std::min(sizeof h, chunk.size()), reinterpret_cast<uint8_t *>(&h));
    return h;
}

// What is different between two chunks of the same bytes, but for the order of the tail's parts and
// the gaps between sections; "" if nothing is.
std::string difference(const Bytes &a, const Bytes &b, std::string *gap = nullptr)
{
    const format::ChunkHeader h = header_of(a);
    if (memcmp(a.data(), b.data(), sizeof h) != 0)
        return "headers";
    if (h.dtype == format::DTYPE_BYTES)
        return a == b ? "" : "stored bytes";
    const format::Coding coding{h.dtype, h.shape, (h.flags & format::FLAG_SMALL_TILES) != 0};
    const format::Layout l = format::layout_of(coding, h.original_length);
    if (a.size() != l.tail + h.tail_length || b.size() != a.size())
        return "sizes";
    const format::TypeTraits type = format::type_traits(h.dtype);
    const uint64_t low = type.low_bytes > 2 ? 2 : type.low_bytes;
    struct Section {
        const char *name;
        uint64_t at, bytes;
    };
    const Section sections[] = {
            {"COLUMNS", l.columns, l.mantissa - l.columns},
            {"MANTISSA", l.mantissa,
             type.mantissa_is_bytes() ? l.values
                                      : format::plane_bytes(type.sign_mantissa_bits(), l.values)},
            {"LOW", l.low, low * l.values},
            {"LOW2", l.low2, (type.low_bytes - low) * l.values},
            {"LEVEL1", l.level1,
             format::plane_bytes(format::shape_traits(h.shape).width[0], l.values)},
            {"COUNTS", l.counts, 2 * format::shape_traits(h.shape).counts * l.groups},
            {"TILES", l.tile_headers, 8 * l.tiles},
            {"SYMBOLS", l.symbols, 16 * l.tiles},
            {"TAIL", l.tail, 0},
    };
    for (size_t s = 0; s + 1 < std::size(sections); ++s) {
        const uint64_t end = sections[s].at + sections[s].bytes;
        for (uint64_t i = sections[s].at; i < sections[s + 1].at; ++i) {
            if (a[i] == b[i] || (i < end && sections[s].at == l.tile_headers))
                continue;
            if (i < end)
                return std::string(sections[s].name) + " at byte " +
                       std::to_string(i - sections[s].at) + " of " +
                       std::to_string(sections[s].bytes);
            if (gap != nullptr)
                *gap = std::string("the gap behind ") + sections[s].name;
        }
    }
    for (uint64_t t = 0; t < l.tiles; ++t) {
        uint64_t x, y;
        memcpy(&x, a.data() + l.tile_headers + 8 * t, 8);
        memcpy(&y, b.data() + l.tile_headers + 8 * t, 8);
        const std::string name = "tile " + std::to_string(t);
        if (format::tile_mode(x) != format::tile_mode(y))
            return name + "'s mode";
        if (format::tile_words(x) != format::tile_words(y))
            return name + "'s length";
        const uint64_t bytes = 4 * format::tile_words(x);
        const uint64_t at_x = l.tail + 4 * format::tile_offset(x),
                       at_y = l.tail + 4 * format::tile_offset(y);
        if (at_x + bytes > a.size() || at_y + bytes > b.size())
            return name + "'s place";
        if (memcmp(a.data() + at_x, b.data() + at_y, bytes) != 0)
            return name + "'s part of the tail";
    }
    return "";
}

// The host's chunk in that coding, also where it gains nothing.
Bytes host_chunk(zip_coding_t coding, const Bytes &original)
{
    zip_plan_t plan{};
    EXPECT_EQ(ZIP_OK, zip_codec_plan(coding, original.size(), &plan));
    Bytes chunk(plan.bound + 64);
    size_t size = 0;
    if (coding.dtype == ZIP_DTYPE_BYTES)
        EXPECT_EQ(ZIP_OK, zip_codec_encode(coding, original.data(), original.size(), chunk.data(),
                                           chunk.size(), &size));
    else
        size = zip::cpu::encode_scalar(format_coding(coding), original.data(), original.size(),
                                       chunk.data(), chunk.size());
    EXPECT_NE(0u, size);
    chunk.resize(size);
    return chunk;
}

Bytes piece(const Original &o, size_t i)
{
    if (o.chunk_length == 0)
        return o.bytes;
    const size_t first = i * o.chunk_length;
    return Bytes(o.bytes.begin() + ptrdiff_t(first),
                 o.bytes.begin() + ptrdiff_t(std::min(o.bytes.size(), first + o.chunk_length)));
}

size_t pieces(const Original &o)
{
    return o.chunk_length == 0
                   ? 1
                   : std::max<size_t>(1, (o.bytes.size() + o.chunk_length - 1) / o.chunk_length);
}

std::string describe(const Original &o)
{
    return (o.coding.dtype == ZIP_DTYPE_AUTO    ? std::string("auto")
            : o.coding.dtype == ZIP_DTYPE_BYTES ? std::string("bytes")
                                                : name_of(o.coding)) +
           ", " + std::to_string(o.bytes.size()) + " bytes, offset " + std::to_string(o.offset) +
           ", chunks of " + std::to_string(o.chunk_length);
}

class GpuCodec : public testing::TestWithParam<const char *> {
protected:
    void SetUp() override
    {
        std::string why;
        back_end_ = BackEnd::get(GetParam(), &why);
        if (back_end_ == nullptr && !why.empty())
            GTEST_SKIP() << why;
        ASSERT_NE(nullptr, back_end_);
        api_ = &back_end_->api();
        ASSERT_EQ(ZIP_OK, api_->queue_create(back_end_->gpu(), &QUEUE, &queue_))
                << api_->error_text();
    }
    void TearDown() override
    {
        if (queue_ != nullptr)
            api_->queue_destroy(queue_);
    }

    zip_gpu_launch_t launch(uint32_t max_sms) { return {max_sms, ++seq_}; }
    // Waits for what was launched. Where that failed nothing else of the test makes sense.
    void finish(zip_status_t launched)
    {
        if (launched != ZIP_OK)
            throw std::runtime_error(api_->error_text());
        const std::string error = back_end_->wait(api_->queue_stream(queue_));
        if (!error.empty())
            throw std::runtime_error(error);
    }

    // Encodes all in one call, and checks what the progress words say.
    std::vector<Chunks> encode(const std::vector<Original> &originals, uint32_t max_sms = 0)
    {
        std::vector<zip_gpu_item_t> items;
        std::vector<std::unique_ptr<DeviceMemory>> data, chunks, progress;
        std::vector<uint64_t> strides;
        for (const Original &o : originals) {
            data.push_back(std::make_unique<DeviceMemory>(*back_end_, o.bytes, o.offset, data_in_));
            zip_plan_t full{}, last{};
            const size_t count = pieces(o), last_length = piece(o, count - 1).size();
            EXPECT_EQ(ZIP_OK,
                      zip_codec_plan(o.coding, count > 1 ? o.chunk_length : last_length, &full));
            EXPECT_EQ(ZIP_OK, zip_codec_plan(o.coding, last_length, &last));
            const uint64_t stride = up_to_16(full.bound);
            strides.push_back(stride);
            chunks.push_back(std::make_unique<DeviceMemory>(
                    *back_end_, (count - 1) * stride + last.bound, 0, chunks_in_));
            progress.push_back(
                    std::make_unique<DeviceMemory>(*back_end_, 8 * count, 0, Memory::PINNED));
            items.push_back({o.coding, ZIP_GPU_STORE, data.back()->get(), o.bytes.size(),
                             chunks.back()->get(), o.chunk_length, stride, last.bound,
                             reinterpret_cast<uint64_t *>(progress.back()->get())});
        }
        const zip_gpu_launch_t l = launch(max_sms);
        finish(api_->encode(queue_, items.data(), items.size(), l));
        std::vector<Chunks> result;
        for (size_t i = 0; i < items.size(); ++i) {
            const Bytes all = chunks[i]->content(), words = progress[i]->content();
            Chunks of_item;
            for (size_t c = 0; c < pieces(originals[i]); ++c) {
                Bytes chunk(all.begin() + ptrdiff_t(c * strides[i]), all.end());
                uint64_t word;
                memcpy(&word, words.data() + 8 * c, 8);
                const format::ChunkHeader h = header_of(chunk);
                EXPECT_EQ(l.seq, ZIP_GPU_PROGRESS_SEQ(word)) << describe(originals[i]);
                EXPECT_EQ(h.tail_length, ZIP_GPU_PROGRESS_TAIL(word)) << describe(originals[i]);
                EXPECT_EQ(h.dtype, ZIP_GPU_PROGRESS_DTYPE(word)) << describe(originals[i]);
                EXPECT_EQ(h.shape, ZIP_GPU_PROGRESS_SHAPE(word)) << describe(originals[i]);
                EXPECT_EQ((h.flags & format::FLAG_SMALL_TILES) != 0, (word >> 39 & 1) != 0);
                zip_chunk_info_t info{};
                EXPECT_EQ(ZIP_OK, zip_codec_inspect(chunk.data(), chunk.size(), &info))
                        << describe(originals[i]) << ", chunk " << c;
                chunk.resize(std::min<size_t>(chunk.size(), info.encoded_length));
                of_item.push_back(chunk);
            }
            result.push_back(of_item);
        }
        return result;
    }

    struct Decoded {
        Bytes bytes;
        std::vector<zip_status_t> status; // of the chunks
    };
    // Decodes all in one call. What is decoded is added to `before`, if that is given.
    std::vector<Decoded> decode(const std::vector<Original> &originals,
                                const std::vector<Chunks> &all, uint32_t max_sms = 0,
                                const std::vector<Bytes> *before = nullptr)
    {
        std::vector<zip_gpu_item_t> items;
        std::vector<std::unique_ptr<DeviceMemory>> data, chunks, progress;
        for (size_t i = 0; i < originals.size(); ++i) {
            const Original &o = originals[i];
            const Chunks &c = all[i];
            data.push_back(std::make_unique<DeviceMemory>(
                    *back_end_, before != nullptr ? (*before)[i] : Bytes(o.bytes.size(), 0xcd),
                    o.offset, data_in_));
            uint64_t stride = 0;
            for (const Bytes &chunk : c)
                stride = std::max<uint64_t>(stride, up_to_16(chunk.size()));
            Bytes joined;
            for (size_t k = 0; k < c.size(); ++k) {
                joined.resize(k * stride, 0x5b);
                joined.insert(joined.end(), c[k].begin(), c[k].end());
            }
            chunks.push_back(std::make_unique<DeviceMemory>(*back_end_, joined, 0, chunks_in_));
            progress.push_back(
                    std::make_unique<DeviceMemory>(*back_end_, 8 * c.size(), 0, Memory::PINNED));
            items.push_back({o.coding, before != nullptr ? ZIP_GPU_ADD : ZIP_GPU_STORE,
                             data.back()->get(), o.bytes.size(), chunks.back()->get(),
                             o.chunk_length, stride, c.back().size(),
                             reinterpret_cast<uint64_t *>(progress.back()->get())});
            if (items.back().last_room == 0) // which would mean the stride
                items.back().chunk_stride = 0;
        }
        const zip_gpu_launch_t l = launch(max_sms);
        finish(api_->decode(queue_, items.data(), items.size(), l));
        std::vector<Decoded> result;
        for (size_t i = 0; i < items.size(); ++i) {
            Decoded d{data[i]->content(), {}};
            const Bytes words = progress[i]->content();
            for (size_t c = 0; c < all[i].size(); ++c) {
                uint64_t word;
                memcpy(&word, words.data() + 8 * c, 8);
                EXPECT_EQ(l.seq, ZIP_GPU_PROGRESS_SEQ(word)) << describe(originals[i]);
                EXPECT_EQ(0u, uint32_t(word));
                d.status.push_back(ZIP_GPU_PROGRESS_STATUS(word));
            }
            result.push_back(d);
        }
        return result;
    }

    // Encodes; the host decodes the chunks, and would have made the same; decodes.
    void round_trip(const std::vector<Original> &originals, uint32_t max_sms = 0)
    {
        const std::vector<Chunks> chunks = encode(originals, max_sms);
        for (size_t i = 0; i < originals.size(); ++i) {
            const Original &o = originals[i];
            for (size_t c = 0; c < chunks[i].size(); ++c) {
                const Bytes expected = piece(o, c);
                ASSERT_EQ("", difference(host_chunk(o.coding, expected), chunks[i][c]))
                        << describe(o) << ", chunk " << c;
                Bytes decoded(expected.size());
                ASSERT_EQ(ZIP_OK, zip_codec_decode(chunks[i][c].data(), chunks[i][c].size(),
                                                   decoded.data(), decoded.size()))
                        << describe(o) << ", chunk " << c;
                ASSERT_TRUE(expected == decoded) << describe(o) << ", chunk " << c;
            }
        }
        expect_decoded(originals, decode(originals, chunks, max_sms));
    }
    void expect_decoded(const std::vector<Original> &originals, const std::vector<Decoded> &decoded)
    {
        for (size_t i = 0; i < originals.size(); ++i) {
            for (zip_status_t status : decoded[i].status)
                ASSERT_EQ(ZIP_OK, status) << describe(originals[i]);
            ASSERT_TRUE(originals[i].bytes == decoded[i].bytes) << describe(originals[i]);
        }
    }

    BackEnd *back_end_ = nullptr;
    const zip_gpu_api_t *api_ = nullptr;
    zip_gpu_queue_t *queue_ = nullptr;
    uint16_t seq_ = 100;
    Memory data_in_ = Memory::DEVICE, chunks_in_ = Memory::DEVICE;
};
INSTANTIATE_TEST_SUITE_P(On, GpuCodec, testing::Values("shim32", "shim64", "cuda"),
                         [](const auto &p) { return p.param; });

// All that a type can have.
std::vector<zip_shape_t> shapes_of(zip_dtype_t dtype)
{
    std::vector<zip_shape_t> shapes;
    for (uint8_t shape = format::SHAPE_22228; shape < format::SHAPES; ++shape) {
        if (format::valid_coding({uint8_t(dtype), shape, false}))
            shapes.push_back(zip_shape_t(shape));
    }
    return shapes;
}

Original original(zip_coding_t coding, Data data, size_t length, size_t offset = 0,
                  uint64_t chunk_length = 0)
{
    return {coding, make_data(data, coding.dtype, length), offset, chunk_length};
}

// ---- every type and shape: a test for each, so that a failure has a name

class GpuCoding : public GpuCodec {
protected:
    // Lengths around everything that is counted: vectors, words, blocks, groups, tiles.
    static std::vector<size_t> lengths(zip_coding_t c)
    {
        const size_t size = zip_dtype_size(c.dtype);
        const size_t group = format::group_values(format_coding(c)) * size,
                     tile = format::tile_values(format_coding(c)) * size;
        return {0,
                1,
                size,
                size + size / 2,
                15,
                16,
                17,
                31 * size,
                33 * size,
                500 * size,
                1023 * size,
                1024 * size,
                1025 * size + 1,
                group + 32 * size,
                tile - size,
                tile,
                tile + size,
                tile + group - 16};
    }
    void lengths_and_alignments(zip_dtype_t dtype)
    {
        constexpr size_t OFFSETS[] = {0, 1, 2, 4, 8, 15, 3, 12};
        for (zip_shape_t shape : shapes_of(dtype)) {
            for (uint32_t small = 0; small < (shape == ZIP_SHAPE_DENSE ? 1u : 2u); ++small) {
                const zip_coding_t coding{dtype, shape, small};
                std::vector<Original> batch;
                size_t n = 0;
                for (size_t length : lengths(coding)) {
                    batch.push_back(original(coding, n % 3 == 0 ? Data::MIXED : Data::NORMAL,
                                             length, OFFSETS[n % std::size(OFFSETS)]));
                    ++n;
                }
                // a little behind a whole tile, and the memory ends with it
                const size_t tile =
                        format::tile_values(format_coding(coding)) * zip_dtype_size(dtype);
                for (size_t offset : {1u, 2u, 15u}) {
                    for (size_t rest : {size_t{1}, zip_dtype_size(dtype), size_t{13}})
                        batch.push_back(original(coding, Data::NORMAL, tile + rest, offset));
                }
                round_trip(batch);
                if (HasFatalFailure())
                    return;
            }
        }
    }
    void kinds_of_data(zip_dtype_t dtype)
    {
        for (zip_shape_t shape : shapes_of(dtype)) {
            const zip_coding_t coding{dtype, shape, 0};
            const size_t tile = format::tile_values(format_coding(coding)) * zip_dtype_size(dtype);
            std::vector<Original> batch;
            for (Data data : ALL_DATA)
                batch.push_back(original(coding, data,
                                         data == Data::MIXED ? 2 * tile + tile / 2 : tile + 160));
            round_trip(batch);
            if (HasFatalFailure())
                return;
        }
    }
};
INSTANTIATE_TEST_SUITE_P(On, GpuCoding, testing::Values("shim32", "shim64", "cuda"),
                         [](const auto &p) { return p.param; });

#define ZIP_TYPE_TESTS(Name, dtype)                                                                \
    TEST_P(GpuCoding, Name##OfAllLengthsAndAlignments)                                             \
    {                                                                                              \
        lengths_and_alignments(dtype);                                                             \
    }                                                                                              \
    TEST_P(GpuCoding, Name##OfAllKindsOfData)                                                      \
    {                                                                                              \
        kinds_of_data(dtype);                                                                      \
    }
ZIP_TYPE_TESTS(Bf16, ZIP_DTYPE_BF16)
ZIP_TYPE_TESTS(Fp32, ZIP_DTYPE_FP32)
ZIP_TYPE_TESTS(Fp16, ZIP_DTYPE_FP16)
ZIP_TYPE_TESTS(Fp64, ZIP_DTYPE_FP64)
ZIP_TYPE_TESTS(E4m3, ZIP_DTYPE_E4M3)
ZIP_TYPE_TESTS(E5m2, ZIP_DTYPE_E5M2)

TEST_P(GpuCodec, StoredBytesOfAllLengthsAndAlignments)
{
    const zip_coding_t bytes{ZIP_DTYPE_BYTES, ZIP_SHAPE_DEFAULT, 0};
    std::vector<Original> batch;
    size_t n = 0;
    for (size_t length : {0, 1, 15, 16, 17, 1000, 16383, 16384, 16385, 50000})
        batch.push_back(original(bytes, Data::RANDOM_BITS, length, n++ * 5 % 16));
    round_trip(batch);
}

TEST_P(GpuCodec, BytesBetweenSectionsAreZero)
{
    std::vector<Original> batch;
    for (zip_coding_t coding : all_codings())
        batch.push_back(original(coding, Data::NORMAL, 777));
    const std::vector<Chunks> chunks = encode(batch);
    for (size_t i = 0; i < batch.size(); ++i) {
        std::string gap;
        EXPECT_EQ("", difference(host_chunk(batch[i].coding, batch[i].bytes), chunks[i][0], &gap));
        EXPECT_EQ("", gap) << describe(batch[i]);
    }
}

TEST_P(GpuCodec, DecodesTheHostsChunks)
{
    std::vector<Original> batch;
    std::vector<Chunks> chunks;
    for (const zip_coding_t &coding : all_codings()) {
        batch.push_back(original(coding, Data::MIXED, 60000));
        chunks.push_back({host_chunk(coding, batch.back().bytes)});
    }
    expect_decoded(batch, decode(batch, chunks));
}

// The conformance vectors: where they were built, or where a machine with a GPU has them.
std::vector<std::filesystem::path> vector_files(const char *folder)
{
    const char *given = getenv("ZIP_TEST_VECTORS_DIR");
    const std::filesystem::path top = given != nullptr ? given : ZIP_TEST_VECTORS;
    std::vector<std::filesystem::path> files;
    for (const auto &entry : std::filesystem::directory_iterator(top / folder)) {
        if (entry.path().extension() == ".chunk")
            files.push_back(entry.path());
    }
    std::sort(files.begin(), files.end());
    return files;
}

Bytes content_of(const std::filesystem::path &file)
{
    std::ifstream in(file, std::ios::binary);
    return Bytes{std::istreambuf_iterator<char>(in), {}};
}

TEST_P(GpuCodec, ReadsTheConformanceVectorsAndMakesTheirTiles)
{
    size_t same = 0;
    const auto files = vector_files("");
    ASSERT_FALSE(files.empty());
    for (const auto &file : files) {
        const Bytes chunk = content_of(file);
        zip_chunk_info_t info{};
        ASSERT_EQ(ZIP_OK, zip_codec_inspect(chunk.data(), chunk.size(), &info)) << file;
        Original o{info.coding, Bytes(info.original_length), 0, 0};
        ASSERT_EQ(ZIP_OK,
                  zip_codec_decode(chunk.data(), chunk.size(), o.bytes.data(), o.bytes.size()))
                << file;
        SCOPED_TRACE(file);
        expect_decoded({o}, decode({o}, {{chunk}}));
        // What is canonical the host makes again; that a GPU then must, too.
        if (host_chunk(o.coding, o.bytes) == chunk) {
            EXPECT_EQ("", difference(chunk, encode({o})[0][0]));
            ++same;
        }
    }
    EXPECT_LT(files.size() / 2, same);
}

TEST_P(GpuCodec, RefusesTheVectorsThatAreBad)
{
    size_t refused = 0;
    const auto files = vector_files("bad");
    ASSERT_FALSE(files.empty());
    for (const auto &file : files) {
        const Bytes chunk = content_of(file);
        const format::ChunkHeader h = header_of(chunk);
        const format::Coding c{h.dtype, h.shape, (h.flags & format::FLAG_SMALL_TILES) != 0};
        // A receiver that believes what it was told beside the chunk; nonsense it would refuse by
        // itself.
        if (file.filename().string().starts_with("rule3") || !format::valid_coding(c) ||
            h.original_length > 1 << 20 || chunk.size() < sizeof h)
            continue;
        const zip_coding_t coding{zip_dtype_t(h.dtype), zip_shape_t(h.shape),
                                  uint32_t(c.small_tiles)};
        const Original o{coding, Bytes(h.original_length), 0, 0};
        SCOPED_TRACE(file);
        if (format::layout_of(c, h.original_length).tail > chunk.size())
            continue; // launchers refuse that
        EXPECT_NE(ZIP_OK, decode({o}, {{chunk}})[0].status[0]);
        ++refused;
    }
    EXPECT_LT(files.size() / 2, refused);
}

TEST_P(GpuCodec, ManyItemsOfManyTypes)
{
    std::vector<Original> batch;
    const std::vector<zip_coding_t> codings = all_codings();
    for (size_t i = 0; i < 60; ++i) {
        const zip_coding_t coding = i % 9 == 8 ? zip_coding_t{ZIP_DTYPE_BYTES, ZIP_SHAPE_DEFAULT, 0}
                                               : codings[i * 5 % codings.size()];
        batch.push_back(original(coding, Data::NORMAL, 100 + i * 977, i % 16));
    }
    round_trip(batch);
}

TEST_P(GpuCodec, AFullTableOfOneTypesItems)
{
    // 64 items: the search for a tile's item takes two steps
    std::vector<Original> batch;
    for (size_t i = 0; i < QUEUE.max_items; ++i)
        batch.push_back(
                original({ZIP_DTYPE_BF16, ZIP_SHAPE_22228, 0}, Data::NORMAL, i % 7 * 9001 + i));
    round_trip(batch);
}

TEST_P(GpuCodec, OriginalsAndChunksInAnyMemory)
{
    if (back_end_->slow())
        GTEST_SKIP() << "memory is memory here";
    std::vector<Memory> memories = {Memory::DEVICE, Memory::PINNED};
    if (back_end_->has_peer())
        memories.push_back(Memory::PEER);
    std::vector<Original> batch;
    for (const zip_coding_t &coding : all_codings())
        batch.push_back(original(coding, Data::NORMAL, 70001));
    batch.push_back(original({ZIP_DTYPE_BYTES, ZIP_SHAPE_DEFAULT, 0}, Data::NORMAL, 40000));
    batch.back().chunk_length = 16384;
    for (Memory data : memories) {
        for (Memory chunks : memories) {
            data_in_ = data;
            chunks_in_ = chunks;
            round_trip(batch);
            for (zip_shape_t shape : {ZIP_SHAPE_22228, ZIP_SHAPE_38}) // one item, whole tiles
                round_trip({original({ZIP_DTYPE_BF16, shape, 0}, Data::NORMAL, 32768)});
        }
    }
    RecordProperty("peer", back_end_->has_peer());
}

TEST_P(GpuCodec, SeveralChunksAnItem)
{
    std::vector<Original> batch;
    for (zip_dtype_t dtype : {ZIP_DTYPE_BF16, ZIP_DTYPE_FP64, ZIP_DTYPE_BYTES, ZIP_DTYPE_E4M3}) {
        batch.push_back(original({dtype, ZIP_SHAPE_22228, 0}, Data::NORMAL, 100003, 2, 32768));
        batch.push_back(original({dtype, ZIP_SHAPE_11238, 1}, Data::NORMAL, 65536, 0, 16384));
        batch.push_back(original({dtype, ZIP_SHAPE_22228, 0}, Data::MIXED, 50000, 0, 4096 + 16));
        batch.push_back(original({dtype, ZIP_SHAPE_DENSE, 0}, Data::NORMAL, 70000, 0, 40000));
        batch.push_back(original({dtype, ZIP_SHAPE_38, 0}, Data::NORMAL, 1000, 1, 16));
        batch.push_back(original({dtype, ZIP_SHAPE_38, 0}, Data::NORMAL, 1000, 1, 4096));
    }
    round_trip(batch);
}

TEST_P(GpuCodec, FewMultiprocessorsDoTheSame)
{
    std::vector<Original> batch;
    for (zip_dtype_t dtype : {ZIP_DTYPE_BF16, ZIP_DTYPE_FP32, ZIP_DTYPE_FP16, ZIP_DTYPE_FP64,
                              ZIP_DTYPE_E4M3, ZIP_DTYPE_E5M2, ZIP_DTYPE_BYTES}) {
        batch.push_back(original({dtype, ZIP_SHAPE_22228, 0}, Data::NORMAL, 300003, 2, 100000));
        batch.push_back(original({dtype, ZIP_SHAPE_DENSE, 0}, Data::MIXED, 100001));
    }
    for (uint32_t sms : {1u, 3u}) {
        round_trip(batch, sms);
        if (HasFatalFailure())
            return;
    }
}

TEST_P(GpuCodec, WholeTilesAlone)
{
    // these have kernels of their own: a launch for each type and shape
    for (zip_dtype_t dtype : {ZIP_DTYPE_BF16, ZIP_DTYPE_FP32, ZIP_DTYPE_FP16, ZIP_DTYPE_FP64,
                              ZIP_DTYPE_E4M3, ZIP_DTYPE_E5M2}) {
        for (zip_shape_t shape : shapes_of(dtype)) {
            const zip_coding_t coding{dtype, shape, 0};
            const size_t tile = format::tile_values(format_coding(coding)) * zip_dtype_size(dtype);
            for (uint32_t sms : {0u, 2u}) {
                round_trip({original(coding, Data::NORMAL, 3 * tile),
                            original(coding, Data::MIXED, 6 * tile, 0, 2 * tile),
                            original(coding, Data::RANDOM_BITS, 2 * tile)},
                           sms);
                if (HasFatalFailure())
                    return;
            }
        }
    }
}

TEST_P(GpuCodec, LaunchesFollowEachOther)
{
    // what one launch leaves behind must not disturb the next
    const Original a =
            original({ZIP_DTYPE_BF16, ZIP_SHAPE_22228, 0}, Data::NORMAL, 100000, 0, 32768);
    const Original b = original({ZIP_DTYPE_FP16, ZIP_SHAPE_DENSE, 0}, Data::MIXED, 90000);
    round_trip({a, b});
    round_trip({b, a, b});
    round_trip({a, a});
}

TEST_P(GpuCodec, ProgressIsOptional)
{
    const Original o = original({ZIP_DTYPE_BF16, ZIP_SHAPE_22228, 0}, Data::NORMAL, 50001, 0, 0);
    zip_plan_t plan{};
    ASSERT_EQ(ZIP_OK, zip_codec_plan(o.coding, o.bytes.size(), &plan));
    DeviceMemory data(*back_end_, o.bytes), chunk(*back_end_, plan.bound),
            out(*back_end_, o.bytes.size());
    zip_gpu_item_t item{o.coding, ZIP_GPU_STORE, data.get(), o.bytes.size(), chunk.get(), 0,
                        0,        plan.bound,    nullptr};
    ASSERT_EQ(ZIP_OK, api_->encode(queue_, &item, 1, launch(0))) << api_->error_text();
    item.data = out.get();
    ASSERT_EQ(ZIP_OK, api_->decode(queue_, &item, 1, launch(0))) << api_->error_text();
    EXPECT_EQ("", back_end_->wait(api_->queue_stream(queue_)));
    EXPECT_TRUE(o.bytes == out.content());
    round_trip({o}); // and nothing was left behind
}

// ---- decode and add

// The sum as the interface defines it, by the words of the kernels on the CPU (which have tests of
// their own).
Bytes sum(zip_dtype_t dtype, const Bytes &a, const Bytes &b)
{
    Bytes result(a.size());
    for (size_t i = 0; i < a.size(); i += 4) {
        uint32_t x = 0, y = 0;
        const size_t n = std::min<size_t>(4, a.size() - i);
        memcpy(&x, a.data() + i, n);
        memcpy(&y, b.data() + i, n);
        const uint32_t z = dtype == ZIP_DTYPE_BF16   ? zip::simt::add_bf16x2(x, y)
                           : dtype == ZIP_DTYPE_FP16 ? zip::simt::add_fp16x2(x, y)
                                                     : zip::simt::add_fp32(x, y);
        memcpy(result.data() + i, &z, n);
    }
    return result;
}

// NaNs made equal: a sum keeps no payload.
Bytes without_payloads(zip_dtype_t dtype, Bytes bytes)
{
    const size_t size = zip_dtype_size(dtype);
    const uint64_t infinity = dtype == ZIP_DTYPE_BF16   ? 0x7f80
                              : dtype == ZIP_DTYPE_FP16 ? 0x7c00
                                                        : 0x7f800000;
    for (size_t i = 0; i + size <= bytes.size(); i += size) {
        uint64_t v = 0;
        memcpy(&v, bytes.data() + i, size);
        const uint64_t magnitude = v & ~(uint64_t(1) << (8 * size - 1));
        if (magnitude > infinity) {
            v = infinity + 1;
            memcpy(bytes.data() + i, &v, size);
        }
    }
    return bytes;
}

TEST_P(GpuCodec, AddsToWhatIsThere)
{
    std::vector<Original> batch;
    std::vector<Bytes> before;
    std::vector<Chunks> chunks;
    for (zip_dtype_t dtype : {ZIP_DTYPE_BF16, ZIP_DTYPE_FP16, ZIP_DTYPE_FP32}) {
        const size_t size = zip_dtype_size(dtype);
        for (zip_shape_t shape : shapes_of(dtype)) {
            for (Data data : {Data::NORMAL, Data::RANDOM_BITS, Data::DENORMAL, Data::RAMP}) {
                const size_t n = batch.size();
                const size_t length = (8192 * (1 + n % 3) + n % 5 * 111) * size;
                // every alignment that values have, and one that they have not
                batch.push_back(original({dtype, shape, 0}, data, length, n % 6 * 2 + n % 7 / 6));
                before.push_back(make_data(n % 2 == 0 ? data : Data::NORMAL, dtype, length, 99));
                chunks.push_back({host_chunk(batch.back().coding, batch.back().bytes)});
            }
        }
    }
    for (uint32_t sms : {0u, 2u}) {
        const std::vector<Decoded> decoded = decode(batch, chunks, sms, &before);
        for (size_t i = 0; i < batch.size(); ++i) {
            const zip_dtype_t dtype = batch[i].coding.dtype;
            EXPECT_EQ(ZIP_OK, decoded[i].status[0]);
            const Bytes expected = without_payloads(dtype, sum(dtype, before[i], batch[i].bytes));
            const Bytes got = without_payloads(dtype, decoded[i].bytes);
            const auto at = std::mismatch(expected.begin(), expected.end(), got.begin()).first;
            ASSERT_TRUE(at == expected.end())
                    << describe(batch[i]) << ", byte " << at - expected.begin();
        }
    }
}

TEST_P(GpuCodec, AddsChunkByChunk)
{
    Original o = original({ZIP_DTYPE_BF16, ZIP_SHAPE_22228, 1}, Data::NORMAL, 70000, 4, 16384);
    const std::vector<Bytes> before = {make_data(Data::NORMAL, ZIP_DTYPE_BF16, 70000, 5)};
    const std::vector<Decoded> decoded = decode({o}, encode({o}), 0, &before);
    EXPECT_TRUE(sum(ZIP_DTYPE_BF16, before[0], o.bytes) == decoded[0].bytes);
}

// ---- hostile chunks: the host's verdict is the judge

class GpuHostile : public GpuCodec {
protected:
    // Decodes the chunks as if they were of `o`, each beside good ones, and compares with the host.
    void judge(const Original &o, const Bytes &good, const std::vector<Bytes> &chunks)
    {
        for (size_t first = 0; first < chunks.size(); first += BATCH) {
            std::vector<Original> batch = {o};
            std::vector<Chunks> all = {{good}};
            for (size_t i = first; i < std::min(chunks.size(), first + BATCH); ++i) {
                batch.push_back(o);
                all.push_back({chunks[i]});
            }
            batch.push_back(o);
            all.push_back({good});
            const std::vector<Decoded> decoded = decode(batch, all);
            if (HasFatalFailure())
                return;
            for (size_t i : {size_t(0), batch.size() - 1}) {
                ASSERT_EQ(ZIP_OK, decoded[i].status[0]) << "a good chunk was harmed";
                ASSERT_TRUE(o.bytes == decoded[i].bytes) << "a good chunk was harmed";
            }
            for (size_t i = 1; i + 1 < batch.size(); ++i) {
                const Bytes &chunk = all[i][0];
                Bytes expected(o.bytes.size());
                zip_status_t status = zip_codec_decode(chunk.data(), chunk.size(), expected.data(),
                                                       expected.size());
                const format::ChunkHeader h = header_of(chunk);
                const bool other =
                        h.dtype != o.coding.dtype || h.shape != o.coding.shape ||
                        ((h.flags & format::FLAG_SMALL_TILES) != 0) != (o.coding.small_tiles != 0);
                if (other && status == ZIP_OK) // well coded, but not as the receiver was told
                    status = ZIP_ERR_CORRUPT;
                ASSERT_EQ(status == ZIP_OK, decoded[i].status[0] == ZIP_OK)
                        << describe(o) << ": the host says " << zip_status_string(status)
                        << ", the GPU " << zip_status_string(decoded[i].status[0]) << ", chunk "
                        << first + i - 1;
                if (status == ZIP_OK) {
                    ASSERT_TRUE(expected == decoded[i].bytes) << describe(o);
                    ++accepted_;
                } else {
                    ++refused_;
                }
            }
        }
    }
    static constexpr size_t BATCH = 30;
    size_t accepted_ = 0, refused_ = 0;

    // One item with that chunk, or what decode() would do with it.
    std::vector<zip_coding_t> codings() const
    {
        std::vector<zip_coding_t> some;
        for (const zip_coding_t &c : all_codings()) {
            const bool usual = c.dtype == ZIP_DTYPE_BF16 || c.dtype == ZIP_DTYPE_FP64 ||
                               c.dtype == ZIP_DTYPE_E4M3;
            if (!back_end_->slow() || (usual && c.small_tiles == 0))
                some.push_back(c);
        }
        return some;
    }
};
INSTANTIATE_TEST_SUITE_P(On, GpuHostile, testing::Values("shim32", "shim64", "cuda"),
                         [](const auto &p) { return p.param; });

TEST_P(GpuHostile, FlippedBits)
{
    std::mt19937 random(1);
    for (const zip_coding_t &coding : codings()) {
        const size_t tile =
                format::tile_values(format_coding(coding)) * zip_dtype_size(coding.dtype);
        const Original o = original(coding, Data::MIXED, tile + tile / 2 + 3);
        const Bytes good = host_chunk(coding, o.bytes);
        const format::Layout l = format::layout_of(format_coding(coding), o.bytes.size());
        std::vector<Bytes> chunks;
        auto flip = [&](uint64_t from, uint64_t to, size_t times) {
            for (size_t i = 0; i < times && from < to; ++i) {
                Bytes bad = good;
                const size_t bit = random() % ((to - from) * 8);
                bad[from + bit / 8] ^= uint8_t(1 << bit % 8);
                chunks.push_back(bad);
            }
        };
        const size_t times = back_end_->slow() ? 6 : 60;
        flip(0, format::HEADER_LENGTH, 2 * times);
        flip(l.mantissa, l.level1, times / 3);
        flip(l.level1, l.counts, times);
        flip(l.counts, l.tile_headers, times);
        flip(l.tile_headers, l.symbols, 2 * times);
        flip(l.symbols, l.tail, times);
        flip(l.tail, good.size(), times);
        judge(o, good, chunks);
        if (HasFatalFailure())
            return;
    }
    EXPECT_GT(accepted_, 0u);
    EXPECT_GT(refused_, 0u);
}

// Ragged tiles of every number of groups, with something else than zeros between the sections:
// nobody looks there.
TEST_P(GpuHostile, WhatIsBetweenTheSectionsDoesNotMatter)
{
    for (const zip_coding_t &coding : all_codings()) {
        const format::Coding c = format_coding(coding);
        const uint32_t size = format::value_size(c.dtype), group = format::group_values(c);
        for (uint32_t groups = 1; groups * group <= format::tile_values(c); ++groups) {
            const Original o = original(coding, Data::MIXED, (groups * group - 5) * size);
            const Bytes good = host_chunk(coding, o.bytes);
            if (header_of(good).shape != c.shape)
                continue; // stored
            const format::Layout l = format::layout_of(c, o.bytes.size());
            Bytes other = good;
            auto fill = [&other](uint64_t from, uint64_t to) {
                std::fill(other.begin() + ptrdiff_t(from), other.begin() + ptrdiff_t(to),
                          uint8_t(0xff));
            };
            const format::ShapeTraits shape = format::shape_traits(c.shape);
            fill(l.level1 + format::plane_bytes(shape.width[0], l.values), l.counts);
            fill(l.counts + sizeof(uint16_t) * shape.counts * l.groups, l.tile_headers);
            fill(l.tile_headers + sizeof(uint64_t) * l.tiles, l.symbols);
            const std::vector<Decoded> decoded = decode({o, o}, {{other}, {good}});
            ASSERT_EQ(ZIP_OK, decoded[0].status[0]) << describe(o) << ", " << groups << " groups";
            ASSERT_TRUE(o.bytes == decoded[0].bytes) << describe(o) << ", " << groups << " groups";
        }
    }
}

TEST_P(GpuHostile, TruncatedChunks)
{
    for (const zip_coding_t &coding : codings()) {
        const Original o = original(coding, Data::NORMAL, 30001);
        const Bytes good = host_chunk(coding, o.bytes);
        const format::Layout l = format::layout_of(format_coding(coding), o.bytes.size());
        std::vector<Bytes> chunks;
        for (size_t size : {size_t(l.tail), size_t(l.tail + 1), size_t(l.tail + 16),
                            good.size() - 4, good.size() - 1})
            chunks.emplace_back(good.begin(), good.begin() + ptrdiff_t(size));
        judge(o, good, chunks);
        if (HasFatalFailure())
            return;
        // what has not even room for its fixed parts is refused before anything is launched
        for (size_t size :
             {size_t(1), size_t(16), size_t(47), size_t(48), size_t(l.level1), size_t(l.tail - 1)})
            EXPECT_THROW(decode({o}, {{Bytes(good.begin(), good.begin() + ptrdiff_t(size))}}),
                         std::runtime_error);
    }
    EXPECT_EQ(0u, accepted_);
}

TEST_P(GpuHostile, Headers)
{
    const zip_coding_t coding{ZIP_DTYPE_BF16, ZIP_SHAPE_22228, 0};
    const Original o = original(coding, Data::NORMAL, 40001);
    const Bytes good = host_chunk(coding, o.bytes);
    std::vector<Bytes> chunks;
    auto with = [&](auto change) {
        Bytes bad = good;
        format::ChunkHeader h = header_of(bad);
        change(h);
        memcpy(bad.data(), &h, sizeof h);
        chunks.push_back(bad);
    };
    with([](auto &h) { h.magic = 0; });
    with([](auto &h) { h.version = 2; });
    for (uint8_t dtype : {0, 2, 3, 4, 5, 6, 7, 255})
        with([=](auto &h) { h.dtype = dtype; });
    for (uint8_t shape : {0, 2, 3, 4, 5, 6, 255})
        with([=](auto &h) { h.shape = shape; });
    for (uint8_t units : {0, 2, 4, 255})
        with([=](auto &h) { h.header_units = units; });
    for (int bit = 0; bit < 16; ++bit)
        with([=](auto &h) { h.flags = uint16_t(1 << bit); });
    const uint64_t top = uint64_t(1) << 63;
    for (uint64_t length : {uint64_t(0), uint64_t(40000), uint64_t(40002), uint64_t(1) << 50,
                            (uint64_t(1) << 50) + 1, top - 1, top, ~uint64_t(0)})
        with([=](auto &h) { h.original_length = length; });
    const uint64_t tail = header_of(good).tail_length;
    for (uint64_t length : {uint64_t(0), tail - 4, tail + 4, tail + 1, tail + 2, top, top - 4,
                            ~uint64_t(0), ~uint64_t(3), (uint64_t(1) << 50) * 4})
        with([=](auto &h) { h.tail_length = length; });
    judge(o, good, chunks);
    // a stored chunk with what only a coded one has
    const Original stored = original({ZIP_DTYPE_BYTES, ZIP_SHAPE_DEFAULT, 0}, Data::NORMAL, 20001);
    const Bytes good_stored = host_chunk(stored.coding, stored.bytes);
    chunks.clear();
    for (int field = 0; field < 4; ++field) {
        Bytes bad = good_stored;
        format::ChunkHeader h = header_of(bad);
        if (field == 0)
            h.shape = 1;
        else if (field == 1)
            h.tail_length = 4;
        else if (field == 2)
            h.flags = format::FLAG_SMALL_TILES;
        else
            h.original_length += 1;
        memcpy(bad.data(), &h, sizeof h);
        chunks.push_back(bad);
    }
    judge(stored, good_stored, chunks);
}

TEST_P(GpuHostile, TileHeaders)
{
    for (const zip_coding_t &coding : codings()) {
        const size_t tile =
                format::tile_values(format_coding(coding)) * zip_dtype_size(coding.dtype);
        const Original o = original(coding, Data::MIXED, 2 * tile + 64 * 8);
        const Bytes good = host_chunk(coding, o.bytes);
        const format::Layout l = format::layout_of(format_coding(coding), o.bytes.size());
        std::vector<Bytes> chunks;
        for (uint64_t t = 0; t < l.tiles; ++t) {
            uint64_t header;
            memcpy(&header, good.data() + l.tile_headers + 8 * t, 8);
            const uint64_t offset = format::tile_offset(header), words = format::tile_words(header),
                           mode = format::tile_mode(header);
            const uint64_t changed[] = {
                    offset | words << 48 | uint64_t(2) << 62,
                    offset | words << 48 | uint64_t(3) << 62,
                    offset | words << 48 | (mode ^ 1) << 62,
                    offset | (words + 1) << 48 | mode << 62,
                    offset | ((words - 1) & 0x3fff) << 48 | mode << 62,
                    offset | uint64_t(0x3fff) << 48 | mode << 62,
                    offset | mode << 62,
                    ((uint64_t(1) << 48) - 1) | words << 48 | mode << 62,
                    good.size() / 4 | words << 48 | mode << 62,
                    (offset + 1) | words << 48 | mode << 62,
                    ~uint64_t(0),
                    0,
            };
            for (uint64_t h : changed) {
                Bytes bad = good;
                memcpy(bad.data() + l.tile_headers + 8 * t, &h, 8);
                chunks.push_back(bad);
            }
        }
        judge(o, good, chunks);
        if (HasFatalFailure())
            return;
    }
    EXPECT_GT(refused_, 0u);
}

TEST_P(GpuHostile, CountsAndBases)
{
    for (const zip_coding_t &coding : codings()) {
        const size_t size = zip_dtype_size(coding.dtype);
        const format::Coding c = format_coding(coding);
        const size_t tile = format::tile_values(c) * size;
        const Original o = original(coding, Data::WIDE, tile + 700 * size);
        const Bytes good = host_chunk(coding, o.bytes);
        const format::Layout l = format::layout_of(c, o.bytes.size());
        const uint32_t counts = format::shape_traits(c.shape).counts;
        std::vector<Bytes> chunks;
        for (uint64_t i = 0; i < counts * l.groups; ++i) {
            uint16_t count;
            memcpy(&count, good.data() + l.counts + 2 * i, 2);
            for (int value : {0, count - 1, count + 1, 2048, 2049, 0xffff}) {
                Bytes bad = good;
                const auto v = uint16_t(value);
                memcpy(bad.data() + l.counts + 2 * i, &v, 2);
                if (i % 5 == 0 || !back_end_->slow())
                    chunks.push_back(bad);
            }
            // one more here and one less there: the length stays right
            if (i + counts < counts * l.groups && count > 0) {
                Bytes bad = good;
                uint16_t other;
                memcpy(&other, good.data() + l.counts + 2 * (i + counts), 2);
                --count;
                ++other;
                memcpy(bad.data() + l.counts + 2 * i, &count, 2);
                memcpy(bad.data() + l.counts + 2 * (i + counts), &other, 2);
                if (i % 5 == 1 || !back_end_->slow())
                    chunks.push_back(bad);
            }
        }
        if (coding.dtype == ZIP_DTYPE_FP64) {
            for (int base : {0, 1791, 1792, 1793, 0x7ff, 0xffff}) {
                Bytes bad = good;
                bad[l.symbols + format::BASE_LOW] = uint8_t(base);
                bad[l.symbols + format::BASE_HIGH] = uint8_t(base >> 8);
                chunks.push_back(bad);
            }
        }
        judge(o, good, chunks);
        if (HasFatalFailure())
            return;
    }
    EXPECT_GT(refused_, 0u);
}

TEST_P(GpuHostile, Garbage)
{
    // a right header, and anything behind it
    std::mt19937 random(5);
    for (const zip_coding_t &coding : codings()) {
        const Original o = original(coding, Data::NORMAL, 40000);
        const Bytes good = host_chunk(coding, o.bytes);
        const format::Layout l = format::layout_of(format_coding(coding), o.bytes.size());
        std::vector<Bytes> chunks;
        for (int n = 0; n < (back_end_->slow() ? 3 : 30); ++n) {
            Bytes bad = good;
            const size_t from = n % 3 == 0 ? l.level1 : n % 3 == 1 ? l.counts : l.tail;
            for (size_t i = from; i < bad.size(); ++i)
                bad[i] = n % 2 == 0 ? uint8_t(random()) : 0xff;
            if (n % 3 != 2) // places that are inside the tail
                memcpy(bad.data() + l.tile_headers, good.data() + l.tile_headers, 8 * l.tiles);
            chunks.push_back(bad);
        }
        judge(o, good, chunks);
        if (HasFatalFailure())
            return;
    }
}

TEST_P(GpuHostile, OneBadChunkOfAnItem)
{
    const Original o =
            original({ZIP_DTYPE_BF16, ZIP_SHAPE_22228, 0}, Data::NORMAL, 100000, 0, 20000);
    std::vector<Chunks> chunks = encode({o});
    chunks[0][2][0] ^= 1;
    const Decoded decoded = decode({o}, chunks)[0];
    for (size_t c = 0; c < 5; ++c)
        EXPECT_EQ(c == 2, decoded.status[c] != ZIP_OK);
    for (size_t i = 0; i < o.bytes.size(); ++i) {
        const bool good = i / 20000 != 2;
        ASSERT_TRUE(!good || o.bytes[i] == decoded.bytes[i]) << i;
    }
    round_trip({o});
}

// ---- types that the caller does not know

TEST_P(GpuCodec, FindsUnknownTypes)
{
    std::vector<Original> batch;
    std::vector<zip_dtype_t> types;
    for (zip_dtype_t dtype : {ZIP_DTYPE_BF16, ZIP_DTYPE_FP32, ZIP_DTYPE_FP16, ZIP_DTYPE_FP64,
                              ZIP_DTYPE_E4M3, ZIP_DTYPE_E5M2}) {
        Original o = original({dtype, ZIP_SHAPE_DEFAULT, 0}, Data::NORMAL, 100000, 0,
                              types.size() % 2 != 0 ? 32768 : 0);
        o.coding.dtype = ZIP_DTYPE_AUTO;
        batch.push_back(o);
        types.push_back(dtype);
    }
    batch.push_back(original({ZIP_DTYPE_BYTES, ZIP_SHAPE_DEFAULT, 0}, Data::RANDOM_BITS, 100000));
    batch.back().coding.dtype = ZIP_DTYPE_AUTO;
    types.push_back(ZIP_DTYPE_BYTES);
    std::vector<Chunks> chunks = encode(batch);
    for (size_t i = 0; i < batch.size(); ++i) {
        zip_probe_t expected{};
        ASSERT_EQ(ZIP_OK, zip_codec_probe(batch[i].bytes.data(), batch[i].bytes.size(), &expected));
        for (size_t c = 0; c < chunks[i].size(); ++c) {
            const format::ChunkHeader h = header_of(chunks[i][c]);
            EXPECT_EQ(expected.dtype, h.dtype) << "data of type " << types[i];
            const Bytes bytes = piece(batch[i], c);
            Bytes decoded(bytes.size());
            EXPECT_EQ(ZIP_OK, zip_codec_decode(chunks[i][c].data(), chunks[i][c].size(),
                                               decoded.data(), decoded.size()));
            EXPECT_TRUE(bytes == decoded);
        }
    }
}

TEST_P(GpuCodec, ProbesAsTheHostDoes)
{
    std::vector<std::unique_ptr<DeviceMemory>> data;
    std::vector<zip_gpu_item_t> items;
    std::vector<zip_probe_t> expected;
    for (zip_dtype_t dtype : {ZIP_DTYPE_BF16, ZIP_DTYPE_FP32, ZIP_DTYPE_FP16, ZIP_DTYPE_FP64,
                              ZIP_DTYPE_E4M3, ZIP_DTYPE_E5M2, ZIP_DTYPE_BYTES}) {
        for (Data kind : {Data::NORMAL, Data::UNIFORM, Data::RANDOM_BITS}) {
            for (size_t length : {0, 10, 5000, 200000}) {
                const Bytes bytes = make_data(kind, dtype, length);
                data.push_back(std::make_unique<DeviceMemory>(*back_end_, bytes));
                items.push_back({});
                items.back().data = data.back()->get();
                items.back().data_size = length;
                zip_probe_t p{};
                ASSERT_EQ(ZIP_OK, zip_codec_probe(bytes.data(), bytes.size(), &p));
                expected.push_back(p);
            }
        }
    }
    for (size_t first = 0; first < items.size(); first += 50) {
        const size_t count = std::min<size_t>(50, items.size() - first);
        DeviceMemory results(*back_end_, count * sizeof(zip_probe_t), 0, Memory::PINNED);
        ASSERT_EQ(ZIP_OK, api_->probe(queue_, items.data() + first, count,
                                      reinterpret_cast<zip_probe_t *>(results.get())));
        EXPECT_EQ("", back_end_->wait(api_->queue_stream(queue_)));
        const Bytes bytes = results.content();
        for (size_t i = 0; i < count; ++i) {
            zip_probe_t p;
            memcpy(&p, bytes.data() + i * sizeof p, sizeof p);
            EXPECT_EQ(expected[first + i].dtype, p.dtype) << first + i;
            EXPECT_EQ(expected[first + i].shape, p.shape) << first + i;
            // the samples are of different places
            EXPECT_NEAR(expected[first + i].ratio, p.ratio, 0.005) << first + i;
        }
    }
}

// ---- errors of the driver

TEST(GpuFailure, OfABatchWhatSaysThatItIsDoneIsDone)
{
    // fp16's launch comes after bf16's, and fails
    const Original originals[] = {
            original({ZIP_DTYPE_FP16, ZIP_SHAPE_22228, 0}, Data::NORMAL, 40000),
            original({ZIP_DTYPE_BF16, ZIP_SHAPE_22228, 0}, Data::NORMAL, 40000)};
    const zip_gpu_api_t &api = *zip::gpu::CpuDriver::api(32);
    zip_gpu_t *gpu = nullptr;
    ASSERT_EQ(ZIP_OK, api.open(nullptr, &gpu));
    auto &driver = *zip::gpu::CpuDriver::opened();
    uint64_t progress[2] = {};
    std::vector<Bytes> chunks;
    std::vector<zip_gpu_item_t> items;
    for (const Original &o : originals) {
        zip_plan_t plan{};
        ASSERT_EQ(ZIP_OK, zip_codec_plan(o.coding, o.bytes.size(), &plan));
        chunks.push_back(Bytes(plan.bound, 0xb7));
        items.push_back({o.coding, ZIP_GPU_STORE, const_cast<uint8_t *>(o.bytes.data()),
                         o.bytes.size(), chunks.back().data(), 0, 0, plan.bound,
                         &progress[items.size()]});
    }
    const Bytes untouched = chunks[0];
    for (const bool fails : {true, false}) {
        zip_gpu_queue_t *queue = nullptr;
        ASSERT_EQ(ZIP_OK, api.queue_create(gpu, &QUEUE, &queue));
        driver.fail_after = fails ? 2 : -1; // enter, launch
        EXPECT_EQ(fails ? ZIP_ERR_DEVICE : ZIP_OK, api.encode(queue, items.data(), 2, {0, 7}));
        api.queue_destroy(queue);
        EXPECT_EQ("", driver.error);
        for (size_t i = 0; i < 2; ++i) {
            if (fails && i == 0) {
                EXPECT_EQ(0u, progress[i]);
                EXPECT_TRUE(untouched == chunks[i]);
                continue;
            }
            EXPECT_EQ(7, ZIP_GPU_PROGRESS_SEQ(progress[i]));
            Bytes decoded(originals[i].bytes.size());
            EXPECT_EQ(ZIP_OK, zip_codec_decode(chunks[i].data(), chunks[i].size(), decoded.data(),
                                               decoded.size()));
            EXPECT_TRUE(originals[i].bytes == decoded);
        }
    }
    api.close(gpu);
}

} // namespace
