// SPDX-License-Identifier: BSD-3-Clause
// Back ends of the GPU codec's tests: the CPU's executor, and CUDA by its driver API.
#include "gpu_back_end.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <map>

#include "simt/driver_cpu.h"

namespace zip::test {

namespace {

class Shim final : public BackEnd {
public:
    explicit Shim(uint32_t wave) : api_(*gpu::CpuDriver::api(wave))
    {
        if (api_.open(nullptr, &gpu_) != ZIP_OK)
            abort();
        driver_ = gpu::CpuDriver::opened();
    }
    ~Shim() override { api_.close(gpu_); }

    const zip_gpu_api_t &api() const override { return api_; }
    uint32_t multiprocessors() const override { return gpu::CpuDriver::MULTIPROCESSORS; }
    bool slow() const override { return true; }
    bool has_peer() const override { return false; }
    void *allocate(size_t size, Memory) override
    {
        void *memory = nullptr;
        if (posix_memalign(&memory, 16, size != 0 ? size : 1) != 0)
            abort();
        memset(memory, 0xb7, size);
        return memory;
    }
    void free(void *memory) override { ::free(memory); }
    void to_device(void *device, const void *host, size_t size) override
    {
        if (size != 0)
            memcpy(device, host, size);
    }
    void to_host(void *host, const void *device, size_t size) override
    {
        if (size != 0)
            memcpy(host, device, size);
    }
    std::string wait(void *stream) override
    {
        driver_->run(stream);
        driver_->launches.clear();
        return std::exchange(driver_->error, "");
    }

private:
    const zip_gpu_api_t &api_;
    gpu::CpuDriver *driver_ = nullptr;
};

// What the tests need of the driver, found at run time as the codec does; its types in short.
struct CudaFunctions {
    int (*cuInit)(unsigned);
    int (*cuDeviceGet)(int *, int);
    int (*cuDeviceGetCount)(int *);
    int (*cuDeviceCanAccessPeer)(int *, int, int);
    int (*cuCtxEnablePeerAccess)(void *, unsigned);
    int (*cuDevicePrimaryCtxRetain)(void **, int);
    int (*cuCtxSetCurrent)(void *);
    int (*cuDeviceGetAttribute)(int *, int, int);
    int (*cuMemAlloc_v2)(uint64_t *, size_t);
    int (*cuMemFree_v2)(uint64_t);
    int (*cuMemHostAlloc)(void **, size_t, unsigned);
    int (*cuMemFreeHost)(void *);
    int (*cuMemcpyHtoD_v2)(uint64_t, const void *, size_t);
    int (*cuMemcpyDtoH_v2)(void *, uint64_t, size_t);
    int (*cuStreamSynchronize)(void *);

    bool load(std::string *why)
    {
        void *library = dlopen("libcuda.so.1", RTLD_NOW);
        if (library == nullptr) {
            *why = "no CUDA driver";
            return false;
        }
#define ZIP_FIND(name)                                                                             \
    name = reinterpret_cast<decltype(name)>(dlsym(library, #name));                                \
    if (name == nullptr) {                                                                         \
        *why = "the CUDA driver lacks " #name;                                                     \
        return false;                                                                              \
    }
        ZIP_FIND(cuInit)
        ZIP_FIND(cuDeviceGet)
        ZIP_FIND(cuDeviceGetCount)
        ZIP_FIND(cuDeviceCanAccessPeer)
        ZIP_FIND(cuCtxEnablePeerAccess)
        ZIP_FIND(cuDevicePrimaryCtxRetain)
        ZIP_FIND(cuCtxSetCurrent)
        ZIP_FIND(cuDeviceGetAttribute)
        ZIP_FIND(cuMemAlloc_v2)
        ZIP_FIND(cuMemFree_v2)
        ZIP_FIND(cuMemHostAlloc)
        ZIP_FIND(cuMemFreeHost)
        ZIP_FIND(cuMemcpyHtoD_v2)
        ZIP_FIND(cuMemcpyDtoH_v2)
        ZIP_FIND(cuStreamSynchronize)
#undef ZIP_FIND
        return true;
    }
};

constexpr int MULTIPROCESSOR_COUNT = 16; // CU_DEVICE_ATTRIBUTE_...
constexpr unsigned HOST_PORTABLE_MAPPED = 3;

// The back end beside this program in the build's tree, or where the environment says.
std::string cuda_library()
{
    const char *path = getenv("ZIP_TEST_LIBZIP_CUDA");
    if (path != nullptr)
        return path;
    char exe[4096];
    const ssize_t n = readlink("/proc/self/exe", exe, sizeof exe);
    const std::string program(exe, n > 0 ? size_t(n) : 0);
    return program.substr(0, program.rfind("/test/gtest/")) +
           "/src/kernels/cuda/.libs/libzip_cuda.so";
}

class Cuda final : public BackEnd {
public:
    // Memory of the device cannot end at a forbidden page: what is beside it is compared.
    static constexpr size_t GUARD = 256;
    static constexpr uint8_t GUARD_BYTE = 0xd3;

    static Cuda *make(std::string *why)
    {
        CudaFunctions cuda{};
        if (!cuda.load(why))
            return nullptr;
        int device = 0, multiprocessors = 0;
        void *context = nullptr;
        if (cuda.cuInit(0) != 0 || cuda.cuDeviceGet(&device, 0) != 0) {
            *why = "no CUDA device";
            return nullptr;
        }
        // from here on something is wrong, rather than absent
        const std::string library = cuda_library();
        const char *error = nullptr;
        const zip_gpu_api_t *api = zip_gpu_load(library.c_str(), &error);
        EXPECT_NE(nullptr, api) << error;
        EXPECT_EQ(0, cuda.cuDevicePrimaryCtxRetain(&context, device));
        EXPECT_EQ(0, cuda.cuCtxSetCurrent(context));
        EXPECT_EQ(0, cuda.cuDeviceGetAttribute(&multiprocessors, MULTIPROCESSOR_COUNT, device));
        zip_gpu_t *gpu = nullptr;
        if (api == nullptr)
            return nullptr;
        EXPECT_EQ(ZIP_OK, api->open(nullptr, &gpu)) << api->error_text();
        if (gpu == nullptr)
            return nullptr;
        auto *back_end = new Cuda(cuda, *api, uint32_t(multiprocessors));
        back_end->gpu_ = gpu;
        back_end->context_ = context;
        back_end->find_peer(device);
        return back_end;
    }

    const zip_gpu_api_t &api() const override { return api_; }
    uint32_t multiprocessors() const override { return multiprocessors_; }
    bool slow() const override { return false; }
    bool has_peer() const override { return peer_ != nullptr; }
    void *allocate(size_t size, Memory memory) override
    {
        const Bytes guards(size + 2 * GUARD, GUARD_BYTE);
        void *base = nullptr;
        if (memory == Memory::PINNED) {
            EXPECT_EQ(0, cuda_.cuMemHostAlloc(&base, guards.size(), HOST_PORTABLE_MAPPED));
            memcpy(base, guards.data(), guards.size());
        } else {
            uint64_t address = 0;
            if (memory == Memory::PEER) {
                EXPECT_EQ(0, cuda_.cuCtxSetCurrent(peer_));
            }
            EXPECT_EQ(0, cuda_.cuMemAlloc_v2(&address, guards.size()));
            EXPECT_EQ(0, cuda_.cuCtxSetCurrent(context_));
            EXPECT_EQ(0, cuda_.cuMemcpyHtoD_v2(address, guards.data(), guards.size()));
            base = reinterpret_cast<void *>(address);
        }
        void *start = static_cast<uint8_t *>(base) + GUARD;
        blocks_[start] = {size, memory};
        return start;
    }
    void free(void *memory) override
    {
        const auto [size, kind] = blocks_.at(memory);
        blocks_.erase(memory);
        uint8_t *base = static_cast<uint8_t *>(memory) - GUARD;
        Bytes guards(GUARD);
        for (size_t at : {size_t(0), GUARD + size}) {
            to_host(guards.data(), base + at, GUARD);
            EXPECT_EQ(Bytes(GUARD, GUARD_BYTE), guards)
                    << "somebody wrote " << (at == 0 ? "before" : "behind") << " a buffer of "
                    << size << " bytes";
        }
        EXPECT_EQ(0, kind == Memory::PINNED ? cuda_.cuMemFreeHost(base)
                                            : cuda_.cuMemFree_v2(reinterpret_cast<uint64_t>(base)));
    }
    void to_device(void *device, const void *host, size_t size) override
    {
        if (size == 0)
            return;
        EXPECT_EQ(0, cuda_.cuMemcpyHtoD_v2(reinterpret_cast<uint64_t>(device), host, size));
    }
    void to_host(void *host, const void *device, size_t size) override
    {
        if (size == 0)
            return;
        EXPECT_EQ(0, cuda_.cuMemcpyDtoH_v2(host, reinterpret_cast<uint64_t>(device), size));
    }
    std::string wait(void *stream) override
    {
        const int result = cuda_.cuStreamSynchronize(stream);
        return result == 0 ? "" : "CUDA error " + std::to_string(result);
    }

private:
    struct Block {
        size_t size;
        Memory memory;
    };
    Cuda(const CudaFunctions &cuda, const zip_gpu_api_t &api, uint32_t multiprocessors)
        : cuda_(cuda), api_(api), multiprocessors_(multiprocessors)
    {
    }

    // The first other device whose memory this one reaches.
    void find_peer(int device)
    {
        int count = 0;
        EXPECT_EQ(0, cuda_.cuDeviceGetCount(&count));
        for (int i = 0; i < count && peer_ == nullptr; ++i) {
            int other = 0, reached = 0;
            EXPECT_EQ(0, cuda_.cuDeviceGet(&other, i));
            if (other == device || cuda_.cuDeviceCanAccessPeer(&reached, device, other) != 0 ||
                reached == 0)
                continue;
            EXPECT_EQ(0, cuda_.cuDevicePrimaryCtxRetain(&peer_, other));
            EXPECT_EQ(0, cuda_.cuCtxEnablePeerAccess(peer_, 0));
        }
    }

    const CudaFunctions cuda_;
    const zip_gpu_api_t &api_;
    void *context_ = nullptr, *peer_ = nullptr;
    uint32_t multiprocessors_;
    std::map<void *, Block> blocks_;
};

} // namespace

BackEnd *BackEnd::get(const std::string &name, std::string *why)
{
    // A GPU is not closed: its driver may be gone before this.
    static auto &back_ends = *new std::map<std::string, std::pair<BackEnd *, std::string>>;
    auto found = back_ends.find(name);
    if (found == back_ends.end()) {
        std::string reason;
        BackEnd *made = nullptr;
        if (name == "cuda")
            made = Cuda::make(&reason);
        else
            made = new Shim(name == "shim32" ? 32 : 64);
        found = back_ends.emplace(name, std::make_pair(made, reason)).first;
    }
    *why = found->second.second;
    return found->second.first;
}

} // namespace zip::test
