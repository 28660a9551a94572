// The page table: where the block table puts the K and V of a KV tile's positions.
#pragma once

#include <utility>

#include "int4_rows.h"
#include "mask.h"

namespace xla_gpu::paged_attention {
namespace {

// Reads the block table: where the K and V of each position lie, of the current tile and of the
// next.
template <typename T>
class PageTable {
 public:
  PageTable(const Rows& rows, int64_t tile_size, Arena* arena)
      : rows_(rows),
        tile_size_(tile_size),
        keys_(rows.p.cache.keys, rows.p.cache.head_stride,
              ElementsOf(rows.p.cache_dtype, rows.p.head_size)),
        values_(rows.p.cache.values, rows.p.cache.value_head_stride,
                ElementsOf(rows.p.value_cache_dtype, rows.p.value_head_size)),
        shares_strides_(rows.p.cache.ValuesHaveStridesOfKeys()),
        value_offset_(shares_strides_ ? values_.first - keys_.first : 0),
        int4_keys_(rows.p.cache_dtype, rows.p.head_size, arena),
        int4_values_(rows.p.value_cache_dtype, rows.p.value_head_size, arena),
        tile_(MakeTile(arena)),
        next_(MakeTile(arena)),
        runs_(arena->Take<Prefetcher::Run>(2 * kMaxTile + 1)) {
    num_next_ = Find(rows.item.begin / tile_size * tile_size);
  }

  // Makes the tile at this position, which was the next, the current one.
  void Advance(int64_t position) {
    std::swap(tile_, next_);
    num_current_ = RoundUp(num_next_, kStep);
    num_next_ = Find(position + tile_size_);
  }

  // The K, and the V, of the current tile, of a kv head of the item. Rows of int4 are expanded into
  // the memory of those of the head before.
  RowPlaces Keys(int64_t head) const {
    return Expanded(int4_keys_, {tile_.keys, head * keys_.head_bytes});
  }
  RowPlaces Values(int64_t head) const {
    return Expanded(int4_values_, {tile_.values, head * values_.head_bytes + value_offset_});
  }

  // Bytes of a position's rows of K and V as Keys and Values give them.
  int64_t num_read() const {
    return (rows_.p.head_size + rows_.p.value_head_size) * static_cast<int64_t>(sizeof(T));
  }

  // A prefetcher of a kv head's share of the next tile: where heads lie side by side, all heads of
  // some positions, as they lie in memory; elsewhere its own rows of all positions.
  //   num_passes: how often the current tile is read; each time a share of the next is prefetched
  Prefetcher PrefetcherOf(int64_t head, int64_t num_passes) const {
    const bool are_adjacent = value_offset_ == keys_.row_bytes;  // V
    const bool is_in_key = value_offset_ == 0 && shares_strides_;
    const bool are_apart = !are_adjacent && !is_in_key;
    const int64_t num_bytes = keys_.row_bytes + (are_adjacent ? values_.row_bytes : 0);
    const int64_t num_read_in_all = num_passes * num_read();
    if (keys_.head_bytes != num_bytes) {
      return {{next_.keys, num_next_, head * keys_.head_bytes, num_bytes},
              {next_.values, are_apart ? num_next_ : 0, head * values_.head_bytes + value_offset_,
               values_.row_bytes},
              num_next_,
              num_read_in_all,
              runs_};
    }
    const int64_t num_heads = rows_.item.num_kv_heads, share = CeilDiv(num_next_, num_heads);
    const int64_t first = Smaller(head * share, num_next_);
    const int64_t count = Smaller(share, num_next_ - first);
    return {
        {next_.keys + first, count, 0, num_heads * num_bytes},
        {next_.values + first, are_apart ? count : 0, value_offset_, num_heads * values_.row_bytes},
        num_heads * share,
        num_read_in_all,
        runs_};
  }

  // Prefetches the next tile's K and V of a kv head.
  void PrefetchNext(int64_t head) const {
    for (int64_t j = 0; j < num_next_; ++j) {
      PrefetchRow(next_.keys[j] + head * keys_.head_bytes, keys_.row_bytes);
      PrefetchRow(next_.values[j] + head * values_.head_bytes + value_offset_, values_.row_bytes);
    }
  }

 private:
  RowPlaces Expanded(const Int4Rows& int4_rows, const RowPlaces& places) const {
    if (!kIs8Bit<T> || !int4_rows.AreUsed()) return places;
    return int4_rows.Expand(places, num_current_);
  }

  // An array of rows, in bytes.
  struct Array {
    Array(const void* data, int64_t head_stride, int64_t row_size)
        : first(static_cast<const char*>(data)),
          head_bytes(head_stride * static_cast<int64_t>(sizeof(T))),
          row_bytes(row_size * static_cast<int64_t>(sizeof(T))) {}

    const char* first;
    int64_t head_bytes;  // from a row of a kv head to that of the next
    int64_t row_bytes;
  };

  // The addresses of the rows of the item's first kv head. Unless V has other strides, `values` is
  // `keys`, and V lies value_offset_ bytes away from K.
  struct Tile {
    const char** keys;    // [kMaxTile]
    const char** values;  // [kMaxTile]
  };

  Tile MakeTile(Arena* arena) const {
    const char** keys = arena->Take<const char*>(kMaxTile);
    return {keys, shares_strides_ ? keys : arena->Take<const char*>(kMaxTile)};
  }

  // Finds the rows of the next tile, which begins at `first`, up to the item's end; returns the
  // number of positions. Positions before the item's first get its address, and some after its last
  // get the last one's, so that whole vectors can be read.
  int64_t Find(int64_t first) {
    const KvCache& cache = rows_.p.cache;
    const auto as_key = [](int64_t offset) { return offset; };
    const auto as_value = [&](int64_t offset) { return cache.OffsetOfValue(offset); };
    if (!shares_strides_) FindRows(first, values_, as_value, next_.values);
    return FindRows(first, keys_, as_key, next_.keys);
  }

  template <typename ToOffset>
  int64_t FindRows(int64_t first, const Array& array, const ToOffset& to_offset,
                   const char** found) const {
    const Params& p = rows_.p;
    const WorkItem& item = rows_.item;
    const bool has_table = p.block_tables != nullptr;
    const int32_t* table = p.block_tables + (has_table ? item.sequence * p.max_blocks_per_seq : 0);
    const int64_t num_positions = Larger(0, Smaller(tile_size_, item.end - first));
    if (num_positions == 0) return 0;
    const char* const first_row = array.first + item.first_kv_head * array.head_bytes;
    const int64_t begin = Larger(first, item.begin);
    int64_t logical = begin / p.block_size, offset = begin % p.block_size;
    for (int64_t j = begin - first; j < num_positions; ++j) {
      const int64_t block = has_table ? table[logical] : p.TokenAt(item.sequence, logical);
      found[j] =
          first_row + to_offset(p.cache.Offset(block, offset)) * static_cast<int64_t>(sizeof(T));
      if (++offset == p.block_size) {
        offset = 0;
        ++logical;
      }
    }
    for (int64_t j = 0; j < begin - first; ++j) found[j] = found[begin - first];
    for (int64_t j = num_positions; j < RoundUp(num_positions, kStep); ++j) found[j] = found[j - 1];
    return num_positions;
  }

  const Rows& rows_;
  const int64_t tile_size_;
  const Array keys_;
  const Array values_;
  const bool shares_strides_;  // K and V
  const int64_t value_offset_;
  const Int4Rows int4_keys_;
  const Int4Rows int4_values_;
  Tile tile_;
  Tile next_;
  Prefetcher::Run* const runs_;  // of the last Prefetcher
  int64_t num_current_ = 0;  // rows of the current tile: its positions, rounded up to whole steps
  int64_t num_next_;         // positions of the next tile
};

}  // namespace
}  // namespace xla_gpu::paged_attention
