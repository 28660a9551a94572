// Attention of long queries on sm_90a. What it adds to tensor_core.cuh:
//
// - A warpgroup of four warps multiplies 64 rows at a time and reads K and V directly from shared
//   memory.
// - A thread block has three warpgroups. The producer finds the work items and copies their query
//   and KV tiles to shared memory. The two consumers each compute 64 rows of an item. Barriers in
//   shared memory say that a place is filled, or that it is free again. The producer thus runs
//   ahead by as many KV tiles as there is memory for, across items too.
// - A consumer starts the product with the next tile's keys before the product with this tile's
//   values. It turns the next logits into weights while the values are multiplied.
// - The consumers start their products in turn. While the tensor cores compute the products of one,
//   the other turns its logits into weights.
// - Each consumer knows the positions that its rows attend to. It skips other KV tiles, and applies
//   masks only to the tiles that they cut.
// - The producer widens a cache of 8 bits to float16, and converts its query to float16. The range
//   suffices: a query row is divided by a power of two, and weights are not multiplied by scales,
//   which all positions share.
//
// Sums have the one order of all kernels (order.h). A leaf is added up in registers. The leaves
// before it are added up in memory (Scratch::Slot), to which the last turn of each leaf adds it:
// nobody waits for that, and the addresses stay in the L2 cache. Where a row's reference changes
// behind the first 32 positions of a tile, the four warps multiply V in steps of 32 positions.
//
// Values that are infinite or NaN stay out of products where rows of the item differ in what they
// attend to. Both consumers add them to sums of rows that do, and then make them zeros.
//
// Who fills a place in shared memory, and who frees it (Shared has the places, `filled` and
// `freed` their barriers):
//
//   work    kItems        by a thread of the producer for each consumer; freed by the warps of both
//                         when they have written the rows
//   query   1 a consumer  by all threads of the producer; freed by the warps of the consumer after
//                         its last product with keys
//   keys    kStages       by all threads of the producer, or by tensor copies for which one lane of
//                         each of its warps arrives; freed by the warps of both consumers after
//                         their products with the query
//   values  kStages       the same; freed by the warps of both consumers after their products with
//                         the weights
//
// Tensor copies bring the KV tiles that lie wholly in an item, if its blocks have a multiple of
// kBoxPositions and there are maps of the cache (Maps). Threads copy other tiles: behind the
// end may be NaN, which a weight of zero would not remove. A consumer has fenced what threads wrote
// when it frees a place, as a tensor copy may fill it next. What the producer widens it fences
// itself: a consumer's turn is the longer one.
//
// Where V is a part of K, the places of keys are freed as those of values, and no others are used.
// V of a tile has the place behind that of its K, so that K of a tile and V of the tile before,
// which a consumer multiplies in one turn, have places of the same number. The first place of V is
// skipped, once, before the first tile.
//
// The producer fills in this order: keys and values tile by tile, the query between them, the next
// item's work when all places are full (Producer::CopyTiles). A place is filled again for
// the next tile, whichever item's it is: a place that a consumer has not freed is the only thing
// that the producer waits for. The consumers free all tiles of an item, also those that they skip.
//
// A second place for a query would fit with heads of 64 alone. With 128, 192 and 256, what there is
// takes 224, 192 and 192 of 227 KiB, and a query 32, 48 and 64. None is needed: a query is free
// when the last product with keys ends. The next one is copied while a consumer turns logits into
// weights, multiplies them and writes its rows.
//
// Between two items the tensor cores wait for the consumers: for the logits and the masked weights
// of the last tile, until infinite values have been looked for, for the last product, for the rows
// that are written, and for the ranges of the next rows. Divisions by the size of the group would
// take 2,100 cycles more, in a model of the machine code. Nobody waits for the producer: it has
// found the item, and it copies the query with 300 instructions when the logits are there.
//
// A call without rare features takes a kernel that is compiled for such calls alone
// (plain_calls.cuh), if the cache has 16 bits. A short call runs most instructions once, so their
// fetch takes long.
#pragma once

#include "../../../gpu/sm90.cuh"
#include "../mask.cuh"
#include "../pipeline.cuh"
#include "../schedule.cuh"

namespace xla_gpu::paged_attention::sm90 {

inline constexpr int kConsumers = 2;
inline constexpr int kConsumerRows = 64;  // rows of a warpgroup's product
inline constexpr int kItemRows = kConsumers * kConsumerRows;
inline constexpr int kBlockThreads = (1 + kConsumers) * kThreads;

// Registers per thread. A thread block starts with all registers of a multiprocessor, divided
// evenly. Then the producer gives a part of its share to the consumers.
template <typename C, int kHeadSize>
struct Registers {
  static constexpr int kLaunch = 64 * 1024 / kBlockThreads / 8 * 8;
  static constexpr int kProducer = kIs8Bit<C> || kHeadSize == 64 ? 88 : 72;
  static constexpr int kConsumer = kIs8Bit<C> || kHeadSize == 64 ? 208 : 216;
  static_assert(kProducer + kConsumers * kConsumer <= (1 + kConsumers) * kLaunch,
                "consumers would wait for registers for ever");
};

// Named barriers of the thread block, besides the schedule's. Each consumer has two.
inline constexpr int kTurnBarrier = 1;
inline constexpr int kThreadsBarrier = kTurnBarrier + kConsumers;
inline constexpr int kConsumersBarrier = kThreadsBarrier + kConsumers;

// The layout in shared memory of rows of 16-bit elements, as a warpgroup's product reads them.
// Groups of 64 columns lie one after the other; within a group a row has 128 bytes. A row's eight
// chunks of 16 bytes are permuted (swizzled) by the row's number, so that the chunks of one column
// lie in different banks.
template <typename T, int kRows, int kColumns>
struct SwizzledRows {
  static constexpr int kBlockColumns = 64;
  static constexpr int kBlockElements = kRows * kBlockColumns;
  static constexpr int kElements = kRows * kColumns;
  static constexpr int kChunk = 8;  // elements
  static constexpr int kChunks = kColumns / kChunk;
  static_assert(kRows % 8 == 0 && kColumns % kBlockColumns == 0, "the pattern has 8 rows");

  static __device__ __forceinline__ int Offset(int row, int chunk) {
    return chunk / 8 * kBlockElements + row * kBlockColumns + (chunk % 8 ^ row % 8) * kChunk;
  }

  // PTX ISA, "Matrix Descriptor Format" of wgmma: the start address, the bytes to the next 64
  // columns (where a product sums over rows) and the bytes to the next 8 rows, each divided by 16;
  // then the code for 128-byte swizzling.
  static constexpr int kUnit = 16;  // bytes
  static constexpr int kUnits = kElements * sizeof(T) / kUnit;

  // The descriptor of the last 16 columns takes no sum. The distances to the others are negative,
  // and no powers of two (AddToDescriptor).
  static XLA_GPU_HOST_DEVICE constexpr int UnitsTo(int row, int column) {
    const int before =
        column / kBlockColumns * kBlockElements + row * kBlockColumns + column % kBlockColumns;
    return before * static_cast<int>(sizeof(T)) / kUnit;
  }
  static constexpr int kToLast = UnitsTo(0, kColumns - 16);

  // Where a descriptor of some rows begins, and the descriptor.
  static __device__ __forceinline__ uint32_t StartOf(const T* rows) {
    return gpu::SharedAddress(rows) / kUnit + kToLast;
  }
  static __device__ __forceinline__ uint64_t Descriptor(uint32_t start) {
    constexpr uint32_t kGroupUnits = 8 * kBlockColumns * sizeof(T) / kUnit;
    return start | uint64_t{kGroupUnits | 1u << 30} << 32;
  }

  // Descriptor of the columns [column, column + 16) of all rows, which a product sums over.
  static __device__ __forceinline__ uint64_t Columns(uint64_t descriptor, int column, int one) {
    return gpu::AddToDescriptor(descriptor, UnitsTo(0, column) - kToLast, one);
  }

  // Descriptor of the rows [row, row + 16) from a group of columns on; a product sums over the
  // rows. They begin `behind` units behind those of the descriptor.
  static __device__ __forceinline__ uint64_t Rows(uint64_t descriptor, int behind, int row,
                                                  int column, int one) {
    constexpr int kBlockUnits = kBlockElements * sizeof(T) / kUnit;
    return gpu::AddToDescriptor(descriptor,
                                behind + UnitsTo(row, column) - kToLast + (kBlockUnits << 16), one);
  }
};

// A consumer's part of a work item. Some of the item's KV tiles may hold no positions of its rows.
struct Work {
  Item item;  // num_rows = -1 marks the end
  Item rows;
  CommonRange common;  // of the item's rows
  int32_t token;       // of the first row, counted from the sequence's first
  int32_t head;        // of the first row, among those of the kv head
  uint32_t number;     // among the items of the thread block
  float k_scale;       // of an 8-bit cache, for all positions
  float v_scale;
  bool scale_late;  // all rows of an 8-bit cache, whatever their scales: Softmax::ScalesLate
};

// The shared memory of a thread block. T: type of the query. C: type of the cache.
template <typename T, typename C, int kHeadSize>
struct Shared {
  using Element = std::conditional_t<kIs8Bit<C>, Half, T>;
  static constexpr int kTile = kHeadSize <= 128 ? 128 : 64;  // positions
  static constexpr int kItems = 3;                           // work items in memory
  using QueryRows = SwizzledRows<Element, kConsumerRows, kHeadSize>;
  using CacheRows = SwizzledRows<Element, kTile, kHeadSize>;
  // KV tiles in memory. A thread block has 227 KiB, 2 of them for all that is small.
  static constexpr int kStagesThatFit =
      (225 * 1024 / 2 - kConsumers * QueryRows::kElements) / (2 * CacheRows::kElements);
  static constexpr int kStages = kStagesThatFit < 4 ? kStagesThatFit : 4;
  static_assert(kStages >= 2, "a tile is copied while another one is read");
  using TileState = PipelineState<kStages>;
  using ItemState = PipelineState<kItems>;
  using QueryState = PipelineState<1>;

  // Where V is a part of K, the keys of a tile are its values too, and are free when these are. For
  // a cache of 8 bits the producer has no registers for the distinction.
  static __device__ __forceinline__ bool KeysHoldValues(const Params& p) {
    return !kIs8Bit<C> && p.is_latent;
  }

  alignas(1024) Element query[kConsumers][QueryRows::kElements];
  alignas(1024) Element keys[kStages][CacheRows::kElements];
  alignas(1024) Element values[kStages][CacheRows::kElements];
  float query_factors[kConsumers][kConsumerRows];  // of an 8-bit cache: the powers of two
  PipelineBarriers<1> query_barriers[kConsumers];
  PipelineBarriers<kStages> keys_barriers;
  PipelineBarriers<kStages> values_barriers;
  PipelineBarriers<kItems> items_barriers;
  Work work[kItems][kConsumers];
  Schedule::Shared schedule;
  int32_t number;  // of the producer's next work item
  // Whether references of a warp's rows change inside a tile (Consumer::InBlocks), for the
  // turn that multiplies its values. A warp may write that of the next turn while another one
  // reads.
  alignas(16) uint32_t in_blocks[kConsumers][2][kWarps];
  // Then, by how many powers of two the sums of a row shrink before each block but the first.
  uint8_t drops[kConsumers][kTile / 32 - 1][kConsumerRows];

  // One thread calls it.
  __device__ void Init() {
    for (PipelineBarriers<1>& barriers : query_barriers) barriers.Init(kThreads, kWarps);
    keys_barriers.Init(kThreads, kConsumers * kWarps);
    values_barriers.Init(kThreads, kConsumers * kWarps);
    items_barriers.Init(kConsumers, kConsumers * kWarps);
    for (auto& turns : in_blocks) {
      for (auto& warps : turns) {
        for (uint32_t& is_one : warps) is_one = 0;
      }
    }
    Item& before_first = work[kItems - 1][0].item;
    before_first = {};
    before_first.kv_head = -1;  // it has nothing to report
    if (!kIs8Bit<C>) gpu::FenceBarriers();
  }
};

}  // namespace xla_gpu::paged_attention::sm90
