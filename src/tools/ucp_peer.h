// SPDX-License-Identifier: BSD-3-Clause
// One UCP context, worker and endpoint with a given transport list, through the public API only.
// Two of them, with and without zip, live side by side in a process and are measured in turn.
#pragma once

#include <ucp/api/ucp.h>

#include <cstddef>
#include <cstdint>
#include <sched.h>
#include <string>
#include <utility>

namespace tools {

class UcpPeer {
public:
    // Any number of sends or receives that are waited for together. Must outlive its requests.
    struct Batch {
        size_t posted = 0;
        size_t done = 0;
        ucs_status_t status = UCS_OK; // the first error of a send
    };

    // One receive; must outlive its request.
    struct Receive {
        Batch *batch = nullptr;
        void *request = nullptr;
        size_t length = 0; // received
        ucs_status_t status = UCS_INPROGRESS;
    };

    struct Settings {
        bool one_sided = false; // put() and UcpMemory's keys
        // Endpoints notice that the peer is lost. UCX leaves out some of its protocols then.
        bool peer_errors = true;
    };

    // `tls` is what a user would write in UCX_TLS. Throws Error.
    explicit UcpPeer(std::string tls) : UcpPeer(std::move(tls), Settings()) {}
    UcpPeer(std::string tls, Settings settings);
    ~UcpPeer();
    UcpPeer(const UcpPeer &) = delete;
    UcpPeer &operator=(const UcpPeer &) = delete;

    const std::string &tls() const { return tls_; }

    // Worker address to be given to the other process.
    std::string address() const;
    void connect(const std::string &remote_address);

    // The context has a resource of this transport, i.e. the plugin was loaded and found a device.
    bool has_transport(const std::string &name) const;
    // The endpoint has lanes of these transports now: "tcp/veth0 zip/veth0".
    std::string endpoint_transports() const;

    unsigned progress() { return ucp_worker_progress(worker_); }

    // For loops that spin: after a few turns in which nothing happened, lets others run. Where more
    // processes spin than there are cores, the one that has work would otherwise wait for a whole
    // time slice again and again. Seen on 2 cores with a load of 6: zip at 0.3 times plain without
    // this, 1.4 with it, and plain gains, too. On an idle machine it costs nothing measurable.
    void spin()
    {
        if (progress() > 0) {
            idle_turns_ = 0;
        } else if (++idle_turns_ > kIdleTurns) {
            idle_turns_ = 0;
            sched_yield();
        }
    }
    // UCS_OK until UCX reports that the peer is lost.
    ucs_status_t endpoint_status() const { return endpoint_status_; }

    // `memory` is what UcpMemory says of the data's, or nullptr: UCX then finds out for itself.
    void send(Batch &batch, ucp_tag_t tag, const void *data, size_t size,
              ucp_mem_h memory = nullptr);
    void receive(Receive &receive, ucp_tag_t tag, void *data, size_t size,
                 ucp_mem_h memory = nullptr);
    void cancel(Receive &receive);

    // Writes into the peer's memory; `key` and `address` are those of its UcpMemory.
    void put(Batch &batch, const void *data, size_t size, uint64_t address, ucp_rkey_h key,
             ucp_mem_h memory = nullptr);
    // Joins the batch; done when all that was put before is in the peer's memory.
    void flush(Batch &batch);

    ucp_context_h context() const { return context_; }
    ucp_ep_h endpoint() const { return ep_; }

    // Waits for the flush of what was sent, at most timeout_s; false if it did not end.
    bool flush_and_close(double timeout_s);

    // Gives up on the peer: what is under way ends with an error during the next calls of progress.
    void force_close();

private:
    static constexpr unsigned kIdleTurns = 5; // 0 to 20 do; 200 is too late

    static void started(Batch &batch, ucs_status_ptr_t request);
    static void on_send(void *request, ucs_status_t status, void *user);
    static void on_receive(void *request, ucs_status_t status, const ucp_tag_recv_info_t *info,
                           void *user);
    static void on_error(void *user, ucp_ep_h ep, ucs_status_t status);
    void close_endpoint(unsigned flags, double timeout_s, bool *closed);

    std::string tls_;
    Settings settings_;
    ucp_context_h context_ = nullptr;
    ucp_worker_h worker_ = nullptr;
    ucp_ep_h ep_ = nullptr;
    ucs_status_t endpoint_status_ = UCS_OK;
    unsigned idle_turns_ = 0;
};

// Memory that UCX has registered for transfers, of any kind. Must end before its peer.
class UcpMemory {
public:
    // Throws Error.
    UcpMemory(const UcpPeer &peer, void *address, size_t size);
    ~UcpMemory();
    UcpMemory(const UcpMemory &) = delete;
    UcpMemory &operator=(const UcpMemory &) = delete;

    ucp_mem_h handle() const { return memory_; }
    // To be given to the other process, for a UcpRemoteKey. Throws Error.
    std::string key() const;

private:
    const UcpPeer &peer_;
    ucp_mem_h memory_ = nullptr;
};

// What put() needs to reach the other process's UcpMemory. Must end before the endpoint.
class UcpRemoteKey {
public:
    // Throws Error.
    UcpRemoteKey(const UcpPeer &peer, const std::string &key);
    ~UcpRemoteKey() { ucp_rkey_destroy(key_); }
    UcpRemoteKey(const UcpRemoteKey &) = delete;
    UcpRemoteKey &operator=(const UcpRemoteKey &) = delete;

    ucp_rkey_h get() const { return key_; }

private:
    ucp_rkey_h key_ = nullptr;
};

} // namespace tools
