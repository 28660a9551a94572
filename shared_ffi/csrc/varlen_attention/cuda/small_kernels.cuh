// The small kernels before and after those of the gradients: lengths, what the derivative needs of
// each query row, the rows of no sequence, and sums over tokens.
#pragma once

#include "lengths.cuh"

namespace xla_gpu::varlen_attention {

// The tokens of the sequences that sequence s continues; -1 if one of them, or s, is faulty.
__device__ __forceinline__ int64_t PositionsBefore(const Lengths& lengths, int64_t s) {
  int64_t before = 0;
  while (lengths.lens[s] >= 0) {
    const int32_t prefix = lengths.prefix_seqs[s];
    if (prefix == -1) return before;
    if (prefix < 0 || prefix >= s) return -1;
    s = prefix;
    before += lengths.lens[s];
  }
  return -1;
}

// One thread block. All threads see the same lengths from here on.
__global__ void __launch_bounds__(kThreads) CopyLengths(Params p, Lengths to) {
  auto* const shared = reinterpret_cast<int32_t*>(gpu::SharedMemory());  // [kWarps + 1]
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) shared[kWarps] = static_cast<int32_t>(paged_attention::NumSeqs(p));
  for (int64_t s = thread; s <= p.max_seqs; s += kThreads) {
    to.starts[s] = gpu::LoadOnce(p.query_start_loc + s);
    if (s == p.max_seqs) continue;
    const bool is_causal = p.causal != nullptr && gpu::LoadOnce(p.causal + s) != 0;
    to.is_causal[s] = p.is_causal || is_causal;
    if (p.prefix_seqs != nullptr) to.prefix_seqs[s] = gpu::LoadOnce(p.prefix_seqs + s);
  }
  __syncthreads();
  const int64_t claimed = shared[kWarps];
  const auto has_tokens = [&](int64_t s) {
    return 0 <= to.starts[s] && to.starts[s] <= to.starts[s + 1] &&
           to.starts[s + 1] <= p.num_tokens;
  };
  int32_t valid = static_cast<int32_t>(Larger(claimed, 0));
  for (int64_t s = thread; s < valid; s += kThreads) {
    if (!has_tokens(s)) valid = static_cast<int32_t>(s);
  }
  for (int mask = gpu::kWarpSize / 2; mask > 0; mask /= 2) {
    valid = min(valid, gpu::ShuffleXor(valid, mask));
  }
  if (Lane() == 0) shared[Warp()] = valid;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) valid = min(valid, shared[w]);

  int32_t before = 0;  // the blocks of the sequences before these
  bool is_faulty = valid != claimed;
  for (int64_t first = 0; first < p.max_seqs; first += kThreads) {
    const int64_t s = first + thread;
    int32_t len = 0;
    if (s < valid) {
      len = to.starts[s + 1] - to.starts[s];
      if (p.max_query_len != 0 && len > p.max_query_len) len = -1;
      is_faulty = is_faulty || len < 0;
    }
    int32_t end = (Larger(len, 0) + kBlockTokens - 1) / kBlockTokens;
    for (int delta = 1; delta < gpu::kWarpSize; delta *= 2) {
      const int32_t left = gpu::ShuffleUp(end, delta);
      if (Lane() >= delta) end += left;
    }
    __syncthreads();  // everyone has read what follows
    if (Lane() == gpu::kWarpSize - 1) shared[Warp()] = end;
    __syncthreads();
    for (int w = 0; w < kWarps; ++w) {
      if (w < Warp()) end += shared[w];
    }
    if (s < p.max_seqs) {
      to.lens[s] = s < valid ? len : -1;
      to.block_ends[s] = before + end;
    }
    for (int w = 0; w < kWarps; ++w) before += shared[w];
  }
  if (p.prefix_seqs != nullptr) {
    __syncthreads();  // all lengths are there
    for (int64_t s = thread; s < p.max_seqs; s += kThreads) {
      const int64_t first = s < valid ? PositionsBefore(to, s) : -1;
      to.first_positions[s] = static_cast<int32_t>(first);
      to.context_lens[s] = static_cast<int32_t>(first < 0 ? -1 : first + to.lens[s]);
      is_faulty = is_faulty || (s < valid && first < 0);
    }
    __syncthreads();  // nobody reads lengths any more
    for (int64_t s = thread; s < p.max_seqs; s += kThreads) {
      if (to.context_lens[s] < 0) to.lens[s] = -1;
    }
  }
  is_faulty = __syncthreads_or(is_faulty);
  if (thread > 0) return;
  to.summary[0] = valid;
  to.summary[1] = valid != claimed;
  to.summary[2] = is_faulty;
}
inline constexpr int kLengthsSharedBytes = (kWarps + 1) * sizeof(int32_t);

// Writes block tables whose blocks are tokens, [max_seqs, num_tokens]: a thread block for each
// sequence.
__global__ void __launch_bounds__(kThreads) MakeTables(Params p, Lengths lengths, int32_t* tables) {
  for (int64_t s = blockIdx.x; s < p.max_seqs; s += gridDim.x) {
    if (lengths.lens[s] < 0) continue;
    const auto sequence = TokenBlock::Of</*kMayContinue=*/true>(lengths, s, 0);
    const int32_t len = lengths.context_lens[s];
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < len; i += kThreads) {
      tables[s * p.num_tokens + i] = static_cast<int32_t>(sequence.TokenAt<true>(lengths, i));
    }
  }
}

// Copies rows of tokens, a warp each.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    CopyTokens(const T* from, int64_t stride, int64_t columns, int64_t num_tokens, T* to) {
  const int64_t num_warps = int64_t{gridDim.x} * kWarps;
  for (int64_t token = int64_t{blockIdx.x} * kWarps + Warp(); token < num_tokens;
       token += num_warps) {
    for (int64_t i = Lane(); i < columns; i += gpu::kWarpSize) {
      to[token * columns + i] = from[token * stride + i];
    }
  }
}

__device__ __forceinline__ float SumOfWarp(float x) {
  for (int mask = gpu::kWarpSize / 2; mask > 0; mask /= 2) x += gpu::ShuffleXor(x, mask);
  return x;
}

// Writes a number to all gradients of a token. The warp calls it.
template <typename T>
__device__ __forceinline__ void FillToken(const BackwardParams& b, int64_t token, float number) {
  const Params& p = b.forward;
  const auto fill = [&](void* array, int64_t columns) {
    T* const row = static_cast<T*>(array) + token * columns;
    for (int64_t i = Lane(); i < columns; i += gpu::kWarpSize) gpu::FromFloat(number, row + i);
  };
  fill(b.dquery, p.num_heads * p.head_size);
  fill(b.dkey, p.num_kv_heads * p.head_size);
  fill(b.dvalue, p.num_kv_heads * p.value_head_size);
}

// lse in units of 1 / log2(e), or less by as much as roundings may have added to it: that of the
// change of units and, on tensor cores, those of the largest logit and of this function. So a row's
// only weight is 1, however large its logit. One unit in the last place more could make it 0.
template <typename T>
__device__ __forceinline__ float ShiftOf(float lse) {
  constexpr float kMargin = sizeof(T) == 2 ? 0x1p-22f : 0x1p-23f;
  return lse == -kInfinity ? kInfinity : gpu::Fma(lse, kLog2E, -fabsf(lse) * (kMargin * kLog2E));
}

// A warp for each token.
template <typename T>
__global__ void __launch_bounds__(kThreads) PrepareRows(BackwardParams b, BackwardScratch scratch) {
  const Params& p = b.forward;
  const Lengths& lengths = scratch.lengths;
  const int64_t valid = lengths.summary[0], num_warps = int64_t{gridDim.x} * kWarps;
  const int64_t begin = lengths.starts[0], end = lengths.starts[valid];
  for (int64_t token = int64_t{blockIdx.x} * kWarps + Warp(); token < p.num_tokens;
       token += num_warps) {
    if (valid == 0 || token < begin || token >= end) {
      const bool is_lost = lengths.summary[1] != 0 && (valid == 0 || token >= end);
      FillToken<T>(b, token, is_lost ? kInfinity - kInfinity : 0.0f);
      continue;
    }
    // The last sequence that starts at or before the token.
    const int64_t s = FirstLarger(lengths.starts + 1, valid, token);
    if (lengths.lens[s] < 0) {
      FillToken<T>(b, token, kInfinity - kInfinity);
      continue;
    }
    for (int64_t head = 0; head < p.num_heads; ++head) {
      const int64_t row = token * p.num_heads + head, column = head * p.value_head_size;
      const T* const output = static_cast<const T*>(b.output) + token * b.output_stride + column;
      const T* const dout = static_cast<const T*>(b.dout) + token * b.dout_stride + column;
      float delta = 0;
      for (int64_t d = Lane(); d < p.value_head_size; d += gpu::kWarpSize) {
        delta = gpu::Fma(gpu::ToFloat(output[d]), gpu::ToFloat(dout[d]), delta);
      }
      delta = SumOfWarp(delta);
      if (Lane() == 0) scratch.rows[row] = {ShiftOf<T>(b.lse[row]), delta};
    }
  }
}

// The gradients of sinks and slopes: a thread block for each head. Blocks of tokens are added up
// from the left to sequences, and these to the whole.
__global__ void __launch_bounds__(kThreads)
    SumOverTokens(BackwardParams b, BackwardScratch scratch) {
  const Params& p = b.forward;
  const Lengths& lengths = scratch.lengths;
  auto* const shared = reinterpret_cast<float*>(gpu::SharedMemory());  // [kWarps][2]
  const int32_t num_blocks = p.max_seqs == 0 ? 0 : lengths.block_ends[p.max_seqs - 1];
  for (int64_t head = blockIdx.x; head < p.num_heads; head += gridDim.x) {
    const float sink = p.sinks == nullptr ? -kInfinity : p.Sink(head);
    float total[2] = {}, of_sequence[2] = {};
    int64_t s = 0;  // the sequence that is added up
    for (int32_t first = 0; first < num_blocks; first += kWarps) {
      float sums[2] = {};
      if (first + Warp() < num_blocks) {
        const auto block = TokenBlock::Find(p, lengths, first + Warp());
        for (int i = 0; i < kBlockTokens; i += gpu::kWarpSize) {
          const int64_t token = block.begin + i + Lane();
          if (token >= block.len) continue;
          const int64_t row = (block.first_token + token) * p.num_heads + head;
          const RowNumbers numbers = scratch.rows[row];
          // A row that attends to nothing but the sink has an output of 0.
          if (b.dsinks != nullptr && numbers.delta != 0) {
            const float weight = gpu::Exp2(fminf(sink - numbers.lse, 0.0f));
            sums[0] = gpu::Fma(-weight, numbers.delta, sums[0]);
          }
          if (b.dalibi_slopes != nullptr) sums[1] += scratch.slopes[row];
        }
      }
      __syncthreads();  // the sums before have been read
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sums[i] = SumOfWarp(sums[i]);
        if (Lane() == 0) shared[2 * Warp() + i] = sums[i];
      }
      __syncthreads();
      if (threadIdx.x > 0) continue;
      for (int w = 0; w < kWarps && first + w < num_blocks; ++w) {
        while (lengths.block_ends[s] <= first + w) {
          ++s;
          for (int i = 0; i < 2; ++i) {
            total[i] += of_sequence[i];
            of_sequence[i] = 0;
          }
        }
        for (int i = 0; i < 2; ++i) of_sequence[i] += shared[2 * w + i];
      }
    }
    if (threadIdx.x > 0) continue;
    const float nan = lengths.summary[2] != 0 ? kInfinity - kInfinity : 0;
    if (b.dsinks != nullptr) b.dsinks[head] = total[0] + of_sequence[0] + nan;
    if (b.dalibi_slopes != nullptr) b.dalibi_slopes[head] = total[1] + of_sequence[1] + nan;
  }
}
inline constexpr int kSumSharedBytes = kWarps * 2 * sizeof(float);

}  // namespace xla_gpu::varlen_attention
