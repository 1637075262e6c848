// SPDX-License-Identifier: BSD-3-Clause
// The machine that the codec's kernels are written for, in the same words for CUDA, HIP and the
// CPU: this file says what each word means, simt_cuda.h, simt_hip.h and simt_cpu.h spell it.
//
// A kernel is a grid of blocks of threads. 32 threads that follow each other are a *lane group*,
// also where the hardware's wave is wider: there a wave holds two groups, which may diverge. All
// that is said of lanes is about the own group.
// Use the words as simt::any() and so on, or by using-declarations: CUDA's headers have some of
// them (any, ballot) in the global namespace.
//
// Macros
//   SIMT_DEVICE    function that is inlined into kernels: `SIMT_DEVICE uint32_t f(uint32_t x)`.
//   SIMT_CONSTANT  table at namespace scope: `SIMT_CONSTANT constexpr uint8_t T[4] = {...};`. Reads
//                  at an index that differs between lanes are slow on CUDA.
//   SIMT_TABLE     likewise in global memory, for tables that are copied to shared memory:
//                  `SIMT_TABLE T NAME = ...;`
//   SIMT_KERNEL(name, threads, min_blocks) { ... }
//                  kernel of blocks of `threads` threads, of which `min_blocks` blocks shall fit a
//                  multiprocessor. Its argument is `launch`, a const zip::gpu::Launch.
//   SIMT_SHARED(Type, name);
//                  variable in shared memory, in the body of a kernel or device function; `Type` is
//                  trivially constructible. Its first content is undefined.
//   SIMT_DYNAMIC_SHARED(Type, name);
//                  `Type *name`: an array in shared memory of one Type for every TILE_THREADS
//                  threads of the block, which the launcher provides, aligned to 256; one such
//                  array a kernel.
//   SIMT_UNROLL    before a loop with a constant trip count.
//
// Constants
//   LANES           32.
//   NAMED_BARRIERS  whether parts of a block can have barriers of their own. Without them (HIP)
//                   the kernels for few multiprocessors run one worker a block.
//   FEW_THREADS     hence the most threads of these kernels' blocks: as many workers as shared
//                   memory has room for.
//
// Places
//   thread_index(), thread_count() of the block, block_index(), block_count(), lane_index()
//
// Barriers: `sync()` of BlockBarrier waits for all threads of the block, that of WorkerBarrier{id,
// threads} for the `threads` threads (a multiple of LANES) that use that id, from 1.
// They order shared and global memory between these threads. All threads come to a barrier at the
// same place in the source; none may have ended.
//
// Lanes: all lanes of the group take part, at the same place in the source, or none. They order no
// memory, but for sync_lanes(), which orders shared and global memory between the lanes.
//   sync_lanes()
//   any(p)             whether p holds in any lane
//   ballot(p)          bit i: p in lane i
//   shuffle(v, lane)   v of that lane (mod 32)
//   add_up(v, d)       v plus that of the lane d below, but v in lanes below d
//   shuffle_xor(v, m)  v of lane (own ^ m)
//   max_all(v)         the largest v
//
// Bits
//   byte_perm(a, b, s)          byte i of the result: nibble i of s (of four) picks one of the
//                               eight bytes of a (0..3) and b (4..7); with 8 added it is the sign
//                               of that byte, eight times
//   funnel_left(lo, hi, n)      upper half of hi:lo << (n mod 32)
//   funnel_right(lo, hi, n)     lower half of hi:lo >> (n mod 32)
//   popcount(v), find_first(v)  v != 0: number of its lowest set bit
//   select(mask, a, b)          a where the mask is set, else b
//
// Shared memory
//   lookup_word(table, word, k, four)  table[byte k of word], of words. `four` is 4, but nothing
//                                that a compiler knows, for otherwise NVIDIA's makes a shift of the
//                                multiplication, and shifts are short where these are not
//   lookup_byte(table, word, k)  table[byte k of word]; the table is aligned to 256
//   atomic_add_shared(p, v), atomic_or_shared(p, v), atomic_max_shared(p, v)  return the old value
//   copy_async_16(shared, global, bytes)  starts to fill 16 bytes: the first `bytes` (1..16) are
//                                         copied, the others 0; both addresses are aligned to 16
//   copy_async_wait()                     until the own thread's copies are done; other threads
//                                         see them after a barrier (or sync_lanes())
//
// Global memory. T is an integer of 1 to 8 bytes, U32x2 or U32x4; addresses are aligned to its
// size.
//   load_stream(p), store_stream(p, v)  of bytes that will not be used again soon
//   load_hostile(p)                     done exactly once: what was checked is what is used
//   prefetch(p)                         p may be any address of the allocation
//   atomic_add(p, v)                    of a uint64_t, returns the old value, orders nothing
//   add_release(p, v)                   likewise, but returns nothing, and waits for no answer
//   load_acquire(p)                     of a uint64_t, to wait for others' add_release(): who reads
//                                       the sum sees all that they saw or wrote before (and saw at
//                                       a barrier before)
//   publish(p, v)                       stores v to a word that a CPU may read; who reads v sees
//                                       all that the storing thread saw or wrote before
//
// Arithmetic on bit patterns, IEEE, round to nearest even, denormals kept. A NaN's payload is
// undefined.
//   add_bf16x2(a, b), add_fp16x2(a, b)  two sums in the halves of a word
//   add_fp32(a, b)
#ifndef ZIP_KERNELS_GPU_SIMT_H
#define ZIP_KERNELS_GPU_SIMT_H

#include <cstdint>
#include <type_traits>

#include "kernels/gpu/job.h"

namespace zip::simt {

constexpr uint32_t LANES = 32;

struct alignas(8) U32x2 {
    uint32_t x, y;
};
struct alignas(16) U32x4 {
    uint32_t x, y, z, w;
};

} // namespace zip::simt

#if defined(__CUDACC__)
#include "kernels/gpu/simt_cuda.h"
#elif defined(__HIP__)
#include "kernels/gpu/simt_hip.h"
#else
#include "kernels/gpu/simt_cpu.h"
#endif

namespace zip::simt {

constexpr uint32_t FEW_THREADS = NAMED_BARRIERS ? gpu::FEW_SM_THREADS : gpu::TILE_THREADS;

SIMT_DEVICE uint32_t lane_index()
{
    return thread_index() % LANES;
}

} // namespace zip::simt
#endif
