// The gradients without tensor cores, in plain float32: for float32 arrays, and for those whose
// rows are not aligned. It is the simplest kernel: read it first.
//
// A thread block owns the gradients of some rows: of positions of K and V, or of the query. It
// walks over tiles of the others, and computes the weights of a tile before it adds their products
// up.
#pragma once

#include "weights.cuh"

namespace xla_gpu::varlen_attention {

template <int kHeadSize>
struct CudaCoreLayout {
  // Rows that a thread block owns, and rows of a tile.
  static constexpr int kRows = kHeadSize <= 128 ? 32 : 16;
  static constexpr int kStride = kHeadSize + 1;  // lanes in a column have different banks
  static constexpr int kWeightStride = kRows + 1;
  static constexpr int kArrays = 4;
  static constexpr int kSharedBytes =
      static_cast<int>((kArrays * kRows * kStride + 2 * kRows * kWeightStride) * sizeof(float) +
                       kRows * (sizeof(RowNumbers) + sizeof(RowMask) + sizeof(RowBias)));

  // The rows that are owned and those of a tile, [kRows] each: K or the query, and V or the
  // gradient of the output.
  float* own[2];
  float* others[2];
  float* weights;    // [kRows]: of a row that is owned, those of a tile
  float* gradients;  // the same, of logits
  RowNumbers* rows;  // [kRows], of query rows
  RowMask* masks;
  RowBias* biases;

  __device__ explicit CudaCoreLayout(char* memory) {
    auto* floats = reinterpret_cast<float*>(memory);
    constexpr int kArray = kRows * kStride;
    for (int i = 0; i < 2; ++i) {
      own[i] = floats + i * kArray;
      others[i] = floats + (2 + i) * kArray;
    }
    weights = floats + kArrays * kArray;
    gradients = weights + kRows * kWeightStride;
    rows = reinterpret_cast<RowNumbers*>(gradients + kRows * kWeightStride);
    masks = reinterpret_cast<RowMask*>(rows + kRows);
    biases = reinterpret_cast<RowBias*>(masks + kRows);
  }
};

// kOfKeys: the gradients of K and V, else those of the query.
template <int kHeadSize, bool kOfKeys>
class CudaCoreItem {
  using Layout = CudaCoreLayout<kHeadSize>;
  static constexpr int kRows = Layout::kRows;
  static constexpr int kPairs = kRows * kRows / kThreads;  // of an own row and another, a thread
  // Each thread adds up one column of every kApart-th row.
  static constexpr int kApart = kThreads / kHeadSize;
  static constexpr int kSums = kRows / kApart;
  static_assert(kThreads % kHeadSize == 0 && kRows % kApart == 0);

 public:
  __device__ CudaCoreItem(const BackwardParams& b, const BackwardScratch& scratch,
                          const TokenBlock& block, int32_t part, int32_t kv_head)
      : b_(b),
        p_(b.forward),
        scratch_(scratch),
        layout_(gpu::SharedMemory()),
        block_(block),
        queries_(block),
        kv_head_(kv_head),
        begin_(block.begin * (kOfKeys ? 1 : static_cast<int32_t>(b.forward.group.number)) +
               part * kRows) {}

  template <typename T>
  __device__ void Compute() {
    const int32_t first = TokenOf(begin_);
    if (first >= block_.len) return;
    const int32_t last = min(TokenOf(begin_ + kRows - 1), block_.len - 1);
    __syncthreads();  // everyone has left the part before
    Load<T, kOfKeys>(kOfKeys ? block_.first_position + begin_ : begin_, layout_.own);
    float sums[2][kSums] = {}, slopes[kPairs] = {};
    do {
      Span others;
      if constexpr (kOfKeys) {
        const int32_t before = block_.first_position;
        others = RowsThatMayAttend(p_, queries_.Tokens(), before + first, before + last + 1);
      } else {
        others = PositionsThatMayBeAttended(p_, block_.Tokens(), first, last);
      }
      const auto end = static_cast<int32_t>(others.end);
      for (auto tile = static_cast<int32_t>(others.begin) / kRows * kRows; tile < end;
           tile += kRows) {
        __syncthreads();  // everyone has left the tile before
        Load<T, !kOfKeys>(tile, layout_.others);
        __syncthreads();
        if (!AnyAttends(tile)) continue;
        Weigh(tile, slopes);
        __syncthreads();
        Add(sums);
      }
    } while (kOfKeys && queries_.NextThatContinues(scratch_.lengths, block_.sequence));
    if constexpr (kOfKeys) {
      Write<T>(sums[0], p_.scale, b_.dkey, p_.num_kv_heads, p_.head_size);
      Write<T>(sums[1], 1, b_.dvalue, p_.num_kv_heads, p_.value_head_size);
    } else {
      Write<T>(sums[0], p_.scale, b_.dquery, p_.num_heads, p_.head_size);
      if (b_.dalibi_slopes != nullptr) WriteSlopes(slopes);
    }
  }

 private:
  // The token of a row that is owned, counted from the sequence's first.
  __device__ int32_t TokenOf(int32_t row) const {
    if constexpr (kOfKeys) return row;
    return RowPlace(p_, kv_head_, row).token;
  }
  // The number of one, whose place in the tensor is [.., token, head, columns].
  __device__ int64_t NumberOf(int32_t row) const {
    if constexpr (kOfKeys) {
      return (int64_t{block_.first_token} + row) * p_.num_kv_heads + kv_head_;
    } else {
      const RowPlace place(p_, kv_head_, row);
      return (int64_t{block_.first_token} + place.token) * p_.num_heads + place.head;
    }
  }

  // Loads kRows rows of K and V from a position on, or of the query and the gradient of the
  // output. What does not exist becomes zeros.
  template <typename T, bool kKeys>
  __device__ void Load(int32_t begin, float* const (&to)[2]) const {
    for (int row = Warp(); row < kRows; row += kWarps) {
      const T* from[2];
      bool exists;
      if constexpr (kKeys) {
        exists = begin + row < block_.first_position + block_.len;
        const int64_t token =
            exists ? block_.TokenAt<true>(scratch_.lengths, begin + row) : block_.first_token;
        from[0] = KeyRow<T>(p_, token, kv_head_);
        from[1] = ValueRow<T>(p_, token, kv_head_);
      } else {
        const RowPlace place(p_, kv_head_, begin + row);
        exists = place.token < queries_.len;
        const int64_t token = int64_t{queries_.first_token} + (exists ? place.token : 0);
        from[0] = QueryRow<T>(p_, token, place.head);
        from[1] = DoutRow<T>(b_, token, place.head);
        if (Lane() == 0) {
          layout_.rows[row] =
              exists ? scratch_.rows[token * p_.num_heads + place.head] : RowNumbers();
          layout_.masks[row] = RowMask(p_, queries_.Tokens(), place.token);
          layout_.biases[row] = RowBias(p_, queries_, place);
        }
      }
      const int64_t columns[2] = {p_.head_size, p_.value_head_size};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        for (int column = Lane(); column < kHeadSize; column += gpu::kWarpSize) {
          to[i][row * Layout::kStride + column] =
              exists && column < columns[i] ? gpu::ToFloat(from[i][column]) : 0.0f;
        }
      }
    }
  }

  // The numbers of a pair of rows: of the query row among kRows, and of the position.
  __device__ int QueryOf(int own, int other) const { return kOfKeys ? other : own; }
  __device__ int32_t PositionOf(int32_t tile, int own, int other) const {
    return kOfKeys ? block_.first_position + begin_ + own : tile + other;
  }

  // Whether any row attends to any position. Also a barrier.
  __device__ bool AnyAttends(int32_t tile) const {
    const int32_t from = PositionOf(tile, 0, 0);
    const auto row = static_cast<int>(threadIdx.x);
    return __syncthreads_or(row < kRows && layout_.masks[row].Meets(from, from + kRows));
  }

  __device__ void Weigh(int32_t tile, float (&slopes)[kPairs]) const {
    const Weigher</*kGeneral=*/true, /*kOnCudaCores=*/true> weigher(p_);
    constexpr int kStep = kThreads / kRows;
    const int other = threadIdx.x % kRows, first = threadIdx.x / kRows;
    float products[kPairs] = {}, of_values[kPairs] = {};
    const auto num_columns = static_cast<int>(p_.head_size);  // V has no more
    for (int d = 0; d < num_columns; ++d) {
      const float b[2] = {layout_.others[0][other * Layout::kStride + d],
                          layout_.others[1][other * Layout::kStride + d]};
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const int at = (first + i * kStep) * Layout::kStride + d;
        products[i] = gpu::Fma(layout_.own[0][at], b[0], products[i]);
        of_values[i] = gpu::Fma(layout_.own[1][at], b[1], of_values[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int own = first + i * kStep, query = QueryOf(own, other);
      const int32_t position = PositionOf(tile, own, other);
      const RowBias bias = layout_.biases[query];
      const float gradient =
          weigher.Weigh(layout_.rows[query], layout_.masks[query].Attends(position), bias, position,
                        &products[i], &of_values[i]);
      const auto distance = static_cast<float>(abs(bias.position - position));
      slopes[i] = gpu::Fma(-gradient, distance, slopes[i]);
      layout_.weights[own * Layout::kWeightStride + other] = products[i];
      layout_.gradients[own * Layout::kWeightStride + other] = of_values[i];
    }
  }

  // Adds the products of a tile's weights and rows, one row after the other.
  __device__ void Add(float (&sums)[2][kSums]) const {
    const int column = threadIdx.x % kHeadSize, first = threadIdx.x / kHeadSize;
    for (int other = 0; other < kRows; ++other) {
      const int at = other * Layout::kStride + column;
      const float rows[2] = {layout_.others[0][at], kOfKeys ? layout_.others[1][at] : 0.0f};
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        const int weight = (first + i * kApart) * Layout::kWeightStride + other;
        sums[0][i] = gpu::Fma(layout_.gradients[weight], rows[0], sums[0][i]);
        if (kOfKeys) sums[1][i] = gpu::Fma(layout_.weights[weight], rows[1], sums[1][i]);
      }
    }
  }

  template <typename T>
  __device__ void Write(const float (&sums)[kSums], float factor, void* to, int64_t num_heads,
                        int64_t num_columns) const {
    const int column = threadIdx.x % kHeadSize, first = threadIdx.x / kHeadSize;
    if (column >= num_columns) return;
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const int32_t row = begin_ + first + i * kApart;
      if (TokenOf(row) >= block_.len) continue;
      gpu::FromFloat(sums[i] * factor, static_cast<T*>(to) + NumberOf(row) * num_columns + column);
    }
  }

  __device__ void WriteSlopes(float (&slopes)[kPairs]) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      for (int mask = kRows / 2; mask > 0; mask /= 2) {
        slopes[i] += gpu::ShuffleXor(slopes[i], mask);
      }
      const int32_t row = begin_ + threadIdx.x / kRows + i * (kThreads / kRows);
      if (threadIdx.x % kRows == 0 && TokenOf(row) < block_.len) {
        scratch_.slopes[NumberOf(row)] = slopes[i];
      }
    }
  }

  const BackwardParams& b_;
  const Params& p_;
  const BackwardScratch& scratch_;
  const Layout layout_;
  const TokenBlock block_;
  TokenBlock queries_;  // the sequence of the query rows: this one, or one that continues it
  const int32_t kv_head_;
  const int32_t begin_;  // of the rows that are owned, counted from the sequence's first
};

template <typename T, int kHeadSize, bool kOfKeys>
__global__ void __launch_bounds__(kThreads, 2)
    CudaCoreGradients(BackwardParams b, BackwardScratch scratch) {
  const int64_t rows = kBlockTokens * (kOfKeys ? int64_t{1} : int64_t{b.forward.group.number});
  ForParts<!kOfKeys, /*kMayContinue=*/true>(
      b.forward, scratch.lengths, rows / CudaCoreLayout<kHeadSize>::kRows,
      [&](const TokenBlock& block, int32_t part, int32_t kv_head) {
        CudaCoreItem<kHeadSize, kOfKeys>(b, scratch, block, part, kv_head).template Compute<T>();
      });
}

}  // namespace xla_gpu::varlen_attention
