// SPDX-License-Identifier: BSD-3-Clause
// The kernels of one type for the CPU's executor.
#define ZIP_KERNEL_DTYPE e4m3
#define ZIP_KERNEL_DTYPE_UPPER E4M3
#define ZIP_BLOCKS 8
#define ZIP_FEW
#define ZIP_DENSE
#include "kernels/gpu/kernels.h"
