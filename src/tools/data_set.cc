// SPDX-License-Identifier: BSD-3-Clause
// Messages made from a real model's tensors.
#include "tools/data_set.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

// Inlined: XXH3 then needs no library at run time.
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace tools {

namespace {

template <typename T>
T load(const std::byte *from)
{
    T value;
    std::memcpy(&value, from, sizeof(T));
    return value;
}

float fp32_from_fp16(uint16_t half)
{
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000U) << 16;
    const uint32_t exponent = (half >> 10) & 0x1fU;
    const uint32_t mantissa = half & 0x3ffU;
    if (exponent == 0) {
        const float value = std::ldexp(static_cast<float>(mantissa), -24);
        return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
    }
    const uint32_t wide = exponent == 0x1f ? 0xffU : exponent + 127 - 15;
    return std::bit_cast<float>(sign | wide << 23 | mantissa << 13);
}

// Values of `dtype` made from a tensor; nothing if the tensor is not to be converted.
struct Converter {
    size_t from_bytes = 0;
    size_t to_bytes = 0;
    void (*convert)(const std::byte *from, std::byte *to) = nullptr;
};

template <typename T, T (*F)(const std::byte *)>
void store(const std::byte *from, std::byte *to)
{
    const T value = F(from);
    std::memcpy(to, &value, sizeof(T));
}

float read_fp64(const std::byte *from)
{
    return static_cast<float>(load<double>(from));
}

uint16_t bf16_of_fp32(const std::byte *from)
{
    return bf16_from_fp32(load<float>(from));
}

uint16_t bf16_of_fp64(const std::byte *from)
{
    return bf16_from_fp32(read_fp64(from));
}

uint16_t bf16_of_fp16(const std::byte *from)
{
    return bf16_from_fp32(fp32_from_fp16(load<uint16_t>(from)));
}

Converter find_converter(const std::string &from, const std::string &to)
{
    if (to == "bf16") {
        if (from == "F32") {
            return {4, 2, store<uint16_t, bf16_of_fp32>};
        }
        if (from == "F64") {
            return {8, 2, store<uint16_t, bf16_of_fp64>};
        }
        if (from == "F16") {
            return {2, 2, store<uint16_t, bf16_of_fp16>};
        }
    } else if (to == "fp32" && from == "F64") {
        return {8, 4, store<float, read_fp64>};
    }
    return {};
}

bool stored_as(const std::string &from, const std::string &to)
{
    return (from == "F32" && to == "fp32") || (from == "BF16" && to == "bf16");
}

std::string base_name(const std::string &path)
{
    const size_t slash = path.rfind('/');
    return slash == std::string::npos ? path : path.substr(slash + 1);
}

} // namespace

Hash128 hash_bytes(const void *data, size_t size)
{
    const XXH128_hash_t hash = XXH3_128bits(data, size);
    return {hash.low64, hash.high64};
}

uint16_t bf16_from_fp32(float value)
{
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    if ((bits & 0x7fffffffU) > 0x7f800000U) {
        // Rounding could carry a NaN into an infinity or lose it: cut, and set the quiet bit if
        // nothing is left of the mantissa.
        const uint16_t cut = static_cast<uint16_t>(bits >> 16);
        return (cut & 0x7fU) != 0 ? cut : static_cast<uint16_t>(cut | 0x40U);
    }
    return static_cast<uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

uint64_t DataSet::bytes() const
{
    uint64_t total = 0;
    for (const Message &message : messages) {
        total += message.size;
    }
    return total;
}

DataSet model_data_set(const std::vector<SafetensorsFile> &files, const std::string &dtype)
{
    DataSet set;
    set.dtype = dtype;
    set.storage = std::make_shared<std::vector<std::byte>>();

    size_t needed = 0;
    for (const SafetensorsFile &file : files) {
        set.data += (set.data.empty() ? "" : " ") + base_name(file.path());
        for (const SafeTensor &tensor : file.tensors()) {
            const Converter converter = find_converter(tensor.dtype, dtype);
            if (converter.convert != nullptr) {
                needed += tensor.size / converter.from_bytes * converter.to_bytes;
                ++set.converted;
            } else if (stored_as(tensor.dtype, dtype)) {
                ++set.converted;
            }
        }
    }
    if (set.converted == 0) {
        return set;
    }

    set.storage->resize(needed);
    std::byte *to = set.storage->data();
    for (const SafetensorsFile &file : files) {
        for (const SafeTensor &tensor : file.tensors()) {
            Message message{tensor.name, tensor.data, static_cast<size_t>(tensor.size), {}};
            const Converter converter = find_converter(tensor.dtype, dtype);
            if (converter.convert != nullptr) {
                const size_t values = static_cast<size_t>(tensor.size) / converter.from_bytes;
                message.data = to;
                message.size = values * converter.to_bytes;
                for (size_t i = 0; i < values; ++i, to += converter.to_bytes) {
                    converter.convert(tensor.data + i * converter.from_bytes, to);
                }
            }
            // Also brings the pages of the file into memory, before anything is timed.
            message.hash = hash_bytes(message.data, message.size);
            set.messages.push_back(std::move(message));
        }
    }
    return set;
}

std::shared_ptr<std::vector<std::byte>> concatenate(const std::vector<SafetensorsFile> &files,
                                                    const DataSet &model, uint64_t at_least,
                                                    uint64_t limit)
{
    auto pool = std::make_shared<std::vector<std::byte>>();
    size_t index = 0;
    for (const SafetensorsFile &file : files) {
        for (const SafeTensor &tensor : file.tensors()) {
            const Message &message = model.messages[index++];
            if (find_converter(tensor.dtype, model.dtype).convert == nullptr &&
                !stored_as(tensor.dtype, model.dtype)) {
                continue;
            }
            const size_t room = static_cast<size_t>(limit) - pool->size();
            pool->insert(pool->end(), message.data, message.data + std::min(message.size, room));
        }
    }
    // Whole values only, also where the pool is repeated.
    pool->resize(pool->size() / 4 * 4);
    const size_t once = pool->size();
    while (once > 0 && pool->size() < at_least) {
        const size_t more = std::min<size_t>(once, static_cast<size_t>(at_least) - pool->size());
        pool->resize(pool->size() + more);
        std::memcpy(pool->data() + pool->size() - more, pool->data(), more);
    }
    return pool;
}

DataSet cut_data_set(const DataSet &model, std::shared_ptr<std::vector<std::byte>> pool,
                     uint64_t size, size_t count)
{
    DataSet set;
    set.dtype = model.dtype;
    set.data = model.data + " (cut)";
    set.converted = count;
    size_t offset = 0;
    for (size_t i = 0; i < count; ++i) {
        if (offset + size > pool->size()) {
            offset = 0;
        }
        Message message{
                "piece " + std::to_string(i), pool->data() + offset, static_cast<size_t>(size), {}};
        message.hash = hash_bytes(message.data, message.size);
        set.messages.push_back(std::move(message));
        // Every piece starts on a whole value.
        offset += (static_cast<size_t>(size) + 3) / 4 * 4;
    }
    set.storage = std::move(pool);
    return set;
}

} // namespace tools
