// What the decode kernel needs of a call's sizes, as numbers that cost no division on a GPU.
#pragma once

#include "../scratch.h"

namespace xla_gpu::paged_attention::decode {

// Positions of a KV tile in a cache of type C: as many bytes for each type.
template <typename C>
inline constexpr int kTilePositions = kIs8Bit<C> ? 32 : 16;
// The largest of them, and a block of the softmax: where the positions of a sequence begin to
// count.
inline constexpr int kWidestTile = 32;
// Positions of a strip of a KV tile. Where blocks are whole strips, each strip lies in one block.
inline constexpr int kStrip = 16;

// Sequences whose lengths a warp has at once. Families lie within such sections of the batch.
inline constexpr int kSection = 32;

// The shared memory of a multiprocessor, in KiB, that a decode kernel is made for. What every GPU
// from sm_80 on has suffices. With that of sm_90, more KV tiles are on their way.
inline constexpr int kAnyMultiprocessor = 100, kLargeMultiprocessor = 228;

// K, or V, in chunks of 16 bytes: the strides, and the chunks of a row. No chunks: there is no
// copy. All blocks of a kv head have at most 2^32 chunks.
struct CacheChunks {
  const void* first;  // of block 0, position 0 and kv head 0
  int64_t head;
  uint32_t block;
  uint32_t position;
  int32_t of_row;
};

// Sizes in 32 bits. A larger size becomes the largest number: it is only compared with others, but
// for table_bytes, of calls whose TableRowsFit32Bits.
struct Numbers {
  static constexpr int32_t kNoWindow = kMaxContextLen;  // positions are at least -kItemRows

  Divisor block_size;
  Divisor strips_of_block;  // where each strip of a tile lies in one block
  int32_t num_tokens;
  int32_t max_seqs;
  int32_t capacity;
  int32_t window;         // kNoWindow: none
  int32_t max_query_len;  // of the sequences of this kernel
  int32_t most_groups;    // of positions of a sequence that is split
  Divisor groups_of_run;  // see Consumer::Merge
  int32_t num_kv_heads;
  int32_t heads_per_kv;          // query heads of a kv head
  uint32_t heads_per_kv_factor;  // 2^16 / heads_per_kv, rounded up
  uint32_t num_blocks;
  uint32_t table_bytes;  // of a sequence's row of block_tables
  Divisor num_thread_blocks;
  bool is_last;  // no kernel of the call follows: rows without work items are this one's, too
  int32_t tokens_of_item;  // whose rows a work item can have. 0: it has those of one sequence
  CacheChunks keys;
  CacheChunks values;

  // max_rows: of a work item. chunk: elements of a chunk of the cache.
  XLA_GPU_HOST_DEVICE Numbers(const Params& p, int64_t max_rows, int64_t chunk)
      : block_size(p.block),
        strips_of_block(Larger(1, p.block_size / kStrip)),
        num_tokens(Smaller(p.num_tokens, INT32_MAX)),
        max_seqs(Smaller(p.max_seqs, INT32_MAX)),
        capacity(p.Capacity()),
        window(p.sliding_window == 0 ? kNoWindow : Smaller(p.sliding_window, kNoWindow)),
        most_groups(MostGroups(LongestSpan(p))),
        groups_of_run(CeilDiv(most_groups, kMostRuns)),
        num_kv_heads(p.num_kv_heads),
        heads_per_kv(p.group.number),
        heads_per_kv_factor(CeilDiv(1 << 16, heads_per_kv)),
        num_blocks(Smaller(p.num_blocks, int64_t{1} << 31)),
        table_bytes(static_cast<uint32_t>(p.max_blocks_per_seq * 4)),
        num_thread_blocks(1),
        is_last(false),
        tokens_of_item(max_rows / heads_per_kv) {
    max_query_len = tokens_of_item;
    if (p.max_query_len != 0) max_query_len = Smaller(p.max_query_len, max_query_len);
    const KvCache& cache = p.cache;
    keys = {cache.keys, cache.head_stride / chunk,
            static_cast<uint32_t>(cache.block_stride / chunk),
            static_cast<uint32_t>(cache.position_stride / chunk),
            static_cast<int32_t>(p.head_size / chunk)};
    values = {cache.values, cache.OffsetOfValue(cache.head_stride) / chunk,
              static_cast<uint32_t>(cache.OffsetOfValue(cache.block_stride) / chunk),
              static_cast<uint32_t>(cache.OffsetOfValue(cache.position_stride) / chunk),
              static_cast<int32_t>(p.is_latent ? 0 : p.value_head_size / chunk)};
  }

  // Whether each strip of a KV tile lies in one block. The positions of 32 larger blocks, after any
  // other, would not have 32 bits.
  bool StripsAreInBlocks() const {
    return block_size.number % kStrip == 0 && block_size.number <= 1 << 26;
  }

  // Whether a sequence can have several splits. A window counts as its positions: see
  // Schedule.
  XLA_GPU_HOST_DEVICE bool HasSplits() const { return Smaller(capacity, window) > kMostUnsplit; }

  // Whether the number of KV tiles of all sequences and kv heads has 31 bits, whatever the lengths,
  // and that of the slots of all query tokens.
  bool TilesFit31Bits() const {
    const int64_t tiles = int64_t{capacity} / kStrip + 4 * kItemRows;
    return max_seqs * tiles <= INT32_MAX / num_kv_heads;
  }

  // The largest number of leaves for any lengths. It bounds the grid.
  int64_t MaxItems(const Params& p) const {
    const int64_t leaves = HasSplits() ? MostLeaves(LongestSpan(p)) : 1;
    return p.num_kv_heads * Smaller(p.max_seqs, p.num_tokens) * leaves;
  }

  // As Params::WindowBegin.
  XLA_GPU_HOST_DEVICE int32_t WindowBegin(int32_t position) const {
    const int32_t begin = position - window + 1;
    return begin < 0 ? 0 : begin;
  }
  // The query token of a row, of which a work item has kItemRows at most.
  XLA_GPU_HOST_DEVICE int32_t TokenOf(int32_t row) const { return row * heads_per_kv_factor >> 16; }
};

}  // namespace xla_gpu::paged_attention::decode
