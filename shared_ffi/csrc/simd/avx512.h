// AVX-512 (F, BW, DQ, VL).
#pragma once

#include <immintrin.h>

#include "types.h"

namespace xla_gpu {
namespace {

// The vector of two halves.
XLA_GPU_INLINE Words Join(HalfWords low, HalfWords high) {
  return (Words)_mm512_inserti64x4(_mm512_castsi256_si512((__m256i)low), (__m256i)high, 1);
}
XLA_GPU_INLINE HalfWords Join(Bytes low, Bytes high) {
  return (HalfWords)_mm256_inserti128_si256(_mm256_castsi128_si256((__m128i)low), (__m128i)high, 1);
}
XLA_GPU_INLINE Bytes Join(int64_t low, int64_t high) {
  return (Bytes)_mm_insert_epi64(_mm_cvtsi64_si128(low), high, 1);
}

// The vector whose halves are both this.
XLA_GPU_INLINE Words Repeat(HalfWords half) { return (Words)_mm512_broadcast_i64x4((__m256i)half); }

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

// The bytes of a table that these bytes, from 0 to 15, are the indices of.
XLA_GPU_INLINE Bytes16 LookUp(Bytes16 table, Bytes16 indices) {
  return (Bytes16)_mm_shuffle_epi8((__m128i)table, (__m128i)indices);
}

// One number in the first eight lanes, another in the others.
XLA_GPU_INLINE Lanes SplatHalves(float low, float high) {
  return (Lanes)_mm512_mask_broadcastss_ps(_mm512_set1_ps(low), 0xff00, _mm_set_ss(high));
}

// The numbers of a table that 16 indices of 4 bits name, eight in each word, from the lowest bits
// on.
XLA_GPU_INLINE Lanes LookUpCodes(Lanes table, uint32_t low, uint32_t high) {
  const __m512i words = _mm512_mask_set1_epi32(_mm512_set1_epi32(static_cast<int>(low)), 0xff00,
                                               static_cast<int>(high));
  const __m512i shifts = _mm512_set_epi32(28, 24, 20, 16, 12, 8, 4, 0, 28, 24, 20, 16, 12, 8, 4, 0);
  // The instruction ignores all bits of an index but the lowest four.
  return (Lanes)_mm512_maskz_permutexvar_ps(0xffff, _mm512_srlv_epi32(words, shifts),
                                            (__m512)table);
}

XLA_GPU_INLINE void WidenInt8(Bytes16 x, Lanes (&to)[1]) { to[0] = WidenInt8((Bytes)x); }

XLA_GPU_INLINE Lanes WidenHalf(HalfWords x) {
  return (Lanes)_mm512_maskz_cvtph_ps(0xffff, (__m256i)x);
}

// It is faster to join the halves after the conversion.
XLA_GPU_INLINE Lanes WidenHalves(Bytes low, Bytes high) {
  return (Lanes)Join((HalfWords)_mm256_cvtph_ps((__m128i)low),
                     (HalfWords)_mm256_cvtph_ps((__m128i)high));
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
