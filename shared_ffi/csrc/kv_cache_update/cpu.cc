#include "cpu.h"

#include <cstring>

namespace xla_gpu::kv_cache_update {
namespace {

// Below this many bytes, handing work to another thread costs more than the copy.
constexpr int64_t kMinParallelBytes = 1 << 17;

}  // namespace

// One item per kv head: each walks the tokens in order, so the later of two tokens with one slot
// wins whatever the number of threads.
void RunOnCpu(const Params& p, const Executor& executor) {
  const int64_t row_bytes = p.head_size * SizeOf(p.dtype);
  const auto update_head = [&](int64_t head) {
    for (int64_t token = 0; token < p.num_tokens; ++token) {
      const int64_t slot = p.Slot(token);
      if (slot < 0) continue;
      const int64_t source = (token * p.num_kv_heads + head) * row_bytes;
      char* target =
          static_cast<char*>(p.kv_cache) + (slot * p.num_kv_heads + head) * 2 * row_bytes;
      std::memcpy(target, static_cast<const char*>(p.key) + source, row_bytes);
      std::memcpy(target + row_bytes, static_cast<const char*>(p.value) + source, row_bytes);
    }
  };
  const int64_t bytes = 2 * p.num_tokens * p.num_kv_heads * row_bytes;
  const Executor inline_executor{1, nullptr};
  ParallelFor(bytes < kMinParallelBytes ? inline_executor : executor, p.num_kv_heads, update_head);
}

}  // namespace xla_gpu::kv_cache_update
