// SPDX-License-Identifier: BSD-3-Clause
// What the host codec's parts and its tests share: the coders behind zip_codec_encode/decode.
#ifndef ZIP_KERNELS_CPU_INTERNAL_H
#define ZIP_KERNELS_CPU_INTERNAL_H

#include <cstring>

#include "kernels/codec.h"
#include "kernels/format.h"

namespace zip::cpu {

// The words of the format, for coders, which use little else.
using format::BLOCK_VALUES;
using format::BLOCK_WORDS;
using format::ChunkHeader;
using format::coded_tile_words;
using format::div_up;
using format::ESCAPE;
using format::GROUP_BLOCKS;
using format::GroupCounts;
using format::HEADER_LENGTH;
using format::Layout;
using format::layout_of;
using format::level1_bytes;
using format::LEVELS;
using format::MAX_CODED_LENGTH;
using format::RANK_RAW;
using format::raw_tile_words;
using format::TABLE_SYMBOLS;
using format::TAIL_WORD;
using format::TILE_GROUPS;
using format::tile_header;
using format::tile_mode;
using format::tile_offset;
using format::TILE_VALUES;
using format::tile_words;
using format::TileSymbols;
using format::value_at;
using format::value_size;
using format::WORD_VALUES;
using enum format::Dtype;
using enum format::Shape;
using enum format::TileMode;

// Copies from memory that somebody else may be writing, so that the copy alone is used afterwards:
// the barrier keeps the compiler from reading the source again instead of the copy.
inline void snapshot(void *dst, const void *src, size_t n)
{
    memcpy(dst, src, n);
    asm volatile("" : : "r"(dst) : "memory");
}

template <class T>
inline T snapshot_value(const void *src)
{
    T value;
    snapshot(&value, src, sizeof(value));
    return value;
}

// Encodes as a coded chunk if that takes fewer than `limit` bytes, of which `dst` has room for
// `limit`. Returns the chunk's size, or 0 (then dst[0, limit) is undefined). `dtype` is one that
// has a value size.
size_t encode_scalar(zip_dtype_t dtype, const uint8_t *src, size_t length, uint8_t *dst,
                     size_t limit);
size_t encode_simd(zip_dtype_t dtype, const uint8_t *src, size_t length, uint8_t *dst,
                   size_t limit);

// Decodes a coded chunk. `header` is a validated copy of the chunk's header; `src` holds the whole
// chunk and `dst` has room for the original.
zip_status_t decode_scalar(const format::ChunkHeader &header, const uint8_t *src, uint8_t *dst);
zip_status_t decode_simd(const format::ChunkHeader &header, const uint8_t *src, uint8_t *dst);

enum class Coder { SCALAR, SIMD };

// zip_codec_encode and zip_codec_decode with a coder of choice.
zip_status_t encode(Coder coder, zip_dtype_t dtype, const void *src, size_t length, void *dst,
                    size_t dst_size, size_t *encoded_p);
zip_status_t decode(Coder coder, const void *src, size_t src_size, void *dst, size_t length);

// The header of a coded chunk of that original, tail length and trailing bytes not yet set.
inline format::ChunkHeader new_header(uint8_t dtype, uint8_t shape, uint64_t length)
{
    format::ChunkHeader h{};
    h.magic = format::MAGIC;
    h.version = format::VERSION;
    h.dtype = dtype;
    h.shape = shape;
    h.header_units = format::HEADER_LENGTH / format::HEADER_UNIT;
    h.original_length = length;
    return h;
}

// Clears the padding between sections: nothing else would write it.
inline void clear_section_padding(const format::Layout &l, bool has_raw2, uint8_t *dst)
{
    auto clear = [dst](uint64_t from, uint64_t to) { memset(dst + from, 0, to - from); };
    clear(l.raw + l.values, l.raw2);
    clear(l.raw2 + (has_raw2 ? 2 * l.values : 0), l.level1);
    clear(l.level1 + format::level1_bytes(l.values), l.counts);
    clear(l.counts + sizeof(format::GroupCounts) * l.groups, l.tile_headers);
    clear(l.tile_headers + sizeof(uint64_t) * l.tiles, l.symbols);
}

// Whether a tile's part of the tail is inside a tail of that many bytes, and its mode and length
// are possible.
inline bool valid_tile_header(uint64_t header, uint32_t values, uint64_t tail_length)
{
    const uint64_t at = format::tile_offset(header) * format::TAIL_WORD;
    const uint64_t n = uint64_t(format::tile_words(header)) * format::TAIL_WORD;
    const uint32_t raw_words = format::raw_tile_words(values);
    return at <= tail_length && n <= tail_length - at &&
           (format::tile_mode(header) == format::TILE_CODED
                    ? format::tile_words(header) <= raw_words
                    : format::tile_mode(header) == format::TILE_RAW &&
                              format::tile_words(header) == raw_words);
}

// What a coded tile's counts claim, checked.
struct TileClaim {
    uint32_t codes[format::LEVELS]; // sums over the groups
    bool valid;
};

// Checks the counts of a coded tile of `values` values against each other and the tile's tail of
// `words` words.
inline TileClaim check_counts(const format::GroupCounts *counts, uint32_t values, uint32_t words)
{
    TileClaim claim{};
    bool ok = true;
    for (uint32_t g = 0; g * format::GROUP_VALUES < values; ++g) {
        const uint32_t left = values - g * format::GROUP_VALUES;
        uint32_t most =
                left < format::GROUP_VALUES
                        ? uint32_t(format::div_up(left, format::WORD_VALUES)) * format::WORD_VALUES
                        : format::GROUP_VALUES;
        for (uint32_t l = 0; l < format::LEVELS; ++l) {
            ok &= counts[g].codes[l] <= most;
            most = counts[g].codes[l];
            claim.codes[l] += most;
        }
    }
    claim.valid = ok && words == format::coded_tile_words(claim.codes);
    return claim;
}

} // namespace zip::cpu
#endif
