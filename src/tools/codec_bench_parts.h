// SPDX-License-Identifier: BSD-3-Clause
// What the parts of `zipperf codec` share: the data of a point, its rows, how many runs.
#pragma once

#include "kernels/codec.h"
#include "tools/bench_json.h"
#include "tools/codec_bench.h"
#include "tools/data_set.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace tools {

// One size of one data set.
struct CodecData {
    const ValuePool &pool;
    zip_dtype_t dtype;
    bool finite; // no NaN and no infinity: sums can be compared
    const std::byte *original;
    uint64_t size;
};

// Bytes that are read before a cold run, more than any cache that is measured here holds: on a GPU
// as in the figures that others gave, so that they compare.
inline constexpr uint64_t kFlushBytes = 256 << 20;

// Fills buffers that are about to be written, so that old results cannot be taken for new ones.
inline constexpr uint8_t kPoison = 0xa5;

// Coding of a named type and shape; "auto" leaves both to the encoder.
zip_coding_t coding_of(zip_dtype_t dtype, const std::string &shape, const std::string &tiles);
// Not all types, shapes and tiles go together.
bool can_be_coded(zip_coding_t coding);

// A row with everything that is known before it is measured.
BenchRow start_row(const CodecData &data, const char *where, const char *op,
                   const std::string &codec);

// Fills in the times of runs that took so many microseconds for `bytes` of original data.
void set_times(BenchRow &row, const std::vector<double> &us, uint64_t bytes);

// "bf16/11238", as `picked` has it.
std::string coding_text(zip_dtype_t dtype, zip_shape_t shape);

[[noreturn]] void throw_mismatch(const BenchRow &row);

bool wants(const std::vector<std::string> &list, const char *name);

class HostBench {
public:
    explicit HostBench(const CodecOptions &options);
    ~HostBench();
    void measure(const CodecData &data, std::vector<BenchRow> &rows);

private:
    struct State;
    std::unique_ptr<State> state_;
};

class GpuBench {
public:
    // Throws Error if there is no GPU or no codec for it.
    explicit GpuBench(const CodecOptions &options);
    ~GpuBench();
    // Name of the GPU, and what it has.
    std::string device() const;
    void measure(const CodecData &data, std::vector<BenchRow> &rows);

private:
    struct State;
    std::unique_ptr<State> state_;
};

} // namespace tools
