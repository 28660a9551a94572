// K or V of 4 bits, expanded to 8 bits: the products read int8 and know no other integers. A cache
// of int4 so gives the bits that one of int8 with the same numbers gives.
#pragma once

#include "float_rows.h"

namespace xla_gpu::paged_attention {
namespace {

// Memory for K, or V, of a KV tile and a kv head.
class Int4Rows {
 public:
  // `row_size`: numbers of a row. Nothing is expanded unless dtype is int4 and rows stay integers.
  Int4Rows(const Params& p, DType dtype, int64_t row_size, Arena* arena)
      : num_pairs_(dtype == DType::kInt4 && !p.NeedsFloat32Rows() ? ElementsOf(dtype, row_size)
                                                                  : 0) {
    if (!AreUsed()) return;
    const int64_t stride = RoundUp(2 * num_pairs_, kCacheLineBytes);
    char* const rows = arena->Take<char>(kMaxTile * stride);
    rows_ = arena->Take<char*>(kMaxTile);
    for (int64_t j = 0; j < kMaxTile; ++j) rows_[j] = rows + j * stride;
  }

  bool AreUsed() const { return num_pairs_ > 0; }

  // Expands the first `count` rows, in the place of those before.
  RowPlaces Expand(const RowPlaces& from, int64_t count) const {
    for (int64_t j = 0; j < count; ++j) {
      const auto* __restrict pairs =
          reinterpret_cast<const Int4Pair*>(from.positions[j] + from.offset);
      auto* __restrict to = reinterpret_cast<uint16_t*>(rows_[j]);
      for (int64_t i = 0; i < num_pairs_; ++i) to[i] = xla_gpu::Expand(pairs[i]);
    }
    return {rows_, 0};
  }

 private:
  const int64_t num_pairs_;
  char** rows_ = nullptr;  // [kMaxTile]
};

}  // namespace
}  // namespace xla_gpu::paged_attention
