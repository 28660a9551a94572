// What the scheduler (schedule.h) and the kernel (kernel.cc, compiled once for each instruction
// set) agree on: work items and the partial results that split-KV leaves.
#pragma once

#include <cstdint>

#include "../params.h"
#include "arena.h"

namespace xla_gpu::paged_attention {

// Positions of a step of the online softmax.
inline constexpr int64_t kStep = 32;

// Positions of a split. Each split of a row is computed by itself, then all are merged from first
// to last, whether one thread has all of them or several share them.
inline constexpr int64_t kSplit = 512;

// Rows of a kv head that attend to a packed KV tile at a time: their queries and sums stay in a
// core's cache.
inline constexpr int64_t kChunkRows = 256;

// A work item: a query tile (some query tokens of a sequence, the query heads of some kv heads) at
// some splits of its context; or, where is_shared is set, such tiles of neighbouring sequences at
// splits that lie in the same blocks, and that all of their tokens attend to as a whole.
struct WorkItem {
  bool is_shared;
  int64_t sequence;     // the first
  int64_t first_token;  // in the batch
  int64_t num_tokens;
  int64_t position;  // of the first token
  int64_t first_kv_head;
  int64_t num_kv_heads;
  // Positions to attend to, of those that any token attends to. An item that attends to nothing has
  // one empty split.
  int64_t begin;
  int64_t end;
  // The tile that the item is a part of, or the first of several; null: the item is a whole tile
  // and writes the output.
  const WorkItem* tile;
  // Where a tile with parts has the partial results of each token, [num_tokens], each [NumSplits,
  // query heads of the tile, PartialResultSize]. The tokens of the next tile follow.
  float* const* partial_results;

  int64_t NumRows(const Params& p) const { return num_tokens * num_kv_heads * p.group.number; }
  // Whether the item is a whole tile, and attends to positions of one split.
  bool HasOneSplit() const { return tile == nullptr && begin < end && NumSplits() == 1; }
  int64_t NumSplits() const { return (end - 1) / kSplit - begin / kSplit + 1; }
};

// Floats of the partial result of a row and a split: the largest logit (in units of 1 / log2(e)),
// the sum of weights, the weighted sum of V.
inline int64_t PartialResultSize(const Params& p) { return 2 + p.value_head_size; }

struct CpuKernel {
  const char* instruction_set;
  bool (*is_supported)();  // by this processor
  void (*attend)(const Params& p, const WorkItem& item, Arena* arena);
  // Merges the partial results of all splits and writes the output.
  void (*merge)(const Params& p, const WorkItem& whole, Arena* arena);
};

}  // namespace xla_gpu::paged_attention
