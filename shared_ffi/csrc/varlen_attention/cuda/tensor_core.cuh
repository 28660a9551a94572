// The gradients of K and V, and those of the query, on tensor cores, on any GPU from sm_80 on.
//
// Each output has one thread block, whose loop counts from the sequence's first token: nothing is
// added by atomics, and no thread block waits for another one. That takes seven products of which
// two are the same; one kernel for all would make thread blocks wait. Weights and gradients of
// logits stay in the registers where the products leave them, and are rounded to 16 bits for the
// next product.
#pragma once

#include "../../paged_attention/cuda/products.cuh"
#include "rows.cuh"

namespace xla_gpu::varlen_attention {

using paged_attention::SharedRows;
using paged_attention::WarpProducts;

// Begins to copy kRows rows of two arrays, or of one, to shared memory. to_rows(row, use) calls
// use(first, second) with their places in the arrays, if the row exists. What does not exist
// becomes zeros.
template <int kRows, int kNumThreads, typename Rows, typename T, typename ToRows>
__device__ __forceinline__ void CopyRows(const Params& p, T* first, int64_t first_columns,
                                         T* second, int64_t second_columns, const ToRows& to_rows) {
  constexpr int kChunks = kRows * Rows::kChunks;
  static_assert(kChunks % kNumThreads == 0, "all threads copy as many chunks");
#pragma unroll 4
  for (int i = 0; i < kChunks; i += kNumThreads) {
    const unsigned number = i + threadIdx.x;
    const int row = number / Rows::kChunks, chunk = number % Rows::kChunks;
    const int column = chunk * Rows::kChunk, to = Rows::Offset(row, chunk);
    const T* from[2] = {static_cast<const T*>(p.query), static_cast<const T*>(p.query)};
    bool exists[2] = {};
    to_rows(row, [&](const T* a, const T* b) {
      exists[0] = column < first_columns;
      exists[1] = column < second_columns;
      if (exists[0]) from[0] = a + column;
      if (exists[1]) from[1] = b + column;
    });
    if (first != nullptr) gpu::CopyAsync16(first + to, from[0], exists[0]);
    if (second != nullptr) gpu::CopyAsync16(second + to, from[1], exists[1]);
  }
}

template <typename T, int kHeadSize>
struct KeyGradientsLayout {
  using Rows = SharedRows<T, kHeadSize>;
  // Columns that a warp adds up. With more columns, two warps share positions.
  static constexpr int kColumns = kHeadSize <= 128 ? kHeadSize : 128;
  static constexpr int kPositionWarps = kWarps / (kHeadSize / kColumns);
  static constexpr int kPositions = kPositionWarps * 16;
  static constexpr int kParts = kBlockTokens / kPositions;
  static constexpr int kTileRows = kHeadSize <= 64 ? 64 : 32;
  static constexpr int kStages = kHeadSize <= 128 ? 2 : 1;

  using TileNumbers = NumbersOfRows<kTileRows>;
  static constexpr int kTileElements = kTileRows * Rows::kStride;
  static constexpr int kElements = 2 * kPositions * Rows::kStride + kStages * 2 * kTileElements;
  static constexpr int kSharedBytes =
      kElements * static_cast<int>(sizeof(T)) + kStages * static_cast<int>(sizeof(TileNumbers));

  T* keys;               // [kPositions] rows
  T* values;             // the same
  T* tiles;              // [kStages][2][kTileRows] rows: of the query, and of the output's gradient
  TileNumbers* numbers;  // [kStages]

  __device__ explicit KeyGradientsLayout(char* memory)
      : keys(reinterpret_cast<T*>(memory)),
        values(keys + kPositions * Rows::kStride),
        tiles(values + kPositions * Rows::kStride),
        numbers(reinterpret_cast<TileNumbers*>(memory + kElements * sizeof(T))) {}
  __device__ T* Queries(int stage) const { return tiles + stage * 2 * kTileElements; }
  __device__ T* Douts(int stage) const { return Queries(stage) + kTileElements; }
};

// The gradients of K and V of kPositions positions of a kv head. Query tiles, counted from the
// sequence's first row, are added up one after the other.
template <typename T, int kHeadSize, bool kGeneral>
class KeyGradients : AttendedPositions<KeyGradientsLayout<T, kHeadSize>::kTileRows, kGeneral> {
  using Layout = KeyGradientsLayout<T, kHeadSize>;
  using Rows = typename Layout::Rows;
  static constexpr int kTileRows = Layout::kTileRows;
  static constexpr int kStages = Layout::kStages;
  using Products = WarpProducts<T, T, kHeadSize, kTileRows, Rows, Rows, Layout::kColumns>;
  using Base = AttendedPositions<kTileRows, kGeneral>;
  using Base::b_, Base::begin_, Base::block_, Base::kv_head_, Base::p_, Base::scratch_;
  using Base::From, Base::IsMasked, Base::Queries;

 public:
  __device__ KeyGradients(const BackwardParams& b, const BackwardScratch& scratch,
                          const TokenBlock& block, int32_t part, int32_t kv_head)
      : Base(b, scratch, block, kv_head, block.begin + part * Layout::kPositions,
             Layout::kPositions),
        layout_(gpu::SharedMemory()) {}

  __device__ __forceinline__ void Compute() {
    if (begin_ >= block_.len) return;
    __syncthreads();  // everyone has left the part before
    CopyRows<Layout::kPositions, kThreads, Rows>(
        p_, layout_.keys, p_.head_size, layout_.values, p_.value_head_size,
        PositionRows<T, false>{p_, scratch_.lengths, block_, kv_head_, From()});
    Products keys, values;
    int stage = 0;
    do {
      const Tiles tiles = this->TilesOfQueries();
      int32_t tile = Next(tiles.begin, tiles.end);
      if (tile < tiles.end) CopyTile(tile, stage);
      gpu::CommitCopies();
      while (tile < tiles.end) {
        gpu::WaitCopies<0>();
        __syncthreads();  // the tile is here, and everyone has left the one before
        const int32_t next = Next(tile + 1, tiles.end);
        if (kStages > 1 && next < tiles.end) CopyTile(next, kStages - 1 - stage);
        gpu::CommitCopies();
        AddTile(tile, stage, &keys, &values);
        if (kStages == 1) {
          __syncthreads();
          if (next < tiles.end) CopyTile(next, 0);
          gpu::CommitCopies();
        }
        tile = next;
        stage = kStages - 1 - stage;
      }
    } while (this->NextQueries());
    gpu::WaitCopies<0>();
    Write(keys, p_.scale, b_.dkey, p_.head_size);
    Write(values, 1, b_.dvalue, p_.value_head_size);
  }

 private:
  static __device__ __forceinline__ int Warp() { return gpu::Opaque(threadIdx.x) / gpu::kWarpSize; }
  static __device__ __forceinline__ int WarpRow() { return Warp() % Layout::kPositionWarps * 16; }
  static __device__ __forceinline__ int FirstColumn() {
    return Warp() / Layout::kPositionWarps * Layout::kColumns;
  }

  // The first tile from `tile` on of which a row attends to a position here.
  __device__ __forceinline__ int32_t Next(int32_t tile, int32_t end) const {
    return NextTile(p_, tile, end, [&](int32_t tile) {
      const auto row = static_cast<int32_t>(threadIdx.x);
      return __syncthreads_or(row < kTileRows && this->Meets(tile, row));
    });
  }

  __device__ __forceinline__ void CopyTile(int32_t tile, int stage) const {
    CopyRows<kTileRows, kThreads, Rows>(p_, layout_.Queries(stage), p_.head_size,
                                        layout_.Douts(stage), p_.value_head_size,
                                        QueryRows<T>{b_, Queries(), kv_head_, tile * kTileRows});
    const auto row = static_cast<int32_t>(threadIdx.x);
    if (row >= kTileRows) return;
    layout_.numbers[stage].template Copy<kGeneral>(p_, scratch_, Queries(), kv_head_,
                                                   tile * kTileRows, row, IsMasked(tile));
  }

  __device__ __forceinline__ void AddTile(int32_t tile, int stage, Products* keys,
                                          Products* values) const {
    float weights[kTileRows / 8][4] = {}, gradients[kTileRows / 8][4] = {};
    const T* const queries = layout_.Queries(stage);
    const T* const douts = layout_.Douts(stage);
    Products::MultiplyByKeys(layout_.keys, WarpRow(), queries, 0, weights);
    Products::MultiplyByKeys(layout_.values, WarpRow(), douts, 0, gradients);
    const auto& numbers = layout_.numbers[stage];
    if (IsMasked(tile)) {
      WeighPositions<kGeneral, true>(p_, numbers, From() + WarpRow(), weights, gradients);
    } else {
      WeighPositions<kGeneral, false>(p_, numbers, From() + WarpRow(), weights, gradients);
    }
    // Columns of a row that are a multiple of 128 apart are as far apart in shared memory.
    values->template AddValues<T>(douts + FirstColumn(), 0, weights);
    keys->template AddValues<T>(queries + FirstColumn(), 0, gradients);
  }

  __device__ __forceinline__ void Write(const Products& products, float factor, void* to,
                                        int64_t num_columns) const {
    this->template WritePositions<T>(begin_ + WarpRow(), FirstColumn(), products.sums, factor, to,
                                     num_columns);
  }

  const Layout layout_;
};

template <typename T, int kHeadSize, bool kGeneral>
__global__ void __launch_bounds__(kThreads, 1)
    TensorCoreKeyGradients(BackwardParams b, BackwardScratch scratch) {
  ForParts<false, kGeneral>(
      b.forward, scratch.lengths, KeyGradientsLayout<T, kHeadSize>::kParts,
      [&](const TokenBlock& block, int32_t part, int32_t kv_head) {
        KeyGradients<T, kHeadSize, kGeneral>(b, scratch, block, part, kv_head).Compute();
      });
}

inline constexpr int kQueryThreads = 128;

template <typename T, int kHeadSize>
struct QueryGradientsLayout {
  using Rows = SharedRows<T, kHeadSize>;
  // Groups of 16 rows of a warp, kGroupRows rows apart: each read of K or V feeds so many products.
  static constexpr int kGroups = kHeadSize <= 128 ? 2 : 1;
  static constexpr int kGroupRows = kQueryThreads / gpu::kWarpSize * 16;
  static constexpr int kTileRows = kGroups * kGroupRows;
  static constexpr int kTile = 32;  // positions of a KV tile, at most
  static constexpr int kElements = 2 * (kTileRows + kTile) * Rows::kStride;
  // With heads of 128 two thread blocks just fit an A100's multiprocessor.
  static constexpr int kSharedBytes =
      kElements * static_cast<int>(sizeof(T)) + kTileRows * static_cast<int>(sizeof(RowNumbers));

  T* queries;        // [kTileRows] rows
  T* douts;          // the same
  T* keys;           // [kTile] rows
  T* values;         // the same
  RowNumbers* rows;  // [kTileRows]

  __device__ explicit QueryGradientsLayout(char* memory)
      : queries(reinterpret_cast<T*>(memory)),
        douts(queries + kTileRows * Rows::kStride),
        keys(douts + kTileRows * Rows::kStride),
        values(keys + kTile * Rows::kStride),
        rows(reinterpret_cast<RowNumbers*>(memory + kElements * sizeof(T))) {}
};

// The gradients of the query of kTileRows rows of a kv head. While they are multiplied by K, V of
// the next KV tile is copied.
template <typename T, int kHeadSize, bool kGeneral>
class QueryGradients : OwnedRows<QueryGradientsLayout<T, kHeadSize>::kTileRows, kGeneral> {
  using Layout = QueryGradientsLayout<T, kHeadSize>;
  using Rows = typename Layout::Rows;
  static constexpr int kGroups = Layout::kGroups;
  // The soft cap and the slopes need the registers of half of them. A product has 16 positions: the
  // tiles decide no order.
  static constexpr int kTile = kGeneral ? Layout::kTile / 2 : Layout::kTile;
  using Products = WarpProducts<T, T, kHeadSize, kTile, Rows, Rows>;
  using Logits = float[kGroups][kTile / 8][4];
  using Base = OwnedRows<Layout::kTileRows, kGeneral>;
  using Base::b_, Base::block_, Base::first_row_, Base::kv_head_, Base::p_, Base::scratch_;

 public:
  __device__ QueryGradients(const BackwardParams& b, const BackwardScratch& scratch,
                            const TokenBlock& block, int32_t part, int32_t kv_head)
      : Base(b, scratch, block, part, kv_head), layout_(gpu::SharedMemory()) {}

  __device__ __forceinline__ void Compute() {
    if (!this->Exist()) return;
    __syncthreads();  // everyone has left the part before
    CopyRows<Layout::kTileRows, kQueryThreads, Rows>(
        p_, layout_.queries, p_.head_size, layout_.douts, p_.value_head_size,
        QueryRows<T>{b_, block_, kv_head_, first_row_});
    const Tiles tiles = this->template TilesOfPositions<kTile>();
    const int32_t end = tiles.end;
    int32_t tile = Next(tiles.begin, end);
    CopyRowNumbers();
    if (tile < end) Copy<true, true>(tile);
    Products products[kGroups];
    while (tile < end) {
      gpu::WaitCopies<0>();
      __syncthreads();  // K and V are here
      Logits weights = {}, gradients = {};
      constexpr int kUnrolled = kHeadSize > 128 ? 2 : 4;
      Products::template MultiplyByKeys<kUnrolled>(layout_.queries, WarpRow(), Layout::kGroupRows,
                                                   layout_.keys, 0, weights);
      Products::template MultiplyByKeys<kUnrolled>(layout_.douts, WarpRow(), Layout::kGroupRows,
                                                   layout_.values, 0, gradients);
      const int32_t next = Next(tile + 1, end);
      __syncthreads();  // everyone has left V
      if (next < end) Copy<false, true>(next);
      Weigh(tile * kTile, weights, gradients);
      typename Products::PackedWeights packed[kGroups];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        Products::template PackWeights<T>(gradients[g], packed[g]);
      }
      Products::template AddValues<T>(layout_.keys, 0, packed, products);
      __syncthreads();  // everyone has left K
      if (next < end) Copy<true, false>(next);
      tile = next;
    }
    gpu::WaitCopies<0>();
    Write(products);
  }

 private:
  static __device__ __forceinline__ int WarpRow() {
    return gpu::Opaque(threadIdx.x) / gpu::kWarpSize * 16;
  }

  __device__ __forceinline__ int32_t RowOf(int g, int r) const {
    return first_row_ + g * Layout::kGroupRows + WarpRow() + OwnLane() / 4 + 8 * r;
  }

  // The first KV tile from `tile` on to which a row here attends.
  __device__ __forceinline__ int32_t Next(int32_t tile, int32_t end) const {
    return NextTile(p_, tile, end, [&](int32_t tile) {
      const auto row = static_cast<int32_t>(threadIdx.x);
      return __syncthreads_or(row < Layout::kTileRows && this->template Meets<kTile>(tile, row));
    });
  }

  template <bool kKeys, bool kValues>
  __device__ __forceinline__ void Copy(int32_t tile) const {
    T* const keys = kKeys ? layout_.keys : nullptr;
    T* const values = kValues ? layout_.values : nullptr;
    CopyRows<kTile, kQueryThreads, Rows>(
        p_, keys, p_.head_size, values, p_.value_head_size,
        PositionRows<T, kGeneral>{p_, scratch_.lengths, block_, kv_head_, tile * kTile});
    gpu::CommitCopies();
  }

  // Zeros for rows that do not exist.
  __device__ __forceinline__ void CopyRowNumbers() const {
    const auto row = static_cast<int32_t>(threadIdx.x);
    if (row >= Layout::kTileRows) return;
    CopyNumbers(p_, scratch_, block_, RowPlace(p_, kv_head_, first_row_ + row), &layout_.rows[row]);
  }

  __device__ __forceinline__ void Weigh(int32_t begin, Logits& weights, Logits& gradients) {
    if (!this->IsMasked(begin, begin + kTile)) {
      Weigh<false>(begin, weights, gradients);
    } else {
      Weigh<true>(begin, weights, gradients);
    }
  }

  template <bool kMasked>
  __device__ __forceinline__ void Weigh(int32_t begin, Logits& weights, Logits& gradients) {
    const Weigher<kGeneral> weigher(p_);
    // Each lane finds the mask of one row: lane 2 * g + r of four, that of row r of group g.
    RowMask own = {};
    if constexpr (kMasked) {
      const int lane = OwnLane();
      own = MaskOf(p_, block_, kv_head_,
                   first_row_ + paged_attention::RowOfLane(lane, WarpRow(), Layout::kGroupRows));
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const RowNumbers row = layout_.rows[RowOf(g, r) - first_row_];
        RowMask mask = {};
        RowBias bias = {};
        if constexpr (kMasked) {
          const int of = 2 * g + r;
          mask.begin = gpu::Shuffle(own.begin, of, 4);
          mask.end = gpu::Shuffle(own.end, of, 4);
          mask.hole_begin = gpu::Shuffle(own.hole_begin, of, 4);
          mask.hole_end = gpu::Shuffle(own.hole_end, of, 4);
        }
        if constexpr (kGeneral) bias = RowBias(p_, block_, RowPlace(p_, kv_head_, RowOf(g, r)));
        WeighRow<kMasked>(weigher, row, mask, bias, begin, r, weights[g], gradients[g],
                          &slopes_[g][r]);
      }
    }
  }

  __device__ __forceinline__ void Write(const Products (&products)[kGroups]) const {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        this->template WriteRow<T>(RowOf(g, r), r, products[g].sums, slopes_[g][r]);
      }
    }
  }

  const Layout layout_;
  float slopes_[kGroups][2] = {};
};

template <typename T, int kHeadSize, bool kGeneral>
__global__ void __launch_bounds__(kQueryThreads, 2)
    TensorCoreQueryGradients(BackwardParams b, BackwardScratch scratch) {
  const int64_t rows = kBlockTokens * int64_t{b.forward.group.number};
  ForParts<true, kGeneral>(
      b.forward, scratch.lengths, rows / QueryGradientsLayout<T, kHeadSize>::kTileRows,
      [&](const TokenBlock& block, int32_t part, int32_t kv_head) {
        QueryGradients<T, kHeadSize, kGeneral>(b, scratch, block, part, kv_head).Compute();
      });
}

}  // namespace xla_gpu::varlen_attention
