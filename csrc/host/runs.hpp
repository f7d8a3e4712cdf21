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
inline constexpr std::int64_t kWideNbytes = 1024;  // of a run that is worth a call, and lines written in part

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

inline __m128i load16(const Byte* src) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(src));
}

inline void stream16(Byte* dst, __m128i word) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)  // they do not see what the intrinsic stores
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst), word);
#else
    _mm_stream_si128(reinterpret_cast<__m128i*>(dst), word);
#endif
}

// A line of each of `kRuns` runs. All are read before any is written, here as in stream_wide: a processor that tells
// addresses apart by their last 12 bits holds a read back that seems to be of what was just written, and runs that are
// copied abreast often lie at the same place of their pages (AMD's before Zen 4: a quarter of the speed).
template <int kRuns>
void stream_lines(Byte* dst, std::int64_t apart, const Byte* const* runs, std::int64_t line) {
    __m128i words[kRuns][4];
    for (int run = 0; run < kRuns; ++run)
        for (int word = 0; word < 4; ++word) words[run][word] = load16(runs[run] + line + word * 16);
    for (int run = 0; run < kRuns; ++run)
        for (int word = 0; word < 4; ++word) stream16(dst + run * apart + line + word * 16, words[run][word]);
}

// Whole lines to 32-byte aligned places, `kRuns` runs abreast: a line of each in turn. Wider stores are for
// runs that are long enough for a call each. One build serves all processors, so that this is asked at run time.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kHasWide = false;
#else
inline const bool kHasWide = kProcessor.avx;
#endif

inline bool goes_wide(const Byte* dst, std::int64_t nbytes) {
    return nbytes >= kWideNbytes && kHasWide && reinterpret_cast<std::uintptr_t>(dst) % 32 == 0;
}

template <int kRuns>
__attribute__((target("avx"), noinline)) void stream_wide(Byte* dst, const Byte* const* runs, std::int64_t nbytes) {
    for (std::int64_t line = 0; line < nbytes; line += kLine) {
        __m256i low[kRuns];
        __m256i high[kRuns];
        for (int run = 0; run < kRuns; ++run) {
            low[run] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(runs[run] + line));
            high[run] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(runs[run] + line + 32));
        }
        for (int run = 0; run < kRuns; ++run) {
            Byte* const to = dst + run * nbytes + line;
            _mm256_stream_si256(reinterpret_cast<__m256i*>(to), low[run]);
            _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 32), high[run]);
        }
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
            for (; at + 4 * kPage <= nbytes; at += 4 * kPage) {
                const Byte* const pages[] = {src + at, src + at + kPage, src + at + 2 * kPage, src + at + 3 * kPage};
                for (std::int64_t line = 0; line < kPage; line += kLine) stream_lines<4>(dst + at, kPage, pages, line);
            }
        if (const std::int64_t lines = (nbytes - at) / kLine * kLine; goes_wide(dst + at, lines)) {
            const Byte* const rest = src + at;
            stream_wide<1>(dst + at, &rest, lines);
            at += lines;
        }
        for (; at + kLine <= nbytes; at += kLine) stream_lines<1>(dst, 0, &src, at);
        for (; at < nbytes; at += 16) stream16(dst + at, load16(src + at));
    }
};

template <std::int64_t kWidth>
struct FixedStreamRun {
    static void copy(Byte* dst, const Byte* src, std::int64_t /*nbytes*/) { StreamRun::copy(dst, src, kWidth); }
};

// Long runs to a `dst` that begins within a line: lines that are written in part are written as ever.
struct InnerRun {
    static void copy(Byte* dst, const Byte* src, std::int64_t nbytes) {
        const auto head = static_cast<std::int64_t>(-reinterpret_cast<std::uintptr_t>(dst) % kLine);
        const std::int64_t stop = head + (nbytes - head) / kLine * kLine;
        AnyRun::copy(dst, src, head);
        StreamRun::copy(dst + head, src + head, stop - head);
        AnyRun::copy(dst + stop, src + stop, nbytes - stop);
    }
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
template <int kRuns>
void stream_lines(Byte* /*dst*/, std::int64_t /*apart*/, const Byte* const* /*runs*/, std::int64_t /*line*/) {}
using StreamRun = AnyRun;
using InnerRun = AnyRun;
template <std::int64_t kWidth>
using FixedStreamRun = FixedRun<kWidth>;
inline void stream_fence() {}

#endif

}  // namespace detail
}  // namespace pdstage
