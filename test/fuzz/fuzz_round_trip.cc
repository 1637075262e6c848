// SPDX-License-Identifier: BSD-3-Clause
// Any bytes as values of any type come back, both encoders make the same chunk, and it is as long
// as it was said to be.
#include <algorithm>
#include <cstring>
#include <vector>

#include "fuzz/targets.h"
#include "kernels/codec.h"
#include "kernels/cpu/internal.h"
#include "gtest/simd_targets.h"

namespace zip::fuzz {

namespace {

// Two tiles of 16384 values of one byte, 8 of 4096 values; more would say little more, and take
// longer.
constexpr size_t MAX_LENGTH = 1 << 15;
constexpr unsigned MAX_REPEATS = 8;

void expect_decoded(uint8_t *chunk, size_t size, const std::vector<uint8_t> &original,
                    size_t misalignment)
{
    for (cpu::Coder coder : {cpu::Coder::SCALAR, cpu::Coder::SIMD}) {
        ExactMemory back(original.size(), misalignment, 0x55);
        check(cpu::decode(coder, chunk, size, back.get(), original.size()) == ZIP_OK,
              "what was encoded decodes");
        check(original.empty() || memcmp(back.get(), original.data(), original.size()) == 0,
              "what was encoded comes back");
    }
}

} // namespace

// Control: byte 0: type; byte 1: shape; byte 2: bit 0: small tiles, bits 4 to 7: misalignments;
// byte 3, bits 0 to 2: how often the bytes behind follow each other, as mutations make no input
// that is long; the others: the fast coder's instruction set.
void fuzz_round_trip(const uint8_t *data, size_t size)
{
    if (size < CONTROL_BYTES)
        return;
    const uint8_t *const control = data;
    const size_t n = size - CONTROL_BYTES, misalignment = control[2] >> 4;
    std::vector<uint8_t> original;
    for (unsigned i = 0;
         i <= control[3] % MAX_REPEATS && original.size() + n <= MAX_LENGTH && n > 0; ++i)
        original.insert(original.end(), data + CONTROL_BYTES, data + size);
    const size_t length = original.size();

    zip_coding_t coding;
    coding.dtype = zip_dtype_t(control[0] % 9 == 8 ? ZIP_DTYPE_AUTO : control[0] % 9); // 7 is none
    coding.shape = zip_shape_t(control[1] % 7);                                        // 6 is none
    coding.small_tiles = control[2] & 1;
    const bool valid = zip_dtype_name(coding.dtype) != nullptr &&
                       (coding.dtype == ZIP_DTYPE_BYTES ||
                        (zip_shape_name(coding.shape) != nullptr &&
                         !(coding.shape == ZIP_SHAPE_DENSE && coding.small_tiles != 0) &&
                         !(coding.shape == ZIP_SHAPE_COLUMNS && coding.dtype == ZIP_DTYPE_FP64)));

    ExactMemory source(length, misalignment, 0);
    if (length > 0)
        memcpy(source.get(), original.data(), length);
    zip_plan_t plan;
    const zip_status_t planned = zip_codec_plan(coding, length, &plan);
    check(planned == (valid ? ZIP_OK : ZIP_ERR_INVALID_PARAM), "only valid codings have a plan");

    static const std::vector<int64_t> targets = test::simd_targets();
    const test::SimdTarget target(targets[(control[3] / MAX_REPEATS) % targets.size()]);
    const size_t bound = zip_codec_bound(length);
    ExactMemory scalar(bound, misalignment ^ 5, 0x11), simd(bound, misalignment ^ 5, 0x22);
    size_t scalar_size = 0, simd_size = 0;
    const zip_status_t status = cpu::encode(cpu::Coder::SCALAR, coding, source.get(), length,
                                            scalar.get(), bound, &scalar_size);
    check(status == (valid ? ZIP_OK : ZIP_ERR_INVALID_PARAM), "only valid codings are encoded");
    check(status == cpu::encode(cpu::Coder::SIMD, coding, source.get(), length, simd.get(), bound,
                                &simd_size),
          "both encoders have the same status");
    if (!valid)
        return;
    check(scalar_size <= bound && scalar_size <= length + ZIP_CODEC_MAX_GROWTH &&
                  scalar_size <= plan.bound,
          "a chunk is not longer than its bounds");
    check(scalar_size == simd_size && memcmp(scalar.get(), simd.get(), scalar_size) == 0,
          "both encoders make the same chunk");
    zip_chunk_info_t info;
    check(zip_codec_inspect(scalar.get(), scalar_size, &info) == ZIP_OK &&
                  info.encoded_length == scalar_size && info.original_length == length,
          "inspect knows the lengths of what was encoded");
    expect_decoded(scalar.get(), scalar_size, original, misalignment ^ 10);

    // Coded though it does not gain, as a GPU's encoder does.
    if (coding.dtype == ZIP_DTYPE_BYTES || coding.dtype == ZIP_DTYPE_AUTO ||
        info.coding.dtype != ZIP_DTYPE_BYTES)
        return;
    const format::Coding forced = {
            uint8_t(coding.dtype),
            uint8_t(coding.shape == ZIP_SHAPE_DEFAULT ? ZIP_SHAPE_22228 : coding.shape),
            coding.small_tiles != 0};
    const size_t limit = plan.bound + 1; // encoders stay below it
    ExactMemory a(limit, 0, 0x33), b(limit, 0, 0x44);
    const size_t a_size = cpu::encode_scalar(forced, source.get(), length, a.get(), limit);
    const size_t b_size = cpu::encode_simd(forced, source.get(), length, b.get(), limit);
    check(a_size != 0 && a_size <= plan.bound, "a coded chunk is not longer than planned");
    check(a_size >= plan.fixed, "a plan's fixed part is a part of every coded chunk");
    check(a_size == b_size && memcmp(a.get(), b.get(), a_size) == 0,
          "both encoders make the same coded chunk");
    expect_decoded(a.get(), a_size, original, 0);
}

} // namespace zip::fuzz
