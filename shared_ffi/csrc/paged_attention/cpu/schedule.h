// Cuts attention into work items that threads take one after the other: query tiles, and splits of
// long contexts (split-KV). The cut changes no bit of the result, so it may depend on anything.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "kernel.h"

namespace xla_gpu::paged_attention {

class Schedule {
 public:
  // For as many threads as are worth waking, at most max_threads.
  Schedule(const Params& p, int64_t max_threads);

  int64_t num_threads() const { return num_threads_; }
  int64_t num_items() const { return static_cast<int64_t>(items_.size()); }

  // Computes the i-th item, and merges the splits of its query tile if it is the last of them.
  void Run(int64_t i, const CpuKernel& kernel);

 private:
  // A query tile whose splits are several items.
  struct SplitTile {
    SplitTile(const WorkItem& whole, int64_t num_items) : whole(whole), num_left(num_items) {}

    WorkItem whole;
    std::atomic<int64_t> num_left;  // items that are not finished
  };

  struct Entry {
    WorkItem item;
    SplitTile* split_tile;  // null: the item has all splits
  };

  void CutByHeads(const WorkItem& tile, int64_t wanted_cost);
  void CutBySplits(const WorkItem& whole, int64_t splits_per_item);
  void PlacePartialResults();
  int64_t NumFloats(const WorkItem& whole) const;

  const Params& p_;
  int64_t num_threads_;
  std::vector<Entry> items_;           // the most expensive first
  std::deque<SplitTile> split_tiles_;  // whose addresses stay
  std::unique_ptr<float[]> partial_results_;
};

}  // namespace xla_gpu::paged_attention
