// The kernel that writes to a cache whose K or V has 4 bits. Two adjacent numbers share a byte, and
// rotary pairs put them on different threads: a thread makes one element of the cache at a time,
// and finds each of its numbers.
#pragma once

#include "rotary.cuh"

namespace xla_gpu::kv_cache_update {

// Number i of a key, rotated and rounded to T.
template <typename T>
__device__ float NumberOfKey(const Rotary& r, int64_t position, const T* head, int i) {
  if (r.cos_sin_cache == nullptr || i >= r.rotary_dim) return gpu::ToFloat(head[i]);
  const int pair = r.is_interleaved ? i / 2 : i % static_cast<int>(r.rotary_dim / 2);
  const Pairs<T, 1> x = Rotated<T, 1>(r, position, head, pair);
  const T first = x.group[0].number[0], second = x.group[1].number[0];
  return gpu::ToFloat(x.place[0] == i ? first : second);
}

// Stores element i of a row of int4 or int8, of which number(n) is the n-th number.
template <typename Number>
__device__ void StoreElement(const Number& number, float divisor, DType dtype, void* row, int i) {
  if (dtype == DType::kInt4) {
    static_cast<Int4Pair*>(row)[i] = PairOf(number(2 * i) / divisor, number(2 * i + 1) / divisor);
  } else {
    gpu::FromFloat(number(i) / divisor, static_cast<int8_t*>(row) + i);
  }
}

// One block of threads per token.
template <typename From>
__global__ void UpdateInt4(Params p) {
  const Rotary& r = p.rotary;
  const int64_t token = blockIdx.x, slot = p.Slot(token);
  const int64_t position = r.cos_sin_cache == nullptr ? 0 : r.positions.At(token);
  if (r.cos_sin_cache != nullptr && !RotateQueries<From, 1>(p, token, slot, position)) return;
  if (slot < 0 || slot >= p.NumSlots()) return;
  const CachePlace place(p, slot);
  const From* key = static_cast<const From*>(p.key) + token * p.key_stride;
  ForPieces(p.num_kv_heads, ElementsOf(p.cache_dtype, p.head_size), [&](int head, int i) {
    const auto number = [&](int n) {
      return NumberOfKey(r, position, key + head * p.head_size, n);
    };
    StoreElement(number, place.KeyDivisor(head), p.cache_dtype, place.Key<int8_t>(head), i);
  });
  const From* value = static_cast<const From*>(p.value) + token * p.value_stride;
  const int64_t elements = ElementsOf(p.value_cache_dtype, p.value_head_size);
  ForPieces(p.num_kv_heads, elements, [&](int head, int i) {
    const auto number = [&](int n) { return gpu::ToFloat(value[head * p.value_head_size + n]); };
    StoreElement(number, place.ValueDivisor(head), p.value_cache_dtype, place.Value<int8_t>(head),
                 i);
  });
}

}  // namespace xla_gpu::kv_cache_update
