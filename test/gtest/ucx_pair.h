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

// What the interfaces of a process said when they closed.
struct ZipCounters {
    unsigned interfaces = 0;
    uint64_t puts = 0, put_bytes = 0, wire_bytes = 0, segments = 0, stored_segments = 0;
    uint64_t received_bytes = 0, received_segments = 0, refused = 0;
};

struct Outcome {
    pid_t pid = 0;
    int code = -1;  // of exit, or -1
    int signal = 0; // that ended the process
    std::string log;
    ZipCounters zip;
};

// One or two processes that run parts of the current test. The test's body runs again in each of
// them as far as its run(), executes the part that is theirs, and exits; only the parent comes back
// from run(). Failed assertions in a part fail the test.
class Processes {
public:
    using Part = std::function<void(Channel &)>;

    // `env` is for both: all UCX variables there are, besides those that find the plugin.
    explicit Processes(Env env = {}) : env_{env, env} {}
    Env &env(unsigned part) { return env_[part]; }
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
    // Whether this process executes a part, rather than the test as a whole.
    static bool is_part();
    const Outcome &outcome(unsigned part) const { return outcome_[part]; }

private:
    void start(unsigned run, unsigned part, int channel, int log);
    [[noreturn]] static void run_here(const Part &part);

    Env env_[2];
    unsigned timeout_ = 40; // seconds
    bool may_die_[2] = {};
    Outcome outcome_[2];
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
};
extern const std::vector<Wire> WIRES;
void PrintTo(const Wire &wire, std::ostream *stream);
// Shared memory offers error handling of peers only when told to.
extern const Env PEER_ERRORS;
// `base` and what of `more` is not in it.
Env operator+(Env base, const Env &more);

struct Endpoint {
    ucp_ep_h ep = nullptr;
    ucs_status_t error = UCS_OK; // what its error callback was told
    unsigned errors = 0;         // calls of it
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
    Window(Worker &worker, void *address, size_t length);
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
