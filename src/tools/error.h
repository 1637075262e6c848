// SPDX-License-Identifier: BSD-3-Clause
// The one way in which the tools report a failure: an exception whose text becomes the single line
// that the user sees, with the exit status of the process.
#pragma once

#include <stdexcept>
#include <string>

namespace tools {

// Exit statuses, so that scripts can tell the reasons apart.
enum ExitStatus : int {
    kExitOk = 0,
    kExitFailed = 1,       // bad input, dead peer, time-out
    kExitMismatch = 2,     // data arrived changed: the one thing that must never happen
    kExitZipNotUsed = 3,   // everything arrived, but nothing was compressed
    kExitInterrupted = 130 // SIGINT or SIGTERM
};

class Error : public std::runtime_error {
public:
    explicit Error(const std::string &what, ExitStatus status = kExitFailed)
        : std::runtime_error(what), status_(status)
    {
    }

    ExitStatus status() const noexcept { return status_; }

private:
    ExitStatus status_;
};

} // namespace tools
