#include <array>

#include "ffi/kv_cache_operand.h"
#include "ffi/token_rows_operand.h"
#include "params.h"
#include "run.h"
#include "tokens.h"

namespace xla_gpu::kv_cache_update {
namespace {

constexpr char kOp[] = "kv_cache_update";

// Reads the rotary embedding of keys and queries, if the call has one.
void ReadRotary(CallReader* call, const TokenRows& keys, ffi::DataType key_dtype, Rotary* r) {
  const auto table = call->Find("cos_sin_cache"), positions = call->Find("positions");
  if (table.has_value() != positions.has_value()) {
    call->Fail("operand positions must come with cos_sin_cache");
  }
  if (call->error().failure() || !table.has_value()) return;
  r->cos_sin_cache = call->Operand("cos_sin_cache", {ffi::F32, key_dtype}, {{kAnySize, kAnySize}});
  r->positions = {call->Operand("positions", {ffi::S32, ffi::S64}, {{keys.num_tokens}}),
                  positions->element_type() == ffi::S64};
  r->is_interleaved = call->Integer("interleaved", 0) != 0;
  if (call->error().failure()) return;
  r->dtype = StorageOf(call, "cos_sin_cache");
  r->max_positions = table->dimensions()[0];
  r->rotary_dim = table->dimensions()[1];
  if (IsQuantized(keys.dtype)) call->Refuse("key", "have more than 8 bits with cos_sin_cache");
  if (r->rotary_dim < 2 || r->rotary_dim % 2 != 0 || r->rotary_dim > keys.head_size) {
    call->Refuse("cos_sin_cache",
                 "have an even number of columns, from 2 to head_size=", keys.head_size);
  }
}

// Reads the queries that are rotated or normalized, if there are any.
void ReadQuery(CallReader* call, const TokenRows& keys, ffi::DataType key_dtype, Params* p) {
  if (!call->Find("query").has_value()) return;
  if (!call->Find("cos_sin_cache").has_value() && !call->Find("q_norm").has_value() &&
      !p->hadamard.has_keys) {
    call->Fail("operand query must come with cos_sin_cache, q_norm or k_hadamard");
  }
  const TokenRowsLayout layout = {call->Integer("query_heads", 0), keys.head_size};
  const TokenRows queries = ReadTokenRows(call, "query", layout, {key_dtype});
  if (call->error().failure()) return;
  if (queries.num_tokens != keys.num_tokens || queries.head_size != keys.head_size) {
    call->Refuse("query", "have key's num_tokens=", keys.num_tokens,
                 " and head_size=", keys.head_size);
  }
  p->query = call->Find("query")->untyped_data();
  p->query_stride = queries.stride;
  p->num_heads = queries.num_heads;
}

NormWeight ReadNormWeight(CallReader* call, std::string_view name, ffi::DataType key_dtype,
                          int64_t num_heads, int64_t head_size) {
  const auto weight = call->Find(name);
  if (!weight.has_value()) return {};
  const void* data =
      call->Operand(name, {ffi::F32, key_dtype}, {{head_size}, {num_heads, head_size}});
  return {data, StorageOf(call, name), weight->dimensions().size() == 2};
}

// Reads the norms of queries, keys and values. The key, the value and the query have been read.
void ReadNorms(CallReader* call, ffi::DataType key_dtype, Params* p) {
  Norms* n = &p->norms;
  const bool has_query = call->Find("q_norm").has_value();
  if (has_query && !call->Find("query").has_value()) {
    call->Fail("operand q_norm must come with query");
  }
  n->query = ReadNormWeight(call, "q_norm", key_dtype, p->num_heads, p->head_size);
  n->key = ReadNormWeight(call, "k_norm", key_dtype, p->num_kv_heads, p->head_size);
  n->has_values = call->Integer("v_norm", 0) != 0;
  if (!has_query && !call->Find("k_norm").has_value() && !n->has_values) return;
  if (IsQuantized(p->dtype)) call->Refuse("key", "have more than 8 bits with norms");
  n->eps = call->Float("norm_eps");
  n->adds_one = call->Integer("norm_offset", 0) != 0;
  n->are_after_rotation = call->Integer("norm_after_rope", 0) != 0;
  n->rounds_first = call->Integer("norm_round_first", 0) != 0;
}

// Reads which heads are transformed. The key and the value have been read.
void ReadHadamard(CallReader* call, Params* p) {
  Hadamard* h = &p->hadamard;
  h->has_keys = call->Integer("k_hadamard", 0) != 0;
  h->has_values = call->Integer("v_hadamard", 0) != 0;
  h->signs = call->Operand<float>("hadamard_signs", {ffi::F32}, {{p->head_size}});
  if (!h->IsUsed()) {
    if (h->signs != nullptr) call->Fail("operand hadamard_signs must come with k_ or v_hadamard");
    return;
  }
  if (IsQuantized(p->dtype)) call->Refuse("key", "have more than 8 bits with Hadamard matrices");
  if (p->head_size > kMaxHadamardHeadSize || p->value_head_size > kMaxHadamardHeadSize) {
    call->Refuse("key", "have a head_size of at most ", kMaxHadamardHeadSize,
                 " with Hadamard matrices, and so must value");
  }
  if (h->has_values && h->signs != nullptr && p->value_head_size != p->head_size) {
    call->Refuse("hadamard_signs",
                 "not come with v_hadamard and value_head_size=", p->value_head_size);
  }
}

// The scales of K, or of V: given, or made by the call.
struct Scales {
  CacheScales read;
  float* made;        // read.rows.data, where the call makes them; else null
  void* made_groups;  // read.groups.data likewise
};

// Reads `scale`, or `scale_cache` in its place, whose scales the call makes.
//   dtype, row_size: of K, or of V, in the cache
Scales ReadOrMakeScales(CallReader* call, std::string_view scale, std::string_view scale_cache,
                        std::string_view global, DType dtype, int64_t row_size, const Params& p) {
  if (!call->Find(scale_cache).has_value()) {
    return {ReadScales(call, scale, global, dtype, row_size, p), nullptr, nullptr};
  }
  if (call->Find(scale).has_value()) call->Fail(scale, " must not come with ", scale_cache);
  if (p.dtype == p.cache_dtype) call->Refuse(scale_cache, "come with a cache of fewer bits");
  const CacheScales scales = ReadScales(call, scale_cache, global, dtype, row_size, p);
  if (call->error().failure()) return {};
  void* const data = call->Find(scale_cache)->untyped_data();
  const bool have_groups = scales.groups.data != nullptr;
  const auto& [rows, groups] = scales;
  const auto repeats = [](int64_t size, int64_t stride) { return size > 1 && stride == 0; };
  if (repeats(p.num_blocks, have_groups ? groups.block_stride : rows.block_stride) ||
      repeats(p.block_size, have_groups ? groups.position_stride : rows.position_stride) ||
      repeats(p.num_kv_heads, have_groups ? groups.head_stride : rows.head_stride) ||
      repeats(groups.num_groups, groups.group_stride)) {
    call->Refuse(scale_cache, "have a scale for each position");
  }
  if (have_groups) return {scales, nullptr, data};
  return {scales, static_cast<float*>(data), nullptr};
}

ffi::Error MakeParams(const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
                      const ffi::Dictionary& attributes, Params* p) {
  *p = {};
  CallReader call(kOp, operands, results, attributes, {"kv_cache", "key", "value", "slot_mapping"});
  XLA_GPU_RETURN_IF_ERROR(call.error());
  const auto layout = TokenRowsLayout::Read(&call);
  const ffi::DataType key_dtype = call.Find("key")->element_type();
  const bool is_copied = key_dtype == call.Find("kv_cache")->element_type();
  const TokenRows keys =
      ReadTokenRows(&call, "key", layout, is_copied ? kStorageDTypes : kTensorDTypes);
  const TokenRows values = ReadTokenRows(&call, "value", layout.OfValues(&call), {key_dtype});
  p->slot_mapping.data = call.Operand("slot_mapping", {ffi::S32, ffi::S64}, {{keys.num_tokens}});
  XLA_GPU_RETURN_IF_ERROR(call.error());
  if (values.num_tokens != keys.num_tokens || values.num_heads != keys.num_heads ||
      (values.head_size != keys.head_size && values.head_size != 0 && !call.Find("value_cache"))) {
    call.Refuse("value", "have the shape of key, or no columns, unless there is value_cache");
  }
  p->key = keys.data;
  p->value = values.data;
  p->key_stride = keys.stride;
  p->value_stride = values.stride;
  p->slot_mapping.are_int64 = call.Find("slot_mapping")->element_type() == ffi::S64;
  p->num_tokens = keys.num_tokens;
  p->head_size = keys.head_size;
  p->value_head_size = values.head_size;
  p->dtype = keys.dtype;
  ReadKvCache(&call, "key", keys, p);
  XLA_GPU_RETURN_IF_ERROR(call.error());
  if (p->num_kv_heads != keys.num_heads) {
    call.Refuse("kv_cache", "have key's num_kv_heads=", keys.num_heads);
  }
  const Scales k = ReadOrMakeScales(&call, "k_scale", "k_scale_cache", "k_global", p->cache_dtype,
                                    p->head_size, *p);
  const Scales v = ReadOrMakeScales(&call, "v_scale", "v_scale_cache", "v_global",
                                    p->value_cache_dtype, p->value_head_size, *p);
  p->k_scale = k.read.rows, p->k_groups = k.read.groups;
  p->v_scale = v.read.rows, p->v_groups = v.read.groups;
  p->k_scale_cache = k.made, p->k_group_cache = k.made_groups;
  p->v_scale_cache = v.made, p->v_group_cache = v.made_groups;
  p->rounds_scales_up = call.Integer("round_scales_up", 0) != 0;
  ReadRotary(&call, keys, key_dtype, &p->rotary);
  ReadHadamard(&call, p);
  ReadQuery(&call, keys, key_dtype, p);
  ReadNorms(&call, key_dtype, p);
  // The results are operands, updated in place.
  size_t number = 0;
  for (std::string_view name :
       {"kv_cache", "value_cache", "k_scale_cache", "v_scale_cache", "query"}) {
    const auto operand = call.Find(name);
    if (!operand.has_value()) continue;
    const std::array shape = {operand->dimensions()};
    if (call.Result(number++, name, {operand->element_type()}, shape) != operand->untyped_data()) {
      call.Fail("result ", name, " must alias its operand (output_to_operand_aliasing)");
    }
  }
  return call.Finish();
}

// Makes kernels read a copy, which it returns: the caller's other threads may write to the numbers
// while the call runs.
std::vector<char> Copy(TokenNumbers* numbers, int64_t num_tokens) {
  if (numbers->data == nullptr) return {};
  const auto* data = static_cast<const char*>(numbers->data);
  const int64_t size = numbers->are_int64 ? sizeof(int64_t) : sizeof(int32_t);
  std::vector<char> copy(data, data + num_tokens * size);
  numbers->data = copy.data();
  return copy;
}

ffi::Error OnCpu(ffi::RemainingArgs operands, ffi::RemainingRets results,
                 const ffi::Dictionary& attributes, const Executor& executor) {
  Params params;
  XLA_GPU_RETURN_IF_ERROR(MakeParams(operands, results, attributes, &params));
  const std::vector<char> slots = Copy(&params.slot_mapping, params.num_tokens);
  const std::vector<char> positions = Copy(&params.rotary.positions, params.num_tokens);
  // Before anything is written, so that an error leaves cache and query as they were.
  XLA_GPU_RETURN_IF_ERROR(ErrorOf(kOp, TokenError(params)));
  RunOnCpu(params, executor);
  return ffi::Error::Success();
}

#ifdef XLA_GPU_CUDA
ffi::Error OnCuda(ffi::RemainingArgs operands, ffi::RemainingRets results,
                  const ffi::Dictionary& attributes, void* stream) {
  Params params;
  XLA_GPU_RETURN_IF_ERROR(MakeParams(operands, results, attributes, &params));
  return Launched(kOp, RunOnCuda(params, stream));
}
#endif

}  // namespace

XLA_GPU_DEFINE_HANDLERS(KvCacheUpdate, kOp)

}  // namespace xla_gpu::kv_cache_update
