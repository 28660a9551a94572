// The forward: paged_attention's kernels, without a page table.
#include "cuda/run.h"
#include "operands.h"
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

#ifdef XLA_GPU_CUDA
// The page tables of the kernels need one. Blocks overlap: block t has the positions from token t
// on, so that a sequence's table is one entry, its first token. An odd number of positions, as no
// tensor copy may read a block as a whole.
ffi::Error MakeTable(CallReader* call, Params* p) {
  KvCache& cache = p->cache;
  const int64_t stride = cache.block_stride, value_stride = cache.OffsetOfValue(stride);
  if (p->num_kv_heads > 1 && p->num_tokens > 0) {  // V's distances from those of K
    const int64_t size = p->head_size, value_size = p->value_head_size;
    if (size == value_size && stride == value_stride) {
      cache.SetUnits(1, 1);
    } else if (stride % size == 0 && stride / size * value_size == value_stride) {
      cache.SetUnits(size, value_size);
    } else {
      call->Refuse("value", "have rows as far apart as those of key on CUDA, ", stride, " or ",
                   "in proportion to the head sizes: copy both");
      return call->error();
    }
  }
  cache.position_stride = stride;
  p->max_blocks_per_seq = 1;
  p->block_size = p->num_tokens | 1;
  p->block = paged_attention::Divisor(p->block_size);
  return call->error();
}

ffi::Error OnCuda(ffi::RemainingArgs operands, ffi::RemainingRets results,
                  const ffi::Dictionary& attributes, void* stream) {
  Params params;
  CallReader call(kOp, operands, results, attributes,
                  {"query", "key", "value", "query_start_loc", "num_seqs"});
  XLA_GPU_RETURN_IF_ERROR(MakeParams(&call, /*num_scratch=*/1, &params));
  XLA_GPU_RETURN_IF_ERROR(MakeTable(&call, &params));
  RefuseTooManyRows(&call, params);
  paged_attention::Scratch scratch;
  const int64_t lengths_bytes = LengthsBytes(params);
  const int64_t num_bytes = lengths_bytes + MakeScratch(params, nullptr, &scratch);
  void* memory = call.Result(call.num_results() - 1, "scratch", {ffi::U8}, {{num_bytes}});
  XLA_GPU_RETURN_IF_ERROR(call.Finish());
  MakeScratch(params, static_cast<char*>(memory) + lengths_bytes, &scratch);
  return Launched(kOp,
                  RunForwardOnCuda(params, MakeLengths(params, memory), scratch, stream));
}
#endif

}  // namespace

XLA_GPU_DEFINE_HANDLERS(VarlenAttention, kOp)

}  // namespace xla_gpu::varlen_attention
