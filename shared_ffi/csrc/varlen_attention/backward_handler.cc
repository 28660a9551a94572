// The derivative.
#include "cpu/run.h"
#include "cuda/run.h"
#include "ffi/varlen_operands.h"
#include "paged_attention/cpu/instruction_set.h"
#include "paged_attention/metadata.h"

namespace xla_gpu::varlen_attention {
namespace {

constexpr char kOp[] = "varlen_attention_backward";

ffi::Error MakeParams(CallReader* call, BackwardParams* p) {
  *p = {};
  XLA_GPU_RETURN_IF_ERROR(call->error());
  const RowLayouts layouts(call);
  Params& f = p->forward;
  XLA_GPU_RETURN_IF_ERROR(ReadForward(call, layouts, &f));
  const auto read = [&](std::string_view name) {
    return ReadRowsLike(call, name, layouts.output, f.num_tokens, f.num_heads, f.value_head_size);
  };
  const TokenRows output = read("output"), dout = read("dout");
  p->lse = call->Operand<float>("lse", {ffi::F32}, {{f.num_tokens, f.num_heads}});
  XLA_GPU_RETURN_IF_ERROR(call->error());
  p->output = output.data;
  p->output_stride = output.stride;
  p->dout = dout.data;
  p->dout_stride = dout.stride;

  const DTypes dtypes = {call->Find("query")->element_type()};
  p->dquery = call->Result(0, "dquery", dtypes, {{f.num_tokens, f.num_heads, f.head_size}});
  p->dkey = call->Result(1, "dkey", dtypes, {{f.num_tokens, f.num_kv_heads, f.head_size}});
  p->dvalue =
      call->Result(2, "dvalue", dtypes, {{f.num_tokens, f.num_kv_heads, f.value_head_size}});
  size_t number = 3;
  const auto of_heads = [&](const float* feature, std::string_view name) {
    return feature == nullptr
               ? nullptr
               : static_cast<float*>(call->Result(number++, name, {ffi::F32}, {{f.num_heads}}));
  };
  p->dsinks = of_heads(f.sinks, "dsinks");
  p->dalibi_slopes = of_heads(f.alibi_slopes, "dalibi_slopes");
  return call->error();
}

ffi::Error OnCpu(ffi::RemainingArgs operands, ffi::RemainingRets results,
                 const ffi::Dictionary& attributes, const Executor& executor) {
  XLA_GPU_RETURN_IF_ERROR(ErrorOf(kOp, paged_attention::CpuInstructionSetError()));
  BackwardParams params;
  CallReader call(
      kOp, operands, results, attributes,
      {"query", "key", "value", "output", "lse", "dout", "query_start_loc", "num_seqs"});
  XLA_GPU_RETURN_IF_ERROR(MakeParams(&call, &params));
  XLA_GPU_RETURN_IF_ERROR(call.Finish());
  const paged_attention::MetadataCopy copy(&params.forward);
  XLA_GPU_RETURN_IF_ERROR(ErrorOf(kOp, MetadataError(params.forward)));
  RunBackwardOnCpu(params, executor);
  return ffi::Error::Success();
}

#ifdef XLA_GPU_CUDA
ffi::Error OnCuda(ffi::RemainingArgs operands, ffi::RemainingRets results,
                  const ffi::Dictionary& attributes, void* stream) {
  BackwardParams params;
  CallReader call(
      kOp, operands, results, attributes,
      {"query", "key", "value", "output", "lse", "dout", "query_start_loc", "num_seqs"});
  XLA_GPU_RETURN_IF_ERROR(MakeParams(&call, &params));
  RefuseTooManyRows(&call, params.forward);
  if (params.forward.head_size > kMaxGradientHeadSize) {
    call.Refuse("query", "have a head_size of at most ", kMaxGradientHeadSize, " on CUDA");
  }
  BackwardScratch scratch;
  const int64_t num_bytes = MakeScratch(params, nullptr, &scratch);
  void* memory = call.Result(call.num_results() - 1, "scratch", {ffi::U8}, {{num_bytes}});
  XLA_GPU_RETURN_IF_ERROR(call.Finish());
  MakeScratch(params, memory, &scratch);
  return Launched(kOp, RunBackwardOnCuda(params, scratch, stream));
}
#endif

}  // namespace

XLA_GPU_DEFINE_HANDLERS(VarlenAttentionBackward, kOp)

}  // namespace xla_gpu::varlen_attention
