// SPDX-License-Identifier: BSD-3-Clause
// Plain-text tables with aligned columns.
#include "tools/table.h"

#include <algorithm>
#include <cstdarg>
#include <utility>

namespace tools {

std::string format(const char *fmt, ...)
{
    char buffer[1024];
    va_list args;
    va_start(args, fmt);
    std::vsnprintf(buffer, sizeof(buffer), fmt, args);
    va_end(args);
    return buffer;
}

Table::Table(std::vector<std::string> header)
{
    rows_.push_back(std::move(header));
}

void Table::add(std::vector<std::string> row)
{
    row.resize(rows_.front().size());
    rows_.push_back(std::move(row));
}

void Table::print(FILE *out) const
{
    std::vector<size_t> width(rows_.front().size(), 0);
    for (const auto &row : rows_) {
        for (size_t i = 0; i < row.size(); ++i) {
            width[i] = std::max(width[i], row[i].size());
        }
    }
    for (size_t r = 0; r < rows_.size(); ++r) {
        std::string line;
        for (size_t i = 0; i < width.size(); ++i) {
            const std::string &cell = rows_[r][i];
            const std::string pad(width[i] - cell.size(), ' ');
            line.append(i == 0 ? "" : "  ").append(i == 0 ? cell : pad).append(i == 0 ? pad : cell);
        }
        std::fprintf(out, "%s\n", line.c_str());
        if (r == 0) {
            std::fprintf(out, "%s\n", std::string(line.size(), '-').c_str());
        }
    }
}

} // namespace tools
