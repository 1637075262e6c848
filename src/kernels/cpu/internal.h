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
using format::coded_tail_words;
using format::Coding;
using format::div_up;
using format::group_values;
using format::HEADER_LENGTH;
using format::Layout;
using format::layout_of;
using format::MAX_CODED_LENGTH;
using format::MAX_COUNTS;
using format::MAX_LEVELS;
using format::MAX_TILE_BLOCKS;
using format::MAX_TILE_VALUES;
using format::plane_bytes;
using format::RANK_RAW;
using format::raw_tail_words;
using format::raw_words;
using format::raw_words_before_tail;
using format::shape_traits;
using format::ShapeTraits;
using format::STRIPES;
using format::TABLE_BYTES;
using format::TAIL_WORD;
using format::tile_counts_bytes;
using format::tile_header;
using format::tile_mode;
using format::tile_offset;
using format::tile_values;
using format::tile_words;
using format::TileSymbols;
using format::type_traits;
using format::TypeTraits;
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
    if (n != 0) // `src` may be null then
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
// `limit`. Returns the chunk's size, or 0 (then dst[0, limit) is undefined). The coding is valid.
size_t encode_scalar(Coding coding, const uint8_t *src, size_t length, uint8_t *dst, size_t limit);
size_t encode_simd(Coding coding, const uint8_t *src, size_t length, uint8_t *dst, size_t limit);

// Decodes a coded chunk. `header` is a validated copy of the chunk's header; `src` holds the whole
// chunk and `dst` has room for the original.
zip_status_t decode_scalar(const ChunkHeader &header, const uint8_t *src, uint8_t *dst);
zip_status_t decode_simd(const ChunkHeader &header, const uint8_t *src, uint8_t *dst);

enum class Coder { SCALAR, SIMD };

// zip_codec_encode and zip_codec_decode with a coder of choice.
zip_status_t encode(Coder coder, zip_coding_t coding, const void *src, size_t length, void *dst,
                    size_t dst_size, size_t *encoded_p);
zip_status_t decode(Coder coder, const void *src, size_t src_size, void *dst, size_t length);

// Does `work` for every job, as codec.h says of batches. A job may be a batch of its own.
using Work = void (*)(zip_job_t &job);
zip_status_t run_batch(zip_job_t *jobs, size_t count, unsigned threads, Work work);

// The header of a chunk of that original, tail length and trailing bytes not yet set.
inline ChunkHeader new_header(Coding coding, uint64_t length)
{
    ChunkHeader h{};
    h.magic = format::MAGIC;
    h.version = format::VERSION;
    h.dtype = coding.dtype;
    h.shape = coding.shape;
    h.header_units = HEADER_LENGTH / format::HEADER_UNIT;
    h.flags = coding.small_tiles ? format::FLAG_SMALL_TILES : 0;
    h.original_length = length;
    return h;
}

// How the chunk of a header is coded.
inline Coding coding_of(const ChunkHeader &h)
{
    return {h.dtype, h.shape, (h.flags & format::FLAG_SMALL_TILES) != 0};
}

// Shape columns: the bases of a coded chunk's columns, from its original.
void choose_bases(uint8_t dtype, const uint8_t *src, uint64_t values,
                  uint8_t (&base)[format::COLUMNS]);

// Clears the bytes between the sections: nothing else would write them.
inline void clear_section_padding(Coding coding, const Layout &l, uint8_t *dst)
{
    const TypeTraits type = type_traits(coding.dtype);
    const ShapeTraits shape = shape_traits(coding.shape);
    auto clear = [dst](uint64_t from, uint64_t to) { memset(dst + from, 0, to - from); };
    clear(l.mantissa + (type.mantissa_is_bytes()
                                ? l.values
                                : plane_bytes(type.sign_mantissa_bits(), l.values)),
          l.low);
    const uint32_t low = type.low_bytes > 2 ? 2 : type.low_bytes;
    clear(l.low + low * l.values, l.low2);
    clear(l.low2 + (type.low_bytes - low) * l.values, l.level1);
    clear(l.level1 + plane_bytes(shape.width[0], l.values), l.counts);
    clear(l.counts + sizeof(uint16_t) * shape.counts * l.groups, l.tile_headers);
    clear(l.tile_headers + sizeof(uint64_t) * l.tiles, l.symbols);
}

// Whether a tile's part of the tail is inside a tail of that many bytes, and its mode and length
// are possible.
inline bool valid_tile_header(Coding coding, uint64_t header, uint32_t values, uint64_t tail_length)
{
    const uint64_t at = tile_offset(header) * TAIL_WORD;
    const uint64_t n = uint64_t(tile_words(header)) * TAIL_WORD;
    const uint32_t raw = raw_tail_words(coding, values);
    return at <= tail_length && n <= tail_length - at &&
           (tile_mode(header) == TILE_CODED
                    ? tile_words(header) <= raw
                    : tile_mode(header) == TILE_RAW && tile_words(header) == raw);
}

} // namespace zip::cpu
#endif
