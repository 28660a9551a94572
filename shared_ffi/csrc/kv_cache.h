// Where a paged cache keeps its keys and values. No XLA headers: kernels include this.
#pragma once

#include <cstdint>

#include "storage.h"

namespace xla_gpu {

// One array or two, in whatever order of their dimensions: a row of head_size elements for each
// block, position in the block and kv head. Strides are in elements, and the same for K and V.
struct KvCache {
  void* keys;    // of block 0, position 0, kv head 0
  void* values;  // likewise
  int64_t block_stride;
  int64_t position_stride;
  int64_t head_stride;

  // Of a position's row of kv head 0, from that of block 0 and position 0.
  XLA_GPU_HOST_DEVICE int64_t Offset(int64_t block, int64_t position) const {
    return block * block_stride + position * position_stride;
  }
};

// What the numbers of a cache of 8 bits are multiplied by: one for all, one for each kv head, or
// one for each position and kv head, as the strides tell.
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
