// SPDX-License-Identifier: BSD-3-Clause
// The plugin's lines in UCX's log.
#include "tools/zip_log.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <sstream>

namespace tools {

std::optional<ZipCounters> parse_zip_log(const std::string &log)
{
    std::optional<ZipCounters> sum;
    uint64_t sent = 0; // segments
    uint64_t received = 0;
    std::istringstream lines(log);
    for (std::string line; std::getline(lines, line);) {
        const size_t start = line.find(" sent ");
        if (start == std::string::npos || line.find("zip/") == std::string::npos) {
            continue;
        }
        std::array<unsigned long, 11> n{};
        // NOLINTNEXTLINE(bugprone-unchecked-string-to-number-conversion,cert-err34-c)
        const int found = std::sscanf(
                line.c_str() + start,
                " sent %lu puts, %lu bytes as %lu in %lu segments (%lu of them uncompressed); "
                "received %lu bytes in %lu segments, refused %lu; got %lu gets, %lu bytes; "
                "%lu bytes straight",
                &n[0], &n[1], &n[2], &n[3], &n[4], &n[5], &n[6], &n[7], &n[8], &n[9], &n[10]);
        if (found == static_cast<int>(n.size())) {
            sum = sum.value_or(ZipCounters{});
            sum->taken += n[1] + n[9];
            sum->on_wire += n[2] + n[10];
            sent += n[3];
            received += n[6];
        }
    }
    return sent < received ? std::nullopt : sum;
}

double ratio_of(const ZipCounters &counters, uint64_t bytes)
{
    if (bytes == 0) {
        return 1.0;
    }
    const uint64_t beside = bytes - std::min(bytes, counters.taken);
    return static_cast<double>(beside + counters.on_wire) / static_cast<double>(bytes);
}

} // namespace tools
