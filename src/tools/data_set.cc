// SPDX-License-Identifier: BSD-3-Clause
// Messages made from a real model's tensors.
#include "tools/data_set.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <numbers>
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

// A float rounded to a narrower format of `exponent_bits` and `mantissa_bits`, to nearest, ties to
// even. What is above `largest` (the code of the largest finite number) becomes `above`, a NaN
// becomes `nan`.
uint32_t narrow(float value, int exponent_bits, int mantissa_bits, uint32_t largest, uint32_t above,
                uint32_t nan)
{
    constexpr int kMantissa = 23, kBias = 127;
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t sign = (bits >> 31) << (exponent_bits + mantissa_bits);
    const uint32_t magnitude = bits & 0x7fffffffU;
    if (magnitude > 0x7f800000U) {
        return sign | nan;
    }
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const int exponent = static_cast<int>(magnitude >> kMantissa) - kBias;
    const int below = std::max(1 - bias - exponent, 0); // places that a subnormal is shifted down
    const int shift = kMantissa - mantissa_bits + below;
    if (shift > kMantissa + 1) {
        return sign; // less than half of the smallest
    }
    const uint32_t exact = below == 0
                                   ? magnitude - (static_cast<uint32_t>(kBias - bias) << kMantissa)
                                   : (magnitude & ((1U << kMantissa) - 1)) | 1U << kMantissa;
    const uint32_t code = (exact + (1U << (shift - 1)) - 1 + ((exact >> shift) & 1U)) >> shift;
    return sign | (code > largest ? above : code);
}

// Codes of fp8: the largest finite number, and the NaN with the fewest bits changed. What is above
// saturates, as conversions of quantized tensors do.
constexpr uint32_t kE4m3Largest = 0x7e, kE4m3Nan = 0x7f;
constexpr uint32_t kE5m2Largest = 0x7b, kE5m2Nan = 0x7e;

float read_fp64(const std::byte *from)
{
    return static_cast<float>(load<double>(from));
}

float read_fp16(const std::byte *from)
{
    return fp32_from_fp16(load<uint16_t>(from));
}

float read_bf16(const std::byte *from)
{
    return fp32_from_bf16(load<uint16_t>(from));
}

template <typename T, T (*F)(float)>
void store(float value, std::byte *to)
{
    const T narrowed = F(value);
    std::memcpy(to, &narrowed, sizeof(T));
}

float same(float value)
{
    return value;
}

uint8_t e4m3_from_fp32(float value)
{
    return static_cast<uint8_t>(narrow(value, 4, 3, kE4m3Largest, kE4m3Largest, kE4m3Nan));
}

uint8_t e5m2_from_fp32(float value)
{
    return static_cast<uint8_t>(narrow(value, 5, 2, kE5m2Largest, kE5m2Largest, kE5m2Nan));
}

// A type as tensors of a file hold it, and as data sets do.
struct TypeName {
    const char *file;
    const char *dtype;
    size_t bytes;
    float (*read)(const std::byte *from);
    void (*write)(float value, std::byte *to);
    float largest; // to which values are scaled; 0: not scaled
};

constexpr std::array<TypeName, 6> kTypes = {{
        {"F64", "fp64", 8, read_fp64, nullptr, 0},
        {"F32", "fp32", 4, load<float>, store<float, same>, 0},
        {"F16", "fp16", 2, read_fp16, store<uint16_t, fp16_from_fp32>, 0},
        {"BF16", "bf16", 2, read_bf16, store<uint16_t, bf16_from_fp32>, 0},
        {"F8_E4M3", "e4m3", 1, nullptr, store<uint8_t, e4m3_from_fp32>, 448},
        {"F8_E5M2", "e5m2", 1, nullptr, store<uint8_t, e5m2_from_fp32>, 57344},
}};

const TypeName *find_dtype(std::string_view dtype)
{
    const auto *type = std::find_if(kTypes.begin(), kTypes.end(),
                                    [&](const TypeName &t) { return t.dtype == dtype; });
    return type == kTypes.end() ? nullptr : type;
}

// How values of `dtype` are made from a tensor; nothing if the tensor is not to be converted.
struct Converter {
    size_t from_bytes = 0;
    size_t to_bytes = 0;
    float (*read)(const std::byte *from) = nullptr;
    void (*write)(float value, std::byte *to) = nullptr;
    float largest = 0;

    explicit operator bool() const { return write != nullptr; }

    void convert(const std::byte *from, size_t values, std::byte *to) const
    {
        float scale = 0;
        if (largest != 0) {
            float top = 0;
            for (size_t i = 0; i < values; ++i) {
                const float value = std::fabs(read(from + i * from_bytes));
                top = std::isfinite(value) ? std::max(top, value) : top;
            }
            scale = top > 0 ? largest / top : 1;
        }
        for (size_t i = 0; i < values; ++i) {
            const float value = read(from + i * from_bytes);
            write(largest != 0 ? value * scale : value, to + i * to_bytes);
        }
    }
};

Converter find_converter(const std::string &from, const std::string &to)
{
    const TypeName *target = find_dtype(to);
    const auto *source = std::find_if(kTypes.begin(), kTypes.end(),
                                      [&](const TypeName &t) { return t.file == from; });
    // fp16 to bf16 narrows the mantissa; the other way, or from fp8, values would be widened.
    const bool narrows = target != nullptr && source != kTypes.end() && target->write != nullptr &&
                         source->read != nullptr &&
                         (source->bytes > target->bytes || (from == "F16" && to == "bf16"));
    if (!narrows) {
        return {};
    }
    return {source->bytes, target->bytes, source->read, target->write, target->largest};
}

bool stored_as(const std::string &from, const std::string &to)
{
    const TypeName *type = find_dtype(to);
    return type != nullptr && from == type->file;
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

uint16_t fp16_from_fp32(float value)
{
    return static_cast<uint16_t>(narrow(value, 5, 10, 0x7bff, 0x7c00, 0x7e00));
}

float fp32_from_bf16(uint16_t value)
{
    return std::bit_cast<float>(static_cast<uint32_t>(value) << 16);
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

size_t value_bytes(std::string_view dtype)
{
    const TypeName *type = find_dtype(dtype);
    return type == nullptr ? 0 : type->bytes;
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
            if (converter) {
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
            if (converter) {
                const size_t values = static_cast<size_t>(tensor.size) / converter.from_bytes;
                message.data = to;
                message.size = values * converter.to_bytes;
                converter.convert(tensor.data, values, to);
                to += message.size;
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
            if (!find_converter(tensor.dtype, model.dtype) &&
                !stored_as(tensor.dtype, model.dtype)) {
                continue;
            }
            const size_t room = static_cast<size_t>(limit) - pool->size();
            pool->insert(pool->end(), message.data, message.data + std::min(message.size, room));
        }
    }
    // Whole values only, also where the pool is repeated.
    const size_t value = std::max<size_t>(value_bytes(model.dtype), 1);
    pool->resize(pool->size() / value * value);
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

namespace {

// Standard deviation of kNormal, and of the logarithm of kKv's scales.
constexpr double kNormalDeviation = 0.02;
constexpr double kKvScaleDeviation = 1.0;
// Standard deviations that become fp8's largest value: as many as the largest of a tensor of some
// 10^8 normal values has.
constexpr double kLargestDeviations = 6.0;

// SplitMix64: a counter through a mixing function. The same numbers everywhere, and as good as bits
// need be here.
class RandomBits {
public:
    explicit RandomBits(uint64_t seed) : state_(seed) {}

    uint64_t next()
    {
        state_ += 0x9e3779b97f4a7c15U;
        uint64_t x = state_;
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
        return x ^ (x >> 31);
    }

    // In (0, 1].
    double unit() { return static_cast<double>((next() >> 11) + 1) * 0x1p-53; }

    // Two independent values of normal(0, 1), by Box and Muller.
    std::array<double, 2> normal()
    {
        const double radius = std::sqrt(-2.0 * std::log(unit()));
        const double angle = 2.0 * std::numbers::pi * unit();
        return {radius * std::cos(angle), radius * std::sin(angle)};
    }

private:
    uint64_t state_;
};

void write_value(const TypeName &type, double value, std::byte *to)
{
    if (type.write == nullptr) {
        std::memcpy(to, &value, sizeof(value));
    } else {
        type.write(static_cast<float>(value), to);
    }
}

// `values` is even.
void write_normal(const TypeName &type, RandomBits &random, const std::vector<double> &scale,
                  size_t values, std::byte *to)
{
    for (size_t i = 0; i < values; i += 2) {
        const std::array<double, 2> pair = random.normal();
        for (size_t j = 0; j < 2; ++j) {
            write_value(type, pair[j] * scale[(i + j) % scale.size()], to + (i + j) * type.bytes);
        }
    }
}

std::vector<double> kv_scales(RandomBits &random)
{
    std::vector<double> scales(kKvChannels);
    for (double &scale : scales) {
        scale = std::exp(kKvScaleDeviation * random.normal()[0]);
    }
    return scales;
}

constexpr std::array<const char *, 5> kValuesNames = {"normal", "uniform", "weights", "kv",
                                                      "random"};

} // namespace

const char *values_name(Values values)
{
    return kValuesNames[static_cast<size_t>(values)];
}

std::optional<Values> values_from_name(std::string_view name)
{
    for (size_t i = 0; i < kValuesNames.size(); ++i) {
        if (name == kValuesNames[i]) {
            return static_cast<Values>(i);
        }
    }
    return std::nullopt;
}

ValuePool make_value_pool(Values values, const std::string &dtype, uint64_t at_least,
                          const std::vector<SafetensorsFile> &files)
{
    const TypeName *type = find_dtype(dtype);
    ValuePool pool{dtype, values_name(values), {}};
    if (type == nullptr) {
        return pool;
    }
    if (values == Values::kWeights) {
        const DataSet model = model_data_set(files, dtype);
        if (!model.messages.empty()) {
            pool.data = "weights: " + model.data;
            pool.bytes = std::move(*concatenate(files, model, 0, kPoolBytes));
        }
        return pool;
    }

    const uint64_t row = kKvChannels * type->bytes;
    const uint64_t size = (std::min(at_least, kPoolBytes) + row - 1) / row * row;
    const size_t count = static_cast<size_t>(size) / type->bytes;
    pool.bytes.resize(static_cast<size_t>(size));
    RandomBits random(static_cast<uint64_t>(values) + 1);
    std::byte *to = pool.bytes.data();
    switch (values) {
    case Values::kNormal: {
        const double scale = type->largest == 0
                                     ? kNormalDeviation
                                     : static_cast<double>(type->largest) / kLargestDeviations;
        write_normal(*type, random, {scale}, count, to);
        break;
    }
    case Values::kKv: {
        std::vector<double> scales = kv_scales(random);
        if (type->largest != 0) {
            const double top = *std::max_element(scales.begin(), scales.end());
            for (double &scale : scales) {
                scale *= static_cast<double>(type->largest) / (kLargestDeviations * top);
            }
        }
        write_normal(*type, random, scales, count, to);
        break;
    }
    case Values::kUniform: {
        const double scale = type->largest == 0 ? 1.0 : static_cast<double>(type->largest);
        for (size_t i = 0; i < count; ++i) {
            const double unit = static_cast<double>(static_cast<int64_t>(random.next())) * 0x1p-63;
            write_value(*type, unit * scale, to + i * type->bytes);
        }
        break;
    }
    default:
        for (size_t i = 0; i < pool.bytes.size(); i += sizeof(uint64_t)) {
            const uint64_t bits = random.next();
            std::memcpy(to + i, &bits, sizeof(bits));
        }
        break;
    }
    return pool;
}

void fill_from_pool(const ValuePool &pool, uint64_t seed, std::byte *to, uint64_t size)
{
    const uint64_t row = std::max<uint64_t>(kKvChannels * value_bytes(pool.dtype), 1);
    const uint64_t length = pool.bytes.size();
    RandomBits random(seed);
    // A model shorter than a row is repeated from its start.
    const uint64_t rows = std::max<uint64_t>(length / row, 1);
    uint64_t start = seed == 0 ? 0 : random.next() % rows * row;
    while (size > 0) {
        for (const auto &[from, until] :
             {std::pair{start, length}, std::pair{uint64_t{0}, start}}) {
            const uint64_t part = std::min(size, until - from);
            std::memcpy(to, pool.bytes.data() + from, static_cast<size_t>(part));
            to += part;
            size -= part;
        }
        start = random.next() % rows * row;
    }
}

} // namespace tools
