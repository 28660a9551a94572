// Attention on tensor cores, for float16 and bfloat16: any GPU since sm_80.
//
// A block takes an item's rows through its positions, a tile of K and V at a time, copied to shared
// memory while the tile before is computed. The warps share a tile in one of two ways: with many
// rows, each warp has 16 of them and all positions; with few, all warps have the same rows and each
// a part of the positions, added up at the end in a fixed order.
#pragma once

#include "rows.cuh"

namespace xla_gpu::paged_attention {

inline constexpr int kRowsPerWarpTile = 16;  // of the tensor cores' product

// The shared memory of a block. kHeadSize: the storage's head_size, rounded up to one that is
// compiled; the columns past it are zero.
template <typename T, int kHeadSize>
struct TensorCoreLayout {
  static constexpr int kTile = kHeadSize <= 128 ? 64 : 32;  // positions
  static constexpr int kStages = 2;                         // tiles in memory
  static constexpr int kSlotTiles = kStages + 1;            // tiles whose slots are known
  static constexpr int kChunk = 8;                          // elements of a 16-byte access
  static constexpr int kChunks = kHeadSize / kChunk;        // of a row

  // Eight neighbouring rows' chunks of one column must lie in different banks: swizzled where the
  // row is a multiple of all banks, set apart by a padding chunk elsewhere.
  static constexpr bool kIsSwizzled = kHeadSize % 64 == 0;
  static constexpr int kStride = kHeadSize + (kIsSwizzled ? 0 : kChunk);

  static constexpr int kQueryElements = kMaxRowsPerItem * kStride;
  static constexpr int kTileElements = kTile * kStride;
  static constexpr int kElements = kQueryElements + kStages * 2 * kTileElements;
  static constexpr int kSharedBytes =
      kElements * 2 + kSlotTiles * kTile * 8 + static_cast<int>(sizeof(Schedule::Shared)) +
      kWarps * kRowsPerWarpTile * static_cast<int>(sizeof(RowState));

  static_assert(kWarps * kRowsPerWarpTile * kHeadSize * 4 <= kStages * 2 * kTileElements * 2,
                "the sums of all warps take the place of the tiles");

  static __device__ __forceinline__ int Offset(int row, int chunk) {
    return row * kStride + (kIsSwizzled ? chunk ^ (row % 8) : chunk) * kChunk;
  }

  T* query;        // [kMaxRowsPerItem] rows
  T* tiles;        // [kStages][K, V][kTile] rows
  int64_t* slots;  // [kSlotTiles][kTile], -1: zeros instead
  Schedule::Shared* schedule;
  RowState* states;  // [kWarps][kRowsPerWarpTile]
  float* sums;       // [kWarps][kRowsPerWarpTile][kHeadSize], over the tiles

  __device__ explicit TensorCoreLayout(char* memory)
      : query(reinterpret_cast<T*>(memory)),
        tiles(query + kQueryElements),
        slots(reinterpret_cast<int64_t*>(tiles + kStages * 2 * kTileElements)),
        schedule(reinterpret_cast<Schedule::Shared*>(slots + kSlotTiles * kTile)),
        states(reinterpret_cast<RowState*>(schedule + 1)),
        sums(reinterpret_cast<float*>(tiles)) {}

  __device__ T* Key(int32_t tile) const { return tiles + tile % kStages * 2 * kTileElements; }
  __device__ T* Value(int32_t tile) const { return Key(tile) + kTileElements; }
  __device__ int64_t* Slots(int32_t tile) const { return slots + tile % kSlotTiles * kTile; }
};

// One item, by kWarpRows groups of warps with 16 rows each; the warps of a group share positions.
template <typename T, int kHeadSize, int kWarpRows>
class TensorCoreItem {
  using Layout = TensorCoreLayout<T, kHeadSize>;
  static constexpr int kParts = kWarps / kWarpRows;
  static constexpr int kTile = Layout::kTile;
  static constexpr int kKeys = kTile / kParts;  // positions of a tile for each warp
  static constexpr int kRows = kWarpRows * kRowsPerWarpTile;
  static constexpr int kSteps = kHeadSize / 16;  // of a product over the head
  static_assert(kKeys % 16 == 0, "the product over positions takes 16 at a time");

 public:
  __device__ TensorCoreItem(const Params& p, const Item& item, const Layout& layout)
      : p_(p),
        item_(item),
        layout_(layout),
        lane_(threadIdx.x % gpu::kWarpSize),
        warp_row_(threadIdx.x / gpu::kWarpSize % kWarpRows * kRowsPerWarpTile),
        part_(kParts == 1 ? 0 : threadIdx.x / gpu::kWarpSize / kWarpRows),
        ranges_{{p, item, warp_row_ + lane_ / 4}, {p, item, warp_row_ + lane_ / 4 + 8}} {}

  __device__ void Compute(const Scratch& scratch) {
    const int32_t first = item_.begin / kTile;
    const int32_t end = max(first, (item_.end + kTile - 1) / kTile);
    StoreSlot(first, FindSlotOf(first));
    StoreSlot(first + 1, FindSlotOf(first + 1));
    CopyQuery();
    gpu::SyncBlock();
    CopyTile(first);
    gpu::CommitCopies();
    for (int32_t tile = first; tile < end; ++tile) {
      gpu::WaitCopies<0>();
      gpu::SyncBlock();  // the tile is here, and everyone has left the one before
      CopyTile(tile + 1);
      gpu::CommitCopies();
      const int64_t slot = FindSlotOf(tile + 2);
      ComputeTile(tile);
      StoreSlot(tile + 2, slot);
    }
    gpu::WaitCopies<0>();
    is_bad_ = gpu::AnyInBlock(is_bad_);  // everyone has left the tiles, whose place the sums take
    StoreSums();
    gpu::SyncBlock();
    const Parts parts{kParts, layout_.states, layout_.sums, kRows, kHeadSize};
    WriteRows<T>(p_, scratch, item_, parts, is_bad_);
  }

 private:
  // Thread j finds position j of a tile.
  __device__ int64_t FindSlotOf(int32_t tile) {
    const int32_t position = tile * kTile + threadIdx.x;
    if (threadIdx.x >= kTile || position < item_.begin || position >= item_.end) return -1;
    return FindSlot(p_, item_.sequence, position, &is_bad_);
  }

  __device__ void StoreSlot(int32_t tile, int64_t slot) {
    if (threadIdx.x < kTile) layout_.Slots(tile)[threadIdx.x] = slot;
  }

  __device__ void CopyQuery() {
    for (int i = threadIdx.x; i < kRows * Layout::kChunks; i += kThreads) {
      const int row = i / Layout::kChunks, chunk = i % Layout::kChunks;
      const bool exists = row < item_.num_rows && chunk * Layout::kChunk < p_.head_size;
      const int64_t offset = exists ? RowOffset(p_, item_, row) + chunk * Layout::kChunk : 0;
      gpu::CopyAsync16(layout_.query + Layout::Offset(row, chunk),
                       static_cast<const T*>(p_.query) + offset, exists);
    }
  }

  __device__ void CopyTile(int32_t tile) {
    const int64_t* slots = layout_.Slots(tile);
    T *keys = layout_.Key(tile), *values = layout_.Value(tile);
#pragma unroll 1  // the copies overlap all the same
    for (int i = threadIdx.x; i < kTile * Layout::kChunks; i += kThreads) {
      const int row = i / Layout::kChunks, chunk = i % Layout::kChunks;
      const int64_t slot = slots[row];
      const bool exists = slot >= 0 && chunk * Layout::kChunk < p_.head_size;
      const int64_t from = exists ? slot + chunk * Layout::kChunk : 0;
      const int to = Layout::Offset(row, chunk);
      gpu::CopyAsync16(keys + to, KeyOf<T>(p_, from, item_.kv_head), exists);
      gpu::CopyAsync16(values + to, ValueOf<T>(p_, from, item_.kv_head), exists);
    }
  }

  __device__ void ComputeTile(int32_t tile) {
    // First position of the warp's part, and what all rows of the item attend to together.
    const int32_t begin = tile * kTile + part_ * kKeys;
    float logits[kKeys / 8][4] = {};
    MultiplyByKeys(layout_.Key(tile), logits);
    Mask(begin, logits);
    float shrinks[2];
    Weigh(logits, shrinks);
#pragma unroll
    for (float(&sums)[4] : sums_) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[e] *= shrinks[e / 2];
    }
    if (RowsDiffer(tile)) SetAsideNonFinite(tile, begin);
    AddValues(layout_.Value(tile), logits);
  }

  // logits = q k^T. Lane l holds, of each 8 positions, 2 * (l % 4) and the next, for the rows l / 4
  // and l / 4 + 8.
  __device__ void MultiplyByKeys(const T* keys, float (&logits)[kKeys / 8][4]) const {
#pragma unroll 2
    for (int step = 0; step < kSteps; ++step) {
      uint32_t query[4];
      const int query_row = warp_row_ + lane_ % 16;
      gpu::LoadMatrices(query, layout_.query + Layout::Offset(query_row, 2 * step + lane_ / 16));
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        const int row = part_ * kKeys + n * 16 + lane_ / 16 * 8 + lane_ % 8;
        uint32_t key[4];
        gpu::LoadMatrices(key, keys + Layout::Offset(row, 2 * step + lane_ / 8 % 2));
        gpu::MultiplyAdd(logits[2 * n], query, key[0], key[1], T{});
        gpu::MultiplyAdd(logits[2 * n + 1], query, key[2], key[3], T{});
      }
    }
  }

  // Turns q . k into logits in units of log2(e), and those of positions that a row does not attend
  // to into -inf.
  __device__ void Mask(int32_t begin, float (&logits)[kKeys / 8][4]) const {
    int first[2], last[2];  // relative to `begin`
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      first[r] = max(ranges_[r].begin - begin, 0);
      last[r] = min(max(ranges_[r].end - begin, 0), kKeys);
    }
    float scale = p_.scale * kLog2E;
    if (p_.soft_cap > 0) {
      Cap(logits);
      scale = 1;
    }
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int j = n * 8 + lane_ % 4 * 2 + e % 2;
        const bool attends = first[e / 2] <= j && j < last[e / 2];
        logits[n][e] = attends ? logits[n][e] * scale : -kInfinity;
      }
    }
    if (p_.alibi_slopes != nullptr) AddBias(begin, logits);
  }

  __device__ void AddBias(int32_t begin, float (&logits)[kKeys / 8][4]) const {
    const AlibiBias biases[2] = {{p_, item_, warp_row_ + lane_ / 4},
                                 {p_, item_, warp_row_ + lane_ / 4 + 8}};
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        logits[n][e] -= biases[e / 2].At(begin + n * 8 + lane_ % 4 * 2 + e % 2);
      }
    }
  }

  // The logits, capped, in units of log2(e). tanh(x) = 1 - 2 / (1 + e^2x) is off by some 2^-23, far
  // less than rounding the weights to 16 bits.
  __device__ void Cap(float (&logits)[kKeys / 8][4]) const {
    const float exponent = 2 * kLog2E * p_.scale / p_.soft_cap, cap = p_.soft_cap * kLog2E;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float power = gpu::Exp2(logits[n][e] * exponent);
        logits[n][e] = cap - 2 * cap * gpu::Reciprocal(1 + power);
      }
    }
  }

  // Turns logits into weights 2^(logit - max), and gives the factors by which sums so far shrink.
  __device__ void Weigh(float (&logits)[kKeys / 8][4], float (&shrinks)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float max = states_[r].max;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        max = fmaxf(max, fmaxf(logits[n][2 * r], logits[n][2 * r + 1]));
      }
      max = fmaxf(max, gpu::ShuffleXor(max, 1));
      max = fmaxf(max, gpu::ShuffleXor(max, 2));
      const float shift = max == -kInfinity ? 0.0f : max;
      shrinks[r] = gpu::Exp2(states_[r].max - shift);
      float sum = states_[r].sum * shrinks[r];
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          logits[n][e] = gpu::Exp2(logits[n][e] - shift);
          sum += logits[n][e];
        }
      }
      states_[r] = {max, sum};  // the sum of this lane's positions only, until the end
    }
  }

  // Whether some rows attend to positions of the tile that others do not.
  __device__ bool RowsDiffer(int32_t tile) const {
    const int64_t common_begin = p_.WindowBegin(LastPosition(p_, item_));
    const int64_t common_end = p_.WindowEnd(FirstPosition(p_, item_), item_.context_len);
    return common_begin > max(item_.begin, tile * kTile) ||
           common_end < min(item_.end, (tile + 1) * kTile);
  }

  // A weight of zero does not keep an infinite or NaN value from a row's sum. Where a tile holds
  // some, they are added to the rows that attend to them, and then taken out of the tile.
  __device__ void SetAsideNonFinite(int32_t tile, int32_t begin) {
    T* values = layout_.Value(tile);
    bool found = false;
    for (int i = threadIdx.x; i < kTile * kHeadSize; i += kThreads) {
      found = found || !IsFinite(values[ValueOffset(i / kHeadSize, i % kHeadSize)]);
    }
    if (!gpu::AnyInBlock(found)) return;
#pragma unroll 1
    for (int j = 0; j < kKeys; ++j) {
      const bool attends[2] = {ranges_[0].Contains(begin + j), ranges_[1].Contains(begin + j)};
#pragma unroll
      for (int n = 0; n < kHeadSize / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const T value = values[ValueOffset(part_ * kKeys + j, n * 8 + lane_ % 4 * 2 + e)];
          if (IsFinite(value)) continue;
          if (attends[0]) sums_[n][e] += gpu::ToFloat(value);
          if (attends[1]) sums_[n][e + 2] += gpu::ToFloat(value);
        }
      }
    }
    gpu::SyncBlock();
    for (int i = threadIdx.x; i < kTile * kHeadSize; i += kThreads) {
      T* value = values + ValueOffset(i / kHeadSize, i % kHeadSize);
      if (!IsFinite(*value)) *value = T{0};
    }
    gpu::SyncBlock();
  }

  static __device__ int ValueOffset(int row, int column) {
    return Layout::Offset(row, column / Layout::kChunk) + column % Layout::kChunk;
  }

  // sums += weights * v, the weights rounded to the storage type.
  __device__ void AddValues(const T* values, const float (&weights)[kKeys / 8][4]) {
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      const float(&left)[4] = weights[2 * n], (&right)[4] = weights[2 * n + 1];
      const uint32_t packed[4] = {
          gpu::Pack(left[0], left[1], T{}), gpu::Pack(left[2], left[3], T{}),
          gpu::Pack(right[0], right[1], T{}), gpu::Pack(right[2], right[3], T{})};
      const int row = part_ * kKeys + n * 16 + lane_ % 16;
#pragma unroll
      for (int d = 0; d < kHeadSize / 16; ++d) {
        uint32_t value[4];
        gpu::LoadMatricesTransposed(value, values + Layout::Offset(row, 2 * d + lane_ / 16));
        gpu::MultiplyAdd(sums_[2 * d], packed, value[0], value[1], T{});
        gpu::MultiplyAdd(sums_[2 * d + 1], packed, value[2], value[3], T{});
      }
    }
  }

  __device__ void StoreSums() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = states_[r].sum;
      sum += gpu::ShuffleXor(sum, 1);
      sum += gpu::ShuffleXor(sum, 2);
      const int row = part_ * kRows + warp_row_ + lane_ / 4 + 8 * r;
      if (lane_ % 4 == 0) layout_.states[row] = {states_[r].max, sum};
#pragma unroll
      for (int n = 0; n < kHeadSize / 8; ++n) {
        float* to = layout_.sums + row * kHeadSize + n * 8 + lane_ % 4 * 2;
        to[0] = sums_[n][2 * r];
        to[1] = sums_[n][2 * r + 1];
      }
    }
  }

  const Params& p_;
  const Item& item_;
  const Layout& layout_;
  const int lane_;
  const int warp_row_;  // the warp's first row
  const int part_;      // of each tile's positions, this warp's
  const RowRange ranges_[2];
  RowState states_[2] = {{-kInfinity, 0}, {-kInfinity, 0}};
  float sums_[kHeadSize / 8][4] = {};  // as logits lie, with columns in place of positions
  bool is_bad_ = false;
};

template <typename T, int kHeadSize>
__global__ void __launch_bounds__(kThreads, 2) TensorCoreAttention(Params p, Scratch scratch) {
  using Layout = TensorCoreLayout<T, kHeadSize>;
  constexpr int kFewWarpRows = Layout::kTile == 64 ? 1 : 2;  // 16 positions for each warp
  const Layout layout(gpu::SharedMemory());
  Schedule schedule(p, kMaxRowsPerItem, layout.schedule);
  for (int64_t number = blockIdx.x;; number += gridDim.x) {
    const Item* item = schedule.Find(number);
    if (item == nullptr) return;
    if (item->num_rows <= kFewWarpRows * kRowsPerWarpTile) {
      TensorCoreItem<T, kHeadSize, kFewWarpRows>(p, *item, layout).Compute(scratch);
    } else {
      TensorCoreItem<T, kHeadSize, kWarps>(p, *item, layout).Compute(scratch);
    }
  }
}

}  // namespace xla_gpu::paged_attention
