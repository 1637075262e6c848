// SPDX-License-Identifier: BSD-3-Clause
// The codec gives back what it was given: all types, lengths, alignments and kinds of data, on
// every instruction set.
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <tuple>

#include "hwy/highway.h"
#include "kernels/codec.h"
#include "kernels/cpu/internal.h"
#include "kernels/format.h"
#include "test_codec_util.h"

namespace zip::test {
namespace {

using cpu::Coder;

constexpr zip_dtype_t TYPES[] = {ZIP_DTYPE_BF16, ZIP_DTYPE_FP32};

std::string type_name(zip_dtype_t dtype)
{
    return dtype == ZIP_DTYPE_FP32 ? "Fp32" : "Bf16";
}

// Memory for round trips, allotted once for many.
class RoundTrip {
public:
    explicit RoundTrip(size_t most)
        : src_(most + 1), chunk_(most + ZIP_CODEC_MAX_GROWTH + 1),
          other_(most + ZIP_CODEC_MAX_GROWTH + 1), back_(most + 1)
    {
    }

    // Encodes with both coders, which must agree, and decodes each other's. `shift` moves all
    // buffers off their pages' ends by a byte, in turn. Returns the chunk's size.
    size_t check(zip_dtype_t dtype, const Bytes &data, bool front = false, size_t shift = 0)
    {
        const size_t n = data.size(), bound = zip_codec_bound(n);
        uint8_t *const src = place(src_, front, n, shift & 1);
        uint8_t *const chunk = place(chunk_, front, bound, shift >> 1 & 1);
        uint8_t *const other = place(other_, front, bound, shift & 1);
        uint8_t *const back = place(back_, front, n, shift >> 1 & 1);
        if (n != 0)
            memcpy(src, data.data(), n);

        size_t size = 0, other_size = 0;
        EXPECT_EQ(ZIP_OK, zip_codec_encode(dtype, src, n, chunk, bound, &size));
        EXPECT_EQ(ZIP_OK, cpu::encode(Coder::SCALAR, dtype, src, n, other, bound, &other_size));
        EXPECT_LE(size, n + ZIP_CODEC_MAX_GROWTH);
        EXPECT_EQ(other_size, size);
        EXPECT_TRUE(other_size == size && memcmp(chunk, other, size) == 0)
                << "scalar and SIMD chunks differ";

        zip_chunk_info_t info;
        EXPECT_EQ(ZIP_OK, zip_codec_inspect(chunk, size, &info));
        EXPECT_EQ(n, info.original_length);
        EXPECT_EQ(size, info.encoded_length);
        EXPECT_TRUE(info.dtype == dtype || info.dtype == ZIP_DTYPE_BYTES);

        // The chunk flush at its page's end, so that reading on is seen.
        uint8_t *const in = place(other_, front, size, shift & 1);
        memmove(in, chunk, size);
        for (Coder coder : {Coder::SIMD, Coder::SCALAR}) {
            if (n != 0)
                memset(back, 0xa5, n);
            EXPECT_EQ(ZIP_OK, cpu::decode(coder, in, size, back, n));
            EXPECT_TRUE(n == 0 || memcmp(data.data(), back, n) == 0) << "not what was encoded";
        }
        return size;
    }

private:
    static uint8_t *place(GuardedMemory &memory, bool front, size_t n, size_t shift)
    {
        return front ? memory.first(n) + shift : memory.last(n) - shift;
    }

    GuardedMemory src_, chunk_, other_, back_;
};

using KindParam = std::tuple<zip_dtype_t, Data>;
class CodecKinds : public testing::TestWithParam<KindParam> {};

TEST_P(CodecKinds, round_trip)
{
    const auto [dtype, kind] = GetParam();
    RoundTrip trip(300000);
    size_t shift = 0;
    for (size_t n : {1, 2, 3, 64, 600, 1030, 4096, 16384, 16390, 65536, 100003, 262144, 300000}) {
        SCOPED_TRACE(n);
        trip.check(dtype, make_data(kind, dtype, n), n % 3 == 0, shift++);
        if (HasFailure())
            return;
    }
}

INSTANTIATE_TEST_SUITE_P(, CodecKinds,
                         testing::Combine(testing::ValuesIn(TYPES), testing::ValuesIn(ALL_DATA)),
                         [](const testing::TestParamInfo<KindParam> &p) {
                             return type_name(std::get<0>(p.param)) + name_of(std::get<1>(p.param));
                         });

class CodecTypes : public testing::TestWithParam<zip_dtype_t> {};

TEST_P(CodecTypes, every_short_length)
{
    RoundTrip trip(2200);
    const Bytes data = make_data(Data::NORMAL, GetParam(), 2200);
    for (size_t n = 0; n <= 2200; ++n) {
        SCOPED_TRACE(n);
        trip.check(GetParam(), Bytes(data.begin(), data.begin() + ptrdiff_t(n)), n % 7 == 0, n % 4);
        if (HasFailure())
            return;
    }
}

TEST_P(CodecTypes, lengths_around_block_group_and_tile_edges)
{
    const size_t most = 140000, block = format::BLOCK_VALUES * zip_dtype_size(GetParam());
    RoundTrip trip(most);
    const Bytes data = make_data(Data::MIXED, GetParam(), most);
    for (size_t edge = block; edge + 3 <= most; edge += block) {
        for (size_t n = edge - 3; n <= edge + 3; ++n) {
            SCOPED_TRACE(n);
            trip.check(GetParam(), Bytes(data.begin(), data.begin() + ptrdiff_t(n)), n % 5 == 0,
                       n % 4);
            if (HasFailure())
                return;
        }
    }
}

TEST_P(CodecTypes, lengths_of_one_ragged_block)
{
    // Every number of words and values in a last block behind a full one.
    const size_t size = zip_dtype_size(GetParam()), most = 2 * format::BLOCK_VALUES * size;
    RoundTrip trip(most);
    const Bytes data = make_data(Data::WIDE, GetParam(), most);
    for (size_t n = most / 2; n <= most; n += size) {
        SCOPED_TRACE(n);
        trip.check(GetParam(), Bytes(data.begin(), data.begin() + ptrdiff_t(n)));
        if (HasFailure())
            return;
    }
}

TEST_P(CodecTypes, every_upper_half)
{
    // In order, and in an order in which most tiles have few exponents and so are coded.
    const size_t size = zip_dtype_size(GetParam());
    Bytes ordered(65536 * size), mixed(65536 * 16 * size);
    std::mt19937 random(5);
    for (size_t i = 0; i < 65536 * 16; ++i) {
        const uint32_t high = uint32_t(i / 16), low = uint32_t(random()) & 0xffff;
        const uint32_t x =
                (i % 16 == 0 ? high : (high & 0x8000) | 0x3f80 | (low & 0xff)) << 16 | low;
        memcpy(&mixed[i * size], reinterpret_cast<const uint8_t *>(&x) + 4 - size, size);
        if (i % 16 == 0)
            memcpy(&ordered[i / 16 * size], &mixed[i * size], size);
    }
    RoundTrip trip(mixed.size());
    trip.check(GetParam(), ordered);
    EXPECT_LT(trip.check(GetParam(), mixed), mixed.size() * 9 / 10);
}

TEST_P(CodecTypes, all_targets_give_the_same_chunk)
{
    RoundTrip trip(100000);
    for (int64_t targets = hwy::SupportedTargets(); targets != 0; targets &= targets - 1) {
        SCOPED_TRACE(hwy::TargetName(targets & -targets));
        hwy::SetSupportedTargetsForTest(targets & -targets);
        hwy::GetChosenTarget().Update(hwy::SupportedTargets());
        for (Data kind : ALL_DATA) {
            SCOPED_TRACE(name_of(kind));
            for (size_t n : {777, 5001, 32768, 99999})
                trip.check(GetParam(), make_data(kind, GetParam(), n, 7), n % 2 == 0, n % 4);
        }
        hwy::SetSupportedTargetsForTest(0);
        hwy::GetChosenTarget().Update(hwy::SupportedTargets());
        if (HasFailure())
            return;
    }
}

TEST_P(CodecTypes, a_source_that_changes_gives_a_chunk_that_decodes)
{
    // Rewritten between constants and noise: the worst for whoever counts first and writes later.
    const size_t n = 65536 + 6;
    const Bytes calm = make_data(Data::EQUAL, GetParam(), n),
                wild = make_data(Data::WIDE, GetParam(), n);
    GuardedMemory src(n), chunk(zip_codec_bound(n)), back(n);
    uint8_t *const s = src.last(n), *const c = chunk.last(zip_codec_bound(n));
    memcpy(s, calm.data(), n);
    std::atomic<bool> stop{false};
    std::thread writer([&] {
        std::mt19937 random(3);
        while (!stop.load(std::memory_order_relaxed)) {
            const size_t at = random() % (n - 256);
            const Bytes &from = random() % 2 == 0 ? calm : wild;
            for (size_t i = at; i < at + 256; ++i)
                reinterpret_cast<volatile uint8_t *>(s)[i] = from[i];
        }
    });
    for (int i = 0; i < 300; ++i) {
        size_t size = 0;
        EXPECT_EQ(ZIP_OK, cpu::encode(i % 8 == 0 ? Coder::SCALAR : Coder::SIMD, GetParam(), s, n, c,
                                      zip_codec_bound(n), &size));
        EXPECT_LE(size, zip_codec_bound(n));
        EXPECT_EQ(ZIP_OK, zip_codec_decode(c, size, back.last(n), n));
        if (HasFailure())
            break;
    }
    stop = true;
    writer.join();
}

INSTANTIATE_TEST_SUITE_P(, CodecTypes, testing::ValuesIn(TYPES),
                         [](const testing::TestParamInfo<zip_dtype_t> &p) {
                             return type_name(p.param);
                         });

double ratio_of(zip_dtype_t dtype, const Bytes &data)
{
    RoundTrip trip(data.size());
    return double(trip.check(dtype, data)) / double(data.size());
}

TEST(Codec, ratios)
{
    const size_t n = 256 << 10;
    EXPECT_LE(ratio_of(ZIP_DTYPE_BF16, make_data(Data::NORMAL, ZIP_DTYPE_BF16, n)), 0.672);
    EXPECT_LE(ratio_of(ZIP_DTYPE_BF16, make_data(Data::UNIFORM, ZIP_DTYPE_BF16, n)), 0.650);
    EXPECT_LE(ratio_of(ZIP_DTYPE_FP32, make_data(Data::NORMAL, ZIP_DTYPE_FP32, n)), 0.840);
    EXPECT_LE(ratio_of(ZIP_DTYPE_BF16, make_data(Data::EQUAL, ZIP_DTYPE_BF16, n)), 0.630);
    // Short messages gain too: nothing is padded to whole tiles.
    EXPECT_LE(ratio_of(ZIP_DTYPE_BF16, make_data(Data::NORMAL, ZIP_DTYPE_BF16, 1000)), 0.80);
    EXPECT_LE(ratio_of(ZIP_DTYPE_BF16, make_data(Data::NORMAL, ZIP_DTYPE_BF16, 4096)), 0.71);
    // What cannot gain grows by the header alone.
    for (zip_dtype_t dtype : TYPES) {
        for (size_t length : {size_t(0), size_t(1), size_t(300), n})
            EXPECT_LE(ratio_of(dtype, make_data(Data::RANDOM_BITS, dtype, length + 1)) *
                              double(length + 1),
                      double(length + 1 + format::HEADER_LENGTH));
    }
}

TEST(Codec, bytes_are_stored)
{
    const Bytes data = make_data(Data::EQUAL, ZIP_DTYPE_BF16, 1001);
    RoundTrip trip(data.size());
    EXPECT_EQ(data.size() + format::HEADER_LENGTH, trip.check(ZIP_DTYPE_BYTES, data));
}

TEST(Codec, encoder_writes_nothing_behind_its_chunk_bound)
{
    // dst larger than the bound: the rest stays as it was.
    const Bytes data = make_data(Data::NORMAL, ZIP_DTYPE_BF16, 40001);
    const size_t bound = zip_codec_bound(data.size());
    Bytes out(bound + 100, 0x5a);
    size_t size;
    ASSERT_EQ(ZIP_OK, zip_codec_encode(ZIP_DTYPE_BF16, data.data(), data.size(), out.data(),
                                       out.size(), &size));
    EXPECT_EQ(Bytes(100, 0x5a), Bytes(out.begin() + ptrdiff_t(bound), out.end()));

    Bytes back(data.size() + 128, 0x5a);
    ASSERT_EQ(ZIP_OK, zip_codec_decode(out.data(), size, back.data() + 64, data.size()));
    EXPECT_EQ(Bytes(64, 0x5a), Bytes(back.begin(), back.begin() + 64));
    EXPECT_EQ(Bytes(64, 0x5a), Bytes(back.end() - 64, back.end()));
    EXPECT_EQ(0, memcmp(back.data() + 64, data.data(), data.size()));
}

TEST(Codec, a_chunk_may_be_followed_by_anything)
{
    const Bytes data = make_data(Data::NORMAL, ZIP_DTYPE_FP32, 40001);
    Bytes out(zip_codec_bound(data.size()) + 999, 0xff), back(data.size());
    size_t size;
    ASSERT_EQ(ZIP_OK, zip_codec_encode(ZIP_DTYPE_FP32, data.data(), data.size(), out.data(),
                                       out.size(), &size));
    ASSERT_EQ(ZIP_OK, zip_codec_decode(out.data(), out.size(), back.data(), back.size()));
    EXPECT_EQ(data, back);
}

TEST(Codec, refuses_bad_arguments)
{
    Bytes src(1000), dst(zip_codec_bound(1000)), back(1000);
    size_t size = 0;
    zip_chunk_info_t info;
    zip_probe_t probe;
    const zip_dtype_t BF16 = ZIP_DTYPE_BF16;
    EXPECT_EQ(ZIP_ERR_INVALID_PARAM,
              zip_codec_encode(BF16, nullptr, 1000, dst.data(), dst.size(), &size));
    EXPECT_EQ(ZIP_ERR_INVALID_PARAM,
              zip_codec_encode(BF16, src.data(), 1000, nullptr, dst.size(), &size));
    EXPECT_EQ(ZIP_ERR_INVALID_PARAM,
              zip_codec_encode(BF16, src.data(), 1000, dst.data(), dst.size(), nullptr));
    EXPECT_EQ(ZIP_ERR_INVALID_PARAM,
              zip_codec_encode(ZIP_DTYPE_LAST, src.data(), 1000, dst.data(), dst.size(), &size));
    EXPECT_EQ(ZIP_ERR_NO_SPACE,
              zip_codec_encode(BF16, src.data(), 1000, dst.data(), dst.size() - 1, &size));
    EXPECT_EQ(ZIP_ERR_NO_SPACE,
              zip_codec_encode(BF16, src.data(), SIZE_MAX, dst.data(), dst.size(), &size));
    EXPECT_EQ(ZIP_OK, zip_codec_encode(BF16, src.data(), 1000, dst.data(), dst.size(), &size));
    EXPECT_EQ(ZIP_ERR_INVALID_PARAM, zip_codec_decode(nullptr, size, back.data(), 1000));
    EXPECT_EQ(ZIP_ERR_INVALID_PARAM, zip_codec_decode(dst.data(), size, nullptr, 1000));
    EXPECT_EQ(ZIP_ERR_CORRUPT, zip_codec_decode(dst.data(), size, back.data(), 999));
    EXPECT_EQ(ZIP_ERR_CORRUPT, zip_codec_decode(dst.data(), 0, back.data(), 1000));
    EXPECT_EQ(ZIP_ERR_INVALID_PARAM, zip_codec_inspect(nullptr, size, &info));
    EXPECT_EQ(ZIP_ERR_INVALID_PARAM, zip_codec_inspect(dst.data(), size, nullptr));
    EXPECT_EQ(ZIP_ERR_INVALID_PARAM, zip_codec_probe(nullptr, 1000, &probe));
    EXPECT_EQ(ZIP_ERR_INVALID_PARAM, zip_codec_probe(src.data(), 1000, nullptr));

    // Nothing is at nowhere.
    EXPECT_EQ(ZIP_OK, zip_codec_encode(BF16, nullptr, 0, dst.data(), dst.size(), &size));
    EXPECT_EQ(ZIP_OK, zip_codec_decode(dst.data(), size, nullptr, 0));
    EXPECT_EQ(ZIP_OK, zip_codec_probe(nullptr, 0, &probe));
    EXPECT_EQ(ZIP_DTYPE_BYTES, probe.dtype);
}

TEST(Codec, bound)
{
    EXPECT_LE(zip_codec_bound(0), size_t(ZIP_CODEC_MAX_GROWTH));
    EXPECT_EQ(size_t(1000) + ZIP_CODEC_MAX_GROWTH, zip_codec_bound(1000));
    EXPECT_EQ(0u, zip_codec_bound(SIZE_MAX));
    EXPECT_EQ(0u, zip_codec_bound(size_t(1) << 63));
    EXPECT_LT(size_t(1) << 62, zip_codec_bound(size_t(1) << 62));
}

TEST(Codec, names)
{
    EXPECT_STREQ("bytes", zip_dtype_name(ZIP_DTYPE_BYTES));
    EXPECT_STREQ("bf16", zip_dtype_name(ZIP_DTYPE_BF16));
    EXPECT_STREQ("fp32", zip_dtype_name(ZIP_DTYPE_FP32));
    EXPECT_EQ(nullptr, zip_dtype_name(ZIP_DTYPE_LAST));
    EXPECT_EQ(1u, zip_dtype_size(ZIP_DTYPE_BYTES));
    EXPECT_EQ(2u, zip_dtype_size(ZIP_DTYPE_BF16));
    EXPECT_EQ(4u, zip_dtype_size(ZIP_DTYPE_FP32));
    EXPECT_EQ(0u, zip_dtype_size(ZIP_DTYPE_LAST));
    for (int s = -5; s <= 0; ++s)
        EXPECT_STRNE("", zip_status_string(zip_status_t(s)));
}

// The layout that format.md gives for the whole of it: written out, so that a change of the format
// is seen.
TEST(CodecFormat, layout)
{
    const format::Layout l = format::layout_of(format::DTYPE_FP32, 4 * (8192 + 2048 + 40) + 3);
    EXPECT_EQ(10280u, l.values);
    EXPECT_EQ(3u, l.trailing);
    EXPECT_EQ(11u, l.blocks);
    EXPECT_EQ(6u, l.groups);
    EXPECT_EQ(2u, l.tiles);
    EXPECT_EQ(48u, l.raw);
    EXPECT_EQ(48u + 10288, l.raw2);
    EXPECT_EQ(48u + 10288 + 20560, l.level1);
    EXPECT_EQ(48u + 10288 + 20560 + 2576, l.counts); // 322 words twice
    EXPECT_EQ(48u + 10288 + 20560 + 2576 + 48, l.tile_headers);
    EXPECT_EQ(48u + 10288 + 20560 + 2576 + 48 + 16, l.symbols);
    EXPECT_EQ(48u + 10288 + 20560 + 2576 + 48 + 16 + 32, l.tail);
}

TEST(CodecFormat, code_positions)
{
    // Full block, bf16: 256 values a stripe, 8 a word; fp32: 128 a half stripe, 4 a word.
    EXPECT_EQ(0u, format::value_at(format::DTYPE_BF16, 32, 0, 0));
    EXPECT_EQ(256u, format::value_at(format::DTYPE_BF16, 32, 0, 1));
    EXPECT_EQ(1u, format::value_at(format::DTYPE_BF16, 32, 0, 4));
    EXPECT_EQ(3 * 256u + 31 * 8 + 7, format::value_at(format::DTYPE_BF16, 32, 31, 31));
    EXPECT_EQ(3u * 24 + 2 * 8 + 7, format::value_at(format::DTYPE_BF16, 3, 2, 31));
    EXPECT_EQ(256u, format::value_at(format::DTYPE_FP32, 32, 0, 1));
    EXPECT_EQ(128u, format::value_at(format::DTYPE_FP32, 32, 0, 16));
    EXPECT_EQ(128u + 4 * 5 + 2, format::value_at(format::DTYPE_FP32, 32, 5, 24));
    for (uint8_t dtype : {format::DTYPE_BF16, format::DTYPE_FP32}) {
        for (uint32_t words : {1u, 2u, 31u, 32u}) {
            std::vector<int> seen(words * 32);
            for (uint32_t w = 0; w < words; ++w)
                for (uint32_t bit = 0; bit < 32; ++bit)
                    ++seen.at(format::value_at(dtype, words, w, bit));
            EXPECT_EQ(std::vector<int>(words * 32, 1), seen);
        }
    }
}

// Bytes of a chunk as they were when the format was written down. An encoder may choose other
// symbols; then this needs new figures, and old chunks must still decode.
TEST(CodecFormat, chunk_is_what_it_was)
{
    const auto hash = [](const uint8_t *p, size_t n) {
        uint64_t h = 0xcbf29ce484222325; // FNV-1a
        for (size_t i = 0; i < n; ++i)
            h = (h ^ p[i]) * 0x100000001b3;
        return h;
    };
    const uint64_t expected[] = {7361295737646581600, 3930983551003760499};
    for (zip_dtype_t dtype : TYPES) {
        const Bytes data = make_data(Data::MIXED, dtype, 90001);
        Bytes out(zip_codec_bound(data.size()));
        size_t size;
        ASSERT_EQ(ZIP_OK,
                  zip_codec_encode(dtype, data.data(), data.size(), out.data(), out.size(), &size));
        EXPECT_EQ(expected[dtype == ZIP_DTYPE_FP32], hash(out.data(), size))
                << zip_dtype_name(dtype);
    }
}

using ProbeParam = std::tuple<zip_dtype_t, Data>;
class CodecProbe : public testing::TestWithParam<ProbeParam> {};

TEST_P(CodecProbe, tells_the_type)
{
    const auto [dtype, kind] = GetParam();
    for (size_t n : {size_t(65536), size_t(1) << 20}) {
        const Bytes data = make_data(kind, dtype, n);
        zip_probe_t probe;
        ASSERT_EQ(ZIP_OK, zip_codec_probe(data.data(), n, &probe));
        EXPECT_EQ(dtype, probe.dtype);
        EXPECT_NEAR(ratio_of(dtype, data), probe.ratio, 0.03);
        // Zeros are zeros in both halves of a word, so half of a ReLU's fp32 output is bf16 as
        // well.
        EXPECT_GE(probe.confidence, kind == Data::HALF_ZERO ? 0.2 : 0.5);
        EXPECT_LE(probe.confidence, 1);
    }
}

INSTANTIATE_TEST_SUITE_P(, CodecProbe,
                         testing::Combine(testing::ValuesIn(TYPES),
                                          testing::Values(Data::NORMAL, Data::UNIFORM,
                                                          Data::HALF_ZERO, Data::WIDE)),
                         [](const testing::TestParamInfo<ProbeParam> &p) {
                             return type_name(std::get<0>(p.param)) + name_of(std::get<1>(p.param));
                         });

TEST(Codec, probe_tells_normal_data_of_any_scale)
{
    for (int exponent = -100; exponent <= 100; exponent += 20) {
        for (zip_dtype_t dtype : TYPES) {
            SCOPED_TRACE(exponent);
            Bytes data = make_data(Data::NORMAL, dtype, 65536);
            const size_t size = zip_dtype_size(dtype);
            for (size_t i = 0; i < data.size(); i += size) {
                uint32_t x = 0;
                memcpy(reinterpret_cast<uint8_t *>(&x) + 4 - size, &data[i], size);
                float f;
                memcpy(&f, &x, 4);
                x = bits_of(std::ldexp(f, exponent));
                memcpy(&data[i], reinterpret_cast<const uint8_t *>(&x) + 4 - size, size);
            }
            zip_probe_t probe;
            ASSERT_EQ(ZIP_OK, zip_codec_probe(data.data(), data.size(), &probe));
            EXPECT_EQ(dtype, probe.dtype);
        }
    }
}

TEST(Codec, probe_leaves_noise_alone)
{
    for (size_t n : {1, 2, 3, 100, 8191, 8192, 8193, 100000}) {
        const Bytes data = make_data(Data::RANDOM_BITS, ZIP_DTYPE_BF16, n);
        GuardedMemory memory(n);
        memcpy(memory.last(n), data.data(), n);
        zip_probe_t probe;
        ASSERT_EQ(ZIP_OK, zip_codec_probe(memory.last(n), n, &probe));
        EXPECT_EQ(ZIP_DTYPE_BYTES, probe.dtype);
        EXPECT_EQ(1, probe.ratio);
    }
}

} // namespace
} // namespace zip::test
