// The rows of a work item (a row is a query token and head), and their queries.
#pragma once

#include <type_traits>

#include "../../simd/simd.h"
#include "kernel.h"
#include "prefetch.h"

namespace xla_gpu::paged_attention {
namespace {

XLA_GPU_INLINE int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }

// Calls function(size, first) for blocks of rows, vectors or the like that make up [first, count):
// as many of kSize as fit, then of half of it and so on. The size is a constant.
template <int kSize, typename Function>
XLA_GPU_INLINE void ForEachBlock(int64_t first, int64_t count, const Function& function) {
  for (; first + kSize <= count; first += kSize) {
    function(std::integral_constant<int, kSize>(), first);
  }
  if constexpr (kSize > 1) ForEachBlock<kSize / 2>(first, count, function);
}

// Queries are prefetched so many rows before they are read, and the output before it is written.
constexpr int64_t kRowsAhead = 16;

// Rows of a chunk, at most: kChunkRows in whole blocks.
constexpr int64_t kMaxChunk = (kChunkRows + kBlockRows - 1) / kBlockRows * kBlockRows;

template <int kSize>
int64_t NumBlocks(int64_t count) {
  int64_t num_blocks = 0;
  ForEachBlock<kSize>(0, count, [&](auto, int64_t) { ++num_blocks; });
  return num_blocks;
}

// Rows are ordered by kv head, then by token, then by query head.
struct Rows {
  const Params& p;
  const WorkItem& item;
  const int64_t group;     // query heads per kv head
  const int64_t per_head;  // rows of a kv head
  const int64_t count;

  Rows(const Params& p, const WorkItem& item)
      : p(p),
        item(item),
        group(p.group.number),
        per_head(item.num_tokens * group),
        count(item.num_kv_heads * per_head) {}

  int64_t KvHead(int64_t row) const { return item.first_kv_head + row / per_head; }
  int64_t Head(int64_t row) const { return KvHead(row) * group + row % group; }
  int64_t Position(int64_t row) const { return item.position + row % per_head / group; }

  // Whether the rows lie one after the other in query and output, as those of one token do.
  bool AreSideBySide() const { return item.num_tokens == 1; }

  int64_t Token(int64_t row) const { return item.first_token + row % per_head / group; }
  int64_t QueryOffset(int64_t row) const { return p.QueryOffset(Token(row), Head(row)); }

  // Where the partial result of a row and a split of the item is.
  float* PartialResult(int64_t split, int64_t row) const {
    const WorkItem& tile = *item.tile;
    const int64_t split_of_tile = item.begin / kSplit - tile.begin / kSplit + split;
    const int64_t head_of_tile = Head(row) - tile.first_kv_head * group;
    const int64_t place = split_of_tile * tile.num_kv_heads * group + head_of_tile;
    return tile.partial_results[Token(row) - tile.first_token] + place * PartialResultSize(p);
  }

  // The index of a row in output or lse, seen as [num_tokens * num_heads].
  int64_t InBatch(int64_t row) const { return Token(row) * p.num_heads + Head(row); }
};

// Calls function(Q()) for the type Q of query and output. T is the type of the cache, which has the
// same unless it has 8 bits, or its rows become float32.
template <typename T, typename Function>
void WithQueryType(const Params& p, const Function& function) {
  if constexpr (!kIs8Bit<T> && !std::is_same_v<T, float>) {
    function(T());
  } else if constexpr (Dot<T>::kPerLane == 2) {
    function(BFloat16());
  } else if (p.dtype == DType::kFloat32) {
    function(float());
  } else if (p.dtype == DType::kFloat16) {
    function(Half());
  } else {
    function(BFloat16());
  }
}

// The queries of all rows as Dot<T> multiplies them, padded with zeros to whole vectors. A row is
// loaded when it is first asked for, and prefetched some rows before: the products hide the wait,
// which took 6% of a prompt of 512 tokens. Where rows already lie like that in memory they are read
// there: a decode step in float32 or bfloat16 touches half as many cache lines.
template <typename T>
class Queries {
 public:
  Queries(const Rows& rows, Arena* arena)
      : rows_(rows),
        width_(RoundUp(CeilDiv(rows.p.head_size, Dot<T>::kPerLane), Dot<T>::kAcross * kLanes)) {
    WithQueryType<T>(rows.p, [&](auto type) {
      using Q = decltype(type);
      const Q* const first = Query<Q>(0);
      if constexpr (std::is_same_v<Q, T> && sizeof(Q) * Dot<T>::kPerLane == sizeof(float)) {
        if (rows.AreSideBySide() && width_ * Dot<T>::kPerLane == rows.p.head_size &&
            reinterpret_cast<uintptr_t>(first) % alignof(float) == 0) {
          lanes_ = reinterpret_cast<const float*>(first);
          num_loaded_ = rows.count;
          return;
        }
      }
      lanes_ = copy_ = arena->Take<float>(rows.count * width_);
      for (int64_t row = 0; row < kRowsAhead; ++row) Prefetch<Q>(row);
    });
  }

  // Floats of a row.
  int64_t width() const { return width_; }

  // `count` rows, from `first` on.
  const float* At(int64_t first, int64_t count) {
    if (first + count > num_loaded_) LoadUntil(first + count);
    return lanes_ + first * width_;
  }

 private:
  template <typename Q>
  const Q* Query(int64_t row) const {
    return static_cast<const Q*>(rows_.p.query) + rows_.QueryOffset(row);
  }

  template <typename Q>
  void Prefetch(int64_t row) const {
    if (row < rows_.count) PrefetchRow(Query<Q>(row), rows_.p.head_size * sizeof(Q));
  }

  __attribute__((noinline)) void LoadUntil(int64_t end) {
    WithQueryType<T>(rows_.p, [&](auto type) {
      using Q = decltype(type);
      const int64_t head_size = rows_.p.head_size;
      for (; num_loaded_ < end; ++num_loaded_) {
        Prefetch<Q>(num_loaded_ + kRowsAhead);
        const Q* const query = Query<Q>(num_loaded_);
        for (int64_t w = 0; w < width_; w += Dot<T>::kAcross * kLanes) {
          const int64_t d = w * Dot<T>::kPerLane;
          Lanes vectors[Dot<T>::kAcross];
          Dot<T>::LoadQuery(query + d, head_size - d, vectors);
          std::memcpy(copy_ + num_loaded_ * width_ + w, vectors, sizeof(vectors));
        }
      }
    });
  }

  const Rows& rows_;
  const int64_t width_;
  const float* lanes_;      // [rows, width]
  float* copy_ = nullptr;   // the same; null: they are read where they lie
  int64_t num_loaded_ = 0;  // rows
};

}  // namespace
}  // namespace xla_gpu::paged_attention
