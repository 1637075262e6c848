// SPDX-License-Identifier: BSD-3-Clause
// What two zip peers say to each other: addresses, remote keys and the control messages between
// endpoints.
//
// All fields are little endian. Every structure carries, or belongs to a connection whose address
// carried, a magic, the version of this protocol and the version of the codec's format; peers that
// differ in one of them are unreachable to each other. Nothing received is trusted: the parsers
// below check what a message says of itself, the endpoint (zip_ep.cc) what it says of the endpoint.
#ifndef ZIP_WIRE_H
#define ZIP_WIRE_H

#include "kernels/format.h"

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace zip::wire {

static_assert(std::endian::native == std::endian::little,
              "big-endian machines need byte swaps here");

constexpr uint16_t MAGIC = 0x705a; // "Zp"
constexpr uint8_t PROTOCOL_VERSION = 4;
constexpr uint8_t CODEC_VERSION = format::VERSION;

struct __attribute__((packed)) Version {
    uint16_t magic = MAGIC;
    uint8_t protocol = PROTOCOL_VERSION;
    uint8_t codec = CODEC_VERSION;

    bool matches() const
    {
        return magic == MAGIC && protocol == PROTOCOL_VERSION && codec == CODEC_VERSION;
    }
};

// Interface address, followed by the interface address of the transport below. UCP allows 63 bytes
// in all.
struct __attribute__((packed)) IfaceAddress {
    Version version;
    uint16_t transport; // transport_id() of the transport below
    uint8_t connect;    // how endpoints below are connected: 0 to an interface, 1 to an endpoint
    uint8_t lower_length;
};

// Endpoint address, followed by the address that the endpoint below connects to.
struct __attribute__((packed)) EpAddress {
    Version version;
    uint8_t lower_length;
    uint8_t reserved[3];
    uint64_t id; // random: a message that does not name it is not for this endpoint
};

// Packed remote key, followed by the key of the domain below, if the region is registered there.
struct __attribute__((packed)) Rkey {
    static constexpr uint16_t SHORT = 1; // flag: what it was packed for had better go without zip

    Version version;
    uint8_t lower_length;
    uint8_t rings;   // 0: the region cannot be decoded into; otherwise 1 + the ring for it
    uint16_t flags;  // SHORT, and range_mark() of what it was packed for
    uint64_t region; // random: cannot be guessed, only exported
};

// Active messages between endpoints. Each begins with the id of the endpoint it is for.
enum MessageType : uint8_t {
    REQUEST, // sender to receiver: wants staging slots
    GRANT,   // receiver to sender: here are some
    SEGMENT, // sender to receiver: a piece of a put, in a slot or in the message itself
    ACK,     // receiver to sender: decoded up to here, and these slots again
    RECALL,  // receiver to sender: others wait, give back the slots you are not using
    RETURN,  // sender to receiver: slots given back
    REFUSE,  // receiver to sender: a segment was refused, the endpoint is broken
    BYE,     // either: this endpoint is gone and writes into no slot any more
    GET,     // receiver to sender: put a piece of your memory into mine
    DECLINE, // sender to receiver: it would not shrink, read it yourself
    MESSAGE_TYPE_LAST
};

struct __attribute__((packed)) Header {
    uint64_t to;
};

constexpr unsigned MAX_SLOTS_A_MESSAGE = 64;

// A receiver has a ring of slots for each kind of memory that it decodes into: number 0 for host
// memory, the others for its GPUs. A slot's number names the ring, too.
constexpr unsigned MAX_RINGS = 64;
constexpr uint32_t MAX_RING_SLOTS = 1u << 24;
constexpr uint32_t slot_number(unsigned ring, uint32_t index)
{
    return ring << 24 | index;
}
constexpr unsigned ring_of(uint32_t slot)
{
    return slot >> 24;
}
constexpr uint32_t index_of(uint32_t slot)
{
    return slot & (MAX_RING_SLOTS - 1);
}

// Names a process, for peers on the same machine: whether it still runs decides when memory that it
// maps may be used anew.
struct __attribute__((packed)) ProcessId {
    uint64_t pid_namespace;
    uint64_t start_time; // as /proc/PID/stat has it
    uint32_t pid;
};

struct __attribute__((packed)) Request {
    Header header;
    uint32_t wanted;
    uint8_t ring;
    ProcessId process;
};

// Followed by `count` slot numbers (u32), all of one ring, and `rkey_length` bytes of that ring's
// remote key.
struct __attribute__((packed)) Grant {
    Header header;
    uint64_t ring_address;
    uint32_t slot_size;
    uint32_t slot_count; // of the whole ring
    uint32_t count;
    uint32_t rkey_length;
};

struct __attribute__((packed)) Recall {
    Header header;
    uint8_t ring;
};

struct __attribute__((packed)) Segment {
    // `slot`: INLINE: the bytes follow this structure, uncoded. PLACED: they were put where they
    // belong.
    enum : uint32_t { INLINE = 0xffffffff, PLACED = 0xfffffffe };

    Header header;
    uint64_t sequence; // 1, 2, 3, ... on an endpoint
    uint64_t region;
    uint64_t address; // of the piece, in the receiver's memory
    uint64_t length;  // of the piece, before encoding
    uint32_t encoded_length;
    uint32_t slot;
    // As the chunk's header says, for who cannot read that (zip_coding_t).
    uint8_t dtype;
    uint8_t shape;
    uint8_t small_tiles;
};

// A read: the peer that gets it puts [address, address + length) of its own exported region into
// [to_address, to_address + length) of the asking peer's. Followed by `key_length` bytes of the key
// of the domain below for that memory, where its ends may be put there as they are.
struct __attribute__((packed)) Get {
    Header header;
    uint64_t region;
    uint64_t address;
    uint64_t length;
    uint64_t to_region;
    uint64_t to_address;
    uint8_t to_ring;
    uint8_t may_decline; // 1: the asking peer can read it by itself
    uint8_t key_length;  // 0: no ends
    uint64_t tail;       // bytes that the wire carries while the last piece is decoded
    uint64_t wire;       // bytes a second that the asking peer believes of it
};

struct __attribute__((packed)) Decline {
    Header header;
    uint64_t to_region;
};

// Followed by `count` slot numbers (u32) that the sender may use again. Also the body of a Return.
struct __attribute__((packed)) Ack {
    Header header;
    uint64_t sequence; // all segments up to this one are decoded
    uint32_t count;
};

struct __attribute__((packed)) Refuse {
    Header header;
    uint64_t sequence;
    int32_t status; // a ucs_status_t
};

// Fifteen bits of a key's flags that tell what range it was packed for. A rendezvous packs a key
// for each message: a get of just that range may be one.
constexpr uint16_t range_mark(uint64_t address, uint64_t length)
{
    return static_cast<uint16_t>((address + length * 0x9e3779b97f4a7c15) * 0xff51afd7ed558ccd >>
                                 49 << 1);
}

// Sixteen bits that differ between transports: their device addresses cannot be compared.
constexpr uint16_t transport_id(const char *name)
{
    uint32_t hash = 2166136261u; // FNV-1a
    for (; *name != 0; ++name) {
        hash = (hash ^ static_cast<unsigned char>(*name)) * 16777619u;
    }
    return static_cast<uint16_t>(hash ^ (hash >> 16));
}

// Reads a structure from `length` bytes that may be misaligned. False if they are too few.
template <class T>
bool read(const void *data, size_t length, T &value)
{
    if (length < sizeof(T)) {
        return false;
    }
    memcpy(&value, data, sizeof(T));
    return true;
}

// ---- Parsers of what a peer sent
//
// `data` are `length` bytes of any alignment, which the views they fill point into. They read no
// byte outside, whatever those bytes are, look at nothing else, and are false (the view is
// undefined then) unless all that the message says of itself is possible. Any thread.

// Slot numbers behind a message.
class Slots {
public:
    Slots() = default;
    Slots(const void *data, uint32_t count) : data_(static_cast<const char *>(data)), count_(count)
    {
    }

    uint32_t count() const { return count_; }
    // Reads it anew: the memory may be the peer's too.
    uint32_t operator[](uint32_t i) const
    {
        uint32_t slot;
        memcpy(&slot, data_ + i * sizeof(slot), sizeof(slot));
        return slot;
    }

private:
    const char *data_ = nullptr;
    uint32_t count_ = 0;
};

struct GrantView {
    Grant head;
    Slots slots;
    const char *key; // head.rkey_length bytes
};

struct SlotsView { // an ACK or a RETURN
    Ack head;
    Slots slots;
};

struct SegmentView {
    Segment head;
    const char *inline_data; // head.length bytes, or NULL: they are in a slot
};

struct GetView {
    Get head;
    const char *key; // head.key_length bytes
};

struct EpAddressView {
    EpAddress head;
    const char *lower; // head.lower_length bytes
};

struct RkeyView {
    Rkey head;
    const char *lower; // head.lower_length bytes, or NULL: not a key of the domain below
};

// What an interface's address is to another interface.
enum class Reach { YES, NO_ADDRESS, OTHER_VERSION, OTHER_TRANSPORT };

// From 1 to MAX_SLOTS_A_MESSAGE slots of a possible ring are wanted.
bool parse(const void *data, size_t length, Request &request);
// 1 to MAX_SLOTS_A_MESSAGE slots of one possible ring, each of at least `least_slot_size` bytes and
// a key of `key_length` bytes.
bool parse(const void *data, size_t length, size_t least_slot_size, size_t key_length,
           GrantView &grant);
// 0 to MAX_SLOTS_A_MESSAGE slots.
bool parse(const void *data, size_t length, SlotsView &message);
// An inline segment has as many bytes as it says; a coded one has a coding that exists.
bool parse(const void *data, size_t length, SegmentView &segment);
// A get of at least one byte, through a possible ring, with a key of `key_length` bytes or none.
bool parse(const void *data, size_t length, size_t key_length, GetView &get);
// An address whose part for the transport below has `lower_length` bytes.
bool parse(const void *data, size_t length, size_t lower_length, EpAddressView &address);
// A key of the domain below has `lower_length` bytes; one of another length is none of it, and the
// region can be reached through staging alone.
bool parse(const void *data, size_t length, size_t lower_length, RkeyView &rkey);
// `own` is what the asking interface tells of itself; with YES the peer's has as many bytes for the
// transport below behind it.
Reach reach(const void *data, size_t length, const IfaceAddress &own);

// Whether [address, address + length) is in [begin, begin + size), none of which a peer's numbers
// can make wrap.
constexpr bool inside(uint64_t address, uint64_t length, uint64_t begin, uint64_t size)
{
    return address >= begin && length <= size && address - begin <= size - length;
}

} // namespace zip::wire

#endif
