// SPDX-License-Identifier: BSD-3-Clause
// The time model: reservations in virtual time.
#include "wire.h"

#include <algorithm>

namespace swverbs {

namespace {

uint64_t transmission(uint64_t bytes)
{
    const double gbps = settings().gbps; // bytes per nanosecond
    return gbps > 0 ? static_cast<uint64_t>(static_cast<double>(bytes) / gbps) : 0;
}

uint64_t message_time()
{
    static const uint64_t time =
            settings().rate > 0 ? static_cast<uint64_t>(1e9 / settings().rate) : 0;
    return time;
}

// Takes `duration` of a link that others reserve at the same time; returns when that begins.
uint64_t take(std::atomic<uint64_t> &link, uint64_t ready, uint64_t duration)
{
    uint64_t busy = link.load(std::memory_order_relaxed), start;
    do {
        start = std::max(busy, ready);
    } while (duration != 0 && !link.compare_exchange_weak(busy, start + duration));
    return start;
}

} // namespace

Passage reserve(Port &egress, Port &ingress, uint64_t ready, uint64_t bytes, bool message)
{
    const uint64_t time = transmission(bytes);
    const uint64_t start =
            take(egress.egress, ready, message ? std::max(time, message_time()) : time);
    const uint64_t begin = take(ingress.ingress, start, time);
    return {start, start + time, begin + time + settings().latency};
}

Passage reserve_request(Port &egress, uint64_t ready)
{
    const uint64_t start = take(egress.egress, ready, message_time());
    return {start, start, start + settings().latency};
}

uint64_t reorder_delay(uint64_t serial, uint64_t index)
{
    const uint64_t most = settings().reorder;
    if (most == 0) {
        return 0;
    }
    // splitmix64
    uint64_t x = settings().seed * 0x9e3779b97f4a7c15ull + (serial << 40) + index;
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return (x ^ x >> 31) % (most + 1);
}

} // namespace swverbs
