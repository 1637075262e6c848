// SPDX-License-Identifier: BSD-3-Clause
// A CUDA driver for test_gpu_driver.cc. Its name, libcuda.so.1, is the one that the back end asks
// for.
#include <cuda.h>

#include <cstring>
#include <utility>

#include "fake_gpu.h"

#define FAKE_CUDA extern "C" __attribute__((visibility("default")))
#define FAKE_CALL()                                                                                \
    do {                                                                                           \
        if (!fake_gpu().may(__func__))                                                             \
            return CUDA_ERROR_LAUNCH_FAILED;                                                       \
    } while (false)

namespace zip::test {

FakeGpu &fake_gpu()
{
    static FakeGpu gpu;
    return gpu;
}

} // namespace zip::test

using zip::test::fake_gpu;

namespace {

constexpr int MULTIPROCESSORS = 132, SHARED_BYTES = 227 << 10, KERNEL_BYTES = 10000;

} // namespace

FAKE_CUDA CUresult cuGetErrorName(CUresult, const char **name)
{
    *name = "TOLD";
    return CUDA_SUCCESS;
}
FAKE_CUDA CUresult cuGetErrorString(CUresult, const char **text)
{
    *text = "told to fail";
    return CUDA_SUCCESS;
}
FAKE_CUDA CUresult cuCtxGetCurrent(CUcontext *context)
{
    FAKE_CALL();
    *context = static_cast<CUcontext>(fake_gpu().contexts.back());
    return CUDA_SUCCESS;
}
FAKE_CUDA CUresult cuCtxPushCurrent(CUcontext context)
{
    FAKE_CALL();
    fake_gpu().contexts.push_back(context);
    return CUDA_SUCCESS;
}
FAKE_CUDA CUresult cuCtxPopCurrent(CUcontext *context)
{
    FAKE_CALL();
    *context = static_cast<CUcontext>(fake_gpu().contexts.back());
    fake_gpu().contexts.pop_back();
    return CUDA_SUCCESS;
}
FAKE_CUDA CUresult cuCtxGetDevice(CUdevice *device)
{
    FAKE_CALL();
    *device = 0;
    return CUDA_SUCCESS;
}
FAKE_CUDA CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
    FAKE_CALL();
    const int before = std::exchange(fake_gpu().capture_mode, int(*mode));
    *mode = CUstreamCaptureMode(before);
    return CUDA_SUCCESS;
}
FAKE_CUDA CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice)
{
    FAKE_CALL();
    *value = which == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT ? MULTIPROCESSORS : SHARED_BYTES;
    return CUDA_SUCCESS;
}
FAKE_CUDA CUresult cuModuleLoadDataEx(CUmodule *module, const void *, unsigned, CUjit_option *,
                                      void **)
{
    FAKE_CALL();
    *module = static_cast<CUmodule>(fake_gpu().make(1));
    return CUDA_SUCCESS;
}
FAKE_CUDA CUresult cuModuleUnload(CUmodule module)
{
    FAKE_CALL();
    fake_gpu().give_back(module);
    return CUDA_SUCCESS;
}
FAKE_CUDA CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *)
{
    FAKE_CALL();
    *function = reinterpret_cast<CUfunction>(module); // it only has to be something
    return CUDA_SUCCESS;
}
FAKE_CUDA CUresult cuFuncLoad(CUfunction)
{
    FAKE_CALL();
    return CUDA_SUCCESS;
}
FAKE_CUDA CUresult cuFuncGetAttribute(int *value, CUfunction_attribute, CUfunction)
{
    FAKE_CALL();
    *value = KERNEL_BYTES;
    return CUDA_SUCCESS;
}
FAKE_CUDA CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int)
{
    FAKE_CALL();
    return CUDA_SUCCESS;
}
FAKE_CUDA CUresult cuStreamCreate(CUstream *stream, unsigned)
{
    FAKE_CALL();
    *stream = static_cast<CUstream>(fake_gpu().make(1));
    return CUDA_SUCCESS;
}
FAKE_CUDA CUresult cuStreamDestroy(CUstream stream)
{
    FAKE_CALL();
    fake_gpu().give_back(stream);
    return CUDA_SUCCESS;
}
FAKE_CUDA CUresult cuStreamSynchronize(CUstream)
{
    FAKE_CALL();
    return CUDA_SUCCESS;
}
FAKE_CUDA CUresult cuStreamQuery(CUstream)
{
    FAKE_CALL();
    return CUDA_SUCCESS;
}
FAKE_CUDA CUresult cuStreamWriteValue64(CUstream, CUdeviceptr word, cuuint64_t value, unsigned)
{
    FAKE_CALL();
    memcpy(reinterpret_cast<void *>(word), &value, sizeof(value));
    return CUDA_SUCCESS;
}
FAKE_CUDA CUresult cuEventCreate(CUevent *event, unsigned)
{
    FAKE_CALL();
    *event = static_cast<CUevent>(fake_gpu().make(1));
    return CUDA_SUCCESS;
}
FAKE_CUDA CUresult cuEventDestroy(CUevent event)
{
    FAKE_CALL();
    fake_gpu().give_back(event);
    return CUDA_SUCCESS;
}
FAKE_CUDA CUresult cuEventRecord(CUevent, CUstream)
{
    FAKE_CALL();
    return CUDA_SUCCESS;
}
FAKE_CUDA CUresult cuEventQuery(CUevent)
{
    FAKE_CALL();
    return CUDA_SUCCESS;
}
FAKE_CUDA CUresult cuMemAlloc(CUdeviceptr *memory, size_t size)
{
    FAKE_CALL();
    *memory = reinterpret_cast<CUdeviceptr>(fake_gpu().make(size));
    return CUDA_SUCCESS;
}
FAKE_CUDA CUresult cuMemFree(CUdeviceptr memory)
{
    FAKE_CALL();
    fake_gpu().give_back(reinterpret_cast<void *>(memory));
    return CUDA_SUCCESS;
}
FAKE_CUDA CUresult cuMemHostAlloc(void **memory, size_t size, unsigned)
{
    FAKE_CALL();
    *memory = fake_gpu().make(size);
    return CUDA_SUCCESS;
}
FAKE_CUDA CUresult cuMemFreeHost(void *memory)
{
    FAKE_CALL();
    fake_gpu().give_back(memory);
    return CUDA_SUCCESS;
}
FAKE_CUDA CUresult cuMemHostRegister(void *memory, size_t, unsigned)
{
    FAKE_CALL();
    fake_gpu().pinned.insert(memory);
    return CUDA_SUCCESS;
}
FAKE_CUDA CUresult cuMemHostUnregister(void *memory)
{
    FAKE_CALL();
    fake_gpu().pinned.erase(memory);
    return CUDA_SUCCESS;
}
FAKE_CUDA CUresult cuMemGetHandleForAddressRange(void *handle, CUdeviceptr, size_t,
                                                 CUmemRangeHandleType, unsigned long long)
{
    FAKE_CALL();
    *static_cast<int *>(handle) = zip::test::DMABUF;
    return CUDA_SUCCESS;
}
FAKE_CUDA CUresult cuPointerGetAttributes(unsigned, CUpointer_attribute *, void **values,
                                          CUdeviceptr address)
{
    FAKE_CALL();
    const bool is_gpu = fake_gpu().live.contains(reinterpret_cast<void *>(address));
    *static_cast<unsigned *>(values[0]) = is_gpu ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
    *static_cast<int *>(values[1]) = 0;
    *static_cast<void **>(values[2]) = is_gpu ? fake_gpu().context_of_memory : nullptr;
    return CUDA_SUCCESS;
}
FAKE_CUDA CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice)
{
    FAKE_CALL();
    *context = static_cast<CUcontext>(zip::test::PRIMARY_CONTEXT);
    return CUDA_SUCCESS;
}
FAKE_CUDA CUresult cuMemsetD8Async(CUdeviceptr memory, unsigned char value, size_t size, CUstream)
{
    FAKE_CALL();
    memset(reinterpret_cast<void *>(memory), value, size);
    return CUDA_SUCCESS;
}
FAKE_CUDA CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t size, CUstream)
{
    FAKE_CALL();
    memcpy(reinterpret_cast<void *>(to), from, size);
    return CUDA_SUCCESS;
}
FAKE_CUDA CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream)
{
    FAKE_CALL();
    memcpy(reinterpret_cast<void *>(to), reinterpret_cast<const void *>(from), size);
    return CUDA_SUCCESS;
}
FAKE_CUDA CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned,
                                  unsigned, unsigned, CUstream, void **, void **)
{
    FAKE_CALL();
    return CUDA_SUCCESS;
}
