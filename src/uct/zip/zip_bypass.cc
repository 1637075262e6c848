// SPDX-License-Identifier: BSD-3-Clause
#include "uct/zip/zip_bypass.h"

#include <algorithm>
#include <bit>

namespace zip {

namespace {

constexpr unsigned FIRST_SIZE_BITS = 15; // smaller operations are not compressed
constexpr uint32_t ENOUGH = 2;           // samples of a way before it is judged
constexpr double TRIAL_COST = 0.005;     // of the time, for trying the slower way again
constexpr uint32_t MIN_TRIAL_INTERVAL = 32, MAX_TRIAL_INTERVAL = 2000; // operations
constexpr uint32_t LATE_TRIAL = 8; // operations before the way that is expected to lose is tried
constexpr double CLEAR = 1.2;      // times as fast: the next size class need not try it itself

Way other(Way way)
{
    return way == Way::CODED ? Way::STRAIGHT : Way::CODED;
}

} // namespace

double Bypass::Rate::median() const
{
    const size_t valid = std::min(count, SAMPLES);
    std::array<float, SAMPLES> sorted = samples;
    const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(valid / 2);
    std::nth_element(sorted.begin(), middle, sorted.begin() + static_cast<std::ptrdiff_t>(valid));
    return static_cast<double>(*middle);
}

unsigned Bypass::size_class(size_t length)
{
    const auto bits = static_cast<unsigned>(std::bit_width(length));
    return std::clamp(bits, FIRST_SIZE_BITS, FIRST_SIZE_BITS + SIZE_CLASSES - 1) - FIRST_SIZE_BITS;
}

unsigned Bypass::ratio_class(double ratio)
{
    return ratio < 0.75 ? 0 : ratio < 0.9 ? 1 : 2; // 16-bit floats, 32-bit floats, the rest
}

// What the sizes beside this one know, where they know it clearly.
bool Bypass::neighbour_says(unsigned ratio_index, unsigned size_index, Way &way) const
{
    for (unsigned beside : {size_index + 1, size_index - 1}) {
        if (beside >= SIZE_CLASSES) { // below 0 as well
            continue;
        }
        const auto &rates = cells_[ratio_index][beside].rates;
        if (rates[0].count < ENOUGH || rates[1].count < ENOUGH) {
            continue;
        }
        const double coded = rates[0].median(), straight = rates[1].median();
        if (std::max(coded, straight) > CLEAR * std::min(coded, straight)) {
            way = coded > straight ? Way::CODED : Way::STRAIGHT;
            return true;
        }
    }
    return false;
}

Way Bypass::expected(double ratio) const
{
    if (wire_ <= 0 || codec_ <= 0) {
        return Way::CODED;
    }
    return std::min(wire_ / ratio, codec_) > wire_ ? Way::CODED : Way::STRAIGHT;
}

Way Bypass::choose(size_t length, double ratio)
{
    const unsigned ratio_index = ratio_class(ratio), size_index = size_class(length);
    Cell &cell = cells_[ratio_index][size_index];
    Way way = expected(ratio);
    const auto &first = cell.rates[static_cast<size_t>(way)];
    const auto &second = cell.rates[static_cast<size_t>(other(way))];
    if (first.count < ENOUGH || second.count < ENOUGH) {
        // one way after the other; where a neighbour knows the answer that can wait
        if (cell.since_trial < MAX_TRIAL_INTERVAL && neighbour_says(ratio_index, size_index, way)) {
            ++cell.since_trial;
            return way;
        }
        return first.count < LATE_TRIAL ? way : other(way);
    }
    const double coded = cell.rates[static_cast<size_t>(Way::CODED)].median();
    const double straight = cell.rates[static_cast<size_t>(Way::STRAIGHT)].median();
    way = coded > straight ? Way::CODED : Way::STRAIGHT;
    const double loss = std::max(coded, straight) / std::min(coded, straight) - 1;
    const auto interval = static_cast<uint32_t>(
            std::clamp(loss / TRIAL_COST, double(MIN_TRIAL_INTERVAL), double(MAX_TRIAL_INTERVAL)));
    if (++cell.since_trial >= interval) {
        cell.since_trial = 0;
        return other(way);
    }
    return way;
}

void Bypass::record(Way way, size_t length, double ratio, double seconds)
{
    if (seconds <= 0) {
        return;
    }
    Rate &rate = cells_[ratio_class(ratio)][size_class(length)].rates[static_cast<size_t>(way)];
    rate.samples[rate.count % SAMPLES] = static_cast<float>(static_cast<double>(length) / seconds);
    ++rate.count;
}

} // namespace zip
