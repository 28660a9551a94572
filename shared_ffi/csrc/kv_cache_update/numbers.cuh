// What the kernels share: how a thread moves adjacent numbers at once, and where they go.
#pragma once

#include <type_traits>

#include "../gpu/device.cuh"
#include "group_scales.h"

namespace xla_gpu::kv_cache_update {

inline constexpr int kThreads = 128;  // of a block
inline constexpr int kWarps = kThreads / gpu::kWarpSize;

// Calls take(head, piece) for this thread's share of the pieces of a token's heads.
template <typename Take>
__device__ void ForPieces(int64_t num_heads, int64_t pieces_of_head, const Take& take) {
  const int per_head = static_cast<int>(pieces_of_head);
  const int count = static_cast<int>(num_heads) * per_head;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    take(i / per_head, i % per_head);
  }
}

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

// Writes numbers to a cache: as they are, or divided and rounded to 8 bits.
template <typename To, typename From, int kCount>
__device__ void StoreInCache(const Numbers<From, kCount>& numbers, float divisor, To* to) {
  if constexpr (std::is_same_v<From, To>) {
    Store(numbers, to);
  } else {
    Numbers<To, kCount> rounded;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      gpu::FromFloat(gpu::ToFloat(numbers.number[i]) / divisor, &rounded.number[i]);
    }
    Store(rounded, to);
  }
}

// A slot of the cache, where numbers of K and V of a kv head are stored.
class CachePlace {
 public:
  __device__ CachePlace(const Params& p, int64_t slot)
      : p_(p),
        block_(slot / p.block_size),
        in_block_(slot % p.block_size),
        offset_(p.cache.Offset(block_, in_block_)) {}

  __device__ float KeyDivisor(int head) const {
    return DivisorOf(p_.k_scale.At(block_, in_block_, head));
  }
  __device__ float ValueDivisor(int head) const {
    return DivisorOf(p_.v_scale.At(block_, in_block_, head));
  }

  // Where the scale of a head's row is written; null: the call does not make it.
  __device__ float* MadeKeyScale(int head) const {
    return MadeScaleOf(p_.k_scale_cache, p_.k_scale, head);
  }
  __device__ float* MadeValueScale(int head) const {
    return MadeScaleOf(p_.v_scale_cache, p_.v_scale, head);
  }

  // The scales of groups, and the offset of the first one of a head's row.
  __device__ ScalesOfGroups KeyGroups() const {
    return {p_.k_groups, p_.cache_dtype, p_.rounds_scales_up, p_.k_group_cache};
  }
  __device__ ScalesOfGroups ValueGroups() const {
    return {p_.v_groups, p_.value_cache_dtype, p_.rounds_scales_up, p_.v_group_cache};
  }
  __device__ int64_t FirstGroupOf(const ScalesOfGroups& groups, int head) const {
    return groups.Offset(block_, in_block_, head, 0);
  }

  // The row of a head. T: the type of the cache's elements.
  template <typename T>
  __device__ T* Key(int head) const {
    return static_cast<T*>(p_.cache.keys) + (offset_ + head * p_.cache.head_stride);
  }
  template <typename T>
  __device__ T* Value(int head) const {
    return static_cast<T*>(p_.cache.values) +
           p_.cache.OffsetOfValue(offset_ + head * p_.cache.head_stride);
  }

  // `first`: of the head's numbers.
  template <typename To, typename Numbers>
  __device__ void StoreKey(const Numbers& numbers, int head, int64_t first) const {
    StoreInCache(numbers, KeyDivisor(head), Key<To>(head) + first);
  }
  template <typename To, typename Numbers>
  __device__ void StoreValue(const Numbers& numbers, int head, int64_t first) const {
    StoreInCache(numbers, ValueDivisor(head), Value<To>(head) + first);
  }

 private:
  __device__ float* MadeScaleOf(float* made, const KvScales& scales, int head) const {
    return made == nullptr ? nullptr : made + scales.Offset(block_, in_block_, head);
  }

  const Params& p_;
  const int64_t block_;
  const int64_t in_block_;
  const int64_t offset_;
};

// Stores the values of a token, if there are any.
template <typename From, typename To, int kCount>
__device__ void StoreValues(const Params& p, const CachePlace& place, int64_t token) {
  const From* value = static_cast<const From*>(p.value) + token * p.value_stride;
  ForPieces(p.num_kv_heads, p.value_head_size / kCount, [&](int head, int i) {
    const auto numbers = Load<From, kCount>(value + head * p.value_head_size + i * kCount);
    place.StoreValue<To>(numbers, head, i * kCount);
  });
}

}  // namespace xla_gpu::kv_cache_update
