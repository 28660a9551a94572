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

// The slot of a cache of type C.
template <typename C>
using Slot = std::conditional_t<kIs8Bit<C>, ScaledSlot, PlainSlot>;

// The offset of a slot in bytes. Aligned, and never read, where there is no slot.
template <typename C>
__device__ __forceinline__ int64_t BytesTo(const Slot<C>& slot) {
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
  const uint32_t logical = static_cast<uint32_t>(position) / static_cast<uint32_t>(p.block_size);
  return p.block_tables[item.sequence * p.max_blocks_per_seq + logical];
}

// The slot of a position in a block. Sets *is_bad if the block id is outside the pool.
template <typename C>
__device__ __forceinline__ Slot<C> SlotIn(const Params& p, const Item& item, int64_t block,
                                          int32_t position, bool* is_bad) {
  if (block < 0 || block >= p.num_blocks) {
    *is_bad = true;
    return {};
  }
  const uint32_t offset = static_cast<uint32_t>(position) % static_cast<uint32_t>(p.block_size);
  Slot<C> slot;
  slot.offset = p.cache.Offset(block, offset);
  if constexpr (kIs8Bit<C>) {
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
__device__ __forceinline__ bool IsInt4(DType dtype) {
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
