// SPDX-License-Identifier: BSD-3-Clause
// The endpoint: one connection between two processes. As a sender it cuts puts into segments,
// encodes them into the peer's slots and keeps count of what the peer has decoded; as a receiver it
// lends slots, decodes, and acknowledges.
//
// Like all of UCT, an endpoint and its interface are used by one thread at a time: UCP's worker
// locks.
#ifndef ZIP_EP_H
#define ZIP_EP_H

#include "uct/zip/zip_iface.h"

namespace zip {

struct Ep {
    ucx::BaseEp super; // must be first: UCX sees only this
    Iface *iface = nullptr;
    uint64_t id = 0;
    uint64_t peer_id = 0;
    uct_ep_h lower = nullptr;
    unsigned path_index = 0;
    bool connected = false;
    bool in_active = false; // on Iface::active
    unsigned depth = 0;     // of this endpoint's functions on the stack that call back into UCP
    bool doomed = false;    // destroyed meanwhile: deleted when the last of them returns
    bool lower_failed = false;
    bool report_due = false; // UCP has not been told of `failed`
    ucs_status_t failed = UCS_OK;

    // ---- sender
    struct Put {
        const char *source;
        size_t length;
        uint64_t address;
        uint64_t region;
        uct_completion_t *completion;
        size_t done; // bytes that were encoded
        zip_dtype_t dtype;
        bool probed;
    };
    struct InFlight {
        uint64_t put; // number of the put that ends with this segment, or 0
        bool uses_slot;
    };
    struct Flush {
        uint64_t put; // complete when this put is acknowledged
        uct_completion_t *completion;
    };
    enum class Stage { IDLE, ENCODED, WRITTEN };

    std::deque<Put> puts; // not encoded to the end
    uint64_t puts_posted = 0;
    uint64_t puts_acked = 0;
    Stage stage = Stage::IDLE;
    wire::Segment segment = {};
    const char *segment_data = nullptr; // encoded bytes, or the source of an inline segment
    TxBuffer *segment_buffer = nullptr; // that holds them, unless the slot is mapped
    std::deque<InFlight> in_flight;
    uint64_t sent_sequence = 0;
    uint64_t acked_sequence = 0;
    std::unique_ptr<RemoteRing> remote;
    std::vector<uint32_t> credits; // slots of the peer's ring that this endpoint may write
    uint32_t credits_in_use = 0;
    bool requested = false;
    bool recalled = false;
    std::deque<Flush> flushes;
    std::deque<uct_pending_req_t *> pending;

    // ---- receiver
    uint64_t received_sequence = 0;
    std::vector<uint32_t> lent;   // slots that the peer may write
    std::vector<uint32_t> to_ack; // slots to lend again with the next acknowledgement
    std::vector<uint32_t> to_grant;
    bool ack_due = false;
    wire::ProcessId peer_process = {};
    uint32_t wanted = 0; // slots the peer asked for and has not got
    bool in_waiting = false;
    bool recall_due = false;
    bool recall_sent = false;
    std::chrono::steady_clock::time_point recalled_at;
    bool peer_gone = false;
    bool bye_due = false;

    unsigned progress();
    bool has_work() const;

    ucs_status_t put(const uct_iov_t *iov, size_t count, uint64_t address, const Rkey *rkey,
                     uct_completion_t *completion);
    ucs_status_t flush(unsigned flags, uct_completion_t *completion);
    bool can_accept_put() const;

    // Ends all operations with `status`; with `report`, tells UCP.
    void fail(ucs_status_t status, bool report);

    void handle(wire::MessageType type, const char *data, size_t length);

    // Lends slots to the peer as far as there are any; the rest has to wait.
    void grant_wanted();

private:
    unsigned send();
    unsigned control();
    unsigned dispatch_pending();
    bool can_prepare() const;
    bool prepare_segment();
    ucs_status_t post_segment();
    void complete_flushes();
    size_t slot_payload() const; // bytes of a put that one slot of the peer takes

    void on_request(const char *data, size_t length);
    void on_grant(const char *data, size_t length);
    void on_segment(const char *data, size_t length);
    void on_ack(const char *data, size_t length);
    void on_return(const char *data, size_t length);
    void on_refuse(const char *data, size_t length);
    void on_bye();
    void return_unlent_slots();
    bool take_credits(const char *slots, uint32_t count, size_t available);
    void refuse(uint64_t sequence, ucs_status_t status, const char *why);
};

inline Ep *ep_of(uct_ep_h ep)
{
    return reinterpret_cast<Ep *>(ep);
}

ucs_status_t ep_create(const uct_ep_params_t *params, uct_ep_h *ep_p);
void ep_destroy(uct_ep_h ep);
ucs_status_t ep_get_address(uct_ep_h ep, uct_ep_addr_t *address);
ucs_status_t ep_connect(uct_ep_h ep, const uct_device_addr_t *device_address,
                        const uct_ep_addr_t *ep_address, const ucx::ConnectToEpParams *params);
int ep_is_connected(uct_ep_h ep, const ucx::ConnectedParams *params);
ucs_status_t ep_put_zcopy(uct_ep_h ep, const uct_iov_t *iov, size_t count, uint64_t address,
                          uct_rkey_t rkey, uct_completion_t *completion);
ucs_status_t ep_flush(uct_ep_h ep, unsigned flags, uct_completion_t *completion);
ucs_status_t ep_fence(uct_ep_h ep, unsigned flags);
ucs_status_t ep_pending_add(uct_ep_h ep, uct_pending_req_t *request, unsigned flags);
void ep_pending_purge(uct_ep_h ep, uct_pending_purge_callback_t callback, void *arg);

} // namespace zip

#endif
