// SPDX-License-Identifier: BSD-3-Clause
#include "uct/zip/zip_gpu.h"

#include "uct/zip/ucx_bind.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <new>
#include <utility>

namespace zip {

namespace {

constexpr uint32_t SLOTS = 8; // long launches under way
// How long nothing is found before the driver is asked, and after how many polls the clock is.
constexpr std::chrono::milliseconds QUERY_INTERVAL(100);
constexpr uint32_t POLLS_A_LOOK = 64;
constexpr std::chrono::seconds PATIENCE(30);

struct Registry {
    using Context = std::pair<const zip_gpu_api_t *, std::pair<int, void *>>;

    std::mutex mutex;
    std::map<Context, Gpu *> gpus; // NULL: it cannot be used
    std::map<std::pair<const zip_gpu_api_t *, int>, size_t> reserved;

    static Registry &get()
    {
        static auto *const registry = new Registry; // never destroyed, as the Gpus in it
        return *registry;
    }
};

} // namespace

Gpu *Gpu::of(const zip_gpu_api_t &api, const void *address, bool &is_gpu)
{
    zip_gpu_memory_t memory = {};
    is_gpu = api.memory_query(address, &memory) == ZIP_OK && memory.is_gpu != 0;
    if (!is_gpu) {
        return nullptr;
    }
    Registry &registry = Registry::get();
    std::lock_guard lock(registry.mutex);
    const auto [entry, is_new] =
            registry.gpus.try_emplace({&api, {memory.device, memory.context}}, nullptr);
    if (is_new) {
        auto *gpu = new Gpu(api, memory.device, memory.context);
        if (api.open(&memory, &gpu->handle_) == ZIP_OK) {
            entry->second = gpu;
        } else {
            zip_warn("zip: memory of GPU %d is not compressed: %s", memory.device,
                     api.error_text());
            delete gpu;
        }
    }
    return entry->second;
}

size_t Gpu::reserve(size_t limit)
{
    Registry &registry = Registry::get();
    std::lock_guard lock(registry.mutex);
    size_t &used = registry.reserved[{&api_, device_}];
    const size_t bytes = used < limit ? (limit - used) / 4 * 3 : 0;
    used += bytes;
    return bytes;
}

void Gpu::give_back(size_t bytes)
{
    Registry &registry = Registry::get();
    std::lock_guard lock(registry.mutex);
    registry.reserved[{&api_, device_}] -= bytes;
}

std::unique_ptr<GpuMemory> GpuMemory::allocate(Gpu *gpu, size_t size)
{
    std::unique_ptr<GpuMemory> memory(new (std::nothrow) GpuMemory(gpu));
    if (memory == nullptr || gpu->api().memory_allocate(gpu->handle(), ZIP_GPU_DEVICE, size,
                                                        &memory->address_) != ZIP_OK) {
        return nullptr;
    }
    return memory;
}

GpuMemory::~GpuMemory()
{
    if (address_ != nullptr) {
        gpu_->api().memory_free(gpu_->handle(), ZIP_GPU_DEVICE, address_);
    }
}

std::unique_ptr<GpuQueue> GpuQueue::create(Gpu *gpu)
{
    std::unique_ptr<GpuQueue> queue(new (std::nothrow) GpuQueue(gpu));
    const zip_gpu_queue_params_t params = {nullptr, MAX_BATCH, WORDS, SLOTS};
    if (queue == nullptr ||
        gpu->api().memory_allocate(gpu->handle(), ZIP_GPU_PINNED,
                                   WORDS * (sizeof(uint64_t) + sizeof(zip_probe_t)),
                                   &queue->pinned_) != ZIP_OK ||
        gpu->api().queue_create(gpu->handle(), &params, &queue->queue_) != ZIP_OK) {
        return nullptr;
    }
    queue->words_ = static_cast<uint64_t *>(queue->pinned_);
    std::fill_n(queue->words_, WORDS, 0);
    queue->probes_ = reinterpret_cast<zip_probe_t *>(queue->words_ + WORDS);
    queue->taken_.resize(WORDS);
    return queue;
}

GpuQueue::~GpuQueue()
{
    if (queue_ != nullptr) {
        gpu_->api().queue_destroy(queue_);
    }
    if (pinned_ != nullptr) {
        gpu_->api().memory_free(gpu_->handle(), ZIP_GPU_PINNED, pinned_);
    }
}

// Of the launch that is being made; never 0.
void GpuQueue::next_sequence()
{
    sequence_ = static_cast<uint16_t>(sequence_ == UINT16_MAX ? 1 : sequence_ + 1);
}

// `count` words that are neighbours.
bool GpuQueue::take(uint32_t count, uint32_t &first)
{
    uint32_t run = 0;
    for (uint32_t i = 0; i < WORDS; ++i) {
        run = taken_[i] ? 0 : run + 1;
        if (run < count) {
            continue;
        }
        first = i + 1 - count;
        for (uint32_t k = first; k <= i; ++k) {
            taken_[k] = true;
            __atomic_store_n(&words_[k], 0, __ATOMIC_RELEASE);
        }
        used_ += count;
        return true;
    }
    status_ = ZIP_ERR_NO_SPACE;
    return false;
}

void GpuQueue::release(Ticket &ticket)
{
    taken_[ticket.word] = false;
    --used_;
    ticket = {};
}

bool GpuQueue::launch(Launch call, std::vector<zip_gpu_item_t> &items, uint32_t max_sms,
                      std::vector<Ticket> &tickets)
{
    next_sequence();
    tickets.clear();
    bool ok = true;
    for (size_t i = 0; ok && i < items.size(); ++i) {
        zip_gpu_item_t &item = items[i];
        const auto chunks = static_cast<uint32_t>(
                item.chunk_length == 0
                        ? 1
                        : (item.data_size + item.chunk_length - 1) / item.chunk_length);
        uint32_t first = 0;
        ok = take(chunks, first);
        for (uint32_t k = 0; ok && k < chunks; ++k) {
            tickets.push_back({this, first + k, sequence_});
        }
        item.progress = &words_[first];
    }
    if (ok) {
        status_ = call(queue_, items.data(), items.size(), {max_sms, sequence_});
        ok = status_ == ZIP_OK;
    }
    while (!ok && !tickets.empty()) {
        release(tickets.back());
        tickets.pop_back();
    }
    return ok;
}

bool GpuQueue::encode(std::vector<zip_gpu_item_t> &items, uint32_t max_sms,
                      std::vector<Ticket> &tickets)
{
    return launch(gpu_->api().encode, items, max_sms, tickets);
}

bool GpuQueue::decode(std::vector<zip_gpu_item_t> &items, uint32_t max_sms,
                      std::vector<Ticket> &tickets)
{
    return launch(gpu_->api().decode, items, max_sms, tickets);
}

bool GpuQueue::copy(void *to, const void *from, size_t length)
{
    status_ = gpu_->api().copy(queue_, to, from, length, nullptr, 0);
    return status_ == ZIP_OK;
}

bool GpuQueue::probe(const void *data, size_t length, Ticket &ticket)
{
    next_sequence();
    uint32_t word = 0;
    if (!take(1, word)) {
        return false;
    }
    ticket = {this, word, sequence_};
    zip_gpu_item_t item = {};
    item.coding = {ZIP_DTYPE_AUTO, ZIP_SHAPE_DEFAULT, 0};
    item.data = const_cast<void *>(data);
    item.data_size = length;
    status_ = gpu_->api().probe(queue_, &item, 1, &probes_[ticket.word]);
    if (status_ == ZIP_OK) {
        status_ = gpu_->api().copy(queue_, nullptr, nullptr, 0, &words_[ticket.word], sequence_);
    }
    if (status_ != ZIP_OK) {
        release(ticket);
    }
    return status_ == ZIP_OK;
}

GpuQueue::State GpuQueue::poll(Ticket &ticket, uint64_t &word)
{
    GpuQueue &queue = *ticket.queue;
    const auto is_done = [&] {
        word = __atomic_load_n(&queue.words_[ticket.word], __ATOMIC_ACQUIRE);
        return ZIP_GPU_PROGRESS_SEQ(word) == ticket.sequence;
    };
    if (!is_done()) {
        if (++queue.polls_ % POLLS_A_LOOK != 1) {
            return State::UNDER_WAY;
        }
        const auto now = std::chrono::steady_clock::now();
        if (queue.polls_ == 1) {
            queue.asked_ = now;
        }
        if (now - queue.asked_ < QUERY_INTERVAL) {
            return State::UNDER_WAY;
        }
        // An error of the device shows only when it is asked for.
        queue.asked_ = now;
        int idle = 0;
        queue.status_ = queue.gpu_->api().queue_query(queue.queue_, &idle);
        if (queue.status_ == ZIP_OK && idle == 0) {
            return State::UNDER_WAY;
        }
        if (!is_done()) {
            queue.failed_ = true;
            queue.release(ticket);
            return State::FAILED;
        }
    }
    queue.polls_ = 0;
    queue.release(ticket);
    return State::DONE;
}

void GpuQueue::await(const Ticket &ticket)
{
    if (ticket.queue == nullptr) {
        return;
    }
    // If somebody has noticed the end meanwhile, the word may be another ticket's: then that is
    // waited for, too.
    const uint64_t *word = &ticket.queue->words_[ticket.word];
    const auto deadline = std::chrono::steady_clock::now() + PATIENCE;
    while (__atomic_load_n(word, __ATOMIC_ACQUIRE) == 0 &&
           !ticket.queue->failed_.load(std::memory_order_relaxed)) {
        if (std::chrono::steady_clock::now() > deadline) {
            zip_error("zip: the GPU does not end what is under way");
            return;
        }
    }
}

void GpuQueue::end(Ticket &ticket)
{
    const auto deadline = std::chrono::steady_clock::now() + PATIENCE;
    uint64_t word;
    while (ticket.queue != nullptr && poll(ticket, word) == State::UNDER_WAY) {
        if (std::chrono::steady_clock::now() > deadline) {
            zip_error("zip: the GPU does not end what is under way");
            ticket = {}; // its word is lost
        }
    }
}

} // namespace zip
