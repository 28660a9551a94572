// The memory of a call, which the first kernels write and the others read.
#pragma once

#include "../params.h"

namespace xla_gpu::varlen_attention {

using paged_attention::Params;

// Tokens of a block: thread blocks own outputs of one block, or of a part of it, and sums over
// tokens are sums over blocks. Counted from the sequence's first token, so that what they add up
// follows from the sequence alone.
inline constexpr int32_t kBlockTokens = 128;

// A copy of what the lengths of a call say: somebody else may write to them meanwhile.
struct Lengths {
  int32_t* starts;      // [max_seqs + 1]: query_start_loc
  int32_t* lens;        // [max_seqs]: the tokens of each sequence; -1 where these are faulty
  int32_t* is_causal;   // [max_seqs]
  int32_t* block_ends;  // [max_seqs]: the blocks of the sequences up to this one, it included
  // The sequences before the first one without a valid range of tokens, if there is one; whether
  // there is; and whether any sequence is faulty.
  int32_t* summary;  // [3]
  // Where there is prefix_seqs, a copy of it; the positions before a sequence's own tokens; and
  // all of its positions, -1 where lens is. Else null.
  int32_t* prefix_seqs;      // [max_seqs]
  int32_t* first_positions;  // [max_seqs]
  int32_t* context_lens;     // [max_seqs]
};
inline constexpr int64_t kSummary = 3;  // with it, all sizes are multiples of 16 bytes
inline constexpr int64_t kPrefixArrays = 3;

// What the derivative needs of a query row: its log-sum-exp, in units of 1 / log2(e), infinite
// where it attends to nothing; and the product of its output and the gradient of that.
struct alignas(8) RowNumbers {
  float lse;
  float delta;
};

struct BackwardScratch {
  Lengths lengths;
  RowNumbers* rows;  // [num_tokens, num_heads]
  float* slopes;     // [num_tokens, num_heads]: a row's part of the slopes' gradient
};

// The sizes in bytes of the parts of a scratch, as shared_ffi/varlen_scratch.py computes them.
inline int64_t LengthsBytes(const Params& p) {
  const int64_t of_prefixes =
      p.prefix_seqs == nullptr ? 0 : paged_attention::CeilDiv(kPrefixArrays * p.max_seqs, 4) * 4;
  return (4 * p.max_seqs + 1 + kSummary + of_prefixes) * static_cast<int64_t>(sizeof(int32_t));
}
// The block tables of the forward where there is prefix_seqs: a block is a token.
inline int64_t TablesBytes(const Params& p) {
  if (p.prefix_seqs == nullptr) return 0;
  return paged_attention::CeilDiv(p.max_seqs * p.num_tokens, 4) * 16;
}
inline int64_t RowBytes(const Params& p) {
  return p.num_heads *
         static_cast<int64_t>(sizeof(RowNumbers) + (p.alibi_slopes == nullptr ? 0 : sizeof(float)));
}

// Whether V's distances between tokens and heads are K's times one number, as the page tables of
// the forward's kernels need it. If not, both are copied.
inline bool AreInProportion(const Params& p) {
  const int64_t stride = p.cache.block_stride, value_stride = p.cache.OffsetOfValue(stride);
  return p.num_kv_heads == 1 || stride * p.value_head_size == value_stride * p.head_size;
}
inline int64_t CopiedBytes(const Params& p) {
  if (p.num_tokens == 0 || AreInProportion(p)) return 0;
  const int64_t columns = p.num_kv_heads * (p.head_size + p.value_head_size);
  return paged_attention::CeilDiv(p.num_tokens * columns * SizeOf(p.dtype), 16) * 16;
}

// Lays them out in `memory`.
inline Lengths MakeLengths(const Params& p, void* memory) {
  auto* const numbers = static_cast<int32_t*>(memory);
  Lengths lengths;
  lengths.summary = numbers;
  lengths.starts = numbers + kSummary;
  lengths.lens = lengths.starts + p.max_seqs + 1;
  lengths.is_causal = lengths.lens + p.max_seqs;
  lengths.block_ends = lengths.is_causal + p.max_seqs;
  if (p.prefix_seqs == nullptr) {
    lengths.prefix_seqs = lengths.first_positions = lengths.context_lens = nullptr;
  } else {
    lengths.prefix_seqs = lengths.block_ends + p.max_seqs;
    lengths.first_positions = lengths.prefix_seqs + p.max_seqs;
    lengths.context_lens = lengths.first_positions + p.max_seqs;
  }
  return lengths;
}

// Returns the bytes of the scratch; `memory` may be null when only these are wanted.
inline int64_t MakeScratch(const BackwardParams& b, void* memory, BackwardScratch* scratch) {
  const Params& p = b.forward;
  const int64_t lengths_bytes = LengthsBytes(p);
  scratch->lengths = MakeLengths(p, memory);
  scratch->rows = reinterpret_cast<RowNumbers*>(static_cast<char*>(memory) + lengths_bytes);
  scratch->slopes = reinterpret_cast<float*>(scratch->rows + p.num_tokens * p.num_heads);
  return lengths_bytes + p.num_tokens * RowBytes(p);
}

}  // namespace xla_gpu::varlen_attention
