// SPDX-License-Identifier: BSD-3-Clause
// Reference coder: value by value and level by level in the words of format.md, to be read and to
// test the fast ones against.
#include <algorithm>
#include <iterator>

#include "kernels/cpu/internal.h"
#include "kernels/cpu/table.h"

namespace zip::cpu {
namespace {

// Where a value's bits are; format.md section 2.
struct Value {
    uint64_t low;
    uint32_t sign_mantissa, exponent;
};

Value take_apart(const TypeTraits &type, uint64_t x)
{
    const uint32_t low_bits = 8 * type.low_bytes, m = type.mantissa_bits, e = type.exponent_bits;
    const auto head = uint32_t(x >> low_bits);
    return {x & ((uint64_t(1) << low_bits) - 1), head >> (e + m) << m | (head & ((1u << m) - 1)),
            head >> m & ((1u << e) - 1)};
}

uint64_t put_together(const TypeTraits &type, const Value &v)
{
    const uint32_t m = type.mantissa_bits, e = type.exponent_bits;
    const uint64_t head = uint64_t(v.sign_mantissa >> m) << (e + m) | uint64_t(v.exponent) << m |
                          (v.sign_mantissa & ((1u << m) - 1));
    return head << (8 * type.low_bytes) | v.low;
}

// The values of a tile at its code positions.
class Positions {
public:
    explicit Positions(uint8_t dtype) : dtype_(dtype) {}
    void set_values(uint32_t values)
    {
        if (values == values_)
            return;
        values_ = values;
        for (uint32_t first = 0; first < values; first += BLOCK_VALUES) {
            const uint32_t n = std::min(values - first, BLOCK_VALUES);
            const auto words = uint32_t(div_up(n, WORD_VALUES));
            for (uint32_t i = 0; i < words * WORD_VALUES; ++i) {
                const uint32_t v = value_at(dtype_, words, i / WORD_VALUES, i % WORD_VALUES);
                value_[first + i] = uint16_t(v < n ? first + v : values);
            }
        }
    }
    uint32_t operator[](uint32_t position) const { return value_[position]; }

private:
    const uint8_t dtype_;
    uint32_t values_ = 0;
    uint16_t value_[MAX_TILE_VALUES];
};

// A tile: which values it has, and where they are in code order.
struct Tile {
    uint64_t first;  // value of the chunk
    uint32_t values; // at least 1
    uint32_t words;  // of a plane, all blocks

    Tile(Coding coding, const Layout &l, uint64_t t, Positions &positions)
        : first(t * tile_values(coding)),
          values(uint32_t(std::min<uint64_t>(l.values - first, tile_values(coding)))),
          words(uint32_t(div_up(values, WORD_VALUES))), positions_(positions)
    {
        positions.set_values(values);
    }

    // Value at bit `bit` of plane word `word`, both counted in the tile; `values`: padding.
    uint32_t value(uint32_t word, uint32_t bit) const
    {
        return positions_[word * WORD_VALUES + bit];
    }
    // Index of a word of plane `plane` in a section of `planes` planes.
    uint32_t in_section(uint32_t planes, uint32_t plane, uint32_t word) const
    {
        const uint32_t first_word = word / BLOCK_WORDS * BLOCK_WORDS;
        return planes * first_word + plane * std::min(words - first_word, BLOCK_WORDS) + word -
               first_word;
    }

private:
    const Positions &positions_;
};

// Bits, least significant first: a coded tile's streams.
struct Bits {
    // A value has at most 8 bits behind level 1 (shape 4), and its raw symbol.
    uint8_t byte[2 * MAX_TILE_VALUES + TAIL_WORD] = {};
    uint32_t size = 0;

    void put(uint32_t bit)
    {
        byte[size / 8] |= uint8_t(bit << (size % 8));
        ++size;
    }
    uint32_t at(uint32_t i) const { return byte[i / 8] >> (i % 8) & 1; }
};

// Where word `i` of those that LEVEL1 does not hold is in a raw tile.
template <class Byte>
Byte *raw_word(Coding coding, const Tile &tile, uint32_t i, Byte *counts, Byte *symbols, Byte *tail)
{
    const uint32_t in_counts = tile_counts_bytes(coding, tile.values) / TAIL_WORD;
    const uint32_t before = raw_words_before_tail(coding, tile.values);
    return i < in_counts ? counts + TAIL_WORD * i
           : i < before  ? symbols + TAIL_WORD * (i - in_counts)
                         : tail + TAIL_WORD * (i - before);
}

void put_word(uint8_t *dst, uint32_t word)
{
    memcpy(dst, &word, sizeof(word));
}

// Calls visit(value) for each value of a tile's sample.
template <class Visit>
void visit_sample(Coding coding, const Tile &tile, Visit visit)
{
    if (tile.values < format::SAMPLE_ALL_BELOW) {
        for (uint32_t v = 0; v < tile.values; ++v)
            visit(v);
        return;
    }
    auto take = [&](uint32_t word, uint32_t bit) {
        const uint32_t v = tile.value(word, bit);
        if (v < tile.values)
            visit(v);
    };
    for (uint32_t word = 0; word < tile.words; ++word) {
        for (uint32_t s = 0; s < STRIPES; ++s) {
            const uint32_t bit = format::sample_bit(word / BLOCK_WORDS, word % BLOCK_WORDS, s);
            take(word, bit);
            if (coding.shape == SHAPE_DENSE)
                take(word, bit ^ 16);
        }
    }
}

} // namespace

void choose_bases(uint8_t dtype, const uint8_t *src, uint64_t values,
                  uint8_t (&base)[format::COLUMNS])
{
    const TypeTraits type = type_traits(dtype);
    const uint64_t blocks = div_up(values, BLOCK_VALUES);
    const uint32_t samples = format::column_samples(blocks);
    // What is not there is less than nothing.
    uint8_t sample[format::COLUMN_SAMPLES][format::COLUMNS];
    uint32_t there = 0; // of the last block
    for (uint32_t k = 0; k < samples; ++k) {
        const uint64_t first = format::column_sample(blocks, k) * BLOCK_VALUES;
        there = uint32_t(std::min<uint64_t>(values - first, BLOCK_VALUES));
        for (uint32_t c = 0; c < there; ++c) {
            uint64_t x = 0;
            memcpy(&x, src + type.size * (first + c), type.size);
            sample[k][c] = uint8_t(take_apart(type, x).exponent);
        }
        memset(sample[k] + there, 0xff, format::COLUMNS - there);
    }
    // The largest number that no more than half are less than, from its highest bit on; for all
    // columns at once, which vectors can.
    memset(base, 0, sizeof(base));
    for (uint32_t bit = 0x80; bit != 0; bit /= 2) {
        uint8_t less[format::COLUMNS] = {};
        for (uint32_t k = 0; k < samples; ++k) {
            for (uint32_t c = 0; c < format::COLUMNS; ++c)
                less[c] = uint8_t(less[c] + (sample[k][c] < uint8_t(base[c] | bit)));
        }
        for (uint32_t c = 0; c < format::COLUMNS; ++c) {
            const uint32_t n = samples == 0 ? 0 : samples - (c >= there);
            base[c] = uint8_t(n != 0 && less[c] <= n / 2 ? base[c] | bit : base[c]);
        }
    }
}

size_t encode_scalar(Coding coding, const uint8_t *src, size_t length, uint8_t *dst, size_t limit)
{
    const Layout l = layout_of(coding, length);
    if (length > MAX_CODED_LENGTH || l.tail >= limit)
        return 0;
    const TypeTraits type = type_traits(coding.dtype);
    const ShapeTraits shape = shape_traits(coding.shape);
    const uint32_t w1 = shape.width[0], k_planes = type.sign_mantissa_bits();

    format::LevelCode end_of[TABLE_BYTES]; // of a rank index
    for (uint32_t r = 0; r < TABLE_BYTES; ++r)
        end_of[r] = format::level_code(coding.shape, r);

    Positions positions(coding.dtype);
    ChunkHeader header = new_header(coding, length);
    clear_section_padding(coding, l, dst);
    snapshot(header.trailing, src + length - l.trailing, l.trailing);
    uint8_t column_base[format::COLUMNS];
    if (coding.shape == SHAPE_COLUMNS) {
        choose_bases(coding.dtype, src, l.values, column_base);
        memcpy(dst + l.columns, column_base, sizeof(column_base));
    }

    for (uint64_t t = 0; t < l.tiles; ++t) {
        const Tile tile(coding, l, t, positions);

        // Sign and mantissa, low part.
        uint32_t sign_mantissa[MAX_TILE_VALUES], exponent[MAX_TILE_VALUES];
        for (uint32_t v = 0; v < tile.values; ++v) {
            const uint64_t at = tile.first + v;
            uint64_t x = 0;
            snapshot(&x, src + type.size * at, type.size);
            const Value value = take_apart(type, x);
            sign_mantissa[v] = value.sign_mantissa;
            exponent[v] = value.exponent;
            if (coding.shape == SHAPE_COLUMNS)
                exponent[v] = (value.exponent - column_base[at % format::COLUMNS]) &
                              ((1u << type.exponent_bits) - 1);
            if (type.mantissa_is_bytes())
                dst[l.mantissa + at] = uint8_t(value.sign_mantissa);
            const uint64_t upper = type.low_bytes > 2 ? value.low >> 32 : value.low;
            if (type.low_bytes != 0)
                memcpy(dst + l.low + std::min(type.low_bytes, 2u) * at, &upper,
                       std::min(type.low_bytes, 2u));
            if (type.low_bytes > 2)
                memcpy(dst + l.low2 + 4 * at, &value.low, 4);
        }
        if (!type.mantissa_is_bytes()) {
            uint8_t *const section = dst + l.mantissa + plane_bytes(k_planes, tile.first);
            for (uint32_t word = 0; word < tile.words; ++word) {
                for (uint32_t q = 0; q < k_planes; ++q) {
                    uint32_t bits = 0;
                    for (uint32_t bit = 0; bit < WORD_VALUES; ++bit) {
                        const uint32_t v = tile.value(word, bit);
                        bits |= (v < tile.values ? sign_mantissa[v] >> q & 1 : 0) << bit;
                    }
                    put_word(section + 4 * tile.in_section(k_planes, q, word), bits);
                }
            }
        }

        // Symbols, ranks.
        uint32_t base = 0;
        bool all_have_symbols = true;
        uint32_t symbol[MAX_TILE_VALUES];
        if (coding.dtype == DTYPE_FP64) {
            uint32_t largest = 0;
            visit_sample(coding, tile, [&](uint32_t v) {
                if (exponent[v] < format::FP64_INFINITY)
                    largest = std::max(largest, exponent[v]);
            });
            base = format::fp64_base(largest);
        }
        for (uint32_t v = 0; v < tile.values; ++v) {
            symbol[v] = coding.dtype == DTYPE_FP64 ? format::fp64_symbol(exponent[v], base)
                                                   : exponent[v];
            all_have_symbols &= symbol[v] != format::NO_SYMBOL;
        }
        uint32_t sample_counts[256] = {}, samples = 0;
        visit_sample(coding, tile, [&](uint32_t v) {
            ++samples;
            if (symbol[v] != format::NO_SYMBOL)
                ++sample_counts[symbol[v]];
        });
        uint64_t present[4] = {};
        for (uint32_t i = 0; i < 256; ++i)
            present[i / 64] |= uint64_t(sample_counts[i] != 0) << i % 64;
        const RankedSymbols ranked = rank_symbols(sample_counts, present, samples, coding.shape);
        uint32_t rank_of[format::NO_SYMBOL + 1]; // NO_SYMBOL: any, that tile is raw
        std::fill(std::begin(rank_of), std::end(rank_of), RANK_RAW);
        for (uint32_t i = 0; i < ranked.size; ++i)
            rank_of[ranked.table.symbol[ranked.rank[i]]] = ranked.rank[i];
        TileSymbols table = ranked.table;
        if (coding.dtype == DTYPE_FP64) {
            table.symbol[format::BASE_LOW] = uint8_t(base);
            table.symbol[format::BASE_HIGH] = uint8_t(base >> 8);
        }

        // Codes, level by level.
        uint8_t *const level1 = dst + l.level1 + plane_bytes(w1, tile.first);
        uint16_t counts[4][MAX_COUNTS] = {};
        Bits streams;
        uint8_t raw[MAX_TILE_VALUES];
        uint32_t raws = 0;
        for (uint32_t level = 0; level < shape.levels; ++level) {
            for (uint32_t q = 0; q < shape.width[level]; ++q) {
                for (uint32_t word = 0; word < tile.words; ++word) {
                    uint32_t bits = 0;
                    for (uint32_t bit = 0; bit < WORD_VALUES; ++bit) {
                        const uint32_t v = tile.value(word, bit);
                        if (v == tile.values)
                            continue;
                        const format::LevelCode end = end_of[rank_of[symbol[v]]];
                        if (end.level < level)
                            continue;
                        const uint32_t code = end.level == level
                                                      ? end.code
                                                      : (1u << shape.width[level]) - 1; // escape
                        if (level == 0) {
                            bits |= (code >> q & 1) << bit;
                        } else {
                            streams.put(code >> q & 1);
                            if (q == 0 && shape.counts > 1)
                                ++counts[word * WORD_VALUES / group_values(coding)][level - 1];
                        }
                    }
                    if (level == 0)
                        put_word(level1 + 4 * tile.in_section(w1, q, word), bits);
                }
            }
        }
        for (uint32_t word = 0; word < tile.words; ++word) {
            for (uint32_t bit = 0; bit < WORD_VALUES; ++bit) {
                const uint32_t v = tile.value(word, bit);
                if (v == tile.values || rank_of[symbol[v]] != RANK_RAW)
                    continue;
                raw[raws++] = uint8_t(symbol[v]);
                if (shape.counts != 0)
                    ++counts[word * WORD_VALUES / group_values(coding)][shape.counts - 1];
            }
        }

        const bool coded = all_have_symbols && coded_tail_words(streams.size, raws) <
                                                       raw_tail_words(coding, tile.values);
        const uint32_t words =
                coded ? coded_tail_words(streams.size, raws) : raw_tail_words(coding, tile.values);
        uint8_t *const tail = dst + l.tail + header.tail_length;
        if (l.tail + header.tail_length + words * TAIL_WORD >= limit)
            return 0;
        const uint64_t first_group = t * shape.tile_groups;
        uint8_t *const tile_counts = dst + l.counts + sizeof(uint16_t) * shape.counts * first_group;
        uint8_t *const tile_symbols = dst + l.symbols + sizeof(TileSymbols) * t;
        memset(tail, 0, words * TAIL_WORD);
        memset(tile_counts, 0, tile_counts_bytes(coding, tile.values));
        memset(tile_symbols, 0, sizeof(TileSymbols));
        if (coded) {
            memcpy(tail, streams.byte, div_up(streams.size, 8));
            memcpy(tail + div_up(streams.size, 8), raw, raws);
            for (uint32_t g = 0; g * group_values(coding) < tile.values; ++g)
                memcpy(tile_counts + sizeof(uint16_t) * shape.counts * g, counts[g],
                       sizeof(uint16_t) * shape.counts);
            memcpy(tile_symbols, &table, sizeof(table));
        } else {
            for (uint32_t q = 0; q < type.exponent_bits; ++q) {
                for (uint32_t word = 0; word < tile.words; ++word) {
                    uint32_t bits = 0;
                    for (uint32_t bit = 0; bit < WORD_VALUES; ++bit) {
                        const uint32_t v = tile.value(word, bit);
                        bits |= (v < tile.values ? exponent[v] >> q & 1 : 0) << bit;
                    }
                    if (q < w1)
                        put_word(level1 + 4 * tile.in_section(w1, q, word), bits);
                    else
                        put_word(raw_word(coding, tile, (q - w1) * tile.words + word, tile_counts,
                                          tile_symbols, tail),
                                 bits);
                }
            }
        }
        const uint64_t tile_word =
                tile_header(header.tail_length / TAIL_WORD, words, coded ? TILE_CODED : TILE_RAW);
        memcpy(dst + l.tile_headers + sizeof(tile_word) * t, &tile_word, sizeof(tile_word));
        header.tail_length += words * TAIL_WORD;
    }
    memcpy(dst, &header, sizeof(header));
    return l.tail + header.tail_length;
}

zip_status_t decode_scalar(const ChunkHeader &header, const uint8_t *src, uint8_t *dst)
{
    const Coding coding = coding_of(header);
    const Layout l = layout_of(coding, header.original_length);
    const TypeTraits type = type_traits(coding.dtype);
    const ShapeTraits shape = shape_traits(coding.shape);
    const uint32_t w1 = shape.width[0], k_planes = type.sign_mantissa_bits();
    memcpy(dst + header.original_length - l.trailing, header.trailing, l.trailing);
    Positions positions(coding.dtype);

    for (uint64_t t = 0; t < l.tiles; ++t) {
        const Tile tile(coding, l, t, positions);
        const auto tile_word = snapshot_value<uint64_t>(src + l.tile_headers + 8 * t);
        if (!valid_tile_header(coding, tile_word, tile.values, header.tail_length))
            return ZIP_ERR_CORRUPT;
        const uint8_t *const level1 = src + l.level1 + plane_bytes(w1, tile.first);
        const uint8_t *const tile_counts =
                src + l.counts + sizeof(uint16_t) * shape.counts * shape.tile_groups * t;
        const uint8_t *const tile_symbols = src + l.symbols + sizeof(TileSymbols) * t;
        const uint8_t *const tail = src + l.tail + TAIL_WORD * tile_offset(tile_word);

        uint32_t exponent[MAX_TILE_VALUES + 1]; // one more: for what padding is
        if (tile_mode(tile_word) == TILE_RAW) {
            memset(exponent, 0, sizeof(exponent));
            for (uint32_t q = 0; q < type.exponent_bits; ++q) {
                for (uint32_t word = 0; word < tile.words; ++word) {
                    const auto bits = snapshot_value<uint32_t>(
                            q < w1 ? level1 + 4 * tile.in_section(w1, q, word)
                                   : raw_word(coding, tile, (q - w1) * tile.words + word,
                                              tile_counts, tile_symbols, tail));
                    for (uint32_t bit = 0; bit < WORD_VALUES; ++bit)
                        exponent[tile.value(word, bit)] |= (bits >> bit & 1) << q;
                }
            }
        } else {
            const auto table = snapshot_value<TileSymbols>(tile_symbols);
            const uint32_t base =
                    table.symbol[format::BASE_LOW] + 256u * table.symbol[format::BASE_HIGH];
            if (coding.dtype == DTYPE_FP64 && base > format::MAX_BASE)
                return ZIP_ERR_CORRUPT;

            // The tail's copy is as long as the tile's header says; `at` never leaves it.
            Bits streams;
            const uint32_t tail_bits = 8 * TAIL_WORD * tile_words(tile_word);
            snapshot(streams.byte, tail, tail_bits / 8);
            uint32_t at = 0, position[MAX_TILE_VALUES], n = 0; // that have a code at this level
            uint8_t code[MAX_TILE_VALUES];                     // of those
            uint8_t symbol[MAX_TILE_VALUES];                   // by code position
            uint32_t first_symbol = 0;                         // the level's, in the shape's order
            for (uint32_t level = 0; level < shape.levels; ++level) {
                const uint32_t width = shape.width[level], escape = (1u << width) - 1;
                if (level == 0) {
                    n = tile.words * WORD_VALUES;
                    memset(code, 0, n);
                    for (uint32_t i = 0; i < n; ++i)
                        position[i] = i;
                    for (uint32_t word = 0; word < tile.words; ++word) {
                        for (uint32_t q = 0; q < width; ++q) {
                            const auto bits = snapshot_value<uint32_t>(
                                    level1 + 4 * tile.in_section(width, q, word));
                            for (uint32_t bit = 0; bit < WORD_VALUES; ++bit)
                                code[word * WORD_VALUES + bit] |= uint8_t((bits >> bit & 1) << q);
                        }
                    }
                } else {
                    if (width * n > tail_bits - at)
                        return ZIP_ERR_CORRUPT;
                    memset(code, 0, n);
                    for (uint32_t q = 0; q < width; ++q) {
                        for (uint32_t i = 0; i < n; ++i)
                            code[i] |= uint8_t(streams.at(at++) << q);
                    }
                }
                // What escapes goes on to the next level.
                uint32_t escapes = 0;
                uint16_t group_escapes[4] = {};
                for (uint32_t i = 0; i < n; ++i) {
                    if (code[i] != escape) {
                        symbol[position[i]] = table.symbol[shape.rank[first_symbol + code[i]]];
                    } else {
                        if (shape.counts != 0)
                            ++group_escapes[position[i] / group_values(coding)];
                        position[escapes++] = position[i];
                    }
                }
                n = escapes;
                first_symbol += escape;
                const uint32_t column = shape.counts == 1 ? 0 : level;
                for (uint32_t g = 0; shape.counts != 0 && g * group_values(coding) < tile.values;
                     ++g) {
                    if (snapshot_value<uint16_t>(tile_counts + 2 * (shape.counts * g + column)) !=
                        group_escapes[g])
                        return ZIP_ERR_CORRUPT;
                }
            }
            if (tile_words(tile_word) != coded_tail_words(at, n))
                return ZIP_ERR_CORRUPT;
            for (uint32_t i = 0; i < n; ++i)
                symbol[position[i]] = streams.byte[div_up(at, 8) + i];
            for (uint32_t i = 0; i < tile.words * WORD_VALUES; ++i)
                exponent[tile.value(i / WORD_VALUES, i % WORD_VALUES)] =
                        coding.dtype == DTYPE_FP64 ? format::fp64_exponent(symbol[i], base)
                                                   : symbol[i];
        }

        uint32_t sign_mantissa[MAX_TILE_VALUES + 1] = {};
        if (!type.mantissa_is_bytes()) {
            const uint8_t *const section = src + l.mantissa + plane_bytes(k_planes, tile.first);
            for (uint32_t word = 0; word < tile.words; ++word) {
                for (uint32_t q = 0; q < k_planes; ++q) {
                    const auto bits = snapshot_value<uint32_t>(
                            section + 4 * tile.in_section(k_planes, q, word));
                    for (uint32_t bit = 0; bit < WORD_VALUES; ++bit)
                        sign_mantissa[tile.value(word, bit)] |= (bits >> bit & 1) << q;
                }
            }
        }
        for (uint32_t v = 0; v < tile.values; ++v) {
            const uint64_t at = tile.first + v;
            if (coding.shape == SHAPE_COLUMNS)
                exponent[v] += snapshot_value<uint8_t>(src + l.columns + at % format::COLUMNS);
            Value value = {0, sign_mantissa[v], exponent[v] & ((1u << type.exponent_bits) - 1)};
            if (type.mantissa_is_bytes())
                value.sign_mantissa = src[l.mantissa + at];
            if (type.low_bytes > 2) {
                value.low = uint64_t(snapshot_value<uint16_t>(src + l.low + 2 * at)) << 32 |
                            snapshot_value<uint32_t>(src + l.low2 + 4 * at);
            } else {
                memcpy(&value.low, src + l.low + type.low_bytes * at, type.low_bytes);
            }
            const uint64_t x = put_together(type, value);
            memcpy(dst + type.size * at, &x, type.size);
        }
    }
    return ZIP_OK;
}

} // namespace zip::cpu
