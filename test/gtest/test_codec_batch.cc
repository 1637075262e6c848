// SPDX-License-Identifier: BSD-3-Clause
// Batches: all jobs are done, whatever happens to the threads that do them.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "kernels/codec.h"
#include "kernels/cpu/internal.h"
#include "test_codec_util.h"

// ThreadSanitizer ends a child of fork() that makes a thread.
#ifdef __SANITIZE_THREAD__
#define ZIP_TEST_NEEDS_FORK() GTEST_SKIP() << "ThreadSanitizer"
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define ZIP_TEST_NEEDS_FORK() GTEST_SKIP() << "ThreadSanitizer"
#endif
#endif
#ifndef ZIP_TEST_NEEDS_FORK
#define ZIP_TEST_NEEDS_FORK() (void)0
#endif

namespace {
constexpr unsigned PROCESSORS = 8;
}
// There are no more threads than processors. With these there are several helpers on any machine.
extern "C" __attribute__((visibility("default"))) int sched_getaffinity(pid_t, size_t size,
                                                                        cpu_set_t *set) noexcept
{
    CPU_ZERO_S(size, set);
    for (unsigned i = 0; i < PROCESSORS; ++i)
        CPU_SET_S(i, size, set);
    return 0;
}

namespace zip::test {
namespace {

using cpu::run_batch;

// Long enough on any machine: a test waits so long only to fail.
constexpr std::chrono::seconds LONG(20);

bool wait_for(const std::function<bool()> &done)
{
    const auto end = std::chrono::steady_clock::now() + LONG;
    while (!done()) {
        if (std::chrono::steady_clock::now() > end)
            return false;
        std::this_thread::yield();
    }
    return true;
}

// Threads of this process that are batches' helpers, of this program's codec or a loaded one's.
unsigned helpers()
{
    unsigned n = 0;
    for (const auto &task : std::filesystem::directory_iterator("/proc/self/task")) {
        std::string name;
        n += std::getline(std::ifstream(task.path() / "comm"), name) && name == "zip-codec";
    }
    return n;
}

using BatchCall = zip_status_t (*)(zip_job_t *, size_t, unsigned);

// Buffers that are worth several threads.
class Batch {
public:
    static constexpr size_t JOBS = 8, LENGTH = 64 << 10;

    Batch() : data_(make_data(Data::NORMAL, ZIP_DTYPE_BF16, JOBS * LENGTH)) {}

    // Whether all comes back as it was.
    bool round_trip(unsigned threads, BatchCall encode = zip_codec_encode_batch,
                    BatchCall decode = zip_codec_decode_batch) const
    {
        const size_t bound = zip_codec_bound(LENGTH);
        Bytes chunks(JOBS * bound), back(data_.size());
        std::vector<zip_job_t> jobs(JOBS);
        for (size_t i = 0; i < JOBS; ++i)
            jobs[i] = {{ZIP_DTYPE_BF16, ZIP_SHAPE_22228, 0},
                       &data_[i * LENGTH],
                       LENGTH,
                       &chunks[i * bound],
                       bound,
                       0,
                       ZIP_ERR_CORRUPT};
        if (encode(jobs.data(), JOBS, threads) != ZIP_OK)
            return false;
        for (size_t i = 0; i < JOBS; ++i)
            jobs[i] = {{}, &chunks[i * bound], jobs[i].encoded, &back[i * LENGTH], LENGTH,
                       0,  ZIP_ERR_CORRUPT};
        return decode(jobs.data(), JOBS, threads) == ZIP_OK && back == data_;
    }

private:
    const Bytes data_;
};

const Batch &batch()
{
    static const Batch *const the_batch = new Batch; // also while the process ends
    return *the_batch;
}

TEST(CodecBatch, does_all_jobs_and_reports_the_first_that_fails)
{
    constexpr size_t JOBS = 23;
    for (unsigned threads : {0u, 1u, 3u, 64u}) {
        SCOPED_TRACE(threads);
        std::vector<Bytes> data, chunks, back;
        std::vector<zip_job_t> jobs(JOBS);
        for (size_t i = 0; i < JOBS; ++i) {
            const zip_coding_t coding = all_codings()[i];
            data.push_back(make_data(Data::NORMAL, coding.dtype, i * 3001));
            chunks.emplace_back(zip_codec_bound(data[i].size()));
            back.emplace_back(data[i].size());
        }
        for (size_t i = 0; i < JOBS; ++i)
            jobs[i] = {all_codings()[i], data[i].data(),   data[i].size(),
                       chunks[i].data(), chunks[i].size(), 0,
                       ZIP_ERR_CORRUPT};
        EXPECT_EQ(ZIP_OK, zip_codec_encode_batch(jobs.data(), JOBS, threads));
        for (size_t i = 0; i < JOBS; ++i) {
            EXPECT_EQ(ZIP_OK, jobs[i].status);
            Bytes alone(chunks[i].size());
            size_t size;
            ASSERT_EQ(ZIP_OK, zip_codec_encode(all_codings()[i], data[i].data(), data[i].size(),
                                               alone.data(), alone.size(), &size));
            ASSERT_EQ(size, jobs[i].encoded);
            EXPECT_EQ(0, memcmp(alone.data(), chunks[i].data(), size));
            jobs[i] = {{}, chunks[i].data(), size, back[i].data(), back[i].size(),
                       0,  ZIP_ERR_CORRUPT};
        }
        EXPECT_EQ(ZIP_OK, zip_codec_decode_batch(jobs.data(), JOBS, threads));
        EXPECT_EQ(data, back);

        jobs[7].src_size = 3;
        jobs[11].dst = nullptr;
        back.assign(JOBS, {});
        for (size_t i = 0; i < JOBS; ++i) {
            back[i].resize(data[i].size());
            jobs[i].dst = i == 11 ? nullptr : back[i].data();
        }
        EXPECT_EQ(ZIP_ERR_CORRUPT, zip_codec_decode_batch(jobs.data(), JOBS, threads));
        EXPECT_EQ(ZIP_ERR_INVALID_PARAM, jobs[11].status);
        for (size_t i = 0; i < JOBS; ++i) {
            if (i != 7 && i != 11) {
                EXPECT_EQ(ZIP_OK, jobs[i].status);
                EXPECT_EQ(data[i], back[i]);
            }
        }
    }
    EXPECT_EQ(ZIP_OK, zip_codec_encode_batch(nullptr, 0, 4));
    EXPECT_EQ(ZIP_ERR_INVALID_PARAM, zip_codec_encode_batch(nullptr, 1, 4));
}

// Jobs that count who does them; each is done once if every `encoded` is 1.
void count_and_note(zip_job_t &job)
{
    ++job.encoded;
    job.status = ZIP_OK;
    auto &[lock, threads] =
            *static_cast<std::pair<std::mutex, std::set<std::thread::id>> *>(job.dst);
    const std::lock_guard<std::mutex> locked(lock);
    threads.insert(std::this_thread::get_id());
}

TEST(CodecBatch, every_job_is_done_once_by_no_more_threads_than_asked_for)
{
    for (unsigned threads : {1u, 2u, 3u, 64u, 0u}) {
        for (size_t count : {0, 1, 2, 3, 1000}) {
            std::pair<std::mutex, std::set<std::thread::id>> seen;
            std::vector<zip_job_t> jobs(count);
            for (zip_job_t &job : jobs)
                job.dst = &seen;
            EXPECT_EQ(ZIP_OK, run_batch(jobs.data(), count, threads, count_and_note));
            for (const zip_job_t &job : jobs)
                EXPECT_EQ(1u, job.encoded);
            EXPECT_LE(seen.second.size(),
                      std::min<size_t>(threads == 0 ? PROCESSORS : std::min(threads, PROCESSORS),
                                       count));
        }
    }
    EXPECT_LT(helpers(), PROCESSORS);
}

// Jobs that end when as many as there are have begun, each on a thread of its own.
struct Meeting {
    std::atomic<size_t> there{0};
    std::atomic<bool> unblocked{false}; // some helper takes signals
    const std::thread::id caller = std::this_thread::get_id();
};

void meet(zip_job_t &job)
{
    Meeting &meeting = *static_cast<Meeting *>(job.dst);
    ++meeting.there;
    sigset_t blocked;
    pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
    if (std::this_thread::get_id() != meeting.caller &&
        (!sigismember(&blocked, SIGTERM) || sigismember(&blocked, SIGSEGV)))
        meeting.unblocked = true;
    job.status = wait_for([&] { return meeting.there >= job.src_size; }) ? ZIP_OK : ZIP_ERR_CORRUPT;
}

TEST(CodecBatch, jobs_run_at_the_same_time_on_threads_that_take_no_signals)
{
    constexpr size_t count = PROCESSORS;
    Meeting meeting;
    std::vector<zip_job_t> jobs(count);
    for (zip_job_t &job : jobs)
        job.dst = &meeting, job.src_size = count;
    EXPECT_EQ(ZIP_OK, run_batch(jobs.data(), count, unsigned(count), meet));
    EXPECT_FALSE(meeting.unblocked);
    sigset_t blocked;
    pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
    EXPECT_FALSE(sigismember(&blocked, SIGTERM));
}

TEST(CodecBatch, helpers_stay_for_the_next_batch)
{
    for (int i = 0; i < 20; ++i)
        EXPECT_TRUE(batch().round_trip(2));
    EXPECT_TRUE(wait_for([] { return helpers() != 0; }));
    EXPECT_LT(helpers(), PROCESSORS);
}

TEST(CodecBatch, several_callers_at_once)
{
    std::atomic<unsigned> good{0};
    {
        std::vector<std::jthread> callers;
        for (unsigned c = 0; c < 4; ++c) {
            callers.emplace_back([&good, c] {
                for (int i = 0; i < 25; ++i)
                    good += batch().round_trip(c);
            });
        }
    }
    EXPECT_EQ(100u, good);
}

// Jobs that are batches of their own, `src_size` deep.
void nest(zip_job_t &job)
{
    zip_job_t inner[3] = {};
    for (zip_job_t &one : inner)
        one.src_size = job.src_size - 1;
    job.status = ZIP_OK;
    job.encoded = 1;
    if (job.src_size != 0)
        job.status = run_batch(inner, 3, 3, nest);
    for (const zip_job_t &one : inner)
        job.encoded += one.encoded;
}

TEST(CodecBatch, a_job_may_be_a_batch)
{
    zip_job_t outer = {};
    outer.src_size = 6;
    EXPECT_EQ(ZIP_OK, run_batch(&outer, 1, 4, nest));
    EXPECT_EQ(1u + 3 + 9 + 27 + 81 + 243 + 729, outer.encoded);
}

TEST(CodecBatch, a_caller_is_not_cancelled_before_its_helpers_have_left)
{
    struct Scene {
        std::atomic<bool> helper_inside{false}, leave{false};
        std::atomic<pthread_t> caller{};
    } scene;
    std::atomic<bool> ended{false};
    struct Args {
        Scene &scene;
        std::atomic<bool> &ended;
    } args = {scene, ended};
    const auto caller = [](void *p) -> void * {
        auto &[s, end] = *static_cast<Args *>(p);
        s.caller = pthread_self();
        zip_job_t jobs[2] = {};
        for (zip_job_t &job : jobs)
            job.dst = &s;
        run_batch(jobs, 2, 2, [](zip_job_t &job) {
            Scene &here = *static_cast<Scene *>(job.dst);
            if (pthread_equal(pthread_self(), here.caller)) {
                wait_for([&] { return here.helper_inside.load(); });
            } else {
                here.helper_inside = true;
                wait_for([&] { return here.leave.load(); });
            }
        });
        end = true;
        return p;
    };
    pthread_t thread;
    ASSERT_EQ(0, pthread_create(&thread, nullptr, caller, &args));
    EXPECT_TRUE(wait_for([&] { return scene.helper_inside.load(); }));
    std::this_thread::sleep_for(std::chrono::milliseconds(50)); // it is in the wait by now
    pthread_cancel(thread);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_FALSE(ended);
    scene.leave = true;
    void *result;
    pthread_join(thread, &result);
    EXPECT_EQ(&args, result) << "cancelled in the batch";
}

// Does `work` in a child of this process, which is killed if it hangs. Returns how it ended.
int in_child(bool (*work)())
{
    fflush(nullptr);
    const pid_t child = fork();
    if (child == 0) {
        alarm(unsigned(LONG.count()));
        _exit(work() ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    return status;
}

TEST(CodecBatch, a_child_of_fork_has_helpers_of_its_own)
{
    ZIP_TEST_NEEDS_FORK();
    EXPECT_TRUE(batch().round_trip(2));
    EXPECT_EQ(0, in_child([] {
                  return helpers() == 0 && batch().round_trip(2) &&
                         wait_for([] { return helpers() != 0; }) &&
                         // and its child again
                         in_child([] { return helpers() == 0 && batch().round_trip(2); }) == 0;
              }));
    EXPECT_TRUE(batch().round_trip(2));
}

TEST(CodecBatch, a_child_of_fork_does_not_wait_for_threads_of_its_parent)
{
    ZIP_TEST_NEEDS_FORK();
    std::atomic<bool> stop{false};
    std::vector<std::jthread> callers;
    for (int c = 0; c < 3; ++c) {
        callers.emplace_back([&stop] { // holds the lock for much of the time
            while (!stop) {
                zip_job_t jobs[2] = {};
                run_batch(jobs, 2, 2, [](zip_job_t &) {});
            }
        });
    }
    for (int i = 0; i < 100 && !HasFailure(); ++i) {
        EXPECT_EQ(0, in_child([] {
                      zip_job_t jobs[2] = {};
                      return run_batch(jobs, 2, 2, [](zip_job_t &job) { ++job.encoded; }) ==
                                     ZIP_OK &&
                             jobs[0].encoded == 1 && jobs[1].encoded == 1;
                  }));
    }
    stop = true;
}

TEST(CodecBatch, works_where_threads_cannot_be_had)
{
    ZIP_TEST_NEEDS_FORK();
    EXPECT_EQ(0, in_child([] {                 // it has no helpers yet
                  pthread_attr_t before, huge; // whose stack does not fit any address space
                  if (pthread_getattr_default_np(&before) != 0 || pthread_attr_init(&huge) != 0 ||
                      pthread_attr_setstacksize(&huge, size_t(1) << 55) != 0 ||
                      pthread_setattr_default_np(&huge) != 0)
                      return false;
                  pthread_t none;
                  if (pthread_create(
                              &none, nullptr, [](void *p) { return p; }, nullptr) == 0)
                      return false;
                  const bool alone = batch().round_trip(2) && helpers() == 0;
                  return pthread_setattr_default_np(&before) == 0 && alone &&
                         batch().round_trip(2) && wait_for([] { return helpers() != 0; });
              }));
}

TEST(CodecBatch, a_process_ends_while_batches_run)
{
    ZIP_TEST_NEEDS_FORK();
    for (int i = 0; i < 20 && !HasFailure(); ++i) {
        EXPECT_EQ(7 << 8, in_child([] {
                      std::atomic<int> rounds{0};
                      for (int c = 0; c < 2; ++c) {
                          std::thread([&rounds] {
                              for (;; ++rounds) {
                                  zip_job_t jobs[9] = {};
                                  run_batch(jobs, 9, 3, [](zip_job_t &) {
                                      std::atomic<int> n{2000};
                                      while (--n != 0)
                                          ;
                                  });
                              }
                          }).detach();
                      }
                      wait_for([&] { return rounds > 10; });
                      std::exit(7);
                      return false;
                  }));
    }
}

// The library that applications and plugins load.
TEST(CodecBatch, no_helper_outlives_the_library)
{
    EXPECT_TRUE(batch().round_trip(2));
    EXPECT_TRUE(wait_for([] { return helpers() != 0; }));
    const unsigned before = helpers();
    for (int i = 0; i < 20 && !HasFailure(); ++i) {
        void *const library = dlopen(ZIP_TEST_LIBRARY, RTLD_NOW | RTLD_LOCAL);
        ASSERT_NE(nullptr, library) << dlerror();
        const auto encode = reinterpret_cast<BatchCall>(dlsym(library, "zip_codec_encode_batch"));
        const auto decode = reinterpret_cast<BatchCall>(dlsym(library, "zip_codec_decode_batch"));
        ASSERT_TRUE(encode != nullptr && decode != nullptr);
        ASSERT_NE(encode, zip_codec_encode_batch);
        EXPECT_TRUE(batch().round_trip(2, encode, decode));
        EXPECT_TRUE(wait_for([&] { return helpers() > before; }));
        EXPECT_EQ(0, dlclose(library));
        EXPECT_EQ(nullptr, dlopen(ZIP_TEST_LIBRARY, RTLD_NOW | RTLD_NOLOAD)) << "it stayed";
        // The system forgets a thread a little after it is joined.
        EXPECT_TRUE(wait_for([&] { return helpers() == before; }));
    }
}

} // namespace
} // namespace zip::test
