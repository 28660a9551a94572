// The kernel that makes the scales of the rows that it writes. A warp takes a row at a time: it
// finds the largest magnitude, and then reads the row again, which is in the processor's cache.
#pragma once

#include "int4.cuh"
#include "scales.h"

namespace xla_gpu::kv_cache_update {

// Stores element i of a row, of which number(n) is the n-th number.
template <typename Number>
__device__ void StoreRounded(const Number& number, float divisor, DType dtype, void* row, int i) {
  if (dtype == DType::kFloat8E4M3) {
    gpu::FromFloat(number(i) / divisor, static_cast<Float8E4M3*>(row) + i);
  } else if (dtype == DType::kFloat8E5M2) {
    gpu::FromFloat(number(i) / divisor, static_cast<Float8E5M2*>(row) + i);
  } else {
    StoreElement(number, divisor, dtype, row, i);
  }
}

// Writes a row of `count` numbers, by a warp. If `made` is not null, it gets the row's scale;
// otherwise the row is divided by `divisor`.
template <typename Number>
__device__ void StoreRow(const Number& number, int count, float divisor, float* made, DType dtype,
                         void* row) {
  const int lane = static_cast<int>(threadIdx.x) % gpu::kWarpSize;
  const int num_elements = static_cast<int>(ElementsOf(dtype, count));
  bool is_finite = true;
  if (made != nullptr) {
    int32_t largest = 0;
    for (int i = lane; i < count; i += gpu::kWarpSize) {
      largest = max(largest, MagnitudeOf(number(i)));
    }
    for (int mask = gpu::kWarpSize / 2; mask > 0; mask /= 2) {
      largest = max(largest, gpu::ShuffleXor(largest, mask));
    }
    const MadeScale scale(BitCast<float>(largest), dtype);
    if (lane == 0) *made = scale.scale;
    divisor = scale.divisor;
    is_finite = scale.is_finite;
  }
  const auto finite = [&](int n) { return is_finite ? number(n) : 0.0f; };
  for (int i = lane; i < num_elements; i += gpu::kWarpSize) {
    StoreRounded(finite, divisor, dtype, row, i);
  }
}

// One block of threads per token.
template <typename From>
__global__ void UpdateAndScale(Params p) {
  const Rotary& r = p.rotary;
  const int64_t token = blockIdx.x, slot = p.Slot(token);
  const int64_t position = r.cos_sin_cache == nullptr ? 0 : r.positions.At(token);
  if (r.cos_sin_cache != nullptr && !RotateQueries<From, 1>(p, token, slot, position)) return;
  if (slot < 0 || slot >= p.NumSlots()) return;
  const CachePlace place(p, slot);
  const From* key = static_cast<const From*>(p.key) + token * p.key_stride;
  const From* value = static_cast<const From*>(p.value) + token * p.value_stride;
  const int head_size = static_cast<int>(p.head_size);
  const int value_head_size = static_cast<int>(p.value_head_size);
  const int num_rows = static_cast<int>(p.num_kv_heads) * (value_head_size == 0 ? 1 : 2);
  for (int row = static_cast<int>(threadIdx.x) / gpu::kWarpSize; row < num_rows; row += kWarps) {
    const int head = row % static_cast<int>(p.num_kv_heads);
    if (row == head) {
      float* made = place.MadeKeyScale(head);
      const float divisor = made == nullptr ? place.KeyDivisor(head) : 1.0f;
      const auto number = [&](int n) {
        return NumberOfKey(r, position, key + static_cast<int64_t>(head) * head_size, n);
      };
      StoreRow(number, head_size, divisor, made, p.cache_dtype, place.Key<int8_t>(head));
    } else {
      float* made = place.MadeValueScale(head);
      const float divisor = made == nullptr ? place.ValueDivisor(head) : 1.0f;
      const auto number = [&](int n) {
        return gpu::ToFloat(value[static_cast<int64_t>(head) * value_head_size + n]);
      };
      StoreRow(number, value_head_size, divisor, made, p.value_cache_dtype,
               place.Value<int8_t>(head));
    }
  }
}

}  // namespace xla_gpu::kv_cache_update
