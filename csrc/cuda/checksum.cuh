// The sum over cells, as kernels/checksum.py defines it.
#pragma once

#include "copy.cuh"

namespace pdstage {

constexpr u64 TOKEN = 0x9E3779B97F4A7C15, SHARD = 0xC2B2AE3D27D4EB4F, SEGMENT = 0x165667B19E3779F9;
constexpr u64 WORD = 0xD6E8FEB86659FD93;

__device__ __forceinline__ u64 mix(u64 x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

// The terms of one unit, `offset` bytes into its cell: `bytes` beyond `nbytes` are zeros.
__device__ __forceinline__ u64 terms(u64 seed, i64 token, u32 shard, u32 seg, u32 offset, Bytes16 bytes, u32 nbytes) {
    const u64 place = mix(seed + token * TOKEN + shard * SHARD + seg * SEGMENT) + offset / 8 * WORD;
    const u64 first = mix(bytes.low ^ place);
    return nbytes > 8 ? first + mix(bytes.high ^ (place + WORD)) : first;
}

// The terms of two units.
__device__ __forceinline__ u64 terms(u64 seed, i64 token, u32 shard, u32 seg, u32 offset, Bytes32 bytes, u32) {
    return terms(seed, token, shard, seg, offset, bytes.low, UNIT) +
           terms(seed, token, shard, seg, offset + UNIT, bytes.high, UNIT);
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
