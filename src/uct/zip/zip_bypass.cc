// SPDX-License-Identifier: BSD-3-Clause
#include "uct/zip/zip_bypass.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <utility>

namespace zip {

namespace {

constexpr unsigned FIRST_SIZE_BITS = 17; // smaller sizes are in the first class
constexpr double BATCH_SECONDS = 100e-6;
constexpr unsigned PHASE_SAMPLES = 4;      // and
constexpr double PHASE_SECONDS = 3e-3;     // of measured work end a phase,
constexpr unsigned PHASE_OPERATIONS = 256; // or so many operations without
constexpr unsigned TRUST = 6; // operations of a size before it has a phase, then twice as many
constexpr unsigned MAX_DOUBLINGS = 16;
constexpr double TRIAL_COST = 0.004;  // of the time, for each way
constexpr unsigned MIN_INTERVAL = 32; // operations between two phases
constexpr unsigned FIRST_PHASES = 4;  // of each way, whatever they cost: what starts is slow
constexpr double WORTH = 1.05; // times as fast as straight, because coding takes the processor
constexpr double OUTLIER = 3;  // times as slow as usual: no slower counts, whatever held it up

size_t index(Way way)
{
    return static_cast<size_t>(way);
}

Way other(Way way)
{
    return way == Way::CODED ? Way::STRAIGHT : Way::CODED;
}

unsigned size_class(size_t length, unsigned classes)
{
    const auto bits = static_cast<unsigned>(std::bit_width(length));
    return std::clamp(bits, FIRST_SIZE_BITS, FIRST_SIZE_BITS + classes - 1) - FIRST_SIZE_BITS;
}

unsigned ratio_class(double ratio)
{
    return ratio < 0.75 ? 0 : ratio < 0.9 ? 1 : 2; // 16-bit floats, 32-bit floats, the rest
}

} // namespace

void Bypass::Rate::add(double batch_bytes, double batch_seconds)
{
    const double known = value();
    if (count >= 2) {
        batch_seconds = std::min(batch_seconds, OUTLIER * batch_bytes / known);
    }
    bytes[count % SAMPLES] = batch_bytes;
    seconds[count % SAMPLES] = batch_seconds;
    ++count;
}

double Bypass::Rate::value() const
{
    const auto valid = static_cast<std::ptrdiff_t>(std::min(count, SAMPLES));
    const double sum = std::accumulate(seconds.begin(), seconds.begin() + valid, 0.0);
    return sum > 0 ? std::accumulate(bytes.begin(), bytes.begin() + valid, 0.0) / sum : 0;
}

Bypass::Cell &Bypass::cell(size_t length, double ratio)
{
    return cells_[ratio_class(ratio)][size_class(length, SIZE_CLASSES)];
}

// Rates of both ways for this size, or of the nearest one that knows both. False: there is none.
bool Bypass::rates_of(size_t length, double ratio, double rates[WAYS]) const
{
    const auto &row = cells_[ratio_class(ratio)];
    const int own = static_cast<int>(size_class(length, SIZE_CLASSES));
    for (int distance = 0; distance < static_cast<int>(SIZE_CLASSES); ++distance) {
        for (int place : {own + distance, own - distance}) {
            if (place < 0 || place >= static_cast<int>(SIZE_CLASSES)) {
                continue;
            }
            const auto &known = row[static_cast<size_t>(place)].rates;
            rates[0] = known[0].value();
            rates[1] = known[1].value();
            if (rates[0] > 0 && rates[1] > 0) {
                return true;
            }
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

void Bypass::start_phase(Way way)
{
    learning_ = true;
    phase_ = way;
    phase_samples_ = phase_operations_ = 0;
    phase_extra_ = phase_seconds_ = 0;
}

bool Bypass::may_start_phase(Way way) const
{
    const size_t i = index(way);
    if (phases_[i] < FIRST_PHASES) {
        return phases_[i] == 0 || since_[i] >= MIN_INTERVAL;
    }
    return since_[i] >= MIN_INTERVAL && busy_since_[i] * TRIAL_COST >= extra_[i];
}

Way Bypass::choose(size_t length, double ratio)
{
    if (!started_) {
        started_ = true;
        start_phase(expected(ratio));
    }
    const bool measured = phase_samples_ >= PHASE_SAMPLES && phase_seconds_ >= PHASE_SECONDS;
    if (learning_ && (measured || phase_operations_ >= PHASE_OPERATIONS)) {
        learning_ = false;
        ++phases_[index(phase_)];
        extra_[index(phase_)] = phase_extra_;
        busy_since_[index(phase_)] = 0;
        since_[index(phase_)] = 0;
    }
    for (Way way : {other(phase_), phase_}) {
        if (!learning_ && may_start_phase(way)) {
            start_phase(way);
        }
    }
    Cell &own = cell(length, ratio);
    for (Way way : {Way::CODED, Way::STRAIGHT}) {
        if (!learning_ && own.rates[index(way)].count == 0 &&
            ++own.on_trust >= TRUST << std::min(own.phases, MAX_DOUBLINGS)) {
            own.on_trust = 0;
            ++own.phases; // a size that comes seldom may find no place in its phase
            start_phase(way);
        }
    }
    double rates[WAYS];
    const bool known = rates_of(length, ratio, rates);
    Way way = expected(ratio);
    if (known) {
        way = rates[index(Way::CODED)] > WORTH * rates[index(Way::STRAIGHT)] ? Way::CODED
                                                                             : Way::STRAIGHT;
    }
    if (learning_) {
        way = phase_;
        ++phase_operations_;
        if (known) {
            const double size = static_cast<double>(length);
            phase_extra_ += size / rates[index(way)] - size / std::max(rates[0], rates[1]);
        }
    }
    ++since_[0];
    ++since_[1];
    ++outstanding_[index(way)];
    return way;
}

void Bypass::end(Way way, size_t length, double ratio, double posted, double now)
{
    const size_t i = index(way);
    // since when only this operation was in the way of the next one
    const double start = std::max(posted, last_end_[i]);
    const double seconds = std::max(now - start, 0.0);
    // the first coded one pays for staging memory
    const bool cold = way == Way::CODED && !std::exchange(has_coded_, true);
    const bool pure = !cold && outstanding_[1 - i] == 0 && last_end_[1 - i] <= start;
    drop(way, now);
    busy_since_[0] += seconds;
    busy_since_[1] += seconds;

    Batch &batch = batches_[i];
    if (!pure) {
        batch = {};
        return;
    }
    batch.seconds += seconds;
    batch.bytes += static_cast<double>(length);
    batch.cells.push_back(&cell(length, ratio));
    if (batch.seconds < BATCH_SECONDS) {
        return;
    }
    std::sort(batch.cells.begin(), batch.cells.end());
    batch.cells.erase(std::unique(batch.cells.begin(), batch.cells.end()), batch.cells.end());
    for (Cell *one : batch.cells) {
        one->rates[i].add(batch.bytes, batch.seconds);
    }
    if (learning_ && way == phase_) {
        ++phase_samples_;
        phase_seconds_ += batch.seconds;
    }
    batch = {};
}

void Bypass::drop(Way way, double now)
{
    outstanding_[index(way)] -= outstanding_[index(way)] > 0;
    last_end_[index(way)] = now;
}

// ---- of GPU memory

namespace {

// Measured with plain ends (doc/performance.md): what an operation takes beside the wire's time.
constexpr double STRAIGHT_SECONDS = 12e-6, CODED_SECONDS = 38e-6;
constexpr double LONG_ENOUGH = 100e-6; // to tell the wire's speed from
constexpr double FASTER = 1.3;         // than believed, from which on a coded operation shows it
// Operations until some go straight to see the wire, and how many: the first time, and again. What
// goes first is slow, so that one of those alone would say little.
struct Trial {
    unsigned first, first_length, again, length;
};
constexpr Trial TRIALS[] = {{3, 2, 128, 1}, {64, 6, 1024, 6}}; // alone, among others
constexpr unsigned BATCH = 4;       // operations among others that are one sample
constexpr double LOSS = 0.02;       // of coding, from which on it is left
constexpr unsigned FIRST_CODED = 2; // operations, which pay for staging memory and the like
constexpr unsigned LOSSES = 2;      // measured operations before that
constexpr unsigned PAUSE = 4;       // operations until it is tried again, then twice as many
constexpr unsigned MAX_PAUSE_DOUBLINGS = 10;

} // namespace

double GpuBypass::Times::value() const
{
    std::array<double, std::tuple_size_v<decltype(last_)>> sorted = last_;
    const size_t valid = std::min<size_t>(count_, sorted.size());
    if (valid == 0) {
        return 0;
    }
    const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>((valid - 1) / 2);
    std::nth_element(sorted.begin(), middle, sorted.begin() + static_cast<std::ptrdiff_t>(valid));
    return *middle;
}

double GpuBypass::straight_seconds(double bytes) const
{
    return STRAIGHT_SECONDS + bytes / wire_;
}

bool GpuBypass::may_gain(size_t length, double ratio, size_t queued) const
{
    // What is queued before it hides the start, what comes after it the end.
    const double bytes = static_cast<double>(length) + static_cast<double>(queued);
    return wire_ <= 0 || CODED_SECONDS + ratio * bytes / wire_ < straight_seconds(bytes);
}

Way GpuBypass::choose(size_t length, double ratio, size_t queued)
{
    Load &load = loads_[queued > 0];
    Cell &cell = load.cells[size_class(length, SIZE_CLASSES)];
    const auto bytes = static_cast<double>(length);
    const double straight = queued > 0 ? bytes / wire_ : straight_seconds(bytes);
    const Trial &trial = TRIALS[queued > 0];
    if (!may_gain(length, ratio, queued)) {
        return Way::STRAIGHT;
    }
    if (cell.coded.count() >= LOSSES && cell.coded.value() * bytes > (1 + LOSS) * straight) {
        if (++cell.skipped >= PAUSE << std::min(cell.pauses, MAX_PAUSE_DOUBLINGS)) {
            cell.skipped = 0;
            cell.coded = {}; // measured anew
            ++cell.pauses;
        }
        return Way::STRAIGHT;
    }
    if (load.trial_left > 0) {
        --load.trial_left;
        return Way::STRAIGHT;
    }
    // UCX may believe a wire slower than it is, which coded operations need not show.
    if (++load.since_trial >= (load.tried ? trial.again : trial.first)) {
        load.since_trial = 0;
        load.trial_left = (load.tried ? trial.length : trial.first_length) - 1;
        load.tried = true;
        return Way::STRAIGHT;
    }
    return Way::CODED;
}

// Bytes on the wire, and how long it had them.
void GpuBypass::saw_wire(Way way, double on_wire, double seconds)
{
    if (seconds < LONG_ENOUGH) {
        return;
    }
    if (way == Way::STRAIGHT) {
        straight_.add(seconds / on_wire);
        wire_ = 1 / straight_.value();
    } else if (on_wire / seconds > FASTER * wire_) {
        wire_ = on_wire / seconds; // at least: it may have had to wait for the GPU
    }
}

void GpuBypass::end(Way way, size_t length, double ratio, bool queued, double posted, double now)
{
    const size_t i = index(way);
    const auto bytes = static_cast<double>(std::max<size_t>(length, 1));
    const double on_wire = (way == Way::CODED ? ratio : 1.0) * bytes;
    // since when only this operation was in the way of the next one
    const double last_end = std::max(last_end_[0], last_end_[1]);
    const double start = queued ? std::max(posted, last_end) : posted;
    const bool pure = last_end_[1 - i] <= start; // of those before it, whatever comes after it
    const bool cold = way == Way::CODED && coded_ < FIRST_CODED;
    coded_ += cold;
    drop(way, now);
    Times &coded = loads_[queued].cells[size_class(length, SIZE_CLASSES)].coded;
    const double seconds = std::max(now - start, 0.0);
    if (!queued) {
        saw_wire(way, on_wire, seconds - (way == Way::CODED ? CODED_SECONDS : STRAIGHT_SECONDS));
        if (way == Way::CODED && !cold) {
            coded.add(seconds / bytes);
        }
        return;
    }
    Batch &batch = batches_[i];
    if (!pure || cold) {
        batch = {};
        return;
    }
    batch.seconds += seconds;
    batch.bytes += bytes;
    batch.on_wire += on_wire;
    if (++batch.count < BATCH || batch.seconds < LONG_ENOUGH) {
        return;
    }
    saw_wire(way, batch.on_wire, batch.seconds);
    if (way == Way::CODED) {
        coded.add(batch.seconds / batch.bytes);
    }
    batch = {};
}

void GpuBypass::drop(Way way, double now)
{
    last_end_[index(way)] = now;
}

} // namespace zip
