// SPDX-License-Identifier: BSD-3-Clause
// Median and percentiles of a few repeats.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace tools {

// Percentile q in [0, 1] by linear interpolation between the closest ranks; 0 for no values.
inline double percentile(std::vector<double> values, double q)
{
    if (values.empty()) {
        return 0.0;
    }
    std::sort(values.begin(), values.end());
    const double rank = q * static_cast<double>(values.size() - 1);
    const size_t below = static_cast<size_t>(std::floor(rank));
    const size_t above = std::min(below + 1, values.size() - 1);
    const double part = rank - static_cast<double>(below);
    return values[below] + (values[above] - values[below]) * part;
}

struct Summary {
    double median = 0.0;
    double p10 = 0.0;
    double p90 = 0.0;
};

inline Summary summarize(const std::vector<double> &values)
{
    return {percentile(values, 0.5), percentile(values, 0.1), percentile(values, 0.9)};
}

} // namespace tools
