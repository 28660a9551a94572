// How large things are: work items and their tiles, and what a kernel takes.
#pragma once

#include <cstdint>

#include "../../storage.h"
#include "../params.h"

namespace xla_gpu::paged_attention {

// The threads that multiply together, and their warps.
inline constexpr int kThreads = 128, kWarps = 4;

// The positions of the largest KV tile of the kernels.
inline constexpr int64_t kLargestTile = 128;

// Query rows (a row is a query token and head) that share one reading of K and V.
inline constexpr int64_t kMaxRowsPerItem = 64;

// a / b for 0 <= a < 2^32, which a GPU computes in a fraction of the instructions of a division of
// 64 bits.
XLA_GPU_HOST_DEVICE inline int64_t DivideU32(int64_t a, int64_t b) {
  return b > a ? 0 : static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
}

// Query tokens whose rows fit one query tile.
XLA_GPU_HOST_DEVICE inline int64_t TokensPerTile(const Params& p) {
  return Larger(1, DivideU32(kMaxRowsPerItem, p.group.number));
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
