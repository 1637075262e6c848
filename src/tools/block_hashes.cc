// SPDX-License-Identifier: BSD-3-Clause
// Comparing long messages by blocks.
#include "tools/block_hashes.h"

#include <algorithm>
#include <cstring>

namespace tools {

std::vector<Hash128> hash_blocks(const std::byte *data, uint64_t size)
{
    std::vector<Hash128> hashes;
    hashes.reserve(static_cast<size_t>((size + kHashBlock - 1) / kHashBlock));
    for (uint64_t offset = 0; offset < size; offset += kHashBlock) {
        hashes.push_back(hash_bytes(data + offset,
                                    static_cast<size_t>(std::min(kHashBlock, size - offset))));
    }
    return hashes;
}

std::string hashes_to_bytes(const std::vector<Hash128> &hashes)
{
    std::string bytes;
    for (const Hash128 &hash : hashes) {
        bytes.append(reinterpret_cast<const char *>(&hash.low), sizeof(hash.low));
        bytes.append(reinterpret_cast<const char *>(&hash.high), sizeof(hash.high));
    }
    return bytes;
}

std::vector<Hash128> hashes_from_bytes(const std::string &bytes)
{
    static_assert(sizeof(Hash128) == 2 * sizeof(uint64_t));
    std::vector<Hash128> hashes(bytes.size() / sizeof(Hash128));
    if (!hashes.empty()) {
        std::memcpy(hashes.data(), bytes.data(), hashes.size() * sizeof(Hash128));
    }
    return hashes;
}

std::optional<size_t> first_difference(const std::vector<Hash128> &a, const std::vector<Hash128> &b)
{
    const auto [left, right] = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
    if (left == a.end() && right == b.end()) {
        return std::nullopt;
    }
    return static_cast<size_t>(left - a.begin());
}

std::optional<BlockDifference> compare_block(const std::string &sent, const std::string &got)
{
    const size_t common = std::min(sent.size(), got.size());
    const size_t longest = std::max(sent.size(), got.size());
    BlockDifference difference;
    for (size_t i = 0; i < longest; ++i) {
        if (i < common && sent[i] == got[i]) {
            continue;
        }
        if (difference.bytes++ == 0) {
            difference.offset = i;
            difference.sent = i < sent.size() ? static_cast<unsigned char>(sent[i]) : 0;
            difference.got = i < got.size() ? static_cast<unsigned char>(got[i]) : 0;
        }
    }
    return difference.bytes == 0 ? std::nullopt : std::optional(difference);
}

} // namespace tools
