// The warps of the decode kernel that multiply, and merge what they found.
#pragma once

#include "../partial_results.cuh"
#include "shared.cuh"

namespace xla_gpu::paged_attention::decode {

// Parts of a row that are merged at once: a group's leaves, of which the first has more.
inline constexpr int kPartsAtOnce = LeafOf(kGroup);
static_assert(kPartsAtOnce <= gpu::kWarpSize, "each lane finds the factors of a part");

template <typename T, typename C, int kHeadSize, int kKib>
class Consumer {
  using Shared = decode::Shared<T, C, kHeadSize, kKib>;
  using QueryRows = typename Shared::QueryRows;
  using CacheRows = typename Shared::CacheRows;
  using TileState = typename Shared::TileState;
  static constexpr int kTile = Shared::kTile;
  using Query = typename Shared::Query;
  static constexpr int kOwnColumns = kHeadSize / kWarps;  // of V, of a warp
  using Products = WarpProducts<Query, C, kHeadSize, kStrip, QueryRows, CacheRows, kOwnColumns>;
  static constexpr int kBlocks = kTurn / 8;  // of 8 positions, of a turn
  static_assert(kWidestTile == Softmax::kBlockPositions, "turns begin with a whole block");

  static constexpr int kPartsOnTheirWay = kHeadSize > 128 ? 6 : 12;  // as registers allow

  // What is known of a row that is merged, with the columns of a lane.
  using Row = PartOfRow<kHeadSize / gpu::kWarpSize>;

  // What the warp has found for its columns: a leaf, or several that are added up.
  struct Sums {
    RowState states[2];
    float values[kOwnColumns / 8][4];

    __device__ __forceinline__ Sums Plus(const Sums& part) const {
      Sums sums = *this;
      sums.Add(part);
      return sums;
    }
    __device__ __forceinline__ void Add(const Sums& part) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const Fold fold(&states[r], part.states[r]);
#pragma unroll
        for (int n = 0; n < kOwnColumns / 8; ++n) {
#pragma unroll
          for (int e = 2 * r; e < 2 * r + 2; ++e) {
            values[n][e] = fold.Add(values[n][e], part.values[n][e]);
          }
        }
      }
    }
  };

 public:
  __device__ Consumer(const Params& p, const Scratch& scratch, const Numbers& numbers,
                      Shared* shared)
      : p_(p),
        scratch_(scratch),
        numbers_(numbers),
        shared_(*shared),
        lane_(threadIdx.x % gpu::kWarpSize),
        warp_(threadIdx.x / gpu::kWarpSize),
        leaves_scale_out_(Shared::LeavesScaleOut(p)) {}

  __device__ void Run() {
    ResetCounter(scratch_);
    if (numbers_.is_last) OtherRows<T>(p_, numbers_).Write();
    for (uint32_t n = 0;; ++n) {  // one register, not two
      const auto stage = Shared::ItemState::Of(n);
      shared_.work_barriers.WaitFilled(stage);
      Work& work = shared_.work[stage.index];
      if (work.split.IsEnd()) return;
      Compute(work, shared_.query[stage.index], shared_.query_factors[stage.index]);
      if (!work.split.IsWhole()) MergeMembers(&work);
      XLA_GPU_STAMP(Last, kFinished, warp_ == 0);
      shared_.work_barriers.Free(stage);
    }
  }

 private:
  // Computes a split. Its leaves are added up from the beginning of their group on, and groups from
  // the beginning of the sequence on. What cannot be added up here becomes a part.
  __device__ void Compute(const Work& work, const Query* query, const float* query_factors) {
    const Split& split = work.split;
    const Item& item = work.item;
    Softmax softmax(p_, item, lane_ / 4, work.rows[lane_ / 4].range,
                    work.rows[lane_ / 4 + 8].range);
    if constexpr (kIs8Bit<C>) {
      for (int r = 0; r < 2; ++r) softmax.MultiplyScale(r, query_factors[lane_ / 4 + 8 * r]);
    }
    const CommonRange common = work.common;
    const int32_t begin = split.BeginTile<kTile>() * kTile, end = split.end, to = split.to;
    const bool begins_sequence = split.from == split.sequence_begin;
    Sums group;
    [[maybe_unused]] Sums total;      // if it is not in memory
    int32_t group_from = split.from;  // where the group's sums begin
    int32_t total_end = 0;            // where the total's end. 0: there are none
#pragma unroll 1
    for (int32_t at = split.from; at < to;) {
      const int32_t leaf_end = min(static_cast<uint32_t>(LeafEnd(at)), to);
      Products leaf;
      softmax.BeginLeaf();
      const int32_t last = min(leaf_end, end);
#pragma unroll 1
      for (int32_t position = max(at, begin); position < last; position += kTurn) {
        TakeTurn(item, common, query, position, min(last, position + kTurn), &softmax, &leaf);
      }
      const Sums found = SumsOf(softmax, leaf);
      if (at == group_from) {
        group = found;
      } else {
        group.Add(found);
      }
      at = leaf_end;
      // Whether the group's sums begin where the group does.
      const bool ends = at == to, ends_group = static_cast<uint32_t>(at) % kGroup == 0;
      const bool begins_group =
          group_from == split.sequence_begin || static_cast<uint32_t>(group_from) % kGroup == 0;
      if (begins_group && !ends_group && !ends) continue;
      if (ends && work.is_bad != 0) {
        group.states[0].sum = group.states[1].sum = kInfinity - kInfinity;
      }
      const bool joins = begins_sequence && (ends_group || split.IsWhole());
      if (joins) {
        if (total_end > 0) group = Total(total).Plus(group);
        SetTotal(group, &total);
        total_end = at;
      }
      int32_t part_from = group_from, part_end = at;
      group_from = at;
      if (joins) {
        if (!ends || split.IsWhole()) continue;
        part_end = 0;
      }
#pragma unroll 1
      while (true) {  // the code is there once
        if (part_end > 0) WritePart(work, group, part_from, part_end);
        if (!ends || total_end == 0) break;
        group = Total(total);
        part_from = split.from;
        part_end = total_end;
        total_end = 0;
      }
    }
    XLA_GPU_STAMP(Last, kLastTile, warp_ == 0);
    if (split.IsWhole()) WriteOutput(work, Total(total));
  }

  // The sums of whole groups lie in memory where two thread blocks share a multiprocessor, for want
  // of registers.
  __device__ __forceinline__ Sums Total(const Sums& in_registers) const {
    if constexpr (!Shared::kHasTotals) {
      return in_registers;
    } else {
      union {
        float4 fours[Shared::kTotalFours];
        Sums sums;
      };
#pragma unroll
      for (int i = 0; i < Shared::kTotalFours; ++i) fours[i] = shared_.totals[i][threadIdx.x];
      return sums;
    }
  }
  __device__ __forceinline__ void SetTotal(const Sums& total, Sums* in_registers) const {
    if constexpr (!Shared::kHasTotals) {
      *in_registers = total;
    } else {
      union {
        float4 fours[Shared::kTotalFours];
        Sums sums;
      };
      sums = total;
#pragma unroll
      for (int i = 0; i < Shared::kTotalFours; ++i) shared_.totals[i][threadIdx.x] = fours[i];
    }
  }

  __device__ __forceinline__ Sums SumsOf(const Softmax& softmax, const Products& leaf) const {
    Sums sums;
    for (int r = 0; r < 2; ++r) sums.states[r] = softmax.LeafState(r);
#pragma unroll
    for (int n = 0; n < kOwnColumns / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums.values[n][e] = leaf.sums[n][e];
    }
    return sums;
  }

  // The stage of a tile of the turn.
  __device__ __forceinline__ TileState StageOf(int tile) const {
    const int index = tiles_.index + tile;
    if (index < Shared::kStages) return {index, tiles_.phase};
    return {index - Shared::kStages, tiles_.phase ^ 1};
  }

  // Takes the positions [begin, end) of a leaf.
  __device__ __forceinline__ void TakeTurn(const Item& item, const CommonRange& common,
                                           const Query* query, int32_t begin, int32_t end,
                                           Softmax* softmax, Products* leaf) {
    const int num_strips = static_cast<unsigned>(end - begin + kStrip - 1) / kStrip;
    constexpr int kStripsOfTile = kTile / kStrip;
    auto& exchanged = shared_.logits[turn_];
    turn_ ^= 1;
    {
      float own[2][4];
      if (warp_ < num_strips) {
        const TileState stage = StageOf(warp_ / kStripsOfTile);
        const int first = warp_ % kStripsOfTile * kStrip;
        const int32_t position = begin + warp_ * kStrip;
        shared_.tiles_barriers.WaitFilled(stage);
        XLA_GPU_STAMP(First, kFirstTile, warp_ == 0);
        for (auto& block : own) block[0] = block[1] = block[2] = block[3] = 0;
        Products::MultiplyByKeys(query, 0, shared_.tiles[stage.index], first, own);
        if (kIs8Bit<C> && !leaves_scale_out_) {
          Products::ScaleLogits(shared_.scales[stage.index] + first, own);
        }
        softmax->ToLogits(position, /*masked=*/!common.Contains(position, position + kStrip), own);
      } else {
        for (auto& block : own) block[0] = block[1] = block[2] = block[3] = -kInfinity;
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        exchanged[warp_][r][lane_] = {own[0][2 * r], own[0][2 * r + 1], own[1][2 * r],
                                      own[1][2 * r + 1]};
      }
    }
    gpu::SyncThreads(kConsumersBarrier, kThreads);
    float weights[kBlocks][4];
#pragma unroll
    for (int n = 0; n < kBlocks; n += 2) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float4 four = exchanged[n / 2][r][lane_];
        weights[n][2 * r] = four.x;
        weights[n][2 * r + 1] = four.y;
        weights[n + 1][2 * r] = four.z;
        weights[n + 1][2 * r + 1] = four.w;
      }
    }
    float factors[2];
    uint32_t drops[2] = {};
    const float slack = kIs8Bit<C> && !leaves_scale_out_ ? kSlack<BFloat16> : kSlack<Query>;
    const bool exceed = softmax->Exceeds(weights, softmax->ScalesLate(), slack, factors);
    if (exceed) {
      softmax->template Follow<0>(factors, slack, weights, drops);
      Shrink(drops, 0, leaf);
    }
    softmax->template WeighLeaf<0, 4>(factors, weights);
    if (exceed) softmax->template Follow<4>(factors, slack, weights, drops);
    softmax->template WeighLeaf<4, 8>(factors, weights);
    if constexpr (!kIsInteger<C>) {
      if (common.RowsDiffer(item, begin, end)) {
        for (int n = 0; n * kStrip < end - begin; ++n) {
          SetAsideNonFinite(*softmax, begin + n * kStrip, StageOf(n / kStripsOfTile),
                            n % kStripsOfTile * kStrip, leaf);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kWarps; ++n) {
      if (n >= num_strips) break;
      if (n == 2 && gpu::AnyInWarp((drops[0] | drops[1]) > 0xff)) Shrink(drops, 1, leaf);
      const TileState stage = StageOf(n / kStripsOfTile);
      const int first = n % kStripsOfTile * kStrip;
      auto& of_strip = *reinterpret_cast<float(*)[2][4]>(&weights[2 * n]);
      if (kIs8Bit<C> && !leaves_scale_out_) {
        Products::ScaleWeights(shared_.scales[stage.index] + first, of_strip);
        leaf->template AddValues<BFloat16>(ValuesOf(stage), first, of_strip);
      } else {
        leaf->template AddValues<Query>(ValuesOf(stage), first, of_strip);
      }
      if (first + kStrip == kTile || n + 1 == num_strips) shared_.tiles_barriers.Free(stage);
    }
    tiles_ = StageOf((num_strips + kStripsOfTile - 1) / kStripsOfTile);
  }

  // The warp's columns of V of a tile.
  __device__ __forceinline__ C* ValuesOf(TileState stage) const {
    return shared_.tiles[stage.index] + (p_.is_latent ? 0 : kHeadSize) + warp_ * kOwnColumns;
  }

  // Where references have followed, what was added before the block shrinks.
  static __device__ __forceinline__ void Shrink(const uint32_t (&drops)[2], int block,
                                                Products* leaf) {
    const float factors[2] = {Softmax::Shrinks(drops[0], block), Softmax::Shrinks(drops[1], block)};
    Softmax::RescaleAll(factors, leaf->sums);
  }

  // A weight of zero times an infinite or NaN value would spoil a row's sum. If the 16 positions of
  // a tile from row `first` on hold such values in the warp's columns, this adds them to the rows
  // that attend to them and then sets them to zero in the tile.
  __device__ void SetAsideNonFinite(const Softmax& softmax, int32_t begin, TileState stage,
                                    int first, Products* leaf) {
    C* values = ValuesOf(stage) + first * CacheRows::kStride;
    [[maybe_unused]] const PositionScales* scales =
        shared_.scales[stage.index] + (kIs8Bit<C> ? first : 0);
    constexpr int kChunks = kOwnColumns / CacheRows::kChunk;  // of a row
    const auto element = [&](int i) {
      return values + i / kOwnColumns * CacheRows::kStride + i % kOwnColumns;
    };
    const auto chunk = [&](int i) { return values + CacheRows::Offset(i / kChunks, i % kChunks); };
    constexpr int kNumChunks = kStrip * kChunks;
    if (!gpu::AnyInWarp(HoldsNonFinite<C>(lane_, kNumChunks, gpu::kWarpSize, chunk))) return;
    softmax.template AddNonFinite<kStrip>(
        begin, leaf->sums,
        [&](int j, int n, int e) {
          return Products::Number(values + j * CacheRows::kStride, n, e);
        },
        [&](float value, int j) {
          return kIs8Bit<C> && !leaves_scale_out_ ? value * scales[j].v_scale : value;
        });
    __syncwarp();
    ClearNonFinite(lane_, kStrip * kOwnColumns, gpu::kWarpSize, element);
    __syncwarp();
  }

  // Calls write(column, columns) for adjacent columns of the lane's row r.
  template <typename Write>
  __device__ __forceinline__ void ForColumns(const Sums& sums, int r, const Write& write) const {
    constexpr int kStep = kIs8Bit<C> ? 2 : 1;
#pragma unroll
    for (int n = 0; n < kOwnColumns / 8; n += kStep) {
      const int column = warp_ * kOwnColumns + Products::Column(n, 0);
      if (column >= p_.value_head_size) break;
      const float first = sums.values[n][2 * r], second = sums.values[n][2 * r + 1];
      if constexpr (kIs8Bit<C>) {  // every second column is adjacent
        write(column, Columns<4>{{first, sums.values[n + 1][2 * r], second,
                                  sums.values[n + 1][2 * r + 1]}});
      } else {
        write(column, Columns<2>{{first, second}});
      }
    }
  }

  // Writes what was found at positions [from, to), whole units, to the slot of the first one. The
  // slots of the others have moved there.
  __device__ void WritePart(const Work& work, const Sums& sums, int32_t from, int32_t to) const {
    const Split& split = work.split;
    const int num_rows = work.item.num_rows;
    const int64_t slot = split.SlotOf(from);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = lane_ / 4 + 8 * r;
      if (row >= num_rows) break;
      const int64_t index = IndexOf(work.rows[row], slot);
      ForColumns(sums, r, [&](int column, const auto& columns) {
        WriteTo(scratch_.partials + index * p_.value_head_size + column, columns);
      });
      if (warp_ == 0 && lane_ % 4 == 0) scratch_.states[index] = sums.states[r];
    }
    const int num_units = split.CountUnits(from, to);
#pragma unroll 1
    for (int row = warp_; row < num_rows && num_units > 1; row += kWarps) {
#pragma unroll 1
      for (int n = 1 + lane_; n < num_units; n += gpu::kWarpSize) {
        const int64_t index = IndexOf(work.rows[row], slot + n * split.q_len);
        scratch_.states[index] = {kNoReference, kMoved};
      }
    }
  }

  // The number of a row in the scratch.
  __device__ __forceinline__ int64_t IndexOf(const QueryRow& row, int64_t slot) const {
    return (slot + row.token) * p_.num_heads + row.head;
  }

  // What a row's sums of values are multiplied by in the end. Writes its log-sum-exp, if `writes`.
  __device__ __forceinline__ float Finish(const Work& work, int row, const RowState& found,
                                          bool writes) const {
    const QueryRow& of_row = work.rows[row];
    const RowState state = {found.max == kNoReference ? -kInfinity : found.max, found.sum};
    const WithSink finished(SinkOf(p_, of_row.head), state);
    const bool attends = p_.Attends(work.item.Tokens(), of_row.token);
    float factor = finished.weight / NonZeroSum(attends, finished.state.sum);
    // Without keys the scale may be NaN.
    if (kIs8Bit<C> && state.sum != 0) factor *= work.v_scale;
    if (writes) WriteLse(p_, work.split.first_token + of_row.token, of_row.head, finished.state);
    return factor;
  }

  __device__ void WriteOutput(const Work& work, const Sums& sums) const {
    const int num_rows = work.split.q_len * numbers_.heads_per_kv;
    float factors[2];
#pragma unroll 1
    for (int r = 0; r < 2; ++r) {  // the code is there once
      const int row = lane_ / 4 + 8 * r;
      float factor = 0;
      if (row < num_rows) {
        const RowState state = r == 0 ? sums.states[0] : sums.states[1];
        factor = Finish(work, row, state, warp_ == 0 && lane_ % 4 == 0);
      }
      factors[0] = r == 0 ? factor : factors[0];
      factors[1] = factor;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = lane_ / 4 + 8 * r;
      if (row >= num_rows) break;
      const QueryRow& of_row = work.rows[row];
      T* output = static_cast<T*>(p_.output) +
                  p_.OutputOffset(work.split.first_token + of_row.token, of_row.head);
      ForColumns(sums, r, [&](int column, auto columns) {
        for (float& x : columns.column) x = gpu::Fma(x, factors[r], 0);
        WriteTo(output + column, columns);
      });
    }
  }

  // Merges for each member of a family. The split becomes the member's, and the first rows are as
  // good as its own: they have the same tokens of a sequence, and the same heads.
  __device__ void MergeMembers(Work* work) {
    const int32_t members = work->split.Members();
#pragma unroll 1
    for (int32_t member = 1;; ++member) {
      Merge(*work);
      if (member == members) return;
      gpu::SyncThreads(kConsumersBarrier, kThreads);  // everyone has read the split
      if (threadIdx.x == 0) work->split.GoToMember(work->contexts[member]);
      gpu::SyncThreads(kConsumersBarrier, kThreads);
    }
  }

  // Arrives with what the block has found of a sequence and kv head. Who comes last merges what all
  // have. Of a long sequence blocks merge runs of groups side by side first. Nobody waits: if the
  // lengths change, so that thread blocks disagree, rows are wrong or not written.
  __device__ void Merge(const Work& work) {
    const Split& split = work.split;
    const int32_t begin = split.sequence_begin, end = split.context_len;
    const int32_t first_group = static_cast<uint32_t>(begin) / kGroup;
    const int32_t num_units = split.CountUnits(begin, end);
    const bool has_runs = num_units > kMostAtOnce && !split.UnitsAreGroups();
    const auto run_of = [&](int32_t position) {
      const uint32_t group = static_cast<uint32_t>(position) / kGroup - first_group;
      return static_cast<int32_t>(numbers_.groups_of_run.Quotient(group));
    };
    int32_t run = run_of(split.from), completed = 0;
    const int32_t last_run = run_of(split.to - 1);
#pragma unroll 1
    while (true) {
      const bool is_run = has_runs && run <= last_run;
      int32_t from = begin, to = end, counter = 0, found, count;
      if (is_run) {
        const uint32_t groups = numbers_.groups_of_run.number;
        from = max(begin, (first_group + run * groups) * kGroup);
        to = min(static_cast<uint32_t>(end), (first_group + (run + 1) * groups) * kGroup);
        counter = ++run;
      }
      if (is_run || !has_runs) {
        found = split.CountUnits(max(from, split.from), min(to, split.to));
        count = split.CountUnits(from, to);
      } else {
        found = completed;
        count = run_of(end - 1) + 1;
      }
      if (found == 0) return;
      const bool is_own = is_run && found == count;  // its groups are parts already
      if (!is_own && !Completes(split, counter, found, count)) {
        if (!is_run) return;
        continue;
      }
      ++completed;
      if (is_own) continue;
      MergeGroups(work, static_cast<uint32_t>(from) / kGroup,
                  static_cast<uint32_t>(to - 1) / kGroup + 1,
                  is_run                               ? kAsParts
                  : has_runs || split.UnitsAreGroups() ? kOfGroups
                                                       : kOfLeaves);
      if (!is_run) return;
    }
  }

  // Adds to a counter of a sequence and kv head. Returns whether it has the total now.
  __device__ bool Completes(const Split& split, int32_t counter, int32_t found, int32_t total) {
    gpu::SyncThreads(kConsumersBarrier, kThreads);  // everyone has written, and read is_last
    if (threadIdx.x == 0) {
      const int64_t head = int64_t{split.sequence} * numbers_.num_kv_heads + split.kv_head;
      int32_t* arrivals = scratch_.arrivals + head * scratch_.arrivals_of_head + counter;
      shared_.is_last = total - found == gpu::AddInOrder(arrivals, found);
    }
    gpu::SyncThreads(kConsumersBarrier, kThreads);
    return shared_.is_last != 0;
  }

  // What the parts are that are merged: leaves, groups, or the leaves of groups that become parts.
  enum Parts { kOfLeaves, kOfGroups, kAsParts };

  // Merges the parts of groups, and the groups, for the warp's rows: every kWarps-th.
  __device__ void MergeGroups(const Work& work, int32_t first_group, int32_t end_group,
                              Parts parts) const {
    const Split& split = work.split;
    const int num_rows = split.q_len * numbers_.heads_per_kv;
    const bool are_groups = split.UnitsAreGroups();
#pragma unroll 1
    for (int row = warp_; row < num_rows; row += kWarps) {
      Row total;
#pragma unroll 1
      for (int32_t g = first_group; g < end_group; ++g) {
        const int32_t from = max(split.sequence_begin, g * kGroup);
        const int32_t group_end =
            min(static_cast<uint32_t>(split.context_len), static_cast<uint32_t>(GroupEnd(from)));
        const int64_t first = IndexOf(work.rows[row], split.SlotOf(from));
        int32_t count = split.CountUnits(from, group_end), step = split.q_len, second = step;
        if (parts == kOfGroups) {  // all at once
          second *= count;
          step *= are_groups ? 1 : kGroup / kLongLeaf;
          count = end_group - first_group;
          g = end_group;
        }
        Row group;
        group.state = Softmax::kNoLogits;
        AddParts(first, second, step, count, &group);
        if (parts == kAsParts) {
          const LaneColumns columns = OwnColumns();
          columns.Write(group, scratch_.partials + first * p_.value_head_size + columns.first);
          if (lane_ == 0) scratch_.states[first] = group.state;
        } else if (from == split.sequence_begin) {
          total = group;
        } else {
          const Fold fold(&total.state, group.state);
          total.AddValues(fold, group.values);
        }
      }
      if (parts != kAsParts) WriteRow(work, row, total);
    }
  }

  // Adds `count` parts to a row, from the left. The first is at `first`; the second is so many
  // slots behind it, and each later one `step` slots behind the one before. All that are added at
  // once are on their way before the first is; so are their factors, each lane's of another part.
  __device__ __forceinline__ void AddParts(int64_t first, int32_t second, int32_t step,
                                           int32_t count, Row* row) const {
    const LaneColumns columns = OwnColumns();
    auto* factors = &shared_.logits[0][gpu::Opaque(warp_)][0][0];  // of another turn
    // A token's query would have 8 GiB otherwise.
    const auto stride = static_cast<uint32_t>(p_.num_heads * p_.value_head_size);
    const auto behind_first = [&](int32_t n) {
      return int64_t{n == 0 ? 0 : second + (n - 1) * step} * p_.num_heads;
    };
#pragma unroll 1
    for (int32_t begin = 0; begin < count; begin += kPartsAtOnce) {
      // Without a condition: what has moved is loaded, too, and the last one again and again. Else
      // ptxas waits for each part to move it to other registers.
      Columns<kColumnsAtOnce> parts[kPartsOnTheirWay][Row::kGroups];
      const float* from = scratch_.partials + (first + behind_first(begin)) * p_.value_head_size;
      const auto load = [&](int n) {
#pragma unroll
        for (int g = 0; g < Row::kGroups; ++g) {
          const int column = columns.first + g * kColumnStep;
          parts[n % kPartsOnTheirWay][g] = *reinterpret_cast<const Columns<kColumnsAtOnce>*>(
              from + (column < columns.count ? column : 0));
        }
        const int32_t next = begin + n + 1;
        if (next < count) from += uint64_t{stride} * (next == 1 ? second : step);
      };
#pragma unroll
      for (int n = 0; n < kPartsOnTheirWay; ++n) load(n);
      float2 loaded = {kNoReference, kMoved};  // at once: a RowState
      if (lane_ < kPartsAtOnce && begin + lane_ < count) {
        loaded =
            *reinterpret_cast<const float2*>(scratch_.states + first + behind_first(begin + lane_));
      }
      const bool has_moved = loaded.y == kMoved;
      const uint32_t there = gpu::LanesWith(!has_moved);
      const Fold own = FoldOfLane(lane_, loaded.x, &row->state.max);
      // What has moved, or is not there, changes nothing.
      factors[lane_] = {own.before, has_moved ? 0.0f : own.factor, has_moved ? 0.0f : loaded.y, 0};
      __syncwarp();
#pragma unroll
      for (int n = 0; n < kPartsAtOnce; ++n) {
        if (n % 4 == 0 && begin + n >= count) break;
        const float4 of_part = factors[n];
        const Fold fold(of_part.x, of_part.y);
        row->state.sum = fold.Add(row->state.sum, of_part.z);
        auto& part = parts[n % kPartsOnTheirWay];
        const bool is_there = (there >> n & 1) != 0;
#pragma unroll
        for (auto& columns_of_part : part) {
          for (float& x : columns_of_part.column) x = is_there ? x : 0;
        }
        row->AddValues(fold, part);
        if (n + kPartsOnTheirWay < kPartsAtOnce) load(n + kPartsOnTheirWay);
      }
      __syncwarp();
    }
  }

  __device__ __forceinline__ void WriteRow(const Work& work, int row, Row merged) const {
    const float factor = Finish(work, row, merged.state, lane_ == 0);
#pragma unroll
    for (auto& four : merged.values) {
      for (float& x : four.column) x = gpu::Fma(x, factor, 0);
    }
    const QueryRow& of_row = work.rows[row];
    const LaneColumns columns = OwnColumns();
    columns.Write(merged, static_cast<T*>(p_.output) + columns.first +
                              p_.OutputOffset(work.split.first_token + of_row.token, of_row.head));
  }

  // The lane's columns of a row that is merged. IsAligned holds for every call of this kernel.
  __device__ __forceinline__ LaneColumns OwnColumns() const {
    const int first = gpu::Opaque(lane_) * kColumnsAtOnce;  // no register of the turns has it
    return {first, static_cast<int>(p_.value_head_size), /*are_chunks=*/true};
  }

  // A sequence with at most so many units is merged by one thread block.
  static constexpr int32_t kMostAtOnce = 2 * kPartsAtOnce;

  const Params& p_;
  const Scratch& scratch_;
  const Numbers& numbers_;
  Shared& shared_;
  const int lane_;
  const int warp_;
  const bool leaves_scale_out_;
  TileState tiles_;  // of the next turn's first tile
  int turn_ = 0;     // the place of its logits
};

}  // namespace xla_gpu::paged_attention::decode
