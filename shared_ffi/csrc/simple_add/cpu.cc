#include <algorithm>

#include "run.h"

namespace xla_gpu::simple_add {
namespace {

// The elements of an item: 256 KiB per operand take far longer than handing the item to a thread.
constexpr int64_t kChunk = 1 << 16;

}  // namespace

void RunOnCpu(const Params& p, const Executor& executor) {
  const int64_t num_chunks = (p.num_elements + kChunk - 1) / kChunk;
  ParallelFor(executor, num_chunks, [&](int64_t chunk) {
    const int64_t end = std::min(p.num_elements, (chunk + 1) * kChunk);
    for (int64_t i = chunk * kChunk; i < end; ++i) p.sum[i] = p.a[i] + p.b[i];
  });
}

}  // namespace xla_gpu::simple_add
