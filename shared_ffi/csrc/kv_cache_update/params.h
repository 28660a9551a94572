// kv_cache_update: writes the keys and values of new tokens into their slots of the paged cache.
//
// Token t goes to slot s = slot_mapping[t]: position s % block_size of block s / block_size. A
// negative slot is padding and writes nothing. If two tokens name one slot, the CPU keeps the later
// token; on a GPU it is not defined whose key and whose value remain.
//
// With a rotary embedding, the first rotary_dim numbers of each key are rotated and rounded to the
// key's dtype before the key is written, and those of each query in place. Token t is rotated by
// the cosines and sines in row positions[t] of cos_sin_cache. Where there is no such row, a token
// with a slot is refused on the CPU; on a GPU its key and value are not written, and its query
// becomes NaN. The query of a token without a slot stays as it is then.
//
// With norms, each head of a key or query is multiplied by 1 / sqrt(mean of its squares + eps) and
// by weights (norm.h), and rounded to the key's dtype, before the rotary embedding or after it.
//
// With a Walsh-Hadamard transform (hadamard.h), a head changes after norm and rotary embedding, and
// stays float32 until it is rounded to the dtype that it is written in.
//
// The call can make the scales of the rows of K, of V or of both, from the rows that it writes
// (scales.h), and writes each to the slot of its row; or those of the groups of a row, which it
// rounds to their dtype (group_scales.h).
#pragma once

#include <cstdint>

#include "../kv_cache.h"
#include "../storage.h"

namespace xla_gpu::kv_cache_update {

// A number for each token, [num_tokens], int32 or int64.
struct TokenNumbers {
  const void* data;
  bool are_int64;

  // On a GPU somebody else may write to it meanwhile: the compiler must not read it again after the
  // number is checked.
  XLA_GPU_HOST_DEVICE int64_t At(int64_t token) const {
    return are_int64 ? static_cast<const volatile int64_t*>(data)[token]
                     : static_cast<const volatile int32_t*>(data)[token];
  }
};

struct Rotary {
  const void* cos_sin_cache;  // [max_positions, rotary_dim]: cosines, then sines; null: no rotation
  DType dtype;                // of cos_sin_cache: float32, or that of key
  TokenNumbers positions;
  int64_t max_positions;
  int64_t rotary_dim;   // even
  bool is_interleaved;  // a pair is numbers 2 * i and 2 * i + 1, not i and i + rotary_dim / 2

  XLA_GPU_HOST_DEVICE bool HasRow(int64_t position) const {
    return position >= 0 && position < max_positions;
  }
};

struct NormWeight {
  const void* data;    // [head_size], or [heads, head_size]; null: no norm
  DType dtype;         // float32, or that of key
  bool is_over_heads;  // [heads, head_size]: all heads of a token are normalized together
};

struct Norms {
  NormWeight query;
  NormWeight key;
  bool has_values;  // values are normalized, each head alone and without weights
  float eps;        // added to the mean of squares
  bool adds_one;    // to weights
  bool are_after_rotation;
  bool rounds_first;  // to key's dtype before the multiplication with weights, and again after it

  XLA_GPU_HOST_DEVICE bool AreUsed() const {
    return query.data != nullptr || key.data != nullptr || has_values;
  }
};

struct Hadamard {
  bool has_keys;  // keys are transformed, and so are queries
  bool has_values;
  const float* signs;  // [head_size]: 1 or -1; null: all of them are 1

  XLA_GPU_HOST_DEVICE bool IsUsed() const { return has_keys || has_values; }
};

// The numbers of a head that can be transformed: of those that attention can read.
inline constexpr int64_t kMaxHadamardHeadSize = 576;

// What a number is divided by before it is rounded. A row of zeros has scale 0: with infinity,
// zeros and all other finite numbers become 0. 0 / 0 would be NaN in a float8 cache.
XLA_GPU_HOST_DEVICE inline float DivisorOf(float scale) {
  return scale == 0.0f ? BitCast<float>(0x7f800000u) : scale;
}

struct Params {
  KvCache cache;         // of num_blocks blocks of block_size positions
  const void* key;       // [num_tokens, num_kv_heads, head_size]
  const void* value;     // [num_tokens, num_kv_heads, value_head_size]
  int64_t key_stride;    // elements from one token's key to the next
  int64_t value_stride;  // likewise
  TokenNumbers slot_mapping;
  int64_t num_blocks;
  int64_t block_size;
  int64_t num_tokens;
  int64_t num_kv_heads;
  int64_t head_size;
  int64_t value_head_size;  // 0 where V is a part of K
  DType dtype;              // of key and value
  DType cache_dtype;        // of K: the same, or one of 8 or 4 bits, to which keys are rounded
  DType value_cache_dtype;  // of V: that of K, but for int8 beside one of 4 bits
  KvScales k_scale;         // key and value are divided by these (DivisorOf), then rounded
  KvScales v_scale;
  float* k_scale_cache;  // k_scale.data, where the call makes the scales; null: they are given
  float* v_scale_cache;  // the same of v_scale
  GroupScales k_groups;  // in the place of k_scale
  GroupScales v_groups;
  void* k_group_cache;    // k_groups.data, where the call makes the scales; null: they are given
  void* v_group_cache;    // the same of v_groups
  bool rounds_scales_up;  // to powers of two
  void* query;            // [num_tokens, num_heads, head_size], key's dtype; null: none
  int64_t query_stride;   // elements from one token's query to the next
  int64_t num_heads;      // of query; 0: none
  Rotary rotary;
  Norms norms;
  Hadamard hadamard;

  // Whether groups of a row have scales of their own, or codes are fractions.
  bool HasGroupsOrFractions() const {
    return k_groups.data != nullptr || v_groups.data != nullptr ||
           cache_dtype == DType::kFloat4E2M1 || value_cache_dtype == DType::kFloat4E2M1;
  }

  XLA_GPU_HOST_DEVICE int64_t NumSlots() const { return num_blocks * block_size; }

  XLA_GPU_HOST_DEVICE int64_t Slot(int64_t token) const { return slot_mapping.At(token); }
};

}  // namespace xla_gpu::kv_cache_update
