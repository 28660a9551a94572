// Attention of long queries on tensor cores, on any GPU from sm_80 on.
//
// It has the shape of FlashAttention 2, which feeds the tensor cores best where warps read K and V
// from shared memory by themselves: a thread block has four warps of 32 rows, so that each read of
// K or V feeds four products, and two thread blocks share a multiprocessor, so that one multiplies
// while the other one waits. K and V have one place each. While the logits are computed, V of the
// KV tile is copied, and K of the next one while the values are multiplied.
//
// A KV tile that all rows attend to takes the plain turn, for both groups of 16 rows of a warp at
// once. Other tiles, and all tiles of calls with soft caps or ALiBi, take the general turn. It
// turns the logits of one group after the other into weights: there are registers for one.
#pragma once

#include "../products.cuh"
#include "../requirements.h"
#include "../slot.cuh"
#include "warp_rows.cuh"

namespace xla_gpu::paged_attention::portable {

// What a work item's turns are: in shared memory, as there is no register left.
struct alignas(8) PrefillTurns {
  CommonRange common;
  Tiles tiles;
  Tiles plain_tiles;       // of these
  int32_t is_bad[kWarps];  // whether the warp has met a bad block id or tree mask

  // `has_plain`: whether tiles that all rows attend to take the plain turn.
  __device__ PrefillTurns(const Params& p, const Item& item, int32_t tile, bool has_plain)
      : common(p, item), tiles(item, tile), plain_tiles(item, tile), is_bad{} {
    plain_tiles.begin = max(tiles.begin, (common.begin + tile - 1) / tile);
    plain_tiles.end = min(tiles.end, common.end / tile);
    if (!has_plain || plain_tiles.begin >= plain_tiles.end) {
      plain_tiles.begin = plain_tiles.end = tiles.end;
    }
  }
};

// The shared memory of a thread block. T: type of the query. C: type of the cache. kTile: positions
// of a KV tile.
template <typename T, typename C, int kHeadSize, int kTile>
struct TensorCorePrefillLayout {
  using QueryRows = SharedRows<T, kHeadSize>;
  using CacheRows = SharedRows<C, kHeadSize>;
  using PrefillSchedule = ScheduleOf<40>;  // what there is room for
  static constexpr int kCopyLanes = CacheRows::kChunks < 8 ? CacheRows::kChunks : 8;
  using Positions = PositionsAhead<C, kTile, kCopyLanes>;
  static constexpr int kScaleTiles = kIs8Bit<C> ? 2 * Positions::kTiles : 0;

  static constexpr int kTileElements = kTile * CacheRows::kStride;
  static constexpr int kTilesBytes = 2 * kTileElements * static_cast<int>(sizeof(C));
  static constexpr int kQueryBytes =
      kPrefillTileRows * QueryRows::kStride * static_cast<int>(sizeof(T));
  static constexpr int kScalesBytes =
      kScaleTiles * kTile * static_cast<int>(sizeof(PositionScales));

  using Rows = WarpRowsShared<C, kHeadSize>;
  static_assert(kWarps * sizeof(Rows) <= kTilesBytes + kQueryBytes);

  static constexpr int kSharedBytes = kTilesBytes + kQueryBytes + kScalesBytes +
                                      static_cast<int>(sizeof(typename Positions::Shared)) +
                                      static_cast<int>(sizeof(PrefillTurns)) +
                                      static_cast<int>(sizeof(PrefillSchedule::Shared));

  // CUDA takes 1 KiB of each thread block, of which a multiprocessor holds two.
  static constexpr int kMultiprocessorBytes = kTile == 64 ? kWideTileBytes + 1024 : 100 << 10;
  static_assert(2 * (kSharedBytes + 1024) <= kMultiprocessorBytes);

  C* keys;                 // [kTile] rows
  C* values;               // [kTile] rows
  T* query;                // [kPrefillTileRows] rows
  PositionScales* scales;  // [kScaleTiles][kTile]
  typename Positions::Shared* positions;
  PrefillTurns* turns;
  PrefillSchedule::Shared* schedule;
  Rows* rows;  // [kWarps], in the memory of tiles and query

  __device__ explicit TensorCorePrefillLayout(char* memory)
      : keys(reinterpret_cast<C*>(memory)),
        values(keys + kTileElements),
        query(reinterpret_cast<T*>(memory + kTilesBytes)),
        scales(reinterpret_cast<PositionScales*>(memory + kTilesBytes + kQueryBytes)),
        positions(reinterpret_cast<typename Positions::Shared*>(memory + kTilesBytes + kQueryBytes +
                                                                kScalesBytes)),
        turns(reinterpret_cast<PrefillTurns*>(positions + 1)),
        schedule(reinterpret_cast<PrefillSchedule::Shared*>(turns + 1)),
        rows(reinterpret_cast<Rows*>(memory)) {}

  __device__ PositionScales* Scales(int32_t tile) const {
    if constexpr (kScaleTiles > 0) return scales + kTile * (tile % kScaleTiles);
    return scales;
  }
};

// Computes one work item. A warp has two groups of 16 rows, kGroupRows rows apart.
template <typename T, typename C, int kHeadSize, int kTile>
class TensorCorePrefillItem {
  using Layout = TensorCorePrefillLayout<T, C, kHeadSize, kTile>;
  using QueryRows = typename Layout::QueryRows;
  using CacheRows = typename Layout::CacheRows;
  using Positions = typename Layout::Positions;
  static constexpr int kGroups = 2;
  static constexpr int kGroupRows = kPrefillTileRows / kGroups;
  static_assert(kGroupRows == kWarps * kRowsPerWarpTile);
  using Products = WarpProducts<T, C, kHeadSize, kTile, QueryRows, CacheRows>;
  using Weight = typename Products::Weight;
  using PackedWeights = typename Products::PackedWeights;

 public:
  __device__ TensorCorePrefillItem(const Params& p, const Item& item, const Layout& layout)
      : p_(p), item_(item), layout_(layout) {}

  __device__ void Compute(const Scratch& scratch) {
    if (Thread() == 0) {
      const bool has_plain = p_.scale > 0 && p_.soft_cap == 0 && p_.alibi_slopes == nullptr;
      *layout_.turns = PrefillTurns(p_, item_, kTile, has_plain);
    }
    __syncthreads();
    if (p_.tree_mask != nullptr) SetBad(HasBadTree(p_, item_, Thread()));
    const PrefillTurns& turns = *layout_.turns;
    int32_t tile = turns.tiles.begin;
    Begin(tile);
    while (tile < turns.tiles.end) {
      if (turns.plain_tiles.begin <= tile && tile < turns.plain_tiles.end) {
        bool begins = BeginsLeaf(tile * kTile);
        const int32_t end = min(LeafEnd(tile * kTile) / kTile, turns.plain_tiles.end);
#pragma unroll 1
        for (; tile < end; ++tile) {
          PlainTurn(tile, begins);
          begins = false;
        }
      } else {
        GeneralTurn(tile++, turns.common);
      }
      const bool is_last = tile == turns.tiles.end;
      if (!is_last && !BeginsLeaf(tile * kTile)) continue;
      EndLeaf(turns.tiles.begin * kTile, tile * kTile, is_last, states_, products_, [&](int which) {
        const auto columns = static_cast<int>(p_.value_head_size);
        return Total<kGroups>(scratch.Slot(blockIdx.x, which), Thread(), columns, columns);
      });
    }
    gpu::WaitCopies<0>();
    // Everyone has left the tiles, whose place the sums take.
    const bool is_bad = __syncthreads_or(turns.is_bad[Warp()]);
    if (Thread() == 0) Report(p_, scratch, item_, is_bad);
    WarpRows<T, C, kHeadSize>::Write(p_, scratch, item_, WarpRow(), kGroupRows, states_, products_,
                                     layout_.rows + Warp());
  }

 private:
  // Nothing that follows from the thread's number stays in a register where it is not used.
  static __device__ __forceinline__ unsigned Thread() { return gpu::Opaque(threadIdx.x); }
  static __device__ __forceinline__ int Lane() { return Thread() % gpu::kWarpSize; }
  static __device__ __forceinline__ int Warp() { return Thread() / gpu::kWarpSize; }
  static __device__ __forceinline__ int WarpRow() { return Warp() * kRowsPerWarpTile; }

  __device__ __forceinline__ void SetBad(bool is_bad) const {
    const unsigned thread = Thread();
    if (gpu::AnyInWarp(is_bad) && thread % gpu::kWarpSize == 0) {
      layout_.turns->is_bad[thread / gpu::kWarpSize] = true;
    }
  }

  // Copies the query, and K of the first tile.
  __device__ __forceinline__ void Begin(int32_t tile) {
    positions_.Load(p_, item_, layout_.positions, tile / Positions::kTiles * Positions::kTiles);
    gpu::CommitCopies();
    CopyQueryRows<kPrefillTileRows, C, QueryRows>(p_, item_, Thread(), layout_.query);
    gpu::CommitCopies();
    gpu::WaitCopies<1>();
    TakePositions(tile / Positions::kTiles * Positions::kTiles);
    CopyKeys(tile);
  }

  // Goes to the positions of the tiles from `first` on, copies their scales, and asks for the block
  // ids of the tiles after these.
  __device__ __forceinline__ void TakePositions(int32_t first) {
    bool is_bad = false;
    positions_.Take(p_, item_, layout_.positions, first, &is_bad,
                    [&](int tile, int row, int64_t block, int64_t in_block, bool exists) {
                      if constexpr (kIs8Bit<C>) {
                        CopyScales(p_, item_, block, in_block, exists,
                                   layout_.Scales(first + tile) + row);
                      }
                    });
    SetBad(is_bad);
    const int32_t next = first + Positions::kTiles;
    if (next < layout_.turns->tiles.end) positions_.Load(p_, item_, layout_.positions, next);
  }

  // Copies K, or V, of a tile. What does not exist becomes zeros.
  __device__ __forceinline__ void CopyKeys(int32_t tile) {
    Copy(layout_.keys, static_cast<const char*>(p_.cache.keys), tile, p_.head_size,
         [&](uint32_t chunks) { return chunks; });
    gpu::CommitCopies();
  }
  __device__ __forceinline__ void CopyValues(int32_t tile) {
    Copy(layout_.values, static_cast<const char*>(p_.cache.values), tile, p_.value_head_size,
         [&](uint32_t chunks) { return ChunksOfValue(p_, chunks); });
    gpu::CommitCopies();
  }
  template <typename Place>
  __device__ __forceinline__ void Copy(C* to, const char* from, int32_t tile, int64_t num_columns,
                                       const Place& place) const {
    constexpr int kLanes = Layout::kCopyLanes, kPositions = Positions::kAtOnce;
    static_assert(kPositions % 8 == 0, "the swizzle repeats");
    const unsigned thread = Thread();
    const int row = thread / kLanes, lane = thread % kLanes;
    C* const first = to + CacheRows::Offset(row, lane);
    const int column = lane * CacheRows::kChunk;
#pragma unroll
    for (int i = 0; i < kTile; i += kPositions) {
      const uint32_t slot = positions_.SlotOf(layout_.positions, thread, tile, i / kPositions);
      const char* const chunks = from + (uint64_t{place(slot) + lane} << 4);
#pragma unroll
      for (int chunk = 0; chunk < CacheRows::kChunks; chunk += kLanes) {
        if (CacheRows::kChunks % kLanes != 0 && lane + chunk >= CacheRows::kChunks) continue;
        const int further = chunk * CacheRows::kChunk;
        gpu::CopyAsync16(first + i * CacheRows::kStride + further, chunks + chunk * 16,
                         slot != kNoSlot && column + further < num_columns);
      }
    }
  }

  // K of the next tile, once everyone has left that of this one. Past the last tile there are only
  // zeros.
  __device__ __forceinline__ void CopyNextKeys(int32_t tile) {
    if (static_cast<unsigned>(tile + 1) % Positions::kTiles == 0) TakePositions(tile + 1);
    CopyKeys(tile + 1);
  }

  __device__ __forceinline__ void WaitForTile() const {
    gpu::WaitCopies<0>();
    __syncthreads();
  }

  // Which rows a group of the warp has, and what they have seen.
  __device__ __forceinline__ Softmax SoftmaxOf(int row, const RowState (&states)[2],
                                               const RowRange& range = {},
                                               const RowRange& range_below = {}) const {
    return Softmax(p_, item_, row, range, range_below, states);
  }

  // `begins`: whether a leaf begins with the tile.
  __device__ __forceinline__ void PlainTurn(int32_t tile, bool begins) {
    WaitForTile();  // K is here, and everyone has left V of the tile before
    CopyValues(tile);
    float logits[kGroups][kTile / 8][4] = {};
    const int warp_row = threadIdx.x / gpu::kWarpSize * kRowsPerWarpTile;
    constexpr int kUnrolled = kIs8Bit<C> ? 2 : CacheRows::kChunks / 2;
    Products::template MultiplyByKeys<kUnrolled>(layout_.query, warp_row, kGroupRows, layout_.keys,
                                                 0, logits);
    WaitForTile();  // V is here, and everyone has left K
    CopyNextKeys(tile);
    [[maybe_unused]] const PositionScales* scales = layout_.Scales(tile);
    if constexpr (kIs8Bit<C>) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) Products::ScaleLogits(scales, logits[g]);
    }
    if (begins) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        Softmax softmax = SoftmaxOf(0, states_[g]);
        softmax.BeginLeaf(logits[g]);
        softmax.CopyStates(states_[g]);
      }
    }
    float factors[kGroups][2];
    bool exceeds = false;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      exceeds |= SoftmaxOf(0, states_[g])
                     .LaneExceeds(logits[g], /*scales_late=*/true, kSlack<Weight>, factors[g]);
    }
    exceeds = gpu::AnyInWarp(exceeds);
    PackedWeights packed[kGroups];
    Drops drops = {};
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      Weigh(SoftmaxOf(0, states_[g]), exceeds, factors[g], g, logits[g], states_[g], &drops);
      if constexpr (kIs8Bit<C>) Products::ScaleWeights(scales, logits[g]);
      Products::template PackWeights<Weight>(logits[g], packed[g]);
    }
    AddValues(packed, exceeds, drops);
  }

  // By how many powers of two the sums of rows shrink before each block of positions is added to
  // them: a byte for each row of a lane.
  struct Drops {
    uint32_t blocks[kTile / Softmax::kBlockPositions];
  };

  // Turns the logits of group g into weights.
  static __device__ __forceinline__ void Weigh(Softmax softmax, bool exceeds,
                                               const float (&factors)[2], int g,
                                               float (&logits)[kTile / 8][4], RowState (&states)[2],
                                               Drops* drops) {
    if (exceeds) {
      uint32_t rows[2] = {};
      softmax.WeighBlocks(factors, kSlack<Weight>, logits, rows);
#pragma unroll
      for (int b = 0; b < kTile / Softmax::kBlockPositions; ++b) {
        drops->blocks[b] |= ((rows[0] >> 8 * b & 0xff) | (rows[1] >> 8 * b & 0xff) << 8) << 16 * g;
      }
    } else {
      softmax.template WeighLeaf<0, kTile / 8>(factors, logits);
    }
    softmax.CopyStates(states);
  }

  // `drops`: if any may be there, which the warp's lanes agree on.
  __device__ __forceinline__ void AddValues(const PackedWeights (&packed)[kGroups], bool may_drop,
                                            const Drops& drops) {
    constexpr int kSteps = Softmax::kBlockPositions / 16;
    Products::template AddValues<Weight>(layout_.values, 0, packed, products_, [&](int step) {
      if (step % kSteps == 0 && may_drop) Shrink(drops.blocks[step / kSteps]);
    });
  }
  __device__ __forceinline__ void Shrink(uint32_t drops) {
    if (!gpu::AnyInWarp(drops != 0)) return;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      Softmax::RescaleAll({Softmax::Shrinks(drops, 2 * g), Softmax::Shrinks(drops, 2 * g + 1)},
                          products_[g].sums);
    }
  }

  __device__ __forceinline__ void GeneralTurn(int32_t tile, const CommonRange& common) {
    const int32_t begin = tile * kTile;
    const bool masked = !common.Contains(begin, begin + kTile);
    WaitForTile();
    CopyValues(tile);
    [[maybe_unused]] const PositionScales* scales = layout_.Scales(tile);
    PackedWeights packed[kGroups];
    Drops drops = {};
    RowRange own = {};  // each lane finds that of one row: lane 2 * g + r of four, row r of group g
    if (masked) own = RowRange(p_, item_, RowOfLane(Lane(), WarpRow(), kGroupRows));
#pragma unroll 1
    for (int g = 0; g < kGroups; ++g) {
      float logits[1][kTile / 8][4] = {};
      const int group_row = WarpRow() + g * kGroupRows;
      constexpr int kUnrolled = kIs8Bit<C> ? 2 : CacheRows::kChunks / 2;
      Products::template MultiplyByKeys<kUnrolled>(layout_.query, group_row, 0, layout_.keys, 0,
                                                   logits);
      if constexpr (kIs8Bit<C>) Products::ScaleLogits(scales, logits[0]);
      RowRange ranges[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        ranges[r].begin = gpu::Shuffle(own.begin, 2 * g + r, 4);
        ranges[r].end = gpu::Shuffle(own.end, 2 * g + r, 4);
      }
      Softmax softmax = SoftmaxOf(group_row + Lane() / 4, states_[0], ranges[0], ranges[1]);
      softmax.template ToLogits</*kSeldomBegins=*/!kIs8Bit<C>>(begin, masked, logits[0]);
      float factors[2];
      const bool exceeds =
          softmax.Exceeds(logits[0], softmax.ScalesLate(), kSlack<Weight>, factors);
      Weigh(softmax, exceeds, factors, g, logits[0], states_[0], &drops);
      if constexpr (kIs8Bit<C>) Products::ScaleWeights(scales, logits[0]);
      Products::template PackWeights<Weight>(logits[0], packed[0]);
      // The groups take turns in the registers: the loop has one body.
      Swap(states_);
      Swap(packed);
    }
    WaitForTile();
    if (tile + 1 < layout_.turns->tiles.end) CopyNextKeys(tile);
    if constexpr (!kIsInteger<C>) {
      if (common.RowsDiffer(item_, begin, begin + kTile)) SetAsideNonFinite(begin, scales);
    }
    AddValues(packed, /*may_drop=*/true, drops);
  }

  template <typename Groups>
  static __device__ __forceinline__ void Swap(Groups& groups) {
    SwapNumbers(groups[0], groups[1]);
  }
  template <typename Number>
  static __device__ __forceinline__ void SwapNumbers(Number& a, Number& b) {
    const Number before = a;
    a = b;
    b = before;
  }
  template <typename Number, int kCount>
  static __device__ __forceinline__ void SwapNumbers(Number (&a)[kCount], Number (&b)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) SwapNumbers(a[i], b[i]);
  }

  // As TensorCoreItem does.
  __device__ void SetAsideNonFinite(int32_t begin, const PositionScales* scales) {
    C* const values = layout_.values;
    // As Copy copies them.
    constexpr int kLanes = Layout::kCopyLanes;
    const unsigned thread = Thread();
    const C* const first = values + CacheRows::Offset(thread / kLanes, thread % kLanes);
    NonFinite<C> non_finite;
#pragma unroll
    for (int i = 0; i < kTile; i += Positions::kAtOnce) {
#pragma unroll
      for (int chunk = 0; chunk < CacheRows::kChunks; chunk += kLanes) {
        if (CacheRows::kChunks % kLanes != 0 && thread % kLanes + chunk >= CacheRows::kChunks) {
          continue;
        }
        non_finite.LookAt(first + i * CacheRows::kStride + chunk * CacheRows::kChunk);
      }
    }
    if (!__syncthreads_or(non_finite.IsFound())) return;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const Softmax softmax(p_, item_, WarpRow() + g * kGroupRows + Lane() / 4);
      softmax.template AddNonFinite<kTile>(
          begin, products_[g].sums,
          [&](int j, int n, int e) {
            return values[CacheRows::ElementOffset(j, Products::Column(n, e))];
          },
          [&](C value, int j) { return Products::Scaled(value, scales[j]); });
    }
    __syncthreads();
    ClearNonFinite(Thread(), kTile * kHeadSize, kThreads, [&](unsigned i) {
      return values + CacheRows::ElementOffset(i / kHeadSize, i % kHeadSize);
    });
    __syncthreads();
  }

  const Params& p_;
  const Item& item_;
  const Layout& layout_;
  RowState states_[kGroups][2] = {{Softmax::kNoLogits, Softmax::kNoLogits},
                                  {Softmax::kNoLogits, Softmax::kNoLogits}};
  Products products_[kGroups];
  Positions positions_;
};

template <typename T, typename C, int kHeadSize, int kTile>
__global__ void __launch_bounds__(kThreads, 2)
    TensorCorePrefill(Params p, Scratch scratch, QueryLengths lengths) {
#ifdef __CUDA_ARCH__
  if constexpr (HasPrefillTile(__CUDA_ARCH__ / 10, kTile)) {
    using Layout = TensorCorePrefillLayout<T, C, kHeadSize, kTile>;
    const Layout layout(gpu::SharedMemory());
    gpu::WaitForKernelsBefore();
    gpu::LetNextKernelBegin();
    typename Layout::PrefillSchedule schedule(p, lengths, kPrefillTileRows, layout.schedule);
    while (const Item* item = schedule.FindDealt()) {
      TensorCorePrefillItem<T, C, kHeadSize, kTile>(p, *item, layout).Compute(scratch);
    }
  } else {
    __trap();  // WithPrefillTile does not choose it
  }
#endif
}

}  // namespace xla_gpu::paged_attention::portable
