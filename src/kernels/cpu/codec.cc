// SPDX-License-Identifier: BSD-3-Clause
// The public interface on the host: names, bounds, the chunk's header, stored chunks; tiles are
// elsewhere.
#include "kernels/codec.h"

#include <cstring>

#include "kernels/cpu/internal.h"
#include "kernels/format.h"

namespace zip::cpu {

static_assert(int(ZIP_DTYPE_BYTES) == format::DTYPE_BYTES &&
              int(ZIP_DTYPE_BF16) == format::DTYPE_BF16 &&
              int(ZIP_DTYPE_FP32) == format::DTYPE_FP32);
static_assert(HEADER_LENGTH <= ZIP_CODEC_MAX_GROWTH);

namespace {

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
        (h.flags & ~format::FLAGS_OPTIONAL) != 0)
        return ZIP_ERR_UNSUPPORTED;
    if (h.original_length > format::MAX_LENGTH)
        return ZIP_ERR_CORRUPT;

    uint64_t fixed;
    if (h.dtype == format::DTYPE_BYTES) {
        if (h.shape != format::SHAPE_STORED || h.tail_length != 0)
            return ZIP_ERR_CORRUPT;
        fixed = HEADER_LENGTH + h.original_length;
    } else {
        if (format::value_size(h.dtype) == 0 || h.shape != format::SHAPE_22228)
            return ZIP_ERR_UNSUPPORTED;
        if (h.original_length > format::MAX_CODED_LENGTH || h.tail_length % format::TAIL_WORD != 0)
            return ZIP_ERR_CORRUPT;
        fixed = format::layout_of(h.dtype, h.original_length).tail;
    }
    if (fixed > src_size || h.tail_length > src_size - fixed)
        return ZIP_ERR_CORRUPT;
    *encoded_p = fixed + h.tail_length;
    return ZIP_OK;
}

} // namespace

zip_status_t encode(Coder coder, zip_dtype_t dtype, const void *src, size_t length, void *dst,
                    size_t dst_size, size_t *encoded_p)
{
    if ((src == nullptr && length != 0) || dst == nullptr || encoded_p == nullptr ||
        zip_dtype_size(dtype) == 0)
        return ZIP_ERR_INVALID_PARAM;
    const size_t bound = zip_codec_bound(length);
    if (bound == 0 || dst_size < bound)
        return ZIP_ERR_NO_SPACE;

    auto *const in = static_cast<const uint8_t *>(src);
    auto *const out = static_cast<uint8_t *>(dst);
    const size_t stored = HEADER_LENGTH + length;
    size_t encoded = 0;
    if (dtype != ZIP_DTYPE_BYTES && length != 0) {
        encoded = coder == Coder::SIMD ? encode_simd(dtype, in, length, out, stored)
                                       : encode_scalar(dtype, in, length, out, stored);
    }
    if (encoded == 0) {
        const ChunkHeader header = new_header(format::DTYPE_BYTES, format::SHAPE_STORED, length);
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
    if (header.dtype == format::DTYPE_BYTES) {
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
    default:
        return nullptr;
    }
}

size_t zip_dtype_size(zip_dtype_t dtype)
{
    switch (dtype) {
    case ZIP_DTYPE_BYTES:
        return 1;
    case ZIP_DTYPE_BF16:
    case ZIP_DTYPE_FP32:
        return zip::format::value_size(uint8_t(dtype));
    default:
        return 0;
    }
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

zip_status_t zip_codec_encode(zip_dtype_t dtype, const void *src, size_t length, void *dst,
                              size_t dst_size, size_t *encoded_p)
{
    return zip::cpu::encode(zip::cpu::Coder::SIMD, dtype, src, length, dst, dst_size, encoded_p);
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
    info_p->dtype = zip_dtype_t(header.dtype);
    info_p->original_length = header.original_length;
    info_p->encoded_length = encoded;
    return ZIP_OK;
}

zip_status_t zip_codec_decode(const void *src, size_t src_size, void *dst, size_t length)
{
    return zip::cpu::decode(zip::cpu::Coder::SIMD, src, src_size, dst, length);
}
