// SPDX-License-Identifier: BSD-3-Clause
// Peers without zip are served without it, and peers that die or stand still do no harm.
#include "ucx_pair.h"

#include <dirent.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <thread>

namespace zip::test {
namespace {

constexpr size_t MIB = 1024 * 1024;
using std::chrono::milliseconds;

// ---- peers without zip

// Some messages each way, of all sizes that matter.
void run_plain(Processes &pair)
{
    const auto half = [](unsigned me) {
        return [me](Channel &channel) {
            Worker worker;
            channel.send(worker.address());
            Endpoint *peer = worker.connect(channel.receive());
            for (size_t length : {size_t(1), size_t(20000), 3 * MIB + 5}) {
                Buffer source(length, Data::BF16, me, 3), target(length, 5);
                ucs_status_ptr_t receive = worker.tag_receive(target.data(), length, length);
                ucs_status_ptr_t send = worker.tag_send(peer, source.data(), length, length);
                EXPECT_EQ(UCS_OK, worker.wait(send));
                EXPECT_EQ(UCS_OK, worker.wait(receive));
                EXPECT_TRUE(target.holds(Data::BF16, 1 - me));
            }
            channel.send("done");
            worker.serve(channel);
        };
    };
    pair.run(half(0), half(1));
}

void expect_no_zip(const Processes &pair)
{
    for (unsigned part = 0; part < 2; ++part) {
        EXPECT_EQ(0u, pair.outcome(part).zip.interfaces) << pair.outcome(part).log;
        EXPECT_EQ("", pair.outcome(part).errors);
    }
}

const Env TCP = {{"UCX_TLS", "zip,tcp"}};

class FallBack : public testing::TestWithParam<Wire> {
protected:
    Env env() const { return GetParam().env; }
};

TEST_P(FallBack, BothPeersHaveZip) // what the others are compared with
{
    Processes pair(env());
    run_plain(pair);
    for (unsigned part = 0; part < 2; ++part) { // UCX may put or get, as it likes
        const ZipCounters &zip = pair.outcome(part).zip;
        EXPECT_GE(zip.put_bytes + zip.get_bytes, 3 * MIB);
    }
}

TEST_P(FallBack, PeerHasNoPlugin)
{
    Processes pair(env());
    pair.env(1)["UCX_PLUGIN_PATH"] = "";
    run_plain(pair);
    expect_no_zip(pair);
}

TEST_P(FallBack, PeerDoesNotServeHostMemory)
{
    Processes pair(env());
    pair.env(1)["UCX_ZIP_MEM_TYPES"] = "rocm";
    run_plain(pair);
    expect_no_zip(pair);
    EXPECT_NE(std::string::npos, pair.outcome(1).log.find("UCX_ZIP_MEM_TYPES=host"))
            << "no hint: " << pair.outcome(1).log;
}

TEST_P(FallBack, PeerIsOnAnotherTransport)
{
    const std::string own = GetParam().transport, other = own == "tcp" ? "posix" : "tcp";
    Env both = env();
    both["UCX_TLS"] += "," + other;
    both["UCX_NET_DEVICES"] = own == "tcp" ? "lo" : GetParam().device + std::string(",lo");
    Processes pair(both);
    pair.env(0)["UCX_ZIP_TLS"] = own;
    pair.env(1)["UCX_ZIP_TLS"] = other;
    run_plain(pair);
    expect_no_zip(pair);
}

// For every option a value that cannot work, and what is said about it.
TEST_P(FallBack, OptionsThatCannotWorkAreNamed)
{
    Env options = {{"UCX_ZIP_SEG_SIZE", "100"},
                   {"UCX_ZIP_HOST_STAGING_SIZE", "100k"},
                   {"UCX_ZIP_BW_RATIO", "-1"}};
    if (GetParam().transport == std::string("rc_verbs")) {
        options["UCX_ZIP_CONNECT"] = "iface";
    }
    for (const auto &[name, value] : options) {
        // where a worker cannot be made UCX leaks
        Processes alone(env() + Env{{name, value}, {"ASAN_OPTIONS", "detect_leaks=0"}});
        const bool ran = alone.run([](Channel &) {
            ucp_context_h context;
            ucp_params_t params = {};
            params.field_mask = UCP_PARAM_FIELD_FEATURES;
            params.features = UCP_FEATURE_TAG;
            ASSERT_EQ(UCS_OK, ucp_init(&params, nullptr, &context));
            ucp_worker_params_t worker_params = {};
            ucp_worker_h worker;
            if (ucp_worker_create(context, &worker_params, &worker) == UCS_OK) {
                ucp_worker_destroy(worker);
            }
            ucp_cleanup(context);
        });
        if (ran) {
            const std::string said =
                    name == "UCX_ZIP_CONNECT" ? "set UCX_ZIP_CONNECT=auto" : name + " must";
            EXPECT_NE(std::string::npos, alone.outcome(0).log.find(said)) << alone.outcome(0).log;
        }
    }
}

std::vector<Wire> fall_back_wires()
{
    std::vector<Wire> wires = rc_wires();
    wires.push_back({"tcp", TCP, false, "tcp", "lo"});
    return wires;
}

INSTANTIATE_TEST_SUITE_P(Over, FallBack, testing::ValuesIn(fall_back_wires()),
                         [](const auto &wire) { return wire.param.name; });

TEST(FallBackOfTcp, PeerConnectsInAnotherWay)
{
    Processes pair(TCP);
    pair.env(0)["UCX_ZIP_CONNECT"] = "ep";
    pair.env(1)["UCX_ZIP_CONNECT"] = "iface";
    run_plain(pair);
    expect_no_zip(pair);
}

// ---- faults

std::vector<std::string> files_in(const std::string &folder)
{
    std::vector<std::string> names;
    if (DIR *dir = opendir(folder.c_str())) {
        while (const dirent *entry = readdir(dir)) {
            if (entry->d_name[0] != '.') {
                names.push_back(entry->d_name);
            }
        }
        closedir(dir);
    }
    return names;
}

// Lines of /proc/sysvipc/shm about segments that one of the processes created.
std::string segments_of(const Processes &pair)
{
    std::ifstream file("/proc/sysvipc/shm");
    std::string found;
    for (std::string line; std::getline(file, line);) {
        long creator; // behind key, id, permissions and size
        if (sscanf(line.c_str(), "%*s %*s %*s %*s %ld", &creator) == 1 &&
            (creator == pair.outcome(0).pid || creator == pair.outcome(1).pid)) {
            found += line + "\n";
        }
    }
    return found;
}

// A folder for shared memory files of this test alone.
class ShmFolder {
public:
    ShmFolder()
    {
        char path[] = "/dev/shm/zip_test.XXXXXX";
        if (!Processes::is_part() && mkdtemp(path) != nullptr) {
            path_ = path;
        }
    }
    ~ShmFolder() { rmdir(path_.c_str()); }
    ShmFolder(const ShmFolder &) = delete;
    ShmFolder &operator=(const ShmFolder &) = delete;
    const std::string &path() const { return path_; }

private:
    std::string path_;
};

class Faults : public testing::TestWithParam<Wire> {
protected:
    Env env() const { return GetParam().env + PEER_ERRORS + Env{{"UCX_RNDV_SCHEME", "put_zcopy"}}; }
};

// Sends 64 MiB again and again. Ends when a request fails, with its status.
ucs_status_t send_until_error(Worker &worker, Endpoint *peer, Buffer &data,
                              const std::function<void()> &after_first)
{
    for (unsigned i = 0;; ++i) {
        const ucs_status_t status =
                worker.wait(worker.tag_send(peer, data.data(), data.length(), 1));
        if (status != UCS_OK) {
            return status;
        }
        if (i == 0) {
            after_first();
        }
    }
}

ucs_status_t receive_until_error(Worker &worker, Endpoint *peer, Buffer &data,
                                 const std::function<void()> &after_first)
{
    for (unsigned i = 0;; ++i) {
        ucs_status_ptr_t request = worker.tag_receive(data.data(), data.length(), 1);
        // One that was not matched when the peer died has no peer, and is left to the user.
        while (UCS_PTR_IS_PTR(request) && ucp_request_check_status(request) == UCS_INPROGRESS &&
               peer->errors == 0) {
            worker.wait_until([&] {
                return peer->errors > 0 || ucp_request_check_status(request) != UCS_INPROGRESS;
            });
        }
        if (UCS_PTR_IS_PTR(request) && peer->errors > 0) {
            worker.wait_until([&] { return ucp_request_check_status(request) != UCS_INPROGRESS; },
                              milliseconds(300));
            ucp_request_cancel(worker.get(), request);
        }
        const ucs_status_t status = worker.wait(request);
        if (status != UCS_OK) {
            return status;
        }
        if (i == 0) {
            after_first();
        }
    }
}

// `victim` (0 sends, 1 receives) kills itself `moment` after the first 64 MiB have arrived.
void run_death(Processes &pair, unsigned victim, milliseconds moment)
{
    static constexpr size_t LENGTH = 64 * MIB;
    const auto half = [victim, moment](unsigned me) {
        return [me, victim, moment](Channel &channel) {
            Worker worker;
            channel.send(worker.address());
            Endpoint *peer = worker.connect(channel.receive(), UCP_ERR_HANDLING_MODE_PEER);
            Buffer data(LENGTH);
            fill(data.data(), LENGTH, Data::BF16, 1);
            std::atomic<std::chrono::steady_clock::rep> reported{0};
            std::thread killer;
            const auto after_first = [&] {
                if (me == victim) {
                    killer = std::thread([moment] {
                        std::this_thread::sleep_for(moment);
                        kill(getpid(), SIGKILL);
                    });
                }
            };
            const ucs_status_t status =
                    me == 0 ? send_until_error(worker, peer, data, after_first)
                            : receive_until_error(worker, peer, data, after_first);
            if (me == victim) {
                killer.join();
            }
            std::string nothing;
            EXPECT_FALSE(channel.try_receive(nothing)) << "the peer lives";
            EXPECT_TRUE(UCS_STATUS_IS_ERR(status)) << ucs_status_string(status);
            EXPECT_TRUE(worker.wait_until([&] { return peer->errors > 0; }, milliseconds(5000)))
                    << "the error callback was not called";
            EXPECT_EQ(1u, peer->errors);
            EXPECT_TRUE(UCS_STATUS_IS_ERR(peer->error));
            printf("survivor saw: request %s, endpoint %s\n", ucs_status_string(status),
                   ucs_status_string(peer->error));
            worker.close(peer, true);
        };
    };
    const auto start = std::chrono::steady_clock::now();
    const bool ran = pair.may_die(victim).run(half(0), half(1));
    if (!ran) {
        return;
    }
    EXPECT_EQ(SIGKILL, pair.outcome(victim).signal);
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(15));
    EXPECT_EQ("", segments_of(pair));
    EXPECT_NE(std::string::npos, pair.outcome(1 - victim).log.find("survivor saw"));
    const ZipCounters &survivor = pair.outcome(1 - victim).zip;
    EXPECT_GE(survivor.put_bytes + survivor.received_bytes, LENGTH);
}

TEST_P(Faults, SenderDies)
{
    for (unsigned moment : {0, 13, 60}) {
        ShmFolder folder;
        Processes pair(env() + Env{{"UCX_POSIX_DIR", folder.path()}});
        run_death(pair, 0, milliseconds(moment));
        EXPECT_EQ(std::vector<std::string>{}, files_in(folder.path()));
    }
}

TEST_P(Faults, ReceiverDies)
{
    for (unsigned moment : {0, 13, 60}) {
        ShmFolder folder;
        Processes pair(env() + Env{{"UCX_POSIX_DIR", folder.path()}});
        run_death(pair, 1, milliseconds(moment));
        EXPECT_EQ(std::vector<std::string>{}, files_in(folder.path()));
    }
}

// One of four peers is gone; the others notice nothing.
TEST_P(Faults, OtherEndpointsGoOnWhenOnePeerDies)
{
    constexpr size_t LENGTH = 5 * MIB;
    Processes pair(env());
    pair.run(
            [&](Channel &channel) {
                Worker worker;
                channel.send(worker.address());
                Endpoint *good = worker.connect(channel.receive(), UCP_ERR_HANDLING_MODE_PEER);
                Endpoint *bad = worker.connect(channel.receive(), UCP_ERR_HANDLING_MODE_PEER);
                Buffer source(LENGTH, Data::BF16, 1);
                // to one that never progresses again, and dies soon
                ucs_status_ptr_t lost = worker.tag_send(bad, source.data(), LENGTH, 99);
                for (unsigned i = 0; i < 6; ++i) {
                    EXPECT_EQ(UCS_OK, worker.wait(worker.tag_send(good, source.data(), LENGTH, i)));
                    if (i == 2) {
                        channel.send("kill");
                    }
                }
                EXPECT_TRUE(UCS_STATUS_IS_ERR(worker.wait(lost)));
                EXPECT_EQ(0u, good->errors);
                worker.close(bad, true);
                EXPECT_EQ(UCS_OK, worker.close(good));
                channel.send("closed");
            },
            [&](Channel &channel) {
                // forked before any use of UCX here; it talks through a pipe
                int up[2], down[2];
                ASSERT_EQ(0, pipe(up));
                ASSERT_EQ(0, pipe(down));
                const pid_t child = fork();
                if (child == 0) {
                    prctl(PR_SET_PDEATHSIG, SIGKILL);
                    Worker worker;
                    const std::string address = worker.address();
                    const uint32_t size = static_cast<uint32_t>(address.size());
                    if (write(up[1], &size, sizeof(size)) < 0 ||
                        write(up[1], address.data(), size) < 0) {
                        _exit(1);
                    }
                    Buffer target(LENGTH);
                    worker.tag_receive(target.data(), LENGTH, 99);
                    for (unsigned i = 0;; ++i) { // until some of it is here
                        worker.progress();
                        if (target.data()[100000] != static_cast<char>(0xc5)) {
                            pause();
                        }
                    }
                }
                uint32_t size;
                ASSERT_EQ(ssize_t(sizeof(size)), read(up[0], &size, sizeof(size)));
                std::string bad_address(size, 0);
                ASSERT_EQ(ssize_t(size), read(up[0], bad_address.data(), size));
                Worker worker;
                channel.send(worker.address());
                channel.send(bad_address);
                channel.receive();
                for (unsigned i = 0; i < 6; ++i) {
                    Buffer target(LENGTH);
                    EXPECT_EQ(UCS_OK, worker.wait(worker.tag_receive(target.data(), LENGTH, i)));
                    EXPECT_TRUE(target.holds(Data::BF16, 1));
                    if (i == 2) {
                        EXPECT_EQ("kill", worker.serve(channel));
                        kill(child, SIGKILL);
                        waitpid(child, nullptr, 0);
                    }
                }
                worker.serve(channel);
            });
    EXPECT_GE(pair.outcome(0).zip.put_bytes, 6 * LENGTH);
}

TEST_P(Faults, AReceiverThatStandsStillForTwoSecondsGetsItAll)
{
    constexpr size_t LENGTH = 64 * MIB;
    Processes pair(env() + Env{{"UCX_TCP_KEEPIDLE", "10s"}});
    pair.run(
            [&](Channel &channel) {
                Worker worker;
                channel.send(worker.address());
                Endpoint *peer = worker.connect(channel.receive(), UCP_ERR_HANDLING_MODE_PEER);
                const pid_t other = static_cast<pid_t>(std::stol(channel.receive()));
                Buffer source(LENGTH, Data::BF16, 1);
                ucs_status_ptr_t send = worker.tag_send(peer, source.data(), LENGTH, 1);
                // a call of progress sends a small part of it at most
                for (unsigned calls = 0; calls < 15;) {
                    calls += worker.progress() > 0;
                }
                EXPECT_EQ(0, kill(other, SIGSTOP));
                worker.wait_until([] { return false; }, milliseconds(2000));
                EXPECT_TRUE(UCS_PTR_IS_PTR(send) &&
                            ucp_request_check_status(send) == UCS_INPROGRESS);
                EXPECT_EQ(0, kill(other, SIGCONT));
                EXPECT_EQ(UCS_OK, worker.wait(send));
                EXPECT_EQ(0u, peer->errors);
                channel.receive();
                EXPECT_EQ(UCS_OK, worker.close(peer));
                channel.send("closed");
            },
            [&](Channel &channel) {
                Worker worker;
                channel.send(worker.address());
                Endpoint *peer = worker.connect(channel.receive(), UCP_ERR_HANDLING_MODE_PEER);
                channel.send(std::to_string(getpid()));
                Buffer target(LENGTH);
                EXPECT_EQ(UCS_OK, worker.wait(worker.tag_receive(target.data(), LENGTH, 1)));
                EXPECT_TRUE(target.holds(Data::BF16, 1));
                channel.send("here");
                worker.serve(channel);
                worker.close(peer, true);
            });
    EXPECT_EQ(LENGTH, pair.outcome(0).zip.put_bytes);
}

INSTANTIATE_TEST_SUITE_P(Over, Faults, testing::ValuesIn(all_wires()),
                         [](const auto &wire) { return wire.param.name; });

} // namespace
} // namespace zip::test
