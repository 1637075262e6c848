// SPDX-License-Identifier: BSD-3-Clause
// The sender's half of an endpoint: operations that UCX posts, and answers to the peer's gets, go
// out as segments or straight.
#include "uct/zip/zip_ep.h"
#include "uct/zip/zip_message.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <tuple>
#include <utility>

namespace zip {

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t MAX_QUEUED = 256;       // operations of an endpoint; further ones wait in UCP
constexpr size_t MAX_IN_FLIGHT = 256;    // segments that are not acknowledged
constexpr size_t SEGMENT_ALIGNMENT = 16; // so that no element is cut in two
constexpr size_t SEGMENT_TILE = 32768;   // 8192 values of four bytes
constexpr unsigned MAX_BURST = 8;    // steps a call of progress, so that receiving is not starved
constexpr float GET_RATIO = 0.7f;    // of data that only the peer can look at, and has not yet
constexpr float RATIO_DRIFT = 0.04f; // from what the probe promised, likewise
constexpr double BEST_RATIO = 0.6;   // of any data
constexpr double MEAN_PART = 0.1;    // of the mean of times, that the last one is
constexpr double MAX_ENCODER_SECONDS = 60e-6;
constexpr double MIN_TAIL_SECONDS = 5e-6, MAX_TAIL_SECONDS = 60e-6;
// What an acknowledgement takes longer than the wire's own word that a put's last bytes are there.
constexpr double ACK_SECONDS = 7e-6;
constexpr double MAX_LATE_SECONDS = 20e-6; // of one tail: whatever held it up
constexpr double MAX_ENDS = 0.75;          // of a put that may go plain
constexpr size_t END_ALIGNMENT = 4096;
// An encoder that cannot turn back and store lets a chunk grow by so much, and by so small a part.
constexpr size_t GPU_GROWTH = 4096, GPU_GROWTH_PART = 400;

double seconds(Clock::time_point time)
{
    return std::chrono::duration<double>(time.time_since_epoch()).count();
}

size_t round_up(size_t value, size_t unit)
{
    return (value + unit - 1) / unit * unit;
}

} // namespace

bool Ep::can_accept() const
{
    return operations.size() < MAX_QUEUED;
}

// ---- which way

// Whether the transport below can move the operation between the application's buffers.
bool Ep::can_go_straight(const Operation &operation)
{
    const Md *md = iface->md;
    const uint64_t flag =
            operation.kind == Kind::PUT ? UCT_IFACE_FLAG_PUT_ZCOPY : UCT_IFACE_FLAG_GET_ZCOPY;
    const size_t least = operation.kind == Kind::PUT ? iface->lower_attr.cap.put.min_zcopy
                                                     : iface->lower_attr.cap.get.min_zcopy;
    if (md->lower_rkey_ptr || (iface->lower_attr.cap.flags & flag) == 0 ||
        operation.length < least || (operation.uses_gpu && !md->lower_takes_gpu())) {
        return false;
    }
    if ((md->lower_attr.flags & UCT_MD_FLAG_NEED_RKEY) != 0 &&
        !operation.rkey->unpack_lower(md->lower_component)) {
        return false;
    }
    // of a GPU's memory it is known whether the domain below took it
    const Region *region = operation.region;
    return (md->lower_attr.flags & UCT_MD_FLAG_NEED_MEMH) == 0 ||
           (region != nullptr && (!region->on_gpu() || region->lower_memh != nullptr));
}

GpuBypass &Ep::gpu_bypass_for(Kind kind)
{
    std::unique_ptr<GpuBypass> &chooser = gpu_bypass[static_cast<size_t>(kind)];
    if (chooser == nullptr) {
        chooser = std::make_unique<GpuBypass>(iface->lower_bandwidth());
    }
    return *chooser;
}

// Whether a get is the first one with its key, which it uses up, and for all of what that was
// packed for.
static bool takes_rendezvous(const Operation &get)
{
    return !std::exchange(get.rkey->used, true) &&
           get.rkey->mark == wire::range_mark(get.address, get.length);
}

// Decides how an operation goes. False: a GPU is asked what its data is like.
bool Ep::choose_way(Operation &operation)
{
    const bool is_put = operation.kind == Kind::PUT;
    operation.way = Way::STRAIGHT;
    if (!operation.is_codable()) {
        operation.chosen = true;
        return true;
    }
    const bool by_gpu = operation.uses_gpu;
    const bool straight = can_go_straight(operation);
    const BypassOption option = iface->md->bypass;
    const bool plain = by_gpu && iface->strategy() == Strategy::PLAIN;
    // too small whatever its data are: they need not be looked at
    const bool small = operation.length < iface->options.min_size ||
                       (by_gpu && straight &&
                        !gpu_bypass_for(operation.kind)
                                 .may_gain(operation.length, BEST_RATIO,
                                           under_way_bytes(operation.kind) - operation.length));
    const bool is_inline = !by_gpu && operation.length <= iface->inline_max;
    operation.ratio = GET_RATIO;
    if (is_put && !is_inline && !plain && option != BypassOption::ALWAYS &&
        (!small || option == BypassOption::NEVER)) {
        if (!choose_coding(operation.local, operation.length, operation.region, operation.coding,
                           operation.ratio)) {
            operation.alone = false; // its time says nothing
            return false;
        }
    }
    operation.chosen = true;
    if ((option == BypassOption::NEVER && !plain) || (is_put && is_inline) || !straight) {
        operation.way = Way::CODED;
        return true;
    }
    if (option == BypassOption::ALWAYS || small || plain ||
        (is_put && operation.coding.dtype == ZIP_DTYPE_BYTES)) {
        return true;
    }
    // The peer has to take part in a coded get. That of a rendezvous waits for its message anyway,
    // but others may read its memory while it does something else.
    if (!is_put && by_gpu && !takes_rendezvous(operation)) {
        return true;
    }
    if (!is_put) {
        Remembered *known = remembered_of(operation);
        if (known != nullptr) {
            operation.ratio = known->ratio;
            if (known->skips > 0) {
                --known->skips;
                return true;
            }
        }
    }
    operation.measured = true;
    if (by_gpu) {
        const size_t others = under_way_bytes(operation.kind) - operation.length;
        operation.queued = others > 0;
        operation.way =
                gpu_bypass_for(operation.kind)
                        .choose(operation.length, static_cast<double>(operation.ratio), others);
        return true;
    }
    auto &chooser = bypass[static_cast<size_t>(operation.kind)];
    if (chooser == nullptr) {
        chooser = std::make_unique<Bypass>(iface->lower_bandwidth(), codec_speed());
    }
    operation.way = chooser->choose(operation.length, static_cast<double>(operation.ratio));
    return true;
}

// The codec's type for `length` bytes at `data` in region `of` (NULL: the host's), and what of
// their length to expect. False: a GPU has been asked, and has not answered yet, or the endpoint
// has failed.
bool Ep::choose_coding(const char *data, size_t length, const Region *of, zip_coding_t &coding,
                       float &ratio)
{
    if (of == nullptr || !of->on_gpu()) {
        coding = iface->choose_coding(data, length, ratio);
        return true;
    }
    if (iface->given_coding(length, coding, ratio)) {
        return true;
    }
    if (iface->remembered_coding(data, of, coding, ratio)) {
        return true;
    }
    Side *side = side_for(of->ring);
    if (side == nullptr) {
        return false;
    }
    GpuQueue &queue = *side->encoder;
    if (probe.queue == nullptr) {
        probed = data;
        if (queue.room() > 0 && !queue.probe(data, length, probe) && !queue.is_full()) {
            fail_gpu(queue);
        }
        return false;
    }
    const GpuQueue::Ticket asked = probe;
    uint64_t word;
    const GpuQueue::State state = GpuQueue::poll(probe, word);
    if (state == GpuQueue::State::UNDER_WAY) {
        return false;
    }
    if (state == GpuQueue::State::DONE && probed != data) {
        return false; // of something that has been decided otherwise meanwhile: asked anew
    }
    if (state == GpuQueue::State::FAILED) {
        fail_gpu(queue);
        return false;
    }
    const zip_probe_t result = queue.probed(asked);
    iface->remember_coding(data, of, {result.dtype, result.shape, 0}, result.ratio);
    coding = {result.dtype, result.shape, 0};
    ratio = result.ratio;
    return true;
}

// What a fence put before this operation must be complete. Only segments of the host that follow
// one another are in order by themselves.
bool Ep::can_start(const Operation &operation) const
{
    const bool in_order = operation.kind == Kind::PUT && operation.way == Way::CODED &&
                          under_way == 0 && gpu_puts == 0 && !operation.uses_gpu;
    return in_order || operation.fence <= completed;
}

// ---- a GPU's part

// What this interface has for the memory of ring `from`. NULL: nothing, the endpoint has failed.
Side *Ep::side_for(int from)
{
    Side *side = iface->side(static_cast<unsigned>(from));
    if (side == nullptr) {
        fail(UCS_ERR_NO_MEMORY, true);
    }
    return side;
}

void Ep::fail_gpu(const GpuQueue &queue)
{
    zip_error("zip: endpoint %p: the GPU failed: %s", static_cast<void *>(this),
              queue.error_text());
    fail(UCS_ERR_IO_ERROR, true);
}

// The ends of `length` bytes that go plain: of so many bytes, or shorter so that enough is left
// between them.
static std::pair<size_t, size_t> ends_of(size_t length, double head, double tail)
{
    const double most = MAX_ENDS * static_cast<double>(length);
    const double scale = std::min(1.0, most / (head + tail));
    const size_t begin = round_up(static_cast<size_t>(head * scale), END_ALIGNMENT);
    const auto end = length - static_cast<size_t>(tail * scale);
    if (begin + SEGMENT_TILE > end) {
        return {0, 0};
    }
    return {begin, length - begin - (end - begin) / END_ALIGNMENT * END_ALIGNMENT};
}

// The ends of a put that go plain: what the wire carries while the first piece is encoded, and
// while the last one is decoded. None among others, which keep the wire busy meanwhile.
void Ep::plan_ends(Operation &put)
{
    if (under_way_bytes(Kind::PUT) > put.length || iface->strategy() != Strategy::ENDS ||
        !put.on_gpu() || put.coding.dtype == ZIP_DTYPE_BYTES || !can_go_straight(put)) {
        return;
    }
    const double wire = gpu_bypass_for(Kind::PUT).wire();
    std::tie(put.head, put.tail) =
            ends_of(put.length, wire * encoder_seconds, wire * decoder_seconds);
}

// Those of an answer; the peer knows the wire and its decoder. None while this side reads from the
// peer: with both directions busy they took longer than they saved (doc/performance.md).
void Ep::plan_ends(Answer &answer, const Region &source)
{
    const wire::Get &request = answer.request;
    if (answer.key == nullptr || under_way_bytes(Kind::PUT) + under_way_bytes(Kind::GET) > 0 ||
        answers.size() > 1 || !pieces.empty() || iface->strategy() != Strategy::ENDS ||
        !source.on_gpu() || source.lower_memh == nullptr ||
        answer.coding.dtype == ZIP_DTYPE_BYTES ||
        (iface->lower_attr.cap.flags & UCT_IFACE_FLAG_PUT_ZCOPY) == 0 ||
        !answer.key->unpack_lower(iface->md->lower_component)) {
        return;
    }
    std::tie(answer.head, answer.tail) =
            ends_of(request.length, static_cast<double>(request.wire) * encoder_seconds,
                    static_cast<double>(request.tail));
}

// Looks which pieces are encoded. False: the endpoint has failed.
bool Ep::poll_encoder()
{
    for (Piece &piece : pieces) {
        if (piece.stage != Piece::Stage::ENCODING) {
            continue;
        }
        uint64_t word;
        GpuQueue &queue = *piece.ticket.queue;
        const GpuQueue::Ticket ticket = piece.ticket;
        const GpuQueue::State state = GpuQueue::poll(piece.ticket, word);
        if (state == GpuQueue::State::UNDER_WAY) {
            break; // they are done in order
        }
        --encoding;
        if (piece.since != Clock::time_point{}) {
            // how long the wire would have been idle
            const double took = seconds(Clock::now()) - seconds(piece.since);
            encoder_seconds += MEAN_PART * (std::min(took, MAX_ENCODER_SECONDS) - encoder_seconds);
        }
        if (piece.source != nullptr) {
            iface->md->unpin_device(std::exchange(piece.source, nullptr), ticket);
        }
        if (state == GpuQueue::State::FAILED) {
            fail_gpu(queue);
            return false;
        }
        piece.segment.encoded_length =
                static_cast<uint32_t>(piece.fixed + ZIP_GPU_PROGRESS_TAIL(word));
        piece.segment.dtype = static_cast<uint8_t>(ZIP_GPU_PROGRESS_DTYPE(word));
        piece.segment.shape = static_cast<uint8_t>(ZIP_GPU_PROGRESS_SHAPE(word));
        piece.segment.small_tiles = static_cast<uint8_t>(word >> 39 & 1);
        piece.stage = piece.buffer != nullptr ? Piece::Stage::ENCODED : Piece::Stage::WRITTEN;
    }
    return true;
}

// ---- pieces

// How many more pieces there may be before some are acknowledged.
size_t Ep::pieces_room() const
{
    const size_t taken = in_flight.size() + unannounced.size() + pieces.size();
    return MAX_IN_FLIGHT - std::min(taken, MAX_IN_FLIGHT);
}

// How many slots of one of the peer's rings what is next could use.
size_t Ep::slots_wanted(unsigned ring) const
{
    const auto it = sending.find(ring);
    const size_t slot = it != sending.end() && it->second.remote != nullptr
                                ? it->second.remote->slot_size()
                        : ring > 0 ? iface->gpu_segment_size
                                   : iface->segment_size;
    size_t wanted = 0;
    const auto add = [&](unsigned of, bool is_gpu, size_t left) {
        if (of == ring && (is_gpu || left > iface->inline_max)) {
            wanted += left / slot + 1;
        }
    };
    if (!answers.empty()) {
        const Answer &next = answers.front();
        add(next.request.to_ring, next.left() > 0, next.left());
    }
    if (current != nullptr) {
        const Operation &put = current->what;
        const size_t end = put.length - put.tail;
        if (put.done < end) {
            add(static_cast<unsigned>(put.rkey->ring), put.uses_gpu, end - put.done);
        }
    }
    for (size_t i = 0; i < operations.size() && wanted < MAX_IN_FLIGHT; ++i) {
        const Operation &next = operations[i];
        if (!next.chosen || next.kind != Kind::PUT || next.way != Way::CODED) {
            break;
        }
        add(static_cast<unsigned>(next.rkey->ring), next.uses_gpu, next.length);
    }
    return wanted;
}

// Makes entries of `sending` for the rings of which slots could be used.
void Ep::know_rings_wanted()
{
    if (!answers.empty()) {
        sending[answers.front().request.to_ring];
    }
    const Operation *first = current != nullptr ? &current->what : nullptr;
    const Operation *second = operations.empty() ? nullptr : &operations.front();
    for (const Operation *put : {first, second}) {
        if (put != nullptr && put->chosen && put->kind == Kind::PUT && put->way == Way::CODED) {
            sending[static_cast<unsigned>(put->rkey->ring)];
        }
    }
}

// Whether a step could be made now.
bool Ep::can_advance() const
{
    if (!pieces.empty() || !declined.empty() ||
        (!unannounced.empty() && unannounced.front().flushed)) {
        return true;
    }
    const auto has_slot = [this](unsigned ring) {
        const auto it = sending.find(ring);
        return it == sending.end() || !it->second.credits.empty() || !it->second.requested;
    };
    const bool room = pieces_room() > 0;
    if (!answers.empty()) {
        const Answer &next = answers.front();
        const bool fits_message = next.request.to_ring == 0 && next.left() <= iface->inline_max;
        if (room && (!next.chosen || next.next_is_plain() || fits_message ||
                     has_slot(next.request.to_ring))) {
            return true;
        }
    }
    if (current != nullptr) {
        const Operation &put = current->what;
        const size_t left = put.length - put.tail - std::min(put.done, put.length - put.tail);
        return room && (left == 0 || (!put.uses_gpu && left <= iface->inline_max) ||
                        put.done < put.head || has_slot(static_cast<unsigned>(put.rkey->ring)));
    }
    if (operations.empty()) {
        return false;
    }
    const Operation &next = operations.front();
    if (!next.chosen) {
        return true;
    }
    if (!can_start(next)) {
        return false;
    }
    if (next.way == Way::STRAIGHT) {
        return true;
    }
    if (next.kind == Kind::GET) {
        return coded_gets.size() < MAX_CODED_GETS;
    }
    return room &&
           (next.length <= iface->inline_max || has_slot(static_cast<unsigned>(next.rkey->ring)));
}

// Bytes of the next piece: equal ones, so that the last one is not a scrap; whole tiles of the
// codec where there is room. 0: the peer's slots are too small.
size_t Ep::piece_length(const Source &source, const Sending &to, const Side &side) const
{
    const bool by_gpu = source.from > 0;
    size_t room = to.remote->slot_size() - chunk_offset(source.to);
    if (!to.remote->mapped()) {
        room = std::min(room, side.slot_size - chunk_offset(static_cast<unsigned>(source.from)));
    }
    // most bytes that a chunk may grow by
    const size_t growth = by_gpu ? GPU_GROWTH + room / GPU_GROWTH_PART : ZIP_CODEC_MAX_GROWTH;
    if (room < growth + SEGMENT_ALIGNMENT) {
        return 0;
    }
    const size_t most = by_gpu ? iface->gpu_segment_size : iface->segment_size;
    size_t payload = std::min(most, room - growth) / SEGMENT_ALIGNMENT * SEGMENT_ALIGNMENT;
    if (by_gpu && payload > SEGMENT_TILE) {
        payload = payload / SEGMENT_TILE * SEGMENT_TILE;
    }
    const size_t pieces_left = (source.left + payload - 1) / payload;
    return std::min({source.left, payload, round_up(source.left / pieces_left, SEGMENT_TILE)});
}

// Where a piece is encoded: the peer's slot if that is mapped, else a buffer. NULL: that has to
// wait, or the endpoint has failed.
char *Ep::output_for(const Source &source, Sending &to, Side &side, Piece &piece)
{
    RemoteRing &remote = *to.remote;
    if (remote.mapped()) {
        if (source.from > 0 && !remote.pin_for(side.gpu)) {
            zip_error("zip: the peer's staging memory cannot be pinned for the GPU: %s",
                      side.gpu->api().error_text());
            fail(UCS_ERR_NO_MEMORY, true);
            return nullptr;
        }
        return remote.mapped_slot(wire::index_of(piece.segment.slot)) + chunk_offset(source.to);
    }
    if (iface->send_buffers(side) == nullptr) {
        zip_error("zip: no memory for staging; lower UCX_ZIP_STAGING_SIZE or "
                  "UCX_ZIP_HOST_STAGING_SIZE");
        fail(UCS_ERR_NO_MEMORY, true);
        return nullptr;
    }
    piece.buffer = iface->take_tx_buffer(side, lower);
    return piece.buffer == nullptr ? nullptr
                                   : side.tx.slots->slot(piece.buffer->slot) +
                                             chunk_offset(static_cast<unsigned>(source.from));
}

// Gives back what a piece holds that will not be sent, when nobody uses it any more.
void Ep::drop_piece(Piece &piece)
{
    const GpuQueue::Ticket ticket = piece.ticket;
    GpuQueue::end(piece.ticket);
    if (piece.source != nullptr) {
        iface->md->unpin_device(std::exchange(piece.source, nullptr), ticket);
    }
    if (piece.buffer != nullptr) {
        complete(&std::exchange(piece.buffer, nullptr)->completion, UCS_OK);
    }
    if (piece.under != nullptr) {
        complete(&std::exchange(piece.under, nullptr)->completion, UCS_OK);
    }
}

// `length` bytes of the source have become pieces.
void Ep::made(const Source &source, size_t length)
{
    answered_last = source.owner == nullptr;
    if (source.owner != nullptr) {
        Operation &put = source.owner->what;
        put.done += length;
        if (put.done == put.length) {
            current = nullptr;
        }
        return;
    }
    Answer &answer = answers.front();
    answer.done += length;
    if (answer.done == answer.request.length) {
        answers.pop_front();
    }
}

ucs_status_t Ep::make_pieces(const Source &source)
{
    const bool by_gpu = source.from > 0 || source.to > 0;
    if (pieces_room() == 0) {
        return UCS_ERR_NO_RESOURCE;
    }
    if (!by_gpu && source.left <= iface->inline_max) {
        return make_inline(source);
    }
    Sending &to = sending[source.to];
    if (to.credits.empty()) {
        return UCS_ERR_NO_RESOURCE;
    }
    Side *side = side_for(source.from);
    if (side == nullptr) {
        return failed;
    }
    const size_t length = piece_length(source, to, *side);
    if (length == 0) {
        zip_error("zip: endpoint %p: the peer's slots are too small", static_cast<void *>(this));
        return UCS_ERR_IO_ERROR;
    }
    return source.from > 0 ? encode_on_gpu(source, to, *side, length)
                           : encode_on_host(source, to, *side, length);
}

Piece Ep::new_piece(const Source &source, size_t offset, size_t length) const
{
    Piece piece = {};
    piece.segment.header.to = peer_id;
    piece.segment.region = source.region;
    piece.segment.address = source.address + offset;
    piece.segment.length = length;
    piece.owner = source.owner;
    return piece;
}

Piece Ep::new_plain_piece(const Source &source) const
{
    Piece piece = new_piece(source, 0, source.left);
    piece.stage = Piece::Stage::PLAIN;
    piece.segment.encoded_length = static_cast<uint32_t>(std::min<size_t>(source.left, UINT32_MAX));
    piece.segment.slot = wire::Segment::PLACED;
    piece.data = source.data;
    return piece;
}

ucs_status_t Ep::make_inline(const Source &source)
{
    Piece piece = new_piece(source, 0, source.left);
    piece.stage = Piece::Stage::WRITTEN;
    piece.segment.encoded_length = static_cast<uint32_t>(source.left);
    piece.segment.slot = wire::Segment::INLINE;
    piece.data = source.data;
    if (source.owner == nullptr) {
        piece.copy.assign(source.data, source.data + source.left);
        piece.data = piece.copy.data();
    }
    pieces.push_back(std::move(piece));
    made(source, source.left);
    return UCS_OK;
}

ucs_status_t Ep::encode_on_host(const Source &source, Sending &to, Side &side, size_t length)
{
    Piece piece = new_piece(source, 0, length);
    piece.segment.slot = to.credits.back();
    char *output = output_for(source, to, side, piece);
    if (output == nullptr) {
        return failed != UCS_OK ? failed : UCS_ERR_NO_RESOURCE;
    }
    size_t encoded = 0;
    zip_status_t status = zip_codec_encode(source.coding, source.data, length, output,
                                           zip_codec_bound(length), &encoded);
    zip_chunk_info_t info = {};
    if (status == ZIP_OK && source.to > 0) {
        status = zip_codec_inspect(output, encoded, &info);
    }
    if (status != ZIP_OK) {
        zip_error("zip: cannot encode %zu bytes: %s", length, zip_status_string(status));
        drop_piece(piece);
        return UCS_ERR_IO_ERROR;
    }
    to.credits.pop_back();
    ++to.in_use;
    piece.segment.encoded_length = static_cast<uint32_t>(encoded);
    piece.segment.dtype = static_cast<uint8_t>(info.coding.dtype);
    piece.segment.shape = static_cast<uint8_t>(info.coding.shape);
    piece.segment.small_tiles = info.coding.small_tiles != 0;
    piece.data = output;
    piece.stage = piece.buffer != nullptr ? Piece::Stage::ENCODED : Piece::Stage::WRITTEN;
    pieces.push_back(std::move(piece));
    made(source, length);
    return UCS_OK;
}

// Adds a chunk to a launch: to the last item where it follows that in both memories, so that a
// launch has few items. False: it would have more than need no copy.
static bool add_chunk(std::vector<zip_gpu_item_t> &items, zip_coding_t coding, const char *data,
                      size_t length, char *output, size_t bound)
{
    if (!items.empty()) {
        zip_gpu_item_t &last = items.back();
        const size_t each = last.chunk_length == 0 ? last.data_size : last.chunk_length;
        const size_t chunks = last.data_size / each;
        const auto *first = static_cast<char *>(last.chunks);
        const auto stride = static_cast<size_t>(output - first) / chunks;
        if (output > first && each % SEGMENT_ALIGNMENT == 0 && length <= each &&
            last.data_size % each == 0 && static_cast<char *>(last.data) + last.data_size == data &&
            (chunks == 1 ? stride % SEGMENT_ALIGNMENT == 0 && stride >= last.last_room
                         : last.chunk_stride * chunks == static_cast<size_t>(output - first))) {
            last.chunk_length = each;
            last.chunk_stride = stride;
            last.data_size += length;
            last.last_room = bound;
            return true;
        }
    }
    if (items.size() == ZIP_GPU_INLINE_ITEMS) {
        return false;
    }
    zip_gpu_item_t item = {};
    item.coding = coding;
    item.data = const_cast<char *>(data);
    item.data_size = length;
    item.chunks = output;
    item.last_room = bound;
    items.push_back(item);
    return true;
}

// One launch for as many pieces as there is room for.
ucs_status_t Ep::encode_on_gpu(const Source &source, Sending &to, Side &side, size_t length)
{
    const size_t left = (source.left + length - 1) / length;
    size_t count = std::min({left, to.credits.size(), size_t{GpuQueue::MAX_BATCH},
                             size_t{side.encoder->room()}, pieces_room()});
    if (iface->strategy() == Strategy::CHUNKED) {
        count = std::min(count, encoding > 0 ? size_t{0} : size_t{1});
    }
    // Few pieces are worth a launch of their own only if the GPU would be idle.
    const size_t worth = std::min(left, (to.credits.size() + to.in_use) / 4);
    if (count == 0 || (encoding > 0 && count < worth)) {
        return UCS_ERR_NO_RESOURCE;
    }
    std::vector<zip_gpu_item_t> &items = side.items;
    std::vector<Piece> fresh;
    items.clear();
    size_t done = 0;
    for (size_t i = 0; i < count && done < source.left; ++i) {
        const size_t part = std::min(length, source.left - done);
        Piece piece = new_piece(source, done, part);
        piece.segment.slot = to.credits[to.credits.size() - 1 - i];
        char *output = output_for(source, to, side, piece);
        if (output == nullptr) {
            break;
        }
        zip_plan_t plan = {};
        zip_codec_plan(source.coding, part, &plan);
        piece.data = output;
        piece.fixed = plan.fixed;
        piece.stage = Piece::Stage::ENCODING;
        piece.since = i == 0 ? source.since : Clock::time_point{};
        if (!add_chunk(items, source.coding, source.data + done, part, output, plan.bound)) {
            drop_piece(piece);
            break;
        }
        fresh.push_back(std::move(piece));
        done += part;
    }
    const bool to_gpu_memory =
            !to.remote->mapped() && side.tx.slots != nullptr && side.tx.slots->memory().on_gpu();
    const bool launched = failed == UCS_OK && !items.empty() &&
                          side.encoder->encode(items, iface->sms_for(to_gpu_memory), side.tickets);
    if (!launched) {
        for (Piece &piece : fresh) {
            drop_piece(piece);
        }
        if (failed == UCS_OK && !items.empty() && !side.encoder->is_full()) {
            fail_gpu(*side.encoder);
        }
        return failed != UCS_OK ? failed : UCS_ERR_NO_RESOURCE;
    }
    for (size_t i = 0; i < fresh.size(); ++i) {
        fresh[i].ticket = side.tickets[i];
        if (source.pinned != nullptr) {
            fresh[i].source = source.pinned;
            iface->md->pin_device(source.pinned, side.tickets[i]);
        }
        pieces.push_back(std::move(fresh[i]));
        to.credits.pop_back();
        ++to.in_use;
        ++encoding;
    }
    made(source, done);
    return UCS_OK;
}

// The next `length` bytes of a put go as they are, to where they belong.
ucs_status_t Ep::make_plain(Tracked &put, size_t length)
{
    if (pieces_room() == 0) {
        return UCS_ERR_NO_RESOURCE;
    }
    const Operation &what = put.what;
    const Source source = {{},
                           what.local + what.done,
                           length,
                           0,
                           0,
                           what.rkey->region,
                           what.address + what.done,
                           &put,
                           nullptr};
    pieces.push_back(new_plain_piece(source));
    made(source, length);
    return UCS_OK;
}

// The same for an answer.
ucs_status_t Ep::make_plain(Answer &answer, size_t length)
{
    if (pieces_room() == 0) {
        return UCS_ERR_NO_RESOURCE;
    }
    const wire::Get &request = answer.request;
    const Source source = {{},
                           reinterpret_cast<const char *>(request.address + answer.done),
                           length,
                           0,
                           0,
                           request.to_region,
                           request.to_address + answer.done,
                           nullptr,
                           nullptr};
    Piece piece = new_plain_piece(source);
    piece.key = answer.key;
    piece.source_id = request.region;
    pieces.push_back(std::move(piece));
    made(source, length);
    return UCS_OK;
}

// One step of what is next.
ucs_status_t Ep::prepare()
{
    if (!declined.empty()) {
        Tracked *entry = declined.front();
        return entry->what.way == Way::STRAIGHT ? go_straight(entry->what, entry)
                                                : ask_for_get(entry->what, entry);
    }
    // An answer that waits does not hold up an operation, nor the other way round.
    for (const bool answer : {!answered_last, answered_last}) {
        const ucs_status_t status = answer ? prepare_answer() : prepare_put();
        if (status != UCS_ERR_NO_RESOURCE) {
            return status;
        }
    }
    return UCS_ERR_NO_RESOURCE;
}

ucs_status_t Ep::prepare_put()
{
    if (current == nullptr) {
        if (operations.empty()) {
            return UCS_ERR_NO_RESOURCE;
        }
        Operation &next = operations.front();
        if (!next.chosen && !choose_way(next)) {
            return failed != UCS_OK ? failed : UCS_ERR_NO_RESOURCE;
        }
        if (!can_start(next)) {
            return UCS_ERR_NO_RESOURCE;
        }
        if (next.way == Way::STRAIGHT) {
            answered_last = false;
            return go_straight(next, nullptr);
        }
        if (next.kind == Kind::GET) {
            answered_last = false;
            return ask_for_get(next, nullptr);
        }
        if (!next.uses_gpu && !pieces.empty()) {
            return UCS_ERR_NO_RESOURCE; // encoded when it can be sent
        }
        current = &track(next);
        operations.pop_front();
        gpu_puts += current->what.uses_gpu;
        plan_ends(current->what);
    }
    Tracked &put = *current;
    const Operation &what = put.what;
    if (what.done < what.head) {
        return make_plain(put, what.head);
    }
    const size_t end = what.length - what.tail;
    if (what.done == end) {
        return make_plain(put, what.tail);
    }
    const int from = what.on_gpu() ? what.region->ring : 0;
    if (from == 0 && !pieces.empty()) {
        return UCS_ERR_NO_RESOURCE;
    }
    return make_pieces({what.coding, what.local + what.done, end - what.done, from,
                        static_cast<unsigned>(what.rkey->ring), what.rkey->region,
                        what.address + what.done, &put, nullptr,
                        what.alone && what.done == what.head ? what.since : Clock::time_point{}});
}

// The same for an answer, if the memory that was asked for is still registered.
ucs_status_t Ep::prepare_answer()
{
    if (answers.empty()) {
        return UCS_ERR_NO_RESOURCE;
    }
    Answer &answer = answers.front();
    const size_t left = answer.request.length - answer.done;
    Region *source =
            iface->md->pin(answer.request.region, answer.request.address + answer.done, left);
    if (source == nullptr) {
        refuse(0, UCS_ERR_INVALID_ADDR, "get of memory that is no longer registered");
        return failed;
    }
    const auto *data = reinterpret_cast<const char *>(answer.request.address + answer.done);
    ucs_status_t status = UCS_ERR_NO_RESOURCE;
    float ratio;
    if (!answer.chosen && choose_coding(data, left, source, answer.coding, ratio)) {
        answer.chosen = true;
        plan_ends(answer, *source);
    }
    if (failed != UCS_OK) {
        status = failed;
    } else if (answer.chosen && answer.done == 0 && answer.request.may_decline != 0 &&
               answer.coding.dtype == ZIP_DTYPE_BYTES) {
        to_decline.push_back(answer.request.to_region);
        answers.pop_front();
        status = UCS_OK;
    } else if (answer.chosen && answer.next_is_plain()) {
        status = make_plain(answer, answer.done < answer.head ? answer.head : answer.tail);
    } else if (answer.chosen && (source->on_gpu() || pieces.empty())) {
        const bool is_timed = answer.head > 0 && answer.done == answer.head;
        status = make_pieces({answer.coding, data, answer.left(), source->ring,
                              answer.request.to_ring, answer.request.to_region,
                              answer.request.to_address + answer.done, nullptr,
                              source->on_gpu() ? source : nullptr,
                              is_timed ? answer.since : Clock::time_point{}});
    }
    iface->md->unpin(source);
    return status;
}

// ---- posting

// One step of the first piece.
ucs_status_t Ep::post_piece()
{
    if (encoding > 0 && !poll_encoder()) {
        return failed;
    }
    if (pieces.empty()) {
        return UCS_ERR_NO_RESOURCE;
    }
    const Strategy strategy = iface->strategy();
    if (strategy == Strategy::SPLIT_SEND) {
        for (Piece &piece : pieces) {
            if (piece.stage == Piece::Stage::ENCODED && piece.put == 0 && piece.fixed > 0) {
                return put_encoded(piece, piece.fixed);
            }
        }
    }
    Piece &piece = pieces.front();
    const bool waits = strategy == Strategy::SPLIT_SEND || strategy == Strategy::ENCODE_THEN_SEND;
    if (piece.stage == Piece::Stage::ENCODING || (waits && piece.fixed > 0 && encoding > 0)) {
        return UCS_ERR_NO_RESOURCE;
    }
    if (piece.stage == Piece::Stage::ENCODED || piece.stage == Piece::Stage::PLAIN) {
        const bool plain = piece.stage == Piece::Stage::PLAIN;
        const ucs_status_t status =
                plain ? put_plain(piece) : put_encoded(piece, piece.segment.encoded_length);
        if (status != UCS_OK) {
            return status;
        }
        if (failed != UCS_OK) {
            return failed;
        }
        piece.stage = iface->puts_are_ordered ? Piece::Stage::WRITTEN : Piece::Stage::PUT;
        if (plain && iface->puts_are_ordered && piece.owner != nullptr && piece.owner->sent == 0) {
            piece_sent(); // what follows says that it is there, too
            return UCS_OK;
        }
    }
    if (piece.stage == Piece::Stage::PUT) {
        LowerOperation *under = iface->begin_lower_operation(this);
        const ucs_status_t status = uct_ep_flush(lower, 0, &under->completion);
        if (status != UCS_OK && status != UCS_INPROGRESS) {
            iface->forget_lower_operation(under);
            return status;
        }
        if (failed != UCS_OK) { // within that call: the piece is gone
            under_way += status == UCS_INPROGRESS;
            if (status == UCS_OK) {
                iface->forget_lower_operation(under);
            }
            return failed;
        }
        unannounced.push_back({piece.segment, nullptr, status == UCS_OK});
        if (status == UCS_OK) {
            iface->forget_lower_operation(under);
        } else {
            under->segment = &unannounced.back();
            ++under_way;
        }
        Tracked *ends = piece_sent();
        if (failed == UCS_OK) {
            unannounced.back().ends = ends;
        }
        return UCS_OK;
    }
    if (!unannounced.empty()) {
        return UCS_ERR_NO_RESOURCE; // those before this one first
    }
    const size_t inline_length =
            piece.segment.slot == wire::Segment::INLINE ? piece.segment.length : 0;
    const ucs_status_t status = announce(piece.segment, {piece.data, inline_length});
    if (failed != UCS_OK) {
        return failed;
    }
    if (status == UCS_OK) {
        Tracked *ends = piece_sent();
        if (ends != nullptr) {
            ends->last_segment = sent_sequence;
        }
    }
    return status;
}

// Posts an operation below. The endpoint may fail within that call, with all that it had; then
// nobody else may hold the completion. Returns UCS_OK if the operation is done or will be.
template <class Post>
ucs_status_t Ep::give_below(uct_completion_t *completion, const Post &post)
{
    ++completion->count;
    const ucs_status_t status = post();
    if (status != UCS_INPROGRESS) {
        complete(completion, UCS_OK);
    }
    return failed != UCS_OK ? failed : status == UCS_INPROGRESS ? UCS_OK : status;
}

// Puts the encoded bytes up to `end` into the peer's slot.
ucs_status_t Ep::put_encoded(Piece &piece, size_t end)
{
    const unsigned ring = wire::ring_of(piece.segment.slot);
    const RemoteRing &remote = *sending[ring].remote;
    if (piece.put < end) {
        uct_iov_t iov = {};
        iov.buffer = const_cast<char *>(piece.data) + piece.put;
        iov.length = end - piece.put;
        iov.memh = piece.buffer->pool->slots->memory().memh();
        iov.count = 1;
        const uint64_t address = remote.remote_address(wire::index_of(piece.segment.slot)) +
                                 chunk_offset(ring) + piece.put;
        uct_completion_t *completion = &piece.buffer->completion;
        const ucs_status_t status = give_below(completion, [&] {
            return uct_ep_put_zcopy(lower, &iov, 1, address, remote.rkey(), completion);
        });
        if (status != UCS_OK) {
            return status; // the piece may be gone
        }
        piece.put = end;
    }
    if (end == piece.segment.encoded_length && piece.buffer != nullptr) {
        complete(&std::exchange(piece.buffer, nullptr)->completion, UCS_OK);
    }
    return UCS_OK;
}

// Puts a plain piece where it belongs; with the last one the put's own end below is waited for.
ucs_status_t Ep::put_plain(Piece &piece)
{
    if (piece.owner == nullptr) {
        return put_plain_answer(piece);
    }
    Operation &what = piece.owner->what;
    if (what.under == nullptr) {
        what.under = iface->begin_lower_operation(this);
        ++under_way;
    }
    LowerOperation *under = what.under;
    const ucs_status_t status = put_straight(what, piece.data, piece.segment.length,
                                             piece.segment.address, piece.put, under);
    if (status != UCS_OK) {
        return status;
    }
    iface->counters.straight_bytes += piece.segment.length;
    const bool is_last = piece.data + piece.segment.length == what.local + what.length;
    if (is_last) {
        what.under = nullptr;
        piece.owner->plain = under;
        under->tracked = piece.owner;
        complete(&under->completion, UCS_OK); // may end it
    }
    return UCS_OK;
}

// The same of an answer. Nobody waits for its end below: the peer has all of it before that.
ucs_status_t Ep::put_plain_answer(Piece &piece)
{
    const auto address = reinterpret_cast<uintptr_t>(piece.data);
    Region *source = iface->md->pin(piece.source_id, address, piece.segment.length);
    if (source == nullptr) {
        refuse(0, UCS_ERR_INVALID_ADDR, "get of memory that is no longer registered");
        return failed;
    }
    if (piece.under == nullptr) {
        piece.under = iface->begin_lower_operation(this);
        ++under_way;
    }
    Operation put = {};
    put.kind = Kind::PUT;
    put.region = source;
    put.rkey = piece.key.get();
    const ucs_status_t status = put_straight(put, piece.data, piece.segment.length,
                                             piece.segment.address, piece.put, piece.under);
    iface->md->unpin(source);
    if (status != UCS_OK) {
        return status; // the piece may be gone
    }
    iface->counters.straight_bytes += piece.segment.length;
    complete(&std::exchange(piece.under, nullptr)->completion, UCS_OK); // may end it
    return UCS_OK;
}

// Sends the message of a segment that is in its slot, or is `inline_data`.
ucs_status_t Ep::announce(wire::Segment &message, Part inline_data)
{
    message.sequence = sent_sequence + 1;
    const ucs_status_t status =
            send_parts(lower, wire::SEGMENT, {{&message, sizeof(message)}, inline_data, {}});
    if (status == UCS_OK) {
        ++sent_sequence;
        in_flight.push_back(uint32_t{message.slot}); // not a reference into a packed message
    }
    return status;
}

// Sends the messages of segments that waited for a flush, as far as there is room.
unsigned Ep::announce_flushed()
{
    unsigned sent = 0;
    while (failed == UCS_OK && !unannounced.empty() && unannounced.front().flushed) {
        const ucs_status_t status = announce(unannounced.front().segment, {});
        if (status != UCS_OK) {
            if (status != UCS_ERR_NO_RESOURCE) {
                fail(status, true);
            }
            break;
        }
        if (unannounced.front().ends != nullptr) {
            unannounced.front().ends->last_segment = sent_sequence;
        }
        unannounced.pop_front();
        ++sent;
    }
    return sent;
}

// Counts the first piece, which has just gone. If it was an operation's last one, returns where
// that is tracked; if nothing reads the operation's memory any more its own completion has been
// called then.
Tracked *Ep::piece_sent()
{
    const Piece piece = std::move(pieces.front());
    pieces.pop_front();
    const wire::Segment &segment = piece.segment;
    if (segment.slot != wire::Segment::PLACED) {
        ++iface->counters.segments;
        iface->counters.wire_bytes += segment.encoded_length;
        iface->counters.stored_segments += segment.encoded_length >= segment.length;
    }
    if (piece.owner == nullptr) {
        return nullptr;
    }
    Tracked &put = *piece.owner;
    put.sent += segment.length;
    put.encoded += segment.slot != wire::Segment::PLACED ? segment.encoded_length : 0;
    if (put.sent < put.what.length) {
        return nullptr;
    }
    if (put.what.tail == 0) {
        put.sent_all = true;
        complete(std::exchange(put.what.completion, nullptr), UCS_OK);
    }
    return failed == UCS_OK ? &put : nullptr;
}

// ---- operations

// Moves the first operation to those that are on their way.
Tracked &Ep::track(const Operation &operation)
{
    Tracked &entry = tracked.emplace_back();
    entry.what = operation;
    return entry;
}

// Posts what is left, from `done` on, of `length` bytes of an operation at `local` to the transport
// below.
ucs_status_t Ep::put_straight(const Operation &operation, const char *local, size_t length,
                              uint64_t address, size_t &done, LowerOperation *under)
{
    const bool is_put = operation.kind == Kind::PUT;
    const bool needs_memh = (iface->md->lower_attr.flags & UCT_MD_FLAG_NEED_MEMH) != 0;
    const uct_rkey_t rkey =
            operation.rkey->component != nullptr ? operation.rkey->bundle.rkey : UCT_INVALID_RKEY;
    const size_t most =
            is_put ? iface->lower_attr.cap.put.max_zcopy : iface->lower_attr.cap.get.max_zcopy;
    while (done < length) {
        uct_iov_t iov = {};
        iov.buffer = const_cast<char *>(local) + done;
        iov.length = std::min(length - done, most);
        iov.memh = needs_memh && operation.region != nullptr
                           ? iface->md->lower_memh(operation.region)
                           : nullptr;
        iov.count = 1;
        const ucs_status_t status = give_below(&under->completion, [&] {
            return is_put ? uct_ep_put_zcopy(lower, &iov, 1, address + done, rkey,
                                             &under->completion)
                          : uct_ep_get_zcopy(lower, &iov, 1, address + done, rkey,
                                             &under->completion);
        });
        if (status != UCS_OK) {
            return status; // the operation may be gone
        }
        done += iov.length;
    }
    return UCS_OK;
}

// Posts what is left of an operation to the transport below, and a flush behind a put. `entry` as
// in ask_for_get().
ucs_status_t Ep::go_straight(Operation &operation, Tracked *entry)
{
    Md *md = iface->md;
    const bool is_put = operation.kind == Kind::PUT;
    const bool needs_memh = (md->lower_attr.flags & UCT_MD_FLAG_NEED_MEMH) != 0;
    const uct_mem_h memh =
            needs_memh && operation.region != nullptr ? md->lower_memh(operation.region) : nullptr;
    if (operation.under == nullptr) {
        if (!can_go_straight(operation) || (needs_memh && memh == nullptr)) {
            if (!operation.is_codable()) {
                zip_error("zip: %s cannot move this memory: it is not registered there at both "
                          "ends",
                          md->transport.c_str());
                return UCS_ERR_UNSUPPORTED;
            }
            unmeasure(operation);
            operation.way = Way::CODED;
            return UCS_OK;
        }
        operation.under = iface->begin_lower_operation(this);
        ++under_way;
    }
    LowerOperation *under = operation.under;
    const ucs_status_t posted_all = put_straight(operation, operation.local, operation.length,
                                                 operation.address, operation.done, under);
    if (posted_all != UCS_OK) {
        return posted_all;
    }
    if (is_put) {
        const ucs_status_t status = give_below(
                &under->completion, [&] { return uct_ep_flush(lower, 0, &under->completion); });
        if (status != UCS_OK) {
            return status;
        }
    }
    iface->counters.straight_bytes += operation.length;
    under->user = operation.completion;
    if (entry == nullptr) {
        under->tracked = &track(operation);
        operations.pop_front();
    } else {
        under->tracked = entry;
        declined.pop_front();
    }
    under->tracked->what.under = nullptr;
    under->tracked->what.completion = nullptr;
    last_straight = under;
    complete(&under->completion, UCS_OK); // may end it
    return UCS_OK;
}

void Ep::lower_operation_ended(LowerOperation &ended, ucs_status_t status)
{
    KeepAlive guard(this);
    --under_way;
    if (last_straight == &ended) {
        last_straight = nullptr;
    }
    if (ended.segment != nullptr) {
        ended.segment->flushed = true;
    }
    if (ended.tracked != nullptr && ended.tracked->plain == &ended) {
        ended.tracked->plain = nullptr;
        ended.tracked->plain_ended = Clock::now();
        end_acknowledged();
    } else if (ended.tracked != nullptr) {
        end(*ended.tracked);
    }
    complete(ended.user, status);
    if (status != UCS_OK) {
        fail(status, true);
    }
    retire();
    if (under_way == 0) {
        complete(std::exchange(canceled, nullptr), UCS_OK);
    }
    if (!doomed && has_work()) {
        iface->activate(this);
    }
}

// Has the bypass forget an operation whose time says nothing.
void Ep::unmeasure(Operation &operation)
{
    if (operation.measured) {
        operation.measured = false;
        const double now = seconds(Clock::now());
        if (operation.uses_gpu) {
            gpu_bypass_for(operation.kind).drop(operation.way, now);
        } else {
            bypass[static_cast<size_t>(operation.kind)]->drop(operation.way, now);
        }
    }
}

// Whether no other operation of its kind and GPU memory was under way at its beginning or is now,
// at its end.
bool Ep::had_wire(const Operation &operation) const
{
    return operation.alone && under_way_bytes(operation.kind) == operation.length;
}

// An operation is done at the peer.
void Ep::end(Tracked &operation)
{
    operation.done = true;
    const Operation &what = operation.what;
    const double since = seconds(what.since), now = seconds(Clock::now());
    const auto ratio = static_cast<double>(what.ratio);
    if (what.measured && !what.uses_gpu) {
        bypass[static_cast<size_t>(what.kind)]->end(what.way, what.length, ratio, since, now);
    } else if (what.measured && (what.queued || had_wire(what))) {
        gpu_bypass_for(what.kind).end(what.way, what.length, ratio, what.queued, since, now);
    } else if (what.measured) {
        gpu_bypass_for(what.kind).drop(what.way, now);
    }
    under_way_bytes(what.kind) -= what.uses_gpu ? what.length : 0;
    if (what.kind == Kind::PUT && what.way == Way::CODED && what.uses_gpu) {
        --gpu_puts;
        const auto coded = static_cast<float>(what.length - what.head - what.tail);
        const float seen = static_cast<float>(operation.encoded) / std::max(coded, 1.0f);
        if (seen > what.ratio + RATIO_DRIFT) {
            iface->forget_coding(what.local, what.region_id); // other data than was probed
        }
    }
}

// A tail is to arrive when what was coded is decoded: `seconds` is how long that takes after the
// last coded piece, `late` how much later than the tail it was this time.
void learn_tail(double &seconds, double late)
{
    late = std::clamp(late, -MAX_LATE_SECONDS, MAX_LATE_SECONDS);
    seconds = std::clamp(seconds + MEAN_PART * late, MIN_TAIL_SECONDS, MAX_TAIL_SECONDS);
}

void Ep::learn_decoder(const Tracked &operation)
{
    if (operation.what.tail > 0 && had_wire(operation.what)) {
        learn_tail(decoder_seconds,
                   seconds(Clock::now()) - seconds(operation.plain_ended) - ACK_SECONDS);
    }
}

// Ends the coded puts whose last segment is acknowledged.
void Ep::end_acknowledged()
{
    for (size_t i = 0; i < tracked.size(); ++i) {
        Tracked &operation = tracked[i];
        const bool coded_put = operation.what.kind == Kind::PUT && operation.what.way == Way::CODED;
        if (!coded_put || operation.done) {
            continue;
        }
        if (operation.last_segment == 0 || operation.last_segment > acked_sequence) {
            break;
        }
        if (operation.plain == nullptr) {
            learn_decoder(operation);
            end(operation);
        }
    }
}

// Takes complete operations off, in order, and ends the flushes that waited for them.
void Ep::retire()
{
    KeepAlive guard(this);
    while (!tracked.empty() && tracked.front().done) {
        ++completed;
        uct_completion_t *completion = std::exchange(tracked.front().what.completion, nullptr);
        tracked.pop_front();
        complete(completion, UCS_OK);
    }
    while (!flushes.empty() && flushes.front().operation <= completed) {
        uct_completion_t *completion = flushes.front().completion;
        flushes.pop_front();
        complete(completion, UCS_OK);
    }
}

unsigned Ep::send()
{
    unsigned steps = announce_flushed();
    for (bool moved = true; moved && steps < MAX_BURST && failed == UCS_OK;) {
        moved = false;
        for (const auto step : {&Ep::post_piece, &Ep::prepare}) {
            const ucs_status_t status = failed == UCS_OK ? (this->*step)() : UCS_ERR_NO_RESOURCE;
            if (status == UCS_OK) {
                moved = true;
                ++steps;
            } else if (status != UCS_ERR_NO_RESOURCE) {
                fail(status, true);
            }
        }
    }
    return steps;
}

ucs_status_t Ep::post(Kind kind, const uct_iov_t *iov, size_t count, uint64_t address, Rkey *rkey,
                      uct_completion_t *completion)
{
    if (failed != UCS_OK) {
        return failed;
    }
    if (count > 1) {
        return UCS_ERR_INVALID_PARAM; // max_iov is 1
    }
    const size_t length = count == 0 ? 0 : iov->length * iov->count;
    if (length == 0) {
        return UCS_OK;
    }
    if (peer_gone) {
        return UCS_ERR_CONNECTION_RESET;
    }
    if (!can_accept() || (!pending.empty() && !dispatching)) {
        return UCS_ERR_NO_RESOURCE; // those that wait in `pending` go first
    }
    // No completion is called before this function returns, so one that can be done here must not
    // have one.
    const bool first = operations.empty() && depth == 0 && connected;
    Operation &operation = operations.emplace_back();
    operation.kind = kind;
    operation.local = static_cast<char *>(iov->buffer);
    operation.length = length;
    operation.region = static_cast<Region *>(iov->memh);
    operation.address = address;
    operation.rkey = rkey;
    operation.completion = first ? nullptr : completion;
    operation.fence = fenced;
    operation.since = Clock::now();
    operation.serial = ++posted;
    operation.uses_gpu = operation.on_gpu() || rkey->ring > 0;
    operation.region_id = operation.region != nullptr ? operation.region->id : 0;
    if (operation.uses_gpu) {
        operation.alone = under_way_bytes(kind) == 0;
        under_way_bytes(kind) += length;
    }
    if (kind == Kind::PUT) {
        ++iface->counters.puts;
        iface->counters.put_bytes += length;
    } else {
        ++iface->counters.gets;
        iface->counters.get_bytes += length;
    }
    if (first) {
        KeepAlive guard(this);
        last_straight = nullptr;
        const size_t gets_before = coded_gets.size();
        control();
        send();
        if (failed != UCS_OK) {
            return failed;
        }
        const bool on_its_way = !tracked.empty() && tracked.back().what.serial == posted &&
                                tracked.back().what.way == Way::CODED &&
                                tracked.back().what.kind == Kind::PUT && !tracked.back().sent_all;
        if (!operations.empty()) {
            operations.front().completion = completion;
        } else if (on_its_way) {
            tracked.back().what.completion = completion;
        } else if (last_straight != nullptr) {
            last_straight->user = completion;
        } else if (coded_gets.size() > gets_before) {
            coded_gets.back()->what.completion = completion;
        } else {
            if (has_work()) {
                iface->activate(this);
            }
            return UCS_OK;
        }
    }
    iface->activate(this);
    return UCS_INPROGRESS;
}

void Ep::fence()
{
    fenced = posted;
}

ucs_status_t Ep::flush(unsigned flags, uct_completion_t *completion)
{
    if ((flags & UCT_FLUSH_FLAG_CANCEL) != 0) {
        fail(UCS_ERR_CANCELED, false);
        if (under_way == 0) {
            return UCS_OK;
        }
        // The transport below still reads or writes the application's memory.
        cancel_lower();
        if (under_way == 0) {
            return UCS_OK;
        }
        canceled = completion;
        return UCS_INPROGRESS;
    }
    if (failed != UCS_OK) {
        return failed;
    }
    if (!pending.empty() && !dispatching) {
        return UCS_ERR_NO_RESOURCE; // what waits there is to be flushed, too
    }
    if (completed == posted) {
        return UCS_OK;
    }
    if (completion != nullptr) {
        flushes.push_back({posted, completion});
    }
    return UCS_INPROGRESS;
}

unsigned Ep::dispatch_pending()
{
    unsigned done = 0;
    while (!pending.empty() && can_accept() && failed == UCS_OK) {
        uct_pending_req_t *request = pending.front();
        pending.pop_front();
        dispatching = true;
        const ucs_status_t status = request->func(request);
        dispatching = false;
        if (status == UCS_OK) {
            ++done;
        } else {
            pending.push_front(request);
            if (status != UCS_INPROGRESS) {
                break;
            }
        }
    }
    return done;
}

// ---- what the peer says to the sender

bool Ep::take_credits(const wire::Slots &slots)
{
    for (uint32_t i = 0; i < slots.count(); ++i) {
        const uint32_t slot = slots[i];
        const auto to = sending.find(wire::ring_of(slot));
        if (to == sending.end() || to->second.remote == nullptr ||
            wire::index_of(slot) >= to->second.remote->count() ||
            to->second.credits.size() >= to->second.remote->count()) {
            return false;
        }
        to->second.credits.push_back(slot);
    }
    // The lowest goes first: neighbours are encoded as one.
    for (auto &[ring, to] : sending) {
        std::sort(to.credits.begin(), to.credits.end(), std::greater<>());
    }
    return true;
}

void Ep::on_grant(const char *data, size_t length)
{
    wire::GrantView view;
    const size_t key_length = iface->md->lower_attr.flags & UCT_MD_FLAG_NEED_RKEY
                                      ? iface->md->lower_attr.rkey_packed_size
                                      : 0;
    if (!wire::parse(data, length, ZIP_CODEC_MAX_GROWTH + SEGMENT_ALIGNMENT, key_length, view)) {
        refuse(0, UCS_ERR_INVALID_PARAM, "malformed grant of slots");
        return;
    }
    const wire::Grant &grant = view.head;
    const auto to = sending.find(wire::ring_of(view.slots[0]));
    if (to == sending.end()) {
        refuse(0, UCS_ERR_INVALID_PARAM, "grant of slots that were not asked for");
        return;
    }
    std::unique_ptr<RemoteRing> &remote = to->second.remote;
    if (remote == nullptr) {
        ucs_status_t status;
        remote = RemoteRing::open(iface->md, grant.ring_address, grant.slot_size, grant.slot_count,
                                  view.key, status);
        if (remote == nullptr) {
            zip_error("zip: cannot reach the peer's staging memory: %s", ucs_status_string(status));
            fail(status, true);
            return;
        }
    }
    if (grant.slot_size != remote->slot_size() || grant.slot_count != remote->count() ||
        !take_credits(view.slots)) {
        refuse(0, UCS_ERR_INVALID_PARAM, "grant of slots that do not exist");
        return;
    }
    to->second.requested = false;
}

void Ep::on_recall(const char *data, size_t length)
{
    wire::Recall recall;
    if (!wire::read(data, length, recall)) {
        refuse(0, UCS_ERR_INVALID_PARAM, "malformed recall of slots");
        return;
    }
    const auto to = sending.find(recall.ring);
    if (to != sending.end()) {
        to->second.recalled = true;
    }
}

void Ep::on_ack(const char *data, size_t length)
{
    wire::SlotsView view;
    const wire::Ack &ack = view.head;
    if (!wire::parse(data, length, view) || ack.sequence < acked_sequence ||
        ack.sequence > sent_sequence) {
        refuse(0, UCS_ERR_INVALID_PARAM, "malformed acknowledgement");
        return;
    }
    for (; acked_sequence < ack.sequence; ++acked_sequence) {
        const uint32_t slot = in_flight.front();
        if (slot != wire::Segment::INLINE && slot != wire::Segment::PLACED) {
            --sending[wire::ring_of(slot)].in_use;
        }
        in_flight.pop_front();
    }
    if (!take_credits(view.slots)) {
        refuse(0, UCS_ERR_INVALID_PARAM, "acknowledgement with slots that do not exist");
        return;
    }
    for (auto &[ring, to] : sending) {
        if (to.in_use == 0) {
            to.requested = false; // if none came back there is a need to ask again
        }
    }
    end_acknowledged();
    retire();
}

// The peer asks for a piece of this side's memory.
void Ep::on_get(const char *data, size_t length)
{
    wire::GetView view;
    if (!wire::parse(data, length, iface->md->lower_key_size(), view)) {
        refuse(0, UCS_ERR_INVALID_PARAM, "malformed get");
        return;
    }
    const wire::Get &message = view.head;
    if (answers.size() + to_decline.size() >= MAX_CODED_GETS) {
        refuse(0, UCS_ERR_INVALID_PARAM, "more gets than a peer may have under way");
        return;
    }
    Region *source = iface->md->pin(message.region, message.address, message.length);
    if (source == nullptr || !source->codable()) {
        if (source != nullptr) {
            iface->md->unpin(source);
        }
        refuse(0, UCS_ERR_INVALID_ADDR, "get of memory that was not exported to it");
        return;
    }
    iface->md->unpin(source);
    Answer &answer = answers.emplace_back();
    answer.request = message;
    answer.since = Clock::now();
    if (message.key_length > 0) {
        answer.key = std::make_shared<Rkey>();
        answer.key->lower.assign(view.key, view.key + message.key_length);
    }
    control();
    send();
}

} // namespace zip
