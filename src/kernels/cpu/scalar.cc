// SPDX-License-Identifier: BSD-3-Clause
// Reference coder: value by value in the words of format.md, to be read and to test the fast ones
// against.
#include <algorithm>

#include "kernels/cpu/internal.h"
#include "kernels/cpu/table.h"

namespace zip::cpu {
namespace {

// A stream of bits, least significant first.
struct Bits {
    uint8_t byte[TILE_VALUES / 8] = {};
    uint32_t size = 0;

    void put(uint32_t bit)
    {
        byte[size / 8] |= uint8_t(bit << (size % 8));
        ++size;
    }
    uint32_t at(uint32_t i) const { return byte[i / 8] >> (i % 8) & 1; }
    uint32_t bytes() const { return uint32_t(div_up(size, 32)) * TAIL_WORD; }
};

// Calls visit(value in the tile, true if it exists) for each code position of block `b` of a tile,
// in order.
template <class Visit>
void visit_block(uint8_t dtype, uint32_t tile_values, uint32_t b, Visit visit)
{
    const uint32_t first = b * BLOCK_VALUES, values = std::min(tile_values - first, BLOCK_VALUES);
    const uint32_t words = uint32_t(div_up(values, WORD_VALUES));
    for (uint32_t w = 0; w < words; ++w) {
        for (uint32_t bit = 0; bit < WORD_VALUES; ++bit) {
            const uint32_t v = value_at(dtype, words, w, bit);
            visit(w, bit, first + v, v < values);
        }
    }
}

} // namespace

size_t encode_scalar(zip_dtype_t dtype, const uint8_t *src, size_t length, uint8_t *dst,
                     size_t limit)
{
    const Layout l = layout_of(uint8_t(dtype), length);
    if (length > MAX_CODED_LENGTH || l.tail >= limit)
        return 0;

    ChunkHeader header = new_header(uint8_t(dtype), SHAPE_22228, length);
    clear_section_padding(l, dtype == ZIP_DTYPE_FP32, dst);
    snapshot(header.trailing, src + length - l.trailing, l.trailing);

    for (uint64_t t = 0; t < l.tiles; ++t) {
        const uint64_t first = t * TILE_VALUES;
        const uint32_t values = uint32_t(std::min<uint64_t>(l.values - first, TILE_VALUES));
        uint8_t exponent[TILE_VALUES];
        for (uint32_t v = 0; v < values; ++v) {
            uint32_t high; // the value's upper 16 bits
            if (dtype == ZIP_DTYPE_FP32) {
                const auto x = snapshot_value<uint32_t>(src + 4 * (first + v));
                const auto low = uint16_t(x);
                memcpy(dst + l.raw2 + 2 * (first + v), &low, 2);
                high = x >> 16;
            } else {
                high = snapshot_value<uint16_t>(src + 2 * (first + v));
            }
            dst[l.raw + first + v] = uint8_t((high >> 8 & 0x80) | (high & 0x7f));
            exponent[v] = uint8_t(high >> 7);
        }

        TileSymbols table = {};
        const bool worthwhile = choose_symbols(exponent, values, table);
        uint8_t rank_of[256];
        memset(rank_of, RANK_RAW, sizeof(rank_of));
        for (uint32_t r = 0; r < RANK_RAW; ++r) {
            if ((r & 3) != ESCAPE)
                rank_of[table.symbol[r]] = uint8_t(r);
        }

        const uint64_t first_group = t * TILE_GROUPS;
        const uint32_t blocks = uint32_t(div_up(values, BLOCK_VALUES));
        uint8_t *level1 = dst + l.level1 + level1_bytes(first);
        GroupCounts counts[TILE_GROUPS] = {};
        Bits plane[LEVELS - 1][2];
        uint8_t raw[TILE_VALUES];
        uint32_t raws = 0;
        for (uint32_t b = 0; worthwhile && b < blocks; ++b) {
            uint32_t word[2] = {0, 0};
            GroupCounts &group = counts[b / GROUP_BLOCKS];
            visit_block(uint8_t(dtype), values, b,
                        [&](uint32_t w, uint32_t bit, uint32_t v, bool exists) {
                            const uint32_t rank = exists ? rank_of[exponent[v]] : 0;
                            for (uint32_t level = 0; level <= rank >> 2; ++level) {
                                const uint32_t code = level < rank >> 2 ? ESCAPE : rank & 3;
                                if (level == 0) {
                                    word[0] |= (code & 1) << bit;
                                    word[1] |= (code >> 1) << bit;
                                } else {
                                    plane[level - 1][0].put(code & 1);
                                    plane[level - 1][1].put(code >> 1);
                                    ++group.codes[level - 1];
                                }
                            }
                            if (rank == RANK_RAW) {
                                raw[raws++] = exponent[v];
                                ++group.codes[LEVELS - 1];
                            }
                            if (bit == WORD_VALUES - 1) {
                                memcpy(level1 + 8 * (b * BLOCK_WORDS + w), word, sizeof(word));
                                word[0] = word[1] = 0;
                            }
                        });
        }

        const uint32_t sums[LEVELS] = {plane[0][0].size, plane[1][0].size, plane[2][0].size, raws};
        const bool coded = worthwhile && coded_tile_words(sums) < raw_tile_words(values);
        const uint32_t words = coded ? coded_tile_words(sums) : raw_tile_words(values);
        uint8_t *tail = dst + l.tail + header.tail_length;
        if (l.tail + header.tail_length + words * TAIL_WORD >= limit)
            return 0;
        memset(tail, 0, words * TAIL_WORD);
        if (coded) {
            for (const auto &level : plane) {
                for (const Bits &bits : level) {
                    memcpy(tail, bits.byte, bits.bytes());
                    tail += bits.bytes();
                }
            }
            memcpy(tail, raw, raws);
        } else {
            const auto kept = uint32_t(level1_bytes(values)), n = std::min(values, kept);
            memset(level1, 0, kept);
            memcpy(level1, exponent, n);
            memcpy(tail, exponent + n, values - n);
            memset(counts, 0, sizeof(counts));
            table = {};
        }
        const uint64_t tile =
                tile_header(header.tail_length / TAIL_WORD, words, coded ? TILE_CODED : TILE_RAW);
        memcpy(dst + l.counts + sizeof(GroupCounts) * first_group, counts,
               sizeof(GroupCounts) * div_up(blocks, GROUP_BLOCKS));
        memcpy(dst + l.tile_headers + sizeof(tile) * t, &tile, sizeof(tile));
        memcpy(dst + l.symbols + sizeof(table) * t, &table, sizeof(table));
        header.tail_length += words * TAIL_WORD;
    }
    memcpy(dst, &header, sizeof(header));
    return l.tail + header.tail_length;
}

zip_status_t decode_scalar(const ChunkHeader &header, const uint8_t *src, uint8_t *dst)
{
    const uint8_t dtype = header.dtype;
    const Layout l = layout_of(dtype, header.original_length);
    memcpy(dst + header.original_length - l.trailing, header.trailing, l.trailing);

    for (uint64_t t = 0; t < l.tiles; ++t) {
        const uint64_t first = t * TILE_VALUES;
        const uint32_t values = uint32_t(std::min<uint64_t>(l.values - first, TILE_VALUES));
        const uint32_t blocks = uint32_t(div_up(values, BLOCK_VALUES));
        const auto tile = snapshot_value<uint64_t>(src + l.tile_headers + sizeof(uint64_t) * t);
        if (!valid_tile_header(tile, values, header.tail_length))
            return ZIP_ERR_CORRUPT;
        const uint8_t *level1 = src + l.level1 + level1_bytes(first);
        const uint8_t *tail = src + l.tail + TAIL_WORD * tile_offset(tile);

        uint8_t exponent[TILE_VALUES];
        if (tile_mode(tile) == TILE_RAW) {
            const auto kept = std::min<uint32_t>(values, uint32_t(level1_bytes(values)));
            memcpy(exponent, level1, kept);
            memcpy(exponent + kept, tail, values - kept);
        } else {
            const auto table =
                    snapshot_value<TileSymbols>(src + l.symbols + sizeof(TileSymbols) * t);
            GroupCounts counts[TILE_GROUPS] = {};
            snapshot(counts, src + l.counts + sizeof(GroupCounts) * TILE_GROUPS * t,
                     sizeof(GroupCounts) * div_up(blocks, GROUP_BLOCKS));
            const TileClaim claim = check_counts(counts, values, tile_words(tile));
            if (!claim.valid)
                return ZIP_ERR_CORRUPT;

            Bits plane[LEVELS - 1][2];
            for (uint32_t level = 0; level < LEVELS - 1; ++level) {
                for (Bits &bits : plane[level]) {
                    bits.size = claim.codes[level];
                    memcpy(bits.byte, tail, bits.bytes());
                    tail += bits.bytes();
                }
            }
            // Codes taken so far, and how many there may be up to the current group's end.
            uint32_t taken[LEVELS] = {}, end[LEVELS] = {};
            bool ok = true;
            for (uint32_t b = 0; b < blocks; ++b) {
                if (b % GROUP_BLOCKS == 0) {
                    for (uint32_t s = 0; s < LEVELS; ++s) {
                        ok &= taken[s] == end[s];
                        end[s] += counts[b / GROUP_BLOCKS].codes[s];
                    }
                }
                uint32_t word[2] = {};
                visit_block(
                        dtype, values, b, [&](uint32_t w, uint32_t bit, uint32_t v, bool exists) {
                            if (bit == 0)
                                snapshot(word, level1 + 8 * (b * BLOCK_WORDS + w), sizeof(word));
                            uint32_t code = (word[0] >> bit & 1) | (word[1] >> bit & 1) << 1,
                                     level = 0;
                            for (; level < LEVELS - 1 && code == ESCAPE; ++level) {
                                const uint32_t i = taken[level]++;
                                if (i >= end[level]) {
                                    ok = false;
                                    return;
                                }
                                code = plane[level][0].at(i) | plane[level][1].at(i) << 1;
                            }
                            uint8_t e = table.symbol[level << 2 | code];
                            if (code == ESCAPE) {
                                const uint32_t i = taken[LEVELS - 1]++;
                                if (i >= end[LEVELS - 1]) {
                                    ok = false;
                                    return;
                                }
                                e = tail[i];
                            }
                            if (exists)
                                exponent[v] = e;
                        });
                if (!ok)
                    return ZIP_ERR_CORRUPT;
            }
            for (uint32_t s = 0; s < LEVELS; ++s) {
                if (taken[s] != end[s])
                    return ZIP_ERR_CORRUPT;
            }
        }

        for (uint32_t v = 0; v < values; ++v) {
            const uint32_t raw = src[l.raw + first + v], e = exponent[v];
            const uint32_t high = (raw & 0x80) << 8 | e << 7 | (raw & 0x7f);
            if (dtype == DTYPE_FP32) {
                uint16_t low;
                memcpy(&low, src + l.raw2 + 2 * (first + v), sizeof(low));
                const uint32_t x = high << 16 | low;
                memcpy(dst + 4 * (first + v), &x, sizeof(x));
            } else {
                const auto x = uint16_t(high);
                memcpy(dst + 2 * (first + v), &x, sizeof(x));
            }
        }
    }
    return ZIP_OK;
}

} // namespace zip::cpu
