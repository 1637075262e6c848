// SPDX-License-Identifier: BSD-3-Clause
// `zipperf p2p`: which points are measured, the processes that do it, tables and JSON.
#include "tools/p2p_bench.h"

#include "tools/bench_json.h"
#include "tools/child_process.h"
#include "tools/clock.h"
#include "tools/data_set.h"
#include "tools/error.h"
#include "tools/host_memory.h"
#include "tools/interrupt.h"
#include "tools/mps_daemon.h"
#include "tools/oob_channel.h"
#include "tools/p2p_setup.h"
#include "tools/progress_bar.h"
#include "tools/run_folder.h"
#include "tools/safetensors.h"
#include "tools/stats.h"
#include "tools/table.h"
#include "tools/units.h"
#include "tools/zip_log.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

namespace tools {

namespace {

using nlohmann::json;

constexpr uint64_t kMaxFrame = 64 << 20;
// A round is about as many bytes, and the warm-up: enough that UCX has connected all its lanes and
// the plugin's bypass has seen its first operations.
constexpr uint64_t kRoundBytes = 64 << 20;
constexpr uint64_t kWarmupBytes = 256 << 20;
constexpr uint64_t kLeastIterations = 4; // the first of a round finds its code and data in no cache
constexpr uint64_t kMostIterations = 20;
constexpr uint64_t kMostWarmup = 40;
constexpr uint64_t kLeastWarmup = 3;
// Beside the time of an iteration: poison, hashes, opening of contexts.
constexpr double kSlackSeconds = 30.0;
constexpr double kEndSeconds = 10.0; // from the last word to the process's end

// ---------------------------------------------------------------------------- processes

constexpr std::array<const char *, 2> kSideName = {"sender", "receiver"};

std::string read_file(const std::string &path, uint64_t from)
{
    std::ifstream in(path, std::ios::binary);
    in.seekg(static_cast<std::streamoff>(from));
    return std::string(std::istreambuf_iterator<char>(in), {});
}

// The last line of a log that tells of an error, for the one line that the user sees.
std::string last_error(const std::string &log)
{
    std::string found;
    std::istringstream lines(log);
    for (std::string line; std::getline(lines, line);) {
        if (line.find("ERROR") != std::string::npos || line.find("FATAL") != std::string::npos ||
            line.find("error:") != std::string::npos || line.find("Assert") != std::string::npos) {
            found = line;
        }
    }
    const size_t from = found.find("ERROR");
    return from == std::string::npos ? found : found.substr(from);
}

// The two sides of a variant, in one or two processes.
class Pair {
public:
    Pair(const P2pOptions &options, const P2pWire &wire, P2pVariant variant,
         const RunFolder &folder, const std::string &name)
        : options_(options), variant_(std::move(variant)), fabric_("zipperf." + name)
    {
        Env env = variant_.env;
        if (wire.fabric) {
            env["SWVERBS_FABRIC"] = fabric_;
        }
        std::vector<std::string> base;
        for (char **variable = environ; *variable != nullptr; ++variable) {
            base.emplace_back(*variable);
        }
        const std::vector<std::string> environment = p2p_environment(base, env, variant_.zip);

        Sockets control[2];
        Sockets between;
        for (size_t side = 0; side < 2; ++side) {
            channels_.push_back(OobChannel::adopt(control[side].take(0)));
        }
        const std::string program = own_path();
        for (size_t side = 0; side < 2; ++side) {
            if (options.in_process && side > 0) {
                break;
            }
            ChildProcess::Start start;
            start.arguments = {program, "p2p-part", options.in_process ? "2" : "1"};
            start.environment = environment;
            start.descriptors = {control[side].get(1), between.get(side)};
            if (options.in_process) {
                start.descriptors.insert(start.descriptors.end(),
                                         {control[1].get(1), between.get(1)});
            }
            start.log = folder.file(name + "." + (options.in_process ? "both" : kSideName[side]) +
                                    ".log");
            processes_.push_back(std::make_unique<ChildProcess>(start));
            logs_.push_back({start.log, 0});
        }
    }

    ~Pair()
    {
        for (const auto &process : processes_) {
            process->ask_to_end();
        }
        processes_.clear();
        remove_fabric();
    }
    Pair(const Pair &) = delete;
    Pair &operator=(const Pair &) = delete;

    const P2pVariant &variant() const { return variant_; }

    // So that all that are to end do so at the same time.
    void ask_to_end()
    {
        for (const auto &process : processes_) {
            process->ask_to_end();
        }
    }

    void say(FrameType type, const std::array<std::string, 2> &texts)
    {
        for (size_t side = 0; side < 2; ++side) {
            try {
                channels_[side].send(type, texts[side], options_.timeout_s);
            } catch (const Error &) {
                check_interrupted();
                find_out(); // why it does not listen
            }
        }
    }
    void say(FrameType type, const std::string &text) { say(type, {text, text}); }

    // Both sides' answers; `on_progress` is called for each kProgress before.
    template <typename Progress>
    std::array<std::string, 2> hear(FrameType wanted, const Progress &on_progress)
    {
        std::array<std::optional<std::string>, 2> answers;
        double deadline = now_s() + options_.timeout_s + kSlackSeconds;
        while (!answers[0] || !answers[1]) {
            check_interrupted();
            std::array<pollfd, 2> fds{};
            for (size_t side = 0; side < 2; ++side) {
                fds[side] = {channels_[side].closed() ? -1 : channels_[side].fd(), POLLIN, 0};
            }
            poll(fds.data(), fds.size(), 100);
            for (size_t side = 0; side < 2; ++side) {
                FrameType type{};
                while (auto text = channels_[side].try_receive(&type, kMaxFrame)) {
                    if (type == FrameType::kProgress) {
                        deadline = now_s() + options_.timeout_s + kSlackSeconds;
                        on_progress();
                    } else if (type == wanted) {
                        answers[side] = *std::move(text);
                    } else {
                        note_failure(side, type, *text);
                        find_out();
                    }
                }
                if (channels_[side].closed() && !answers[side]) {
                    find_out();
                }
            }
            if (now_s() > deadline) {
                throw Error(format("strategy %s: no answer for %.0f s; UCX hangs, see --logs and "
                                   "--timeout",
                                   title().c_str(), options_.timeout_s + kSlackSeconds));
            }
        }
        return {*answers[0], *answers[1]};
    }
    std::array<std::string, 2> hear(FrameType wanted)
    {
        return hear(wanted, [] {});
    }

    // After the last kBye: what went wrong at the processes' end, or an empty string.
    std::string end()
    {
        for (size_t i = 0; i < processes_.size(); ++i) {
            if (!processes_[i]->wait(kEndSeconds)) {
                return "its process does not end";
            }
            if (!processes_[i]->ended_well()) {
                return "its process " + processes_[i]->how_it_ended() +
                       " when all was done: " + last_error(read_file(logs_[i].path, 0));
            }
        }
        return "";
    }

    // What zip's interfaces have logged since the last call.
    std::optional<ZipCounters> new_counters()
    {
        std::string text;
        for (Log &log : logs_) {
            const std::string more = read_file(log.path, log.read);
            log.read += more.size();
            text += more + "\n";
        }
        return parse_zip_log(text);
    }

    // "ucx (put_zcopy)"
    std::string title() const
    {
        return variant_.strategy + (variant_.setting.empty() ? "" : " (" + variant_.setting + ")");
    }

private:
    struct Log {
        std::string path;
        uint64_t read = 0;
    };

    struct Failure {
        size_t side;
        int status;
        std::string text;
    };

    // A pair of connected sockets.
    class Sockets {
    public:
        Sockets()
        {
            if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends_) != 0) {
                throw Error(std::string("cannot make a socket: ") + std::strerror(errno));
            }
        }
        ~Sockets()
        {
            for (const int fd : ends_) {
                if (fd >= 0) {
                    close(fd);
                }
            }
        }
        Sockets(const Sockets &) = delete;
        Sockets &operator=(const Sockets &) = delete;
        int get(size_t end) const { return ends_[end]; }
        int take(size_t end) { return std::exchange(ends_[end], -1); }

    private:
        int ends_[2] = {-1, -1};
    };

    void note_failure(size_t side, FrameType type, const std::string &text)
    {
        const json doc = json::parse(text, nullptr, false);
        if (type != FrameType::kFailed || !doc.is_object()) {
            failures_.push_back({side, kExitFailed, "answered out of turn"});
            return;
        }
        failures_.push_back(
                {side, doc.value("status", static_cast<int>(kExitFailed)), doc.value("text", "?")});
    }

    // One side has failed: waits a moment for what the other has to say, and throws the best
    // reason.
    [[noreturn]] void find_out()
    {
        const double deadline = now_s() + 1.0;
        const auto all_ended = [this] {
            return std::all_of(processes_.begin(), processes_.end(),
                               [](const auto &process) { return process->ended(); });
        };
        bool ended = false;
        do {
            ended = all_ended();
            for (size_t side = 0; side < 2; ++side) {
                FrameType type{};
                while (auto text = channels_[side].try_receive(&type, kMaxFrame)) {
                    if (type == FrameType::kFailed) {
                        note_failure(side, type, *text);
                    }
                }
            }
            usleep(2000);
        } while (!ended && now_s() < deadline);
        check_interrupted();

        const auto report = [this](const char *who, const std::string &what, int status) {
            throw Error("strategy " + title() + ", " + who + ": " + what,
                        static_cast<ExitStatus>(status));
        };
        // Bits that changed are worse than all else.
        for (const Failure &failure : failures_) {
            if (failure.status == kExitMismatch || failure.status == kExitZipNotUsed) {
                report(kSideName[failure.side], failure.text, failure.status);
            }
        }
        // Then a process that ended without a word, which the other one may complain of.
        for (size_t i = 0; i < processes_.size(); ++i) {
            const bool spoke =
                    std::any_of(failures_.begin(), failures_.end(), [&](const Failure &failure) {
                        return options_.in_process || failure.side == i;
                    });
            if (!spoke && processes_[i]->ended()) {
                const std::string why = last_error(read_file(logs_[i].path, 0));
                report(options_.in_process ? "both sides" : kSideName[i],
                       "its process " + processes_[i]->how_it_ended() +
                               (why.empty() ? "" : ": " + why),
                       kExitFailed);
            }
        }
        for (const Failure &failure : failures_) {
            if (failure.text.find("the peer's process ended") == std::string::npos) {
                report(kSideName[failure.side], failure.text, failure.status);
            }
        }
        report("both sides", failures_.empty() ? "closed their channels" : failures_[0].text,
               kExitFailed);
        std::abort(); // not reached
    }

    // What processes that were killed leave behind.
    void remove_fabric() const
    {
        std::error_code ignored;
        for (const auto &entry : std::filesystem::directory_iterator("/dev/shm", ignored)) {
            if (entry.path().filename().string().find(fabric_ + ".") != std::string::npos) {
                std::filesystem::remove(entry.path(), ignored);
            }
        }
    }

    const P2pOptions &options_;
    P2pVariant variant_;
    std::string fabric_;
    std::vector<OobChannel> channels_;
    std::vector<std::unique_ptr<ChildProcess>> processes_;
    std::vector<Log> logs_;
    std::vector<Failure> failures_;
};

// ---------------------------------------------------------------------------- points

// A data set that children read.
struct Pool {
    std::string dtype;
    std::string data; // for the table and the JSON
    std::string path;
};

struct Point {
    std::string op;
    uint64_t size = 0;
};

// What one variant gave at a point.
struct Measured {
    std::vector<double> seconds;       // of all iterations
    std::vector<double> round_seconds; // medians
    std::optional<double> ratio;
    std::string lanes;

    double median() const { return percentile(seconds, 0.5); }
};

// What belongs to all rows of a wire.
struct Conditions {
    std::string device; // GPU's name, or empty
    std::optional<bool> mps;
};

unsigned iterations_of(const P2pOptions &options, uint64_t size)
{
    const uint64_t bytes = size * options.window;
    return options.iterations != 0
                   ? options.iterations
                   : static_cast<unsigned>(std::clamp<uint64_t>(kRoundBytes / bytes,
                                                                kLeastIterations, kMostIterations));
}

unsigned warmup_of(const P2pOptions &options, uint64_t size)
{
    const uint64_t bytes = size * options.window;
    return options.warmup != 0 ? options.warmup
                               : static_cast<unsigned>(std::clamp<uint64_t>(
                                         kWarmupBytes / bytes, kLeastWarmup, kMostWarmup));
}

std::vector<uint64_t> sizes_of(const P2pOptions &options)
{
    if (options.sweep.empty()) {
        return parse_size_list(options.sizes);
    }
    const size_t colon = options.sweep.find(':');
    const uint64_t from = parse_size(options.sweep.substr(0, colon));
    const uint64_t to =
            colon == std::string::npos ? 0 : parse_size(options.sweep.substr(colon + 1));
    if (from == 0 || to < from) {
        throw Error("--sweep " + options.sweep +
                    " is not of the form FROM:TO; write for example 64K:1G");
    }
    std::vector<uint64_t> sizes;
    for (uint64_t size = from; size <= to; size *= 2) {
        sizes.push_back(size);
        if (size > to / 2) {
            break;
        }
    }
    return sizes;
}

// Which variants a point has: a scheme of rendezvous is nothing to a put.
bool takes_part(const P2pVariant &variant, const Point &point)
{
    return point.op != "put" || variant.setting.empty() || variant.setting == "default";
}

using Pairs = std::vector<std::unique_ptr<Pair>>;

class Bench {
public:
    Bench(const P2pOptions &options, const RunFolder &folder, const P2pWire &wire,
          const std::vector<P2pVariant> &variants, unsigned number)
        : options_(options), wire_(wire)
    {
        for (size_t i = 0; i < variants.size(); ++i) {
            pairs_.push_back(std::make_unique<Pair>(
                    options, wire, variants[i], folder,
                    std::to_string(getpid()) + "." + std::to_string(number) + "." +
                            std::to_string(i) + "." + variants[i].strategy));
        }
        introduce();
    }

    ~Bench()
    {
        for (const auto &pair : pairs_) {
            pair->ask_to_end();
        }
    }
    Bench(const Bench &) = delete;
    Bench &operator=(const Bench &) = delete;

    const Conditions &conditions() const { return conditions_; }

    // All variants at one point, in turn.
    std::vector<std::optional<Measured>> measure(const Pool &pool, const Point &point,
                                                 ProgressBar &bar)
    {
        const unsigned warmup = warmup_of(options_, point.size);
        const unsigned iterations = iterations_of(options_, point.size);
        const std::string label = point.op + ", " + format_size(point.size);
        const std::string opening = json{
                {"op", point.op},
                {"size", point.size},
                {"window", options_.window},
                {"dtype", pool.dtype},
                {"pool", pool.path}}.dump();
        std::vector<Pair *> pairs;
        for (const auto &pair : pairs_) {
            pairs.push_back(takes_part(pair->variant(), point) ? pair.get() : nullptr);
        }
        // All at the same time, for opening takes long.
        for_all(pairs, [&](Pair &pair) { pair.say(FrameType::kDataset, opening); });
        for_all(pairs, [&](Pair &pair) { pair.hear(FrameType::kReady); });

        std::vector<std::optional<Measured>> out(pairs.size());
        const auto run = [&](size_t i, unsigned count) {
            pairs[i]->say(FrameType::kRun, json{{"iterations", count}}.dump());
            return json::parse(
                           pairs[i]->hear(FrameType::kResult, [&] { bar.advance(1, label); })[0])
                    .get<std::vector<double>>();
        };
        for (size_t i = 0; i < pairs.size(); ++i) {
            if (pairs[i] != nullptr) {
                out[i].emplace();
                run(i, warmup);
            }
        }
        for (unsigned round = 0; round < options_.rounds; ++round) {
            for (size_t turn = 0; turn < pairs.size(); ++turn) {
                // Each is the first of a round as often as the others.
                const size_t i = (turn + round) % pairs.size();
                if (pairs[i] == nullptr) {
                    continue;
                }
                const std::vector<double> seconds = run(i, iterations);
                out[i]->seconds.insert(out[i]->seconds.end(), seconds.begin(), seconds.end());
                out[i]->round_seconds.push_back(percentile(seconds, 0.5));
            }
        }

        for_all(pairs, [&](Pair &pair) { pair.say(FrameType::kBye, ""); });
        const uint64_t bytes = point.size * options_.window *
                               (point.op == "bidirectional" ? 2 : 1) *
                               (warmup + uint64_t{options_.rounds} * iterations);
        for (size_t i = 0; i < pairs.size(); ++i) {
            if (pairs[i] == nullptr) {
                continue;
            }
            const json last = json::parse(pairs[i]->hear(FrameType::kBye)[0]);
            out[i]->lanes = last.value("lanes", "");
            if (const std::optional<ZipCounters> counters = pairs[i]->new_counters()) {
                out[i]->ratio = ratio_of(*counters, bytes);
            }
        }
        return out;
    }

    // Ends the processes in order. What was measured is good, whatever comes now.
    void close()
    {
        for (const auto &pair : pairs_) {
            pair->say(FrameType::kBye, "");
            pair->hear(FrameType::kBye);
        }
        for (const auto &pair : pairs_) {
            const std::string wrong = pair->end();
            if (!wrong.empty()) {
                std::fprintf(stderr, "zipperf: warning: strategy %s: %s\n", pair->title().c_str(),
                             wrong.c_str());
            }
        }
    }

private:
    template <typename Action>
    static void for_all(const std::vector<Pair *> &pairs, const Action &action)
    {
        for (Pair *pair : pairs) {
            if (pair != nullptr) {
                action(*pair);
            }
        }
    }

    void introduce()
    {
        for (const auto &pair : pairs_) {
            std::array<std::string, 2> texts;
            for (size_t side = 0; side < 2; ++side) {
                const std::string &memory = side == 0 ? options_.memory : options_.to_memory;
                texts[side] = json{{"first", side == 0},
                                   {"cuda", memory == "cuda"},
                                   {"gpus",
                                    side == 0 ? std::vector<int>{options_.gpu} : options_.to_gpus},
                                   {"zip", pair->variant().zip},
                                   {"verify", options_.verify},
                                   {"registered", options_.registered},
                                   {"misalign", options_.misalign},
                                   {"source", parse_size(options_.source_size)},
                                   {"timeout", options_.timeout_s}}
                                      .dump();
            }
            pair->say(FrameType::kHello, texts);
        }
        for (const auto &pair : pairs_) {
            for (const std::string &text : pair->hear(FrameType::kHello)) {
                const json hello = json::parse(text);
                const std::string device = hello.value("device", "");
                conditions_.device = device.empty() ? conditions_.device : device;
                if (hello.contains("mps")) {
                    conditions_.mps = conditions_.mps.value_or(true) && hello["mps"].get<bool>();
                }
            }
        }
        if (!conditions_.device.empty() && !conditions_.mps) {
            conditions_.mps = options_.mps; // the driver cannot tell
        }
        if (options_.mps && conditions_.mps == false) {
            std::fprintf(stderr, "zipperf: warning: MPS was started, but the driver says that the "
                                 "processes do not use it; --logs keeps its logs\n");
        }
    }

    const P2pOptions &options_;
    const P2pWire &wire_;
    Pairs pairs_;
    Conditions conditions_;
};

// ---------------------------------------------------------------------------- results

// Of each strategy the variant with the shortest median, in the order of the variants.
std::vector<size_t> best_variants(const std::vector<P2pVariant> &variants,
                                  const std::vector<std::optional<Measured>> &measured)
{
    std::vector<size_t> best;
    for (size_t i = 0; i < variants.size(); ++i) {
        if (!measured[i]) {
            continue;
        }
        const auto same = std::find_if(best.begin(), best.end(), [&](size_t other) {
            return variants[other].strategy == variants[i].strategy;
        });
        if (same == best.end()) {
            best.push_back(i);
        } else if (measured[i]->median() < measured[*same]->median()) {
            *same = i;
        }
    }
    return best;
}

double gbps(uint64_t bytes, double seconds)
{
    return seconds > 0 ? static_cast<double>(bytes) / seconds / 1e9 : 0.0;
}

// Numbers of the GPUs, "0 to 1", where they are not one. Only the sides with GPU memory count.
std::string gpus_of(const P2pOptions &options)
{
    if (options.memory != "cuda" || options.to_memory != "cuda" ||
        options.to_gpus == std::vector<int>{options.gpu}) {
        return "";
    }
    std::string text = std::to_string(options.gpu) + " to ";
    for (size_t i = 0; i < options.to_gpus.size(); ++i) {
        text += (i > 0 ? " and " : "") + std::to_string(options.to_gpus[i]);
    }
    return text;
}

// Rows of all strategies at a point.
std::vector<BenchRow> rows_of(const P2pOptions &options, const P2pWire &wire,
                              const Conditions &conditions, const Pool &pool, const Point &point,
                              const std::vector<P2pVariant> &variants,
                              const std::vector<std::optional<Measured>> &measured)
{
    const std::vector<size_t> best = best_variants(variants, measured);
    const auto find = [&](const char *strategy) -> const Measured * {
        for (const size_t i : best) {
            if (variants[i].strategy == strategy) {
                return &*measured[i];
            }
        }
        return nullptr;
    };
    const Measured *ucx = find("ucx");
    const Measured *plain = find("plain");
    const Measured *base = ucx == nullptr                                        ? plain
                           : plain == nullptr || ucx->median() < plain->median() ? ucx
                                                                                 : plain;
    const uint64_t bytes = point.size * options.window; // of an iteration, each way

    std::vector<BenchRow> rows;
    for (const size_t i : best) {
        const Measured &m = *measured[i];
        const Summary time = summarize(m.seconds);
        const auto us = [&options](double seconds) { return seconds / options.window * 1e6; };
        BenchRow row;
        row.size = point.size;
        row.dtype = pool.dtype;
        row.data = pool.data;
        row.wire = wire.name;
        row.strategy = variants[i].strategy;
        if (!variants[i].setting.empty()) {
            row.setting = variants[i].setting == "default"
                                  ? "default"
                                  : "UCX_RNDV_SCHEME=" + variants[i].setting;
        }
        row.direction = point.op;
        row.gbps_median = gbps(bytes, time.median);
        row.gbps_p10 = gbps(bytes, time.p90); // the slow end of the times is the low bandwidth
        row.gbps_p90 = gbps(bytes, time.p10);
        row.us_median = us(time.median);
        row.us_p10 = us(time.p10);
        row.us_p90 = us(time.p90);
        row.ratio = m.ratio;
        if (plain != nullptr) {
            row.plain_gbps_median = gbps(bytes, plain->median());
            row.speedup_plain = plain->median() / time.median;
        }
        if (ucx != nullptr) {
            row.ucx_gbps_median = gbps(bytes, ucx->median());
        }
        if (base != nullptr) {
            row.speedup = base->median() / time.median;
            // Each round against the same round of what it is compared with: drifts cancel out.
            std::vector<double> pairs;
            for (size_t round = 0; round < m.round_seconds.size(); ++round) {
                pairs.push_back(base->round_seconds[round] / m.round_seconds[round]);
            }
            const Summary paired = summarize(pairs);
            row.speedup_p10 = paired.p10;
            row.speedup_p90 = paired.p90;
        }
        if (wire.gbps > 0) {
            row.wire_gbps = wire.gbps;
            row.bound_gbps = wire.gbps / m.ratio.value_or(1.0);
        } else if (base != nullptr && m.ratio) {
            // Nothing is known of the wire but what went over it.
            row.bound_gbps = gbps(bytes, base->median()) / *m.ratio;
        }
        row.window = options.window;
        row.messages = options.window;
        row.repeats = m.seconds.size();
        row.verified = options.verify; // a difference would have ended the run
        row.memory = options.memory;
        row.to_memory = options.to_memory;
        row.lanes = m.lanes;
        if (options.misalign != 0) {
            row.misalign = options.misalign;
        }
        row.mps = conditions.mps.value_or(options.mps);
        row.in_process = options.in_process;
        if (const std::string gpus = gpus_of(options); !gpus.empty()) {
            row.gpus = gpus;
        }
        rows.push_back(std::move(row));
    }
    return rows;
}

void print_rows(const P2pOptions &options, const P2pWire &wire, const Conditions &conditions,
                const std::vector<BenchRow> &rows)
{
    const BenchRow &first = rows.front();
    const bool gpu = options.memory == "cuda" || options.to_memory == "cuda";
    const std::string gpus = gpus_of(options);
    std::printf("%s over %s, %s, %s; %s to %s memory, %u at a time, %s%s%s%s\n",
                first.direction.c_str(), wire.name.c_str(), first.dtype.c_str(), first.data.c_str(),
                options.memory.c_str(), options.to_memory.c_str(), options.window,
                options.in_process ? "two threads of one process" : "two processes",
                !gpu                             ? ""
                : conditions.mps.value_or(false) ? " under MPS on "
                : options.in_process             ? " on "
                                                 : " WITHOUT MPS on ",
                conditions.device.c_str(), gpus.empty() ? "" : (", GPU " + gpus).c_str());
    Table table({"size", "strategy", "us", "p10..p90", "GB/s", "ratio", "speed-up", "p10..p90",
                 "of plain", "bound GB/s", "bits"});
    for (const BenchRow &row : rows) {
        const std::string setting =
                row.setting.empty() ? ""
                                    : " (" + row.setting.substr(row.setting.find('=') + 1) + ")";
        table.add({format_size(*row.size), row.strategy + setting, format("%.1f", *row.us_median),
                   format("%.1f..%.1f", *row.us_p10, *row.us_p90), format("%.3f", *row.gbps_median),
                   row.ratio ? format("%.3f", *row.ratio) : "",
                   row.speedup ? format("%.2f", *row.speedup) : "",
                   row.speedup ? format("%.2f..%.2f", *row.speedup_p10, *row.speedup_p90) : "",
                   row.speedup_plain ? format("%.2f", *row.speedup_plain) : "",
                   row.bound_gbps ? format("%.2f", *row.bound_gbps) : "",
                   *row.verified ? "same" : ""});
    }
    table.print(stdout);
    std::printf("\n");
    std::fflush(stdout);
}

// Says which of the plugin's strategies compressed nothing at any size.
void warn_of_unused(const P2pWire &wire, const std::vector<BenchRow> &rows,
                    const std::vector<P2pVariant> &variants)
{
    for (const P2pVariant &variant : variants) {
        if (!variant.zip) {
            continue;
        }
        bool seen = false;
        std::string lanes;
        for (const BenchRow &row : rows) {
            if (row.strategy == variant.strategy && row.wire == wire.name) {
                seen = seen || row.ratio.has_value();
                lanes = row.lanes;
            }
        }
        if (!seen) {
            std::fprintf(
                    stderr,
                    "zipperf: warning: strategy %s over %s: UCX gave zip nothing to send "
                    "(lanes %s); UCX_PROTO_INFO=y by --env-of, and --logs, show what it picks\n",
                    variant.strategy.c_str(), wire.name.c_str(), lanes.c_str());
        }
    }
}

// ---------------------------------------------------------------------------- checks and data

Pool write_pool(const RunFolder &folder, const std::string &dtype, const std::string &data,
                uint64_t at_least, const std::vector<SafetensorsFile> &files)
{
    const ValuePool values = make_value_pool(*values_from_name(data), dtype, at_least, files);
    if (values.bytes.empty()) {
        throw Error("there are no values of " + dtype + " in the model; name another --dtype");
    }
    Pool pool{dtype, values.data, folder.file("pool." + dtype + "." + data)};
    std::ofstream out(pool.path, std::ios::binary);
    out.write(reinterpret_cast<const char *>(values.bytes.data()),
              static_cast<std::streamsize>(values.bytes.size()));
    if (!out.flush()) {
        throw Error("cannot write " + pool.path + "; set TMPDIR to a folder with room for " +
                    format_size(values.bytes.size()));
    }
    return pool;
}

// Host memory of all processes for the longest message, as far as it can be told.
void check_memory(const P2pOptions &options, uint64_t longest, size_t most_pairs)
{
    const uint64_t window = longest * options.window;
    const uint64_t source = std::max(parse_size(options.source_size), 2 * window);
    const bool both =
            std::find(options.ops.begin(), options.ops.end(), "bidirectional") != options.ops.end();
    uint64_t pair = 0;
    for (const std::string *memory : {&options.memory, &options.to_memory}) {
        const bool sends = both || memory == &options.memory;
        const bool receives = both || memory == &options.to_memory;
        pair += *memory == "host" ? (sends ? source : 0) + (receives ? 2 * window : 0) : 0;
        pair += longest; // a message on its way into the source
    }
    const uint64_t available = available_memory();
    if (pair > available / most_pairs) {
        throw Error(format("%s do not fit: %zu pairs of processes need %s each, and %s are free; "
                           "send shorter or fewer at a time, name fewer strategies, or set "
                           "--source-size",
                           format_size(window).c_str(), most_pairs, format_size(pair).c_str(),
                           format_size(available).c_str()));
    }
}

void measure_all(const P2pOptions &options, const std::vector<P2pWire> &wires,
                 const std::vector<std::vector<P2pVariant>> &variants,
                 const std::vector<uint64_t> &sizes, const std::vector<Pool> &pools,
                 const RunFolder &folder)
{
    uint64_t steps = 0;
    for (const std::vector<P2pVariant> &of_wire : variants) {
        for (const std::string &op : options.ops) {
            for (const uint64_t size : sizes) {
                for (const P2pVariant &variant : of_wire) {
                    if (takes_part(variant, {op, size})) {
                        steps += pools.size() *
                                 (warmup_of(options, size) +
                                  uint64_t{options.rounds} * iterations_of(options, size));
                    }
                }
            }
        }
    }
    ProgressBar bar(steps, false);
    std::vector<BenchRow> rows;
    for (size_t w = 0; w < wires.size(); ++w) {
        Bench bench(options, folder, wires[w], variants[w], static_cast<unsigned>(w));
        for (const std::string &op : options.ops) {
            for (const Pool &pool : pools) {
                std::vector<BenchRow> of_table;
                for (const uint64_t size : sizes) {
                    const Point point{op, size};
                    const auto measured = bench.measure(pool, point, bar);
                    const auto more = rows_of(options, wires[w], bench.conditions(), pool, point,
                                              variants[w], measured);
                    of_table.insert(of_table.end(), more.begin(), more.end());
                }
                bar.clear();
                print_rows(options, wires[w], bench.conditions(), of_table);
                rows.insert(rows.end(), of_table.begin(), of_table.end());
                // After each table: a long run that is interrupted leaves what it has finished.
                if (!options.json.empty()) {
                    write_bench_json(options.json, "zipperf p2p", rows, bench.conditions().device);
                }
            }
        }
        bench.close();
        warn_of_unused(wires[w], rows, variants[w]);
    }
}

} // namespace

void run_p2p_bench(const P2pOptions &given)
{
    P2pOptions options = given;
    options.to_memory = options.to_memory.empty() ? options.memory : options.to_memory;
    options.to_gpus = options.to_gpus.empty() ? std::vector<int>{options.gpu} : options.to_gpus;
    if (options.to_gpus.size() > 1 && options.ops != std::vector<std::string>{"send"}) {
        throw Error("several receiving GPUs (--to-gpu) are for --op send alone");
    }

    const std::vector<uint64_t> sizes = sizes_of(options);
    const std::vector<P2pWire> wires = p2p_wires(options);
    std::vector<std::vector<P2pVariant>> variants;
    size_t most_pairs = 1;
    for (const P2pWire &wire : wires) {
        variants.push_back(p2p_variants(options, wire));
        most_pairs = std::max(most_pairs, variants.back().size());
    }
    const uint64_t longest = *std::max_element(sizes.begin(), sizes.end());
    const uint64_t available = available_memory();
    if (longest > available / options.window) {
        throw Error(format("size %s does not fit: %s of memory are free",
                           format_size(longest).c_str(), format_size(available).c_str()));
    }
    check_memory(options, longest, most_pairs);
    if (!options.json.empty()) {
        check_json_writable(options.json);
    }
    std::vector<SafetensorsFile> files;
    for (const std::string &path : options.models) {
        files.emplace_back(path);
    }

    const RunFolder folder;
    const RunFolder logs(options.logs.empty() ? folder.path() : options.logs);
    std::optional<MpsDaemon> mps;
    if (options.mps) {
        mps.emplace(folder.path(), logs.path());
    }
    std::vector<Pool> pools;
    for (const std::string &dtype : options.dtypes) {
        for (const std::string &data : options.data) {
            const uint64_t at_least =
                    std::max(longest * options.window, parse_size(options.source_size));
            pools.push_back(write_pool(folder, dtype, data, at_least, files));
            check_interrupted();
        }
    }
    measure_all(options, wires, variants, sizes, pools, logs);
}

} // namespace tools
