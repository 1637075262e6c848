// SPDX-License-Identifier: BSD-3-Clause
// The bypass: which operations of an endpoint are worth compressing, learned from how long earlier
// ones took. Knows nothing of UCX; used by one thread at a time.
//
// Operations overlap, and those of one way slow down those of the other. So the bypass learns in
// phases, in which everything goes one way, and only from what no operation of the other way
// disturbed. Between phases each size goes the way that was faster for it, or for the nearest size
// that was measured. A phase is repeated when its extra time is less than TRIAL_COST of the time
// since, and begun for a size that has gone by another's measurements for long enough.
#ifndef ZIP_BYPASS_H
#define ZIP_BYPASS_H

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace zip {

// How an operation crosses the wire.
enum class Way : uint8_t {
    CODED,   // encoded into staging memory, decoded at the receiver
    STRAIGHT // as it is, by the transport below, between the application's buffers
};

class Bypass {
public:
    // What is known before anything was measured, in bytes a second; 0: nothing. `wire`: the
    // transport below; `codec`: the slower of encoding and decoding.
    Bypass(double wire, double codec) : wire_(wire), codec_(codec) {}

    // The way for `length` bytes that the probe expects to shrink to `ratio` times that. end() or
    // drop() must follow.
    Way choose(size_t length, double ratio);

    // An operation that choose() was asked about was posted at `posted` and is done at `now`, both
    // in seconds of one clock. In the order in which those of a way end.
    void end(Way way, size_t length, double ratio, double posted, double now);
    // It ended in another way than chosen, or its time says nothing.
    void drop(Way way, double now);

private:
    static constexpr unsigned WAYS = 2;
    static constexpr unsigned SAMPLES = 8;
    static constexpr unsigned SIZE_CLASSES = 6;
    static constexpr unsigned RATIO_CLASSES = 3;

    // The last batches. Their sum, because a pipeline's first operation is slow and its last ones
    // are fast.
    struct Rate {
        std::array<double, SAMPLES> bytes;
        std::array<double, SAMPLES> seconds;
        unsigned count = 0;
        void add(double batch_bytes, double batch_seconds);
        double value() const; // bytes a second; 0: nothing is known
    };
    struct Cell {
        std::array<Rate, WAYS> rates;
        unsigned on_trust = 0; // operations that went by another size's rates
        unsigned phases = 0;   // that were begun for this size
    };
    // What ended since the last sample: the ends of several operations are often noticed at once,
    // so that their times are worth something only in sum.
    struct Batch {
        double seconds = 0;
        double bytes = 0;
        std::vector<Cell *> cells;
    };

    Cell &cell(size_t length, double ratio);
    bool rates_of(size_t length, double ratio, double rates[WAYS]) const;
    Way expected(double ratio) const;
    void start_phase(Way way);
    bool may_start_phase(Way way) const;

    double wire_, codec_;
    std::array<std::array<Cell, SIZE_CLASSES>, RATIO_CLASSES> cells_;

    bool learning_ = true;
    bool has_coded_ = false;
    bool started_ = false;
    Way phase_ = Way::CODED;
    unsigned phase_samples_ = 0, phase_operations_ = 0;
    double phase_seconds_ = 0;                 // of what was measured
    double phase_extra_ = 0;                   // seconds that this phase cost, as far as known
    std::array<unsigned, WAYS> phases_ = {};   // that have ended
    std::array<double, WAYS> extra_ = {};      // of the last phase of this way
    std::array<double, WAYS> busy_since_ = {}; // seconds of work since then
    std::array<unsigned, WAYS> since_ = {};    // and operations
    std::array<unsigned, WAYS> outstanding_ = {};
    std::array<double, WAYS> last_end_ = {};
    std::array<Batch, WAYS> batches_;
};

// The same for GPU memory. A GPU codes faster than any wire, but takes time to start and to end, so
// that what is worth coding follows from the wire's speed: known before anything was measured, and
// corrected by what is; seldom some go straight only to see the wire. Operations one after the
// other are measured from their start to their end, those among others by what each adds.
class GpuBypass {
public:
    // `wire`: bytes a second that UCX believes of the transport below.
    explicit GpuBypass(double wire) : wire_(wire) {}

    // Whether coding `length` bytes that shrink to `ratio` times that is expected to gain, while
    // `queued` bytes of other operations are under way.
    bool may_gain(size_t length, double ratio, size_t queued) const;
    // The way for them.
    Way choose(size_t length, double ratio, size_t queued);

    // An operation that was begun as chosen has ended, times in seconds. `queued`: the others were
    // under way when it was chosen; otherwise it had the wire to itself.
    void end(Way way, size_t length, double ratio, bool queued, double posted, double now);
    // The same, where the time says nothing.
    void drop(Way way, double now);

    double wire() const { return wire_; }

private:
    static constexpr unsigned WAYS = 2;
    static constexpr unsigned SIZE_CLASSES = 16;
    // The last times a byte. Whatever holds an operation up makes it slower, and nothing faster:
    // the middle one counts, and of two the lesser.
    class Times {
    public:
        void add(double seconds_a_byte) { last_[count_++ % last_.size()] = seconds_a_byte; }
        double value() const; // 0: there are none
        unsigned count() const { return count_; }

    private:
        std::array<double, 5> last_ = {};
        unsigned count_ = 0;
    };
    struct Cell {
        Times coded;
        unsigned skipped = 0; // operations that went straight because coding was slower
        unsigned pauses = 0;  // after which it was tried again
    };
    // Of operations that are alone, and of those among others.
    struct Load {
        std::array<Cell, SIZE_CLASSES> cells;
        unsigned since_trial = 0;
        unsigned trial_left = 0; // operations of this trial that are to come
        bool tried = false;
    };
    // What ended since the last sample, where ends come together.
    struct Batch {
        double seconds = 0;
        double bytes = 0;
        double on_wire = 0;
        unsigned count = 0;
    };

    double straight_seconds(double bytes) const;
    void saw_wire(Way way, double on_wire, double seconds);

    double wire_;
    unsigned coded_ = 0; // operations, as far as it matters
    Times straight_;
    std::array<Load, 2> loads_; // alone, among others
    std::array<double, WAYS> last_end_ = {};
    std::array<Batch, WAYS> batches_;
};

} // namespace zip

#endif
