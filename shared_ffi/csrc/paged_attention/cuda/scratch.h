// How the GPU kernels cut a long context into splits that run side by side, and the memory where a
// split leaves what it found. Both follow from one sequence and the model's sizes alone, never from
// the rest of the batch or its padding: that is what keeps a sequence's bits the same in any batch.
#pragma once

#include <cstdint>

#include "../params.h"

namespace xla_gpu::paged_attention {

// Positions of a tile; splits begin at multiples of it.
inline constexpr int64_t kTileAlignment = 64;

// A split has at least this many positions: shorter ones cost more to merge than they save.
inline constexpr int64_t kMinSplit = 256;

// Query rows (a row is a query token and head) that share one reading of K and V.
inline constexpr int64_t kMaxRowsPerItem = 64;

// Most splits of a sequence: enough for one sequence to fill a large GPU.
XLA_GPU_HOST_DEVICE inline int64_t SplitLimit(const Params& p) {
  return Larger(32, 256 / p.num_kv_heads);
}

// A sequence is split when it has at most this many query tokens. One with more has enough rows to
// keep a GPU busy, and their partial results would need too much memory.
XLA_GPU_HOST_DEVICE inline int64_t MaxSplitTokens(const Params& p) {
  return Larger(1, kMaxRowsPerItem * p.num_kv_heads / p.num_heads);
}

// Which sequences a kernel takes, by their query tokens; which kernel runs for a sequence thus
// follows from that sequence alone.
enum class QueryLengths {
  kAll,
  kShort,  // at most MaxSplitTokens
  kLong,   // more
};

// What a sequence that is split needs of them: one for each query token.
XLA_GPU_HOST_DEVICE inline int64_t PlacesOfSequence(const Params& p) {
  return p.max_query_len == 0 ? MaxSplitTokens(p) : Smaller(MaxSplitTokens(p), p.max_query_len);
}

// Positions of each split (the last may have fewer) when `length` positions are attended to.
XLA_GPU_HOST_DEVICE inline int64_t SplitLength(const Params& p, int64_t length) {
  const int64_t tiles = DivideUp(DivideUp(length, SplitLimit(p)), kTileAlignment);
  return Larger(kMinSplit, tiles * kTileAlignment);
}

// What a row of a split has seen: the largest logit, in units of log2(e), and the sum of
// 2^(logit - max).
struct RowState {
  float max;
  float sum;
};

// The sum of a row whose split met a block id outside the pool. True sums are never negative.
inline constexpr float kBadSum = -1.0f;

struct Scratch {
  int64_t num_places;  // for the query tokens of split sequences
  int64_t max_splits;

  int32_t* is_bad;   // [num_tokens]: the token, in an unsplit sequence, met a bad block id
  RowState* states;  // [num_places, num_heads, max_splits]
  float* partials;   // [num_places, num_heads, max_splits, head_size]: sums of 2^(logit - max) * v

  // Place of token i, which is query token `token` of the batch, of sequence s.
  XLA_GPU_HOST_DEVICE int64_t Place(const Params& p, int64_t s, int64_t i, int64_t token) const {
    return num_places == p.num_tokens ? token : s * PlacesOfSequence(p) + i;
  }

  XLA_GPU_HOST_DEVICE int64_t Index(const Params& p, int64_t place, int64_t head,
                                    int64_t split) const {
    return (place * p.num_heads + head) * max_splits + split;
  }
};

// The numbers in the scratch's size that one program keeps. Its tokens, sequences and blocks may
// vary from call to call: cuda_scratch_bytes of shared_ffi/paged_attention.py asks for these
// numbers and repeats the sum that MakeScratch makes, where the others are symbols.
struct ScratchSizes {
  int64_t split_limit;
  int64_t min_split;
  int64_t places_of_sequence;
  int64_t max_length;   // positions that a split sequence's window can span; 0: no window
  int64_t flag_bytes;   // for each token
  int64_t split_bytes;  // for each split of each place: RowState and partial result of all heads
  int64_t alignment;    // what the size of all flags is rounded up to a multiple of
};

inline ScratchSizes MakeScratchSizes(const Params& p) {
  ScratchSizes sizes;
  sizes.split_limit = SplitLimit(p);
  sizes.min_split = kMinSplit;
  sizes.places_of_sequence = PlacesOfSequence(p);
  sizes.max_length = 0;
  if (p.sliding_window != 0) {
    const int64_t window = Smaller(p.sliding_window, INT64_MAX / 2);  // the sum must not overflow
    sizes.max_length = window + MaxSplitTokens(p) + kTileAlignment;
  }
  sizes.flag_bytes = sizeof(int32_t);
  sizes.split_bytes = p.num_heads * (sizeof(RowState) + p.head_size * sizeof(float));
  sizes.alignment = 16;
  return sizes;
}

// Lays the scratch out in `memory`, which may be null when only the size is wanted; that is
//     4 * num_tokens + 4 * num_places * num_heads * max_splits * (head_size + 2) bytes,
// the first term rounded up to 16, with num_places at most max(max_seqs, 64 / (num_heads /
// num_kv_heads) * max_seqs), and max_query_len * max_seqs, and max_splits at most max(32, 256 /
// num_kv_heads).
inline int64_t MakeScratch(const Params& p, void* memory, Scratch* scratch) {
  const ScratchSizes sizes = MakeScratchSizes(p);
  int64_t longest = p.max_blocks_per_seq * p.block_size;
  if (sizes.max_length != 0) longest = Smaller(longest, sizes.max_length);
  scratch->num_places = Smaller(p.num_tokens, p.max_seqs * sizes.places_of_sequence);
  scratch->max_splits = Smaller(sizes.split_limit, DivideUp(longest, sizes.min_split));
  const int64_t num_splits = scratch->num_places * scratch->max_splits;
  const int64_t flags_bytes =
      DivideUp(p.num_tokens * sizes.flag_bytes, sizes.alignment) * sizes.alignment;
  const int64_t states_bytes = num_splits * p.num_heads * static_cast<int64_t>(sizeof(RowState));
  char* bytes = static_cast<char*>(memory);
  scratch->is_bad = reinterpret_cast<int32_t*>(bytes);
  scratch->states = reinterpret_cast<RowState*>(bytes + flags_bytes);
  scratch->partials = reinterpret_cast<float*>(bytes + flags_bytes + states_bytes);
  return flags_bytes + num_splits * sizes.split_bytes;
}

}  // namespace xla_gpu::paged_attention
