/* SPDX-License-Identifier: BSD-3-Clause */
/* The codec's public interface on the host: plan, encode, decode, inspect, probe. It knows nothing
 * of UCX or CUDA; codec_gpu.h is the device's.
 *
 * A *chunk* is one encoded buffer, self-contained, laid out as format.md says. All lengths are
 * bytes unless they say otherwise; buffers may have any alignment; nothing here allocates, blocks,
 * throws or keeps state (but for the threads of the batch calls), so every function may run in any
 * number of threads at once. */
#ifndef ZIP_CODEC_H
#define ZIP_CODEC_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* The element type of a buffer. The values are those of the wire (format.md), but for AUTO. */
typedef enum zip_dtype {
    ZIP_DTYPE_BYTES = 0, /* none: stored as it is */
    ZIP_DTYPE_BF16 = 1,
    ZIP_DTYPE_FP32 = 2,
    ZIP_DTYPE_FP16 = 3,
    ZIP_DTYPE_FP64 = 4,
    ZIP_DTYPE_E4M3 = 5, /* fp8 e4m3 (e4m3fn and its kin: only the fields matter) */
    ZIP_DTYPE_E5M2 = 6, /* fp8 e5m2 */
    ZIP_DTYPE_LAST,
    ZIP_DTYPE_AUTO = 255 /* unknown: encoders probe, and take the best type or store */
} zip_dtype_t;

/* How exponents are coded: widths of the cascade's levels (format.md, section 3). */
typedef enum zip_shape {
    ZIP_SHAPE_DEFAULT = 0, /* 22228; with ZIP_DTYPE_AUTO what the probe finds best */
    ZIP_SHAPE_22228 = 1,   /* bell-shaped data: weights, gradients */
    ZIP_SHAPE_11238 = 2,   /* one exponent holds half of the values: uniform data, activations */
    ZIP_SHAPE_38 = 3,      /* fastest an SM, worse ratio: few SMs, very fast wires */
    ZIP_SHAPE_DENSE = 4,   /* best ratio, slower: slow wires */
    ZIP_SHAPE_COLUMNS = 5, /* 22228 for matrices whose columns differ in scale (keys and values of
                              attention) and are as many as divide 1024, or a multiple of that. Not
                              for ZIP_DTYPE_FP64. No probe finds it */
    ZIP_SHAPE_LAST
} zip_shape_t;

/* What to encode as. */
typedef struct zip_coding {
    zip_dtype_t dtype;
    zip_shape_t shape;    /* ignored for ZIP_DTYPE_BYTES */
    uint32_t small_tiles; /* not 0: tiles of half the size, 0.4% more bytes. A GPU's fastest kernels
                             do not make or read them. Not with ZIP_SHAPE_DENSE. */
} zip_coding_t;

typedef enum zip_status {
    ZIP_OK = 0,
    ZIP_ERR_INVALID_PARAM = -1, /* a null pointer, an unknown type or shape */
    ZIP_ERR_UNSUPPORTED =
            -2,             /* a version or a feature of the format that this build does not know */
    ZIP_ERR_NO_SPACE = -3,  /* the output buffer is smaller than the bound */
    ZIP_ERR_CORRUPT = -4,   /* the chunk contradicts itself or its size */
    ZIP_ERR_NO_DEVICE = -5, /* no GPU, driver or GPU library, or none that this build can use */
    ZIP_ERR_DEVICE = -6     /* the GPU's driver reported an error */
} zip_status_t;

/* What a chunk says of itself, after its header was validated against its size. */
typedef struct zip_chunk_info {
    zip_coding_t coding;      /* how it was coded; ZIP_DTYPE_BYTES: stored */
    uint64_t original_length; /* bytes before encoding */
    uint64_t encoded_length;  /* bytes of the whole chunk, header included */
} zip_chunk_info_t;

/* What is known of a chunk before it is encoded. */
typedef struct zip_plan {
    uint64_t bound; /* most bytes that the chunk can have: room that an encoder wants */
    uint64_t fixed; /* coded: bytes before the tail, all at places that do not depend on the values
                     */
} zip_plan_t;

/* What a sample of a buffer promises. */
typedef struct zip_probe {
    zip_dtype_t dtype; /* the best type to encode it as; ZIP_DTYPE_BYTES when none gains */
    zip_shape_t shape; /* the best of 22228 and 11238 for it */
    float ratio;       /* encoded / original bytes to expect, at most 1 */
    float confidence;  /* 0 (a guess) to 1 (far from any other type's result) */
} zip_probe_t;

/* Name of a type or a shape as options and tools spell it ("bf16", "dense"), or NULL for a value
 * that is none. */
const char *zip_dtype_name(zip_dtype_t dtype);
const char *zip_shape_name(zip_shape_t shape);

/* Bytes of one element; 1 for ZIP_DTYPE_BYTES and ZIP_DTYPE_AUTO, 0 for a value that is none. */
size_t zip_dtype_size(zip_dtype_t dtype);

/* Text of a status, for messages. Never NULL. */
const char *zip_status_string(zip_status_t status);

/* The largest chunk that `length` bytes of any type and content can become on the host. The growth
 * over `length` is at most ZIP_CODEC_MAX_GROWTH bytes, since what does not gain is stored. Returns
 * 0 if the result does not fit a size_t. */
#define ZIP_CODEC_MAX_GROWTH 64
size_t zip_codec_bound(size_t length);

/* What encoding `length` bytes will take on any encoder, a GPU's too: it cannot turn back and store
 * what does not gain, so the bound is up to 0.2% + 2 KiB above `length`. ZIP_DTYPE_AUTO: for the
 * worst type. Lengths above 2^50 are INVALID_PARAM. */
zip_status_t zip_codec_plan(zip_coding_t coding, uint64_t length, zip_plan_t *plan_p);

/* Encodes `length` bytes at `src` into `dst`, which has room for `dst_size` >=
 * zip_codec_bound(length) bytes. Bytes behind the last whole element are kept too. `src` and `dst`
 * must not overlap. If `src` changes meanwhile the chunk still decodes, to some mixture of old and
 * new. */
zip_status_t zip_codec_encode(zip_coding_t coding, const void *src, size_t length, void *dst,
                              size_t dst_size, size_t *encoded_p);

/* Reads and validates a chunk's header. `src_size` may exceed the chunk: the rest is ignored. */
zip_status_t zip_codec_inspect(const void *src, size_t src_size, zip_chunk_info_t *info_p);

/* Decodes the chunk in the `src_size` bytes at `src` to exactly `length` bytes at `dst`.
 * `src` is not trusted: it may hold anything, and may even change meanwhile (shared memory of a
 * hostile peer). No byte outside src[0, src_size) is read and none outside dst[0, length) is
 * written; on an error dst's content is undefined. A chunk whose original length is not `length` is
 * ZIP_ERR_CORRUPT. */
zip_status_t zip_codec_decode(const void *src, size_t src_size, void *dst, size_t length);

/* One buffer of a batch. Encode: `src_size` bytes at `src` become a chunk at `dst`. Decode: the
 * chunk in the `src_size` bytes at `src` becomes `dst_size` bytes at `dst`. `encoded` is set by
 * encode, `status` by both. */
typedef struct zip_job {
    zip_coding_t coding; /* encode */
    const void *src;
    size_t src_size;
    void *dst;
    size_t dst_size;
    size_t encoded;
    zip_status_t status;
} zip_job_t;

/* Encode or decode `count` buffers on up to `threads` threads, the caller's among them (0: as many
 * as the caller may run on, which is the most in any case). Fewer where threads cannot be had, or
 * where the buffers are too short to be worth waking one. The others are made by the first call
 * that wants them, serve all callers, sleep in between with all signals blocked, and end with the
 * process or when the library is unloaded; a child of fork() makes its own. Returns ZIP_OK if all
 * jobs did, else the status of the first that did not; the others are done all the same. */
zip_status_t zip_codec_encode_batch(zip_job_t *jobs, size_t count, unsigned threads);
zip_status_t zip_codec_decode_batch(zip_job_t *jobs, size_t count, unsigned threads);

/* Guesses from a sample of at most ZIP_CODEC_PROBE_BYTES which type and shape encode `length` bytes
 * at `src` best, and how well. A wrong guess costs ratio, never correctness. */
#define ZIP_CODEC_PROBE_BYTES 16384
zip_status_t zip_codec_probe(const void *src, size_t length, zip_probe_t *probe_p);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
