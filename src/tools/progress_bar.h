// SPDX-License-Identifier: BSD-3-Clause
// Progress on stderr: a bar on a terminal, a line each quarter elsewhere, so that logs stay small.
#pragma once

#include <cstdint>
#include <string>

namespace tools {

class ProgressBar {
public:
    // `total` in any unit; a bar that is `quiet` prints nothing.
    ProgressBar(uint64_t total, bool quiet);
    ~ProgressBar();
    ProgressBar(const ProgressBar &) = delete;
    ProgressBar &operator=(const ProgressBar &) = delete;

    // Cheap enough to call for every message: draws at most ten times a second.
    void advance(uint64_t amount, const std::string &label);

    // Removes the bar, so that what follows starts on a clean line. Also done on destruction.
    void clear();

private:
    uint64_t total_;
    uint64_t done_ = 0;
    bool terminal_;
    bool quiet_;
    bool drawn_ = false;
    int quarter_ = 0;
    double last_draw_ = 0.0;
};

} // namespace tools
