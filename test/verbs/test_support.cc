// SPDX-License-Identifier: BSD-3-Clause
// Support of the device's own tests.
#include "test_support.h"

#include <fcntl.h>
#include <poll.h>

#include <algorithm>

namespace test {

Board *board;
int ranks, rank;

static std::string fabric;

std::string fabric_name()
{
    return fabric;
}

void barrier()
{
    const uint32_t round = board->round.load();
    if (board->arrived.fetch_add(1) + 1 == static_cast<uint32_t>(ranks)) {
        board->arrived = 0;
        board->round = round + 1;
        return;
    }
    while (board->round.load() == round) {
        usleep(100);
    }
}

static void prepare(const Environment &environment)
{
    for (char **variable = environ; *variable != nullptr;) {
        if (strncmp(*variable, "SWVERBS_", 8) == 0) {
            const std::string name(*variable, strchr(*variable, '='));
            unsetenv(name.c_str());
            variable = environ;
        } else {
            variable++;
        }
    }
    setenv("SWVERBS_FABRIC", fabric.c_str(), 1);
    for (const auto &[name, value] : environment) {
        setenv(name.c_str(), value.c_str(), 1);
    }
}

static void new_board()
{
    static int number = 0;
    if (board != nullptr) {
        munmap(board, sizeof(Board));
    }
    board = static_cast<Board *>(mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE,
                                      MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    fabric = "swverbs-test-" + std::to_string(getpid()) + "-" + std::to_string(number++);
}

// Of this test, in this process; a child inherits those of its parent.
static int failures()
{
    const testing::TestResult &result =
            *testing::UnitTest::GetInstance()->current_test_info()->result();
    int count = 0;
    for (int i = 0; i < result.total_part_count(); i++) {
        count += result.GetTestPartResult(i).failed() ? 1 : 0;
    }
    return count;
}

static pid_t start(int r, const Environment &environment, const std::function<void(int)> &body)
{
    fflush(nullptr);
    const pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        rank = r;
        prepare(environment);
        const int before = failures();
        body(r);
        fflush(nullptr);
        exit(failures() > before ? 1 : 0);
    }
    board->pid[r] = pid;
    return pid;
}

void run(int n, const Environment &environment, const std::function<void(int)> &body,
         const std::vector<int> &expect_killed, int seconds, bool leaves_fabric)
{
    new_board();
    ranks = n;
    std::vector<pid_t> pids;
    for (int r = 0; r < n; r++) {
        pids.push_back(start(r, environment, body));
    }
    const uint64_t end = now_ns() + static_cast<uint64_t>(seconds) * 1000000000;
    for (int r = 0; r < n; r++) {
        int status = 0;
        while (waitpid(pids[r], &status, WNOHANG) == 0) {
            if (now_ns() > end) {
                ADD_FAILURE() << "rank " << r << " hangs";
                kill(pids[r], SIGKILL);
                waitpid(pids[r], &status, 0);
                break;
            }
            usleep(1000);
        }
        const bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
        if (std::find(expect_killed.begin(), expect_killed.end(), r) != expect_killed.end()) {
            EXPECT_TRUE(killed) << "rank " << r << " ended with status " << status;
        } else {
            EXPECT_EQ(status, 0) << "rank " << r;
        }
    }
    // the last one removes the fabric; one that was killed, or has become another, cannot
    const std::string path = "/dev/shm/" + fabric + ".fabric";
    if (expect_killed.empty() && !leaves_fabric) {
        EXPECT_NE(access(path.c_str(), F_OK), 0) << path << " is still there";
    }
    unlink(path.c_str());
}

Outcome run_one(const Environment &environment, const std::function<void()> &body)
{
    new_board();
    ranks = 1;
    int pipe_ends[2];
    if (pipe(pipe_ends) != 0) {
        abort();
    }
    const pid_t pid = start(0, environment, [&](int) {
        dup2(pipe_ends[1], 2);
        close(pipe_ends[0]);
        close(pipe_ends[1]);
        body();
    });
    close(pipe_ends[1]);
    Outcome outcome = {};
    char text[4096];
    for (ssize_t length; (length = read(pipe_ends[0], text, sizeof(text))) > 0;) {
        outcome.errors.append(text, static_cast<size_t>(length));
    }
    close(pipe_ends[0]);
    waitpid(pid, &outcome.status, 0);
    return outcome;
}

End::End(const Options &wanted) : options(wanted)
{
    ibv_device **list = ibv_get_device_list(nullptr);
    context = ibv_open_device(list[options.device]);
    ibv_free_device_list(list);
    pd = ibv_alloc_pd(context);
    buffer = static_cast<uint8_t *>(mmap(nullptr, options.size, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mr = ibv_reg_mr(pd, buffer, options.size, options.mr_access);
    if (options.channel) {
        channel = ibv_create_comp_channel(context);
    }
    cq = ibv_create_cq(context, static_cast<int>(options.cqe), nullptr, channel, 0);
    if (options.srq) {
        ibv_srq_init_attr init = {};
        init.attr.max_wr = options.recv_wr;
        init.attr.max_sge = 4;
        srq = ibv_create_srq(pd, &init);
    }
    for (int i = 0; i < options.qps; i++) {
        ibv_qp_init_attr init = {};
        init.send_cq = init.recv_cq = cq;
        init.srq = srq;
        init.qp_type = options.type;
        init.sq_sig_all = options.signal_all ? 1 : 0;
        init.cap = {options.send_wr, options.recv_wr, 4, 4, 64};
        qp.push_back(ibv_create_qp(pd, &init));
        EXPECT_NE(qp.back(), nullptr);
    }
    ibv_port_attr port;
    EXPECT_EQ(ibv_query_port(context, 1, &port), 0);
    mine = {};
    for (int i = 0; i < std::min(options.qps, kMaxQps); i++) {
        mine.qpn[i] = qp[static_cast<size_t>(i)]->qp_num;
    }
    mine.lid = port.lid;
    mine.rkey = mr->rkey;
    mine.address = reinterpret_cast<uintptr_t>(buffer);
}

End::~End()
{
    for (ibv_qp *q : qp) {
        EXPECT_EQ(ibv_destroy_qp(q), 0);
    }
    if (srq != nullptr) {
        EXPECT_EQ(ibv_destroy_srq(srq), 0);
    }
    EXPECT_EQ(ibv_destroy_cq(cq), 0);
    if (channel != nullptr) {
        EXPECT_EQ(ibv_destroy_comp_channel(channel), 0);
    }
    if (mr != nullptr) {
        EXPECT_EQ(ibv_dereg_mr(mr), 0);
    }
    EXPECT_EQ(ibv_dealloc_pd(pd), 0);
    EXPECT_EQ(ibv_close_device(context), 0);
    munmap(buffer, options.size);
}

void End::connect(int other)
{
    board->address[rank] = mine;
    barrier();
    peer = board->address[other];
    for (int i = 0; i < options.qps; i++) {
        connect_qp(i, peer, i);
    }
    barrier();
}

void End::connect_qp(int i, const Address &to, int their_qp)
{
    ibv_qp *q = qp[static_cast<size_t>(i)];
    ibv_qp_attr a = {};
    const bool ud = options.type == IBV_QPT_UD;
    a.qp_state = IBV_QPS_INIT;
    a.port_num = 1;
    a.qp_access_flags = options.qp_access;
    a.qkey = 0x1234;
    ASSERT_EQ(ibv_modify_qp(q, &a,
                            IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
                                    (ud ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS)),
              0);
    a.qp_state = IBV_QPS_RTR;
    a.path_mtu = IBV_MTU_4096;
    a.dest_qp_num = to.qpn[their_qp];
    a.ah_attr.dlid = static_cast<uint16_t>(to.lid);
    a.ah_attr.port_num = 1;
    a.max_dest_rd_atomic = options.reads;
    a.min_rnr_timer = options.min_rnr_timer;
    ASSERT_EQ(ibv_modify_qp(q, &a,
                            ud ? IBV_QP_STATE
                               : IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                                            IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
                                            IBV_QP_MIN_RNR_TIMER),
              0);
    a.qp_state = IBV_QPS_RTS;
    a.timeout = options.timeout;
    a.retry_cnt = options.retry;
    a.rnr_retry = options.rnr_retry;
    a.max_rd_atomic = options.reads;
    ASSERT_EQ(ibv_modify_qp(q, &a,
                            ud ? IBV_QP_STATE | IBV_QP_SQ_PSN
                               : IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
                                            IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                                            IBV_QP_MAX_QP_RD_ATOMIC),
              0);
}

ibv_send_wr End::write_request(ibv_sge &sge, size_t offset, size_t length, uint64_t remote_offset)
{
    sge = {reinterpret_cast<uintptr_t>(buffer) + offset, static_cast<uint32_t>(length), mr->lkey};
    ibv_send_wr wr = {};
    wr.wr_id = 1;
    wr.sg_list = &sge;
    wr.num_sge = 1;
    wr.opcode = IBV_WR_RDMA_WRITE;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.wr.rdma.remote_addr = peer.address + remote_offset;
    wr.wr.rdma.rkey = peer.rkey;
    return wr;
}

int End::post(ibv_send_wr &wr, int i)
{
    ibv_send_wr *bad;
    return ibv_post_send(qp[static_cast<size_t>(i)], &wr, &bad);
}

int End::post(ibv_wr_opcode opcode, size_t offset, size_t length, uint64_t remote_offset,
              unsigned flags, int i, uint64_t wr_id)
{
    ibv_sge sge;
    ibv_send_wr wr = write_request(sge, offset, length, remote_offset);
    wr.wr_id = wr_id;
    wr.num_sge = length == 0 ? 0 : 1;
    wr.opcode = opcode;
    wr.send_flags = flags;
    wr.imm_data = htobe32(static_cast<uint32_t>(wr_id));
    return post(wr, i);
}

int End::receive(size_t offset, size_t length, uint64_t wr_id, int i)
{
    ibv_sge sge = {reinterpret_cast<uintptr_t>(buffer) + offset, static_cast<uint32_t>(length),
                   mr->lkey};
    ibv_recv_wr wr = {}, *bad;
    wr.wr_id = wr_id;
    wr.sg_list = &sge;
    wr.num_sge = length == 0 ? 0 : 1;
    return srq != nullptr ? ibv_post_srq_recv(srq, &wr, &bad)
                          : ibv_post_recv(qp[static_cast<size_t>(i)], &wr, &bad);
}

ibv_wc End::wait(double seconds)
{
    ibv_wc wc = {};
    const uint64_t end = now_ns() + static_cast<uint64_t>(seconds * 1e9);
    for (unsigned i = 1; now_ns() < end; i++) {
        if (ibv_poll_cq(cq, 1, &wc) == 1) {
            return wc;
        }
        if (i % 64 == 0) {
            sched_yield(); // there may be more processes than processors
        }
    }
    wc.status = kNothing;
    return wc;
}

bool End::quiet(double seconds)
{
    return wait(seconds).status == kNothing;
}

ibv_qp_state End::state(int i)
{
    ibv_qp_attr attr = {};
    ibv_qp_init_attr init;
    EXPECT_EQ(ibv_query_qp(qp[static_cast<size_t>(i)], &attr, IBV_QP_STATE, &init), 0);
    return attr.qp_state;
}

int End::event(double seconds)
{
    pollfd wait = {context->async_fd, POLLIN, 0};
    if (poll(&wait, 1, static_cast<int>(seconds * 1e3)) != 1) {
        return -1;
    }
    ibv_async_event event;
    if (ibv_get_async_event(context, &event) != 0) {
        return -1;
    }
    ibv_ack_async_event(&event);
    return event.event_type;
}

static uint8_t pattern(size_t i, unsigned seed)
{
    return static_cast<uint8_t>((i * 131 + seed * 29) >> 3);
}

void End::fill(size_t offset, size_t length, unsigned seed)
{
    for (size_t i = 0; i < length; i++) {
        buffer[offset + i] = pattern(i, seed);
    }
}

size_t End::wrong(size_t offset, size_t length, unsigned seed)
{
    size_t count = 0;
    for (size_t i = 0; i < length; i++) {
        count += buffer[offset + i] != pattern(i, seed) ? 1 : 0;
    }
    return count;
}

} // namespace test
