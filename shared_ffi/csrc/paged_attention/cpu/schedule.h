// Cuts attention into work items that threads take one after the other: query tiles, and splits of
// long contexts (split-KV). Neighbouring sequences whose block tables begin alike, as those of
// several answers to one prompt do, have the splits of this prefix in common, which are read once
// for all of them. The cut changes no bit of the result, so it may depend on anything.
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
  // A query tile that several items share.
  struct SplitTile {
    explicit SplitTile(const WorkItem& whole) : whole(whole) {}

    WorkItem whole;
    std::atomic<int64_t> num_left = 0;  // items that are not finished
  };

  struct Entry {
    WorkItem item;
    size_t split_tile;       // the first that the item is a part of
    size_t num_split_tiles;  // 0: the item is a tile by itself
  };

  // Query tiles of neighbouring sequences, with the positions up to shared_end in common.
  struct Group {
    const WorkItem* tiles;
    size_t count;
    int64_t shared_end;  // a multiple of kSplit; 0 for a single tile
  };

  Group GroupFrom(const WorkItem* first, const WorkItem* end) const;
  void CutTile(const WorkItem& tile);
  void CutGroup(const Group& group);
  void CutBySplits(const WorkItem& item, size_t split_tile, size_t num_split_tiles);
  std::vector<WorkItem> CutByHeads(const WorkItem& item) const;
  int64_t SplitsPerItem(const WorkItem& item) const;
  void PlacePartialResults();

  const Params& p_;
  int64_t num_threads_;
  int64_t wanted_cost_;                // of an item
  std::vector<Entry> items_;           // the most expensive first
  std::deque<SplitTile> split_tiles_;  // whose addresses stay
  std::unique_ptr<float[]> partial_results_;
  std::vector<float*> results_of_tokens_;  // of the split tiles, one after the other
};

}  // namespace xla_gpu::paged_attention
