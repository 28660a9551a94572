// What is fetched ahead of its use: hardware prefetchers cannot follow a block table.
#pragma once

#include <cstdint>

#include "../../storage.h"

namespace xla_gpu::paged_attention {
namespace {

constexpr int64_t kCacheLineBytes = 64;
constexpr uintptr_t kPageBytes = 4096;

// Prefetches the next KV tile while the current one is read, at the same rate: a processor drops
// prefetches that come in a burst.
class Prefetcher {
  struct Bytes {
    const char* line;  // the next to prefetch; null: none is left
    const char* end;
  };

 public:
  // What to prefetch at each position: num_bytes at an offset from its address.
  struct Wanted {
    const char* const* positions;
    int64_t offset;
    int64_t num_bytes;
  };

  // `num_wanted`: 1 or 2. `num_passes`: how often the current tile is read. Each time prefetches a
  // share of the next.
  Prefetcher(int64_t num_positions, int64_t num_wanted, const Wanted& first, const Wanted& second,
             int64_t num_passes)
      : num_left_(num_positions),
        num_wanted_(num_wanted),
        wanted_{first, second},
        num_passes_(static_cast<uint32_t>(num_passes)),
        bytes_(NextBytes()) {}

  static Prefetcher OfNothing() { return {0, 1, {}, {}, 1}; }

  // Spreads the prefetches over a loop: each step reads num_bytes of the current tile.
  class Steps {
   public:
    XLA_GPU_INLINE Steps(Prefetcher* prefetcher, int64_t num_bytes)
        : prefetcher_(prefetcher),
          bytes_(prefetcher->bytes_),
          num_bytes_(bytes_.line == nullptr ? 0 : prefetcher->ShareOf(num_bytes)) {}
    XLA_GPU_INLINE ~Steps() { prefetcher_->bytes_ = bytes_; }

    XLA_GPU_INLINE void Take() {
      const char* const after = bytes_.line + num_bytes_;
      for (; bytes_.line < after; bytes_.line += kCacheLineBytes) {
        __builtin_prefetch(bytes_.line, /*rw=*/0, /*locality=*/3);
      }
      bytes_.line = after;
      if (after < bytes_.end) return;
      bytes_ = prefetcher_->NextBytes();
      if (bytes_.line == nullptr) num_bytes_ = 0;
    }

   private:
    Prefetcher* const prefetcher_;
    Bytes bytes_;
    int64_t num_bytes_;
  };

 private:
  // 32 bits divide faster.
  int64_t ShareOf(uint32_t num_bytes) const { return (num_bytes + num_passes_ - 1) / num_passes_; }

  Bytes NextBytes() {
    if (num_left_ == 0) return {nullptr, reinterpret_cast<const char*>(1)};
    Wanted& wanted = wanted_[next_];
    const char* row = *wanted.positions++ + wanted.offset;
    if (++next_ == num_wanted_) {
      next_ = 0;
      --num_left_;
    }
    return {row, row + wanted.num_bytes};
  }

  int64_t num_left_;  // positions
  int64_t num_wanted_;
  Wanted wanted_[2];
  uint32_t num_passes_;
  int64_t next_ = 0;  // of wanted_
  Bytes bytes_;
};

// Prefetches one cache line of each page of some bytes. A processor walks the page tables for
// several prefetches at once, but for one load of a loop of products at a time.
class PageToucher {
 public:
  template <bool kIsWritten = false>
  void Touch(const void* from, int64_t num_bytes) {
    const auto begin = reinterpret_cast<uintptr_t>(from), end = begin + num_bytes;
    for (uintptr_t at = begin; at < end; at = (at / kPageBytes + 1) * kPageBytes) {
      if (at / kPageBytes == last_) continue;
      last_ = at / kPageBytes;
      __builtin_prefetch(reinterpret_cast<const void*>(at), kIsWritten, /*locality=*/3);
    }
  }

 private:
  uintptr_t last_ = 0;  // page
};

}  // namespace
}  // namespace xla_gpu::paged_attention
