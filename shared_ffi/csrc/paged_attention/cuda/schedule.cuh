// Divides the work into items. The thread blocks find their items themselves from the lengths on
// the device; the host never reads these. The grid is as large as the GPU can hold at once, and
// each thread block takes one of every gridDim.x items (FindDealt), or the next item whenever it
// asks (ResetCounter).
//
// Somebody else may write to lengths, tables and masks while a kernel runs. What follows from them
// is checked where it is used, in the copy that is used. Threads that meet at a barrier or a
// shuffle loop and branch by what one of them has read and the others got from it, through shared
// memory or a shuffle. So rows may be wrong, but every kernel ends and stays inside the arrays.
#pragma once

#include "item.cuh"
#include "scratch.h"

namespace xla_gpu::paged_attention {

// The number of sequences, or -1 if the number on the device is not from 0 to max_seqs.
__device__ inline int64_t NumSeqs(const Params& p) {
  const int64_t num_seqs = gpu::LoadOnce(p.num_seqs);
  return num_seqs <= p.max_seqs ? Larger(num_seqs, -1) : -1;
}

// A copy of a sequence's lengths, and of whether it is causal.
struct Sequence {
  int64_t first_token;
  int64_t q_len;
  int64_t context_len;
  bool is_causal;

  Sequence() = default;
  __device__ Sequence(const Params& p, int64_t s)
      : first_token(gpu::LoadOnce(p.query_start_loc + s)),
        q_len(gpu::LoadOnce(p.query_start_loc + s + 1) - first_token),
        context_len(gpu::LoadOnce(p.context_lens + s)),
        is_causal(p.is_causal || (p.causal != nullptr && gpu::LoadOnce(p.causal + s) != 0)) {}

  // The same in all lanes of a warp.
  __device__ Sequence OfFirstLane() const {
    Sequence sequence(*this);
    sequence.first_token = gpu::Shuffle(first_token, 0);
    sequence.q_len = gpu::Shuffle(q_len, 0);
    sequence.context_len = gpu::Shuffle(context_len, 0);
    sequence.is_causal = gpu::Shuffle(static_cast<int>(is_causal), 0) != 0;
    return sequence;
  }

  __device__ QueryTokens Tokens() const {
    return {first_token, context_len - q_len, context_len, is_causal};
  }

  // Whether query_start_loc gives the sequence a valid range of tokens, if it does so for all
  // sequences before it.
  __device__ bool HasRows(const Params& p) const {
    return first_token >= 0 && q_len >= 0 && first_token + q_len <= p.num_tokens;
  }

  __device__ bool HasToken(int64_t token) const {
    return first_token <= token && token < first_token + q_len;
  }

  // Whether the lengths agree with each other and with the block table.
  __device__ bool IsLegal(const Params& p) const {
    if (!HasRows(p)) return false;
    const bool is_long_enough = is_causal ? q_len <= context_len : context_len >= 0;
    if (p.max_query_len != 0 && q_len > p.max_query_len) return false;
    return is_long_enough && context_len <= p.Capacity();
  }
};

// The splits of a sequence: its leaves, its groups, or one of all positions. A split has one
// partial result. Which it is decides no bit.
struct Splits {
  int32_t first;  // the number of the first leaf, or group
  int32_t count;
  bool are_leaves;

  Splits() = default;
  __device__ Splits(const Params& p, const Sequence& sequence) {
    const int64_t q_len = sequence.q_len;
    const auto end = static_cast<int32_t>(sequence.context_len);
    const auto begin = static_cast<int32_t>(p.WindowBegin(sequence.context_len - q_len));
    const int32_t leaves = CountLeaves(begin, end), groups = CountGroups(begin, end);
    const int64_t limit = q_len <= MaxSplitTokens(p) ? SplitLimit(p, q_len) : 1;
    are_leaves = leaves <= limit;
    first = are_leaves ? LeafOf(begin) : begin / kGroup;
    const int64_t most_groups = q_len <= TokensPerTile(p) ? Larger(limit, kMaxGroupSplits) : limit;
    count = are_leaves ? leaves : groups <= most_groups ? groups : 1;
    // Ranges may add positions before the window, in other leaves.
    if (p.bidirectional_ranges != nullptr && p.sliding_window != 0) count = min(count, 1);
    if (q_len == 0) count = 0;
  }

  // The first position of a split that is not the first one.
  __device__ int32_t Begin(int64_t split) const {
    const auto number = first + static_cast<int32_t>(split);
    return are_leaves ? LeafBegin(number) : number * kGroup;
  }
};

// The kv heads whose items are computed at the same time: all, or half of them as often as it takes
// until their K and V fit the L2 cache. So K and V are read from memory once for all query tiles.
// Fewer positions are read at a time where there is a sliding window.
inline constexpr int64_t kBytesAtOnce = 24 << 20;  // an H100 has 50 MiB, for query and output too

__device__ inline int32_t HeadsAtOnce(const Params& p, const Sequence& sequence) {
  // For 9.0, nothing of it is known before a loop that finds items: the prefill kernel's has no
  // registers for that.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
  const auto in_loop = [](auto number) { return gpu::Opaque(number); };
#else
  const auto in_loop = [](auto number) { return number; };
#endif
  const int64_t columns = in_loop(p.head_size) + (p.is_latent ? 0 : in_loop(p.value_head_size));
  const int64_t bytes = sequence.context_len * columns * SizeOf(in_loop(p.cache_dtype));
  auto heads = static_cast<int32_t>(p.num_kv_heads);
  while (heads > 1 && heads * bytes > kBytesAtOnce && p.sliding_window == 0)
    heads = (heads + 1) / 2;
  return heads;
}

// The query tiles of a sequence and kv head. A tile has at most `max_rows` rows and holds whole
// tokens, unless one token has more rows than that.
struct RowTiles {
  int64_t rows;  // rows of a tile; the last tile of a token or of the sequence may have fewer
  int64_t tiles_per_token;
  int64_t count;

  RowTiles() = default;
  __device__ RowTiles(const Params& p, int64_t q_len, int64_t max_rows) {
    const int64_t group = p.group.number;
    rows = group <= max_rows ? p.group.Quotient(max_rows) * group : max_rows;
    tiles_per_token = DivideU32(group + max_rows - 1, max_rows);
    count = group <= max_rows ? DivideU32(q_len * group + rows - 1, rows) : q_len * tiles_per_token;
  }

  // The tiles of one token share a flag for what is bad.
  __device__ int64_t NumFlags() const { return DivideU32(count, tiles_per_token); }

  __device__ void Find(const Params& p, int64_t q_len, int64_t tile, Item* item) const {
    const int64_t group = p.group.number;
    int64_t end = q_len * group;
    item->flag = static_cast<int32_t>(DivideU32(tile, tiles_per_token));
    item->first_row = tile * rows;
    if (tiles_per_token > 1) {
      const int64_t token = item->flag;
      item->first_row = token * group + (tile - token * tiles_per_token) * rows;
      end = (token + 1) * group;
    }
    item->num_rows = static_cast<int32_t>(Smaller(rows, end - item->first_row));
  }
};

// The work item of a query tile of sequence s, a kv head and a split.
__device__ inline void MakeItem(const Params& p, int64_t s, const Sequence& sequence,
                                const RowTiles& tiles, int64_t tile, int64_t kv_head,
                                const Splits& splits, int64_t split, Item* item) {
  item->sequence = static_cast<int32_t>(s);
  item->kv_head = static_cast<int32_t>(kv_head);
  item->first_token = static_cast<int32_t>(sequence.first_token);
  item->first_position = static_cast<int32_t>(sequence.context_len - sequence.q_len);
  item->context_len = static_cast<int32_t>(sequence.context_len);
  item->is_causal = sequence.is_causal;
  item->split = static_cast<int32_t>(split);
  tiles.Find(p, sequence.q_len, tile, item);

  item->begin = split == 0 ? 0 : splits.Begin(split);
  item->end = split + 1 == splits.count ? item->context_len : splits.Begin(split + 1);
  item->num_splits = static_cast<int32_t>(splits.count);
  const int64_t i = TokenOf(p, *item, 0), last = TokenOf(p, *item, item->num_rows - 1);
  const Span span = p.AttendedByAny(item->Tokens(), i, last);
  item->begin = static_cast<int32_t>(Larger(item->begin, span.begin));
  item->end = static_cast<int32_t>(Smaller(item->end, span.end));
}

// The rows [first_row, first_row + num_rows) of a work item, with the positions that they attend
// to: where there may be a tree mask or ranges, those of the item.
__device__ inline Item RowsOf(const Params& p, const Item& item, int first_row, int num_rows) {
  Item rows = item;
  rows.first_row += first_row;
  rows.num_rows = min(max(item.num_rows - first_row, 0), num_rows);
  const bool has_windows_only =
      p.bidirectional_ranges == nullptr && !p.MayBeTree(item.context_len - item.first_position);
  if (has_windows_only && rows.num_rows > 0) {
    // Opaque: or 1 - sliding_window takes a register of the prefill producer, which spills.
    const int64_t begin = p.WindowBegin(gpu::Opaque(FirstPosition(p, rows)));
    const int64_t end = p.WindowEnd(item.Tokens(), LastPosition(p, rows));
    rows.begin = static_cast<int32_t>(Larger(item.begin, begin));
    rows.end = static_cast<int32_t>(Smaller(item.end, end));
  }
  if (rows.num_rows == 0 || rows.begin >= rows.end) rows.begin = rows.end = item.begin;
  return rows;
}

// Finds work items by their number. Items are numbered sequence by sequence. A parallel scan counts
// them for a section of kSection sequences at a time, a thread each.
template <int kSection>
class ScheduleOf {
 public:
  static_assert(kSection <= kThreads);

  struct Shared {
    // In registers they would be spilled.
    uint32_t round;          // of FindDealt
    uint32_t section;        // the first sequence of the section
    int64_t begin;           // number of the section's first item; ~ that if no section follows
    int64_t ends[kSection];  // for each sequence of the section, the number after its last item
    union {
      struct {
        int64_t items[kWarps];
        int broken[kWarps];
      } warps;  // while a section is counted
      Item item;
    };
  };

  __device__ ScheduleOf(const Params& p, QueryLengths lengths, int64_t max_rows, Shared* shared)
      : p_(p), lengths_(lengths), max_rows_(max_rows), shared_(*shared) {
    if (gpu::Opaque(threadIdx.x) == 0) shared_.round = 0;
    CountSection(0);
  }

  // Finds the thread block's next item: one of every gridDim.x, which are dealt from the first
  // block to the last and back again. A sequence's largest items come first: the block that gets
  // the largest of one round gets the smallest of the next.
  __device__ const Item* FindDealt() {
    const uint32_t round = shared_.round;
    const uint32_t in_round = round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
    return Find(int64_t{round} * gridDim.x + in_round);
  }

  // Returns an item in shared memory, valid until the next call, or null after the last item. All
  // threads call it, with increasing numbers. Also a barrier.
  __device__ const Item* Find(int64_t number) {
    while (number >= shared_.ends[kSection - 1]) {
      if (shared_.begin < 0) return nullptr;
      CountSection(int64_t{shared_.section} + kSection);
    }
    Sync();  // everyone has left the item before
    if (gpu::Opaque(threadIdx.x) == 0) {
      FindInSection(number);
      ++shared_.round;
    }
    Sync();
    return &shared_.item;
  }

 private:
  static __device__ __forceinline__ void Sync() { gpu::SyncThreads(kScheduleBarrier, kThreads); }

  struct Count {
    int64_t items;
    int broken;  // the batch ends here: this sequence and all later ones have no items

    __device__ Count Then(const Count& next) const {
      return {items + (broken ? 0 : next.items), broken | next.broken};
    }
  };

  __device__ void FindInSection(int64_t number) const {
    int first = 0;  // the first sequence that ends after `number`, by bisection
    for (int step = kThreads / 2; step > 0; step /= 2) {
      const int next = first + step;
      if (next <= kSection && shared_.ends[next - 1] <= number) first = next;
    }
    const int64_t begin = shared_.begin < 0 ? ~shared_.begin : shared_.begin;
    const int64_t before = first == 0 ? begin : shared_.ends[first - 1];
    FindInSequence(int64_t{shared_.section} + first, number - before, &shared_.item);
  }

  __device__ Count CountSequence(int64_t s) const {
    if (s >= NumSeqs(p_)) return {0, 1};
    const Sequence sequence(p_, s);
    return {NumItems(sequence), !sequence.HasRows(p_)};
  }

  __device__ int64_t NumItems(const Sequence& sequence) const {
    if (!sequence.IsLegal(p_) || !lengths_.Contain(sequence.q_len)) return 0;
    const RowTiles tiles(p_, sequence.q_len, max_rows_);
    return p_.num_kv_heads * tiles.count * Splits(p_, sequence).count;
  }

  __device__ void CountSection(int64_t section) {
    // Without a predicate of it that stays in a register, ptxas spills nothing for 8.0; with one,
    // nothing for 9.0.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
    const int thread = threadIdx.x;
#else
    const int thread = gpu::Opaque(threadIdx.x);
#endif
    const int lane = thread % gpu::kWarpSize, warp = thread / gpu::kWarpSize;
    Count count = {0, 0};
    if (thread < kSection) count = CountSequence(section + thread);
    for (int delta = 1; delta < gpu::kWarpSize; delta *= 2) {
      const Count left{gpu::ShuffleUp(count.items, delta), gpu::ShuffleUp(count.broken, delta)};
      if (lane >= delta) count = left.Then(count);
    }
    const int64_t begin = section == 0 ? 0 : shared_.ends[kSection - 1];
    Sync();  // everyone has read the section before, and left the item before
    if (lane == gpu::kWarpSize - 1) {
      const int place = gpu::Opaque(warp);  // no address of it stays in a register
      shared_.warps.items[place] = count.items;
      shared_.warps.broken[place] = count.broken;
    }
    Sync();
    Count before{begin, 0}, all{begin, 0};
    for (int w = 0; w < kWarps; ++w) {
      const Count warp_count{shared_.warps.items[w], shared_.warps.broken[w]};
      if (w < warp) before = before.Then(warp_count);
      all = all.Then(warp_count);
    }
    if (thread < kSection) shared_.ends[gpu::Opaque(threadIdx.x)] = before.Then(count).items;
    if (thread == 0) {
      const bool is_last = all.broken || section + kSection >= p_.max_seqs;
      shared_.begin = is_last ? ~begin : begin;
      shared_.section = static_cast<uint32_t>(section);
    }
    Sync();
  }

  // Within a sequence, items are numbered by groups of kv heads, and within a group, the query
  // tiles with the most positions come first. Items that differ only in the kv head are
  // consecutive, because kv heads are adjacent in the cache. The item has no rows if the sequence
  // no longer has that many items.
  __device__ void FindInSequence(int64_t s, int64_t number, Item* item) const {
    const Sequence sequence(p_, s);
    *item = {};
    if (number >= NumItems(sequence)) return;
    const RowTiles tiles(p_, sequence.q_len, max_rows_);
    const Splits splits(p_, sequence);
    const auto items = static_cast<uint32_t>(tiles.count * splits.count);  // of a kv head
    const uint32_t all_heads = p_.num_kv_heads, heads = HeadsAtOnce(p_, sequence);
    const uint32_t first_head = static_cast<uint32_t>(number) / (heads * items) * heads;
    const uint32_t in_group = number - first_head * items;
    const uint32_t num_heads = min(heads, all_heads - first_head);
    const uint32_t tile_and_split = in_group / num_heads;
    const uint32_t kv_head = first_head + in_group - tile_and_split * num_heads;
    const int64_t tile = DivideU32(tile_and_split, splits.count);
    const int64_t split = tile_and_split - tile * splits.count;
    MakeItem(p_, s, sequence, tiles, tiles.count - 1 - tile, kv_head, splits, split, item);
  }

  const Params& p_;
  const QueryLengths lengths_;
  const int64_t max_rows_;
  Shared& shared_;
};

// With a section of as many sequences as there are threads, an A100 would lack 72 bytes of shared
// memory for two thread blocks of TensorCoreAttention with heads of 128.
using Schedule = ScheduleOf<119>;

// Scratch::counter deals the numbers of work items to the thread blocks of the prefill kernel as
// they ask for them. With the largest items first, all blocks end at about the same time. Who
// computes an item changes none of its bits. All threads of the kernel before call it.
__device__ inline void ResetCounter(const Scratch& scratch) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *scratch.counter = 0;
}

}  // namespace xla_gpu::paged_attention
