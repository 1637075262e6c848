// SPDX-License-Identifier: BSD-3-Clause
// simt.h on HIP, for waves of 32 and 64. In terms of the compiler's builtins, so that device code
// needs no HIP installation to be compiled.
#ifndef ZIP_KERNELS_GPU_SIMT_HIP_H
#define ZIP_KERNELS_GPU_SIMT_HIP_H

#define SIMT_DEVICE __attribute__((device, always_inline)) inline
#define SIMT_CONSTANT __attribute__((constant))
#define SIMT_TABLE __attribute__((device)) static const
#define SIMT_KERNEL(name, threads, min_blocks)                                                     \
    extern "C" __attribute__((global, amdgpu_flat_work_group_size(threads, threads))) void name(   \
            const zip::gpu::Launch launch)
#define SIMT_SHARED(Type, name) __attribute__((shared)) static Type name
#define SIMT_DYNAMIC_SHARED(Type, name)                                                            \
    extern __attribute__((shared, aligned(256))) unsigned char zip_dynamic_shared[];               \
    Type *const name = reinterpret_cast<Type *>(zip_dynamic_shared)
#define SIMT_UNROLL _Pragma("unroll")

namespace zip::simt {

constexpr bool NAMED_BARRIERS = false;

SIMT_DEVICE uint32_t thread_index()
{
    return __builtin_amdgcn_workitem_id_x();
}
SIMT_DEVICE uint32_t thread_count()
{
    return __builtin_amdgcn_workgroup_size_x();
}
SIMT_DEVICE uint32_t block_index()
{
    return __builtin_amdgcn_workgroup_id_x();
}
SIMT_DEVICE uint32_t block_count()
{
    return __builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x();
}

struct BlockBarrier {
    SIMT_DEVICE void sync() const
    {
        __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
        __builtin_amdgcn_s_barrier();
        __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
    }
};

// A block has one worker here, so its barrier is the block's.
struct WorkerBarrier {
    SIMT_DEVICE WorkerBarrier(uint32_t, uint32_t) {}
    SIMT_DEVICE void sync() const { BlockBarrier().sync(); }
};

// Lane in the wave, which is one lane group or two.
SIMT_DEVICE uint32_t wave_lane()
{
    return __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0));
}

SIMT_DEVICE void sync_lanes()
{
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}
// Lanes of the other group that came here, or not, are in the other half.
SIMT_DEVICE uint32_t ballot(bool p)
{
#if defined(__AMDGCN_WAVEFRONT_SIZE) && __AMDGCN_WAVEFRONT_SIZE == 32
    return __builtin_amdgcn_ballot_w32(p);
#else
    const uint64_t wave = __builtin_amdgcn_ballot_w64(p);
    return uint32_t(wave >> (wave_lane() & LANES));
#endif
}
SIMT_DEVICE bool any(bool p)
{
    return ballot(p) != 0;
}
// ds_bpermute takes the lane of the wave times 4.
SIMT_DEVICE uint32_t shuffle(uint32_t v, uint32_t lane)
{
    const uint32_t from = (wave_lane() & LANES) | lane % LANES;
    return uint32_t(__builtin_amdgcn_ds_bpermute(int(from * 4), int(v)));
}
SIMT_DEVICE uint32_t add_up(uint32_t v, uint32_t d)
{
    const uint32_t own = wave_lane() % LANES, below = shuffle(v, own >= d ? own - d : own);
    return own >= d ? v + below : v;
}
SIMT_DEVICE uint32_t shuffle_xor(uint32_t v, uint32_t m)
{
    return shuffle(v, wave_lane() ^ m);
}
SIMT_DEVICE uint32_t max_all(uint32_t v)
{
    SIMT_UNROLL
    for (uint32_t d = 1; d < LANES; d *= 2) {
        const uint32_t other = shuffle_xor(v, d);
        v = other > v ? other : v;
    }
    return v;
}

SIMT_DEVICE uint32_t byte_perm(uint32_t a, uint32_t b, uint32_t selector)
{
    // the instruction has a byte for each of the selector's nibbles, and other words for signs
    uint32_t s = selector & 0xffff;
    s = (s | s << 8) & 0x00ff00ff;
    s = (s | s << 4) & 0x0f0f0f0f;
    const uint32_t picked = __builtin_amdgcn_perm(b, a, s & 0x07070707);
    const uint32_t sign = (s >> 3 & 0x01010101) * 255; // bytes that want a sign
    return (picked & ~sign) | ((picked >> 7 & 0x01010101) * 255 & sign);
}
SIMT_DEVICE uint32_t funnel_left(uint32_t lo, uint32_t hi, uint32_t n)
{
    return uint32_t((uint64_t(hi) << 32 | lo) << (n & 31) >> 32);
}
SIMT_DEVICE uint32_t funnel_right(uint32_t lo, uint32_t hi, uint32_t n)
{
    return __builtin_amdgcn_alignbit(hi, lo, n & 31);
}
SIMT_DEVICE uint32_t popcount(uint32_t v)
{
    return uint32_t(__builtin_popcount(v));
}
SIMT_DEVICE uint32_t find_first(uint32_t v)
{
    return uint32_t(__builtin_ctz(v));
}

SIMT_DEVICE uint32_t select(uint32_t mask, uint32_t a, uint32_t b)
{
    return (a & mask) | (b & ~mask);
}
SIMT_DEVICE uint32_t lookup_word(const uint32_t *table, uint32_t word, uint32_t k, uint32_t)
{
    return table[word >> (8 * k) & 255];
}
SIMT_DEVICE uint32_t lookup_byte(const uint8_t *table, uint32_t word, uint32_t k)
{
    return table[word >> (8 * k) & 255];
}

SIMT_DEVICE uint32_t atomic_add_shared(uint32_t *p, uint32_t v)
{
    return __hip_atomic_fetch_add(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}
SIMT_DEVICE uint32_t atomic_or_shared(uint32_t *p, uint32_t v)
{
    return __hip_atomic_fetch_or(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}
SIMT_DEVICE uint32_t atomic_max_shared(uint32_t *p, uint32_t v)
{
    return __hip_atomic_fetch_max(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}

SIMT_DEVICE void copy_async_16(void *shared, const void *global, uint32_t bytes)
{
    const auto *const from = static_cast<const uint8_t *>(global);
    if (bytes == 16) {
        *static_cast<U32x4 *>(shared) = *reinterpret_cast<const U32x4 *>(from);
        return;
    }
    for (uint32_t i = 0; i < 16; ++i)
        static_cast<uint8_t *>(shared)[i] = i < bytes ? from[i] : 0;
}
SIMT_DEVICE void copy_async_wait() {}

// T as a type that the builtins for streams take.
template <class T>
struct Native {
    using type = T;
};
template <>
struct Native<U32x2> {
    typedef uint32_t type __attribute__((ext_vector_type(2)));
};
template <>
struct Native<U32x4> {
    typedef uint32_t type __attribute__((ext_vector_type(4)));
};

template <class T>
SIMT_DEVICE T load_stream(const T *p)
{
    const auto v =
            __builtin_nontemporal_load(reinterpret_cast<const typename Native<T>::type *>(p));
    T r;
    static_assert(sizeof r == sizeof v);
    __builtin_memcpy(&r, &v, sizeof r);
    return r;
}
template <class T>
SIMT_DEVICE void store_stream(T *p, std::type_identity_t<T> v)
{
    typename Native<T>::type n;
    static_assert(sizeof n == sizeof v);
    __builtin_memcpy(&n, &v, sizeof n);
    __builtin_nontemporal_store(n, reinterpret_cast<typename Native<T>::type *>(p));
}
template <class T>
SIMT_DEVICE T load_hostile(const T *p)
{
    const typename Native<T>::type v =
            *reinterpret_cast<const volatile typename Native<T>::type *>(p);
    T r;
    __builtin_memcpy(&r, &v, sizeof r);
    return r;
}

SIMT_DEVICE void prefetch(const void *) {}

SIMT_DEVICE uint64_t atomic_add(uint64_t *p, uint64_t v)
{
    return __hip_atomic_fetch_add(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
SIMT_DEVICE void add_release(uint64_t *p, uint64_t v)
{
    __hip_atomic_fetch_add(p, v, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_AGENT);
}
SIMT_DEVICE uint64_t load_acquire(const uint64_t *p)
{
    return __hip_atomic_load(p, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_AGENT);
}
SIMT_DEVICE void publish(uint64_t *p, uint64_t v)
{
    __hip_atomic_store(p, v, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
}

// A sum of two bf16, rounded to fp32 and then to bf16, is what it is rounded once: fp32 has more
// than twice bf16's digits and two.
SIMT_DEVICE uint32_t add_bf16(uint32_t a, uint32_t b)
{
    const float sum = __builtin_bit_cast(float, a << 16) + __builtin_bit_cast(float, b << 16);
    const uint32_t bits = __builtin_bit_cast(uint32_t, sum);
    if (sum != sum)
        return bits >> 16 | 0x40; // quiet, and not an infinity
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
SIMT_DEVICE uint32_t add_bf16x2(uint32_t a, uint32_t b)
{
    return add_bf16(a & 0xffff, b & 0xffff) | add_bf16(a >> 16, b >> 16) << 16;
}
SIMT_DEVICE uint32_t add_fp16x2(uint32_t a, uint32_t b)
{
    typedef _Float16 Half2 __attribute__((ext_vector_type(2)));
    return __builtin_bit_cast(uint32_t,
                              __builtin_bit_cast(Half2, a) + __builtin_bit_cast(Half2, b));
}
SIMT_DEVICE uint32_t add_fp32(uint32_t a, uint32_t b)
{
    return __builtin_bit_cast(uint32_t,
                              __builtin_bit_cast(float, a) + __builtin_bit_cast(float, b));
}

} // namespace zip::simt
#endif
