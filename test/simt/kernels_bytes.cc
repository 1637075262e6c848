// SPDX-License-Identifier: BSD-3-Clause
// The kernels of stored chunks, and the probe, for the CPU's executor.
#define ZIP_BLOCKS 8
#define ZIP_STORED
#include "kernels/gpu/kernels.h"
