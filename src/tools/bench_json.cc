// SPDX-License-Identifier: BSD-3-Clause
// The JSON that every benchmark writes.
#include "tools/bench_json.h"

#include "tools/error.h"

#include <nlohmann/json.hpp>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fstream>
#include <unistd.h>

#ifdef HAVE_CONFIG_H
#include "config.h"
#endif
#ifndef PACKAGE_VERSION
#define PACKAGE_VERSION "unknown"
#endif

namespace tools {

namespace {

template <typename T>
void put(nlohmann::ordered_json &row, const char *key, const std::optional<T> &value)
{
    if (value) {
        row[key] = *value;
    }
}

void put(nlohmann::ordered_json &row, const char *key, const std::string &value)
{
    if (!value.empty()) {
        row[key] = value;
    }
}

nlohmann::ordered_json to_json(const BenchRow &r)
{
    nlohmann::ordered_json row;
    put(row, "size", r.size);
    put(row, "dtype", r.dtype);
    put(row, "data", r.data);
    put(row, "wire", r.wire);
    put(row, "strategy", r.strategy);
    put(row, "direction", r.direction);
    put(row, "gbps_median", r.gbps_median);
    put(row, "gbps_p10", r.gbps_p10);
    put(row, "gbps_p90", r.gbps_p90);
    put(row, "us_median", r.us_median);
    put(row, "ratio", r.ratio);
    put(row, "plain_gbps_median", r.plain_gbps_median);
    put(row, "speedup", r.speedup);
    put(row, "speedup_p10", r.speedup_p10);
    put(row, "speedup_p90", r.speedup_p90);
    put(row, "bound_gbps", r.bound_gbps);
    put(row, "messages", r.messages);
    put(row, "repeats", r.repeats);
    put(row, "verified", r.verified);
    put(row, "setting", r.setting);
    put(row, "memory", r.memory);
    put(row, "to_memory", r.to_memory);
    put(row, "lanes", r.lanes);
    put(row, "us_p10", r.us_p10);
    put(row, "us_p90", r.us_p90);
    put(row, "ucx_gbps_median", r.ucx_gbps_median);
    put(row, "speedup_plain", r.speedup_plain);
    put(row, "window", r.window);
    put(row, "wire_gbps", r.wire_gbps);
    put(row, "mps", r.mps);
    put(row, "gpus", r.gpus);
    put(row, "in_process", r.in_process);
    put(row, "op", r.op);
    put(row, "codec", r.codec);
    put(row, "shape", r.shape);
    put(row, "picked", r.picked);
    put(row, "where", r.where);
    put(row, "cache", r.cache);
    put(row, "simd", r.simd);
    put(row, "tiles", r.tiles);
    put(row, "chunks_in", r.chunks_in);
    put(row, "chunk", r.chunk);
    put(row, "threads", r.threads);
    put(row, "max_sms", r.max_sms);
    put(row, "misalign", r.misalign);
    put(row, "batch", r.batch);
    put(row, "progress", r.progress);
    put(row, "memory_gbps", r.memory_gbps);
    put(row, "host_us_median", r.host_us_median);
    return row;
}

std::string utc_now()
{
    const std::time_t now = std::time(nullptr);
    std::tm tm{};
    gmtime_r(&now, &tm);
    char text[32];
    std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &tm);
    return text;
}

[[noreturn]] void cannot_write(const std::string &path, int error)
{
    throw Error("cannot write " + path + ": " + std::strerror(error) +
                "; give --json a path in a folder that exists and is writable");
}

} // namespace

std::string host_name()
{
    char name[256] = {};
    return gethostname(name, sizeof(name) - 1) == 0 ? name : "unknown";
}

std::string cpu_name()
{
    std::ifstream in("/proc/cpuinfo");
    std::string line;
    while (std::getline(in, line)) {
        if (line.rfind("model name", 0) == 0) {
            const size_t colon = line.find(": ");
            return colon == std::string::npos ? "CPU" : line.substr(colon + 2);
        }
    }
    return "CPU";
}

void check_json_writable(const std::string &path)
{
    const std::string temporary = path + ".part";
    FILE *file = std::fopen(temporary.c_str(), "w");
    if (file == nullptr) {
        cannot_write(path, errno);
    }
    std::fclose(file);
    std::remove(temporary.c_str());
}

void write_bench_json(const std::string &path, const std::string &tool,
                      const std::vector<BenchRow> &rows, const std::string &device)
{
    nlohmann::ordered_json doc;
    doc["tool"] = tool;
    doc["version"] = PACKAGE_VERSION;
    doc["host"] = host_name();
    doc["device"] = device.empty() ? cpu_name() : device;
    doc["date"] = utc_now();
    doc["rows"] = nlohmann::ordered_json::array();
    for (const BenchRow &row : rows) {
        doc["rows"].push_back(to_json(row));
    }

    const std::string text =
            doc.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
    const std::string temporary = path + ".part";
    FILE *file = std::fopen(temporary.c_str(), "w");
    if (file == nullptr) {
        cannot_write(path, errno);
    }
    const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
    const bool closed = std::fclose(file) == 0;
    if (!written || !closed || std::rename(temporary.c_str(), path.c_str()) != 0) {
        const int error = errno;
        std::remove(temporary.c_str());
        cannot_write(path, error);
    }
}

} // namespace tools
