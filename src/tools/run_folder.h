// SPDX-License-Identifier: BSD-3-Clause
// A folder for the files of one run.
#pragma once

#include <string>

namespace tools {

class RunFolder {
public:
    // A new folder in TMPDIR or /tmp, removed with all that is in it; or `kept`, made if need be,
    // which stays. Throws Error.
    explicit RunFolder(const std::string &kept = {});
    ~RunFolder();
    RunFolder(const RunFolder &) = delete;
    RunFolder &operator=(const RunFolder &) = delete;

    const std::string &path() const { return path_; }
    std::string file(const std::string &name) const { return path_ + "/" + name; }

private:
    std::string path_;
    bool kept_;
};

} // namespace tools
