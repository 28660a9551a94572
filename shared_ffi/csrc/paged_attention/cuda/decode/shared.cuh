// Attention of few query rows, as in decoding. What it adds to tensor_core.cuh:
//
// - Two producer warps copy, one K and the other V. They run ahead of the products by as many KV
//   tiles as there is memory for, across work items: the memory does not wait where one item ends
//   and the next begins. The block ids are on their way before the tiles of the ids before them are
//   copied. Their lanes copy 16 bytes at a time. By a count of instructions that
//   takes them at most 375 cycles a tile, of which one is due every 1,244 cycles at 3.05 TB/s:
//   tensor copies would save two thirds of their instructions and no time.
// - One warp, that of K, reads the lengths and finds the block's work items. It hands each to the
//   warp of V, which adds what a row needs and hands it to the consumers. So all agree, even if the
//   lengths change meanwhile.
// - A KV tile has 16 positions, or 32 of 8 bits. The consumer warps take 64 positions at a time. Of
//   K, each multiplies another 16. All see all logits through shared memory, and each has a quarter
//   of the columns of V. So a leaf is one chain of products for each column, and nothing is merged
//   among warps.
// - A thread block takes neighbouring leaves, about as many positions as every other block. It adds
//   up those that it has from the beginning of a group, or of the sequence, itself. With many
//   sequences few partial results go to memory.
// - Of the thread blocks that share a sequence and kv head, the one that comes last merges what all
//   have found. No other kernel has to follow.
// - Numbers of 8 bits become float16, each two in one instruction. So does the query of such a
//   cache. The range suffices: a query row is divided by a power of two, and where all positions
//   have one scale, weights are not multiplied by it.
//
// Leaves and groups follow from positions alone (order.h), so a row has the same bits whichever
// thread blocks compute it, whichever comes last, and as every other kernel finds them.
#pragma once

#include "../../../gpu/stamps.cuh"
#include "../pipeline.cuh"
#include "../products.cuh"
#include "other_rows.cuh"
#include "schedule.cuh"

namespace xla_gpu::paged_attention::decode {

inline constexpr int kProducers = 2;  // warps
inline constexpr int kBlockThreads = kThreads + kProducers * gpu::kWarpSize;
static_assert(kItemRows == kRowsPerWarpTile, "a work item is one tile of query rows");
inline constexpr int kConsumersBarrier = 1;    // named barrier
inline constexpr int kTurn = kWarps * kStrip;  // positions that the consumers take at once

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

// A row of a work item.
struct alignas(16) QueryRow {
  RowRange range;
  int32_t token;  // of the sequence. Behind a family's first member: where its slots are, from
                  // those of the first one on
  int32_t head;
};

// What the consumers get of a work item.
struct Work {
  Split split;
  Item item;  // the same. Its consumers have no registers for it
  CommonRange common;
  // Whether a block id is outside the pool, or a tree mask not legal: the rows become NaN. The warp
  // of V may find that until the last tile is there.
  int32_t is_bad;
  float v_scale;  // of an 8-bit cache, if all positions have one
  QueryRow rows[kItemRows];
  int32_t contexts[kItemRows];  // of the members, if the split is a family's
};

// The shared memory of a thread block. kKib: of a multiprocessor.
template <typename T, typename C, int kHeadSize, int kKib>
struct Shared {
  using Query = std::conditional_t<kIs8Bit<C>, Half, T>;
  using QueryRows = SharedRows<Query, kHeadSize>;
  using CacheRows = KvPairRows<C, kHeadSize>;
  static constexpr int kTile = kTilePositions<C>;
  static constexpr int kTileElements = kTile * CacheRows::kStride;
  static constexpr int kItems = 2;  // work items in memory
  static constexpr int kLogitsBytes = 2 * gpu::kWarpSize * static_cast<int>(sizeof(float4));
  static constexpr bool kIsLarge = kKib >= kLargeMultiprocessor;
  // Thread blocks of a multiprocessor. Without the kernels of Hopper GPUs, numbers of 8 bits take
  // more registers than two blocks leave.
  static constexpr int kBlocks = kHeadSize <= 128 && (kIsLarge || !kIs8Bit<C>) ? 2 : 1;
  // One more KiB goes to each thread block. With little memory there is room for two blocks in 164
  // KiB, and for one in 100.
  static constexpr int kBytes = kIsLarge ? 224 * 1024 / kBlocks : (kBlocks == 2 ? 81 : 99) * 1024;
  // What a consumer's thread has of a row's total: the states of two rows, and its columns.
  static constexpr bool kHasTotals = kBlocks > 1;
  static constexpr int kTotalFours = kHasTotals ? 1 + kHeadSize / kWarps / 8 : 1;
  static constexpr int kOtherBytes = 2 * kWarps * kLogitsBytes + kTotalFours * kThreads * 16 +
                                     kItems * kItemRows * (QueryRows::kStride * 2 + 4);
  static constexpr int kScales = kIs8Bit<C> ? kTile : 1;
  static constexpr int kTileBytes = kTileElements * static_cast<int>(sizeof(C)) + kScales * 8 + 16;
  static constexpr int kStages = (kBytes - kOtherBytes - 1024) / kTileBytes;  // KV tiles in memory
  static_assert(kStages * kTile >= (kIsLarge ? 2 : 1) * kTurn,
                "tiles are copied while others are read");
  using TileState = PipelineState<kStages>;
  using ItemState = PipelineState<kItems>;

  alignas(128) C tiles[kStages][kTileElements];
  alignas(128) Query query[kItems][kItemRows * QueryRows::kStride];
  // For an 8-bit cache: the powers of two, times the scale of K if all positions have one.
  float query_factors[kItems][kItemRows];
  // What each warp found for its 16 positions of a turn, as its lanes have it: for both of its rows
  // 4 logits. Turns take the places by turns.
  float4 logits[2][kWarps][2][gpu::kWarpSize];
  float4 totals[kTotalFours][kThreads];
  PositionScales scales[kStages][kScales];  // of an 8-bit cache
  PipelineBarriers<kStages> tiles_barriers;
  PipelineBarriers<kItems> splits_barriers;  // from the warp of K to that of V
  PipelineBarriers<kItems> work_barriers;    // from that to the consumers
  Split splits[kItems];
  int32_t contexts[kItems][kItemRows];  // see Work
  Work work[kItems];
  int32_t is_last;  // whether the thread block merges the splits of a sequence and kv head

  // Whether the scale of an 8-bit cache stays out of the turns, if all positions have one: so it is
  // in the prefill kernel of Hopper GPUs, but not in the portable ones. In all kernels of a call a
  // row has the same bits.
  static __device__ bool LeavesScaleOut(const Params& p) {
    return kIsLarge && p.ScalesAreUniform();
  }

  // The consumers call it. has_scales: whether tiles come with the scales of their positions.
  __device__ void Init(bool has_scales) {
    // Rows that no item fills are multiplied, too. What memory happens to hold must not decide how
    // long that takes.
    auto* chunks = reinterpret_cast<FourPairs*>(query);
    constexpr int kChunks = static_cast<int>(sizeof(query) / sizeof(FourPairs));
#pragma unroll
    for (int i = 0; i < kChunks; i += kThreads) {
      if (i + kThreads <= kChunks || i + threadIdx.x < kChunks) chunks[i + threadIdx.x] = {};
    }
    // By one thread: where each has another barrier, ptxas makes a loop over the threads, of 60
    // cycles a turn.
    if (threadIdx.x > 0) return;
    tiles_barriers.Init(kProducers * gpu::kWarpSize + (has_scales ? 1 : 0), kWarps);
    splits_barriers.Init(1, 1);
    work_barriers.Init(gpu::kWarpSize + 1, kWarps);
  }

  // From the warp of K to that of V.
  // context: of the member that the lane has the number of.
  __device__ void HandOver(const Split& split, int32_t context, ItemState stage) {
    const int lane = threadIdx.x % gpu::kWarpSize;
    splits_barriers.WaitFreed(stage);
    if (lane < kItemRows) contexts[stage.index][lane] = context;
    __syncwarp();  // a lane that came later could wait for the phase after that
    if (lane > 0) return;
    splits[stage.index] = split;
    gpu::Arrive(&splits_barriers.filled[stage.index]);
  }
  __device__ void Receive(Split* split, int32_t* context, ItemState stage) {
    splits_barriers.WaitFilled(stage);
    *split = splits[stage.index];
    *context = contexts[stage.index][threadIdx.x % kItemRows];
    splits_barriers.Free(stage);
  }
};

}  // namespace xla_gpu::paged_attention::decode
