// The softmax state of a row: partial results are merged, the sink is added, and the row is
// written.
#pragma once

#include "mask.cuh"
#include "scratch.h"

namespace xla_gpu::paged_attention {

inline constexpr float kLn2 = 0.69314718055994530942f;
inline constexpr float kInfinity = __builtin_huge_valf();

// The sink of a head, in units of 1 / log2(e).
__device__ inline float SinkOf(const Params& p, int64_t head) {
  return p.sinks == nullptr ? -kInfinity : p.Sink(head);
}

// Writes the log-sum-exp of a finished row. One thread calls it.
__device__ inline void WriteLse(const Params& p, int64_t token, int64_t head, const RowState& row) {
  if (p.lse == nullptr) return;
  p.lse[token * p.num_heads + head] = p.Lse(head, (row.max + log2f(row.sum)) * kLn2);
}

// What the logits of a row are taken relative to: the largest, if there is any.
__device__ __forceinline__ float ShiftOf(float max) { return max == -kInfinity ? 0.0f : max; }

// The sum of 2^(logit - ShiftOf(max)) over a row's sink and its `count` partial results, of which
// state(n) is one.
template <typename StateAt>
__device__ __forceinline__ float SumOf(float max, float sink, int64_t count, const StateAt& state) {
  const float shift = ShiftOf(max);
  float sum = gpu::Exp2(sink - shift);
#pragma unroll 4
  for (int64_t n = 0; n < count; ++n) {
    sum = gpu::Fma(gpu::Exp2(state(n).max - shift), state(n).sum, sum);
  }
  return sum;
}

// Rescale factors for merging two partial results: both are brought to the larger max. Splits are
// merged from the left, whoever does it: a row's bits follow from its sequence alone.
struct Rescale {
  float before_factor;
  float split_factor;

  __device__ Rescale(float max_before, float max_of_split) {
    const float shift = ShiftOf(fmaxf(max_before, max_of_split));
    before_factor = gpu::Exp2(max_before - shift);
    split_factor = gpu::Exp2(max_of_split - shift);
  }

  // The factors of another lane.
  __device__ Rescale FromLane(int lane) const {
    Rescale rescale(*this);
    rescale.before_factor = gpu::Shuffle(before_factor, lane);
    rescale.split_factor = gpu::Shuffle(split_factor, lane);
    return rescale;
  }

  __device__ float Join(float before, float split) const {
    return gpu::Fma(split, split_factor, before * before_factor);
  }
};

// Joins the sink of a row's head to what all splits have seen, after the last of them. Returns the
// factor of the row's sums of values.
__device__ __forceinline__ float JoinSink(const Params& p, int64_t head, RowState* row) {
  const float sink = SinkOf(p, head);
  const Rescale rescale(row->max, sink);
  *row = {fmaxf(row->max, sink), rescale.Join(row->sum, 1.0f)};
  return rescale.before_factor;
}

// A thread block that computes the first splits of a sequence and kv head folds them itself. It
// leaves the fold in the partial of the last of these splits, and its number as the state of a
// row's first split; or it writes the row, if it has all splits.
struct MergedSplits {
  static constexpr float kMerged = -1;  // in place of a sum, which is not negative
  static constexpr float kWritten = -2;

  static __device__ __forceinline__ RowState UpTo(int32_t split) {
    return {static_cast<float>(split), kMerged};
  }
  static __device__ __forceinline__ RowState All() { return {0, kWritten}; }

  // The first split to merge, given the state of split 0; -1 if the row is written.
  static __device__ __forceinline__ int32_t First(const RowState& state) {
    if (state.sum == kWritten) return -1;
    return state.sum == kMerged ? static_cast<int32_t>(state.max) : 0;
  }
};

// Where a row of a split leaves its partial result.
__device__ __forceinline__ int64_t PartialOf(const Scratch& scratch, const Item& item,
                                             const RowPlace& place) {
  const int64_t token = item.first_token + place.token;
  return scratch.Partial(item.sequence, place.token, token, item.num_splits) + item.split;
}

// Tells the Combine kernel whether a work item met a block id outside the pool, or a tree mask that
// is not legal. One thread calls it.
__device__ __forceinline__ void Report(const Params& p, const Scratch& scratch, const Item& item,
                                       bool is_bad) {
  if (item.kv_head != 0) return;
  *scratch.IsBad(p, item.sequence, item.first_token, item.flag, item.split, item.num_splits) =
      is_bad;
}

// The partial results, in shared memory, of `num_parts` warps for the same rows at different
// positions.
struct Parts {
  int num_parts;
  const RowState* states;  // [num_parts, rows]
  const float* sums;       // [num_parts, rows, stride]
  int rows;
  int stride;
  int columns;           // of V, or all that are left
  int first_column = 0;  // of V
};

// Merges the parts in their order and writes the rows: to the output, or to the scratch if the work
// item is a split.
template <typename T>
__device__ void WriteRows(const Params& p, const Scratch& scratch, const Item& item,
                          const Parts& parts, bool is_bad) {
  const int lane = threadIdx.x % gpu::kWarpSize, warp = threadIdx.x / gpu::kWarpSize;
  if (threadIdx.x == 0) Report(p, scratch, item, is_bad);
  for (int row = warp; row < item.num_rows; row += kWarps) {
    const RowPlace place(p, item, row);
    const int64_t token = item.first_token + place.token;
    const float sink = item.num_splits == 1 ? SinkOf(p, place.head) : -kInfinity;
    float max = sink, weights[kWarps] = {};
    for (int part = 0; part < parts.num_parts; ++part) {
      max = fmaxf(max, parts.states[part * parts.rows + row].max);
    }
    const auto state = [&](int64_t part) { return parts.states[part * parts.rows + row]; };
    const float sum = SumOf(max, sink, parts.num_parts, state);
#pragma unroll
    for (int part = 0; part < kWarps; ++part) {
      if (part < parts.num_parts) weights[part] = gpu::Exp2(state(part).max - ShiftOf(max));
    }
    const RowRange range(p, item, row);
    const float divisor = range.begin < range.end ? sum : 1.0f;  // without keys the sum is zero
    const int64_t index = PartialOf(scratch, item, place) * p.num_heads + place.head;
    T* output = static_cast<T*>(p.output) + OutputOffset(p, item, row);
    output += parts.first_column;
    float* partial = scratch.partials + index * p.value_head_size + parts.first_column;
    const int64_t columns = Smaller(parts.columns, p.value_head_size - parts.first_column);
    for (int d = lane; d < columns; d += gpu::kWarpSize) {
      float value = 0;
#pragma unroll
      for (int part = 0; part < kWarps; ++part) {
        if (part >= parts.num_parts) break;
        value = gpu::Fma(weights[part], parts.sums[(part * parts.rows + row) * parts.stride + d],
                         value);
      }
      if (item.num_splits == 1) {
        gpu::FromFloat(value / divisor, output + d);
      } else {
        partial[d] = value;
      }
    }
    if (lane == 0 && item.num_splits > 1) scratch.states[index] = {max, sum};
    if (lane == 0 && item.num_splits == 1) WriteLse(p, token, place.head, {max, sum});
  }
}

}  // namespace xla_gpu::paged_attention
