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

}  // namespace xla_gpu
