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

// A valid coded chunk, and memory to decode broken copies of it in.
class Victim {
public:
    Victim(zip_coding_t coding, Data kind, size_t values)
        : length((values + 1) * zip_dtype_size(coding.dtype) - 1), format(format_coding(coding)),
          data(make_data(kind, coding.dtype, length)), layout(format::layout_of(format, length)),
          most(layout.tail + format::max_tail(format, layout.values) + SPARE),
          src_(most), back_{GuardedMemory(length), GuardedMemory(length)}
    {
        // Coded even if that takes more than storing.
        chunk.resize(most);
        chunk.resize(cpu::encode_scalar(format, data.data(), length, chunk.data(), most));
        EXPECT_NE(0u, chunk.size());
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

    uint32_t tile_size(uint64_t t) const
    {
        const uint64_t tile = format::tile_values(format);
        return uint32_t(std::min(layout.values - t * tile, tile));
    }
    uint32_t groups_of(uint64_t t) const
    {
        return uint32_t(format::div_up(tile_size(t), format::group_values(format)));
    }
    bool is_coded(uint64_t t) const
    {
        uint64_t tile;
        memcpy(&tile, &chunk[layout.tile_headers + 8 * t], 8);
        return format::tile_mode(tile) == format::TILE_CODED;
    }
    // Where the counts of a tile are in the chunk.
    size_t counts_of(uint64_t t) const
    {
        const format::ShapeTraits shape = format::shape_traits(format.shape);
        return layout.counts + 2 * shape.counts * shape.tile_groups * t;
    }

    static constexpr size_t SPARE = 64;
    const size_t length;
    const format::Coding format;
    const Bytes data;
    Bytes chunk;
    const format::Layout layout;
    const size_t most; // bytes that a broken chunk may have

private:
    GuardedMemory src_, back_[2];
};

class CodecHostile : public testing::TestWithParam<zip_coding_t> {
protected:
    zip_coding_t coding() const { return GetParam(); }
    uint32_t counts() const { return format::shape_traits(uint8_t(coding().shape)).counts; }
    // Values that escape from every level, in tiles that are coded
    Data far() const
    {
        const uint32_t bits = format::type_traits(uint8_t(coding().dtype)).exponent_bits;
        return bits <= 5 ? Data::NORMAL : Data::WIDE;
    }
    // One whole tile and a ragged one
    size_t two_tiles() const { return format::tile_values(format_coding(coding())) + 3333; }
};

// Two groups or more in a tile, the last one ragged
constexpr size_t SHORT = 2100;

TEST_P(CodecHostile, any_bit_of_the_header)
{
    Victim victim(coding(), Data::NORMAL, 3001);
    for (size_t bit = 0; bit < 8 * format::HEADER_LENGTH; ++bit) {
        SCOPED_TRACE(bit);
        Bytes broken = victim.chunk;
        broken[bit / 8] ^= uint8_t(1 << bit % 8);
        const zip_status_t status = victim.decode(broken);
        const size_t byte = bit / 8;
        // Another type, shape or size of tiles (3, 4, 7) may do by accident.
        if (byte == 3 || byte == 4 || bit == 8 * 6 + 10)
            continue;
        // The optional flags (6), the checksum (24), the reference (32) and the trailing bytes (40)
        // may hold anything.
        if (byte < 24 && byte != 6)
            EXPECT_NE(ZIP_OK, status);
        else
            EXPECT_EQ(ZIP_OK, status);
    }
}

TEST_P(CodecHostile, any_bit_of_counts_tile_headers_and_symbols)
{
    for (Data kind : {Data::NORMAL, Data::RANDOM_BITS}) {
        Victim victim(coding(), kind, SHORT);
        for (size_t at = victim.layout.counts; at < victim.layout.tail; ++at) {
            for (int bit = 0; bit < 8; bit += kind == Data::NORMAL ? 1 : 3) {
                Bytes broken = victim.chunk;
                broken[at] ^= uint8_t(1 << bit);
                victim.decode(broken, bit & 1);
            }
            if (HasFailure())
                return;
        }
    }
}

TEST_P(CodecHostile, wrong_counts_are_refused)
{
    Victim victim(coding(), Data::NORMAL, SHORT);
    if (counts() == 0)
        GTEST_SKIP() << "the shape has none";
    ASSERT_TRUE(victim.is_coded(0));
    for (size_t i = 0; i < 2 * counts() * victim.groups_of(0); ++i) {
        for (int bit = 0; bit < 8; ++bit) {
            Bytes broken = victim.chunk;
            broken[victim.counts_of(0) + i] ^= uint8_t(1 << bit);
            EXPECT_EQ(ZIP_ERR_CORRUPT, victim.decode(broken));
        }
    }
}

TEST_P(CodecHostile, codes_moved_between_groups_are_refused)
{
    // Sums stay right, so only the comparison group by group can tell.
    Victim victim(coding(), far(), two_tiles());
    unsigned moved = 0;
    for (uint64_t t = 0; t < victim.layout.tiles; ++t) {
        for (uint32_t column = 0; victim.is_coded(t) && column < counts(); ++column) {
            Bytes broken = victim.chunk;
            uint16_t from, to;
            uint8_t *const first = &broken[victim.counts_of(t) + 2 * column];
            memcpy(&from, first, 2);
            memcpy(&to, first + 2 * counts(), 2);
            if (from == 0)
                continue;
            --from;
            ++to;
            memcpy(first, &from, 2);
            memcpy(first + 2 * counts(), &to, 2);
            EXPECT_EQ(ZIP_ERR_CORRUPT, victim.decode(broken)) << column;
            ++moved;
        }
    }
    EXPECT_TRUE(moved != 0 || counts() < 4);
}

TEST_P(CodecHostile, random_bytes_anywhere)
{
    std::mt19937 random(11);
    for (Data kind : {far(), Data::MIXED}) {
        Victim victim(coding(), kind, two_tiles());
        for (int i = 0; i < 40; ++i) {
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
}

TEST_P(CodecHostile, all_escapes_in_level_1)
{
    // As many escapes as there can be, and tails of random bits: positions run as far as they can.
    Victim victim(coding(), far(), two_tiles());
    std::mt19937 random(12);
    for (int i = 0; i < 10; ++i) {
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
    Victim victim(coding(), far(), two_tiles());
    const format::ShapeTraits shape = format::shape_traits(victim.format.shape);
    std::mt19937 random(13);
    for (int i = 0; i < 40; ++i) {
        Bytes broken = victim.chunk;
        broken.resize(victim.most / 4 * 4 - victim.layout.tail % 4);
        for (size_t at = victim.layout.level1; at < broken.size(); ++at)
            broken[at] = i % 4 == 0 ? 0xff : uint8_t(random() | (i % 4 == 1 ? random() : 0));
        for (uint64_t t = 0; t < victim.layout.tiles; ++t) {
            const uint32_t raw = format::raw_tail_words(victim.format, victim.tile_size(t));
            uint32_t bits = 0, raws = 0;
            for (uint32_t g = 0; g < victim.groups_of(t); ++g) {
                uint32_t most = std::min(victim.tile_size(t) - g * group_values(victim.format),
                                         group_values(victim.format));
                for (uint32_t column = 0; column < shape.counts; ++column) {
                    const bool is_raw = column + 1 == shape.counts;
                    const uint32_t width = is_raw ? 8 : shape.width[column + 1];
                    auto count = uint16_t(random() % (most + 1) >> (random() % 4));
                    // As many as there is room for
                    while (format::coded_tail_words(bits + (is_raw ? 0 : width * count),
                                                    raws + (is_raw ? count : 0)) > raw)
                        count /= 2;
                    (is_raw ? raws : bits) += is_raw ? count : width * count;
                    memcpy(&broken[victim.counts_of(t) + 2 * (shape.counts * g + column)], &count,
                           2);
                    most = count;
                }
            }
            const uint32_t words = shape.counts == 0 ? uint32_t(random() % (raw + 1))
                                                     : format::coded_tail_words(bits, raws);
            const uint64_t tile = format::tile_header(0, words, format::TILE_CODED);
            memcpy(&broken[victim.layout.tile_headers + 8 * t], &tile, 8);
            broken[victim.layout.symbols + 16 * t + format::BASE_HIGH] &= 3;
        }
        const uint64_t tail = (broken.size() - victim.layout.tail) / 4 * 4;
        memcpy(&broken[16], &tail, 8);
        victim.decode(broken, i & 1);
        if (HasFailure())
            return;
    }
}

TEST_P(CodecHostile, every_truncation)
{
    Victim victim(coding(), Data::NORMAL, 700);
    for (size_t n = 0; n < victim.chunk.size(); ++n) {
        const Bytes cut(victim.chunk.begin(), victim.chunk.begin() + ptrdiff_t(n));
        EXPECT_EQ(ZIP_ERR_CORRUPT, victim.decode(cut)) << n;
    }
}

TEST_P(CodecHostile, a_chunk_that_changes_while_it_is_read)
{
    Victim victim(coding(), far(), two_tiles());
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
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(15);
    for (int i = 0; i < 4 || std::chrono::steady_clock::now() < end; ++i)
        cpu::decode(i % 8 == 0 ? Coder::SCALAR : Coder::SIMD, s, victim.chunk.size(),
                    back.last(victim.length), victim.length);
    stop = true;
    writer.join();
}

TEST_P(CodecHostile, a_raw_tile_of_another_length_is_refused)
{
    Victim victim(coding(), Data::RANDOM_BITS, 5000);
    ASSERT_FALSE(victim.is_coded(0));
    uint64_t tile;
    memcpy(&tile, &victim.chunk[victim.layout.tile_headers], 8);
    for (int change : {-1, 1}) {
        Bytes broken = victim.chunk;
        const uint64_t other =
                format::tile_header(format::tile_offset(tile),
                                    format::tile_words(tile) + uint32_t(change), format::TILE_RAW);
        memcpy(&broken[victim.layout.tile_headers], &other, 8);
        const uint64_t tail = broken.size() - victim.layout.tail + 4;
        broken.resize(broken.size() + 4);
        memcpy(&broken[16], &tail, 8);
        EXPECT_EQ(ZIP_ERR_CORRUPT, victim.decode(broken));
    }
    for (uint64_t mode : {2, 3}) {
        Bytes broken = victim.chunk;
        const uint64_t other = (tile & ~(uint64_t(3) << 62)) | mode << 62;
        memcpy(&broken[victim.layout.tile_headers], &other, 8);
        EXPECT_EQ(ZIP_ERR_CORRUPT, victim.decode(broken));
    }
}

TEST_P(CodecHostile, a_coded_tile_longer_than_a_raw_one_is_refused)
{
    // One block in which every value escapes from every level: right in everything but its use.
    const format::Coding c = format_coding(coding());
    const format::ShapeTraits shape = format::shape_traits(c.shape);
    const uint32_t values = format::BLOCK_VALUES;
    uint32_t bits = 0;
    for (uint32_t level = 1; level < shape.levels; ++level)
        bits += shape.width[level] * values;
    const uint32_t words = format::coded_tail_words(bits, values);
    ASSERT_GT(words, format::raw_tail_words(c, values));
    const uint64_t length = values * zip_dtype_size(coding().dtype);
    const format::Layout layout = format::layout_of(c, length);
    Bytes chunk(layout.tail + format::TAIL_WORD * words, 0xff), back(length);
    format::ChunkHeader header = cpu::new_header(c, length);
    header.tail_length = format::TAIL_WORD * words;
    memcpy(chunk.data(), &header, sizeof(header));
    for (uint32_t i = 0; i < shape.counts; ++i) {
        const auto count = uint16_t(values);
        memcpy(&chunk[layout.counts + 2 * i], &count, 2);
    }
    memset(&chunk[layout.symbols], 0, 16);
    const uint64_t tile = format::tile_header(0, words, format::TILE_CODED);
    memcpy(&chunk[layout.tile_headers], &tile, sizeof(tile));
    for (Coder coder : {Coder::SIMD, Coder::SCALAR})
        EXPECT_EQ(ZIP_ERR_CORRUPT,
                  cpu::decode(coder, chunk.data(), chunk.size(), back.data(), back.size()));
}

TEST_P(CodecHostile, more_codes_than_values_are_refused)
{
    // Counts that the tail has room for and the tile has not.
    if (counts() == 0)
        GTEST_SKIP() << "the shape has none";
    Victim victim(coding(), Data::EQUAL, format::tile_values(format_coding(coding())));
    const format::ShapeTraits shape = format::shape_traits(victim.format.shape);
    for (uint32_t column = 0; column < shape.counts; ++column) {
        Bytes broken = victim.chunk;
        const uint32_t group = format::group_values(victim.format);
        const auto many = uint16_t(group + 1);
        for (uint32_t i = 0; i <= column; ++i)
            memcpy(&broken[victim.counts_of(0) + 2 * i], &many, 2);
        uint32_t bits = 0;
        for (uint32_t i = 0; i <= column && i + 1 < shape.counts; ++i)
            bits += shape.width[i + 1] * many;
        const uint32_t words =
                format::coded_tail_words(bits, column + 1 == shape.counts ? many : 0);
        if (words > format::raw_tail_words(victim.format, victim.tile_size(0)))
            continue;
        const uint64_t tile = format::tile_header(0, words, format::TILE_CODED), tail = 4 * words;
        memcpy(&broken[victim.layout.tile_headers], &tile, sizeof(tile));
        broken.resize(victim.layout.tail + tail, 0xff);
        memcpy(&broken[16], &tail, 8);
        memset(&broken[victim.layout.level1], 0xff, victim.layout.counts - victim.layout.level1);
        EXPECT_EQ(ZIP_ERR_CORRUPT, victim.decode(broken));
    }
}

INSTANTIATE_TEST_SUITE_P(, CodecHostile, testing::ValuesIn(all_codings()),
                         [](const testing::TestParamInfo<zip_coding_t> &p) {
                             return name_of(p.param);
                         });

TEST(CodecHeader, an_fp64_base_that_is_too_large_is_refused)
{
    for (zip_shape_t shape : {ZIP_SHAPE_22228, ZIP_SHAPE_38, ZIP_SHAPE_DENSE}) {
        Victim victim({ZIP_DTYPE_FP64, shape, 0}, Data::NORMAL, 5000);
        for (uint32_t base : {1792u, 1793u, 0xffffu}) {
            Bytes broken = victim.chunk;
            broken[victim.layout.symbols + 3] = uint8_t(base);
            broken[victim.layout.symbols + 15] = uint8_t(base >> 8);
            EXPECT_EQ(base > 1792 ? ZIP_ERR_CORRUPT : ZIP_OK, victim.decode(broken));
        }
    }
}

TEST(CodecHeader, refuses_what_it_does_not_know)
{
    Victim victim({ZIP_DTYPE_BF16, ZIP_SHAPE_22228, 0}, Data::NORMAL, 2048);
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
    h.dtype = format::DTYPES;
    EXPECT_EQ(ZIP_ERR_UNSUPPORTED, try_header(h));
    h = good;
    h.shape = format::SHAPES;
    EXPECT_EQ(ZIP_ERR_UNSUPPORTED, try_header(h));
    h = good;
    h.shape = format::SHAPE_STORED; // coded, but with no shape
    EXPECT_EQ(ZIP_ERR_CORRUPT, try_header(h));
    h = good;
    h.shape = format::SHAPE_DENSE;
    h.flags = format::FLAG_SMALL_TILES;
    EXPECT_EQ(ZIP_ERR_CORRUPT, try_header(h));
    h = good;
    h.shape = format::SHAPE_COLUMNS;
    h.dtype = format::DTYPE_FP64;
    EXPECT_EQ(ZIP_ERR_CORRUPT, try_header(h));
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
            const format::Coding coding =
                    format_coding(all_codings()[random() % all_codings().size()]);
            format::ChunkHeader header = cpu::new_header(coding, length);
            const uint64_t fixed = format::layout_of(coding, length).tail;
            header.tail_length = fixed < n ? (n - fixed) / 4 * 4 : 0;
            memcpy(s, &header, sizeof(header));
        }
        cpu::decode(Coder::SIMD, s, n, back.last(length), length);
        cpu::decode(Coder::SCALAR, s, n, back.last(length), length);
    }
}

TEST(CodecHostileTargets, every_target_refuses_and_survives_alike)
{
    for (zip_coding_t coding : all_codings()) {
        SCOPED_TRACE(name_of(coding));
        Victim victim(coding, Data::WIDE, SHORT);
        for (int64_t targets = hwy::SupportedTargets() & HWY_TARGETS; targets != 0;
             targets &= targets - 1) {
            SCOPED_TRACE(hwy::TargetName(targets & -targets));
            hwy::SetSupportedTargetsForTest(targets & -targets);
            hwy::GetChosenTarget().Update(hwy::SupportedTargets());
            std::mt19937 random(16);
            for (int i = 0; i < 30; ++i) {
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
