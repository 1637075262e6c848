// SPDX-License-Identifier: BSD-3-Clause
// A HIP runtime for test_gpu_driver.cc. Its name, libamdhip64.so.6, is the one that the back end
// asks for first.
#include <hip/hip_runtime_api.h>

#include <cstring>
#include <utility>

#include "fake_gpu.h"

#define FAKE_HIP extern "C" __attribute__((visibility("default")))
#define FAKE_CALL()                                                                                \
    do {                                                                                           \
        if (!fake_gpu().may(__func__))                                                             \
            return hipErrorUnknown;                                                                \
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

constexpr int MULTIPROCESSORS = 304, SHARED_BYTES = 64 << 10, KERNEL_BYTES = 10000;

} // namespace

FAKE_HIP const char *hipGetErrorName(hipError_t)
{
    return "TOLD";
}
FAKE_HIP const char *hipGetErrorString(hipError_t)
{
    return "told to fail";
}
FAKE_HIP hipError_t hipGetDevice(int *device)
{
    FAKE_CALL();
    *device = int(reinterpret_cast<intptr_t>(fake_gpu().contexts.back()));
    return hipSuccess;
}
FAKE_HIP hipError_t hipSetDevice(int device)
{
    FAKE_CALL();
    fake_gpu().contexts.back() = reinterpret_cast<void *>(intptr_t(device));
    return hipSuccess;
}
FAKE_HIP hipError_t hipThreadExchangeStreamCaptureMode(hipStreamCaptureMode *mode)
{
    FAKE_CALL();
    const int before = std::exchange(fake_gpu().capture_mode, int(*mode));
    *mode = hipStreamCaptureMode(before);
    return hipSuccess;
}
FAKE_HIP hipError_t hipDeviceGetAttribute(int *value, hipDeviceAttribute_t which, int)
{
    FAKE_CALL();
    *value = which == hipDeviceAttributeMultiprocessorCount ? MULTIPROCESSORS : SHARED_BYTES;
    return hipSuccess;
}
FAKE_HIP hipError_t hipModuleLoadData(hipModule_t *module, const void *)
{
    FAKE_CALL();
    *module = static_cast<hipModule_t>(fake_gpu().make(1));
    return hipSuccess;
}
FAKE_HIP hipError_t hipModuleUnload(hipModule_t module)
{
    FAKE_CALL();
    fake_gpu().give_back(module);
    return hipSuccess;
}
FAKE_HIP hipError_t hipModuleGetFunction(hipFunction_t *function, hipModule_t module, const char *)
{
    FAKE_CALL();
    *function = reinterpret_cast<hipFunction_t>(module); // it only has to be something
    return hipSuccess;
}
FAKE_HIP hipError_t hipFuncGetAttribute(int *value, hipFunction_attribute, hipFunction_t)
{
    FAKE_CALL();
    *value = KERNEL_BYTES;
    return hipSuccess;
}
FAKE_HIP hipError_t hipStreamCreateWithFlags(hipStream_t *stream, unsigned)
{
    FAKE_CALL();
    *stream = static_cast<hipStream_t>(fake_gpu().make(1));
    return hipSuccess;
}
FAKE_HIP hipError_t hipStreamDestroy(hipStream_t stream)
{
    FAKE_CALL();
    fake_gpu().give_back(stream);
    return hipSuccess;
}
FAKE_HIP hipError_t hipStreamSynchronize(hipStream_t)
{
    FAKE_CALL();
    return hipSuccess;
}
FAKE_HIP hipError_t hipStreamQuery(hipStream_t)
{
    FAKE_CALL();
    return hipSuccess;
}
FAKE_HIP hipError_t hipStreamWriteValue64(hipStream_t, void *word, uint64_t value, unsigned)
{
    FAKE_CALL();
    memcpy(word, &value, sizeof(value));
    return hipSuccess;
}
FAKE_HIP hipError_t hipPointerGetAttribute(void *value, hipPointer_attribute which,
                                           hipDeviceptr_t address)
{
    FAKE_CALL();
    const bool is_gpu = fake_gpu().live.contains(address);
    if (which == HIP_POINTER_ATTRIBUTE_MEMORY_TYPE) {
        *static_cast<hipMemoryType *>(value) = is_gpu ? hipMemoryTypeDevice : hipMemoryTypeHost;
    } else {
        *static_cast<int *>(value) = 0;
    }
    return hipSuccess;
}
FAKE_HIP hipError_t hipEventCreateWithFlags(hipEvent_t *event, unsigned)
{
    FAKE_CALL();
    *event = static_cast<hipEvent_t>(fake_gpu().make(1));
    return hipSuccess;
}
FAKE_HIP hipError_t hipEventDestroy(hipEvent_t event)
{
    FAKE_CALL();
    fake_gpu().give_back(event);
    return hipSuccess;
}
FAKE_HIP hipError_t hipEventRecord(hipEvent_t, hipStream_t)
{
    FAKE_CALL();
    return hipSuccess;
}
FAKE_HIP hipError_t hipEventQuery(hipEvent_t)
{
    FAKE_CALL();
    return hipSuccess;
}
FAKE_HIP hipError_t hipMalloc(void **memory, size_t size)
{
    FAKE_CALL();
    *memory = fake_gpu().make(size);
    return hipSuccess;
}
FAKE_HIP hipError_t hipFree(void *memory)
{
    FAKE_CALL();
    fake_gpu().give_back(memory);
    return hipSuccess;
}
FAKE_HIP hipError_t hipHostMalloc(void **memory, size_t size, unsigned)
{
    FAKE_CALL();
    *memory = fake_gpu().make(size);
    return hipSuccess;
}
FAKE_HIP hipError_t hipHostFree(void *memory)
{
    FAKE_CALL();
    fake_gpu().give_back(memory);
    return hipSuccess;
}
FAKE_HIP hipError_t hipHostRegister(void *memory, size_t, unsigned)
{
    FAKE_CALL();
    fake_gpu().pinned.insert(memory);
    return hipSuccess;
}
FAKE_HIP hipError_t hipHostUnregister(void *memory)
{
    FAKE_CALL();
    fake_gpu().pinned.erase(memory);
    return hipSuccess;
}
FAKE_HIP hipError_t hipMemsetAsync(void *memory, int value, size_t size, hipStream_t)
{
    FAKE_CALL();
    memset(memory, value, size);
    return hipSuccess;
}
FAKE_HIP hipError_t hipMemcpyAsync(void *to, const void *from, size_t size, hipMemcpyKind,
                                   hipStream_t)
{
    FAKE_CALL();
    memcpy(to, from, size);
    return hipSuccess;
}
FAKE_HIP hipError_t hipModuleLaunchKernel(hipFunction_t, unsigned, unsigned, unsigned, unsigned,
                                          unsigned, unsigned, unsigned, hipStream_t, void **,
                                          void **)
{
    FAKE_CALL();
    return hipSuccess;
}
