// SPDX-License-Identifier: BSD-3-Clause
// What only rc has: queue pairs that overtake each other, several rails, links that fail, errors
// that a card reports, long queues, and settings of UCX's own below zip.
#include "ucx_pair.h"

#include <unistd.h>

#include <csignal>
#include <cstring>

namespace zip::test {
namespace {

constexpr size_t KIB = 1024, MIB = 1024 * KIB;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

const Env RENDEZVOUS = {{"UCX_RNDV_THRESH", "0"}, {"UCX_RNDV_SCHEME", "put_zcopy"}};
const Env OUT_OF_ORDER = {{"SWVERBS_REORDER_US", "300"}};
const Env TWO_RAILS = {{"SWVERBS_DEVICES", "2"},
                       {"UCX_NET_DEVICES", "swverbs0:1,swverbs1:1"},
                       {"UCX_MAX_RMA_RAILS", "2"},
                       {"UCX_MAX_RNDV_RAILS", "2"}};

class Rc : public testing::TestWithParam<Wire> {
protected:
    // What is in `more` comes first.
    static Env env(const Env &more = {}) { return more + GetParam().env; }
};
class RcOrder : public Rc {};
class RcRails : public Rc {};
class RcQueues : public Rc {};
class RcFaults : public Rc {};
class RcSettings : public Rc {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(RcOrder);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(RcRails);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(RcQueues);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(RcFaults);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(RcSettings);

std::string pack_address(const void *address)
{
    return std::string(reinterpret_cast<const char *>(&address), sizeof(address));
}

// The other side's memory, as it was told.
struct Target {
    uint64_t address = 0;
    ucp_rkey_h rkey = nullptr;

    Target(Endpoint *endpoint, const std::string &key, const std::string &where)
    {
        memcpy(&address, where.data(), sizeof(address));
        EXPECT_EQ(UCS_OK, ucp_ep_rkey_unpack(endpoint->ep, key.data(), &rkey));
    }
    ~Target() { ucp_rkey_destroy(rkey); }
    Target(const Target &) = delete;
    Target &operator=(const Target &) = delete;
};

ucs_status_ptr_t put(Endpoint *to, const void *data, size_t length, const Target &target,
                     size_t offset = 0)
{
    const ucp_request_param_t param = {};
    return ucp_put_nbx(to->ep, data, length, target.address + offset, target.rkey, &param);
}

// Both sides say that they are here, and see that the other one is.
void meet(Worker &worker, Channel &channel)
{
    channel.send("here");
    worker.serve(channel);
}

// ---- order

// Both processes, on several endpoints at once: messages by rendezvous, and puts that are looked at
// when the sender's flush has ended.
void run_traffic(Processes &pair, unsigned endpoints, unsigned rounds, size_t length)
{
    constexpr unsigned MESSAGES = 3; // of an endpoint and round
    const auto half = [=](unsigned me) {
        return [=](Channel &channel) {
            Worker worker;
            channel.send(worker.address());
            const std::string address = channel.receive();
            std::vector<Endpoint *> peers;
            std::vector<std::unique_ptr<Buffer>> memory;
            std::vector<std::unique_ptr<Window>> windows;
            std::vector<std::unique_ptr<Target>> targets;
            for (unsigned i = 0; i < endpoints; ++i) {
                peers.push_back(worker.connect(address));
                memory.push_back(std::make_unique<Buffer>(length, i));
                windows.push_back(std::make_unique<Window>(worker, memory[i]->data(), length));
                channel.send(windows[i]->key());
                channel.send(pack_address(memory[i]->data()));
            }
            for (unsigned i = 0; i < endpoints; ++i) {
                const std::string key = channel.receive();
                targets.push_back(std::make_unique<Target>(peers[i], key, channel.receive()));
            }
            const auto length_of = [=](unsigned i) { return length - 4001 * (i % 5); };
            for (unsigned round = 0; round < rounds; ++round) {
                const auto seed_of = [=](unsigned i, unsigned side) {
                    return 2 * (round << 16 | i) + side;
                };
                std::vector<std::unique_ptr<Buffer>> sources, arrivals;
                std::vector<ucs_status_ptr_t> requests;
                for (unsigned i = 0; i < endpoints * MESSAGES; ++i) {
                    arrivals.push_back(std::make_unique<Buffer>(length_of(i), i));
                    requests.push_back(
                            worker.tag_receive(arrivals[i]->data(), length_of(i), round << 16 | i));
                }
                for (unsigned i = 0; i < endpoints * MESSAGES; ++i) {
                    Endpoint *peer = peers[i % endpoints];
                    sources.push_back(std::make_unique<Buffer>(length_of(i), ALL_DATA[i % 3],
                                                               seed_of(i, me)));
                    requests.push_back(worker.tag_send(peer, sources.back()->data(), length_of(i),
                                                       round << 16 | i));
                    if (i < endpoints) {
                        sources.push_back(
                                std::make_unique<Buffer>(length, Data::FP32, seed_of(i, me)));
                        requests.push_back(put(peer, sources.back()->data(), length, *targets[i]));
                    }
                }
                EXPECT_EQ(UCS_OK, worker.flush());
                meet(worker, channel);
                for (unsigned i = 0; i < endpoints; ++i) {
                    EXPECT_TRUE(memory[i]->holds(Data::FP32, seed_of(i, 1 - me)))
                            << "put " << i << " of round " << round;
                }
                for (ucs_status_ptr_t request : requests) {
                    EXPECT_EQ(UCS_OK, worker.wait(request));
                }
                for (unsigned i = 0; i < endpoints * MESSAGES; ++i) {
                    EXPECT_TRUE(arrivals[i]->holds(ALL_DATA[i % 3], seed_of(i, 1 - me)))
                            << "message " << i << " of round " << round;
                }
                meet(worker, channel);
            }
            meet(worker, channel);
        };
    };
    if (pair.run(half(0), half(1))) {
        for (unsigned part = 0; part < 2; ++part) {
            EXPECT_EQ("", pair.outcome(part).errors);
            EXPECT_EQ(0u, pair.outcome(part).zip.refused);
            EXPECT_GE(pair.outcome(part).zip.put_bytes,
                      uint64_t(endpoints) * rounds * (length - 16004) * (MESSAGES + 1));
        }
    }
}

// A flag that is put behind data is never seen before the data, whatever separates the two.
enum class Separator { ENDPOINT_FLUSH, WORKER_FLUSH, FENCE };

void run_flags(Processes &pair, Separator separator, size_t flag_length = sizeof(uint64_t))
{
    static constexpr size_t LENGTHS[] = {40000, 3000, 70 * KIB, MIB + 5};
    static constexpr unsigned ROUNDS = 24;
    const bool ran = pair.run(
            [=](Channel &channel) {
                Worker worker;
                Endpoint *to = worker.connect(channel.receive());
                const std::string data_key = channel.receive(), data_address = channel.receive();
                const std::string flag_key = channel.receive(), flag_address = channel.receive();
                const Target data(to, data_key, data_address), flag(to, flag_key, flag_address);
                Buffer flag_source(flag_length, Data::RANDOM, 1);
                // UCP keeps what is posted before the connection is up, and its weak fence does not
                // know of that.
                const uint64_t nothing = 0;
                ucs_status_ptr_t first = put(to, &nothing, sizeof(nothing), flag);
                EXPECT_EQ(UCS_OK, worker.flush(to));
                EXPECT_EQ(UCS_OK, worker.wait(first));
                for (uint64_t round = 1; round <= ROUNDS; ++round) {
                    const size_t length = LENGTHS[round % 4];
                    Buffer source(length, Data::BF16, round);
                    // sometimes more puts than zip queues
                    const size_t piece =
                            round % 3 == 0 ? std::max<size_t>(length / 400, 100) : length;
                    std::vector<ucs_status_ptr_t> puts;
                    for (size_t done = 0; done < length; done += piece) {
                        puts.push_back(put(to, source.data() + done, std::min(piece, length - done),
                                           data, done));
                    }
                    switch (separator) {
                    case Separator::ENDPOINT_FLUSH:
                        EXPECT_EQ(UCS_OK, worker.flush(to));
                        break;
                    case Separator::WORKER_FLUSH:
                        EXPECT_EQ(UCS_OK, worker.flush());
                        break;
                    case Separator::FENCE:
                        EXPECT_EQ(UCS_OK, ucp_worker_fence(worker.get()));
                        break;
                    }
                    memcpy(flag_source.data() + flag_length - sizeof(round), &round, sizeof(round));
                    puts.push_back(put(to, flag_source.data(), flag_length, flag));
                    EXPECT_EQ(UCS_OK, worker.flush(to));
                    for (ucs_status_ptr_t request : puts) {
                        EXPECT_EQ(UCS_OK, worker.wait(request));
                    }
                    worker.serve(channel);
                }
                channel.send("done");
            },
            [=](Channel &channel) {
                Worker worker;
                channel.send(worker.address());
                Buffer data(LENGTHS[3]);
                Buffer flag(flag_length);
                const auto *value = reinterpret_cast<volatile uint64_t *>(
                        flag.data() + flag_length - sizeof(uint64_t));
                Window data_window(worker, data.data(), data.length());
                Window flag_window(worker, flag.data(), flag_length);
                channel.send(data_window.key());
                channel.send(pack_address(data.data()));
                channel.send(flag_window.key());
                channel.send(pack_address(flag.data()));
                for (uint64_t round = 1; round <= ROUNDS; ++round) {
                    const size_t length = LENGTHS[round % 4];
                    Buffer expected(length, Data::BF16, round);
                    if (!worker.wait_until([&] { return *value == round; })) {
                        FAIL() << "no flag " << round;
                    }
                    EXPECT_EQ(0, memcmp(expected.data(), data.data(), length))
                            << length << " bytes behind the flag of round " << round;
                    channel.send("seen");
                }
                worker.serve(channel);
            });
    if (ran) {
        EXPECT_EQ("", pair.outcome(0).errors);
        EXPECT_EQ("", pair.outcome(1).errors);
        EXPECT_GE(pair.outcome(1).zip.received_bytes, ROUNDS / 4 * (LENGTHS[2] + LENGTHS[3]));
    }
}

TEST_P(RcOrder, DataIsRightWhenQueuePairsOvertakeEachOther)
{
    Processes pair(env(OUT_OF_ORDER + RENDEZVOUS));
    run_traffic(pair, 5, 3, 300000);
}

TEST_P(RcOrder, AFlagIsNotSeenBeforeTheDataThatWasFlushed)
{
    Processes pair(env(OUT_OF_ORDER));
    run_flags(pair, Separator::ENDPOINT_FLUSH);
    Processes again(env(OUT_OF_ORDER));
    run_flags(again, Separator::WORKER_FLUSH);
}

// UCX's strong fence, which it chooses by itself, reads with a key that no card knows and so breaks
// connections of rc_verbs, with and without zip. Its weak one is for what takes one lane: here the
// flag is long enough for zip's.
const Env FENCE = {{"UCX_FENCE_MODE", "weak"}};

TEST_P(RcOrder, AFlagIsNotSeenBeforeTheDataThatWasFenced)
{
    Processes pair(env(OUT_OF_ORDER + FENCE));
    run_flags(pair, Separator::FENCE, 64 * KIB);
}

// That flag takes rc's own lane, and would overtake what takes zip's if zip's fence did not wait.
TEST_P(RcOrder, AShortFlagIsNotSeenBeforeTheDataThatWasFenced)
{
    Processes pair(env(OUT_OF_ORDER + FENCE));
    run_flags(pair, Separator::FENCE);
}

// ---- rails

// The bytes that each emulated device of a process sent, from its log at exit.
std::vector<uint64_t> device_bytes(const std::string &log)
{
    std::vector<uint64_t> bytes;
    for (size_t at = 0; (at = log.find("]: swverbs", at)) != std::string::npos; ++at) {
        unsigned device;
        unsigned long sent;
        if (sscanf(log.c_str() + at, "]: swverbs%u sent %lu bytes", &device, &sent) == 2) {
            bytes.push_back(sent);
        }
    }
    return bytes;
}

void expect_both_rails(const Processes &pair, uint64_t least)
{
    for (unsigned part = 0; part < 2; ++part) {
        const Outcome &outcome = pair.outcome(part);
        EXPECT_EQ(2u, outcome.interfaces.size()) << outcome.log;
        for (const ZipCounters &one : outcome.interfaces) {
            EXPECT_GE(one.put_bytes, least) << outcome.log;
            EXPECT_GE(one.received_bytes, least) << outcome.log;
        }
        const std::vector<uint64_t> bytes = device_bytes(outcome.log);
        EXPECT_EQ(2u, bytes.size()) << outcome.log;
        for (uint64_t sent : bytes) {
            EXPECT_GE(sent, least / 2) << outcome.log;
        }
    }
}

TEST_P(RcRails, BothCarryAMessage)
{
    for (const Env &order : {Env{}, OUT_OF_ORDER}) {
        Processes pair(env(order + TWO_RAILS + RENDEZVOUS + Env{{"SWVERBS_LOG", "1"}}));
        run_traffic(pair, 2, 2, 3 * MIB + 5);
        if (!Processes::is_part()) {
            expect_both_rails(pair, 2 * MIB);
        }
    }
}

TEST_P(RcRails, AFlagIsNotSeenBeforeTheDataThatWasFlushed)
{
    for (const Env &order : {Env{}, OUT_OF_ORDER}) {
        Processes pair(env(order + TWO_RAILS));
        run_flags(pair, Separator::ENDPOINT_FLUSH);
    }
}

// ---- queues

// One worker here, 64 in four other processes.
TEST_P(RcQueues, SixtyFourWorkersOfFourProcessesAreServed)
{
    constexpr unsigned PROCESSES = 4, WORKERS = 16;
    constexpr size_t LENGTH = 50000;
    // UCX would take 34 MB a worker for the receive queue of each interface
    Processes star(env(RENDEZVOUS + Env{{"UCX_RC_VERBS_RX_QUEUE_LEN", "64"},
                                        {"UCX_UD_VERBS_RX_QUEUE_LEN", "512"}}));
    const auto other = [=](Channel &channel) {
        const std::string address = channel.receive();
        std::vector<std::unique_ptr<Worker>> workers;
        std::vector<std::unique_ptr<Buffer>> sources, targets;
        std::vector<ucs_status_ptr_t> requests;
        for (unsigned i = 0; i < WORKERS; ++i) {
            workers.push_back(std::make_unique<Worker>());
            channel.send(workers[i]->address());
        }
        const unsigned first = static_cast<unsigned>(std::stoul(channel.receive()));
        for (unsigned i = 0; i < WORKERS; ++i) {
            Endpoint *center = workers[i]->connect(address);
            sources.push_back(std::make_unique<Buffer>(LENGTH, Data::FP32, first + i));
            targets.push_back(std::make_unique<Buffer>(LENGTH));
            requests.push_back(workers[i]->tag_receive(targets[i]->data(), LENGTH, first + i));
            requests.push_back(workers[i]->tag_send(center, sources[i]->data(), LENGTH, first + i));
        }
        const auto deadline = Clock::now() + Worker::PATIENCE;
        while (!channel.readable() && Clock::now() < deadline) {
            unsigned count = 0;
            for (auto &worker : workers) {
                count += worker->progress();
            }
            if (count == 0) {
                usleep(200); // five processes share the processors
            }
        }
        EXPECT_EQ("done", channel.receive());
        for (ucs_status_ptr_t request : requests) {
            EXPECT_EQ(UCS_OK, workers[0]->wait(request));
        }
        for (unsigned i = 0; i < WORKERS; ++i) {
            EXPECT_TRUE(targets[i]->holds(Data::BF16, first + i));
        }
        channel.send("done");
    };
    const bool ran = star.run_star(
            [=](std::vector<Channel> &channels) {
                Worker worker;
                std::vector<Endpoint *> peers;
                for (Channel &channel : channels) {
                    channel.send(worker.address());
                    for (unsigned i = 0; i < WORKERS; ++i) {
                        peers.push_back(worker.connect(channel.receive()));
                    }
                    channel.send(std::to_string(peers.size() - WORKERS));
                }
                std::vector<std::unique_ptr<Buffer>> sources, targets;
                std::vector<ucs_status_ptr_t> requests;
                for (unsigned i = 0; i < peers.size(); ++i) {
                    sources.push_back(std::make_unique<Buffer>(LENGTH, Data::BF16, i));
                    targets.push_back(std::make_unique<Buffer>(LENGTH));
                    requests.push_back(worker.tag_receive(targets[i]->data(), LENGTH, i));
                    requests.push_back(worker.tag_send(peers[i], sources[i]->data(), LENGTH, i));
                }
                for (ucs_status_ptr_t request : requests) {
                    EXPECT_EQ(UCS_OK, worker.wait(request));
                }
                for (unsigned i = 0; i < peers.size(); ++i) {
                    EXPECT_TRUE(targets[i]->holds(Data::FP32, i)) << "of worker " << i;
                }
                for (Channel &channel : channels) {
                    channel.send("done");
                }
                for (Channel &channel : channels) {
                    EXPECT_EQ("done", worker.serve(channel));
                }
            },
            std::vector<Processes::Part>(PROCESSES, other));
    if (ran) {
        EXPECT_EQ(LENGTH * PROCESSES * WORKERS, star.outcome(0).zip.put_bytes);
        EXPECT_EQ(LENGTH * PROCESSES * WORKERS, star.outcome(0).zip.received_bytes);
        EXPECT_EQ("", star.outcome(0).errors);
    }
}

// ---- faults

Env fault_env()
{
    return RENDEZVOUS + PEER_ERRORS;
}

bool has_ended(ucs_status_ptr_t request)
{
    return !UCS_PTR_IS_PTR(request) || ucp_request_check_status(request) != UCS_INPROGRESS;
}

// Sends a message and receives one at once. UCS_OK, or the first error; what was received without
// one is right. Whatever happens, this ends.
ucs_status_t trade(Worker &worker, Endpoint *peer, size_t length, ucp_tag_t tag, unsigned me)
{
    Buffer out(length, Data::BF16, 2 * tag + me), in(length, tag % 16);
    ucs_status_ptr_t receive = worker.tag_receive(in.data(), length, tag);
    ucs_status_ptr_t send = worker.tag_send(peer, out.data(), length, tag);
    worker.wait_until([&] { return (has_ended(send) && has_ended(receive)) || peer->errors > 0; },
                      milliseconds(15000));
    EXPECT_TRUE((has_ended(send) && has_ended(receive)) || peer->errors > 0)
            << "message " << tag << " neither ends nor fails";
    // what was under way with a peer ends with its endpoint; a receive that is not matched does not
    worker.wait_until([&] { return has_ended(send); }, milliseconds(3000));
    EXPECT_TRUE(has_ended(send)) << "message " << tag << " outlives its endpoint";
    worker.wait_until([&] { return has_ended(receive); }, milliseconds(300));
    if (!has_ended(receive)) {
        ucp_request_cancel(worker.get(), receive);
    }
    const ucs_status_t sent = worker.wait(send), received = worker.wait(receive);
    if (received == UCS_OK) {
        EXPECT_TRUE(in.holds(Data::BF16, 2 * tag + 1 - me)) << "message " << tag;
    }
    return sent != UCS_OK ? sent : received;
}

constexpr unsigned TRADES = 4;

size_t length_of_trade(unsigned i)
{
    return i == 0 ? 300000 : 6 * MIB;
}

// The side of a peer: trades until an endpoint fails, and then does what it is told: "again" is
// another connection, which must work.
void be_traded_with(Channel &channel, ucp_tag_t first_tag, bool may_fail)
{
    Worker worker;
    channel.send(worker.address());
    const std::string address = channel.receive();
    Endpoint *center = worker.connect(address, UCP_ERR_HANDLING_MODE_PEER);
    ucs_status_t status = UCS_OK;
    for (unsigned i = 0; i < TRADES && status == UCS_OK; ++i) {
        status = trade(worker, center, length_of_trade(i), first_tag + i, 1);
    }
    if (!may_fail) {
        EXPECT_EQ(UCS_OK, status);
        EXPECT_EQ(0u, center->errors);
    }
    printf("peer saw: %s\n", ucs_status_string(status));
    channel.send("over");
    for (unsigned i = 0; worker.serve(channel) == "again"; ++i) {
        worker.close(center, true);
        center = worker.connect(address, UCP_ERR_HANDLING_MODE_PEER);
        channel.send("connected");
        EXPECT_EQ(UCS_OK, trade(worker, center, MIB, first_tag + 1000 + i, 1));
    }
    worker.close(center, true);
}

enum class At { PEER, CENTER }; // whose device fails
enum class Then { RECOVERS, BREAKS, IS_GONE };

// Two peers that trade with the center. One device fails; where that is the first peer's, the other
// peer must notice nothing.
void run_fault(const Env &env, const std::string &fault, At at, Then then)
{
    SCOPED_TRACE(fault + (at == At::PEER ? " at the peer" : " at the center"));
    Processes star(env + fault_env());
    const unsigned faulty = at == At::PEER ? 1 : 0;
    star.timeout(45).env(faulty)["SWVERBS_FAULT"] = fault;
    star.env(faulty)["SWVERBS_LOG"] = "1";
    const bool recovers = then == Then::RECOVERS, own = at == At::CENTER;
    const auto start = Clock::now();
    const bool ran = star.run_star(
            [=](std::vector<Channel> &channels) {
                Worker worker;
                Endpoint *peers[2];
                std::string addresses[2];
                ucs_status_t status[2] = {UCS_OK, UCS_OK};
                for (unsigned i = 0; i < 2; ++i) {
                    channels[i].send(worker.address());
                    addresses[i] = channels[i].receive();
                }
                for (unsigned i = 0; i < 2; ++i) {
                    peers[i] = worker.connect(addresses[i], UCP_ERR_HANDLING_MODE_PEER);
                }
                for (unsigned i = 0; i < TRADES; ++i) {
                    for (unsigned j = 0; j < 2; ++j) {
                        if (status[j] == UCS_OK) {
                            status[j] = trade(worker, peers[j], length_of_trade(i), 100 * j + i, 0);
                        }
                    }
                }
                printf("center saw: %s and %s\n", ucs_status_string(status[0]),
                       ucs_status_string(status[1]));
                if (recovers) {
                    EXPECT_EQ(UCS_OK, status[0]);
                    EXPECT_EQ(0u, peers[0]->errors);
                } else {
                    EXPECT_TRUE(UCS_STATUS_IS_ERR(status[0]) ||
                                (own && UCS_STATUS_IS_ERR(status[1])));
                }
                if (!own || recovers) {
                    EXPECT_EQ(UCS_OK, status[1]);
                    EXPECT_EQ(0u, peers[1]->errors);
                }
                for (unsigned i = 0; i < 2; ++i) {
                    if (status[i] != UCS_OK) {
                        EXPECT_TRUE(worker.wait_until([&] { return peers[i]->errors > 0; },
                                                      milliseconds(8000)));
                        EXPECT_EQ(1u, peers[i]->errors);
                    }
                    EXPECT_EQ("over", worker.serve(channels[i]));
                    const bool reachable = then != Then::IS_GONE || (!own && i == 1);
                    if (reachable) {
                        channels[i].send("again");
                        EXPECT_EQ("connected", worker.serve(channels[i]));
                        worker.close(peers[i], true);
                        peers[i] = worker.connect(addresses[i], UCP_ERR_HANDLING_MODE_PEER);
                        EXPECT_EQ(UCS_OK, trade(worker, peers[i], MIB, 100 * i + 1000, 0));
                    }
                    worker.close(peers[i], true);
                    channels[i].send("end");
                }
            },
            {[=](Channel &channel) { be_traded_with(channel, 0, !recovers); },
             [=](Channel &channel) { be_traded_with(channel, 100, !recovers && own); }});
    if (ran) {
        EXPECT_LT(Clock::now() - start, std::chrono::seconds(20));
        EXPECT_NE(std::string::npos, star.outcome(faulty).log.find("]: fault ")) << "no fault";
    }
}

// While it connects, in the first message, in the middle of a large one.
constexpr const char *MOMENTS[] = {"ops=1", "bytes=100k", "bytes=4m"};

TEST_P(RcFaults, LinkThatStaysDownEndsWhatItCarries)
{
    for (const std::string moment : MOMENTS) {
        run_fault(env(), "link-down@" + moment, At::PEER, Then::IS_GONE);
    }
    run_fault(env(), "link-down@bytes=4m", At::CENTER, Then::IS_GONE);
}

TEST_P(RcFaults, LinkThatComesBackLosesNothing)
{
    for (const std::string moment : MOMENTS) {
        for (At at : {At::PEER, At::CENTER}) {
            run_fault(env({{"UCX_RC_RETRY_COUNT", "7"}}), "link-down@" + moment + ":100ms", at,
                      Then::RECOVERS);
        }
    }
}

TEST_P(RcFaults, DeviceThatStandsStillForAMomentLosesNothing)
{
    for (const std::string moment : MOMENTS) {
        run_fault(env({{"UCX_RC_RETRY_COUNT", "7"}}), "stall@" + moment + ":300ms", At::PEER,
                  Then::RECOVERS);
    }
}

TEST_P(RcFaults, PeerThatIsGoneEndsWhatIsUnderWay)
{
    for (const std::string moment : MOMENTS) {
        run_fault(env(), "peer-gone@" + moment, At::PEER, Then::IS_GONE);
    }
}

// Not while it connects: what connects is ud, whose errors end the process, as without zip.
TEST_P(RcFaults, ErrorsOfCompletionsEndTheirEndpointAlone)
{
    for (const std::string status : {"rem_access", "rem_op", "retry_exc", "loc_prot"}) {
        run_fault(env(), "error@bytes=100k:" + status, At::PEER, Then::BREAKS);
        run_fault(env(), "error@bytes=4m:" + status, At::CENTER, Then::BREAKS);
    }
}

// ---- death

// Sends, or receives, for ever.
void live_until_killed(Channel &channel)
{
    const bool sends = channel.receive() == "send";
    Worker worker;
    channel.send(worker.address());
    channel.send(std::to_string(getpid()));
    Endpoint *center = worker.connect(channel.receive(), UCP_ERR_HANDLING_MODE_PEER);
    Buffer data(4 * MIB, Data::BF16, 1);
    for (unsigned i = 0;; ++i) {
        worker.wait(sends ? worker.tag_send(center, data.data(), data.length(), 1)
                          : worker.tag_receive(data.data(), data.length(), 1));
    }
}

TEST_P(RcFaults, WhoeverIsKilledAtAnyMomentIsSurvived)
{
    constexpr unsigned VICTIMS = 12;
    Processes star(env(Env{{"UCX_UD_TIMEOUT", "1s"}} + fault_env()));
    std::vector<Processes::Part> others{
            [](Channel &channel) { be_traded_with(channel, 0, false); }};
    for (unsigned i = 0; i < VICTIMS; ++i) {
        others.push_back(live_until_killed);
        star.may_die(1 + i + 1);
    }
    star.timeout(100);
    const bool ran = star.run_star(
            [](std::vector<Channel> &channels) {
                Worker worker;
                channels[0].send(worker.address());
                const std::string fresh_address = channels[0].receive();
                Endpoint *fresh = worker.connect(fresh_address, UCP_ERR_HANDLING_MODE_PEER);
                for (unsigned i = 0; i < TRADES; ++i) {
                    EXPECT_EQ(UCS_OK, trade(worker, fresh, length_of_trade(i), i, 0));
                }
                EXPECT_EQ("over", worker.serve(channels[0]));
                uint64_t random = 12345;
                for (unsigned i = 0; i < VICTIMS; ++i) {
                    const bool sends = i % 2 == 0; // the victim
                    random = random * 6364136223846793005u + 1442695040888963407u;
                    // while it connects, or from the first message on
                    const bool connects = i % 3 == 0;
                    const std::chrono::microseconds moment((random >> 33) %
                                                           (connects ? 100000 : 20000));
                    SCOPED_TRACE(testing::Message()
                                 << "victim " << i << " after " << moment.count() << " us");
                    channels[1 + i].send(sends ? "send" : "receive");
                    const std::string address = worker.serve(channels[1 + i]);
                    const pid_t pid = std::stoi(channels[1 + i].receive());
                    channels[1 + i].send(worker.address());
                    Endpoint *victim = worker.connect(address, UCP_ERR_HANDLING_MODE_PEER);
                    auto from = Clock::now();
                    bool killed = false;
                    unsigned messages = 0; // that arrived
                    Buffer data(4 * MIB, Data::BF16, 1);
                    for (ucs_status_t status = UCS_OK; status == UCS_OK;) {
                        ucs_status_ptr_t request =
                                sends ? worker.tag_receive(data.data(), data.length(), 1)
                                      : worker.tag_send(victim, data.data(), data.length(), 1);
                        worker.wait_until(
                                [&] {
                                    if (!killed && (connects || messages > 0) &&
                                        Clock::now() - from >= moment) {
                                        kill(pid, SIGKILL);
                                        killed = true;
                                    }
                                    return has_ended(request) || victim->errors > 0;
                                },
                                milliseconds(15000));
                        EXPECT_TRUE(has_ended(request) || victim->errors > 0);
                        worker.wait_until([&] { return has_ended(request); },
                                          milliseconds(sends ? 300 : 3000));
                        if (sends && !has_ended(request)) {
                            ucp_request_cancel(worker.get(), request); // it was not matched
                        }
                        status = worker.wait(request);
                        if (status == UCS_OK && ++messages == 1 && !connects) {
                            from = Clock::now();
                        }
                        if (sends && status == UCS_OK) {
                            EXPECT_TRUE(data.holds(Data::BF16, 1));
                        }
                    }
                    EXPECT_TRUE(killed) << "an error before the death";
                    EXPECT_TRUE(worker.wait_until([&] { return victim->errors > 0; },
                                                  milliseconds(8000)));
                    EXPECT_EQ(1u, victim->errors);
                    const auto took = std::chrono::duration_cast<milliseconds>(Clock::now() - from);
                    printf("victim %u, %s, killed after %ld us and %u messages: error after %ld "
                           "ms\n",
                           i, sends ? "sender" : "receiver", long(moment.count()), messages,
                           long(took.count()));
                    worker.close(victim, true);

                    channels[0].send("again");
                    EXPECT_EQ("connected", worker.serve(channels[0]));
                    worker.close(fresh, true);
                    fresh = worker.connect(fresh_address, UCP_ERR_HANDLING_MODE_PEER);
                    EXPECT_EQ(UCS_OK, trade(worker, fresh, MIB, 1000 + i, 0));
                }
                channels[0].send("end");
                worker.close(fresh, true);
            },
            others);
    if (ran) {
        for (unsigned i = 0; i < VICTIMS; ++i) {
            EXPECT_EQ(SIGKILL, star.outcome(1 + i + 1).signal);
        }
    }
}

// ---- settings

// Some messages from the first to the second; the time until the first error, or all are there.
milliseconds send_some(Processes &pair, unsigned count, size_t length, bool must_fail = false)
{
    const bool ran = pair.run(
            [=](Channel &channel) {
                Worker worker;
                Endpoint *to = worker.connect(channel.receive(), UCP_ERR_HANDLING_MODE_PEER);
                const std::string key = channel.receive();
                const Target target(to, key, channel.receive());
                Buffer source(length, Data::BF16, 1);
                EXPECT_EQ(UCS_OK, worker.wait(put(to, source.data(), length, target)));
                EXPECT_EQ(UCS_OK, worker.flush(to));
                const auto start = Clock::now();
                ucs_status_t status = UCS_OK;
                for (unsigned i = 1; i < count && status == UCS_OK; ++i) {
                    worker.wait(put(to, source.data(), length, target));
                    status = worker.flush(to);
                }
                EXPECT_EQ(must_fail, status != UCS_OK) << ucs_status_string(status);
                printf("took %ld ms\n",
                       long(std::chrono::duration_cast<milliseconds>(Clock::now() - start)
                                    .count()));
                channel.send("over");
                worker.serve(channel);
                worker.close(to, true);
            },
            [=](Channel &channel) {
                Worker worker;
                channel.send(worker.address());
                Buffer data(length);
                Window window(worker, data.data(), length);
                channel.send(window.key());
                channel.send(pack_address(data.data()));
                worker.serve(channel);
                EXPECT_TRUE(data.holds(Data::BF16, 1));
                channel.send("seen");
            });
    long took = -1;
    if (ran) {
        const size_t at = pair.outcome(0).log.find("took ");
        EXPECT_NE(std::string::npos, at);
        sscanf(pair.outcome(0).log.c_str() + (at == std::string::npos ? 0 : at), "took %ld", &took);
    }
    return milliseconds(took);
}

// UCX_RC_VERBS_SEG_SIZE bounds messages, and so what zip sends inside one.
TEST_P(RcSettings, SegmentSizeOfRcBoundsMessages)
{
    constexpr unsigned COUNT = 10;
    constexpr size_t LENGTH = 3000;
    Processes standard(env());
    send_some(standard, COUNT, LENGTH);
    Processes small(env({{"UCX_RC_VERBS_SEG_SIZE", "2048"}}));
    send_some(small, COUNT, LENGTH);
    if (!Processes::is_part()) {
        EXPECT_EQ(COUNT * LENGTH, standard.outcome(0).zip.wire_bytes);
        EXPECT_EQ(COUNT * LENGTH, small.outcome(0).zip.put_bytes);
        EXPECT_GT(small.outcome(0).zip.wire_bytes, COUNT * LENGTH) << "inside the message";
    }
}

// UCX_RC_TIMEOUT and UCX_RC_RETRY_COUNT say when a peer that does not answer is given up.
TEST_P(RcSettings, TimeoutsOfRcAreKept)
{
    const auto time_with = [](const char *timeout, const char *retries) {
        Processes pair(env({{"UCX_RC_TIMEOUT", timeout},
                            {"UCX_RC_RETRY_COUNT", retries},
                            {"UCX_KEEPALIVE_INTERVAL", "60s"},
                            {"UCX_UD_TIMEOUT", "30s"}}));
        pair.env(0)["SWVERBS_FAULT"] = "link-down@bytes=2m:10s";
        return send_some(pair, 20, MIB, true);
    };
    const milliseconds quick = time_with("20ms", "1"); // what a card makes of it: 17 ms twice
    const milliseconds slow = time_with("200ms", "7"); // 268 ms eight times
    if (!Processes::is_part()) {
        EXPECT_GE(quick.count(), 25);
        EXPECT_LT(quick.count(), 1500);
        EXPECT_GE(slow.count(), 2000);
        EXPECT_LT(slow.count(), 6000);
    }
}

// Where UCX cannot use the device because of a setting, zip takes the next transport.
TEST_P(RcSettings, ADeviceThatUcxRefusesIsNotUsed)
{
    const Env both = {{"UCX_TLS", "zip,rc_verbs,ud_verbs,tcp"},
                      {"UCX_NET_DEVICES", "swverbs0:1,lo"}};
    Processes on_rc(env(both));
    send_some(on_rc, 3, MIB);
    Processes refused(env(both + Env{{"UCX_IB_GID_INDEX", "99"}}));
    send_some(refused, 3, MIB);
    if (!Processes::is_part()) {
        EXPECT_NE(std::string::npos, on_rc.outcome(0).log.find("zip/rc_verbs: sent"));
        EXPECT_NE(std::string::npos, refused.outcome(0).log.find("zip/tcp: sent"))
                << refused.outcome(0).log;
        EXPECT_EQ(3 * MIB, refused.outcome(0).zip.put_bytes);
    }
}

// However much is sent.
TEST_P(RcSettings, NoMoreIsRegisteredThanTheStagingSize)
{
    for (unsigned count : {1, 40}) {
        Processes pair(env({{"UCX_ZIP_HOST_STAGING_SIZE", "8m"}}));
        send_some(pair, count, 4 * MIB);
        for (unsigned part = 0; part < 2 && !Processes::is_part(); ++part) {
            const uint64_t bytes = pair.outcome(part).zip.registered_bytes;
            EXPECT_GT(bytes, 0u);
            EXPECT_LE(bytes, 8 * MIB) << pair.outcome(part).log;
        }
    }
}

#define INSTANTIATE(suite)                                                                         \
    INSTANTIATE_TEST_SUITE_P(Over, suite, testing::ValuesIn(rc_wires()),                           \
                             [](const auto &wire) { return wire.param.name; })
INSTANTIATE(RcOrder);
INSTANTIATE(RcRails);
INSTANTIATE(RcQueues);
INSTANTIATE(RcFaults);
INSTANTIATE(RcSettings);

} // namespace
} // namespace zip::test
