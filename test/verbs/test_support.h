// SPDX-License-Identifier: BSD-3-Clause
// Support of the device's own tests: processes of one fabric that run a function each, and a
// connected endpoint.
#pragma once

#include <infiniband/verbs.h>

#include <gtest/gtest.h>

#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace test {

constexpr int kMaxRanks = 64;
constexpr int kMaxQps = 8; // of an endpoint that are published

inline uint64_t now_ns()
{
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<uint64_t>(t.tv_sec) * 1000000000 + static_cast<uint64_t>(t.tv_nsec);
}

constexpr auto kNothing = static_cast<ibv_wc_status>(31); // none of the real ones

struct Address {
    uint32_t qpn[kMaxQps], lid, rkey;
    uint64_t address;
};

// Memory of all processes of a test.
struct Board {
    std::atomic<uint32_t> arrived, round;
    std::atomic<uint64_t> value[16];
    std::atomic<int> pid[kMaxRanks];
    Address address[kMaxRanks];
};

extern Board *board;
extern int ranks, rank;

// All processes of the test come here.
void barrier();

using Environment = std::map<std::string, std::string>;

struct Outcome {
    int status;         // of waitpid()
    std::string errors; // what it wrote to stderr
};

// Runs `body(rank)` in `n` processes of a fabric of their own; fails the test for each that fails
// or does not end in `seconds`. `expect_killed` are ranks that end by SIGKILL. `leaves_fabric`:
// a process ends without leaving in order.
void run(int n, const Environment &environment, const std::function<void(int)> &body,
         const std::vector<int> &expect_killed = {}, int seconds = 25, bool leaves_fabric = false);
// One process, whatever its end.
Outcome run_one(const Environment &environment, const std::function<void()> &body);
std::string fabric_name(); // of the last run()

struct Options {
    int device = 0;
    int qps = 1;
    unsigned qp_access =
            IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
    unsigned mr_access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE |
                         IBV_ACCESS_REMOTE_ATOMIC;
    uint8_t timeout = 14, retry = 7, rnr_retry = 7, min_rnr_timer = 12, reads = 4;
    bool srq = false, channel = false, signal_all = false;
    uint32_t send_wr = 128, recv_wr = 128, cqe = 1024;
    ibv_qp_type type = IBV_QPT_RC;
    size_t size = 8 << 20;
};

// A context with one region and RC or UD QPs.
class End {
public:
    explicit End(const Options &options = {});
    ~End();
    End(const End &) = delete;
    End &operator=(const End &) = delete;

    // Publishes this end, waits for all, and connects QP i to QP i of `peer`.
    void connect(int peer);
    void connect_qp(int i, const Address &to, int their_qp);

    int post(ibv_wr_opcode opcode, size_t offset, size_t length, uint64_t remote_offset = 0,
             unsigned flags = IBV_SEND_SIGNALED, int qp = 0, uint64_t wr_id = 1);
    int post(ibv_send_wr &wr, int qp = 0);
    int receive(size_t offset, size_t length, uint64_t wr_id = 1, int qp = 0);
    ibv_send_wr write_request(ibv_sge &sge, size_t offset, size_t length, uint64_t remote_offset);
    // The next completion; status kNothing if none comes in time.
    ibv_wc wait(double seconds = 10);
    bool quiet(double seconds); // no completion comes
    ibv_qp_state state(int i = 0);
    // The next async event; -1 if none comes in time. Acknowledged.
    int event(double seconds = 5);
    void fill(size_t offset, size_t length, unsigned seed);
    size_t wrong(size_t offset, size_t length, unsigned seed); // bytes

    Options options;
    ibv_context *context;
    ibv_pd *pd;
    uint8_t *buffer;
    ibv_mr *mr;
    ibv_comp_channel *channel = nullptr;
    ibv_cq *cq;
    ibv_srq *srq = nullptr;
    std::vector<ibv_qp *> qp;
    Address mine, peer;
};

} // namespace test
