// Attention without tensor cores, in plain float32: for float32 storage and for head sizes that the
// tensor core kernel does not support. It is the simplest kernel: read it first.
//
// A warp computes four rows. It walks over the positions in KV tiles of 32. Lane j computes the
// logits of position j. Then all lanes add up the weighted V, each in its own columns.
#pragma once

#include "../page_table.cuh"
#include "../partial_results.cuh"
#include "../schedule.cuh"

namespace xla_gpu::paged_attention {

inline constexpr int kRowsPerWarp = 4;
inline constexpr int kCoreRows = kWarps * kRowsPerWarp;  // of a work item

template <typename T, int kColumns>
__global__ void __launch_bounds__(kThreads, 2)
    CudaCoreAttention(Params p, Scratch scratch, QueryLengths lengths) {
  const int stride = kColumns * gpu::kWarpSize;  // head_size, rounded up
  char* memory = gpu::SharedMemory();
  float* queries = reinterpret_cast<float*>(memory);  // [kCoreRows, stride]; the sums later
  RowState* states = reinterpret_cast<RowState*>(queries + kCoreRows * stride);  // [kCoreRows]
  auto* shared = reinterpret_cast<Schedule::Shared*>(states + kCoreRows);

  const int lane = threadIdx.x % gpu::kWarpSize, warp = threadIdx.x / gpu::kWarpSize;
  ResetCounter(scratch);
  gpu::LetNextKernelBegin();
  Schedule schedule(p, lengths, kCoreRows, shared);
  while (const Item* found = schedule.FindDealt()) {
    const Item& item = *found;
    WithQueryType<T>(p, [&](auto type) {
      using Q = decltype(type);
      for (int i = threadIdx.x; i < kCoreRows * stride; i += kThreads) {
        const int row = i / stride, d = i % stride;
        const bool exists = row < item.num_rows && d < p.head_size;
        queries[i] =
            exists ? gpu::ToFloat(static_cast<const Q*>(p.query)[QueryOffset(p, item, row) + d])
                   : 0.0f;
      }
    });
    __syncthreads();

    // With few rows, all warps compute the same rows and divide the positions among themselves.
    const int num_parts = item.num_rows <= kRowsPerWarp ? kWarps : 1;
    const int part = num_parts == 1 ? 0 : warp;
    const int first_row = num_parts == 1 ? warp * kRowsPerWarp : 0;
    const float* query = queries + first_row * stride;
    const RowRange ranges[kRowsPerWarp] = {{p, item, first_row},
                                           {p, item, first_row + 1},
                                           {p, item, first_row + 2},
                                           {p, item, first_row + 3}};
    const RowHoles holes[kRowsPerWarp] = {{p, item, first_row},
                                          {p, item, first_row + 1},
                                          {p, item, first_row + 2},
                                          {p, item, first_row + 3}};
    RowState state[kRowsPerWarp];
    float sums[kRowsPerWarp][kColumns] = {};
    for (RowState& row : state) row = {-kInfinity, 0};
    bool is_bad = HasBadTree(p, item, threadIdx.x);

    const int32_t step = num_parts * gpu::kWarpSize;
    const int32_t turn = (part + NumTilesBefore(p, item, gpu::kWarpSize)) % num_parts;
    const int32_t first = (item.begin / gpu::kWarpSize + turn) * gpu::kWarpSize;
    for (int32_t tile = first; tile < item.end; tile += step) {
      const int32_t position = tile + lane;
      const bool is_inside = item.begin <= position && position < item.end;
      const Slot<T> place = is_inside ? FindSlot<T>(p, item, position, &is_bad) : Slot<T>();
      const int64_t slot = place.offset;
      float weights[kRowsPerWarp] = {};
      if (slot >= 0) {
        const T* key = KeyOf<T>(p, slot, item.kv_head);
        const auto multiply_add_number = [&](int d, float k) {
          for (int r = 0; r < kRowsPerWarp; ++r)
            weights[r] = gpu::Fma(query[r * stride + d], k, weights[r]);
        };
        const auto multiply_add = [&](int d, T element) {
          if (IsInt4<T>(p.cache_dtype)) {
            for (int i = 0; i < 2; ++i) multiply_add_number(2 * d + i, NumberOf(&element, i));
          } else {
            multiply_add_number(d, gpu::ToFloat(element));
          }
        };
        const int64_t row_size = IsInt4<T>(p.cache_dtype) ? p.head_size / 2 : p.head_size;
        int d = 0;
        if (reinterpret_cast<uintptr_t>(key) % 16 == 0) {  // 16 bytes at once
          constexpr int kElements = 16 / sizeof(T);
          struct alignas(16) Elements {
            T element[kElements];
          };
          for (; d + kElements <= row_size; d += kElements) {
            const Elements elements = *reinterpret_cast<const Elements*>(key + d);
#pragma unroll
            for (int i = 0; i < kElements; ++i) multiply_add(d + i, elements.element[i]);
          }
        }
        for (; d < row_size; ++d) multiply_add(d, key[d]);
      }
      for (int r = 0; r < kRowsPerWarp; ++r) {
        const bool attends =
            slot >= 0 && ranges[r].Contains(position) && !holes[r].Contain(position);
        float logit = weights[r] * p.scale;
        if constexpr (kIs8Bit<T>) logit *= place.k_scale;
        if (p.soft_cap > 0) logit = p.soft_cap * tanhf(logit / p.soft_cap);
        logit = attends ? logit * kLog2E : -kInfinity;
        if (p.alibi_slopes != nullptr)
          logit = AlibiBias(p, item, first_row + r).AddTo(logit, position);
        float max = logit;
        for (int mask = gpu::kWarpSize / 2; mask > 0; mask /= 2) {
          max = fmaxf(max, gpu::ShuffleXor(max, mask));
        }
        max = fmaxf(max, state[r].max);
        const float shift = max == -kInfinity ? 0.0f : max;
        const float rescale = gpu::Exp2(state[r].max - shift);
        weights[r] = gpu::Exp2(logit - shift);
        state[r] = {max, gpu::Fma(state[r].sum, rescale, weights[r])};
        for (float& sum : sums[r]) sum *= rescale;
        if constexpr (kIs8Bit<T>) weights[r] *= place.v_scale;
      }
      for (int j = 0; j < gpu::kWarpSize; ++j) {
        const int64_t slot_j = gpu::Shuffle(slot, j);
        if (slot_j < 0) continue;
        const T* value = ValueOf<T>(p, slot_j, item.kv_head);
        float v[kColumns];
        for (int i = 0; i < kColumns; ++i) {
          const int d = i * gpu::kWarpSize + lane;
          v[i] = 0;
          if (d >= p.value_head_size) continue;
          v[i] = IsInt4<T>(p.value_cache_dtype) ? NumberOf(value, d) : gpu::ToFloat(value[d]);
        }
        for (int r = 0; r < kRowsPerWarp; ++r) {
          const float weight = gpu::Shuffle(weights[r], j);
          // Skipped, not multiplied by zero: V may be NaN where the row does not attend.
          if (!ranges[r].Contains(tile + j) || holes[r].Contain(tile + j)) continue;
          for (int i = 0; i < kColumns; ++i) sums[r][i] = gpu::Fma(weight, v[i], sums[r][i]);
        }
      }
    }
    is_bad = __syncthreads_or(is_bad);  // all have read the queries, whose place the sums take

    for (int r = 0; r < kRowsPerWarp; ++r) {
      float sum = state[r].sum;
      for (int mask = gpu::kWarpSize / 2; mask > 0; mask /= 2) sum += gpu::ShuffleXor(sum, mask);
      const int row = warp * kRowsPerWarp + r;
      if (lane == 0) states[row] = {state[r].max, sum};
      for (int i = 0; i < kColumns; ++i) {
        queries[row * stride + i * gpu::kWarpSize + lane] = sums[r][i];
      }
    }
    __syncthreads();
    const int rows = num_parts == 1 ? kCoreRows : kRowsPerWarp;
    const Parts parts{num_parts, states, queries, rows, stride, stride};
    WithQueryType<T>(p, [&](auto type) {
      WriteRows<decltype(type), /*kWidth=*/1>(p, scratch, item, parts, is_bad);
    });
  }
}

template <int kColumns>
constexpr int CudaCoreSharedBytes() {
  return static_cast<int>(kCoreRows *
                              (kColumns * gpu::kWarpSize * sizeof(float) + sizeof(RowState)) +
                          sizeof(Schedule::Shared));
}

}  // namespace xla_gpu::paged_attention
