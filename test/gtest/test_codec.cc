// SPDX-License-Identifier: BSD-3-Clause
// The codec gives back what it was given: all types, lengths, alignments and kinds of data, on
// every instruction set.
#include <gtest/gtest.h>

#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <map>
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

constexpr zip_dtype_t TYPES[] = {ZIP_DTYPE_BF16, ZIP_DTYPE_FP32, ZIP_DTYPE_FP16,
                                 ZIP_DTYPE_FP64, ZIP_DTYPE_E4M3, ZIP_DTYPE_E5M2};

zip_coding_t as(zip_dtype_t dtype, zip_shape_t shape = ZIP_SHAPE_22228, uint32_t small_tiles = 0)
{
    return {dtype, shape, small_tiles};
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
    size_t check(zip_coding_t coding, const Bytes &data, bool front = false, size_t shift = 0)
    {
        const size_t n = data.size(), bound = zip_codec_bound(n);
        uint8_t *const src = place(src_, front, n, shift & 1);
        uint8_t *const chunk = place(chunk_, front, bound, shift >> 1 & 1);
        uint8_t *const other = place(other_, front, bound, shift & 1);
        uint8_t *const back = place(back_, front, n, shift >> 1 & 1);
        if (n != 0)
            memcpy(src, data.data(), n);

        size_t size = 0, other_size = 0;
        EXPECT_EQ(ZIP_OK, zip_codec_encode(coding, src, n, chunk, bound, &size));
        EXPECT_EQ(ZIP_OK, cpu::encode(Coder::SCALAR, coding, src, n, other, bound, &other_size));
        EXPECT_LE(size, n + ZIP_CODEC_MAX_GROWTH);
        EXPECT_EQ(other_size, size);
        EXPECT_TRUE(other_size == size && memcmp(chunk, other, size) == 0)
                << "scalar and SIMD chunks differ";

        zip_chunk_info_t info;
        EXPECT_EQ(ZIP_OK, zip_codec_inspect(chunk, size, &info));
        EXPECT_EQ(n, info.original_length);
        EXPECT_EQ(size, info.encoded_length);
        if (info.coding.dtype != ZIP_DTYPE_BYTES && coding.dtype != ZIP_DTYPE_AUTO) {
            EXPECT_EQ(coding.dtype, info.coding.dtype);
            EXPECT_EQ(coding.shape, info.coding.shape);
            EXPECT_EQ(coding.small_tiles, info.coding.small_tiles);
        }

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

using KindParam = std::tuple<zip_coding_t, Data>;
class CodecKinds : public testing::TestWithParam<KindParam> {};

TEST_P(CodecKinds, round_trip)
{
    const auto [coding, kind] = GetParam();
    const size_t size = zip_dtype_size(coding.dtype);
    RoundTrip trip(9101 * size);
    size_t shift = 0;
    for (size_t values : {1, 2, 31, 64, 600, 1030, 3000, 8192, 9100}) {
        SCOPED_TRACE(values);
        const size_t n = values * size + shift % size;
        trip.check(coding, make_data(kind, coding.dtype, n), n % 3 == 0, shift);
        ++shift;
        if (HasFailure())
            return;
    }
}

INSTANTIATE_TEST_SUITE_P(, CodecKinds,
                         testing::Combine(testing::ValuesIn(all_codings()),
                                          testing::ValuesIn(ALL_DATA)),
                         [](const testing::TestParamInfo<KindParam> &p) {
                             return name_of(std::get<0>(p.param)) + "_" +
                                    name_of(std::get<1>(p.param));
                         });

class Codings : public testing::TestWithParam<zip_coding_t> {
protected:
    zip_coding_t coding() const { return GetParam(); }
    zip_dtype_t dtype() const { return GetParam().dtype; }
    size_t size() const { return zip_dtype_size(dtype()); }
};

TEST_P(Codings, short_lengths)
{
    // Every one up to a few words, then in steps that meet every remainder.
    RoundTrip trip(2200);
    const Bytes data = make_data(Data::NORMAL, dtype(), 2200);
    for (size_t n = 0; n <= 2200; n += n < 300 ? 1 : 37) {
        SCOPED_TRACE(n);
        trip.check(coding(), Bytes(data.begin(), data.begin() + ptrdiff_t(n)), n % 7 == 0, n % 4);
        if (HasFailure())
            return;
    }
}

TEST_P(Codings, lengths_around_block_group_and_tile_edges)
{
    const size_t tile = format::tile_values(format_coding(coding()));
    const size_t most = (2 * tile + 1) * size();
    RoundTrip trip(most);
    const Bytes data = make_data(Data::WIDE, dtype(), most);
    for (size_t edge : {size_t(1024), size_t(2048), tile / 2, tile - 1024, tile, 2 * tile}) {
        for (size_t n = (edge - 1) * size() + 1; n <= (edge + 1) * size(); n += size() / 2 + 1) {
            SCOPED_TRACE(n);
            trip.check(coding(), Bytes(data.begin(), data.begin() + ptrdiff_t(n)), n % 5 == 0,
                       n % 4);
            if (HasFailure())
                return;
        }
    }
}

TEST_P(Codings, tiles_of_different_kinds)
{
    // Raw and coded tiles in one chunk, each kind first, last and alone between others.
    const size_t tile = format::tile_values(format_coding(coding())), tiles = 5;
    const size_t n = tiles * tile * size() - 77 * size();
    RoundTrip trip(n);
    for (unsigned raw : {0b00001u, 0b10000u, 0b01010u, 0b11011u}) {
        SCOPED_TRACE(raw);
        Bytes data = make_data(Data::EQUAL, dtype(), n);
        const Bytes noise = make_data(Data::RANDOM_BITS, dtype(), n);
        for (size_t t = 0; t < tiles; ++t) {
            const size_t end = std::min(n, (t + 1) * tile * size());
            if (raw >> t & 1)
                std::copy(noise.begin() + ptrdiff_t(t * tile * size()),
                          noise.begin() + ptrdiff_t(end),
                          data.begin() + ptrdiff_t(t * tile * size()));
        }
        const size_t chunk = trip.check(coding(), data);
        // The former saves one bit in 8; the latter tells its columns' bases from noise.
        const bool futile = (dtype() == ZIP_DTYPE_E4M3 && coding().shape == ZIP_SHAPE_38) ||
                            (std::popcount(raw) > 1 && coding().shape == ZIP_SHAPE_COLUMNS);
        EXPECT_TRUE(chunk < n || futile) << "not coded";
    }
}

TEST_P(Codings, all_targets_give_the_same_chunk)
{
    for (Data kind : {Data::NORMAL, Data::WIDE, Data::COLLIDING, Data::STEPS, Data::MIXED}) {
        for (size_t values : {777, 20000}) {
            SCOPED_TRACE(name_of(kind));
            const Bytes data = make_data(kind, dtype(), values * size() + size() / 2, 7);
            Bytes expected(zip_codec_bound(data.size())), chunk(expected), back(data.size());
            size_t expected_size, chunk_size;
            ASSERT_EQ(ZIP_OK, cpu::encode(Coder::SCALAR, coding(), data.data(), data.size(),
                                          expected.data(), expected.size(), &expected_size));
            for (int64_t targets = hwy::SupportedTargets() & HWY_TARGETS; targets != 0;
                 targets &= targets - 1) {
                SCOPED_TRACE(hwy::TargetName(targets & -targets));
                hwy::SetSupportedTargetsForTest(targets & -targets);
                hwy::GetChosenTarget().Update(hwy::SupportedTargets());
                std::fill(chunk.begin(), chunk.end(), 0xa5);
                std::fill(back.begin(), back.end(), 0xa5);
                EXPECT_EQ(ZIP_OK, zip_codec_encode(coding(), data.data(), data.size(), chunk.data(),
                                                   chunk.size(), &chunk_size));
                EXPECT_EQ(expected_size, chunk_size);
                EXPECT_EQ(0, memcmp(expected.data(), chunk.data(), expected_size));
                EXPECT_EQ(ZIP_OK,
                          zip_codec_decode(chunk.data(), expected_size, back.data(), back.size()));
                EXPECT_EQ(data, back);
                hwy::SetSupportedTargetsForTest(0);
                hwy::GetChosenTarget().Update(hwy::SupportedTargets());
            }
            if (HasFailure())
                return;
        }
    }
}

TEST_P(Codings, a_source_that_changes_gives_a_chunk_that_decodes)
{
    // Rewritten between constants and noise: the worst for whoever counts first and writes later.
    const size_t n = 20000 * size() + size() - 1;
    const Bytes calm = make_data(Data::EQUAL, dtype(), n), wild = make_data(Data::WIDE, dtype(), n);
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
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(15);
    for (int i = 0; i < 4 || std::chrono::steady_clock::now() < end; ++i) {
        size_t encoded = 0;
        EXPECT_EQ(ZIP_OK, cpu::encode(i % 8 == 0 ? Coder::SCALAR : Coder::SIMD, coding(), s, n, c,
                                      zip_codec_bound(n), &encoded));
        EXPECT_LE(encoded, zip_codec_bound(n));
        EXPECT_EQ(ZIP_OK, zip_codec_decode(c, encoded, back.last(n), n));
        if (HasFailure())
            break;
    }
    stop = true;
    writer.join();
}

TEST_P(Codings, plan_is_what_the_worst_takes)
{
    // Noise makes all tiles raw: then the chunk is as long as the plan says, by its own arithmetic
    // in the words of format.md. (Encoders of the host would store it.)
    const auto up = [](uint64_t x) { return (x + 15) / 16 * 16; };
    const format::TypeTraits type = format::type_traits(uint8_t(dtype()));
    const format::ShapeTraits shape = format::shape_traits(uint8_t(coding().shape));
    const uint64_t group = 1024 * shape.group_blocks / (coding().small_tiles != 0 ? 2 : 1);
    const uint64_t tile = group * shape.tile_groups;
    for (uint64_t n : {uint64_t(0), uint64_t(1), uint64_t(100), uint64_t(4096), uint64_t(100000),
                       uint64_t(1) << 26, (uint64_t(1) << 33) + 12345}) {
        zip_plan_t plan;
        ASSERT_EQ(ZIP_OK, zip_codec_plan(coding(), n, &plan));
        const uint64_t values = n / type.size, words = (values + 31) / 32;
        const uint64_t tiles = (values + tile - 1) / tile, groups = (values + group - 1) / group;
        const uint32_t k = 1 + type.mantissa_bits, w1 = shape.width[0];
        uint64_t fixed = 48 + (coding().shape == ZIP_SHAPE_COLUMNS ? 1024 : 0);
        fixed += up(k == 8 ? values : 4 * k * words);
        if (type.low_bytes == 6)
            fixed += up(2 * values) + up(4 * values);
        else
            fixed += up(type.low_bytes * values);
        fixed += up(4 * w1 * words) + up(2 * shape.counts * groups) + up(8 * tiles) + 16 * tiles;
        EXPECT_EQ(fixed, plan.fixed) << n;
        uint64_t tail = 0;
        for (uint64_t first = 0; first < std::min(values, 2 * tile); first += tile) {
            // All whole tiles but the first and the last are as the first.
            const bool last = first != 0 || values <= tile;
            const uint64_t m = !last ? tile : values - (tiles - 1) * tile;
            const uint64_t all = (type.exponent_bits - w1) * ((m + 31) / 32);
            const uint64_t before = 2 * shape.counts * ((m + group - 1) / group) / 4 + 4;
            tail += 4 * (all > before ? all - before : 0) * (last ? 1 : tiles - 1);
        }
        EXPECT_EQ(std::max(fixed + tail, n + ZIP_CODEC_MAX_GROWTH), plan.bound) << n;
        EXPECT_LE(plan.bound, n + n / 500 + 2048) << n;
    }
}

INSTANTIATE_TEST_SUITE_P(, Codings, testing::ValuesIn(all_codings()),
                         [](const testing::TestParamInfo<zip_coding_t> &p) {
                             return name_of(p.param);
                         });

class CodecTypes : public testing::TestWithParam<zip_dtype_t> {};

TEST_P(CodecTypes, lengths_of_one_ragged_block)
{
    // Every number of words and values in a last block behind a full one.
    const size_t size = zip_dtype_size(GetParam()), most = 2 * format::BLOCK_VALUES * size;
    RoundTrip trip(most);
    const Bytes data = make_data(Data::WIDE, GetParam(), most);
    for (size_t n = most / 2, i = 0; n <= most; n += size, ++i) {
        SCOPED_TRACE(n);
        trip.check(as(GetParam(), zip_shape_t(1 + i % 4)),
                   Bytes(data.begin(), data.begin() + ptrdiff_t(n)));
        if (HasFailure())
            return;
    }
}

TEST_P(CodecTypes, every_head)
{
    // Each of them amid values with few exponents, so that the tiles are coded.
    const size_t size = zip_dtype_size(GetParam()), heads = size == 1 ? 256 : 65536;
    Bytes data = make_data(Data::NORMAL, GetParam(), heads * 16 * size);
    for (size_t head = 0; head < heads; ++head) {
        uint8_t *const value = &data[16 * head * size];
        memcpy(value + (size == 1 ? 0 : size - 2), &head, size == 1 ? 1 : 2);
    }
    RoundTrip trip(data.size());
    // fp64 has exponents without a symbol in all tiles but the first
    EXPECT_TRUE(trip.check(as(GetParam()), data) < data.size() * 95 / 100 ||
                GetParam() == ZIP_DTYPE_FP64);
}

INSTANTIATE_TEST_SUITE_P(, CodecTypes, testing::ValuesIn(TYPES),
                         [](const testing::TestParamInfo<zip_dtype_t> &p) {
                             return zip_dtype_name(p.param);
                         });

TEST(Codec, fp64_with_exponents_that_have_no_symbol_comes_back)
{
    // Far from the sample's largest: below the base, above base + 254, and a base at its limit.
    const size_t n = 20000;
    RoundTrip trip(8 * n);
    Bytes data = make_data(Data::NORMAL, ZIP_DTYPE_FP64, 8 * n);
    for (double outlier : {1e-300, 5e-324, 1e300, 1e-70, 0.0, double(INFINITY)}) {
        SCOPED_TRACE(outlier);
        for (size_t at : {size_t(7), size_t(5000), size_t(12345), n - 1}) {
            Bytes with = data;
            memcpy(&with[8 * at], &outlier, 8);
            for (zip_shape_t shape : {ZIP_SHAPE_22228, ZIP_SHAPE_DENSE})
                trip.check(as(ZIP_DTYPE_FP64, shape), with);
        }
    }
    for (double scale : {1e-320, 1e-307, 1e-250, 1e250, 1e306}) {
        SCOPED_TRACE(scale);
        Bytes scaled = data;
        for (size_t i = 0; i < n; ++i) {
            double x;
            memcpy(&x, &scaled[8 * i], 8);
            x *= scale;
            memcpy(&scaled[8 * i], &x, 8);
        }
        EXPECT_LT(trip.check(as(ZIP_DTYPE_FP64), scaled), 8 * n * 9 / 10);
    }
}

double ratio_of(zip_coding_t coding, const Bytes &data)
{
    Bytes chunk(zip_codec_bound(data.size()));
    size_t size = 0;
    EXPECT_EQ(ZIP_OK, zip_codec_encode(coding, data.data(), data.size(), chunk.data(), chunk.size(),
                                       &size));
    return double(size) / double(data.size());
}

TEST(Codec, ratios)
{
    const size_t n = 4 << 20;
    const auto normal = [&](zip_dtype_t dtype) { return make_data(Data::NORMAL, dtype, n); };
    EXPECT_LE(ratio_of(as(ZIP_DTYPE_BF16), normal(ZIP_DTYPE_BF16)), 0.671);
    EXPECT_LE(ratio_of(as(ZIP_DTYPE_BF16, ZIP_SHAPE_DENSE), normal(ZIP_DTYPE_BF16)), 0.664);
    const Bytes columns = make_data(Data::COLUMNS, ZIP_DTYPE_BF16, n);
    EXPECT_GE(ratio_of(as(ZIP_DTYPE_BF16), columns), 0.700);
    EXPECT_LE(ratio_of(as(ZIP_DTYPE_BF16, ZIP_SHAPE_COLUMNS), columns), 0.680);
    EXPECT_LE(ratio_of(as(ZIP_DTYPE_FP32), normal(ZIP_DTYPE_FP32)), 0.840);
    EXPECT_LE(ratio_of(as(ZIP_DTYPE_FP16), normal(ZIP_DTYPE_FP16)), 0.860);
    EXPECT_LE(ratio_of(as(ZIP_DTYPE_FP64), normal(ZIP_DTYPE_FP64)), 0.875);
    EXPECT_LE(ratio_of(as(ZIP_DTYPE_E4M3), normal(ZIP_DTYPE_E4M3)), 0.850);
    EXPECT_LE(ratio_of(as(ZIP_DTYPE_E5M2), normal(ZIP_DTYPE_E5M2)), 0.720);
    EXPECT_LE(ratio_of({ZIP_DTYPE_AUTO, ZIP_SHAPE_DEFAULT, 0},
                       make_data(Data::UNIFORM, ZIP_DTYPE_BF16, n)),
              0.638);
    EXPECT_LE(ratio_of({ZIP_DTYPE_AUTO, ZIP_SHAPE_DEFAULT, 0}, normal(ZIP_DTYPE_BF16)), 0.671);
    EXPECT_LE(ratio_of(as(ZIP_DTYPE_BF16), make_data(Data::EQUAL, ZIP_DTYPE_BF16, n)), 0.630);
    // Small tiles cost little.
    EXPECT_LE(ratio_of(as(ZIP_DTYPE_BF16, ZIP_SHAPE_22228, 1), normal(ZIP_DTYPE_BF16)), 0.675);
    // Short messages gain too: nothing is padded to whole tiles.
    EXPECT_LE(ratio_of(as(ZIP_DTYPE_BF16), make_data(Data::NORMAL, ZIP_DTYPE_BF16, 1000)), 0.80);
    EXPECT_LE(ratio_of(as(ZIP_DTYPE_BF16), make_data(Data::NORMAL, ZIP_DTYPE_BF16, 4096)), 0.71);
    // What cannot gain grows by the header alone.
    for (zip_coding_t coding : all_codings()) {
        for (size_t length : {size_t(1), size_t(301), size_t(100000)}) {
            const Bytes data = make_data(Data::RANDOM_BITS, coding.dtype, length);
            EXPECT_LE(ratio_of(coding, data) * double(length),
                      double(length + format::HEADER_LENGTH));
        }
    }
}

TEST(Codec, bytes_are_stored)
{
    const Bytes data = make_data(Data::EQUAL, ZIP_DTYPE_BF16, 1001);
    RoundTrip trip(data.size());
    EXPECT_EQ(data.size() + format::HEADER_LENGTH, trip.check(as(ZIP_DTYPE_BYTES), data));
}

TEST(Codec, encoder_writes_nothing_behind_its_chunk_bound)
{
    // dst larger than the bound: the rest stays as it was.
    const Bytes data = make_data(Data::NORMAL, ZIP_DTYPE_BF16, 40001);
    const size_t bound = zip_codec_bound(data.size());
    Bytes out(bound + 100, 0x5a);
    size_t size;
    ASSERT_EQ(ZIP_OK, zip_codec_encode(as(ZIP_DTYPE_BF16), data.data(), data.size(), out.data(),
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
    ASSERT_EQ(ZIP_OK, zip_codec_encode(as(ZIP_DTYPE_FP32), data.data(), data.size(), out.data(),
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
    const zip_coding_t BF16 = as(ZIP_DTYPE_BF16);
    EXPECT_EQ(ZIP_ERR_INVALID_PARAM,
              zip_codec_encode(BF16, nullptr, 1000, dst.data(), dst.size(), &size));
    EXPECT_EQ(ZIP_ERR_INVALID_PARAM,
              zip_codec_encode(BF16, src.data(), 1000, nullptr, dst.size(), &size));
    EXPECT_EQ(ZIP_ERR_INVALID_PARAM,
              zip_codec_encode(BF16, src.data(), 1000, dst.data(), dst.size(), nullptr));
    EXPECT_EQ(ZIP_ERR_INVALID_PARAM, zip_codec_encode(as(ZIP_DTYPE_LAST), src.data(), 1000,
                                                      dst.data(), dst.size(), &size));
    EXPECT_EQ(ZIP_ERR_INVALID_PARAM, zip_codec_encode(as(zip_dtype_t(254)), src.data(), 1000,
                                                      dst.data(), dst.size(), &size));
    for (zip_coding_t wrong :
         {as(ZIP_DTYPE_BF16, ZIP_SHAPE_LAST), as(ZIP_DTYPE_AUTO, zip_shape_t(7)),
          as(ZIP_DTYPE_BF16, ZIP_SHAPE_DENSE, 1), as(ZIP_DTYPE_FP64, ZIP_SHAPE_COLUMNS)}) {
        zip_plan_t plan;
        EXPECT_EQ(ZIP_ERR_INVALID_PARAM,
                  zip_codec_encode(wrong, src.data(), 1000, dst.data(), dst.size(), &size));
        EXPECT_EQ(ZIP_ERR_INVALID_PARAM, zip_codec_plan(wrong, 1000, &plan));
    }
    zip_plan_t plan;
    EXPECT_EQ(ZIP_ERR_INVALID_PARAM, zip_codec_plan(BF16, 1000, nullptr));
    EXPECT_EQ(ZIP_ERR_INVALID_PARAM, zip_codec_plan(BF16, (uint64_t(1) << 50) + 1, &plan));
    EXPECT_EQ(ZIP_OK, zip_codec_plan(BF16, uint64_t(1) << 50, &plan));
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
    const char *const types[] = {"bytes", "bf16", "fp32", "fp16", "fp64", "e4m3", "e5m2"};
    const size_t sizes[] = {1, 2, 4, 2, 8, 1, 1};
    for (int i = 0; i < ZIP_DTYPE_LAST; ++i) {
        EXPECT_STREQ(types[i], zip_dtype_name(zip_dtype_t(i)));
        EXPECT_EQ(sizes[i], zip_dtype_size(zip_dtype_t(i)));
    }
    EXPECT_STREQ("auto", zip_dtype_name(ZIP_DTYPE_AUTO));
    EXPECT_EQ(1u, zip_dtype_size(ZIP_DTYPE_AUTO));
    for (int none : {int(ZIP_DTYPE_LAST), 100, 254}) {
        EXPECT_EQ(nullptr, zip_dtype_name(zip_dtype_t(none)));
        EXPECT_EQ(0u, zip_dtype_size(zip_dtype_t(none)));
    }
    const char *const shapes[] = {"default", "22228", "11238", "38", "dense", "columns"};
    for (int i = 0; i < ZIP_SHAPE_LAST; ++i)
        EXPECT_STREQ(shapes[i], zip_shape_name(zip_shape_t(i)));
    EXPECT_EQ(nullptr, zip_shape_name(ZIP_SHAPE_LAST));
    for (int s = ZIP_ERR_DEVICE; s <= 0; ++s)
        EXPECT_STRNE("unknown status", zip_status_string(zip_status_t(s)));
}

TEST(Codec, plan_for_stored_and_unknown_types)
{
    zip_plan_t plan, best, of_type;
    ASSERT_EQ(ZIP_OK, zip_codec_plan(as(ZIP_DTYPE_BYTES), 1000, &plan));
    EXPECT_EQ(1048u, plan.fixed);
    EXPECT_EQ(1064u, plan.bound);
    ASSERT_EQ(ZIP_OK, zip_codec_plan({ZIP_DTYPE_AUTO, ZIP_SHAPE_DEFAULT, 0}, 1000003, &plan));
    best = {};
    for (zip_dtype_t dtype : TYPES) {
        for (zip_shape_t shape : {ZIP_SHAPE_22228, ZIP_SHAPE_11238}) {
            ASSERT_EQ(ZIP_OK, zip_codec_plan(as(dtype, shape), 1000003, &of_type));
            best = {std::max(best.bound, of_type.bound), std::max(best.fixed, of_type.fixed)};
        }
    }
    EXPECT_EQ(best.bound, plan.bound);
    EXPECT_EQ(best.fixed, plan.fixed);
}

TEST(Codec, auto_stores_what_does_not_gain)
{
    RoundTrip trip(100001);
    const Bytes noise = make_data(Data::RANDOM_BITS, ZIP_DTYPE_FP64, 100001);
    EXPECT_EQ(noise.size() + format::HEADER_LENGTH,
              trip.check({ZIP_DTYPE_AUTO, ZIP_SHAPE_DEFAULT, 0}, noise));
}

// The layout that format.md gives for the whole of it: written out, so that a change of the format
// is seen.
TEST(CodecFormat, layout)
{
    const format::Layout l = format::layout_of({format::DTYPE_FP32, format::SHAPE_22228, false},
                                               4 * (8192 + 2048 + 40) + 3);
    EXPECT_EQ(10280u, l.values);
    EXPECT_EQ(3u, l.trailing);
    EXPECT_EQ(6u, l.groups);
    EXPECT_EQ(2u, l.tiles);
    EXPECT_EQ(48u, l.mantissa);
    EXPECT_EQ(48u + 10288, l.low);
    EXPECT_EQ(48u + 10288 + 20560, l.low2);
    EXPECT_EQ(48u + 10288 + 20560, l.level1);
    EXPECT_EQ(48u + 10288 + 20560 + 2576, l.counts); // 322 words twice
    EXPECT_EQ(48u + 10288 + 20560 + 2576 + 48, l.tile_headers);
    EXPECT_EQ(48u + 10288 + 20560 + 2576 + 48 + 16, l.symbols);
    EXPECT_EQ(48u + 10288 + 20560 + 2576 + 48 + 16 + 32, l.tail);
}

TEST(CodecFormat, code_positions)
{
    // Full block, bf16: 256 values a stripe, 8 a word; fp32: 128 a half stripe, 4 a word; bytes:
    // two stripes of 512, 16 a word.
    EXPECT_EQ(0u, format::value_at(format::DTYPE_BF16, 32, 0, 0));
    EXPECT_EQ(256u, format::value_at(format::DTYPE_BF16, 32, 0, 1));
    EXPECT_EQ(1u, format::value_at(format::DTYPE_BF16, 32, 0, 4));
    EXPECT_EQ(3 * 256u + 31 * 8 + 7, format::value_at(format::DTYPE_BF16, 32, 31, 31));
    EXPECT_EQ(3u * 24 + 2 * 8 + 7, format::value_at(format::DTYPE_BF16, 3, 2, 31));
    EXPECT_EQ(256u, format::value_at(format::DTYPE_FP32, 32, 0, 1));
    EXPECT_EQ(128u, format::value_at(format::DTYPE_FP32, 32, 0, 16));
    EXPECT_EQ(128u + 4 * 5 + 2, format::value_at(format::DTYPE_FP32, 32, 5, 24));
    EXPECT_EQ(64u + 2 * 5 + 1, format::value_at(format::DTYPE_FP64, 32, 5, 12));
    EXPECT_EQ(512u + 16 * 5 + 8 + 3, format::value_at(format::DTYPE_E4M3, 32, 5, 15));
    for (zip_dtype_t dtype : TYPES) {
        for (uint32_t words : {1u, 2u, 31u, 32u}) {
            std::vector<int> seen(words * 32);
            for (uint32_t w = 0; w < words; ++w)
                for (uint32_t bit = 0; bit < 32; ++bit)
                    ++seen.at(format::value_at(uint8_t(dtype), words, w, bit));
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
    std::map<std::string, uint64_t> hashes;
    for (zip_coding_t coding : all_codings()) {
        const Bytes data = make_data(Data::MIXED, coding.dtype, 90001);
        Bytes out(zip_codec_bound(data.size()));
        size_t size;
        ASSERT_EQ(ZIP_OK, zip_codec_encode(coding, data.data(), data.size(), out.data(), out.size(),
                                           &size));
        hashes[name_of(coding)] = hash(out.data(), size);
    }
    const std::map<std::string, uint64_t> expected = {
            {"bf16_22228", 0xe52e751170776193},       {"bf16_22228_small", 0x1b6d1ef5867b13d0},
            {"bf16_11238", 0x5d7b1b94f781e3e9},       {"bf16_11238_small", 0xfe4481edb217afca},
            {"bf16_38", 0x55cdf06d96da3f12},          {"bf16_38_small", 0x0f9a1f8874ca83e2},
            {"bf16_dense", 0xfd7c433f3ed5d06c},       {"fp32_22228", 0x21026a7d6bcb287d},
            {"fp32_22228_small", 0xafcb55321120f490}, {"fp32_11238", 0x2bed4927b119e6c3},
            {"fp32_11238_small", 0x22527b8e411a807c}, {"fp32_38", 0x5b0d52004a5fb912},
            {"fp32_38_small", 0x3fedd36cdc0f5a37},    {"fp32_dense", 0x304fe0d91f9ad841},
            {"fp16_22228", 0xb4a284ce16e43bb6},       {"fp16_22228_small", 0x4792b136fc2434a3},
            {"fp16_11238", 0x953027782dbc9d74},       {"fp16_11238_small", 0xd3e6df1104eb826d},
            {"fp16_38", 0x4830cfa5e1f74479},          {"fp16_38_small", 0x5e141b429ed48a30},
            {"fp16_dense", 0xa96af22fadcc95bb},       {"fp64_22228", 0x4d86dead9b13e6a9},
            {"fp64_22228_small", 0xe74a66f57d9fae85}, {"fp64_11238", 0xcadeaa536287a9fa},
            {"fp64_11238_small", 0x0f89970a48b32f6e}, {"fp64_38", 0xa0713c463c3acac5},
            {"fp64_38_small", 0xd3cf73a2c664b79f},    {"fp64_dense", 0xa0e75f3c5fb87077},
            {"e4m3_22228", 0x138eb648bc74e4f1},       {"e4m3_22228_small", 0xa2b8dd4ae6e2fc7a},
            {"e4m3_11238", 0x2f14ad65e5761743},       {"e4m3_11238_small", 0x43922550ec6f5028},
            {"e4m3_38", 0x160f1cd7bdc36756},          {"e4m3_38_small", 0x24b813a247aa960a},
            {"e4m3_dense", 0x9a44917beec811fb},       {"e5m2_22228", 0xff3486b1374390af},
            {"e5m2_22228_small", 0xabc6e12a2bdb0fb6}, {"e5m2_11238", 0x1181b289d0c07d61},
            {"e5m2_11238_small", 0xf96fcfdc47ed987e}, {"e5m2_38", 0x723bea8755d19deb},
            {"e5m2_38_small", 0xe7940629ee1fb5c4},    {"e5m2_dense", 0x2a3c4653caa31a51},
            {"bf16_columns", 0xc89a19e3cb00f650},     {"bf16_columns_small", 0xc14089d61a5e8bd6},
            {"fp32_columns", 0xf15f8c3b8a76d14b},     {"fp32_columns_small", 0x440410dda70a4442},
            {"fp16_columns", 0xc34fc3ec4f64fbbd},     {"fp16_columns_small", 0x85de0a703c9a24a0},
            {"e4m3_columns", 0x37a530676fa4bf8e},     {"e4m3_columns_small", 0x2e7e796194b85445},
            {"e5m2_columns", 0x5d15876e406bc279},     {"e5m2_columns_small", 0xf9769c7c8524ba64},
    };
    EXPECT_EQ(expected, hashes);
}

using ProbeParam = std::tuple<zip_dtype_t, Data>;
class CodecProbe : public testing::TestWithParam<ProbeParam> {};

TEST_P(CodecProbe, finds_the_best_type_and_shape)
{
    const auto [dtype, kind] = GetParam();
    for (size_t n : {size_t(65536), size_t(1) << 19}) {
        SCOPED_TRACE(n);
        const Bytes data = make_data(kind, dtype, n);
        zip_probe_t probe;
        ASSERT_EQ(ZIP_OK, zip_codec_probe(data.data(), n, &probe));
        EXPECT_GE(probe.confidence, 0);
        EXPECT_LE(probe.confidence, 1);
        double best = 1;
        for (zip_dtype_t other : TYPES) {
            for (zip_shape_t shape : {ZIP_SHAPE_22228, ZIP_SHAPE_11238})
                best = std::min(best, ratio_of(as(other, shape), data));
        }
        const double found = ratio_of(as(probe.dtype, probe.shape), data);
        EXPECT_NEAR(found, probe.ratio, 0.03);
        EXPECT_LE(found, best + 0.025) << zip_dtype_name(probe.dtype);
        // Where nothing else comes near.
        if (kind == Data::NORMAL || kind == Data::UNIFORM) {
            EXPECT_STREQ(zip_dtype_name(dtype), zip_dtype_name(probe.dtype));
            EXPECT_GE(probe.confidence, 0.1);
        }
    }
}

INSTANTIATE_TEST_SUITE_P(, CodecProbe,
                         testing::Combine(testing::ValuesIn(TYPES),
                                          testing::Values(Data::NORMAL, Data::UNIFORM,
                                                          Data::HALF_ZERO, Data::WIDE, Data::EQUAL,
                                                          Data::RANDOM_BITS)),
                         [](const testing::TestParamInfo<ProbeParam> &p) {
                             return std::string(zip_dtype_name(std::get<0>(p.param))) + "_" +
                                    name_of(std::get<1>(p.param));
                         });

TEST(Codec, probe_tells_normal_data_of_any_scale)
{
    for (int exponent = -100; exponent <= 100; exponent += 20) {
        for (zip_dtype_t dtype : {ZIP_DTYPE_BF16, ZIP_DTYPE_FP32, ZIP_DTYPE_FP64}) {
            SCOPED_TRACE(exponent);
            std::mt19937 random(1);
            const size_t size = zip_dtype_size(dtype);
            Bytes data(65536);
            for (size_t i = 0; i < data.size(); i += size) {
                float f;
                const uint32_t x = value_bits(Data::NORMAL, i, random);
                memcpy(&f, &x, 4);
                const uint64_t value =
                        convert(dtype, bits_of(std::ldexp(f, exponent)), uint32_t(random()));
                memcpy(&data[i], &value, size);
            }
            zip_probe_t probe;
            ASSERT_EQ(ZIP_OK, zip_codec_probe(data.data(), data.size(), &probe));
            EXPECT_EQ(dtype, probe.dtype);
        }
    }
}

TEST(Codec, probe_leaves_noise_alone)
{
    for (size_t n : {1, 2, 3, 100, 1000, 8191, 8192, 8193, 100000}) {
        SCOPED_TRACE(n);
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
