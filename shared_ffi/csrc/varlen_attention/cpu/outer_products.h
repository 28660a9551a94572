// Sums of rows times factors of a tile, in float32 whatever the storage: factors that are rounded
// to bfloat16 would double the error of a bfloat16 gradient.
#pragma once

#include "../../paged_attention/cpu/mask.h"

namespace xla_gpu::varlen_attention {
namespace {

using paged_attention::ForEachBlock;
using paged_attention::kMaxTile;
using paged_attention::Span;

// sums[r] += factor of r and n times row n, over n from begin to end, for R sums and kVectors
// vectors of columns. What a tile adds is summed by itself: one chain over thousands of rows would
// err more.
//   factors: of (r, n) at r * kMaxTile + n, or, where kIsDown is set, at n * kMaxTile + r
//   rows: [.., width]; sums: [R, width]
template <int R, int kVectors, bool kIsDown>
XLA_GPU_INLINE void AddColumnsOfProducts(const float* factors, Span range, const float* rows,
                                         int64_t width, float* sums) {
  constexpr int64_t kOfSum = kIsDown ? 1 : kMaxTile, kOfRow = kIsDown ? kMaxTile : 1;
  Lanes block[R][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) block[r][i] = Lanes{};
  }
  for (int64_t n = range.begin; n < range.end; ++n) {
    Lanes columns[kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) columns[i] = Load<Lanes>(rows + n * width + i * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Lanes factor = Splat(factors[r * kOfSum + n * kOfRow]);
#pragma GCC unroll 16
      for (int i = 0; i < kVectors; ++i) {
        block[r][i] = MultiplyAdd(factor, columns[i], block[r][i]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      float* const sum = sums + r * width + i * kLanes;
      Store(Load<Lanes>(sum) + block[r][i], sum);
    }
  }
}

// All columns; the range is of positions, or of query rows where kIsDown is set.
template <int R, bool kIsDown>
void AddOuterProducts(const float* factors, Span range, const float* rows, int64_t width,
                      float* sums) {
  if (range.IsEmpty()) return;
  ForEachBlock<kBlockVectors>(0, width / kLanes, [&](auto size, int64_t vector) {
    AddColumnsOfProducts<R, size, kIsDown>(factors, range, rows + vector * kLanes, width,
                                           sums + vector * kLanes);
  });
}

}  // namespace
}  // namespace xla_gpu::varlen_attention
