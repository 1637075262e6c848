// SPDX-License-Identifier: BSD-3-Clause
// `zipperf model`: protocol, timing and tables.
//
// The sender dictates: for each data set it announces the sizes (kDataset), then for each pass over
// it names the strategy (kRun); the receiver poisons its buffers, posts all receives and answers
// kReady; the data and the receiver's "all received" cross UCP; kHashes comes back afterwards.
#include "tools/model_bench.h"

#include "tools/bench_json.h"
#include "tools/clock.h"
#include "tools/data_set.h"
#include "tools/error.h"
#include "tools/host_memory.h"
#include "tools/interrupt.h"
#include "tools/link_counter.h"
#include "tools/oob_channel.h"
#include "tools/progress_bar.h"
#include "tools/safetensors.h"
#include "tools/stats.h"
#include "tools/table.h"
#include "tools/ucp_peer.h"
#include "tools/units.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstring>
#include <memory>
#include <optional>
#include <sched.h>

namespace tools {

namespace {

using nlohmann::json;

constexpr int kProtocol = 1;
constexpr uint64_t kMaxAddress = 65536;
constexpr uint64_t kMaxJson = 64 << 20;
constexpr uint64_t kMaxMessages = 1 << 20;

// Strategies, in the order of the two worker addresses.
constexpr size_t kPlain = 0;
constexpr size_t kZip = 1;
constexpr std::array<const char *, 2> kStrategyName = {"ucx", "zip"};

// Tags: a run's number above, the message's index below; the answer has the top bit.
constexpr ucp_tag_t kDoneTag = ucp_tag_t{1} << 63;
ucp_tag_t message_tag(uint64_t run, size_t index)
{
    return run << 32 | index;
}

// A wire ratio above this is noise, not compression.
constexpr double kUsedRatio = 0.98;

// Sweep: one batch is at least this long, so that what a token bucket lets through at once after a
// pause (128 KiB in contrib/demo) does not count.
constexpr uint64_t kBatchBytes = 16 << 20;
constexpr uint64_t kMaxBatch = 4096; // messages
constexpr uint64_t kMaxPool = 256 << 20;

std::string one_line(std::string text)
{
    for (char &c : text) {
        if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
            c = ' ';
        }
    }
    return text.substr(0, 200);
}

json parse_json(const std::string &text)
{
    json doc = json::parse(text, nullptr, false);
    if (!doc.is_object()) {
        throw Error("the peer sent a broken control message; are both sides the same version?");
    }
    return doc;
}

uint64_t get_number(const json &doc, const char *key, uint64_t max)
{
    const auto i = doc.find(key);
    if (i == doc.end() || !i->is_number_unsigned() || i->get<uint64_t>() > max) {
        throw Error(std::string("the peer's control message has no valid '") + key +
                    "'; are both sides the same version?");
    }
    return i->get<uint64_t>();
}

std::string get_string(const json &doc, const char *key)
{
    const auto i = doc.find(key);
    if (i == doc.end() || !i->is_string() || i->get<std::string>().size() > 4096) {
        throw Error(std::string("the peer's control message has no valid '") + key +
                    "'; are both sides the same version?");
    }
    return i->get<std::string>();
}

// The two workers of a process and the control channel to its peer.
class Session {
public:
    Session(OobChannel &oob, double timeout_s) : oob_(oob), timeout_s_(timeout_s) {}

    void open(const std::array<std::string, 2> &tls)
    {
        for (size_t i = 0; i < peers_.size(); ++i) {
            peers_[i] = std::make_unique<UcpPeer>(tls[i]);
        }
    }

    void exchange_addresses()
    {
        for (const auto &peer : peers_) {
            oob_.send(FrameType::kAddress, peer->address(), timeout_s_);
        }
        for (const auto &peer : peers_) {
            remote_.push_back(receive(FrameType::kAddress, kMaxAddress));
            peer->connect(remote_.back());
        }
    }

    UcpPeer &peer(size_t strategy) { return *peers_[strategy]; }
    OobChannel &oob() { return oob_; }
    double timeout_s() const { return timeout_s_; }

    std::string receive(FrameType type, uint64_t max_size)
    {
        return oob_.receive(type, max_size, timeout_s_, [this] { return progress(); });
    }

    std::string receive_any(FrameType *type, uint64_t max_size)
    {
        return oob_.receive_any(type, max_size, timeout_s_, [this] { return progress(); });
    }

    void send(FrameType type, const std::string &payload) { oob_.send(type, payload, timeout_s_); }

    // Ends both endpoints in order. The peer must be progressing, too.
    void close()
    {
        for (const auto &peer : peers_) {
            peer->flush_and_close(2.0);
        }
    }

private:
    bool progress()
    {
        unsigned count = 0;
        for (const auto &peer : peers_) {
            if (peer) {
                count += peer->progress();
            }
        }
        return count > 0;
    }

    OobChannel &oob_;
    double timeout_s_;
    std::array<std::unique_ptr<UcpPeer>, 2> peers_;
    std::vector<std::string> remote_;
};

// Looks after a loop that spins on UCX: signals, the peer's life, and whether anything moves.
class Watch {
public:
    Watch(Session &session, UcpPeer &peer, const LinkCounter *link)
        : session_(session), peer_(peer), link_(link), last_look_(now_s()), last_move_(last_look_),
          last_completion_(last_look_)
    {
    }

    // Call once a turn of the loop; `completed` is any number that grows with progress.
    void turn(size_t completed)
    {
        if ((++turns_ & 0xff) != 0) {
            return;
        }
        const double now = now_s();
        if (now - last_look_ < kLookEvery) {
            return;
        }
        last_look_ = now;
        check_interrupted();
        session_.oob().check_peer();
        if (peer_.endpoint_status() != UCS_OK) {
            prefer_end_of_peer();
            throw Error("UCX lost the connection to the peer (UCX_TLS=" + peer_.tls() +
                        "): " + ucs_status_string(peer_.endpoint_status()));
        }

        if (completed != completed_) {
            completed_ = completed;
            last_completion_ = last_move_ = now;
        }
        // A long message on a slow wire completes nothing for long, but moves bytes.
        if (link_ != nullptr) {
            const uint64_t bytes = link_->tx_bytes() + link_->rx_bytes();
            if (bytes - link_bytes_ > kMoved) {
                link_bytes_ = bytes;
                last_move_ = now;
            }
        }
        const double limit = session_.timeout_s();
        // Others may use the interface, so its bytes are believed only for so long.
        if (now - last_move_ > limit || now - last_completion_ > limit * kPatience) {
            throw Error(format("no message arrived for %.0f s (UCX_TLS=%s); the peer hangs or the "
                               "network is down, see --timeout",
                               now - last_completion_, peer_.tls().c_str()));
        }
    }

    // Call before reporting an error of UCX: that the peer's process died is better told by its
    // control connection, which may be the later of the two to notice. Throws if it does so within
    // a moment.
    void prefer_end_of_peer()
    {
        const double until = now_s() + kMoment;
        while (now_s() < until) {
            session_.oob().check_peer();
            sched_yield();
        }
    }

private:
    static constexpr double kMoment = 0.2;
    static constexpr double kLookEvery = 0.02;
    static constexpr double kPatience = 30.0;
    static constexpr uint64_t kMoved = 1 << 20;

    Session &session_;
    UcpPeer &peer_;
    const LinkCounter *link_;
    uint64_t turns_ = 0;
    double last_look_, last_move_, last_completion_;
    size_t completed_ = 0;
    uint64_t link_bytes_ = 0;
};

// Requests of one pass. If the pass ends early they are withdrawn, and the process's end is the
// only thing that frees what UCX would not give back.
class Pass {
public:
    explicit Pass(UcpPeer &peer, size_t receives) : peer_(peer), state_(std::make_unique<State>())
    {
        state_->receives.resize(receives);
        for (UcpPeer::Receive &receive : state_->receives) {
            receive.batch = &state_->received;
        }
    }

    ~Pass()
    {
        if (finished()) {
            return;
        }
        for (UcpPeer::Receive &receive : state_->receives) {
            peer_.cancel(receive);
        }
        peer_.force_close();
        const double deadline = now_s() + 1.0;
        while (!finished() && now_s() < deadline) {
            peer_.progress();
        }
        if (!finished()) {
            static_cast<void>(state_.release());
        }
    }
    Pass(const Pass &) = delete;
    Pass &operator=(const Pass &) = delete;

    UcpPeer::Batch &sent() { return state_->sent; }
    UcpPeer::Batch &received() { return state_->received; }
    UcpPeer::Receive &receive(size_t i) { return state_->receives[i]; }

private:
    struct State {
        UcpPeer::Batch sent;
        UcpPeer::Batch received;
        std::vector<UcpPeer::Receive> receives;
    };

    bool finished() const
    {
        return state_->sent.done == state_->sent.posted &&
               state_->received.done == state_->received.posted;
    }

    UcpPeer &peer_;
    std::unique_ptr<State> state_;
};

void announce_error(OobChannel &oob, const Error &error)
{
    try {
        oob.send(FrameType::kError, std::string(error.what()).substr(0, 1000), 1.0);
    } catch (const Error &) {
        // The peer is gone; there is nobody to tell.
    }
}

// ---------------------------------------------------------------------------- receiver

struct Announced {
    std::vector<uint64_t> sizes;
    std::vector<uint64_t> offsets; // in the arena
    std::vector<std::string> names;

    std::string name(size_t i) const
    {
        return i < names.size() ? "'" + one_line(names[i]) + "'" : "number " + std::to_string(i);
    }
};

Announced read_data_set(const std::string &text, Arena &arena)
{
    const json doc = parse_json(text);
    const auto sizes = doc.find("sizes");
    const auto names = doc.find("names");
    if (sizes == doc.end() || !sizes->is_array() || sizes->empty() ||
        sizes->size() > kMaxMessages || names == doc.end() || !names->is_array()) {
        throw Error("the peer announced a broken data set; are both sides the same version?");
    }
    Announced set;
    const uint64_t available = available_memory();
    uint64_t total = 0;
    for (const json &size : *sizes) {
        if (!size.is_number_unsigned()) {
            throw Error("the peer announced a broken data set; are both sides the same version?");
        }
        const uint64_t bytes = size.get<uint64_t>();
        if (bytes > available || total > available - bytes) {
            throw Error("the peer wants to send more than the " + format_size(available) +
                        " of memory that are free here; send a smaller model");
        }
        set.sizes.push_back(bytes);
        set.offsets.push_back(total);
        total += (bytes + 63) / 64 * 64;
    }
    for (const json &name : *names) {
        set.names.push_back(name.is_string() ? name.get<std::string>() : "?");
    }
    arena.resize(total);
    return set;
}

void receive_pass(Session &session, const Announced &set, Arena &arena, const json &run)
{
    const size_t strategy = static_cast<size_t>(get_number(run, "strategy", kZip));
    const uint64_t number = get_number(run, "run", UINT32_MAX >> 1);
    UcpPeer &peer = session.peer(strategy);

    // Another value each time, so that what an earlier pass left cannot be taken for data.
    if (arena.size() > 0) {
        std::memset(arena.data(), static_cast<int>(0xa5 ^ (number & 0xff)), arena.size());
    }

    Pass pass(peer, set.sizes.size());
    for (size_t i = 0; i < set.sizes.size(); ++i) {
        peer.receive(pass.receive(i), message_tag(number, i), arena.data() + set.offsets[i],
                     static_cast<size_t>(set.sizes[i]));
    }
    session.send(FrameType::kReady, "");

    Watch watch(session, peer, nullptr);
    while (pass.received().done < pass.received().posted) {
        peer.spin();
        watch.turn(pass.received().done);
    }
    for (size_t i = 0; i < set.sizes.size(); ++i) {
        const UcpPeer::Receive &receive = pass.receive(i);
        if (receive.status != UCS_OK || receive.length != set.sizes[i]) {
            watch.prefer_end_of_peer();
            throw Error(receive.status != UCS_OK
                                ? "UCX could not receive tensor " + set.name(i) + " (UCX_TLS=" +
                                          peer.tls() + "): " + ucs_status_string(receive.status)
                                : format("tensor %s arrived with %zu bytes instead of %" PRIu64,
                                         set.name(i).c_str(), receive.length, set.sizes[i]),
                        receive.status != UCS_OK ? kExitFailed : kExitMismatch);
        }
    }
    peer.send(pass.sent(), kDoneTag | number, &number, sizeof(number));
    while (pass.sent().done < pass.sent().posted) {
        peer.spin();
        watch.turn(pass.sent().done);
    }

    std::string hashes;
    for (size_t i = 0; i < set.sizes.size(); ++i) {
        const Hash128 hash =
                hash_bytes(arena.data() + set.offsets[i], static_cast<size_t>(set.sizes[i]));
        hashes.append(reinterpret_cast<const char *>(&hash.low), sizeof(hash.low));
        hashes.append(reinterpret_cast<const char *>(&hash.high), sizeof(hash.high));
    }
    session.send(FrameType::kHashes, hashes);
}

void serve(OobChannel &oob, const ModelOptions &options)
{
    Arena arena; // before the session: UCX must let go of it first
    Session session(oob, options.timeout_s);
    const json hello = parse_json(session.receive(FrameType::kHello, kMaxJson));
    if (get_number(hello, "protocol", INT32_MAX) != kProtocol) {
        throw Error(
                "the peer speaks another version of zipperf's protocol; use the same version on "
                "both sides");
    }
    session.open({get_string(hello, "plain_tls"), get_string(hello, "zip_tls")});
    session.send(FrameType::kHello, json{{"protocol", kProtocol},
                                         {"host", host_name()},
                                         {"zip", session.peer(kZip).has_transport("zip")}}
                                            .dump());
    session.exchange_addresses();

    std::optional<Announced> set;
    while (true) {
        FrameType type{};
        const std::string payload = session.receive_any(&type, kMaxJson);
        if (type == FrameType::kBye) {
            session.send(FrameType::kBye, "");
            session.close();
            return;
        }
        if (type == FrameType::kDataset) {
            set = read_data_set(payload, arena);
        } else if (type == FrameType::kRun && set) {
            receive_pass(session, *set, arena, parse_json(payload));
        } else {
            throw Error("the peer sent an unexpected control message; are both sides the same "
                        "version?");
        }
    }
}

// ---------------------------------------------------------------------------- sender

// What the passes over one data set gave, by strategy.
struct Measured {
    std::array<std::vector<double>, 2> seconds;
    std::array<std::vector<double>, 2> wire_bytes;

    Summary time(size_t strategy) const { return summarize(seconds[strategy]); }

    double wire(size_t strategy) const { return percentile(wire_bytes[strategy], 0.5); }

    // Bytes on the wire with zip over bytes on the wire without.
    double ratio() const { return wire(kPlain) > 0.0 ? wire(kZip) / wire(kPlain) : 1.0; }

    double speedup() const { return time(kPlain).median / time(kZip).median; }

    // Each zip pass against the plain pass next to it: slow drifts of the machine cancel out.
    Summary paired_speedup() const
    {
        std::vector<double> pairs;
        for (size_t i = 0; i < seconds[kPlain].size(); ++i) {
            pairs.push_back(seconds[kPlain][i] / seconds[kZip][i]);
        }
        return summarize(pairs);
    }
};

class Sender {
public:
    Sender(Session &session, const ModelOptions &options, const LinkCounter &link, ProgressBar &bar)
        : session_(session), options_(options), link_(link), bar_(bar)
    {
    }

    // One warm-up pass for each strategy, which is checked but not counted, then `repeats` of each
    // in changing order.
    Measured measure(const DataSet &set, unsigned repeats, const std::string &label)
    {
        json announcement{{"sizes", json::array()}, {"names", json::array()}};
        for (const Message &message : set.messages) {
            announcement["sizes"].push_back(message.size);
            announcement["names"].push_back(message.name);
        }
        session_.send(FrameType::kDataset,
                      announcement.dump(-1, ' ', false, json::error_handler_t::replace));

        Measured out;
        for (unsigned r = 0; r <= repeats; ++r) {
            for (size_t turn = 0; turn < 2; ++turn) {
                const size_t strategy = (turn + r) % 2 == 0 ? kPlain : kZip;
                const uint64_t before = link_.tx_bytes();
                const double seconds = pass(set, strategy, label);
                const uint64_t wire = link_.tx_bytes() - before;
                check_hashes(set, strategy);
                if (r > 0) {
                    out.seconds[strategy].push_back(seconds);
                    out.wire_bytes[strategy].push_back(static_cast<double>(wire));
                }
            }
        }
        return out;
    }

private:
    double pass(const DataSet &set, size_t strategy, const std::string &label)
    {
        UcpPeer &peer = session_.peer(strategy);
        const uint64_t number = ++run_;
        session_.send(FrameType::kRun, json{{"strategy", strategy}, {"run", number}}.dump());
        session_.receive(FrameType::kReady, 0);

        uint64_t answer = 0;
        Pass pass(peer, 1);
        peer.receive(pass.receive(0), kDoneTag | number, &answer, sizeof(answer));
        UcpPeer::Batch &sent = pass.sent();
        Watch watch(session_, peer, &link_);
        size_t next = 0;
        size_t shown = 0;

        const double start = now_s();
        while (pass.received().done == 0 || sent.done < sent.posted) {
            while (next < set.messages.size() && sent.posted - sent.done < options_.window) {
                const Message &message = set.messages[next];
                peer.send(sent, message_tag(number, next), message.data, message.size);
                ++next;
            }
            peer.spin();
            if (sent.status != UCS_OK) {
                watch.prefer_end_of_peer();
                throw Error("UCX could not send (UCX_TLS=" + peer.tls() +
                            "): " + ucs_status_string(sent.status));
            }
            for (; shown < sent.done && shown < set.messages.size(); ++shown) {
                bar_.advance(set.messages[shown].size, label);
            }
            watch.turn(sent.done + pass.received().done);
        }
        const double seconds = now_s() - start;

        if (pass.receive(0).status != UCS_OK || answer != number) {
            throw Error("UCX delivered no answer to a pass (UCX_TLS=" + peer.tls() +
                        "): " + ucs_status_string(pass.receive(0).status));
        }
        return seconds;
    }

    void check_hashes(const DataSet &set, size_t strategy)
    {
        const size_t size = sizeof(Hash128) * set.messages.size();
        const std::string hashes = session_.receive(FrameType::kHashes, size);
        if (hashes.size() != size) {
            throw Error("the peer sent too few hashes; are both sides the same version?");
        }
        for (size_t i = 0; i < set.messages.size(); ++i) {
            const Message &message = set.messages[i];
            Hash128 got;
            std::memcpy(&got, hashes.data() + i * sizeof(Hash128), sizeof(Hash128));
            if (!(got == message.hash)) {
                throw Error(format("tensor '%s' (%s, %zu bytes, strategy %s) did not arrive as it "
                                   "was sent: XXH3 %016" PRIx64 "%016" PRIx64
                                   " instead of %016" PRIx64 "%016" PRIx64,
                                   one_line(message.name).c_str(), set.dtype.c_str(), message.size,
                                   kStrategyName[strategy], got.high, got.low, message.hash.high,
                                   message.hash.low),
                            kExitMismatch);
            }
        }
    }

    Session &session_;
    const ModelOptions &options_;
    const LinkCounter &link_;
    ProgressBar &bar_;
    uint64_t run_ = 0;
};

// A data set and what was measured on it.
struct Point {
    std::string dtype;
    std::string data;
    uint64_t bytes = 0; // of one pass
    uint64_t size = 0;  // as the row's size: the model's bytes, or one message of the sweep
    size_t messages = 0;
    Measured measured;
};

double gbps(uint64_t bytes, double seconds)
{
    return seconds > 0.0 ? static_cast<double>(bytes) / seconds / 1e9 : 0.0;
}

std::string spread_text(const Summary &s)
{
    return format("%.2f..%.2f", s.p10, s.p90);
}

void print_model_table(const std::vector<Point> &points)
{
    Table table({"dtype", "bytes", "ratio", "plain s", "zip s", "plain GB/s", "zip GB/s",
                 "speed-up", "p10..p90", "bound"});
    for (const Point &p : points) {
        const Measured &m = p.measured;
        const double plain = m.time(kPlain).median;
        const double zip = m.time(kZip).median;
        table.add({p.dtype, std::to_string(p.bytes), format("%.3f", m.ratio()),
                   format("%.3f", plain), format("%.3f", zip), format("%.3f", gbps(p.bytes, plain)),
                   format("%.3f", gbps(p.bytes, zip)), format("%.2f", m.speedup()),
                   spread_text(m.paired_speedup()), format("%.2f", 1.0 / m.ratio())});
    }
    table.print(stdout);
}

void print_sweep_table(const std::vector<Point> &points)
{
    Table table({"dtype", "message", "ratio", "plain us", "zip us", "plain GB/s", "zip GB/s",
                 "speed-up", "p10..p90", "bound"});
    for (const Point &p : points) {
        const Measured &m = p.measured;
        const double count = static_cast<double>(p.messages);
        const double plain = m.time(kPlain).median;
        const double zip = m.time(kZip).median;
        table.add({p.dtype, format_size(p.size), format("%.3f", m.ratio()),
                   format("%.0f", plain / count * 1e6), format("%.0f", zip / count * 1e6),
                   format("%.3f", gbps(p.bytes, plain)), format("%.3f", gbps(p.bytes, zip)),
                   format("%.2f", m.speedup()), spread_text(m.paired_speedup()),
                   format("%.2f", 1.0 / m.ratio())});
    }
    table.print(stdout);
}

void add_rows(std::vector<BenchRow> &rows, const Point &p, const std::string &wire)
{
    const Measured &m = p.measured;
    for (size_t strategy = 0; strategy < kStrategyName.size(); ++strategy) {
        const Summary time = m.time(strategy);
        BenchRow row;
        row.size = p.size;
        row.dtype = p.dtype;
        row.data = p.data;
        row.wire = wire;
        row.strategy = kStrategyName[strategy];
        row.direction = "send";
        row.gbps_median = gbps(p.bytes, time.median);
        row.gbps_p10 = gbps(p.bytes, time.p90); // the slow end of the times is the low bandwidth
        row.gbps_p90 = gbps(p.bytes, time.p10);
        // Of what `size` states: the whole model, or one of a batch's equal messages.
        row.us_median = time.median * static_cast<double>(p.size) /
                        static_cast<double>(std::max<uint64_t>(p.bytes, 1)) * 1e6;
        row.messages = p.messages;
        row.repeats = m.seconds[strategy].size();
        row.verified = true; // every pass's hashes were compared, or this line is not reached
        if (strategy == kZip) {
            const Summary paired = m.paired_speedup();
            row.ratio = m.ratio();
            row.plain_gbps_median = gbps(p.bytes, m.time(kPlain).median);
            row.speedup = m.speedup();
            row.speedup_p10 = paired.p10;
            row.speedup_p90 = paired.p90;
            row.bound_gbps = *row.plain_gbps_median / m.ratio();
        }
        rows.push_back(row);
    }
}

constexpr const char *kHint =
        "; UCX_PROTO_INFO=y shows what UCX picks, UCX_LOG_LEVEL=info what it loads";

// Why zip cannot be used at all, or an empty string.
std::string why_unusable(Session &session, const ModelOptions &options, bool peer_has_zip)
{
    if (options.zip_tls.find("zip") == std::string::npos) {
        return "zip was not used: it is not in --zip-tls " + options.zip_tls;
    }
    const bool here = session.peer(kZip).has_transport("zip");
    if (here && peer_has_zip) {
        return "";
    }
    return std::string("zip was not used: UCX of the ") + (here ? "receiver" : "sender") +
           " did not load the plugin (UCX_PLUGIN_PATH, UCX >= 1.22) or found no device for it" +
           kHint;
}

// Why zip did nothing in what was measured, or an empty string if it did something.
std::string why_not_used(Session &session, const std::vector<Point> &points)
{
    double best = 1.0;
    for (const Point &p : points) {
        best = std::min(best, p.measured.ratio());
    }
    if (best < kUsedRatio) {
        return "";
    }
    const std::string lanes = session.peer(kZip).endpoint_transports();
    if (lanes.find("zip/") == std::string::npos) {
        return "zip was not used: UCX made no zip lane to the peer, only " + lanes +
               " (host memory needs UCX_ZIP_MEM_TYPES=host)" + kHint;
    }
    return format("zip was not used: it has a lane (%s), but the wire carried %.3f of plain's "
                  "bytes: "
                  "UCX picked other lanes, or the data do not compress",
                  lanes.c_str(), best) +
           kHint;
}

std::vector<uint64_t> sweep_sizes(const ModelOptions &options)
{
    if (!options.sizes.empty()) {
        return parse_size_list(options.sizes);
    }
    // The first is so short that zip leaves it alone: it shows that zip costs nothing there.
    std::vector<uint64_t> sizes = {16 << 10};
    for (uint64_t size = 64 << 10; size <= 16 << 20; size *= options.quick ? 4 : 2) {
        sizes.push_back(size);
    }
    return sizes;
}

void send_all(OobChannel &oob, const ModelOptions &options,
              const std::vector<SafetensorsFile> &files, const std::vector<DataSet> &models,
              const std::vector<uint64_t> &sizes)
{
    const std::string interface =
            options.interface.empty() ? interface_of_socket(oob.fd()) : options.interface;
    if (interface.empty()) {
        throw Error("cannot tell which network interface leads to the peer; name it with "
                    "--interface");
    }
    const LinkCounter link(interface);
    const std::string wire = options.wire.empty() ? interface : options.wire;

    Session session(oob, options.timeout_s);
    session.send(FrameType::kHello, json{{"protocol", kProtocol},
                                         {"plain_tls", options.plain_tls},
                                         {"zip_tls", options.zip_tls}}
                                            .dump());
    session.open({options.plain_tls, options.zip_tls});
    const json hello = parse_json(session.receive(FrameType::kHello, kMaxJson));
    if (get_number(hello, "protocol", INT32_MAX) != kProtocol) {
        throw Error(
                "the peer speaks another version of zipperf's protocol; use the same version on "
                "both sides");
    }
    const auto peer_zip = hello.find("zip");
    const bool peer_has_zip = peer_zip != hello.end() && peer_zip->is_boolean() && *peer_zip;
    const std::string unusable = why_unusable(session, options, peer_has_zip);
    if (options.require_zip && !unusable.empty()) {
        throw Error(unusable, kExitZipNotUsed);
    }
    session.exchange_addresses();

    const unsigned repeats = options.repeats != 0 ? options.repeats : options.quick ? 3 : 5;
    const auto pieces = [](uint64_t size) {
        return static_cast<size_t>(std::clamp<uint64_t>(kBatchBytes / size, 2, kMaxBatch));
    };
    uint64_t total = 0;
    for (const DataSet &model : models) {
        total += model.bytes() * 2 * (repeats + 1);
        for (const uint64_t size : sizes) {
            total += size * pieces(size) * 2 * (repeats + 1);
        }
    }

    ProgressBar bar(total, false);
    Sender sender(session, options, link, bar);
    std::vector<Point> whole;
    for (const DataSet &model : models) {
        Point p{model.dtype, model.data, model.bytes(), model.bytes(), model.messages.size(), {}};
        p.measured = sender.measure(model, repeats, "model, " + model.dtype);
        whole.push_back(std::move(p));
    }
    std::vector<Point> sweep;
    for (const DataSet &model : models) {
        if (sizes.empty()) {
            break;
        }
        const uint64_t longest = *std::max_element(sizes.begin(), sizes.end());
        const auto pool = concatenate(files, model, longest, std::max(longest, kMaxPool));
        if (pool->size() < longest) {
            continue; // a model of empty tensors
        }
        for (const uint64_t size : sizes) {
            const DataSet set = cut_data_set(model, pool, size, pieces(size));
            Point p{set.dtype, set.data, set.bytes(), size, set.messages.size(), {}};
            p.measured = sender.measure(set, repeats, format_size(size) + ", " + set.dtype);
            sweep.push_back(std::move(p));
        }
    }
    const std::string unused = !unusable.empty() ? unusable : why_not_used(session, whole);
    session.send(FrameType::kBye, "");
    session.receive(FrameType::kBye, 0);
    session.close();
    bar.clear();

    std::printf("%s: every tensor one message, %u at a time, %u repeats of plain (UCX_TLS=%s) and "
                "zip (UCX_TLS=%s) in turn; wire: %s\n",
                models.front().data.c_str(), options.window, repeats, options.plain_tls.c_str(),
                options.zip_tls.c_str(), wire.c_str());
    print_model_table(whole);
    std::printf("hashes of all %zu tensors matched in every pass; ratio is bytes on the wire (%s's "
                "counter) with zip / without; plain sends %+.1f%% over the data\n",
                whole.front().messages, interface.c_str(),
                (whole.front().measured.wire(kPlain) / static_cast<double>(whole.front().bytes) -
                 1.0) * 100.0);
    if (!sweep.empty()) {
        std::printf("\nBy message size, %s, %u at a time; times a message:\n",
                    sweep.front().data.c_str(), options.window);
        print_sweep_table(sweep);
    }
    std::fflush(stdout);

    if (!options.json.empty()) {
        std::vector<BenchRow> rows;
        for (const Point &p : whole) {
            add_rows(rows, p, wire);
        }
        for (const Point &p : sweep) {
            add_rows(rows, p, wire);
        }
        write_bench_json(options.json, "zipperf model", rows);
    }
    if (!unused.empty()) {
        if (options.require_zip) {
            throw Error(unused, kExitZipNotUsed);
        }
        std::fprintf(stderr, "zipperf: warning: %s\n", unused.c_str());
    }
}

} // namespace

void run_model_receiver(const ModelOptions &options)
{
    OobChannel oob = OobChannel::accept_one(parse_host_port(options.listen, kDefaultPort),
                                            options.wait_s, [](const std::string &where) {
                                                std::printf("listening on %s\n", where.c_str());
                                                std::fflush(stdout);
                                            });
    try {
        serve(oob, options);
    } catch (const Error &error) {
        announce_error(oob, error);
        throw;
    }
}

void run_model_sender(const ModelOptions &given)
{
    ModelOptions options = given;
    if (options.zip_tls.empty()) {
        options.zip_tls = "zip," + options.plain_tls;
    }
    const HostPort address = parse_host_port(options.connect, kDefaultPort);
    const std::vector<uint64_t> sizes =
            options.sweep ? sweep_sizes(options) : std::vector<uint64_t>();
    // Two messages at the receiver, which may be on this machine, and the data to cut them from.
    const uint64_t available = available_memory();
    for (const uint64_t size : sizes) {
        if (size > available / 4) {
            throw Error("size " + format_size(size) +
                        " does not fit: of the memory that is free, " + format_size(available) +
                        ", a message may take a quarter");
        }
    }
    if (!options.json.empty()) {
        check_json_writable(options.json);
    }

    // The model first: a broken one needs no peer.
    std::vector<SafetensorsFile> files;
    for (const std::string &path : options.models) {
        files.emplace_back(path);
    }
    std::vector<DataSet> models;
    for (const std::string &dtype : options.dtypes) {
        DataSet set = model_data_set(files, dtype);
        check_interrupted();
        if (set.messages.empty()) {
            std::fprintf(stderr,
                         "note: the model holds no values that can be sent as %s; left out\n",
                         dtype.c_str());
        } else {
            models.push_back(std::move(set));
        }
    }
    if (models.empty()) {
        throw Error(options.models.front() +
                    ": holds no tensor of F64, F32, F16 or BF16 that fits --dtype; name another "
                    "model or dtype");
    }

    OobChannel oob = OobChannel::connect_to(address, std::min(options.timeout_s, 10.0));
    try {
        send_all(oob, options, files, models, sizes);
    } catch (const Error &error) {
        announce_error(oob, error);
        throw;
    }
}

} // namespace tools
