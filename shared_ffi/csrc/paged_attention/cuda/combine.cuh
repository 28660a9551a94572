// The last kernel of a call that launches another one than that for decoding. It adds up the
// partial results of long contexts (RowOfSplits), always from the left. It also writes the rows
// that no work item wrote: zeros for padding, NaN where lengths or tables are faulty. The decode
// kernel writes its rows itself.
//
// A piece is 128 columns of a token and head (PiecesOfHead): each lane of a warp has four. With few
// tokens many warps share a token's pieces; with many tokens a warp takes whole tokens, and skips
// tokens that need neither merging nor filling.
#pragma once

#include "partial_results.cuh"
#include "schedule.cuh"

namespace xla_gpu::paged_attention {

// The rows of the kernels' work items, which number the flags of a sequence (RowTiles).
struct ItemRows {
  int64_t short_rows;  // of sequences with one query tile
  int64_t long_rows;
  int64_t decode_tokens;  // the most of a sequence that the decode kernel takes; 0: there is none

  __device__ int64_t Of(const Params& p, const Sequence& sequence) const {
    return sequence.q_len > TokensPerTile(p) ? long_rows : short_rows;
  }
};

// The valid part of the batch: sequences [0, num_seqs) own the tokens [begin, end). Tokens from
// `end` on are padding, unless query_start_loc is faulty there (`is_broken`).
struct ValidBatch {
  int64_t num_seqs;
  int64_t begin;
  int64_t end;
  bool is_broken;

  // All threads call it and get the same batch, even if the lengths change meanwhile. `shared`
  // holds kSharedInts.
  static constexpr int kSharedInts = (kWarps + 3 + 3) / 4 * 4;  // a multiple of 16 bytes
  __device__ ValidBatch(const Params& p, int* shared) {
    const int lane = threadIdx.x % gpu::kWarpSize, warp = threadIdx.x / gpu::kWarpSize;
    const int64_t claimed = NumSeqs(p);
    int first_broken = static_cast<int>(Larger(claimed, 0));
    for (int s = threadIdx.x; s < first_broken; s += kThreads) {
      if (!Sequence(p, s).HasRows(p)) first_broken = s;
    }
    for (int mask = gpu::kWarpSize / 2; mask > 0; mask /= 2) {
      first_broken = min(first_broken, gpu::ShuffleXor(first_broken, mask));
    }
    if (lane == 0) shared[warp] = first_broken;
    __syncthreads();
    int* found = shared + kWarps;
    if (threadIdx.x == 0) {
      for (int w = 1; w < kWarps; ++w) first_broken = min(first_broken, shared[w]);
      found[0] = first_broken != claimed ? ~first_broken : first_broken;
      found[1] = first_broken > 0 ? gpu::LoadOnce(p.query_start_loc) : 0;
      found[2] = first_broken > 0 ? gpu::LoadOnce(p.query_start_loc + first_broken) : 0;
    }
    __syncthreads();
    is_broken = found[0] < 0;
    num_seqs = is_broken ? ~found[0] : found[0];
    begin = found[1];
    end = found[2];
  }

  // The sequence of a token in [begin, end): the last one that starts at or before the token. All
  // lanes of a warp call it, and look at 32 sequences at a time.
  __device__ int64_t Find(const Params& p, int64_t token) const {
    const int lane = threadIdx.x % gpu::kWarpSize;
    int64_t low = 0, high = num_seqs;
    while (high - low > 1) {
      const int64_t step = CeilDiv(high - low, gpu::kWarpSize), s = low + lane * step;
      const bool starts = s < high && gpu::LoadOnce(p.query_start_loc + s) <= token;
      low += step * (max(gpu::CountInWarp(starts), 1) - 1);
      high = Smaller(high, low + step);
    }
    return low;
  }
};

// What is left to do for a query token.
struct TokenResult {
  bool are_missing = true;  // they become `fill`
  float fill = 0;
  Splits splits = {};  // one: the rows are there
  int64_t first_partial = 0;
  bool attend = false;  // to any position
};

// Looks at tokens for a warp. It keeps what it found of a sequence for the next token.
class Tokens {
 public:
  __device__ Tokens(const Params& p, const Scratch& scratch, const ItemRows& item_rows,
                    const ValidBatch& batch)
      : p_(p), scratch_(scratch), item_rows_(item_rows), batch_(batch) {}

  // All lanes call it, and get the same.
  __device__ TokenResult Find(int64_t token) {
    const float nan = kInfinity - kInfinity;
    if (token < batch_.begin || token >= batch_.end) {
      return {true, batch_.is_broken && token >= batch_.end ? nan : 0};
    }
    FindSequence(batch_.Find(p_, token));
    if (is_faulty_ || !sequence_.HasToken(token)) return {true, nan};
    const int64_t i = token - sequence_.first_token;
    return {false, 0, splits_, scratch_.Partial(s_, i, token, splits_.count),
            p_.Attends(sequence_.Tokens(), i)};
  }

 private:
  __device__ void FindSequence(int64_t s) {
    if (s == s_) return;
    s_ = s;
    sequence_ = Sequence(p_, s).OfFirstLane();
    is_faulty_ = !sequence_.IsLegal(p_);
    splits_.count = 0;
    if (!is_faulty_) splits_ = Splits(p_, sequence_);
    if (splits_.count > 0 && sequence_.q_len <= item_rows_.decode_tokens) {
      splits_.count = 1;
    } else {
      is_faulty_ = is_faulty_ || HasBadItem();
    }
  }

  __device__ bool HasBadItem() const {
    const RowTiles tiles(p_, sequence_.q_len, item_rows_.Of(p_, sequence_));
    const int64_t num_splits = splits_.count, count = tiles.NumFlags() * num_splits;
    bool is_bad = false;
#pragma unroll 8
    for (int64_t n = threadIdx.x % gpu::kWarpSize; n < count; n += gpu::kWarpSize) {
      const int64_t flag = DivideU32(n, num_splits), split = n - flag * num_splits;
      is_bad |= *scratch_.IsBad(p_, s_, sequence_.first_token, flag, split, num_splits) != 0;
    }
    return gpu::AnyInWarp(is_bad);
  }

  const Params& p_;
  const Scratch& scratch_;
  const ItemRows& item_rows_;
  const ValidBatch& batch_;
  int64_t s_ = -1;
  Sequence sequence_ = {};
  Splits splits_ = {};
  bool is_faulty_ = false;
};

inline constexpr int kCombineSharedBytes =
    ValidBatch::kSharedInts * sizeof(int) + kWarps * sizeof(FoldFactors);

// value_scales: that the partial results are to be multiplied by, for each kv head. No data: 1.
template <typename T>
__global__ void __launch_bounds__(kThreads, 4)
    Combine(Params p, Scratch scratch, ItemRows item_rows, KvScales value_scales) {
  gpu::WaitForKernelsBefore();
  auto* shared = reinterpret_cast<int*>(gpu::SharedMemory());
  const ValidBatch batch(p, shared);
  const int lane = threadIdx.x % gpu::kWarpSize, warp = threadIdx.x / gpu::kWarpSize;
  const int64_t of_head = PiecesOfHead(p), pieces = p.num_heads * of_head;
  const int64_t num_warps = int64_t{gridDim.x} * kWarps;
  const int64_t shares = Larger(1, Smaller(pieces, DivideU32(num_warps, p.num_tokens)));
  Tokens tokens(p, scratch, item_rows, batch);
  auto* factors = reinterpret_cast<FoldFactors*>(shared + ValidBatch::kSharedInts) + warp;
  LaneColumns columns;
  columns.count = static_cast<int>(p.value_head_size);
  columns.are_chunks = columns.count % kColumnsAtOnce == 0 &&
                       reinterpret_cast<uintptr_t>(p.output) % (kColumnsAtOnce * sizeof(T)) == 0;
  int64_t n = int64_t{blockIdx.x} * kWarps + warp;
  for (; n < p.num_tokens * shares; n += num_warps) {
    const int64_t token = DivideU32(n, shares);
    const TokenResult rows = tokens.Find(token);
    if (!rows.are_missing && rows.splits.count == 1) continue;
    for (int64_t piece = n - token * shares; piece < pieces; piece += shares) {
      const int64_t head = DivideU32(piece, of_head), number = piece - head * of_head;
      columns.first = static_cast<int>(number) * kColumnStep + lane * kColumnsAtOnce;
      PartOfRow<kColumnsAtOnce> row;
      if (!rows.are_missing) {
        row = RowOfSplits<4, kColumnsAtOnce>(p, scratch, rows.first_partial, head, columns, factors)
                  .Merge(rows.splits);
        const float scale =
            rows.attend ? value_scales.At(0, 0, DivideU32(head, p.group.number)) : 1.0f;
        WriteRow<T>(p, token, head, columns, rows.attend, scale, row);
        continue;
      }
      for (float& value : row.values[0].column) value = rows.fill;
      columns.Write(row, static_cast<T*>(p.output) + p.OutputOffset(token, head) + columns.first);
      if (columns.first == 0 && p.lse != nullptr) {
        p.lse[token * p.num_heads + head] = rows.fill == 0 ? -kInfinity : rows.fill;
      }
    }
  }
}

}  // namespace xla_gpu::paged_attention
