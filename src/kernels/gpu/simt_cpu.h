// SPDX-License-Identifier: BSD-3-Clause
// simt.h on a CPU, for tests: threads are fibres of an executor (test/simt/executor.h), which runs
// them in random order and reports what the contract forbids.
#ifndef ZIP_KERNELS_GPU_SIMT_CPU_H
#define ZIP_KERNELS_GPU_SIMT_CPU_H

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <source_location>
#include <type_traits>

#define SIMT_DEVICE inline
#define SIMT_CONSTANT
#define SIMT_TABLE static const
#define SIMT_KERNEL(name, threads, min_blocks) SIMT_KERNEL_OF(name, threads) // expands `name`
#define SIMT_KERNEL_OF(name, threads)                                                              \
    extern "C" void name(const zip::gpu::Launch &launch);                                          \
    static const zip::simt::cpu::KernelEntry name##_entry(#name, name, threads);                   \
    extern "C" void name([[maybe_unused]] const zip::gpu::Launch &launch)
#define SIMT_SHARED(Type, name)                                                                    \
    static_assert(std::is_trivially_default_constructible_v<Type>);                                \
    static const char name##_key = 0;                                                              \
    Type &name = *static_cast<Type *>(                                                             \
            zip::simt::cpu::shared_variable(&name##_key, sizeof(Type), alignof(Type)))
#define SIMT_DYNAMIC_SHARED(Type, name)                                                            \
    static_assert(std::is_trivially_default_constructible_v<Type>);                                \
    Type *const name =                                                                             \
            static_cast<Type *>(zip::simt::cpu::dynamic_shared(sizeof(Type), alignof(Type)))
#define SIMT_UNROLL

namespace zip::simt {

constexpr bool NAMED_BARRIERS = true;

// The executor's side, defined in test/simt/executor.cc.
namespace cpu {

using Place = std::source_location;
enum class Collective { SYNC, ANY, BALLOT, SHUFFLE, ADD_UP, SHUFFLE_XOR, MAX_ALL };

struct ThreadPlace {
    uint32_t thread, threads, block, blocks;
};
// Of the fibre that runs.
ThreadPlace thread_place();
void *shared_variable(const void *key, size_t size, size_t align);
void *dynamic_shared(size_t bytes_of_worker, size_t align);
uint32_t collective(Collective op, uint32_t value, uint32_t argument, Place place);
void barrier(uint32_t id, uint32_t threads, Place place); // threads 0: all of the block
// Another fibre may run here.
void preemption_point();
void copy_async(void *shared, const void *global, uint32_t bytes, Place place);
void copy_async_wait();
// Ends the launch with an error.
[[noreturn]] void fail(const char *text, Place place);

// The kernels of the program by name.
struct KernelEntry {
    using Function = void(const gpu::Launch &);
    KernelEntry(const char *kernel_name, Function *kernel, uint32_t block_threads);
    const char *name;
    Function *function;
    uint32_t threads;
    const KernelEntry *next;
};

inline void check_aligned(const void *p, size_t align, Place place)
{
    if (reinterpret_cast<uintptr_t>(p) % align != 0)
        fail("misaligned address", place);
}

// The sum of two numbers with an exponent of `exponent_bits` and a mantissa of `mantissa_bits`,
// rounded once. As a double the sum is exact unless the smaller number is far below half a unit of
// the larger's last place, and then so is its error.
template <uint32_t exponent_bits, uint32_t mantissa_bits>
uint32_t add_small(uint32_t a, uint32_t b)
{
    constexpr int BIAS = (1 << (exponent_bits - 1)) - 1;
    constexpr uint32_t INFINITE = ((1u << exponent_bits) - 1) << mantissa_bits;
    constexpr uint32_t SIGN = 1u << (exponent_bits + mantissa_bits);
    constexpr int LEAST = 1 - BIAS - int(mantissa_bits); // exponent of the smallest number
    auto wide = [](uint32_t v) {
        const uint32_t e = (v & INFINITE) >> mantissa_bits, m = v & ((1u << mantissa_bits) - 1);
        double d = e == INFINITE >> mantissa_bits
                           ? (m != 0 ? std::nan("") : HUGE_VAL)
                           : std::ldexp(double(e != 0 ? m | 1u << mantissa_bits : m),
                                        int(e != 0 ? e : 1) - BIAS - int(mantissa_bits));
        return (v & SIGN) != 0 ? -d : d;
    };
    const double sum = wide(a) + wide(b);
    if (std::isnan(sum))
        return INFINITE | 1u << (mantissa_bits - 1);
    const uint32_t sign = std::signbit(sum) ? SIGN : 0;
    if (std::isinf(sum))
        return sign | INFINITE;
    if (sum == 0)
        return sign;
    // in units of the result's last place: rint rounds to nearest even
    const int unit = std::max(std::ilogb(sum) - int(mantissa_bits), LEAST);
    const uint32_t units = uint32_t(std::rint(std::ldexp(std::fabs(sum), -unit)));
    // a carry out of the mantissa steps into the exponent's bits; the smallest normal number has
    // exponent 1 and the unit of denormals
    const uint32_t r = (uint32_t(unit - LEAST) << mantissa_bits) + units;
    return sign | (r >= INFINITE ? INFINITE : r);
}

} // namespace cpu

inline uint32_t thread_index()
{
    return cpu::thread_place().thread;
}
inline uint32_t thread_count()
{
    return cpu::thread_place().threads;
}
inline uint32_t block_index()
{
    return cpu::thread_place().block;
}
inline uint32_t block_count()
{
    return cpu::thread_place().blocks;
}

struct BlockBarrier {
    void sync(cpu::Place place = cpu::Place::current()) const { cpu::barrier(0, 0, place); }
};
struct WorkerBarrier {
    uint32_t id, threads;
    WorkerBarrier(uint32_t own_id, uint32_t own_threads) : id(own_id), threads(own_threads) {}
    void sync(cpu::Place place = cpu::Place::current()) const { cpu::barrier(id, threads, place); }
};

inline void sync_lanes(cpu::Place place = cpu::Place::current())
{
    cpu::collective(cpu::Collective::SYNC, 0, 0, place);
}
inline bool any(bool p, cpu::Place place = cpu::Place::current())
{
    return cpu::collective(cpu::Collective::ANY, p, 0, place) != 0;
}
inline uint32_t ballot(bool p, cpu::Place place = cpu::Place::current())
{
    return cpu::collective(cpu::Collective::BALLOT, p, 0, place);
}
inline uint32_t shuffle(uint32_t v, uint32_t lane, cpu::Place place = cpu::Place::current())
{
    return cpu::collective(cpu::Collective::SHUFFLE, v, lane, place);
}
inline uint32_t add_up(uint32_t v, uint32_t d, cpu::Place place = cpu::Place::current())
{
    return cpu::collective(cpu::Collective::ADD_UP, v, d, place);
}
inline uint32_t max_all(uint32_t v, cpu::Place place = cpu::Place::current())
{
    return cpu::collective(cpu::Collective::MAX_ALL, v, 0, place);
}
inline uint32_t shuffle_xor(uint32_t v, uint32_t m, cpu::Place place = cpu::Place::current())
{
    return cpu::collective(cpu::Collective::SHUFFLE_XOR, v, m, place);
}

inline uint32_t byte_perm(uint32_t a, uint32_t b, uint32_t selector)
{
    const uint64_t both = uint64_t(b) << 32 | a;
    uint32_t r = 0;
    for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t s = selector >> (4 * i) & 15;
        uint32_t byte = uint32_t(both >> (8 * (s & 7))) & 255;
        if ((s & 8) != 0)
            byte = (byte & 128) != 0 ? 255 : 0;
        r |= byte << (8 * i);
    }
    return r;
}
inline uint32_t funnel_left(uint32_t lo, uint32_t hi, uint32_t n)
{
    return uint32_t(((uint64_t(hi) << 32 | lo) << (n & 31)) >> 32);
}
inline uint32_t funnel_right(uint32_t lo, uint32_t hi, uint32_t n)
{
    return uint32_t((uint64_t(hi) << 32 | lo) >> (n & 31));
}
inline uint32_t popcount(uint32_t v)
{
    return uint32_t(std::popcount(v));
}
inline uint32_t find_first(uint32_t v)
{
    return uint32_t(std::countr_zero(v));
}

inline uint32_t select(uint32_t mask, uint32_t a, uint32_t b)
{
    return (a & mask) | (b & ~mask);
}
inline uint32_t lookup_word(const uint32_t *table, uint32_t word, uint32_t k, uint32_t four)
{
    return table[(word >> (8 * k) & 255) * four / 4];
}
inline uint32_t lookup_byte(const uint8_t *table, uint32_t word, uint32_t k,
                            cpu::Place place = cpu::Place::current())
{
    cpu::check_aligned(table, 256, place);
    return table[word >> (8 * k) & 255];
}

inline uint32_t atomic_add_shared(uint32_t *p, uint32_t v)
{
    cpu::preemption_point();
    const uint32_t old = *p;
    *p += v;
    return old;
}
inline uint32_t atomic_or_shared(uint32_t *p, uint32_t v)
{
    cpu::preemption_point();
    const uint32_t old = *p;
    *p |= v;
    return old;
}
inline uint32_t atomic_max_shared(uint32_t *p, uint32_t v)
{
    cpu::preemption_point();
    const uint32_t old = *p;
    *p = std::max(old, v);
    return old;
}

inline void copy_async_16(void *shared, const void *global, uint32_t bytes,
                          cpu::Place place = cpu::Place::current())
{
    cpu::copy_async(shared, global, bytes, place);
}
inline void copy_async_wait()
{
    cpu::copy_async_wait();
}

template <class T>
T load_stream(const T *p, cpu::Place place = cpu::Place::current())
{
    cpu::check_aligned(p, sizeof(T), place);
    return *p;
}
template <class T>
void store_stream(T *p, std::type_identity_t<T> v, cpu::Place place = cpu::Place::current())
{
    cpu::check_aligned(p, sizeof(T), place);
    *p = v;
}
template <class T>
T load_hostile(const T *p, cpu::Place place = cpu::Place::current())
{
    cpu::check_aligned(p, sizeof(T), place);
    cpu::preemption_point();
    T v;
    std::memcpy(&v, p, sizeof v);
    std::atomic_signal_fence(std::memory_order_seq_cst); // what was loaded is not loaded again
    return v;
}

inline void prefetch(const void *) {}

inline uint64_t atomic_add(uint64_t *p, uint64_t v, cpu::Place place = cpu::Place::current())
{
    cpu::check_aligned(p, sizeof *p, place);
    cpu::preemption_point();
    return __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
}
inline void add_release(uint64_t *p, uint64_t v, cpu::Place place = cpu::Place::current())
{
    cpu::check_aligned(p, sizeof *p, place);
    cpu::preemption_point();
    __atomic_fetch_add(p, v, __ATOMIC_RELEASE);
}
inline uint64_t load_acquire(const uint64_t *p, cpu::Place place = cpu::Place::current())
{
    cpu::check_aligned(p, sizeof *p, place);
    cpu::preemption_point();
    return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
inline void publish(uint64_t *p, uint64_t v, cpu::Place place = cpu::Place::current())
{
    cpu::check_aligned(p, sizeof *p, place);
    cpu::preemption_point();
    __atomic_store_n(p, v, __ATOMIC_RELEASE);
}

inline uint32_t add_bf16x2(uint32_t a, uint32_t b)
{
    return cpu::add_small<8, 7>(a & 0xffff, b & 0xffff) | cpu::add_small<8, 7>(a >> 16, b >> 16)
                                                                  << 16;
}
inline uint32_t add_fp16x2(uint32_t a, uint32_t b)
{
    return cpu::add_small<5, 10>(a & 0xffff, b & 0xffff) | cpu::add_small<5, 10>(a >> 16, b >> 16)
                                                                   << 16;
}
inline uint32_t add_fp32(uint32_t a, uint32_t b)
{
    return std::bit_cast<uint32_t>(std::bit_cast<float>(a) + std::bit_cast<float>(b));
}

} // namespace zip::simt
#endif
