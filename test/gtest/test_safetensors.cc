// SPDX-License-Identifier: BSD-3-Clause
// The safetensors reader: good files are read, every kind of broken one is refused in one line.
#include "tools/error.h"
#include "tools/safetensors.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <sys/stat.h>
#include <unistd.h>

namespace {

using tools::Error;
using tools::SafetensorsFile;

class Safetensors : public ::testing::Test {
protected:
    void SetUp() override
    {
        const char *base = std::getenv("TMPDIR");
        std::string pattern = std::string(base ? base : "/tmp") + "/zip_safetensors_XXXXXX";
        ASSERT_NE(mkdtemp(pattern.data()), nullptr);
        dir_ = pattern;
        path_ = dir_ + "/model.safetensors";
    }

    void TearDown() override
    {
        unlink(path_.c_str());
        rmdir(dir_.c_str());
    }

    void write_raw(const std::string &content)
    {
        FILE *file = std::fopen(path_.c_str(), "wb");
        ASSERT_NE(file, nullptr);
        ASSERT_EQ(std::fwrite(content.data(), 1, content.size(), file), content.size());
        ASSERT_EQ(std::fclose(file), 0);
    }

    static std::string file_of(const std::string &header, const std::string &data,
                               uint64_t header_size)
    {
        std::string content(8, '\0');
        for (int i = 0; i < 8; ++i) {
            content[static_cast<size_t>(i)] = static_cast<char>(header_size >> (8 * i));
        }
        return content + header + data;
    }

    void write(const std::string &header, const std::string &data = "")
    {
        write_raw(file_of(header, data, header.size()));
    }

    // The error's text; the test fails if the file is accepted or the text is no single line.
    std::string refusal()
    {
        try {
            const SafetensorsFile file(path_);
        } catch (const Error &error) {
            const std::string text = error.what();
            EXPECT_EQ(text.find('\n'), std::string::npos) << text;
            EXPECT_NE(text.find(path_), std::string::npos) << text;
            EXPECT_LT(text.size(), 500U) << text;
            EXPECT_NE(error.status(), 0);
            return text;
        }
        ADD_FAILURE() << "the file was accepted";
        return "";
    }

    void expect_refused(const std::string &header, const std::string &data, const char *because)
    {
        write(header, data);
        const std::string text = refusal();
        EXPECT_NE(text.find(because), std::string::npos) << text;
    }

    std::string dir_;
    std::string path_;
};

const char *const kTwo = R"({"__metadata__":{"format":"pt"},)"
                         R"("b":{"dtype":"BF16","shape":[2],"data_offsets":[8,12]},)"
                         R"("a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}})";

TEST_F(Safetensors, reads_tensors_in_file_order)
{
    write(kTwo, "01234567abcd");
    const SafetensorsFile file(path_);
    ASSERT_EQ(file.tensors().size(), 2U);
    EXPECT_EQ(file.tensors()[0].name, "a");
    EXPECT_EQ(file.tensors()[0].dtype, "F32");
    EXPECT_EQ(file.tensors()[0].shape, (std::vector<uint64_t>{1, 2}));
    EXPECT_EQ(file.tensors()[1].name, "b");
    EXPECT_EQ(std::memcmp(file.tensors()[1].data, "abcd", 4), 0);
    EXPECT_EQ(file.tensors()[1].size, 4U);
}

TEST_F(Safetensors, stays_valid_when_moved)
{
    write(kTwo, "01234567abcd");
    SafetensorsFile first(path_);
    const SafetensorsFile second(std::move(first));
    EXPECT_EQ(std::memcmp(second.tensors()[0].data, "01234567", 8), 0);
}

TEST_F(Safetensors, reads_scalars_empty_tensors_and_padded_headers)
{
    write(R"({"s":{"dtype":"F64","shape":[],"data_offsets":[0,8]},)"
          R"("e":{"dtype":"F32","shape":[0,18446744073709551615],"data_offsets":[8,8]}}   )",
          "01234567");
    const SafetensorsFile file(path_);
    ASSERT_EQ(file.tensors().size(), 2U);
    EXPECT_EQ(file.tensors()[0].size, 8U);
    EXPECT_EQ(file.tensors()[1].size, 0U);
}

TEST_F(Safetensors, knows_every_dtype_of_the_format)
{
    EXPECT_EQ(tools::safetensors_dtype_bits("BF16"), 16U);
    EXPECT_EQ(tools::safetensors_dtype_bits("F8_E4M3"), 8U);
    EXPECT_EQ(tools::safetensors_dtype_bits("F4"), 4U);
    EXPECT_EQ(tools::safetensors_dtype_bits("C64"), 64U);
    EXPECT_FALSE(tools::safetensors_dtype_bits("F128"));
    EXPECT_FALSE(tools::safetensors_dtype_bits(""));
    EXPECT_FALSE(tools::safetensors_dtype_bits("f32"));
}

TEST_F(Safetensors, refuses_a_missing_file)
{
    EXPECT_NE(refusal().find("No such file"), std::string::npos);
}

TEST_F(Safetensors, refuses_a_directory)
{
    ASSERT_EQ(mkdir(path_.c_str(), 0700), 0);
    EXPECT_NE(refusal().find("is a directory"), std::string::npos);
    rmdir(path_.c_str());
}

TEST_F(Safetensors, refuses_a_pipe_without_waiting_for_a_writer)
{
    ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);
    EXPECT_NE(refusal().find("not a regular file"), std::string::npos);
}

TEST_F(Safetensors, refuses_an_empty_file)
{
    write_raw("");
    EXPECT_NE(refusal().find("is empty"), std::string::npos);
}

TEST_F(Safetensors, refuses_fewer_bytes_than_a_header_length)
{
    write_raw("1234567");
    EXPECT_NE(refusal().find("only 7 bytes"), std::string::npos);
}

TEST_F(Safetensors, refuses_a_header_longer_than_the_file)
{
    for (const uint64_t size : {uint64_t{3}, uint64_t{1000}, UINT64_MAX, UINT64_MAX - 7}) {
        write_raw(file_of("{}", "", size));
        EXPECT_NE(refusal().find("but the whole file has 10"), std::string::npos);
    }
}

TEST_F(Safetensors, refuses_a_header_above_the_formats_limit)
{
    write_raw(file_of("", "", 100'000'001));
    ASSERT_EQ(truncate(path_.c_str(), 100'000'100), 0); // sparse
    EXPECT_NE(refusal().find("the format allows"), std::string::npos);
}

TEST_F(Safetensors, refuses_what_is_not_json)
{
    expect_refused("", "", "not valid JSON");
    expect_refused("{", "", "not valid JSON");
    expect_refused("hello", "", "not valid JSON");
    expect_refused("{} {}", "", "not valid JSON");
    expect_refused(std::string("{\"a\xff\":1}"), "", "not valid JSON");
    expect_refused(std::string(64, '\0'), "", "not valid JSON");
    // Any prefix of a good header is bad.
    const std::string good = kTwo;
    for (size_t n = 1; n < good.size(); ++n) {
        expect_refused(good.substr(0, n), "", "not valid JSON");
    }
}

TEST_F(Safetensors, refuses_json_that_is_no_object)
{
    expect_refused("[]", "", "not a JSON object");
    expect_refused("1", "", "not a JSON object");
    expect_refused("\"a\"", "", "not a JSON object");
    expect_refused("null", "", "not a JSON object");
    expect_refused("{}", "", "holds no tensors");
    expect_refused(R"({"__metadata__":{}})", "", "holds no tensors");
}

TEST_F(Safetensors, refuses_deep_nesting)
{
    const std::string arrays(1'000'000, '[');
    expect_refused(arrays, "", "an array");
    expect_refused(R"({"a":)" + arrays, "", "an array");
    expect_refused(R"({"a":{"dtype":"F32","shape":)" + arrays, "", "an array");
    expect_refused(R"({"__metadata__":{"a":)" + arrays, "", "__metadata__ holds an array");
    std::string objects;
    for (int i = 0; i < 200'000; ++i) {
        objects += "{\"a\":";
    }
    expect_refused(objects, "", "unknown key");
    expect_refused(R"({"__metadata__":{"a":)" + objects, "", "__metadata__ holds an object");
}

TEST_F(Safetensors, refuses_duplicate_names_and_keys)
{
    const std::string one = R"("a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]})";
    expect_refused("{" + one + "," + one + "}", "1", "twice");
    expect_refused(R"({"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", "1",
                   "has dtype twice");
    expect_refused(R"({"a":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}})", "1",
                   "has shape twice");
    expect_refused(R"({"a":{"dtype":"U8","shape":[],"data_offsets":[],"data_offsets":[0,1]}})", "1",
                   "has data_offsets twice");
    expect_refused(R"({"__metadata__":{},"__metadata__":{}})", "", "twice");
}

TEST_F(Safetensors, refuses_missing_and_unknown_keys)
{
    expect_refused(R"({"a":{"shape":[1],"data_offsets":[0,1]}})", "1", "has no dtype");
    expect_refused(R"({"a":{"dtype":"U8","data_offsets":[0,1]}})", "1", "has no shape");
    expect_refused(R"({"a":{"dtype":"U8","shape":[1]}})", "1", "has no data_offsets");
    expect_refused(R"({"a":{"dtype":"U8","stride":[1]}})", "1", "unknown key 'stride'");
    expect_refused(R"({"a":{}})", "", "has no dtype");
}

TEST_F(Safetensors, refuses_wrong_json_types)
{
    expect_refused(R"({"a":1})", "", "and not an object");
    expect_refused(R"({"a":null})", "", "and not an object");
    expect_refused(R"({"a":"x"})", "", "and not an object");
    expect_refused(R"({"a":{"dtype":1}})", "", "a number where none may be");
    expect_refused(R"({"a":{"dtype":["U8"]}})", "", "an array where none may be");
    expect_refused(R"({"a":{"shape":"x"}})", "", "a string where none may be");
    expect_refused(R"({"a":{"shape":5}})", "", "a number where none may be");
    expect_refused(R"({"a":{"shape":["x"]}})", "", "a string where none may be");
    expect_refused(R"({"a":{"shape":[true]}})", "", "a boolean where none may be");
    expect_refused(R"({"a":{"shape":[{}]}})", "", "an object where none may be");
    expect_refused(R"({"__metadata__":{"a":1}})", "", "__metadata__ holds a number");
    expect_refused(R"({"__metadata__":5})", "", "__metadata__ holds a number");
}

TEST_F(Safetensors, refuses_numbers_that_are_no_sizes)
{
    expect_refused(R"({"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}})", "1", "negative");
    expect_refused(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[-1,0]}})", "1", "negative");
    expect_refused(R"({"a":{"dtype":"U8","shape":[1.5],"data_offsets":[0,1]}})", "1",
                   "not a whole number");
    expect_refused(R"({"a":{"dtype":"U8","shape":[18446744073709551616],"data_offsets":[0,1]}})",
                   "1", "not a whole number");
    expect_refused(R"({"a":{"dtype":"U8","shape":[1e5],"data_offsets":[0,1]}})", "1",
                   "not a whole number");
    expect_refused(R"({"a":{"dtype":"U8","shape":[1e999],"data_offsets":[0,1]}})", "1", "");
}

TEST_F(Safetensors, refuses_shapes_that_overflow)
{
    expect_refused(R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})",
                   "", "an impossible number");
    expect_refused(R"({"a":{"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,4]}})",
                   "1234", "an impossible number");
    std::string many;
    for (int i = 0; i < 65; ++i) {
        many += i == 0 ? "1" : ",1";
    }
    expect_refused(R"({"a":{"dtype":"U8","shape":[)" + many + R"(],"data_offsets":[0,1]}})", "1",
                   "more than 64 numbers");
}

TEST_F(Safetensors, refuses_offsets_out_of_range)
{
    expect_refused(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", "1", "truncated");
    expect_refused(
            R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[18446744073709551614,18446744073709551615]}})",
            "1", "truncated");
    expect_refused(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}})", "1",
                   "ends before it begins");
    expect_refused(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0]}})", "1", "not 2");
    expect_refused(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,1]}})", "1", "not 2");
}

TEST_F(Safetensors, refuses_sizes_that_do_not_match_shape_and_dtype)
{
    expect_refused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", "1234", "need 8");
    expect_refused(R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0,8]}})", "12345678",
                   "need 4");
    expect_refused(R"({"a":{"dtype":"F4","shape":[1],"data_offsets":[0,1]}})", "1",
                   "an impossible number");
}

TEST_F(Safetensors, refuses_overlaps_and_holes)
{
    const std::string a = R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)";
    expect_refused(a + R"("b":{"dtype":"U8","shape":[4],"data_offsets":[3,7]}})", "1234567",
                   "overlaps");
    expect_refused(a + R"("b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", "1234",
                   "overlaps");
    expect_refused(a + R"("b":{"dtype":"U8","shape":[2],"data_offsets":[5,7]}})", "1234567",
                   "1 bytes before tensor 'b' belong to no tensor");
    expect_refused(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", "12",
                   "after the last tensor");
}

TEST_F(Safetensors, refuses_unknown_dtypes_by_name)
{
    expect_refused(R"({"w":{"dtype":"F128","shape":[1],"data_offsets":[0,1]}})", "1",
                   "tensor 'w' has the unknown dtype 'F128'");
    expect_refused(R"({"w":{"dtype":"","shape":[1],"data_offsets":[0,1]}})", "1", "unknown dtype");
}

TEST_F(Safetensors, refuses_every_truncation_of_a_good_file)
{
    const std::string header = kTwo;
    const std::string good = file_of(header, "01234567abcd", header.size());
    for (size_t n = 0; n < good.size(); ++n) {
        write_raw(good.substr(0, n));
        refusal();
    }
}

TEST_F(Safetensors, survives_every_single_byte_change)
{
    const std::string header = kTwo;
    const std::string good = file_of(header, "01234567abcd", header.size());
    for (size_t n = 0; n < good.size(); ++n) {
        for (const int flip : {0x01, 0x20, 0x80, 0xff}) {
            std::string bad = good;
            bad[n] = static_cast<char>(bad[n] ^ flip);
            write_raw(bad);
            try {
                const SafetensorsFile file(path_);
            } catch (const Error &error) {
                EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
            }
        }
    }
}

TEST_F(Safetensors, keeps_hostile_names_on_one_short_line)
{
    const std::string name = "x\\n\\u001b[2J" + std::string(5000, 'y');
    expect_refused("{\"" + name + R"(":{"dtype":"F128","shape":[1],"data_offsets":[0,1]}})", "1",
                   "unknown dtype");
}

} // namespace
