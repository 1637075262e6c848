// SPDX-License-Identifier: BSD-3-Clause
// A GPU back end without a GPU, libzip_emulated.so, for tests of what uses one: zip_gpu_load()
// opens it by its path. Its queues are as asynchronous as a GPU's: a thread for each stream
// encodes, decodes and copies, with the bytes and progress words of a GPU, and finds what one would
// find of memory that it does not reach. See codec_gpu.h for what is promised; here is what only
// tests use.
//
// Environment, read at the first call and by emulated_gpu_reset():
//   ZIP_EMULATED_DELAY_US  microseconds to wait before each chunk, probe or copy (0)
//   ZIP_EMULATED_JITTER    at most so many microseconds more, different each time but the same in
//                          each run; if not 0, the chunks of a launch are done in any order, too
//                          (0)
//   ZIP_EMULATED_FAIL      what goes wrong, separated by commas; N counts from 1, over all queues:
//                            launch@N  encode, decode, probe or copy number N returns DEVICE
//                            device@N  launch number N is accepted, and its device dies: nothing
//                                      that is not done yet is ever done
//                            alloc@N   memory_allocate number N returns DEVICE
//   ZIP_EMULATED_PROTECT   1: device memory that is allocated from now on cannot be touched at its
//                          address, but by the GPU and by emulated_gpu_to_device() and _to_host();
//                          it has no dma-buf. Otherwise the host may read and write it (0)
//
// Misuse, such as an address in a launch that the GPU does not reach, or memory that is freed while
// a queue uses it, is told on stderr and counted: a test ends with emulated_gpu_faults() == 0.
// A launch with such an address fails its queue when it is its turn, before anything of it is done.
#ifndef ZIP_TEST_EMULATED_GPU_H
#define ZIP_TEST_EMULATED_GPU_H

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#define ZIP_EMULATED_DEVICES 4

extern "C" {
#pragma GCC visibility push(default)

// The application's memory: `size` bytes, aligned to a page, not cleared, in the device's primary
// context; between pages that are nobody's. Null: there is no such device, or no memory.
void *emulated_gpu_allocate(size_t size, int device);
void *emulated_gpu_allocate_in(size_t size, void *context);
void emulated_gpu_free(void *memory);

// Copies to and from an address inside device memory or pinned memory, at once. What a queue does
// to it meanwhile is the caller's to exclude. Ends the process where that is no such memory.
void emulated_gpu_to_device(void *device, const void *host, size_t size);
void emulated_gpu_to_host(void *host, const void *device, size_t size);

// Context `which` of a device: 0, its primary one; device 0 has also a 1. Otherwise null.
void *emulated_gpu_context(int device, int which);
// Makes it the calling thread's, which has none at first (null: again).
void emulated_gpu_set_current(void *context);

// Launches that were accepted, or told to fail, and memory_allocate calls, since the last reset.
uint64_t emulated_gpu_launches(void);
uint64_t emulated_gpu_allocations(void);
uint64_t emulated_gpu_faults(void);
// Reads the environment again, counts from 0 again, and brings devices that died back to life; but
// not their queues, which were to be destroyed before. Launches that are under way keep their
// delay.
void emulated_gpu_reset(void);

#pragma GCC visibility pop
}

namespace zip::test {

// These functions, for a program that opens the library.
struct EmulatedGpu {
    decltype(&emulated_gpu_allocate) allocate;
    decltype(&emulated_gpu_allocate_in) allocate_in;
    decltype(&emulated_gpu_free) free;
    decltype(&emulated_gpu_to_device) to_device;
    decltype(&emulated_gpu_to_host) to_host;
    decltype(&emulated_gpu_context) context;
    decltype(&emulated_gpu_set_current) set_current;
    decltype(&emulated_gpu_launches) launches;
    decltype(&emulated_gpu_allocations) allocations;
    decltype(&emulated_gpu_faults) faults;
    decltype(&emulated_gpu_reset) reset;

    // Returns "" or why it cannot be had. It is one library, whoever else has opened that file.
    std::string open(const char *path)
    {
        void *const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (library == nullptr)
            return dlerror();
        std::string missing;
        const auto find = [&](auto &function, const char *name) {
            function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
            if (function == nullptr)
                missing += std::string(missing.empty() ? "" : ", ") + name;
        };
        find(allocate, "emulated_gpu_allocate");
        find(allocate_in, "emulated_gpu_allocate_in");
        find(free, "emulated_gpu_free");
        find(to_device, "emulated_gpu_to_device");
        find(to_host, "emulated_gpu_to_host");
        find(context, "emulated_gpu_context");
        find(set_current, "emulated_gpu_set_current");
        find(launches, "emulated_gpu_launches");
        find(allocations, "emulated_gpu_allocations");
        find(faults, "emulated_gpu_faults");
        find(reset, "emulated_gpu_reset");
        return missing.empty() ? "" : std::string(path) + " lacks " + missing;
    }
};

} // namespace zip::test
#endif
