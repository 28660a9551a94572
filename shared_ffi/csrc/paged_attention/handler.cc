#include <cmath>

#include "cpu/run.h"
#include "cuda/run.h"
#include "ffi/kv_cache_operand.h"
#include "ffi/token_rows_operand.h"
#include "metadata.h"
#include "params.h"

// MakeParams checks shapes, dtypes and attributes by the same rules, in the same order and words,
// as shared_ffi/paged_attention.py does, for programs that did not pass through that.
namespace xla_gpu::paged_attention {
namespace {

constexpr char kOp[] = "paged_attention";
constexpr int64_t kMaxHeadSize = 576;
constexpr double kMaxScale = 0x1p126;  // in units of 1 / log2(e), and times 2, it is a float32

// The arrays that every call has.
struct Operands {
  ffi::AnyBuffer query;
  ffi::AnyBuffer kv_cache;
  ffi::AnyBuffer context_lens;
  ffi::AnyBuffer block_tables;
  ffi::AnyBuffer query_start_loc;
  ffi::AnyBuffer num_seqs;
};

constexpr size_t kNumOperands = 6;

void ReadAttributes(AttributeReader* reader, Params* p) {
  p->scale = reader->Get<float>("scale");
  p->sliding_window = reader->Get<int64_t>("sliding_window");
  p->soft_cap = reader->Get<float>("soft_cap");
  constexpr int64_t kAbsent = INT64_MIN;
  const auto window_right = reader->Get<int64_t>("window_right", kAbsent);
  p->is_causal = window_right == kAbsent;
  p->window_right = p->is_causal ? 0 : window_right;
  p->max_query_len = reader->Get<int64_t>("max_query_len", 0);
  p->value_head_size = reader->Get<int64_t>("value_head_size", kAbsent);
  p->is_latent = p->value_head_size != kAbsent;
}

ffi::Error ReadQuery(const ffi::AnyBuffer& query, const TokenRowsLayout& layout, Params* p) {
  TokenRows rows = {};
  XLA_GPU_RETURN_IF_ERROR(
      ReadTokenRows(kOp, "query", query, layout, "[num_tokens, num_heads, head_size]", &rows));
  p->query = query.untyped_data();
  p->query_stride = rows.stride;
  p->num_tokens = rows.num_tokens;
  p->num_heads = rows.num_heads;
  p->head_size = rows.head_size;
  if (!StorageType(query.element_type(), &p->dtype)) {
    return DTypeError(kOp, "query", "dtype float32, float16 or bfloat16", query);
  }
  if (p->head_size < 1 || p->head_size > kMaxHeadSize) {
    return InvalidArgument(kOp, "query must have a head_size from 1 to ", kMaxHeadSize, "; got ",
                           p->head_size);
  }
  return ffi::Error::Success();
}

ffi::Error ReadCache(const Operands& operands, const FeatureOperands& features,
                     const KvLayout& layout, Params* p) {
  if (!p->is_latent) {
    p->value_head_size = p->head_size;
  } else if (p->value_head_size < 1 || p->value_head_size > p->head_size) {
    return InvalidArgument(kOp, "value_head_size must be from 1 to head_size=", p->head_size,
                           "; got ", p->value_head_size);
  } else {
    XLA_GPU_RETURN_IF_ERROR(CheckLatent(kOp, layout, features));
  }
  KvCacheArrays arrays = {operands.kv_cache, std::nullopt};
  XLA_GPU_RETURN_IF_ERROR(features.Find("value_cache", &arrays.value_cache));
  XLA_GPU_RETURN_IF_ERROR(ReadKvCache(kOp, arrays, layout, kAnySize, "query", operands.query, p));
  if (p->num_heads < 1 || p->num_heads % p->num_kv_heads != 0) {
    return InvalidArgument(kOp,
                           "query's num_heads must be a multiple of num_kv_heads=", p->num_kv_heads,
                           "; got ", p->num_heads);
  }
  return ffi::Error::Success();
}

// Lengths, page table and num_seqs.
ffi::Error ReadMetadata(const Operands& operands, Params* p) {
  const auto& [query, kv_cache, context_lens, block_tables, query_start_loc, num_seqs] = operands;
  if (!HasShape(context_lens, {kAnySize})) {
    return ShapeError(kOp, "context_lens", "[max_seqs]", context_lens);
  }
  const int64_t max_seqs = context_lens.dimensions()[0];
  if (!HasShape(block_tables, {max_seqs, kAnySize})) {
    return ShapeError(kOp, "block_tables", StrCat("[max_seqs=", max_seqs, ", max_blocks_per_seq]"),
                      block_tables);
  }
  if (!HasShape(query_start_loc, {max_seqs + 1})) {
    return ShapeError(kOp, "query_start_loc", StrCat("[max_seqs + 1=", max_seqs + 1, "]"),
                      query_start_loc);
  }
  if (!HasShape(num_seqs, {}) && !HasShape(num_seqs, {1})) {
    return ShapeError(kOp, "num_seqs", "[] or [1]", num_seqs);
  }
  const struct {
    const char* name;
    ffi::AnyBuffer buffer;
  } integers[] = {{"context_lens", context_lens},
                  {"block_tables", block_tables},
                  {"query_start_loc", query_start_loc},
                  {"num_seqs", num_seqs}};
  for (const auto& [name, buffer] : integers) {
    if (buffer.element_type() != ffi::S32) return DTypeError(kOp, name, "dtype int32", buffer);
  }
  p->context_lens = context_lens.typed_data<int32_t>();
  p->block_tables = block_tables.typed_data<int32_t>();
  p->query_start_loc = query_start_loc.typed_data<int32_t>();
  p->num_seqs = num_seqs.typed_data<int32_t>();
  p->max_seqs = max_seqs;
  p->max_blocks_per_seq = block_tables.dimensions()[1];
  return ffi::Error::Success();
}

// Checks the attributes that every call has.
ffi::Error CheckAttributes(const Params& p) {
  if (!std::isfinite(p.scale)) {
    return InvalidArgument(kOp, "scale must be finite in float32; got ", p.scale);
  }
  if (std::abs(p.scale) > kMaxScale) {
    return InvalidArgument(kOp, "scale must be at most 2**126 in magnitude; got ", p.scale);
  }
  if (p.sliding_window < 0) {
    return InvalidArgument(kOp, "sliding_window must be at least 1; got ", p.sliding_window);
  }
  if (!(p.soft_cap >= 0) || !std::isfinite(p.soft_cap)) {
    return InvalidArgument(kOp, "soft_cap must be positive and finite in float32; got ",
                           p.soft_cap);
  }
  if (p.soft_cap > 0 && std::abs(p.scale) > kMaxScale * p.soft_cap) {
    return InvalidArgument(kOp, "soft_cap must be at least scale / 2**126 in magnitude; got ",
                           p.soft_cap);
  }
  return ffi::Error::Success();
}

// Reads a number for each query head; leaves *data null if the call does not use the feature.
ffi::Error ReadPerHead(const char* name, const FeatureOperands& features, int64_t num_heads,
                       const float** data) {
  std::optional<ffi::AnyBuffer> buffer;
  XLA_GPU_RETURN_IF_ERROR(features.Find(name, &buffer));
  if (!buffer.has_value()) return ffi::Error::Success();
  if (!HasShape(*buffer, {num_heads})) {
    return ShapeError(kOp, name, StrCat("[num_heads=", num_heads, "]"), *buffer);
  }
  if (buffer->element_type() != ffi::F32) return DTypeError(kOp, name, "dtype float32", *buffer);
  *data = buffer->typed_data<float>();
  return ffi::Error::Success();
}

ffi::Error ReadTreeMask(const FeatureOperands& features, Params* p) {
  std::optional<ffi::AnyBuffer> mask;
  XLA_GPU_RETURN_IF_ERROR(features.Find("tree_mask", &mask));
  if (!mask.has_value()) return ffi::Error::Success();
  if (!HasShape(*mask, {p->num_tokens, 2})) {
    return ShapeError(kOp, "tree_mask", StrCat("[num_tokens=", p->num_tokens, ", 2]"), *mask);
  }
  if (mask->element_type() != ffi::S32) {
    return DTypeError(kOp, "tree_mask", "dtype int32", *mask);
  }
  if (p->alibi_slopes != nullptr) {
    return InvalidArgument(kOp, "alibi_slopes must be None with tree_mask; got shape [",
                           p->num_heads, "]");
  }
  if (p->sliding_window != 0 && p->sliding_window < kMaxTreeTokens) {
    return InvalidArgument(kOp, "sliding_window must be at least ", kMaxTreeTokens,
                           " with tree_mask; got ", p->sliding_window);
  }
  if (!p->is_causal) {
    return InvalidArgument(kOp, "causal must be True with tree_mask; got False");
  }
  p->tree_mask = mask->typed_data<int32_t>();
  return ffi::Error::Success();
}

// Features that not every call uses, arrays first. The value cache has been read.
ffi::Error ReadFeatures(const FeatureOperands& features, Params* p) {
  XLA_GPU_RETURN_IF_ERROR(ReadScales(kOp, "k_scale", features, "query", *p, &p->k_scale));
  XLA_GPU_RETURN_IF_ERROR(ReadScales(kOp, "v_scale", features, "query", *p, &p->v_scale));
  if (p->is_latent) p->v_scale = p->k_scale;
  XLA_GPU_RETURN_IF_ERROR(ReadPerHead("sinks", features, p->num_heads, &p->sinks));
  XLA_GPU_RETURN_IF_ERROR(ReadPerHead("alibi_slopes", features, p->num_heads, &p->alibi_slopes));
  XLA_GPU_RETURN_IF_ERROR(ReadTreeMask(features, p));
  XLA_GPU_RETURN_IF_ERROR(features.Finish());
  if (p->window_right < 0) {
    return InvalidArgument(kOp, "window_right must be at least 0; got ", p->window_right);
  }
  if (p->max_query_len < 0) {
    return InvalidArgument(kOp, "max_query_len must be at least 1; got ", p->max_query_len);
  }
  return ffi::Error::Success();
}

// The output, then lse if it is wanted, then `num_scratch` scratch arrays, which are not read here.
ffi::Error ReadResults(const ffi::AnyBuffer& query, const ffi::AnyBuffer& output,
                       const ffi::RemainingRets& others, size_t num_scratch, Params* p) {
  if (output.element_type() != query.element_type() ||
      !HasShape(output, {p->num_tokens, p->num_heads, p->value_head_size})) {
    return InvalidArgument(kOp, "the result must be ", DTypeName(query), " [", p->num_tokens, ", ",
                           p->num_heads, ", ", p->value_head_size, "]; got ", DTypeName(output),
                           " ", ShapeName(output));
  }
  p->output = output.untyped_data();
  if (others.size() != num_scratch && others.size() != num_scratch + 1) {
    return InvalidArgument(kOp, "the call must have ", num_scratch + 1, " or ", num_scratch + 2,
                           " results; got ", others.size() + 1);
  }
  if (others.size() == num_scratch) return ffi::Error::Success();
  const ffi::AnyBuffer lse = **others.get<ffi::AnyBuffer>(0);
  if (lse.element_type() != ffi::F32 || !HasShape(lse, {p->num_tokens, p->num_heads})) {
    return InvalidArgument(kOp, "the second result must be float32 [", p->num_tokens, ", ",
                           p->num_heads, "]; got ", DTypeName(lse), " ", ShapeName(lse));
  }
  p->lse = lse.typed_data<float>();
  return ffi::Error::Success();
}

ffi::Error MakeParams(const Operands& operands, const ffi::RemainingArgs& other_operands,
                      const ffi::AnyBuffer& output, const ffi::RemainingRets& other_results,
                      size_t num_scratch, const ffi::Dictionary& attributes, Params* params) {
  *params = {};
  AttributeReader reader(kOp, attributes);
  ReadAttributes(&reader, params);
  const KvLayout layout = KvLayout::Read(&reader);
  const TokenRowsLayout rows_layout = TokenRowsLayout::Read(&reader);
  const FeatureOperands features(
      kOp, kNumOperands, other_operands, &reader,
      {"value_cache", "k_scale", "v_scale", "sinks", "alibi_slopes", "tree_mask"});
  XLA_GPU_RETURN_IF_ERROR(reader.Finish());
  XLA_GPU_RETURN_IF_ERROR(ReadQuery(operands.query, rows_layout, params));
  XLA_GPU_RETURN_IF_ERROR(ReadCache(operands, features, layout, params));
  XLA_GPU_RETURN_IF_ERROR(ReadMetadata(operands, params));
  XLA_GPU_RETURN_IF_ERROR(CheckAttributes(*params));
  XLA_GPU_RETURN_IF_ERROR(ReadFeatures(features, params));
  return ReadResults(operands.query, output, other_results, num_scratch, params);
}

// The CPU alone can read what the arrays hold.
ffi::Error CheckMetadata(const Params& params) {
  const std::string fault = MetadataFault(params);
  return fault.empty() ? ffi::Error::Success() : InvalidArgument(kOp, fault);
}

ffi::Error OnCpu(ffi::AnyBuffer query, ffi::AnyBuffer kv_cache, ffi::AnyBuffer context_lens,
                 ffi::AnyBuffer block_tables, ffi::AnyBuffer query_start_loc,
                 ffi::AnyBuffer num_seqs, ffi::RemainingArgs other_operands,
                 ffi::Result<ffi::AnyBuffer> output, ffi::RemainingRets other_results,
                 const ffi::Dictionary& attributes, const Executor& executor) {
  Params params;
  XLA_GPU_RETURN_IF_ERROR(
      MakeParams({query, kv_cache, context_lens, block_tables, query_start_loc, num_seqs},
                 other_operands, *output, other_results, /*num_scratch=*/0, attributes, &params));
  const MetadataCopy copy(&params);
  XLA_GPU_RETURN_IF_ERROR(CheckMetadata(params));
  RunOnCpu(params, executor);
  return ffi::Error::Success();
}

#ifdef XLA_GPU_CUDA
ffi::Error OnCuda(ffi::AnyBuffer query, ffi::AnyBuffer kv_cache, ffi::AnyBuffer context_lens,
                  ffi::AnyBuffer block_tables, ffi::AnyBuffer query_start_loc,
                  ffi::AnyBuffer num_seqs, ffi::RemainingArgs other_operands,
                  ffi::Result<ffi::AnyBuffer> output, ffi::RemainingRets other_results,
                  const ffi::Dictionary& attributes, void* stream) {
  Params params;
  XLA_GPU_RETURN_IF_ERROR(
      MakeParams({query, kv_cache, context_lens, block_tables, query_start_loc, num_seqs},
                 other_operands, *output, other_results, /*num_scratch=*/1, attributes, &params));
  const ffi::AnyBuffer memory = **other_results.get<ffi::AnyBuffer>(other_results.size() - 1);
  Scratch scratch;
  const int64_t num_bytes = MakeScratch(params, memory.untyped_data(), &scratch);
  if (memory.element_type() != ffi::U8 || !HasShape(memory, {num_bytes})) {
    return InvalidArgument(kOp, "the scratch must be uint8 [", num_bytes, "]; got ",
                           DTypeName(memory), " ", ShapeName(memory));
  }
  return Launched(kOp, RunOnCuda(params, scratch, stream));
}
#endif

// What a call has on every platform.
auto Bind() {
  return ffi::Ffi::Bind()
      .Arg<ffi::AnyBuffer>()  // query
      .Arg<ffi::AnyBuffer>()  // kv_cache
      .Arg<ffi::AnyBuffer>()  // context_lens
      .Arg<ffi::AnyBuffer>()  // block_tables
      .Arg<ffi::AnyBuffer>()  // query_start_loc
      .Arg<ffi::AnyBuffer>()  // num_seqs
      .RemainingArgs()        // operands of features
      .Ret<ffi::AnyBuffer>()  // output
      .RemainingRets()        // lse, if it is wanted; on CUDA, scratch
      .Attrs();
}

}  // namespace
}  // namespace xla_gpu::paged_attention

XLA_FFI_DEFINE_HANDLER_SYMBOL(PagedAttentionCpu, xla_gpu::paged_attention::OnCpu,
                              xla_gpu::paged_attention::Bind().Ctx<xla_gpu::Executor>());

#ifdef XLA_GPU_CUDA
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    PagedAttentionCuda, xla_gpu::paged_attention::OnCuda,
    xla_gpu::paged_attention::Bind().Ctx<xla::ffi::PlatformStream<void*>>(),
    {xla::ffi::Traits::kCmdBufferCompatible});
#endif
