// SPDX-License-Identifier: BSD-3-Clause
// GPU memory on the software verbs device: WRITE, READ and SEND between two processes, from and to
// GPU memory, data compared, bandwidth printed. Needs a GPU; uses the driver by dlopen().
//   test_gpu [MiB]        SWVERBS_... as for any program; exit status 77: no GPU
#include <infiniband/verbs.h>

#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

using CUdeviceptr = unsigned long long;

struct Driver {
    int (*init)(unsigned);
    int (*count)(int *);
    int (*retain)(void **, int);
    int (*set_current)(void *);
    int (*alloc)(CUdeviceptr *, size_t);
    int (*release)(CUdeviceptr);
    int (*to_device)(CUdeviceptr, const void *, size_t);
    int (*to_host)(void *, CUdeviceptr, size_t);
    int (*synchronize)();

    bool load()
    {
        void *library = dlopen("libcuda.so.1", RTLD_NOW);
        if (library == nullptr) {
            return false;
        }
        const auto find = [library](auto &function, const char *name) {
            function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
            return function != nullptr;
        };
        return find(init, "cuInit") && find(count, "cuDeviceGetCount") &&
               find(retain, "cuDevicePrimaryCtxRetain") && find(set_current, "cuCtxSetCurrent") &&
               find(alloc, "cuMemAlloc_v2") && find(release, "cuMemFree_v2") &&
               find(to_device, "cuMemcpyHtoD_v2") && find(to_host, "cuMemcpyDtoH_v2") &&
               find(synchronize, "cuCtxSynchronize") && init(0) == 0;
    }
} cu;

int rank, channel, failures;

double now()
{
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

#define REQUIRE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "rank %d, line %d: %s (errno %d)\n", rank, __LINE__, #condition,       \
                    errno);                                                                        \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)

void exchange(const void *mine, void *theirs, size_t size)
{
    REQUIRE(write(channel, mine, size) == static_cast<ssize_t>(size));
    REQUIRE(recv(channel, theirs, size, MSG_WAITALL) == static_cast<ssize_t>(size));
}

void barrier()
{
    char a = 0, b;
    exchange(&a, &b, 1);
}

struct Region {
    bool gpu;
    uint64_t address;
    size_t size;
    ibv_mr *mr;

    Region(ibv_pd *pd, bool on_gpu, size_t bytes) : gpu(on_gpu), size(bytes)
    {
        const int access =
                IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
        if (gpu) {
            CUdeviceptr p;
            REQUIRE(cu.alloc(&p, size) == 0);
            address = p;
            // the way of UCX: a probe, then any descriptor and the CUDA address as iova
            REQUIRE(ibv_reg_dmabuf_mr(pd, 0, 1, 0, -1, access) == nullptr && errno == EBADF);
            const int fd = open("/dev/null", O_RDWR);
            mr = ibv_reg_dmabuf_mr(pd, 0, size, address, fd, access);
            close(fd);
        } else {
            address = reinterpret_cast<uintptr_t>(mmap(nullptr, size, PROT_READ | PROT_WRITE,
                                                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
            mr = ibv_reg_mr(pd, reinterpret_cast<void *>(address), size, access);
        }
        REQUIRE(mr != nullptr);
    }
    ~Region()
    {
        REQUIRE(ibv_dereg_mr(mr) == 0);
        if (gpu) {
            REQUIRE(cu.release(address) == 0);
        } else {
            munmap(reinterpret_cast<void *>(address), size);
        }
    }
    Region(const Region &) = delete;
    Region &operator=(const Region &) = delete;

    void fill(uint32_t seed)
    {
        std::vector<uint32_t> words(size / 4);
        for (size_t i = 0; i < words.size(); i++) {
            words[i] = (static_cast<uint32_t>(i) + seed) * 2654435761u;
        }
        if (gpu) {
            REQUIRE(cu.to_device(address, words.data(), size) == 0 && cu.synchronize() == 0);
        } else {
            memcpy(reinterpret_cast<void *>(address), words.data(), size);
        }
    }
    size_t wrong(uint32_t seed, size_t bytes)
    {
        std::vector<uint32_t> words(bytes / 4);
        if (gpu) {
            REQUIRE(cu.to_host(words.data(), address, bytes) == 0);
        } else {
            memcpy(words.data(), reinterpret_cast<void *>(address), bytes);
        }
        size_t count = 0;
        for (size_t i = 0; i < words.size(); i++) {
            count += words[i] != (static_cast<uint32_t>(i) + seed) * 2654435761u ? 1 : 0;
        }
        return count;
    }
};

struct Info {
    uint32_t qpn, lid, rkey, reserved;
    uint64_t address;
};

void connect(ibv_qp *qp, const Info &peer)
{
    ibv_qp_attr a = {};
    a.qp_state = IBV_QPS_INIT;
    a.port_num = 1;
    a.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
    REQUIRE(ibv_modify_qp(qp, &a,
                          IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) ==
            0);
    a.qp_state = IBV_QPS_RTR;
    a.path_mtu = IBV_MTU_4096;
    a.dest_qp_num = peer.qpn;
    a.ah_attr.dlid = static_cast<uint16_t>(peer.lid);
    a.ah_attr.port_num = 1;
    a.max_dest_rd_atomic = 16;
    a.min_rnr_timer = 1;
    REQUIRE(ibv_modify_qp(qp, &a,
                          IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                                  IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
                                  IBV_QP_MIN_RNR_TIMER) == 0);
    a.qp_state = IBV_QPS_RTS;
    a.timeout = 18;
    a.retry_cnt = 7;
    a.rnr_retry = 7;
    a.max_rd_atomic = 16;
    REQUIRE(ibv_modify_qp(qp, &a,
                          IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                  IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC) == 0);
}

ibv_wc wait(ibv_cq *cq)
{
    ibv_wc wc;
    for (const double end = now() + 30; ibv_poll_cq(cq, 1, &wc) == 0;) {
        REQUIRE(now() < end);
    }
    if (wc.status != IBV_WC_SUCCESS) {
        fprintf(stderr, "rank %d: %s\n", rank, ibv_wc_status_str(wc.status));
        _exit(1);
    }
    return wc;
}

// One combination of places; rank 0 acts.
void measure(ibv_context *context, ibv_pd *pd, ibv_wr_opcode opcode, bool local_gpu,
             bool remote_gpu, size_t largest)
{
    ibv_cq *cq = ibv_create_cq(context, 256, nullptr, nullptr, 0);
    ibv_qp_init_attr init = {};
    init.send_cq = init.recv_cq = cq;
    init.qp_type = IBV_QPT_RC;
    init.cap = {64, 64, 1, 1, 0};
    ibv_qp *qp = ibv_create_qp(pd, &init);
    REQUIRE(qp != nullptr);
    {
        Region region(pd, rank == 0 ? local_gpu : remote_gpu, largest);
        ibv_port_attr port;
        REQUIRE(ibv_query_port(context, 1, &port) == 0);
        const Info mine = {qp->qp_num, port.lid, region.mr->rkey, 0, region.address};
        Info peer;
        exchange(&mine, &peer, sizeof(mine));
        connect(qp, peer);
        const bool source = opcode == IBV_WR_RDMA_READ ? rank == 1 : rank == 0;
        for (size_t n = 4096; n <= largest; n *= 16) {
            region.fill(source ? 1 : 1000);
            const int count = n > (16 << 20) ? 8 : 32;
            if (opcode == IBV_WR_SEND && rank == 1) {
                for (int i = 0; i < 64; i++) {
                    ibv_sge sge = {region.address, static_cast<uint32_t>(n), region.mr->lkey};
                    ibv_recv_wr wr = {}, *bad;
                    wr.sg_list = &sge;
                    wr.num_sge = 1;
                    REQUIRE(i >= count + 1 || ibv_post_recv(qp, &wr, &bad) == 0);
                }
            }
            barrier();
            if (rank == 0) {
                double start = 0;
                for (int i = 0; i <= count; i++) { // the first opens handles
                    ibv_sge sge = {region.address, static_cast<uint32_t>(n), region.mr->lkey};
                    ibv_send_wr wr = {}, *bad;
                    wr.sg_list = &sge;
                    wr.num_sge = 1;
                    wr.opcode = opcode;
                    wr.send_flags = IBV_SEND_SIGNALED;
                    wr.wr.rdma.remote_addr = peer.address;
                    wr.wr.rdma.rkey = peer.rkey;
                    REQUIRE(ibv_post_send(qp, &wr, &bad) == 0);
                    if (i == 0) {
                        wait(cq);
                        start = now();
                    }
                }
                for (int i = 0; i < count; i++) {
                    wait(cq);
                }
                const double time = now() - start;
                printf("%-5s %s -> %s %10zu bytes: %9.2f us each, %8.3f GB/s\n",
                       opcode == IBV_WR_SEND        ? "send"
                       : opcode == IBV_WR_RDMA_READ ? "read"
                                                    : "write",
                       (opcode == IBV_WR_RDMA_READ ? remote_gpu : local_gpu) ? "gpu " : "host",
                       (opcode == IBV_WR_RDMA_READ ? local_gpu : remote_gpu) ? "gpu " : "host", n,
                       time / count * 1e6, static_cast<double>(n) * count / time * 1e-9);
                fflush(stdout);
            } else if (opcode == IBV_WR_SEND) {
                for (int i = 0; i <= count; i++) {
                    wait(cq);
                }
            }
            barrier();
            if (!source) {
                const size_t wrong = region.wrong(1, n);
                if (wrong != 0) {
                    fprintf(stderr, "rank %d: %zu of %zu words are wrong\n", rank, wrong, n / 4);
                    failures++;
                }
                if (region.size > n && region.wrong(1, n + 4096) - wrong < 1000) {
                    fprintf(stderr, "rank %d: bytes behind the message were written\n", rank);
                    failures++;
                }
            }
            barrier();
        }
    }
    REQUIRE(ibv_destroy_qp(qp) == 0 && ibv_destroy_cq(cq) == 0);
    barrier();
}

} // namespace

int main(int argc, char **argv)
{
    const size_t largest = static_cast<size_t>(argc > 1 ? atoi(argv[1]) : 256) << 20;
    int ends[2];
    if (largest == 0 || socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) {
        return 1;
    }
    const pid_t child = fork(); // before any call of CUDA or verbs
    rank = child == 0 ? 1 : 0;
    channel = ends[rank];
    close(ends[1 - rank]);
    int gpus = 0;
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
    }
    if (!cu.load() || cu.count(&gpus) != 0 || gpus == 0) {
        if (rank == 0) {
            printf("no GPU\n");
            waitpid(child, nullptr, 0);
        }
        return 77;
    }
    void *primary;
    // two GPUs where there are two
    REQUIRE(cu.retain(&primary, rank % gpus) == 0 && cu.set_current(primary) == 0);
    ibv_device **list = ibv_get_device_list(nullptr);
    REQUIRE(list != nullptr && list[0] != nullptr);
    ibv_context *context = ibv_open_device(list[0]);
    ibv_pd *pd = ibv_alloc_pd(context);
    for (const ibv_wr_opcode opcode : {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_SEND}) {
        for (const int places : {3, 1, 2, 0}) { // again and again: regions come and go
            measure(context, pd, opcode, (places & 1) != 0, (places & 2) != 0, largest);
        }
    }
    int theirs;
    exchange(&failures, &theirs, sizeof(failures));
    REQUIRE(ibv_dealloc_pd(pd) == 0 && ibv_close_device(context) == 0);
    if (rank == 0) {
        int status = 0;
        waitpid(child, &status, 0);
        printf(failures + theirs == 0 && status == 0 ? "all data right\n" : "FAILED\n");
        return failures + theirs == 0 && status == 0 ? 0 : 1;
    }
    return failures == 0 ? 0 : 1;
}
