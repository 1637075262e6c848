// SPDX-License-Identifier: BSD-3-Clause
// A driver that runs kernels with the executor, so that the launcher and the kernels are tested
// without a GPU. Its streams are as lazy as they may be: nothing runs before somebody synchronizes.
#ifndef ZIP_TEST_SIMT_DRIVER_CPU_H
#define ZIP_TEST_SIMT_DRIVER_CPU_H

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "kernels/gpu/launcher.h"
#include "simt/executor.h"

namespace zip::gpu {

class CpuDriver : public Driver {
public:
    struct Launched {
        Kernel kernel;
        uint32_t blocks, threads;
        bool filling;
        Launch launch;
    };

    // Multiprocessors of the machine that it plays.
    static constexpr uint32_t MULTIPROCESSORS = 8;

    explicit CpuDriver(const simt::cpu::Machine &machine) : machine_(machine) {}
    ~CpuDriver() override;

    // The table of a back end of that wave size; open() makes a CpuDriver, which is then `opened()`
    // until it is closed.
    static const zip_gpu_api_t *api(uint32_t wave);
    static CpuDriver *opened();

    // All launches so far.
    std::vector<Launched> launches;
    // What went wrong in kernels, or calls that a GPU's driver would refuse; "" if nothing did.
    std::string error;
    // Runs what is on the stream, but for the last `keep` works (a copy, a launch, an event).
    void run(void *stream, size_t keep = 0);
    // The call after so many others fails; -1: none. All calls that can fail count, enter() too.
    int fail_after = -1;
    // With `breaks` that leaves the driver broken: all calls but enter() fail, as after an error
    // that a context keeps.
    bool breaks = false, broken = false;
    // Calls so far that can fail, whether they did or not.
    uint64_t calls = 0;

    zip_status_t enter() override;
    void leave() override;
    const DeviceInfo &info() const override { return info_; }
    zip_status_t stream_create(void **stream_p) override;
    void stream_destroy(void *stream) override;
    zip_status_t stream_synchronize(void *stream) override;
    zip_status_t stream_query(void *stream, bool *done_p) override;
    zip_status_t event_create(void **event_p) override;
    void event_destroy(void *event) override;
    zip_status_t event_record(void *event, void *stream) override;
    zip_status_t event_query(void *event, bool *done_p) override;
    zip_status_t allocate_device(size_t size, void **memory_p) override;
    void free_device(void *memory) override;
    zip_status_t allocate_pinned(size_t size, void **memory_p) override;
    void free_pinned(void *memory) override;
    zip_status_t pin(void *memory, size_t size) override;
    void unpin(void *memory) override;
    zip_status_t dmabuf(void *device_memory, size_t size, int *fd_p) override;
    zip_status_t clear(void *device_memory, size_t size, void *stream) override;
    zip_status_t copy_to_device(void *device_memory, const void *pinned, size_t size,
                                void *stream) override;
    zip_status_t copy(void *to, const void *from, size_t size, void *stream) override;
    zip_status_t write(uint64_t *word, uint64_t value, void *stream) override;
    zip_status_t launch(Kernel kernel, uint32_t blocks, uint32_t threads, bool filling,
                        void *stream, const Launch &launch) override;

private:
    struct Stream {
        std::deque<std::function<void()>> work;
    };
    struct Event {
        uint64_t recorded = 0, done = 0;
    };
    // What the call returns before it does anything: ZIP_OK if it may go on.
    zip_status_t ready(const char *what);
    void *make_memory(size_t size, bool pinned);

    simt::cpu::Machine machine_;
    DeviceInfo info_{MULTIPROCESSORS, 100 * 1024, simt::FEW_THREADS};
    int inside_ = 0;
    std::map<void *, std::unique_ptr<Stream>> streams_;
    std::map<void *, std::unique_ptr<Event>> events_;
    std::map<void *, bool> memory_; // whether it is pinned
    std::set<void *> registered_;   // memory of others that is
};

} // namespace zip::gpu
#endif
