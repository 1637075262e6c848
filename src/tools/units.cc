// SPDX-License-Identifier: BSD-3-Clause
// Sizes as people write them and as tables show them.
#include "tools/units.h"

#include "tools/error.h"

#include <array>
#include <cctype>
#include <charconv>
#include <cstdio>

namespace tools {

uint64_t parse_size(std::string_view text)
{
    const std::string shown = "'" + std::string(text.substr(0, 40)) + "'";
    uint64_t value = 0;
    const char *end = text.data() + text.size();
    const auto [rest, ec] = std::from_chars(text.data(), end, value);
    if (ec != std::errc()) {
        throw Error("size " + shown + " is not a number; write for example 64K, 1M or 16MiB");
    }

    std::string unit;
    for (const char *p = rest; p != end; ++p) {
        unit += static_cast<char>(std::tolower(static_cast<unsigned char>(*p)));
    }
    int shift = -1;
    if (unit.empty() || unit == "b") {
        shift = 0;
    } else if (unit == "k" || unit == "kib") {
        shift = 10;
    } else if (unit == "m" || unit == "mib") {
        shift = 20;
    } else if (unit == "g" || unit == "gib") {
        shift = 30;
    }
    if (shift < 0) {
        throw Error("size " + shown + " has an unknown unit; use K, M or G (KiB, MiB, GiB)");
    }
    if (value > (UINT64_MAX >> shift)) {
        throw Error("size " + shown + " is too large");
    }
    return value << shift;
}

std::vector<uint64_t> parse_size_list(std::string_view text)
{
    std::vector<uint64_t> sizes;
    while (true) {
        const size_t comma = text.find(',');
        const uint64_t size = parse_size(text.substr(0, comma));
        if (size == 0) {
            throw Error("a message size of 0 cannot be measured; give sizes of at least 1 byte");
        }
        sizes.push_back(size);
        if (comma == std::string_view::npos) {
            return sizes;
        }
        text.remove_prefix(comma + 1);
    }
}

std::string format_size(uint64_t bytes)
{
    static constexpr std::array<const char *, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
    double value = static_cast<double>(bytes);
    size_t unit = 0;
    while (value >= 1024.0 && unit + 1 < kUnits.size()) {
        value /= 1024.0;
        ++unit;
    }
    char out[32];
    const bool whole = value == static_cast<double>(static_cast<uint64_t>(value));
    std::snprintf(out, sizeof(out), whole ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
    return out;
}

} // namespace tools
