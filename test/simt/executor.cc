// SPDX-License-Identifier: BSD-3-Clause
// The CPU's executor of kernels: scheduler, barriers, operations of lanes.
#include "simt/executor.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <numeric>
#include <string_view>
#include <vector>

#include "simt/fibre.h"
#include "splitmix64.h"

namespace zip::simt::cpu {

namespace {

const KernelEntry *kernels;

// Switches at preemption points since the last other progress, after which nobody is believed to
// make any.
constexpr uint64_t LIVELOCK_SWITCHES = 2'000'000;
// A thread runs on at so many preemption points out of one at which it does not.
constexpr uint32_t PREEMPTION_ODDS = 4;

std::string format(const char *pattern, ...)
{
    char text[1024];
    va_list list;
    va_start(list, pattern);
    vsnprintf(text, sizeof text, pattern, list);
    va_end(list);
    return text;
}

std::string name_of(Place place)
{
    const char *file = place.file_name(), *base = file;
    for (const char *c = file; *c != 0; ++c) {
        if (*c == '/')
            base = c + 1;
    }
    return format("%s:%u", base, unsigned(place.line()));
}

const char *name_of(Collective op)
{
    switch (op) {
    case Collective::SYNC:
        return "sync_lanes";
    case Collective::ANY:
        return "any";
    case Collective::BALLOT:
        return "ballot";
    case Collective::SHUFFLE:
        return "shuffle";
    case Collective::ADD_UP:
        return "add_up";
    case Collective::SHUFFLE_XOR:
        return "shuffle_xor";
    case Collective::MAX_ALL:
        return "max_all";
    }
    return "?";
}

bool same(Place a, Place b)
{
    return a.line() == b.line() && a.column() == b.column() &&
           (a.file_name() == b.file_name() || std::string_view(a.file_name()) == b.file_name());
}

struct Block;
struct Group;

enum class ThreadState { READY, AT_LANES, AT_BARRIER, ENDED };

constexpr uint32_t COPY_BYTES = 16;

struct Copy {
    void *to;
    const void *from;
    uint32_t bytes;

    void run() const
    {
        std::memset(to, 0, COPY_BYTES);
        std::memcpy(to, from, bytes);
    }
};

struct Thread {
    Fibre fibre;
    Block *block = nullptr;
    Group *group = nullptr;
    uint32_t index = 0;
    ThreadState state = ThreadState::ENDED;
    Place place = Place::current(); // where it waits
    uint32_t result = 0;            // of the operation that it waited for
    std::vector<Copy> copies;
};

struct Group {
    Block *block = nullptr;
    Group *sibling = nullptr; // the wave's other group
    bool leads = false;       // runs before its sibling, since they diverged
    std::vector<Thread *> ready;
    size_t place_in_list = 0; // of the groups with ready threads; if there are any

    // The operation under way.
    uint32_t arrived = 0, ended = 0;
    Collective op = Collective::SYNC;
    Thread *first = nullptr;
    uint32_t value[LANES], argument[LANES];

    uint32_t at_barrier = 0; // threads that came to the barrier that is being finished
};

struct Barrier {
    std::vector<Thread *> arrived;
    uint32_t threads = 0;
};

struct SharedVariable {
    const void *key;
    size_t size;
    void *memory;
};

struct Block {
    uint32_t index = 0, running = 0;
    std::vector<std::unique_ptr<Thread>> threads;
    std::vector<Group> groups;
    std::map<uint32_t, Barrier> barriers;
    std::vector<SharedVariable> shared;

    void free_shared()
    {
        for (const SharedVariable &v : shared)
            free(v.memory);
        shared.clear();
    }
    ~Block() { free_shared(); }
};

// What a thread that failed throws, to unwind its stack.
struct Failed {};

class Executor {
public:
    Executor(const KernelEntry &kernel, uint32_t blocks, uint32_t threads,
             const gpu::Launch &launch, const Machine &machine)
        : kernel_(kernel), launch_(launch), machine_(machine), random_(machine.seed),
          order_(blocks), threads_(threads),
          blocks_(std::min(blocks, std::max(machine.resident_blocks, 1u)))
    {
        std::iota(order_.begin(), order_.end(), 0u);
        std::shuffle(order_.begin(), order_.end(), random_);
        for (Block &block : blocks_) {
            block.groups.resize(threads / LANES);
            for (uint32_t t = 0; t < threads; ++t)
                block.threads.push_back(std::make_unique<Thread>());
        }
    }

    std::string run()
    {
        current_executor = this;
        for (Block &block : blocks_)
            start(block);
        while (!ready_.empty() && error_.empty()) {
            running_ = pick();
            running_->fibre.resume();
            if (running_->state == ThreadState::ENDED && error_.empty())
                thread_ended(*running_);
        }
        current_executor = nullptr;
        if (error_.empty() && ended_blocks_ != order_.size())
            error_ = "deadlock: " + who_waits();
        return error_.empty() ? error_ : format("%s: ", kernel_.name) + error_;
    }

    Thread &running() { return *running_; }
    uint32_t block_threads() const { return threads_; }
    uint32_t block_total() const { return uint32_t(order_.size()); }

    void *shared_variable(const void *key, size_t size, size_t align)
    {
        Block &block = *running_->block;
        size_t total = size;
        for (const SharedVariable &v : block.shared) {
            if (v.key == key)
                return v.memory;
            total += v.key != &dynamic_key ? v.size : 0;
        }
        if (total > (key == &dynamic_key ? MAX_DYNAMIC_SHARED : MAX_STATIC_SHARED))
            fail(format("%zu bytes of shared memory", total), Place::current());
        void *memory = nullptr;
        if (posix_memalign(&memory, std::max(align, sizeof(void *)), size) != 0)
            abort();
        for (size_t i = 0; i < size; ++i)
            static_cast<uint8_t *>(memory)[i] = uint8_t(random_());
        block.shared.push_back({key, size, memory});
        return memory;
    }

    void *dynamic_shared(size_t bytes_of_worker, size_t align)
    {
        return shared_variable(&dynamic_key, threads_ / gpu::TILE_THREADS * bytes_of_worker, align);
    }

    uint32_t collective(Collective op, uint32_t value, uint32_t argument, Place place)
    {
        Thread &self = *running_;
        Group &group = *self.group;
        if (group.arrived == 0) {
            group.op = op;
            group.first = &self;
        } else if (group.op != op || !same(group.first->place, place)) {
            fail(format("%s at %s while lane %u is in %s at %s", name_of(op),
                        name_of(place).c_str(), group.first->index % LANES, name_of(group.op),
                        name_of(group.first->place).c_str()),
                 place);
        }
        if (group.ended != 0)
            fail(format("%s at %s, but %u lanes of the group have ended", name_of(op),
                        name_of(place).c_str(), group.ended),
                 place);
        group.value[self.index % LANES] = value;
        group.argument[self.index % LANES] = argument;
        self.place = place;
        self.state = ThreadState::AT_LANES;
        if (++group.arrived == LANES)
            finish_collective(self);
        self.fibre.yield();
        return self.result;
    }

    void barrier(uint32_t id, uint32_t threads, Place place)
    {
        Thread &self = *running_;
        Block &block = *self.block;
        if (id == 0)
            threads = threads_;
        else if (threads == 0 || threads % machine_.wave != 0)
            fail(format("barrier %u of %u threads: these are no whole waves", id, threads), place);
        Barrier &b = block.barriers[id];
        if (b.arrived.empty()) {
            b.threads = threads;
        } else if (b.threads != threads || !same(b.arrived[0]->place, place)) {
            fail(format("barrier %u of %u threads at %s, while thread %u is at that of %u threads "
                        "at "
                        "%s",
                        id, threads, name_of(place).c_str(), b.arrived[0]->index, b.threads,
                        name_of(b.arrived[0]->place).c_str()),
                 place);
        }
        self.place = place;
        self.state = ThreadState::AT_BARRIER;
        b.arrived.push_back(&self);
        if (b.arrived.size() == threads)
            finish_barrier(b, place);
        self.fibre.yield();
    }

    void preemption_point()
    {
        if (random_() % PREEMPTION_ODDS != 0)
            return;
        Thread &self = *running_;
        if (++idle_switches_ > LIVELOCK_SWITCHES)
            fail("livelock: threads only wait for each other's writes", Place::current());
        make_ready(self);
        self.fibre.yield();
    }

    void copy_async(void *shared, const void *global, uint32_t bytes, Place place)
    {
        check_aligned(shared, COPY_BYTES, place);
        check_aligned(global, COPY_BYTES, place);
        if (bytes == 0 || bytes > COPY_BYTES)
            fail("copy_async_16 of no or too many bytes", place);
        bool found = false;
        for (const SharedVariable &v : running_->block->shared) {
            const auto *start = static_cast<const char *>(v.memory);
            const auto *p = static_cast<const char *>(shared);
            found |= p >= start && p + COPY_BYTES <= start + v.size;
        }
        if (!found)
            fail("copy_async_16 to an address that is not in shared memory", place);
        // it may be done at any time until the wait
        const Copy copy{shared, global, bytes};
        if (random_() % 2 != 0)
            copy.run();
        else
            running_->copies.push_back(copy);
    }

    void copy_async_wait()
    {
        for (const Copy &copy : running_->copies)
            copy.run();
        running_->copies.clear();
    }

    [[noreturn]] void fail(const std::string &text, Place place)
    {
        if (error_.empty())
            error_ = format("block %u, thread %u, %s: %s", running_->block->index, running_->index,
                            name_of(place).c_str(), text.c_str());
        throw Failed();
    }

    static thread_local Executor *current_executor;

private:
    static constexpr char dynamic_key = 0;

    static void thread_main(void *argument)
    {
        Thread &self = *static_cast<Thread *>(argument);
        Executor &executor = *current_executor;
        try {
            executor.kernel_.function(executor.launch_);
            if (!self.copies.empty())
                executor.fail("ended without copy_async_wait()", Place::current());
        } catch (const Failed &) {
            // the scheduler sees the error's text
        }
        self.copies.clear();
        self.state = ThreadState::ENDED;
        self.fibre.finish();
    }

    void start(Block &block)
    {
        block.index = order_[next_block_++];
        block.running = threads_;
        block.barriers.clear();
        block.free_shared();
        for (size_t g = 0; g < block.groups.size(); ++g) {
            Group &group = block.groups[g];
            group = Group();
            group.block = &block;
            const size_t other = g ^ 1;
            group.sibling = machine_.wave == 2 * LANES && other < block.groups.size()
                                    ? &block.groups[other]
                                    : nullptr;
        }
        for (uint32_t t = 0; t < threads_; ++t) {
            Thread &thread = *block.threads[t];
            thread.block = &block;
            thread.group = &block.groups[t / LANES];
            thread.index = t;
            thread.fibre.start(thread_main, &thread);
            make_ready(thread);
        }
    }

    void make_ready(Thread &thread)
    {
        Group &group = *thread.group;
        thread.state = ThreadState::READY;
        if (group.ready.empty()) {
            group.place_in_list = ready_.size();
            ready_.push_back(&group);
        }
        group.ready.push_back(&thread);
    }

    Thread *pick()
    {
        Group *group = ready_[random_() % ready_.size()];
        if (group->sibling != nullptr) {
            if (group->sibling->leads && !group->sibling->ready.empty())
                group = group->sibling;
            group->leads = true;
            group->sibling->leads = false;
        }
        const size_t i = random_() % group->ready.size();
        Thread *thread = group->ready[i];
        group->ready[i] = group->ready.back();
        group->ready.pop_back();
        if (group->ready.empty()) {
            ready_.back()->place_in_list = group->place_in_list;
            ready_[group->place_in_list] = ready_.back();
            ready_.pop_back();
        }
        return thread;
    }

    void thread_ended(Thread &thread)
    {
        idle_switches_ = 0;
        Group &group = *thread.group;
        ++group.ended;
        if (group.arrived != 0) {
            error_ = format("block %u, thread %u: ended, while lane %u is in %s at %s",
                            thread.block->index, thread.index, group.first->index % LANES,
                            name_of(group.op), name_of(group.first->place).c_str());
            return;
        }
        Block &block = *thread.block;
        if (--block.running != 0)
            return;
        ++ended_blocks_;
        if (next_block_ < order_.size())
            start(block);
    }

    void finish_collective(Thread &last)
    {
        idle_switches_ = 0;
        Group &group = *last.group;
        uint32_t bits = 0;
        for (uint32_t lane = 0; lane < LANES; ++lane)
            bits |= uint32_t(group.value[lane] != 0) << lane;
        const uint32_t start = last.index / LANES * LANES;
        for (uint32_t lane = 0; lane < LANES; ++lane) {
            Thread &thread = *group.block->threads[start + lane];
            const uint32_t argument = group.argument[lane];
            switch (group.op) {
            case Collective::SYNC:
                break;
            case Collective::ANY:
                thread.result = bits != 0;
                break;
            case Collective::BALLOT:
                thread.result = bits;
                break;
            case Collective::SHUFFLE:
                thread.result = group.value[argument % LANES];
                break;
            case Collective::ADD_UP:
                thread.result = group.value[lane];
                if (argument <= lane)
                    thread.result += group.value[lane - argument];
                break;
            case Collective::MAX_ALL:
                thread.result = *std::max_element(std::begin(group.value), std::end(group.value));
                break;
            case Collective::SHUFFLE_XOR:
                thread.result = group.value[(lane ^ argument) % LANES];
                break;
            }
            make_ready(thread);
        }
        group.arrived = 0;
    }

    void finish_barrier(Barrier &b, Place place)
    {
        idle_switches_ = 0;
        const std::vector<Thread *> threads = std::move(b.arrived);
        b.arrived.clear();
        for (Thread *thread : threads)
            ++thread->group->at_barrier;
        for (Thread *thread : threads) {
            const Group &group = *thread->group;
            if (group.at_barrier != LANES ||
                (group.sibling != nullptr && group.sibling->at_barrier != LANES))
                fail("barrier of a part of a wave", place);
        }
        for (Thread *thread : threads) {
            thread->group->at_barrier = 0;
            thread->group->leads = false;
            make_ready(*thread);
        }
    }

    std::string who_waits() const
    {
        std::map<std::string, uint32_t> waits;
        for (const Block &block : blocks_) {
            for (const auto &thread : block.threads) {
                const std::string at = thread->state == ThreadState::AT_BARRIER
                                               ? "at a barrier at " + name_of(thread->place)
                                       : thread->state == ThreadState::AT_LANES
                                               ? format("in %s at ", name_of(thread->group->op)) +
                                                         name_of(thread->place)
                                               : "ended";
                ++waits[format("block %u: ", block.index) + at];
            }
        }
        std::string text;
        for (const auto &[at, count] : waits)
            text += format("%s%s (%u threads)", text.empty() ? "" : ", ", at.c_str(), count);
        return text;
    }

    const KernelEntry &kernel_;
    const gpu::Launch launch_;
    const Machine machine_;
    test::SplitMix64 random_; // asked at every switch, and seeded at every launch
    std::vector<uint32_t> order_;
    uint32_t threads_;
    size_t next_block_ = 0, ended_blocks_ = 0;
    std::vector<Block> blocks_;
    std::vector<Group *> ready_; // groups with ready threads
    Thread *running_ = nullptr;
    uint64_t idle_switches_ = 0;
    std::string error_;
};
thread_local Executor *Executor::current_executor;

} // namespace

ThreadPlace thread_place()
{
    Executor &executor = *Executor::current_executor;
    const Thread &thread = executor.running();
    return {thread.index, executor.block_threads(), thread.block->index, executor.block_total()};
}
void *shared_variable(const void *key, size_t size, size_t align)
{
    return Executor::current_executor->shared_variable(key, size, align);
}
void *dynamic_shared(size_t bytes_of_worker, size_t align)
{
    return Executor::current_executor->dynamic_shared(bytes_of_worker, align);
}
uint32_t collective(Collective op, uint32_t value, uint32_t argument, Place place)
{
    return Executor::current_executor->collective(op, value, argument, place);
}
void barrier(uint32_t id, uint32_t threads, Place place)
{
    Executor::current_executor->barrier(id, threads, place);
}
void preemption_point()
{
    Executor::current_executor->preemption_point();
}
void copy_async(void *shared, const void *global, uint32_t bytes, Place place)
{
    Executor::current_executor->copy_async(shared, global, bytes, place);
}
void copy_async_wait()
{
    Executor::current_executor->copy_async_wait();
}
void fail(const char *text, Place place)
{
    Executor::current_executor->fail(text, place);
}

KernelEntry::KernelEntry(const char *kernel_name, Function *kernel, uint32_t block_threads)
    : name(kernel_name), function(kernel), threads(block_threads), next(kernels)
{
    kernels = this;
}

const KernelEntry *find_kernel(const std::string &name)
{
    const KernelEntry *entry = kernels;
    while (entry != nullptr && entry->name != name)
        entry = entry->next;
    return entry;
}

std::string run(const KernelEntry &kernel, uint32_t blocks, uint32_t threads,
                const gpu::Launch &launch, const Machine &machine)
{
    if (blocks == 0 || threads == 0 || threads % LANES != 0)
        return "a grid of no blocks, or a block of no whole lane groups";
    if (threads > kernel.threads)
        return format("%s is a kernel for blocks of at most %u threads, not %u", kernel.name,
                      kernel.threads, threads);
    return Executor(kernel, blocks, threads, launch, machine).run();
}

} // namespace zip::simt::cpu
