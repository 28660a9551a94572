// Into how many splits a long context is cut, which run side by side.
//
// A split is whole leaves of the order in which all kernels add up positions (order.h): how a
// sequence is cut changes none of its bits.
#pragma once

#include <cstdint>

#include "limits.h"
#include "order.h"

namespace xla_gpu::paged_attention {

// A sequence with at most so many positions is not split by the decode kernel.
inline constexpr int32_t kMostUnsplit = kShortLeaf;

// Slots of its partial results, times kv heads, that fill a large GPU evenly.
inline constexpr int64_t kEnoughSlots = 36864;

// Runs of a sequence with many leaves: whole groups, whose leaves thread blocks merge side by side.
inline constexpr int64_t kMostRuns = 16;

// Work items that fill a large GPU. A sequence that has them without splits is not split.
inline constexpr int64_t kEnoughItems = 256;

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

}  // namespace xla_gpu::paged_attention
