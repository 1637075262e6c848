// SPDX-License-Identifier: BSD-3-Clause
// Memory-mapped reader of safetensors files.
#include "tools/safetensors.h"

#include "tools/error.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <unordered_set>
#include <utility>

namespace tools {

namespace {

// The format's own limit on the header.
constexpr uint64_t kMaxHeader = 100'000'000;
constexpr size_t kMaxRank = 64;

constexpr const char *kDamaged = "; the file is damaged or not a safetensors file, fetch it again";

struct Entry {
    std::string name;
    std::string dtype;
    std::vector<uint64_t> shape;
    std::vector<uint64_t> offsets;
    bool has_dtype = false;
    bool has_shape = false;
    bool has_offsets = false;
};

// Names come from the file: cut, and without control characters, so that an error stays one line.
std::string shown(std::string_view text)
{
    std::string out = "'";
    for (const char c : text.substr(0, 80)) {
        const unsigned char u = static_cast<unsigned char>(c);
        out += (u < 0x20 || u == 0x7f) ? '?' : c;
    }
    return out + (text.size() > 80 ? "...'" : "'");
}

// Reads the header event by event instead of into a tree: a tree would silently keep one of two
// entries of the same name, and would build whatever nesting the file asks for.
class HeaderParser {
public:
    using json = nlohmann::json;

    std::vector<Entry> entries;
    std::string error; // empty: no fault found

    bool null() { return unexpected("null"); }
    bool boolean(bool) { return unexpected("a boolean"); }
    bool binary(json::binary_t &) { return unexpected("binary data"); }

    bool number_integer(json::number_integer_t)
    {
        return array_ ? fail("has a negative number in " + key_) : unexpected("a number");
    }

    bool number_unsigned(json::number_unsigned_t value)
    {
        if (!array_) {
            return unexpected("a number");
        }
        if (array_->size() >= kMaxRank) {
            return fail("has more than " + std::to_string(kMaxRank) + " numbers in " + key_);
        }
        array_->push_back(value);
        return true;
    }

    bool number_float(json::number_float_t, const std::string &text)
    {
        return array_ ? fail("has " + shown(text) + " in " + key_ +
                             ", which is not a whole number below 2^64")
                      : unexpected("a number");
    }

    bool string(std::string &value)
    {
        if (depth_ == 2 && metadata_) {
            return true;
        }
        if (depth_ == 2 && !array_ && key_ == "dtype") {
            entries.back().dtype = value;
            entries.back().has_dtype = true;
            return true;
        }
        return unexpected("a string");
    }

    bool start_object(size_t)
    {
        if (depth_ == 0) {
            depth_ = 1;
            return true;
        }
        if (depth_ == 1) {
            depth_ = 2;
            return true;
        }
        return unexpected("an object");
    }

    bool key(std::string &name)
    {
        if (depth_ == 1) {
            if (!names_.insert(name).second) {
                error = "the header names " + shown(name) + " twice";
                return false;
            }
            metadata_ = name == "__metadata__";
            if (!metadata_) {
                entries.emplace_back();
                entries.back().name = name;
            }
            key_.clear();
            return true;
        }
        key_ = name;
        if (metadata_) {
            return true;
        }
        const Entry &entry = entries.back();
        if (name != "dtype" && name != "shape" && name != "data_offsets") {
            return fail("has the unknown key " + shown(name));
        }
        if ((name == "dtype" && entry.has_dtype) || (name == "shape" && entry.has_shape) ||
            (name == "data_offsets" && entry.has_offsets)) {
            return fail("has " + name + " twice");
        }
        return true;
    }

    bool end_object()
    {
        --depth_;
        if (depth_ == 1 && !metadata_) {
            const Entry &entry = entries.back();
            const char *missing = !entry.has_dtype     ? "dtype"
                                  : !entry.has_shape   ? "shape"
                                  : !entry.has_offsets ? "data_offsets"
                                                       : nullptr;
            if (missing != nullptr) {
                return fail(std::string("has no ") + missing);
            }
        }
        return true;
    }

    bool start_array(size_t)
    {
        if (depth_ != 2 || metadata_ || array_ || key_ == "dtype") {
            return unexpected("an array");
        }
        Entry &entry = entries.back();
        array_ = key_ == "shape" ? &entry.shape : &entry.offsets;
        (key_ == "shape" ? entry.has_shape : entry.has_offsets) = true;
        return true;
    }

    bool end_array()
    {
        array_ = nullptr;
        return true;
    }

    bool parse_error(size_t position, const std::string &, const nlohmann::detail::exception &)
    {
        if (error.empty()) {
            error = "the header is not valid JSON (at byte " + std::to_string(position) + " of it)";
        }
        return false;
    }

private:
    bool fail(const std::string &what)
    {
        error = "tensor " + shown(entries.back().name) + " " + what;
        return false;
    }

    bool unexpected(const char *what)
    {
        if (depth_ == 0) {
            error = std::string("the header is ") + what + " and not a JSON object";
        } else if (metadata_) {
            error = std::string("__metadata__ holds ") + what + " where only strings may be";
        } else if (depth_ == 1) {
            error = "tensor " + shown(entries.back().name) + " is " + what + " and not an object";
        } else {
            return fail(std::string("has ") + what + " where none may be (in " + key_ + ")");
        }
        return false;
    }

    int depth_ = 0;
    bool metadata_ = false;
    std::vector<uint64_t> *array_ = nullptr;
    std::string key_;
    std::unordered_set<std::string> names_;
};

class FileDescriptor {
public:
    explicit FileDescriptor(int fd) : fd_(fd) {}
    ~FileDescriptor()
    {
        if (fd_ >= 0) {
            close(fd_);
        }
    }
    FileDescriptor(const FileDescriptor &) = delete;
    FileDescriptor &operator=(const FileDescriptor &) = delete;
    int get() const { return fd_; }

private:
    int fd_;
};

[[noreturn]] void refuse(const std::string &path, const std::string &what, const char *advice)
{
    throw Error(path + ": " + what + advice);
}

// Bytes of a tensor of this shape and width; empty if they are no whole bytes or exceed 2^64.
std::optional<uint64_t> tensor_bytes(const std::vector<uint64_t> &shape, unsigned bits)
{
    uint64_t total = bits;
    if (std::find(shape.begin(), shape.end(), 0U) != shape.end()) {
        return 0;
    }
    for (const uint64_t extent : shape) {
        if (__builtin_mul_overflow(total, extent, &total)) {
            return std::nullopt;
        }
    }
    if (total % 8 != 0) {
        return std::nullopt;
    }
    return total / 8;
}

} // namespace

std::optional<unsigned> safetensors_dtype_bits(std::string_view dtype)
{
    struct Known {
        std::string_view name;
        unsigned bits;
    };
    static constexpr Known kKnown[] = {
            {"F4", 4},          {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"BOOL", 8},    {"U8", 8},
            {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E5M2FNUZ", 8},
            {"F8_E4M3FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
            {"I32", 32},        {"U32", 32},    {"F32", 32},    {"F64", 64},    {"I64", 64},
            {"U64", 64},        {"C64", 64}};
    for (const Known &known : kKnown) {
        if (known.name == dtype) {
            return known.bits;
        }
    }
    return std::nullopt;
}

SafetensorsFile::SafetensorsFile(const std::string &path) : path_(path)
{
    // O_NONBLOCK: opening a named pipe must not wait for a writer.
    const FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    if (file.get() < 0) {
        refuse(path, std::string("cannot open the model: ") + std::strerror(errno),
               "; check the path and its permissions");
    }
    struct stat info {};
    if (fstat(file.get(), &info) != 0) {
        refuse(path, std::string("cannot read the model: ") + std::strerror(errno), "");
    }
    if (S_ISDIR(info.st_mode)) {
        refuse(path, "is a directory", "; name the .safetensors file inside it");
    }
    if (!S_ISREG(info.st_mode)) {
        refuse(path, "is not a regular file", "; name a .safetensors file");
    }
    const uint64_t file_size = static_cast<uint64_t>(info.st_size);
    if (file_size == 0) {
        refuse(path, "is empty", kDamaged);
    }
    if (file_size < 8) {
        refuse(path, "has only " + std::to_string(file_size) + " bytes, a header length needs 8",
               kDamaged);
    }

    void *map = mmap(nullptr, file_size, PROT_READ, MAP_PRIVATE, file.get(), 0);
    if (map == MAP_FAILED) {
        refuse(path, std::string("cannot map the model: ") + std::strerror(errno), "");
    }
    // From here on the mapping has an owner even if a check below throws.
    struct Unmap {
        void *map;
        size_t size;
        ~Unmap()
        {
            if (map != nullptr) {
                munmap(map, size);
            }
        }
    } guard{map, file_size};

    const std::byte *bytes = static_cast<const std::byte *>(map);
    uint64_t header_size = 0;
    for (int i = 7; i >= 0; --i) {
        header_size = header_size << 8 | std::to_integer<uint64_t>(bytes[i]);
    }
    if (header_size > file_size - 8) {
        refuse(path,
               "the header should have " + std::to_string(header_size) +
                       " bytes, but the whole file has " + std::to_string(file_size),
               kDamaged);
    }
    if (header_size > kMaxHeader) {
        refuse(path,
               "the header has " + std::to_string(header_size) + " bytes, the format allows " +
                       std::to_string(kMaxHeader),
               kDamaged);
    }

    const char *header = reinterpret_cast<const char *>(bytes + 8);
    HeaderParser parser;
    const bool parsed = nlohmann::json::sax_parse(header, header + header_size, &parser);
    if (!parsed || !parser.error.empty()) {
        refuse(path, parser.error, kDamaged);
    }
    if (parser.entries.empty()) {
        refuse(path, "holds no tensors", "; name another model");
    }

    const uint64_t data_size = file_size - 8 - header_size;
    for (const Entry &entry : parser.entries) {
        const std::string who = "tensor " + shown(entry.name) + " ";
        const std::optional<unsigned> bits = safetensors_dtype_bits(entry.dtype);
        if (!bits) {
            refuse(path, who + "has the unknown dtype " + shown(entry.dtype),
                   "; known are F64 F32 F16 BF16 F8_*, the integers and BOOL: convert the model, "
                   "or "
                   "check the file");
        }
        if (entry.offsets.size() != 2) {
            refuse(path,
                   who + "has " + std::to_string(entry.offsets.size()) +
                           " numbers in data_offsets, not 2",
                   kDamaged);
        }
        const uint64_t begin = entry.offsets[0];
        const uint64_t end = entry.offsets[1];
        if (begin > end) {
            refuse(path,
                   who + "ends before it begins (data_offsets " + std::to_string(begin) + ", " +
                           std::to_string(end) + ")",
                   kDamaged);
        }
        if (end > data_size) {
            refuse(path,
                   who + "ends at byte " + std::to_string(end) + " of the data, but the file has " +
                           std::to_string(data_size) + " bytes of data: it is truncated",
                   "; fetch it again");
        }
        const std::optional<uint64_t> size = tensor_bytes(entry.shape, *bits);
        if (!size || *size != end - begin) {
            refuse(path,
                   who + "has " + std::to_string(end - begin) + " bytes, but its shape and dtype " +
                           entry.dtype + " need " +
                           (size ? std::to_string(*size) : std::string("an impossible number")),
                   kDamaged);
        }
        tensors_.push_back({entry.name, entry.dtype, entry.shape, bytes + 8 + header_size + begin,
                            end - begin});
    }

    std::stable_sort(tensors_.begin(), tensors_.end(),
                     [](const SafeTensor &a, const SafeTensor &b) {
                         return std::make_pair(a.data, a.size) < std::make_pair(b.data, b.size);
                     });
    const std::byte *next = bytes + 8 + header_size;
    for (const SafeTensor &tensor : tensors_) {
        if (tensor.data < next) {
            refuse(path, "tensor " + shown(tensor.name) + " overlaps the one before it", kDamaged);
        }
        if (tensor.data > next) {
            refuse(path,
                   std::to_string(tensor.data - next) + " bytes before tensor " +
                           shown(tensor.name) + " belong to no tensor",
                   kDamaged);
        }
        next = tensor.data + tensor.size;
    }
    if (next != bytes + file_size) {
        refuse(path,
               std::to_string(bytes + file_size - next) + " bytes after the last tensor belong to "
                                                          "no tensor",
               kDamaged);
    }

    map_ = std::exchange(guard.map, nullptr);
    map_size_ = file_size;
}

SafetensorsFile::SafetensorsFile(SafetensorsFile &&other) noexcept
    : path_(std::move(other.path_)), map_(std::exchange(other.map_, nullptr)),
      map_size_(std::exchange(other.map_size_, 0)), tensors_(std::move(other.tensors_))
{
}

SafetensorsFile::~SafetensorsFile()
{
    if (map_ != nullptr) {
        munmap(map_, map_size_);
    }
}

} // namespace tools
