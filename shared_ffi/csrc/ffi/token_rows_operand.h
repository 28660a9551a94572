// How handlers read the rows of tokens: queries, or new keys and values.
#pragma once

#include "handler.h"

namespace xla_gpu {

// An operand of rows is [num_tokens, num_heads, head_size]. Where the rows are part of wider rows,
// such as those of a fused QKV projection, it is [num_tokens, stride] and begins with the first
// row; the attributes, which shared_ffi/token_rows.py writes, say how many of its columns they are.
struct TokenRowsLayout {
  int64_t num_heads;
  int64_t head_size;

  static TokenRowsLayout Read(CallReader* call) {
    return {call->Integer("row_heads", 0), call->Integer("row_head_size", 0)};
  }
  // The layout of values, which may have a head size of their own.
  TokenRowsLayout OfValues(CallReader* call) const {
    return {num_heads, call->Integer("row_value_head_size", head_size)};
  }
};

struct TokenRows {
  const void* data;
  DType dtype;
  int64_t num_tokens;
  int64_t num_heads;
  int64_t head_size;
  int64_t stride;  // elements from one token to the next
};

// Kernels number the elements of a token with 32 bits.
inline constexpr int64_t kMaxTokenElements = int64_t{1} << 30;

inline TokenRows ReadTokenRows(CallReader* call, std::string_view name,
                               const TokenRowsLayout& layout, DTypes dtypes) {
  const void* data =
      call->Operand(name, dtypes, {{kAnySize, kAnySize, kAnySize}, {kAnySize, kAnySize}});
  if (call->error().failure()) return {};
  const ffi::AnyBuffer array = *call->Find(name);
  const auto shape = array.dimensions();
  const bool is_part = shape.size() == 2;
  TokenRows rows = {};
  rows.data = data;
  rows.dtype = StorageOf(call, name);
  rows.num_tokens = shape[0];
  rows.num_heads = is_part ? layout.num_heads : shape[1];
  rows.head_size = is_part ? layout.head_size : shape[2];
  if (const int64_t in_unit = ElementsInUnit(array.element_type()); in_unit > 1) {
    if (is_part || rows.head_size % in_unit != 0) call->Refuse(name, "be dense pairs of numbers");
    rows.head_size /= in_unit;
  }
  const int64_t columns = is_part ? std::min(shape[1], kMaxTokenElements) : kMaxTokenElements;
  if (rows.num_heads < 1 || rows.num_heads > columns / std::max<int64_t>(rows.head_size, 1)) {
    call->Refuse(name, "hold num_heads=", rows.num_heads, " * head_size=", rows.head_size,
                 " elements a token: at least one head, and at most ", columns, " elements");
    return {};
  }
  rows.stride = is_part ? shape[1] : rows.num_heads * rows.head_size;
  if (rows.num_tokens == 0) rows.stride = 0;  // a product with it must not overflow
  return rows;
}

}  // namespace xla_gpu
