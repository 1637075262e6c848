// SPDX-License-Identifier: BSD-3-Clause
// CUDA's driver for the tools, opened at run time: no CUDA is needed to build or to start them.
// Owners of a context, memory, streams, events and kernels; every failure is an Error that names
// the call.
//
// One thread at a time. Everything but Driver belongs to a Context and must end before it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

namespace tools::cuda {

using Address = uint64_t; // CUdeviceptr, in the address space that host and devices share
using StreamHandle = struct CUstream_st *;
using EventHandle = struct CUevent_st *;
using ModuleHandle = struct CUmod_st *;
using KernelHandle = struct CUfunc_st *;
using ContextHandle = struct CUctx_st *;

// The driver's functions that are used here, with the signatures of cuda.h.
struct Functions {
    int (*init)(unsigned flags);
    int (*error_name)(int error, const char **name);
    int (*error_string)(int error, const char **text);
    int (*device_count)(int *count);
    int (*device_name)(char *name, int size, int device);
    int (*device_attribute)(int *value, int attribute, int device);
    int (*retain)(ContextHandle *context, int device);
    int (*release)(int device);
    int (*set_current)(ContextHandle context);
    int (*memory_info)(size_t *free, size_t *total);
    int (*allocate)(Address *address, size_t size);
    int (*free)(Address address);
    int (*host_allocate)(void **memory, size_t size, unsigned flags);
    int (*host_free)(void *memory);
    int (*copy)(Address to, Address from, size_t size);
    int (*copy_async)(Address to, Address from, size_t size, StreamHandle stream);
    int (*set_bytes_async)(Address to, unsigned char value, size_t size, StreamHandle stream);
    int (*stream_create)(StreamHandle *stream, unsigned flags);
    int (*stream_destroy)(StreamHandle stream);
    int (*stream_synchronize)(StreamHandle stream);
    int (*event_create)(EventHandle *event, unsigned flags);
    int (*event_destroy)(EventHandle event);
    int (*event_record)(EventHandle event, StreamHandle stream);
    int (*event_synchronize)(EventHandle event);
    int (*event_elapsed)(float *milliseconds, EventHandle start, EventHandle end);
    int (*module_load)(ModuleHandle *module, const void *image);
    int (*module_unload)(ModuleHandle module);
    int (*module_function)(KernelHandle *kernel, ModuleHandle module, const char *name);
    int (*launch)(KernelHandle kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                  unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                  StreamHandle stream, void **parameters, void **extra);
};

class Driver {
public:
    // Opens the driver once a process. Throws Error if there is none, or no GPU.
    static const Driver &get();

    const Functions &call() const { return functions_; }
    int devices() const { return devices_; }

    // Throws Error unless `result` is CUDA_SUCCESS.
    void check(int result, const char *what) const;

private:
    Driver();

    Functions functions_{};
    int devices_ = 0;
};

// The primary context of a device, current in the thread that made it.
class Context {
public:
    explicit Context(int device);
    ~Context();
    Context(const Context &) = delete;
    Context &operator=(const Context &) = delete;

    void use() const; // makes it the calling thread's current one
    std::string name() const;
    int multiprocessors() const;
    uint64_t free_memory() const;
    // Whether the Multi-Process Service shares the device; nothing where the driver cannot tell.
    std::optional<bool> shared_by_mps() const;

private:
    int device_;
    ContextHandle handle_ = nullptr;
};

enum class Memory {
    kDevice,
    kPinnedHost // mapped under the same address on host and device
};

// Memory of the current context, not initialised.
class Buffer {
public:
    Buffer(Memory memory, uint64_t size);
    ~Buffer();
    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;

    Address address() const { return address_; }
    template <typename T = void>
    T *pointer(uint64_t offset = 0) const
    {
        return reinterpret_cast<T *>(address_ + offset);
    }
    uint64_t size() const { return size_; }

private:
    Memory memory_;
    Address address_ = 0;
    uint64_t size_;
};

class Stream {
public:
    Stream();
    ~Stream();
    Stream(const Stream &) = delete;
    Stream &operator=(const Stream &) = delete;

    StreamHandle handle() const { return handle_; }
    void synchronize() const;
    // Between any two kinds of memory; returns before it is done.
    void copy(Address to, Address from, uint64_t size) const;
    void set_bytes(Address to, uint8_t value, uint64_t size) const;

private:
    StreamHandle handle_ = nullptr;
};

// An event that takes the time.
class Event {
public:
    Event();
    ~Event();
    Event(const Event &) = delete;
    Event &operator=(const Event &) = delete;

    void record(const Stream &stream) const;
    void synchronize() const;
    // Microseconds from `start` to this, both of which have happened.
    double since(const Event &start) const;

private:
    EventHandle handle_ = nullptr;
};

// Kernels from PTX text.
class Module {
public:
    explicit Module(const char *ptx);
    ~Module();
    Module(const Module &) = delete;
    Module &operator=(const Module &) = delete;

    KernelHandle kernel(const char *name) const;

private:
    ModuleHandle handle_ = nullptr;
};

// Launches a kernel whose parameters are all 64 bits.
void launch(KernelHandle kernel, unsigned blocks, unsigned threads, const Stream &stream,
            std::initializer_list<uint64_t> parameters);

// Copies between any two kinds of memory, pageable too, and waits for it.
void copy(Address to, Address from, uint64_t size);
inline void upload(Address to, const void *from, uint64_t size)
{
    copy(to, reinterpret_cast<Address>(from), size);
}
inline void download(void *to, Address from, uint64_t size)
{
    copy(reinterpret_cast<Address>(to), from, size);
}

} // namespace tools::cuda
