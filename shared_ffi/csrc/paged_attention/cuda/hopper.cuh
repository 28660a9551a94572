// Attention of long queries on sm_90a. A warpgroup of four warps multiplies 64 rows at a time and
// reads K and V directly from shared memory.
//
// A thread block has three warpgroups. The producer finds the work items and copies their KV tiles
// to shared memory. The two consumers each compute 64 rows of an item over all of its KV tiles.
// They synchronize only by barriers in shared memory: one says that a place in memory is filled,
// another that it is free again. The producer thus runs ahead by as many KV tiles as there is
// memory for, across items too.
//
// A consumer starts the product with the next tile's keys before the product with this tile's
// values. It turns the next logits into weights while the values are multiplied.
#pragma once

#include "../../gpu/sm90.cuh"
#include "ring.cuh"
#include "softmax.cuh"

namespace xla_gpu::paged_attention {

inline constexpr int kConsumers = 2;
inline constexpr int kConsumerRows = 64;  // rows of a warpgroup's product
inline constexpr int kHopperRows = kConsumers * kConsumerRows;
inline constexpr int kHopperThreads = (1 + kConsumers) * kThreads;

// Registers per thread. A thread block starts with all registers of a multiprocessor, divided
// evenly. Then the producer gives most of its share to the consumers.
inline constexpr int kLaunchRegisters = 64 * 1024 / kHopperThreads / 8 * 8;
inline constexpr int kProducerRegisters = 56;
inline constexpr int kConsumerRegisters = 224;
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                  (1 + kConsumers) * kLaunchRegisters,
              "consumers would wait for registers for ever");

// Named barriers of the thread block, besides the schedule's.
inline constexpr int kBothConsumers = 1;
inline constexpr int kOneConsumer = 2;  // the first consumer's; the second has the next one

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
    const T* begin = rows + column / kBlockColumns * kBlockElements + column % kBlockColumns;
    return Descriptor(begin, 0);
  }

  // Descriptor of the rows [row, row + 16) with all their columns; a product sums over the rows.
  static __device__ __forceinline__ uint64_t Rows(const T* rows, int row) {
    return Descriptor(rows + row * kBlockColumns, kBlockElements * sizeof(T));
  }

 private:
  // PTX ISA, "Matrix Descriptor Format" of wgmma: the start address, the bytes to the next 64
  // columns and the bytes to the next 8 rows, each divided by 16; then the code for 128-byte
  // swizzling.
  static __device__ __forceinline__ uint64_t Descriptor(const T* begin, uint64_t block_bytes) {
    const uint64_t group_bytes = 8 * kBlockColumns * sizeof(T);
    return gpu::SharedAddress(begin) >> 4 | block_bytes >> 4 << 16 | group_bytes >> 4 << 32 |
           uint64_t{1} << 62;
  }
};

// The shared memory of a thread block.
template <typename T, int kHeadSize>
struct HopperShared {
  static constexpr int kTile = 128;                        // positions
  static constexpr int kStages = kHeadSize <= 64 ? 4 : 2;  // KV tiles in memory
  static constexpr int kItems = 2;                         // work items in memory
  using QueryRows = SwizzledRows<T, kConsumerRows, kHeadSize>;
  using CacheRows = SwizzledRows<T, kTile, kHeadSize>;
  using TileTurn = Turn<kStages>;
  using ItemTurn = Turn<kItems>;

  alignas(1024) T query[kConsumers][QueryRows::kElements];
  alignas(1024) T keys[kStages][CacheRows::kElements];
  alignas(1024) T values[kStages][CacheRows::kElements];
  Ring<kStages> keys_ring;
  Ring<kStages> values_ring;
  Ring<kItems> items_ring;
  Item items[kItems];  // num_rows = -1 marks the end
  Schedule::Shared schedule;

  // One thread calls it.
  __device__ void Init() {
    keys_ring.Init(kThreads, kConsumers * kWarps);
    values_ring.Init(kThreads, kConsumers * kWarps);
    items_ring.Init(1, kConsumers * kWarps);
  }
};

// The KV tiles [begin, end) that hold a work item's positions.
struct Tiles {
  int32_t begin;
  int32_t end;

  __device__ Tiles(const Item& item, int32_t tile)
      : begin(item.begin / tile), end(max(begin, (item.end + tile - 1) / tile)) {}
};

template <typename T, int kHeadSize>
class HopperProducer {
  using Shared = HopperShared<T, kHeadSize>;
  using CacheRows = typename Shared::CacheRows;
  static constexpr int kTile = Shared::kTile;
  static_assert(kTile == kThreads, "each thread finds the place of one position");

 public:
  __device__ HopperProducer(const Params& p, const Scratch& scratch, Shared* shared)
      : p_(p), scratch_(scratch), shared_(*shared) {}

  __device__ void Run(QueryLengths lengths) {
    Schedule schedule(p_, lengths, kHopperRows, &shared_.schedule);
    typename Shared::ItemTurn turn;
    for (int64_t number = blockIdx.x;; number += gridDim.x, turn = turn.Next()) {
      const Item* item = schedule.Find(number);
      HandOut(item, turn);
      if (item == nullptr) break;
      CopyTiles(*item);
    }
    gpu::CommitCopies();
    gpu::WaitCopies<0>();
  }

 private:
  __device__ void HandOut(const Item* item, typename Shared::ItemTurn turn) {
    if (threadIdx.x != 0) return;
    shared_.items_ring.WaitFreed(turn);
    if (item != nullptr) {
      shared_.items[turn.place] = *item;
    } else {
      shared_.items[turn.place].num_rows = -1;
    }
    gpu::Arrive(&shared_.items_ring.filled[turn.place]);
  }

  __device__ void CopyTiles(const Item& item) {
    bool is_bad = HasBadTree(p_, item, threadIdx.x);
    const Tiles tiles(item, kTile);
    for (int32_t tile = tiles.begin; tile < tiles.end; ++tile, turn_ = turn_.Next()) {
      const int32_t position = tile * kTile + static_cast<int32_t>(threadIdx.x);
      PlainSlot slot;
      if (item.begin <= position && position < item.end) {
        slot = FindSlot<T>(p_, item, position, &is_bad);
      }
      shared_.keys_ring.WaitFreed(turn_);
      CopyTile(KeyOf<T>(p_, 0, item.kv_head), p_.head_size, slot.offset, shared_.keys[turn_.place]);
      gpu::ArriveAfterCopies(&shared_.keys_ring.filled[turn_.place]);
      shared_.values_ring.WaitFreed(turn_);
      CopyTile(ValueOf<T>(p_, 0, item.kv_head), p_.value_head_size, slot.offset,
               shared_.values[turn_.place]);
      gpu::ArriveAfterCopies(&shared_.values_ring.filled[turn_.place]);
    }
    is_bad = gpu::AnyInThreads(kScheduleBarrier, kThreads, is_bad);
    if (threadIdx.x == 0) Report(p_, scratch_, item, is_bad);
  }

  // A warp copies the positions whose slots its lanes have found; eight lanes copy 128 bytes of one
  // position. Positions without a slot and columns past `num_columns` become zeros.
  __device__ void CopyTile(const T* cache, int64_t num_columns, int64_t slot_of_lane,
                           T* tile) const {
    const int lane = threadIdx.x % gpu::kWarpSize, warp = threadIdx.x / gpu::kWarpSize;
#pragma unroll 1  // the copies overlap all the same
    for (int i = lane / 8; i < gpu::kWarpSize; i += 4) {
      const int64_t slot = gpu::Shuffle(slot_of_lane, i);
      const int row = warp * gpu::kWarpSize + i;
#pragma unroll
      for (int chunk = lane % 8; chunk < CacheRows::kChunks; chunk += 8) {
        const bool exists = slot >= 0 && chunk * CacheRows::kChunk < num_columns;
        const T* from = cache + (exists ? slot + chunk * CacheRows::kChunk : 0);
        gpu::CopyAsync16(tile + CacheRows::Offset(row, chunk), from, exists);
      }
    }
  }

  const Params& p_;
  const Scratch& scratch_;
  Shared& shared_;
  typename Shared::TileTurn turn_;  // the next KV tile's
};

// Computes a consumer's rows of one work item.
template <typename T, int kHeadSize>
class HopperItem {
  using Shared = HopperShared<T, kHeadSize>;
  using QueryRows = typename Shared::QueryRows;
  using CacheRows = typename Shared::CacheRows;
  using TileTurn = typename Shared::TileTurn;
  static constexpr int kTile = Shared::kTile;

 public:
  __device__ HopperItem(const Params& p, const Scratch& scratch, const Item& item, int consumer,
                        Shared* shared)
      : p_(p),
        scratch_(scratch),
        item_(item),
        shared_(*shared),
        query_(shared->query[consumer]),
        barrier_(kOneConsumer + consumer),
        first_row_(consumer * kConsumerRows),
        common_(p, item),
        softmax_(p, item,
                 first_row_ + static_cast<int>(threadIdx.x) % kThreads / gpu::kWarpSize * 16 +
                     Lane() / 4) {}

  // `turn` is the turn of the item's first KV tile, and becomes that of the next item's first KV
  // tile.
  __device__ void Compute(TileTurn* turn) {
    const Tiles tiles(item_, kTile);
    if (tiles.begin < tiles.end) {
      CopyQuery();
      float logits[kTile / 8][4];
      uint32_t weights[kTile / 16][4];
      float shrinks[2];
      StartLogits(*turn, logits);
      gpu::WaitProducts<0>(logits);
      shared_.keys_ring.Free(*turn);
      Weigh(tiles.begin, logits, shrinks);
      Pack(logits, weights);
      for (int32_t tile = tiles.begin; tile + 1 < tiles.end; ++tile) {
        const TileTurn next = turn->Next();
        TakeValues(tile, *turn);
        StartLogits(next, logits);
        StartSums(*turn, weights);
        gpu::WaitProducts<1>(logits);
        shared_.keys_ring.Free(next);
        Weigh(tile + 1, logits, shrinks);
        gpu::WaitProducts<0>(sums_);
        gpu::KeepRegisters(weights);
        shared_.values_ring.Free(*turn);
        Softmax::Shrink(shrinks, sums_);
        Pack(logits, weights);
        *turn = next;
      }
      TakeValues(tiles.end - 1, *turn);
      StartSums(*turn, weights);
      gpu::WaitProducts<0>(sums_);
      shared_.values_ring.Free(*turn);
      *turn = turn->Next();
    }
    if (item_.num_splits > 1) {
#pragma unroll
      for (int r = 0; r < 2; ++r) WritePartialResult(r);
    } else {
#pragma unroll
      for (int r = 0; r < 2; ++r) WriteRow(r);
    }
  }

 private:
  static __device__ __forceinline__ int Lane() { return threadIdx.x % gpu::kWarpSize; }

  __device__ void CopyQuery() {
    const int thread = threadIdx.x % kThreads;
    gpu::SyncThreads(barrier_, kThreads);  // everyone has left the item before
    ForQueryChunks<T, QueryRows>(p_, item_, first_row_, kConsumerRows, thread,
                                 [&](int row, int chunk, const T* from, bool exists) {
                                   gpu::CopyAsync16(query_ + QueryRows::Offset(row, chunk), from,
                                                    exists);
                                 });
    gpu::CommitCopies();
    gpu::WaitCopies<0>();
    gpu::FenceAsyncProxy();
    gpu::SyncThreads(barrier_, kThreads);
  }

  // Starts logits = q k^T.
  __device__ void StartLogits(TileTurn turn, float (&logits)[kTile / 8][4]) {
    shared_.keys_ring.WaitFilled(turn);
    gpu::FenceAsyncProxy();
    gpu::FenceProducts(logits);
    const T* keys = shared_.keys[turn.place];
#pragma unroll
    for (int column = 0; column < kHeadSize; column += 16) {
      gpu::StartProduct(logits, QueryRows::Columns(query_, column),
                        CacheRows::Columns(keys, column),
                        /*accumulates=*/column > 0, T{});
    }
    gpu::CommitProducts();
  }

  // Starts sums += weights * v.
  __device__ void StartSums(TileTurn turn, uint32_t (&weights)[kTile / 16][4]) {
    gpu::KeepRegisters(weights);
    gpu::FenceProducts(sums_);
    const T* values = shared_.values[turn.place];
#pragma unroll
    for (int step = 0; step < kTile / 16; ++step) {
      gpu::StartProductTransposed(sums_, weights[step], CacheRows::Rows(values, step * 16), T{});
    }
    gpu::CommitProducts();
  }

  // Turns the logits of a KV tile into weights.
  __device__ void Weigh(int32_t tile, float (&logits)[kTile / 8][4], float (&shrinks)[2]) {
    const int32_t begin = tile * kTile, end = begin + kTile;
    softmax_.ToLogits(begin, /*masked=*/!common_.Contains(begin, end), logits);
    softmax_.Weigh(logits, shrinks);
  }

  // Rounds weights to 16 bits, laid out as the left operand of a product over each 16 positions.
  static __device__ __forceinline__ void Pack(const float (&from)[kTile / 8][4],
                                              uint32_t (&to)[kTile / 16][4]) {
#pragma unroll
    for (int n = 0; n < kTile / 16; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&block)[4] = from[2 * n + i / 2];
        to[n][i] = gpu::Pack(block[i % 2 * 2], block[i % 2 * 2 + 1], T{});
      }
    }
  }

  __device__ void TakeValues(int32_t tile, TileTurn turn) {
    shared_.values_ring.WaitFilled(turn);
    gpu::FenceAsyncProxy();
    if (common_.RowsDiffer(item_, tile * kTile, (tile + 1) * kTile)) {
      SetAsideNonFinite(tile * kTile, shared_.values[turn.place]);
    }
  }

  // A weight of zero times an infinite or NaN value would spoil a row's sum. If a KV tile holds
  // such values, this adds them to the rows that attend to them and then sets them to zero in the
  // tile. Both consumers do it together, because they share the tile.
  __device__ void SetAsideNonFinite(int32_t begin, T* values) {
    constexpr int kBoth = kConsumers * kThreads;
    const int thread = static_cast<int>(threadIdx.x) - kThreads;
    const auto element = [&](int i) { return values + i; };
    const bool found = HoldsNonFinite(thread, CacheRows::kElements, kBoth, element);
    if (!gpu::AnyInThreads(kBothConsumers, kBoth, found)) return;
    softmax_.AddNonFinite<kTile>(
        begin, sums_,
        [&](int j, int n, int e) { return values[CacheRows::Offset(j, n) + Lane() % 4 * 2 + e]; },
        [&](T value, int) { return gpu::ToFloat(value); });
    gpu::SyncThreads(kBothConsumers, kBoth);
    ClearNonFinite(thread, CacheRows::kElements, kBoth, element);
    gpu::FenceAsyncProxy();
    gpu::SyncThreads(kBothConsumers, kBoth);
  }

  // The lane's row r in the work item.
  __device__ __forceinline__ int RowOf(int r) const {
    return first_row_ + static_cast<int>(threadIdx.x) % kThreads / gpu::kWarpSize * 16 +
           Lane() / 4 + 8 * r;
  }

  // Writes the lane's columns of its row r to the output.
  __device__ __forceinline__ void WriteRow(int r) {
    const RowState state = softmax_.State(r);
    const int row = RowOf(r);
    if (row >= item_.num_rows) return;
    const RowPlace place(p_, item_, row);
    const float sink = SinkOf(p_, place.head);
    const float max = fmaxf(state.max, sink);
    const float weight = gpu::Exp2(state.max - ShiftOf(max));
    const float sum = SumOf(max, sink, 1, [&](int64_t) { return state; });
    const RowRange& range = softmax_.Range(r);
    const float divisor = range.begin < range.end ? sum : 1.0f;  // without keys the sum is zero
    const float factor = weight / divisor;
    if (Lane() % 4 == 0) {
      WriteLse(p_, item_.first_token + place.token, place.head, {max, sum});
    }
    T* output = static_cast<T*>(p_.output) + OutputOffset(p_, item_, row);
#pragma unroll
    for (int n = 0; n < kHeadSize / 8; ++n) {
      if (n * 8 >= p_.value_head_size) break;
      *reinterpret_cast<uint32_t*>(output + n * 8 + Lane() % 4 * 2) =
          gpu::Pack(sums_[n][2 * r] * factor, sums_[n][2 * r + 1] * factor, T{});
    }
  }

  // Writes them to the scratch: the work item is a split.
  __device__ __forceinline__ void WritePartialResult(int r) {
    const RowState state = softmax_.State(r);
    const int row = RowOf(r);
    if (row >= item_.num_rows) return;
    const RowPlace place(p_, item_, row);
    const int64_t index = SlotOf(scratch_, item_, place) * p_.num_heads + place.head;
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
  const Item& item_;
  Shared& shared_;
  T* const query_;
  const int barrier_;    // for this consumer's threads
  const int first_row_;  // this consumer's first row of the item
  const CommonRange common_;
  Softmax softmax_;
  float sums_[kHeadSize / 8][4] = {};  // laid out as logits, with columns in place of positions
};

template <typename T, int kHeadSize>
__global__ void __launch_bounds__(kHopperThreads, 1)
    HopperAttention(Params p, Scratch scratch, QueryLengths lengths) {
  using Shared = HopperShared<T, kHeadSize>;
  auto* shared = reinterpret_cast<Shared*>(gpu::SharedMemory());
  if (threadIdx.x == 0) shared->Init();
  gpu::SyncBlock();
  const int warpgroup = threadIdx.x / kThreads;
  if (warpgroup == 0) {
    gpu::GiveRegistersBack<kProducerRegisters>();
    HopperProducer<T, kHeadSize>(p, scratch, shared).Run(lengths);
  } else {
    gpu::TakeRegisters<kConsumerRegisters>();
    typename Shared::TileTurn tile;
    for (typename Shared::ItemTurn turn;; turn = turn.Next()) {
      shared->items_ring.WaitFilled(turn);
      const Item& item = shared->items[turn.place];
      if (item.num_rows == -1) return;
      HopperItem<T, kHeadSize>(p, scratch, item, warpgroup - 1, shared).Compute(&tile);
      shared->items_ring.Free(turn);
    }
  }
}

}  // namespace xla_gpu::paged_attention
