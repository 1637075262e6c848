// SPDX-License-Identifier: BSD-3-Clause
// Many endpoints on little staging memory, and endpoints that come and go with traffic under way.
#include "ucx_pair.h"

#include <csignal>

namespace zip::test {
namespace {

// The fewest slots: 4 of a ring that is written by puts, 8 of one that is mapped.
const Env TINY_STAGING = {{"UCX_RNDV_THRESH", "0"},
                          {"UCX_RNDV_SCHEME", "put_zcopy"},
                          {"UCX_ZIP_SEG_SIZE", "16k"},
                          {"UCX_ZIP_HOST_STAGING_SIZE", "168k"}};

class Endpoints : public testing::TestWithParam<Wire> {
protected:
    Env env() const { return GetParam().env + TINY_STAGING; }
};

struct Transfer {
    std::unique_ptr<Buffer> source, target;
    uint64_t seed;
};

// One process has one worker with `workers * each` endpoints, the other `workers` workers with
// `each` endpoints. All endpoints of both sides send at once, `rounds` times.
void run_many(Processes &pair, unsigned workers, unsigned each, unsigned rounds, size_t length,
              uint64_t features = Worker::FEATURES)
{
    const auto tag_of = [](unsigned endpoint, unsigned message) {
        return static_cast<ucp_tag_t>(endpoint) << 16 | message;
    };
    constexpr unsigned BURST = 2;
    const bool ran = pair.run(
            [&](Channel &channel) {
                Worker worker(features);
                const unsigned count = workers * each;
                channel.send(worker.address());
                std::vector<Endpoint *> peers;
                for (unsigned i = 0; i < workers; ++i) {
                    const std::string address = channel.receive();
                    for (unsigned j = 0; j < each; ++j) {
                        peers.push_back(worker.connect(address));
                    }
                }
                for (unsigned round = 0; round < rounds; ++round) {
                    std::vector<ucs_status_ptr_t> requests;
                    std::vector<Transfer> transfers;
                    for (unsigned i = 0; i < count; ++i) {
                        for (unsigned k = 0; k < BURST; ++k) {
                            const ucp_tag_t tag = tag_of(i, round * BURST + k);
                            transfers.push_back({std::make_unique<Buffer>(length, Data::BF16, tag),
                                                 std::make_unique<Buffer>(length), tag});
                            requests.push_back(worker.tag_receive(transfers.back().target->data(),
                                                                  length, tag));
                            requests.push_back(worker.tag_send(
                                    peers[i], transfers.back().source->data(), length, tag));
                        }
                    }
                    for (ucs_status_ptr_t request : requests) {
                        EXPECT_EQ(UCS_OK, worker.wait(request));
                    }
                    for (Transfer &transfer : transfers) {
                        EXPECT_TRUE(transfer.target->holds(Data::FP32, transfer.seed));
                    }
                }
                channel.send("done");
                worker.serve(channel);
            },
            [&](Channel &channel) {
                std::vector<std::unique_ptr<Worker>> all;
                std::vector<std::vector<Endpoint *>> peers(workers);
                const std::string address = channel.receive();
                for (unsigned i = 0; i < workers; ++i) {
                    all.push_back(std::make_unique<Worker>());
                    channel.send(all[i]->address());
                    for (unsigned j = 0; j < each; ++j) {
                        peers[i].push_back(all[i]->connect(address));
                    }
                }
                const auto progress_all = [&] {
                    unsigned count = 0;
                    for (auto &worker : all) {
                        count += worker->progress();
                    }
                    return count;
                };
                for (unsigned round = 0; round < rounds; ++round) {
                    std::vector<ucs_status_ptr_t> requests;
                    std::vector<Transfer> transfers;
                    for (unsigned i = 0; i < workers * each; ++i) {
                        Worker &worker = *all[i / each];
                        for (unsigned k = 0; k < BURST; ++k) {
                            const ucp_tag_t tag = tag_of(i, round * BURST + k);
                            transfers.push_back({std::make_unique<Buffer>(length, Data::FP32, tag),
                                                 std::make_unique<Buffer>(length), tag});
                            requests.push_back(worker.tag_receive(transfers.back().target->data(),
                                                                  length, tag));
                            requests.push_back(worker.tag_send(peers[i / each][i % each],
                                                               transfers.back().source->data(),
                                                               length, tag));
                        }
                    }
                    const auto deadline = std::chrono::steady_clock::now() + Worker::PATIENCE;
                    Idle idle;
                    for (ucs_status_ptr_t request : requests) {
                        if (!UCS_PTR_IS_PTR(request)) {
                            EXPECT_EQ(nullptr, request);
                            continue;
                        }
                        while (ucp_request_check_status(request) == UCS_INPROGRESS) {
                            if (progress_all() > 0) {
                                idle.busy();
                            } else {
                                idle.round();
                            }
                            if (std::chrono::steady_clock::now() > deadline) {
                                ADD_FAILURE() << "messages did not arrive in time, round " << round;
                                fflush(stdout);
                                raise(SIGABRT);
                            }
                        }
                        EXPECT_EQ(UCS_OK, ucp_request_check_status(request));
                        ucp_request_free(request);
                    }
                    for (Transfer &transfer : transfers) {
                        EXPECT_TRUE(transfer.target->holds(Data::BF16, transfer.seed));
                    }
                }
                Idle idle;
                while (!channel.readable()) {
                    if (progress_all() == 0) {
                        idle.round();
                    }
                }
                channel.receive();
                channel.send("done");
            });
    if (!ran) {
        return;
    }
    const uint64_t bytes = uint64_t(workers) * each * rounds * BURST * length;
    EXPECT_EQ(bytes, pair.outcome(0).zip.put_bytes);
    EXPECT_EQ(bytes, pair.outcome(1).zip.put_bytes);
    EXPECT_EQ(workers, pair.outcome(1).zip.interfaces);
}

TEST_P(Endpoints, SixtyFourShareFourSlots)
{
    Processes pair(env());
    run_many(pair, 16, 4, 2, 50000);
}

// Every message of a round needs the slots that the last round's left elsewhere.
TEST_P(Endpoints, SlotsThatLieIdleAreRecalled)
{
    Processes pair(env());
    run_many(pair, 3, 3, 25, 20000);
}

TEST_P(Endpoints, SixteenShareFourSlotsAndSleep)
{
    Processes pair(env());
    run_many(pair, 4, 4, 3, 50000, Worker::FEATURES | UCP_FEATURE_WAKEUP);
}

// `ROUNDS` connections one after the other, each closed by the first process while messages are
// under way, in both directions or only from the first to the second. The ring has four slots: one
// lost in a round would be felt soon.
void run_reconnects(Processes &pair, bool force, bool both_ways = true)
{
    static constexpr unsigned ROUNDS = 30, MESSAGES = 4;
    static constexpr size_t LENGTH = 200000;
    const auto post = [both_ways](Worker &worker, Endpoint *peer, std::vector<Transfer> &transfers,
                                  std::vector<ucs_status_ptr_t> &sends,
                                  std::vector<ucs_status_ptr_t> &receives, unsigned round,
                                  bool first) {
        for (unsigned i = 0; i < MESSAGES; ++i) {
            const ucp_tag_t tag = round * MESSAGES + i;
            transfers.push_back({std::make_unique<Buffer>(LENGTH, Data::BF16, tag),
                                 std::make_unique<Buffer>(LENGTH), tag});
            if (both_ways || !first) {
                receives.push_back(
                        worker.tag_receive(transfers.back().target->data(), LENGTH, tag));
            }
            if (both_ways || first) {
                sends.push_back(
                        worker.tag_send(peer, transfers.back().source->data(), LENGTH, tag));
            }
        }
    };
    // Whatever has happened to it, a request ends once it is cancelled.
    const auto finish = [](Worker &worker, std::vector<ucs_status_ptr_t> &requests) {
        for (ucs_status_ptr_t request : requests) {
            if (UCS_PTR_IS_PTR(request)) {
                if (ucp_request_check_status(request) == UCS_INPROGRESS) {
                    ucp_request_cancel(worker.get(), request);
                }
                worker.wait(request);
            }
        }
    };
    const bool ran = pair.run(
            [&](Channel &channel) {
                Worker worker;
                channel.send(worker.address());
                const std::string address = channel.receive();
                for (unsigned round = 0; round < ROUNDS; ++round) {
                    Endpoint *peer = worker.connect(address, UCP_ERR_HANDLING_MODE_PEER);
                    // a first message for which everything is connected
                    Buffer first(LENGTH, Data::BF16, round);
                    EXPECT_EQ(UCS_OK, worker.wait(worker.tag_send(peer, first.data(), LENGTH,
                                                                  1000 + round)));
                    worker.serve(channel);
                    std::vector<Transfer> transfers;
                    std::vector<ucs_status_ptr_t> sends, receives;
                    post(worker, peer, transfers, sends, receives, round, true);
                    for (unsigned i = 0; i < 40 * (round % 5); ++i) {
                        worker.progress();
                    }
                    const ucs_status_t status = worker.close(peer, force);
                    if (!force) {
                        EXPECT_EQ(UCS_OK, status);
                    }
                    channel.send("closed");
                    worker.serve(channel);
                    finish(worker, sends);
                    finish(worker, receives);
                    channel.send("finished");
                    worker.serve(channel);
                }
            },
            [&](Channel &channel) {
                Worker worker;
                channel.send(worker.address());
                const std::string address = channel.receive();
                for (unsigned round = 0; round < ROUNDS; ++round) {
                    Endpoint *peer = worker.connect(address, UCP_ERR_HANDLING_MODE_PEER);
                    Buffer first(LENGTH);
                    EXPECT_EQ(UCS_OK,
                              worker.wait(worker.tag_receive(first.data(), LENGTH, 1000 + round)));
                    EXPECT_TRUE(first.holds(Data::BF16, round));
                    channel.send("connected");
                    std::vector<Transfer> transfers;
                    std::vector<ucs_status_ptr_t> sends, receives;
                    post(worker, peer, transfers, sends, receives, round, false);
                    worker.serve(channel);
                    channel.send("seen");
                    if (!force) { // what was sent before an orderly end arrives
                        for (unsigned i = 0; i < MESSAGES; ++i) {
                            EXPECT_EQ(UCS_OK, worker.wait(receives[i]));
                            EXPECT_TRUE(transfers[i].target->holds(Data::BF16, transfers[i].seed));
                        }
                        receives.clear();
                    }
                    worker.close(peer, true);
                    finish(worker, sends);
                    finish(worker, receives);
                    worker.serve(channel);
                    channel.send("next");
                }
            });
    if (!ran) {
        return;
    }
    EXPECT_GE(pair.outcome(0).zip.put_bytes, ROUNDS * LENGTH);
    EXPECT_EQ(0u, pair.outcome(0).zip.refused);
    EXPECT_EQ(0u, pair.outcome(1).zip.refused);
}

TEST_P(Endpoints, ReconnectThirtyTimesAfterFlushing)
{
    Processes pair(env() + PEER_ERRORS);
    run_reconnects(pair, false);
}

TEST_P(Endpoints, ReconnectThirtyTimesAfterGivingUp)
{
    Processes pair(env() + PEER_ERRORS);
    run_reconnects(pair, true);
}

// Not only when UCP's keepalive has found the peer to be gone.
TEST_P(Endpoints, SlotsOfAClosedConnectionAreFreeAtOnce)
{
    Processes pair(env() + Env{{"UCX_KEEPALIVE_INTERVAL", "20s"}} + PEER_ERRORS);
    run_reconnects(pair, false, false);
}

INSTANTIATE_TEST_SUITE_P(Over, Endpoints, testing::ValuesIn(all_wires()),
                         [](const auto &wire) { return wire.param.name; });

} // namespace
} // namespace zip::test
