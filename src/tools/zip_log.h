// SPDX-License-Identifier: BSD-3-Clause
// What the plugin's interfaces say of themselves in UCX's log (UCX_LOG_LEVEL=info) when they close.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace tools {

// Bytes of all interfaces together.
struct ZipCounters {
    uint64_t taken = 0;   // of the application, in puts and gets that UCX gave to zip
    uint64_t on_wire = 0; // what these became: encoded segments, and bytes that went straight
};

// The sum over the lines of interfaces in `log`, which is that of both sides; nothing if there is
// no such line, or if more segments arrived than were sent: a side's line is missing then.
std::optional<ZipCounters> parse_zip_log(const std::string &log);

// Compressed over original, of `bytes` that the application has sent: what did not go through zip
// went as it was.
double ratio_of(const ZipCounters &counters, uint64_t bytes);

} // namespace tools
