// SPDX-License-Identifier: BSD-3-Clause
// The receiver's half of an endpoint: lends slots, decodes what arrives in them, acknowledges.
#include "uct/zip/zip_ep.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace zip {

namespace {

constexpr uint32_t MAX_WINDOW = 32; // slots that one endpoint may have

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

void Ep::grant_wanted()
{
    SlotPool *ring = iface->receive_ring();
    if (ring == nullptr) {
        refuse(0, UCS_ERR_NO_MEMORY, "no memory for staging; see UCX_ZIP_STAGING_SIZE");
        return;
    }
    // A peer that is alone may have a quarter of what is free at a time, so that others find some,
    // and never more than a window.
    const size_t held = lent.size() + to_ack.size() + to_grant.size();
    if (held >= MAX_WINDOW) {
        wanted = 0;
        return;
    }
    const uint32_t fair = std::min(std::max(1u, ring->free_count() / 4),
                                   MAX_WINDOW - static_cast<uint32_t>(held));
    uint32_t slot;
    for (uint32_t i = 0; i < fair && wanted > 0 && ring->take(slot); ++i) {
        to_grant.push_back(slot);
        --wanted;
    }
    if (to_grant.empty()) {
        if (!in_waiting) {
            in_waiting = true;
            iface->waiting.push_back(this);
        }
        iface->recall_slots();
        return;
    }
    wanted = 0; // the peer asks again if it needs more
    iface->activate(this);
}

void Ep::on_request(const char *data, size_t length)
{
    wire::Request request;
    if (!wire::parse(data, length, request)) {
        refuse(0, UCS_ERR_INVALID_PARAM, "malformed request for slots");
        return;
    }
    wanted = request.wanted;
    peer_process = request.process;
    if (!in_waiting) {
        grant_wanted();
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
    const bool is_inline = view.inline_data != nullptr;
    const char *encoded = view.inline_data;
    if (!is_inline) {
        const auto held = std::find(lent.begin(), lent.end(), message.slot);
        if (held == lent.end()) {
            refuse(message.sequence, UCS_ERR_INVALID_PARAM,
                   "segment in a slot that is not the peer's");
            return;
        }
        if (message.encoded_length > iface->ring->slot_size()) {
            refuse(message.sequence, UCS_ERR_INVALID_PARAM, "segment longer than a slot");
            return;
        }
        lent.erase(held);
        to_ack.push_back(message.slot); // this endpoint's again, whatever happens now
        encoded = iface->ring->slot(message.slot);
    }

    Region *region = iface->md->pin(message.region, message.address, message.length);
    if (region == nullptr || !region->host) {
        if (region != nullptr) {
            iface->md->unpin(region);
        }
        refuse(message.sequence, UCS_ERR_INVALID_ADDR,
               "segment for memory that was not exported to it");
        return;
    }
    // What was asked for has to come in order: that is how its end is known.
    Tracked *get = nullptr;
    for (Tracked *candidate : coded_gets) {
        get = candidate->region == region ? candidate : get;
    }
    if (get != nullptr && message.address != region->address + get->received) {
        iface->md->unpin(region);
        refuse(message.sequence, UCS_ERR_INVALID_PARAM, "answer to a get out of order");
        return;
    }
    void *destination = reinterpret_cast<void *>(message.address);
    zip_status_t status = ZIP_OK;
    if (is_inline) {
        memcpy(destination, encoded, message.length);
    } else {
        status = zip_codec_decode(encoded, message.encoded_length, destination, message.length);
    }
    iface->md->unpin(region);
    if (status != ZIP_OK) {
        refuse(message.sequence, UCS_ERR_IO_ERROR, zip_status_string(status));
        return;
    }
    ++received_sequence;
    ++iface->counters.received_segments;
    iface->counters.received_bytes += message.length;
    ack_due = true;
    // Others wait for slots: this one goes to the first of them, and this endpoint's peer has to
    // queue again.
    if (!is_inline && !iface->waiting.empty()) {
        to_ack.pop_back();
        iface->release_slot(message.slot);
    }
    control();
    if (get != nullptr && failed == UCS_OK) {
        received_for_get(*get, message);
    }
}

// A piece of what was asked for is decoded; with the last one the get is complete.
void Ep::received_for_get(Tracked &get, const wire::Segment &segment_of_it)
{
    get.received += segment_of_it.length;
    get.encoded += segment_of_it.encoded_length;
    if (get.received < get.what.length) {
        return;
    }
    std::erase(coded_gets, &get);
    iface->md->remove_region(std::exchange(get.region, nullptr));
    const float ratio = static_cast<float>(get.encoded) / static_cast<float>(get.what.length);
    remember(get.what.rkey->region, std::min(ratio, 0.99f));
    end(get);
    complete(std::exchange(get.what.completion, nullptr), UCS_OK);
    retire();
}

void Ep::on_return(const char *data, size_t length)
{
    wire::SlotsView returned;
    if (!wire::parse(data, length, returned)) {
        refuse(0, UCS_ERR_INVALID_PARAM, "malformed return of slots");
        return;
    }
    recall_sent = false;
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
