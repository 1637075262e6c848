// SPDX-License-Identifier: BSD-3-Clause
// SIGINT and SIGTERM become an ordinary error at the next look, so that every clean-up runs.
#pragma once

namespace tools {

// Installs the handlers; a second signal ends the process at once. Also turns SIGBUS, which a model
// that is truncated while it is read raises, into one line and exit status 1, and ignores SIGPIPE.
void install_signal_handlers();

// Throws Error (kExitInterrupted) once a signal has arrived.
void check_interrupted();

} // namespace tools
