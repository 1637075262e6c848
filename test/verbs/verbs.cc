// SPDX-License-Identifier: BSD-3-Clause
// The entry points of libibverbs: devices, contexts and all objects.
#include <infiniband/verbs.h>
// The header hides these functions behind macros.
#undef ibv_query_port
#undef ibv_reg_mr
#undef ibv_reg_mr_iova

#include "nic.h"

#include <sys/uio.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

using namespace swverbs;

#define API extern "C" __attribute__((visibility("default")))

namespace {

constexpr uint16_t kPkey = 0xffff;
constexpr uint32_t kMaxMessage = 1u << 30;
constexpr uint32_t kMaxDatagram = 4096;
constexpr uint32_t kMaxInline = 512;
constexpr uint8_t kMaxReads = 16;

template <class T>
T *fail_null(int error)
{
    errno = error;
    return nullptr;
}

int fail_code(int error)
{
    errno = error;
    return error;
}

// mlx5dv_is_supported() and its like read the pointer that follows struct ibv_device in the
// providers' own struct verbs_device: it must exist, and be none of theirs.
struct Device {
    ibv_device verbs;
    void *provider[64];
};
Device devices[kDevices];

Port &port_of(const ibv_context *context)
{
    return self->head.port[context_of(const_cast<ibv_context *>(context))->device];
}

uint32_t next_power_of_two(uint32_t n)
{
    uint32_t p = 1;
    while (p < n) {
        p *= 2;
    }
    return p;
}

// A forked child has the parent's handles, but no device.
bool usable()
{
    return nic().start();
}

QueuePair &qp_of(ibv_qp *qp)
{
    return *reinterpret_cast<QueuePair *>(qp);
}

CompletionQueue &cq_of(ibv_cq *cq)
{
    return *reinterpret_cast<CompletionQueue *>(cq);
}

SharedReceiveQueue &srq_of(ibv_srq *srq)
{
    return *reinterpret_cast<SharedReceiveQueue *>(srq);
}

ProtectionDomain &pd_of(ibv_pd *pd)
{
    return *reinterpret_cast<ProtectionDomain *>(pd);
}

// The data path, through ibv_context::ops.

// Puts one request behind the others; the poster's lock is held.
int add_send(QueuePair &q, const ibv_send_wr &wr, uint64_t now)
{
    if (wr.opcode > IBV_WR_ATOMIC_FETCH_AND_ADD || wr.num_sge < 0 ||
        static_cast<uint32_t>(wr.num_sge) > q.init.cap.max_send_sge) {
        return EINVAL;
    }
    const bool ud = q.verbs.qp_type == IBV_QPT_UD;
    if (ud && wr.opcode != IBV_WR_SEND && wr.opcode != IBV_WR_SEND_WITH_IMM) {
        return EINVAL;
    }
    const uint64_t tail = q.tail.load(std::memory_order_relaxed);
    if (tail - q.head.load(std::memory_order_acquire) >= q.init.cap.max_send_wr) {
        return ENOMEM;
    }
    SendWqe &w = q.wqe(tail);
    w.wr_id = wr.wr_id;
    w.posted = now;
    w.done_at = 0;
    w.launched = w.delivered = 0;
    w.imm = wr.imm_data;
    w.flags = wr.send_flags;
    w.opcode = wr.opcode;
    w.status = IBV_WC_SUCCESS;
    w.num_sge = static_cast<uint16_t>(wr.num_sge);
    w.signaled = q.init.sq_sig_all != 0 || (wr.send_flags & IBV_SEND_SIGNALED) != 0;
    w.done = w.asked = w.global = false;
    uint64_t length = 0;
    if (w.is_inline()) {
        if (w.is_inbound()) {
            return EINVAL;
        }
        for (int i = 0; i < wr.num_sge; i++) {
            const ibv_sge &sge = wr.sg_list[i];
            if (length + sge.length > q.init.cap.max_inline_data) {
                return EINVAL;
            }
            memcpy(w.inline_data() + length, reinterpret_cast<const void *>(sge.addr), sge.length);
            length += sge.length;
        }
    } else {
        for (int i = 0; i < wr.num_sge; i++) {
            w.sge()[i] = wr.sg_list[i];
            length += wr.sg_list[i].length;
        }
    }
    if (length > kMaxMessage) {
        w.status = IBV_WC_LOC_LEN_ERR; // in its turn
        length = 0;
    }
    w.length = static_cast<uint32_t>(length);
    if (ud) {
        const auto *ah = reinterpret_cast<const AddressHandle *>(wr.wr.ud.ah);
        if (ah == nullptr || length > kMaxDatagram) {
            return EINVAL;
        }
        w.qpn = wr.wr.ud.remote_qpn;
        w.qkey = (wr.wr.ud.remote_qkey & 0x80000000) != 0 ? q.attr.qkey : wr.wr.ud.remote_qkey;
        w.lid = ah->lid;
        w.global = ah->attr.is_global != 0;
    } else if (w.is_atomic()) {
        w.remote_address = wr.wr.atomic.remote_addr;
        w.rkey = wr.wr.atomic.rkey;
        w.compare = wr.wr.atomic.compare_add;
        w.swap = wr.wr.atomic.swap;
    } else {
        w.remote_address = wr.wr.rdma.remote_addr;
        w.rkey = wr.wr.rdma.rkey;
    }
    q.tail.store(tail + 1, std::memory_order_release);
    return 0;
}

int post_send(ibv_qp *qp, ibv_send_wr *wr, ibv_send_wr **bad)
{
    QueuePair &q = qp_of(qp);
    const uint64_t now = now_ns();
    int rc = 0;
    {
        std::lock_guard<std::mutex> guard(q.posters);
        const uint32_t state = q.shared->state.load(std::memory_order_relaxed);
        if (state != IBV_QPS_RTS && state != IBV_QPS_SQD && state != IBV_QPS_ERR) {
            rc = EINVAL;
        }
        for (; wr != nullptr && rc == 0; wr = rc == 0 ? wr->next : wr) {
            rc = add_send(q, *wr, now);
            if (rc != 0) {
                break;
            }
        }
    }
    if (rc != 0) {
        *bad = wr;
    }
    nic().kick(q, now);
    return rc;
}

int post_receives(uint32_t index, ibv_recv_wr *wr, ibv_recv_wr **bad)
{
    Rq &rq = self->rq[index];
    int rc = 0;
    rq.lock.lock();
    uint64_t tail = rq.tail.load(std::memory_order_relaxed);
    for (; wr != nullptr; wr = wr->next) {
        if (wr->num_sge < 0 || static_cast<uint32_t>(wr->num_sge) > rq.max_sge) {
            rc = EINVAL;
            break;
        }
        if (tail - rq.head.load(std::memory_order_relaxed) >= rq.capacity) {
            rc = ENOMEM;
            break;
        }
        auto *receive =
                reinterpret_cast<Receive *>(self->arena + rq.ring + (tail & rq.mask) * rq.stride);
        receive->wr_id = wr->wr_id;
        receive->num_sge = static_cast<uint32_t>(wr->num_sge);
        std::copy(wr->sg_list, wr->sg_list + wr->num_sge, receive->sge);
        rq.tail.store(++tail, std::memory_order_release);
    }
    rq.lock.unlock();
    if (rc != 0) {
        *bad = wr;
    }
    return rc;
}

int post_recv(ibv_qp *qp, ibv_recv_wr *wr, ibv_recv_wr **bad)
{
    QueuePair &q = qp_of(qp);
    if (q.srq != nullptr || q.shared->state.load() == IBV_QPS_RESET) {
        *bad = wr;
        return EINVAL;
    }
    const int rc = post_receives(q.index, wr, bad);
    if (q.shared->state.load() == IBV_QPS_ERR) {
        {
            Nic::Guard guard;
            q.flushed = false;
        }
        nic().kick(q, now_ns());
    }
    return rc;
}

int post_srq_recv(ibv_srq *srq, ibv_recv_wr *wr, ibv_recv_wr **bad)
{
    return post_receives(srq_of(srq).index, wr, bad);
}

int poll_now(CompletionQueue &c, int count, ibv_wc *wc)
{
    Cq &cq = *c.shared;
    if (cq.head.load(std::memory_order_relaxed) == cq.tail.load(std::memory_order_acquire)) {
        return 0;
    }
    std::lock_guard<std::mutex> guard(c.consumers);
    const uint64_t head = cq.head.load(std::memory_order_relaxed);
    const auto found = static_cast<int>(std::min<uint64_t>(
            cq.tail.load(std::memory_order_acquire) - head, static_cast<uint64_t>(count)));
    const auto *ring = reinterpret_cast<const ibv_wc *>(self->arena + cq.ring);
    for (int i = 0; i < found; i++) {
        wc[i] = ring[(head + static_cast<uint64_t>(i)) & cq.mask];
    }
    cq.head.store(head + static_cast<uint64_t>(found), std::memory_order_release);
    return found;
}

int poll_cq(ibv_cq *cq, int count, ibv_wc *wc)
{
    CompletionQueue &c = cq_of(cq);
    int found = poll_now(c, count, wc);
    if (found < count) {
        nic().help();
        if (found == 0) {
            found = poll_now(c, count, wc);
        }
    }
    return found;
}

int req_notify_cq(ibv_cq *cq, int solicited_only)
{
    if (cq->channel == nullptr) {
        return EINVAL;
    }
    Cq &shared = *cq_of(cq).shared;
    shared.lock.lock();
    // A card compares with the consumer's index: what has come, was not polled and has made no
    // event makes it at once. UCX relies on that: it polls, arms and sleeps.
    const uint64_t known = std::max(shared.head.load(), shared.told);
    const bool late = (solicited_only != 0 ? shared.solicited : shared.tail.load()) > known;
    shared.armed = late ? 0 : solicited_only != 0 ? 2 : 1;
    if (late) {
        shared.told = shared.tail.load();
        shared.fire = 1;
    }
    shared.lock.unlock();
    if (late) {
        call_attention(*self, kAttentionChannels);
    }
    nic().stop_helping();
    return 0;
}

// Forgets the completions of a QP that goes away, as providers do.
void clean_cq(CompletionQueue &c, uint32_t qpn)
{
    std::lock_guard<std::mutex> guard(c.consumers);
    Cq &cq = *c.shared;
    cq.lock.lock();
    auto *ring = reinterpret_cast<ibv_wc *>(self->arena + cq.ring);
    uint64_t to = cq.head.load();
    for (uint64_t i = to; i < cq.tail.load(); i++) {
        if (ring[i & cq.mask].qp_num != qpn) {
            ring[to++ & cq.mask] = ring[i & cq.mask];
        }
    }
    cq.tail = to;
    cq.told = std::min(cq.told, to);
    cq.solicited = std::min(cq.solicited, to);
    cq.lock.unlock();
}

// As ib_modify_qp_is_ok() of the kernel: what a transition needs and what it allows besides.
struct Transition {
    ibv_qp_type type;
    ibv_qp_state from, to;
    int required, optional;
};

constexpr Transition kTransitions[] = {
        {IBV_QPT_RC, IBV_QPS_RESET, IBV_QPS_INIT,
         IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, 0},
        {IBV_QPT_RC, IBV_QPS_INIT, IBV_QPS_INIT, 0,
         IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS},
        {IBV_QPT_RC, IBV_QPS_INIT, IBV_QPS_RTR,
         IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
                 IBV_QP_MIN_RNR_TIMER,
         IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX},
        {IBV_QPT_RC, IBV_QPS_RTR, IBV_QPS_RTS,
         IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                 IBV_QP_MAX_QP_RD_ATOMIC,
         IBV_QP_CUR_STATE | IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER |
                 IBV_QP_PATH_MIG_STATE},
        {IBV_QPT_RC, IBV_QPS_RTS, IBV_QPS_RTS, 0,
         IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE |
                 IBV_QP_MIN_RNR_TIMER},
        {IBV_QPT_RC, IBV_QPS_RTS, IBV_QPS_SQD, 0, IBV_QP_EN_SQD_ASYNC_NOTIFY},
        {IBV_QPT_RC, IBV_QPS_SQD, IBV_QPS_RTS, 0,
         IBV_QP_CUR_STATE | IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER |
                 IBV_QP_PATH_MIG_STATE},
        {IBV_QPT_RC, IBV_QPS_SQD, IBV_QPS_SQD, 0,
         IBV_QP_PORT | IBV_QP_AV | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                 IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_ALT_PATH |
                 IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX | IBV_QP_MIN_RNR_TIMER |
                 IBV_QP_PATH_MIG_STATE},
        {IBV_QPT_UD, IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY, 0},
        {IBV_QPT_UD, IBV_QPS_INIT, IBV_QPS_INIT, 0, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY},
        {IBV_QPT_UD, IBV_QPS_INIT, IBV_QPS_RTR, 0, IBV_QP_PKEY_INDEX | IBV_QP_QKEY},
        {IBV_QPT_UD, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QP_SQ_PSN, IBV_QP_CUR_STATE | IBV_QP_QKEY},
        {IBV_QPT_UD, IBV_QPS_RTS, IBV_QPS_RTS, 0, IBV_QP_CUR_STATE | IBV_QP_QKEY},
        {IBV_QPT_UD, IBV_QPS_RTS, IBV_QPS_SQD, 0, IBV_QP_EN_SQD_ASYNC_NOTIFY},
        {IBV_QPT_UD, IBV_QPS_SQD, IBV_QPS_RTS, 0, IBV_QP_CUR_STATE | IBV_QP_QKEY},
        {IBV_QPT_UD, IBV_QPS_SQD, IBV_QPS_SQD, 0, IBV_QP_PKEY_INDEX | IBV_QP_QKEY},
};

bool transition_allowed(ibv_qp_type type, ibv_qp_state from, ibv_qp_state to, int mask)
{
    if (to == IBV_QPS_RESET || to == IBV_QPS_ERR) {
        return (mask & ~(IBV_QP_STATE | IBV_QP_CUR_STATE)) == 0;
    }
    for (const Transition &t : kTransitions) {
        if (t.type == type && t.from == from && t.to == to) {
            return (mask & t.required) == t.required &&
                   (mask & ~(t.required | t.optional | IBV_QP_STATE | IBV_QP_CUR_STATE)) == 0;
        }
    }
    return false;
}

// The lid that an address means: by GID where there is no lid, as on Ethernet.
uint32_t destination(const ibv_ah_attr &attr)
{
    if (attr.is_global != 0 && (attr.dlid == 0 || settings().ethernet)) {
        const uint64_t id = be64toh(attr.grh.dgid.global.interface_id);
        return id == guid_of(static_cast<uint32_t>(id & 0xffff))
                       ? static_cast<uint32_t>(id & 0xffff)
                       : 0;
    }
    return attr.dlid;
}

bool init_rq(uint32_t index, uint32_t max_wr, uint32_t max_sge)
{
    Rq &rq = self->rq[index];
    rq.capacity = max_wr;
    rq.mask = next_power_of_two(std::max(max_wr, 1u)) - 1;
    rq.max_sge = max_sge;
    rq.stride =
            static_cast<uint32_t>(offsetof(Receive, sge) + std::max(max_sge, 1u) * sizeof(ibv_sge));
    rq.head = rq.tail = 0;
    rq.limit = 0;
    rq.limit_reached = 0;
    return nic().arena().allocate(static_cast<size_t>(rq.mask + 1) * rq.stride, rq.ring);
}

} // namespace

// Devices and contexts.

API ibv_device **ibv_get_device_list(int *count)
{
    const unsigned n = usable() ? settings().devices : 0;
    auto **list = static_cast<ibv_device **>(calloc(n + 1, sizeof(ibv_device *)));
    for (unsigned i = 0; i < n && list != nullptr; i++) {
        ibv_device &d = devices[i].verbs;
        d.node_type = IBV_NODE_CA;
        d.transport_type = IBV_TRANSPORT_IB;
        snprintf(d.name, sizeof(d.name), "swverbs%u", i);
        snprintf(d.dev_name, sizeof(d.dev_name), "uverbs-sw%u", i);
        snprintf(d.dev_path, sizeof(d.dev_path), "/sys/class/infiniband_verbs/uverbs-sw%u", i);
        snprintf(d.ibdev_path, sizeof(d.ibdev_path), "/sys/class/infiniband/swverbs%u", i);
        list[i] = &d;
    }
    if (count != nullptr) {
        *count = static_cast<int>(n);
    }
    if (n == 0) {
        errno = ENODEV;
    }
    return list;
}

API void ibv_free_device_list(ibv_device **list)
{
    free(list);
}

API const char *ibv_get_device_name(ibv_device *device)
{
    return device->name;
}

API int ibv_get_device_index(ibv_device *device)
{
    return static_cast<int>(reinterpret_cast<Device *>(device) - devices);
}

API __be64 ibv_get_device_guid(ibv_device *device)
{
    if (!usable()) {
        return 0;
    }
    return htobe64(guid_of(self->head.port[ibv_get_device_index(device)].lid));
}

API int ibv_fork_init(void)
{
    return 0;
}

API enum ibv_fork_status ibv_is_fork_initialized(void)
{
    return IBV_FORK_UNNEEDED;
}

// The context is a verbs_context without extended functions: verbs.h then falls back to the
// functions below or reports EOPNOTSUPP. (One of the old ABI is not enough: libefa, to which UCX
// offers every device, dereferences the verbs_context.)
API ibv_context *ibv_open_device(ibv_device *device)
{
    if (!usable()) {
        return fail_null<ibv_context>(ENODEV);
    }
    auto *c = new Context();
    c->device = ibv_get_device_index(device);
    c->verbs.sz = sizeof(verbs_context);
    ibv_context &v = c->verbs.context;
    v.abi_compat = __VERBS_ABI_IS_EXTENDED;
    v.device = device;
    v.cmd_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    v.async_fd = c->events.fd();
    v.num_comp_vectors = 1;
    pthread_mutex_init(&v.mutex, nullptr);
    v.ops.poll_cq = poll_cq;
    v.ops.req_notify_cq = req_notify_cq;
    v.ops.post_send = post_send;
    v.ops.post_recv = post_recv;
    v.ops.post_srq_recv = post_srq_recv;
    Nic::Guard guard;
    nic().add_context(*c);
    return &v;
}

API int ibv_close_device(ibv_context *context)
{
    Context *c = context_of(context);
    {
        Nic::Guard guard;
        nic().remove_context(*c);
    }
    close(context->cmd_fd);
    pthread_mutex_destroy(&context->mutex);
    delete c;
    return 0;
}

API int ibv_query_device(ibv_context *context, ibv_device_attr *attr)
{
    memset(attr, 0, sizeof(*attr));
    snprintf(attr->fw_ver, sizeof(attr->fw_ver), "1.0");
    attr->node_guid = attr->sys_image_guid = htobe64(guid_of(port_of(context).lid));
    attr->max_mr_size = ~0ull;
    attr->page_size_cap = ~0xfffull;
    attr->vendor_id = 0x5357;
    attr->max_qp = kQps;
    attr->max_qp_wr = attr->max_srq_wr = kMaxWr;
    attr->max_cq = kCqs;
    attr->max_cqe = kMaxCqe;
    attr->max_mr = kMrs;
    attr->max_srq = kSrqs;
    attr->max_sge = attr->max_sge_rd = attr->max_srq_sge = kSge;
    attr->max_pd = attr->max_ah = 65536;
    attr->max_qp_rd_atom = attr->max_qp_init_rd_atom = kMaxReads;
    attr->max_res_rd_atom = kMaxReads * kQps;
    attr->atomic_cap = IBV_ATOMIC_HCA;
    attr->max_pkeys = 1;
    attr->phys_port_cnt = 1;
    return 0;
}

// The inline ibv_query_port() comes here with a zeroed structure that may be the short one of old
// programs: nothing behind `flags` is written.
API int ibv_query_port(ibv_context *context, uint8_t number, _compat_ibv_port_attr *out)
{
    if (number != 1) {
        return fail_code(EINVAL);
    }
    const bool up = nic().port_up(context_of(context)->device);
    auto *attr = reinterpret_cast<ibv_port_attr *>(out);
    memset(attr, 0, offsetof(ibv_port_attr, flags));
    attr->state = up ? IBV_PORT_ACTIVE : IBV_PORT_DOWN;
    attr->max_mtu = attr->active_mtu = IBV_MTU_4096;
    attr->gid_tbl_len = 1;
    attr->pkey_tbl_len = 1;
    attr->max_msg_sz = kMaxMessage;
    attr->lid = settings().ethernet ? 0 : static_cast<uint16_t>(port_of(context).lid.load());
    attr->sm_lid = settings().ethernet ? 0 : 0xbfff;
    attr->max_vl_num = 1;
    // The slowest standard rate whose name is not below SWVERBS_GBPS (EDR, "100 Gb/s", for 12.5, of
    // which its coding leaves 12.13): UCX plans by it. Codes of SDR, DDR, QDR, FDR, EDR, HDR, NDR
    // over four lanes, then NDR over eight and twelve.
    static constexpr struct {
        double gbps;
        uint8_t width, speed;
    } rates[] = {{1, 2, 1},      {2, 2, 2},       {4, 2, 4},       {6.82, 2, 16}, {12.13, 2, 32},
                 {24.25, 2, 64}, {48.49, 2, 128}, {96.97, 4, 128}, {1e9, 8, 128}};
    constexpr double kNameToRate = 66.0 / 64;
    constexpr double kUnpaced = 12; // about what two processors copy
    const double wanted = settings().gbps > 0 ? settings().gbps : kUnpaced;
    for (const auto &rate : rates) {
        if (wanted <= rate.gbps * kNameToRate) {
            attr->active_width = rate.width;
            attr->active_speed = rate.speed;
            break;
        }
    }
    attr->phys_state = up ? 5 : 3; // link up, disabled
    attr->link_layer = settings().ethernet ? IBV_LINK_LAYER_ETHERNET : IBV_LINK_LAYER_INFINIBAND;
    return 0;
}

API int ibv_query_gid(ibv_context *context, uint8_t port, int index, ibv_gid *gid)
{
    if (port != 1 || index != 0) {
        errno = EINVAL;
        return -1;
    }
    gid->global.subnet_prefix = htobe64(0xfe80000000000000ull);
    gid->global.interface_id = htobe64(guid_of(port_of(context).lid));
    return 0;
}

API int _ibv_query_gid_ex(ibv_context *context, uint32_t port, uint32_t index, ibv_gid_entry *entry,
                          uint32_t, size_t size)
{
    ibv_gid_entry e = {};
    if (port != 1 || ibv_query_gid(context, 1, static_cast<int>(index), &e.gid) != 0) {
        return EINVAL;
    }
    e.port_num = port;
    e.gid_type = settings().ethernet ? IBV_GID_TYPE_ROCE_V2 : IBV_GID_TYPE_IB;
    memcpy(entry, &e, std::min(size, sizeof(e)));
    return 0;
}

API ssize_t _ibv_query_gid_table(ibv_context *context, ibv_gid_entry *entries, size_t max_entries,
                                 uint32_t flags, size_t size)
{
    if (max_entries == 0) {
        return -EINVAL;
    }
    return _ibv_query_gid_ex(context, 1, 0, entries, flags, size) == 0 ? 1 : -EINVAL;
}

// Private, but ibv_devinfo -v calls it.
API int ibv_query_gid_type(ibv_context *, uint8_t, unsigned, unsigned *type)
{
    *type = settings().ethernet ? 1 : 0;
    return 0;
}

API int ibv_query_pkey(ibv_context *, uint8_t port, int index, __be16 *pkey)
{
    if (port != 1 || index != 0) {
        errno = EINVAL;
        return -1;
    }
    *pkey = htobe16(kPkey);
    return 0;
}

API int ibv_get_pkey_index(ibv_context *, uint8_t, __be16 pkey)
{
    return be16toh(pkey) == kPkey ? 0 : -1;
}

// Events. An object is not destroyed before all of its events that were taken are acknowledged.

API int ibv_get_async_event(ibv_context *context, ibv_async_event *event)
{
    return context_of(context)->events.pop(*event, [](ibv_async_event &e) {
        switch (e.event_type) {
        case IBV_EVENT_CQ_ERR:
            cq_of(e.element.cq).async_events_taken++;
            break;
        case IBV_EVENT_SRQ_ERR:
        case IBV_EVENT_SRQ_LIMIT_REACHED:
            srq_of(e.element.srq).events_taken++;
            break;
        case IBV_EVENT_QP_FATAL:
        case IBV_EVENT_QP_REQ_ERR:
        case IBV_EVENT_QP_ACCESS_ERR:
        case IBV_EVENT_QP_LAST_WQE_REACHED:
            qp_of(e.element.qp).events_taken++;
            break;
        default:
            break;
        }
    });
}

static void acknowledge(pthread_mutex_t &mutex, pthread_cond_t &changed, uint32_t &completed,
                        uint32_t count)
{
    pthread_mutex_lock(&mutex);
    completed += count;
    pthread_cond_signal(&changed);
    pthread_mutex_unlock(&mutex);
}

API void ibv_ack_async_event(ibv_async_event *e)
{
    switch (e->event_type) {
    case IBV_EVENT_CQ_ERR: {
        ibv_cq &cq = *e->element.cq;
        acknowledge(cq.mutex, cq.cond, cq.async_events_completed, 1);
        break;
    }
    case IBV_EVENT_SRQ_ERR:
    case IBV_EVENT_SRQ_LIMIT_REACHED: {
        ibv_srq &srq = *e->element.srq;
        acknowledge(srq.mutex, srq.cond, srq.events_completed, 1);
        break;
    }
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
    case IBV_EVENT_QP_LAST_WQE_REACHED: {
        ibv_qp &qp = *e->element.qp;
        acknowledge(qp.mutex, qp.cond, qp.events_completed, 1);
        break;
    }
    default:
        break;
    }
}

static void await_acknowledged(pthread_mutex_t &mutex, pthread_cond_t &changed,
                               const uint32_t &completed, uint32_t taken)
{
    pthread_mutex_lock(&mutex);
    while (completed != taken) {
        pthread_cond_wait(&changed, &mutex);
    }
    pthread_mutex_unlock(&mutex);
}

// Protection domains, memory, address handles.

API ibv_pd *ibv_alloc_pd(ibv_context *context)
{
    static std::atomic<uint32_t> next{1};
    auto *pd = new ProtectionDomain();
    pd->verbs.context = context;
    pd->verbs.handle = next++;
    return &pd->verbs;
}

API int ibv_dealloc_pd(ibv_pd *pd)
{
    if (pd_of(pd).users.load() != 0) {
        return fail_code(EBUSY);
    }
    delete &pd_of(pd);
    return 0;
}

// A card pins the pages; here a look at both ends must do.
static bool readable(const void *address, size_t length)
{
    char byte;
    for (const size_t offset : {size_t{0}, length - 1}) {
        iovec local = {&byte, 1},
              remote = {const_cast<char *>(static_cast<const char *>(address)) + offset, 1};
        if (process_vm_readv(getpid(), &local, 1, &remote, 1, 0) != 1) {
            return false;
        }
    }
    return true;
}

// The place of a GPU allocation in this process' table: 1 + index; 0 if there is none left.
static uint32_t allocation_index(const Allocation &described)
{
    uint32_t free = 0;
    for (uint32_t i = 0; i < kAllocations; i++) {
        Allocation &a = self->allocation[i];
        if (a.id.load() == 0) {
            free = free == 0 ? i + 1 : free;
        } else if (a.base == described.base && a.buffer_id == described.buffer_id) {
            a.regions++;
            return i + 1;
        }
    }
    if (free != 0) {
        Allocation &a = self->allocation[free - 1];
        a.base = described.base;
        a.size = described.size;
        a.buffer_id = described.buffer_id;
        a.device = described.device;
        memcpy(a.uuid, described.uuid, sizeof(a.uuid));
        memcpy(a.handle, described.handle, sizeof(a.handle));
        a.regions = 1;
        a.id = ++fabric->allocation_id;
    }
    return free;
}

static ibv_mr *register_memory(ibv_pd *pd, uint64_t address, size_t length, uint64_t iova,
                               unsigned access, bool gpu)
{
    constexpr unsigned changes = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
    if (((access & changes) != 0 && (access & IBV_ACCESS_LOCAL_WRITE) == 0) ||
        (access & (IBV_ACCESS_MW_BIND | IBV_ACCESS_ON_DEMAND | IBV_ACCESS_ZERO_BASED)) != 0 ||
        address + length < address || iova + length < iova) {
        return fail_null<ibv_mr>(EINVAL);
    }
    if (!usable()) {
        return fail_null<ibv_mr>(ENODEV);
    }
    if (!gpu && length != 0 && !readable(reinterpret_cast<void *>(address), length)) {
        return fail_null<ibv_mr>(EFAULT);
    }
    Nic::Guard guard;
    uint32_t allocation = 0;
    if (gpu) {
        Allocation described = {};
        const int error = nic().gpu().describe(address, length, described);
        if (error != 0) {
            return fail_null<ibv_mr>(error);
        }
        allocation = allocation_index(described);
        if (allocation == 0) {
            return fail_null<ibv_mr>(ENOMEM);
        }
    }
    static uint32_t place = 0, generation = self->head.generation * 0x9e37u;
    for (uint32_t n = 0; n < kMrs; n++) {
        const uint32_t index = place++ % kMrs;
        Mr &shared = self->mr[index];
        if (shared.key.load() != 0) {
            continue;
        }
        constexpr uint32_t generations = (1ull << 32) / kMrs;
        if (++generation % generations == 0) {
            generation++; // a small key is surely wrong; UCX uses one as such
        }
        shared.users = 0;
        shared.pd = pd->handle;
        shared.access = access;
        shared.iova = iova;
        shared.length = length;
        shared.va = address;
        shared.allocation = allocation;
        shared.key = generation % generations * kMrs + index;
        auto *mr = new MemoryRegion();
        mr->verbs.context = pd->context;
        mr->verbs.pd = pd;
        mr->verbs.addr = reinterpret_cast<void *>(address);
        mr->verbs.length = length;
        mr->verbs.handle = index;
        mr->verbs.lkey = mr->verbs.rkey = shared.key;
        mr->shared = &shared;
        pd_of(pd).users++;
        return &mr->verbs;
    }
    return fail_null<ibv_mr>(ENOMEM);
}

API ibv_mr *ibv_reg_mr_iova2(ibv_pd *pd, void *address, size_t length, uint64_t iova,
                             unsigned access)
{
    return register_memory(pd, reinterpret_cast<uintptr_t>(address), length, iova, access, false);
}

API ibv_mr *ibv_reg_mr(ibv_pd *pd, void *address, size_t length, int access)
{
    return ibv_reg_mr_iova2(pd, address, length, reinterpret_cast<uintptr_t>(address),
                            static_cast<unsigned>(access));
}

API ibv_mr *ibv_reg_mr_iova(ibv_pd *pd, void *address, size_t length, uint64_t iova, int access)
{
    return ibv_reg_mr_iova2(pd, address, length, iova, static_cast<unsigned>(access));
}

// UCX asks with descriptor -1 whether this exists, and takes EBADF for yes. It then gives the CUDA
// address as `iova`, so that the descriptor itself need not be mapped.
API ibv_mr *ibv_reg_dmabuf_mr(ibv_pd *pd, uint64_t, size_t length, uint64_t iova, int fd,
                              int access)
{
    if (fcntl(fd, F_GETFD) < 0) {
        return fail_null<ibv_mr>(EBADF);
    }
    return register_memory(pd, iova, length, iova, static_cast<unsigned>(access), true);
}

API int ibv_dereg_mr(ibv_mr *mr)
{
    auto *m = reinterpret_cast<MemoryRegion *>(mr);
    if (!usable()) {
        return fail_code(ENODEV);
    }
    Nic::Guard guard;
    m->shared->key = 0;
    await_visitors();
    if (const uint32_t allocation = m->shared->allocation) {
        // copies that are under way; a peer that was killed there does not come back
        for (const uint64_t end = now_ns() + 1000000000; m->shared->users != 0 && now_ns() < end;) {
            usleep(20);
        }
        Allocation &a = self->allocation[allocation - 1];
        if (--a.regions == 0) {
            a.id = 0;
            fabric->allocations_gone.fetch_add(1);
            for (Slot &slot : fabric->slot) {
                if (slot.head.pid.load() != 0) {
                    ring(slot);
                }
            }
        }
    }
    pd_of(mr->pd).users--;
    delete m;
    return 0;
}

API int ibv_rereg_mr(ibv_mr *, int, ibv_pd *, void *, size_t, int)
{
    return fail_code(EOPNOTSUPP);
}

API ibv_ah *ibv_create_ah(ibv_pd *pd, ibv_ah_attr *attr)
{
    if (attr->port_num != 1) {
        return fail_null<ibv_ah>(EINVAL);
    }
    auto *ah = new AddressHandle();
    ah->verbs.context = pd->context;
    ah->verbs.pd = pd;
    ah->attr = *attr;
    ah->lid = destination(*attr);
    nic().add_peer(ah->lid);
    pd_of(pd).users++;
    return &ah->verbs;
}

API int ibv_destroy_ah(ibv_ah *ah)
{
    pd_of(ah->pd).users--;
    delete reinterpret_cast<AddressHandle *>(ah);
    return 0;
}

API int ibv_init_ah_from_wc(ibv_context *, uint8_t port, ibv_wc *wc, ibv_grh *grh,
                            ibv_ah_attr *attr)
{
    memset(attr, 0, sizeof(*attr));
    attr->dlid = wc->slid;
    attr->port_num = port;
    if ((wc->wc_flags & IBV_WC_GRH) != 0) {
        attr->is_global = 1;
        attr->grh.dgid = grh->sgid;
    }
    return 0;
}

API ibv_ah *ibv_create_ah_from_wc(ibv_pd *pd, ibv_wc *wc, ibv_grh *grh, uint8_t port)
{
    ibv_ah_attr attr;
    ibv_init_ah_from_wc(pd->context, port, wc, grh, &attr);
    return ibv_create_ah(pd, &attr);
}

// Completion channels and queues.

API ibv_comp_channel *ibv_create_comp_channel(ibv_context *context)
{
    auto *channel = new CompletionChannel();
    channel->verbs.context = context;
    channel->verbs.fd = channel->events.fd();
    return &channel->verbs;
}

API int ibv_destroy_comp_channel(ibv_comp_channel *channel)
{
    auto *c = reinterpret_cast<CompletionChannel *>(channel);
    if (c->users.load() != 0) {
        return fail_code(EBUSY);
    }
    delete c;
    return 0;
}

API int ibv_get_cq_event(ibv_comp_channel *channel, ibv_cq **cq, void **context)
{
    auto *c = reinterpret_cast<CompletionChannel *>(channel);
    const int rc = c->events.pop(*cq, [](ibv_cq *taken) { cq_of(taken).events_taken++; });
    if (rc == 0) {
        *context = (*cq)->cq_context;
    }
    return rc;
}

API void ibv_ack_cq_events(ibv_cq *cq, unsigned count)
{
    acknowledge(cq->mutex, cq->cond, cq->comp_events_completed, count);
}

API ibv_cq *ibv_create_cq(ibv_context *context, int cqe, void *cq_context,
                          ibv_comp_channel *channel, int)
{
    if (cqe < 1 || static_cast<uint32_t>(cqe) > kMaxCqe) {
        return fail_null<ibv_cq>(EINVAL);
    }
    if (!usable()) {
        return fail_null<ibv_cq>(ENODEV);
    }
    Nic::Guard guard;
    static uint32_t place = 0; // an index is reused late
    for (uint32_t n = 0; n < kCqs; n++) {
        const uint32_t index = place++ % kCqs;
        Cq &shared = self->cq[index];
        if (shared.capacity != 0) {
            continue;
        }
        const uint32_t entries = next_power_of_two(static_cast<uint32_t>(cqe));
        if (!nic().arena().allocate(entries * sizeof(ibv_wc), shared.ring)) {
            break;
        }
        shared.head = shared.tail = 0;
        shared.armed = shared.fire = shared.overrun = 0;
        shared.told = shared.solicited = 0;
        shared.mask = entries - 1;
        shared.capacity = static_cast<uint32_t>(cqe);
        auto *c = new CompletionQueue();
        c->verbs.context = context;
        c->verbs.channel = channel;
        c->verbs.cq_context = cq_context;
        c->verbs.handle = index;
        c->verbs.cqe = cqe;
        pthread_mutex_init(&c->verbs.mutex, nullptr);
        pthread_cond_init(&c->verbs.cond, nullptr);
        c->shared = &shared;
        c->index = index;
        nic().add_cq(*c);
        if (channel != nullptr) {
            reinterpret_cast<CompletionChannel *>(channel)->users++;
            nic().add_channel_user(*c);
        }
        return &c->verbs;
    }
    return fail_null<ibv_cq>(ENOMEM);
}

API int ibv_resize_cq(ibv_cq *cq, int cqe)
{
    CompletionQueue &c = cq_of(cq);
    Cq &shared = *c.shared;
    if (cqe < 1 || static_cast<uint32_t>(cqe) > kMaxCqe) {
        return fail_code(EINVAL);
    }
    Nic::Guard guard;
    std::lock_guard<std::mutex> consumers(c.consumers);
    const uint32_t entries = next_power_of_two(static_cast<uint32_t>(cqe));
    uint64_t ring;
    if (!nic().arena().allocate(entries * sizeof(ibv_wc), ring)) {
        return fail_code(ENOMEM);
    }
    shared.lock.lock();
    const uint64_t old = shared.ring;
    const bool fits = shared.tail - shared.head <= static_cast<uint64_t>(cqe);
    if (fits) {
        const auto *from = reinterpret_cast<const ibv_wc *>(self->arena + old);
        auto *to = reinterpret_cast<ibv_wc *>(self->arena + ring);
        for (uint64_t i = shared.head; i < shared.tail; i++) {
            to[i & (entries - 1)] = from[i & shared.mask];
        }
        shared.ring = ring;
        shared.mask = entries - 1;
        shared.capacity = static_cast<uint32_t>(cqe);
        cq->cqe = cqe;
    }
    shared.lock.unlock();
    nic().arena().release(fits ? old : ring);
    return fits ? 0 : fail_code(EINVAL);
}

API int ibv_destroy_cq(ibv_cq *cq)
{
    CompletionQueue &c = cq_of(cq);
    if (!usable()) {
        return fail_code(ENODEV);
    }
    {
        Nic::Guard guard;
        if (c.users.load() != 0) {
            return fail_code(EBUSY);
        }
        nic().remove_cq(c);
        if (cq->channel != nullptr) {
            nic().remove_channel_user(c);
        }
    }
    if (cq->channel != nullptr) {
        auto *channel = reinterpret_cast<CompletionChannel *>(cq->channel);
        channel->events.purge([cq](ibv_cq *event) { return event == cq; });
        channel->users--;
    }
    context_of(cq->context)->events.purge([cq](const ibv_async_event &e) {
        return e.event_type == IBV_EVENT_CQ_ERR && e.element.cq == cq;
    });
    await_acknowledged(cq->mutex, cq->cond, cq->comp_events_completed, c.events_taken);
    await_acknowledged(cq->mutex, cq->cond, cq->async_events_completed, c.async_events_taken);
    {
        Nic::Guard guard;
        nic().arena().release(c.shared->ring);
        c.shared->capacity = 0;
    }
    delete &c;
    return 0;
}

// Shared receive queues.

API ibv_srq *ibv_create_srq(ibv_pd *pd, ibv_srq_init_attr *init)
{
    if (init->attr.max_wr == 0 || init->attr.max_wr > kMaxWr || init->attr.max_sge > kSge) {
        return fail_null<ibv_srq>(EINVAL);
    }
    if (!usable()) {
        return fail_null<ibv_srq>(ENODEV);
    }
    Nic::Guard guard;
    static uint32_t place = 0;
    for (uint32_t n = 0; n < kSrqs; n++) {
        const uint32_t index = kQps + place++ % kSrqs;
        if (self->rq[index].capacity != 0) {
            continue;
        }
        init->attr.max_sge = std::max(init->attr.max_sge, 1u);
        if (!init_rq(index, init->attr.max_wr, init->attr.max_sge)) {
            break;
        }
        auto *s = new SharedReceiveQueue();
        s->verbs.context = pd->context;
        s->verbs.srq_context = init->srq_context;
        s->verbs.pd = pd;
        s->verbs.handle = index;
        pthread_mutex_init(&s->verbs.mutex, nullptr);
        pthread_cond_init(&s->verbs.cond, nullptr);
        s->shared = &self->rq[index];
        s->index = index;
        pd_of(pd).users++;
        nic().add_srq(*s);
        return &s->verbs;
    }
    return fail_null<ibv_srq>(ENOMEM);
}

API int ibv_modify_srq(ibv_srq *srq, ibv_srq_attr *attr, int mask)
{
    Rq &rq = *srq_of(srq).shared;
    if ((mask & IBV_SRQ_MAX_WR) != 0) {
        return fail_code(EOPNOTSUPP);
    }
    if ((mask & IBV_SRQ_LIMIT) != 0) {
        if (attr->srq_limit >= rq.capacity) {
            return fail_code(EINVAL);
        }
        rq.lock.lock();
        // an armed limit that is reached already makes the event at once
        const bool reached = attr->srq_limit != 0 && rq.tail - rq.head < attr->srq_limit;
        rq.limit = reached ? 0 : attr->srq_limit;
        rq.limit_reached = reached ? 1 : 0;
        rq.lock.unlock();
        if (reached) {
            call_attention(*self, kAttentionSrqs);
        }
    }
    return 0;
}

API int ibv_query_srq(ibv_srq *srq, ibv_srq_attr *attr)
{
    const Rq &rq = *srq_of(srq).shared;
    *attr = {rq.capacity, rq.max_sge, rq.limit};
    return 0;
}

API int ibv_destroy_srq(ibv_srq *srq)
{
    SharedReceiveQueue &s = srq_of(srq);
    if (!usable()) {
        return fail_code(ENODEV);
    }
    {
        Nic::Guard guard;
        if (s.users.load() != 0) {
            return fail_code(EBUSY);
        }
        nic().remove_srq(s);
        nic().arena().release(s.shared->ring);
        s.shared->capacity = 0;
    }
    context_of(srq->context)->events.purge([srq](const ibv_async_event &e) {
        return e.event_type == IBV_EVENT_SRQ_LIMIT_REACHED && e.element.srq == srq;
    });
    await_acknowledged(srq->mutex, srq->cond, srq->events_completed, s.events_taken);
    pd_of(srq->pd).users--;
    delete &s;
    return 0;
}

// Queue pairs.

API ibv_qp *ibv_create_qp(ibv_pd *pd, ibv_qp_init_attr *init)
{
    if (init->qp_type != IBV_QPT_RC && init->qp_type != IBV_QPT_UD) {
        return fail_null<ibv_qp>(EOPNOTSUPP);
    }
    ibv_qp_cap &cap = init->cap;
    if (init->send_cq == nullptr || init->recv_cq == nullptr || cap.max_inline_data > kMaxInline ||
        cap.max_send_sge > kSge || cap.max_recv_sge > kSge || cap.max_send_wr > kMaxWr ||
        cap.max_recv_wr > kMaxWr) {
        return fail_null<ibv_qp>(EINVAL);
    }
    if (!usable()) {
        return fail_null<ibv_qp>(ENODEV);
    }
    cap.max_send_sge = std::max(cap.max_send_sge, 1u);
    cap.max_send_wr = std::max(cap.max_send_wr, 1u);
    if (init->srq != nullptr) {
        cap.max_recv_wr = cap.max_recv_sge = 0;
    } else {
        cap.max_recv_sge = std::max(cap.max_recv_sge, 1u);
    }
    // what the ring has room for in any case
    const uint32_t room =
            std::max<uint32_t>(std::max<uint32_t>(cap.max_inline_data, 64),
                               cap.max_send_sge * static_cast<uint32_t>(sizeof(ibv_sge)));
    cap.max_inline_data = room / 8 * 8;

    Nic::Guard guard;
    static uint32_t place = 0, generation = self->head.generation * 0x9e37u;
    static uint64_t serial = 0;
    for (uint32_t n = 0; n < kQps; n++) {
        const uint32_t index = place++ % kQps;
        Qp &shared = self->qp[index];
        if (shared.qpn.load() != 0) {
            continue;
        }
        if (init->srq == nullptr && !init_rq(index, cap.max_recv_wr, cap.max_recv_sge)) {
            break;
        }
        auto *q = new QueuePair();
        q->context = context_of(pd->context);
        q->device = q->context->device;
        q->index = index;
        q->serial = serial++;
        q->shared = &shared;
        q->send_cq = &cq_of(init->send_cq);
        q->receive_cq = &cq_of(init->recv_cq);
        q->srq = init->srq == nullptr ? nullptr : &srq_of(init->srq);
        q->init = *init;
        q->stride = (sizeof(SendWqe) + room + 63) / 64 * 64;
        q->mask = next_power_of_two(cap.max_send_wr) - 1;
        q->ring = std::make_unique<uint8_t[]>((q->mask + 1) * q->stride);
        q->wake = kNever;
        ibv_qp &v = q->verbs;
        v.context = pd->context;
        v.qp_context = init->qp_context;
        v.pd = pd;
        v.send_cq = init->send_cq;
        v.recv_cq = init->recv_cq;
        v.srq = init->srq;
        v.handle = index;
        // the generation makes a number that somebody remembers invalid when the QP is gone; 0 and
        // 1 are not for everybody, and 24 bits are all there are
        constexpr uint32_t generations = (1u << 24) / kQps;
        if (++generation % generations == 0) {
            generation++;
        }
        v.qp_num = generation % generations * kQps + index;
        v.state = IBV_QPS_RESET;
        v.qp_type = init->qp_type;
        pthread_mutex_init(&v.mutex, nullptr);
        pthread_cond_init(&v.cond, nullptr);
        shared.type = init->qp_type;
        shared.device = static_cast<uint32_t>(q->device);
        shared.pd = pd->handle;
        shared.access = shared.qkey = shared.min_rnr_timer = 0;
        shared.dest_qpn = shared.dest_lid = 0;
        shared.receive_cq = q->receive_cq->index;
        shared.rq = q->srq == nullptr ? index : q->srq->index;
        shared.receiving = 0;
        shared.event = 0;
        shared.state = IBV_QPS_RESET;
        shared.qpn = v.qp_num;
        pd_of(pd).users++;
        q->send_cq->users++;
        q->receive_cq->users++;
        if (q->srq != nullptr) {
            q->srq->users++;
        }
        nic().add(*q);
        return &v;
    }
    return fail_null<ibv_qp>(ENOMEM);
}

API int ibv_destroy_qp(ibv_qp *qp)
{
    QueuePair &q = qp_of(qp);
    if (!usable()) {
        return fail_code(ENODEV);
    }
    {
        Nic::Guard guard;
        nic().remove(q);
        q.shared->qpn = 0;
        await_visitors();
        clean_cq(*q.send_cq, qp->qp_num);
        clean_cq(*q.receive_cq, qp->qp_num);
        if (q.srq == nullptr) {
            nic().arena().release(self->rq[q.index].ring);
        }
    }
    q.context->events.purge([qp](const ibv_async_event &e) {
        return (e.event_type <= IBV_EVENT_PATH_MIG_ERR && e.event_type != IBV_EVENT_CQ_ERR &&
                e.element.qp == qp) ||
               (e.event_type == IBV_EVENT_QP_LAST_WQE_REACHED && e.element.qp == qp);
    });
    await_acknowledged(qp->mutex, qp->cond, qp->events_completed, q.events_taken);
    pd_of(qp->pd).users--;
    q.send_cq->users--;
    q.receive_cq->users--;
    if (q.srq != nullptr) {
        q.srq->users--;
    }
    delete &q;
    return 0;
}

API int ibv_modify_qp(ibv_qp *qp, ibv_qp_attr *attr, int mask)
{
    QueuePair &q = qp_of(qp);
    if (!usable()) {
        return fail_code(ENODEV);
    }
    {
        Nic::Guard guard;
        Qp &shared = *q.shared;
        const auto from = static_cast<ibv_qp_state>(shared.state.load());
        const ibv_qp_state to = (mask & IBV_QP_STATE) != 0 ? attr->qp_state : from;
        if (!transition_allowed(qp->qp_type, from, to, mask) ||
            ((mask & IBV_QP_CUR_STATE) != 0 && attr->cur_qp_state != from) ||
            ((mask & IBV_QP_PORT) != 0 && attr->port_num != 1) ||
            ((mask & IBV_QP_PKEY_INDEX) != 0 && attr->pkey_index != 0) ||
            ((mask & IBV_QP_PATH_MTU) != 0 &&
             (attr->path_mtu < IBV_MTU_256 || attr->path_mtu > IBV_MTU_4096)) ||
            ((mask & IBV_QP_MAX_QP_RD_ATOMIC) != 0 && attr->max_rd_atomic > kMaxReads) ||
            ((mask & IBV_QP_MAX_DEST_RD_ATOMIC) != 0 && attr->max_dest_rd_atomic > kMaxReads) ||
            ((mask & (IBV_QP_RNR_RETRY)) != 0 && attr->rnr_retry > 7) ||
            ((mask & IBV_QP_RETRY_CNT) != 0 && attr->retry_cnt > 7) ||
            ((mask & IBV_QP_TIMEOUT) != 0 && attr->timeout > 31)) {
            return fail_code(EINVAL);
        }
        ibv_qp_attr &a = q.attr;
        if ((mask & IBV_QP_PKEY_INDEX) != 0) {
            a.pkey_index = attr->pkey_index;
        }
        if ((mask & IBV_QP_PORT) != 0) {
            a.port_num = attr->port_num;
        }
        if ((mask & IBV_QP_ACCESS_FLAGS) != 0) {
            a.qp_access_flags = attr->qp_access_flags;
            shared.access = attr->qp_access_flags;
        }
        if ((mask & IBV_QP_QKEY) != 0) {
            a.qkey = shared.qkey = attr->qkey;
        }
        if ((mask & IBV_QP_AV) != 0) {
            a.ah_attr = attr->ah_attr;
            shared.dest_lid = destination(attr->ah_attr);
            nic().add_peer(shared.dest_lid);
        }
        if ((mask & IBV_QP_PATH_MTU) != 0) {
            a.path_mtu = attr->path_mtu;
        }
        if ((mask & IBV_QP_DEST_QPN) != 0) {
            a.dest_qp_num = shared.dest_qpn = attr->dest_qp_num;
        }
        if ((mask & IBV_QP_TIMEOUT) != 0) {
            a.timeout = attr->timeout;
        }
        if ((mask & IBV_QP_RETRY_CNT) != 0) {
            a.retry_cnt = attr->retry_cnt;
        }
        if ((mask & IBV_QP_RNR_RETRY) != 0) {
            a.rnr_retry = attr->rnr_retry;
            q.rnr_left = attr->rnr_retry;
        }
        if ((mask & IBV_QP_MIN_RNR_TIMER) != 0) {
            a.min_rnr_timer = attr->min_rnr_timer;
            shared.min_rnr_timer = attr->min_rnr_timer;
        }
        if ((mask & IBV_QP_MAX_QP_RD_ATOMIC) != 0) {
            a.max_rd_atomic = attr->max_rd_atomic;
        }
        if ((mask & IBV_QP_MAX_DEST_RD_ATOMIC) != 0) {
            a.max_dest_rd_atomic = attr->max_dest_rd_atomic;
        }
        if ((mask & IBV_QP_SQ_PSN) != 0) {
            a.sq_psn = attr->sq_psn;
        }
        if ((mask & IBV_QP_RQ_PSN) != 0) {
            a.rq_psn = attr->rq_psn;
        }
        if (to == IBV_QPS_RESET) {
            nic().reset(q);
            await_visitors();
            if (q.srq == nullptr) {
                Rq &rq = self->rq[q.index];
                rq.lock.lock();
                rq.head.store(rq.tail.load());
                rq.lock.unlock();
            }
            clean_cq(*q.send_cq, qp->qp_num);
            clean_cq(*q.receive_cq, qp->qp_num);
        } else if (to == IBV_QPS_ERR) {
            shared.state = to;
            await_visitors(); // no completion of a message comes after the flush
            q.flushed = from == IBV_QPS_ERR && q.flushed;
        } else {
            shared.state = to;
        }
        qp->state = to;
    }
    if ((mask & IBV_QP_STATE) != 0) {
        nic().kick(q, now_ns()); // there may be something to send, or to flush
    }
    return 0;
}

API int ibv_query_qp(ibv_qp *qp, ibv_qp_attr *attr, int, ibv_qp_init_attr *init)
{
    QueuePair &q = qp_of(qp);
    if (!usable()) {
        return fail_code(ENODEV);
    }
    Nic::Guard guard;
    *attr = q.attr;
    attr->qp_state = attr->cur_qp_state = static_cast<ibv_qp_state>(q.shared->state.load());
    attr->cap = q.init.cap;
    qp->state = attr->qp_state;
    if (init != nullptr) {
        *init = q.init;
    }
    return 0;
}

API int ibv_query_qp_data_in_order(ibv_qp *, enum ibv_wr_opcode, uint32_t)
{
    return 0;
}

API struct ibv_qp_ex *ibv_qp_to_qp_ex(ibv_qp *)
{
    return fail_null<struct ibv_qp_ex>(EOPNOTSUPP);
}

API int ibv_query_ece(ibv_qp *, ibv_ece *)
{
    return fail_code(EOPNOTSUPP);
}

API int ibv_set_ece(ibv_qp *, ibv_ece *)
{
    return fail_code(EOPNOTSUPP);
}

API int ibv_attach_mcast(ibv_qp *, const ibv_gid *, uint16_t)
{
    return fail_code(EOPNOTSUPP);
}

API int ibv_detach_mcast(ibv_qp *, const ibv_gid *, uint16_t)
{
    return fail_code(EOPNOTSUPP);
}

API ibv_context *ibv_import_device(int)
{
    return fail_null<ibv_context>(EOPNOTSUPP);
}

API ibv_pd *ibv_import_pd(ibv_context *, uint32_t)
{
    return fail_null<ibv_pd>(EOPNOTSUPP);
}

API void ibv_unimport_pd(ibv_pd *) {}

API ibv_mr *ibv_import_mr(ibv_pd *, uint32_t)
{
    return fail_null<ibv_mr>(EOPNOTSUPP);
}

API void ibv_unimport_mr(ibv_mr *) {}

API ibv_dm *ibv_import_dm(ibv_context *, uint32_t)
{
    return fail_null<ibv_dm>(EOPNOTSUPP);
}

API void ibv_unimport_dm(ibv_dm *) {}

API int ibv_resolve_eth_l2_from_gid(ibv_context *, ibv_ah_attr *, uint8_t[6], uint16_t *)
{
    return fail_code(EOPNOTSUPP);
}
