// SPDX-License-Identifier: BSD-3-Clause
// The fuzzers' promises hold for what they begin with, and for what they have found once
// (test/fuzz/found). A promise that is broken ends the program.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "fuzz/seeds.h"
#include "fuzz/targets.h"

namespace zip::test {
namespace {

namespace fs = std::filesystem;

class Fuzz : public testing::TestWithParam<fuzz::Target> {
protected:
    static void run(const std::string &name, const fuzz::Bytes &input)
    {
        printf("%s\n", name.c_str());
        fflush(stdout); // it may be the last that this program says
        GetParam().run(input.data(), input.size());
    }
};

TEST_P(Fuzz, seeds_keep_the_promises)
{
    unsigned count = 0;
    for (const fuzz::Seed &seed : fuzz::make_seeds(ZIP_TEST_VECTORS)) {
        if (seed.target == GetParam().name) {
            run(seed.name, seed.input);
            ++count;
        }
    }
    EXPECT_GE(count, 10u);
}

TEST_P(Fuzz, what_was_found_is_not_found_again)
{
    for (const auto &entry : fs::directory_iterator(fs::path(ZIP_TEST_FOUND) / GetParam().name)) {
        std::ifstream in(entry.path(), std::ios::binary);
        run(entry.path(), fuzz::Bytes{std::istreambuf_iterator<char>(in), {}});
    }
}

INSTANTIATE_TEST_SUITE_P(, Fuzz, testing::ValuesIn(fuzz::TARGETS),
                         [](const testing::TestParamInfo<fuzz::Target> &p) {
                             return std::string(p.param.name);
                         });

} // namespace
} // namespace zip::test
