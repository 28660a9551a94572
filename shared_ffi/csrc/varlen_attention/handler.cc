// The forward: paged_attention's kernels, without a page table.
#include "ffi/varlen_operands.h"
#include "paged_attention/cpu/run.h"
#include "paged_attention/metadata.h"

namespace xla_gpu::varlen_attention {
namespace {

constexpr char kOp[] = "varlen_attention";

ffi::Error MakeParams(CallReader* call, size_t num_scratch, Params* p) {
  XLA_GPU_RETURN_IF_ERROR(ReadForward(call, RowLayouts(call), p));
  p->output = call->Result(0, "output", {call->Find("query")->element_type()},
                           {{p->num_tokens, p->num_heads, p->value_head_size}});
  if (call->num_results() > num_scratch + 1) {
    p->lse =
        static_cast<float*>(call->Result(1, "lse", {ffi::F32}, {{p->num_tokens, p->num_heads}}));
  }
  return call->error();
}

ffi::Error OnCpu(ffi::RemainingArgs operands, ffi::RemainingRets results,
                 const ffi::Dictionary& attributes, const Executor& executor) {
  Params params;
  CallReader call(kOp, operands, results, attributes,
                  {"query", "key", "value", "query_start_loc", "num_seqs"});
  XLA_GPU_RETURN_IF_ERROR(MakeParams(&call, /*num_scratch=*/0, &params));
  XLA_GPU_RETURN_IF_ERROR(call.Finish());
  const paged_attention::MetadataCopy copy(&params);
  XLA_GPU_RETURN_IF_ERROR(ErrorOf(kOp, MetadataError(params)));
  paged_attention::RunOnCpu(params, executor);
  return ffi::Error::Success();
}

}  // namespace

XLA_GPU_DEFINE_HANDLER(VarlenAttentionCpu, kOp, OnCpu, BindCall().Ctx<Executor>())

}  // namespace xla_gpu::varlen_attention
