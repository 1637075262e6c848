// SPDX-License-Identifier: BSD-3-Clause
// Tests of the software verbs device: what each operation does, what is refused, and when things
// happen. Upper bounds of time are loose (the machine may be busy); lower bounds are exact.
#include "test_support.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <set>

// not in the header, but programs of rdma-core's own use it
extern "C" int ibv_read_sysfs_file(const char *directory, const char *file, char *buffer,
                                   size_t size);

namespace {

using namespace test;

constexpr size_t kHalf = 4 << 20;
const double kSlack = 0.999; // of a duration: settings are rounded down to nanoseconds

double seconds_since(uint64_t start)
{
    return static_cast<double>(now_ns() - start) * 1e-9;
}

// Data of every operation.

class Sizes : public testing::TestWithParam<size_t> {};

TEST_P(Sizes, EveryOperationMovesItsBytes)
{
    const size_t n = GetParam();
    run(2, {}, [n](int r) {
        End e;
        e.fill(0, n, r == 0 ? 1 : 2);
        memset(e.buffer + kHalf, 0xee, n + 64);
        e.connect(1 - r);
        if (r == 0) {
            ASSERT_EQ(e.post(IBV_WR_RDMA_WRITE, 0, n, kHalf + 3), 0);
            ibv_wc wc = e.wait();
            EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
            EXPECT_EQ(wc.opcode, IBV_WC_RDMA_WRITE);
        }
        barrier();
        if (r == 1) {
            EXPECT_EQ(e.wrong(kHalf + 3, n, 1), 0u);
            EXPECT_EQ(e.buffer[kHalf + 2], 0xee);
            EXPECT_EQ(e.buffer[kHalf + 3 + n], 0xee);
            ASSERT_EQ(e.receive(kHalf, n, 7), 0);
            ASSERT_EQ(e.receive(kHalf, 0, 8), 0);
        }
        barrier();
        if (r == 0) {
            ASSERT_EQ(e.post(IBV_WR_RDMA_READ, kHalf + 1, n, 0), 0);
            ibv_wc wc = e.wait();
            EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
            EXPECT_EQ(wc.opcode, IBV_WC_RDMA_READ);
            EXPECT_EQ(e.wrong(kHalf + 1, n, 2), 0u);
            ASSERT_EQ(e.post(IBV_WR_SEND_WITH_IMM, 0, n, 0, IBV_SEND_SIGNALED, 0, 77), 0);
            EXPECT_EQ(e.wait().status, IBV_WC_SUCCESS);
            ASSERT_EQ(e.post(IBV_WR_RDMA_WRITE_WITH_IMM, 0, n, kHalf + 9, IBV_SEND_SIGNALED, 0, 78),
                      0);
            EXPECT_EQ(e.wait().status, IBV_WC_SUCCESS);
        } else {
            ibv_wc wc = e.wait();
            EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
            EXPECT_EQ(wc.opcode, IBV_WC_RECV);
            EXPECT_EQ(wc.wr_id, 7u);
            EXPECT_EQ(wc.byte_len, n);
            EXPECT_EQ(wc.wc_flags & IBV_WC_WITH_IMM, unsigned(IBV_WC_WITH_IMM));
            EXPECT_EQ(be32toh(wc.imm_data), 77u);
            EXPECT_EQ(wc.qp_num, e.qp[0]->qp_num);
            EXPECT_EQ(wc.src_qp, e.peer.qpn[0]);
            wc = e.wait();
            EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
            EXPECT_EQ(wc.opcode, IBV_WC_RECV_RDMA_WITH_IMM);
            EXPECT_EQ(wc.byte_len, n);
            EXPECT_EQ(be32toh(wc.imm_data), 78u);
            EXPECT_EQ(e.wrong(kHalf + 9, n, 1), 0u);
        }
        barrier();
    });
}

INSTANTIATE_TEST_SUITE_P(Device, Sizes,
                         testing::Values(0, 1, 7, 4096, 65536, 65537, (3 << 20) + 5));

TEST(Device, AtomicsOfSeveralProcessesAddUp)
{
    constexpr int kRanks = 4, kQps = 2, kCount = 200;
    run(kRanks, {}, [](int r) {
        Options o;
        o.qps = r == 0 ? (kRanks - 1) * kQps : kQps;
        End e(o);
        board->address[r] = e.mine;
        barrier();
        if (r == 0) {
            for (int i = 0; i < o.qps; i++) {
                e.connect_qp(i, board->address[1 + i / kQps], i % kQps);
            }
            barrier();
            barrier();
            uint64_t sum;
            memcpy(&sum, e.buffer, sizeof(sum));
            EXPECT_EQ(sum, uint64_t{(kRanks - 1) * kQps * kCount});
            memcpy(&sum, e.buffer + 8, sizeof(sum));
            EXPECT_EQ(sum, 5u); // only one compare-and-swap found it zero
            EXPECT_EQ(board->value[0].load(), 1u);
        } else {
            e.peer = board->address[0];
            for (int i = 0; i < kQps; i++) {
                e.connect_qp(i, e.peer, (r - 1) * kQps + i);
            }
            barrier();
            std::set<uint64_t> seen;
            for (int n = 0; n < kCount; n++) {
                for (int i = 0; i < kQps; i++) {
                    ibv_sge sge;
                    ibv_send_wr wr = e.write_request(sge, 8 * static_cast<size_t>(i), 8, 0);
                    wr.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
                    wr.wr.atomic = {e.peer.address, 1, 0, e.peer.rkey};
                    ASSERT_EQ(e.post(wr, i), 0);
                }
                for (int i = 0; i < kQps; i++) {
                    ibv_wc wc = e.wait();
                    ASSERT_EQ(wc.status, IBV_WC_SUCCESS);
                    EXPECT_EQ(wc.opcode, IBV_WC_FETCH_ADD);
                }
                for (int i = 0; i < kQps; i++) {
                    uint64_t old;
                    memcpy(&old, e.buffer + 8 * i, sizeof(old));
                    EXPECT_TRUE(seen.insert(old).second) << "the value " << old << " came twice";
                }
            }
            ibv_sge sge;
            ibv_send_wr wr = e.write_request(sge, 0, 8, 0);
            wr.opcode = IBV_WR_ATOMIC_CMP_AND_SWP;
            wr.wr.atomic = {e.peer.address + 8, 0, 5, e.peer.rkey};
            ASSERT_EQ(e.post(wr), 0);
            ibv_wc wc = e.wait();
            ASSERT_EQ(wc.status, IBV_WC_SUCCESS);
            EXPECT_EQ(wc.opcode, IBV_WC_COMP_SWAP);
            uint64_t old;
            memcpy(&old, e.buffer, sizeof(old));
            if (old == 0) {
                board->value[0]++;
            }
            barrier();
        }
        barrier();
    });
}

TEST(Device, InlineDataMayBeReusedAtOnce)
{
    run(2, {{"SWVERBS_LATENCY_US", "2000"}}, [](int r) {
        End e;
        e.connect(1 - r);
        if (r == 0) {
            e.fill(0, 64, 3);
            ASSERT_EQ(e.post(IBV_WR_RDMA_WRITE, 0, 64, kHalf, IBV_SEND_SIGNALED | IBV_SEND_INLINE),
                      0);
            memset(e.buffer, 0, 64);
            EXPECT_EQ(e.wait().status, IBV_WC_SUCCESS);
            EXPECT_EQ(
                    e.post(IBV_WR_RDMA_WRITE, 0, 65536, kHalf, IBV_SEND_SIGNALED | IBV_SEND_INLINE),
                    EINVAL);
            EXPECT_EQ(e.post(IBV_WR_RDMA_READ, 0, 8, kHalf, IBV_SEND_SIGNALED | IBV_SEND_INLINE),
                      EINVAL);
        }
        barrier();
        if (r == 1) {
            EXPECT_EQ(e.wrong(kHalf, 64, 3), 0u);
        }
    });
}

TEST(Device, ListsAreGatheredAndScattered)
{
    run(2, {}, [](int r) {
        End e;
        e.fill(0, 300000, r == 0 ? 5 : 6);
        e.connect(1 - r);
        const uint32_t cut[4] = {1, 70000, 0, 130000};
        ibv_sge list[4];
        uint64_t from = 0;
        const auto base = reinterpret_cast<uintptr_t>(e.buffer);
        for (int i = 0; i < 4; i++) {
            list[i] = {base + kHalf + 2 * from, cut[i], e.mr->lkey};
            from += cut[i];
        }
        const uint32_t total = 200001;
        if (r == 1) { // scatter
            ibv_recv_wr wr = {}, *bad;
            wr.sg_list = list;
            wr.num_sge = 4;
            ASSERT_EQ(ibv_post_recv(e.qp[0], &wr, &bad), 0);
            wr.num_sge = 5;
            EXPECT_EQ(ibv_post_recv(e.qp[0], &wr, &bad), EINVAL);
            EXPECT_EQ(bad, &wr);
        }
        barrier();
        const auto scattered = [&](unsigned seed) {
            size_t wrong = 0, at = 0;
            for (int i = 0; i < 4; i++) {
                for (uint32_t k = 0; k < cut[i]; k++, at++) {
                    wrong += e.buffer[kHalf + 2 * (at - k) + k] !=
                             static_cast<uint8_t>((at * 131 + seed * 29) >> 3);
                }
            }
            return wrong;
        };
        if (r == 0) {
            ASSERT_EQ(e.post(IBV_WR_SEND, 0, total), 0);
            EXPECT_EQ(e.wait().status, IBV_WC_SUCCESS);
            ibv_sge unused;
            ibv_send_wr wr = e.write_request(unused, 0, 1, 0);
            wr.sg_list = list;
            wr.num_sge = 4;
            wr.opcode = IBV_WR_RDMA_READ;
            ASSERT_EQ(e.post(wr), 0);
            EXPECT_EQ(e.wait().status, IBV_WC_SUCCESS);
            EXPECT_EQ(scattered(6), 0u);
            wr.opcode = IBV_WR_RDMA_WRITE; // what was scattered is gathered again
            wr.wr.rdma.remote_addr = e.peer.address + 1000000;
            ASSERT_EQ(e.post(wr), 0);
            EXPECT_EQ(e.wait().status, IBV_WC_SUCCESS);
            wr.num_sge = 5;
            EXPECT_EQ(e.post(wr), EINVAL);
        } else {
            EXPECT_EQ(e.wait().status, IBV_WC_SUCCESS);
            EXPECT_EQ(scattered(5), 0u);
        }
        barrier();
        if (r == 1) {
            EXPECT_EQ(e.wrong(1000000, total, 6), 0u);
        }
    });
}

TEST(Device, QpsOfOneProcessReachEachOther)
{
    run(1, {{"SWVERBS_LATENCY_US", "20"}}, [](int) {
        Options o;
        o.qps = 2;
        End e(o);
        e.peer = e.mine;
        e.connect_qp(0, e.mine, 1);
        e.connect_qp(1, e.mine, 0);
        e.fill(0, 100000, 8);
        ASSERT_EQ(e.receive(2000000, 100000, 5, 1), 0);
        ASSERT_EQ(e.post(IBV_WR_RDMA_WRITE, 0, 100000, 1000000), 0);
        EXPECT_EQ(e.wait().status, IBV_WC_SUCCESS);
        EXPECT_EQ(e.wrong(1000000, 100000, 8), 0u);
        ASSERT_EQ(e.post(IBV_WR_SEND, 0, 100000), 0);
        const ibv_wc a = e.wait(), b = e.wait();
        EXPECT_EQ(a.status, IBV_WC_SUCCESS);
        EXPECT_EQ(b.status, IBV_WC_SUCCESS);
        EXPECT_EQ(a.opcode | b.opcode, IBV_WC_RECV | IBV_WC_SEND);
        EXPECT_EQ(e.wrong(2000000, 100000, 8), 0u);
        // what is not mapped any more is an error, not a signal
        munmap(e.buffer + 4096, 4096);
        ASSERT_EQ(e.post(IBV_WR_RDMA_READ, 0, 8192, 4096, IBV_SEND_SIGNALED, 1), 0);
        EXPECT_NE(e.wait().status, IBV_WC_SUCCESS);
    });
}

// Refusals.

struct Spoiled {
    const char *name;
    std::function<void(Options &)> options;            // of the target
    std::function<void(End &, ibv_send_wr &)> request; // of the initiator
    ibv_wc_status status;
    int event; // at the target; -1: none, and its QP stays as it is
};

class Refusal : public testing::TestWithParam<Spoiled> {};

TEST_P(Refusal, EndsTheQp)
{
    const Spoiled &spoiled = GetParam();
    run(2, {{"SWVERBS_LATENCY_US", "10"}}, [&spoiled](int r) {
        Options o;
        if (r == 1) {
            spoiled.options(o);
        }
        End e(o);
        memset(e.buffer, 0x11 * (r + 1), e.options.size);
        e.connect(1 - r);
        if (r == 1 && spoiled.status == IBV_WC_REM_INV_REQ_ERR) {
            ASSERT_EQ(e.receive(0, 100, 9), 0);
        }
        barrier();
        if (r == 0) {
            ibv_sge sge;
            ibv_send_wr wr = e.write_request(sge, 0, 4096, 0);
            spoiled.request(e, wr);
            wr.wr_id = 41;
            wr.send_flags = 0; // an error is always reported
            ASSERT_EQ(e.post(wr), 0);
            ASSERT_EQ(e.post(IBV_WR_RDMA_WRITE, 0, 64, kHalf, 0, 0, 42), 0);
            ibv_wc wc = e.wait();
            EXPECT_EQ(wc.status, spoiled.status) << ibv_wc_status_str(wc.status);
            EXPECT_EQ(wc.wr_id, 41u);
            wc = e.wait();
            EXPECT_EQ(wc.status, IBV_WC_WR_FLUSH_ERR);
            EXPECT_EQ(wc.wr_id, 42u);
            EXPECT_EQ(e.state(), IBV_QPS_ERR);
            ASSERT_EQ(e.post(IBV_WR_RDMA_WRITE, 0, 64, kHalf, 0, 0, 43), 0);
            wc = e.wait();
            EXPECT_EQ(wc.status, IBV_WC_WR_FLUSH_ERR);
            EXPECT_EQ(wc.wr_id, 43u);
        }
        barrier();
        if (r == 1) {
            EXPECT_EQ(e.event(spoiled.event < 0 ? 0.02 : 5), spoiled.event);
            EXPECT_EQ(e.state(), spoiled.event < 0 ? IBV_QPS_RTS : IBV_QPS_ERR);
            if (spoiled.status == IBV_WC_REM_INV_REQ_ERR) {
                EXPECT_NE(e.wait(1).status, IBV_WC_SUCCESS); // the receive
            }
            EXPECT_EQ(std::count(e.buffer, e.buffer + e.options.size, 0x22),
                      static_cast<ptrdiff_t>(e.options.size));
        }
    });
}

void keep(Options &) {}

INSTANTIATE_TEST_SUITE_P(
        Device, Refusal,
        testing::Values(
                Spoiled{"rkey", keep, [](End &, ibv_send_wr &w) { w.wr.rdma.rkey ^= 0x4000; },
                        IBV_WC_REM_ACCESS_ERR, IBV_EVENT_QP_ACCESS_ERR},
                Spoiled{"small rkey", keep, [](End &, ibv_send_wr &w) { w.wr.rdma.rkey = 0xff; },
                        IBV_WC_REM_ACCESS_ERR, IBV_EVENT_QP_ACCESS_ERR},
                Spoiled{"before the region", keep,
                        [](End &, ibv_send_wr &w) { w.wr.rdma.remote_addr--; },
                        IBV_WC_REM_ACCESS_ERR, IBV_EVENT_QP_ACCESS_ERR},
                Spoiled{"behind the region", keep,
                        [](End &e, ibv_send_wr &w) {
                            w.wr.rdma.remote_addr += e.options.size - 4095;
                        },
                        IBV_WC_REM_ACCESS_ERR, IBV_EVENT_QP_ACCESS_ERR},
                Spoiled{"long message over the end", keep,
                        [](End &e, ibv_send_wr &w) {
                            w.sg_list->length = 1 << 20;
                            w.wr.rdma.remote_addr += e.options.size - (1 << 20) + 1;
                        },
                        IBV_WC_REM_ACCESS_ERR, IBV_EVENT_QP_ACCESS_ERR},
                Spoiled{"around the end of memory", keep,
                        [](End &, ibv_send_wr &w) { w.wr.rdma.remote_addr = ~0ull - 100; },
                        IBV_WC_REM_ACCESS_ERR, IBV_EVENT_QP_ACCESS_ERR},
                Spoiled{"region without write",
                        [](Options &o) { o.mr_access = 7 & ~2u; }, // local, read
                        [](End &, ibv_send_wr &) {}, IBV_WC_REM_ACCESS_ERR,
                        IBV_EVENT_QP_ACCESS_ERR},
                Spoiled{"region without read", [](Options &o) { o.mr_access = 3; },
                        [](End &, ibv_send_wr &w) { w.opcode = IBV_WR_RDMA_READ; },
                        IBV_WC_REM_ACCESS_ERR, IBV_EVENT_QP_ACCESS_ERR},
                Spoiled{"region without atomic", [](Options &o) { o.mr_access = 7; },
                        [](End &e, ibv_send_wr &w) {
                            w.sg_list->length = 8;
                            w.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
                            w.wr.atomic = {e.peer.address, 1, 0, e.peer.rkey};
                        },
                        IBV_WC_REM_ACCESS_ERR, IBV_EVENT_QP_ACCESS_ERR},
                Spoiled{"QP without write",
                        [](Options &o) { o.qp_access = IBV_ACCESS_REMOTE_READ; },
                        [](End &, ibv_send_wr &) {}, IBV_WC_REM_ACCESS_ERR,
                        IBV_EVENT_QP_ACCESS_ERR},
                Spoiled{"unaligned atomic", keep,
                        [](End &e, ibv_send_wr &w) {
                            w.sg_list->length = 8;
                            w.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
                            w.wr.atomic = {e.peer.address + 4, 1, 0, e.peer.rkey};
                        },
                        IBV_WC_REM_INV_REQ_ERR, IBV_EVENT_QP_REQ_ERR},
                Spoiled{"message longer than the receive", keep,
                        [](End &, ibv_send_wr &w) { w.opcode = IBV_WR_SEND; },
                        IBV_WC_REM_INV_REQ_ERR, IBV_EVENT_QP_REQ_ERR},
                Spoiled{"lkey", keep, [](End &, ibv_send_wr &w) { w.sg_list->lkey ^= 0x4000; },
                        IBV_WC_LOC_PROT_ERR, -1},
                Spoiled{"local range", keep,
                        [](End &e, ibv_send_wr &w) { w.sg_list->addr += e.options.size; },
                        IBV_WC_LOC_PROT_ERR, -1},
                Spoiled{"another PD's lkey", keep,
                        [](End &e, ibv_send_wr &w) {
                            static ibv_pd *pd = ibv_alloc_pd(e.context);
                            static ibv_mr *mr = ibv_reg_mr(pd, e.buffer, 8192, 1);
                            w.sg_list->lkey = mr->lkey;
                        },
                        IBV_WC_LOC_PROT_ERR, -1},
                Spoiled{"length", keep,
                        [](End &e, ibv_send_wr &w) {
                            static ibv_sge list[2];
                            list[0] = list[1] = {w.sg_list->addr, 0xffffffff, e.mr->lkey};
                            w.sg_list = list;
                            w.num_sge = 2;
                        },
                        IBV_WC_LOC_LEN_ERR, -1}),
        [](const auto &refusal) {
            std::string name = refusal.param.name;
            for (char &c : name) {
                c = isalnum(static_cast<unsigned char>(c)) != 0 ? c : '_';
            }
            return name;
        });

TEST(Device, RegionOfAnotherProtectionDomainIsRefused)
{
    run(2, {}, [](int r) {
        End e;
        ibv_pd *pd = ibv_alloc_pd(e.context);
        ibv_mr *mr =
                ibv_reg_mr(pd, e.buffer, 8192, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
        EXPECT_EQ(ibv_dealloc_pd(pd), EBUSY);
        e.mine.rkey = mr->rkey;
        e.connect(1 - r);
        if (r == 0) {
            ASSERT_EQ(e.post(IBV_WR_RDMA_WRITE, 4096, 64), 0);
            EXPECT_EQ(e.wait().status, IBV_WC_REM_ACCESS_ERR);
        }
        barrier();
        EXPECT_EQ(ibv_dereg_mr(mr), 0);
        EXPECT_EQ(ibv_dealloc_pd(pd), 0);
    });
}

TEST(Device, RegionIsGoneWhenDeregistrationReturns)
{
    run(2, {}, [](int r) {
        End e;
        e.connect(1 - r);
        for (int round = 0; round < 20; round++) {
            if (r == 0) {
                memset(e.buffer, 1 + round, 1 << 20);
                for (int i = 0; i < 16 && e.state() == IBV_QPS_RTS; i++) {
                    e.post(IBV_WR_RDMA_WRITE, 0, 1 << 20);
                    ibv_wc wc;
                    ibv_poll_cq(e.cq, 1, &wc);
                }
                barrier();
                while (!e.quiet(0.005)) {
                }
            } else {
                usleep(static_cast<useconds_t>(rand_r(reinterpret_cast<unsigned *>(&e.mine.lid)) %
                                               3000));
                EXPECT_EQ(ibv_dereg_mr(e.mr), 0);
                memset(e.buffer, 0, 1 << 20);
                barrier();
                e.mr = ibv_reg_mr(e.pd, e.buffer, e.options.size, e.options.mr_access);
                usleep(5000);
                EXPECT_EQ(std::count(e.buffer, e.buffer + (1 << 20), 0), 1 << 20);
            }
            barrier();
            ibv_qp_attr reset = {};
            reset.qp_state = IBV_QPS_RESET;
            ASSERT_EQ(ibv_modify_qp(e.qp[0], &reset, IBV_QP_STATE), 0);
            e.mine.rkey = e.mr->rkey;
            e.connect(1 - r);
        }
    });
}

TEST(Device, RegistrationChecksItsArguments)
{
    run(1, {}, [](int) {
        End e;
        EXPECT_EQ(ibv_reg_mr(e.pd, e.buffer, 4096, IBV_ACCESS_REMOTE_WRITE), nullptr);
        EXPECT_EQ(errno, EINVAL);
        EXPECT_EQ(ibv_reg_mr(e.pd, reinterpret_cast<void *>(4096), 4096, 0), nullptr);
        EXPECT_EQ(errno, EFAULT);
        EXPECT_EQ(ibv_reg_dmabuf_mr(e.pd, 0, 4096, 0, -1, 0), nullptr);
        EXPECT_EQ(errno, EBADF);
        const int fd = open("/dev/null", O_RDONLY);
        EXPECT_EQ(ibv_reg_dmabuf_mr(e.pd, 0, 4096, reinterpret_cast<uintptr_t>(e.buffer), fd, 0),
                  nullptr); // no GPU memory
        close(fd);
    });
}

// Queues and events.

TEST(Device, ReceiverNotReadyIsTriedAgain)
{
    run(2, {}, [](int r) {
        Options o;
        o.rnr_retry = 2;
        o.min_rnr_timer = 22; // 20.48 ms
        End e(o);
        e.connect(1 - r);
        if (r == 0) {
            const uint64_t start = now_ns();
            ASSERT_EQ(e.post(IBV_WR_SEND, 0, 100, 0, IBV_SEND_SIGNALED, 0, 1), 0);
            barrier();
            EXPECT_EQ(e.wait().status, IBV_WC_SUCCESS);
            EXPECT_GE(seconds_since(start), 0.02048 * kSlack);
            const uint64_t again = now_ns();
            ASSERT_EQ(e.post(IBV_WR_SEND, 0, 100, 0, IBV_SEND_SIGNALED, 0, 2), 0);
            EXPECT_EQ(e.wait().status, IBV_WC_RNR_RETRY_EXC_ERR);
            EXPECT_GE(seconds_since(again), 2 * 0.02048 * kSlack);
        } else {
            barrier();
            ASSERT_EQ(e.receive(0, 100), 0);
            EXPECT_EQ(e.wait().status, IBV_WC_SUCCESS);
        }
        barrier();
    });
}

TEST(Device, SharedReceiveQueueReportsItsLimit)
{
    run(2, {}, [](int r) {
        Options o;
        o.srq = r == 1;
        o.qps = 2;
        End e(o);
        e.connect(1 - r);
        if (r == 1) {
            ibv_srq_attr attr = {};
            for (uint64_t i = 0; i < 10; i++) {
                ASSERT_EQ(e.receive(i * 4096, 4096, i), 0);
            }
            attr.srq_limit = 8;
            ASSERT_EQ(ibv_modify_srq(e.srq, &attr, IBV_SRQ_LIMIT), 0);
            ASSERT_EQ(ibv_query_srq(e.srq, &attr), 0);
            EXPECT_EQ(attr.srq_limit, 8u);
            EXPECT_EQ(ibv_destroy_srq(e.srq), EBUSY);
        }
        barrier();
        for (int round = 0; round < 2; round++) {
            if (r == 0) {
                for (int i = 0; i < 2; i++) { // over both QPs
                    ASSERT_EQ(e.post(IBV_WR_SEND, 0, 64, 0, IBV_SEND_SIGNALED, i), 0);
                    EXPECT_EQ(e.wait().status, IBV_WC_SUCCESS);
                }
            }
            barrier();
            if (r == 1) {
                // 8 are left, which is not below the limit, then 6
                EXPECT_EQ(e.event(round == 0 ? 0.02 : 5),
                          round == 0 ? -1 : static_cast<int>(IBV_EVENT_SRQ_LIMIT_REACHED));
            }
            barrier();
        }
        if (r == 1) {
            ibv_srq_attr attr = {};
            ASSERT_EQ(ibv_query_srq(e.srq, &attr), 0);
            EXPECT_EQ(attr.srq_limit, 0u); // fires once
            ibv_qp_attr error = {};
            error.qp_state = IBV_QPS_ERR;
            ASSERT_EQ(ibv_modify_qp(e.qp[0], &error, IBV_QP_STATE), 0);
            EXPECT_EQ(e.event(), static_cast<int>(IBV_EVENT_QP_LAST_WQE_REACHED));
        }
        barrier();
    });
}

TEST(Device, ErrorStateFlushesBothQueuesInOrder)
{
    run(2, {{"SWVERBS_LATENCY_US", "100000"}}, [](int r) {
        End e;
        e.connect(1 - r);
        if (r == 0) {
            for (uint64_t i = 0; i < 5; i++) {
                ASSERT_EQ(e.receive(0, 100, 100 + i), 0);
                ASSERT_EQ(e.post(IBV_WR_RDMA_WRITE, 0, 100, 0, 0, 0, 200 + i), 0);
            }
            ibv_qp_attr error = {};
            error.qp_state = IBV_QPS_ERR;
            ASSERT_EQ(ibv_modify_qp(e.qp[0], &error, IBV_QP_STATE), 0);
            uint64_t next_receive = 100, next_send = 200;
            for (int i = 0; i < 10; i++) {
                const ibv_wc wc = e.wait();
                EXPECT_EQ(wc.status, IBV_WC_WR_FLUSH_ERR);
                EXPECT_EQ(wc.wr_id, wc.wr_id < 200 ? next_receive++ : next_send++);
            }
            ASSERT_EQ(e.receive(0, 100, 300), 0);
            EXPECT_EQ(e.wait().wr_id, 300u);
        }
        barrier();
        if (r == 1) {
            EXPECT_EQ(e.state(), IBV_QPS_RTS); // nobody tells it
        }
    });
}

TEST(Device, UnsignalledRequestsAreSilentAndFreeTheirPlaces)
{
    run(2, {}, [](int r) {
        Options o;
        o.send_wr = 16;
        End e(o);
        e.connect(1 - r);
        if (r == 0) {
            for (uint64_t i = 1; i <= 1000; i++) {
                const unsigned flags = i % 10 == 0 ? IBV_SEND_SIGNALED : 0;
                int rc;
                while ((rc = e.post(IBV_WR_RDMA_WRITE, 0, 8, 0, flags, 0, i)) == ENOMEM) {
                    usleep(10);
                }
                ASSERT_EQ(rc, 0);
            }
            for (uint64_t i = 10; i <= 1000; i += 10) {
                EXPECT_EQ(e.wait().wr_id, i);
            }
            EXPECT_TRUE(e.quiet(0.01));
        }
        barrier();
    });
}

TEST(Device, FullQueuesRefuse)
{
    run(2, {{"SWVERBS_LATENCY_US", "50000"}}, [](int r) {
        Options o;
        o.send_wr = o.recv_wr = 16;
        End e(o);
        e.connect(1 - r);
        if (r == 0) {
            ibv_sge sge;
            ibv_send_wr chain[17], *bad = nullptr;
            for (int i = 0; i < 17; i++) {
                chain[i] = e.write_request(sge, 0, 8, 0);
                chain[i].next = i < 16 ? &chain[i + 1] : nullptr;
            }
            EXPECT_EQ(ibv_post_send(e.qp[0], chain, &bad), ENOMEM);
            EXPECT_EQ(bad, &chain[16]);
            for (int i = 0; i < 16; i++) {
                EXPECT_EQ(e.wait().status, IBV_WC_SUCCESS);
                EXPECT_EQ(e.post(IBV_WR_RDMA_WRITE, 0, 8), 0); // who sees one may post one
            }
            for (int i = 0; i < 16; i++) {
                EXPECT_EQ(e.wait().status, IBV_WC_SUCCESS);
            }
            for (int i = 0; i < 16; i++) {
                EXPECT_EQ(e.receive(0, 8), 0);
            }
            EXPECT_EQ(e.receive(0, 8), ENOMEM);
        }
        barrier();
    });
}

TEST(Device, ChannelsReportWhatWasAskedFor)
{
    run(2, {}, [](int r) {
        Options o;
        o.channel = r == 1;
        End e(o);
        e.connect(1 - r);
        if (r == 1) {
            for (uint64_t i = 0; i < 8; i++) {
                ASSERT_EQ(e.receive(0, 64, i), 0);
            }
            pollfd ready = {e.channel->fd, POLLIN, 0};
            fcntl(e.channel->fd, F_SETFL, O_NONBLOCK);
            ibv_cq *cq;
            void *context;
            EXPECT_EQ(ibv_get_cq_event(e.channel, &cq, &context), -1);
            EXPECT_EQ(errno, EAGAIN);
            ASSERT_EQ(ibv_req_notify_cq(e.cq, 0), 0);
            barrier(); // a message
            EXPECT_EQ(poll(&ready, 1, 5000), 1);
            ASSERT_EQ(ibv_get_cq_event(e.channel, &cq, &context), 0);
            EXPECT_EQ(cq, e.cq);
            EXPECT_EQ(poll(&ready, 1, 0), 0);
            EXPECT_EQ(e.wait().status, IBV_WC_SUCCESS);
            barrier(); // another: not armed
            barrier();
            EXPECT_EQ(poll(&ready, 1, 20), 0);
            ASSERT_EQ(ibv_req_notify_cq(e.cq, 1), 0);
            barrier(); // not solicited
            barrier();
            EXPECT_EQ(poll(&ready, 1, 20), 0);
            barrier(); // solicited
            EXPECT_EQ(poll(&ready, 1, 5000), 1);
            ASSERT_EQ(ibv_get_cq_event(e.channel, &cq, &context), 0);
            ibv_ack_cq_events(cq, 2); // or it could not be destroyed
            // blocking, in the kernel, until somebody sends
            fcntl(e.channel->fd, F_SETFL, 0);
            ASSERT_EQ(ibv_req_notify_cq(e.cq, 0), 0);
            barrier();
            ASSERT_EQ(ibv_get_cq_event(e.channel, &cq, &context), 0);
            ibv_ack_cq_events(cq, 1);
            EXPECT_EQ(ibv_destroy_comp_channel(e.channel), EBUSY);
        } else {
            const auto send = [&](unsigned flags) {
                ASSERT_EQ(e.post(IBV_WR_SEND, 0, 64, 0, flags | IBV_SEND_SIGNALED), 0);
                EXPECT_EQ(e.wait().status, IBV_WC_SUCCESS);
            };
            barrier();
            send(0);
            barrier();
            send(0);
            barrier();
            barrier();
            send(0);
            barrier();
            barrier();
            send(IBV_SEND_SOLICITED);
            barrier();
            usleep(20000);
            send(0);
        }
        barrier();
    });
}

// UCX polls until nothing is there, arms, and sleeps.
TEST(Device, WhatComesBetweenThePollAndTheArmingMakesTheEvent)
{
    run(2, {}, [](int r) {
        Options o;
        o.channel = true;
        End e(o);
        e.connect(1 - r);
        if (r == 1) {
            ASSERT_EQ(e.receive(0, 64, 1), 0);
            ASSERT_EQ(e.receive(0, 64, 2), 0);
            barrier(); // two messages
            barrier();
            pollfd ready = {e.channel->fd, POLLIN, 0};
            ibv_cq *cq;
            void *context;
            EXPECT_EQ(poll(&ready, 1, 20), 0); // nobody asked
            ASSERT_EQ(ibv_req_notify_cq(e.cq, 0), 0);
            ASSERT_EQ(poll(&ready, 1, 5000), 1);
            ASSERT_EQ(ibv_get_cq_event(e.channel, &cq, &context), 0);
            ibv_ack_cq_events(cq, 1);
            // the event was for both, polled or not
            ASSERT_EQ(ibv_req_notify_cq(e.cq, 0), 0);
            EXPECT_EQ(poll(&ready, 1, 20), 0);
            EXPECT_EQ(e.wait().status, IBV_WC_SUCCESS);
            EXPECT_EQ(e.wait().status, IBV_WC_SUCCESS);
        } else {
            barrier();
            for (int i = 0; i < 2; i++) {
                ASSERT_EQ(e.post(IBV_WR_SEND, 0, 64), 0);
                EXPECT_EQ(e.wait().status, IBV_WC_SUCCESS);
            }
            barrier();
        }
        barrier();
    });
}

TEST(Device, CompletionQueueCanGrowAndOverrun)
{
    run(2, {}, [](int r) {
        Options o;
        o.cqe = 8;
        End e(o);
        e.connect(1 - r);
        if (r == 0) {
            for (uint64_t i = 0; i < 8; i++) {
                ASSERT_EQ(e.post(IBV_WR_RDMA_WRITE, 0, 8, 0, IBV_SEND_SIGNALED, 0, i), 0);
            }
            usleep(20000);
            EXPECT_EQ(ibv_resize_cq(e.cq, 4), EINVAL); // they would not fit
            ASSERT_EQ(ibv_resize_cq(e.cq, 16), 0);
            for (uint64_t i = 8; i < 16; i++) {
                ASSERT_EQ(e.post(IBV_WR_RDMA_WRITE, 0, 8, 0, IBV_SEND_SIGNALED, 0, i), 0);
            }
            usleep(20000);
            for (uint64_t i = 0; i < 16; i++) {
                EXPECT_EQ(e.wait().wr_id, i);
            }
            for (uint64_t i = 0; i < 17; i++) {
                ASSERT_EQ(e.post(IBV_WR_RDMA_WRITE, 0, 8), 0);
            }
            EXPECT_EQ(e.event(), static_cast<int>(IBV_EVENT_CQ_ERR));
        }
        barrier();
    });
}

TEST(Device, StateTransitionsAreChecked)
{
    run(1, {}, [](int) {
        End e;
        ibv_qp *qp = e.qp[0];
        ibv_qp_attr a = {};
        a.port_num = 1;
        const auto modify = [&](ibv_qp_state state, int mask) {
            a.qp_state = state;
            return ibv_modify_qp(qp, &a, IBV_QP_STATE | mask);
        };
        constexpr int kInit = IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        constexpr int kRtr = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                             IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
        EXPECT_EQ(e.post(IBV_WR_RDMA_WRITE, 0, 8), EINVAL); // in RESET
        EXPECT_EQ(e.receive(0, 8), EINVAL);
        EXPECT_EQ(modify(IBV_QPS_RTR, kRtr), EINVAL);
        EXPECT_EQ(modify(IBV_QPS_INIT, kInit & ~IBV_QP_PORT), EINVAL);
        EXPECT_EQ(modify(IBV_QPS_INIT, kInit | IBV_QP_QKEY), EINVAL);
        a.port_num = 2;
        EXPECT_EQ(modify(IBV_QPS_INIT, kInit), EINVAL);
        a.port_num = 1;
        EXPECT_EQ(modify(IBV_QPS_INIT, kInit), 0);
        EXPECT_EQ(e.receive(0, 8), 0);
        EXPECT_EQ(e.post(IBV_WR_RDMA_WRITE, 0, 8), EINVAL);
        a.path_mtu = IBV_MTU_1024;
        EXPECT_EQ(modify(IBV_QPS_RTR, kRtr & ~IBV_QP_DEST_QPN), EINVAL);
        EXPECT_EQ(modify(IBV_QPS_RTS, IBV_QP_SQ_PSN), EINVAL);
        a.max_dest_rd_atomic = 17;
        EXPECT_EQ(modify(IBV_QPS_RTR, kRtr), EINVAL);
        a.max_dest_rd_atomic = 1;
        EXPECT_EQ(modify(IBV_QPS_RTR, kRtr), 0);
        EXPECT_EQ(e.state(), IBV_QPS_RTR);
        EXPECT_EQ(modify(IBV_QPS_RTS, IBV_QP_SQ_PSN), EINVAL);
        EXPECT_EQ(modify(IBV_QPS_ERR, 0), 0);
        EXPECT_EQ(modify(IBV_QPS_RTS, 0), EINVAL);
        EXPECT_EQ(modify(IBV_QPS_RESET, 0), 0);
        EXPECT_EQ(e.state(), IBV_QPS_RESET);
        EXPECT_EQ(modify(IBV_QPS_INIT, kInit), 0);
    });
}

TEST(Device, ObjectsInUseAreBusy)
{
    run(1, {}, [](int) {
        End e;
        EXPECT_EQ(ibv_destroy_cq(e.cq), EBUSY);
        EXPECT_EQ(ibv_dealloc_pd(e.pd), EBUSY);
    });
}

TEST(Device, ManyObjects)
{
    run(1, {}, [](int) {
        Options o;
        o.qps = 1024;
        o.send_wr = o.recv_wr = 32;
        End e(o);
        for (int i = 0; i < o.qps; i++) {
            Address to = e.mine;
            to.qpn[0] = e.qp[static_cast<size_t>(i ^ 1)]->qp_num;
            e.connect_qp(i, to, 0);
        }
        e.peer = e.mine;
        std::vector<ibv_mr *> mrs;
        for (size_t i = 0; i < 8192; i++) {
            mrs.push_back(ibv_reg_mr(e.pd, e.buffer + i * 8, 8, e.options.mr_access));
            ASSERT_NE(mrs.back(), nullptr) << i;
        }
        for (int i = 0; i < o.qps; i++) {
            ibv_sge sge;
            ibv_send_wr wr = e.write_request(sge, 0, 8, 8 + 8 * static_cast<uint64_t>(i));
            wr.wr.rdma.rkey = mrs[static_cast<size_t>(i) + 1]->rkey;
            memset(e.buffer, i, 8);
            ASSERT_EQ(e.post(wr, i), 0);
            ASSERT_EQ(e.wait().status, IBV_WC_SUCCESS);
            ASSERT_EQ(e.buffer[8 + 8 * i], i & 0xff);
        }
        for (ibv_mr *mr : mrs) {
            EXPECT_EQ(ibv_dereg_mr(mr), 0);
        }
    });
}

// Order.

TEST(Device, WriteIsVisibleBeforeALaterSend)
{
    for (const char *gbps : {"0", "2"}) {
        run(2, {{"SWVERBS_GBPS", gbps}, {"SWVERBS_LATENCY_US", "5"}, {"SWVERBS_CHUNK", "4k"}},
            [](int r) {
                End e;
                e.connect(1 - r);
                constexpr size_t n = 20000;
                for (int i = 1; i <= 100; i++) {
                    if (r == 1) {
                        ASSERT_EQ(e.receive(kHalf, 4), 0);
                    }
                    barrier();
                    if (r == 0) {
                        memset(e.buffer, i, n);
                        ASSERT_EQ(e.post(IBV_WR_RDMA_WRITE, 0, n, 0, 0), 0);
                        ASSERT_EQ(e.post(IBV_WR_SEND, 0, 4), 0);
                    }
                    ASSERT_EQ(e.wait().status, IBV_WC_SUCCESS);
                    if (r == 1) {
                        ASSERT_EQ(std::count(e.buffer, e.buffer + n, i), ptrdiff_t{n});
                    }
                    barrier();
                }
            });
    }
}

TEST(Device, ReadsAreOrderedWithWrites)
{
    run(2, {{"SWVERBS_GBPS", "1"}, {"SWVERBS_LATENCY_US", "50"}, {"SWVERBS_CHUNK", "8k"}},
        [](int r) {
            End e;
            e.connect(1 - r);
            constexpr size_t n = 50000;
            if (r == 0) {
                for (int i = 1; i <= 20; i++) {
                    memset(e.buffer, i, n);
                    memset(e.buffer + n, i + 100, n);
                    // the READ sees the WRITE before it, but not the fenced one after it
                    ASSERT_EQ(e.post(IBV_WR_RDMA_WRITE, 0, n, 0, 0, 0, 1), 0);
                    ASSERT_EQ(e.post(IBV_WR_RDMA_READ, kHalf, n, 0, IBV_SEND_SIGNALED, 0, 2), 0);
                    ASSERT_EQ(e.post(IBV_WR_RDMA_WRITE, n, n, 0, IBV_SEND_SIGNALED | IBV_SEND_FENCE,
                                     0, 3),
                              0);
                    EXPECT_EQ(e.wait().wr_id, 2u);
                    EXPECT_EQ(std::count(e.buffer + kHalf, e.buffer + kHalf + n, i), ptrdiff_t{n});
                    EXPECT_EQ(e.wait().wr_id, 3u);
                }
            }
            barrier();
            if (r == 1) {
                EXPECT_EQ(std::count(e.buffer, e.buffer + n, 120), ptrdiff_t{n});
            }
        });
}

TEST(Device, QpsOvertakeOneAnotherButNoMessageItsQp)
{
    run(2, {{"SWVERBS_REORDER_US", "500"}, {"SWVERBS_SEED", "3"}}, [](int r) {
        Options o;
        o.qps = 2;
        o.srq = r == 1;
        End e(o);
        e.connect(1 - r);
        constexpr uint64_t kCount = 100;
        if (r == 1) {
            for (uint64_t i = 0; i < kCount; i++) {
                ASSERT_EQ(e.receive(0, 64), 0);
            }
        }
        barrier();
        if (r == 0) {
            for (uint64_t i = 0; i < kCount; i++) {
                ASSERT_EQ(e.post(IBV_WR_SEND_WITH_IMM, 0, 8, 0, 0, static_cast<int>(i % 2), i), 0);
                usleep(100);
            }
            usleep(2000);
        } else {
            uint64_t last = 0, last_of[2] = {0, 0};
            int overtaken = 0;
            for (uint64_t i = 0; i < kCount; i++) {
                const ibv_wc wc = e.wait();
                ASSERT_EQ(wc.status, IBV_WC_SUCCESS);
                const uint64_t number = be32toh(wc.imm_data);
                overtaken += number < last ? 1 : 0;
                EXPECT_GE(number, last_of[number % 2]);
                last = last_of[number % 2] = number;
            }
            EXPECT_GT(overtaken, 5);
        }
        barrier();
    });
}

// Time. All processes read the same clock.

TEST(Device, NothingIsEarly)
{
    constexpr double kGbps = 0.5, kLatency = 300e-6;
    run(2, {{"SWVERBS_GBPS", "0.5"}, {"SWVERBS_LATENCY_US", "300"}}, [](int r) {
        End e;
        e.connect(1 - r);
        for (const size_t n : {8, 5000, 65536, 1000000}) {
            const double wire = static_cast<double>(n) / (kGbps * 1e9) * kSlack;
            for (int i = 0; i < 10; i++) {
                memset(e.buffer, 0, n);
                if (r == 1) {
                    ASSERT_EQ(e.receive(kHalf, 8), 0);
                }
                barrier();
                if (r == 0) {
                    if (i % 2 == 0) {
                        usleep(1000); // the link is idle
                    }
                    memset(e.buffer, 1, n);
                    const uint64_t start = now_ns();
                    board->value[0] = start;
                    barrier();
                    // busy as ib_write_lat is: nothing else moves time on
                    ASSERT_EQ(e.post(IBV_WR_RDMA_WRITE, 0, n, 0, IBV_SEND_SIGNALED), 0);
                    ASSERT_EQ(e.wait().status, IBV_WC_SUCCESS);
                    EXPECT_GE(seconds_since(start), wire + 2 * kLatency * kSlack) << n;
                    const uint64_t read = now_ns();
                    ASSERT_EQ(e.post(IBV_WR_RDMA_READ, kHalf, n), 0);
                    ASSERT_EQ(e.wait().status, IBV_WC_SUCCESS);
                    EXPECT_GE(seconds_since(read), wire + 2 * kLatency * kSlack) << n;
                    board->value[1] = now_ns();
                    ASSERT_EQ(e.post(IBV_WR_SEND, 0, 8), 0);
                    ASSERT_EQ(e.wait().status, IBV_WC_SUCCESS);
                } else {
                    barrier();
                    auto *last = reinterpret_cast<std::atomic<uint8_t> *>(e.buffer + n - 1);
                    while (last->load() == 0) {
                    }
                    EXPECT_GE(seconds_since(board->value[0]), wire + kLatency * kSlack) << n;
                    ASSERT_EQ(e.wait().status, IBV_WC_SUCCESS);
                    EXPECT_GE(seconds_since(board->value[1]), kLatency * kSlack);
                }
                barrier();
            }
        }
    });
}

TEST(Device, BandwidthIsSharedFairly)
{
    constexpr size_t kMessage = 256 << 10, kCount = 32;
    for (const ibv_wr_opcode opcode : {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ}) {
        run(2, {{"SWVERBS_GBPS", "0.1"}}, [opcode](int r) {
            Options o;
            o.qps = 2;
            End e(o);
            e.connect(1 - r);
            if (r == 0) {
                const uint64_t start = now_ns();
                for (size_t i = 0; i < kCount; i++) {
                    for (int q = 0; q < 2; q++) {
                        ASSERT_EQ(e.post(opcode, 0, kMessage, 0, IBV_SEND_SIGNALED, q), 0);
                    }
                }
                size_t done[2] = {0, 0}, apart = 0;
                for (size_t i = 0; i < 2 * kCount; i++) {
                    const ibv_wc wc = e.wait();
                    ASSERT_EQ(wc.status, IBV_WC_SUCCESS);
                    done[wc.qp_num == e.qp[1]->qp_num]++;
                    apart = std::max(apart,
                                     std::max(done[0], done[1]) - std::min(done[0], done[1]));
                }
                const double time = seconds_since(start);
                const double wire = 2 * kCount * kMessage / 0.1e9;
                EXPECT_GE(time, wire * kSlack);
                EXPECT_LE(time, wire * 5);
                EXPECT_LE(apart, 3u);
            }
            barrier();
        });
    }
}

TEST(Device, TwoSendersShareTheReceiversLink)
{
    constexpr size_t kMessage = 64 << 10, kCount = 64;
    run(3, {{"SWVERBS_GBPS", "0.1"}}, [](int r) {
        Options o;
        o.qps = r == 0 ? 2 : 1;
        End e(o);
        board->address[r] = e.mine;
        barrier();
        if (r == 0) {
            e.connect_qp(0, board->address[1], 0);
            e.connect_qp(1, board->address[2], 0);
        } else {
            e.peer = board->address[0];
            e.connect_qp(0, e.peer, r - 1);
        }
        const uint64_t start = now_ns(); // nobody sends before the barrier
        barrier();
        if (r != 0) {
            for (size_t i = 0; i < kCount; i++) {
                ASSERT_EQ(e.post(IBV_WR_RDMA_WRITE, 0, kMessage), 0);
            }
            for (size_t i = 0; i < kCount; i++) {
                ASSERT_EQ(e.wait().status, IBV_WC_SUCCESS);
            }
        }
        barrier();
        EXPECT_GE(seconds_since(start), 2 * kCount * kMessage / 0.1e9 * kSlack);
    });
}

TEST(Device, MessageRateIsLimited)
{
    run(2, {{"SWVERBS_RATE", "5000"}}, [](int r) {
        Options o;
        o.send_wr = 600;
        End e(o);
        e.connect(1 - r);
        if (r == 0) {
            const uint64_t start = now_ns();
            for (int i = 0; i < 501; i++) {
                ASSERT_EQ(e.post(i % 2 == 0 ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ, 0, 8), 0);
            }
            for (int i = 0; i < 501; i++) {
                ASSERT_EQ(e.wait().status, IBV_WC_SUCCESS);
            }
            EXPECT_GE(seconds_since(start), 0.1 * kSlack);
            EXPECT_LE(seconds_since(start), 1);
        }
        barrier();
    });
}

TEST(Device, DevicesHaveTheirOwnLinks)
{
    run(2, {{"SWVERBS_DEVICES", "3"}, {"SWVERBS_GBPS", "0.05"}}, [](int r) {
        int count = 0;
        ibv_device **list = ibv_get_device_list(&count);
        ASSERT_EQ(count, 3);
        EXPECT_STREQ(ibv_get_device_name(list[2]), "swverbs2");
        EXPECT_NE(ibv_get_device_guid(list[0]), ibv_get_device_guid(list[1]));
        ibv_free_device_list(list);
        Options o[2];
        o[1].device = 2;
        End a(o[0]), b(o[1]);
        EXPECT_NE(a.mine.lid, b.mine.lid);
        a.connect(1 - r);
        b.connect(1 - r);
        constexpr size_t n = 4 << 20; // 84 ms
        if (r == 0) {
            double least = 1e9; // of some, for busy machines
            for (int i = 0; i < 5 && least > 1.9 * n / 0.05e9; i++) {
                const uint64_t start = now_ns();
                ASSERT_EQ(a.post(IBV_WR_RDMA_WRITE, 0, n), 0);
                ASSERT_EQ(b.post(IBV_WR_RDMA_WRITE, 0, n), 0);
                ASSERT_EQ(a.wait().status, IBV_WC_SUCCESS);
                ASSERT_EQ(b.wait().status, IBV_WC_SUCCESS);
                EXPECT_GE(seconds_since(start), n / 0.05e9 * kSlack);
                least = std::min(least, seconds_since(start));
            }
            EXPECT_LE(least, 1.9 * n / 0.05e9); // not over one link
        }
        barrier();
    });
}

// Faults and death.

TEST(Device, UnansweredRequestsAreGivenUp)
{
    run(2, {}, [](int r) {
        Options o;
        o.timeout = 12; // 16.8 ms
        o.retry = 3;
        End e(o);
        e.connect(1 - r);
        if (r == 1) {
            ibv_qp_attr reset = {};
            reset.qp_state = IBV_QPS_RESET;
            ASSERT_EQ(ibv_modify_qp(e.qp[0], &reset, IBV_QP_STATE), 0);
        }
        barrier();
        if (r == 0) {
            const uint64_t start = now_ns();
            ASSERT_EQ(e.post(IBV_WR_RDMA_WRITE, 0, 8), 0);
            EXPECT_EQ(e.wait().status, IBV_WC_RETRY_EXC_ERR);
            EXPECT_GE(seconds_since(start), 4 * 4096e-9 * 4096 * kSlack);
            EXPECT_EQ(e.state(), IBV_QPS_ERR);
        }
        barrier();
    });
}

TEST(Device, DestroyedQpNeitherReceivesNorLeavesCompletions)
{
    run(2, {}, [](int r) {
        Options o;
        o.timeout = 8;
        o.retry = 1;
        for (int round = 0; round < 20; round++) {
            End e(o);
            e.connect(1 - r);
            if (r == 0) {
                for (int i = 0; i < 64; i++) {
                    e.post(IBV_WR_SEND, 0, 30000);
                }
                for (int i = 0; i < 64; i++) { // done, or given up and flushed
                    ASSERT_NE(e.wait().status, kNothing);
                }
            } else {
                for (int i = 0; i < 64; i++) {
                    ASSERT_EQ(e.receive(0, 30000), 0);
                }
                ibv_wc wc;
                for (int i = 0; i < 20 + round; i++) {
                    ibv_poll_cq(e.cq, 1, &wc);
                }
                ASSERT_EQ(ibv_destroy_qp(e.qp[0]), 0);
                e.qp.clear();
                EXPECT_EQ(ibv_poll_cq(e.cq, 1, &wc), 0);
                memset(e.buffer, 0xaa, 30000);
                usleep(1000);
                EXPECT_EQ(std::count(e.buffer, e.buffer + 30000, 0xaa), 30000);
                EXPECT_EQ(ibv_poll_cq(e.cq, 1, &wc), 0);
            }
            barrier();
        }
    });
}

class KilledPeer : public testing::TestWithParam<bool> {};

TEST_P(KilledPeer, LeavesTheOthersWorking)
{
    const bool sender_dies = GetParam();
    for (unsigned round = 0; round < 12; round++) {
        run(4, {{"SWVERBS_GBPS", round % 2 == 0 ? "0" : "1"}, {"SWVERBS_CHUNK", "16k"}},
            [round, sender_dies](int r) {
                Options o;
                o.timeout = 8; // 1 ms
                o.retry = 2;
                o.signal_all = true;
                if (r >= 2) {  // bystanders
                    barrier(); // in place of the pair's two in connect()
                    barrier();
                    End e;
                    barrier();
                    board->address[r] = e.mine;
                    while (board->pid[2].load() == 0 || board->value[2].load() != 3) {
                        usleep(100);
                        if (board->value[4 + r].load() == 0) {
                            board->value[4 + r] = 1;
                            board->value[2]++;
                        }
                        if (board->value[2].load() >= 2) {
                            break;
                        }
                    }
                    e.peer = board->address[5 - r];
                    e.connect_qp(0, e.peer, 0);
                    usleep(20000); // so that both are connected
                    e.fill(0, 100000, static_cast<unsigned>(r));
                    for (int i = 0; i < 20; i++) {
                        ASSERT_EQ(e.post(IBV_WR_RDMA_WRITE, 0, 100000, kHalf), 0);
                        ASSERT_EQ(e.wait().status, IBV_WC_SUCCESS);
                    }
                    usleep(50000);
                    EXPECT_EQ(e.wrong(kHalf, 100000, static_cast<unsigned>(5 - r)), 0u);
                    board->value[3]++;
                    while (board->value[3].load() < 2) {
                        usleep(100);
                    }
                    return;
                }
                End e(o);
                e.connect(1 - r);
                barrier();
                const bool dies = (r == 0) == sender_dies;
                if (dies) {
                    board->value[1] = 1;
                } else {
                    while (board->value[1].load() == 0) {
                    }
                }
                if (r == 1) {
                    for (int i = 0; i < 100; i++) {
                        e.receive(0, 1 << 20);
                    }
                }
                bool ended = false;
                const uint64_t kill_at = now_ns() + 300000 + 700000 * round;
                for (const uint64_t end = now_ns() + 4000000000; now_ns() < end && !ended;) {
                    if (r == 0) {
                        e.post(IBV_WR_RDMA_WRITE, 0, 300000);
                        e.post(IBV_WR_SEND, 0, 50000);
                    }
                    ibv_wc wc;
                    while (ibv_poll_cq(e.cq, 1, &wc) == 1) {
                        if (wc.status != IBV_WC_SUCCESS) {
                            EXPECT_TRUE(wc.status == IBV_WC_RETRY_EXC_ERR ||
                                        wc.status == IBV_WC_WR_FLUSH_ERR)
                                    << ibv_wc_status_str(wc.status);
                            ended = true;
                        } else if (r == 1) {
                            e.receive(0, 1 << 20);
                        }
                    }
                    if (dies && now_ns() > kill_at) {
                        kill(getpid(), SIGKILL);
                    }
                    if (!dies && r == 1 && now_ns() > kill_at + 100000000) {
                        break; // the target of a dead sender hears nothing
                    }
                }
                EXPECT_EQ(ended, r == 0);
            },
            {sender_dies ? 0 : 1});
    }
}

INSTANTIATE_TEST_SUITE_P(Device, KilledPeer, testing::Bool(),
                         [](const auto &side) { return side.param ? "Sender" : "Receiver"; });

TEST(Device, PlacesOfKilledProcessesAreUsedAgain)
{
    run(1, {}, [](int) {
        for (int i = 0; i < 150; i++) { // there are 128
            const pid_t pid = fork();
            if (pid == 0) {
                End e;
                e.fill(0, 4096, 1);
                kill(getpid(), SIGKILL);
            }
            int status;
            ASSERT_EQ(waitpid(pid, &status, 0), pid);
            ASSERT_TRUE(WIFSIGNALED(status)) << "process " << i << ": " << status;
        }
        End e;
        EXPECT_NE(e.mine.lid, 0u);
    });
}

TEST(Device, FileOfAnotherKindIsMadeAnew)
{
    for (const char *junk : {"", "junk", "x"}) {
        run(1, {{"SWVERBS_FABRIC", "swverbs-test-stale"}}, [junk](int) {
            std::ofstream("/dev/shm/swverbs-test-stale.fabric") << junk;
            if (*junk == 'x') { // the right size
                EXPECT_EQ(truncate("/dev/shm/swverbs-test-stale.fabric", 1ll << 36), 0);
            }
            End e;
            EXPECT_NE(e.mine.lid, 0u);
        });
    }
    EXPECT_NE(access("/dev/shm/swverbs-test-stale.fabric", F_OK), 0);
}

TEST(Device, LinkGoesDownAndComesUp)
{
    run(2, {}, [](int r) {
        if (r == 0) {
            setenv("SWVERBS_FAULT", "link-down@bytes=1m:50ms", 1);
        }
        End e;
        e.connect(1 - r);
        if (r == 0) {
            const uint64_t start = now_ns();
            for (int i = 0; i < 4; i++) {
                ASSERT_EQ(e.post(IBV_WR_RDMA_WRITE, 0, 1 << 20), 0);
            }
            EXPECT_EQ(e.event(), static_cast<int>(IBV_EVENT_PORT_ERR));
            ibv_port_attr port;
            ASSERT_EQ(ibv_query_port(e.context, 1, &port), 0);
            EXPECT_EQ(port.state, IBV_PORT_DOWN);
            for (int i = 0; i < 4; i++) {
                EXPECT_EQ(e.wait().status, IBV_WC_SUCCESS); // sent again
            }
            EXPECT_GE(seconds_since(start), 0.050);
            EXPECT_EQ(e.event(), static_cast<int>(IBV_EVENT_PORT_ACTIVE));
            ASSERT_EQ(ibv_query_port(e.context, 1, &port), 0);
            EXPECT_EQ(port.state, IBV_PORT_ACTIVE);
        }
        barrier();
    });
}

TEST(Device, LinkStaysDown)
{
    run(2, {}, [](int r) {
        Options o;
        o.timeout = 12;
        o.retry = 1;
        if (r == 1) { // the target's link, by time
            setenv("SWVERBS_FAULT", "link-down@time=0.05", 1);
        }
        End e(o);
        e.connect(1 - r);
        if (r == 0) {
            ibv_wc wc = {};
            while (wc.status == IBV_WC_SUCCESS) {
                ASSERT_EQ(e.post(IBV_WR_RDMA_READ, 0, 1000), 0);
                wc = e.wait();
            }
            EXPECT_EQ(wc.status, IBV_WC_RETRY_EXC_ERR);
            EXPECT_EQ(e.event(0.02), -1); // its own port is up
        } else {
            EXPECT_EQ(e.event(), static_cast<int>(IBV_EVENT_PORT_ERR));
        }
        barrier();
    });
}

TEST(Device, StallDelaysWithoutError)
{
    run(2, {}, [](int r) {
        if (r == 0) {
            setenv("SWVERBS_FAULT", "stall@ops=3:100ms", 1);
        }
        Options o;
        o.timeout = 8;
        o.retry = 0;
        End e(o);
        e.connect(1 - r);
        if (r == 0) {
            const uint64_t start = now_ns();
            for (int i = 0; i < 6; i++) {
                ASSERT_EQ(e.post(IBV_WR_RDMA_WRITE, 0, 1000), 0);
                EXPECT_EQ(e.wait().status, IBV_WC_SUCCESS);
            }
            EXPECT_GE(seconds_since(start), 0.100);
        }
        barrier();
    });
}

TEST(Device, ErrorIsInjected)
{
    const std::pair<const char *, ibv_wc_status> statuses[] = {
            {"rem_access", IBV_WC_REM_ACCESS_ERR},
            {"rem_op", IBV_WC_REM_OP_ERR},
            {"retry_exc", IBV_WC_RETRY_EXC_ERR},
            {"loc_prot", IBV_WC_LOC_PROT_ERR}};
    for (const auto &[name, status] : statuses) {
        const std::string fault = std::string("error@ops=2:") + name;
        run(2, {}, [&fault, status = status](int r) {
            if (r == 0) {
                setenv("SWVERBS_FAULT", fault.c_str(), 1);
            }
            End e;
            e.connect(1 - r);
            if (r == 0) {
                for (uint64_t i = 0; i < 4; i++) {
                    ASSERT_EQ(e.post(IBV_WR_RDMA_WRITE, 0, 1000, 0, IBV_SEND_SIGNALED, 0, i), 0);
                }
                EXPECT_EQ(e.wait().status, IBV_WC_SUCCESS);
                EXPECT_EQ(e.wait().status, IBV_WC_SUCCESS);
                ibv_wc wc = e.wait();
                EXPECT_EQ(wc.status, status);
                EXPECT_EQ(wc.wr_id, 2u);
                EXPECT_EQ(e.wait().status, IBV_WC_WR_FLUSH_ERR);
                EXPECT_EQ(e.state(), IBV_QPS_ERR);
            }
            barrier();
        });
    }
}

TEST(Device, VanishedPeerDoesNotAnswer)
{
    run(2, {}, [](int r) {
        Options o;
        o.timeout = 10;
        o.retry = 2;
        if (r == 1) {
            setenv("SWVERBS_FAULT", "peer-gone@ops=1", 1);
        }
        End e(o);
        e.connect(1 - r);
        if (r == 1) {
            ASSERT_EQ(e.post(IBV_WR_RDMA_WRITE, 0, 8), 0);
            EXPECT_EQ(e.wait().status, IBV_WC_RETRY_EXC_ERR);
        }
        barrier();
        if (r == 0) {
            ASSERT_EQ(e.post(IBV_WR_RDMA_WRITE, 0, 8), 0);
            EXPECT_EQ(e.wait().status, IBV_WC_RETRY_EXC_ERR);
        }
        barrier();
    });
}

// Datagrams.

TEST(Device, DatagramsArriveOrAreLost)
{
    run(2, {}, [](int r) {
        Options o;
        o.type = IBV_QPT_UD;
        End e(o);
        e.connect(1 - r);
        if (r == 1) {
            for (uint64_t i = 0; i < 2; i++) {
                ASSERT_EQ(e.receive(i * 8192, 4096 + 40, i), 0);
            }
        }
        barrier();
        ibv_ah_attr attr = {};
        attr.dlid = static_cast<uint16_t>(e.peer.lid);
        attr.port_num = 1;
        ibv_ah *ah = ibv_create_ah(e.pd, &attr);
        EXPECT_EQ(ibv_dealloc_pd(e.pd), EBUSY);
        if (r == 0) {
            const auto send = [&](size_t n, uint32_t qkey, uint32_t qpn) {
                e.fill(0, n, 4);
                ibv_sge sge;
                ibv_send_wr wr = e.write_request(sge, 0, n, 0);
                wr.opcode = IBV_WR_SEND;
                wr.wr.ud = {ah, qpn, qkey};
                ASSERT_EQ(e.post(wr), 0);
                EXPECT_EQ(e.wait().status, IBV_WC_SUCCESS);
            };
            send(100, 0x9999, e.peer.qpn[0]);     // wrong key
            send(100, 0x1234, e.peer.qpn[0] ^ 1); // nobody
            send(1000, 0x1234, e.peer.qpn[0]);
            send(4096, 0x1234, e.peer.qpn[0]);
            send(10, 0x1234, e.peer.qpn[0]); // no receive
        } else {
            for (const uint32_t n : {1000u, 4096u}) {
                const ibv_wc wc = e.wait();
                EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
                EXPECT_EQ(wc.byte_len, n + 40);
                EXPECT_EQ(wc.src_qp, e.peer.qpn[0]);
                EXPECT_EQ(wc.slid, e.peer.lid);
                EXPECT_EQ(e.wrong(wc.wr_id * 8192 + 40, n, 4), 0u);
            }
            EXPECT_TRUE(e.quiet(0.02));
        }
        barrier();
        EXPECT_EQ(ibv_destroy_ah(ah), 0);
    });
}

TEST(Device, DatagramsOfManySendersTakeAReceiveEach)
{
    constexpr int kSenders = 5;
    constexpr uint32_t kEach = 300, kLength = 3000;
    run(kSenders + 1, {{"SWVERBS_CHUNK", "1024"}}, [](int r) {
        Options o;
        o.type = IBV_QPT_UD;
        o.recv_wr = kSenders * kEach;
        o.cqe = 4096;
        End e(o);
        const bool is_receiver = r == kSenders;
        e.connect(is_receiver ? 0 : kSenders);
        if (is_receiver) {
            for (uint64_t i = 0; i < kSenders * kEach; i++) {
                ASSERT_EQ(e.receive(i * 4096, kLength + 40, i), 0);
            }
        }
        barrier();
        if (is_receiver) {
            std::vector<bool> seen(kSenders * kEach);
            for (uint32_t i = 0; i < kSenders * kEach; i++) {
                const ibv_wc wc = e.wait();
                ASSERT_EQ(wc.status, IBV_WC_SUCCESS) << "after " << i;
                ASSERT_LT(wc.wr_id, seen.size());
                EXPECT_FALSE(seen[wc.wr_id]) << "two in one receive";
                seen[wc.wr_id] = true;
                const uint8_t sender = e.buffer[wc.wr_id * 4096 + 40];
                for (uint32_t byte = 0; byte < kLength; byte++) {
                    ASSERT_EQ(e.buffer[wc.wr_id * 4096 + 40 + byte], sender) << "mixed up";
                }
            }
        } else {
            ibv_ah_attr attr = {};
            attr.dlid = static_cast<uint16_t>(e.peer.lid);
            attr.port_num = 1;
            ibv_ah *ah = ibv_create_ah(e.pd, &attr);
            memset(e.buffer, r + 1, kLength);
            for (uint32_t i = 0; i < kEach; i++) {
                ibv_sge sge;
                ibv_send_wr wr = e.write_request(sge, 0, kLength, 0);
                wr.opcode = IBV_WR_SEND;
                wr.wr.ud = {ah, e.peer.qpn[0], 0x1234};
                ASSERT_EQ(e.post(wr), 0);
                EXPECT_EQ(e.wait().status, IBV_WC_SUCCESS);
            }
            EXPECT_EQ(ibv_destroy_ah(ah), 0);
        }
        barrier();
    });
}

TEST(Device, DatagramsToAKilledPeerDoNoHarmToAnother)
{
    for (int round = 0; round < 8; round++) {
        run(3, {},
            [](int r) {
                Options o;
                o.type = IBV_QPT_UD;
                o.recv_wr = 2000;
                o.cqe = 8192;
                End e(o);
                e.connect((r + 1) % 3);
                for (uint64_t i = 0; r > 0 && i < 2000; i++) {
                    ASSERT_EQ(e.receive(i * 4096, 2040, i), 0);
                }
                barrier();
                if (r == 1) {
                    for (;;) {
                        e.wait(0.001); // until it is killed
                    }
                }
                if (r == 2) {
                    uint32_t got = 0;
                    while (board->value[3].load() == 0 || got < board->value[4].load()) {
                        const ibv_wc wc = e.wait(0.1);
                        if (wc.status != kNothing) {
                            ASSERT_EQ(wc.status, IBV_WC_SUCCESS) << "after " << got;
                            got++;
                        }
                    }
                    return;
                }
                ibv_ah *ah[3] = {};
                for (int to : {1, 2}) {
                    ibv_ah_attr attr = {};
                    attr.dlid = static_cast<uint16_t>(board->address[to].lid);
                    attr.port_num = 1;
                    ah[to] = ibv_create_ah(e.pd, &attr);
                }
                for (int i = 0; i < 1200; i++) {
                    const int to = 1 + i % 2;
                    if (i == 301) {
                        kill(board->pid[1].load(), SIGKILL);
                    }
                    ibv_sge sge;
                    ibv_send_wr wr = e.write_request(sge, 0, 2000, 0);
                    wr.opcode = IBV_WR_SEND;
                    wr.wr.ud = {ah[to], board->address[to].qpn[0], 0x1234};
                    ASSERT_EQ(e.post(wr), 0);
                    EXPECT_EQ(e.wait().status, IBV_WC_SUCCESS);
                    board->value[4] += to == 2;
                }
                board->value[3] = 1;
                EXPECT_EQ(ibv_destroy_ah(ah[1]), 0);
                EXPECT_EQ(ibv_destroy_ah(ah[2]), 0);
            },
            {1});
    }
}

// Processes and settings.

TEST(Device, SixtyFourProcessesInARing)
{
    constexpr int kRanks = 64;
    run(kRanks, {}, [](int r) {
        Options o;
        o.qps = 2; // 0: to the next, 1: from the one before
        o.size = 1 << 20;
        End e(o);
        board->address[r] = e.mine;
        barrier();
        const int next = (r + 1) % kRanks, before = (r + kRanks - 1) % kRanks;
        e.connect_qp(0, board->address[next], 1);
        e.connect_qp(1, board->address[before], 0);
        e.peer = board->address[next];
        for (int i = 0; i < 5; i++) {
            ASSERT_EQ(e.receive(300000, 200000, 500, 1), 0);
            barrier();
            e.fill(0, 200000, static_cast<unsigned>(r + i));
            ASSERT_EQ(e.post(IBV_WR_SEND, 0, 200000), 0);
            for (int k = 0; k < 2; k++) {
                ASSERT_EQ(e.wait(20).status, IBV_WC_SUCCESS);
            }
            EXPECT_EQ(e.wrong(300000, 200000, static_cast<unsigned>(before + i)), 0u);
            barrier();
        }
    });
}

TEST(Device, BadSettingsEndTheProcess)
{
    const std::pair<const char *, const char *> bad[] = {{"SWVERBS_GBPS", "fast"},
                                                         {"SWVERBS_GBPS", "-1"},
                                                         {"SWVERBS_GBPS", "1x"},
                                                         {"SWVERBS_LATENCY_US", "nan"},
                                                         {"SWVERBS_RATE", "1e99"},
                                                         {"SWVERBS_DEVICES", "0"},
                                                         {"SWVERBS_DEVICES", "9"},
                                                         {"SWVERBS_DEVICES", "1.5"},
                                                         {"SWVERBS_CHUNK", "12"},
                                                         {"SWVERBS_CHUNK", "1q"},
                                                         {"SWVERBS_REORDER_US", "0x1"},
                                                         {"SWVERBS_SEED", "a"},
                                                         {"SWVERBS_LOG", "yes"},
                                                         {"SWVERBS_LINK_LAYER", "token-ring"},
                                                         {"SWVERBS_FABRIC", "../x"},
                                                         {"SWVERBS_FAULT", "link-down"},
                                                         {"SWVERBS_FAULT", "stall@ops=1"},
                                                         {"SWVERBS_FAULT", "error@ops=1:success"},
                                                         {"SWVERBS_FAULT", "error@bytes=1.5:fatal"},
                                                         {"SWVERBS_FAULT", "link-down@time=1:5"},
                                                         {"SWVERBS_FAULT", "flood@ops=1"},
                                                         {"SWVERBS_FAULT", "peer-gone@ops=1,x"}};
    for (const auto &[name, value] : bad) {
        const Outcome outcome = run_one({{name, value}}, [] { ibv_get_device_list(nullptr); });
        ASSERT_TRUE(WIFEXITED(outcome.status)) << name << "=" << value;
        EXPECT_EQ(WEXITSTATUS(outcome.status), 2) << name << "=" << value;
        EXPECT_NE(outcome.errors.find(name), std::string::npos) << outcome.errors;
        EXPECT_NE(outcome.errors.find(value), std::string::npos) << outcome.errors;
        EXPECT_EQ(std::count(outcome.errors.begin(), outcome.errors.end(), '\n'), 1);
    }
}

TEST(Device, ForkedChildHasNoDevice)
{
    run(1, {}, [](int) {
        End e;
        const pid_t pid = fork();
        if (pid == 0) {
            int count = -1;
            ibv_get_device_list(&count);
            ibv_cq *cq = ibv_create_cq(e.context, 8, nullptr, nullptr, 0);
            _exit(count == 0 && cq == nullptr && errno == ENODEV ? 0 : 1);
        }
        int status;
        ASSERT_EQ(waitpid(pid, &status, 0), pid);
        EXPECT_EQ(status, 0);
        EXPECT_NE(ibv_reg_mr(e.pd, e.buffer, 4096, 0), nullptr); // the parent still has it
        ibv_qp_attr error = {};
        error.qp_state = IBV_QPS_ERR;
        EXPECT_EQ(ibv_modify_qp(e.qp[0], &error, IBV_QP_STATE), 0);
        exit(testing::Test::HasFailure() ? 1 : 0); // with objects alive
    });
}

TEST(Device, ExecGivesANewDevice)
{
    run(
            1, {},
            [](int) {
                End *e = new End(); // lives until exec
                (void)e;
                execl("/proc/self/exe", "test_device", "--gtest_filter=Device.ObjectsInUseAreBusy",
                      "--gtest_brief=1", nullptr);
                FAIL();
            },
            {}, 25, true);
}

// Files.

uint64_t counter(int device, const char *name)
{
    std::ifstream file("/sys/class/infiniband/swverbs" + std::to_string(device) +
                       "/ports/1/counters/" + name);
    uint64_t value = ~0ull;
    file >> value;
    return value;
}

TEST(Device, CountersAreExact)
{
    run(2, {{"SWVERBS_DEVICES", "2"}}, [](int r) {
        Options o;
        o.device = 1;
        End e(o);
        e.connect(1 - r);
        EXPECT_EQ(counter(1, "port_xmit_data"), 0u);
        barrier();
        if (r == 0) {
            for (int i = 0; i < 10; i++) {
                ASSERT_EQ(e.post(IBV_WR_RDMA_WRITE, 0, 100000), 0);
                ASSERT_EQ(e.post(IBV_WR_RDMA_READ, 0, 4000), 0);
            }
            for (int i = 0; i < 20; i++) {
                ASSERT_EQ(e.wait().status, IBV_WC_SUCCESS);
            }
        }
        barrier();
        const char *const data[] = {"port_xmit_data", "port_rcv_data"};
        const char *const packets[] = {"port_xmit_packets", "port_rcv_packets"};
        EXPECT_EQ(counter(1, data[r]), 250000u); // in units of four bytes
        EXPECT_EQ(counter(1, data[1 - r]), 10000u);
        EXPECT_EQ(counter(1, packets[r]), 250u); // 25 of 4096 bytes for each
        EXPECT_EQ(counter(1, packets[1 - r]), 10u);
        EXPECT_EQ(counter(0, data[0]), 0u);
        barrier();
    });
}

TEST(Device, FilesAreThereAndOthersAreNotTouched)
{
    run(1, {}, [](int) {
        End e;
        struct stat info;
        EXPECT_EQ(stat("/dev/infiniband/uverbs-sw0", &info), 0);
        EXPECT_TRUE(S_ISCHR(info.st_mode));
        EXPECT_EQ(access("/dev/infiniband/uverbs-sw0", R_OK | W_OK), 0);
        EXPECT_NE(access("/dev/infiniband/uverbs-sw1", R_OK), 0);
        EXPECT_NE(access("/dev/infiniband/uverbs-sw00", R_OK), 0);
        EXPECT_EQ(stat("/sys/class/infiniband/swverbs0/ports/1", &info), 0);
        EXPECT_TRUE(S_ISDIR(info.st_mode));
        const auto line = [](const char *name) {
            std::ifstream file(std::string("/sys/class/infiniband/swverbs0/") + name);
            std::string text;
            std::getline(file, text);
            return text;
        };
        EXPECT_EQ(line("ports/1/state"), "4: ACTIVE");
        EXPECT_EQ(line("ports/1/link_layer"), "InfiniBand");
        EXPECT_EQ(line("node_type"), "1: CA");
        EXPECT_EQ(line("node_guid").size(), 19u);
        EXPECT_EQ(line("nothing"), "");
        EXPECT_EQ(open("/sys/class/infiniband/swverbs0/node_guid", O_RDWR), -1);
        EXPECT_EQ(errno, EACCES);
        char text[64];
        EXPECT_GT(ibv_read_sysfs_file("/sys/class/infiniband/swverbs0", "ports/1/rate", text,
                                      sizeof(text)),
                  0);
        // pass through
        EXPECT_EQ(access("/proc/self/status", R_OK), 0);
        EXPECT_EQ(access("/nowhere", R_OK), -1);
        EXPECT_EQ(errno, ENOENT);
        char *real = realpath("/proc/self/../self/fd", nullptr);
        EXPECT_NE(real, nullptr);
        free(real);
        FILE *file = fopen("/proc/self/stat", "r");
        ASSERT_NE(file, nullptr);
        EXPECT_GT(fread(text, 1, 10, file), 0u);
        fclose(file);
        const int fd = open("/tmp", O_TMPFILE | O_RDWR, 0640);
        EXPECT_GE(fd, 0);
        ASSERT_EQ(fstat(fd, &info), 0);
        EXPECT_EQ(info.st_mode & 0777, 0640u & ~umask(022));
        close(fd);
    });
}

} // namespace

int main(int argc, char **argv)
{
    testing::InitGoogleTest(&argc, argv);
    return RUN_ALL_TESTS();
}
