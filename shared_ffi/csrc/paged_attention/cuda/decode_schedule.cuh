// Deals the splits of all sequences to the thread blocks. Each takes neighbouring splits, with as
// many positions as every other block but for one split. One warp deals for its block, and reads
// the lengths that it needs. These may change meanwhile, so all lanes take the first lane's copy
// of a length.
#pragma once

#include "schedule.cuh"

namespace xla_gpu::paged_attention {

// A split of a sequence and kv head.
struct DecodeItem {
  Item item;
  bool is_last;  // of the thread block's splits of this sequence and kv head
};

// Splits are ordered by sequence, kv head and position. All lanes of the warp call each function
// and get the same result.
class DecodeSchedule {
 public:
  static constexpr int kTile = 16;  // positions that sizes are counted in

  __device__ DecodeSchedule(const Params& p, QueryLengths lengths)
      : p_(p), lengths_(lengths), kv_head_(static_cast<int32_t>(p.num_kv_heads)) {}

  // Called before Next.
  __device__ void Begin() {
    num_seqs_ = gpu::Shuffle(Larger(0, NumSeqs(p_)), 0);
    // The first blocks have one tile more than the others.
    const int64_t total = CountTiles(), share = Divide(total, gridDim.x);
    const int64_t with_one_more = total - share * gridDim.x;
    begin_ = share * blockIdx.x + Smaller(blockIdx.x, with_one_more);
    end_ = begin_ + share + (blockIdx.x < with_one_more ? 1 : 0);
    FindFirst();
  }

  // Returns false after the block's last split. The first lane's *work is the one that counts:
  // others may have read other ranges. It is called in one place, and each of its steps too: a
  // thread block computes few splits, and instructions are slow to come.
  __device__ bool Next(DecodeItem* work) {
    while (true) {
      if (place_ >= end_) return false;
      if (kv_head_ >= p_.num_kv_heads) {
        kv_head_ = 0;
        FindSequence(s_ + 1);
      }
      if (s_ >= num_seqs_) return false;
      if (begin_ <= place_) break;
      SkipToBegin();
    }
    MakeItem(p_, s_, sequence_, rows_, /*tile=*/0, kv_head_, splits_, split_, &work->item);
    const int32_t first_tile = split_ * tiles_per_split_;
    place_ += Smaller(tiles_per_split_, num_tiles_ - first_tile);
    work->is_last = ++split_ == splits_.count || place_ >= end_;
    if (split_ == splits_.count) {
      split_ = 0;
      ++kv_head_;
    }
    return true;
  }

 private:
  // Numbers of tiles of the whole batch may need 64 bits, but hardly ever do.
  static __device__ __forceinline__ int64_t Divide(int64_t a, int64_t b) {
    return a <= UINT32_MAX ? DivideU32(a, b) : a / b;
  }

  // The tiles of a sequence and kv head; 0 if the sequence is not this kernel's.
  __device__ int32_t NumTiles(const Sequence& sequence) const {
    if (!sequence.IsLegal(p_) || !lengths_.Contain(sequence.q_len)) return 0;
    return static_cast<int32_t>(CeilDiv(sequence.context_len - sequence.Begin(p_), kTile));
  }

  // The tiles of all sequences and kv heads. A sequence without a valid range ends the batch.
  __device__ int64_t CountTiles() {
    while (true) {
      int64_t count = 0;
      int32_t broken = static_cast<int32_t>(num_seqs_);
#pragma unroll 4
      for (int64_t s = threadIdx.x % gpu::kWarpSize; s < num_seqs_; s += gpu::kWarpSize) {
        const Sequence sequence(p_, s);
        if (!sequence.HasRows(p_)) broken = min(broken, static_cast<int32_t>(s));
        count += NumTiles(sequence);
      }
      for (int mask = gpu::kWarpSize / 2; mask > 0; mask /= 2) {
        count += gpu::ShuffleXor(count, mask);
        broken = min(broken, gpu::ShuffleXor(broken, mask));
      }
      if (broken == num_seqs_) return count * p_.num_kv_heads;
      num_seqs_ = broken;
    }
  }

  // Finds the sequence with the first split that begins at `begin_` or after it: Next takes the
  // sequence after s_.
  __device__ void FindFirst() {
    const int lane = threadIdx.x % gpu::kWarpSize;
    int64_t before = 0;  // tiles of the sequences before a window of them
    for (int64_t window = 0; window < num_seqs_; window += gpu::kWarpSize) {
      const int64_t s = window + lane;
      int64_t end = s < num_seqs_ ? p_.num_kv_heads * NumTiles(Sequence(p_, s)) : 0;
      for (int delta = 1; delta < gpu::kWarpSize; delta *= 2) {
        const int64_t left = gpu::ShuffleUp(end, delta);
        if (lane >= delta) end += left;
      }
      const int passed = gpu::CountInWarp(before + end <= begin_);
      s_ = window + passed - 1;
      place_ = before + (passed > 0 ? gpu::Shuffle(end, passed - 1) : 0);
      if (passed < gpu::kWarpSize) return;
      before = place_;
    }
    s_ = num_seqs_ - 1;
  }

  // Goes to the first split of the sequence that begins at `begin_` or after it, or past the
  // sequence.
  __device__ void SkipToBegin() {
    kv_head_ = static_cast<int32_t>(Smaller(Divide(begin_ - place_, num_tiles_), p_.num_kv_heads));
    place_ += int64_t{kv_head_} * num_tiles_;
    if (kv_head_ == p_.num_kv_heads) return;  // the lengths have changed since
    const int64_t tiles = begin_ - place_;
    split_ = static_cast<int32_t>(DivideU32(tiles + tiles_per_split_ - 1, tiles_per_split_));
    place_ += Smaller(split_ * tiles_per_split_, num_tiles_);
    if (split_ >= splits_.count) {
      split_ = 0;
      ++kv_head_;
    }
  }

  // Takes the first sequence from s on that has tiles.
  __device__ void FindSequence(int64_t s) {
    for (; s < num_seqs_; ++s) {
      sequence_ = Sequence(p_, s).OfFirstLane();
      num_tiles_ = NumTiles(sequence_);
      if (num_tiles_ > 0) break;
    }
    s_ = s;
    if (s >= num_seqs_) return;
    splits_ = Splits(p_, sequence_);
    rows_ = RowTiles(p_, sequence_.q_len, kMaxRowsPerItem);
    tiles_per_split_ = static_cast<int32_t>(splits_.positions / kTile);
  }

  const Params& p_;
  const QueryLengths lengths_;
  int64_t num_seqs_ = 0;
  int64_t place_ = 0;  // of the next split, in tiles
  int64_t begin_ = 0;  // of the block's share
  int64_t end_ = 0;
  int64_t s_ = -1;  // the next split's sequence
  Sequence sequence_ = {};
  int32_t num_tiles_ = 0;
  Splits splits_ = {};
  RowTiles rows_ = {};
  int32_t tiles_per_split_ = 1;
  int32_t kv_head_;  // p.num_kv_heads: the first one of the next sequence
  int32_t split_ = 0;
};

}  // namespace xla_gpu::paged_attention
