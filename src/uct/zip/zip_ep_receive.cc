// SPDX-License-Identifier: BSD-3-Clause
// The receiver's half of an endpoint: lends slots, decodes what arrives in them, acknowledges.
#include "uct/zip/zip_ep.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace zip {

namespace {

constexpr uint32_t MAX_WINDOW = 32;  // slots of a ring that one endpoint may have
constexpr unsigned MAX_DECODING = 2; // pieces that are decoded, before others wait for company

} // namespace

void Ep::refuse(uint64_t sequence, ucs_status_t status, const char *why)
{
    ++iface->counters.refused_segments;
    zip_error("zip: endpoint %p: refused what its peer sent: %s", static_cast<void *>(this), why);
    if (connected && lower != nullptr) {
        // If this cannot be sent now the peer learns it from the end of the connection.
        const wire::Refuse message{{peer_id}, sequence, status};
        send_message(lower, wire::REFUSE, &message, sizeof(message));
    }
    fail(status, true);
}

void Ep::grant_wanted(unsigned ring)
{
    Side *side = iface->side(ring);
    SlotPool *pool = side != nullptr ? iface->receive_ring(*side) : nullptr;
    if (pool == nullptr) {
        refuse(0, UCS_ERR_NO_MEMORY,
               "no memory for staging; see UCX_ZIP_STAGING_SIZE and UCX_ZIP_HOST_STAGING_SIZE");
        return;
    }
    // A peer that is alone may have a quarter of what is free at a time (of a GPU's few slots
    // half, or all where there is no other peer), so that others find some, and never more than a
    // window.
    Lending &lends = lending[ring];
    const size_t held = slots_held(ring);
    if (held >= MAX_WINDOW) {
        lends.wanted = 0;
        return;
    }
    const uint32_t share = ring == 0 ? 4 : iface->eps.size() > 1 ? 2 : 1;
    const uint32_t fair = std::min(std::max(1u, pool->free_count() / share),
                                   MAX_WINDOW - static_cast<uint32_t>(held));
    uint32_t index;
    for (uint32_t i = 0; i < fair && lends.wanted > 0 && pool->take(index); ++i) {
        lends.to_grant.push_back(wire::slot_number(ring, index));
        --lends.wanted;
    }
    if (lends.to_grant.empty()) {
        if (!lends.in_waiting) {
            lends.in_waiting = true;
            side->waiting.push_back(this);
        }
        iface->recall_slots(ring);
        return;
    }
    lends.wanted = 0; // the peer asks again if it needs more
    iface->activate(this);
}

void Ep::on_request(const char *data, size_t length)
{
    wire::Request request;
    if (!wire::parse(data, length, request)) {
        refuse(0, UCS_ERR_INVALID_PARAM, "malformed request for slots");
        return;
    }
    if (request.ring > 0 && iface->md->gpu(request.ring) == nullptr) {
        refuse(0, UCS_ERR_INVALID_PARAM, "request for slots of a GPU that there is not");
        return;
    }
    Lending &lends = lending[request.ring];
    lends.wanted = request.wanted;
    peer_process = request.process;
    if (!lends.in_waiting) {
        grant_wanted(request.ring);
    }
}

void Ep::on_segment(const char *data, size_t length)
{
    wire::SegmentView view;
    if (!wire::parse(data, length, view)) {
        refuse(0, UCS_ERR_INVALID_PARAM, "malformed segment message");
        return;
    }
    const wire::Segment &message = view.head;
    if (message.sequence != received_sequence + 1) {
        refuse(message.sequence, UCS_ERR_INVALID_PARAM, "segment out of sequence");
        return;
    }
    const bool in_slot =
            message.slot != wire::Segment::INLINE && message.slot != wire::Segment::PLACED;
    const unsigned ring = in_slot ? wire::ring_of(message.slot) : 0;
    if (in_slot) {
        const auto held = std::find(lent.begin(), lent.end(), uint32_t{message.slot});
        if (held == lent.end()) {
            refuse(message.sequence, UCS_ERR_INVALID_PARAM,
                   "segment in a slot that is not the peer's");
            return;
        }
        const Side &side = *iface->sides[ring];
        if (message.encoded_length > side.ring->slot_size() - chunk_offset(ring)) {
            refuse(message.sequence, UCS_ERR_INVALID_PARAM, "segment longer than a slot");
            return;
        }
        lent.erase(held); // this endpoint's again, whatever happens now
    }
    Arrival arrival = {};
    arrival.segment = message;
    arrival.state = Arrival::State::DONE;
    const auto not_taken = [&](ucs_status_t status, const char *why) {
        drop_arrival(arrival);
        refuse(message.sequence, status, why);
    };
    Region *region = iface->md->pin(message.region, message.address, message.length);
    const bool fits = region != nullptr && region->codable() &&
                      (message.slot == wire::Segment::PLACED ||
                       (region->ring == static_cast<int>(ring) && message.length > 0));
    if (!fits) {
        if (region != nullptr) {
            iface->md->unpin(region);
        }
        not_taken(UCS_ERR_INVALID_ADDR, "segment for memory that was not exported to it");
        return;
    }
    // What was asked for has to come in order: that is how its end is known.
    for (Tracked *candidate : coded_gets) {
        arrival.get = candidate->region == region ? candidate : arrival.get;
    }
    Tracked *get = arrival.get;
    const bool is_placed = message.slot == wire::Segment::PLACED;
    if (get != nullptr &&
        (message.address != region->address + get->arrived || (is_placed && !get->has_ends))) {
        iface->md->unpin(region);
        not_taken(UCS_ERR_INVALID_PARAM, "answer to a get out of order");
        return;
    }
    zip_status_t status = ZIP_OK;
    if (!in_slot) {
        if (view.inline_data != nullptr) {
            memcpy(reinterpret_cast<void *>(message.address), view.inline_data, message.length);
        }
    } else if (ring == 0) {
        status = zip_codec_decode(iface->sides[0]->ring->slot(wire::index_of(message.slot)),
                                  message.encoded_length, reinterpret_cast<void *>(message.address),
                                  message.length);
    } else {
        arrival.state = Arrival::State::WAITING;
        arrival.region = region;
    }
    if (status == ZIP_OK && arrival.state == Arrival::State::WAITING) {
        // From now on it is the GPU's pin, of a ticket that there is not yet.
        iface->md->pin_device(region, {});
    }
    iface->md->unpin(region);
    if (status != ZIP_OK) {
        not_taken(UCS_ERR_IO_ERROR, zip_status_string(status));
        return;
    }
    if (get != nullptr) {
        get->arrived += message.length;
        if (is_placed && get->arrived == get->what.length) {
            get->tail_arrived = std::chrono::steady_clock::now();
        }
    }
    ++received_sequence;
    arrivals.push_back(arrival);
    launch_decodes();
    finish_arrivals();
    if (failed == UCS_OK) {
        control();
    }
}

// Gives back what an arrival holds that will not be decoded, when nobody uses it any more.
void Ep::drop_arrival(Arrival &arrival)
{
    const GpuQueue::Ticket ticket = arrival.ticket;
    GpuQueue::end(arrival.ticket);
    if (arrival.region != nullptr) {
        iface->md->unpin_device(std::exchange(arrival.region, nullptr), ticket);
    }
    const uint32_t slot = arrival.segment.slot;
    arrival.segment.slot = wire::Segment::PLACED;
    if (slot != wire::Segment::INLINE && slot != wire::Segment::PLACED) {
        iface->release_slot(slot);
    }
}

// Has GPUs decode what has arrived. Few pieces are worth a launch only if the GPU would be idle.
void Ep::launch_decodes()
{
    const auto waits = [](const Arrival &arrival) {
        return arrival.state == Arrival::State::WAITING;
    };
    const auto waiting =
            static_cast<unsigned>(std::count_if(arrivals.begin(), arrivals.end(), waits));
    if (waiting == 0 || (decoding > MAX_DECODING && waiting < MAX_DECODING)) {
        return;
    }
    std::vector<Region *> pinned;
    auto first = std::find_if(arrivals.begin(), arrivals.end(), waits);
    while (first != arrivals.end()) {
        const unsigned ring = wire::ring_of(first->segment.slot);
        Side &side = *iface->sides[ring];
        side.items.clear();
        auto end = first;
        for (; end != arrivals.end() && side.items.size() < side.decoder->room() &&
               side.items.size() < ZIP_GPU_INLINE_ITEMS;
             ++end) {
            const wire::Segment &segment = end->segment;
            if (!waits(*end) || wire::ring_of(segment.slot) != ring) {
                break;
            }
            // It may have been deregistered while it waited.
            Region *region = iface->md->pin(segment.region, segment.address, segment.length);
            if (region == nullptr) {
                break;
            }
            pinned.push_back(region);
            zip_gpu_item_t item = {};
            item.coding = {static_cast<zip_dtype_t>(segment.dtype),
                           static_cast<zip_shape_t>(segment.shape), segment.small_tiles};
            item.data = reinterpret_cast<void *>(segment.address);
            item.data_size = segment.length;
            char *chunk = side.ring->slot(wire::index_of(segment.slot)) + chunk_offset(ring);
            // A coded chunk is read as fast by the decoder itself, and sooner.
            if (side.arrived != nullptr && segment.dtype == ZIP_DTYPE_BYTES) {
                char *copy = side.arrived->address() + (chunk - side.ring->slot(0));
                if (!side.decoder->copy(copy, chunk, segment.encoded_length)) {
                    break; // the decoder has failed
                }
                chunk = copy;
            }
            item.chunks = chunk;
            item.last_room = segment.encoded_length;
            side.items.push_back(item);
        }
        if (side.items.empty()) {
            const bool copy_failed = !pinned.empty();
            for (Region *region : std::exchange(pinned, {})) {
                iface->md->unpin(region);
            }
            if (copy_failed) {
                refuse(first->segment.sequence, UCS_ERR_IO_ERROR, side.decoder->error_text());
            } else if (side.decoder->room() > 0) {
                refuse(first->segment.sequence, UCS_ERR_INVALID_ADDR,
                       "segment for memory that is no longer registered");
            }
            return;
        }
        const bool launched = side.decoder->decode(
                side.items, iface->sms_for(side.ring->memory().on_gpu()), side.tickets);
        auto next = first;
        for (size_t i = 0; launched && next != end; ++next, ++i) {
            next->state = Arrival::State::DECODING;
            next->ticket = side.tickets[i];
            iface->md->repin_device(next->region, {}, next->ticket);
            ++decoding;
        }
        for (Region *region : std::exchange(pinned, {})) {
            iface->md->unpin(region);
        }
        if (!launched) {
            if (!side.decoder->is_full()) {
                // What the peer says of a segment may be impossible, too.
                refuse(first->segment.sequence, UCS_ERR_IO_ERROR, side.decoder->error_text());
            }
            return;
        }
        first = std::find_if(end, arrivals.end(), waits);
    }
}

// Takes off, in order, what has arrived and is decoded. Returns how many.
unsigned Ep::finish_arrivals()
{
    KeepAlive guard(this);
    unsigned count = 0;
    while (failed == UCS_OK && !arrivals.empty()) {
        Arrival &arrival = arrivals.front();
        if (arrival.state == Arrival::State::WAITING) {
            break;
        }
        if (arrival.state == Arrival::State::DECODING) {
            uint64_t word = 0;
            const GpuQueue::Ticket ticket = arrival.ticket;
            const GpuQueue::State state = GpuQueue::poll(arrival.ticket, word);
            if (state == GpuQueue::State::UNDER_WAY) {
                break;
            }
            --decoding;
            iface->md->unpin_device(std::exchange(arrival.region, nullptr), ticket);
            const zip_status_t status = state == GpuQueue::State::FAILED
                                                ? ZIP_ERR_DEVICE
                                                : ZIP_GPU_PROGRESS_STATUS(word);
            if (status != ZIP_OK) {
                refuse(arrival.segment.sequence, UCS_ERR_IO_ERROR, zip_status_string(status));
                break;
            }
            arrival.state = Arrival::State::DONE;
        }
        const wire::Segment segment = arrival.segment;
        Tracked *get = arrival.get;
        arrivals.pop_front();
        ++count;
        ++decoded_sequence;
        ack_due = true;
        if (segment.slot == wire::Segment::PLACED) {
            if (get != nullptr) {
                received_for_get(*get, segment);
            }
            continue;
        }
        ++iface->counters.received_segments;
        iface->counters.received_bytes += segment.length;
        if (segment.slot != wire::Segment::INLINE) {
            // Others wait for slots: this one goes to the first of them, and this endpoint's peer
            // has to queue again.
            if (iface->sides[wire::ring_of(segment.slot)]->waiting.empty()) {
                to_ack.push_back(uint32_t{segment.slot});
            } else {
                iface->release_slot(segment.slot);
            }
        }
        if (get != nullptr) {
            received_for_get(*get, segment);
        }
    }
    return count;
}

void Ep::on_return(const char *data, size_t length)
{
    wire::SlotsView returned;
    if (!wire::parse(data, length, returned)) {
        refuse(0, UCS_ERR_INVALID_PARAM, "malformed return of slots");
        return;
    }
    if (returned.slots.count() > 0) {
        lending[wire::ring_of(returned.slots[0])].recall_sent = false;
    } else {
        for (auto &[ring, lends] : lending) {
            lends.recall_sent = false;
        }
    }
    for (uint32_t i = 0; i < returned.slots.count(); ++i) {
        const uint32_t slot = returned.slots[i];
        const auto held = std::find(lent.begin(), lent.end(), slot);
        if (held == lent.end()) {
            refuse(0, UCS_ERR_INVALID_PARAM, "return of a slot that is not the peer's");
            return;
        }
        lent.erase(held);
        iface->release_slot(slot);
    }
}

} // namespace zip
