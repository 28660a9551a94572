// The order in which the positions of a row are added up. It is the same in every kernel, however
// the work is divided: a row has the same bits decoded, prefilled, or in chunks.
//
// Positions are counted from the first one of the sequence. They are cut into leaves. What a row
// finds in a leaf is one chain of products, from zero. Leaves are added from the left within
// groups, and groups from the left. tests/support/one_order.py is the whole definition.
#pragma once

#include <cstdint>

#include "../../storage.h"

namespace xla_gpu::paged_attention {

inline constexpr int32_t kShortLeaf = 256, kLongLeaf = 512;  // positions
inline constexpr int32_t kLongLeavesBegin = 1024;
inline constexpr int32_t kNumShortLeaves = kLongLeavesBegin / kShortLeaf;
inline constexpr int32_t kGroup = 8192;

// The number of the leaf that holds a position, and where a leaf begins.
XLA_GPU_HOST_DEVICE constexpr int32_t LeafOf(int32_t position) {
  return position < kLongLeavesBegin
             ? static_cast<uint32_t>(position) / kShortLeaf
             : static_cast<uint32_t>(position - kLongLeavesBegin) / kLongLeaf + kNumShortLeaves;
}
XLA_GPU_HOST_DEVICE constexpr int32_t LeafBegin(int32_t leaf) {
  return leaf < kNumShortLeaves ? leaf * kShortLeaf
                                : kLongLeavesBegin + (leaf - kNumShortLeaves) * kLongLeaf;
}

// The positions of the leaf that holds a position; and where it ends, or the group.
XLA_GPU_HOST_DEVICE constexpr int32_t LeafSize(int32_t position) {
  return position < kLongLeavesBegin ? kShortLeaf : kLongLeaf;
}
XLA_GPU_HOST_DEVICE constexpr int32_t LeafEnd(int32_t position) {
  const int32_t size = LeafSize(position);
  return (static_cast<uint32_t>(position) / size + 1) * size;
}
XLA_GPU_HOST_DEVICE constexpr int32_t GroupEnd(int32_t position) {
  return (static_cast<uint32_t>(position) / kGroup + 1) * kGroup;
}

XLA_GPU_HOST_DEVICE constexpr bool BeginsLeaf(int32_t position) {
  return (position & (LeafSize(position) - 1)) == 0;
}

// The leaves, and the groups, that hold positions of [begin, end).
XLA_GPU_HOST_DEVICE constexpr int32_t CountLeaves(int32_t begin, int32_t end) {
  return end <= begin ? 0 : LeafOf(end - 1) + 1 - LeafOf(begin);
}
XLA_GPU_HOST_DEVICE constexpr int32_t CountGroups(int32_t begin, int32_t end) {
  return end <= begin ? 0 : (end - 1) / kGroup + 1 - begin / kGroup;
}

static_assert(LeafBegin(LeafOf(kGroup)) == kGroup, "a group is whole leaves");

}  // namespace xla_gpu::paged_attention
