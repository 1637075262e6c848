// SPDX-License-Identifier: BSD-3-Clause
// The kernels of one type for the CPU's executor.
#define ZIP_KERNEL_TYPE e5m2
#define ZIP_KERNEL_DTYPE E5M2
#define ZIP_KERNEL_BLOCKS 8
#define ZIP_KERNEL_COMMON
#include "kernels/gpu/kernels.h"
