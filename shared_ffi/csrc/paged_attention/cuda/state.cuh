// The softmax state of a row: partial results are merged, the sink is added, and the row is
// written.
#pragma once

#include "mask.cuh"
#include "scratch.h"

namespace xla_gpu::paged_attention {

inline constexpr float kLn2 = 0.69314718055994530942f;
inline constexpr float kInfinity = __builtin_huge_valf();
__device__ __forceinline__ bool IsFinite(float x) { return fabsf(x) < kInfinity; }

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

// What up to kWarps partial results of a row, and its sink, become when they are merged at once:
// all are brought to the largest logit.
struct MergedParts {
  RowState state;
  float weights[kWarps];  // of the parts

  // state_of(n): of part n. The sink is -infinity if there is none.
  template <typename StateOf>
  __device__ __forceinline__ MergedParts(int num_parts, float sink, const StateOf& state_of) {
    state.max = sink;
#pragma unroll
    for (int n = 0; n < kWarps; ++n) {
      if (n < num_parts) state.max = fmaxf(state.max, state_of(n).max);
    }
    state.sum = SumOf(state.max, sink, num_parts, state_of);
#pragma unroll
    for (int n = 0; n < kWarps; ++n) {
      if (n < num_parts) weights[n] = gpu::Exp2(state_of(n).max - ShiftOf(state.max));
    }
  }

  // The sum of the weighted values: value_of(n) is that of part n.
  template <typename ValueOf>
  __device__ __forceinline__ float Sum(int num_parts, const ValueOf& value_of) const {
    float sum = 0;
#pragma unroll
    for (int n = 0; n < kWarps; ++n) {
      if (n >= num_parts) break;
      sum = gpu::Fma(weights[n], value_of(n), sum);
    }
    return sum;
  }
};

// Merges two partial results of a row: both are brought to the larger max. Splits are merged by
// groups (kSplitsOfGroup), whoever does it: a row's bits follow from its sequence alone.
struct Rescale {
  float before_factor;
  float split_factor;

  __device__ __forceinline__ Rescale(float max_before, float max_of_split) {
    const float shift = ShiftOf(fmaxf(max_before, max_of_split));
    before_factor = gpu::Exp2(max_before - shift);
    split_factor = gpu::Exp2(max_of_split - shift);
  }

  __device__ __forceinline__ float Merge(float before, float split) const {
    return gpu::Fma(split, split_factor, before * before_factor);
  }
};

// A row, with the columns of it that a lane has: kColumns, 32 apart.
template <int kColumns>
struct PartOfRow {
  RowState state = {-kInfinity, 0};
  float values[kColumns] = {};

  __device__ __forceinline__ void Merge(const PartOfRow& split) {
    const Rescale rescale(state.max, split.state.max);
    state = {fmaxf(state.max, split.state.max), rescale.Merge(state.sum, split.state.sum)};
#pragma unroll
    for (int k = 0; k < kColumns; ++k) values[k] = rescale.Merge(values[k], split.values[k]);
  }
};

// What a row's sums of values are divided by, given its sum of weights. That is 0 if the row
// attends to nothing and has no sink.
__device__ __forceinline__ float DivisorOf(bool attends, float sum) { return attends ? sum : 1; }

// Writes a row that all splits are merged into, for the columns from `column` on. The sink comes
// after the last split.
template <typename T, int kColumns>
__device__ __forceinline__ void WriteRow(const Params& p, int64_t token, int64_t head, int column,
                                         bool attends, const PartOfRow<kColumns>& row) {
  const float sink = SinkOf(p, head);
  const Rescale rescale(row.state.max, sink);
  const RowState state = {fmaxf(row.state.max, sink), rescale.Merge(row.state.sum, 1)};
  const float divisor = DivisorOf(attends, state.sum);
  T* output = static_cast<T*>(p.output) + p.OutputOffset(token, head);
  const auto num_columns = static_cast<int>(p.value_head_size);
#pragma unroll
  for (int k = 0; k < kColumns; ++k) {
    const int at = column + k * gpu::kWarpSize;
    const float value = row.values[k] * rescale.before_factor;
    if (at < num_columns) gpu::FromFloat(value / divisor, output + at);
  }
  if (column == 0) WriteLse(p, token, head, state);
}

// In place of the sum of a split whose partial result a later split of the row holds, too: a thread
// block merges adjacent splits itself.
inline constexpr float kMoved = -1;  // a sum is not negative

// Merges the partial results of a row, for the columns from `column` on. The partial
// results of a group are on their way at a time. `first_partial`: of split 0.
template <int kColumns>
__device__ __forceinline__ void MergeSplits(const Params& p, const Scratch& scratch,
                                            int64_t first_partial, int32_t num_splits, int64_t head,
                                            int column, PartOfRow<kColumns>* row) {
  static_assert(gpu::kWarpSize % kSplitsOfGroup == 0, "lanes have whole groups");
  const int lane = threadIdx.x % gpu::kWarpSize;
  const int64_t first = first_partial * p.num_heads + head;
  const float* partials = scratch.partials + first * p.value_head_size + column;
  const int64_t stride = p.num_heads * p.value_head_size;
  const auto num_columns = static_cast<int>(p.value_head_size);
  bool exists[kColumns];
#pragma unroll
  for (int k = 0; k < kColumns; ++k) exists[k] = column + k * gpu::kWarpSize < num_columns;
#pragma unroll 1
  for (int32_t begin = 0; begin < num_splits; begin += gpu::kWarpSize) {
    const int32_t count = min(gpu::kWarpSize, num_splits - begin);
    RowState of_lane{-kInfinity, kMoved};  // each lane has another split
    if (lane < count) of_lane = scratch.states[first + (begin + lane) * p.num_heads];
    const uint32_t there = gpu::LanesWith(of_lane.sum != kMoved);
#pragma unroll 1
    for (int32_t j = 0; j < count; j += kSplitsOfGroup) {
      PartOfRow<kColumns> splits[kSplitsOfGroup], group;
      const float* from = partials + (begin + j) * stride;
#pragma unroll
      for (int i = 0; i < kSplitsOfGroup; ++i, from += stride) {
        const bool is_there = (there >> (j + i) & 1) != 0;
#pragma unroll
        for (int k = 0; k < kColumns; ++k) {
          if (is_there && exists[k]) splits[i].values[k] = from[k * gpu::kWarpSize];
        }
      }
#pragma unroll
      for (int i = 0; i < kSplitsOfGroup; ++i) {
        splits[i].state = {gpu::Shuffle(of_lane.max, j + i), gpu::Shuffle(of_lane.sum, j + i)};
        if ((there >> (j + i) & 1) != 0) group.Merge(splits[i]);
      }
      row->Merge(group);
    }
  }
}

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
  const unsigned thread = gpu::Opaque(threadIdx.x);  // no address of it stays in a register
  const int lane = thread % gpu::kWarpSize, warp = thread / gpu::kWarpSize;
  if (thread == 0) Report(p, scratch, item, is_bad);
  // Each lane finds what concerns one of the warp's rows, which are every kWarps-th.
  const int own = lane * kWarps + warp;
  float weights[kWarps] = {}, divisor = 1;
  int64_t offset = 0;  // in the output, or in the partials
  if (own < item.num_rows) {
    const RowPlace place(p, item, own);
    const int64_t token = item.first_token + place.token;
    const auto state = [&](int64_t part) { return parts.states[part * parts.rows + own]; };
    const float sink = item.num_splits == 1 ? SinkOf(p, place.head) : -kInfinity;
    const MergedParts merged(parts.num_parts, sink, state);
#pragma unroll
    for (int part = 0; part < kWarps; ++part) {
      if (part < parts.num_parts) weights[part] = merged.weights[part];
    }
    const RowRange range = RowRange::OfToken(p, item, place.token);
    if (range.begin < range.end) divisor = merged.state.sum;  // without keys the sum is zero
    if (item.num_splits == 1) {
      offset = p.OutputOffset(token, place.head);
      WriteLse(p, token, place.head, merged.state);
    } else {
      const int64_t index = PartialOf(scratch, item, place) * p.num_heads + place.head;
      offset = index * p.value_head_size;
      scratch.states[index] = merged.state;
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
