// SPDX-License-Identifier: BSD-3-Clause
// Memory of several GPUs on the software verbs device, by a driver for tests that is as strict
// about contexts as the real one.
#include "fake_libcuda.h"
#include "test_support.h"

#include <fcntl.h>

#include <cstring>

namespace test {
namespace {

constexpr size_t kSize = 3 << 20;
constexpr int kAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;

// As UCX does it: any descriptor, and the CUDA address as iova.
ibv_mr *register_gpu(ibv_pd *pd, uint64_t address)
{
    const int file = open("/dev/null", O_RDWR);
    ibv_mr *const mr = ibv_reg_dmabuf_mr(pd, 0, kSize, address, file, kAccess);
    close(file);
    return mr;
}

TEST(Contexts, MemoryIsRegisteredWhateverTheThreadsContextIs)
{
    run(1, {}, [](int) {
        End e;
        for (void *mine :
             {static_cast<void *>(nullptr), fake_cuda_context(0), fake_cuda_context(1)}) {
            for (int gpu : {0, 1}) {
                const uint64_t address = fake_cuda_allocate(gpu, kSize);
                ASSERT_NE(address, 0u);
                cuCtxSetCurrent(mine);
                ibv_mr *const mr = register_gpu(e.pd, address);
                ASSERT_NE(mr, nullptr) << "memory of GPU " << gpu;
                void *after = nullptr;
                cuCtxGetCurrent(&after);
                EXPECT_EQ(after, mine) << "the thread's context was changed";
                EXPECT_EQ(ibv_dereg_mr(mr), 0);
            }
        }
    });
}

// From each GPU to each: nothing goes through host memory.
TEST(Contexts, AGpuReachesTheOthersMemory)
{
    run(2, {}, [](int r) {
        End e;
        e.connect(1 - r);
        for (int from : {0, 1}) {
            for (int to : {0, 1}) {
                const int gpu = r == 0 ? from : to;
                const uint64_t address = fake_cuda_allocate(gpu, kSize);
                ibv_mr *const mr = register_gpu(e.pd, address);
                ASSERT_NE(mr, nullptr);
                auto *const bytes = reinterpret_cast<uint8_t *>(address);
                memset(bytes, r == 0 ? 0x40 + 2 * from + to : 0, kSize);
                board->value[2 * r] = address;
                board->value[2 * r + 1] = mr->rkey;
                barrier();
                if (r == 0) {
                    ibv_sge sge = {address, kSize, mr->lkey};
                    ibv_send_wr wr = e.write_request(sge, 0, kSize, 0);
                    sge = {address, kSize, mr->lkey};
                    wr.wr.rdma.remote_addr = board->value[2];
                    wr.wr.rdma.rkey = static_cast<uint32_t>(board->value[3]);
                    ASSERT_EQ(e.post(wr), 0);
                    EXPECT_EQ(e.wait().status, IBV_WC_SUCCESS);
                    EXPECT_EQ(fake_cuda_slow_copies(), 0u) << "from " << from << " to " << to;
                }
                barrier();
                if (r == 1) {
                    for (size_t i = 0; i < kSize; i += 4095) {
                        ASSERT_EQ(bytes[i], 0x40 + 2 * from + to);
                    }
                }
                barrier();
                EXPECT_EQ(ibv_dereg_mr(mr), 0);
            }
        }
    });
}

} // namespace
} // namespace test

int main(int argc, char **argv)
{
    testing::InitGoogleTest(&argc, argv);
    return RUN_ALL_TESTS();
}
