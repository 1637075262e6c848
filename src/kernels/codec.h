/* SPDX-License-Identifier: BSD-3-Clause */
/* The codec's one public interface: plan, encode, decode, inspect, probe. It knows nothing of UCX
 * or CUDA.
 *
 * A *chunk* is one encoded buffer, self-contained, laid out as format.md says. All lengths are
 * bytes unless they say otherwise; buffers may have any alignment; nothing here allocates, blocks,
 * throws or keeps state, so every function may run in any number of threads at once. */
#ifndef ZIP_CODEC_H
#define ZIP_CODEC_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The element type of a buffer. The values are those of the wire (format.md). */
typedef enum zip_dtype {
    ZIP_DTYPE_BYTES = 0, /* unknown: stored as it is */
    ZIP_DTYPE_BF16 = 1,
    ZIP_DTYPE_FP32 = 2,
    ZIP_DTYPE_LAST
} zip_dtype_t;

typedef enum zip_status {
    ZIP_OK = 0,
    ZIP_ERR_INVALID_PARAM = -1, /* a null pointer, an unknown type */
    ZIP_ERR_UNSUPPORTED =
            -2,            /* a version or a feature of the format that this build does not know */
    ZIP_ERR_NO_SPACE = -3, /* the output buffer is smaller than the bound */
    ZIP_ERR_CORRUPT = -4   /* the chunk contradicts itself or its size */
} zip_status_t;

/* What a chunk says of itself, after its header was validated against its size. */
typedef struct zip_chunk_info {
    zip_dtype_t dtype;        /* how it was coded; ZIP_DTYPE_BYTES: stored */
    uint64_t original_length; /* bytes before encoding */
    uint64_t encoded_length;  /* bytes of the whole chunk, header included */
} zip_chunk_info_t;

/* What a sample of a buffer promises. */
typedef struct zip_probe {
    zip_dtype_t dtype; /* the best type to encode it as; ZIP_DTYPE_BYTES when none gains */
    float ratio;       /* encoded / original bytes to expect, at most 1 */
    float confidence;  /* 0 (a guess) to 1 (far from any other type's result) */
} zip_probe_t;

/* Name of a type as options and tools spell it ("bf16"), or NULL for a value that is none. */
const char *zip_dtype_name(zip_dtype_t dtype);

/* Bytes of one element; 1 for ZIP_DTYPE_BYTES, 0 for a value that is none. */
size_t zip_dtype_size(zip_dtype_t dtype);

/* Text of a status, for messages. Never NULL. */
const char *zip_status_string(zip_status_t status);

/* The largest chunk that `length` bytes of any type and content can become. The growth over
 * `length` is at most ZIP_CODEC_MAX_GROWTH bytes, since what does not gain is stored. Returns 0 if
 * the result does not fit a size_t. */
#define ZIP_CODEC_MAX_GROWTH 64
size_t zip_codec_bound(size_t length);

/* Encodes `length` bytes at `src` as `dtype` into `dst`, which has room for `dst_size` >=
 * zip_codec_bound(length) bytes. Bytes behind the last whole element are kept too. `src` and `dst`
 * must not overlap. If `src` changes meanwhile the chunk still decodes, to some mixture of old and
 * new. */
zip_status_t zip_codec_encode(zip_dtype_t dtype, const void *src, size_t length, void *dst,
                              size_t dst_size, size_t *encoded_p);

/* Reads and validates a chunk's header. `src_size` may exceed the chunk: the rest is ignored. */
zip_status_t zip_codec_inspect(const void *src, size_t src_size, zip_chunk_info_t *info_p);

/* Decodes the chunk in the `src_size` bytes at `src` to exactly `length` bytes at `dst`.
 * `src` is not trusted: it may hold anything, and may even change meanwhile (shared memory of a
 * hostile peer). No byte outside src[0, src_size) is read and none outside dst[0, length) is
 * written; on an error dst's content is undefined. A chunk whose original length is not `length` is
 * ZIP_ERR_CORRUPT. */
zip_status_t zip_codec_decode(const void *src, size_t src_size, void *dst, size_t length);

/* Guesses from a sample of at most ZIP_CODEC_PROBE_BYTES which type encodes `length` bytes at `src`
 * best, and how well. A wrong guess costs ratio, never correctness. */
#define ZIP_CODEC_PROBE_BYTES 16384
zip_status_t zip_codec_probe(const void *src, size_t length, zip_probe_t *probe_p);

#ifdef __cplusplus
}
#endif
#endif
