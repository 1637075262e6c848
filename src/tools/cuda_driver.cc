// SPDX-License-Identifier: BSD-3-Clause
// CUDA's driver for the tools.
#include "tools/cuda_driver.h"

#include "tools/error.h"
#include "tools/units.h"

#include <array>
#include <dlfcn.h>

namespace tools::cuda {

namespace {

// Values of cuda.h.
constexpr int kMultiprocessorCount = 16; // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
constexpr int kMpsEnabled = 133;         // CU_DEVICE_ATTRIBUTE_MPS_ENABLED, since CUDA 12.3
constexpr unsigned kHostMapped = 1 | 2;  // CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
constexpr unsigned kNonBlocking = 1;     // CU_STREAM_NON_BLOCKING
constexpr unsigned kEventDefault = 0;

const Functions &call()
{
    return Driver::get().call();
}

void check(int result, const char *what)
{
    Driver::get().check(result, what);
}

template <typename F>
void resolve(void *library, F &function, const char *name)
{
    function = reinterpret_cast<F>(dlsym(library, name));
    if (function == nullptr) {
        throw Error(std::string("the CUDA driver has no ") + name + "; it is too old");
    }
}

} // namespace

const Driver &Driver::get()
{
    static const Driver driver;
    return driver;
}

Driver::Driver()
{
    // Never closed: a driver that is unloaded takes the process's contexts with it.
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        throw Error("no CUDA driver (libcuda.so.1) on this machine");
    }
    Functions &f = functions_;
    resolve(library, f.init, "cuInit");
    resolve(library, f.error_name, "cuGetErrorName");
    resolve(library, f.error_string, "cuGetErrorString");
    resolve(library, f.device_count, "cuDeviceGetCount");
    resolve(library, f.device_name, "cuDeviceGetName");
    resolve(library, f.device_attribute, "cuDeviceGetAttribute");
    resolve(library, f.retain, "cuDevicePrimaryCtxRetain");
    resolve(library, f.release, "cuDevicePrimaryCtxRelease_v2");
    resolve(library, f.set_current, "cuCtxSetCurrent");
    resolve(library, f.memory_info, "cuMemGetInfo_v2");
    resolve(library, f.allocate, "cuMemAlloc_v2");
    resolve(library, f.free, "cuMemFree_v2");
    resolve(library, f.host_allocate, "cuMemHostAlloc");
    resolve(library, f.host_free, "cuMemFreeHost");
    resolve(library, f.copy, "cuMemcpy");
    resolve(library, f.copy_async, "cuMemcpyAsync");
    resolve(library, f.set_bytes_async, "cuMemsetD8Async");
    resolve(library, f.stream_create, "cuStreamCreate");
    resolve(library, f.stream_destroy, "cuStreamDestroy_v2");
    resolve(library, f.stream_synchronize, "cuStreamSynchronize");
    resolve(library, f.event_create, "cuEventCreate");
    resolve(library, f.event_destroy, "cuEventDestroy_v2");
    resolve(library, f.event_record, "cuEventRecord");
    resolve(library, f.event_synchronize, "cuEventSynchronize");
    resolve(library, f.event_elapsed, "cuEventElapsedTime");
    resolve(library, f.module_load, "cuModuleLoadData");
    resolve(library, f.module_unload, "cuModuleUnload");
    resolve(library, f.module_function, "cuModuleGetFunction");
    resolve(library, f.launch, "cuLaunchKernel");
    check(f.init(0), "cuInit");
    check(f.device_count(&devices_), "cuDeviceGetCount");
    if (devices_ == 0) {
        throw Error("the CUDA driver sees no GPU");
    }
}

void Driver::check(int result, const char *what) const
{
    if (result == 0) {
        return;
    }
    const char *name = nullptr;
    const char *text = nullptr;
    functions_.error_name(result, &name);
    functions_.error_string(result, &text);
    throw Error(std::string(what) + ": " + (text != nullptr ? text : "unknown error") + " (" +
                (name != nullptr ? name : "CUDA error") + ", " + std::to_string(result) + ")");
}

Context::Context(int device) : device_(device)
{
    const int count = Driver::get().devices();
    if (device < 0 || device >= count) {
        throw Error("there is no GPU " + std::to_string(device) + ": the driver sees " +
                    std::to_string(count));
    }
    check(call().retain(&handle_, device), "cuDevicePrimaryCtxRetain");
    const int result = call().set_current(handle_);
    if (result != 0) {
        call().release(device);
    }
    check(result, "cuCtxSetCurrent");
}

Context::~Context()
{
    call().set_current(nullptr);
    call().release(device_);
}

void Context::use() const
{
    check(call().set_current(handle_), "cuCtxSetCurrent");
}

std::string Context::name() const
{
    std::array<char, 256> name{};
    check(call().device_name(name.data(), static_cast<int>(name.size()) - 1, device_),
          "cuDeviceGetName");
    return name.data();
}

int Context::multiprocessors() const
{
    int count = 0;
    check(call().device_attribute(&count, kMultiprocessorCount, device_), "cuDeviceGetAttribute");
    return count;
}

std::optional<bool> Context::shared_by_mps() const
{
    int shared = 0;
    if (call().device_attribute(&shared, kMpsEnabled, device_) != 0) {
        return std::nullopt;
    }
    return shared != 0;
}

uint64_t Context::free_memory() const
{
    size_t free = 0;
    size_t total = 0;
    check(call().memory_info(&free, &total), "cuMemGetInfo");
    return free;
}

Buffer::Buffer(Memory memory, uint64_t size) : memory_(memory), size_(size)
{
    // The driver refuses to allocate nothing.
    const size_t bytes = size == 0 ? 1 : static_cast<size_t>(size);
    if (memory == Memory::kDevice) {
        check(call().allocate(&address_, bytes), ("cuMemAlloc of " + format_size(bytes)).c_str());
    } else {
        void *pointer = nullptr;
        check(call().host_allocate(&pointer, bytes, kHostMapped),
              ("cuMemHostAlloc of " + format_size(bytes)).c_str());
        address_ = reinterpret_cast<Address>(pointer);
    }
}

Buffer::~Buffer()
{
    if (memory_ == Memory::kDevice) {
        call().free(address_);
    } else {
        call().host_free(pointer());
    }
}

Stream::Stream()
{
    check(call().stream_create(&handle_, kNonBlocking), "cuStreamCreate");
}

Stream::~Stream()
{
    call().stream_destroy(handle_);
}

void Stream::synchronize() const
{
    check(call().stream_synchronize(handle_), "cuStreamSynchronize");
}

void Stream::copy(Address to, Address from, uint64_t size) const
{
    check(call().copy_async(to, from, static_cast<size_t>(size), handle_), "cuMemcpyAsync");
}

void Stream::set_bytes(Address to, uint8_t value, uint64_t size) const
{
    check(call().set_bytes_async(to, value, static_cast<size_t>(size), handle_), "cuMemsetD8Async");
}

Event::Event()
{
    check(call().event_create(&handle_, kEventDefault), "cuEventCreate");
}

Event::~Event()
{
    call().event_destroy(handle_);
}

void Event::record(const Stream &stream) const
{
    check(call().event_record(handle_, stream.handle()), "cuEventRecord");
}

void Event::synchronize() const
{
    check(call().event_synchronize(handle_), "cuEventSynchronize");
}

double Event::since(const Event &start) const
{
    float milliseconds = 0;
    check(call().event_elapsed(&milliseconds, start.handle_, handle_), "cuEventElapsedTime");
    return static_cast<double>(milliseconds) * 1e3;
}

Module::Module(const char *ptx)
{
    check(call().module_load(&handle_, ptx), "cuModuleLoadData");
}

Module::~Module()
{
    call().module_unload(handle_);
}

KernelHandle Module::kernel(const char *name) const
{
    KernelHandle kernel = nullptr;
    check(call().module_function(&kernel, handle_, name), "cuModuleGetFunction");
    return kernel;
}

void launch(KernelHandle kernel, unsigned blocks, unsigned threads, const Stream &stream,
            std::initializer_list<uint64_t> parameters)
{
    constexpr size_t kMost = 8;
    std::array<uint64_t, kMost> values{};
    std::array<void *, kMost> pointers{};
    size_t count = 0;
    for (const uint64_t parameter : parameters) {
        values.at(count) = parameter;
        pointers.at(count) = &values.at(count);
        ++count;
    }
    check(call().launch(kernel, blocks, 1, 1, threads, 1, 1, 0, stream.handle(), pointers.data(),
                        nullptr),
          "cuLaunchKernel");
}

void copy(Address to, Address from, uint64_t size)
{
    check(call().copy(to, from, static_cast<size_t>(size)), "cuMemcpy");
}

} // namespace tools::cuda
