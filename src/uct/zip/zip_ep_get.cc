// SPDX-License-Identifier: BSD-3-Clause
// Gets of encoded data, at the side that asks for them: the peer puts it here (Ep::answers), its
// ends as they are.
#include "uct/zip/zip_ep.h"
#include "uct/zip/zip_message.h"

#include <algorithm>
#include <utility>

namespace zip {

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t MAX_REMEMBERED = 1024; // addresses and regions of a peer
constexpr unsigned SKIPS = 15;     // gets of what does not shrink, before it is asked for again
constexpr float MAX_RATIO = 0.99f; // of what shrinks

// An address of a region, among the regions.
uint64_t place(const Operation &get)
{
    return get.rkey->region ^ get.address * 0x9e3779b97f4a7c15;
}

} // namespace

// What gets of these bytes were like, or else of others of that region. NULL: there was none.
Ep::Remembered *Ep::remembered_of(const Operation &get)
{
    auto found = remembered.find(place(get));
    if (found == remembered.end()) {
        found = remembered.find(get.rkey->region);
    }
    return found != remembered.end() ? &found->second : nullptr;
}

// What a get has shown.
void Ep::remember(const Operation &get, float ratio)
{
    if (remembered.size() >= MAX_REMEMBERED) {
        remembered.clear();
    }
    for (const uint64_t key : {place(get), get.rkey->region}) {
        remembered[key] = {ratio, ratio < 1 ? 0 : SKIPS};
    }
}

// Whether a get's ends may go plain: one that has the wire to itself, into memory that the
// transport below can put into.
bool Ep::wants_ends(const Operation &get) const
{
    return get.uses_gpu && under_way_bytes(Kind::GET) == get.length &&
           iface->strategy() == Strategy::ENDS && get.region != nullptr &&
           iface->md->lower_key_size() > 0;
}

// Asks the peer to put encoded data here. `entry`: where the operation is tracked already, because
// the peer declined and it cannot go straight after all; otherwise NULL.
ucs_status_t Ep::ask_for_get(Operation &operation, Tracked *entry)
{
    if (coded_gets.size() >= MAX_CODED_GETS) {
        return UCS_ERR_NO_RESOURCE;
    }
    const int ring = operation.on_gpu() ? operation.region->ring : 0;
    Region *region = iface->md->add_region(operation.local, operation.length, ring);
    if (region == nullptr) {
        return UCS_ERR_NO_MEMORY;
    }
    wire::Get message = {};
    message.header.to = peer_id;
    message.region = operation.rkey->region;
    message.address = operation.address;
    message.length = operation.length;
    message.to_region = region->id;
    message.to_address = reinterpret_cast<uint64_t>(operation.local);
    message.to_ring = static_cast<uint8_t>(ring);
    message.may_decline = entry == nullptr && iface->md->bypass == BypassOption::AUTO &&
                          can_go_straight(operation);
    std::vector<char> key;
    if (entry == nullptr && wants_ends(operation)) {
        key.resize(iface->md->lower_key_size());
        if (!iface->md->pack_lower(operation.region, key.data())) {
            key.clear();
        }
        const double wire = gpu_bypass_for(Kind::GET).wire();
        message.key_length = static_cast<uint8_t>(key.size());
        message.wire = static_cast<uint64_t>(wire);
        message.tail = std::min(operation.length, static_cast<size_t>(wire * decoding_seconds));
    }
    const ucs_status_t status = send_parts(
            lower, wire::GET, {{&message, sizeof(message)}, {key.data(), key.size()}, {}});
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
    entry->has_ends = !key.empty();
    coded_gets.push_back(entry);
    return UCS_OK;
}

// A piece of what was asked for is decoded, or was put where it belongs; with the last one the get
// is complete.
void Ep::received_for_get(Tracked &get, const wire::Segment &segment)
{
    const auto now = Clock::now();
    get.received += segment.length;
    if (segment.slot == wire::Segment::PLACED) {
        get.plain_bytes += segment.length;
    } else {
        get.encoded += segment.encoded_length;
        get.decoded = now;
    }
    if (get.received < get.what.length) {
        return;
    }
    if (get.tail_arrived != Clock::time_point{} && get.what.alone) {
        learn_tail(decoding_seconds,
                   std::chrono::duration<double>(get.decoded - get.tail_arrived).count());
    }
    std::erase(coded_gets, &get);
    iface->md->remove_region(std::exchange(get.region, nullptr));
    const size_t coded = std::max<size_t>(get.what.length - get.plain_bytes, 1);
    const float ratio = static_cast<float>(get.encoded) / static_cast<float>(coded);
    remember(get.what, std::min(ratio, MAX_RATIO));
    end(get);
    complete(std::exchange(get.what.completion, nullptr), UCS_OK);
    retire();
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
        if (get->region->id == message.to_region && get->arrived == 0 &&
            can_go_straight(get->what)) {
            std::erase(coded_gets, get);
            iface->md->remove_region(std::exchange(get->region, nullptr));
            unmeasure(get->what);
            get->what.way = Way::STRAIGHT;
            remember(get->what, 1);
            declined.push_back(get);
            send();
            return;
        }
    }
    refuse(0, UCS_ERR_INVALID_PARAM, "answer to a get that was not asked for");
}

} // namespace zip
