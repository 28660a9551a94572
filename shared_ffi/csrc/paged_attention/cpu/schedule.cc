#include "schedule.h"

#include <algorithm>

namespace xla_gpu::paged_attention {
namespace {

constexpr int64_t kMaxChunks = 4;          // of rows of a kv head that share packed K and V
constexpr int64_t kPackedBytes = 1 << 19;  // of a split of these, at most, to fit a core's cache
constexpr int64_t kStepBytes = 3 << 18;    // of K and V of a step, at most, to fit a core's cache
constexpr int64_t kItemsPerThread = 8;     // so that no thread waits long for the last
constexpr int64_t kMinItemCost = 1 << 24;  // so that neighbouring heads are read together
constexpr int64_t kMinParallelCost = 1 << 20;  // that is worth waking another thread for

// Multiply-adds of an item, with 8 rows more: reading the cache takes about as long.
int64_t CostOf(const Params& p, const WorkItem& item) {
  const int64_t rows_per_head = item.num_tokens * p.group.number + 8;
  return (p.head_size + p.value_head_size) * (item.end - item.begin) * rows_per_head *
         item.num_kv_heads;
}

// Tokens of a query tile of so many chunks of rows, at most.
int64_t TokensOfChunks(const Params& p, int64_t num_chunks) {
  return std::max<int64_t>(1, num_chunks * kChunkRows * p.num_kv_heads / p.num_heads);
}

// The chunks of a query tile: as many as share packed K and V, but not so many that threads would
// run out of query tiles.
int64_t ChunksPerTile(const Params& p, int64_t max_threads) {
  if (kSplit * (p.head_size + p.value_head_size) * 4 > kPackedBytes) return 1;
  for (int64_t num_chunks = kMaxChunks; num_chunks > 1; num_chunks /= 2) {
    int64_t num_tiles = 0;
    for (int64_t s = 0; s < *p.num_seqs; ++s) {
      num_tiles += CeilDiv(p.QueryTokensOf(s).Count(), TokensOfChunks(p, num_chunks));
    }
    if (num_tiles * p.num_kv_heads >= 2 * kItemsPerThread * max_threads) return num_chunks;
  }
  return 1;
}

// Query tiles of all kv heads: some tokens of one sequence. A short context gets tiles of one
// chunk: most of it is packed for few chunks, and prefetching gains more.
std::vector<WorkItem> QueryTiles(const Params& p, int64_t max_threads) {
  const int64_t chunks_per_tile = ChunksPerTile(p, max_threads);
  std::vector<WorkItem> tiles;
  for (int64_t s = 0; s < *p.num_seqs; ++s) {
    const QueryTokens tokens = p.QueryTokensOf(s);
    const bool is_short = tokens.context_len <= kSplit;
    const int64_t tokens_per_tile = TokensOfChunks(p, is_short ? 1 : chunks_per_tile);
    for (int64_t i = 0; i < tokens.Count(); i += tokens_per_tile) {
      WorkItem tile = {};
      tile.sequence = s;
      tile.first_token = tokens.first + i;
      tile.num_tokens = std::min(tokens_per_tile, tokens.Count() - i);
      tile.position = tokens.Position(i);
      tile.num_kv_heads = p.num_kv_heads;
      const Span span = p.AttendedByAny(tokens, i, i + tile.num_tokens - 1);
      tile.begin = span.begin;
      tile.end = span.end;
      tiles.push_back(tile);
    }
  }
  return tiles;
}

// The tiles' tokens, as those of one item.
WorkItem Together(const WorkItem* tiles, size_t count) {
  WorkItem all = tiles[0];
  for (size_t i = 1; i < count; ++i) {
    all.num_tokens += tiles[i].num_tokens;
    all.end = std::max(all.end, tiles[i].end);
  }
  return all;
}

// The positions from 0 on that every token of a tile attends to.
int64_t AttendedByAll(const Params& p, const WorkItem& tile) {
  const QueryTokens tokens = p.QueryTokensOf(tile.sequence);
  int64_t end = tile.end;
  for (int64_t i = 0; i < tile.num_tokens; ++i) {
    const int64_t n = tile.first_token + i - tokens.first;
    const Span span = p.HolesOf(tokens, n).Before(p.Attended(tokens, n));
    if (span.begin > 0) return 0;
    end = std::min(end, span.end);
  }
  return end;
}

// The positions from 0 on that lie in the same blocks in two sequences, below a limit.
int64_t CommonPositions(const Params& p, int64_t sequence, int64_t other, int64_t limit) {
  const int32_t* table = p.block_tables + sequence * p.max_blocks_per_seq;
  const int32_t* other_table = p.block_tables + other * p.max_blocks_per_seq;
  const int32_t* end = table + CeilDiv(limit, p.block_size);
  const int64_t num_blocks = std::mismatch(table, end, other_table).first - table;
  return std::min(limit, num_blocks * p.block_size);
}

}  // namespace

Schedule::Schedule(const Params& p, int64_t max_threads) : p_(p) {
  const std::vector<WorkItem> tiles = QueryTiles(p, max_threads);
  int64_t cost = 0;
  for (const WorkItem& tile : tiles) cost += CostOf(p, tile);
  num_threads_ = cost < kMinParallelCost ? 1 : std::max<int64_t>(1, max_threads);
  wanted_cost_ = cost;
  if (num_threads_ > 1) {
    wanted_cost_ = std::max(cost / (kItemsPerThread * num_threads_),
                            std::min(kMinItemCost, cost / num_threads_));
  }
  wanted_cost_ = std::max<int64_t>(1, wanted_cost_);
  const WorkItem* const end = tiles.data() + tiles.size();
  for (const WorkItem* first = tiles.data(); first < end;) {
    const Group group = GroupFrom(first, end);
    if (group.count == 1) {
      CutTile(*first);
    } else {
      CutGroup(group);
    }
    first += group.count;
  }
  PlacePartialResults();
  std::stable_sort(items_.begin(), items_.end(), [&](const Entry& a, const Entry& b) {
    return CostOf(p, a.item) > CostOf(p, b.item);
  });
}

void Schedule::Run(int64_t i, const CpuKernel& kernel) {
  const Entry& entry = items_[i];
  kernel.attend(p_, entry.item, Arena::OfThread());  // Attend in kernel.cc
  for (size_t tile = 0; tile < entry.num_split_tiles; ++tile) {
    SplitTile& split_tile = split_tiles_[entry.split_tile + tile];
    if (split_tile.num_left.fetch_sub(1) == 1) {
      kernel.merge(p_, split_tile.whole, Arena::OfThread());
    }
  }
}

// The tiles from `first` on that have the most reading in common. ALiBi's bias, unlike all else,
// depends on how far a query is from the prefix.
Schedule::Group Schedule::GroupFrom(const WorkItem* first, const WorkItem* end) const {
  Group group = {first, 1, 0};
  if (p_.alibi_slopes != nullptr || p_.block_tables == nullptr) return group;
  int64_t num_tokens = first->num_tokens, common = AttendedByAll(p_, *first);
  for (const WorkItem* next = first + 1; next < end && common >= kSplit; ++next) {
    num_tokens += next->num_tokens;
    if (num_tokens > TokensOfChunks(p_, 1)) break;
    common = CommonPositions(p_, first->sequence, next->sequence,
                             std::min(common, AttendedByAll(p_, *next)));
    const int64_t shared_end = common / kSplit * kSplit;
    const int64_t count = static_cast<int64_t>(group.count);
    if (shared_end == 0 || shared_end * count < group.shared_end * (count - 1)) break;
    group = {first, group.count + 1, shared_end};
  }
  return group;
}

void Schedule::CutTile(const WorkItem& tile) {
  for (const WorkItem& part : CutByHeads(tile)) {
    if (part.NumSplits() <= SplitsPerItem(part)) {
      items_.push_back({part, 0, 0});
    } else {
      split_tiles_.emplace_back(part);
      CutBySplits(part, split_tiles_.size() - 1, 1);
    }
  }
}

void Schedule::CutGroup(const Group& group) {
  const size_t first_tile = split_tiles_.size();
  for (size_t i = 0; i < group.count; ++i) split_tiles_.emplace_back(group.tiles[i]);
  WorkItem shared = Together(group.tiles, group.count);
  shared.is_shared = true;
  shared.end = group.shared_end;
  for (const WorkItem& part : CutByHeads(shared)) CutBySplits(part, first_tile, group.count);
  for (size_t i = 0; i < group.count; ++i) {
    WorkItem rest = group.tiles[i];
    rest.begin = group.shared_end;
    if (rest.begin == rest.end) continue;
    for (const WorkItem& part : CutByHeads(rest)) CutBySplits(part, first_tile + i, 1);
  }
}

// Neighbouring kv heads lie side by side in the cache: the more of them an item has, the better it
// is read. So a tile with several splits is cut by splits first, and by heads only where an item's
// rows would not fit a core's cache.
std::vector<WorkItem> Schedule::CutByHeads(const WorkItem& item) const {
  const int64_t cost_per_head = std::max<int64_t>(1, CostOf(p_, item) / item.num_kv_heads);
  const int64_t rows_per_head = item.NumRows(p_) / item.num_kv_heads;
  const int64_t columns = p_.head_size + p_.value_head_size;
  const int64_t bytes_per_head = kStep * columns * SizeOf(p_.cache_dtype);
  const int64_t that_fit =
      std::max<int64_t>(1, std::min(kChunkRows / rows_per_head, kStepBytes / bytes_per_head));
  const int64_t heads_per_item =
      item.NumSplits() > 1 ? that_fit
                           : std::clamp<int64_t>(wanted_cost_ / cost_per_head, 1, that_fit);
  std::vector<WorkItem> parts;
  for (int64_t head = 0; head < item.num_kv_heads; head += heads_per_item) {
    parts.push_back(item);
    parts.back().first_kv_head = head;
    parts.back().num_kv_heads = std::min(heads_per_item, item.num_kv_heads - head);
  }
  return parts;
}

// Adds the splits of an item, which is a part of some split tiles.
void Schedule::CutBySplits(const WorkItem& item, size_t split_tile, size_t num_split_tiles) {
  const int64_t step = SplitsPerItem(item) * kSplit;
  for (int64_t first = item.begin / kSplit * kSplit; first < item.end; first += step) {
    WorkItem part = item;
    part.begin = std::max(item.begin, first);
    part.end = std::min(item.end, first + step);
    part.tile = &split_tiles_[split_tile].whole;
    items_.push_back({part, split_tile, num_split_tiles});
    for (size_t i = 0; i < num_split_tiles; ++i) ++split_tiles_[split_tile + i].num_left;
  }
}

int64_t Schedule::SplitsPerItem(const WorkItem& item) const {
  const int64_t cost = std::max<int64_t>(1, CostOf(p_, item));
  return std::max<int64_t>(1, wanted_cost_ * item.NumSplits() / cost);
}

void Schedule::PlacePartialResults() {
  const auto floats_of_token = [&](const WorkItem& whole) {
    const int64_t num_heads = whole.num_kv_heads * p_.group.number;
    return whole.NumSplits() * num_heads * PartialResultSize(p_);
  };
  int64_t num_floats = 0, num_tokens = 0;
  for (const auto& [whole, num_left] : split_tiles_) {
    num_floats += floats_of_token(whole) * whole.num_tokens;
    num_tokens += whole.num_tokens;
  }
  partial_results_.reset(new float[num_floats]);
  results_of_tokens_.reserve(num_tokens);  // so that addresses stay
  float* place = partial_results_.get();
  for (auto& [whole, num_left] : split_tiles_) {
    whole.tile = &whole;
    whole.partial_results = results_of_tokens_.data() + results_of_tokens_.size();
    for (int64_t token = 0; token < whole.num_tokens; ++token) {
      results_of_tokens_.push_back(place);
      place += floats_of_token(whole);
    }
  }
}

}  // namespace xla_gpu::paged_attention
