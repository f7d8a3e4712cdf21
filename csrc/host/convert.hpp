// One cell from bf16 to fp8 e4m3 and back, in the formats that pdstage/plan/convert.py names and docs/convert.md
// defines.
//
// Plain arithmetic on integers and correctly rounded float32 operations, so that every processor gives the same
// bits; loops are written for the compiler to vectorise. Must not use views, plans or Python.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "processor.hpp"

namespace pdstage {

using Byte = unsigned char;

// Numbered as in kernels/host_convert.py.
enum class Kind : std::int64_t { kCopy, kTensorDivide, kTensorBf16, kTokenHead, kMxFloor, kMxCeil };
enum class Holds : std::int64_t { kBoth, kData, kScales };

namespace detail {

static_assert(std::endian::native == std::endian::little, "bf16 is the upper half of a little-endian float");

inline constexpr std::int64_t kMxBlock = 32;
inline constexpr std::uint32_t kInfinity = 0x7F800000;
inline constexpr std::uint32_t kQuietNan = 0x7FC00000;
inline constexpr Byte kE4m3Nan = 0x7F;
inline constexpr Byte kE8m0Nan = 0xFF;

inline float float_of(std::uint32_t bits) {
    return std::bit_cast<float>(bits);
}
inline std::uint32_t bits_of(float value) {
    return std::bit_cast<std::uint32_t>(value);
}

inline float load_bf16(const Byte* at) {
    std::uint16_t bits;
    std::memcpy(&bits, at, sizeof(bits));
    return float_of(std::uint32_t{bits} << 16);
}

// Selects one of two by masks: a conditional around float arithmetic, which may trap, would prevent vectorisation.
inline std::uint32_t choose(bool which, std::uint32_t yes, std::uint32_t no) {
    const std::uint32_t mask = 0U - static_cast<std::uint32_t>(which);
    return (yes & mask) | (no & ~mask);
}

// To the nearest, ties to even.
inline std::uint32_t to_bf16(float value) {
    const std::uint32_t bits = bits_of(value);
    const std::uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return choose((bits & 0x7FFFFFFF) > kInfinity, kQuietNan >> 16, rounded);
}

// To the nearest, ties to even; saturated at 448.
inline std::uint32_t to_e4m3(float value) {
    const std::uint32_t bits = bits_of(value);
    const std::uint32_t magnitude = bits & 0x7FFFFFFF;
    const std::uint32_t most = bits_of(448.0F);
    const std::uint32_t clipped = choose(magnitude < most, magnitude, most);
    const std::uint32_t normal = ((clipped + 0x7FFFF + ((clipped >> 20) & 1)) >> 20) - (120 << 3);
    // Below 2^-6 codes are multiples of 2^-9, to which a sum with 2^14 is rounded.
    const std::uint32_t subnormal = bits_of(float_of(clipped) + 16384.0F) - bits_of(16384.0F);
    const std::uint32_t code = choose(clipped < bits_of(0x1p-6F), subnormal, normal) | (bits >> 24 & 0x80);
    return choose(magnitude > kInfinity, kE4m3Nan, code);
}

inline float from_e4m3(std::uint32_t code) {
    const std::uint32_t magnitude = code & 0x7F;
    const std::uint32_t normal = (magnitude << 20) + (120 << 23);
    const std::uint32_t subnormal = bits_of(static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-9F);
    const std::uint32_t bits = choose(magnitude < 8, subnormal, normal) | (code & 0x80) << 24;
    return float_of(choose(magnitude == 0x7F, kQuietNan, bits));
}

// The largest magnitude of `n` values; a NaN is larger than any.
inline float greatest(const Byte* values, std::int64_t n) {
    std::int16_t most = 0;
    for (std::int64_t i = 0; i < n; ++i) {
        std::int16_t bits;
        std::memcpy(&bits, values + 2 * i, sizeof(bits));
        bits = static_cast<std::int16_t>(bits & 0x7FFF);
        most = std::max(most, bits);
    }
    return float_of(static_cast<std::uint32_t>(most) << 16);
}

inline bool is_nan(float value) {
    return (bits_of(value) & 0x7FFFFFFF) > kInfinity;
}

inline void multiply(const Byte* values, std::int64_t n, float factor, Byte* data) {
    for (std::int64_t i = 0; i < n; ++i) data[i] = static_cast<Byte>(to_e4m3(load_bf16(values + 2 * i) * factor));
}

inline void divide(const Byte* values, std::int64_t n, float divisor, Byte* data) {
    for (std::int64_t i = 0; i < n; ++i) data[i] = static_cast<Byte>(to_e4m3(load_bf16(values + 2 * i) / divisor));
}

inline void multiply_in_bf16(const Byte* values, std::int64_t n, float factor, Byte* data) {
    for (std::int64_t i = 0; i < n; ++i)
        data[i] = static_cast<Byte>(to_e4m3(float_of(to_bf16(load_bf16(values + 2 * i) * factor) << 16)));
}

inline void decode_values(const Byte* data, std::int64_t n, float scale, Byte* values) {
    for (std::int64_t i = 0; i < n; ++i) {
        const auto value = static_cast<std::uint16_t>(to_bf16(from_e4m3(data[i]) * scale));
        std::memcpy(values + 2 * i, &value, sizeof(value));
    }
}

inline float token_head_scale(const Byte* values, std::int64_t n) {
    const float most = greatest(values, n);
    return is_nan(most) ? float_of(kQuietNan) : std::max(most / 448.0F, 1e-6F);
}

// 127 + the block's exponent: floor(log2(greatest)) - 8, or the least one with which `greatest` does not exceed 448.
inline Byte mx_scale(Kind kind, const Byte* values) {
    const float most = greatest(values, kMxBlock);
    if (is_nan(most)) return kE8m0Nan;
    if (kind == Kind::kMxFloor)
        return static_cast<Byte>(std::max(0, static_cast<std::int32_t>(bits_of(most) >> 23) - 8));
    const std::uint32_t bits = bits_of(std::max(most, 1e-30F));
    if (bits == kInfinity) return 254;
    return static_cast<Byte>((bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000 ? 1 : 0));
}

// 2^(byte - 127); the lowest is subnormal.
inline float power_of(std::int32_t byte) {
    return float_of(byte > 0 ? static_cast<std::uint32_t>(byte) << 23 : 0x00400000);
}

inline std::int64_t scales_nbytes(Kind kind, std::int64_t n) {
    return kind == Kind::kTokenHead ? 4 : kind == Kind::kMxFloor || kind == Kind::kMxCeil ? n / kMxBlock : 0;
}

inline void encode_mx(Kind kind, const Byte* values, std::int64_t n, Byte* data, Byte* scales) {
    for (std::int64_t block = 0; block * kMxBlock < n; ++block) {
        const Byte* const at = values + 2 * block * kMxBlock;
        const Byte byte = mx_scale(kind, at);
        if (scales != nullptr) scales[block] = byte;
        if (data != nullptr)
            multiply(at, kMxBlock, byte == kE8m0Nan ? float_of(kQuietNan) : power_of(254 - byte),
                     data + block * kMxBlock);
    }
}

// `n` bf16 values as one cell. `scale` is for kinds with one scale per tensor.
inline void encode(Kind kind, Holds holds, float scale, const Byte* values, std::int64_t n, Byte* cell) {
    Byte* const data = holds == Holds::kScales ? nullptr : cell;
    Byte* const scales = holds == Holds::kData ? nullptr : holds == Holds::kScales ? cell : cell + n;
    switch (kind) {
        case Kind::kCopy:
            return;
        case Kind::kTensorDivide:
            return divide(values, n, scale, cell);
        case Kind::kTensorBf16:
            return multiply_in_bf16(values, n, 1.0F / scale, cell);
        case Kind::kTokenHead: {
            const float own = token_head_scale(values, n);
            if (scales != nullptr) std::memcpy(scales, &own, sizeof(own));
            if (data != nullptr) multiply(values, n, 1.0F / own, data);
            return;
        }
        case Kind::kMxFloor:
        case Kind::kMxCeil:
            return encode_mx(kind, values, n, data, scales);
    }
}

// The inverse: `data` and `scales` of `n` values, wherever each lies.
inline void decode(Kind kind, float scale, const Byte* data, const Byte* scales, std::int64_t n, Byte* values) {
    if (kind == Kind::kMxFloor || kind == Kind::kMxCeil) {
        for (std::int64_t block = 0; block * kMxBlock < n; ++block) {
            const Byte byte = scales[block];
            decode_values(data + block * kMxBlock, kMxBlock, byte == kE8m0Nan ? float_of(kQuietNan) : power_of(byte),
                          values + 2 * block * kMxBlock);
        }
        return;
    }
    if (kind == Kind::kTokenHead) std::memcpy(&scale, scales, sizeof(scale));
    decode_values(data, n, scale, values);
}

// One binary serves all processors of its kind, so wider vectors are chosen at load time, as in sums.hpp.
#if defined(__x86_64__) && defined(__GNUC__)
[[gnu::target("avx2"), gnu::flatten]] inline void encode_avx2(Kind kind, Holds holds, float scale, const Byte* values,
                                                              std::int64_t n, Byte* cell) {
    encode(kind, holds, scale, values, n, cell);
}
[[gnu::target("avx2"), gnu::flatten]] inline void decode_avx2(Kind kind, float scale, const Byte* data,
                                                              const Byte* scales, std::int64_t n, Byte* values) {
    decode(kind, scale, data, scales, n, values);
}
[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl"), gnu::flatten]] inline void encode_avx512(
    Kind kind, Holds holds, float scale, const Byte* values, std::int64_t n, Byte* cell) {
    encode(kind, holds, scale, values, n, cell);
}
[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl"), gnu::flatten]] inline void decode_avx512(
    Kind kind, float scale, const Byte* data, const Byte* scales, std::int64_t n, Byte* values) {
    decode(kind, scale, data, scales, n, values);
}
inline const auto kEncode = kProcessor.avx512 ? encode_avx512 : kProcessor.avx2 ? encode_avx2 : encode;
inline const auto kDecode = kProcessor.avx512 ? decode_avx512 : kProcessor.avx2 ? decode_avx2 : decode;
#else
inline const auto kEncode = encode;
inline const auto kDecode = decode;
#endif

}  // namespace detail
}  // namespace pdstage
