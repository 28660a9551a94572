// The part of the CPU kernel that is compiled once for each instruction set, and what cpu.cc, which
// cuts the work into pieces, has to say to it.
#pragma once

#include <cstdint>

#include "params.h"

namespace xla_gpu::paged_attention {

// Positions of a tile, the step of the online softmax.
inline constexpr int64_t kTile = 32;

// Positions of a split. A row's splits are computed each by itself and merged from first to last,
// whether one thread does it all or several share it.
inline constexpr int64_t kSplit = 512;

// Some query tokens of a sequence with the query heads of some kv heads, at some splits. Its rows
// are ordered by kv head, then by token, then by query head.
struct Piece {
  int64_t sequence;
  int64_t first_token;  // in the batch
  int64_t num_tokens;
  int64_t position;  // of the first token
  int64_t first_head;
  int64_t num_heads;  // kv heads
  int64_t begin;      // positions: those of the splits that any of the tokens attends to; a piece
  int64_t end;        // of tokens that attend to none has one empty split
  float* findings;  // [splits, rows, FindingSize]; null: the piece has all splits, finish the rows

  int64_t NumRows(const Params& p) const {
    return num_tokens * num_heads * (p.num_heads / p.num_kv_heads);
  }
  int64_t NumSplits() const { return (end - 1) / kSplit - begin / kSplit + 1; }
};

// Of what a row found in a split, in floats: its largest logit, its sum of weights, its weighted V.
inline int64_t FindingSize(const Params& p) { return 2 + p.head_size; }

// The calling thread's memory for one piece: so many floats, at a multiple of 64 bytes, as the
// piece before left them.
using Allocate = float* (*)(int64_t num_floats);

struct CpuKernel {
  const char* instruction_set;
  bool (*is_supported)();  // by this processor
  void (*attend)(const Params& p, const Piece& piece, Allocate allocate);
  // Finishes the rows of pieces that differ in their splits alone; `whole` has the findings of all.
  void (*merge)(const Params& p, const Piece& whole, Allocate allocate);
};

}  // namespace xla_gpu::paged_attention
