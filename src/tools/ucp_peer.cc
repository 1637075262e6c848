// SPDX-License-Identifier: BSD-3-Clause
// One UCP context, worker and endpoint.
#include "tools/ucp_peer.h"

#include "tools/clock.h"
#include "tools/error.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

namespace tools {

namespace {

constexpr uint32_t kMemory = UCP_OP_ATTR_FIELD_MEMH;

[[noreturn]] void fail(const std::string &what, ucs_status_t status, const std::string &tls)
{
    throw Error("UCX: " + what + " with UCX_TLS=" + tls + ": " + ucs_status_string(status));
}

} // namespace

UcpPeer::UcpPeer(std::string tls, Settings settings) : tls_(std::move(tls)), settings_(settings)
{
    ucp_config_t *config = nullptr;
    ucs_status_t status = ucp_config_read(nullptr, nullptr, &config);
    if (status != UCS_OK) {
        fail("cannot read the configuration", status, tls_);
    }
    status = ucp_config_modify(config, "TLS", tls_.c_str());
    if (status == UCS_OK) {
        ucp_params_t params{};
        params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_ESTIMATED_NUM_EPS;
        params.features = UCP_FEATURE_TAG | (settings.one_sided ? UCP_FEATURE_RMA : 0);
        params.estimated_num_eps = 1;
        // Two threads that begin at once can lock each other out where UCX hooks malloc() (seen
        // with 1.22 and UCX_MEM_MMAP_HOOK_MODE=reloc).
        static std::mutex one_at_a_time;
        const std::lock_guard<std::mutex> guard(one_at_a_time);
        status = ucp_init(&params, config, &context_);
    }
    ucp_config_release(config);
    if (status != UCS_OK) {
        fail("no usable transport (`ucx_info -d` lists them)", status, tls_);
    }

    ucp_worker_params_t worker_params{};
    worker_params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    worker_params.thread_mode = UCS_THREAD_MODE_SINGLE;
    status = ucp_worker_create(context_, &worker_params, &worker_);
    if (status != UCS_OK) {
        ucp_cleanup(context_);
        fail("cannot create a worker", status, tls_);
    }
}

UcpPeer::~UcpPeer()
{
    force_close();
    ucp_worker_destroy(worker_);
    ucp_cleanup(context_);
}

std::string UcpPeer::address() const
{
    ucp_address_t *address = nullptr;
    size_t length = 0;
    const ucs_status_t status = ucp_worker_get_address(worker_, &address, &length);
    if (status != UCS_OK) {
        fail("cannot get the worker address", status, tls_);
    }
    std::string out(reinterpret_cast<const char *>(address), length);
    ucp_worker_release_address(worker_, address);
    return out;
}

void UcpPeer::connect(const std::string &remote_address)
{
    ucp_ep_params_t params{};
    params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                        UCP_EP_PARAM_FIELD_ERR_HANDLER;
    params.address = reinterpret_cast<const ucp_address_t *>(remote_address.data());
    params.err_mode =
            settings_.peer_errors ? UCP_ERR_HANDLING_MODE_PEER : UCP_ERR_HANDLING_MODE_NONE;
    params.err_handler.cb = on_error;
    params.err_handler.arg = this;
    const ucs_status_t status = ucp_ep_create(worker_, &params, &ep_);
    if (status != UCS_OK) {
        ep_ = nullptr;
        fail("cannot reach the peer", status, tls_);
    }
}

bool UcpPeer::has_transport(const std::string &name) const
{
    char *text = nullptr;
    size_t length = 0;
    FILE *stream = open_memstream(&text, &length);
    if (stream == nullptr) {
        return false;
    }
    ucp_context_print_info(context_, stream);
    std::fclose(stream);
    const std::string info(text, length);
    std::free(text);
    // Lines such as "#  resource 1  :  md 1  dev 0  flags -- zip/eth0".
    return info.find(" " + name + "/") != std::string::npos;
}

std::string UcpPeer::endpoint_transports() const
{
    std::vector<ucp_transport_entry_t> entries(64);
    ucp_ep_attr_t attr{};
    attr.field_mask = UCP_EP_ATTR_FIELD_TRANSPORTS;
    attr.transports.entries = entries.data();
    attr.transports.num_entries = static_cast<unsigned>(entries.size());
    attr.transports.entry_size = sizeof(ucp_transport_entry_t);
    if (ep_ == nullptr || ucp_ep_query(ep_, &attr) != UCS_OK) {
        return "";
    }
    std::string out;
    for (unsigned i = 0; i < attr.transports.num_entries; ++i) {
        out += (out.empty() ? "" : " ") + std::string(entries[i].transport_name) + "/" +
               entries[i].device_name;
    }
    return out;
}

void UcpPeer::started(Batch &batch, ucs_status_ptr_t request)
{
    if (request == nullptr) {
        ++batch.done;
    } else if (UCS_PTR_IS_ERR(request)) {
        ++batch.done;
        batch.status = UCS_PTR_STATUS(request);
    }
}

void UcpPeer::send(Batch &batch, ucp_tag_t tag, const void *data, size_t size, ucp_mem_h memory)
{
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                         (memory != nullptr ? kMemory : 0U);
    param.cb.send = on_send;
    param.user_data = &batch;
    param.memh = memory;
    ++batch.posted;
    started(batch, ucp_tag_send_nbx(ep_, data, size, tag, &param));
}

void UcpPeer::receive(Receive &receive, ucp_tag_t tag, void *data, size_t size, ucp_mem_h memory)
{
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                         UCP_OP_ATTR_FLAG_NO_IMM_CMPL | (memory != nullptr ? kMemory : 0U);
    param.cb.recv = on_receive;
    param.user_data = &receive;
    param.memh = memory;
    receive.status = UCS_INPROGRESS;
    receive.request = nullptr;
    ++receive.batch->posted;
    const ucs_status_ptr_t request =
            ucp_tag_recv_nbx(worker_, data, size, tag, ~static_cast<ucp_tag_t>(0), &param);
    if (UCS_PTR_IS_ERR(request)) {
        receive.status = UCS_PTR_STATUS(request);
        ++receive.batch->done;
    } else if (receive.status == UCS_INPROGRESS) {
        receive.request = request;
    }
}

void UcpPeer::put(Batch &batch, const void *data, size_t size, uint64_t address, ucp_rkey_h key,
                  ucp_mem_h memory)
{
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                         (memory != nullptr ? kMemory : 0U);
    param.cb.send = on_send;
    param.user_data = &batch;
    param.memh = memory;
    ++batch.posted;
    started(batch, ucp_put_nbx(ep_, data, size, address, key, &param));
}

void UcpPeer::flush(Batch &batch)
{
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    param.cb.send = on_send;
    param.user_data = &batch;
    ++batch.posted;
    started(batch, ucp_ep_flush_nbx(ep_, &param));
}

void UcpPeer::cancel(Receive &receive)
{
    if (receive.request != nullptr) {
        ucp_request_cancel(worker_, receive.request);
    }
}

bool UcpPeer::flush_and_close(double timeout_s)
{
    bool closed = false;
    close_endpoint(0, timeout_s, &closed);
    return closed;
}

void UcpPeer::force_close()
{
    bool closed = false;
    close_endpoint(UCP_EP_CLOSE_FLAG_FORCE, 1.0, &closed);
}

void UcpPeer::close_endpoint(unsigned flags, double timeout_s, bool *closed)
{
    if (ep_ == nullptr) {
        *closed = true;
        return;
    }
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = flags;
    const ucs_status_ptr_t request = ucp_ep_close_nbx(std::exchange(ep_, nullptr), &param);
    if (!UCS_PTR_IS_PTR(request)) {
        *closed = request == nullptr;
        return;
    }
    const double deadline = now_s() + timeout_s;
    while (ucp_request_check_status(request) == UCS_INPROGRESS && now_s() < deadline) {
        progress();
    }
    *closed = ucp_request_check_status(request) == UCS_OK;
    ucp_request_free(request);
}

void UcpPeer::on_send(void *request, ucs_status_t status, void *user)
{
    auto *batch = static_cast<Batch *>(user);
    ++batch->done;
    if (status != UCS_OK && batch->status == UCS_OK) {
        batch->status = status;
    }
    ucp_request_free(request);
}

void UcpPeer::on_receive(void *request, ucs_status_t status, const ucp_tag_recv_info_t *info,
                         void *user)
{
    auto *receive = static_cast<Receive *>(user);
    receive->status = status;
    receive->length = status == UCS_OK ? info->length : 0;
    receive->request = nullptr;
    ++receive->batch->done;
    ucp_request_free(request);
}

void UcpPeer::on_error(void *user, ucp_ep_h, ucs_status_t status)
{
    static_cast<UcpPeer *>(user)->endpoint_status_ = status;
}

UcpMemory::UcpMemory(const UcpPeer &peer, void *address, size_t size) : peer_(peer)
{
    ucp_mem_map_params_t params{};
    params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
    params.address = address;
    params.length = size;
    const ucs_status_t status = ucp_mem_map(peer.context(), &params, &memory_);
    if (status != UCS_OK) {
        fail("cannot register memory", status, peer.tls());
    }
}

UcpMemory::~UcpMemory()
{
    ucp_mem_unmap(peer_.context(), memory_);
}

std::string UcpMemory::key() const
{
    void *buffer = nullptr;
    size_t size = 0;
    const ucs_status_t status = ucp_rkey_pack(peer_.context(), memory_, &buffer, &size);
    if (status != UCS_OK) {
        fail("cannot make a key of memory", status, peer_.tls());
    }
    std::string out(static_cast<const char *>(buffer), size);
    ucp_rkey_buffer_release(buffer);
    return out;
}

UcpRemoteKey::UcpRemoteKey(const UcpPeer &peer, const std::string &key)
{
    const ucs_status_t status = ucp_ep_rkey_unpack(peer.endpoint(), key.data(), &key_);
    if (status != UCS_OK) {
        fail("cannot use the peer's key of memory", status, peer.tls());
    }
}

} // namespace tools
