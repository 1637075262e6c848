// SPDX-License-Identifier: BSD-3-Clause
// The fabric: shared memory in which the devices of all processes see one another, who is alive
// in it, and how one wakes another.
#pragma once

#include "settings.h"

#include <pthread.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>

namespace swverbs {

// Limits. The file is sparse: only what is touched costs memory.
constexpr unsigned kSlots = 128; // processes of a fabric
constexpr unsigned kDevices = 8; // of a process
constexpr unsigned kQps = 2048;  // of a process, as are the following
constexpr unsigned kSrqs = 512;
constexpr unsigned kCqs = 4096;
constexpr unsigned kMrs = 16384;
constexpr unsigned kAllocations = 256; // GPU allocations with registered regions
constexpr unsigned kSge = 16;
constexpr uint32_t kMaxWr = 16384;
constexpr uint32_t kMaxCqe = 1 << 18;
constexpr size_t kArena = 512u << 20; // rings of completion and receive queues

inline uint64_t now_ns()
{
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<uint64_t>(t.tv_sec) * 1000000000 + static_cast<uint64_t>(t.tv_nsec);
}

inline void relax()
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// A lock between processes that survives the death of its holder: the word names the holder's
// slot and its generation, and who waits for long asks whether that process is still there. (A
// robust mutex would do, but its list entries must not lie in memory that a slot's next owner
// clears.)
class Lock {
public:
    void lock()
    {
        if (!try_lock()) {
            wait();
        }
    }
    bool try_lock();
    void unlock() { m_holder.store(0, std::memory_order_release); }

private:
    void wait();
    std::atomic<uint32_t> m_holder;
};

struct Mr {
    std::atomic<uint32_t> key;   // 0: free; lkey == rkey
    std::atomic<uint32_t> users; // GPU copies of peers that use it now
    uint32_t pd, access;
    uint64_t iova, length;
    uint64_t va;         // where it is in its owner
    uint32_t allocation; // GPU memory: 1 + index of the allocation that it lies in; else 0
};

// A GPU allocation with registered regions, as cuIpcGetMemHandle() names it to other processes.
struct Allocation {
    std::atomic<uint64_t> id; // 0: free; never used twice in a fabric
    uint64_t base, size;
    uint64_t buffer_id; // the driver's, of the owning process
    int device;         // in the owner's numbering
    uint8_t uuid[16];   // of that device
    uint8_t handle[64];
    uint32_t regions; // owner only
};

// Appended to by any device, consumed by its owner.
struct Cq {
    Lock lock; // of producers
    std::atomic<uint64_t> head, tail;
    std::atomic<uint32_t> armed;   // 0, 1: any completion, 2: solicited ones or errors
    std::atomic<uint32_t> fire;    // an event for the completion channel
    std::atomic<uint32_t> overrun; // a completion was lost
    // Tails when the last event was made, and of the last completion that is worth one for who
    // asked for solicited ones. Under the lock.
    uint64_t told, solicited;
    uint32_t capacity, mask;
    uint64_t ring; // of ibv_wc, in the arena
};

struct Receive {
    uint64_t wr_id;
    uint32_t num_sge;
    uint32_t reserved;
    ibv_sge sge[kSge];
};

// Receive queue, of a QP or shared. Filled by its owner, emptied by any device.
struct Rq {
    Lock lock;
    std::atomic<uint64_t> head, tail;
    uint32_t capacity, mask, max_sge, stride;
    uint64_t ring;  // of Receive, cut to max_sge elements, in the arena
    uint32_t limit; // SRQ: an event when fewer are left; 0: not armed
    std::atomic<uint32_t> limit_reached;
};

struct Qp {
    std::atomic<uint32_t> qpn;   // 0: free
    std::atomic<uint32_t> state; // ibv_qp_state; a peer may set ERR
    std::atomic<uint32_t> event; // 1 + async event that a peer asks the owner to raise
    uint32_t type, device;
    uint32_t pd, access, qkey, min_rnr_timer;
    uint32_t dest_qpn, dest_lid;
    uint32_t receive_cq, rq;
    // The receive that a SEND of several chunks has taken and not completed yet.
    std::atomic<uint32_t> receiving;
    Receive current;
};

// What peers know of one device. Its counters count payload.
struct alignas(64) Port {
    std::atomic<uint32_t> lid;             // 0: there is no such device
    std::atomic<uint64_t> egress, ingress; // the link is reserved until then
    std::atomic<uint64_t> down_until, stalled_until;
    alignas(64) std::atomic<uint64_t> xmit_data, xmit_packets;
    alignas(64) std::atomic<uint64_t> rcv_data, rcv_packets;
};

// Bits of Head::attention: why the owner is woken.
constexpr uint32_t kAttentionQps = 1, kAttentionChannels = 2, kAttentionSrqs = 4,
                   kAttentionOverdue = 8;

// What of a slot survives a change of its owner.
struct alignas(4096) Head {
    pthread_mutex_t life; // robust; held by the device thread of the owner for all its life
    std::atomic<uint32_t> pid, generation;
    std::atomic<uint32_t> doorbell, sleeping, attention;
    std::atomic<uint64_t> due; // when its device has something to do
    // Whom this process' device serves at the moment: 1 + slot in the low byte, a count above it.
    // The owner of that slot must not give up what it has just invalidated before this changes.
    std::atomic<uint32_t> visiting;
    Lock atomics;
    Port port[kDevices];
};

struct alignas(4096) Slot {
    Head head;
    alignas(4096) Qp qp[kQps];
    alignas(4096) Mr mr[kMrs];
    alignas(4096) Allocation allocation[kAllocations];
    alignas(4096) Cq cq[kCqs];
    alignas(4096) Rq rq[kQps + kSrqs]; // a QP's own receive queue has the QP's index
    alignas(4096) uint8_t arena[kArena];
};

struct Fabric {
    alignas(4096) std::atomic<uint64_t> magic;
    std::atomic<uint32_t> next_slot, generation;
    std::atomic<uint32_t> population; // processes, about: how often their threads may wake
    std::atomic<uint64_t> allocation_id;
    std::atomic<uint32_t> allocations_gone; // counts GPU allocations that lost their last region
    Slot slot[kSlots];
};

extern Fabric *fabric;
extern Slot *self; // this process' slot; null until joined
extern unsigned self_index;

// Maps the fabric, creating it where needed, and takes a free slot. Called by the thread that will
// live as long as the device: its death is how peers know. False with a line on stderr if that
// fails.
bool join_fabric();
// The end of join_fabric(), by the same thread; frees the slot's memory and, if nobody is left,
// the fabric.
void leave_fabric();

bool alive(Slot &slot);
// The device with that local identifier; null if there is none (any more).
Slot *find_device(uint32_t lid, Port *&port);
// Wakes the owner of a slot, or its device thread if it is this process.
void ring(Slot &slot);
void call_attention(Slot &slot, uint32_t why);
// Waits until no other process' device is in the middle of serving this process with what was
// valid before the call.
void await_visitors();

// While it exists, the owner of `slot` keeps what it invalidates; see Head::visiting.
class Visit {
public:
    explicit Visit(const Slot &slot);
    ~Visit();
    Visit(const Visit &) = delete;
    Visit &operator=(const Visit &) = delete;
};

// Room in this process' arena. Not thread-safe.
class Arena {
public:
    // Offset of `size` zero bytes; false if there is no room.
    bool allocate(size_t size, uint64_t &offset);
    void release(uint64_t offset);
    void reset();

private:
    std::map<uint64_t, size_t> m_free, m_used;
};

inline uint64_t guid_of(uint32_t lid)
{
    return 0x5357000000000000ull | lid;
}

} // namespace swverbs
