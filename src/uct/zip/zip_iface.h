// SPDX-License-Identifier: BSD-3-Clause
// The interface: owns the interface below, the staging memory, and the endpoints.
#ifndef ZIP_IFACE_H
#define ZIP_IFACE_H

#include "kernels/codec.h"
#include "uct/zip/zip_bypass.h"
#include "uct/zip/zip_staging.h"

#include <chrono>
#include <deque>
#include <list>
#include <memory>
#include <unordered_map>
#include <vector>

namespace zip {

struct Tracked;
struct Unannounced;

extern ucx::Tl tl; // the one of this plugin

struct IfaceOptions { // as UCX's parser fills it from iface_options_table
    ucx::IfaceConfig super;
    size_t segment_size;
    size_t host_staging_size;
    size_t gpu_segment_size;
    size_t staging_size;
    unsigned max_sms;
    unsigned strategy;
    size_t min_size;
    unsigned dtype; // index of dtype_option_names and dtype_choices
    unsigned connect;
    unsigned order;
    double bandwidth_ratio;
};
extern ucs_config_field_t iface_options_table[];

enum class ConnectOption : unsigned { AUTO, IFACE, EP };
enum class OrderOption : unsigned { AUTO, FLUSH };
// How puts of GPU memory are sent, in the order of their names in strategy_option_names.
enum class Strategy : unsigned {
    ENDS,       // STREAMING, with the first and the last bytes plain where that is possible
    STREAMING,  // every piece is sent as soon as it is encoded
    SPLIT_SEND, // what does not depend on the values goes as soon as it is there, the tails last
    CHUNKED,    // a piece is encoded when the one before it is sent
    ENCODE_THEN_SEND, // all that staging holds is encoded before any of it is sent
    PLAIN             // nothing is encoded
};

// What an interface has done, logged when it closes.
struct Counters {
    uint64_t puts = 0;
    uint64_t put_bytes = 0; // of the application
    uint64_t gets = 0;
    uint64_t get_bytes = 0;
    uint64_t straight_bytes =
            0;               // of both, that went uncompressed between the applications' buffers
    uint64_t wire_bytes = 0; // of segments, encoded, without control messages
    uint64_t segments = 0;
    uint64_t stored_segments = 0; // segments that went uncompressed
    uint64_t received_segments = 0;
    uint64_t received_bytes = 0;   // after decoding
    uint64_t refused_segments = 0; // by this receiver
};

// A buffer that one segment is encoded into; free again when the puts that read it are complete.
struct TxBuffer {
    uct_completion_t completion;
    struct TxPool *pool;
    uint32_t slot;
    uct_ep_h user; // the endpoint below that reads it, NULL when free
    ucs_status_t status;
};

struct TxPool {
    std::unique_ptr<SlotPool> slots;
    std::vector<std::unique_ptr<TxBuffer>> buffers;
};

struct Ep;

// Where chunks begin in a slot of a ring, and in a buffer to send from.
constexpr size_t chunk_offset(unsigned ring)
{
    return ring > 0 ? ZIP_GPU_CHUNK_PHASE : 0;
}

// What an interface has for one kind of memory: the host's, or one GPU's. Its number is that of the
// ring (zip_wire.h).
struct Side {
    Gpu *gpu = nullptr; // NULL: the host
    size_t slot_size = 0;
    uint32_t ring_slots = 0, tx_slots = 0;
    size_t reserved = 0; // of the GPU's staging memory

    std::unique_ptr<SlotPool> ring; // peers write here; allocated when the first one asks
    std::deque<Ep *> waiting;       // endpoints whose peers want slots, and there are none
    // Where stored chunks in a ring of host memory are copied to before a GPU takes them, slot by
    // slot: a copy engine crosses PCIe twice as fast as the kernel for them (doc/performance.md).
    // NULL: that reads the ring.
    std::unique_ptr<GpuMemory> arrived;
    TxPool tx; // segments are encoded here, unless the peer's ring is mapped
    std::unique_ptr<GpuQueue> encoder, decoder;
    std::vector<zip_gpu_item_t> items; // of the launch that is being made
    std::vector<GpuQueue::Ticket> tickets;

    ~Side();
};

// The endpoint below of a destroyed endpoint, kept until its farewell has left this process.
struct Departing {
    uct_ep_h lower;
    uint64_t peer_id; // 0: nothing to say
    bool dead;        // the connection is broken: nothing to wait for
    bool flushing;
    uct_completion_t flushed;
    std::vector<uint32_t> slots; // free again when the connection is closed
};

// Slots lent to the peer of an endpoint that is gone here, which that peer may still write: not
// used again until it says that it is gone too or, where it maps the ring, its process has ended,
// or, where not even that can be known, for ORPHAN_AGE.
struct Orphan {
    std::vector<uint32_t> slots;
    std::chrono::steady_clock::time_point since;
    wire::ProcessId process;
};
constexpr std::chrono::seconds ORPHAN_AGE(60);

struct Iface;

// An operation of the transport below that an endpoint waits for: the pieces of an operation that
// goes straight, or a flush. Lives until the transport below is done with it, whatever becomes of
// the endpoint.
struct LowerOperation {
    uct_completion_t completion; // one more than what was posted, until all is
    Iface *iface;
    Ep *ep; // NULL when that is gone
    uct_ep_h lower;
    uct_completion_t *user;                   // of the application, or NULL
    Tracked *tracked;                         // it is done with this, or NULL
    Unannounced *segment;                     // that may be announced with this, or NULL
    std::list<LowerOperation>::iterator self; // where the interface keeps it
};

struct AmArg {
    Iface *iface;
    wire::MessageType type;
};

struct Iface {
    ucx::BaseIface super; // must be first: UCX sees only this
    Md *md = nullptr;
    IfaceOptions options = {};
    uct_worker_h worker = nullptr;
    uct_iface_h lower = nullptr;
    uct_iface_attr_t lower_attr = {};
    bool lower_connects_to_ep = false;
    bool puts_are_ordered = false; // below: a message comes after the puts before it
    size_t inline_max = 0;         // bytes of a segment that fit a message
    size_t segment_size = 0;       // of host memory
    size_t gpu_segment_size = 0;
    uint32_t pcie_sms = 0; // for kernels that write or read the host's memory; 0: all

    uct_worker_cb_id_t progress_id = 0;
    bool progress_registered = false;
    std::deque<Ep *> active; // endpoints with work for progress, each once
    std::unordered_map<uint64_t, Ep *> eps;
    std::unordered_map<uct_ep_h, Ep *> eps_by_lower;

    std::vector<std::unique_ptr<Side>> sides;     // by ring
    std::unordered_map<uint64_t, Orphan> orphans; // by endpoint id
    std::deque<std::unique_ptr<Departing>> departing;
    std::list<LowerOperation> lower_operations;
    AmArg am_args[wire::MESSAGE_TYPE_LAST];
    Counters counters;
    // What probes of GPU memory found, by its address, and by its region's id.
    struct Known {
        zip_coding_t coding;
        float ratio;
        unsigned uses;
    };
    std::unordered_map<uint64_t, Known> known;

    // Runs everything that waits. Returns how much was done.
    unsigned progress();
    // Has progress() call ep->progress().
    void activate(Ep *ep);
    // Forgets an endpoint that is being destroyed, and takes care of what its peer may still do.
    void remove(Ep *ep);
    // Enables progress below; UCX itself does so only for interfaces that it knows to be in use.
    void start_progress();

    // What there is for a ring number of this process; NULL: no GPU has that number, or there is no
    // staging memory for it.
    Side *side(unsigned ring);
    // A side's ring, or NULL if it cannot be allocated.
    SlotPool *receive_ring(Side &of);
    // Gives a free slot to whom it is due: an endpoint that waits, or its ring.
    void release_slot(uint32_t slot);
    // Asks every endpoint that holds slots of a ring to give back those it does not use.
    void recall_slots(unsigned ring);

    // A side's buffers, or NULL if they cannot be allocated.
    SlotPool *send_buffers(Side &of);
    // After send_buffers(): a buffer for the endpoint below `user`, or NULL if it has to wait for
    // one.
    TxBuffer *take_tx_buffer(Side &of, uct_ep_h user);
    // Multiprocessors for kernels that read or write staging memory there.
    uint32_t sms_for(bool staging_on_gpu) const;
    void free_tx_buffers_of(uct_ep_h user);

    // A completion for the transport below, with one operation already counted.
    LowerOperation *begin_lower_operation(Ep *ep);
    // Nothing was posted with it.
    void forget_lower_operation(LowerOperation *operation);
    // Has the operations of a failed endpoint touch nothing of it but the count of them.
    void detach_lower_operations(Ep *ep);

    // Bytes a second that UCX believes of the transport below.
    double lower_bandwidth() const;

    Strategy strategy() const { return static_cast<Strategy>(options.strategy); }

    // The codec's type for `length` bytes if no look at them is needed, and what of their length to
    // expect. False: it is.
    bool given_coding(size_t length, zip_coding_t &coding, float &ratio) const;
    // The same of bytes at `data` in a GPU's region, if they or others of the region were probed.
    bool remembered_coding(const void *data, const Region *of, zip_coding_t &coding, float &ratio);
    void remember_coding(const void *data, const Region *of, zip_coding_t coding, float ratio);
    void forget_coding(const void *data, uint64_t region_id);
    // The same for bytes at `data`, in host memory.
    zip_coding_t choose_coding(const void *data, size_t length, float &ratio) const;

    // Takes over an endpoint below: says goodbye to `peer_id` unless `dead`, and destroys it from
    // progress. Then `slots` are free.
    void depart(uct_ep_h lower_ep, uint64_t peer_id, bool dead, std::vector<uint32_t> slots);

    // Destroys an endpoint below, and ends what it has not.
    void close_lower(uct_ep_h lower_ep);

private:
    bool progress_departing(Departing &departing_ep);
    void reclaim_slots();
    bool may_still_write(const Orphan &orphan) const;
    std::chrono::steady_clock::time_point reclaimed_at;
};

inline Iface *iface_of(uct_iface_h iface)
{
    return reinterpret_cast<Iface *>(iface);
}

// Bytes a second that this processor encodes or decodes, whichever is slower. Measured once.
double codec_speed();

// Fills the transport's operations. After init_component() and before registration.
void init_tl();

} // namespace zip

#endif
