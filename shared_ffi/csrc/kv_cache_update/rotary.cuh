// The kernel that rotates keys and queries, and writes keys and values into the cache.
#pragma once

#include "numbers.cuh"
#include "params.h"
#include "rotary.h"

namespace xla_gpu::kv_cache_update {

// kCount numbers of a row of cos_sin_cache, as floats.
template <typename T, int kCount>
__device__ void LoadTable(const Rotary& r, int64_t place, float (&to)[kCount]) {
  if (r.dtype == DType::kFloat32) {
    const auto row = Load<float, kCount>(static_cast<const float*>(r.cos_sin_cache) + place);
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = row.number[i];
  } else {
    const auto row = Load<T, kCount>(static_cast<const T*>(r.cos_sin_cache) + place);
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = gpu::ToFloat(row.number[i]);
  }
}

template <typename T>
__device__ void RotateInPlace(T* first, T* second, float cos, float sin) {
  const Pair pair = Rotate(Pair{gpu::ToFloat(*first), gpu::ToFloat(*second)}, cos, sin);
  gpu::FromFloat(pair.first, first);
  gpu::FromFloat(pair.second, second);
}

// kCount pairs of a head: two groups of kCount adjacent numbers, and where in the head they lie.
template <typename T, int kCount>
struct Pairs {
  Numbers<T, kCount> group[2];
  int64_t place[2];
};

// Rotates the pairs of a head from number first_pair on.
template <typename T, int kCount>
__device__ Pairs<T, kCount> Rotated(const Rotary& r, int64_t position, const T* head,
                                    int first_pair) {
  const int64_t num_pairs = r.rotary_dim / 2, row = position * r.rotary_dim;
  float cos[kCount], sin[kCount];
  LoadTable<T>(r, row + first_pair, cos);
  LoadTable<T>(r, row + num_pairs + first_pair, sin);
  Pairs<T, kCount> x;
  x.place[0] = r.is_interleaved ? 2 * first_pair : first_pair;
  x.place[1] = x.place[0] + (r.is_interleaved ? kCount : num_pairs);
  x.group[0] = Load<T, kCount>(head + x.place[0]);
  x.group[1] = Load<T, kCount>(head + x.place[1]);
  if (r.is_interleaved) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int first = 2 * i, second = 2 * i + 1;
      RotateInPlace(&x.group[first / kCount].number[first % kCount],
                    &x.group[second / kCount].number[second % kCount], cos[i], sin[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      RotateInPlace(&x.group[0].number[i], &x.group[1].number[i], cos[i], sin[i]);
    }
  }
  return x;
}

// Rotates the query of a token in place, or makes it NaN if its position has no row and it has a
// slot. Returns whether there is a row.
template <typename From, int kCount>
__device__ bool RotateQueries(const Params& p, int64_t token, int64_t slot, int64_t position) {
  const Rotary& r = p.rotary;
  From* query = static_cast<From*>(p.query) + token * p.query_stride;
  if (!r.HasRow(position)) {
    ForPieces(slot < 0 ? 0 : p.num_heads, p.head_size, [&](int head, int i) {
      gpu::FromFloat(__builtin_nanf(""), query + head * p.head_size + i);
    });
    return false;
  }
  ForPieces(p.num_heads, r.rotary_dim / 2 / kCount, [&](int number, int i) {
    From* head = query + number * p.head_size;
    const auto x = Rotated<From, kCount>(r, position, head, i * kCount);
    for (int j = 0; j < 2; ++j) Store(x.group[j], head + x.place[j]);
  });
  return true;
}

// One block of threads per token. A thread rotates kCount pairs of a head, or moves kCount adjacent
// numbers, at a time.
template <typename From, typename To, int kCount>
__global__ void UpdateRotated(Params p) {
  const Rotary& r = p.rotary;
  const int64_t token = blockIdx.x;
  const int64_t slot = p.Slot(token), position = r.positions.At(token);
  if (!RotateQueries<From, kCount>(p, token, slot, position)) return;
  if (slot < 0 || slot >= p.NumSlots()) return;
  const CachePlace place(p, slot);
  const From* key = static_cast<const From*>(p.key) + token * p.key_stride;
  ForPieces(p.num_kv_heads, r.rotary_dim / 2 / kCount, [&](int head, int i) {
    const auto x = Rotated<From, kCount>(r, position, key + head * p.head_size, i * kCount);
    for (int j = 0; j < 2; ++j) place.StoreKey<To>(x.group[j], head, x.place[j]);
  });
  ForPieces(p.num_kv_heads, (p.head_size - r.rotary_dim) / kCount, [&](int head, int i) {
    const int64_t first = r.rotary_dim + i * kCount;
    place.StoreKey<To>(Load<From, kCount>(key + head * p.head_size + first), head, first);
  });
  StoreValues<From, To, kCount>(p, place, token);
}

}  // namespace xla_gpu::kv_cache_update
