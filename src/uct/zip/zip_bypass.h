// SPDX-License-Identifier: BSD-3-Clause
// The bypass: which operations of an endpoint are worth compressing, learned from how long earlier
// ones took. Knows nothing of UCX; used by one thread at a time.
#ifndef ZIP_BYPASS_H
#define ZIP_BYPASS_H

#include <array>
#include <cstddef>
#include <cstdint>

namespace zip {

// How an operation crosses the wire.
enum class Way : uint8_t {
    CODED,   // encoded into staging memory, decoded at the receiver
    STRAIGHT // as it is, by the transport below, between the application's buffers
};

// Rates of past operations by size (powers of two), by what the probe promised, and by way. Each
// way's rate is a median of the last few, so that one preempted operation decides nothing. The
// slower way is tried again so rarely that the trials cost at most TRIAL_COST of the time.
class Bypass {
public:
    // What is known before anything was measured, in bytes a second; 0: nothing. `wire`: the
    // transport below; `codec`: the slower of encoding and decoding.
    Bypass(double wire, double codec) : wire_(wire), codec_(codec) {}

    // The way for `length` bytes that the probe expects to shrink to `ratio` times that.
    Way choose(size_t length, double ratio);

    // One operation took `seconds` from when it could start (the one before it was done, or it was
    // posted) until it was done.
    void record(Way way, size_t length, double ratio, double seconds);

private:
    static constexpr unsigned SAMPLES = 5;
    static constexpr unsigned SIZE_CLASSES = 14;
    static constexpr unsigned RATIO_CLASSES = 3;

    struct Rate {
        std::array<float, SAMPLES> samples; // bytes a second, a ring
        uint32_t count = 0;
        double median() const;
    };
    struct Cell {
        std::array<Rate, 2> rates; // by Way
        uint32_t since_trial = 0;  // operations since the slower way was taken
    };
    static unsigned size_class(size_t length);
    static unsigned ratio_class(double ratio);
    bool neighbour_says(unsigned ratio_index, unsigned size_index, Way &way) const;
    Way expected(double ratio) const;

    double wire_, codec_;
    std::array<std::array<Cell, SIZE_CLASSES>, RATIO_CLASSES> cells_;
};

} // namespace zip

#endif
