// What the schedule of the derivative (run.cc) and its kernel (kernel.cc, compiled once for each
// instruction set) agree on.
#pragma once

#include <cstdint>

#include "../../paged_attention/cpu/arena.h"
#include "../params.h"

namespace xla_gpu::varlen_attention {

// Positions of a KV tile.
inline constexpr int64_t kTilePositions = 64;

// Numbers of sequences, in ascending order.
struct Sequences {
  const int64_t* numbers;
  int64_t count;

  const int64_t* begin() const { return numbers; }
  const int64_t* end() const { return numbers + count; }
};

// A work item: the gradients that some query tokens, and the K and V of some tokens, have from each
// other, for a kv head and its query heads. The tokens are of one sequence, or of all sequences
// that continue each other. A sequence attends to itself, and to what it continues.
struct WorkItem {
  Sequences queries;  // whose query tokens they are
  Sequences keys;     // whose K and V they are
  int64_t kv_head;
  // Which of them, counted from each sequence's first token, or as many as it has. They begin at
  // multiples of TileTokens and kTilePositions.
  paged_attention::Span tokens;
  paged_attention::Span positions;
  // What the item computes, of all terms in their order: dquery or delta of its tokens, whose
  // positions are all that they attend to, and dkey and dvalue of its positions, whose tokens are
  // all that attend to them.
  bool has_dquery;
  bool has_dkey;
  bool has_delta;
  float* dquery;  // [rows of the tokens, DqueryColumns], the item's own memory
};

// Numbers of each row, [num_tokens, num_heads]; dslope is 0 at first.
struct RowSums {
  float* delta;   // sum of dout * output, or of P * dP
  float* weight;  // sum of P, where delta is summed like that
  float* dslope;  // -sum of dS * |p - j|, where there are slopes
};

// Whether delta of some rows is summed over their positions: of query tiles that attend to at most
// kMostSummed. A 16-bit output is rounded, and of few positions it is large: with delta of the
// output, a gradient could err by more than its own rounding.
inline bool SumsDelta(const paged_attention::Params& p) { return p.dtype != DType::kFloat32; }
inline constexpr int64_t kMostSummed = 1024;

// Query tokens of a tile: about 64 rows of a kv head.
inline int64_t TileTokens(const paged_attention::Params& p) {
  return paged_attention::Larger(1, 64 / p.group.number);
}

struct BackwardKernel {
  const char* instruction_set;
  // Writes delta of the tokens from `first` up to `end`, of the output.
  void (*sum_rows)(const BackwardParams& p, int64_t first, int64_t end, const RowSums& numbers);
  int64_t (*dquery_columns)(const paged_attention::Params& p);
  void (*run)(const BackwardParams& p, const WorkItem& item, const RowSums& numbers,
              paged_attention::Arena* arena);
};

// That of the instruction set in use.
const BackwardKernel& ChosenBackwardKernel();

}  // namespace xla_gpu::varlen_attention
