// AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>

#include "portable.h"

namespace xla_gpu {
namespace {

using portable::Fraction;
using portable::ScaleByFloor;

// a * b + c, rounded once.
XLA_GPU_INLINE Lanes MultiplyAdd(Lanes a, Lanes b, Lanes c) {
  return (Lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

XLA_GPU_INLINE Words Widen(HalfWords x) { return (Words)_mm256_cvtepu16_epi32((__m128i)x); }

// GCC 12 makes thirty instructions of the portable conversion from eight bytes.
XLA_GPU_INLINE HalfWords WidenBytes(Bytes x) {
  return (HalfWords)_mm_cvtepi8_epi16(_mm_cvtsi64_si128(BitCast<int64_t>(x)));
}

XLA_GPU_INLINE Lanes WidenInt8(Bytes x) {
  return (Lanes)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(BitCast<int64_t>(x))));
}

// The bytes of a table that these bytes, from 0 to 15, are the indices of.
XLA_GPU_INLINE Bytes16 LookUp(Bytes16 table, Bytes16 indices) {
  return (Bytes16)_mm_shuffle_epi8((__m128i)table, (__m128i)indices);
}

XLA_GPU_INLINE void WidenInt8(Bytes16 x, Lanes (&to)[2]) {
  const __m128i low = (__m128i)x, high = _mm_unpackhi_epi64(low, low);
  to[0] = (Lanes)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(low));
  to[1] = (Lanes)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high));
}

XLA_GPU_INLINE Lanes WidenHalf(HalfWords x) { return (Lanes)_mm256_cvtph_ps((__m128i)x); }

XLA_GPU_INLINE HalfWords NarrowToHalf(Lanes x) {
  return (HalfWords)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
}

}  // namespace
}  // namespace xla_gpu
