// Adds the weighted V of a KV tile to the rows' sums, position after position.
#pragma once

#include "kv_rows.h"
#include "softmax.h"

namespace xla_gpu::paged_attention {
namespace {

// sums[r] = sums[r] * rescale[r] + sum of weights[r, j] * v[j] over j in the range, for R rows and
// kVectors vectors of columns from d on, of which `count` exist.
//   weights: [R, kMaxTile], as Dot stores factors; sums: [R, width]
template <int R, int kVectors, typename Values>
XLA_GPU_INLINE void AddColumns(const float* weights, const Values& v, Range range, int64_t d,
                               int64_t count, int64_t width, const float* rescale, float* sums,
                               Prefetcher* next) {
  using T = typename Values::Storage;
  const int64_t begin = range.begin, end = range.end;
  typename Values::Steps steps(next, kVectors * kLanes * kGroup<T> * sizeof(T));
  Lanes block[R][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      block[r][i] = Load<Lanes>(sums + r * width + d + i * kLanes) * rescale[r];
    }
  }
  const auto& order = kValueOrder<T>.numbers;
  const auto add = [&](int64_t i, bool is_whole) __attribute__((always_inline)) {
    const int64_t number = order[i], j = number * kGroup<T>;
    steps.Take();
    Lanes values[kVectors];
#pragma GCC unroll 16
    for (int vector = 0; vector < kVectors; vector += Dot<T>::kDown) {
      v.LoadGroup(i, j, d + vector * kLanes, count, values + vector);
    }
    // One position of a pair may lie outside of the range, where V may be NaN.
    if (!is_whole && kGroup<T> > 1 && (j < begin || j + 1 >= end)) {
      const uint32_t attended = (j < begin ? 0 : 0xffff) | (j + 1 < end ? 0xffff0000 : 0);
      for (Lanes& vector : values) vector = BitCast<Lanes>(BitCast<Words>(vector) & attended);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Lanes weight = Splat(weights[r * kMaxTile + number]);
#pragma GCC unroll 16
      for (int vector = 0; vector < kVectors; ++vector) {
        block[r][vector] = Dot<T>::MultiplyAdd(weight, values[vector], block[r][vector]);
      }
    }
  };
  int64_t i = begin / kStep * kStep / kGroup<T>;
  const int64_t last = RoundUp(end, kStep) / kGroup<T>;
  if (begin % kStep == 0 && end % kStep == 0) {
    for (; i < last; ++i) add(i, true);
  } else {
    for (; i < last; ++i) {
      const int64_t j = order[i] * kGroup<T>;
      if (begin < j + kGroup<T> && j < end) add(i, false);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) Store(block[r][i], sums + r * width + d + i * kLanes);
  }
}

// Vectors of columns for R rows: with few rows and 16 registers more than kBlockVectors, so that no
// sum waits for its own last multiply-add.
template <int R>
constexpr int kWideVectors = kBlockRows * kBlockVectors >= 16 || R > 4 ? kBlockVectors
                             : R == 4                                  ? 3
                             : R == 3                                  ? 4
                             : R == 2                                  ? 6
                                                                       : 8;

// All columns, by blocks of vectors that fit the registers.
template <int R, typename Values>
void AddBlock(const float* weights, const Values& v, Range range, int64_t head_size, int64_t width,
              const float* rescale, float* sums, Prefetcher* next) {
  constexpr int kLeast = Dot<typename Values::Storage>::kDown;
  constexpr int64_t kColumns = kBlockVectors * kLanes, kLeastColumns = kLeast * kLanes;
  int64_t d = 0;
  if constexpr (kWideVectors<R> > kBlockVectors && kLeast == 1) {
    constexpr int64_t kWideColumns = kWideVectors<R> * kLanes;
    // What is left is nothing or a block: a vector by itself would wait.
    for (int64_t left = head_size - kWideColumns; left == 0 || left >= kColumns;
         left -= kWideColumns) {
      AddColumns<R, kWideVectors<R>>(weights, v, range, d, kWideColumns, width, rescale, sums,
                                     next);
      d += kWideColumns;
    }
  }
  for (; d + kColumns <= head_size; d += kColumns) {
    AddColumns<R, kBlockVectors>(weights, v, range, d, kColumns, width, rescale, sums, next);
  }
  for (; d < head_size; d += kLeastColumns) {
    AddColumns<R, kLeast>(weights, v, range, d, head_size - d, width, rescale, sums, next);
  }
}

template <int R>
bool AreOne(const float* factors) {
  bool are_one = true;
  for (int r = 0; r < R; ++r) are_one &= factors[r] == 1.0f;
  return are_one;
}

// R rows from `first` on. Steps are added at once while nothing is rescaled between them: a product
// with 1 is exact, so the bits are those of one step after the other.
template <int R, typename T, typename Values>
XLA_GPU_INLINE void AddRows(const Rows& rows, const AttentionMask& mask, const KvTile& tile,
                            const Softmax<T>& softmax, const Values& v, int64_t first,
                            int64_t width, float* sums, Prefetcher* next) {
  const auto [begin, end] = mask.RangeOf(tile, first, R);
  int64_t step = begin / kStep * kStep;
  while (step < end) {
    int64_t after = step + kStep;
    while (after < end && AreOne<R>(softmax.Rescale(tile, after, first))) after += kStep;
    AddBlock<R>(softmax.Weights(tile, first), v, {Larger(begin, step), Smaller(end, after)},
                rows.p.value_head_size, width, softmax.Rescale(tile, step, first),
                sums + first * width, next);
    step = after;
  }
}

// One row that does not attend to all of its range: position by position, in the order of
// AddColumns, so that the bits are those of weights of zero.
template <typename T, typename Values>
__attribute__((noinline)) void AddRowWithHoles(const Rows& rows, const AttentionMask& mask,
                                               const KvTile& tile, const Softmax<T>& softmax,
                                               const Values& v, int64_t row, int64_t width,
                                               float* sums, Prefetcher* next) {
  const Range range = mask.RangeOf(tile, row, 1);
  const Holes holes = mask.HolesOf(row);
  const auto attends = [&](int64_t j) {
    return range.begin <= j && j < range.end && !holes.Contain(tile.position + j);
  };
  for (int64_t step = range.begin / kStep * kStep; step < range.end; step += kStep) {
    float rescale = *softmax.Rescale(tile, step, row);
    for (int64_t i = step / kGroup<T>; i < (step + kStep) / kGroup<T>; ++i) {
      const int64_t first = kValueOrder<T>.numbers[i] * kGroup<T>, last = first + kGroup<T> - 1;
      const Range group = {attends(first) ? first : last, attends(last) ? last + 1 : last};
      if (group.begin >= group.end) continue;
      AddBlock<1>(softmax.Weights(tile, row), v, group, rows.p.value_head_size, width, &rescale,
                  sums + row * width, next);
      rescale = 1;
    }
  }
}

// All rows at hand, in blocks of kRows. Rows of a block share the positions that any of them
// attends to, with weights of zero where one does not; `is_safe` says that a zero may meet any V of
// the tile, as none is NaN or infinite. Otherwise each row goes by itself.
//   sums: [rows of a kv head, width]
template <int kRows, typename T, typename Values>
void AddValues(const Rows& rows, const AttentionMask& mask, const KvTile& tile,
               const Softmax<T>& softmax, const Values& v, bool is_safe, int64_t width, float* sums,
               Prefetcher* next) {
  ForEachBlock<kRows>(tile.rows.begin, tile.rows.end, [&](auto num_rows, int64_t first) {
    if (is_safe) {
      return AddRows<num_rows>(rows, mask, tile, softmax, v, first, width, sums, next);
    }
    for (int64_t r = 0; r < num_rows; ++r) {
      mask.HasHoles(tile)
          ? AddRowWithHoles(rows, mask, tile, softmax, v, first + r, width, sums, next)
          : AddRows<1>(rows, mask, tile, softmax, v, first + r, width, sums, next);
    }
  });
}

}  // namespace
}  // namespace xla_gpu::paged_attention
