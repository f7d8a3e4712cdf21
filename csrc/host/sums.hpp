// The checksum that kernels/checksum.py defines: of each cell's words and place, added up modulo 2^64.
//
// A place is linear in token, shard and segment, so lists of runs can carry theirs. Must not know views or use
// Python.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace pdstage {

using Byte = unsigned char;

namespace detail {

static_assert(std::endian::native == std::endian::little, "words are little-endian");

inline constexpr std::uint64_t kTokenPlace = 0x9E3779B97F4A7C15U;
inline constexpr std::uint64_t kShardPlace = 0xC2B2AE3D27D4EB4FU;
inline constexpr std::uint64_t kSegmentPlace = 0x165667B19E3779F9U;
inline constexpr std::uint64_t kWordPlace = 0xD6E8FEB86659FD93U;

constexpr std::uint64_t place_of(std::int64_t token, std::int64_t shard, std::int64_t segment) {
    return static_cast<std::uint64_t>(token) * kTokenPlace + static_cast<std::uint64_t>(shard) * kShardPlace +
           static_cast<std::uint64_t>(segment) * kSegmentPlace;
}

constexpr std::uint64_t fold(std::uint64_t x) {
    return x ^ (x >> 32);
}

// The key of a cell's first word; each further one's is kWordPlace more.
constexpr std::uint64_t key_of(std::uint64_t place) {
    return fold(fold(place) * 0xBF58476D1CE4E5B9U);
}

constexpr std::uint64_t term(std::uint64_t keyed) {
    return (keyed & 0xFFFFFFFF) * (keyed >> 32);
}

// `key` is that of the word at `at`.
inline std::uint64_t sum_words(const Byte* at, std::int64_t nbytes, std::uint64_t key) {
    std::uint64_t sum = 0;
#if defined(__SSE2__)
    // Compilers make three multiplications of the one that the loop below needs.
    __m128i sums[2] = {};
    __m128i keys = _mm_add_epi64(_mm_set1_epi64x(static_cast<long long>(key)),
                                 _mm_set_epi64x(static_cast<long long>(kWordPlace), 0));
    const __m128i step = _mm_set1_epi64x(static_cast<long long>(2 * kWordPlace));
    for (; nbytes >= 32; nbytes -= 32)
        for (__m128i& pair : sums) {
            const __m128i words = _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)), keys);
            pair = _mm_add_epi64(pair, _mm_mul_epu32(words, _mm_srli_epi64(words, 32)));
            keys = _mm_add_epi64(keys, step);
            key += 2 * kWordPlace;
            at += 16;
        }
    std::uint64_t both[2];
    _mm_storeu_si128(reinterpret_cast<__m128i*>(both), _mm_add_epi64(sums[0], sums[1]));
    sum = both[0] + both[1];
#endif
    std::uint64_t word = 0;
    for (; nbytes >= 8; nbytes -= 8, at += 8, key += kWordPlace) {
        std::memcpy(&word, at, 8);
        sum += term(word ^ key);
    }
    if (nbytes == 0) return sum;
    word = 0;
    std::memcpy(&word, at, static_cast<std::size_t>(nbytes));
    return sum + term(word ^ key);
}

}  // namespace detail
}  // namespace pdstage
