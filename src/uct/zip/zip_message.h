// SPDX-License-Identifier: BSD-3-Clause
// Sending the control messages of zip_wire.h on an endpoint of the transport below.
#ifndef ZIP_MESSAGE_H
#define ZIP_MESSAGE_H

#include "uct/zip/zip_md.h"

#include <algorithm>
#include <vector>

namespace zip {

struct Part {
    const void *data = nullptr;
    size_t length = 0;
};

// A message, put together where the transport below wants it.
struct MessageParts {
    Part head, body, tail;
};

// UCS_ERR_NO_RESOURCE: try again from progress.
ucs_status_t send_parts(uct_ep_h lower_ep, wire::MessageType type, const MessageParts &parts);

inline ucs_status_t send_message(uct_ep_h lower_ep, wire::MessageType type, const void *message,
                                 size_t length)
{
    return send_parts(lower_ep, type, {{message, length}, {}, {}});
}

// Sends `head` with up to MAX_SLOTS_A_MESSAGE of `slots` behind it, then `tail`. `head.count` is
// set; on success those slots are moved from `slots` to `sent`.
template <class Head>
ucs_status_t send_slots(uct_ep_h lower_ep, wire::MessageType type, Head head,
                        std::vector<uint32_t> &slots, std::vector<uint32_t> *sent, Part tail = {})
{
    const size_t count = std::min<size_t>(slots.size(), wire::MAX_SLOTS_A_MESSAGE);
    head.count = static_cast<uint32_t>(count);
    const ucs_status_t status =
            send_parts(lower_ep, type,
                       {{&head, sizeof(head)}, {slots.data(), count * sizeof(uint32_t)}, tail});
    if (status == UCS_OK) {
        const auto end = slots.begin() + static_cast<std::ptrdiff_t>(count);
        if (sent != nullptr) {
            sent->insert(sent->end(), slots.begin(), end);
        }
        slots.erase(slots.begin(), end);
    }
    return status;
}

} // namespace zip

#endif
