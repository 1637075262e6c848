// SPDX-License-Identifier: BSD-3-Clause
// The sender's half of an endpoint: operations that UCX posts, and answers to the peer's gets, go
// out as segments or straight.
#include "uct/zip/zip_ep.h"
#include "uct/zip/zip_message.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace zip {

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t MAX_QUEUED = 256;       // operations of an endpoint; further ones wait in UCP
constexpr size_t MAX_IN_FLIGHT = 256;    // segments that are not acknowledged
constexpr size_t MAX_CODED_GETS = 64;    // that the peer has not answered
constexpr size_t SEGMENT_ALIGNMENT = 16; // so that no element is cut in two
constexpr size_t SEGMENT_TILE = 32768;   // 8192 values of four bytes
constexpr unsigned MAX_BURST = 8; // steps a call of progress, so that receiving is not starved
constexpr float GET_RATIO = 0.7f; // of data that only the peer can look at, and has not yet
constexpr size_t MAX_REMEMBERED = 1024; // regions of a peer
constexpr unsigned SKIPS = 15; // gets of a region that does not shrink, before that is asked again

double seconds(Clock::time_point time)
{
    return std::chrono::duration<double>(time.time_since_epoch()).count();
}

} // namespace

size_t Ep::slot_payload() const
{
    const size_t fits = std::min(iface->segment_size, remote->slot_size() - ZIP_CODEC_MAX_GROWTH);
    return fits / SEGMENT_ALIGNMENT * SEGMENT_ALIGNMENT;
}

bool Ep::can_accept() const
{
    return operations.size() < MAX_QUEUED;
}

// ---- which way

// Whether the transport below can move the operation between the application's buffers.
bool Ep::can_go_straight(const Operation &operation)
{
    const Md *md = iface->md;
    const uint64_t flag =
            operation.kind == Kind::PUT ? UCT_IFACE_FLAG_PUT_ZCOPY : UCT_IFACE_FLAG_GET_ZCOPY;
    const size_t least = operation.kind == Kind::PUT ? iface->lower_attr.cap.put.min_zcopy
                                                     : iface->lower_attr.cap.get.min_zcopy;
    if (md->lower_rkey_ptr || (iface->lower_attr.cap.flags & flag) == 0 ||
        operation.length < least) {
        return false;
    }
    if ((md->lower_attr.flags & UCT_MD_FLAG_NEED_RKEY) != 0 &&
        !operation.rkey->unpack_lower(md->lower_component)) {
        return false;
    }
    return (md->lower_attr.flags & UCT_MD_FLAG_NEED_MEMH) == 0 || operation.region != nullptr;
}

void Ep::choose_way(Operation &operation)
{
    operation.chosen = true;
    if (!operation.is_codable()) {
        operation.way = Way::STRAIGHT;
        return;
    }
    const BypassOption option = iface->md->bypass;
    const bool small = operation.length < iface->options.min_size;
    operation.ratio = GET_RATIO;
    if (operation.kind == Kind::PUT && operation.length > iface->inline_max &&
        option != BypassOption::ALWAYS && (!small || option == BypassOption::NEVER)) {
        operation.coding = iface->choose_coding(operation.local, operation.length, operation.ratio);
    }
    if (option == BypassOption::NEVER ||
        (operation.kind == Kind::PUT && operation.length <= iface->inline_max) ||
        !can_go_straight(operation)) {
        operation.way = Way::CODED;
        return;
    }
    if (option == BypassOption::ALWAYS || small ||
        (operation.kind == Kind::PUT && operation.coding.dtype == ZIP_DTYPE_BYTES)) {
        operation.way = Way::STRAIGHT;
        return;
    }
    if (operation.kind == Kind::GET) {
        const auto found = remembered.find(operation.rkey->region);
        if (found != remembered.end()) {
            operation.ratio = found->second.ratio;
            if (found->second.skips > 0) {
                --found->second.skips;
                operation.way = Way::STRAIGHT;
                return;
            }
        }
    }
    auto &chooser = bypass[static_cast<size_t>(operation.kind)];
    if (chooser == nullptr) {
        chooser = std::make_unique<Bypass>(iface->lower_bandwidth(), codec_speed());
    }
    operation.way = chooser->choose(operation.length, static_cast<double>(operation.ratio));
    operation.measured = true;
}

// What a fence put before this operation must be complete. Only segments that follow one another
// are in order by themselves.
bool Ep::can_start(const Operation &operation) const
{
    const bool in_order =
            operation.kind == Kind::PUT && operation.way == Way::CODED && under_way == 0;
    return in_order || operation.done > 0 || operation.fence <= completed;
}

// ---- segments

// How many slots of the peer what is next could use.
size_t Ep::slots_wanted() const
{
    if (!answers.empty()) {
        const size_t left = answers.front().request.length - answers.front().done;
        if (left > iface->inline_max) {
            return left / iface->segment_size + answers.size();
        }
    }
    if (!operations.empty()) {
        const Operation &next = operations.front();
        const size_t left = next.length - next.done;
        if (next.chosen && next.kind == Kind::PUT && next.way == Way::CODED &&
            left > iface->inline_max) {
            return left / iface->segment_size + operations.size();
        }
    }
    return 0;
}

// Whether a step could be made now.
bool Ep::can_advance() const
{
    if (stage != Stage::IDLE || !declined.empty() ||
        (!unannounced.empty() && unannounced.front().flushed)) {
        return true;
    }
    const bool has_slot = !credits.empty() || !requested;
    const bool room = in_flight.size() + unannounced.size() < MAX_IN_FLIGHT;
    if (!answers.empty()) {
        const bool fits_message =
                answers.front().request.length - answers.front().done <= iface->inline_max;
        if (room && (fits_message || has_slot)) {
            return true;
        }
    }
    if (operations.empty()) {
        return false;
    }
    const Operation &next = operations.front();
    if (!next.chosen) {
        return true;
    }
    if (!can_start(next)) {
        return false;
    }
    if (next.way == Way::STRAIGHT) {
        return true;
    }
    if (next.kind == Kind::GET) {
        return coded_gets.size() < MAX_CODED_GETS;
    }
    return room && (next.length - next.done <= iface->inline_max || has_slot);
}

// Puts the encoded bytes of the next piece of `left` bytes at `data` where they can be sent from,
// and completes `segment`. False if that has to wait, or the endpoint has failed.
bool Ep::encode_segment(zip_coding_t coding, const char *data, size_t left)
{
    segment.header.to = peer_id;
    if (in_flight.size() + unannounced.size() >= MAX_IN_FLIGHT) {
        return false;
    }
    if (left <= iface->inline_max) {
        segment.length = left;
        segment.encoded_length = static_cast<uint32_t>(left);
        segment.slot = wire::Segment::INLINE;
        segment_data = data;
        stage = Stage::WRITTEN;
        return true;
    }
    if (credits.empty()) {
        return false;
    }
    // Equal pieces, so that the last one is not a scrap; whole tiles of the codec where there is
    // room.
    const size_t payload = slot_payload();
    const size_t pieces = (left + payload - 1) / payload;
    const size_t even = (left / pieces + SEGMENT_TILE - 1) / SEGMENT_TILE * SEGMENT_TILE;
    segment.length = std::min({left, payload, even});
    segment.slot = credits.back();

    char *output;
    if (remote->mapped()) {
        output = remote->mapped_slot(segment.slot);
    } else {
        if (iface->send_buffers() == nullptr) {
            zip_error("zip: no memory for staging; lower UCX_ZIP_STAGING_SIZE");
            fail(UCS_ERR_NO_MEMORY, true);
            return false;
        }
        segment_buffer = iface->take_tx_buffer(lower);
        if (segment_buffer == nullptr) {
            return false;
        }
        output = iface->tx_pool->slot(segment_buffer->slot);
    }
    size_t encoded = 0;
    const zip_status_t status = zip_codec_encode(coding, data, segment.length, output,
                                                 zip_codec_bound(segment.length), &encoded);
    if (status != ZIP_OK) {
        zip_error("zip: cannot encode %zu bytes: %s", size_t(segment.length),
                  zip_status_string(status));
        fail(UCS_ERR_IO_ERROR, true);
        return false;
    }
    credits.pop_back();
    ++credits_in_use;
    segment.encoded_length = static_cast<uint32_t>(encoded);
    segment_data = output;
    stage = remote->mapped() ? Stage::WRITTEN : Stage::ENCODED;
    return true;
}

// Chooses the next segment of an operation or, in turn with those, of an answer.
bool Ep::prepare_segment()
{
    segment = {};
    if (!answers.empty() && (operations.empty() || !answered_last)) {
        return prepare_answer();
    }
    const Operation &operation = operations.front();
    segment.region = operation.rkey->region;
    segment.address = operation.address + operation.done;
    segment_is_answer = false;
    return encode_segment(operation.coding, operation.local + operation.done,
                          operation.length - operation.done);
}

// The same for an answer, if the memory that was asked for is still registered.
bool Ep::prepare_answer()
{
    Answer &answer = answers.front();
    const size_t left = answer.request.length - answer.done;
    Region *source =
            iface->md->pin(answer.request.region, answer.request.address + answer.done, left);
    if (source == nullptr) {
        refuse(0, UCS_ERR_INVALID_ADDR, "get of memory that is no longer registered");
        return false;
    }
    const auto *data = reinterpret_cast<const char *>(answer.request.address + answer.done);
    segment.region = answer.request.to_region;
    segment.address = answer.request.to_address + answer.done;
    segment_is_answer = true;
    const bool prepared = encode_segment(answer.coding, data, left);
    iface->md->unpin(source);
    return prepared;
}

ucs_status_t Ep::post_segment()
{
    if (stage == Stage::ENCODED) {
        uct_iov_t iov = {};
        iov.buffer = const_cast<char *>(segment_data);
        iov.length = segment.encoded_length;
        iov.memh = iface->tx_pool->memory().memh();
        iov.count = 1;
        segment_buffer->completion.count = 1;
        segment_buffer->completion.status = UCS_OK;
        const ucs_status_t status =
                uct_ep_put_zcopy(lower, &iov, 1, remote->remote_address(segment.slot),
                                 remote->rkey(), &segment_buffer->completion);
        if (status == UCS_OK) {
            complete(&segment_buffer->completion, UCS_OK);
        } else if (status != UCS_INPROGRESS) {
            return status;
        }
        segment_buffer = nullptr;
        stage = iface->puts_are_ordered ? Stage::WRITTEN : Stage::PUT;
    }
    if (stage == Stage::PUT) {
        LowerOperation *under = iface->begin_lower_operation(this);
        const ucs_status_t status = uct_ep_flush(lower, 0, &under->completion);
        if (status != UCS_OK && status != UCS_INPROGRESS) {
            iface->forget_lower_operation(under);
            return status;
        }
        unannounced.push_back({segment, nullptr, status == UCS_OK});
        if (status == UCS_OK) {
            iface->forget_lower_operation(under);
        } else {
            under->segment = &unannounced.back();
            ++under_way;
        }
        Tracked *ends = segment_sent();
        if (failed == UCS_OK) {
            unannounced.back().ends = ends;
        }
        return UCS_OK;
    }
    if (!unannounced.empty()) {
        return UCS_ERR_NO_RESOURCE; // those before this one first
    }
    const size_t inline_length = segment.slot == wire::Segment::INLINE ? segment.length : 0;
    const ucs_status_t status = announce(segment, {segment_data, inline_length});
    if (status == UCS_OK) {
        Tracked *ends = segment_sent();
        if (ends != nullptr) {
            ends->last_segment = sent_sequence;
        }
    }
    return status;
}

// Sends the message of a segment that is in its slot, or is `inline_data`.
ucs_status_t Ep::announce(wire::Segment &message, Part inline_data)
{
    message.sequence = sent_sequence + 1;
    const ucs_status_t status =
            send_parts(lower, wire::SEGMENT, {{&message, sizeof(message)}, inline_data, {}});
    if (status == UCS_OK) {
        ++sent_sequence;
        in_flight.push_back(message.slot != wire::Segment::INLINE);
    }
    return status;
}

// Sends the messages of segments that waited for a flush, as far as there is room.
unsigned Ep::announce_flushed()
{
    unsigned sent = 0;
    while (failed == UCS_OK && !unannounced.empty() && unannounced.front().flushed) {
        const ucs_status_t status = announce(unannounced.front().segment, {});
        if (status != UCS_OK) {
            if (status != UCS_ERR_NO_RESOURCE) {
                fail(status, true);
            }
            break;
        }
        if (unannounced.front().ends != nullptr) {
            unannounced.front().ends->last_segment = sent_sequence;
        }
        unannounced.pop_front();
        ++sent;
    }
    return sent;
}

// Counts the segment that has just gone. If it was an operation's last one, returns where that is
// tracked; the operation's own completion has been called then.
Tracked *Ep::segment_sent()
{
    stage = Stage::IDLE;
    answered_last = segment_is_answer;
    ++iface->counters.segments;
    iface->counters.wire_bytes += segment.encoded_length;
    iface->counters.stored_segments += segment.encoded_length >= segment.length;
    if (segment_is_answer) {
        Answer &answer = answers.front();
        answer.done += segment.length;
        if (answer.done == answer.request.length) {
            answers.pop_front();
        }
        return nullptr;
    }
    Operation &operation = operations.front();
    operation.done += segment.length;
    if (operation.done < operation.length) {
        return nullptr;
    }
    Tracked &ends = track(operation);
    uct_completion_t *completion = operation.completion;
    operations.pop_front();
    complete(completion, UCS_OK);
    return failed == UCS_OK ? &ends : nullptr;
}

// ---- operations

// Moves the first operation to those that are on their way.
Tracked &Ep::track(const Operation &operation)
{
    Tracked &entry = tracked.emplace_back();
    entry.what = operation;
    return entry;
}

// What a get of a region of the peer has shown.
void Ep::remember(uint64_t region, float ratio)
{
    if (remembered.size() >= MAX_REMEMBERED) {
        remembered.clear();
    }
    remembered[region] = {ratio, ratio < 1 ? 0 : SKIPS};
}

// A get of encoded data: the peer is asked to put it here. `entry`: where the operation is tracked
// already, because the peer declined and it cannot go straight after all; otherwise NULL.
ucs_status_t Ep::ask_for_get(Operation &operation, Tracked *entry)
{
    if (coded_gets.size() >= MAX_CODED_GETS) {
        return UCS_ERR_NO_RESOURCE;
    }
    Region *region = iface->md->add_region(operation.local, operation.length);
    if (region == nullptr) {
        return UCS_ERR_NO_MEMORY;
    }
    const bool may_decline = entry == nullptr && iface->md->bypass == BypassOption::AUTO &&
                             can_go_straight(operation);
    const wire::Get message{{peer_id},         operation.rkey->region,
                            operation.address, operation.length,
                            region->id,        reinterpret_cast<uint64_t>(operation.local),
                            may_decline};
    const ucs_status_t status = send_message(lower, wire::GET, &message, sizeof(message));
    if (status != UCS_OK) {
        iface->md->remove_region(region);
        return status;
    }
    if (entry == nullptr) {
        entry = &track(operation);
        operations.pop_front();
    } else {
        declined.pop_front();
    }
    entry->region = region;
    coded_gets.push_back(entry);
    return UCS_OK;
}

// Posts what is left of an operation to the transport below, and a flush behind a put. `entry` as
// in ask_for_get().
ucs_status_t Ep::go_straight(Operation &operation, Tracked *entry)
{
    Md *md = iface->md;
    const bool is_put = operation.kind == Kind::PUT;
    const bool needs_memh = (md->lower_attr.flags & UCT_MD_FLAG_NEED_MEMH) != 0;
    const uct_mem_h memh =
            needs_memh && operation.region != nullptr ? md->lower_memh(operation.region) : nullptr;
    if (operation.under == nullptr) {
        if (!can_go_straight(operation) || (needs_memh && memh == nullptr)) {
            if (!operation.is_codable()) {
                zip_error("zip: %s cannot move this memory: it is not registered there at both "
                          "ends",
                          md->transport.c_str());
                return UCS_ERR_UNSUPPORTED;
            }
            unmeasure(operation);
            operation.way = Way::CODED;
            return UCS_OK;
        }
        operation.under = iface->begin_lower_operation(this);
        ++under_way;
    }
    LowerOperation *under = operation.under;
    const auto posted_below = [under](ucs_status_t status) {
        under->completion.count += status == UCS_INPROGRESS;
        return status == UCS_OK || status == UCS_INPROGRESS;
    };
    const uct_rkey_t rkey =
            operation.rkey->component != nullptr ? operation.rkey->bundle.rkey : UCT_INVALID_RKEY;
    const size_t most =
            is_put ? iface->lower_attr.cap.put.max_zcopy : iface->lower_attr.cap.get.max_zcopy;
    while (operation.done < operation.length) {
        uct_iov_t iov = {};
        iov.buffer = operation.local + operation.done;
        iov.length = std::min(operation.length - operation.done, most);
        iov.memh = memh;
        iov.count = 1;
        const uint64_t address = operation.address + operation.done;
        const ucs_status_t status =
                is_put ? uct_ep_put_zcopy(lower, &iov, 1, address, rkey, &under->completion)
                       : uct_ep_get_zcopy(lower, &iov, 1, address, rkey, &under->completion);
        if (!posted_below(status)) {
            return status;
        }
        operation.done += iov.length;
    }
    if (is_put) {
        const ucs_status_t status = uct_ep_flush(lower, 0, &under->completion);
        if (!posted_below(status)) {
            return status;
        }
    }
    iface->counters.straight_bytes += operation.length;
    under->user = operation.completion;
    if (entry == nullptr) {
        under->tracked = &track(operation);
        operations.pop_front();
    } else {
        under->tracked = entry;
        declined.pop_front();
    }
    under->tracked->what.under = nullptr;
    last_straight = under;
    complete(&under->completion, UCS_OK); // may end it
    return UCS_OK;
}

void Ep::lower_operation_ended(LowerOperation &ended, ucs_status_t status)
{
    KeepAlive guard(this);
    --under_way;
    if (last_straight == &ended) {
        last_straight = nullptr;
    }
    if (ended.segment != nullptr) {
        ended.segment->flushed = true;
    }
    if (ended.tracked != nullptr) {
        end(*ended.tracked);
    }
    complete(ended.user, status);
    if (status != UCS_OK) {
        fail(status, true);
    }
    retire();
    if (under_way == 0) {
        complete(std::exchange(canceled, nullptr), UCS_OK);
    }
    if (!doomed && has_work()) {
        iface->activate(this);
    }
}

// Has the bypass forget an operation whose time says nothing.
void Ep::unmeasure(Operation &operation)
{
    if (operation.measured) {
        operation.measured = false;
        bypass[static_cast<size_t>(operation.kind)]->drop(operation.way, seconds(Clock::now()));
    }
}

// An operation is done at the peer.
void Ep::end(Tracked &operation)
{
    operation.done = true;
    const Operation &what = operation.what;
    if (what.measured) {
        bypass[static_cast<size_t>(what.kind)]->end(what.way, what.length,
                                                    static_cast<double>(what.ratio),
                                                    seconds(what.since), seconds(Clock::now()));
    }
}

// Ends the coded puts whose last segment is acknowledged.
void Ep::end_acknowledged()
{
    for (Tracked &operation : tracked) {
        const bool coded_put = operation.what.kind == Kind::PUT && operation.what.way == Way::CODED;
        if (!coded_put || operation.done) {
            continue;
        }
        if (operation.last_segment == 0 || operation.last_segment > acked_sequence) {
            break;
        }
        end(operation);
    }
}

// Takes complete operations off, in order, and ends the flushes that waited for them.
void Ep::retire()
{
    KeepAlive guard(this);
    while (!tracked.empty() && tracked.front().done) {
        ++completed;
        tracked.pop_front();
    }
    while (!flushes.empty() && flushes.front().operation <= completed) {
        uct_completion_t *completion = flushes.front().completion;
        flushes.pop_front();
        complete(completion, UCS_OK);
    }
}

// One step of what is next. UCS_ERR_NO_RESOURCE: it has to wait.
ucs_status_t Ep::advance()
{
    if (stage == Stage::WRITTEN && segment_is_answer && segment.slot == wire::Segment::INLINE) {
        stage = Stage::IDLE; // its memory may have been deregistered meanwhile: looked up anew
    }
    if (stage != Stage::IDLE) {
        return post_segment();
    }
    if (!declined.empty()) {
        Tracked *entry = declined.front();
        return entry->what.way == Way::STRAIGHT ? go_straight(entry->what, entry)
                                                : ask_for_get(entry->what, entry);
    }
    const bool answer_is_next = !answers.empty() && (operations.empty() || !answered_last);
    if (!answer_is_next) {
        if (operations.empty()) {
            return UCS_ERR_NO_RESOURCE;
        }
        Operation &next = operations.front();
        if (!next.chosen) {
            choose_way(next);
        }
        const bool coded_put = next.kind == Kind::PUT && next.way == Way::CODED;
        if (!can_start(next)) {
            answered_last = false; // answers go on meanwhile
            return UCS_ERR_NO_RESOURCE;
        }
        if (!coded_put) {
            answered_last = false;
            return next.way == Way::STRAIGHT ? go_straight(next, nullptr)
                                             : ask_for_get(next, nullptr);
        }
    }
    if (!prepare_segment()) {
        answered_last = !answered_last; // the other queue may find what it needs
        return failed != UCS_OK ? failed : UCS_ERR_NO_RESOURCE;
    }
    return post_segment();
}

unsigned Ep::send()
{
    unsigned steps = announce_flushed();
    unsigned waits = 0;
    while (steps < MAX_BURST && failed == UCS_OK) {
        const ucs_status_t status = advance();
        if (status == UCS_ERR_NO_RESOURCE) {
            // an answer that waits does not hold up an operation, nor the other way round
            if (stage != Stage::IDLE || answers.empty() || ++waits == 2) {
                break;
            }
        } else if (status != UCS_OK) {
            fail(status, true);
            break;
        } else {
            waits = 0;
            ++steps;
        }
    }
    return steps;
}

ucs_status_t Ep::post(Kind kind, const uct_iov_t *iov, size_t count, uint64_t address, Rkey *rkey,
                      uct_completion_t *completion)
{
    if (failed != UCS_OK) {
        return failed;
    }
    if (count > 1) {
        return UCS_ERR_INVALID_PARAM; // max_iov is 1
    }
    const size_t length = count == 0 ? 0 : iov->length * iov->count;
    if (length == 0) {
        return UCS_OK;
    }
    if (peer_gone) {
        return UCS_ERR_CONNECTION_RESET;
    }
    if (!can_accept() || (!pending.empty() && !dispatching)) {
        return UCS_ERR_NO_RESOURCE; // those that wait in `pending` go first
    }
    // No completion is called before this function returns, so one that can be done here must not
    // have one.
    const bool first = operations.empty() && depth == 0 && connected;
    Operation &operation = operations.emplace_back();
    operation.kind = kind;
    operation.local = static_cast<char *>(iov->buffer);
    operation.length = length;
    operation.region = static_cast<Region *>(iov->memh);
    operation.address = address;
    operation.rkey = rkey;
    operation.completion = first ? nullptr : completion;
    operation.fence = fenced;
    operation.since = Clock::now();
    ++posted;
    if (kind == Kind::PUT) {
        ++iface->counters.puts;
        iface->counters.put_bytes += length;
    } else {
        ++iface->counters.gets;
        iface->counters.get_bytes += length;
    }
    if (first) {
        KeepAlive guard(this);
        last_straight = nullptr;
        const size_t gets_before = coded_gets.size();
        control();
        send();
        if (failed != UCS_OK) {
            return failed;
        }
        if (!operations.empty()) {
            operations.front().completion = completion;
        } else if (last_straight != nullptr) {
            last_straight->user = completion;
        } else if (coded_gets.size() > gets_before) {
            coded_gets.back()->what.completion = completion;
        } else {
            if (has_work()) {
                iface->activate(this);
            }
            return UCS_OK;
        }
    }
    iface->activate(this);
    return UCS_INPROGRESS;
}

void Ep::fence()
{
    fenced = posted;
}

ucs_status_t Ep::flush(unsigned flags, uct_completion_t *completion)
{
    if ((flags & UCT_FLUSH_FLAG_CANCEL) != 0) {
        fail(UCS_ERR_CANCELED, false);
        if (under_way == 0) {
            return UCS_OK;
        }
        // The transport below still reads or writes the application's memory.
        if (!lower_failed) {
            lower_failed = true;
            uct_ep_flush(lower, UCT_FLUSH_FLAG_CANCEL, nullptr);
        }
        if (under_way == 0) {
            return UCS_OK;
        }
        canceled = completion;
        return UCS_INPROGRESS;
    }
    if (failed != UCS_OK) {
        return failed;
    }
    if (!pending.empty() && !dispatching) {
        return UCS_ERR_NO_RESOURCE; // what waits there is to be flushed, too
    }
    if (completed == posted) {
        return UCS_OK;
    }
    if (completion != nullptr) {
        flushes.push_back({posted, completion});
    }
    return UCS_INPROGRESS;
}

unsigned Ep::dispatch_pending()
{
    unsigned done = 0;
    while (!pending.empty() && can_accept() && failed == UCS_OK) {
        uct_pending_req_t *request = pending.front();
        pending.pop_front();
        dispatching = true;
        const ucs_status_t status = request->func(request);
        dispatching = false;
        if (status == UCS_OK) {
            ++done;
        } else {
            pending.push_front(request);
            if (status != UCS_INPROGRESS) {
                break;
            }
        }
    }
    return done;
}

// ---- what the peer says to the sender

bool Ep::take_credits(const char *slots, uint32_t count, size_t available)
{
    if (count > wire::MAX_SLOTS_A_MESSAGE || available < count * sizeof(uint32_t) ||
        (count > 0 && remote == nullptr)) {
        return false;
    }
    for (uint32_t i = 0; i < count; ++i) {
        uint32_t slot;
        memcpy(&slot, slots + i * sizeof(slot), sizeof(slot));
        if (slot >= remote->count() || credits.size() >= remote->count()) {
            return false;
        }
        credits.push_back(slot);
    }
    return true;
}

void Ep::on_grant(const char *data, size_t length)
{
    wire::Grant grant;
    const bool good =
            wire::read(data, length, grant) && grant.count > 0 &&
            grant.count <= wire::MAX_SLOTS_A_MESSAGE &&
            length - sizeof(grant) == grant.count * sizeof(uint32_t) + size_t(grant.rkey_length) &&
            grant.slot_size >= ZIP_CODEC_MAX_GROWTH + SEGMENT_ALIGNMENT && grant.slot_count > 0 &&
            grant.rkey_length == (iface->md->lower_attr.flags & UCT_MD_FLAG_NEED_RKEY
                                          ? iface->md->lower_attr.rkey_packed_size
                                          : 0);
    if (!good) {
        refuse(0, UCS_ERR_INVALID_PARAM, "malformed grant of slots");
        return;
    }
    const char *slots = data + sizeof(grant);
    if (remote == nullptr) {
        ucs_status_t status;
        remote = RemoteRing::open(iface->md, grant.ring_address, grant.slot_size, grant.slot_count,
                                  slots + grant.count * sizeof(uint32_t), status);
        if (remote == nullptr) {
            zip_error("zip: cannot reach the peer's staging memory: %s", ucs_status_string(status));
            fail(status, true);
            return;
        }
    }
    if (grant.slot_size != remote->slot_size() || grant.slot_count != remote->count() ||
        !take_credits(slots, grant.count, length - sizeof(grant))) {
        refuse(0, UCS_ERR_INVALID_PARAM, "grant of slots that do not exist");
        return;
    }
    requested = false;
}

void Ep::on_ack(const char *data, size_t length)
{
    wire::Ack ack;
    if (!wire::read(data, length, ack) || ack.sequence < acked_sequence ||
        ack.sequence > sent_sequence ||
        length - sizeof(ack) != size_t(ack.count) * sizeof(uint32_t)) {
        refuse(0, UCS_ERR_INVALID_PARAM, "malformed acknowledgement");
        return;
    }
    for (; acked_sequence < ack.sequence; ++acked_sequence) {
        credits_in_use -= in_flight.front();
        in_flight.pop_front();
    }
    if (!take_credits(data + sizeof(ack), ack.count, length - sizeof(ack))) {
        refuse(0, UCS_ERR_INVALID_PARAM, "acknowledgement with slots that do not exist");
        return;
    }
    if (credits_in_use == 0) {
        requested = false; // if none came back there is a need to ask again
    }
    end_acknowledged();
    retire();
}

// The peer asks for a piece of this side's memory.
void Ep::on_get(const char *data, size_t length)
{
    wire::Get message;
    if (!wire::read(data, length, message) || length != sizeof(message) || message.length == 0) {
        refuse(0, UCS_ERR_INVALID_PARAM, "malformed get");
        return;
    }
    if (answers.size() + to_decline.size() >= MAX_CODED_GETS) {
        refuse(0, UCS_ERR_INVALID_PARAM, "more gets than a peer may have under way");
        return;
    }
    Region *source = iface->md->pin(message.region, message.address, message.length);
    if (source == nullptr || !source->host) {
        if (source != nullptr) {
            iface->md->unpin(source);
        }
        refuse(0, UCS_ERR_INVALID_ADDR, "get of memory that was not exported to it");
        return;
    }
    Answer answer{message};
    float ratio;
    answer.coding = iface->choose_coding(reinterpret_cast<const char *>(message.address),
                                         message.length, ratio);
    iface->md->unpin(source);
    if (message.may_decline != 0 && answer.coding.dtype == ZIP_DTYPE_BYTES) {
        to_decline.push_back(message.to_region);
    } else {
        answers.push_back(answer);
    }
    control();
    send();
}

// The peer found that what was asked for would not shrink.
void Ep::on_decline(const char *data, size_t length)
{
    wire::Decline message;
    if (!wire::read(data, length, message)) {
        refuse(0, UCS_ERR_INVALID_PARAM, "malformed answer to a get");
        return;
    }
    for (Tracked *get : coded_gets) {
        if (get->region->id == message.to_region && get->received == 0 &&
            can_go_straight(get->what)) {
            std::erase(coded_gets, get);
            iface->md->remove_region(std::exchange(get->region, nullptr));
            unmeasure(get->what);
            get->what.way = Way::STRAIGHT;
            remember(get->what.rkey->region, 1);
            declined.push_back(get);
            send();
            return;
        }
    }
    refuse(0, UCS_ERR_INVALID_PARAM, "answer to a get that was not asked for");
}

} // namespace zip
