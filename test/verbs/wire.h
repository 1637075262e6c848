// SPDX-License-Identifier: BSD-3-Clause
// The time model: when a piece of a message that is sent now arrives.
#pragma once

#include "fabric.h"

namespace swverbs {

// A message's piece takes time on the sender's egress, then on the receiver's ingress, and arrives
// one latency later. Links are reserved in virtual time: a reservation begins when the piece could
// be sent or when the link got free, whichever is later, even if both lie in the past. So a thread
// that comes late delivers late, but does not lower the rate; nothing is ever early.
struct Passage {
    uint64_t start;   // on the first link
    uint64_t end;     // the last byte has left the sender
    uint64_t arrival; // the last byte is at the receiver
};

// `bytes` from `egress` to `ingress`, ready to be sent at `ready`. `message` says that this is the
// first piece of a message: it takes at least 1/SWVERBS_RATE.
Passage reserve(Port &egress, Port &ingress, uint64_t ready, uint64_t bytes, bool message);

// A request without payload, from `egress`: it waits for the link and takes none of it, but for the
// message rate.
Passage reserve_request(Port &egress, uint64_t ready);

// The additional delay of message number `index` of the QP with that serial number
// (SWVERBS_REORDER_US); the same in every run with the same SWVERBS_SEED.
uint64_t reorder_delay(uint64_t serial, uint64_t index);

} // namespace swverbs
