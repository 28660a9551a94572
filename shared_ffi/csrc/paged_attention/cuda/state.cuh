// The softmax state of a row: how two or more are merged, how the sink is added, and what a row is
// divided by.
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

// What a row's sums of values are divided by, given its sum of weights. That is 0 if the row
// attends to nothing and has no sink.
__device__ __forceinline__ float DivisorOf(bool attends, float sum) { return attends ? sum : 1; }

}  // namespace xla_gpu::paged_attention
