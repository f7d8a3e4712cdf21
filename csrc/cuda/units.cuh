// Units in accesses of one width: two units at once, one, or, if address or length does not allow 16 bytes, one unit
// of up to 16 bytes in several accesses.
#pragma once

#include "copy.cuh"

namespace pdstage {

// What an access of so many bytes loads.
template <u32 NBYTES>
__device__ __forceinline__ auto accessed() {
    if constexpr (NBYTES == 32) return Bytes32();
    if constexpr (NBYTES == 16) return Bytes16();
    if constexpr (NBYTES == 8) return u64();
    if constexpr (NBYTES == 4) return u32();
    if constexpr (NBYTES == 2) return u16();
    if constexpr (NBYTES == 1) return u8();
}

// A thread's data of as many units as an access of T covers, at least one.
template <typename T>
struct Held {
    using Bytes = Bytes16;
};

template <>
struct Held<Bytes32> {
    using Bytes = Bytes32;
};

// `nbytes` bytes, 1 to `MOST`, in accesses of T. Bytes beyond them are zeros.
template <typename T, u32 MOST = UNIT>
__device__ __forceinline__ typename Held<T>::Bytes load_unit(u64 address, u32 nbytes) {
    u64 words[2] = {0, 0};
#pragma unroll
    for (u32 at = 0; at < MOST; at += sizeof(T))
        if (at < nbytes) words[at / 8] |= u64(load<T>(address + at)) << (at % 8 * 8);
    return {words[0], words[1]};
}

template <>
__device__ __forceinline__ Bytes16 load_unit<Bytes16>(u64 address, u32) {
    return load16(address);
}

template <>
__device__ __forceinline__ Bytes32 load_unit<Bytes32>(u64 address, u32) {
    return load32(address);
}

template <typename T, u32 MOST = UNIT>
__device__ __forceinline__ void store_unit(u64 address, typename Held<T>::Bytes bytes, u32 nbytes) {
#pragma unroll
    for (u32 at = 0; at < MOST; at += sizeof(T))
        if (at < nbytes) store<T>(address + at, T((at < 8 ? bytes.low : bytes.high) >> (at % 8 * 8)));
}

template <>
__device__ __forceinline__ void store_unit<Bytes16>(u64 address, Bytes16 bytes, u32) {
    store16(address, bytes);
}

template <>
__device__ __forceinline__ void store_unit<Bytes32>(u64 address, Bytes32 bytes, u32) {
    store32(address, bytes);
}

}  // namespace pdstage
