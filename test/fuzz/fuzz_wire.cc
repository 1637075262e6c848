// SPDX-License-Identifier: BSD-3-Clause
// What a peer sends: the parsers read nothing outside it, and what they let through is what it says
// it is.
#include <cstring>

#include "fuzz/targets.h"
#include "uct/zip/zip_wire.h"

namespace zip::fuzz {

namespace {

// Reads all of a view, so that AddressSanitizer sees where it is.
unsigned sum(const char *data, size_t length)
{
    unsigned total = 0;
    for (size_t i = 0; i < length; ++i)
        total += static_cast<unsigned char>(data[i]);
    return total;
}

unsigned sum(const wire::Slots &slots)
{
    unsigned total = 0;
    for (uint32_t i = 0; i < slots.count(); ++i)
        total += slots[i];
    return total;
}

// What was read is not optimized away.
void use(unsigned total)
{
    [[maybe_unused]] static volatile unsigned sink;
    sink = total;
}

template <class T>
void expect_read(const uint8_t *data, size_t length)
{
    T value;
    const bool good = wire::read(data, length, value);
    check(good == (length >= sizeof(T)), "what is long enough is read");
    check(!good || memcmp(&value, data, sizeof(T)) == 0, "what is read is what was sent");
}

// Makes what a message says of its length agree with the length it has: mutations seldom change
// both.
template <class Head, class Change>
void fit(uint8_t *data, size_t length, size_t behind, Change change)
{
    Head head;
    if (!wire::read(data, length, head) || length - sizeof(head) < behind)
        return;
    change(head, length - sizeof(head) - behind);
    memcpy(data, &head, sizeof(head));
}

} // namespace

// Control: byte 0: what it is; byte 1: length of the transport's part, or of the key, that is
// expected; byte 2: bits 4 to 7: misalignment, bit 3: its lengths agree, bits 0 to 2 with byte 3:
// the least slot size.
void fuzz_wire(const uint8_t *input, size_t size)
{
    if (size < CONTROL_BYTES)
        return;
    const size_t length = size - CONTROL_BYTES, expected = input[1];
    const size_t least_slot = input[3] | (input[2] & 7) << 8;
    ExactMemory memory(length, input[2] >> 4, 0);
    uint8_t *const data = memory.get();
    if (length > 0)
        memcpy(data, input + CONTROL_BYTES, length);
    if ((input[2] & 8) != 0) {
        if (input[0] % KINDS == GRANT)
            fit<wire::Grant>(data, length, expected, [&](wire::Grant &head, size_t slots) {
                head.count = uint32_t(slots / sizeof(uint32_t));
                head.rkey_length = uint32_t(expected);
            });
        if (input[0] % KINDS == SLOTS)
            fit<wire::Ack>(data, length, 0, [](wire::Ack &head, size_t slots) {
                head.count = uint32_t(slots / sizeof(uint32_t));
            });
        if (input[0] % KINDS == GET)
            fit<wire::Get>(data, length, expected, [&](wire::Get &head, size_t) {
                head.key_length = uint8_t(expected);
                head.tail = head.length / 2;
            });
        if (input[0] % KINDS == SEGMENT)
            fit<wire::Segment>(data, length, 0, [](wire::Segment &head, size_t bytes) {
                head.slot = wire::Segment::INLINE;
                head.length = head.encoded_length = uint32_t(bytes);
            });
    }
    const auto begins_with = [&](const auto &head) {
        return length >= sizeof(head) && memcmp(&head, data, sizeof(head)) == 0;
    };

    switch (input[0] % KINDS) {
    case REQUEST: {
        wire::Request request;
        if (wire::parse(data, length, request)) {
            check(begins_with(request), "a request is what was sent");
            check(request.wanted > 0 && request.wanted <= wire::MAX_SLOTS_A_MESSAGE,
                  "a request wants as many slots as a message has");
        }
        break;
    }
    case GRANT: {
        wire::GrantView grant;
        if (wire::parse(data, length, least_slot, expected, grant)) {
            check(begins_with(grant.head), "a grant is what was sent");
            check(grant.slots.count() == grant.head.count && grant.head.count > 0 &&
                          grant.head.count <= wire::MAX_SLOTS_A_MESSAGE &&
                          grant.head.slot_count > 0 && grant.head.slot_size >= least_slot,
                  "a grant has slots");
            check(grant.head.rkey_length == expected, "a grant's key is as long as expected");
            use(sum(grant.slots) + sum(grant.key, grant.head.rkey_length));
        }
        break;
    }
    case SLOTS: {
        wire::SlotsView message;
        if (wire::parse(data, length, message)) {
            check(begins_with(message.head), "slots are what was sent");
            check(message.slots.count() == message.head.count &&
                          message.head.count <= wire::MAX_SLOTS_A_MESSAGE,
                  "there are as many slots as it says");
            use(sum(message.slots));
        }
        break;
    }
    case SEGMENT: {
        wire::SegmentView segment;
        if (wire::parse(data, length, segment)) {
            check(begins_with(segment.head), "a segment is what was sent");
            check((segment.inline_data != nullptr) == (segment.head.slot == wire::Segment::INLINE),
                  "a segment is in a slot or in the message");
            if (segment.inline_data != nullptr)
                use(sum(segment.inline_data, segment.head.length));
        }
        break;
    }
    case GET: {
        wire::GetView get;
        if (wire::parse(data, length, expected, get)) {
            check(begins_with(get.head) && get.head.length > 0 && get.head.tail <= get.head.length,
                  "a get is what was sent");
            check(get.head.key_length == 0 || get.head.key_length == expected,
                  "a get's key is as long as expected");
            use(sum(get.key, get.head.key_length));
        }
        break;
    }
    case EP_ADDRESS: {
        wire::EpAddressView address;
        if (wire::parse(data, length, expected, address)) {
            check(begins_with(address.head) && address.head.version.matches() &&
                          address.head.lower_length == expected,
                  "an endpoint's address is what was sent");
            use(sum(address.lower, address.head.lower_length));
        }
        break;
    }
    case RKEY: {
        wire::RkeyView rkey;
        if (wire::parse(data, length, expected, rkey)) {
            check(begins_with(rkey.head) && rkey.head.version.matches(), "a key is what was sent");
            if (rkey.lower != nullptr) {
                check(rkey.head.lower_length == expected, "a key below is as long as expected");
                use(sum(rkey.lower, rkey.head.lower_length));
            }
        }
        break;
    }
    case IFACE_ADDRESS: {
        const wire::IfaceAddress own = {{},
                                        wire::transport_id("tcp"),
                                        uint8_t(input[3] & 1),
                                        static_cast<uint8_t>(expected)};
        if (wire::reach(data, length, own) == wire::Reach::YES) {
            check(begins_with(own), "who is reached is like this side");
            use(sum(reinterpret_cast<char *>(data) + sizeof(own), own.lower_length));
        }
        break;
    }
    case REGION: {
        uint64_t n[4];
        if (length < sizeof(n))
            break;
        memcpy(n, data, sizeof(n));
        using Wide = unsigned __int128;
        if (Wide(n[2]) + n[3] > UINT64_MAX)
            break; // no region is there
        check(wire::inside(n[0], n[1], n[2], n[3]) ==
                      (n[0] >= n[2] && Wide(n[0]) + n[1] <= Wide(n[2]) + n[3]),
              "a piece is inside a region or not");
        break;
    }
    case HEADER:
        expect_read<wire::Header>(data, length);
        break;
    case REFUSE:
        expect_read<wire::Refuse>(data, length);
        break;
    case DECLINE:
        expect_read<wire::Decline>(data, length);
    }
}

} // namespace zip::fuzz
