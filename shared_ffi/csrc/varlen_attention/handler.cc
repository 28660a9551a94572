// The forward: paged_attention's kernels, without a page table.
#include <numeric>

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
  if (p->num_tokens > 0) {  // V's strides in proportion to K's
    const bool is_one_head = p->num_kv_heads == 1;
    const int64_t from = is_one_head ? stride : p->head_size;
    const int64_t to = is_one_head ? value_stride : p->value_head_size;
    const int64_t unit = from / std::gcd(from, to), value_unit = to / std::gcd(from, to);
    if (stride % unit != 0 || stride / unit * value_unit != value_stride) {
      call->Refuse("value", "have on CUDA the strides of key, in proportion to their head sizes: ",
                   "copy both");
      return call->error();
    }
    cache.SetUnits(unit, value_unit);
    if (is_one_head) cache.head_stride = 0;
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
  return Launched(kOp, RunForwardOnCuda(params, MakeLengths(params, memory), scratch, stream));
}
#endif

}  // namespace

XLA_GPU_DEFINE_HANDLERS(VarlenAttention, kOp)

}  // namespace xla_gpu::varlen_attention
