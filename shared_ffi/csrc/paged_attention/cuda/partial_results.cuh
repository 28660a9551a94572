// Partial results of rows: those of the splits of a sequence, in the scratch, and those of the
// warps of a thread block, in shared memory. They are merged and written.
#pragma once

#include "leaf.cuh"
#include "schedule.cuh"

namespace xla_gpu::paged_attention {

// In place of the sum of a split whose partial result a later split of the row holds, too: a thread
// block merges adjacent splits itself.
inline constexpr float kMoved = -1;  // a sum is not negative

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
__device__ __forceinline__ void WriteTo(T* output, const Columns<2>& columns) {
  *reinterpret_cast<uint32_t*>(output) = gpu::Pack(columns.column[0], columns.column[1], T{});
}
__device__ __forceinline__ void WriteTo(float* partial, const Columns<2>& columns) {
  *reinterpret_cast<Columns<2>*>(partial) = columns;
}
template <typename T>
__device__ __forceinline__ void WriteTo(T* output, const Columns<4>& columns) {
  const float(&column)[4] = columns.column;
  *reinterpret_cast<uint2*>(output) =
      make_uint2(gpu::Pack(column[0], column[1], T{}), gpu::Pack(column[2], column[3], T{}));
}
__device__ __forceinline__ void WriteTo(float* partial, const Columns<4>& columns) {
  *reinterpret_cast<Columns<4>*>(partial) = columns;
}

// A row, with the columns of it that a lane has: kColumnsAtOnce adjacent ones, and as many each 128
// columns behind them.
template <int kColumns>
struct PartOfRow {
  static constexpr int kGroups = kColumns / kColumnsAtOnce;

  RowState state = {-kInfinity, 0};
  Columns<kColumnsAtOnce> values[kGroups] = {};

  __device__ __forceinline__ void AddValues(const Fold& fold,
                                            const Columns<kColumnsAtOnce> (&part)[kGroups]) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int k = 0; k < kColumnsAtOnce; ++k) {
        float& value = values[g].column[k];
        value = fold.Add(value, part[g].column[k]);
      }
    }
  }
};

// How the part of each lane is added to the total of those of the lanes before it. `reference`: of
// the total before the first of them; becomes that behind the last. It rarely follows a part, so no
// lane waits for the one before.
__device__ __forceinline__ Fold FoldOfLane(int lane, float part_max, float* reference) {
  float own_reference = *reference, before = 1;
  uint32_t lanes_left = gpu::kAllLanes;
#pragma unroll 1
  while (true) {
    const uint32_t following = gpu::LanesWith(part_max > *reference + kFoldSlack) & lanes_left;
    if (following == 0) break;
    const int next = gpu::FirstOf(following);
    const float followed = gpu::Shuffle(part_max, next);
    if (lane == next) before = gpu::Exp2(*reference - followed);
    if (lane >= next) own_reference = followed;
    *reference = followed;
    lanes_left = gpu::kAllLanes - 1 << next;
  }
  return {before, gpu::Exp2(part_max - own_reference)};
}

// The columns of rows of an array that a lane has, as a PartOfRow.
struct LaneColumns {
  int first;
  int count;        // of a row
  bool are_chunks;  // rows are whole groups of kColumnsAtOnce, at multiples of a group's size

  // Whether the lane has any of a row's columns.
  __device__ __forceinline__ bool Exist() const { return first < count; }

  // Zeros where there are none, or if not `is_there`, which implies that any Exist. `row` has the
  // column `first`.
  template <int kColumns>
  __device__ __forceinline__ void Read(const float* row, bool is_there,
                                       PartOfRow<kColumns>* to) const {
#pragma unroll
    for (int g = 0; g < to->kGroups; ++g) {
      const int left = count - first - g * kColumnStep;
      const float* from = row + g * kColumnStep;
      to->values[g] = {};
      if (!is_there || (g > 0 && left <= 0)) continue;
      if (are_chunks) {
        to->values[g] = *reinterpret_cast<const Columns<kColumnsAtOnce>*>(from);
      } else {
#pragma unroll
        for (int k = 0; k < kColumnsAtOnce; ++k) {
          if (k < left) to->values[g].column[k] = from[k];
        }
      }
    }
  }

  template <typename T, int kColumns>
  __device__ __forceinline__ void Write(const PartOfRow<kColumns>& from, T* row) const {
#pragma unroll
    for (int g = 0; g < from.kGroups; ++g) {
      const int left = count - first - g * kColumnStep;
      T* to = row + g * kColumnStep;
      if (are_chunks) {
        if (left > 0) WriteTo(to, from.values[g]);
      } else {
#pragma unroll
        for (int k = 0; k < kColumnsAtOnce; ++k) {
          if (k < left) gpu::FromFloat(from.values[g].column[k], to + k);
        }
      }
    }
  }
};

// How up to 32 parts of a row are folded, in shared memory. A warp has one.
struct FoldFactors {
  struct alignas(16) OfPart {
    Fold fold;
    float sum;
    float padding;  // written, too: one store of 16 bytes has no bank conflicts
  };
  OfPart parts[gpu::kWarpSize];
};

// Folds the partial results of the `count` splits of a row for the columns of a lane: leaves within
// groups, then groups, always from the left. first_partial: of the first split. The factors of a
// group's leaves, or of 32 groups, are there before the first is folded, each lane's of another
// part. kAtOnce: parts that are on their way while as many are folded.
template <int kAtOnce, int kColumns>
class RowOfSplits {
  using Row = PartOfRow<kColumns>;

 public:
  __device__ __forceinline__ RowOfSplits(const Params& p, const Scratch& scratch,
                                         int64_t first_partial, int64_t head,
                                         const LaneColumns& columns, FoldFactors* factors)
      : columns_(columns),
        factors_(*factors),
        lane_(gpu::Opaque(threadIdx.x) % gpu::kWarpSize),
        // A token's query would have 8 GiB otherwise.
        stride_(static_cast<uint32_t>(p.num_heads * p.value_head_size)),
        num_heads_(static_cast<uint32_t>(p.num_heads)),
        states_(scratch.states + first_partial * p.num_heads + head),
        partials_(scratch.partials + (first_partial * p.num_heads + head) * p.value_head_size +
                  columns.first) {}

  __device__ __forceinline__ Row Merge(const Splits& splits) {
    Row total;
    if (splits.count > 0) total.state.max = kNoReference;
#pragma unroll 1
    for (int32_t split = 0; split < splits.count;) {
      const bool is_first = split == 0;
      if (!splits.are_leaves) {
        const int32_t count = min(gpu::kWarpSize, splits.count - split);
        FoldParts(split, count, is_first, &total);
        split += count;
        continue;
      }
      const int32_t leaf = splits.first + split;
      const int32_t in_group = LeafOf(GroupEnd(LeafBegin(leaf))) - leaf;
      const int32_t count = min(in_group, splits.count - split);
      Row group;
      group.state.max = kNoReference;
      FoldParts(split, count, /*is_first=*/true, &group);
      if (is_first) {
        total = group;
      } else {
        const Fold fold(&total.state, group.state);
        total.AddValues(fold, group.values);
      }
      split += count;
    }
    return total;
  }

 private:
  // is_first: nothing is in the total, which becomes the first of the parts. At most 32 parts.
  __device__ __forceinline__ void FoldParts(int32_t begin, int32_t count, bool is_first,
                                            Row* total) {
    float2 loaded = {kNoReference, 0};  // at once: a RowState
    if (lane_ < count) {
      const int64_t offset = int64_t{begin + lane_} * num_heads_;
      loaded = *reinterpret_cast<const float2*>(states_ + offset);
    }
    const RowState part{fmaxf(loaded.x, kNoReference), loaded.y};
    const float* from = partials_ + int64_t{begin} * stride_;
    int32_t left = columns_.Exist() ? count : 0;
    Row parts[2][kAtOnce];
    const auto read = [&](Row(&to)[kAtOnce]) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        columns_.Read(from + uint64_t{stride_} * i, i < left, &to[i]);
      }
      left -= kAtOnce;
      from += uint64_t{stride_} * kAtOnce;
    };
    read(parts[0]);

    if (is_first) total->state.max = gpu::Shuffle(part.max, 0);
    factors_.parts[lane_] = {FoldOfLane(lane_, part.max, &total->state.max), part.sum, 0};
    __syncwarp();

    const auto fold = [&](int32_t j, const Row(&from_parts)[kAtOnce]) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (j + i >= count) break;
        const FoldFactors::OfPart of_part = factors_.parts[j + i];
        if (is_first && j + i == 0) {
          total->state.sum = of_part.sum;
#pragma unroll
          for (int g = 0; g < Row::kGroups; ++g) total->values[g] = from_parts[0].values[g];
        } else {
          total->state.sum = of_part.fold.Add(total->state.sum, of_part.sum);
          total->AddValues(of_part.fold, from_parts[i].values);
        }
      }
    };
#pragma unroll 1
    for (int32_t j = 0; j < count; j += 2 * kAtOnce) {
      read(parts[1]);
      fold(j, parts[0]);
      if (j + kAtOnce >= count) break;
      read(parts[0]);
      fold(j + kAtOnce, parts[1]);
    }
    __syncwarp();
  }

  const LaneColumns& columns_;
  FoldFactors& factors_;
  const int lane_;
  const uint32_t stride_;  // of partials
  const uint32_t num_heads_;
  const RowState* states_;
  const float* partials_;
};

// Writes a row that all splits are merged into, times `scale`, for the columns of a lane. The sink
// comes after the last split.
template <typename T, int kColumns>
__device__ __forceinline__ void WriteRow(const Params& p, int64_t token, int64_t head,
                                         const LaneColumns& columns, bool attends, float scale,
                                         const PartOfRow<kColumns>& row) {
  const WithSink whole(SinkOf(p, head), row.state);
  const float weight = whole.weight / NonZeroSum(attends, whole.state.sum) * scale;
  PartOfRow<kColumns> divided;
#pragma unroll
  for (int g = 0; g < row.kGroups; ++g) {
#pragma unroll
    for (int k = 0; k < kColumnsAtOnce; ++k) {
      divided.values[g].column[k] = gpu::Fma(weight, row.values[g].column[k], 0.0f);
    }
  }
  columns.Write(divided, static_cast<T*>(p.output) + p.OutputOffset(token, head) + columns.first);
  if (columns.first == 0) WriteLse(p, token, head, whole.state);
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

// What a thread block has found of its rows, in shared memory.
struct FoundRows {
  const RowState* states;  // [rows]
  const float* sums;       // [rows, stride]
  int stride;
  int columns;           // of V, or all that are left
  int first_column = 0;  // of V
};

// In place of the number of a row that does not exist: the host has checked that none has it.
inline constexpr uint32_t kNoRow = UINT32_MAX;

// What becomes of a row of a work item.
struct FinishedRow {
  float weight = 0;    // of its sums: that of a whole row makes them its average
  int64_t number = 0;  // among the rows of the output, or of the partials

  FinishedRow() = default;
  // Also writes the row's state, or its log-sum-exp.
  __device__ __forceinline__ FinishedRow(const Params& p, const Scratch& scratch, const Item& item,
                                         int row, const RowState& found) {
    const RowPlace place(p, item, row);
    const int64_t token = item.first_token + place.token;
    const bool is_whole = item.num_splits == 1;
    const WithSink finished(is_whole ? SinkOf(p, place.head) : -kInfinity, found);
    float divisor = 1;
    if (is_whole) {
      const RowRange range = RowRange::OfToken(p, item, place.token);
      divisor = NonZeroSum(range.begin < range.end, finished.state.sum);
      number = token * p.num_heads + place.head;
      WriteLse(p, token, place.head, finished.state);
    } else {
      number = PartialOf(scratch, item, place) * p.num_heads + place.head;
      scratch.states[number] = finished.state;
    }
    // Once for the row: a division of each column takes eight instructions.
    weight = finished.weight / divisor;
  }
};

// Writes the rows: to the output, or to the scratch if the work item is a split. kWidth: columns
// that a lane writes at once.
template <typename T, int kWidth>
__device__ void WriteRows(const Params& p, const Scratch& scratch, const Item& item,
                          const FoundRows& rows, bool is_bad) {
  const unsigned thread = gpu::Opaque(threadIdx.x);  // no address of it stays in a register
  const int lane = thread % gpu::kWarpSize, warp = thread / gpu::kWarpSize;
  if (thread == 0) Report(p, scratch, item, is_bad);
  // Each lane finds what concerns one of the warp's rows, which are every kWarps-th.
  const int own_row = lane * kWarps + warp;
  FinishedRow own;
  if (own_row < item.num_rows) {
    own = FinishedRow(p, scratch, item, own_row, rows.states[own_row]);
  }
  const int64_t offset = own.number * p.value_head_size;
  // Writes the lane's columns of each row behind `to`, where row 0 has the first of `rows`.
  const auto write_rows = [&](auto* to) {
    const auto columns =
        static_cast<int>(Smaller(rows.columns, p.value_head_size - rows.first_column));
    const int first = lane * kWidth, num_rows = item.num_rows;
    const float* row_sums = rows.sums + warp * rows.stride;
#pragma unroll 1
    for (int i = 0; i * kWarps + warp < num_rows; ++i, row_sums += kWarps * rows.stride) {
      const int64_t row_offset = gpu::Shuffle(offset, i);
      const float weight = gpu::Shuffle(own.weight, i);
#pragma unroll 1
      for (int d = first; d < columns; d += gpu::kWarpSize * kWidth) {
        auto values = *reinterpret_cast<const Columns<kWidth>*>(row_sums + d);
#pragma unroll
        for (float& value : values.column) value = gpu::Fma(weight, value, 0.0f);
        WriteTo(to + row_offset + d, values);
      }
    }
  };
  if (item.num_splits == 1) {
    write_rows(static_cast<T*>(p.output) + rows.first_column);
  } else {
    write_rows(scratch.partials + rows.first_column);
  }
}

}  // namespace xla_gpu::paged_attention
