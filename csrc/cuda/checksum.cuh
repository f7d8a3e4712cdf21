// The sum over cells, as kernels/checksum.py defines it.
#pragma once

#include "copy.cuh"

namespace pdstage {

constexpr u64 TOKEN = 0x9E3779B97F4A7C15, SHARD = 0xC2B2AE3D27D4EB4F, SEGMENT = 0x165667B19E3779F9;
constexpr u64 WORD = 0xD6E8FEB86659FD93, MIX = 0xBF58476D1CE4E5B9;

__device__ __forceinline__ u64 fold(u64 x) {
    return x ^ (x >> 32);
}

// A view's places in one call: the first touched row's first shard and segment, and the way from row to row.
struct Places {
    u64 first, step;

    __device__ __forceinline__ Places(const Group& group, u64 seed, i64 first_token, u32 first_row)
        : first(seed + u64(first_token + i64(first_row) * group.tokens_per_row) * TOKEN + group.first_shard * SHARD),
          step(group.tokens_per_row * TOKEN) {}

    // The key of the word `offset` bytes into a run.
    __device__ __forceinline__ u64 key(const Run& run, u32 offset) const {
        const u64 place = first + run.row * step + run.shard * SHARD + run.seg * SEGMENT;
        return fold(fold(place) * MIX) + offset / 8 * WORD;
    }
};

__device__ __forceinline__ u64 term(u64 word, u64 key) {
    return u64(u32(word ^ key)) * u32((word ^ key) >> 32);
}

// The terms of one unit: `bytes` beyond `nbytes` are zeros.
__device__ __forceinline__ u64 terms(u64 key, Bytes16 bytes, u32 nbytes) {
    const u64 first = term(bytes.low, key);
    return nbytes > 8 ? first + term(bytes.high, key + WORD) : first;
}

// The terms of two units.
__device__ __forceinline__ u64 terms(u64 key, Bytes32 bytes, u32) {
    return terms(key, bytes.low, UNIT) + terms(key + 2 * WORD, bytes.high, UNIT);
}

// Adds the sums of a CTA's threads, one each and a power of two, to the word at `address`. The last barrier is for
// threads whose read of the sum the compiler puts before the test that discards it: racecheck names it.
__device__ __forceinline__ void add_all(u64 address, u64* sums) {
    __syncthreads();
    for (u32 half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0 && sums[0]) add(address, sums[0]);
}

}  // namespace pdstage
