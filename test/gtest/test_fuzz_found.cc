// SPDX-License-Identifier: BSD-3-Clause
// What the fuzzers have found once (test/fuzz/found) is not found again. An input that breaks a
// promise ends the program.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "fuzz/targets.h"

namespace zip::test {
namespace {

using Target = void (*)(const uint8_t *, size_t);

void replay(const char *name, Target target)
{
    for (const auto &entry :
         std::filesystem::directory_iterator(std::filesystem::path(ZIP_TEST_FOUND) / name)) {
        if (entry.path().filename() == ".gitignore")
            continue;
        std::ifstream in(entry.path(), std::ios::binary);
        const std::vector<uint8_t> input{std::istreambuf_iterator<char>(in), {}};
        printf("%s\n", entry.path().c_str());
        fflush(stdout); // it may be the last that this program says
        target(input.data(), input.size());
    }
}

TEST(FuzzFound, Decode)
{
    replay("decode", fuzz::fuzz_decode);
}

TEST(FuzzFound, RoundTrip)
{
    replay("round_trip", fuzz::fuzz_round_trip);
}

TEST(FuzzFound, Wire)
{
    replay("wire", fuzz::fuzz_wire);
}

} // namespace
} // namespace zip::test
