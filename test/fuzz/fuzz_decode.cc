// SPDX-License-Identifier: BSD-3-Clause
// A chunk of any bytes: nothing is read or written out of bounds, and both decoders of the host say
// the same.
#include <cstring>

#include "fuzz/targets.h"
#include "kernels/codec.h"
#include "kernels/cpu/internal.h"

namespace zip::fuzz {

namespace {

constexpr uint64_t MAX_LENGTH = 1 << 20; // of an original, or memory and time would go there

} // namespace

// Control: byte 0, bit 0: the expected length is in bytes 1 and 2, else what the chunk says; bits 4
// to 7: misalignment of the chunk; byte 3, bits 0 to 3: of the original.
void fuzz_decode(const uint8_t *data, size_t size)
{
    if (size < CONTROL_BYTES)
        return;
    const uint8_t *const control = data;
    const size_t n = size - CONTROL_BYTES;
    ExactMemory chunk(n, control[0] >> 4, 0);
    if (n > 0)
        memcpy(chunk.get(), data + CONTROL_BYTES, n);

    zip_chunk_info_t info;
    const zip_status_t inspected = zip_codec_inspect(chunk.get(), n, &info);
    uint64_t length = control[1] | control[2] << 8;
    if ((control[0] & 1) == 0 && n >= format::HEADER_LENGTH)
        memcpy(&length, chunk.get() + offsetof(format::ChunkHeader, original_length), 8);
    if (length > MAX_LENGTH)
        return;

    // Filled differently: a byte that is not written shows.
    ExactMemory scalar(length, control[3] & 15, 0x55), simd(length, control[3] & 15, 0xaa);
    const zip_status_t status =
            cpu::decode(cpu::Coder::SCALAR, chunk.get(), n, scalar.get(), length);
    check(status == cpu::decode(cpu::Coder::SIMD, chunk.get(), n, simd.get(), length),
          "both decoders have the same status");
    check(status == ZIP_OK || status == ZIP_ERR_CORRUPT || status == ZIP_ERR_UNSUPPORTED,
          "a decoder has no other status");
    if (inspected != ZIP_OK)
        check(status == inspected, "a header that inspect refuses is refused by a decoder too");
    if (status != ZIP_OK)
        return;
    check(length == 0 || memcmp(scalar.get(), simd.get(), length) == 0,
          "both decoders have the same result");
    check(inspected == ZIP_OK && info.original_length == length && info.encoded_length <= n,
          "inspect knows the lengths of what decodes");

    const size_t exact = info.encoded_length;
    ExactMemory alone(exact, 0, 0);
    memcpy(alone.get(), chunk.get(), exact);
    check(cpu::decode(cpu::Coder::SIMD, alone.get(), exact, simd.get(), length) == ZIP_OK &&
                  (length == 0 || memcmp(scalar.get(), simd.get(), length) == 0),
          "a chunk needs no more bytes than its length");
    check(cpu::decode(cpu::Coder::SIMD, alone.get(), exact - 1, simd.get(), length) ==
                  ZIP_ERR_CORRUPT,
          "a chunk that misses its last byte is refused");
}

} // namespace zip::fuzz
