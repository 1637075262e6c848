// SPDX-License-Identifier: BSD-3-Clause
// The kernels of one type for the CPU's executor.
#define ZIP_KERNEL_TYPE fp64
#define ZIP_KERNEL_DTYPE FP64
#define ZIP_KERNEL_BLOCKS 8
#include "kernels/gpu/kernels.h"
