// SPDX-License-Identifier: BSD-3-Clause
// GPU memory: what its registration remembers and how it moves. The driver's library is opened at
// the first such region; a program without CUDA needs none.
#pragma once

#include "memory.h"

#include <map>
#include <memory>
#include <utility>
#include <vector>

namespace swverbs {

class Gpu {
public:
    // A segment that is being copied.
    struct Copy;

    Gpu();
    ~Gpu();

    // Registration, in the application's thread: the allocation that [address, address + length)
    // lies in. 0, EFAULT if it is not GPU memory, ENOTSUP (logged) if no other process can open it.
    int describe(uint64_t address, uint64_t length, Allocation &allocation);

    // The rest is for the device's own thread.

    // Starts to copy; null with `error` EAGAIN if there is no room at the moment, or another error.
    Copy *start(Slot &peer, const PieceList &local, const PieceList &remote, bool write,
                int &error);
    // EINPROGRESS, or the result; then `copy` is gone.
    int finish(Copy *copy);
    // Waits until `copy` touches no memory any more, and drops it.
    void abandon(Copy *copy);
    // Closes what was opened of allocations that their owner has given up. Without `all`: if any
    // process has given up some since the last call.
    void sweep(bool all = false);

private:
    struct Driver;
    struct Device;
    struct Mapping {
        uint64_t base;
        int device; // that copies
        Slot *owner;
        uint32_t allocation, generation;
        unsigned users;
    };
    struct Run;

    bool open();
    Device *device(int ordinal);
    Mapping *map(Slot &peer, uint32_t allocation, int local_device);
    int local_ordinal(const Allocation &allocation, int otherwise);

    std::unique_ptr<Driver> m_driver;
    std::map<int, std::unique_ptr<Device>> m_devices;
    std::map<std::pair<uint64_t, int>, Mapping> m_mappings; // by Allocation::id and GPU
    uint8_t *m_bounce = nullptr; // pinned; kBounces pieces of SWVERBS_CHUNK
    std::vector<unsigned> m_free_bounces;
    uint32_t m_swept = 0;
};

} // namespace swverbs
