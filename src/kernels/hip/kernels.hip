// SPDX-License-Identifier: BSD-3-Clause
// The kernels for HIP; embedded in libzip_hip.so.
#include "kernels/gpu/kernels.h"
