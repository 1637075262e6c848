// SPDX-License-Identifier: BSD-3-Clause
// `zipperf codec` on a GPU: our codec, nvCOMP beside it, and a copy of the same bytes.
//
// Every point is taken in one way. Before each run the destination is filled with something else,
// and 256 MiB of other memory are read through L2: that evicts everything and leaves no dirty line
// whose write-back the run would pay for. Two events around the one call take the time, and a clock
// the host's part of it. After each run the result is compared on the GPU.
#include "tools/codec_bench_parts.h"

#include "kernels/codec_gpu.h"
#include "kernels/format.h"
#include "tools/clock.h"
#include "tools/cuda_driver.h"
#include "tools/error.h"
#include "tools/host_memory.h"
#include "tools/interrupt.h"
#include "tools/nvcomp_api.h"
#include "tools/stats.h"
#include "tools/table.h"
#include "tools/units.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <optional>

namespace tools {

namespace {

namespace wire = zip::format;
using cuda::Address;
using cuda::Buffer;
using cuda::Memory;

constexpr unsigned kWarmUps = 4;
constexpr unsigned kRepeats = 20;
constexpr unsigned kThreads = 256; // of a block of the kernels below
constexpr unsigned kBlocks = 1024; // some on every multiprocessor
constexpr uint64_t kAlign = 256;   // of every buffer, as the driver allocates
constexpr uint64_t kLine = 128;    // of the GPU's caches
// Longest buffer whose chunks are also decoded on the host.
constexpr uint64_t kHostCheck = 64 << 20;

// zip_bench_read: reads `count` times 16 bytes at `from`, and writes one word to `sink` if their
// sum is a number that it never is. zip_bench_compare: adds to `*differing` how many of `count`
// bytes differ. Both take the thread's share in strides of the whole grid.
constexpr const char *kPtx = R"(
.version 7.0
.target sm_70
.address_size 64

.visible .entry zip_bench_read(.param .u64 from, .param .u64 count, .param .u64 sink)
{
    .reg .pred %p;
    .reg .b32 %r<12>;
    .reg .b64 %d<8>;
    ld.param.u64 %d0, [from];
    ld.param.u64 %d1, [count];
    ld.param.u64 %d2, [sink];
    mov.u32 %r0, %ctaid.x;
    mov.u32 %r1, %ntid.x;
    mov.u32 %r2, %tid.x;
    mov.u32 %r3, %nctaid.x;
    mad.lo.u32 %r4, %r0, %r1, %r2;
    mul.lo.u32 %r5, %r3, %r1;
    cvt.u64.u32 %d3, %r4;
    cvt.u64.u32 %d4, %r5;
    mov.u32 %r6, 0;
read:
    setp.ge.u64 %p, %d3, %d1;
    @%p bra read_done;
    shl.b64 %d5, %d3, 4;
    add.u64 %d5, %d5, %d0;
    ld.global.v4.u32 {%r7, %r8, %r9, %r10}, [%d5];
    xor.b32 %r7, %r7, %r8;
    xor.b32 %r9, %r9, %r10;
    xor.b32 %r7, %r7, %r9;
    xor.b32 %r6, %r6, %r7;
    add.u64 %d3, %d3, %d4;
    bra read;
read_done:
    setp.ne.u32 %p, %r6, 0x12345678;
    @%p bra read_end;
    st.global.u32 [%d2], %r6;
read_end:
    ret;
}

.visible .entry zip_bench_compare(.param .u64 a, .param .u64 b, .param .u64 count, .param .u64 differing)
{
    .reg .pred %p;
    .reg .b32 %r<10>;
    .reg .b64 %d<12>;
    ld.param.u64 %d0, [a];
    ld.param.u64 %d1, [b];
    ld.param.u64 %d2, [count];
    ld.param.u64 %d3, [differing];
    mov.u32 %r0, %ctaid.x;
    mov.u32 %r1, %ntid.x;
    mov.u32 %r2, %tid.x;
    mov.u32 %r3, %nctaid.x;
    mad.lo.u32 %r4, %r0, %r1, %r2;
    mul.lo.u32 %r5, %r3, %r1;
    cvt.u64.u32 %d4, %r4;
    cvt.u64.u32 %d5, %r5;
    mov.u64 %d6, 0;
compare:
    setp.ge.u64 %p, %d4, %d2;
    @%p bra compare_done;
    add.u64 %d7, %d0, %d4;
    add.u64 %d8, %d1, %d4;
    ld.global.u8 %r6, [%d7];
    ld.global.u8 %r7, [%d8];
    add.u64 %d4, %d4, %d5;
    setp.eq.u32 %p, %r6, %r7;
    @%p bra compare;
    add.u64 %d6, %d6, 1;
    bra compare;
compare_done:
    setp.eq.u64 %p, %d6, 0;
    @%p bra compare_end;
    red.global.add.u64 [%d3], %d6;
compare_end:
    ret;
}
)";

uint64_t round_up(uint64_t value, uint64_t multiple)
{
    return (value + multiple - 1) / multiple * multiple;
}

// Our codec on a GPU, opened in the current context.
class GpuCodec {
public:
    explicit GpuCodec(const std::string &name)
    {
        const char *reason = nullptr;
        api_ = zip_gpu_load(name.c_str(), &reason);
        if (api_ == nullptr) {
            throw Error("no GPU codec '" + name + "': " + (reason != nullptr ? reason : "unknown"));
        }
        if (api_->version != ZIP_GPU_API_VERSION) {
            throw Error("the GPU codec '" + name + "' is of another version than zipperf");
        }
        check(api_->open(nullptr, &gpu_), "open");
    }
    ~GpuCodec() { api_->close(gpu_); }
    GpuCodec(const GpuCodec &) = delete;
    GpuCodec &operator=(const GpuCodec &) = delete;

    const zip_gpu_api_t &api() const { return *api_; }
    zip_gpu_t *gpu() const { return gpu_; }

    void check(zip_status_t status, const char *op) const
    {
        if (status != ZIP_OK) {
            throw Error(std::string("the GPU codec cannot ") + op + ": " +
                        zip_status_string(status) + ": " + api_->error_text());
        }
    }

private:
    const zip_gpu_api_t *api_;
    zip_gpu_t *gpu_ = nullptr;
};

class GpuQueue {
public:
    GpuQueue(const GpuCodec &codec, const cuda::Stream &stream, uint32_t items, uint32_t chunks)
        : codec_(codec)
    {
        const zip_gpu_queue_params_t params = {stream.handle(), items, chunks, 1};
        codec_.check(codec_.api().queue_create(codec_.gpu(), &params, &queue_), "make a queue");
    }
    ~GpuQueue() { codec_.api().queue_destroy(queue_); }
    GpuQueue(const GpuQueue &) = delete;
    GpuQueue &operator=(const GpuQueue &) = delete;

    zip_gpu_queue_t *get() const { return queue_; }

private:
    const GpuCodec &codec_;
    zip_gpu_queue_t *queue_ = nullptr;
};

// What the options vary for one launch of our codec.
struct ZipPoint {
    uint64_t chunk; // 0: one
    std::string shape;
    std::string tiles;
    unsigned max_sms;
    std::string cache;
};

// `count` buffers of `size` bytes in one block of memory, each `misalign` bytes behind an aligned
// address.
class Buffers {
public:
    Buffers(uint64_t size, uint64_t count, uint64_t misalign)
        : size_(size), count_(count), misalign_(misalign),
          stride_(round_up(size + misalign, kAlign)), memory_(Memory::kDevice, stride_ * count)
    {
    }

    Address at(uint64_t i) const { return memory_.address() + i * stride_ + misalign_; }
    uint64_t size() const { return size_; }
    uint64_t count() const { return count_; }
    uint64_t bytes() const { return size_ * count_; }

private:
    uint64_t size_, count_, misalign_, stride_;
    Buffer memory_;
};

// Sum of two values, rounded once, as zip_gpu_op_t says. Exact in a float but for its own rounding:
// where that matters the smaller one is less than half of the result's last place, and far from a
// tie.
void add_values(std::string_view dtype, const std::byte *a, const std::byte *b, std::byte *sum,
                uint64_t size)
{
    const auto each = [&]<typename T>(T, auto widen, auto narrow) {
        for (uint64_t i = 0; i + sizeof(T) <= size; i += sizeof(T)) {
            T x, y;
            std::memcpy(&x, a + i, sizeof(T));
            std::memcpy(&y, b + i, sizeof(T));
            const T z = narrow(widen(x) + widen(y));
            std::memcpy(sum + i, &z, sizeof(T));
        }
    };
    const auto same = [](float value) { return value; };
    if (dtype == "bf16") {
        each(uint16_t{}, fp32_from_bf16, bf16_from_fp32);
    } else if (dtype == "fp16") {
        each(uint16_t{}, fp32_from_fp16, fp16_from_fp32);
    } else {
        each(float{}, same, same);
    }
}

bool can_add(const CodecData &data)
{
    const std::string &dtype = data.pool.dtype;
    return data.finite && (dtype == "bf16" || dtype == "fp16" || dtype == "fp32") &&
           data.size % value_bytes(dtype) == 0;
}

// Microseconds of the runs of a point: on the GPU, and of the host in the call that launches it.
struct Times {
    std::vector<double> us, host_us;
};

} // namespace

struct GpuBench::State {
    const CodecOptions &options;
    cuda::Context context;
    GpuCodec codec;
    cuda::Stream stream;
    cuda::Module module;
    cuda::KernelHandle read_kernel;
    cuda::KernelHandle compare_kernel;
    Buffer flush;
    Buffer word; // result of a kernel
    cuda::Event start, stop;
    std::optional<Nvcomp> nvcomp;
    std::vector<std::string> caches;
    uint16_t sequence = 0;

    explicit State(const CodecOptions &o)
        : options(o), context(o.device), codec(o.gpu_codec), module(kPtx),
          read_kernel(module.kernel("zip_bench_read")),
          compare_kernel(module.kernel("zip_bench_compare")), flush(Memory::kDevice, kFlushBytes),
          word(Memory::kDevice, sizeof(uint64_t)),
          caches(o.caches.empty() ? std::vector<std::string>{"cold"} : o.caches)
    {
        // Not zeros: memory that a device compresses by itself would be read faster.
        stream.set_bytes(flush.address(), 1, flush.size());
        stream.synchronize();
        if (options.nvcomp.empty()) {
            std::fprintf(stderr, "note: no nvCOMP (--nvcomp or ZIP_NVCOMP_LIB names its "
                                 "libnvcomp.so.6); its rows are left out\n");
        } else {
            nvcomp.emplace(options.nvcomp);
        }
    }

    // Runs of `work`; `before` and `after` each run are not counted.
    Times time(bool cold, const std::function<void()> &before, const std::function<void()> &work,
               const std::function<void()> &after)
    {
        const unsigned repeats = options.repeats != 0 ? options.repeats : kRepeats;
        Times times;
        for (unsigned i = 0; i < kWarmUps + repeats; ++i) {
            check_interrupted();
            before();
            if (cold) {
                // A call that finds the driver's queue full waits: a batch's fill is a call a
                // buffer.
                stream.synchronize();
                cuda::launch(read_kernel, kBlocks, kThreads, stream,
                             {flush.address(), flush.size() / 16, word.address()});
            }
            start.record(stream);
            const double begin = now_s();
            work();
            const double end = now_s();
            stop.record(stream);
            stop.synchronize();
            if (i >= kWarmUps) {
                times.us.push_back(stop.since(start));
                times.host_us.push_back((end - begin) * 1e6);
            }
            after();
        }
        return times;
    }

    bool equal(Address a, Address b, uint64_t size)
    {
        stream.set_bytes(word.address(), 0, word.size());
        cuda::launch(compare_kernel, kBlocks, kThreads, stream, {a, b, size, word.address()});
        stream.synchronize();
        uint64_t differing = 0;
        cuda::download(&differing, word.address(), sizeof(differing));
        return differing == 0;
    }

    void poison(const Buffers &buffers)
    {
        for (uint64_t i = 0; i < buffers.count(); ++i) {
            stream.set_bytes(buffers.at(i), kPoison, buffers.size());
        }
    }

    void expect_equal(const Buffers &got, const Buffers &wanted, const BenchRow &row)
    {
        for (uint64_t i = 0; i < got.count(); ++i) {
            if (!equal(got.at(i), wanted.at(i), got.size())) {
                throw_mismatch(row);
            }
        }
    }

    BenchRow gpu_row(const CodecData &data, const char *op, const std::string &name,
                     const std::string &cache)
    {
        BenchRow row = start_row(data, "gpu", op, name);
        row.cache = cache;
        if (options.misalign != 0) {
            row.misalign = options.misalign;
        }
        if (options.batch > 1) {
            row.batch = options.batch;
        }
        return row;
    }

    // `traffic`: bytes read and written for each byte of original data.
    static void finish(BenchRow &row, const Times &times, uint64_t bytes, double traffic)
    {
        set_times(row, times.us, bytes);
        row.host_us_median = summarize(times.host_us).median;
        row.memory_gbps = *row.gbps_median * traffic;
        row.verified = true; // every run was compared, or this line is not reached
    }

    void measure_copy(const CodecData &data, const Buffers &originals, const Buffers &restored,
                      std::vector<BenchRow> &rows)
    {
        for (const std::string &cache : caches) {
            BenchRow row = gpu_row(data, "copy", "copy", cache);
            const Times times = time(
                    cache == "cold", [&] { poison(restored); },
                    [&] {
                        for (uint64_t i = 0; i < originals.count(); ++i) {
                            stream.copy(restored.at(i), originals.at(i), originals.size());
                        }
                    },
                    [&] { expect_equal(restored, originals, row); });
            finish(row, times, originals.bytes(), 2.0);
            rows.push_back(row);
        }
    }

    // The guess of each buffer's type; the first one's is compared with the host's of the same
    // bytes. `ratio` is the one that it expects.
    void measure_probe(const CodecData &data, const Buffers &originals, std::vector<BenchRow> &rows)
    {
        zip_probe_t expected{};
        codec.check(zip_codec_probe(data.original, static_cast<size_t>(data.size), &expected),
                    "probe on the host");
        const auto count = static_cast<uint32_t>(originals.count());
        const GpuQueue queue(codec, stream, count, 1);
        const Buffer results(Memory::kDevice, count * sizeof(zip_probe_t));
        std::vector<zip_gpu_item_t> items(count);
        for (uint32_t i = 0; i < count; ++i) {
            items[i].data = reinterpret_cast<void *>(originals.at(i));
            items[i].data_size = originals.size();
        }
        for (const std::string &cache : caches) {
            BenchRow row = gpu_row(data, "probe", "zip", cache);
            const Times times = time(
                    cache == "cold",
                    [&] { stream.set_bytes(results.address(), kPoison, results.size()); },
                    [&] {
                        codec.check(codec.api().probe(queue.get(), items.data(), count,
                                                      results.pointer<zip_probe_t>()),
                                    "probe");
                    },
                    [&] {
                        zip_probe_t found{};
                        cuda::download(&found, results.address(), sizeof(found));
                        if (found.dtype != expected.dtype || found.shape != expected.shape ||
                            found.ratio != expected.ratio) {
                            throw Error("a probe of " + format_size(data.size) + " found " +
                                                coding_text(found.dtype, found.shape) +
                                                " on the GPU, but " +
                                                coding_text(expected.dtype, expected.shape) +
                                                " or another ratio on the host",
                                        kExitMismatch);
                        }
                    });
            row.picked = coding_text(expected.dtype, expected.shape);
            row.ratio = static_cast<double>(expected.ratio);
            set_times(row, times.us, originals.bytes());
            row.host_us_median = summarize(times.host_us).median;
            row.verified = true;
            rows.push_back(row);
        }
    }

    void measure_zip(const CodecData &data, const ZipPoint &point, const Buffers &originals,
                     const Buffers &restored, const Buffers *addends, const Buffers *sums,
                     std::vector<BenchRow> &rows);
    void measure_nvcomp(const CodecData &data, const NvcompCodec &peer, uint64_t chunk,
                        const std::string &cache, const Buffers &originals, const Buffers &restored,
                        std::vector<BenchRow> &rows);
};

namespace {

// Where the chunks of one launch are, and what their headers and progress words say.
class ZipChunks {
public:
    ZipChunks(const CodecOptions &options, zip_coding_t coding, uint64_t chunk,
              const Buffers &originals)
        : size_(originals.size()), count_(originals.count()),
          length_(chunk == 0 ? originals.size() : std::min(chunk, originals.size())),
          pieces_((size_ + length_ - 1) / length_)
    {
        zip_plan_t plan{};
        if (zip_codec_plan(coding, length_, &plan) != ZIP_OK) {
            throw Error("the codec cannot plan chunks of " + format_size(length_));
        }
        // where the encoder is fastest
        static_assert((ZIP_GPU_CHUNK_PHASE + wire::HEADER_LENGTH) % kLine == 0);
        stride_ = round_up(plan.bound, kLine);
        memory_.emplace(options.chunks_in == "host" ? Memory::kPinnedHost : Memory::kDevice,
                        ZIP_GPU_CHUNK_PHASE + stride_ * chunks());
        if (options.progress) {
            progress_.emplace(Memory::kPinnedHost, chunks() * sizeof(uint64_t));
        }
    }

    uint64_t chunks() const { return pieces_ * count_; }
    const Buffer &memory() const { return *memory_; }

    std::vector<zip_gpu_item_t> items(zip_coding_t coding, zip_gpu_op_t op,
                                      const Buffers &data) const
    {
        std::vector<zip_gpu_item_t> items(static_cast<size_t>(count_));
        for (uint64_t i = 0; i < count_; ++i) {
            zip_gpu_item_t &item = items[static_cast<size_t>(i)];
            item = {};
            item.coding = coding;
            item.op = op;
            item.data = reinterpret_cast<void *>(data.at(i));
            item.data_size = size_;
            item.chunks = memory_->pointer(at(i * pieces_));
            item.chunk_length = pieces_ == 1 ? 0 : length_;
            item.chunk_stride = stride_;
            if (progress_) {
                item.progress = progress_->pointer<uint64_t>(i * pieces_ * sizeof(uint64_t));
            }
        }
        return items;
    }

    // Before a launch: no word may be left that looks like its own.
    void clear_progress() const
    {
        if (progress_) {
            std::memset(progress_->pointer(), 0, static_cast<size_t>(progress_->size()));
        }
    }

    // After a launch that the host has waited for: all its words are there, and good.
    void check_progress(uint16_t sequence, const char *op) const
    {
        for (uint64_t i = 0; progress_ && i < chunks(); ++i) {
            const uint64_t word = progress_->pointer<uint64_t>()[i];
            if (ZIP_GPU_PROGRESS_SEQ(word) != sequence) {
                throw Error(format("%s left no progress word for chunk %llu of %llu", op,
                                   static_cast<unsigned long long>(i),
                                   static_cast<unsigned long long>(chunks())),
                            kExitMismatch);
            }
            if (std::strcmp(op, "encode") != 0 && ZIP_GPU_PROGRESS_STATUS(word) != ZIP_OK) {
                throw Error(format("%s refused chunk %llu: %s", op,
                                   static_cast<unsigned long long>(i),
                                   zip_status_string(ZIP_GPU_PROGRESS_STATUS(word))),
                            kExitMismatch);
            }
        }
    }

    struct Encoded {
        zip_coding_t coding;
        uint64_t bytes;
    };

    // Reads the headers of all chunks: their coding, which is one for all, and their bytes
    // together.
    Encoded read_headers() const
    {
        Encoded result{};
        for (uint64_t i = 0; i < chunks(); ++i) {
            wire::ChunkHeader header{};
            cuda::download(&header, memory_->address() + at(i), sizeof(header));
            const uint64_t length =
                    i % pieces_ + 1 == pieces_ ? size_ - (pieces_ - 1) * length_ : length_;
            if (header.magic != wire::MAGIC || header.original_length != length) {
                throw Error("encode left no chunk", kExitMismatch);
            }
            const wire::Coding coding = {header.dtype, header.shape,
                                         (header.flags & wire::FLAG_SMALL_TILES) != 0};
            const uint64_t fixed = header.shape == wire::SHAPE_STORED
                                           ? wire::HEADER_LENGTH + length
                                           : wire::layout_of(coding, length).tail;
            if (progress_) {
                const uint64_t word = progress_->pointer<uint64_t>()[i];
                if (ZIP_GPU_PROGRESS_TAIL(word) != header.tail_length ||
                    ZIP_GPU_PROGRESS_DTYPE(word) != header.dtype ||
                    ZIP_GPU_PROGRESS_SHAPE(word) != header.shape) {
                    throw Error("encode's progress word and the chunk's header differ",
                                kExitMismatch);
                }
            }
            result.bytes += fixed + header.tail_length;
            result.coding = {static_cast<zip_dtype_t>(header.dtype),
                             static_cast<zip_shape_t>(header.shape), coding.small_tiles};
        }
        return result;
    }

    // Whether the host codec decodes the chunks of the first buffer to `original`.
    bool host_decodes(const std::byte *original) const
    {
        std::vector<std::byte> encoded(static_cast<size_t>(stride_ * pieces_));
        std::vector<std::byte> restored(static_cast<size_t>(size_));
        cuda::download(encoded.data(), memory_->address() + at(0), encoded.size());
        for (uint64_t i = 0; i < pieces_; ++i) {
            const uint64_t done = i * length_;
            if (zip_codec_decode(encoded.data() + i * stride_, static_cast<size_t>(stride_),
                                 restored.data() + done,
                                 static_cast<size_t>(std::min(length_, size_ - done))) != ZIP_OK) {
                return false;
            }
        }
        return std::memcmp(restored.data(), original, restored.size()) == 0;
    }

private:
    // Where chunk i is in the memory.
    uint64_t at(uint64_t i) const { return ZIP_GPU_CHUNK_PHASE + i * stride_; }

    uint64_t size_, count_, length_, pieces_;
    uint64_t stride_ = 0;
    std::optional<Buffer> memory_;
    std::optional<Buffer> progress_;
};

} // namespace

void GpuBench::State::measure_zip(const CodecData &data, const ZipPoint &point,
                                  const Buffers &originals, const Buffers &restored,
                                  const Buffers *addends, const Buffers *sums,
                                  std::vector<BenchRow> &rows)
{
    zip_coding_t coding = coding_of(data.dtype, point.shape, point.tiles);
    const ZipChunks chunks(options, coding, point.chunk, originals);
    const GpuQueue queue(codec, stream, static_cast<uint32_t>(originals.count()),
                         static_cast<uint32_t>(chunks.chunks()));
    const bool cold = point.cache == "cold";

    BenchRow base = gpu_row(data, "", "zip", point.cache);
    base.chunk = point.chunk;
    base.shape = point.shape;
    base.tiles = point.tiles;
    base.chunks_in = options.chunks_in;
    base.progress = options.progress;
    if (point.max_sms != 0) {
        base.max_sms = point.max_sms;
    }
    const auto next = [&]() -> zip_gpu_launch_t {
        sequence = static_cast<uint16_t>(sequence % UINT16_MAX + 1); // never 0
        return {point.max_sms, sequence};
    };

    BenchRow encode = base;
    encode.op = "encode";
    std::vector<zip_gpu_item_t> items = chunks.items(coding, ZIP_GPU_STORE, originals);
    const Times encode_times = time(
            cold,
            [&] {
                chunks.clear_progress();
                stream.set_bytes(chunks.memory().address(), kPoison, chunks.memory().size());
            },
            [&] {
                codec.check(codec.api().encode(queue.get(), items.data(), items.size(), next()),
                            "encode");
            },
            [&] { chunks.check_progress(sequence, "encode"); });
    const ZipChunks::Encoded encoded = chunks.read_headers();
    const double ratio =
            static_cast<double>(encoded.bytes) / static_cast<double>(originals.bytes());
    if (data.size <= kHostCheck && !chunks.host_decodes(data.original)) {
        throw_mismatch(encode);
    }
    coding = encoded.coding;
    if (point.shape == "auto") {
        base.picked = encode.picked = coding_text(coding.dtype, coding.shape);
    }
    encode.ratio = ratio;

    BenchRow decode = base;
    decode.op = "decode";
    items = chunks.items(coding, ZIP_GPU_STORE, restored);
    const auto run_decode = [&] {
        codec.check(codec.api().decode(queue.get(), items.data(), items.size(), next()), "decode");
    };
    const Times decode_times = time(
            cold,
            [&] {
                chunks.clear_progress();
                poison(restored);
            },
            run_decode,
            [&] {
                chunks.check_progress(sequence, "decode");
                expect_equal(restored, originals, decode);
            });
    decode.ratio = ratio;
    // An encode is right once its chunks were decoded to the original.
    finish(encode, encode_times, originals.bytes(), 1.0 + ratio);
    finish(decode, decode_times, originals.bytes(), 1.0 + ratio);
    for (const BenchRow *row : {&encode, &decode}) {
        if (wants(options.ops, row->op.c_str())) {
            rows.push_back(*row);
        }
    }

    if (addends == nullptr || coding.dtype == ZIP_DTYPE_BYTES) {
        return;
    }
    BenchRow add = base;
    add.op = "add";
    items = chunks.items(coding, ZIP_GPU_ADD, restored);
    const Times add_times = time(
            cold,
            [&] {
                chunks.clear_progress();
                for (uint64_t i = 0; i < restored.count(); ++i) {
                    stream.copy(restored.at(i), addends->at(i), restored.size());
                }
            },
            run_decode,
            [&] {
                chunks.check_progress(sequence, "add");
                expect_equal(restored, *sums, add);
            });
    add.ratio = ratio;
    finish(add, add_times, originals.bytes(), 2.0 + ratio);
    rows.push_back(add);
}

void GpuBench::State::measure_nvcomp(const CodecData &data, const NvcompCodec &peer, uint64_t chunk,
                                     const std::string &cache, const Buffers &originals,
                                     const Buffers &restored, std::vector<BenchRow> &rows)
{
    const uint64_t length = std::min(chunk, data.size);
    const uint64_t pieces = (data.size + length - 1) / length;
    const size_t count = static_cast<size_t>(pieces * originals.count());
    const uint64_t stride = round_up(peer.bound(static_cast<size_t>(length)), kNvcompAlignment);
    const Buffer encoded(Memory::kDevice, stride * count);

    // The arrays of a batch, one behind the other.
    enum Array { kOriginals, kSizes, kEncoded, kEncodedSizes, kRestored, kRestoredSizes, kArrays };
    std::vector<uint64_t> entries(kArrays * count);
    for (uint64_t i = 0; i < originals.count(); ++i) {
        for (uint64_t j = 0; j < pieces; ++j) {
            const size_t at = static_cast<size_t>(i * pieces + j);
            entries[kOriginals * count + at] = originals.at(i) + j * length;
            entries[kSizes * count + at] = std::min(length, data.size - j * length);
            entries[kEncoded * count + at] = encoded.address() + at * stride;
            entries[kRestored * count + at] = restored.at(i) + j * length;
        }
    }
    const Buffer arrays(Memory::kDevice, entries.size() * sizeof(uint64_t));
    cuda::upload(arrays.address(), entries.data(), arrays.size());
    const Buffer statuses(Memory::kDevice, count * sizeof(int32_t));
    const auto array = [&](Array a) { return arrays.address() + a * count * sizeof(uint64_t); };

    NvcompBatch batch;
    batch.count = count;
    batch.chunk = static_cast<size_t>(length);
    batch.total = static_cast<size_t>(originals.bytes());
    batch.originals = array(kOriginals);
    batch.original_sizes = array(kSizes);
    batch.compressed = array(kEncoded);
    batch.compressed_sizes = array(kEncodedSizes);
    batch.restored = array(kRestored);
    batch.restored_sizes = array(kRestoredSizes);
    batch.statuses = statuses.address();
    batch.temporary_size = std::max(peer.compress_temporary(batch, stream.handle()),
                                    peer.decompress_temporary(batch, stream.handle()));
    const Buffer temporary(Memory::kDevice, batch.temporary_size);
    batch.temporary = temporary.address();

    const auto poison_statuses = [&] {
        stream.set_bytes(statuses.address(), kPoison, statuses.size());
    };
    const auto check_statuses = [&](const BenchRow &row) {
        std::vector<int32_t> values(count);
        cuda::download(values.data(), statuses.address(), statuses.size());
        for (const int32_t value : values) {
            if (value != 0) {
                throw Error(format("%s: %s of a chunk ended with status %d", row.codec.c_str(),
                                   row.op.c_str(), value));
            }
        }
    };

    BenchRow encode = gpu_row(data, "encode", peer.name(), cache);
    encode.chunk = chunk;
    const Times encode_times = time(
            cache == "cold",
            [&] {
                poison_statuses();
                stream.set_bytes(encoded.address(), kPoison, encoded.size());
            },
            [&] { peer.compress(batch, stream.handle()); }, [&] { check_statuses(encode); });
    std::vector<uint64_t> sizes(count);
    cuda::download(sizes.data(), batch.compressed_sizes, count * sizeof(uint64_t));
    uint64_t bytes = 0;
    for (const uint64_t size : sizes) {
        bytes += size;
    }
    const double ratio = static_cast<double>(bytes) / static_cast<double>(originals.bytes());

    BenchRow decode = gpu_row(data, "decode", peer.name(), cache);
    decode.chunk = chunk;
    const Times decode_times = time(
            cache == "cold",
            [&] {
                poison_statuses();
                poison(restored);
            },
            [&] { peer.decompress(batch, stream.handle()); },
            [&] {
                check_statuses(decode);
                expect_equal(restored, originals, decode);
            });
    encode.ratio = decode.ratio = ratio;
    finish(encode, encode_times, originals.bytes(), 1.0 + ratio);
    finish(decode, decode_times, originals.bytes(), 1.0 + ratio);
    for (const BenchRow *row : {&encode, &decode}) {
        if (wants(options.ops, row->op.c_str())) {
            rows.push_back(*row);
        }
    }
}

GpuBench::GpuBench(const CodecOptions &options) : state_(std::make_unique<State>(options)) {}

GpuBench::~GpuBench() = default;

std::string GpuBench::device() const
{
    return format("%s (%d multiprocessors)", state_->context.name().c_str(),
                  state_->context.multiprocessors()) +
           (state_->nvcomp ? ", nvCOMP " + state_->nvcomp->version() : "");
}

void GpuBench::measure(const CodecData &data, std::vector<BenchRow> &rows)
{
    State &s = *state_;
    const CodecOptions &options = s.options;
    const uint64_t count = options.batch;

    // Originals, results, chunks of ours or of a peer with its scratch, and for sums two more.
    const bool add = wants(options.ops, "add") && can_add(data);
    const uint64_t needed = data.size * count * (add ? 6 : 4);
    if (needed > s.context.free_memory()) {
        std::fprintf(stderr, "note: %llu x %s need about %s of GPU memory, %s are free; left out\n",
                     static_cast<unsigned long long>(count), format_size(data.size).c_str(),
                     format_size(needed).c_str(), format_size(s.context.free_memory()).c_str());
        return;
    }

    const Buffers originals(data.size, count, options.misalign);
    const Buffers restored(data.size, count, options.misalign);
    std::optional<Buffers> addends;
    std::optional<Buffers> sums;
    if (add) {
        addends.emplace(data.size, count, options.misalign);
        sums.emplace(data.size, count, options.misalign);
    }
    {
        Arena other(data.size);
        Arena sum(add ? data.size : 0);
        for (uint64_t i = 0; i < count; ++i) {
            // The first is the original that the host has too; the others begin elsewhere in the
            // pool.
            const std::byte *original = data.original;
            Arena more;
            if (i > 0) {
                more.resize(data.size);
                fill_from_pool(data.pool, 2 * i, more.data(), data.size);
                original = more.data();
            }
            cuda::upload(originals.at(i), original, data.size);
            if (add) {
                fill_from_pool(data.pool, 2 * i + 1, other.data(), data.size);
                add_values(data.pool.dtype, other.data(), original, sum.data(), data.size);
                cuda::upload(addends->at(i), other.data(), data.size);
                cuda::upload(sums->at(i), sum.data(), data.size);
            }
        }
    }

    if (wants(options.ops, "copy")) {
        s.measure_copy(data, originals, restored, rows);
    }
    if (wants(options.ops, "probe")) {
        s.measure_probe(data, originals, rows);
    }
    if (!wants(options.ops, "encode") && !wants(options.ops, "decode") && !add) {
        return;
    }
    for (const std::string &chunk : options.chunks) {
        for (const std::string &shape : options.shapes) {
            for (const std::string &tiles : options.tiles) {
                if (!can_be_coded(coding_of(data.dtype, shape, tiles))) {
                    continue;
                }
                for (const unsigned max_sms : options.max_sms) {
                    for (const std::string &cache : s.caches) {
                        s.measure_zip(data, {parse_size(chunk), shape, tiles, max_sms, cache},
                                      originals, restored, add ? &*addends : nullptr,
                                      add ? &*sums : nullptr, rows);
                    }
                }
            }
        }
    }
    if (!s.nvcomp || options.misalign % kNvcompAlignment != 0 ||
        data.size % value_bytes(data.pool.dtype) != 0) {
        return;
    }
    for (const std::unique_ptr<NvcompCodec> &peer : s.nvcomp->codecs(data.pool.dtype)) {
        for (const uint64_t chunk : parse_size_list(options.nvcomp_chunks)) {
            // Beyond the buffer's length every chunk size is the same one.
            if (chunk > data.size && chunk / 2 >= data.size) {
                continue;
            }
            for (const std::string &cache : s.caches) {
                // What a peer cannot do must not end the run.
                try {
                    s.measure_nvcomp(data, *peer, chunk, cache, originals, restored, rows);
                } catch (const Error &error) {
                    if (error.status() == kExitInterrupted) {
                        throw;
                    }
                    std::fprintf(stderr, "note: %s; this row is left out\n", error.what());
                }
            }
        }
    }
}

} // namespace tools
