// SPDX-License-Identifier: BSD-3-Clause
// The fabric: creation and reuse of the shared memory, liveness, wake-ups.
#include "fabric.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <string>

namespace swverbs {

Fabric *fabric;
Slot *self;
unsigned self_index;

namespace {

// Of this layout: a file that begins otherwise is made anew.
constexpr uint64_t kMagic = 0x5357564552420100ull + sizeof(Fabric);
// Lids run from 1 to 0xbfff. A slot's next owner gets others: who still knows the old ones must
// not reach it.
constexpr uint32_t kLidGenerations = 32;
static_assert(kLidGenerations * kSlots * kDevices < 0xbfff);

int fabric_fd = -1;

std::string path()
{
    return "/dev/shm/" + settings().fabric + ".fabric";
}

uint32_t holder_word()
{
    return self == nullptr
                   ? UINT_MAX
                   : self->head.generation.load(std::memory_order_relaxed) << 8 | (self_index + 1);
}

void nap(long nanoseconds)
{
    const timespec t = {0, nanoseconds};
    nanosleep(&t, nullptr);
}

bool got(int rc, pthread_mutex_t *mutex)
{
    if (rc == EOWNERDEAD) {
        pthread_mutex_consistent(mutex);
    }
    return rc == 0 || rc == EOWNERDEAD;
}

void init_robust(pthread_mutex_t *mutex)
{
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(mutex, &attributes);
    pthread_mutexattr_destroy(&attributes);
}

// The slot's memory but its head, back to the system; it then reads as zeros.
void clear(Slot &slot)
{
    madvise(reinterpret_cast<char *>(&slot) + sizeof(Head), sizeof(Slot) - sizeof(Head),
            MADV_REMOVE);
}

// Who comes and who goes is serialised by the file's lock.
void lock_file()
{
    while (flock(fabric_fd, LOCK_EX) != 0 && errno == EINTR) {
    }
}

void unlock_file()
{
    flock(fabric_fd, LOCK_UN);
}

} // namespace

bool Lock::try_lock()
{
    uint32_t none = 0;
    return m_holder.load(std::memory_order_relaxed) == 0 &&
           m_holder.compare_exchange_strong(none, holder_word(), std::memory_order_acquire);
}

void Lock::wait()
{
    for (unsigned i = 0;; i++) {
        if (try_lock()) {
            return;
        }
        if (i < 100) {
            relax();
            continue;
        }
        // its holder does not run, perhaps because this thread, of higher priority, does
        nap(20000);
        if (i % 100 == 0) {
            uint32_t word = m_holder.load();
            const unsigned index = (word & 0xff) - 1;
            if (word == 0 || index >= kSlots) {
                continue;
            }
            Slot &slot = fabric->slot[index];
            const bool gone =
                    (slot.head.generation.load() << 8 | (index + 1)) != word || !alive(slot);
            if (gone && m_holder.compare_exchange_strong(word, holder_word())) {
                return;
            }
        }
    }
}

// Opens, and creates where needed, the file. The caller holds its lock afterwards.
static bool open_locked()
{
    for (;;) {
        fabric_fd = open(path().c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (fabric_fd < 0) {
            return false;
        }
        lock_file();
        struct stat info;
        if (fstat(fabric_fd, &info) != 0) {
            return false;
        }
        if (info.st_nlink == 0) { // the last process of an earlier run removed it in between
            close(fabric_fd);
            continue;
        }
        return static_cast<size_t>(info.st_size) == sizeof(Fabric) ||
               (ftruncate(fabric_fd, 0) == 0 && ftruncate(fabric_fd, sizeof(Fabric)) == 0);
    }
}

static bool map_locked()
{
    if (!open_locked()) {
        return false;
    }
    void *p = mmap(nullptr, sizeof(Fabric), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE,
                   fabric_fd, 0);
    if (p == MAP_FAILED) {
        return false;
    }
    madvise(p, sizeof(Fabric), MADV_DONTFORK);
    madvise(p, sizeof(Fabric), MADV_DONTDUMP);
    fabric = static_cast<Fabric *>(p);
    if (fabric->magic.load() == kMagic) {
        return true;
    }
    if (fabric->magic.load() != 0 &&
        (ftruncate(fabric_fd, 0) != 0 || ftruncate(fabric_fd, sizeof(Fabric)) != 0)) {
        return false;
    }
    for (Slot &slot : fabric->slot) {
        init_robust(&slot.head.life);
    }
    fabric->magic = kMagic;
    return true;
}

bool join_fabric()
{
    if (!map_locked()) {
        fprintf(stderr, "swverbs: shared memory %s: %s\n", path().c_str(), strerror(errno));
        return false;
    }
    unsigned population = 0;
    const unsigned first = fabric->next_slot.load();
    for (unsigned i = 0; i < kSlots; i++) {
        // in turn, so that a dead one is reused late
        const unsigned index = (first + i) % kSlots;
        Slot &slot = fabric->slot[index];
        if (slot.head.pid.load() == 0 && self != nullptr) {
            continue; // never used or left in order
        }
        if (!got(pthread_mutex_trylock(&slot.head.life), &slot.head.life)) {
            population++;
            continue;
        }
        if (self == nullptr) {
            self = &slot;
            self_index = index;
            population++;
            continue;
        }
        clear(slot); // of a process that was killed: give its memory back
        slot.head.pid = 0;
        pthread_mutex_unlock(&slot.head.life);
    }
    if (self == nullptr) {
        fprintf(stderr, "swverbs: all %u places of the fabric %s are in use\n", kSlots,
                path().c_str());
        unlock_file();
        return false;
    }
    fabric->next_slot = self_index + 1;
    fabric->population = population;
    Head &head = self->head;
    for (Port &port : head.port) {
        port.lid = 0;
    }
    clear(*self);
    head.generation = ++fabric->generation & 0xffffff;
    head.attention = 0;
    head.due = kNever;
    head.visiting = 0;
    head.sleeping = 0;
    new (&head.atomics) Lock();
    // a peer that began to serve the place's last owner must not go on with this one
    await_visitors();
    head.pid = static_cast<uint32_t>(getpid());
    for (unsigned d = 0; d < settings().devices; d++) {
        Port &port = head.port[d];
        port.egress = port.ingress = port.down_until = port.stalled_until = 0;
        port.xmit_data = port.xmit_packets = port.rcv_data = port.rcv_packets = 0;
        port.lid =
                1 + (head.generation.load() % kLidGenerations * kSlots + self_index) * kDevices + d;
    }
    unlock_file();
    return true;
}

void leave_fabric()
{
    lock_file();
    for (Port &port : self->head.port) {
        port.lid = 0;
    }
    await_visitors();
    clear(*self);
    self->head.pid = 0;
    pthread_mutex_unlock(&self->head.life);
    fabric->population.fetch_sub(1);
    for (Slot &slot : fabric->slot) {
        if (&slot != self && slot.head.pid.load() != 0 && alive(slot)) {
            unlock_file();
            return;
        }
    }
    unlink(path().c_str());
    unlock_file();
}

bool alive(Slot &slot)
{
    if (&slot == self) {
        return true;
    }
    if (!got(pthread_mutex_trylock(&slot.head.life), &slot.head.life)) {
        return true;
    }
    pthread_mutex_unlock(&slot.head.life);
    return false;
}

Slot *find_device(uint32_t lid, Port *&port)
{
    if (lid == 0) {
        return nullptr;
    }
    Slot &slot = fabric->slot[(lid - 1) / kDevices % kSlots];
    port = &slot.head.port[(lid - 1) % kDevices];
    return port->lid.load() == lid && alive(slot) ? &slot : nullptr;
}

void ring(Slot &slot)
{
    slot.head.doorbell.fetch_add(1);
    if (slot.head.sleeping.load() != 0) {
        syscall(SYS_futex, &slot.head.doorbell, FUTEX_WAKE, 1, nullptr, nullptr, 0);
    }
}

void call_attention(Slot &slot, uint32_t why)
{
    slot.head.attention.fetch_or(why);
    ring(slot);
}

void await_visitors()
{
    for (Slot &slot : fabric->slot) {
        if (&slot == self || slot.head.pid.load() == 0) {
            continue;
        }
        const uint32_t visit = slot.head.visiting.load();
        if ((visit & 0xff) != self_index + 1) {
            continue;
        }
        for (unsigned i = 0; slot.head.visiting.load() == visit; i++) {
            if (i < 1000) {
                relax();
                continue;
            }
            if (i % 100 == 0 && !alive(slot)) {
                uint32_t last = visit;
                slot.head.visiting.compare_exchange_strong(last, 0);
                break;
            }
            nap(20000);
        }
    }
}

Visit::Visit(const Slot &slot)
{
    const uint32_t count = (self->head.visiting.load(std::memory_order_relaxed) >> 8) + 1;
    const auto index = static_cast<uint32_t>(&slot - fabric->slot);
    self->head.visiting.store(count << 8 | (index + 1)); // ordered before all checks that follow
}

Visit::~Visit()
{
    self->head.visiting.store(self->head.visiting.load(std::memory_order_relaxed) & ~0xffu,
                              std::memory_order_release);
}

bool Arena::allocate(size_t size, uint64_t &offset)
{
    size = (size + 4095) & ~size_t{4095};
    for (auto it = m_free.begin(); it != m_free.end(); ++it) {
        if (it->second < size) {
            continue;
        }
        offset = it->first;
        const size_t rest = it->second - size;
        m_free.erase(it);
        if (rest != 0) {
            m_free[offset + size] = rest;
        }
        m_used[offset] = size;
        return true;
    }
    return false;
}

void Arena::release(uint64_t offset)
{
    auto used = m_used.find(offset);
    size_t size = used->second;
    m_used.erase(used);
    madvise(self->arena + offset, size, MADV_REMOVE);
    auto next = m_free.lower_bound(offset);
    if (next != m_free.end() && next->first == offset + size) {
        size += next->second;
        next = m_free.erase(next);
    }
    if (next != m_free.begin()) {
        auto previous = std::prev(next);
        if (previous->first + previous->second == offset) {
            previous->second += size;
            return;
        }
    }
    m_free[offset] = size;
}

void Arena::reset()
{
    m_used.clear();
    m_free = {{0, kArena}};
}

} // namespace swverbs
