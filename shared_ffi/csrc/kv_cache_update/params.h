// kv_cache_update: writes the keys and values of new tokens into their slots of the paged cache.
//
// Token t goes to slot s = slot_mapping[t]: position s % block_size of block s / block_size. A
// negative slot is padding and writes nothing. If two tokens name one slot, the CPU keeps the later
// token; on a GPU it is not defined whose key and whose value remain.
#pragma once

#include <cstdint>

#include "../kv_cache.h"
#include "../storage.h"

namespace xla_gpu::kv_cache_update {

struct Params {
  KvCache cache;             // of num_blocks blocks of block_size positions
  const void* key;           // [num_tokens, num_kv_heads, head_size]
  const void* value;         // [num_tokens, num_kv_heads, value_head_size]
  int64_t key_stride;        // elements from one token's key to the next
  int64_t value_stride;      // likewise
  const void* slot_mapping;  // [num_tokens], int32 or int64
  bool slots_are_int64;
  int64_t num_blocks;
  int64_t block_size;
  int64_t num_tokens;
  int64_t num_kv_heads;
  int64_t head_size;
  int64_t value_head_size;  // 0 where V is a part of K
  DType dtype;              // of key and value
  DType cache_dtype;        // the same, or one of 8 bits, to which key and value are rounded
  KvScales k_scale;         // divide key and value before they are rounded
  KvScales v_scale;

  XLA_GPU_HOST_DEVICE int64_t NumSlots() const { return num_blocks * block_size; }

  // On a GPU somebody else may write to it meanwhile: the compiler must not read it again after the
  // slot is checked.
  XLA_GPU_HOST_DEVICE int64_t Slot(int64_t token) const {
    return slots_are_int64 ? static_cast<const volatile int64_t*>(slot_mapping)[token]
                           : static_cast<const volatile int32_t*>(slot_mapping)[token];
  }
};

}  // namespace xla_gpu::kv_cache_update
