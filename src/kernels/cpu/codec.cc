// SPDX-License-Identifier: BSD-3-Clause
// The public interface on the host: names, bounds, the chunk's header, stored chunks; tiles are
// elsewhere.
#include "kernels/codec.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/internal.h"
#include "kernels/format.h"

namespace zip::cpu {

static_assert(int(ZIP_DTYPE_BYTES) == format::DTYPE_BYTES &&
              int(ZIP_DTYPE_BF16) == format::DTYPE_BF16 &&
              int(ZIP_DTYPE_FP32) == format::DTYPE_FP32 &&
              int(ZIP_DTYPE_FP16) == format::DTYPE_FP16 &&
              int(ZIP_DTYPE_FP64) == format::DTYPE_FP64 &&
              int(ZIP_DTYPE_E4M3) == format::DTYPE_E4M3 &&
              int(ZIP_DTYPE_E5M2) == format::DTYPE_E5M2 && int(ZIP_DTYPE_LAST) == format::DTYPES);
static_assert(int(ZIP_SHAPE_DEFAULT) == format::SHAPE_STORED &&
              int(ZIP_SHAPE_22228) == format::SHAPE_22228 &&
              int(ZIP_SHAPE_11238) == format::SHAPE_11238 &&
              int(ZIP_SHAPE_38) == format::SHAPE_38 &&
              int(ZIP_SHAPE_DENSE) == format::SHAPE_DENSE &&
              int(ZIP_SHAPE_COLUMNS) == format::SHAPE_COLUMNS &&
              int(ZIP_SHAPE_LAST) == format::SHAPES);
static_assert(HEADER_LENGTH <= ZIP_CODEC_MAX_GROWTH);

namespace {

// A flag of the upper byte that this decoder does not know is refused.
constexpr uint16_t KNOWN_FLAGS = format::FLAGS_OPTIONAL | format::FLAG_SMALL_TILES;

// Copies and validates the header of the chunk in src[0, src_size). The copy's lengths are safe to
// use with `src`.
zip_status_t load_header(const void *src, size_t src_size, ChunkHeader *header_p,
                         uint64_t *encoded_p)
{
    if (src_size < HEADER_LENGTH)
        return ZIP_ERR_CORRUPT;
    snapshot(header_p, src, HEADER_LENGTH);
    const ChunkHeader &h = *header_p;
    if (h.magic != format::MAGIC)
        return ZIP_ERR_CORRUPT;
    if (h.version != format::VERSION || h.header_units != HEADER_LENGTH / format::HEADER_UNIT ||
        (h.flags & ~KNOWN_FLAGS) != 0 || h.dtype >= format::DTYPES || h.shape >= format::SHAPES)
        return ZIP_ERR_UNSUPPORTED;
    if (h.original_length > format::MAX_LENGTH)
        return ZIP_ERR_CORRUPT;

    uint64_t fixed;
    if (h.dtype == DTYPE_BYTES) {
        if (h.shape != SHAPE_STORED || h.tail_length != 0)
            return ZIP_ERR_CORRUPT;
        fixed = HEADER_LENGTH + h.original_length;
    } else {
        if (!format::valid_coding(coding_of(h)) || h.original_length > MAX_CODED_LENGTH ||
            h.tail_length % TAIL_WORD != 0)
            return ZIP_ERR_CORRUPT;
        fixed = layout_of(coding_of(h), h.original_length).tail;
    }
    if (fixed > src_size || h.tail_length > src_size - fixed)
        return ZIP_ERR_CORRUPT;
    *encoded_p = fixed + h.tail_length;
    return ZIP_OK;
}

// A field of an enumeration's type: a C caller may have put any number there, which C++ may not
// read as one.
template <class T>
int number_in(const T &field)
{
    static_assert(sizeof(T) == sizeof(int));
    int number;
    memcpy(&number, &field, sizeof(number));
    return number;
}

// Whether the fields are values of their types, and go together.
bool valid(const zip_coding_t &coding)
{
    const int dtype = number_in(coding.dtype), shape = number_in(coding.shape);
    if (dtype == ZIP_DTYPE_BYTES)
        return true;
    if (shape < ZIP_SHAPE_DEFAULT || shape >= ZIP_SHAPE_LAST)
        return false;
    const bool small = coding.small_tiles != 0;
    if (dtype == ZIP_DTYPE_AUTO)
        return !(small && shape == ZIP_SHAPE_DENSE);
    return dtype > ZIP_DTYPE_BYTES && dtype < ZIP_DTYPE_LAST &&
           format::valid_coding({uint8_t(dtype),
                                 uint8_t(shape == ZIP_SHAPE_DEFAULT ? int(ZIP_SHAPE_22228) : shape),
                                 small});
}

// The shape to use for a type where one was asked for, or none, before the type was known.
zip_shape_t shape_for(uint8_t dtype, zip_shape_t shape)
{
    return shape != ZIP_SHAPE_DEFAULT && format::valid_coding({dtype, uint8_t(shape), false})
                   ? shape
                   : ZIP_SHAPE_22228;
}

// How the format says what a caller asked for; DTYPE_BYTES: stored.
Coding resolve(zip_coding_t coding, const void *src, size_t length)
{
    if (coding.dtype == ZIP_DTYPE_BYTES)
        return {DTYPE_BYTES, SHAPE_STORED, false};
    if (coding.dtype == ZIP_DTYPE_AUTO) {
        zip_probe_t probe;
        if (zip_codec_probe(src, length, &probe) != ZIP_OK)
            probe = {};
        coding.dtype = probe.dtype;
        if (coding.shape == ZIP_SHAPE_DEFAULT)
            coding.shape = probe.shape;
    }
    if (coding.dtype == ZIP_DTYPE_BYTES)
        return {DTYPE_BYTES, SHAPE_STORED, false};
    return {uint8_t(coding.dtype), uint8_t(shape_for(uint8_t(coding.dtype), coding.shape)),
            coding.small_tiles != 0};
}

// Most bytes of a coded chunk.
uint64_t coded_bound(Coding coding, uint64_t length)
{
    const Layout l = layout_of(coding, length);
    return l.tail + format::max_tail(coding, l.values);
}

} // namespace

zip_status_t encode(Coder coder, zip_coding_t wanted, const void *src, size_t length, void *dst,
                    size_t dst_size, size_t *encoded_p)
{
    if ((src == nullptr && length != 0) || dst == nullptr || encoded_p == nullptr || !valid(wanted))
        return ZIP_ERR_INVALID_PARAM;
    const size_t bound = zip_codec_bound(length);
    if (bound == 0 || dst_size < bound)
        return ZIP_ERR_NO_SPACE;

    const auto *const in = static_cast<const uint8_t *>(src);
    auto *const out = static_cast<uint8_t *>(dst);
    const Coding coding = resolve(wanted, src, length);
    const size_t stored = HEADER_LENGTH + length;
    size_t encoded = 0;
    if (coding.dtype != DTYPE_BYTES && length != 0) {
        encoded = coder == Coder::SIMD ? encode_simd(coding, in, length, out, stored)
                                       : encode_scalar(coding, in, length, out, stored);
    }
    if (encoded == 0) {
        const ChunkHeader header = new_header({DTYPE_BYTES, SHAPE_STORED, false}, length);
        memcpy(out, &header, sizeof(header));
        if (length != 0)
            memcpy(out + HEADER_LENGTH, in, length);
        encoded = stored;
    }
    *encoded_p = encoded;
    return ZIP_OK;
}

zip_status_t decode(Coder coder, const void *src, size_t src_size, void *dst, size_t length)
{
    if (src == nullptr || (dst == nullptr && length != 0))
        return ZIP_ERR_INVALID_PARAM;
    ChunkHeader header;
    uint64_t encoded;
    const zip_status_t status = load_header(src, src_size, &header, &encoded);
    if (status != ZIP_OK)
        return status;
    if (header.original_length != length)
        return ZIP_ERR_CORRUPT;

    auto *const in = static_cast<const uint8_t *>(src);
    auto *const out = static_cast<uint8_t *>(dst);
    if (header.dtype == DTYPE_BYTES) {
        if (length != 0)
            memcpy(out, in + HEADER_LENGTH, length);
        return ZIP_OK;
    }
    if (length == 0)
        return ZIP_OK;
    return coder == Coder::SIMD ? decode_simd(header, in, out) : decode_scalar(header, in, out);
}

} // namespace zip::cpu

const char *zip_dtype_name(zip_dtype_t dtype)
{
    switch (dtype) {
    case ZIP_DTYPE_BYTES:
        return "bytes";
    case ZIP_DTYPE_BF16:
        return "bf16";
    case ZIP_DTYPE_FP32:
        return "fp32";
    case ZIP_DTYPE_FP16:
        return "fp16";
    case ZIP_DTYPE_FP64:
        return "fp64";
    case ZIP_DTYPE_E4M3:
        return "e4m3";
    case ZIP_DTYPE_E5M2:
        return "e5m2";
    case ZIP_DTYPE_AUTO:
        return "auto";
    default:
        return nullptr;
    }
}

const char *zip_shape_name(zip_shape_t shape)
{
    switch (shape) {
    case ZIP_SHAPE_DEFAULT:
        return "default";
    case ZIP_SHAPE_22228:
        return "22228";
    case ZIP_SHAPE_11238:
        return "11238";
    case ZIP_SHAPE_38:
        return "38";
    case ZIP_SHAPE_DENSE:
        return "dense";
    case ZIP_SHAPE_COLUMNS:
        return "columns";
    default:
        return nullptr;
    }
}

size_t zip_dtype_size(zip_dtype_t dtype)
{
    if (dtype == ZIP_DTYPE_BYTES || dtype == ZIP_DTYPE_AUTO)
        return 1;
    return dtype > ZIP_DTYPE_BYTES && dtype < ZIP_DTYPE_LAST
                   ? zip::format::value_size(uint8_t(dtype))
                   : 0;
}

const char *zip_status_string(zip_status_t status)
{
    switch (status) {
    case ZIP_OK:
        return "success";
    case ZIP_ERR_INVALID_PARAM:
        return "invalid parameter";
    case ZIP_ERR_UNSUPPORTED:
        return "unsupported format version or feature";
    case ZIP_ERR_NO_SPACE:
        return "output buffer too small";
    case ZIP_ERR_CORRUPT:
        return "corrupt chunk";
    case ZIP_ERR_NO_DEVICE:
        return "no GPU that this build can use";
    case ZIP_ERR_DEVICE:
        return "error of the GPU's driver";
    default:
        return "unknown status";
    }
}

size_t zip_codec_bound(size_t length)
{
    if (length > zip::format::MAX_LENGTH || length > SIZE_MAX - ZIP_CODEC_MAX_GROWTH)
        return 0;
    return length + ZIP_CODEC_MAX_GROWTH;
}

zip_status_t zip_codec_plan(zip_coding_t coding, uint64_t length, zip_plan_t *plan_p)
{
    namespace cpu = zip::cpu;
    namespace format = zip::format;
    if (plan_p == nullptr || !cpu::valid(coding) || length > format::MAX_CODED_LENGTH)
        return ZIP_ERR_INVALID_PARAM;
    // What is stored, here or on a GPU, has to fit as well.
    *plan_p = {length + ZIP_CODEC_MAX_GROWTH, 0};
    if (coding.dtype == ZIP_DTYPE_BYTES) {
        plan_p->fixed = format::HEADER_LENGTH + length;
        return ZIP_OK;
    }
    const auto include = [&](uint8_t dtype, zip_shape_t shape) {
        const format::Coding c = {dtype, uint8_t(shape), coding.small_tiles != 0};
        plan_p->bound = std::max(plan_p->bound, cpu::coded_bound(c, length));
        plan_p->fixed = std::max(plan_p->fixed, format::layout_of(c, length).tail);
    };
    const bool any_type = coding.dtype == ZIP_DTYPE_AUTO,
               no_shape = coding.shape == ZIP_SHAPE_DEFAULT;
    for (uint8_t dtype = format::DTYPE_BYTES + 1; dtype < format::DTYPES; ++dtype) {
        if (!any_type && coding.dtype != dtype)
            continue;
        include(dtype, cpu::shape_for(dtype, coding.shape));
        if (any_type && no_shape)
            include(dtype, ZIP_SHAPE_11238);
    }
    return ZIP_OK;
}

zip_status_t zip_codec_encode(zip_coding_t coding, const void *src, size_t length, void *dst,
                              size_t dst_size, size_t *encoded_p)
{
    return zip::cpu::encode(zip::cpu::Coder::SIMD, coding, src, length, dst, dst_size, encoded_p);
}

zip_status_t zip_codec_inspect(const void *src, size_t src_size, zip_chunk_info_t *info_p)
{
    if (src == nullptr || info_p == nullptr)
        return ZIP_ERR_INVALID_PARAM;
    zip::format::ChunkHeader header;
    uint64_t encoded;
    const zip_status_t status = zip::cpu::load_header(src, src_size, &header, &encoded);
    if (status != ZIP_OK)
        return status;
    info_p->coding = {zip_dtype_t(header.dtype), zip_shape_t(header.shape),
                      zip::cpu::coding_of(header).small_tiles};
    info_p->original_length = header.original_length;
    info_p->encoded_length = encoded;
    return ZIP_OK;
}

zip_status_t zip_codec_decode(const void *src, size_t src_size, void *dst, size_t length)
{
    return zip::cpu::decode(zip::cpu::Coder::SIMD, src, src_size, dst, length);
}
