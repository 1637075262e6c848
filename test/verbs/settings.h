// SPDX-License-Identifier: BSD-3-Clause
// Settings of the software verbs device, read once from the environment (SWVERBS_...).
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <string>
#include <vector>

namespace swverbs {

// "Never" as a point of time, "for ever" as a duration. Times are CLOCK_MONOTONIC nanoseconds.
constexpr uint64_t kNever = ~0ull;

enum class FaultKind { link_down, stall, error, peer_gone };
enum class FaultTrigger { bytes, operations, time };

// One element of SWVERBS_FAULT: what happens and after how much traffic of this process, or when.
struct Fault {
    FaultKind kind;
    FaultTrigger trigger;
    uint64_t threshold;         // bytes, operations, or nanoseconds since the first verbs call
    uint64_t duration = kNever; // link_down, stall
    ibv_wc_status status = IBV_WC_SUCCESS; // error
};

struct Settings {
    double gbps = 0;      // 1e9 bytes/s, each direction of each device; 0: unpaced
    uint64_t latency = 0; // one way, ns
    double rate = 0;      // messages/s of a device; 0: no limit
    unsigned devices = 1;
    uint64_t reorder = 0; // largest additional delay of a message, ns
    uint64_t seed = 1;
    uint32_t chunk = 65536; // bytes moved at a time
    uint64_t lead = 0;      // GPU copies start so long before the arrival, ns
    bool ethernet = false;  // the link layer that ports report
    bool log = false;
    std::string fabric; // name of the shared memory object, without directory
    std::vector<Fault> faults;
};

// The first call reads the environment; a bad value ends the process with status 2 and one line on
// stderr. Thread-safe.
const Settings &settings();

} // namespace swverbs
