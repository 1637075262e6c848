// SPDX-License-Identifier: BSD-3-Clause
// Faults: counting and triggering.
#include "faults.h"

#include <algorithm>

namespace swverbs {

void Faults::start(uint64_t now)
{
    m_pending = settings().faults;
    for (Fault &fault : m_pending) {
        if (fault.trigger == FaultTrigger::time) {
            fault.threshold += now;
        }
    }
}

bool Faults::take(uint64_t now, Fault &fault)
{
    for (auto it = m_pending.begin(); it != m_pending.end(); ++it) {
        const uint64_t reached = it->trigger == FaultTrigger::bytes        ? m_bytes
                                 : it->trigger == FaultTrigger::operations ? m_operations
                                                                           : now;
        if (reached >= it->threshold) {
            fault = *it;
            m_pending.erase(it);
            return true;
        }
    }
    return false;
}

uint64_t Faults::next_time() const
{
    uint64_t next = kNever;
    for (const Fault &fault : m_pending) {
        if (fault.trigger == FaultTrigger::time) {
            next = std::min(next, fault.threshold);
        }
    }
    return next;
}

} // namespace swverbs
