// A double of csrc/cuda/access.cuh for machines without a GPU: the same names, as plain C++.
//
// A CTA's threads are fibers that switch at barriers and run one after the other in between; a warp runs as far as it
// can before the next one begins. Whatever depends on timing, on caches or on warps in step is not seen here;
// misaligned accesses are, and so is a barrier that some threads miss.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define __maxnreg__(...)

struct Dim {
    unsigned x;
};
inline Dim threadIdx, blockIdx, blockDim, gridDim;

namespace cpu {

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[64 << 10]};
    bool done = false;
    bool at_cta_barrier = false;
};
inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline void (*body)();
inline bool misaligned, uneven, deadlock;

inline void enter() {
    body();
    fibers[threadIdx.x].done = true;
    swapcontext(&fibers[threadIdx.x].context, &scheduler);
}

// Stops this thread at a barrier of its warp, or of its CTA.
inline void stop(bool at_cta_barrier) {
    const unsigned me = threadIdx.x;
    fibers[me].at_cta_barrier = at_cta_barrier;
    swapcontext(&fibers[me].context, &scheduler);
    threadIdx.x = me;
}

// Runs a warp until its threads end or are all at a barrier of the CTA; whether they ended.
inline bool run_warp(unsigned first, unsigned end) {
    for (;;) {
        unsigned ended = 0, waiting = 0;
        for (unsigned i = first; i < end; i++) {
            threadIdx.x = i;
            swapcontext(&scheduler, &fibers[i].context);
            ended += fibers[i].done;
            waiting += !fibers[i].done && fibers[i].at_cta_barrier;
        }
        uneven |= (ended && ended != end - first) || (waiting && waiting != end - first);
        if (ended || waiting) return ended;
    }
}

// Runs `one` as every thread of one CTA, from barrier to barrier.
inline void run_cta(unsigned n_threads, void (*one)()) {
    body = one;
    fibers = std::vector<Fiber>(n_threads);
    for (auto& fiber : fibers) {
        getcontext(&fiber.context);
        fiber.context.uc_stack = {fiber.stack.get(), 0, 64 << 10};
        makecontext(&fiber.context, enter, 0);
    }
    for (unsigned ended = 0; !ended && !uneven;) {
        for (unsigned first = 0; first < n_threads; first += 32)
            ended += 32 * run_warp(first, std::min(first + 32, n_threads));
        uneven |= ended && ended < n_threads;
    }
}

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
inline unsigned __shfl_xor_sync(unsigned, unsigned value, unsigned apart) {
    static unsigned exchanged[1024];
    const unsigned me = threadIdx.x;
    exchanged[me] = value;
    cpu::stop(false);
    const unsigned other = exchanged[me ^ apart];
    cpu::stop(false);
    return other;
}

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

using std::max;
using std::min;
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
