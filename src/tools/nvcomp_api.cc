// SPDX-License-Identifier: BSD-3-Clause
// NVIDIA's nvCOMP 6, opened at run time.
#include "tools/nvcomp_api.h"

#include "tools/error.h"

#include <dlfcn.h>
#include <type_traits>

namespace tools {

namespace {

// nvcompType_t
enum class Type : int32_t {
    kBytes = 1,
    kE4m3 = 9,
    kFloat16 = 10,
    kFloat32 = 11,
    kFloat64 = 12,
};

// The interleaving that ANS takes by itself. Decompression is faster when it is told so.
constexpr uint8_t kAnsStates = 2;

// Options are passed by value and have 64 bytes; what is not named here is zero.
struct AnsCompressOptions {
    int32_t algorithm = 0; // rANS
    Type type = Type::kBytes;
    uint8_t sub_chunks = 0; // 0: its default
    uint8_t states = kAnsStates;
    uint8_t histogram_reduction = 0; // 0: counts every value
    uint8_t reserved[53] = {};
};
struct AnsDecompressOptions {
    int32_t backend = 0; // it chooses
    Type type = Type::kBytes;
    uint8_t sub_chunks = 0;
    uint8_t states = kAnsStates;
    uint8_t skip_validation = 0;
    uint8_t reserved[53] = {};
};
struct BitcompCompressOptions {
    int32_t algorithm = 0; // its default, for data that are not sparse
    Type type = Type::kBytes;
    double delta = 0;
    int32_t mode = 0; // lossless
    uint8_t reserved[44] = {};
};
struct BitcompDecompressOptions {
    int32_t backend = 0;
    uint8_t reserved[60] = {};
};
static_assert(sizeof(AnsCompressOptions) == 64 && sizeof(AnsDecompressOptions) == 64);
static_assert(sizeof(BitcompCompressOptions) == 64 && sizeof(BitcompDecompressOptions) == 64);

struct Properties {
    uint32_t version;
    uint32_t cudart_version;
};

template <typename F>
F resolve(void *library, const std::string &name)
{
    void *symbol = dlsym(library, name.c_str());
    if (symbol == nullptr) {
        throw Error("the nvCOMP library has no " + name + "; version 6 is needed");
    }
    return reinterpret_cast<F>(symbol);
}

void check(int status, const char *what)
{
    if (status != 0) {
        throw Error(std::string("nvCOMP: ") + what + " failed with status " +
                    std::to_string(status));
    }
}

// Both codecs have the same calls, with other names and option types.
template <typename Compress, typename Decompress>
class Codec : public NvcompCodec {
public:
    Codec(void *library, const std::string &prefix, const char *name, Compress compress,
          Decompress decompress)
        : name_(name), compress_options_(compress), decompress_options_(decompress),
          bound_(resolve<Bound>(library, prefix + "CompressGetMaxOutputChunkSize")),
          compress_temporary_(
                  resolve<Temporary<Compress>>(library, prefix + "CompressGetTempSize")),
          decompress_temporary_(
                  resolve<Temporary<Decompress>>(library, prefix + "DecompressGetTempSize")),
          compress_(resolve<CompressCall>(library, prefix + "CompressAsync")),
          decompress_(resolve<DecompressCall>(library, prefix + "DecompressAsync"))
    {
    }

    const char *name() const override { return name_; }

    size_t bound(size_t chunk) const override
    {
        size_t size = 0;
        check(bound_(chunk, compress_options_, &size), "the bound of a chunk");
        return size;
    }

    size_t compress_temporary(const NvcompBatch &b, cuda::StreamHandle stream) const override
    {
        size_t size = 0;
        check(compress_temporary_(b.count, b.chunk, compress_options_, &size, b.total, stream),
              "the temporary size of a compression");
        return size;
    }

    size_t decompress_temporary(const NvcompBatch &b, cuda::StreamHandle stream) const override
    {
        size_t size = 0;
        check(decompress_temporary_(b.count, b.chunk, decompress_options_, &size, b.total, stream),
              "the temporary size of a decompression");
        return size;
    }

    void compress(const NvcompBatch &b, cuda::StreamHandle stream) const override
    {
        check(compress_(b.originals, b.original_sizes, b.chunk, b.count, b.temporary,
                        b.temporary_size, b.compressed, b.compressed_sizes, compress_options_,
                        b.statuses, stream),
              "a compression");
    }

    void decompress(const NvcompBatch &b, cuda::StreamHandle stream) const override
    {
        check(decompress_(b.compressed, b.compressed_sizes, b.original_sizes, b.restored_sizes,
                          b.count, b.temporary, b.temporary_size, b.restored, decompress_options_,
                          b.statuses, stream),
              "a decompression");
    }

private:
    // Pointers to device memory are declared as addresses: on the host nobody follows them.
    using Bound = int (*)(size_t chunk, Compress options, size_t *size);
    template <typename Options>
    using Temporary = int (*)(size_t count, size_t chunk, Options options, size_t *size,
                              size_t total, cuda::StreamHandle stream);
    using CompressCall = int (*)(cuda::Address originals, cuda::Address original_sizes,
                                 size_t chunk, size_t count, cuda::Address temporary,
                                 size_t temporary_size, cuda::Address compressed,
                                 cuda::Address compressed_sizes, Compress options,
                                 cuda::Address statuses, cuda::StreamHandle stream);
    using DecompressCall = int (*)(cuda::Address compressed, cuda::Address compressed_sizes,
                                   cuda::Address room, cuda::Address restored_sizes, size_t count,
                                   cuda::Address temporary, size_t temporary_size,
                                   cuda::Address restored, Decompress options,
                                   cuda::Address statuses, cuda::StreamHandle stream);

    const char *name_;
    Compress compress_options_;
    Decompress decompress_options_;
    Bound bound_;
    Temporary<Compress> compress_temporary_;
    Temporary<Decompress> decompress_temporary_;
    CompressCall compress_;
    DecompressCall decompress_;
};

} // namespace

Nvcomp::Nvcomp(const std::string &path) : library_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL))
{
    if (library_ == nullptr) {
        throw Error(std::string("cannot open nvCOMP: ") + dlerror());
    }
    Properties properties{};
    check(resolve<int (*)(Properties *)>(library_, "nvcompGetProperties")(&properties),
          "the version");
    // MAJOR * 1000 + MINOR * 100 + PATCH; layouts of options hold for one major version.
    constexpr uint32_t kMajor = 1000, kKnown = 6;
    version_ = std::to_string(properties.version / kMajor) + "." +
               std::to_string(properties.version % kMajor / 100);
    if (properties.version / kMajor != kKnown) {
        throw Error(path + " is nvCOMP " + version_ + "; version 6 is needed");
    }
}

std::vector<std::unique_ptr<NvcompCodec>> Nvcomp::codecs(std::string_view dtype) const
{
    Type ans = Type::kBytes;
    Type bitcomp = Type::kBytes;
    if (dtype == "bf16" || dtype == "fp16") {
        ans = bitcomp = Type::kFloat16; // of both: "all half-precision data formats"
    } else if (dtype == "fp32") {
        ans = bitcomp = Type::kFloat32;
    } else if (dtype == "fp64") {
        bitcomp = Type::kFloat64;
    } else if (dtype == "e4m3") {
        ans = Type::kE4m3;
    }
    std::vector<std::unique_ptr<NvcompCodec>> codecs;
    codecs.push_back(std::make_unique<Codec<AnsCompressOptions, AnsDecompressOptions>>(
            library_, "nvcompBatchedANS", "nvcomp-ans", AnsCompressOptions{.type = ans},
            AnsDecompressOptions{.type = ans}));
    codecs.push_back(std::make_unique<Codec<BitcompCompressOptions, BitcompDecompressOptions>>(
            library_, "nvcompBatchedBitcomp", "nvcomp-bitcomp",
            BitcompCompressOptions{.type = bitcomp}, BitcompDecompressOptions{}));
    return codecs;
}

} // namespace tools
