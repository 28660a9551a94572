// The scales that a call makes: of each row of a kv head that it writes, its largest magnitude
// divided by the largest number of the cache's dtype. No XLA headers: kernels include this.
#pragma once

#include "params.h"

namespace xla_gpu::kv_cache_update {

// A number without its sign, as an integer: it is the larger, the larger the magnitude is, and the
// largest for NaN. So the order in which the numbers of a row are compared does not matter. Signed,
// because SSE2 compares signed integers only.
XLA_GPU_HOST_DEVICE inline int32_t MagnitudeOf(float x) { return BitCast<int32_t>(x) & 0x7fffffff; }
XLA_GPU_HOST_DEVICE inline int16_t MagnitudeOf(Half x) { return x.bits & 0x7fff; }
XLA_GPU_HOST_DEVICE inline int16_t MagnitudeOf(BFloat16 x) { return x.bits & 0x7fff; }

XLA_GPU_HOST_DEVICE inline float LargestNumber(DType dtype) {
  switch (dtype) {
    case DType::kFloat8E4M3:
      return 448.0f;
    case DType::kFloat8E5M2:
      return 57344.0f;
    case DType::kInt4:
      return 7.0f;
    case DType::kFloat4E2M1:
      return 6.0f;
    default:
      return 127.0f;
  }
}

// The scale of a row, and what its numbers are divided by.
struct MadeScale {
  float scale;
  float divisor;
  bool is_finite;

  // `largest`: the magnitude of the row. A row with a NaN or an infinity has the scale NaN, and its
  // numbers are zeros in the cache: multiplied by the scale, all of them are NaN.
  XLA_GPU_HOST_DEVICE MadeScale(float largest, DType dtype)
      : is_finite(MagnitudeOf(largest) < 0x7f800000) {
    scale = is_finite ? largest / LargestNumber(dtype) : BitCast<float>(0x7fc00000u);
    divisor = is_finite ? DivisorOf(scale) : 1.0f;
  }
};

}  // namespace xla_gpu::kv_cache_update
