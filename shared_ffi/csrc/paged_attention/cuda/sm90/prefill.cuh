// Attention of long queries on sm_90a. What it adds to tensor_core.cuh:
//
// - A warpgroup of four warps multiplies 64 rows at a time and reads K and V directly from shared
//   memory.
// - A thread block has three warpgroups. The producer finds the work items and copies their query
//   and KV tiles to shared memory. The two consumers each compute 64 rows of an item. Barriers in
//   shared memory say that a place is filled, or that it is free again. The producer thus runs
//   ahead by as many KV tiles as there is memory for, across items too.
// - A consumer starts the product with the next tile's keys before the product with this tile's
//   values. It turns the next logits into weights while the values are multiplied.
// - The consumers start their products in turn. While the tensor cores compute the products of one,
//   the other turns its logits into weights.
// - Each consumer knows the positions that its rows attend to. It skips other KV tiles, and applies
//   masks only to the tiles that they cut.
// - The producer widens a cache of 8 bits to float16, and converts its query to float16. The range
//   suffices: a query row is divided by a power of two, and weights are not multiplied by scales,
//   which all positions share.
#pragma once

#include "../../../gpu/sm90.cuh"
#include "../softmax.cuh"
#include "pipeline.cuh"

namespace xla_gpu::paged_attention {

inline constexpr int kConsumers = 2;
inline constexpr int kConsumerRows = 64;  // rows of a warpgroup's product
inline constexpr int kPrefillRows = kConsumers * kConsumerRows;
inline constexpr int kPrefillThreads = (1 + kConsumers) * kThreads;

// Registers per thread. A thread block starts with all registers of a multiprocessor, divided
// evenly. Then the producer gives a part of its share to the consumers.
template <typename C, int kHeadSize>
struct PrefillRegisters {
  static constexpr int kLaunch = 64 * 1024 / kPrefillThreads / 8 * 8;
  static constexpr int kProducer = kIs8Bit<C> ? 88 : kHeadSize == 64 ? 72 : 56;
  static constexpr int kConsumer = kIs8Bit<C> ? 208 : kHeadSize == 64 ? 216 : 224;
  static_assert(kProducer + kConsumers * kConsumer <= (1 + kConsumers) * kLaunch,
                "consumers would wait for registers for ever");
};

// Named barriers of the thread block, besides the schedule's. Each consumer has two.
inline constexpr int kTurnBarrier = 1;
inline constexpr int kThreadsBarrier = kTurnBarrier + kConsumers;

// The layout in shared memory of rows of 16-bit elements, as a warpgroup's product reads them.
// Groups of 64 columns lie one after the other; within a group a row has 128 bytes. A row's eight
// chunks of 16 bytes are permuted (swizzled) by the row's number, so that the chunks of one column
// lie in different banks.
template <typename T, int kRows, int kColumns>
struct SwizzledRows {
  static constexpr int kBlockColumns = 64;
  static constexpr int kBlockElements = kRows * kBlockColumns;
  static constexpr int kElements = kRows * kColumns;
  static constexpr int kChunk = 8;  // elements
  static constexpr int kChunks = kColumns / kChunk;
  static_assert(kRows % 8 == 0 && kColumns % kBlockColumns == 0, "the pattern has 8 rows");

  static __device__ __forceinline__ int Offset(int row, int chunk) {
    return chunk / 8 * kBlockElements + row * kBlockColumns + (chunk % 8 ^ row % 8) * kChunk;
  }

  // Descriptor of the columns [column, column + 16) of all rows, which a product sums over.
  static __device__ __forceinline__ uint64_t Columns(const T* rows, int column) {
    const int before = column / kBlockColumns * kBlockElements + column % kBlockColumns;
    return Descriptor(rows, before, 0);
  }

  // Descriptor of the rows [row, row + 16) from a group of columns on; a product sums over the
  // rows.
  static __device__ __forceinline__ uint64_t Rows(const T* rows, int row, int column) {
    const int before = column / kBlockColumns * kBlockElements + row * kBlockColumns;
    return Descriptor(rows, before, kBlockElements * sizeof(T));
  }

 private:
  // PTX ISA, "Matrix Descriptor Format" of wgmma: the start address, the bytes to the next 64
  // columns and the bytes to the next 8 rows, each divided by 16; then the code for 128-byte
  // swizzling. The start is `before` elements behind `rows`, a multiple of 16 bytes, so that the
  // descriptors of one tile differ by constants.
  static __device__ __forceinline__ uint64_t Descriptor(const T* rows, int before,
                                                        uint32_t block_bytes) {
    constexpr uint32_t kGroupBytes = 8 * kBlockColumns * sizeof(T);
    const uint32_t start = (gpu::SharedAddress(rows) >> 4) + before * int{sizeof(T)} / 16;
    return (start | block_bytes >> 4 << 16) | uint64_t{kGroupBytes >> 4 | 1u << 30} << 32;
  }
};

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

// A consumer's part of a work item. Some of the item's KV tiles may hold no positions of its rows.
struct PrefillWork {
  Item item;  // num_rows = -1 marks the end
  Item rows;
  CommonRange common;  // of these rows
  float k_scale;       // of an 8-bit cache, for all positions
  float v_scale;
};

// The shared memory of a thread block. T: type of the query. C: type of the cache.
template <typename T, typename C, int kHeadSize>
struct PrefillShared {
  using Element = std::conditional_t<kIs8Bit<C>, Half, T>;
  static constexpr int kTile = kHeadSize <= 128 ? 128 : kHeadSize <= 192 ? 64 : 48;  // positions
  static constexpr int kItems = 2;  // work items in memory
  using QueryRows = SwizzledRows<Element, kConsumerRows, kHeadSize>;
  using CacheRows = SwizzledRows<Element, kTile, kHeadSize>;
  // KV tiles in memory. A thread block has 227 KiB, 2 of them for all that is small.
  static constexpr int kStagesThatFit =
      (225 * 1024 / 2 - kConsumers * QueryRows::kElements) / (2 * CacheRows::kElements);
  static constexpr int kStages = kStagesThatFit < 4 ? kStagesThatFit : 4;
  static_assert(kStages >= 2, "a tile is copied while another one is read");
  using TileState = PipelineState<kStages>;
  using ItemState = PipelineState<kItems>;
  using QueryState = PipelineState<1>;

  // Where V is a part of K, the keys of a tile are its values too, and are free when these are. For
  // a cache of 8 bits the producer has no registers for the distinction.
  static __device__ __forceinline__ bool KeysHoldValues(const Params& p) {
    return !kIs8Bit<C> && p.is_latent;
  }

  alignas(1024) Element query[kConsumers][QueryRows::kElements];
  alignas(1024) Element keys[kStages][CacheRows::kElements];
  alignas(1024) Element values[kStages][CacheRows::kElements];
  float query_factors[kConsumers][kConsumerRows];  // of an 8-bit cache: the powers of two
  PipelineBarriers<1> query_barriers[kConsumers];
  PipelineBarriers<kStages> keys_barriers;
  PipelineBarriers<kStages> values_barriers;
  PipelineBarriers<kItems> items_barriers;
  PrefillWork work[kItems][kConsumers];
  Schedule::Shared schedule;
  int32_t number;  // of the producer's work item

  // One thread calls it.
  __device__ void Init() {
    for (PipelineBarriers<1>& barriers : query_barriers) barriers.Init(kThreads, kWarps);
    keys_barriers.Init(kThreads, kConsumers * kWarps);
    values_barriers.Init(kThreads, kConsumers * kWarps);
    items_barriers.Init(kConsumers, kConsumers * kWarps);
  }
};

// The rows of a KV tile of an 8-bit cache that a warp copies, by way of its registers.
template <typename C, typename CacheRows, int kPositions>
class WidenedRows {
  static constexpr int kPieces = CacheRows::kChunks / 2;  // of a row: 16 numbers for each lane
  static constexpr int kRows = gpu::kWarpSize / kPieces;  // at a time
  static constexpr int kLoads = kPositions / kRows;
  static constexpr int kPlaces = kRows < 8 ? 8 / kRows : 1;  // the swizzle repeats after 8 rows
  static_assert(kPositions % kRows == 0 && 8 % kPlaces == 0);

 public:
  // Where rows of one kv head come from. Rows and columns out of range are filled with zeros.
  struct Source {
    const C* cache;
    int64_t num_columns;
    int64_t offset_of_lane;  // each lane has the offset of one row, in bytes
  };

  __device__ __forceinline__ void Load(const Source& source) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) Load(i, source);
  }

  // Stores the rows to a tile, of which `first_row` is the warp's first.
  __device__ __forceinline__ void Store(Half* tile, int first_row) {
    ForEachStored(tile, first_row, [](int) {});
  }

  // The same, and loads the next rows in their place. Each load is under way as soon as there is
  // room.
  __device__ __forceinline__ void StoreAndLoad(Half* tile, int first_row, const Source& next) {
    ForEachStored(tile, first_row, [&](int i) { Load(i, next); });
  }

 private:
  struct alignas(16) Piece {
    uint32_t word[4] = {};
  };

  static __device__ __forceinline__ int Lane() { return threadIdx.x % gpu::kWarpSize; }

  __device__ __forceinline__ void Load(int i, const Source& source) {
    const int column = Lane() % kPieces * 16;
    const int64_t offset = gpu::Shuffle(source.offset_of_lane, i * kRows + Lane() / kPieces);
    const auto from = reinterpret_cast<uintptr_t>(source.cache + column);
    const bool exists = offset >= 0 && column < source.num_columns;
    pieces_[i] = exists ? *reinterpret_cast<const Piece*>(from + offset) : Piece();
  }

  // Calls then(i) when piece i is stored. A piece becomes two chunks. Half of the lanes store the
  // second one first: eight lanes then write to different banks.
  template <typename Then>
  __device__ __forceinline__ void ForEachStored(Half* tile, int first_row, const Then& then) {
    const int piece = Lane() % kPieces, row = first_row + Lane() / kPieces, first = piece / 4 % 2;
    Half* to[kPlaces];
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
      to[i] = tile + CacheRows::Offset(row + i * kRows, 2 * piece);
    }
    const int second = CacheRows::Offset(row, 2 * piece + 1) - CacheRows::Offset(row, 2 * piece);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const uint32_t(&word)[4] = pieces_[i].word;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool is_second = half != first;
        FourPairs chunk;
        Widen(is_second ? word[2] : word[0], chunk.pair);
        Widen(is_second ? word[3] : word[1], chunk.pair + 2);
        const int rows = i / kPlaces * kPlaces * kRows;
        *reinterpret_cast<FourPairs*>(to[i % kPlaces] + (is_second ? second : 0) +
                                      rows * CacheRows::kBlockColumns) = chunk;
      }
      then(i);
    }
  }

  static __device__ __forceinline__ void Widen(uint32_t from, uint32_t* to) {
    uint32_t pairs[2];
    gpu::Expand(from, C{}, pairs, Half{});
    to[0] = pairs[0];
    to[1] = pairs[1];
  }

  Piece pieces_[kLoads];
};

template <typename T, typename C, int kHeadSize>
class PrefillProducer {
  using Shared = PrefillShared<T, C, kHeadSize>;
  using QueryRows = typename Shared::QueryRows;
  using CacheRows = typename Shared::CacheRows;
  static constexpr int kTile = Shared::kTile;
  static constexpr int kPositions = kTile / kWarps;  // of a KV tile for each warp
  static_assert(kPositions <= gpu::kWarpSize, "a lane finds the slot of one position");
  using Element = typename Shared::Element;
  struct NoRows {};
  using Widened = std::conditional_t<kIs8Bit<C>, WidenedRows<C, CacheRows, kPositions>, NoRows>;

 public:
  __device__ PrefillProducer(const Params& p, const Scratch& scratch, Shared* shared)
      : p_(p),
        scratch_(scratch),
        shared_(*shared),
        lane_(threadIdx.x % gpu::kWarpSize),
        warp_(threadIdx.x / gpu::kWarpSize) {}

  __device__ void Run(QueryLengths lengths) {
    Schedule schedule(p_, lengths, kPrefillRows, &shared_.schedule);
    gpu::WaitForKernelsBefore();  // the one before resets the counter
    const ItemCounter counter(scratch_.counter, &shared_.number);
    for (uint32_t n = 0;; ++n) {
      const Item* item = schedule.Find(counter.Next());
      PublishWork(item, Shared::ItemState::Of(n));
      if (item == nullptr) break;
      CopyTiles(*item, Shared::QueryState::Of(n));
    }
    gpu::CommitCopies();
    gpu::WaitCopies<0>();
  }

 private:
  __device__ void PublishWork(const Item* item, typename Shared::ItemState stage) {
    if (threadIdx.x >= kConsumers) return;
    shared_.items_barriers.WaitFreed(stage);
    PrefillWork& work = shared_.work[stage.index][threadIdx.x];
    if (item != nullptr) {
      work.item = *item;
      work.rows = RowsOf(p_, *item, threadIdx.x * kConsumerRows, kConsumerRows);
      work.common = CommonRange(p_, work.rows);
      if constexpr (kIs8Bit<C>) {
        work.k_scale = p_.k_scale.At(0, 0, item->kv_head);
        work.v_scale = p_.v_scale.At(0, 0, item->kv_head);
      }
    } else {
      work.item.num_rows = -1;
    }
    gpu::Arrive(&shared_.items_barriers.filled[stage.index]);
  }

  // Copies the item's tiles, and its query after the first tile's keys: the consumers may still
  // need the query of the item before.
  __device__ void CopyTiles(const Item& item, typename Shared::QueryState query_stage) {
    bool is_bad = HasBadTree(p_, item, threadIdx.x);
    const Tiles tiles(item, kTile);
    [[maybe_unused]] Widened rows;
    // The block id of the next tile is on its way while a tile is copied.
    int32_t position = tiles.begin * kTile + warp_ * kPositions + min(lane_, kPositions - 1);
    int32_t block = IsIn(item, position) ? BlockOf(p_, item, position) : 0;
    if (tiles.begin == tiles.end) CopyQuery(item, query_stage);
    for (int32_t tile = tiles.begin; tile < tiles.end; ++tile) {
      const int32_t next = position + kTile;
      const int32_t next_block = IsIn(item, next) ? BlockOf(p_, item, next) : 0;
      Slot<C> slot;
      if (IsIn(item, position)) slot = SlotIn<C>(p_, item, block, position, &is_bad);
      const bool is_first = tile == tiles.begin;
      if constexpr (kIs8Bit<C>) {
        using Source = typename Widened::Source;
        const int64_t offset = BytesTo<C>(slot);
        const Source keys = {KeyOf<C>(p_, 0, item.kv_head), p_.head_size, offset};
        // V has the strides of K: others would take registers that are not there.
        const C* of_head =
            static_cast<const C*>(p_.cache.values) + item.kv_head * p_.cache.head_stride;
        const Source values = {of_head, p_.value_head_size, offset};
        if (is_first) {
          rows.Load(keys);
        } else {
          FillValues([&](Half* to) { rows.StoreAndLoad(to, warp_ * kPositions, keys); });
        }
        FillKeys([&](Half* to) { rows.StoreAndLoad(to, warp_ * kPositions, values); });
        if (is_first) CopyQuery(item, query_stage);
      } else {
        const uint32_t chunks = ChunksTo<C>(slot);
        FillKeys([&](T* to) { CopyTile(KeyOf<T>(p_, 0, item.kv_head), p_.head_size, chunks, to); });
        if (is_first) CopyQuery(item, query_stage);
        if (Shared::KeysHoldValues(p_)) {
          stage_ = stage_.Next();
        } else {
          FillValues([&](T* to) {
            CopyTile(ValueOf<T>(p_, 0, item.kv_head), p_.value_head_size, ChunksOfValue(p_, chunks),
                     to);
          });
        }
      }
      position = next;
      block = next_block;
    }
    if constexpr (kIs8Bit<C>) {
      if (tiles.begin < tiles.end) {
        FillValues([&](Half* to) { rows.Store(to, warp_ * kPositions); });
      }
    }
    is_bad = gpu::AnyInThreads(kScheduleBarrier, kThreads, is_bad);
    if (threadIdx.x == 0) Report(p_, scratch_, item, is_bad);
  }

  // Calls fill(tile) for the next tile of keys.
  template <typename Fill>
  __device__ __forceinline__ void FillKeys(const Fill& fill) {
    shared_.keys_barriers.WaitFreed(stage_);
    fill(shared_.keys[stage_.index]);
    ArriveAt(&shared_.keys_barriers.filled[stage_.index]);
  }

  // The same for values, which are filled after the keys of the same positions.
  template <typename Fill>
  __device__ __forceinline__ void FillValues(const Fill& fill) {
    shared_.values_barriers.WaitFreed(stage_);
    fill(shared_.values[stage_.index]);
    ArriveAt(&shared_.values_barriers.filled[stage_.index]);
    stage_ = stage_.Next();
  }

  static __device__ __forceinline__ void ArriveAt(gpu::Barrier* filled) {
    kIs8Bit<C> ? gpu::Arrive(filled) : gpu::ArriveAfterCopies(filled);
  }

  __device__ void CopyQuery(const Item& item, typename Shared::QueryState stage) {
#pragma unroll 1
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      PipelineBarriers<1>& barriers = shared_.query_barriers[consumer];
      Element* query = shared_.query[consumer];
      const auto copy = [&](int row, int chunk, const T* from, bool exists) {
        Element* to = query + QueryRows::Offset(row, chunk);
        if constexpr (kIs8Bit<C>) {
          float factor;
          *reinterpret_cast<FourPairs*>(to) = HalvesOf<QueryRows::kChunks>(from, exists, &factor);
          if (chunk == 0) shared_.query_factors[consumer][row] = factor;
        } else {
          gpu::CopyAsync16(to, from, exists);
        }
      };
      barriers.WaitFreed(stage);
      ForQueryChunks<T, QueryRows>(p_, item, consumer * kConsumerRows, kConsumerRows, threadIdx.x,
                                   copy);
      ArriveAt(&barriers.filled[stage.index]);
    }
  }

  // A warp copies the positions whose offsets its lanes have found; eight lanes copy 128 bytes of
  // one position. Rows and columns out of range are filled with zeros.
  __device__ void CopyTile(const T* cache, int64_t num_columns, uint32_t chunks_of_lane, T* tile) {
    const int row = lane_ / 8, chunk = lane_ % 8, first_row = warp_ * kPositions + row;
    const auto from = reinterpret_cast<uintptr_t>(cache + chunk * CacheRows::kChunk);
    // The lane's chunks of a row that exist.
    const int num_chunks =
        CeilDiv(num_columns - chunk * CacheRows::kChunk, CacheRows::kBlockColumns);
    // Where a chunk lies among others repeats every eight rows.
    T* const to[2] = {tile + CacheRows::Offset(first_row, chunk),
                      tile + CacheRows::Offset(first_row + 4, chunk)};
#pragma unroll
    for (int i = 0; i < kPositions; i += 4) {
      const uint32_t chunks = gpu::Shuffle(chunks_of_lane, row + i);
      const uintptr_t from_row = from + uint64_t{chunks} * 16;
#pragma unroll
      for (int block = 0; block < CacheRows::kChunks / 8; ++block) {
        const int column = block * CacheRows::kBlockColumns;
        gpu::CopyAsync16(to[i / 4 % 2] + i / 8 * 8 * CacheRows::kBlockColumns +
                             block * CacheRows::kBlockElements,
                         reinterpret_cast<const void*>(from_row + column * sizeof(T)),
                         block < num_chunks && chunks != kNoSlot);
      }
    }
  }

  const Params& p_;
  const Scratch& scratch_;
  Shared& shared_;
  const int lane_;
  const int warp_;
  typename Shared::TileState stage_;  // the next KV tile's
};

// Computes a consumer's rows of one work item.
template <typename T, typename C, int kHeadSize>
class PrefillConsumer {
  using Shared = PrefillShared<T, C, kHeadSize>;
  using QueryRows = typename Shared::QueryRows;
  using CacheRows = typename Shared::CacheRows;
  using Element = typename Shared::Element;
  using QueryState = typename Shared::QueryState;
  using TileState = typename Shared::TileState;
  static constexpr int kTile = Shared::kTile;
  static constexpr int kColumns = kHeadSize % 128 == 0 ? 128 : 64;  // of a product with values

 public:
  __device__ PrefillConsumer(const Params& p, const Scratch& scratch, const PrefillWork& work,
                             int consumer, Shared* shared)
      : p_(p),
        scratch_(scratch),
        item_(work.item),
        rows_(work.rows),
        work_(work),
        shared_(*shared),
        consumer_(consumer),
        common_(work.common),
        softmax_(p, work.rows, RowOf(0)) {}

  // `stage` is the stage of the item's first KV tile, and becomes that of the next item's first KV
  // tile.
  __device__ void Compute(QueryState query_stage, TileState* stage) {
    int32_t tile = Tiles(item_, kTile).begin;
    for (const Tiles own(rows_, kTile); tile < own.begin; ++tile) Skip(stage);
    PipelineBarriers<1>& query_barriers = shared_.query_barriers[consumer_];
    query_barriers.WaitFilled(query_stage);
    if constexpr (kIs8Bit<C>) {
      const float* factors = shared_.query_factors[consumer_];
      for (int r = 0; r < 2; ++r) softmax_.MultiplyScale(r, factors[RowOf(r)] * work_.k_scale);
    }
    if (rows_.begin < rows_.end) {
      tile = ComputeTiles(query_barriers, query_stage, stage);
    } else {
      query_barriers.Free(query_stage);
    }
    for (const Tiles all(item_, kTile); tile < all.end; ++tile) Skip(stage);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      item_.num_splits > 1 ? WritePartialResult(r) : WriteRow(r);
    }
  }

 private:
  // Computes the tiles that hold positions of the consumer's rows. Returns the tile after them.
  __device__ int32_t ComputeTiles(PipelineBarriers<1>& query_barriers, QueryState query_stage,
                                  TileState* stage) {
    int32_t tile = rows_.begin / kTile;
    float logits[kTile / 8][4];
    uint32_t weights[kTile / 16][4];
    float rescales[2];
    WaitForKeys(*stage);
    TakeTurn();
    StartLogits(*stage, logits);
    PassTurn();
    gpu::WaitProducts<0>(logits);
    FreeKeys(*stage);
    Weigh(tile, logits, rescales);
    Pack(logits, weights);
    for (; tile < (rows_.end - 1) / kTile; ++tile) {
      const TileState next = stage->Next();
      if (WaitForValues(tile, *stage)) {
        WaitForKeys(next);
        TakeTurn();
        StartLogits(next, logits);
        StartSums(*stage, weights);
        PassTurn();
        gpu::WaitProducts<1>(logits);
        FreeKeys(next);
        Weigh(tile + 1, logits, rescales);
        gpu::KeepRegisters(logits);
        // ptxas moves a wait up within its basic block. Without the branch, the weights would not
        // be computed while the values are multiplied.
        if (gpu::AnyInWarp(rescales[0] != 1 || rescales[1] != 1)) {
          gpu::WaitProducts<0>(sums_);
          Softmax::RescaleSums(rescales, sums_);
        } else {
          gpu::WaitProducts<0>(sums_);
        }
        gpu::KeepRegisters(weights);
      } else {
        AddOneByOne(tile, *stage, weights);
        WaitForKeys(next);
        TakeTurn();
        StartLogits(next, logits);
        PassTurn();
        gpu::WaitProducts<0>(logits);
        FreeKeys(next);
        Weigh(tile + 1, logits, rescales);
        Softmax::RescaleSums(rescales, sums_);
      }
      FreeValues(*stage);
      Pack(logits, weights);
      *stage = next;
    }
    query_barriers.Free(query_stage);
    if (WaitForValues(tile, *stage)) {
      StartSums(*stage, weights);
      gpu::WaitProducts<0>(sums_);
    } else {
      AddOneByOne(tile, *stage, weights);
    }
    FreeValues(*stage);
    *stage = stage->Next();
    return tile + 1;
  }

  static __device__ __forceinline__ int Lane() { return threadIdx.x % gpu::kWarpSize; }

  // Consumers start products in turn, one turn for each KV tile of an item.
  __device__ void TakeTurn() const {
    gpu::SyncThreads(kTurnBarrier + consumer_, kConsumers * kThreads);
  }
  __device__ void PassTurn() const {
    gpu::ArriveThreads(kTurnBarrier + (consumer_ ^ 1), kConsumers * kThreads);
  }

  __device__ void Skip(TileState* stage) {
    shared_.keys_barriers.WaitFilled(*stage);
    FreeKeys(*stage);
    if (!Shared::KeysHoldValues(p_)) shared_.values_barriers.WaitFilled(*stage);
    FreeValues(*stage);
    TakeTurn();
    PassTurn();
    *stage = stage->Next();
  }

  __device__ const Element* Values(TileState stage) const {
    return Shared::KeysHoldValues(p_) ? shared_.keys[stage.index] : shared_.values[stage.index];
  }
  __device__ void FreeKeys(TileState stage) {
    if (!Shared::KeysHoldValues(p_)) shared_.keys_barriers.Free(stage);
  }
  __device__ void FreeValues(TileState stage) {
    (Shared::KeysHoldValues(p_) ? shared_.keys_barriers : shared_.values_barriers).Free(stage);
  }

  __device__ void WaitForKeys(TileState stage) {
    shared_.keys_barriers.WaitFilled(stage);
    gpu::FenceAsyncProxy();
  }

  // Returns whether V of the tile may be multiplied: a weight of zero times an infinite or NaN
  // value would spoil the sum of a row that does not attend to it.
  __device__ bool WaitForValues(int32_t tile, TileState stage) {
    if (!Shared::KeysHoldValues(p_)) {
      shared_.values_barriers.WaitFilled(stage);
      gpu::FenceAsyncProxy();
    }
    if (!common_.RowsDiffer(item_, tile * kTile, (tile + 1) * kTile)) return true;
    const Element* values = Values(stage);
    constexpr int kChunks = CacheRows::kElements / CacheRows::kChunk;
    const bool found =
        HoldsNonFinite<Element>(static_cast<int>(threadIdx.x) % kThreads, kChunks, kThreads,
                                [&](int i) { return values + i * CacheRows::kChunk; });
    return !gpu::AnyInThreads(kThreadsBarrier + consumer_, kThreads, found);
  }

  // Starts logits = q k^T.
  __device__ void StartLogits(TileState stage, float (&logits)[kTile / 8][4]) {
    gpu::FenceProducts(logits);
    const Element *query = shared_.query[consumer_], *keys = shared_.keys[stage.index];
#pragma unroll
    for (int column = 0; column < kHeadSize; column += 16) {
      gpu::StartProduct(logits, QueryRows::Columns(query, column), CacheRows::Columns(keys, column),
                        /*accumulates=*/column > 0, Element{});
    }
    gpu::CommitProducts();
  }

  // Starts sums += weights * v.
  __device__ void StartSums(TileState stage, uint32_t (&weights)[kTile / 16][4]) {
    gpu::KeepRegisters(weights);
    gpu::FenceProducts(sums_);
    const Element* values = Values(stage);
#pragma unroll
    for (int step = 0; step < kTile / 16; ++step) {
#pragma unroll
      for (int column = 0; column < kHeadSize; column += kColumns) {
        auto& sums = *reinterpret_cast<float(*)[kColumns / 8][4]>(sums_ + column / 8);
        gpu::StartProductTransposed(sums, weights[step], CacheRows::Rows(values, step * 16, column),
                                    Element{});
      }
    }
    gpu::CommitProducts();
  }

  // Turns the logits of a KV tile into weights.
  __device__ void Weigh(int32_t tile, float (&logits)[kTile / 8][4], float (&rescales)[2]) {
    const int32_t begin = tile * kTile, end = begin + kTile;
    softmax_.ToLogits(begin, /*masked=*/!common_.Contains(begin, end), logits);
    softmax_.Weigh(logits, rescales);
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

  // sums += weights * v, one position after the other: a row takes only values that it attends to.
  // Uses the weights up.
  __device__ void AddOneByOne(int32_t tile, TileState stage, uint32_t (&weights)[kTile / 16][4]) {
    const Element* values = Values(stage);
#pragma unroll 1
    for (int j = 0; j < kTile; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t pair = gpu::Shuffle(j % 16 < 8 ? weights[0][r] : weights[0][2 + r],
                                           Lane() / 4 * 4 + j % 8 / 2);
        if (!softmax_.Attends(r, tile * kTile + j)) continue;
        const float weight =
            gpu::ToFloat(Element{static_cast<uint16_t>(j % 2 ? pair >> 16 : pair)});
#pragma unroll
        for (int n = 0; n < kHeadSize / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const Element value = values[CacheRows::Offset(j, n) + Lane() % 4 * 2 + e];
            const float factor = IsFinite(value) ? weight : 1.0f;
            sums_[n][2 * r + e] = gpu::Fma(factor, gpu::ToFloat(value), sums_[n][2 * r + e]);
          }
        }
      }
      if (j % 16 < 15) continue;
      // The weights of the next 16 positions move to the front. An index would put all in memory.
#pragma unroll
      for (int step = 0; step < kTile / 16 - 1; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) weights[step][i] = weights[step + 1][i];
      }
    }
  }

  // The number of the lane's row r among the consumer's rows.
  static __device__ __forceinline__ int RowOf(int r) {
    return static_cast<int>(threadIdx.x) % kThreads / gpu::kWarpSize * 16 + Lane() / 4 + 8 * r;
  }

  // Writes the lane's row r to the output.
  __device__ __forceinline__ void WriteRow(int r) {
    const RowState state = softmax_.State(r);
    const int row = RowOf(r);
    const bool exists = row < rows_.num_rows;
    float factor = 0;
    if (exists) {
      const RowPlace place(p_, rows_, row);
      const float sink = SinkOf(p_, place.head);
      const float max = fmaxf(state.max, sink);
      const float weight = gpu::Exp2(state.max - ShiftOf(max));
      const float sum = SumOf(max, sink, 1, [&](int64_t) { return state; });
      const RowRange& range = softmax_.Range(r);
      const float divisor = range.begin < range.end ? sum : 1.0f;  // without keys the sum is zero
      factor = weight / divisor;
      if (kIs8Bit<C> && range.begin < range.end) factor *= work_.v_scale;
      if (Lane() % 4 == 0) {
        WriteLse(p_, item_.first_token + place.token, place.head, {max, sum});
      }
    }
    T* output = static_cast<T*>(p_.output) + (exists ? OutputOffset(p_, rows_, row) : 0);
#pragma unroll
    for (int n = 0; n < kHeadSize / 8; n += 4) {
      struct alignas(16) {
        uint32_t word[4];
      } columns;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        columns.word[i] =
            gpu::Pack(sums_[n + i][2 * r] * factor, sums_[n + i][2 * r + 1] * factor, T{});
      }
      TransposeInQuads(columns.word);  // now 8 adjacent columns of group n + Lane() % 4
      const int column = (n + Lane() % 4) * 8;
      if (exists && column < p_.value_head_size) {
        *reinterpret_cast<decltype(columns)*>(output + column) = columns;
      }
    }
  }

  // Writes the lane's row r to the scratch: the work item is a split.
  __device__ __forceinline__ void WritePartialResult(int r) {
    const RowState state = softmax_.State(r);
    const int row = RowOf(r);
    if (row >= rows_.num_rows) return;
    const RowPlace place(p_, rows_, row);
    const int64_t index = PartialOf(scratch_, rows_, place) * p_.num_heads + place.head;
    if (Lane() % 4 == 0) scratch_.states[index] = state;
    float* partial = scratch_.partials + index * p_.value_head_size;
    const float factor = kIs8Bit<C> && state.sum != 0 ? work_.v_scale : 1.0f;
#pragma unroll
    for (int n = 0; n < kHeadSize / 8; ++n) {
      if (n * 8 >= p_.value_head_size) break;
      float* columns = partial + n * 8 + Lane() % 4 * 2;
      columns[0] = sums_[n][2 * r] * factor;
      columns[1] = sums_[n][2 * r + 1] * factor;
    }
  }

  const Params& p_;
  const Scratch& scratch_;
  const Item& item_;
  const Item& rows_;  // the consumer's
  const PrefillWork& work_;
  Shared& shared_;
  const int consumer_;
  // With a cache of 8 bits there are no registers for a copy.
  const std::conditional_t<kIs8Bit<C>, const CommonRange&, CommonRange> common_;
  Softmax softmax_;
  float sums_[kHeadSize / 8][4] = {};  // laid out as logits, with columns in place of positions
};

template <typename T, typename C, int kHeadSize>
__global__ void __launch_bounds__(kPrefillThreads, 1)
    PrefillAttention(Params p, Scratch scratch, QueryLengths lengths) {
  using Shared = PrefillShared<T, C, kHeadSize>;
  using Registers = PrefillRegisters<C, kHeadSize>;
  auto* shared = reinterpret_cast<Shared*>(gpu::SharedMemory());
  if (threadIdx.x == 0) shared->Init();
  gpu::LetNextKernelBegin();
  __syncthreads();
  const int warpgroup = gpu::Shuffle(static_cast<int>(threadIdx.x / kThreads), 0);  // uniform
  if (warpgroup == 0) {
    gpu::GiveRegistersBack<Registers::kProducer>();
    PrefillProducer<T, C, kHeadSize>(p, scratch, shared).Run(lengths);
  } else {
    gpu::TakeRegisters<Registers::kConsumer>();
    const int consumer = warpgroup - 1;
    typename Shared::TileState tile;
    gpu::WaitForKernelsBefore();
    // The first turn to start products is the first consumer's.
    if (consumer > 0) gpu::ArriveThreads(kTurnBarrier, kConsumers * kThreads);
    for (uint32_t n = 0;; ++n) {
      const auto stage = Shared::ItemState::Of(n);
      shared->items_barriers.WaitFilled(stage);
      const PrefillWork& work = shared->work[stage.index][consumer];
      if (work.item.num_rows == -1) break;
      PrefillConsumer<T, C, kHeadSize>(p, scratch, work, consumer, shared)
          .Compute(Shared::QueryState::Of(n), &tile);
      shared->items_barriers.Free(stage);
    }
    if (consumer == 0) gpu::SyncThreads(kTurnBarrier, kConsumers * kThreads);  // a turn too many
  }
}

}  // namespace xla_gpu::paged_attention
