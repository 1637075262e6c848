// SPDX-License-Identifier: BSD-3-Clause
#include "fuzz/seeds.h"

#include <fstream>
#include <iterator>

#include "fuzz/targets.h"
#include "kernels/codec.h"
#include "kernels/format.h"
#include "uct/zip/zip_wire.h"

namespace zip::fuzz {
namespace {

namespace fs = std::filesystem;

constexpr uintmax_t MAX_SEED = 20000; // bytes: longer inputs make a fuzzer slow

// `body` with `control` in front.
Bytes input(Bytes control, const Bytes &body)
{
    control.resize(CONTROL_BYTES);
    control.insert(control.end(), body.begin(), body.end());
    return control;
}

void add_chunks(const fs::path &vectors, std::vector<Seed> &seeds)
{
    for (const auto &entry : fs::recursive_directory_iterator(vectors)) {
        if (entry.path().extension() != ".chunk" || entry.file_size() > MAX_SEED)
            continue;
        const std::string name = entry.path().stem();
        std::ifstream in(entry.path(), std::ios::binary);
        const Bytes chunk{std::istreambuf_iterator<char>(in), {}};
        const auto instruction_set = uint8_t(seeds.size() / 3 % 8); // one after the other
        seeds.push_back({"decode", name, input({0, 0, 0, uint8_t(instruction_set << 4)}, chunk)});
        seeds.push_back(
                {"decode", name + "-fit", input({2, 0, 0, uint8_t(instruction_set << 4)}, chunk)});
        zip_chunk_info_t info;
        if (zip_codec_inspect(chunk.data(), chunk.size(), &info) != ZIP_OK)
            continue;
        Bytes original(info.original_length);
        if (zip_codec_decode(chunk.data(), chunk.size(), original.data(), original.size()) ==
            ZIP_OK)
            seeds.push_back(
                    {"round_trip", name,
                     input({uint8_t(info.coding.dtype), uint8_t(info.coding.shape),
                            uint8_t(info.coding.small_tiles), uint8_t(instruction_set << 3)},
                           original)});
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

void add_messages(std::vector<Seed> &seeds)
{
    constexpr uint8_t LOWER = 9; // bytes of a key or address of a transport below
    const auto seed = [&](const char *name, WireKind kind, const Bytes &body) {
        seeds.push_back({"wire", name, input({kind, LOWER}, body)});
    };
    wire::Request request{};
    request.wanted = 8;
    seed("request", REQUEST, message(request));
    wire::Grant grant{};
    grant.slot_size = 16384;
    grant.slot_count = 64;
    grant.count = 3;
    grant.rkey_length = LOWER;
    seed("grant", GRANT, message(grant, 3 * sizeof(uint32_t) + LOWER));
    wire::Ack ack{};
    ack.count = 5;
    seed("ack", SLOTS, message(ack, 5 * sizeof(uint32_t)));
    ack.count = wire::MAX_SLOTS_A_MESSAGE;
    seed("ack-full", SLOTS, message(ack, wire::MAX_SLOTS_A_MESSAGE * sizeof(uint32_t)));
    wire::Segment segment{};
    segment.length = 1000;
    segment.encoded_length = 700;
    seed("segment", SEGMENT, message(segment));
    segment.slot = wire::Segment::INLINE;
    segment.length = segment.encoded_length = 20;
    seed("inline", SEGMENT, message(segment, 20));
    wire::Get get{};
    get.length = 1;
    seed("get", GET, message(get));
    get.length = 1 << 20;
    get.tail = 4096;
    get.key_length = LOWER;
    seed("get-with-key", GET, message(get, LOWER));
    wire::EpAddress ep{};
    ep.lower_length = LOWER;
    seed("ep-address", EP_ADDRESS, message(ep, LOWER));
    wire::Rkey rkey{};
    rkey.lower_length = LOWER;
    seed("rkey", RKEY, message(rkey, LOWER));
    const wire::IfaceAddress iface = {{}, wire::transport_id("tcp"), 0, LOWER};
    seed("iface-address", IFACE_ADDRESS, message(iface, LOWER));
    const uint64_t region[4] = {0x1000, 16, 0x1000, 4096};
    seed("region", REGION, message(region));
    seed("header", HEADER, message(wire::Header{}));
    seed("refuse", REFUSE, message(wire::Refuse{}));
    seed("decline", DECLINE, message(wire::Decline{}));
}

} // namespace

std::vector<Seed> make_seeds(const fs::path &vectors)
{
    std::vector<Seed> seeds;
    add_chunks(vectors, seeds);
    add_messages(seeds);
    return seeds;
}

} // namespace zip::fuzz
