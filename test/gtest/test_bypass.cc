// SPDX-License-Identifier: BSD-3-Clause
// The bypass learns which way is faster, tries the other one seldom, and follows changes.
#include "uct/zip/zip_bypass.h"

#include <gtest/gtest.h>

namespace zip {
namespace {

constexpr size_t MIB = size_t(1) << 20;

// Runs `count` operations over links of these speeds; returns how many went coded.
unsigned run(Bypass &bypass, unsigned count, size_t length, double ratio, double coded,
             double straight)
{
    unsigned went_coded = 0;
    for (unsigned i = 0; i < count; ++i) {
        const Way way = bypass.choose(length, ratio);
        went_coded += way == Way::CODED;
        bypass.record(way, length, ratio,
                      static_cast<double>(length) / (way == Way::CODED ? coded : straight));
    }
    return went_coded;
}

TEST(Bypass, TakesTheFasterWay)
{
    Bypass slow_wire(0, 0), fast_wire(0, 0);
    EXPECT_GE(run(slow_wire, 1000, MIB, 0.67, 1.4e9, 1e9), 970u);
    EXPECT_LE(run(fast_wire, 1000, MIB, 0.67, 1e9, 3e9), 30u);
}

TEST(Bypass, TrialsCostLessThanOnePercent)
{
    for (double loss : {1.05, 1.5, 3.0, 10.0}) {
        Bypass bypass(0, 0);
        run(bypass, 100, MIB, 0.67, 1e9, 1e9 * loss); // has learned
        const unsigned coded = run(bypass, 20000, MIB, 0.67, 1e9, 1e9 * loss);
        EXPECT_GT(coded, 0u) << "never tries again";
        EXPECT_LT(coded * (loss - 1) / 20000, 0.01) << loss;
    }
}

TEST(Bypass, FollowsAChange)
{
    Bypass bypass(0, 0);
    run(bypass, 200, MIB, 0.67, 1.4e9, 1e9);
    run(bypass, 2000, MIB, 0.67, 1.4e9, 4e9); // the wire is free now
    EXPECT_LE(run(bypass, 1000, MIB, 0.67, 1.4e9, 4e9), 50u);
}

TEST(Bypass, OneSlowOperationDecidesNothing)
{
    Bypass bypass(0, 0);
    run(bypass, 100, MIB, 0.67, 1.4e9, 1e9);
    bypass.record(Way::CODED, MIB, 0.67, 1.0); // a second: preempted
    EXPECT_GE(run(bypass, 20, MIB, 0.67, 1.4e9, 1e9), 18u);
}

TEST(Bypass, SizesAndKindsOfDataAreApart)
{
    Bypass bypass(0, 0);
    run(bypass, 200, 4 * MIB, 0.67, 1.4e9, 1e9);
    run(bypass, 200, MIB / 16, 0.67, 0.5e9, 1e9);
    run(bypass, 200, 4 * MIB, 0.84, 0.8e9, 1e9);
    EXPECT_GE(run(bypass, 20, 4 * MIB, 0.67, 1.4e9, 1e9), 18u);
    EXPECT_LE(run(bypass, 20, MIB / 16, 0.67, 0.5e9, 1e9), 2u);
    EXPECT_LE(run(bypass, 20, 4 * MIB, 0.84, 0.8e9, 1e9), 2u);
}

TEST(Bypass, BelievesANeighbourThatIsSure)
{
    Bypass bypass(0, 0);
    run(bypass, 100, 4 * MIB, 0.67, 1e9, 3e9);
    EXPECT_EQ(0u, run(bypass, 20, 8 * MIB, 0.67, 1e9, 3e9));
    EXPECT_EQ(0u, run(bypass, 20, 2 * MIB, 0.67, 1e9, 3e9));
}

TEST(Bypass, StartsWithWhatIsExpected)
{
    Bypass slow_wire(1e9, 4e9), fast_wire(10e9, 4e9), unknown(0, 4e9);
    EXPECT_EQ(Way::CODED, slow_wire.choose(MIB, 0.67));
    EXPECT_EQ(Way::STRAIGHT, fast_wire.choose(MIB, 0.67));
    EXPECT_EQ(Way::STRAIGHT, slow_wire.choose(MIB, 1.0));
    EXPECT_EQ(Way::CODED, unknown.choose(MIB, 0.67));
}

TEST(Bypass, TakesAnySize)
{
    Bypass bypass(0, 0);
    for (size_t length : {size_t(0), size_t(1), MIB, size_t(1) << 40, SIZE_MAX}) {
        const Way way = bypass.choose(length, 0.67);
        bypass.record(way, length, 0.67, 0);
        bypass.record(way, length, 0.67, 1e-9);
        bypass.record(way, length, 0.67, 1e9);
    }
}

} // namespace
} // namespace zip
