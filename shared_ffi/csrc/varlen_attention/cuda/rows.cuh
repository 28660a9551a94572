// The rows of a part of the derivative: what a kernel for tensor cores copies, how it turns
// products into weights and gradients where these leave them, and what it writes.
#pragma once

#include "weights.cuh"

namespace xla_gpu::varlen_attention {

// K and V of positions from `begin` on: calls use(key, value) with the places of the row-th, if it
// exists.
template <typename T, bool kMayContinue>
struct PositionRows {
  const Params& p;
  const Lengths& lengths;
  const TokenBlock& block;
  int32_t kv_head;
  int32_t begin;

  template <typename Use>
  __device__ __forceinline__ void operator()(int row, const Use& use) const {
    if (begin + row >= block.first_position + block.len) return;
    const int64_t token = block.TokenAt<kMayContinue>(lengths, begin + row);
    use(KeyRow<T>(p, token, kv_head), ValueRow<T>(p, token, kv_head));
  }
};

// The same for the query, and the gradient of the output, of rows from `begin` on.
template <typename T>
struct QueryRows {
  const BackwardParams& b;
  const TokenBlock& block;
  int32_t kv_head;
  int32_t begin;

  template <typename Use>
  __device__ __forceinline__ void operator()(int row, const Use& use) const {
    const RowPlace place(b.forward, kv_head, begin + row);
    if (place.token >= block.len) return;
    const int64_t token = int64_t{block.first_token} + place.token;
    use(QueryRow<T>(b.forward, token, place.head), DoutRow<T>(b, token, place.head));
  }
};

// Begins to copy the numbers of a query row; zeros if it does not exist.
__device__ __forceinline__ void CopyNumbers(const Params& p, const BackwardScratch& scratch,
                                            const TokenBlock& block, const RowPlace& place,
                                            RowNumbers* to) {
  const bool exists = place.token < block.len;
  const int64_t token = int64_t{block.first_token} + (exists ? place.token : 0);
  const RowNumbers* const from = scratch.rows + token * p.num_heads + place.head;
  gpu::CopyAsync4(&to->lse, &from->lse, exists);
  gpu::CopyAsync4(&to->delta, &from->delta, exists);
}

// What kRows query rows in shared memory have beside their columns.
template <int kRows>
struct alignas(16) NumbersOfRows {
  RowNumbers rows[kRows];
  RowMask masks[kRows];
  RowBias biases[kRows];

  // Begins to copy those of the row-th of a sequence's rows from `first` on.
  template <bool kGeneral>
  __device__ __forceinline__ void Copy(const Params& p, const BackwardScratch& scratch,
                                       const TokenBlock& block, int32_t kv_head, int32_t first,
                                       int32_t row, bool is_masked) {
    const RowPlace place(p, kv_head, first + row);
    CopyNumbers(p, scratch, block, place, &rows[row]);
    if (is_masked) masks[row] = MaskOf(p, block, kv_head, first + row);
    if constexpr (kGeneral) biases[row] = RowBias(p, block, place);
  }
};

// Nothing that follows from the thread's number stays in a register where it is not used.
__device__ __forceinline__ int OwnLane() { return gpu::Opaque(threadIdx.x) % gpu::kWarpSize; }

// Weighs the products of 16 positions from `first` on, a row of them each, and kRows query rows.
template <bool kGeneral, bool kMasked, int kRows>
__device__ __forceinline__ void WeighPositions(const Params& p, const NumbersOfRows<kRows>& numbers,
                                               int32_t first, float (&weights)[kRows / 8][4],
                                               float (&gradients)[kRows / 8][4]) {
  const Weigher<kGeneral> weigher(p);
  const int32_t first_of_lane = first + OwnLane() / 4;
#pragma unroll
  for (int n = 0; n < kRows / 8; ++n) {
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const int row = n * 8 + OwnLane() % 4 * 2 + column;
      const RowNumbers of_row = numbers.rows[row];
      RowMask mask = {};
      RowBias bias = {};
      if constexpr (kMasked) mask = numbers.masks[row];
      if constexpr (kGeneral) bias = numbers.biases[row];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int32_t position = first_of_lane + 8 * r;
        const bool attends = !kMasked || mask.Attends(position);
        weigher.Weigh(of_row, attends, bias, position, &weights[n][2 * r + column],
                      &gradients[n][2 * r + column]);
      }
    }
  }
}

// Weighs the products of the lane's query row r, 0 or 1, and kBlocks times 8 positions from `begin`
// on. Adds to the row's part of the slopes' gradient.
template <bool kMasked, bool kGeneral, int kBlocks>
__device__ __forceinline__ void WeighRow(const Weigher<kGeneral>& weigher, const RowNumbers& row,
                                         const RowMask& mask, const RowBias& bias, int32_t begin,
                                         int r, float (&weights)[kBlocks][4],
                                         float (&gradients)[kBlocks][4], float* slope) {
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const int32_t position = begin + n * 8 + OwnLane() % 4 * 2 + column;
      const float gradient =
          weigher.Weigh(row, !kMasked || mask.Attends(position), bias, position,
                        &weights[n][2 * r + column], &gradients[n][2 * r + column]);
      if constexpr (kGeneral) {
        const auto distance = static_cast<float>(abs(bias.position - position));
        *slope = gpu::Fma(-gradient, distance, *slope);
      }
    }
  }
}

// Writes the lane's columns of its row r from first_column on, times a factor, to a row of an
// array.
template <typename T, int kBlocks>
__device__ __forceinline__ void WriteColumns(const float (&sums)[kBlocks][4], int r, float factor,
                                             int first_column, int64_t num_columns, T* row) {
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    const int column = first_column + n * 8 + OwnLane() % 4 * 2;
    if (column >= num_columns) continue;
    *reinterpret_cast<uint32_t*>(row + column) =
        gpu::Pack(sums[n][2 * r] * factor, sums[n][2 * r + 1] * factor, T{});
  }
}

// Tiles of a loop, counted from a sequence's first row or position.
struct Tiles {
  int32_t begin;
  int32_t end;

  __device__ __forceinline__ Tiles(const Span& span, int tile)
      : begin(static_cast<int32_t>(span.begin / tile)),
        end(static_cast<int32_t>((span.end + tile - 1) / tile)) {}
};

// Positions of a sequence and kv head whose gradients are added up over tiles of kTileRows query
// rows: a row is a token and a head of the group. kGeneral: the rows of the sequences that continue
// this one follow, one sequence after the other.
template <int kTileRows, bool kGeneral>
class AttendedPositions {
 protected:
  // They are the `count` from `begin` on of the sequence's own tokens.
  __device__ AttendedPositions(const BackwardParams& b, const BackwardScratch& scratch,
                               const TokenBlock& block, int32_t kv_head, int32_t begin,
                               int32_t count)
      : b_(b),
        p_(b.forward),
        scratch_(scratch),
        block_(block),
        queries_(block),
        kv_head_(kv_head),
        begin_(begin),
        end_(static_cast<int32_t>(Smaller(begin + count, block.len))) {}

  // The sequence whose query rows are added up: this one, or one that continues it.
  __device__ __forceinline__ const TokenBlock& Queries() const {
    if constexpr (kGeneral) return queries_;
    return block_;
  }
  // Goes on to the next of them. Returns whether there is one.
  __device__ __forceinline__ bool NextQueries() {
    return kGeneral && queries_.NextThatContinues(scratch_.lengths, block_.sequence);
  }

  // The positions here.
  __device__ __forceinline__ int32_t From() const { return block_.first_position + begin_; }
  __device__ __forceinline__ int32_t To() const { return block_.first_position + end_; }

  __device__ __forceinline__ Tiles TilesOfQueries() const {
    return {RowsThatMayAttend(p_, Queries().Tokens(), From(), To()), kTileRows};
  }
  // Whether a row of a tile attends to a position here, but for holes.
  __device__ __forceinline__ bool Meets(int32_t tile, int32_t row) const {
    return MaskOf(p_, Queries(), kv_head_, tile * kTileRows + row).Meets(From(), To());
  }
  // Whether some row of a tile does not attend to all positions here.
  __device__ __forceinline__ bool IsMasked(int32_t tile) const {
    const int64_t first = p_.group.Quotient(tile * kTileRows);
    const int64_t last = p_.group.Quotient(tile * kTileRows + kTileRows - 1);
    const TokenBlock& queries = Queries();
    return !AllAttend(p_, queries.Tokens(), first, Smaller(last, queries.len - 1), From(), To());
  }

  // Writes the sums of a warp's 16 positions, from `first` of the sequence's own tokens on.
  template <typename T, int kBlocks>
  __device__ __forceinline__ void WritePositions(int32_t first, int first_column,
                                                 const float (&sums)[kBlocks][4], float factor,
                                                 void* to, int64_t num_columns) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t number = first + OwnLane() / 4 + 8 * r;
      if (number >= block_.len) continue;
      const int64_t token = int64_t{block_.first_token} + number;
      const int64_t row = (token * p_.num_kv_heads + kv_head_) * num_columns;
      WriteColumns(sums, r, factor, first_column, num_columns, static_cast<T*>(to) + row);
    }
  }

  const BackwardParams& b_;
  const Params& p_;
  const BackwardScratch& scratch_;
  const TokenBlock block_;
  TokenBlock queries_;
  const int32_t kv_head_;
  const int32_t begin_;  // of the sequence's own tokens
  const int32_t end_;
};

// kRows query rows of a sequence and kv head whose gradients are added up over KV tiles.
template <int kRows, bool kGeneral>
class OwnedRows {
 protected:
  __device__ OwnedRows(const BackwardParams& b, const BackwardScratch& scratch,
                       const TokenBlock& block, int32_t part, int32_t kv_head)
      : b_(b),
        p_(b.forward),
        scratch_(scratch),
        block_(block),
        kv_head_(kv_head),
        first_row_(block.begin * static_cast<int32_t>(b.forward.group.number) + part * kRows),
        first_(RowPlace(p_, kv_head, first_row_).token),
        last_(min(RowPlace(p_, kv_head, first_row_ + kRows - 1).token, block.len - 1)) {}

  __device__ __forceinline__ bool Exist() const { return first_ < block_.len; }

  template <int kTile>
  __device__ __forceinline__ Tiles TilesOfPositions() const {
    return {PositionsThatMayBeAttended(p_, block_.Tokens(), first_, last_), kTile};
  }
  // Whether a row here attends to a position of a tile, but for holes.
  template <int kTile>
  __device__ __forceinline__ bool Meets(int32_t tile, int32_t row) const {
    const RowMask mask = MaskOf(p_, block_, kv_head_, first_row_ + row);
    return mask.Meets(tile * kTile, tile * kTile + kTile);
  }
  // Whether some row here does not attend to all positions in [from, to).
  __device__ __forceinline__ bool IsMasked(int32_t from, int32_t to) const {
    return !AllAttend(p_, block_.Tokens(), first_, last_, from, to);
  }

  // Writes the sums of the lane's row r, whose number is `number` among the sequence's. The lanes
  // of the row each have a part of its slope.
  template <typename T, int kBlocks>
  __device__ __forceinline__ void WriteRow(int32_t number, int r, const float (&sums)[kBlocks][4],
                                           float slope) const {
    const RowPlace place(p_, kv_head_, number);
    slope += gpu::ShuffleXor(slope, 1);
    slope += gpu::ShuffleXor(slope, 2);
    if (place.token >= block_.len) return;
    const int64_t token = int64_t{block_.first_token} + place.token;
    const int64_t row = token * p_.num_heads + place.head;
    if (kGeneral && b_.dalibi_slopes != nullptr && OwnLane() % 4 == 0) {
      scratch_.slopes[row] = slope;
    }
    WriteColumns(sums, r, p_.scale, 0, p_.head_size,
                 static_cast<T*>(b_.dquery) + row * p_.head_size);
  }

  const BackwardParams& b_;
  const Params& p_;
  const BackwardScratch& scratch_;
  const TokenBlock block_;
  const int32_t kv_head_;
  const int32_t first_row_;

 private:
  const int32_t first_;  // token of the first row, and of the last one
  const int32_t last_;
};

}  // namespace xla_gpu::varlen_attention
