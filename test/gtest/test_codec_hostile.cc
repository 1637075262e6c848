// SPDX-License-Identifier: BSD-3-Clause
// Chunks that lie: whatever they hold, a decoder returns, and touches nothing outside its buffers.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
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

// A valid chunk, and memory to decode broken copies of it in.
class Victim {
public:
    Victim(zip_dtype_t dtype, Data kind, size_t original_length)
        : length(original_length), data(make_data(kind, dtype, length)),
          layout(format::layout_of(uint8_t(dtype), length)),
          src_(zip_codec_bound(length)), back_{GuardedMemory(length), GuardedMemory(length)}
    {
        chunk.resize(zip_codec_bound(length));
        size_t size = 0;
        EXPECT_EQ(ZIP_OK,
                  zip_codec_encode(dtype, data.data(), length, chunk.data(), chunk.size(), &size));
        chunk.resize(size);
        zip_chunk_info_t info;
        EXPECT_EQ(ZIP_OK, zip_codec_inspect(chunk.data(), size, &info));
        coded = info.dtype == dtype;
    }

    // Decodes a copy of `broken` with both coders, flush against inaccessible pages; they must
    // agree.
    zip_status_t decode(const Bytes &broken, bool front = false)
    {
        uint8_t *const src = src_.at(front, broken.size());
        std::copy(broken.begin(), broken.end(), src);
        uint8_t *back[2];
        zip_status_t status[2];
        for (int i = 0; i < 2; ++i) {
            back[i] = back_[i].at(front, length);
            status[i] = cpu::decode(i == 0 ? Coder::SIMD : Coder::SCALAR, src, broken.size(),
                                    back[i], length);
        }
        EXPECT_EQ(status[0], status[1]) << "SIMD and scalar decoders disagree";
        if (status[0] == ZIP_OK && status[1] == ZIP_OK) {
            EXPECT_EQ(0, memcmp(back[0], back[1], length)) << "SIMD and scalar decoders disagree";
        }
        return status[0];
    }

    size_t length;
    Bytes data, chunk;
    format::Layout layout;
    bool coded;

private:
    GuardedMemory src_, back_[2];
};

using Param = std::tuple<zip_dtype_t, Data>;
class CodecHostile : public testing::TestWithParam<Param> {
protected:
    zip_dtype_t dtype() const { return std::get<0>(GetParam()); }
    Data kind() const { return std::get<1>(GetParam()); }
    // Two whole tiles and a ragged one
    size_t length() const { return (2 * 8192 + 3333) * zip_dtype_size(dtype()) + 1; }
};

TEST_P(CodecHostile, any_bit_of_the_header)
{
    Victim victim(dtype(), kind(), 3001 * zip_dtype_size(dtype()) + 1);
    ASSERT_TRUE(victim.coded);
    for (size_t bit = 0; bit < 8 * format::HEADER_LENGTH; ++bit) {
        SCOPED_TRACE(bit);
        Bytes broken = victim.chunk;
        broken[bit / 8] ^= uint8_t(1 << bit % 8);
        const zip_status_t status = victim.decode(broken);
        // All but the optional flags (6), the checksum (24), the reference (32) and the trailing
        // bytes (40).
        const size_t byte = bit / 8;
        if (byte < 24 && byte != 6)
            EXPECT_NE(ZIP_OK, status);
        else
            EXPECT_EQ(ZIP_OK, status);
    }
}

TEST_P(CodecHostile, any_bit_of_counts_tile_headers_and_symbols)
{
    Victim victim(dtype(), kind(), length());
    ASSERT_TRUE(victim.coded);
    for (size_t at = victim.layout.counts; at < victim.layout.tail; ++at) {
        for (int bit = 0; bit < 8; ++bit) {
            Bytes broken = victim.chunk;
            broken[at] ^= uint8_t(1 << bit);
            victim.decode(broken, bit & 1);
        }
        if (HasFailure())
            return;
    }
}

TEST_P(CodecHostile, wrong_counts_are_refused)
{
    Victim victim(dtype(), kind(), length());
    for (uint64_t t = 0; t < victim.layout.tiles; ++t) {
        uint64_t tile;
        memcpy(&tile, &victim.chunk[victim.layout.tile_headers + 8 * t], 8);
        if (format::tile_mode(tile) != format::TILE_CODED)
            continue;
        for (size_t i = 0; i < sizeof(format::GroupCounts); ++i) {
            for (int bit = 0; bit < 8; ++bit) {
                Bytes broken = victim.chunk;
                broken[victim.layout.counts + 32 * t + i] ^= uint8_t(1 << bit);
                EXPECT_EQ(ZIP_ERR_CORRUPT, victim.decode(broken));
            }
        }
    }
}

TEST_P(CodecHostile, codes_moved_between_groups_are_refused)
{
    // Sums stay right, so only the comparison group by group can tell.
    Victim victim(dtype(), kind(), length());
    for (uint64_t t = 0; t < victim.layout.tiles; ++t) {
        uint64_t tile;
        memcpy(&tile, &victim.chunk[victim.layout.tile_headers + 8 * t], 8);
        if (format::tile_mode(tile) != format::TILE_CODED)
            continue;
        for (uint32_t level = 0; level < format::LEVELS; ++level) {
            Bytes broken = victim.chunk;
            format::GroupCounts counts[2];
            memcpy(counts, &broken[victim.layout.counts + 32 * t], sizeof(counts));
            if (counts[0].codes[level] == 0)
                continue;
            --counts[0].codes[level];
            ++counts[1].codes[level];
            memcpy(&broken[victim.layout.counts + 32 * t], counts, sizeof(counts));
            EXPECT_EQ(ZIP_ERR_CORRUPT, victim.decode(broken)) << level;
        }
    }
}

TEST_P(CodecHostile, random_bytes_anywhere)
{
    Victim victim(dtype(), kind(), length());
    std::mt19937 random(11);
    for (int i = 0; i < 600; ++i) {
        Bytes broken = victim.chunk;
        const uint32_t n = 1 + random() % 20;
        for (uint32_t k = 0; k < n; ++k) {
            // Half of them where they matter most
            const size_t from = random() % 2 == 0 ? victim.layout.level1 : 0;
            broken[from + random() % (broken.size() - from)] = uint8_t(random());
        }
        victim.decode(broken, i & 1);
        if (HasFailure())
            return;
    }
}

TEST_P(CodecHostile, all_escapes_in_level_1)
{
    // As many escapes as there can be, and tails of random bits: positions run as far as they can.
    Victim victim(dtype(), kind(), length());
    std::mt19937 random(12);
    for (int i = 0; i < 40; ++i) {
        Bytes broken = victim.chunk;
        memset(&broken[victim.layout.level1], 0xff, victim.layout.counts - victim.layout.level1);
        for (size_t at = victim.layout.tail; at < broken.size(); ++at)
            broken[at] = i == 0 ? 0xff : uint8_t(random());
        victim.decode(broken, i & 1);
    }
}

TEST_P(CodecHostile, consistent_counts_with_any_codes)
{
    // Counts and tile headers valid by themselves and the largest that are let through, with codes
    // that do not match.
    Victim victim(dtype(), kind(), length());
    std::mt19937 random(13);
    for (int i = 0; i < 200; ++i) {
        Bytes broken = victim.chunk;
        for (size_t at = victim.layout.level1; at < broken.size(); ++at)
            broken[at] = i % 4 == 0 ? 0xff : uint8_t(random() | (i % 4 == 1 ? random() : 0));
        broken.resize(std::max<size_t>(broken.size(), victim.layout.tail + 6144));
        for (uint64_t t = 0; t < victim.layout.tiles; ++t) {
            const uint32_t values =
                    uint32_t(std::min<uint64_t>(8192, victim.layout.values - 8192 * t));
            uint32_t sums[format::LEVELS] = {};
            for (uint64_t g = 4 * t; g < std::min(4 * t + 4, victim.layout.groups); ++g) {
                format::GroupCounts counts;
                const uint32_t most[] = {values / 4, 900, 300, 400};
                for (uint32_t s = 0, limit = 2048; s < format::LEVELS; ++s) {
                    limit = std::min(limit, most[s]);
                    counts.codes[s] = uint16_t(random() % (limit + 1));
                    limit = counts.codes[s];
                    sums[s] += limit;
                }
                memcpy(&broken[victim.layout.counts + 8 * g], &counts, 8);
            }
            const uint64_t tile =
                    format::tile_header(0, format::coded_tile_words(sums), format::TILE_CODED);
            memcpy(&broken[victim.layout.tile_headers + 8 * t], &tile, 8);
        }
        const uint64_t tail = (broken.size() - victim.layout.tail) / 4 * 4;
        broken.resize(victim.layout.tail + tail);
        memcpy(&broken[16], &tail, 8);
        if (broken.size() <= zip_codec_bound(victim.length))
            victim.decode(broken, i & 1);
        if (HasFailure())
            return;
    }
}

TEST_P(CodecHostile, every_truncation)
{
    Victim victim(dtype(), kind(), 700 * zip_dtype_size(dtype()));
    ASSERT_TRUE(victim.coded);
    for (size_t n = 0; n < victim.chunk.size(); ++n) {
        const Bytes cut(victim.chunk.begin(), victim.chunk.begin() + ptrdiff_t(n));
        EXPECT_EQ(ZIP_ERR_CORRUPT, victim.decode(cut)) << n;
    }
}

TEST_P(CodecHostile, a_chunk_that_changes_while_it_is_read)
{
    Victim victim(dtype(), kind(), length());
    GuardedMemory src(victim.chunk.size()), back(victim.length);
    uint8_t *const s = src.last(victim.chunk.size());
    memcpy(s, victim.chunk.data(), victim.chunk.size());
    std::atomic<bool> stop{false};
    std::thread writer([&] {
        std::mt19937 random(14);
        auto *const bytes = reinterpret_cast<volatile uint8_t *>(s);
        while (!stop.load(std::memory_order_relaxed)) {
            const size_t n = victim.chunk.size(),
                         from = random() % 2 == 0 ? victim.layout.level1 : 0;
            const size_t at = from + random() % (n - from);
            bytes[at] = uint8_t(random() % 2 == 0 ? random() : 0xff);
            for (int spin = 0; spin < 100; ++spin)
                std::atomic_signal_fence(std::memory_order_seq_cst);
            bytes[at] = victim.chunk[at];
        }
    });
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(150);
    for (int i = 0; std::chrono::steady_clock::now() < end; ++i)
        cpu::decode(i % 8 == 0 ? Coder::SCALAR : Coder::SIMD, s, victim.chunk.size(),
                    back.last(victim.length), victim.length);
    stop = true;
    writer.join();
}

INSTANTIATE_TEST_SUITE_P(, CodecHostile,
                         testing::Combine(testing::Values(ZIP_DTYPE_BF16, ZIP_DTYPE_FP32),
                                          testing::Values(Data::NORMAL, Data::WIDE, Data::MIXED)),
                         [](const testing::TestParamInfo<Param> &p) {
                             return std::string(std::get<0>(p.param) == ZIP_DTYPE_FP32 ? "Fp32"
                                                                                       : "Bf16") +
                                    name_of(std::get<1>(p.param));
                         });

TEST(CodecHeader, refuses_what_it_does_not_know)
{
    Victim victim(ZIP_DTYPE_BF16, Data::NORMAL, 4096);
    format::ChunkHeader good;
    memcpy(&good, victim.chunk.data(), sizeof(good));
    const auto try_header = [&](const format::ChunkHeader &header) {
        Bytes broken = victim.chunk;
        memcpy(broken.data(), &header, sizeof(header));
        zip_chunk_info_t info;
        const zip_status_t status = victim.decode(broken);
        EXPECT_EQ(status, zip_codec_inspect(broken.data(), broken.size(), &info));
        return status;
    };
    EXPECT_EQ(ZIP_OK, try_header(good));
    format::ChunkHeader h = good;
    h.magic ^= 1;
    EXPECT_EQ(ZIP_ERR_CORRUPT, try_header(h));
    h = good;
    h.version = 2;
    EXPECT_EQ(ZIP_ERR_UNSUPPORTED, try_header(h));
    h = good;
    h.header_units = 4;
    EXPECT_EQ(ZIP_ERR_UNSUPPORTED, try_header(h));
    h = good;
    h.flags = format::FLAG_REFERENCE;
    EXPECT_EQ(ZIP_ERR_UNSUPPORTED, try_header(h));
    h = good;
    h.flags = format::FLAGS_OPTIONAL;
    EXPECT_EQ(ZIP_OK, try_header(h));
    h = good;
    h.dtype = format::DTYPE_FP64;
    EXPECT_EQ(ZIP_ERR_UNSUPPORTED, try_header(h));
    h = good;
    h.shape = format::SHAPE_12238;
    EXPECT_EQ(ZIP_ERR_UNSUPPORTED, try_header(h));
    h = good;
    h.dtype = format::DTYPE_BYTES; // stored, but with a shape
    EXPECT_EQ(ZIP_ERR_CORRUPT, try_header(h));
    h = good;
    h.tail_length += 4; // more than there is
    EXPECT_EQ(ZIP_ERR_CORRUPT, try_header(h));
    victim.chunk.resize(victim.chunk.size() + 4);
    EXPECT_EQ(ZIP_OK, try_header(h));
    h.tail_length -= 2; // no multiple of 4
    EXPECT_EQ(ZIP_ERR_CORRUPT, try_header(h));
    for (uint64_t huge :
         {uint64_t(1) << 63, ~uint64_t(0), ~uint64_t(0) - 47, (uint64_t(1) << 63) - 1}) {
        h = good;
        h.original_length = huge;
        EXPECT_EQ(ZIP_ERR_CORRUPT, try_header(h));
        h.dtype = format::DTYPE_BYTES;
        h.shape = format::SHAPE_STORED;
        h.tail_length = 0;
        EXPECT_EQ(ZIP_ERR_CORRUPT, try_header(h));
        h = good;
        h.tail_length = huge & ~uint64_t(3);
        EXPECT_EQ(ZIP_ERR_CORRUPT, try_header(h));
    }
}

TEST(CodecHeader, a_coded_tile_longer_than_a_raw_one_is_refused)
{
    // One block in which every value escapes from every level: right in everything but its use.
    const uint32_t values = format::BLOCK_VALUES,
                   codes[format::LEVELS] = {values, values, values, values};
    const uint32_t words = format::coded_tile_words(codes);
    ASSERT_GT(words, format::raw_tile_words(values));
    const format::Layout layout = format::layout_of(format::DTYPE_BF16, 2 * values);
    Bytes chunk(layout.tail + format::TAIL_WORD * words, 0xff), back(2 * values);
    format::ChunkHeader header =
            cpu::new_header(format::DTYPE_BF16, format::SHAPE_22228, 2 * values);
    header.tail_length = format::TAIL_WORD * words;
    memcpy(chunk.data(), &header, sizeof(header));
    const format::GroupCounts counts = {{values, values, values, values}};
    memcpy(&chunk[layout.counts], &counts, sizeof(counts));
    const uint64_t tile = format::tile_header(0, words, format::TILE_CODED);
    memcpy(&chunk[layout.tile_headers], &tile, sizeof(tile));
    for (Coder coder : {Coder::SIMD, Coder::SCALAR})
        EXPECT_EQ(ZIP_ERR_CORRUPT,
                  cpu::decode(coder, chunk.data(), chunk.size(), back.data(), back.size()));
}

TEST(CodecHeader, more_codes_than_values_are_refused)
{
    // Counts that the tail has room for and the tile has not.
    const uint32_t values = format::TILE_VALUES;
    const format::Layout layout = format::layout_of(format::DTYPE_BF16, 2 * values);
    for (uint32_t level = 0; level < format::LEVELS; ++level) {
        for (uint16_t many : {uint16_t(2049), uint16_t(5000), uint16_t(6000)}) {
            format::GroupCounts counts[format::TILE_GROUPS] = {};
            uint32_t codes[format::LEVELS] = {};
            for (uint32_t g = 0; g < format::TILE_GROUPS && format::coded_tile_words(codes) < 1000;
                 ++g) {
                counts[g].codes[level] = many;
                codes[level] += many;
            }
            const uint32_t words = format::coded_tile_words(codes);
            if (words > format::raw_tile_words(values))
                continue;
            Bytes chunk(layout.tail + format::TAIL_WORD * words, 0xff), back(2 * values);
            format::ChunkHeader header =
                    cpu::new_header(format::DTYPE_BF16, format::SHAPE_22228, 2 * values);
            header.tail_length = format::TAIL_WORD * words;
            memcpy(chunk.data(), &header, sizeof(header));
            memcpy(&chunk[layout.counts], counts, sizeof(counts));
            const uint64_t tile = format::tile_header(0, words, format::TILE_CODED);
            memcpy(&chunk[layout.tile_headers], &tile, sizeof(tile));
            for (Coder coder : {Coder::SIMD, Coder::SCALAR})
                EXPECT_EQ(ZIP_ERR_CORRUPT,
                          cpu::decode(coder, chunk.data(), chunk.size(), back.data(), back.size()));
        }
    }
}

TEST(CodecHeader, random_memory_is_no_chunk)
{
    std::mt19937 random(15);
    GuardedMemory src(4096), back(4096);
    for (int i = 0; i < 3000; ++i) {
        const size_t n = random() % 4096, length = random() % 4096;
        uint8_t *const s = src.last(n);
        for (size_t k = 0; k < n; ++k)
            s[k] = uint8_t(random());
        if (n >= format::HEADER_LENGTH && i % 2 == 0) { // one that gets as far as the tiles
            format::ChunkHeader header =
                    cpu::new_header(format::DTYPE_BF16, format::SHAPE_22228, length);
            const uint64_t fixed = format::layout_of(format::DTYPE_BF16, length).tail;
            header.tail_length = fixed < n ? (n - fixed) / 4 * 4 : 0;
            memcpy(s, &header, sizeof(header));
        }
        cpu::decode(Coder::SIMD, s, n, back.last(length), length);
        cpu::decode(Coder::SCALAR, s, n, back.last(length), length);
    }
}

TEST(CodecHostileTargets, every_target_refuses_and_survives_alike)
{
    for (zip_dtype_t dtype : {ZIP_DTYPE_BF16, ZIP_DTYPE_FP32}) {
        Victim victim(dtype, Data::WIDE, 20001);
        for (int64_t targets = hwy::SupportedTargets(); targets != 0; targets &= targets - 1) {
            SCOPED_TRACE(hwy::TargetName(targets & -targets));
            hwy::SetSupportedTargetsForTest(targets & -targets);
            hwy::GetChosenTarget().Update(hwy::SupportedTargets());
            std::mt19937 random(16);
            for (int i = 0; i < 100; ++i) {
                Bytes broken = victim.chunk;
                const size_t from = victim.layout.level1;
                broken[from + random() % (broken.size() - from)] ^= uint8_t(1 << random() % 8);
                victim.decode(broken);
            }
            hwy::SetSupportedTargetsForTest(0);
            hwy::GetChosenTarget().Update(hwy::SupportedTargets());
        }
    }
}

} // namespace
} // namespace zip::test
