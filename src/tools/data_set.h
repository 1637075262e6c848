// SPDX-License-Identifier: BSD-3-Clause
// What a benchmark sends: messages made from a real model's tensors, with the hash of each.
#pragma once

#include "tools/safetensors.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace tools {

// 128 bits of XXH3, in the byte order in which they cross the control channel.
struct Hash128 {
    uint64_t low = 0;
    uint64_t high = 0;
    bool operator==(const Hash128 &) const = default;
};
Hash128 hash_bytes(const void *data, size_t size);

// Round to nearest, ties to even, as deployed models are; infinities stay, and a NaN stays a NaN
// (its top mantissa bits are kept, and made non-zero if all of them are lost).
uint16_t bf16_from_fp32(float value);

struct Message {
    std::string name;
    const std::byte *data = nullptr;
    size_t size = 0;
    Hash128 hash;
};

struct DataSet {
    std::string dtype; // "bf16" or "fp32"
    std::string data;  // for the table and the JSON
    std::vector<Message> messages;
    size_t converted = 0; // messages that hold values of `dtype`; the others go as they are stored
    std::shared_ptr<std::vector<std::byte>> storage; // owns the bytes that are not in a file's map

    uint64_t bytes() const;
};

// Every tensor of the model as one message. Tensors of floats that are at least as wide as `dtype`
// are rounded to it; others go as they are stored, never widened: a widened value would have bits
// that are no information, and would flatter any compression. Empty `messages` if none is of
// `dtype`. The files must outlive the result.
DataSet model_data_set(const std::vector<SafetensorsFile> &files, const std::string &dtype);

// The tensors of `model`, made from `files`, that hold its dtype, end to end: at most `limit`
// bytes, and repeated until there are at least `at_least`. Empty if the model holds no values.
std::shared_ptr<std::vector<std::byte>> concatenate(const std::vector<SafetensorsFile> &files,
                                                    const DataSet &model, uint64_t at_least,
                                                    uint64_t limit);

// `count` messages of `size` bytes, cut one after the other out of `pool`, from the start again
// when it ends.
DataSet cut_data_set(const DataSet &model, std::shared_ptr<std::vector<std::byte>> pool,
                     uint64_t size, size_t count);

} // namespace tools
