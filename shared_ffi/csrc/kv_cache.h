// Where a paged cache keeps its keys and values. No XLA headers: kernels include this.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "storage.h"

namespace xla_gpu {

// K and V lie in one array or in two, with the dimensions in any order: a row of head_size numbers
// for each block, position in the block and kv head. Strides are in elements of K's array, of which
// int4 has one for two numbers. V has the same strides, or, where its rows have another size,
// strides in proportion.
struct KvCache {
  void* keys;    // of block 0, position 0, kv head 0
  void* values;  // of the same
  int64_t block_stride;
  int64_t position_stride;
  int64_t head_stride;
  int64_t value_head_stride;  // OffsetOfValue(head_stride), but for arrays without a page table
  int value_shift;            // 0 where V has the strides of K
  uint64_t value_factor;      // 1 there

  // From the row of block 0 and position 0 to the row of this block and position, for one kv head.
  XLA_GPU_HOST_DEVICE int64_t Offset(int64_t block, int64_t position) const {
    return block * block_stride + position * position_stride;
  }
  // The offset in V of what is at an offset in K.
  XLA_GPU_HOST_DEVICE int64_t OffsetOfValue(int64_t offset) const {
    return static_cast<int64_t>((static_cast<uint64_t>(offset) >> value_shift) * value_factor);
  }
  bool ValuesHaveStridesOfKeys() const {
    return value_shift == 0 && value_factor == 1 && value_head_stride == head_stride;
  }
  // Whether all strides of K, and of V, are multiples of a number of elements.
  bool StridesAreMultiplesOf(int64_t of_keys, int64_t of_values) const {
    for (const int64_t stride : {block_stride, position_stride, head_stride}) {
      if (stride % of_keys != 0 || OffsetOfValue(stride) % of_values != 0) return false;
    }
    return true;
  }

  // Makes V's strides those of K divided by `key_unit` and multiplied by `value_unit`. The division
  // has no remainder: it is a shift, and a product with the inverse modulo 2^64 of an odd number.
  void SetUnits(uint64_t key_unit, uint64_t value_unit) {
    for (value_shift = 0; key_unit % 2 == 0; key_unit /= 2) ++value_shift;
    uint64_t inverse = key_unit;  // in its lowest 3 bits; each step doubles them
    for (int i = 0; i < 5; ++i) inverse *= 2 - key_unit * inverse;
    value_factor = inverse * value_unit;
    value_head_stride = OffsetOfValue(head_stride);
  }
};

// The scales of a quantized cache, by which its numbers are multiplied: one for all, one for each
// kv head, or one for each position and kv head. Strides of 0 say which, others are those of the
// array.
struct KvScales {
  const float* data;  // null: 1
  int64_t block_stride;
  int64_t position_stride;
  int64_t head_stride;

  XLA_GPU_HOST_DEVICE bool IsPerPosition() const {
    return block_stride != 0 || position_stride != 0;
  }

  XLA_GPU_HOST_DEVICE int64_t Offset(int64_t block, int64_t position, int64_t head) const {
    return block * block_stride + position * position_stride + head * head_stride;
  }
  XLA_GPU_HOST_DEVICE const float* AddressOf(int64_t block, int64_t position, int64_t head) const {
    return data + Offset(block, position, head);
  }
  XLA_GPU_HOST_DEVICE float At(int64_t block, int64_t position, int64_t head) const {
    return data == nullptr ? 1.0f : *AddressOf(block, position, head);
  }
};

// Scales for groups of numbers along a row: `num_groups` for each position and kv head. Those of K
// scale the rows of V where V is a part of K.
struct GroupScales {
  const void* data;  // null: KvScales are all
  DType dtype;
  int64_t num_groups;
  int64_t group_size;  // numbers of a row
  int64_t block_stride;
  int64_t position_stride;
  int64_t head_stride;
  int64_t group_stride;
  const float* global;  // of all positions, multiplied into each; null: 1

  // The offset of a row's first scale.
  XLA_GPU_HOST_DEVICE int64_t Offset(int64_t block, int64_t position, int64_t head) const {
    return block * block_stride + position * position_stride + head * head_stride;
  }
};

// The same scales, as one group of a row of so many numbers.
inline GroupScales InOneGroup(const KvScales& scales, int64_t row_size) {
  return {scales.data,
          DType::kFloat32,
          1,
          row_size,
          scales.block_stride,
          scales.position_stride,
          scales.head_stride,
          0,
          nullptr};
}

}  // namespace xla_gpu
