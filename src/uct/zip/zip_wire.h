// SPDX-License-Identifier: BSD-3-Clause
// What two zip peers say to each other: addresses, remote keys and the control messages between
// endpoints.
//
// All fields are little endian. Every structure carries, or belongs to a connection whose address
// carried, a magic, the version of this protocol and the version of the codec's format; peers that
// differ in one of them are unreachable to each other. Nothing received is trusted: see the checks
// where each message is handled (zip_ep.cc).
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
constexpr uint8_t PROTOCOL_VERSION = 2;
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
    // `flags`: the exporting process can decode into the region
    static constexpr uint8_t HOST = 1;

    Version version;
    uint8_t lower_length;
    uint8_t flags;
    uint16_t reserved;
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
    ProcessId process;
};

// Followed by `count` slot numbers (u32) and `rkey_length` bytes of the ring's remote key.
struct __attribute__((packed)) Grant {
    Header header;
    uint64_t ring_address;
    uint32_t slot_size;
    uint32_t slot_count; // of the whole ring
    uint32_t count;
    uint32_t rkey_length;
};

struct __attribute__((packed)) Segment {
    enum : uint32_t { INLINE = 0xffffffff }; // `slot`: the bytes follow this structure, uncoded

    Header header;
    uint64_t sequence; // 1, 2, 3, ... on an endpoint
    uint64_t region;
    uint64_t address; // of the piece, in the receiver's memory
    uint64_t length;  // of the piece, before encoding
    uint32_t encoded_length;
    uint32_t slot;
};

// A read: the peer that gets it puts [address, address + length) of its own exported region into
// [to_address, to_address + length) of the asking peer's.
struct __attribute__((packed)) Get {
    Header header;
    uint64_t region;
    uint64_t address;
    uint64_t length;
    uint64_t to_region;
    uint64_t to_address;
    uint8_t may_decline; // 1: the asking peer can read it by itself
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

} // namespace zip::wire

#endif
