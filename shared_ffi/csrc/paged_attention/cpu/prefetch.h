// What is fetched ahead of its use: hardware prefetchers cannot follow a block table.
#pragma once

#include <cstdint>

#include "../../storage.h"

namespace xla_gpu::paged_attention {
namespace {

constexpr int64_t kCacheLineBytes = 64;

// Prefetches the next KV tile while the current one is read, at the same rate: a processor drops
// prefetches that come in a burst. Rows side by side are one run, whatever pages they are in.
// Nothing after a run is prefetched: with pages of one position that was as much again as what is
// read.
class Prefetcher {
 public:
  // Whole cache lines.
  struct Run {
    const char* line;  // the next to prefetch; null: no run is left
    const char* end;
  };

  // A step that is due nothing stays before its end.
  static Run NoRun() { return {nullptr, reinterpret_cast<const char*>(1)}; }

  // What to prefetch at each of some positions: num_bytes at an offset from its address.
  struct Wanted {
    const char* const* positions;
    int64_t num_left;  // positions
    int64_t offset;
    int64_t num_bytes;

    Run TakeRun() {
      const char* const begin = *positions + offset;
      const char* end = begin;
      do {
        end += num_bytes;
        ++positions;
        --num_left;
      } while (num_left > 0 && *positions + offset == end);
      const auto of_line = [](const char* at) {
        return static_cast<int64_t>(reinterpret_cast<uintptr_t>(at) % kCacheLineBytes);
      };
      return {begin - of_line(begin), end + (kCacheLineBytes - 1 - of_line(end - 1))};
    }
  };

  // Prefetches both while num_positions positions of the current tile are read, num_read bytes of
  // each in all passes.
  //   runs: room for as many as there are positions in both, and one more
  Prefetcher(Wanted first, Wanted second, int64_t num_positions, int64_t num_read, Run* runs)
      : num_read_(static_cast<uint32_t>(num_read)), next_(runs) {
    int64_t num_bytes = 0;
    const auto add = [&](Wanted* wanted) {
      if (wanted->num_left == 0) return;
      *runs = wanted->TakeRun();
      num_bytes += runs->end - runs->line;
      ++runs;
    };
    while (first.num_left > 0 || second.num_left > 0) {
      add(&first);
      add(&second);
    }
    *runs = NoRun();
    if (num_bytes > 0) num_bytes_ = (num_bytes + num_positions - 1) / num_positions;
    run_ = *next_++;
  }

  // It fetches nothing.
  Prefetcher() = default;

  // Spreads the prefetches over a loop: each step reads num_read bytes of the current tile.
  class Steps {
   public:
    XLA_GPU_INLINE Steps(Prefetcher* prefetcher, int64_t num_read)
        : prefetcher_(prefetcher),
          run_(prefetcher->run_),
          num_due_(run_.line == nullptr ? 0 : prefetcher->DueAfter(num_read)) {}
    XLA_GPU_INLINE ~Steps() { prefetcher_->run_ = run_; }

    XLA_GPU_INLINE void Take() {
      const char* after = run_.line + num_due_;
      while (after >= run_.end) {
        PrefetchUntil(run_.end);
        const int64_t num_left = after - run_.end;
        run_ = *prefetcher_->next_++;
        if (run_.line == nullptr) {
          num_due_ = 0;
          return;
        }
        after = run_.line + num_left;
      }
      PrefetchUntil(after);
      run_.line = after;
    }

   private:
    XLA_GPU_INLINE void PrefetchUntil(const char* end) {
      for (; run_.line < end; run_.line += kCacheLineBytes) {
        __builtin_prefetch(run_.line, /*rw=*/0, /*locality=*/3);
      }
    }

    Prefetcher* const prefetcher_;
    Run run_;
    int64_t num_due_;  // bytes, after each step
  };

 private:
  // Whole cache lines, so that no two steps prefetch one. 32 bits divide faster; they suffice, as a
  // step reads 2^18 bytes and a position has 2^13, at most.
  int64_t DueAfter(uint32_t num_read) const {
    const int64_t last_byte = (num_read * num_bytes_ - 1) / num_read_;
    return (last_byte / kCacheLineBytes + 1) * kCacheLineBytes;
  }

  uint32_t num_bytes_ = 0;  // for num_read_
  uint32_t num_read_ = 1;
  const Run* next_ = nullptr;
  Run run_ = NoRun();
};

// Prefetches the cache lines of a row, to read or to write it.
template <bool kIsWritten = false>
XLA_GPU_INLINE void PrefetchRow(const void* row, int64_t num_bytes) {
  const char* const line = static_cast<const char*>(row);
  for (int64_t i = 0; i < num_bytes; i += kCacheLineBytes) {
    __builtin_prefetch(line + i, kIsWritten, /*locality=*/3);
  }
  asm volatile("");  // an effect: GCC drops calls of functions that only prefetch
}

}  // namespace
}  // namespace xla_gpu::paged_attention
