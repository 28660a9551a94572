// The second kernel of a call. It merges the partial results of long contexts, always in the order
// of their positions. It also writes the rows that no work item wrote: zeros for padding, NaN where
// lengths or tables are faulty.
#pragma once

#include "rows.cuh"

namespace xla_gpu::paged_attention {

// The valid part of the batch: sequences [0, num_seqs) own the tokens [begin, end). Tokens from
// `end` on are padding, unless query_start_loc is faulty there (`is_broken`).
struct Batch {
  int64_t num_seqs;
  int64_t begin;
  int64_t end;
  bool is_broken;

  // All threads call it. `shared` holds one int per warp.
  __device__ Batch(const Params& p, int* shared) : begin(0), end(0) {
    const int64_t claimed = NumSeqs(p);
    const int lane = threadIdx.x % gpu::kWarpSize, warp = threadIdx.x / gpu::kWarpSize;
    int first_broken = static_cast<int>(Larger(claimed, 0));
    for (int s = threadIdx.x; s < first_broken; s += kThreads) {
      if (!Sequence(p, s).HasRows(p)) first_broken = s;
    }
    for (int mask = gpu::kWarpSize / 2; mask > 0; mask /= 2) {
      first_broken = min(first_broken, gpu::ShuffleXor(first_broken, mask));
    }
    if (lane == 0) shared[warp] = first_broken;
    gpu::SyncBlock();
    for (int w = 0; w < kWarps; ++w) first_broken = min(first_broken, shared[w]);
    num_seqs = first_broken;
    is_broken = num_seqs != claimed;
    if (num_seqs > 0) {
      begin = gpu::LoadOnce(p.query_start_loc);
      end = gpu::LoadOnce(p.query_start_loc + num_seqs);
    }
  }

  // The sequence of a token in [begin, end): the last one that starts at or before the token.
  __device__ int64_t Find(const Params& p, int64_t token) const {
    int64_t low = 0, high = num_seqs;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      if (p.query_start_loc[middle] <= token) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

// Whether any query token of the sequence met a bad block id. All threads call it.
__device__ inline bool MetBadBlock(const Params& p, const Scratch& scratch, int64_t s,
                                   const Sequence& sequence, int64_t num_splits) {
  bool is_bad = false;
  if (num_splits == 1) {
    for (int64_t i = threadIdx.x; i < sequence.q_len; i += kThreads) {
      is_bad = is_bad || scratch.is_bad[sequence.first_token + i] != 0;
    }
  } else {
    for (int64_t n = threadIdx.x; n < sequence.q_len * num_splits; n += kThreads) {
      const int64_t i = n / num_splits;
      const int64_t slot = scratch.Slot(s, i, sequence.first_token + i, num_splits);
      is_bad = is_bad || *scratch.IsBad(p, slot + n % num_splits) != 0;
    }
  }
  return gpu::AnyInBlock(is_bad);
}

// Writes the rows of a token that is padding or belongs to a faulty sequence.
template <typename T>
__device__ void FillRow(const Params& p, int64_t token, bool is_faulty) {
  const float nan = kInfinity - kInfinity, value = is_faulty ? nan : 0.0f;
  const int64_t row_size = p.num_heads * p.value_head_size;
  if (p.lse != nullptr) {
    for (int64_t head = threadIdx.x; head < p.num_heads; head += kThreads) {
      p.lse[token * p.num_heads + head] = is_faulty ? nan : -kInfinity;
    }
  }
  for (int64_t i = threadIdx.x; i < row_size; i += kThreads) {
    gpu::FromFloat(value, static_cast<T*>(p.output) + token * row_size + i);
  }
}

// Merges the partial results of a token of sequence s and writes its rows: zeros if there are no
// splits, as with an empty context. A warp takes a head; each lane has its own columns.
template <typename T>
__device__ void MergeSplits(const Params& p, const Scratch& scratch, int64_t s,
                            const Sequence& sequence, int64_t token, int64_t num_splits) {
  const int64_t i = token - sequence.first_token, slot = scratch.Slot(s, i, token, num_splits);
  const bool attends = p.Attends(sequence.context_len - sequence.q_len + i, sequence.context_len);
  const int lane = threadIdx.x % gpu::kWarpSize, warp = threadIdx.x / gpu::kWarpSize;
  for (int64_t head = warp; head < p.num_heads; head += kWarps) {
    const int64_t index = slot * p.num_heads + head;  // of the first split
    const RowState* states = scratch.states + index;
    const float sink = SinkOf(p, head);
    float max = sink;
    for (int64_t split = lane; split < num_splits; split += gpu::kWarpSize) {
      max = fmaxf(max, states[split * p.num_heads].max);
    }
    for (int mask = gpu::kWarpSize / 2; mask > 0; mask /= 2) {
      max = fmaxf(max, gpu::ShuffleXor(max, mask));
    }
    const float shift = ShiftOf(max);
    const float sum =
        SumOf(max, sink, num_splits, [&](int64_t split) { return states[split * p.num_heads]; });
    for (int64_t d = lane; d < p.value_head_size; d += gpu::kWarpSize) {
      float value = 0;
      for (int64_t split = 0; split < num_splits; ++split) {
        const int64_t row = split * p.num_heads;
        value = gpu::Fma(gpu::Exp2(states[row].max - shift),
                         scratch.partials[(index + row) * p.value_head_size + d], value);
      }
      gpu::FromFloat(value / (attends ? sum : 1.0f),
                     static_cast<T*>(p.output) + p.OutputOffset(token, head) + d);
    }
    if (lane == 0) WriteLse(p, token, head, {max, sum});
  }
}

// Each thread block takes adjacent tokens.
template <typename T>
__global__ void __launch_bounds__(kThreads, 2) Finish(Params p, Scratch scratch) {
  const Batch batch(p, reinterpret_cast<int*>(gpu::SharedMemory()));
  const int64_t per_block = DivideUp(p.num_tokens, gridDim.x);
  const int64_t end = Smaller(p.num_tokens, (blockIdx.x + int64_t{1}) * per_block);
  int64_t s = -1, num_splits = 0;
  Sequence sequence = {};
  bool is_faulty = false;
  for (int64_t token = blockIdx.x * per_block; token < end; ++token) {
    if (token < batch.begin || token >= batch.end) {
      const bool is_lost = batch.is_broken && token >= batch.end;
      FillRow<T>(p, token, is_lost);
      continue;
    }
    const int64_t sequence_of_token = batch.Find(p, token);
    if (sequence_of_token != s) {
      s = sequence_of_token;
      sequence = Sequence(p, s);
      is_faulty = !sequence.IsLegal(p);
      num_splits = is_faulty ? 0 : sequence.NumSplits(p);
      is_faulty = is_faulty || MetBadBlock(p, scratch, s, sequence, num_splits);
    }
    if (is_faulty || !sequence.HasToken(token)) {
      FillRow<T>(p, token, true);
    } else if (num_splits != 1) {
      MergeSplits<T>(p, scratch, s, sequence, token, num_splits);
    }
  }
}

}  // namespace xla_gpu::paged_attention
