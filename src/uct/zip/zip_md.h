// SPDX-License-Identifier: BSD-3-Clause
// The memory domain: one wraps one memory domain below, and knows which memory of this process
// peers may write.
#ifndef ZIP_MD_H
#define ZIP_MD_H

#include "uct/zip/ucx_bind.h"
#include "uct/zip/zip_wire.h"

#include <condition_variable>
#include <mutex>
#include <string>
#include <unordered_map>

namespace zip {

extern ucx::Component component; // the one of this plugin

struct MdOptions { // as UCX's parser fills it from md_options_table
    char *transports;
    uint64_t mem_types; // bits of ucs_memory_type_t
};
extern ucs_config_field_t md_options_table[];

// A registered range of this process's memory.
struct Region {
    uint64_t id;
    uintptr_t address;
    size_t length;
    bool exported; // its remote key was packed: peers may write to it
    unsigned pins; // decodes under way into it
};

// Random bits that a peer cannot guess.
uint64_t random_id();

struct Md {
    ucx::Md super; // must be first: UCX sees only this
    uct_component_h lower_component;
    uct_md_h lower;
    ucx::MdAttr lower_attr;
    std::string transport; // name of the transport below, "tcp"
    bool lower_rkey_ptr;   // remote memory of the domain below can be mapped here
    uint64_t mem_types;

    ~Md();

    // Keeps region `id` from being deregistered, if it is exported and holds all of [address,
    // address + length). Any thread. NULL if it does not; otherwise unpin() must follow.
    Region *pin(uint64_t id, uint64_t address, uint64_t length);
    void unpin(Region *region);

    std::mutex mutex;
    std::condition_variable unpinned;
    std::unordered_map<uint64_t, Region *> regions; // under mutex, as are their fields
};

inline Md *md_of(uct_md_h md)
{
    return reinterpret_cast<Md *>(md);
}

// What an unpacked remote key is.
struct Rkey {
    uint64_t region;
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
