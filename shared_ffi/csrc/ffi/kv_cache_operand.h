// How handlers read a paged cache. Attributes, which shared_ffi/kv_cache.py writes, say how it is
// laid out.
#pragma once

#include <string>
#include <utility>

#include "kv_cache.h"
#include "token_rows_operand.h"

namespace xla_gpu {

// Sizes and strides of a cache, in elements of K. The attributes are absent for the default layout,
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
  // For key_unit elements of a stride, V's stride has value_unit elements. Equal, and absent from
  // the attributes, unless V is an array of its own with a head size of its own.
  int64_t key_unit = 1;
  int64_t value_unit = 1;

  bool HasUnits() const {
    const auto is_unit = [](int64_t unit) { return 1 <= unit && unit <= INT32_MAX; };
    return is_unit(key_unit) && is_unit(value_unit) && block_stride % key_unit == 0 &&
           position_stride % key_unit == 0 && head_stride % key_unit == 0;
  }

  // Whether an array of `num_elements` has room for all rows of K or of V, the first of which is at
  // `offset`. `unit`: key_unit or value_unit.
  bool Fits(int64_t num_elements, int64_t unit, int64_t row_size, int64_t offset) const {
    if (num_blocks == 0) return true;
    using Wide = __int128;  // the attributes may be any numbers: products must not overflow
    Wide last = offset;
    for (const auto& [size, stride] : {std::pair(num_blocks, block_stride),
                                       {block_size, position_stride},
                                       {num_kv_heads, head_stride}}) {
      const Wide distance = Wide{stride / key_unit} * unit;
      if (size > 1 && distance > num_elements) return false;
      last += Wide{size - 1} * distance;
      if (last > num_elements) return false;
    }
    return last + row_size <= num_elements;
  }
};

// Reads a cache into an op's Params, which have value_head_size already: its place, sizes and
// dtypes. `rows`: query or key. Its dtype is the cache's unless that is quantized; its heads are a
// multiple of the kv heads.
template <typename Params>
void ReadKvCache(CallReader* call, std::string_view rows_operand, const TokenRows& rows,
                 Params* p) {
  const ffi::AnyBuffer kv_cache = *call->Find("kv_cache");
  const auto value_cache = call->Find("value_cache");
  const bool is_default = !call->Has("block_size");
  const DTypes dtypes = {call->Find(rows_operand)->element_type(), ffi::F8E4M3FN, ffi::F8E5M2,
                         ffi::S8, ffi::U8};
  // Rows that are packed already are copied: their columns are elements of the cache.
  const bool is_packed = rows.dtype == DType::kInt4;
  const bool are_fractions = call->Integer("e2m1", 0) != 0 && !is_packed;
  const auto storage_of = [&](std::string_view name) {
    const DType dtype = StorageOf(call, name);
    return are_fractions && dtype == DType::kInt4 ? DType::kFloat4E2M1 : dtype;
  };
  const DType key_dtype = storage_of("kv_cache");
  const DType value_dtype = value_cache.has_value() ? storage_of("value_cache") : key_dtype;
  if (call->error().failure()) return;
  const int64_t key_columns = is_packed ? rows.head_size : ElementsOf(key_dtype, rows.head_size);
  const int64_t value_columns =
      is_packed ? p->value_head_size : ElementsOf(value_dtype, p->value_head_size);
  if (is_default) {
    call->Operand("kv_cache", dtypes, {{kAnySize, kAnySize, kAnySize, key_columns}});
  } else {
    call->Operand("kv_cache", dtypes, {});
  }
  const bool may_mix = key_dtype == DType::kInt8 || Is4Bit(key_dtype);
  if (may_mix && !IsQuantized(rows.dtype)) {
    call->Operand("value_cache", {ffi::S8, ffi::U8}, {});
  } else {
    call->Operand("value_cache", {kv_cache.element_type()}, {});
  }
  if (call->error().failure()) return;
  const auto is_odd = [&](DType dtype, int64_t size) {
    return Is4Bit(dtype) && !is_packed && size % 2 != 0;
  };
  if (is_odd(key_dtype, rows.head_size)) call->Refuse("kv_cache", "have an even head_size");
  if (value_cache.has_value() && is_odd(value_dtype, p->value_head_size)) {
    call->Refuse("value_cache", "have an even head_size");
  }
  KvLayout layout = {};
  if (is_default) {
    const auto shape = kv_cache.dimensions();
    layout.num_blocks = shape[0];
    layout.block_size = shape[1];
    layout.num_kv_heads = shape[2] / 2;
  } else {
    layout = {call->Integer("num_blocks"),      call->Integer("block_size"),
              call->Integer("num_kv_heads"),    call->Integer("block_stride"),
              call->Integer("position_stride"), call->Integer("head_stride"),
              call->Integer("value_offset")};
  }
  const bool is_separate = value_cache.has_value();
  if (is_separate) {
    layout.key_unit = call->Integer("key_unit", 1);
    layout.value_unit = call->Integer("value_unit", 1);
  }
  // Slots and scales are numbered by the sizes, which may be large where a stride is 0.
  bool fits = layout.block_size >= 1 && layout.num_kv_heads >= 1 &&
              rows.num_heads % layout.num_kv_heads == 0 && layout.HasUnits() &&
              std::max<int64_t>(layout.num_blocks, 1) <=
                  INT64_MAX / layout.block_size / layout.num_kv_heads;
  const bool is_empty = layout.num_blocks == 0;  // it fits any layout
  if (fits && is_default && !is_empty) {
    layout.value_offset = key_columns;
    layout.head_stride = 2 * key_columns;
    layout.position_stride = kv_cache.dimensions()[2] * key_columns;
    layout.block_stride = layout.block_size * layout.position_stride;
  }
  if (is_separate) layout.value_offset = 0;
  const auto fits_in = [&](const ffi::AnyBuffer& array, int64_t unit, int64_t row_size) {
    return layout.Fits(static_cast<int64_t>(array.element_count()), unit, row_size,
                       layout.value_offset);
  };
  fits = fits && fits_in(kv_cache, layout.key_unit, key_columns) &&
         (!is_separate || fits_in(*value_cache, layout.value_unit, value_columns));
  if (!fits) {
    return call->Refuse("kv_cache", "hold num_blocks=", layout.num_blocks,
                        " blocks of block_size=", layout.block_size,
                        " positions with num_kv_heads=", layout.num_kv_heads,
                        " heads, of which num_heads=", rows.num_heads, " is a multiple");
  }
  // Strides that nothing is multiplied with may be any numbers.
  const auto used = [&](int64_t size, int64_t stride) {
    return is_empty || size == 1 ? 0 : stride;
  };
  p->cache_dtype = key_dtype;
  p->value_cache_dtype = value_dtype;
  const int64_t value_bytes = is_empty ? 0 : layout.value_offset * SizeOf(key_dtype);
  p->cache.keys = kv_cache.untyped_data();
  p->cache.values = static_cast<char*>(value_cache.value_or(kv_cache).untyped_data()) + value_bytes;
  p->cache.block_stride = used(layout.num_blocks, layout.block_stride);
  p->cache.position_stride = used(layout.block_size, layout.position_stride);
  p->cache.head_stride = used(layout.num_kv_heads, layout.head_stride);
  p->cache.SetUnits(layout.key_unit, layout.value_unit);
  p->num_blocks = layout.num_blocks;
  p->block_size = layout.block_size;
  p->num_kv_heads = layout.num_kv_heads;
}

// k_scale or v_scale of a cache: one of the two, or neither.
struct CacheScales {
  KvScales rows;
  GroupScales groups;
};

// Reads k_scale or v_scale of a cache that has been read. Kernels use it if the cache is quantized.
// With four dimensions, the last counts groups of a row. A strided array is one-dimensional memory
// here; attributes NAME_block_stride, NAME_position_stride and NAME_head_stride come with it, and
// NAME_groups and NAME_group_stride if it has groups.
//   global: the name of the scale of all positions; dtype, row_size: of K, or of V
template <typename Params>
CacheScales ReadScales(CallReader* call, std::string_view name, std::string_view global,
                       DType dtype, int64_t row_size, const Params& p) {
  const auto array = call->Find(name);
  const float* const global_scale = call->template Operand<float>(global, {ffi::F32}, {{}, {1}});
  if (!array.has_value()) {
    if (global_scale != nullptr) call->Fail(global, " must come with ", name);
    return {};
  }
  const auto dims = array->dimensions();
  const auto attribute = [&](const char* of) { return call->Integer(std::string(name) + of); };
  const bool is_strided = dims.size() == 1 && call->Has(std::string(name) + "_block_stride");
  KvScales rows = {};
  int64_t num_groups = 0, group_stride = 1;
  if (is_strided) {
    rows = {nullptr, attribute("_block_stride"), attribute("_position_stride"),
            attribute("_head_stride")};
    if (call->Has(std::string(name) + "_groups")) {
      num_groups = attribute("_groups");
      group_stride = attribute("_group_stride");
    }
  } else if (dims.size() >= 3) {
    num_groups = dims.size() == 4 ? dims[3] : 0;
    rows.head_stride = std::max<int64_t>(num_groups, 1);
    rows.position_stride = p.num_kv_heads * rows.head_stride;
    rows.block_stride = p.block_size * rows.position_stride;
  } else if (dims.size() == 1 && array->element_count() > 1) {
    rows.head_stride = 1;  // elsewhere one scale is for all: every stride is 0
  }
  const bool has_groups = num_groups > 0 || dims.size() == 4;
  const DTypes dtypes = {ffi::F32, ffi::F16, ffi::BF16, ffi::F8E4M3FN, ffi::F8E8M0FNU};
  if (is_strided && has_groups) {
    call->Operand(name, dtypes, {{kAnySize}});
  } else if (is_strided) {
    call->Operand(name, {ffi::F32}, {{kAnySize}});
  } else if (has_groups) {
    call->Operand(name, dtypes, {{p.num_blocks, p.block_size, p.num_kv_heads, kAnySize}});
  } else {
    call->Operand(name, {ffi::F32},
                  {{}, {1}, {p.num_kv_heads}, {p.num_blocks, p.block_size, p.num_kv_heads}});
  }
  if (global_scale != nullptr && !has_groups) call->Refuse(name, "have groups with ", global);
  // A byte of 4-bit numbers belongs to one group.
  const int64_t unit = Is4Bit(dtype) ? 2 : 1;
  if (has_groups && (num_groups < 1 || row_size % (num_groups * unit) != 0)) {
    call->Refuse(name, "have groups of one size, which is a multiple of ", unit, ", in a row of ",
                 row_size, " numbers; there are ", num_groups);
  }
  if (call->error().failure()) return {};
  if (is_strided) {
    const KvLayout layout = {p.num_blocks,      p.block_size,         p.num_kv_heads,
                             rows.block_stride, rows.position_stride, rows.head_stride,
                             /*value_offset=*/0};
    const auto num_elements = static_cast<int64_t>(array->element_count());
    const int64_t last_group = std::max<int64_t>(num_groups - 1, 0);
    const bool are_near = last_group == 0 || group_stride <= num_elements / last_group;
    if (!are_near || !layout.Fits(num_elements, 1, last_group * group_stride + 1, 0)) {
      call->Refuse(name, "have room for num_blocks=", p.num_blocks, ", block_size=", p.block_size,
                   " and num_kv_heads=", p.num_kv_heads, " with its strides");
      return {};
    }
  }
  const bool is_float32 = array->element_type() == ffi::F32;
  if (!has_groups || (num_groups == 1 && is_float32 && global_scale == nullptr)) {
    rows.data = static_cast<const float*>(array->untyped_data());
    return {rows, {}};
  }
  const DType scale_dtype =
      array->element_type() == ffi::F8E8M0FNU ? DType::kFloat8E8M0 : StorageOf(call, name);
  return {{},
          {array->untyped_data(), scale_dtype, num_groups, row_size / num_groups, rows.block_stride,
           rows.position_stride, rows.head_stride, group_stride, global_scale}};
}

}  // namespace xla_gpu
