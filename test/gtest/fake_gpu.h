// SPDX-License-Identifier: BSD-3-Clause
// What the drivers for test_gpu_driver.cc share: they do nothing but note what is asked of them,
// and fail a call when they are told to.
#ifndef ZIP_TEST_FAKE_GPU_H
#define ZIP_TEST_FAKE_GPU_H

#include <cstddef>
#include <cstdlib>
#include <set>
#include <string>
#include <vector>

namespace zip::test {

// What the CUDA one answers.
inline void *const PRIMARY_CONTEXT = reinterpret_cast<void *>(3);
constexpr int DMABUF = 77;

struct FakeGpu {
    // The call after so many others fails; -1: none.
    int fail_after = -1;
    // All calls that can fail, and the one that was told to.
    std::vector<std::string> calls;
    std::string failed;
    // Streams, events, memory and modules that were made and not given back.
    std::set<void *> live;
    // Memory of others that was pinned.
    std::set<void *> pinned;
    // The context that memory was allocated in, null: none.
    void *context_of_memory = nullptr;
    // The calling thread's contexts, the current one last (HIP: its device, the only one), and its
    // mode. A mode is 0 global, 1 of the thread, 2 relaxed.
    std::vector<void *> contexts;
    int capture_mode = 0;

    // A thing, and the end of one.
    void *make(size_t size)
    {
        void *const thing = calloc(1, size);
        live.insert(thing);
        return thing;
    }
    void give_back(void *thing)
    {
        live.erase(thing);
        free(thing);
    }
    // With the context ends all that was not given back.
    void end_context()
    {
        while (!live.empty())
            give_back(*live.begin());
    }
    bool may(const char *call)
    {
        calls.emplace_back(call);
        if (fail_after < 0 || fail_after-- != 0)
            return true;
        failed = call;
        return false;
    }
};

// The one that this program's driver has.
__attribute__((visibility("default"))) FakeGpu &fake_gpu();

} // namespace zip::test
#endif
