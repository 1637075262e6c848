// SPDX-License-Identifier: BSD-3-Clause
// Faults that SWVERBS_FAULT asks for: which is due.
#pragma once

#include "settings.h"

#include <vector>

namespace swverbs {

// Used under the device's lock.
class Faults {
public:
    void start(uint64_t now);
    // Counts what this process has put on the wire.
    void sent(uint64_t bytes, uint64_t operations)
    {
        m_bytes += bytes;
        m_operations += operations;
    }
    // The next fault whose time or count has come; each is returned once.
    bool take(uint64_t now, Fault &fault);
    bool any() const { return !m_pending.empty(); }
    // When take() must be called at the latest.
    uint64_t next_time() const;

private:
    std::vector<Fault> m_pending;
    uint64_t m_bytes = 0, m_operations = 0;
};

} // namespace swverbs
