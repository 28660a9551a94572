// Where the K and V of a position lie, by the block table; and int4, of which two share an element.
#pragma once

#include <type_traits>

#include "item.cuh"

namespace xla_gpu::paged_attention {

// The offset in the cache, in elements, of a position's row of kv head 0. -1 if the position is not
// needed, or its block id is outside the pool.
struct PlainSlot {
  int64_t offset = -1;
};

// A slot of an 8-bit cache, with the scales of the work item's kv head.
struct ScaledSlot {
  int64_t offset = -1;
  float k_scale = 1;
  float v_scale = 1;
};

// A slot of a cache whose rows have scales of groups, and the offsets of the first scales of K and
// of V of the work item's kv head.
struct GroupedSlot {
  int64_t offset = -1;
  int64_t k_scales = 0;
  int64_t v_scales = 0;
};

// The slot of a cache of type C.
template <typename C>
using Slot = std::conditional_t<std::is_same_v<C, ScaledByte>, GroupedSlot,
                                std::conditional_t<kIs8Bit<C>, ScaledSlot, PlainSlot>>;

// The offset of a slot in bytes. Aligned, and never read, where there is no slot.
template <typename C, typename AnySlot>
__device__ __forceinline__ int64_t BytesTo(const AnySlot& slot) {
  return slot.offset >= 0 ? slot.offset * static_cast<int64_t>(sizeof(C)) : INT64_MIN;
}

// The same in chunks of 16 bytes, as one register: kNoSlot where there is no slot. For the kernels
// whose calls OffsetsFit32BitChunks.
inline constexpr uint32_t kNoSlot = UINT32_MAX;

template <typename C>
__device__ __forceinline__ uint32_t ChunksTo(const Slot<C>& slot) {
  constexpr int kChunk = 16 / sizeof(C);  // elements
  return slot.offset >= 0 ? static_cast<uint32_t>(slot.offset / kChunk) : kNoSlot;
}

// The same in the array of V.
__device__ __forceinline__ uint32_t ChunksOfValue(const Params& p, uint32_t chunks) {
  const auto factor = static_cast<uint32_t>(p.cache.value_factor);
  return chunks == kNoSlot ? kNoSlot : (chunks >> p.cache.value_shift) * factor;
}

// The block id of a position.
__device__ __forceinline__ int32_t BlockOf(const Params& p, const Item& item, int32_t position) {
  return p.block_tables[item.sequence * p.max_blocks_per_seq + p.block.Quotient(position)];
}

// The place of a position in its block.
__device__ __forceinline__ uint32_t InBlock(const Params& p, int32_t position) {
  return position - p.block.Quotient(position) * p.block.number;
}

// Whether the pool has a block. Sets *is_bad if it has not.
__device__ __forceinline__ bool HasBlock(const Params& p, int64_t block, bool* is_bad) {
  if (block < 0 || block >= p.num_blocks) {
    *is_bad = true;
    return false;
  }
  return true;
}

// The slot of a position in a block. Sets *is_bad if the block id is outside the pool.
template <typename C>
__device__ __forceinline__ Slot<C> SlotIn(const Params& p, const Item& item, int64_t block,
                                          int32_t position, bool* is_bad) {
  if (!HasBlock(p, block, is_bad)) return {};
  const uint32_t offset = InBlock(p, position);
  Slot<C> slot;
  slot.offset = p.cache.Offset(block, offset);
  if constexpr (std::is_same_v<C, ScaledByte>) {
    slot.k_scales = p.k_groups.Offset(block, offset, item.kv_head);
    slot.v_scales = p.v_groups.Offset(block, offset, item.kv_head);
  } else if constexpr (kIs8Bit<C>) {
    slot.k_scale = p.k_scale.At(block, offset, item.kv_head);
    slot.v_scale = p.v_scale.At(block, offset, item.kv_head);
  }
  return slot;
}

// Finds the slot of a position. Sets *is_bad if its block id is outside the pool.
template <typename C>
__device__ __forceinline__ Slot<C> FindSlot(const Params& p, const Item& item, int32_t position,
                                            bool* is_bad) {
  return SlotIn<C>(p, item, BlockOf(p, item, position), position, is_bad);
}

// The positions of KV tiles that a warp copies, kLanes lanes each at a time: kThreads / kLanes
// adjacent ones of all warps. Each lane has one position of the next kTiles tiles. The block ids of
// the tiles after these are on their way meanwhile: nothing may use them in the loop over the
// tiles, or it waits for the memory.
template <int kTile, int kLanes>
class CopiedPositions {
 public:
  static constexpr int kAtOnce = kThreads / kLanes;
  static constexpr int kOfTile = kTile / kWarps;
  static constexpr int kTiles = gpu::kWarpSize / kOfTile;
  static_assert(kTile % kAtOnce == 0 && gpu::kWarpSize % kOfTile == 0);

  // Asks for the block ids of the tiles from `tile` on.
  __device__ __forceinline__ void Load(const Params& p, const Item& item, int32_t tile) {
    const int32_t position = PositionOf(tile);
    if (IsIn(item, position)) next_block_ = BlockOf(p, item, position);
  }

  // Goes to the tiles from `tile` on, whose block ids were asked for. Sets *is_bad if the lane's is
  // outside the pool. Calls use(tile, row, block, in_block, exists) with the lane's position: the
  // number of its tile among them, that of its row in the tile, and the place in its block.
  template <typename Use>
  __device__ __forceinline__ void Take(const Params& p, const Item& item, int32_t tile,
                                       bool* is_bad, const Use& use) {
    offset_ = -1;
    const int32_t position = PositionOf(tile);
    const int64_t block = next_block_;
    const uint32_t in_block = InBlock(p, position);
    const bool exists = IsIn(item, position) && HasBlock(p, block, is_bad);
    if (exists) offset_ = p.cache.Offset(block, in_block);
    use(TileOfLane(), RowOfLane(), block, in_block, exists);
  }

  // The offset in the cache of the position that the lane copies in step `step` of a tile, one of
  // those taken; -1 if it does not exist.
  __device__ __forceinline__ PlainSlot SlotOf(int tile, int step) const {
    return {gpu::Shuffle(offset_, LaneOf(tile, step))};
  }
  __device__ __forceinline__ bool Exists(int tile, int step) const {
    return gpu::Shuffle(static_cast<int32_t>(offset_ >> 32), LaneOf(tile, step)) >= 0;
  }
  // The lane whose position it is.
  static __device__ __forceinline__ int LaneOf(int tile, int step) {
    constexpr int kRows = gpu::kWarpSize / kLanes;
    return tile * kOfTile + step * kRows + Lane() / kLanes;
  }

 private:
  // Nothing that follows from the thread's number stays in a register.
  static __device__ __forceinline__ unsigned Thread() { return gpu::Opaque(threadIdx.x); }
  static __device__ __forceinline__ unsigned Lane() { return Thread() % gpu::kWarpSize; }
  static __device__ __forceinline__ int TileOfLane() { return Lane() / kOfTile; }
  static __device__ __forceinline__ int32_t PositionOf(int32_t tile) {
    return (tile + TileOfLane()) * kTile + RowOfLane();
  }
  static __device__ __forceinline__ int RowOfLane() {
    constexpr int kRows = gpu::kWarpSize / kLanes;
    const int of_tile = Lane() % kOfTile, warp = Thread() / gpu::kWarpSize;
    return of_tile / kRows * kAtOnce + warp * kRows + of_tile % kRows;
  }

  int64_t offset_;
  int32_t next_block_;
};

// The same for a kernel that has no register for a block id: ids and slots are in shared memory,
// the slots with the offset of the work item's kv head, as ChunksTo. For calls whose offsets
// OffsetsFit32BitChunks.
template <typename C, int kTile, int kLanes>
class PositionsAhead {
 public:
  static constexpr int kAtOnce = kThreads / kLanes;
  static constexpr int kOfTile = kTile / kWarps;
  static constexpr int kTiles = 2;
  static constexpr int kOfWarp = kTiles * kOfTile;
  static_assert(kTile % kAtOnce == 0 && kOfWarp <= gpu::kWarpSize);

  struct alignas(8) Shared {
    int32_t ids[kWarps][kOfWarp];
    uint32_t slots[kWarps][kOfWarp];
  };

  // Begins to copy the block ids of the tiles from `tile` on, a multiple of kTiles.
  __device__ __forceinline__ void Load(const Params& p, const Item& item, Shared* shared,
                                       int32_t tile) const {
    const unsigned thread = gpu::Opaque(threadIdx.x);  // no address of it stays in a register
    const unsigned warp = thread / gpu::kWarpSize, lane = thread % gpu::kWarpSize;
    if (kOfWarp < gpu::kWarpSize && lane >= kOfWarp) return;
    const int32_t position = tile * kTile + PositionOf(warp, lane);
    const uint32_t logical = p.block.Quotient(position);
    gpu::CopyAsync4(&shared->ids[warp][lane],
                    p.block_tables + item.sequence * p.max_blocks_per_seq + logical,
                    IsIn(item, position));
  }

  // Goes to the positions of the tiles from `tile` on, whose block ids have arrived. As Take above.
  template <typename Use>
  __device__ __forceinline__ void Take(const Params& p, const Item& item, Shared* shared,
                                       int32_t tile, bool* is_bad, const Use& use) const {
    const unsigned thread = gpu::Opaque(threadIdx.x);
    const unsigned warp = thread / gpu::kWarpSize, lane = thread % gpu::kWarpSize;
    if (kOfWarp == gpu::kWarpSize || lane < kOfWarp) {
      const int32_t in_tiles = PositionOf(warp, lane), position = tile * kTile + in_tiles;
      const int64_t block = shared->ids[warp][lane];
      const uint32_t in_block = InBlock(p, position);
      const bool exists = IsIn(item, position) && HasBlock(p, block, is_bad);
      const int64_t offset = p.cache.Offset(block, in_block) + item.kv_head * p.cache.head_stride;
      use(in_tiles / kTile, in_tiles % kTile, block, in_block, exists);
      shared->slots[warp][lane] =
          exists ? static_cast<uint32_t>(offset / (16 / static_cast<int>(sizeof(C)))) : kNoSlot;
    }
    __syncwarp();
  }

  // The slot of the position that a thread copies in step `step` of a tile, one of those taken.
  __device__ __forceinline__ uint32_t SlotOf(const Shared* shared, unsigned thread, int32_t tile,
                                             int step) const {
    const unsigned warp = thread / gpu::kWarpSize, lane = thread % gpu::kWarpSize;
    return shared->slots[warp][static_cast<unsigned>(tile) % kTiles * kOfTile + step * kRows +
                               lane / kLanes];
  }

 private:
  static constexpr int kRows = gpu::kWarpSize / kLanes;  // that a warp copies at a time

  // Counted from the first of kTiles tiles.
  static __device__ __forceinline__ int32_t PositionOf(unsigned warp, unsigned lane) {
    const unsigned of_tile = lane % kOfTile;
    return lane / kOfTile * kTile + of_tile / kRows * kAtOnce + warp * kRows + of_tile % kRows;
  }
};

// The K, and the V, of a slot and kv head.
template <typename T>
__device__ __forceinline__ const T* KeyOf(const Params& p, int64_t slot, int64_t kv_head) {
  return static_cast<const T*>(p.cache.keys) + slot + kv_head * p.cache.head_stride;
}
template <typename T>
__device__ __forceinline__ const T* ValueOf(const Params& p, int64_t slot, int64_t kv_head) {
  return static_cast<const T*>(p.cache.values) +
         p.cache.OffsetOfValue(slot + kv_head * p.cache.head_stride);
}

// Whether two numbers of K, or of V, share an element. C: type of the cache.
template <typename C>
__device__ __forceinline__ bool HasPairs(DType dtype) {
  if constexpr (std::is_same_v<C, ScaledByte>) return Is4Bit(dtype);
  return std::is_same_v<C, Int4OrInt8> && dtype == DType::kInt4;
}

// Number d of a row of int4.
template <typename C>
__device__ __forceinline__ float NumberOf(const C* row, int d) {
  const uint32_t pair = Expand(reinterpret_cast<const Int4Pair*>(row)[d / 2]);
  return static_cast<int8_t>(pair >> d % 2 * 8);
}

// The four numbers in the lower half of a word of int4, as int8.
__device__ __forceinline__ uint32_t Expand4(uint32_t word) {
  const uint32_t pairs = (word & 0xff) | (word & 0xff00) << 8;
  const uint32_t halves = (pairs | pairs << 4) & 0x0f0f0f0f;
  return halves | (halves & 0x08080808) * 0x1e;  // 8 * 0x1e is 0xf0
}

}  // namespace xla_gpu::paged_attention
