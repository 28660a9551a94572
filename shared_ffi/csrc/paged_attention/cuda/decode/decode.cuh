// Attention of few query rows, as in decoding. What it adds to tensor_core.cuh:
//
// - Two producer warps copy, one K and the other V. They run ahead of the products by as many KV
//   tiles as there is memory for, across work items: the memory does not wait where one item ends
//   and the next begins. The block ids are on their way before the tiles of the ids before them are
//   copied.
// - One warp, that of K, reads the lengths and finds the block's work items. It hands each to the
//   warp of V, which adds what a row needs and hands it to the consumers. So all agree, even if the
//   lengths change meanwhile.
// - A KV tile has 16 positions, or 32 of 8 bits. The consumer warps take tiles in turn, and a warp
//   waits for its own tiles only.
// - A thread block takes neighbouring splits, about as many positions as every other block. It
//   merges the groups of splits that it has itself. With many sequences few partial results go to
//   memory.
// - Of the thread blocks that share a sequence and kv head, the one that comes last merges what all
//   have found. No other kernel has to follow.
// - Numbers of 8 bits become float16, each two in one instruction. So does the query of such a
//   cache. The range suffices: a query row is divided by a power of two, and where all positions
//   have one scale, weights are not multiplied by it.
//
// Splits and their groups follow from the sequence alone, so a sequence has the same bits whichever
// thread blocks compute it, and whichever comes last.
#pragma once

#include "../../../gpu/stamps.cuh"
#include "../pipeline.cuh"
#include "../products.cuh"
#include "decode_other_rows.cuh"
#include "decode_schedule.cuh"

namespace xla_gpu::paged_attention {

inline constexpr int kDecodeProducers = 2;  // warps
inline constexpr int kDecodeThreads = kThreads + kDecodeProducers * gpu::kWarpSize;
static_assert(kDecodeRows == kRowsPerWarpTile, "a work item is one tile of query rows");
inline constexpr int kDecodeConsumersBarrier = 1;  // named barrier

// The layout in shared memory of a KV tile: for each position K, then V. Rows are an odd number of
// chunks of 16 bytes apart, so that the chunks of one column in eight adjacent rows lie in
// different banks.
template <typename C, int kHeadSize>
struct KvPairRows {
  static constexpr int kChunk = 16 / sizeof(C);  // elements of a chunk
  static constexpr int kChunks = kHeadSize / kChunk;
  static constexpr int kStride = (2 * kChunks + 1) * kChunk;

  static __device__ __forceinline__ int Offset(int row, int chunk) {
    return row * kStride + chunk * kChunk;
  }

  static __device__ __forceinline__ int Behind(int offset, int chunks) {
    return offset + chunks * kChunk;
  }
};

// A row of a work item.
struct alignas(16) DecodeRow {
  RowRange range;
  int32_t token;  // of the sequence
  int32_t head;
};

// What the consumers get of a work item.
struct DecodeWork {
  DecodeSplit split;
  CommonRange common;
  // Whether a block id is outside the pool, or a tree mask not legal: the rows become NaN. The warp
  // of V may find that until the last tile is there.
  int32_t is_bad;
  float v_scale;  // of an 8-bit cache, if all positions have one
  DecodeRow rows[kDecodeRows];
};

// The shared memory of a thread block. kKib: of a multiprocessor.
template <typename T, typename C, int kHeadSize, int kKib>
struct DecodeShared {
  using Query = std::conditional_t<kIs8Bit<C>, Half, T>;
  using QueryRows = SharedRows<Query, kHeadSize>;
  using CacheRows = KvPairRows<C, kHeadSize>;
  static constexpr int kTile = kDecodeTile<C>;
  static constexpr int kTileElements = kTile * CacheRows::kStride;
  static constexpr int kItems = 2;  // work items in memory
  static constexpr bool kIsLarge = kKib >= kLargeMultiprocessor;
  // Thread blocks of a multiprocessor. Without the kernels of Hopper GPUs, numbers of 8 bits take
  // more registers than two blocks leave.
  static constexpr int kBlocks = kHeadSize <= 128 && (kIsLarge || !kIs8Bit<C>) ? 2 : 1;
  // One more KiB goes to each thread block. With little memory there is room for two blocks in 164
  // KiB, and for one in 100.
  static constexpr int kBytes = kIsLarge ? 224 * 1024 / kBlocks : (kBlocks == 2 ? 81 : 99) * 1024;
  // The rows of which the sums of all warps are in memory at once: all, or one for each warp.
  static constexpr int kSumRows = kIsLarge || kHeadSize <= 128 ? kDecodeRows : kWarps;
  static constexpr int kOtherBytes =
      kWarps * kSumRows * (kHeadSize * 4 + 8) + kItems * kDecodeRows * (QueryRows::kStride * 2 + 4);
  static constexpr int kScales = kIs8Bit<C> ? kTile : 1;
  static constexpr int kTileBytes = kTileElements * static_cast<int>(sizeof(C)) + kScales * 8 + 16;
  // KV tiles in memory. Each consumer warp has as many: it waits for each phase of their barriers.
  static constexpr int kStages = (kBytes - kOtherBytes - 1024) / kTileBytes / kWarps * kWarps;
  static_assert(kStages >= (kIsLarge ? 2 : 1) * kWarps, "tiles are copied while others are read");
  using TileState = PipelineState<kStages>;
  using ItemState = PipelineState<kItems>;

  alignas(128) C tiles[kStages][kTileElements];
  alignas(128) Query query[kItems][kDecodeRows * QueryRows::kStride];
  // Of an 8-bit cache: the powers of two, times the scale of K if all positions have one.
  float query_factors[kItems][kDecodeRows];
  float sums[kWarps][kSumRows][kHeadSize];  // see StoreInGroups
  RowState states[kWarps][kSumRows];
  PositionScales scales[kStages][kScales];   // of an 8-bit cache
  PipelineBarriers<kStages> tiles_barriers;  // these three are adjacent: see Init
  PipelineBarriers<kItems> splits_barriers;  // from the warp of K to that of V
  PipelineBarriers<kItems> work_barriers;    // from that to the consumers
  DecodeSplit splits[kItems];
  DecodeWork work[kItems];
  int32_t is_last;  // whether the thread block merges the splits of a sequence and kv head

  // The consumers call it. has_scales: whether tiles come with the scales of their positions.
  __device__ void Init(bool has_scales) {
    // Rows that no item fills are multiplied, too. What memory happens to hold must not decide how
    // long that takes.
    auto* chunks = reinterpret_cast<FourPairs*>(query);
    constexpr int kChunks = static_cast<int>(sizeof(query) / sizeof(FourPairs));
#pragma unroll
    for (int i = 0; i < kChunks; i += kThreads) {
      if (i + kThreads <= kChunks || i + threadIdx.x < kChunks) chunks[i + threadIdx.x] = {};
    }
    // In one place: a thread's barrier is another loop over the threads.
    constexpr int kBarriers = 2 * (kStages + 2 * kItems);
    static_assert(sizeof(tiles_barriers) + sizeof(splits_barriers) + sizeof(work_barriers) ==
                  kBarriers * sizeof(gpu::Barrier));
    const int n = threadIdx.x, after_tiles = n - 2 * kStages;
    int count = 1;
    if (n < kStages) count = kDecodeProducers * gpu::kWarpSize + (has_scales ? 1 : 0);
    if (after_tiles >= 2 * kItems) count = gpu::kWarpSize + 1;
    if (after_tiles >= 3 * kItems) count = kWarps;
    if (n < kBarriers) gpu::InitBarrier(&tiles_barriers.filled[0] + n, count);
  }

  // From the warp of K to that of V.
  __device__ void HandOver(const DecodeSplit& split, ItemState stage) {
    splits_barriers.WaitFreed(stage);
    __syncwarp();  // a lane that came later could wait for the phase after that
    if (threadIdx.x % gpu::kWarpSize > 0) return;
    splits[stage.index] = split;
    gpu::Arrive(&splits_barriers.filled[stage.index]);
  }
  __device__ void Receive(DecodeSplit* split, ItemState stage) {
    splits_barriers.WaitFilled(stage);
    *split = splits[stage.index];
    splits_barriers.Free(stage);
  }
};

// The first warp finds the work items and copies K. The second one prepares the work items for the
// consumers, and copies queries and V. All lanes call each function.
template <typename T, typename C, int kHeadSize, int kKib, bool kPartsAreInBlocks>
class DecodeProducer {
  using Shared = DecodeShared<T, C, kHeadSize, kKib>;
  using QueryRows = typename Shared::QueryRows;
  using CacheRows = typename Shared::CacheRows;
  using TileState = typename Shared::TileState;
  using ItemState = typename Shared::ItemState;
  static constexpr int kTile = Shared::kTile;
  static constexpr int kParts = kTile / kDecodePart;

 public:
  __device__ DecodeProducer(const Params& p, const DecodeNumbers& numbers, bool copies_keys,
                            Shared* shared)
      : p_(p),
        numbers_(numbers),
        shared_(*shared),
        lane_(threadIdx.x % gpu::kWarpSize),
        copies_keys_(copies_keys),
        cache_(copies_keys ? numbers.keys : numbers.values) {}

  // Goes through the splits that `find_next` finds: find_next(&split, stage).
  template <typename FindNext>
  __device__ void Run(const FindNext& find_next) {
    DecodeSplit work, next;
    work.begin_tile = work.end_tile = 0;  // no tiles; nothing else of it is read
    for (ItemState stage;; stage = stage.Next()) {
      find_next(&next, stage);
      CopyTiles(work, next);
      if (!copies_keys_) PublishWork(next, stage);
      if (next.IsEnd()) break;
      work = next;
    }
    gpu::CommitCopies();
    gpu::WaitCopies<0>();
  }

 private:
  // What the consumers need of a split, and its query.
  __device__ void PublishWork(const DecodeSplit& split, ItemState stage) {
    shared_.work_barriers.WaitFreed(stage);
    DecodeWork& work = shared_.work[stage.index];
    const Item item = split.AsItem(numbers_.group);
    float k_scale = 1, v_scale = 1;  // on their way until the query is there, too
    if (kIs8Bit<C> && p_.ScalesAreUniform() && !split.IsEnd()) {
      k_scale = p_.k_scale.At(0, 0, item.kv_head);
      v_scale = p_.v_scale.At(0, 0, item.kv_head);
    }
    if (lane_ < kDecodeRows) {
      DecodeRow row = {};
      if (lane_ < item.num_rows) {
        row.token = numbers_.TokenOf(lane_);
        row.head = HeadOf(item, lane_, row.token);
        row.range = RowRange::OfToken(p_, item, row.token);
      }
      work.rows[lane_] = row;
    }
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
    const bool is_missing = item.num_rows <= lane_ && lane_ < kDecodeRows;
    if (kIs8Bit<C> && is_missing) shared_.query_factors[stage.index][lane_] = k_scale;
    const bool is_bad = gpu::AnyInWarp(HasBadTree(p_, item, lane_));
    if (lane_ == 0) {
      work.split = split;
      work.is_bad = is_bad;
      if (kIs8Bit<C>) work.v_scale = v_scale;
      work.common = CommonRange(p_, item, item.first_position, item.context_len - 1);
    }
    __syncwarp();
    gpu::ArriveAfterCopies(&shared_.work_barriers.filled[stage.index]);
    if (lane_ == 0) gpu::Arrive(&shared_.work_barriers.filled[stage.index]);
    published_ = &work;
  }

  // The query head of a row.
  __device__ int32_t HeadOf(const Item& item, int row, int token) const {
    return item.kv_head * numbers_.group + row - token * numbers_.group;
  }

  // The block ids of a part of a work item, of which each lane holds a few. They are on their way
  // while the tiles of the part before are copied; nothing may use them in that loop.
  //
  // Where each part of a tile lies in one block, lane l has the id of the l-th block from the
  // tile's on. Elsewhere it has those of every 32nd position from position l on, or from RowOfLane
  // on where a tile has so many.
  static constexpr int kIds = kPartsAreInBlocks ? 1 : 2;
  static constexpr int kTilesOfIds = kIds * gpu::kWarpSize / kTile;

  // Of the tiles of a work item from `tile` on, up to the position `end`.
  __device__ void LoadIds(int32_t sequence, int32_t end, int32_t tile) {
    const auto* table = reinterpret_cast<const int32_t*>(
        reinterpret_cast<const char*>(p_.block_tables) +
        static_cast<uint32_t>(sequence) * uint64_t{numbers_.table_bytes});
    if constexpr (kPartsAreInBlocks) {
      first_block_ = numbers_.parts_of_block.Quotient(tile * kParts);
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
  __device__ void CopyTiles(const DecodeSplit& work, const DecodeSplit& next) {
    if (work.begin_tile == work.end_tile) {  // fewer instructions before the first copy
      LoadIds(next.sequence, next.end, next.begin_tile);
      return;
    }
    int32_t tile = work.begin_tile;
    if (copies_keys_) gpu::Stamp(gpu::Moment::kCopies, /*first_counts=*/true);
    do {
      const int32_t first_block = first_block_;
      int32_t ids[kIds], end = tile + kTilesOfIds;
#pragma unroll
      for (int i = 0; i < kIds; ++i) ids[i] = ids_[i];
      if constexpr (kPartsAreInBlocks) {
        end = TilesTo<kParts>((first_block + gpu::kWarpSize) * numbers_.parts_of_block.number);
      }
      const bool is_end = end >= work.end_tile;
      if (is_end) end = work.end_tile;
      LoadIds(is_end ? next.sequence : work.sequence, is_end ? next.end : work.end,
              is_end ? next.begin_tile : end);
      if constexpr (kPartsAreInBlocks) {
        CopyTilesOfParts(work, ids[0], tile * kParts - first_block * numbers_.parts_of_block.number,
                         tile, end);
      } else {
        CopyOtherTiles(work, ids, tile, end);
      }
      tile = end;
    } while (tile < work.end_tile);
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
  __device__ const char* FirstChunk(const DecodeSplit& work) const {
    const uint64_t first = static_cast<uint32_t>(work.kv_head) * static_cast<uint64_t>(cache_.head);
    // As one number: an offset that is added to it takes one instruction, not four.
    return gpu::Opaque(static_cast<const char*>(cache_.first) + (first + lane_ % kChunks) * 16);
  }

  // Copies tiles [tile, end), one at least, each part of which lies in one block. Rows and columns
  // out of range are filled with zeros. `id`: of the first part's block and those after it, in the
  // lanes.
  __device__ void CopyTilesOfParts(const DecodeSplit& work, int32_t id, int32_t part_in_block,
                                   int32_t tile, int32_t end) {
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
      int32_t blocks[kParts];  // of the parts
      int32_t begins[kParts];  // in the block
      bool is_bad = false;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int32_t block = blocks[part] = gpu::Shuffle(id, lane);
        begins[part] = part_in_block * kDecodePart;
        const uint32_t chunks = static_cast<uint32_t>(block) * cache_.block +
                                (begins[part] + first_row) * cache_.position;
        const char* row_from = from + uint64_t{chunks} * 16;
        const bool exists = HasChunk() && IsBlock(block);
        if (part == 0) shared_.tiles_barriers.WaitFreed(stage);
        C* to = RowsOf(stage);
#pragma unroll
        for (int row = part * kDecodePart; row < (part + 1) * kDecodePart; row += kRowsAtOnce) {
          gpu::CopyAsync16(to + CacheRows::Offset(row, 0), row_from,
                           exists && after_begin + row < count);
          row_from += step;
        }
        const int32_t begin = tile * kTile + part * kDecodePart, end_of_part = begin + kDecodePart;
        const bool is_needed = kParts == 1 || (begin < work.end && work.begin < end_of_part);
        is_bad |= is_needed && !IsBlock(block);  // some tables end with the last position
        if (++part_in_block == numbers_.parts_of_block.number) {
          part_in_block = 0;
          ++lane;
        }
      }
      if (kIs8Bit<C> && copies_keys_) {
        const int row = lane_ % kTile, part = row / kDecodePart;
        const int32_t block = blocks[part], offset = begins[part] + row % kDecodePart;
        const bool exists = IsBlock(block) && work.IsIn(tile * kTile + row);
        WriteScales(work, exists, block, offset, row, stage);
      }
      Arrive(stage, is_bad);
    } while (++tile < end);
  }

  // Copies tiles whose rows lie anywhere. A lane finds the slot of a position.
  __device__ void CopyOtherTiles(const DecodeSplit& work, int32_t (&ids)[kIds], int32_t tile,
                                 int32_t end) {
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
                         from + uint64_t{chunks} * 16, HasChunk() && chunks != kNoSlot);
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
  __device__ void WriteScales(const DecodeSplit& work, bool exists, int32_t block, int32_t offset,
                              int row, TileState stage) {
    if (p_.ScalesAreUniform()) return;
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
  const DecodeNumbers& numbers_;
  Shared& shared_;
  const int lane_;
  const bool copies_keys_;
  const CacheChunks cache_;
  DecodeWork* published_;  // the work item whose tiles are copied
  int32_t ids_[kIds];
  int32_t first_block_ = 0;  // that the lanes have ids of
  TileState next_stage_;     // of a tile
};

template <typename T, typename C, int kHeadSize, int kKib>
class DecodeConsumer {
  using Shared = DecodeShared<T, C, kHeadSize, kKib>;
  using QueryRows = typename Shared::QueryRows;
  using CacheRows = typename Shared::CacheRows;
  static constexpr int kTile = Shared::kTile;
  using Query = typename Shared::Query;
  using Products = WarpProducts<Query, C, kHeadSize, kTile, QueryRows, CacheRows>;

  // The rows of a work item that a warp finishes: every kWarps-th. Each lane has every 32nd column
  // of a row.
  static constexpr int kRows = kDecodeRows / kWarps;
  // How often the warps leave their sums in memory, and merge them.
  static constexpr int kRounds = kDecodeRows / Shared::kSumRows;
  static constexpr int kColumns = kHeadSize / gpu::kWarpSize;
  using Row = PartOfRow<kColumns>;

 public:
  __device__ DecodeConsumer(const Params& p, const Scratch& scratch, const DecodeNumbers& numbers,
                            Shared* shared)
      : p_(p),
        scratch_(scratch),
        numbers_(numbers),
        shared_(*shared),
        lane_(threadIdx.x % gpu::kWarpSize),
        warp_(threadIdx.x / gpu::kWarpSize),
        scales_are_uniform_(p.ScalesAreUniform()) {}

  __device__ void Run() {
    gpu::WaitForKernelsBefore();  // arrivals are zero from now on
    ResetCounter(scratch_);
    if (numbers_.writes_other_rows) DecodeOtherRows<T>(p_, numbers_).Write();
    for (typename Shared::ItemState stage;; stage = stage.Next()) {
      shared_.work_barriers.WaitFilled(stage);
      const DecodeWork& work = shared_.work[stage.index];
      if (work.split.IsEnd()) return;
      Compute(work, shared_.query[stage.index], shared_.query_factors[stage.index]);
      if (warp_ == 0) gpu::Stamp(gpu::Moment::kLastTile);
      FinishSplit(work);
      if (warp_ == 0) gpu::Stamp(gpu::Moment::kFinished);
      shared_.work_barriers.Free(stage);
    }
  }

 private:
  // Computes the warp's tiles of a split, and leaves what it found in shared memory.
  __device__ void Compute(const DecodeWork& work, const Query* query, const float* query_factors) {
    const Item item = work.split.AsItem(numbers_.group);
    Softmax softmax(p_, item, lane_ / 4, work.rows[lane_ / 4].range,
                    work.rows[lane_ / 4 + 8].range);
    if constexpr (kIs8Bit<C>) {
      for (int r = 0; r < 2; ++r) softmax.MultiplyScale(r, query_factors[lane_ / 4 + 8 * r]);
    }
    const CommonRange common = work.common;
    Products products;
    const int32_t first_tile = work.split.begin_tile, end_tile = work.split.end_tile;
    const int32_t turn = (warp_ + work.split.flags) & DecodeSplit::kTurn;
    for (int32_t tile = first_tile + turn; tile < end_tile; tile += kWarps) {
      const auto stage = Shared::TileState::Of(count_ + (tile - first_tile));
      const PositionScales* scales = shared_.scales[stage.index];
      C* keys = shared_.tiles[stage.index];
      C* values = p_.is_latent ? keys : keys + kHeadSize;
      const int32_t begin = tile * kTile;
      shared_.tiles_barriers.WaitFilled(stage);
      if (warp_ == 0) gpu::Stamp(gpu::Moment::kFirstTile, /*first_counts=*/true);
      float logits[kTile / 8][4] = {};
      Products::MultiplyByKeys(query, 0, keys, 0, logits);
      if (kIs8Bit<C> && !scales_are_uniform_) Products::ScaleLogits(scales, logits);
      softmax.ToLogits(begin, /*masked=*/!common.Contains(begin, begin + kTile), logits);
      float rescales[2];
      softmax.Weigh(logits, rescales);
      Softmax::RescaleSums(rescales, products.sums);
      if constexpr (!kIsInteger<C>) {
        if (common.RowsDiffer(item, begin, begin + kTile)) {
          SetAsideNonFinite(softmax, begin, scales, values, products.sums);
        }
      }
      if (kIs8Bit<C> && !scales_are_uniform_) {
        Products::ScaleWeights(scales, logits);
        products.template AddValues<BFloat16>(values, 0, logits);
      } else {
        products.template AddValues<Query>(values, 0, logits);
      }
      shared_.tiles_barriers.Free(stage);
    }
    count_ += end_tile - first_tile;
    if (static_cast<uint32_t>(item.split) % kSplitsOfGroup == 0) merges_ = true;
    const RowState states[2] = {softmax.State(0), softmax.State(1)};
    const auto leave_sums = [&](int first_row) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = lane_ / 4 + 8 * r - first_row;
        if (kRounds > 1 && (row < 0 || row >= Shared::kSumRows)) continue;
        products.StoreInGroups(r, states[r], &shared_.states[warp_][row], shared_.sums[warp_][row],
                               SwizzleOf(row));
      }
      gpu::SyncThreads(kDecodeConsumersBarrier, kThreads);
    };
    leave_sums(0);
    if constexpr (kRounds > 1) {
      MergeRound(0, work);
#pragma unroll
      for (int round = 1; round < kRounds; ++round) {
        if (round * Shared::kSumRows >= item.num_rows) break;
        gpu::SyncThreads(kDecodeConsumersBarrier, kThreads);  // the round before is merged
        leave_sums(round * Shared::kSumRows);
        MergeRound(round, work);
      }
    }
  }

  // Merges what the warps found of the rows of a round, of which this warp has one.
  __device__ __forceinline__ void MergeRound(int round, const DecodeWork& work) {
    static_assert(kRounds == 1 || Shared::kSumRows == kWarps, "a warp merges one row of a round");
    merged_[round] = MergeBefore(round, work, MergeWarps(warp_, work));
  }

  // A weight of zero times an infinite or NaN value would spoil a row's sum. If the tile holds such
  // values, this adds them to the rows that attend to them and then sets them to zero in the tile.
  __device__ void SetAsideNonFinite(const Softmax& softmax, int32_t begin,
                                    const PositionScales* scales, C* values,
                                    float (&sums)[kHeadSize / 8][4]) {
    const auto element = [&](int i) {
      return values + i / kHeadSize * CacheRows::kStride + i % kHeadSize;
    };
    const auto chunk = [&](int i) {
      return values + CacheRows::Offset(i / CacheRows::kChunks, i % CacheRows::kChunks);
    };
    constexpr int kChunks = kTile * CacheRows::kChunks, kCount = kTile * kHeadSize;
    if (!gpu::AnyInWarp(HoldsNonFinite<C>(lane_, kChunks, gpu::kWarpSize, chunk))) return;
    softmax.template AddNonFinite<kTile>(
        begin, sums,
        [&](int j, int n, int e) {
          return Products::Number(values + j * CacheRows::kStride, n, e);
        },
        [&](float value, int j) {
          return kIs8Bit<C> && !scales_are_uniform_ ? value * scales[j].v_scale : value;
        });
    __syncwarp();
    ClearNonFinite(lane_, kCount, gpu::kWarpSize, element);
    __syncwarp();
  }

  // Merges what the warps found of a split, and merges that with the splits before, or leaves it
  // for the thread block that merges all. The code is there once for all rows of the warp, and for
  // rows that this block merges last: it takes long to come, and most calls have one row.
  __device__ void FinishSplit(const DecodeWork& work) {
    const Item item = work.split.AsItem(numbers_.group);
    const int32_t in_group = static_cast<uint32_t>(item.split) % kSplitsOfGroup;
    ++num_splits_;
    const bool ends = item.split + 1 == item.num_splits;
    const bool ends_group = ends || in_group == kSplitsOfGroup - 1;
    bool is_whole = merges_ && ends && item.split == in_group;
    bool comes_last = false;
#pragma unroll 1
    do {
#pragma unroll 1
      for (int i = 0; i * kWarps + warp_ < item.num_rows; ++i) {
        const int row = i * kWarps + warp_;
        const RowPlace place(work.rows[row].token, work.rows[row].head);
        Row merged;
        if (comes_last) {
          merged = MergeAll(item, place);
        } else {
          merged = kRounds > 1 ? Merged(i) : MergeBefore(i, work, MergeWarps(row, work));
        }
        if (is_whole) {
          WriteRow<T>(p_, item.first_token + place.token, place.head, lane_,
                      p_.Attends(item.Tokens(), place.token), merged);
        } else if (!merges_ || ends_group || work.split.IsLast()) {
          WritePartialResult(item, place, merged, merges_ ? in_group : 0);
        } else {
#pragma unroll
          for (int j = 0; j < kRows; ++j) {
            if (i == j) merged_[j] = merged;
          }
        }
      }
      gpu::SyncThreads(kDecodeConsumersBarrier, kThreads);  // everyone has left the sums
      if (is_whole || !work.split.IsLast()) break;
      is_whole = comes_last = ComesLast(work.split);
    } while (comes_last);
    if (!work.split.IsLast()) return;
    num_splits_ = 0;
    merges_ = false;
  }

  // What a split has for the warp's row i, merged with the splits of its group before, if they are
  // this block's.
  __device__ __forceinline__ Row MergeBefore(int i, const DecodeWork& work,
                                             const Row& found) const {
    if (!merges_ || work.split.split % kSplitsOfGroup == 0) return found;
    Row merged = Merged(i);
    merged.Merge(found);
    return merged;
  }

  __device__ __forceinline__ Row Merged(int i) const {
    Row merged = merged_[0];
#pragma unroll
    for (int j = 1; j < kRows; ++j) {
      if (i == j) merged = merged_[j];
    }
    return merged;
  }

  // Counts the block's splits of a sequence and kv head, whose partial results are written. Returns
  // whether all are there now. Nobody waits: if the lengths change, so that thread blocks disagree
  // on the number of splits, rows are wrong or not written.
  __device__ bool ComesLast(const DecodeSplit& split) {
    if (threadIdx.x == 0) {
      int32_t* arrivals =
          scratch_.arrivals + int64_t{split.sequence} * numbers_.num_kv_heads + split.kv_head;
      const int32_t before = gpu::AddInOrder(arrivals, num_splits_);
      shared_.is_last = before + num_splits_ == split.num_splits;
    }
    gpu::SyncThreads(kDecodeConsumersBarrier, kThreads);
    return shared_.is_last != 0;
  }

  __device__ Row MergeAll(const Item& item, const RowPlace& place) const {
    const int64_t first = PartialOf(scratch_, item, place) - item.split;
    Row merged;
    MergeSplits(p_, scratch_, first, item.num_splits, place.head, lane_, &merged);
    return merged;
  }

  // Of a split that has a bad block id or tree mask, all is NaN, and so is what it is merged with.
  __device__ Row MergeWarps(int row, const DecodeWork& work) const {
    const MergedParts parts(kWarps, -kInfinity, [&](int w) { return shared_.states[w][row]; });
    const bool is_bad = work.is_bad != 0;
    const float nan = kInfinity - kInfinity;
    Row merged;
    merged.state = {parts.state.max, is_bad ? nan : parts.state.sum};
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      const int place = Products::PlaceOf(ColumnOf(k)) ^ SwizzleOf(row);
      float value = parts.Sum(kWarps, [&](int w) { return shared_.sums[w][row][place]; });
      // Without keys the scale may be NaN.
      if (kIs8Bit<C> && parts.state.sum != 0) value *= work.v_scale;
      merged.values[k] = is_bad ? nan : value;
    }
    return merged;
  }

  // Without it, all rows of the sums would begin in the same bank of shared memory.
  static __device__ __forceinline__ int SwizzleOf(int row) {
    return row * Products::kBanksOfGroups % gpu::kWarpSize;
  }

  __device__ __forceinline__ int ColumnOf(int k) const { return k * gpu::kWarpSize + lane_; }

  // Writes the partial result of a split, and of as many before it as are moved there.
  __device__ void WritePartialResult(const Item& item, const RowPlace& place, const Row& row,
                                     int32_t num_moved) const {
    const int64_t index = PartialOf(scratch_, item, place) * p_.num_heads + place.head;
    float* partial = scratch_.partials + index * p_.value_head_size;
    const auto num_columns = static_cast<int>(p_.value_head_size);
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      if (ColumnOf(k) < num_columns) partial[ColumnOf(k)] = row.values[k];
    }
    if (lane_ == 0) scratch_.states[index] = row.state;
    if (0 < lane_ && lane_ <= num_moved) {
      scratch_.states[index - lane_ * p_.num_heads] = {-kInfinity, kMoved};
    }
  }

  const Params& p_;
  const Scratch& scratch_;
  const DecodeNumbers& numbers_;
  Shared& shared_;
  const int lane_;
  const int warp_;
  const bool scales_are_uniform_;
  uint32_t count_ = 0;  // tiles of the items before
  // The block's splits of this sequence and kv head: how many, and whether it has all of their
  // group so far, which it merges.
  int32_t num_splits_ = 0;
  bool merges_ = false;
  Row merged_[kRows] = {};
};

// Whether a call has none of the features that few calls have: a kernel without them is smaller.
inline bool IsPlain(const Params& p, const DecodeNumbers& numbers) {
  return p.is_causal && !p.is_latent && p.soft_cap == 0 && p.alibi_slopes == nullptr &&
         p.ScalesAreUniform() && p.tree_mask == nullptr && p.bidirectional_ranges == nullptr &&
         numbers.TilesFit31Bits();
}

// The parameters of a call that IsPlain, as the compiler sees it, too.
__device__ __forceinline__ Params PlainParams(const Params& p) {
  Params plain = p;
  plain.is_causal = true;
  plain.window_right = 0;
  plain.causal = nullptr;
  plain.is_latent = false;
  plain.soft_cap = 0;
  plain.alibi_slopes = nullptr;
  plain.tree_mask = plain.bidirectional_ranges = nullptr;
  plain.k_scale.block_stride = plain.k_scale.position_stride = 0;
  plain.v_scale.block_stride = plain.v_scale.position_stride = 0;
  return plain;
}

// kIsPlain: see IsPlain. kPartsAreInBlocks: see DecodeNumbers.
template <typename T, typename C, int kHeadSize, int kKib, bool kIsPlain, bool kPartsAreInBlocks>
__global__ void __launch_bounds__(kDecodeThreads, DecodeShared<T, C, kHeadSize, kKib>::kBlocks)
    DecodeAttention(Params params, Scratch scratch, DecodeNumbers numbers) {
  using Shared = DecodeShared<T, C, kHeadSize, kKib>;
  using Schedule =
      DecodeSchedule<kIsPlain, Shared::kTile, std::conditional_t<kIsPlain, int32_t, int64_t>>;
  static_assert(sizeof(Shared) <= Shared::kBytes, "a multiprocessor holds kBlocks thread blocks");
  const Params p = kIsPlain ? PlainParams(params) : params;
  auto* shared = reinterpret_cast<Shared*>(gpu::SharedMemory());
  const int warp = gpu::Shuffle(static_cast<int>(threadIdx.x / gpu::kWarpSize), 0);
  gpu::BeginStamps();
  if (warp < kWarps) shared->Init(kIs8Bit<C> && !p.ScalesAreUniform());
  if (!numbers.follows_zeros) gpu::WaitForKernelsBefore();
  // The next kernel, too, reads what those before this call have written.
  gpu::LetNextKernelBegin();
  Schedule schedule(p, numbers, /*loads=*/warp == kWarps);  // on their way while the others come
  __syncthreads();
  if (warp < kWarps) {
    if (warp == 0) gpu::Stamp(gpu::Moment::kReady);
    DecodeConsumer<T, C, kHeadSize, kKib>(p, scratch, numbers, shared).Run();
    gpu::PrintStamps();
    return;
  }
  const auto produce = [&](bool copies_keys) {
    if (copies_keys) schedule.Start();
    DecodeProducer<T, C, kHeadSize, kKib, kPartsAreInBlocks>(p, numbers, copies_keys, shared)
        .Run([&](DecodeSplit* split, auto stage) {
          if (copies_keys) {
            schedule.Next(split);
            gpu::Stamp(gpu::Moment::kScheduled, /*first_counts=*/true);
            shared->HandOver(*split, stage);
          } else {
            shared->Receive(split, stage);
          }
        });
  };
  if (!kIsPlain) {
    produce(warp == kWarps);  // the same code for both warps: there is much of it
  } else if (warp == kWarps) {
    produce(true);
  } else {
    produce(false);
  }
}

}  // namespace xla_gpu::paged_attention
