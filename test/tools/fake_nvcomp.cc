// SPDX-License-Identifier: BSD-3-Clause
// A library with nvCOMP 6's calls for tests without a GPU: its codecs copy, and refuse what nvCOMP
// would.
#include <cstdint>
#include <cstring>

#define FAKE_NVCOMP extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kSuccess = 0, kInvalidValue = 10, kWrongLength = 20;
constexpr uint32_t kVersion = 6000;
constexpr size_t kHeader = 16;   // before a chunk's copy: its length
constexpr size_t kTemporary = 8; // bytes, all of which are written
constexpr int kFloat16 = 10;
constexpr uintptr_t kAlignment = 16;

// All options have this length; what they say is at the places of 6.0's headers.
struct Options {
    int32_t words[16];
};

int compress(const void *const *from, const size_t *sizes, size_t longest, size_t count,
             void *temporary, size_t temporary_size, void *const *to, size_t *encoded,
             int *statuses)
{
    if (temporary_size < kTemporary) {
        return kInvalidValue;
    }
    std::memset(temporary, 0, temporary_size);
    for (size_t i = 0; i < count; ++i) {
        const bool good = sizes[i] <= longest && (reinterpret_cast<uintptr_t>(from[i]) |
                                                  reinterpret_cast<uintptr_t>(to[i])) %
                                                                 kAlignment ==
                                                         0;
        statuses[i] = good ? kSuccess : kInvalidValue;
        if (good) {
            std::memcpy(to[i], &sizes[i], sizeof(size_t));
            std::memcpy(static_cast<char *>(to[i]) + kHeader, from[i], sizes[i]);
            encoded[i] = sizes[i] + kHeader;
        }
    }
    return kSuccess;
}

int decompress(const void *const *from, const size_t *encoded, const size_t *room, size_t *sizes,
               size_t count, void *temporary, size_t temporary_size, void *const *to, int *statuses)
{
    if (temporary_size < kTemporary) {
        return kInvalidValue;
    }
    std::memset(temporary, 0, temporary_size);
    for (size_t i = 0; i < count; ++i) {
        std::memcpy(&sizes[i], from[i], sizeof(size_t));
        statuses[i] =
                sizes[i] == room[i] && encoded[i] == sizes[i] + kHeader ? kSuccess : kWrongLength;
        if (statuses[i] == kSuccess) {
            std::memcpy(to[i], static_cast<const char *>(from[i]) + kHeader, sizes[i]);
        }
    }
    return kSuccess;
}

} // namespace

FAKE_NVCOMP int nvcompGetProperties(uint32_t *properties)
{
    properties[0] = kVersion;
    properties[1] = 0;
    return kSuccess;
}

#define FAKE_CODEC(name, type_word, decompress_type_word)                                          \
    FAKE_NVCOMP int name##CompressGetMaxOutputChunkSize(size_t chunk, Options, size_t *size)       \
    {                                                                                              \
        *size = chunk + kHeader;                                                                   \
        return kSuccess;                                                                           \
    }                                                                                              \
    FAKE_NVCOMP int name##CompressGetTempSize(size_t, size_t, Options, size_t *size, size_t,       \
                                              void *)                                              \
    {                                                                                              \
        *size = kTemporary;                                                                        \
        return kSuccess;                                                                           \
    }                                                                                              \
    FAKE_NVCOMP int name##DecompressGetTempSize(size_t, size_t, Options, size_t *size, size_t,     \
                                                void *)                                            \
    {                                                                                              \
        *size = kTemporary;                                                                        \
        return kSuccess;                                                                           \
    }                                                                                              \
    FAKE_NVCOMP int name##CompressAsync(const void *const *from, const size_t *sizes,              \
                                        size_t longest, size_t count, void *temporary,             \
                                        size_t temporary_size, void *const *to, size_t *encoded,   \
                                        Options options, int *statuses, void *)                    \
    {                                                                                              \
        return options.words[type_word] != kFloat16                                                \
                       ? kInvalidValue                                                             \
                       : compress(from, sizes, longest, count, temporary, temporary_size, to,      \
                                  encoded, statuses);                                              \
    }                                                                                              \
    FAKE_NVCOMP int name##DecompressAsync(const void *const *from, const size_t *encoded,          \
                                          const size_t *room, size_t *sizes, size_t count,         \
                                          void *temporary, size_t temporary_size, void *const *to, \
                                          Options options, int *statuses, void *)                  \
    {                                                                                              \
        return options.words[decompress_type_word] != kFloat16 && decompress_type_word != 0        \
                       ? kInvalidValue                                                             \
                       : decompress(from, encoded, room, sizes, count, temporary, temporary_size,  \
                                    to, statuses);                                                 \
    }

FAKE_CODEC(nvcompBatchedANS, 1, 1)
FAKE_CODEC(nvcompBatchedBitcomp, 1, 0) // its decompression takes no type
