// SPDX-License-Identifier: BSD-3-Clause
// Endpoints: their life, what both halves share, and the operations that UCX calls.
#include "uct/zip/zip_ep.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

namespace zip {

namespace {

constexpr uint32_t MAX_WINDOW = 32; // slots that one endpoint asks for

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

// ---- both halves

// Ends an operation of which not all was given to the transport below.
static void end_unposted(Operation &operation, ucs_status_t status)
{
    if (operation.under != nullptr) {
        operation.under->user = operation.completion;
        complete(&operation.under->completion, status);
    } else {
        complete(operation.completion, status);
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
    leave_queues();
    return_unlent_slots();
    for (Piece &piece : pieces) {
        drop_piece(piece);
    }
    pieces.clear();
    encoding = 0;
    current = nullptr;
    GpuQueue::end(probe);
    for (Arrival &arrival : arrivals) {
        drop_arrival(arrival);
    }
    arrivals.clear();
    decoding = 0;
    answers.clear();
    unannounced.clear();
    to_decline.clear();
    // A peer that may put plain ends must not do so any more when their get has ended.
    const auto has_ends = [](const Tracked *get) { return get->has_ends; };
    if (std::any_of(coded_gets.begin(), coded_gets.end(), has_ends)) {
        cancel_lower();
    }
    for (Tracked *get : std::exchange(coded_gets, {})) {
        iface->md->remove_region(std::exchange(get->region, nullptr));
        declined.push_back(get);
    }
    // gets that end here, or when the pieces below do that were posted
    for (Tracked *get : std::exchange(declined, {})) {
        end_unposted(get->what, status);
    }
    // What the transport below has not finished ends when it does: until then it may use the
    // memory.
    iface->detach_lower_operations(this);
    // coded puts, of which some may be on their way below
    for (std::deque<Tracked> unfinished = std::move(tracked); !unfinished.empty();
         unfinished.pop_front()) {
        Operation &what = unfinished.front().what;
        if (what.kind == Kind::PUT && what.way == Way::CODED && !unfinished.front().done) {
            if (unfinished.front().plain != nullptr) {
                unfinished.front().plain->user = what.completion;
            } else {
                end_unposted(what, status);
            }
        }
    }
    tracked.clear();
    for (std::deque<Operation> unfinished = std::move(operations); !unfinished.empty();
         unfinished.pop_front()) {
        end_unposted(unfinished.front(), status);
    }
    operations.clear();
    for (std::deque<Flush> unfinished = std::move(flushes); !unfinished.empty();
         unfinished.pop_front()) {
        complete(unfinished.front().completion, status);
    }
    flushes.clear();
    if (report && !doomed) {
        iface->activate(this);
    }
}

// Ends what is under way on the connection below, from either side.
void Ep::cancel_lower()
{
    if (!lower_failed) {
        lower_failed = true;
        uct_ep_flush(lower, UCT_FLUSH_FLAG_CANCEL, nullptr);
    }
}

bool Ep::has_work() const
{
    if (failed != UCS_OK) {
        return report_due;
    }
    const auto lends = [](const auto &entry) {
        return !entry.second.to_grant.empty() || entry.second.recall_due;
    };
    const auto returns = [this](const auto &entry) {
        return entry.second.recalled && slots_wanted(entry.first) == 0;
    };
    return connected && (bye_due || ack_due || !to_decline.empty() || !to_ack.empty() ||
                         !arrivals.empty() || std::any_of(lending.begin(), lending.end(), lends) ||
                         can_advance() || std::any_of(sending.begin(), sending.end(), returns) ||
                         (!pending.empty() && can_accept()));
}

bool Ep::waits_for_gpu() const
{
    return encoding > 0 || !arrivals.empty() || probe.queue != nullptr;
}

// Does not wait for slots any more.
void Ep::leave_queues()
{
    for (auto &[ring, lends] : lending) {
        if (std::exchange(lends.in_waiting, false)) {
            std::erase(iface->sides[ring]->waiting, this);
        }
    }
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
        const wire::Ack ack{{peer_id}, decoded_sequence, 0};
        if (!went(send_slots(lower, wire::ACK, ack, to_ack, &lent))) {
            return sent;
        }
        ack_due = false;
    }
    for (auto &[number, lends] : lending) {
        while (!lends.to_grant.empty()) {
            SlotPool *ring = iface->sides[number]->ring.get();
            const std::vector<char> &rkey = ring->memory().rkey();
            const wire::Grant grant{{peer_id},
                                    reinterpret_cast<uint64_t>(ring->memory().address()),
                                    static_cast<uint32_t>(ring->slot_size()),
                                    ring->count(),
                                    0,
                                    static_cast<uint32_t>(rkey.size())};
            if (!went(send_slots(lower, wire::GRANT, grant, lends.to_grant, &lent,
                                 {rkey.data(), rkey.size()}))) {
                return sent;
            }
        }
        if (lends.recall_due) {
            const wire::Recall recall{{peer_id}, static_cast<uint8_t>(number)};
            if (!went(send_message(lower, wire::RECALL, &recall, sizeof(recall)))) {
                return sent;
            }
            lends.recall_due = false;
        }
    }
    while (!to_decline.empty()) {
        const wire::Decline message{{peer_id}, to_decline.back()};
        if (!went(send_message(lower, wire::DECLINE, &message, sizeof(message)))) {
            return sent;
        }
        to_decline.pop_back();
    }
    if (!operations.empty() && !operations.front().chosen) {
        choose_way(operations.front());
    }
    if (failed != UCS_OK) {
        return sent;
    }
    know_rings_wanted();
    for (auto &[ring, to] : sending) {
        const size_t wanted_now = std::min<size_t>(MAX_WINDOW, slots_wanted(ring));
        if (to.recalled && wanted_now == 0) {
            do {
                const wire::Ack give_back{{peer_id}, 0, 0};
                if (!went(send_slots(lower, wire::RETURN, give_back, to.credits, nullptr))) {
                    return sent;
                }
            } while (!to.credits.empty());
            to.recalled = false;
        }
        if (!to.requested && wanted_now > 0 && to.credits.empty()) {
            if (wanted_now > to.in_use) {
                const wire::Request request{{peer_id},
                                            static_cast<uint32_t>(wanted_now - to.in_use),
                                            static_cast<uint8_t>(ring),
                                            this_process()};
                if (!went(send_message(lower, wire::REQUEST, &request, sizeof(request)))) {
                    return sent;
                }
            }
            to.requested = true; // or none needed: the slots in use come back
        }
    }
    return sent;
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
    launch_decodes();
    unsigned count = finish_arrivals();
    count += control();
    count += send();
    count += dispatch_pending();
    if (!doomed && has_work()) {
        iface->activate(this);
    }
    return count;
}

// ---- messages that concern the whole endpoint

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
    std::vector<uint32_t> slots = std::exchange(to_ack, {});
    for (auto &[ring, lends] : lending) {
        slots.insert(slots.end(), lends.to_grant.begin(), lends.to_grant.end());
        lends.to_grant.clear();
    }
    for (uint32_t slot : slots) {
        iface->release_slot(slot);
    }
}

size_t Ep::slots_held(unsigned ring) const
{
    const auto is_its = [ring](uint32_t slot) { return wire::ring_of(slot) == ring; };
    const auto lends = lending.find(ring);
    return static_cast<size_t>(std::count_if(lent.begin(), lent.end(), is_its) +
                               std::count_if(to_ack.begin(), to_ack.end(), is_its)) +
           (lends != lending.end() ? lends->second.to_grant.size() : 0);
}

// The peer writes no more, and neither does this endpoint: the peer is told so, because UCP may
// keep an endpoint for long whose peer has gone, and the slots that the peer lent would be lost to
// others meanwhile.
void Ep::on_bye()
{
    peer_gone = true;
    ack_due = false;
    bye_due = connected && lower != nullptr && !lower_failed;
    leave_queues();
    for (auto &[ring, lends] : lending) {
        lends.wanted = 0;
        lends.recall_due = false;
    }
    for (auto &[ring, to] : sending) {
        to.recalled = false;
    }
    for (uint32_t slot : std::exchange(lent, {})) {
        iface->release_slot(slot);
    }
    return_unlent_slots();
    control();
    if (completed != posted) {
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
        on_recall(data, length);
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
    case wire::GET:
        on_get(data, length);
        break;
    case wire::DECLINE:
        on_decline(data, length);
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
    wire::EpAddressView view;
    const wire::EpAddress &head = view.head;
    const size_t lower_length = lower_address_length(ep->iface);
    const bool has_length = (params->field_mask & ucx::ConnectToEpParams::EP_ADDR_LENGTH) != 0;
    if (!wire::parse(ep_address, has_length ? params->ep_addr_length : sizeof(head) + lower_length,
                     lower_length, view)) {
        zip_error("zip: the peer's endpoint address is not one of this version");
        return UCS_ERR_INVALID_ADDR;
    }
    if (ep->connected) {
        return ep->peer_id == head.id ? UCS_OK : UCS_ERR_ALREADY_EXISTS;
    }
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
                                         reinterpret_cast<const uct_ep_addr_t *>(view.lower),
                                         &lower_params);
    } else {
        status = create_lower(ep, device_address, view.lower, lower_length);
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
    return ep_of(ep)->post(Kind::PUT, iov, count, address, reinterpret_cast<Rkey *>(rkey),
                           completion);
}

ucs_status_t ep_get_zcopy(uct_ep_h ep, const uct_iov_t *iov, size_t count, uint64_t address,
                          uct_rkey_t rkey, uct_completion_t *completion)
{
    return ep_of(ep)->post(Kind::GET, iov, count, address, reinterpret_cast<Rkey *>(rkey),
                           completion);
}

ucs_status_t ep_flush(uct_ep_h ep, unsigned flags, uct_completion_t *completion)
{
    return ep_of(ep)->flush(flags, completion);
}

ucs_status_t ep_fence(uct_ep_h ep, unsigned)
{
    ep_of(ep)->fence();
    return UCS_OK;
}

ucs_status_t ep_pending_add(uct_ep_h ep_handle, uct_pending_req_t *request, unsigned)
{
    Ep *ep = ep_of(ep_handle);
    if (ep->failed == UCS_OK && ep->can_accept() && ep->pending.empty()) {
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
