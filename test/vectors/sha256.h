// SPDX-License-Identifier: BSD-3-Clause
// SHA-256 (FIPS 180-4), for the index of the vectors: everybody has sha256sum at hand.
#ifndef ZIP_TEST_SHA256_H
#define ZIP_TEST_SHA256_H

#include <bit>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

namespace zip::test {

// In hexadecimal digits.
inline std::string sha256(const std::vector<uint8_t> &data)
{
    // fractional parts of the cube roots of the first 64 primes
    static constexpr uint32_t K[64] = {
            0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4,
            0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe,
            0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f,
            0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7,
            0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc,
            0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b,
            0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116,
            0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
            0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7,
            0xc67178f2};
    // and of the square roots of the first 8
    uint32_t hash[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                        0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    std::vector<uint8_t> padded = data;
    padded.push_back(0x80);
    while (padded.size() % 64 != 56)
        padded.push_back(0);
    for (int shift = 56; shift >= 0; shift -= 8)
        padded.push_back(uint8_t(uint64_t(data.size()) * 8 >> shift));

    for (size_t at = 0; at < padded.size(); at += 64) {
        uint32_t w[64];
        for (size_t i = 0; i < 16; ++i)
            w[i] = uint32_t(padded[at + 4 * i]) << 24 | uint32_t(padded[at + 4 * i + 1]) << 16 |
                   uint32_t(padded[at + 4 * i + 2]) << 8 | padded[at + 4 * i + 3];
        for (size_t i = 16; i < 64; ++i) {
            const uint32_t a = w[i - 15], b = w[i - 2];
            w[i] = w[i - 16] + w[i - 7] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ a >> 3) +
                   (std::rotr(b, 17) ^ std::rotr(b, 19) ^ b >> 10);
        }
        uint32_t s[8];
        std::copy(hash, hash + 8, s);
        for (size_t i = 0; i < 64; ++i) {
            const uint32_t one = s[7] + K[i] + w[i] + ((s[4] & s[5]) ^ (~s[4] & s[6])) +
                                 (std::rotr(s[4], 6) ^ std::rotr(s[4], 11) ^ std::rotr(s[4], 25));
            const uint32_t two = ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2])) +
                                 (std::rotr(s[0], 2) ^ std::rotr(s[0], 13) ^ std::rotr(s[0], 22));
            for (size_t k = 7; k > 0; --k)
                s[k] = s[k - 1];
            s[4] += one;
            s[0] = one + two;
        }
        for (size_t k = 0; k < 8; ++k)
            hash[k] += s[k];
    }
    std::string digits;
    for (uint32_t word : hash) {
        char text[9];
        snprintf(text, sizeof(text), "%08x", word);
        digits += text;
    }
    return digits;
}

} // namespace zip::test
#endif
