// SPDX-License-Identifier: BSD-3-Clause
// The conformance vectors of test/vectors: both decoders of the host read all that is good and
// refuse all that is bad, and both encoders make the same chunks again.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "kernels/codec.h"
#include "kernels/cpu/internal.h"
#include "kernels/format.h"
#include "vectors/sha256.h"
#include "gtest/chunk_tiles.h"
#include "gtest/simd_targets.h"
#include "gtest/test_codec_util.h"

namespace zip::test {
namespace {

using cpu::Coder;

const std::filesystem::path FOLDER = ZIP_TEST_VECTORS;

// Calls each(coder) for the reference and for the fast coder on every instruction set.
template <class Each>
void for_each_coder(Each each)
{
    {
        SCOPED_TRACE("scalar");
        each(Coder::SCALAR);
    }
    for (int64_t target : simd_targets()) {
        SCOPED_TRACE(hwy::TargetName(target));
        const SimdTarget chosen(target);
        each(Coder::SIMD);
    }
}

struct GoodVector {
    std::string file, dtype, shape, sha256, canonical;
    bool small_tiles;
    size_t original_length;
};
struct BadVector {
    std::string file, shows;
    int rule;
    uint64_t original_length;
};
void PrintTo(const GoodVector &v, std::ostream *out)
{
    *out << v.file;
}
void PrintTo(const BadVector &v, std::ostream *out)
{
    *out << v.file << ": " << v.shows;
}

nlohmann::json index()
{
    std::ifstream in(FOLDER / "index.json");
    return nlohmann::json::parse(in);
}

std::vector<GoodVector> good_vectors()
{
    std::vector<GoodVector> vectors;
    const nlohmann::json all = index();
    for (const auto &v : all.at("good"))
        vectors.push_back({v.at("file"), v.at("dtype"), v.at("shape"), v.at("sha256"),
                           v.at("canonical"), v.at("small_tiles"), v.at("original_length")});
    return vectors;
}

std::vector<GoodVector> canonical_vectors()
{
    std::vector<GoodVector> vectors = good_vectors();
    std::erase_if(vectors, [](const GoodVector &v) { return v.canonical == "no"; });
    return vectors;
}

std::vector<BadVector> bad_vectors()
{
    std::vector<BadVector> vectors;
    const nlohmann::json all = index();
    for (const auto &v : all.at("bad"))
        vectors.push_back({v.at("file"), v.at("shows"), v.at("rule"), v.at("original_length")});
    return vectors;
}

Bytes read_file(const std::string &name)
{
    std::ifstream in(FOLDER / name, std::ios::binary);
    if (!in)
        throw std::runtime_error("cannot read " + name);
    return Bytes{std::istreambuf_iterator<char>(in), {}};
}

// A test's name of letters, digits and underscores.
template <class Vector>
std::string test_name(const testing::TestParamInfo<Vector> &info)
{
    std::string name = info.param.file.substr(0, info.param.file.rfind('.'));
    for (char &c : name)
        c = isalnum(static_cast<unsigned char>(c)) ? c : '_';
    return name;
}

// Decodes flush against inaccessible pages.
zip_status_t decode(Coder coder, const Bytes &chunk, Bytes &original)
{
    GuardedMemory src(chunk.size()), dst(original.size());
    uint8_t *const in = src.last(chunk.size()), *const out = dst.last(original.size());
    std::copy(chunk.begin(), chunk.end(), in);
    const zip_status_t status = cpu::decode(coder, in, chunk.size(), out, original.size());
    std::copy(out, out + original.size(), original.begin());
    return status;
}

class GoodVectors : public testing::TestWithParam<GoodVector> {
protected:
    const Bytes chunk = read_file(GetParam().file);

    format::Coding coding() const
    {
        return {chunk[offsetof(format::ChunkHeader, dtype)],
                chunk[offsetof(format::ChunkHeader, shape)], GetParam().small_tiles};
    }
};

TEST_P(GoodVectors, decode)
{
    for_each_coder([&](Coder coder) {
        Bytes original(GetParam().original_length);
        ASSERT_EQ(ZIP_OK, decode(coder, chunk, original));
        EXPECT_EQ(GetParam().sha256, sha256(original));
    });
}

TEST_P(GoodVectors, are_what_the_index_says)
{
    zip_chunk_info_t info;
    ASSERT_EQ(ZIP_OK, zip_codec_inspect(chunk.data(), chunk.size(), &info));
    EXPECT_EQ(GetParam().original_length, info.original_length);
    EXPECT_EQ(GetParam().dtype, zip_dtype_name(info.coding.dtype));
    if (info.coding.dtype == ZIP_DTYPE_BYTES)
        EXPECT_EQ("stored", GetParam().shape);
    else
        EXPECT_EQ(GetParam().shape, zip_shape_name(info.coding.shape));
    EXPECT_EQ(GetParam().small_tiles, info.coding.small_tiles != 0);
}

// Those that no encoder of ours makes are left out.
class CanonicalVectors : public GoodVectors {};

TEST_P(CanonicalVectors, are_what_encoders_make)
{
    Bytes original(GetParam().original_length);
    ASSERT_EQ(ZIP_OK, decode(Coder::SCALAR, chunk, original));
    for_each_coder([&](Coder coder) {
        Bytes made;
        size_t size;
        if (coding().dtype == format::DTYPE_BYTES) {
            made.resize(zip_codec_bound(original.size()));
            ASSERT_EQ(ZIP_OK,
                      cpu::encode(coder, {ZIP_DTYPE_BYTES, ZIP_SHAPE_DEFAULT, 0}, original.data(),
                                  original.size(), made.data(), made.size(), &size));
        } else {
            // coded even if that is longer; the coders stay below the limit
            const format::Layout l = format::layout_of(coding(), original.size());
            made.resize(l.tail + format::max_tail(coding(), l.values) + 1);
            size = (coder == Coder::SIMD ? cpu::encode_simd : cpu::encode_scalar)(
                    coding(), original.data(), original.size(), made.data(), made.size());
        }
        made.resize(size);
        if (coding().dtype != format::DTYPE_BYTES) {
            EXPECT_EQ("", chunk_difference(chunk.data(), chunk.size(), made.data(), made.size()));
        }
        if (GetParam().canonical == "bytes") {
            EXPECT_TRUE(chunk == made);
        }
    });
}

INSTANTIATE_TEST_SUITE_P(, GoodVectors, testing::ValuesIn(good_vectors()), test_name<GoodVector>);
INSTANTIATE_TEST_SUITE_P(, CanonicalVectors, testing::ValuesIn(canonical_vectors()),
                         test_name<GoodVector>);

class BadVectors : public testing::TestWithParam<BadVector> {};

TEST_P(BadVectors, are_refused)
{
    Bytes chunk = read_file(GetParam().file);
    chunk.reserve(1); // no bytes are not a null pointer
    const zip_status_t expected = GetParam().rule == 2 ? ZIP_ERR_UNSUPPORTED : ZIP_ERR_CORRUPT;
    // What says that it is longer than memory cannot be expected; it is refused before that
    // matters.
    constexpr uint64_t MOST = 1 << 20;
    const bool can_be_expected = GetParam().original_length <= MOST;
    Bytes original(can_be_expected ? GetParam().original_length : 0);
    for_each_coder([&](Coder coder) { EXPECT_EQ(expected, decode(coder, chunk, original)); });

    // All but what is expected, and what is in the tiles, is known from the header and the size.
    zip_chunk_info_t info;
    const bool inspect_knows = GetParam().rule <= 5 && (GetParam().rule != 3 || !can_be_expected);
    EXPECT_EQ(inspect_knows ? expected : ZIP_OK,
              zip_codec_inspect(chunk.data(), chunk.size(), &info));
}

INSTANTIATE_TEST_SUITE_P(, BadVectors, testing::ValuesIn(bad_vectors()), test_name<BadVector>);

TEST(Vectors, cover_every_type_shape_and_rule)
{
    std::set<std::string> codings, wanted;
    for (const GoodVector &v : good_vectors())
        codings.insert({v.dtype + " " + v.shape, v.dtype + (v.small_tiles ? " small" : " whole")});
    wanted = {"bytes stored", "bf16 small", "fp32 small", "e4m3 small", "e5m2 small"};
    for (int dtype = ZIP_DTYPE_BF16; dtype < ZIP_DTYPE_LAST; ++dtype) {
        for (int shape = ZIP_SHAPE_22228; shape < ZIP_SHAPE_LAST; ++shape)
            if (zip::format::valid_coding({uint8_t(dtype), uint8_t(shape), false}))
                wanted.insert(std::string(zip_dtype_name(zip_dtype_t(dtype))) + " " +
                              zip_shape_name(zip_shape_t(shape)));
    }
    for (const std::string &coding : wanted)
        EXPECT_TRUE(codings.contains(coding)) << coding;
    std::set<int> rules;
    for (const BadVector &v : bad_vectors())
        rules.insert(v.rule);
    EXPECT_EQ((std::set<int>{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}), rules);
}

TEST(Vectors, are_all_in_the_index)
{
    std::set<std::string> named, there;
    for (const GoodVector &v : good_vectors())
        named.insert(v.file);
    for (const BadVector &v : bad_vectors())
        named.insert(v.file);
    for (const auto &entry : std::filesystem::recursive_directory_iterator(FOLDER)) {
        if (entry.path().extension() == ".chunk")
            there.insert(entry.path().lexically_relative(FOLDER));
    }
    EXPECT_EQ(named, there);
}

// The comparison that other tests rely on.
TEST(ChunkTiles, see_a_change_of_any_byte_but_of_the_gaps_of_the_tail)
{
    const Bytes chunk = read_file("e4m3-22228-shuffled.chunk");
    const ChunkTiles tiles(chunk.data(), chunk.size());
    ASSERT_EQ("", tiles.problem());
    std::vector<bool> gap(chunk.size(), false);
    for (uint64_t at = tiles.layout.tail; at < chunk.size(); ++at)
        gap[at] = true;
    for (uint64_t t = 0; t < tiles.layout.tiles; ++t) {
        for (uint64_t i = 0; i < tiles.length(t); ++i)
            gap[tiles.layout.tail + tiles.offset(t) + i] = false;
    }
    EXPECT_EQ("", chunk_difference(chunk.data(), chunk.size(), chunk.data(), chunk.size()));
    const uint64_t tail_length = offsetof(format::ChunkHeader, tail_length);
    for (size_t at = 0; at < chunk.size(); ++at) {
        if (at >= tail_length && at < tail_length + 8)
            continue; // may differ, but not be wrong
        Bytes changed = chunk;
        changed[at] ^= 1;
        EXPECT_EQ(gap[at],
                  chunk_difference(chunk.data(), chunk.size(), changed.data(), changed.size())
                          .empty())
                << at;
    }
}

TEST(ChunkTiles, see_parts_that_overlap)
{
    const Bytes chunk = read_file("e4m3-22228-shared.chunk");
    EXPECT_EQ("two tiles share bytes of the tail",
              ChunkTiles(chunk.data(), chunk.size()).problem());
}

} // namespace
} // namespace zip::test
