// How large things are: work items and their tiles, what a kernel takes, and into how many splits a
// long context is cut, which run side by side.
//
// A split is whole leaves of the order in which all kernels add up positions (order.h): how a
// sequence is cut changes none of its bits.
#pragma once

#include <cstdint>

#include "../../storage.h"
#include "../params.h"
#include "order.h"

namespace xla_gpu::paged_attention {

// The threads that multiply together, and their warps.
inline constexpr int kThreads = 128, kWarps = 4;

// The positions of the largest KV tile of the kernels.
inline constexpr int64_t kLargestTile = 128;

// A sequence with at most so many positions is not split by the decode kernel.
inline constexpr int32_t kMostUnsplit = kShortLeaf;

// Slots of its partial results, times kv heads, that fill a large GPU evenly.
inline constexpr int64_t kEnoughSlots = 36864;

// Runs of a sequence with many leaves: whole groups, whose leaves thread blocks merge side by side.
inline constexpr int64_t kMostRuns = 16;

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
  return Larger(1, DivideU32(kMaxRowsPerItem, p.group.number));
}

// Most splits of a sequence with one query tile.
XLA_GPU_HOST_DEVICE inline int64_t SplitLimit(const Params& p) {
  return Larger(32, DivideU32(kEnoughItems, p.num_kv_heads));
}

// Most groups that a sequence is split into, whatever its length.
inline constexpr int64_t kMaxGroupSplits = 128;

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

// Columns of V that a warp of the tensor core kernel adds up at most.
inline constexpr int kMaxColumns = 256;
// The largest head whose kernel has room in shared memory for a V that is not a part of K.
inline constexpr int kMaxOwnValues = 2 * kMaxColumns;

// Positions that a tensor copy of the prefill kernel has of a block: then no copy has several
// blocks.
inline constexpr int kBoxPositions = 16;

inline constexpr int kRowsPerWarpTile = 16;  // query rows of a tensor core product

// Query rows of the decode kernel's work items: all those of a sequence and kv head.
namespace decode {
inline constexpr int kItemRows = kRowsPerWarpTile;
}

// The most query tokens of a sequence that the decode kernel takes.
inline int64_t FewTokens(const Params& p) { return decode::kItemRows / p.group.number; }

// The query rows of a work item of TensorCorePrefill, the most that any kernel has.
inline constexpr int64_t kPrefillTileRows = 128;

// The thread blocks of a kernel that has slots (Scratch): as many as a large GPU holds at once.
inline constexpr int64_t kMaxSlots = 384;

// The columns are rounded up to what a product has at least. Threads have the states of two rows in
// a total, and the prefill kernel of 9.0 those of a leaf as well.
inline int64_t FloatsOfSlot(const Params& p) {
  constexpr int64_t kColumns = 16, kStates = 16;
  return kPrefillTileRows * (CeilDiv(p.value_head_size, kColumns) * kColumns + kStates);
}

}  // namespace xla_gpu::paged_attention
