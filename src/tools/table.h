// SPDX-License-Identifier: BSD-3-Clause
// Plain-text tables with aligned columns, for the results of every benchmark.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

namespace tools {

// printf into a std::string.
std::string format(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

class Table {
public:
    explicit Table(std::vector<std::string> header);

    // A row of as many cells as the header has; missing cells are empty.
    void add(std::vector<std::string> row);

    // The first column to the left, all others to the right, as numbers are read.
    void print(FILE *out) const;

private:
    std::vector<std::vector<std::string>> rows_;
};

} // namespace tools
