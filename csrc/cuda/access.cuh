// Every instruction that C++ cannot express: payload accesses with their cache hints, and table reads.
//
// A payload byte is read once and written once, so neither side is worth a line of L1. Reads take the non-coherent
// path, since no launch reads a byte that it writes. For the same reason a store may move across other reads. Tests
// without a GPU put a double of this file first in the include path.
#pragma once

namespace pdstage {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

struct Bytes16 {
    u64 low, high;
};
struct Bytes32 {
    Bytes16 low, high;
};

__device__ __forceinline__ Bytes16 load16(u64 address) {
    Bytes16 bytes;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u64 {%0, %1}, [%2];"
                 : "=l"(bytes.low), "=l"(bytes.high)
                 : "l"(address));
    return bytes;
}

__device__ __forceinline__ void store16(u64 address, Bytes16 bytes) {
    asm volatile("st.global.L1::no_allocate.v2.u64 [%0], {%1, %2};" ::"l"(address), "l"(bytes.low), "l"(bytes.high));
}

// From sm_100 on (PTX ISA 8.8, CUDA 12.9).
__device__ __forceinline__ Bytes32 load32(u64 address) {
    Bytes32 bytes;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u64 {%0, %1, %2, %3}, [%4];"
                 : "=l"(bytes.low.low), "=l"(bytes.low.high), "=l"(bytes.high.low), "=l"(bytes.high.high)
                 : "l"(address));
    return bytes;
}

__device__ __forceinline__ void store32(u64 address, Bytes32 bytes) {
    asm volatile("st.global.L1::no_allocate.v4.u64 [%0], {%1, %2, %3, %4};" ::"l"(address), "l"(bytes.low.low),
                 "l"(bytes.low.high), "l"(bytes.high.low), "l"(bytes.high.high));
}

// Payload narrower than 16 bytes; T is u8, u16, u32 or u64.
template <typename T>
__device__ __forceinline__ T load(u64 address) {
    return __ldg(reinterpret_cast<const T*>(address));
}

template <typename T>
__device__ __forceinline__ void store(u64 address, T value) {
    if constexpr (sizeof(T) == 8) asm volatile("st.global.u64 [%0], %1;" ::"l"(address), "l"(value));
    if constexpr (sizeof(T) == 4) asm volatile("st.global.u32 [%0], %1;" ::"l"(address), "r"(value));
    if constexpr (sizeof(T) == 2) asm volatile("st.global.u16 [%0], %1;" ::"l"(address), "h"(value));
    if constexpr (sizeof(T) == 1) asm volatile("st.global.u8 [%0], %1;" ::"l"(address), "r"(u32(value)));
}

// An entry of an index or a table: constant during a launch and read by many threads, so L1 may keep it.
template <typename T>
__device__ __forceinline__ T table(const T* at) {
    return __ldg(at);
}

// Nothing loaded before is kept for later: the payload needs the registers.
__device__ __forceinline__ void read_again() {
    asm volatile("" ::: "memory");
}

// Shared memory whose size the launch sets.
__device__ __forceinline__ unsigned char* dynamic_shared() {
    extern __shared__ __align__(128) unsigned char held[];
    return held;
}

__device__ __forceinline__ void add(u64 address, u64 value) {
    atomicAdd(reinterpret_cast<u64*>(address), value);
}

}  // namespace pdstage
