// SPDX-License-Identifier: BSD-3-Clause
// Tests in processes of their own, each with its own environment, that see the plugin as an
// application does: through unmodified UCX.
#ifndef ZIP_TEST_UCX_PAIR_H
#define ZIP_TEST_UCX_PAIR_H

#include <gtest/gtest.h>
#include <ucp/api/ucp.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace zip::test {

using Env = std::map<std::string, std::string>;

// Between the two processes of a test.
class Channel {
public:
    explicit Channel(int fd) : fd_(fd) {}
    int fd() const { return fd_; }
    void send(const std::string &message);
    // Ends the process if the other one is gone.
    std::string receive();
    // False if the other process is gone.
    bool try_receive(std::string &message);
    bool readable() const;
    void sync();

private:
    int fd_;
};

// What interfaces said when they closed.
struct ZipCounters {
    unsigned interfaces = 0;
    uint64_t puts = 0, put_bytes = 0, wire_bytes = 0, segments = 0, stored_segments = 0;
    uint64_t received_bytes = 0, received_segments = 0, refused = 0;
    uint64_t gets = 0, get_bytes = 0, straight_bytes = 0;
    uint64_t registrations = 0, registered_bytes = 0; // in the domain below; the most at a time
};

struct Outcome {
    pid_t pid = 0;
    int code = -1;  // of exit, or -1
    int signal = 0; // that ended the process
    std::string log;
    std::string errors;                  // what UCX and the plugin logged as one
    ZipCounters zip;                     // of all its interfaces together
    std::vector<ZipCounters> interfaces; // of each
};

// Processes that run parts of the current test. The test's body runs again in each of them as far
// as its run(), executes the part that is theirs, and exits; only the parent comes back from run().
// Failed assertions in a part fail the test.
class Processes {
public:
    using Part = std::function<void(Channel &)>;
    using Center = std::function<void(std::vector<Channel> &)>;

    // `env` is for all: all UCX variables there are, besides those that find the plugin.
    explicit Processes(Env env = {}) : env_(std::move(env)) {}
    // Of one part; before the runs that it is for.
    Env &env(unsigned part) { return envs_.try_emplace(part, env_).first->second; }
    Processes &timeout(unsigned seconds)
    {
        timeout_ = seconds;
        return *this;
    }
    // Processes that may end by a signal.
    Processes &may_die(unsigned part)
    {
        may_die_[part] = true;
        return *this;
    }
    // False in a process whose part is another run's: there is no outcome to look at.
    bool run(const Part &a, const Part &b = {});
    // Part 0 has a channel to each of the others, which are parts 1, 2, ...
    bool run_star(const Center &center, const std::vector<Part> &others);
    // Whether this process executes a part, rather than the test as a whole.
    static bool is_part();
    const Outcome &outcome(unsigned part) const { return outcomes_.at(part); }

private:
    void start(unsigned run, unsigned part, const std::vector<int> &channels, int log);

    Env env_;
    std::map<unsigned, Env> envs_;
    unsigned timeout_ = 40; // seconds
    std::map<unsigned, bool> may_die_;
    std::vector<Outcome> outcomes_;
    std::string fabric_;
};

// Data with a name, the same for the same seed in every process.
enum class Data { BF16, FP32, RANDOM, ZEROS };
constexpr Data ALL_DATA[] = {Data::BF16, Data::FP32, Data::RANDOM, Data::ZEROS};
void fill(void *buffer, size_t length, Data data, uint64_t seed);

// Memory at a given misalignment between two guards that nobody may touch.
class Buffer {
public:
    explicit Buffer(size_t length, size_t misalignment = 0);
    Buffer(size_t length, Data data, uint64_t seed, size_t misalignment = 0);
    char *data() { return memory_.data() + offset_; }
    size_t length() const { return length_; }
    void clear();
    // Holds exactly what fill() makes of these, and the guards are whole.
    testing::AssertionResult holds(Data data, uint64_t seed);

private:
    static constexpr size_t GUARD = 64;
    std::vector<char> memory_;
    size_t length_;
    size_t offset_;
};

// What zip has below, and how it is connected there.
struct Wire {
    const char *name;
    Env env;
    bool shared_memory;
    const char *transport; // UCT's name of what is below
    const char *device;
};
// All there are here. `rc`, UCX's rc_verbs, is one of them where ZIP_TEST_VERBS names the library
// that emulates its device (test/verbs).
const std::vector<Wire> &all_wires();
// Those that are no shared memory.
std::vector<Wire> networks();
// `rc` if there is one.
std::vector<Wire> rc_wires();
void PrintTo(const Wire &wire, std::ostream *stream);
// Shared memory offers error handling of peers only when told to, and rc's defaults take ten
// seconds to find that a peer is gone.
extern const Env PEER_ERRORS;
// `base` and what of `more` is not in it.
Env operator+(Env base, const Env &more);

struct Endpoint {
    ucp_ep_h ep = nullptr;
    ucs_status_t error = UCS_OK; // what its error callback was told
    unsigned errors = 0;         // calls of it
};

// What a loop of progress does in a round that found nothing: lets others run, and sleeps once that
// has lasted a while, for many wait here at once.
class Idle {
public:
    void busy() { rounds_ = 0; }
    void round();

private:
    unsigned rounds_ = 0;
};

// A context with one worker. All waiting is bounded: after `patience` a test has failed.
class Worker {
public:
    static constexpr uint64_t FEATURES = UCP_FEATURE_TAG | UCP_FEATURE_AM | UCP_FEATURE_RMA;
    static constexpr std::chrono::seconds PATIENCE{20};

    explicit Worker(uint64_t features = FEATURES,
                    ucs_thread_mode_t threads = UCS_THREAD_MODE_SINGLE);
    ~Worker();
    Worker(const Worker &) = delete;
    Worker &operator=(const Worker &) = delete;

    ucp_worker_h get() const { return worker_; }
    ucp_context_h context() const { return context_; }
    std::string address() const;
    Endpoint *connect(const std::string &address,
                      ucp_err_handling_mode_t mode = UCP_ERR_HANDLING_MODE_NONE);
    // Waits for the end of the endpoint; `force` gives up what is under way.
    ucs_status_t close(Endpoint *endpoint, bool force = false);

    // Have waiting sleep in poll() rather than spin (UCP_FEATURE_WAKEUP).
    void sleep_in_waits(bool on) { sleeps_ = on; }
    unsigned progress() { return ucp_worker_progress(worker_); }
    // Progress until `done`. False: out of patience.
    bool wait_until(const std::function<bool()> &done,
                    std::chrono::milliseconds patience = PATIENCE);
    // Progress until the request has ended; releases it.
    ucs_status_t wait(ucs_status_ptr_t request);
    // Progress until the other process says something on its channel; returns that.
    std::string serve(Channel &channel);

    ucs_status_ptr_t tag_send(Endpoint *endpoint, const void *data, size_t length, ucp_tag_t tag);
    ucs_status_ptr_t tag_receive(void *data, size_t length, ucp_tag_t tag);
    ucs_status_t flush();
    ucs_status_t flush(Endpoint *endpoint);

private:
    bool sleep(std::chrono::milliseconds most, int other_fd);

    ucp_context_h context_ = nullptr;
    ucp_worker_h worker_ = nullptr;
    bool sleeps_ = false;
    std::vector<std::unique_ptr<Endpoint>> endpoints_;
};

// Memory of this process that the other one may put into.
class Window {
public:
    Window(Worker &worker, void *address, size_t length,
           ucs_memory_type_t type = UCS_MEMORY_TYPE_HOST);
    ~Window();
    Window(const Window &) = delete;
    Window &operator=(const Window &) = delete;
    std::string key() const;

private:
    ucp_context_h context_;
    ucp_mem_h memh_ = nullptr;
};

} // namespace zip::test

#endif
