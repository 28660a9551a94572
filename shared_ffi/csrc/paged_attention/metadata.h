// Whether lengths, page table and num_seqs of a call of paged_attention are legal. No XLA headers:
// the CPU handler asks here, and so does Python for calls on CUDA.
#pragma once

#include <memory>
#include <string>

#include "../ffi/export.h"
#include "params.h"

namespace xla_gpu::paged_attention {

// Which rule the values break first, naming sequence and entry; empty if they are legal. Reads the
// arrays of integers, and of the sizes num_tokens, num_blocks, block_size, max_seqs,
// max_blocks_per_seq, sliding_window, max_query_len and is_causal.
XLA_GPU_EXPORT std::string MetadataError(const Params& params);

// A copy of lengths, num_seqs, masks and the entries of the page table that are needed. The
// caller's other threads may write to the arrays while the call runs: with a copy, the kernel uses
// what was checked.
class MetadataCopy {
 public:
  // Makes *params point to the copy.
  explicit MetadataCopy(Params* params);

 private:
  std::unique_ptr<int32_t[]> memory_;
};

}  // namespace xla_gpu::paged_attention
