// SPDX-License-Identifier: BSD-3-Clause
// Runs kernels written for simt.h on the CPU: every thread of a block is a fibre, some blocks are
// under way at once, and which fibre runs next is random. What simt.h forbids ends the launch with
// an error: a barrier or an operation of lanes that some threads miss or that they come to at
// different places, a deadlock, a misaligned access, a copy that nobody waited for.
#ifndef ZIP_TEST_SIMT_EXECUTOR_H
#define ZIP_TEST_SIMT_EXECUTOR_H

#include <cstdint>
#include <string>

#include "kernels/gpu/simt.h"

namespace zip::simt::cpu {

struct Machine {
    // 32 or 64. In a wave of 64 the two lane groups share one instruction stream: once they have
    // diverged, the second runs when the first has come to a barrier or its end.
    uint32_t wave = 32;
    uint64_t seed = 1;
    uint32_t resident_blocks = 3; // under way at once
};

// Most static shared memory of a block, as on CUDA.
constexpr size_t MAX_STATIC_SHARED = 48 * 1024;
// Most dynamic shared memory, as on CUDA 9.0.
constexpr size_t MAX_DYNAMIC_SHARED = 227 * 1024;

// The kernel of that name in this program, or null.
const KernelEntry *find_kernel(const std::string &name);

// Runs the kernel in the calling thread, with blocks of that many threads; returns "" or what went
// wrong. The blocks' order is the seed's choice too. After an error memory that the kernel writes
// is undefined.
std::string run(const KernelEntry &kernel, uint32_t blocks, uint32_t threads,
                const gpu::Launch &launch, const Machine &machine);

} // namespace zip::simt::cpu
#endif
