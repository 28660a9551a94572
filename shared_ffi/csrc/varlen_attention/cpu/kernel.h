// What the schedule of the derivative (run.cc) and its kernel (kernel.cc, compiled once for each
// instruction set) agree on.
#pragma once

#include <cstdint>

#include "../../paged_attention/cpu/arena.h"
#include "../params.h"

namespace xla_gpu::varlen_attention {

// Positions of a KV tile.
inline constexpr int64_t kTilePositions = 64;

// A work item: the gradients that some query tokens and some positions of a sequence have from each
// other, for a kv head and its query heads. Tokens and positions are those of the sequence, and
// begin at multiples of TileTokens and kTilePositions.
struct WorkItem {
  int64_t sequence;
  int64_t kv_head;
  paged_attention::Span tokens;
  paged_attention::Span positions;
  // Which gradients the item computes, of all terms in their order: those of its tokens, whose
  // positions are all that they attend to; those of its positions, whose tokens are all.
  bool has_dquery;
  bool has_dkey;
  float* dquery;  // [rows of the tokens, DqueryColumns], the item's own memory
};

// Numbers of each row, [num_tokens, num_heads].
struct RowNumbers {
  float* delta;   // sum of dout * output, or of P * dP
  float* dslope;  // sum of dS * |p - j|, written where there are slopes
};

// Query tokens of a tile: about 64 rows of a kv head.
inline int64_t TileTokens(const paged_attention::Params& p) {
  return paged_attention::Larger(1, 64 / p.group.number);
}

struct BackwardKernel {
  const char* instruction_set;
  // Writes delta of the tokens from `first` up to `end`.
  void (*sum_rows)(const BackwardParams& p, int64_t first, int64_t end, const RowNumbers& numbers);
  int64_t (*dquery_columns)(const paged_attention::Params& p);
  void (*differentiate)(const BackwardParams& p, const WorkItem& item, const RowNumbers& numbers,
                        paged_attention::Arena* arena);
};

// That of the instruction set in use.
const BackwardKernel& ChosenBackwardKernel();

}  // namespace xla_gpu::varlen_attention
