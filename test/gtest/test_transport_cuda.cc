// SPDX-License-Identifier: BSD-3-Clause
// CUDA memory through the transport, over UCX's rc on the software verbs device. Needs a GPU, and
// ZIP_TEST_VERBS with the device's library.
#include "ucx_pair.h"

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <sstream>

namespace zip::test {
namespace {

constexpr size_t KIB = 1024, MIB = 1024 * KIB;

// The driver's functions that are used here; a program without CUDA's headers can have them, too.
class Driver {
public:
    static Driver &get()
    {
        static Driver driver;
        return driver;
    }
    // Makes the first GPU's primary context current, or ends the process.
    void use()
    {
        void *context = nullptr;
        check(init(0), "cuInit");
        check(retain(&context, 0), "cuDevicePrimaryCtxRetain");
        check(set_current(context), "cuCtxSetCurrent");
    }
    static void check(int error, const char *what)
    {
        if (error != 0) {
            printf("%s: CUDA error %d\n", what, error);
            fflush(stdout);
            _exit(3);
        }
    }

    int (*init)(unsigned);
    int (*retain)(void **, int);
    int (*set_current)(void *);
    int (*allocate)(uintptr_t *, size_t);
    int (*free)(uintptr_t);
    int (*to_device)(uintptr_t, const void *, size_t);
    int (*to_host)(void *, uintptr_t, size_t);

private:
    Driver()
    {
        void *library = dlopen("libcuda.so.1", RTLD_NOW);
        if (library == nullptr) {
            printf("no CUDA driver: %s\n", dlerror());
            exit(4);
        }
        resolve(library, init, "cuInit");
        resolve(library, retain, "cuDevicePrimaryCtxRetain");
        resolve(library, set_current, "cuCtxSetCurrent");
        resolve(library, allocate, "cuMemAlloc_v2");
        resolve(library, free, "cuMemFree_v2");
        resolve(library, to_device, "cuMemcpyHtoD_v2");
        resolve(library, to_host, "cuMemcpyDtoH_v2");
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
};

// Device or host memory, filled and compared through the host.
class Memory {
public:
    Memory(bool device, size_t length, size_t misalignment)
        : device_(device), length_(length), offset_(misalignment), host_(length + misalignment)
    {
        if (device_) {
            Driver::check(Driver::get().allocate(&base_, length + misalignment + 1), "cuMemAlloc");
        }
    }
    ~Memory()
    {
        if (device_) {
            Driver::get().free(base_);
        }
    }
    Memory(const Memory &) = delete;
    Memory &operator=(const Memory &) = delete;

    void *data()
    {
        return device_ ? reinterpret_cast<void *>(base_ + offset_) : host_.data() + offset_;
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
            Driver::check(Driver::get().to_host(host_.data() + offset_, base_ + offset_, length_),
                          "cuMemcpyDtoH");
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
            Driver::check(Driver::get().to_device(base_ + offset_, host_.data() + offset_, length_),
                          "cuMemcpyHtoD");
        }
    }

    bool device_;
    size_t length_, offset_;
    uintptr_t base_ = 0;
    std::vector<char> host_;
};

const char *verbs_library()
{
    const char *library = getenv("ZIP_TEST_VERBS");
    return library != nullptr ? library : "";
}

// What a user sets, and what the software device needs; `more` goes before it.
Env environment(const Env &more = {})
{
    return more + Env{{"UCX_TLS", "zip,rc_verbs,ud_verbs,cuda_copy"},
                      {"UCX_NET_DEVICES", "swverbs0:1"},
                      {"UCX_MODULES", "^efa"},
                      {"UCX_ZIP_MEM_TYPES", "cuda"},
                      {"UCX_ZIP_BYPASS", "auto"},
                      {"UCX_FENCE_MODE", "weak"},
                      {"LD_PRELOAD", verbs_library()},
                      {"SWVERBS_FABRIC", "zip-test-cuda-" + std::to_string(getppid())}};
}

uint64_t straight_bytes(const std::string &log)
{
    uint64_t sum = 0;
    for (size_t at = log.find(" bytes straight"); at != std::string::npos;
         at = log.find(" bytes straight", at + 1)) {
        sum += strtoull(log.c_str() + log.rfind(' ', at - 1), nullptr, 10);
    }
    return sum;
}

struct Sides {
    bool sender, receiver; // on the GPU
};

class Cuda : public testing::TestWithParam<Sides> {};

TEST_P(Cuda, TagMessagesArriveBitForBit)
{
    const std::vector<size_t> sizes = {1,       7,           4096,    64 * KIB - 1,
                                       MIB + 1, 3 * MIB + 5, 8 * MIB, 64 * MIB};
    const Sides sides = GetParam();
    Processes pair(environment());
    pair.timeout(120);
    pair.run(
            [&](Channel &channel) {
                Driver::get().use();
                Worker worker;
                Endpoint *to = worker.connect(channel.receive());
                for (size_t i = 0; i < sizes.size(); ++i) {
                    Memory source(sides.sender, sizes[i], i);
                    source.put(Data::BF16, i);
                    EXPECT_EQ(UCS_OK, worker.wait(worker.tag_send(to, source.data(), sizes[i], i)));
                    EXPECT_TRUE(source.holds(Data::BF16, i)) << "the source was changed";
                }
                channel.receive();
                EXPECT_EQ(UCS_OK, worker.close(to));
                channel.send("closed");
            },
            [&](Channel &channel) {
                Driver::get().use();
                Worker worker;
                channel.send(worker.address());
                for (size_t i = 0; i < sizes.size(); ++i) {
                    Memory target(sides.receiver, sizes[i], (i * 7) % 16);
                    target.poison();
                    EXPECT_EQ(UCS_OK, worker.wait(worker.tag_receive(target.data(), sizes[i], i)));
                    EXPECT_TRUE(target.holds(Data::BF16, i)) << sizes[i] << " bytes";
                }
                channel.send("all here");
                worker.serve(channel);
            });
    if (!Processes::is_part() && sides.sender && sides.receiver) {
        const uint64_t straight =
                straight_bytes(pair.outcome(0).log) + straight_bytes(pair.outcome(1).log);
        EXPECT_GE(straight, 72 * MIB) << "did not go through zip:\n" << pair.outcome(0).log;
    }
}

TEST_P(Cuda, PutsAndGetsArriveBitForBit)
{
    const std::vector<size_t> sizes = {1, 4096, 64 * KIB + 3, MIB, 16 * MIB + 1};
    const Sides sides = GetParam();
    Processes pair(environment());
    pair.timeout(120);
    pair.run(
            [&](Channel &channel) {
                Driver::get().use();
                Worker worker;
                Endpoint *to = worker.connect(channel.receive());
                for (size_t i = 0; i < sizes.size(); ++i) {
                    const std::string key = channel.receive();
                    const uint64_t address = std::stoull(channel.receive());
                    ucp_rkey_h rkey;
                    ASSERT_EQ(UCS_OK, ucp_ep_rkey_unpack(to->ep, key.data(), &rkey));
                    Memory local(sides.sender, sizes[i], i);
                    ucp_request_param_t param = {};
                    local.put(Data::BF16, i);
                    EXPECT_EQ(UCS_OK, worker.wait(ucp_put_nbx(to->ep, local.data(), sizes[i],
                                                              address, rkey, &param)));
                    EXPECT_EQ(UCS_OK, worker.flush());
                    channel.send("put");
                    channel.receive();
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
                Driver::get().use();
                Worker worker;
                channel.send(worker.address());
                for (size_t i = 0; i < sizes.size(); ++i) {
                    Memory target(sides.receiver, sizes[i], (i * 7) % 16);
                    target.poison();
                    Window window(worker, target.data(), sizes[i]);
                    channel.send(window.key());
                    channel.send(std::to_string(reinterpret_cast<uintptr_t>(target.data())));
                    EXPECT_EQ("put", worker.serve(channel));
                    EXPECT_TRUE(target.holds(Data::BF16, i)) << "put " << sizes[i] << " bytes";
                    target.put(Data::FP32, i);
                    channel.send("changed");
                    EXPECT_EQ("got", worker.serve(channel));
                }
                worker.serve(channel);
            });
}

INSTANTIATE_TEST_SUITE_P(Over, Cuda,
                         testing::Values(Sides{true, true}, Sides{true, false}, Sides{false, true}),
                         [](const auto &sides) {
                             return std::string(sides.param.sender ? "Gpu" : "Host") + "To" +
                                    (sides.param.receiver ? "Gpu" : "Host");
                         });

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

TEST(CudaSelection, LargeMessagesGoThroughZipAloneAndSmallOnesAsWithout)
{
    for (const char *gbps : {"1", "12", "50"}) {
        std::string log[2]; // without zip, with
        for (const char *tls : {"rc_verbs,ud_verbs,cuda_copy", "zip,rc_verbs,ud_verbs,cuda_copy"}) {
            Processes pair(environment(
                    {{"UCX_TLS", tls}, {"UCX_PROTO_INFO", "y"}, {"SWVERBS_GBPS", gbps}}));
            pair.run(
                    [&](Channel &channel) {
                        Driver::get().use();
                        Worker worker;
                        Endpoint *to = worker.connect(channel.receive());
                        for (bool device : {true, false}) {
                            Memory source(device, 64 * MIB, 0);
                            EXPECT_EQ(UCS_OK,
                                      worker.wait(worker.tag_send(to, source.data(), 64 * MIB, 1)));
                        }
                        EXPECT_EQ(UCS_OK, worker.close(to));
                        channel.send("closed");
                    },
                    [&](Channel &channel) {
                        Driver::get().use();
                        Worker worker;
                        channel.send(worker.address());
                        for (bool device : {true, false}) {
                            Memory target(device, 64 * MIB, 0);
                            EXPECT_EQ(UCS_OK,
                                      worker.wait(worker.tag_receive(target.data(), 64 * MIB, 1)));
                        }
                        worker.serve(channel);
                    });
            if (!Processes::is_part()) {
                log[tls[0] == 'z'] = pair.outcome(0).log;
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
        // (the shortest, for which UCX takes a put of rc without zip, go eager: puts are zip's)
        for (size_t size = 256; size < zip.back().first; size *= 2) {
            EXPECT_EQ(how(plain, size), how(zip, size)) << size << " bytes at " << gbps << " GB/s";
        }
        // Below the speed that UCX believes of cuda_copy it sends host memory through GPU
        // fragments, over whatever lane takes those.
        for (size_t size = 1; size < 64 * MIB && std::stoi(gbps) > 10; size *= 2) {
            EXPECT_EQ(how(rows_of(log[0], "host"), size), how(rows_of(log[1], "host"), size))
                    << size << " bytes of host memory at " << gbps << " GB/s";
        }
    }
}

} // namespace
} // namespace zip::test
