// Attention on tensor cores for float16 and bfloat16 queries, on any GPU from sm_80 on.
//
// A thread block computes the rows of a work item, one KV tile after the other. Later KV tiles are
// copied to shared memory meanwhile. The warps divide a tile in one of two ways. With many rows,
// each warp has 16 rows and all positions. With few rows, all warps have the same rows and each has
// a part of the positions; their partial results are merged at the end in a fixed order.
//
// A wide head has more columns of V than there are registers for: the block goes over the positions
// once for each kMaxColumns of them.
#pragma once

#include "../products.cuh"

namespace xla_gpu::paged_attention {

// The shared memory of a thread block. T: type of the query. C: type of the cache.
template <typename T, typename C, int kHeadSize>
struct TensorCoreLayout {
  using QueryRows = SharedRows<T, kHeadSize>;
  using CacheRows = SharedRows<C, kHeadSize>;
  static constexpr bool kIsWide = kHeadSize > kMaxColumns;
  static constexpr bool kIsLatent = kHeadSize > kMaxOwnValues;  // V is the first columns of K
  static constexpr int kColumns = kIsWide ? kMaxColumns : kHeadSize;
  using ValueRows = std::conditional_t<kIsLatent, CacheRows, SharedRows<C, kColumns>>;
  static constexpr int kTile = kHeadSize <= 128 ? 64 : 32;  // positions
  static constexpr int kStages = kIs8Bit<C> ? 3 : 2;        // KV tiles in memory
  static constexpr int kSlotTiles = kStages + 1;            // KV tiles whose slots are in memory
  static constexpr int kFewWarpRows = kTile == 64 ? 1 : 2;  // 16 positions for each warp
  static constexpr int kSumRows = kWarps * kRowsPerWarpTile;
  static constexpr int kTileElements = kTile * CacheRows::kStride;
  static constexpr int kStageElements =
      kTileElements + (kIsLatent ? 0 : kTile * ValueRows::kStride);
  static constexpr int kTilesBytes = kStages * kStageElements * static_cast<int>(sizeof(C));

  // For a query tile of `warp_rows` groups of 16 rows.
  XLA_GPU_HOST_DEVICE static constexpr int QueryBytes(int warp_rows) {
    return warp_rows * kRowsPerWarpTile * QueryRows::kStride * static_cast<int>(sizeof(T));
  }
  static constexpr int SharedBytes(int warp_rows) {
    return kTilesBytes + QueryBytes(warp_rows) +
           kSlotTiles * kTile * static_cast<int>(sizeof(Slot<C>)) +
           static_cast<int>(sizeof(Schedule::Shared)) +
           kSumRows * static_cast<int>(sizeof(RowState));
  }

  // Floats from one row of sums to the next. Where there is room, it suits kBanksOfRow.
  static constexpr int kPaddedStride = kColumns + (kIs8Bit<C> ? 16 : 8);
  static constexpr int kSumStride =
      kSumRows * kPaddedStride * 4 <= kTilesBytes + QueryBytes(kFewWarpRows) ? kPaddedStride
                                                                             : kColumns;
  static_assert(kSumRows * kSumStride * 4 <= kTilesBytes + QueryBytes(kFewWarpRows),
                "the sums of all warps take the place of the tiles and the query");
  static_assert(!kIsWide || kSumRows * kSumStride * 4 <= kTilesBytes,
                "the query is copied again while warps still write the sums of the first columns");

  C* tiles;        // [kStages][K, V][kTile] rows; the V of a wide head is kColumns of it
  T* query;        // [warp_rows * kRowsPerWarpTile] rows
  Slot<C>* slots;  // [kSlotTiles][kTile]; offset -1 gives zeros
  Schedule::Shared* schedule;
  RowState* states;  // [kSumRows]
  float* sums;       // [kSumRows][kSumStride], in the memory of tiles and query

  __device__ TensorCoreLayout(char* memory, int warp_rows)
      : tiles(reinterpret_cast<C*>(memory)),
        query(reinterpret_cast<T*>(memory + kTilesBytes)),
        slots(reinterpret_cast<Slot<C>*>(memory + kTilesBytes + QueryBytes(warp_rows))),
        schedule(reinterpret_cast<Schedule::Shared*>(slots + kSlotTiles * kTile)),
        states(reinterpret_cast<RowState*>(schedule + 1)),
        sums(reinterpret_cast<float*>(memory)) {}

  __device__ C* Key(int32_t tile) const { return tiles + tile % kStages * kStageElements; }
  __device__ Slot<C>* Slots(int32_t tile) const { return slots + tile % kSlotTiles * kTile; }
};

// Computes one work item of kWarpRows groups of 16 rows. A warp has one group. If there are fewer
// groups than warps, the warps of a group divide the positions.
template <typename T, typename C, int kHeadSize, int kWarpRows>
class TensorCoreItem {
  using Layout = TensorCoreLayout<T, C, kHeadSize>;
  using QueryRows = typename Layout::QueryRows;
  using CacheRows = typename Layout::CacheRows;
  using ValueRows = typename Layout::ValueRows;
  static constexpr int kStages = Layout::kStages;
  static constexpr int kParts = kWarps / kWarpRows;
  static constexpr int kTile = Layout::kTile;
  static constexpr int kKeys = kTile / kParts;  // positions of a KV tile for each warp
  static constexpr int kRows = kWarpRows * kRowsPerWarpTile;
  static constexpr int kColumns = Layout::kColumns;
  static constexpr bool kHasInt4 = std::is_same_v<C, Int4OrInt8>;
  static constexpr int kChunksOfThread = kTile * CacheRows::kChunks / kThreads;
  using Products = WarpProducts<T, C, kHeadSize, kKeys, QueryRows, CacheRows, kColumns, ValueRows>;

 public:
  __device__ TensorCoreItem(const Params& p, const Item& item, const Layout& layout,
                            int first_column)
      : p_(p),
        item_(item),
        layout_(layout),
        first_column_(first_column),
        lane_(threadIdx.x % gpu::kWarpSize),
        warp_row_(threadIdx.x / gpu::kWarpSize % kWarpRows * kRowsPerWarpTile),
        part_(kParts == 1 ? 0 : threadIdx.x / gpu::kWarpSize / kWarpRows),
        common_(p, item),
        softmax_(p, item, warp_row_ + lane_ / 4),
        is_bad_(HasBadTree(p, item, threadIdx.x)) {}

  __device__ void Compute(const Scratch& scratch) {
    const int32_t first = item_.begin / kTile;
    const int32_t end = max(first, (item_.end + kTile - 1) / kTile);
    for (int i = 0; i < kStages; ++i) StoreSlot(first + i, FindSlotOf(first + i));
    CopyQuery();
    __syncthreads();
    for (int i = 0; i < kStages - 1; ++i) {
      if constexpr (kHasInt4) {
        StoreInt4(first + i, ReadInt4(first + i));
      } else {
        CopyTile(first + i);
      }
      gpu::CommitCopies();
    }
    for (int32_t tile = first; tile < end; ++tile) {
      gpu::WaitCopies<kStages - 2>();
      __syncthreads();  // the tile is here, and everyone has left the one before
      [[maybe_unused]] std::conditional_t<kHasInt4, Int4Chunks, char> int4;
      if constexpr (kHasInt4) {
        int4 = ReadInt4(tile + kStages - 1);
      } else {
        CopyTile(tile + kStages - 1);
      }
      gpu::CommitCopies();
      const Slot<C> slot = FindSlotOf(tile + kStages);
      ComputeTile(tile);
      if constexpr (kHasInt4) StoreInt4(tile + kStages - 1, int4);
      StoreSlot(tile + kStages, slot);
    }
    gpu::WaitCopies<0>();
    is_bad_ = __syncthreads_or(is_bad_);  // everyone has left the tiles, whose place the sums take
    StoreSums();
    __syncthreads();
    const Parts parts{kParts,   layout_.states, layout_.sums, kRows, Layout::kSumStride,
                      kColumns, first_column_};
    WriteRows<T>(p_, scratch, item_, parts, is_bad_);
  }

 private:
  // Thread j finds the slot of position j of a KV tile.
  __device__ Slot<C> FindSlotOf(int32_t tile) {
    const int32_t position = tile * kTile + threadIdx.x;
    if (threadIdx.x >= kTile || position < item_.begin || position >= item_.end) return {};
    return FindSlot<C>(p_, item_, position, &is_bad_);
  }

  __device__ void StoreSlot(int32_t tile, const Slot<C>& slot) {
    if (threadIdx.x < kTile) layout_.Slots(tile)[threadIdx.x] = slot;
  }

  __device__ void CopyQuery() {
    const auto copy = [&](int row, int chunk, const T* from, bool exists) {
      if constexpr (kIs8Bit<C>) {
        QueryOf8BitKeys<T, QueryRows>::Store(
            layout_.query, row, chunk,
            exists ? *reinterpret_cast<const FourPairs*>(from) : FourPairs());
      } else {
        gpu::CopyAsync16(layout_.query + QueryRows::Offset(row, chunk), from, exists);
      }
    };
    ForQueryChunks<T, QueryRows>(p_, item_, 0, kRows, threadIdx.x, copy);
  }

  // V of a KV tile, from the first column on. Where it is a part of K it is there already: its
  // columns are K's first ones. An 8-bit V is copied all the same, as the choice would take
  // registers that are not there.
  __device__ C* Value(int32_t tile) const {
    if constexpr (Layout::kIsLatent) {
      static_assert(kMaxColumns % (8 * CacheRows::kChunk) == 0, "the swizzle repeats");
      return layout_.Key(tile) + first_column_;
    }
    return layout_.Key(tile) + (HasValuesInKeys() ? 0 : Layout::kTileElements);
  }
  __device__ bool HasValuesInKeys() const {
    return Layout::kIsLatent || (!Layout::kIsWide && !kIs8Bit<C> && p_.is_latent);
  }

  // Up to eight lanes copy 128 bytes of a position's K at a time, and of its V. What does not exist
  // becomes zeros.
  __device__ void CopyTile(int32_t tile) {
    constexpr int kLanes = CacheRows::kChunks < 8 ? CacheRows::kChunks : 8;
    constexpr int kPositions = kThreads / kLanes;  // at a time
    static_assert(kTile % kPositions == 0 && kPositions % 8 == 0, "the swizzle repeats");
    const int row = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    const Slot<C>* slots = layout_.Slots(tile) + row;
    C* keys = layout_.Key(tile) + CacheRows::Offset(row, lane);
    C* values = layout_.Key(tile) + Layout::kTileElements + ValueRows::Offset(row, lane);
    const int column = lane * CacheRows::kChunk;
    const int value_column = column + (Layout::kIsWide ? first_column_ : 0);
    const auto key = reinterpret_cast<uintptr_t>(KeyOf<C>(p_, column, item_.kv_head));
    const auto value = reinterpret_cast<uintptr_t>(ValueOf<C>(p_, 0, item_.kv_head) + value_column);
#pragma unroll
    for (int i = 0; i < kTile; i += kPositions) {
      const int64_t offset = BytesTo<C>(slots[i]);
      const int64_t value_offset = p_.cache.OffsetOfValue(offset);
#pragma unroll
      for (int chunk = 0; chunk < CacheRows::kChunks; chunk += kLanes) {
        if (CacheRows::kChunks % kLanes != 0 && lane + chunk >= CacheRows::kChunks) continue;
        const int further = chunk * CacheRows::kChunk;
        gpu::CopyAsync16(keys + i * CacheRows::kStride + further,
                         reinterpret_cast<const void*>(key + offset + chunk * 16),
                         offset >= 0 && column + further < p_.head_size);
        if (HasValuesInKeys() || further >= kColumns) continue;
        gpu::CopyAsync16(values + i * ValueRows::kStride + further,
                         reinterpret_cast<const void*>(value + value_offset + chunk * 16),
                         offset >= 0 && value_column + further < p_.value_head_size);
      }
    }
  }

  // A chunk of 16 numbers of 4 bits.
  struct alignas(8) Int4Chunk {
    uint32_t words[2] = {};
  };
  // The chunks of K and V of a KV tile that a thread copies.
  struct Int4Chunks {
    Int4Chunk keys[kChunksOfThread];
    Int4Chunk values[kChunksOfThread];
  };

  // Calls use(n, to, row, column) for the chunks of a KV tile that the thread copies: the number of
  // the chunk, its place in K, or V, of the tile, its position, and the number of its column.
  template <typename Use>
  __device__ __forceinline__ void ForChunks(const Use& use) const {
    constexpr int kLanes = 8, kPositions = kThreads / kLanes, kOfRow = CacheRows::kChunks / kLanes;
    static_assert(!Layout::kIsWide && CacheRows::kChunks % kLanes == 0, "eight lanes copy a row");
    const int row = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    const int first = CacheRows::Offset(row, lane);
#pragma unroll
    for (int n = 0; n < kChunksOfThread; ++n) {
      const int below = n / kOfRow * kPositions, chunk = n % kOfRow * kLanes;
      use(n, first + below * CacheRows::kStride + chunk * CacheRows::kChunk, row + below,
          (lane + chunk) * CacheRows::kChunk);
    }
  }

  // Begins to copy a KV tile of which K or V is int4. What is int4 is read, and stored as int8 by
  // StoreInt4: after the products of another tile, during which the memory has time to answer.
  __device__ Int4Chunks ReadInt4(int32_t tile) const {
    const Slot<C>* slots = layout_.Slots(tile);
    Int4Chunks read;
    ForChunks([&](int n, int to, int row, int column) {
      const auto copy = [&](DType dtype, const C* from, bool exists, C* place) -> Int4Chunk {
        if (dtype == DType::kInt4) {
          return exists ? *reinterpret_cast<const Int4Chunk*>(from + column / 2) : Int4Chunk();
        }
        gpu::CopyAsync16(place + to, from + column, exists);
        return {};
      };
      const int64_t slot = BytesTo<C>(slots[row]);
      read.keys[n] = copy(p_.cache_dtype, KeyOf<C>(p_, slot, item_.kv_head),
                          slot >= 0 && column < p_.head_size, layout_.Key(tile));
      read.values[n] = copy(p_.value_cache_dtype, ValueOf<C>(p_, slot, item_.kv_head),
                            slot >= 0 && column < p_.value_head_size, Value(tile));
    });
    return read;
  }

  __device__ void StoreInt4(int32_t tile, const Int4Chunks& read) const {
    ForChunks([&](int n, int to, int /*row*/, int /*column*/) {
      const auto store = [&](DType dtype, const Int4Chunk& chunk, C* place) {
        if (dtype != DType::kInt4) return;
        FourPairs numbers;
#pragma unroll
        for (int i = 0; i < 4; ++i) numbers.pair[i] = Expand4(chunk.words[i / 2] >> i % 2 * 16);
        *reinterpret_cast<FourPairs*>(place + to) = numbers;
      };
      store(p_.cache_dtype, read.keys[n], layout_.Key(tile));
      store(p_.value_cache_dtype, read.values[n], Value(tile));
    });
  }

  __device__ void ComputeTile(int32_t tile) {
    // The first position of the warp's part of the KV tile.
    const int32_t begin = tile * kTile + part_ * kKeys;
    const int first_key = part_ * kKeys;
    const Slot<C>* slots = layout_.Slots(tile) + first_key;
    float logits[kKeys / 8][4] = {};
    Products::MultiplyByKeys(layout_.query, warp_row_, layout_.Key(tile), first_key, logits);
    if constexpr (kIs8Bit<C>) Products::ScaleLogits(slots, logits);
    softmax_.ToLogits(begin, /*masked=*/!common_.Contains(begin, begin + kKeys), logits);
    float rescales[2];
    softmax_.Weigh(logits, rescales);
    Softmax::RescaleSums(rescales, products_.sums);
    if constexpr (!kIsInteger<C>) {
      if (common_.RowsDiffer(item_, tile * kTile, (tile + 1) * kTile)) {
        SetAsideNonFinite(tile, begin);
      }
    }
    if constexpr (kIs8Bit<C>) Products::ScaleWeights(slots, logits);
    products_.template AddValues<typename Products::Weight>(Value(tile), first_key, logits);
  }

  // A weight of zero times an infinite or NaN value would spoil a row's sum. If a KV tile holds
  // such values, this adds them to the rows that attend to them and then sets them to zero in the
  // tile.
  __device__ void SetAsideNonFinite(int32_t tile, int32_t begin) {
    C* values = Value(tile);
    const auto element = [&](int i) {
      return values + ValueRows::ElementOffset(i / kColumns, i % kColumns);
    };
    constexpr int kChunks = kColumns / ValueRows::kChunk;
    const auto chunk = [&](int i) { return values + ValueRows::Offset(i / kChunks, i % kChunks); };
    if (!__syncthreads_or(HoldsNonFinite<C>(threadIdx.x, kTile * kChunks, kThreads, chunk))) return;
    softmax_.template AddNonFinite<kKeys>(
        begin, products_.sums,
        [&](int j, int n, int e) {
          return values[ValueRows::ElementOffset(part_ * kKeys + j, Products::Column(n, e))];
        },
        [&](C value, int j) {
          return Products::Scaled(value, layout_.Slots(tile)[part_ * kKeys + j]);
        });
    __syncthreads();
    ClearNonFinite(threadIdx.x, kTile * kColumns, kThreads, element);
    __syncthreads();
  }

  __device__ void StoreSums() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = part_ * kRows + warp_row_ + lane_ / 4 + 8 * r;
      products_.Store(r, softmax_.State(r), layout_.states + row,
                      layout_.sums + row * Layout::kSumStride);
    }
  }

  const Params& p_;
  const Item& item_;
  const Layout& layout_;
  const int first_column_;  // of V
  const int lane_;
  const int warp_row_;  // the warp's first row
  const int part_;      // this warp's part of each KV tile's positions
  const CommonRange common_;
  Softmax softmax_;
  Products products_;
  bool is_bad_;
};

// Computes work items of up to kWarpRows groups of 16 rows. kWarpRows is kWarps or
// Layout::kFewWarpRows.
template <typename T, typename C, int kHeadSize, int kWarpRows>
__global__ void __launch_bounds__(kThreads, 2)
    TensorCoreAttention(Params p, Scratch scratch, QueryLengths lengths) {
  using Layout = TensorCoreLayout<T, C, kHeadSize>;
  constexpr int kFewWarpRows = Layout::kFewWarpRows;
  const Layout layout(gpu::SharedMemory(), kWarpRows);
  ResetCounter(scratch);
  gpu::LetNextKernelBegin();
  Schedule schedule(p, lengths, kMaxRowsPerItem, layout.schedule);
  for (DealtNumber number;; number.Next()) {
    const Item* item = schedule.Find(number.Get());
    if (item == nullptr) return;
    const auto compute = [&](int first_column) {
      if (kWarpRows == kFewWarpRows || item->num_rows <= kFewWarpRows * kRowsPerWarpTile) {
        TensorCoreItem<T, C, kHeadSize, kFewWarpRows>(p, *item, layout, first_column)
            .Compute(scratch);
      } else {
        TensorCoreItem<T, C, kHeadSize, kWarpRows>(p, *item, layout, first_column).Compute(scratch);
      }
    };
    if constexpr (Layout::kIsWide) {
      for (int column = 0; column < p.value_head_size; column += kMaxColumns) compute(column);
    } else {
      compute(0);
    }
  }
}

}  // namespace xla_gpu::paged_attention
