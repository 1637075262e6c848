// SPDX-License-Identifier: BSD-3-Clause
#include "uct/zip/zip_message.h"

#include <cstring>

namespace zip {

static size_t pack_parts(void *destination, void *arg)
{
    const auto *parts = static_cast<const MessageParts *>(arg);
    char *end = static_cast<char *>(destination);
    for (const Part &part : {parts->head, parts->body, parts->tail}) {
        if (part.length > 0) {
            memcpy(end, part.data, part.length);
            end += part.length;
        }
    }
    return static_cast<size_t>(end - static_cast<char *>(destination));
}

ucs_status_t send_parts(uct_ep_h lower_ep, wire::MessageType type, const MessageParts &parts)
{
    const ssize_t sent =
            uct_ep_am_bcopy(lower_ep, type, pack_parts, const_cast<MessageParts *>(&parts), 0);
    return sent < 0 ? static_cast<ucs_status_t>(sent) : UCS_OK;
}

} // namespace zip
