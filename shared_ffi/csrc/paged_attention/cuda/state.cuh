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

// Adjacent columns of a row, as floats.
template <int kWidth>
struct alignas(kWidth * 4) Columns {
  float column[kWidth];
};

// Writes columns to the output.
__device__ __forceinline__ void WriteTo(float* output, const Columns<1>& columns) {
  *output = columns.column[0];
}
template <typename T>
__device__ __forceinline__ void WriteTo(T* output, const Columns<1>& columns) {
  gpu::FromFloat(columns.column[0], output);
}
template <typename T>
__device__ __forceinline__ void WriteTo(T* output, const Columns<4>& columns) {
  const float(&column)[4] = columns.column;
  *reinterpret_cast<uint2*>(output) =
      make_uint2(gpu::Pack(column[0], column[1], T{}), gpu::Pack(column[2], column[3], T{}));
}
__device__ __forceinline__ void WriteTo(float* partial, const Columns<4>& columns) {
  reinterpret_cast<Columns<2>*>(partial)[0] = {columns.column[0], columns.column[1]};
  reinterpret_cast<Columns<2>*>(partial)[1] = {columns.column[2], columns.column[3]};
}

// Merges the parts in their order and writes the rows: to the output, or to the scratch if the work
// item is a split. kWidth: columns that a lane writes at once.
template <typename T, int kWidth>
__device__ void WriteRows(const Params& p, const Scratch& scratch, const Item& item,
                          const Parts& parts, bool is_bad) {
  const int lane = threadIdx.x % gpu::kWarpSize, warp = threadIdx.x / gpu::kWarpSize;
  if (threadIdx.x == 0) Report(p, scratch, item, is_bad);
  // Each lane finds what concerns one of the warp's rows, which are every kWarps-th.
  const int own = lane * kWarps + warp;
  float weights[kWarps] = {}, divisor = 1;
  int64_t offset = 0;  // in the output, or in the partials
  if (own < item.num_rows) {
    const RowPlace place(p, item, own);
    const int64_t token = item.first_token + place.token;
    const auto state = [&](int64_t part) { return parts.states[part * parts.rows + own]; };
    const float sink = item.num_splits == 1 ? SinkOf(p, place.head) : -kInfinity;
    float max = sink;
    for (int part = 0; part < parts.num_parts; ++part) max = fmaxf(max, state(part).max);
    const float sum = SumOf(max, sink, parts.num_parts, state);
#pragma unroll
    for (int part = 0; part < kWarps; ++part) {
      if (part < parts.num_parts) weights[part] = gpu::Exp2(state(part).max - ShiftOf(max));
    }
    const RowRange range = RowRange::OfToken(p, item, place.token);
    if (range.begin < range.end) divisor = sum;  // without keys the sum is zero
    if (item.num_splits == 1) {
      offset = p.OutputOffset(token, place.head);
      WriteLse(p, token, place.head, {max, sum});
    } else {
      const int64_t index = PartialOf(scratch, item, place) * p.num_heads + place.head;
      offset = index * p.value_head_size;
      scratch.states[index] = {max, sum};
    }
  }
  // Calls write(place, divisor, &values) for the lane's columns of each row.
  const auto for_columns = [&](const auto& write) {
    const auto columns =
        static_cast<int>(Smaller(parts.columns, p.value_head_size - parts.first_column));
    const int first = lane * kWidth, num_rows = item.num_rows;
    const float* row_sums = parts.sums + warp * parts.stride;
#pragma unroll 1
    for (int i = 0; i * kWarps + warp < num_rows; ++i, row_sums += kWarps * parts.stride) {
      const int64_t row_offset = gpu::Shuffle(offset, i);
      const float row_divisor = gpu::Shuffle(divisor, i);
      float row_weights[kWarps];
#pragma unroll
      for (int part = 0; part < kWarps; ++part) {
        if (part < parts.num_parts) row_weights[part] = gpu::Shuffle(weights[part], i);
      }
#pragma unroll 1
      for (int d = first; d < columns; d += gpu::kWarpSize * kWidth) {
        Columns<kWidth> values = {};
#pragma unroll
        for (int part = 0; part < kWarps; ++part) {
          if (part >= parts.num_parts) break;
          const auto sums = *reinterpret_cast<const Columns<kWidth>*>(
              row_sums + part * parts.rows * parts.stride + d);
#pragma unroll
          for (int k = 0; k < kWidth; ++k) {
            values.column[k] = gpu::Fma(row_weights[part], sums.column[k], values.column[k]);
          }
        }
        write(row_offset + d, row_divisor, &values);
      }
    }
  };
  if (item.num_splits == 1) {
    T* const output = static_cast<T*>(p.output) + parts.first_column;
    for_columns([&](int64_t place, float row_divisor, Columns<kWidth>* values) {
#pragma unroll
      for (float& value : values->column) value /= row_divisor;
      WriteTo(output + place, *values);
    });
  } else {
    float* const partials = scratch.partials + parts.first_column;
    for_columns([&](int64_t place, float /*divisor*/, Columns<kWidth>* values) {
      WriteTo(partials + place, *values);
    });
  }
}

}  // namespace xla_gpu::paged_attention
