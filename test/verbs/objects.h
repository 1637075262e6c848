// SPDX-License-Identifier: BSD-3-Clause
// This process' half of the verbs objects: what an application's handles point to.
#pragma once

#include "gpu.h"
#include "memory.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

namespace swverbs {

// Events behind a file descriptor that poll() and O_NONBLOCK understand: it is readable while there
// are events.
template <class T>
class EventQueue {
public:
    EventQueue() : m_fd(eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE)) {}
    // The user has waited for the threads that took events, but by means that a sanitizer may not
    // see; the lock it sees.
    ~EventQueue()
    {
        m_mutex.lock();
        m_mutex.unlock();
        close(m_fd);
    }
    EventQueue(const EventQueue &) = delete;
    EventQueue &operator=(const EventQueue &) = delete;
    int fd() const { return m_fd; }

    void push(const T &event)
    {
        std::lock_guard<std::mutex> guard(m_mutex);
        m_events.push_back(event);
        eventfd_write(m_fd, 1);
    }

    // Waits for an event unless the descriptor is non-blocking. 0, or -1 with errno. `taken` is
    // called with the event before anybody can see that it left the queue.
    template <class F>
    int pop(T &event, const F &taken)
    {
        for (;;) {
            int fd; // outside the lock nothing of the queue is touched: it may be destroyed then
            {
                std::lock_guard<std::mutex> guard(m_mutex);
                fd = m_fd;
                if (!m_events.empty()) {
                    event = m_events.front();
                    m_events.pop_front();
                    eventfd_t one;
                    eventfd_read(m_fd, &one); // there is one for each event
                    taken(event);
                    return 0;
                }
            }
            if ((fcntl(fd, F_GETFL) & O_NONBLOCK) != 0) {
                errno = EAGAIN;
                return -1;
            }
            pollfd wait = {fd, POLLIN, 0};
            if (poll(&wait, 1, -1) < 0) {
                return -1;
            }
        }
    }

    // Forgets the events for which `which` is true.
    template <class F>
    void purge(const F &which)
    {
        std::lock_guard<std::mutex> guard(m_mutex);
        for (size_t i = 0; i < m_events.size();) {
            if (which(m_events[i])) {
                m_events.erase(m_events.begin() + static_cast<ptrdiff_t>(i));
                eventfd_t one;
                eventfd_read(m_fd, &one);
            } else {
                i++;
            }
        }
    }

private:
    const int m_fd;
    std::mutex m_mutex;
    std::deque<T> m_events;
};

// A queue in one block of memory that only grows.
template <class T>
class Fifo {
public:
    bool empty() const { return m_head == m_tail; }
    size_t size() const { return m_tail - m_head; }
    T &front() { return m_items[m_head & m_mask]; }
    T &operator[](size_t i) { return m_items[(m_head + i) & m_mask]; }
    void pop() { m_head++; }
    void clear() { m_head = m_tail; }
    void cut(size_t keep) { m_tail = m_head + keep; }
    void push(const T &item)
    {
        if (m_items.empty() || size() > m_mask) {
            std::vector<T> larger(m_items.empty() ? 8 : 2 * m_items.size());
            for (size_t i = 0; i < size(); i++) {
                larger[i] = (*this)[i];
            }
            m_tail = size();
            m_head = 0;
            m_items.swap(larger);
            m_mask = m_items.size() - 1;
        }
        m_items[m_tail++ & m_mask] = item;
    }

private:
    std::vector<T> m_items;
    size_t m_head = 0, m_tail = 0, m_mask = 0;
};

struct Context {
    verbs_context verbs; // first; see ibv_open_device() for what it must hold
    int device;
    EventQueue<ibv_async_event> events;
};

inline Context *context_of(ibv_context *context)
{
    return reinterpret_cast<Context *>(reinterpret_cast<char *>(context) -
                                       offsetof(verbs_context, context));
}

struct ProtectionDomain {
    ibv_pd verbs;
    std::atomic<int> users;
};

struct MemoryRegion {
    ibv_mr verbs;
    Mr *shared;
};

struct AddressHandle {
    ibv_ah verbs;
    uint32_t lid;
    ibv_ah_attr attr;
};

struct CompletionChannel {
    ibv_comp_channel verbs;
    EventQueue<ibv_cq *> events;
    std::atomic<int> users;
};

struct CompletionQueue {
    ibv_cq verbs;
    Cq *shared;
    uint32_t index;
    std::mutex consumers;
    std::atomic<int> users;
    uint32_t events_taken, async_events_taken;
};

struct SharedReceiveQueue {
    ibv_srq verbs;
    Rq *shared;
    uint32_t index;
    std::atomic<int> users;
    uint32_t events_taken;
};

// A send request, followed in the ring by its scatter/gather list or inline data.
struct SendWqe {
    uint64_t wr_id, remote_address, compare, swap;
    uint64_t posted;
    uint64_t done_at; // when its completion may be seen
    uint32_t rkey, length, launched, delivered, imm, flags;
    uint32_t qpn, qkey, lid; // UD
    ibv_wr_opcode opcode;
    ibv_wc_status status;
    uint16_t num_sge;
    bool signaled, done;
    bool asked;  // the peer has seen the request of a READ or atomic
    bool global; // UD: with a GRH

    ibv_sge *sge() { return reinterpret_cast<ibv_sge *>(this + 1); }
    uint8_t *inline_data() { return reinterpret_cast<uint8_t *>(this + 1); }
    bool is_inline() const { return (flags & IBV_SEND_INLINE) != 0; }
    bool is_send() const { return opcode == IBV_WR_SEND || opcode == IBV_WR_SEND_WITH_IMM; }
    bool is_atomic() const
    {
        return opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
    }
    // The payload comes from the peer.
    bool is_inbound() const { return opcode == IBV_WR_RDMA_READ || is_atomic(); }
};

// A piece of a message that is on its way.
struct Segment {
    uint64_t wqe; // its number in the send queue
    uint64_t arrival;
    uint32_t offset, length;
    bool request; // of a READ or atomic: checked, and atomics done, at the peer, in order
    bool moved;   // its bytes are at their place
    Gpu::Copy *copy;
};

struct QueuePair {
    ibv_qp verbs;
    Qp *shared;
    uint32_t index;
    int device;
    uint64_t serial; // of this process; for reorder_delay()
    Context *context;
    CompletionQueue *send_cq, *receive_cq;
    SharedReceiveQueue *srq;
    ibv_qp_attr attr;
    ibv_qp_init_attr init;
    uint32_t events_taken;

    // The send queue. `tail` is moved by post_send(), `head` by the device.
    std::mutex posters;
    std::unique_ptr<uint8_t[]> ring;
    size_t stride, mask;
    std::atomic<uint64_t> head, tail;
    SendWqe &wqe(uint64_t i)
    {
        return *reinterpret_cast<SendWqe *>(ring.get() + (i & mask) * stride);
    }

    // Posted to, but not seen by the device yet (Nic::kick()).
    std::atomic<bool> kicked;
    QueuePair *next_kicked;

    // Under the device's lock:
    bool active;
    bool device_only; // GPU memory is under way: left to the device's own thread until all is done
    bool flushed, last_wqe_reached;
    uint64_t wake;         // when to look at it again
    uint64_t next;         // the first request that is not wholly on its way
    Fifo<Segment> out, in; // to the peer, and responses from it
    uint32_t reads;        // outstanding READs and atomics
    bool blocked;          // the next request waits for those
    bool failed;           // a request has, and nothing more is sent
    uint64_t released;     // when the last of them was done
    uint64_t hold;         // nothing is delivered before: RNR, a lost answer
    uint64_t deadline;     // the peer does not answer: give up then; 0: it answers
    uint32_t rnr_left;
    uint64_t messages;
    uint64_t last_out, last_in; // arrival of the last segment: never before it
    unsigned copies;            // GPU copies that are under way
    // UD: the receive of the peer that the datagram being delivered has taken.
    Receive datagram;
    bool has_datagram;
    uint32_t datagram_for; // QP number
};

} // namespace swverbs
