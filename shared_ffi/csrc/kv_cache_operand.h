// How handlers read a paged cache, whose layout attributes tell; shared_ffi/kv_layout.py writes
// them.
#pragma once

#include <optional>
#include <string>

#include "handler.h"
#include "kv_cache.h"

namespace xla_gpu {

// Sizes and strides of a cache that has not the default layout, [num_blocks, block_size,
// 2 * num_kv_heads, head_size] with the K of kv head h at index 2h and its V at 2h + 1. There they
// are absent, and follow from the shape.
struct KvLayout {
  int64_t num_blocks;
  int64_t block_size;
  int64_t num_kv_heads;
  int64_t block_stride;
  int64_t position_stride;
  int64_t head_stride;
  int64_t value_offset;  // from K to V, where they lie in one array

  static KvLayout Read(AttributeReader* reader) {
    constexpr int64_t kAbsent = 0;
    KvLayout layout;
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

  // Whether an array of so many elements has a row for everything; `offset` is that of its first.
  bool Fits(int64_t num_elements, int64_t head_size, int64_t offset) const {
    if (num_blocks < 0 || block_size < 1 || num_kv_heads < 1 || block_stride < 0 ||
        position_stride < 0 || head_stride < 0 || offset < 0) {
      return false;
    }
    using Wide = __int128;  // the numbers may be any
    const Wide last = Wide{num_blocks - 1} * block_stride + Wide{block_size - 1} * position_stride +
                      Wide{num_kv_heads - 1} * head_stride + offset;
    return num_blocks == 0 || last + head_size <= num_elements;
  }
};

// Finishes a default layout by the operand's shape, and finds K and V. `num_kv_heads`: what it must
// be, or kAnySize. `value_cache`: none where V lies in kv_cache.
inline ffi::Error ReadKvCache(const char* op, const ffi::AnyBuffer& kv_cache,
                              const std::optional<ffi::AnyBuffer>& value_cache,
                              int64_t num_kv_heads, int64_t head_size, KvLayout* layout,
                              KvCache* cache) {
  if (layout->IsDefault()) {
    const auto shape = kv_cache.dimensions();
    const int64_t rows = num_kv_heads == kAnySize ? kAnySize : 2 * num_kv_heads;
    if (!HasShape(kv_cache, {kAnySize, kAnySize, rows, head_size}) || shape[1] < 1 ||
        shape[2] < 2 || shape[2] % 2 != 0) {
      const std::string wanted = rows == kAnySize ? "" : StrCat("=", rows);
      return InvalidArgument(op, "kv_cache must have shape [num_blocks, block_size, ",
                             "2 * num_kv_heads", wanted, ", head_size=", head_size, "]; got ",
                             ShapeName(shape));
    }
    const int64_t position_stride = shape[2] * head_size;
    *layout = {shape[0],        shape[1],      shape[2] / 2, shape[1] * position_stride,
               position_stride, 2 * head_size, head_size};
  }
  const auto has_rows = [&](const ffi::AnyBuffer& array, int64_t offset) {
    return layout->Fits(static_cast<int64_t>(array.element_count()), head_size, offset);
  };
  const bool fits = value_cache.has_value() ? has_rows(kv_cache, 0) && has_rows(*value_cache, 0)
                                            : has_rows(kv_cache, layout->value_offset);
  if (!fits || (num_kv_heads != kAnySize && layout->num_kv_heads != num_kv_heads)) {
    return InvalidArgument(op, "kv_cache must hold num_blocks=", layout->num_blocks,
                           " blocks of block_size=", layout->block_size,
                           " positions with num_kv_heads=", layout->num_kv_heads, " heads; got ",
                           ShapeName(kv_cache.dimensions()));
  }
  char* keys = static_cast<char*>(kv_cache.untyped_data());
  const int64_t value_bytes = layout->value_offset * ffi::ByteWidth(kv_cache.element_type());
  void* values = value_cache.has_value() ? value_cache->untyped_data() : keys + value_bytes;
  *cache = {keys, values, layout->block_stride, layout->position_stride, layout->head_stride};
  return ffi::Error::Success();
}

// The dtype of a cache: that of the operand `name`, or one of 8 bits.
inline ffi::Error ReadCacheDType(const char* op, const ffi::AnyBuffer& kv_cache,
                                 const std::optional<ffi::AnyBuffer>& value_cache, const char* name,
                                 ffi::DataType operand, DType operand_dtype, DType* dtype) {
  *dtype = operand_dtype;
  if (kv_cache.element_type() != operand && !StorageTypeOf8Bits(kv_cache.element_type(), dtype)) {
    return InvalidArgument(op, "kv_cache must have ", name, "'s dtype ", DTypeName(operand),
                           ", or float8_e4m3fn, float8_e5m2 or int8; got ",
                           DTypeName(kv_cache.element_type()));
  }
  if (value_cache.has_value() && value_cache->element_type() != kv_cache.element_type()) {
    return InvalidArgument(op, "value_cache must have kv_cache's dtype ",
                           DTypeName(kv_cache.element_type()), "; got ",
                           DTypeName(value_cache->element_type()));
  }
  return ffi::Error::Success();
}

// The scales of a cache that has fewer bits than the operand `than`; none if the call has none.
inline ffi::Error FindScales(const char* op, const char* name, const FeatureOperands& operands,
                             const KvLayout& layout, bool has_fewer_bits, const char* than,
                             KvScales* scales) {
  *scales = {};
  std::optional<ffi::AnyBuffer> buffer;
  ffi::Error error = operands.Find(name, &buffer);
  if (error.failure() || !buffer.has_value()) return error;
  if (!has_fewer_bits) {
    return InvalidArgument(op, name, " must be None unless kv_cache has fewer bits than ", than,
                           "; got shape ", ShapeName(buffer->dimensions()));
  }
  const int64_t heads = layout.num_kv_heads;
  if (HasShape(*buffer, {}) || HasShape(*buffer, {1})) {
    // One for all.
  } else if (HasShape(*buffer, {heads})) {
    scales->head_stride = 1;
  } else if (HasShape(*buffer, {layout.num_blocks, layout.block_size, heads})) {
    scales->block_stride = layout.block_size * heads;
    scales->position_stride = heads;
    scales->head_stride = 1;
  } else {
    return InvalidArgument(op, name, " must have shape [], [1], [num_kv_heads=", heads,
                           "] or [num_blocks=", layout.num_blocks,
                           ", block_size=", layout.block_size, ", num_kv_heads]; got ",
                           ShapeName(buffer->dimensions()));
  }
  if (buffer->element_type() != ffi::F32) {
    return InvalidArgument(op, name, " must have dtype float32; got ",
                           DTypeName(buffer->element_type()));
  }
  scales->data = buffer->typed_data<float>();
  return ffi::Error::Success();
}

}  // namespace xla_gpu
