// SPDX-License-Identifier: BSD-3-Clause
// bind() and the guard against a real UCX: the true layout passes, also while other threads use
// that UCX, and a UCX of another build does not. Wrong layouts: test/guard/run_mutations.sh.
#include "../guard/loaded_ucx.h"

#include "uct/zip/ucx_bind.h"
#include "uct/zip/ucx_guard.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <fcntl.h>
#include <sys/resource.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace {

using namespace std::string_literals;

const LoadedUcx &library()
{
    static const LoadedUcx ucx(std::getenv("ZIP_TEST_UCX_LIB"));
    return ucx;
}

size_t length(const ucs_list_link_t *head)
{
    size_t count = 0;
    for (const ucs_list_link_t *node = head->next; node != head; node = node->next) {
        ++count;
    }
    return count;
}

class Guard : public ::testing::Test {
protected:
    void SetUp() override
    {
        if (std::getenv("ZIP_TEST_UCX_LIB") == nullptr) {
            GTEST_SKIP() << "ZIP_TEST_UCX_LIB is not set to the lib folder of a UCX";
        }
        ASSERT_TRUE(library().loaded()) << library().error();
        static const bool bound_early = zip::ucx::bound_to(library().inside_ucs());
        EXPECT_FALSE(bound_early) << "bound before bind()";
        std::string why;
        ASSERT_TRUE(zip::ucx::bind(library().inside_ucs(), why)) << why;
    }

    // One line, for a log.
    static void expect_refused(const std::string &culprit)
    {
        std::string why;
        EXPECT_FALSE(zip::ucx::layout_matches(why));
        EXPECT_NE(why.find(culprit), std::string::npos) << why;
        EXPECT_EQ(why.find('\n'), std::string::npos) << why;
    }
};

TEST_F(Guard, TrueLayoutPasses)
{
    std::string why;
    EXPECT_TRUE(zip::ucx::layout_matches(why)) << why;
    EXPECT_EQ(why, "");
}

TEST_F(Guard, TakesLessThanTwoMilliseconds)
{
#ifdef __SANITIZE_THREAD__
    GTEST_SKIP() << "not a time that a user sees";
#endif
    double best = 1e9; // of several, since others use this machine
    for (int i = 0; i < 10; ++i) {
        std::string why;
        const auto start = std::chrono::steady_clock::now();
        ASSERT_TRUE(zip::ucx::layout_matches(why)) << why;
        const std::chrono::duration<double, std::milli> time =
                std::chrono::steady_clock::now() - start;
        best = std::min(best, time.count());
    }
    RecordProperty("milliseconds", std::to_string(best));
    EXPECT_LT(best, 2);
}

TEST_F(Guard, RegistersAndPrintsNothing)
{
    const size_t components = length(zip::ucx::uct_components_list_p);
    const size_t tables = length(zip::ucx::ucs_config_global_list_p);
    const int next_fd = dup(0);
    close(next_fd);
    testing::internal::CaptureStdout();
    testing::internal::CaptureStderr();
    std::string why;
    EXPECT_TRUE(zip::ucx::layout_matches(why)) << why;
    EXPECT_EQ(testing::internal::GetCapturedStdout(), "");
    EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
    EXPECT_EQ(length(zip::ucx::uct_components_list_p), components);
    EXPECT_EQ(length(zip::ucx::ucs_config_global_list_p), tables);
    const int fd = dup(0);
    close(fd);
    EXPECT_EQ(fd, next_fd) << "a file descriptor is left open";
}

// What other threads of the application may do while UCX loads the plugin.
void use_ucx(const std::atomic<bool> &stop, std::atomic<unsigned> &rounds)
{
    auto *query_components =
            library().uct<ucs_status_t(uct_component_h **, unsigned *)>("uct_query_components");
    auto *release_components = library().uct<void(uct_component_h *)>("uct_release_component_list");
    while (!stop) {
        uct_component_h *components;
        unsigned count;
        ASSERT_EQ(query_components(&components, &count), UCS_OK);
        for (unsigned i = 0; i < count; ++i) {
            uct_component_attr_t attr{};
            attr.field_mask = UCT_COMPONENT_ATTR_FIELD_NAME;
            ASSERT_EQ(uct_component_query(components[i], &attr), UCS_OK);
            if (attr.name != "tcp"s) {
                continue;
            }
            uct_md_config_t *config;
            ASSERT_EQ(uct_md_config_read(components[i], nullptr, nullptr, &config), UCS_OK);
            uct_md_h md;
            ASSERT_EQ(uct_md_open(components[i], "tcp", config, &md), UCS_OK);
            uct_config_release(config);
            uct_md_attr_t md_attr;
            EXPECT_EQ(uct_md_query(md, &md_attr), UCS_OK);
            EXPECT_STREQ(md_attr.component_name, "tcp");
            uct_tl_resource_desc_t *resources;
            EXPECT_EQ(uct_md_query_tl_resources(md, &resources, &count), UCS_OK);
            uct_release_tl_resource_list(resources);
            uct_md_close(md);
            break;
        }
        release_components(components);
        ++rounds;
    }
}

TEST_F(Guard, PassesWhileOtherThreadsUseUcx)
{
    std::atomic<bool> stop = false;
    std::atomic<unsigned> rounds = 0;
    std::vector<std::thread> threads;
    for (int i = 0; i < 2; ++i) {
        threads.emplace_back([&] { use_ucx(stop, rounds); });
    }
    unsigned passes = 0;
    while (passes < 200 || rounds < 200) {
        std::string why;
        EXPECT_TRUE(zip::ucx::layout_matches(why)) << why;
        if (HasFailure()) {
            break;
        }
        ++passes;
    }
    stop = true;
    for (std::thread &thread : threads) {
        thread.join();
    }
}

TEST_F(Guard, PassesOnSeveralThreadsAtOnce)
{
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
        threads.emplace_back([] {
            for (int round = 0; round < 50; ++round) {
                std::string why;
                EXPECT_TRUE(zip::ucx::layout_matches(why)) << why;
            }
        });
    }
    for (std::thread &thread : threads) {
        thread.join();
    }
}

TEST_F(Guard, RefusesWithoutFileDescriptors)
{
    rlimit limit;
    ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
    rlimit none = limit;
    none.rlim_cur = 0;
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
    expect_refused("cannot open a pipe");
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
}

// Builds of UCX that differ by their own word are played by doctored copies of what bind() found.
template <typename T>
class Doctored {
public:
    explicit Doctored(T *&pointer) : pointer_(pointer), original_(pointer), copy(*pointer)
    {
        pointer = &copy;
    }
    ~Doctored() { pointer_ = original_; }
    Doctored(const Doctored &) = delete;
    Doctored &operator=(const Doctored &) = delete;

private:
    T *&pointer_;
    T *original_;

public:
    T copy;
};

TEST_F(Guard, RefusesBuildWithStatistics)
{
    Doctored ep_class(zip::ucx::uct_base_ep_t_class_p);
    ep_class.copy.size += sizeof(void *);
    expect_refused("BaseEp: 16 bytes, declared 8; was this UCX built with --enable-stats?");
}

TEST_F(Guard, RefusesOtherPublicOperations)
{
    Doctored iface_class(zip::ucx::uct_base_iface_t_class_p);
    ucs_class_t super = *iface_class.copy.superclass;
    super.size += sizeof(void *);
    iface_class.copy.superclass = &super;
    expect_refused("uct_iface_ops_t size");
}

TEST_F(Guard, RefusesInterfaceWithoutRoom)
{
    Doctored iface_class(zip::ucx::uct_base_iface_t_class_p);
    iface_class.copy.size = 1u << 20;
    expect_refused("BaseIface: 1048576 bytes");
}

TEST_F(Guard, RefusesUnreadableClass)
{
    Doctored iface_class(zip::ucx::uct_base_iface_t_class_p);
    iface_class.copy.superclass = reinterpret_cast<ucs_class_t *>(16);
    expect_refused("ucs_class_t: cannot be read");
}

TEST_F(Guard, RefusesUnreadableComponentList)
{
    ucs_list_link_t wild;
    wild.next = wild.prev = reinterpret_cast<ucs_list_link_t *>(16);
    Doctored list(zip::ucx::uct_components_list_p);
    list.copy = wild;
    expect_refused("Component::list");
}

TEST_F(Guard, RefusesEndlessComponentList)
{
    ucs_list_link_t loop;
    loop.next = loop.prev = &loop;
    Doctored list(zip::ucx::uct_components_list_p);
    list.copy.next = &loop;
    expect_refused("Component::list");
}

class Bind : public Guard {};

TEST_F(Bind, IsBoundToTheCaller)
{
    EXPECT_TRUE(zip::ucx::bound_to(library().inside_ucs()));
    EXPECT_FALSE(zip::ucx::bound_to(reinterpret_cast<const void *>(&malloc)));
    EXPECT_FALSE(zip::ucx::bound_to(zip::ucx::uct_components_list_p)); // in libuct
    EXPECT_FALSE(zip::ucx::bound_to(nullptr));
    int on_stack;
    EXPECT_FALSE(zip::ucx::bound_to(&on_stack));
}

TEST_F(Bind, FillsTheTableFromTheCallersCopy)
{
    const std::string path = zip::ucx::library_path();
    EXPECT_EQ(path.find(std::getenv("ZIP_TEST_UCX_LIB")), 0u) << path;
    EXPECT_STREQ(ucs_status_string(UCS_OK),
                 library().ucs<const char *(ucs_status_t)>("ucs_status_string")(UCS_OK));
    EXPECT_EQ(zip::ucx::uct_components_list_p,
              reinterpret_cast<ucs_list_link_t *>(library().uct<char>("uct_components_list")));
    EXPECT_EQ(zip::ucx::uct_ep_query_address(),
              reinterpret_cast<void *>(library().uct<char>("uct_ep_query")));
}

TEST_F(Bind, TellsTwoCopiesApart)
{
    const char *folder = std::getenv("ZIP_TEST_UCX_LIB_2");
    if (folder == nullptr) {
        GTEST_SKIP() << "ZIP_TEST_UCX_LIB_2 is not set to the lib folder of another UCX";
    }
    const LoadedUcx second(folder);
    ASSERT_TRUE(second.loaded()) << second.error();
    for (const LoadedUcx *caller : {&second, &library()}) {
        std::string why;
        ASSERT_TRUE(zip::ucx::bind(caller->inside_ucs(), why)) << why;
        EXPECT_EQ(zip::ucx::bound_to(second.inside_ucs()), caller == &second);
        EXPECT_EQ(zip::ucx::bound_to(library().inside_ucs()), caller == &library());
        EXPECT_TRUE(zip::ucx::layout_matches(why)) << why;
    }
}

// One line that names who called, and the earlier binding stays.
void expect_not_bound(const void *caller, const std::string &text)
{
    std::string why;
    EXPECT_FALSE(zip::ucx::bind(caller, why));
    EXPECT_NE(why.find(text), std::string::npos) << why;
    EXPECT_EQ(why.find('\n'), std::string::npos) << why;
    EXPECT_TRUE(zip::ucx::bound_to(library().inside_ucs()));
}

TEST_F(Bind, RefusesCallerInAnotherLibrary)
{
    expect_not_bound(reinterpret_cast<const void *>(&malloc), "is no libucs");
    expect_not_bound(reinterpret_cast<const void *>(&expect_not_bound), "is no libucs");
}

TEST_F(Bind, RefusesCallerInNoLibrary)
{
    int on_stack;
    expect_not_bound(&on_stack, "cannot tell which library is loading the plugin");
    expect_not_bound(nullptr, "cannot tell which library is loading the plugin");
}

} // namespace
