// SPDX-License-Identifier: BSD-3-Clause
// The launcher's driver on CUDA: the driver API alone, found at run time, in the caller's context.
#include <cuda.h>
#include <dlfcn.h>

#include <algorithm>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "kernels/gpu/image.h"
#include "kernels/gpu/launcher.h"

namespace zip::gpu {

namespace {

#define ZIP_CUDA_FUNCTIONS(F)                                                                      \
    F(cuGetErrorName)                                                                              \
    F(cuGetErrorString)                                                                            \
    F(cuCtxGetCurrent)                                                                             \
    F(cuCtxPushCurrent_v2)                                                                         \
    F(cuCtxPopCurrent_v2)                                                                          \
    F(cuCtxGetDevice)                                                                              \
    F(cuPointerGetAttributes)                                                                      \
    F(cuDevicePrimaryCtxRetain)                                                                    \
    F(cuThreadExchangeStreamCaptureMode)                                                           \
    F(cuDeviceGetAttribute)                                                                        \
    F(cuModuleLoadDataEx)                                                                          \
    F(cuModuleUnload)                                                                              \
    F(cuModuleGetFunction)                                                                         \
    F(cuFuncGetAttribute)                                                                          \
    F(cuFuncSetAttribute)                                                                          \
    F(cuStreamCreate)                                                                              \
    F(cuStreamDestroy_v2)                                                                          \
    F(cuStreamSynchronize)                                                                         \
    F(cuStreamQuery)                                                                               \
    F(cuStreamWriteValue64_v2)                                                                     \
    F(cuEventCreate)                                                                               \
    F(cuEventDestroy_v2)                                                                           \
    F(cuEventRecord)                                                                               \
    F(cuEventQuery)                                                                                \
    F(cuMemAlloc_v2)                                                                               \
    F(cuMemFree_v2)                                                                                \
    F(cuMemHostAlloc)                                                                              \
    F(cuMemFreeHost)                                                                               \
    F(cuMemHostRegister_v2)                                                                        \
    F(cuMemHostUnregister)                                                                         \
    F(cuMemsetD8Async)                                                                             \
    F(cuMemcpyHtoDAsync_v2)                                                                        \
    F(cuMemcpyAsync)                                                                               \
    F(cuLaunchKernel)

struct Cuda {
#define ZIP_MEMBER(name) decltype(&::name) name;
    ZIP_CUDA_FUNCTIONS(ZIP_MEMBER)
#undef ZIP_MEMBER
    // Forces a kernel to be loaded; drivers before 12.4 lack it.
    CUresult (*cuFuncLoad)(CUfunction);
    // Drivers before 11.7 lack it.
    CUresult (*cuMemGetHandleForAddressRange)(void *, CUdeviceptr, size_t, CUmemRangeHandleType,
                                              unsigned long long);

    // Null, with a text, where there is no driver. The driver stays open: it cannot be unloaded
    // safely.
    static const Cuda *load();
};

const Cuda *Cuda::load()
{
    static Cuda cuda;
    static const std::string error = []() -> std::string {
        void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        if (library == nullptr)
            return std::string("no CUDA driver: ") + dlerror();
#define ZIP_FIND(name)                                                                             \
    cuda.name = reinterpret_cast<decltype(cuda.name)>(dlsym(library, #name));                      \
    if (cuda.name == nullptr)                                                                      \
        return "the CUDA driver is too old: it lacks " #name;
        ZIP_CUDA_FUNCTIONS(ZIP_FIND)
#undef ZIP_FIND
        cuda.cuFuncLoad = reinterpret_cast<decltype(cuda.cuFuncLoad)>(dlsym(library, "cuFuncLoad"));
        cuda.cuMemGetHandleForAddressRange =
                reinterpret_cast<decltype(cuda.cuMemGetHandleForAddressRange)>(
                        dlsym(library, "cuMemGetHandleForAddressRange"));
        return "";
    }();
    if (error.empty())
        return &cuda;
    fail(ZIP_ERR_NO_DEVICE, "%s", error.c_str());
    return nullptr;
}

class CudaDriver final : public Driver {
public:
    explicit CudaDriver(const Cuda &cuda) : cuda_(cuda) {}
    ~CudaDriver() override
    {
        const ErrorKept kept; // of an open() that failed
        if (modules_.empty() || enter() != ZIP_OK)
            return;
        for (CUmodule module : modules_)
            ignore(cuda_.cuModuleUnload(module));
        leave();
    }
    // Null: the context that is current.
    zip_status_t open(void *context);

    zip_status_t enter() override
    {
        zip_status_t status = check(cuda_.cuCtxPushCurrent_v2(context_), "cuCtxPushCurrent");
        if (status != ZIP_OK)
            return status;
        // somebody else's capture of a stream must not forbid what is done on ours
        capture_mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
        status = check(cuda_.cuThreadExchangeStreamCaptureMode(&capture_mode_),
                       "cuThreadExchangeStreamCaptureMode");
        if (status != ZIP_OK)
            pop_context();
        return status;
    }
    void leave() override
    {
        // Should it fail, the thread stays in the relaxed mode, which forbids nothing; an error
        // that lasts is the next enter()'s, which makes the same call.
        ignore(cuda_.cuThreadExchangeStreamCaptureMode(&capture_mode_));
        pop_context();
    }
    const DeviceInfo &info() const override { return info_; }

    zip_status_t stream_create(void **stream_p) override
    {
        return check(cuda_.cuStreamCreate(reinterpret_cast<CUstream *>(stream_p),
                                          CU_STREAM_NON_BLOCKING),
                     "cuStreamCreate");
    }
    void stream_destroy(void *stream) override
    {
        ignore(cuda_.cuStreamDestroy_v2(static_cast<CUstream>(stream)));
    }
    zip_status_t stream_synchronize(void *stream) override
    {
        return check(cuda_.cuStreamSynchronize(static_cast<CUstream>(stream)),
                     "cuStreamSynchronize");
    }
    zip_status_t stream_query(void *stream, bool *done_p) override
    {
        const CUresult result = cuda_.cuStreamQuery(static_cast<CUstream>(stream));
        *done_p = result == CUDA_SUCCESS;
        return result == CUDA_ERROR_NOT_READY ? ZIP_OK : check(result, "cuStreamQuery");
    }
    zip_status_t event_create(void **event_p) override
    {
        return check(
                cuda_.cuEventCreate(reinterpret_cast<CUevent *>(event_p), CU_EVENT_DISABLE_TIMING),
                "cuEventCreate");
    }
    void event_destroy(void *event) override
    {
        ignore(cuda_.cuEventDestroy_v2(static_cast<CUevent>(event)));
    }
    zip_status_t event_record(void *event, void *stream) override
    {
        return check(
                cuda_.cuEventRecord(static_cast<CUevent>(event), static_cast<CUstream>(stream)),
                "cuEventRecord");
    }
    zip_status_t event_query(void *event, bool *done_p) override
    {
        const CUresult result = cuda_.cuEventQuery(static_cast<CUevent>(event));
        *done_p = result == CUDA_SUCCESS;
        return result == CUDA_ERROR_NOT_READY ? ZIP_OK : check(result, "cuEventQuery");
    }

    zip_status_t allocate_device(size_t size, void **memory_p) override
    {
        CUdeviceptr address = 0;
        const zip_status_t status = check(cuda_.cuMemAlloc_v2(&address, size), "cuMemAlloc");
        *memory_p = reinterpret_cast<void *>(address);
        return status;
    }
    void free_device(void *memory) override { ignore(cuda_.cuMemFree_v2(address_of(memory))); }
    zip_status_t allocate_pinned(size_t size, void **memory_p) override
    {
        return check(cuda_.cuMemHostAlloc(memory_p, size, CU_MEMHOSTALLOC_PORTABLE),
                     "cuMemHostAlloc");
    }
    void free_pinned(void *memory) override { ignore(cuda_.cuMemFreeHost(memory)); }
    zip_status_t pin(void *memory, size_t size) override
    {
        return check(cuda_.cuMemHostRegister_v2(memory, size, CU_MEMHOSTREGISTER_PORTABLE),
                     "cuMemHostRegister");
    }
    void unpin(void *memory) override { ignore(cuda_.cuMemHostUnregister(memory)); }
    zip_status_t dmabuf(void *device_memory, size_t size, int *fd_p) override
    {
        if (cuda_.cuMemGetHandleForAddressRange == nullptr)
            return fail(ZIP_ERR_DEVICE, "the CUDA driver is too old for dma-buf");
        // whole pages of the host, which allocations are made of
        constexpr size_t PAGE = 4096;
        return check(cuda_.cuMemGetHandleForAddressRange(fd_p, address_of(device_memory),
                                                         (size + PAGE - 1) / PAGE * PAGE,
                                                         CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0),
                     "cuMemGetHandleForAddressRange");
    }
    zip_status_t clear(void *device_memory, size_t size, void *stream) override
    {
        return check(cuda_.cuMemsetD8Async(address_of(device_memory), 0, size,
                                           static_cast<CUstream>(stream)),
                     "cuMemsetD8Async");
    }
    zip_status_t copy_to_device(void *device_memory, const void *pinned, size_t size,
                                void *stream) override
    {
        return check(cuda_.cuMemcpyHtoDAsync_v2(address_of(device_memory), pinned, size,
                                                static_cast<CUstream>(stream)),
                     "cuMemcpyHtoDAsync");
    }
    zip_status_t copy(void *to, const void *from, size_t size, void *stream) override
    {
        return check(cuda_.cuMemcpyAsync(address_of(to), address_of(const_cast<void *>(from)), size,
                                         static_cast<CUstream>(stream)),
                     "cuMemcpyAsync");
    }
    zip_status_t write(uint64_t *word, uint64_t value, void *stream) override
    {
        return check(cuda_.cuStreamWriteValue64_v2(static_cast<CUstream>(stream), address_of(word),
                                                   value, CU_STREAM_WRITE_VALUE_DEFAULT),
                     "cuStreamWriteValue64");
    }
    zip_status_t launch(Kernel kernel, uint32_t blocks, uint32_t threads, bool filling,
                        void *stream, const Launch &launch) override
    {
        void *arguments[] = {const_cast<Launch *>(&launch)};
        const uint32_t k = number_of(kernel);
        const CUresult result =
                cuda_.cuLaunchKernel(functions_[k], blocks, 1, 1, threads, 1, 1,
                                     filling ? filling_bytes_[k] : dynamic_bytes_[k],
                                     static_cast<CUstream>(stream), arguments, nullptr);
        return result == CUDA_SUCCESS ? ZIP_OK : check(result, name_of(kernel).c_str());
    }

private:
    static CUdeviceptr address_of(void *memory) { return reinterpret_cast<CUdeviceptr>(memory); }
    // Of calls that give something back, at the end of what used it. They fail where the context
    // has an error that every call returns (whoever used it has been told, and nothing can be done
    // in that context any more), or is gone; what they leave goes with the context.
    static void ignore(CUresult) {}
    // Makes the caller's context current again. It can only fail where the driver has ended.
    void pop_context()
    {
        CUcontext own;
        ignore(cuda_.cuCtxPopCurrent_v2(&own));
    }

    zip_status_t check(CUresult result, const char *what) const
    {
        if (result == CUDA_SUCCESS)
            return ZIP_OK;
        const char *name = nullptr, *text = nullptr;
        // of an error that the driver does not know they make null
        ignore(cuda_.cuGetErrorName(result, &name));
        ignore(cuda_.cuGetErrorString(result, &text));
        return fail(ZIP_ERR_DEVICE, "%s: %s (%s)", what, text != nullptr ? text : "unknown error",
                    name != nullptr ? name : "?");
    }
    zip_status_t attribute(CUdevice device, CUdevice_attribute which, uint32_t *value_p) const
    {
        int value = 0;
        const zip_status_t status =
                check(cuda_.cuDeviceGetAttribute(&value, which, device), "cuDeviceGetAttribute");
        *value_p = uint32_t(value);
        return status;
    }
    zip_status_t load_modules(CUdevice device);
    zip_status_t find_kernel(Kernel kernel);
    zip_status_t prepare_kernels(CUdevice device);

    const Cuda &cuda_;
    CUcontext context_ = nullptr;
    std::vector<CUmodule> modules_;
    CUfunction functions_[KERNELS] = {};
    uint32_t dynamic_bytes_[KERNELS] = {}; // shared memory of a launch
    uint32_t filling_bytes_[KERNELS] = {}; // so that a multiprocessor holds one block
    DeviceInfo info_{};
    static thread_local CUstreamCaptureMode capture_mode_; // the calling thread's own
};
thread_local CUstreamCaptureMode CudaDriver::capture_mode_;

zip_status_t CudaDriver::open(void *context)
{
    context_ = static_cast<CUcontext>(context);
    if (context_ == nullptr &&
        (cuda_.cuCtxGetCurrent(&context_) != CUDA_SUCCESS || context_ == nullptr))
        return fail(ZIP_ERR_NO_DEVICE, "no CUDA context is current in the calling thread");
    zip_status_t status = enter();
    if (status != ZIP_OK)
        return status;
    CUdevice device;
    status = check(cuda_.cuCtxGetDevice(&device), "cuCtxGetDevice");
    if (status == ZIP_OK)
        status =
                attribute(device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, &info_.multiprocessors);
    if (status == ZIP_OK)
        status = attribute(device, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
                           &info_.shared_bytes);
    if (status == ZIP_OK)
        status = load_modules(device);
    if (status == ZIP_OK)
        status = prepare_kernels(device);
    leave();
    return status;
}

zip_status_t CudaDriver::load_modules(CUdevice device)
{
    for (const Image *image = zip_gpu_images; image->name != nullptr; ++image) {
        char log[400] = "";
        CUjit_option options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
        void *values[] = {log, reinterpret_cast<void *>(sizeof log)};
        CUmodule module;
        const CUresult result = cuda_.cuModuleLoadDataEx(&module, image->code, 2, options, values);
        if (result != CUDA_SUCCESS) {
            uint32_t major = 0, minor = 0; // as they stay where the driver does not say
            attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, &major);
            attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, &minor);
            check(result, "cuModuleLoadDataEx");
            const std::string text = error_text();
            const bool unknown = result == CUDA_ERROR_NO_BINARY_FOR_GPU;
            return fail(unknown ? ZIP_ERR_NO_DEVICE : ZIP_ERR_DEVICE,
                        "kernels of %s for compute capability %u.%u: %s%s%s", image->name, major,
                        minor, text.c_str(), *log != 0 ? ": " : "", log);
        }
        modules_.push_back(module);
    }
    return ZIP_OK;
}

zip_status_t CudaDriver::find_kernel(Kernel kernel)
{
    CUresult result = CUDA_ERROR_NOT_FOUND;
    for (size_t m = 0; m < modules_.size() && result == CUDA_ERROR_NOT_FOUND; ++m)
        result = cuda_.cuModuleGetFunction(&functions_[number_of(kernel)], modules_[m],
                                           name_of(kernel).c_str());
    return check(result, name_of(kernel).c_str());
}

zip_status_t CudaDriver::prepare_kernels(CUdevice device)
{
    zip_status_t status = ZIP_OK;
    int static_bytes[KERNELS] = {};
    uint32_t worker_bytes = 0; // most that a kernel for all multiprocessors has
    for (uint32_t k = 0; k < KERNELS && status == ZIP_OK; ++k) {
        const Kernel kernel = kernel_of(k);
        if (!exists(kernel))
            continue;
        status = find_kernel(kernel);
        // With lazy loading a kernel is loaded at its first launch, which may wait for kernels that
        // spin.
        if (status == ZIP_OK && cuda_.cuFuncLoad != nullptr)
            status = check(cuda_.cuFuncLoad(functions_[k]), "cuFuncLoad");
        if (status == ZIP_OK)
            status = check(cuda_.cuFuncGetAttribute(&static_bytes[k],
                                                    CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
                                                    functions_[k]),
                           "cuFuncGetAttribute");
        if (kernel.codes() && kernel.shape != format::SHAPE_DENSE)
            worker_bytes = std::max(worker_bytes, uint32_t(static_bytes[k]));
    }
    uint32_t block_bytes = 0;
    if (status == ZIP_OK)
        status = attribute(device, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
                           &block_bytes);
    if (status != ZIP_OK)
        return status;
    // a block of the kernels for few multiprocessors has as many workers as fit
    info_.few_threads = std::min(FEW_SM_THREADS,
                                 block_bytes / std::max(worker_bytes, 1u) * uint32_t(TILE_THREADS));
    for (uint32_t k = 0; k < KERNELS && status == ZIP_OK; ++k) {
        const Kernel kernel = kernel_of(k);
        if (!kernel.codes() || !exists(kernel))
            continue;
        uint32_t bytes = 0;
        if (kernel.few) {
            // each worker has what a block of the kernel for all multiprocessors has
            const uint32_t all =
                    number_of({kernel.action, false, false, kernel.dtype, kernel.shape});
            bytes = dynamic_bytes_[k] =
                    info_.few_threads / TILE_THREADS * uint32_t(static_bytes[all]);
        } else if (kernel.shape == format::SHAPE_DENSE) {
            constexpr uint32_t UNIT = 128; // shared memory is given out in pieces of it
            const uint32_t half = info_.shared_bytes / 2 / UNIT * UNIT + UNIT;
            const auto own = uint32_t(static_bytes[k]);
            bytes = filling_bytes_[k] = half > own ? half - own : 0;
        }
        if (bytes != 0)
            status = check(cuda_.cuFuncSetAttribute(functions_[k],
                                                    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                                    int(bytes)),
                           name_of(kernel).c_str());
    }
    return status;
}

zip_status_t query_cuda(const void *address, zip_gpu_memory_t *memory_p)
{
    if (memory_p == nullptr)
        return fail(ZIP_ERR_INVALID_PARAM, "memory_p is null");
    *memory_p = {};
    const Cuda *cuda = Cuda::load();
    if (cuda == nullptr)
        return ZIP_ERR_NO_DEVICE;
    unsigned type = 0;
    int device = 0;
    CUcontext context = nullptr;
    CUpointer_attribute which[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                   CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                                   CU_POINTER_ATTRIBUTE_CONTEXT};
    void *values[] = {&type, &device, &context};
    const auto at = reinterpret_cast<CUdeviceptr>(address);
    // Fails before the application has initialised CUDA, too: then it has no GPU memory yet.
    if (cuda->cuPointerGetAttributes(3, which, values, at) != CUDA_SUCCESS ||
        type != CU_MEMORYTYPE_DEVICE)
        return ZIP_OK;
    CUdevice of_current;
    if (context == nullptr &&
        (cuda->cuCtxGetCurrent(&context) != CUDA_SUCCESS || context == nullptr ||
         cuda->cuCtxGetDevice(&of_current) != CUDA_SUCCESS || of_current != device) &&
        cuda->cuDevicePrimaryCtxRetain(&context, device) != CUDA_SUCCESS)
        return fail(ZIP_ERR_DEVICE, "GPU %d has no primary context", device);
    *memory_p = {1, device, context};
    return ZIP_OK;
}

zip_status_t open_cuda(const zip_gpu_memory_t *where, zip_gpu_t **gpu_p)
{
    if (gpu_p == nullptr)
        return fail(ZIP_ERR_INVALID_PARAM, "gpu_p is null");
    const Cuda *cuda = Cuda::load();
    if (cuda == nullptr)
        return ZIP_ERR_NO_DEVICE;
    std::unique_ptr<CudaDriver> driver(new (std::nothrow) CudaDriver(*cuda));
    if (driver == nullptr)
        return fail(ZIP_ERR_DEVICE, "out of host memory");
    const zip_status_t status = driver->open(where != nullptr ? where->context : nullptr);
    return status == ZIP_OK ? open_with(std::move(driver), gpu_p) : status;
}

const zip_gpu_api_t cuda_api = make_api("cuda", query_cuda, open_cuda);

} // namespace

} // namespace zip::gpu

extern "C" __attribute__((visibility("default"))) const zip_gpu_api_t *ZIP_GPU_BACK_END()
{
    return &zip::gpu::cuda_api;
}
