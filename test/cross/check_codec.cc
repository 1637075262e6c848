// SPDX-License-Identifier: BSD-3-Clause
// For a processor that is emulated: the vector code against the scalar code, on every coding and
// kind of data, and chunks that are damaged. Needs no library, so that a cross compiler's own are
// enough. Prints "ok ..." or "not ok ..." for each coding.
#include <cstdio>
#include <random>
#include <string>

#include "kernels/codec.h"
#include "kernels/cpu/internal.h"
#include "gtest/test_codec_util.h"

namespace {

using namespace zip::test;
using zip::cpu::Coder;

// What is wrong with the coding on that data, or "".
std::string problem(zip_coding_t coding, const Bytes &data)
{
    Bytes scalar(zip_codec_bound(data.size())), simd(scalar.size(), 0xa5), back(data.size(), 0x5a);
    size_t scalar_size = 0, simd_size = 0;
    if (zip::cpu::encode(Coder::SCALAR, coding, data.data(), data.size(), scalar.data(),
                         scalar.size(), &scalar_size) != ZIP_OK ||
        zip_codec_encode(coding, data.data(), data.size(), simd.data(), simd.size(), &simd_size) !=
                ZIP_OK)
        return "is not encoded";
    scalar.resize(scalar_size);
    simd.resize(simd_size);
    if (scalar != simd)
        return "is encoded otherwise";
    if (zip_codec_decode(simd.data(), simd.size(), back.data(), back.size()) != ZIP_OK ||
        back != data)
        return "is not decoded";
    // Both must refuse the same chunks, or make the same of them.
    std::mt19937 random(unsigned(data.size()));
    for (int i = 0; i < 8 && !simd.empty(); ++i) {
        Bytes bad = simd, other(data.size(), 0x5a);
        bad[random() % bad.size()] ^= uint8_t(1u << random() % 8);
        back.assign(data.size(), 0x5a);
        const zip_status_t a = zip_codec_decode(bad.data(), bad.size(), back.data(), back.size()),
                           b = zip::cpu::decode(Coder::SCALAR, bad.data(), bad.size(), other.data(),
                                                other.size());
        if (a != b || (a == ZIP_OK && back != other))
            return "is decoded otherwise when damaged";
    }
    return "";
}

} // namespace

int main()
{
    int failed = 0;
    for (const zip_coding_t &coding : all_codings()) {
        const size_t size = zip_dtype_size(coding.dtype),
                     tile = zip::format::tile_values(format_coding(coding));
        std::string text;
        for (Data kind : ALL_DATA) {
            for (size_t values : {size_t(1), size_t(777), tile + 1500}) {
                const Bytes data = make_data(kind, coding.dtype, values * size + size / 2);
                const std::string p = problem(coding, data);
                if (!p.empty())
                    text = std::string(name_of(kind)) + ", " + std::to_string(values) +
                           " values, " + p;
            }
        }
        failed += !text.empty();
        std::printf("%s %s%s%s\n", text.empty() ? "ok" : "not ok", name_of(coding).c_str(),
                    text.empty() ? "" : ": ", text.c_str());
    }
    return failed != 0;
}
