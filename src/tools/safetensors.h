// SPDX-License-Identifier: BSD-3-Clause
// Memory-mapped reader of safetensors files. The file is untrusted: everything in its header is
// checked before any tensor is handed out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tools {

// Bits of one value of a safetensors dtype ("BF16" is 16, "F4" is 4); empty if it is unknown.
std::optional<unsigned> safetensors_dtype_bits(std::string_view dtype);

struct SafeTensor {
    std::string name;
    std::string dtype; // as in the file: "F32", "BF16", "I64", ...
    std::vector<uint64_t> shape;
    const std::byte *data = nullptr; // inside the mapping, little-endian, maybe unaligned
    uint64_t size = 0;               // bytes
};

// Format: 8 bytes little-endian header length N, N bytes of JSON, the data. Every tensor's bytes
// lie inside the file, its size is shape x dtype, and the tensors cover the data without holes or
// overlaps; anything else is refused.
class SafetensorsFile {
public:
    // Throws Error with one line that names the file, what is wrong and what to do.
    explicit SafetensorsFile(const std::string &path);
    ~SafetensorsFile();
    SafetensorsFile(SafetensorsFile &&other) noexcept;
    SafetensorsFile(const SafetensorsFile &) = delete;
    SafetensorsFile &operator=(const SafetensorsFile &) = delete;
    SafetensorsFile &operator=(SafetensorsFile &&) = delete;

    const std::string &path() const { return path_; }

    // In the order of their bytes in the file. The data lives as long as this object; reading it
    // raises SIGBUS if somebody truncates the file meanwhile.
    const std::vector<SafeTensor> &tensors() const { return tensors_; }

private:
    std::string path_;
    void *map_ = nullptr;
    size_t map_size_ = 0;
    std::vector<SafeTensor> tensors_;
};

} // namespace tools
