// SPDX-License-Identifier: BSD-3-Clause
// simt.h on CUDA, compute capability 8.0 and later.
#ifndef ZIP_KERNELS_GPU_SIMT_CUDA_H
#define ZIP_KERNELS_GPU_SIMT_CUDA_H

#define SIMT_DEVICE __device__ __forceinline__
#define SIMT_CONSTANT __constant__
#define SIMT_TABLE __device__ const
#define SIMT_KERNEL(name, threads, min_blocks)                                                     \
    extern "C" __global__ void __launch_bounds__(threads, min_blocks)                              \
            name(const __grid_constant__ zip::gpu::Launch launch)
#define SIMT_SHARED(Type, name) __shared__ Type name
#define SIMT_DYNAMIC_SHARED(Type, name)                                                            \
    extern __shared__ __align__(256) unsigned char zip_dynamic_shared[];                           \
    Type *const name = reinterpret_cast<Type *>(zip_dynamic_shared)
#define SIMT_UNROLL _Pragma("unroll")

namespace zip::simt {

constexpr bool NAMED_BARRIERS = true;
constexpr uint32_t ALL_LANES = 0xffffffff;

SIMT_DEVICE uint32_t thread_index()
{
    return threadIdx.x;
}
SIMT_DEVICE uint32_t thread_count()
{
    return blockDim.x;
}
SIMT_DEVICE uint32_t block_index()
{
    return blockIdx.x;
}
SIMT_DEVICE uint32_t block_count()
{
    return gridDim.x;
}

struct BlockBarrier {
    SIMT_DEVICE void sync() const { __syncthreads(); }
};

struct WorkerBarrier {
    uint32_t id, threads;
    SIMT_DEVICE WorkerBarrier(uint32_t own_id, uint32_t own_threads)
        : id(own_id), threads(own_threads)
    {
    }
    SIMT_DEVICE void sync() const
    {
        asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
    }
};

SIMT_DEVICE void sync_lanes()
{
    __syncwarp();
}
SIMT_DEVICE bool any(bool p)
{
    return __any_sync(ALL_LANES, p) != 0;
}
SIMT_DEVICE uint32_t ballot(bool p)
{
    return __ballot_sync(ALL_LANES, p);
}
SIMT_DEVICE uint32_t shuffle(uint32_t v, uint32_t lane)
{
    return __shfl_sync(ALL_LANES, v, int(lane));
}
// One instruction less than with a comparison: the shuffle itself says whether there is such a
// lane.
SIMT_DEVICE uint32_t add_up(uint32_t v, uint32_t d)
{
    asm volatile("{\n"
                 " .reg .u32 below;\n"
                 " .reg .pred some;\n"
                 " shfl.sync.up.b32 below|some, %0, %1, 0, 0xffffffff;\n"
                 " @some add.u32 %0, %0, below;\n"
                 "}"
                 : "+r"(v)
                 : "r"(d));
    return v;
}
SIMT_DEVICE uint32_t max_all(uint32_t v)
{
    return __reduce_max_sync(ALL_LANES, v);
}
SIMT_DEVICE uint32_t shuffle_xor(uint32_t v, uint32_t m)
{
    return __shfl_xor_sync(ALL_LANES, v, int(m));
}

SIMT_DEVICE uint32_t byte_perm(uint32_t a, uint32_t b, uint32_t selector)
{
    uint32_t r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
    return r;
}
SIMT_DEVICE uint32_t funnel_left(uint32_t lo, uint32_t hi, uint32_t n)
{
    return __funnelshift_l(lo, hi, n);
}
SIMT_DEVICE uint32_t funnel_right(uint32_t lo, uint32_t hi, uint32_t n)
{
    return __funnelshift_r(lo, hi, n);
}
SIMT_DEVICE uint32_t popcount(uint32_t v)
{
    return uint32_t(__popc(v));
}
SIMT_DEVICE uint32_t find_first(uint32_t v)
{
    return uint32_t(__ffs(int(v))) - 1;
}

// One instruction also where the mask is a constant, of which the compiler would make two.
SIMT_DEVICE uint32_t select(uint32_t mask, uint32_t a, uint32_t b)
{
    uint32_t r;
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(r) : "r"(mask), "r"(a), "r"(b));
    return r;
}

SIMT_DEVICE uint32_t lookup_word(const uint32_t *table, uint32_t word, uint32_t k, uint32_t four)
{
    const uint32_t index = k == 3 ? word >> 24 : byte_perm(word, 0, 0x4440 + k);
    uint32_t r;
    asm("{\n"
        " .reg .u32 at;\n"
        " mad.lo.u32 at, %1, %2, %3;\n"
        " ld.shared.u32 %0, [at];\n"
        "}"
        : "=r"(r)
        : "r"(index), "r"(four), "r"(uint32_t(__cvta_generic_to_shared(table)))
        : "memory");
    return r;
}
// The address is put together in one instruction, its base being aligned to 256.
SIMT_DEVICE uint32_t lookup_byte(const uint8_t *table, uint32_t word, uint32_t k)
{
    uint32_t r;
    asm("ld.shared.u8 %0, [%1];"
        : "=r"(r)
        : "r"(byte_perm(word, uint32_t(__cvta_generic_to_shared(table)), 0x7650 + k))
        : "memory");
    return r;
}

SIMT_DEVICE uint32_t atomic_add_shared(uint32_t *p, uint32_t v)
{
    return atomicAdd(p, v);
}
SIMT_DEVICE uint32_t atomic_or_shared(uint32_t *p, uint32_t v)
{
    return atomicOr(p, v);
}
SIMT_DEVICE uint32_t atomic_max_shared(uint32_t *p, uint32_t v)
{
    return atomicMax(p, v);
}

// Through L1: tables that all blocks copy are the hottest line of L2 otherwise (H200, encoding
// 256 MiB: 135 us instead of 125).
SIMT_DEVICE void copy_async_16(void *shared, const void *global, uint32_t bytes)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(
                         uint32_t(__cvta_generic_to_shared(shared))),
                 "l"(__cvta_generic_to_global(global)), "r"(bytes)
                 : "memory");
}
SIMT_DEVICE void copy_async_wait()
{
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// T as the type that the compiler's load and store functions know.
template <class T>
struct Native;
template <>
struct Native<uint8_t> {
    using type = unsigned char;
};
template <>
struct Native<uint16_t> {
    using type = unsigned short;
};
template <>
struct Native<uint32_t> {
    using type = unsigned;
};
template <>
struct Native<uint64_t> {
    using type = unsigned long long;
};
template <>
struct Native<U32x2> {
    using type = uint2;
};
template <>
struct Native<U32x4> {
    using type = uint4;
};

template <class T>
SIMT_DEVICE T load_stream(const T *p)
{
    const auto v = __ldcs(reinterpret_cast<const typename Native<T>::type *>(p));
    T r;
    static_assert(sizeof r == sizeof v);
    memcpy(&r, &v, sizeof r);
    return r;
}
template <class T>
SIMT_DEVICE void store_stream(T *p, std::type_identity_t<T> v)
{
    typename Native<T>::type n;
    static_assert(sizeof n == sizeof v);
    memcpy(&n, &v, sizeof n);
    __stcs(reinterpret_cast<typename Native<T>::type *>(p), n);
}

SIMT_DEVICE uint8_t load_hostile(const uint8_t *p)
{
    uint32_t r;
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(r) : "l"(__cvta_generic_to_global(p)) : "memory");
    return uint8_t(r);
}
SIMT_DEVICE uint16_t load_hostile(const uint16_t *p)
{
    uint16_t r;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(r) : "l"(__cvta_generic_to_global(p)) : "memory");
    return r;
}
SIMT_DEVICE uint32_t load_hostile(const uint32_t *p)
{
    uint32_t r;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(r) : "l"(__cvta_generic_to_global(p)) : "memory");
    return r;
}
SIMT_DEVICE uint64_t load_hostile(const uint64_t *p)
{
    uint64_t r;
    asm volatile("ld.global.u64 %0, [%1];" : "=l"(r) : "l"(__cvta_generic_to_global(p)) : "memory");
    return r;
}
SIMT_DEVICE U32x2 load_hostile(const U32x2 *p)
{
    U32x2 r;
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];"
                 : "=r"(r.x), "=r"(r.y)
                 : "l"(__cvta_generic_to_global(p))
                 : "memory");
    return r;
}
SIMT_DEVICE U32x4 load_hostile(const U32x4 *p)
{
    U32x4 r;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "l"(__cvta_generic_to_global(p))
                 : "memory");
    return r;
}

SIMT_DEVICE void prefetch(const void *p)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(p)));
}

SIMT_DEVICE uint64_t atomic_add(uint64_t *p, uint64_t v)
{
    return atomicAdd(reinterpret_cast<unsigned long long *>(p), v);
}
SIMT_DEVICE void add_release(uint64_t *p, uint64_t v)
{
    asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(p)),
                 "l"(v)
                 : "memory");
}
SIMT_DEVICE uint64_t load_acquire(const uint64_t *p)
{
    uint64_t v;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];"
                 : "=l"(v)
                 : "l"(__cvta_generic_to_global(p))
                 : "memory");
    return v;
}
SIMT_DEVICE void publish(uint64_t *p, uint64_t v)
{
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "l"(v)
                 : "memory");
}

// A product with 1 is exact, so a fused multiply-add is an add rounded once; 8.0 has no other one
// for bf16.
SIMT_DEVICE uint32_t add_bf16x2(uint32_t a, uint32_t b)
{
    constexpr uint32_t ONES = 0x3f803f80;
    uint32_t r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(ONES), "r"(b));
    return r;
}
SIMT_DEVICE uint32_t add_fp16x2(uint32_t a, uint32_t b)
{
    uint32_t r;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
SIMT_DEVICE uint32_t add_fp32(uint32_t a, uint32_t b)
{
    return __float_as_uint(__fadd_rn(__uint_as_float(a), __uint_as_float(b)));
}

} // namespace zip::simt
#endif
