// SPDX-License-Identifier: BSD-3-Clause
// NVIDIA's nvCOMP 6, opened at run time, for comparison: the two batched codecs of its C interface
// that know floating-point types. Only what is called is declared; layouts and values are those of
// its 6.0 headers.
#pragma once

#include "tools/cuda_driver.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tools {

// Buffers of one batch: arrays of `count` entries in device memory, chunks aligned to
// kNvcompAlignment.
struct NvcompBatch {
    size_t count = 0;
    size_t chunk = 0;                   // longest original, bytes
    size_t total = 0;                   // of all originals
    cuda::Address originals = 0;        // array of addresses: source of compress
    cuda::Address original_sizes = 0;   // array of size_t
    cuda::Address compressed = 0;       // array of addresses
    cuda::Address compressed_sizes = 0; // array of size_t, set by compress
    cuda::Address restored = 0;         // array of addresses: destination of decompress
    cuda::Address restored_sizes = 0;   // array of size_t, set by decompress
    cuda::Address statuses = 0;         // array of int32_t, 0 where a chunk went well
    cuda::Address temporary = 0;
    size_t temporary_size = 0;
};
inline constexpr size_t kNvcompAlignment = 16;

// One codec with the data type that fits the values. All calls but the first three enqueue and
// return. Throw Error.
class NvcompCodec {
public:
    virtual ~NvcompCodec() = default;
    virtual const char *name() const = 0;
    // Room that one chunk needs when it is compressed.
    virtual size_t bound(size_t chunk) const = 0;
    virtual size_t compress_temporary(const NvcompBatch &batch,
                                      cuda::StreamHandle stream) const = 0;
    virtual size_t decompress_temporary(const NvcompBatch &batch,
                                        cuda::StreamHandle stream) const = 0;
    virtual void compress(const NvcompBatch &batch, cuda::StreamHandle stream) const = 0;
    virtual void decompress(const NvcompBatch &batch, cuda::StreamHandle stream) const = 0;
};

class Nvcomp {
public:
    // Opens libnvcomp.so.6 at `path`. Throws Error with one line that says what is wrong.
    explicit Nvcomp(const std::string &path);

    const std::string &version() const { return version_; }

    // ANS and bitcomp for values of `dtype` ("bf16", ...). The library stays open until the process
    // ends.
    std::vector<std::unique_ptr<NvcompCodec>> codecs(std::string_view dtype) const;

private:
    void *library_;
    std::string version_;
};

} // namespace tools
