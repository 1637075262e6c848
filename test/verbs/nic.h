// SPDX-License-Identifier: BSD-3-Clause
// The device: it executes the send queues of this process.
#pragma once

#include "faults.h"
#include "objects.h"
#include "wire.h"

#include <array>

namespace swverbs {

// How it works
//   * Everything that this process sends or reads is done by this process, for both ends: it checks
//     the peer's key, moves the payload, takes the peer's receive and appends to the peer's
//     completion queue. The peer is woken only for an event.
//   * The work is done under one lock by whoever is there: an application's thread inside
//     post_send() or poll_cq() that finds the lock free, or the device's own thread. While the
//     application polls, the latter stays back (grace()), so that a small operation costs no
//     thread switch; it comes in when something is overdue because the application computes,
//     sleeps or has no processor.
//   * GPU memory is left to the device's own thread, which may hold a CUDA context.
class Nic {
public:
    // Joins the fabric and starts the thread, once. False if there is no device: that failed, or
    // this is a forked child.
    bool start();

    // The device's lock, for verbs that change objects.
    class Guard {
    public:
        Guard();
        ~Guard();
        Guard(const Guard &) = delete;
        Guard &operator=(const Guard &) = delete;
    };

    // Something was posted to `q`, or its state has changed.
    void kick(QueuePair &q, uint64_t now);
    // An application's thread found nothing to do: does what is due, if nobody else does.
    void help();
    void stop_helping();
    void add_peer(uint32_t lid);

    // Under the lock:
    void add(QueuePair &q);
    void remove(QueuePair &q); // waits for its GPU copies
    void reset(QueuePair &q);  // forgets all that was posted
    void add_channel_user(CompletionQueue &cq) { m_channel_cqs.push_back(&cq); }
    void remove_channel_user(CompletionQueue &cq) { std::erase(m_channel_cqs, &cq); }
    void add_cq(CompletionQueue &cq) { m_cqs[cq.index] = &cq; }
    void remove_cq(CompletionQueue &cq) { m_cqs[cq.index] = nullptr; }
    void add_srq(SharedReceiveQueue &srq) { m_srqs.push_back(&srq); }
    void remove_srq(SharedReceiveQueue &srq) { std::erase(m_srqs, &srq); }
    void add_context(Context &context) { m_contexts.push_back(&context); }
    void remove_context(Context &context) { std::erase(m_contexts, &context); }
    Arena &arena() { return m_arena; }
    Gpu &gpu() { return m_gpu; }
    bool port_up(int device) const;

private:
    enum class Verdict { delivered, wait, failed, device };
    struct Peer;

    static void *thread(void *nic);
    void work();
    void finish();
    void print_statistics();
    void run(bool device_thread);
    void take_kicked();
    void attend();
    void apply_faults(uint64_t now);
    void port_event(int device, ibv_event_type type);
    uint64_t grace(uint64_t now) const;
    void wake_thread_if_needed();
    void watch_peers(uint64_t now);

    uint64_t step(QueuePair &q, uint64_t &now, bool device_thread, bool &launched);
    bool touches_gpu(const QueuePair &q, SendWqe &w) const;
    uint64_t launch(QueuePair &q, uint64_t now, bool &launched);
    Verdict deliver(QueuePair &q, Segment &s, uint64_t now, bool device_thread);
    Verdict deliver_request(QueuePair &q, SendWqe &w, const Peer &peer, uint64_t now);
    Verdict deliver_send(QueuePair &q, Segment &s, SendWqe &w, const Peer &peer, uint64_t now,
                         bool device_thread);
    Verdict move(QueuePair &q, Segment &s, const Peer &peer, const PieceList &local,
                 const PieceList &remote, bool write, bool device_thread, int &error);
    void start_copies(QueuePair &q, Fifo<Segment> &segments, uint64_t now, uint64_t &wake);
    void drop_copy(QueuePair &q, Segment &s);
    void drop_after_failure(QueuePair &q);
    Verdict no_answer(QueuePair &q, SendWqe &w, uint64_t now);
    Verdict receiver_not_ready(QueuePair &q, SendWqe &w, const Peer &peer, uint64_t now);
    Verdict refuse(QueuePair &q, SendWqe &w, const Peer &peer, ibv_wc_status status,
                   ibv_event_type event);
    void fail(QueuePair &q, SendWqe &w, ibv_wc_status status);
    void flush(QueuePair &q);
    void complete(QueuePair &q, SendWqe &w);
    void raise(QueuePair &q, ibv_event_type type);
    void count(const QueuePair &q, const SendWqe &w, const Peer &peer, uint64_t bytes, bool last);

    std::atomic<int> m_state{0}; // 0: not started, 1: running, -1: there is no device
    std::atomic<bool> m_stop{false};
    pthread_t m_thread;
    uint32_t m_pid = 0;
    Arena m_arena;
    Gpu m_gpu;
    Faults m_faults;
    ibv_wc_status m_injected = IBV_WC_SUCCESS;
    std::array<bool, kDevices> m_down{};
    int m_fault_device = 0; // whose traffic triggers

    std::vector<QueuePair *> m_active, m_keep, m_behind;
    std::array<QueuePair *, kQps> m_qps{};
    std::array<CompletionQueue *, kCqs> m_cqs{};
    std::vector<CompletionQueue *> m_channel_cqs;
    std::vector<SharedReceiveQueue *> m_srqs;
    std::vector<Context *> m_contexts;

    std::atomic<QueuePair *> m_kicked{nullptr};
    std::atomic<uint64_t> m_due{kNever};        // of work that anybody may do
    std::atomic<uint64_t> m_device_due{kNever}; // of work for the device's own thread
    std::atomic<uint64_t> m_last_help{0}, m_last_post{0}, m_last_watch{0};
    std::array<std::atomic<uint64_t>, kSlots / 64> m_peers{}; // slots whose devices may send here
    std::atomic<uint64_t> m_sleeping_until{0};
    std::atomic<uint64_t> m_trusted_from{0}; // see grace()
    uint64_t m_distrust = 0;

    std::array<std::array<uint64_t, 8>, kDevices> m_operations{};
    uint64_t m_sleeps = 0, m_helped = 0, m_worked = 0;
    friend void stop_device();
};

Nic &nic();

// Appends to a completion queue of any process.
void push_completion(Slot &slot, uint32_t cq, const ibv_wc &wc, bool solicited);

} // namespace swverbs
