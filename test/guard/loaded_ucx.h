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
        // Each finds the earlier ones loaded, so the folder need not be in the search path. libucm
        // and libucs use each other: hence lazily and global.
        for (const char *name : {"ucm", "ucs", "uct"}) {
            void *handle = open(folder, std::string("lib") + name);
            if (handle == nullptr) {
                return;
            }
            (name == std::string("ucs") ? ucs_ : name == std::string("uct") ? uct_ : ucm_) = handle;
        }
        inside_ucs_ = dlsym(ucs_, "ucs_status_string");
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
    void *open(const std::string &folder, const std::string &name)
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
        void *handle = dlopen(files.gl_pathv[0], RTLD_LAZY | RTLD_GLOBAL);
        globfree(&files);
        if (handle == nullptr) {
            error_ = dlerror();
        }
        return handle;
    }

    void *ucm_ = nullptr, *ucs_ = nullptr, *uct_ = nullptr;
    const void *inside_ucs_ = nullptr;
    std::string error_;
};

#endif
