// SPDX-License-Identifier: BSD-3-Clause
// Writes the conformance vectors: chunks of the reference coder, chunks edited to what an encoder
// need not do, and chunks that must be refused. See README.md. The same files come out every time.
#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "kernels/codec.h"
#include "kernels/cpu/internal.h"
#include "kernels/format.h"
#include "splitmix64.h"
#include "vectors/sha256.h"
#include "gtest/chunk_tiles.h"

namespace zip::test {
namespace {

using Bytes = std::vector<uint8_t>;
using Json = nlohmann::ordered_json;

using Random = SplitMix64;

// The exponent of value i.
using Exponents = std::function<uint32_t(uint32_t i, Random &random)>;

// Just below 1 where the type has such: exponents halve in number one by one, as they about do in
// weights, and 1 in 64 is anywhere in the next hundred.
Exponents bell(uint8_t dtype)
{
    const uint32_t e = format::type_traits(dtype).exponent_bits;
    const uint32_t top = (1u << (e - 1)) - 2;
    return [top](uint32_t, Random &random) {
        const uint64_t r = random();
        const uint32_t below = r >> 58 == 0 ? uint32_t(r % 100)
                                            : uint32_t(std::countr_zero(r | uint64_t(1) << 57));
        return below < top ? top - below : 0;
    };
}

Exponents all(uint32_t exponent)
{
    return [exponent](uint32_t, Random &) { return exponent; };
}

Exponents any(uint8_t dtype)
{
    const uint32_t e = format::type_traits(dtype).exponent_bits;
    return [e](uint32_t, Random &random) { return uint32_t(random() >> (64 - e)); };
}

Exponents one_of(const std::vector<uint32_t> &exponents)
{
    return [exponents](uint32_t, Random &random) { return exponents[random() % exponents.size()]; };
}

// A bell whose place is another for each column.
Exponents by_column(uint8_t dtype)
{
    const uint32_t e = format::type_traits(dtype).exponent_bits;
    return [e](uint32_t i, Random &random) {
        const uint32_t below = uint32_t(std::countr_zero(random() | uint64_t(1) << 57));
        return (i % format::COLUMNS * 7 - below) & ((1u << e) - 1);
    };
}

// Half of the values have one exponent, the others 20 that are equally frequent: more than a table
// holds.
Exponents flat()
{
    return [](uint32_t i, Random &random) {
        return i % 2 == 0 ? 120 + uint32_t(random() % 20) : 127;
    };
}

// `values` values with random signs and mantissas, and `trailing` more bytes.
Bytes make_original(uint8_t dtype, uint32_t values, const Exponents &exponent,
                    uint32_t trailing = 0)
{
    const format::TypeTraits type = format::type_traits(dtype);
    const uint32_t mantissa_bits = type.mantissa_bits + 8 * type.low_bytes;
    Random random(values);
    Bytes bytes;
    for (uint32_t i = 0; i < values; ++i) {
        const uint64_t x = random() >> (63 - mantissa_bits); // with the sign above
        const uint64_t sign = x >> mantissa_bits;
        const uint64_t value = sign << (type.exponent_bits + mantissa_bits) |
                               uint64_t(exponent(i, random)) << mantissa_bits |
                               (x & ((uint64_t(1) << mantissa_bits) - 1));
        for (uint32_t k = 0; k < type.size; ++k)
            bytes.push_back(uint8_t(value >> 8 * k));
    }
    for (uint32_t k = 0; k < trailing; ++k)
        bytes.push_back(uint8_t(0xa1 + k));
    return bytes;
}

[[noreturn]] void fatal(const std::string &why)
{
    fprintf(stderr, "make_vectors: %s\n", why.c_str());
    exit(1);
}

template <class T>
T peek(const Bytes &chunk, uint64_t at)
{
    T value;
    if (at > chunk.size() || sizeof(T) > chunk.size() - at)
        fatal("a look past the end of a chunk");
    memcpy(&value, &chunk[at], sizeof(T));
    return value;
}

template <class T>
void poke(Bytes &chunk, uint64_t at, T value)
{
    if (at > chunk.size() || sizeof(T) > chunk.size() - at)
        fatal("an edit past the end of a chunk");
    memcpy(&chunk[at], &value, sizeof(T));
}

Bytes stored(const Bytes &original)
{
    const format::ChunkHeader header =
            cpu::new_header({format::DTYPE_BYTES, format::SHAPE_STORED, false}, original.size());
    Bytes chunk(sizeof(header) + original.size());
    poke(chunk, 0, header);
    std::copy(original.begin(), original.end(), chunk.begin() + sizeof(header));
    return chunk;
}

// Coded even where the host's encoder would store.
Bytes coded(format::Coding coding, const Bytes &original)
{
    const format::Layout l = format::layout_of(coding, original.size());
    // a byte more than the longest, since the coder has to stay below it
    Bytes chunk(l.tail + format::max_tail(coding, l.values) + 1);
    const size_t size = cpu::encode_scalar(coding, original.data(), original.size(), chunk.data(),
                                           chunk.size());
    if (size == 0)
        fatal("a chunk is longer than all tiles raw");
    chunk.resize(size);
    return chunk;
}

// Where things are in the header, format.md section 1.
constexpr uint64_t VERSION_AT = 2, DTYPE_AT = 3, SHAPE_AT = 4, HEADER_UNITS_AT = 5, FLAGS_AT = 6,
                   ORIGINAL_LENGTH_AT = 8, TAIL_LENGTH_AT = 16, CHECKSUM_AT = 24,
                   REFERENCE_VERSION_AT = 32, TRAILING_AT = 40;

class Vectors {
public:
    explicit Vectors(const std::filesystem::path &folder) : folder_(folder)
    {
        std::filesystem::create_directories(folder_ / "bad");
    }

    // A chunk that decodes. `canonical`: what the host's encoders make of the original, "bytes":
    // this chunk; "tiles": its tiles; "no": neither.
    void good(const std::string &name, const Bytes &original, const Bytes &chunk,
              const char *canonical, const std::string &shows)
    {
        const auto header = peek<format::ChunkHeader>(chunk, 0);
        Bytes decoded(original.size());
        if (cpu::decode(cpu::Coder::SCALAR, chunk.data(), chunk.size(), decoded.data(),
                        decoded.size()) != ZIP_OK ||
            decoded != original) {
            fatal(name + " does not decode");
        }
        write(name + ".chunk", chunk);
        index_["good"].push_back(
                {{"file", name + ".chunk"},
                 {"dtype", zip_dtype_name(zip_dtype_t(header.dtype))},
                 {"shape",
                  header.shape == 0 ? "stored" : zip_shape_name(zip_shape_t(header.shape))},
                 {"small_tiles", (header.flags & format::FLAG_SMALL_TILES) != 0},
                 {"original_length", original.size()},
                 {"sha256", sha256(original)},
                 {"canonical", canonical},
                 {"shows", shows}});
    }
    void encoded(const std::string &name, format::Coding coding, const Bytes &original,
                 const std::string &shows)
    {
        good(name, original, coded(coding, original), "bytes", shows);
    }

    // A chunk that must be refused, if `original_length` bytes are expected, since it violates that
    // rule of section 8.
    void bad(int rule, const std::string &name, uint64_t original_length, const Bytes &chunk,
             const std::string &shows)
    {
        const std::string file = "bad/rule" + std::to_string(rule) + "-" + name + ".chunk";
        write(file, chunk);
        index_["bad"].push_back({{"file", file},
                                 {"rule", rule},
                                 {"original_length", original_length},
                                 {"shows", shows}});
    }
    // A copy of `chunk` that is as long as `chunk` says, edited.
    void bad(int rule, const std::string &name, const Bytes &chunk,
             const std::function<void(Bytes &)> &edit, const std::string &shows)
    {
        Bytes broken = chunk;
        edit(broken);
        bad(rule, name, peek<uint64_t>(chunk, ORIGINAL_LENGTH_AT), broken, shows);
    }
    template <class T>
    void bad(int rule, const std::string &name, const Bytes &chunk, uint64_t at, T value,
             const std::string &shows)
    {
        bad(
                rule, name, chunk, [&](Bytes &broken) { poke(broken, at, value); }, shows);
    }

    void write_index()
    {
        std::ofstream out(folder_ / "index.json");
        out << index_.dump(1) << "\n";
        if (!out.flush())
            fatal("cannot write the index");
    }

private:
    void write(const std::string &file, const Bytes &chunk)
    {
        if (!files_.insert(file).second)
            fatal("two vectors are named " + file);
        std::ofstream out(folder_ / file, std::ios::binary);
        out.write(reinterpret_cast<const char *>(chunk.data()), std::streamsize(chunk.size()));
        if (!out.flush())
            fatal("cannot write " + file);
    }

    std::filesystem::path folder_;
    std::set<std::string> files_;
    Json index_ = {
            {"format_version", format::VERSION}, {"good", Json::array()}, {"bad", Json::array()}};
};

constexpr uint8_t BF16 = format::DTYPE_BF16, FP32 = format::DTYPE_FP32, FP16 = format::DTYPE_FP16,
                  FP64 = format::DTYPE_FP64, E4M3 = format::DTYPE_E4M3, E5M2 = format::DTYPE_E5M2;

std::string name_of(format::Coding c)
{
    return std::string(zip_dtype_name(zip_dtype_t(c.dtype))) + "-" +
           zip_shape_name(zip_shape_t(c.shape)) + (c.small_tiles ? "-small" : "");
}

// ---- what encoders make

void types_and_shapes(Vectors &v)
{
    for (uint8_t dtype = BF16; dtype <= E5M2; ++dtype) {
        for (uint8_t shape = format::SHAPE_22228; shape < format::SHAPES; ++shape) {
            if (!format::valid_coding({dtype, shape, false}))
                continue;
            // To keep the folder small, types of 4 and 8 bytes show one whole tile, and fp32 a
            // small one.
            const bool is_long = format::value_size(dtype) > 2;
            const bool small = dtype == FP32 && shape == format::SHAPE_11238;
            const bool full_tile = !is_long || small || shape == format::SHAPE_22228;
            const format::Coding c = {dtype, shape, small};
            // behind the last full tile: a last block of 25 words or 5
            const uint32_t more = is_long ? 150 : 777;
            const uint32_t values = (full_tile ? format::tile_values(c) : 2048) + more;
            v.encoded(name_of(c), c,
                      make_original(dtype, values, bell(dtype), format::value_size(dtype) / 2),
                      std::string(full_tile ? "a full tile and a ragged one" : "a ragged tile") +
                              ", codes at all levels that occur, raw symbols, bytes behind the "
                              "last value");
        }
    }
    for (uint8_t dtype : {BF16, E4M3}) {
        const format::Coding c = {dtype, format::SHAPE_22228, true};
        v.encoded(name_of(c), c, make_original(dtype, 4096 + 300, bell(dtype)), "small tiles");
    }
}

void lengths(Vectors &v)
{
    const format::Coding bf16 = {BF16, format::SHAPE_22228, false};
    v.good("stored-0", {}, stored({}), "bytes", "length 0");
    v.good("stored-1", {0x5a}, stored({0x5a}), "bytes", "length 1");
    const Bytes noise = make_original(BF16, 50, any(BF16), 1);
    v.good("stored-101", noise, stored(noise), "bytes", "stored bytes");
    v.good("coded-0", {}, coded(bf16, {}), "bytes", "a coded chunk of no value: a header alone");
    v.encoded("bf16-trailing", bf16, {0x17}, "one byte, less than a value: all is in the header");
    v.encoded("fp64-trailing", {FP64, format::SHAPE_DENSE, false}, {1, 2, 3, 4, 5, 6, 7},
              "seven bytes, less than a value");
    for (uint8_t dtype = BF16; dtype <= E5M2; ++dtype)
        v.encoded(name_of({dtype, format::SHAPE_38, false}) + "-1",
                  {dtype, format::SHAPE_38, false}, make_original(dtype, 1, bell(dtype)),
                  "one value");
    for (uint32_t n : {31, 32, 33, 1023, 1024, 1025})
        v.encoded("e4m3-22228-" + std::to_string(n), {E4M3, format::SHAPE_22228, false},
                  make_original(E4M3, n, bell(E4M3)), "around a word, and a block");
    v.encoded("fp16-11238-1500", {FP16, format::SHAPE_11238, false},
              make_original(FP16, 1500, bell(FP16)), "a last block of 15 words");
    v.encoded("fp64-dense-100", {FP64, format::SHAPE_DENSE, false},
              make_original(FP64, 100, bell(FP64)),
              "a last block of 4 words of 2 values a lane's load");
    v.encoded("fp32-38-100", {FP32, format::SHAPE_38, false}, make_original(FP32, 100, bell(FP32)),
              "a last block of 4 words of 4 values a lane's load");
}

void contents(Vectors &v)
{
    v.encoded("bf16-22228-raw", {BF16, format::SHAPE_22228, true},
              make_original(BF16, 4096 + 100, any(BF16)), "raw tiles");
    v.encoded("bf16-11238-raw", {BF16, format::SHAPE_11238, false},
              make_original(BF16, 1100, any(BF16)), "a raw tile: 7 planes behind LEVEL1");
    v.encoded("bf16-38-raw-1", {BF16, format::SHAPE_38, false},
              make_original(BF16, 1100, any(BF16)),
              "a raw tile of one group: no whole word in its COUNTS");
    v.encoded("e4m3-38-raw-3", {E4M3, format::SHAPE_38, true}, make_original(E4M3, 2500, any(E4M3)),
              "a raw tile of three groups: one whole word in its COUNTS");
    v.encoded("fp64-dense-raw", {FP64, format::SHAPE_DENSE, false},
              make_original(FP64, 300, any(FP64)),
              "a raw tile without COUNTS, exponents of 11 bits");
    v.encoded("e4m3-22228-raw-40", {E4M3, format::SHAPE_22228, false},
              make_original(E4M3, 40, any(E4M3)),
              "a raw tile so short that COUNTS and SYMBOLS hold it all");
    v.encoded("e5m2-11238-mixed", {E5M2, format::SHAPE_11238, true},
              make_original(E5M2, 2 * 4096 + 100,
                            [](uint32_t i, Random &random) {
                                return i / 4096 == 0 ? any(E5M2)(i, random) : bell(E5M2)(i, random);
                            }),
              "a raw tile, then coded ones");
    v.encoded("bf16-columns-raw", {BF16, format::SHAPE_COLUMNS, true},
              make_original(BF16, 4096 + 100, any(BF16)), "raw tiles, of symbols");
    v.encoded("bf16-columns-scaled", {BF16, format::SHAPE_COLUMNS, false},
              make_original(BF16, 8192 + 300, by_column(BF16)),
              "columns of different scale, the bases of which are told from the first rows");
    v.encoded("e5m2-columns-scaled", {E5M2, format::SHAPE_COLUMNS, true},
              make_original(E5M2, 20 * 1024 + 5, by_column(E5M2)),
              "more blocks than bases are made of");
    v.encoded("bf16-columns-100", {BF16, format::SHAPE_COLUMNS, false},
              make_original(BF16, 100, bell(BF16)), "columns without a value");
    v.encoded("bf16-22228-equal", {BF16, format::SHAPE_22228, false},
              make_original(BF16, 2100, all(127)), "one exponent: a part of no bytes");
    v.encoded("bf16-dense-equal", {BF16, format::SHAPE_DENSE, false},
              make_original(BF16, 2100, all(127)), "one exponent: a part of no bytes");
    for (uint8_t shape = format::SHAPE_22228; shape < format::SHAPES; ++shape)
        v.encoded("bf16-" + std::string(zip_shape_name(zip_shape_t(shape))) + "-flat",
                  {BF16, shape, false}, make_original(BF16, 1300, flat()),
                  "many codes at every level, and many raw symbols");
    v.encoded("bf16-22228-nan", {BF16, format::SHAPE_22228, false},
              make_original(BF16, 1200, all(255)), "infinities and NaNs with any payload");
    v.encoded("fp16-dense-nan", {FP16, format::SHAPE_DENSE, false},
              make_original(FP16, 600, one_of({31, 31, 0})), "NaNs and denormals");
    Bytes patterns(1024);
    for (size_t i = 0; i < patterns.size(); ++i)
        patterns[i] = uint8_t(i * 167); // each of 256 four times
    v.encoded("e4m3-dense-patterns", {E4M3, format::SHAPE_DENSE, false}, patterns,
              "every bit pattern of the type");
    v.encoded("e5m2-22228-patterns", {E5M2, format::SHAPE_22228, false}, patterns,
              "every bit pattern of the type");

    const auto fp64 = [&](const char *name, uint8_t shape, const Exponents &exponents,
                          const char *shows) {
        v.encoded(std::string("fp64-") + name, {FP64, shape, false},
                  make_original(FP64, 400, exponents), shows);
    };
    fp64("base", format::SHAPE_22228, one_of({0, 1023, 1022, 1023, 1021, 2047, 1000}),
         "a base of 823; symbols 0 and 255: denormals and infinities");
    fp64("base-0", format::SHAPE_11238, one_of({0, 1, 200, 2, 1, 1}), "a base of 0");
    fp64("base-1", format::SHAPE_11238, one_of({0, 201, 2, 2, 201, 2}),
         "a base of 1, the smallest exponent under it");
    fp64("base-max", format::SHAPE_DENSE, one_of({2046, 2046, 1793, 2046, 2047}),
         "a base of 1792, and the ends of its window");
    fp64(
            "out-of-window", format::SHAPE_22228,
            [](uint32_t i, Random &) { return i == 250 ? 700u : 1023u; },
            "one exponent that has no symbol under the base: a raw tile");
    fp64("nan", format::SHAPE_38, all(2047), "NaNs alone: a base of 0");
}

// ---- what encoders may do, and ours do not all

void liberties(Vectors &v)
{
    const format::Coding small = {E4M3, format::SHAPE_22228, true};
    const Bytes original = make_original(E4M3, 2 * 4096 + 1500, bell(E4M3));
    const Bytes chunk = coded(small, original);
    {
        const ChunkTiles tiles(chunk.data(), chunk.size());
        const uint64_t tail = tiles.layout.tail;
        constexpr uint64_t GAP = 12;
        constexpr uint64_t order[] = {2, 0, 1};
        Bytes moved(chunk.begin(), chunk.begin() + ptrdiff_t(tail));
        for (uint64_t t : order) {
            moved.insert(moved.end(), GAP, 0xee);
            poke(moved, tiles.layout.tile_headers + 8 * t,
                 format::tile_header((moved.size() - tail) / format::TAIL_WORD,
                                     uint32_t(tiles.length(t) / format::TAIL_WORD),
                                     format::TileMode(tiles.mode(t))));
            moved.insert(moved.end(), tiles.part(t), tiles.part(t) + tiles.length(t));
        }
        moved.insert(moved.end(), GAP, 0xee);
        poke(moved, TAIL_LENGTH_AT, uint64_t(moved.size() - tail));
        v.good("e4m3-22228-shuffled", original, moved, "tiles",
               "the parts of the tail in the order 2, 0, 1, with unused bytes before, between and "
               "behind them");
    }
    {
        const Bytes twice = make_original(E4M3, 1024, bell(E4M3));
        Bytes repeated;
        while (repeated.size() < 2 * 4096)
            repeated.insert(repeated.end(), twice.begin(), twice.end());
        Bytes shared = coded(small, repeated);
        const ChunkTiles tiles(shared.data(), shared.size());
        const uint64_t length = tiles.length(0), tail = tiles.layout.tail,
                       headers = tiles.layout.tile_headers;
        poke(shared, headers + 8, peek<uint64_t>(shared, headers));
        shared.resize(tail + length);
        poke(shared, TAIL_LENGTH_AT, length);
        v.good("e4m3-22228-shared", repeated, shared, "no",
               "two equal tiles with the same part of the tail: nothing in section 8 forbids it");
    }
    {
        const Bytes few = make_original(FP16, 300, bell(FP16), 1);
        Bytes longer = coded({FP16, format::SHAPE_22228, false}, few);
        longer.insert(longer.end(), 33, 0xdd);
        v.good("fp16-22228-more", few, longer, "tiles",
               "bytes behind the chunk, which are not part of it");
    }
    {
        // everything that a decoder ignores
        const format::Coding c = {E4M3, format::SHAPE_22228, false};
        const Bytes few = make_original(E4M3, 75, all(7));
        Bytes noisy = coded(c, few);
        const format::Layout l = format::layout_of(c, few.size());
        poke(noisy, FLAGS_AT, format::FLAGS_OPTIONAL);
        poke(noisy, CHECKSUM_AT, ~uint64_t(0));
        poke(noisy, REFERENCE_VERSION_AT, ~uint64_t(0));
        poke(noisy, TRAILING_AT, ~uint64_t(0));
        const auto fill = [&](uint64_t from, uint64_t to) {
            std::fill(noisy.begin() + ptrdiff_t(from), noisy.begin() + ptrdiff_t(to), 0xcc);
        };
        fill(l.counts + 8, l.tile_headers);
        fill(l.tile_headers + 8, l.symbols);
        // the codes of padding at level 1 become 2, their symbol and all other unused ones 0xcc
        const uint32_t words = 3, n = uint32_t(few.size());
        for (uint32_t word = 0; word < words; ++word) {
            for (uint32_t bit = 0; bit < 32; ++bit) {
                if (format::value_at(E4M3, words, word, bit) < n)
                    continue;
                const auto set = [&](uint64_t section, uint32_t plane) {
                    const uint64_t at = section + 4 * (words * plane + word);
                    poke(noisy, at, peek<uint32_t>(noisy, at) | 1u << bit);
                };
                set(l.level1, 1);
                for (uint32_t plane = 0; plane < 4; ++plane)
                    set(l.mantissa, plane);
            }
        }
        if (ChunkTiles(noisy.data(), noisy.size()).mode(0) != format::TILE_RAW)
            fatal("e4m3-22228-ignored is to be a raw tile");
        // in a raw tile plane 1 is all there is of padding; what SYMBOLS and COUNTS have left over
        v.good("e4m3-22228-ignored", few, noisy, "no",
               "all set that a decoder has to ignore: optional flags, unused fields, the bytes "
               "between sections, padding of planes");
    }
    {
        // One value, raw, and 31 of padding, of which the last 3 escape as well.
        const format::Coding c = {BF16, format::SHAPE_38, false};
        const Bytes one = make_original(BF16, 1, all(100));
        const format::Layout l = format::layout_of(c, one.size());
        Bytes padding(l.tail);
        format::ChunkHeader header = cpu::new_header(c, one.size());
        header.tail_length = 4;
        poke(padding, 0, header);
        poke(padding, l.mantissa, uint8_t((one[1] & 0x80) | (one[0] & 0x7f)));
        for (uint32_t plane = 0; plane < 3; ++plane)
            poke(padding, l.level1 + 4 * plane, 0xe0000001u);
        poke(padding, l.counts, uint16_t(4));
        poke(padding, l.tile_headers, format::tile_header(0, 1, format::TILE_CODED));
        for (uint8_t symbol : {uint8_t(100), uint8_t(1), uint8_t(2), uint8_t(3)})
            padding.push_back(symbol);
        v.good("bf16-38-padding", one, padding, "no",
               "positions of padding that escape, and take raw symbols from the tail");
    }
    {
        // A symbol is 8 bits, an exponent of fp16 is 5.
        const Bytes few = make_original(FP16, 200, all(14));
        Bytes wide = coded({FP16, format::SHAPE_22228, false}, few);
        const ChunkTiles tiles(wide.data(), wide.size());
        if (tiles.mode(0) != format::TILE_CODED)
            fatal("fp16-22228-wide-symbol is to be a coded tile");
        poke(wide, tiles.layout.symbols, uint8_t(0xe0 | 14));
        v.good("fp16-22228-wide-symbol", few, wide, "no",
               "a symbol with more bits than the exponent: the upper ones are ignored");
    }
}

// ---- what must be refused

void bad_headers(Vectors &v)
{
    const Bytes original = make_original(E4M3, 80, bell(E4M3));
    const Bytes good = coded({E4M3, format::SHAPE_22228, false}, original);
    const Bytes plain = stored(original);
    v.bad(1, "empty", 0, {}, "no bytes");
    v.bad(
            1, "short", stored({}), [](Bytes &broken) { broken.pop_back(); }, "47 bytes");
    v.bad(1, "magic", good, 0, uint16_t(0x5a50), "the magic's bytes swapped");
    v.bad(2, "version", good, VERSION_AT, uint8_t(2), "version 2");
    v.bad(2, "version-0", good, VERSION_AT, uint8_t(0), "version 0");
    v.bad(2, "header-units", good, HEADER_UNITS_AT, uint8_t(4), "a header of 64 bytes");
    v.bad(2, "reference", good, FLAGS_AT, format::FLAG_REFERENCE, "coded against a reference");
    v.bad(2, "flag-9", good, FLAGS_AT, uint16_t(0x0200), "a reserved flag of the upper byte");
    v.bad(2, "flag-15", good, FLAGS_AT, uint16_t(0x8000),
          "a flag of the upper byte that has no meaning");
    v.bad(2, "flag-11", plain, FLAGS_AT, uint16_t(0x0800), "such a flag on a stored chunk");
    v.bad(2, "dtype", good, DTYPE_AT, uint8_t(7), "type 7");
    v.bad(2, "shape", good, SHAPE_AT, uint8_t(6), "shape 6");
    v.bad(2, "shape-stored", plain, SHAPE_AT, uint8_t(255), "shape 255 of a stored chunk");
    v.bad(3, "length", original.size() - 1, good, "another length than the receiver expects");
    v.bad(3, "length-stored", original.size() + 1, plain,
          "another length than the receiver expects");
    for (const auto &[name, chunk] : {std::pair("huge", good), std::pair("huge-stored", plain)}) {
        Bytes huge = chunk;
        poke(huge, ORIGINAL_LENGTH_AT, uint64_t(1) << 63);
        v.bad(3, name, uint64_t(1) << 63, huge, "original_length 2^63");
    }
    v.bad(4, "stored-shape", plain, SHAPE_AT, uint8_t(1), "a stored chunk with a shape");
    v.bad(4, "stored-tail", plain, TAIL_LENGTH_AT, uint64_t(4),
          "a stored chunk with a tail_length");
    v.bad(4, "no-shape", good, SHAPE_AT, uint8_t(0), "a coded chunk without a shape");
    v.bad(4, "small-dense", coded({E4M3, format::SHAPE_DENSE, false}, original), FLAGS_AT,
          format::FLAG_SMALL_TILES, "small tiles in shape dense");
    v.bad(4, "fp64-columns", coded({FP64, format::SHAPE_22228, false}, original), SHAPE_AT,
          uint8_t(format::SHAPE_COLUMNS), "shape columns with fp64");
    v.bad(
            4, "tail-6", good,
            [](Bytes &broken) {
                poke(broken, TAIL_LENGTH_AT, peek<uint64_t>(broken, TAIL_LENGTH_AT) + 2);
                broken.resize(broken.size() + 2);
            },
            "a tail_length that is no multiple of 4");
    Bytes longer = good;
    poke(longer, ORIGINAL_LENGTH_AT, (uint64_t(1) << 50) + 1);
    v.bad(4, "too-long", (uint64_t(1) << 50) + 1, longer, "a coded chunk of 2^50 + 1 bytes");
    poke(longer, ORIGINAL_LENGTH_AT, uint64_t(1) << 50);
    v.bad(5, "long", uint64_t(1) << 50, longer, "a coded chunk that says it has 2^50 bytes");
    Bytes long_stored = plain;
    poke(long_stored, ORIGINAL_LENGTH_AT, (uint64_t(1) << 63) - 1);
    v.bad(5, "long-stored", (uint64_t(1) << 63) - 1, long_stored,
          "a stored chunk that says it has 2^63 - 1 bytes");
    v.bad(
            5, "stored-cut", plain, [](Bytes &broken) { broken.pop_back(); },
            "the last stored byte is missing");
    v.bad(
            5, "header-alone", good, [](Bytes &broken) { broken.resize(48); }, "no sections");
    const Bytes with_tail =
            coded({E4M3, format::SHAPE_22228, false}, make_original(E4M3, 700, bell(E4M3)));
    const uint64_t tail = ChunkTiles(with_tail.data(), with_tail.size()).layout.tail;
    v.bad(
            5, "no-tail", with_tail, [&](Bytes &broken) { broken.resize(tail); }, "no tail");
    v.bad(
            5, "sections-cut", with_tail, [&](Bytes &broken) { broken.resize(tail - 1); },
            "the last byte of SYMBOLS is missing");
    v.bad(
            5, "tail-cut", with_tail, [](Bytes &broken) { broken.pop_back(); },
            "the last byte of the tail is missing");
    for (uint64_t huge : {uint64_t(1) << 63, ~uint64_t(3), uint64_t(0) - tail})
        v.bad(5, "tail-" + std::to_string(huge), with_tail, TAIL_LENGTH_AT, huge,
              "a tail_length that makes a sum wrap");
}

void bad_tiles(Vectors &v)
{
    const format::Coding c = {BF16, format::SHAPE_22228, true};
    const Bytes original = make_original(BF16, 1200, bell(BF16)); // two groups
    const Bytes good = coded(c, original);
    const ChunkTiles tiles(good.data(), good.size());
    if (tiles.mode(0) != format::TILE_CODED)
        fatal("the base of bad chunks is to be a coded tile");
    const format::Layout l = tiles.layout;
    const uint64_t word = tiles.tile_header(0);
    const auto words = uint32_t(tiles.length(0) / format::TAIL_WORD);
    const auto resize_part = [](Bytes &chunk, uint64_t headers, int by) {
        // of a chunk's only tile
        const uint64_t header = peek<uint64_t>(chunk, headers);
        poke(chunk, headers,
             format::tile_header(format::tile_offset(header),
                                 uint32_t(int(format::tile_words(header)) + by),
                                 format::TileMode(format::tile_mode(header))));
        if (by > 0) {
            chunk.resize(chunk.size() + size_t(by) * format::TAIL_WORD);
            poke(chunk, TAIL_LENGTH_AT,
                 peek<uint64_t>(chunk, TAIL_LENGTH_AT) + uint64_t(by) * format::TAIL_WORD);
        }
    };

    v.bad(6, "mode-2", good, l.tile_headers, word | uint64_t(2) << 62, "mode 2");
    v.bad(6, "mode-3", good, l.tile_headers, word | uint64_t(3) << 62, "mode 3");
    v.bad(7, "offset", good, l.tile_headers, format::tile_header(1, words, format::TILE_CODED),
          "a part that ends a word behind the tail");
    v.bad(7, "offset-max", good, l.tile_headers,
          format::tile_header((uint64_t(1) << 48) - 1, words, format::TILE_CODED),
          "the largest offset");
    const Bytes equal =
            coded({BF16, format::SHAPE_22228, false}, make_original(BF16, 300, all(127)));
    const ChunkTiles equal_tiles(equal.data(), equal.size());
    if (equal_tiles.length(0) != 0)
        fatal("a tile of one exponent is to have a part of no bytes");
    v.bad(7, "offset-empty", equal, equal_tiles.layout.tile_headers,
          format::tile_header(1, 0, format::TILE_CODED), "an empty part behind the tail's end");

    const Bytes raw = coded({E4M3, format::SHAPE_38, false}, make_original(E4M3, 900, any(E4M3)));
    const ChunkTiles raw_tiles(raw.data(), raw.size());
    if (raw_tiles.mode(0) != format::TILE_RAW || raw_tiles.length(0) == 0)
        fatal("the base of bad raw tiles is to be a raw tile");
    v.bad(
            8, "raw-long", raw, [&](Bytes &b) { resize_part(b, raw_tiles.layout.tile_headers, 1); },
            "a raw tile with a word too many");
    v.bad(
            8, "raw-short", raw,
            [&](Bytes &b) { resize_part(b, raw_tiles.layout.tile_headers, -1); },
            "a raw tile with a word too few");
    v.bad(8, "coded-as-raw", good, l.tile_headers, word | uint64_t(1) << 62,
          "a coded tile that says that it is raw");
    {
        // 32 values that escape from every level: right, but longer than raw, which needs no tail
        // at all
        const format::Coding one_group = {BF16, format::SHAPE_22228, false};
        constexpr uint32_t N = 32;
        const format::Layout layout = format::layout_of(one_group, 2 * N);
        const uint32_t part = format::coded_tail_words(3 * 2 * N, N);
        Bytes escapes(layout.tail + part * format::TAIL_WORD, 0xff);
        format::ChunkHeader header = cpu::new_header(one_group, 2 * N);
        header.tail_length = part * format::TAIL_WORD;
        poke(escapes, 0, header);
        for (uint64_t i = 0; i < 4; ++i)
            poke(escapes, layout.counts + 2 * i, uint16_t(N));
        poke(escapes, layout.tile_headers, format::tile_header(0, part, format::TILE_CODED));
        v.bad(8, "coded-long", 2 * N, escapes, "a coded tile that is longer than a raw one");
    }

    const Bytes fp64 =
            coded({FP64, format::SHAPE_22228, false}, make_original(FP64, 200, bell(FP64)));
    const ChunkTiles fp64_tiles(fp64.data(), fp64.size());
    if (fp64_tiles.mode(0) != format::TILE_CODED)
        fatal("the fp64 base of bad chunks is to be a coded tile");
    for (uint32_t base : {1793u, 65535u}) {
        v.bad(
                9, "base-" + std::to_string(base), fp64,
                [&](Bytes &broken) {
                    poke(broken, fp64_tiles.layout.symbols + format::BASE_LOW, uint8_t(base));
                    poke(broken, fp64_tiles.layout.symbols + format::BASE_HIGH, uint8_t(base >> 8));
                },
                "fp64's base too large");
    }

    // COUNTS: [group][level]
    const auto count_at = [&](uint32_t group, uint32_t level) {
        return l.counts + 2 * (4 * group + level);
    };
    // `by` of them from group 0 to group 1
    const auto move_count = [&](Bytes &broken, uint32_t level, int by) {
        poke(broken, count_at(0, level), uint16_t(peek<uint16_t>(broken, count_at(0, level)) - by));
        poke(broken, count_at(1, level), uint16_t(peek<uint16_t>(broken, count_at(1, level)) + by));
    };
    v.bad(
            10, "count-first", good,
            [&](Bytes &broken) {
                // group 1 has 176 values, 6 words: one code more than these at level 2, the sum as
                // before
                move_count(broken, 0, 6 * 32 + 1 - peek<uint16_t>(broken, count_at(1, 0)));
            },
            "more codes at level 2 than the group has positions");
    v.bad(
            10, "count-rises", good,
            [&](Bytes &broken) {
                move_count(broken, 2,
                           -(peek<uint16_t>(broken, count_at(0, 1)) + 1 -
                             peek<uint16_t>(broken, count_at(0, 2))));
            },
            "more codes at level 4 than at level 3");
    for (const auto &[name, level] : {std::pair("count-level-2", 0u), std::pair("count-raw", 3u)}) {
        v.bad(
                10, name, good,
                [&, at = level](Bytes &broken) {
                    // enough to change the length by a word
                    const int by = at == 3 ? -4 : 16;
                    poke(broken, count_at(0, at),
                         uint16_t(peek<uint16_t>(broken, count_at(0, at)) + by));
                },
                "counts that make another length than the tile's");
    }
    v.bad(
            10, "long", good, [&](Bytes &b) { resize_part(b, l.tile_headers, 1); },
            "a part with a word too many");
    v.bad(
            10, "short", good, [&](Bytes &b) { resize_part(b, l.tile_headers, -1); },
            "a part with a word too few");
    const Bytes dense =
            coded({E4M3, format::SHAPE_DENSE, false}, make_original(E4M3, 900, bell(E4M3)));
    const ChunkTiles dense_tiles(dense.data(), dense.size());
    if (dense_tiles.mode(0) != format::TILE_CODED)
        fatal("the dense base of bad chunks is to be a coded tile");
    const format::Layout dl = dense_tiles.layout;
    v.bad(
            10, "dense-long", dense, [&](Bytes &b) { resize_part(b, dl.tile_headers, 1); },
            "shape dense: a part with a word too many");
    v.bad(
            10, "dense-short", dense, [&](Bytes &b) { resize_part(b, dl.tile_headers, -1); },
            "shape dense: a part with a word too few");
    v.bad(
            10, "dense-escapes", dense,
            [&](Bytes &broken) {
                std::fill(broken.begin() + ptrdiff_t(dl.level1),
                          broken.begin() + ptrdiff_t(dl.counts), 0xff);
            },
            "shape dense: more escapes than the part has codes for");

    v.bad(
            11, "count-level-2", good, [&](Bytes &b) { move_count(b, 0, 1); },
            "a code of level 2 counted in the other group");
    v.bad(
            11, "count-level-3", good, [&](Bytes &b) { move_count(b, 1, 1); },
            "a code of level 3 counted in the other group");
    const Bytes raws = coded(c, make_original(BF16, 1200, flat())); // laid out as `good` is
    v.bad(
            11, "count-raw", raws, [&](Bytes &b) { move_count(b, 3, 1); },
            "a raw symbol counted in the other group");
    v.bad(
            11, "level-1", good,
            [&](Bytes &broken) {
                std::fill(broken.begin() + ptrdiff_t(l.level1),
                          broken.begin() + ptrdiff_t(l.level1) + 128 * 2, 0);
            },
            "no escapes at level 1 in group 0, though its count says so");
    v.bad(
            11, "level-2", good,
            [&](Bytes &broken) {
                std::fill(broken.begin() + ptrdiff_t(l.tail),
                          broken.begin() + ptrdiff_t(l.tail) + 8, 0xff);
                const uint32_t codes = peek<uint16_t>(broken, count_at(0, 0)) +
                                       peek<uint16_t>(broken, count_at(1, 0));
                for (uint64_t bit = codes; bit < codes + 64; ++bit)
                    broken[l.tail + bit / 8] |= uint8_t(1 << bit % 8);
            },
            "the first 64 codes of level 2 escape, against the count of level 3");
    const Bytes shape38 =
            coded({BF16, format::SHAPE_38, true}, make_original(BF16, 1100, bell(BF16)));
    const ChunkTiles tiles38(shape38.data(), shape38.size());
    if (tiles38.mode(0) != format::TILE_CODED)
        fatal("the base of bad chunks in shape 38 is to be a coded tile");
    v.bad(
            11, "count-38", shape38,
            [&](Bytes &broken) {
                const uint64_t at = tiles38.layout.counts;
                poke(broken, at, uint16_t(peek<uint16_t>(broken, at) - 1));
                poke(broken, at + 2, uint16_t(peek<uint16_t>(broken, at + 2) + 1));
            },
            "shape 38: a raw symbol counted in the other group");
}

} // namespace
} // namespace zip::test

int main(int argc, char **argv)
{
    if (argc != 2 || argv[1][0] == '-') {
        fprintf(stderr, "usage: make_vectors DIR\nWrites the conformance vectors of the chunk's "
                        "format, and their index, to DIR.\n");
        return 2;
    }
    zip::test::Vectors vectors(argv[1]);
    zip::test::types_and_shapes(vectors);
    zip::test::lengths(vectors);
    zip::test::contents(vectors);
    zip::test::liberties(vectors);
    zip::test::bad_headers(vectors);
    zip::test::bad_tiles(vectors);
    vectors.write_index();
    return 0;
}
