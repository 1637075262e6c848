// SPDX-License-Identifier: BSD-3-Clause
// What is fuzzed: functions that take any bytes and abort if a promise is broken. libFuzzer drives
// them (fuzzer_main.cc), and so does GoogleTest, with what libFuzzer has found
// (test_fuzz_found.cc).
#ifndef ZIP_FUZZ_TARGETS_H
#define ZIP_FUZZ_TARGETS_H

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace zip::fuzz {

// Bytes in front of the rest of an input that say what is done with it; see each target.
constexpr size_t CONTROL_BYTES = 4;

// A chunk of any bytes: the decoders and the header's validation.
void fuzz_decode(const uint8_t *data, size_t size);
// Any bytes as values of any type: encoders, decoders and the plan.
void fuzz_round_trip(const uint8_t *data, size_t size);
// Messages, addresses and keys of a peer.
enum WireKind : uint8_t {
    REQUEST,
    GRANT,
    SLOTS, // an acknowledgement or a return
    SEGMENT,
    GET,
    EP_ADDRESS,
    RKEY,
    IFACE_ADDRESS,
    REGION, // bounds
    HEADER,
    REFUSE,
    DECLINE,
    KINDS
};
void fuzz_wire(const uint8_t *data, size_t size);

struct Target {
    const char *name;
    void (*run)(const uint8_t *data, size_t size);
};
constexpr Target TARGETS[] = {
        {"decode", fuzz_decode}, {"round_trip", fuzz_round_trip}, {"wire", fuzz_wire}};

inline void check(bool holds, const char *promise)
{
    if (!holds) {
        fprintf(stderr, "broken: %s\n", promise);
        abort();
    }
}

// Exactly `size` bytes that end where AddressSanitizer watches, `misalignment` bytes off a multiple
// of 16.
class ExactMemory {
public:
    ExactMemory(size_t size, size_t misalignment, uint8_t fill)
        : memory_(new uint8_t[size + misalignment]), begin_(memory_.get() + misalignment)
    {
        if (size > 0)
            memset(begin_, fill, size);
    }
    uint8_t *get() { return begin_; }

private:
    std::unique_ptr<uint8_t[]> memory_;
    uint8_t *begin_;
};

} // namespace zip::fuzz
#endif
