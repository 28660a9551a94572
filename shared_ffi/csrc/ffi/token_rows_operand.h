// How handlers read the rows of tokens: queries, or new keys and values.
#pragma once

#include <string>

#include "handler.h"

namespace xla_gpu {

// An operand of rows is [num_tokens, num_heads, head_size]. Where the rows are part of wider rows,
// such as those of a fused QKV projection, it is [num_tokens, stride] and begins with the first
// row; the attributes, which shared_ffi/token_rows.py writes, say how many of its columns they are.
struct TokenRowsLayout {
  int64_t num_heads;  // 0: the call has no such operand
  int64_t head_size;

  static TokenRowsLayout Read(AttributeReader* reader) {
    return {reader->Get<int64_t>("row_heads", 0), reader->Get<int64_t>("row_head_size", 0)};
  }

  bool IsRows(const ffi::AnyBuffer& buffer) const {
    return num_heads != 0 && HasShape(buffer, {kAnySize, kAnySize});
  }
};

// The sizes of an operand of rows, and the elements from one token to the next.
struct TokenRows {
  int64_t num_tokens;
  int64_t num_heads;
  int64_t head_size;
  int64_t stride;
};

// `shape` describes the operand in a message.
inline ffi::Error ReadTokenRows(const char* op, const char* name, const ffi::AnyBuffer& buffer,
                                const TokenRowsLayout& layout, const std::string& shape,
                                TokenRows* rows) {
  const auto dims = buffer.dimensions();
  if (layout.IsRows(buffer)) {
    const auto& [num_heads, head_size] = layout;
    if (num_heads < 1 || head_size < 1 || num_heads > dims[1] / head_size) {
      return InvalidArgument(op, name, " must have rows of num_heads=", num_heads,
                             " * head_size=", head_size, " elements; got ", ShapeName(buffer));
    }
    *rows = {dims[0], num_heads, head_size, dims[1]};
    return ffi::Error::Success();
  }
  if (!HasShape(buffer, {kAnySize, kAnySize, kAnySize})) return ShapeError(op, name, shape, buffer);
  *rows = {dims[0], dims[1], dims[2], dims[1] * dims[2]};
  return ffi::Error::Success();
}

}  // namespace xla_gpu
