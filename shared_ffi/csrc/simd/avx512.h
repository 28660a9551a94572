// AVX-512 (F, BW, DQ, VL).
#pragma once

#include <immintrin.h>

#include "types.h"

namespace xla_gpu {
namespace {

// a * b + c, rounded once.
XLA_GPU_INLINE Lanes MultiplyAdd(Lanes a, Lanes b, Lanes c) {
  return (Lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

XLA_GPU_INLINE Words Widen(HalfWords x) {
  return (Words)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)x);
}

XLA_GPU_INLINE HalfWords WidenBytes(Bytes x) { return (HalfWords)_mm256_cvtepi8_epi16((__m128i)x); }

XLA_GPU_INLINE Lanes WidenInt8(Bytes x) {
  return (Lanes)_mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepi8_epi32(0xffff, (__m128i)x));
}

XLA_GPU_INLINE Lanes WidenHalf(HalfWords x) {
  return (Lanes)_mm512_maskz_cvtph_ps(0xffff, (__m256i)x);
}

XLA_GPU_INLINE HalfWords NarrowToHalf(Lanes x) {
  return (HalfWords)_mm512_maskz_cvtps_ph(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT);
}

// x - floor(x).
XLA_GPU_INLINE Lanes Fraction(Lanes x) {
  return (Lanes)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);
}

// y * 2^floor(x); 0 where x < -126.
XLA_GPU_INLINE Lanes ScaleByFloor(Lanes y, Lanes x) {
  const __mmask16 is_normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_US);
  return (Lanes)_mm512_maskz_scalef_ps(is_normal, (__m512)y, (__m512)x);
}

}  // namespace
}  // namespace xla_gpu
