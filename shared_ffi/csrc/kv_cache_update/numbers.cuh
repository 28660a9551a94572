// What the kernels share: how a thread moves adjacent numbers at once.
#pragma once

#include <type_traits>

#include "../gpu/device.cuh"

namespace xla_gpu::kv_cache_update {

inline constexpr int kThreads = 128;  // of a block

template <typename T, int kCount>
struct alignas(kCount * sizeof(T)) Numbers {
  T number[kCount];
};

template <typename T, int kCount>
__device__ Numbers<T, kCount> Load(const T* from) {
  return *reinterpret_cast<const Numbers<T, kCount>*>(from);
}

template <typename T, int kCount>
__device__ void Store(const Numbers<T, kCount>& numbers, T* to) {
  *reinterpret_cast<Numbers<T, kCount>*>(to) = numbers;
}

// Writes numbers to a cache: as they are, or divided by the scale and rounded to 8 bits.
template <typename To, typename From, int kCount>
__device__ void StoreInCache(const Numbers<From, kCount>& numbers, float scale, void* cache,
                             int64_t place) {
  To* to = static_cast<To*>(cache) + place;
  if constexpr (std::is_same_v<From, To>) {
    Store(numbers, to);
  } else {
    Numbers<To, kCount> rounded;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      gpu::FromFloat(gpu::ToFloat(numbers.number[i]) / scale, &rounded.number[i]);
    }
    Store(rounded, to);
  }
}

}  // namespace xla_gpu::kv_cache_update
