// SPDX-License-Identifier: BSD-3-Clause
// The launcher's driver on HIP: the runtime's functions, found at run time, on the caller's device.
#include <dlfcn.h>
#include <hip/hip_runtime_api.h>

#include <memory>
#include <new>
#include <string>
#include <vector>

#include "kernels/gpu/image.h"
#include "kernels/gpu/launcher.h"

namespace zip::gpu {

namespace {

// HIP's header overloads some of these with templates, so that their types are spelled here.
struct Hip {
    const char *(*hipGetErrorName)(hipError_t);
    const char *(*hipGetErrorString)(hipError_t);
    hipError_t (*hipGetDevice)(int *);
    hipError_t (*hipSetDevice)(int);
    hipError_t (*hipThreadExchangeStreamCaptureMode)(hipStreamCaptureMode *);
    hipError_t (*hipDeviceGetAttribute)(int *, hipDeviceAttribute_t, int);
    hipError_t (*hipModuleLoadData)(hipModule_t *, const void *);
    hipError_t (*hipModuleUnload)(hipModule_t);
    hipError_t (*hipModuleGetFunction)(hipFunction_t *, hipModule_t, const char *);
    hipError_t (*hipFuncGetAttribute)(int *, hipFunction_attribute, hipFunction_t);
    hipError_t (*hipStreamCreateWithFlags)(hipStream_t *, unsigned);
    hipError_t (*hipStreamDestroy)(hipStream_t);
    hipError_t (*hipStreamSynchronize)(hipStream_t);
    hipError_t (*hipStreamQuery)(hipStream_t);
    hipError_t (*hipStreamWriteValue64)(hipStream_t, void *, uint64_t, unsigned);
    hipError_t (*hipPointerGetAttribute)(void *, hipPointer_attribute, hipDeviceptr_t);
    hipError_t (*hipEventCreateWithFlags)(hipEvent_t *, unsigned);
    hipError_t (*hipEventDestroy)(hipEvent_t);
    hipError_t (*hipEventRecord)(hipEvent_t, hipStream_t);
    hipError_t (*hipEventQuery)(hipEvent_t);
    hipError_t (*hipMalloc)(void **, size_t);
    hipError_t (*hipFree)(void *);
    hipError_t (*hipHostMalloc)(void **, size_t, unsigned);
    hipError_t (*hipHostFree)(void *);
    hipError_t (*hipHostRegister)(void *, size_t, unsigned);
    hipError_t (*hipHostUnregister)(void *);
    hipError_t (*hipMemsetAsync)(void *, int, size_t, hipStream_t);
    hipError_t (*hipMemcpyAsync)(void *, const void *, size_t, hipMemcpyKind, hipStream_t);
    hipError_t (*hipModuleLaunchKernel)(hipFunction_t, unsigned, unsigned, unsigned, unsigned,
                                        unsigned, unsigned, unsigned, hipStream_t, void **,
                                        void **);

    // Null, with a text, where there is no runtime. It stays open: it cannot be unloaded safely.
    static const Hip *load();
};

const Hip *Hip::load()
{
    static Hip hip;
    static const std::string error = []() -> std::string {
        void *library = nullptr;
        for (const char *name : {"libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so"}) {
            library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
            if (library != nullptr)
                break;
        }
        if (library == nullptr)
            return std::string("no HIP runtime: ") + dlerror();
#define ZIP_FIND(name)                                                                             \
    hip.name = reinterpret_cast<decltype(hip.name)>(dlsym(library, #name));                        \
    if (hip.name == nullptr)                                                                       \
        return "the HIP runtime is too old: it lacks " #name;
        ZIP_FIND(hipGetErrorName)
        ZIP_FIND(hipGetErrorString)
        ZIP_FIND(hipGetDevice)
        ZIP_FIND(hipSetDevice)
        ZIP_FIND(hipThreadExchangeStreamCaptureMode)
        ZIP_FIND(hipDeviceGetAttribute)
        ZIP_FIND(hipModuleLoadData)
        ZIP_FIND(hipModuleUnload)
        ZIP_FIND(hipModuleGetFunction)
        ZIP_FIND(hipFuncGetAttribute)
        ZIP_FIND(hipStreamCreateWithFlags)
        ZIP_FIND(hipStreamDestroy)
        ZIP_FIND(hipStreamSynchronize)
        ZIP_FIND(hipStreamQuery)
        ZIP_FIND(hipStreamWriteValue64)
        ZIP_FIND(hipPointerGetAttribute)
        ZIP_FIND(hipEventCreateWithFlags)
        ZIP_FIND(hipEventDestroy)
        ZIP_FIND(hipEventRecord)
        ZIP_FIND(hipEventQuery)
        ZIP_FIND(hipMalloc)
        ZIP_FIND(hipFree)
        ZIP_FIND(hipHostMalloc)
        ZIP_FIND(hipHostFree)
        ZIP_FIND(hipHostRegister)
        ZIP_FIND(hipHostUnregister)
        ZIP_FIND(hipMemsetAsync)
        ZIP_FIND(hipMemcpyAsync)
        ZIP_FIND(hipModuleLaunchKernel)
#undef ZIP_FIND
        return "";
    }();
    if (error.empty())
        return &hip;
    fail(ZIP_ERR_NO_DEVICE, "%s", error.c_str());
    return nullptr;
}

class HipDriver final : public Driver {
public:
    explicit HipDriver(const Hip &hip) : hip_(hip) {}
    ~HipDriver() override
    {
        const ErrorKept kept; // of an open() that failed
        if (modules_.empty() || enter() != ZIP_OK)
            return;
        for (hipModule_t module : modules_)
            ignore(hip_.hipModuleUnload(module));
        leave();
    }
    // Negative: the calling thread's device.
    zip_status_t open(int device);

    zip_status_t enter() override
    {
        zip_status_t status = check(hip_.hipGetDevice(&callers_device_), "hipGetDevice");
        if (status == ZIP_OK && callers_device_ != device_)
            status = check(hip_.hipSetDevice(device_), "hipSetDevice");
        if (status != ZIP_OK)
            return status;
        // somebody else's capture of a stream must not forbid what is done on ours
        capture_mode_ = hipStreamCaptureModeRelaxed;
        status = check(hip_.hipThreadExchangeStreamCaptureMode(&capture_mode_),
                       "hipThreadExchangeStreamCaptureMode");
        if (status != ZIP_OK)
            restore_device();
        return status;
    }
    void leave() override
    {
        // Should it fail, the thread stays in the relaxed mode, which forbids nothing; an error
        // that lasts is the next enter()'s, which makes the same call.
        ignore(hip_.hipThreadExchangeStreamCaptureMode(&capture_mode_));
        restore_device();
    }
    const DeviceInfo &info() const override { return info_; }

    zip_status_t stream_create(void **stream_p) override
    {
        return check(hip_.hipStreamCreateWithFlags(reinterpret_cast<hipStream_t *>(stream_p),
                                                   hipStreamNonBlocking),
                     "hipStreamCreate");
    }
    void stream_destroy(void *stream) override
    {
        ignore(hip_.hipStreamDestroy(static_cast<hipStream_t>(stream)));
    }
    zip_status_t stream_synchronize(void *stream) override
    {
        return check(hip_.hipStreamSynchronize(static_cast<hipStream_t>(stream)),
                     "hipStreamSynchronize");
    }
    zip_status_t stream_query(void *stream, bool *done_p) override
    {
        const hipError_t result = hip_.hipStreamQuery(static_cast<hipStream_t>(stream));
        *done_p = result == hipSuccess;
        return result == hipErrorNotReady ? ZIP_OK : check(result, "hipStreamQuery");
    }
    zip_status_t event_create(void **event_p) override
    {
        return check(hip_.hipEventCreateWithFlags(reinterpret_cast<hipEvent_t *>(event_p),
                                                  hipEventDisableTiming),
                     "hipEventCreate");
    }
    void event_destroy(void *event) override
    {
        ignore(hip_.hipEventDestroy(static_cast<hipEvent_t>(event)));
    }
    zip_status_t event_record(void *event, void *stream) override
    {
        return check(hip_.hipEventRecord(static_cast<hipEvent_t>(event),
                                         static_cast<hipStream_t>(stream)),
                     "hipEventRecord");
    }
    zip_status_t event_query(void *event, bool *done_p) override
    {
        const hipError_t result = hip_.hipEventQuery(static_cast<hipEvent_t>(event));
        *done_p = result == hipSuccess;
        return result == hipErrorNotReady ? ZIP_OK : check(result, "hipEventQuery");
    }

    zip_status_t allocate_device(size_t size, void **memory_p) override
    {
        return check(hip_.hipMalloc(memory_p, size), "hipMalloc");
    }
    void free_device(void *memory) override { ignore(hip_.hipFree(memory)); }
    zip_status_t allocate_pinned(size_t size, void **memory_p) override
    {
        return check(hip_.hipHostMalloc(memory_p, size, hipHostMallocPortable), "hipHostMalloc");
    }
    void free_pinned(void *memory) override { ignore(hip_.hipHostFree(memory)); }
    zip_status_t pin(void *memory, size_t size) override
    {
        return check(hip_.hipHostRegister(memory, size, hipHostRegisterPortable),
                     "hipHostRegister");
    }
    void unpin(void *memory) override { ignore(hip_.hipHostUnregister(memory)); }
    zip_status_t dmabuf(void *, size_t, int *) override
    {
        return fail(ZIP_ERR_DEVICE, "no dma-buf of HIP memory"); // UCX registers it by its address
    }
    zip_status_t clear(void *device_memory, size_t size, void *stream) override
    {
        return check(hip_.hipMemsetAsync(device_memory, 0, size, static_cast<hipStream_t>(stream)),
                     "hipMemsetAsync");
    }
    zip_status_t copy_to_device(void *device_memory, const void *pinned, size_t size,
                                void *stream) override
    {
        return check(hip_.hipMemcpyAsync(device_memory, pinned, size, hipMemcpyHostToDevice,
                                         static_cast<hipStream_t>(stream)),
                     "hipMemcpyAsync");
    }
    zip_status_t copy(void *to, const void *from, size_t size, void *stream) override
    {
        return check(hip_.hipMemcpyAsync(to, from, size, hipMemcpyDefault,
                                         static_cast<hipStream_t>(stream)),
                     "hipMemcpyAsync");
    }
    zip_status_t write(uint64_t *word, uint64_t value, void *stream) override
    {
        return check(hip_.hipStreamWriteValue64(static_cast<hipStream_t>(stream), word, value, 0),
                     "hipStreamWriteValue64");
    }
    zip_status_t launch(Kernel kernel, uint32_t blocks, uint32_t threads, bool filling,
                        void *stream, const Launch &launch) override
    {
        void *arguments[] = {const_cast<Launch *>(&launch)};
        const uint32_t k = number_of(kernel);
        const hipError_t result =
                hip_.hipModuleLaunchKernel(functions_[k], blocks, 1, 1, threads, 1, 1,
                                           filling ? filling_bytes_[k] : dynamic_bytes_[k],
                                           static_cast<hipStream_t>(stream), arguments, nullptr);
        return result == hipSuccess ? ZIP_OK : check(result, name_of(kernel).c_str());
    }

private:
    // Of calls that give something back, at the end of what used it. They fail where the device has
    // an error that every call returns (whoever used it has been told, and nothing can be done on
    // that device any more); what they leave goes with the process.
    static void ignore(hipError_t) {}
    // The calling thread's device. It was its own, so that it can only fail where the runtime has
    // ended.
    void restore_device()
    {
        if (callers_device_ != device_)
            ignore(hip_.hipSetDevice(callers_device_));
    }
    zip_status_t check(hipError_t result, const char *what) const
    {
        if (result == hipSuccess)
            return ZIP_OK;
        return fail(ZIP_ERR_DEVICE, "%s: %s (%s)", what, hip_.hipGetErrorString(result),
                    hip_.hipGetErrorName(result));
    }
    zip_status_t attribute(hipDeviceAttribute_t which, uint32_t *value_p) const
    {
        int value = 0;
        const zip_status_t status =
                check(hip_.hipDeviceGetAttribute(&value, which, device_), "hipDeviceGetAttribute");
        *value_p = uint32_t(value);
        return status;
    }
    zip_status_t load_modules();
    zip_status_t find_kernel(Kernel kernel);
    zip_status_t prepare_kernels();

    const Hip &hip_;
    int device_ = 0;
    std::vector<hipModule_t> modules_;
    hipFunction_t functions_[KERNELS] = {};
    uint32_t dynamic_bytes_[KERNELS] = {}; // shared memory of a launch
    uint32_t filling_bytes_[KERNELS] = {}; // so that a multiprocessor holds one block
    DeviceInfo info_{};
    // the calling thread's own, inside a call
    static thread_local int callers_device_;
    static thread_local hipStreamCaptureMode capture_mode_;
};
thread_local int HipDriver::callers_device_;
thread_local hipStreamCaptureMode HipDriver::capture_mode_;

zip_status_t HipDriver::open(int device)
{
    device_ = device;
    const hipError_t result = device < 0 ? hip_.hipGetDevice(&device_) : hipSuccess;
    if (result != hipSuccess)
        return fail(ZIP_ERR_NO_DEVICE, "no HIP device: %s", hip_.hipGetErrorString(result));
    zip_status_t status = attribute(hipDeviceAttributeMultiprocessorCount, &info_.multiprocessors);
    if (status == ZIP_OK)
        status = attribute(hipDeviceAttributeMaxSharedMemoryPerMultiprocessor, &info_.shared_bytes);
    info_.few_threads = TILE_THREADS; // no named barriers: one worker a block (simt.h)
    if (status == ZIP_OK)
        status = enter();
    if (status != ZIP_OK)
        return status;
    status = load_modules();
    if (status == ZIP_OK)
        status = prepare_kernels();
    leave();
    return status;
}

zip_status_t HipDriver::load_modules()
{
    std::string names;
    for (const Image *image = zip_gpu_images; image->name != nullptr; ++image) {
        hipModule_t module;
        // the runtime knows which of them are for its device
        const hipError_t result = hip_.hipModuleLoadData(&module, image->code);
        if (result == hipSuccess)
            modules_.push_back(module);
        else if (result != hipErrorNoBinaryForGpu && result != hipErrorInvalidImage &&
                 result != hipErrorInvalidKernelFile && result != hipErrorSharedObjectInitFailed)
            return check(result, "hipModuleLoadData");
        names += std::string(names.empty() ? "" : ", ") + image->name;
    }
    return modules_.empty() ? fail(ZIP_ERR_NO_DEVICE,
                                   "no kernels for this GPU: they were built for %s", names.c_str())
                            : ZIP_OK;
}

zip_status_t HipDriver::find_kernel(Kernel kernel)
{
    hipError_t result = hipErrorNotFound;
    for (size_t m = 0; m < modules_.size() && result == hipErrorNotFound; ++m)
        result = hip_.hipModuleGetFunction(&functions_[number_of(kernel)], modules_[m],
                                           name_of(kernel).c_str());
    return check(result, name_of(kernel).c_str());
}

zip_status_t HipDriver::prepare_kernels()
{
    zip_status_t status = ZIP_OK;
    int static_bytes[KERNELS] = {};
    for (uint32_t k = 0; k < KERNELS && status == ZIP_OK; ++k) {
        const Kernel kernel = kernel_of(k);
        if (!exists(kernel))
            continue;
        status = find_kernel(kernel);
        if (status == ZIP_OK)
            status = check(hip_.hipFuncGetAttribute(&static_bytes[k],
                                                    HIP_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
                                                    functions_[k]),
                           "hipFuncGetAttribute");
        const auto own = uint32_t(static_bytes[k]);
        if (!kernel.codes()) {
            continue;
        } else if (kernel.few) {
            // its worker has what a block of the kernel for all multiprocessors has
            const uint32_t all =
                    number_of({kernel.action, false, false, kernel.dtype, kernel.shape});
            dynamic_bytes_[k] = uint32_t(static_bytes[all]);
        } else if (kernel.shape == format::SHAPE_DENSE) {
            constexpr uint32_t UNIT = 512; // shared memory is given out in pieces of it
            const uint32_t half = info_.shared_bytes / 2 / UNIT * UNIT + UNIT;
            filling_bytes_[k] = half > own ? half - own : 0;
        }
    }
    return status;
}

zip_status_t query_hip(const void *address, zip_gpu_memory_t *memory_p)
{
    if (memory_p == nullptr)
        return fail(ZIP_ERR_INVALID_PARAM, "memory_p is null");
    *memory_p = {};
    const Hip *hip = Hip::load();
    if (hip == nullptr)
        return ZIP_ERR_NO_DEVICE;
    hipMemoryType type{};
    int device = 0;
    auto *const at = const_cast<void *>(address);
    if (hip->hipPointerGetAttribute(&type, HIP_POINTER_ATTRIBUTE_MEMORY_TYPE, at) == hipSuccess &&
        type == hipMemoryTypeDevice &&
        hip->hipPointerGetAttribute(&device, HIP_POINTER_ATTRIBUTE_DEVICE_ORDINAL, at) ==
                hipSuccess)
        *memory_p = {1, device, nullptr};
    return ZIP_OK;
}

zip_status_t open_hip(const zip_gpu_memory_t *where, zip_gpu_t **gpu_p)
{
    if (gpu_p == nullptr)
        return fail(ZIP_ERR_INVALID_PARAM, "gpu_p is null");
    const Hip *hip = Hip::load();
    if (hip == nullptr)
        return ZIP_ERR_NO_DEVICE;
    std::unique_ptr<HipDriver> driver(new (std::nothrow) HipDriver(*hip));
    if (driver == nullptr)
        return fail(ZIP_ERR_DEVICE, "out of host memory");
    const zip_status_t status = driver->open(where != nullptr ? where->device : -1);
    return status == ZIP_OK ? open_with(std::move(driver), gpu_p) : status;
}

const zip_gpu_api_t hip_api = make_api("hip", query_hip, open_hip);

} // namespace

} // namespace zip::gpu

extern "C" __attribute__((visibility("default"))) const zip_gpu_api_t *ZIP_GPU_BACK_END()
{
    return &zip::gpu::hip_api;
}
