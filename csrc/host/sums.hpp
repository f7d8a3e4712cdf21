// The checksum that kernels/checksum.py defines: of each cell's words and place, added up modulo 2^64.
//
// A place is linear in token, shard and segment, so lists of runs can carry theirs. Must not know views or use
// Python.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "processor.hpp"

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

constexpr std::uint64_t mix(std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
    return x ^ (x >> 31);
}

// `key` is mix(place), advanced by kWordPlace for each word before `at`.
[[gnu::always_inline]] inline std::uint64_t sum_words(const Byte* at, std::int64_t nbytes, std::uint64_t key) {
    std::uint64_t sum = 0;
    const std::int64_t n_words = nbytes / 8;
    for (std::int64_t i = 0; i < n_words; ++i) {
        std::uint64_t word;
        std::memcpy(&word, at + i * 8, 8);
        sum += mix(word ^ (key + static_cast<std::uint64_t>(i) * kWordPlace));
    }
    if (nbytes % 8 != 0) {
        std::uint64_t word = 0;
        std::memcpy(&word, at + n_words * 8, static_cast<std::size_t>(nbytes % 8));
        sum += mix(word ^ (key + static_cast<std::uint64_t>(n_words) * kWordPlace));
    }
    return sum;
}

using SumWords = std::uint64_t (*)(const Byte*, std::int64_t, std::uint64_t);

inline std::uint64_t sum_words_plain(const Byte* at, std::int64_t nbytes, std::uint64_t key) {
    return sum_words(at, nbytes, key);
}

// One binary serves all processors of its kind, so the multiplication of eight words at once is chosen at load time.
#if defined(__x86_64__) && defined(__GNUC__)
[[gnu::target("avx512f,avx512dq,avx512vl")]] inline std::uint64_t sum_words_wide(const Byte* at, std::int64_t nbytes,
                                                                                 std::uint64_t key) {
    return sum_words(at, nbytes, key);
}
inline std::uint64_t sum_words_avx512(const Byte* at, std::int64_t nbytes, std::uint64_t key) {
    return nbytes < 192 ? sum_words(at, nbytes, key) : sum_words_wide(at, nbytes, key);
}
inline SumWords pick_sum_words() {
    return kProcessor.avx512 ? sum_words_avx512 : sum_words_plain;
}
#else
inline SumWords pick_sum_words() {
    return sum_words_plain;
}
#endif

inline const SumWords kSumWords = pick_sum_words();

}  // namespace detail
}  // namespace pdstage
