// Attention of few query rows, as in decoding, on sm_90a. What it adds to tensor_core.cuh:
//
// - Two producer warps copy, one K and the other V. They run ahead of the products by as many KV
//   tiles as there is memory for, across work items: the memory does not wait where one item ends
//   and the next begins. The first of them finds the work items. All other warps take these from
//   shared memory: who reads the lengths again may find others.
// - A KV tile has 16 positions. The consumer warps take tiles in turn, and a warp waits for its own
//   tiles only.
// - A thread block takes neighbouring splits, about as many positions as every other block. It
//   folds a sequence's first splits itself. With many sequences few partial results go to memory.
// - Numbers of 8 bits become float16, each two in one instruction. So does the query of such a
//   cache. The range suffices: a query row is divided by a power of two, and where all positions
//   have one scale, weights are not multiplied by it.
//
// The fold goes from the left and the splits follow from the sequence alone, so a sequence has the
// same bits whichever thread blocks compute it.
#pragma once

#include "decode_schedule.cuh"
#include "pipeline.cuh"
#include "products.cuh"

namespace xla_gpu::paged_attention {

inline constexpr int kDecodeProducers = 2;  // warps
inline constexpr int kDecodeThreads = kThreads + kDecodeProducers * gpu::kWarpSize;
inline constexpr int kDecodeRows = kRowsPerWarpTile;  // of a work item
inline constexpr int kDecodeConsumers = 1;            // named barrier

// The layout in shared memory of a KV tile: for each position K, then V. Rows are an odd number of
// chunks of 16 bytes apart, so that the chunks of one column in eight adjacent rows lie in
// different banks.
template <typename C, int kHeadSize>
struct KvPairRows {
  static constexpr int kChunk = 16 / sizeof(C);  // elements of a chunk
  static constexpr int kChunks = kHeadSize / kChunk;
  static constexpr int kStride = (2 * kChunks + 1) * kChunk;

  static __device__ __forceinline__ int Offset(int row, int chunk) {
    return row * kStride + chunk * kChunk;
  }

  static __device__ __forceinline__ int Behind(int offset, int chunks) {
    return offset + chunks * kChunk;
  }
};

// The scales of a position of an 8-bit cache.
struct PositionScales {
  float k_scale;
  float v_scale;
};

// The shared memory of a thread block.
template <typename T, typename C, int kHeadSize>
struct DecodeShared {
  using Query = std::conditional_t<kIs8Bit<C>, Half, T>;
  using QueryRows = SharedRows<Query, kHeadSize>;
  using CacheRows = KvPairRows<C, kHeadSize>;
  static constexpr int kTile = DecodeSchedule::kTile;  // positions
  static constexpr int kTileElements = kTile * CacheRows::kStride;
  static constexpr int kItems = 3;                          // work items in memory
  static constexpr int kQueries = 2;                        // queries of work items
  static constexpr int kBlocks = kHeadSize <= 128 ? 2 : 1;  // thread blocks of a multiprocessor
  static constexpr int kBytes = 224 * 1024 / kBlocks;       // sm_90 has 227 KiB, 1 goes to each
  static constexpr int kOtherBytes = kWarps * kDecodeRows * (kHeadSize * 4 + 8) +
                                     kQueries * kDecodeRows * (QueryRows::kStride * 2 + 4);
  static constexpr int kScales = kIs8Bit<C> ? kTile : 1;
  static constexpr int kTileBytes = kTileElements * static_cast<int>(sizeof(C)) + kScales * 8 + 16;
  // KV tiles in memory. Each consumer warp has as many.
  static constexpr int kStages = (kBytes - kOtherBytes - 1024) / kTileBytes / kWarps * kWarps;
  static_assert(kStages >= 2 * kWarps, "a tile is copied while another one is read");
  using TileState = PipelineState<kStages>;
  using ItemState = PipelineState<kItems>;
  using QueryState = PipelineState<kQueries>;

  alignas(128) C tiles[kStages][kTileElements];
  alignas(128) Query query[kQueries][kDecodeRows * QueryRows::kStride];
  float query_factors[kQueries][kDecodeRows];  // of an 8-bit cache: the powers of two
  float sums[kWarps][kDecodeRows][kHeadSize];  // their columns are swizzled
  RowState states[kWarps][kDecodeRows];
  PositionScales scales[kStages][kScales];  // of an 8-bit cache
  PipelineBarriers<kStages> tiles_barriers;
  PipelineBarriers<kItems> items_barriers;
  PipelineBarriers<kQueries> query_barriers;
  DecodeItem items[kItems];  // num_rows = -1 marks the end

  // All threads call it.
  __device__ void Init() {
    // Rows that no item fills are multiplied, too. What memory happens to hold must not decide how
    // long that takes.
    auto* chunks = reinterpret_cast<FourPairs*>(query);
    for (int i = threadIdx.x; i < static_cast<int>(sizeof(query) / sizeof(FourPairs));
         i += kDecodeThreads) {
      chunks[i] = FourPairs();
    }
    if (threadIdx.x > 0) return;
    tiles_barriers.Init(kDecodeProducers * gpu::kWarpSize + (kIs8Bit<C> ? 1 : 0), 1);
    items_barriers.Init(1, kDecodeProducers + kWarps);
    query_barriers.Init(gpu::kWarpSize + (kIs8Bit<C> ? 1 : 0), kWarps);
  }
};

// The first warp finds the work items and copies queries and K, the second one copies V.
template <typename T, typename C, int kHeadSize>
class DecodeProducer {
  using Shared = DecodeShared<T, C, kHeadSize>;
  using QueryRows = typename Shared::QueryRows;
  using CacheRows = typename Shared::CacheRows;
  using TileState = typename Shared::TileState;
  using ItemState = typename Shared::ItemState;
  using QueryState = typename Shared::QueryState;
  static constexpr int kTile = Shared::kTile;
  static_assert(2 * kTile == gpu::kWarpSize, "the lanes find the slots of two tiles at a time");

 public:
  __device__ DecodeProducer(const Params& p, const Scratch& scratch, Shared* shared)
      : p_(p),
        scratch_(scratch),
        shared_(*shared),
        lane_(threadIdx.x % gpu::kWarpSize),
        copies_keys_(threadIdx.x < kThreads + gpu::kWarpSize) {}

  __device__ void Run(QueryLengths lengths) {
    DecodeSchedule schedule(p_, lengths);
    if (copies_keys_) schedule.Begin();
    Item item = {};
    BlockIds blocks = {};
    QueryState query_stage;
    // The block ids of an item are on their way while the tiles of the item before are copied.
    for (ItemState stage;; stage = stage.Next()) {
      if (copies_keys_) PublishWork(&schedule, stage);
      shared_.items_barriers.WaitFilled(stage);
      const Item next = shared_.items[stage.index].item;
      shared_.items_barriers.Free(stage);
      const bool has_next = next.num_rows != -1;
      const BlockIds next_blocks = has_next ? BlocksOf(next, FirstPositionOf(next)) : BlockIds();
      if (item.num_rows > 0) CopyTiles(item, blocks);
      if (!has_next) break;
      if (copies_keys_) CopyQuery(next, query_stage);
      query_stage = query_stage.Next();
      item = next;
      blocks = next_blocks;
    }
    gpu::CommitCopies();
    gpu::WaitCopies<0>();
  }

 private:
  __device__ void PublishWork(DecodeSchedule* schedule, ItemState stage) {
    DecodeItem work = {};
    if (!schedule->Next(&work)) work.item.num_rows = -1;
    shared_.items_barriers.WaitFreed(stage);
    if (lane_ > 0) return;
    shared_.items[stage.index] = work;
    gpu::Arrive(&shared_.items_barriers.filled[stage.index]);
  }

  __device__ void CopyQuery(const Item& item, QueryState stage) {
    shared_.query_barriers.WaitFreed(stage);
    auto* query = shared_.query[stage.index];
    if constexpr (kIs8Bit<C>) {  // a lane's second row may not exist: its scale decides all the
                                 // same
      if (lane_ < kDecodeRows) shared_.query_factors[stage.index][lane_] = 1;
      __syncwarp();
    }
    for (int i = lane_; i - lane_ < item.num_rows * QueryRows::kChunks; i += gpu::kWarpSize) {
      const int row = i / QueryRows::kChunks, chunk = i % QueryRows::kChunks;
      const int column = chunk * QueryRows::kChunk;
      const bool exists = row < item.num_rows && column < p_.head_size;
      const T* from =
          static_cast<const T*>(p_.query) + (exists ? QueryOffset(p_, item, row) + column : 0);
      if constexpr (kIs8Bit<C>) {
        float factor;
        const FourPairs pairs = HalvesOf<QueryRows::kChunks>(from, exists, &factor);
        QueryOf8BitKeys<Half, QueryRows>::Store(query, row, chunk, pairs);
        if (chunk == 0) shared_.query_factors[stage.index][row] = factor;
      } else {
        gpu::CopyAsync16(query + QueryRows::Offset(row, chunk), from, exists);
      }
    }
    gpu::Barrier* filled = &shared_.query_barriers.filled[stage.index];
    if constexpr (kIs8Bit<C>) {
      __syncwarp();
      if (lane_ == 0) gpu::Arrive(filled);
    }
    gpu::ArriveAfterCopies(filled);
  }

  // Each lane finds the slot of one position of two tiles at a time. The block ids of kPairs times
  // two tiles are on their way while those before are used: a load takes longer than two tiles.
  static constexpr int kPairs = 4;
  struct BlockIds {
    int32_t id[kPairs] = {};
  };

  __device__ int32_t FirstPositionOf(const Item& item) const {
    return Tiles(item, kTile).begin * kTile + lane_;
  }
  // The block ids of every 32nd position from this one on.
  __device__ BlockIds BlocksOf(const Item& item, int32_t position) const {
    BlockIds blocks;
#pragma unroll
    for (int i = 0; i < kPairs; ++i, position += 2 * kTile) {
      blocks.id[i] = IsIn(item, position) ? BlockOf(p_, item, position) : 0;
    }
    return blocks;
  }

  // `next`: the block ids of the first positions.
  __device__ void CopyTiles(const Item& item, BlockIds next) {
    const Tiles tiles(item, kTile);
    const Pieces pieces(p_, item, lane_, copies_keys_);
    bool is_bad = copies_keys_ && HasBadTree(p_, item, lane_);
    int32_t position = FirstPositionOf(item);
    BlockIds blocks;
    for (int32_t tile = tiles.begin, pair = 0; tile < tiles.end;
         tile += 2, pair = (pair + 1) % kPairs) {
      if (pair == 0) {
        blocks = next;
        next = BlocksOf(item, position + kPairs * 2 * kTile);
      }
      int32_t block = blocks.id[0];
#pragma unroll
      for (int i = 1; i < kPairs; ++i) block = pair == i ? blocks.id[i] : block;
      Slot<C> slot;
      if (IsIn(item, position)) slot = SlotIn<C>(p_, item, block, position, &is_bad);
      CopyTile(pieces, slot, 0);
      if (tile + 1 < tiles.end) CopyTile(pieces, slot, kTile);
      position += 2 * kTile;
    }
    is_bad = gpu::AnyInWarp(is_bad);
    if (copies_keys_ && lane_ == 0) Report(p_, scratch_, item, is_bad);
  }

  // The chunk of 16 bytes that a lane copies of a position's K, or V.
  struct Pieces {
    static constexpr int kOfPosition = CacheRows::kChunks;
    static_assert(gpu::kWarpSize % kOfPosition == 0, "each lane has the same chunk of all rows");
    static constexpr int kPositions = gpu::kWarpSize / kOfPosition;  // at a time

    const char* from;  // at offset 0 of the cache
    bool exist;

    __device__ Pieces(const Params& p, const Item& item, int lane, bool of_keys) {
      const int column = lane % kOfPosition * CacheRows::kChunk;
      exist = column < (of_keys ? p.head_size : p.is_latent ? 0 : p.value_head_size);
      const C* first = of_keys ? KeyOf<C>(p, 0, item.kv_head) : ValueOf<C>(p, 0, item.kv_head);
      from = reinterpret_cast<const char*>(first + (exist ? column : 0));
    }
  };

  // Copies K, or V, of the positions of the lanes from first_lane on, at these slots. Rows and
  // columns out of range are filled with zeros.
  __device__ void CopyTile(const Pieces& pieces, const Slot<C>& slot, int first_lane) {
    const TileState stage = TileState::Of(count_++);
    shared_.tiles_barriers.WaitFreed(stage);
    uint32_t chunks_of_lane = ChunksTo<C>(slot);
    if (!copies_keys_) chunks_of_lane = ChunksOfValue(p_, chunks_of_lane);
    const int first_row = lane_ / Pieces::kOfPosition, chunk = lane_ % Pieces::kOfPosition;
    C* to = shared_.tiles[stage.index] +
            CacheRows::Offset(first_row, chunk + (copies_keys_ ? 0 : CacheRows::kChunks));
#pragma unroll
    for (int row = 0; row < kTile; row += Pieces::kPositions) {
      const uint32_t chunks = gpu::Shuffle(chunks_of_lane, first_lane + first_row + row);
      gpu::CopyAsync16(to + CacheRows::Offset(row, 0), pieces.from + uint64_t{chunks} * 16,
                       pieces.exist && chunks != kNoSlot);
    }
    gpu::Barrier* filled = &shared_.tiles_barriers.filled[stage.index];
    if (kIs8Bit<C> && copies_keys_) WriteScales(slot, first_lane, stage, filled);
    gpu::ArriveAfterCopies(filled);
  }

  // The scales of the positions of an 8-bit cache.
  __device__ void WriteScales(const Slot<C>& slot, int first_lane, TileState stage,
                              gpu::Barrier* filled) {
    if constexpr (kIs8Bit<C>) {
      const int row = lane_ - first_lane;
      if (0 <= row && row < kTile) shared_.scales[stage.index][row] = {slot.k_scale, slot.v_scale};
      __syncwarp();
      if (lane_ == 0) gpu::Arrive(filled);
    }
  }

  const Params& p_;
  const Scratch& scratch_;
  Shared& shared_;
  const int lane_;
  const bool copies_keys_;
  uint32_t count_ = 0;  // tiles so far
};

// The rows of a work item that a consumer warp finishes: every kWarps-th. Each lane has every 32nd
// column of a row.
template <int kHeadSize>
struct FinishedRows {
  static constexpr int kRows = kDecodeRows / kWarps;
  static constexpr int kColumns = kHeadSize / gpu::kWarpSize;

  RowState states[kRows];
  float values[kRows][kColumns];
};

template <typename T, typename C, int kHeadSize>
class DecodeConsumer {
  using Shared = DecodeShared<T, C, kHeadSize>;
  using QueryRows = typename Shared::QueryRows;
  using CacheRows = typename Shared::CacheRows;
  static constexpr int kTile = Shared::kTile;
  using Query = typename Shared::Query;
  using Products = WarpProducts<Query, C, kHeadSize, kTile, QueryRows, CacheRows>;
  using Rows = FinishedRows<kHeadSize>;

 public:
  __device__ DecodeConsumer(const Params& p, const Scratch& scratch, Shared* shared)
      : p_(p),
        scratch_(scratch),
        shared_(*shared),
        lane_(threadIdx.x % gpu::kWarpSize),
        warp_(threadIdx.x / gpu::kWarpSize),
        scales_are_uniform_(p.ScalesAreUniform()) {}

  __device__ void Run() {
    typename Shared::QueryState query_stage;
    for (typename Shared::ItemState stage;; stage = stage.Next()) {
      shared_.items_barriers.WaitFilled(stage);
      const DecodeItem& work = shared_.items[stage.index];
      if (work.item.num_rows == -1) return;
      shared_.query_barriers.WaitFilled(query_stage);
      Compute(work.item, shared_.query[query_stage.index],
              shared_.query_factors[query_stage.index]);
      gpu::SyncThreads(kDecodeConsumers, kThreads);
      FinishSplit(work);
      gpu::SyncThreads(kDecodeConsumers, kThreads);  // everyone has left the sums
      shared_.items_barriers.Free(stage);
      shared_.query_barriers.Free(query_stage);
      query_stage = query_stage.Next();
    }
  }

 private:
  // Computes the warp's tiles of a split, and leaves what it found in shared memory.
  __device__ void Compute(const Item& item, const Query* query, const float* query_factors) {
    Softmax softmax(p_, item, lane_ / 4);
    if constexpr (kIs8Bit<C>) {
      const float k_scale = scales_are_uniform_ ? p_.k_scale.At(0, 0, item.kv_head) : 1.0f;
      for (int r = 0; r < 2; ++r) {
        softmax.MultiplyScale(r, query_factors[lane_ / 4 + 8 * r] * k_scale);
      }
    }
    const CommonRange common(p_, item);
    Products products;
    const Tiles tiles(item, kTile);
    const int32_t turn = (warp_ + NumTilesBefore(p_, item, kTile)) % kWarps;
    for (int32_t tile = tiles.begin + turn; tile < tiles.end; tile += kWarps) {
      const auto stage = Shared::TileState::Of(count_ + (tile - tiles.begin));
      const PositionScales* scales = shared_.scales[stage.index];
      C* keys = shared_.tiles[stage.index];
      C* values = p_.is_latent ? keys : keys + kHeadSize;
      const int32_t begin = tile * kTile;
      shared_.tiles_barriers.WaitFilled(stage);
      float logits[kTile / 8][4] = {};
      Products::MultiplyByKeys(query, 0, keys, 0, logits);
      if (kIs8Bit<C> && !scales_are_uniform_) Products::ScaleLogits(scales, logits);
      softmax.ToLogits(begin, /*masked=*/!common.Contains(begin, begin + kTile), logits);
      float shrinks[2];
      softmax.Weigh(logits, shrinks);
      Softmax::Shrink(shrinks, products.sums);
      if (!std::is_integral_v<C> && common.RowsDiffer(item, begin, begin + kTile)) {
        SetAsideNonFinite(softmax, begin, scales, values, products.sums);
      }
      if (kIs8Bit<C> && !scales_are_uniform_) {
        Products::ScaleWeights(scales, logits);
        products.template AddValues<BFloat16>(values, 0, logits);
      } else {
        products.template AddValues<Query>(values, 0, logits);
      }
      shared_.tiles_barriers.Free(stage);
    }
    count_ += tiles.end - tiles.begin;
    float v_scale = 1;
    if (kIs8Bit<C> && scales_are_uniform_) v_scale = p_.v_scale.At(0, 0, item.kv_head);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = lane_ / 4 + 8 * r;
      const RowState state = softmax.State(r);
      if (kIs8Bit<C> && state.sum != 0) {  // without keys the scale may be NaN
        for (auto& chunk_sums : products.sums) {
          chunk_sums[2 * r] *= v_scale;
          chunk_sums[2 * r + 1] *= v_scale;
        }
      }
      products.Store(r, state, &shared_.states[warp_][row], shared_.sums[warp_][row],
                     SwizzleOf(row));
    }
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
        [&](int j, int n, int e) { return *element(j * kHeadSize + Products::Column(n, e)); },
        [&](C value, int j) {
          return Products::Scaled(value, scales_are_uniform_ ? PositionScales{1, 1} : scales[j]);
        });
    __syncwarp();
    ClearNonFinite(lane_, kCount, gpu::kWarpSize, element);
    __syncwarp();
  }

  // Merges what the warps found of a split, and folds or writes it.
  __device__ void FinishSplit(const DecodeItem& work) {
    const Item& item = work.item;
    if (item.split == 0) merges_ = true;
#pragma unroll
    for (int i = 0; i < Rows::kRows; ++i) {
      const int row = i * kWarps + warp_;
      if (row >= item.num_rows) break;
      RowState state;
      float values[Rows::kColumns];
      MergeWarps(row, &state, values);
      if (merges_ && item.split > 0) {
        const Rescale rescale(folded_.states[i].max, state.max);
        state = {fmaxf(folded_.states[i].max, state.max),
                 rescale.Join(folded_.states[i].sum, state.sum)};
#pragma unroll
        for (int k = 0; k < Rows::kColumns; ++k) {
          values[k] = rescale.Join(folded_.values[i][k], values[k]);
        }
      }
      if (merges_ && item.split + 1 == item.num_splits) {
        WriteRow(item, row, state, values);
      } else if (!merges_ || work.is_last) {
        WritePartialResult(item, row, state, values);
      } else {
        folded_.states[i] = state;
#pragma unroll
        for (int k = 0; k < Rows::kColumns; ++k) folded_.values[i][k] = values[k];
      }
    }
    if (work.is_last) merges_ = false;
  }

  __device__ void MergeWarps(int row, RowState* state, float (&values)[Rows::kColumns]) const {
    float max = -kInfinity, weights[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) max = fmaxf(max, shared_.states[w][row].max);
    *state = {max,
              SumOf(max, -kInfinity, kWarps, [&](int64_t w) { return shared_.states[w][row]; })};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      weights[w] = gpu::Exp2(shared_.states[w][row].max - ShiftOf(max));
    }
#pragma unroll
    for (int k = 0; k < Rows::kColumns; ++k) {
      values[k] = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        values[k] =
            gpu::Fma(weights[w], shared_.sums[w][row][ColumnOf(k) ^ SwizzleOf(row)], values[k]);
      }
    }
  }

  // Without it, all rows of the sums would begin in the same bank of shared memory.
  static __device__ __forceinline__ int SwizzleOf(int row) {
    return row * Products::kBanksOfRow % gpu::kWarpSize;
  }

  __device__ __forceinline__ int ColumnOf(int k) const { return k * gpu::kWarpSize + lane_; }

  // Writes a row of which all splits are folded.
  __device__ void WriteRow(const Item& item, int row, RowState state,
                           const float (&values)[Rows::kColumns]) const {
    const RowPlace place(p_, item, row);
    const float factor = JoinSink(p_, place.head, &state);
    const bool attends = p_.Attends(item.Tokens(), place.token);
    T* output = static_cast<T*>(p_.output) + OutputOffset(p_, item, row);
#pragma unroll
    for (int k = 0; k < Rows::kColumns; ++k) {
      const float value = values[k] * factor;
      if (ColumnOf(k) < p_.value_head_size) {
        gpu::FromFloat(attends ? value / state.sum : value, output + ColumnOf(k));
      }
    }
    if (lane_ > 0) return;
    WriteLse(p_, item.first_token + place.token, place.head, state);
    if (item.num_splits > 1) *StateOf(item, place, 0) = MergedSplits::All();
  }

  // Writes a split's partial result, or the fold of all splits up to this one.
  __device__ void WritePartialResult(const Item& item, int row, const RowState& state,
                                     const float (&values)[Rows::kColumns]) const {
    const RowPlace place(p_, item, row);
    const int64_t index = SlotOf(scratch_, item, place) * p_.num_heads + place.head;
    float* partial = scratch_.partials + index * p_.value_head_size;
#pragma unroll
    for (int k = 0; k < Rows::kColumns; ++k) {
      if (ColumnOf(k) < p_.value_head_size) partial[ColumnOf(k)] = values[k];
    }
    if (lane_ > 0) return;
    scratch_.states[index] = state;
    if (merges_ && item.split > 0) *StateOf(item, place, 0) = MergedSplits::UpTo(item.split);
  }

  __device__ RowState* StateOf(const Item& item, const RowPlace& place, int64_t split) const {
    const int64_t slot = SlotOf(scratch_, item, place) - item.split + split;
    return scratch_.states + slot * p_.num_heads + place.head;
  }

  const Params& p_;
  const Scratch& scratch_;
  Shared& shared_;
  const int lane_;
  const int warp_;
  const bool scales_are_uniform_;
  uint32_t count_ = 0;   // tiles of the items before
  bool merges_ = false;  // the splits of this sequence and kv head, from the first one on
  Rows folded_;
};

template <typename T, typename C, int kHeadSize>
__global__ void __launch_bounds__(kDecodeThreads, DecodeShared<T, C, kHeadSize>::kBlocks)
    DecodeAttention(Params p, Scratch scratch, QueryLengths lengths) {
  using Shared = DecodeShared<T, C, kHeadSize>;
  static_assert(sizeof(Shared) <= Shared::kBytes, "a multiprocessor holds kBlocks thread blocks");
  auto* shared = reinterpret_cast<Shared*>(gpu::SharedMemory());
  shared->Init();
  ResetCounter(scratch);
  gpu::LetNextKernelBegin();
  __syncthreads();
  if (threadIdx.x >= kThreads) {
    DecodeProducer<T, C, kHeadSize>(p, scratch, shared).Run(lengths);
  } else {
    DecodeConsumer<T, C, kHeadSize>(p, scratch, shared).Run();
  }
}

}  // namespace xla_gpu::paged_attention
