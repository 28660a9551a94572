// Deals the splits of all sequences to the thread blocks. Each takes neighbouring splits, with as
// many positions as every other block but for one split. One warp deals for its block. It reads the
// lengths of 32 sequences at once, one in each lane, and everybody else takes what it found.
#pragma once

#include "../schedule.cuh"
#include "decode_numbers.h"

namespace xla_gpu::paged_attention {

// A split of a sequence and kv head. It has all query rows of the sequence.
struct alignas(16) DecodeSplit {
  int32_t sequence;
  int32_t kv_head;
  int32_t first_token;
  int32_t q_len;  // -1 marks the end
  int32_t context_len;
  int32_t begin;  // the positions that any of the rows attends to
  int32_t end;
  int32_t begin_tile;  // the KV tiles of these positions, counted from position 0
  int32_t end_tile;
  int32_t split;
  int32_t num_splits;
  uint32_t flags;

  static constexpr uint32_t kTurn = kWarps - 1;  // the consumer warps before the first tile's
  static constexpr uint32_t kIsLast = 4;  // of the block's splits of this sequence and kv head
  static constexpr uint32_t kIsCausal = 8;
  static_assert(kTurn < kIsLast, "a turn has two bits");

  __device__ bool IsEnd() const { return q_len < 0; }
  __device__ bool IsLast() const { return (flags & kIsLast) != 0; }
  __device__ int32_t FirstPosition() const { return context_len - q_len; }
  __device__ bool IsIn(int32_t position) const { return begin <= position && position < end; }

  // `group`: query heads of a kv head.
  __device__ Item AsItem(int32_t group) const {
    return {
        sequence, kv_head, 0,     q_len * group, first_token, FirstPosition(),         context_len,
        begin,    end,     split, num_splits,    /*flag=*/0,  (flags & kIsCausal) != 0};
  }
};
static_assert(sizeof(DecodeSplit) == 48, "padding would be copied, too, byte by byte");

// For numbers that are not negative, as unsigned ones: a shift.
template <int kTile>
__device__ __forceinline__ int32_t TilesTo(int32_t position) {
  return static_cast<uint32_t>(position) / kTile;
}
inline constexpr int32_t kSplitUnit = kTileAlignment;
__device__ __forceinline__ int32_t UnitsTo(int32_t position) {
  return static_cast<uint32_t>(position) / kSplitUnit;
}

// A copy of a sequence's lengths, in 32 bits. See Sequence.
struct DecodeLengths {
  int32_t first_token = 0;
  int32_t next_token = 0;
  int32_t context_len = 0;
  int32_t is_causal = 1;

  DecodeLengths() = default;
  __device__ DecodeLengths(const Params& p, const DecodeNumbers& numbers, int32_t s) {
    if (s >= numbers.max_seqs) return;
    first_token = gpu::LoadOnce(p.query_start_loc + s);
    next_token = gpu::LoadOnce(p.query_start_loc + s + 1);
    context_len = gpu::LoadOnce(p.context_lens + s);
    if (!p.is_causal) is_causal = p.causal != nullptr && gpu::LoadOnce(p.causal + s) != 0;
  }

  __device__ int32_t QueryLen() const {  // any number where there is no valid range
    return static_cast<int32_t>(static_cast<uint32_t>(next_token) -
                                static_cast<uint32_t>(first_token));
  }

  __device__ bool HasRows(const DecodeNumbers& numbers) const {
    return 0 <= first_token && first_token <= next_token && next_token <= numbers.num_tokens;
  }

  // Whether they are legal, and the sequence is the decode kernel's.
  __device__ bool AreLegal(const DecodeNumbers& numbers) const {
    const int32_t q_len = QueryLen();
    return HasRows(numbers) && 0 < q_len && q_len <= numbers.max_query_len &&
           context_len >= (is_causal ? q_len : 0) && context_len <= numbers.capacity;
  }

  // The first position attended to, rounded down to the beginning of a KV tile.
  __device__ int32_t Begin(const DecodeNumbers& numbers) const {
    return numbers.WindowBegin(context_len - QueryLen()) & -kLargestDecodeTile;
  }

  // The tiles of a sequence and kv head; 0 if the sequence is not this kernel's.
  template <int kTile>
  __device__ int32_t NumTiles(const DecodeNumbers& numbers) const {
    return AreLegal(numbers) ? TilesTo<kTile>(context_len - Begin(numbers) + kTile - 1) : 0;
  }
};

// Splits are ordered by sequence, kv head and position. All lanes of the warp call each function
// and get the same result. Place: holds the number of KV tiles of all sequences and kv heads.
template <bool kIsPlain, int kTile, typename Place>
class DecodeSchedule {
 public:
  // Starts to load, if it is to be used, and waits for nothing.
  __device__ DecodeSchedule(const Params& p, const DecodeNumbers& numbers, bool loads)
      : p_(p),
        numbers_(numbers),
        lane_(threadIdx.x % gpu::kWarpSize),
        kv_head_(numbers.num_kv_heads) {
    if (!loads) return;
    num_seqs_ = gpu::LoadOnce(p.num_seqs);
    lengths_ = DecodeLengths(p, numbers, lane_);
  }

  // Finds the block's share. Called once, before Next.
  __device__ void Start() {
    num_seqs_ = gpu::Shuffle(num_seqs_, 0);  // each lane has read it
    if (num_seqs_ < 0 || num_seqs_ > numbers_.max_seqs) num_seqs_ = 0;
    const uint32_t broken = gpu::LanesWith(lane_ < num_seqs_ && !lengths_.HasRows(numbers_));
    if (broken != 0) num_seqs_ = gpu::FirstOf(broken);
    CountWindow();
    Place total = gpu::Shuffle(ends_, gpu::kWarpSize - 1);
    if (num_seqs_ > gpu::kWarpSize) total = CountAll();
    total *= numbers_.num_kv_heads;
    // The first blocks have one tile more than the others.
    const int32_t block = blockIdx.x, num_blocks = gridDim.x;
    Place share;
    if constexpr (sizeof(Place) == 4) {
      share = numbers_.num_thread_blocks.Quotient(total);
    } else {
      share = total / num_blocks;
    }
    const auto with_one_more = static_cast<int32_t>(total - share * num_blocks);
    left_ = share + (block < with_one_more ? 1 : 0);
    at_ = share * block + min(block, with_one_more);
  }

  // The block's next split, or the end. It is called in one place, and each of its steps too: a
  // thread block computes few splits, and instructions are slow to come.
  __device__ void Next(DecodeSplit* work) {
    while (left_ > 0 && kv_head_ == numbers_.num_kv_heads) FindSequence();
    if (left_ <= 0) {
      work->q_len = -1;
      work->end = 0;  // the rest is never used
      return;
    }
    work->sequence = window_ + place_;
    work->kv_head = kv_head_;
    work->first_token = first_token_;
    work->q_len = q_len_;
    work->context_len = context_len_;
    work->split = split_;
    work->num_splits = num_splits_;
    // The first split also has what bidirectional ranges add before the window.
    const int32_t after_begin = split_ * split_positions_, split_begin = begin_ + after_begin;
    work->begin = max(split_ == 0 ? 0 : split_begin, attended_begin_);
    const bool ends = split_ + 1 == num_splits_;
    work->end = min(ends ? context_len_ : split_begin + split_positions_, attended_end_);
    const bool is_empty = work->begin >= work->end;
    work->begin_tile = is_empty ? 0 : TilesTo<kTile>(work->begin);
    work->end_tile = is_empty ? 0 : TilesTo<kTile>(work->end + kTile - 1);
    Advance(ends ? num_tiles_ - TilesTo<kTile>(after_begin) : TilesTo<kTile>(split_positions_));

    // As NumTilesBefore.
    const int32_t window_tile = TilesTo<kTile>(numbers_.WindowBegin(work->FirstPosition()));
    work->flags = max(0, window_tile - work->begin_tile) & DecodeSplit::kTurn;
    if (is_causal_ != 0) work->flags |= DecodeSplit::kIsCausal;
    if (ends || left_ <= 0) work->flags |= DecodeSplit::kIsLast;
    GoTo(kv_head_, split_ + 1);
  }

 private:
  // a / b, if that is below 2^20.
  template <typename T>
  static __device__ __forceinline__ int32_t SmallQuotient(T a, int32_t b) {
    auto quotient =
        static_cast<int32_t>(static_cast<float>(a) * gpu::Reciprocal(static_cast<float>(b)));
    const T rest = a - static_cast<T>(quotient) * b;  // the quotient is exact, or one off
    quotient += (rest >= b ? 1 : 0) - (rest < 0 ? 1 : 0);
    return quotient;
  }

  // Counts the tiles of the sequences whose lengths the lanes have.
  __device__ void CountWindow() {
    tiles_of_lane_ = window_ + lane_ < num_seqs_ ? lengths_.template NumTiles<kTile>(numbers_) : 0;
    ends_ = tiles_of_lane_;
    const int lane = gpu::Opaque(lane_);  // else comparisons with it are kept in all predicates
#pragma unroll
    for (int delta = 1; delta < gpu::kWarpSize; delta *= 2) {
      const Place left = gpu::ShuffleUp(ends_, delta);
      if (lane >= delta) ends_ += left;
    }
  }

  __device__ void LoadWindow(int32_t window) {
    window_ = window;
    lengths_ = DecodeLengths(p_, numbers_, window + lane_);
    CountWindow();
  }

  // The tiles of all sequences. A sequence without a valid range ends the batch.
  __device__ Place CountAll() {
    while (true) {
      Place count = tiles_of_lane_;
      int32_t broken = num_seqs_;
#pragma unroll 2
      for (int32_t s = gpu::kWarpSize + lane_; s < num_seqs_; s += gpu::kWarpSize) {
        const DecodeLengths lengths(p_, numbers_, s);
        if (!lengths.HasRows(numbers_)) broken = min(broken, s);
        count += lengths.template NumTiles<kTile>(numbers_);
      }
#pragma unroll 1
      for (int mask = gpu::kWarpSize / 2; mask > 0; mask /= 2) {
        count += gpu::ShuffleXor(count, mask);
        broken = min(broken, gpu::ShuffleXor(broken, mask));
      }
      if (broken == num_seqs_) return count;
      num_seqs_ = broken;
    }
  }

  __device__ void Advance(int32_t tiles) {
    at_ += tiles;
    left_ -= tiles;
  }

  // Goes to a split, or past a kv head's last one.
  __device__ void GoTo(int32_t kv_head, int32_t split) {
    const bool is_past = split == num_splits_;
    kv_head_ = kv_head + (is_past ? 1 : 0);
    split_ = is_past ? 0 : split;
  }

  // Finds the sequence at the block's place, and its first split that begins there or after it; or
  // goes past the sequence.
  __device__ void FindSequence() {
    const Place heads = numbers_.num_kv_heads;
    int passed;
    while (true) {
      passed = gpu::CountInWarp(ends_ * heads <= at_);
      if (passed < gpu::kWarpSize) break;
      at_ -= gpu::Shuffle(ends_, gpu::kWarpSize - 1) * heads;
      if (window_ + gpu::kWarpSize >= num_seqs_) {  // the lengths have changed since
        left_ = 0;
        return;
      }
      LoadWindow(window_ + gpu::kWarpSize);
    }
    TakeSequence(passed);
    const Place after_begin = at_ - (gpu::Shuffle(ends_, passed) - num_tiles_) * heads;
    const int32_t kv_head = SmallQuotient<Place>(after_begin, num_tiles_);
    const auto tile = static_cast<int32_t>(after_begin - kv_head * Place{num_tiles_});
    const int32_t tiles_per_split = TilesTo<kTile>(split_positions_);
    const int32_t split =
        min(num_splits_, SmallQuotient<int32_t>(tile + tiles_per_split - 1, tiles_per_split));
    Advance((split == num_splits_ ? num_tiles_ : split * tiles_per_split) - tile);
    GoTo(kv_head, split);
  }

  // Takes the sequence of a lane, with its splits: see Splits. A window counts as its positions.
  // Its last split also has those that its first tile and several query tokens add: a window of 128
  // has one split wherever it begins.
  __device__ void TakeSequence(int place) {
    place_ = place;
    first_token_ = gpu::Shuffle(lengths_.first_token, place);
    q_len_ = gpu::Shuffle(lengths_.QueryLen(), place);
    context_len_ = gpu::Shuffle(lengths_.context_len, place);
    is_causal_ = kIsPlain ? 1 : gpu::Shuffle(lengths_.is_causal, place);
    num_tiles_ = gpu::Shuffle(tiles_of_lane_, place);
    begin_ = gpu::Shuffle(lengths_.Begin(numbers_), place);
    const int32_t length = min(context_len_ - begin_, numbers_.window);
    const int32_t limit = numbers_.split_limit.number;
    const auto positions = static_cast<int32_t>(numbers_.split_limit.Quotient(length + limit - 1));
    const int32_t units = max(UnitsTo(kShortest), UnitsTo(positions + kSplitUnit - 1));
    split_positions_ = units * kSplitUnit;
    num_splits_ = SmallQuotient<int32_t>(UnitsTo(length + kSplitUnit - 1) + units - 1, units);
    if constexpr (kIsPlain) {
      attended_begin_ = numbers_.WindowBegin(context_len_ - q_len_);
      attended_end_ = context_len_;
    } else {
      const QueryTokens tokens = {first_token_, context_len_ - q_len_, context_len_,
                                  is_causal_ != 0};
      const Span attended = p_.AttendedByAny(tokens, 0, q_len_ - 1);
      attended_begin_ = static_cast<int32_t>(attended.begin);
      attended_end_ = static_cast<int32_t>(attended.end);
    }
  }

  static constexpr int32_t kShortest = kMinSplit;

  const Params& p_;
  const DecodeNumbers& numbers_;
  const int lane_;
  int32_t num_seqs_;
  int32_t window_ = 0;     // the first sequence whose lengths the lanes have
  DecodeLengths lengths_;  // of the lane's sequence
  int32_t tiles_of_lane_;  // of each of its kv heads
  Place ends_;             // the same of the window up to this lane
  Place at_;               // the block's place, in tiles of all kv heads from the window on
  Place left_;             // tiles of the block's share

  int32_t kv_head_;  // of the next split. numbers.num_kv_heads: one of the next sequence

  // The next split. TakeSequence and GoTo set it, and nothing before: that costs instructions.
  int32_t split_;
  int place_;  // of its sequence in the window
  int32_t first_token_;
  int32_t q_len_;
  int32_t context_len_;
  int32_t is_causal_;
  int32_t num_tiles_;
  int32_t begin_;
  int32_t split_positions_;
  int32_t num_splits_;
  int32_t attended_begin_;
  int32_t attended_end_;
};

}  // namespace xla_gpu::paged_attention
