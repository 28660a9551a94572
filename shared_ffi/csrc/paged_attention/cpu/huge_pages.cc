#include "huge_pages.h"

#include <sys/mman.h>

namespace xla_gpu::paged_attention {

void PreferHugePages(void* output, int64_t num_bytes) {
#ifdef MADV_HUGEPAGE
  constexpr int64_t kMinBytes = 1 << 22;
  constexpr uintptr_t kHugePage = 1 << 21;
  if (num_bytes < kMinBytes) return;
  const auto address = reinterpret_cast<uintptr_t>(output);
  const uintptr_t begin = (address + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (address + num_bytes) / kHugePage * kHugePage;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // it may refuse
#endif
}

}  // namespace xla_gpu::paged_attention
