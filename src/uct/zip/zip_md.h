// SPDX-License-Identifier: BSD-3-Clause
// The memory domain: one wraps one memory domain below, and knows which memory of this process
// peers may write.
#ifndef ZIP_MD_H
#define ZIP_MD_H

#include "uct/zip/ucx_bind.h"
#include "uct/zip/zip_gpu.h"
#include "uct/zip/zip_wire.h"

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

// The object whose `member` is at `address`. (UCX's own macro takes a member of a null pointer.)
#define ZIP_CONTAINER_OF(address, type, member)                                                    \
    reinterpret_cast<type *>(reinterpret_cast<char *>(address) - offsetof(type, member))

namespace zip {

extern ucx::Component component; // the one of this plugin

enum class BypassOption : unsigned { AUTO, NEVER, ALWAYS };

struct MdOptions { // as UCX's parser fills it from md_options_table
    char *transports;
    uint64_t mem_types; // bits of ucs_memory_type_t
    char *gpu_codec;
    unsigned bypass;
};
extern ucs_config_field_t md_options_table[];

// A registered range of this process's memory.
struct Region {
    static constexpr int NO_RING = -1;

    uint64_t id;
    uintptr_t address;
    size_t length;
    int ring;             // of what is decoded into it: 0: it is the host's, n: of GPU number n of
                          // the domain; NO_RING: nobody here can encode or decode it
    bool exported;        // peers may write to it and read it
    unsigned pins;        // decodes and encodes under way
    uct_mem_h lower_memh; // its registration in the domain below, or NULL
    bool lower_tried;     // that was tried
    bool removed = false; // deleted with its last pin
    // What of the pins a GPU holds.
    std::vector<GpuQueue::Ticket> device_pins = {};

    bool codable() const { return ring != NO_RING; }
    bool on_gpu() const { return ring > 0; }
};

// Random bits that a peer cannot guess.
uint64_t random_id();

// What registrations in the domain below there are: of the application's memory for operations that
// go straight, and of staging memory.
struct RegistrationCounters {
    uint64_t count = 0; // ever
    uint64_t bytes = 0; // now
    uint64_t peak_bytes = 0;

    void add(size_t length);
    void remove(size_t length) { bytes -= length; }
};

struct Md {
    ucx::Md super; // must be first: UCX sees only this
    uct_component_h lower_component;
    uct_md_h lower;
    ucx::MdAttr lower_attr;
    std::string transport;                        // name of the transport below, "tcp"
    std::vector<const zip_gpu_api_t *> back_ends; // of the GPU memory that is served
    bool lower_rkey_ptr;  // remote memory of the domain below can be mapped here
    bool lower_registers; // memory must be registered below before the transport reads or writes
    uint64_t mem_types;   // served, bits of ucs_memory_type_t
    BypassOption bypass;
    // Bytes from which on peers are to read and write GPU memory through zip. For what is shorter
    // UCX has ways of its own, where the memory is registered below.
    std::atomic<size_t> least_gpu = 0;

    ~Md();

    // The registration of `region` in the domain below, made at the first call; NULL if that
    // failed, or the domain needs none. Any thread.
    uct_mem_h lower_memh(Region *region);
    // Adds a region for [address, address + length) that needs no registration below, exported
    // already. NULL: no memory.
    Region *add_region(void *address, size_t length, int ring);
    // Takes it out again; waits until nobody pins it, and no GPU does.
    void remove_region(Region *region);

    // The ring for memory at `address`, as in Region. Makes the GPU known to this domain.
    int ring_for(const void *address);
    // Bytes of a key of the domain below; 0: it has none that others can use.
    size_t lower_key_size() const;
    // Packs that of a region into so many bytes. False: it is not registered there.
    bool pack_lower(Region *region, char *key);
    // The GPU of a ring, or NULL: there is none of that number.
    Gpu *gpu(unsigned ring);
    // Whether the domain below can be asked to register GPU memory.
    bool lower_takes_gpu() const;
    // Whether staging memory for GPUs is the host's.
    bool stages_gpu_on_host() const;
    RegistrationCounters registrations(); // any thread
    // For staging memory: counts what was registered (`length` > 0) or deregistered (< 0).
    void count_registration(ssize_t length);

    // Keeps region `id` from being deregistered, if it is exported and holds all of [address,
    // address + length). Any thread. NULL if it does not; otherwise unpin() must follow.
    Region *pin(uint64_t id, uint64_t address, uint64_t length);
    void unpin(Region *region);
    // A pin that a GPU's work holds, or will hold (a ticket of nothing); unpin_device() with a copy
    // of the ticket must follow.
    void pin_device(Region *region, const GpuQueue::Ticket &ticket);
    void unpin_device(Region *region, const GpuQueue::Ticket &ticket);
    // Both, for another ticket.
    void repin_device(Region *region, const GpuQueue::Ticket &from, const GpuQueue::Ticket &to);

    std::mutex mutex;
    std::condition_variable unpinned;
    // under mutex, as are `exported` and pins of all kinds
    std::unordered_map<uint64_t, Region *> regions;
    std::vector<Gpu *> gpus;       // of rings 1 and on; likewise
    std::mutex registration_mutex; // for registrations below; taken before `mutex` where both are
    RegistrationCounters registered;
};

inline Md *md_of(uct_md_h md)
{
    return reinterpret_cast<Md *>(md);
}

// What an unpacked remote key is.
struct Rkey {
    uint64_t region;
    int ring;                     // of the peer, for what is decoded into that region, as in Region
    uint16_t mark;                // range_mark() of what it was packed for
    std::vector<char> lower = {}; // packed key of the domain below; empty: not registered there
    uct_component_h component = nullptr; // of the domain below, once that key is unpacked
    uct_rkey_bundle_t bundle = {};
    bool used = false; // by a get

    ~Rkey();
    // Unpacks the key of the domain below when it is first needed. False if there is none, or it
    // is no good.
    bool unpack_lower(uct_component_h lower_component);
};

// Sets every slot of an operation table to a function that answers "unsupported"; those that later
// releases of UCX append too.
template <class Ops>
void fill_unsupported(Ops &ops)
{
    const auto unsupported = reinterpret_cast<void *>(+[] { return UCS_ERR_UNSUPPORTED; });
    for (size_t i = 0; i < sizeof(ops) / sizeof(void *); ++i) {
        reinterpret_cast<void **>(&ops)[i] = unsupported;
    }
}

// Fills the component's operations. Before registration.
void init_component();

} // namespace zip

#endif
