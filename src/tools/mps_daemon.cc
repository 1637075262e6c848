// SPDX-License-Identifier: BSD-3-Clause
// NVIDIA's Multi-Process Service for the time of a run.
#include "tools/mps_daemon.h"

#include "tools/child_process.h"
#include "tools/clock.h"
#include "tools/error.h"

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <sys/wait.h>
#include <unistd.h>

namespace tools {

namespace {

constexpr const char *kProgram = "nvidia-cuda-mps-control";
constexpr double kStartSeconds = 20.0;
constexpr double kQuitSeconds = 20.0;

// Runs the control program with a line on its stdin; its exit status, or -1 if it does not end.
int control(const std::string &program, const char *argument, const std::string &line,
            const std::string &log, double seconds)
{
    int in[2];
    if (pipe2(in, O_CLOEXEC) != 0) {
        return -1;
    }
    const pid_t pid = fork();
    if (pid == 0) {
        const int out = open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
        dup2(in[0], STDIN_FILENO);
        dup2(out, STDOUT_FILENO);
        dup2(out, STDERR_FILENO);
        execl(program.c_str(), program.c_str(), argument, nullptr);
        _exit(127);
    }
    close(in[0]);
    const ssize_t ignored = write(in[1], line.data(), line.size());
    (void)ignored;
    close(in[1]);
    if (pid < 0) {
        return -1;
    }
    const double deadline = now_s() + seconds;
    int status = 0;
    while (waitpid(pid, &status, WNOHANG) != pid) {
        if (now_s() > deadline) {
            kill(pid, SIGKILL);
            waitpid(pid, &status, 0);
            return -1;
        }
        usleep(5000);
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

pid_t daemon_pid(const std::string &pipes)
{
    pid_t pid = 0;
    std::ifstream(pipes + "/" + kProgram + ".pid") >> pid;
    return pid;
}

// Whether a process runs. One that has ended may stay a zombie where nobody reaps orphans.
bool runs(pid_t pid)
{
    std::ifstream status("/proc/" + std::to_string(pid) + "/status");
    for (std::string line; std::getline(status, line);) {
        if (line.rfind("State:", 0) == 0) {
            return line.find('Z') == std::string::npos;
        }
    }
    return false;
}

// The keeper's whole life: waits until nobody holds the other end of `alive`, then ends the daemon.
[[noreturn]] void keep(const std::string &program, const std::string &pipes, const std::string &log,
                       int alive)
{
    setsid(); // not part of what a terminal interrupts
    signal(SIGINT, SIG_IGN);
    signal(SIGTERM, SIG_IGN);
    signal(SIGPIPE, SIG_IGN);
    char nothing = 0;
    while (read(alive, &nothing, 1) < 0 && errno == EINTR) {
    }
    const pid_t daemon = daemon_pid(pipes);
    control(program, nullptr, "quit\n", log, kQuitSeconds);
    const double deadline = now_s() + kQuitSeconds;
    while (daemon > 0 && runs(daemon) && now_s() < deadline) {
        usleep(20000);
    }
    if (daemon > 0 && runs(daemon)) {
        kill(daemon, SIGTERM);
    }
    // Of the run's folder, which its owner could not remove if it was killed.
    std::error_code ignored;
    std::filesystem::remove_all(pipes, ignored);
    _exit(0);
}

std::string last_line(const std::string &path)
{
    std::ifstream in(path);
    std::string last;
    for (std::string line; std::getline(in, line);) {
        last = line.empty() ? last : line;
    }
    return last;
}

} // namespace

MpsDaemon::MpsDaemon(const std::string &folder, const std::string &log_folder)
    : pipes_(folder + "/mps-pipes"), logs_(log_folder + "/mps-logs")
{
    const std::string program = find_program(kProgram);
    if (program.empty()) {
        throw Error(std::string("there is no ") + kProgram +
                    " in PATH; install it (it comes with the driver) or leave out --mps");
    }
    std::filesystem::create_directories(pipes_);
    std::filesystem::create_directories(logs_);
    setenv("CUDA_MPS_PIPE_DIRECTORY", pipes_.c_str(), 1);
    setenv("CUDA_MPS_LOG_DIRECTORY", logs_.c_str(), 1);

    const std::string log = logs_ + "/control-output.log";
    int alive[2];
    if (pipe2(alive, O_CLOEXEC) != 0) {
        throw Error(std::string("cannot make a pipe: ") + std::strerror(errno));
    }
    keeper_ = fork();
    if (keeper_ == 0) {
        close(alive[1]);
        keep(program, pipes_, log, alive[0]);
    }
    close(alive[0]);
    alive_ = alive[1];
    if (keeper_ < 0) {
        close(alive_);
        throw Error(std::string("cannot start a process: ") + std::strerror(errno));
    }
    if (control(program, "-d", "", log, kStartSeconds) != 0) {
        const std::string why = last_line(log);
        close(alive_);
        waitpid(keeper_, nullptr, 0);
        throw Error(std::string(kProgram) + " -d did not start" +
                    (why.empty() ? "" : " (" + why + ")") +
                    "; end a daemon that is running, or leave out --mps");
    }
}

MpsDaemon::~MpsDaemon()
{
    close(alive_);
    while (waitpid(keeper_, nullptr, 0) < 0 && errno == EINTR) {
    }
    unsetenv("CUDA_MPS_PIPE_DIRECTORY");
    unsetenv("CUDA_MPS_LOG_DIRECTORY");
}

} // namespace tools
