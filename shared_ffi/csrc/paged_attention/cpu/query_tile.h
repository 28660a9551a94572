// The query tiles of a work item, and K and V of a KV tile packed for them.
#pragma once

#include <optional>

#include "partial_results.h"

namespace xla_gpu::paged_attention {
namespace {

// Query rows that attend to KV tiles together.
template <typename T>
struct QueryTile {
  QueryTile(const Params& p, const WorkItem& item, Arena* arena)
      : item(item),
        rows(p, this->item),
        queries(rows, arena),
        mask(rows, arena),
        softmax(rows, mask, arena),
        sums(rows, arena) {}
  QueryTile(const QueryTile&) = delete;  // its parts point to each other

  const WorkItem item;
  const Rows rows;
  Queries<T> queries;
  AttentionMask mask;
  Softmax<T> softmax;
  SplitSums<T> sums;
};

// A work item's query tiles: one, or with one kv head as many as share its packed K and V.
template <typename T>
class QueryTiles {
 public:
  QueryTiles(const Rows& rows, Arena* arena) : rows_(rows) {
    const Params& p = rows.p;
    const int64_t tokens = TokensPerQueryTile(p);
    if (rows.item.num_kv_heads > 1 || rows.item.num_tokens <= tokens) {
      tiles_[count_++].emplace(p, rows.item, arena);
      return;
    }
    const int64_t start = p.query_start_loc[rows.item.sequence];
    const int64_t first_position = rows.item.position - (rows.item.first_token - start);
    const int64_t context_len = p.context_lens[rows.item.sequence];
    for (int64_t i = 0; i < rows.item.num_tokens; i += tokens) {
      WorkItem tile = rows.item;
      tile.first_token += i;
      tile.position += i;
      tile.num_tokens = Smaller(tokens, rows.item.num_tokens - i);
      const int64_t first = tile.first_token - start, last = first + tile.num_tokens - 1;
      const Span span = p.AttendedByAny(start, first, last, first_position, context_len);
      tile.begin = Larger(tile.begin, span.begin);
      tile.end = Smaller(tile.end, span.end);
      tiles_[count_++].emplace(p, tile, arena);
    }
  }

  int64_t count() const { return count_; }
  QueryTile<T>& operator[](int64_t q) { return *tiles_[q]; }

  // The number of a tile's first row in the item.
  int64_t FirstRow(int64_t q) const {
    return (tiles_[q]->item.first_token - rows_.item.first_token) * rows_.group;
  }

 private:
  const Rows& rows_;
  std::optional<QueryTile<T>> tiles_[kMaxQueryTiles];
  int64_t count_ = 0;
};

// K and V of a KV tile, packed.
template <typename T>
class PackedTile {
 public:
  PackedTile(const Params& p, int64_t key_width, int64_t value_width, Arena* arena)
      : keys_(p.head_size, key_width, arena), values_(p.value_head_size, value_width, arena) {}

  void Pack(const CachedRows<T>& k, const CachedRows<T>& v, Range range) {
    keys_.Pack(k, range);
    values_.Pack(v, range);
    range_ = range;
    is_finite_.reset();
  }

  const PackedKeys<T>& keys() const { return keys_; }
  const PackedValues<T>& values() const { return values_; }

  // Whether V holds neither NaN nor infinity.
  bool HasFiniteValues() {
    if (!is_finite_.has_value()) is_finite_ = values_.IsFinite(range_);
    return *is_finite_;
  }

 private:
  PackedKeys<T> keys_;
  PackedValues<T> values_;
  Range range_ = {};
  std::optional<bool> is_finite_;
};

}  // namespace
}  // namespace xla_gpu::paged_attention
