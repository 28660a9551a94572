#include <cmath>

#include "../kv_cache_operand.h"
#include "cpu/run.h"
#include "cuda/run.h"
#include "params.h"

namespace xla_gpu::paged_attention {
namespace {

constexpr char kOp[] = "paged_attention";
constexpr int64_t kMaxHeadSize = 512;

// What every call has.
struct Operands {
  ffi::AnyBuffer query;
  ffi::AnyBuffer kv_cache;
  ffi::AnyBuffer context_lens;
  ffi::AnyBuffer block_tables;
  ffi::AnyBuffer query_start_loc;
  ffi::AnyBuffer num_seqs;
};

constexpr size_t kNumOperands = 6;

// A feature's number for each query head; null where the call does not use the feature.
ffi::Error FindPerHead(const char* name, FeatureOperands* operands, int64_t num_heads,
                       const float** data) {
  std::optional<ffi::AnyBuffer> buffer;
  *data = nullptr;
  ffi::Error error = operands->Find(name, &buffer);
  if (error.failure() || !buffer.has_value()) return error;
  if (!HasShape(*buffer, {num_heads})) {
    return InvalidArgument(kOp, name, " must have shape [num_heads=", num_heads, "]; got ",
                           ShapeName(buffer->dimensions()));
  }
  if (buffer->element_type() != ffi::F32) {
    return InvalidArgument(kOp, name, " must have dtype float32; got ",
                           DTypeName(buffer->element_type()));
  }
  *data = buffer->typed_data<float>();
  return ffi::Error::Success();
}

// Shapes, dtypes and attributes: the same rules, in the same order and words, as
// shared_ffi/paged_attention.py, for programs that did not pass through it. The last `num_scratch`
// of the other results are scratch.
ffi::Error MakeParams(const Operands& operands, ffi::RemainingArgs other_operands,
                      ffi::AnyBuffer output, ffi::RemainingRets other_results, size_t num_scratch,
                      const ffi::Dictionary& attributes, Params* params) {
  const auto& [query, kv_cache, context_lens, block_tables, query_start_loc, num_seqs] = operands;
  AttributeReader reader(kOp, attributes);
  const auto scale = reader.Get<float>("scale");
  const auto sliding_window = reader.Get<int64_t>("sliding_window");
  const auto soft_cap = reader.Get<float>("soft_cap");
  const auto window_right = reader.Get<int64_t>("window_right", 0);
  const auto max_query_len = reader.Get<int64_t>("max_query_len", 0);
  KvLayout layout = KvLayout::Read(&reader);
  FeatureOperands features(kOp, kNumOperands, other_operands, &reader,
                           {"value_cache", "k_scale", "v_scale", "sinks", "alibi_slopes"});
  if (ffi::Error error = reader.Finish(); error.failure()) return error;
  DType dtype;
  if (!HasShape(query, {kAnySize, kAnySize, kAnySize})) {
    return InvalidArgument(kOp, "query must have shape [num_tokens, num_heads, head_size]; got ",
                           ShapeName(query.dimensions()));
  }
  const int64_t num_tokens = query.dimensions()[0];
  const int64_t num_heads = query.dimensions()[1];
  const int64_t head_size = query.dimensions()[2];
  if (!StorageType(query.element_type(), &dtype)) {
    return InvalidArgument(kOp, "query must have dtype float32, float16 or bfloat16; got ",
                           DTypeName(query.element_type()));
  }
  if (head_size < 1 || head_size > kMaxHeadSize) {
    return InvalidArgument(kOp, "query must have a head_size from 1 to ", kMaxHeadSize, "; got ",
                           head_size);
  }
  std::optional<ffi::AnyBuffer> value_cache;
  ffi::Error error = features.Find("value_cache", &value_cache);
  KvCache cache;
  if (error.success()) {
    error = ReadKvCache(kOp, kv_cache, value_cache, kAnySize, head_size, &layout, &cache);
  }
  DType cache_dtype;
  if (error.success()) {
    error = ReadCacheDType(kOp, kv_cache, value_cache, "query", query.element_type(), dtype,
                           &cache_dtype);
  }
  if (error.failure()) return error;
  const int64_t num_kv_heads = layout.num_kv_heads;
  if (num_heads < 1 || num_heads % num_kv_heads != 0) {
    return InvalidArgument(kOp,
                           "query's num_heads must be a multiple of num_kv_heads=", num_kv_heads,
                           "; got ", num_heads);
  }
  if (!HasShape(context_lens, {kAnySize})) {
    return InvalidArgument(kOp, "context_lens must have shape [max_seqs]; got ",
                           ShapeName(context_lens.dimensions()));
  }
  const int64_t max_seqs = context_lens.dimensions()[0];
  if (!HasShape(block_tables, {max_seqs, kAnySize})) {
    return InvalidArgument(kOp, "block_tables must have shape [max_seqs=", max_seqs,
                           ", max_blocks_per_seq]; got ", ShapeName(block_tables.dimensions()));
  }
  if (!HasShape(query_start_loc, {max_seqs + 1})) {
    return InvalidArgument(kOp, "query_start_loc must have shape [max_seqs + 1=", max_seqs + 1,
                           "]; got ", ShapeName(query_start_loc.dimensions()));
  }
  if (!HasShape(num_seqs, {}) && !HasShape(num_seqs, {1})) {
    return InvalidArgument(kOp, "num_seqs must have shape [] or [1]; got ",
                           ShapeName(num_seqs.dimensions()));
  }
  const struct {
    const char* name;
    ffi::AnyBuffer buffer;
  } integers[] = {{"context_lens", context_lens},
                  {"block_tables", block_tables},
                  {"query_start_loc", query_start_loc},
                  {"num_seqs", num_seqs}};
  for (const auto& [name, buffer] : integers) {
    if (buffer.element_type() != ffi::S32) {
      return InvalidArgument(kOp, name, " must have dtype int32; got ",
                             DTypeName(buffer.element_type()));
    }
  }
  if (!std::isfinite(scale)) {
    return InvalidArgument(kOp, "scale must be finite in float32; got ", scale);
  }
  if (sliding_window < 0) {
    return InvalidArgument(kOp, "sliding_window must be at least 1; got ", sliding_window);
  }
  if (!(soft_cap >= 0) || !std::isfinite(soft_cap)) {
    return InvalidArgument(kOp, "soft_cap must be positive and finite in float32; got ", soft_cap);
  }
  const float *sinks, *alibi_slopes;
  KvScales k_scale, v_scale;
  const auto find_scales = [&](const char* name, KvScales* scales) {
    return FindScales(kOp, name, features, layout, cache_dtype != dtype, "query", scales);
  };
  error = find_scales("k_scale", &k_scale);
  if (error.success()) error = find_scales("v_scale", &v_scale);
  if (error.success()) error = FindPerHead("sinks", &features, num_heads, &sinks);
  if (error.success()) error = FindPerHead("alibi_slopes", &features, num_heads, &alibi_slopes);
  if (error.success()) error = features.Finish();
  if (error.failure()) return error;
  if (window_right < 0) {
    return InvalidArgument(kOp, "window_right must be at least 0; got ", window_right);
  }
  if (max_query_len < 0) {
    return InvalidArgument(kOp, "max_query_len must be at least 1; got ", max_query_len);
  }
  if (output.element_type() != query.element_type() ||
      !HasShape(output, {num_tokens, num_heads, head_size})) {
    return InvalidArgument(kOp, "the result must be ", DTypeName(query.element_type()), " ",
                           ShapeName(query.dimensions()), "; got ",
                           DTypeName(output.element_type()), " ", ShapeName(output.dimensions()));
  }
  if (other_results.size() != num_scratch && other_results.size() != num_scratch + 1) {
    return InvalidArgument(kOp, "the call must have ", num_scratch + 1, " or ", num_scratch + 2,
                           " results; got ", other_results.size() + 1);
  }
  float* lse = nullptr;
  if (other_results.size() > num_scratch) {
    const ffi::AnyBuffer result = **other_results.get<ffi::AnyBuffer>(0);
    if (result.element_type() != ffi::F32 || !HasShape(result, {num_tokens, num_heads})) {
      return InvalidArgument(kOp, "the second result must be float32 [", num_tokens, ", ",
                             num_heads, "]; got ", DTypeName(result.element_type()), " ",
                             ShapeName(result.dimensions()));
    }
    lse = result.typed_data<float>();
  }
  *params = {query.untyped_data(),
             cache,
             context_lens.typed_data<int32_t>(),
             block_tables.typed_data<int32_t>(),
             query_start_loc.typed_data<int32_t>(),
             num_seqs.typed_data<int32_t>(),
             k_scale,
             v_scale,
             sinks,
             alibi_slopes,
             output.untyped_data(),
             lse,
             num_tokens,
             num_heads,
             head_size,
             layout.num_blocks,
             layout.block_size,
             num_kv_heads,
             max_seqs,
             block_tables.dimensions()[1],
             scale,
             sliding_window,
             window_right,
             soft_cap,
             max_query_len,
             dtype,
             cache_dtype};
  return ffi::Error::Success();
}

// The values that steer memory accesses. Only where the host can read them: the CPU.
ffi::Error CheckMetadata(const Params& p) {
  const int64_t num_seqs = *p.num_seqs;
  if (num_seqs < 0 || num_seqs > p.max_seqs) {
    return InvalidArgument(kOp, "num_seqs must be from 0 to max_seqs=", p.max_seqs, "; got ",
                           num_seqs);
  }
  if (num_seqs > 0 && p.query_start_loc[0] < 0) {
    return InvalidArgument(kOp, "query_start_loc[0] must be at least 0; got ",
                           p.query_start_loc[0]);
  }
  const int64_t capacity = p.max_blocks_per_seq * p.block_size;
  for (int64_t s = 0; s < num_seqs; ++s) {
    const int64_t start = p.query_start_loc[s], end = p.query_start_loc[s + 1];
    const int64_t q_len = end - start, context_len = p.context_lens[s];
    if (q_len < 0) {
      return InvalidArgument(kOp, "query_start_loc must not decrease; got query_start_loc[", s + 1,
                             "]=", end, " after query_start_loc[", s, "]=", start);
    }
    if (end > p.num_tokens) {
      return InvalidArgument(kOp, "query_start_loc[", s + 1,
                             "] must be at most num_tokens=", p.num_tokens, "; got ", end);
    }
    if (p.max_query_len != 0 && q_len > p.max_query_len) {
      return InvalidArgument(kOp, "query_start_loc must give sequence ", s,
                             " at most max_query_len=", p.max_query_len, " tokens; got ", q_len);
    }
    if (context_len < 0 || context_len > capacity) {
      return InvalidArgument(kOp, "context_lens[", s,
                             "] must be from 0 to max_blocks_per_seq * block_size=", capacity,
                             "; got ", context_len);
    }
    if (p.window_right == 0 && context_len < q_len) {
      return InvalidArgument(kOp, "context_lens[", s, "] must count the sequence's ", q_len,
                             " query tokens too; got ", context_len);
    }
    if (q_len == 0 || context_len == 0) continue;
    const int64_t first_block = p.WindowBegin(context_len - q_len) / p.block_size;
    const int64_t last_block = (context_len - 1) / p.block_size;
    for (int64_t b = first_block; b <= last_block; ++b) {
      const int64_t block = p.block_tables[s * p.max_blocks_per_seq + b];
      if (block < 0 || block >= p.num_blocks) {
        return InvalidArgument(kOp, "block_tables[", s, ", ", b,
                               "] must be from 0 to num_blocks - 1=", p.num_blocks - 1, "; got ",
                               block);
      }
    }
  }
  return ffi::Error::Success();
}

ffi::Error OnCpu(ffi::AnyBuffer query, ffi::AnyBuffer kv_cache, ffi::AnyBuffer context_lens,
                 ffi::AnyBuffer block_tables, ffi::AnyBuffer query_start_loc,
                 ffi::AnyBuffer num_seqs, ffi::RemainingArgs other_operands,
                 ffi::Result<ffi::AnyBuffer> output, ffi::RemainingRets other_results,
                 const ffi::Dictionary& attributes, const Executor& executor) {
  Params params;
  ffi::Error error =
      MakeParams({query, kv_cache, context_lens, block_tables, query_start_loc, num_seqs},
                 other_operands, *output, other_results, /*num_scratch=*/0, attributes, &params);
  if (error.success()) error = CheckMetadata(params);
  if (error.success()) RunOnCpu(params, executor);
  return error;
}

#ifdef XLA_GPU_CUDA
ffi::Error OnCuda(ffi::AnyBuffer query, ffi::AnyBuffer kv_cache, ffi::AnyBuffer context_lens,
                  ffi::AnyBuffer block_tables, ffi::AnyBuffer query_start_loc,
                  ffi::AnyBuffer num_seqs, ffi::RemainingArgs other_operands,
                  ffi::Result<ffi::AnyBuffer> output, ffi::RemainingRets other_results,
                  const ffi::Dictionary& attributes, void* stream) {
  Params params;
  ffi::Error error =
      MakeParams({query, kv_cache, context_lens, block_tables, query_start_loc, num_seqs},
                 other_operands, *output, other_results, /*num_scratch=*/1, attributes, &params);
  if (error.failure()) return error;
  ffi::AnyBuffer memory = **other_results.get<ffi::AnyBuffer>(other_results.size() - 1);
  Scratch scratch;
  const int64_t num_bytes = MakeScratch(params, memory.untyped_data(), &scratch);
  if (memory.element_type() != ffi::U8 || !HasShape(memory, {num_bytes})) {
    return InvalidArgument(kOp, "the scratch must be uint8 [", num_bytes, "]; got ",
                           DTypeName(memory.element_type()), " ", ShapeName(memory.dimensions()));
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
      .RemainingArgs()        // of features
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
