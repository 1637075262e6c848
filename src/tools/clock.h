// SPDX-License-Identifier: BSD-3-Clause
// Seconds on the monotonic clock.
#pragma once

#include <chrono>

namespace tools {

inline double now_s()
{
    using namespace std::chrono;
    return duration<double>(steady_clock::now().time_since_epoch()).count();
}

} // namespace tools
