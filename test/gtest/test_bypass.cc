// SPDX-License-Identifier: BSD-3-Clause
// The bypass learns which way is faster, tries the other one seldom, and follows changes.
#include "uct/zip/zip_bypass.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <vector>

namespace zip {
namespace {

constexpr size_t MIB = size_t(1) << 20;

// Two servers that do one operation after the other, `window` of them posted at a time. A wire that
// both ways share: what one does the other waits for.
class Link {
public:
    explicit Link(unsigned window = 1) : window_(window) {}

    // Runs `count` operations; returns how many went coded.
    unsigned run(Bypass &bypass, unsigned count, size_t length, double ratio, double coded,
                 double straight)
    {
        unsigned went_coded = 0;
        for (unsigned i = 0; i < count; ++i) {
            while (under_way_.size() >= window_) {
                finish(bypass);
            }
            const Way way = bypass.choose(length, ratio);
            went_coded += way == Way::CODED;
            const double rate = way == Way::CODED ? coded : straight;
            free_at_ = std::max(free_at_, now_) + static_cast<double>(length) / rate;
            under_way_.push_back({way, length, ratio, now_, free_at_});
        }
        return went_coded;
    }
    void finish(Bypass &bypass)
    {
        const Operation first = under_way_.front();
        under_way_.pop_front();
        now_ = first.done;
        bypass.end(first.way, first.length, first.ratio, first.posted, first.done);
    }
    double now() const { return now_; }

private:
    struct Operation {
        Way way;
        size_t length;
        double ratio, posted, done;
    };
    unsigned window_;
    double now_ = 1, free_at_ = 0;
    std::deque<Operation> under_way_;
};

TEST(Bypass, TakesTheFasterWay)
{
    for (unsigned window : {1, 8, 32}) {
        Bypass slow_wire(0, 0), fast_wire(0, 0);
        Link a(window), b(window);
        EXPECT_GE(a.run(slow_wire, 2000, MIB, 0.67, 1.4e9, 1e9), 1850u) << window;
        EXPECT_LE(b.run(fast_wire, 2000, MIB, 0.67, 1e9, 3e9), 150u) << window;
    }
}

TEST(Bypass, TrialsCostLessThanOnePercent)
{
    for (unsigned window : {1, 8}) {
        for (double loss : {1.05, 1.5, 3.0, 10.0}) {
            Bypass bypass(0, 0);
            Link link(window);
            link.run(bypass, 500, MIB, 0.67, 1e9, 1e9 * loss); // has learned
            const double start = link.now();
            const unsigned coded = link.run(bypass, 50000, MIB, 0.67, 1e9, 1e9 * loss);
            const double best = 50000.0 * MIB / (1e9 * loss);
            EXPECT_GT(coded, 0u) << "never tries again";
            EXPECT_LT(link.now() - start, best * 1.01) << loss << ", " << window;
        }
    }
}

TEST(Bypass, FollowsAChange)
{
    Bypass bypass(0, 0);
    Link link(4);
    link.run(bypass, 500, MIB, 0.67, 1.4e9, 1e9);
    link.run(bypass, 5000, MIB, 0.67, 1.4e9, 4e9); // the wire is free now
    EXPECT_LE(link.run(bypass, 1000, MIB, 0.67, 1.4e9, 4e9), 100u);
}

TEST(Bypass, OneSlowOperationDecidesNothing)
{
    Bypass bypass(0, 0);
    Link link;
    link.run(bypass, 300, MIB, 0.67, 1.4e9, 1e9);
    link.run(bypass, 1, MIB, 0.67, 1e6, 1e6); // a second: preempted
    EXPECT_GE(link.run(bypass, 100, MIB, 0.67, 1.4e9, 1e9), 60u);
}

TEST(Bypass, SizesAndKindsOfDataAreApart)
{
    Bypass bypass(0, 0);
    Link link(4);
    for (unsigned round = 0; round < 100; ++round) {
        link.run(bypass, 4, 4 * MIB, 0.67, 1.4e9, 1e9);
        link.run(bypass, 4, MIB / 16, 0.67, 0.5e9, 1e9);
        link.run(bypass, 4, 4 * MIB, 0.84, 0.8e9, 1e9);
    }
    EXPECT_GE(link.run(bypass, 100, 4 * MIB, 0.67, 1.4e9, 1e9), 80u);
    EXPECT_LE(link.run(bypass, 100, MIB / 16, 0.67, 0.5e9, 1e9), 30u);
    EXPECT_LE(link.run(bypass, 100, 4 * MIB, 0.84, 0.8e9, 1e9), 20u);
}

TEST(Bypass, GoesByTheNearestSizeThatIsKnown)
{
    Bypass bypass(0, 0);
    Link link;
    link.run(bypass, 200, MIB, 0.67, 1e9, 3e9);
    EXPECT_LE(link.run(bypass, 20, 16 * MIB, 0.67, 1e9, 3e9), 8u);
}

TEST(Bypass, ASizeThatComesSeldomCostsLittle)
{
    Bypass bypass(0, 0);
    Link link(8);
    double best = 0;
    const double start = link.now();
    for (unsigned round = 0; round < 2000; ++round) {
        link.run(bypass, 19, MIB / 4, 0.67, 1e9, 3e9);
        link.run(bypass, 1, 4 * MIB, 0.67, 1e9, 3e9);
        best += (19 * 0.25 + 4) * static_cast<double>(MIB) / 3e9;
    }
    EXPECT_LT(link.now() - start, best * 1.03);
}

// Many ends are noticed at once: their times are nothing, one by one.
TEST(Bypass, EndsThatComeTogetherAreOneSample)
{
    Bypass bypass(0, 0);
    double now = 1;
    for (unsigned i = 0; i < 400; ++i) {
        std::vector<Way> ways;
        double work = 0;
        for (unsigned j = 0; j < 8; ++j) {
            ways.push_back(bypass.choose(MIB, 0.67));
            work += static_cast<double>(MIB) / (ways.back() == Way::CODED ? 1e9 : 1.5e9);
        }
        const double posted = now;
        now += work;
        for (Way way : ways) {
            bypass.end(way, MIB, 0.67, posted, now);
        }
    }
    unsigned coded = 0;
    for (unsigned i = 0; i < 40; ++i) {
        const Way way = bypass.choose(MIB, 0.67);
        coded += way == Way::CODED;
        bypass.end(way, MIB, 0.67, now, now + 1e-3);
        now += 1e-3;
    }
    EXPECT_LE(coded, 8u);
}

TEST(Bypass, StartsWithWhatIsExpected)
{
    Bypass slow_wire(1e9, 4e9), fast_wire(10e9, 4e9), unknown(0, 4e9), noise(1e9, 4e9);
    EXPECT_EQ(Way::CODED, slow_wire.choose(MIB, 0.67));
    EXPECT_EQ(Way::STRAIGHT, fast_wire.choose(MIB, 0.67));
    EXPECT_EQ(Way::STRAIGHT, noise.choose(MIB, 1.0));
    EXPECT_EQ(Way::CODED, unknown.choose(MIB, 0.67));
}

TEST(Bypass, TakesAnySizeAndAnyTime)
{
    Bypass bypass(0, 0);
    for (size_t length : {size_t(0), size_t(1), MIB, size_t(1) << 40, SIZE_MAX}) {
        for (double end : {0.0, 1e-9, 1e9}) {
            const Way way = bypass.choose(length, 0.67);
            bypass.end(way, length, 0.67, 1.0, end);
            bypass.drop(bypass.choose(length, 1.0), end);
        }
    }
}

// ---- of GPU memory

// Operations one after the other on a wire of `real` bytes a second, where coding takes `coding`
// seconds beside the wire's time. Returns how many of the last half were coded.
unsigned gpu_coded(GpuBypass &bypass, size_t length, double real, double coding, unsigned count)
{
    unsigned coded = 0;
    for (unsigned i = 0; i < count; ++i) {
        const Way way = bypass.choose(length, 0.67, 0);
        const double on_wire = static_cast<double>(length) / real;
        bypass.end(way, length, 0.67, false, i,
                   i + (way == Way::CODED ? 0.67 * on_wire + coding : on_wire + 1e-5));
        coded += i >= count / 2 && way == Way::CODED;
    }
    return coded;
}

TEST(GpuBypass, CodesWhatTheWireTakesLongFor)
{
    GpuBypass bypass(50e9);
    EXPECT_EQ(Way::STRAIGHT, bypass.choose(MIB, 0.67, 0));
    EXPECT_EQ(Way::CODED, bypass.choose(64 * MIB, 0.67, 0));
    EXPECT_EQ(Way::STRAIGHT, bypass.choose(64 * MIB, 1.0, 0)) << "does not shrink";
    EXPECT_EQ(Way::CODED, bypass.choose(MIB, 0.67, 64 * MIB)) << "others hide what it takes";
    EXPECT_EQ(Way::CODED, GpuBypass(0).choose(MIB, 0.67, 0)) << "nothing is known of the wire";
}

TEST(GpuBypass, StaysWithWhatGains)
{
    GpuBypass bypass(50e9);
    EXPECT_GE(gpu_coded(bypass, 64 * MIB, 50e9, 50e-6, 1000), 495u);
}

TEST(GpuBypass, LeavesWhatLosesAfterAFew)
{
    GpuBypass bypass(50e9);
    EXPECT_LE(gpu_coded(bypass, 64 * MIB, 50e9, 1e-3, 400), 20u);
}

TEST(GpuBypass, OneSlowOperationIsNotALoss)
{
    GpuBypass bypass(50e9);
    gpu_coded(bypass, 64 * MIB, 50e9, 50e-6, 20);
    bypass.end(Way::CODED, 64 * MIB, 0.67, false, 20, 21);
    EXPECT_EQ(Way::CODED, bypass.choose(64 * MIB, 0.67, 0));
}

TEST(GpuBypass, ASlowStartIsNotALoss)
{
    // what is cold at first takes five times as long: staging memory, kernels, each buffer's probe
    constexpr double BYTES = 8 * MIB, WIRE = 25e9;
    GpuBypass bypass(WIRE);
    unsigned coded = 0;
    for (unsigned i = 0; i < 60; ++i) {
        const Way way = bypass.choose(8 * MIB, 0.67, 0);
        const double cold = i < 5 ? 5 : 1;
        bypass.end(
                way, 8 * MIB, 0.67, false, i,
                i + cold * (way == Way::CODED ? 0.67 * BYTES / WIRE + 45e-6 : BYTES / WIRE + 1e-5));
        coded += i >= 30 && way == Way::CODED;
    }
    EXPECT_EQ(30u, coded);
}

TEST(GpuBypass, LearnsThatTheWireIsFasterThanUcxBelieves)
{
    GpuBypass bypass(10e9);
    EXPECT_EQ(Way::CODED, bypass.choose(4 * MIB, 0.67, 0));
    gpu_coded(bypass, 256 * MIB, 400e9, 50e-6, 60);
    EXPECT_GT(bypass.wire(), 250e9);
    EXPECT_EQ(Way::STRAIGHT, bypass.choose(4 * MIB, 0.67, 0));
}

TEST(GpuBypass, LeavesAWireThatIsFasterThanTheGpu)
{
    // 700 GB/s where 150 are believed: what is coded takes as long as at 220, whatever the wire
    GpuBypass bypass(150e9);
    unsigned coded = 0;
    for (unsigned i = 0; i < 200; ++i) {
        const auto bytes = static_cast<double>(256 * MIB);
        const Way way = bypass.choose(256 * MIB, 0.67, 0);
        coded += i >= 6 && way == Way::CODED;
        bypass.end(way, 256 * MIB, 0.67, false, i,
                   i + (way == Way::CODED ? bytes / 220e9 : bytes / 700e9 + 1e-5));
    }
    EXPECT_LE(coded, 12u) << "two each time that it is tried again";
}

// Four operations at a time on a wire of `real` bytes a second, where coded ones go through at
// `coding` bytes a second at most. Returns how many of the last half were coded.
unsigned gpu_coded_among_others(GpuBypass &bypass, size_t length, double real, double coding,
                                unsigned count)
{
    const auto bytes = static_cast<double>(length);
    std::deque<std::pair<Way, double>> under_way; // when posted
    double now = 1;
    unsigned coded = 0;
    for (unsigned i = 0; i < count; ++i) {
        const Way way = bypass.choose(length, 0.67, under_way.size() * length);
        coded += i >= count / 2 && way == Way::CODED;
        under_way.emplace_back(way, now);
        if (under_way.size() < 4) {
            continue;
        }
        const auto [ended, posted] = under_way.front();
        under_way.pop_front();
        now += ended == Way::CODED ? std::max(0.67 * bytes / real, bytes / coding) : bytes / real;
        bypass.end(ended, length, 0.67, true, posted, now);
    }
    return coded;
}

TEST(GpuBypass, AmongOthersStaysWithWhatGains)
{
    GpuBypass bypass(50e9);
    EXPECT_GE(gpu_coded_among_others(bypass, 16 * MIB, 50e9, 1e12, 2000), 980u);
}

TEST(GpuBypass, AmongOthersLeavesWhatLoses)
{
    GpuBypass bypass(50e9);
    EXPECT_LE(gpu_coded_among_others(bypass, 16 * MIB, 50e9, 12e9, 4000), 60u);
}

TEST(GpuBypass, AmongOthersLearnsThatTheWireIsFaster)
{
    GpuBypass bypass(150e9);
    EXPECT_LE(gpu_coded_among_others(bypass, 64 * MIB, 400e9, 220e9, 4000), 60u);
    EXPECT_GT(bypass.wire(), 300e9);
}

TEST(GpuBypass, LearnsThatTheWireIsSlower)
{
    GpuBypass bypass(200e9);
    EXPECT_EQ(Way::STRAIGHT, bypass.choose(8 * MIB, 0.67, 0));
    gpu_coded(bypass, 8 * MIB, 10e9, 50e-6, 60);
    EXPECT_EQ(Way::CODED, bypass.choose(8 * MIB, 0.67, 0));
}

TEST(GpuBypass, TakesAnySizeAndAnyTime)
{
    GpuBypass bypass(0);
    for (size_t length : {size_t(0), size_t(1), MIB, size_t(1) << 40, SIZE_MAX}) {
        for (double seconds : {0.0, 1e-9, 1e9}) {
            for (bool queued : {false, true}) {
                bypass.end(bypass.choose(length, 0.67, queued ? SIZE_MAX : 0), length, 0.67, queued,
                           1.0, 1.0 + seconds);
            }
        }
    }
}

} // namespace
} // namespace zip
