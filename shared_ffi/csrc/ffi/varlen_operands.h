// How the handlers of varlen_attention and its derivative read their operands.
#pragma once

#include <initializer_list>
#include <string_view>

#include "attention_options.h"
#include "varlen_attention/params.h"

namespace xla_gpu::varlen_attention {

using paged_attention::Params;

// The rows of query, key and value, or of arrays like them, where they are part of wider rows.
struct RowLayouts {
  TokenRowsLayout query;
  TokenRowsLayout key;
  TokenRowsLayout value;
  TokenRowsLayout output;

  explicit RowLayouts(CallReader* call)
      : query(TokenRowsLayout::Read(call)),
        key{call->Integer("row_kv_heads", query.num_heads), query.head_size},
        value(key.OfValues(call)),
        output{query.num_heads, value.head_size} {}
};

// Reads rows of query's dtype with as many tokens, and with this shape.
inline TokenRows ReadRowsLike(CallReader* call, std::string_view name,
                              const TokenRowsLayout& layout, int64_t num_tokens, int64_t num_heads,
                              int64_t head_size) {
  const TokenRows rows = ReadTokenRows(call, name, layout, {call->Find("query")->element_type()});
  if (call->error().failure()) return {};
  if (rows.num_tokens != num_tokens || rows.num_heads != num_heads || rows.head_size != head_size) {
    call->Refuse(name, "hold num_tokens=", num_tokens, " rows of heads=", num_heads,
                 " * columns=", head_size);
  }
  return rows;
}

// Reads all that the forward reads.
inline ffi::Error ReadForward(CallReader* call, const RowLayouts& layouts, Params* p) {
  *p = {};
  XLA_GPU_RETURN_IF_ERROR(call->error());
  paged_attention::ReadOptions(call, p);
  const TokenRows query = ReadTokenRows(call, "query", layouts.query, kTensorDTypes);
  XLA_GPU_RETURN_IF_ERROR(call->error());
  paged_attention::SetQuery(call, query, p);
  const TokenRows key =
      ReadTokenRows(call, "key", layouts.key, {call->Find("query")->element_type()});
  XLA_GPU_RETURN_IF_ERROR(call->error());
  if (key.num_tokens != p->num_tokens || key.head_size != p->head_size ||
      p->num_heads % key.num_heads != 0) {
    call->Refuse("key", "have query's num_tokens=", p->num_tokens, " and head_size=", p->head_size,
                 ", and a number of heads that divides num_heads=", p->num_heads);
  }
  const TokenRows value =
      ReadTokenRows(call, "value", layouts.value, {call->Find("query")->element_type()});
  XLA_GPU_RETURN_IF_ERROR(call->error());
  if (value.num_tokens != p->num_tokens || value.num_heads != key.num_heads ||
      value.head_size < 1 || value.head_size > p->head_size) {
    call->Refuse("value", "have key's num_tokens=", p->num_tokens,
                 " and num_kv_heads=", key.num_heads,
                 ", and a head size from 1 to head_size=", p->head_size);
  }
  p->value_head_size = value.head_size;
  p->cache_dtype = p->value_cache_dtype = p->dtype;
  p->num_kv_heads = key.num_heads;
  p->num_blocks = p->max_blocks_per_seq = p->num_tokens;
  p->block_size = 1;
  p->group = paged_attention::Divisor(p->num_heads / p->num_kv_heads);
  p->block = paged_attention::Divisor(1);
  // Kernels read only.
  p->cache.keys = const_cast<void*>(key.data);
  p->cache.values = const_cast<void*>(value.data);
  p->cache.block_stride = key.stride;
  p->cache.head_stride = p->head_size;
  p->cache.SetUnits(paged_attention::Larger(key.stride, 1), value.stride);
  p->cache.value_head_stride = p->value_head_size;

  const auto starts = call->Find("query_start_loc");
  call->Operand<int32_t>("query_start_loc", {ffi::S32}, {{kAnySize}});
  XLA_GPU_RETURN_IF_ERROR(call->error());
  if (starts->dimensions()[0] < 1) call->Refuse("query_start_loc", "have an entry at least");
  p->max_seqs = starts->dimensions()[0] - 1;
  p->query_start_loc = static_cast<const int32_t*>(starts->untyped_data());
  p->num_seqs = call->Operand<int32_t>("num_seqs", {ffi::S32}, {{}, {1}});
  constexpr paged_attention::TokenPairs kRanges[] = {
      {"bidirectional_ranges", &Params::bidirectional_ranges}};
  paged_attention::ReadFeatures(call, kRanges, p);
  p->prefix_seqs = call->Operand<int32_t>("prefix_seqs", {ffi::S32}, {{p->max_seqs}});
  return call->error();
}

// CUDA kernels number rows, up to the end of a block of 128 tokens, in 32 bits.
inline void RefuseTooManyRows(CallReader* call, const Params& p) {
  constexpr int64_t kMaxRows = INT32_MAX;
  if (p.num_tokens <= kMaxRows / p.num_heads - 128) return;
  call->Refuse("query", "have (num_tokens + 128) * num_heads below 2**31");
}

}  // namespace xla_gpu::varlen_attention
