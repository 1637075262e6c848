// SPDX-License-Identifier: BSD-3-Clause
// Inputs for the fuzzers to begin with, made of the conformance vectors and of messages that are
// right.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "fuzz/targets.h"
#include "kernels/codec.h"
#include "kernels/format.h"
#include "uct/zip/zip_wire.h"

namespace zip::fuzz {
namespace {

namespace fs = std::filesystem;
using Bytes = std::vector<uint8_t>;

constexpr uintmax_t MAX_SEED = 20000; // bytes: longer inputs make a fuzzer slow

// The seed's file has `control` in front of `body`.
void write(const fs::path &file, Bytes control, const Bytes &body)
{
    control.resize(CONTROL_BYTES);
    control.insert(control.end(), body.begin(), body.end());
    std::ofstream out(file, std::ios::binary);
    out.write(reinterpret_cast<const char *>(control.data()), std::streamsize(control.size()));
    if (!out.flush()) {
        fprintf(stderr, "make_seeds: cannot write %s\n", file.c_str());
        exit(1);
    }
}

void chunks(const fs::path &vectors, const fs::path &out)
{
    for (const auto &entry : fs::recursive_directory_iterator(vectors)) {
        if (entry.path().extension() != ".chunk" || entry.file_size() > MAX_SEED)
            continue;
        const std::string name = entry.path().stem();
        std::ifstream in(entry.path(), std::ios::binary);
        const Bytes chunk{std::istreambuf_iterator<char>(in), {}};
        write(out / "decode" / name, {}, chunk);
        zip_chunk_info_t info;
        if (zip_codec_inspect(chunk.data(), chunk.size(), &info) != ZIP_OK)
            continue;
        Bytes original(info.original_length);
        if (zip_codec_decode(chunk.data(), chunk.size(), original.data(), original.size()) ==
            ZIP_OK)
            write(out / "round_trip" / name,
                  {uint8_t(info.coding.dtype), uint8_t(info.coding.shape),
                   uint8_t(info.coding.small_tiles)},
                  original);
    }
}

template <class Head>
Bytes message(const Head &head, size_t more = 0)
{
    const auto *const bytes = reinterpret_cast<const uint8_t *>(&head);
    Bytes all(bytes, bytes + sizeof(head));
    all.insert(all.end(), more, 7);
    return all;
}

// `kind` is the number of the message in fuzz_wire.cc.
void messages(const fs::path &out)
{
    constexpr uint8_t LOWER = 9; // bytes of a key or address of a transport below
    const auto seed = [&](const char *name, uint8_t kind, const Bytes &body) {
        write(out / "wire" / name, {kind, LOWER}, body);
    };
    wire::Request request{};
    request.wanted = 8;
    seed("request", 0, message(request));
    wire::Grant grant{};
    grant.slot_size = 16384;
    grant.slot_count = 64;
    grant.count = 3;
    grant.rkey_length = LOWER;
    seed("grant", 1, message(grant, 3 * sizeof(uint32_t) + LOWER));
    wire::Ack ack{};
    ack.count = 5;
    seed("ack", 2, message(ack, 5 * sizeof(uint32_t)));
    wire::Segment segment{};
    segment.length = 1000;
    segment.encoded_length = 700;
    seed("segment", 3, message(segment));
    segment.slot = wire::Segment::INLINE;
    segment.length = segment.encoded_length = 20;
    seed("inline", 3, message(segment, 20));
    wire::Get get{};
    get.length = 1;
    seed("get", 4, message(get));
    wire::EpAddress ep{};
    ep.lower_length = LOWER;
    seed("ep-address", 5, message(ep, LOWER));
    wire::Rkey rkey{};
    rkey.lower_length = LOWER;
    seed("rkey", 6, message(rkey, LOWER));
    const wire::IfaceAddress iface = {{}, wire::transport_id("tcp"), 0, LOWER};
    seed("iface-address", 7, message(iface, LOWER));
    const uint64_t region[4] = {0x1000, 16, 0x1000, 4096};
    seed("region", 8, message(region));
}

} // namespace
} // namespace zip::fuzz

int main(int argc, char **argv)
{
    if (argc != 3) {
        fprintf(stderr, "usage: make_seeds VECTORS OUT\nWrites inputs for each fuzzer to a folder "
                        "of its own in OUT.\n");
        return 2;
    }
    const std::filesystem::path out = argv[2];
    for (const char *target : {"decode", "round_trip", "wire"})
        std::filesystem::create_directories(out / target);
    zip::fuzz::chunks(argv[1], out);
    zip::fuzz::messages(out);
    return 0;
}
