// The producer of the prefill kernel: finds the work items and fills the places that shared.cuh
// declares.
#pragma once

#include "../page_table.cuh"
#include "../partial_results.cuh"
#include "../query.cuh"
#include "../schedule.cuh"
#include "../softmax.cuh"
#include "shared.cuh"

namespace xla_gpu::paged_attention::sm90 {

// The rows of a KV tile of an 8-bit cache that a warp copies, by way of its registers.
template <typename C, typename CacheRows, int kPositions>
class WidenedRows {
  static constexpr int kPieces = CacheRows::kChunks / 2;  // of a row: 16 numbers for each lane
  static constexpr int kRows = gpu::kWarpSize / kPieces;  // at a time
  static constexpr int kLoads = kPositions / kRows;
  static constexpr int kPlaces = kRows < 8 ? 8 / kRows : 1;  // the swizzle repeats after 8 rows
  static_assert(kPositions % kRows == 0 && 8 % kPlaces == 0 && kRows % 2 == 0 && kPieces % 4 == 0);

 public:
  // Where rows of one kv head come from. Rows and columns out of range are filled with zeros.
  struct Source {
    const C* cache;
    int64_t num_columns;
    uint32_t chunks_of_lane;  // each lane has the offset of one row, in chunks of 16 bytes
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

  // Eight lanes have four pieces each of two adjacent rows: they then store each of their chunks to
  // different banks.
  static __device__ __forceinline__ int PieceOfLane() {
    const int lane = threadIdx.x % gpu::kWarpSize;
    return lane % 4 + lane / 8 * 4 % kPieces;
  }
  static __device__ __forceinline__ int RowOfLane() {
    const int lane = threadIdx.x % gpu::kWarpSize;
    return lane / 4 % 2 + lane / 8 * 4 / kPieces * 2;
  }

  __device__ __forceinline__ void Load(int i, const Source& source) {
    const int column = PieceOfLane() * 16;
    const uint32_t chunks = gpu::Shuffle(source.chunks_of_lane, i * kRows + RowOfLane());
    const auto from = reinterpret_cast<uintptr_t>(source.cache + column);
    const bool exists = chunks != kNoSlot && column < source.num_columns;
    pieces_[i] = exists ? *reinterpret_cast<const Piece*>(from + uint64_t{chunks} * 16) : Piece();
  }

  // Calls then(i) when piece i is stored. A piece becomes two chunks.
  template <typename Then>
  __device__ __forceinline__ void ForEachStored(Half* tile, int first_row, const Then& then) {
    const int piece = PieceOfLane(), row = first_row + RowOfLane();
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
        FourPairs chunk;
        Widen(word[2 * half], chunk.pair);
        Widen(word[2 * half + 1], chunk.pair + 2);
        const int rows = i / kPlaces * kPlaces * kRows;
        *reinterpret_cast<FourPairs*>(to[i % kPlaces] + half * second +
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
class Producer {
  using Shared = sm90::Shared<T, C, kHeadSize>;
  using QueryRows = typename Shared::QueryRows;
  using CacheRows = typename Shared::CacheRows;
  static constexpr int kTile = Shared::kTile;
  static constexpr int kPositions = kTile / kWarps;  // of a KV tile for each warp
  static_assert(kPositions <= gpu::kWarpSize, "a lane finds the slot of one position");
  using Element = typename Shared::Element;
  static constexpr int kQueryStep = kThreads / 8;  // query rows that are copied at a time
  struct NoRows {};
  using Widened = std::conditional_t<kIs8Bit<C>, WidenedRows<C, CacheRows, kPositions>, NoRows>;

 public:
  __device__ Producer(const Params& p, const Scratch& scratch, const Maps& maps, Shared* shared)
      : p_(p),
        scratch_(scratch),
        maps_(maps),
        shared_(*shared),
        lane_(threadIdx.x % gpu::kWarpSize),
        warp_(threadIdx.x / gpu::kWarpSize) {}

  __device__ void Run(QueryLengths lengths) {
    gpu::WaitForKernelsBefore();
    Schedule schedule(p_, lengths, kItemRows, &shared_.schedule);
    gpu::Arrive(&shared_.values_barriers.filled[0]);  // the place that is skipped
    for (uint32_t next = 0; CopyTiles(&schedule, next); ++next) {
    }
    gpu::CommitCopies();
    gpu::WaitCopies<0>();
  }

 private:
  __device__ __forceinline__ const Item& ItemOf(uint32_t n) const {
    return shared_.work[Shared::ItemState::Of(n).index][0].item;
  }

  // Finds work item n, whose number has been asked for. Its work may be read behind a barrier.
  __device__ __forceinline__ void FindWork(Schedule* schedule, uint32_t n) {
    gpu::SyncThreads(kScheduleBarrier, kThreads);
    const Item* item = schedule->Find(shared_.number);
    if (threadIdx.x >= kConsumers) return;
    const auto stage = Shared::ItemState::Of(gpu::Opaque(n));
    shared_.items_barriers.WaitFreed(stage);
    Work& work = shared_.work[stage.index][threadIdx.x];
    if (item != nullptr) {
      work.number = n;
      work.item = *item;
      work.rows = RowsOf(p_, *item, threadIdx.x * kConsumerRows, kConsumerRows);
      work.common = CommonRange(p_, *item);
      const RowPlace first(p_, work.rows, 0);
      work.token = static_cast<int32_t>(first.token);
      work.head = static_cast<int32_t>(first.head - item->kv_head * p_.group.number);
      if constexpr (kIs8Bit<C>) {
        work.k_scale = p_.k_scale.At(0, 0, item->kv_head);
        work.v_scale = p_.v_scale.At(0, 0, item->kv_head);
        work.scale_late = Softmax::ScalesLate(p_, p_.scale * (kSmallestFactor * work.k_scale));
      }
    } else {
      work.item.num_rows = -1;
    }
    gpu::Arrive(&shared_.items_barriers.filled[stage.index]);
  }

  // Copies the tiles and the query of the item before item `next`, and finds that one. Returns
  // whether there is one. Item 0 follows on an item of no tiles.
  //
  // The consumers free the query of the item before when they begin the last tile of that item, and
  // the last place of K with it. Two places of V are free still later. So tiles for the other
  // places come before the query. The thread block's first query has nothing to wait for.
  //
  // The next item is found when all places have tiles of this one: while the consumers compute
  // these, there is time for divisions and loads. Its number is asked for at the beginning. With a
  // cache of 8 bits there are no registers for either: the query comes first, the next item last.
  __device__ bool CopyTiles(Schedule* schedule, uint32_t next) {
    const Item& item = ItemOf(next + Shared::kItems - 1);
    bool is_bad = HasBadTree(p_, item, threadIdx.x);
    const int32_t first = Tiles(item, kTile).begin;
    int32_t query_tile = first + (kIs8Bit<C> || next == 1 ? 0 : Shared::kStages - 2);
    [[maybe_unused]] Widened rows;
    // The block id of the next tile is on its way while a tile is copied. It is asked for when this
    // tile's has been used: a wait for one load in a register is a wait for the next one, too.
    int32_t position = PositionIn(first);
    int32_t number = 0;
    if (gpu::Opaque(threadIdx.x) == 0) {
      // The first items are dealt: a block waits for no atomic before its first copy.
      number = next == 0 ? blockIdx.x : gridDim.x + atomicAdd(scratch_.counter, 1);
    }
    int32_t block = IsIn(item, position) ? BlockOf(p_, item, position) : 0;
    if (gpu::Opaque(threadIdx.x) == 0) shared_.number = number;
    int32_t tile = first, until = kIs8Bit<C> ? INT32_MAX : first + Shared::kStages;
#pragma unroll 1
    for (;;) {
      if constexpr (!kIs8Bit<C>) {
        // What a copy needs takes no registers between items, nor while the next one is found.
        const int thread = gpu::Opaque(threadIdx.x);
        lane_ = thread % gpu::kWarpSize;
        warp_ = thread / gpu::kWarpSize;
      }
      // The end is in shared memory, not in a register.
      for (; tile < until && tile * kTile < item.end; ++tile) {
        Slot<C> slot;
        BoxOfLane box;
        // The tile at the end may have NaN behind it, which must not be copied.
        const bool is_whole = item.begin <= tile * kTile && (tile + 1) * kTile <= item.end;
        const bool takes_boxes = !kIs8Bit<C> && maps_.exist && is_whole;
        if (takes_boxes) {
          HasBlock(p_, block, &is_bad);
          box = {block, static_cast<int32_t>(InBlock(p_, position))};
        } else if (IsIn(item, position)) {
          slot = SlotIn<C>(p_, item, block, position, &is_bad);
        }
        position += kTile;
        gpu::KeepOrder();
        block = IsIn(item, position) ? BlockOf(p_, item, position) : 0;
        if (tile == query_tile) CopyQuery(item, next);
        if constexpr (kIs8Bit<C>) {
          using Source = typename Widened::Source;
          const uint32_t chunks = ChunksTo<C>(slot);
          const Source keys = {KeyOf<C>(p_, 0, item.kv_head), p_.head_size, chunks};
          // V has the strides of K: others would take registers that are not there.
          const C* of_head =
              static_cast<const C*>(p_.cache.values) + item.kv_head * p_.cache.head_stride;
          const Source values = {of_head, p_.value_head_size, chunks};
          if (tile == first) {
            rows.Load(keys);
          } else {
            FillValues([&](Half* to) { rows.StoreAndLoad(to, warp_ * kPositions, keys); });
          }
          FillKeys([&](Half* to) { rows.StoreAndLoad(to, warp_ * kPositions, values); });
        } else if (takes_boxes) {
          FillBoxes(box, item.kv_head);
        } else {
          const uint32_t chunks = ChunksTo<C>(slot);
          FillKeys(
              [&](T* to) { CopyTile(KeyOf<T>(p_, 0, item.kv_head), p_.head_size, chunks, to); });
          if (Shared::KeysHoldValues(p_)) {
            stage_ = stage_.Next();
          } else {
            FillValues([&](T* to) {
              CopyTile(ValueOf<T>(p_, 0, item.kv_head), p_.value_head_size,
                       ChunksOfValue(p_, chunks), to);
            });
          }
        }
      }
      if (!kIs8Bit<C> && until == INT32_MAX) break;
      if (next > 0 && tile <= query_tile) CopyQuery(item, next);
      if constexpr (kIs8Bit<C>) {
        if (first < tile) {
          FillValues([&](Half* to) { rows.Store(to, warp_ * kPositions); });
        }
      }
      FindWork(schedule, next);
      if constexpr (kIs8Bit<C>) break;
      const Tiles tiles(ItemOf(gpu::Opaque(next) + Shared::kItems - 1), kTile);
      tile = min(tiles.begin + Shared::kStages, tiles.end);  // as it was
      position = PositionIn(tile);
      block = IsIn(item, position) ? BlockOf(p_, item, position) : 0;
      until = gpu::Opaque(INT32_MAX);  // else there would be two copies of the loop
      query_tile = -1;
    }
    is_bad = gpu::AnyInThreads(kScheduleBarrier, kThreads, is_bad);
    if (gpu::Opaque(threadIdx.x) == 0) Report(p_, scratch_, item, is_bad);
    return ItemOf(gpu::Opaque(next)).num_rows != -1;
  }

  // The lane's position of a tile.
  __device__ __forceinline__ int32_t PositionIn(int32_t tile) const {
    return tile * kTile + warp_ * kPositions + min(lane_, kPositions - 1);
  }

  // Where the lane's position lies, and so a box that begins with it.
  struct BoxOfLane {
    int32_t block;
    int32_t in_block;
  };

  // Fills the next tile of keys, and of values, by tensor copies.
  __device__ __forceinline__ void FillBoxes(const BoxOfLane& box, int32_t kv_head) {
    shared_.keys_barriers.WaitFreed(stage_);
    CopyBoxes(maps_.keys, box, kv_head, shared_.keys[stage_.index],
              &shared_.keys_barriers.filled[stage_.index]);
    stage_ = stage_.Next();
    if (Shared::KeysHoldValues(p_)) return;
    shared_.values_barriers.WaitFreed(stage_);
    CopyBoxes(maps_.values, box, kv_head, shared_.values[stage_.index],
              &shared_.values_barriers.filled[stage_.index]);
  }

  // One lane of a warp copies the boxes of the warp's positions, and arrives for the other lanes.
  __device__ __forceinline__ void CopyBoxes(const CUtensorMap& map, const BoxOfLane& box,
                                            int32_t kv_head, Element* tile, gpu::Barrier* filled) {
    constexpr int kBoxes = kPositions / kBoxPositions;
    static_assert(kPositions % kBoxPositions == 0, "a warp has whole boxes");
    constexpr uint32_t kBytes = kPositions * kHeadSize * sizeof(Element);
    // All lanes have the same numbers. ptxas must know that, or it goes through the lanes.
    const uint32_t head = gpu::Uniform(kv_head), barrier = gpu::Uniform(gpu::SharedAddress(filled));
    const uint32_t to =
        gpu::Uniform(gpu::SharedAddress(tile + warp_ * kPositions * CacheRows::kBlockColumns));
    const bool is_elected = gpu::IsElected();
    if (is_elected) {
      gpu::ArriveExpecting(filled, kBytes);
      gpu::Arrive(filled, gpu::kWarpSize - 1);
    }
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      const int lane = i * kBoxPositions;
      const int32_t in_block = gpu::Shuffle(box.in_block, lane);
      const int32_t block = gpu::Shuffle(box.block, lane);
      if (!is_elected) continue;
#pragma unroll
      for (int column = 0; column < kHeadSize; column += kBoxColumns) {
        const int elements = column / kBoxColumns * CacheRows::kBlockElements +
                             i * kBoxPositions * CacheRows::kBlockColumns;
        gpu::CopyBox(to + elements * sizeof(Element), &map,
                     {column, in_block, static_cast<int32_t>(head), block}, barrier);
      }
    }
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
    stage_ = stage_.Next();
    shared_.values_barriers.WaitFreed(stage_);
    fill(shared_.values[stage_.index]);
    ArriveAt(&shared_.values_barriers.filled[stage_.index]);
  }

  static __device__ __forceinline__ void ArriveAt(gpu::Barrier* filled) {
    if constexpr (kIs8Bit<C>) {
      gpu::FenceAsyncProxy();
      gpu::Arrive(filled);
    } else {
      gpu::ArriveAfterCopies(filled);
    }
  }

  // `next`: the number of the item after it.
  __device__ void CopyQuery(const Item& item, uint32_t next) {
    const auto stage = Shared::QueryState::Of(gpu::Opaque(next) - 1);
    if constexpr (kIs8Bit<C>) {
      WidenQuery(item, stage);
    } else {
      CopyQuery(item, stage);
    }
  }

  // Eight lanes copy a row, 128 bytes at a time.
  __device__ __forceinline__ void CopyQuery(const Item& item, typename Shared::QueryState stage) {
    constexpr int kRows = kQueryStep;
    constexpr int kUnrolled = kHeadSize <= 128 ? kConsumerRows / kRows : 1;
    const uint32_t thread = gpu::Opaque(threadIdx.x);
    const int lane = thread % 8, first_row = thread / 8;
    const auto head_size = static_cast<uint32_t>(p_.head_size);
    const int chunks_left = (head_size + QueryRows::kChunk - 1) / QueryRows::kChunk - lane;
    QueryRowsApart<kRows> rows(p_, item, first_row);
#pragma unroll 1
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      PipelineBarriers<1>& barriers = shared_.query_barriers[consumer];
      barriers.WaitFreed(stage);
      // Where a chunk lies among others repeats every eight rows.
      static_assert(kRows % 8 == 0);
      Element* const query = shared_.query[consumer] + QueryRows::Offset(first_row, lane);
      const int num_rows = item.num_rows - consumer * kConsumerRows;
#pragma unroll kUnrolled
      for (int i = 0; i < kConsumerRows; i += kRows) {
        const T* from = static_cast<const T*>(p_.query) + rows.Offset() + lane * QueryRows::kChunk;
#pragma unroll
        for (int block = 0; block < QueryRows::kChunks / 8; ++block) {
          const bool exists = first_row + i < num_rows && block * 8 < chunks_left;
          gpu::CopyAsync16(query + i * QueryRows::kBlockColumns + block * QueryRows::kBlockElements,
                           from + block * QueryRows::kBlockColumns, exists);
        }
        rows.Next();
      }
      ArriveAt(&barriers.filled[stage.index]);
    }
  }

  // The same for a cache of 8 bits. The lanes of a row have all of it.
  __device__ __forceinline__ void WidenQuery(const Item& item, typename Shared::QueryState stage) {
#pragma unroll 1
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      PipelineBarriers<1>& barriers = shared_.query_barriers[consumer];
      Element* query = shared_.query[consumer];
      const auto widen = [&](int row, int chunk, const T* from, bool exists) {
        float factor;
        *reinterpret_cast<FourPairs*>(query + QueryRows::Offset(row, chunk)) =
            HalvesOf<QueryRows::kChunks>(from, exists, &factor);
        if (chunk == 0) shared_.query_factors[consumer][row] = factor;
      };
      barriers.WaitFreed(stage);
      ForQueryChunks<T, QueryRows>(p_, item, consumer * kConsumerRows, kConsumerRows, threadIdx.x,
                                   widen);
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
  const Maps& maps_;
  Shared& shared_;
  int lane_;
  int warp_;
  typename Shared::TileState stage_;  // of the next K, or of the last V
};

}  // namespace xla_gpu::paged_attention::sm90
