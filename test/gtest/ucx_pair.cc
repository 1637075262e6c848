// SPDX-License-Identifier: BSD-3-Clause
// Processes, data and UCP objects for the transport tests; see ucx_pair.h.
#include "ucx_pair.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>

extern char **environ;

namespace zip::test {

namespace {

using Clock = std::chrono::steady_clock;

constexpr char PART_VARIABLE[] = "ZIP_TEST_PART"; // "run.part": which part of the test to execute
constexpr int CHANNEL_FD = 3;
constexpr size_t LOG_SHOWN = 12000; // last characters of a process's log, in a failure

// Counts the calls of run() of the current test.
unsigned count_run()
{
    static const testing::TestInfo *last;
    static unsigned runs;
    const testing::TestInfo *test = testing::UnitTest::GetInstance()->current_test_info();
    runs = test == last ? runs + 1 : 1;
    last = test;
    return runs;
}

// Of emulated devices that see each other: those of one run() alone.
std::string new_fabric()
{
    static unsigned runs;
    return "zip_test." + std::to_string(getpid()) + "." + std::to_string(++runs) + ".";
}

// What processes that were killed have left behind.
void remove_fabric(const std::string &fabric)
{
    constexpr char FOLDER[] = "/dev/shm";
    if (DIR *dir = opendir(FOLDER)) {
        while (const dirent *entry = readdir(dir)) {
            const std::string name = entry->d_name;
            if (name.find(fabric) != std::string::npos) {
                unlink((std::string(FOLDER) + "/" + name).c_str());
            }
        }
        closedir(dir);
    }
}

std::string own_path()
{
    char path[4096];
    const ssize_t length = readlink("/proc/self/exe", path, sizeof(path));
    return std::string(path, length > 0 ? static_cast<size_t>(length) : 0);
}

std::string read_file(int fd)
{
    std::string text;
    char chunk[65536];
    ssize_t length;
    lseek(fd, 0, SEEK_SET);
    while ((length = read(fd, chunk, sizeof(chunk))) > 0) {
        text.append(chunk, static_cast<size_t>(length));
    }
    return text;
}

std::string stacks_of(pid_t pid)
{
    const std::string command = "gdb -p " + std::to_string(pid) +
                                " -batch -nx -ex 'thread apply all bt 30' 2>&1 | grep -v '^\\[New'";
    std::string text;
    if (FILE *pipe = popen(command.c_str(), "r")) {
        char line[1024];
        while (fgets(line, sizeof(line), pipe) != nullptr) {
            text += line;
        }
        pclose(pipe);
    }
    return text;
}

// The lines that the plugin's interfaces log when they close.
std::vector<ZipCounters> parse_counters(const std::string &log)
{
    std::vector<ZipCounters> all;
    std::istringstream lines(log);
    for (std::string line; std::getline(lines, line);) {
        const size_t start = line.find(" sent ");
        if (line.find("zip/") == std::string::npos || start == std::string::npos) {
            continue;
        }
        unsigned long n[13];
        if (sscanf(line.c_str() + start,
                   " sent %lu puts, %lu bytes as %lu in %lu segments (%lu of them uncompressed); "
                   "received %lu bytes in %lu segments, refused %lu; got %lu gets, %lu bytes; "
                   "%lu bytes straight; registered below %lu times, at most %lu bytes",
                   &n[0], &n[1], &n[2], &n[3], &n[4], &n[5], &n[6], &n[7], &n[8], &n[9], &n[10],
                   &n[11], &n[12]) == 13) {
            all.push_back({1, n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10],
                           n[11], n[12]});
        }
    }
    return all;
}

ZipCounters sum_of(const std::vector<ZipCounters> &all)
{
    ZipCounters sum;
    for (const ZipCounters &one : all) {
        sum.interfaces += one.interfaces;
        sum.puts += one.puts;
        sum.put_bytes += one.put_bytes;
        sum.wire_bytes += one.wire_bytes;
        sum.segments += one.segments;
        sum.stored_segments += one.stored_segments;
        sum.received_bytes += one.received_bytes;
        sum.received_segments += one.received_segments;
        sum.refused += one.refused;
        sum.gets += one.gets;
        sum.get_bytes += one.get_bytes;
        sum.straight_bytes += one.straight_bytes;
        sum.registrations += one.registrations;
        sum.registered_bytes += one.registered_bytes;
    }
    return sum;
}

// Lines of UCX errors, but for those about a kernel that has no netlink for RDMA devices.
std::string find_errors(const std::string &log)
{
    std::istringstream lines(log);
    std::string found;
    for (std::string line; std::getline(lines, line);) {
        if (line.find("UCX  ERROR") != std::string::npos &&
            line.find("failed to create netlink socket") == std::string::npos &&
            line.find("received error response from netlink") == std::string::npos &&
            line.find("socket create failed: Protocol not supported") == std::string::npos) {
            found += line + "\n";
        }
    }
    return found;
}

uint64_t next_random(uint64_t &state) // splitmix64
{
    uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

float next_normal(uint64_t &state) // close enough: a sum of four uniform values
{
    const uint64_t bits = next_random(state);
    int sum = 0;
    for (unsigned i = 0; i < 4; ++i) {
        sum += static_cast<int16_t>(bits >> (16 * i));
    }
    return static_cast<float>(sum) * (0.02f / 37837.0f) + 1e-7f;
}

// Throws the process away where a test cannot go on.
void require(ucs_status_t status, const char *what)
{
    if (status != UCS_OK) {
        printf("%s: %s\n", what, ucs_status_string(status));
        fflush(stdout);
        _exit(3);
    }
}

void on_endpoint_error(void *arg, ucp_ep_h, ucs_status_t status)
{
    auto *endpoint = static_cast<Endpoint *>(arg);
    endpoint->error = status;
    ++endpoint->errors;
}

} // namespace

// ---- Channel

void Channel::send(const std::string &message)
{
    const uint64_t length = message.size();
    std::string frame(reinterpret_cast<const char *>(&length), sizeof(length));
    frame += message;
    for (size_t sent = 0; sent < frame.size();) {
        const ssize_t n = ::send(fd_, frame.data() + sent, frame.size() - sent, MSG_NOSIGNAL);
        if (n < 0) {
            return; // the receiver finds out
        }
        sent += static_cast<size_t>(n);
    }
}

bool Channel::try_receive(std::string &message)
{
    const auto get = [this](void *to, size_t length) {
        for (size_t done = 0; done < length;) {
            const ssize_t n = recv(fd_, static_cast<char *>(to) + done, length - done, 0);
            if (n <= 0) {
                return false;
            }
            done += static_cast<size_t>(n);
        }
        return true;
    };
    uint64_t length;
    if (!get(&length, sizeof(length))) {
        return false;
    }
    message.resize(length);
    return get(message.data(), length);
}

std::string Channel::receive()
{
    std::string message;
    if (!try_receive(message)) {
        printf("the other process is gone\n");
        fflush(stdout);
        _exit(4);
    }
    return message;
}

bool Channel::readable() const
{
    pollfd p{fd_, POLLIN, 0};
    return poll(&p, 1, 0) > 0;
}

void Channel::sync()
{
    send("sync");
    EXPECT_EQ("sync", receive());
}

// ---- Processes

void Processes::start(unsigned run, unsigned part, const std::vector<int> &channels, int log)
{
    const testing::TestInfo *test = testing::UnitTest::GetInstance()->current_test_info();
    std::vector<std::string> arguments{
            own_path(),
            std::string("--gtest_filter=") + test->test_suite_name() + "." + test->name(),
            "--gtest_color=no", "--gtest_also_run_disabled_tests", "--gtest_output="};
    Env env = envs_.contains(part) ? envs_.at(part) : env_;
    const char *plugin_dir = getenv("ZIP_TEST_PLUGIN_DIR");
    env.try_emplace("UCX_PLUGIN_PATH", plugin_dir != nullptr ? plugin_dir : "");
    env.try_emplace("UCX_ZIP_MEM_TYPES", "host");
    env.try_emplace("UCX_NET_DEVICES", "lo");
    env.try_emplace("UCX_LOG_LEVEL", "info");
    env.try_emplace("UCX_WARN_UNUSED_ENV_VARS", "n");
    // a wheel's and the system's libefa would load libnl twice, which crashes at exit
    env.try_emplace("UCX_MODULES", "^efa");
#ifdef __SANITIZE_THREAD__
    env.try_emplace("UCX_MEM_MMAP_HOOK_MODE", "none"); // both patch the same functions of libc
#elif !defined(__SANITIZE_ADDRESS__)
    // UCX's default, bistro, spins for 0.4 s at the start of each process. It runs where
    // AddressSanitizer does, and in all programs that are not ours.
    env.try_emplace("UCX_MEM_MMAP_HOOK_MODE", "reloc");
#endif
    env.try_emplace("UCX_HANDLE_ERRORS", "none"); // the parent shows what happened
    // what is counted is what went through zip; UCX ignores it where there is no such option
    env.try_emplace("UCX_ZIP_BYPASS", "never");
    env.try_emplace("SWVERBS_FABRIC", fabric_);
    std::vector<std::string> variables;
    for (char **variable = environ; *variable != nullptr; ++variable) {
        const std::string name(*variable, strcspn(*variable, "="));
        const bool is_setting = name.rfind("UCX_", 0) == 0 || name.rfind("GTEST_", 0) == 0 ||
                                name.rfind("SWVERBS_", 0) == 0;
        if (!is_setting && !env.contains(name)) {
            variables.push_back(*variable);
        }
    }
    for (const auto &[name, value] : env) {
        if (!value.empty()) {
            variables.push_back(name + "=" + value);
        }
    }
    variables.push_back(std::string(PART_VARIABLE) + "=" + std::to_string(run) + "." +
                        std::to_string(part));
    std::vector<char *> argv, envp;
    for (std::string &argument : arguments) {
        argv.push_back(argument.data());
    }
    for (std::string &variable : variables) {
        envp.push_back(variable.data());
    }
    argv.push_back(nullptr);
    envp.push_back(nullptr);

    const pid_t parent = getpid();
    const pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) {
            _exit(5);
        }
        dup2(log, STDOUT_FILENO);
        dup2(log, STDERR_FILENO);
        // by way of high numbers, lest a channel's own be one of those that it gets
        std::vector<int> high;
        for (int channel : channels) {
            high.push_back(fcntl(channel, F_DUPFD, 500));
        }
        for (size_t i = 0; i < high.size(); ++i) {
            dup2(high[i], CHANNEL_FD + static_cast<int>(i));
            close(high[i]);
        }
        execve(argv[0], argv.data(), envp.data());
        _exit(5);
    }
    outcomes_[part].pid = pid;
}

bool Processes::is_part()
{
    return getenv(PART_VARIABLE) != nullptr;
}

bool Processes::run(const Part &a, const Part &b)
{
    return run_star([&a](std::vector<Channel> &channels) { a(channels[0]); },
                    b ? std::vector<Part>{b} : std::vector<Part>{});
}

bool Processes::run_star(const Center &center, const std::vector<Part> &others)
{
    const unsigned number = count_run();
    if (const char *mine = getenv(PART_VARIABLE)) {
        unsigned run = 0, part = 0;
        sscanf(mine, "%u.%u", &run, &part);
        if (run != number) {
            return false;
        }
        std::vector<Channel> channels;
        for (size_t i = 0; i < (part == 0 ? std::max<size_t>(others.size(), 1) : 1); ++i) {
            channels.emplace_back(CHANNEL_FD + static_cast<int>(i));
        }
        if (part == 0) {
            center(channels);
        } else {
            others[part - 1](channels[0]);
        }
        fflush(stdout);
        exit(testing::Test::HasFailure() ? 1 : 0); // not _exit: leaks are looked for
    }

    const unsigned count = static_cast<unsigned>(others.size()) + 1;
    outcomes_.assign(count, {});
    fabric_ = new_fabric();
    std::vector<int> of_center, of_others, logs;
    for (unsigned part = 1; part < std::max(count, 2u); ++part) {
        int channel[2] = {-1, -1};
        EXPECT_EQ(0, socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, channel));
        of_center.push_back(channel[0]);
        of_others.push_back(channel[1]);
    }
    for (unsigned part = 0; part < count; ++part) {
        char path[] = "/tmp/zip_test_log.XXXXXX";
        logs.push_back(mkostemp(path, O_CLOEXEC));
        EXPECT_GE(logs.back(), 0);
        unlink(path);
        start(number, part, part == 0 ? of_center : std::vector<int>{of_others[part - 1]},
              logs.back());
    }
    for (const std::vector<int> &side : {of_center, of_others}) {
        for (int channel : side) {
            close(channel);
        }
    }

    const auto deadline = Clock::now() + std::chrono::seconds(timeout_);
    std::vector<std::string> stacks(count);
    std::vector<bool> running(count, true);
    bool timed_out = false;
    while (std::find(running.begin(), running.end(), true) != running.end()) {
        for (unsigned part = 0; part < count; ++part) {
            int status;
            if (running[part] && waitpid(outcomes_[part].pid, &status, WNOHANG) > 0) {
                running[part] = false;
                outcomes_[part].code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
                outcomes_[part].signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
            }
        }
        if (Clock::now() > deadline && !timed_out) {
            timed_out = true;
            for (unsigned part = 0; part < count; ++part) {
                if (running[part]) {
                    stacks[part] = stacks_of(outcomes_[part].pid);
                }
            }
            for (unsigned part = 0; part < count; ++part) {
                if (running[part]) {
                    kill(outcomes_[part].pid, SIGKILL);
                }
            }
        }
        usleep(3000);
    }
    for (unsigned part = 0; part < count; ++part) {
        Outcome &outcome = outcomes_[part];
        outcome.log = read_file(logs[part]);
        outcome.errors = find_errors(outcome.log);
        outcome.interfaces = parse_counters(outcome.log);
        outcome.zip = sum_of(outcome.interfaces);
        close(logs[part]);
        if (outcome.log.find(": runtime error: ") != std::string::npos) { // of UBSan
            outcome.code = -1;
        }
        const bool good = outcome.code == 0 || (may_die_[part] && outcome.signal != 0);
        if (!good || timed_out) {
            const size_t skipped =
                    outcome.log.size() > LOG_SHOWN ? outcome.log.size() - LOG_SHOWN : 0;
            ADD_FAILURE() << "process " << char('A' + part)
                          << (stacks[part].empty() ? "" : " did not end in time and")
                          << " ended with code " << outcome.code << ", signal " << outcome.signal
                          << ":\n"
                          << outcome.log.substr(skipped) << stacks[part];
        }
    }
    remove_fabric(fabric_);
    return true;
}

// ---- data

void fill(void *buffer, size_t length, Data data, uint64_t seed)
{
    // A block repeated: its length divides no segment's, so that no two pieces are alike.
    constexpr size_t BLOCK = 262156;
    if (length == 0) {
        return;
    }
    auto *bytes = static_cast<char *>(buffer);
    const size_t block = std::min(length, BLOCK);
    uint64_t state = seed * 0x2545f4914f6cdd1d + static_cast<uint64_t>(data);
    if (data == Data::ZEROS) {
        memset(bytes, 0, length);
        return;
    }
    for (size_t i = 0; i < block; i += sizeof(uint64_t)) {
        uint64_t word = 0;
        if (data == Data::RANDOM) {
            word = next_random(state);
        } else if (data == Data::FP32) {
            const float values[2] = {next_normal(state), next_normal(state)};
            memcpy(&word, values, sizeof(word));
        } else {
            for (unsigned j = 0; j < 4; ++j) {
                const float value = next_normal(state);
                uint32_t bits;
                memcpy(&bits, &value, sizeof(bits));
                word |= static_cast<uint64_t>(bits >> 16) << (16 * j);
            }
        }
        memcpy(bytes + i, &word, std::min(sizeof(word), block - i));
    }
    for (size_t i = block; i < length; i += BLOCK) {
        memcpy(bytes + i, bytes, std::min(BLOCK, length - i));
    }
}

Buffer::Buffer(size_t length, size_t misalignment)
    : memory_(length + 2 * GUARD + 64), length_(length), offset_(GUARD)
{
    while (reinterpret_cast<uintptr_t>(memory_.data() + offset_) % 64 != misalignment % 64) {
        ++offset_;
    }
    clear();
}

Buffer::Buffer(size_t length, Data content, uint64_t seed, size_t misalignment)
    : Buffer(length, misalignment)
{
    fill(data(), length, content, seed);
}

void Buffer::clear()
{
    memset(memory_.data(), 0xc5, memory_.size());
}

testing::AssertionResult Buffer::holds(Data content, uint64_t seed)
{
    const auto is_guard = [](char c) { return c == static_cast<char>(0xc5); };
    for (size_t i = 0; i < offset_; ++i) {
        if (!is_guard(memory_[i])) {
            return testing::AssertionFailure()
                   << "written " << offset_ - i << " bytes before the buffer";
        }
    }
    for (size_t i = offset_ + length_; i < memory_.size(); ++i) {
        if (!is_guard(memory_[i])) {
            return testing::AssertionFailure()
                   << "written " << i - offset_ - length_ << " bytes after the end of the buffer";
        }
    }
    std::vector<char> expected(length_);
    fill(expected.data(), length_, content, seed);
    if (length_ > 0 && memcmp(expected.data(), data(), length_) != 0) {
        size_t first = 0, wrong = 0;
        for (size_t i = length_; i-- > 0;) {
            if (expected[i] != data()[i]) {
                first = i;
                ++wrong;
            }
        }
        return testing::AssertionFailure()
               << wrong << " of " << length_ << " bytes are wrong, the first at " << first;
    }
    return testing::AssertionSuccess();
}

// ---- Wire

const std::vector<Wire> &all_wires()
{
    static const std::vector<Wire> wires = [] {
        std::vector<Wire> all = {
                {"TcpToEndpoint",
                 {{"UCX_TLS", "zip,tcp"}, {"UCX_ZIP_CONNECT", "ep"}},
                 false,
                 "tcp",
                 "lo"},
                {"TcpToInterface",
                 {{"UCX_TLS", "zip,tcp"}, {"UCX_ZIP_CONNECT", "iface"}},
                 false,
                 "tcp",
                 "lo"},
                {"Posix",
                 {{"UCX_TLS", "zip,posix"}, {"UCX_ZIP_TLS", "posix"}, {"UCX_NET_DEVICES", ""}},
                 true,
                 "posix",
                 "memory"},
                {"Sysv",
                 {{"UCX_TLS", "zip,sysv"}, {"UCX_ZIP_TLS", "sysv"}, {"UCX_NET_DEVICES", ""}},
                 true,
                 "sysv",
                 "memory"},
        };
        const char *verbs = getenv("ZIP_TEST_VERBS");
        if (verbs != nullptr && verbs[0] != 0) {
            all.push_back({"rc",
                           {{"LD_PRELOAD", verbs},
                            {"UCX_TLS", "zip,rc_verbs,ud_verbs"}, // rc wires up over ud
                            {"UCX_NET_DEVICES", "swverbs0:1"}},
                           false,
                           "rc_verbs",
                           "swverbs0:1"});
        }
        return all;
    }();
    return wires;
}

std::vector<Wire> networks()
{
    std::vector<Wire> some = all_wires();
    std::erase_if(some, [](const Wire &wire) { return wire.shared_memory; });
    return some;
}

std::vector<Wire> rc_wires()
{
    std::vector<Wire> some = all_wires();
    std::erase_if(some, [](const Wire &wire) { return strcmp(wire.name, "rc") != 0; });
    return some;
}

const Env PEER_ERRORS = {
        {"UCX_POSIX_ERROR_HANDLING", "y"},   {"UCX_SYSV_ERROR_HANDLING", "y"},
        {"UCX_KEEPALIVE_INTERVAL", "300ms"}, {"UCX_RC_TIMEOUT", "50ms"},
        {"UCX_RC_RETRY_COUNT", "3"},         {"UCX_UD_TIMEOUT", "3s"},
};

void PrintTo(const Wire &wire, std::ostream *stream)
{
    *stream << wire.name;
}

Env operator+(Env base, const Env &more)
{
    base.insert(more.begin(), more.end());
    return base;
}

// ---- Worker

void Idle::round()
{
    // An answer of a peer that runs takes less than this.
    constexpr unsigned ROUNDS_AWAKE = 200;
    constexpr useconds_t NAP = 100;
    if (++rounds_ < ROUNDS_AWAKE) {
        sched_yield();
    } else {
        usleep(NAP);
    }
}

Worker::Worker(uint64_t features, ucs_thread_mode_t threads)
{
    ucp_config_t *config;
    require(ucp_config_read(nullptr, nullptr, &config), "ucp_config_read");
    ucp_params_t params = {};
    params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME;
    params.features = features;
    params.name = "test";
    require(ucp_init(&params, config, &context_), "ucp_init");
    ucp_config_release(config);
    ucp_worker_params_t worker_params = {};
    worker_params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    worker_params.thread_mode = threads;
    require(ucp_worker_create(context_, &worker_params, &worker_), "ucp_worker_create");
    sleeps_ = (features & UCP_FEATURE_WAKEUP) != 0;
}

Worker::~Worker()
{
    ucp_worker_destroy(worker_);
    ucp_cleanup(context_);
}

std::string Worker::address() const
{
    ucp_worker_attr_t attr = {};
    attr.field_mask = UCP_WORKER_ATTR_FIELD_ADDRESS;
    require(ucp_worker_query(worker_, &attr), "ucp_worker_query");
    std::string address(reinterpret_cast<const char *>(attr.address), attr.address_length);
    ucp_worker_release_address(worker_, attr.address);
    return address;
}

Endpoint *Worker::connect(const std::string &address, ucp_err_handling_mode_t mode)
{
    endpoints_.push_back(std::make_unique<Endpoint>());
    Endpoint *endpoint = endpoints_.back().get();
    ucp_ep_params_t params = {};
    params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
    params.address = reinterpret_cast<const ucp_address_t *>(address.data());
    params.err_mode = mode;
    if (mode == UCP_ERR_HANDLING_MODE_PEER) {
        params.field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLER;
        params.err_handler.cb = on_endpoint_error;
        params.err_handler.arg = endpoint;
    }
    require(ucp_ep_create(worker_, &params, &endpoint->ep), "ucp_ep_create");
    return endpoint;
}

ucs_status_t Worker::close(Endpoint *endpoint, bool force)
{
    ucp_request_param_t param = {};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = force ? UCP_EP_CLOSE_FLAG_FORCE : 0;
    const ucs_status_ptr_t request = ucp_ep_close_nbx(endpoint->ep, &param);
    endpoint->ep = nullptr;
    return wait(request);
}

// Arms and sleeps until an event, or until `other_fd` is readable. False if nothing came.
bool Worker::sleep(std::chrono::milliseconds most, int other_fd)
{
    int fd;
    require(ucp_worker_get_efd(worker_, &fd), "ucp_worker_get_efd");
    const ucs_status_t status = ucp_worker_arm(worker_);
    if (status == UCS_ERR_BUSY) {
        return true;
    }
    require(status, "ucp_worker_arm");
    pollfd fds[2] = {{fd, POLLIN, 0}, {other_fd, POLLIN, 0}};
    return poll(fds, other_fd >= 0 ? 2 : 1, static_cast<int>(most.count())) > 0;
}

bool Worker::wait_until(const std::function<bool()> &done, std::chrono::milliseconds patience)
{
    const auto deadline = Clock::now() + patience;
    Idle idle;
    while (!done()) {
        if (progress() > 0) {
            idle.busy();
            continue;
        }
        if (sleeps_) {
            const auto left =
                    std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
            if (!sleep(std::max(left, std::chrono::milliseconds(0)), -1)) {
                return done();
            }
        } else {
            if (Clock::now() > deadline) {
                return done();
            }
            idle.round();
        }
    }
    return true;
}

ucs_status_t Worker::wait(ucs_status_ptr_t request)
{
    if (!UCS_PTR_IS_PTR(request)) {
        return UCS_PTR_STATUS(request);
    }
    if (!wait_until([request] { return ucp_request_check_status(request) != UCS_INPROGRESS; })) {
        ADD_FAILURE() << "a request did not end";
        // what it reads or writes is about to go away
        fflush(stdout);
        raise(SIGABRT);
    }
    const ucs_status_t status = ucp_request_check_status(request);
    ucp_request_free(request);
    return status;
}

std::string Worker::serve(Channel &channel)
{
    const auto deadline = Clock::now() + PATIENCE;
    Idle idle;
    while (!channel.readable()) {
        if (progress() > 0) {
            idle.busy();
        } else if (sleeps_) {
            sleep(PATIENCE, channel.fd());
        } else {
            idle.round();
        }
        if (Clock::now() > deadline) {
            ADD_FAILURE() << "the other process says nothing";
            fflush(stdout);
            raise(SIGABRT);
        }
    }
    return channel.receive();
}

ucs_status_ptr_t Worker::tag_send(Endpoint *endpoint, const void *data, size_t length,
                                  ucp_tag_t tag)
{
    const ucp_request_param_t param = {};
    return ucp_tag_send_nbx(endpoint->ep, data, length, tag, &param);
}

ucs_status_ptr_t Worker::tag_receive(void *data, size_t length, ucp_tag_t tag)
{
    const ucp_request_param_t param = {};
    return ucp_tag_recv_nbx(worker_, data, length, tag, ~ucp_tag_t(0), &param);
}

ucs_status_t Worker::flush()
{
    const ucp_request_param_t param = {};
    return wait(ucp_worker_flush_nbx(worker_, &param));
}

ucs_status_t Worker::flush(Endpoint *endpoint)
{
    const ucp_request_param_t param = {};
    return wait(ucp_ep_flush_nbx(endpoint->ep, &param));
}

// ---- Window

Window::Window(Worker &worker, void *address, size_t length, ucs_memory_type_t type)
    : context_(worker.context())
{
    ucp_mem_map_params_t params = {};
    params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                        UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
    params.memory_type = type;
    params.address = address;
    params.length = length;
    require(ucp_mem_map(context_, &params, &memh_), "ucp_mem_map");
}

Window::~Window()
{
    ucp_mem_unmap(context_, memh_);
}

std::string Window::key() const
{
    void *buffer;
    size_t length;
    require(ucp_rkey_pack(context_, memh_, &buffer, &length), "ucp_rkey_pack");
    std::string key(static_cast<const char *>(buffer), length);
    ucp_rkey_buffer_release(buffer);
    return key;
}

} // namespace zip::test

int main(int argc, char **argv)
{
    testing::InitGoogleTest(&argc, argv);
    const int result = RUN_ALL_TESTS();
    return zip::test::Processes::is_part() ? 6 : result; // a part that was not found
}
