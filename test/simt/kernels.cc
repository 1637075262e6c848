// SPDX-License-Identifier: BSD-3-Clause
// The GPU codec's kernels for the CPU's executor.
#include "kernels/gpu/kernels.h"
