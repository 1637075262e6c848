// SPDX-License-Identifier: BSD-3-Clause
// For the guard's tests: loads the UCX of a folder as an application would, whatever its files are
// called, and gives an address inside its libucs.
#ifndef ZIP_TEST_LOADED_UCX_H
#define ZIP_TEST_LOADED_UCX_H

#include <dlfcn.h>
#include <glob.h>

#include <string>

class LoadedUcx {
public:
    // Stays loaded until the process ends: UCX does not like to be unloaded.
    explicit LoadedUcx(const std::string &folder)
    {
        // A local copy, as a Python package loads its own, if it finds its other libraries by
        // itself. Otherwise those first, lazily and globally: libucm and libucs use each other.
        uct_ = open(folder, "libuct", RTLD_LOCAL);
        if (uct_ == nullptr && open(folder, "libucm", RTLD_GLOBAL) != nullptr &&
            open(folder, "libucs", RTLD_GLOBAL) != nullptr) {
            uct_ = open(folder, "libuct", RTLD_GLOBAL);
        }
        if (uct_ != nullptr) {
            ucs_ = open(folder, "libucs", RTLD_LOCAL);
            inside_ucs_ = ucs_ != nullptr ? dlsym(ucs_, "ucs_status_string") : nullptr;
        }
    }

    bool loaded() const { return inside_ucs_ != nullptr; }
    const std::string &error() const { return error_; }
    const void *inside_ucs() const { return inside_ucs_; }

    template <typename Function>
    Function *uct(const char *name) const
    {
        return reinterpret_cast<Function *>(dlsym(uct_, name));
    }
    template <typename Function>
    Function *ucs(const char *name) const
    {
        return reinterpret_cast<Function *>(dlsym(ucs_, name));
    }

private:
    // libucs.so.0 as installed, or libucs-1a2b3c4d.so.0.0.0 as auditwheel renames it.
    void *open(const std::string &folder, const std::string &name, int scope)
    {
        glob_t files{};
        for (const char *pattern : {".so.0", "-*.so*"}) {
            if (glob((folder + "/" + name + pattern).c_str(), 0, nullptr, &files) == 0) {
                break;
            }
        }
        if (files.gl_pathc == 0) {
            error_ = "no " + name + " in " + folder;
            return nullptr;
        }
        void *handle = dlopen(files.gl_pathv[0], RTLD_LAZY | scope);
        globfree(&files);
        if (handle == nullptr) {
            error_ = dlerror();
        }
        return handle;
    }

    void *ucs_ = nullptr, *uct_ = nullptr;
    const void *inside_ucs_ = nullptr;
    std::string error_;
};

#endif
