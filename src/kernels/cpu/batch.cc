// SPDX-License-Identifier: BSD-3-Clause
// Many buffers at once, on several threads: the caller and helpers, which all callers share.
#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <atomic>

#include "kernels/codec.h"
#include "kernels/cpu/internal.h"

namespace zip::cpu {
namespace {

// A batch under way, on its caller's stack.
struct Call {
    zip_job_t *jobs;
    size_t count;
    Work work;
    std::atomic<size_t> next; // job that nobody has taken
    // under the pool's lock
    unsigned wanted; // helpers that may still come
    unsigned inside; // helpers that have come and not left
    Call *behind;    // in the pool's list

    // The threads take the jobs in turn: however they differ in length, all end at about the same
    // time.
    void take()
    {
        for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;)
            work(jobs[i]);
    }
};

// Helpers are made when a batch first wants them and sleep between batches. A caller never waits
// for one to come, only for those that came to leave: so a job may be a batch itself.
// Nothing here is constructed or destroyed while the program runs: a child of fork() begins anew,
// and a batch works at any time, even while the process ends.
struct Pool {
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t called = PTHREAD_COND_INITIALIZER; // there is a call, or `ended`
    pthread_cond_t left = PTHREAD_COND_INITIALIZER;   // a call has no helper inside
    Call *calls = nullptr;                            // that want helpers
    unsigned helpers = 0;
};
constinit Pool pool;
pthread_t threads_of_helpers[CPU_SETSIZE]; // available_threads() is never more
bool ended;                                // under the lock
bool forks_seen;

// In a child of fork(): the helpers stayed in the parent, and so did who may hold the lock.
void begin_anew()
{
    pool = {};
}

__attribute__((constructor)) void see_forks()
{
    forks_seen = pthread_atfork(nullptr, nullptr, begin_anew) == 0;
}

// When the process ends or the library is unloaded: no helper may run its code any longer.
__attribute__((destructor)) void end_helpers()
{
    pthread_mutex_lock(&pool.lock);
    ended = true;
    const unsigned helpers = pool.helpers;
    pool.helpers = 0;
    pthread_cond_broadcast(&pool.called);
    pthread_mutex_unlock(&pool.lock);
    for (unsigned i = 0; i < helpers; ++i)
        pthread_join(threads_of_helpers[i], nullptr);
}

void *help(void *)
{
    pthread_setname_np(pthread_self(), "zip-codec");
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (pool.calls == nullptr && !ended)
            pthread_cond_wait(&pool.called, &pool.lock);
        if (ended)
            break;
        Call &call = *pool.calls;
        if (--call.wanted == 0)
            pool.calls = call.behind;
        ++call.inside;
        pthread_mutex_unlock(&pool.lock);
        call.take();
        pthread_mutex_lock(&pool.lock);
        if (--call.inside == 0)
            pthread_cond_broadcast(&pool.left);
    }
    pthread_mutex_unlock(&pool.lock);
    return nullptr;
}

// Under the lock: makes helpers up to `wanted`, or as many as can be had.
void grow(unsigned wanted)
{
    if (pool.helpers >= wanted || ended || !forks_seen)
        return;
    // Signals are for the application's threads, but for those that a thread brings on itself.
    sigset_t blocked, before;
    sigfillset(&blocked);
    for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS})
        sigdelset(&blocked, fault);
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    while (pool.helpers < wanted &&
           pthread_create(&threads_of_helpers[pool.helpers], nullptr, help, nullptr) == 0)
        ++pool.helpers;
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

// Does the call's jobs together with up to `helpers` helpers.
void share(Call &call, unsigned helpers)
{
    pthread_mutex_lock(&pool.lock);
    grow(helpers);
    helpers = std::min(helpers, pool.helpers);
    if (helpers != 0) {
        call.wanted = helpers;
        call.behind = pool.calls;
        pool.calls = &call;
    }
    pthread_mutex_unlock(&pool.lock);
    for (unsigned i = 0; i < helpers; ++i)
        pthread_cond_signal(&pool.called);

    call.take();

    int cancellation; // cancelled while it waits, a thread would leave its stack to the helpers
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancellation);
    pthread_mutex_lock(&pool.lock);
    Call **at = &pool.calls;
    while (*at != nullptr && *at != &call)
        at = &(*at)->behind;
    if (*at == &call)
        *at = call.behind;
    while (call.inside != 0)
        pthread_cond_wait(&pool.left, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    pthread_setcancelstate(cancellation, nullptr);
}

// Processors that the calling thread may run on.
unsigned available_threads()
{
    cpu_set_t set;
    const int n = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
    return n > 0 ? unsigned(n) : 1;
}

// Bytes of originals that make a thread worth waking: that takes about 10 us and coding these 14 to
// 22 (Xeon with AVX-512, a virtual machine).
constexpr size_t THREAD_BYTES = 128 << 10;

// `threads`, or fewer if the jobs' `length` fields are not worth as many.
unsigned worth(const zip_job_t *jobs, size_t count, unsigned threads, size_t zip_job_t::*length)
{
    size_t bytes = 0;
    for (size_t i = 0; jobs != nullptr && i < count; ++i)
        bytes += jobs[i].*length;
    const size_t most = std::max<size_t>(bytes / THREAD_BYTES, 1);
    return unsigned(std::min<size_t>(most, threads == 0 ? CPU_SETSIZE : threads));
}

} // namespace

zip_status_t run_batch(zip_job_t *jobs, size_t count, unsigned threads, Work work)
{
    if (jobs == nullptr && count != 0)
        return ZIP_ERR_INVALID_PARAM;
    Call call = {jobs, count, work, 0, 0, 0, nullptr};
    if (threads == 1 || count < 2) {
        call.take();
    } else {
        size_t most = std::min<size_t>(count, available_threads());
        most = threads == 0 ? most : std::min<size_t>(most, threads);
        share(call, unsigned(most - 1));
    }
    for (size_t i = 0; i < count; ++i) {
        if (jobs[i].status != ZIP_OK)
            return jobs[i].status;
    }
    return ZIP_OK;
}

} // namespace zip::cpu

zip_status_t zip_codec_encode_batch(zip_job_t *jobs, size_t count, unsigned threads)
{
    threads = zip::cpu::worth(jobs, count, threads, &zip_job_t::src_size);
    return zip::cpu::run_batch(jobs, count, threads, [](zip_job_t &job) {
        job.encoded = 0;
        job.status = zip_codec_encode(job.coding, job.src, job.src_size, job.dst, job.dst_size,
                                      &job.encoded);
    });
}

zip_status_t zip_codec_decode_batch(zip_job_t *jobs, size_t count, unsigned threads)
{
    threads = zip::cpu::worth(jobs, count, threads, &zip_job_t::dst_size);
    return zip::cpu::run_batch(jobs, count, threads, [](zip_job_t &job) {
        job.status = zip_codec_decode(job.src, job.src_size, job.dst, job.dst_size);
    });
}
