// SPDX-License-Identifier: BSD-3-Clause
// The words of simt.h on the CPU, and what its executor must find: each forbidden thing is done
// once.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "simt/executor.h"

namespace {

using zip::gpu::Launch;
using namespace zip::simt;

constexpr uint32_t THREADS = 128;

// Kernels reach these by launch.table.
struct Words {
    std::vector<uint32_t> in, out;
};
const Words &words(const Launch &launch)
{
    return *reinterpret_cast<const Words *>(launch.table);
}
uint32_t &out(const Launch &launch)
{
    auto &w = const_cast<Words &>(words(launch));
    return w.out[block_index() * THREADS + thread_index()];
}
uint32_t in(const Launch &launch)
{
    return words(launch).in[block_index() * THREADS + thread_index()];
}

class Simt : public testing::TestWithParam<uint32_t> {
protected:
    // All blocks of `kernel`, with one seed after the other.
    void run(const char *kernel, uint32_t blocks = 5, uint32_t seeds = 8)
    {
        words_.in.resize(blocks * THREADS);
        std::mt19937 random(7);
        for (uint32_t &w : words_.in)
            w = random();
        for (seed_ = 1; seed_ <= seeds; ++seed_) {
            words_.out.assign(blocks * THREADS, 0);
            ASSERT_EQ("", error(kernel, blocks)) << "seed " << seed_;
            if (HasFatalFailure())
                return;
        }
    }
    std::string error(const char *kernel, uint32_t blocks = 1)
    {
        words_.in.resize(blocks * THREADS);
        words_.out.resize(blocks * THREADS);
        Launch launch{};
        launch.table = reinterpret_cast<const zip::gpu::TableItem *>(&words_);
        const cpu::KernelEntry *entry = cpu::find_kernel(kernel);
        return entry == nullptr ? "no such kernel"
                                : cpu::run(*entry, blocks, THREADS, launch, {GetParam(), seed_, 3});
    }
    // The error that some seed shows.
    std::string some_error(const char *kernel)
    {
        std::string text;
        for (seed_ = 1; seed_ <= 20 && text.empty(); ++seed_)
            text = error(kernel);
        return text;
    }
    // in[] of a lane of the group that thread i belongs to
    uint32_t lane_in(size_t i, uint32_t lane) const { return words_.in[i / LANES * LANES + lane]; }

    Words words_;
    uint64_t seed_ = 1;
};
INSTANTIATE_TEST_SUITE_P(Waves, Simt, testing::Values(32u, 64u),
                         [](const auto &p) { return "Of" + std::to_string(p.param); });

SIMT_KERNEL(place_kernel, THREADS, 1)
{
    out(launch) = block_count() << 24 | block_index() << 16 | lane_index() << 8 | thread_index();
}
TEST_P(Simt, ThreadsKnowTheirPlace)
{
    run("place_kernel");
    for (uint32_t i = 0; i < words_.out.size(); ++i)
        ASSERT_EQ(5u << 24 | i / THREADS << 16 | i % LANES << 8 | i % THREADS, words_.out[i]);
}

SIMT_KERNEL(ballot_kernel, THREADS, 1)
{
    out(launch) = ballot(in(launch) % 3 == 0);
}
TEST_P(Simt, BallotIsOfTheOwnLanes)
{
    run("ballot_kernel");
    for (size_t i = 0; i < words_.out.size(); ++i) {
        uint32_t expected = 0;
        for (uint32_t l = 0; l < LANES; ++l)
            expected |= uint32_t(lane_in(i, l) % 3 == 0) << l;
        ASSERT_EQ(expected, words_.out[i]);
    }
}

SIMT_KERNEL(any_kernel, THREADS, 1)
{
    out(launch) = any(in(launch) % 32 == 0) ? 1 : 2;
}
TEST_P(Simt, AnyIsOfTheOwnLanes)
{
    run("any_kernel");
    std::array<bool, 3> seen{};
    for (size_t i = 0; i < words_.out.size(); ++i) {
        bool expected = false;
        for (uint32_t l = 0; l < LANES; ++l)
            expected |= lane_in(i, l) % 32 == 0;
        ASSERT_EQ(expected ? 1u : 2u, words_.out[i]);
        seen[words_.out[i]] = true;
    }
    EXPECT_TRUE(seen[1] && seen[2]);
}

SIMT_KERNEL(shuffle_kernel, THREADS, 1)
{
    const uint32_t v = in(launch);
    const uint32_t a = shuffle(v, v >> 7), b = add_up(v, 3), c = shuffle_xor(v, 17), d = max_all(v);
    out(launch) = a ^ funnel_left(b, b, 5) ^ funnel_left(c, c, 11) ^ funnel_left(d, d, 23);
}
TEST_P(Simt, ShufflesMoveValuesBetweenOwnLanes)
{
    run("shuffle_kernel");
    for (size_t i = 0; i < words_.out.size(); ++i) {
        const uint32_t lane = i % LANES, v = words_.in[i];
        const uint32_t a = lane_in(i, (v >> 7) % LANES),
                       b = lane < 3 ? v : v + lane_in(i, lane - 3), c = lane_in(i, lane ^ 17);
        const auto first = std::begin(words_.in) + ptrdiff_t(i - lane);
        const uint32_t d = *std::max_element(first, first + LANES);
        ASSERT_EQ(a ^ std::rotl(b, 5) ^ std::rotl(c, 11) ^ std::rotl(d, 23), words_.out[i]);
    }
}

SIMT_KERNEL(diverged_kernel, THREADS, 1)
{
    // groups take different ways, and different numbers of turns
    uint32_t sum = 0;
    const uint32_t group = thread_index() / LANES;
    if (group % 2 == 0) {
        for (uint32_t i = 0; i <= group; ++i)
            sum += popcount(ballot(in(launch) >> i & 1));
    } else {
        sum = shuffle(in(launch), group);
    }
    BlockBarrier().sync();
    out(launch) = sum;
}
TEST_P(Simt, GroupsOfAWaveMayDiverge)
{
    run("diverged_kernel");
    for (size_t i = 0; i < words_.out.size(); ++i) {
        const uint32_t group = i % THREADS / LANES;
        uint32_t expected = 0;
        if (group % 2 == 0) {
            for (uint32_t k = 0; k <= group; ++k) {
                for (uint32_t l = 0; l < LANES; ++l)
                    expected += lane_in(i, l) >> k & 1;
            }
        } else {
            expected = lane_in(i, group);
        }
        ASSERT_EQ(expected, words_.out[i]);
    }
}

struct Exchange {
    alignas(16) uint32_t word[THREADS];
};
SIMT_KERNEL(exchange_kernel, THREADS, 1)
{
    SIMT_SHARED(Exchange, shared);
    shared.word[thread_index()] = in(launch);
    BlockBarrier().sync();
    out(launch) = shared.word[THREADS - 1 - thread_index()];
}
TEST_P(Simt, ABarrierOrdersSharedMemory)
{
    run("exchange_kernel");
    for (size_t i = 0; i < words_.out.size(); ++i)
        ASSERT_EQ(words_.in[i / THREADS * THREADS + THREADS - 1 - i % THREADS], words_.out[i]);
}

SIMT_KERNEL(dynamic_kernel, THREADS, 1)
{
    SIMT_DYNAMIC_SHARED(Exchange, shared);
    shared[0].word[thread_index()] = in(launch);
    BlockBarrier().sync();
    out(launch) = shared[0].word[thread_index() ^ 5];
}
TEST_P(Simt, DynamicSharedMemoryIsShared)
{
    run("dynamic_kernel");
    for (size_t i = 0; i < words_.out.size(); ++i)
        ASSERT_EQ(words_.in[i ^ 5], words_.out[i]);
}

SIMT_KERNEL(no_barrier_kernel, THREADS, 1)
{
    SIMT_SHARED(Exchange, shared);
    shared.word[thread_index()] = in(launch);
    out(launch) = shared.word[THREADS - 1 - thread_index()];
}
TEST_P(Simt, AMissingBarrierShows)
{
    run("no_barrier_kernel", 1, 1);
    size_t wrong = 0;
    for (size_t i = 0; i < words_.out.size(); ++i)
        wrong += words_.in[THREADS - 1 - i] != words_.out[i];
    EXPECT_GT(wrong, 0u);
}

SIMT_KERNEL(workers_kernel, THREADS, 1)
{
    SIMT_SHARED(Exchange, shared);
    const uint32_t worker = thread_index() / 64;
    const WorkerBarrier barrier{1 + worker, 64};
    // the workers use their barriers different numbers of times
    for (uint32_t i = 0; i <= worker * 2; ++i) {
        shared.word[thread_index()] = in(launch) + i;
        barrier.sync();
        out(launch) = shared.word[thread_index() ^ 63];
        barrier.sync();
    }
}
TEST_P(Simt, WorkersHaveBarriersOfTheirOwn)
{
    run("workers_kernel");
    for (size_t i = 0; i < words_.out.size(); ++i)
        ASSERT_EQ(words_.in[i ^ 63] + i % THREADS / 64 * 2, words_.out[i]);
}

SIMT_KERNEL(atomics_kernel, THREADS, 1)
{
    SIMT_SHARED(Exchange, shared);
    if (thread_index() < 3)
        shared.word[thread_index()] = 0;
    BlockBarrier().sync();
    const uint32_t old = atomic_add_shared(&shared.word[0], thread_index());
    atomic_or_shared(&shared.word[1], 1u << lane_index());
    atomic_max_shared(&shared.word[2], thread_index() ^ 21);
    BlockBarrier().sync();
    const bool right =
            old <= shared.word[0] && shared.word[1] == 0xffffffff && shared.word[2] == THREADS - 1;
    out(launch) = right ? shared.word[0] : 0;
}
TEST_P(Simt, SharedAtomicsAddUp)
{
    run("atomics_kernel");
    for (uint32_t v : words_.out)
        ASSERT_EQ(THREADS * (THREADS - 1) / 2, v);
}

SIMT_KERNEL(global_atomics_kernel, THREADS, 1)
{
    auto *total = reinterpret_cast<uint64_t *>(launch.states);
    const bool last = thread_index() == 0 && atomic_add(&total[1], 1) == block_count() - 1;
    atomic_add(&total[0], thread_index());
    BlockBarrier().sync();
    if (thread_index() != 0)
        return;
    if (!last)
        return add_release(&total[2], 1);
    while (load_acquire(&total[2]) != block_count() - 1)
        ;
    publish(&total[3], total[0]);
}
TEST_P(Simt, WhoWaitsForAllBlocksSeesWhatTheyAdded)
{
    for (uint64_t seed = 1; seed < 10; ++seed) {
        uint64_t total[4] = {};
        Launch launch{};
        launch.states = reinterpret_cast<zip::gpu::ChunkState *>(total);
        ASSERT_EQ("", cpu::run(*cpu::find_kernel("global_atomics_kernel"), 9, THREADS, launch,
                               {GetParam(), seed, 4}));
        EXPECT_EQ(9 * THREADS * (THREADS - 1) / 2, total[3]);
    }
}

SIMT_KERNEL(copy_kernel, THREADS, 1)
{
    SIMT_SHARED(Exchange, shared);
    const uint32_t thread = thread_index();
    if (thread % 4 == 0) // the block's last word is left out
        copy_async_16(&shared.word[thread], &words(launch).in[block_index() * THREADS + thread],
                      thread + 4 == THREADS ? 12 : 16);
    copy_async_wait();
    BlockBarrier().sync();
    out(launch) = shared.word[thread ^ 1];
}
TEST_P(Simt, AsynchronousCopiesArrive)
{
    run("copy_kernel");
    for (size_t i = 0; i < words_.out.size(); ++i)
        ASSERT_EQ(i % THREADS == THREADS - 2 ? 0 : words_.in[i ^ 1], words_.out[i]);
}

SIMT_KERNEL(early_read_kernel, THREADS, 1)
{
    SIMT_SHARED(Exchange, shared);
    const uint32_t first = thread_index() / 4 * 4;
    if (thread_index() == first)
        copy_async_16(&shared.word[first], &words(launch).in[first], 16);
    out(launch) = shared.word[thread_index()];
    copy_async_wait();
}
TEST_P(Simt, AReadBeforeTheCopyIsDoneShows)
{
    run("early_read_kernel", 1, 1);
    EXPECT_NE(words_.in, words_.out);
}

// ---- what is forbidden

SIMT_KERNEL(two_barriers_kernel, THREADS, 1)
{
    if (thread_index() < 64)
        BlockBarrier().sync();
    else
        BlockBarrier().sync();
}
TEST_P(Simt, ABarrierAtTwoPlacesIsAnError)
{
    EXPECT_NE(std::string::npos, error("two_barriers_kernel").find("while thread"));
}

SIMT_KERNEL(missing_thread_kernel, THREADS, 1)
{
    if (thread_index() != 77)
        BlockBarrier().sync();
}
TEST_P(Simt, ABarrierThatAThreadMissesIsADeadlock)
{
    const std::string text = error("missing_thread_kernel");
    EXPECT_NE(std::string::npos, text.find("deadlock")) << text;
    EXPECT_NE(std::string::npos, text.find("(127 threads)")) << text;
}

SIMT_KERNEL(missing_lane_kernel, THREADS, 1)
{
    if (lane_index() != 5)
        out(launch) = ballot(true);
}
TEST_P(Simt, ABallotThatALaneMissesIsAnError)
{
    const std::string text = error("missing_lane_kernel");
    EXPECT_TRUE(text.find("have ended") != std::string::npos ||
                text.find("ended, while") != std::string::npos)
            << text;
}

SIMT_KERNEL(two_operations_kernel, THREADS, 1)
{
    out(launch) = lane_index() < 5 ? ballot(true) : shuffle(1, 2);
}
TEST_P(Simt, LanesInDifferentOperationsAreAnError)
{
    EXPECT_NE(std::string::npos, error("two_operations_kernel").find("while lane"));
}

SIMT_KERNEL(lane_at_barrier_kernel, THREADS, 1)
{
    if (lane_index() == 0)
        BlockBarrier().sync();
    else
        out(launch) = ballot(true);
}
TEST_P(Simt, ALaneAtABarrierWhileOthersBallotIsADeadlock)
{
    EXPECT_NE(std::string::npos, error("lane_at_barrier_kernel").find("deadlock"));
}

SIMT_KERNEL(misaligned_kernel, THREADS, 1)
{
    const auto *bytes = reinterpret_cast<const uint8_t *>(words(launch).in.data());
    out(launch) = load_hostile(reinterpret_cast<const uint32_t *>(bytes + 1));
}
TEST_P(Simt, AMisalignedLoadIsAnError)
{
    EXPECT_NE(std::string::npos, error("misaligned_kernel").find("misaligned"));
}

SIMT_KERNEL(lost_copy_kernel, THREADS, 1)
{
    SIMT_SHARED(Exchange, shared);
    if (thread_index() % 4 == 0)
        copy_async_16(&shared.word[thread_index()], &words(launch).in[thread_index()], 16);
}
TEST_P(Simt, ACopyThatNobodyWaitsForIsAnError)
{
    EXPECT_NE(std::string::npos, some_error("lost_copy_kernel").find("copy_async_wait"));
}

SIMT_KERNEL(copy_to_global_kernel, THREADS, 1)
{
    if (thread_index() % 4 == 0)
        copy_async_16(&out(launch), &words(launch).in[thread_index()], 16);
    copy_async_wait();
}
TEST_P(Simt, ACopyToElsewhereThanSharedMemoryIsAnError)
{
    EXPECT_NE(std::string::npos, error("copy_to_global_kernel").find("not in shared memory"));
}

struct Large {
    uint8_t bytes[cpu::MAX_STATIC_SHARED + 1];
};
SIMT_KERNEL(large_kernel, THREADS, 1)
{
    SIMT_SHARED(Large, shared);
    out(launch) = shared.bytes[0];
}
TEST_P(Simt, MoreSharedMemoryThanABlockHasIsAnError)
{
    EXPECT_NE(std::string::npos, error("large_kernel").find("bytes of shared memory"));
}

SIMT_KERNEL(odd_worker_kernel, THREADS, 1)
{
    WorkerBarrier{1, 40}.sync();
}
TEST_P(Simt, AWorkerIsWholeWaves)
{
    EXPECT_NE(std::string::npos, error("odd_worker_kernel").find("no whole waves"));
}

SIMT_KERNEL(half_waves_kernel, THREADS, 1)
{
    const uint32_t group = thread_index() / LANES;
    WorkerBarrier{1 + group % 2, 64}.sync();
}
TEST_P(Simt, AWorkersBarrierMayNotSplitAWave)
{
    // two groups each, not of one wave of 64
    const std::string text = error("half_waves_kernel");
    if (GetParam() == 32)
        EXPECT_EQ("", text);
    else
        EXPECT_NE(std::string::npos, text.find("part of a wave")) << text;
}

SIMT_KERNEL(spin_kernel, THREADS, 1)
{
    // group 1 waits for group 0's word: no wave of 64 promises that group 0 ever runs meanwhile
    auto *word = reinterpret_cast<uint64_t *>(launch.states);
    if (thread_index() / LANES == 0)
        atomic_add(word, 1);
    else if (thread_index() / LANES == 1)
        while (load_hostile(word) == 0)
            ;
}
TEST_P(Simt, WaitingForTheOtherHalfOfAWaveMayNeverEnd)
{
    bool livelock = false;
    for (uint64_t seed = 1; seed < 8 && !livelock; ++seed) {
        uint64_t word = 0;
        Launch launch{};
        launch.states = reinterpret_cast<zip::gpu::ChunkState *>(&word);
        const std::string text = cpu::run(*cpu::find_kernel("spin_kernel"), 1, THREADS, launch,
                                          {GetParam(), seed, 1});
        livelock = text.find("livelock") != std::string::npos;
        EXPECT_TRUE(livelock || text.empty()) << text;
    }
    EXPECT_EQ(GetParam() == 64, livelock);
}

// ---- arithmetic

TEST(SimtBits, BytePermPicksBytesAndSigns)
{
    EXPECT_EQ(0x33221100u, byte_perm(0x33221100, 0x77665544, 0x3210));
    EXPECT_EQ(0x77331144u, byte_perm(0x33221100, 0x77665544, 0x7314));
    EXPECT_EQ(0x00ffff00u, byte_perm(0x33a2f100, 0x77665544, 0x8a9b));
    EXPECT_EQ(0x44444444u, byte_perm(0x33221100, 0x77665544, 0xabc4444u));
}

TEST(SimtBits, FunnelsTakeTheShiftModulo32)
{
    EXPECT_EQ(0x23456789u, funnel_left(0x9abcdef0, 0x12345678, 36));
    EXPECT_EQ(0x12345678u, funnel_left(0x9abcdef0, 0x12345678, 0));
    EXPECT_EQ(0x89abcdefu, funnel_right(0x9abcdef0, 0x12345678, 4));
    EXPECT_EQ(0x9abcdef0u, funnel_right(0x9abcdef0, 0x12345678, 32));
}

TEST(SimtBits, Counts)
{
    EXPECT_EQ(12u, popcount(0x00f0f0f0));
    EXPECT_EQ(4u, find_first(0x00f0f0f0));
    EXPECT_EQ(31u, find_first(0x80000000));
}

// The nearest number to a sum of bf16 numbers, by search among them all. fp32 sums of nearby
// exponents are exact, others are far from a tie.
uint32_t nearest_bf16(double sum)
{
    const uint32_t sign = std::signbit(sum) ? 0x8000 : 0;
    auto value = [](uint32_t v) {
        return v == 0x7f80 ? std::ldexp(1.0, 128) : double(std::bit_cast<float>(v << 16));
    };
    uint32_t low = 0, high = 0x7f80; // value(low) <= |sum| < value(high)
    if (std::fabs(sum) >= value(high))
        return sign | high;
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        (value(middle) <= std::fabs(sum) ? low : high) = middle;
    }
    const double below = std::fabs(sum) - value(low), above = value(high) - std::fabs(sum);
    return sign | (below < above || (below == above && low % 2 == 0) ? low : high);
}

TEST(SimtBits, Bf16SumsAreRoundedOnceToNearestEven)
{
    std::mt19937 random(3);
    auto close = [&](uint32_t v) { // another number with an exponent within 12 of v's
        const int e = int(v >> 7 & 255) + int(random() % 25) - 12;
        return (random() & 0x807f) | uint32_t(std::clamp(e, 0, 254)) << 7;
    };
    for (int i = 0; i < 200000; ++i) {
        uint32_t a = random() & 0xffff;
        if ((a >> 7 & 255) == 255)
            continue;
        const uint32_t b = close(a);
        const double sum = double(std::bit_cast<float>(a << 16)) + std::bit_cast<float>(b << 16);
        ASSERT_EQ(nearest_bf16(sum), add_bf16x2(a, b) & 0xffff) << std::hex << a << " + " << b;
        ASSERT_EQ(nearest_bf16(sum), add_bf16x2(a << 16, b << 16) >> 16);
    }
}

#ifdef __FLT16_MAX__
TEST(SimtBits, Fp16SumsAreTheCompilers)
{
    std::mt19937 random(4);
    for (int i = 0; i < 300000; ++i) {
        const uint32_t a = random(), b = i % 2 != 0 ? random() : a ^ (random() & 0x8c1f8c1f);
        const uint32_t sum = add_fp16x2(a, b);
        for (int half = 0; half < 32; half += 16) {
            const auto x = std::bit_cast<_Float16>(uint16_t(a >> half)),
                       y = std::bit_cast<_Float16>(uint16_t(b >> half));
            const auto expected = std::bit_cast<uint16_t>(_Float16(x + y));
            const auto got = uint16_t(sum >> half);
            if ((expected & 0x7fff) > 0x7c00)
                ASSERT_GT(got & 0x7fff, 0x7c00);
            else
                ASSERT_EQ(expected, got) << std::hex << a << " + " << b;
        }
    }
}
#endif

TEST(SimtBits, SumsOfSpecialNumbers)
{
    EXPECT_EQ(0x7f807f80u, add_bf16x2(0x7f803f80, 0x3f807f80)); // infinity + 1
    EXPECT_EQ(0x7f80ff80u, add_bf16x2(0x7f7fff7f, 0x7f7fff7f)); // overflow
    EXPECT_GT(add_bf16x2(0x7f80, 0xff80) & 0x7fff, 0x7f80u);    // infinity - infinity
    EXPECT_EQ(0x80000000u, add_bf16x2(0x80008000, 0x80000000)); // -0 + -0, -0 + 0
    EXPECT_EQ(0x00000002u, add_bf16x2(0x00000001, 0x00000001)); // denormals
    EXPECT_EQ(0x00800080u, add_bf16x2(0x007f0040, 0x00010040)); // the smallest normal
    EXPECT_EQ(0x00020400u, add_fp16x2(0x00010200, 0x00010200));
    EXPECT_EQ(0x7c007bffu, add_fp16x2(0x7bff7bff, 0x50000000)); // half a unit above the largest
    EXPECT_EQ(0x40400000u, add_fp32(0x3f800000, 0x40000000));
}

} // namespace
