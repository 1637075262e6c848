// SPDX-License-Identifier: BSD-3-Clause
// The JSON that every benchmark writes with --json FILE, and that contrib/plot draws (design.md,
// section 6).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tools {

// One measured point. Keys that do not apply stay empty and are left out of the file.
// Bandwidths are 10^9 bytes of original data a second, times are microseconds a message.
struct BenchRow {
    std::optional<uint64_t> size; // bytes of original data
    std::string dtype;
    std::string data;      // which data set
    std::string wire;      // what the bytes crossed
    std::string strategy;  // "ucx": unmodified UCX; "zip" and all others: this project
    std::string direction; // "send", "put", "bidirectional"
    std::optional<double> gbps_median, gbps_p10, gbps_p90;
    std::optional<double> us_median;
    std::optional<double> ratio; // compressed / original
    std::optional<double> plain_gbps_median;
    std::optional<double> speedup;
    std::optional<double> speedup_p10, speedup_p90; // of pairs of neighbouring runs
    std::optional<double> bound_gbps;               // plain bandwidth / ratio
    std::optional<uint64_t> messages, repeats;
    std::optional<bool> verified; // true only after the hashes of all messages were compared

    // zipperf p2p
    std::string setting; // of the strategy, the best one: "UCX_RNDV_SCHEME=put_zcopy", "default"
    std::string memory, to_memory; // "cuda", "host"
    std::string lanes;             // what the endpoint had: "rc_verbs/swverbs0:1 zip/swverbs0:1"
    std::optional<double> us_p10, us_p90;
    std::optional<double> ucx_gbps_median; // plain_gbps_median is that of strategy "plain"
    std::optional<double> speedup_plain;   // against "plain"; speedup: against the better of both
    std::optional<uint64_t> window;        // messages at a time
    std::optional<double> wire_gbps;       // what the wire was set to, 10^9 bytes/s each way
    std::optional<bool> mps;               // CUDA's Multi-Process Service was used
    std::optional<std::string> gpus;       // their numbers, "0 to 1", where they are not one
    std::optional<bool> in_process;        // both sides were threads of one process

    // zipperf codec
    std::string op;        // "encode", "decode", "add" (decode and add), "copy"
    std::string codec;     // "zip", "zstd-1", "nvcomp-ans", ...
    std::string shape;     // zip: as asked for
    std::string picked;    // zip, shape "auto": what the encoder took, "bf16/11238"
    std::string where;     // "host", "gpu"
    std::string cache;     // "cold": nothing of the buffers is in a cache before each run; "warm"
    std::string simd;      // host, zip: instruction set
    std::string tiles;     // zip: "default", "small"
    std::string chunks_in; // gpu: memory of the encoded bytes, "device" or "host"
    std::optional<uint64_t> chunk; // original bytes of a chunk; 0: the whole buffer is one
    std::optional<uint64_t> threads, max_sms, misalign;
    std::optional<uint64_t> batch;     // buffers of `size` bytes in one launch
    std::optional<bool> progress;      // gpu, zip: a word a chunk was written to pinned host memory
    std::optional<double> memory_gbps; // gpu: 10^9 bytes read and written a second
    std::optional<double> host_us_median; // gpu: the host's part, in the call that launches
};

// Fails early when FILE cannot be written, before minutes are spent on measuring. Throws Error.
void check_json_writable(const std::string &path);

// Replaces FILE in one step, so that a reader never sees half of it. `device` is the CPU's name if
// it is empty. Throws Error.
void write_bench_json(const std::string &path, const std::string &tool,
                      const std::vector<BenchRow> &rows, const std::string &device = {});

// "HOST" and the CPU's name, as the file states them.
std::string host_name();
std::string cpu_name();

} // namespace tools
