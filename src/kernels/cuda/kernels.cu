// SPDX-License-Identifier: BSD-3-Clause
// The kernels for CUDA; embedded in libzip_cuda.so.
#include "kernels/gpu/kernels.h"
