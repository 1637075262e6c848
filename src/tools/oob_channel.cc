// SPDX-License-Identifier: BSD-3-Clause
// Control channel over TCP.
#include "tools/oob_channel.h"

#include "tools/clock.h"
#include "tools/error.h"
#include "tools/interrupt.h"
#include "tools/table.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <utility>

namespace tools {

namespace {

constexpr uint32_t kMagic = 0x4f50495a; // "ZIPO"
constexpr size_t kHeaderSize = 16;      // magic, type, payload size; little-endian
constexpr uint64_t kMaxErrorText = 4096;
// How often a wait looks for SIGINT.
constexpr int kSliceMs = 100;

template <typename T>
void put_le(std::string &out, T value)
{
    for (size_t i = 0; i < sizeof(T); ++i) {
        out += static_cast<char>(value >> (8 * i));
    }
}

template <typename T>
T get_le(const char *in)
{
    T value = 0;
    for (size_t i = sizeof(T); i-- > 0;) {
        value = static_cast<T>(value << 8 | static_cast<unsigned char>(in[i]));
    }
    return value;
}

std::string describe(const sockaddr_storage &address, socklen_t length)
{
    char host[NI_MAXHOST] = "?";
    char port[NI_MAXSERV] = "?";
    getnameinfo(reinterpret_cast<const sockaddr *>(&address), length, host, sizeof(host), port,
                sizeof(port), NI_NUMERICHOST | NI_NUMERICSERV);
    const bool v6 = address.ss_family == AF_INET6;
    return (v6 ? "[" : "") + std::string(host) + (v6 ? "]:" : ":") + port;
}

class AddressList {
public:
    AddressList(const HostPort &where, bool passive)
    {
        addrinfo hints{};
        hints.ai_family = AF_UNSPEC;
        hints.ai_socktype = SOCK_STREAM;
        hints.ai_flags = AI_NUMERICSERV | (passive ? AI_PASSIVE : 0);
        const int rc = getaddrinfo(where.host.c_str(), where.port.c_str(), &hints, &list_);
        if (rc != 0) {
            throw Error("cannot resolve address '" + where.host + "': " + gai_strerror(rc) +
                        "; give a host name or an IP address");
        }
    }
    ~AddressList() { freeaddrinfo(list_); }
    AddressList(const AddressList &) = delete;
    AddressList &operator=(const AddressList &) = delete;
    const addrinfo *first() const { return list_; }

private:
    addrinfo *list_ = nullptr;
};

class Socket {
public:
    explicit Socket(int fd) : fd_(fd) {}
    ~Socket()
    {
        if (fd_ >= 0) {
            close(fd_);
        }
    }
    Socket(const Socket &) = delete;
    Socket &operator=(const Socket &) = delete;
    int get() const { return fd_; }
    int release() { return std::exchange(fd_, -1); }

private:
    int fd_;
};

// Waits until fd is ready; false at the deadline.
bool wait_fd(int fd, short events, double deadline)
{
    while (true) {
        check_interrupted();
        pollfd p{fd, events, 0};
        const int rc = poll(&p, 1, kSliceMs);
        if (rc > 0) {
            return true;
        }
        if (deadline > 0.0 && now_s() > deadline) {
            return false;
        }
    }
}

void tune(int fd)
{
    const int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

} // namespace

HostPort parse_host_port(const std::string &text, const char *default_port)
{
    HostPort out{text, default_port};
    if (!text.empty() && text.front() == '[') {
        const size_t close = text.find(']');
        if (close == std::string::npos) {
            throw Error("address '" + text + "' lacks a ']'");
        }
        out.host = text.substr(1, close - 1);
        if (close + 1 < text.size()) {
            if (text[close + 1] != ':') {
                throw Error("address '" + text + "' is not of the form [ADDRESS]:PORT");
            }
            out.port = text.substr(close + 2);
        }
    } else if (std::count(text.begin(), text.end(), ':') == 1) {
        out.host = text.substr(0, text.find(':'));
        out.port = text.substr(text.find(':') + 1);
    }
    const bool digits = !out.port.empty() && out.port.size() <= 5 &&
                        std::all_of(out.port.begin(), out.port.end(),
                                    [](char c) { return c >= '0' && c <= '9'; });
    if (out.host.empty() || !digits || std::stoi(out.port) > 65535) {
        throw Error("address '" + text + "' is not of the form HOST:PORT with a port up to 65535");
    }
    return out;
}

OobChannel OobChannel::accept_one(const HostPort &address, double timeout_s,
                                  const std::function<void(const std::string &)> &on_listening)
{
    const AddressList list(address, true);
    const addrinfo *a = list.first();
    const std::string where = address.host + ":" + address.port;
    Socket listener(socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const int on = 1;
    setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (listener.get() < 0 || bind(listener.get(), a->ai_addr, a->ai_addrlen) != 0 ||
        listen(listener.get(), 1) != 0) {
        throw Error("cannot listen on " + where + ": " + std::strerror(errno) +
                    "; give an address of this machine and a free port");
    }

    sockaddr_storage bound{};
    socklen_t length = sizeof(bound);
    getsockname(listener.get(), reinterpret_cast<sockaddr *>(&bound), &length);
    on_listening(describe(bound, length));

    const double deadline = timeout_s > 0.0 ? now_s() + timeout_s : 0.0;
    while (true) {
        if (!wait_fd(listener.get(), POLLIN, deadline)) {
            throw Error(
                    format("no sender connected to %s within %g s; start one with --connect, or "
                           "wait longer with --wait",
                           where.c_str(), timeout_s));
        }
        const int fd = accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd >= 0) {
            tune(fd);
            return OobChannel(fd);
        }
        if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
            throw Error("cannot accept a connection on " + where + ": " + std::strerror(errno));
        }
    }
}

OobChannel OobChannel::connect_to(const HostPort &address, double timeout_s)
{
    const AddressList list(address, false);
    const std::string where = address.host + ":" + address.port;
    const double deadline = now_s() + timeout_s;
    int error = 0;
    for (const addrinfo *a = list.first(); a != nullptr; a = a->ai_next) {
        Socket s(socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
        if (s.get() < 0) {
            error = errno;
            continue;
        }
        if (connect(s.get(), a->ai_addr, a->ai_addrlen) != 0) {
            error = errno;
            if (error != EINPROGRESS) {
                continue;
            }
            if (!wait_fd(s.get(), POLLOUT, deadline)) {
                error = ETIMEDOUT;
                break;
            }
            socklen_t size = sizeof(error);
            getsockopt(s.get(), SOL_SOCKET, SO_ERROR, &error, &size);
            if (error != 0) {
                continue;
            }
        }
        tune(s.get());
        return OobChannel(s.release());
    }
    throw Error("cannot connect to " + where + ": " + std::strerror(error) +
                "; start the receiver first (zipperf model --listen), and check address and port");
}

OobChannel OobChannel::adopt(int fd)
{
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    fcntl(fd, F_SETFL, O_NONBLOCK);
    return OobChannel(fd);
}

OobChannel::OobChannel(OobChannel &&other) noexcept
    : fd_(std::exchange(other.fd_, -1)), closed_(other.closed_), buffer_(std::move(other.buffer_))
{
}

OobChannel::~OobChannel()
{
    if (fd_ >= 0) {
        close(fd_);
    }
}

std::string OobChannel::peer() const
{
    sockaddr_storage address{};
    socklen_t length = sizeof(address);
    getpeername(fd_, reinterpret_cast<sockaddr *>(&address), &length);
    return describe(address, length);
}

void OobChannel::send(FrameType type, const std::string &payload, double timeout_s)
{
    std::string frame;
    put_le(frame, kMagic);
    put_le(frame, static_cast<uint32_t>(type));
    put_le(frame, static_cast<uint64_t>(payload.size()));
    frame += payload;

    const double deadline = now_s() + timeout_s;
    size_t sent = 0;
    while (sent < frame.size()) {
        const ssize_t n = ::send(fd_, frame.data() + sent, frame.size() - sent, MSG_NOSIGNAL);
        if (n > 0) {
            sent += static_cast<size_t>(n);
        } else if (errno == EAGAIN) {
            if (!wait_fd(fd_, POLLOUT, deadline)) {
                throw Error(format("the peer took no control message for %g s; it hangs or the "
                                   "network is down",
                                   timeout_s));
            }
        } else if (errno != EINTR) {
            throw Error(std::string("the peer's process ended: ") + std::strerror(errno));
        }
    }
}

bool OobChannel::read_some()
{
    char chunk[65536];
    const ssize_t n = recv(fd_, chunk, sizeof(chunk), 0);
    if (n > 0) {
        buffer_.append(chunk, static_cast<size_t>(n));
        return true;
    }
    if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
        closed_ = true;
    }
    return false;
}

std::optional<std::string> OobChannel::take_frame(FrameType *type, uint64_t max_size)
{
    if (buffer_.size() < kHeaderSize) {
        return std::nullopt;
    }
    const uint32_t magic = get_le<uint32_t>(buffer_.data());
    *type = static_cast<FrameType>(get_le<uint32_t>(buffer_.data() + 4));
    const uint64_t size = get_le<uint64_t>(buffer_.data() + 8);
    if (magic != kMagic) {
        throw Error("the peer does not speak zipperf's protocol; check the address and port");
    }
    const uint64_t limit = *type == FrameType::kError ? kMaxErrorText : max_size;
    if (size > limit) {
        throw Error(format("the peer announced a control message of %llu bytes, at most %llu are "
                           "expected; are both sides the same version?",
                           static_cast<unsigned long long>(size),
                           static_cast<unsigned long long>(limit)));
    }
    if (buffer_.size() - kHeaderSize < size) {
        return std::nullopt;
    }
    std::string payload = buffer_.substr(kHeaderSize, size);
    buffer_.erase(0, kHeaderSize + size);
    if (*type == FrameType::kError) {
        for (char &c : payload) {
            if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
                c = ' ';
            }
        }
        throw Error("the peer gave up: " + payload);
    }
    return payload;
}

std::string OobChannel::receive_any(FrameType *type, uint64_t max_size, double timeout_s,
                                    const Idle &idle)
{
    const double deadline = now_s() + timeout_s;
    while (true) {
        if (auto payload = take_frame(type, max_size)) {
            return *std::move(payload);
        }
        if (closed_) {
            throw Error("the peer's process ended: it closed the control connection");
        }
        check_interrupted();
        if (now_s() > deadline) {
            throw Error(format("no answer from the peer for %g s; it hangs or the network is down",
                               timeout_s));
        }
        const bool busy = idle && idle();
        pollfd p{fd_, POLLIN, 0};
        // Not timed by any benchmark, so a millisecond of sleep costs nothing.
        if (poll(&p, 1, busy ? 0 : 1) != 0) {
            read_some();
        }
    }
}

std::optional<std::string> OobChannel::try_receive(FrameType *type, uint64_t max_size)
{
    auto payload = take_frame(type, max_size);
    while (!payload && read_some()) {
        payload = take_frame(type, max_size);
    }
    return payload;
}

std::string OobChannel::receive(FrameType type, uint64_t max_size, double timeout_s,
                                const Idle &idle)
{
    FrameType got{};
    std::string payload = receive_any(&got, max_size, timeout_s, idle);
    if (got != type) {
        throw Error(format("the peer sent control message %u where %u was due; are both sides the "
                           "same version?",
                           static_cast<unsigned>(got), static_cast<unsigned>(type)));
    }
    return payload;
}

void OobChannel::check_peer()
{
    read_some();
    FrameType type{};
    // Anything but an error is left for receive(): it came early, with a size that is checked
    // there.
    if (buffer_.size() >= kHeaderSize &&
        static_cast<FrameType>(get_le<uint32_t>(buffer_.data() + 4)) == FrameType::kError) {
        take_frame(&type, kMaxErrorText);
    }
    if (closed_) {
        throw Error("the peer's process ended: it closed the control connection");
    }
}

} // namespace tools
