// SPDX-License-Identifier: BSD-3-Clause
// Signals of the tools.
#include "tools/interrupt.h"

#include "tools/error.h"

#include <csignal>
#include <unistd.h>

namespace tools {

namespace {

volatile std::sig_atomic_t interrupted = 0;

void on_interrupt(int number)
{
    if (interrupted != 0) {
        _exit(kExitInterrupted);
    }
    interrupted = number;
}

void on_bus_error(int)
{
    static constexpr char kText[] =
            "\nzipperf: error: the model file became shorter while it was read; start again\n";
    const ssize_t ignored = write(STDERR_FILENO, kText, sizeof(kText) - 1);
    (void)ignored;
    _exit(kExitFailed);
}

} // namespace

void install_signal_handlers()
{
    struct sigaction action {};
    action.sa_handler = on_interrupt;
    sigaction(SIGINT, &action, nullptr);
    sigaction(SIGTERM, &action, nullptr);
    action.sa_handler = on_bus_error;
    sigaction(SIGBUS, &action, nullptr);
    action.sa_handler = SIG_IGN;
    sigaction(SIGPIPE, &action, nullptr);
}

void check_interrupted()
{
    if (interrupted != 0) {
        throw Error("interrupted", kExitInterrupted);
    }
}

} // namespace tools
