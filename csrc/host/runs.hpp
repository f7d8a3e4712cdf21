// Copies one run of bytes between a strided pool and dense staging: the innermost loop of copy.hpp.
//
// memcpy costs a call and a size dispatch per run, which at 256 bytes is a large part of the work; runs of known
// width are copied inline. Large destinations are written past the caches (non-temporal stores): nothing reads them
// back soon, and an ordinary store would first fetch each line from memory. Must not know views or items, or use
// Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "processor.hpp"

namespace pdstage {

using Byte = unsigned char;

namespace detail {

inline constexpr std::int64_t kLine = 64;

// Bytes to read are prefetched to L2 only, since L1's few fill buffers are busy with the copy itself. Bytes to write
// are prefetched to L1.
template <bool kRead>
void prefetch(const Byte* address, std::int64_t nbytes) {
    const auto skew = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(address) % kLine);
    for (std::int64_t at = -skew; at < nbytes; at += kLine) {
        if constexpr (kRead) {
            __builtin_prefetch(address + at, 0, 2);
        } else {
            __builtin_prefetch(address + at, 1, 3);
        }
    }
}

// Runs of `kWidth` bytes, known to the compiler.
template <std::int64_t kWidth>
struct FixedRun {
    static void copy(Byte* dst, const Byte* src, std::int64_t /*nbytes*/) { __builtin_memcpy(dst, src, kWidth); }
};

// Runs of any multiple of 16 bytes, in line.
struct WideRun {
    static void copy(Byte* dst, const Byte* src, std::int64_t nbytes) {
        for (std::int64_t at = 0; at < nbytes; at += 16) __builtin_memcpy(dst + at, src + at, 16);
    }
};

struct AnyRun {
    static void copy(Byte* dst, const Byte* src, std::int64_t nbytes) {
        std::memcpy(dst, src, static_cast<std::size_t>(nbytes));
    }
};

#if defined(__SSE2__)

inline constexpr bool kCanStream = true;

inline void stream16(Byte* dst, const Byte* src) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)  // they do not see what the intrinsic stores
    std::memcpy(dst, src, 16);
#else
    _mm_stream_si128(reinterpret_cast<__m128i*>(dst), _mm_loadu_si128(reinterpret_cast<const __m128i*>(src)));
#endif
}

inline void stream_line(Byte* dst, const Byte* src) {
    stream16(dst, src);
    stream16(dst + 16, src + 16);
    stream16(dst + 32, src + 32);
    stream16(dst + 48, src + 48);
}

// Whole lines to 32-byte aligned places, `kRuns` runs abreast: a line of each in turn. Wider stores are for
// runs that are long enough for a call each. One build serves all processors, so that this is asked at run time.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kHasWide = false;
#else
inline const bool kHasWide = kProcessor.avx;
#endif
inline constexpr std::int64_t kWideNbytes = 1024;

inline bool goes_wide(const Byte* dst, std::int64_t nbytes) {
    return nbytes >= kWideNbytes && kHasWide && reinterpret_cast<std::uintptr_t>(dst) % 32 == 0;
}

template <int kRuns>
__attribute__((target("avx"), noinline)) void stream_wide(Byte* dst, const Byte* const* runs, std::int64_t nbytes) {
    for (std::int64_t line = 0; line < nbytes; line += kLine)
        for (int run = 0; run < kRuns; ++run) {
            Byte* const to = dst + run * nbytes + line;
            const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(runs[run] + line));
            const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(runs[run] + line + 32));
            _mm256_stream_si256(reinterpret_cast<__m256i*>(to), low);
            _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 32), high);
        }
}

// Whether the processor reads one long run faster than four pages of it at a time, which its prefetchers would follow
// separately. AMD's do; `limits.streaming_copy` of the bench tries both. glibc's memcpy takes four pages at a time
// above a size of hundreds of MiB.
inline const bool kInOrder = kProcessor.amd;

// Runs of any multiple of 16 bytes to a 16-byte aligned `dst`, past the caches.
struct StreamRun {
    static constexpr std::int64_t kPage = 4096;

    static void copy(Byte* dst, const Byte* src, std::int64_t nbytes) {
        std::int64_t at = 0;
        if (nbytes >= 4 * kPage && !kInOrder)
            for (; at + 4 * kPage <= nbytes; at += 4 * kPage)
                for (std::int64_t line = at; line < at + kPage; line += kLine)
                    for (std::int64_t page = 0; page < 4 * kPage; page += kPage)
                        stream_line(dst + page + line, src + page + line);
        if (const std::int64_t lines = (nbytes - at) / kLine * kLine; goes_wide(dst + at, lines)) {
            const Byte* const rest = src + at;
            stream_wide<1>(dst + at, &rest, lines);
            at += lines;
        }
        for (; at + kLine <= nbytes; at += kLine) stream_line(dst + at, src + at);
        for (; at < nbytes; at += 16) stream16(dst + at, src + at);
    }
};

template <std::int64_t kWidth>
struct FixedStreamRun {
    static void copy(Byte* dst, const Byte* src, std::int64_t /*nbytes*/) { StreamRun::copy(dst, src, kWidth); }
};

inline void stream_fence() {
    _mm_sfence();
}

#else

inline constexpr bool kCanStream = false;
inline constexpr bool kInOrder = false;
inline constexpr bool goes_wide(const Byte* /*dst*/, std::int64_t /*nbytes*/) {
    return false;
}
template <int kRuns>
void stream_wide(Byte* /*dst*/, const Byte* const* /*runs*/, std::int64_t /*nbytes*/) {}
inline void stream_line(Byte* dst, const Byte* src) {
    std::memcpy(dst, src, kLine);
}
using StreamRun = AnyRun;
template <std::int64_t kWidth>
using FixedStreamRun = FixedRun<kWidth>;
inline void stream_fence() {}

#endif

}  // namespace detail
}  // namespace pdstage
