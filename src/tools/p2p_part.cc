// SPDX-License-Identifier: BSD-3-Clause
// `zipperf p2p`: one side of the transfers.
//
// The process that measures says on the control channel what to do: kHello (who this is), then for
// each point kDataset (open workers and memory), kRun (so many iterations) as often as it likes,
// and kBye (close them). On the other channel the two sides start each iteration together and,
// after it, compare hashes. What is timed crosses UCP alone.
#include "tools/p2p_bench.h"

#include "tools/block_hashes.h"
#include "tools/clock.h"
#include "tools/cuda_driver.h"
#include "tools/data_set.h"
#include "tools/error.h"
#include "tools/host_memory.h"
#include "tools/interrupt.h"
#include "tools/oob_channel.h"
#include "tools/table.h"
#include "tools/ucp_peer.h"
#include "tools/units.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <optional>
#include <poll.h>
#include <thread>
#include <unistd.h>

namespace tools {

namespace {

using nlohmann::json;

constexpr int kFirstDescriptor = 3;
constexpr uint64_t kMaxFrame = uint64_t{1} << 30;

// Slots are pages, so that each message starts as far from a page's start as --misalign says.
constexpr uint64_t kSlotAlignment = 4096;
constexpr size_t kMaxSlots = 4096;
// Staging for what is hashed out of GPU memory: long enough for a copy engine.
constexpr uint64_t kStaging = 16 << 20;
static_assert(kStaging % kHashBlock == 0);

// Tags: an iteration's number above, the message's index below.
constexpr ucp_tag_t kAckTag = ucp_tag_t{1} << 63; // all messages are here
constexpr ucp_tag_t kEndTag = ucp_tag_t{1} << 62; // all puts were flushed
ucp_tag_t message_tag(uint64_t iteration, size_t index)
{
    return iteration << 16 | index;
}

// Memory of either kind that messages lie in.
class TransferMemory {
public:
    // `context`: whose device it is on; NULL: the host.
    TransferMemory(const cuda::Context *context, uint64_t size) : context_(context)
    {
        if (context != nullptr) {
            context->use();
            device_.emplace(cuda::Memory::kDevice, size);
            staging_.emplace(cuda::Memory::kPinnedHost, std::min(size, kStaging));
            stream_.emplace();
        } else {
            host_.resize(size);
        }
    }

    std::byte *data() { return device_ ? device_->pointer<std::byte>() : host_.data(); }

    void write(uint64_t offset, const std::byte *from, uint64_t size)
    {
        if (device_) {
            // Waits until the device has it: cuMemcpy from pageable memory may return before.
            stream().copy(device_->address() + offset, reinterpret_cast<cuda::Address>(from), size);
            stream().synchronize();
        } else {
            std::memcpy(host_.data() + offset, from, static_cast<size_t>(size));
        }
    }

    // Fills with a value that is no data, and waits for it.
    void poison(uint64_t offset, uint64_t size, uint8_t value)
    {
        if (device_) {
            stream().set_bytes(device_->address() + offset, value, size);
            stream().synchronize();
        } else {
            std::memset(host_.data() + offset, value, static_cast<size_t>(size));
        }
    }

    std::vector<Hash128> hashes(uint64_t offset, uint64_t size)
    {
        if (!device_) {
            return hash_blocks(host_.data() + offset, size);
        }
        std::vector<Hash128> all;
        for (uint64_t done = 0; done < size;) {
            const uint64_t part = std::min(size - done, staging_->size());
            // Whole blocks, but for the last one. Staging that is shorter holds all of the memory.
            stream().copy(staging_->address(), device_->address() + offset + done, part);
            stream().synchronize();
            const auto some = hash_blocks(staging_->pointer<const std::byte>(), part);
            all.insert(all.end(), some.begin(), some.end());
            done += part;
        }
        return all;
    }

    std::string read(uint64_t offset, uint64_t size)
    {
        std::string bytes(static_cast<size_t>(size), '\0');
        if (device_) {
            context_->use();
            cuda::download(bytes.data(), device_->address() + offset, size);
        } else {
            std::memcpy(bytes.data(), host_.data() + offset, bytes.size());
        }
        return bytes;
    }

private:
    // For work in the context, which is current then.
    cuda::Stream &stream()
    {
        context_->use();
        return *stream_;
    }

    const cuda::Context *context_;
    Arena host_;
    std::optional<cuda::Buffer> device_;
    std::optional<cuda::Buffer> staging_;
    std::optional<cuda::Stream> stream_;
};

// Memory cut into places for messages, known to UCX.
class Slots {
public:
    Slots(const UcpPeer &peer, const cuda::Context *context, uint64_t size, size_t count,
          uint64_t misalign, bool registered)
        : size_(size),
          stride_((size + misalign + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment),
          misalign_(misalign), count_(count), memory_(context, stride_ * count)
    {
        if (registered) {
            known_.emplace(peer, memory_.data(), static_cast<size_t>(stride_ * count));
        }
    }

    size_t count() const { return count_; }
    uint64_t size() const { return size_; }
    uint64_t offset(size_t slot) const { return slot % count_ * stride_ + misalign_; }
    std::byte *data(size_t slot) { return memory_.data() + offset(slot); }
    ucp_mem_h handle() const { return known_ ? known_->handle() : nullptr; }
    std::string key() const { return known_->key(); }
    TransferMemory &memory() { return memory_; }

private:
    uint64_t size_, stride_, misalign_;
    size_t count_;
    TransferMemory memory_;
    std::optional<UcpMemory> known_; // ends before the memory does
};

// How many slots of a size a source of this many bytes has: for two windows at least.
size_t source_slots(uint64_t source, uint64_t size, size_t window)
{
    const uint64_t fit = source / std::max<uint64_t>(size, 1);
    const size_t slots = static_cast<size_t>(std::min<uint64_t>(fit, kMaxSlots));
    return std::max(slots / window * window, 2 * window);
}

struct Role {
    bool first = false;                      // the side that sends, and takes the time
    std::vector<const cuda::Context *> gpus; // empty: the host's memory
    bool zip = false;
    bool verify = true;
    bool registered = true;
    uint64_t misalign = 0;
    uint64_t source = 0;
    double timeout_s = 0;

    const cuda::Context *gpu(size_t i) const { return i < gpus.size() ? gpus[i] : nullptr; }
};

ValuePool read_pool(const std::string &path, const std::string &dtype)
{
    std::ifstream in(path, std::ios::binary | std::ios::ate);
    ValuePool pool{dtype, "", {}};
    pool.bytes.resize(in ? static_cast<size_t>(in.tellg()) : 0);
    in.seekg(0);
    in.read(reinterpret_cast<char *>(pool.bytes.data()),
            static_cast<std::streamsize>(pool.bytes.size()));
    if (!in || pool.bytes.empty()) {
        throw Error("cannot read " + path + "; is there room in TMPDIR?");
    }
    return pool;
}

// What this process was started with.
std::string transports()
{
    const char *tls = std::getenv("UCX_TLS");
    return tls != nullptr ? tls : "all";
}

// Workers, endpoint and memory of one point, and its iterations.
class Point {
public:
    Point(const Role &role, OobChannel &control, OobChannel &pair, const json &point)
        : role_(role), control_(control), pair_(pair), op_(point.at("op").get<std::string>()),
          size_(point.at("size").get<uint64_t>()), window_(point.at("window").get<size_t>()),
          peer_(transports(), {.one_sided = true, .peer_errors = false})
    {
        if (role.zip && !peer_.has_transport("zip")) {
            throw Error("UCX did not load the plugin, or it found no device (UCX_PLUGIN_PATH, UCX "
                        ">= 1.22); the reason is in the processes' logs, see --logs",
                        kExitZipNotUsed);
        }
        send_pair(FrameType::kAddress, peer_.address());
        peer_.connect(receive_pair(FrameType::kAddress));

        const bool both = op_ == "bidirectional";
        sends_ = role.first || both;
        receives_ = !role.first || both;
        if (sends_) {
            source_ = std::make_unique<Slots>(peer_, role.gpu(0), size_,
                                              source_slots(role.source, size_, window_),
                                              role.misalign, role.registered);
            fill_source(point);
        }
        if (receives_) {
            // Two windows: UCX never sees the same addresses twice in a row.
            for (size_t i = 0; i < std::max<size_t>(role.gpus.size(), 1); ++i) {
                targets_.push_back(std::make_unique<Slots>(peer_, role.gpu(i), size_, 2 * window_,
                                                           role.misalign,
                                                           role.registered || op_ == "put"));
            }
        }
        if (op_ == "put") {
            if (role.first) {
                const std::string key = receive_pair(FrameType::kKey);
                if (key.size() < sizeof(remote_address_)) {
                    throw Error("the other side sent a broken key of memory");
                }
                std::memcpy(&remote_address_, key.data(), sizeof(remote_address_));
                key_ = std::make_unique<UcpRemoteKey>(peer_, key.substr(sizeof(remote_address_)));
            } else {
                const auto address = reinterpret_cast<uint64_t>(target(0).data(0));
                std::string key(reinterpret_cast<const char *>(&address), sizeof(address));
                send_pair(FrameType::kKey, key + target(0).key());
            }
        }
    }

    // Seconds of each iteration, of the first side.
    std::vector<double> run(unsigned iterations)
    {
        std::vector<double> seconds;
        for (unsigned i = 0; i < iterations; ++i) {
            ++iteration_;
            started_ = now_s();
            const double taken = op_ == "put" ? put() : exchange();
            if (role_.verify) {
                verify();
            }
            if (role_.first) {
                seconds.push_back(taken);
                control_.send(FrameType::kProgress, "", role_.timeout_s);
            }
        }
        return seconds;
    }

    // Lanes of the endpoint, "tcp/lo zip/lo".
    std::string lanes() const { return peer_.endpoint_transports(); }

    // Closes the endpoint in order, while the other side does the same.
    void close()
    {
        meet();
        key_.reset();
        peer_.flush_and_close(kCloseSeconds);
        meet();
    }

private:
    static constexpr double kCloseSeconds = 2.0;
    static constexpr double kLookEvery = 0.02;

    void fill_source(const json &point)
    {
        const ValuePool pool = read_pool(point.at("pool").get<std::string>(),
                                         point.at("dtype").get<std::string>());
        std::vector<std::byte> message(static_cast<size_t>(size_));
        for (size_t slot = 0; slot < source_->count(); ++slot) {
            // Other bytes in each slot, and on each side.
            fill_from_pool(pool, 2 * slot + (role_.first ? 1 : 2), message.data(), size_);
            source_->memory().write(source_->offset(slot), message.data(), size_);
        }
        hashes_.assign(source_->count(), {});
    }

    // ---- what the two sides say to each other, outside of what is timed

    void send_pair(FrameType type, const std::string &payload)
    {
        pair_.send(type, payload, role_.timeout_s);
    }

    std::string receive_pair(FrameType type)
    {
        return pair_.receive(type, kMaxFrame, role_.timeout_s, [this] { return progress(); });
    }

    // Always true: whoever waits here is about to be timed, and stays awake.
    bool progress()
    {
        peer_.spin();
        return true;
    }

    void meet()
    {
        send_pair(FrameType::kReady, "");
        receive_pair(FrameType::kReady);
    }

    // ---- what is timed

    // Progress until `done`; throws when a request failed, the other side is gone, or it takes too
    // long.
    template <typename Done>
    void spin_until(const UcpPeer::Batch &batch, const Done &done)
    {
        unsigned turns = 0;
        double looked = started_;
        while (!done()) {
            peer_.spin();
            if ((++turns & 0xff) != 0) {
                continue;
            }
            const double now = now_s();
            if (now - looked < kLookEvery) {
                continue;
            }
            looked = now;
            check_interrupted();
            pair_.check_peer();
            check(batch.status);
            if (now - started_ > role_.timeout_s) {
                throw Error(format("%s of %s took longer than %g s (UCX_TLS=%s, lanes %s); the "
                                   "transport hangs, or the wire is too slow for --timeout",
                                   op_.c_str(), format_size(size_).c_str(), role_.timeout_s,
                                   peer_.tls().c_str(), lanes().c_str()));
            }
        }
        check(batch.status);
    }

    void check(ucs_status_t status) const
    {
        if (status != UCS_OK) {
            throw Error(format("UCX could not %s %s (UCX_TLS=%s): %s", op_.c_str(),
                               format_size(size_).c_str(), peer_.tls().c_str(),
                               ucs_status_string(status)));
        }
    }

    static bool all_done(const UcpPeer::Batch &batch) { return batch.done == batch.posted; }

    size_t first_source() const { return iteration_ * window_; }
    size_t first_target() const { return iteration_ % 2 * window_; }
    // Of a message of the window.
    Slots &target(size_t message) { return *targets_[message % targets_.size()]; }

    void poison()
    {
        const auto value = static_cast<uint8_t>(0xa5 ^ (iteration_ & 0xff));
        for (size_t i = 0; i < window_; ++i) {
            target(i).memory().poison(target(i).offset(first_target() + i), size_, value);
        }
    }

    // Messages by tag, in one direction or both; the acknowledgement of each direction ends it.
    double exchange()
    {
        UcpPeer::Batch sent;
        UcpPeer::Batch arrived;
        UcpPeer::Batch acknowledged;
        std::vector<UcpPeer::Receive> receives(receives_ ? window_ : 0);
        UcpPeer::Receive ack;
        uint64_t answer = 0;
        if (receives_) {
            poison();
            for (size_t i = 0; i < window_; ++i) {
                receives[i].batch = &arrived;
                peer_.receive(receives[i], message_tag(iteration_, i),
                              target(i).data(first_target() + i), static_cast<size_t>(size_),
                              target(i).handle());
            }
        }
        if (sends_) {
            ack.batch = &acknowledged;
            peer_.receive(ack, kAckTag | iteration_, &answer, sizeof(answer));
        }
        if (receives_) {
            send_pair(FrameType::kReady, "");
        }
        if (sends_) {
            receive_pair(FrameType::kReady);
        }

        const double start = now_s();
        if (sends_) {
            for (size_t i = 0; i < window_; ++i) {
                peer_.send(sent, message_tag(iteration_, i), source_->data(first_source() + i),
                           static_cast<size_t>(size_), source_->handle());
            }
        }
        if (receives_) {
            spin_until(sent, [&] { return all_done(arrived); });
            for (const UcpPeer::Receive &receive : receives) {
                check(receive.status);
            }
            peer_.send(sent, kAckTag | iteration_, &iteration_, sizeof(iteration_));
        }
        spin_until(sent, [&] { return all_done(sent) && all_done(acknowledged); });
        const double seconds = now_s() - start;

        for (const UcpPeer::Receive &receive : receives) {
            if (receive.length != size_) {
                throw Error(format("a message of %s arrived with %zu bytes",
                                   format_size(size_).c_str(), receive.length),
                            kExitMismatch);
            }
        }
        if (sends_) {
            check(ack.status);
            if (answer != iteration_) {
                throw Error("UCX delivered another acknowledgement than that which was sent",
                            kExitMismatch);
            }
        }
        return seconds;
    }

    // Puts and a flush; then the other side is told, outside of the time.
    double put()
    {
        UcpPeer::Batch batch;
        if (!role_.first) {
            poison();
            UcpPeer::Receive end;
            uint64_t number = 0;
            end.batch = &batch;
            peer_.receive(end, kEndTag | iteration_, &number, sizeof(number));
            send_pair(FrameType::kReady, "");
            spin_until(batch, [&] { return all_done(batch); });
            check(end.status);
            return 0;
        }
        receive_pair(FrameType::kReady);
        // The target's slots are as far apart as the source's.
        const uint64_t stride = source_->offset(1) - source_->offset(0);
        const double start = now_s();
        for (size_t i = 0; i < window_; ++i) {
            peer_.put(batch, source_->data(first_source() + i), static_cast<size_t>(size_),
                      remote_address_ + (first_target() + i) * stride, key_->get(),
                      source_->handle());
        }
        peer_.flush(batch);
        spin_until(batch, [&] { return all_done(batch); });
        const double seconds = now_s() - start;
        peer_.send(batch, kEndTag | iteration_, &iteration_, sizeof(iteration_));
        spin_until(batch, [&] { return all_done(batch); });
        return seconds;
    }

    // ---- comparing what arrived with what was sent

    void verify()
    {
        // One direction after the other, the first side's first.
        if (role_.first) {
            show_hashes();
        } else {
            compare_hashes();
        }
        if (op_ == "bidirectional") {
            if (role_.first) {
                compare_hashes();
            } else {
                show_hashes();
            }
        }
    }

    void show_hashes()
    {
        std::string all;
        for (size_t i = 0; i < window_; ++i) {
            const size_t slot = (first_source() + i) % source_->count();
            if (hashes_[slot].empty()) {
                hashes_[slot] = source_->memory().hashes(source_->offset(slot), size_);
            }
            all += hashes_to_bytes(hashes_[slot]);
        }
        send_pair(FrameType::kHashes, all);
        FrameType type{};
        const std::string wanted =
                pair_.receive_any(&type, kMaxFrame, role_.timeout_s, [this] { return progress(); });
        if (type == FrameType::kReady) {
            return;
        }
        // The other side has found a difference, and wants to see what should be there.
        const json block = json::parse(wanted);
        const uint64_t offset = block.at("offset").get<uint64_t>();
        const size_t slot = first_source() + block.at("message").get<size_t>();
        send_pair(FrameType::kBlock, source_->memory().read(source_->offset(slot) + offset,
                                                            std::min(kHashBlock, size_ - offset)));
        receive_pair(FrameType::kReady); // its end
    }

    void compare_hashes()
    {
        const std::vector<Hash128> sent = hashes_from_bytes(receive_pair(FrameType::kHashes));
        std::vector<Hash128> got;
        for (size_t i = 0; i < window_; ++i) {
            const std::vector<Hash128> one =
                    target(i).memory().hashes(target(i).offset(first_target() + i), size_);
            got.insert(got.end(), one.begin(), one.end());
        }
        const std::optional<size_t> difference = first_difference(sent, got);
        if (!difference) {
            send_pair(FrameType::kReady, "");
            return;
        }
        const size_t blocks = got.size() / window_;
        const size_t message = *difference / blocks;
        const uint64_t offset = *difference % blocks * kHashBlock;
        send_pair(FrameType::kBlock, json{{"message", message}, {"offset", offset}}.dump());
        const std::string want = receive_pair(FrameType::kBlock);
        const std::string have = target(message).memory().read(
                target(message).offset(first_target() + message) + offset, want.size());
        const std::optional<BlockDifference> what = compare_block(want, have);
        const std::string where =
                what ? format("from byte %llu on (%02x instead of %02x; %zu of the %zu bytes of "
                              "its "
                              "block differ)",
                              static_cast<unsigned long long>(offset) + what->offset, what->got,
                              what->sent, what->bytes, want.size())
                     : format("in the block at byte %llu, which has become right since",
                              static_cast<unsigned long long>(offset));
        throw Error(
                format("a message of %s (%llu bytes, %s, iteration %llu, message %zu of %zu) did "
                       "not arrive as it was sent, ",
                       format_size(size_).c_str(), static_cast<unsigned long long>(size_),
                       op_.c_str(), static_cast<unsigned long long>(iteration_), message + 1,
                       window_) +
                        where,
                kExitMismatch);
    }

    const Role &role_;
    OobChannel &control_;
    OobChannel &pair_;
    std::string op_;
    uint64_t size_;
    size_t window_;
    UcpPeer peer_;
    bool sends_ = false;
    bool receives_ = false;
    std::unique_ptr<Slots> source_;
    std::vector<std::unique_ptr<Slots>> targets_; // one on each GPU
    std::vector<std::vector<Hash128>> hashes_;    // of the source's slots, once they were needed
    std::unique_ptr<UcpRemoteKey> key_;
    uint64_t remote_address_ = 0;
    uint64_t iteration_ = 0;
    double started_ = 0; // the iteration
};

// The next command. Sleeps until there is one: processes that wait for their turn must not disturb
// the one that is measured.
std::string next_command(OobChannel &control, FrameType *type)
{
    constexpr int kSliceMs = 200; // how often it looks for signals
    while (true) {
        if (auto text = control.try_receive(type, kMaxFrame)) {
            return *std::move(text);
        }
        if (control.closed()) {
            throw Error("the process that measures is gone");
        }
        check_interrupted();
        pollfd p{control.fd(), POLLIN, 0};
        poll(&p, 1, kSliceMs);
    }
}

// All that a side owns, in the order in which it comes about.
struct Side {
    explicit Side(int descriptor)
        : control(OobChannel::adopt(descriptor)), pair(OobChannel::adopt(descriptor + 1))
    {
    }

    void introduce();
    void serve();

    OobChannel control;
    OobChannel pair;
    Role role;
    std::vector<std::unique_ptr<cuda::Context>> contexts;
    std::unique_ptr<Point> point;
};

void Side::introduce()
{
    FrameType type{};
    const json hello = json::parse(next_command(control, &type));
    role.first = hello.at("first").get<bool>();
    role.zip = hello.at("zip").get<bool>();
    role.verify = hello.at("verify").get<bool>();
    role.registered = hello.at("registered").get<bool>();
    role.misalign = hello.at("misalign").get<uint64_t>();
    role.source = hello.at("source").get<uint64_t>();
    role.timeout_s = hello.at("timeout").get<double>();

    json answer{{"device", ""}};
    if (hello.at("cuda").get<bool>()) {
        for (const int gpu : hello.at("gpus").get<std::vector<int>>()) {
            role.gpus.push_back(contexts.emplace_back(std::make_unique<cuda::Context>(gpu)).get());
        }
        role.gpus[0]->use();
        answer["device"] = role.gpus[0]->name();
        if (const std::optional<bool> mps = role.gpus[0]->shared_by_mps()) {
            answer["mps"] = *mps;
        }
    }
    control.send(FrameType::kHello, answer.dump(), role.timeout_s);
}

void Side::serve()
{
    while (true) {
        FrameType type{};
        const std::string text = next_command(control, &type);
        if (type == FrameType::kDataset) {
            point = std::make_unique<Point>(role, control, pair, json::parse(text));
            control.send(FrameType::kReady, "", role.timeout_s);
        } else if (type == FrameType::kRun && point) {
            const unsigned iterations = json::parse(text).at("iterations").get<unsigned>();
            control.send(FrameType::kResult, json(point->run(iterations)).dump(), role.timeout_s);
        } else if (type == FrameType::kBye && point) {
            const std::string lanes = point->lanes();
            point->close();
            point.reset();
            std::fflush(nullptr); // what UCX and the plugin have logged
            control.send(FrameType::kBye, json{{"lanes", lanes}}.dump(), role.timeout_s);
        } else if (type == FrameType::kBye) {
            control.send(FrameType::kBye, "", role.timeout_s);
            return;
        } else {
            throw Error("the process that measures sent a command that is not due");
        }
    }
}

// One side from its first word to its last.
void run_part(unsigned part)
{
    Side side(kFirstDescriptor + 2 * static_cast<int>(part));
    json failed;
    try {
        side.introduce();
        side.serve();
        return;
    } catch (const Error &error) {
        failed = {{"status", error.status()}, {"text", error.what()}};
    } catch (const std::exception &error) {
        failed = {{"status", kExitFailed}, {"text", error.what()}};
    }
    try {
        side.control.send(FrameType::kFailed,
                          failed.dump(-1, ' ', false, json::error_handler_t::replace), 1.0);
    } catch (const Error &) {
        // The parent is gone; there is nobody to tell.
    }
    std::fflush(nullptr);
    // Requests may be under way, into memory that an end in order would free. Only the process's
    // end ends them.
    _exit(failed.at("status").get<int>());
}

} // namespace

int run_p2p_parts(unsigned parts)
{
    // What the other thread has to do goes on in a thread of its own.
    std::optional<std::thread> other;
    if (parts > 1) {
        other.emplace(run_part, 1U);
    }
    run_part(0);
    if (other) {
        other->join();
    }
    return kExitOk;
}

} // namespace tools
