// Attention on tensor cores for float16 and bfloat16 queries, on any GPU from sm_80 on.
//
// A thread block computes the rows of a work item, one KV tile after the other. Later KV tiles are
// copied to shared memory meanwhile. Each warp has 16 rows and all positions. Where there is no
// decode kernel for the cache and the head size, the warps divide a tile of few rows in another
// way: all have the same rows and each has a part of the positions; their partial results are
// merged at the end in a fixed order.
//
// A wide head has more columns of V than there are registers for: the block goes over the positions
// once for each kMaxColumns of them.
#pragma once

#include "../partial_results.cuh"
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
  static constexpr int kFewWarpRows = kTile == 64 ? 1 : 2;  // 16 positions for each warp
  static constexpr int kSumRows = kWarps * kRowsPerWarpTile;
  static constexpr int kTileElements = kTile * CacheRows::kStride;
  static constexpr int kStageElements =
      kTileElements + (kIsLatent ? 0 : kTile * ValueRows::kStride);
  static constexpr int kTilesBytes = kStages * kStageElements * static_cast<int>(sizeof(C));
  static constexpr int kCopyLanes = CacheRows::kChunks < 8 ? CacheRows::kChunks : 8;
  using Positions = CopiedPositions<kTile, kCopyLanes>;
  // KV tiles of an 8-bit cache whose scales are in memory. The scales of all tiles that are taken
  // at once are copied while some warps still multiply the tile kStages before.
  static constexpr int kScaleTiles = kIs8Bit<C> ? kStages + Positions::kTiles : 0;

  // For a query tile of `warp_rows` groups of 16 rows.
  XLA_GPU_HOST_DEVICE static constexpr int QueryBytes(int warp_rows) {
    return warp_rows * kRowsPerWarpTile * QueryRows::kStride * static_cast<int>(sizeof(T));
  }
  static constexpr int SharedBytes(int warp_rows) {
    return kTilesBytes + QueryBytes(warp_rows) +
           kScaleTiles * kTile * static_cast<int>(sizeof(PositionScales)) +
           static_cast<int>(sizeof(Schedule::Shared)) + (kStatesAreBehindSums ? 0 : kStatesBytes);
  }

  // Floats from one row of sums to the next. Lanes store several rows at once, where there is room
  // in different banks of shared memory.
  static constexpr int kPaddedStride = kColumns + (kIs8Bit<C> ? 16 : 8);
  static constexpr int kSumStride =
      kSumRows * kPaddedStride * 4 <= kTilesBytes + QueryBytes(kFewWarpRows) ? kPaddedStride
                                                                             : kColumns;
  static constexpr int kSumsBytes = kSumRows * kSumStride * 4;
  static constexpr int kStatesBytes = kSumRows * static_cast<int>(sizeof(RowState));
  static_assert(kSumsBytes <= kTilesBytes + QueryBytes(kFewWarpRows),
                "the sums of all warps take the place of the tiles and the query");
  static constexpr bool kStatesAreBehindSums =
      kSumsBytes + kStatesBytes <= kTilesBytes + QueryBytes(kFewWarpRows);

  static_assert(kHeadSize > 128 || 2 * (SharedBytes(kWarps) + 1024) <= 164 * 1024,
                "a multiprocessor of an A100 holds two thread blocks; CUDA takes 1 KiB of each");

  C* tiles;                // [kStages][K, V][kTile] rows; the V of a wide head is kColumns of it
  T* query;                // [warp_rows * kRowsPerWarpTile] rows
  PositionScales* scales;  // [kScaleTiles][kTile]
  Schedule::Shared* schedule;
  float* sums;       // [kSumRows][kSumStride], in the memory of tiles and query
  RowState* states;  // [kSumRows], behind them if there is room

  __device__ TensorCoreLayout(char* memory, int warp_rows)
      : tiles(reinterpret_cast<C*>(memory)),
        query(reinterpret_cast<T*>(memory + kTilesBytes)),
        scales(reinterpret_cast<PositionScales*>(memory + kTilesBytes + QueryBytes(warp_rows))),
        schedule(reinterpret_cast<Schedule::Shared*>(scales + kScaleTiles * kTile)),
        sums(reinterpret_cast<float*>(memory)),
        states(kStatesAreBehindSums ? reinterpret_cast<RowState*>(memory + kSumsBytes)
                                    : reinterpret_cast<RowState*>(schedule + 1)) {}

  __device__ C* Key(int32_t tile) const { return tiles + tile % kStages * kStageElements; }
  __device__ PositionScales* Scales(int32_t tile) const {
    if constexpr (kScaleTiles > 0) {
      return scales + tile % kScaleTiles * kTile;
    }
    return scales;
  }
};

// Computes one work item of kWarpRows groups of 16 rows. A warp has one group. If there are fewer
// groups than warps, the warps of a group divide the positions.
template <typename T, typename C, int kHeadSize, int kWarpRows>
class TensorCoreItem {
  using Layout = TensorCoreLayout<T, C, kHeadSize>;
  using QueryRows = typename Layout::QueryRows;
  using CacheRows = typename Layout::CacheRows;
  using ValueRows = typename Layout::ValueRows;
  using Positions = typename Layout::Positions;
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
    const Tiles tiles(item_, kTile);
    positions_.Load(p_, item_, tiles.begin);
    CopyQueryRows<kRows, C, QueryRows>(p_, item_, threadIdx.x, layout_.query);
    // Copies are kAhead tiles ahead of the products.
    constexpr int kAhead = kStages - 1;
    const int32_t end = tiles.end;
    for (int32_t copied = tiles.begin; copied < end + kAhead;) {
      TakePositions(copied);
      positions_.Load(p_, item_, copied + Positions::kTiles);
#pragma unroll 1
      for (int n = 0; n < Positions::kTiles && copied < end + kAhead; ++n, ++copied) {
        const int32_t tile = copied - kAhead;
        // From shared memory: there is no register left.
        const bool is_copied = tile >= item_.begin / kTile;
        if (is_copied) {
          gpu::WaitCopies<kAhead - 1>();
          __syncthreads();  // the tile is here, and everyone has left the one before
        }
        [[maybe_unused]] std::conditional_t<kHasInt4, Int4Chunks, char> int4;
        if (copied < end) {
          if constexpr (kHasInt4) {
            int4 = ReadInt4(copied, n);
          } else {
            CopyTile(copied, n);
          }
        }
        gpu::CommitCopies();
        if (is_copied) ComputeTile(tile);
        if constexpr (kHasInt4) {
          if (copied < end) StoreInt4(copied, int4);
        }
      }
    }
    gpu::WaitCopies<0>();
    is_bad_ = __syncthreads_or(is_bad_);  // everyone has left the tiles, whose place the sums take
    StoreSums();
    __syncthreads();
    const Parts parts{kParts,   layout_.states, layout_.sums, kRows, Layout::kSumStride,
                      kColumns, first_column_};
    WriteRows<T, /*kWidth=*/4>(p_, scratch, item_, parts, is_bad_);
  }

 private:
  // Goes to the positions of the tiles from `first` on, and copies their scales. A position
  // that does not exist has zeros.
  __device__ __forceinline__ void TakePositions(int32_t first) {
    positions_.Take(p_, item_, first, &is_bad_,
                    [&](int tile, int row, int64_t block, int64_t in_block, bool exists) {
                      if constexpr (kIs8Bit<C>) {
                        CopyScales(p_, item_, block, in_block, exists,
                                   layout_.Scales(first + tile) + row);
                      }
                    });
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
  // becomes zeros. `n`: the number of the tile among those taken.
  __device__ void CopyTile(int32_t tile, int n) {
    constexpr int kLanes = Layout::kCopyLanes, kPositions = Positions::kAtOnce;
    static_assert(kPositions % 8 == 0, "the swizzle repeats");
    const int row = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    C* keys = layout_.Key(tile) + CacheRows::Offset(row, lane);
    C* values = layout_.Key(tile) + Layout::kTileElements + ValueRows::Offset(row, lane);
    const int column = lane * CacheRows::kChunk;
    const int value_column = column + (Layout::kIsWide ? first_column_ : 0);
    const auto key = reinterpret_cast<uintptr_t>(KeyOf<C>(p_, column, item_.kv_head));
    const auto value = reinterpret_cast<uintptr_t>(ValueOf<C>(p_, 0, item_.kv_head) + value_column);
#pragma unroll
    for (int i = 0; i < kTile; i += kPositions) {
      const int64_t offset = BytesTo<C>(positions_.SlotOf(n, i / kPositions));
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

  // Calls use(n, to, step, column) for the chunks of a KV tile that the thread copies: the number
  // of the chunk, its place in K, or V, of the tile, the step in which its position is copied, and
  // the number of its column.
  template <typename Use>
  __device__ __forceinline__ void ForChunks(const Use& use) const {
    constexpr int kLanes = Layout::kCopyLanes, kOfRow = CacheRows::kChunks / kLanes;
    static_assert(!Layout::kIsWide && CacheRows::kChunks % 8 == 0, "eight lanes copy a row");
    const int row = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    const int first = CacheRows::Offset(row, lane);
#pragma unroll
    for (int n = 0; n < kChunksOfThread; ++n) {
      const int step = n / kOfRow, chunk = n % kOfRow * kLanes;
      const int below = step * Positions::kAtOnce;
      use(n, first + below * CacheRows::kStride + chunk * CacheRows::kChunk, step,
          (lane + chunk) * CacheRows::kChunk);
    }
  }

  // Begins to copy a KV tile of which K or V is int4. What is int4 is read, and stored as int8 by
  // StoreInt4: after the products of another tile, during which the memory has time to answer.
  // `taken`: the number of the tile among those taken.
  __device__ Int4Chunks ReadInt4(int32_t tile, int taken) const {
    Int4Chunks read;
    ForChunks([&](int n, int to, int step, int column) {
      const auto copy = [&](DType dtype, const C* from, bool exists, C* place) -> Int4Chunk {
        if (dtype == DType::kInt4) {
          return exists ? *reinterpret_cast<const Int4Chunk*>(from + column / 2) : Int4Chunk();
        }
        gpu::CopyAsync16(place + to, from + column, exists);
        return {};
      };
      const int64_t slot = BytesTo<C>(positions_.SlotOf(taken, step));
      read.keys[n] = copy(p_.cache_dtype, KeyOf<C>(p_, slot, item_.kv_head),
                          slot >= 0 && column < p_.head_size, layout_.Key(tile));
      read.values[n] = copy(p_.value_cache_dtype, ValueOf<C>(p_, slot, item_.kv_head),
                            slot >= 0 && column < p_.value_head_size, Value(tile));
    });
    return read;
  }

  __device__ void StoreInt4(int32_t tile, const Int4Chunks& read) const {
    ForChunks([&](int n, int to, int /*step*/, int /*column*/) {
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
    [[maybe_unused]] const PositionScales* scales = layout_.Scales(tile) + first_key;
    float logits[kKeys / 8][4] = {};
    Products::MultiplyByKeys(layout_.query, warp_row_, layout_.Key(tile), first_key, logits);
    if constexpr (kIs8Bit<C>) Products::ScaleLogits(scales, logits);
    softmax_.ToLogits(begin, /*masked=*/!common_.Contains(begin, begin + kKeys), logits);
    float rescales[2];
    softmax_.Weigh(logits, rescales);
    Softmax::RescaleSums(rescales, products_.sums);
    if constexpr (!kIsInteger<C>) {
      if (common_.RowsDiffer(item_, tile * kTile, (tile + 1) * kTile)) {
        SetAsideNonFinite(tile, begin);
      }
    }
    if constexpr (kIs8Bit<C>) Products::ScaleWeights(scales, logits);
    products_.template AddValues<typename Products::Weight>(Value(tile), first_key, logits);
  }

  // A weight of zero times an infinite or NaN value would spoil a row's sum. If a KV tile holds
  // such values, this adds them to the rows that attend to them and then sets them to zero in the
  // tile.
  __device__ void SetAsideNonFinite(int32_t tile, int32_t begin) {
    C* values = Value(tile);
    const auto element = [&](unsigned i) {
      return values + ValueRows::ElementOffset(i / kColumns, i % kColumns);
    };
    constexpr int kChunks = kColumns / ValueRows::kChunk;
    const auto chunk = [&](unsigned i) {
      return values + ValueRows::Offset(i / kChunks, i % kChunks);
    };
    if (!__syncthreads_or(HoldsNonFinite<C>(threadIdx.x, kTile * kChunks, kThreads, chunk))) return;
    softmax_.template AddNonFinite<kKeys>(
        begin, products_.sums,
        [&](int j, int n, int e) {
          return values[ValueRows::ElementOffset(part_ * kKeys + j, Products::Column(n, e))];
        },
        [&](C value, int j) {
          return Products::Scaled(value, layout_.Scales(tile)[part_ * kKeys + j]);
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
  Positions positions_;
  bool is_bad_;
};

// Computes work items of up to kWarpRows groups of 16 rows. kWarpRows is kWarps or
// Layout::kFewWarpRows. kHasFewRows: items of few rows are computed in the other way.
template <typename T, typename C, int kHeadSize, int kWarpRows, bool kHasFewRows>
__global__ void __launch_bounds__(kThreads, 2)
    TensorCoreAttention(Params p, Scratch scratch, QueryLengths lengths) {
  using Layout = TensorCoreLayout<T, C, kHeadSize>;
  constexpr int kFewWarpRows = Layout::kFewWarpRows;
  const Layout layout(gpu::SharedMemory(), kWarpRows);
  ResetCounter(scratch);
  gpu::LetNextKernelBegin();
  Schedule schedule(p, lengths, kMaxRowsPerItem, layout.schedule);
  while (const Item* item = schedule.FindDealt()) {
    const auto compute = [&](int first_column) {
      if constexpr (kHasFewRows && kWarpRows > kFewWarpRows) {
        if (item->num_rows <= kFewWarpRows * kRowsPerWarpTile) {
          TensorCoreItem<T, C, kHeadSize, kFewWarpRows>(p, *item, layout, first_column)
              .Compute(scratch);
          return;
        }
      }
      TensorCoreItem<T, C, kHeadSize, kWarpRows>(p, *item, layout, first_column).Compute(scratch);
    };
    if constexpr (Layout::kIsWide) {
      for (int column = 0; column < p.value_head_size; column += kMaxColumns) {
        if (column > 0) __syncthreads();  // everyone has left the sums
        compute(column);
      }
    } else {
      compute(0);
    }
  }
}

}  // namespace xla_gpu::paged_attention
