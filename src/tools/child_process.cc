// SPDX-License-Identifier: BSD-3-Clause
// Programs started by this one.
#include "tools/child_process.h"

#include "tools/clock.h"
#include "tools/error.h"
#include "tools/table.h"

#include <array>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <sstream>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

namespace tools {

namespace {

constexpr int kFirstDescriptor = 3;
constexpr int kFarDescriptor = 500; // above all that are to be set
constexpr int kCannotExecute = 127; // as a shell says it
constexpr double kGrace = 2.0;      // seconds from SIGTERM to SIGKILL

std::vector<char *> pointers(std::vector<std::string> &strings)
{
    std::vector<char *> out;
    out.reserve(strings.size() + 1);
    for (std::string &text : strings) {
        out.push_back(text.data());
    }
    out.push_back(nullptr);
    return out;
}

} // namespace

ChildProcess::ChildProcess(const Start &start)
{
    std::vector<std::string> arguments = start.arguments;
    std::vector<std::string> environment = start.environment;
    std::vector<char *> argv = pointers(arguments);
    std::vector<char *> envp = pointers(environment);
    const pid_t parent = getpid();
    pid_ = fork();
    if (pid_ < 0) {
        throw Error(std::string("cannot start a process: ") + std::strerror(errno));
    }
    if (pid_ > 0) {
        setpgid(pid_, pid_); // in both, whoever comes first
        return;
    }

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) {
        _exit(kCannotExecute);
    }
    setpgid(0, 0);
    const int log = open(start.log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    const int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
    dup2(nothing, STDIN_FILENO);
    dup2(log, STDOUT_FILENO);
    dup2(log, STDERR_FILENO);
    // By way of high numbers, lest one is overwritten before it is copied.
    std::vector<int> far;
    for (const int fd : start.descriptors) {
        far.push_back(fcntl(fd, F_DUPFD_CLOEXEC, kFarDescriptor));
    }
    for (size_t i = 0; i < far.size(); ++i) {
        dup2(far[i], kFirstDescriptor + static_cast<int>(i));
    }
    execve(argv[0], argv.data(), envp.data());
    _exit(kCannotExecute);
}

ChildProcess::~ChildProcess()
{
    stop();
}

bool ChildProcess::ended()
{
    if (!ended_) {
        const pid_t result = waitpid(pid_, &status_, WNOHANG);
        ended_ = result == pid_ || (result < 0 && errno != EINTR);
    }
    return ended_;
}

std::string ChildProcess::how_it_ended() const
{
    if (WIFSIGNALED(status_)) {
        return format("was killed by signal %d (%s)", WTERMSIG(status_),
                      strsignal(WTERMSIG(status_)));
    }
    return format("ended with status %d", WEXITSTATUS(status_));
}

bool ChildProcess::ended_well() const
{
    return ended_ && WIFEXITED(status_) && WEXITSTATUS(status_) == 0;
}

void ChildProcess::ask_to_end()
{
    if (!ended()) {
        kill(pid_, SIGTERM);
    }
}

bool ChildProcess::wait(double seconds)
{
    const double deadline = now_s() + seconds;
    while (!ended()) {
        if (now_s() > deadline) {
            return false;
        }
        usleep(2000);
    }
    return true;
}

void ChildProcess::stop()
{
    ask_to_end();
    if (!wait(kGrace)) {
        kill(pid_, SIGKILL);
        while (!ended()) {
            usleep(2000);
        }
    }
}

std::string own_path()
{
    std::array<char, PATH_MAX> path{};
    const ssize_t length = readlink("/proc/self/exe", path.data(), path.size());
    if (length <= 0) {
        throw Error("cannot find this program's own file: /proc is not mounted");
    }
    return std::string(path.data(), static_cast<size_t>(length));
}

std::string find_program(const std::string &name)
{
    const char *path = std::getenv("PATH");
    std::istringstream folders(path != nullptr ? path : "/usr/bin:/bin");
    for (std::string folder; std::getline(folders, folder, ':');) {
        std::string file = (folder.empty() ? "." : folder) + "/" + name;
        if (access(file.c_str(), X_OK) == 0) {
            return file;
        }
    }
    return "";
}

} // namespace tools
