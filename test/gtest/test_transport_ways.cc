// SPDX-License-Identifier: BSD-3-Clause
// The ways of an operation through zip: coded or straight, put or got, with the transport below
// keeping its order or not.
#include "ucx_pair.h"

#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstring>

namespace zip::test {
namespace {

constexpr size_t KIB = 1024, MIB = 1024 * KIB;

class Ways : public testing::TestWithParam<Wire> {
protected:
    Env env(const Env &more) const
    {
        // on a wire that is slow enough for zip to be of use
        return GetParam().env + more + Env{{"UCX_FENCE_MODE", "weak"}, {"SWVERBS_GBPS", "1"}};
    }
    // Whether UCX can read remote memory over this wire without zip.
    bool has_get() const { return strcmp(GetParam().transport, "rc_verbs") == 0; }
    // Whether zip takes part where it may choose: not where the wire is faster than the codec, as
    // shared memory is, and every wire for a codec with a sanitizer in it.
    bool takes_part() const
    {
#ifdef __SANITIZE_ADDRESS__
        return strcmp(GetParam().transport, "tcp") == 0;
#else
        return has_put();
#endif
    }
    // Whether operations can go straight between the application's buffers.
    bool has_put() const
    {
        return !GetParam().shared_memory;
    }
};

struct RemoteWindow {
    RemoteWindow(Endpoint *endpoint, Channel &channel)
    {
        const std::string packed = channel.receive(), where = channel.receive();
        memcpy(&address, where.data(), sizeof(address));
        EXPECT_EQ(UCS_OK, ucp_ep_rkey_unpack(endpoint->ep, packed.data(), &key));
    }
    ~RemoteWindow() { ucp_rkey_destroy(key); }
    RemoteWindow(const RemoteWindow &) = delete;
    RemoteWindow &operator=(const RemoteWindow &) = delete;

    uint64_t address = 0;
    ucp_rkey_h key = nullptr;
};

void announce(Channel &channel, const Window &window, const void *address)
{
    const auto number = reinterpret_cast<uint64_t>(address);
    channel.send(window.key());
    channel.send(std::string(reinterpret_cast<const char *>(&number), sizeof(number)));
}

const std::vector<size_t> GET_SIZES = {
        1,         7,       4096,        4097,    32 * KIB - 1, 32 * KIB, 64 * KIB + 1,
        128 * KIB, MIB + 1, 3 * MIB + 5, 16 * MIB};

// One after the other, and then all at once.
void get_everything(Processes &pair)
{
    pair.run(
            [&](Channel &channel) {
                Worker worker;
                Endpoint *from = worker.connect(channel.receive());
                const ucp_request_param_t param = {};
                for (size_t i = 0; i < GET_SIZES.size(); ++i) {
                    RemoteWindow remote(from, channel);
                    for (unsigned round = 0; round < 3; ++round) {
                        Buffer target(GET_SIZES[i], (i * 7 + round) % 16);
                        EXPECT_EQ(UCS_OK,
                                  worker.wait(ucp_get_nbx(from->ep, target.data(), GET_SIZES[i],
                                                          remote.address, remote.key, &param)));
                        EXPECT_TRUE(target.holds(ALL_DATA[i % 4], i)) << GET_SIZES[i] << " bytes";
                    }
                    channel.send("got it");
                }
                RemoteWindow remote(from, channel);
                std::vector<std::unique_ptr<Buffer>> targets;
                for (size_t i = 0; i < 100; ++i) { // every other one ends by a flush
                    targets.push_back(std::make_unique<Buffer>(MIB / 2, i % 16));
                    ucs_status_ptr_t get = ucp_get_nbx(from->ep, targets[i]->data(), MIB / 2,
                                                       remote.address, remote.key, &param);
                    ASSERT_FALSE(UCS_PTR_IS_ERR(get));
                    if (UCS_PTR_IS_PTR(get)) {
                        ucp_request_free(get);
                    }
                }
                EXPECT_EQ(UCS_OK, worker.flush(from));
                for (auto &target : targets) {
                    EXPECT_TRUE(target->holds(Data::BF16, 99));
                }
                channel.send("got all");
                channel.receive();
                EXPECT_EQ(UCS_OK, worker.close(from));
                channel.send("closed");
            },
            [&](Channel &channel) {
                Worker worker;
                channel.send(worker.address());
                for (size_t i = 0; i < GET_SIZES.size(); ++i) {
                    Buffer source(GET_SIZES[i], ALL_DATA[i % 4], i, i % 16);
                    Window window(worker, source.data(), GET_SIZES[i]);
                    announce(channel, window, source.data());
                    EXPECT_EQ("got it", worker.serve(channel));
                    EXPECT_TRUE(source.holds(ALL_DATA[i % 4], i)) << "the source was changed";
                }
                Buffer source(MIB / 2, Data::BF16, 99, 3);
                Window window(worker, source.data(), MIB / 2);
                announce(channel, window, source.data());
                EXPECT_EQ("got all", worker.serve(channel));
                channel.send("close");
                worker.serve(channel);
            });
}

TEST_P(Ways, GetsArriveBitForBit)
{
    Processes pair(env({{"UCX_ZIP_BYPASS", "never"}}));
    get_everything(pair);
    if (!Processes::is_part()) {
        const ZipCounters &zip = pair.outcome(0).zip;
        EXPECT_GE(zip.get_bytes, 50 * MIB) << pair.outcome(0).log;
        EXPECT_EQ(0u, zip.straight_bytes);
        EXPECT_EQ(zip.get_bytes, zip.received_bytes);
        EXPECT_LT(pair.outcome(1).zip.wire_bytes, zip.get_bytes * 9 / 10) << "not compressed";
        EXPECT_EQ("", pair.outcome(0).errors);
        EXPECT_EQ("", pair.outcome(1).errors);
    }
}

TEST_P(Ways, GetsArriveWhicheverWayIsChosen)
{
    Processes pair(env({{"UCX_ZIP_BYPASS", "auto"}}));
    get_everything(pair);
}

TEST_P(Ways, StraightOperationsPassTheCodecBy)
{
    constexpr unsigned COUNT = 20;
    Processes pair(env({{"UCX_ZIP_BYPASS", "always"}, {"UCX_RNDV_THRESH", "16k"}}));
    pair.run(
            [&](Channel &channel) {
                Worker worker;
                Endpoint *to = worker.connect(channel.receive());
                for (unsigned i = 0; i < COUNT; ++i) {
                    Buffer source(MIB, Data::BF16, i, i % 16);
                    EXPECT_EQ(UCS_OK, worker.wait(worker.tag_send(to, source.data(), MIB, i)));
                }
                channel.receive();
                EXPECT_EQ(UCS_OK, worker.close(to));
                channel.send("closed");
            },
            [&](Channel &channel) {
                Worker worker;
                channel.send(worker.address());
                for (unsigned i = 0; i < COUNT; ++i) {
                    Buffer target(MIB, (i * 7) % 16);
                    EXPECT_EQ(UCS_OK, worker.wait(worker.tag_receive(target.data(), MIB, i)));
                    EXPECT_TRUE(target.holds(Data::BF16, i));
                }
                channel.send("all here");
                worker.serve(channel);
            });
    if (!Processes::is_part() && has_put()) {
        EXPECT_GE(pair.outcome(0).zip.straight_bytes + pair.outcome(1).zip.straight_bytes,
                  COUNT * MIB)
                << pair.outcome(0).log << pair.outcome(1).log;
        EXPECT_EQ(0u, pair.outcome(0).zip.wire_bytes);
    }
}

// Puts know what they send; the one that gets learns it from its peer.
TEST_P(Ways, WhatDoesNotShrinkGoesStraight)
{
    constexpr unsigned COUNT = 20;
    Processes pair(env({{"UCX_ZIP_BYPASS", "auto"}}));
    pair.run(
            [&](Channel &channel) {
                Worker worker;
                Endpoint *to = worker.connect(channel.receive());
                RemoteWindow remote(to, channel);
                const ucp_request_param_t param = {};
                Buffer buffer(MIB, Data::RANDOM, 1);
                for (unsigned i = 0; i < COUNT; ++i) {
                    EXPECT_EQ(UCS_OK, worker.wait(ucp_put_nbx(to->ep, buffer.data(), MIB,
                                                              remote.address, remote.key, &param)));
                    EXPECT_EQ(UCS_OK, worker.flush(to));
                }
                for (unsigned i = 0; i < COUNT; ++i) {
                    Buffer target(MIB);
                    EXPECT_EQ(UCS_OK, worker.wait(ucp_get_nbx(to->ep, target.data(), MIB,
                                                              remote.address, remote.key, &param)));
                    EXPECT_TRUE(target.holds(Data::RANDOM, 1));
                }
                channel.send("done");
                channel.receive();
                EXPECT_EQ(UCS_OK, worker.close(to));
                channel.send("closed");
            },
            [&](Channel &channel) {
                Worker worker;
                channel.send(worker.address());
                Buffer window_memory(MIB);
                Window window(worker, window_memory.data(), MIB);
                announce(channel, window, window_memory.data());
                worker.serve(channel);
                channel.send("close");
                worker.serve(channel);
            });
    if (!Processes::is_part() && takes_part()) {
        const ZipCounters &zip = pair.outcome(0).zip;
        EXPECT_EQ(0u, zip.wire_bytes) << pair.outcome(0).log;
        EXPECT_GE(zip.straight_bytes, (has_get() ? 2 : 1) * COUNT * MIB) << pair.outcome(0).log;
    }
}

// Data first, then a fence, then flags whose last one the target polls: it must never be seen
// early. Both are long enough for zip: UCX's weak fence promises nothing between two transports.
TEST_P(Ways, NothingOvertakesAFence)
{
    constexpr size_t LENGTH = 600 * KIB, FLAGS = 64 * KIB / sizeof(uint64_t);
    constexpr uint64_t ROUNDS = 30;
    const auto data_of = [](uint64_t round) { return round % 3 == 0 ? Data::RANDOM : Data::BF16; };
    for (const char *bypass : {"never", "auto", "always"}) {
        for (const char *order : {"auto", "flush"}) {
            Processes pair(env({{"UCX_ZIP_BYPASS", bypass},
                                {"UCX_ZIP_ORDER", order},
                                {"UCX_ZIP_MIN_SIZE", "1k"}}));
            pair.run(
                    [&](Channel &channel) {
                        Worker worker;
                        Endpoint *to = worker.connect(channel.receive());
                        RemoteWindow remote(to, channel);
                        const ucp_request_param_t param = {};
                        for (uint64_t round = 1; round <= ROUNDS; ++round) {
                            Buffer source(LENGTH, data_of(round), round);
                            const std::vector<uint64_t> flags(FLAGS, round);
                            ucs_status_ptr_t put = ucp_put_nbx(
                                    to->ep, source.data(), LENGTH,
                                    remote.address + FLAGS * sizeof(uint64_t), remote.key, &param);
                            EXPECT_EQ(UCS_OK, ucp_worker_fence(worker.get()));
                            ucs_status_ptr_t flag =
                                    ucp_put_nbx(to->ep, flags.data(), FLAGS * sizeof(uint64_t),
                                                remote.address, remote.key, &param);
                            EXPECT_EQ(UCS_OK, worker.wait(put));
                            EXPECT_EQ(UCS_OK, worker.wait(flag));
                            EXPECT_EQ(UCS_OK, worker.flush());
                            channel.receive();
                        }
                        EXPECT_EQ(UCS_OK, worker.close(to));
                        channel.send("closed");
                    },
                    [&](Channel &channel) {
                        Worker worker;
                        channel.send(worker.address());
                        std::vector<uint64_t> memory(FLAGS + LENGTH / sizeof(uint64_t));
                        Window window(worker, memory.data(), memory.size() * sizeof(uint64_t));
                        announce(channel, window, memory.data());
                        std::atomic_ref<uint64_t> last(memory[FLAGS - 1]);
                        for (uint64_t round = 1; round <= ROUNDS; ++round) {
                            EXPECT_TRUE(worker.wait_until([&] { return last.load() == round; }));
                            std::vector<char> expected(LENGTH);
                            fill(expected.data(), LENGTH, data_of(round), round);
                            EXPECT_EQ(0, memcmp(&memory[FLAGS], expected.data(), LENGTH))
                                    << "round " << round << ", bypass " << bypass << ", order "
                                    << order;
                            channel.send("seen");
                        }
                        worker.serve(channel);
                    });
            if (!Processes::is_part() && (takes_part() || strcmp(bypass, "auto") != 0)) {
                EXPECT_GE(pair.outcome(0).zip.put_bytes, ROUNDS * (LENGTH + 8 * FLAGS))
                        << "not all of it went through zip";
            }
        }
    }
}

TEST_P(Ways, PutsArriveWhereNothingBelowIsOrdered)
{
    constexpr size_t COUNT = 60;
    Processes pair(env({{"UCX_ZIP_ORDER", "flush"}, {"UCX_ZIP_BYPASS", "never"}}));
    const auto length_of = [](size_t i) { return (i % 4 == 0 ? 3 * KIB : 300 * KIB) + 31 * i; };
    pair.run(
            [&](Channel &channel) {
                Worker worker;
                Endpoint *to = worker.connect(channel.receive());
                RemoteWindow remote(to, channel);
                const ucp_request_param_t param = {};
                std::vector<std::unique_ptr<Buffer>> sources;
                std::vector<ucs_status_ptr_t> puts;
                for (size_t i = 0; i < COUNT; ++i) {
                    sources.push_back(
                            std::make_unique<Buffer>(length_of(i), ALL_DATA[i % 3], i, i % 16));
                    puts.push_back(ucp_put_nbx(to->ep, sources[i]->data(), length_of(i),
                                               remote.address + i * 512 * KIB, remote.key, &param));
                }
                EXPECT_EQ(UCS_OK, worker.flush());
                for (ucs_status_ptr_t put : puts) {
                    EXPECT_EQ(UCS_OK, worker.wait(put));
                }
                channel.send("flushed");
                channel.receive();
                EXPECT_EQ(UCS_OK, worker.close(to));
                channel.send("closed");
            },
            [&](Channel &channel) {
                Worker worker;
                channel.send(worker.address());
                Buffer target(COUNT * 512 * KIB);
                Window window(worker, target.data(), target.length());
                announce(channel, window, target.data());
                EXPECT_EQ("flushed", worker.serve(channel));
                for (size_t i = 0; i < COUNT; ++i) {
                    std::vector<char> expected(length_of(i));
                    fill(expected.data(), expected.size(), ALL_DATA[i % 3], i);
                    EXPECT_EQ(0, memcmp(target.data() + i * 512 * KIB, expected.data(),
                                        expected.size()))
                            << "put " << i;
                }
                channel.send("close");
                worker.serve(channel);
            });
    if (!Processes::is_part()) {
        EXPECT_EQ(pair.outcome(0).zip.put_bytes, pair.outcome(1).zip.received_bytes);
        EXPECT_GT(pair.outcome(0).zip.put_bytes, COUNT * 100 * KIB);
    }
}

// The peer is killed while it owes answers, and while this side reads its memory straight.
TEST_P(Ways, GetsFromAPeerThatDiesEndWithAnError)
{
    for (const char *bypass : {"never", "always"}) {
        Processes pair(env(PEER_ERRORS + Env{{"UCX_ZIP_BYPASS", bypass}}));
        pair.may_die(1).timeout(60);
        pair.run(
                [&](Channel &channel) {
                    Worker worker;
                    Endpoint *from = worker.connect(channel.receive(), UCP_ERR_HANDLING_MODE_PEER);
                    RemoteWindow remote(from, channel);
                    const ucp_request_param_t param = {};
                    std::vector<std::unique_ptr<Buffer>> targets;
                    std::vector<ucs_status_ptr_t> gets;
                    for (unsigned i = 0; i < 40; ++i) {
                        targets.push_back(std::make_unique<Buffer>(4 * MIB));
                        gets.push_back(ucp_get_nbx(from->ep, targets[i]->data(), 4 * MIB,
                                                   remote.address, remote.key, &param));
                        worker.progress();
                    }
                    kill(std::stoi(channel.receive()), SIGKILL);
                    unsigned failed = 0;
                    for (ucs_status_ptr_t get : gets) {
                        failed += worker.wait(get) != UCS_OK;
                    }
                    EXPECT_GT(failed, 0u);
                    worker.close(from, true);
                },
                [&](Channel &channel) {
                    Worker worker;
                    channel.send(worker.address());
                    Buffer source(4 * MIB, Data::BF16, 1);
                    Window window(worker, source.data(), 4 * MIB);
                    announce(channel, window, source.data());
                    channel.send(std::to_string(getpid()));
                    for (;;) {
                        worker.progress();
                    }
                });
    }
}

INSTANTIATE_TEST_SUITE_P(Over, Ways, testing::ValuesIn(all_wires()),
                         [](const auto &wire) { return wire.param.name; });

} // namespace
} // namespace zip::test
