// The products q . k of a kv head's query rows with a KV tile.
//
// A product is the sum of kChains chains of multiply-adds by one fixed tree, whether the chains lie
// in the lanes of a register (MultiplyCached) or come one after the other (MultiplyPacked). So its
// bits do not depend on which of the two computes it.
#pragma once

#include "kv_rows.h"

namespace xla_gpu::paged_attention {
namespace {

constexpr int kCachedRows = 4;  // rows of a block, at most, that read K and V in place

// Positions of which MultiplyCached computes the products with R rows at once: enough sums that
// none waits for its own last multiply-add. (With 16 registers 12 sums would suit fewer rows, too,
// but compute an eighth of the step twice.) Where vectors hold two positions, 8: so SumEach gives
// whole rows, and the addresses of K fit the registers.
template <int R>
constexpr int64_t kPositions = kRowsPerVector > 1
                                   ? 8
                                   : (kBlockVectors >= 4 ? 16 : (R == 4 ? 12 : 8)) / R;

// The vector that holds the K of the i-th position. One that holds two takes them from four
// neighbours and from the next four: so SumEach puts all eight side by side.
constexpr int64_t VectorOf(int64_t i) { return i / (4 * kRowsPerVector) * 4 + i % 4; }

// logits[r, j] = q[r] . k[j] for R rows and kPositions positions from j on.
//   q: [R, width], padded with zeros; logits: [R, kMaxTile]
template <int R, typename Keys>
XLA_GPU_INLINE void MultiplyCached(const float* q, const Keys& k, int64_t j, int64_t head_size,
                                   int64_t width, float* logits, Prefetcher* next) {
  using T = typename Keys::Storage;
  constexpr int kVectors = Keys::kAcross;
  constexpr int64_t kCount = kPositions<R> / kRowsPerVector;
  constexpr int64_t kColumns = kVectors * kChains * Dot<T>::kPerLane;
  Prefetcher::Steps steps(next, kPositions<R> * kColumns * sizeof(T));
  typename Keys::Row keys[kCount][kRowsPerVector];
#pragma GCC unroll 16
  for (int i = 0; i < kPositions<R>; ++i) {
    keys[VectorOf(i)][i / 4 % kRowsPerVector] = k.RowOf(j + i);
  }
  Lanes sums[kCount][R];
  const auto add = [&](int64_t d, int64_t count, bool is_first) __attribute__((always_inline)) {
    steps.Take();
    Lanes queries[R][kVectors];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        queries[r][v] = LoadRepeated(q + r * width + d / Dot<T>::kPerLane + v * kChains);
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) {
      Lanes key[kVectors];
      k.LoadAcross(keys[i], d, count, key);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          sums[i][r] = is_first && v == 0 ? Dot<T>::Multiply(queries[r][v], key[v])
                                          : Dot<T>::MultiplyAdd(queries[r][v], key[v], sums[i][r]);
        }
      }
    }
  };
  if (head_size < kColumns) {
    add(0, head_size, true);
  } else {
    add(0, kColumns, true);
    int64_t d = kColumns;
    for (; d + kColumns <= head_size; d += kColumns) add(d, kColumns, false);
    if (d < head_size) add(d, head_size - d, false);
  }
  // SumEach sums kChains vectors at once: those of kOfRow positions and kRows rows, some of them
  // repeated where fewer are left.
  constexpr int64_t kRows = Smaller(R, kChains / 4), kOfRow = kLanes / kRows;
#pragma GCC unroll 16
  for (int64_t row = 0; row < R; row += kRows) {
#pragma GCC unroll 16
    for (int64_t first = 0; first < kPositions<R>; first += kOfRow) {
      const int64_t count = Smaller(kOfRow, kPositions<R> - first);
      Lanes each[kChains];
#pragma GCC unroll 16
      for (int n = 0; n < kLanes; ++n) {
        each[PlaceOf(n)] = sums[VectorOf(first + n % kOfRow % count)][row + n / kOfRow];
      }
      const Lanes products = SumEach(each);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        std::memcpy(logits + (row + r) * kMaxTile + j + first,
                    reinterpret_cast<const float*>(&products) + r * kOfRow, count * sizeof(float));
      }
    }
  }
}

// Adds up kCount chains of products, from number `first` on. The code of each is written out: a
// loop over them takes a twelfth more time.
//   steps: takes two for all chains; sums: the results; the others are those of MultiplyPacked
template <int kCount, typename T, int R, int kVectors>
XLA_GPU_INLINE void SumChains(int first, const float* q, const float* k, int64_t width,
                              Prefetcher::Steps* steps, Lanes (&sums)[R][kVectors]) {
  if constexpr (kCount == kChains / 2) steps->Take();
  if constexpr (kCount > 1) {
    Lanes others[R][kVectors];
    SumChains<kCount / 2, T>(first, q, k, width, steps, others);
    SumChains<kCount / 2, T>(first + kCount / 2, q, k, width, steps, sums);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
      for (int i = 0; i < kVectors; ++i) sums[r][i] += others[r][i];
    }
  } else {
    const auto add = [&](int64_t w, bool is_first) __attribute__((always_inline)) {
      Lanes keys[kVectors];
#pragma GCC unroll 16
      for (int i = 0; i < kVectors; ++i) keys[i] = Load<Lanes>(k + (i * width + w) * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const Lanes query = Splat(q[r * width + w]);
#pragma GCC unroll 16
        for (int i = 0; i < kVectors; ++i) {
          sums[r][i] = is_first ? Dot<T>::Multiply(query, keys[i])
                                : Dot<T>::MultiplyAdd(query, keys[i], sums[r][i]);
        }
      }
    };
    int64_t w = ChainOfLeaf(first);
    add(w, true);
    while ((w += kChains) < width) add(w, false);
  }
}

// MultiplyCached for kVectors vectors of positions, with K packed. Not inlined, so that types that
// are multiplied alike share its long code.
//   k: [kVectors, width, kLanes]; num_read: bytes of the positions' K and V in the cache
template <int R, int kVectors, typename T>
__attribute__((noinline)) void MultiplyPacked(const float* q, const float* k, int64_t width,
                                              float* logits, int64_t num_read, Prefetcher* next) {
  Prefetcher::Steps steps(next, num_read / 2);
  Lanes sums[R][kVectors];
  SumChains<kChains, T>(0, q, k, width, &steps, sums);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) Store(sums[r][i], logits + r * kMaxTile + i * kLanes);
  }
}

// q . k of the rows at hand with a KV tile. Masked positions may be computed, too.
//   logits: [tile.rows, kMaxTile]
template <typename T, typename Keys>
void MultiplyCachedKeys(const Rows& rows, Queries<T>* queries, const AttentionMask& mask,
                        const KvTile& tile, int64_t head, const Keys& k, float* logits,
                        Prefetcher* next) {
  ForEachBlock<kCachedRows>(0, rows.per_head, [&](auto num_rows, int64_t first) {
    constexpr int64_t kCount = kPositions<num_rows>;
    const Range range = mask.RangeOf(tile, first, num_rows);
    const float* q = queries->At(head * rows.per_head + first, num_rows);
    for (const int64_t number : kReadingOrder<CeilDiv(kStep, kCount)>.numbers) {
      const int64_t j = Smaller(number * kCount, kStep - kCount);  // the last may overlap others
      if (j + kCount <= range.begin || j >= range.end) continue;
      MultiplyCached<num_rows>(q, k, j, rows.p.head_size, queries->width(),
                               logits + first * kMaxTile, next);
    }
  });
}

// The same with K packed: all rows by some positions, whose K stays in the nearest cache.
//   num_read: bytes of a position's K and V in the cache
template <typename T>
void MultiplyPackedKeys(const Rows& rows, Queries<T>* queries, const AttentionMask& mask,
                        const KvTile& tile, int64_t head, const PackedKeys<T>& k, int64_t num_read,
                        float* logits, Prefetcher* next) {
  const auto [begin, end] = tile.range;
  const auto by_positions = [&](auto num_vectors, int64_t vector) {
    ForEachBlock<kBlockRows>(tile.rows.begin, tile.rows.end, [&](auto num_rows, int64_t first) {
      const Range range = mask.RangeOf(tile, first, num_rows);
      const int64_t used = Larger(range.begin / kLanes, vector),
                    num_used = Smaller(CeilDiv(range.end, kLanes), vector + num_vectors) - used;
      if (num_used <= 0) return;
      const auto multiply = [&](auto count) {
        const int64_t j = Smaller(used, vector + num_vectors - count) * kLanes;
        MultiplyPacked<num_rows, count, T>(
            queries->At(head * rows.per_head + first, num_rows), k.At(j), queries->width(),
            logits + (first - tile.rows.begin) * kMaxTile + j, count * kLanes * num_read, next);
      };
      // Rows at the edge of the mask use a part of four vectors. One by itself would take as long
      // as two: its sums wait for their own last multiply-adds.
      if constexpr (num_vectors == 4) {
        if (num_used <= 2) return multiply(std::integral_constant<int, 2>());
        if (num_used == 3) return multiply(std::integral_constant<int, 3>());
      }
      multiply(num_vectors);
    });
  };
  ForEachBlock<kBlockVectors>(begin / kLanes, CeilDiv(end, kLanes), by_positions);
}

}  // namespace
}  // namespace xla_gpu::paged_attention
