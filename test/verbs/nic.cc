// SPDX-License-Identifier: BSD-3-Clause
// The device: its thread, and the execution of send queues.
#include "nic.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace swverbs {

namespace {

// A piece is given to the wire so long before the link is free for it, so that a stream of small
// messages does not need a thread's attention for each. A message that another QP posts then may
// wait so long behind them.
constexpr uint64_t kLaunchAhead = 20000;
// How long the device's own thread leaves due work to an application that polls; see Nic::grace().
// A thread's wake-up by timer costs 10 to 40 us of a processor where this was made (two virtual
// ones): the thread must not come much more often than this. Who waits for the work asks earlier,
// see Nic::watch_peers().
constexpr uint64_t kGrace = 1000000, kGracePerProcess = 250000, kLongestGrace = 20000000;
// A peer that is so late is reminded, and looked at so often.
constexpr uint64_t kOverdue = 20000, kWatchInterval = 4000;
// An application that let due work wait for so long is not trusted for a while, which doubles if it
// does so again.
constexpr uint64_t kDistrust = 4000000, kLongestDistrust = 256000000;
// So long after the last post does the thread wake by itself instead of being woken.
constexpr uint64_t kLinger = 5000000;
// A shorter wait than this is not worth a sleep.
constexpr uint64_t kSpin = 10000;
// So long is the lock held in one go.
constexpr uint64_t kHelpTime = 30000, kThreadTime = 200000;
// How often an unanswered request is tried again, and a GPU copy looked at.
constexpr uint64_t kRetryInterval = 500000, kCopyInterval = 2000;
constexpr size_t kGrh = 40; // bytes before the payload of a UD message

// The priority of the thread that waits for the lock must reach a holder that was preempted.
class EngineLock {
public:
    EngineLock()
    {
        pthread_mutexattr_t attributes;
        pthread_mutexattr_init(&attributes);
        pthread_mutexattr_setprotocol(&attributes, PTHREAD_PRIO_INHERIT);
        pthread_mutex_init(&m_mutex, &attributes);
        pthread_mutexattr_destroy(&attributes);
    }
    void lock() { pthread_mutex_lock(&m_mutex); }
    bool try_lock() { return pthread_mutex_trylock(&m_mutex) == 0; }
    void unlock() { pthread_mutex_unlock(&m_mutex); }

private:
    pthread_mutex_t m_mutex;
};

EngineLock &engine_lock()
{
    static EngineLock *const lock = new EngineLock(); // outlives everything
    return *lock;
}

uint64_t later(uint64_t time, uint64_t by)
{
    return time > kNever - by ? kNever : time + by;
}

// The RNR NAK timer field of the InfiniBand specification, in units of 10 us.
uint64_t rnr_timer(uint32_t code)
{
    static constexpr uint32_t table[32] = {65536, 1,    2,    3,     4,     6,     8,     12,
                                           16,    24,   32,   48,    64,    96,    128,   192,
                                           256,   384,  512,  768,   1024,  1536,  2048,  3072,
                                           4096,  6144, 8192, 12288, 16384, 24576, 32768, 49152};
    return table[code & 31] * 10000ull;
}

bool receives(uint32_t state)
{
    return state == IBV_QPS_RTR || state == IBV_QPS_RTS || state == IBV_QPS_SQD;
}

} // namespace

// The other end of a QP, as it is now.
struct Nic::Peer {
    Slot *slot;
    Port *port;
    Qp *qp;
};

Nic &nic()
{
    static Nic *const device = new Nic();
    return *device;
}

void push_completion(Slot &slot, uint32_t index, const ibv_wc &wc, bool solicited)
{
    Cq &cq = slot.cq[index];
    cq.lock.lock();
    const uint64_t tail = cq.tail.load(std::memory_order_relaxed);
    if (tail - cq.head.load(std::memory_order_acquire) >= cq.capacity) {
        cq.lock.unlock();
        cq.overrun = 1;
        call_attention(slot, kAttentionChannels);
        return;
    }
    reinterpret_cast<ibv_wc *>(slot.arena + cq.ring)[tail & cq.mask] = wc;
    cq.tail.store(tail + 1, std::memory_order_release);
    solicited |= wc.status != IBV_WC_SUCCESS;
    if (solicited) {
        cq.solicited = tail + 1;
    }
    const uint32_t armed = cq.armed.load(std::memory_order_relaxed);
    const bool fire = armed == 1 || (armed == 2 && solicited);
    if (fire) {
        cq.armed = 0;
        cq.fire = 1;
        cq.told = tail + 1;
    }
    cq.lock.unlock();
    if (fire) {
        call_attention(slot, kAttentionChannels);
    }
}

// Starting, stopping, waking.

static pthread_once_t start_once = PTHREAD_ONCE_INIT;

void stop_device();

bool Nic::start()
{
    settings();
    pthread_once(&start_once, [] {
        Nic &n = nic();
        n.m_pid = static_cast<uint32_t>(getpid());
        engine_lock();
        if (pthread_create(&n.m_thread, nullptr, thread, &n) != 0) {
            n.m_state = -1;
            return;
        }
        while (n.m_state.load() == 0) {
            usleep(100);
        }
        pthread_atfork(nullptr, nullptr, [] { nic().m_state = -1; });
        atexit(stop_device);
    });
    if (m_state.load() < 0 && m_pid != static_cast<uint32_t>(getpid())) {
        fprintf(stderr,
                "swverbs[%d]: no device: the process was forked from one that uses verbs "
                "(exec makes it usable)\n",
                getpid());
    }
    return m_state.load() > 0;
}

void stop_device()
{
    Nic &n = nic();
    if (n.m_state.load() <= 0 || n.m_pid != static_cast<uint32_t>(getpid())) {
        return;
    }
    n.m_stop = true;
    ring(*self);
    // exit() may have been called by a signal's handler, in the middle of something
    timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += 2;
    pthread_timedjoin_np(n.m_thread, nullptr, &end);
}

void *Nic::thread(void *device)
{
    auto &n = *static_cast<Nic *>(device);
    // peers copy from and to this process; where Yama restricts that, it must be allowed
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
    prctl(PR_SET_NAME, "swverbs");
    prctl(PR_SET_TIMERSLACK, 1); // the usual 50 us would be most of the latency
    sched_param priority = {};
    priority.sched_priority = 1;
    pthread_setschedparam(pthread_self(), SCHED_RR, &priority); // where allowed
    if (!join_fabric()) {
        n.m_state = -1;
        return nullptr;
    }
    n.m_arena.reset();
    n.m_faults.start(now_ns());
    n.m_due = n.m_faults.next_time();
    n.m_state = 1;
    n.work();
    n.finish();
    return nullptr;
}

void Nic::finish()
{
    std::lock_guard<EngineLock> guard(engine_lock());
    m_state = -1;
    if (settings().log) {
        print_statistics();
    }
    leave_fabric();
}

void Nic::print_statistics()
{
    static const char *const names[] = {"write", "write_imm", "send",     "send_imm",
                                        "read",  "cmp_swap",  "fetch_add"};
    for (unsigned d = 0; d < settings().devices; d++) {
        const Port &port = self->head.port[d];
        char line[512];
        int length = snprintf(line, sizeof(line),
                              "swverbs[%d]: swverbs%u sent %llu bytes, received %llu; operations:",
                              getpid(), d, static_cast<unsigned long long>(port.xmit_data.load()),
                              static_cast<unsigned long long>(port.rcv_data.load()));
        for (unsigned i = 0; i < std::size(names); i++) {
            if (m_operations[d][i] != 0) {
                length += snprintf(line + length, sizeof(line) - static_cast<size_t>(length),
                                   " %s %llu", names[i],
                                   static_cast<unsigned long long>(m_operations[d][i]));
            }
        }
        fprintf(stderr, "%s; thread: sleeps %llu, rounds %llu, by others %llu\n", line,
                static_cast<unsigned long long>(m_sleeps),
                static_cast<unsigned long long>(m_worked),
                static_cast<unsigned long long>(m_helped));
    }
}

// How long due work is left to the application: not at all if it does not poll, or polls for other
// things than those that are due. Where many processes share the processors, their threads must not
// use them up by looking whether they are needed.
uint64_t Nic::grace(uint64_t now) const
{
    if (now < m_trusted_from.load(std::memory_order_relaxed)) {
        return 0;
    }
    const uint64_t population = fabric->population.load(std::memory_order_relaxed);
    const uint64_t time = std::min(kLongestGrace, std::max(kGrace, kGracePerProcess * population));
    return now - m_last_help.load(std::memory_order_relaxed) < time ? time : 0;
}

void Nic::work()
{
    while (!m_stop.load()) {
        const uint32_t bell = self->head.doorbell.load();
        const uint64_t now = now_ns();
        const uint64_t wait = grace(now);
        uint64_t target = std::min(later(m_due.load(), wait), m_device_due.load());
        if (now >= target || m_kicked.load() != nullptr || self->head.attention.load() != 0) {
            engine_lock().lock();
            if (wait != 0 && m_due.load() <= now - wait) {
                const bool again = now < m_trusted_from.load() + 4 * m_distrust;
                m_distrust = again ? std::min(2 * m_distrust, kLongestDistrust) : kDistrust;
                m_trusted_from = now + m_distrust;
            }
            m_worked++;
            run(true);
            engine_lock().unlock();
            continue;
        }
        if (wait != 0 && now - m_last_post.load() < kLinger) {
            target = std::min(target, now + wait);
        }
        if ((wait == 0 || target == m_device_due.load()) && target - now < kSpin) {
            while (now_ns() < target && self->head.doorbell.load() == bell) {
                relax();
            }
            continue;
        }
        m_sleeping_until = target;
        self->head.sleeping = 1;
        // whoever adds work after this looks at the two
        if (m_kicked.load() == nullptr && self->head.attention.load() == 0 &&
            std::min(later(m_due.load(), wait), m_device_due.load()) >= target) {
            timespec timeout = {static_cast<time_t>((target - now) / 1000000000),
                                static_cast<long>((target - now) % 1000000000)};
            syscall(SYS_futex, &self->head.doorbell, FUTEX_WAIT, bell,
                    target == kNever ? nullptr : &timeout, nullptr, 0);
            m_sleeps++;
        }
        self->head.sleeping = 0;
        m_sleeping_until = 0;
    }
}

void Nic::wake_thread_if_needed()
{
    const uint64_t until = m_sleeping_until.load();
    if (until == 0) {
        return;
    }
    const uint64_t due = m_due.load(), device_due = m_device_due.load();
    if (device_due < until || (due < until && later(due, grace(now_ns())) < until)) {
        ring(*self);
    }
}

Nic::Guard::Guard()
{
    engine_lock().lock();
}

Nic::Guard::~Guard()
{
    engine_lock().unlock();
    if (nic().m_kicked.load() != nullptr || self->head.attention.load() != 0) {
        ring(*self);
    }
}

void Nic::kick(QueuePair &q, uint64_t now)
{
    if (!q.kicked.exchange(true)) {
        QueuePair *first = m_kicked.load();
        do {
            q.next_kicked = first;
        } while (!m_kicked.compare_exchange_weak(first, &q));
    }
    m_last_post.store(now, std::memory_order_relaxed);
    if (m_state.load(std::memory_order_relaxed) <= 0) {
        return;
    }
    // who holds the lock looks at what was kicked after giving it up
    while (m_kicked.load() != nullptr && engine_lock().try_lock()) {
        m_helped++;
        run(false);
        engine_lock().unlock();
        wake_thread_if_needed();
    }
}

void Nic::help()
{
    const uint64_t now = now_ns();
    m_last_help.store(now, std::memory_order_relaxed);
    if (now < m_due.load() && m_kicked.load() == nullptr &&
        self->head.attention.load(std::memory_order_relaxed) == 0) {
        watch_peers(now);
        return;
    }
    if (m_state.load(std::memory_order_relaxed) <= 0) {
        return;
    }
    bool ran = false;
    do {
        if (!engine_lock().try_lock()) {
            break;
        }
        m_helped++;
        run(false);
        engine_lock().unlock();
        ran = true;
    } while (m_kicked.load() != nullptr);
    if (ran) {
        wake_thread_if_needed();
    }
}

// The peers' devices serve this process. One whose application neither polls nor gets a processor
// is asked to use its own thread.
void Nic::watch_peers(uint64_t now)
{
    if (now - m_last_watch.load(std::memory_order_relaxed) < kWatchInterval) {
        return;
    }
    m_last_watch.store(now, std::memory_order_relaxed);
    for (unsigned word = 0; word < m_peers.size(); word++) {
        for (uint64_t bits = m_peers[word].load(std::memory_order_relaxed); bits != 0;
             bits &= bits - 1) {
            Slot &slot = fabric->slot[word * 64 + static_cast<unsigned>(__builtin_ctzll(bits))];
            if (slot.head.due.load(std::memory_order_relaxed) < now - kOverdue &&
                (slot.head.attention.load(std::memory_order_relaxed) & kAttentionOverdue) == 0) {
                call_attention(slot, kAttentionOverdue);
            }
        }
    }
}

void Nic::add_peer(uint32_t lid)
{
    if (lid != 0) {
        const uint32_t index = (lid - 1) / kDevices % kSlots;
        m_peers[index / 64].fetch_or(1ull << (index % 64));
    }
}

// The application is about to wait for an event: it does not poll any more.
void Nic::stop_helping()
{
    m_last_help.store(0, std::memory_order_relaxed);
    wake_thread_if_needed();
}

void Nic::add(QueuePair &q)
{
    m_qps[q.index] = &q;
}

void Nic::remove(QueuePair &q)
{
    reset(q);
    m_qps[q.index] = nullptr;
}

void Nic::reset(QueuePair &q)
{
    q.shared->state = IBV_QPS_RESET;
    while (q.copies != 0) { // only the device's own thread can tell when they are over
        q.wake = 0;
        m_device_due = 0;
        engine_lock().unlock();
        ring(*self);
        usleep(50);
        engine_lock().lock();
    }
    take_kicked();
    std::erase(m_active, &q);
    q.active = false;
    q.out.clear();
    q.in.clear();
    q.next = q.tail.load();
    q.head = q.next;
    q.reads = 0;
    q.blocked = q.failed = q.flushed = q.last_wqe_reached = q.device_only = false;
    q.hold = q.deadline = q.released = q.last_out = q.last_in = 0;
    q.shared->receiving = 0;
    q.has_datagram = false;
}

bool Nic::port_up(int device) const
{
    return self->head.port[device].down_until.load() == 0;
}

void Nic::take_kicked()
{
    for (QueuePair *q = m_kicked.exchange(nullptr); q != nullptr;) {
        QueuePair *next = q->next_kicked;
        q->kicked = false; // from here on a post kicks again
        q->wake = 0;
        if (!q->active) {
            q->active = true;
            m_active.push_back(q);
        }
        q = next;
    }
}

// What peers ask for: events, and the flush of a QP that they moved to the error state.
void Nic::attend()
{
    const uint32_t why = self->head.attention.exchange(0);
    if ((why & kAttentionQps) != 0) {
        for (QueuePair *q : m_qps) {
            if (q != nullptr && !q->flushed && q->shared->state.load() == IBV_QPS_ERR) {
                q->wake = 0;
                if (!q->active) {
                    q->active = true;
                    m_active.push_back(q);
                }
            }
        }
    }
    if ((why & kAttentionChannels) != 0) {
        for (CompletionQueue *cq : m_channel_cqs) {
            if (cq->shared->fire.exchange(0) != 0) {
                reinterpret_cast<CompletionChannel *>(cq->verbs.channel)->events.push(&cq->verbs);
            }
        }
        for (CompletionQueue *cq : m_cqs) {
            if (cq != nullptr && cq->shared->overrun.load() == 1) {
                cq->shared->overrun = 2; // one event
                fprintf(stderr, "swverbs[%d]: completion queue overrun (%u entries)\n", getpid(),
                        cq->shared->capacity);
                ibv_async_event event = {};
                event.event_type = IBV_EVENT_CQ_ERR;
                event.element.cq = &cq->verbs;
                context_of(cq->verbs.context)->events.push(event);
            }
        }
    }
    if ((why & kAttentionSrqs) != 0) {
        for (SharedReceiveQueue *srq : m_srqs) {
            if (srq->shared->limit_reached.exchange(0) != 0) {
                ibv_async_event event = {};
                event.event_type = IBV_EVENT_SRQ_LIMIT_REACHED;
                event.element.srq = &srq->verbs;
                context_of(srq->verbs.context)->events.push(event);
            }
        }
    }
}

void Nic::port_event(int device, ibv_event_type type)
{
    for (Context *context : m_contexts) {
        if (context->device == device) {
            ibv_async_event event = {};
            event.event_type = type;
            event.element.port_num = 1;
            context->events.push(event);
        }
    }
}

void Nic::apply_faults(uint64_t now)
{
    Fault fault;
    while (m_faults.take(now, fault)) {
        if (settings().log) {
            fprintf(stderr, "swverbs[%d]: fault %d at %.6f s\n", getpid(),
                    static_cast<int>(fault.kind), static_cast<double>(now) * 1e-9);
        }
        for (unsigned d = 0; d < settings().devices; d++) {
            Port &port = self->head.port[d];
            const bool all = fault.trigger == FaultTrigger::time;
            if (!all && static_cast<int>(d) != m_fault_device &&
                fault.kind != FaultKind::peer_gone) {
                continue;
            }
            switch (fault.kind) {
            case FaultKind::link_down:
                port.down_until = later(now, fault.duration);
                m_down[d] = true;
                port_event(static_cast<int>(d), IBV_EVENT_PORT_ERR);
                break;
            case FaultKind::stall:
                port.stalled_until = later(now, fault.duration);
                break;
            case FaultKind::peer_gone:
                port.lid = 0;
                break;
            case FaultKind::error:
                m_injected = fault.status;
                break;
            }
        }
    }
    for (unsigned d = 0; d < settings().devices; d++) {
        Port &port = self->head.port[d];
        if (m_down[d] && now >= port.down_until.load()) {
            port.down_until = 0;
            m_down[d] = false;
            port_event(static_cast<int>(d), IBV_EVENT_PORT_ACTIVE);
        }
    }
}

// Completions.

void Nic::complete(QueuePair &q, SendWqe &w)
{
    // in the order of ibv_wr_opcode
    static constexpr ibv_wc_opcode opcodes[] = {
            IBV_WC_RDMA_WRITE, IBV_WC_RDMA_WRITE, IBV_WC_SEND,     IBV_WC_SEND,
            IBV_WC_RDMA_READ,  IBV_WC_COMP_SWAP,  IBV_WC_FETCH_ADD};
    const bool visible = w.signaled || w.status != IBV_WC_SUCCESS;
    ibv_wc wc = {};
    wc.wr_id = w.wr_id;
    wc.status = w.status;
    wc.opcode = opcodes[w.opcode];
    wc.qp_num = q.verbs.qp_num;
    wc.byte_len = w.is_atomic() ? 8 : w.length;
    if (w.status == IBV_WC_SUCCESS) {
        m_operations[static_cast<size_t>(q.device)][w.opcode]++;
    }
    // before the completion: who sees that may post again at once
    q.head.store(q.head.load(std::memory_order_relaxed) + 1, std::memory_order_release);
    if (visible) {
        push_completion(*self, q.send_cq->index, wc, false);
    }
}

void Nic::raise(QueuePair &q, ibv_event_type type)
{
    ibv_async_event event = {};
    event.event_type = type;
    event.element.qp = &q.verbs;
    q.context->events.push(event);
}

// The QP is in the error state: completes all that is posted.
void Nic::flush(QueuePair &q)
{
    q.out.clear();
    q.in.clear();
    q.reads = 0;
    q.blocked = q.failed = false;
    const uint64_t tail = q.tail.load(std::memory_order_acquire);
    for (uint64_t i = q.head.load(); i < tail; i++) {
        SendWqe &w = q.wqe(i);
        if (!w.done) {
            w.status = IBV_WC_WR_FLUSH_ERR;
        }
        complete(q, w);
    }
    q.next = tail;
    ibv_wc wc = {};
    wc.status = IBV_WC_WR_FLUSH_ERR;
    wc.opcode = IBV_WC_RECV;
    wc.qp_num = q.verbs.qp_num;
    if (q.shared->receiving.exchange(0) != 0) {
        wc.wr_id = q.shared->current.wr_id;
        push_completion(*self, q.receive_cq->index, wc, false);
    }
    if (q.srq == nullptr) {
        Rq &rq = self->rq[q.index];
        rq.lock.lock();
        while (rq.head.load() < rq.tail.load()) {
            wc.wr_id = reinterpret_cast<Receive *>(self->arena + rq.ring +
                                                   (rq.head.load() & rq.mask) * rq.stride)
                               ->wr_id;
            rq.head.fetch_add(1);
            push_completion(*self, q.receive_cq->index, wc, false);
        }
        rq.lock.unlock();
    }
    q.flushed = true;
    if (const uint32_t event = q.shared->event.exchange(0)) {
        raise(q, static_cast<ibv_event_type>(event - 1));
    }
    if (q.srq != nullptr && !q.last_wqe_reached) {
        q.last_wqe_reached = true;
        raise(q, IBV_EVENT_QP_LAST_WQE_REACHED);
    }
}

void Nic::fail(QueuePair &q, SendWqe &w, ibv_wc_status status)
{
    if (settings().log) {
        fprintf(stderr,
                "swverbs[%d]: QP 0x%x to lid %u QP 0x%x: status %d, opcode %d, %u bytes, remote "
                "address 0x%llx, rkey 0x%x\n",
                getpid(), q.verbs.qp_num, q.shared->dest_lid, q.shared->dest_qpn, status, w.opcode,
                w.length, static_cast<unsigned long long>(w.remote_address), w.rkey);
    }
    // the QP goes to the error state when this request's turn to complete comes, see step()
    const bool answered = status == IBV_WC_REM_ACCESS_ERR || status == IBV_WC_REM_INV_REQ_ERR ||
                          status == IBV_WC_REM_OP_ERR || status == IBV_WC_RNR_RETRY_EXC_ERR;
    w.status = status;
    w.done = true;
    w.done_at = now_ns() + (answered ? settings().latency : 0);
    q.failed = true;
}

// Requests from a failed one on come to nothing; READs before it are still answered.
void Nic::drop_after_failure(QueuePair &q)
{
    uint64_t first = q.head.load();
    while (q.wqe(first).status == IBV_WC_SUCCESS) {
        first++;
    }
    q.next = std::max(q.next, first + 1); // the rest of its pieces is not sent
    for (auto *segments : {&q.out, &q.in}) {
        size_t keep = 0;
        while (keep < segments->size() && (*segments)[keep].wqe < first) {
            keep++;
        }
        for (size_t i = keep; i < segments->size(); i++) {
            drop_copy(q, (*segments)[i]);
        }
        segments->cut(keep);
    }
}

// What the responder refuses puts both ends into the error state.
Nic::Verdict Nic::refuse(QueuePair &q, SendWqe &w, const Peer &peer, ibv_wc_status status,
                         ibv_event_type event)
{
    peer.qp->event = 1 + static_cast<uint32_t>(event);
    peer.qp->state = IBV_QPS_ERR;
    call_attention(*peer.slot, kAttentionQps);
    fail(q, w, status);
    return Verdict::failed;
}

// The peer is not there, or not connected to this QP: a card sends retry_cnt times again.
Nic::Verdict Nic::no_answer(QueuePair &q, SendWqe &w, uint64_t now)
{
    if (q.deadline == 0) {
        q.deadline = q.attr.timeout == 0
                             ? kNever
                             : now + (4096ull << (q.attr.timeout & 31)) * (q.attr.retry_cnt + 1u);
    }
    if (now >= q.deadline) {
        fail(q, w, IBV_WC_RETRY_EXC_ERR);
        return Verdict::failed;
    }
    q.hold = std::min(q.deadline, now + kRetryInterval);
    return Verdict::wait;
}

Nic::Verdict Nic::receiver_not_ready(QueuePair &q, SendWqe &w, const Peer &peer, uint64_t now)
{
    if (q.attr.rnr_retry != 7 && q.rnr_left-- == 0) {
        fail(q, w, IBV_WC_RNR_RETRY_EXC_ERR);
        return Verdict::failed;
    }
    // the answer travels back, and the message comes again
    q.hold = now + 2 * settings().latency + rnr_timer(peer.qp->min_rnr_timer);
    return Verdict::wait;
}

// Counters of both ports, as the bytes arrive. An MTU makes a packet.
void Nic::count(const QueuePair &q, const SendWqe &w, const Peer &peer, uint64_t bytes, bool last)
{
    Port &mine = self->head.port[q.device];
    Port &from = w.is_inbound() ? *peer.port : mine;
    Port &to = w.is_inbound() ? mine : *peer.port;
    from.xmit_data.fetch_add(bytes, std::memory_order_relaxed);
    to.rcv_data.fetch_add(bytes, std::memory_order_relaxed);
    if (last) {
        const uint64_t mtu = q.verbs.qp_type == IBV_QPT_UD || q.attr.path_mtu == 0
                                     ? 4096
                                     : 128u << q.attr.path_mtu;
        const uint64_t packets = std::max<uint64_t>(1, (w.length + mtu - 1) / mtu);
        from.xmit_packets.fetch_add(packets, std::memory_order_relaxed);
        to.rcv_packets.fetch_add(packets, std::memory_order_relaxed);
    }
}

// Whether a WRITE or READ is of GPU memory here. (What it is at the peer is seen when it arrives.)
bool Nic::touches_gpu(const QueuePair &q, SendWqe &w) const
{
    PieceList local;
    return !w.is_send() && !w.is_atomic() && !w.is_inline() &&
           local.add_list(*self, w.sge(), w.num_sge, 0, w.length, 0, q.shared->pd) && local.gpu();
}

// One piece of the next request onto the wire, if that is (nearly) free. Returns when there is the
// next one to send.
uint64_t Nic::launch(QueuePair &q, uint64_t now, bool &launched)
{
    if (q.next == q.tail.load(std::memory_order_acquire)) {
        return kNever;
    }
    SendWqe &w = q.wqe(q.next);
    const bool first = w.launched == 0;
    if (first && q.reads != 0 &&
        ((w.flags & IBV_SEND_FENCE) != 0 ||
         (w.is_inbound() && q.reads >= std::max<uint32_t>(1, q.attr.max_rd_atomic)))) {
        q.blocked = true;
        return kNever;
    }
    const uint32_t lid = q.verbs.qp_type == IBV_QPT_UD ? w.lid : q.shared->dest_lid;
    const uint32_t place = lid == 0 ? 0 : (lid - 1) % (kSlots * kDevices);
    Port &mine = self->head.port[q.device];
    Port &peer = fabric->slot[place / kDevices].head.port[place % kDevices];
    const uint64_t stalled = std::max(mine.stalled_until.load(std::memory_order_relaxed),
                                      peer.stalled_until.load(std::memory_order_relaxed));
    if (stalled > now) {
        return stalled;
    }
    if (mine.down_until.load(std::memory_order_relaxed) > now && !q.out.empty()) {
        return kNever; // what is on its way already finds out
    }
    Port &egress = w.is_inbound() ? peer : mine;
    const uint64_t gate = egress.egress.load(std::memory_order_relaxed);
    if (gate > now + kLaunchAhead) {
        return gate - kLaunchAhead;
    }

    // not before it was posted, and not before what it waited for
    uint64_t ready = std::max(w.posted, stalled);
    if (q.blocked) {
        ready = std::max(ready, q.released);
    }
    uint64_t delay = 0;
    if (first) {
        q.blocked = false;
        q.device_only = q.device_only || touches_gpu(q, w);
        delay = reorder_delay(q.serial, q.messages++);
        if (m_injected != IBV_WC_SUCCESS) {
            w.status = m_injected;
            m_injected = IBV_WC_SUCCESS;
        }
    }
    const bool doomed = w.status != IBV_WC_SUCCESS;
    const uint32_t total = w.is_atomic() ? 8 : w.length;
    // a datagram is one packet
    const uint32_t most = q.verbs.qp_type == IBV_QPT_UD ? total : settings().chunk;
    const uint32_t bytes = doomed ? 0 : std::min(most, total - w.launched);
    if (w.is_inbound() && !doomed) {
        if (first) {
            const Passage request = reserve_request(mine, ready);
            q.last_out = std::max(q.last_out, request.arrival + delay);
            q.out.push({q.next, q.last_out, 0, 0, true, false, nullptr});
            q.reads++;
        }
        const Passage response =
                reserve(peer, mine, std::max(ready + settings().latency, q.last_out), bytes, false);
        q.last_in = std::max(q.last_in, response.arrival);
        q.in.push({q.next, q.last_in, w.launched, bytes, false, false, nullptr});
    } else {
        const Passage passage = reserve(mine, peer, ready, bytes, first);
        q.last_out = std::max(q.last_out, passage.arrival + delay);
        q.out.push({q.next, q.last_out, w.launched, bytes, false, false, nullptr});
    }
    w.launched += bytes;
    if (w.launched >= total || doomed) {
        q.next++;
    }
    launched = true;
    if (m_faults.any()) {
        m_fault_device = q.device;
        m_faults.sent(bytes, first ? 1 : 0);
        apply_faults(now);
    }
    return q.next == q.tail.load(std::memory_order_acquire) ? kNever : now;
}

// The responder's part of a READ or atomic, at the time when the request arrives.
Nic::Verdict Nic::deliver_request(QueuePair &q, SendWqe &w, const Peer &peer, uint64_t now)
{
    const bool atomic = w.is_atomic();
    const uint64_t length = atomic ? 8 : w.length;
    const uint32_t access = atomic ? IBV_ACCESS_REMOTE_ATOMIC : IBV_ACCESS_REMOTE_READ;
    PieceList remote;
    if (atomic && w.remote_address % 8 != 0) {
        return refuse(q, w, peer, IBV_WC_REM_INV_REQ_ERR, IBV_EVENT_QP_REQ_ERR);
    }
    if ((length != 0 || atomic) &&
        ((peer.qp->access & access) == 0 ||
         !remote.add_region(*peer.slot, w.rkey, w.remote_address, length, access, peer.qp->pd) ||
         (atomic && remote.gpu()))) {
        return refuse(q, w, peer, IBV_WC_REM_ACCESS_ERR, IBV_EVENT_QP_ACCESS_ERR);
    }
    if (!atomic) {
        return Verdict::delivered;
    }
    // atomic among the devices (IBV_ATOMIC_HCA), not with the peer's processor
    uint64_t old = 0, value;
    PieceList before, after;
    before.add_plain(&old, sizeof(old));
    after.add_plain(&value, sizeof(value));
    peer.slot->head.atomics.lock();
    int error = copy_host(*peer.slot, before, remote, false);
    if (w.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        value = old + w.compare;
    } else {
        value = old == w.compare ? w.swap : old;
    }
    if (error == 0) {
        error = copy_host(*peer.slot, after, remote, true);
    }
    peer.slot->head.atomics.unlock();
    w.swap = old;
    if (error == ESRCH) {
        return no_answer(q, w, now);
    }
    return error == 0 ? Verdict::delivered
                      : refuse(q, w, peer, IBV_WC_REM_ACCESS_ERR, IBV_EVENT_QP_ACCESS_ERR);
}

// Copies a segment, GPU memory included. `wait`: a GPU copy is not finished.
Nic::Verdict Nic::move(QueuePair &q, Segment &s, const Peer &peer, const PieceList &local,
                       const PieceList &remote, bool write, bool device_thread, int &error)
{
    error = 0;
    if (s.moved) {
        return Verdict::delivered;
    }
    if (!local.gpu() && !remote.gpu()) {
        error = copy_host(*peer.slot, local, remote, write);
        return Verdict::delivered;
    }
    if (!device_thread) {
        return Verdict::device;
    }
    if (s.copy == nullptr) {
        s.copy = m_gpu.start(*peer.slot, local, remote, write, error);
        if (s.copy == nullptr) {
            return error == EAGAIN ? Verdict::wait : Verdict::delivered;
        }
        q.copies++;
        q.device_only = true;
    }
    error = m_gpu.finish(s.copy);
    if (error == EINPROGRESS) {
        return Verdict::wait;
    }
    s.copy = nullptr;
    q.copies--;
    return Verdict::delivered;
}

// Takes the oldest receive of a queue.
static bool take_receive(Slot &slot, uint32_t index, Receive &receive)
{
    Rq &rq = slot.rq[index];
    rq.lock.lock();
    const uint64_t head = rq.head.load(std::memory_order_relaxed),
                   tail = rq.tail.load(std::memory_order_relaxed);
    const bool found = head != tail;
    bool limit = false;
    if (found) {
        const auto *from = reinterpret_cast<const Receive *>(slot.arena + rq.ring +
                                                             (head & rq.mask) * rq.stride);
        memcpy(&receive, from, offsetof(Receive, sge) + from->num_sge * sizeof(ibv_sge));
        rq.head.store(head + 1, std::memory_order_release);
        limit = rq.limit != 0 && tail - head - 1 < rq.limit;
        if (limit) {
            rq.limit = 0;
            rq.limit_reached = 1;
        }
    }
    rq.lock.unlock();
    if (limit) {
        call_attention(slot, kAttentionSrqs);
    }
    return found;
}

// A piece of a SEND. The first takes a receive, which stays with the peer's QP until the last.
Nic::Verdict Nic::deliver_send(QueuePair &q, Segment &s, SendWqe &w, const Peer &peer, uint64_t now,
                               bool device_thread)
{
    Slot &slot = *peer.slot;
    Qp &p = *peer.qp;
    const bool ud = q.verbs.qp_type == IBV_QPT_UD;
    const uint64_t grh = ud ? kGrh : 0;
    PieceList local, remote;
    uint8_t header[kGrh] = {};
    if (ud && w.global) {
        header[0] = 0x60;
        const uint16_t length = htobe16(static_cast<uint16_t>(w.length + 12));
        memcpy(header + 4, &length, sizeof(length));
        const uint64_t gids[4] = {htobe64(0xfe80000000000000ull),
                                  htobe64(guid_of(self->head.port[q.device].lid)),
                                  htobe64(0xfe80000000000000ull), htobe64(guid_of(w.lid))};
        memcpy(header + 8, gids, sizeof(gids));
    }
    if (w.is_inline()) {
        if (s.length != 0) {
            local.add_plain(w.inline_data() + s.offset, s.length);
        }
    } else if (!local.add_list(*self, w.sge(), w.num_sge, s.offset, s.length, 0, q.shared->pd)) {
        fail(q, w, IBV_WC_LOC_PROT_ERR);
        return Verdict::failed;
    }
    if (local.gpu() && !device_thread) {
        return Verdict::device;
    }

    // A UD QP has many senders at once, so what one has taken is kept with the sender.
    Receive &receive = ud ? q.datagram : p.current;
    const auto is_taken = [&] { return ud ? q.has_datagram : p.receiving.load() != 0; };
    const auto take = [&] {
        if (!take_receive(slot, p.rq, receive)) {
            return false;
        }
        if (ud) {
            q.has_datagram = true;
            q.datagram_for = w.qpn;
        } else {
            p.receiving = 1;
        }
        return true;
    };
    // Whether it is still this sender's: a QP that goes into error completes what it has taken.
    const auto release = [&] {
        return ud ? std::exchange(q.has_datagram, false) : p.receiving.exchange(0) != 0;
    };
    if (ud && q.datagram_for != w.qpn) {
        q.has_datagram = false; // of a peer that went away before it was delivered
    }
    if (s.offset == 0 && s.copy == nullptr && !is_taken() && !take()) {
        return ud ? Verdict::delivered : receiver_not_ready(q, w, peer, now);
    }
    ibv_wc wc = {};
    wc.wr_id = receive.wr_id;
    wc.opcode = IBV_WC_RECV;
    wc.byte_len = static_cast<uint32_t>(w.length + grh);
    wc.qp_num = ud ? w.qpn : q.shared->dest_qpn; // p.qpn is cleared while the owner waits for us
    wc.src_qp = q.verbs.qp_num;
    wc.slid = static_cast<uint16_t>(self->head.port[q.device].lid.load());
    if (w.opcode == IBV_WR_SEND_WITH_IMM) {
        wc.wc_flags = IBV_WC_WITH_IMM;
        wc.imm_data = w.imm;
    }
    if (ud && w.global) {
        wc.wc_flags |= IBV_WC_GRH;
    }

    uint64_t room = 0;
    for (uint32_t i = 0; i < receive.num_sge; i++) {
        room += receive.sge[i].length;
    }
    int error = 0;
    if (w.length + grh > room) {
        wc.status = IBV_WC_LOC_LEN_ERR;
    } else if (!remote.add_list(slot, receive.sge, receive.num_sge, s.offset + grh, s.length,
                                IBV_ACCESS_LOCAL_WRITE, p.pd)) {
        wc.status = IBV_WC_LOC_PROT_ERR;
    } else {
        if (ud && w.global) {
            PieceList from, to;
            from.add_plain(header, sizeof(header));
            if (to.add_list(slot, receive.sge, receive.num_sge, 0, kGrh, IBV_ACCESS_LOCAL_WRITE,
                            p.pd) &&
                !to.gpu()) {
                copy_host(slot, from, to, true);
            }
        }
        const Verdict verdict = move(q, s, peer, local, remote, true, device_thread, error);
        if (verdict != Verdict::delivered) {
            return verdict;
        }
        if (error == ESRCH && ud) {
            release();
            return Verdict::delivered; // to nobody
        }
        if (error == ESRCH) {
            return no_answer(q, w, now);
        }
        if (error != 0) {
            wc.status = IBV_WC_LOC_PROT_ERR;
        }
    }
    const bool last = s.offset + s.length >= w.length;
    if (wc.status != IBV_WC_SUCCESS) {
        if (release()) {
            push_completion(slot, p.receive_cq, wc, false);
        }
        if (ud) {
            p.event = 1 + static_cast<uint32_t>(IBV_EVENT_QP_FATAL);
            p.state = IBV_QPS_ERR;
            call_attention(slot, kAttentionQps);
            return Verdict::delivered;
        }
        return refuse(q, w, peer,
                      wc.status == IBV_WC_LOC_LEN_ERR ? IBV_WC_REM_INV_REQ_ERR : IBV_WC_REM_OP_ERR,
                      wc.status == IBV_WC_LOC_LEN_ERR ? IBV_EVENT_QP_REQ_ERR : IBV_EVENT_QP_FATAL);
    }
    count(q, w, peer, s.length, last);
    if (last && release()) {
        push_completion(slot, p.receive_cq, wc, (w.flags & IBV_SEND_SOLICITED) != 0);
    }
    return Verdict::delivered;
}

// A segment has arrived. `wait`: q.hold says until when.
Nic::Verdict Nic::deliver(QueuePair &q, Segment &s, uint64_t now, bool device_thread)
{
    SendWqe &w = q.wqe(s.wqe);
    const bool ud = q.verbs.qp_type == IBV_QPT_UD;
    if (w.status != IBV_WC_SUCCESS) { // a local error, in its turn
        const ibv_wc_status status = w.status;
        fail(q, w, status);
        return Verdict::failed;
    }
    const uint32_t lid = ud ? w.lid : q.shared->dest_lid, qpn = ud ? w.qpn : q.shared->dest_qpn;
    Port &mine = self->head.port[q.device];
    Peer peer = {nullptr, nullptr, nullptr};
    peer.slot = find_device(lid, peer.port);
    if (peer.slot == nullptr || mine.lid.load() == 0 || mine.down_until.load() > now ||
        peer.port->down_until.load() > now) {
        return ud ? Verdict::delivered : no_answer(q, w, now); // a datagram is lost without a word
    }
    const uint64_t stalled = std::max(mine.stalled_until.load(), peer.port->stalled_until.load());
    if (stalled > now) {
        q.hold = stalled;
        return Verdict::wait;
    }

    Visit visit(*peer.slot);
    Qp &p = peer.slot->qp[qpn % kQps];
    peer.qp = &p;
    const bool there =
            p.qpn.load() == qpn && receives(p.state.load()) &&
            p.type == static_cast<uint32_t>(q.verbs.qp_type) &&
            p.device == static_cast<uint32_t>((lid - 1) % kDevices) &&
            (ud ? p.qkey == w.qkey : p.dest_qpn == q.verbs.qp_num && p.dest_lid == mine.lid.load());
    if (!there) {
        return ud ? Verdict::delivered : no_answer(q, w, now);
    }

    Verdict verdict = Verdict::delivered;
    if (s.request) {
        verdict = deliver_request(q, w, peer, now);
    } else if (w.is_send()) {
        verdict = deliver_send(q, s, w, peer, now, device_thread);
    } else {
        const bool inbound = w.is_inbound();
        const bool last = w.is_atomic() || s.offset + s.length >= w.length;
        PieceList local, remote;
        if (w.is_inline()) {
            if (s.length != 0) {
                local.add_plain(w.inline_data() + s.offset, s.length);
            }
        } else if (!local.add_list(*self, w.sge(), w.num_sge, s.offset, s.length,
                                   inbound ? IBV_ACCESS_LOCAL_WRITE : 0, q.shared->pd)) {
            fail(q, w, IBV_WC_LOC_PROT_ERR);
            return Verdict::failed;
        }
        int error = 0;
        if (w.is_atomic()) {
            PieceList result;
            result.add_plain(&w.swap, sizeof(w.swap));
            if (local.length() != sizeof(w.swap) || local.gpu() ||
                copy_host(*self, result, local, true) != 0) {
                fail(q, w, IBV_WC_LOC_PROT_ERR);
                return Verdict::failed;
            }
        } else if (s.length != 0) {
            const uint32_t access = inbound ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;
            if ((p.access & access) == 0 ||
                !remote.add_region(*peer.slot, w.rkey, w.remote_address + s.offset, s.length,
                                   access, p.pd)) {
                return refuse(q, w, peer, IBV_WC_REM_ACCESS_ERR, IBV_EVENT_QP_ACCESS_ERR);
            }
            if (s.offset == 0 && s.length < w.length && !inbound) {
                PieceList whole; // a card knows the message's length from its first packet
                if (!whole.add_region(*peer.slot, w.rkey, w.remote_address, w.length, access,
                                      p.pd)) {
                    return refuse(q, w, peer, IBV_WC_REM_ACCESS_ERR, IBV_EVENT_QP_ACCESS_ERR);
                }
            }
            verdict = move(q, s, peer, local, remote, !inbound, device_thread, error);
        }
        if (verdict == Verdict::delivered && error != 0) {
            return error == ESRCH
                           ? no_answer(q, w, now)
                           : refuse(q, w, peer, IBV_WC_REM_ACCESS_ERR, IBV_EVENT_QP_ACCESS_ERR);
        }
        if (verdict == Verdict::delivered && last && w.opcode == IBV_WR_RDMA_WRITE_WITH_IMM) {
            s.moved = true; // even if it has to wait for a receive
            Receive receive;
            if (!take_receive(*peer.slot, p.rq, receive)) {
                return receiver_not_ready(q, w, peer, now);
            }
            ibv_wc wc = {};
            wc.wr_id = receive.wr_id;
            wc.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
            wc.byte_len = w.length;
            wc.qp_num = qpn;
            wc.src_qp = q.verbs.qp_num;
            wc.slid = static_cast<uint16_t>(mine.lid.load());
            wc.wc_flags = IBV_WC_WITH_IMM;
            wc.imm_data = w.imm;
            count(q, w, peer, s.length, last);
            push_completion(*peer.slot, p.receive_cq, wc, (w.flags & IBV_SEND_SOLICITED) != 0);
        } else if (verdict == Verdict::delivered) {
            count(q, w, peer, s.length, last);
        }
    }
    if (verdict == Verdict::delivered) {
        w.delivered += s.length;
        q.deadline = 0;
        q.rnr_left = q.attr.rnr_retry;
    }
    return verdict;
}

// GPU pieces of WRITEs and READs are started ahead of their arrival, several at a time; deliver()
// waits for them. What does not look right is left to deliver().
void Nic::start_copies(QueuePair &q, Fifo<Segment> &segments, uint64_t now, uint64_t &wake)
{
    const uint64_t lead = settings().lead;
    for (size_t i = 0; i < segments.size(); i++) {
        Segment &s = segments[i];
        SendWqe &w = q.wqe(s.wqe);
        const bool inbound = w.opcode == IBV_WR_RDMA_READ;
        if (s.arrival > now + lead) {
            wake = std::min(wake, s.arrival - lead);
            return;
        }
        if (s.copy != nullptr || s.moved || s.length == 0 || w.is_inline() ||
            w.status != IBV_WC_SUCCESS ||
            (!inbound && w.opcode != IBV_WR_RDMA_WRITE && w.opcode != IBV_WR_RDMA_WRITE_WITH_IMM)) {
            continue;
        }
        if (inbound && !w.asked && lead == 0) {
            return;
        }
        Port *port;
        Slot *slot = find_device(q.shared->dest_lid, port);
        if (slot == nullptr) {
            return;
        }
        Visit visit(*slot);
        Qp &p = slot->qp[q.shared->dest_qpn % kQps];
        const uint32_t access = inbound ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;
        PieceList local, remote;
        if (p.qpn.load() != q.shared->dest_qpn || !receives(p.state.load()) ||
            (p.access & access) == 0 ||
            !local.add_list(*self, w.sge(), w.num_sge, s.offset, s.length,
                            inbound ? IBV_ACCESS_LOCAL_WRITE : 0, q.shared->pd) ||
            !remote.add_region(*slot, w.rkey, w.remote_address + s.offset, s.length, access,
                               p.pd)) {
            return;
        }
        if (!local.gpu() && !remote.gpu()) {
            continue;
        }
        int error;
        s.copy = m_gpu.start(*slot, local, remote, !inbound, error);
        if (s.copy == nullptr) {
            return;
        }
        q.copies++;
    }
}

void Nic::drop_copy(QueuePair &q, Segment &s)
{
    if (s.copy != nullptr) {
        m_gpu.abandon(s.copy);
        s.copy = nullptr;
        q.copies--;
    }
}

// One turn of a QP: at most one piece onto the wire, and all that has arrived. Returns when to look
// at it again.
uint64_t Nic::step(QueuePair &q, uint64_t &now, bool device_thread, bool &launched)
{
    uint64_t wake = kNever;
    const uint32_t state = q.shared->state.load();
    if (q.copies != 0 && state != IBV_QPS_RTS && state != IBV_QPS_SQD) {
        for (auto *segments : {&q.out, &q.in}) {
            for (size_t i = 0; i < segments->size(); i++) {
                drop_copy(q, (*segments)[i]);
            }
        }
    }
    if (state == IBV_QPS_ERR) {
        if (!q.flushed || q.head.load() != q.tail.load()) {
            flush(q);
        }
        return kNever;
    }
    if (state == IBV_QPS_RTS) {
        wake = q.failed ? kNever : launch(q, now, launched);
        if (q.device_only && !device_thread) {
            return now;
        }
    } else if (state != IBV_QPS_SQD) {
        return kNever;
    }
    for (auto *segments : {&q.out, &q.in}) {
        if (device_thread && q.device_only) {
            start_copies(q, *segments, now, wake);
        }
        while (!segments->empty()) {
            Segment &s = segments->front();
            SendWqe &w = q.wqe(s.wqe);
            const uint64_t arrival = std::max(s.arrival, q.hold);
            if (arrival > now) {
                wake = std::min(wake, arrival);
                break;
            }
            if (segments == &q.in && !w.asked) {
                break; // its request is held up
            }
            const Verdict verdict = deliver(q, s, now, device_thread);
            if (verdict == Verdict::failed) {
                drop_after_failure(q);
                break;
            }
            if (verdict == Verdict::device) {
                q.device_only = true;
                return now;
            }
            if (verdict == Verdict::wait) {
                now = now_ns();
                wake = std::min(wake, q.hold > now ? q.hold : now + kCopyInterval);
                break;
            }
            if (s.request) {
                w.asked = true;
            } else if (s.offset + s.length >= w.length) {
                w.done = true;
                // the acknowledgement travels back
                w.done_at =
                        arrival +
                        (w.is_inbound() || q.verbs.qp_type == IBV_QPT_UD ? 0 : settings().latency);
            }
            if (s.length > 1024) {
                now = now_ns();
            }
            segments->pop();
        }
    }
    while (q.head.load(std::memory_order_relaxed) < q.next) {
        SendWqe &w = q.wqe(q.head.load(std::memory_order_relaxed));
        if (!w.done) {
            break;
        }
        if (w.done_at > now) {
            wake = std::min(wake, w.done_at);
            break;
        }
        if (w.status != IBV_WC_SUCCESS) {
            q.shared->state = IBV_QPS_ERR;
            flush(q); // this request is the first of it
            return kNever;
        }
        if (w.is_inbound()) {
            q.reads--;
            q.released = std::max(q.released, w.done_at);
            if (q.blocked) {
                wake = now; // the next may be sent in the next turn
            }
        }
        complete(q, w);
    }
    return wake;
}

// One round of all QPs, again and again while there is something due and time left. Under the
// lock.
void Nic::run(bool device_thread)
{
    uint64_t now = now_ns();
    const uint64_t end = now + (device_thread ? kThreadTime : kHelpTime);
    uint64_t due, device_due;
    do {
        take_kicked();
        uint64_t timers = kNever;
        if (m_faults.any() || std::any_of(m_down.begin(), m_down.end(), [](bool d) { return d; })) {
            apply_faults(now);
            timers = m_faults.next_time();
            for (unsigned d = 0; d < settings().devices; d++) {
                if (m_down[d]) {
                    timers = std::min(timers, self->head.port[d].down_until.load());
                }
            }
        }
        if (self->head.attention.load() != 0) {
            attend();
        }
        due = timers;
        device_due = kNever;
        m_keep.clear();
        m_behind.clear();
        for (QueuePair *q : m_active) {
            bool launched = false;
            if (q->device_only && !device_thread) {
                device_due = std::min(device_due, q->wake);
                m_keep.push_back(q);
                continue;
            }
            if (q->wake <= now) {
                q->wake = step(*q, now, device_thread, launched);
                if (q->head.load(std::memory_order_relaxed) ==
                            q->tail.load(std::memory_order_acquire) &&
                    q->copies == 0) {
                    q->active = false; // the next post kicks it
                    q->device_only = false;
                    continue;
                }
            }
            (q->device_only ? device_due : due) =
                    std::min(q->device_only ? device_due : due, q->wake);
            // whoever has sent comes after those who have not: round robin by chunk
            (launched ? m_behind : m_keep).push_back(q);
        }
        m_active.swap(m_keep);
        m_active.insert(m_active.end(), m_behind.begin(), m_behind.end());
        if (self->head.attention.load(std::memory_order_relaxed) != 0) {
            due = 0;
        }
        now = now_ns();
    } while (now < end && (due <= now || (device_thread && device_due <= now)));
    m_due.store(due);
    self->head.due.store(due, std::memory_order_relaxed);
    m_device_due.store(device_due);
    if (device_thread) {
        m_gpu.sweep();
    }
}

} // namespace swverbs
