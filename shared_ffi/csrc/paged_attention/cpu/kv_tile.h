// A KV tile: some neighbouring positions of a sequence, which of them each row attends to, and
// where the block table puts their K and V.
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
};

// The attention mask: causal, window_right or a tree mask to the right, sliding_window to the left.
class AttentionMask {
 public:
  AttentionMask(const Rows& rows, Arena* arena)
      : rows_(rows),
        context_len_(rows.p.context_lens[rows.item.sequence]),
        start_(rows.p.query_start_loc[rows.item.sequence]),
        first_position_(rows.item.position - (rows.item.first_token - start_)),
        spans_(arena->Take<Span>(rows.item.num_tokens)) {
    for (int64_t i = 0; i < rows.item.num_tokens; ++i) {
      const int64_t token = rows.item.first_token + i;
      spans_[i] = rows.p.Attended(start_, token - start_, first_position_, context_len_);
      has_tree_ |= rows.p.TreeBits(token) != 0;
      common_ = {Larger(common_.begin, spans_[i].begin), Smaller(common_.end, spans_[i].end)};
    }
    if (has_tree_) common_.end = Smaller(common_.end, first_position_);
  }

  // The position of a row of a kv head.
  int64_t Position(int64_t row) const { return rows_.Position(row); }

  // The tile at `position`, of which [begin, end) is attended to.
  KvTile TileAt(int64_t position, int64_t begin, int64_t end) const {
    const bool is_partial = common_.end < end || common_.begin > begin;
    return {position, {begin - position, end - position}, is_partial};
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

  // Whether a row may not attend to some positions of its range.
  bool HasTreeMask(const KvTile& tile) const {
    return has_tree_ && tile.position + tile.range.end > first_position_;
  }
  // Whether position j of a tile, in the range of a row of a kv head, is not such a hole.
  bool Attends(const KvTile& tile, int64_t row, int64_t j) const {
    const int64_t bit = tile.position + j - first_position_;
    const uint64_t bits = rows_.p.TreeBits(rows_.Token(row));
    return bits == 0 || bit < 0 || (bits >> bit & 1) != 0;
  }

 private:
  const Rows& rows_;
  const int64_t context_len_;
  const int64_t start_;           // the sequence's first token
  const int64_t first_position_;  // of that token
  Span* const spans_;             // [query tokens of the item]
  Span common_ = {0, INT64_MAX};  // that all rows attend to
  bool has_tree_ = false;
};

// Reads the block table: where the K of each position lies, of the current tile and of the next.
template <typename T>
class PageTable {
 public:
  PageTable(const Rows& rows, int64_t tile_size, Arena* arena)
      : rows_(rows),
        tile_size_(tile_size),
        head_bytes_(rows.p.cache.head_stride * static_cast<int64_t>(sizeof(T))),
        row_bytes_(rows.p.head_size * static_cast<int64_t>(sizeof(T))),
        value_offset_(static_cast<const char*>(rows.p.cache.values) -
                      static_cast<const char*>(rows.p.cache.keys)),
        keys_(arena->Take<const char*>(kMaxTile)),
        next_keys_(arena->Take<const char*>(kMaxTile)) {
    num_next_ = Find(rows.item.begin / tile_size * tile_size, next_keys_);
  }

  // Makes the tile at this position, which was the next, the current one.
  void Advance(int64_t position) {
    const char** found = next_keys_;
    next_keys_ = keys_;
    keys_ = found;
    num_next_ = Find(position + tile_size_, next_keys_);
  }

  // The address of K at each position of the current tile, of the item's first kv head.
  const char* const* keys() const { return keys_; }

  // Bytes of a row of K, and from there to the K or V of another kv head of the item.
  int64_t row_bytes() const { return row_bytes_; }
  int64_t KeyOffset(int64_t head) const { return head * head_bytes_; }
  int64_t ValueOffset(int64_t head) const { return head * head_bytes_ + value_offset_; }

  // A prefetcher of a kv head's share of the next tile: where heads lie side by side, all heads of
  // some positions, as they lie in memory; elsewhere its own rows of all positions.
  Prefetcher PrefetcherOf(int64_t head, int64_t num_passes) const {
    const bool are_adjacent = value_offset_ == row_bytes_, is_in_key = value_offset_ == 0;  // V
    const int64_t num_bytes = are_adjacent ? 2 * row_bytes_ : row_bytes_;
    const int64_t num_offsets = are_adjacent || is_in_key ? 1 : 2;
    if (head_bytes_ != num_bytes) {
      return {next_keys_,
              num_next_,
              {num_bytes, num_offsets, {KeyOffset(head), ValueOffset(head)}},
              num_passes};
    }
    const int64_t num_heads = rows_.item.num_kv_heads, share = CeilDiv(num_next_, num_heads);
    const int64_t first = Smaller(head * share, num_next_);
    return {next_keys_ + first,
            Smaller(share, num_next_ - first),
            {num_heads * num_bytes, num_offsets, {0, value_offset_}},
            num_passes};
  }

  // Touches the pages of the next tile's K and V of a kv head.
  void TouchNext(int64_t head) const {
    PageToucher pages;
    for (int64_t j = 0; j < num_next_; ++j) {
      for (const int64_t offset : {KeyOffset(head), ValueOffset(head)}) {
        pages.Touch(next_keys_[j] + offset, row_bytes_);
      }
    }
  }

 private:
  // Finds the K of the tile at `first`, up to the item's end; returns the number of positions.
  // Positions before the item's first get its address, and some after its last get the last one's,
  // so that whole vectors can be read.
  int64_t Find(int64_t first, const char** keys) const {
    const Params& p = rows_.p;
    const WorkItem& item = rows_.item;
    const int32_t* table = p.block_tables + item.sequence * p.max_blocks_per_seq;
    const int64_t num_positions = Larger(0, Smaller(tile_size_, item.end - first));
    if (num_positions == 0) return 0;
    const int64_t begin = Larger(first, item.begin);
    int64_t logical = begin / p.block_size, offset = begin % p.block_size;
    for (int64_t j = begin - first; j < num_positions; ++j) {
      keys[j] = reinterpret_cast<const char*>(static_cast<const T*>(p.cache.keys) +
                                              p.cache.Offset(table[logical], offset)) +
                item.first_kv_head * head_bytes_;
      if (++offset == p.block_size) {
        offset = 0;
        ++logical;
      }
    }
    for (int64_t j = 0; j < begin - first; ++j) keys[j] = keys[begin - first];
    for (int64_t j = num_positions; j < RoundUp(num_positions, kStep); ++j) keys[j] = keys[j - 1];
    return num_positions;
  }

  const Rows& rows_;
  const int64_t tile_size_;
  const int64_t head_bytes_;    // from K of a kv head to that of the next
  const int64_t row_bytes_;     // of K of a position and kv head
  const int64_t value_offset_;  // from there to its V
  const char** keys_;           // [kMaxTile]
  const char** next_keys_;      // [kMaxTile]
  int64_t num_next_;
};

}  // namespace
}  // namespace xla_gpu::paged_attention
