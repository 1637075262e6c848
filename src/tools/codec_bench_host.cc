// SPDX-License-Identifier: BSD-3-Clause
// `zipperf codec` on the host: our codec at each instruction set, zstd, and a copy of the same
// bytes.
#include "tools/codec_bench_parts.h"

#include "tools/clock.h"
#include "tools/error.h"
#include "tools/host_memory.h"
#include "tools/interrupt.h"
#include "tools/table.h"
#include "tools/units.h"

#include <hwy/highway.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <functional>
#include <thread>

#ifdef HAVE_CONFIG_H
#include "config.h"
#endif
#ifdef HAVE_ZSTD
#include <zstd.h>
#endif

namespace tools {

namespace {

constexpr unsigned kRepeats = 7;
constexpr unsigned kFewest = 3;       // runs of a point that takes long
constexpr double kPointSeconds = 3.0; // after which a point takes no more runs than these

// One chunk of the buffer.
struct Piece {
    const std::byte *original;
    std::byte *chunk;
    std::byte *restored;
    size_t size;
    size_t room;
    size_t encoded;
};

class HostCodec {
public:
    virtual ~HostCodec() = default;
    virtual std::string name() const = 0;
    virtual size_t bound(size_t size) const = 0;
    virtual void encode(std::vector<Piece> &pieces, unsigned threads) = 0;
    virtual void decode(std::vector<Piece> &pieces, unsigned threads) = 0;
};

class ZipCodec : public HostCodec {
public:
    explicit ZipCodec(zip_coding_t coding) : coding_(coding) {}
    std::string name() const override { return "zip"; }
    size_t bound(size_t size) const override { return zip_codec_bound(size); }

    void encode(std::vector<Piece> &pieces, unsigned threads) override
    {
        jobs_.resize(pieces.size());
        for (size_t i = 0; i < pieces.size(); ++i) {
            const Piece &p = pieces[i];
            jobs_[i] = {coding_, p.original, p.size, p.chunk, p.room, 0, ZIP_OK};
        }
        check(zip_codec_encode_batch(jobs_.data(), jobs_.size(), threads), "encode");
        for (size_t i = 0; i < pieces.size(); ++i) {
            pieces[i].encoded = jobs_[i].encoded;
        }
    }

    void decode(std::vector<Piece> &pieces, unsigned threads) override
    {
        jobs_.resize(pieces.size());
        for (size_t i = 0; i < pieces.size(); ++i) {
            const Piece &p = pieces[i];
            jobs_[i] = {coding_, p.chunk, p.encoded, p.restored, p.size, 0, ZIP_OK};
        }
        check(zip_codec_decode_batch(jobs_.data(), jobs_.size(), threads), "decode");
    }

private:
    static void check(zip_status_t status, const char *op)
    {
        if (status != ZIP_OK) {
            throw Error(std::string("the host codec cannot ") + op + ": " +
                        zip_status_string(status));
        }
    }

    zip_coding_t coding_;
    std::vector<zip_job_t> jobs_;
};

#ifdef HAVE_ZSTD
class ZstdCodec : public HostCodec {
public:
    explicit ZstdCodec(int level) : level_(level) {}
    std::string name() const override { return "zstd-" + std::to_string(level_); }
    size_t bound(size_t size) const override { return ZSTD_compressBound(size); }

    void encode(std::vector<Piece> &pieces, unsigned threads) override
    {
        each(pieces, threads, encoders_, ZSTD_createCCtx, [this](ZSTD_CCtx *context, Piece &p) {
            p.encoded = ZSTD_compressCCtx(context, p.chunk, p.room, p.original, p.size, level_);
            return p.encoded;
        });
    }

    void decode(std::vector<Piece> &pieces, unsigned threads) override
    {
        each(pieces, threads, decoders_, ZSTD_createDCtx, [](ZSTD_DCtx *context, Piece &p) {
            return ZSTD_decompressDCtx(context, p.restored, p.size, p.chunk, p.encoded);
        });
    }

private:
    struct Free {
        void operator()(ZSTD_CCtx *context) const { ZSTD_freeCCtx(context); }
        void operator()(ZSTD_DCtx *context) const { ZSTD_freeDCtx(context); }
    };

    // The threads take the pieces in turn, as our own batches do. Contexts stay between runs.
    template <typename Context, typename Work>
    void each(std::vector<Piece> &pieces, unsigned threads,
              std::vector<std::unique_ptr<Context, Free>> &contexts, Context *(*create)(),
              Work work)
    {
        while (contexts.size() < threads) {
            contexts.emplace_back(create());
            if (contexts.back() == nullptr) {
                throw Error("zstd has no memory for a context");
            }
        }
        std::atomic<size_t> next{0};
        std::atomic<bool> failed{false};
        const auto run = [&](size_t thread) {
            for (size_t i = next++; i < pieces.size(); i = next++) {
                if (ZSTD_isError(work(contexts[thread].get(), pieces[i]))) {
                    failed = true;
                }
            }
        };
        std::vector<std::jthread> helpers;
        for (size_t i = 1; i < std::min<size_t>(threads, pieces.size()); ++i) {
            helpers.emplace_back(run, i);
        }
        run(0);
        helpers.clear();
        if (failed) {
            throw Error(name() + " failed");
        }
    }

    int level_;
    std::vector<std::unique_ptr<ZSTD_CCtx, Free>> encoders_;
    std::vector<std::unique_ptr<ZSTD_DCtx, Free>> decoders_;
};
#endif

// Instruction sets by the names that users know. A set with several targets of Highway takes the
// best one that both this build and the processor have.
struct SimdName {
    const char *name;
    int64_t targets;
};
constexpr SimdName kSimd[] = {
        {"best", ~int64_t{0}},
#if HWY_ARCH_X86
        {"avx512", HWY_AVX3 | HWY_AVX3_DL},
        {"avx2", HWY_AVX2},
        {"sse4", HWY_SSE4},
        {"ssse3", HWY_SSSE3},
#elif HWY_ARCH_ARM
        {"neon", HWY_NEON},
        {"sve", HWY_SVE | HWY_SVE_256},
        {"sve2", HWY_SVE2 | HWY_SVE2_128},
#endif
};

// Restricts the codec's run-time dispatch while it lives. Whoever encodes meanwhile, on any thread,
// is meant.
class SimdLimit {
public:
    explicit SimdLimit(int64_t targets) { hwy::SetSupportedTargetsForTest(targets); }
    ~SimdLimit() { hwy::SetSupportedTargetsForTest(0); }
    SimdLimit(const SimdLimit &) = delete;
    SimdLimit &operator=(const SimdLimit &) = delete;
};

// The targets of `name` that this build has code for and the processor runs; 0: none.
int64_t usable_targets(const std::string &name)
{
    for (const SimdName &simd : kSimd) {
        if (name == simd.name) {
            return simd.targets & hwy::SupportedTargets() & HWY_TARGETS;
        }
    }
    return 0;
}

// Highway numbers better targets lower.
const char *best_target_name(int64_t targets)
{
    return hwy::TargetName(targets & -targets);
}

// Reads memory that no cache can hold beside it; returns something of it, so that it is not
// optimised away.
uint64_t read_all(const Arena &arena)
{
    constexpr size_t kLine = 64;
    uint64_t sum = 0;
    for (size_t i = 0; i < arena.size(); i += kLine) {
        uint64_t value;
        std::memcpy(&value, arena.data() + i, sizeof(value));
        sum += value;
    }
    return sum;
}

} // namespace

std::vector<std::string> simd_names()
{
    std::vector<std::string> names;
    for (const SimdName &simd : kSimd) {
        names.emplace_back(simd.name);
    }
    return names;
}

struct HostBench::State {
    const CodecOptions &options;
    std::vector<std::string> caches;
    Arena flush;
    Arena chunks;
    Arena restored;
    volatile uint64_t sink = 0;

    explicit State(const CodecOptions &o)
        : options(o), caches(o.caches.empty() ? std::vector<std::string>{"cold", "warm"} : o.caches)
    {
        if (wants(caches, "cold")) {
            flush.resize(kFlushBytes);
            // Pages that are never written are one page of zeros, which stays in the cache.
            std::memset(flush.data(), 1, flush.size());
        }
    }

    std::vector<Piece> cut(const CodecData &data, uint64_t chunk, const HostCodec &codec)
    {
        const uint64_t length = chunk == 0 ? data.size : std::min(chunk, data.size);
        constexpr uint64_t kPage = 4096;
        std::vector<Piece> pieces;
        uint64_t room = 0;
        for (uint64_t at = 0; at < data.size; at += length) {
            const size_t size = static_cast<size_t>(std::min(length, data.size - at));
            const size_t bound = codec.bound(size);
            pieces.push_back({data.original + at, nullptr, nullptr, size, bound, 0});
            room += (bound + kPage - 1) / kPage * kPage;
        }
        if (chunks.size() < room) {
            chunks.resize(room);
        }
        if (restored.size() < data.size) {
            restored.resize(data.size);
        }
        uint64_t chunk_at = 0;
        uint64_t at = 0;
        for (Piece &piece : pieces) {
            piece.chunk = chunks.data() + chunk_at;
            piece.restored = restored.data() + at;
            chunk_at += (piece.room + kPage - 1) / kPage * kPage;
            at += piece.size;
        }
        return pieces;
    }

    std::vector<double> time(bool cold, const std::function<void()> &work)
    {
        const unsigned repeats = options.repeats != 0 ? options.repeats : kRepeats;
        std::vector<double> us;
        const double begin = now_s();
        work(); // brings pages, contexts and the dispatch into being
        while (us.size() < repeats && (us.size() < kFewest || now_s() - begin < kPointSeconds)) {
            check_interrupted();
            if (cold) {
                sink = sink + read_all(flush);
            }
            const double start = now_s();
            work();
            us.push_back((now_s() - start) * 1e6);
        }
        return us;
    }

    // What any codec could reach at most, on the same threads: stored chunks are copied.
    void measure_copy(const CodecData &data, uint64_t chunk, std::vector<BenchRow> &rows)
    {
        ZipCodec codec({ZIP_DTYPE_BYTES, ZIP_SHAPE_DEFAULT, 0});
        std::vector<Piece> pieces = cut(data, chunk, codec);
        codec.encode(pieces, options.threads);
        for (const std::string &cache : caches) {
            BenchRow row = start_row(data, "host", "copy", "copy");
            row.chunk = chunk;
            row.threads = options.threads;
            row.cache = cache;
            std::memset(restored.data(), kPoison, data.size);
            set_times(row, time(cache == "cold", [&] { codec.decode(pieces, options.threads); }),
                      data.size);
            if (std::memcmp(restored.data(), data.original, data.size) != 0) {
                throw_mismatch(row);
            }
            row.verified = true;
            rows.push_back(row);
        }
    }

    void measure(const CodecData &data, HostCodec &codec, uint64_t chunk, BenchRow base,
                 std::vector<BenchRow> &rows)
    {
        std::vector<Piece> pieces = cut(data, chunk, codec);
        base.chunk = chunk;
        base.threads = options.threads;
        for (const std::string &cache : caches) {
            base.cache = cache;
            BenchRow encode = base;
            encode.op = "encode";
            const std::vector<double> encode_us =
                    time(cache == "cold", [&] { codec.encode(pieces, options.threads); });
            set_times(encode, encode_us, data.size);

            std::memset(restored.data(), kPoison, data.size);
            BenchRow decode = base;
            decode.op = "decode";
            const std::vector<double> decode_us =
                    time(cache == "cold", [&] { codec.decode(pieces, options.threads); });
            set_times(decode, decode_us, data.size);

            uint64_t encoded = 0;
            for (const Piece &piece : pieces) {
                encoded += piece.encoded;
            }
            encode.ratio = decode.ratio =
                    static_cast<double>(encoded) / static_cast<double>(data.size);
            if (std::memcmp(restored.data(), data.original, data.size) != 0) {
                throw_mismatch(decode);
            }
            encode.verified = decode.verified = true;
            if (base.shape == "auto") {
                zip_chunk_info_t info{};
                zip_codec_inspect(pieces[0].chunk, pieces[0].encoded, &info);
                encode.picked = decode.picked = coding_text(info.coding.dtype, info.coding.shape);
            }
            for (const BenchRow *row : {&encode, &decode}) {
                if (wants(options.ops, row->op.c_str())) {
                    rows.push_back(*row);
                }
            }
        }
    }
};

HostBench::HostBench(const CodecOptions &options) : state_(std::make_unique<State>(options))
{
    bool any = false;
    for (const std::string &name : options.simd) {
        if (usable_targets(name) == 0) {
            std::fprintf(stderr, "note: no %s in this processor or build; left out\n",
                         name.c_str());
        } else {
            any = true;
        }
    }
    if (!any) {
        throw Error("none of the instruction sets of --simd can be used here");
    }
#ifndef HAVE_ZSTD
    if (options.zstd) {
        std::fprintf(stderr, "note: built without zstd (libzstd-dev); its rows are left out\n");
    }
#endif
}

HostBench::~HostBench() = default;

void HostBench::measure(const CodecData &data, std::vector<BenchRow> &rows)
{
    const CodecOptions &options = state_->options;
    for (const std::string &chunk_text : options.chunks) {
        const uint64_t chunk = parse_size(chunk_text);
        if (wants(options.ops, "copy")) {
            state_->measure_copy(data, chunk, rows);
        }
        for (const std::string &shape : options.shapes) {
            for (const std::string &tiles : options.tiles) {
                if (!can_be_coded(coding_of(data.dtype, shape, tiles))) {
                    continue;
                }
                for (const std::string &simd : options.simd) {
                    const int64_t targets = usable_targets(simd);
                    if (targets == 0) {
                        continue;
                    }
                    const SimdLimit limit(targets);
                    ZipCodec codec(coding_of(data.dtype, shape, tiles));
                    BenchRow row = start_row(data, "host", "", codec.name());
                    row.shape = shape;
                    row.tiles = tiles;
                    row.simd = best_target_name(targets);
                    state_->measure(data, codec, chunk, row, rows);
                }
            }
        }
#ifdef HAVE_ZSTD
        for (const int level : options.zstd ? options.zstd_levels : std::vector<int>()) {
            ZstdCodec codec(level);
            state_->measure(data, codec, chunk, start_row(data, "host", "", codec.name()), rows);
        }
#endif
    }
}

} // namespace tools
