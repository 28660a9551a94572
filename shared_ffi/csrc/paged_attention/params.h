// paged_attention: attention of packed query tokens over a paged key/value cache.
//
// Sequence s, for s in [0, num_seqs), owns the query tokens query_start_loc[s] up to
// query_start_loc[s + 1], q_len of them. Its token i stands at position
//     p = context_lens[s] - q_len + i
// and attends to the positions j with
//     max(0, p - sliding_window + 1) <= j < min(context_lens[s], p + window_right + 1)
// where causal attention has window_right = 0. Position j lies in block block_tables[s][j /
// block_size] at offset j % block_size. Query head h reads kv head h / (num_heads / num_kv_heads).
// An 8-bit cache holds k / k_scale and v / v_scale.
//     logit = scale * (q . k), then soft_cap * tanh(logit / soft_cap) where there is a cap,
//             then - alibi_slopes[h] * |p - j| where there are slopes
//     output = sum_j exp(logit_j - lse) * v_j, in float32 whatever the storage
//     lse = log(sum_j exp(logit_j) + exp(sinks[h]) where there are sinks)
// Every q_len is at most max_query_len, where that is given; the result does not depend on it.
// Rows of no sequence, and rows that attend to nothing, are zero; their lse is -inf, or the sink of
// a row that attends to nothing. Nothing that is not attended to reaches the result: not the rest
// of the cache, and not what tables and lengths hold past num_seqs.
//
// The handler has checked all of this before the CPU kernel runs, in a copy that nobody else writes
// to. What lies on a GPU it cannot read: there the kernels take lengths, tables and num_seqs as
// they come (see cuda/run.h).
#pragma once

#include <cstdint>

#include "../kv_cache.h"
#include "../storage.h"

namespace xla_gpu::paged_attention {

XLA_GPU_HOST_DEVICE constexpr int64_t Smaller(int64_t a, int64_t b) { return a < b ? a : b; }
XLA_GPU_HOST_DEVICE constexpr int64_t Larger(int64_t a, int64_t b) { return a < b ? b : a; }
XLA_GPU_HOST_DEVICE constexpr int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Kernels compute logits in units of 1 / log2(e), to use 2^x for the exponential.
inline constexpr float kLog2E = 1.44269504f;
// Larger sinks and soft caps, and larger slopes times a distance, could overflow in these units.
inline constexpr float kMaxSink = 0x1p127f;
inline constexpr float kMaxCap = 0x1p127f;
inline constexpr float kMaxSlope = 0x1p95f;
// Up to this cap, the error of tanh, 2^-23, changes a logit by less than 1e-5. Larger caps need a
// tanh whose error is small relative to the logit.
inline constexpr float kMaxPlainCap = 64;

struct Params {
  const void* query;               // [num_tokens, num_heads, head_size]
  KvCache cache;                   // of num_blocks blocks of block_size positions
  const int32_t* context_lens;     // [max_seqs]
  const int32_t* block_tables;     // [max_seqs, max_blocks_per_seq]
  const int32_t* query_start_loc;  // [max_seqs + 1]
  const int32_t* num_seqs;         // [1]
  KvScales k_scale;                // of a cache of 8 bits
  KvScales v_scale;
  const float* sinks;         // [num_heads]; null: none
  const float* alibi_slopes;  // [num_heads]; null: none
  void* output;               // [num_tokens, num_heads, head_size]
  float* lse;                 // [num_tokens, num_heads]; null: not wanted

  int64_t num_tokens;
  int64_t num_heads;
  int64_t head_size;
  int64_t num_blocks;
  int64_t block_size;
  int64_t num_kv_heads;
  int64_t max_seqs;
  int64_t max_blocks_per_seq;

  float scale;
  int64_t sliding_window;  // 0: none
  int64_t window_right;    // 0 where is_causal
  float soft_cap;          // 0: none
  int64_t max_query_len;   // of any sequence; 0: not known
  bool is_causal;          // each sequence has as many keys as queries, or more

  DType dtype;        // of query and output
  DType cache_dtype;  // that, or one of 8 bits

  // The positions that a query at `position` attends to, from WindowBegin up to WindowEnd; none if
  // that is not after it. Both grow with the position.
  XLA_GPU_HOST_DEVICE int64_t WindowBegin(int64_t position) const {
    return sliding_window == 0 || sliding_window > position ? 0 : position - sliding_window + 1;
  }
  XLA_GPU_HOST_DEVICE int64_t WindowEnd(int64_t position, int64_t context_len) const {
    const int64_t after = context_len - position - 1;  // positions of the sequence
    const int64_t end = position + 1 + Smaller(window_right, after);
    return end < 0 ? 0 : end;
  }
  // The sink and the slope of a query head, in units of 1 / log2(e). Beyond its limit a sink leaves
  // no weight to any position, and a slope leaves all of it to the nearest (or farthest) position.
  XLA_GPU_HOST_DEVICE float Sink(int64_t head) const {
    return (sinks[head] > kMaxSink ? kMaxSink : sinks[head]) * kLog2E;
  }
  XLA_GPU_HOST_DEVICE float AlibiSlope(int64_t head) const {
    const float slope = alibi_slopes[head];
    return (slope > kMaxSlope ? kMaxSlope : slope < -kMaxSlope ? -kMaxSlope : slope) * kLog2E;
  }
  // The log-sum-exp of a row, given what was computed with Sink().
  XLA_GPU_HOST_DEVICE float Lse(int64_t head, float computed) const {
    return sinks != nullptr && sinks[head] > kMaxSink ? sinks[head] : computed;
  }
  XLA_GPU_HOST_DEVICE bool Attends(int64_t position, int64_t context_len) const {
    return WindowBegin(position) < WindowEnd(position, context_len);
  }
};

}  // namespace xla_gpu::paged_attention
