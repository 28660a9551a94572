// Deals the leaves of all sequences to the thread blocks. Each takes neighbouring ones, with as
// many positions as every other block but for one leaf. One warp deals for its block. It reads the
// lengths of 32 sequences at once, one in each lane, and everybody else takes what it found.
//
// Sequences that are neighbours in the batch and have their first units in common are a family, as
// long as one work item can have all of their rows. The common units are dealt once, as the first
// sequence's, and the work item has the rows of all. What each row finds in a unit depends on that
// row alone, and it is merged with what the row finds elsewhere in the same order. So nobody's bits
// tell whether there was a family.
#pragma once

#include "../order.h"
#include "../schedule.cuh"
#include "numbers.h"

namespace xla_gpu::paged_attention::decode {

// What blocks do not cut, and what has a slot for its partial result: a leaf, or a group where the
// leaves of the batch have more slots than there are, or all of a sequence and kv head. It decides
// no bits.
enum class Unit : uint32_t { kLeaf, kGroup, kSequence };

// The number of the leaf or group that holds a position, and where the unit ends. A sequence has no
// end here.
__device__ __forceinline__ int32_t UnitOf(Unit unit, int32_t position) {
  return unit == Unit::kLeaf ? LeafOf(position) : static_cast<uint32_t>(position) / kGroup;
}
__device__ __forceinline__ uint32_t UnitEnd(Unit unit, int32_t position) {
  if (unit == Unit::kSequence) return INT32_MAX;
  return unit == Unit::kLeaf ? LeafEnd(position) : GroupEnd(position);
}

// A split of a sequence and kv head: neighbouring units that a thread block computes. It has all
// query rows of the sequence, or of a family, whose first sequence it names.
struct alignas(16) Split {
  int32_t sequence;
  int32_t kv_head;
  int32_t first_token;
  int32_t q_len;  // -1 marks the end
  int32_t context_len;
  int32_t sequence_begin;  // the first position of the sequence that counts
  int32_t from;            // [from, to): whole units
  int32_t to;
  int32_t begin;  // the positions of them that any of the rows attends to
  int32_t end;
  int32_t slot;  // of unit 0 and the first query token, if the sequence had it
  uint32_t flags;

  static constexpr uint32_t kUnit = 3;
  static constexpr uint32_t kIsCausal = 4;
  static constexpr int kMembers = 3;     // where the members of a family begin, less 1: four bits
  static constexpr int kKeptBegins = 7;  // and how many positions others read, too, in short leaves

  __device__ bool IsEnd() const { return q_len < 0; }
  __device__ bool IsWhole() const { return from == sequence_begin && to == context_len; }
  __device__ bool UnitsAreGroups() const {
    return (flags & kUnit) == static_cast<uint32_t>(Unit::kGroup);
  }
  // Sequences whose rows it has. If they are several, all rows attend to all of its positions.
  __device__ int32_t Members() const { return (flags >> kMembers & (kItemRows - 1)) + 1; }
  // Goes to the next one of them, with so many positions.
  __device__ void GoToMember(int32_t length) {
    slot += CountUnits(0, context_len) * q_len;
    ++sequence;
    first_token += q_len;
    context_len = length;
  }
  // Whether other sequences may read a position, too.
  __device__ bool IsKept(int32_t position) const {
    return static_cast<uint32_t>(position) / kShortLeaf < flags >> kKeptBegins;
  }
  __device__ int32_t FirstPosition() const { return context_len - q_len; }
  __device__ bool IsIn(int32_t position) const { return begin <= position && position < end; }

  // The KV tiles of its positions, counted from position 0: from the block of 32 on that holds the
  // first one.
  template <int kTile>
  __device__ int32_t BeginTile() const {
    return static_cast<uint32_t>(begin) / kWidestTile * (kWidestTile / kTile);
  }
  template <int kTile>
  __device__ int32_t EndTile() const {
    return static_cast<uint32_t>(end + kTile - 1) / kTile;
  }

  // The units that hold positions of [first, last), which are not none.
  __device__ int32_t CountUnits(int32_t first, int32_t last) const {
    const auto unit = static_cast<Unit>(flags & kUnit);
    return UnitOf(unit, last - 1) + 1 - UnitOf(unit, first);
  }
  // The slot of the unit that holds a position, for the first query token.
  __device__ int32_t SlotOf(int32_t position) const {
    return slot + UnitOf(static_cast<Unit>(flags & kUnit), position) * q_len;
  }

  // `heads_per_kv`: query heads of a kv head.
  __device__ Item AsItem(int32_t heads_per_kv) const {
    return {sequence,
            kv_head,
            0,
            q_len * heads_per_kv * Members(),
            first_token,
            FirstPosition(),
            context_len,
            begin,
            end,
            /*split=*/0,
            /*num_splits=*/1,
            /*flag=*/0,
            (flags & kIsCausal) != 0};
  }
};
static_assert(sizeof(Split) == 48, "padding would be copied, too, byte by byte");

// For numbers that are not negative, as unsigned ones: a shift.
template <int kTile>
__device__ __forceinline__ int32_t TilesTo(int32_t position) {
  return static_cast<uint32_t>(position) / kTile;
}

// A copy of a sequence's lengths, in 32 bits. See Sequence.
struct Lengths {
  int32_t first_token = 0;
  int32_t next_token = 0;
  int32_t context_len = 0;
  int32_t is_causal = 1;

  Lengths() = default;
  __device__ Lengths(const Params& p, const Numbers& numbers, int32_t s) {
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

  __device__ bool HasRows(const Numbers& numbers) const {
    return 0 <= first_token && first_token <= next_token && next_token <= numbers.num_tokens;
  }

  // Whether they are legal, and the sequence is the decode kernel's.
  __device__ bool AreLegal(const Numbers& numbers) const {
    const int32_t q_len = QueryLen();
    return HasRows(numbers) && 0 < q_len && q_len <= numbers.max_query_len &&
           context_len >= (is_causal ? q_len : 0) && context_len <= numbers.capacity;
  }

  __device__ QueryTokens Tokens() const {
    return {first_token, context_len - QueryLen(), context_len, is_causal != 0};
  }
};

// Splits are ordered by sequence, kv head and position. All lanes of the warp call each function
// and get the same result. Place: holds the number of KV tiles of all sequences and kv heads.
template <bool kIsPlain, int kTile, typename Place>
class Schedule {
 public:
  // Starts to load, if it is to be used, and waits for nothing.
  __device__ Schedule(const Params& p, const Scratch& scratch, const Numbers& numbers, bool loads)
      : p_(p),
        scratch_(scratch),
        numbers_(numbers),
        lane_(threadIdx.x % gpu::kWarpSize),
        kv_head_(numbers.num_kv_heads) {
    if (!loads) return;
    num_seqs_ = gpu::LoadOnce(p.num_seqs);
    lengths_ = Lengths(p, numbers, lane_);
    family_ = FamilyOf(lane_);
  }

  // Finds the block's share. Called once, before Next.
  __device__ void Start() {
    num_seqs_ = gpu::Shuffle(num_seqs_, 0);  // each lane has read it
    if (num_seqs_ < 0 || num_seqs_ > numbers_.max_seqs) num_seqs_ = 0;
    const uint32_t broken = gpu::LanesWith(lane_ < num_seqs_ && !lengths_.HasRows(numbers_));
    if (broken != 0) num_seqs_ = gpu::FirstOf(broken);
    Count total;
    while (true) {
      CountSection();
      total = {gpu::Shuffle(ends_.tiles, gpu::kWarpSize - 1),
               gpu::Shuffle(ends_.slots, gpu::kWarpSize - 1)};
      if (num_seqs_ > gpu::kWarpSize) total = CountAll();
      if (total.slots <= scratch_.num_partials) break;
      unit_ = unit_ == Unit::kLeaf ? Unit::kGroup : Unit::kSequence;
    }
    total.tiles *= numbers_.num_kv_heads;
    // The first blocks have one tile more than the others.
    const int32_t block = blockIdx.x, num_blocks = gridDim.x;
    Place share;
    if constexpr (sizeof(Place) == 4) {
      share = numbers_.num_thread_blocks.Quotient(total.tiles);
    } else {
      share = total.tiles / num_blocks;
    }
    const auto with_one_more = static_cast<int32_t>(total.tiles - share * num_blocks);
    left_ = share + (block < with_one_more ? 1 : 0);
    at_ = share * block + min(block, with_one_more);
  }

  // The block's next split, or the end. It is called in one place, and each of its steps too: a
  // thread block computes few splits, and instructions are slow to come.
  __device__ void Next(Split* work) {
    while (left_ > 0 && kv_head_ == numbers_.num_kv_heads) FindSequence();
    if (left_ <= 0) {
      work->q_len = -1;
      work->end = 0;  // the rest is never used
      return;
    }
    work->sequence = section_ + place_;
    work->kv_head = kv_head_;
    work->first_token = first_token_;
    work->q_len = q_len_;
    work->context_len = context_len_;
    work->sequence_begin = sequence_begin_;
    work->from = from_;
    const bool is_of_family = members_ > 1 && from_ < kept_;
    const int32_t end = is_of_family ? kept_ : context_len_;
    const int32_t tiles = TilesTo<kTile>(end - from_ + kTile - 1);
    work->to = left_ < tiles ? NextUnit(from_ + static_cast<int32_t>(left_) * kTile) : end;
    work->begin = max(from_, attended_begin_);
    work->end = min(work->to, attended_end_);
    if (work->begin >= work->end) work->begin = work->end = 0;
    work->slot = slot_;
    work->flags = static_cast<uint32_t>(own_unit_);
    if (is_causal_ != 0) work->flags |= Split::kIsCausal;
    if (is_of_family) work->flags |= (members_ - 1) << Split::kMembers;
    work->flags |= static_cast<uint32_t>(kept_) / kShortLeaf << Split::kKeptBegins;
    Advance(work->to < end ? TilesTo<kTile>(work->to - from_) : tiles);
    GoTo(kv_head_, work->to);
  }

  // The positions of the member of the last split's family that a lane has the number of.
  __device__ int32_t ContextOfMember() const {
    if (!kIsPlain) return 0;
    return gpu::Shuffle(lengths_.context_len, place_ + lane_);
  }

 private:
  // What sequences have: KV tiles of each kv head, and slots.
  struct Count {
    Place tiles;
    Place slots;
  };

  // a / b, if that is below 2^20.
  template <typename T>
  static __device__ __forceinline__ int32_t SmallQuotient(T a, int32_t b) {
    auto quotient =
        static_cast<int32_t>(static_cast<float>(a) * gpu::Reciprocal(static_cast<float>(b)));
    const T rest = a - static_cast<T>(quotient) * b;  // the quotient is exact, or one off
    quotient += (rest >= b ? 1 : 0) - (rest < 0 ? 1 : 0);
    return quotient;
  }

  // Where the first unit of the sequence at a position or behind it begins, if that is one behind
  // the sequence's first: its end at the latest.
  __device__ __forceinline__ int32_t NextUnit(int32_t position) const {
    return static_cast<int32_t>(
        min(static_cast<uint32_t>(context_len_), UnitEnd(own_unit_, position - 1)));
  }

  // The first position of a sequence that counts: that of the block of 32 with the first one that
  // its rows attend to.
  __device__ int32_t BeginOf(const Lengths& lengths) const {
    int32_t begin = numbers_.WindowBegin(lengths.context_len - lengths.QueryLen());
    if (p_.bidirectional_ranges != nullptr) {
#pragma unroll 1
      for (int32_t i = 0; i < lengths.QueryLen(); ++i) {
        const Span range = p_.RangeOf(lengths.Tokens(), i);
        if (!range.IsEmpty()) begin = min(begin, static_cast<int32_t>(range.begin));
      }
    }
    return begin & -kWidestTile;
  }

  // What it has; nothing if it is not this kernel's. One whose window has few positions is one
  // unit, wherever it begins. It needs no slot.
  __device__ Count CountOf(const Lengths& lengths, int32_t* begin) const {
    *begin = 0;
    if (!lengths.AreLegal(numbers_)) return {0, 0};
    *begin = BeginOf(lengths);
    const int32_t length = lengths.context_len - *begin;
    Count count = {TilesTo<kTile>(length + kTile - 1), 0};
    const int32_t groups = CountGroups(*begin, lengths.context_len);
    if (min(length, numbers_.window) > kMostUnsplit && groups <= numbers_.most_groups &&
        unit_ != Unit::kSequence) {
      const int32_t units = UnitOf(unit_, lengths.context_len - 1) + 1 - UnitOf(unit_, *begin);
      count.slots = Place{units} * lengths.QueryLen();
    }
    return count;
  }

  // See Scratch::families.
  __device__ int32_t FamilyOf(int32_t s) const {
    if (!kIsPlain || !numbers_.HasSplits() || s >= numbers_.max_seqs) return kAllKept;
    return gpu::LoadOnce(scratch_.families + s);
  }

  // The same, but a sequence that follows in a family leaves the common units to the first one. It
  // does not follow if it has not all of them: its units may be others, or its length has changed.
  __device__ Count CountOf(const Lengths& lengths, int32_t* begin, int32_t* family) const {
    const Count count = CountOf(lengths, begin);
    if (!kIsPlain || (*family & kFollows) == 0) return count;
    uint32_t end = *family - kFollows;
    if (unit_ != Unit::kLeaf) end = end / kGroup * kGroup;
    const int32_t attended = lengths.context_len - lengths.QueryLen();
    *family = end;
    if (end == 0 || attended < static_cast<int32_t>(end) || *begin > 0 || count.slots == 0) {
      return count;
    }
    *family += kFollows;
    *begin = end;
    return {TilesTo<kTile>(lengths.context_len - end + kTile - 1), count.slots};
  }

  // Counts the sequences whose lengths the lanes have.
  __device__ void CountSection() {
    own_ = {0, 0};
    begin_of_lane_ = 0;
    if (section_ + lane_ < num_seqs_) {
      own_ = CountOf(lengths_, &begin_of_lane_, &family_);
    } else {
      family_ = 0;
    }
    ends_ = own_;
    const int lane = gpu::Opaque(lane_);  // else comparisons with it are kept in all predicates
#pragma unroll
    for (int delta = 1; delta < gpu::kWarpSize; delta *= 2) {
      const Count left{gpu::ShuffleUp(ends_.tiles, delta), gpu::ShuffleUp(ends_.slots, delta)};
      if (lane >= delta) ends_ = {ends_.tiles + left.tiles, ends_.slots + left.slots};
    }
  }

  __device__ void LoadSection(int32_t section) {
    section_ = section;
    lengths_ = Lengths(p_, numbers_, section + lane_);
    family_ = FamilyOf(section + lane_);
    CountSection();
  }

  // Counts all sequences. A sequence without a valid range ends the batch.
  __device__ Count CountAll() {
    constexpr int kUnrolled = kIsPlain ? 2 : 1;
    while (true) {
      Count count = own_;
      int32_t broken = num_seqs_;
#pragma unroll kUnrolled
      for (int32_t s = gpu::kWarpSize + lane_; s < num_seqs_; s += gpu::kWarpSize) {
        const Lengths lengths(p_, numbers_, s);
        if (!lengths.HasRows(numbers_)) broken = min(broken, s);
        int32_t begin, family = FamilyOf(s);
        const Count of_sequence = CountOf(lengths, &begin, &family);
        count = {count.tiles + of_sequence.tiles, count.slots + of_sequence.slots};
      }
#pragma unroll 1
      for (int mask = gpu::kWarpSize / 2; mask > 0; mask /= 2) {
        count.tiles += gpu::ShuffleXor(count.tiles, mask);
        count.slots += gpu::ShuffleXor(count.slots, mask);
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

  // Goes to the unit that begins at a position, or past a kv head's last one.
  __device__ void GoTo(int32_t kv_head, int32_t from) {
    const bool is_past = from == context_len_;
    kv_head_ = kv_head + (is_past ? 1 : 0);
    from_ = is_past ? begin_ : from;
  }

  // Finds the sequence at the block's place, and its first unit that begins there or after it; or
  // goes past the sequence.
  __device__ void FindSequence() {
    const Place heads = numbers_.num_kv_heads;
    int passed;
    while (true) {
      passed = gpu::CountInWarp(ends_.tiles * heads <= at_);
      if (passed < gpu::kWarpSize) break;
      at_ -= gpu::Shuffle(ends_.tiles, gpu::kWarpSize - 1) * heads;
      slots_before_ += gpu::Shuffle(ends_.slots, gpu::kWarpSize - 1);
      if (section_ + gpu::kWarpSize >= num_seqs_) {  // the lengths have changed since
        left_ = 0;
        return;
      }
      LoadSection(section_ + gpu::kWarpSize);
    }
    TakeSequence(passed);
    const Place after_begin = at_ - (gpu::Shuffle(ends_.tiles, passed) - num_tiles_) * heads;
    const int32_t kv_head = SmallQuotient<Place>(after_begin, num_tiles_);
    const auto tile = static_cast<int32_t>(after_begin - kv_head * Place{num_tiles_});
    const int32_t from = tile == 0 ? begin_ : NextUnit(begin_ + tile * kTile);
    Advance((from == context_len_ ? num_tiles_ : TilesTo<kTile>(from - begin_)) - tile);
    GoTo(kv_head, from);
  }

  // Takes the sequence of a lane.
  __device__ void TakeSequence(int place) {
    place_ = place;
    first_token_ = gpu::Shuffle(lengths_.first_token, place);
    q_len_ = gpu::Shuffle(lengths_.QueryLen(), place);
    context_len_ = gpu::Shuffle(lengths_.context_len, place);
    is_causal_ = kIsPlain ? 1 : gpu::Shuffle(lengths_.is_causal, place);
    num_tiles_ = static_cast<int32_t>(gpu::Shuffle(own_.tiles, place));
    begin_ = sequence_begin_ = gpu::Shuffle(begin_of_lane_, place);
    const Place slots = gpu::Shuffle(own_.slots, place);
    const Place slots_end = slots_before_ + gpu::Shuffle(ends_.slots, place);
    if constexpr (kIsPlain) {
      const int32_t family = gpu::Shuffle(family_, place);
      kept_ = family & ~kFollows;
      members_ = 1;
      const bool follows = (family_ & kFollows) != 0 && lengths_.QueryLen() == q_len_;
      if (const uint32_t following = gpu::LanesWith(follows) >> place; following != 0) {
        members_ = gpu::FirstOf(~(following >> 1)) + 1;
        if ((following & 1) != 0) sequence_begin_ = 0;
        const Place end_of_all = slots_before_ + gpu::Shuffle(ends_.slots, place + members_ - 1);
        const int32_t tokens = members_ * q_len_;
        const bool fits = tokens <= numbers_.tokens_of_item && kept_ <= context_len_ &&
                          tokens <= numbers_.num_tokens - first_token_ &&
                          end_of_all <= scratch_.num_partials;
        // The lengths have changed since they were counted, or since families were found.
        if ((following & 3) != 0 && !fits) left_ = 0;
      }
    }
    // There are too few slots if the lengths have changed since they were counted.
    own_unit_ = slots == 0 || slots_end > scratch_.num_partials ? Unit::kSequence : unit_;
    slot_ = static_cast<int32_t>(slots_end - slots) - UnitOf(own_unit_, sequence_begin_) * q_len_;
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

  const Params& p_;
  const Scratch& scratch_;
  const Numbers& numbers_;
  const int lane_;
  Unit unit_ = Unit::kLeaf;  // of the batch
  int32_t num_seqs_;
  int32_t section_ = 0;     // the first sequence whose lengths the lanes have
  Lengths lengths_;         // of the lane's sequence
  int32_t family_;          // of that, see Scratch
  Count own_;               // of that, for each of its kv heads
  int32_t begin_of_lane_;   // the first position that is dealt as its own
  Count ends_;              // the counts of the section up to this lane
  Place slots_before_ = 0;  // of the sections before
  Place at_;                // the block's place, in tiles of all kv heads from the section on
  Place left_;              // tiles of the block's share

  int32_t kv_head_;  // of the next split. numbers.num_kv_heads: one of the next sequence

  // The next split. TakeSequence and GoTo set it, and nothing before: that costs instructions.
  int32_t from_;
  int place_;  // of its sequence in the section
  int32_t first_token_;
  int32_t q_len_;
  int32_t context_len_;
  int32_t is_causal_;
  int32_t num_tiles_;
  int32_t begin_;            // the first position that is dealt as the sequence's
  int32_t sequence_begin_;   // and that counts
  int32_t members_ = 1;      // of the family from the sequence on
  int32_t kept_ = kAllKept;  // where the common units end
  int32_t slot_;             // see Split
  Unit own_unit_;
  int32_t attended_begin_;
  int32_t attended_end_;
};

}  // namespace xla_gpu::paged_attention::decode
