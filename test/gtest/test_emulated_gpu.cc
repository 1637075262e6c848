// SPDX-License-Identifier: BSD-3-Clause
// The emulated GPU: it makes a GPU's bytes and words, in a GPU's order of events, and finds what is
// wrong with memory.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "emulated_gpu.h"
#include "kernels/codec_gpu.h"
#include "kernels/cpu/internal.h"
#include "test_codec_util.h"

namespace {

using namespace zip::test;
namespace format = zip::format;

constexpr auto PATIENCE = std::chrono::seconds(30);
constexpr zip_coding_t BF16 = {ZIP_DTYPE_BF16, ZIP_SHAPE_22228, 0};

uint64_t up_to_16(uint64_t n)
{
    return (n + 15) / 16 * 16;
}

uint64_t load(const uint64_t *word)
{
    return std::atomic_ref<uint64_t>(*const_cast<uint64_t *>(word)).load(std::memory_order_acquire);
}

// The chunk in that coding, also where it gains nothing.
Bytes reference_chunk(zip_coding_t coding, const Bytes &original)
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

class EmulatedGpuTest : public testing::Test {
protected:
    // Memory of a device, or pinned memory, with that content.
    class Buffer {
    public:
        Buffer(const EmulatedGpuTest &test, const Bytes &content, bool pinned = false)
            : test_(test), pinned_(pinned), size_(content.size())
        {
            const size_t size = std::max<size_t>(content.size(), 1);
            if (pinned)
                EXPECT_EQ(ZIP_OK,
                          test.api_->memory_allocate(test.gpu_, ZIP_GPU_PINNED, size, &memory_))
                        << test.api_->error_text();
            else
                memory_ = test.emulated_.allocate(size, 0);
            EXPECT_NE(nullptr, memory_);
            test.emulated_.to_device(memory_, content.data(), content.size());
        }
        ~Buffer()
        {
            if (pinned_)
                test_.api_->memory_free(test_.gpu_, ZIP_GPU_PINNED, memory_);
            else
                test_.emulated_.free(memory_);
        }
        Buffer(const Buffer &) = delete;
        Buffer &operator=(const Buffer &) = delete;

        uint8_t *get() const { return static_cast<uint8_t *>(memory_); }
        uint64_t *words() const { return static_cast<uint64_t *>(memory_); }
        Bytes content() const { return content(0, size_); }
        // At most `size` bytes: those beside a chunk may be under way.
        Bytes content(size_t at, size_t size) const
        {
            Bytes bytes(std::min(size, size_ - at));
            test_.emulated_.to_host(bytes.data(), get() + at, bytes.size());
            return bytes;
        }

    private:
        const EmulatedGpuTest &test_;
        bool pinned_;
        void *memory_ = nullptr;
        size_t size_;
    };

    void SetUp() override
    {
        const std::string error = emulated_.open(ZIP_TEST_EMULATED);
        ASSERT_EQ("", error);
        set({});
        const char *why = nullptr;
        api_ = zip_gpu_load(ZIP_TEST_EMULATED, &why);
        ASSERT_NE(nullptr, api_) << why;
        gpu_ = open(0);
        ASSERT_NE(nullptr, gpu_);
        queue_ = make_queue();
    }
    void TearDown() override
    {
        if (queue_ != nullptr)
            api_->queue_destroy(queue_);
        if (gpu_ != nullptr)
            api_->close(gpu_);
        EXPECT_EQ(expected_faults_, emulated_.faults());
        set({});
    }

    // What the environment says from now on.
    void set(const std::map<std::string, std::string> &environment) const
    {
        for (const char *name : {"ZIP_EMULATED_DELAY_US", "ZIP_EMULATED_JITTER",
                                 "ZIP_EMULATED_FAIL", "ZIP_EMULATED_PROTECT"}) {
            const auto found = environment.find(name);
            if (found == environment.end())
                unsetenv(name);
            else
                setenv(name, found->second.c_str(), 1);
        }
        emulated_.reset();
    }
    zip_gpu_t *open(int device, int which = 0) const
    {
        const zip_gpu_memory_t where = {1, device, emulated_.context(device, which)};
        zip_gpu_t *gpu = nullptr;
        EXPECT_EQ(ZIP_OK, api_->open(&where, &gpu)) << api_->error_text();
        return gpu;
    }
    zip_gpu_queue_t *make_queue(zip_gpu_queue_params_t params = {nullptr, 100, 1000, 4}) const
    {
        zip_gpu_queue_t *queue = nullptr;
        EXPECT_EQ(ZIP_OK, api_->queue_create(gpu_, &params, &queue)) << api_->error_text();
        return queue;
    }
    void replace_queue(zip_gpu_queue_params_t params = {nullptr, 100, 1000, 4})
    {
        api_->queue_destroy(queue_);
        queue_ = make_queue(params);
    }

    // Waits for a word of that launch.
    uint64_t wait(const uint64_t *word, uint16_t seq) const
    {
        const auto end = std::chrono::steady_clock::now() + PATIENCE;
        while (ZIP_GPU_PROGRESS_SEQ(load(word)) != seq) {
            if (std::chrono::steady_clock::now() > end) {
                ADD_FAILURE() << "no word came";
                return 0;
            }
            std::this_thread::yield();
        }
        return load(word);
    }
    // Waits until the queue has nothing to do or has failed.
    zip_status_t wait(zip_gpu_queue_t *queue) const
    {
        const auto end = std::chrono::steady_clock::now() + PATIENCE;
        for (;;) {
            int idle = 0;
            const zip_status_t status = api_->queue_query(queue, &idle);
            if (status != ZIP_OK || idle != 0)
                return status;
            if (std::chrono::steady_clock::now() > end) {
                ADD_FAILURE() << "the queue is not done";
                return ZIP_ERR_DEVICE;
            }
            std::this_thread::yield();
        }
    }

    // An item of one chunk with room for any.
    static zip_gpu_item_t item(zip_coding_t coding, uint8_t *data, uint64_t size, uint8_t *chunks,
                               uint64_t *progress)
    {
        zip_plan_t plan{};
        EXPECT_EQ(ZIP_OK, zip_codec_plan(coding, size, &plan));
        return {coding, ZIP_GPU_STORE, data, size, chunks, 0, 0, plan.bound, progress};
    }
    zip_status_t encode(const zip_gpu_item_t &i, uint16_t seq = 1) const
    {
        return api_->encode(queue_, &i, 1, {0, seq});
    }
    zip_status_t decode(const zip_gpu_item_t &i, uint16_t seq = 1) const
    {
        return api_->decode(queue_, &i, 1, {0, seq});
    }
    bool error_has(const std::string &part) const
    {
        return std::string(api_->error_text()).find(part) != std::string::npos;
    }

    struct Original {
        zip_coding_t coding;
        Bytes bytes;
        uint64_t chunk_length = 0;
    };
    static std::vector<Bytes> pieces(const Original &o)
    {
        std::vector<Bytes> all;
        const size_t length = o.chunk_length != 0 ? o.chunk_length : o.bytes.size();
        for (size_t at = 0; at < o.bytes.size() || all.empty(); at += length)
            all.emplace_back(o.bytes.begin() + ptrdiff_t(at),
                             o.bytes.begin() + ptrdiff_t(std::min(o.bytes.size(), at + length)));
        return all;
    }
    // Encodes in one launch, compares every byte and word with what they must be, and decodes in
    // another to the same bytes.
    void round_trip(const std::vector<Original> &originals, uint64_t extra_stride = 0)
    {
        struct Memory {
            std::unique_ptr<Buffer> data, chunks, progress;
        };
        std::vector<Memory> memory;
        std::vector<zip_gpu_item_t> items;
        for (const Original &o : originals) {
            const std::vector<Bytes> of_item = pieces(o);
            zip_plan_t full{}, last{};
            ASSERT_EQ(ZIP_OK, zip_codec_plan(o.coding, of_item.front().size(), &full));
            ASSERT_EQ(ZIP_OK, zip_codec_plan(o.coding, of_item.back().size(), &last));
            const uint64_t stride = up_to_16(full.bound) + extra_stride;
            Memory m;
            m.data = std::make_unique<Buffer>(*this, o.bytes);
            m.chunks = std::make_unique<Buffer>(
                    *this, Bytes((of_item.size() - 1) * stride + last.bound, 0xa7));
            m.progress = std::make_unique<Buffer>(*this, Bytes(8 * of_item.size()), true);
            items.push_back({o.coding, ZIP_GPU_STORE, m.data->get(), o.bytes.size(),
                             m.chunks->get(), o.chunk_length, stride, last.bound,
                             m.progress->words()});
            memory.push_back(std::move(m));
        }
        ASSERT_EQ(ZIP_OK, api_->encode(queue_, items.data(), items.size(), {0, 7}))
                << api_->error_text();
        for (size_t i = 0; i < items.size(); ++i) {
            const std::vector<Bytes> of_item = pieces(originals[i]);
            for (size_t c = 0; c < of_item.size(); ++c) {
                SCOPED_TRACE(std::to_string(of_item[c].size()) + " bytes of item " +
                             std::to_string(i) + ", chunk " + std::to_string(c));
                const uint64_t word = wait(items[i].progress + c, 7);
                const uint64_t stride = items[i].chunk_stride;
                const Bytes chunk = memory[i].chunks->content(c * stride, stride);
                check(originals[i].coding, of_item[c], chunk, word);
                if (HasFatalFailure())
                    return;
            }
        }
        for (size_t i = 0; i < items.size(); ++i) {
            const Bytes nothing(originals[i].bytes.size(), 0xcd);
            emulated_.to_device(items[i].data, nothing.data(), nothing.size());
        }
        ASSERT_EQ(ZIP_OK, wait(queue_)) << api_->error_text();
        ASSERT_EQ(ZIP_OK, api_->decode(queue_, items.data(), items.size(), {0, 8}))
                << api_->error_text();
        for (size_t i = 0; i < items.size(); ++i) {
            for (size_t c = 0; c < pieces(originals[i]).size(); ++c)
                EXPECT_EQ(uint64_t(8) << 48, wait(items[i].progress + c, 8));
            EXPECT_TRUE(originals[i].bytes == memory[i].data->content()) << "item " << i;
        }
        ASSERT_EQ(ZIP_OK, wait(queue_));
    }
    // `chunk` is as long as its room.
    static void check(zip_coding_t coding, const Bytes &original, Bytes chunk, uint64_t word)
    {
        zip_plan_t plan{};
        zip_chunk_info_t info{};
        ASSERT_EQ(ZIP_OK, zip_codec_plan(coding, original.size(), &plan));
        ASSERT_EQ(ZIP_OK, zip_codec_inspect(chunk.data(), chunk.size(), &info));
        ASSERT_EQ(coding.dtype, info.coding.dtype);
        EXPECT_EQ(info.coding.dtype, ZIP_GPU_PROGRESS_DTYPE(word));
        EXPECT_EQ(info.coding.shape, ZIP_GPU_PROGRESS_SHAPE(word));
        EXPECT_EQ(info.coding.small_tiles != 0, (word >> 39 & 1) != 0);
        EXPECT_EQ(0u, word >> 40 & 255);
        EXPECT_EQ(plan.fixed + ZIP_GPU_PROGRESS_TAIL(word), info.encoded_length);
        EXPECT_LE(info.encoded_length, plan.bound);
        Bytes decoded(original.size());
        EXPECT_EQ(ZIP_OK,
                  zip_codec_decode(chunk.data(), chunk.size(), decoded.data(), decoded.size()));
        EXPECT_TRUE(original == decoded);
        chunk.resize(info.encoded_length);
        EXPECT_TRUE(reference_chunk(coding, original) == chunk);
    }

    EmulatedGpu emulated_{};
    const zip_gpu_api_t *api_ = nullptr;
    zip_gpu_t *gpu_ = nullptr;
    zip_gpu_queue_t *queue_ = nullptr;
    uint64_t expected_faults_ = 0;
};
using EmulatedGpuCodec = EmulatedGpuTest;
using EmulatedGpuMemory = EmulatedGpuTest;
using EmulatedGpuQueue = EmulatedGpuTest;
using EmulatedGpuFailure = EmulatedGpuTest;

// ---- bytes and words

TEST_F(EmulatedGpuCodec, CodesEveryTypeAndShapeAlsoWhereThatGainsNothing)
{
    for (const zip_coding_t &coding : all_codings()) {
        SCOPED_TRACE(name_of(coding));
        const size_t size = zip_dtype_size(coding.dtype);
        const size_t tile = format::tile_values(format_coding(coding)) * size;
        std::vector<Original> batch;
        for (size_t length : {size_t(0), size_t(1), size, 3 * size + size / 2, 1000 * size, tile,
                              tile + 100 * size + 1})
            batch.push_back({coding, make_data(Data::NORMAL, coding.dtype, length)});
        batch.push_back({coding, make_data(Data::RANDOM_BITS, coding.dtype, tile + 16 * size)});
        batch.push_back({coding, make_data(Data::MIXED, coding.dtype, 2 * tile)});
        round_trip(batch);
        if (HasFatalFailure())
            return;
    }
}

TEST_F(EmulatedGpuCodec, StoresBytes)
{
    std::vector<Original> batch;
    for (size_t length : {0, 1, 15, 16, 17, 1000, 50001})
        batch.push_back({{ZIP_DTYPE_BYTES, ZIP_SHAPE_DEFAULT, 0},
                         make_data(Data::NORMAL, ZIP_DTYPE_BF16, length)});
    round_trip(batch);
}

TEST_F(EmulatedGpuCodec, TheDefaultShapeIs22228)
{
    const Bytes original = make_data(Data::NORMAL, ZIP_DTYPE_FP32, 40000);
    zip_coding_t coding = {ZIP_DTYPE_FP32, ZIP_SHAPE_DEFAULT, 0};
    zip_plan_t plan{};
    ASSERT_EQ(ZIP_OK, zip_codec_plan(coding, original.size(), &plan));
    const Buffer data(*this, original), chunk(*this, Bytes(plan.bound)),
            progress(*this, Bytes(8), true);
    ASSERT_EQ(ZIP_OK,
              encode(item(coding, data.get(), original.size(), chunk.get(), progress.words())));
    const uint64_t word = wait(progress.words(), 1);
    coding.shape = ZIP_SHAPE_22228;
    check(coding, original, chunk.content(), word);
}

TEST_F(EmulatedGpuCodec, SeveralChunksAnItem)
{
    for (const char *jitter : {"0", "50"}) {
        set({{"ZIP_EMULATED_JITTER", jitter}});
        std::vector<Original> batch;
        for (zip_dtype_t dtype :
             {ZIP_DTYPE_BF16, ZIP_DTYPE_FP64, ZIP_DTYPE_BYTES, ZIP_DTYPE_E4M3}) {
            const zip_shape_t shape =
                    dtype == ZIP_DTYPE_BYTES ? ZIP_SHAPE_DEFAULT : ZIP_SHAPE_22228;
            batch.push_back({{dtype, shape, 0}, make_data(Data::NORMAL, dtype, 100003), 32768});
            batch.push_back({{dtype, shape, 0}, make_data(Data::NORMAL, dtype, 65536), 16384});
            batch.push_back({{dtype, shape, 0}, make_data(Data::MIXED, dtype, 50000), 4096 + 16});
            batch.push_back({{dtype, shape, 0}, make_data(Data::NORMAL, dtype, 1000), 16});
            batch.push_back({{dtype, shape, 0}, make_data(Data::NORMAL, dtype, 1000), 4096});
        }
        round_trip(batch);
        round_trip(batch, 112);
    }
}

TEST_F(EmulatedGpuCodec, FindsUnknownTypes)
{
    std::vector<zip_dtype_t> types;
    for (int dtype = ZIP_DTYPE_BYTES; dtype < ZIP_DTYPE_LAST; ++dtype)
        types.push_back(zip_dtype_t(dtype));
    for (zip_shape_t shape : {ZIP_SHAPE_DEFAULT, ZIP_SHAPE_38}) {
        for (zip_dtype_t dtype : types) {
            SCOPED_TRACE(zip_dtype_name(dtype));
            const Bytes original = make_data(
                    dtype == ZIP_DTYPE_BYTES ? Data::RANDOM_BITS : Data::NORMAL, dtype, 100000);
            zip_probe_t expected{};
            ASSERT_EQ(ZIP_OK, zip_codec_probe(original.data(), original.size(), &expected));
            EXPECT_EQ(dtype, expected.dtype);
            const zip_coding_t unknown = {ZIP_DTYPE_AUTO, shape, 0};
            const uint64_t length = 32768;
            zip_plan_t plan{};
            ASSERT_EQ(ZIP_OK, zip_codec_plan(unknown, length, &plan));
            const uint64_t stride = up_to_16(plan.bound);
            const Buffer data(*this, original), chunks(*this, Bytes(4 * stride)),
                    progress(*this, Bytes(4 * 8), true);
            ASSERT_EQ(ZIP_OK, encode({unknown, ZIP_GPU_STORE, data.get(), original.size(),
                                      chunks.get(), length, stride, 0, progress.words()}))
                    << api_->error_text();
            zip_coding_t coding = {dtype, shape != ZIP_SHAPE_DEFAULT ? shape : expected.shape, 0};
            if (dtype == ZIP_DTYPE_BYTES)
                coding.shape = ZIP_SHAPE_DEFAULT;
            const std::vector<Bytes> all = pieces({coding, original, length});
            for (size_t c = 0; c < all.size(); ++c) {
                const uint64_t word = wait(progress.words() + c, 1);
                check(coding, all[c], chunks.content(c * stride, stride), word);
            }
        }
    }
}

TEST_F(EmulatedGpuCodec, ProbesAsTheHostDoes)
{
    std::vector<std::unique_ptr<Buffer>> data;
    std::vector<zip_gpu_item_t> items;
    std::vector<zip_probe_t> expected;
    for (zip_dtype_t dtype : {ZIP_DTYPE_BF16, ZIP_DTYPE_FP64, ZIP_DTYPE_BYTES}) {
        for (size_t length : {0, 10, 5000, 200000}) {
            const Bytes bytes = make_data(Data::NORMAL, dtype, length);
            data.push_back(std::make_unique<Buffer>(*this, bytes));
            items.push_back({});
            items.back().data = data.back()->get();
            items.back().data_size = length;
            expected.push_back({});
            ASSERT_EQ(ZIP_OK, zip_codec_probe(bytes.data(), length, &expected.back()));
        }
    }
    const Buffer results(*this, Bytes(items.size() * sizeof(zip_probe_t)), true);
    auto *const found = reinterpret_cast<zip_probe_t *>(results.get());
    ASSERT_EQ(ZIP_OK, api_->probe(queue_, items.data(), items.size(), found));
    ASSERT_EQ(ZIP_OK, wait(queue_));
    for (size_t i = 0; i < items.size(); ++i) {
        EXPECT_EQ(expected[i].dtype, found[i].dtype) << i;
        EXPECT_EQ(expected[i].shape, found[i].shape) << i;
        EXPECT_EQ(expected[i].ratio, found[i].ratio) << i;
    }
}

TEST_F(EmulatedGpuCodec, MakesTheConformanceVectors)
{
    size_t same = 0, files = 0;
    for (const auto &entry : std::filesystem::directory_iterator(ZIP_TEST_VECTORS)) {
        if (entry.path().extension() != ".chunk")
            continue;
        SCOPED_TRACE(entry.path());
        std::ifstream in(entry.path(), std::ios::binary);
        const Bytes chunk{std::istreambuf_iterator<char>(in), {}};
        zip_chunk_info_t info{};
        ASSERT_EQ(ZIP_OK, zip_codec_inspect(chunk.data(), chunk.size(), &info));
        Bytes original(info.original_length);
        ASSERT_EQ(ZIP_OK,
                  zip_codec_decode(chunk.data(), chunk.size(), original.data(), original.size()));
        // what is canonical the encoder makes again
        if (reference_chunk(info.coding, original) == chunk) {
            round_trip({{info.coding, original}});
            ++same;
        }
        ++files;
    }
    EXPECT_LT(files / 2, same);
}

TEST_F(EmulatedGpuCodec, RefusesWhatIsNotCodedAsItWasTold)
{
    const Bytes original = make_data(Data::NORMAL, ZIP_DTYPE_BF16, 40001);
    const Bytes good = reference_chunk(BF16, original);
    const Buffer data(*this, Bytes(original.size())), progress(*this, Bytes(8), true);
    uint16_t seq = 0;
    const auto status_of = [&](zip_coding_t coding, const Bytes &chunk) {
        const Buffer chunks(*this, chunk);
        const zip_gpu_item_t i = {
                coding, ZIP_GPU_STORE, data.get(),      original.size(), chunks.get(), 0,
                0,      chunk.size(),  progress.words()};
        EXPECT_EQ(ZIP_OK, decode(i, ++seq)) << api_->error_text();
        const uint64_t word = wait(progress.words(), seq);
        EXPECT_EQ(0u, ZIP_GPU_PROGRESS_TAIL(word));
        EXPECT_EQ(ZIP_OK, wait(queue_));
        return ZIP_GPU_PROGRESS_STATUS(word);
    };
    const auto with = [&](size_t byte, uint8_t value) {
        Bytes chunk = good;
        chunk[byte] = value;
        return chunk;
    };
    EXPECT_EQ(ZIP_OK, status_of(BF16, good));
    EXPECT_TRUE(original == data.content());
    EXPECT_EQ(ZIP_ERR_CORRUPT,
              status_of(BF16, reference_chunk({ZIP_DTYPE_FP16, ZIP_SHAPE_22228, 0}, original)));
    EXPECT_EQ(ZIP_ERR_CORRUPT, status_of({ZIP_DTYPE_BF16, ZIP_SHAPE_11238, 0}, good));
    Bytes longer = good; // small tiles need more room
    longer.resize(longer.size() + 4096);
    EXPECT_EQ(ZIP_ERR_CORRUPT, status_of({ZIP_DTYPE_BF16, ZIP_SHAPE_22228, 1}, longer));
    const Bytes stored = reference_chunk({ZIP_DTYPE_BYTES, ZIP_SHAPE_DEFAULT, 0}, original);
    EXPECT_EQ(ZIP_ERR_CORRUPT, status_of(BF16, stored));
    EXPECT_EQ(ZIP_OK, status_of({ZIP_DTYPE_BYTES, ZIP_SHAPE_DEFAULT, 0}, stored));
    EXPECT_EQ(ZIP_ERR_CORRUPT, status_of(BF16, with(0, 0)));                          // magic
    EXPECT_EQ(ZIP_ERR_UNSUPPORTED, status_of(BF16, with(2, 2)));                      // version
    EXPECT_EQ(ZIP_ERR_CORRUPT, status_of(BF16, with(8, 0x40)));                       // length
    EXPECT_EQ(ZIP_ERR_CORRUPT, status_of(BF16, with(7, 0x80)));                       // flags
    EXPECT_EQ(ZIP_ERR_CORRUPT, status_of(BF16, with(19, 0xff)));                      // tail
    EXPECT_EQ(ZIP_ERR_CORRUPT, status_of(BF16, Bytes(good.begin(), good.end() - 4))); // cut short
}

// ---- queues

// Encoding of one buffer in chunks that each take a while.
constexpr uint64_t SLOW_LENGTH = 1024, SLOW_STRIDE = 4096;
constexpr size_t SLOW_CHUNKS = 20;

TEST_F(EmulatedGpuQueue, WorksWhileTheCallerDoesSomethingElse)
{
    set({{"ZIP_EMULATED_DELAY_US", "50000"}});
    const Buffer data(*this, make_data(Data::NORMAL, ZIP_DTYPE_BF16, SLOW_CHUNKS * SLOW_LENGTH)),
            chunks(*this, Bytes(SLOW_CHUNKS * SLOW_STRIDE)),
            progress(*this, Bytes(8 * SLOW_CHUNKS), true);
    const zip_gpu_item_t i = {
            BF16,        ZIP_GPU_STORE, data.get(), SLOW_CHUNKS * SLOW_LENGTH, chunks.get(),
            SLOW_LENGTH, SLOW_STRIDE,   0,          progress.words()};
    ASSERT_EQ(ZIP_OK, encode(i)) << api_->error_text();
    int idle = 1;
    EXPECT_EQ(ZIP_OK, api_->queue_query(queue_, &idle));
    EXPECT_EQ(0, idle);
    EXPECT_EQ(0u, load(progress.words() + SLOW_CHUNKS - 1));
    wait(progress.words(), 1); // the first chunk is done long before the last
    EXPECT_EQ(0u, load(progress.words() + SLOW_CHUNKS - 1));
    wait(progress.words() + SLOW_CHUNKS - 1, 1);
    EXPECT_EQ(ZIP_OK, wait(queue_));
}

TEST_F(EmulatedGpuQueue, ChunksOfALaunchMayBeDoneInAnyOrder)
{
    set({{"ZIP_EMULATED_DELAY_US", "10000"}, {"ZIP_EMULATED_JITTER", "2000"}});
    const Buffer data(*this, make_data(Data::NORMAL, ZIP_DTYPE_BF16, SLOW_CHUNKS * SLOW_LENGTH)),
            chunks(*this, Bytes(SLOW_CHUNKS * SLOW_STRIDE)),
            progress(*this, Bytes(8 * SLOW_CHUNKS), true);
    const zip_gpu_item_t i = {
            BF16,        ZIP_GPU_STORE, data.get(), SLOW_CHUNKS * SLOW_LENGTH, chunks.get(),
            SLOW_LENGTH, SLOW_STRIDE,   0,          progress.words()};
    ASSERT_EQ(ZIP_OK, encode(i)) << api_->error_text();
    bool other_order = false;
    for (size_t done = 0; done < SLOW_CHUNKS;) {
        done = 0;
        for (size_t c = 0; c < SLOW_CHUNKS; ++c)
            done += load(progress.words() + c) != 0;
        for (size_t c = 0; c + 1 < SLOW_CHUNKS; ++c) {
            // the later one is looked at first: it was done first, whatever happens in between
            const bool later = load(progress.words() + c + 1) != 0;
            const bool earlier = load(progress.words() + c) != 0;
            other_order |= later && !earlier;
        }
    }
    EXPECT_TRUE(other_order);
}

TEST_F(EmulatedGpuQueue, DoesLaunchesInTheirOrder)
{
    // each one reads what the one before wrote
    set({{"ZIP_EMULATED_JITTER", "3000"}});
    const Bytes original = make_data(Data::NORMAL, ZIP_DTYPE_FP16, 50001);
    const zip_coding_t coding = {ZIP_DTYPE_FP16, ZIP_SHAPE_DENSE, 0};
    zip_plan_t plan{};
    ASSERT_EQ(ZIP_OK, zip_codec_plan(coding, original.size(), &plan));
    const Buffer first(*this, Bytes(original.size())), second(*this, Bytes(original.size())),
            a(*this, Bytes(plan.bound)), b(*this, Bytes(plan.bound)), source(*this, original, true),
            result(*this, Bytes(original.size()), true), progress(*this, Bytes(8 * 5), true);
    const auto size = original.size();
    ASSERT_EQ(ZIP_OK, api_->copy(queue_, first.get(), source.get(), size, progress.words(), 9));
    ASSERT_EQ(ZIP_OK, encode(item(coding, first.get(), size, a.get(), progress.words() + 1), 9));
    ASSERT_EQ(ZIP_OK, api_->copy(queue_, b.get(), a.get(), plan.bound, progress.words() + 2, 9));
    ASSERT_EQ(ZIP_OK, decode(item(coding, second.get(), size, b.get(), progress.words() + 3), 9));
    ASSERT_EQ(ZIP_OK,
              api_->copy(queue_, result.get(), second.get(), size, progress.words() + 4, 9));
    EXPECT_EQ(uint64_t(9) << 48, wait(progress.words() + 4, 9));
    EXPECT_TRUE(original == result.content());
    for (size_t w : {0, 2, 3})
        EXPECT_EQ(uint64_t(9) << 48, load(progress.words() + w));
    EXPECT_EQ(ZIP_OK, wait(queue_));
}

TEST_F(EmulatedGpuQueue, TwoQueuesDoNotWaitForEachOther)
{
    zip_gpu_queue_t *const other = make_queue();
    const Buffer from(*this, Bytes(64, 3)), to(*this, Bytes(128)), progress(*this, Bytes(16), true);
    set({{"ZIP_EMULATED_DELAY_US", "1000000"}});
    ASSERT_EQ(ZIP_OK, api_->copy(queue_, to.get(), from.get(), 64, progress.words(), 1));
    set({});
    ASSERT_EQ(ZIP_OK, api_->copy(other, to.get() + 64, from.get(), 64, progress.words() + 1, 1));
    wait(progress.words() + 1, 1);
    EXPECT_EQ(0u, load(progress.words()));
    wait(progress.words(), 1);
    EXPECT_EQ(ZIP_OK, wait(queue_));
    api_->queue_destroy(other);
}

TEST_F(EmulatedGpuQueue, TwoQueuesOnOneStreamDo)
{
    zip_gpu_queue_t *const other = make_queue({api_->queue_stream(queue_), 10, 10, 1});
    EXPECT_EQ(api_->queue_stream(queue_), api_->queue_stream(other));
    const Buffer from(*this, Bytes(64, 3)), to(*this, Bytes(64)), progress(*this, Bytes(16), true);
    set({{"ZIP_EMULATED_DELAY_US", "100000"}});
    ASSERT_EQ(ZIP_OK, api_->copy(queue_, to.get(), from.get(), 64, progress.words(), 1));
    set({});
    ASSERT_EQ(ZIP_OK, api_->copy(other, to.get(), from.get(), 64, progress.words() + 1, 1));
    wait(progress.words() + 1, 1);
    EXPECT_NE(0u, load(progress.words()));
    replace_queue(); // and the stream lives on
    ASSERT_EQ(ZIP_OK, api_->copy(other, to.get(), from.get(), 64, progress.words() + 1, 2));
    wait(progress.words() + 1, 2);
    api_->queue_destroy(other);
    zip_gpu_queue_t *queue = nullptr;
    int no_stream;
    const zip_gpu_queue_params_t params = {&no_stream, 10, 10, 1};
    EXPECT_EQ(ZIP_ERR_DEVICE, api_->queue_create(gpu_, &params, &queue));
}

TEST_F(EmulatedGpuQueue, ProgressIsOptional)
{
    const Bytes original = make_data(Data::NORMAL, ZIP_DTYPE_BF16, 5000);
    const Buffer data(*this, original), chunk(*this, Bytes(16384)), out(*this, Bytes(5000));
    ASSERT_EQ(ZIP_OK, encode(item(BF16, data.get(), 5000, chunk.get(), nullptr)));
    ASSERT_EQ(ZIP_OK, decode(item(BF16, out.get(), 5000, chunk.get(), nullptr)));
    ASSERT_EQ(ZIP_OK, api_->copy(queue_, data.get(), out.get(), 5000, nullptr, 0));
    EXPECT_EQ(ZIP_OK, wait(queue_));
    EXPECT_TRUE(original == out.content());
}

TEST_F(EmulatedGpuQueue, AnEndedQueueHasDoneItsWork)
{
    set({{"ZIP_EMULATED_DELAY_US", "1000"}});
    const Buffer from(*this, Bytes(64, 3)), to(*this, Bytes(64)), progress(*this, Bytes(8), true);
    for (uint16_t seq = 1; seq <= 10; ++seq)
        ASSERT_EQ(ZIP_OK, api_->copy(queue_, to.get(), from.get(), 64, progress.words(), seq));
    replace_queue();
    EXPECT_EQ(10, ZIP_GPU_PROGRESS_SEQ(load(progress.words())));
}

TEST_F(EmulatedGpuQueue, RefusesWrongItemsByName)
{
    const Buffer data(*this, Bytes(4096)), chunk(*this, Bytes(16384)),
            progress(*this, Bytes(8), true);
    const zip_gpu_item_t good = item(BF16, data.get(), 4096, chunk.get(), progress.words());
    const auto with = [&](auto change) {
        zip_gpu_item_t i = good;
        change(i);
        return i;
    };
    const auto refuses = [&](bool encodes, bool decodes, const zip_gpu_item_t &i,
                             const std::string &what) {
        const zip_gpu_item_t items[] = {good, i};
        for (const bool is_encode : {true, false}) {
            if (!(is_encode ? encodes : decodes))
                continue;
            EXPECT_EQ(ZIP_ERR_INVALID_PARAM,
                      (is_encode ? api_->encode : api_->decode)(queue_, items, 2, {0, 7}));
            EXPECT_TRUE(error_has("item 1: " + what)) << api_->error_text();
        }
    };
    const auto both = [&](auto change, const std::string &what) {
        refuses(true, true, with(change), what);
    };
    const int no_type = ZIP_DTYPE_LAST, no_shape = ZIP_SHAPE_LAST, no_op = 2;
    both([&](auto &i) { memcpy(&i.coding.dtype, &no_type, sizeof no_type); }, "7 is no type");
    both([&](auto &i) { memcpy(&i.coding.shape, &no_shape, sizeof no_shape); }, "6 is no shape");
    both(
            [](auto &i) {
                i.coding = {ZIP_DTYPE_BF16, ZIP_SHAPE_DENSE, 1};
            },
            "shape dense has no small tiles");
    both(
            [](auto &i) {
                i.coding = {ZIP_DTYPE_FP64, ZIP_SHAPE_COLUMNS, 0};
            },
            "shape columns is not for fp64");
    both([](auto &i) { i.data = nullptr; }, "data is null");
    both([](auto &i) { i.chunks = nullptr; }, "chunks is null");
    both([&](auto &i) { i.chunks = chunk.get() + 8; }, "chunks is not aligned");
    both([&](auto &i) { i.progress = reinterpret_cast<uint64_t *>(chunk.get() + 4); },
         "progress is not aligned");
    both([](auto &i) { i.chunk_length = 1000; }, "chunk_length is no multiple");
    both([](auto &i) { i.chunk_length = 1024, i.chunk_stride = 3080; },
         "chunk_stride is no multiple");
    both([](auto &i) { i.data_size = ZIP_GPU_MAX_CHUNK + 1; }, "a chunk has more than");
    both([](auto &i) { i.chunk_length = 16, i.data_size = uint64_t(1) << 40; },
         "more than 2^31 - 1 chunks");
    both([](auto &i) { i.chunk_length = 1024, i.chunk_stride = 16; },
         "chunk_stride is 16 bytes, but a chunk needs ");
    both([](auto &i) { i.last_room = 100; }, "last_room is 100 bytes, but a chunk needs ");
    both([](auto &i) { i.last_room = 0; }, "chunk_stride is 0 bytes, but a chunk needs ");
    const auto only_decode = [&](auto change, const std::string &what) {
        refuses(false, true, with(change), what);
    };
    only_decode([](auto &i) { i.coding.dtype = ZIP_DTYPE_AUTO; }, "type AUTO is for encodes");
    only_decode([](auto &i) { i.op = ZIP_GPU_ADD; }, "the emulated GPU cannot add");
    only_decode([&](auto &i) { memcpy(&i.op, &no_op, sizeof no_op); }, "2 is no operation");

    // what a chunk needs is what it can become, not a byte more
    for (const zip_coding_t &coding : all_codings()) {
        const format::Layout l = format::layout_of(format_coding(coding), 4096);
        zip_gpu_item_t i = good;
        i.coding = coding;
        i.last_room = l.tail + format::max_tail(format_coding(coding), l.values) - 1;
        EXPECT_EQ(ZIP_ERR_INVALID_PARAM, encode(i));
        ++i.last_room;
        EXPECT_EQ(ZIP_OK, encode(i)) << api_->error_text();
        i.last_room = l.tail - 1;
        EXPECT_EQ(ZIP_ERR_INVALID_PARAM, decode(i));
    }
    EXPECT_EQ(ZIP_OK, wait(queue_));
}

TEST_F(EmulatedGpuQueue, RefusesWrongArguments)
{
    const Buffer memory(*this, Bytes(16384)), progress(*this, Bytes(16), true);
    zip_gpu_item_t i = item(BF16, memory.get(), 64, memory.get() + 4096, progress.words());
    auto *const results = reinterpret_cast<zip_probe_t *>(memory.get());
    const auto refused = [&](zip_status_t status, const std::string &what) {
        EXPECT_EQ(ZIP_ERR_INVALID_PARAM, status);
        EXPECT_TRUE(error_has(what)) << api_->error_text();
    };
    refused(api_->encode(nullptr, &i, 1, {0, 1}), "queue is null");
    refused(api_->encode(queue_, nullptr, 1, {0, 1}), "items is null");
    refused(api_->encode(queue_, &i, 1, {0, 0}), "seq is 0");
    refused(api_->decode(queue_, &i, 1, {0, 0}), "seq is 0");
    refused(api_->probe(queue_, &i, 1, nullptr), "results is null");
    refused(api_->copy(queue_, nullptr, memory.get(), 1, nullptr, 0), "to or from is null");
    refused(api_->copy(queue_, memory.get(), nullptr, 1, nullptr, 0), "to or from is null");
    refused(api_->copy(queue_, memory.get(), memory.get(), 1, progress.words(), 0), "seq is 0");
    refused(api_->copy(queue_, memory.get(), memory.get(), 1,
                       reinterpret_cast<uint64_t *>(progress.get() + 4), 1),
            "progress is not aligned");
    refused(api_->queue_query(queue_, nullptr), "idle_p is null");
    zip_gpu_queue_params_t params = {nullptr, 0, 1, 1};
    zip_gpu_queue_t *queue = nullptr;
    refused(api_->queue_create(gpu_, &params, &queue), "max_items or max_chunks is 0");
    refused(api_->queue_create(nullptr, &params, &queue), "gpu, params or queue_p is null");
    void *allocated = nullptr;
    refused(api_->memory_allocate(gpu_, ZIP_GPU_DEVICE, 0, &allocated), "size is 0");
    refused(api_->memory_pin(gpu_, memory.get() + 16, 4096), "no multiples of the page size");
    refused(api_->memory_query(memory.get(), nullptr), "memory_p is null");
    EXPECT_EQ(ZIP_OK, api_->encode(queue_, nullptr, 0, {0, 1}));
    EXPECT_EQ(ZIP_OK, api_->probe(queue_, nullptr, 0, results));
    EXPECT_EQ(0u, emulated_.launches());
}

TEST_F(EmulatedGpuQueue, HasNoMoreRoomThanItWasMadeFor)
{
    replace_queue({nullptr, 8, 12, 1});
    const Buffer memory(*this, Bytes(10 * 4096)), progress(*this, Bytes(8 * 20), true);
    std::vector<zip_gpu_item_t> items;
    for (size_t i = 0; i < 9; ++i)
        items.push_back(
                item(BF16, memory.get(), 64, memory.get() + 4096 * (i + 1), progress.words() + i));
    const auto full = [&](size_t count, const std::string &what) {
        EXPECT_EQ(ZIP_ERR_NO_SPACE, api_->encode(queue_, items.data(), count, {0, 1}));
        EXPECT_TRUE(error_has(what)) << api_->error_text();
    };
    full(9, "9 items in a batch, but the queue was made for 8");
    zip_gpu_item_t many = {BF16, ZIP_GPU_STORE,   memory.get(), 13 * 16, memory.get(), 16, 1024,
                           0,    progress.words()};
    std::swap(items[0], many);
    full(1, "item 0: the batch has more chunks than the 12");
    std::swap(items[0], many);
    // one long batch is under way, and that is all there are slots for
    set({{"ZIP_EMULATED_DELAY_US", "60000"}});
    ASSERT_EQ(ZIP_OK, api_->encode(queue_, items.data(), 8, {0, 1})) << api_->error_text();
    full(7, "all 1 slots are in use");
    ASSERT_EQ(ZIP_OK, api_->encode(queue_, items.data(), 6, {0, 2})) << api_->error_text();
    wait(progress.words() + 7, 1);
    // whoever has read the last word has a slot
    EXPECT_EQ(ZIP_OK, api_->encode(queue_, items.data(), 7, {0, 3})) << api_->error_text();
    EXPECT_EQ(ZIP_OK, wait(queue_));
    replace_queue({nullptr, 8, 12, 0});
    full(7, "no slots");
    replace_queue({nullptr, 100, 100, 1});
    const std::vector<zip_gpu_item_t> unknown(65, item({ZIP_DTYPE_AUTO, ZIP_SHAPE_DEFAULT, 0},
                                                       memory.get(), 64, memory.get() + 4096,
                                                       progress.words()));
    items = unknown;
    full(65, "item 64: more than 64 items of unknown type");
    EXPECT_EQ(ZIP_OK, wait(queue_));
}

// ---- memory

TEST_F(EmulatedGpuMemory, TellsWhatAnAddressIs)
{
    for (int device = 0; device < ZIP_EMULATED_DEVICES; ++device) {
        for (int which = 0; which < (device == 0 ? 2 : 1); ++which) {
            void *const context = emulated_.context(device, which);
            ASSERT_NE(nullptr, context);
            auto *const memory = static_cast<uint8_t *>(emulated_.allocate_in(5000, context));
            ASSERT_NE(nullptr, memory);
            EXPECT_EQ(0u, reinterpret_cast<uintptr_t>(memory) % 4096);
            for (const uint8_t *address : {memory, memory + 4999}) {
                zip_gpu_memory_t what{};
                EXPECT_EQ(ZIP_OK, api_->memory_query(address, &what));
                EXPECT_EQ(1u, what.is_gpu);
                EXPECT_EQ(device, what.device);
                EXPECT_EQ(context, what.context);
            }
            zip_gpu_memory_t what{1, 0, nullptr};
            EXPECT_EQ(ZIP_OK, api_->memory_query(memory + 5000, &what));
            EXPECT_EQ(0u, what.is_gpu);
            emulated_.free(memory);
            what.is_gpu = 1;
            EXPECT_EQ(ZIP_OK, api_->memory_query(memory, &what));
            EXPECT_EQ(0u, what.is_gpu);
        }
    }
    std::set<void *> contexts = {emulated_.context(0, 1)};
    for (int device = 0; device < ZIP_EMULATED_DEVICES; ++device)
        contexts.insert(emulated_.context(device, 0));
    EXPECT_EQ(size_t(ZIP_EMULATED_DEVICES) + 1, contexts.size());
    EXPECT_EQ(nullptr, emulated_.context(1, 1));
    EXPECT_EQ(nullptr, emulated_.allocate(1, ZIP_EMULATED_DEVICES));
    EXPECT_EQ(nullptr, emulated_.allocate(1, -1));

    void *own = nullptr;
    ASSERT_EQ(ZIP_OK, api_->memory_allocate(gpu_, ZIP_GPU_DEVICE, 300, &own));
    const Buffer pinned(*this, Bytes(10), true);
    int local = 0;
    zip_gpu_memory_t what{};
    EXPECT_EQ(ZIP_OK, api_->memory_query(own, &what));
    EXPECT_TRUE(what.is_gpu == 1 && what.device == 0 && what.context == emulated_.context(0, 0));
    for (const void *host :
         {static_cast<const void *>(pinned.get()), static_cast<const void *>(&local),
          static_cast<const void *>(nullptr), reinterpret_cast<const void *>(~uintptr_t(0))}) {
        what.is_gpu = 1;
        EXPECT_EQ(ZIP_OK, api_->memory_query(host, &what));
        EXPECT_EQ(0u, what.is_gpu);
    }
    api_->memory_free(gpu_, ZIP_GPU_DEVICE, own);
}

TEST_F(EmulatedGpuMemory, OpensTheContextThatMemoryIsOf)
{
    zip_gpu_t *gpu = nullptr;
    EXPECT_EQ(ZIP_ERR_NO_DEVICE, api_->open(nullptr, &gpu)); // none is current
    emulated_.set_current(emulated_.context(2, 0));
    ASSERT_EQ(ZIP_OK, api_->open(nullptr, &gpu));
    emulated_.set_current(nullptr);
    void *own = nullptr;
    ASSERT_EQ(ZIP_OK, api_->memory_allocate(gpu, ZIP_GPU_DEVICE, 1, &own));
    zip_gpu_memory_t what{};
    ASSERT_EQ(ZIP_OK, api_->memory_query(own, &what));
    EXPECT_EQ(emulated_.context(2, 0), what.context);
    api_->memory_free(gpu, ZIP_GPU_DEVICE, own);
    EXPECT_LT(0u, api_->multiprocessors(gpu));
    api_->close(gpu);
    zip_gpu_memory_t where = {0, 0, emulated_.context(0, 0)};
    EXPECT_EQ(ZIP_ERR_INVALID_PARAM, api_->open(&where, &gpu)); // the host's
    where = {1, 1, emulated_.context(0, 0)};
    EXPECT_EQ(ZIP_ERR_INVALID_PARAM, api_->open(&where, &gpu)); // another device's
    where = {1, ZIP_EMULATED_DEVICES, nullptr};
    EXPECT_EQ(ZIP_ERR_INVALID_PARAM, api_->open(&where, &gpu));
    where = {1, 3, nullptr};
    ASSERT_EQ(ZIP_OK, api_->open(&where, &gpu));
    api_->close(gpu);
}

TEST_F(EmulatedGpuMemory, FindsAddressesThatTheGpuDoesNotReach)
{
    const Bytes original = make_data(Data::NORMAL, ZIP_DTYPE_BF16, 4096);
    zip_plan_t plan{};
    ASSERT_EQ(ZIP_OK, zip_codec_plan(BF16, 4096, &plan));
    const Buffer data(*this, original), chunk(*this, Bytes(plan.bound)),
            progress(*this, Bytes(16), true), results(*this, Bytes(64), true);
    alignas(64) static uint8_t host[16384];
    void *const of_1 = emulated_.allocate(16384, 1), *const of_second = emulated_.allocate_in(
                                                             16384, emulated_.context(0, 1));
    const zip_gpu_item_t good =
            item(BF16, data.get(), original.size(), chunk.get(), progress.words());
    const auto fails = [&](auto launch, const void *address, const std::string &what) {
        zip_gpu_queue_t *const other = make_queue();
        set({}); // counts from 0
        EXPECT_EQ(ZIP_OK, launch()) << api_->error_text();
        EXPECT_EQ(ZIP_ERR_DEVICE, wait(queue_));
        char name[32];
        snprintf(name, sizeof name, "%p", address);
        EXPECT_TRUE(error_has(name)) << api_->error_text();
        EXPECT_TRUE(error_has(what)) << api_->error_text();
        EXPECT_EQ(1u, emulated_.faults());
        // it does nothing any more, but others do
        EXPECT_EQ(ZIP_ERR_DEVICE, encode(good, 2));
        EXPECT_TRUE(error_has("failed in an earlier call") && error_has(name))
                << api_->error_text();
        EXPECT_EQ(0u, load(progress.words()));
        EXPECT_EQ(ZIP_OK, api_->copy(other, chunk.get(), data.get(), 16, progress.words() + 1, 3));
        wait(progress.words() + 1, 3);
        api_->queue_destroy(other);
        replace_queue();
    };
    const auto fails_with = [&](auto change, const void *address, const std::string &what) {
        SCOPED_TRACE(what);
        zip_gpu_item_t i = good;
        change(i);
        fails([&] { return encode(i); }, address, what);
        fails([&] { return decode(i); }, address, what);
    };
    const std::string nobodys = "is memory that nobody pinned or allocated";
    fails_with([&](auto &i) { i.data = host; }, host, "item 0's data");
    fails_with([&](auto &i) { i.data = host; }, host, nobodys);
    fails_with([&](auto &i) { i.chunks = host; }, host, "item 0's chunks");
    fails_with([&](auto &i) { i.progress = reinterpret_cast<uint64_t *>(host); }, host,
               "item 0's progress");
    fails_with([&](auto &i) { i.data = data.get() + 1; }, data.get() + 1,
               "goes beyond the 4096 bytes");
    fails_with([&](auto &i) { ++i.last_room; }, chunk.get(), "goes beyond");
    fails_with([&](auto &i) { i.progress = reinterpret_cast<uint64_t *>(data.get()); }, data.get(),
               "is device memory, not pinned host memory");
    fails_with([&](auto &i) { i.data = of_1; }, of_1, "is memory of the context of device 1");
    fails_with([&](auto &i) { i.chunks = of_second; }, of_second,
               "is memory of the second context of device 0");
    fails_with(
            [&](auto &i) {
                i.chunk_length = 2048;
                i.chunk_stride = uint64_t(1) << 62;
            },
            chunk.get(), "goes beyond");
    const auto copies = [&](void *to, const void *from, uint64_t *word) {
        return [this, to, from, word] { return api_->copy(queue_, to, from, 64, word, 1); };
    };
    fails(copies(host, data.get(), progress.words()), host, "the copy's destination");
    fails(copies(data.get(), host, progress.words()), host, "the copy's source");
    fails(copies(data.get(), chunk.get(), reinterpret_cast<uint64_t *>(host)), host,
          "the copy's progress");
    fails([&] { return api_->probe(queue_, &good, 1, reinterpret_cast<zip_probe_t *>(host)); },
          host, "results");
    set({});
    emulated_.free(of_1);
    emulated_.free(of_second);
}

TEST_F(EmulatedGpuMemory, PinnedMemoryIsEverybodys)
{
    zip_gpu_t *const other = open(1);
    const size_t page = size_t(sysconf(_SC_PAGESIZE));
    void *const mapped =
            mmap(nullptr, 4 * page, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(MAP_FAILED, mapped);
    auto *const bytes = static_cast<uint8_t *>(mapped);
    const Bytes original = make_data(Data::NORMAL, ZIP_DTYPE_BF16, 2048);
    memcpy(bytes, original.data(), original.size());
    ASSERT_EQ(ZIP_OK, api_->memory_pin(other, mapped, 3 * page)) << api_->error_text();
    const Buffer progress(*this, Bytes(8), true);
    const zip_gpu_item_t i = item(BF16, bytes, 2048, bytes + page, progress.words());
    ASSERT_EQ(ZIP_OK, encode(i));
    check(BF16, original, Bytes(bytes + page, bytes + 3 * page), wait(progress.words(), 1));
    EXPECT_EQ(ZIP_OK, wait(queue_));
    // a part of it is pinned already
    EXPECT_EQ(ZIP_ERR_DEVICE, api_->memory_pin(gpu_, bytes + 2 * page, 2 * page));
    EXPECT_EQ(ZIP_ERR_DEVICE, api_->memory_pin(gpu_, bytes, page));
    api_->memory_unpin(other, mapped);
    ASSERT_EQ(ZIP_OK, encode(i, 2)); // which is nobody's any more
    EXPECT_EQ(ZIP_ERR_DEVICE, wait(queue_));
    expected_faults_ = 1;
    replace_queue(); // a failed one may use the words until its end
    ASSERT_EQ(0, munmap(mapped, 4 * page));
    EXPECT_EQ(ZIP_ERR_DEVICE, api_->memory_pin(gpu_, mapped, page));
    EXPECT_TRUE(error_has("is mapped")) << api_->error_text();
    api_->close(other);
}

TEST_F(EmulatedGpuMemory, FindsWhatIsFreedTooEarly)
{
    set({{"ZIP_EMULATED_DELAY_US", "300000"}});
    void *const data = emulated_.allocate(4096, 0);
    const Buffer chunk(*this, Bytes(16384)), progress(*this, Bytes(8), true);
    ASSERT_EQ(ZIP_OK, encode(item(BF16, static_cast<uint8_t *>(data), 4096, chunk.get(),
                                  progress.words())));
    emulated_.free(data);
    EXPECT_EQ(1u, emulated_.faults());
    EXPECT_EQ(ZIP_ERR_DEVICE, wait(queue_));
    EXPECT_EQ(0u, load(progress.words()));
    expected_faults_ = 1;
    // a failed queue may use memory until its end
    api_->queue_destroy(queue_);
    queue_ = nullptr;
}

TEST_F(EmulatedGpuMemory, MayBeFreedWhenTheLastWordIsRead)
{
    const auto end = std::chrono::steady_clock::now() + PATIENCE;
    for (int n = 0; n < 500; ++n) {
        const Buffer from(*this, Bytes(64)), to(*this, Bytes(64)), progress(*this, Bytes(8), true);
        ASSERT_EQ(ZIP_OK, api_->copy(queue_, to.get(), from.get(), 64, progress.words(), 1));
        // at once: the queue's thread may still be busy with what comes after the word
        while (load(progress.words()) == 0)
            ASSERT_GT(end, std::chrono::steady_clock::now());
    }
}

TEST_F(EmulatedGpuMemory, FindsWhatIsGivenBackWronglyOrNotAtAll)
{
    zip_gpu_t *const other = open(0);
    void *memory = nullptr;
    ASSERT_EQ(ZIP_OK, api_->memory_allocate(other, ZIP_GPU_DEVICE, 1000, &memory));
    EXPECT_EQ(0u, reinterpret_cast<uintptr_t>(memory) % 256);
    api_->memory_free(gpu_, ZIP_GPU_DEVICE, memory); // another's
    EXPECT_EQ(1u, emulated_.faults());
    api_->memory_free(other, ZIP_GPU_PINNED, memory);
    EXPECT_EQ(2u, emulated_.faults());
    emulated_.free(memory);
    EXPECT_EQ(3u, emulated_.faults());
    api_->memory_unpin(other, memory);
    EXPECT_EQ(4u, emulated_.faults());
    api_->memory_free(other, ZIP_GPU_DEVICE, memory);
    EXPECT_EQ(4u, emulated_.faults());
    api_->memory_free(other, ZIP_GPU_DEVICE, memory); // once more
    EXPECT_EQ(5u, emulated_.faults());
    api_->memory_free(other, ZIP_GPU_DEVICE, nullptr);
    EXPECT_EQ(5u, emulated_.faults());
    const size_t page = size_t(sysconf(_SC_PAGESIZE));
    void *const mapped =
            mmap(nullptr, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(MAP_FAILED, mapped);
    ASSERT_EQ(ZIP_OK, api_->memory_pin(other, mapped, page));
    zip_gpu_queue_t *queue = nullptr;
    const zip_gpu_queue_params_t params = {nullptr, 1, 1, 1};
    ASSERT_EQ(ZIP_OK, api_->queue_create(other, &params, &queue));
    api_->queue_destroy(queue);
    api_->close(other); // with that memory pinned
    expected_faults_ = 6;
    EXPECT_EQ(6u, emulated_.faults());
    EXPECT_EQ(ZIP_OK, api_->memory_pin(gpu_, mapped, page)); // it is nobody's now
    api_->memory_unpin(gpu_, mapped);
    munmap(mapped, page);
}

TEST_F(EmulatedGpuMemory, HasADmabuf)
{
    void *memory = nullptr;
    ASSERT_EQ(ZIP_OK, api_->memory_allocate(gpu_, ZIP_GPU_DEVICE, 10000, &memory));
    const Bytes content = make_data(Data::NORMAL, ZIP_DTYPE_BF16, 10000);
    emulated_.to_device(memory, content.data(), content.size());
    int fd = -1;
    ASSERT_EQ(ZIP_OK, api_->memory_dmabuf(gpu_, memory, 10000, &fd)) << api_->error_text();
    void *const mapped = mmap(nullptr, 10000, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    ASSERT_NE(MAP_FAILED, mapped);
    EXPECT_EQ(0, memcmp(content.data(), mapped, content.size()));
    munmap(mapped, 10000);
    EXPECT_EQ(ZIP_ERR_INVALID_PARAM, api_->memory_dmabuf(gpu_, memory, 10001, &fd));
    EXPECT_EQ(ZIP_ERR_INVALID_PARAM,
              api_->memory_dmabuf(gpu_, static_cast<uint8_t *>(memory) + 4096, 4096, &fd));
    const Buffer application(*this, Bytes(4096));
    EXPECT_EQ(ZIP_ERR_INVALID_PARAM, api_->memory_dmabuf(gpu_, application.get(), 4096, &fd));
    api_->memory_free(gpu_, ZIP_GPU_DEVICE, memory);
}

TEST_F(EmulatedGpuMemory, IsOutOfTheHostsReachIfThatIsWanted)
{
    // whether the host reads a byte there, by somebody who does not die of it
    const auto host_reads = [](const void *address) {
        int ends[2];
        if (pipe(ends) != 0)
            return false;
        const bool reads = write(ends[1], address, 1) == 1;
        EXPECT_TRUE(reads || errno == EFAULT);
        close(ends[0]);
        close(ends[1]);
        return reads;
    };
    {
        const Buffer open_memory(*this, Bytes(100));
        EXPECT_TRUE(host_reads(open_memory.get()));
        EXPECT_TRUE(host_reads(open_memory.get() + 99));
    }
    set({{"ZIP_EMULATED_PROTECT", "1"}});
    void *own = nullptr;
    ASSERT_EQ(ZIP_OK, api_->memory_allocate(gpu_, ZIP_GPU_DEVICE, 5000, &own));
    EXPECT_FALSE(host_reads(own));
    int fd = -1;
    EXPECT_EQ(ZIP_ERR_DEVICE, api_->memory_dmabuf(gpu_, own, 5000, &fd));
    zip_gpu_memory_t what{};
    EXPECT_EQ(ZIP_OK, api_->memory_query(own, &what));
    EXPECT_EQ(1u, what.is_gpu);
    api_->memory_free(gpu_, ZIP_GPU_DEVICE, own);
    const Bytes original = make_data(Data::NORMAL, ZIP_DTYPE_BF16, 20000);
    const Buffer data(*this, original), pinned(*this, original, true);
    EXPECT_FALSE(host_reads(data.get()));
    EXPECT_FALSE(host_reads(data.get() + 19999));
    EXPECT_TRUE(host_reads(pinned.get()));
    EXPECT_TRUE(original == data.content());
    round_trip({{BF16, original, 4096}, {{ZIP_DTYPE_FP32, ZIP_SHAPE_38, 0}, original}});
}

// ---- failures that were asked for

TEST_F(EmulatedGpuFailure, OfOneLaunch)
{
    const Buffer from(*this, Bytes(64)), to(*this, Bytes(64)), progress(*this, Bytes(24), true);
    set({{"ZIP_EMULATED_FAIL", "launch@2"}});
    ASSERT_EQ(ZIP_OK, api_->copy(queue_, to.get(), from.get(), 64, progress.words(), 1));
    EXPECT_EQ(ZIP_ERR_DEVICE,
              api_->copy(queue_, to.get(), from.get(), 64, progress.words() + 1, 1));
    EXPECT_TRUE(error_has("launch number 2 was told to fail")) << api_->error_text();
    EXPECT_EQ(ZIP_ERR_DEVICE, wait(queue_));
    EXPECT_EQ(ZIP_ERR_DEVICE,
              api_->copy(queue_, to.get(), from.get(), 64, progress.words() + 1, 1));
    EXPECT_TRUE(error_has("launch number 2 was told to fail")) << api_->error_text();
    EXPECT_EQ(2u, emulated_.launches());
    replace_queue();
    ASSERT_EQ(ZIP_OK, api_->copy(queue_, to.get(), from.get(), 64, progress.words() + 2, 1));
    wait(progress.words() + 2, 1);
    EXPECT_EQ(0u, load(progress.words() + 1));
}

TEST_F(EmulatedGpuFailure, OfTheDevice)
{
    zip_gpu_t *const second = open(0, 1), *const of_1 = open(1);
    zip_gpu_queue_t *queue_of_1 = nullptr;
    const zip_gpu_queue_params_t params = {nullptr, 1, 1, 1};
    ASSERT_EQ(ZIP_OK, api_->queue_create(of_1, &params, &queue_of_1));
    zip_gpu_queue_t *const other = make_queue();
    const Buffer from(*this, Bytes(64), true), to(*this, Bytes(64), true),
            progress(*this, Bytes(24), true);
    set({{"ZIP_EMULATED_FAIL", "alloc@7,device@2"}});
    ASSERT_EQ(ZIP_OK, api_->copy(queue_, to.get(), from.get(), 64, progress.words(), 1));
    wait(progress.words(), 1);
    EXPECT_EQ(ZIP_OK, wait(queue_));
    EXPECT_EQ(ZIP_OK, api_->copy(queue_, to.get(), from.get(), 64, progress.words() + 1, 1));
    EXPECT_EQ(ZIP_ERR_DEVICE, wait(queue_));
    EXPECT_TRUE(error_has("device 0 has died")) << api_->error_text();
    // all of it has
    EXPECT_EQ(ZIP_ERR_DEVICE, wait(other));
    EXPECT_EQ(ZIP_ERR_DEVICE, api_->copy(other, to.get(), from.get(), 64, nullptr, 0));
    void *memory = nullptr;
    EXPECT_EQ(ZIP_ERR_DEVICE, api_->memory_allocate(gpu_, ZIP_GPU_PINNED, 1, &memory));
    zip_gpu_queue_t *more = nullptr;
    EXPECT_EQ(ZIP_ERR_DEVICE, api_->queue_create(second, &params, &more));
    // but not another one
    EXPECT_EQ(ZIP_OK, api_->copy(queue_of_1, to.get(), from.get(), 64, progress.words() + 2, 1));
    wait(progress.words() + 2, 1);
    EXPECT_EQ(0u, load(progress.words() + 1));
    for (zip_gpu_queue_t *q : {other, queue_of_1, queue_})
        api_->queue_destroy(q);
    queue_ = nullptr;
    api_->close(second);
    api_->close(of_1);
    set({});
    queue_ = make_queue(); // it lives again
    EXPECT_EQ(ZIP_OK, api_->copy(queue_, to.get(), from.get(), 64, progress.words() + 1, 1));
    wait(progress.words() + 1, 1);
}

TEST_F(EmulatedGpuFailure, OfOneAllocation)
{
    set({{"ZIP_EMULATED_FAIL", "alloc@2"}});
    void *memory[3] = {};
    EXPECT_EQ(ZIP_OK, api_->memory_allocate(gpu_, ZIP_GPU_DEVICE, 100, &memory[0]));
    EXPECT_EQ(ZIP_ERR_DEVICE, api_->memory_allocate(gpu_, ZIP_GPU_PINNED, 100, &memory[1]));
    EXPECT_TRUE(error_has("allocation number 2 was told to fail")) << api_->error_text();
    EXPECT_EQ(ZIP_OK, api_->memory_allocate(gpu_, ZIP_GPU_PINNED, 100, &memory[2]));
    EXPECT_EQ(nullptr, memory[1]);
    EXPECT_EQ(3u, emulated_.allocations());
    api_->memory_free(gpu_, ZIP_GPU_DEVICE, memory[0]);
    api_->memory_free(gpu_, ZIP_GPU_PINNED, memory[2]);
    EXPECT_EQ(ZIP_ERR_DEVICE,
              api_->memory_allocate(gpu_, ZIP_GPU_DEVICE, SIZE_MAX - 100, &memory[0]));
}

TEST_F(EmulatedGpuFailure, LeavesWhatWasDoneBefore)
{
    set({{"ZIP_EMULATED_DELAY_US", "50000"}, {"ZIP_EMULATED_FAIL", "device@2"}});
    const Bytes original = make_data(Data::NORMAL, ZIP_DTYPE_BF16, SLOW_CHUNKS * SLOW_LENGTH);
    const Buffer data(*this, original), chunks(*this, Bytes(SLOW_CHUNKS * SLOW_STRIDE)),
            progress(*this, Bytes(8 * SLOW_CHUNKS), true);
    const zip_gpu_item_t i = {BF16,        ZIP_GPU_STORE, data.get(), original.size(), chunks.get(),
                              SLOW_LENGTH, SLOW_STRIDE,   0,          progress.words()};
    ASSERT_EQ(ZIP_OK, encode(i)) << api_->error_text();
    wait(progress.words(), 1);
    ASSERT_EQ(ZIP_OK, encode(i, 2)); // of which it dies
    EXPECT_EQ(ZIP_ERR_DEVICE, wait(queue_));
    api_->queue_destroy(queue_);
    queue_ = nullptr;
    const std::vector<Bytes> all = pieces({BF16, original, SLOW_LENGTH});
    const Bytes content = chunks.content();
    size_t done = 0;
    for (size_t c = 0; c < SLOW_CHUNKS; ++c) {
        const uint64_t word = load(progress.words() + c);
        if (word == 0)
            continue;
        EXPECT_EQ(1, ZIP_GPU_PROGRESS_SEQ(word));
        check(BF16, all[c], Bytes(content.begin() + ptrdiff_t(c * SLOW_STRIDE), content.end()),
              word);
        ++done;
    }
    EXPECT_LT(0u, done);
    EXPECT_GT(SLOW_CHUNKS, done);
}

} // namespace
