// The arithmetic of Walsh-Hadamard transforms: a head is multiplied by signs, and each block of it
// by the matrix whose element (i, j) is 1 / sqrt(block), negative where i & j has an odd number of
// ones. No XLA headers: kernels include this.
//
// All of it is float32 and nothing is fused. Every number is multiplied by its sign. Then, for the
// distances 1, 2, 4, ... below the block, numbers i and i + distance, where i & distance is 0,
// become their sum and their difference. At last every number is multiplied by HadamardScale. So
// every CPU and every GPU gives the same bits.
#pragma once

#include "../storage.h"

namespace xla_gpu::kv_cache_update {

// The largest power of two that divides the size of a head.
XLA_GPU_HOST_DEVICE inline int64_t HadamardBlock(int64_t head_size) {
  return head_size & -head_size;
}

XLA_GPU_HOST_DEVICE inline float HadamardScale(int64_t block) {
  float scale = 1.0f;
  for (; block >= 4; block /= 4) scale *= 0.5f;
  return block == 2 ? scale * 0.70710678f : scale;
}

// T: float, or a vector of floats.
template <typename T>
XLA_GPU_HOST_DEVICE inline void Butterfly(T* first, T* second) {
  const T sum = *first + *second;
  *second = *first - *second;
  *first = sum;
}

}  // namespace xla_gpu::kv_cache_update
