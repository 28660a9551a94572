// The gradients of K and V, and those of the query, on tensor cores, on any GPU from sm_80 on.
//
// Each output has one thread block, whose loop counts from the sequence's first token: nothing is
// added by atomics, and no thread block waits for another one. That takes seven products of which
// two are the same; one kernel for all would make thread blocks wait. Weights and gradients of
// logits stay in the registers where the products leave them, and are rounded to 16 bits for the
// next product.
#pragma once

#include "../../paged_attention/cuda/products.cuh"
#include "weights.cuh"

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

// K and V of positions from `begin` on.
template <int kPositions, int kNumThreads, bool kMayContinue, typename Rows, typename T>
__device__ __forceinline__ void CopyPositions(const Params& p, const Lengths& lengths,
                                              const TokenBlock& block, int32_t kv_head,
                                              int32_t begin, T* keys, T* values) {
  CopyRows<kPositions, kNumThreads, Rows>(
      p, keys, p.head_size, values, p.value_head_size, [&](int row, const auto& use) {
        if (begin + row >= block.first_position + block.len) return;
        const int64_t token = block.TokenAt<kMayContinue>(lengths, begin + row);
        use(KeyRow<T>(p, token, kv_head), ValueRow<T>(p, token, kv_head));
      });
}

// The query, and the gradient of the output, of rows from `begin` on.
template <int kRows, int kNumThreads, typename Rows, typename T>
__device__ __forceinline__ void CopyQueryRows(const BackwardParams& b, const TokenBlock& block,
                                              int32_t kv_head, int32_t begin, T* queries,
                                              T* douts) {
  const Params& p = b.forward;
  CopyRows<kRows, kNumThreads, Rows>(
      p, queries, p.head_size, douts, p.value_head_size, [&](int row, const auto& use) {
        const RowPlace place(p, kv_head, begin + row);
        if (place.token >= block.len) return;
        const int64_t token = int64_t{block.first_token} + place.token;
        use(QueryRow<T>(p, token, place.head), DoutRow<T>(b, token, place.head));
      });
}

// Writes two columns of a gradient.
template <typename T>
__device__ __forceinline__ void WritePair(void* array, int64_t offset, float first, float second) {
  *reinterpret_cast<uint32_t*>(static_cast<T*>(array) + offset) = gpu::Pack(first, second, T{});
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

  struct alignas(16) TileNumbers {
    RowNumbers rows[kTileRows];
    RowMask masks[kTileRows];
    RowBias biases[kTileRows];
  };
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
// sequence's first row, are added up one after the other: a row is a token and a head of the group.
// kGeneral: those of the sequences that continue this one follow, one sequence after the other.
template <typename T, int kHeadSize, bool kGeneral>
class KeyGradients {
  using Layout = KeyGradientsLayout<T, kHeadSize>;
  using Rows = typename Layout::Rows;
  static constexpr int kTileRows = Layout::kTileRows;
  static constexpr int kStages = Layout::kStages;
  using Products = WarpProducts<T, T, kHeadSize, kTileRows, Rows, Rows, Layout::kColumns>;

 public:
  __device__ KeyGradients(const BackwardParams& b, const BackwardScratch& scratch,
                          const TokenBlock& block, int32_t part, int32_t kv_head)
      : b_(b),
        p_(b.forward),
        scratch_(scratch),
        layout_(gpu::SharedMemory()),
        block_(block),
        queries_(block),
        kv_head_(kv_head),
        begin_(block.begin + part * Layout::kPositions),
        end_(static_cast<int32_t>(Smaller(begin_ + Layout::kPositions, block.len))) {}

  __device__ __forceinline__ void Compute() {
    if (begin_ >= block_.len) return;
    __syncthreads();  // everyone has left the part before
    CopyPositions<Layout::kPositions, kThreads, false, Rows>(p_, scratch_.lengths, block_, kv_head_,
                                                             From(), layout_.keys, layout_.values);
    Products keys, values;
    int stage = 0;
    do {
      const Span rows = RowsThatMayAttend(p_, Queries().Tokens(), From(), To());
      const auto end = static_cast<int32_t>((rows.end + kTileRows - 1) / kTileRows);
      int32_t tile = Next(static_cast<int32_t>(rows.begin / kTileRows), end);
      if (tile < end) CopyTile(tile, stage);
      gpu::CommitCopies();
      while (tile < end) {
        gpu::WaitCopies<0>();
        __syncthreads();  // the tile is here, and everyone has left the one before
        const int32_t next = Next(tile + 1, end);
        if (kStages > 1 && next < end) CopyTile(next, kStages - 1 - stage);
        gpu::CommitCopies();
        AddTile(tile, stage, &keys, &values);
        if (kStages == 1) {
          __syncthreads();
          if (next < end) CopyTile(next, 0);
          gpu::CommitCopies();
        }
        tile = next;
        stage = kStages - 1 - stage;
      }
    } while (kGeneral && queries_.NextThatContinues(scratch_.lengths, block_.sequence));
    gpu::WaitCopies<0>();
    Write(keys, p_.scale, b_.dkey, p_.head_size);
    Write(values, 1, b_.dvalue, p_.value_head_size);
  }

 private:
  // Nothing that follows from the thread's number stays in a register where it is not used.
  static __device__ __forceinline__ int Lane() { return gpu::Opaque(threadIdx.x) % gpu::kWarpSize; }
  static __device__ __forceinline__ int Warp() { return gpu::Opaque(threadIdx.x) / gpu::kWarpSize; }
  static __device__ __forceinline__ int WarpRow() { return Warp() % Layout::kPositionWarps * 16; }
  static __device__ __forceinline__ int FirstColumn() {
    return Warp() / Layout::kPositionWarps * Layout::kColumns;
  }

  // The sequence whose query rows are added up: this one, or one that continues it.
  __device__ __forceinline__ const TokenBlock& Queries() const {
    if constexpr (kGeneral) return queries_;
    return block_;
  }
  // The positions here.
  __device__ __forceinline__ int32_t From() const { return block_.first_position + begin_; }
  __device__ __forceinline__ int32_t To() const { return block_.first_position + end_; }

  // The first tile from `tile` on of which a row attends to a position here.
  __device__ __forceinline__ int32_t Next(int32_t tile, int32_t end) const {
    return NextTile<kTileRows>(p_, tile, end, [&](int32_t tile, int32_t row) {
      return MaskOf(p_, Queries(), kv_head_, tile * kTileRows + row).Meets(From(), To());
    });
  }

  // Whether some row of a tile does not attend to all positions here.
  __device__ __forceinline__ bool IsMasked(int32_t tile) const {
    const int64_t first = p_.group.Quotient(tile * kTileRows);
    const int64_t last = p_.group.Quotient(tile * kTileRows + kTileRows - 1);
    const TokenBlock& queries = Queries();
    return !AllAttend(p_, queries.Tokens(), first, Smaller(last, queries.len - 1), From(), To());
  }

  __device__ __forceinline__ void CopyTile(int32_t tile, int stage) const {
    const TokenBlock& queries = Queries();
    CopyQueryRows<kTileRows, kThreads, Rows>(b_, queries, kv_head_, tile * kTileRows,
                                             layout_.Queries(stage), layout_.Douts(stage));
    const auto row = static_cast<int32_t>(threadIdx.x);
    if (row >= kTileRows) return;
    auto& numbers = layout_.numbers[stage];
    const RowPlace place(p_, kv_head_, tile * kTileRows + row);
    const bool exists = place.token < queries.len;
    const int64_t token = int64_t{queries.first_token} + (exists ? place.token : 0);
    const RowNumbers* const from = scratch_.rows + token * p_.num_heads + place.head;
    gpu::CopyAsync4(&numbers.rows[row].lse, &from->lse, exists);
    gpu::CopyAsync4(&numbers.rows[row].delta, &from->delta, exists);
    if (IsMasked(tile)) {
      numbers.masks[row] = MaskOf(p_, queries, kv_head_, tile * kTileRows + row);
    }
    if constexpr (kGeneral) numbers.biases[row] = RowBias(p_, queries, place);
  }

  __device__ __forceinline__ void AddTile(int32_t tile, int stage, Products* keys,
                                          Products* values) const {
    float weights[kTileRows / 8][4] = {}, gradients[kTileRows / 8][4] = {};
    const T* const queries = layout_.Queries(stage);
    const T* const douts = layout_.Douts(stage);
    Products::MultiplyByKeys(layout_.keys, WarpRow(), queries, 0, weights);
    Products::MultiplyByKeys(layout_.values, WarpRow(), douts, 0, gradients);
    if (IsMasked(tile)) {
      Weigh<true>(stage, weights, gradients);
    } else {
      Weigh<false>(stage, weights, gradients);
    }
    // Columns of a row that are a multiple of 128 apart are as far apart in shared memory.
    values->template AddValues<T>(douts + FirstColumn(), 0, weights);
    keys->template AddValues<T>(queries + FirstColumn(), 0, gradients);
  }

  template <bool kMasked>
  __device__ __forceinline__ void Weigh(int stage, float (&weights)[kTileRows / 8][4],
                                        float (&gradients)[kTileRows / 8][4]) const {
    const auto& numbers = layout_.numbers[stage];
    const Weigher<kGeneral> weigher(p_);
    const int32_t first = From() + WarpRow() + Lane() / 4;
#pragma unroll
    for (int n = 0; n < kTileRows / 8; ++n) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const int row = n * 8 + Lane() % 4 * 2 + column;
        const RowNumbers of_row = numbers.rows[row];
        RowMask mask = {};
        RowBias bias = {};
        if constexpr (kMasked) mask = numbers.masks[row];
        if constexpr (kGeneral) bias = numbers.biases[row];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int32_t position = first + 8 * r;
          const bool attends = !kMasked || mask.Attends(position);
          weigher.Weigh(of_row, attends, bias, position, &weights[n][2 * r + column],
                        &gradients[n][2 * r + column]);
        }
      }
    }
  }

  __device__ __forceinline__ void Write(const Products& products, float factor, void* to,
                                        int64_t num_columns) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t number = begin_ + WarpRow() + Lane() / 4 + 8 * r;
      if (number >= block_.len) continue;
      const int64_t token = int64_t{block_.first_token} + number;
      const int64_t row = (token * p_.num_kv_heads + kv_head_) * num_columns;
#pragma unroll
      for (int n = 0; n < Layout::kColumns / 8; ++n) {
        const int column = FirstColumn() + n * 8 + Lane() % 4 * 2;
        if (column >= num_columns) continue;
        WritePair<T>(to, row + column, products.sums[n][2 * r] * factor,
                     products.sums[n][2 * r + 1] * factor);
      }
    }
  }

  const BackwardParams& b_;
  const Params& p_;
  const BackwardScratch& scratch_;
  const Layout layout_;
  const TokenBlock block_;
  TokenBlock queries_;
  const int32_t kv_head_;
  const int32_t begin_;  // of the sequence's own tokens
  const int32_t end_;
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
class QueryGradients {
  using Layout = QueryGradientsLayout<T, kHeadSize>;
  using Rows = typename Layout::Rows;
  static constexpr int kGroups = Layout::kGroups;
  // The soft cap and the slopes need the registers of half of them. A product has 16 positions: the
  // tiles decide no order.
  static constexpr int kTile = kGeneral ? Layout::kTile / 2 : Layout::kTile;
  using Products = WarpProducts<T, T, kHeadSize, kTile, Rows, Rows>;
  using Logits = float[kGroups][kTile / 8][4];

 public:
  __device__ QueryGradients(const BackwardParams& b, const BackwardScratch& scratch,
                            const TokenBlock& block, int32_t part, int32_t kv_head)
      : b_(b),
        p_(b.forward),
        scratch_(scratch),
        layout_(gpu::SharedMemory()),
        block_(block),
        kv_head_(kv_head),
        first_row_(block.begin * static_cast<int32_t>(b.forward.group.number) +
                   part * Layout::kTileRows) {}

  __device__ __forceinline__ void Compute() {
    first_ = RowPlace(p_, kv_head_, first_row_).token;
    if (first_ >= block_.len) return;
    last_ = min(RowPlace(p_, kv_head_, first_row_ + Layout::kTileRows - 1).token, block_.len - 1);
    __syncthreads();  // everyone has left the part before
    CopyQueryRows<Layout::kTileRows, kQueryThreads, Rows>(b_, block_, kv_head_, first_row_,
                                                          layout_.queries, layout_.douts);
    const Span positions = PositionsThatMayBeAttended(p_, block_.Tokens(), first_, last_);
    const auto end = static_cast<int32_t>((positions.end + kTile - 1) / kTile);
    int32_t tile = Next(static_cast<int32_t>(positions.begin / kTile), end);
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
  static __device__ __forceinline__ int Lane() { return gpu::Opaque(threadIdx.x) % gpu::kWarpSize; }
  static __device__ __forceinline__ int WarpRow() {
    return gpu::Opaque(threadIdx.x) / gpu::kWarpSize * 16;
  }

  __device__ __forceinline__ int32_t RowOf(int g, int r) const {
    return first_row_ + g * Layout::kGroupRows + WarpRow() + Lane() / 4 + 8 * r;
  }

  // The first KV tile from `tile` on to which a row here attends.
  __device__ __forceinline__ int32_t Next(int32_t tile, int32_t end) const {
    return NextTile<Layout::kTileRows>(p_, tile, end, [&](int32_t tile, int32_t row) {
      const RowMask mask = MaskOf(p_, block_, kv_head_, first_row_ + row);
      return mask.Meets(tile * kTile, tile * kTile + kTile);
    });
  }

  template <bool kKeys, bool kValues>
  __device__ __forceinline__ void Copy(int32_t tile) const {
    T* const keys = kKeys ? layout_.keys : nullptr;
    T* const values = kValues ? layout_.values : nullptr;
    CopyPositions<kTile, kQueryThreads, kGeneral, Rows>(p_, scratch_.lengths, block_, kv_head_,
                                                        tile * kTile, keys, values);
    gpu::CommitCopies();
  }

  // Zeros for rows that do not exist.
  __device__ __forceinline__ void CopyRowNumbers() const {
    const auto row = static_cast<int32_t>(threadIdx.x);
    if (row >= Layout::kTileRows) return;
    const RowPlace place(p_, kv_head_, first_row_ + row);
    const bool exists = place.token < block_.len;
    const int64_t token = int64_t{block_.first_token} + (exists ? place.token : 0);
    const RowNumbers* const from = scratch_.rows + token * p_.num_heads + place.head;
    gpu::CopyAsync4(&layout_.rows[row].lse, &from->lse, exists);
    gpu::CopyAsync4(&layout_.rows[row].delta, &from->delta, exists);
  }

  __device__ __forceinline__ void Weigh(int32_t begin, Logits& weights, Logits& gradients) {
    if (AllAttend(p_, block_.Tokens(), first_, last_, begin, begin + kTile)) {
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
      const int lane = Lane();
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
#pragma unroll
        for (int n = 0; n < kTile / 8; ++n) {
#pragma unroll
          for (int column = 0; column < 2; ++column) {
            const int32_t position = begin + n * 8 + Lane() % 4 * 2 + column;
            const float gradient =
                weigher.Weigh(row, !kMasked || mask.Attends(position), bias, position,
                              &weights[g][n][2 * r + column], &gradients[g][n][2 * r + column]);
            if constexpr (kGeneral) {
              const auto distance = static_cast<float>(abs(bias.position - position));
              slopes_[g][r] = gpu::Fma(-gradient, distance, slopes_[g][r]);
            }
          }
        }
      }
    }
  }

  __device__ __forceinline__ void Write(const Products (&products)[kGroups]) const {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const RowPlace place(p_, kv_head_, RowOf(g, r));
        float slope = slopes_[g][r];
        slope += gpu::ShuffleXor(slope, 1);
        slope += gpu::ShuffleXor(slope, 2);
        if (place.token >= block_.len) continue;
        const int64_t token = int64_t{block_.first_token} + place.token;
        const int64_t row = token * p_.num_heads + place.head;
        if (kGeneral && b_.dalibi_slopes != nullptr && Lane() % 4 == 0) {
          scratch_.slopes[row] = slope;
        }
#pragma unroll
        for (int n = 0; n < kHeadSize / 8; ++n) {
          const int column = n * 8 + Lane() % 4 * 2;
          if (column >= p_.head_size) continue;
          WritePair<T>(b_.dquery, row * p_.head_size + column,
                       products[g].sums[n][2 * r] * p_.scale,
                       products[g].sums[n][2 * r + 1] * p_.scale);
        }
      }
    }
  }

  const BackwardParams& b_;
  const Params& p_;
  const BackwardScratch& scratch_;
  const Layout layout_;
  const TokenBlock block_;
  const int32_t kv_head_;
  const int32_t first_row_;
  int32_t first_;  // token of the first row, and of the last one
  int32_t last_;
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
