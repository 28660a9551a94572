// The Walsh-Hadamard transform of a head, by a warp.
#pragma once

#include <algorithm>

#include "hadamard.h"
#include "numbers.cuh"

namespace xla_gpu::kv_cache_update {

// The shared memory of a block of threads: each warp has a head in it.
inline int HadamardBytes(const Params& p) {
  if (!p.hadamard.IsUsed()) return 0;
  const int64_t largest = std::max(p.head_size, p.value_head_size);
  return static_cast<int>(kWarps * largest * int64_t{sizeof(float)});
}

// Writes `count` numbers, number(i), transformed, to the warp's part of the shared memory, and
// returns it: every lane may read all of it.
template <typename Number>
__device__ const float* Transformed(const Params& p, const Number& number, int count) {
  const int warp = static_cast<int>(threadIdx.x) / gpu::kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % gpu::kWarpSize;
  const int largest =
      static_cast<int>(p.head_size > p.value_head_size ? p.head_size : p.value_head_size);
  float* const row = reinterpret_cast<float*>(gpu::SharedMemory()) + warp * largest;
  const float* const signs = p.hadamard.signs;
  const int block = static_cast<int>(HadamardBlock(count));
  __syncwarp();  // the head before has been read
  for (int first = 0; first < count; first += gpu::kWarpSize) {
    const int i = first + lane;
    float x = i < count ? number(i) : 0.0f;
    if (signs != nullptr && i < count) x *= signs[i];
    for (int distance = 1; distance < block && distance < gpu::kWarpSize; distance *= 2) {
      const float other = gpu::ShuffleXor(x, distance);
      x = (lane & distance) != 0 ? other - x : x + other;
    }
    if (i < count) row[i] = x;
  }
  // Numbers that are farther apart are the lane's own.
  for (int distance = gpu::kWarpSize; distance < block; distance *= 2) {
    for (int i = lane; i < count; i += gpu::kWarpSize) {
      if ((i & distance) == 0) Butterfly(row + i, row + i + distance);
    }
  }
  const float scale = HadamardScale(block);
  for (int i = lane; i < count; i += gpu::kWarpSize) row[i] *= scale;
  __syncwarp();
  return row;
}

}  // namespace xla_gpu::kv_cache_update
