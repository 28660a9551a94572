// Sums of products of factors of a tile with rows of columns.
#pragma once

#include "../../paged_attention/cpu/mask.h"

namespace xla_gpu::varlen_attention {
namespace {

using paged_attention::ForEachBlock;
using paged_attention::kMaxTile;
using paged_attention::Span;

// sums[r] += factor of r and group n times row n, over the groups from begin to end, for R sums and
// kVectors vectors of columns. A group is as many numbers as a lane holds.
//   factors: of (r, n) at r * kMaxTile + n, or, where kIsDown is set, at n * kMaxTile + r
//   rows: [groups, width]; sums: [R, width]
template <int R, int kVectors, typename T, bool kIsDown>
XLA_GPU_INLINE void AddColumnsOfProducts(const float* factors, int64_t begin, int64_t end,
                                         const float* rows, int64_t width, float* sums) {
  constexpr int64_t kOfSum = kIsDown ? 1 : kMaxTile, kOfGroup = kIsDown ? kMaxTile : 1;
  Lanes block[R][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) block[r][i] = Load<Lanes>(sums + r * width + i * kLanes);
  }
  for (int64_t n = begin; n < end; ++n) {
    Lanes columns[kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) columns[i] = Load<Lanes>(rows + n * width + i * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Lanes factor = Splat(factors[r * kOfSum + n * kOfGroup]);
#pragma GCC unroll 16
      for (int i = 0; i < kVectors; ++i) {
        block[r][i] = Dot<T>::MultiplyAdd(factor, columns[i], block[r][i]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) Store(block[r][i], sums + r * width + i * kLanes);
  }
}

// All columns, and the numbers of a range: of positions, or of rows where kIsDown is set.
template <int R, typename T, bool kIsDown>
void AddOuterProducts(const float* factors, Span range, const float* rows, int64_t width,
                      float* sums) {
  constexpr int kGroup = Dot<T>::kPerLane;
  const int64_t begin = range.begin / kGroup, end = (range.end + kGroup - 1) / kGroup;
  if (begin >= end) return;
  ForEachBlock<kBlockVectors>(0, width / kLanes, [&](auto size, int64_t vector) {
    AddColumnsOfProducts<R, size, T, kIsDown>(factors, begin, end, rows + vector * kLanes, width,
                                              sums + vector * kLanes);
  });
}

}  // namespace
}  // namespace xla_gpu::varlen_attention
