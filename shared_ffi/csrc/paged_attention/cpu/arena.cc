#include "arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace xla_gpu::paged_attention {
namespace {

constexpr int64_t kAlignment = 64;
constexpr int64_t kMinChunk = 1 << 20;

}  // namespace

Arena* Arena::OfThread() {
  static thread_local Arena arena;
  arena.Reset();
  return &arena;
}

// Several chunks become one, so that the next item finds all of its memory in one piece.
void Arena::Reset() {
  used_ = 0;
  if (chunks_.size() <= 1) return;
  int64_t num_bytes = 0;
  for (const Chunk& chunk : chunks_) num_bytes += chunk.num_bytes;
  chunks_.clear();
  TakeBytes(num_bytes);
  used_ = 0;
}

void* Arena::TakeBytes(int64_t num_bytes) {
  num_bytes = (num_bytes + kAlignment - 1) / kAlignment * kAlignment;
  if (chunks_.empty() || used_ + num_bytes > chunks_.back().num_bytes) {
    const int64_t size = std::max(num_bytes, kMinChunk);
    char* memory = static_cast<char*>(std::aligned_alloc(kAlignment, size));
    if (memory == nullptr) throw std::bad_alloc();
    chunks_.push_back({std::unique_ptr<char, Free>(memory), size});
    used_ = 0;
  }
  char* taken = chunks_.back().memory.get() + used_;
  used_ += num_bytes;
  return taken;
}

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
