// The forward: paged_attention's kernels, without a page table.
#include <numeric>
#include <vector>

#include "cuda/run.h"
#include "ffi/varlen_operands.h"
#include "paged_attention/cpu/instruction_set.h"
#include "paged_attention/cpu/run.h"
#include "paged_attention/metadata.h"

namespace xla_gpu::varlen_attention {
namespace {

constexpr char kOp[] = "varlen_attention";

ffi::Error MakeParams(CallReader* call, size_t num_scratch, Params* p) {
  XLA_GPU_RETURN_IF_ERROR(ReadForward(call, RowLayouts(call), p));
  return paged_attention::ReadResults(call, num_scratch, p);
}

ffi::Error OnCpu(ffi::RemainingArgs operands, ffi::RemainingRets results,
                 const ffi::Dictionary& attributes, const Executor& executor) {
  XLA_GPU_RETURN_IF_ERROR(ErrorOf(kOp, paged_attention::CpuInstructionSetError()));
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
// tensor copy may read a block as a whole. With prefix_seqs, a block is one token, and a kernel
// makes the table. K and V are in proportion.
void MakeTable(Params* p) {
  KvCache& cache = p->cache;
  const int64_t stride = cache.block_stride, value_stride = cache.OffsetOfValue(stride);
  if (p->num_tokens > 0) {
    const bool is_one_head = p->num_kv_heads == 1;
    const int64_t from = is_one_head ? stride : p->head_size;
    const int64_t to = is_one_head ? value_stride : p->value_head_size;
    const int64_t common = std::gcd(from, to);
    cache.SetUnits(from / common, to / common);
    if (is_one_head) cache.head_stride = 0;
  }
  if (p->prefix_seqs != nullptr) return;
  cache.position_stride = stride;
  p->max_blocks_per_seq = 1;
  p->block_size = p->num_tokens | 1;
  p->block = paged_attention::Divisor(p->block_size);
}

ffi::Error OnCuda(ffi::RemainingArgs operands, ffi::RemainingRets results,
                  const ffi::Dictionary& attributes, void* stream) {
  XLA_GPU_RETURN_IF_ERROR(ErrorOf(kOp, paged_attention::CudaChoiceError()));
  Params params;
  CallReader call(kOp, operands, results, attributes,
                  {"query", "key", "value", "query_start_loc", "num_seqs"});
  XLA_GPU_RETURN_IF_ERROR(MakeParams(&call, /*num_scratch=*/1, &params));
  RefuseTooManyRows(&call, params);
  const Params given = params;
  KvCache& cache = params.cache;
  const int64_t copied_bytes = CopiedBytes(params), lengths_bytes = LengthsBytes(params);
  const int64_t tables_bytes = TablesBytes(params);
  const int64_t columns = params.num_kv_heads * params.head_size;
  const int64_t value_columns = params.num_kv_heads * params.value_head_size;
  if (copied_bytes > 0) {
    cache.block_stride = columns;
    cache.SetUnits(columns, value_columns);
  }
  MakeTable(&params);
  paged_attention::Scratch scratch;
  const int64_t before = lengths_bytes + copied_bytes + tables_bytes;
  const int64_t num_bytes = before + MakeScratch(params, nullptr, &scratch);
  void* memory = call.Result(call.num_results() - 1, "scratch", {ffi::U8}, {{num_bytes}});
  XLA_GPU_RETURN_IF_ERROR(call.Finish());
  char* const bytes = static_cast<char*>(memory);
  MakeScratch(params, bytes + before, &scratch);
  std::vector<RowsCopy> copies;
  if (copied_bytes > 0) {
    cache.keys = bytes + lengths_bytes;
    cache.values = bytes + lengths_bytes + params.num_tokens * columns * SizeOf(params.dtype);
    const int64_t stride = given.cache.block_stride;
    copies = {{given.cache.keys, stride, columns, cache.keys},
              {given.cache.values, given.cache.OffsetOfValue(stride), value_columns, cache.values}};
  }
  auto* const tables = reinterpret_cast<int32_t*>(bytes + lengths_bytes + copied_bytes);
  return Launched(
      kOp, RunForwardOnCuda(params, MakeLengths(params, memory), copies, tables, scratch, stream));
}
#endif

}  // namespace

XLA_GPU_DEFINE_HANDLERS(VarlenAttention, kOp)

}  // namespace xla_gpu::varlen_attention
