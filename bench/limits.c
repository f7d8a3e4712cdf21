// The loops that limits.py measures: what a programmer writes for one access, and tunes for one machine.
//
// No plan, no checks, no views: offsets of runs, their one length, and how far ahead to prefetch. Destinations are
// written past the caches, so runs are multiples of 64 bytes and begin a cache line.
#include <immintrin.h>
#include <stdint.h>

typedef unsigned char byte;

#if defined(__AVX512F__)
static inline void copy_line(byte *dst, const byte *src) {
    _mm512_stream_si512((__m512i *)dst, _mm512_loadu_si512(src));
}
#elif defined(__AVX__)
static inline void copy_line(byte *dst, const byte *src) {
    const __m256i low = _mm256_loadu_si256((const __m256i *)src);
    const __m256i high = _mm256_loadu_si256((const __m256i *)(src + 32));
    _mm256_stream_si256((__m256i *)dst, low);
    _mm256_stream_si256((__m256i *)(dst + 32), high);
}
#else
static inline void copy_line(byte *dst, const byte *src) {
    for (int at = 0; at < 64; at += 16)
        _mm_stream_si128((__m128i *)(dst + at), _mm_loadu_si128((const __m128i *)(src + at)));
}
#endif

static inline void fetch(const byte *src, int64_t nbytes) {
    for (int64_t at = 0; at < nbytes; at += 64) _mm_prefetch((const char *)src + at, _MM_HINT_T1);
}

// `n` runs of `nbytes` at `offsets` of `pool` to `dense`, one after the other: `side` of them at a time, the first
// `fetched` bytes of each prefetched `ahead` runs before.
void gather_runs(byte *dense, const byte *pool, const int64_t *offsets, int64_t n, int64_t nbytes, int64_t ahead,
                 int64_t fetched, int64_t side) {
    int64_t run = 0;
    for (; run + side <= n; run += side, dense += side * nbytes) {
        for (int64_t k = 0; k < side && run + ahead + k < n; ++k) fetch(pool + offsets[run + ahead + k], fetched);
        if (side == 1) {
            const byte *const src = pool + offsets[run];
            for (int64_t at = 0; at < nbytes; at += 64) copy_line(dense + at, src + at);
            continue;
        }
        for (int64_t at = 0; at < nbytes; at += 64)
            for (int64_t k = 0; k < side; ++k) copy_line(dense + k * nbytes + at, pool + offsets[run + k] + at);
    }
    for (; run < n; ++run, dense += nbytes)
        for (int64_t at = 0; at < nbytes; at += 64) copy_line(dense + at, pool + offsets[run] + at);
    _mm_sfence();
}

// The inverse: `fetched` bytes of `dense` are prefetched `ahead` runs before.
void scatter_runs(const byte *dense, byte *pool, const int64_t *offsets, int64_t n, int64_t nbytes, int64_t ahead,
                  int64_t fetched, int64_t side) {
    int64_t run = 0;
    for (; run + side <= n; run += side, dense += side * nbytes) {
        if (fetched && run + ahead + side <= n) fetch(dense + ahead * nbytes, side * fetched);
        for (int64_t at = 0; at < nbytes; at += 64)
            for (int64_t k = 0; k < side; ++k) copy_line(pool + offsets[run + k] + at, dense + k * nbytes + at);
    }
    for (; run < n; ++run, dense += nbytes)
        for (int64_t at = 0; at < nbytes; at += 64) copy_line(pool + offsets[run] + at, dense + at);
    _mm_sfence();
}

// From `offsets` of one pool to `offsets` of another.
void copy_runs(byte *peer, const int64_t *peer_offsets, const byte *pool, const int64_t *offsets, int64_t n,
               int64_t nbytes, int64_t ahead, int64_t fetched, int64_t side) {
    int64_t run = 0;
    for (; run + side <= n; run += side) {
        for (int64_t k = 0; k < side && run + ahead + k < n; ++k) fetch(pool + offsets[run + ahead + k], fetched);
        for (int64_t at = 0; at < nbytes; at += 64)
            for (int64_t k = 0; k < side; ++k)
                copy_line(peer + peer_offsets[run + k] + at, pool + offsets[run + k] + at);
    }
    for (; run < n; ++run)
        for (int64_t at = 0; at < nbytes; at += 64)
            copy_line(peer + peer_offsets[run] + at, pool + offsets[run] + at);
    _mm_sfence();
}
