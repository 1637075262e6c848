// SPDX-License-Identifier: BSD-3-Clause
// Fast coder. So far the reference does everything.
#include "kernels/cpu/internal.h"

namespace zip::cpu {

size_t encode_simd(Coding coding, const uint8_t *src, size_t length, uint8_t *dst, size_t limit)
{
    return encode_scalar(coding, src, length, dst, limit);
}

zip_status_t decode_simd(const ChunkHeader &header, const uint8_t *src, uint8_t *dst)
{
    return decode_scalar(header, src, dst);
}

} // namespace zip::cpu
