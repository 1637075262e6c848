// SPDX-License-Identifier: BSD-3-Clause
// Byte counters of a network interface or an RDMA port.
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
    const size_t colon = interface_.find(':');
    if (interface_.empty() || interface_.find('/') != std::string::npos) {
        throw Error("'" + interface_ + "' is no network interface; see `ip link`");
    }
    if (colon == std::string::npos) {
        const std::string folder = "/sys/class/net/" + interface_ + "/statistics/";
        tx_file_ = folder + "tx_bytes";
        rx_file_ = folder + "rx_bytes";
    } else {
        const std::string folder = "/sys/class/infiniband/" + interface_.substr(0, colon) +
                                   "/ports/" + interface_.substr(colon + 1) + "/counters/";
        tx_file_ = folder + "port_xmit_data";
        rx_file_ = folder + "port_rcv_data";
        unit_ = 4; // as InfiniBand's PortCounters define it
    }
    read(tx_file_);
}

uint64_t LinkCounter::read(const std::string &file) const
{
    std::ifstream in(file);
    uint64_t value = 0;
    if (!(in >> value)) {
        throw Error("cannot read the byte counter " + file + "; see `ip link` or `ibv_devinfo`");
    }
    return value * unit_;
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
