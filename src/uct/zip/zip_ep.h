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
#include "uct/zip/zip_message.h"

namespace zip {

// Adds one finished operation to a completion, as UCT defines it.
inline void complete(uct_completion_t *completion, ucs_status_t status)
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

// ---- what a sender has to do

enum class Kind : uint8_t { PUT, GET };

// What UCX asked for and what is not yet on its way to the end.
struct Operation {
    Kind kind;
    Way way = Way::CODED;
    bool chosen = false; // `way`, `coding` and `ratio` are
    zip_coding_t coding = {};
    float ratio = 1;       // that the probe expects
    bool measured = false; // the bypass learns from how long it takes
    char *local;           // source of a put, destination of a get
    size_t length;
    Region *region;   // of `local`, or NULL
    uint64_t address; // in the peer
    Rkey *rkey;
    uct_completion_t *completion;
    size_t done = 0;                 // bytes encoded, or posted below
    uint64_t fence = 0;              // operations up to this one must be complete before it
    LowerOperation *under = nullptr; // where it goes straight: its pieces below
    std::chrono::steady_clock::time_point since;

    bool is_codable() const { return (region == nullptr || region->host) && rkey->host; }
};
// An operation that is on its way. They are complete in order.
struct Tracked {
    Operation what;
    uint64_t last_segment = 0; // of a coded put: complete when that is acknowledged
    bool done = false;
    Region *region = nullptr; // of a coded get: what the peer puts into
    size_t received = 0;      // bytes of it
    size_t encoded = 0;       // and what they were on the wire
};
// A get that the peer asked for: a put of this side's memory into the peer's.
struct Answer {
    wire::Get request;
    zip_coding_t coding = {};
    size_t done = 0;
};
// A segment that is in the peer's slot, or on the way there; where the transport below does
// not order puts and messages its message waits for a flush.
struct Unannounced {
    wire::Segment segment;
    Tracked *ends; // the operation that it is the last one of, or NULL
    bool flushed;
};

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
    struct Flush {
        uint64_t operation; // complete when this one is
        uct_completion_t *completion;
    };
    enum class Stage : uint8_t { IDLE, ENCODED, PUT, WRITTEN };

    std::deque<Operation> operations;
    uint64_t posted = 0;    // operations ever
    uint64_t completed = 0; // of them, from the first on
    uint64_t fenced = 0;    // Operation::fence of the next one
    std::deque<Tracked> tracked;
    std::deque<Answer> answers;
    std::vector<uint64_t> to_decline; // regions of the peer that gets were to fill
    bool answered_last = false;       // the last segment was of an answer
    std::vector<Tracked *> coded_gets;
    std::deque<Tracked *> declined; // gets that this side has to do by itself
    // What gets of the peer's regions were like.
    struct Remembered {
        float ratio;
        unsigned skips; // gets that go straight without asking
    };
    std::unordered_map<uint64_t, Remembered> remembered;
    Stage stage = Stage::IDLE;
    bool segment_is_answer = false;
    wire::Segment segment = {};
    const char *segment_data = nullptr; // encoded bytes, or the source of an inline segment
    TxBuffer *segment_buffer = nullptr; // that holds them, unless the slot is mapped
    std::deque<Unannounced> unannounced;
    std::deque<bool> in_flight; // segments that are not acknowledged: whether each uses a slot
    uint64_t sent_sequence = 0;
    uint64_t acked_sequence = 0;
    std::unique_ptr<RemoteRing> remote;
    std::vector<uint32_t> credits; // slots of the peer's ring that this endpoint may write
    uint32_t credits_in_use = 0;
    unsigned under_way = 0;                  // operations below that have not ended
    LowerOperation *last_straight = nullptr; // the one that was posted last, while it is under way
    uct_completion_t *canceled = nullptr;    // of a flush that waits for those
    std::unique_ptr<Bypass> bypass[2];       // by Kind
    bool requested = false;
    bool recalled = false;
    std::deque<Flush> flushes;
    std::deque<uct_pending_req_t *> pending;
    bool dispatching = false; // one of those is being tried

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

    ucs_status_t post(Kind kind, const uct_iov_t *iov, size_t count, uint64_t address, Rkey *rkey,
                      uct_completion_t *completion);
    ucs_status_t flush(unsigned flags, uct_completion_t *completion);
    void fence();
    bool can_accept() const;
    bool is_idle() const { return failed != UCS_OK || (completed == posted && pending.empty()); }

    // An operation below has ended.
    void lower_operation_ended(LowerOperation &ended, ucs_status_t status);

    // Ends all operations with `status`; with `report`, tells UCP.
    void fail(ucs_status_t status, bool report);

    void handle(wire::MessageType type, const char *data, size_t length);

    // Lends slots to the peer as far as there are any; the rest has to wait.
    void grant_wanted();

private:
    unsigned send();
    unsigned control();
    unsigned dispatch_pending();
    size_t slots_wanted() const;
    bool can_advance() const;
    bool can_start(const Operation &operation) const;
    bool can_go_straight(const Operation &operation);
    void choose_way(Operation &operation);
    ucs_status_t advance();
    bool prepare_segment();
    bool prepare_answer();
    bool encode_segment(zip_coding_t coding, const char *data, size_t left);
    ucs_status_t post_segment();
    ucs_status_t announce(wire::Segment &message, Part inline_data);
    unsigned announce_flushed();
    Tracked *segment_sent();
    ucs_status_t ask_for_get(Operation &operation, Tracked *entry);
    ucs_status_t go_straight(Operation &operation, Tracked *entry);
    Tracked &track(const Operation &operation);
    void unmeasure(Operation &operation);
    void end(Tracked &operation);
    void end_acknowledged();
    void retire();
    void received_for_get(Tracked &get, const wire::Segment &segment);
    void remember(uint64_t region, float ratio);
    size_t slot_payload() const; // bytes of a put that one slot of the peer takes

    void on_request(const char *data, size_t length);
    void on_grant(const char *data, size_t length);
    void on_segment(const char *data, size_t length);
    void on_ack(const char *data, size_t length);
    void on_return(const char *data, size_t length);
    void on_refuse(const char *data, size_t length);
    void on_get(const char *data, size_t length);
    void on_decline(const char *data, size_t length);
    void on_bye();
    void return_unlent_slots();
    bool take_credits(const char *slots, uint32_t count, size_t available);
    void refuse(uint64_t sequence, ucs_status_t status, const char *why);
};

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
ucs_status_t ep_get_zcopy(uct_ep_h ep, const uct_iov_t *iov, size_t count, uint64_t address,
                          uct_rkey_t rkey, uct_completion_t *completion);
ucs_status_t ep_flush(uct_ep_h ep, unsigned flags, uct_completion_t *completion);
ucs_status_t ep_fence(uct_ep_h ep, unsigned flags);
ucs_status_t ep_pending_add(uct_ep_h ep, uct_pending_req_t *request, unsigned flags);
void ep_pending_purge(uct_ep_h ep, uct_pending_purge_callback_t callback, void *arg);

} // namespace zip

#endif
