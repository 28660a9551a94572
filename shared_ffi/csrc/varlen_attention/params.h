// varlen_attention: attention of packed sequences to themselves, and its derivative.
//
// The forward is paged_attention (paged_attention/params.h) without a page table: K and V are
// arrays beside the query, a block is a token, and sequence s has its keys where it has its
// queries.
//
// The custom calls, on every platform. Operands and results are in this order; those in brackets
// are there where the call has the feature, and an attribute of the operand's name is its number.
//
//   xla_gpu_varlen_attention
//     operands: query, key, value, query_start_loc, num_seqs,
//               [sinks], [alibi_slopes], [bidirectional_ranges], [causal], [prefix_seqs]
//     results:  output, [lse], and on CUDA scratch
//   xla_gpu_varlen_attention_backward
//     operands: query, key, value, output, lse, dout, query_start_loc, num_seqs,
//               [sinks], [alibi_slopes], [bidirectional_ranges], [causal], [prefix_seqs]
//     results:  dquery, dkey, dvalue, [dsinks], [dalibi_slopes], and on CUDA scratch
//
// Attributes are those of paged_attention: scale, sliding_window, soft_cap, [window_right],
// [max_query_len]. query, key, value, output and dout are [num_tokens, heads, columns], or
// [num_tokens, stride] where the rows of a token are part of wider rows. Then the attributes
// row_heads and row_head_size are query's shape, row_kv_heads (where it is not row_heads) and
// row_value_head_size (where it is not row_head_size) that of value.
//
// With P the weights of the softmax, D the derivative of the loss by a row of the output, and y_j
// the logit before ALiBi's bias:
//     P_j = exp(logit_j - lse), at most 1; 0 where lse is -inf
//     dP_j = D . v_j,  delta = sum_j P_j * dP_j = D . output,  dS_j = P_j * (dP_j - delta)
//     dY_j = dS_j * (1 - (y_j / soft_cap)^2) where there is a cap
//     dquery = scale * sum_j dY_j * k_j
// and, with sums over the rows of all tokens and of the heads of the group,
//     dvalue_j = sum of P_j * D
//     dkey_j = scale * sum of dY_j * q
//     dsinks[h] = -sum of exp(sinks[h] - lse) * delta
//     dalibi_slopes[h] = -sum of dS_j * |p - j|
// Rows of padding are zero. What a sequence holds reaches no gradient of another one but these
// last two sums.
#pragma once

#include "../paged_attention/params.h"

namespace xla_gpu::varlen_attention {

struct BackwardParams {
  // Query, K and V as a cache with blocks of one token, query_start_loc, num_seqs and the options.
  // Null: context_lens, block_tables, output, lse. V has its own distance between heads,
  // cache.value_head_stride.
  paged_attention::Params forward;

  const void* output;     // [num_tokens, num_heads, value_head_size]
  int64_t output_stride;  // elements from one token to the next
  const float* lse;       // [num_tokens, num_heads]
  const void* dout;       // [num_tokens, num_heads, value_head_size]
  int64_t dout_stride;

  void* dquery;          // [num_tokens, num_heads, head_size]
  void* dkey;            // [num_tokens, num_kv_heads, head_size]
  void* dvalue;          // [num_tokens, num_kv_heads, value_head_size]
  float* dsinks;         // [num_heads]; null: there are no sinks
  float* dalibi_slopes;  // [num_heads]; null: there are no slopes
};

}  // namespace xla_gpu::varlen_attention
