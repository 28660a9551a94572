// What both attention kernels do with the rows of an item besides attending: the mask before, and
// writing what was found after.
#pragma once

#include "schedule.cuh"

namespace xla_gpu::paged_attention {

inline constexpr float kLog2E = 1.44269504088896340736f;
inline constexpr float kInfinity = __builtin_huge_valf();

// The positions [begin, end) of an item that one of its rows attends to.
struct RowRange {
  int32_t begin;
  int32_t end;

  __device__ RowRange(const Params& p, const Item& item, int64_t row) : begin(0), end(0) {
    if (row >= item.num_rows) return;
    const int64_t position = item.first_position + (item.first_row + row) / Group(p);
    begin = static_cast<int32_t>(Larger(item.begin, p.WindowBegin(position)));
    end = static_cast<int32_t>(Smaller(item.end, position + 1));
  }

  __device__ bool Contains(int32_t position) const { return begin <= position && position < end; }
};

// Where a position lies in the cache, counted in positions; -1, and *is_bad set, where the table
// leads outside the pool.
__device__ __forceinline__ int64_t FindSlot(const Params& p, int64_t sequence, int32_t position,
                                            bool* is_bad) {
  const auto block_size = static_cast<uint32_t>(p.block_size);
  const uint32_t logical = static_cast<uint32_t>(position) / block_size;
  const uint32_t offset = static_cast<uint32_t>(position) % block_size;
  const int64_t block = p.block_tables[sequence * p.max_blocks_per_seq + logical];
  if (block < 0 || block >= p.num_blocks) {
    *is_bad = true;
    return -1;
  }
  return block * p.block_size + offset;
}

// The K of a slot and kv head; the V follows it.
template <typename T>
__device__ __forceinline__ const T* KeyOf(const Params& p, int64_t slot, int64_t kv_head) {
  return static_cast<const T*>(p.kv_cache) + (slot * p.num_kv_heads + kv_head) * 2 * p.head_size;
}

// Offset of a row's query, and of its output.
__device__ __forceinline__ int64_t RowOffset(const Params& p, const Item& item, int64_t row) {
  const int64_t group = Group(p), of_sequence = item.first_row + row;
  const int64_t token = item.first_token + of_sequence / group;
  return (token * p.num_heads + item.kv_head * group + of_sequence % group) * p.head_size;
}

// What `num_parts` warps found for the same rows at different positions, in shared memory.
struct Parts {
  int num_parts;
  const RowState* states;  // [num_parts, rows]
  const float* sums;       // [num_parts, rows, stride]
  int rows;
  int stride;
};

// Adds the parts up in their order and writes the rows: to the output, or, of a split, to the
// scratch.
template <typename T>
__device__ void WriteRows(const Params& p, const Scratch& scratch, const Item& item,
                          const Parts& parts, bool is_bad) {
  const int lane = threadIdx.x % gpu::kWarpSize, warp = threadIdx.x / gpu::kWarpSize;
  const int64_t group = Group(p);
  for (int row = warp; row < item.num_rows; row += kWarps) {
    float max = -kInfinity, weights[kWarps] = {}, sum = 0;
    for (int part = 0; part < parts.num_parts; ++part) {
      max = fmaxf(max, parts.states[part * parts.rows + row].max);
    }
    const float shift = max == -kInfinity ? 0.0f : max;
#pragma unroll
    for (int part = 0; part < kWarps; ++part) {
      if (part >= parts.num_parts) break;
      const RowState& state = parts.states[part * parts.rows + row];
      weights[part] = gpu::Exp2(state.max - shift);
      sum += weights[part] * state.sum;
    }
    const int64_t of_sequence = item.first_row + row;
    const int64_t i = of_sequence / group, head = item.kv_head * group + of_sequence % group;
    const int64_t index = scratch.Index(p, scratch.Place(p, item.sequence, i, item.first_token + i),
                                        head, item.split);
    T* output = static_cast<T*>(p.output) + RowOffset(p, item, row);
    float* partial = scratch.partials + index * p.head_size;
    for (int d = lane; d < p.head_size; d += gpu::kWarpSize) {
      float value = 0;
#pragma unroll
      for (int part = 0; part < kWarps; ++part) {
        if (part >= parts.num_parts) break;
        value += weights[part] * parts.sums[(part * parts.rows + row) * parts.stride + d];
      }
      if (item.num_splits == 1) {
        gpu::FromFloat(value / sum, output + d);
      } else {
        partial[d] = value;
      }
    }
    if (lane == 0 && item.num_splits > 1) {
      scratch.states[index] = {max, is_bad ? kBadSum : sum};
    }
    if (lane == 0 && item.num_splits == 1 && item.kv_head == 0) {
      scratch.is_bad[item.first_token + i] = is_bad;
    }
  }
}

}  // namespace xla_gpu::paged_attention
