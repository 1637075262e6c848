// SPDX-License-Identifier: BSD-3-Clause
// Progress on stderr.
#include "tools/progress_bar.h"

#include "tools/clock.h"

#include <algorithm>
#include <cstdio>
#include <unistd.h>

namespace tools {

ProgressBar::ProgressBar(uint64_t total, bool quiet)
    : total_(std::max<uint64_t>(total, 1)), terminal_(isatty(STDERR_FILENO) == 1), quiet_(quiet)
{
}

ProgressBar::~ProgressBar()
{
    clear();
}

void ProgressBar::advance(uint64_t amount, const std::string &label)
{
    done_ = std::min(done_ + amount, total_);
    if (quiet_) {
        return;
    }

    const double part = static_cast<double>(done_) / static_cast<double>(total_);
    if (!terminal_) {
        const int quarter = static_cast<int>(part * 4.0);
        if (quarter > quarter_) {
            quarter_ = quarter;
            std::fprintf(stderr, "%3d%%  %s\n", quarter * 25, label.c_str());
        }
        return;
    }

    const double now = now_s();
    if (drawn_ && now - last_draw_ < 0.1) {
        return;
    }
    last_draw_ = now;
    drawn_ = true;
    static constexpr int kWidth = 40;
    const int filled = static_cast<int>(part * kWidth);
    const std::string bar = std::string(static_cast<size_t>(filled), '#') +
                            std::string(static_cast<size_t>(kWidth - filled), '.');
    std::fprintf(stderr, "\r[%s] %3d%%  %-30.30s", bar.c_str(), static_cast<int>(part * 100.0),
                 label.c_str());
    std::fflush(stderr);
}

void ProgressBar::clear()
{
    if (drawn_) {
        std::fprintf(stderr, "\r\033[K");
        std::fflush(stderr);
        drawn_ = false;
    }
}

} // namespace tools
