// SPDX-License-Identifier: BSD-3-Clause
// GPU memory through the transport, direct (over UCX's rc on the software verbs device, where
// ZIP_TEST_VERBS names its library) and staged. On the machine's GPUs, or where
// ZIP_TEST_EMULATED_GPU names that library on emulated ones, whose memory is the host's and is
// declared to be CUDA's.
#include "emulated_gpu.h"
#include "ucx_pair.h"

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <sstream>

namespace zip::test {
namespace {

constexpr size_t KIB = 1024, MIB = 1024 * KIB, GIB = 1024 * MIB;

// How a GPU's memory is allocated: cuMemAlloc(), cuMemAllocAsync(), cuMemCreate() and cuMemMap(),
// cuMemAllocManaged().
enum class Kind { PLAIN, POOL, MAPPED, MANAGED };

// Where the GPU memory of these tests comes from: the machine's GPUs, or emulated ones.
class Machine {
public:
    static Machine &get();
    virtual ~Machine() = default;
    virtual bool emulated() const = 0;
    virtual unsigned gpus() = 0;
    // Makes a context of a GPU current in the calling thread, or ends the process.
    virtual void use(unsigned gpu = 0) = 0;
    // The calling thread has no current context any more.
    virtual void leave() {}
    // Lets the contexts of each GPU read and write the others' memory.
    virtual void let_peers() {}
    virtual void *allocate(size_t size) = 0; // of the GPU in use
    // Contexts of several GPUs, and several of one.
    virtual std::vector<void *> contexts() = 0;
    virtual void *allocate_in(void *context, size_t size) = 0;
    // The first GPU's; not of the emulated one.
    virtual void *allocate_as(Kind, size_t) { return nullptr; }
    virtual void free(void *memory) = 0;
    virtual void to_device(void *device, const void *host, size_t size) = 0;
    virtual void to_host(void *host, const void *device, size_t size) = 0;
    // What went wrong without anybody telling.
    virtual uint64_t faults() { return 0; }
};

// The driver's functions that are used here; a program without CUDA's headers can have them, too.
class Cuda final : public Machine {
public:
    Cuda()
    {
        void *library = dlopen("libcuda.so.1", RTLD_NOW);
        if (library == nullptr) {
            printf("no CUDA driver: %s\n", dlerror());
            exit(4);
        }
        resolve(library, init_, "cuInit");
        resolve(library, count_, "cuDeviceGetCount");
        resolve(library, retain_, "cuDevicePrimaryCtxRetain");
        resolve(library, create_context_, "cuCtxCreate_v2");
        resolve(library, set_current_, "cuCtxSetCurrent");
        resolve(library, get_current_, "cuCtxGetCurrent");
        resolve(library, enable_peer_, "cuCtxEnablePeerAccess");
        resolve(library, allocate_, "cuMemAlloc_v2");
        resolve(library, allocate_async_, "cuMemAllocAsync");
        resolve(library, allocate_managed_, "cuMemAllocManaged");
        resolve(library, synchronize_, "cuCtxSynchronize");
        resolve(library, reserve_, "cuMemAddressReserve");
        resolve(library, create_, "cuMemCreate");
        resolve(library, map_, "cuMemMap");
        resolve(library, set_access_, "cuMemSetAccess");
        resolve(library, unmap_, "cuMemUnmap");
        resolve(library, release_, "cuMemRelease");
        resolve(library, unreserve_, "cuMemAddressFree");
        resolve(library, free_, "cuMemFree_v2");
        resolve(library, to_device_, "cuMemcpyHtoD_v2");
        resolve(library, to_host_, "cuMemcpyDtoH_v2");
    }
    bool emulated() const override { return false; }
    unsigned gpus() override
    {
        int count = 0;
        check(init_(0), "cuInit");
        check(count_(&count), "cuDeviceGetCount");
        return static_cast<unsigned>(count);
    }
    void use(unsigned gpu) override { check(set_current_(primary(gpu)), "cuCtxSetCurrent"); }
    void leave() override { check(set_current_(nullptr), "cuCtxSetCurrent"); }
    void *allocate(size_t size) override
    {
        uintptr_t address = 0;
        check(allocate_(&address, size), "cuMemAlloc");
        return reinterpret_cast<void *>(address);
    }
    std::vector<void *> contexts() override
    {
        if (contexts_.empty()) {
            void *current = nullptr, *second = nullptr;
            check(get_current_(&current), "cuCtxGetCurrent");
            for (unsigned gpu = 0; gpu < gpus(); ++gpu) {
                contexts_.push_back(primary(gpu));
            }
            check(create_context_(&second, 0, 0), "cuCtxCreate");
            contexts_.push_back(second);
            check(set_current_(current), "cuCtxSetCurrent");
        }
        return contexts_;
    }
    void let_peers() override
    {
        void *current = nullptr;
        check(get_current_(&current), "cuCtxGetCurrent");
        for (unsigned gpu = 0; gpu < gpus(); ++gpu) {
            use(gpu);
            for (unsigned peer = 0; peer < gpus(); ++peer) {
                if (peer != gpu) {
                    check(enable_peer_(primary(peer), 0), "cuCtxEnablePeerAccess");
                }
            }
        }
        check(set_current_(current), "cuCtxSetCurrent");
    }
    void *allocate_in(void *context, size_t size) override
    {
        void *current = nullptr;
        check(get_current_(&current), "cuCtxGetCurrent");
        check(set_current_(context), "cuCtxSetCurrent");
        void *memory = allocate(size);
        check(set_current_(current), "cuCtxSetCurrent");
        return memory;
    }
    void *allocate_as(Kind kind, size_t size) override
    {
        uintptr_t address = 0;
        switch (kind) {
        case Kind::PLAIN:
            return allocate(size);
        case Kind::POOL:
            check(allocate_async_(&address, size, nullptr), "cuMemAllocAsync");
            check(synchronize_(), "cuCtxSynchronize");
            break;
        case Kind::MANAGED:
            check(allocate_managed_(&address, size, 1), "cuMemAllocManaged");
            break;
        case Kind::MAPPED: {
            constexpr size_t UNIT = 2 * MIB;
            const size_t mapped = (size + UNIT - 1) / UNIT * UNIT;
            const AllocationProperties properties = {1, 0, 1, 0, nullptr, {}};
            const Access access = {1, 0, 3};
            uint64_t handle = 0;
            check(reserve_(&address, mapped, 0, 0, 0), "cuMemAddressReserve");
            check(create_(&handle, mapped, &properties, 0), "cuMemCreate");
            check(map_(address, mapped, 0, handle, 0), "cuMemMap");
            check(set_access_(address, mapped, &access, 1), "cuMemSetAccess");
            check(release_(handle), "cuMemRelease"); // with the mapping
            mapped_[address] = mapped;
            break;
        }
        }
        return reinterpret_cast<void *>(address);
    }
    void free(void *memory) override
    {
        const auto address = reinterpret_cast<uintptr_t>(memory);
        const auto found = mapped_.find(address);
        if (found == mapped_.end()) {
            free_(address);
            return;
        }
        unmap_(address, found->second);
        unreserve_(address, found->second);
        mapped_.erase(found);
    }
    void to_device(void *device, const void *host, size_t size) override
    {
        check(to_device_(reinterpret_cast<uintptr_t>(device), host, size), "cuMemcpyHtoD");
    }
    void to_host(void *host, const void *device, size_t size) override
    {
        check(to_host_(host, reinterpret_cast<uintptr_t>(device), size), "cuMemcpyDtoH");
    }

private:
    static void check(int error, const char *what)
    {
        if (error != 0) {
            printf("%s: CUDA error %d\n", what, error);
            fflush(stdout);
            _exit(3);
        }
    }
    template <class F>
    static void resolve(void *library, F &function, const char *name)
    {
        function = reinterpret_cast<F>(dlsym(library, name));
        if (function == nullptr) {
            printf("the CUDA driver has no %s\n", name);
            exit(4);
        }
    }

    // CUmemAllocationProp and CUmemAccessDesc
    struct AllocationProperties {
        int type, handle_types, location_type, location;
        void *windows;
        unsigned char flags[8];
    };
    struct Access {
        int location_type, location, flags;
    };

    void *primary(unsigned gpu)
    {
        void *context = nullptr;
        check(init_(0), "cuInit");
        check(retain_(&context, static_cast<int>(gpu)), "cuDevicePrimaryCtxRetain");
        return context;
    }

    std::vector<void *> contexts_;
    std::map<uintptr_t, size_t> mapped_; // how much, by address
    int (*init_)(unsigned);
    int (*count_)(int *);
    int (*retain_)(void **, int);
    int (*create_context_)(void **, unsigned, int);
    int (*set_current_)(void *);
    int (*get_current_)(void **);
    int (*enable_peer_)(void *, unsigned);
    int (*synchronize_)();
    int (*allocate_)(uintptr_t *, size_t);
    int (*allocate_async_)(uintptr_t *, size_t, void *);
    int (*allocate_managed_)(uintptr_t *, size_t, unsigned);
    int (*reserve_)(uintptr_t *, size_t, size_t, uintptr_t, unsigned long long);
    int (*create_)(uint64_t *, size_t, const AllocationProperties *, unsigned long long);
    int (*map_)(uintptr_t, size_t, size_t, uint64_t, unsigned long long);
    int (*set_access_)(uintptr_t, size_t, const Access *, size_t);
    int (*unmap_)(uintptr_t, size_t);
    int (*release_)(uint64_t);
    int (*unreserve_)(uintptr_t, size_t);
    int (*free_)(uintptr_t);
    int (*to_device_)(uintptr_t, const void *, size_t);
    int (*to_host_)(void *, uintptr_t, size_t);
};

class Emulated final : public Machine {
public:
    explicit Emulated(const char *library)
    {
        const std::string error = gpu_.open(library);
        if (!error.empty()) {
            printf("%s\n", error.c_str());
            exit(4);
        }
    }
    bool emulated() const override { return true; }
    unsigned gpus() override { return 1; } // as far as use() goes
    void use(unsigned) override {}         // as a thread without a context
    void *allocate(size_t size) override { return gpu_.allocate(size, 0); }
    std::vector<void *> contexts() override
    {
        return {gpu_.context(0, 0), gpu_.context(0, 1), gpu_.context(1, 0), gpu_.context(3, 0)};
    }
    void *allocate_in(void *context, size_t size) override
    {
        return gpu_.allocate_in(size, context);
    }
    void free(void *memory) override { gpu_.free(memory); }
    void to_device(void *device, const void *host, size_t size) override
    {
        gpu_.to_device(device, host, size);
    }
    void to_host(void *host, const void *device, size_t size) override
    {
        gpu_.to_host(host, device, size);
    }
    uint64_t faults() override { return gpu_.faults(); }

private:
    EmulatedGpu gpu_;
};

const char *emulated_library()
{
    return getenv("ZIP_TEST_EMULATED_GPU");
}

Machine &Machine::get()
{
    static Machine *const machine =
            emulated_library() != nullptr ? static_cast<Machine *>(new Emulated(emulated_library()))
                                          : new Cuda;
    return *machine;
}

// Device or host memory, filled and compared through the host.
class Memory {
public:
    // `context`: one of contexts(); NULL: that in use.
    Memory(bool device, size_t length, size_t misalignment, void *context = nullptr,
           Kind kind = Kind::PLAIN)
        : device_(device), kind_(kind), length_(length), offset_(misalignment),
          host_(length + misalignment)
    {
        const size_t size = length + misalignment + 1;
        if (context != nullptr) {
            base_ = static_cast<char *>(Machine::get().allocate_in(context, size));
        } else if (kind != Kind::PLAIN) {
            base_ = static_cast<char *>(Machine::get().allocate_as(kind, size));
        } else if (device_) {
            base_ = static_cast<char *>(Machine::get().allocate(size));
        }
    }
    ~Memory()
    {
        if (device_) {
            Machine::get().free(base_);
        }
    }
    Memory(const Memory &) = delete;
    Memory &operator=(const Memory &) = delete;

    void *data() { return device_ ? base_ + offset_ : host_.data() + offset_; }
    size_t length() const { return length_; }
    ucs_memory_type_t type() const
    {
        return !device_                 ? UCS_MEMORY_TYPE_HOST
               : kind_ == Kind::MANAGED ? UCS_MEMORY_TYPE_CUDA_MANAGED
                                        : UCS_MEMORY_TYPE_CUDA;
    }
    // For operations on it.
    ucp_request_param_t param() const
    {
        ucp_request_param_t param = {};
        param.op_attr_mask = UCP_OP_ATTR_FIELD_MEMORY_TYPE;
        param.memory_type = type();
        return param;
    }
    void put(Data data, uint64_t seed)
    {
        fill(host_.data() + offset_, length_, data, seed);
        store();
    }
    void poison()
    {
        memset(host_.data(), 0x5a, host_.size());
        store();
    }
    testing::AssertionResult holds(Data data, uint64_t seed)
    {
        if (device_ && length_ > 0) {
            Machine::get().to_host(host_.data() + offset_, base_ + offset_, length_);
        }
        std::vector<char> expected(length_);
        fill(expected.data(), length_, data, seed);
        for (size_t i = 0; i < length_; ++i) {
            if (host_[offset_ + i] != expected[i]) {
                return testing::AssertionFailure() << "byte " << i << " of " << length_;
            }
        }
        return testing::AssertionSuccess();
    }

private:
    void store()
    {
        if (device_ && length_ > 0) {
            Machine::get().to_device(base_ + offset_, host_.data() + offset_, length_);
        }
    }

    bool device_;
    Kind kind_;
    size_t length_, offset_;
    char *base_ = nullptr;
    std::vector<char> host_;
};

struct Sides {
    bool sender, receiver;      // on a GPU
    unsigned receivers_gpu = 0; // the sender's is the first
    Kind kind = Kind::PLAIN;    // of both
};
struct Case {
    std::string name;
    Env wire;
    Sides sides;
};

void PrintTo(const Case &one, std::ostream *stream)
{
    *stream << one.name;
}

// What zip has below: rc, which reaches the GPU's memory, and what does not.
std::vector<std::pair<std::string, Env>> wires()
{
    const std::string more = emulated_library() != nullptr ? "" : ",cuda_copy";
    std::vector<std::pair<std::string, Env>> all = {
            {"Tcp", {{"UCX_TLS", "zip,tcp" + more}, {"UCX_NET_DEVICES", "lo"}}},
            {"Posix", {{"UCX_TLS", "zip,posix" + more}, {"UCX_ZIP_TLS", "posix"}}},
    };
    const char *verbs = getenv("ZIP_TEST_VERBS");
    if (verbs != nullptr && verbs[0] != 0) {
        all.push_back({"Rc",
                       {{"UCX_TLS", "zip,rc_verbs,ud_verbs" + more},
                        {"UCX_NET_DEVICES", "swverbs0:1"},
                        {"UCX_MODULES", "^efa"},
                        {"UCX_FENCE_MODE", "weak"},
                        {"LD_PRELOAD", verbs}}});
    }
    return all;
}

// Whether there is a second GPU. (No driver is no error yet: tests may only be listed.)
bool has_two_gpus()
{
    return emulated_library() == nullptr && dlopen("libcuda.so.1", RTLD_NOW) != nullptr &&
           Machine::get().gpus() > 1;
}

std::vector<Case> cases()
{
    std::vector<Case> all;
    const bool two = has_two_gpus();
    for (const auto &[name, env] : wires()) {
        for (const Sides sides : {Sides{true, true}, Sides{true, false}, Sides{false, true}}) {
            all.push_back({name + (sides.sender ? "Gpu" : "Host") + "To" +
                                   (sides.receiver ? "Gpu" : "Host"),
                           env, sides});
        }
        if (two) {
            all.push_back({name + "GpuToOtherGpu", env, {true, true, 1}});
        }
        if (name == "Rc") { // where a rendezvous is a get, unless a user wants it otherwise
            all.push_back(
                    {name + "Puts", env + Env{{"UCX_RNDV_SCHEME", "put_zcopy"}}, {true, true}});
        }
    }
    return all;
}

// What a user sets, and what the tests need; `more` goes before it.
Env environment(const Env &wire, const Env &more = {})
{
    Env env = more + wire + Env{{"UCX_ZIP_MEM_TYPES", "cuda,host"}, {"UCX_ZIP_BYPASS", "never"}};
    if (emulated_library() != nullptr) {
        // nothing else copies its memory
        env = env + Env{{"UCX_ZIP_GPU_CODEC", emulated_library()},
                        {"UCX_ZIP_MIN_SIZE", "0"},
                        {"UCX_RNDV_THRESH", "0"},
                        {"UCX_RCACHE_ENABLE", "n"}};
    }
    return env;
}

ucs_status_ptr_t send(Endpoint *to, Memory &memory, ucp_tag_t tag)
{
    const ucp_request_param_t param = memory.param();
    return ucp_tag_send_nbx(to->ep, memory.data(), memory.length(), tag, &param);
}

ucs_status_ptr_t receive(Worker &worker, Memory &memory, ucp_tag_t tag)
{
    const ucp_request_param_t param = memory.param();
    return ucp_tag_recv_nbx(worker.get(), memory.data(), memory.length(), tag, ~ucp_tag_t{0},
                            &param);
}

void send_window(Channel &channel, Window &window, Memory &memory)
{
    channel.send(window.key());
    channel.send(std::to_string(reinterpret_cast<uintptr_t>(memory.data())));
}

// The remote key, or NULL, and the address of what the other process has sent.
std::pair<ucp_rkey_h, uint64_t> receive_window(Channel &channel, Endpoint *to)
{
    const std::string key = channel.receive();
    const uint64_t address = std::stoull(channel.receive());
    ucp_rkey_h rkey = nullptr;
    EXPECT_EQ(UCS_OK, ucp_ep_rkey_unpack(to->ep, key.data(), &rkey));
    return {rkey, address};
}

struct Message {
    size_t length;
    Data data = Data::BF16;
    size_t misalignment = 0; // at the sender; the receiver's differs
};

// Sends one message after the other, or `at_once` of them together, and compares all. Returns what
// both sides saw.
void exchange(Processes &pair, Sides sides, const std::vector<Message> &messages,
              size_t at_once = 1)
{
    pair.timeout(150);
    const auto groups = [&](const auto &each) {
        for (size_t first = 0; first < messages.size(); first += at_once) {
            each(first, std::min(messages.size(), first + at_once));
        }
    };
    pair.run(
            [&](Channel &channel) {
                Machine::get().use();
                {
                    Worker worker;
                    Endpoint *to = worker.connect(channel.receive());
                    groups([&](size_t first, size_t end) {
                        std::vector<std::unique_ptr<Memory>> sources;
                        std::vector<ucs_status_ptr_t> requests;
                        for (size_t i = first; i < end; ++i) {
                            sources.push_back(std::make_unique<Memory>(
                                    sides.sender, messages[i].length, messages[i].misalignment,
                                    nullptr, sides.kind));
                            sources.back()->put(messages[i].data, i);
                        }
                        for (size_t i = first; i < end; ++i) {
                            requests.push_back(send(to, *sources[i - first], i));
                        }
                        for (size_t i = first; i < end; ++i) {
                            EXPECT_EQ(UCS_OK, worker.wait(requests[i - first]));
                            EXPECT_TRUE(sources[i - first]->holds(messages[i].data, i))
                                    << "the source was changed";
                        }
                        EXPECT_EQ("next", worker.serve(channel));
                    });
                    EXPECT_EQ(UCS_OK, worker.close(to));
                    channel.send("closed");
                }
                EXPECT_EQ(0u, Machine::get().faults());
            },
            [&](Channel &channel) {
                Machine::get().use(sides.receivers_gpu);
                {
                    Worker worker;
                    channel.send(worker.address());
                    groups([&](size_t first, size_t end) {
                        std::vector<std::unique_ptr<Memory>> targets;
                        std::vector<ucs_status_ptr_t> requests;
                        for (size_t i = first; i < end; ++i) {
                            targets.push_back(
                                    std::make_unique<Memory>(sides.receiver, messages[i].length,
                                                             i * 7 % 16, nullptr, sides.kind));
                            targets.back()->poison();
                            requests.push_back(receive(worker, *targets.back(), i));
                        }
                        for (size_t i = first; i < end; ++i) {
                            EXPECT_EQ(UCS_OK, worker.wait(requests[i - first]));
                            EXPECT_TRUE(targets[i - first]->holds(messages[i].data, i))
                                    << messages[i].length << " bytes";
                        }
                        channel.send("next");
                    });
                    worker.serve(channel);
                }
                EXPECT_EQ(0u, Machine::get().faults());
            });
}

uint64_t total(const std::vector<Message> &messages)
{
    uint64_t sum = 0;
    for (const Message &message : messages) {
        sum += message.length;
    }
    return sum;
}

class Gpu : public testing::TestWithParam<Case> {};

TEST_P(Gpu, MessagesArriveBitForBit)
{
    const bool slow = Machine::get().emulated();
    std::vector<Message> messages = {{1},
                                     {7, Data::BF16, 1},
                                     {4096},
                                     {64 * KIB - 1, Data::FP32, 3},
                                     {MIB + 1},
                                     {3 * MIB + 5, Data::RANDOM, 7},
                                     {3 * MIB + 5, Data::FP32, 8},
                                     {2 * MIB, Data::ZEROS},
                                     {8 * MIB, Data::BF16, 15},
                                     {slow ? 16 * MIB : 256 * MIB}};
    Processes pair(environment(GetParam().wire));
    exchange(pair, GetParam().sides, messages);
    if (!Processes::is_part()) {
        const ZipCounters &zip = pair.outcome(0).zip;
        EXPECT_GE(zip.put_bytes + pair.outcome(1).zip.get_bytes, total(messages) * 9 / 10)
                << "did not go through zip:\n"
                << pair.outcome(0).log;
        EXPECT_LT(zip.wire_bytes, total(messages) * 85 / 100) << "was not compressed";
    }
}

TEST_P(Gpu, ManyMessagesAtOnceArriveBitForBit)
{
    std::vector<Message> messages;
    for (size_t i = 0; i < 48; ++i) {
        messages.push_back({(i % 5 + 1) * 300 * KIB + i, ALL_DATA[i % 4], i % 16});
    }
    Processes pair(environment(GetParam().wire));
    exchange(pair, GetParam().sides, messages, 16);
}

TEST_P(Gpu, LittleStagingMemoryIsEnough)
{
    Processes pair(environment(GetParam().wire, {{"UCX_ZIP_STAGING_SIZE", "16m"}}));
    exchange(pair, GetParam().sides, {{40 * MIB}, {5 * MIB, Data::FP32, 3}, {9 * MIB}}, 2);
}

TEST_P(Gpu, PiecesOfAnySizeWork)
{
    for (const char *size : {"4k", "100000", "16m"}) {
        Processes pair(environment(GetParam().wire, {{"UCX_ZIP_GPU_SEG_SIZE", size}}));
        exchange(pair, GetParam().sides, {{MIB + 3}, {3 * MIB, Data::FP32, 5}});
    }
}

TEST_P(Gpu, EveryStrategyWorks)
{
    for (const char *strategy :
         {"auto", "streaming", "split-send", "chunked", "encode-then-send", "plain"}) {
        for (const char *bypass : {"auto", "never"}) {
            Processes pair(environment(GetParam().wire, {{"UCX_ZIP_STRATEGY", strategy},
                                                         {"UCX_ZIP_BYPASS", bypass},
                                                         {"SWVERBS_GBPS", "1"}}));
            exchange(pair, GetParam().sides,
                     {{5 * MIB + 3, Data::BF16, 1}, {9 * MIB}, {MIB}, {2 * MIB, Data::RANDOM}}, 2);
        }
    }
}

TEST_P(Gpu, EveryTypeIsTakenAtItsWord)
{
    for (const char *dtype : {"bf16", "fp32", "fp16", "fp64", "e4m3", "e5m2", "none"}) {
        Processes pair(environment(GetParam().wire, {{"UCX_ZIP_DTYPE", dtype}}));
        exchange(pair, GetParam().sides, {{3 * MIB + 1, Data::BF16, 2}, {2 * MIB, Data::FP32}}, 2);
    }
}

TEST_P(Gpu, PutsAndGetsArriveBitForBit)
{
    // UCX has nothing for a get of a few bytes from the emulated GPU
    const std::vector<size_t> sizes = {emulated_library() != nullptr ? size_t{200} : size_t{1},
                                       4096, 64 * KIB + 3, MIB, 6 * MIB + 1};
    const Sides sides = GetParam().sides;
    Processes pair(environment(GetParam().wire));
    pair.timeout(120);
    pair.run(
            [&](Channel &channel) {
                Machine::get().use();
                Worker worker;
                Endpoint *to = worker.connect(channel.receive());
                for (size_t i = 0; i < sizes.size(); ++i) {
                    const auto [rkey, address] = receive_window(channel, to);
                    ASSERT_NE(nullptr, rkey);
                    Memory local(sides.sender, sizes[i], i);
                    const ucp_request_param_t param = local.param();
                    local.put(Data::BF16, i);
                    EXPECT_EQ(UCS_OK, worker.wait(ucp_put_nbx(to->ep, local.data(), sizes[i],
                                                              address, rkey, &param)));
                    EXPECT_EQ(UCS_OK, worker.flush());
                    channel.send("put");
                    EXPECT_EQ("changed", worker.serve(channel));
                    local.poison();
                    EXPECT_EQ(UCS_OK, worker.wait(ucp_get_nbx(to->ep, local.data(), sizes[i],
                                                              address, rkey, &param)));
                    EXPECT_TRUE(local.holds(Data::FP32, i)) << "got " << sizes[i] << " bytes";
                    ucp_rkey_destroy(rkey);
                    channel.send("got");
                }
                EXPECT_EQ(UCS_OK, worker.close(to));
                channel.send("closed");
            },
            [&](Channel &channel) {
                Machine::get().use(sides.receivers_gpu);
                Worker worker;
                channel.send(worker.address());
                for (size_t i = 0; i < sizes.size(); ++i) {
                    Memory target(sides.receiver, sizes[i], (i * 7) % 16);
                    target.poison();
                    Window window(worker, target.data(), sizes[i], target.type());
                    send_window(channel, window, target);
                    EXPECT_EQ("put", worker.serve(channel));
                    EXPECT_TRUE(target.holds(Data::BF16, i)) << "put " << sizes[i] << " bytes";
                    target.put(Data::FP32, i);
                    channel.send("changed");
                    EXPECT_EQ("got", worker.serve(channel));
                }
                worker.serve(channel);
            });
}

// The peer of a one-sided get may have other things to do than to encode: only the first one with a
// key, and of all that it is for, which may be a rendezvous, asks for that.
TEST_P(Gpu, OneSidedGetsLeaveThePeerAlone)
{
    const Sides sides = GetParam().sides;
    if (GetParam().name.compare(0, 2, "Rc") != 0) {
        GTEST_SKIP() << "the transport below cannot read GPU memory";
    }
    constexpr size_t LENGTH = 8 * MIB;
    Processes pair(
            environment(GetParam().wire, {{"UCX_ZIP_BYPASS", "auto"}, {"SWVERBS_GBPS", "1"}}));
    pair.run(
            [&](Channel &channel) {
                Machine::get().use();
                Worker worker;
                Endpoint *to = worker.connect(channel.receive());
                const auto [rkey, address] = receive_window(channel, to);
                ASSERT_NE(nullptr, rkey);
                for (const bool idle : {false, true, true}) { // the peer
                    Memory local(sides.sender, LENGTH, 3);
                    const ucp_request_param_t param = local.param();
                    local.poison();
                    EXPECT_EQ(UCS_OK, worker.wait(ucp_get_nbx(to->ep, local.data(), LENGTH, address,
                                                              rkey, &param)));
                    EXPECT_TRUE(local.holds(Data::BF16, 1));
                    if (!idle) {
                        channel.send("got");
                        EXPECT_EQ("idle", channel.receive());
                    }
                }
                channel.send("done");
                ucp_rkey_destroy(rkey);
                EXPECT_EQ(UCS_OK, worker.close(to));
                channel.send("closed");
            },
            [&](Channel &channel) {
                Machine::get().use(sides.receivers_gpu);
                Worker worker;
                channel.send(worker.address());
                Memory source(sides.receiver, LENGTH, 5);
                source.put(Data::BF16, 1);
                Window window(worker, source.data(), LENGTH, source.type());
                send_window(channel, window, source);
                EXPECT_EQ("got", worker.serve(channel));
                channel.send("idle");
                EXPECT_EQ("done", channel.receive()); // without progress
                worker.serve(channel);
            });
    if (!Processes::is_part()) {
        EXPECT_EQ(3u, pair.outcome(0).zip.gets);
        EXPECT_EQ(2 * LENGTH, pair.outcome(0).zip.straight_bytes) << pair.outcome(0).log;
    }
}

INSTANTIATE_TEST_SUITE_P(Over, Gpu, testing::ValuesIn(cases()),
                         [](const auto &one) { return one.param.name; });

// ---- on each wire

class Wires : public testing::TestWithParam<std::pair<std::string, Env>> {};

// `peers`: with access to each other's memory.
void mix_contexts(const Env &wire, bool peers)
{
    constexpr size_t LENGTH = 3 * MIB + 17;
    Processes pair(environment(wire, {{"UCX_ZIP_STAGING_SIZE", "64m"}}));
    pair.timeout(100);
    Machine::get().use();
    const size_t contexts = Machine::get().contexts().size();
    pair.run(
            [&](Channel &channel) {
                Machine::get().use();
                if (peers) {
                    Machine::get().let_peers();
                }
                {
                    Worker worker;
                    Endpoint *to = worker.connect(channel.receive());
                    // each to each, all at once
                    std::vector<std::unique_ptr<Memory>> sources;
                    std::vector<ucs_status_ptr_t> requests;
                    for (size_t i = 0; i < contexts * contexts; ++i) {
                        sources.push_back(std::make_unique<Memory>(
                                true, LENGTH, i % 16, Machine::get().contexts()[i % contexts]));
                        sources.back()->put(Data::BF16, i);
                        requests.push_back(send(to, *sources.back(), i));
                    }
                    for (ucs_status_ptr_t request : requests) {
                        EXPECT_EQ(UCS_OK, worker.wait(request));
                    }
                    EXPECT_EQ("next", worker.serve(channel));
                    EXPECT_EQ(UCS_OK, worker.close(to));
                    channel.send("closed");
                }
                EXPECT_EQ(0u, Machine::get().faults());
            },
            [&](Channel &channel) {
                Machine::get().use();
                if (peers) {
                    Machine::get().let_peers();
                }
                {
                    Worker worker;
                    channel.send(worker.address());
                    std::vector<std::unique_ptr<Memory>> targets;
                    std::vector<ucs_status_ptr_t> requests;
                    for (size_t i = 0; i < contexts * contexts; ++i) {
                        targets.push_back(std::make_unique<Memory>(
                                true, LENGTH, i * 5 % 16, Machine::get().contexts()[i / contexts]));
                        targets.back()->poison();
                        requests.push_back(receive(worker, *targets.back(), i));
                    }
                    for (size_t i = 0; i < requests.size(); ++i) {
                        EXPECT_EQ(UCS_OK, worker.wait(requests[i]));
                        EXPECT_TRUE(targets[i]->holds(Data::BF16, i)) << "message " << i;
                    }
                    channel.send("next");
                    worker.serve(channel);
                }
                EXPECT_EQ(0u, Machine::get().faults());
            });
}

TEST_P(Wires, GpusAndContextsOfAProcessDoNotMix)
{
    mix_contexts(GetParam().second, false);
}

TEST_P(Wires, GpusThatReachEachOtherDoNotMix)
{
    if (!has_two_gpus()) {
        GTEST_SKIP() << "needs two GPUs";
    }
    mix_contexts(GetParam().second, true);
}

// One buffer to two peers at the same time, each on a GPU of its own where there are two.
TEST_P(Wires, OneSenderReachesTwoReceiversAtOnce)
{
    static constexpr size_t LENGTH = 6 * MIB + 5, MESSAGES = 4; // (make_unique takes references)
    Processes peers(environment(GetParam().second));
    peers.timeout(100);
    const auto receiver = [](unsigned gpu) {
        return [gpu](Channel &channel) {
            Machine::get().use(gpu);
            Worker worker;
            channel.send(worker.address());
            std::vector<std::unique_ptr<Memory>> targets;
            std::vector<ucs_status_ptr_t> requests;
            for (size_t i = 0; i < MESSAGES; ++i) {
                targets.push_back(std::make_unique<Memory>(true, LENGTH, i * 5 % 16));
                targets.back()->poison();
                requests.push_back(receive(worker, *targets.back(), i));
            }
            for (size_t i = 0; i < MESSAGES; ++i) {
                EXPECT_EQ(UCS_OK, worker.wait(requests[i]));
                EXPECT_TRUE(targets[i]->holds(Data::BF16, i)) << "message " << i;
            }
            channel.send("have all");
            worker.serve(channel);
        };
    };
    peers.run_star(
            [&](std::vector<Channel> &channels) {
                Machine::get().use();
                Worker worker;
                std::vector<Endpoint *> to;
                for (Channel &channel : channels) {
                    to.push_back(worker.connect(channel.receive()));
                }
                std::vector<std::unique_ptr<Memory>> sources;
                std::vector<ucs_status_ptr_t> requests;
                for (size_t i = 0; i < MESSAGES; ++i) {
                    sources.push_back(std::make_unique<Memory>(true, LENGTH, i));
                    sources.back()->put(Data::BF16, i);
                    for (Endpoint *peer : to) {
                        requests.push_back(send(peer, *sources.back(), i));
                    }
                }
                for (ucs_status_ptr_t request : requests) {
                    EXPECT_EQ(UCS_OK, worker.wait(request));
                }
                for (size_t i = 0; i < to.size(); ++i) {
                    EXPECT_EQ("have all", worker.serve(channels[i]));
                    EXPECT_EQ(UCS_OK, worker.close(to[i]));
                    channels[i].send("closed");
                }
            },
            {receiver(0), receiver(has_two_gpus() ? 1 : 0)});
}

// What progresses need not be what allocated: it may have no current context.
TEST_P(Wires, AThreadWithoutAContextSendsAndReceives)
{
    constexpr size_t LENGTH = 5 * MIB + 3;
    Processes pair(environment(GetParam().second));
    pair.timeout(60);
    pair.run(
            [&](Channel &channel) {
                Machine::get().use();
                Worker worker;
                Endpoint *to = worker.connect(channel.receive());
                Memory source(true, LENGTH, 1);
                source.put(Data::BF16, 1);
                Machine::get().leave();
                for (ucp_tag_t tag : {0u, 1u}) {
                    EXPECT_EQ(UCS_OK, worker.wait(send(to, source, tag)));
                }
                EXPECT_EQ(UCS_OK, worker.close(to));
                Machine::get().use();
                channel.send("closed");
            },
            [&](Channel &channel) {
                Machine::get().use();
                Worker worker;
                channel.send(worker.address());
                Memory target(true, LENGTH, 2);
                for (ucp_tag_t tag : {0u, 1u}) {
                    Machine::get().use();
                    target.poison();
                    Machine::get().leave();
                    EXPECT_EQ(UCS_OK, worker.wait(receive(worker, target, tag)));
                    Machine::get().use();
                    EXPECT_TRUE(target.holds(Data::BF16, 1));
                }
                Machine::get().leave();
                worker.serve(channel);
                Machine::get().use();
            });
}

INSTANTIATE_TEST_SUITE_P(Over, Wires, testing::ValuesIn(wires()),
                         [](const auto &one) { return one.param.first; });

// ---- what only a real GPU has

class RealOnly : public testing::TestWithParam<std::pair<std::string, Env>> {
protected:
    void SetUp() override
    {
        if (emulated_library() != nullptr) {
            GTEST_SKIP() << "needs a GPU";
        }
    }
};

TEST_P(RealOnly, EveryKindOfItsMemoryWorks)
{
    for (const Kind kind : {Kind::POOL, Kind::MAPPED, Kind::MANAGED}) {
        SCOPED_TRACE(static_cast<int>(kind));
        Processes pair(
                environment(GetParam().second, {{"UCX_ZIP_MEM_TYPES", "cuda,cuda-managed,host"}}));
        exchange(pair, {true, true, 0, kind},
                 {{3 * MIB + 5, Data::BF16, 3}, {8 * MIB}, {2 * MIB, Data::RANDOM}, {MIB}}, 2);
    }
}

// More than 31 bits count.
TEST_P(RealOnly, ThreeGiBArriveBitForBit)
{
    constexpr size_t BLOCK = 64 * MIB, LENGTH = 3 * GIB + BLOCK / 2 + 5;
    std::vector<char> block(BLOCK);
    // Blocks that differ in their first bytes, and in where they begin.
    const auto each_block = [&](const auto &with) {
        fill(block.data(), BLOCK, Data::BF16, 1);
        for (size_t offset = 0; offset < LENGTH; offset += BLOCK) {
            memcpy(block.data(), &offset, sizeof(offset));
            with(offset, std::min(BLOCK, LENGTH - offset));
        }
    };
    Machine &gpu = Machine::get();
    Processes pair(environment(GetParam().second));
    pair.timeout(150);
    ucp_request_param_t param = {};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_MEMORY_TYPE;
    param.memory_type = UCS_MEMORY_TYPE_CUDA;
    pair.run(
            [&](Channel &channel) {
                gpu.use();
                auto *source = static_cast<char *>(gpu.allocate(LENGTH));
                each_block([&](size_t offset, size_t length) {
                    gpu.to_device(source + offset, block.data(), length);
                });
                {
                    Worker worker;
                    Endpoint *to = worker.connect(channel.receive());
                    EXPECT_EQ(UCS_OK,
                              worker.wait(ucp_tag_send_nbx(to->ep, source, LENGTH, 1, &param)));
                    EXPECT_EQ(UCS_OK, worker.close(to));
                    channel.send("closed");
                }
                gpu.free(source);
            },
            [&](Channel &channel) {
                gpu.use();
                auto *target = static_cast<char *>(gpu.allocate(LENGTH));
                {
                    Worker worker;
                    channel.send(worker.address());
                    EXPECT_EQ(UCS_OK, worker.wait(ucp_tag_recv_nbx(worker.get(), target, LENGTH, 1,
                                                                   ~ucp_tag_t{0}, &param)));
                    std::vector<char> arrived(BLOCK);
                    each_block([&](size_t offset, size_t length) {
                        gpu.to_host(arrived.data(), target + offset, length);
                        EXPECT_EQ(0, memcmp(arrived.data(), block.data(), length))
                                << "in the block at " << offset;
                    });
                    worker.serve(channel);
                }
                gpu.free(target);
            });
}

INSTANTIATE_TEST_SUITE_P(Over, RealOnly, testing::ValuesIn(wires()),
                         [](const auto &one) { return one.param.first; });

// ---- what only the emulated GPU can be told to do

class EmulatedOnly : public testing::TestWithParam<std::pair<std::string, Env>> {
protected:
    void SetUp() override
    {
        if (emulated_library() == nullptr) {
            GTEST_SKIP() << "needs the emulated GPU";
        }
    }
};

TEST_P(EmulatedOnly, ASlowGpuOnlyTakesLonger)
{
    Processes pair(environment(GetParam().second, {{"ZIP_EMULATED_DELAY_US", "300"},
                                                   {"ZIP_EMULATED_JITTER", "2000"},
                                                   {"UCX_ZIP_GPU_SEG_SIZE", "200k"}}));
    exchange(pair, {true, true}, {{7 * MIB}, {3 * MIB, Data::FP32}, {2 * MIB}, {4 * MIB}}, 2);
}

TEST_P(EmulatedOnly, TheProcessorTouchesNoGpuMemory)
{
    if (GetParam().first == "Rc") {
        GTEST_SKIP() << "the emulated card's part would be the processor's";
    }
    Processes pair(environment(GetParam().second, {{"ZIP_EMULATED_PROTECT", "1"}}));
    exchange(pair, {true, true}, {{5 * MIB + 1}, {MIB, Data::RANDOM}});
}

// A GPU that fails at either end, early or late, ends in an error at both and in no hang.
// (Processes poll seldom while they wait here: each of these took 12 s when that was noticed by
// polls alone.)
TEST_P(EmulatedOnly, AGpuThatFailsIsAnErrorAtBothEnds)
{
    for (const unsigned part : {0u, 1u}) {
        for (const char *fault : {"launch@1", "launch@3", "device@1", "device@2", "alloc@1"}) {
            SCOPED_TRACE(std::string(fault) + " in " + std::to_string(part));
            Processes pair(
                    environment(GetParam().second + PEER_ERRORS,
                                {{"UCX_ZIP_GPU_SEG_SIZE", "300k"}, {"UCX_ZIP_DTYPE", "bf16"}}));
            pair.env(part)["ZIP_EMULATED_FAIL"] = fault;
            pair.timeout(100);
            const auto both = [&](bool sends, Channel &channel) {
                Worker worker;
                channel.send(worker.address());
                Endpoint *peer = worker.connect(channel.receive(), UCP_ERR_HANDLING_MODE_PEER);
                Memory memory(true, 4 * MIB, 0);
                memory.put(Data::BF16, 1);
                ucs_status_t status = UCS_OK;
                for (unsigned i = 0; i < 4 && status == UCS_OK; ++i) {
                    status =
                            worker.wait(sends ? send(peer, memory, i) : receive(worker, memory, i));
                    if (!sends && peer->error != UCS_OK) {
                        break;
                    }
                }
                if (sends) {
                    EXPECT_NE(UCS_OK, status);
                }
                channel.send("done");
                worker.serve(channel);
                worker.close(peer, true);
            };
            pair.run([&](Channel &channel) { both(true, channel); },
                     [&](Channel &channel) {
                         Worker worker;
                         channel.send(worker.address());
                         Endpoint *peer =
                                 worker.connect(channel.receive(), UCP_ERR_HANDLING_MODE_PEER);
                         Memory memory(true, 4 * MIB, 0);
                         std::vector<ucs_status_ptr_t> requests;
                         for (unsigned i = 0; i < 4; ++i) {
                             requests.push_back(receive(worker, memory, i));
                         }
                         EXPECT_EQ("done", worker.serve(channel));
                         channel.send("done");
                         worker.close(peer, true);
                         for (ucs_status_ptr_t request : requests) {
                             if (UCS_PTR_IS_PTR(request)) {
                                 if (ucp_request_check_status(request) == UCS_INPROGRESS) {
                                     ucp_request_cancel(worker.get(), request);
                                 }
                                 worker.wait(request);
                             }
                         }
                     });
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Over, EmulatedOnly, testing::ValuesIn(wires()),
                         [](const auto &one) { return one.param.first; });

// ---- what UCX's own tables (UCX_PROTO_INFO) say of messages

struct Row {
    size_t first = 0;
    bool to_the_end = false;
    std::string how;
};

// A size as the tables have it: "4096", "64K", "4M".
size_t parse_size(const std::string &text)
{
    char *end;
    const size_t number = strtoull(text.c_str(), &end, 10);
    return *end == 'K' ? number << 10 : *end == 'M' ? number << 20 : number;
}

// The rows of the table for ucp_tag_send of `memory`, "cuda" or "host": those of the first endpoint
// that has one with a rendezvous in it.
std::vector<Row> rows_of(const std::string &log, const std::string &memory)
{
    std::vector<Row> rows, found;
    bool inside = false;
    std::istringstream lines(log);
    for (std::string line; std::getline(lines, line);) {
        if (line.find(" cfg#") != std::string::npos) { // a table begins
            inside = false;
            if (!rows.empty()) {
                found = rows;
            }
            rows.clear();
        } else if (line.find("tagged message by ucp_tag_send* from " + memory) !=
                   std::string::npos) {
            inside = true;
        }
        const size_t bar = line.find("| ");
        const size_t dots = line.find("..");
        if (!inside || bar == std::string::npos || dots == std::string::npos) {
            continue;
        }
        Row row;
        row.first = parse_size(line.substr(line.find_first_not_of(' ', bar + 1)));
        row.to_the_end = line.compare(dots, 5, "..inf") == 0;
        row.how = line.substr(line.find('|', bar + 1));
        for (size_t blanks; (blanks = row.how.find("  ")) != std::string::npos;) {
            row.how.erase(blanks, 1); // columns are as wide as the table needs
        }
        rows.push_back(row);
    }
    return rows.empty() ? found : rows;
}

// What is done with messages of `size`.
std::string how(const std::vector<Row> &rows, size_t size)
{
    std::string found;
    for (const Row &row : rows) {
        if (row.first <= size) {
            found = row.how;
        }
    }
    return found;
}

// UCX has one way for all rendezvous of GPU memory where zip is, and their keys say which of them
// zip has no part in: its tables show the way, and the counters who went it.
TEST(GpuSelection, LargeMessagesGoThroughZipAloneAndSmallOnesAsWithout)
{
    constexpr size_t LARGE = 128 * MIB, SMALL = 32 * KIB;
    if (emulated_library() != nullptr) {
        GTEST_SKIP() << "needs UCX's CUDA transports";
    }
    const char *verbs = getenv("ZIP_TEST_VERBS");
    if (verbs == nullptr) {
        GTEST_SKIP() << "needs ZIP_TEST_VERBS";
    }
    const Env rc = {{"UCX_NET_DEVICES", "swverbs0:1"},
                    {"UCX_MODULES", "^efa"},
                    {"UCX_FENCE_MODE", "weak"},
                    {"LD_PRELOAD", verbs}};
    for (const char *gbps : {"1", "12", "50", "100", "200", "400"}) {
        // Below the speed that UCX believes of cuda_copy it sends host memory through GPU
        // fragments, over whatever lane takes those.
        const bool with_host = std::stoi(gbps) > 10;
        std::vector<std::pair<bool, size_t>> messages = {{true, LARGE}, {true, SMALL}};
        if (with_host) {
            messages.emplace_back(false, LARGE);
        }
        std::string log[2]; // without zip, with
        for (const char *tls : {"rc_verbs,ud_verbs,cuda_copy", "zip,rc_verbs,ud_verbs,cuda_copy"}) {
            Processes pair(environment(rc, {{"UCX_TLS", tls},
                                            {"UCX_PROTO_INFO", "y"},
                                            {"UCX_ZIP_MEM_TYPES", "cuda"},
                                            {"UCX_ZIP_BYPASS", "auto"},
                                            {"SWVERBS_GBPS", gbps}}));
            pair.run(
                    [&](Channel &channel) {
                        Machine::get().use();
                        Worker worker;
                        Endpoint *to = worker.connect(channel.receive());
                        for (const auto &[device, length] : messages) {
                            Memory source(device, length, 0);
                            EXPECT_EQ(UCS_OK,
                                      worker.wait(worker.tag_send(to, source.data(), length, 1)));
                        }
                        EXPECT_EQ(UCS_OK, worker.close(to));
                        channel.send("closed");
                    },
                    [&](Channel &channel) {
                        Machine::get().use();
                        Worker worker;
                        channel.send(worker.address());
                        for (const auto &[device, length] : messages) {
                            Memory target(device, length, 0);
                            EXPECT_EQ(UCS_OK,
                                      worker.wait(worker.tag_receive(target.data(), length, 1)));
                        }
                        worker.serve(channel);
                    });
            if (!Processes::is_part()) {
                log[tls[0] == 'z'] = pair.outcome(0).log;
                const uint64_t gets = pair.outcome(1).zip.gets + pair.outcome(0).zip.puts;
                EXPECT_EQ(tls[0] == 'z' ? 1u : 0u, gets) << "at " << gbps << " GB/s";
            }
        }
        if (Processes::is_part()) {
            continue;
        }
        const std::vector<Row> plain = rows_of(log[0], "cuda"), zip = rows_of(log[1], "cuda");
        ASSERT_FALSE(plain.empty()) << log[0];
        ASSERT_FALSE(zip.empty()) << log[1];
        for (const auto *table : {&plain, &zip}) {
            for (const Row &row : *table) {
                printf("%s GB/s, %s zip, CUDA, from %zu: %s\n", gbps,
                       table == &zip ? "with" : "without", row.first, row.how.c_str());
            }
        }
        EXPECT_TRUE(zip.back().to_the_end);
        EXPECT_NE(std::string::npos, zip.back().how.find("zip/")) << zip.back().how;
        EXPECT_EQ(std::string::npos, zip.back().how.find(" and ")) << "striped: " << zip.back().how;
        const auto is_eager = [](const std::vector<Row> &rows, size_t size) {
            return how(rows, size).find("eager") != std::string::npos;
        };
        for (size_t size = 256; size <= SMALL; size *= 2) {
            EXPECT_EQ(is_eager(plain, size), is_eager(zip, size))
                    << size << " bytes at " << gbps << " GB/s";
        }
        for (size_t size = 1; size < LARGE && with_host; size *= 2) {
            EXPECT_EQ(how(rows_of(log[0], "host"), size), how(rows_of(log[1], "host"), size))
                    << size << " bytes of host memory at " << gbps << " GB/s";
        }
    }
}

} // namespace
} // namespace zip::test
