// SPDX-License-Identifier: BSD-3-Clause
// What tests see of the driver in fake_libcuda.cc besides CUDA's functions.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
void *fake_cuda_context(int gpu);
// Memory of a GPU, for the process' lifetime; 0: none.
uint64_t fake_cuda_allocate(int gpu, size_t size);
// Copies of this process so far that had to go through host memory.
unsigned fake_cuda_slow_copies();

int cuCtxGetCurrent(void **context);
int cuCtxSetCurrent(void *context);
}
