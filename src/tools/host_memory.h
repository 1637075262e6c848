// SPDX-License-Identifier: BSD-3-Clause
// Memory of the host for benchmarks: how much is free, and large blocks of it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tools {

// Bytes that programs can still take without swapping, as the kernel estimates it.
uint64_t available_memory();

// Anonymous pages, all zero and not yet backed by memory.
class Arena {
public:
    Arena() = default;
    explicit Arena(uint64_t size) { resize(size); }
    ~Arena();
    Arena(const Arena &) = delete;
    Arena &operator=(const Arena &) = delete;

    // Other memory of `size` bytes; what was there is lost. Throws Error.
    void resize(uint64_t size);

    std::byte *data() { return data_; }
    const std::byte *data() const { return data_; }
    uint64_t size() const { return size_; }

private:
    void release();

    std::byte *data_ = nullptr;
    uint64_t size_ = 0;
};

} // namespace tools
