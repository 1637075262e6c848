// SPDX-License-Identifier: BSD-3-Clause
// The parts that all benchmarks share: sizes, statistics, rounding to bf16, data sets, JSON rows.
#include "tools/bench_json.h"
#include "tools/block_hashes.h"
#include "tools/child_process.h"
#include "tools/data_set.h"
#include "tools/error.h"
#include "tools/oob_channel.h"
#include "tools/p2p_setup.h"
#include "tools/run_folder.h"
#include "tools/safetensors.h"
#include "tools/stats.h"
#include "tools/units.h"
#include "tools/zip_log.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <bit>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>
#include <sys/socket.h>
#include <unistd.h>
#include <vector>

namespace {

using tools::Error;

class TemporaryFile {
public:
    TemporaryFile()
    {
        const char *base = std::getenv("TMPDIR");
        path_ = std::string(base ? base : "/tmp") + "/zip_tools_XXXXXX";
        const int fd = mkstemp(path_.data());
        EXPECT_GE(fd, 0);
        close(fd);
    }
    ~TemporaryFile() { unlink(path_.c_str()); }
    TemporaryFile(const TemporaryFile &) = delete;
    TemporaryFile &operator=(const TemporaryFile &) = delete;

    const std::string &path() const { return path_; }

    void write(const std::string &content) const
    {
        std::ofstream(path_, std::ios::binary) << content;
    }

private:
    std::string path_;
};

std::string safetensors_of(const std::string &header, const std::string &data)
{
    std::string out(8, '\0');
    const uint64_t size = header.size();
    std::memcpy(out.data(), &size, sizeof(size));
    return out + header + data;
}

template <typename T>
std::string bytes_of(const std::vector<T> &values)
{
    return std::string(reinterpret_cast<const char *>(values.data()), values.size() * sizeof(T));
}

TEST(Units, sizes_are_parsed_with_binary_units)
{
    EXPECT_EQ(tools::parse_size("65536"), 65536U);
    EXPECT_EQ(tools::parse_size("64K"), 65536U);
    EXPECT_EQ(tools::parse_size("64kib"), 65536U);
    EXPECT_EQ(tools::parse_size("16MiB"), 16U << 20);
    EXPECT_EQ(tools::parse_size("1g"), 1U << 30);
    EXPECT_EQ(tools::parse_size_list("64K,1M"), (std::vector<uint64_t>{65536, 1 << 20}));
}

TEST(Units, what_is_no_size_is_refused)
{
    for (const char *text : {"", "K", "-1", "+1", "1.5M", "1X", "64 K", "1MB",
                             "99999999999999999999", "18446744073709551615K", "0x10"}) {
        EXPECT_THROW(tools::parse_size(text), Error) << text;
    }
    for (const char *text : {"", ",", "1K,", ",1K", "1K,,2K", "0"}) {
        EXPECT_THROW(tools::parse_size_list(text), Error) << text;
    }
}

TEST(Units, sizes_are_shown_with_binary_units)
{
    EXPECT_EQ(tools::format_size(0), "0 B");
    EXPECT_EQ(tools::format_size(1000), "1000 B");
    EXPECT_EQ(tools::format_size(65536), "64 KiB");
    EXPECT_EQ(tools::format_size(3 << 19), "1.5 MiB");
    EXPECT_EQ(tools::format_size(uint64_t{1} << 30), "1 GiB");
}

TEST(Stats, percentiles_interpolate_between_ranks)
{
    EXPECT_EQ(tools::percentile({}, 0.5), 0.0);
    EXPECT_EQ(tools::percentile({7.0}, 0.9), 7.0);
    EXPECT_DOUBLE_EQ(tools::percentile({4.0, 1.0, 3.0, 2.0}, 0.5), 2.5);
    EXPECT_DOUBLE_EQ(tools::percentile({1.0, 2.0, 3.0, 4.0, 5.0}, 0.1), 1.4);
    EXPECT_DOUBLE_EQ(tools::percentile({1.0, 2.0, 3.0, 4.0, 5.0}, 1.0), 5.0);
}

TEST(HostPort, addresses_are_split)
{
    EXPECT_EQ(tools::parse_host_port("a", "7").port, "7");
    EXPECT_EQ(tools::parse_host_port("1.2.3.4:80", "7").port, "80");
    EXPECT_EQ(tools::parse_host_port("1.2.3.4:80", "7").host, "1.2.3.4");
    EXPECT_EQ(tools::parse_host_port("[::1]:80", "7").host, "::1");
    EXPECT_EQ(tools::parse_host_port("[::1]:80", "7").port, "80");
    EXPECT_EQ(tools::parse_host_port("::1", "7").host, "::1");
    for (const char *text : {"", ":", "a:", ":5", "a:b", "a:65536", "a:-1", "[::1", "[::1]5"}) {
        EXPECT_THROW(tools::parse_host_port(text, "7"), Error) << text;
    }
}

TEST(Bf16, rounds_to_nearest_even)
{
    const auto round = [](uint32_t bits) {
        return tools::bf16_from_fp32(std::bit_cast<float>(bits));
    };
    EXPECT_EQ(round(0x3f800000), 0x3f80); // exact
    EXPECT_EQ(round(0x3f807fff), 0x3f80); // below the middle
    EXPECT_EQ(round(0x3f808000), 0x3f80); // middle, even below
    EXPECT_EQ(round(0x3f818000), 0x3f82); // middle, even above
    EXPECT_EQ(round(0x3f808001), 0x3f81); // above the middle
    EXPECT_EQ(round(0x3fffffff), 0x4000); // carries into the exponent
    EXPECT_EQ(round(0x7f7fffff), 0x7f80); // the largest float becomes infinity
    EXPECT_EQ(round(0x80000000), 0x8000); // negative zero
    EXPECT_EQ(round(0x00008001), 0x0001); // subnormal
    EXPECT_EQ(round(0xff800000), 0xff80); // infinity
}

TEST(Bf16, nan_stays_nan)
{
    for (const uint32_t bits : {0x7f800001U, 0x7fc00000U, 0x7fffffffU, 0xff800001U, 0xffffffffU,
                                0x7f80ffffU, 0x7f810000U}) {
        const uint16_t rounded = tools::bf16_from_fp32(std::bit_cast<float>(bits));
        EXPECT_EQ(rounded & 0x7f80, 0x7f80) << std::hex << bits;
        EXPECT_NE(rounded & 0x7f, 0) << std::hex << bits;
        EXPECT_EQ(rounded >> 15, bits >> 31) << std::hex << bits;
    }
}

TEST(DataSet, converts_what_is_wide_enough_and_leaves_the_rest)
{
    const TemporaryFile file;
    file.write(safetensors_of(R"({"f32":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                              R"("f64":{"dtype":"F64","shape":[1],"data_offsets":[8,16]},)"
                              R"("f16":{"dtype":"F16","shape":[4],"data_offsets":[16,24]},)"
                              R"("b16":{"dtype":"BF16","shape":[1],"data_offsets":[24,26]},)"
                              R"("ids":{"dtype":"I32","shape":[1],"data_offsets":[26,30]}})",
                              bytes_of<float>({1.0F, -2.5F}) + bytes_of<double>({0.5}) +
                                      bytes_of<uint16_t>({0x3c00, 0x0001, 0xfc00, 0x7e00}) +
                                      bytes_of<uint16_t>({0x1234}) + "ids!"));
    std::vector<tools::SafetensorsFile> files;
    files.emplace_back(file.path());

    const tools::DataSet bf16 = tools::model_data_set(files, "bf16");
    ASSERT_EQ(bf16.messages.size(), 5U);
    EXPECT_EQ(bf16.converted, 4U);
    EXPECT_EQ(bf16.bytes(), 4U + 2U + 8U + 2U + 4U);
    uint16_t values[4];
    std::memcpy(values, bf16.messages[0].data, 4);
    EXPECT_EQ(values[0], 0x3f80);
    EXPECT_EQ(values[1], 0xc020);
    std::memcpy(values, bf16.messages[1].data, 2);
    EXPECT_EQ(values[0], 0x3f00);
    std::memcpy(values, bf16.messages[2].data, 8);
    EXPECT_EQ(values[0], 0x3f80);
    EXPECT_EQ(values[1], 0x3380); // 2^-24
    EXPECT_EQ(values[2], 0xff80);
    EXPECT_EQ(values[3], 0x7fc0);
    EXPECT_EQ(bf16.messages[3].data, files[0].tensors()[3].data);
    EXPECT_EQ(std::memcmp(bf16.messages[4].data, "ids!", 4), 0);
    for (const tools::Message &message : bf16.messages) {
        EXPECT_EQ(message.hash, tools::hash_bytes(message.data, message.size)) << message.name;
    }

    const tools::DataSet fp32 = tools::model_data_set(files, "fp32");
    EXPECT_EQ(fp32.converted, 2U);
    EXPECT_EQ(fp32.messages[0].data, files[0].tensors()[0].data) << "fp32 needs no copy";
    EXPECT_EQ(fp32.messages[1].size, 4U);
    EXPECT_EQ(fp32.messages[2].size, 8U) << "fp16 is never widened";
}

TEST(DataSet, is_empty_without_values_of_its_type)
{
    const TemporaryFile file;
    file.write(safetensors_of(R"({"b":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}})", "12"));
    std::vector<tools::SafetensorsFile> files;
    files.emplace_back(file.path());
    EXPECT_TRUE(tools::model_data_set(files, "fp32").messages.empty());
    EXPECT_EQ(tools::model_data_set(files, "bf16").messages.size(), 1U);
}

TEST(DataSet, pieces_hold_only_values_and_repeat_a_short_model)
{
    const TemporaryFile file;
    file.write(safetensors_of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                              R"("i":{"dtype":"U8","shape":[4],"data_offsets":[8,12]},)"
                              R"("b":{"dtype":"F32","shape":[1],"data_offsets":[12,16]}})",
                              "aaaaAAAAiiiibbbb"));
    std::vector<tools::SafetensorsFile> files;
    files.emplace_back(file.path());
    const tools::DataSet model = tools::model_data_set(files, "fp32");
    const auto pool = tools::concatenate(files, model, 20, 100);
    ASSERT_EQ(pool->size(), 20U);
    EXPECT_EQ(std::memcmp(pool->data(), "aaaaAAAAbbbbaaaaAAAA", 20), 0);
    EXPECT_EQ(tools::concatenate(files, model, 4, 8)->size(), 8U);

    const tools::DataSet cut = tools::cut_data_set(model, pool, 8, 3);
    ASSERT_EQ(cut.messages.size(), 3U);
    EXPECT_EQ(std::memcmp(cut.messages[1].data, "bbbbaaaa", 8), 0);
    EXPECT_EQ(cut.messages[2].data, pool->data()) << "from the start again";
    EXPECT_EQ(cut.bytes(), 24U);
}

TEST(BenchJson, keys_that_do_not_apply_are_left_out)
{
    const TemporaryFile file;
    tools::BenchRow row;
    row.size = 65536;
    row.dtype = "bf16";
    row.data = "bad utf-8 \xff";
    row.gbps_median = 1.5;
    row.ratio = std::numeric_limits<double>::quiet_NaN();
    row.verified = true;
    tools::check_json_writable(file.path());
    tools::write_bench_json(file.path(), "test", {row});

    std::ifstream in(file.path());
    const nlohmann::json doc = nlohmann::json::parse(in);
    EXPECT_EQ(doc["tool"], "test");
    for (const char *key : {"version", "host", "device", "date"}) {
        EXPECT_TRUE(doc[key].is_string()) << key;
    }
    ASSERT_EQ(doc["rows"].size(), 1U);
    EXPECT_EQ(doc["rows"][0]["size"], 65536);
    EXPECT_EQ(doc["rows"][0]["verified"], true);
    EXPECT_FALSE(doc["rows"][0].contains("speedup"));
    EXPECT_FALSE(doc["rows"][0].contains("wire"));
    EXPECT_TRUE(doc["rows"][0]["ratio"].is_null());
}

TEST(BenchJson, an_unwritable_file_is_an_error)
{
    EXPECT_THROW(tools::check_json_writable("/no/such/folder/x.json"), Error);
    EXPECT_THROW(tools::write_bench_json("/no/such/folder/x.json", "test", {}), Error);
}

TEST(BlockHashes, one_changed_bit_is_found_in_its_block)
{
    std::vector<std::byte> data(3 * tools::kHashBlock + 100);
    for (size_t i = 0; i < data.size(); ++i) {
        data[i] = static_cast<std::byte>(i * 7 >> 3);
    }
    const auto sent = tools::hash_blocks(data.data(), data.size());
    ASSERT_EQ(sent.size(), 4U);
    EXPECT_FALSE(tools::first_difference(sent, sent));
    EXPECT_EQ(tools::hashes_from_bytes(tools::hashes_to_bytes(sent)), sent);
    for (const size_t at : {size_t{0}, static_cast<size_t>(tools::kHashBlock) - 1,
                            static_cast<size_t>(tools::kHashBlock), data.size() - 1}) {
        data[at] ^= std::byte{0x10};
        EXPECT_EQ(tools::first_difference(sent, tools::hash_blocks(data.data(), data.size())),
                  at / tools::kHashBlock);
        data[at] ^= std::byte{0x10};
    }
    EXPECT_TRUE(tools::hash_blocks(data.data(), 0).empty());
}

TEST(BlockHashes, a_list_that_ends_early_differs_there)
{
    const std::vector<tools::Hash128> two = {{1, 2}, {3, 4}};
    EXPECT_EQ(tools::first_difference(two, {{1, 2}}), 1U);
    EXPECT_EQ(tools::first_difference({}, two), 0U);
    EXPECT_EQ(tools::hashes_from_bytes(tools::hashes_to_bytes(two) + "rest"), two);
}

TEST(BlockHashes, a_block_says_where_it_differs_and_how_much)
{
    EXPECT_FALSE(tools::compare_block("same", "same"));
    const auto difference = tools::compare_block("abcdef", "abXdeY");
    ASSERT_TRUE(difference);
    EXPECT_EQ(difference->offset, 2U);
    EXPECT_EQ(difference->bytes, 2U);
    EXPECT_EQ(difference->sent, static_cast<unsigned>('c'));
    EXPECT_EQ(difference->got, static_cast<unsigned>('X'));
    EXPECT_EQ(tools::compare_block("abc", "ab")->offset, 2U);
}

// A line as the plugin logs it.
std::string zip_line(unsigned long puts, unsigned long put_bytes, unsigned long wire,
                     unsigned long sent, unsigned long received, unsigned long got,
                     unsigned long straight)
{
    return "[1.5] [host:1:0] zip_iface.cc:453 UCX  INFO  zip/tcp: sent " + std::to_string(puts) +
           " puts, " + std::to_string(put_bytes) + " bytes as " + std::to_string(wire) + " in " +
           std::to_string(sent) + " segments (0 of them uncompressed); received 5 bytes in " +
           std::to_string(received) + " segments, refused 0; got 1 gets, " + std::to_string(got) +
           " bytes; " + std::to_string(straight) +
           " bytes straight; registered below 1 times, at most 4096 bytes\n";
}

TEST(ZipLog, interfaces_of_both_sides_are_added_up)
{
    const auto counters = tools::parse_zip_log(
            "inter-node cfg#0 tag(tcp/lo zip/lo) sent nothing\n" +
            zip_line(2, 1000, 600, 4, 3, 0, 100) + zip_line(0, 0, 250, 3, 4, 500, 0));
    ASSERT_TRUE(counters);
    EXPECT_EQ(counters->taken, 1500U);
    EXPECT_EQ(counters->on_wire, 950U);
    EXPECT_DOUBLE_EQ(tools::ratio_of(*counters, 1500), 950.0 / 1500);
    EXPECT_DOUBLE_EQ(tools::ratio_of(*counters, 2000), 1450.0 / 2000) << "the rest as it was";
}

TEST(ZipLog, what_is_incomplete_gives_no_ratio)
{
    EXPECT_FALSE(tools::parse_zip_log(""));
    EXPECT_FALSE(tools::parse_zip_log("zip/tcp: sent 1 puts, 2 bytes\n"));
    EXPECT_FALSE(tools::parse_zip_log(zip_line(0, 0, 0, 0, 4, 500, 0))) << "who sent these?";
}

std::string value_of(const std::vector<std::string> &environment, const std::string &name)
{
    std::string found = "(unset)";
    for (const std::string &variable : environment) {
        if (variable.rfind(name + "=", 0) == 0) {
            EXPECT_EQ(found, "(unset)") << name << " twice";
            found = variable.substr(name.size() + 1);
        }
    }
    return found;
}

TEST(P2pSetup, ucx_knows_nothing_of_the_plugin)
{
    tools::P2pOptions options;
    options.to_memory = options.memory;
    options.strategies = {"ucx"};
    const tools::P2pWire wire = tools::p2p_wires(options).at(0);
    const auto variants = tools::p2p_variants(options, wire);
    ASSERT_EQ(variants.size(), 1U);
    const auto environment =
            tools::p2p_environment({"PATH=/bin", "UCX_PLUGIN_PATH=/x", "UCX_TLS=zip,tcp",
                                    "UCX_ZIP_BYPASS=never", "UCX_NET_DEVICES=eth0", "UCX_A=1"},
                                   variants[0].env, variants[0].zip);
    EXPECT_EQ(value_of(environment, "PATH"), "/bin");
    EXPECT_EQ(value_of(environment, "UCX_PLUGIN_PATH"), "(unset)");
    EXPECT_EQ(value_of(environment, "UCX_ZIP_BYPASS"), "(unset)");
    EXPECT_EQ(value_of(environment, "UCX_TLS"), "tcp");
    EXPECT_EQ(value_of(environment, "UCX_NET_DEVICES"), "lo");
    EXPECT_EQ(value_of(environment, "UCX_A"), "1");
}

TEST(P2pSetup, strategies_are_sets_of_variables)
{
    const tools::RunFolder folder;
    std::ofstream(folder.file("libuct_zip.so")) << "";
    std::ofstream(folder.file("verbs.so")) << "";
    tools::P2pOptions options;
    options.memory = "cuda";
    options.to_memory = "host";
    options.plugin = folder.path();
    options.verbs = folder.file("verbs.so");
    options.wires = {"rc"};
    options.wire_gbps = {"12.5", "50"};
    options.strategies = {"ucx", "plain", "auto", "mine"};
    options.env = {"UCX_ZIP_BYPASS=never", "SWVERBS_CHUNK=1m"};
    options.env_of = {"mine:UCX_ZIP_STRATEGY=own", "mine:UCX_ZIP_BYPASS=", "mine:LD_PRELOAD=x.so"};
    const auto wires = tools::p2p_wires(options);
    ASSERT_EQ(wires.size(), 2U);
    EXPECT_EQ(wires[1].name, "rc emulated 50 GB/s");
    const auto variants = tools::p2p_variants(options, wires[0]);
    ASSERT_EQ(variants.size(), 6U) << "ucx with three schemes of rendezvous, and the others";
    const auto env = [&variants](size_t i) {
        return tools::p2p_environment({}, variants[i].env, variants[i].zip);
    };
    EXPECT_EQ(variants[1].setting, "put_zcopy");
    EXPECT_EQ(value_of(env(0), "UCX_RNDV_SCHEME"), "(unset)");
    EXPECT_EQ(value_of(env(1), "UCX_RNDV_SCHEME"), "put_zcopy");
    EXPECT_EQ(value_of(env(1), "UCX_TLS"), "rc_verbs,ud_verbs,cuda_copy");
    EXPECT_EQ(value_of(env(1), "SWVERBS_GBPS"), "12.5");
    EXPECT_EQ(value_of(env(1), "SWVERBS_CHUNK"), "1m");
    EXPECT_EQ(value_of(env(1), "SWVERBS_LEAD_US"), "30") << "for GPU memory";
    EXPECT_EQ(value_of(env(3), "UCX_TLS"), "zip,rc_verbs,ud_verbs,cuda_copy");
    EXPECT_EQ(value_of(env(3), "UCX_ZIP_STRATEGY"), "plain");
    EXPECT_EQ(value_of(env(3), "UCX_ZIP_MEM_TYPES"), "host,cuda");
    EXPECT_EQ(value_of(env(3), "UCX_ZIP_BYPASS"), "never");
    EXPECT_EQ(value_of(env(4), "UCX_ZIP_STRATEGY"), "(unset)");
    EXPECT_EQ(value_of(env(5), "UCX_ZIP_STRATEGY"), "own");
    EXPECT_EQ(value_of(env(5), "UCX_ZIP_BYPASS"), "(unset)");
    const std::string preload = value_of(env(5), "LD_PRELOAD");
    EXPECT_EQ(preload.substr(preload.rfind(':')), ":x.so");
    EXPECT_NE(preload.find("verbs.so:"), std::string::npos);
}

TEST(ChildProcess, has_its_own_environment_descriptors_and_log)
{
    const tools::RunFolder folder;
    int ends[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    {
        tools::ChildProcess child({{"/bin/sh", "-c", "echo $A; echo over >&3; exit 7"},
                                   {"A=value of a"},
                                   {ends[1]},
                                   folder.file("log")});
        EXPECT_TRUE(child.wait(10));
        EXPECT_FALSE(child.ended_well());
        EXPECT_EQ(child.how_it_ended(), "ended with status 7");
    }
    std::string line;
    std::ifstream log(folder.file("log"));
    std::getline(log, line);
    EXPECT_EQ(line, "value of a");
    char text[8] = {};
    EXPECT_EQ(read(ends[0], text, sizeof(text)), 5);
    EXPECT_STREQ(text, "over\n");
    close(ends[0]);
    close(ends[1]);
}

TEST(ChildProcess, never_outlives_its_object)
{
    const tools::RunFolder folder;
    pid_t pid = 0;
    {
        const tools::ChildProcess deaf(
                {{"/bin/sh", "-c", "trap '' TERM; while :; do sleep 0.1; done"},
                 {"PATH=/bin:/usr/bin"},
                 {},
                 folder.file("log")});
        pid = deaf.pid();
        EXPECT_EQ(kill(pid, 0), 0);
        usleep(100000);
    }
    EXPECT_NE(kill(pid, 0), 0);
    tools::ChildProcess missing({{"/no/such/program"}, {}, {}, folder.file("log")});
    EXPECT_TRUE(missing.wait(10));
    EXPECT_EQ(missing.how_it_ended(), "ended with status 127");
}

TEST(RunFolder, goes_with_all_that_is_in_it)
{
    std::string path;
    {
        const tools::RunFolder folder;
        path = folder.path();
        std::ofstream(folder.file("x")) << "y";
        EXPECT_EQ(access(folder.file("x").c_str(), F_OK), 0);
        const tools::RunFolder kept(path + "/kept");
        EXPECT_EQ(access((path + "/kept").c_str(), F_OK), 0);
    }
    EXPECT_NE(access(path.c_str(), F_OK), 0);
}

} // namespace
