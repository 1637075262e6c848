// SPDX-License-Identifier: BSD-3-Clause
// The emulated GPU: the back end's interface on the host codec, with a thread for each stream.
#include "emulated_gpu.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cinttypes>
#include <condition_variable>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/codec_gpu.h"
#include "kernels/cpu/internal.h"
#include "kernels/format.h"
#include "kernels/gpu/launcher.h"
#include "splitmix64.h"

namespace {

namespace format = zip::format;

constexpr uint32_t MULTIPROCESSORS = 16;
constexpr uint64_t CHUNKS_ALIGN = 16;
// Items of unknown type that the launcher takes in a batch.
constexpr size_t MAX_UNKNOWN = 64;

thread_local char last_error[1024] = "no error";

[[gnu::format(printf, 2, 3)]] zip_status_t fail(zip_status_t status, const char *pattern, ...)
{
    va_list list;
    va_start(list, pattern);
    vsnprintf(last_error, sizeof last_error, pattern, list);
    va_end(list);
    return status;
}

[[gnu::format(printf, 1, 2)]] std::string text(const char *pattern, ...)
{
    char buffer[512];
    va_list list;
    va_start(list, pattern);
    vsnprintf(buffer, sizeof buffer, pattern, list);
    va_end(list);
    return buffer;
}

// Nothing may be thrown across the C boundary.
template <class F>
zip_status_t guarded(F &&f)
{
    try {
        return f();
    } catch (const std::exception &e) { // no memory, no thread
        return fail(ZIP_ERR_DEVICE, "%s", e.what());
    }
}

size_t page_size()
{
    static const size_t size = size_t(sysconf(_SC_PAGESIZE));
    return size;
}
size_t to_pages(size_t size)
{
    return (size + page_size() - 1) / page_size() * page_size();
}

// ---- contexts, what the environment says, and what has happened

struct Context {
    int device;
};
Context contexts[ZIP_EMULATED_DEVICES + 1] = {{0}, {1}, {2}, {3}, {0}};
Context &second_context = contexts[ZIP_EMULATED_DEVICES];
static_assert(ZIP_EMULATED_DEVICES == 4);
thread_local Context *current_context;

struct Settings {
    uint64_t delay_us, jitter_us;
    uint64_t fail_launch, kill_at_launch, fail_allocation; // numbers from 1; 0: none
    bool protect;
};

[[noreturn]] void refuse_setting(const char *name, const char *value)
{
    fprintf(stderr, "emulated GPU: %s=%s is not understood\n", name, value);
    abort();
}

uint64_t number_setting(const char *name)
{
    const char *const value = getenv(name);
    if (value == nullptr || *value == 0)
        return 0;
    char *end;
    errno = 0;
    const unsigned long long number = strtoull(value, &end, 10);
    if (*end != 0 || errno != 0 || value[0] < '0' || value[0] > '9')
        refuse_setting(name, value);
    return number;
}

Settings read_settings()
{
    Settings s{};
    s.delay_us = number_setting("ZIP_EMULATED_DELAY_US");
    s.jitter_us = number_setting("ZIP_EMULATED_JITTER");
    s.protect = number_setting("ZIP_EMULATED_PROTECT") != 0;
    const char *const all = getenv("ZIP_EMULATED_FAIL");
    for (const char *at = all; at != nullptr && *at != 0;) {
        const std::pair<const char *, uint64_t *> kinds[] = {{"launch@", &s.fail_launch},
                                                             {"device@", &s.kill_at_launch},
                                                             {"alloc@", &s.fail_allocation}};
        const auto *kind = std::find_if(std::begin(kinds), std::end(kinds), [at](const auto &k) {
            return strncmp(at, k.first, strlen(k.first)) == 0;
        });
        if (kind == std::end(kinds))
            refuse_setting("ZIP_EMULATED_FAIL", all);
        const char *const digits = at + strlen(kind->first);
        char *end;
        *kind->second = strtoull(digits, &end, 10);
        if (*kind->second == 0 || *digits < '0' || *digits > '9' || (*end != 0 && *end != ','))
            refuse_setting("ZIP_EMULATED_FAIL", all);
        at = *end == ',' ? end + 1 : end;
    }
    return s;
}

// Of the whole process. It is never destroyed: threads of queues that nobody destroyed use it until
// the process has ended.
struct State {
    std::mutex lock; // of the settings
    Settings settings = read_settings();
    std::atomic<uint64_t> launches{0}, allocations{0}, faults{0};
    std::atomic<bool> dead[ZIP_EMULATED_DEVICES] = {};
};
State &state()
{
    static State &all = *new State;
    return all;
}
Settings settings()
{
    const std::lock_guard<std::mutex> guard(state().lock);
    return state().settings;
}

void fault(const std::string &what)
{
    ++state().faults;
    fprintf(stderr, "emulated GPU: %s\n", what.c_str());
}

// ---- memory

enum class Kind { DEVICE, PINNED, REGISTERED };

// Memory that a GPU reaches.
struct Range {
    uintptr_t begin = 0;
    size_t size = 0;
    Kind kind = Kind::DEVICE;
    const Context *context = nullptr; // of device memory
    const zip_gpu *owner = nullptr;   // null: the application's
    uint8_t *alias = nullptr;         // where the GPU touches it
    bool is_protected = false;        // the alias is elsewhere
    int fd = -1;
    std::atomic<bool> is_freed{false};
    std::atomic<uint32_t> users{0}; // items of launches that are not done

    Range() = default;
    Range(const Range &) = delete;
    Range &operator=(const Range &) = delete;
    ~Range()
    {
        if (reserved_ != nullptr)
            munmap(reserved_, reserved_size_);
        if (is_protected)
            munmap(alias, to_pages(size));
        if (fd >= 0)
            close(fd);
    }

    // Maps new memory, with an inaccessible page on each side. False: there is no memory.
    bool map(Kind of_kind, size_t bytes, bool protect)
    {
        kind = of_kind;
        size = bytes;
        const size_t page = page_size(), inner = to_pages(bytes);
        if (inner < bytes || inner + 2 * page < inner)
            return false;
        void *memory =
                mmap(nullptr, inner + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED)
            return false;
        reserved_ = memory;
        reserved_size_ = inner + 2 * page;
        auto *const address = static_cast<uint8_t *>(memory) + page;
        begin = reinterpret_cast<uintptr_t>(address);
        if (kind == Kind::DEVICE) {
            fd = memfd_create("emulated_gpu", MFD_CLOEXEC);
            if (fd < 0 || ftruncate(fd, off_t(inner)) != 0)
                return false;
            // protected: elsewhere, so that `address` stays inaccessible
            memory = mmap(protect ? nullptr : address, inner, PROT_READ | PROT_WRITE,
                          protect ? MAP_SHARED : MAP_SHARED | MAP_FIXED, fd, 0);
            if (memory == MAP_FAILED)
                return false;
            alias = static_cast<uint8_t *>(memory);
            is_protected = protect;
            return true;
        }
        alias = address;
        return mprotect(address, inner, PROT_READ | PROT_WRITE) == 0;
    }

private:
    void *reserved_ = nullptr;
    size_t reserved_size_ = 0;
};

// Says that an item of a launch that is not done uses memory. The memory stays mapped as long as
// this object exists, whatever the application does with it.
class Use {
public:
    Use() = default;
    explicit Use(std::shared_ptr<Range> range) : range_(std::move(range)), counted_(true)
    {
        ++range_->users;
    }
    Use(Use &&other) noexcept
        : range_(std::move(other.range_)), counted_(std::exchange(other.counted_, false))
    {
    }
    Use &operator=(Use &&other) noexcept
    {
        end();
        range_ = std::move(other.range_);
        counted_ = std::exchange(other.counted_, false);
        return *this;
    }
    ~Use() { end(); }
    // The application may free it from now on.
    void end()
    {
        if (counted_)
            --range_->users;
        counted_ = false;
    }
    bool is_freed() const { return range_ != nullptr && range_->is_freed; }

private:
    std::shared_ptr<Range> range_;
    bool counted_ = false;
};

class Memory {
public:
    static Memory &all()
    {
        static Memory &memory = *new Memory;
        return memory;
    }

    // What contains all of [address, address + size), or null.
    std::shared_ptr<Range> find(const void *address, size_t size) const
    {
        const std::lock_guard<std::mutex> guard(lock_);
        return find_locked(reinterpret_cast<uintptr_t>(address), size);
    }
    // False: it overlaps something.
    bool add(const std::shared_ptr<Range> &range)
    {
        const std::lock_guard<std::mutex> guard(lock_);
        const auto next = ranges_.lower_bound(range->begin);
        if (next != ranges_.end() && next->first - range->begin < range->size)
            return false;
        if (next != ranges_.begin() &&
            range->begin - std::prev(next)->first < std::prev(next)->second->size)
            return false;
        ranges_.emplace(range->begin, range);
        return true;
    }
    // Takes out what begins there, if `matches` it; null, and a fault, if not.
    template <class Matches>
    void remove(const void *memory, const char *what, Matches &&matches)
    {
        std::shared_ptr<Range> range;
        {
            const std::lock_guard<std::mutex> guard(lock_);
            const auto found = ranges_.find(reinterpret_cast<uintptr_t>(memory));
            if (found != ranges_.end() && matches(*found->second)) {
                range = found->second;
                range->is_freed = true;
                ranges_.erase(found);
            }
        }
        if (range == nullptr)
            fault(text("%s of %p, which is no such memory", what, memory));
        else if (range->users != 0)
            fault(text("%s of %p while a queue uses it", what, memory));
    }
    // Takes out all of an owner. Returns how many that were.
    size_t remove_all(const zip_gpu *owner)
    {
        const std::lock_guard<std::mutex> guard(lock_);
        return std::erase_if(ranges_, [owner](const auto &entry) {
            const bool is_owners = entry.second->owner == owner;
            if (is_owners)
                entry.second->is_freed = true;
            return is_owners;
        });
    }
    // A launch's use of [address, address + size). Why not, where the GPU does not reach all of it
    // or it is not the memory that is wanted, is put to *wrong if that is empty; and where the GPU
    // touches it to *alias.
    template <class T>
    Use use(const T *address, size_t size, const Context *context, bool pinned,
            const std::string &name, T **alias, std::string *wrong) const
    {
        *alias = nullptr;
        if (size == 0)
            return {};
        const auto at = reinterpret_cast<uintptr_t>(address);
        const std::lock_guard<std::mutex> guard(lock_);
        const std::shared_ptr<Range> range = find_locked(at, size), first = find_locked(at, 1);
        std::string why;
        if (range == nullptr && first == nullptr)
            why = "is memory that nobody pinned or allocated for a GPU";
        else if (range == nullptr)
            why = text("goes beyond the %zu bytes at %p", first->size,
                       reinterpret_cast<void *>(first->begin));
        else if (range->kind == Kind::DEVICE && pinned)
            why = "is device memory, not pinned host memory";
        else if (range->kind == Kind::DEVICE && range->context != context)
            why = text("is memory of %s of device %d",
                       range->context == &second_context ? "the second context" : "the context",
                       range->context->device);
        if (why.empty()) {
            *alias = reinterpret_cast<T *>(range->alias + (at - range->begin));
            return Use(range);
        }
        if (wrong->empty())
            *wrong = text("%s, %p and %zu bytes, %s", name.c_str(),
                          static_cast<const void *>(address), size, why.c_str());
        return {};
    }

private:
    std::shared_ptr<Range> find_locked(uintptr_t address, size_t size) const
    {
        auto next = ranges_.upper_bound(address);
        if (next == ranges_.begin())
            return nullptr;
        const std::shared_ptr<Range> &range = std::prev(next)->second;
        const size_t at = address - range->begin;
        return at < range->size && size <= range->size - at ? range : nullptr;
    }

    mutable std::mutex lock_;
    std::map<uintptr_t, std::shared_ptr<Range>> ranges_;
};

// ---- items

enum class Action { ENCODE, DECODE, PROBE, COPY };

struct Item {
    format::Coding coding; // dtype AUTO_DTYPE: not known
    zip_shape_t shape;     // that was asked for
    uint8_t *data, *chunks;
    uint64_t *progress;
    uint64_t data_size, chunk_length, chunk_stride, last_length, last_room;
    uint64_t count; // of chunks
    uint64_t left;  // chunks that are not done
    Use data_use, chunks_use, progress_use;

    void end_use()
    {
        data_use.end();
        chunks_use.end();
        progress_use.end();
    }
    bool is_freed() const
    {
        return data_use.is_freed() || chunks_use.is_freed() || progress_use.is_freed();
    }
};
constexpr uint8_t AUTO_DTYPE = uint8_t(ZIP_DTYPE_AUTO);
constexpr format::Coding STORED = {format::DTYPE_BYTES, format::SHAPE_STORED, false};

// Calls f(coding) for every one that may be found best for an item of unknown type.
template <class F>
void for_each_offer(zip_shape_t shape, bool small_tiles, F &&f)
{
    f(STORED);
    for (uint8_t dtype = format::DTYPE_BF16; dtype < format::DTYPES; ++dtype) {
        if (shape != ZIP_SHAPE_DEFAULT) {
            const bool valid = format::valid_coding({dtype, uint8_t(shape), false});
            f(format::Coding{dtype, valid ? uint8_t(shape) : uint8_t(format::SHAPE_22228),
                             small_tiles});
            continue;
        }
        f(format::Coding{dtype, format::SHAPE_22228, small_tiles});
        f(format::Coding{dtype, format::SHAPE_11238, small_tiles});
    }
}

uint64_t fixed_of(format::Coding c, uint64_t length)
{
    return c.dtype == format::DTYPE_BYTES ? format::HEADER_LENGTH + length
                                          : format::layout_of(c, length).tail;
}
uint64_t bound_of(format::Coding c, uint64_t length)
{
    if (c.dtype == format::DTYPE_BYTES)
        return format::HEADER_LENGTH + length;
    const format::Layout l = format::layout_of(c, length);
    return l.tail + format::max_tail(c, l.values);
}
// Most bytes that an encode makes, or those that a decode must have.
uint64_t needed_of(const Item &item, Action action, uint64_t length)
{
    if (item.coding.dtype != AUTO_DTYPE)
        return action == Action::ENCODE ? bound_of(item.coding, length)
                                        : fixed_of(item.coding, length);
    uint64_t bound = 0;
    for_each_offer(item.shape, item.coding.small_tiles,
                   [&](format::Coding c) { bound = std::max(bound, bound_of(c, length)); });
    return bound;
}

// A C caller may put more in an enumeration than C++ lets it hold.
template <class T>
int number_in(const T &field)
{
    static_assert(sizeof(T) == sizeof(int));
    int number;
    memcpy(&number, &field, sizeof number);
    return number;
}

// Checks what an item says, by the launcher's rules, and makes all of *item but for its addresses.
zip_status_t check(const zip_gpu_item_t &in, size_t number, Action action, Item *item)
{
    const auto invalid = [number](const char *what) {
        return fail(ZIP_ERR_INVALID_PARAM, "item %zu: %s", number, what);
    };
    const int dtype = number_in(in.coding.dtype), shape = number_in(in.coding.shape),
              op = number_in(in.op);
    if (in.data == nullptr && in.data_size != 0)
        return invalid("data is null");
    item->data_size = in.data_size;
    item->count = item->left = 1;
    if (action == Action::PROBE)
        return ZIP_OK;
    const bool known = dtype != ZIP_DTYPE_AUTO;
    if (known && (dtype < ZIP_DTYPE_BYTES || dtype >= ZIP_DTYPE_LAST))
        return fail(ZIP_ERR_INVALID_PARAM, "item %zu: %d is no type", number, dtype);
    if (!known && action == Action::DECODE)
        return invalid("type AUTO is for encodes");
    if (dtype != ZIP_DTYPE_BYTES && (shape < 0 || shape >= ZIP_SHAPE_LAST))
        return fail(ZIP_ERR_INVALID_PARAM, "item %zu: %d is no shape", number, shape);
    item->shape = dtype != ZIP_DTYPE_BYTES ? zip_shape_t(shape) : ZIP_SHAPE_DEFAULT;
    item->coding = {uint8_t(dtype), uint8_t(shape), in.coding.small_tiles != 0};
    if (dtype == ZIP_DTYPE_BYTES)
        item->coding = STORED;
    else if (known && shape == ZIP_SHAPE_DEFAULT)
        item->coding.shape = format::SHAPE_22228;
    if (item->coding.small_tiles && shape == ZIP_SHAPE_DENSE)
        return invalid("shape dense has no small tiles");
    if (dtype == ZIP_DTYPE_FP64 && shape == ZIP_SHAPE_COLUMNS)
        return invalid("shape columns is not for fp64");
    if (in.chunks == nullptr)
        return invalid("chunks is null");
    if (reinterpret_cast<uintptr_t>(in.chunks) % CHUNKS_ALIGN != 0)
        return invalid("chunks is not aligned to 16 bytes");
    if (reinterpret_cast<uintptr_t>(in.progress) % sizeof(uint64_t) != 0)
        return invalid("progress is not aligned to 8 bytes");
    if (in.chunk_length % CHUNKS_ALIGN != 0)
        return invalid("chunk_length is no multiple of 16");
    const bool several = in.chunk_length != 0 && in.data_size > in.chunk_length;
    item->chunk_length = several ? in.chunk_length : in.data_size;
    if (item->chunk_length > ZIP_GPU_MAX_CHUNK)
        return invalid("a chunk has more than ZIP_GPU_MAX_CHUNK bytes");
    item->count = several ? format::div_up(in.data_size, in.chunk_length) : 1;
    if (item->count > uint64_t(std::numeric_limits<int32_t>::max()))
        return invalid("more than 2^31 - 1 chunks");
    if (several && in.chunk_stride % CHUNKS_ALIGN != 0)
        return invalid("chunk_stride is no multiple of 16");
    item->left = item->count;
    item->chunk_stride = in.chunk_stride;
    item->last_length = in.data_size - (item->count - 1) * item->chunk_length;
    item->last_room = in.last_room != 0 ? in.last_room : in.chunk_stride;

    const auto too_small = [number](const char *what, uint64_t room, uint64_t needed) {
        return fail(ZIP_ERR_INVALID_PARAM,
                    "item %zu: %s is %" PRIu64 " bytes, but a chunk needs %" PRIu64, number, what,
                    room, needed);
    };
    if (several) {
        const uint64_t needed = needed_of(*item, action, item->chunk_length);
        if (in.chunk_stride < needed)
            return too_small("chunk_stride", in.chunk_stride, needed);
    }
    const uint64_t needed = needed_of(*item, action, item->last_length);
    if (item->last_room < needed)
        return too_small(in.last_room != 0 ? "last_room" : "chunk_stride", item->last_room, needed);
    if (action == Action::DECODE && op == ZIP_GPU_ADD)
        return invalid("the emulated GPU cannot add");
    if (action == Action::DECODE && op != ZIP_GPU_STORE)
        return fail(ZIP_ERR_INVALID_PARAM, "item %zu: %d is no operation", number, op);
    return ZIP_OK;
}

// Bytes that an item's chunks are allowed to take; SIZE_MAX if that is beyond all memory.
size_t chunks_size(const Item &item)
{
    uint64_t before, all;
    if (__builtin_mul_overflow(item.count - 1, item.chunk_stride, &before) ||
        __builtin_add_overflow(before, item.last_room, &all))
        return SIZE_MAX;
    return all;
}

// ---- queues

class Queue;

// What was put on a queue with one call.
struct Work {
    Queue *queue = nullptr;
    Action action = Action::COPY;
    uint16_t seq = 0;
    std::vector<Item> items; // a copy: one, from `chunks` to `data`
    zip_probe_t *results = nullptr;
    Use results_use;
    std::string wrong; // why the GPU cannot do it
    bool has_slot = false;
    uint64_t delay_us = 0, jitter_us = 0;
};

// A thread that does works in their order.
class Stream {
public:
    explicit Stream(const Context *of) : context(of)
    {
        // signals are for the program's threads
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            thread_ = std::thread([this] { run(); });
        } catch (...) {
            pthread_sigmask(SIG_SETMASK, &before, nullptr);
            throw;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
    ~Stream()
    {
        {
            const std::lock_guard<std::mutex> guard(lock_);
            ends_ = true;
            changed_.notify_one();
        }
        thread_.join();
    }
    Stream(const Stream &) = delete;
    Stream &operator=(const Stream &) = delete;

    void put(std::unique_ptr<Work> work)
    {
        const std::lock_guard<std::mutex> guard(lock_);
        works_.push_back(std::move(work));
        changed_.notify_one();
    }

    const Context *const context;

private:
    void run();
    bool execute(Work &work);
    bool execute_chunks(Work &work);
    bool pause(const Work &work);
    uint64_t encode_chunk(format::Coding coding, const uint8_t *original, uint64_t length,
                          uint8_t *chunk);

    std::mutex lock_;
    std::condition_variable changed_;
    std::deque<std::unique_ptr<Work>> works_;
    bool ends_ = false;
    zip::test::SplitMix64 random_{1};
    std::vector<uint8_t> scratch_;
    std::thread thread_;
};

// Streams that exist, for queues that share one.
class Streams {
public:
    static Streams &all()
    {
        static Streams &streams = *new Streams;
        return streams;
    }
    std::shared_ptr<Stream> make(const Context *context)
    {
        auto stream = std::make_shared<Stream>(context);
        const std::lock_guard<std::mutex> guard(lock_);
        std::erase_if(streams_, [](const auto &entry) { return entry.second.expired(); });
        streams_[stream.get()] = stream;
        return stream;
    }
    std::shared_ptr<Stream> find(void *handle)
    {
        const std::lock_guard<std::mutex> guard(lock_);
        const auto found = streams_.find(handle);
        return found != streams_.end() ? found->second.lock() : nullptr;
    }

private:
    std::mutex lock_;
    std::map<void *, std::weak_ptr<Stream>> streams_;
};

} // namespace

struct zip_gpu {
    const Context *context;
    std::atomic<uint32_t> queues{0};

    bool is_dead() const { return state().dead[context->device]; }
};

namespace {

zip_status_t fail_dead(const zip_gpu &gpu)
{
    return fail(ZIP_ERR_DEVICE, "device %d has died, as it was told to", gpu.context->device);
}

class Queue {
public:
    Queue(zip_gpu &gpu, const zip_gpu_queue_params_t &params, std::shared_ptr<Stream> stream)
        : gpu_(gpu), params_(params), stream_(std::move(stream))
    {
        ++gpu_.queues;
    }
    ~Queue()
    {
        {
            std::unique_lock<std::mutex> guard(lock_);
            changed_.wait(guard, [this] { return under_way_ == 0; });
        }
        --gpu_.queues;
    }
    Queue(const Queue &) = delete;
    Queue &operator=(const Queue &) = delete;

    Stream *stream() const { return stream_.get(); }
    zip_status_t query(int *idle_p);
    zip_status_t submit(Action action, const zip_gpu_item_t *in, size_t count,
                        zip_gpu_launch_t launch, zip_probe_t *results);
    zip_status_t copy(void *to, const void *from, size_t size, uint64_t *progress, uint16_t seq);

    // The rest is for the stream's thread, too.

    // Whether works are done at all. Otherwise what was put on the queue is in use until its end.
    bool works()
    {
        const std::lock_guard<std::mutex> guard(lock_);
        note_death();
        return failure_.empty();
    }
    void fail_with(const std::string &why)
    {
        const std::lock_guard<std::mutex> guard(lock_);
        if (failure_.empty())
            failure_ = why;
    }
    void give_back_slot() { --slots_in_use_; }
    void end(std::unique_ptr<Work> work, bool is_done)
    {
        if (is_done)
            work.reset();
        const std::lock_guard<std::mutex> guard(lock_);
        if (work != nullptr)
            abandoned_.push_back(std::move(work));
        --under_way_;
        changed_.notify_all();
    }

private:
    void note_death()
    {
        if (failure_.empty() && gpu_.is_dead()) {
            fail_dead(gpu_);
            failure_ = last_error;
        }
    }
    zip_status_t ready();
    zip_status_t start(std::unique_ptr<Work> work);

    zip_gpu &gpu_;
    const zip_gpu_queue_params_t params_;
    const std::shared_ptr<Stream> stream_;
    std::atomic<uint32_t> slots_in_use_{0};
    std::mutex lock_;
    std::condition_variable changed_;
    uint64_t under_way_ = 0;
    std::string failure_; // the first error
    std::vector<std::unique_ptr<Work>> abandoned_;
};

zip_status_t Queue::ready()
{
    const std::lock_guard<std::mutex> guard(lock_);
    note_death();
    if (failure_.empty())
        return ZIP_OK;
    return fail(ZIP_ERR_DEVICE,
                "this queue failed in an earlier call: destroy it and make another; the error was: "
                "%s",
                failure_.c_str());
}

zip_status_t Queue::query(int *idle_p)
{
    if (idle_p == nullptr)
        return fail(ZIP_ERR_INVALID_PARAM, "idle_p is null");
    const std::lock_guard<std::mutex> guard(lock_);
    note_death();
    if (!failure_.empty())
        return fail(ZIP_ERR_DEVICE, "%s", failure_.c_str());
    *idle_p = under_way_ == 0;
    return ZIP_OK;
}

// Puts a work that is valid on the stream, unless it is told to fail.
zip_status_t Queue::start(std::unique_ptr<Work> work)
{
    const Settings set = settings();
    const uint64_t number = ++state().launches;
    if (number == set.fail_launch) {
        fail(ZIP_ERR_DEVICE, "launch number %" PRIu64 " was told to fail", number);
        fail_with(last_error);
        return ZIP_ERR_DEVICE;
    }
    work->queue = this;
    work->delay_us = set.delay_us;
    work->jitter_us = set.jitter_us;
    if (work->has_slot)
        ++slots_in_use_;
    {
        const std::lock_guard<std::mutex> guard(lock_);
        ++under_way_;
        if (number == set.kill_at_launch) {
            state().dead[gpu_.context->device] = true;
            note_death();
        }
    }
    stream_->put(std::move(work));
    return ZIP_OK;
}

zip_status_t Queue::submit(Action action, const zip_gpu_item_t *in, size_t count,
                           zip_gpu_launch_t launch, zip_probe_t *results)
{
    const zip_status_t status = ready();
    if (status != ZIP_OK || count == 0)
        return status;
    if (in == nullptr)
        return fail(ZIP_ERR_INVALID_PARAM, "items is null");
    if (action == Action::PROBE && results == nullptr)
        return fail(ZIP_ERR_INVALID_PARAM, "results is null");
    if (action != Action::PROBE && launch.seq == 0)
        return fail(ZIP_ERR_INVALID_PARAM, "seq is 0");
    if (count > params_.max_items)
        return fail(ZIP_ERR_NO_SPACE, "%zu items in a batch, but the queue was made for %" PRIu32,
                    count, params_.max_items);
    auto work = std::make_unique<Work>();
    work->action = action;
    work->seq = launch.seq;
    work->items.resize(count);
    uint64_t chunks = 0;
    size_t unknown = 0;
    for (size_t i = 0; i < count; ++i) {
        Item &item = work->items[i];
        if (check(in[i], i, action, &item) != ZIP_OK)
            return ZIP_ERR_INVALID_PARAM;
        chunks += item.count;
        if (action != Action::PROBE && chunks > params_.max_chunks)
            return fail(ZIP_ERR_NO_SPACE,
                        "item %zu: the batch has more chunks than the %" PRIu32
                        " that the queue was made for",
                        i, params_.max_chunks);
        if (action == Action::ENCODE && item.coding.dtype == AUTO_DTYPE && ++unknown > MAX_UNKNOWN)
            return fail(ZIP_ERR_NO_SPACE, "item %zu: more than %zu items of unknown type", i,
                        MAX_UNKNOWN);
    }
    work->has_slot = count > ZIP_GPU_INLINE_ITEMS;
    if (work->has_slot && params_.slots == 0)
        return fail(ZIP_ERR_NO_SPACE, "the queue has no slots for batches of more than %d items",
                    ZIP_GPU_INLINE_ITEMS);
    if (work->has_slot && slots_in_use_ == params_.slots)
        return fail(ZIP_ERR_NO_SPACE, "all %" PRIu32 " slots are in use", params_.slots);

    const Memory &memory = Memory::all();
    for (size_t i = 0; i < count; ++i) {
        Item &item = work->items[i];
        const auto use = [&](auto *address, size_t size, bool pinned, const char *name,
                             auto **alias) {
            return memory.use(address, size, gpu_.context, pinned, text("item %zu's %s", i, name),
                              alias, &work->wrong);
        };
        item.data_use =
                use(static_cast<uint8_t *>(in[i].data), in[i].data_size, false, "data", &item.data);
        if (action == Action::PROBE)
            continue;
        item.chunks_use = use(static_cast<uint8_t *>(in[i].chunks), chunks_size(item), false,
                              "chunks", &item.chunks);
        item.progress_use =
                use(in[i].progress, in[i].progress != nullptr ? item.count * sizeof(uint64_t) : 0,
                    true, "progress", &item.progress);
    }
    if (action == Action::PROBE)
        work->results_use = memory.use(results, count * sizeof *results, gpu_.context, false,
                                       "results", &work->results, &work->wrong);
    return start(std::move(work));
}

zip_status_t Queue::copy(void *to, const void *from, size_t size, uint64_t *progress, uint16_t seq)
{
    const zip_status_t status = ready();
    if (status != ZIP_OK)
        return status;
    if ((to == nullptr || from == nullptr) && size != 0)
        return fail(ZIP_ERR_INVALID_PARAM, "to or from is null");
    if (reinterpret_cast<uintptr_t>(progress) % sizeof(uint64_t) != 0)
        return fail(ZIP_ERR_INVALID_PARAM, "progress is not aligned to 8 bytes");
    if (progress != nullptr && seq == 0)
        return fail(ZIP_ERR_INVALID_PARAM, "seq is 0");
    auto work = std::make_unique<Work>();
    work->action = Action::COPY;
    work->seq = seq;
    work->items.resize(1);
    Item &item = work->items[0];
    item.data_size = size;
    item.count = item.left = 1;
    const Memory &memory = Memory::all();
    item.data_use = memory.use(static_cast<uint8_t *>(to), size, gpu_.context, false,
                               "the copy's destination", &item.data, &work->wrong);
    item.chunks_use =
            memory.use(static_cast<uint8_t *>(const_cast<void *>(from)), size, gpu_.context, false,
                       "the copy's source", &item.chunks, &work->wrong);
    item.progress_use =
            memory.use(progress, progress != nullptr ? sizeof *progress : 0, gpu_.context, true,
                       "the copy's progress", &item.progress, &work->wrong);
    return start(std::move(work));
}

// ---- what the stream's thread does

void Stream::run()
{
    std::unique_lock<std::mutex> guard(lock_);
    for (;;) {
        changed_.wait(guard, [this] { return ends_ || !works_.empty(); });
        if (works_.empty())
            return;
        std::unique_ptr<Work> work = std::move(works_.front());
        works_.pop_front();
        guard.unlock();
        Queue *const queue = work->queue;
        const bool is_done = execute(*work);
        queue->end(std::move(work), is_done);
        guard.lock();
    }
}

// Lets time pass. False: the queue does nothing any more.
bool Stream::pause(const Work &work)
{
    const uint64_t us =
            work.delay_us + (work.jitter_us != 0 ? random_() % (work.jitter_us + 1) : 0);
    if (us != 0)
        std::this_thread::sleep_for(std::chrono::microseconds(us));
    return work.queue->works();
}

uint64_t progress_word(uint64_t low, uint64_t middle, uint16_t seq)
{
    return low | middle << 32 | uint64_t(seq) << 48;
}

// Encodes without turning back, as a GPU does. Returns the tail's length.
uint64_t Stream::encode_chunk(format::Coding coding, const uint8_t *original, uint64_t length,
                              uint8_t *chunk)
{
    if (coding.dtype == format::DTYPE_BYTES) {
        const format::ChunkHeader header = zip::cpu::new_header(coding, length);
        memcpy(chunk, &header, sizeof header);
        if (length != 0)
            memcpy(chunk + sizeof header, original, length);
        return 0;
    }
    // The coder takes no chunk that fills its room, but `chunk` may have no more.
    const uint64_t room = bound_of(coding, length) + 1;
    if (scratch_.size() < room)
        scratch_.resize(room);
    const size_t size =
            zip::cpu::encode_simd(coding, original, length, scratch_.data(), size_t(room));
    memcpy(chunk, scratch_.data(), size);
    return size - fixed_of(coding, length);
}

// What the chunk's coding must be is known beforehand; a GPU's kernel is of one alone.
zip_status_t decode_chunk(format::Coding coding, const uint8_t *chunk, size_t room,
                          uint8_t *original, size_t length)
{
    zip_chunk_info_t info{};
    zip_status_t status = zip_codec_inspect(chunk, room, &info);
    if (status == ZIP_OK && (info.coding.dtype != zip_dtype_t(coding.dtype) ||
                             info.coding.shape != zip_shape_t(coding.shape) ||
                             (info.coding.small_tiles != 0) != coding.small_tiles))
        return ZIP_ERR_CORRUPT;
    uint8_t nothing;
    if (status == ZIP_OK)
        status = zip_codec_decode(chunk, room, length != 0 ? original : &nothing, length);
    if (status == ZIP_OK)
        return ZIP_OK;
    // Another coding than the GPU was told is a lie, another version is not.
    const auto header = zip::cpu::snapshot_value<format::ChunkHeader>(chunk);
    return header.magic == format::MAGIC && header.version != format::VERSION ? ZIP_ERR_UNSUPPORTED
                                                                              : ZIP_ERR_CORRUPT;
}

// The coding that an item of unknown type gets.
format::Coding find_coding(const Item &item)
{
    zip_probe_t probe{};
    if (zip_codec_probe(item.data, item.data_size, &probe) != ZIP_OK ||
        probe.dtype == ZIP_DTYPE_BYTES)
        return STORED;
    const auto dtype = uint8_t(probe.dtype);
    const zip_shape_t shape = item.shape == ZIP_SHAPE_DEFAULT ? probe.shape : item.shape;
    return {dtype,
            format::valid_coding({dtype, uint8_t(shape), false}) ? uint8_t(shape)
                                                                 : uint8_t(format::SHAPE_22228),
            item.coding.small_tiles};
}

// False: the queue has failed, and nobody knows what of the work is done but by its words.
bool Stream::execute(Work &work)
{
    if (!work.queue->works())
        return false;
    if (!work.wrong.empty()) {
        fault(work.wrong);
        work.queue->fail_with("an address that the GPU does not reach: " + work.wrong);
        return false;
    }
    for (Item &item : work.items) {
        if (work.action == Action::ENCODE && item.coding.dtype == AUTO_DTYPE)
            item.coding = find_coding(item);
    }
    return execute_chunks(work);
}

bool Stream::execute_chunks(Work &work)
{
    struct Place {
        uint32_t item, chunk;
    };
    std::vector<Place> order;
    for (uint32_t i = 0; i < work.items.size(); ++i) {
        for (uint32_t c = 0; c < work.items[i].count; ++c)
            order.push_back({i, c});
    }
    if (work.jitter_us != 0) {
        for (size_t i = order.size(); i > 1; --i)
            std::swap(order[i - 1], order[random_() % i]);
    }
    size_t left = order.size();
    for (const auto [number, c] : order) {
        Item &item = work.items[number];
        if (!pause(work))
            return false;
        if (item.is_freed() || work.results_use.is_freed()) {
            // was told when it was freed
            work.queue->fail_with("memory of a launch was freed before it was done");
            return false;
        }
        const bool last = c + 1 == item.count;
        uint8_t *const original =
                item.data != nullptr ? item.data + c * item.chunk_length : nullptr;
        const uint64_t length = last ? item.last_length : item.chunk_length,
                       room = last ? item.last_room : item.chunk_stride;
        uint8_t *const chunk = item.chunks + c * item.chunk_stride;
        uint64_t word = 0;
        switch (work.action) {
        case Action::ENCODE: {
            const format::Coding coding = item.coding;
            const uint64_t tail = encode_chunk(coding, original, length, chunk);
            word = progress_word(tail / format::TAIL_WORD,
                                 uint64_t(coding.dtype) | uint64_t(coding.shape) << 4 |
                                         uint64_t(coding.small_tiles) << 7,
                                 work.seq);
            break;
        }
        case Action::DECODE: {
            const zip_status_t status = decode_chunk(item.coding, chunk, room, original, length);
            word = progress_word(0, uint64_t(-int(status)), work.seq);
            break;
        }
        case Action::PROBE: {
            zip_probe_t probe{};
            if (zip_codec_probe(item.data, item.data_size, &probe) != ZIP_OK)
                probe = {ZIP_DTYPE_BYTES, ZIP_SHAPE_DEFAULT, 1, 0};
            work.results[number] = probe;
            break;
        }
        case Action::COPY:
            if (item.data_size != 0)
                memmove(item.data, item.chunks, item.data_size);
            word = progress_word(0, 0, work.seq);
            break;
        }
        // Whoever reads the last word may free the memory and launch again.
        uint64_t *const progress = item.progress;
        if (--item.left == 0)
            item.end_use();
        if (--left == 0 && work.has_slot)
            work.queue->give_back_slot();
        if (progress != nullptr)
            std::atomic_ref<uint64_t>(progress[c]).store(word, std::memory_order_release);
    }
    return true;
}

// ---- the interface

const char *api_error_text()
{
    return last_error;
}

zip_status_t api_memory_query(const void *address, zip_gpu_memory_t *memory_p)
{
    if (memory_p == nullptr)
        return fail(ZIP_ERR_INVALID_PARAM, "memory_p is null");
    *memory_p = {0, 0, nullptr};
    const std::shared_ptr<Range> range = Memory::all().find(address, 1);
    if (range != nullptr && range->kind == Kind::DEVICE)
        *memory_p = {1, range->context->device, const_cast<Context *>(range->context)};
    return ZIP_OK;
}

zip_status_t api_open(const zip_gpu_memory_t *where, zip_gpu_t **gpu_p)
{
    if (gpu_p == nullptr)
        return fail(ZIP_ERR_INVALID_PARAM, "gpu_p is null");
    const Context *context = current_context;
    if (where == nullptr && context == nullptr)
        return fail(ZIP_ERR_NO_DEVICE, "no context is current in the calling thread");
    if (where != nullptr) {
        if (where->is_gpu == 0)
            return fail(ZIP_ERR_INVALID_PARAM, "`where` is no GPU's memory");
        if (where->device < 0 || where->device >= ZIP_EMULATED_DEVICES)
            return fail(ZIP_ERR_INVALID_PARAM, "there is no device %d", where->device);
        const auto *found =
                std::find_if(std::begin(contexts), std::end(contexts), [where](const Context &c) {
                    return c.device == where->device &&
                           (where->context == nullptr || where->context == &c);
                });
        if (found == std::end(contexts))
            return fail(ZIP_ERR_INVALID_PARAM, "%p is no context of device %d", where->context,
                        where->device);
        context = found;
    }
    return guarded([&] {
        std::unique_ptr<zip_gpu> gpu(new zip_gpu{context});
        if (gpu->is_dead())
            return fail_dead(*gpu);
        *gpu_p = gpu.release();
        return ZIP_OK;
    });
}

void api_close(zip_gpu_t *gpu)
{
    if (gpu == nullptr)
        return;
    if (gpu->queues != 0)
        fault(text("closed with %" PRIu32 " queues", gpu->queues.load()));
    const size_t count = Memory::all().remove_all(gpu);
    if (count != 0)
        fault(text("closed with %zu pieces of memory allocated or pinned", count));
    delete gpu;
}

uint32_t api_multiprocessors(zip_gpu_t *)
{
    return MULTIPROCESSORS;
}

zip_status_t api_memory_allocate(zip_gpu_t *gpu, zip_gpu_place_t place, size_t size,
                                 void **memory_p)
{
    if (gpu == nullptr || memory_p == nullptr)
        return fail(ZIP_ERR_INVALID_PARAM, "gpu or memory_p is null");
    const int number = number_in(place);
    if (number != ZIP_GPU_DEVICE && number != ZIP_GPU_PINNED)
        return fail(ZIP_ERR_INVALID_PARAM, "%d is no place", number);
    if (size == 0)
        return fail(ZIP_ERR_INVALID_PARAM, "size is 0");
    if (gpu->is_dead())
        return fail_dead(*gpu);
    return guarded([&] {
        const Settings set = settings();
        const uint64_t count = ++state().allocations;
        if (count == set.fail_allocation)
            return fail(ZIP_ERR_DEVICE, "allocation number %" PRIu64 " was told to fail", count);
        const auto range = std::make_shared<Range>();
        range->owner = gpu;
        range->context = gpu->context;
        if (!range->map(number == ZIP_GPU_DEVICE ? Kind::DEVICE : Kind::PINNED, size,
                        set.protect) ||
            !Memory::all().add(range))
            return fail(ZIP_ERR_DEVICE, "no memory for %zu bytes", size);
        *memory_p = reinterpret_cast<void *>(range->begin);
        return ZIP_OK;
    });
}

void api_memory_free(zip_gpu_t *gpu, zip_gpu_place_t place, void *memory)
{
    if (memory == nullptr)
        return;
    Memory::all().remove(memory, "memory_free", [&](const Range &range) {
        return range.owner == gpu &&
               range.kind == (place == ZIP_GPU_DEVICE ? Kind::DEVICE : Kind::PINNED);
    });
}

zip_status_t api_memory_pin(zip_gpu_t *gpu, void *memory, size_t size)
{
    if (gpu == nullptr || memory == nullptr)
        return fail(ZIP_ERR_INVALID_PARAM, "gpu or memory is null");
    if (size == 0 || size % page_size() != 0 ||
        reinterpret_cast<uintptr_t>(memory) % page_size() != 0)
        return fail(ZIP_ERR_INVALID_PARAM,
                    "memory and size, %p and %zu, are no multiples of the page size", memory, size);
    if (gpu->is_dead())
        return fail_dead(*gpu);
    return guarded([&] {
        std::vector<unsigned char> resident(size / page_size());
        if (mincore(memory, size, resident.data()) != 0)
            return fail(ZIP_ERR_DEVICE, "not all of the %zu bytes at %p is mapped", size, memory);
        const auto range = std::make_shared<Range>();
        range->begin = reinterpret_cast<uintptr_t>(memory);
        range->size = size;
        range->kind = Kind::REGISTERED;
        range->owner = gpu;
        range->alias = static_cast<uint8_t *>(memory);
        if (!Memory::all().add(range))
            return fail(ZIP_ERR_DEVICE, "some of the %zu bytes at %p is a GPU's already", size,
                        memory);
        return ZIP_OK;
    });
}

void api_memory_unpin(zip_gpu_t *gpu, void *memory)
{
    Memory::all().remove(memory, "memory_unpin", [&](const Range &range) {
        return range.owner == gpu && range.kind == Kind::REGISTERED;
    });
}

zip_status_t api_memory_dmabuf(zip_gpu_t *gpu, void *memory, size_t size, int *fd_p)
{
    if (gpu == nullptr || memory == nullptr || fd_p == nullptr)
        return fail(ZIP_ERR_INVALID_PARAM, "gpu, memory or fd_p is null");
    const std::shared_ptr<Range> range = Memory::all().find(memory, size);
    if (range == nullptr || range->kind != Kind::DEVICE || range->owner != gpu)
        return fail(ZIP_ERR_INVALID_PARAM, "%p is no device memory of memory_allocate", memory);
    if (range->begin != reinterpret_cast<uintptr_t>(memory))
        return fail(ZIP_ERR_INVALID_PARAM, "%p is not where that memory begins", memory);
    if (range->is_protected)
        return fail(ZIP_ERR_DEVICE, "memory that is protected from the host has no dma-buf");
    const int fd = fcntl(range->fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0)
        return fail(ZIP_ERR_DEVICE, "fcntl: %s", strerror(errno));
    *fd_p = fd;
    return ZIP_OK;
}

} // namespace

struct zip_gpu_queue : Queue {
    using Queue::Queue;
};

namespace {

zip_status_t api_queue_create(zip_gpu_t *gpu, const zip_gpu_queue_params_t *params,
                              zip_gpu_queue_t **queue_p)
{
    if (gpu == nullptr || params == nullptr || queue_p == nullptr)
        return fail(ZIP_ERR_INVALID_PARAM, "gpu, params or queue_p is null");
    if (params->max_items == 0 || params->max_chunks == 0)
        return fail(ZIP_ERR_INVALID_PARAM, "max_items or max_chunks is 0");
    if (gpu->is_dead())
        return fail_dead(*gpu);
    return guarded([&] {
        std::shared_ptr<Stream> stream = params->stream == nullptr
                                                 ? Streams::all().make(gpu->context)
                                                 : Streams::all().find(params->stream);
        if (stream == nullptr || stream->context != gpu->context)
            return fail(ZIP_ERR_DEVICE, "%p is no stream of this context", params->stream);
        *queue_p = new zip_gpu_queue(*gpu, *params, std::move(stream));
        return ZIP_OK;
    });
}

void api_queue_destroy(zip_gpu_queue_t *queue)
{
    delete queue;
}

void *api_queue_stream(zip_gpu_queue_t *queue)
{
    return queue->stream();
}

zip_status_t api_queue_query(zip_gpu_queue_t *queue, int *idle_p)
{
    return queue != nullptr ? guarded([&] { return queue->query(idle_p); })
                            : fail(ZIP_ERR_INVALID_PARAM, "queue is null");
}

zip_status_t submit(Action action, zip_gpu_queue_t *queue, const zip_gpu_item_t *items,
                    size_t count, zip_gpu_launch_t launch, zip_probe_t *results)
{
    if (queue == nullptr)
        return fail(ZIP_ERR_INVALID_PARAM, "queue is null");
    return guarded([&] { return queue->submit(action, items, count, launch, results); });
}

zip_status_t api_encode(zip_gpu_queue_t *queue, const zip_gpu_item_t *items, size_t count,
                        zip_gpu_launch_t launch)
{
    return submit(Action::ENCODE, queue, items, count, launch, nullptr);
}

zip_status_t api_decode(zip_gpu_queue_t *queue, const zip_gpu_item_t *items, size_t count,
                        zip_gpu_launch_t launch)
{
    return submit(Action::DECODE, queue, items, count, launch, nullptr);
}

zip_status_t api_probe(zip_gpu_queue_t *queue, const zip_gpu_item_t *items, size_t count,
                       zip_probe_t *results)
{
    return submit(Action::PROBE, queue, items, count, {}, results);
}

zip_status_t api_copy(zip_gpu_queue_t *queue, void *to, const void *from, size_t size,
                      uint64_t *progress, uint16_t seq)
{
    if (queue == nullptr)
        return fail(ZIP_ERR_INVALID_PARAM, "queue is null");
    return guarded([&] { return queue->copy(to, from, size, progress, seq); });
}

constexpr zip_gpu_api_t API = {
        .version = ZIP_GPU_API_VERSION,
        .name = "emulated",
        .error_text = api_error_text,
        .memory_query = api_memory_query,
        .open = api_open,
        .close = api_close,
        .multiprocessors = api_multiprocessors,
        .memory_allocate = api_memory_allocate,
        .memory_free = api_memory_free,
        .memory_pin = api_memory_pin,
        .memory_unpin = api_memory_unpin,
        .memory_dmabuf = api_memory_dmabuf,
        .queue_create = api_queue_create,
        .queue_destroy = api_queue_destroy,
        .queue_stream = api_queue_stream,
        .queue_query = api_queue_query,
        .encode = api_encode,
        .decode = api_decode,
        .probe = api_probe,
        .copy = api_copy,
};

// Where the GPU touches memory that a test names.
uint8_t *alias_of(const void *address, size_t size)
{
    const std::shared_ptr<Range> range = Memory::all().find(address, size);
    if (range == nullptr) {
        fprintf(stderr, "emulated GPU: %p and %zu bytes are not all GPU or pinned memory\n",
                address, size);
        abort();
    }
    return range->alias + (reinterpret_cast<uintptr_t>(address) - range->begin);
}

} // namespace

#pragma GCC visibility push(default)

extern "C" const zip_gpu_api_t *ZIP_GPU_BACK_END()
{
    state();
    return &API;
}

void *emulated_gpu_allocate_in(size_t size, void *context)
{
    const auto *found = std::find_if(std::begin(contexts), std::end(contexts),
                                     [context](const Context &c) { return &c == context; });
    if (found == std::end(contexts) || size == 0)
        return nullptr;
    const auto range = std::make_shared<Range>();
    range->context = found;
    if (!range->map(Kind::DEVICE, size, settings().protect) || !Memory::all().add(range))
        return nullptr;
    return reinterpret_cast<void *>(range->begin);
}

void *emulated_gpu_allocate(size_t size, int device)
{
    return emulated_gpu_allocate_in(size, emulated_gpu_context(device, 0));
}

void emulated_gpu_free(void *memory)
{
    Memory::all().remove(memory, "emulated_gpu_free",
                         [](const Range &range) { return range.owner == nullptr; });
}

void emulated_gpu_to_device(void *device, const void *host, size_t size)
{
    if (size != 0)
        memcpy(alias_of(device, size), host, size);
}

void emulated_gpu_to_host(void *host, const void *device, size_t size)
{
    if (size != 0)
        memcpy(host, alias_of(device, size), size);
}

void *emulated_gpu_context(int device, int which)
{
    if (device == 0 && which == 1)
        return &second_context;
    return device >= 0 && device < ZIP_EMULATED_DEVICES && which == 0 ? &contexts[device] : nullptr;
}

void emulated_gpu_set_current(void *context)
{
    current_context = static_cast<Context *>(context);
}

uint64_t emulated_gpu_launches()
{
    return state().launches;
}

uint64_t emulated_gpu_allocations()
{
    return state().allocations;
}

uint64_t emulated_gpu_faults()
{
    return state().faults;
}

void emulated_gpu_reset()
{
    State &all = state();
    const std::lock_guard<std::mutex> guard(all.lock);
    all.settings = read_settings();
    all.launches = all.allocations = all.faults = 0;
    for (std::atomic<bool> &dead : all.dead)
        dead = false;
}

#pragma GCC visibility pop
