// SPDX-License-Identifier: BSD-3-Clause
// Opens a GPU back end at run time: beside the library that this is part of, then in the library
// path.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "kernels/codec_gpu.h"
#include "kernels/gpu/launcher.h"

namespace {

constexpr const char *BACK_ENDS[] = {"cuda", "hip"};

#define ZIP_STRING_OF(x) #x
#define ZIP_STRING(x) ZIP_STRING_OF(x)

thread_local char last_error[1024];

const zip_gpu_api_t *no(const char **error_p, const std::string &text)
{
    snprintf(last_error, sizeof last_error, "%s", text.c_str());
    if (error_p != nullptr)
        *error_p = last_error;
    return nullptr;
}

std::string own_folder()
{
    Dl_info info;
    if (dladdr(reinterpret_cast<void *>(&own_folder), &info) == 0 || info.dli_fname == nullptr)
        return "";
    const char *slash = strrchr(info.dli_fname, '/');
    return slash == nullptr ? "" : std::string(info.dli_fname, size_t(slash - info.dli_fname) + 1);
}

const zip_gpu_api_t *load(const char *name, const char **error_p)
{
    bool known = strchr(name, '/') != nullptr;
    for (const char *back_end : BACK_ENDS)
        known |= strcmp(name, back_end) == 0;
    if (!known)
        return no(error_p, std::string("no GPU back end \"") + name + "\": there are cuda and hip");
    std::string file = name, text;
    void *library = nullptr;
    if (strchr(name, '/') != nullptr) {
        library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
        if (library == nullptr)
            text = dlerror();
    } else {
        file = std::string("libzip_") + name + ".so";
        const std::string folder = own_folder();
        std::vector<std::string> places = {file};
        if (!folder.empty())
            places = {folder + file, folder + "../" + file, file};
        for (const std::string &place : places) {
            library = dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL);
            if (library != nullptr)
                break;
            text += std::string(text.empty() ? "" : "; ") + dlerror();
        }
    }
    if (library == nullptr)
        return no(error_p, std::string("cannot open the GPU back end: ") + text);
    using BackEnd = decltype(ZIP_GPU_BACK_END);
    auto *const back_end =
            reinterpret_cast<BackEnd *>(dlsym(library, ZIP_STRING(ZIP_GPU_BACK_END)));
    if (back_end == nullptr) {
        dlclose(library);
        return no(error_p, file + " is no GPU back end of this codec");
    }
    const zip_gpu_api_t *api = back_end();
    if (api->version != ZIP_GPU_API_VERSION) {
        const std::string version = std::to_string(api->version);
        dlclose(library);
        return no(error_p, file + " is of interface version " + version + ", " +
                                   std::to_string(ZIP_GPU_API_VERSION) + " is wanted");
    }
    return api;
}

} // namespace

extern "C" const zip_gpu_api_t *zip_gpu_load(const char *name, const char **error_p)
{
    if (name == nullptr)
        return no(error_p, "no name of a GPU back end");
    try {
        return load(name, error_p);
    } catch (const std::bad_alloc &) {
        return no(error_p, "out of memory");
    }
}
