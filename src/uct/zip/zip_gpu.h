// SPDX-License-Identifier: BSD-3-Clause
// The GPUs of this process whose memory is served, and the streams that an interface has on them.
// The driver is behind the codec's back ends (kernels/codec_gpu.h).
#ifndef ZIP_GPU_H
#define ZIP_GPU_H

#include "kernels/codec_gpu.h"

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace zip {

// A context of a GPU, with the kernels loaded. There is one a context, made when memory of it is
// first seen, which lives until the process ends: the driver may end before that, and unloading
// then is not safe. Any thread.
class Gpu {
public:
    // The one of the memory at `address`, or NULL: `is_gpu` then says whether it is a GPU's all the
    // same, whose kernels could not be loaded (which has been logged once).
    static Gpu *of(const zip_gpu_api_t &api, const void *address, bool &is_gpu);

    const zip_gpu_api_t &api() const { return api_; }
    zip_gpu_t *handle() const { return handle_; }

    // Takes staging memory out of the `limit` bytes that all interfaces of this process may have on
    // this GPU: three quarters of what is left, so that others find some. Returns how much.
    size_t reserve(size_t limit);
    void give_back(size_t bytes);

private:
    Gpu(const zip_gpu_api_t &api, int device, void *context)
        : api_(api), device_(device), context_(context)
    {
    }

    const zip_gpu_api_t &api_;
    int device_;
    void *context_;
    zip_gpu_t *handle_ = nullptr;
};

// Memory of a GPU that nobody else reads or writes.
class GpuMemory {
public:
    // NULL: there is none.
    static std::unique_ptr<GpuMemory> allocate(Gpu *gpu, size_t size);
    ~GpuMemory();
    GpuMemory(const GpuMemory &) = delete;
    GpuMemory &operator=(const GpuMemory &) = delete;

    char *address() const { return static_cast<char *>(address_); }

private:
    explicit GpuMemory(Gpu *gpu) : gpu_(gpu) {}

    Gpu *gpu_;
    void *address_ = nullptr;
};

// A stream, and the words by which its kernels say that they are done. One thread at a time.
class GpuQueue {
public:
    static constexpr uint32_t MAX_BATCH = 64; // chunks of a launch
    static constexpr uint32_t WORDS = 256;    // of what is under way

    // A piece of work that is under way. Of none: `queue` is NULL.
    struct Ticket {
        GpuQueue *queue = nullptr;
        uint32_t word = 0;
        uint16_t sequence = 0;

        bool operator==(const Ticket &) const = default;
    };

    // NULL: no memory, or the driver failed; error_text() of the back end says why.
    static std::unique_ptr<GpuQueue> create(Gpu *gpu);
    ~GpuQueue(); // waits for what is under way
    GpuQueue(const GpuQueue &) = delete;
    GpuQueue &operator=(const GpuQueue &) = delete;

    // How many chunks could be put on it now.
    uint32_t room() const { return WORDS - used_; }

    // Put items with at most room() chunks on the stream and return a ticket for each chunk; their
    // progress words are set here. False: if is_full() another try is worth while, otherwise the
    // queue has failed, or an item is wrong.
    bool encode(std::vector<zip_gpu_item_t> &items, uint32_t max_sms, std::vector<Ticket> &tickets);
    bool decode(std::vector<zip_gpu_item_t> &items, uint32_t max_sms, std::vector<Ticket> &tickets);
    // Copies before what is put on the stream next.
    bool copy(void *to, const void *from, size_t length);
    // What the probe finds is in `probed` when the ticket is done, until the next call. room() must
    // be at least 1.
    bool probe(const void *data, size_t length, Ticket &ticket);
    const zip_probe_t &probed(const Ticket &ticket) const { return probes_[ticket.word]; }

    // Whether a failed call may be tried again.
    bool is_full() const { return status_ == ZIP_ERR_NO_SPACE; }
    const char *error_text() const { return gpu_->api().error_text(); }

    enum class State { UNDER_WAY, DONE, FAILED };
    // When it is not UNDER_WAY any more the ticket is used up; DONE sets its progress word. FAILED:
    // the device has an error.
    static State poll(Ticket &ticket, uint64_t &word);
    // Waits until nothing of the ticket's work touches memory any more, and leaves the ticket to
    // its owner. Any thread; only for what has failed or ends.
    static void await(const Ticket &ticket);
    // The same for the owner, whose ticket is used up.
    static void end(Ticket &ticket);

private:
    explicit GpuQueue(Gpu *gpu) : gpu_(gpu) {}
    using Launch = zip_status_t (*)(zip_gpu_queue_t *, const zip_gpu_item_t *, size_t,
                                    zip_gpu_launch_t);
    bool launch(Launch call, std::vector<zip_gpu_item_t> &items, uint32_t max_sms,
                std::vector<Ticket> &tickets);
    void next_sequence();
    bool take(uint32_t count, uint32_t &first);
    void release(Ticket &ticket);

    Gpu *gpu_;
    zip_gpu_queue_t *queue_ = nullptr;
    void *pinned_ = nullptr;
    uint64_t *words_ = nullptr;     // WORDS of them, in pinned memory, as the next
    zip_probe_t *probes_ = nullptr; // likewise
    std::vector<bool> taken_;       // of the words
    uint32_t used_ = 0;
    uint16_t sequence_ = 0;
    uint32_t polls_ = 0; // in a row that found nothing
    // when the driver was asked last, or the first of them was
    std::chrono::steady_clock::time_point asked_ = {};
    zip_status_t status_ = ZIP_OK;
    std::atomic<bool> failed_ = false; // the device has an error
};

} // namespace zip

#endif
