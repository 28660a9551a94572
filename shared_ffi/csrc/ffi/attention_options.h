// How handlers read what paged_attention and varlen_attention have in common.
#pragma once

#include "paged_attention/params.h"
#include "token_rows_operand.h"

namespace xla_gpu::paged_attention {

inline constexpr int64_t kMaxHeadSize = 576;  // the columns of the largest CUDA kernel

// The attributes that are no sizes.
inline void ReadOptions(CallReader* call, Params* p) {
  p->scale = call->Float("scale");
  p->soft_cap = call->Float("soft_cap");
  p->sliding_window = call->Integer("sliding_window");
  p->window_right = call->Integer("window_right", 0);
  p->is_causal = !call->Has("window_right");
  p->max_query_len = call->Integer("max_query_len", 0);
}

inline void SetQuery(CallReader* call, const TokenRows& query, Params* p) {
  p->query = query.data;
  p->query_stride = query.stride;
  p->num_tokens = query.num_tokens;
  p->num_heads = query.num_heads;
  p->head_size = query.head_size;
  p->dtype = query.dtype;
  if (p->head_size < 1 || p->head_size > kMaxHeadSize) {
    call->Refuse("query", "have a head_size from 1 to ", kMaxHeadSize);
  }
}

// The optional arrays for heads, tokens and sequences. The sizes are known.
template <typename Pairs>
void ReadFeatures(CallReader* call, const Pairs& token_pairs, Params* p) {
  for (const auto& [name, array] : kHeadNumbers) {
    p->*array = call->Operand<float>(name, {ffi::F32}, {{p->num_heads}});
  }
  for (const auto& [name, array] : token_pairs) {
    p->*array = call->Operand<int32_t>(name, {ffi::S32}, {{p->num_tokens, 2}});
  }
  p->causal = call->Operand<int32_t>("causal", {ffi::S32}, {{p->max_seqs}});
}

// The results are the output, then lse if it is wanted, then `num_scratch` scratch arrays, which
// are not read here.
inline ffi::Error ReadResults(CallReader* call, size_t num_scratch, Params* p) {
  p->output = call->Result(0, "output", {call->Find("query")->element_type()},
                           {{p->num_tokens, p->num_heads, p->value_head_size}});
  if (call->num_results() > num_scratch + 1) {
    p->lse =
        static_cast<float*>(call->Result(1, "lse", {ffi::F32}, {{p->num_tokens, p->num_heads}}));
  }
  return call->error();
}

}  // namespace xla_gpu::paged_attention
