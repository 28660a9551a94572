#include "cpu/instruction_set.h"
#include "cpu/run.h"
#include "cuda/run.h"
#include "ffi/attention_options.h"
#include "ffi/kv_cache_operand.h"
#include "ffi/token_rows_operand.h"
#include "metadata.h"

namespace xla_gpu::paged_attention {
namespace {

constexpr char kOp[] = "paged_attention";

CallReader Read(const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
                const ffi::Dictionary& attributes) {
  return {kOp,
          operands,
          results,
          attributes,
          {"query", "kv_cache", "context_lens", "block_tables", "query_start_loc", "num_seqs"}};
}

ffi::Error MakeParams(CallReader* call, size_t num_scratch, Params* p) {
  *p = {};
  XLA_GPU_RETURN_IF_ERROR(call->error());
  ReadOptions(call, p);
  p->is_latent = call->Has("value_head_size") && !call->Has("value_cache");

  const auto layout = TokenRowsLayout::Read(call);
  const TokenRows query = ReadTokenRows(call, "query", layout, kTensorDTypes);
  XLA_GPU_RETURN_IF_ERROR(call->error());
  SetQuery(call, query, p);
  p->value_head_size = call->Integer("value_head_size", p->head_size);
  if (p->value_head_size < 1 || p->value_head_size > p->head_size) {
    call->Fail("attribute value_head_size must be from 1 to head_size=", p->head_size, "; got ",
               p->value_head_size);
  }
  ReadKvCache(call, "query", query, p);
  p->context_lens = call->Operand<int32_t>("context_lens", {ffi::S32}, {{kAnySize}});
  XLA_GPU_RETURN_IF_ERROR(call->error());
  p->group = Divisor(p->num_heads / p->num_kv_heads);
  p->block = Divisor(p->block_size);
  p->max_seqs = call->Find("context_lens")->dimensions()[0];
  p->block_tables = call->Operand<int32_t>("block_tables", {ffi::S32}, {{p->max_seqs, kAnySize}});
  p->query_start_loc = call->Operand<int32_t>("query_start_loc", {ffi::S32}, {{p->max_seqs + 1}});
  p->num_seqs = call->Operand<int32_t>("num_seqs", {ffi::S32}, {{}, {1}});
  ReadFeatures(call, kTokenPairs, p);
  XLA_GPU_RETURN_IF_ERROR(call->error());
  p->max_blocks_per_seq = call->Find("block_tables")->dimensions()[1];
  const CacheScales k = ReadScales(call, "k_scale", "k_global", p->cache_dtype, p->head_size, *p);
  const CacheScales v = p->is_latent ? k
                                     : ReadScales(call, "v_scale", "v_global", p->value_cache_dtype,
                                                  p->value_head_size, *p);
  p->k_scale = k.rows, p->k_groups = k.groups;
  p->v_scale = v.rows, p->v_groups = v.groups;
  return ReadResults(call, num_scratch, p);
}

ffi::Error OnCpu(ffi::RemainingArgs operands, ffi::RemainingRets results,
                 const ffi::Dictionary& attributes, const Executor& executor) {
  XLA_GPU_RETURN_IF_ERROR(ErrorOf(kOp, CpuInstructionSetError()));
  Params params;
  CallReader call = Read(operands, results, attributes);
  XLA_GPU_RETURN_IF_ERROR(MakeParams(&call, /*num_scratch=*/0, &params));
  XLA_GPU_RETURN_IF_ERROR(call.Finish());
  const MetadataCopy copy(&params);
  XLA_GPU_RETURN_IF_ERROR(ErrorOf(kOp, MetadataError(params)));
  RunOnCpu(params, executor);
  return ffi::Error::Success();
}

#ifdef XLA_GPU_CUDA
ffi::Error OnCuda(ffi::RemainingArgs operands, ffi::RemainingRets results,
                  const ffi::Dictionary& attributes, void* stream) {
  XLA_GPU_RETURN_IF_ERROR(ErrorOf(kOp, CudaChoiceError()));
  Params params;
  CallReader call = Read(operands, results, attributes);
  XLA_GPU_RETURN_IF_ERROR(MakeParams(&call, /*num_scratch=*/1, &params));
  // Rows are numbered, and positions divided by the block size, in 32 bits.
  if (params.num_tokens > INT32_MAX / params.num_heads) {
    call.Refuse("query", "have num_tokens * num_heads below 2**31");
  }
  if (params.block_size > INT32_MAX) call.Refuse("kv_cache", "have a block_size below 2**31");
  Scratch scratch;
  const int64_t num_bytes = MakeScratch(params, nullptr, &scratch);
  void* memory = call.Result(call.num_results() - 1, "scratch", {ffi::U8}, {{num_bytes}});
  XLA_GPU_RETURN_IF_ERROR(call.Finish());
  MakeScratch(params, memory, &scratch);
  return Launched(kOp, RunOnCuda(params, scratch, stream));
}
#endif

}  // namespace

XLA_GPU_DEFINE_HANDLERS(PagedAttention, kOp)

}  // namespace xla_gpu::paged_attention
