// The memory where a split leaves what it found, and work items what was wrong.
#pragma once

#include "splits.h"

namespace xla_gpu::paged_attention {

inline constexpr int kColumnsAtOnce = 4;  // that a lane reads and writes, adjacent ones
inline constexpr int kColumnStep = 32 * kColumnsAtOnce;  // those of a warp

// A row's pieces of so many columns.
XLA_GPU_HOST_DEVICE inline int64_t PiecesOfHead(const Params& p) {
  return CeilDiv(p.value_head_size, kColumnStep);
}

// What a row of a split has seen: the largest logit, in units of 1 / log2(e), and the sum of
// 2^(logit - max).
struct RowState {
  float max;
  float sum;
};

inline constexpr int32_t kFollows = 1;
// Nobody has anything in common: no position matters more than another.
inline constexpr int32_t kAllKept = INT32_MAX / kShortLeaf * kShortLeaf;

// A partial: what one query token found in one split.
struct Scratch {
  int64_t max_splits;
  int64_t num_partials;
  int64_t partials_of_sequence;  // 0: each token of the batch has max_splits

  // Whether a work item met a bad block id or tree mask: the flags of unsplit sequences, which
  // begin at the number of their first token; then one for each partial.
  int32_t* is_bad;   // [num_tokens + num_partials]
  int32_t* counter;  // of the work items that are taken, for a kernel that counts them
  // What the decode kernel counts of each sequence and kv head: the units whose partial results
  // are written, or the runs that are merged, and then the units of each run. ZeroArrivals sets
  // them to 0.
  int32_t* arrivals;  // [max_seqs, num_kv_heads, arrivals_of_head]
  int64_t arrivals_of_head;
  // The positions that a sequence has in common with its neighbours in the batch, from the first
  // on: a multiple of kShortLeaf. Plus kFollows: the sequence before it has as many, and the decode
  // kernel reads the units that lie in them for both. ZeroArrivals finds it.
  int32_t* families;  // [max_seqs]
  RowState* states;   // [num_partials, num_heads]
  float* partials;    // [num_partials, num_heads, value_head_size]: sums of 2^(logit - max) * v
  // Where the thread blocks of kernels for long queries add up the leaves of their rows (order.h),
  // each in its own slot: the group's total, then that of the groups before. At most num_slots
  // thread blocks run. No slots where no row has a second leaf.
  float* slots;  // [num_slots, 2, floats_of_slot]
  int64_t num_slots;
  int64_t floats_of_slot;  // columns as floats, and 16 more, for each of kPrefillTileRows rows

  // which: 0 for the group's total, 1 for that of the groups before.
  XLA_GPU_HOST_DEVICE float* Slot(int64_t block, int which) const {
    return slots + (2 * block + which) * floats_of_slot;
  }

  // The first partial of token i, which is query token `token` of the batch, of sequence s. Its
  // num_splits partials are adjacent.
  XLA_GPU_HOST_DEVICE int64_t Partial(int64_t s, int64_t i, int64_t token,
                                      int64_t num_splits) const {
    return partials_of_sequence == 0 ? token * max_splits
                                     : s * partials_of_sequence + i * num_splits;
  }

  // A flag of sequence s in one of its splits. Its flags are numbered as the query tiles of its
  // work items (RowTiles).
  XLA_GPU_HOST_DEVICE int32_t* IsBad(const Params& p, int64_t s, int64_t first_token, int64_t flag,
                                     int64_t split, int64_t num_splits) const {
    const int64_t token = first_token + flag;  // of the sequence: it has no more flags than tokens
    if (num_splits == 1) return is_bad + token;
    return is_bad + p.num_tokens + Partial(s, flag, token, num_splits) + split;
  }
};

// The numbers of Scratch::arrivals.
inline int64_t NumArrivals(const Params& p, const Scratch& scratch) {
  return p.max_seqs * p.num_kv_heads * scratch.arrivals_of_head;
}

// The parts of the scratch size that do not depend on num_tokens, max_seqs or the block table.
// Python combines them when those sizes are symbolic (cuda_scratch_bytes in
// shared_ffi/paged_attention.py).
struct ScratchSizes {
  int64_t split_limit;
  int64_t max_split_tokens;  // most query tokens of a sequence that is split
  int64_t tile_tokens;       // most of a query tile
  int64_t max_length;        // positions that a split sequence's window can span
  int64_t flag_bytes;     // for each token, partial and sequence, for the counter, and for arrivals
  int64_t decode_tokens;  // most query tokens of a sequence that the decode kernel takes
  int64_t enough_slots;   // see DecodeSlots
  int64_t most_group_slots;
  int64_t most_runs;
  int64_t partial_bytes;  // RowState and partial result of all heads
  int64_t alignment;      // what the size of all flags is rounded up to a multiple of
  int64_t group;          // positions
  int64_t max_group_splits;
  int64_t max_slots;
  int64_t slot_bytes;  // of a thread block
  int64_t leaf;        // a capacity of so many positions needs no slots
};

// The positions of a sequence that are split, at most, and the groups and leaves that hold them.
XLA_GPU_HOST_DEVICE inline int64_t MaxLength(const Params& p) {
  if (p.sliding_window == 0) return kMaxContextLen;
  const int64_t window = Smaller(p.sliding_window, INT64_MAX / 2);  // the sum must not overflow
  return window + MaxSplitTokens(p) + kLargestTile;
}
XLA_GPU_HOST_DEVICE inline int64_t LongestSpan(const Params& p) {
  return Smaller(p.Capacity(), MaxLength(p));
}
XLA_GPU_HOST_DEVICE inline int64_t MostGroups(int64_t longest) {
  return CeilDiv(longest, kGroup) + 1;
}
inline int64_t MostLeaves(int64_t longest) {
  return CeilDiv(longest, kLongLeaf) + kNumShortLeaves - 1;
}

inline ScratchSizes MakeScratchSizes(const Params& p) {
  const int64_t max_query_len = p.max_query_len == 0 ? INT64_MAX : p.max_query_len;
  ScratchSizes sizes;
  sizes.split_limit = SplitLimit(p);
  sizes.max_split_tokens = Smaller(MaxSplitTokens(p), max_query_len);
  sizes.tile_tokens = Smaller(TokensPerTile(p), max_query_len);
  sizes.max_length = MaxLength(p);
  sizes.flag_bytes = sizeof(int32_t);
  sizes.decode_tokens = Smaller(FewTokens(p), max_query_len);
  sizes.enough_slots = kEnoughSlots / p.num_kv_heads;
  sizes.most_group_slots = kMaxGroupSplits;
  sizes.most_runs = kMostRuns;
  sizes.partial_bytes = p.num_heads * (sizeof(RowState) + p.value_head_size * sizeof(float));
  sizes.alignment = 16;
  sizes.group = kGroup;
  sizes.max_group_splits = Larger(sizes.split_limit, kMaxGroupSplits);
  sizes.max_slots = kMaxSlots;
  sizes.slot_bytes = 2 * FloatsOfSlot(p) * static_cast<int64_t>(sizeof(float));
  sizes.leaf = kShortLeaf;
  return sizes;
}

// With t > 1 query tiles, a sequence has at most SplitLimit / t splits: no more partials than one
// tile can have.
inline int64_t PartialsOfSequence(const ScratchSizes& sizes, int64_t max_splits) {
  return Smaller(sizes.tile_tokens * Larger(sizes.split_limit, max_splits),
                 sizes.max_split_tokens * max_splits);
}

// The partials of the decode kernel: one for each query token and leaf. If those are many, one for
// each query token and group, or as many as a batch of few sequences needs to fill a GPU.
inline int64_t DecodeSlots(const Params& p, const ScratchSizes& sizes, int64_t longest) {
  const int64_t tokens = Smaller(p.num_tokens, p.max_seqs * sizes.decode_tokens);
  const int64_t leaves =  // none where all is unsplit
      Smaller(MostLeaves(longest), longest / (kMostUnsplit + 1) * kNumShortLeaves);
  const int64_t groups = Smaller(MostGroups(longest), sizes.most_group_slots);
  return Smaller(tokens * leaves, Larger(tokens * groups, sizes.enough_slots));
}

// Lays the scratch out in `memory`, which may be null when only the size is wanted; that is
//     4 * (num_tokens + num_partials + 1 + max_seqs * (num_kv_heads * arrivals_of_head + 1))
//         + 4 * num_partials * num_heads * (value_head_size + 2) + num_slots * slot_bytes bytes,
// the first and the second term rounded up to 16, with at most max_splits partials for each token
// and partials_of_sequence for each sequence, or DecodeSlots if those are more.
inline int64_t MakeScratch(const Params& p, void* memory, Scratch* scratch) {
  const ScratchSizes sizes = MakeScratchSizes(p);
  const int64_t longest = LongestSpan(p);
  // One more than the leaves, or groups, of so many positions: they may begin anywhere.
  scratch->max_splits = Larger(Smaller(sizes.split_limit, CeilDiv(longest, sizes.leaf) + 1),
                               Smaller(sizes.max_group_splits, MostGroups(longest)));
  scratch->partials_of_sequence = PartialsOfSequence(sizes, scratch->max_splits);
  scratch->num_partials =
      Smaller(p.num_tokens * scratch->max_splits, p.max_seqs * scratch->partials_of_sequence);
  if (scratch->num_partials == p.num_tokens * scratch->max_splits)
    scratch->partials_of_sequence = 0;
  scratch->num_partials = Larger(scratch->num_partials, DecodeSlots(p, sizes, longest));
  scratch->arrivals_of_head = 1 + Smaller(MostGroups(longest), sizes.most_runs);
  const int64_t num_flags =
      p.num_tokens + scratch->num_partials + 1 + NumArrivals(p, *scratch) + p.max_seqs;
  const int64_t flags_bytes =
      CeilDiv(num_flags * sizes.flag_bytes, sizes.alignment) * sizes.alignment;
  const int64_t states_bytes =
      scratch->num_partials * p.num_heads * static_cast<int64_t>(sizeof(RowState));
  char* bytes = static_cast<char*>(memory);
  scratch->is_bad = reinterpret_cast<int32_t*>(bytes);
  scratch->counter = scratch->is_bad + p.num_tokens + scratch->num_partials;
  scratch->arrivals = scratch->counter + 1;
  scratch->families = scratch->arrivals + NumArrivals(p, *scratch);
  // Partials that are whole chunks of 16 bytes begin at such a chunk.
  const int64_t partials_bytes = scratch->num_partials * sizes.partial_bytes - states_bytes;
  const bool are_chunks = p.value_head_size % kColumnsAtOnce == 0;
  scratch->states =
      reinterpret_cast<RowState*>(bytes + flags_bytes + (are_chunks ? partials_bytes : 0));
  scratch->partials =
      reinterpret_cast<float*>(bytes + flags_bytes + (are_chunks ? 0 : states_bytes));
  const int64_t slots_begin =
      CeilDiv(flags_bytes + states_bytes + partials_bytes, sizes.alignment) * sizes.alignment;
  scratch->slots = reinterpret_cast<float*>(bytes + slots_begin);
  scratch->num_slots = Smaller(p.num_tokens * p.num_heads * scratch->max_splits, sizes.max_slots);
  scratch->floats_of_slot = FloatsOfSlot(p);
  // A window of few positions may begin in one leaf and end in the next.
  return slots_begin + (p.Capacity() > sizes.leaf ? scratch->num_slots * sizes.slot_bytes : 0);
}

}  // namespace xla_gpu::paged_attention
