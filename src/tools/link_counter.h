// SPDX-License-Identifier: BSD-3-Clause
// The count of bytes that left through a network interface or a port of an RDMA device, kept by the
// kernel or the card: what really crossed the wire, whatever a library says about itself.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace tools {

class LinkCounter {
public:
    // `interface` as in /sys/class/net, or DEVICE:PORT as in /sys/class/infiniband. Throws Error if
    // it does not exist.
    explicit LinkCounter(std::string interface);

    const std::string &interface() const { return interface_; }

    uint64_t tx_bytes() const { return read(tx_file_); }
    uint64_t rx_bytes() const { return read(rx_file_); }

private:
    uint64_t read(const std::string &file) const;

    std::string interface_;
    std::string tx_file_, rx_file_;
    uint64_t unit_ = 1; // bytes
};

// The interface that holds the local address of a connected socket; empty if there is none.
std::string interface_of_socket(int fd);

} // namespace tools
