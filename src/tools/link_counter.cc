// SPDX-License-Identifier: BSD-3-Clause
// Byte counters of a network interface.
#include "tools/link_counter.h"

#include "tools/error.h"

#include <cstring>
#include <fstream>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <utility>

namespace tools {

namespace {

bool same_address(const sockaddr *a, const sockaddr *b)
{
    if (a->sa_family != b->sa_family) {
        return false;
    }
    if (a->sa_family == AF_INET) {
        return std::memcmp(&reinterpret_cast<const sockaddr_in *>(a)->sin_addr,
                           &reinterpret_cast<const sockaddr_in *>(b)->sin_addr,
                           sizeof(in_addr)) == 0;
    }
    return a->sa_family == AF_INET6 &&
           std::memcmp(&reinterpret_cast<const sockaddr_in6 *>(a)->sin6_addr,
                       &reinterpret_cast<const sockaddr_in6 *>(b)->sin6_addr,
                       sizeof(in6_addr)) == 0;
}

} // namespace

LinkCounter::LinkCounter(std::string interface) : interface_(std::move(interface))
{
    if (interface_.empty() || interface_.find('/') != std::string::npos) {
        throw Error("'" + interface_ + "' is no network interface; see `ip link`");
    }
    read("tx_bytes");
}

uint64_t LinkCounter::read(const char *counter) const
{
    std::ifstream in("/sys/class/net/" + interface_ + "/statistics/" + counter);
    uint64_t value = 0;
    if (!(in >> value)) {
        throw Error("cannot read the byte counters of network interface '" + interface_ +
                    "'; see `ip link`");
    }
    return value;
}

std::string interface_of_socket(int fd)
{
    sockaddr_storage local{};
    socklen_t length = sizeof(local);
    ifaddrs *list = nullptr;
    if (getsockname(fd, reinterpret_cast<sockaddr *>(&local), &length) != 0 ||
        getifaddrs(&list) != 0) {
        return "";
    }
    std::string name;
    for (const ifaddrs *i = list; i != nullptr && name.empty(); i = i->ifa_next) {
        if (i->ifa_addr != nullptr &&
            same_address(i->ifa_addr, reinterpret_cast<const sockaddr *>(&local))) {
            name = i->ifa_name;
        }
    }
    freeifaddrs(list);
    return name;
}

} // namespace tools
