// SPDX-License-Identifier: BSD-3-Clause
// A CUDA driver for tests of the software verbs device: two GPUs of one context each, whose memory
// is the host's. As strict as the real one where that has been seen to matter: what is asked of an
// allocation has to be asked in its context, and a GPU reaches another's memory only where an IPC
// handle was opened in that GPU's own context; else a copy goes through host memory, which is slow.
#include "fake_libcuda.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>

#define FAKE_CUDA extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kSuccess = 0, kInvalidValue = 1, kInvalidContext = 201, kNotFound = 500;
constexpr int kGpus = 2;

struct Memory {
    size_t size;
    int gpu;     // whose it is
    int through; // the GPU in whose context it was allocated or opened
    int file;    // -1: another process'
    uint64_t id;
};
struct Handle {
    int process, file, gpu;
    uint64_t size;
};

char contexts[kGpus], streams[kGpus];
thread_local void *current;
unsigned slow_copies;
std::mutex mutex; // of what follows, and of slow_copies: the device has a thread of its own
using Guard = std::lock_guard<std::mutex>;

std::map<uint64_t, Memory> &memories() // by address
{
    static auto *const all = new std::map<uint64_t, Memory>;
    return *all;
}

using Found = std::map<uint64_t, Memory>::const_iterator;

// That which the address is in; memories().end(): the host's.
Found find(uint64_t address)
{
    auto it = memories().upper_bound(address);
    if (it == memories().begin()) {
        return memories().end();
    }
    --it;
    return address < it->first + it->second.size ? it : memories().end();
}

int gpu_of(const void *object, const char *objects)
{
    const auto *const at = static_cast<const char *>(object);
    return at >= objects && at < objects + kGpus ? static_cast<int>(at - objects) : -1;
}

uint64_t map(int file, size_t size)
{
    void *const at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    return at == MAP_FAILED ? 0 : reinterpret_cast<uint64_t>(at);
}

} // namespace

FAKE_CUDA void *fake_cuda_context(int gpu)
{
    return contexts + gpu;
}
FAKE_CUDA uint64_t fake_cuda_allocate(int gpu, size_t size)
{
    const Guard guard(mutex);
    static uint64_t ids = 0;
    const int file = memfd_create("fake GPU", 0);
    if (file < 0 || ftruncate(file, static_cast<off_t>(size)) != 0) {
        return 0;
    }
    const uint64_t address = map(file, size);
    memories()[address] = {size, gpu, gpu, file, ++ids};
    return address;
}
FAKE_CUDA unsigned fake_cuda_slow_copies()
{
    const Guard guard(mutex);
    return slow_copies;
}

FAKE_CUDA int cuInit(unsigned)
{
    return kSuccess;
}
FAKE_CUDA int cuDeviceGetCount(int *count)
{
    *count = kGpus;
    return kSuccess;
}
FAKE_CUDA int cuDeviceGetUuid(void *uuid, int gpu)
{
    std::memset(uuid, gpu + 1, 16);
    return kSuccess;
}
FAKE_CUDA int cuDevicePrimaryCtxRetain(void **context, int gpu)
{
    *context = contexts + gpu;
    return gpu < kGpus ? kSuccess : kInvalidValue;
}
FAKE_CUDA int cuCtxGetCurrent(void **context)
{
    *context = current;
    return kSuccess;
}
FAKE_CUDA int cuCtxSetCurrent(void *context)
{
    current = context;
    return kSuccess;
}
FAKE_CUDA int cuPointerGetAttribute(void *value, int attribute, uint64_t address)
{
    constexpr int kContext = 1, kType = 2, kBufferId = 7, kOrdinal = 9;
    const Guard guard(mutex);
    const Found found = find(address);
    if (found == memories().end()) {
        return kInvalidValue;
    }
    const Memory *const memory = &found->second;
    switch (attribute) {
    case kContext:
        *static_cast<void **>(value) = contexts + memory->gpu;
        return kSuccess;
    case kType:
        *static_cast<unsigned *>(value) = 2; // a device's
        return kSuccess;
    case kBufferId:
        *static_cast<uint64_t *>(value) = memory->id;
        return kSuccess;
    case kOrdinal:
        *static_cast<int *>(value) = memory->gpu;
        return kSuccess;
    default:
        return kInvalidValue;
    }
}
FAKE_CUDA int cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t address)
{
    const Guard guard(mutex);
    const Found found = find(address);
    if (found == memories().end() || current != contexts + found->second.gpu) {
        return kNotFound;
    }
    *base = found->first;
    *size = found->second.size;
    return kSuccess;
}
FAKE_CUDA int cuIpcGetMemHandle(void *handle, uint64_t address)
{
    const Guard guard(mutex);
    const Found found = find(address);
    if (found == memories().end() || current != contexts + found->second.gpu) {
        return kInvalidValue;
    }
    const Memory &memory = found->second;
    const Handle mine = {getpid(), memory.file, memory.gpu, memory.size};
    std::memcpy(handle, &mine, sizeof(mine));
    return kSuccess;
}
struct IpcHandle {
    char bytes[64];
};
FAKE_CUDA int cuIpcOpenMemHandle_v2(uint64_t *address, IpcHandle handle, unsigned)
{
    const Guard guard(mutex);
    Handle theirs;
    std::memcpy(&theirs, handle.bytes, sizeof(theirs));
    const int through = gpu_of(current, contexts);
    char path[64];
    snprintf(path, sizeof(path), "/proc/%d/fd/%d", theirs.process, theirs.file);
    const int file = open(path, O_RDWR);
    if (through < 0 || file < 0) {
        return through < 0 ? kInvalidContext : kInvalidValue;
    }
    *address = map(file, theirs.size);
    close(file);
    memories()[*address] = {theirs.size, theirs.gpu, through, -1, 0};
    return kSuccess;
}
FAKE_CUDA int cuIpcCloseMemHandle(uint64_t address)
{
    const Guard guard(mutex);
    const auto it = memories().find(address);
    if (it == memories().end() || it->second.file >= 0) {
        return kInvalidValue;
    }
    munmap(reinterpret_cast<void *>(address), it->second.size);
    memories().erase(it);
    return kSuccess;
}
FAKE_CUDA int cuMemcpyAsync(uint64_t to, uint64_t from, size_t size, void *stream)
{
    const Guard guard(mutex);
    const int gpu = gpu_of(stream, streams);
    bool reached = true;
    for (const uint64_t address : {to, from}) {
        const Found found = find(address);
        reached = reached && (found == memories().end() || found->second.gpu == gpu ||
                              found->second.through == gpu);
    }
    slow_copies += !reached;
    std::memcpy(reinterpret_cast<void *>(to), reinterpret_cast<const void *>(from), size);
    return kSuccess;
}
FAKE_CUDA int cuStreamCreate(void **stream, unsigned)
{
    const int gpu = gpu_of(current, contexts);
    *stream = gpu < 0 ? nullptr : streams + gpu;
    return gpu < 0 ? kInvalidContext : kSuccess;
}
FAKE_CUDA int cuMemHostAlloc(void **memory, size_t size, unsigned)
{
    *memory = new char[size]; // for the process' lifetime
    return kSuccess;
}
FAKE_CUDA int cuEventCreate(void **event, unsigned)
{
    static char object;
    *event = &object;
    return kSuccess;
}
FAKE_CUDA int cuEventRecord(void *, void *)
{
    return kSuccess;
}
FAKE_CUDA int cuEventQuery(void *)
{
    return kSuccess;
}
FAKE_CUDA int cuEventSynchronize(void *)
{
    return kSuccess;
}
