// The warps of the decode kernel that find its work and copy K, V and queries.
#pragma once

#include "shared.cuh"

namespace xla_gpu::paged_attention::decode {

// The first warp finds the work items and copies K. The second one prepares the work items for the
// consumers, and copies queries and V. All lanes call each function.
template <typename T, typename C, int kHeadSize, int kKib, bool kStripsAreInBlocks>
class Producer {
  using Shared = decode::Shared<T, C, kHeadSize, kKib>;
  using QueryRows = typename Shared::QueryRows;
  using CacheRows = typename Shared::CacheRows;
  using TileState = typename Shared::TileState;
  using ItemState = typename Shared::ItemState;
  static constexpr int kTile = Shared::kTile;
  static constexpr int kStrips = kTile / kStrip;

 public:
  __device__ Producer(const Params& p, const Numbers& numbers, bool copies_keys, Shared* shared)
      : p_(p),
        numbers_(numbers),
        shared_(*shared),
        lane_(threadIdx.x % gpu::kWarpSize),
        copies_keys_(copies_keys),
        cache_(copies_keys ? numbers.keys : numbers.values) {}

  // Goes through the splits that `find_next` finds: find_next(&split, &context, stage), with the
  // positions of the member that the lane has the number of.
  template <typename FindNext>
  __device__ void Run(const FindNext& find_next) {
    Split work, next;
    int32_t context = 0;
    work.begin = work.end = 0;  // no tiles; nothing else of it is read
    for (ItemState stage;; stage = stage.Next()) {
      find_next(&next, &context, stage);
      CopyTiles(work, next);
      if (!copies_keys_) PublishWork(next, context, stage);
      if (next.IsEnd()) break;
      work = next;
    }
    gpu::CommitCopies();
    gpu::WaitCopies<0>();
  }

 private:
  // What the consumers need of a split, and its query.
  __device__ void PublishWork(const Split& split, int32_t context, ItemState stage) {
    shared_.work_barriers.WaitFreed(stage);
    Work& work = shared_.work[stage.index];
    const Item item = split.AsItem(numbers_.heads_per_kv);
    float k_scale = 1, v_scale = 1;  // on their way until the query is there, too
    if (kIs8Bit<C> && Shared::LeavesScaleOut(p_) && !split.IsEnd()) {
      k_scale = p_.k_scale.At(0, 0, item.kv_head);
      v_scale = p_.v_scale.At(0, 0, item.kv_head);
    }
    if (lane_ < kItemRows) {
      QueryRow row = {};
      if (lane_ < item.num_rows) {
        row.token = numbers_.TokenOf(lane_);
        row.head = HeadOf(item, lane_, row.token);
        row.range = RowRange::OfToken(p_, item, row.token);
      }
      work.rows[lane_] = row;
      work.contexts[lane_] = context;
    }
    if (!split.IsEnd() && split.Members() > 1) GiveSlots(split, context, &work.rows[lane_]);
    __syncwarp();
    auto* query = shared_.query[stage.index];
#pragma unroll 1
    for (int i = lane_; i - lane_ < item.num_rows * QueryRows::kChunks; i += gpu::kWarpSize) {
      const int row = i / QueryRows::kChunks, chunk = i % QueryRows::kChunks;
      const int column = chunk * QueryRows::kChunk, token = numbers_.TokenOf(row);
      const bool exists = row < item.num_rows && column < p_.head_size;
      const int64_t offset = p_.QueryOffset(item.first_token + token, HeadOf(item, row, token));
      const T* from = static_cast<const T*>(p_.query) + (exists ? offset + column : 0);
      if constexpr (kIs8Bit<C>) {
        float factor;
        const FourPairs pairs = HalvesOf<QueryRows::kChunks>(from, exists, &factor);
        QueryOf8BitKeys<Half, QueryRows>::Store(query, row, chunk, pairs);
        if (chunk == 0 && exists) shared_.query_factors[stage.index][row] = factor * k_scale;
      } else {
        gpu::CopyAsync16(query + QueryRows::Offset(row, chunk), from, exists);
      }
    }
    // A row that does not exist has a scale, too, which decides all the same.
    const bool is_missing = item.num_rows <= lane_ && lane_ < kItemRows;
    if (kIs8Bit<C> && is_missing) shared_.query_factors[stage.index][lane_] = k_scale;
    const bool is_bad = gpu::AnyInWarp(HasBadTree(p_, item, lane_));
    if (lane_ == 0) {
      work.split = split;
      work.item = item;
      work.is_bad = is_bad;
      if (kIs8Bit<C>) work.v_scale = v_scale;
      work.common = CommonRange(p_, item, item.first_position, item.context_len - 1);
    }
    __syncwarp();
    gpu::ArriveAfterCopies(&shared_.work_barriers.filled[stage.index]);
    if (lane_ == 0) gpu::Arrive(&shared_.work_barriers.filled[stage.index]);
    published_ = &work;
  }

  // Gives the rows of a family their slots. A later member's tokens follow the first one's in the
  // batch, and its slots those of the members before it.
  __device__ void GiveSlots(const Split& split, int32_t context, QueryRow* row) const {
    const int32_t token = numbers_.TokenOf(lane_);
    int32_t slots = token;
#pragma unroll 1
    for (int member = 1; member < split.Members(); ++member) {
      const int32_t units = split.CountUnits(0, gpu::Shuffle(context, member - 1));
      if (token >= member * split.q_len) slots += (units - 1) * split.q_len;
    }
    if (lane_ < kItemRows) row->token = slots;
  }

  // The query head of a row.
  __device__ int32_t HeadOf(const Item& item, int row, int token) const {
    return item.kv_head * numbers_.heads_per_kv + row - token * numbers_.heads_per_kv;
  }

  // The block ids of some tiles of a work item, of which each lane holds a few. They are on their
  // way while the tiles before these are copied; nothing may use them in that loop.
  //
  // Where each strip of a tile lies in one block, lane l has the id of the l-th block from the
  // tile's on. Elsewhere it has those of every 32nd position from position l on, or from RowOfLane
  // on where a tile has so many.
  static constexpr int kIds = kStripsAreInBlocks ? 1 : 2;
  static constexpr int kTilesOfIds = kIds * gpu::kWarpSize / kTile;

  // Loads the ids for the tiles of a work item from `tile` on, up to the position `end`.
  __device__ void LoadIds(int32_t sequence, int32_t end, int32_t tile) {
    const auto* table = reinterpret_cast<const int32_t*>(
        reinterpret_cast<const char*>(p_.block_tables) +
        static_cast<uint32_t>(sequence) * uint64_t{numbers_.table_bytes});
    if constexpr (kStripsAreInBlocks) {
      first_block_ = numbers_.strips_of_block.Quotient(tile * kStrips);
      const uint32_t block = first_block_ + lane_;
      const bool is_in = block * numbers_.block_size.number < static_cast<uint32_t>(end);
      if (is_in) ids_[0] = table[block];
    } else {
      const int place = kTile == gpu::kWarpSize ? RowOfLane() : lane_;
#pragma unroll
      for (int i = 0; i < kIds; ++i) {
        const uint32_t position = tile * kTile + i * gpu::kWarpSize + place;
        const uint32_t block = gpu::Opaque(numbers_.block_size.Quotient(position));
        if (position < static_cast<uint32_t>(end)) ids_[i] = table[block];
      }
    }
  }

  // Copies the tiles of a work item, if it has any, and asks for the first block ids of the next
  // one.
  __device__ void CopyTiles(const Split& work, const Split& next) {
    const int32_t next_tile = next.BeginTile<kTile>(), end_tile = work.EndTile<kTile>();
    int32_t tile = work.BeginTile<kTile>();
    if (work.begin == work.end) {  // fewer instructions before the first copy
      LoadIds(next.sequence, next.end, next_tile);
      return;
    }
    XLA_GPU_STAMP(First, kCopies, copies_keys_);
    do {
      const int32_t first_block = first_block_;
      int32_t ids[kIds], end = tile + kTilesOfIds;
#pragma unroll
      for (int i = 0; i < kIds; ++i) ids[i] = ids_[i];
      if constexpr (kStripsAreInBlocks) {
        end = TilesTo<kStrips>((first_block + gpu::kWarpSize) * numbers_.strips_of_block.number);
      }
      const bool is_end = end >= end_tile;
      if (is_end) end = end_tile;
      LoadIds(is_end ? next.sequence : work.sequence, is_end ? next.end : work.end,
              is_end ? next_tile : end);
      // What no other sequence reads leaves the L2 cache to what others do.
      // A vote is in a uniform register, as the copies want their policy.
      const bool is_kept = gpu::AnyInWarp(work.IsKept(tile * kTile));
      const uint64_t policy = is_kept ? gpu::NoPolicy() : gpu::PolicyOfStreams();
      if constexpr (kStripsAreInBlocks) {
        CopyTilesOfStrips(work, ids[0],
                          tile * kStrips - first_block * numbers_.strips_of_block.number, tile, end,
                          policy);
      } else {
        CopyOtherTiles(work, ids, tile, end, policy);
      }
      tile = end;
    } while (tile < end_tile);
  }

  // Ends what a lane does for a tile.
  __device__ __forceinline__ void Arrive(TileState stage, bool is_bad) {
    gpu::Barrier* filled = &shared_.tiles_barriers.filled[stage.index];
    if (!copies_keys_ && is_bad) {
      published_->is_bad = true;
      gpu::CommitCopies();
      gpu::WaitCopies<0>();
      gpu::Arrive(filled);  // who waits for the tile sees that it is bad, too
    } else {
      gpu::ArriveAfterCopies(filled);
    }
  }

  __device__ bool IsBlock(int32_t id) const {
    return static_cast<uint32_t>(id) < numbers_.num_blocks;
  }

  // The chunk of 16 bytes that a lane copies of a position's K, or V.
  static constexpr int kChunks = CacheRows::kChunks;
  static_assert(gpu::kWarpSize % kChunks == 0, "each lane has the same chunk of all rows");
  static constexpr int kRowsAtOnce = gpu::kWarpSize / kChunks;
  static constexpr int kSteps = kTile / kRowsAtOnce;  // of a tile

  // Where rows lie anywhere, a lane finds the slot of this row of a tile: one that it copies, so
  // that lanes with the same chunk of adjacent rows ask for the slots in one instruction.
  __device__ int RowOfLane() const { return lane_ % kSteps * kRowsAtOnce + lane_ / kChunks; }

  __device__ bool HasChunk() const { return lane_ % kChunks < cache_.of_row; }
  // Where it lies at position 0 of block 0. Never read where there is none.
  __device__ const char* FirstChunk(const Split& work) const {
    const uint64_t first = static_cast<uint32_t>(work.kv_head) * static_cast<uint64_t>(cache_.head);
    // As one number: an offset that is added to it takes one instruction, not four.
    return gpu::Opaque(static_cast<const char*>(cache_.first) + (first + lane_ % kChunks) * 16);
  }

  // Copies tiles [tile, end), one at least, each strip of which lies in one block. Rows and columns
  // out of range are filled with zeros. `id`: of the first strip's block and those after it, in the
  // lanes.
  __device__ void CopyTilesOfStrips(const Split& work, int32_t id, int32_t strip_in_block,
                                    int32_t tile, int32_t end, uint64_t policy) {
    const char* from = FirstChunk(work);
    const int first_row = lane_ / kChunks;
    const auto count = static_cast<uint32_t>(work.end - work.begin);
    const uint64_t step = uint64_t{cache_.position} * (16 * kRowsAtOnce);
    int lane = 0;
#pragma unroll 1
    do {
      const TileState stage = next_stage_;
      next_stage_ = stage.Next();
      const uint32_t after_begin = tile * kTile + first_row - work.begin;
      // The block of the lane's row of scales, and where the row's strip begins in it.
      [[maybe_unused]] int32_t own_block = 0, own_begin = 0;
      bool is_bad = false;
#pragma unroll
      for (int strip = 0; strip < kStrips; ++strip) {
        const int32_t block = gpu::Shuffle(id, lane), begin_in_block = strip_in_block * kStrip;
        if (kIs8Bit<C> && lane_ % kTile / kStrip == strip) {
          own_block = block;
          own_begin = begin_in_block;
        }
        const uint32_t chunks = static_cast<uint32_t>(block) * cache_.block +
                                (begin_in_block + first_row) * cache_.position;
        const char* row_from = from + uint64_t{chunks} * 16;
        const bool exists = HasChunk() && IsBlock(block);
        if (strip == 0) shared_.tiles_barriers.WaitFreed(stage);
        C* to = RowsOf(stage);
#pragma unroll
        for (int row = strip * kStrip; row < (strip + 1) * kStrip; row += kRowsAtOnce) {
          gpu::CopyAsync16(to + CacheRows::Offset(row, 0), row_from,
                           exists && after_begin + row < count, policy);
          row_from += step;
        }
        const int32_t begin = tile * kTile + strip * kStrip, end_of_strip = begin + kStrip;
        const bool is_needed = begin < work.end && work.begin < end_of_strip;
        is_bad |= is_needed && !IsBlock(block);  // some tables end with the last position
        if (++strip_in_block == numbers_.strips_of_block.number) {
          strip_in_block = 0;
          ++lane;
        }
      }
      if (kIs8Bit<C> && copies_keys_) {
        const int row = lane_ % kTile;
        const bool exists = IsBlock(own_block) && work.IsIn(tile * kTile + row);
        WriteScales(work, exists, own_block, own_begin + row % kStrip, row, stage);
      }
      Arrive(stage, is_bad);
    } while (++tile < end);
  }

  // Copies tiles whose rows lie anywhere. A lane finds the slot of a position.
  __device__ void CopyOtherTiles(const Split& work, int32_t (&ids)[kIds], int32_t tile, int32_t end,
                                 uint64_t policy) {
    static_assert(kTile == gpu::kWarpSize || 2 * kTile == gpu::kWarpSize, "or two tiles");
    static_assert(kSteps <= kChunks, "the lanes with a chunk have all its rows");
    const char* from = FirstChunk(work);
    const int row_of_lane = RowOfLane();
    unsigned lane = row_of_lane;  // that has the id of the row
#pragma unroll 1
    do {
      const int32_t block = kTile == gpu::kWarpSize ? ids[0] : gpu::Shuffle(ids[0], lane);
      if (kTile == gpu::kWarpSize || lane >= kTile) {  // the last tile of these ids
#pragma unroll
        for (int i = 1; i < kIds; ++i) ids[i - 1] = ids[i];
      }
      const int32_t position = tile * kTile + row_of_lane;
      const uint32_t logical = numbers_.block_size.Quotient(position);
      const uint32_t offset = position - logical * numbers_.block_size.number;
      const bool is_in = work.IsIn(position), exists = is_in && IsBlock(block);
      const uint32_t chunks_of_lane =
          exists ? block * cache_.block + offset * cache_.position : kNoSlot;
      const TileState stage = next_stage_;
      next_stage_ = stage.Next();
      shared_.tiles_barriers.WaitFreed(stage);
      C* to = RowsOf(stage);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint32_t chunks = gpu::Shuffle(chunks_of_lane, step, kChunks);
        gpu::CopyAsync16(to + CacheRows::Offset(step * kRowsAtOnce, 0),
                         from + uint64_t{chunks} * 16, HasChunk() && chunks != kNoSlot, policy);
      }
      if (kIs8Bit<C> && copies_keys_) WriteScales(work, exists, block, offset, row_of_lane, stage);
      Arrive(stage, is_in && !exists);
      lane = (lane + kTile) % gpu::kWarpSize;
    } while (++tile < end);
  }

  // Where the lane's chunk of its first row goes.
  __device__ C* RowsOf(TileState stage) {
    return shared_.tiles[stage.index] +
           CacheRows::Offset(lane_ / kChunks,
                             lane_ % kChunks + (copies_keys_ ? 0 : CacheRows::kChunks));
  }

  // Writes the scales of the positions of an 8-bit cache: each lane those of another row.
  __device__ void WriteScales(const Split& work, bool exists, int32_t block, int32_t offset,
                              int row, TileState stage) {
    if (Shared::LeavesScaleOut(p_)) return;
    PositionScales scales = {1, 1};
    if (exists) {
      scales = {p_.k_scale.At(block, offset, work.kv_head),
                p_.v_scale.At(block, offset, work.kv_head)};
    }
    shared_.scales[stage.index][row] = scales;
    __syncwarp();
    if (lane_ == 0) gpu::Arrive(&shared_.tiles_barriers.filled[stage.index]);
  }

  const Params& p_;
  const Numbers& numbers_;
  Shared& shared_;
  const int lane_;
  const bool copies_keys_;
  const CacheChunks cache_;
  Work* published_;  // the work item whose tiles are copied
  int32_t ids_[kIds];
  int32_t first_block_ = 0;  // that the lanes have ids of
  TileState next_stage_;     // of a tile
};

}  // namespace xla_gpu::paged_attention::decode
