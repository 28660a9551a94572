// The storage types of the ops and their conversion to and from float, the type all math is done
// in. No XLA headers: kernels include this.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

// Into the caller always: CPU kernels are compiled for several instruction sets, and a function of
// its own would be one copy for all of them, of whichever the linker takes.
#ifdef __CUDACC__
#define XLA_GPU_INLINE __host__ __device__ __attribute__((always_inline)) inline
#else
#define XLA_GPU_INLINE __attribute__((always_inline)) inline
#endif

// Before such a function that kernels on a GPU call as well.
#ifdef __CUDACC__
#define XLA_GPU_HOST_DEVICE __host__ __device__
#else
#define XLA_GPU_HOST_DEVICE __attribute__((always_inline))
#endif

namespace xla_gpu {

enum class DType {
  kFloat32,
  kFloat16,
  kBFloat16,
  kFloat8E4M3,
  kFloat8E5M2,
  kInt8,
  kInt4,
  kFloat4E2M1,
  kFloat8E8M0,  // of scales alone
};

// The types of 8 and 4 bits are for caches; k_scale and v_scale scale them.
XLA_GPU_HOST_DEVICE inline bool IsQuantized(DType dtype) { return dtype >= DType::kFloat8E4M3; }

// Two numbers of these types are an element of an array: the first in the lower half of a byte.
XLA_GPU_HOST_DEVICE inline bool Is4Bit(DType dtype) {
  return dtype == DType::kInt4 || dtype == DType::kFloat4E2M1;
}

// Bytes of an element of an array.
XLA_GPU_HOST_DEVICE inline int64_t SizeOf(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : IsQuantized(dtype) ? 1 : 2;
}

// Elements of a row of so many numbers.
XLA_GPU_HOST_DEVICE inline int64_t ElementsOf(DType dtype, int64_t numbers) {
  return Is4Bit(dtype) ? (numbers + 1) / 2 : numbers;
}

// IEEE 754 binary16, as bits.
struct Half {
  uint16_t bits;
};

// The upper half of an IEEE 754 binary32, as bits.
struct BFloat16 {
  uint16_t bits;
};

// The 8-bit floats of the Open Compute Project, as bits: E4M3 has no infinity and one NaN, and its
// largest number is 448; E5M2 is the upper half of a binary16.
struct Float8E4M3 {
  uint8_t bits;
};
struct Float8E5M2 {
  uint8_t bits;
};

// A power of two, from 2^-127 to 2^127, or NaN: the exponent of a binary32.
struct Float8E8M0 {
  uint8_t bits;
};

// Calls f(T()) for the type T of a query, of keys or of values.
template <typename F>
auto WithTensorType(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(float());
    case DType::kFloat16:
      return f(Half());
    default:
      return f(BFloat16());
  }
}

// Two 4-bit integers in two's complement, from -8 to 7: the first in the lower half of the byte.
struct Int4Pair {
  uint8_t bits;
};

// What the codes of a type of 4 bits stand for: whole numbers, or multiples of kUnit.
struct Int4Codes {
  static constexpr int8_t kNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
};
struct Float4E2M1Codes {
  static constexpr float kUnit = 0.5f;
  static constexpr int8_t kNumbers[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
};

// A number of a cache with int4, as kernels on a GPU expand it. K and V are each of int4 or int8.
struct Int4OrInt8 {
  int8_t number;
};

// A byte of a cache whose K or V kernels on a GPU multiply by scales of groups, or whose codes are
// fractions. K and V are each of any type of 8 or 4 bits.
struct ScaledByte {
  uint8_t bits;
};

// The same where the product of each number and its scale has 16 bits. A GPU's kernels hold the
// products in KV tiles. K and V are each of 4 bits or int8.
struct ScaledCode {
  uint8_t bits;
};

template <typename T>
inline constexpr bool kIs8Bit = sizeof(T) == 1;

template <typename T>
inline constexpr bool kIsInteger = std::is_integral_v<T> || std::is_same_v<T, Int4OrInt8>;

template <typename To, typename From>
XLA_GPU_HOST_DEVICE inline To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From), "BitCast needs types of one size");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

XLA_GPU_INLINE float ToFloat(float x) { return x; }

XLA_GPU_HOST_DEVICE inline float ToFloat(BFloat16 x) {
  return BitCast<float>(static_cast<uint32_t>(x.bits) << 16);
}

// The exponent is rebased by a multiplication, which is exact and turns binary16's subnormals into
// normal floats.
XLA_GPU_INLINE float ToFloat(Half x) {
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fff) << 13;
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  const uint32_t rebased = BitCast<uint32_t>(BitCast<float>(magnitude) * 0x1p112f);
  const uint32_t special = magnitude | 0x7f800000u;  // infinity or NaN
  const uint32_t finite = magnitude < 0x0f800000u;
  return BitCast<float>(sign | (finite ? rebased : special));
}

// The same number as a binary16, of E4M3 2^-8 of it.
XLA_GPU_HOST_DEVICE inline Half AsHalf(Float8E5M2 x) {
  return {static_cast<uint16_t>(x.bits << 8)};
}
XLA_GPU_HOST_DEVICE inline Half AsHalf(Float8E4M3 x) {
  const uint32_t magnitude = x.bits & 0x7f, sign = x.bits & 0x80;
  return {static_cast<uint16_t>(sign << 8 | (magnitude == 0x7f ? 0x7e00 : magnitude << 7))};
}

XLA_GPU_INLINE float ToFloat(Float8E4M3 x) { return ToFloat(AsHalf(x)) * 256.0f; }

XLA_GPU_INLINE float ToFloat(Float8E5M2 x) { return ToFloat(AsHalf(x)); }

XLA_GPU_HOST_DEVICE inline float ToFloat(Float8E8M0 x) {
  const uint32_t special = x.bits == 0 ? 0x00400000 : 0x7fc00000;  // 2^-127 is subnormal
  return BitCast<float>(x.bits % 255 == 0 ? special : uint32_t{x.bits} << 23);
}

XLA_GPU_INLINE float ToFloat(int8_t x) { return x; }

XLA_GPU_INLINE float ToFloat(Int4OrInt8 x) { return x.number; }

// Two numbers of 4 bits as two of 8, the first in the lower byte.
XLA_GPU_HOST_DEVICE inline uint16_t Expand(Int4Pair x) {
  const uint32_t halves = (x.bits | x.bits << 4) & 0x0f0f;
  return static_cast<uint16_t>(halves | (halves & 0x0808) * 0x1e);  // 8 * 0x1e is 0xf0
}

// The bits of infinity, or of a NaN where there is none. A NaN has larger ones, but for the sign.
XLA_GPU_HOST_DEVICE constexpr uint16_t InfinityBits(BFloat16) { return 0x7f80; }

XLA_GPU_HOST_DEVICE constexpr uint16_t InfinityBits(Half) { return 0x7c00; }

XLA_GPU_HOST_DEVICE constexpr uint8_t InfinityBits(Float8E4M3) { return 0x7f; }

XLA_GPU_HOST_DEVICE constexpr uint8_t InfinityBits(Float8E5M2) { return 0x7c; }

XLA_GPU_HOST_DEVICE inline bool IsFinite(BFloat16 x) { return (x.bits & 0x7fff) < 0x7f80; }

XLA_GPU_HOST_DEVICE inline bool IsFinite(Half x) { return (x.bits & 0x7fff) < 0x7c00; }

XLA_GPU_HOST_DEVICE inline bool IsFinite(Float8E4M3 x) { return (x.bits & 0x7f) != 0x7f; }

XLA_GPU_HOST_DEVICE inline bool IsFinite(Float8E5M2 x) { return (x.bits & 0x7c) != 0x7c; }

XLA_GPU_HOST_DEVICE inline bool IsFinite(int8_t) { return true; }

XLA_GPU_INLINE void FromFloat(float x, float* to) { *to = x; }

// Rounds to nearest, ties to even; a NaN stays a (quiet) NaN.
XLA_GPU_INLINE void FromFloat(float x, BFloat16* to) {
  const uint32_t bits = BitCast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x0040;
  to->bits = static_cast<uint16_t>(x != x ? quiet_nan : rounded);
}

// Rounds to nearest, ties to even; overflows to infinity; a NaN stays a (quiet) NaN.
XLA_GPU_INLINE void FromFloat(float x, Half* to) {
  const uint32_t bits = BitCast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000) {
    half = 0x7e00 | ((magnitude >> 13) & 0x03ff);
  } else if (magnitude >= 0x477ff000) {  // 65520, halfway between the largest half and the next
    half = 0x7c00;
  } else if (magnitude < 0x38800000) {  // 2^-14: below it the half is subnormal
    // Adding 0.5 puts the half's last place at the float's last place, so the addition rounds.
    half = BitCast<uint32_t>(BitCast<float>(magnitude) + 0.5f) - BitCast<uint32_t>(0.5f);
  } else {
    half = (magnitude - 0x38000000 + 0x0fff + ((magnitude >> 13) & 1)) >> 13;
  }
  to->bits = static_cast<uint16_t>(sign | half);
}

// Rounds to a power of two, up or down; a NaN stays one. There is no 0: 2^-127 is the least.
XLA_GPU_HOST_DEVICE inline void FromFloat(float x, bool rounds_up, Float8E8M0* to) {
  const uint32_t bits = BitCast<uint32_t>(x) & 0x7fffffff;
  const bool is_above = rounds_up && (bits < 0x00800000 ? bits > 0x00400000 : bits << 9 != 0);
  const uint32_t exponent = (bits >> 23) + is_above;
  to->bits = static_cast<uint8_t>(x != x ? 255 : exponent < 254 ? exponent : 254);
}

// To a float of 8 bits with kMantissaBits of mantissa, whose least normal number is
// 2^kLeastExponent: rounded to nearest, ties to even; what is larger than the largest becomes that;
// a NaN the bits kNaN.
template <int kMantissaBits, int kLeastExponent, uint32_t kLargest, uint32_t kNaN>
XLA_GPU_HOST_DEVICE inline uint8_t RoundTo8Bits(float x) {
  const uint32_t bits = BitCast<uint32_t>(x), sign = bits >> 24 & 0x80;
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<uint8_t>(sign | kNaN);
  constexpr int kShift = 23 - kMantissaBits;
  constexpr uint32_t kLeastNormal = static_cast<uint32_t>(127 + kLeastExponent) << 23;
  uint32_t rounded;
  if (magnitude < kLeastNormal) {
    // Adding this puts the result's last place at the float's last place, so the addition rounds.
    constexpr uint32_t kRounder = static_cast<uint32_t>(127 + kLeastExponent + kShift) << 23;
    const float sum = BitCast<float>(magnitude) + BitCast<float>(kRounder);
    rounded = BitCast<uint32_t>(sum) - kRounder;
  } else {
    const uint32_t to_even = (uint32_t{1} << (kShift - 1)) - 1 + (magnitude >> kShift & 1);
    rounded =
        ((magnitude + to_even) >> kShift) - ((kLeastNormal >> kShift) - (1u << kMantissaBits));
  }
  return static_cast<uint8_t>(sign | (rounded < kLargest ? rounded : kLargest));
}

XLA_GPU_HOST_DEVICE inline void FromFloat(float x, Float8E4M3* to) {
  to->bits = RoundTo8Bits<3, -6, 0x7e, 0x7f>(x);
}

XLA_GPU_HOST_DEVICE inline void FromFloat(float x, Float8E5M2* to) {
  to->bits = RoundTo8Bits<2, -14, 0x7b, 0x7e>(x);
}

// Rounded to nearest, ties to even, and held between -kBound and kBound - 1; a NaN becomes 0.
template <int kBound>
XLA_GPU_HOST_DEVICE inline int32_t RoundToInteger(float x) {
  constexpr float kLeast = -kBound, kLargest = kBound - 1;
  const float held = x < kLeast ? kLeast : x > kLargest ? kLargest : x == x ? x : 0.0f;
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23
  return BitCast<int32_t>(held + kRounder) - BitCast<int32_t>(kRounder);
}

XLA_GPU_HOST_DEVICE inline void FromFloat(float x, int8_t* to) {
  *to = static_cast<int8_t>(RoundToInteger<128>(x));
}

// The code of e2m1 for a number: rounded to nearest, ties to even, and held between -6 and 6; a NaN
// becomes 0.
XLA_GPU_HOST_DEVICE inline uint8_t Float4E2M1CodeOf(float x) {
  if (x != x) return 0;
  const uint32_t bits = RoundTo8Bits<1, 0, 7, 0>(x);
  return static_cast<uint8_t>((bits & 7) | (bits >> 4 & 8));
}

XLA_GPU_HOST_DEVICE inline Int4Pair PairOf(float first, float second) {
  const auto low = static_cast<uint32_t>(RoundToInteger<8>(first));
  const auto high = static_cast<uint32_t>(RoundToInteger<8>(second));
  return {static_cast<uint8_t>((low & 0xf) | high << 4)};
}

}  // namespace xla_gpu
