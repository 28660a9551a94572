// Where a paged cache keeps its keys and values. No XLA headers: kernels include this.
#pragma once

#include <cstdint>

#include "storage.h"

namespace xla_gpu {

// K and V lie in one array or in two, with the dimensions in any order: a row of head_size elements
// for each block, position in the block and kv head. Strides are in elements, the same for K and V.
struct KvCache {
  void* keys;    // of block 0, position 0, kv head 0
  void* values;  // of the same
  int64_t block_stride;
  int64_t position_stride;
  int64_t head_stride;

  // From the row of block 0 and position 0 to the row of this block and position, for one kv head.
  XLA_GPU_HOST_DEVICE int64_t Offset(int64_t block, int64_t position) const {
    return block * block_stride + position * position_stride;
  }
};

// The scales of a cache of 8 bits, by which its numbers are multiplied: one for all, one for each
// kv head, or one for each position and kv head. Strides of 0 say which.
struct KvScales {
  const float* data;  // null: 1
  int64_t block_stride;
  int64_t position_stride;
  int64_t head_stride;

  XLA_GPU_HOST_DEVICE bool IsPerPosition() const { return position_stride != 0; }

  XLA_GPU_HOST_DEVICE float At(int64_t block, int64_t position, int64_t head) const {
    if (data == nullptr) return 1.0f;
    return data[block * block_stride + position * position_stride + head * head_stride];
  }
};

}  // namespace xla_gpu
