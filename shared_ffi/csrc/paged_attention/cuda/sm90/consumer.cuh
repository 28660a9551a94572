// A consumer of the prefill kernel: computes its rows of the work items from the places that
// shared.cuh declares, and frees these.
#pragma once

#include "../partial_results.cuh"
#include "../softmax.cuh"
#include "shared.cuh"

namespace xla_gpu::paged_attention::sm90 {

// Transposes four words of four adjacent lanes: lane l gets the words l % 4 of all four.
__device__ __forceinline__ void TransposeInQuads(uint32_t (&words)[4]) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool is_upper = (threadIdx.x & step) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & step) != 0) continue;
      const uint32_t other = gpu::ShuffleXor(is_upper ? words[i] : words[i + step], step);
      words[i] = is_upper ? other : words[i];
      words[i + step] = is_upper ? words[i + step] : other;
    }
  }
}

// Computes a consumer's rows of one work item.
template <typename T, typename C, int kHeadSize>
class Consumer {
  using Shared = sm90::Shared<T, C, kHeadSize>;
  using QueryRows = typename Shared::QueryRows;
  using CacheRows = typename Shared::CacheRows;
  using Element = typename Shared::Element;
  using QueryState = typename Shared::QueryState;
  using TileState = typename Shared::TileState;
  static constexpr int kTile = Shared::kTile;
  static constexpr int kColumns = kHeadSize % 128 == 0 ? 128 : 64;       // of a product with values
  static constexpr bool kSeldomBegins = !kIs8Bit<C> || kHeadSize == 64;  // of Softmax::ToLogits

 public:
  __device__ Consumer(const Params& p, const Scratch& scratch, const Work& work, int consumer,
                      const Maps& maps, Shared* shared)
      : p_(p),
        scratch_(scratch),
        maps_(maps),
        item_(work.item),
        rows_(work.rows),
        work_(work),
        shared_(*shared),
        consumer_(consumer),
        turn_barrier_(kIs8Bit<C> ? kTurnBarrier + consumer
                                 : kTurnBarrier - 1 + static_cast<int>(threadIdx.x) / kThreads),
        next_turn_barrier_(Kept(2 * kTurnBarrier + kConsumers - 1 - turn_barrier_)),
        query_start_(Kept(QueryRows::StartOf(shared->query[consumer]))),
        keys_start_(Kept(CacheRows::StartOf(shared->keys[0]))),
        common_(work.common),
        softmax_(p, work.rows, RowOf(0), RangeOf(RowOf(0)), RangeOf(RowOf(1))) {}

  // `stage` is the stage of the item's first KV tile, and becomes that of the next item's first KV
  // tile.
  __device__ __forceinline__ void Compute(TileState* stage) {
    int32_t tile = Tiles(item_, kTile).begin;
    for (const Tiles own(rows_, kTile); tile < own.begin; ++tile) Skip(stage);
    PipelineBarriers<1>& query_barriers = shared_.query_barriers[consumer_];
    query_barriers.WaitFilled(QueryStage());
    if constexpr (kIs8Bit<C>) {
      const float* factors = shared_.query_factors[consumer_];
      for (int r = 0; r < 2; ++r) softmax_.MultiplyScale(r, factors[RowOf(r)] * work_.k_scale);
    }
    RowState states[2] = {Softmax::kNoLogits, Softmax::kNoLogits};
    if (rows_.begin < rows_.end) {
      tile = ComputeTiles(stage);
      AddTotals(states);
    } else {
      query_barriers.Free(QueryStage());
    }
    for (const Tiles all(item_, kTile); tile < all.end; ++tile) Skip(stage);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const RowState state = Softmax::Finished(states[r]);
      item_.num_splits > 1 ? WritePartialResult(r, state) : WriteRow(r, state);
    }
  }

 private:
  __device__ __forceinline__ QueryState QueryStage() const { return QueryState::Of(work_.number); }

  // The tiles that hold positions of the consumer's rows. What they follow from is in shared
  // memory.
  __device__ __forceinline__ int32_t FirstTile() const { return rows_.begin / kTile; }
  __device__ __forceinline__ int32_t LastTile() const { return (rows_.end - 1) / kTile; }

  // Whether a leaf (order.h) begins with a tile that is not the first one of all.
  static __device__ __forceinline__ bool BeginsLeaf(int32_t tile) {
    return LeafEnd(tile * kTile - 1) == tile * kTile;
  }

  // Computes these tiles. Returns the tile after them.
  __device__ __forceinline__ int32_t ComputeTiles(TileState* stage) {
    float logits[kTile / 8][4];
    uint32_t weights[kTile / 16][4];
    int32_t tile = FirstTile();
    TakeFirstTurn(tile, *stage, logits, weights);
    *stage = stage->Next();
    ++tile;
    for (;;) {
      int32_t count = CountPlainTurns(tile);
      if (count > 0 && (!kIs8Bit<C> || !BeginsLeaf(tile))) {
        if constexpr (kIs8Bit<C>) {
          // There are no registers for a loop of plain turns.
          TakePlainTurn<false>(tile, *stage, logits, weights);
          *stage = stage->Next();
          ++tile;
          continue;
        } else {
          if (BeginsLeaf(tile)) {
            TakePlainTurn<true>(tile, *stage, logits, weights);
            *stage = stage->Next();
            ++tile;
            --count;
          }
          if (count > 0) TakePlainTurns(count, stage, logits, weights);
          tile += count;
          continue;
        }
      }
      WaitForValues(tile - 1, *stage);
      if (tile > LastTile()) break;
      TakeAnyTurn(tile, *stage, logits, weights);
      *stage = stage->Next();
      ++tile;
    }
    gpu::SyncThreads(kThreadsBarrier + consumer_, kThreads);  // in place of a turn's
    StartSums(*stage, weights);
    gpu::WaitProducts<0>(sums_);
    FreeValues(*stage);
    return tile;
  }

  // How many plain turns there are from that of a tile on, at most up to the end of a leaf: all
  // rows attend to all positions of the tile and of the one before. The last turn is not one of
  // them, although it may be so: after its product the query is free. Nor is one that begins a
  // group.
  __device__ __forceinline__ int32_t CountPlainTurns(int32_t tile) const {
    const bool is_plain = FirstTile() < tile && common_.begin <= (tile - 1) * kTile;
    // With a cache of 8 bits each row has a scale of its own.
    const bool scale_late = kIs8Bit<C> ? work_.scale_late : softmax_.ScalesLate();
    if (!is_plain || !scale_late || Shared::KeysHoldValues(p_)) return 0;
    if (tile % (kGroup / kTile) == 0) return 0;
    const int32_t end = min(common_.end, LeafEnd(tile * kTile)) / kTile;
    return max(0, min(end, LastTile()) - tile);
  }

  // The turn of the first tile: no values come before it, nor references.
  __device__ __forceinline__ void TakeFirstTurn(int32_t tile, TileState stage,
                                                float (&logits)[kTile / 8][4],
                                                uint32_t (&weights)[kTile / 16][4]) {
    WaitForKeys(stage);
    WaitForTurn();
    StartLogits(stage, logits);
    PassTurn();
    gpu::WaitProducts<0>(logits);
    FreeKeys(stage, tile);
    const int32_t begin = tile * kTile, end = begin + kTile;
    softmax_.template ToLogits<kSeldomBegins>(begin, /*masked=*/!common_.Contains(begin, end),
                                              logits, gpu::Opaque(threadIdx.x));
    float factors[2], shrinks[2];
    softmax_.FactorsOf(softmax_.ScalesLate(), factors);
    WeighBlocks(stage, factors, logits, shrinks);
    Pack(logits, weights);
  }

  // A turn starts the product with K of a tile, and that with V of the tile before it. It turns the
  // logits into weights. Where the tile begins a leaf, it ends the one before.
  __device__ __forceinline__ void TakeAnyTurn(int32_t tile, TileState stage,
                                              float (&logits)[kTile / 8][4],
                                              uint32_t (&weights)[kTile / 16][4]) {
    WaitForKeys(stage);
    WaitForTurn();
    StartLogits(stage, logits);
    StartSums(stage, weights);
    PassTurn();
    gpu::WaitProducts<1>(logits);
    FreeKeys(stage, tile);
    const bool ends_leaf = BeginsLeaf(tile);
    if (ends_leaf) {
      KeepStates();
      softmax_.BeginLeaf();
    }
    const int32_t begin = tile * kTile, end = begin + kTile;
    softmax_.template ToLogits<kSeldomBegins>(begin, /*masked=*/!common_.Contains(begin, end),
                                              logits, gpu::Opaque(threadIdx.x));
    float factors[2];
    const bool follows = softmax_.Exceeds(logits, softmax_.ScalesLate(), kSlack<Element>, factors);
    float shrinks[2];
    if (follows) {
      WeighBlocks(stage, factors, logits, shrinks);
    } else {
      softmax_.template WeighLeaf<0, kTile / 8>(factors, logits);
    }
    gpu::KeepRegisters(logits);
    gpu::WaitProducts<0>(sums_);
    gpu::KeepRegisters(weights);
    FreeValues(stage);
    if (ends_leaf) EndLeaf(tile);
    if (follows && !ends_leaf) Softmax::RescaleAll(shrinks, sums_);
    Pack(logits, weights);
  }

  // Turns with tiles of which all rows attend to all positions: the same without what masks and
  // other features need. Most turns of a long query are of this kind. None begins a leaf.
  __device__ __forceinline__ void TakePlainTurns(int32_t count, TileState* stage_of_first,
                                                 float (&logits)[kTile / 8][4],
                                                 uint32_t (&weights)[kTile / 16][4]) {
    TileState stage = *stage_of_first;
    count = gpu::Opaque(count);
#pragma unroll 1
    do {
      // The turns of a round through the places.
      const int end = gpu::Opaque(min(stage.index + count, Shared::kStages));
      count -= end - stage.index;
#pragma unroll 1
      do {
        TakePlainTurn<false>(0, stage, logits, weights);
      } while (++stage.index != end);
      if (end == Shared::kStages) stage = {0, stage.phase ^ 1};
    } while (count != 0);
    *stage_of_first = stage;
  }

  // kEndsLeaf: the tile begins a leaf, but no group.
  template <bool kEndsLeaf>
  __device__ __forceinline__ void TakePlainTurn([[maybe_unused]] int32_t tile, TileState stage,
                                                float (&logits)[kTile / 8][4],
                                                uint32_t (&weights)[kTile / 16][4]) {
    shared_.keys_barriers.WaitFilled(stage);
    if (kIs8Bit<C>) {
      // V of the tile before is there, too: the same threads have filled it before.
    } else if (maps_.exist) {
      // Tensor copies bring whole tiles, in any order. What they write needs no fence.
      shared_.values_barriers.WaitFilled(stage);
    } else {
      // V of the tile before is there, too: an arrival counts all copies that began before.
      gpu::FenceAsyncProxy();
    }
    WaitForTurn();
    const Starts starts(*this, stage);
    StartLogits(starts, logits);
    StartSums(stage, starts, kValuesBehindKeys, weights);
    PassTurn();
    gpu::WaitProducts<1>(logits);
    shared_.keys_barriers.FreeTogether(stage);
    if constexpr (kEndsLeaf) {
      KeepStates();
      softmax_.BeginLeaf(logits);
    }
    float factors[2];
    if (softmax_.Exceeds(logits, /*scales_late=*/true, kSlack<Element>, factors)) {
      float shrinks[2];
      WeighBlocks(stage, factors, logits, shrinks);
      gpu::WaitProducts<0>(sums_);
      if constexpr (!kEndsLeaf) Softmax::RescaleAll(shrinks, sums_);
      gpu::KeepRegisters(weights);
      shared_.values_barriers.FreeTogether(stage);
      Pack(logits, weights);
    } else {
      softmax_.template WeighLeaf<0, kTile / 16>(factors, logits);
      gpu::KeepRegisters(logits);
      // ptxas moves a wait up within its basic block. Without the branch, no weights would be
      // computed while the values are multiplied.
      if (gpu::Opaque(turn_barrier_) == 0) {
        gpu::WaitProducts<0>(sums_);
        gpu::KeepOrder();
      } else {
        gpu::WaitProducts<0>(sums_);
      }
      gpu::KeepRegisters(weights);
      shared_.values_barriers.FreeTogether(stage);
      softmax_.template WeighLeaf<kTile / 16, kTile / 8>(factors, logits);
      Pack(logits, weights);
    }
    if constexpr (kEndsLeaf) EndLeaf(tile);
  }

  // Keeps the states of a leaf, for which there are no registers, until its sums are there.
  __device__ __forceinline__ void KeepStates() const {
    RowState ended[2];
    softmax_.CopyStates(ended);
    StoreStates(Total(0) + kSlotStep, ended);
  }

  // Weights of a tile in which references change. Returns what the sums so far are multiplied by.
  // Changes behind the first block take effect in the next turn (InBlocks).
  __device__ __forceinline__ void WeighBlocks(TileState stage, const float (&factors)[2],
                                              float (&logits)[kTile / 8][4], float (&shrinks)[2]) {
    uint32_t drops[2] = {};
    softmax_.WeighBlocks(factors, kSlack<Element>, logits, drops);
#pragma unroll
    for (int r = 0; r < 2; ++r) shrinks[r] = Softmax::Shrinks(drops[r], 0);
    if (!gpu::AnyInWarp(drops[0] > 0xff || drops[1] > 0xff)) return;
    if (Lane() == 0) InBlocks(stage.Next())[Warp()] = 1;
    if (Lane() % 4 != 0) return;
#pragma unroll
    for (int b = 1; b < kTile / Softmax::kBlockPositions; ++b) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        shared_.drops[consumer_][b - 1][RowOf(r)] = static_cast<uint8_t>(drops[r] >> 8 * b);
      }
    }
  }

  // For each warp, whether the turn of a stage multiplies the values block by block. If one does,
  // all do: their products are one.
  __device__ __forceinline__ uint32_t (&InBlocks(TileState stage))[kWarps] {
    return shared_.in_blocks[consumer_][(stage.phase * Shared::kStages + stage.index) % 2];
  }

  static __device__ __forceinline__ int Lane() { return threadIdx.x % gpu::kWarpSize; }
  static __device__ __forceinline__ int Warp() {
    return threadIdx.x % static_cast<unsigned>(kThreads) / gpu::kWarpSize;
  }

  // Consumers start products in turn, one turn for each KV tile of an item.
  __device__ void WaitForTurn() const { gpu::SyncThreads(turn_barrier_, kConsumers * kThreads); }
  __device__ void PassTurn() const {
    gpu::ArriveThreads(next_turn_barrier_, kConsumers * kThreads);
  }

  // With the fences that a tensor copy needs to fill the places next.
  __device__ __forceinline__ void Skip(TileState* stage) {
    WaitForKeys(*stage);
    FreeKeys(*stage);
    *stage = stage->Next();
    if (!Shared::KeysHoldValues(p_)) WaitForValues(*stage);
    FreeValues(*stage);
    WaitForTurn();
    PassTurn();
  }

  // V of the tile before the one whose K has this stage.
  __device__ Element* Values(TileState stage) const {
    return Shared::KeysHoldValues(p_) ? shared_.keys[stage.Previous().index]
                                      : shared_.values[stage.index];
  }
  __device__ void FreeKeys(TileState stage) {
    if (!Shared::KeysHoldValues(p_)) shared_.keys_barriers.Free(stage);
  }
  // The same of a tile. After that of the last one, the query is free, too.
  __device__ void FreeKeys(TileState stage, int32_t tile) {
    FreeKeys(stage);
    if (tile == LastTile()) shared_.query_barriers[consumer_].Free(QueryStage());
  }
  __device__ void FreeValues(TileState stage) {
    if (Shared::KeysHoldValues(p_)) {
      shared_.keys_barriers.Free(stage.Previous());
    } else {
      shared_.values_barriers.Free(stage);
    }
  }

  // The producer fences what it widens.
  static __device__ __forceinline__ void FenceCopies() {
    if constexpr (!kIs8Bit<C>) gpu::FenceAsyncProxy();
  }

  __device__ void WaitForKeys(TileState stage) {
    shared_.keys_barriers.WaitFilled(stage);
    FenceCopies();
  }

  __device__ void WaitForValues(TileState stage) {
    shared_.values_barriers.WaitFilled(stage);
    FenceCopies();
  }

  // The same for V of the tile before a turn's. A weight of zero times an infinite or NaN value
  // would spoil the sum of a row that does not attend to it. So where rows differ in what they
  // attend to, such values are added to the sums of the others, and become zeros.
  __device__ __forceinline__ void WaitForValues(int32_t tile, TileState stage) {
    if (!Shared::KeysHoldValues(p_)) WaitForValues(stage);
    if (!common_.RowsDiffer(item_, tile * kTile, (tile + 1) * kTile)) return;
    Element* values = Values(stage);
    // Only the positions that some row leaves out, in steps of 16 rows of 64 columns.
    const int32_t from = tile * kTile;
    const bool left = common_.begin > max(item_.begin, from);
    const int first = left ? 0 : max(0, min(common_.end - from, kTile)) / 16 * 16;
    const int last = min((min(item_.end - from, kTile) + 15) / 16 * 16, kTile);
    NonFinite<Element> non_finite;
    // Opaque: few turns need it, so no register is kept for it.
    const int thread = gpu::Opaque(threadIdx.x) % static_cast<unsigned>(kThreads);
#pragma unroll 1
    for (int row = first; row < last; row += 16) {
#pragma unroll
      for (int block = 0; block < CacheRows::kChunks / 8; ++block) {
        non_finite.LookAt(values + block * CacheRows::kBlockElements +
                          row * CacheRows::kBlockColumns + thread * CacheRows::kChunk);
      }
    }
    const bool found = non_finite.IsFound();
    if (gpu::AnyInThreads(kThreadsBarrier + consumer_, kThreads, found)) SetAside(tile, values);
  }

  // Both consumers find the same in a tile of which both have rows.
  __device__ __forceinline__ void SetAside(int32_t tile, Element* values) {
    const auto value = [&](int j, int n, int e) {
      return values[CacheRows::Offset(j, n) + Lane() % 4 * 2 + e];
    };
    softmax_.template AddNonFinite<kTile>(tile * kTile, sums_, value,
                                          [](Element v, int) { return gpu::ToFloat(v); });
    const Item& others = (&work_)[gpu::Opaque(1 - 2 * consumer_)].rows;
    const bool are_both = others.begin < min(others.end, (tile + 1) * kTile) &&
                          tile * kTile < others.end && others.begin / kTile <= tile;
    const int barrier = are_both ? kConsumersBarrier : kThreadsBarrier + consumer_;
    const int num_threads = are_both ? kConsumers * kThreads : kThreads;
    gpu::SyncThreads(barrier, num_threads);  // everyone has looked at the values
    const int first = are_both ? kThreads : (1 + consumer_) * kThreads;
    ClearNonFinite(static_cast<int>(threadIdx.x) - first, kTile * kHeadSize, num_threads,
                   [&](int i) { return values + i; });
    gpu::FenceAsyncProxy();
    gpu::SyncThreads(barrier, num_threads);
  }

  // The descriptors of the query and of a place of K. A place of V is kValuesBehindKeys further.
  // ptxas computes them in uniform registers. It forgets in a loop what is uniform, so the turns
  // each say it again. One is grid.y for the query, and grid.z for K and V (AddToDescriptor).
  struct Starts {
    uint64_t query;
    uint64_t keys;

    __device__ __forceinline__ Starts(const Consumer& consumer, TileState stage)
        : query(QueryRows::Descriptor(gpu::Uniform(consumer.query_start_))),
          keys(CacheRows::Descriptor(
              gpu::Uniform(consumer.keys_start_ + stage.index * CacheRows::kUnits))) {}
  };
  static constexpr int kValuesBehindKeys = Shared::kStages * CacheRows::kUnits;

  __device__ __forceinline__ void StartLogits(TileState stage, float (&logits)[kTile / 8][4]) {
    StartLogits(Starts(*this, stage), logits);
  }
  __device__ __forceinline__ void StartSums(TileState stage, uint32_t (&weights)[kTile / 16][4]) {
    if (Shared::KeysHoldValues(p_)) {
      StartSums(stage, Starts(*this, stage.Previous()), 0, weights);
    } else {
      StartSums(stage, Starts(*this, stage), kValuesBehindKeys, weights);
    }
  }

  // Starts logits = q k^T.
  __device__ __forceinline__ void StartLogits(const Starts& starts, float (&logits)[kTile / 8][4]) {
    gpu::FenceProducts(logits);
#pragma unroll
    for (int column = 0; column < kHeadSize; column += 16) {
      gpu::StartProduct(logits, QueryRows::Columns(starts.query, column, gpu::One<0>()),
                        CacheRows::Columns(starts.keys, column, gpu::One<1>()),
                        /*accumulates=*/column > 0, Element{});
    }
    gpu::CommitProducts();
  }

  // Starts sums += weights * v, with the weights of the turn before. The place of V is `behind`
  // units behind that of K. Called behind a barrier of the consumer.
  __device__ __forceinline__ void StartSums(TileState stage, const Starts& starts, int behind,
                                            uint32_t (&weights)[kTile / 16][4]) {
    const uint32_t(&warps)[kWarps] = InBlocks(stage);
    const uint4 in_blocks = *reinterpret_cast<const uint4*>(warps);
    if (gpu::AnyInWarp((in_blocks.x | in_blocks.y | in_blocks.z | in_blocks.w) != 0)) {
      AddByBlocks(stage, starts, behind, weights);
    } else {
      StartSums<0, kTile / 16>(starts, behind, weights);
    }
  }

  // The same of 16 positions each.
  template <int kBegin, int kEnd>
  __device__ __forceinline__ void StartSums(const Starts& starts, int behind,
                                            uint32_t (&weights)[kTile / 16][4]) {
    gpu::KeepRegisters(weights);
    gpu::FenceProducts(sums_);
#pragma unroll
    for (int step = kBegin; step < kEnd; ++step) {
#pragma unroll
      for (int column = 0; column < kHeadSize; column += kColumns) {
        auto& sums = *reinterpret_cast<float(*)[kColumns / 8][4]>(sums_ + column / 8);
        gpu::StartProductTransposed(
            sums, weights[step],
            CacheRows::Rows(starts.keys, behind, step * 16, column, gpu::One<1>()), Element{});
      }
    }
    gpu::CommitProducts();
  }

  // sums += weights * v, where references change between the blocks.
  __device__ __forceinline__ void AddByBlocks(TileState stage, const Starts& starts, int behind,
                                              uint32_t (&weights)[kTile / 16][4]) {
    AddBlocks<0>(InBlocks(stage)[Warp()] != 0, starts, behind, weights);
    gpu::KeepRegisters(weights);
    gpu::SyncThreads(kThreadsBarrier + consumer_, kThreads);  // everyone has read them
    if (Lane() == 0) InBlocks(stage)[Warp()] = 0;
  }
  template <int kBlock>
  __device__ __forceinline__ void AddBlocks(bool follow, const Starts& starts, int behind,
                                            uint32_t (&weights)[kTile / 16][4]) {
    constexpr int kSteps = Softmax::kBlockPositions / 16;
    if constexpr (kBlock > 0) {
      float shrinks[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t drop = shared_.drops[consumer_][kBlock - 1][RowOf(r)];
        shrinks[r] = follow ? Softmax::Shrinks(drop, 0) : 1.0f;
      }
      Softmax::RescaleAll(shrinks, sums_);
    }
    StartSums<kBlock * kSteps, (kBlock + 1) * kSteps>(starts, behind, weights);
    gpu::WaitProducts<0>(sums_);
    if constexpr ((kBlock + 1) * kSteps < kTile / 16) {
      AddBlocks<kBlock + 1>(follow, starts, behind, weights);
    }
  }

  // Whether the leaf that holds a tile is the first of the rows, or of its group.
  __device__ __forceinline__ bool IsFirstLeaf(int32_t tile) const {
    const int32_t begin = LeafBegin(LeafOf(tile * kTile));
    return begin <= FirstTile() * kTile || begin % kGroup == 0;
  }
  // The same of the group.
  __device__ __forceinline__ bool IsFirstGroup(int32_t tile) const {
    return tile * kTile / kGroup <= FirstTile() * kTile / kGroup;
  }

  // What the lane's rows have in memory: `which` is that of Scratch::Slot. First their states, and
  // those of a leaf (KeepStates), then four sums for each group of columns. Others have theirs
  // between them.
  static constexpr int kSlotStep = kConsumers * kThreads * 4;
  __device__ __forceinline__ float* Total(int which) const {
    return scratch_.Slot(gpu::Opaque(blockIdx.x), which) + (threadIdx.x - kThreads) * 4;
  }
  __device__ __forceinline__ int Columns() const {
    return gpu::Opaque(static_cast<int>(p_.value_head_size));
  }
  struct alignas(16) States {
    RowState of_row[2];
  };
  static __device__ __forceinline__ float4 LoadFour(const float* from) {
    return __ldcg(reinterpret_cast<const float4*>(from));
  }
  static __device__ __forceinline__ States LoadStates(const float* total) {
    const float4 loaded = LoadFour(total);
    return {{{loaded.x, loaded.y}, {loaded.z, loaded.w}}};
  }
  static __device__ __forceinline__ void StoreStates(float* total, const RowState (&states)[2]) {
    __stcg(reinterpret_cast<float4*>(total),
           make_float4(states[0].max, states[0].sum, states[1].max, states[1].sum));
  }

  // Adds the states of a part to those of a total. Returns the factors of the part's sums, which
  // AddSums takes. The first part is the total.
  __device__ __forceinline__ void AddStates(int which, bool is_first, const RowState (&part)[2],
                                            float (&factors)[2]) {
    float* const total = Total(which);
    States states = {{part[0], part[1]}};
    factors[0] = factors[1] = 1;
    if (!is_first) {
      states = LoadStates(total);
      const Fold folds[2] = {{&states.of_row[0], part[0]}, {&states.of_row[1], part[1]}};
      if (gpu::AnyInWarp(folds[0].Rescales() || folds[1].Rescales())) {
#pragma unroll 1
        for (int n = 0; n * 8 < Columns(); ++n) {
          auto* const to = reinterpret_cast<float4*>(total + (n + 2) * kSlotStep);
          float4 sums = __ldcg(to);
          sums.x = gpu::MultiplyFlushed(sums.x, folds[0].before);
          sums.y = gpu::MultiplyFlushed(sums.y, folds[0].before);
          sums.z = gpu::MultiplyFlushed(sums.z, folds[1].before);
          sums.w = gpu::MultiplyFlushed(sums.w, folds[1].before);
          __stcg(to, sums);
        }
      }
      factors[0] = folds[0].factor;
      factors[1] = folds[1].factor;
    }
    StoreStates(total, states.of_row);
  }

  // Adds the sums to those of a total. They become zeros.
  __device__ __forceinline__ void AddSums(int which, bool is_first, const float (&factors)[2]) {
    float* const total = Total(which);
    const int columns = Columns();
    if (is_first) {
#pragma unroll
      for (int n = 0; n < kHeadSize / 8; ++n) {
        const float(&sums)[4] = sums_[n];
        if (n * 8 < columns) {
          __stcg(reinterpret_cast<float4*>(total + (n + 2) * kSlotStep),
                 make_float4(sums[0], sums[1], sums[2], sums[3]));
        }
      }
    } else {
#pragma unroll
      for (int n = 0; n < kHeadSize / 8; ++n) {
        float summands[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          summands[e] = gpu::MultiplyFlushed(sums_[n][e], factors[e / 2]);
        }
        if (n * 8 < columns) gpu::AddInMemory(total + (n + 2) * kSlotStep, summands);
      }
    }
#pragma unroll
    for (float(&sums)[4] : sums_) {
#pragma unroll
      for (float& sum : sums) sum = 0;
    }
  }

  // Adds a total to the sums, which are those of a part with these states. kAtOnce: groups of
  // columns that are on their way from memory together.
  template <int kAtOnce>
  __device__ __forceinline__ void AddTotal(int which, RowState (&part)[2]) {
    const float* const total = Total(which);
    const int columns = Columns();
    float4 before[kAtOnce];
    const auto load = [&](int first) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int n = first + i;
        before[i] = n * 8 < columns ? LoadFour(total + (n + 2) * kSlotStep) : float4{};
      }
    };
    States states = LoadStates(total);
    load(0);
    const Fold folds[2] = {{&states.of_row[0], part[0]}, {&states.of_row[1], part[1]}};
#pragma unroll
    for (int r = 0; r < 2; ++r) part[r] = states.of_row[r];
#pragma unroll
    for (int first = 0; first < kHeadSize / 8; first += kAtOnce) {
      if (first > 0) {
        // The branch keeps ptxas from loading all at once, for which there are no registers.
        if (first * 8 >= columns) break;
        load(first);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        float(&sums)[4] = sums_[first + i];
        sums[0] = folds[0].Add(before[i].x, sums[0]);
        sums[1] = folds[0].Add(before[i].y, sums[1]);
        sums[2] = folds[1].Add(before[i].z, sums[2]);
        sums[3] = folds[1].Add(before[i].w, sums[3]);
      }
    }
  }

  __device__ __forceinline__ void AddToTotal(int which, bool is_first, const RowState (&part)[2]) {
    float factors[2];
    AddStates(which, is_first, part, factors);
    AddSums(which, is_first, factors);
  }

  // Ends the leaf before that of a tile, and the group.
  __device__ __forceinline__ void EndLeaf(int32_t tile) {
    const States kept = LoadStates(Total(0) + kSlotStep);
    RowState ended[2] = {Softmax::LeafState(kept.of_row[0]), Softmax::LeafState(kept.of_row[1])};
    const bool ends_group = tile * kTile % kGroup == 0, is_first = IsFirstLeaf(tile - 1);
    if (ends_group && !is_first) AddTotal<4>(0, ended);
    AddToTotal(ends_group, ends_group ? IsFirstGroup(tile - 1) : is_first, ended);
  }

  // Adds to the last leaf those before it. Returns the states of both rows.
  __device__ __forceinline__ void AddTotals(RowState (&states)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) states[r] = softmax_.LeafState(r);
    constexpr int kAtOnce = kIs8Bit<C> ? 4 : 8;
    const bool are_first[2] = {IsFirstLeaf(LastTile()), IsFirstGroup(LastTile())};
#pragma unroll 1
    for (int which = 0; which < 2; ++which) {
      if (!(which == 0 ? are_first[0] : are_first[1])) AddTotal<kAtOnce>(which, states);
    }
  }

  // Rounds weights to 16 bits, laid out as the left operand of a product over each 16 positions.
  static __device__ __forceinline__ void Pack(const float (&from)[kTile / 8][4],
                                              uint32_t (&to)[kTile / 16][4]) {
#pragma unroll
    for (int n = 0; n < kTile / 16; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&block)[4] = from[2 * n + i / 2];
        to[n][i] = gpu::Pack(block[i % 2 * 2], block[i % 2 * 2 + 1], Element{});
      }
    }
  }

  // The number of the lane's row r among the consumer's rows.
  static __device__ __forceinline__ int RowOf(int r) { return Warp() * 16 + Lane() / 4 + 8 * r; }

  // The place of a row that exists. A division would take as long as 40 instructions.
  __device__ __forceinline__ RowPlace PlaceOf(int row) const {
    const uint32_t n = work_.head + row, token = p_.group.Quotient(n);
    const uint32_t head = (rows_.kv_head - token) * p_.group.number + n;
    return {work_.token + int64_t{token}, head};
  }
  __device__ __forceinline__ RowRange RangeOf(int row) const {
    if (row >= rows_.num_rows) return {};
    return RowRange::OfToken(p_, rows_, PlaceOf(row).token);
  }

  // Writes the lane's row r to the output.
  __device__ __forceinline__ void WriteRow(int r, const RowState& state) {
    const int row = RowOf(r);
    const bool exists = row < rows_.num_rows;
    float factor = 0;
    int64_t offset = 0;
    if (exists) {
      const RowPlace place = PlaceOf(row);
      offset = p_.OutputOffset(rows_.first_token + place.token, place.head);
      const WithSink finished(SinkOf(p_, place.head), state);
      const RowRange& range = softmax_.Range(r);
      const bool attends = range.begin < range.end;
      factor = finished.weight / NonZeroSum(attends, finished.state.sum);
      if (kIs8Bit<C> && attends) factor *= work_.v_scale;
      if (Lane() % 4 == 0) {
        WriteLse(p_, item_.first_token + place.token, place.head, finished.state);
      }
    }
    T* output = static_cast<T*>(p_.output) + offset;
#pragma unroll
    for (int n = 0; n < kHeadSize / 8; n += 4) {
      struct alignas(16) {
        uint32_t word[4];
      } columns;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        columns.word[i] = gpu::Pack(gpu::Fma(sums_[n + i][2 * r], factor, 0.0f),
                                    gpu::Fma(sums_[n + i][2 * r + 1], factor, 0.0f), T{});
      }
      TransposeInQuads(columns.word);  // now 8 adjacent columns of group n + Lane() % 4
      const int column = (n + Lane() % 4) * 8;
      if (exists && column < p_.value_head_size) {
        *reinterpret_cast<decltype(columns)*>(output + column) = columns;
      }
    }
  }

  // Writes the lane's row r to the scratch: the work item is a split. Combine multiplies by the
  // scale of V.
  __device__ __forceinline__ void WritePartialResult(int r, const RowState& state) {
    const int row = RowOf(r);
    if (row >= rows_.num_rows) return;
    const RowPlace place = PlaceOf(row);
    const int64_t index = PartialOf(scratch_, rows_, place) * p_.num_heads + place.head;
    if (Lane() % 4 == 0) scratch_.states[index] = state;
    float* partial = scratch_.partials + index * p_.value_head_size;
#pragma unroll
    for (int n = 0; n < kHeadSize / 8; ++n) {
      if (n * 8 >= p_.value_head_size) break;
      float* columns = partial + n * 8 + Lane() % 4 * 2;
      columns[0] = sums_[n][2 * r];
      columns[1] = sums_[n][2 * r + 1];
    }
  }

  const Params& p_;
  const Scratch& scratch_;
  const Maps& maps_;
  const Item& item_;
  const Item& rows_;  // the consumer's
  const Work& work_;
  Shared& shared_;
  const int consumer_;
  // Keeps what is the same for a warp in a register: ptxas would compute it in each turn. With a
  // cache of 8 bits there are no registers for that.
  static __device__ __forceinline__ uint32_t Kept(uint32_t number) {
    return kIs8Bit<C> ? number : gpu::Opaque(number);
  }
  const int turn_barrier_;
  const int next_turn_barrier_;
  const uint32_t query_start_;
  const uint32_t keys_start_;
  // With a cache of 8 bits there are no registers for a copy.
  const std::conditional_t<kIs8Bit<C>, const CommonRange&, CommonRange> common_;
  Softmax softmax_;
  float sums_[kHeadSize / 8][4] = {};  // laid out as logits, with columns in place of positions
};

}  // namespace xla_gpu::paged_attention::sm90
