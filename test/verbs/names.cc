// SPDX-License-Identifier: BSD-3-Clause
// The helpers of libibverbs that need no device: names of values, rates, and what programs of the
// kernel's and the providers' side look up but cannot use here.
#include <infiniband/verbs.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <iterator>

#include <fcntl.h>
#include <unistd.h>

#define API extern "C" __attribute__((visibility("default")))

API const char *ibv_wc_status_str(enum ibv_wc_status status)
{
    static const char *const names[] = {"success",
                                        "local length error",
                                        "local QP operation error",
                                        "local EE context operation error",
                                        "local protection error",
                                        "Work Request Flushed Error",
                                        "memory management operation error",
                                        "bad response error",
                                        "local access error",
                                        "remote invalid request error",
                                        "remote access error",
                                        "remote operation error",
                                        "transport retry counter exceeded",
                                        "RNR retry counter exceeded",
                                        "local RDD violation error",
                                        "remote invalid RD request",
                                        "aborted error",
                                        "invalid EE context number",
                                        "invalid EE context state",
                                        "fatal error",
                                        "response timeout error",
                                        "general error"};
    const auto i = static_cast<unsigned>(status);
    return i < std::size(names) ? names[i] : "unknown";
}

API const char *ibv_event_type_str(enum ibv_event_type event)
{
    static const char *const names[] = {"CQ error",
                                        "local work queue catastrophic error",
                                        "invalid request local work queue error",
                                        "local access violation work queue error",
                                        "communication established",
                                        "send queue drained",
                                        "path migrated",
                                        "path migration request error",
                                        "local catastrophic error",
                                        "port active",
                                        "port error",
                                        "LID change",
                                        "P_Key change",
                                        "SM change",
                                        "SRQ catastrophic error",
                                        "SRQ limit reached",
                                        "last WQE reached",
                                        "client reregistration",
                                        "GID table change",
                                        "fatal work queue error"};
    const auto i = static_cast<unsigned>(event);
    return i < std::size(names) ? names[i] : "unknown";
}

API const char *ibv_node_type_str(enum ibv_node_type type)
{
    static const char *const names[] = {"unknown", "InfiniBand channel adapter",
                                        "InfiniBand switch", "InfiniBand router"};
    const auto i = static_cast<unsigned>(type);
    return i < std::size(names) ? names[i] : "unknown";
}

API const char *ibv_port_state_str(enum ibv_port_state state)
{
    static const char *const names[] = {"no state change (NOP)", "down", "init", "armed", "active",
                                        "active defer"};
    const auto i = static_cast<unsigned>(state);
    return i < std::size(names) ? names[i] : "unknown";
}

namespace {

constexpr struct {
    ibv_rate rate;
    int multiple; // of 2.5 Gbit/s; -1: not one
    int mbps;
} kRates[] = {{IBV_RATE_2_5_GBPS, 1, 2500},    {IBV_RATE_5_GBPS, 2, 5000},
              {IBV_RATE_10_GBPS, 4, 10000},    {IBV_RATE_20_GBPS, 8, 20000},
              {IBV_RATE_30_GBPS, 12, 30000},   {IBV_RATE_40_GBPS, 16, 40000},
              {IBV_RATE_60_GBPS, 24, 60000},   {IBV_RATE_80_GBPS, 32, 80000},
              {IBV_RATE_120_GBPS, 48, 120000}, {IBV_RATE_14_GBPS, -1, 14062},
              {IBV_RATE_56_GBPS, -1, 56250},   {IBV_RATE_112_GBPS, -1, 112500},
              {IBV_RATE_168_GBPS, -1, 168750}, {IBV_RATE_25_GBPS, -1, 25781},
              {IBV_RATE_100_GBPS, -1, 103125}, {IBV_RATE_200_GBPS, -1, 206250},
              {IBV_RATE_300_GBPS, -1, 309375}};

} // namespace

API int ibv_rate_to_mult(enum ibv_rate rate)
{
    for (const auto &r : kRates) {
        if (r.rate == rate) {
            return r.multiple;
        }
    }
    return -1;
}

API enum ibv_rate mult_to_ibv_rate(int multiple)
{
    for (const auto &r : kRates) {
        if (r.multiple == multiple && multiple > 0) {
            return r.rate;
        }
    }
    return IBV_RATE_MAX;
}

API int ibv_rate_to_mbps(enum ibv_rate rate)
{
    for (const auto &r : kRates) {
        if (r.rate == rate) {
            return r.mbps;
        }
    }
    return -1;
}

API enum ibv_rate mbps_to_ibv_rate(int mbps)
{
    for (const auto &r : kRates) {
        if (r.mbps == mbps) {
            return r.rate;
        }
    }
    return IBV_RATE_MAX;
}

API const char *ibv_get_sysfs_path(void)
{
    return "/sys";
}

// Reads one line of a file below `directory`, without its newline. open() is this library's own.
API int ibv_read_sysfs_file(const char *directory, const char *file, char *buffer, size_t size)
{
    char path[512];
    if (strlen(directory) + strlen(file) + 2 > sizeof(path) || size == 0) {
        return -1;
    }
    strcpy(path, directory);
    strcat(path, "/");
    strcat(path, file);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return -1;
    }
    const ssize_t length = read(fd, buffer, size - 1);
    close(fd);
    if (length <= 0) {
        return -1;
    }
    buffer[length] = 0;
    char *newline = strchr(buffer, '\n');
    if (newline != nullptr) {
        *newline = 0;
    }
    return static_cast<int>(strlen(buffer));
}

// Called by the providers' libraries (libmlx5, libefa), which programs link and which find nothing
// to drive here, and by librdmacm, which finds no device of the kernel's either. They must exist:
// the dynamic linker resolves some of them when such a library is loaded.
#define UNUSABLE(name)                                                                             \
    API int name(void)                                                                             \
    {                                                                                              \
        return EOPNOTSUPP;                                                                         \
    }
#define UNUSABLE_POINTER(name)                                                                     \
    API void *name(void)                                                                           \
    {                                                                                              \
        errno = EOPNOTSUPP;                                                                        \
        return nullptr;                                                                            \
    }
#define IGNORED(name)                                                                              \
    API void name(void) {}

UNUSABLE(__ioctl_final_num_attrs)
IGNORED(__verbs_log)
UNUSABLE_POINTER(_verbs_init_and_alloc_context)
UNUSABLE(execute_ioctl)
UNUSABLE(ibv_cmd_advise_mr)
UNUSABLE(ibv_cmd_alloc_dm)
UNUSABLE(ibv_cmd_alloc_mw)
UNUSABLE(ibv_cmd_alloc_pd)
UNUSABLE(ibv_cmd_attach_mcast)
UNUSABLE(ibv_cmd_close_xrcd)
UNUSABLE(ibv_cmd_create_ah)
UNUSABLE(ibv_cmd_create_counters)
UNUSABLE(ibv_cmd_create_cq)
UNUSABLE(ibv_cmd_create_cq_ex)
UNUSABLE(ibv_cmd_create_flow)
UNUSABLE(ibv_cmd_create_flow_action_esp)
UNUSABLE(ibv_cmd_create_qp)
UNUSABLE(ibv_cmd_create_qp_ex)
UNUSABLE(ibv_cmd_create_qp_ex2)
UNUSABLE(ibv_cmd_create_rwq_ind_table)
UNUSABLE(ibv_cmd_create_srq)
UNUSABLE(ibv_cmd_create_srq_ex)
UNUSABLE(ibv_cmd_create_wq)
UNUSABLE(ibv_cmd_dealloc_mw)
UNUSABLE(ibv_cmd_dealloc_pd)
UNUSABLE(ibv_cmd_dereg_mr)
UNUSABLE(ibv_cmd_destroy_ah)
UNUSABLE(ibv_cmd_destroy_counters)
UNUSABLE(ibv_cmd_destroy_cq)
UNUSABLE(ibv_cmd_destroy_flow)
UNUSABLE(ibv_cmd_destroy_flow_action)
UNUSABLE(ibv_cmd_destroy_qp)
UNUSABLE(ibv_cmd_destroy_rwq_ind_table)
UNUSABLE(ibv_cmd_destroy_srq)
UNUSABLE(ibv_cmd_destroy_wq)
UNUSABLE(ibv_cmd_detach_mcast)
UNUSABLE(ibv_cmd_free_dm)
UNUSABLE(ibv_cmd_get_context)
UNUSABLE(ibv_cmd_modify_cq)
UNUSABLE(ibv_cmd_modify_flow_action_esp)
UNUSABLE(ibv_cmd_modify_qp)
UNUSABLE(ibv_cmd_modify_qp_ex)
UNUSABLE(ibv_cmd_modify_srq)
UNUSABLE(ibv_cmd_modify_wq)
UNUSABLE(ibv_cmd_open_qp)
UNUSABLE(ibv_cmd_open_xrcd)
UNUSABLE(ibv_cmd_poll_cq)
UNUSABLE(ibv_cmd_post_recv)
UNUSABLE(ibv_cmd_post_send)
UNUSABLE(ibv_cmd_post_srq_recv)
UNUSABLE(ibv_cmd_query_context)
UNUSABLE(ibv_cmd_query_device_any)
UNUSABLE(ibv_cmd_query_mr)
UNUSABLE(ibv_cmd_query_port)
UNUSABLE(ibv_cmd_query_qp)
UNUSABLE(ibv_cmd_query_srq)
UNUSABLE(ibv_cmd_read_counters)
UNUSABLE(ibv_cmd_reg_dm_mr)
UNUSABLE(ibv_cmd_reg_dmabuf_mr)
UNUSABLE(ibv_cmd_reg_mr)
UNUSABLE(ibv_cmd_req_notify_cq)
UNUSABLE(ibv_cmd_rereg_mr)
UNUSABLE(ibv_cmd_resize_cq)
UNUSABLE(ibv_read_ibdev_sysfs_file)
IGNORED(verbs_allow_disassociate_destroy)
IGNORED(verbs_init_cq)
UNUSABLE_POINTER(verbs_open_device)
IGNORED(verbs_register_driver_34)
IGNORED(ibv_register_driver)
IGNORED(verbs_set_ops)
IGNORED(verbs_uninit_context)
IGNORED(ibv_copy_ah_attr_from_kern)
IGNORED(ibv_copy_path_rec_from_kern)
IGNORED(ibv_copy_path_rec_to_kern)
IGNORED(ibv_copy_qp_attr_from_kern)

API int ibv_dontfork_range(void *, size_t)
{
    return 0;
}

API int ibv_dofork_range(void *, size_t)
{
    return 0;
}
