// The arithmetic of RMS norms: numbers are divided by their root mean square and multiplied by
// weights. No XLA headers: kernels include this.
//
// All of it is float32 and nothing is fused, so every CPU and every GPU gives the same bits. The
// squares are added in the order in which PyTorch adds a row on x86, so that a norm has the bits of
// PyTorch's operators there:
//
//   whole = count / kNormChains * kNormChains; number i < whole goes to chain i % kNormChains;
//   of the others, those in whole groups of kNormLanes go to chain i % kNormLanes;
//   lane j of kNormLanes is chain j + chain (j + 8) + chain (j + 16) + chain (j + 24);
//   the sum is that of the numbers that are left, then lane 0, 1, ...
//
// Within a chain, kNormRun numbers are added first, then kNormRun such sums.
#pragma once

#include <cmath>

#include "../storage.h"

namespace xla_gpu::kv_cache_update {

inline constexpr int kNormLanes = 8;
inline constexpr int kNormChains = 4 * kNormLanes;
inline constexpr int kNormRun = 16;

// The sum of a chain. T: float, or as many floats as there are chains.
template <typename T>
class ChainSum {
 public:
  XLA_GPU_HOST_DEVICE void Add(const T& x) {
    run_ += x;
    if (++count_ % kNormRun != 0) return;
    runs_ += run_;
    run_ = {};
    if (count_ % (kNormRun * kNormRun) != 0) return;
    more_ += runs_;
    runs_ = {};
  }

  XLA_GPU_HOST_DEVICE T Sum() const {
    T sum = run_;
    sum += runs_;
    sum += more_;
    return sum;
  }

 private:
  int count_ = 0;
  T run_ = {};
  T runs_ = {};
  T more_ = {};
};

// 1 / sqrt(mean of squares + eps).
XLA_GPU_HOST_DEVICE inline float InverseRms(float sum_of_squares, int64_t count, float eps) {
  return 1.0f / sqrtf(sum_of_squares / static_cast<float>(count) + eps);
}

}  // namespace xla_gpu::kv_cache_update
