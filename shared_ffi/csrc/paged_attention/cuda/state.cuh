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

// A finished row with its sink, which is -infinity if there is none.
struct WithSink {
  RowState state;
  float weight;  // of the row's sums

  __device__ __forceinline__ WithSink(float sink, const RowState& row) {
    state.max = fmaxf(sink, row.max);
    const float shift = ShiftOf(state.max);
    weight = gpu::Exp2(row.max - shift);
    state.sum = gpu::Fma(weight, row.sum, gpu::Exp2(sink - shift));
  }
};

// What a row's sums of values are divided by, given its sum of weights. That is 0 if the row
// attends to nothing and has no sink.
__device__ __forceinline__ float NonZeroSum(bool attends, float sum) { return attends ? sum : 1; }

}  // namespace xla_gpu::paged_attention
