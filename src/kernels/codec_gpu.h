/* SPDX-License-Identifier: BSD-3-Clause */
/* The codec's public interface on a GPU. It is implemented by objects that are opened at run time
 * (libzip_cuda.so, libzip_hip.so), so that this header and its user need neither CUDA nor HIP:
 * zip_gpu_load() returns a table of functions.
 *
 * Nothing here allocates, frees, or waits for the device, but for open, close, queue_create,
 * queue_destroy and what begins with memory_. Encode, decode and probe put a kernel launch for each
 * type and shape in the batch (to encode in shape columns two; and for long batches one small copy
 * before them) on the queue's stream and return.
 *
 * Addresses are device addresses of memory that the GPU can reach: its own, pinned host memory that
 * is mapped under the same address (cuMemHostAlloc, cuMemHostRegister), a peer's. `data` has any
 * alignment (16 bytes are fastest); `chunks` is aligned to 16 bytes. An encode is some 2% faster
 * where a chunk's header ends at a multiple of 128 bytes: chunks % 128 == ZIP_GPU_CHUNK_PHASE, and
 * the stride a multiple of 128. */
#ifndef ZIP_CODEC_GPU_H
#define ZIP_CODEC_GPU_H

#include "codec.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

typedef struct zip_gpu zip_gpu_t;             /* the kernels, loaded into one context */
typedef struct zip_gpu_queue zip_gpu_queue_t; /* a stream, and what launches on it need */

/* Longest original of one chunk that a GPU encodes or decodes. Longer buffers are cut into several.
 */
#define ZIP_GPU_MAX_CHUNK (UINT64_C(1) << 34)

#define ZIP_GPU_CHUNK_PHASE 80

/* What a decode does with the values. */
typedef enum zip_gpu_op {
    ZIP_GPU_STORE = 0,
    /* Adds them to what is at `data`, for sums over several GPUs: bf16, fp16: the sum of both,
     * rounded once to nearest even, as the type's native add does (fp16 without flushing
     * denormals); fp32: IEEE add, round to nearest even. A NaN's payload is not kept. Other types
     * are INVALID_PARAM, and so are bytes behind the last whole value. */
    ZIP_GPU_ADD = 1
} zip_gpu_op_t;

/* A buffer, and the chunks that it is encoded to or decoded from. The buffer is cut into pieces of
 * `chunk_length` bytes, the last one maybe shorter; piece i is the chunk that starts at chunks + i
 * * chunk_stride. `chunk_length` 0 means one piece. Otherwise it is a multiple of 16. */
typedef struct zip_gpu_item {
    zip_coding_t coding;   /* decode: as the chunks' headers must say. AUTO: encode only */
    zip_gpu_op_t op;       /* decode */
    void *data;            /* the original: source of an encode, destination of a decode */
    uint64_t data_size;    /* its bytes */
    void *chunks;          /* destination of an encode, source of a decode */
    uint64_t chunk_length; /* original bytes of a chunk */
    uint64_t chunk_stride; /* bytes from a chunk's start to the next one's, a multiple of 16: at
                              least the plan's bound for an encode */
    uint64_t last_room;    /* bytes that may be touched at the last chunk; 0: chunk_stride */
    /* One word a chunk, written when the chunk is done (see below); 0: none. In host memory it can
     * be polled; then everything that the chunk's encode or decode wrote is visible to whoever read
     * the word. */
    uint64_t *progress;
} zip_gpu_item_t;

/* A progress word: bits 0..31 the tail's length in units of 4 bytes (encode) or 0, 32..39 an
 * encode's dtype | shape << 4 | small tiles << 7, or a decode's status (0: done; else the negative
 * of a zip_status_t), 48..63 the launch's sequence number. */
#define ZIP_GPU_PROGRESS_SEQ(word) ((uint16_t)((word) >> 48))
#define ZIP_GPU_PROGRESS_TAIL(word) ((uint64_t)(uint32_t)(word)*4)
#define ZIP_GPU_PROGRESS_DTYPE(word) ((zip_dtype_t)((word) >> 32 & 15))
#define ZIP_GPU_PROGRESS_SHAPE(word) ((zip_shape_t)((word) >> 36 & 7))
#define ZIP_GPU_PROGRESS_STATUS(word) ((zip_status_t)(-(int)((word) >> 32 & 255)))

typedef struct zip_gpu_queue_params {
    void *stream;        /* CUstream or hipStream_t; 0: the queue makes one of its own */
    uint32_t max_items;  /* longest batch */
    uint32_t max_chunks; /* most chunks in a batch */
    uint32_t slots; /* launches with more than ZIP_GPU_INLINE_ITEMS items that may be under way at
                       once */
} zip_gpu_queue_params_t;
#define ZIP_GPU_INLINE_ITEMS 6

/* What the driver knows of an address. */
typedef struct zip_gpu_memory {
    uint32_t
            is_gpu; /* 0: host memory, pinned or not, or an address that the driver does not know */
    int device;     /* the GPU's number in this process */
    /* To open for it: the context it was allocated in; where it is no single context's (stream
     * ordered pools, cuMemCreate, managed memory) the calling thread's if that is of this GPU,
     * otherwise the GPU's primary one, which then stays in use until the process ends. HIP: NULL */
    void *context;
} zip_gpu_memory_t;

/* Memory that the back end allocates. */
typedef enum zip_gpu_place {
    ZIP_GPU_DEVICE = 0, /* the GPU's own */
    ZIP_GPU_PINNED = 1  /* host memory that all GPUs reach at the same address */
} zip_gpu_place_t;

/* `max_sms`: multiprocessors that the launch may use; 0: all. `seq`: 1..65535, to tell this
 * launch's progress words from older ones. */
typedef struct zip_gpu_launch {
    uint32_t max_sms;
    uint16_t seq;
} zip_gpu_launch_t;

/* All calls on one queue are made by one thread at a time; different queues are independent. The
 * context in which the GPU was opened is made current inside each call and the caller's restored.
 * Errors: INVALID_PARAM (the text says which), NO_SPACE (no free slot, or more items or chunks than
 * the queue was made for), both of which launch nothing and leave the queue as it was; DEVICE (an
 * error of the driver). error_text() tells the last error of the calling thread.
 *
 * After DEVICE from encode, decode, probe or copy the queue has failed: all later calls of these on
 * it are DEVICE too, with a text that repeats the first error, and launch nothing. Destroy it and
 * make another. Some of the batch's launches may be under way: a chunk's progress word with the
 * batch's sequence number still says that this chunk is done, and no other chunk or result may be
 * used. Until queue_destroy has returned the batch's memory may be read and written. */
typedef struct zip_gpu_api {
    uint32_t version; /* ZIP_GPU_API_VERSION */
    const char *name; /* "cuda", "hip" */
    const char *(*error_text)(void);
    /* What memory is at `address`. Any thread, with a current context or without. NO_DEVICE: there
     * is no driver. */
    zip_status_t (*memory_query)(const void *address, zip_gpu_memory_t *memory_p);
    /* Loads the kernels, all at once, into the context (HIP: for the GPU) of `where`; NULL: into
     * the one that is current in the calling thread. */
    zip_status_t (*open)(const zip_gpu_memory_t *where, zip_gpu_t **gpu_p);
    void (*close)(zip_gpu_t *gpu); /* after its queues were destroyed; the context may be gone */
    uint32_t (*multiprocessors)(zip_gpu_t *gpu);
    /* Allocation may wait for the device. Memory of `size` bytes, aligned to 256, not cleared. */
    zip_status_t (*memory_allocate)(zip_gpu_t *gpu, zip_gpu_place_t place, size_t size,
                                    void **memory_p);
    void (*memory_free)(zip_gpu_t *gpu, zip_gpu_place_t place, void *memory); /* nobody uses it */
    /* Makes host memory that is mapped here (anybody's, shared memory too) reachable by all GPUs at
     * the same address. `memory` and `size` are multiples of the page size. */
    zip_status_t (*memory_pin)(zip_gpu_t *gpu, void *memory, size_t size);
    void (*memory_unpin)(zip_gpu_t *gpu, void *memory);
    /* A descriptor by which a network card's driver reaches device memory of memory_allocate(); the
     * caller closes it. DEVICE: this driver has none. */
    zip_status_t (*memory_dmabuf)(zip_gpu_t *gpu, void *memory, size_t size, int *fd_p);
    zip_status_t (*queue_create)(zip_gpu_t *gpu, const zip_gpu_queue_params_t *params,
                                 zip_gpu_queue_t **queue_p);
    /* Its launches must be done; those of a queue that failed it waits for. Never fails. */
    void (*queue_destroy)(zip_gpu_queue_t *queue);
    void *(*queue_stream)(zip_gpu_queue_t *queue);
    /* Whether all that was put on the queue is done. An error of the device comes out here: the
     * queue has failed then, as after DEVICE from encode. */
    zip_status_t (*queue_query)(zip_gpu_queue_t *queue, int *idle_p);
    zip_status_t (*encode)(zip_gpu_queue_t *queue, const zip_gpu_item_t *items, size_t count,
                           zip_gpu_launch_t launch);
    zip_status_t (*decode)(zip_gpu_queue_t *queue, const zip_gpu_item_t *items, size_t count,
                           zip_gpu_launch_t launch);
    /* Judges each item's `data` from a sample, as zip_codec_probe does; result i is written to
     * results[i] (memory that the GPU can reach). */
    zip_status_t (*probe)(zip_gpu_queue_t *queue, const zip_gpu_item_t *items, size_t count,
                          zip_probe_t *results);
    /* Copies between any two kinds of memory that the GPU reaches, by a copy engine and no
     * multiprocessor, and writes `progress` as a decode that went well does (0: none). */
    zip_status_t (*copy)(zip_gpu_queue_t *queue, void *to, const void *from, size_t size,
                         uint64_t *progress, uint16_t seq);
} zip_gpu_api_t;
#define ZIP_GPU_API_VERSION 2

/* Opens the back end "cuda" or "hip" (a path: that file) and returns its table, or NULL with a text
 * in *error_p that says what is missing. It stays open until the process ends. */
const zip_gpu_api_t *zip_gpu_load(const char *name, const char **error_p);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
