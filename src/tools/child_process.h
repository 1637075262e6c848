// SPDX-License-Identifier: BSD-3-Clause
// A program started by this one, with an environment, descriptors and a log file of its own, that
// never outlives it.
#pragma once

#include <string>
#include <sys/types.h>
#include <vector>

namespace tools {

class ChildProcess {
public:
    struct Start {
        std::vector<std::string> arguments;   // the first is the program's path
        std::vector<std::string> environment; // NAME=VALUE; all there is
        std::vector<int> descriptors;         // become 3, 4, ... in this order; stay open here
        std::string log;                      // file to which stdout and stderr are appended
    };

    // The child is in a process group of its own, so that a terminal's ^C is the parent's to
    // handle, and is killed when the parent dies. That the program cannot be executed shows as exit
    // status 127. Throws Error. For single-threaded programs.
    explicit ChildProcess(const Start &start);
    // Stops it, see below.
    ~ChildProcess();
    ChildProcess(const ChildProcess &) = delete;
    ChildProcess &operator=(const ChildProcess &) = delete;

    pid_t pid() const { return pid_; }
    // Whether it has ended; it is reaped then.
    bool ended();
    // "ended with status 1" or "was killed by signal 11 (Segmentation fault)", once it has ended.
    std::string how_it_ended() const;
    // Whether it ended by itself and well.
    bool ended_well() const;

    // Asks it to end, without waiting: SIGTERM.
    void ask_to_end();
    // Waits at most `seconds` for its end; false if it goes on.
    bool wait(double seconds);
    // Asks it to end, waits a moment, kills it and reaps it.
    void stop();

private:
    pid_t pid_ = -1;
    bool ended_ = false;
    int status_ = 0;
};

// The path of the program that runs.
std::string own_path();

// The program's path in PATH, or an empty string.
std::string find_program(const std::string &name);

} // namespace tools
