// SPDX-License-Identifier: BSD-3-Clause
// The back ends that the GPU codec's tests run on, and their memory.
#ifndef ZIP_TEST_GPU_BACK_END_H
#define ZIP_TEST_GPU_BACK_END_H

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>

#include "kernels/codec_gpu.h"
#include "test_codec_util.h"

namespace zip::test {

enum class Memory { DEVICE, PINNED, PEER };

class BackEnd {
public:
    // "shim32" and "shim64" run the kernels on the CPU, "cuda" on a GPU. One of each kind is made,
    // at the first call. Null where there is none, which `why` then explains.
    static BackEnd *get(const std::string &name, std::string *why);
    virtual ~BackEnd() = default;

    virtual const zip_gpu_api_t &api() const = 0;
    zip_gpu_t *gpu() const { return gpu_; }
    virtual uint32_t multiprocessors() const = 0;
    // How much a test may do: on a CPU a launch takes thousands of times as long.
    virtual bool slow() const = 0;

    // Whether there is another GPU whose memory this one reaches.
    virtual bool has_peer() const = 0;

    // Memory of exactly that size, aligned to 16 bytes: what is done beside it is found, at once or
    // when it is freed. Pinned memory can be read by the host too.
    virtual void *allocate(size_t size, Memory memory) = 0;
    virtual void free(void *memory) = 0;
    virtual void to_device(void *device, const void *host, size_t size) = 0;
    virtual void to_host(void *host, const void *device, size_t size) = 0;
    // Waits for the stream; returns "" or what went wrong on it.
    virtual std::string wait(void *stream) = 0;

protected:
    zip_gpu_t *gpu_ = nullptr;
};

// `size` bytes that begin `offset` bytes behind a multiple of 16.
class DeviceMemory {
public:
    DeviceMemory(BackEnd &back_end, size_t size, size_t offset = 0, Memory memory = Memory::DEVICE)
        : back_end_(back_end),
          base_(static_cast<uint8_t *>(back_end.allocate(size + offset, memory))), offset_(offset),
          size_(size)
    {
    }
    DeviceMemory(BackEnd &back_end, const Bytes &content, size_t offset = 0,
                 Memory memory = Memory::DEVICE)
        : DeviceMemory(back_end, content.size(), offset, memory)
    {
        back_end.to_device(get(), content.data(), content.size());
    }
    ~DeviceMemory() { back_end_.free(base_); }
    DeviceMemory(const DeviceMemory &) = delete;
    DeviceMemory &operator=(const DeviceMemory &) = delete;

    uint8_t *get() const { return base_ + offset_; }
    size_t size() const { return size_; }
    Bytes content() const
    {
        Bytes bytes(size_);
        back_end_.to_host(bytes.data(), get(), size_);
        return bytes;
    }

private:
    BackEnd &back_end_;
    uint8_t *base_;
    size_t offset_, size_;
};

} // namespace zip::test
#endif
