// The lengths of a call, and the blocks of its sequences.
#pragma once

#include "../../gpu/device.cuh"
#include "../../paged_attention/cuda/schedule.cuh"
#include "../../paged_attention/cuda/state.cuh"
#include "scratch.h"

namespace xla_gpu::varlen_attention {

using paged_attention::CeilDiv;
using paged_attention::kInfinity;
using paged_attention::kLog2E;
using paged_attention::Larger;
using paged_attention::QueryTokens;
using paged_attention::Smaller;
using paged_attention::Span;

inline constexpr int kThreads = 256;
inline constexpr int kWarps = kThreads / gpu::kWarpSize;

__device__ __forceinline__ int Lane() { return threadIdx.x % gpu::kWarpSize; }
__device__ __forceinline__ int Warp() { return threadIdx.x / gpu::kWarpSize; }

// The number of the first of `count` ascending numbers that is larger than `number`, one of which
// is.
__device__ __forceinline__ int64_t FirstLarger(const int32_t* numbers, int64_t count,
                                               int64_t number) {
  int64_t low = 0, high = count - 1;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (numbers[middle] > number) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// A block of a sequence.
struct TokenBlock {
  int32_t sequence;
  int32_t first_token;  // of the sequence, in the batch
  int32_t len;          // of the sequence
  int32_t begin;        // of the block, counted from the sequence's first token
  bool is_causal;
  int32_t first_position;  // of the sequence's first token

  // Block `number` of the batch. kFromLast: the last of a sequence comes first. kMayContinue:
  // whether a sequence may continue another one.
  template <bool kFromLast = false, bool kMayContinue = false>
  static __device__ TokenBlock Find(const Params& p, const Lengths& lengths, int64_t number) {
    const int64_t s = FirstLarger(lengths.block_ends, p.max_seqs, number);
    const int64_t first = s == 0 ? 0 : lengths.block_ends[s - 1];
    const int64_t of_sequence = kFromLast ? lengths.block_ends[s] - 1 - number : number - first;
    return Of<kMayContinue>(lengths, s, of_sequence * kBlockTokens);
  }

  // The block of sequence `s` that begins with that token.
  template <bool kMayContinue>
  static __device__ __forceinline__ TokenBlock Of(const Lengths& lengths, int64_t s,
                                                  int64_t begin) {
    const auto uniform = [](int64_t number) {
      return static_cast<int32_t>(gpu::Uniform(static_cast<uint32_t>(number)));
    };
    int32_t first_position = 0;
    if (kMayContinue && lengths.prefix_seqs != nullptr) {
      first_position = uniform(lengths.first_positions[s]);
    }
    return {uniform(s),     uniform(lengths.starts[s]),         uniform(lengths.lens[s]),
            uniform(begin), uniform(lengths.is_causal[s]) != 0, first_position};
  }

  __device__ QueryTokens Tokens() const {
    return {first_token, first_position, int64_t{first_position} + len, is_causal};
  }

  // The token whose K and V are those of a position of the sequence.
  template <bool kMayContinue>
  __device__ __forceinline__ int64_t TokenAt(const Lengths& lengths, int32_t position) const {
    int32_t s = sequence, first = first_position, token = first_token;
    while (kMayContinue && position < first) {
      s = lengths.prefix_seqs[s];
      first = lengths.first_positions[s];
      token = lengths.starts[s];
    }
    return int64_t{token} + (position - first);
  }

  // Becomes the next sequence that continues sequence `other`, directly or not; the first one is
  // `other` itself. Returns whether there is one. Whole warps call it.
  __device__ __forceinline__ bool NextThatContinues(const Lengths& lengths, int32_t other) {
    if (lengths.prefix_seqs == nullptr) return false;
    const int32_t valid = lengths.summary[0];
    for (int32_t first = sequence + 1; first < valid; first += gpu::kWarpSize) {
      int32_t s = first + Lane();
      bool does = s < valid && lengths.lens[s] > 0;
      while (does && s > other) s = lengths.prefix_seqs[s];
      does = does && s == other;
      if (const uint32_t lanes = gpu::LanesWith(does)) {
        *this = Of<true>(lengths, first + gpu::FirstOf(lanes), 0);
        return true;
      }
    }
    return false;
  }
};

// Calls use(block, part, kv_head) for the thread block's share of the parts of all blocks. The
// shares are dealt from the first thread block to the last and back again, the largest first.
template <bool kFromLast, bool kMayContinue, typename Use>
__device__ __forceinline__ void ForParts(const Params& p, const Lengths& lengths,
                                         int64_t parts_of_block, const Use& use) {
  // Only the number of the round is in a register while a part is computed.
  for (uint32_t round = 0;; ++round) {
    const int64_t of_block = parts_of_block * p.num_kv_heads;
    const int64_t count = p.max_seqs == 0 ? 0 : lengths.block_ends[p.max_seqs - 1] * of_block;
    const int64_t first = int64_t{round} * gridDim.x;
    if (first >= count) return;
    const int64_t number = first + (round % 2 != 0 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    if (number >= count) continue;
    const int64_t block = number / of_block, in_block = number - block * of_block;
    const int64_t part = in_block / p.num_kv_heads;
    const int64_t kv_head = in_block - part * p.num_kv_heads;
    use(TokenBlock::Find<kFromLast, kMayContinue>(p, lengths, block),
        static_cast<int32_t>(gpu::Uniform(kFromLast ? parts_of_block - 1 - part : part)),
        static_cast<int32_t>(gpu::Uniform(kv_head)));
  }
}

// The blocks of any lengths, at most.
inline int64_t MaxBlocks(const Params& p) {
  return p.num_tokens / kBlockTokens + Smaller(p.max_seqs, p.num_tokens);
}

}  // namespace xla_gpu::varlen_attention
