// SPDX-License-Identifier: BSD-3-Clause
// Control channel between the two processes of a benchmark: typed frames over a plain TCP socket,
// outside UCX, so that it also notices when the peer's process is gone.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace tools {

enum class FrameType : uint32_t {
    kHello = 1, // JSON: protocol version, what the sender wants
    kAddress,   // a UCP worker address
    kDataset,   // JSON: sizes of the messages to come
    kRun,       // JSON: one pass over the data set
    kReady,     // the receives are posted
    kHashes,    // 16 bytes a message
    kBye,       // end of the session
    kError,     // text: why the other side gives up
    kKey,       // address and key of memory
    kProgress,  // still at it: something was finished
    kResult,    // JSON: what was measured
    kBlock,     // bytes of a message that differ
    kFailed,    // JSON: why a part of zipperf p2p ends, and its exit status
};

// HOST, HOST:PORT, [V6] or [V6]:PORT. Throws Error.
struct HostPort {
    std::string host;
    std::string port;
};
HostPort parse_host_port(const std::string &text, const char *default_port);

// All functions throw Error; none waits longer than its time-out, and all look for SIGINT.
class OobChannel {
public:
    // Called over and over while waiting; returns true if it did something.
    using Idle = std::function<bool()>;

    // `on_listening` is called with "ADDRESS:PORT" once connections are accepted. timeout_s <= 0
    // waits for ever.
    static OobChannel accept_one(const HostPort &address, double timeout_s,
                                 const std::function<void(const std::string &)> &on_listening);
    static OobChannel connect_to(const HostPort &address, double timeout_s);
    // One end of a pair of connected sockets, which is closed in the end.
    static OobChannel adopt(int fd);

    OobChannel(OobChannel &&other) noexcept;
    OobChannel(const OobChannel &) = delete;
    OobChannel &operator=(const OobChannel &) = delete;
    OobChannel &operator=(OobChannel &&) = delete;
    ~OobChannel();

    int fd() const { return fd_; }
    std::string peer() const;

    void send(FrameType type, const std::string &payload, double timeout_s);

    // The next frame, which must be of this type and at most `max_size` bytes: what arrives is
    // untrusted. A kError frame, or the end of the connection, throws with the reason.
    std::string receive(FrameType type, uint64_t max_size, double timeout_s, const Idle &idle);

    // Same, of either type; the type is returned in `type`.
    std::string receive_any(FrameType *type, uint64_t max_size, double timeout_s, const Idle &idle);

    // The next frame if it has arrived whole. Never waits; once the peer's end is closed and all
    // that it sent was taken, closed() is true.
    std::optional<std::string> try_receive(FrameType *type, uint64_t max_size);
    bool closed() const { return closed_; }

    // Throws if the peer has gone or given up; to be called now and then during a transfer, when
    // no frame is due.
    void check_peer();

private:
    explicit OobChannel(int fd) : fd_(fd) {}

    bool read_some();
    std::optional<std::string> take_frame(FrameType *type, uint64_t max_size);

    int fd_ = -1;
    bool closed_ = false;
    std::string buffer_;
};

} // namespace tools
