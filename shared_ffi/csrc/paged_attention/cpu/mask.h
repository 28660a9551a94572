// The attention mask: which positions of a KV tile, some neighbouring ones of a sequence, each row
// attends to.
#pragma once

#include "rows.h"

namespace xla_gpu::paged_attention {
namespace {

// Positions of a KV tile, at most. A tile is one step, or this many where K and V are packed.
// Steps, tiles and splits begin at multiples of their size.
constexpr int64_t kMaxTile = 2 * kStep;

// Positions, counted from the first of a tile or of a step.
using Range = Span;

struct KvTile {
  int64_t position;  // its first
  Range range;       // all that any row attends to
  bool is_partial;   // some rows do not attend to all of the range
  Range rows;        // of a kv head: those at hand
};

// The attention mask: causality and windows, a tree mask or bidirectional ranges.
class AttentionMask {
 public:
  AttentionMask(const Rows& rows, Arena* arena)
      : rows_(rows),
        tokens_(rows.p.QueryTokensOf(rows.item.sequence)),
        spans_(arena->Take<Span>(rows.item.num_tokens)) {
    for (int64_t i = 0; i < rows.item.num_tokens; ++i) {
      if (rows.item.is_shared) {
        spans_[i] = {rows.item.begin, rows.item.end};
        continue;
      }
      const int64_t n = rows.item.first_token + i - tokens_.first;
      const Holes holes = rows.p.HolesOf(tokens_, n);
      spans_[i] = rows.p.Attended(tokens_, n);
      holes_ = holes_.Hull(holes.Positions());
      const Span before = holes.Before(spans_[i]);
      common_ = {Larger(common_.begin, before.begin), Smaller(common_.end, before.end)};
    }
  }

  // The position of a row of a kv head.
  int64_t Position(int64_t row) const { return rows_.Position(row); }

  // The tile at `position`, of which [begin, end) is attended to.
  KvTile TileAt(int64_t position, int64_t begin, int64_t end) const {
    const bool is_partial = common_.end < end || common_.begin > begin;
    return {position, {begin - position, end - position}, is_partial, {0, rows_.per_head}};
  }

  // From the first to the last position that any of num_rows rows of a kv head attends to.
  Range RangeOf(const KvTile& tile, int64_t first, int64_t num_rows) const {
    if (!tile.is_partial) return tile.range;
    const int64_t last = (first + num_rows - 1) / rows_.group;
    Span any = spans_[first / rows_.group];
    for (int64_t i = first / rows_.group + 1; i <= last; ++i) {
      any = {Smaller(any.begin, spans_[i].begin), Larger(any.end, spans_[i].end)};
    }
    return {Larger(any.begin - tile.position, tile.range.begin),
            Smaller(any.end - tile.position, tile.range.end)};
  }

  // Whether a row may leave out positions of its range.
  bool HasHoles(const KvTile& tile) const {
    return tile.position + tile.range.end > holes_.begin &&
           tile.position + tile.range.begin < holes_.end;
  }
  // What a row of a kv head leaves out.
  Holes HolesOf(int64_t row) const {
    return rows_.p.HolesOf(tokens_, rows_.Token(row) - tokens_.first);
  }

 private:
  const Rows& rows_;
  const QueryTokens tokens_;      // of the sequence
  Span* const spans_;             // [query tokens of the item]
  Span common_ = {0, INT64_MAX};  // that all rows attend to
  Span holes_ = {0, 0};           // from the first to the last of any row
};

}  // namespace
}  // namespace xla_gpu::paged_attention
