// SPDX-License-Identifier: BSD-3-Clause
// The kernel's own count of bytes that left through a network interface: what really crossed the
// wire, whatever a library says about itself.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace tools {

class LinkCounter {
public:
    // `interface` as in /sys/class/net. Throws Error if it does not exist.
    explicit LinkCounter(std::string interface);

    const std::string &interface() const { return interface_; }

    uint64_t tx_bytes() const { return read("tx_bytes"); }
    uint64_t rx_bytes() const { return read("rx_bytes"); }

private:
    uint64_t read(const char *counter) const;

    std::string interface_;
};

// The interface that holds the local address of a connected socket; empty if there is none.
std::string interface_of_socket(int fd);

} // namespace tools
