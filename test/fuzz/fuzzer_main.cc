// SPDX-License-Identifier: BSD-3-Clause
// libFuzzer's entry to one of the targets, ZIP_FUZZ_TARGET.
#include "fuzz/targets.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    zip::fuzz::ZIP_FUZZ_TARGET(data, size);
    return 0;
}
