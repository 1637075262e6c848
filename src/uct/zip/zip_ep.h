// SPDX-License-Identifier: BSD-3-Clause
// The endpoint: one connection between two processes. As a sender it cuts puts into segments,
// encodes them into the peer's slots and keeps count of what the peer has decoded; as a receiver it
// lends slots, decodes, and acknowledges. The processor encodes and decodes at once; a GPU is given
// work, and progress looks whether it is done.
//
// Like all of UCT, an endpoint and its interface are used by one thread at a time: UCP's worker
// locks.
#ifndef ZIP_EP_H
#define ZIP_EP_H

#include "uct/zip/zip_iface.h"
#include "uct/zip/zip_message.h"

#include <map>

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

constexpr size_t MAX_CODED_GETS = 64; // that the peer has not answered

enum class Kind : uint8_t { PUT, GET };

// What UCX asked for and what is not yet on its way to the end.
struct Operation {
    Kind kind;
    Way way = Way::CODED;
    bool chosen = false; // `way`, `coding` and `ratio` are
    zip_coding_t coding = {};
    float ratio = 1;           // that the probe expects
    bool measured = false;     // the bypass learns from how long it takes
    bool alone = true;         // no other of its kind was under way when it was posted
    bool queued = false;       // another was when its way was chosen
    size_t head = 0, tail = 0; // bytes that go plain, of a coded put
    char *local;               // source of a put, destination of a get
    size_t length;
    Region *region;   // of `local`, or NULL
    uint64_t address; // in the peer
    Rkey *rkey;
    uct_completion_t *completion;
    size_t done = 0;                 // bytes made into pieces, or posted below
    uint64_t fence = 0;              // operations up to this one must be complete before it
    LowerOperation *under = nullptr; // what of it goes straight or plain, until all is posted
    std::chrono::steady_clock::time_point since;
    uint64_t serial = 0;
    // These hold when UCX has been told that it is complete; region and key may be gone then.
    bool uses_gpu = false; // one of its ends is a GPU's
    uint64_t region_id = 0;

    bool is_codable() const
    {
        return (region == nullptr || region->codable()) && rkey->ring != Region::NO_RING;
    }
    bool on_gpu() const { return region != nullptr && region->on_gpu(); }
};
// An operation that is on its way. They are complete in order.
struct Tracked {
    Operation what;
    size_t sent = 0;                 // bytes of a coded put
    uint64_t last_segment = 0;       // of it: complete when that is acknowledged
    LowerOperation *plain = nullptr; // what goes plain of it, when all of that is posted
    std::chrono::steady_clock::time_point plain_ended = {};
    bool sent_all = false; // nothing here reads its memory any more
    bool done = false;
    // bytes on the wire of what is coded: of a put what is sent, of a get what has arrived
    size_t encoded = 0;
    // of a coded get
    Region *region = nullptr; // what the peer puts into
    bool has_ends = false;    // of which some may be plain
    size_t arrived = 0;       // bytes of it
    size_t received = 0;      // of them decoded, or plain
    size_t plain_bytes = 0;   // of them plain
    std::chrono::steady_clock::time_point tail_arrived = {}, decoded = {}; // the last piece
};
// A get that the peer asked for: a put of this side's memory into the peer's.
struct Answer {
    wire::Get request;
    std::shared_ptr<Rkey> key; // for what goes plain, or NULL
    std::chrono::steady_clock::time_point since;
    bool chosen = false; // `coding` and the ends are
    zip_coding_t coding = {};
    size_t head = 0, tail = 0; // bytes that go plain
    size_t done = 0;           // bytes made into pieces

    // Bytes that are coded, from `done` on.
    size_t left() const
    {
        const size_t end = request.length - tail;
        return end - std::min(end, std::max(done, head));
    }
    bool next_is_plain() const { return chosen && (done < head || left() == 0); }
};
// A piece of a put or an answer on its way to the peer; they go in order.
struct Piece {
    enum class Stage : uint8_t {
        ENCODING, // by a GPU
        ENCODED,  // to be put into the peer's slot
        PLAIN,    // to be put where it belongs
        PUT,      // to be announced when it is known to be there
        WRITTEN   // to be announced
    };
    Stage stage;
    wire::Segment segment;
    const char *data = nullptr; // encoded bytes, or the source of what goes inline or plain
    TxBuffer *buffer = nullptr; // that holds them, unless the slot is mapped
    size_t put = 0;             // bytes of them that are posted
    Tracked *owner = nullptr;   // the put that it is of; NULL: an answer
    GpuQueue::Ticket ticket = {};
    size_t fixed = 0; // encoded bytes before the tail, while ENCODING
    std::chrono::steady_clock::time_point since = {}; // when it was wanted, if that is timed
    // of an answer
    Region *source = nullptr;        // while a GPU reads it
    std::vector<char> copy = {};     // that goes inline: its memory may be deregistered
    std::shared_ptr<Rkey> key = {};  // of a plain one
    uint64_t source_id = 0;          // the region that it is of
    LowerOperation *under = nullptr; // while some of it is to be posted
};
// A segment that is in the peer's slot, or on the way there; where the transport below does
// not order puts and messages its message waits for a flush.
struct Unannounced {
    wire::Segment segment;
    Tracked *ends; // the operation that it is the last one of, or NULL
    bool flushed;
};
// A segment that has arrived; they are acknowledged in order.
struct Arrival {
    enum class State : uint8_t { WAITING, DECODING, DONE };
    State state;
    wire::Segment segment;
    Tracked *get = nullptr;   // that it is of
    Region *region = nullptr; // until it is DONE
    GpuQueue::Ticket ticket = {};
    ucs_status_t status = UCS_OK;
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
    // What it knows of one of the peer's rings.
    struct Sending {
        std::unique_ptr<RemoteRing> remote;
        std::vector<uint32_t> credits; // slots that this endpoint may write
        uint32_t in_use = 0;
        bool requested = false;
        bool recalled = false;
    };
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
    // What gets from the peer's addresses were like.
    struct Remembered {
        float ratio;
        unsigned skips; // gets that go straight without asking
    };
    std::unordered_map<uint64_t, Remembered> remembered;
    double decoding_seconds = 15e-6; // from a get's last coded piece's arrival until it is decoded
    Tracked *current = nullptr;      // a coded put that is not all made into pieces
    std::deque<Piece> pieces;
    unsigned encoding = 0;          // of them
    GpuQueue::Ticket probe;         // of data that is to be sent
    const char *probed = nullptr;   // that data
    double encoder_seconds = 25e-6; // from a put's start until its first piece is encoded
    double decoder_seconds = 15e-6; // from the arrival of its last coded piece until it is decoded
    unsigned gpu_puts = 0;          // coded ones that are not complete
    std::deque<Unannounced> unannounced;
    std::deque<uint32_t> in_flight; // slots, or what is instead, of segments not acknowledged
    uint64_t sent_sequence = 0;
    uint64_t acked_sequence = 0;
    std::map<unsigned, Sending> sending;      // by the peer's ring
    unsigned under_way = 0;                   // operations below that have not ended
    LowerOperation *last_straight = nullptr;  // the one that was posted last, while it is under way
    uct_completion_t *canceled = nullptr;     // of a flush that waits for those
    std::unique_ptr<Bypass> bypass[2];        // by Kind
    std::unique_ptr<GpuBypass> gpu_bypass[2]; // likewise
    size_t bytes_under_way[2] = {};           // by Kind, of operations that a GPU takes part in
    std::deque<Flush> flushes;
    std::deque<uct_pending_req_t *> pending;
    bool dispatching = false; // one of those is being tried

    // ---- receiver
    // What it lends of one of this process's rings.
    struct Lending {
        uint32_t wanted = 0; // slots the peer asked for and has not got
        std::vector<uint32_t> to_grant;
        bool in_waiting = false;
        bool recall_due = false;
        bool recall_sent = false;
        std::chrono::steady_clock::time_point recalled_at;
    };
    uint64_t received_sequence = 0; // of what arrived
    uint64_t decoded_sequence = 0;  // all up to this one are decoded
    std::deque<Arrival> arrivals;
    unsigned decoding = 0;               // of them, by a GPU
    std::vector<uint32_t> lent;          // slots that the peer may write
    std::vector<uint32_t> to_ack;        // slots to lend again with the next acknowledgement
    std::map<unsigned, Lending> lending; // by ring
    bool ack_due = false;
    wire::ProcessId peer_process = {};
    bool peer_gone = false;
    bool bye_due = false;

    unsigned progress();
    bool has_work() const;
    bool waits_for_gpu() const; // which makes no event

    ucs_status_t post(Kind kind, const uct_iov_t *iov, size_t count, uint64_t address, Rkey *rkey,
                      uct_completion_t *completion);
    ucs_status_t flush(unsigned flags, uct_completion_t *completion);
    void fence();
    bool can_accept() const;
    bool is_idle() const { return failed != UCS_OK || (completed == posted && pending.empty()); }

    size_t &under_way_bytes(Kind kind) { return bytes_under_way[static_cast<size_t>(kind)]; }
    size_t under_way_bytes(Kind kind) const { return bytes_under_way[static_cast<size_t>(kind)]; }

    // An operation below has ended.
    void lower_operation_ended(LowerOperation &ended, ucs_status_t status);

    // Ends all operations with `status`; with `report`, tells UCP.
    void fail(ucs_status_t status, bool report);

    void handle(wire::MessageType type, const char *data, size_t length);

    // Lends slots of a ring to the peer as far as there are any; the rest has to wait.
    void grant_wanted(unsigned ring);
    // Slots of a ring that the peer may write, or will be told so.
    size_t slots_held(unsigned ring) const;

private:
    unsigned send();
    unsigned control();
    unsigned dispatch_pending();
    // What is to be made into pieces next.
    struct Source {
        zip_coding_t coding;
        const char *data;
        size_t left;              // bytes
        int from;                 // ring of its memory here
        unsigned to;              // the peer's ring
        uint64_t region, address; // of the peer
        Tracked *owner;           // NULL: the first answer
        Region *pinned;           // of an answer, that a GPU reads
        // when its first coded piece was wanted, if that is timed
        std::chrono::steady_clock::time_point since = {};
    };
    size_t slots_wanted(unsigned ring) const;
    void know_rings_wanted();
    size_t pieces_room() const;
    bool can_advance() const;
    bool can_start(const Operation &operation) const;
    bool can_go_straight(const Operation &operation);
    bool choose_way(Operation &operation);
    bool choose_coding(const char *data, size_t length, const Region *of, zip_coding_t &coding,
                       float &ratio);
    Side *side_for(int from);
    void fail_gpu(const GpuQueue &queue);
    ucs_status_t prepare();
    ucs_status_t prepare_put();
    ucs_status_t prepare_answer();
    ucs_status_t make_pieces(const Source &source);
    ucs_status_t make_plain(Tracked &put, size_t length);
    ucs_status_t make_plain(Answer &answer, size_t length);
    ucs_status_t make_inline(const Source &source);
    Piece new_piece(const Source &source, size_t offset, size_t length) const;
    Piece new_plain_piece(const Source &source) const;
    ucs_status_t encode_on_host(const Source &source, Sending &to, Side &side, size_t length);
    ucs_status_t encode_on_gpu(const Source &source, Sending &to, Side &side, size_t length);
    char *output_for(const Source &source, Sending &to, Side &side, Piece &piece);
    void drop_piece(Piece &piece);
    void made(const Source &source, size_t length);
    size_t piece_length(const Source &source, const Sending &to, const Side &side) const;
    bool had_wire(const Operation &operation) const;
    void learn_decoder(const Tracked &operation);
    void plan_ends(Operation &put);
    void plan_ends(Answer &answer, const Region &source);
    GpuBypass &gpu_bypass_for(Kind kind);
    bool poll_encoder();
    ucs_status_t post_piece();
    template <class Post>
    ucs_status_t give_below(uct_completion_t *completion, const Post &post);
    ucs_status_t put_encoded(Piece &piece, size_t end);
    ucs_status_t put_plain(Piece &piece);
    ucs_status_t put_plain_answer(Piece &piece);
    ucs_status_t put_straight(const Operation &operation, const char *local, size_t length,
                              uint64_t address, size_t &done, LowerOperation *under);
    ucs_status_t announce(wire::Segment &message, Part inline_data);
    unsigned announce_flushed();
    Tracked *piece_sent();
    ucs_status_t ask_for_get(Operation &operation, Tracked *entry);
    bool wants_ends(const Operation &get) const;
    ucs_status_t go_straight(Operation &operation, Tracked *entry);
    Tracked &track(const Operation &operation);
    void unmeasure(Operation &operation);
    void end(Tracked &operation);
    void end_acknowledged();
    void retire();
    void launch_decodes();
    unsigned finish_arrivals();
    void received_for_get(Tracked &get, const wire::Segment &segment);
    Remembered *remembered_of(const Operation &get);
    void remember(const Operation &get, float ratio);

    void on_request(const char *data, size_t length);
    void on_grant(const char *data, size_t length);
    void on_segment(const char *data, size_t length);
    void on_ack(const char *data, size_t length);
    void on_recall(const char *data, size_t length);
    void on_return(const char *data, size_t length);
    void on_refuse(const char *data, size_t length);
    void on_get(const char *data, size_t length);
    void on_decline(const char *data, size_t length);
    void on_bye();
    void leave_queues();
    void cancel_lower();
    void drop_arrival(Arrival &arrival);
    void return_unlent_slots();
    bool take_credits(const wire::Slots &slots);
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

// Learns how long before the end of a transfer its plain tail is to begin.
void learn_tail(double &seconds, double late);

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
