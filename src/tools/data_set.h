// SPDX-License-Identifier: BSD-3-Clause
// What benchmarks send and encode: messages made from a real model's tensors, with the hash of
// each, and pools of random or real values of any type.
#pragma once

#include "tools/safetensors.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
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
uint16_t fp16_from_fp32(float value);

float fp32_from_bf16(uint16_t value);
float fp32_from_fp16(uint16_t value);

// Bytes of a value of "bf16", "fp32", "fp16", "fp64", "e4m3" or "e5m2"; 0 for another name.
size_t value_bytes(std::string_view dtype);

struct Message {
    std::string name;
    const std::byte *data = nullptr;
    size_t size = 0;
    Hash128 hash;
};

struct DataSet {
    std::string dtype; // as value_bytes() knows it
    std::string data;  // for the table and the JSON
    std::vector<Message> messages;
    size_t converted = 0; // messages that hold values of `dtype`; the others go as they are stored
    std::shared_ptr<std::vector<std::byte>> storage; // owns the bytes that are not in a file's map

    uint64_t bytes() const;
};

// Every tensor of the model as one message. Tensors of floats that are at least as wide as `dtype`
// are rounded to it; others go as they are stored, never widened: a widened value would have bits
// that are no information, and would flatter any compression. For fp8 each tensor is scaled so that
// its largest magnitude becomes the type's largest, as quantized models are. Empty `messages` if
// none is of `dtype`. The files must outlive the result.
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

// What a codec's benchmark encodes.
enum class Values {
    kNormal,  // normal(0, 0.02): weights of a bell-shaped layer
    kUniform, // uniform in [-1, 1]
    kWeights, // a model's tensors, end to end
    kKv, // normal with a scale a channel (kKvChannels of them, scales lognormal): like a KV cache
    kRandom // random bits: the worst case
};
inline constexpr size_t kKvChannels = 128;

// "normal", "uniform", "weights", "kv", "random".
const char *values_name(Values values);
std::optional<Values> values_from_name(std::string_view name);

// Independent values, from which longer buffers are made.
struct ValuePool {
    std::string dtype;
    std::string data; // for the table and the JSON
    std::vector<std::byte> bytes;
};

// Longest pool. A buffer that is longer repeats it at a distance that no codec here looks back
// over: zstd's window at levels up to 3 is 2 MiB, all others look at one chunk.
inline constexpr uint64_t kPoolBytes = 64 << 20;

// At least `at_least` bytes, rounded up to whole rows of kKvChannels values, but no more than
// kPoolBytes; for kWeights all of the model, up to that. The same on every call. Random values of
// fp8 are scaled so that six standard deviations (uniform: 1) are the type's largest, as quantized
// tensors are. Empty `bytes` if the model holds no values that can be narrowed to `dtype`.
ValuePool make_value_pool(Values values, const std::string &dtype, uint64_t at_least,
                          const std::vector<SafetensorsFile> &files);

// Fills `size` bytes with the pool, end to end, each time from another place in it (a multiple of
// kKvChannels values, so that channels stay where they are); the first time from its beginning if
// `seed` is 0. The pool must not be empty.
void fill_from_pool(const ValuePool &pool, uint64_t seed, std::byte *to, uint64_t size);

} // namespace tools
