// How the GPU kernels cut a long context into splits that run side by side, and the memory where a
// split leaves what it found. Both follow from one sequence and the model's sizes alone, never from
// the rest of the batch or its padding: that is what keeps a sequence's bits the same in any batch.
#pragma once

#include <cstdint>

#include "../params.h"

namespace xla_gpu::paged_attention {

// Splits begin at multiples of this many positions: the largest KV tile of the kernels.
inline constexpr int64_t kTileAlignment = 128;

// A split has at least this many positions: shorter ones cost more to merge than they save.
inline constexpr int64_t kMinSplit = 256;

// Query rows (a row is a query token and head) that share one reading of K and V.
inline constexpr int64_t kMaxRowsPerItem = 64;

// Work items that fill a large GPU. A sequence that has them without splits is not split.
inline constexpr int64_t kEnoughItems = 256;

// a / b for 0 <= a < 2^32, which a GPU computes in a fraction of the instructions of a division of
// 64 bits.
XLA_GPU_HOST_DEVICE inline int64_t DivideU32(int64_t a, int64_t b) {
  return b > a ? 0 : static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
}

// Query tokens whose rows fit one query tile.
XLA_GPU_HOST_DEVICE inline int64_t TokensPerTile(const Params& p) {
  return Larger(1, DivideU32(kMaxRowsPerItem, DivideU32(p.num_heads, p.num_kv_heads)));
}

// Most splits of a sequence with one query tile.
XLA_GPU_HOST_DEVICE inline int64_t SplitLimit(const Params& p) {
  return Larger(32, DivideU32(kEnoughItems, p.num_kv_heads));
}

// Most splits of a sequence with `q_len` query tokens. The more query tiles it has, the fewer
// splits fill a GPU; that bounds its partial results, too.
XLA_GPU_HOST_DEVICE inline int64_t SplitLimit(const Params& p, int64_t q_len) {
  const int64_t tokens = TokensPerTile(p);
  if (q_len <= tokens) return SplitLimit(p);
  const int64_t tiles = DivideU32(q_len + tokens - 1, tokens);
  return Larger(1, DivideU32(kEnoughItems, p.num_kv_heads * tiles));
}

// The most query tokens of a sequence that is split.
XLA_GPU_HOST_DEVICE inline int64_t MaxSplitTokens(const Params& p) {
  return TokensPerTile(p) * Larger(1, DivideU32(kEnoughItems / 2, p.num_kv_heads));
}

// The sequences that a kernel takes: those with at least `min` and at most `max` query tokens.
// Which kernel runs for a sequence thus follows from that sequence alone.
struct QueryLengths {
  int64_t min = 1;
  int64_t max = INT64_MAX;

  XLA_GPU_HOST_DEVICE bool Contain(int64_t q_len) const { return min <= q_len && q_len <= max; }
};

// Positions of each split (the last may have fewer) when q_len query tokens attend to `length`
// positions.
XLA_GPU_HOST_DEVICE inline int64_t SplitLength(const Params& p, int64_t q_len, int64_t length) {
  const int64_t limit = SplitLimit(p, q_len);
  const int64_t tiles = CeilDiv(DivideU32(length + limit - 1, limit), kTileAlignment);
  return Larger(kMinSplit, tiles * kTileAlignment);
}

// What a row of a split has seen: the largest logit, in units of 1 / log2(e), and the sum of
// 2^(logit - max).
struct RowState {
  float max;
  float sum;
};

// A slot is the partial results of one query token in one split.
struct Scratch {
  int64_t max_splits;
  int64_t num_slots;
  int64_t slots_of_sequence;  // 0: each token of the batch has max_splits slots

  // Whether a work item met a bad block id or tree mask: the flags of unsplit sequences, which
  // begin at the number of their first token; then one for each slot.
  int32_t* is_bad;   // [num_tokens + num_slots]
  int32_t* counter;  // of the work items that are taken, for a kernel that counts them
  RowState* states;  // [num_slots, num_heads]
  float* partials;   // [num_slots, num_heads, value_head_size]: sums of 2^(logit - max) * v

  // The first slot of token i, which is query token `token` of the batch, of sequence s. Its
  // num_splits slots are adjacent.
  XLA_GPU_HOST_DEVICE int64_t Slot(int64_t s, int64_t i, int64_t token, int64_t num_splits) const {
    return slots_of_sequence == 0 ? token * max_splits : s * slots_of_sequence + i * num_splits;
  }

  // A flag of sequence s in one of its splits. Its flags are numbered as the query tiles of its
  // work items (RowTiles).
  XLA_GPU_HOST_DEVICE int32_t* IsBad(const Params& p, int64_t s, int64_t first_token, int64_t flag,
                                     int64_t split, int64_t num_splits) const {
    const int64_t token = first_token + flag;  // of the sequence: it has no more flags than tokens
    if (num_splits == 1) return is_bad + token;
    return is_bad + p.num_tokens + Slot(s, flag, token, num_splits) + split;
  }
};

// The parts of the scratch size that do not depend on num_tokens, max_seqs or the block table.
// Python combines them when those sizes are symbolic (cuda_scratch_bytes in
// shared_ffi/paged_attention.py).
struct ScratchSizes {
  int64_t split_limit;
  int64_t min_split;
  int64_t max_split_tokens;   // most query tokens of a sequence that is split
  int64_t slots_of_sequence;  // most slots that a sequence can need
  int64_t max_length;         // positions that a split sequence's window can span; 0: no window
  int64_t flag_bytes;         // for each token and slot, and for the counter
  int64_t slot_bytes;         // RowState and partial result of all heads
  int64_t alignment;          // what the size of all flags is rounded up to a multiple of
};

inline ScratchSizes MakeScratchSizes(const Params& p) {
  const int64_t max_query_len = p.max_query_len == 0 ? INT64_MAX : p.max_query_len;
  ScratchSizes sizes;
  sizes.split_limit = SplitLimit(p);
  sizes.min_split = kMinSplit;
  sizes.max_split_tokens = Smaller(MaxSplitTokens(p), max_query_len);
  // With t > 1 query tiles it needs t * TokensPerTile * kEnoughItems / (num_kv_heads * t) at most.
  sizes.slots_of_sequence = Smaller(TokensPerTile(p), max_query_len) * SplitLimit(p);
  sizes.max_length = 0;
  if (p.sliding_window != 0) {
    const int64_t window = Smaller(p.sliding_window, INT64_MAX / 2);  // the sum must not overflow
    sizes.max_length = window + MaxSplitTokens(p) + kTileAlignment;
  }
  sizes.flag_bytes = sizeof(int32_t);
  sizes.slot_bytes = p.num_heads * (sizeof(RowState) + p.value_head_size * sizeof(float));
  sizes.alignment = 16;
  return sizes;
}

// Lays the scratch out in `memory`, which may be null when only the size is wanted; that is
//     4 * (num_tokens + num_slots + 1) + 4 * num_slots * num_heads * (value_head_size + 2) bytes,
// the first term rounded up to 16, with at most max_splits slots for each token and
// slots_of_sequence for each sequence.
inline int64_t MakeScratch(const Params& p, void* memory, Scratch* scratch) {
  const ScratchSizes sizes = MakeScratchSizes(p);
  int64_t longest = p.Capacity();
  if (sizes.max_length != 0) longest = Smaller(longest, sizes.max_length);
  scratch->max_splits = Smaller(sizes.split_limit, CeilDiv(longest, sizes.min_split));
  scratch->slots_of_sequence =
      Smaller(sizes.slots_of_sequence, sizes.max_split_tokens * scratch->max_splits);
  scratch->num_slots =
      Smaller(p.num_tokens * scratch->max_splits, p.max_seqs * scratch->slots_of_sequence);
  if (scratch->num_slots == p.num_tokens * scratch->max_splits) scratch->slots_of_sequence = 0;
  const int64_t flags_bytes =
      CeilDiv((p.num_tokens + scratch->num_slots + 1) * sizes.flag_bytes, sizes.alignment) *
      sizes.alignment;
  const int64_t states_bytes =
      scratch->num_slots * p.num_heads * static_cast<int64_t>(sizeof(RowState));
  char* bytes = static_cast<char*>(memory);
  scratch->is_bad = reinterpret_cast<int32_t*>(bytes);
  scratch->counter = scratch->is_bad + p.num_tokens + scratch->num_slots;
  scratch->states = reinterpret_cast<RowState*>(bytes + flags_bytes);
  scratch->partials = reinterpret_cast<float*>(bytes + flags_bytes + states_bytes);
  return flags_bytes + scratch->num_slots * sizes.slot_bytes;
}

}  // namespace xla_gpu::paged_attention
