// SPDX-License-Identifier: BSD-3-Clause
// What the installed headers of UCX (1.22 and later) leave out about libuct, as far as this
// transport touches it.
//
// Facts of the binary interface only. Nothing here is trusted at run time: ucx_guard.cc tests every
// declaration against the loaded library before anything is registered. A structure that only a
// later release makes longer ends in spare slots.
#ifndef ZIP_UCX_ABI_H
#define ZIP_UCX_ABI_H

#include <cstddef>
#include <cstdint>

extern "C" {
#include <ucs/config/parser.h>
#include <ucs/datastruct/list.h>
#include <ucs/memory/memory_type.h>
#include <ucs/sys/topo/base/topo.h>
#include <ucs/type/class.h>
#include <uct/api/uct.h>
#include <uct/api/version.h>
}

#if UCT_API < UCT_VERSION(1, 22)
#error "UCX 1.22 or later is needed; configure checks this"
#endif

namespace zip::ucx {

struct Component;
struct MdAttr;
struct PerfAttr;

// A slot of an operation table that this transport does not implement.
using Slot = ucs_status_t (*)();
constexpr size_t OPS_SLOTS = 32; // more than any release reads

struct ReachableParams {
    enum : uint64_t {
        DEVICE_ADDR = 1u << 0,
        IFACE_ADDR = 1u << 1,
        INFO_STRING = 1u << 2,
        INFO_STRING_LENGTH = 1u << 3,
        SCOPE = 1u << 4,
        DEVICE_ADDR_LENGTH = 1u << 5,
        IFACE_ADDR_LENGTH = 1u << 6
    };
    uint64_t field_mask;
    const uct_device_addr_t *device_addr;
    const uct_iface_addr_t *iface_addr;
    char *info_string;
    size_t info_string_length;
    int scope;
    size_t device_addr_length;
    size_t iface_addr_length;
};

struct ConnectedParams {
    enum : uint64_t { DEVICE_ADDR = 1u << 0, IFACE_ADDR = 1u << 1, EP_ADDR = 1u << 2 };
    uint64_t field_mask;
    const uct_device_addr_t *device_addr;
    const uct_iface_addr_t *iface_addr;
    const uct_ep_addr_t *ep_addr;
};

struct ConnectToEpParams {
    enum : uint64_t { DEVICE_ADDR_LENGTH = 1u << 0, EP_ADDR_LENGTH = 1u << 1 };
    uint64_t field_mask;
    size_t device_addr_length;
    size_t ep_addr_length;
};

// Registration parameters; passed on by pointer, only the head is read.
struct MemRegParams {
    enum : uint64_t { FLAGS = 1u << 0, DMABUF_FD = 1u << 1, DMABUF_OFFSET = 1u << 2 };
    uint64_t field_mask;
    uint64_t flags;
    int dmabuf_fd; // for domains that take one
    size_t dmabuf_offset;
};

struct MemDeregParams {
    enum : uint64_t { MEMH = 1u << 0 };
    uint64_t field_mask;
    unsigned flags;
    uct_mem_h memh; // a completion, for domains that invalidate remote keys, follows
};

// One transport of a component.
struct Tl {
    char name[UCT_TL_NAME_MAX];
    ucs_status_t (*query_devices)(uct_md_h, struct TlDevice **, unsigned *);
    ucs_status_t (*iface_open)(uct_md_h, uct_worker_h, const uct_iface_params_t *,
                               const uct_iface_config_t *, uct_iface_h *);
    ucs_config_global_list_entry_t config;
    ucs_list_link_t list; // link in Component::tl_list
};

struct TlDevice {
    char name[UCT_DEVICE_NAME_MAX];
    uct_device_type_t type;
    ucs_sys_device_t sys_device;
};

// One component a plugin, linked into uct_components_list.
struct Component {
    char name[UCT_COMPONENT_NAME_MAX];
    ucs_status_t (*query_md_resources)(uct_component_h, uct_md_resource_desc_t **, unsigned *);
    ucs_status_t (*md_open)(uct_component_h, const char *, const uct_md_config_t *, uct_md_h *);
    Slot cm_open;
    ucs_status_t (*rkey_unpack)(uct_component_h, const void *, const void *, uct_rkey_t *, void **);
    Slot rkey_ptr;
    ucs_status_t (*rkey_release)(uct_component_h, uct_rkey_t, void *);
    ucs_status_t (*rkey_compare)(uct_component_h, uct_rkey_t, uct_rkey_t, const void *, int *);
    ucs_config_global_list_entry_t md_config;
    ucs_config_global_list_entry_t cm_config;
    ucs_list_link_t tl_list;
    ucs_list_link_t list; // link in uct_components_list
    uint64_t flags;
    void (*md_vfs_init)(uct_md_h);
};

struct MdOps {
    void (*close)(uct_md_h);
    ucs_status_t (*query)(uct_md_h, MdAttr *);
    Slot mem_alloc;
    Slot mem_free;
    Slot mem_advise;
    ucs_status_t (*mem_reg)(uct_md_h, void *, size_t, const MemRegParams *, uct_mem_h *);
    ucs_status_t (*mem_dereg)(uct_md_h, const MemDeregParams *);
    Slot mem_query;
    ucs_status_t (*mkey_pack)(uct_md_h, uct_mem_h, void *, size_t, const void *, void *);
    Slot mem_attach;
    Slot detect_memory_type;
    Slot mem_elem_pack;
    Slot spare[OPS_SLOTS - 12]; // 1.23: mem_elem_release
};

struct Md {
    MdOps *ops;
    Component *component;
};

struct MdAttr {
    uint64_t field_mask;
    uint64_t max_alloc;
    size_t max_reg;
    uint64_t flags;
    uint64_t reg_mem_types;
    uint64_t reg_nonblock_mem_types;
    uint64_t cache_mem_types;
    uint64_t gva_mem_types;
    uint64_t detect_mem_types;
    uint64_t alloc_mem_types;
    uint64_t access_mem_types;
    uint64_t dmabuf_mem_types;
    ucs_linear_func_t reg_cost;
    char component_name[UCT_COMPONENT_NAME_MAX];
    size_t rkey_packed_size;
    ucs_cpu_set_t local_cpus;
    size_t exported_mkey_packed_size;
    char global_id[UCT_MD_GLOBAL_ID_MAX];
    size_t reg_alignment;
    uint8_t required_mem_flags;
};

// field_mask has one bit a field, in this order.
struct PerfAttr {
    enum : uint64_t {
        OPERATION = 1u << 0,
        LOCAL_MEMORY_TYPE = 1u << 1,
        REMOTE_MEMORY_TYPE = 1u << 2,
        SEND_PRE_OVERHEAD = 1u << 5,
        SEND_POST_OVERHEAD = 1u << 6,
        RECV_OVERHEAD = 1u << 7,
        BANDWIDTH = 1u << 8,
        PATH_BANDWIDTH = 1u << 9,
        LATENCY = 1u << 10,
        MAX_INFLIGHT_EPS = 1u << 11,
        FLAGS = 1u << 12
    };
    uint64_t field_mask;
    int operation;
    ucs_memory_type_t local_memory_type;
    ucs_memory_type_t remote_memory_type;
    ucs_sys_device_t local_sys_device;
    ucs_sys_device_t remote_sys_device;
    double send_pre_overhead;
    double send_post_overhead;
    double recv_overhead;
    uct_ppn_bandwidth_t bandwidth;
    uct_ppn_bandwidth_t path_bandwidth;
    ucs_linear_func_t latency;
    size_t max_inflight_eps;
    uint64_t flags;
};

constexpr int EP_OP_PUT_ZCOPY = 5, EP_OP_GET_ZCOPY = 8; // of what PerfAttr::operation names

struct InternalOps {
    Slot iface_query_v2;
    ucs_status_t (*iface_estimate_perf)(uct_iface_h, PerfAttr *);
    void (*iface_vfs_refresh)(uct_iface_h);
    Slot ep_query;
    Slot ep_invalidate;
    ucs_status_t (*ep_connect_to_ep_v2)(uct_ep_h, const uct_device_addr_t *, const uct_ep_addr_t *,
                                        const ConnectToEpParams *);
    int (*iface_is_reachable_v2)(uct_iface_h, const ReachableParams *);
    int (*ep_is_connected)(uct_ep_h, const ConnectedParams *);
    Slot ep_get_device_ep;
    Slot ep_put_sgl_zcopy;
    Slot spare[OPS_SLOTS - 10]; // 1.23: ep_get_sgl_zcopy, ep_outstanding_purge
};

// libuct constructs its own parts in these three. Only the head is read here; the tail has to be
// large enough, which the guard checks against the sizes that the library itself states.
struct alignas(16) BaseIface {
    uct_iface_t super;
    InternalOps *internal_ops;
    uct_md_h md;
    uct_worker_h worker;
    char tail[2048];
};

struct alignas(16) BaseEp {
    uct_ep_t super;
    char tail[56];
};

struct alignas(16) IfaceConfig {
    char tail[256];
};

} // namespace zip::ucx

// Functions that libuct exports without an installed declaration. Calls go through ucx_bind.h's
// table.
extern "C" {
ucs_status_t uct_base_iface_t_init(zip::ucx::BaseIface *, ucs_class_t *, int *, uct_iface_ops_t *,
                                   zip::ucx::InternalOps *, uct_md_h, uct_worker_h,
                                   const uct_iface_params_t *, const uct_iface_config_t *);
ucs_status_t uct_base_ep_t_init(zip::ucx::BaseEp *, ucs_class_t *, int *, zip::ucx::BaseIface *);
void uct_base_iface_query(zip::ucx::BaseIface *, uct_iface_attr_t *);
int uct_base_iface_is_reachable(const uct_iface_h, const uct_device_addr_t *,
                                const uct_iface_addr_t *);
ucs_status_t uct_base_ep_connect_to_ep(uct_ep_h, const uct_device_addr_t *, const uct_ep_addr_t *);
ucs_status_t uct_base_iface_estimate_perf(uct_iface_h, zip::ucx::PerfAttr *);
ucs_status_t uct_iface_handle_ep_err(uct_iface_h, uct_ep_h, ucs_status_t);
ucs_status_t uct_iface_base_query_v2(uct_iface_h, void *);
void uct_component_register(zip::ucx::Component *);
void uct_component_unregister(zip::ucx::Component *);
void uct_tl_register(zip::ucx::Component *, zip::ucx::Tl *);
void uct_tl_unregister(zip::ucx::Tl *);
void uct_md_base_md_query(zip::ucx::MdAttr *);

// Entry points of the "v2" interface, whose header is not installed.
ucs_status_t uct_md_query_v2(uct_md_h, zip::ucx::MdAttr *);
ucs_status_t uct_md_mem_reg_v2(uct_md_h, void *, size_t, const zip::ucx::MemRegParams *,
                               uct_mem_h *);
int uct_iface_is_reachable_v2(uct_iface_h, const zip::ucx::ReachableParams *);
int uct_ep_is_connected(uct_ep_h, const zip::ucx::ConnectedParams *);
ucs_status_t uct_ep_connect_to_ep_v2(uct_ep_h, const uct_device_addr_t *, const uct_ep_addr_t *,
                                     const zip::ucx::ConnectToEpParams *);
ucs_status_t uct_iface_estimate_perf(uct_iface_h, zip::ucx::PerfAttr *);
}

#endif
