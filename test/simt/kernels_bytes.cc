// SPDX-License-Identifier: BSD-3-Clause
// The kernels of stored chunks, and the probe, for the CPU's executor.
#define ZIP_KERNEL_STORED
#define ZIP_KERNEL_BLOCKS 8
#include "kernels/gpu/kernels.h"
