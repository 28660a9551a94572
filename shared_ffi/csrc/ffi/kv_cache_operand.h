// How handlers read a paged cache. Attributes, which shared_ffi/kv_layout.py writes, say how it is
// laid out.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "handler.h"
#include "kv_cache.h"

namespace xla_gpu {

// Sizes and strides of a cache, in elements. The attributes are absent for the default layout,
// where they follow from the shape: [num_blocks, block_size, 2 * num_kv_heads, head_size], with the
// K of kv head h at index 2h and its V at 2h + 1.
struct KvLayout {
  int64_t num_blocks;
  int64_t block_size;
  int64_t num_kv_heads;
  int64_t block_stride;
  int64_t position_stride;
  int64_t head_stride;
  int64_t value_offset;  // from K to V, if they lie in one array

  static KvLayout Read(AttributeReader* reader) {
    constexpr int64_t kAbsent = 0;
    KvLayout layout = {};
    layout.block_size = reader->Get<int64_t>("block_size", kAbsent);
    if (layout.IsDefault()) return layout;
    layout.num_blocks = reader->Get<int64_t>("num_blocks");
    layout.num_kv_heads = reader->Get<int64_t>("num_kv_heads");
    layout.block_stride = reader->Get<int64_t>("block_stride");
    layout.position_stride = reader->Get<int64_t>("position_stride");
    layout.head_stride = reader->Get<int64_t>("head_stride");
    layout.value_offset = reader->Get<int64_t>("value_offset");
    return layout;
  }

  bool IsDefault() const { return block_size == 0; }

  // Whether an array of `num_elements` has room for all rows, the first of which is at `offset`.
  bool Fits(int64_t num_elements, int64_t head_size, int64_t offset) const {
    if (num_blocks < 0 || block_size < 1 || num_kv_heads < 1 || block_stride < 0 ||
        position_stride < 0 || head_stride < 0 || offset < 0) {
      return false;
    }
    using Wide = __int128;  // the attributes may be any numbers: products must not overflow
    // Slots and scales are numbered by the sizes, which may be large where a stride is 0.
    const Wide num_slots = Wide{num_blocks == 0 ? 1 : num_blocks} * block_size;
    if (num_slots > INT64_MAX || num_slots * num_kv_heads > INT64_MAX) return false;
    if (num_blocks == 0) return true;
    Wide last = offset;
    for (const auto& [size, stride] : {std::pair(num_blocks, block_stride),
                                       {block_size, position_stride},
                                       {num_kv_heads, head_stride}}) {
      last += Wide{size - 1} * stride;
      if (last > num_elements) return false;
    }
    return last + head_size <= num_elements;
  }
};

// The arrays of a paged cache.
struct KvCacheArrays {
  ffi::AnyBuffer kv_cache;
  std::optional<ffi::AnyBuffer> value_cache;  // empty if V lies in kv_cache
};

inline ffi::Error ReadDefaultLayout(const char* op, const ffi::AnyBuffer& kv_cache,
                                    int64_t num_kv_heads, int64_t head_size, KvLayout* layout) {
  const auto shape = kv_cache.dimensions();
  const int64_t rows = num_kv_heads == kAnySize ? kAnySize : 2 * num_kv_heads;
  if (!HasShape(kv_cache, {kAnySize, kAnySize, rows, head_size}) || shape[1] < 1 || shape[2] < 2 ||
      shape[2] % 2 != 0) {
    const std::string size = rows == kAnySize ? "" : StrCat("=", rows);
    return ShapeError(
        op, "kv_cache",
        StrCat("[num_blocks, block_size, 2 * num_kv_heads", size, ", head_size=", head_size, "]"),
        kv_cache);
  }
  layout->num_blocks = shape[0];
  layout->block_size = shape[1];
  layout->num_kv_heads = shape[2] / 2;
  layout->block_stride = shape[1] * shape[2] * head_size;
  layout->position_stride = shape[2] * head_size;
  layout->head_stride = 2 * head_size;
  layout->value_offset = head_size;
  return ffi::Error::Success();
}

// Checks a call whose V is a part of K: it has nothing for V alone.
inline ffi::Error CheckLatent(const char* op, const KvLayout& layout,
                              const FeatureOperands& operands) {
  for (const char* name : {"value_cache", "v_scale"}) {
    std::optional<ffi::AnyBuffer> of_values;
    XLA_GPU_RETURN_IF_ERROR(operands.Find(name, &of_values));
    if (of_values.has_value()) {
      return InvalidArgument(op, name, " must be None where V is a part of K; got shape ",
                             ShapeName(*of_values));
    }
  }
  if (layout.IsDefault() || layout.value_offset != 0) {
    return InvalidArgument(op, "kv_layout must be of K alone where V is a part of K; got one of K ",
                           "and V");
  }
  return ffi::Error::Success();
}

// Reads a cache into an op's Params: its place, sizes and dtype. They have head_size and dtype
// already, from the operand `name`. `num_kv_heads`: what the cache must have, or kAnySize.
template <typename Params>
ffi::Error ReadKvCache(const char* op, const KvCacheArrays& arrays, KvLayout layout,
                       int64_t num_kv_heads, const char* name, const ffi::AnyBuffer& operand,
                       Params* p) {
  const auto& [kv_cache, value_cache] = arrays;
  if (layout.IsDefault()) {
    XLA_GPU_RETURN_IF_ERROR(ReadDefaultLayout(op, kv_cache, num_kv_heads, p->head_size, &layout));
  }
  const auto has_rows = [&](const ffi::AnyBuffer& array, int64_t offset) {
    return layout.Fits(static_cast<int64_t>(array.element_count()), p->head_size, offset);
  };
  const bool fits = value_cache.has_value() ? has_rows(kv_cache, 0) && has_rows(*value_cache, 0)
                                            : has_rows(kv_cache, layout.value_offset);
  if (!fits || (num_kv_heads != kAnySize && layout.num_kv_heads != num_kv_heads)) {
    return InvalidArgument(op, "kv_cache must hold num_blocks=", layout.num_blocks,
                           " blocks of block_size=", layout.block_size,
                           " positions with num_kv_heads=", layout.num_kv_heads, " heads; got ",
                           ShapeName(kv_cache));
  }
  p->cache_dtype = p->dtype;
  if (kv_cache.element_type() != operand.element_type() &&
      !StorageTypeOf8Bits(kv_cache.element_type(), &p->cache_dtype)) {
    return DTypeError(
        op, "kv_cache",
        StrCat(name, "'s dtype ", DTypeName(operand), ", or float8_e4m3fn, float8_e5m2 or int8"),
        kv_cache);
  }
  if (value_cache.has_value() && value_cache->element_type() != kv_cache.element_type()) {
    return DTypeError(op, "value_cache", StrCat("kv_cache's dtype ", DTypeName(kv_cache)),
                      *value_cache);
  }
  char* keys = static_cast<char*>(kv_cache.untyped_data());
  // Strides that nothing is multiplied with may be any numbers, and an empty cache fits any layout.
  const bool is_empty = layout.num_blocks == 0;
  const auto used = [&](int64_t size, int64_t stride) {
    return is_empty || size == 1 ? 0 : stride;
  };
  const int64_t value_offset = is_empty ? 0 : layout.value_offset;
  const int64_t value_bytes = value_offset * ffi::ByteWidth(kv_cache.element_type());
  p->cache.keys = keys;
  p->cache.values = value_cache.has_value() ? value_cache->untyped_data() : keys + value_bytes;
  p->cache.block_stride = used(layout.num_blocks, layout.block_stride);
  p->cache.position_stride = used(layout.block_size, layout.position_stride);
  p->cache.head_stride = used(layout.num_kv_heads, layout.head_stride);
  p->num_blocks = layout.num_blocks;
  p->block_size = layout.block_size;
  p->num_kv_heads = layout.num_kv_heads;
  return ffi::Error::Success();
}

// Reads k_scale or v_scale, which a call may have if its cache, read before, has fewer bits than
// the operand `than`.
template <typename Params>
ffi::Error ReadScales(const char* op, const char* name, const FeatureOperands& operands,
                      const char* than, const Params& p, KvScales* scales) {
  std::optional<ffi::AnyBuffer> buffer;
  XLA_GPU_RETURN_IF_ERROR(operands.Find(name, &buffer));
  if (!buffer.has_value()) return ffi::Error::Success();
  if (p.cache_dtype == p.dtype) {
    return InvalidArgument(op, name, " must be None unless kv_cache has fewer bits than ", than,
                           "; got shape ", ShapeName(*buffer));
  }
  if (HasShape(*buffer, {}) || HasShape(*buffer, {1})) {
    // One scale for all: every stride is 0.
  } else if (HasShape(*buffer, {p.num_kv_heads})) {
    scales->head_stride = 1;
  } else if (HasShape(*buffer, {p.num_blocks, p.block_size, p.num_kv_heads})) {
    scales->block_stride = p.block_size * p.num_kv_heads;
    scales->position_stride = p.num_kv_heads;
    scales->head_stride = 1;
  } else {
    return ShapeError(op, name,
                      StrCat("[], [1], [num_kv_heads=", p.num_kv_heads, "] or [num_blocks=",
                             p.num_blocks, ", block_size=", p.block_size, ", num_kv_heads]"),
                      *buffer);
  }
  if (buffer->element_type() != ffi::F32) return DTypeError(op, name, "dtype float32", *buffer);
  scales->data = buffer->typed_data<float>();
  return ffi::Error::Success();
}

}  // namespace xla_gpu
