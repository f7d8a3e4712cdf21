// Numbers from bf16 to fp8 e4m3 and back, as docs/convert.md defines them to the bit.
//
// Two at a time by the instructions of GPUs since sm_89. Others, and tests without a GPU, compute the same with
// integers and correctly rounded float32 operations.
#pragma once

#include "access.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define PDSTAGE_HAS_E4M3
#endif

namespace pdstage {

// Numbered as in kernels/device.py.
constexpr u32 COPY = 0, TENSOR_DIVIDE = 1, TENSOR_BF16 = 2, TOKEN_HEAD = 3, MX_FLOOR = 4, MX_CEIL = 5;
constexpr u32 BOTH = 0, DATA = 1, SCALES = 2;

constexpr u32 MX_BLOCK = 32;
constexpr u32 MAGNITUDE = 0x7FFFFFFF, INFINITE = 0x7F800000, QUIET_NAN = 0x7FC00000;
constexpr u32 E8M0_NAN = 0xFF;

__device__ __forceinline__ float float_of(u32 bits) {
    return __uint_as_float(bits);
}
__device__ __forceinline__ u32 bits_of(float value) {
    return __float_as_uint(value);
}
__device__ __forceinline__ bool is_nan(float value) {
    return (bits_of(value) & MAGNITUDE) > INFINITE;
}

#ifdef PDSTAGE_HAS_E4M3

__device__ __forceinline__ u32 to_e4m3(float low, float high) {
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ void from_e4m3(u32 pair, float& low, float& high) {
    asm("{\n\t"
        ".reg .b32 both;\n\t"
        ".reg .b16 first, second;\n\t"
        "cvt.rn.f16x2.e4m3x2 both, %2;\n\t"
        "mov.b32 {first, second}, both;\n\t"
        "cvt.f32.f16 %0, first;\n\t"
        "cvt.f32.f16 %1, second;\n\t"
        "}"
        : "=f"(low), "=f"(high)
        : "h"(u16(pair)));
}

// The instruction's NaN is 0x7FFF.
__device__ __forceinline__ u32 to_bf16(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    if (is_nan(low)) pair = (pair & 0xFFFF0000) | QUIET_NAN >> 16;
    return is_nan(high) ? (pair & 0xFFFF) | QUIET_NAN : pair;
}

#else

__device__ __forceinline__ u32 to_e4m3(float value) {
    const u32 bits = bits_of(value), magnitude = bits & MAGNITUDE;
    const u32 clipped = min(magnitude, 0x43E00000u);  // 448
    const u32 normal = ((clipped + 0x7FFFF + ((clipped >> 20) & 1)) >> 20) - (120 << 3);
    // Below 2^-6 codes are multiples of 2^-9, to which a sum with 2^14 is rounded.
    const u32 subnormal = bits_of(float_of(clipped) + 16384.0F) - 0x46800000;
    const u32 code = (clipped < 0x3C800000 ? subnormal : normal) | (bits >> 24 & 0x80);
    return magnitude > INFINITE ? 0x7F : code;
}

__device__ __forceinline__ float from_e4m3(u32 code) {
    const u32 magnitude = code & 0x7F;
    const u32 normal = (magnitude << 20) + (120 << 23);
    const u32 subnormal = bits_of(float(magnitude) * 0.001953125F);  // 2^-9
    const u32 bits = (magnitude < 8 ? subnormal : normal) | (code & 0x80) << 24;
    return float_of(magnitude == 0x7F ? QUIET_NAN : bits);
}

__device__ __forceinline__ u32 to_bf16(float value) {
    const u32 bits = bits_of(value);
    return is_nan(value) ? QUIET_NAN >> 16 : (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}

__device__ __forceinline__ u32 to_e4m3(float low, float high) {
    return to_e4m3(low) | to_e4m3(high) << 8;
}

__device__ __forceinline__ void from_e4m3(u32 pair, float& low, float& high) {
    low = from_e4m3(pair & 0xFF);
    high = from_e4m3(pair >> 8 & 0xFF);
}

__device__ __forceinline__ u32 to_bf16(float low, float high) {
    return to_bf16(low) | to_bf16(high) << 16;
}

#endif

// The scale of a token's head, for the bits of its largest magnitude.
__device__ __forceinline__ float head_scale(u32 most) {
    if (most > INFINITE) return float_of(QUIET_NAN);
    const float quotient = float_of(most) / 448.0F;
    return quotient < 1e-6F ? 1e-6F : quotient;
}

// 127 + the exponent of a block, for the bits of its largest magnitude.
template <u32 KIND>
__device__ __forceinline__ u32 mx_scale(u32 most) {
    if (most > INFINITE) return E8M0_NAN;
    if (KIND == MX_FLOOR) return (most >> 23) < 8 ? 0 : (most >> 23) - 8;
    if (most == INFINITE) return 254;
    const u32 least = most < 0x0DA24260 ? 0x0DA24260 : most;  // 1e-30
    return (least >> 23) - 8 + ((least & 0x7FFFFF) > 0x600000);
}

// E8M0 as float32: 2^(byte - 127); the lowest is subnormal.
__device__ __forceinline__ float power_of(u32 byte) {
    return float_of(byte == E8M0_NAN ? QUIET_NAN : byte ? byte << 23 : 0x00400000);
}

}  // namespace pdstage
