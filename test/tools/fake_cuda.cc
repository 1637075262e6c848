// SPDX-License-Identifier: BSD-3-Clause
// A CUDA driver for tests on machines without a GPU: device memory is the host's, streams do
// everything at once. It refuses what leaves an allocation, and knows the kernels of zipperf's
// benchmark by name.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <string>

#define FAKE_CUDA extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kSuccess = 0, kInvalidValue = 1, kNotFound = 500;
constexpr int kMultiprocessorCount = 16; // the one attribute that it knows
constexpr int kMultiprocessors = 4;
constexpr size_t kAlignment = 256;
constexpr size_t kFree = size_t{1} << 30;

std::map<uint64_t, size_t> &allocations()
{
    static std::map<uint64_t, size_t> map;
    return map;
}

// Whether a range that begins in an allocation ends in it, too. Other memory is the caller's own.
bool inside(uint64_t address, size_t size)
{
    const auto next = allocations().upper_bound(address);
    if (next == allocations().begin()) {
        return true;
    }
    const auto &[base, length] = *std::prev(next);
    return address >= base + length || address + size <= base + length;
}

uint64_t allocate(size_t size)
{
    const size_t rounded = (size + kAlignment - 1) / kAlignment * kAlignment;
    void *memory = std::aligned_alloc(kAlignment, rounded);
    std::memset(memory, 0xee, rounded);
    const auto address = reinterpret_cast<uint64_t>(memory);
    allocations()[address] = size;
    return address;
}

int release(uint64_t address)
{
    if (allocations().erase(address) == 0) {
        return kInvalidValue;
    }
    std::free(reinterpret_cast<void *>(address));
    return kSuccess;
}

struct Event {
    double seconds = 0;
};

uint64_t parameter(void **parameters, int index)
{
    uint64_t value;
    std::memcpy(&value, parameters[index], sizeof(value));
    return value;
}

} // namespace

FAKE_CUDA size_t fake_cuda_allocations()
{
    return allocations().size();
}

FAKE_CUDA int cuInit(unsigned)
{
    return kSuccess;
}
FAKE_CUDA int cuGetErrorName(int, const char **name)
{
    *name = "CUDA_ERROR_OF_A_TEST";
    return kSuccess;
}
FAKE_CUDA int cuGetErrorString(int, const char **text)
{
    *text = "error of a test";
    return kSuccess;
}
FAKE_CUDA int cuDeviceGetCount(int *count)
{
    *count = 2;
    return kSuccess;
}
FAKE_CUDA int cuDeviceGetName(char *name, int size, int)
{
    std::strncpy(name, "no GPU, a test", static_cast<size_t>(size));
    return kSuccess;
}
FAKE_CUDA int cuDeviceGetAttribute(int *value, int attribute, int)
{
    *value = kMultiprocessors;
    return attribute == kMultiprocessorCount ? kSuccess : kInvalidValue;
}
FAKE_CUDA int cuDevicePrimaryCtxRetain(void **context, int)
{
    static int object;
    *context = &object;
    return kSuccess;
}
FAKE_CUDA int cuDevicePrimaryCtxRelease_v2(int)
{
    return kSuccess;
}
FAKE_CUDA int cuCtxSetCurrent(void *)
{
    return kSuccess;
}
FAKE_CUDA int cuMemGetInfo_v2(size_t *free, size_t *total)
{
    *free = kFree;
    *total = kFree;
    return kSuccess;
}
FAKE_CUDA int cuMemAlloc_v2(uint64_t *address, size_t size)
{
    *address = allocate(size);
    return size == 0 ? kInvalidValue : kSuccess;
}
FAKE_CUDA int cuMemFree_v2(uint64_t address)
{
    return release(address);
}
FAKE_CUDA int cuMemHostAlloc(void **memory, size_t size, unsigned)
{
    *memory = reinterpret_cast<void *>(allocate(size));
    return size == 0 ? kInvalidValue : kSuccess;
}
FAKE_CUDA int cuMemFreeHost(void *memory)
{
    return release(reinterpret_cast<uint64_t>(memory));
}
FAKE_CUDA int cuMemcpy(uint64_t to, uint64_t from, size_t size)
{
    if (!inside(to, size) || !inside(from, size)) {
        return kInvalidValue;
    }
    std::memcpy(reinterpret_cast<void *>(to), reinterpret_cast<void *>(from), size);
    return kSuccess;
}
FAKE_CUDA int cuMemcpyAsync(uint64_t to, uint64_t from, size_t size, void *)
{
    return cuMemcpy(to, from, size);
}
FAKE_CUDA int cuMemsetD8Async(uint64_t to, unsigned char value, size_t size, void *)
{
    if (!inside(to, size)) {
        return kInvalidValue;
    }
    std::memset(reinterpret_cast<void *>(to), value, size);
    return kSuccess;
}
FAKE_CUDA int cuStreamCreate(void **stream, unsigned)
{
    static int object;
    *stream = &object;
    return kSuccess;
}
FAKE_CUDA int cuStreamDestroy_v2(void *)
{
    return kSuccess;
}
FAKE_CUDA int cuStreamSynchronize(void *)
{
    return kSuccess;
}
FAKE_CUDA int cuEventCreate(void **event, unsigned)
{
    *event = new Event;
    return kSuccess;
}
FAKE_CUDA int cuEventDestroy_v2(void *event)
{
    delete static_cast<Event *>(event);
    return kSuccess;
}
FAKE_CUDA int cuEventRecord(void *event, void *)
{
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    static_cast<Event *>(event)->seconds =
            static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
    return kSuccess;
}
FAKE_CUDA int cuEventSynchronize(void *)
{
    return kSuccess;
}
FAKE_CUDA int cuEventElapsedTime(float *milliseconds, void *start, void *end)
{
    *milliseconds = static_cast<float>(
            (static_cast<Event *>(end)->seconds - static_cast<Event *>(start)->seconds) * 1e3);
    return kSuccess;
}
FAKE_CUDA int cuModuleLoadData(void **module, const void *image)
{
    *module = new std::string(static_cast<const char *>(image));
    return kSuccess;
}
FAKE_CUDA int cuModuleUnload(void *module)
{
    delete static_cast<std::string *>(module);
    return kSuccess;
}
FAKE_CUDA int cuModuleGetFunction(void **kernel, void *module, const char *name)
{
    static std::map<std::string, std::string> names;
    if (static_cast<std::string *>(module)->find(name) == std::string::npos) {
        return kNotFound;
    }
    *kernel = &(names[name] = name);
    return kSuccess;
}
FAKE_CUDA int cuLaunchKernel(void *kernel, unsigned, unsigned, unsigned, unsigned, unsigned,
                             unsigned, unsigned, void *, void **parameters, void **)
{
    const std::string &name = *static_cast<std::string *>(kernel);
    const uint64_t a = parameter(parameters, 0);
    const uint64_t b = parameter(parameters, 1);
    const uint64_t c = parameter(parameters, 2);
    if (name == "zip_bench_read") {
        return inside(a, b * 16) ? kSuccess : kInvalidValue;
    }
    if (name != "zip_bench_compare" || !inside(a, c) || !inside(b, c)) {
        return kInvalidValue;
    }
    uint64_t differing = 0;
    for (uint64_t i = 0; i < c; ++i) {
        differing += reinterpret_cast<uint8_t *>(a)[i] != reinterpret_cast<uint8_t *>(b)[i];
    }
    *reinterpret_cast<uint64_t *>(parameter(parameters, 3)) += differing;
    return kSuccess;
}
