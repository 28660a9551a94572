#include "schedule.h"

#include <algorithm>

namespace xla_gpu::paged_attention {
namespace {

constexpr int64_t kRowsPerItem = 256;      // of a kv head, at most, that share a packed KV tile
constexpr int64_t kStepBytes = 3 << 18;    // of K and V of a step, at most, to fit a core's cache
constexpr int64_t kItemsPerThread = 8;     // so that no thread waits long for the last
constexpr int64_t kMinItemCost = 1 << 22;  // so that neighbouring heads are read together
constexpr int64_t kMinParallelCost = 1 << 20;  // that is worth waking another thread for

// Multiply-adds of an item, with 8 rows more: reading the cache takes about as long.
int64_t CostOf(const Params& p, const WorkItem& item) {
  const int64_t rows_per_head = item.num_tokens * (p.num_heads / p.num_kv_heads) + 8;
  return (p.head_size + p.value_head_size) * (item.end - item.begin) * rows_per_head *
         item.num_kv_heads;
}

// Query tiles of all kv heads: tokens of one sequence, as many as may share a packed KV tile.
std::vector<WorkItem> QueryTiles(const Params& p) {
  const int64_t tokens_per_tile = std::max<int64_t>(1, kRowsPerItem * p.num_kv_heads / p.num_heads);
  std::vector<WorkItem> tiles;
  for (int64_t s = 0; s < *p.num_seqs; ++s) {
    const int64_t start = p.query_start_loc[s], end = p.query_start_loc[s + 1];
    const int64_t context_len = p.context_lens[s];
    for (int64_t token = start; token < end; token += tokens_per_tile) {
      WorkItem tile = {};
      tile.sequence = s;
      tile.first_token = token;
      tile.num_tokens = std::min(tokens_per_tile, end - token);
      tile.position = context_len - (end - token);
      tile.num_kv_heads = p.num_kv_heads;
      const int64_t i = token - start, last = i + tile.num_tokens - 1;
      const Span span = p.AttendedByAny(start, i, last, context_len - (end - start), context_len);
      tile.begin = span.begin;
      tile.end = span.end;
      tiles.push_back(tile);
    }
  }
  return tiles;
}

}  // namespace

Schedule::Schedule(const Params& p, int64_t max_threads) : p_(p) {
  const std::vector<WorkItem> tiles = QueryTiles(p);
  int64_t cost = 0;
  for (const WorkItem& tile : tiles) cost += CostOf(p, tile);
  num_threads_ = cost < kMinParallelCost ? 1 : std::max<int64_t>(1, max_threads);
  int64_t wanted_cost = cost;
  if (num_threads_ > 1) {
    wanted_cost = std::max(cost / (kItemsPerThread * num_threads_),
                           std::min(kMinItemCost, cost / num_threads_));
  }
  for (const WorkItem& tile : tiles) CutByHeads(tile, std::max<int64_t>(1, wanted_cost));
  PlacePartialResults();
  std::stable_sort(items_.begin(), items_.end(), [&](const Entry& a, const Entry& b) {
    return CostOf(p, a.item) > CostOf(p, b.item);
  });
}

void Schedule::Run(int64_t i, const CpuKernel& kernel) {
  const auto& [item, split_tile] = items_[i];
  kernel.attend(p_, item, Arena::OfThread());
  if (split_tile != nullptr && split_tile->num_left.fetch_sub(1) == 1) {
    kernel.merge(p_, split_tile->whole, Arena::OfThread());
  }
}

// Neighbouring kv heads lie side by side in the cache: the more of them an item has, the better it
// is read. So a tile with several splits is cut by splits first, and by heads only where an item's
// rows would not fit a core's cache.
void Schedule::CutByHeads(const WorkItem& tile, int64_t wanted_cost) {
  const int64_t cost_per_head = std::max<int64_t>(1, CostOf(p_, tile) / tile.num_kv_heads);
  const int64_t rows_per_head = tile.NumRows(p_) / tile.num_kv_heads;
  const int64_t columns = p_.head_size + p_.value_head_size;
  const int64_t bytes_per_head = kStep * columns * SizeOf(p_.cache_dtype);
  const int64_t that_fit =
      std::max<int64_t>(1, std::min(kRowsPerItem / rows_per_head, kStepBytes / bytes_per_head));
  const int64_t heads_per_item =
      tile.NumSplits() > 1 ? that_fit
                           : std::clamp<int64_t>(wanted_cost / cost_per_head, 1, that_fit);
  for (int64_t head = 0; head < tile.num_kv_heads; head += heads_per_item) {
    WorkItem item = tile;
    item.first_kv_head = head;
    item.num_kv_heads = std::min(heads_per_item, tile.num_kv_heads - head);
    const int64_t cost = cost_per_head * item.num_kv_heads;
    CutBySplits(item, std::max<int64_t>(1, wanted_cost * tile.NumSplits() / cost));
  }
}

void Schedule::CutBySplits(const WorkItem& whole, int64_t splits_per_item) {
  if (whole.NumSplits() <= splits_per_item) {
    items_.push_back({whole, nullptr});
    return;
  }
  split_tiles_.emplace_back(whole, CeilDiv(whole.NumSplits(), splits_per_item));
  const int64_t step = splits_per_item * kSplit;
  for (int64_t first = whole.begin / kSplit * kSplit; first < whole.end; first += step) {
    WorkItem item = whole;
    item.begin = std::max(whole.begin, first);
    item.end = std::min(whole.end, first + step);
    items_.push_back({item, &split_tiles_.back()});
  }
}

void Schedule::PlacePartialResults() {
  int64_t num_floats = 0;
  for (const SplitTile& tile : split_tiles_) num_floats += NumFloats(tile.whole);
  partial_results_.reset(new float[num_floats]);
  float* place = partial_results_.get();
  for (SplitTile& tile : split_tiles_) {
    tile.whole.partial_results = place;
    place += NumFloats(tile.whole);
  }
  for (auto& [item, split_tile] : items_) {
    if (split_tile == nullptr) continue;
    const WorkItem& whole = split_tile->whole;
    const int64_t split = item.begin / kSplit - whole.begin / kSplit;
    item.partial_results =
        whole.partial_results + split * whole.NumRows(p_) * PartialResultSize(p_);
  }
}

int64_t Schedule::NumFloats(const WorkItem& whole) const {
  return whole.NumSplits() * whole.NumRows(p_) * PartialResultSize(p_);
}

}  // namespace xla_gpu::paged_attention
