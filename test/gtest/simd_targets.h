// SPDX-License-Identifier: BSD-3-Clause
// Has the fast coder run the code for one of this machine's instruction sets, rather than for the
// best.
#ifndef ZIP_TEST_SIMD_TARGETS_H
#define ZIP_TEST_SIMD_TARGETS_H

#include <cstdint>
#include <vector>

#include "hwy/highway.h"

namespace zip::test {

// Those that the build has code for and the machine can run, the best first.
inline std::vector<int64_t> simd_targets()
{
    std::vector<int64_t> targets;
    for (int64_t all = hwy::SupportedTargets() & HWY_TARGETS; all != 0; all &= all - 1)
        targets.push_back(all & -all);
    return targets;
}

// While it lives, in all threads. One at a time.
class SimdTarget {
public:
    explicit SimdTarget(int64_t target) { set(target); }
    ~SimdTarget() { set(0); }
    SimdTarget(const SimdTarget &) = delete;
    SimdTarget &operator=(const SimdTarget &) = delete;

private:
    static void set(int64_t targets) // 0: whatever the machine has
    {
        hwy::SetSupportedTargetsForTest(targets);
        hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    }
};

} // namespace zip::test
#endif
