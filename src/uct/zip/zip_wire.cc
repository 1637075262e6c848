// SPDX-License-Identifier: BSD-3-Clause
// The parsers of what a peer sent; pure functions, so that a fuzzer can drive them.
#include "uct/zip/zip_wire.h"

namespace zip::wire {

namespace {

// What is behind a structure that has been read.
template <class T>
const char *behind(const void *data)
{
    return static_cast<const char *>(data) + sizeof(T);
}

} // namespace

bool parse(const void *data, size_t length, Request &request)
{
    return read(data, length, request) && request.wanted > 0 &&
           request.wanted <= MAX_SLOTS_A_MESSAGE && request.ring < MAX_RINGS;
}

bool parse(const void *data, size_t length, size_t least_slot_size, size_t key_length,
           GrantView &grant)
{
    const Grant &head = grant.head;
    if (!read(data, length, grant.head) || head.count == 0 || head.count > MAX_SLOTS_A_MESSAGE ||
        head.slot_size < least_slot_size || head.slot_count == 0 ||
        head.slot_count > MAX_RING_SLOTS || head.rkey_length != key_length ||
        length - sizeof(head) != head.count * sizeof(uint32_t) + key_length) {
        return false;
    }
    grant.slots = Slots(behind<Grant>(data), head.count);
    for (uint32_t i = 0; i < head.count; ++i) {
        const unsigned ring = ring_of(grant.slots[i]);
        if (ring >= MAX_RINGS || ring != ring_of(grant.slots[0])) {
            return false;
        }
    }
    grant.key = behind<Grant>(data) + head.count * sizeof(uint32_t);
    return true;
}

bool parse(const void *data, size_t length, SlotsView &message)
{
    if (!read(data, length, message.head) || message.head.count > MAX_SLOTS_A_MESSAGE ||
        length - sizeof(message.head) != message.head.count * sizeof(uint32_t)) {
        return false;
    }
    message.slots = Slots(behind<Ack>(data), message.head.count);
    return true;
}

bool parse(const void *data, size_t length, SegmentView &segment)
{
    const Segment &head = segment.head;
    if (!read(data, length, segment.head)) {
        return false;
    }
    segment.inline_data = nullptr;
    if (head.slot == Segment::INLINE) {
        segment.inline_data = behind<Segment>(data);
        return head.length == length - sizeof(head) && head.encoded_length == head.length;
    }
    const format::Coding coding = {head.dtype, head.shape, head.small_tiles != 0};
    const bool stored = head.dtype == format::DTYPE_BYTES;
    return head.slot == Segment::PLACED || stored || format::valid_coding(coding);
}

bool parse(const void *data, size_t length, size_t key_length, GetView &get)
{
    const Get &head = get.head;
    get.key = behind<Get>(data);
    return read(data, length, get.head) &&
           (head.key_length == 0 || head.key_length == key_length) &&
           length - sizeof(head) == head.key_length && head.length > 0 &&
           head.tail <= head.length && head.to_ring < MAX_RINGS;
}

bool parse(const void *data, size_t length, size_t lower_length, EpAddressView &address)
{
    if (!read(data, length, address.head) || !address.head.version.matches() ||
        address.head.lower_length != lower_length || length - sizeof(address.head) < lower_length) {
        return false;
    }
    address.lower = behind<EpAddress>(data);
    return true;
}

bool parse(const void *data, size_t length, size_t lower_length, RkeyView &rkey)
{
    if (!read(data, length, rkey.head) || !rkey.head.version.matches()) {
        return false;
    }
    rkey.lower =
            rkey.head.lower_length == lower_length && length - sizeof(rkey.head) >= lower_length
                    ? behind<Rkey>(data)
                    : nullptr;
    return true;
}

Reach reach(const void *data, size_t length, const IfaceAddress &own)
{
    IfaceAddress peer;
    if (!read(data, length, peer)) {
        return Reach::NO_ADDRESS;
    }
    if (!peer.version.matches()) {
        return Reach::OTHER_VERSION;
    }
    return peer.transport == own.transport && peer.connect == own.connect &&
                           peer.lower_length == own.lower_length &&
                           length - sizeof(peer) >= own.lower_length
                   ? Reach::YES
                   : Reach::OTHER_TRANSPORT;
}

} // namespace zip::wire
