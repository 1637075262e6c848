// SPDX-License-Identifier: BSD-3-Clause
// Many buffers at once, on several threads.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>
#include <system_error>
#include <thread>

#include "kernels/codec.h"

namespace {

// Processors that the process may run on.
unsigned available_threads()
{
    cpu_set_t set;
    const int n = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
    return n > 0 ? unsigned(n) : 1;
}

using Work = void (*)(zip_job_t &job);

// Does all jobs, which the threads take in turn: however they differ in length, all threads end at
// about the same time.
zip_status_t run(zip_job_t *jobs, size_t count, unsigned threads, Work work)
{
    if (jobs == nullptr && count != 0)
        return ZIP_ERR_INVALID_PARAM;
    if (threads == 0)
        threads = available_threads();
    threads = unsigned(std::min<size_t>(threads, count));

    std::atomic<size_t> next{0};
    const auto take = [&] {
        for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;)
            work(jobs[i]);
    };
    const std::unique_ptr<std::thread[]> helpers(
            threads > 1 ? new (std::nothrow) std::thread[threads - 1] : nullptr);
    unsigned started = 0;
    try {
        for (; helpers != nullptr && started + 1 < threads; ++started)
            helpers[started] = std::thread(take);
    } catch (const std::exception &) { // no more threads, or no memory for one: the others do it
    }
    take();
    for (unsigned i = 0; i < started; ++i)
        helpers[i].join();

    for (size_t i = 0; i < count; ++i) {
        if (jobs[i].status != ZIP_OK)
            return jobs[i].status;
    }
    return ZIP_OK;
}

} // namespace

zip_status_t zip_codec_encode_batch(zip_job_t *jobs, size_t count, unsigned threads)
{
    return run(jobs, count, threads, [](zip_job_t &job) {
        job.encoded = 0;
        job.status = zip_codec_encode(job.coding, job.src, job.src_size, job.dst, job.dst_size,
                                      &job.encoded);
    });
}

zip_status_t zip_codec_decode_batch(zip_job_t *jobs, size_t count, unsigned threads)
{
    return run(jobs, count, threads, [](zip_job_t &job) {
        job.status = zip_codec_decode(job.src, job.src_size, job.dst, job.dst_size);
    });
}
