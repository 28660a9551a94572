// Attention without tensor cores, in plain float32: for float32 storage and for head sizes that the
// tensor core kernel does not support. It is the simplest kernel: read it first.
//
// A warp computes four rows. It walks over the positions in KV tiles of 32. Lane j computes the
// logits of position j. Then all lanes add up the weighted V, each in its own columns. It does so
// for each quarter of a leaf apart (order.h), and adds up the quarters. With few rows each warp has
// one quarter of all rows: no bit depends on who computes it.
#pragma once

#include "../leaf.cuh"
#include "../page_table.cuh"
#include "../partial_results.cuh"
#include "../scaled_numbers.cuh"
#include "../schedule.cuh"

namespace xla_gpu::paged_attention::portable {

inline constexpr int kRowsPerWarp = 4;
inline constexpr int kCoreRows = kWarps * kRowsPerWarp;  // of a work item

// T: type of the cache.
template <typename T, int kColumns>
__global__ void __launch_bounds__(kThreads, 2)
    CudaCoreAttention(Params p, Scratch scratch, QueryLengths lengths) {
  constexpr bool kIsScaled = std::is_same_v<T, ScaledByte>;
  const int stride = kColumns * gpu::kWarpSize;  // head_size, rounded up
  char* memory = gpu::SharedMemory();
  float* queries = reinterpret_cast<float*>(memory);  // [kCoreRows, stride]; the sums later
  float* parts = queries + kCoreRows * stride;        // [kCoreRows, stride]: the sums of a leaf
  RowState* states = reinterpret_cast<RowState*>(parts + kCoreRows * stride);  // [kCoreRows]
  auto* shared = reinterpret_cast<Schedule::Shared*>(states + kCoreRows);

  const int lane = threadIdx.x % gpu::kWarpSize, warp = threadIdx.x / gpu::kWarpSize;
  ResetCounter(scratch);
  gpu::LetNextKernelBegin();
  Schedule schedule(p, lengths, kCoreRows, shared);
  [[maybe_unused]] const ScaledNumbers keys(p.cache_dtype, p.k_groups);
  [[maybe_unused]] const ScaledNumbers values(p.value_cache_dtype, p.v_groups);
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

    // With few rows, all warps compute the same rows, and each finishes one.
    const bool are_few = item.num_rows <= kRowsPerWarp;
    const int first_row = are_few ? 0 : warp * kRowsPerWarp;
    const float* query = queries + first_row * stride;
    const RowRange ranges[kRowsPerWarp] = {{p, item, first_row},
                                           {p, item, first_row + 1},
                                           {p, item, first_row + 2},
                                           {p, item, first_row + 3}};
    const RowHoles holes[kRowsPerWarp] = {{p, item, first_row},
                                          {p, item, first_row + 1},
                                          {p, item, first_row + 2},
                                          {p, item, first_row + 3}};
    bool is_bad = HasBadTree(p, item, threadIdx.x);

    // What the warp adds up in KV tiles of 32 positions, one after the other.
    const auto add_positions = [&](int32_t begin, int32_t end, RowState(&state)[kRowsPerWarp],
                                   float(&sums)[kRowsPerWarp][kColumns]) {
      for (int32_t tile = begin; tile < end; tile += gpu::kWarpSize) {
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
          int64_t first_scale = 0;
          if constexpr (kIsScaled) first_scale = place.k_scales;
          [[maybe_unused]] FactorsOfRow factors(keys, first_scale);
          const auto multiply_add = [&](int d, T element) {
            const bool is_pair = HasPairs<T>(p.cache_dtype);
            if constexpr (kIsScaled) {
              for (int i = 0; i < (is_pair ? 2 : 1); ++i) {
                const int n = (is_pair ? 2 * d : d) + i;
                multiply_add_number(n, keys.Number(&element, i) * factors.Of(n));
              }
            } else if (is_pair) {
              for (int i = 0; i < 2; ++i) multiply_add_number(2 * d + i, NumberOf(&element, i));
            } else {
              multiply_add_number(d, gpu::ToFloat(element));
            }
          };
          const int64_t row_size = HasPairs<T>(p.cache_dtype) ? p.head_size / 2 : p.head_size;
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
          if constexpr (kIs8Bit<T> && !kIsScaled) logit *= place.k_scale;
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
          if constexpr (kIs8Bit<T> && !kIsScaled) weights[r] *= place.v_scale;
        }
        for (int j = 0; j < gpu::kWarpSize; ++j) {
          const int64_t slot_j = gpu::Shuffle(slot, j);
          if (slot_j < 0) continue;
          const T* value = ValueOf<T>(p, slot_j, item.kv_head);
          [[maybe_unused]] int64_t first_scale = 0;
          if constexpr (kIsScaled) first_scale = gpu::Shuffle(place.v_scales, j);
          float v[kColumns];
          for (int i = 0; i < kColumns; ++i) {
            const int d = i * gpu::kWarpSize + lane;
            v[i] = 0;
            if (d >= p.value_head_size) continue;
            if constexpr (kIsScaled) {
              v[i] = values.Number(value, d) * values.Factor(first_scale, values.GroupOf(d));
            } else {
              v[i] = HasPairs<T>(p.value_cache_dtype) ? NumberOf(value, d) : gpu::ToFloat(value[d]);
            }
          }
          for (int r = 0; r < kRowsPerWarp; ++r) {
            const float weight = gpu::Shuffle(weights[r], j);
            // Skipped, not multiplied by zero: V may be NaN where the row does not attend.
            if (!ranges[r].Contains(tile + j) || holes[r].Contain(tile + j)) continue;
            for (int i = 0; i < kColumns; ++i) sums[r][i] = gpu::Fma(weight, v[i], sums[r][i]);
          }
        }
      }
    };

    // Adds the leaf at `leaf` to the totals of the warp's row r: to that of its group's leaves, and
    // the group, once it is complete, to that of the groups before. The last total of all goes
    // where the query was.
    constexpr RowState kEmpty = {kNoReference, 0};
    RowState groups[kRowsPerWarp], totals[kRowsPerWarp];  // without the groups, and all
    for (int r = 0; r < kRowsPerWarp; ++r) groups[r] = totals[r] = kEmpty;
    const int row_columns = static_cast<int>(p.value_head_size + gpu::kWarpSize - 1) / 32 * 32;
    const auto add_leaf = [&](int32_t leaf, int r, int row, const RowState& state,
                              const float(&sums)[kColumns]) {
      const int32_t end = LeafEnd(leaf), group = GroupEnd(leaf) - kGroup;
      const bool is_last = end >= item.end, completes = is_last || end == group + kGroup;
      const bool has_leaves = max(item.begin, group) < leaf, has_groups = item.begin < group;
      const Fold fold(&groups[r], state);
      RowState total = totals[r];
      const Fold fold_of_group(&total, groups[r]);
      if (completes) {
        totals[r] = total;
        groups[r] = kEmpty;
      }
      float* const group_sums = scratch.Slot(blockIdx.x, 0) + row * row_columns + lane;
      float* const total_sums = scratch.Slot(blockIdx.x, 1) + row * row_columns + lane;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const int column = i * gpu::kWarpSize;
        if (column >= row_columns) break;
        float sum = fold.Add(has_leaves ? __ldcg(group_sums + column) : 0.0f, sums[i]);
        if (completes) {
          sum = fold_of_group.Add(has_groups ? __ldcg(total_sums + column) : 0.0f, sum);
        }
        if (is_last) {
          queries[row * stride + column + lane] = sum;
        } else {
          __stcg((completes ? total_sums : group_sums) + column, sum);
        }
      }
    };

    for (int32_t leaf = LeafBegin(LeafOf(item.begin)); leaf < item.end; leaf = LeafEnd(leaf)) {
      const int32_t quarter = LeafSize(leaf) / kWarps;
      RowState leaf_states[kRowsPerWarp];
      for (int q = are_few ? warp : 0; q < (are_few ? warp + 1 : kWarps); ++q) {
        RowState state[kRowsPerWarp];
        float sums[kRowsPerWarp][kColumns] = {};
        for (RowState& row : state) row = {-kInfinity, 0};
        const int32_t begin = leaf + q * quarter;
        add_positions(max(begin, item.begin / gpu::kWarpSize * gpu::kWarpSize),
                      min(begin + quarter, item.end), state, sums);
        for (int r = 0; r < kRowsPerWarp; ++r) {
          float sum = state[r].sum;
          for (int mask = gpu::kWarpSize / 2; mask > 0; mask /= 2) {
            sum += gpu::ShuffleXor(sum, mask);
          }
          const RowState part = {fmaxf(state[r].max, kNoReference), sum};
          const int row = warp * kRowsPerWarp + r;
          const bool is_first = are_few || q == 0;
          if (is_first) leaf_states[r] = kEmpty;
          const Fold fold(&leaf_states[r], part);
          for (int i = 0; i < kColumns; ++i) {
            float& to = parts[row * stride + i * gpu::kWarpSize + lane];
            to = are_few ? sums[r][i] : fold.Add(is_first ? 0.0f : to, sums[r][i]);
          }
          if (are_few && lane == 0) states[row] = part;
        }
      }
      if (are_few) __syncthreads();  // the quarters are there, and all have read the queries
      for (int r = 0; r < kRowsPerWarp; ++r) {
        float sums[kColumns] = {};
        if (are_few) {
          if (r > 0) break;
          leaf_states[0] = kEmpty;
          for (int q = 0; q < kWarps; ++q) {
            const int row = q * kRowsPerWarp + warp;
            const Fold fold(&leaf_states[0], states[row]);
            for (int i = 0; i < kColumns; ++i) {
              sums[i] = fold.Add(sums[i], parts[row * stride + i * gpu::kWarpSize + lane]);
            }
          }
        } else {
          for (int i = 0; i < kColumns; ++i) {
            sums[i] = parts[(first_row + r) * stride + i * gpu::kWarpSize + lane];
          }
        }
        add_leaf(leaf, r, are_few ? warp : first_row + r, leaf_states[r], sums);
      }
      if (are_few) __syncthreads();  // everyone has left them
    }
    is_bad = __syncthreads_or(is_bad);

    for (int r = 0; r < kRowsPerWarp; ++r) {
      if (are_few && r > 0) break;
      const int row = are_few ? warp : first_row + r;
      const RowState total = totals[r];
      const bool is_empty = total.max == kNoReference && !(total.sum > 0);
      if (lane == 0) states[row] = {is_empty ? -kInfinity : total.max, total.sum};
      if (item.begin < item.end) continue;
      for (int i = 0; i < kColumns; ++i) queries[row * stride + i * gpu::kWarpSize + lane] = 0;
    }
    __syncthreads();
    const FoundRows rows{states, queries, stride, stride};
    WithQueryType<T>(p, [&](auto type) {
      WriteRows<decltype(type), /*kWidth=*/1>(p, scratch, item, rows, is_bad);
    });
  }
}

template <int kColumns>
constexpr int CudaCoreSharedBytes() {
  return static_cast<int>(kCoreRows *
                              (2 * kColumns * gpu::kWarpSize * sizeof(float) + sizeof(RowState)) +
                          sizeof(Schedule::Shared));
}

}  // namespace xla_gpu::paged_attention::portable
