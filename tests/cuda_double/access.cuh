// A double of csrc/cuda/access.cuh for machines without a GPU: the same names, as plain C++.
//
// A CTA's threads are fibers that switch at barriers and run one after the other in between; a warp runs as far as it
// can before the next one begins. Whatever depends on timing, on caches or on warps in step is not seen here;
// misaligned accesses are, and so is a barrier that some threads miss.
#pragma once

#include <bit>
#include <cstring>
#include <type_traits>

#define __device__
#define __forceinline__ inline
#define __global__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __clz std::countl_zero

struct Dim {
    unsigned x;
};
inline Dim threadIdx, blockIdx, blockDim, gridDim;

namespace cpu {

inline bool misaligned, uneven, deadlock;

// Stops this thread at a barrier of its warp, or of its CTA.
void stop(bool at_cta_barrier);

// Runs `one` as every thread of one CTA, from barrier to barrier.
void run_cta(unsigned n_threads, void (*one)());

template <typename T>
T* at(unsigned long long address) {
    misaligned |= address % sizeof(T) != 0;
    return reinterpret_cast<T*>(address);
}

}  // namespace cpu

inline void __syncthreads() {
    cpu::stop(true);
}

// Of all lanes of a warp.
unsigned __shfl_xor_sync(unsigned, unsigned value, unsigned apart);

inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
}

inline unsigned __umulhi(unsigned a, unsigned b) {
    return (unsigned long long)a * b >> 32;
}

namespace pdstage {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

template <typename T>
T min(T a, T b) {
    return a < b ? a : b;
}
template <typename T>
T max(T a, T b) {
    return a < b ? b : a;
}

struct Bytes16 {
    u64 low, high;
};
struct Bytes32 {
    Bytes16 low, high;
};

template <typename T>
T load(u64 address) {
    T value;
    std::memcpy(&value, cpu::at<T>(address), sizeof(T));
    return value;
}

template <typename T>
void store(u64 address, T value) {
    std::memcpy(cpu::at<T>(address), &value, sizeof(T));
}

inline Bytes16 load16(u64 address) {
    return load<Bytes16>(address);
}
inline void store16(u64 address, Bytes16 bytes) {
    store(address, bytes);
}
inline Bytes32 load32(u64 address) {
    return load<Bytes32>(address);
}
inline void store32(u64 address, Bytes32 bytes) {
    store(address, bytes);
}

template <typename T>
T table(const T* at) {
    return load<T>(reinterpret_cast<u64>(at));
}

inline void read_again() {}

inline unsigned char* dynamic_shared() {
    alignas(128) static unsigned char held[256 << 10];
    return held;
}

inline void add(u64 address, u64 value) {
    store(address, load<u64>(address) + value);
}

}  // namespace pdstage
