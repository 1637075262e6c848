// SPDX-License-Identifier: BSD-3-Clause
// splitmix64 (Steele, Lea, Flood, 2014): the same numbers everywhere, and quick to seed.
#ifndef ZIP_TEST_SPLITMIX64_H
#define ZIP_TEST_SPLITMIX64_H

#include <cstdint>

namespace zip::test {

class SplitMix64 {
public:
    using result_type = uint64_t;
    explicit SplitMix64(uint64_t seed) : state_(seed) {}
    static constexpr uint64_t min() { return 0; }
    static constexpr uint64_t max() { return UINT64_MAX; }
    uint64_t operator()()
    {
        uint64_t z = state_ += 0x9e3779b97f4a7c15;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
        z = (z ^ z >> 27) * 0x94d049bb133111eb;
        return z ^ z >> 31;
    }

private:
    uint64_t state_;
};

} // namespace zip::test
#endif
