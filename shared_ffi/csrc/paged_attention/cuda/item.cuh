// A work item, and the rows that it has.
#pragma once

#include "../../gpu/device.cuh"
#include "limits.h"

namespace xla_gpu::paged_attention {

static_assert(kThreads == kWarps * gpu::kWarpSize);

// The barrier of a schedule's threads: the first kThreads of a thread block.
inline constexpr int kScheduleBarrier = 0;

// A work item: a query tile of one sequence, the kv head that its rows read, and the positions of
// one split. Row r of the sequence and kv head is query token r / group, query head kv_head * group
// + r % group.
struct Item {
  int32_t sequence;
  int32_t kv_head;
  int64_t first_row;
  int32_t num_rows;
  int32_t first_token;     // the sequence's first token in the batch
  int32_t first_position;  // position of the sequence's first query token
  int32_t context_len;     // of the sequence
  int32_t begin;           // [begin, end): the positions that any of the rows attends to
  int32_t end;
  int32_t split;
  int32_t num_splits;
  int32_t flag;  // where it reports what is bad: Scratch::IsBad
  bool is_causal;

  __device__ QueryTokens Tokens() const {
    return {first_token, first_position, context_len, is_causal};
  }
};

// The query token of a row of a work item, counted from the first of its sequence. The host has
// checked that all rows have a number below 2^31.
__device__ __forceinline__ int64_t TokenOf(const Params& p, const Item& item, int64_t row) {
  return p.group.Quotient(static_cast<uint32_t>(item.first_row + row));
}

// The positions of the first and of the last row of a work item.
__device__ inline int64_t FirstPosition(const Params& p, const Item& item) {
  return item.first_position + TokenOf(p, item, 0);
}

__device__ inline int64_t LastPosition(const Params& p, const Item& item) {
  return item.first_position + TokenOf(p, item, item.num_rows - 1);
}

// A row's query token, counted from the first of its sequence, and its query head.
struct RowPlace {
  int64_t token;
  int64_t head;

  __device__ RowPlace(int64_t token, int64_t head) : token(token), head(head) {}
  __device__ RowPlace(const Params& p, const Item& item, int64_t row) {
    token = TokenOf(p, item, row);
    head = item.first_row + row + (item.kv_head - token) * p.group.number;
  }
};

// The offset of a row in query.
__device__ __forceinline__ int64_t QueryOffset(const Params& p, const Item& item, int64_t row) {
  const RowPlace place(p, item, row);
  return p.QueryOffset(item.first_token + place.token, place.head);
}

// The KV tiles [begin, end) that hold a work item's positions.
struct Tiles {
  int32_t begin;
  int32_t end;

  __device__ Tiles(const Item& item, int32_t tile)
      : begin(item.begin / tile), end(max(begin, (item.end + tile - 1) / tile)) {}
};

__device__ __forceinline__ bool IsIn(const Item& item, int32_t position) {
  return item.begin <= position && position < item.end;
}

// Calls what(Q()) for the type Q of query and output. T is the type of the cache; Q is T unless T
// has 8 bits.
template <typename T, typename Do>
__device__ __forceinline__ void WithQueryType(const Params& p, const Do& what) {
  if constexpr (!kIs8Bit<T>) {
    what(T());
  } else if (p.dtype == DType::kFloat32) {
    what(float());
  } else if (p.dtype == DType::kFloat16) {
    what(Half());
  } else {
    what(BFloat16());
  }
}

}  // namespace xla_gpu::paged_attention
