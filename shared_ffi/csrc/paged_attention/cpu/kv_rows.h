// K and V of a KV tile and a kv head as the products read them: in place in the cache, or packed.
//
// A few query rows read K and V in place. For more it pays to pack them first: K transposed, so
// that a vector holds one number of several positions, and V widened, in the order in which it is
// read.
#pragma once

#include "page_table.h"

namespace xla_gpu::paged_attention {
namespace {

// The order in which kCount parts of one tile or more are read, kOfStep of each step of 32
// positions: step after step, within a step by the parts' bit-reversed numbers. Where a processor
// sees accesses at equal distances it prefetches past the block's end, which is not the next block:
// that costs a third of the memory's rate.
template <int64_t kCount, int64_t kOfStep>
struct ReadingOrder {
  int8_t numbers[kCount] = {};

  constexpr ReadingOrder() {
    int64_t count = 0;
    for (int64_t first = 0; first < kCount; first += kOfStep) {
      for (int64_t i = 0; count < first + kOfStep; ++i) {
        int64_t number = 0;
        for (int64_t bit = 1; bit < kOfStep; bit *= 2) number = 2 * number + (i / bit) % 2;
        if (number < kOfStep) numbers[count++] = static_cast<int8_t>(first + number);
      }
    }
  }
};

template <int64_t kCount, int64_t kOfStep = kCount>
constexpr ReadingOrder<kCount, kOfStep> kReadingOrder;

// Positions of V that enter one product: a pair where a lane holds two numbers.
template <typename T>
constexpr int kGroup = Dot<T>::kPerLane;

// The order in which a tile's groups of V are read. It is its own inverse.
template <typename T>
constexpr auto kValueOrder = kReadingOrder<kMaxTile / kGroup<T>, kStep / kGroup<T>>;

// K or V in the cache.
template <typename T>
struct CachedRows {
  using Storage = T;
  using Row = const T*;
  using Steps = Prefetcher::Steps;
  static constexpr int kAcross = Dot<T>::kAcross;

  RowPlaces places;

  XLA_GPU_INLINE Row RowOf(int64_t j) const {
    return reinterpret_cast<const T*>(places.positions[j] + places.offset);
  }

  // Loads neighbours from number d on, of which `count` exist, of each row of a vector.
  XLA_GPU_INLINE void LoadAcross(const Row (&rows)[kRowsPerVector], int64_t d, int64_t count,
                                 Lanes* to) const {
    const void* from[kRowsPerVector];
#pragma GCC unroll 2
    for (int i = 0; i < kRowsPerVector; ++i) from[i] = rows[i] + d;
    Dot<T>::Load(from, count, to);
  }

  // Loads the group of positions from j on, which is read as the i-th: Dot<T>::kDown vectors of
  // columns from d on, of which `count` exist.
  XLA_GPU_INLINE void LoadGroup(int64_t /*i*/, int64_t j, int64_t d, int64_t count,
                                Lanes* to) const {
    const T* rows[kGroup<T>];
#pragma GCC unroll 2
    for (int i = 0; i < kGroup<T>; ++i) rows[i] = RowOf(j + i) + d;
    Dot<T>::LoadDown(rows, count, to);
  }
};

template <typename T>
class PackedKeys {
 public:
  PackedKeys(int64_t head_size, int64_t width, int64_t num_tiles, Arena* arena)
      : head_size_(head_size),
        width_(width),
        tiles_(arena->Take<float>(num_tiles * kMaxTile * width)) {}

  // Makes this tile the one that the other methods are about.
  void Select(int64_t tile) { lanes_ = tiles_ + tile * kMaxTile * width_; }

  // `width` vectors: one for each float of a row of queries, of kLanes positions from j on.
  const float* At(int64_t j) const { return lanes_ + j * width_; }

  // Transposes K at positions [range.begin, range.end), and at some beside them.
  void Pack(const CachedRows<T>& k, Range range) {
    constexpr int kVectors = Dot<T>::kAcross;
    for (int64_t j = range.begin / kLanes * kLanes; j < range.end; j += kLanes) {
      for (int64_t w = 0; w < width_; w += kVectors * kLanes) {
        const int64_t d = w * Dot<T>::kPerLane;
        Lanes squares[kVectors][kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          Lanes keys[kVectors];
          Dot<T>::template Load<1>({k.RowOf(j + i) + d}, head_size_ - d, keys);
          for (int v = 0; v < kVectors; ++v) squares[v][i] = keys[v];
        }
        for (int v = 0; v < kVectors; ++v) {
          Transpose(squares[v]);
#pragma GCC unroll 16
          for (int i = 0; i < kLanes; ++i) {
            // As LoadQuery orders them.
            const int64_t number = w + (i / kChains * kVectors + v) * kChains + i % kChains;
            Store(squares[v][i], lanes_ + j * width_ + number * kLanes);
          }
        }
      }
    }
  }

 private:
  const int64_t head_size_;
  const int64_t width_;
  float* const tiles_;  // [num_tiles, kMaxTile / kLanes, width, kLanes]
  float* lanes_ = tiles_;
};

template <typename T>
class PackedValues {
 public:
  using Storage = T;
  struct Steps {  // MultiplyPacked, which takes fewer steps, has prefetched the next tile
    Steps(Prefetcher*, int64_t) {}
    void Take() {}
  };

  PackedValues(int64_t head_size, int64_t width, int64_t num_tiles, Arena* arena)
      : head_size_(head_size),
        width_(width),
        tiles_(arena->Take<float>(num_tiles * kGroups * width)) {}

  // Makes this tile the one that the other methods are about.
  void Select(int64_t tile) { lanes_ = tiles_ + tile * kGroups * width_; }

  // Packs V at positions [range.begin, range.end), and perhaps at one beside them.
  void Pack(const CachedRows<T>& v, Range range) {
    for (int64_t j = range.begin / kGroup<T> * kGroup<T>; j < range.end; j += kGroup<T>) {
      const int64_t i = kValueOrder<T>.numbers[j / kGroup<T>];
      for (int64_t d = 0; d < width_; d += kColumns) {
        Lanes columns[Dot<T>::kDown];
        v.LoadGroup(i, j, d, head_size_ - d, columns);
        std::memcpy(At(i, d), columns, sizeof(columns));
      }
    }
  }

  // Whether V at these positions holds neither NaN nor infinity.
  bool IsFinite(Range range) const {
    Lanes zeros = {};
    for (int64_t j = range.begin / kGroup<T>; j < CeilDiv(range.end, kGroup<T>); ++j) {
      for (int64_t d = 0; d < width_; d += kColumns) {
        Lanes columns[Dot<T>::kDown];
        LoadGroup(kValueOrder<T>.numbers[j], j, d, width_ - d, columns);
        for (const Lanes& column : columns) zeros += Dot<T>::TimesZero(column);
      }
    }
    return SumOfLanes(zeros) == 0;
  }

  XLA_GPU_INLINE void LoadGroup(int64_t i, int64_t /*j*/, int64_t d, int64_t /*count*/,
                                Lanes* to) const {
    const float* from = At(i, d);
#pragma GCC unroll 4
    for (int v = 0; v < Dot<T>::kDown; ++v) to[v] = Load<Lanes>(from + v * kLanes);
  }

 private:
  static constexpr int64_t kGroups = kMaxTile / kGroup<T>;
  static constexpr int64_t kColumns = Dot<T>::kDown * kLanes;

  XLA_GPU_INLINE float* At(int64_t i, int64_t d) const {
    return lanes_ + d * kGroups + i * kColumns;
  }

  const int64_t head_size_;
  const int64_t width_;
  float* const tiles_;  // [num_tiles, width / kColumns, kGroups, kColumns]
  float* lanes_ = tiles_;
};

}  // namespace
}  // namespace xla_gpu::paged_attention
