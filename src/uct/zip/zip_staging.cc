// SPDX-License-Identifier: BSD-3-Clause
// Staging memory: allocation, registration and mapping through the memory domain below.
#include "uct/zip/zip_staging.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
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

std::unique_ptr<StagingMemory> StagingMemory::allocate(Md *md, size_t length, const char *name)
{
    std::unique_ptr<StagingMemory> staging(new (std::nothrow) StagingMemory());
    if (!staging) {
        return nullptr;
    }
    const bool by_md = (md->lower_attr.flags & UCT_MD_FLAG_ALLOC) != 0 &&
                       (md->lower_attr.alloc_mem_types & UCS_BIT(UCS_MEMORY_TYPE_HOST)) != 0;
    // Of a domain that maps memory into peers only its own allocations can be mapped.
    const uct_alloc_method_t methods[] = {by_md ? UCT_ALLOC_METHOD_MD : UCT_ALLOC_METHOD_MMAP};

    uct_mem_alloc_params_t params = {};
    params.field_mask = UCT_MEM_ALLOC_PARAM_FIELD_FLAGS | UCT_MEM_ALLOC_PARAM_FIELD_MEM_TYPE |
                        UCT_MEM_ALLOC_PARAM_FIELD_MDS | UCT_MEM_ALLOC_PARAM_FIELD_NAME;
    params.flags = UCT_MD_MEM_ACCESS_RMA;
    params.mem_type = UCS_MEMORY_TYPE_HOST;
    params.mds.mds = &md->lower;
    params.mds.count = 1;
    params.name = name;
    if (uct_mem_alloc(length, methods, 1, &params, &staging->memory_) != UCS_OK) {
        return nullptr;
    }
    staging->md_ = md;
    if (!by_md) {
        // A card's driver does so when it pins the pages; elsewhere the first segments would pay.
        memset(staging->memory_.address, 0, staging->memory_.length);
    }

    if (by_md) {
        staging->memh_ = staging->memory_.memh;
    } else if ((md->lower_attr.flags & UCT_MD_FLAG_REG) != 0 &&
               (md->lower_attr.flags & (UCT_MD_FLAG_NEED_MEMH | UCT_MD_FLAG_NEED_RKEY)) != 0) {
        if (uct_md_mem_reg(md->lower, staging->memory_.address, staging->memory_.length,
                           UCT_MD_MEM_ACCESS_RMA, &staging->memh_) != UCS_OK) {
            return nullptr;
        }
        staging->registered_ = true;
        md->count_registration(static_cast<ssize_t>(staging->memory_.length));
    }
    if ((md->lower_attr.flags & UCT_MD_FLAG_NEED_RKEY) != 0) {
        staging->rkey_.resize(md->lower_attr.rkey_packed_size);
        if (uct_md_mkey_pack(md->lower, staging->memh_, staging->rkey_.data()) != UCS_OK) {
            return nullptr;
        }
    }
    return staging;
}

StagingMemory::~StagingMemory()
{
    if (registered_) {
        uct_md_mem_dereg(md_->lower, memh_);
        md_->count_registration(-static_cast<ssize_t>(memory_.length));
    }
    if (memory_.address != nullptr) {
        uct_mem_free(&memory_);
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

RemoteRing::~RemoteRing()
{
    if (unpacked_) {
        uct_rkey_release(component_, &bundle_);
    }
}

} // namespace zip
