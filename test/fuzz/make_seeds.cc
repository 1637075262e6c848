// SPDX-License-Identifier: BSD-3-Clause
// Writes the fuzzers' seeds, where libFuzzer reads them.
#include <cstdio>
#include <fstream>

#include "fuzz/seeds.h"

int main(int argc, char **argv)
{
    if (argc != 3) {
        fprintf(stderr, "usage: make_seeds VECTORS OUT\n"
                        "Writes inputs for each fuzzer to a folder of its own in OUT.\n");
        return 2;
    }
    for (const zip::fuzz::Seed &seed : zip::fuzz::make_seeds(argv[1])) {
        const std::filesystem::path folder = std::filesystem::path(argv[2]) / seed.target;
        std::filesystem::create_directories(folder);
        std::ofstream out(folder / seed.name, std::ios::binary);
        out.write(reinterpret_cast<const char *>(seed.input.data()),
                  std::streamsize(seed.input.size()));
        if (!out.flush()) {
            fprintf(stderr, "make_seeds: cannot write %s\n", (folder / seed.name).c_str());
            return 1;
        }
    }
    return 0;
}
