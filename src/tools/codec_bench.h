// SPDX-License-Identifier: BSD-3-Clause
// `zipperf codec`: the codec alone, on the host and on a GPU, beside other codecs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tools {

// Lists are measured in every combination. Values that cannot be combined (an add of fp64, small
// tiles with the dense shape) are left out.
struct CodecOptions {
    std::vector<std::string> where; // "host", "gpu"; empty: the host, and the GPU if there is one
    std::string sizes = "1M,4M,16M,64M,256M,1G";
    std::vector<std::string> dtypes = {"bf16"};
    std::vector<std::string> shapes = {"default"};
    std::vector<std::string> tiles = {"default"};
    std::vector<std::string> data = {"normal"};
    std::vector<std::string> models; // for "weights"
    std::vector<std::string> ops = {"copy", "encode", "decode", "add"};
    std::vector<std::string> chunks = {"1M"}; // original bytes of a chunk; "0": the whole buffer
    std::vector<std::string> caches; // "cold", "warm"; empty: both on the host, cold on a GPU
    unsigned repeats = 0;            // timed runs; 0: 20 on a GPU, 7 on the host
    std::string json;
    std::string dump; // write the data set there and measure nothing

    // Host.
    std::vector<std::string> simd = {"best"};
    unsigned threads = 1;
    std::vector<int> zstd_levels = {1, 3};
    bool zstd = true;

    // GPU.
    std::string gpu_codec = "cuda"; // or the path of the codec's library
    int device = 0;
    std::vector<unsigned> max_sms = {0};
    uint64_t misalign = 0; // bytes behind an aligned address at which the original starts
    bool progress = true;
    unsigned batch = 1;
    std::string chunks_in = "device"; // or "host": the encoded bytes are in pinned host memory
    std::string nvcomp;               // path of its library; empty: without
    std::string nvcomp_chunks = "32K,64K,128K,256K,512K,1M";
};

// Names that `simd` may hold, for the command line.
std::vector<std::string> simd_names();

// Throws Error; kExitMismatch if anything decoded to other bits.
void run_codec_bench(const CodecOptions &options);

} // namespace tools
