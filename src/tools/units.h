// SPDX-License-Identifier: BSD-3-Clause
// Sizes as people write them (64K, 16MiB) and as tables show them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tools {

// "65536", "64K", "64KiB", "1M", "16MiB", "1G": binary units, case ignored. Throws Error.
uint64_t parse_size(std::string_view text);

// A comma-separated list of sizes, at least one, each at least 1 byte. Throws Error.
std::vector<uint64_t> parse_size_list(std::string_view text);

// "64 KiB", "1.5 MiB": binary units, at most one decimal.
std::string format_size(uint64_t bytes);

} // namespace tools
