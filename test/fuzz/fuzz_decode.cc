// SPDX-License-Identifier: BSD-3-Clause
// A chunk of any bytes: nothing is read or written out of bounds, and both decoders of the host say
// the same.
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "fuzz/targets.h"
#include "kernels/codec.h"
#include "kernels/cpu/internal.h"
#include "gtest/simd_targets.h"

namespace zip::fuzz {

namespace {

constexpr uint64_t MAX_LENGTH = 1 << 20; // of an original, or memory and time would go there

template <class T>
T load(const uint8_t *at)
{
    T value;
    memcpy(&value, at, sizeof(value));
    return value;
}

// Writes counts and length of a coded tile so that they agree with its codes, whatever these are:
// mutations never do, and most of what they make would be refused. Leaves a tile that is wrong
// beyond that.
void fit_tile(uint8_t *chunk, const format::ChunkHeader &header, format::Coding coding,
              const format::Layout &l, uint64_t t)
{
    const format::ShapeTraits shape = format::shape_traits(coding.shape);
    const uint64_t first = t * format::tile_values(coding);
    const auto values = uint32_t(std::min<uint64_t>(l.values - first, format::tile_values(coding)));
    const auto words = uint32_t(format::div_up(values, format::WORD_VALUES));
    uint8_t *const tile_header = chunk + l.tile_headers + sizeof(uint64_t) * t;
    const uint64_t offset = format::tile_offset(load<uint64_t>(tile_header));
    if (format::tile_mode(load<uint64_t>(tile_header)) != format::TILE_CODED ||
        offset > header.tail_length / format::TAIL_WORD)
        return;
    const uint8_t *const part = chunk + l.tail + offset * format::TAIL_WORD;
    const uint64_t bits = 8 * (header.tail_length - offset * format::TAIL_WORD);

    std::vector<uint32_t> positions; // in code order, of the codes of a level
    uint64_t at = 0;                 // bit of the part
    uint16_t counts[format::MAX_TILE_BLOCKS][format::MAX_COUNTS] = {};
    for (uint32_t level = 0; level < shape.levels; ++level) {
        const uint32_t width = shape.width[level], escape = (1u << width) - 1;
        std::vector<uint32_t> escapes;
        if (level == 0) {
            const uint8_t *planes = chunk + l.level1 + format::plane_bytes(width, first);
            for (uint32_t word = 0; word < words; ++word) {
                const uint32_t in_block = word % format::BLOCK_WORDS,
                               block_words =
                                       std::min(words - (word - in_block), format::BLOCK_WORDS);
                uint32_t all = ~0u;
                for (uint32_t q = 0; q < width; ++q)
                    all &= load<uint32_t>(
                            planes + 4 * (width * (word - in_block) + q * block_words + in_block));
                for (uint32_t bit = 0; bit < format::WORD_VALUES; ++bit) {
                    if ((all >> bit & 1) != 0)
                        escapes.push_back(word * format::WORD_VALUES + bit);
                }
            }
        } else {
            const size_t n = positions.size();
            if (width * n > bits - at)
                return;
            for (size_t i = 0; i < n; ++i) {
                uint32_t code = 0;
                for (uint32_t q = 0; q < width; ++q) {
                    const uint64_t bit = at + q * n + i;
                    code |= uint32_t(part[bit / 8] >> bit % 8 & 1) << q;
                }
                if (code == escape)
                    escapes.push_back(positions[i]);
            }
            at += width * n;
        }
        positions = std::move(escapes);
        if (shape.counts != 0) {
            for (uint32_t position : positions)
                ++counts[position / format::group_values(coding)][shape.counts == 1 ? 0 : level];
        }
    }
    const uint32_t part_words = format::coded_tail_words(uint32_t(at), uint32_t(positions.size()));
    if (part_words > bits / 8 / format::TAIL_WORD ||
        part_words > format::raw_tail_words(coding, values))
        return;
    for (uint32_t g = 0; shape.counts != 0 && g * format::group_values(coding) < values; ++g)
        memcpy(chunk + l.counts + sizeof(uint16_t) * shape.counts * (t * shape.tile_groups + g),
               counts[g], sizeof(uint16_t) * shape.counts);
    const uint64_t fitted = format::tile_header(offset, part_words, format::TILE_CODED);
    memcpy(tile_header, &fitted, sizeof(fitted));
}

void fit_tiles(uint8_t *chunk, size_t n)
{
    zip_chunk_info_t info;
    if (zip_codec_inspect(chunk, n, &info) != ZIP_OK || info.coding.dtype == ZIP_DTYPE_BYTES ||
        info.original_length > MAX_LENGTH)
        return;
    const auto header = load<format::ChunkHeader>(chunk);
    const format::Coding coding = {header.dtype, header.shape, info.coding.small_tiles != 0};
    const format::Layout l = format::layout_of(coding, info.original_length);
    for (uint64_t t = 0; t < l.tiles; ++t)
        fit_tile(chunk, header, coding, l, t);
}

} // namespace

// Control: byte 0, bit 0: the expected length is in bytes 1 and 2, else what the chunk says; bit 1:
// coded tiles' counts and lengths agree with their codes; bits 4 to 7: misalignment of the chunk;
// byte 3, bits 0 to 3: of the original, bits 4 to 7: the fast decoder's instruction set.
void fuzz_decode(const uint8_t *data, size_t size)
{
    if (size < CONTROL_BYTES)
        return;
    const uint8_t *const control = data;
    const size_t n = size - CONTROL_BYTES;
    ExactMemory chunk(n, control[0] >> 4, 0);
    if (n > 0)
        memcpy(chunk.get(), data + CONTROL_BYTES, n);
    if ((control[0] & 2) != 0)
        fit_tiles(chunk.get(), n);

    zip_chunk_info_t info;
    const zip_status_t inspected = zip_codec_inspect(chunk.get(), n, &info);
    uint64_t length = control[1] | control[2] << 8;
    if ((control[0] & 1) == 0 && n >= format::HEADER_LENGTH)
        memcpy(&length, chunk.get() + offsetof(format::ChunkHeader, original_length), 8);
    if (length > MAX_LENGTH)
        return;

    static const std::vector<int64_t> targets = test::simd_targets();
    const test::SimdTarget target(targets[(control[3] >> 4) % targets.size()]);
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
