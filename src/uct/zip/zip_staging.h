// SPDX-License-Identifier: BSD-3-Clause
// Staging memory of an interface: the ring of slots that peers put segments into, the buffers that
// segments are encoded into, and a peer's ring as the sender sees it.
#ifndef ZIP_STAGING_H
#define ZIP_STAGING_H

#include "uct/zip/zip_md.h"

#include <memory>
#include <vector>

namespace zip {

// Memory that the domain below can send from or be put into.
class StagingMemory {
public:
    // `length` bytes, allocated by `md`'s domain below if it can, and registered there if it asks
    // for that. For a GPU: memory that it reaches, its own where the domain below takes that,
    // otherwise pinned memory of the host. NULL: there is none.
    static std::unique_ptr<StagingMemory> allocate(Md *md, Gpu *gpu, size_t length,
                                                   const char *name);
    ~StagingMemory();
    StagingMemory(const StagingMemory &) = delete;
    StagingMemory &operator=(const StagingMemory &) = delete;

    char *address() const { return static_cast<char *>(memory_.address); }
    uct_mem_h memh() const { return memh_; }
    bool on_gpu() const { return kind_ == Kind::DEVICE; }
    // The remote key of the domain below; empty if it needs none.
    const std::vector<char> &rkey() const { return rkey_; }

private:
    enum class Kind { HOST, DEVICE, PINNED }; // by UCX, or by the GPU's back end
    StagingMemory() = default;
    bool allocate_on_gpu(size_t length);
    bool allocate_pinned(size_t length);
    bool allocate_on_host(size_t length, const char *name);
    bool register_below();
    bool pack_rkey();

    Md *md_ = nullptr;
    Gpu *gpu_ = nullptr;
    Kind kind_ = Kind::HOST;
    bool pinned_ = false; // by the GPU's back end, though not allocated by it
    uct_allocated_memory_t memory_ = {};
    uct_mem_h memh_ = nullptr;
    bool registered_ = false;
    std::vector<char> rkey_;
};

// Equal slots of a staging memory, each free or lent.
class SlotPool {
public:
    SlotPool(std::unique_ptr<StagingMemory> memory, size_t slot_size, uint32_t count);

    size_t slot_size() const { return slot_size_; }
    uint32_t count() const { return count_; }
    uint32_t free_count() const { return static_cast<uint32_t>(free_.size()); }
    StagingMemory &memory() { return *memory_; }
    char *slot(uint32_t index) { return memory_->address() + index * slot_size_; }

    // The lowest one that is free, so that those taken one after the other are neighbours.
    bool take(uint32_t &index);
    void give_back(uint32_t index);

private:
    std::unique_ptr<StagingMemory> memory_;
    size_t slot_size_;
    uint32_t count_;
    std::vector<uint32_t> free_; // descending
};

// Name of this process for its peers, and whether a process so named may still run: true also where
// that cannot be told.
wire::ProcessId this_process();
bool may_run(const wire::ProcessId &process);

// A peer's ring: mapped here where the domain below allows that, otherwise written by puts.
class RemoteRing {
public:
    // `rkey` is the packed key of the domain below, empty if it needs none.
    static std::unique_ptr<RemoteRing> open(Md *md, uint64_t address, size_t slot_size,
                                            uint32_t count, const void *rkey, ucs_status_t &status);
    ~RemoteRing();
    RemoteRing(const RemoteRing &) = delete;
    RemoteRing &operator=(const RemoteRing &) = delete;

    size_t slot_size() const { return slot_size_; }
    uint32_t count() const { return count_; }
    uint64_t remote_address(uint32_t slot) const { return address_ + slot * slot_size_; }
    uct_rkey_t rkey() const { return bundle_.rkey; }
    bool mapped() const { return mapping_ != nullptr; }
    // Lets a GPU write the mapped ring. False: its driver cannot.
    bool pin_for(Gpu *gpu);
    char *mapped_slot(uint32_t slot) const { return mapping_ + slot * slot_size_; }

private:
    RemoteRing() = default;

    uct_component_h component_ = nullptr;
    uct_rkey_bundle_t bundle_ = {};
    bool unpacked_ = false;
    char *mapping_ = nullptr;
    Gpu *pinned_for_ = nullptr;
    uint64_t address_ = 0;
    size_t slot_size_ = 0;
    uint32_t count_ = 0;
};

} // namespace zip

#endif
