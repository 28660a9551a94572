// The warps of the decode kernel that multiply, and merge what they found.
#pragma once

#include "../partial_results.cuh"
#include "decode.cuh"

namespace xla_gpu::paged_attention {

template <typename T, typename C, int kHeadSize, int kKib>
class DecodeConsumer {
  using Shared = DecodeShared<T, C, kHeadSize, kKib>;
  using QueryRows = typename Shared::QueryRows;
  using CacheRows = typename Shared::CacheRows;
  static constexpr int kTile = Shared::kTile;
  using Query = typename Shared::Query;
  using Products = WarpProducts<Query, C, kHeadSize, kTile, QueryRows, CacheRows>;

  // The rows of a work item that a warp finishes: every kWarps-th.
  static constexpr int kRows = kDecodeRows / kWarps;
  // How often the warps leave their sums in memory, and merge them.
  static constexpr int kRounds = kDecodeRows / Shared::kSumRows;
  static constexpr int kColumns = kHeadSize / gpu::kWarpSize;
  using Row = PartOfRow<kColumns>;
  // Splits of a row that are on their way to their merge: 4 KiB for a warp, or half of it with an
  // 8-bit cache, which has more code, and elsewhere than on Hopper, for want of registers.
  static constexpr int kSplitsAtOnce =
      kColumns > 4 || kIs8Bit<C> || !Shared::kIsLarge ? kSplitsOfGroup : 2 * kSplitsOfGroup;

 public:
  __device__ DecodeConsumer(const Params& p, const Scratch& scratch, const DecodeNumbers& numbers,
                            Shared* shared)
      : p_(p),
        scratch_(scratch),
        numbers_(numbers),
        shared_(*shared),
        lane_(threadIdx.x % gpu::kWarpSize),
        warp_(threadIdx.x / gpu::kWarpSize),
        scales_are_uniform_(p.ScalesAreUniform()) {}

  __device__ void Run() {
    ResetCounter(scratch_);
    if (numbers_.is_last) DecodeOtherRows<T>(p_, numbers_).Write();
    for (uint32_t n = 0;; ++n) {  // one register, not two
      const auto stage = Shared::ItemState::Of(n);
      shared_.work_barriers.WaitFilled(stage);
      const DecodeWork& work = shared_.work[stage.index];
      if (work.split.IsEnd()) return;
      Compute(work, shared_.query[stage.index], shared_.query_factors[stage.index]);
      if (warp_ == 0) gpu::Stamp(gpu::Moment::kLastTile);
      FinishSplit(work);
      if (warp_ == 0) gpu::Stamp(gpu::Moment::kFinished);
      shared_.work_barriers.Free(stage);
    }
  }

 private:
  // Computes the warp's tiles of a split, and leaves what it found in shared memory.
  __device__ void Compute(const DecodeWork& work, const Query* query, const float* query_factors) {
    const Item item = work.split.AsItem(numbers_.group);
    Softmax softmax(p_, item, lane_ / 4, work.rows[lane_ / 4].range,
                    work.rows[lane_ / 4 + 8].range);
    if constexpr (kIs8Bit<C>) {
      for (int r = 0; r < 2; ++r) softmax.MultiplyScale(r, query_factors[lane_ / 4 + 8 * r]);
    }
    const CommonRange common = work.common;
    Products products;
    const int32_t first_tile = work.split.begin_tile, end_tile = work.split.end_tile;
    const int32_t turn = (warp_ + work.split.flags) & DecodeSplit::kTurn;
    for (int32_t tile = first_tile + turn; tile < end_tile; tile += kWarps) {
      const auto stage = Shared::TileState::Of(count_ + (tile - first_tile));
      const PositionScales* scales = shared_.scales[stage.index];
      C* keys = shared_.tiles[stage.index];
      C* values = p_.is_latent ? keys : keys + kHeadSize;
      const int32_t begin = tile * kTile;
      shared_.tiles_barriers.WaitFilled(stage);
      if (warp_ == 0) gpu::Stamp(gpu::Moment::kFirstTile, /*first_counts=*/true);
      float logits[kTile / 8][4] = {};
      Products::MultiplyByKeys(query, 0, keys, 0, logits);
      if (kIs8Bit<C> && !scales_are_uniform_) Products::ScaleLogits(scales, logits);
      softmax.ToLogits(begin, /*masked=*/!common.Contains(begin, begin + kTile), logits);
      float rescales[2];
      softmax.Weigh(logits, rescales);
      RescaleSums(/*exist=*/tile >= first_tile + kWarps, rescales, products.sums);
      if constexpr (!kIsInteger<C>) {
        if (common.RowsDiffer(item, begin, begin + kTile)) {
          SetAsideNonFinite(softmax, begin, scales, values, products.sums);
        }
      }
      if (kIs8Bit<C> && !scales_are_uniform_) {
        Products::ScaleWeights(scales, logits);
        products.template AddValues<BFloat16>(values, 0, logits);
      } else {
        products.template AddValues<Query>(values, 0, logits);
      }
      shared_.tiles_barriers.Free(stage);
    }
    count_ += end_tile - first_tile;
    if (static_cast<uint32_t>(item.split) % kSplitsOfGroup == 0) merges_ = true;
    const RowState states[2] = {softmax.State(0), softmax.State(1)};
    const auto leave_sums = [&](int first_row) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (r == 1 && item.num_rows <= 8) break;
        const int row = lane_ / 4 + 8 * r - first_row;
        if (kRounds > 1 && (row < 0 || row >= Shared::kSumRows)) continue;
        products.StoreInGroups(r, states[r], &shared_.states[warp_][row], shared_.sums[warp_][row],
                               SwizzleOf(row));
      }
      gpu::SyncThreads(kDecodeConsumersBarrier, kThreads);
    };
    leave_sums(0);
    if constexpr (kRounds > 1) {
      MergeRound(0, work);
#pragma unroll
      for (int round = 1; round < kRounds; ++round) {
        if (round * Shared::kSumRows >= item.num_rows) break;
        gpu::SyncThreads(kDecodeConsumersBarrier, kThreads);  // the round before is merged
        leave_sums(round * Shared::kSumRows);
        MergeRound(round, work);
      }
    }
  }

  // As Softmax::RescaleSums, but rows 8 to 15 apart from the others: few work items have them.
  // exist: whether there are sums; else they are zero.
  static __device__ __forceinline__ void RescaleSums(bool exist, const float (&rescales)[2],
                                                     float (&sums)[kHeadSize / 8][4]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!gpu::AnyInWarp(exist && rescales[r] != 1)) continue;
#pragma unroll
      for (float(&block_sums)[4] : sums) {
        for (int e = 2 * r; e < 2 * r + 2; ++e) block_sums[e] *= rescales[r];
      }
    }
  }

  // Merges what the warps found of the rows of a round, of which this warp has one.
  __device__ __forceinline__ void MergeRound(int round, const DecodeWork& work) {
    static_assert(kRounds == 1 || Shared::kSumRows == kWarps, "a warp merges one row of a round");
    merged_[round] = MergeBefore(round, work, MergeWarps(warp_, work));
  }

  // A weight of zero times an infinite or NaN value would spoil a row's sum. If the tile holds such
  // values, this adds them to the rows that attend to them and then sets them to zero in the tile.
  __device__ void SetAsideNonFinite(const Softmax& softmax, int32_t begin,
                                    const PositionScales* scales, C* values,
                                    float (&sums)[kHeadSize / 8][4]) {
    const auto element = [&](int i) {
      return values + i / kHeadSize * CacheRows::kStride + i % kHeadSize;
    };
    const auto chunk = [&](int i) {
      return values + CacheRows::Offset(i / CacheRows::kChunks, i % CacheRows::kChunks);
    };
    constexpr int kChunks = kTile * CacheRows::kChunks, kCount = kTile * kHeadSize;
    if (!gpu::AnyInWarp(HoldsNonFinite<C>(lane_, kChunks, gpu::kWarpSize, chunk))) return;
    softmax.template AddNonFinite<kTile>(
        begin, sums,
        [&](int j, int n, int e) {
          return Products::Number(values + j * CacheRows::kStride, n, e);
        },
        [&](float value, int j) {
          return kIs8Bit<C> && !scales_are_uniform_ ? value * scales[j].v_scale : value;
        });
    __syncwarp();
    ClearNonFinite(lane_, kCount, gpu::kWarpSize, element);
    __syncwarp();
  }

  // The splits of a sequence whose partial results are merged: `step` apart.
  struct Merge {
    int32_t first;
    int32_t count;  // 0: none, but what the warps have found of a split
    int32_t step;
  };

  // Merges what the warps found of a split, and merges that with the splits before, or leaves it
  // for the thread block that merges all. The code is there once for all rows of the warp, and for
  // rows that this block merges last: it takes long to come, and most calls have one row.
  __device__ void FinishSplit(const DecodeWork& work) {
    const Item item = work.split.AsItem(numbers_.group);
    const int32_t in_group = static_cast<uint32_t>(item.split) % kSplitsOfGroup;
    ++num_splits_;
    const bool ends = item.split + 1 == item.num_splits;
    const bool ends_group = ends || in_group == kSplitsOfGroup - 1;
    bool is_whole = merges_ && ends && item.split == in_group;
    Merge merge = {};
    int32_t run = static_cast<uint32_t>(item.split + 1 - num_splits_) / kSplitsOfRun;
#pragma unroll 1
    do {
#pragma unroll 1
      for (int i = 0; i * kWarps + warp_ < item.num_rows; ++i) {
        const int row = i * kWarps + warp_;
        const RowPlace place(work.rows[row].token, work.rows[row].head);
        Row merged;
        if (merge.count > 0) {
          merged = MergeAll(item, place, merge);
        } else {
          merged = kRounds > 1 ? Merged(i) : MergeBefore(i, work, MergeWarps(row, work));
        }
        if (is_whole) {
          WriteRow<T>(p_, item.first_token + place.token, place.head, OwnColumns(),
                      p_.Attends(item.Tokens(), place.token), merged);
        } else if (merge.count > 0) {
          WritePartialResult(item, place, merge.first, merged, 0);
        } else if (!merges_ || ends_group || work.split.IsLast()) {
          WritePartialResult(item, place, item.split, merged, merges_ ? in_group : 0);
        } else {
#pragma unroll
          for (int j = 0; j < kRows; ++j) {
            if (i == j) merged_[j] = merged;
          }
        }
      }
      gpu::SyncThreads(kDecodeConsumersBarrier, kThreads);  // everyone has left the sums
    } while (!is_whole && work.split.IsLast() && ComesLast(work.split, &run, &merge, &is_whole));
    if (!work.split.IsLast()) return;
    num_splits_ = 0;
    merges_ = false;
  }

  // What a split has for the warp's row i, merged with the splits of its group before, if they are
  // this block's.
  __device__ __forceinline__ Row MergeBefore(int i, const DecodeWork& work,
                                             const Row& found) const {
    if (!merges_ || work.split.split % kSplitsOfGroup == 0) return found;
    Row merged = Merged(i);
    merged.Merge(found);
    return merged;
  }

  __device__ __forceinline__ Row Merged(int i) const {
    Row merged = merged_[0];
#pragma unroll
    for (int j = 1; j < kRows; ++j) {
      if (i == j) merged = merged_[j];
    }
    return merged;
  }

  // Finds what this block merges next, if it comes last somewhere: a run, or all runs. It counts
  // the block's splits of each run, from `run` on, whose partial results are written, and then that
  // a run is merged. If there is one run, that is all. Nobody waits: if the lengths change, so that
  // thread blocks disagree on the number of splits, rows are wrong or not written.
  __device__ bool ComesLast(const DecodeSplit& split, int32_t* run, Merge* merge, bool* is_whole) {
    const int32_t num_runs = CountRuns(split.num_splits);
#pragma unroll 1
    while (true) {
      const bool is_of_runs = merge->count > 0;  // a run is merged
      int32_t counter = 0, found = 1, total = num_runs;
      if (!is_of_runs) {
        const int32_t begin = *run * kSplitsOfRun, last = split.split;
        if (begin > last) return false;
        total = min(kSplitsOfRun, split.num_splits - begin);
        found = min(last + 1, begin + total) - max(last + 1 - num_splits_, begin);
        if (num_runs > 1) counter = ++*run;
        *merge = {begin, total, 1};
      } else {
        *merge = {0, num_runs, kSplitsOfRun};
      }
      if (num_runs > 1) gpu::SyncThreads(kDecodeConsumersBarrier, kThreads);  // is_last is read
      if (Completes(split, counter, found, total)) {
        *is_whole = is_of_runs || num_runs == 1;
        return true;
      }
      merge->count = 0;
      if (num_runs == 1) return false;
    }
  }

  static __device__ __forceinline__ int32_t CountRuns(int32_t num_splits) {
    return static_cast<uint32_t>(num_splits + kSplitsOfRun - 1) / kSplitsOfRun;
  }

  // Adds to a counter of a sequence and kv head. Returns whether it has the total now.
  __device__ bool Completes(const DecodeSplit& split, int32_t counter, int32_t found,
                            int32_t total) {
    if (threadIdx.x == 0) {
      const int64_t head = int64_t{split.sequence} * numbers_.num_kv_heads + split.kv_head;
      int32_t* arrivals = scratch_.arrivals + head * scratch_.arrivals_of_head + counter;
      const int32_t others = total - found;
      shared_.is_last = others == (gpu::kZerosArrivals ? gpu::AddInOrder(arrivals, found)
                                                       : AddFromNonce(arrivals, found, others));
      if (!gpu::kZerosArrivals && shared_.is_last) *arrivals = 0;
    }
    gpu::SyncThreads(kDecodeConsumersBarrier, kThreads);
    return shared_.is_last != 0;
  }

  // As gpu::AddInOrder, but for a number that counts as zero where its upper bits are not those of
  // the nonce. A good guess of the result saves a turn.
  __device__ int32_t AddFromNonce(int32_t* number, int32_t summand, int32_t guess) const {
    ::cuda::atomic_ref<int32_t, ::cuda::thread_scope_device> shared(*number);
    const auto nonce = static_cast<int32_t>(numbers_.nonce);
    int32_t seen = nonce | guess;
    while (true) {
      const int32_t before = seen >> kNonceShift == nonce >> kNonceShift ? seen ^ nonce : 0;
      const int32_t sum = nonce | (before + summand);
      if (shared.compare_exchange_strong(seen, sum, ::cuda::std::memory_order_acq_rel)) {
        return before;
      }
    }
  }

  // The factors lie where the warp's sums were, which are merged.
  __device__ Row MergeAll(const Item& item, const RowPlace& place, const Merge& merge) const {
    const int64_t first = PartialOf(scratch_, item, place) - item.split + merge.first;
    static_assert(sizeof(shared_.sums[0]) >= sizeof(MergeFactors), "they have room there");
    auto* factors = reinterpret_cast<MergeFactors*>(shared_.sums[gpu::Opaque(warp_)]);
    Row merged;
    MergeSplits<kSplitsAtOnce>(p_, scratch_, first, merge.count, merge.step, place.head,
                               OwnColumns(), factors, &merged);
    return merged;
  }

  // IsAligned holds for every call of this kernel.
  __device__ __forceinline__ LaneColumns OwnColumns() const {
    const int first = gpu::Opaque(lane_) * kColumnsAtOnce;  // no register of the turns has it
    return {first, static_cast<int>(p_.value_head_size), /*are_chunks=*/true};
  }

  // A split with a bad block id or tree mask is NaN, and so is what it is merged with.
  __device__ Row MergeWarps(int row, const DecodeWork& work) const {
    const MergedParts parts(kWarps, -kInfinity, [&](int w) { return shared_.states[w][row]; });
    const bool is_bad = work.is_bad != 0;
    const float nan = kInfinity - kInfinity;
    Row merged;
    merged.state = {parts.state.max, is_bad ? nan : parts.state.sum};
#pragma unroll
    for (int g = 0; g < Row::kGroups; ++g) {
      Columns<kColumnsAtOnce> sums[kWarps];
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sums[w] = SumsOf(w, row, g);
#pragma unroll
      for (int k = 0; k < kColumnsAtOnce; ++k) {
        float value = parts.Sum(kWarps, [&](int w) { return sums[w].column[k]; });
        // Without keys the scale may be NaN.
        if (kIs8Bit<C> && parts.state.sum != 0) value *= work.v_scale;
        merged.values[g].column[k] = is_bad ? nan : value;
      }
    }
    return merged;
  }

  // What a warp found in a group of the lane's columns.
  __device__ __forceinline__ auto SumsOf(int w, int row, int group) const {
    const float* sums = shared_.sums[w][row];
    const int column = lane_ * kColumnsAtOnce + group * kColumnStep;
    const auto at = [&](int k) { return sums + (Products::PlaceOf(column + k) ^ SwizzleOf(row)); };
    using Four = Columns<4>;
    if constexpr (kIs8Bit<C>) {  // every second column is adjacent
      const float2 even = *reinterpret_cast<const float2*>(at(0));
      const float2 odd = *reinterpret_cast<const float2*>(at(1));
      return Four{{even.x, odd.x, even.y, odd.y}};
    } else {
      return *reinterpret_cast<const Four*>(at(0));
    }
  }

  // Without it, all rows of the sums would begin in the same bank of shared memory.
  static __device__ __forceinline__ int SwizzleOf(int row) {
    return row * Products::kBanksOfGroups % gpu::kWarpSize;
  }

  // Writes the partial result of a split, and of as many before it as are moved there.
  __device__ void WritePartialResult(const Item& item, const RowPlace& place, int32_t split,
                                     const Row& row, int32_t num_moved) const {
    const int64_t partial_number = PartialOf(scratch_, item, place) - item.split + split;
    const int64_t index = partial_number * p_.num_heads + place.head;
    const LaneColumns columns = OwnColumns();
    columns.Write(row, scratch_.partials + index * p_.value_head_size + columns.first);
    if (lane_ == 0) scratch_.states[index] = row.state;
    if (0 < lane_ && lane_ <= num_moved) {
      scratch_.states[index - lane_ * p_.num_heads] = {-kInfinity, kMoved};
    }
  }

  const Params& p_;
  const Scratch& scratch_;
  const DecodeNumbers& numbers_;
  Shared& shared_;
  const int lane_;
  const int warp_;
  const bool scales_are_uniform_;
  uint32_t count_ = 0;  // tiles of the items before
  // The block's splits of this sequence and kv head: how many, and whether it has all of their
  // group so far, which it merges.
  int32_t num_splits_ = 0;
  bool merges_ = false;
  Row merged_[kRows] = {};
};

}  // namespace xla_gpu::paged_attention
