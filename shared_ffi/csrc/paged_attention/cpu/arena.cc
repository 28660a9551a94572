#include "arena.h"

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

}  // namespace xla_gpu::paged_attention
