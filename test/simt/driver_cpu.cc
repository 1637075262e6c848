// SPDX-License-Identifier: BSD-3-Clause
// The launcher's driver on the CPU.
#include "simt/driver_cpu.h"

#include <cstdlib>
#include <cstring>

namespace zip::gpu {

namespace {

CpuDriver *opened_driver;

// Fresh memory holds what nobody may rely on.
constexpr int GARBAGE = 0xa5;

zip_status_t query_cpu(const void *, zip_gpu_memory_t *memory_p)
{
    *memory_p = {1, 0, nullptr};
    return ZIP_OK;
}

template <uint32_t wave>
zip_status_t open_cpu(const zip_gpu_memory_t *, zip_gpu_t **gpu_p)
{
    auto driver = std::make_unique<CpuDriver>(simt::cpu::Machine{wave, 1, 3});
    opened_driver = driver.get();
    return open_with(std::move(driver), gpu_p);
}

const zip_gpu_api_t api_of_32 = make_api("shim32", query_cpu, open_cpu<32>);
const zip_gpu_api_t api_of_64 = make_api("shim64", query_cpu, open_cpu<64>);

} // namespace

const zip_gpu_api_t *CpuDriver::api(uint32_t wave)
{
    return wave == 32 ? &api_of_32 : &api_of_64;
}

CpuDriver *CpuDriver::opened()
{
    return opened_driver;
}

CpuDriver::~CpuDriver()
{
    // what the launcher did not give back is a leak
    if (!streams_.empty() || !events_.empty() || !memory_.empty() || !registered_.empty()) {
        fprintf(stderr, "closed with %zu streams, %zu events, %zu pieces of memory in use\n",
                streams_.size(), events_.size(), memory_.size() + registered_.size());
        abort();
    }
    if (opened_driver == this)
        opened_driver = nullptr;
}

zip_status_t CpuDriver::ready(const char *what)
{
    ++calls;
    if (inside_ == 0)
        error = std::string(what) + " without a context";
    if (broken)
        return fail(ZIP_ERR_DEVICE, "%s: the driver is broken", what);
    if (fail_after < 0 || fail_after-- != 0)
        return ZIP_OK;
    broken = breaks;
    return fail(ZIP_ERR_DEVICE, "%s was told to fail", what);
}

zip_status_t CpuDriver::enter()
{
    if (inside_++ != 0)
        error = "entered twice";
    const zip_status_t status = broken ? ZIP_OK : ready("enter");
    if (status != ZIP_OK)
        --inside_;
    return status;
}
void CpuDriver::leave()
{
    --inside_;
}

zip_status_t CpuDriver::stream_create(void **stream_p)
{
    const zip_status_t status = ready("stream_create");
    if (status != ZIP_OK)
        return status;
    auto stream = std::make_unique<Stream>();
    *stream_p = stream.get();
    streams_[*stream_p] = std::move(stream);
    return ZIP_OK;
}
void CpuDriver::stream_destroy(void *stream)
{
    run(stream);
    streams_.erase(stream);
}
zip_status_t CpuDriver::stream_synchronize(void *stream)
{
    const zip_status_t status = ready("stream_synchronize");
    if (status != ZIP_OK) {
        if (broken)
            streams_.at(stream)->work.clear(); // it ended with the error
        return status;
    }
    run(stream);
    return ZIP_OK;
}

zip_status_t CpuDriver::stream_query(void *stream, bool *done_p)
{
    const zip_status_t status = ready("stream_query");
    if (status == ZIP_OK)
        *done_p = streams_.at(stream)->work.empty();
    return status;
}

void CpuDriver::run(void *stream, size_t keep)
{
    auto &work = streams_.at(stream)->work;
    while (work.size() > keep) {
        work.front()();
        work.pop_front();
    }
}

zip_status_t CpuDriver::event_create(void **event_p)
{
    const zip_status_t status = ready("event_create");
    if (status != ZIP_OK)
        return status;
    auto event = std::make_unique<Event>();
    *event_p = event.get();
    events_[*event_p] = std::move(event);
    return ZIP_OK;
}
void CpuDriver::event_destroy(void *event)
{
    events_.erase(event);
}
zip_status_t CpuDriver::event_record(void *event, void *stream)
{
    const zip_status_t status = ready("event_record");
    if (status != ZIP_OK)
        return status;
    const uint64_t number = ++events_.at(event)->recorded;
    streams_.at(stream)->work.push_back([this, event, number] {
        const auto e = events_.find(event);
        if (e != events_.end())
            e->second->done = number;
    });
    return ZIP_OK;
}
zip_status_t CpuDriver::event_query(void *event, bool *done_p)
{
    const zip_status_t status = ready("event_query");
    if (status != ZIP_OK)
        return status;
    const Event &e = *events_.at(event);
    *done_p = e.done == e.recorded;
    return ZIP_OK;
}

zip_status_t CpuDriver::allocate_device(size_t size, void **memory_p)
{
    const zip_status_t status = ready("allocate_device");
    if (status == ZIP_OK)
        *memory_p = make_memory(size, false);
    return status;
}
void *CpuDriver::make_memory(size_t size, bool pinned)
{
    void *memory = malloc(size);
    memset(memory, GARBAGE, size);
    memory_[memory] = pinned;
    return memory;
}
void CpuDriver::free_device(void *memory)
{
    if (memory_.count(memory) == 0 || memory_[memory])
        error = "free_device of what is no device memory";
    memory_.erase(memory);
    free(memory);
}
zip_status_t CpuDriver::allocate_pinned(size_t size, void **memory_p)
{
    const zip_status_t status = ready("allocate_pinned");
    if (status == ZIP_OK)
        *memory_p = make_memory(size, true);
    return status;
}
void CpuDriver::free_pinned(void *memory)
{
    if (memory_.count(memory) == 0 || !memory_[memory])
        error = "free_pinned of what is no pinned memory";
    memory_.erase(memory);
    free(memory);
}

zip_status_t CpuDriver::pin(void *memory, size_t)
{
    const zip_status_t status = ready("pin");
    if (status == ZIP_OK && !registered_.insert(memory).second)
        return fail(ZIP_ERR_DEVICE, "pinned already");
    return status;
}
void CpuDriver::unpin(void *memory)
{
    if (registered_.erase(memory) == 0)
        error = "unpin of what is not pinned";
}
zip_status_t CpuDriver::dmabuf(void *, size_t, int *)
{
    const zip_status_t status = ready("dmabuf");
    return status == ZIP_OK ? fail(ZIP_ERR_DEVICE, "no dma-buf here") : status;
}

zip_status_t CpuDriver::clear(void *device_memory, size_t size, void *stream)
{
    const zip_status_t status = ready("clear");
    if (status != ZIP_OK)
        return status;
    streams_.at(stream)->work.push_back([=] { memset(device_memory, 0, size); });
    return ZIP_OK;
}
zip_status_t CpuDriver::copy_to_device(void *device_memory, const void *pinned, size_t size,
                                       void *stream)
{
    const zip_status_t status = ready("copy_to_device");
    if (status != ZIP_OK)
        return status;
    streams_.at(stream)->work.push_back([=] { memcpy(device_memory, pinned, size); });
    return ZIP_OK;
}

zip_status_t CpuDriver::copy(void *to, const void *from, size_t size, void *stream)
{
    const zip_status_t status = ready("copy");
    if (status == ZIP_OK)
        streams_.at(stream)->work.push_back([=] { memcpy(to, from, size); });
    return status;
}
zip_status_t CpuDriver::write(uint64_t *word, uint64_t value, void *stream)
{
    const zip_status_t status = ready("write");
    if (status == ZIP_OK)
        streams_.at(stream)->work.push_back([=] { *word = value; });
    return status;
}

zip_status_t CpuDriver::launch(Kernel kernel, uint32_t blocks, uint32_t threads, bool filling,
                               void *stream, const Launch &launch)
{
    const zip_status_t status = ready("launch");
    if (status != ZIP_OK)
        return status;
    launches.push_back({kernel, blocks, threads, filling, launch});
    streams_.at(stream)->work.push_back([=, this] {
        const simt::cpu::KernelEntry *entry = simt::cpu::find_kernel(name_of(kernel));
        ++machine_.seed;
        const std::string text =
                entry == nullptr ? "no kernel " + name_of(kernel)
                                 : simt::cpu::run(*entry, blocks, threads, launch, machine_);
        if (error.empty())
            error = text;
    });
    return ZIP_OK;
}

} // namespace zip::gpu
