// SPDX-License-Identifier: BSD-3-Clause
// What a back end does when the GPU's driver fails: each call in turn, from open to close. This is
// built once with the driver for CUDA and once with that for HIP, each over one that does nothing.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "fake_gpu.h"
#include "kernels/gpu/image.h"
#include "kernels/gpu/launcher.h"

// The drivers above load anything.
static const unsigned char no_code[1] = {};
const zip::gpu::Image zip_gpu_images[] = {{"some", no_code}, {"more", no_code}, {nullptr, nullptr}};

namespace {

using zip::test::fake_gpu;
using zip::test::FakeGpu;

void *const CONTEXT_OF_CODEC = reinterpret_cast<void *>(1);
void *const CONTEXT_OF_CALLER = reinterpret_cast<void *>(2);
constexpr int RELAXED = 2;

bool has(const std::string &text, const char *part)
{
    return text.find(part) != std::string::npos;
}
bool gives_back(const std::string &call)
{
    return has(call, "Destroy") || has(call, "Free") || has(call, "Unload");
}

// One after the other, as a program would, until one fails; then what is there is given back.
class Program {
public:
    explicit Program(const std::function<void(const char *, zip_status_t)> &after) : after_(after)
    {
        std::vector<zip_gpu_item_t> items(20);
        for (zip_gpu_item_t &item : items) {
            item.coding = {ZIP_DTYPE_BF16, ZIP_SHAPE_DEFAULT, 0};
            item.data = item.chunks = memory_;
            item.data_size = 4096;
            item.last_room = 8192;
        }
        zip_probe_t result;
        bool ok = step("open", [&] { return api_.open(nullptr, &gpu_); });
        // from here on the thread has a context of its own
        fake_gpu().contexts.back() = CONTEXT_OF_CALLER;
        const zip_gpu_queue_params_t params = {nullptr, 32, 32, 2};
        ok = ok && step("queue_create", [&] { return api_.queue_create(gpu_, &params, &queue_); });
        ok = ok && step("encode", [&] { return api_.encode(queue_, items.data(), 1, {0, 1}); });
        ok = ok && step("decode", [&] { return api_.decode(queue_, items.data(), 20, {3, 1}); });
        ok = ok && step("probe", [&] { return api_.probe(queue_, items.data(), 1, &result); });
        ok = ok && step("copy", [&] { return api_.copy(queue_, word_, memory_, 8, word_, 9); });
        int idle = 0;
        ok = ok && step("queue_query", [&] { return api_.queue_query(queue_, &idle); });
        void *device = nullptr, *pinned = nullptr;
        ok = ok && step("allocate",
                        [&] { return api_.memory_allocate(gpu_, ZIP_GPU_DEVICE, 4096, &device); });
        ok = ok && step("allocate pinned",
                        [&] { return api_.memory_allocate(gpu_, ZIP_GPU_PINNED, 4096, &pinned); });
        if (ok && step("pin", [&] { return api_.memory_pin(gpu_, memory_, sizeof memory_); }))
            step("unpin: destroy", [&] { return api_.memory_unpin(gpu_, memory_), ZIP_OK; });
        for (const auto &[place, memory] :
             {std::pair(ZIP_GPU_DEVICE, device), std::pair(ZIP_GPU_PINNED, pinned)}) {
            if (memory != nullptr)
                step("free: destroy",
                     [&] { return api_.memory_free(gpu_, place, memory), ZIP_OK; });
        }
        if (queue_ != nullptr)
            step("queue_destroy", [&] { return api_.queue_destroy(queue_), ZIP_OK; });
        if (gpu_ != nullptr)
            step("close", [&] { return api_.close(gpu_), ZIP_OK; });
    }

    static const zip_gpu_api_t &api() { return api_; }

private:
    bool step(const char *name, const std::function<zip_status_t()> &call)
    {
        const zip_status_t status = call();
        after_(name, status);
        return status == ZIP_OK;
    }

    static const zip_gpu_api_t &api_;
    const std::function<void(const char *, zip_status_t)> &after_;
    alignas(16) uint8_t memory_[16];
    uint64_t word_[1] = {};
    zip_gpu_t *gpu_ = nullptr;
    zip_gpu_queue_t *queue_ = nullptr;
};
const zip_gpu_api_t &Program::api_ = *zip_gpu_back_end();

void start(int fail_after)
{
    fake_gpu().end_context(); // of the run before
    fake_gpu() = FakeGpu{};
    fake_gpu().contexts = {CONTEXT_OF_CODEC};
    fake_gpu().fail_after = fail_after;
}

TEST(GpuDriver, WorksAndLeavesNothingBehind)
{
    start(-1);
    const Program program([](const char *step, zip_status_t status) {
        EXPECT_EQ(ZIP_OK, status) << step << ": " << Program::api().error_text();
        EXPECT_EQ(0, fake_gpu().capture_mode) << step;
        EXPECT_EQ(1u, fake_gpu().contexts.size()) << step;
    });
    EXPECT_EQ(CONTEXT_OF_CALLER, fake_gpu().contexts.back());
    EXPECT_TRUE(fake_gpu().live.empty());
}

TEST(GpuDriver, SaysWhatFailedAndLeavesTheThreadAsItWas)
{
    start(-1);
    const Program all([](const char *, zip_status_t) {});
    const std::vector<std::string> calls = fake_gpu().calls;
    std::set<std::string> seen_failing; // in which step what call was told to fail
    for (size_t n = 0; n < calls.size(); ++n) {
        start(int(n));
        size_t before = 0; // calls of the steps before
        bool leaks = false;
        void *caller = CONTEXT_OF_CODEC;
        const Program program([&](const char *step, zip_status_t status) {
            FakeGpu &gpu = fake_gpu();
            SCOPED_TRACE(step + std::string(", call ") + std::to_string(n) + ", " + calls[n]);
            const bool here = n >= before && n < gpu.calls.size();
            const bool ends = has(step, "destroy") || has(step, "close");
            // a call is made twice where the second one undoes the first
            const auto first = gpu.calls.begin() + ptrdiff_t(before);
            const bool undoes =
                    here && (has(calls[n], "PopCurrent") ||
                             ((has(calls[n], "Exchange") || has(calls[n], "SetDevice")) &&
                              std::count(first, gpu.calls.begin() + ptrdiff_t(n), calls[n]) == 1));
            const bool ignored = ends || undoes || (here && gives_back(calls[n]));
            EXPECT_EQ(here && !ignored, status != ZIP_OK);
            if (here) {
                EXPECT_EQ(calls[n], gpu.failed);
                seen_failing.insert(step + std::string(": ") + calls[n]);
                // with no context there is nothing to give back in
                leaks = gives_back(calls[n]) || (ends && !undoes && !has(calls[n], "Synchronize"));
            }
            if (status != ZIP_OK) {
                const std::string text = Program::api().error_text();
                EXPECT_TRUE(has(text, "told to fail") || has(text, "no CUDA context")) << text;
            }
            // what could not be undone stays; all else is as it was
            if (undoes && has(calls[n], "Exchange"))
                EXPECT_EQ(RELAXED, std::exchange(gpu.capture_mode, 0));
            else if (undoes)
                gpu.contexts = {caller};
            EXPECT_EQ(0, gpu.capture_mode);
            EXPECT_EQ(1u, gpu.contexts.size());
            EXPECT_EQ(caller, gpu.contexts.back());
            gpu.contexts = {caller};
            caller = CONTEXT_OF_CALLER;
            before = gpu.calls.size();
        });
        EXPECT_TRUE(leaks || fake_gpu().live.empty()) << "call " << n << ", " << calls[n];
    }
    fake_gpu().end_context();
    for (const char *step : {"open", "queue_create", "encode", "decode", "probe", "copy",
                             "queue_query", "allocate", "pin", "queue_destroy", "close"})
        EXPECT_TRUE(std::any_of(seen_failing.begin(), seen_failing.end(), [&](const auto &seen) {
            return seen.starts_with(step + std::string(": ")) && has(seen, "ExchangeStream");
        })) << step;
}

// ---- what an address is of

class GpuMemory : public testing::Test {
protected:
    void SetUp() override
    {
        start(-1);
        memory_ = fake_gpu().make(16);
    }
    zip_gpu_memory_t query(const void *address)
    {
        zip_gpu_memory_t memory{7, 7, this};
        EXPECT_EQ(ZIP_OK, Program::api().memory_query(address, &memory));
        return memory;
    }
    static bool is_hip() { return Program::api().name == std::string("hip"); }
    void *memory_ = nullptr;
};

TEST_F(GpuMemory, OfTheHostIsNone)
{
    EXPECT_EQ(0u, query(this).is_gpu);
    EXPECT_EQ(0u, query(nullptr).is_gpu);
    EXPECT_EQ(ZIP_ERR_INVALID_PARAM, Program::api().memory_query(this, nullptr));
}

TEST_F(GpuMemory, IsUsedInTheContextItWasAllocatedIn)
{
    fake_gpu().context_of_memory = CONTEXT_OF_CODEC;
    fake_gpu().contexts = {CONTEXT_OF_CALLER};
    EXPECT_EQ(1u, query(memory_).is_gpu);
    EXPECT_EQ(is_hip() ? nullptr : CONTEXT_OF_CODEC, query(memory_).context);
}

TEST_F(GpuMemory, OfNoContextIsUsedInTheCallersOrThePrimaryOne)
{
    if (is_hip())
        GTEST_SKIP() << "HIP has no contexts";
    fake_gpu().contexts = {CONTEXT_OF_CALLER};
    EXPECT_EQ(CONTEXT_OF_CALLER, query(memory_).context);
    fake_gpu().contexts = {nullptr}; // of a progress thread
    EXPECT_EQ(1u, query(memory_).is_gpu);
    EXPECT_EQ(zip::test::PRIMARY_CONTEXT, query(memory_).context);
}

TEST_F(GpuMemory, IsOpenedWhereTheQuerySays)
{
    if (is_hip())
        GTEST_SKIP() << "HIP has no contexts";
    fake_gpu().contexts = {nullptr};
    const zip_gpu_memory_t where = query(memory_);
    zip_gpu_t *gpu = nullptr;
    ASSERT_EQ(ZIP_OK, Program::api().open(&where, &gpu)) << Program::api().error_text();
    EXPECT_EQ(nullptr, fake_gpu().contexts.back());
    EXPECT_NE(0u, Program::api().multiprocessors(gpu));
    int fd = -1;
    EXPECT_EQ(ZIP_OK, Program::api().memory_dmabuf(gpu, memory_, 4096, &fd));
    EXPECT_EQ(zip::test::DMABUF, fd);
    Program::api().close(gpu);
}

} // namespace
