// SPDX-License-Identifier: BSD-3-Clause
// What the plugin is for: data of every size and kind crosses two processes unchanged, by every UCP
// operation that uses it, and does go through zip.
#include "ucx_pair.h"

#include <cstring>
#include <thread>

namespace zip::test {
namespace {

constexpr size_t KIB = 1024, MIB = 1024 * KIB;

const std::vector<size_t> SIZES = {0,
                                   1,
                                   7,
                                   1023,
                                   4095,
                                   4096,
                                   4097,
                                   16 * KIB - 1,
                                   16 * KIB,
                                   16 * KIB + 1,
                                   64 * KIB - 1,
                                   64 * KIB,
                                   64 * KIB + 1,
                                   128 * KIB - 1,
                                   128 * KIB,
                                   128 * KIB + 1,
                                   MIB - 1,
                                   MIB,
                                   MIB + 1,
                                   3 * MIB + 5,
                                   64 * MIB};

// One message of every size, kinds and alignments in turn; sizes that matter most in every kind.
struct Message {
    size_t length;
    Data data;
    size_t misalignment;
};

std::vector<Message> messages()
{
    std::vector<Message> all;
    for (size_t length : SIZES) {
        for (Data data : ALL_DATA) {
            const bool in_every_kind = length >= 16 * KIB && length <= 3 * MIB + 5;
            if (in_every_kind || data == ALL_DATA[length == 64 * MIB ? 0 : all.size() % 4]) {
                all.push_back({length, data, all.size() % 5 == 0 ? 0 : all.size() % 16});
            }
            if (!in_every_kind && !all.empty() && all.back().length == length) {
                break;
            }
        }
    }
    return all;
}

uint64_t total(const std::vector<Message> &list)
{
    uint64_t sum = 0;
    for (const Message &message : list) {
        sum += message.length;
    }
    return sum;
}

// All sizes by rendezvous.
const Env RENDEZVOUS = {{"UCX_RNDV_THRESH", "0"}, {"UCX_RNDV_SCHEME", "put_zcopy"}};

class Transport : public testing::TestWithParam<Wire> {
protected:
    Env env(const Env &more = RENDEZVOUS) const { return GetParam().env + more; }
};

TEST_P(Transport, TagMessagesArriveBitForBit)
{
    const std::vector<Message> list = messages();
    Processes pair(env());
    pair.run(
            [&](Channel &channel) {
                Worker worker;
                Endpoint *to = worker.connect(channel.receive());
                for (size_t i = 0; i < list.size(); ++i) {
                    Buffer source(list[i].length, list[i].data, i, list[i].misalignment);
                    EXPECT_EQ(UCS_OK,
                              worker.wait(worker.tag_send(to, source.data(), list[i].length, i)));
                    EXPECT_TRUE(source.holds(list[i].data, i)) << "the source was changed";
                }
                channel.receive();
                EXPECT_EQ(UCS_OK, worker.close(to));
                channel.send("closed");
            },
            [&](Channel &channel) {
                Worker worker;
                channel.send(worker.address());
                for (size_t i = 0; i < list.size(); ++i) {
                    Buffer target(list[i].length, (list[i].misalignment * 7) % 16);
                    EXPECT_EQ(UCS_OK,
                              worker.wait(worker.tag_receive(target.data(), list[i].length, i)));
                    EXPECT_TRUE(target.holds(list[i].data, i))
                            << "message " << i << " of " << list[i].length << " bytes";
                }
                channel.send("all here");
                worker.serve(channel);
            });
    EXPECT_GE(pair.outcome(0).zip.put_bytes, total(list) * 99 / 100);
    EXPECT_EQ(pair.outcome(0).zip.put_bytes, pair.outcome(1).zip.received_bytes);
    EXPECT_EQ(0u, pair.outcome(1).zip.refused);
    EXPECT_LT(pair.outcome(0).zip.wire_bytes, total(list) * 9 / 10) << "not compressed";
    EXPECT_EQ("", pair.outcome(0).errors);
    EXPECT_EQ("", pair.outcome(1).errors);
}

struct AmTarget {
    Worker *worker = nullptr;
    std::vector<std::unique_ptr<Buffer>> buffers;
    std::vector<ucs_status_ptr_t> requests;
    size_t arrived = 0;
};

ucs_status_t on_active_message(void *arg, const void *header, size_t header_length, void *data,
                               size_t length, const ucp_am_recv_param_t *param)
{
    auto *target = static_cast<AmTarget *>(arg);
    size_t index = 0;
    EXPECT_EQ(sizeof(index), header_length);
    memcpy(&index, header, sizeof(index));
    target->buffers[index] = std::make_unique<Buffer>(length, index % 16);
    ++target->arrived;
    if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0) {
        const ucp_request_param_t none = {};
        target->requests.push_back(ucp_am_recv_data_nbx(
                target->worker->get(), data, target->buffers[index]->data(), length, &none));
    } else if (length > 0) {
        memcpy(target->buffers[index]->data(), data, length);
    }
    return UCS_OK;
}

TEST_P(Transport, ActiveMessagesArriveBitForBit)
{
    const std::vector<Message> list = messages();
    Processes pair(env());
    pair.run(
            [&](Channel &channel) {
                Worker worker;
                Endpoint *to = worker.connect(channel.receive());
                for (size_t i = 0; i < list.size(); ++i) {
                    Buffer source(list[i].length, list[i].data, i, list[i].misalignment);
                    ucp_request_param_t param = {};
                    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
                    param.flags = UCP_AM_SEND_FLAG_RNDV;
                    EXPECT_EQ(UCS_OK,
                              worker.wait(ucp_am_send_nbx(to->ep, 7, &i, sizeof(i), source.data(),
                                                          list[i].length, &param)));
                }
                channel.receive();
                EXPECT_EQ(UCS_OK, worker.close(to));
                channel.send("closed");
            },
            [&](Channel &channel) {
                Worker worker;
                AmTarget target;
                target.worker = &worker;
                target.buffers.resize(list.size());
                ucp_am_handler_param_t handler = {};
                handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                                     UCP_AM_HANDLER_PARAM_FIELD_ARG;
                handler.id = 7;
                handler.cb = on_active_message;
                handler.arg = &target;
                ASSERT_EQ(UCS_OK, ucp_worker_set_am_recv_handler(worker.get(), &handler));
                channel.send(worker.address());
                EXPECT_TRUE(worker.wait_until([&] { return target.arrived == list.size(); }));
                for (ucs_status_ptr_t request : target.requests) {
                    EXPECT_EQ(UCS_OK, worker.wait(request));
                }
                for (size_t i = 0; i < list.size(); ++i) {
                    ASSERT_TRUE(target.buffers[i]);
                    ASSERT_EQ(list[i].length, target.buffers[i]->length());
                    EXPECT_TRUE(target.buffers[i]->holds(list[i].data, i)) << "message " << i;
                }
                channel.send("all here");
                worker.serve(channel);
            });
    EXPECT_GE(pair.outcome(0).zip.put_bytes, total(list) * 99 / 100);
    EXPECT_EQ(pair.outcome(0).zip.put_bytes, pair.outcome(1).zip.received_bytes);
}

// Each put is followed by a flush, of the endpoint and of the worker in turn, and looked at there
// only then: a flush that ends early is found.
TEST_P(Transport, PutsAreThereWhenFlushEnds)
{
    const std::vector<Message> list = messages();
    Processes pair(env({}));
    pair.run(
            [&](Channel &channel) {
                Worker worker;
                Endpoint *to = worker.connect(channel.receive());
                for (size_t i = 0; i < list.size(); ++i) {
                    const std::string key = channel.receive(), where = channel.receive();
                    uint64_t address;
                    memcpy(&address, where.data(), sizeof(address));
                    ucp_rkey_h rkey;
                    ASSERT_EQ(UCS_OK, ucp_ep_rkey_unpack(to->ep, key.data(), &rkey));
                    Buffer source(list[i].length, list[i].data, i, list[i].misalignment);
                    const ucp_request_param_t param = {};
                    ucs_status_ptr_t put = ucp_put_nbx(to->ep, source.data(), list[i].length,
                                                       address, rkey, &param);
                    EXPECT_EQ(UCS_OK, i % 2 == 0 ? worker.flush(to) : worker.flush());
                    channel.send("flushed");
                    EXPECT_EQ(UCS_OK, worker.wait(put));
                    EXPECT_TRUE(source.holds(list[i].data, i)) << "the source was changed";
                    ucp_rkey_destroy(rkey);
                }
                channel.receive();
                EXPECT_EQ(UCS_OK, worker.close(to));
                channel.send("closed");
            },
            [&](Channel &channel) {
                Worker worker;
                channel.send(worker.address());
                for (size_t i = 0; i < list.size(); ++i) {
                    Buffer target(list[i].length, (list[i].misalignment * 7) % 16);
                    char nothing;
                    Window window(worker, list[i].length > 0 ? target.data() : &nothing,
                                  std::max<size_t>(list[i].length, 1));
                    const auto address = reinterpret_cast<uint64_t>(target.data());
                    channel.send(window.key());
                    channel.send(std::string(reinterpret_cast<const char *>(&address), 8));
                    EXPECT_EQ("flushed", worker.serve(channel));
                    EXPECT_TRUE(target.holds(list[i].data, i))
                            << "put " << i << " of " << list[i].length << " bytes";
                }
                channel.send("all here");
                worker.serve(channel);
            });
    EXPECT_GE(pair.outcome(0).zip.put_bytes, total(list) * 99 / 100);
    EXPECT_EQ(pair.outcome(0).zip.put_bytes, pair.outcome(1).zip.received_bytes);
}

// Runs `count` messages each way at once, all posted before the first is waited for.
void exchange(Worker &worker, Endpoint *peer, unsigned me, size_t count, size_t length,
              size_t max_misalignment)
{
    std::vector<std::unique_ptr<Buffer>> sources, targets;
    std::vector<ucs_status_ptr_t> requests;
    const auto length_of = [length](size_t i) { return length + 3001 * (i % 7); };
    const auto data_of = [](size_t i) { return ALL_DATA[i % 3]; };
    for (size_t i = 0; i < count; ++i) {
        targets.push_back(std::make_unique<Buffer>(length_of(i), i % (max_misalignment + 1)));
        requests.push_back(worker.tag_receive(targets[i]->data(), length_of(i), i));
    }
    for (size_t i = 0; i < count; ++i) {
        sources.push_back(std::make_unique<Buffer>(length_of(i), data_of(i), 2 * i + me,
                                                   (i + 1) % (max_misalignment + 1)));
        requests.push_back(worker.tag_send(peer, sources[i]->data(), length_of(i), i));
    }
    for (ucs_status_ptr_t request : requests) {
        EXPECT_EQ(UCS_OK, worker.wait(request));
    }
    for (size_t i = 0; i < count; ++i) {
        EXPECT_TRUE(targets[i]->holds(data_of(i), 2 * i + 1 - me)) << "message " << i;
    }
}

struct Exchange {
    size_t count = 100;
    size_t length = 250000;
    size_t misalignment = 15;
    ucp_err_handling_mode_t mode = UCP_ERR_HANDLING_MODE_NONE;
    uint64_t features = Worker::FEATURES;
};

void run_exchange(Processes &pair, const Exchange &what)
{
    const auto half = [&what](unsigned me) {
        return [&what, me](Channel &channel) {
            Worker worker(what.features);
            channel.send(worker.address());
            Endpoint *peer = worker.connect(channel.receive(), what.mode);
            exchange(worker, peer, me, what.count, what.length, what.misalignment);
            channel.send("done");
            worker.serve(channel);
            EXPECT_EQ(0u, peer->errors);
            // one after the other, for the one that is closed sees an error
            if (me == 0) {
                EXPECT_EQ(UCS_OK, worker.close(peer));
                channel.send("closed");
                worker.serve(channel);
            } else {
                worker.serve(channel);
                worker.close(peer, what.mode == UCP_ERR_HANDLING_MODE_PEER);
                channel.send("closed");
            }
        };
    };
    if (!pair.run(half(0), half(1))) {
        return;
    }
    for (unsigned part = 0; part < 2; ++part) {
        const uint64_t bytes = what.count * what.length;
        EXPECT_GE(pair.outcome(part).zip.put_bytes, bytes) << pair.outcome(part).log;
        EXPECT_EQ(pair.outcome(part).zip.put_bytes, pair.outcome(1 - part).zip.received_bytes);
    }
}

TEST_P(Transport, ManyMessagesCrossAtOnceInBothDirections)
{
    Processes pair(env());
    run_exchange(pair, {});
}

TEST_P(Transport, ManySmallMessagesCrossAtOnceInBothDirections)
{
    Processes pair(env());
    run_exchange(pair, {.count = 1500, .length = 1000});
}

TEST_P(Transport, WorksWithPeerErrorHandling)
{
    Processes pair(env(RENDEZVOUS + PEER_ERRORS));
    run_exchange(pair, {.count = 30, .mode = UCP_ERR_HANDLING_MODE_PEER});
}

TEST_P(Transport, StagingOfMinimalSizeIsEnough)
{
    for (const char *segment : {"4k", "128k"}) {
        const bool small = segment[0] == '4';
        Processes pair(
                env(RENDEZVOUS + Env{{"UCX_ZIP_SEG_SIZE", segment},
                                     {"UCX_ZIP_HOST_STAGING_SIZE", small ? "128k" : "1700k"}}));
        run_exchange(pair, {.count = 40, .length = small ? 40000u : 400000u});
    }
}

TEST_P(Transport, EverySegmentSizeWorks)
{
    for (const char *segment : {"4k", "5001", "64k", "1m"}) {
        Processes pair(env(RENDEZVOUS + Env{{"UCX_ZIP_SEG_SIZE", segment}}));
        run_exchange(pair, {.count = 5, .length = 1500000});
    }
}

TEST_P(Transport, PeersMayDifferInSegmentAndStagingSize)
{
    Processes pair(env());
    pair.env(0)["UCX_ZIP_SEG_SIZE"] = "300k";
    pair.env(1)["UCX_ZIP_SEG_SIZE"] = "10k";
    pair.env(1)["UCX_ZIP_HOST_STAGING_SIZE"] = "300k";
    run_exchange(pair, {.count = 20, .length = 500000});
}

TEST_P(Transport, EachElementTypeOptionCarriesAnyData)
{
    for (const char *dtype : {"bf16", "fp32", "fp16", "fp64", "e4m3", "e5m2", "none"}) {
        Processes pair(env(RENDEZVOUS + Env{{"UCX_ZIP_DTYPE", dtype}}));
        run_exchange(pair, {.count = 12, .length = 200003});
    }
}

TEST_P(Transport, SleepersAreWokenUp)
{
    Processes pair(env());
    run_exchange(pair,
                 {.count = 300, .length = 1000, .features = Worker::FEATURES | UCP_FEATURE_WAKEUP});
    Processes narrow(
            env(RENDEZVOUS + Env{{"UCX_POSIX_FIFO_SIZE", "16"}, {"UCX_SYSV_FIFO_SIZE", "16"}}));
    run_exchange(
            narrow,
            {.count = 1000, .length = 1000, .features = Worker::FEATURES | UCP_FEATURE_WAKEUP});
    Processes large(env());
    run_exchange(large, {.count = 40, .features = Worker::FEATURES | UCP_FEATURE_WAKEUP});
}

TEST_P(Transport, SleepingTargetOfAPutIsWokenUp)
{
    constexpr size_t LENGTH = 1000003;
    constexpr unsigned ROUNDS = 10;
    Processes pair(env({}));
    pair.run(
            [&](Channel &channel) {
                Worker worker(Worker::FEATURES | UCP_FEATURE_WAKEUP);
                Endpoint *to = worker.connect(channel.receive());
                const std::string key = channel.receive(), where = channel.receive();
                uint64_t address;
                memcpy(&address, where.data(), sizeof(address));
                ucp_rkey_h rkey;
                ASSERT_EQ(UCS_OK, ucp_ep_rkey_unpack(to->ep, key.data(), &rkey));
                for (unsigned round = 0; round < ROUNDS; ++round) {
                    Buffer source(LENGTH, Data::BF16, round);
                    const ucp_request_param_t param = {};
                    ucs_status_ptr_t put =
                            ucp_put_nbx(to->ep, source.data(), LENGTH, address, rkey, &param);
                    EXPECT_EQ(UCS_OK, worker.flush(to));
                    EXPECT_EQ(UCS_OK, worker.wait(put));
                    channel.send("flushed");
                    channel.receive();
                }
                ucp_rkey_destroy(rkey);
                EXPECT_EQ(UCS_OK, worker.close(to));
                channel.send("closed");
            },
            [&](Channel &channel) {
                Worker worker(Worker::FEATURES | UCP_FEATURE_WAKEUP);
                channel.send(worker.address());
                Buffer target(LENGTH, 3);
                Window window(worker, target.data(), LENGTH);
                const auto address = reinterpret_cast<uint64_t>(target.data());
                channel.send(window.key());
                channel.send(std::string(reinterpret_cast<const char *>(&address), 8));
                for (unsigned round = 0; round < ROUNDS; ++round) {
                    worker.serve(channel);
                    EXPECT_TRUE(target.holds(Data::BF16, round));
                    channel.send("next");
                }
                worker.serve(channel);
            });
    EXPECT_EQ(LENGTH * ROUNDS, pair.outcome(0).zip.put_bytes);
}

// All posted before the first is waited for; each put has a place of its own.
// At least `least` bytes of them are zip's.
void run_puts(Processes &pair, unsigned count, const std::function<size_t(unsigned)> &length_of,
              uint64_t least)
{
    size_t all = 0;
    for (unsigned i = 0; i < count; ++i) {
        all += length_of(i);
    }
    const bool ran = pair.run(
            [&](Channel &channel) {
                Worker worker;
                Endpoint *to = worker.connect(channel.receive());
                const std::string key = channel.receive(), where = channel.receive();
                uint64_t address;
                memcpy(&address, where.data(), sizeof(address));
                ucp_rkey_h rkey;
                ASSERT_EQ(UCS_OK, ucp_ep_rkey_unpack(to->ep, key.data(), &rkey));
                Buffer source(all, Data::BF16, 1);
                std::vector<ucs_status_ptr_t> requests;
                size_t offset = 0;
                for (unsigned i = 0; i < count; ++i) {
                    const ucp_request_param_t param = {};
                    requests.push_back(ucp_put_nbx(to->ep, source.data() + offset, length_of(i),
                                                   address + offset, rkey, &param));
                    offset += length_of(i);
                }
                EXPECT_EQ(UCS_OK, worker.flush(to));
                channel.send("flushed");
                unsigned failed = 0;
                for (ucs_status_ptr_t request : requests) {
                    failed += worker.wait(request) != UCS_OK;
                }
                EXPECT_EQ(0u, failed);
                ucp_rkey_destroy(rkey);
                worker.serve(channel);
            },
            [&](Channel &channel) {
                Worker worker;
                channel.send(worker.address());
                Buffer data(all);
                Window window(worker, data.data(), all);
                channel.send(window.key());
                const auto address = reinterpret_cast<uint64_t>(data.data());
                channel.send(std::string(reinterpret_cast<const char *>(&address), 8));
                worker.serve(channel);
                EXPECT_TRUE(data.holds(Data::BF16, 1));
                channel.send("seen");
            });
    if (ran) {
        EXPECT_GE(pair.outcome(0).zip.put_bytes, least);
        EXPECT_EQ(pair.outcome(0).zip.put_bytes, pair.outcome(1).zip.received_bytes);
        EXPECT_EQ("", pair.outcome(0).errors);
        EXPECT_EQ("", pair.outcome(1).errors);
    }
}

TEST_P(Transport, AThousandSmallPutsArePostedWithoutWaiting)
{
    Processes pair(env({}));
    // the shortest of them take rc's own lane
    run_puts(
            pair, 1000, [](unsigned i) { return 8 + i * 7919u % (8 * KIB - 7); }, 2 * MIB);
}

TEST_P(Transport, TwoHundredPutsOf64KiBArePostedWithoutWaiting)
{
    Processes pair(env({}));
    run_puts(
            pair, 200, [](unsigned) { return 64 * KIB; }, 200 * 64 * KIB);
}

TEST_P(Transport, TwoThreadsShareAWorker)
{
    static constexpr size_t COUNT = 40, LENGTH = 300000;
    Processes pair(env());
    const auto half = [](unsigned me) {
        return [me](Channel &channel) {
            Worker worker(Worker::FEATURES, UCS_THREAD_MODE_MULTI);
            channel.send(worker.address());
            Endpoint *peer = worker.connect(channel.receive());
            const auto one_thread = [&](unsigned thread) {
                for (size_t i = 0; i < COUNT; i += 4) {
                    std::vector<std::unique_ptr<Buffer>> sources, targets;
                    std::vector<ucs_status_ptr_t> requests;
                    for (size_t j = 0; j < 4; ++j) {
                        const uint64_t tag = thread << 16 | (i + j);
                        targets.push_back(std::make_unique<Buffer>(LENGTH, j));
                        requests.push_back(worker.tag_receive(targets[j]->data(), LENGTH, tag));
                        sources.push_back(
                                std::make_unique<Buffer>(LENGTH, Data::BF16, tag << 1 | me));
                        requests.push_back(worker.tag_send(peer, sources[j]->data(), LENGTH, tag));
                    }
                    for (ucs_status_ptr_t request : requests) {
                        EXPECT_EQ(UCS_OK, worker.wait(request));
                    }
                    for (size_t j = 0; j < 4; ++j) {
                        const uint64_t tag = thread << 16 | (i + j);
                        EXPECT_TRUE(targets[j]->holds(Data::BF16, tag << 1 | (1 - me)));
                    }
                }
            };
            std::thread other(one_thread, 1);
            one_thread(0);
            other.join();
            channel.send("done");
            worker.serve(channel);
            worker.close(peer);
            channel.send("closed");
            worker.serve(channel);
        };
    };
    pair.run(half(0), half(1));
    EXPECT_GE(pair.outcome(0).zip.put_bytes, 2 * COUNT * LENGTH);
    EXPECT_GE(pair.outcome(1).zip.put_bytes, 2 * COUNT * LENGTH);
}

TEST_P(Transport, AWorkerMayBeConnectedToItself)
{
    Processes alone(env());
    alone.run([](Channel &) {
        Worker worker;
        Endpoint *self = worker.connect(worker.address());
        for (size_t i = 0; i < 5; ++i) {
            Buffer source(MIB + i, Data::BF16, i, i), target(MIB + i, i + 1);
            ucs_status_ptr_t receive = worker.tag_receive(target.data(), MIB + i, i);
            ucs_status_ptr_t send = worker.tag_send(self, source.data(), MIB + i, i);
            EXPECT_EQ(UCS_OK, worker.wait(send));
            EXPECT_EQ(UCS_OK, worker.wait(receive));
            EXPECT_TRUE(target.holds(Data::BF16, i));
        }
        EXPECT_EQ(UCS_OK, worker.close(self));
    });
    EXPECT_GE(alone.outcome(0).zip.put_bytes, 5 * MIB) << alone.outcome(0).log;
    EXPECT_GE(alone.outcome(0).zip.received_bytes, 5 * MIB);
}

INSTANTIATE_TEST_SUITE_P(Over, Transport, testing::ValuesIn(all_wires()),
                         [](const auto &wire) { return wire.param.name; });

} // namespace
} // namespace zip::test
