// SPDX-License-Identifier: BSD-3-Clause
// Comparing long messages of two processes without sending them a second time: by the hash of each
// block, so that a difference is also found where it is.
#pragma once

#include "tools/data_set.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tools {

inline constexpr uint64_t kHashBlock = 64 << 10; // bytes; the last block is what is left

// One hash for each block of `size` bytes.
std::vector<Hash128> hash_blocks(const std::byte *data, uint64_t size);

// The hashes as they cross a control channel, and back; what is left of a broken text is dropped.
std::string hashes_to_bytes(const std::vector<Hash128> &hashes);
std::vector<Hash128> hashes_from_bytes(const std::string &bytes);

// The first block whose hash differs; where one list ends, if only their lengths differ.
std::optional<size_t> first_difference(const std::vector<Hash128> &a,
                                       const std::vector<Hash128> &b);

// How a block that arrived differs from what was sent.
struct BlockDifference {
    size_t offset = 0; // of the first byte that differs
    size_t bytes = 0;  // how many do
    unsigned sent = 0; // the first of them
    unsigned got = 0;
};

// Nothing if both are the same. A block that is shorter than the other differs from its end on.
std::optional<BlockDifference> compare_block(const std::string &sent, const std::string &got);

} // namespace tools
