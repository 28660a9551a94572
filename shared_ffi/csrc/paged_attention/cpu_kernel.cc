// The CPU kernel: online softmax (Milakov and Gimelshein, arXiv:1805.02867) over tiles of the
// cache.
//
// A piece of work is some query rows (a row is a query token and head) at some splits of the
// context. For each tile of kTile positions and each kv head it
//   1. computes logits, a block of rows by some positions at a time, and turns them into weights,
//   2. adds the weighted V to the rows' sums, a block of rows by some columns at a time.
// One block of rows reads K and V where the block table says; several read them packed, as floats.
// Meanwhile the next tile is brought nearer. Tiles and splits begin at multiples of their size.
//
// A logit is summed across lanes by one fixed tree, and V position after position: a row's bits
// depend on the row and on what it attends to, and on nothing else, neither on the rows beside it
// nor on how the work is cut. They are the same in any batch, for any number of threads, and for a
// token that is prefilled, chunked or decoded. Instruction sets differ in their bits.
#include "cpu_kernel.h"

#include <type_traits>

#include "../simd.h"

// The compiler chooses which product of a sum to fuse: one copy of a function, one choice.
#define XLA_GPU_ONE_COPY __attribute__((noinline))

namespace xla_gpu::paged_attention {
namespace {

constexpr int kRows = 4;  // of a block, at most
constexpr int64_t kCacheLineBytes = 64;
constexpr float kInfinity = __builtin_inff();
constexpr float kLog2E = 1.44269504f;

XLA_GPU_INLINE int64_t RoundUp(int64_t a, int64_t b) { return DivideUp(a, b) * b; }

// The cache lines of the next tile, asked for one by one, evenly over the computation of this tile:
// the processor cannot foresee where a block table leads, and drops what it is asked for in a
// burst.
class Prefetcher {
 public:
  Prefetcher(const char* const* rows, int64_t num_rows, int64_t num_bytes)
      : row_(rows), end_(rows + num_rows), num_bytes_(num_bytes) {
    TakeRow();
  }

  // So many steps there will be, about.
  void Expect(int64_t num_steps) {
    const int64_t num_lines =
        (end_ - row_ + 1) * ((num_bytes_ + kCacheLineBytes - 1) / kCacheLineBytes);
    lines_per_step_ = line_ == nullptr ? 0 : (num_lines + num_steps - 1) / num_steps;
  }

  XLA_GPU_INLINE void Step() {
    for (int64_t i = 0; i < lines_per_step_; ++i, line_ += kCacheLineBytes) {
      __builtin_prefetch(line_, /*rw=*/0, /*locality=*/3);
    }
    if (line_ >= end_of_row_) TakeRow();
  }

 private:
  void TakeRow() {
    if (row_ == end_) {
      lines_per_step_ = 0;
      line_ = nullptr;
      end_of_row_ = reinterpret_cast<const char*>(1);
      return;
    }
    line_ = *row_++;
    end_of_row_ = line_ + num_bytes_;
  }

  const char* const* row_;  // the next
  const char* const* const end_;
  const int64_t num_bytes_;
  const char* line_;
  const char* end_of_row_;
  int64_t lines_per_step_ = 0;
};

// K or V of a tile and a kv head, packed.
struct PackedRows {
  const float* rows;  // [kTile, stride]
  int64_t stride;

  // Columns from d on, of which `count` exist.
  XLA_GPU_INLINE Lanes At(int64_t j, int64_t d, int64_t) const {
    return Load<Lanes>(rows + j * stride + d);
  }
};

// The same in the cache.
template <typename T>
struct CachedRows {
  const char* const* keys;  // [kTile]
  int64_t offset;           // from there, in bytes

  XLA_GPU_INLINE Lanes At(int64_t j, int64_t d, int64_t count) const {
    return LoadWide(reinterpret_cast<const T*>(keys[j] + offset) + d, count);
  }
};

// Positions of which MultiplyRows computes the logits of R rows at once: one sum in each lane.
template <int R>
constexpr int64_t kPositions = kLanes / R;

// logits[r, j] = q[r] . k[j] for R rows and kPositions positions from j on.
//   q: [R, stride], padded with zeros; logits: [R, kTile]
template <int R, typename Rows>
XLA_GPU_INLINE void MultiplyRows(const float* q, const Rows& k, int64_t j, int64_t head_size,
                                 int64_t stride, float* logits, Prefetcher* next) {
  Lanes sums[kLanes] = {};
  const auto add = [&](int64_t d, int64_t count) __attribute__((always_inline)) {
    next->Step();
    Lanes queries[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) queries[r] = Load<Lanes>(q + r * stride + d);
#pragma GCC unroll 16
    for (int i = 0; i < kPositions<R>; ++i) {
      const Lanes key = k.At(j + i, d, count);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) sums[PlaceOf(r * kPositions<R> + i)] += queries[r] * key;
    }
  };
  int64_t d = 0;
  for (; d + kLanes <= head_size; d += kLanes) add(d, kLanes);
  if (d < head_size) add(d, head_size - d);
  const Lanes products = SumEach(sums);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    std::memcpy(logits + r * kTile + j,
                reinterpret_cast<const float*>(&products) + r * kPositions<R>,
                kPositions<R> * sizeof(float));
  }
}

// The same for all positions of [begin, end) and perhaps some beside them.
template <int R, typename Rows>
void MultiplyBlock(const float* q, const Rows& k, int64_t begin, int64_t end, int64_t head_size,
                   int64_t stride, float* logits, Prefetcher* next) {
  for (int64_t j = begin / kPositions<R> * kPositions<R>; j < end; j += kPositions<R>) {
    MultiplyRows<R>(q, k, j, head_size, stride, logits, next);
  }
}

// sums[r] = sums[r] * shrink[r] + sum of weights[r, j] * v[j] over j in [begin, end), for R rows
// and kVectors vectors of columns from d on, of which `count` exist.
//   weights: [R, kTile]; sums: [R, stride]
template <int R, int kVectors, typename Rows>
XLA_GPU_INLINE void AddColumns(const float* weights, const Rows& v, int64_t begin, int64_t end,
                               int64_t d, int64_t count, int64_t stride, const float* shrink,
                               float* sums, Prefetcher* next) {
  Lanes block[R][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      block[r][i] = Load<Lanes>(sums + r * stride + d + i * kLanes) * shrink[r];
    }
  }
  for (int64_t j = begin; j < end; ++j) {
    next->Step();
    Lanes values[kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) values[i] = v.At(j, d + i * kLanes, count);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Lanes weight = Splat(weights[r * kTile + j]);
#pragma GCC unroll 16
      for (int i = 0; i < kVectors; ++i) block[r][i] += weight * values[i];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) Store(block[r][i], sums + r * stride + d + i * kLanes);
  }
}

template <int R, typename Rows>
void AddBlock(const float* weights, const Rows& v, int64_t begin, int64_t end, int64_t head_size,
              int64_t stride, const float* shrink, float* sums, Prefetcher* next) {
  constexpr int64_t kColumns = kBlockVectors * kLanes;
  int64_t d = 0;
  for (; d + kColumns <= head_size; d += kColumns) {
    AddColumns<R, kBlockVectors>(weights, v, begin, end, d, kLanes, stride, shrink, sums, next);
  }
  for (; d + kLanes <= head_size; d += kLanes) {
    AddColumns<R, 1>(weights, v, begin, end, d, kLanes, stride, shrink, sums, next);
  }
  if (d < head_size) {
    AddColumns<R, 1>(weights, v, begin, end, d, head_size - d, stride, shrink, sums, next);
  }
}

// Calls function(R, first) for blocks of R rows, a constant, from row `first` on, that make up
// num_rows.
template <typename Function>
XLA_GPU_INLINE void ForEachBlock(int64_t num_rows, Function function) {
  int64_t first = 0;
  for (; first + 4 <= num_rows; first += 4) function(std::integral_constant<int, 4>(), first);
  if (first + 2 <= num_rows) {
    function(std::integral_constant<int, 2>(), first);
    first += 2;
  }
  if (first < num_rows) function(std::integral_constant<int, 1>(), first);
}

// What a row has seen in a split so far: the largest logit, in units of log2(e), and for each lane
// the sum of 2^(logit - max).
struct RowState {
  float max;
  Lanes sums;
};

// Replaces a row's logits, of which those at [begin, end) of the tile count, by their weights, zero
// where they do not, and returns the factor by which the row's earlier sums must shrink.
XLA_GPU_ONE_COPY float Weigh(float* logits, int64_t begin, int64_t end, float soft_cap,
                             RowState* state) {
  constexpr int kVectors = kTile / kLanes;
  Lanes x[kVectors], largest = Splat(-kInfinity);
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) {
    x[i] = Load<Lanes>(logits + i * kLanes);
    if (soft_cap > 0) x[i] = Tanh(x[i]) * (soft_cap * kLog2E);
    if (begin > 0 || end < kTile) {
      x[i] = LanesIn(begin - i * kLanes, end - i * kLanes) ? x[i] : Splat(-kInfinity);
    }
    largest = Max(x[i], largest);
  }
  const float found = MaxOfLanes(largest);
  const float max = found > state->max ? found : state->max;
  const float shift = max == -kInfinity ? 0.0f : max;  // all logits -inf: weights of 0, not NaN
  const float shrink = Exp2OfNonPositive(Splat(state->max - shift))[0];
  Lanes sums = state->sums * shrink;
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) {
    const Lanes weights = Exp2OfNonPositive(x[i] - shift);
    Store(weights, logits + i * kLanes);
    sums += weights;
  }
  *state = {max, sums};
  return shrink;
}

template <typename T>
class Attention {
 public:
  Attention(const Params& p, const Piece& piece, Allocate allocate)
      : p_(p),
        piece_(piece),
        group_(p.num_heads / p.num_kv_heads),
        rows_per_head_(piece.num_tokens * group_),
        num_rows_(piece.num_heads * rows_per_head_),
        stride_(RoundUp(p.head_size, kLanes)),
        head_bytes_(2 * p.head_size * static_cast<int64_t>(sizeof(T))) {
    const struct {
      void* array;
      int64_t num_bytes;
    } arrays[] = {
        {&q_, num_rows_ * stride_ * 4},
        {&k_, kTile * stride_ * 4},
        {&v_, kTile * stride_ * 4},
        {&logits_, rows_per_head_ * kTile * 4},
        {&shrink_, rows_per_head_ * 4},
        {&sums_, num_rows_ * stride_ * 4},
        {&totals_, num_rows_ * stride_ * 4},
        {&total_max_, num_rows_ * 4},
        {&total_weight_, num_rows_ * 4},
        {&states_, num_rows_ * static_cast<int64_t>(sizeof(RowState))},
        {&keys_, kTile * 8},
        {&next_keys_, kTile * 8},
        {&positions_, rows_per_head_ * 4},
    };
    int64_t num_bytes = 0;
    for (const auto& x : arrays) num_bytes += RoundUp(x.num_bytes, kCacheLineBytes);
    char* memory = reinterpret_cast<char*>(allocate(num_bytes / 4));
    for (const auto& x : arrays) {
      std::memcpy(x.array, &memory, sizeof(memory));
      memory += RoundUp(x.num_bytes, kCacheLineBytes);
    }
  }

  void Attend() {
    WidenQueries();
    for (int64_t row = 0; row < rows_per_head_; ++row) {
      positions_[row] = static_cast<int32_t>(piece_.position + row / group_);
    }
    if (piece_.findings == nullptr) StartTotals();
    num_next_ = FindKeys(piece_.begin / kTile * kTile, next_keys_);
    for (int64_t split = piece_.begin / kSplit * kSplit; split < piece_.end; split += kSplit) {
      StartSplit();
      const int64_t begin = Larger(piece_.begin, split), end = Smaller(piece_.end, split + kSplit);
      for (int64_t tile = begin / kTile * kTile; tile < end; tile += kTile) {
        const char** found = next_keys_;
        next_keys_ = keys_;
        keys_ = found;
        num_next_ = FindKeys(tile + kTile, next_keys_);
        for (int64_t head = 0; head < piece_.num_heads; ++head) {
          AttendToTile(head, tile, Larger(begin, tile), Smaller(end, tile + kTile));
        }
      }
      EndSplit(split / kSplit - piece_.begin / kSplit);
    }
    if (piece_.findings == nullptr) FinishRows();
  }

  void Merge() {
    StartTotals();
    for (int64_t split = 0; split < piece_.NumSplits(); ++split) {
      for (int64_t row = 0; row < num_rows_; ++row) {
        const float* finding = piece_.findings + (split * num_rows_ + row) * FindingSize(p_);
        AddToTotal(row, finding[0], finding[1], finding + 2);
      }
    }
    FinishRows();
  }

 private:
  int64_t RowOffset(int64_t row) const {
    const int64_t kv_head = piece_.first_head + row / rows_per_head_;
    const int64_t token = piece_.first_token + row % rows_per_head_ / group_;
    return (token * p_.num_heads + kv_head * group_ + row % group_) * p_.head_size;
  }

  // Times what the logits are to be multiplied by.
  void WidenQueries() {
    const float factor = p_.soft_cap > 0 ? p_.scale / p_.soft_cap : p_.scale * kLog2E;
    for (int64_t row = 0; row < num_rows_; ++row) {
      const T* query = static_cast<const T*>(p_.query) + RowOffset(row);
      for (int64_t d = 0; d < stride_; d += kLanes) {
        Store(LoadWide(query + d, p_.head_size - d) * factor, q_ + row * stride_ + d);
      }
    }
  }

  // Where the K of the piece's first head lies, for each position of a tile up to the piece's end.
  // Its V follows, then the K of the next head. Returns the number of positions. Those before the
  // first and some after the last have the addresses of these, for whole vectors to be read.
  int64_t FindKeys(int64_t tile, const char** keys) const {
    const int32_t* table = p_.block_tables + piece_.sequence * p_.max_blocks_per_seq;
    const int64_t position_bytes = p_.num_kv_heads * head_bytes_;
    const int64_t num_positions = Larger(0, Smaller(kTile, piece_.end - tile));
    int64_t position = Larger(tile, piece_.begin);
    if (num_positions == 0) return 0;
    int64_t logical = position / p_.block_size, offset = position % p_.block_size;
    for (int64_t j = position - tile; j < num_positions; ++j) {
      keys[j] = static_cast<const char*>(p_.kv_cache) +
                (table[logical] * p_.block_size + offset) * position_bytes +
                piece_.first_head * head_bytes_;
      if (++offset == p_.block_size) {
        offset = 0;
        ++logical;
      }
    }
    for (int64_t j = 0; j < position - tile; ++j) keys[j] = keys[position - tile];
    for (int64_t j = num_positions; j < RoundUp(num_positions, kLanes); ++j) keys[j] = keys[j - 1];
    return num_positions;
  }

  // Positions [begin, end) of the tile that starts at position `tile`: all that any row attends to.
  void AttendToTile(int64_t head, int64_t tile, int64_t begin, int64_t end) {
    // Each head asks for some positions of the next tile, with all heads, as they lie in memory.
    const int64_t share = (num_next_ + piece_.num_heads - 1) / piece_.num_heads;
    const int64_t first = Smaller(head * share, num_next_);
    Prefetcher next(next_keys_ + first, Smaller(share, num_next_ - first),
                    piece_.num_heads * head_bytes_);
    const int64_t k_offset = head * head_bytes_, v_offset = k_offset + head_bytes_ / 2;
    // A row that does not attend to all positions must not see the V of the others.
    const bool is_mixed = end > piece_.position + 1 ||
                          p_.WindowBegin(piece_.position + piece_.num_tokens - 1) > begin;
    if (rows_per_head_ <= kRows) {
      const CachedRows<T> k{keys_, k_offset}, v{keys_, v_offset};
      ComputeTile(head, tile, begin, end, k, v, !is_mixed, &next);
      return;
    }
    Pack(k_offset, begin - tile, end - tile, k_);
    Pack(v_offset, begin - tile, end - tile, v_);
    const bool is_safe =
        !is_mixed || IsFinite(v_ + (begin - tile) * stride_, (end - begin) * stride_);
    ComputeTile(head, tile, begin, end, PackedRows{k_, stride_}, PackedRows{v_, stride_}, is_safe,
                &next);
  }

  // `is_safe`: a weight of zero may meet any V of the tile, as none is NaN or infinite.
  template <typename Rows>
  void ComputeTile(int64_t head, int64_t tile, int64_t begin, int64_t end, const Rows& k,
                   const Rows& v, bool is_safe, Prefetcher* next) {
    const int64_t first_row = head * rows_per_head_;
    next->Expect(2 * stride_ / kLanes * (kTile / kBlockVectors));
    ForEachBlock(rows_per_head_, [&](auto num_rows, int64_t first) {
      const Range all = RangeOfRows(first, num_rows, tile, begin, end);
      if (all.begin >= all.end) return;
      float* logits = logits_ + first * kTile;
      MultiplyBlock<num_rows>(q_ + (first_row + first) * stride_, k, all.begin, all.end,
                              p_.head_size, stride_, logits, next);
      for (int64_t r = 0; r < num_rows; ++r) {
        const Range own = RangeOfRows(first + r, 1, tile, begin, end);
        shrink_[first + r] = Weigh(logits + r * kTile, own.begin, own.end, p_.soft_cap,
                                   &states_[first_row + first + r]);
      }
    });
    ForEachBlock(rows_per_head_, [&](auto num_rows, int64_t first) {
      const Range all = RangeOfRows(first, num_rows, tile, begin, end);
      if (all.begin >= all.end) return;
      const float* weights = logits_ + first * kTile;
      float* sums = sums_ + (first_row + first) * stride_;
      if (is_safe) {
        AddBlock<num_rows>(weights, v, all.begin, all.end, p_.head_size, stride_, shrink_ + first,
                           sums, next);
        return;
      }
      for (int64_t r = 0; r < num_rows; ++r) {
        const Range own = RangeOfRows(first + r, 1, tile, begin, end);
        AddBlock<1>(weights + r * kTile, v, own.begin, own.end, p_.head_size, stride_,
                    shrink_ + first + r, sums + r * stride_, next);
      }
    });
  }

  struct Range {
    int64_t begin;
    int64_t end;
  };

  // Of the tile, what any of some rows of a kv head attends to.
  Range RangeOfRows(int64_t first, int64_t num_rows, int64_t tile, int64_t begin,
                    int64_t end) const {
    return {Larger(p_.WindowBegin(positions_[first]), begin) - tile,
            Smaller(positions_[first + num_rows - 1] + 1, end) - tile};
  }

  // Widens K or V of a kv head at positions [begin, end) of the tile.
  void Pack(int64_t offset, int64_t begin, int64_t end, float* rows) {
    const int64_t head_size = p_.head_size, stride = stride_;
    for (int64_t j = begin; j < end; ++j) {
      const T* from = reinterpret_cast<const T*>(keys_[j] + offset);
      float* to = rows + j * stride;
      int64_t d = 0;
      for (; d + kLanes <= head_size; d += kLanes) Store(LoadWide(from + d, kLanes), to + d);
      if (d < head_size) Store(LoadWide(from + d, head_size - d), to + d);
    }
  }

  static bool IsFinite(const float* x, int64_t size) {
    Lanes zeros = {};
    for (int64_t i = 0; i < size; i += kLanes) zeros += Load<Lanes>(x + i) * 0.0f;  // or NaN
    return SumOfLanes(zeros) == 0;
  }

  void StartSplit() {
    std::memset(sums_, 0, num_rows_ * stride_ * sizeof(float));
    for (int64_t row = 0; row < num_rows_; ++row) states_[row] = {-kInfinity, Lanes{}};
  }

  void EndSplit(int64_t split) {
    for (int64_t row = 0; row < num_rows_; ++row) {
      const float weight = SumOfLanes(states_[row].sums);
      if (piece_.findings == nullptr) {
        AddToTotal(row, states_[row].max, weight, sums_ + row * stride_);
        continue;
      }
      float* finding = piece_.findings + (split * num_rows_ + row) * FindingSize(p_);
      finding[0] = states_[row].max;
      finding[1] = weight;
      std::memcpy(finding + 2, sums_ + row * stride_, p_.head_size * sizeof(float));
    }
  }

  void StartTotals() {
    std::memset(totals_, 0, num_rows_ * stride_ * sizeof(float));
    for (int64_t row = 0; row < num_rows_; ++row) {
      total_max_[row] = -kInfinity;
      total_weight_[row] = 0;
    }
  }

  XLA_GPU_ONE_COPY void AddToTotal(int64_t row, float found_max, float found_weight,
                                   const float* found) {
    const float max = found_max > total_max_[row] ? found_max : total_max_[row];
    const float shift = max == -kInfinity ? 0.0f : max;
    const float shrink = Exp2OfNonPositive(Splat(total_max_[row] - shift))[0];
    const float share = Exp2OfNonPositive(Splat(found_max - shift))[0];
    total_max_[row] = max;
    total_weight_[row] = total_weight_[row] * shrink + found_weight * share;
    float* total = totals_ + row * stride_;
    for (int64_t d = 0; d < p_.head_size; ++d) total[d] = total[d] * shrink + found[d] * share;
  }

  void FinishRows() {
    for (int64_t row = 0; row < num_rows_; ++row) {
      T* output = static_cast<T*>(p_.output) + RowOffset(row);
      const float* total = totals_ + row * stride_;
      // Zero has one sign, whichever sums came to it.
      for (int64_t d = 0; d < p_.head_size; ++d) {
        FromFloat(total[d] / total_weight_[row] + 0.0f, output + d);
      }
    }
  }

  const Params& p_;
  const Piece& piece_;
  const int64_t group_;          // query heads per kv head
  const int64_t rows_per_head_;  // per kv head
  const int64_t num_rows_;
  const int64_t stride_;      // head_size, padded to whole vectors
  const int64_t head_bytes_;  // of K and V of one position and kv head

  float* q_;                // [num_rows, stride]
  float* k_;                // [kTile, stride]
  float* v_;                // [kTile, stride]
  float* logits_;           // [rows_per_head, kTile], then weights
  float* shrink_;           // [rows_per_head]
  float* sums_;             // [num_rows, stride], of this split
  float* totals_;           // [num_rows, stride], of the splits before
  float* total_max_;        // [num_rows]
  float* total_weight_;     // [num_rows]
  RowState* states_;        // [num_rows]
  const char** keys_;       // [kTile]
  const char** next_keys_;  // [kTile], of the tile after this
  int64_t num_next_;
  int32_t* positions_;  // [rows_per_head], of the tokens of the rows
};

template <typename Do>
void WithStorage(const Params& p, Do what) {
  switch (p.dtype) {
    case DType::kFloat32:
      return what(float());
    case DType::kFloat16:
      return what(Half());
    case DType::kBFloat16:
      return what(BFloat16());
  }
}

void Attend(const Params& p, const Piece& piece, Allocate allocate) {
  WithStorage(p, [&](auto storage) { Attention<decltype(storage)>(p, piece, allocate).Attend(); });
}

void Merge(const Params& p, const Piece& whole, Allocate allocate) {
  WithStorage(p, [&](auto storage) { Attention<decltype(storage)>(p, whole, allocate).Merge(); });
}

bool IsSupported() {
#if defined(__AVX512F__)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#elif defined(__AVX2__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
#else
  return true;
#endif
}

}  // namespace

#define XLA_GPU_NAME_OF_KERNEL(instruction_set) kCpuKernel_##instruction_set
#define XLA_GPU_KERNEL(instruction_set) XLA_GPU_NAME_OF_KERNEL(instruction_set)
#define XLA_GPU_STRING_OF(x) #x
#define XLA_GPU_STRING(x) XLA_GPU_STRING_OF(x)

extern const CpuKernel XLA_GPU_KERNEL(XLA_GPU_INSTRUCTION_SET);
const CpuKernel XLA_GPU_KERNEL(XLA_GPU_INSTRUCTION_SET) = {XLA_GPU_STRING(XLA_GPU_INSTRUCTION_SET),
                                                           IsSupported, Attend, Merge};

}  // namespace xla_gpu::paged_attention
