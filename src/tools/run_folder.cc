// SPDX-License-Identifier: BSD-3-Clause
// A folder for the files of one run.
#include "tools/run_folder.h"

#include "tools/error.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

namespace tools {

namespace fs = std::filesystem;

RunFolder::RunFolder(const std::string &kept) : path_(kept), kept_(!kept.empty())
{
    if (kept_) {
        std::error_code error;
        fs::create_directories(path_, error);
        if (!fs::is_directory(path_, error)) {
            throw Error("cannot make the folder " + path_ + "; name another one");
        }
        return;
    }
    const char *base = std::getenv("TMPDIR");
    path_ = std::string(base != nullptr ? base : "/tmp") + "/zipperf-XXXXXX";
    if (mkdtemp(path_.data()) == nullptr) {
        throw Error("cannot make a temporary folder " + path_ + ": " + std::strerror(errno) +
                    "; set TMPDIR to a folder that is writable");
    }
}

RunFolder::~RunFolder()
{
    if (!kept_) {
        std::error_code ignored;
        fs::remove_all(path_, ignored);
    }
}

} // namespace tools
