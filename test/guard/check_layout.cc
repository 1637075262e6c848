// SPDX-License-Identifier: BSD-3-Clause
// Runs the guard once against the UCX of a folder, in a process of its own.
//
// check_layout FOLDER: prints "matches", or the line that refuses; exit status 0 or 1, and 2 if the
// UCX there cannot be tested.
#include "loaded_ucx.h"

#include "uct/zip/ucx_bind.h"
#include "uct/zip/ucx_guard.h"

#include <chrono>
#include <cstdio>

int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
        return 2;
    }
    const LoadedUcx library(argv[1]);
    std::string why = library.error();
    if (!library.loaded() || !zip::ucx::bind(library.inside_ucs(), why)) {
        fprintf(stderr, "%s\n", why.c_str());
        return 2;
    }
    const auto start = std::chrono::steady_clock::now();
    const bool matches = zip::ucx::layout_matches(why);
    const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
    if (!matches) {
        printf("%s\n", why.c_str());
        return 1;
    }
    printf("matches (%.2f ms): %s\n", time.count(), zip::ucx::library_path());
    return 0;
}
