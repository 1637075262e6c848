// SPDX-License-Identifier: BSD-3-Clause
// Staging memory: allocation, registration and mapping through the memory domain below.
#include "uct/zip/zip_staging.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <new>

namespace zip {

namespace {

uint64_t pid_namespace()
{
    struct stat info;
    return stat("/proc/self/ns/pid", &info) == 0 ? info.st_ino : 0;
}

// 0: no such process
uint64_t start_time(uint32_t pid)
{
    char path[64];
    snprintf(path, sizeof(path), "/proc/%u/stat", pid);
    FILE *file = fopen(path, "r");
    if (file == nullptr) {
        return 0;
    }
    // the name in brackets may hold anything; the start time is the 20th field behind it
    char line[1024];
    const size_t length = fread(line, 1, sizeof(line) - 1, file);
    fclose(file);
    line[length] = 0;
    const char *rest = strrchr(line, ')');
    unsigned long long value = 0;
    if (rest != nullptr) {
        sscanf(rest + 1,
               " %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu",
               &value);
    }
    return value;
}

} // namespace

// Whether [address, address + length) is shared memory mapped for writing that begins at `address`.
// A peer names the place of its ring, and the domain below adds that to where it mapped the peer's
// memory without asking how long it is.
static bool begins_shared_mapping(const void *address, size_t length)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    if (maps == nullptr) {
        return false;
    }
    bool found = false;
    char line[512];
    while (!found && fgets(line, sizeof(line), maps) != nullptr) {
        unsigned long long start, end;
        char permissions[5];
        found = sscanf(line, "%llx-%llx %4s", &start, &end, permissions) == 3 &&
                start == reinterpret_cast<uintptr_t>(address) && end - start >= length &&
                permissions[1] == 'w' && permissions[3] == 's';
    }
    fclose(maps);
    return found;
}

wire::ProcessId this_process()
{
    const uint32_t pid = static_cast<uint32_t>(getpid());
    static wire::ProcessId self = {}; // a child of fork() is another one
    if (self.pid != pid) {
        self = {pid_namespace(), start_time(pid), pid};
    }
    return self;
}

bool may_run(const wire::ProcessId &process)
{
    if (process.pid_namespace == 0 || process.pid_namespace != pid_namespace()) {
        return true;
    }
    return start_time(process.pid) == process.start_time;
}

std::unique_ptr<StagingMemory> StagingMemory::allocate(Md *md, Gpu *gpu, size_t length,
                                                       const char *name)
{
    // Of a domain that maps memory into peers only its own allocations can be mapped.
    std::vector<Kind> kinds = {Kind::HOST};
    if (gpu != nullptr && !md->lower_rkey_ptr) {
        kinds = md->lower_takes_gpu() ? std::vector{Kind::DEVICE, Kind::PINNED}
                                      : std::vector{Kind::PINNED};
    }
    for (Kind kind : kinds) {
        std::unique_ptr<StagingMemory> staging(new (std::nothrow) StagingMemory());
        if (!staging) {
            return nullptr;
        }
        staging->md_ = md;
        staging->gpu_ = gpu;
        const bool allocated = kind == Kind::DEVICE   ? staging->allocate_on_gpu(length)
                               : kind == Kind::PINNED ? staging->allocate_pinned(length)
                                                      : staging->allocate_on_host(length, name);
        if (allocated && staging->pack_rkey()) {
            return staging;
        }
    }
    return nullptr;
}

bool StagingMemory::allocate_on_gpu(size_t length)
{
    const zip_gpu_api_t &api = gpu_->api();
    if (api.memory_allocate(gpu_->handle(), ZIP_GPU_DEVICE, length, &memory_.address) != ZIP_OK) {
        memory_.address = nullptr;
        return false;
    }
    kind_ = Kind::DEVICE;
    memory_.length = length;
    ucx::MemRegParams params{ucx::MemRegParams::FLAGS,
                             UCT_MD_MEM_ACCESS_LOCAL_READ | UCT_MD_MEM_ACCESS_LOCAL_WRITE |
                                     UCT_MD_MEM_ACCESS_RMA | UCT_MD_MEM_FLAG_HIDE_ERRORS,
                             -1, 0};
    if ((md_->lower_attr.flags & UCT_MD_FLAG_REG_DMABUF) != 0 &&
        api.memory_dmabuf(gpu_->handle(), memory_.address, length, &params.dmabuf_fd) == ZIP_OK) {
        params.field_mask |= ucx::MemRegParams::DMABUF_FD | ucx::MemRegParams::DMABUF_OFFSET;
    }
    const ucs_status_t status =
            uct_md_mem_reg_v2(md_->lower, memory_.address, length, &params, &memh_);
    if (params.dmabuf_fd >= 0) {
        close(params.dmabuf_fd);
    }
    if (status != UCS_OK) {
        zip_debug("zip: %s does not take GPU memory (%s): staging is in the host's",
                  md_->transport.c_str(), ucs_status_string(status));
        return false;
    }
    registered_ = true;
    md_->count_registration(static_cast<ssize_t>(length));
    return true;
}

bool StagingMemory::allocate_pinned(size_t length)
{
    if (gpu_->api().memory_allocate(gpu_->handle(), ZIP_GPU_PINNED, length, &memory_.address) !=
        ZIP_OK) {
        memory_.address = nullptr;
        return false;
    }
    kind_ = Kind::PINNED;
    memory_.length = length;
    return register_below();
}

bool StagingMemory::allocate_on_host(size_t length, const char *name)
{
    const bool by_md = (md_->lower_attr.flags & UCT_MD_FLAG_ALLOC) != 0 &&
                       (md_->lower_attr.alloc_mem_types & UCS_BIT(UCS_MEMORY_TYPE_HOST)) != 0;
    const uct_alloc_method_t methods[] = {by_md ? UCT_ALLOC_METHOD_MD : UCT_ALLOC_METHOD_MMAP};

    uct_mem_alloc_params_t params = {};
    params.field_mask = UCT_MEM_ALLOC_PARAM_FIELD_FLAGS | UCT_MEM_ALLOC_PARAM_FIELD_MEM_TYPE |
                        UCT_MEM_ALLOC_PARAM_FIELD_MDS | UCT_MEM_ALLOC_PARAM_FIELD_NAME;
    params.flags = UCT_MD_MEM_ACCESS_RMA;
    params.mem_type = UCS_MEMORY_TYPE_HOST;
    params.mds.mds = &md_->lower;
    params.mds.count = 1;
    params.name = name;
    if (uct_mem_alloc(length, methods, 1, &params, &memory_) != UCS_OK) {
        memory_.address = nullptr;
        return false;
    }
    if (!by_md) {
        // A card's driver does so when it pins the pages; elsewhere the first segments would pay.
        memset(memory_.address, 0, memory_.length);
    }
    if (gpu_ != nullptr) {
        pinned_ = gpu_->api().memory_pin(gpu_->handle(), memory_.address, memory_.length) == ZIP_OK;
        if (!pinned_) {
            zip_error("zip: staging memory cannot be pinned for the GPU: %s",
                      gpu_->api().error_text());
            return false;
        }
    }
    if (by_md) {
        memh_ = memory_.memh;
        return true;
    }
    return register_below();
}

bool StagingMemory::register_below()
{
    if (!md_->lower_registers) {
        return true;
    }
    if (uct_md_mem_reg(md_->lower, memory_.address, memory_.length, UCT_MD_MEM_ACCESS_RMA,
                       &memh_) != UCS_OK) {
        return false;
    }
    registered_ = true;
    md_->count_registration(static_cast<ssize_t>(memory_.length));
    return true;
}

bool StagingMemory::pack_rkey()
{
    if ((md_->lower_attr.flags & UCT_MD_FLAG_NEED_RKEY) == 0) {
        return true;
    }
    rkey_.resize(md_->lower_attr.rkey_packed_size);
    return uct_md_mkey_pack(md_->lower, memh_, rkey_.data()) == UCS_OK;
}

StagingMemory::~StagingMemory()
{
    if (registered_) {
        uct_md_mem_dereg(md_->lower, memh_);
        md_->count_registration(-static_cast<ssize_t>(memory_.length));
    }
    if (pinned_) {
        gpu_->api().memory_unpin(gpu_->handle(), memory_.address);
    }
    if (memory_.address == nullptr) {
        return;
    }
    if (kind_ == Kind::HOST) {
        uct_mem_free(&memory_);
    } else {
        gpu_->api().memory_free(gpu_->handle(),
                                kind_ == Kind::DEVICE ? ZIP_GPU_DEVICE : ZIP_GPU_PINNED,
                                memory_.address);
    }
}

SlotPool::SlotPool(std::unique_ptr<StagingMemory> memory, size_t slot_size, uint32_t count)
    : memory_(std::move(memory)), slot_size_(slot_size), count_(count)
{
    free_.reserve(count);
    for (uint32_t i = count; i-- > 0;) {
        free_.push_back(i);
    }
}

void SlotPool::give_back(uint32_t index)
{
    free_.insert(std::lower_bound(free_.begin(), free_.end(), index, std::greater<>()), index);
}

bool SlotPool::take(uint32_t &index)
{
    if (free_.empty()) {
        return false;
    }
    index = free_.back();
    free_.pop_back();
    return true;
}

std::unique_ptr<RemoteRing> RemoteRing::open(Md *md, uint64_t address, size_t slot_size,
                                             uint32_t count, const void *rkey, ucs_status_t &status)
{
    std::unique_ptr<RemoteRing> ring(new (std::nothrow) RemoteRing());
    if (!ring) {
        status = UCS_ERR_NO_MEMORY;
        return nullptr;
    }
    ring->component_ = md->lower_component;
    ring->bundle_.rkey = UCT_INVALID_RKEY;
    ring->address_ = address;
    ring->slot_size_ = slot_size;
    ring->count_ = count;
    if ((md->lower_attr.flags & UCT_MD_FLAG_NEED_RKEY) != 0) {
        if ((status = uct_rkey_unpack(md->lower_component, rkey, &ring->bundle_)) != UCS_OK) {
            return nullptr;
        }
        ring->unpacked_ = true;
    }
    if (md->lower_rkey_ptr) {
        void *mapping;
        if ((status = uct_rkey_ptr(md->lower_component, &ring->bundle_, address, &mapping)) !=
            UCS_OK) {
            return nullptr;
        }
        if (!begins_shared_mapping(mapping, slot_size * count)) {
            status = UCS_ERR_INVALID_ADDR;
            return nullptr;
        }
        ring->mapping_ = static_cast<char *>(mapping);
    }
    status = UCS_OK;
    return ring;
}

bool RemoteRing::pin_for(Gpu *gpu)
{
    if (pinned_for_ == nullptr &&
        gpu->api().memory_pin(gpu->handle(), mapping_, slot_size_ * count_) == ZIP_OK) {
        pinned_for_ = gpu; // and for all others
    }
    return pinned_for_ != nullptr;
}

RemoteRing::~RemoteRing()
{
    if (pinned_for_ != nullptr) {
        pinned_for_->api().memory_unpin(pinned_for_->handle(), mapping_);
    }
    if (unpacked_) {
        uct_rkey_release(component_, &bundle_);
    }
}

} // namespace zip
