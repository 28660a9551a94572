// The page table: where the block table puts the K and V of a KV tile's positions.
#pragma once

#include "mask.h"

namespace xla_gpu::paged_attention {
namespace {

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
