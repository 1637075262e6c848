// SPDX-License-Identifier: BSD-3-Clause
// Compares two chunks tile by tile: encoders produce the same tiles (format.md, section 10), but
// lay the tiles' parts in the tail in an order of their own.
#ifndef ZIP_TEST_CHUNK_TILES_H
#define ZIP_TEST_CHUNK_TILES_H

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "kernels/format.h"

namespace zip::test {

// A coded chunk's header and sections. The bytes must outlive it.
class ChunkTiles {
public:
    // Check problem() before anything else: empty if the header is one of a coded chunk, all
    // sections fit, and the parts of the tail are inside it and do not overlap. Says nothing about
    // the tiles' content.
    ChunkTiles(const void *chunk, size_t size) : bytes_(static_cast<const uint8_t *>(chunk))
    {
        if (size < format::HEADER_LENGTH) {
            problem_ = "shorter than a header";
            return;
        }
        memcpy(&header, chunk, sizeof(header));
        coding = {header.dtype, header.shape, (header.flags & format::FLAG_SMALL_TILES) != 0};
        if (header.magic != format::MAGIC || !format::valid_coding(coding) ||
            header.original_length > format::MAX_CODED_LENGTH) {
            problem_ = "not a coded chunk";
            return;
        }
        layout = format::layout_of(coding, header.original_length);
        if (layout.tail > size || header.tail_length > size - layout.tail) {
            problem_ = "longer than its bytes";
            return;
        }
        std::vector<std::pair<uint64_t, uint64_t>> parts;
        for (uint64_t t = 0; t < layout.tiles; ++t) {
            if (offset(t) > header.tail_length || length(t) > header.tail_length - offset(t)) {
                problem_ = "tile " + std::to_string(t) + " has its part outside the tail";
                return;
            }
            if (length(t) > 0)
                parts.emplace_back(offset(t), length(t));
        }
        std::sort(parts.begin(), parts.end());
        for (size_t i = 1; i < parts.size(); ++i) {
            if (parts[i - 1].first + parts[i - 1].second > parts[i].first)
                problem_ = "two tiles share bytes of the tail";
        }
    }

    const std::string &problem() const { return problem_; }

    const uint8_t *at(uint64_t byte) const { return bytes_ + byte; }
    uint64_t tile_header(uint64_t t) const
    {
        uint64_t word;
        memcpy(&word, at(layout.tile_headers + sizeof(word) * t), sizeof(word));
        return word;
    }
    uint64_t offset(uint64_t t) const // bytes
    {
        return format::tile_offset(tile_header(t)) * format::TAIL_WORD;
    }
    uint64_t length(uint64_t t) const // bytes
    {
        return uint64_t(format::tile_words(tile_header(t))) * format::TAIL_WORD;
    }
    uint32_t mode(uint64_t t) const { return format::tile_mode(tile_header(t)); }
    const uint8_t *part(uint64_t t) const { return at(layout.tail + offset(t)); }

    format::ChunkHeader header{};
    format::Coding coding{};
    format::Layout layout{};

private:
    const uint8_t *bytes_;
    std::string problem_;
};

// What is different between two coded chunks, but for the place of the tiles' parts in the tail and
// the gaps there; empty: nothing. Bytes between the sections must be equal too.
inline std::string chunk_difference(const void *chunk_a, size_t size_a, const void *chunk_b,
                                    size_t size_b)
{
    const ChunkTiles a(chunk_a, size_a), b(chunk_b, size_b);
    if (!a.problem().empty())
        return "first chunk: " + a.problem();
    if (!b.problem().empty())
        return "second chunk: " + b.problem();
    format::ChunkHeader header = b.header;
    header.tail_length = a.header.tail_length;
    if (memcmp(&a.header, &header, sizeof(header)) != 0)
        return "headers";

    const format::Layout &l = a.layout;
    const std::pair<const char *, uint64_t> sections[] = {
            {"MANTISSA", l.mantissa}, {"LOW", l.low},       {"LOW2", l.low2},
            {"LEVEL1", l.level1},     {"COUNTS", l.counts}, {"end", l.tile_headers}};
    for (size_t s = 0; s + 1 < std::size(sections); ++s) {
        const uint64_t begin = sections[s].second, n = sections[s + 1].second - begin;
        const uint8_t *const differs =
                std::mismatch(a.at(begin), a.at(begin) + n, b.at(begin)).first;
        if (differs != a.at(begin) + n)
            return std::string(sections[s].first) + ", byte " +
                   std::to_string(differs - a.at(begin)) + " of " + std::to_string(n);
    }
    const uint64_t headers_end = l.tile_headers + sizeof(uint64_t) * l.tiles;
    if (memcmp(a.at(headers_end), b.at(headers_end), l.symbols - headers_end) != 0)
        return "bytes behind TILES";
    for (uint64_t t = 0; t < l.tiles; ++t) {
        const std::string tile = "tile " + std::to_string(t) + " of " + std::to_string(l.tiles);
        if (a.mode(t) != b.mode(t))
            return tile + ": mode " + std::to_string(a.mode(t)) + " and " +
                   std::to_string(b.mode(t));
        const uint64_t symbols = l.symbols + sizeof(format::TileSymbols) * t;
        if (memcmp(a.at(symbols), b.at(symbols), sizeof(format::TileSymbols)) != 0)
            return tile + ": SYMBOLS";
        if (a.length(t) != b.length(t))
            return tile + ": parts of " + std::to_string(a.length(t)) + " and " +
                   std::to_string(b.length(t)) + " bytes";
        if (memcmp(a.part(t), b.part(t), a.length(t)) != 0)
            return tile + ": part of the tail";
    }
    return {};
}

} // namespace zip::test
#endif
