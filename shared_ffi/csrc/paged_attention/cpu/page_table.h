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
        element_bytes_(SizeOf(rows.p.cache_dtype)),
        keys_(rows.p.cache.keys, element_bytes_ * rows.p.cache.head_stride,
              element_bytes_ * ElementsOf(rows.p.cache_dtype, rows.p.head_size)),
        values_(rows.p.cache.values, element_bytes_ * rows.p.cache.value_head_stride,
                element_bytes_ * ElementsOf(rows.p.value_cache_dtype, rows.p.value_head_size)),
        shares_strides_(rows.p.cache.ValuesHaveStridesOfKeys()),
        value_offset_(shares_strides_ ? values_.first - keys_.first : 0),
        int4_keys_(rows.p, rows.p.cache_dtype, rows.p.head_size, arena),
        int4_values_(rows.p, rows.p.value_cache_dtype, rows.p.value_head_size, arena),
        float_rows_(FloatRowsOf(rows.p, arena)),
        float_keys_(float_rows_, rows.p.cache_dtype, rows.p.head_size, rows.p.k_scale,
                    rows.p.k_groups, arena),
        float_values_(float_rows_, rows.p.value_cache_dtype, rows.p.value_head_size, rows.p.v_scale,
                      rows.p.v_groups, arena),
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

  // The K, and the V, of the current tile, of a kv head of the item. Rows that are expanded take
  // the place of those of the head before, and as float32 V takes the place of K.
  RowPlaces Keys(int64_t head) const {
    return Expanded(int4_keys_, float_keys_, KeyPlaces(head), KeyScales(head));
  }
  RowPlaces Values(int64_t head) const {
    return Expanded(int4_values_, float_values_, ValuePlaces(head), ValueScales(head));
  }

#ifdef XLA_GPU_READS_CODES
  // The same as CodedRows, where they are.
  bool KeysAreCodes() const { return float_keys_.AreCodes(); }
  CodedRows KeyCodes(int64_t head) const {
    return float_keys_.Codes(KeyPlaces(head), KeyScales(head), num_current_);
  }
  bool ValuesAreCodes() const { return float_values_.AreCodes(); }
  CodedRows ValueCodes(int64_t head) const {
    return float_values_.Codes(ValuePlaces(head), ValueScales(head), num_current_);
  }
#endif

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
  RowPlaces KeyPlaces(int64_t head) const { return {tile_.keys, head * keys_.head_bytes}; }
  RowPlaces ValuePlaces(int64_t head) const {
    return {tile_.values, head * values_.head_bytes + value_offset_};
  }
  RowPlaces KeyScales(int64_t head) const {
    return {tile_.k_scales, float_keys_.ScalesOffset(0, 0, head)};
  }
  RowPlaces ValueScales(int64_t head) const {
    return {tile_.v_scales, float_values_.ScalesOffset(0, 0, head)};
  }

  RowPlaces Expanded(const Int4Rows& int4_rows, const FloatRows& float_rows,
                     const RowPlaces& places, const RowPlaces& scales) const {
    if (std::is_same_v<T, float> && float_rows.AreUsed()) {
      return float_rows.Expand(places, scales, num_current_);
    }
    if (!kIs8Bit<T> || !int4_rows.AreUsed()) return places;
    return int4_rows.Expand(places, num_current_);
  }

  // An array of rows, in bytes.
  struct Array {
    Array(const void* data, int64_t head_bytes, int64_t row_bytes)
        : first(static_cast<const char*>(data)), head_bytes(head_bytes), row_bytes(row_bytes) {}

    const char* first;
    int64_t head_bytes;  // from a row of a kv head to that of the next
    int64_t row_bytes;
  };

  // The addresses of the rows of the item's first kv head. Unless V has other strides, `values` is
  // `keys`, and V lies value_offset_ bytes away from K.
  struct Tile {
    const char** keys;      // [kMaxTile]
    const char** values;    // [kMaxTile]
    const char** k_scales;  // [kMaxTile]; null: rows are not multiplied by scales
    const char** v_scales;  // [kMaxTile]
  };

  Tile MakeTile(Arena* arena) const {
    const auto take = [&](bool is_used) {
      return is_used ? arena->Take<const char*>(kMaxTile) : nullptr;
    };
    const char** keys = take(true);
    return {keys, shares_strides_ ? keys : take(true), take(float_keys_.HaveScales()),
            take(float_values_.HaveScales())};
  }

  // Finds the rows of the next tile, which begins at `first`, up to the item's end; returns the
  // number of positions. Positions before the item's first get its address, and some after its last
  // get the last one's, so that whole vectors can be read.
  int64_t Find(int64_t first) {
    const KvCache& cache = rows_.p.cache;
    const int64_t kv_head = rows_.item.first_kv_head;
    const auto find_scales = [&](const FloatRows& float_rows, const char** found) {
      if (!float_rows.HaveScales()) return;
      const auto offset = [&](int64_t block, int64_t position) {
        return float_rows.ScalesOffset(block, position, kv_head);
      };
      const int64_t count = FindRows(first, float_rows.FirstScales(), offset, found);
      for (int64_t j = 0; j < count; ++j) __builtin_prefetch(found[j]);
    };
    find_scales(float_keys_, next_.k_scales);
    find_scales(float_values_, next_.v_scales);
    const auto key_offset = [&](int64_t block, int64_t position) {
      return element_bytes_ * cache.Offset(block, position);
    };
    const auto value_offset = [&](int64_t block, int64_t position) {
      return element_bytes_ * cache.OffsetOfValue(cache.Offset(block, position));
    };
    if (!shares_strides_) {
      FindRows(first, values_.first + kv_head * values_.head_bytes, value_offset, next_.values);
    }
    return FindRows(first, keys_.first + kv_head * keys_.head_bytes, key_offset, next_.keys);
  }

  template <typename OffsetOf>
  int64_t FindRows(int64_t first, const char* first_row, const OffsetOf& offset_of,
                   const char** found) const {
    const Params& p = rows_.p;
    const WorkItem& item = rows_.item;
    const bool has_table = p.block_tables != nullptr;
    const int32_t* table = p.block_tables + (has_table ? item.sequence * p.max_blocks_per_seq : 0);
    const int64_t num_positions = Larger(0, Smaller(tile_size_, item.end - first));
    if (num_positions == 0) return 0;
    const int64_t begin = Larger(first, item.begin);
    int64_t logical = begin / p.block_size, offset = begin % p.block_size;
    for (int64_t j = begin - first; j < num_positions; ++j) {
      const int64_t block = has_table ? table[logical] : p.TokenAt(item.sequence, logical);
      found[j] = first_row + offset_of(block, offset);
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
  const int64_t element_bytes_;
  const Array keys_;
  const Array values_;
  const bool shares_strides_;  // K and V
  const int64_t value_offset_;
  const Int4Rows int4_keys_;
  const Int4Rows int4_values_;
  char** const float_rows_;
  const FloatRows float_keys_;
  const FloatRows float_values_;
  Tile tile_;
  Tile next_;
  Prefetcher::Run* const runs_;  // of the last Prefetcher
  int64_t num_current_ = 0;  // rows of the current tile: its positions, rounded up to whole steps
  int64_t num_next_;         // positions of the next tile
};

}  // namespace
}  // namespace xla_gpu::paged_attention
