// SPDX-License-Identifier: BSD-3-Clause
// Inputs for the fuzzers to begin with, made of the conformance vectors and of messages that are
// right.
#ifndef ZIP_FUZZ_SEEDS_H
#define ZIP_FUZZ_SEEDS_H

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace zip::fuzz {

using Bytes = std::vector<uint8_t>;

struct Seed {
    std::string target, name; // a name is unique in its target
    Bytes input;
};

// `vectors` is the folder test/vectors.
std::vector<Seed> make_seeds(const std::filesystem::path &vectors);

} // namespace zip::fuzz
#endif
