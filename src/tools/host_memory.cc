// SPDX-License-Identifier: BSD-3-Clause
// Memory of the host for benchmarks.
#include "tools/host_memory.h"

#include "tools/error.h"
#include "tools/units.h"

#include <fstream>
#include <string>
#include <sys/mman.h>

namespace tools {

uint64_t available_memory()
{
    std::ifstream in("/proc/meminfo");
    std::string key;
    uint64_t kib = 0;
    std::string rest;
    while (in >> key >> kib && std::getline(in, rest)) {
        if (key == "MemAvailable:") {
            return kib * 1024;
        }
    }
    return UINT64_MAX;
}

Arena::~Arena()
{
    release();
}

void Arena::resize(uint64_t size)
{
    release();
    if (size == 0) {
        return;
    }
    void *map = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) {
        throw Error("no memory for " + format_size(size) + " of data");
    }
    data_ = static_cast<std::byte *>(map);
    size_ = size;
}

void Arena::release()
{
    if (data_ != nullptr) {
        munmap(data_, size_);
        data_ = nullptr;
        size_ = 0;
    }
}

} // namespace tools
