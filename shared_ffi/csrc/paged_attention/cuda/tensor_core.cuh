// Attention on tensor cores for float16 and bfloat16 queries, on any GPU from sm_80 on.
//
// A thread block computes the rows of a work item, one KV tile after the other. Later KV tiles are
// copied to shared memory meanwhile. The warps divide a tile in one of two ways. With many rows,
// each warp has 16 rows and all positions. With few rows, all warps have the same rows and each has
// a part of the positions; their partial results are merged at the end in a fixed order.
//
// KV tiles of an 8-bit cache are copied unchanged. A register with four 8-bit numbers becomes two
// registers of 16-bit numbers right before the product.
#pragma once

#include "softmax.cuh"

namespace xla_gpu::paged_attention {

inline constexpr int kRowsPerWarpTile = 16;  // rows of a tensor core product

// The layout in shared memory of rows of head_size elements, in chunks of 16 bytes. The chunks of
// one column in eight adjacent rows must lie in different banks. If a row is a multiple of all
// banks, chunks are swizzled; otherwise rows are an odd number of chunks apart. kHeadSize is
// head_size rounded up to a compiled size; the columns past head_size are zero.
template <typename Element, int kHeadSize>
struct SharedRows {
  static constexpr int kChunk = 16 / sizeof(Element);  // elements of a chunk
  static constexpr int kChunks = kHeadSize / kChunk;
  static constexpr bool kIsSwizzled = kChunks % 8 == 0;
  static constexpr int kStride = (kIsSwizzled ? kChunks : kChunks | 1) * kChunk;
  static_assert(kChunks % 2 == 0, "chunks are multiplied in pairs");

  static __device__ __forceinline__ int Offset(int row, int chunk) {
    return row * kStride + (kIsSwizzled ? chunk ^ (row % 8) : chunk) * kChunk;
  }

  static __device__ __forceinline__ int ElementOffset(int row, int column) {
    return Offset(row, column / kChunk) + column % kChunk;
  }
};

// The shared memory of a thread block. T: type of the query. C: type of the cache.
template <typename T, typename C, int kHeadSize>
struct TensorCoreLayout {
  using QueryRows = SharedRows<T, kHeadSize>;
  using CacheRows = SharedRows<C, kHeadSize>;
  static constexpr int kTile = kHeadSize <= 128 ? 64 : 32;  // positions
  static constexpr int kStages = kIs8Bit<C> ? 3 : 2;        // KV tiles in memory
  static constexpr int kSlotTiles = kStages + 1;            // KV tiles whose slots are in memory
  static constexpr int kFewWarpRows = kTile == 64 ? 1 : 2;  // 16 positions for each warp
  static constexpr int kTileElements = kTile * CacheRows::kStride;
  static constexpr int kTilesBytes = kStages * 2 * kTileElements * static_cast<int>(sizeof(C));

  // For a query tile of `warp_rows` groups of 16 rows.
  XLA_GPU_HOST_DEVICE static constexpr int QueryBytes(int warp_rows) {
    return warp_rows * kRowsPerWarpTile * QueryRows::kStride * static_cast<int>(sizeof(T));
  }
  static constexpr int SharedBytes(int warp_rows) {
    return kTilesBytes + QueryBytes(warp_rows) +
           kSlotTiles * kTile * static_cast<int>(sizeof(Slot<C>)) +
           static_cast<int>(sizeof(Schedule::Shared)) +
           kWarps * kRowsPerWarpTile * static_cast<int>(sizeof(RowState));
  }

  static_assert(kWarps * kRowsPerWarpTile * kHeadSize * 4 <= kTilesBytes + QueryBytes(kFewWarpRows),
                "the sums of all warps take the place of the tiles and the query");

  C* tiles;        // [kStages][K, V][kTile] rows
  T* query;        // [warp_rows * kRowsPerWarpTile] rows
  Slot<C>* slots;  // [kSlotTiles][kTile]; offset -1 gives zeros
  Schedule::Shared* schedule;
  RowState* states;  // [kWarps][kRowsPerWarpTile]
  float* sums;       // [kWarps][kRowsPerWarpTile][kHeadSize], in the memory of tiles and query

  __device__ TensorCoreLayout(char* memory, int warp_rows)
      : tiles(reinterpret_cast<C*>(memory)),
        query(reinterpret_cast<T*>(memory + kTilesBytes)),
        slots(reinterpret_cast<Slot<C>*>(memory + kTilesBytes + QueryBytes(warp_rows))),
        schedule(reinterpret_cast<Schedule::Shared*>(slots + kSlotTiles * kTile)),
        states(reinterpret_cast<RowState*>(schedule + 1)),
        sums(reinterpret_cast<float*>(memory)) {}

  __device__ C* Key(int32_t tile) const { return tiles + tile % kStages * 2 * kTileElements; }
  __device__ C* Value(int32_t tile) const { return Key(tile) + kTileElements; }
  __device__ Slot<C>* Slots(int32_t tile) const { return slots + tile % kSlotTiles * kTile; }
};

// Computes one work item. kWarpRows groups of warps have 16 rows each; the warps of a group divide
// the positions.
template <typename T, typename C, int kHeadSize, int kWarpRows>
class TensorCoreItem {
  using Layout = TensorCoreLayout<T, C, kHeadSize>;
  using QueryRows = typename Layout::QueryRows;
  using CacheRows = typename Layout::CacheRows;
  // The type that weights are rounded to. Multiplied by the scales of an 8-bit cache, they need the
  // range of bfloat16.
  using Weight = std::conditional_t<kIs8Bit<C>, BFloat16, T>;
  static constexpr int kStages = Layout::kStages;
  static constexpr int kParts = kWarps / kWarpRows;
  static constexpr int kTile = Layout::kTile;
  static constexpr int kKeys = kTile / kParts;  // positions of a KV tile for each warp
  static constexpr int kRows = kWarpRows * kRowsPerWarpTile;
  static constexpr int kSteps = kIs8Bit<C> ? 2 : 1;  // products for each pair of chunks
  static_assert(kKeys % 16 == 0, "the product over positions takes 16 at a time");

 public:
  __device__ TensorCoreItem(const Params& p, const Item& item, const Layout& layout)
      : p_(p),
        item_(item),
        layout_(layout),
        lane_(threadIdx.x % gpu::kWarpSize),
        warp_row_(threadIdx.x / gpu::kWarpSize % kWarpRows * kRowsPerWarpTile),
        part_(kParts == 1 ? 0 : threadIdx.x / gpu::kWarpSize / kWarpRows),
        softmax_(p, item, warp_row_ + lane_ / 4),
        is_bad_(HasBadTree(p, item, threadIdx.x)) {}

  __device__ void Compute(const Scratch& scratch) {
    const int32_t first = item_.begin / kTile;
    const int32_t end = max(first, (item_.end + kTile - 1) / kTile);
    for (int i = 0; i < kStages; ++i) StoreSlot(first + i, FindSlotOf(first + i));
    CopyQuery();
    gpu::SyncBlock();
    for (int i = 0; i < kStages - 1; ++i) {
      CopyTile(first + i);
      gpu::CommitCopies();
    }
    for (int32_t tile = first; tile < end; ++tile) {
      gpu::WaitCopies<kStages - 2>();
      gpu::SyncBlock();  // the tile is here, and everyone has left the one before
      CopyTile(tile + kStages - 1);
      gpu::CommitCopies();
      const Slot<C> slot = FindSlotOf(tile + kStages);
      ComputeTile(tile);
      StoreSlot(tile + kStages, slot);
    }
    gpu::WaitCopies<0>();
    is_bad_ = gpu::AnyInBlock(is_bad_);  // everyone has left the tiles, whose place the sums take
    StoreSums();
    gpu::SyncBlock();
    const Parts parts{kParts, layout_.states, layout_.sums, kRows, kHeadSize};
    WriteRows<T>(p_, scratch, item_, parts, is_bad_);
  }

 private:
  // Thread j finds the slot of position j of a KV tile.
  __device__ Slot<C> FindSlotOf(int32_t tile) {
    const int32_t position = tile * kTile + threadIdx.x;
    if (threadIdx.x >= kTile || position < item_.begin || position >= item_.end) return {};
    return FindSlot<C>(p_, item_, position, &is_bad_);
  }

  __device__ void StoreSlot(int32_t tile, const Slot<C>& slot) {
    if (threadIdx.x < kTile) layout_.Slots(tile)[threadIdx.x] = slot;
  }

  __device__ void CopyQuery() {
    const auto copy = [&](int row, int chunk, const T* from, bool exists) {
      if constexpr (kIs8Bit<C>) {
        StoreAsKeysLie(row, chunk,
                       exists ? *reinterpret_cast<const FourPairs*>(from) : FourPairs());
      } else {
        gpu::CopyAsync16(layout_.query + QueryRows::Offset(row, chunk), from, exists);
      }
    };
    ForQueryChunks<T, QueryRows>(p_, item_, 0, kRows, threadIdx.x, copy);
  }

  struct alignas(16) FourPairs {
    uint32_t pair[4] = {};
  };
  struct alignas(8) TwoPairs {
    uint32_t pair[2];
  };

  // A lane's register of 8-bit keys holds 4 adjacent columns of 16. The product expects 2 adjacent
  // columns and the 2 columns that are 8 further. Any order of columns gives the same product, so
  // the query's columns are permuted to match.
  __device__ void StoreAsKeysLie(int row, int chunk, const FourPairs& columns) {
    const uint32_t(&pair)[4] = columns.pair;
    T* to = layout_.query + chunk % 2 * 4;
    const int even = QueryRows::Offset(row, chunk / 2 * 2);
    const int odd = QueryRows::Offset(row, chunk / 2 * 2 + 1);
    *reinterpret_cast<TwoPairs*>(to + even) = {pair[0], pair[2]};
    *reinterpret_cast<TwoPairs*>(to + odd) = {pair[1], pair[3]};
  }

  __device__ void CopyTile(int32_t tile) {
    const Slot<C>* slots = layout_.Slots(tile);
    C *keys = layout_.Key(tile), *values = layout_.Value(tile);
#pragma unroll 1  // the copies overlap all the same
    for (int i = threadIdx.x; i < kTile * CacheRows::kChunks; i += kThreads) {
      const int row = i / CacheRows::kChunks, chunk = i % CacheRows::kChunks;
      const int64_t slot = slots[row].offset;
      const int column = chunk * CacheRows::kChunk, to = CacheRows::Offset(row, chunk);
      const bool has_key = slot >= 0 && column < p_.head_size;
      const bool has_value = slot >= 0 && column < p_.value_head_size;
      const int64_t from = has_key ? slot + column : 0;
      gpu::CopyAsync16(keys + to, KeyOf<C>(p_, from, item_.kv_head), has_key);
      gpu::CopyAsync16(values + to, ValueOf<C>(p_, from, item_.kv_head), has_value);
    }
  }

  __device__ void ComputeTile(int32_t tile) {
    // The first position of the warp's part of the KV tile.
    const int32_t begin = tile * kTile + part_ * kKeys;
    float logits[kKeys / 8][4] = {};
    MultiplyByKeys(layout_.Key(tile), logits);
    if constexpr (kIs8Bit<C>) ScaleLogits(tile, logits);
    softmax_.ToLogits(begin, /*masked=*/true, logits);
    float shrinks[2];
    softmax_.Weigh(logits, shrinks);
    Softmax::Shrink(shrinks, sums_);
    const CommonRange common(p_, item_);
    if (!std::is_integral_v<C> && common.RowsDiffer(item_, tile * kTile, (tile + 1) * kTile)) {
      SetAsideNonFinite(tile, begin);
    }
    if constexpr (kIs8Bit<C>) ScaleWeights(tile, logits);
    AddValues(layout_.Value(tile), logits);
  }

  // logits = q k^T. Lane l holds the positions 2 * (l % 4) and the next one of each 8, for the rows
  // l / 4 and l / 4 + 8.
  __device__ void MultiplyByKeys(const C* keys, float (&logits)[kKeys / 8][4]) const {
#pragma unroll 2
    for (int chunk = 0; chunk < CacheRows::kChunks; chunk += 2) {
      uint32_t query[kSteps][4];
      const int query_row = warp_row_ + lane_ % 16;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int query_chunk = chunk * kSteps + 2 * step + lane_ / 16;
        gpu::LoadMatrices(query[step], layout_.query + QueryRows::Offset(query_row, query_chunk));
      }
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        const int row = part_ * kKeys + n * 16 + lane_ / 16 * 8 + lane_ % 8;
        uint32_t key[4];  // both chunks of 8 positions, then of the next 8
        gpu::LoadMatrices(key, keys + CacheRows::Offset(row, chunk + lane_ / 8 % 2));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float(&products)[4] = logits[2 * n + i];
          if constexpr (kIs8Bit<C>) {
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
              uint32_t pairs[2];
              gpu::Expand(key[2 * i + step], C{}, pairs, T{});
              gpu::MultiplyAdd(products, query[step], pairs[0], pairs[1], T{});
            }
          } else {
            gpu::MultiplyAdd(products, query[0], key[2 * i], key[2 * i + 1], T{});
          }
        }
      }
    }
  }

  __device__ void ScaleLogits(int32_t tile, float (&logits)[kKeys / 8][4]) const {
    const Slot<C>* slots = layout_.Slots(tile) + part_ * kKeys;
    Softmax::ForEach<kKeys / 8>([&](int n, int e, int j) { logits[n][e] *= slots[j].k_scale; });
  }

  // A weight of zero stays zero: where a row does not attend, the scale may be NaN.
  __device__ void ScaleWeights(int32_t tile, float (&weights)[kKeys / 8][4]) const {
    const Slot<C>* slots = layout_.Slots(tile) + part_ * kKeys;
    Softmax::ForEach<kKeys / 8>([&](int n, int e, int j) {
      weights[n][e] = weights[n][e] == 0 ? 0.0f : weights[n][e] * slots[j].v_scale;
    });
  }

  // A weight of zero times an infinite or NaN value would spoil a row's sum. If a KV tile holds
  // such values, this adds them to the rows that attend to them and then sets them to zero in the
  // tile.
  __device__ void SetAsideNonFinite(int32_t tile, int32_t begin) {
    C* values = layout_.Value(tile);
    const auto element = [&](int i) {
      return values + CacheRows::ElementOffset(i / kHeadSize, i % kHeadSize);
    };
    if (!gpu::AnyInBlock(HoldsNonFinite(threadIdx.x, kTile * kHeadSize, kThreads, element))) return;
    softmax_.AddNonFinite<kKeys>(
        begin, sums_,
        [&](int j, int n, int e) {
          return values[CacheRows::ElementOffset(part_ * kKeys + j, Column(n, e))];
        },
        [&](C value, int j) { return Scaled(value, layout_.Slots(tile)[part_ * kKeys + j]); });
    gpu::SyncBlock();
    ClearNonFinite(threadIdx.x, kTile * kHeadSize, kThreads, element);
    gpu::SyncBlock();
  }

  static __device__ __forceinline__ float Scaled(C value, const Slot<C>& slot) {
    if constexpr (kIs8Bit<C>) return gpu::ToFloat(value) * slot.v_scale;
    return gpu::ToFloat(value);
  }

  // The column of element e of group n of the lane's sums. Two adjacent columns of an 8-bit cache
  // are in one register and go to two groups.
  __device__ int Column(int n, int e) const {
    const int of_block = lane_ % 4 * 2 + e % 2;
    return kIs8Bit<C> ? n / 2 * 16 + of_block * 2 + n % 2 : n * 8 + of_block;
  }

  // sums += weights * v, with weights rounded to 16 bits.
  __device__ void AddValues(const C* values, const float (&weights)[kKeys / 8][4]) {
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      const float(&left)[4] = weights[2 * n], (&right)[4] = weights[2 * n + 1];
      const uint32_t packed[4] = {
          gpu::Pack(left[0], left[1], Weight{}), gpu::Pack(left[2], left[3], Weight{}),
          gpu::Pack(right[0], right[1], Weight{}), gpu::Pack(right[2], right[3], Weight{})};
      const int row = part_ * kKeys + n * 16 + lane_ % 16;
#pragma unroll
      for (int chunk = 0; chunk < CacheRows::kChunks; chunk += 2) {
        uint32_t value[4];  // two chunks, each of 8 positions and of the next 8
        gpu::LoadMatricesTransposed(value, values + CacheRows::Offset(row, chunk + lane_ / 16));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if constexpr (kIs8Bit<C>) {
            uint32_t first[2], second[2];  // the even columns, then the odd ones
            gpu::Expand(gpu::SwapMiddleBytes(value[2 * i]), C{}, first, Weight{});
            gpu::Expand(gpu::SwapMiddleBytes(value[2 * i + 1]), C{}, second, Weight{});
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
              float(&sums)[4] = sums_[2 * (chunk + i) + odd];
              gpu::MultiplyAdd(sums, packed, first[odd], second[odd], Weight{});
            }
          } else {
            gpu::MultiplyAdd(sums_[chunk + i], packed, value[2 * i], value[2 * i + 1], Weight{});
          }
        }
      }
    }
  }

  __device__ void StoreSums() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const RowState state = softmax_.State(r);
      const int row = part_ * kRows + warp_row_ + lane_ / 4 + 8 * r;
      if (lane_ % 4 == 0) layout_.states[row] = state;
#pragma unroll
      for (int n = 0; n < kHeadSize / 8; ++n) {
        float* to = layout_.sums + row * kHeadSize;
        to[Column(n, 0)] = sums_[n][2 * r];
        to[Column(n, 1)] = sums_[n][2 * r + 1];
      }
    }
  }

  const Params& p_;
  const Item& item_;
  const Layout& layout_;
  const int lane_;
  const int warp_row_;  // the warp's first row
  const int part_;      // this warp's part of each KV tile's positions
  Softmax softmax_;
  float sums_[kHeadSize / 8][4] = {};  // laid out as logits, with columns in place of positions
  bool is_bad_;
};

// Computes work items of up to kWarpRows groups of 16 rows. kWarpRows is kWarps or
// Layout::kFewWarpRows.
template <typename T, typename C, int kHeadSize, int kWarpRows>
__global__ void __launch_bounds__(kThreads, 2)
    TensorCoreAttention(Params p, Scratch scratch, QueryLengths lengths) {
  using Layout = TensorCoreLayout<T, C, kHeadSize>;
  constexpr int kFewWarpRows = Layout::kFewWarpRows;
  const Layout layout(gpu::SharedMemory(), kWarpRows);
  Schedule schedule(p, lengths, kMaxRowsPerItem, layout.schedule);
  for (int64_t number = blockIdx.x;; number += gridDim.x) {
    const Item* item = schedule.Find(number);
    if (item == nullptr) return;
    if (kWarpRows == kFewWarpRows || item->num_rows <= kFewWarpRows * kRowsPerWarpTile) {
      TensorCoreItem<T, C, kHeadSize, kFewWarpRows>(p, *item, layout).Compute(scratch);
    } else {
      TensorCoreItem<T, C, kHeadSize, kWarpRows>(p, *item, layout).Compute(scratch);
    }
  }
}

}  // namespace xla_gpu::paged_attention
