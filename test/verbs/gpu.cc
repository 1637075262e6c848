// SPDX-License-Identifier: BSD-3-Clause
// GPU memory: CUDA IPC handles and asynchronous copies, by the driver's interface.
#include "gpu.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

namespace swverbs {

namespace {

// As in cuda.h, which a build of this library does not need.
using CUcontext = void *;
using CUstream = void *;
using CUevent = void *;
using CUdeviceptr = unsigned long long;
struct CUipcMemHandle {
    char reserved[64];
};
constexpr int kAttributeContext = 1, kAttributeMemoryType = 2, kAttributeBufferId = 7,
              kAttributeDeviceOrdinal = 9;
constexpr unsigned kMemoryTypeDevice = 2;
constexpr unsigned kStreamNonBlocking = 1, kEventDisableTiming = 2, kLazyPeerAccess = 1;

// Pieces that are in flight through pinned memory at most.
constexpr unsigned kBounces = 16;
constexpr uint64_t kGranularity = 2 << 20; // of device memory: a dma-buf covers all of it

} // namespace

struct Gpu::Driver {
    int (*init)(unsigned);
    int (*device_count)(int *);
    int (*device_uuid)(void *, int);
    int (*retain)(CUcontext *, int);
    int (*get_current)(CUcontext *);
    int (*set_current)(CUcontext);
    int (*pointer_attribute)(void *, int, CUdeviceptr);
    int (*address_range)(CUdeviceptr *, size_t *, CUdeviceptr);
    int (*get_handle)(CUipcMemHandle *, CUdeviceptr);
    int (*open_handle)(CUdeviceptr *, CUipcMemHandle, unsigned);
    int (*close_handle)(CUdeviceptr);
    int (*copy)(CUdeviceptr, CUdeviceptr, size_t, CUstream);
    int (*stream_create)(CUstream *, unsigned);
    int (*host_alloc)(void **, size_t, unsigned);
    int (*event_create)(CUevent *, unsigned);
    int (*event_record)(CUevent, CUstream);
    int (*event_query)(CUevent);
    int (*event_synchronize)(CUevent);
    bool usable = false;

    bool load()
    {
        void *library = dlopen("libcuda.so.1", RTLD_NOW);
        if (library == nullptr) {
            return false;
        }
        const auto find = [library](auto &function, const char *name) {
            function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
            return function != nullptr;
        };
        usable = find(init, "cuInit") && find(device_count, "cuDeviceGetCount") &&
                 find(device_uuid, "cuDeviceGetUuid") && find(retain, "cuDevicePrimaryCtxRetain") &&
                 find(get_current, "cuCtxGetCurrent") && find(set_current, "cuCtxSetCurrent") &&
                 find(pointer_attribute, "cuPointerGetAttribute") &&
                 find(address_range, "cuMemGetAddressRange_v2") &&
                 find(get_handle, "cuIpcGetMemHandle") &&
                 find(open_handle, "cuIpcOpenMemHandle_v2") &&
                 find(close_handle, "cuIpcCloseMemHandle") && find(copy, "cuMemcpyAsync") &&
                 find(stream_create, "cuStreamCreate") && find(host_alloc, "cuMemHostAlloc") &&
                 find(event_create, "cuEventCreate") && find(event_record, "cuEventRecord") &&
                 find(event_query, "cuEventQuery") &&
                 find(event_synchronize, "cuEventSynchronize") && init(0) == 0;
        return usable;
    }
};

// One that the device's thread copies on, in the context that the application uses as well.
struct Gpu::Device {
    CUcontext context;
    CUstream stream;
    std::vector<CUevent> events; // not in use
};

// Bytes that lie in one piece at both ends.
struct Gpu::Run {
    uint64_t local, remote; // GPU memory: where it is mapped here
    size_t length, offset;  // in the segment
    bool local_gpu, remote_gpu;
};

struct Gpu::Copy {
    std::vector<Run> runs;
    std::vector<Mr *> regions; // kept by their owner as long as Mr::users says so
    Slot *peer;
    Mapping *mapping;
    Device *device;
    CUevent event;
    uint8_t *bounce; // null: not needed
    unsigned bounce_index;
    bool write;
    int error;
};

Gpu::Gpu() = default;
Gpu::~Gpu() = default;

bool Gpu::open()
{
    if (m_driver == nullptr) {
        m_driver = std::make_unique<Driver>();
        if (!m_driver->load() && settings().log) {
            fprintf(stderr, "swverbs: GPU memory cannot be used: no libcuda.so.1\n");
        }
    }
    return m_driver->usable;
}

int Gpu::describe(uint64_t address, uint64_t length, Allocation &allocation)
{
    if (!open()) {
        return EFAULT;
    }
    Driver &cu = *m_driver;
    unsigned type = 0;
    int ordinal = 0;
    unsigned long long id = 0;
    if (cu.pointer_attribute(&type, kAttributeMemoryType, address) != 0 ||
        type != kMemoryTypeDevice ||
        cu.pointer_attribute(&ordinal, kAttributeDeviceOrdinal, address) != 0 ||
        cu.pointer_attribute(&id, kAttributeBufferId, address) != 0) {
        return EFAULT;
    }
    // The calling thread need not have the context that the memory is of, or any.
    CUcontext current = nullptr, own = nullptr;
    cu.get_current(&current);
    if ((cu.pointer_attribute(&own, kAttributeContext, address) != 0 || own == nullptr) &&
        cu.retain(&own, ordinal) != 0) {
        return EFAULT;
    }
    if (cu.set_current(own) != 0) {
        return EFAULT;
    }
    CUdeviceptr base = 0;
    size_t size = 0;
    CUipcMemHandle handle;
    int result = 0;
    if (cu.address_range(&base, &size, address) != 0 ||
        address + length > base + (size + kGranularity - 1) / kGranularity * kGranularity) {
        result = EFAULT;
    } else if (cu.get_handle(&handle, base) != 0) {
        fprintf(stderr,
                "swverbs[%d]: GPU memory at 0x%llx has no IPC handle (memory of cuMemCreate?): it "
                "cannot be registered\n",
                getpid(), static_cast<unsigned long long>(address));
        result = ENOTSUP;
    }
    cu.set_current(current);
    if (result == 0) {
        allocation.base = base;
        allocation.size = size;
        allocation.buffer_id = id;
        allocation.device = ordinal;
        memcpy(allocation.handle, &handle, sizeof(handle));
        cu.device_uuid(allocation.uuid, ordinal);
    }
    return result;
}

Gpu::Device *Gpu::device(int ordinal)
{
    auto &entry = m_devices[ordinal];
    if (entry != nullptr) {
        return entry->stream != nullptr && m_driver->set_current(entry->context) == 0 ? entry.get()
                                                                                      : nullptr;
    }
    entry = std::make_unique<Device>();
    entry->stream = nullptr;
    Driver &cu = *m_driver;
    if (cu.retain(&entry->context, ordinal) != 0 || cu.set_current(entry->context) != 0 ||
        cu.stream_create(&entry->stream, kStreamNonBlocking) != 0) {
        entry->stream = nullptr;
        return nullptr;
    }
    constexpr unsigned kPortable = 1; // pinned for all contexts
    void *bounce = nullptr;
    const size_t chunk = settings().chunk;
    if (m_bounce == nullptr && cu.host_alloc(&bounce, kBounces * chunk, kPortable) == 0) {
        m_bounce = static_cast<uint8_t *>(bounce);
        for (unsigned i = 0; i < kBounces; i++) {
            m_free_bounces.push_back(i);
        }
    }
    return entry.get();
}

// This process' number of the device that the peer's allocation lies on, as far as it sees it.
int Gpu::local_ordinal(const Allocation &allocation, int otherwise)
{
    int count = 0;
    m_driver->device_count(&count);
    for (int i = 0; i < count; i++) {
        uint8_t uuid[16];
        if (m_driver->device_uuid(uuid, i) == 0 && memcmp(uuid, allocation.uuid, 16) == 0) {
            return i;
        }
    }
    return otherwise;
}

// The peer's allocation in this process, as a GPU of this process reaches it (`local_device`; -1:
// any); null if it cannot be opened.
Gpu::Mapping *Gpu::map(Slot &peer, uint32_t index, int local_device)
{
    const Allocation &allocation = peer.allocation[index];
    const uint64_t id = allocation.id.load();
    if (id == 0) {
        return nullptr;
    }
    auto it = m_mappings.find({id, local_device});
    if (it != m_mappings.end()) {
        return &it->second;
    }
    sweep(true); // the driver may refuse to open what replaces an allocation that is still open
    const int owner = local_ordinal(allocation, std::max(local_device, 0));
    CUipcMemHandle handle;
    memcpy(&handle, allocation.handle, sizeof(handle));
    CUdeviceptr base = 0;
    int rc = -1, through = -1;
    // Another GPU than the owner's reaches it by peer access, or else through host memory.
    for (int ordinal : {local_device, owner}) {
        if (rc != 0 && ordinal >= 0 && device(ordinal) != nullptr) {
            rc = m_driver->open_handle(&base, handle, kLazyPeerAccess);
            through = ordinal;
        }
    }
    if (rc != 0) {
        fprintf(stderr, "swverbs[%d]: cannot open the peer's GPU memory: CUDA error %d\n", getpid(),
                rc);
        return nullptr;
    }
    const Mapping mapping = {base, through, &peer, index, peer.head.generation.load(), 0};
    return &(m_mappings[{id, local_device}] = mapping);
}

Gpu::Copy *Gpu::start(Slot &peer, const PieceList &local, const PieceList &remote, bool write,
                      int &error)
{
    error = EIO;
    if (!open()) {
        return nullptr;
    }
    auto copy = std::make_unique<Copy>();
    copy->peer = &peer;
    copy->mapping = nullptr;
    copy->bounce = nullptr;
    copy->write = write;
    copy->error = 0;
    int ordinal = -1;
    bool bounced = false;
    size_t offset = 0;
    // pieces of the two lists, cut where either ends
    uint64_t done_a = 0, done_b = 0;
    for (unsigned i = 0, j = 0; i < local.size() && j < remote.size();) {
        const Piece &a = local[i], &b = remote[j];
        const uint64_t length = std::min(a.length - done_a, b.length - done_b);
        Run run = {a.address + done_a, b.address + done_b, length, offset, false, false};
        if (a.region != nullptr && a.region->allocation != 0) {
            run.local_gpu = true;
            if (ordinal < 0) {
                ordinal = self->allocation[a.region->allocation - 1].device;
            }
            copy->regions.push_back(a.region);
        }
        if (b.region != nullptr && b.region->allocation != 0) {
            const uint32_t index = b.region->allocation - 1;
            run.remote_gpu = true;
            if (&peer == self) {
                ordinal = ordinal < 0 ? self->allocation[index].device : ordinal;
            } else {
                copy->mapping = map(peer, index, run.local_gpu ? ordinal : -1);
                if (copy->mapping == nullptr) {
                    return nullptr;
                }
                run.remote = copy->mapping->base + (run.remote - peer.allocation[index].base);
                ordinal = copy->mapping->device;
            }
            copy->regions.push_back(b.region);
        }
        bounced = bounced || run.local_gpu != run.remote_gpu;
        copy->runs.push_back(run);
        offset += length;
        done_a += length;
        done_b += length;
        if (done_a == a.length) {
            done_a = 0;
            i++;
        }
        if (done_b == b.length) {
            done_b = 0;
            j++;
        }
    }
    copy->device = device(std::max(ordinal, 0));
    if (copy->device == nullptr || (bounced && m_bounce == nullptr) || offset > settings().chunk) {
        return nullptr;
    }
    if (bounced) {
        if (m_free_bounces.empty()) {
            error = EAGAIN;
            return nullptr;
        }
        copy->bounce_index = m_free_bounces.back();
        m_free_bounces.pop_back();
        copy->bounce = m_bounce + static_cast<size_t>(copy->bounce_index) * settings().chunk;
    }
    Driver &cu = *m_driver;
    if (copy->device->events.empty()) {
        CUevent event;
        if (cu.event_create(&event, kEventDisableTiming) != 0) {
            if (copy->bounce != nullptr) {
                m_free_bounces.push_back(copy->bounce_index);
            }
            return nullptr;
        }
        copy->device->events.push_back(event);
    }
    copy->event = copy->device->events.back();
    copy->device->events.pop_back();

    for (const Run &run : copy->runs) {
        const auto bounce = reinterpret_cast<uintptr_t>(copy->bounce + run.offset);
        const bool source_gpu = write ? run.local_gpu : run.remote_gpu;
        const bool target_gpu = write ? run.remote_gpu : run.local_gpu;
        CUdeviceptr from = write ? run.local : run.remote, to = write ? run.remote : run.local;
        if (!source_gpu) { // the host's bytes first
            PieceList here, there;
            here.add_plain(copy->bounce + run.offset, run.length);
            there.add_plain(reinterpret_cast<void *>(from), run.length);
            const int rc = copy_host(write ? *self : peer, here, there, false);
            if (!target_gpu && rc == 0) { // host to host, beside GPU memory in the same list
                PieceList target;
                target.add_plain(reinterpret_cast<void *>(to), run.length);
                copy->error = copy_host(write ? peer : *self, here, target, true);
                continue;
            }
            copy->error = copy->error != 0 ? copy->error : rc;
            from = bounce;
        } else if (!target_gpu) {
            to = bounce;
        }
        if (copy->error == 0 && cu.copy(to, from, run.length, copy->device->stream) != 0) {
            copy->error = EIO;
        }
    }
    if (cu.event_record(copy->event, copy->device->stream) != 0) {
        copy->error = EIO;
    }
    for (Mr *region : copy->regions) {
        region->users++;
    }
    if (copy->mapping != nullptr) {
        copy->mapping->users++;
    }
    error = 0;
    return copy.release();
}

int Gpu::finish(Copy *copy)
{
    Driver &cu = *m_driver;
    constexpr int kNotReady = 600;
    if (cu.set_current(copy->device->context) != 0) {
        copy->error = EIO;
    }
    const int state = cu.event_query(copy->event);
    if (state == kNotReady) {
        return EINPROGRESS;
    }
    int error = copy->error != 0 ? copy->error : state != 0 ? EIO : 0;
    for (const Run &run : copy->runs) {
        const bool source_gpu = copy->write ? run.local_gpu : run.remote_gpu;
        const bool target_gpu = copy->write ? run.remote_gpu : run.local_gpu;
        if (error == 0 && source_gpu && !target_gpu) {
            PieceList here, there;
            here.add_plain(copy->bounce + run.offset, run.length);
            there.add_plain(reinterpret_cast<void *>(copy->write ? run.remote : run.local),
                            run.length);
            error = copy_host(copy->write ? *copy->peer : *self, here, there, true);
        }
    }
    for (Mr *region : copy->regions) {
        region->users--;
    }
    if (copy->mapping != nullptr) {
        copy->mapping->users--;
    }
    if (copy->bounce != nullptr) {
        m_free_bounces.push_back(copy->bounce_index);
    }
    copy->device->events.push_back(copy->event);
    delete copy;
    return error;
}

void Gpu::abandon(Copy *copy)
{
    copy->error = ECANCELED; // nothing goes to host memory any more
    if (m_driver->set_current(copy->device->context) == 0) {
        m_driver->event_synchronize(copy->event);
    }
    while (finish(copy) == EINPROGRESS) {
    }
}

void Gpu::sweep(bool all)
{
    if (m_mappings.empty()) {
        return;
    }
    // a killed peer does not say so; it is noticed when something else changes
    const uint32_t gone = fabric->allocations_gone.load();
    if (gone == m_swept && !all) {
        return;
    }
    m_swept = gone;
    for (auto it = m_mappings.begin(); it != m_mappings.end();) {
        Mapping &m = it->second;
        const bool valid = m.owner->head.generation.load() == m.generation && alive(*m.owner) &&
                           m.owner->allocation[m.allocation].id.load() == it->first.first;
        if (valid || m.users != 0) {
            if (!valid) {
                m_swept = gone - 1; // again, later
            }
            ++it;
            continue;
        }
        if (device(m.device) != nullptr) {
            m_driver->close_handle(m.base);
        }
        it = m_mappings.erase(it);
    }
}

} // namespace swverbs
