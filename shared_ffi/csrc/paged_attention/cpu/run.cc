#include "run.h"

#include <algorithm>

#include "huge_pages.h"
#include "instruction_set.h"
#include "schedule.h"

namespace xla_gpu::paged_attention {
namespace {

// Rows that belong to no sequence: before the first sequence and after the last.
void ZeroPadding(const Params& p) {
  const int64_t row_bytes = p.num_heads * p.value_head_size * SizeOf(p.dtype);
  char* output = static_cast<char*>(p.output);
  const int64_t num_seqs = *p.num_seqs;
  const int64_t begin = num_seqs == 0 ? p.num_tokens : p.query_start_loc[0];
  const int64_t end = num_seqs == 0 ? p.num_tokens : p.query_start_loc[num_seqs];
  std::fill(output, output + begin * row_bytes, 0);
  std::fill(output + end * row_bytes, output + p.num_tokens * row_bytes, 0);
  if (p.lse == nullptr) return;
  constexpr float kNothing = -__builtin_inff();
  std::fill(p.lse, p.lse + begin * p.num_heads, kNothing);
  std::fill(p.lse + end * p.num_heads, p.lse + p.num_tokens * p.num_heads, kNothing);
}

}  // namespace

void RunOnCpu(const Params& p, const Executor& executor) {
  PreferHugePages(p.output, p.num_tokens * p.num_heads * p.value_head_size * SizeOf(p.dtype));
  ZeroPadding(p);
  Schedule schedule(p, executor.num_threads);
  const CpuKernel& kernel = ChosenCpuKernel();
  ParallelFor({schedule.num_threads(), executor.run}, schedule.num_items(),
              [&](int64_t i) { schedule.Run(i, kernel); });
}

}  // namespace xla_gpu::paged_attention
