// Sums of products of numbers in storage.
//
// Dot<T> says how a vector of T enters a product: widened to float, one number in each lane, unless
// the instruction set multiplies T itself (dot_bf16.h), where a lane holds kPerLane numbers whose
// products are summed in it.
#pragma once

#include "convert.h"

namespace xla_gpu {
namespace {

template <typename T>
struct Dot {
  static constexpr int kPerLane = 1;
  static constexpr int kAcross = 1;  // vectors that Load and LoadQuery give
  static constexpr int kDown = 1;    // vectors that LoadDown gives

  // Loads neighbours in a row (of K), or in each of kRowsPerVector rows, of which `count` exist.
  template <int kRows>
  static XLA_GPU_INLINE void Load(const void* const (&rows)[kRows], int64_t count, Lanes* to) {
    to[0] = LoadWideRows<T>(rows, count);
  }

  // Loads what these are multiplied by. Where Load gives several vectors, kChains lanes of each
  // take turns: so both kinds of Load multiply in the same order.
  template <typename Query>
  static XLA_GPU_INLINE void LoadQuery(const Query* from, int64_t count, Lanes* to) {
    to[0] = LoadWide(from, count);
  }

  // Loads neighbours in a column (of V): from[i] is row i. `count` columns exist. They come in the
  // order that StoreInOrder undoes.
  static XLA_GPU_INLINE void LoadDown(const T* const (&from)[1], int64_t count, Lanes* to) {
    to[0] = LoadWide(from[0], count);
  }

  // Stores factors of rows as numbers i and on of `to`; returns them as they were stored.
  static XLA_GPU_INLINE Lanes StoreFactors(Lanes factors, float* to, int64_t i) {
    Store(factors, to + i);
    return factors;
  }

  static XLA_GPU_INLINE Lanes Multiply(Lanes a, Lanes b) { return a * b; }
  static XLA_GPU_INLINE Lanes MultiplyAdd(Lanes a, Lanes b, Lanes sums) {
    return xla_gpu::MultiplyAdd(a, b, sums);
  }

  // 0 in each lane unless a number is infinite or NaN.
  static XLA_GPU_INLINE Lanes TimesZero(Lanes x) { return x * 0.0f; }
};

// Stores vectors that Dot::LoadDown gave in the columns' own order. The first four lanes of all
// kVectors vectors hold the first 4 * kVectors columns, then come the second four lanes.
template <int kVectors>
XLA_GPU_INLINE void StoreInOrder(const Lanes (&x)[kVectors], float* to) {
  const float* from = reinterpret_cast<const float*>(x);
  for (int i = 0; i < kLanes; i += 4) {
    for (int v = 0; v < kVectors; ++v, to += 4) std::memcpy(to, from + v * kLanes + i, 16);
  }
}

}  // namespace
}  // namespace xla_gpu
