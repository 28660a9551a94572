// Attention on tensor cores for float16 and bfloat16 queries, on any GPU from sm_80 on.
//
// A thread block computes the rows of a work item, one KV tile after the other. Later KV tiles are
// copied to shared memory meanwhile. Each warp has 16 rows. Where there is no decode kernel for the
// cache and the head size, warps share the rows of a tile of few: each multiplies K for a part of
// the positions, all see the logits, and each has a part of V's columns.
//
// A wide head has more columns of V than there are registers for: the block goes over the positions
// once for each kMaxColumns of them.
#pragma once

#include "../partial_results.cuh"
#include "../products.cuh"
#include "../scaled_numbers.cuh"
#include "../slot.cuh"

namespace xla_gpu::paged_attention::portable {

// The shared memory of a thread block. T: type of the query. C: type of the cache.
template <typename T, typename C, int kHeadSize>
struct TensorCoreLayout {
  using Key = KeyInTile<T, C>;
  using Value = ValueInTile<C>;
  using QueryRows = SharedRows<T, kHeadSize>;
  using CacheRows = SharedRows<Key, kHeadSize>;
  static constexpr bool kIsWide = kHeadSize > kMaxColumns;
  static constexpr bool kIsLatent = kHeadSize > kMaxOwnValues;  // V is the first columns of K
  static constexpr int kColumns = kIsWide ? kMaxColumns : kHeadSize;
  using ValueRows = std::conditional_t<kIsLatent, CacheRows, SharedRows<Value, kColumns>>;
  static constexpr int kTile = kHeadSize <= 128 ? 64 : 32;  // positions
  // KV tiles in memory: one of products of codes and scales, which are twice as large as int8. The
  // next tile's codes wait in registers until everyone has left it.
  static constexpr int kStages = kIs8Bit<Key>                                   ? 3
                                 : std::is_same_v<C, ScaledCode> && kTile == 64 ? 1
                                                                                : 2;
  static constexpr int kAhead = kStages == 1 ? 1 : kStages - 1;  // tiles that are copied meanwhile
  static constexpr int kFewWarpRows = kTile == 64 ? 1 : 2;       // 16 positions for each warp
  // Whether warps with the same rows can have equal shares of V: products take pairs of chunks.
  static constexpr bool kCanShareRows =
      kColumns / (kWarps / kFewWarpRows) % (2 * ValueRows::kChunk) == 0;
  static constexpr int kSumRows = kWarps * kRowsPerWarpTile;
  static constexpr int kTileElements = kTile * CacheRows::kStride;
  static constexpr int kStageElements =
      kTileElements + (kIsLatent ? 0 : kTile * ValueRows::kStride);
  static constexpr int kTilesBytes = kStages * kStageElements * static_cast<int>(sizeof(Key));
  static constexpr int kCopyLanes = CacheRows::kChunks < 8 ? CacheRows::kChunks : 8;
  using Positions = CopiedPositions<kTile, kCopyLanes>;
  // KV tiles of an 8-bit cache whose scales are in memory. The scales of all tiles that are taken
  // at once are copied while some warps still multiply the tile kAhead + 1 before.
  static constexpr int kScaleTiles = kIs8Bit<C> ? kAhead + 1 + Positions::kTiles : 0;

  // For a query tile of `warp_rows` groups of 16 rows, and the logits that warps with fewer show
  // each other: a tile of many rows has room for them behind few.
  XLA_GPU_HOST_DEVICE static constexpr int RowsBytes(int warp_rows) {
    return warp_rows * kRowsPerWarpTile * QueryRows::kStride * static_cast<int>(sizeof(T));
  }
  static constexpr int kLogitsBytes = kFewWarpRows * kRowsPerWarpTile * kTile * 4;
  XLA_GPU_HOST_DEVICE static constexpr int QueryBytes(int warp_rows) {
    return RowsBytes(warp_rows) + (warp_rows == kWarps ? 0 : kLogitsBytes);
  }
  static_assert(RowsBytes(kFewWarpRows) + kLogitsBytes <= RowsBytes(kWarps));
  static constexpr int SharedBytes(int warp_rows) {
    return kTilesBytes + QueryBytes(warp_rows) +
           kScaleTiles * kTile * static_cast<int>(sizeof(PositionScales)) +
           static_cast<int>(sizeof(Schedule::Shared)) + (kStatesAreBehindSums ? 0 : kStatesBytes);
  }

  // Floats from one row of sums to the next. Lanes store several rows at once, where there is room
  // in different banks of shared memory.
  static constexpr int kPaddedStride = kColumns + (kIs8Bit<Value> ? 16 : 8);
  static constexpr int kSumStride =
      kSumRows * kPaddedStride * 4 <= kTilesBytes + QueryBytes(kFewWarpRows) ? kPaddedStride
                                                                             : kColumns;
  static constexpr int kSumsBytes = kSumRows * kSumStride * 4;
  static constexpr int kStatesBytes = kSumRows * static_cast<int>(sizeof(RowState));
  static_assert(kSumsBytes <= kTilesBytes + QueryBytes(kFewWarpRows),
                "the sums of all rows take the place of the tiles and the query");
  static constexpr bool kStatesAreBehindSums =
      kSumsBytes + kStatesBytes <= kTilesBytes + QueryBytes(kFewWarpRows);

  static_assert(kHeadSize > 128 || 2 * (SharedBytes(kWarps) + 1024) <= 164 * 1024,
                "a multiprocessor of an A100 holds two thread blocks; CUDA takes 1 KiB of each");

  Key* tiles;              // [kStages][K, V][kTile] rows; the V of a wide head is kColumns of it
  T* query;                // [warp_rows * kRowsPerWarpTile] rows
  PositionScales* scales;  // [kScaleTiles][kTile]
  Schedule::Shared* schedule;
  float* sums;       // [kSumRows][kSumStride], in the memory of tiles and query
  RowState* states;  // [kSumRows], behind them if there is room

  __device__ TensorCoreLayout(char* memory, int warp_rows)
      : tiles(reinterpret_cast<Key*>(memory)),
        query(reinterpret_cast<T*>(memory + kTilesBytes)),
        scales(reinterpret_cast<PositionScales*>(memory + kTilesBytes + QueryBytes(warp_rows))),
        schedule(reinterpret_cast<Schedule::Shared*>(scales + kScaleTiles * kTile)),
        sums(reinterpret_cast<float*>(memory)),
        states(kStatesAreBehindSums ? reinterpret_cast<RowState*>(memory + kSumsBytes)
                                    : reinterpret_cast<RowState*>(schedule + 1)) {}

  // Logits of a tile: [group of 16 rows][8 positions][lane] four of them.
  __device__ float4* Logits() const {
    return reinterpret_cast<float4*>(reinterpret_cast<char*>(query) + RowsBytes(kFewWarpRows));
  }
  __device__ Key* Keys(int32_t tile) const { return tiles + tile % kStages * kStageElements; }
  __device__ PositionScales* Scales(int32_t tile) const {
    if constexpr (kScaleTiles > 0) {
      return scales + tile % kScaleTiles * kTile;
    }
    return scales;
  }
};

// Computes one work item of kWarpRows groups of 16 rows. A warp has one group. If there are fewer
// groups than warps, the warps of a group divide K by positions and V by columns.
template <typename T, typename C, int kHeadSize, int kWarpRows>
class TensorCoreItem {
  using Layout = TensorCoreLayout<T, C, kHeadSize>;
  using Key = typename Layout::Key;
  using Value = typename Layout::Value;
  using QueryRows = typename Layout::QueryRows;
  using CacheRows = typename Layout::CacheRows;
  using ValueRows = typename Layout::ValueRows;
  using Positions = typename Layout::Positions;
  static constexpr int kStages = Layout::kStages;
  static constexpr int kParts = kWarps / kWarpRows;
  static constexpr int kTile = Layout::kTile;
  static constexpr int kKeys = kTile / kParts;  // positions of a KV tile that a warp multiplies
  static constexpr int kRows = kWarpRows * kRowsPerWarpTile;
  static constexpr int kColumns = Layout::kColumns;
  static constexpr bool kHasScaledCodes = std::is_same_v<C, ScaledCode>;
  static constexpr bool kHasCodes = kHasScaledCodes || std::is_same_v<C, Int4OrInt8>;
  static constexpr int kNumbers = 16;  // of a chunk with codes
  static constexpr int kChunksOfThread = kTile * kHeadSize / kNumbers / kThreads;
  static constexpr int kOwnColumns = kColumns / kParts;
  static_assert(kParts == 1 || Layout::kCanShareRows);
  using KeyProducts = WarpProducts<T, Key, kHeadSize, kKeys, QueryRows, CacheRows>;
  using Products =
      WarpProducts<T, Value, kHeadSize, kTile, QueryRows, CacheRows, kOwnColumns, ValueRows>;
  using Weight = typename Products::Weight;

 public:
  __device__ TensorCoreItem(const Params& p, const Item& item, const Layout& layout,
                            int first_column)
      : p_(p),
        item_(item),
        layout_(layout),
        first_column_(first_column),
        common_(p, item),
        is_bad_(HasBadTree(p, item, threadIdx.x)) {}

  __device__ void Compute(const Scratch& scratch) {
    const Tiles tiles(item_, kTile);
    positions_.Load(p_, item_, tiles.begin);
    CopyQueryRows<kRows, Key, QueryRows>(p_, item_, threadIdx.x, layout_.query);
    constexpr int kAhead = Layout::kAhead;
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
        [[maybe_unused]] std::conditional_t<kHasCodes, CodedChunks, char> coded;
        if (copied < end) {
          if constexpr (kHasCodes) {
            coded = ReadCodes(copied, n);
          } else {
            CopyTile(copied, n);
          }
        }
        gpu::CommitCopies();
        if (is_copied) {
          ComputeTile(tile);
          const int32_t next = gpu::Opaque(tile) + 1;
          if (next == end || BeginsLeaf(next * kTile)) EndLeafOf(scratch, next);
        }
        if constexpr (kHasCodes) {
          if (kStages == kAhead && is_copied) __syncthreads();  // everyone has left the tile
          if (copied < end) StoreNumbers(copied, n, coded);
        }
      }
    }
    gpu::WaitCopies<0>();
    is_bad_ = __syncthreads_or(is_bad_);  // everyone has left the tiles, whose place the sums take
    StoreSums();
    __syncthreads();
    const FoundRows rows{layout_.states, layout_.sums, Layout::kSumStride, kColumns, first_column_};
    WriteRows<T, /*kWidth=*/4>(p_, scratch, item_, rows, is_bad_);
  }

 private:
  // Nothing that follows from the thread's number stays in a register where it is not used.
  static __device__ __forceinline__ unsigned Thread() { return gpu::Opaque(threadIdx.x); }
  static __device__ __forceinline__ int Lane() { return Thread() % gpu::kWarpSize; }
  // The warp's first row, and its place among the warps with these rows.
  static __device__ __forceinline__ int WarpRow() {
    return Thread() / gpu::kWarpSize % kWarpRows * kRowsPerWarpTile;
  }
  static __device__ __forceinline__ int Part() {
    return kParts == 1 ? 0 : Thread() / gpu::kWarpSize / kWarpRows;
  }

  // Goes to the positions of the tiles from `first` on, and copies their scales. A position
  // that does not exist has zeros.
  __device__ __forceinline__ void TakePositions(int32_t first) {
    positions_.Take(p_, item_, first, &is_bad_,
                    [&](int tile, int row, int64_t block, int64_t in_block, bool exists) {
                      if constexpr (kHasScaledCodes) {
                        scales_of_keys_ = p_.k_groups.Offset(block, in_block, item_.kv_head);
                        scales_of_values_ = p_.v_groups.Offset(block, in_block, item_.kv_head);
                      }
                      if constexpr (kIs8Bit<C>) {
                        CopyScales(p_, item_, block, in_block, exists,
                                   layout_.Scales(first + tile) + row);
                      }
                    });
  }

  // V of a KV tile, from the first column on. Where it is a part of K it is there already: its
  // columns are K's first ones. An 8-bit V is copied all the same, as the choice would take
  // registers that are not there.
  __device__ Value* Values(int32_t tile) const {
    if constexpr (Layout::kIsLatent) {
      static_assert(kMaxColumns % (8 * CacheRows::kChunk) == 0, "the swizzle repeats");
      return layout_.Keys(tile) + first_column_;
    }
    static_assert(sizeof(Value) == sizeof(Key), "both have the strides of one");
    return reinterpret_cast<Value*>(layout_.Keys(tile)) +
           (HasValuesInKeys() ? 0 : Layout::kTileElements);
  }
  __device__ bool HasValuesInKeys() const {
    return Layout::kIsLatent || (!Layout::kIsWide && !kIs8Bit<C> && p_.is_latent);
  }

  // Up to eight lanes copy 128 bytes of a position's K at a time, and of its V. What does not exist
  // becomes zeros. `n`: the number of the tile among those taken.
  __device__ void CopyTile(int32_t tile, int n) {
    constexpr int kLanes = Layout::kCopyLanes, kPositions = Positions::kAtOnce;
    static_assert(kPositions % 8 == 0, "the swizzle repeats");
    // Wide heads leave no register to keep what follows from it.
    const unsigned thread = kHeadSize >= 256 ? Thread() : threadIdx.x;
    const int row = thread / kLanes, lane = thread % kLanes;
    C* keys = layout_.Keys(tile) + CacheRows::Offset(row, lane);
    C* values = layout_.Keys(tile) + Layout::kTileElements + ValueRows::Offset(row, lane);
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

  // What a thread has read of the chunks of K and V of a KV tile that it copies. Without scaled
  // codes, the first two alone.
  struct CodedChunks {
    CodedChunk keys[kChunksOfThread];
    CodedChunk values[kChunksOfThread];
    CodedChunk more[kChunksOfThread];  // the last eight numbers of K or V of int8: not of both
    uint8_t key_scales[kChunksOfThread];
    uint8_t value_scales[kChunksOfThread];
  };

  // Calls use(n, to, step, column) for the chunks of a KV tile that the thread copies: the number
  // of the chunk, its place in K, or V, of the tile, the step in which its position is copied, and
  // the number of its column.
  template <typename Use>
  __device__ __forceinline__ void ForChunks(const Use& use) const {
    constexpr int kLanes = Layout::kCopyLanes, kOfRow = kHeadSize / kNumbers / kLanes;
    static_assert(!Layout::kIsWide && kOfRow > 0 && kLanes == 8, "eight lanes copy a row");
    const unsigned thread = kHasScaledCodes ? Thread() : threadIdx.x;
    const int row = thread / kLanes, lane = thread % kLanes;
    const int first = CacheRows::Offset(row, lane * (kNumbers / CacheRows::kChunk));
#pragma unroll
    for (int n = 0; n < kChunksOfThread; ++n) {
      const int step = n / kOfRow, chunk = n % kOfRow * kLanes;
      const int below = step * Positions::kAtOnce;
      use(n, first + below * CacheRows::kStride + chunk * kNumbers, step,
          (lane + chunk) * kNumbers);
    }
  }

  // Begins to copy a KV tile of which K or V has codes. They are read, and stored as numbers by
  // StoreNumbers: after the products of another tile, during which the memory has time to answer.
  // `taken`: the number of the tile among those taken.
  __device__ CodedChunks ReadCodes(int32_t tile, int taken) const {
    const bool have_key_codes = Is4Bit(p_.cache_dtype);
    const bool have_value_codes = Is4Bit(p_.value_cache_dtype);
    CodedChunks read;
    ForChunks([&](int n, int to, int step, int column) {
      const int64_t slot = BytesTo<C>(positions_.SlotOf(taken, step));
      const bool has_key = slot >= 0 && column < static_cast<int>(p_.head_size);
      const bool has_value = slot >= 0 && column < static_cast<int>(p_.value_head_size);
      const C* key = KeyOf<C>(p_, slot, item_.kv_head) + (have_key_codes ? column / 2 : column);
      const C* value =
          ValueOf<C>(p_, slot, item_.kv_head) + (have_value_codes ? column / 2 : column);
      if constexpr (kHasScaledCodes) {
        // What does not exist is read from the query, and left out by StoreNumbers: ptxas would
        // wait for each load that only some lanes make.
        const C* const some = static_cast<const C*>(p_.query);
        if (!has_key) key = some;
        if (!has_value) value = some;
        read.keys[n] = LoadChunk(key);
        read.values[n] = LoadChunk(value);
        const C* const more = have_value_codes ? some : value + 8;
        read.more[n] = LoadChunk(have_key_codes ? more : key + 8);
        const int lane = positions_.LaneOf(taken, step);
        const auto load_scale = [&](const GroupScales& scales, int64_t of_lane, bool exists) {
          const int64_t first = gpu::Shuffle(of_lane, lane);
          // Opaque, or it is computed behind a branch.
          const int64_t offset =
              gpu::Opaque(first + (column >> LogOfGroupSize(scales)) * scales.group_stride);
          const bool is_one = exists && IsQuantized(scales.dtype);
          return *(is_one ? static_cast<const uint8_t*>(scales.data) + offset : &some->bits);
        };
        read.key_scales[n] = load_scale(p_.k_groups, scales_of_keys_, has_key);
        read.value_scales[n] = load_scale(p_.v_groups, scales_of_values_, has_value);
      } else {
        const auto copy = [&](bool are_codes, const C* from, bool exists, CodedChunk* chunk,
                              C* place) {
          if (are_codes) {
            *chunk = exists ? LoadChunk(from) : CodedChunk();
          } else {
            gpu::CopyAsync16(place + to, from, exists);
          }
        };
        copy(have_key_codes, key, has_key, &read.keys[n], layout_.Keys(tile));
        copy(have_value_codes, value, has_value, &read.values[n], Values(tile));
      }
    });
    return read;
  }
  static __device__ __forceinline__ CodedChunk LoadChunk(const C* from) {
    return *reinterpret_cast<const CodedChunk*>(from);
  }

  __device__ void StoreNumbers(int32_t tile, int taken, const CodedChunks& read) const {
    if constexpr (kHasScaledCodes) {
      bool exist[kChunksOfThread];  // the positions
      ForChunks([&](int n, int /*to*/, int step, int /*column*/) {
        exist[n] = positions_.Exists(taken, step);
      });
      const auto store = [&](DType dtype, const GroupScales& scales, const auto& chunks,
                             const auto& scales_of_chunks, int64_t row_size, auto* place) {
        using Number = std::remove_pointer_t<decltype(place)>;
        const ScaledChunks<Number> scaled(dtype, scales);
        scaled.WithKind([&](auto kind) {
          ForChunks([&](int n, int to, int /*step*/, int column) {
            const bool exists = exist[n] && column < static_cast<int>(row_size);
            FourPairs products[2];
            scaled.template Multiply<kind>(chunks[n], read.more[n], scales_of_chunks[n], exists,
                                           products);
            static_assert(CacheRows::kIsSwizzled, "the second half is behind the first, or before");
            *reinterpret_cast<FourPairs*>(place + to) = products[0];
            *reinterpret_cast<FourPairs*>(place + (to ^ CacheRows::kChunk)) = products[1];
          });
        });
      };
      store(p_.cache_dtype, p_.k_groups, read.keys, read.key_scales, p_.head_size,
            layout_.Keys(tile));
      store(p_.value_cache_dtype, p_.v_groups, read.values, read.value_scales, p_.value_head_size,
            Values(tile));
    } else {
      ForChunks([&](int n, int to, int /*step*/, int /*column*/) {
        const auto store = [&](DType dtype, const CodedChunk& chunk, C* place) {
          if (dtype != DType::kInt4) return;
          FourPairs numbers;
#pragma unroll
          for (int i = 0; i < 4; ++i) numbers.pair[i] = Expand4(chunk.words[i / 2] >> i % 2 * 16);
          *reinterpret_cast<FourPairs*>(place + to) = numbers;
        };
        store(p_.cache_dtype, read.keys[n], layout_.Keys(tile));
        store(p_.value_cache_dtype, read.values[n], Values(tile));
      });
    }
  }

  __device__ void ComputeTile(int32_t tile) {
    const int32_t begin = tile * kTile;
    [[maybe_unused]] const PositionScales* scales = layout_.Scales(tile);
    float logits[kTile / 8][4] = {};
    if constexpr (kParts == 1) {
      KeyProducts::MultiplyByKeys(layout_.query, WarpRow(), layout_.Keys(tile), 0, logits);
    } else {
      float own[kKeys / 8][4] = {};
      KeyProducts::MultiplyByKeys(layout_.query, WarpRow(), layout_.Keys(tile), Part() * kKeys,
                                  own);
      Show(own, logits);
    }
    if constexpr (kIs8Bit<C>) Products::ScaleLogits(scales, logits);
    const bool masked = !common_.Contains(begin, begin + kTile);
    RowRange ranges[2] = {};  // no register holds them all the time
    if (masked) {
      ranges[0] = RowRange(p_, item_, WarpRow() + Lane() / 4);
      ranges[1] = RowRange(p_, item_, WarpRow() + Lane() / 4 + 8);
    }
    Softmax softmax(p_, item_, WarpRow() + Lane() / 4, ranges[0], ranges[1], states_[0]);
    softmax.ToLogits(begin, masked, logits);
    float factors[2];
    uint32_t drops[2] = {};
    const bool exceeds = softmax.Exceeds(logits, softmax.ScalesLate(), kSlack<Weight>, factors);
    const auto shrink = [&](int block) {
      if (!exceeds) return;
      Softmax::RescaleAll({Softmax::Shrinks(drops[0], block), Softmax::Shrinks(drops[1], block)},
                          products_[0].sums);
    };
    if (exceeds) {
      softmax.WeighBlocks(factors, kSlack<Weight>, logits, drops);
    } else {
      softmax.template WeighLeaf<0, kTile / 8>(factors, logits);
    }
    softmax.CopyStates(states_[0]);
    shrink(0);
    if constexpr (!kIsInteger<C>) {
      if (common_.RowsDiffer(item_, begin, begin + kTile)) SetAsideNonFinite(softmax, tile, begin);
    }
    if constexpr (kIs8Bit<C>) Products::ScaleWeights(scales, logits);
    typename Products::PackedWeights packed[1];
    Products::template PackWeights<Weight>(logits, packed[0]);
    constexpr int kSteps = Softmax::kBlockPositions / 16;
    Products::template AddValues<Weight>(
        Values(tile), 0, packed, products_,
        [&](int step) {
          if (step > 0 && step % kSteps == 0) shrink(step / kSteps);
        },
        Part() * (kOwnColumns / ValueRows::kChunk));
  }

  // Shows a warp's logits to the others of its group. Returns those of the whole tile.
  __device__ __forceinline__ void Show(const float (&own)[kKeys / 8][4],
                                       float (&logits)[kTile / 8][4]) const {
    float4* const places =
        layout_.Logits() + WarpRow() / kRowsPerWarpTile * (kTile / 8 * gpu::kWarpSize) + Lane();
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      places[(Part() * (kKeys / 8) + n) * gpu::kWarpSize] =
          make_float4(own[n][0], own[n][1], own[n][2], own[n][3]);
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kTile / 8; ++n) {
      const float4 four = places[n * gpu::kWarpSize];
      logits[n][0] = four.x, logits[n][1] = four.y, logits[n][2] = four.z, logits[n][3] = four.w;
    }
  }

  // Before the tile `next`, which is not in the leaf.
  __device__ __forceinline__ void EndLeafOf(const Scratch& scratch, int32_t next) {
    const Tiles tiles(item_, kTile);
    EndLeaf(
        tiles.begin * kTile, next * kTile, next == tiles.end, states_, products_, [&](int which) {
          const int columns = static_cast<int>(p_.value_head_size) - first_column_;
          return Total<1>(scratch.Slot(gpu::Opaque(blockIdx.x), which), gpu::Opaque(threadIdx.x),
                          min(columns - Part() * kOwnColumns, kOwnColumns),
                          min(columns, kOwnColumns));
        });
  }

  // A weight of zero times an infinite or NaN value would spoil a row's sum. If a KV tile holds
  // such values, this adds them to the rows that attend to them and then sets them to zero in the
  // tile.
  __device__ void SetAsideNonFinite(const Softmax& softmax, int32_t tile, int32_t begin) {
    Value* values = Values(tile);
    const auto element = [&](unsigned i) {
      return values + ValueRows::ElementOffset(i / kColumns, i % kColumns);
    };
    constexpr int kChunks = kColumns / ValueRows::kChunk;
    const auto chunk = [&](unsigned i) {
      return values + ValueRows::Offset(i / kChunks, i % kChunks);
    };
    const bool is_found = HoldsNonFinite<Value>(threadIdx.x, kTile * kChunks, kThreads, chunk);
    if (!__syncthreads_or(is_found)) return;
    softmax.template AddNonFinite<kTile>(
        begin, products_[0].sums,
        [&](int j, int n, int e) {
          const int column = Part() * kOwnColumns + Products::Column(n, e);
          return values[ValueRows::ElementOffset(j, column)];
        },
        [&](Value value, int j) { return Products::Scaled(value, layout_.Scales(tile)[j]); });
    __syncthreads();
    ClearNonFinite(threadIdx.x, kTile * kColumns, kThreads, element);
    __syncthreads();
  }

  __device__ void StoreSums() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = WarpRow() + Lane() / 4 + 8 * r;
      // The states of the first part are read.
      products_[0].Store(r, Softmax::Finished(states_[0][r]), layout_.states + Part() * kRows + row,
                         layout_.sums + row * Layout::kSumStride + Part() * kOwnColumns);
    }
  }

  const Params& p_;
  const Item& item_;
  const Layout& layout_;
  const int first_column_;  // of V
  const CommonRange common_;
  RowState states_[1][2] = {{Softmax::kNoLogits, Softmax::kNoLogits}};
  Products products_[1];
  Positions positions_;
  // Where the scales of groups of the lane's position begin.
  [[maybe_unused]] int64_t scales_of_keys_ = 0;
  [[maybe_unused]] int64_t scales_of_values_ = 0;
  bool is_bad_;
};

// The thread blocks that the registers of a multiprocessor suffice for. With few rows and codes to
// expand, thread blocks wait longest for the memory.
template <typename C, int kWarpRows>
inline constexpr int kLeastBlocks = std::is_same_v<C, ScaledCode> && kWarpRows == 1 ? 3 : 2;

// Computes work items of up to kWarpRows groups of 16 rows. kWarpRows is kWarps or
// Layout::kFewWarpRows. kHasFewRows: warps share the rows of items of few.
template <typename T, typename C, int kHeadSize, int kWarpRows, bool kHasFewRows>
__global__ void __launch_bounds__(kThreads, kLeastBlocks<C, kWarpRows>)
    TensorCoreAttention(Params p, Scratch scratch, QueryLengths lengths) {
  using Layout = TensorCoreLayout<T, C, kHeadSize>;
  constexpr int kFewWarpRows = Layout::kFewWarpRows;
  const Layout layout(gpu::SharedMemory(), kWarpRows);
  ResetCounter(scratch);
  gpu::LetNextKernelBegin();
  Schedule schedule(p, lengths, kMaxRowsPerItem, layout.schedule);
  while (const Item* item = schedule.FindDealt()) {
    const int columns = Layout::kIsWide ? static_cast<int>(p.value_head_size) : 1;
#pragma unroll 1
    for (int column = 0; column < columns; column += kMaxColumns) {
      if (column > 0) __syncthreads();  // everyone has left the sums
      if constexpr (kHasFewRows && kWarpRows > kFewWarpRows) {
        if (item->num_rows <= kFewWarpRows * kRowsPerWarpTile) {
          TensorCoreItem<T, C, kHeadSize, kFewWarpRows>(p, *item, layout, column).Compute(scratch);
          continue;
        }
      }
      TensorCoreItem<T, C, kHeadSize, kWarpRows>(p, *item, layout, column).Compute(scratch);
    }
  }
}

}  // namespace xla_gpu::paged_attention::portable
