// Partial results of rows: those of the splits of a sequence, in the scratch, and those of the
// warps of a thread block, in shared memory. They are merged and written.
#pragma once

#include "state.cuh"

namespace xla_gpu::paged_attention {

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

// In place of the number of a row that does not exist: the host has checked that none has it.
inline constexpr uint32_t kNoRow = UINT32_MAX;

// What becomes of a row of a work item whose partial results are to be merged and written.
struct FinishedRow {
  float weights[kWarps] = {};  // of the partial results; those of a whole row make its average
  int64_t number = 0;          // among the rows of the output, or of the partials

  FinishedRow() = default;
  // Also writes the row's state, or its log-sum-exp. state_of(n): of partial result n.
  template <typename StateOf>
  __device__ __forceinline__ FinishedRow(const Params& p, const Scratch& scratch, const Item& item,
                                         int row, int num_parts, const StateOf& state_of) {
    const RowPlace place(p, item, row);
    const int64_t token = item.first_token + place.token;
    const bool is_whole = item.num_splits == 1;
    const MergedParts merged(num_parts, is_whole ? SinkOf(p, place.head) : -kInfinity, state_of);
    float divisor = 1;
    if (is_whole) {
      const RowRange range = RowRange::OfToken(p, item, place.token);
      divisor = DivisorOf(range.begin < range.end, merged.state.sum);
      number = token * p.num_heads + place.head;
      WriteLse(p, token, place.head, merged.state);
    } else {
      number = PartialOf(scratch, item, place) * p.num_heads + place.head;
      scratch.states[number] = merged.state;
    }
    // Once for the row: a division of each column takes eight instructions.
#pragma unroll
    for (int part = 0; part < kWarps; ++part) {
      if (part < num_parts) weights[part] = merged.weights[part] / divisor;
    }
  }
};

// Merges the parts in their order and writes the rows: to the output, or to the scratch if the work
// item is a split. kWidth: columns that a lane writes at once.
template <typename T, int kWidth>
__device__ void WriteRows(const Params& p, const Scratch& scratch, const Item& item,
                          const Parts& parts, bool is_bad) {
  const unsigned thread = gpu::Opaque(threadIdx.x);  // no address of it stays in a register
  const int lane = thread % gpu::kWarpSize, warp = thread / gpu::kWarpSize;
  if (thread == 0) Report(p, scratch, item, is_bad);
  // Each lane finds what concerns one of the warp's rows, which are every kWarps-th.
  const int own_row = lane * kWarps + warp;
  FinishedRow own;
  if (own_row < item.num_rows) {
    own = FinishedRow(p, scratch, item, own_row, parts.num_parts,
                      [&](int64_t part) { return parts.states[part * parts.rows + own_row]; });
  }
  const int64_t offset = own.number * p.value_head_size;
  // Writes the lane's columns of each row behind `to`, where row 0 has the first of the parts'.
  const auto write_rows = [&](auto* to) {
    const auto columns =
        static_cast<int>(Smaller(parts.columns, p.value_head_size - parts.first_column));
    const int first = lane * kWidth, num_rows = item.num_rows;
    const float* row_sums = parts.sums + warp * parts.stride;
#pragma unroll 1
    for (int i = 0; i * kWarps + warp < num_rows; ++i, row_sums += kWarps * parts.stride) {
      const int64_t row_offset = gpu::Shuffle(offset, i);
      float row_weights[kWarps];
#pragma unroll
      for (int part = 0; part < kWarps; ++part) {
        if (part < parts.num_parts) row_weights[part] = gpu::Shuffle(own.weights[part], i);
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
        WriteTo(to + row_offset + d, values);
      }
    }
  };
  if (item.num_splits == 1) {
    write_rows(static_cast<T*>(p.output) + parts.first_column);
  } else {
    write_rows(scratch.partials + parts.first_column);
  }
}

}  // namespace xla_gpu::paged_attention
