// SPDX-License-Identifier: BSD-3-Clause
// Interfaces: opening the transport below, selection attributes, staging, and progress.
#include "uct/zip/zip_iface.h"

#include "uct/zip/zip_ep.h"
#include "uct/zip/zip_message.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <new>
#include <utility>

namespace zip {

ucx::Tl tl;
static uct_iface_ops_t iface_ops;
static ucx::InternalOps internal_ops;

static const char *dtype_option_names[] = {"auto", "bf16", "fp32", "fp16", "fp64",
                                           "e4m3", "e5m2", "none", nullptr};
// What they stand for, and the ratio of normally distributed values.
struct DtypeChoice {
    zip_dtype_t dtype;
    float ratio;
};
constexpr DtypeChoice dtype_choices[] = {
        {ZIP_DTYPE_AUTO, 1},     {ZIP_DTYPE_BF16, 0.67f}, {ZIP_DTYPE_FP32, 0.84f},
        {ZIP_DTYPE_FP16, 0.86f}, {ZIP_DTYPE_FP64, 0.88f}, {ZIP_DTYPE_E4M3, 0.84f},
        {ZIP_DTYPE_E5M2, 0.71f}, {ZIP_DTYPE_BYTES, 1},
};
static_assert(std::size(dtype_choices) + 1 == std::size(dtype_option_names));
static const char *connect_option_names[] = {"auto", "iface", "ep", nullptr};
static const char *order_option_names[] = {"auto", "flush", nullptr};
static const char *strategy_option_names[] = {
        "auto", "streaming", "split-send", "chunked", "encode-then-send", "plain", nullptr};

ucs_config_field_t iface_options_table[] = {
        {"", "", nullptr, offsetof(IfaceOptions, super),
         UCS_CONFIG_TYPE_TABLE(nullptr)}, // init_tl()

        {"SEG_SIZE", "128k",
         "Bytes of a message in host memory that are encoded, sent and decoded as one piece.",
         offsetof(IfaceOptions, segment_size), UCS_CONFIG_TYPE_MEMUNITS},

        {"HOST_STAGING_SIZE", "32m",
         "Staging memory of one interface for data in host memory, for both directions together. "
         "Taken when the first\n"
         "peer sends.",
         offsetof(IfaceOptions, host_staging_size), UCS_CONFIG_TYPE_MEMUNITS},

        {"GPU_SEG_SIZE", "auto",
         "Bytes of a message in GPU memory that are sent and decoded as one piece, at most; auto: "
         "1m to 8m, by the\n"
         "bandwidth below.",
         offsetof(IfaceOptions, gpu_segment_size), UCS_CONFIG_TYPE_MEMUNITS},

        {"STAGING_SIZE", "156m",
         "Staging memory of all interfaces of a process together for data of one GPU, for both "
         "directions. It is the\n"
         "GPU's own where the transport below takes that, otherwise pinned memory of the host. An "
         "interface takes three\n"
         "quarters of what is left when its first peer sends. At least 16m.",
         offsetof(IfaceOptions, staging_size), UCS_CONFIG_TYPE_MEMUNITS},

        {"MAX_SMS", "0",
         "Multiprocessors of a GPU that encoding and decoding may use; 0: all, but 16 for kernels "
         "that reach across PCIe.",
         offsetof(IfaceOptions, max_sms), UCS_CONFIG_TYPE_UINT},

        {"STRATEGY", "auto",
         "How GPU memory is sent: auto (every piece as soon as it is encoded, and plain what would "
         "leave the wire idle\n"
         "before the first and after the last one), or, to compare with: streaming (without plain "
         "ends), split-send (what\n"
         "is not entropy coded first), chunked (a piece is encoded when the one before it is "
         "sent), "
         "encode-then-send, plain.",
         offsetof(IfaceOptions, strategy), UCS_CONFIG_TYPE_ENUM(strategy_option_names)},

        {"MIN_SIZE", "32k",
         "Messages shorter than this are left to the transport below, and puts that UCP sends "
         "through zip all the\n"
         "same are not compressed.",
         offsetof(IfaceOptions, min_size), UCS_CONFIG_TYPE_MEMUNITS},

        {"DTYPE", "auto",
         "Element type of the data: bf16, fp32, fp16, fp64, e4m3, e5m2, none (send as it is), or "
         "auto (looked for in\n"
         "every message).\n"
         "A wrong type costs ratio, never correctness.",
         offsetof(IfaceOptions, dtype), UCS_CONFIG_TYPE_ENUM(dtype_option_names)},

        {"CONNECT", "auto",
         "How endpoints of the transport below are connected, where it knows both ways: to an "
         "interface, to an\n"
         "endpoint, or auto, which prefers an endpoint.",
         offsetof(IfaceOptions, connect), UCS_CONFIG_TYPE_ENUM(connect_option_names)},

        {"ORDER", "auto",
         "How the peer comes to know that a segment has arrived: auto (a message behind it, where "
         "the transport below\n"
         "keeps puts and messages in order), or flush (a message when the segment is known to be "
         "there).",
         offsetof(IfaceOptions, order), UCS_CONFIG_TYPE_ENUM(order_option_names)},

        {"BW_RATIO", "5",
         "Bandwidth that selection is told for GPU memory, as a multiple of that of the transport "
         "below. Above 4 large\n"
         "messages go through zip alone, not striped raw over the lane beside it.",
         offsetof(IfaceOptions, bandwidth_ratio), UCS_CONFIG_TYPE_DOUBLE},

        {nullptr, nullptr, nullptr, 0, {}}};

namespace {

// Host memory has no lane of the transport below beside zip's on a device: the truth will do.
constexpr double HOST_RATIO = 1.5;
// Without gets below, the sender's protocol of a blocking send (UCP's "fast completion") is
// compared with copies that are priced without any wire, at a speed that is the processor's. The
// overhead then says all that is said of the wire; between several devices the ratio stays right.
constexpr double BLOCKING_RATIO = 5000;
constexpr double DROPPED_RATIO = 1e-3; // so slow that UCP does not even use it beside others
// Bytes a second that UCX believes of copies to and from GPUs. On slower wires it sends GPU memory
// eagerly as long as that has fewer messages; on faster ones never.
constexpr double COPY_BANDWIDTH = 8.3e9;
constexpr double LOSING_RATIO = 0.9; // of the bandwidth below, to be the second best
constexpr size_t MIN_SLOTS = 8;      // of an interface's staging memory, both directions
constexpr size_t SLOT_ALIGNMENT = 4096;
constexpr size_t MIN_SEGMENT_SIZE = 4096;
constexpr size_t MAX_SEGMENT_SIZE = size_t(1) << 30;
constexpr size_t MIN_RING_SLOTS = 4;
constexpr size_t MEMUNITS_AUTO = SIZE_MAX - 1; // what UCX's parser makes of "auto"
constexpr size_t MIN_GPU_SEGMENT = size_t(1) << 20, MAX_GPU_SEGMENT = size_t(8) << 20;
constexpr double GPU_SEGMENT_SECONDS = 30e-6;
constexpr size_t MIN_STAGING = size_t(16) << 20;
constexpr size_t QUEUE_BYTES = size_t(1) << 20; // of GPU memory that an interface's queues take
constexpr uint32_t PCIE_SMS = 16;
constexpr size_t MAX_PROBED = 1024;       // buffers and regions
constexpr unsigned PROBE_USES = 64;       // of what a probe found, before the next one
constexpr size_t MIN_MESSAGE_SIZE = 1024; // of the transport below, for the largest control message
constexpr size_t MAX_INLINE = 4096;
constexpr std::chrono::milliseconds RECLAIM_INTERVAL(100);
constexpr std::chrono::seconds RECALL_LIMIT(30);
constexpr unsigned DEPART_ROUNDS = 1000; // of progress below when an interface closes

ucs_status_t on_message(void *arg, void *data, size_t length, unsigned)
{
    const auto *am = static_cast<const AmArg *>(arg);
    wire::Header header;
    if (!wire::read(data, length, header)) {
        zip_debug("zip: a message of %zu bytes is too short to be one", length);
        return UCS_OK;
    }
    Iface *iface = am->iface;
    auto found = iface->eps.find(header.to);
    if (found != iface->eps.end()) {
        found->second->handle(am->type, static_cast<const char *>(data), length);
        return UCS_OK;
    }
    auto orphan = iface->orphans.find(header.to);
    if (orphan != iface->orphans.end() && am->type == wire::BYE) {
        const std::vector<uint32_t> slots = std::move(orphan->second.slots);
        iface->orphans.erase(orphan);
        for (uint32_t slot : slots) {
            iface->release_slot(slot);
        }
    }
    return UCS_OK; // for an endpoint that is gone
}

ucs_status_t on_lower_error(void *arg, uct_ep_h lower_ep, ucs_status_t status)
{
    Iface *iface = static_cast<Iface *>(arg);
    auto found = iface->eps_by_lower.find(lower_ep);
    if (found != iface->eps_by_lower.end()) {
        found->second->lower_failed = true;
        found->second->fail(status, true);
        return UCS_OK;
    }
    for (auto &departing : iface->departing) {
        departing->dead |= departing->lower == lower_ep;
    }
    return UCS_OK;
}

void on_lower_operation(uct_completion_t *completion)
{
    auto *ended = ZIP_CONTAINER_OF(completion, LowerOperation, completion);
    const ucs_status_t status = completion->status;
    if (ended->ep != nullptr) {
        ended->ep->lower_operation_ended(*ended, status);
    } else {
        complete(ended->user, status);
    }
    ended->iface->forget_lower_operation(ended);
}

void on_put_done(uct_completion_t *completion)
{
    auto *buffer = ZIP_CONTAINER_OF(completion, TxBuffer, completion);
    buffer->user = nullptr;
    buffer->pool->slots->give_back(buffer->slot);
}

unsigned progress_callback(void *arg)
{
    return static_cast<Iface *>(arg)->progress();
}

// ---- attributes

// Protocol selection weighs overheads against length / bandwidth, and the bandwidths it is told may
// be far from the truth. This overhead makes zip dearer than the transport below for what is
// shorter than `size`, whatever those are.
double priced_overhead(const Iface *iface, double told_ratio, size_t size)
{
    const double below = iface->lower_bandwidth();
    const double gain = 1 - 1 / told_ratio;
    return below > 0 && gain > 0 ? static_cast<double>(size) * gain / below : 0;
}

// From which size on the operations of this memory type are worth zip's while.
size_t least_size(const Iface *iface, bool host, int operation)
{
    if (!host && iface->md->bypass == BypassOption::NEVER) {
        return iface->options.min_size;
    }
    // A GPU's encoder and decoder take as long to start and to end as the wire needs for this.
    // The faster a wire, the more of it a card takes for itself: seen over an emulated card, with
    // messages one after the other (doc/performance.md). Over shared memory UCX copies through
    // pinned fragments faster than it believes: zip gains from 20 MiB on.
    const double below = iface->lower_bandwidth();
    const double gpu_seconds = iface->md->lower_rkey_ptr ? 2.9e-3
                               : below < 30e9            ? 100e-6
                               : below < 120e9           ? 160e-6
                                                         : 450e-6;
    // The processor's, and the messages before and after, for this. Seen over an emulated card on
    // 16 cores: 128 KiB lost 7% at 1 GB/s, and 256 KiB at 2 GB/s. Over tcp the alternative is
    // slower, and what UCX believes of the wire is often more than that is.
    constexpr double RDMA_SECONDS = 128e-6, HOST_SECONDS = 32e-6, SEVERAL_PATHS = 2.6;
    const bool rdma = (iface->lower_attr.cap.flags & UCT_IFACE_FLAG_GET_ZCOPY) != 0;
    const double seconds = !host ? gpu_seconds : rdma ? RDMA_SECONDS : HOST_SECONDS;
    const size_t size = std::max(iface->options.min_size, static_cast<size_t>(below * seconds));
    // UCX adds up the paths that it reads over, and takes zip's puts from more than twice the size
    // on that they are priced for.
    if (!host && operation == ucx::EP_OP_PUT_ZCOPY && iface->lower_attr.dev_num_paths > 1) {
        return static_cast<size_t>(static_cast<double>(size) / SEVERAL_PATHS);
    }
    // Rendezvous can put or get. A get has one message less on its way, but where the transport
    // below has none it cannot go straight: then gets are made dearer than what else a put takes.
    return operation == ucx::EP_OP_GET_ZCOPY && !rdma ? size * 4 : size;
}

// Whether host memory is not worth compressing here: a wire faster than the processor encodes and
// decodes would only be slowed down.
bool is_too_fast(const Iface *iface)
{
    return iface->md->bypass == BypassOption::AUTO && iface->lower_bandwidth() > codec_speed();
}

ucs_status_t iface_query(uct_iface_h iface_handle, uct_iface_attr_t *attr)
{
    const Iface *iface = iface_of(iface_handle);
    const uct_iface_attr_t &lower = iface->lower_attr;
    uct_base_iface_query(&iface_of(iface_handle)->super, attr);

    attr->device_addr_len = lower.device_addr_len;
    attr->iface_addr_len = sizeof(wire::IfaceAddress) + lower.iface_addr_len;
    attr->ep_addr_len = sizeof(wire::EpAddress) +
                        (iface->lower_connects_to_ep ? lower.ep_addr_len : lower.iface_addr_len);
    // No active messages: UCP then sends its completion message only after a flush, which here
    // means decoded.
    attr->cap.flags =
            UCT_IFACE_FLAG_PUT_ZCOPY | UCT_IFACE_FLAG_GET_ZCOPY | UCT_IFACE_FLAG_PENDING |
            UCT_IFACE_FLAG_CB_SYNC | UCT_IFACE_FLAG_CONNECT_TO_EP |
            (lower.cap.flags & (UCT_IFACE_FLAG_INTER_NODE | UCT_IFACE_FLAG_ERRHANDLE_PEER_FAILURE));
    attr->cap.event_flags =
            lower.cap.event_flags &
            (UCT_IFACE_FLAG_EVENT_SEND_COMP | UCT_IFACE_FLAG_EVENT_RECV | UCT_IFACE_FLAG_EVENT_FD);
    // What cannot be coded has to be long enough for the transport below.
    const bool host_only = iface->md->mem_types == UCS_BIT(UCS_MEMORY_TYPE_HOST);
    attr->cap.put.min_zcopy = host_only ? 0 : lower.cap.put.min_zcopy;
    attr->cap.put.max_zcopy = SIZE_MAX;
    attr->cap.put.opt_zcopy_align = 1;
    attr->cap.put.align_mtu = 1;
    attr->cap.put.max_iov = 1;
    attr->cap.get.min_zcopy = host_only ? 0 : lower.cap.get.min_zcopy;
    attr->cap.get.max_zcopy = attr->cap.put.max_zcopy;
    attr->cap.get.opt_zcopy_align = attr->cap.put.opt_zcopy_align;
    attr->cap.get.align_mtu = attr->cap.put.align_mtu;
    attr->cap.get.max_iov = attr->cap.put.max_iov;
    // Lanes are chosen by bandwidth, and on a device only the best one: where zip would only pass
    // on, the transport below had better be that.
    const double told =
            host_only && is_too_fast(iface) ? LOSING_RATIO : iface->options.bandwidth_ratio;
    attr->bandwidth.shared = lower.bandwidth.shared * told;
    attr->bandwidth.dedicated = lower.bandwidth.dedicated * told;
    attr->latency = lower.latency;
    attr->overhead =
            priced_overhead(iface, iface->options.bandwidth_ratio, iface->options.min_size);
    attr->priority = lower.priority;
    attr->max_num_eps = lower.max_num_eps;
    attr->dev_num_paths = 1;
    return UCS_OK;
}

// Whether operations on host memory can go straight: then zip is never worse than what is below.
bool can_bypass(const Iface *iface, int operation)
{
    const uint64_t flag =
            operation == ucx::EP_OP_PUT_ZCOPY ? UCT_IFACE_FLAG_PUT_ZCOPY : UCT_IFACE_FLAG_GET_ZCOPY;
    return iface->md->bypass != BypassOption::NEVER && !iface->md->lower_rkey_ptr &&
           (iface->lower_attr.cap.flags & flag) != 0;
}

void scale(ucx::PerfAttr *attr, double factor)
{
    if ((attr->field_mask & ucx::PerfAttr::BANDWIDTH) != 0) {
        attr->bandwidth.shared *= factor;
        attr->bandwidth.dedicated *= factor;
    }
    if ((attr->field_mask & ucx::PerfAttr::PATH_BANDWIDTH) != 0) {
        attr->path_bandwidth.shared *= factor;
        attr->path_bandwidth.dedicated *= factor;
    }
}

// Whether GPU memory can be read straight: then rendezvous is a get, and keys say which messages
// are worth zip's while.
bool reads_gpu(const Iface *iface)
{
    return !iface->md->lower_rkey_ptr && iface->md->lower_takes_gpu() &&
           (iface->lower_attr.cap.flags & UCT_IFACE_FLAG_GET_ZCOPY) != 0;
}

ucs_status_t estimate_perf(uct_iface_h iface_handle, ucx::PerfAttr *attr)
{
    const Iface *iface = iface_of(iface_handle);
    const bool names_operation =
            (attr->field_mask & ucx::PerfAttr::OPERATION) != 0 &&
            (attr->operation == ucx::EP_OP_PUT_ZCOPY || attr->operation == ucx::EP_OP_GET_ZCOPY);
    const bool names_types = (attr->field_mask & ucx::PerfAttr::LOCAL_MEMORY_TYPE) != 0 &&
                             (attr->field_mask & ucx::PerfAttr::REMOTE_MEMORY_TYPE) != 0;
    if (!names_operation || !names_types) {
        return uct_base_iface_estimate_perf(iface_handle, attr);
    }
    const uint64_t types = UCS_BIT(attr->local_memory_type) | UCS_BIT(attr->remote_memory_type);
    const bool host = types == UCS_BIT(UCS_MEMORY_TYPE_HOST);
    const bool stays_out = host && is_too_fast(iface);
    const bool served = (types & ~iface->md->mem_types) == 0;
    const bool serves_gpu = (iface->md->mem_types & ~UCS_BIT(UCS_MEMORY_TYPE_HOST)) != 0;
    if ((!served && !serves_gpu) || (stays_out && !can_bypass(iface, attr->operation))) {
        return UCS_ERR_UNSUPPORTED;
    }
    const ucs_status_t status = uct_iface_estimate_perf(iface->lower, attr);
    if (status != UCS_OK || stays_out) {
        return status;
    }
    // UCP makes one protocol of all lanes that can get, and another of those that can put, drops
    // what is much slower than the best one, and gives up the protocol if a lane fails. So zip is
    // dropped from what it does not serve, and from gets of GPU memory where those cannot go
    // straight, so that a rendezvous is a put.
    const bool gets_gpu = !host && attr->operation == ucx::EP_OP_GET_ZCOPY;
    const bool reads = gets_gpu && reads_gpu(iface);
    if (!served || (gets_gpu && !reads)) {
        scale(attr, DROPPED_RATIO);
        return UCS_OK;
    }
    double told = iface->options.bandwidth_ratio;
    if (host && (iface->lower_attr.cap.flags & UCT_IFACE_FLAG_GET_ZCOPY) != 0) {
        told = std::min(HOST_RATIO, told);
    } else if (host) {
        told = std::max(BLOCKING_RATIO, told);
    }
    scale(attr, told);
    // Which messages are read through zip their keys say: on a wire on which UCX sends nothing
    // eagerly no size has to be priced.
    attr->send_pre_overhead =
            reads && iface->lower_bandwidth() > COPY_BANDWIDTH
                    ? 0
                    : priced_overhead(iface, told, least_size(iface, host, attr->operation));
    attr->send_post_overhead = attr->recv_overhead = 0; // that is all of it
    return status;
}

ucs_status_t get_device_address(uct_iface_h iface, uct_device_addr_t *address)
{
    return uct_iface_get_device_address(iface_of(iface)->lower, address);
}

wire::IfaceAddress own_address(const Iface *iface)
{
    return {{},
            wire::transport_id(iface->md->transport.c_str()),
            iface->lower_connects_to_ep,
            static_cast<uint8_t>(iface->lower_attr.iface_addr_len)};
}

ucs_status_t get_address(uct_iface_h iface_handle, uct_iface_addr_t *address)
{
    const Iface *iface = iface_of(iface_handle);
    const wire::IfaceAddress head = own_address(iface);
    memcpy(address, &head, sizeof(head));
    return uct_iface_get_address(
            iface->lower,
            reinterpret_cast<uct_iface_addr_t *>(reinterpret_cast<char *>(address) + sizeof(head)));
}

// Tells UCP's log why a peer cannot be reached.
int unreachable(const ucx::ReachableParams *params, const char *why)
{
    const uint64_t info =
            ucx::ReachableParams::INFO_STRING | ucx::ReachableParams::INFO_STRING_LENGTH;
    if ((params->field_mask & info) == info && params->info_string_length > 0) {
        snprintf(params->info_string, params->info_string_length, "%s", why);
    }
    return 0;
}

int is_reachable(uct_iface_h iface_handle, const ucx::ReachableParams *params)
{
    const Iface *iface = iface_of(iface_handle);
    const bool has_length = (params->field_mask & ucx::ReachableParams::IFACE_ADDR_LENGTH) != 0;
    const wire::IfaceAddress own = own_address(iface);
    if ((params->field_mask & ucx::ReachableParams::IFACE_ADDR) == 0 ||
        params->iface_addr == nullptr) {
        return unreachable(params, "no zip address");
    }
    switch (wire::reach(params->iface_addr,
                        has_length ? params->iface_addr_length : sizeof(own) + own.lower_length,
                        own)) {
    case wire::Reach::YES:
        break;
    case wire::Reach::NO_ADDRESS:
        return unreachable(params, "no zip address");
    case wire::Reach::OTHER_VERSION:
        return unreachable(params, "the peer's zip speaks another version");
    case wire::Reach::OTHER_TRANSPORT:
        return unreachable(
                params,
                "the peer's zip is on another transport, see UCX_ZIP_TLS and UCX_ZIP_CONNECT");
    }
    ucx::ReachableParams lower = *params;
    // transports may lack an interface address, and then do not look at this one
    lower.iface_addr = reinterpret_cast<const uct_iface_addr_t *>(
            reinterpret_cast<const char *>(params->iface_addr) + sizeof(own));
    lower.iface_addr_length = own.lower_length;
    return uct_iface_is_reachable_v2(iface->lower, &lower);
}

// ---- progress and events

// UCX disables progress for interfaces that it believes unused; the target of a put is one of them.
void progress_enable(uct_iface_h iface, unsigned)
{
    iface_of(iface)->start_progress();
}
void progress_disable(uct_iface_h, unsigned) {}

unsigned iface_progress(uct_iface_h iface)
{
    return uct_iface_progress(iface_of(iface)->lower) + iface_of(iface)->progress();
}

ucs_status_t event_fd_get(uct_iface_h iface, int *fd_p)
{
    return uct_iface_event_fd_get(iface_of(iface)->lower, fd_p);
}

ucs_status_t event_arm(uct_iface_h iface, unsigned events)
{
    // what waits for room below would be forgotten until the next event, and a GPU makes none
    const auto waits_for_gpu = [](const Ep *ep) { return ep->waits_for_gpu(); };
    if (iface_of(iface)->progress() > 0 ||
        std::any_of(iface_of(iface)->active.begin(), iface_of(iface)->active.end(),
                    waits_for_gpu)) {
        return UCS_ERR_BUSY;
    }
    // Memory below gives no event when a full queue of messages has room again.
    if (iface_of(iface)->md->lower_rkey_ptr &&
        (!iface_of(iface)->active.empty() || !iface_of(iface)->departing.empty())) {
        return UCS_ERR_BUSY;
    }
    const ucs_status_t status = uct_iface_event_arm(iface_of(iface)->lower, events);
    // Not every card makes an event of what came before it was armed.
    return status == UCS_OK && uct_iface_progress(iface_of(iface)->lower) > 0 ? UCS_ERR_BUSY
                                                                              : status;
}

ucs_status_t iface_flush(uct_iface_h iface, unsigned flags, uct_completion_t *completion)
{
    if (completion != nullptr) {
        return UCS_ERR_UNSUPPORTED;
    }
    for (auto &[id, ep] : iface_of(iface)->eps) {
        if (ep->failed == UCS_OK &&
            ep->flush(flags & ~UCT_FLUSH_FLAG_CANCEL, nullptr) == UCS_INPROGRESS) {
            return UCS_INPROGRESS;
        }
    }
    return UCS_OK;
}

// UCP's weak fence fences every interface by itself, and lets what follows take the transport below
// without zip. So it has to wait, as UCP's strong fence does.
ucs_status_t iface_fence(uct_iface_h iface_handle, unsigned)
{
    Iface *iface = iface_of(iface_handle);
    const auto busy = [](const auto &entry) { return !entry.second->is_idle(); };
    while (std::any_of(iface->eps.begin(), iface->eps.end(), busy)) {
        uct_iface_progress(iface->lower);
        iface->progress();
    }
    return UCS_OK;
}

// ---- life

void iface_close(uct_iface_h iface_handle)
{
    Iface *iface = iface_of(iface_handle);
    const Counters &c = iface->counters;
    if (c.puts > 0 || c.gets > 0 || c.segments > 0 || c.received_segments > 0) {
        const RegistrationCounters registered = iface->md->registrations();
        zip_info("zip/%s: sent %lu puts, %lu bytes as %lu in %lu segments (%lu of them "
                 "uncompressed); received %lu bytes in %lu segments, refused %lu; got %lu gets, "
                 "%lu bytes; %lu bytes straight; registered below %lu times, at most %lu bytes",
                 iface->md->transport.c_str(), c.puts, c.put_bytes, c.wire_bytes, c.segments,
                 c.stored_segments, c.received_bytes, c.received_segments, c.refused_segments,
                 c.gets, c.get_bytes, c.straight_bytes, registered.count, registered.peak_bytes);
    }
    if (iface->progress_registered) {
        uct_worker_progress_unregister_safe(iface->worker, &iface->progress_id);
    }
    for (unsigned i = 0; i < DEPART_ROUNDS && !iface->departing.empty(); ++i) {
        iface->progress();
        uct_iface_progress(iface->lower);
    }
    for (auto &departing : iface->departing) {
        iface->close_lower(departing->lower);
    }
    iface->departing.clear();
    if (iface->lower != nullptr) {
        uct_iface_close(iface->lower);
    }
    iface->sides.clear();
    ucs_class_call_cleanup_chain(ucx::uct_base_iface_t_class_p, iface, -1);
    delete iface;
}

// Opens the interface below on the same device, private to this one, and checks that it has what is
// needed.
ucs_status_t open_lower(Iface *iface, const uct_iface_params_t *params)
{
    const char *transport = iface->md->transport.c_str();
    uct_iface_config_t *config;
    ucs_status_t status =
            uct_md_iface_config_read(iface->md->lower, transport, nullptr, nullptr, &config);
    if (status != UCS_OK) {
        return status;
    }
    uct_iface_params_t lower = *params;
    lower.field_mask &= UCT_IFACE_PARAM_FIELD_CPU_MASK | UCT_IFACE_PARAM_FIELD_OPEN_MODE |
                        UCT_IFACE_PARAM_FIELD_DEVICE | UCT_IFACE_PARAM_FIELD_STATS_ROOT |
                        UCT_IFACE_PARAM_FIELD_KEEPALIVE_INTERVAL;
    lower.mode.device.tl_name = transport;
    lower.field_mask |= UCT_IFACE_PARAM_FIELD_ERR_HANDLER | UCT_IFACE_PARAM_FIELD_ERR_HANDLER_ARG |
                        UCT_IFACE_PARAM_FIELD_ERR_HANDLER_FLAGS;
    lower.err_handler = on_lower_error;
    lower.err_handler_arg = iface;
    lower.err_handler_flags = 0;
    status = uct_iface_open(iface->md->lower, iface->worker, &lower, config, &iface->lower);
    uct_config_release(config);
    if (status != UCS_OK) {
        iface->lower = nullptr;
        return status;
    }
    if ((status = uct_iface_query(iface->lower, &iface->lower_attr)) != UCS_OK) {
        return status;
    }

    const uct_iface_attr_t &attr = iface->lower_attr;
    const bool can_put = (attr.cap.flags & UCT_IFACE_FLAG_PUT_ZCOPY) != 0;
    if ((attr.cap.flags & UCT_IFACE_FLAG_AM_BCOPY) == 0 ||
        attr.cap.am.max_bcopy < MIN_MESSAGE_SIZE || (!can_put && !iface->md->lower_rkey_ptr)) {
        zip_error(
                "zip: cannot work over %s: it has no messages of %zu bytes (it is set to %zu), or "
                "neither puts nor mapped memory; take zip out of UCX_TLS, or name another "
                "transport in UCX_ZIP_TLS",
                transport, MIN_MESSAGE_SIZE, attr.cap.am.max_bcopy);
        return UCS_ERR_UNSUPPORTED;
    }
    const bool to_ep = (attr.cap.flags & UCT_IFACE_FLAG_CONNECT_TO_EP) != 0;
    const bool to_iface = (attr.cap.flags & UCT_IFACE_FLAG_CONNECT_TO_IFACE) != 0;
    const auto wish = static_cast<ConnectOption>(iface->options.connect);
    if ((!to_ep && !to_iface) || (wish == ConnectOption::IFACE && !to_iface) ||
        (wish == ConnectOption::EP && !to_ep)) {
        zip_error("zip: %s cannot connect to %s; set UCX_ZIP_CONNECT=auto", transport,
                  connect_option_names[iface->options.connect]);
        return UCS_ERR_UNSUPPORTED;
    }
    // UCT says so of some; of tcp, of a queue pair of InfiniBand's reliable connection (where
    // nobody asked for another order), and of memory that is mapped here, it is known.
    iface->puts_are_ordered =
            static_cast<OrderOption>(iface->options.order) == OrderOption::AUTO &&
            ((attr.cap.flags & UCT_IFACE_FLAG_PUT_AM_ORDER) != 0 || iface->md->transport == "tcp" ||
             iface->md->transport == "rc_verbs" || iface->md->lower_rkey_ptr);
    iface->lower_connects_to_ep = to_ep && wish != ConnectOption::IFACE;
    iface->inline_max = std::min(attr.cap.am.max_bcopy - sizeof(wire::Segment), MAX_INLINE);

    iface->segment_size = iface->options.segment_size;
    if (!iface->md->lower_rkey_ptr) {
        iface->segment_size =
                std::min(iface->segment_size, attr.cap.put.max_zcopy - ZIP_CODEC_MAX_GROWTH);
    }
    // a piece has to take the wire longer than posting it takes the processor
    iface->gpu_segment_size = iface->options.gpu_segment_size;
    if (iface->gpu_segment_size == MEMUNITS_AUTO) {
        const auto wanted = static_cast<size_t>(iface->lower_bandwidth() * GPU_SEGMENT_SECONDS);
        iface->gpu_segment_size =
                iface->md->lower_rkey_ptr
                        ? 2 * MIN_GPU_SEGMENT
                        : std::clamp(std::bit_ceil(wanted), MIN_GPU_SEGMENT, MAX_GPU_SEGMENT);
    }
    if (!iface->md->lower_rkey_ptr) {
        iface->gpu_segment_size = std::min(iface->gpu_segment_size, attr.cap.put.max_zcopy / 2);
    }
    if (reads_gpu(iface)) {
        iface->md->least_gpu = least_size(iface, false, ucx::EP_OP_GET_ZCOPY);
    }
    return UCS_OK;
}

// One line that says what to do for an option that cannot work, or NULL.
const char *wrong_option(const IfaceOptions *options)
{
    if (options->segment_size < MIN_SEGMENT_SIZE || options->segment_size > MAX_SEGMENT_SIZE) {
        return "UCX_ZIP_SEG_SIZE must be 4k to 1g";
    }
    if (options->host_staging_size / MIN_SLOTS <
        zip_codec_bound(options->segment_size) + SLOT_ALIGNMENT) {
        return "UCX_ZIP_HOST_STAGING_SIZE must hold 8 segments: raise it, or lower "
               "UCX_ZIP_SEG_SIZE";
    }
    if (options->staging_size < MIN_STAGING) {
        return "UCX_ZIP_STAGING_SIZE must be at least 16m";
    }
    if (options->gpu_segment_size != MEMUNITS_AUTO &&
        (options->gpu_segment_size < MIN_SEGMENT_SIZE ||
         options->gpu_segment_size > MAX_SEGMENT_SIZE)) {
        return "UCX_ZIP_GPU_SEG_SIZE must be auto, or 4k to 1g";
    }
    if (!(options->bandwidth_ratio >= 1)) {
        return "UCX_ZIP_BW_RATIO must be at least 1";
    }
    return nullptr;
}

ucs_status_t iface_open(uct_md_h md, uct_worker_h worker, const uct_iface_params_t *params,
                        const uct_iface_config_t *config, uct_iface_h *iface_p)
{
    const auto *options = reinterpret_cast<const IfaceOptions *>(config);
    if (const char *wrong = wrong_option(options)) {
        zip_error("zip: %s", wrong);
        return UCS_ERR_INVALID_PARAM;
    }
    Iface *iface = new (std::nothrow) Iface();
    if (iface == nullptr) {
        return UCS_ERR_NO_MEMORY;
    }
    int init_count = 1;
    ucs_status_t status =
            uct_base_iface_t_init(&iface->super, ucx::uct_base_iface_t_class_p, &init_count,
                                  &iface_ops, &internal_ops, md, worker, params, config);
    if (status != UCS_OK) {
        ucs_class_call_cleanup_chain(ucx::uct_base_iface_t_class_p, iface, init_count);
        delete iface;
        return status;
    }
    iface->md = md_of(md);
    iface->worker = worker;
    iface->options = *options;
    status = open_lower(iface, params);
    for (int type = 0; status == UCS_OK && type < wire::MESSAGE_TYPE_LAST; ++type) {
        iface->am_args[type] = {iface, static_cast<wire::MessageType>(type)};
        status = uct_iface_set_am_handler(iface->lower, static_cast<uint8_t>(type), on_message,
                                          &iface->am_args[type], 0);
    }
    if (status != UCS_OK) {
        iface_close(&iface->super.super);
        return status;
    }
    *iface_p = &iface->super.super;
    return UCS_OK;
}

// The devices of the transport below, under the same names.
ucs_status_t query_devices(uct_md_h md_handle, ucx::TlDevice **devices_p, unsigned *count_p)
{
    Md *md = md_of(md_handle);
    uct_tl_resource_desc_t *resources;
    unsigned count;
    const ucs_status_t status = uct_md_query_tl_resources(md->lower, &resources, &count);
    if (status != UCS_OK) {
        return status;
    }
    auto *devices = static_cast<ucx::TlDevice *>(
            calloc(std::max(count, 1u), sizeof(ucx::TlDevice))); // UCX frees it
    unsigned found = 0;
    for (unsigned i = 0; devices != nullptr && i < count; ++i) {
        if (md->transport == resources[i].tl_name) {
            memcpy(devices[found].name, resources[i].dev_name, sizeof(devices[found].name));
            devices[found].type = resources[i].dev_type;
            devices[found].sys_device = resources[i].sys_device;
            ++found;
        }
    }
    uct_release_tl_resource_list(resources);
    *devices_p = devices;
    *count_p = found;
    return devices != nullptr ? UCS_OK : UCS_ERR_NO_MEMORY;
}

} // namespace

// ---- Iface

double codec_speed()
{
    static const double speed = [] {
        // bf16 with exponents as a bell-shaped distribution has them
        constexpr size_t VALUES = 65536;
        constexpr unsigned ROUNDS = 3;
        std::vector<uint16_t> data(VALUES), decoded(VALUES);
        uint64_t state = 1;
        for (uint16_t &value : data) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            const unsigned exponent = 120 - static_cast<unsigned>(std::countl_zero(state | 1)) % 16;
            value = static_cast<uint16_t>(exponent << 7 | (state >> 20 & 0x807f));
        }
        std::vector<char> encoded(zip_codec_bound(VALUES * sizeof(uint16_t)));
        double slower = 0;
        for (unsigned round = 0; round < ROUNDS; ++round) {
            size_t length = 0;
            const auto start = std::chrono::steady_clock::now();
            zip_codec_encode({ZIP_DTYPE_BF16, ZIP_SHAPE_DEFAULT, 0}, data.data(),
                             VALUES * sizeof(uint16_t), encoded.data(), encoded.size(), &length);
            const auto middle = std::chrono::steady_clock::now();
            zip_codec_decode(encoded.data(), length, decoded.data(), VALUES * sizeof(uint16_t));
            const auto end = std::chrono::steady_clock::now();
            const std::chrono::duration<double> longer = std::max(middle - start, end - middle);
            slower = std::max(slower, VALUES * sizeof(uint16_t) / longer.count());
        }
        return slower;
    }();
    return speed;
}

void Iface::start_progress()
{
    if (!progress_registered) {
        uct_iface_progress_enable(lower,
                                  UCT_PROGRESS_SEND | UCT_PROGRESS_RECV | UCT_PROGRESS_THREAD_SAFE);
        progress_id = UCS_CALLBACKQ_ID_NULL;
        uct_worker_progress_register_safe(worker, progress_callback, this, 0, &progress_id);
        progress_registered = true;
    }
}

unsigned Iface::progress()
{
    unsigned count = 0;
    // each once: progress may add them again
    for (size_t i = active.size(); i > 0 && !active.empty(); --i) {
        Ep *ep = active.front();
        active.pop_front();
        ep->in_active = false;
        count += ep->progress();
    }
    for (size_t i = departing.size(); i > 0; --i) {
        std::unique_ptr<Departing> next = std::move(departing.front());
        departing.pop_front();
        if (progress_departing(*next)) {
            ++count;
        } else {
            departing.push_back(std::move(next));
        }
    }
    for (const auto &one : sides) {
        if (one != nullptr && !one->waiting.empty()) {
            reclaim_slots();
            break;
        }
    }
    return count;
}

// While endpoints wait for slots: asks for those that lie idle, takes back those of orphans whose
// writers are gone, and ends endpoints whose peers keep theirs.
void Iface::reclaim_slots()
{
    const auto now = std::chrono::steady_clock::now();
    if (now - reclaimed_at < RECLAIM_INTERVAL) {
        return;
    }
    reclaimed_at = now;
    for (unsigned ring = 0; ring < sides.size(); ++ring) {
        if (sides[ring] != nullptr && !sides[ring]->waiting.empty()) {
            recall_slots(ring); // whoever got slots since the last time may not need them, either
        }
    }
    for (const auto &known_ep : eps) {
        Ep *ep = known_ep.second;
        const auto ignored = [&](const auto &entry) {
            return entry.second.recall_sent && ep->slots_held(entry.first) > 0 &&
                   now - entry.second.recalled_at > RECALL_LIMIT;
        };
        if (ep->failed == UCS_OK && std::any_of(ep->lending.begin(), ep->lending.end(), ignored)) {
            zip_error("zip: endpoint %p: its peer holds staging slots that others wait for",
                      static_cast<void *>(ep));
            ep->fail(UCS_ERR_TIMED_OUT, true);
            break; // UCP may have changed the table
        }
    }
    for (auto orphan = orphans.begin(); orphan != orphans.end();) {
        if (may_still_write(orphan->second)) {
            ++orphan;
            continue;
        }
        const std::vector<uint32_t> slots = std::move(orphan->second.slots);
        orphan = orphans.erase(orphan);
        for (uint32_t slot : slots) {
            release_slot(slot);
        }
    }
}

bool Iface::may_still_write(const Orphan &orphan) const
{
    return md->lower_rkey_ptr ? may_run(orphan.process)
                              : std::chrono::steady_clock::now() - orphan.since < ORPHAN_AGE;
}

void Iface::activate(Ep *ep)
{
    if (!ep->in_active) {
        ep->in_active = true;
        active.push_back(ep);
    }
}

void Iface::remove(Ep *ep)
{
    eps.erase(ep->id);
    if (ep->in_active) {
        std::erase(active, ep);
    }
    // Where one connection carries both directions, nothing arrives after it is closed.
    std::vector<uint32_t> slots = std::exchange(ep->lent, {});
    if (!slots.empty() && (!lower_connects_to_ep || md->lower_rkey_ptr)) {
        orphans[ep->id] = {std::exchange(slots, {}), std::chrono::steady_clock::now(),
                           ep->peer_process};
    }
    if (ep->lower != nullptr) {
        eps_by_lower.erase(ep->lower);
        // an operation below that has not ended would be waited for in vain
        const bool dead = ep->lower_failed || !ep->connected || ep->under_way > 0;
        for (LowerOperation &operation : lower_operations) {
            if (operation.ep == ep) {
                operation.ep = nullptr;
            }
        }
        depart(ep->lower, ep->peer_id, dead, std::move(slots));
        ep->lower = nullptr;
    }
}

Side::~Side()
{
    // They wait for what is under way, in the memory that goes next.
    encoder = nullptr;
    decoder = nullptr;
    ring = nullptr;
    arrived = nullptr;
    tx.slots = nullptr;
    if (gpu != nullptr) {
        gpu->give_back(reserved);
    }
}

namespace {

// Of a slot for `segment` bytes of original, encoded by whichever end.
size_t slot_size_for(size_t segment, size_t offset)
{
    zip_plan_t plan = {};
    zip_codec_plan({ZIP_DTYPE_AUTO, ZIP_SHAPE_DEFAULT, 0}, segment, &plan);
    return (plan.bound + offset + SLOT_ALIGNMENT - 1) / SLOT_ALIGNMENT * SLOT_ALIGNMENT;
}

std::unique_ptr<Side> host_side(const Iface &iface)
{
    auto made = std::make_unique<Side>();
    made->slot_size = (zip_codec_bound(iface.segment_size) + SLOT_ALIGNMENT - 1) / SLOT_ALIGNMENT *
                      SLOT_ALIGNMENT;
    const size_t slots = iface.options.host_staging_size / made->slot_size;
    // where the peer's ring is mapped segments are encoded straight into that
    const size_t tx =
            iface.md->lower_rkey_ptr ? 0 : std::max(MIN_SLOTS - MIN_RING_SLOTS, slots / 4);
    made->tx_slots = static_cast<uint32_t>(tx);
    made->ring_slots = static_cast<uint32_t>(slots - tx);
    return made;
}

// NULL: no memory for it.
std::unique_ptr<Side> gpu_side(const Iface &iface, Gpu *gpu)
{
    auto made = std::make_unique<Side>();
    made->gpu = gpu;
    made->reserved = gpu->reserve(iface.options.staging_size);
    const size_t usable = made->reserved - std::min(made->reserved, QUEUE_BYTES);
    // A ring in host memory has another one beside it on the GPU; where the peer's ring is mapped
    // nothing is sent from here.
    const size_t parts =
            (iface.md->stages_gpu_on_host() ? 2 : 1) + (iface.md->lower_rkey_ptr ? 0 : 1);
    // Short pieces cost more than few slots do.
    size_t segment = iface.gpu_segment_size;
    while (segment > MIN_SEGMENT_SIZE &&
           usable / parts / MIN_RING_SLOTS < slot_size_for(segment, ZIP_GPU_CHUNK_PHASE)) {
        segment /= 2;
    }
    made->slot_size = slot_size_for(segment, ZIP_GPU_CHUNK_PHASE);
    const size_t slots = usable / made->slot_size;
    made->ring_slots = static_cast<uint32_t>(slots / parts);
    made->tx_slots = iface.md->lower_rkey_ptr ? 0 : made->ring_slots;
    if (made->ring_slots < MIN_RING_SLOTS) {
        zip_error("zip: other interfaces have this GPU's staging memory: raise "
                  "UCX_ZIP_STAGING_SIZE");
        return nullptr;
    }
    made->encoder = GpuQueue::create(gpu);
    made->decoder = GpuQueue::create(gpu);
    if (made->encoder == nullptr || made->decoder == nullptr) {
        zip_error("zip: cannot make a stream on the GPU: %s", gpu->api().error_text());
        return nullptr;
    }
    return made;
}

} // namespace

Side *Iface::side(unsigned ring)
{
    if (ring >= sides.size()) {
        sides.resize(ring + 1);
    }
    if (sides[ring] == nullptr && ring == 0) {
        sides[0] = host_side(*this);
    } else if (sides[ring] == nullptr) {
        Gpu *gpu = md->gpu(ring);
        sides[ring] = gpu != nullptr ? gpu_side(*this, gpu) : nullptr;
    }
    return sides[ring].get();
}

SlotPool *Iface::receive_ring(Side &of)
{
    if (of.ring == nullptr) {
        // a full /dev/shm, or a limit of locked memory: fewer slots are slower, none is an error
        for (size_t count = of.ring_slots; count >= MIN_RING_SLOTS; count /= 2) {
            auto memory = StagingMemory::allocate(md, of.gpu, count * of.slot_size, "zip_ring");
            if (memory != nullptr) {
                of.ring = std::make_unique<SlotPool>(std::move(memory), of.slot_size,
                                                     static_cast<uint32_t>(count));
                if (of.gpu != nullptr && md->stages_gpu_on_host()) {
                    of.arrived = GpuMemory::allocate(of.gpu, count * of.slot_size);
                }
                break;
            }
        }
    }
    return of.ring.get();
}

void Iface::release_slot(uint32_t slot)
{
    const unsigned ring = wire::ring_of(slot);
    Side &of = *sides[ring];
    of.ring->give_back(wire::index_of(slot));
    if (!of.waiting.empty()) {
        Ep *ep = of.waiting.front();
        of.waiting.pop_front();
        ep->lending[ring].in_waiting = false;
        ep->grant_wanted(ring);
        if (!of.waiting.empty()) {
            recall_slots(ring); // whoever got one since the last time may not need it, either
        }
    }
}

void Iface::recall_slots(unsigned ring)
{
    for (auto &[id, ep] : eps) {
        if (ep->failed == UCS_OK && ep->slots_held(ring) > 0) {
            Ep::Lending &lent = ep->lending[ring];
            if (!lent.recall_sent) {
                lent.recall_sent = true;
                lent.recall_due = true; // goes out behind the slots that are to be lent
                lent.recalled_at = std::chrono::steady_clock::now();
                activate(ep);
            }
        }
    }
}

SlotPool *Iface::send_buffers(Side &of)
{
    TxPool &pool = of.tx;
    if (pool.slots == nullptr) {
        auto memory = StagingMemory::allocate(md, of.gpu, of.tx_slots * of.slot_size, "zip_tx");
        if (memory == nullptr) {
            return nullptr;
        }
        pool.slots = std::make_unique<SlotPool>(std::move(memory), of.slot_size, of.tx_slots);
        for (uint32_t slot = 0; slot < of.tx_slots; ++slot) {
            pool.buffers.push_back(std::make_unique<TxBuffer>());
            pool.buffers.back()->pool = &pool;
            pool.buffers.back()->slot = slot;
            pool.buffers.back()->completion.func = on_put_done;
        }
    }
    return pool.slots.get();
}

TxBuffer *Iface::take_tx_buffer(Side &of, uct_ep_h user)
{
    // A peer that does not read keeps buffers for as long: what it has is at most what is left, so
    // that others go on.
    const auto held = std::count_if(of.tx.buffers.begin(), of.tx.buffers.end(),
                                    [user](const auto &buffer) { return buffer->user == user; });
    const bool alone = eps.size() == 1;
    uint32_t slot;
    if (!alone && held > 0 && held >= of.tx.slots->free_count()) {
        return nullptr;
    }
    if (!of.tx.slots->take(slot)) {
        return nullptr;
    }
    TxBuffer *buffer = of.tx.buffers[slot].get();
    buffer->user = user;
    buffer->completion.count = 1;
    buffer->completion.status = UCS_OK;
    return buffer;
}

uint32_t Iface::sms_for(bool staging_on_gpu) const
{
    return options.max_sms != 0 ? options.max_sms : staging_on_gpu ? 0 : PCIE_SMS;
}

void Iface::free_tx_buffers_of(uct_ep_h user)
{
    for (const auto &one : sides) {
        for (size_t i = 0; one != nullptr && i < one->tx.buffers.size(); ++i) {
            if (one->tx.buffers[i]->user == user) {
                on_put_done(&one->tx.buffers[i]->completion);
            }
        }
    }
}

LowerOperation *Iface::begin_lower_operation(Ep *ep)
{
    LowerOperation &operation = lower_operations.emplace_back();
    operation = {{on_lower_operation, 1, UCS_OK},  this, ep, ep->lower, nullptr, nullptr, nullptr,
                 std::prev(lower_operations.end())};
    return &operation;
}

void Iface::forget_lower_operation(LowerOperation *operation)
{
    lower_operations.erase(operation->self);
}

void Iface::detach_lower_operations(Ep *ep)
{
    for (LowerOperation &operation : lower_operations) {
        if (operation.ep == ep) {
            operation.tracked = nullptr;
            operation.segment = nullptr;
        }
    }
}

double Iface::lower_bandwidth() const
{
    return std::max(lower_attr.bandwidth.shared, lower_attr.bandwidth.dedicated);
}

bool Iface::given_coding(size_t length, zip_coding_t &coding, float &ratio) const
{
    coding = {};
    ratio = 1;
    if (length < options.min_size) {
        return true;
    }
    const DtypeChoice &choice = dtype_choices[options.dtype];
    if (choice.dtype == ZIP_DTYPE_AUTO) {
        return false;
    }
    ratio = choice.ratio;
    coding.dtype = choice.dtype;
    return true;
}

bool Iface::remembered_coding(const void *data, const Region *of, zip_coding_t &coding,
                              float &ratio)
{
    auto found = known.find(reinterpret_cast<uintptr_t>(data));
    if (found == known.end()) {
        found = known.find(of->id);
    }
    if (found == known.end() || ++found->second.uses > PROBE_USES) {
        return false;
    }
    coding = found->second.coding;
    ratio = found->second.ratio;
    return true;
}

void Iface::remember_coding(const void *data, const Region *of, zip_coding_t coding, float ratio)
{
    if (known.size() >= MAX_PROBED) {
        known.clear();
    }
    known[reinterpret_cast<uintptr_t>(data)] = known[of->id] = {coding, ratio, 0};
}

void Iface::forget_coding(const void *data, uint64_t region_id)
{
    known.erase(reinterpret_cast<uintptr_t>(data));
    known.erase(region_id);
}

zip_coding_t Iface::choose_coding(const void *data, size_t length, float &ratio) const
{
    zip_coding_t coding;
    if (given_coding(length, coding, ratio)) {
        return coding;
    }
    zip_probe_t probe;
    if (zip_codec_probe(data, length, &probe) != ZIP_OK) {
        return {};
    }
    ratio = probe.ratio;
    return {probe.dtype, probe.shape, 0};
}

void Iface::depart(uct_ep_h lower_ep, uint64_t peer_id, bool dead, std::vector<uint32_t> slots)
{
    auto next = std::make_unique<Departing>();
    *next = {lower_ep,        peer_id, dead, false, {[](uct_completion_t *) {}, 1, UCS_OK},
             std::move(slots)};
    departing.push_back(std::move(next));
}

void Iface::close_lower(uct_ep_h lower_ep)
{
    uct_ep_destroy(lower_ep);
    free_tx_buffers_of(lower_ep);
    for (bool found = true; found;) { // that the transport below has not ended itself
        found = false;
        for (LowerOperation &operation : lower_operations) {
            if (operation.lower == lower_ep) {
                operation.completion.status = UCS_ERR_CANCELED;
                on_lower_operation(&operation.completion);
                found = true;
                break;
            }
        }
    }
}

// True when the endpoint below is destroyed.
bool Iface::progress_departing(Departing &departing_ep)
{
    if (!departing_ep.dead && departing_ep.peer_id != 0) {
        const wire::Header bye{departing_ep.peer_id};
        const ucs_status_t status = send_message(departing_ep.lower, wire::BYE, &bye, sizeof(bye));
        if (status == UCS_ERR_NO_RESOURCE) {
            return false;
        }
        departing_ep.dead |= status != UCS_OK;
        departing_ep.peer_id = 0;
    }
    if (!departing_ep.dead && !departing_ep.flushing) {
        const ucs_status_t status = uct_ep_flush(departing_ep.lower, 0, &departing_ep.flushed);
        if (status == UCS_INPROGRESS) {
            departing_ep.flushing = true;
        }
        if (status == UCS_INPROGRESS || status == UCS_ERR_NO_RESOURCE) {
            return false;
        }
    } else if (!departing_ep.dead && departing_ep.flushed.count > 0) {
        return false;
    }
    close_lower(departing_ep.lower);
    for (uint32_t slot : departing_ep.slots) {
        release_slot(slot);
    }
    return true;
}

void init_tl()
{
    ucx::use_own_parsers(iface_options_table);
    iface_options_table[0].parser.arg = ucx::uct_iface_config_table_p;

    fill_unsupported(internal_ops);
    internal_ops.iface_query_v2 =
            reinterpret_cast<ucx::Slot>(reinterpret_cast<void *>(uct_iface_base_query_v2));
    internal_ops.iface_estimate_perf = estimate_perf;
    internal_ops.iface_vfs_refresh = [](uct_iface_h) {};
    internal_ops.ep_connect_to_ep_v2 = ep_connect;
    internal_ops.iface_is_reachable_v2 = is_reachable;
    internal_ops.ep_is_connected = ep_is_connected;

    fill_unsupported(iface_ops);
    iface_ops.ep_put_zcopy = ep_put_zcopy;
    iface_ops.ep_get_zcopy = ep_get_zcopy;
    iface_ops.ep_pending_add = ep_pending_add;
    iface_ops.ep_pending_purge = ep_pending_purge;
    iface_ops.ep_flush = ep_flush;
    iface_ops.ep_fence = ep_fence;
    iface_ops.ep_create = ep_create;
    iface_ops.ep_destroy = ep_destroy;
    iface_ops.ep_get_address = ep_get_address;
    iface_ops.ep_connect_to_ep = uct_base_ep_connect_to_ep;
    iface_ops.iface_flush = iface_flush;
    iface_ops.iface_fence = iface_fence;
    iface_ops.iface_progress_enable = progress_enable;
    iface_ops.iface_progress_disable = progress_disable;
    iface_ops.iface_progress = iface_progress;
    iface_ops.iface_event_fd_get = event_fd_get;
    iface_ops.iface_event_arm = event_arm;
    iface_ops.iface_close = iface_close;
    iface_ops.iface_query = iface_query;
    iface_ops.iface_get_device_address = get_device_address;
    iface_ops.iface_get_address = get_address;
    iface_ops.iface_is_reachable = uct_base_iface_is_reachable;

    strcpy(tl.name, "zip");
    tl.query_devices = query_devices;
    tl.iface_open = iface_open;
    tl.config.name = "zip transport";
    tl.config.prefix = "ZIP_";
    tl.config.table = iface_options_table;
    tl.config.size = sizeof(IfaceOptions);
}

} // namespace zip
