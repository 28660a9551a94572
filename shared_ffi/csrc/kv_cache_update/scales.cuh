// The kernel that makes the scales of the rows that it writes. A warp takes a row at a time: it
// finds the largest magnitude, and then reads the row again, which is in the processor's cache.
#pragma once

#include "int4.cuh"
#include "scales.h"

namespace xla_gpu::kv_cache_update {

// Stores element i of a row, of which number(n) is the n-th number. `kHasGroups`, here and below:
// whether groups may have scales, and codes be fractions. Without these a kernel takes fewer
// registers.
template <bool kHasGroups, typename Number>
__device__ void StoreRounded(const Number& number, float divisor, DType dtype, void* row, int i) {
  if (dtype == DType::kFloat8E4M3) {
    gpu::FromFloat(number(i) / divisor, static_cast<Float8E4M3*>(row) + i);
  } else if (dtype == DType::kFloat8E5M2) {
    gpu::FromFloat(number(i) / divisor, static_cast<Float8E5M2*>(row) + i);
  } else if (kHasGroups && dtype == DType::kFloat4E2M1) {
    const uint32_t low = Float4E2M1CodeOf(number(2 * i) / divisor);
    const uint32_t high = Float4E2M1CodeOf(number(2 * i + 1) / divisor);
    static_cast<uint8_t*>(row)[i] = static_cast<uint8_t>(low | high << 4);
  } else {
    StoreElement(number, divisor, dtype, row, i);
  }
}

// The scale of a row: made by the call and written to `made`, or given, where that is null.
struct ScaleOfRow {
  float* made;
  float divisor;

  __device__ bool IsMade() const { return made != nullptr; }
  __device__ float Make(float largest, DType dtype) const {
    const MadeScale scale(largest, dtype);
    if (threadIdx.x % gpu::kWarpSize == 0) *made = scale.scale;
    return scale.divisor;
  }
  __device__ float Divisor() const { return divisor; }
};

// That of a group.
struct ScaleOfGroup {
  const ScalesOfGroups& groups;
  int64_t offset;

  __device__ bool IsMade() const { return groups.AreMade(); }
  __device__ float Make(float largest, DType /*dtype*/) const {
    if (threadIdx.x % gpu::kWarpSize == 0) groups.Make(largest, offset);
    __syncwarp();  // its dtype rounds it
    return largest < INFINITY ? Divisor() : 1.0f;
  }
  __device__ float Divisor() const { return groups.DivisorAt(offset); }
};

// Writes `count` numbers that share a scale, by a warp.
template <bool kHasGroups, typename Number, typename Scale>
__device__ void StoreNumbers(const Number& number, int count, const Scale& scale, DType dtype,
                             void* row) {
  const int lane = static_cast<int>(threadIdx.x) % gpu::kWarpSize;
  const int num_elements = static_cast<int>(ElementsOf(dtype, count));
  bool is_finite = true;
  float divisor;
  if (scale.IsMade()) {
    int32_t largest = 0;
    for (int i = lane; i < count; i += gpu::kWarpSize) {
      largest = max(largest, MagnitudeOf(number(i)));
    }
    for (int mask = gpu::kWarpSize / 2; mask > 0; mask /= 2) {
      largest = max(largest, gpu::ShuffleXor(largest, mask));
    }
    is_finite = largest < 0x7f800000;
    divisor = scale.Make(BitCast<float>(largest), dtype);
  } else {
    divisor = scale.Divisor();
  }
  const auto finite = [&](int n) { return is_finite ? number(n) : 0.0f; };
  for (int i = lane; i < num_elements; i += gpu::kWarpSize) {
    StoreRounded<kHasGroups>(finite, divisor, dtype, row, i);
  }
}

// Writes a row of K, or of V, of `count` numbers, by a warp. If `made` is not null, it gets the
// row's scale; otherwise the row is divided by `divisor`. `first`: the offset of the scale of the
// row's first group, where groups have scales.
template <bool kHasGroups, typename Number>
__device__ void StoreRow(const Number& number, int count, float divisor, float* made,
                         const ScalesOfGroups& groups, int64_t first, DType dtype, int8_t* row) {
  if (!kHasGroups || !groups.AreUsed()) {
    StoreNumbers<kHasGroups>(number, count, ScaleOfRow{made, divisor}, dtype, row);
    return;
  }
  const int size = static_cast<int>(groups.Size()), num_groups = static_cast<int>(groups.Count());
  for (int i = 0; i < num_groups; ++i) {
    const auto of_group = [&](int n) { return number(i * size + n); };
    const int64_t offset = first + groups.Offset(0, 0, 0, i);
    StoreNumbers<true>(of_group, size, ScaleOfGroup{groups, offset}, dtype,
                       row + i * ElementsOf(dtype, size));
  }
}

// One block of threads per token.
template <typename From, bool kHasGroups>
__global__ void UpdateAndScale(Params p) {
  const Rotary& r = p.rotary;
  const int64_t token = blockIdx.x, slot = p.Slot(token);
  const int64_t position = r.cos_sin_cache == nullptr ? 0 : r.positions.At(token);
  if (r.cos_sin_cache != nullptr && !RotateQueries<From, 1>(p, token, slot, position)) return;
  if (slot < 0 || slot >= p.NumSlots()) return;
  const CachePlace place(p, slot);
  const ScalesOfGroups key_groups = place.KeyGroups(), value_groups = place.ValueGroups();
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
      StoreRow<kHasGroups>(number, head_size, divisor, made, key_groups,
                           place.FirstGroupOf(key_groups, head), p.cache_dtype,
                           place.Key<int8_t>(head));
    } else {
      float* made = place.MadeValueScale(head);
      const float divisor = made == nullptr ? place.ValueDivisor(head) : 1.0f;
      const auto number = [&](int n) {
        return gpu::ToFloat(value[static_cast<int64_t>(head) * value_head_size + n]);
      };
      StoreRow<kHasGroups>(number, value_head_size, divisor, made, value_groups,
                           place.FirstGroupOf(value_groups, head), p.value_cache_dtype,
                           place.Value<int8_t>(head));
    }
  }
}

}  // namespace xla_gpu::kv_cache_update
