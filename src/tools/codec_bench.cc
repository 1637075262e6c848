// SPDX-License-Identifier: BSD-3-Clause
// `zipperf codec`: which points are measured, their data, tables and JSON.
#include "tools/codec_bench.h"

#include "tools/codec_bench_parts.h"
#include "tools/error.h"
#include "tools/host_memory.h"
#include "tools/interrupt.h"
#include "tools/safetensors.h"
#include "tools/stats.h"
#include "tools/table.h"
#include "tools/units.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <optional>

namespace tools {

namespace {

zip_dtype_t dtype_of(const std::string &name)
{
    for (int i = ZIP_DTYPE_BF16; i < ZIP_DTYPE_LAST; ++i) {
        const zip_dtype_t dtype = static_cast<zip_dtype_t>(i);
        const char *known = zip_dtype_name(dtype);
        if (known != nullptr && name == known) {
            return dtype;
        }
    }
    throw Error("unknown type '" + name + "'");
}

std::string chunk_text(const BenchRow &row)
{
    return !row.chunk ? "" : *row.chunk == 0 ? "one" : format_size(*row.chunk);
}

// What makes a row another than its neighbours, beside the columns of its own.
std::string details(const BenchRow &row)
{
    std::string text;
    const auto add = [&text](const std::string &part) {
        text += (text.empty() || part.empty() ? "" : " ") + part;
    };
    add(row.shape);
    add(row.picked.empty() ? "" : "(" + row.picked + ")");
    add(row.tiles == "small" ? "small tiles" : "");
    add(row.simd);
    add(row.threads.value_or(1) > 1 ? format("%u threads", static_cast<unsigned>(*row.threads))
                                    : "");
    add(row.max_sms ? format("%u SMs", static_cast<unsigned>(*row.max_sms)) : "");
    add(row.misalign ? format("+%u B", static_cast<unsigned>(*row.misalign)) : "");
    add(row.batch ? format("x%u", static_cast<unsigned>(*row.batch)) : "");
    add(row.chunks_in == "host" ? "chunks in host memory" : "");
    add(row.progress.has_value() && !*row.progress ? "no progress words" : "");
    return text;
}

void print_rows(const std::vector<BenchRow> &rows)
{
    if (rows.empty()) {
        return;
    }
    std::printf("%s, %s\n", rows.front().dtype.c_str(), rows.front().data.c_str());
    Table table({"size", "where", "codec", "op", "chunk", "how", "cache", "us", "GB/s", "p10..p90",
                 "ratio", "memory GB/s", "host us", "bits"});
    for (const BenchRow &row : rows) {
        table.add({format_size(*row.size), row.where, row.codec, row.op, chunk_text(row),
                   details(row), row.cache, format("%.1f", *row.us_median),
                   format("%.2f", *row.gbps_median),
                   format("%.2f..%.2f", *row.gbps_p10, *row.gbps_p90),
                   row.ratio ? format("%.4f", *row.ratio) : "",
                   row.memory_gbps ? format("%.0f", *row.memory_gbps) : "",
                   row.host_us_median ? format("%.1f", *row.host_us_median) : "",
                   row.verified.value_or(false) ? "same" : ""});
    }
    table.print(stdout);
    std::printf("\n");
    std::fflush(stdout);
}

void write_dump(const std::string &path, const std::byte *data, uint64_t size)
{
    FILE *file = std::fopen(path.c_str(), "wb");
    const bool written =
            file != nullptr && std::fwrite(data, 1, static_cast<size_t>(size), file) == size;
    const bool closed = file != nullptr && std::fclose(file) == 0;
    if (!written || !closed) {
        throw Error("cannot write " + path + ": " + std::strerror(errno));
    }
}

// What `needed` bytes of host memory a byte of the largest buffer takes: the original, its chunks,
// what is decoded, and the sums' two; and some more for pools.
constexpr uint64_t kMemoryFactor = 5;

void check_sizes(const CodecOptions &options, const std::vector<uint64_t> &sizes)
{
    const uint64_t available = available_memory();
    for (const uint64_t size : sizes) {
        if (size > available / kMemoryFactor) {
            throw Error("size " + format_size(size) +
                        " does not fit: of the memory that is free, " + format_size(available) +
                        ", a buffer may take a fifth");
        }
    }
    for (const std::string &chunk : options.chunks) {
        if (parse_size(chunk) % 16 != 0) {
            throw Error("a chunk of " + chunk + " bytes is not a multiple of 16");
        }
    }
}

} // namespace

zip_coding_t coding_of(zip_dtype_t dtype, const std::string &shape, const std::string &tiles)
{
    zip_coding_t coding{};
    coding.dtype = dtype;
    coding.small_tiles = tiles == "small";
    if (shape == "auto") {
        coding.dtype = ZIP_DTYPE_AUTO;
    } else if (shape != "default") {
        for (int i = ZIP_SHAPE_22228; i < ZIP_SHAPE_LAST; ++i) {
            if (shape == zip_shape_name(static_cast<zip_shape_t>(i))) {
                coding.shape = static_cast<zip_shape_t>(i);
            }
        }
    }
    return coding;
}

bool can_be_coded(zip_coding_t coding)
{
    zip_plan_t plan;
    return zip_codec_plan(coding, 0, &plan) == ZIP_OK;
}

BenchRow start_row(const CodecData &data, const char *where, const char *op,
                   const std::string &codec)
{
    BenchRow row;
    row.size = data.size;
    row.dtype = data.pool.dtype;
    row.data = data.pool.data;
    row.where = where;
    row.op = op;
    row.codec = codec;
    return row;
}

void set_times(BenchRow &row, const std::vector<double> &us, uint64_t bytes)
{
    const Summary time = summarize(us);
    const auto gbps = [bytes](double microseconds) {
        return microseconds > 0 ? static_cast<double>(bytes) / microseconds / 1e3 : 0.0;
    };
    row.us_median = time.median;
    row.gbps_median = gbps(time.median);
    row.gbps_p10 = gbps(time.p90); // the slow end of the times is the low bandwidth
    row.gbps_p90 = gbps(time.p10);
    row.repeats = us.size();
}

std::string coding_text(zip_dtype_t dtype, zip_shape_t shape)
{
    const char *type = zip_dtype_name(dtype);
    const char *cascade = dtype == ZIP_DTYPE_BYTES ? nullptr : zip_shape_name(shape);
    return std::string(type != nullptr ? type : "?") +
           (cascade != nullptr ? std::string("/") + cascade : "");
}

void throw_mismatch(const BenchRow &row)
{
    throw Error(format("%s on the %s: %s of %s of %s (%s, %s) did not give the original's bits",
                       row.codec.c_str(), row.where.c_str(), row.op.c_str(),
                       format_size(row.size.value_or(0)).c_str(), row.dtype.c_str(),
                       row.data.c_str(), details(row).c_str()),
                kExitMismatch);
}

bool wants(const std::vector<std::string> &list, const char *name)
{
    return std::find(list.begin(), list.end(), name) != list.end();
}

void run_codec_bench(const CodecOptions &options)
{
    const std::vector<uint64_t> sizes = parse_size_list(options.sizes);
    const uint64_t longest = *std::max_element(sizes.begin(), sizes.end());
    check_sizes(options, sizes);
    if (!options.json.empty()) {
        check_json_writable(options.json);
    }
    std::vector<SafetensorsFile> files;
    for (const std::string &path : options.models) {
        files.emplace_back(path);
    }

    std::optional<HostBench> host;
    std::optional<GpuBench> gpu;
    std::string device;
    if (options.dump.empty()) {
        if (options.where.empty() || wants(options.where, "host")) {
            host.emplace(options);
        }
        if (wants(options.where, "gpu")) {
            gpu.emplace(options);
        } else if (options.where.empty()) {
            try {
                gpu.emplace(options);
            } catch (const Error &error) {
                std::fprintf(stderr, "note: %s; only the host is measured\n", error.what());
            }
        }
        if (gpu) {
            device = gpu->device();
            std::printf("GPU: %s\n", device.c_str());
        }
        if (host) {
            std::printf("CPU: %s\n", cpu_name().c_str());
        }
    } else if (sizes.size() != 1 || options.dtypes.size() != 1 || options.data.size() != 1) {
        throw Error("--dump writes one file: give one --size, one --dtype and one --data");
    }

    std::vector<BenchRow> rows;
    bool any = false;
    Arena original(longest);
    for (const std::string &dtype : options.dtypes) {
        for (const std::string &name : options.data) {
            const Values values = values_from_name(name).value_or(Values::kNormal);
            const ValuePool pool = make_value_pool(values, dtype, longest, files);
            if (pool.bytes.empty()) {
                std::fprintf(stderr,
                             "note: the model holds no values that can be narrowed to %s; left "
                             "out\n",
                             dtype.c_str());
                continue;
            }
            any = true;
            std::vector<BenchRow> group;
            for (const uint64_t size : sizes) {
                check_interrupted();
                fill_from_pool(pool, 0, original.data(), size);
                if (!options.dump.empty()) {
                    write_dump(options.dump, original.data(), size);
                    continue;
                }
                const CodecData data = {pool, dtype_of(dtype), values != Values::kRandom,
                                        original.data(), size};
                if (host) {
                    host->measure(data, group);
                }
                if (gpu) {
                    gpu->measure(data, group);
                }
            }
            print_rows(group);
            rows.insert(rows.end(), group.begin(), group.end());
            // After each group, so that a run that is cut short leaves what it has.
            if (!options.json.empty()) {
                write_bench_json(options.json, "zipperf codec", rows, device);
            }
        }
    }
    if (!any) {
        throw Error("there is nothing to measure: the model fits none of the types of --dtype");
    }
}

} // namespace tools
