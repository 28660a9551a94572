// The arithmetic of rotary embeddings: a pair of numbers of a head turns by an angle. No XLA
// headers: kernels include this.
#pragma once

#include "../storage.h"

namespace xla_gpu::kv_cache_update {

// T: float, or a vector of floats.
template <typename T>
struct RotaryPair {
  T first;
  T second;
};

using Pair = RotaryPair<float>;

// Nothing is fused (-ffp-contract=off, -fmad=false): every CPU and every GPU rounds four products,
// a difference and a sum, so all of them give the same bits.
template <typename T>
XLA_GPU_HOST_DEVICE inline RotaryPair<T> Rotate(const RotaryPair<T>& x, const T& cos,
                                                const T& sin) {
  return {x.first * cos - x.second * sin, x.second * cos + x.first * sin};
}

}  // namespace xla_gpu::kv_cache_update
