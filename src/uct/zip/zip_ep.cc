// SPDX-License-Identifier: BSD-3-Clause
// Endpoints: the sender's and the receiver's half of the protocol of zip_wire.h.
#include "uct/zip/zip_ep.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

namespace zip {

namespace {

constexpr size_t MAX_QUEUED_PUTS = 256;  // on an endpoint; further ones wait in UCP
constexpr size_t MAX_IN_FLIGHT = 256;    // segments that are not acknowledged
constexpr uint32_t MAX_WINDOW = 32;      // slots that one endpoint asks for
constexpr size_t SEGMENT_ALIGNMENT = 16; // so that no element is cut in two
constexpr size_t SEGMENT_TILE = 32768;   // 8192 values of four bytes
constexpr unsigned MAX_BURST = 8; // segments a call of progress, so that receiving is not starved

// Adds one finished operation to a completion, as UCT defines it.
void complete(uct_completion_t *completion, ucs_status_t status)
{
    if (completion == nullptr) {
        return;
    }
    if (status != UCS_OK && completion->status == UCS_OK) {
        completion->status = status;
    }
    if (--completion->count == 0) {
        completion->func(completion);
    }
}

// Keeps an endpoint alive while its functions call back into UCP, which may destroy it.
class KeepAlive {
public:
    explicit KeepAlive(Ep *ep) : ep_(ep) { ++ep_->depth; }
    ~KeepAlive()
    {
        if (--ep_->depth == 0 && ep_->doomed) {
            delete ep_;
        }
    }
    KeepAlive(const KeepAlive &) = delete;
    KeepAlive &operator=(const KeepAlive &) = delete;

private:
    Ep *ep_;
};

struct Part {
    const void *data = nullptr;
    size_t length = 0;
};

// A message, put together where the transport below wants it.
struct MessageParts {
    Part head, body, tail;
};

size_t pack_parts(void *destination, void *arg)
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

// What an endpoint below connects to, behind the EpAddress.
size_t lower_address_length(const Iface *iface)
{
    return iface->lower_connects_to_ep ? iface->lower_attr.ep_addr_len
                                       : iface->lower_attr.iface_addr_len;
}

ucs_status_t create_lower(Ep *ep, const uct_device_addr_t *device_address,
                          const void *iface_address, size_t iface_address_length)
{
    uct_ep_params_t params = {};
    params.field_mask = UCT_EP_PARAM_FIELD_IFACE | UCT_EP_PARAM_FIELD_PATH_INDEX;
    params.iface = ep->iface->lower;
    params.path_index = ep->path_index;
    if (device_address != nullptr) {
        params.field_mask |= UCT_EP_PARAM_FIELD_DEV_ADDR | UCT_EP_PARAM_FIELD_IFACE_ADDR |
                             UCT_EP_PARAM_FIELD_IFACE_ADDR_LENGTH;
        params.dev_addr = device_address;
        params.iface_addr = static_cast<const uct_iface_addr_t *>(iface_address);
        params.iface_addr_length = iface_address_length;
    }
    const ucs_status_t status = uct_ep_create(&params, &ep->lower);
    if (status != UCS_OK) {
        ep->lower = nullptr;
        return status;
    }
    ep->iface->eps_by_lower[ep->lower] = ep;
    return UCS_OK;
}

} // namespace

ucs_status_t send_message(uct_ep_h lower_ep, wire::MessageType type, const void *message,
                          size_t length)
{
    return send_parts(lower_ep, type, {{message, length}, {}, {}});
}

// ---- sender

size_t Ep::slot_payload() const
{
    const size_t fits = std::min(iface->segment_size, remote->slot_size() - ZIP_CODEC_MAX_GROWTH);
    return fits / SEGMENT_ALIGNMENT * SEGMENT_ALIGNMENT;
}

bool Ep::can_accept_put() const
{
    return puts.size() < MAX_QUEUED_PUTS;
}

// Whether a segment, or the request for its slot, could go now.
bool Ep::can_prepare() const
{
    if (puts.empty() || in_flight.size() >= MAX_IN_FLIGHT) {
        return false;
    }
    const bool fits_message = puts.front().length - puts.front().done <= iface->inline_max;
    return fits_message || !credits.empty() || !requested;
}

// Chooses the next segment and puts its encoded bytes where they can be sent from. False if that
// has to wait.
bool Ep::prepare_segment()
{
    if (puts.empty() || in_flight.size() >= MAX_IN_FLIGHT) {
        return false;
    }
    Put &put = puts.front();
    const size_t left = put.length - put.done;
    segment = {};
    segment.header.to = peer_id;
    segment.sequence = sent_sequence + 1;
    segment.region = put.region;
    segment.address = put.address + put.done;

    if (left <= iface->inline_max) {
        segment.length = left;
        segment.encoded_length = static_cast<uint32_t>(left);
        segment.slot = wire::Segment::INLINE;
        segment_data = put.source + put.done;
        stage = Stage::WRITTEN;
        return true;
    }
    if (credits.empty()) {
        return false;
    }
    if (!put.probed) {
        put.dtype = iface->choose_dtype(put.source, put.length);
        put.probed = true;
    }
    // Equal pieces, so that the last one is not a scrap; whole tiles of the codec where there is
    // room.
    const size_t payload = slot_payload();
    const size_t pieces = (left + payload - 1) / payload;
    const size_t even = (left / pieces + SEGMENT_TILE - 1) / SEGMENT_TILE * SEGMENT_TILE;
    segment.length = std::min({left, payload, even});
    segment.slot = credits.back();

    char *output;
    if (remote->mapped()) {
        output = remote->mapped_slot(segment.slot);
    } else {
        if (iface->send_buffers() == nullptr) {
            zip_error("zip: no memory for staging; lower UCX_ZIP_STAGING_SIZE");
            fail(UCS_ERR_NO_MEMORY, true);
            return false;
        }
        segment_buffer = iface->take_tx_buffer(lower);
        if (segment_buffer == nullptr) {
            return false;
        }
        output = iface->tx_pool->slot(segment_buffer->slot);
    }
    size_t encoded = 0;
    const zip_status_t status = zip_codec_encode(put.dtype, put.source + put.done, segment.length,
                                                 output, zip_codec_bound(segment.length), &encoded);
    if (status != ZIP_OK) {
        zip_error("zip: cannot encode %zu bytes: %s", size_t(segment.length),
                  zip_status_string(status));
        fail(UCS_ERR_IO_ERROR, true);
        return false;
    }
    credits.pop_back();
    ++credits_in_use;
    segment.encoded_length = static_cast<uint32_t>(encoded);
    segment_data = output;
    stage = remote->mapped() ? Stage::WRITTEN : Stage::ENCODED;
    return true;
}

ucs_status_t Ep::post_segment()
{
    if (stage == Stage::ENCODED) {
        uct_iov_t iov = {};
        iov.buffer = const_cast<char *>(segment_data);
        iov.length = segment.encoded_length;
        iov.memh = iface->tx_pool->memory().memh();
        iov.count = 1;
        segment_buffer->completion.count = 1;
        segment_buffer->completion.status = UCS_OK;
        const ucs_status_t status =
                uct_ep_put_zcopy(lower, &iov, 1, remote->remote_address(segment.slot),
                                 remote->rkey(), &segment_buffer->completion);
        if (status == UCS_OK) {
            complete(&segment_buffer->completion, UCS_OK);
        } else if (status != UCS_INPROGRESS) {
            return status;
        }
        segment_buffer = nullptr;
        stage = Stage::WRITTEN;
    }

    const bool is_inline = segment.slot == wire::Segment::INLINE;
    const ucs_status_t status = send_parts(lower, wire::SEGMENT,
                                           {{&segment, sizeof(segment)},
                                            {segment_data, is_inline ? size_t(segment.length) : 0},
                                            {}});
    if (status != UCS_OK) {
        return status;
    }
    stage = Stage::IDLE;
    ++sent_sequence;
    ++iface->counters.segments;
    iface->counters.wire_bytes += segment.encoded_length;
    iface->counters.stored_segments += segment.encoded_length >= segment.length;

    Put &put = puts.front();
    put.done += segment.length;
    if (put.done < put.length) {
        in_flight.push_back({0, !is_inline});
        return UCS_OK;
    }
    uct_completion_t *completion = put.completion;
    puts.pop_front();
    in_flight.push_back({puts_posted - puts.size(), !is_inline});
    complete(completion, UCS_OK);
    return UCS_OK;
}

unsigned Ep::send()
{
    unsigned sent = 0;
    while (sent < MAX_BURST && failed == UCS_OK) {
        if (stage == Stage::IDLE && !prepare_segment()) {
            break;
        }
        const ucs_status_t status = post_segment();
        if (status == UCS_ERR_NO_RESOURCE) {
            break;
        }
        if (status != UCS_OK) {
            fail(status, true);
            break;
        }
        ++sent;
    }
    return sent;
}

ucs_status_t Ep::put(const uct_iov_t *iov, size_t count, uint64_t address, const Rkey *rkey,
                     uct_completion_t *completion)
{
    if (failed != UCS_OK) {
        return failed;
    }
    if (count > 1) {
        return UCS_ERR_INVALID_PARAM; // max_iov is 1
    }
    const size_t length = count == 0 ? 0 : iov->length * iov->count;
    if (length == 0) {
        return UCS_OK;
    }
    if (peer_gone) {
        return UCS_ERR_CONNECTION_RESET;
    }
    if (!can_accept_put()) {
        return UCS_ERR_NO_RESOURCE;
    }
    // No completion is called before this function returns, so a put that ends here must not have
    // one.
    const bool first = puts.empty() && depth == 0 && connected;
    puts.push_back({static_cast<const char *>(iov->buffer), length, address, rkey->region,
                    first ? nullptr : completion, 0, ZIP_DTYPE_BYTES, false});
    ++puts_posted;
    ++iface->counters.puts;
    iface->counters.put_bytes += length;
    if (first) {
        KeepAlive guard(this);
        control();
        send();
        if (failed != UCS_OK) {
            return failed;
        }
        if (puts.empty()) {
            return UCS_OK;
        }
        puts.back().completion = completion;
    }
    iface->activate(this);
    return UCS_INPROGRESS;
}

ucs_status_t Ep::flush(unsigned flags, uct_completion_t *completion)
{
    if ((flags & UCT_FLUSH_FLAG_CANCEL) != 0) {
        fail(UCS_ERR_CANCELED, false);
        return UCS_OK;
    }
    if (failed != UCS_OK) {
        return failed;
    }
    if (puts_acked == puts_posted) {
        return UCS_OK;
    }
    if (completion != nullptr) {
        flushes.push_back({puts_posted, completion});
    }
    return UCS_INPROGRESS;
}

void Ep::complete_flushes()
{
    while (!flushes.empty() && flushes.front().put <= puts_acked) {
        uct_completion_t *completion = flushes.front().completion;
        flushes.pop_front();
        complete(completion, UCS_OK);
    }
}

void Ep::fail(ucs_status_t status, bool report)
{
    if (failed != UCS_OK) {
        return;
    }
    KeepAlive guard(this);
    failed = status;
    report_due = report;
    if (in_waiting) {
        std::erase(iface->waiting, this);
        in_waiting = false;
    }
    return_unlent_slots();
    if (segment_buffer != nullptr) { // not given to the endpoint below
        complete(&segment_buffer->completion, UCS_OK);
        segment_buffer = nullptr;
    }
    stage = Stage::IDLE;
    for (std::deque<Put> unfinished = std::move(puts); !unfinished.empty();
         unfinished.pop_front()) {
        complete(unfinished.front().completion, status);
    }
    puts.clear();
    for (std::deque<Flush> unfinished = std::move(flushes); !unfinished.empty();
         unfinished.pop_front()) {
        complete(unfinished.front().completion, status);
    }
    flushes.clear();
    if (report && !doomed) {
        iface->activate(this);
    }
}

// ---- both

bool Ep::has_work() const
{
    if (failed != UCS_OK) {
        return report_due;
    }
    return connected && (bye_due || ack_due || !to_ack.empty() || !to_grant.empty() || recall_due ||
                         stage != Stage::IDLE || can_prepare() || (recalled && puts.empty()) ||
                         (!pending.empty() && can_accept_put()));
}

// Sends what control messages are due, until one finds no room below. Returns how many went.
unsigned Ep::control()
{
    unsigned sent = 0;
    const auto went = [this, &sent](ucs_status_t status) {
        sent += status == UCS_OK;
        if (status != UCS_OK && status != UCS_ERR_NO_RESOURCE) {
            fail(status, true);
        }
        return status == UCS_OK;
    };
    if (lower == nullptr) {
        return 0;
    }
    if (bye_due) {
        const wire::Header bye{peer_id};
        if (!went(send_message(lower, wire::BYE, &bye, sizeof(bye)))) {
            return sent;
        }
        bye_due = false;
    }
    if (peer_gone) {
        return sent;
    }
    while (ack_due || !to_ack.empty()) {
        const wire::Ack ack{{peer_id}, received_sequence, 0};
        if (!went(send_slots(lower, wire::ACK, ack, to_ack, &lent))) {
            return sent;
        }
        ack_due = false;
    }
    while (!to_grant.empty()) {
        SlotPool *ring = iface->ring.get();
        const std::vector<char> &rkey = ring->memory().rkey();
        const wire::Grant grant{{peer_id},
                                reinterpret_cast<uint64_t>(ring->memory().address()),
                                static_cast<uint32_t>(ring->slot_size()),
                                ring->count(),
                                0,
                                static_cast<uint32_t>(rkey.size())};
        if (!went(send_slots(lower, wire::GRANT, grant, to_grant, &lent,
                             {rkey.data(), rkey.size()}))) {
            return sent;
        }
    }
    if (recall_due) {
        const wire::Header recall{peer_id};
        if (!went(send_message(lower, wire::RECALL, &recall, sizeof(recall)))) {
            return sent;
        }
        recall_due = false;
    }
    if (recalled && puts.empty()) {
        do {
            const wire::Ack give_back{{peer_id}, 0, 0};
            if (!went(send_slots(lower, wire::RETURN, give_back, credits, nullptr))) {
                return sent;
            }
        } while (!credits.empty());
        recalled = false;
    }
    if (!requested && !puts.empty() && credits.empty()) {
        const size_t left = puts.front().length - puts.front().done;
        const size_t useful =
                std::min<size_t>(MAX_WINDOW, left / iface->segment_size + puts.size());
        if (left <= iface->inline_max) {
            return sent;
        }
        if (useful > credits_in_use) {
            const wire::Request request{
                    {peer_id}, static_cast<uint32_t>(useful - credits_in_use), this_process()};
            if (!went(send_message(lower, wire::REQUEST, &request, sizeof(request)))) {
                return sent;
            }
        }
        requested = true; // or none needed: the slots in use come back
    }
    return sent;
}

unsigned Ep::dispatch_pending()
{
    unsigned done = 0;
    while (!pending.empty() && can_accept_put() && failed == UCS_OK) {
        uct_pending_req_t *request = pending.front();
        pending.pop_front();
        const ucs_status_t status = request->func(request);
        if (status == UCS_OK) {
            ++done;
        } else {
            pending.push_front(request);
            if (status != UCS_INPROGRESS) {
                break;
            }
        }
    }
    return done;
}

unsigned Ep::progress()
{
    KeepAlive guard(this);
    if (failed != UCS_OK) {
        if (!report_due) {
            return 0;
        }
        report_due = false;
        uct_iface_handle_ep_err(&iface->super.super, &super.super, failed);
        return 1;
    }
    if (!connected) {
        return 0;
    }
    unsigned count = control();
    count += send();
    count += dispatch_pending();
    if (!doomed && has_work()) {
        iface->activate(this);
    }
    return count;
}

// ---- receiver

void Ep::refuse(uint64_t sequence, ucs_status_t status, const char *why)
{
    ++iface->counters.refused_segments;
    zip_error("zip: endpoint %p: refused what its peer sent: %s", static_cast<void *>(this), why);
    if (connected && lower != nullptr) {
        // If this cannot be sent now the peer learns it from the end of the connection.
        const wire::Refuse message{{peer_id}, sequence, status};
        send_message(lower, wire::REFUSE, &message, sizeof(message));
    }
    fail(status, true);
}

void Ep::grant_wanted()
{
    SlotPool *ring = iface->receive_ring();
    if (ring == nullptr) {
        refuse(0, UCS_ERR_NO_MEMORY, "no memory for staging; see UCX_ZIP_STAGING_SIZE");
        return;
    }
    // A peer that is alone may have a quarter of what is free at a time, so that others find some,
    // and never more than a window.
    const size_t held = lent.size() + to_ack.size() + to_grant.size();
    if (held >= MAX_WINDOW) {
        wanted = 0;
        return;
    }
    const uint32_t fair = std::min(std::max(1u, ring->free_count() / 4),
                                   MAX_WINDOW - static_cast<uint32_t>(held));
    uint32_t slot;
    for (uint32_t i = 0; i < fair && wanted > 0 && ring->take(slot); ++i) {
        to_grant.push_back(slot);
        --wanted;
    }
    if (to_grant.empty()) {
        if (!in_waiting) {
            in_waiting = true;
            iface->waiting.push_back(this);
        }
        iface->recall_slots();
        return;
    }
    wanted = 0; // the peer asks again if it needs more
    iface->activate(this);
}

void Ep::on_request(const char *data, size_t length)
{
    wire::Request request;
    if (!wire::read(data, length, request) || request.wanted == 0 ||
        request.wanted > wire::MAX_SLOTS_A_MESSAGE) {
        refuse(0, UCS_ERR_INVALID_PARAM, "malformed request for slots");
        return;
    }
    wanted = request.wanted;
    peer_process = request.process;
    if (!in_waiting) {
        grant_wanted();
    }
}

bool Ep::take_credits(const char *slots, uint32_t count, size_t available)
{
    if (count > wire::MAX_SLOTS_A_MESSAGE || available < count * sizeof(uint32_t) ||
        (count > 0 && remote == nullptr)) {
        return false;
    }
    for (uint32_t i = 0; i < count; ++i) {
        uint32_t slot;
        memcpy(&slot, slots + i * sizeof(slot), sizeof(slot));
        if (slot >= remote->count() || credits.size() >= remote->count()) {
            return false;
        }
        credits.push_back(slot);
    }
    return true;
}

void Ep::on_grant(const char *data, size_t length)
{
    wire::Grant grant;
    const bool good =
            wire::read(data, length, grant) && grant.count > 0 &&
            grant.count <= wire::MAX_SLOTS_A_MESSAGE &&
            length - sizeof(grant) == grant.count * sizeof(uint32_t) + size_t(grant.rkey_length) &&
            grant.slot_size >= ZIP_CODEC_MAX_GROWTH + SEGMENT_ALIGNMENT && grant.slot_count > 0 &&
            grant.rkey_length == (iface->md->lower_attr.flags & UCT_MD_FLAG_NEED_RKEY
                                          ? iface->md->lower_attr.rkey_packed_size
                                          : 0);
    if (!good) {
        refuse(0, UCS_ERR_INVALID_PARAM, "malformed grant of slots");
        return;
    }
    const char *slots = data + sizeof(grant);
    if (remote == nullptr) {
        ucs_status_t status;
        remote = RemoteRing::open(iface->md, grant.ring_address, grant.slot_size, grant.slot_count,
                                  slots + grant.count * sizeof(uint32_t), status);
        if (remote == nullptr) {
            zip_error("zip: cannot reach the peer's staging memory: %s", ucs_status_string(status));
            fail(status, true);
            return;
        }
    }
    if (grant.slot_size != remote->slot_size() || grant.slot_count != remote->count() ||
        !take_credits(slots, grant.count, length - sizeof(grant))) {
        refuse(0, UCS_ERR_INVALID_PARAM, "grant of slots that do not exist");
        return;
    }
    requested = false;
}

void Ep::on_segment(const char *data, size_t length)
{
    wire::Segment message;
    if (!wire::read(data, length, message)) {
        refuse(0, UCS_ERR_INVALID_PARAM, "truncated segment message");
        return;
    }
    if (message.sequence != received_sequence + 1) {
        refuse(message.sequence, UCS_ERR_INVALID_PARAM, "segment out of sequence");
        return;
    }
    const bool is_inline = message.slot == wire::Segment::INLINE;
    const char *encoded = data + sizeof(message);
    if (is_inline) {
        if (message.length != length - sizeof(message) ||
            message.encoded_length != message.length) {
            refuse(message.sequence, UCS_ERR_INVALID_PARAM, "segment with a wrong length");
            return;
        }
    } else {
        const auto held = std::find(lent.begin(), lent.end(), message.slot);
        if (held == lent.end()) {
            refuse(message.sequence, UCS_ERR_INVALID_PARAM,
                   "segment in a slot that is not the peer's");
            return;
        }
        if (message.encoded_length > iface->ring->slot_size()) {
            refuse(message.sequence, UCS_ERR_INVALID_PARAM, "segment longer than a slot");
            return;
        }
        lent.erase(held);
        to_ack.push_back(message.slot); // this endpoint's again, whatever happens now
        encoded = iface->ring->slot(message.slot);
    }

    Region *region = iface->md->pin(message.region, message.address, message.length);
    if (region == nullptr) {
        refuse(message.sequence, UCS_ERR_INVALID_ADDR,
               "segment for memory that was not exported to it");
        return;
    }
    void *destination = reinterpret_cast<void *>(message.address);
    zip_status_t status = ZIP_OK;
    if (is_inline) {
        memcpy(destination, encoded, message.length);
    } else {
        status = zip_codec_decode(encoded, message.encoded_length, destination, message.length);
    }
    iface->md->unpin(region);
    if (status != ZIP_OK) {
        refuse(message.sequence, UCS_ERR_IO_ERROR, zip_status_string(status));
        return;
    }
    ++received_sequence;
    ++iface->counters.received_segments;
    iface->counters.received_bytes += message.length;
    ack_due = true;
    // Others wait for slots: this one goes to the first of them, and this endpoint's peer has to
    // queue again.
    if (!is_inline && !iface->waiting.empty()) {
        to_ack.pop_back();
        iface->release_slot(message.slot);
    }
    control();
}

void Ep::on_ack(const char *data, size_t length)
{
    wire::Ack ack;
    if (!wire::read(data, length, ack) || ack.sequence < acked_sequence ||
        ack.sequence > sent_sequence ||
        length - sizeof(ack) != size_t(ack.count) * sizeof(uint32_t)) {
        refuse(0, UCS_ERR_INVALID_PARAM, "malformed acknowledgement");
        return;
    }
    for (; acked_sequence < ack.sequence; ++acked_sequence) {
        const InFlight &oldest = in_flight.front();
        credits_in_use -= oldest.uses_slot;
        puts_acked = std::max(puts_acked, oldest.put);
        in_flight.pop_front();
    }
    if (!take_credits(data + sizeof(ack), ack.count, length - sizeof(ack))) {
        refuse(0, UCS_ERR_INVALID_PARAM, "acknowledgement with slots that do not exist");
        return;
    }
    if (credits_in_use == 0) {
        requested = false; // if none came back there is a need to ask again
    }
    complete_flushes();
}

void Ep::on_return(const char *data, size_t length)
{
    wire::Ack returned;
    if (!wire::read(data, length, returned) || returned.count > wire::MAX_SLOTS_A_MESSAGE ||
        length - sizeof(returned) != size_t(returned.count) * sizeof(uint32_t)) {
        refuse(0, UCS_ERR_INVALID_PARAM, "malformed return of slots");
        return;
    }
    recall_sent = false;
    for (uint32_t i = 0; i < returned.count; ++i) {
        uint32_t slot;
        memcpy(&slot, data + sizeof(returned) + i * sizeof(slot), sizeof(slot));
        const auto held = std::find(lent.begin(), lent.end(), slot);
        if (held == lent.end()) {
            refuse(0, UCS_ERR_INVALID_PARAM, "return of a slot that is not the peer's");
            return;
        }
        lent.erase(held);
        iface->release_slot(slot);
    }
}

void Ep::on_refuse(const char *data, size_t length)
{
    // Only what refuse() sends is believed: UCP gives a meaning to some others.
    static constexpr ucs_status_t known[] = {UCS_ERR_INVALID_ADDR, UCS_ERR_INVALID_PARAM,
                                             UCS_ERR_IO_ERROR, UCS_ERR_NO_MEMORY};
    wire::Refuse message;
    ucs_status_t status = UCS_ERR_REJECTED;
    if (wire::read(data, length, message)) {
        for (ucs_status_t candidate : known) {
            status = message.status == candidate ? candidate : status;
        }
    }
    zip_error("zip: endpoint %p: the peer refused a segment: %s", static_cast<void *>(this),
              ucs_status_string(status));
    fail(status, true);
}

// Slots that this endpoint has and its peer may not write.
void Ep::return_unlent_slots()
{
    for (std::vector<uint32_t> *slots : {&to_ack, &to_grant}) {
        for (uint32_t slot : std::exchange(*slots, {})) {
            iface->release_slot(slot);
        }
    }
}

// The peer writes no more, and neither does this endpoint: the peer is told so, because UCP may
// keep an endpoint for long whose peer has gone, and the slots that the peer lent would be lost to
// others meanwhile.
void Ep::on_bye()
{
    peer_gone = true;
    ack_due = recall_due = recalled = false;
    wanted = 0;
    bye_due = connected && lower != nullptr && !lower_failed;
    if (in_waiting) {
        std::erase(iface->waiting, this);
        in_waiting = false;
    }
    for (uint32_t slot : std::exchange(lent, {})) {
        iface->release_slot(slot);
    }
    return_unlent_slots();
    control();
    if (puts_acked != puts_posted) {
        fail(UCS_ERR_CONNECTION_RESET, true);
    }
}

void Ep::handle(wire::MessageType type, const char *data, size_t length)
{
    if (failed != UCS_OK && type != wire::BYE) {
        return;
    }
    KeepAlive guard(this);
    switch (type) {
    case wire::REQUEST:
        on_request(data, length);
        break;
    case wire::GRANT:
        on_grant(data, length);
        break;
    case wire::SEGMENT:
        on_segment(data, length);
        break;
    case wire::ACK:
        on_ack(data, length);
        break;
    case wire::RECALL:
        recalled = true;
        break;
    case wire::RETURN:
        on_return(data, length);
        break;
    case wire::REFUSE:
        on_refuse(data, length);
        break;
    case wire::BYE:
        on_bye();
        break;
    case wire::MESSAGE_TYPE_LAST:
        break;
    }
    if (!doomed && has_work()) {
        iface->activate(this);
    }
}

// ---- operations that UCX calls

ucs_status_t ep_create(const uct_ep_params_t *params, uct_ep_h *ep_p)
{
    if ((params->field_mask & UCT_EP_PARAM_FIELD_IFACE_ADDR) != 0 ||
        (params->field_mask & UCT_EP_PARAM_FIELD_SOCKADDR) != 0) {
        return UCS_ERR_UNSUPPORTED; // endpoints connect to endpoints only
    }
    Iface *iface = iface_of(params->iface);
    Ep *ep = new (std::nothrow) Ep();
    if (ep == nullptr) {
        return UCS_ERR_NO_MEMORY;
    }
    int init_count = 1;
    ucs_status_t status =
            uct_base_ep_t_init(&ep->super, ucx::uct_base_ep_t_class_p, &init_count, &iface->super);
    if (status != UCS_OK) {
        ucs_class_call_cleanup_chain(ucx::uct_base_ep_t_class_p, ep, init_count);
        delete ep;
        return status;
    }
    ep->iface = iface;
    ep->id = random_id();
    ep->path_index =
            (params->field_mask & UCT_EP_PARAM_FIELD_PATH_INDEX) != 0 ? params->path_index : 0;
    iface->eps[ep->id] = ep;
    iface->start_progress();
    if (iface->lower_connects_to_ep) {
        status = create_lower(ep, nullptr, nullptr, 0);
        if (status != UCS_OK) {
            ep_destroy(&ep->super.super);
            return status;
        }
    }
    *ep_p = &ep->super.super;
    return UCS_OK;
}

void ep_destroy(uct_ep_h ep_handle)
{
    Ep *ep = ep_of(ep_handle);
    Iface *iface = ep->iface;
    ++ep->depth; // fail() calls back into UCP
    ep->fail(UCS_ERR_CANCELED, false);
    ep->report_due = false;
    ep->doomed = true;
    iface->remove(ep);
    ucs_class_call_cleanup_chain(ucx::uct_base_ep_t_class_p, ep, -1);
    if (--ep->depth == 0) {
        delete ep;
    }
}

ucs_status_t ep_get_address(uct_ep_h ep_handle, uct_ep_addr_t *address)
{
    Ep *ep = ep_of(ep_handle);
    wire::EpAddress head{};
    head.lower_length = static_cast<uint8_t>(lower_address_length(ep->iface));
    head.id = ep->id;
    memcpy(address, &head, sizeof(head));
    char *lower_address = reinterpret_cast<char *>(address) + sizeof(head);
    return ep->iface->lower_connects_to_ep
                   ? uct_ep_get_address(ep->lower, reinterpret_cast<uct_ep_addr_t *>(lower_address))
                   : uct_iface_get_address(ep->iface->lower,
                                           reinterpret_cast<uct_iface_addr_t *>(lower_address));
}

ucs_status_t ep_connect(uct_ep_h ep_handle, const uct_device_addr_t *device_address,
                        const uct_ep_addr_t *ep_address, const ucx::ConnectToEpParams *params)
{
    Ep *ep = ep_of(ep_handle);
    wire::EpAddress head;
    const size_t expected = sizeof(head) + lower_address_length(ep->iface);
    const bool has_length = (params->field_mask & ucx::ConnectToEpParams::EP_ADDR_LENGTH) != 0;
    if (!wire::read(ep_address, has_length ? params->ep_addr_length : expected, head) ||
        !head.version.matches() || head.lower_length != lower_address_length(ep->iface) ||
        (has_length && params->ep_addr_length < expected)) {
        zip_error("zip: the peer's endpoint address is not one of this version");
        return UCS_ERR_INVALID_ADDR;
    }
    if (ep->connected) {
        return ep->peer_id == head.id ? UCS_OK : UCS_ERR_ALREADY_EXISTS;
    }
    const char *lower_address = reinterpret_cast<const char *>(ep_address) + sizeof(head);
    ucs_status_t status;
    if (ep->iface->lower_connects_to_ep) {
        ucx::ConnectToEpParams lower_params = {};
        lower_params.field_mask =
                (params->field_mask & ucx::ConnectToEpParams::DEVICE_ADDR_LENGTH) |
                ucx::ConnectToEpParams::EP_ADDR_LENGTH;
        lower_params.device_addr_length =
                (params->field_mask & ucx::ConnectToEpParams::DEVICE_ADDR_LENGTH) != 0
                        ? params->device_addr_length
                        : 0;
        lower_params.ep_addr_length = head.lower_length;
        status = uct_ep_connect_to_ep_v2(ep->lower, device_address,
                                         reinterpret_cast<const uct_ep_addr_t *>(lower_address),
                                         &lower_params);
    } else {
        status = create_lower(ep, device_address, lower_address, head.lower_length);
    }
    if (status != UCS_OK) {
        return status;
    }
    ep->peer_id = head.id;
    ep->connected = true;
    if (ep->has_work()) {
        ep->iface->activate(ep);
    }
    return UCS_OK;
}

int ep_is_connected(uct_ep_h ep_handle, const ucx::ConnectedParams *params)
{
    const Ep *ep = ep_of(ep_handle);
    wire::EpAddress head;
    return ep->connected && (params->field_mask & ucx::ConnectedParams::EP_ADDR) != 0 &&
           wire::read(params->ep_addr, sizeof(head), head) && head.version.matches() &&
           head.id == ep->peer_id;
}

ucs_status_t ep_put_zcopy(uct_ep_h ep, const uct_iov_t *iov, size_t count, uint64_t address,
                          uct_rkey_t rkey, uct_completion_t *completion)
{
    return ep_of(ep)->put(iov, count, address, reinterpret_cast<const Rkey *>(rkey), completion);
}

ucs_status_t ep_flush(uct_ep_h ep, unsigned flags, uct_completion_t *completion)
{
    return ep_of(ep)->flush(flags, completion);
}

// Segments of one endpoint are decoded in the order in which they were put.
ucs_status_t ep_fence(uct_ep_h, unsigned)
{
    return UCS_OK;
}

ucs_status_t ep_pending_add(uct_ep_h ep_handle, uct_pending_req_t *request, unsigned)
{
    Ep *ep = ep_of(ep_handle);
    if (ep->failed == UCS_OK && ep->can_accept_put()) {
        return UCS_ERR_BUSY;
    }
    ep->pending.push_back(request);
    return UCS_OK;
}

void ep_pending_purge(uct_ep_h ep_handle, uct_pending_purge_callback_t callback, void *arg)
{
    for (std::deque<uct_pending_req_t *> requests = std::move(ep_of(ep_handle)->pending);
         !requests.empty(); requests.pop_front()) {
        callback(requests.front(), arg);
    }
    ep_of(ep_handle)->pending.clear();
}

} // namespace zip
