// The CPU kernel: online softmax (Milakov and Gimelshein, arXiv:1805.02867) over tiles of the
// cache.
//
// A piece of work is some query rows (a row is a query token and head) at some splits of the
// context. For each tile of kTile positions and each kv head it
//   1. computes logits, a block of rows by some positions at a time, and turns them into weights,
//   2. adds the weighted V to the rows' sums, a block of rows by some columns at a time.
// A few blocks of rows read K and V where the block table says, of all heads a tile at a time, and
// not more, for it to stay in the processor's caches; more blocks read them packed, K transposed
// and V as floats, a stretch of some tiles at a time. Meanwhile the next stretch is brought nearer.
// Tiles, stretches and splits begin at multiples of their size.
//
// A logit is the sum of kLanes chains of products by one fixed tree, whether the chains lie in the
// lanes of a register (MultiplyCached) or come one after the other (MultiplyPacked), and V is added
// position after position: a row's bits depend on the row and on what it attends to, and on nothing
// else, neither on the rows beside it nor on how the work is cut. They are the same in any batch,
// for any number of threads, and for a token that is prefilled, chunked or decoded. So no compiler
// may choose which products to fuse (-ffp-contract=off). Instruction sets differ in their bits.
#include "cpu_kernel.h"

#include <cmath>
#include <type_traits>

#include "../simd.h"

namespace xla_gpu::paged_attention {
namespace {

constexpr int kCachedRows = 4;          // of a block, at most, where K and V are not packed
constexpr int64_t kMaxCachedRows = 12;  // of a kv head; more are worth packing K and V for
constexpr int64_t kMaxTiles = 2;        // of a stretch
constexpr int64_t kMaxStretch = kMaxTiles * kTile;
constexpr int64_t kCacheLineBytes = 64;
constexpr uintptr_t kPageBytes = 4096;
constexpr float kMaxGrowth = 8;  // of logits, in units of 1 / log2(e), before sums shrink
constexpr float kInfinity = __builtin_inff();
constexpr float kLog2E = 1.44269504f;
constexpr double kLn2 = 0.693147180559945309;

XLA_GPU_INLINE int64_t RoundUp(int64_t a, int64_t b) { return DivideUp(a, b) * b; }

// The cache lines of the next stretch, asked for one by one, as many bytes as are read of this one
// meanwhile: the processor cannot foresee where a block table leads, and drops what it is asked for
// in a burst.
class Prefetcher {
  struct Row {
    const char* line;  // the next; null if there is none
    const char* end;
  };

 public:
  // What is wanted at each position: so many bytes at one offset or two from its address.
  struct Wanted {
    int64_t num_bytes;
    int64_t num_offsets;
    int64_t offsets[2];
  };

  // `num_readings`: how often all of this stretch is read, each time for a share of the next.
  Prefetcher(const char* const* positions, int64_t num_positions, const Wanted& wanted,
             int64_t num_readings)
      : position_(positions),
        end_(positions + num_positions),
        wanted_(wanted),
        num_readings_(static_cast<uint32_t>(num_readings)),
        row_(NextRow()) {}

  // The steps of a loop, each of which reads so many bytes of this stretch.
  class Steps {
   public:
    XLA_GPU_INLINE Steps(Prefetcher* prefetcher, int64_t num_bytes)
        : prefetcher_(prefetcher),
          row_(prefetcher->row_),
          num_bytes_(row_.line == nullptr ? 0 : prefetcher->ShareOf(num_bytes)) {}
    XLA_GPU_INLINE ~Steps() { prefetcher_->row_ = row_; }

    XLA_GPU_INLINE void Take() {
      const char* const after = row_.line + num_bytes_;
      for (; row_.line < after; row_.line += kCacheLineBytes) {
        __builtin_prefetch(row_.line, /*rw=*/0, /*locality=*/3);
      }
      row_.line = after;
      if (after < row_.end) return;
      row_ = prefetcher_->NextRow();
      if (row_.line == nullptr) num_bytes_ = 0;
    }

   private:
    Prefetcher* const prefetcher_;
    Row row_;
    int64_t num_bytes_;
  };

 private:
  // In 32 bits, which are divided faster.
  int64_t ShareOf(uint32_t num_bytes) const {
    return (num_bytes + num_readings_ - 1) / num_readings_;
  }

  Row NextRow() {
    if (position_ == end_) return {nullptr, reinterpret_cast<const char*>(1)};
    const char* row = *position_ + wanted_.offsets[next_offset_];
    if (++next_offset_ == wanted_.num_offsets) {
      next_offset_ = 0;
      ++position_;
    }
    return {row, row + wanted_.num_bytes};
  }

  const char* const* position_;  // of the next row
  const char* const* end_;
  Wanted wanted_;
  uint32_t num_readings_;
  int64_t next_offset_ = 0;
  Row row_;
};

// Asks for a line of each page of some bytes, to read it or to write; not for that of the page that
// was the last. Of pages that are asked for at once, a processor looks up several at a time; of
// those that a loop of products comes by, one, while all else waits.
class PageFinder {
 public:
  template <bool kIsWritten = false>
  void Ask(const void* from, int64_t num_bytes) {
    const auto begin = reinterpret_cast<uintptr_t>(from), end = begin + num_bytes;
    for (uintptr_t place = begin; place < end; place = (place / kPageBytes + 1) * kPageBytes) {
      if (place / kPageBytes == last_) continue;
      last_ = place / kPageBytes;
      __builtin_prefetch(reinterpret_cast<const void*>(place), kIsWritten, /*locality=*/3);
    }
  }

 private:
  uintptr_t last_ = 0;
};

// The order in which parts of a tile are read, kOfTile of them, or of several tiles with kCount in
// all: one tile after the other, its parts sorted by their numbers' reversed bits. A processor that
// finds accesses at equal distances fetches what would follow, which is not what does, as the next
// block lies elsewhere: it takes a third of the memory's rate.
template <int64_t kCount, int64_t kOfTile>
struct ReadingOrder {
  int8_t numbers[kCount] = {};

  constexpr ReadingOrder() {
    int64_t count = 0;
    for (int64_t first = 0; first < kCount; first += kOfTile) {
      for (int64_t i = 0; count < first + kOfTile; ++i) {
        int64_t number = 0;
        for (int64_t bit = 1; bit < kOfTile; bit *= 2) number = 2 * number + (i / bit) % 2;
        if (number < kOfTile) numbers[count++] = static_cast<int8_t>(first + number);
      }
    }
  }
};

template <int64_t kCount, int64_t kOfTile = kCount>
constexpr ReadingOrder<kCount, kOfTile> kReadingOrder;

// Calls function(size, first) for blocks, of a size that is a constant, from number `first` on,
// that make up `count`.
template <int kSize, typename Function>
XLA_GPU_INLINE void ForEachBlock(int64_t first, int64_t count, const Function& function) {
  for (; first + kSize <= count; first += kSize) {
    function(std::integral_constant<int, kSize>(), first);
  }
  if constexpr (kSize > 1) ForEachBlock<kSize / 2>(first, count, function);
}

// How many blocks those are.
template <int kSize>
int64_t NumBlocks(int64_t count) {
  int64_t num_blocks = 0;
  ForEachBlock<kSize>(0, count, [&](auto, int64_t) { ++num_blocks; });
  return num_blocks;
}

// Positions of V that are added at once.
template <typename T>
constexpr int kAtOnce = Dot<T>::kPerLane;

// In which those of a stretch are. The number at place i is at place `number`, too.
template <typename T>
constexpr auto kOrderOfValues = kReadingOrder<kMaxStretch / kAtOnce<T>, kTile / kAtOnce<T>>;

// K or V of a stretch and a kv head in the cache.
template <typename T>
struct CachedRows {
  using Storage = T;
  using Steps = Prefetcher::Steps;

  const char* const* keys;  // [kMaxStretch]
  int64_t offset;           // from there, in bytes

  XLA_GPU_INLINE const T* Row(int64_t j) const {
    return reinterpret_cast<const T*>(keys[j] + offset);
  }
  // What is read at place i: positions from j on, as many as are added at once, and columns from d
  // on, of which `count` exist: Dot<T>::kDown vectors.
  XLA_GPU_INLINE void LoadAt(int64_t, int64_t j, int64_t d, int64_t count, Lanes* to) const {
    const T* rows[kAtOnce<T>];
#pragma GCC unroll 2
    for (int i = 0; i < kAtOnce<T>; ++i) rows[i] = Row(j + i) + d;
    Dot<T>::LoadDown(rows, count, to);
  }
};

// V packed, in the order in which it is read.
template <typename T>
struct PackedRows {
  using Storage = T;
  struct Steps {  // nothing is asked for: MultiplyPacked, which takes fewer, has asked for all
    Steps(Prefetcher*, int64_t) {}
    void Take() {}
  };

  static constexpr int64_t kPlaces = kMaxStretch / kAtOnce<T>;
  static constexpr int64_t kColumns = Dot<T>::kDown * kLanes;

  float* columns;  // [stride / kColumns, kPlaces, kColumns], as Dot loads them

  XLA_GPU_INLINE float* At(int64_t i, int64_t d) const {
    return columns + d * kPlaces + i * kColumns;
  }
  XLA_GPU_INLINE void LoadAt(int64_t i, int64_t, int64_t d, int64_t, Lanes* to) const {
    const float* from = At(i, d);
#pragma GCC unroll 4
    for (int v = 0; v < Dot<T>::kDown; ++v) to[v] = Load<Lanes>(from + v * kLanes);
  }
};

// Positions of which MultiplyCached computes the logits of R rows at once: so many that there are
// other sums to add to while one waits for its last product. (With 16 registers 12 sums would suit
// fewer rows, too, but compute an eighth of their tile twice.)
template <int R>
constexpr int64_t kPositions = (kBlockRows * kBlockVectors >= 16 ? 16 : (R == 4 ? 12 : 8)) / R;

// logits[r, j] = q[r] . k[j] for R rows and kPositions positions from j on.
//   q: [R, width], padded with zeros; logits: [R, kMaxStretch]
template <int R, typename T>
XLA_GPU_INLINE void MultiplyCached(const float* q, const CachedRows<T>& k, int64_t j,
                                   int64_t head_size, int64_t width, float* logits,
                                   Prefetcher* next) {
  constexpr int kVectors = Dot<T>::kAcross;
  constexpr int64_t kStep = kVectors * kLanes * Dot<T>::kPerLane;
  Prefetcher::Steps steps(next, kPositions<R> * kStep * sizeof(T));
  const T* keys[kPositions<R>];
#pragma GCC unroll 16
  for (int i = 0; i < kPositions<R>; ++i) keys[i] = k.Row(j + i);
  Lanes sums[kPositions<R>][R];
  const auto add = [&](int64_t d, int64_t count, bool is_first) __attribute__((always_inline)) {
    steps.Take();
    Lanes queries[R][kVectors];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        queries[r][v] = Load<Lanes>(q + r * width + d / Dot<T>::kPerLane + v * kLanes);
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < kPositions<R>; ++i) {
      Lanes key[kVectors];
      Dot<T>::Load(keys[i] + d, count, key);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          sums[i][r] = is_first && v == 0 ? Dot<T>::Multiply(queries[r][v], key[v])
                                          : Dot<T>::MultiplyAdd(queries[r][v], key[v], sums[i][r]);
        }
      }
    }
  };
  if (head_size < kStep) {
    add(0, head_size, true);
  } else {
    add(0, kStep, true);
    int64_t d = kStep;
    for (; d + kStep <= head_size; d += kStep) add(d, kStep, false);
    if (d < head_size) add(d, head_size - d, false);
  }
  // The sums of so many positions fill the lanes; those of fewer do so over and over.
  constexpr int64_t kPerVector = kLanes / R;
#pragma GCC unroll 16
  for (int64_t first = 0; first < kPositions<R>; first += kPerVector) {
    const int64_t count = Smaller(kPerVector, kPositions<R> - first);
    Lanes each[kLanes];
#pragma GCC unroll 16
    for (int n = 0; n < kLanes; ++n) {
      each[PlaceOf(n)] = sums[first + n % kPerVector % count][n / kPerVector];
    }
    const Lanes products = SumEach(each);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      std::memcpy(logits + r * kMaxStretch + j + first,
                  reinterpret_cast<const float*>(&products) + r * kPerVector,
                  count * sizeof(float));
    }
  }
}

// Adds up kCount chains of products, from number `first` on. The code of each is written out: a
// loop over them takes a twelfth more time.
//   steps: takes two for all chains; sums: the results; the others are those of MultiplyPacked
template <int kCount, typename T, int R, int kVectors>
XLA_GPU_INLINE void SumChains(int first, const float* q, const float* k, int64_t width,
                              Prefetcher::Steps* steps, Lanes (&sums)[R][kVectors]) {
  if constexpr (kCount == kLanes / 2) steps->Take();
  if constexpr (kCount > 1) {
    Lanes others[R][kVectors];
    SumChains<kCount / 2, T>(first, q, k, width, steps, others);
    SumChains<kCount / 2, T>(first + kCount / 2, q, k, width, steps, sums);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
      for (int i = 0; i < kVectors; ++i) sums[r][i] += others[r][i];
    }
  } else {
    const auto add = [&](int64_t w, bool is_first) __attribute__((always_inline)) {
      Lanes keys[kVectors];
#pragma GCC unroll 16
      for (int i = 0; i < kVectors; ++i) keys[i] = Load<Lanes>(k + (i * width + w) * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const Lanes query = Splat(q[r * width + w]);
#pragma GCC unroll 16
        for (int i = 0; i < kVectors; ++i) {
          sums[r][i] = is_first ? Dot<T>::Multiply(query, keys[i])
                                : Dot<T>::MultiplyAdd(query, keys[i], sums[r][i]);
        }
      }
    };
    int64_t w = LaneOfLeaf(first);
    add(w, true);
    while ((w += kLanes) < width) add(w, false);
  }
}

// MultiplyCached for kVectors vectors of positions, with K packed. Not inlined, so that types that
// are multiplied alike share its code, which is long.
//   k: [kVectors, width, kLanes]; num_bytes: those of the positions' K and V in the cache
template <int R, int kVectors, typename T>
__attribute__((noinline)) void MultiplyPacked(const float* q, const float* k, int64_t width,
                                              float* logits, int64_t num_bytes, Prefetcher* next) {
  Prefetcher::Steps steps(next, num_bytes / 2);
  Lanes sums[R][kVectors];
  SumChains<kLanes, T>(0, q, k, width, &steps, sums);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) Store(sums[r][i], logits + r * kMaxStretch + i * kLanes);
  }
}

// sums[r] = sums[r] * shrink[r] + sum of weights[r, j] * v[j] over j in [begin, end), for R rows
// and kVectors vectors of columns from d on, of which `count` exist.
//   weights: [R, kMaxStretch], as Dot stores factors; sums: [R, stride]
template <int R, int kVectors, typename Rows>
XLA_GPU_INLINE void AddColumns(const float* weights, const Rows& v, int64_t begin, int64_t end,
                               int64_t d, int64_t count, int64_t stride, const float* shrink,
                               float* sums, Prefetcher* next) {
  using T = typename Rows::Storage;
  typename Rows::Steps steps(next, kVectors * kLanes * kAtOnce<T> * sizeof(T));
  Lanes block[R][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      block[r][i] = Load<Lanes>(sums + r * stride + d + i * kLanes) * shrink[r];
    }
  }
  const auto& order = kOrderOfValues<T>.numbers;
  const auto add = [&](int64_t i, bool is_whole) __attribute__((always_inline)) {
    const int64_t number = order[i], j = number * kAtOnce<T>;
    steps.Take();
    Lanes values[kVectors];
#pragma GCC unroll 16
    for (int vector = 0; vector < kVectors; vector += Dot<T>::kDown) {
      v.LoadAt(i, j, d + vector * kLanes, count, values + vector);
    }
    if (!is_whole && kAtOnce<T> > 1 && (j < begin || j + 1 >= end)) {
      const uint32_t attended = (j < begin ? 0 : 0xffff) | (j + 1 < end ? 0xffff0000 : 0);
      for (Lanes& vector : values) vector = BitCast<Lanes>(BitCast<Words>(vector) & attended);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Lanes weight = Splat(weights[r * kMaxStretch + number]);
#pragma GCC unroll 16
      for (int vector = 0; vector < kVectors; ++vector) {
        block[r][vector] = Dot<T>::MultiplyAdd(weight, values[vector], block[r][vector]);
      }
    }
  };
  int64_t i = begin / kTile * kTile / kAtOnce<T>;
  const int64_t last = RoundUp(end, kTile) / kAtOnce<T>;
  if (begin % kTile == 0 && end % kTile == 0) {
    for (; i < last; ++i) add(i, true);
  } else {
    for (; i < last; ++i) {
      const int64_t j = order[i] * kAtOnce<T>;
      if (begin < j + kAtOnce<T> && j < end) add(i, false);
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
  constexpr int kLeast = Dot<typename Rows::Storage>::kDown;
  constexpr int64_t kColumns = kBlockVectors * kLanes, kLeastColumns = kLeast * kLanes;
  int64_t d = 0;
  for (; d + kColumns <= head_size; d += kColumns) {
    AddColumns<R, kBlockVectors>(weights, v, begin, end, d, kColumns, stride, shrink, sums, next);
  }
  for (; d < head_size; d += kLeastColumns) {
    AddColumns<R, kLeast>(weights, v, begin, end, d, head_size - d, stride, shrink, sums, next);
  }
}

// What a row has seen in a split so far: the largest logit, in units of 1 / log2(e), and for each
// lane the sum of 2^(logit - max). Or almost the largest: while others exceed it by at most
// kMaxGrowth, it stays, and earlier sums need not shrink.
struct RowState {
  float max;
  Lanes sums;
};

// Positions, counted from a tile's or a stretch's first.
struct Range {
  int64_t begin;
  int64_t end;
};

// Replaces the products q . k of R rows by their weights, zero outside the rows' ranges, and finds
// the factors by which the rows' earlier sums must shrink. A logit is the product times `scale`, in
// units of soft_cap or else of 1 / log2(e).
//   products: [R, kMaxStretch], of which the tile that begins at `tile` counts; weights are stored
//   there as Dot stores factors; ranges, states, shrink: [R]
// Weights are stored times `v_scales`, if there are any: those of the tile's positions.
template <int R, typename T, bool kIsScaled = false>
void Weigh(float* products, int64_t tile, const Range* ranges, float scale, float soft_cap,
           RowState* states, float* shrink, const float* v_scales = nullptr) {
  constexpr int kVectors = kTile / kLanes;
  Lanes x[R][kVectors], largest[R], shift[R];
  bool is_partial = false;
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    is_partial |= ranges[r].begin > 0 || ranges[r].end < kTile;
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      x[r][i] = Load<Lanes>(products + r * kMaxStretch + tile + i * kLanes) * scale;
    }
  }
  if (soft_cap > 0) {
    for (int r = 0; r < R; ++r) {
      for (int i = 0; i < kVectors; ++i) x[r][i] = Tanh(x[r][i]) * (soft_cap * kLog2E);
    }
  }
  if (is_partial) {
    for (int r = 0; r < R; ++r) {
      for (int i = 0; i < kVectors; ++i) {
        const Mask counts = LanesIn(ranges[r].begin - i * kLanes, ranges[r].end - i * kLanes);
        x[r][i] = counts ? x[r][i] : Splat(-kInfinity);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    largest[r] = Splat(-kInfinity);
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) largest[r] = Max(x[r][i], largest[r]);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const Lanes before = Splat(states[r].max), found = MaxOfLanes(largest[r]);
    const Lanes max = found > before + kMaxGrowth ? found : before;
    shift[r] = max == -kInfinity ? Lanes{} : max;  // all logits -inf: weights of 0, not NaN
    shrink[r] = 1;
    if (max[0] == states[r].max) continue;
    const Lanes factor = Exp2(before - shift[r]);
    states[r] = {max[0], states[r].sums * factor};
    shrink[r] = factor[0];
  }
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Lanes weights = Exp2(x[r][i] - shift[r]);
      float* row = products + r * kMaxStretch;
      if constexpr (kIsScaled) {
        // A weight of zero stays one, whatever the scale.
        const Lanes scaled = weights == 0 ? weights : weights * Load<Lanes>(v_scales + i * kLanes);
        Dot<T>::StoreFactors(scaled, row, tile + i * kLanes);
        states[r].sums += weights;
      } else {
        states[r].sums += Dot<T>::StoreFactors(weights, row, tile + i * kLanes);
      }
    }
  }
}

template <typename T>
class Attention {
 public:
  Attention(const Params& p, const Piece& piece, Allocate allocate)
      : p_(p),
        piece_(piece),
        context_len_(p.context_lens[piece.sequence]),
        group_(p.num_heads / p.num_kv_heads),
        rows_per_head_(piece.num_tokens * group_),
        num_rows_(piece.num_heads * rows_per_head_),
        is_packed_(rows_per_head_ > kMaxCachedRows),
        num_readings_(is_packed_ ? NumBlocks<kBlockRows>(rows_per_head_)
                                 : NumBlocks<kCachedRows>(rows_per_head_)),
        width_(RoundUp(DivideUp(p.head_size, Dot<T>::kPerLane), Dot<T>::kAcross * kLanes)),
        stride_(RoundUp(p.head_size, Dot<T>::kDown * kLanes)),
        row_bytes_(p.head_size * static_cast<int64_t>(sizeof(T))),
        head_bytes_(p.cache.head_stride * static_cast<int64_t>(sizeof(T))),
        value_offset_(static_cast<const char*>(p.cache.values) -
                      static_cast<const char*>(p.cache.keys)) {
    const struct {
      void* array;
      int64_t num_bytes;
    } arrays[] = {
        {&q_, num_rows_ * width_ * 4},
        {&k_, width_ * kMaxStretch * 4},
        {&v_.columns, PackedRows<T>::kPlaces * stride_ * 4},
        {&weights_, rows_per_head_ * kMaxStretch * 4},
        {&shrink_, kMaxTiles * rows_per_head_ * 4},
        {&sums_, num_rows_ * stride_ * 4},
        {&totals_, num_rows_ * stride_ * 4},
        {&total_max_, num_rows_ * 4},
        {&total_weight_, num_rows_ * 4},
        {&states_, num_rows_ * static_cast<int64_t>(sizeof(RowState))},
        {&k_scales_, kMaxStretch * 4},
        {&v_scales_, kMaxStretch * 4},
        {&keys_, kMaxStretch * 8},
        {&next_keys_, kMaxStretch * 8},
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
    LoadQueries();
    for (int64_t row = 0; row < rows_per_head_; ++row) {
      positions_[row] = static_cast<int32_t>(piece_.position + row / group_);
    }
    if (piece_.findings == nullptr) StartTotals();
    const int64_t size = is_packed_ ? kMaxStretch : kTile;
    num_next_ = FindKeys(piece_.begin / size * size, size, next_keys_);
    for (int64_t split = piece_.begin / kSplit * kSplit; split < piece_.end; split += kSplit) {
      StartSplit();
      const int64_t begin = Larger(piece_.begin, split), end = Smaller(piece_.end, split + kSplit);
      for (int64_t first = begin / size * size; first < end; first += size) {
        const char** found = next_keys_;
        next_keys_ = keys_;
        keys_ = found;
        num_next_ = FindKeys(first + size, size, next_keys_);
        const Stretch stretch = StretchAt(first, Larger(begin, first), Smaller(end, first + size));
        for (int64_t head = 0; head < piece_.num_heads; ++head) AttendToStretch(head, stretch);
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
  // The query token of a row, counted from the piece's first; its head.
  int64_t TokenOfRow(int64_t row) const { return row % rows_per_head_ / group_; }
  int64_t HeadOfRow(int64_t row) const {
    return (piece_.first_head + row / rows_per_head_) * group_ + row % group_;
  }

  // The number of a row among those of the batch.
  int64_t NumberOfRow(int64_t row) const {
    return (piece_.first_token + TokenOfRow(row)) * p_.num_heads + HeadOfRow(row);
  }

  // Of the piece's rows among all rows of query or output.
  template <bool kAreWritten, typename Q>
  void AskForPages(const Q* rows) const {
    const int64_t num_bytes = group_ * p_.head_size * static_cast<int64_t>(sizeof(Q));
    PageFinder pages;
    for (int64_t row = 0; row < num_rows_; row += group_) {
      pages.Ask<kAreWritten>(rows + NumberOfRow(row) * p_.head_size, num_bytes);
    }
  }

  // Calls what(Q()) for the type of query and output: that of the cache, unless it has 8 bits.
  template <typename Do>
  void WithQueryType(const Do& what) const {
    if constexpr (!kIs8Bit<T>) {
      what(T());
    } else if constexpr (Dot<T>::kPerLane == 2) {
      what(BFloat16());
    } else if (p_.dtype == DType::kFloat32) {
      what(float());
    } else if (p_.dtype == DType::kFloat16) {
      what(Half());
    } else {
      what(BFloat16());
    }
  }

  void LoadQueries() {
    WithQueryType([&](auto type) {
      using Q = decltype(type);
      AskForPages<false>(static_cast<const Q*>(p_.query));
      for (int64_t row = 0; row < num_rows_; ++row) {
        const Q* query = static_cast<const Q*>(p_.query) + NumberOfRow(row) * p_.head_size;
        for (int64_t w = 0; w < width_; w += Dot<T>::kAcross * kLanes) {
          const int64_t d = w * Dot<T>::kPerLane;
          Lanes vectors[Dot<T>::kAcross];
          Dot<T>::LoadQuery(query + d, p_.head_size - d, vectors);
          std::memcpy(q_ + row * width_ + w, vectors, sizeof(vectors));
        }
      }
    });
  }

  // Where the K of the piece's first head lies, for each position of a stretch up to the piece's
  // end. Returns the number of positions. Those before the first and some after the last have the
  // addresses of these, for whole vectors to be read.
  int64_t FindKeys(int64_t first, int64_t size, const char** keys) const {
    const int32_t* table = p_.block_tables + piece_.sequence * p_.max_blocks_per_seq;
    const int64_t num_positions = Larger(0, Smaller(size, piece_.end - first));
    int64_t position = Larger(first, piece_.begin);
    if (num_positions == 0) return 0;
    int64_t logical = position / p_.block_size, offset = position % p_.block_size;
    for (int64_t j = position - first; j < num_positions; ++j) {
      keys[j] = reinterpret_cast<const char*>(static_cast<const T*>(p_.cache.keys) +
                                              p_.cache.Offset(table[logical], offset)) +
                piece_.first_head * head_bytes_;
      if (++offset == p_.block_size) {
        offset = 0;
        ++logical;
      }
    }
    for (int64_t j = 0; j < position - first; ++j) keys[j] = keys[position - first];
    for (int64_t j = num_positions; j < RoundUp(num_positions, kTile); ++j) keys[j] = keys[j - 1];
    return num_positions;
  }

  // A tile, or some that are packed at once.
  struct Stretch {
    int64_t position;  // of its first
    Range range;       // all that any row attends to
    bool is_mixed;     // some rows do not attend to all of that
  };

  Stretch StretchAt(int64_t position, int64_t begin, int64_t end) const {
    const int64_t last = piece_.position + piece_.num_tokens - 1;
    const bool is_mixed =
        p_.WindowEnd(piece_.position, context_len_) < end || p_.WindowBegin(last) > begin;
    return {position, {begin - position, end - position}, is_mixed};
  }

  void AttendToStretch(int64_t head, const Stretch& stretch) {
    if (HasScalesPerPosition()) FindScales(stretch, piece_.first_head + head);
    Prefetcher next = PrefetcherOf(head);
    const int64_t k_offset = head * head_bytes_, v_offset = k_offset + value_offset_;
    const CachedRows<T> k{keys_, k_offset}, v{keys_, v_offset};
    if (!is_packed_) {
      MultiplyKeys(head, stretch, k, &next);
      ComputeWeights<kCachedRows>(head, stretch);
      AddValues<kCachedRows>(head, stretch, v, !stretch.is_mixed, &next);
      return;
    }
    const auto [begin, end] = stretch.range;
    PackKeys(k, begin, end);
    PackValues(v, begin, end);
    const bool is_safe = !stretch.is_mixed || IsFinite(begin, end);
    PageFinder pages;
    for (int64_t j = 0; j < num_next_; ++j) {
      for (const int64_t offset : {k_offset, v_offset}) {
        pages.Ask(next_keys_[j] + offset, row_bytes_);
      }
    }
    MultiplyPackedKeys(head, stretch, &next);
    ComputeWeights<kBlockRows>(head, stretch);
    AddValues<kBlockRows>(head, stretch, v_, is_safe, &next);
  }

  // Of a head's share of the next stretch. Where heads lie side by side, that is all heads of some
  // positions, as they lie in memory; elsewhere its own rows of all positions.
  Prefetcher PrefetcherOf(int64_t head) const {
    const bool is_one_row = value_offset_ == row_bytes_;  // K and V
    const int64_t num_bytes = is_one_row ? 2 * row_bytes_ : row_bytes_;
    const int64_t num_offsets = is_one_row ? 1 : 2;
    if (head_bytes_ != num_bytes) {
      const int64_t k_offset = head * head_bytes_;
      return {next_keys_,
              num_next_,
              {num_bytes, num_offsets, {k_offset, k_offset + value_offset_}},
              num_readings_};
    }
    const int64_t share = DivideUp(num_next_, piece_.num_heads);
    const int64_t first = Smaller(head * share, num_next_);
    return {next_keys_ + first,
            Smaller(share, num_next_ - first),
            {piece_.num_heads * num_bytes, num_offsets, {0, value_offset_}},
            num_readings_};
  }

  // The products of a kv head's rows with what they attend to of the stretch, and perhaps with some
  // positions beside it.
  void MultiplyKeys(int64_t head, const Stretch& stretch, const CachedRows<T>& k,
                    Prefetcher* next) {
    ForEachBlock<kCachedRows>(0, rows_per_head_, [&](auto num_rows, int64_t first) {
      constexpr int64_t kStep = kPositions<num_rows>;
      const Range all = RangeOfRows(stretch, first, num_rows);
      const float* q = q_ + (head * rows_per_head_ + first) * width_;
      for (const int64_t number : kReadingOrder<DivideUp(kTile, kStep)>.numbers) {
        const int64_t j = Smaller(number * kStep, kTile - kStep);  // the last may overlap others
        if (j + kStep <= all.begin || j >= all.end) continue;
        MultiplyCached<num_rows>(q, k, j, p_.head_size, width_, weights_ + first * kMaxStretch,
                                 next);
      }
    });
  }

  // The same with K packed: all rows by some positions, whose K stays in the nearest cache.
  void MultiplyPackedKeys(int64_t head, const Stretch& stretch, Prefetcher* next) {
    const auto [begin, end] = stretch.range;
    const auto by_positions = [&](auto num_vectors, int64_t vector) {
      const int64_t j = vector * kLanes;
      ForEachBlock<kBlockRows>(0, rows_per_head_, [&](auto num_rows, int64_t first) {
        const Range all = RangeOfRows(stretch, first, num_rows);
        if (j + num_vectors * kLanes <= all.begin || j >= all.end) return;
        MultiplyPacked<num_rows, num_vectors, T>(
            q_ + (head * rows_per_head_ + first) * width_, k_ + j * width_, width_,
            weights_ + first * kMaxStretch + j, 2 * num_vectors * kLanes * row_bytes_, next);
      });
    };
    ForEachBlock<kBlockVectors>(begin / kLanes, DivideUp(end, kLanes), by_positions);
  }

  // Turns the products of a kv head's rows with the stretch into weights.
  template <int kRows>
  void ComputeWeights(int64_t head, const Stretch& stretch) {
    float scale = p_.soft_cap > 0 ? p_.scale / p_.soft_cap : p_.scale * kLog2E;
    if (kIs8Bit<T> && !p_.k_scale.IsPerPosition()) {
      scale *= p_.k_scale.At(0, 0, piece_.first_head + head);
    }
    const bool is_biased = p_.alibi_slopes != nullptr;
    const int64_t first_row = head * rows_per_head_;
    ForEachBlock<kRows>(0, rows_per_head_, [&](auto num_rows, int64_t first) {
      const Range all = RangeOfRows(stretch, first, num_rows);
      if (all.begin >= all.end) return;
      float* products = weights_ + first * kMaxStretch;
      for (int64_t tile = all.begin / kTile * kTile; tile < all.end; tile += kTile) {
        if (kIs8Bit<T> && p_.k_scale.IsPerPosition()) {
          ScaleTile(products + tile, num_rows, k_scales_ + tile);
        }
        Range ranges[num_rows];
        for (int r = 0; r < num_rows; ++r) {
          const auto [begin, end] = RangeOfRows(stretch, first + r, 1);
          ranges[r] = {begin - tile, end - tile};
        }
        if (is_biased) {
          CapAndBias(stretch.position + tile, head, first, num_rows, scale, products + tile);
        }
        const float scale_then = is_biased ? 1 : scale, cap = is_biased ? 0 : p_.soft_cap;
        RowState* states = &states_[first_row + first];
        float* shrink = ShrinkOf(tile) + first;
        if (kIs8Bit<T> && p_.v_scale.IsPerPosition()) {
          Weigh<num_rows, T, kIs8Bit<T>>(products, tile, ranges, scale_then, cap, states, shrink,
                                         v_scales_ + tile);
        } else {
          Weigh<num_rows, T>(products, tile, ranges, scale_then, cap, states, shrink);
        }
      }
    });
  }

  bool HasScalesPerPosition() const {
    return kIs8Bit<T> && (p_.k_scale.IsPerPosition() || p_.v_scale.IsPerPosition());
  }

  // The scales of the positions that any row attends to, of a kv head.
  void FindScales(const Stretch& stretch, int64_t kv_head) {
    const int32_t* table = p_.block_tables + piece_.sequence * p_.max_blocks_per_seq;
    for (int64_t j = 0; j < kMaxStretch; ++j) {
      const bool is_attended = stretch.range.begin <= j && j < stretch.range.end;
      const int64_t position = stretch.position + j, offset = position % p_.block_size;
      const int64_t block = is_attended ? table[position / p_.block_size] : 0;
      k_scales_[j] = is_attended ? p_.k_scale.At(block, offset, kv_head) : 1.0f;
      v_scales_[j] = is_attended ? p_.v_scale.At(block, offset, kv_head) : 1.0f;
    }
  }

  // By what the rows' sums must shrink before a tile of the stretch is added.
  float* ShrinkOf(int64_t tile) { return shrink_ + tile / kTile * rows_per_head_; }

  // Multiplies the products of some rows with a tile by a factor of each position.
  //   products: [num_rows, kMaxStretch]; factors: [kTile]
  static void ScaleTile(float* products, int64_t num_rows, const float* factors) {
    for (int64_t r = 0; r < num_rows; ++r, products += kMaxStretch) {
      for (int64_t j = 0; j < kTile; j += kLanes) {
        Store(Load<Lanes>(products + j) * Load<Lanes>(factors + j), products + j);
      }
    }
  }

  // Turns the products of some rows of a kv head with a tile into capped logits with ALiBi's bias,
  // in units of 1 / log2(e). Apart from Weigh, which is in every call.
  //   tile: its first position; products: [num_rows, kMaxStretch]
  __attribute__((noinline)) void CapAndBias(int64_t tile, int64_t head, int64_t first,
                                            int64_t num_rows, float scale, float* products) const {
    for (int64_t row = first; row < first + num_rows; ++row, products += kMaxStretch) {
      const float slope = p_.alibi_slopes[HeadOfRow(head * rows_per_head_ + row)] * kLog2E;
      const auto position = static_cast<float>(positions_[row] - tile);
      for (int64_t j = 0; j < kTile; j += kLanes) {
        Lanes x = Load<Lanes>(products + j) * scale;
        if (p_.soft_cap > 0) x = Tanh(x) * (p_.soft_cap * kLog2E);
        const Lanes after = LaneNumbers() + (j - position);
        Store(MultiplyAdd(Max(after, -after), Splat(-slope), x), products + j);
      }
    }
  }

  // `is_safe`: a weight of zero may meet any V of the stretch, as none is NaN or infinite.
  template <int kRows, typename Rows>
  void AddValues(int64_t head, const Stretch& stretch, const Rows& v, bool is_safe,
                 Prefetcher* next) {
    ForEachBlock<kRows>(0, rows_per_head_, [&](auto num_rows, int64_t first) {
      if (is_safe) return AddValuesOf<num_rows>(head, stretch, v, first, next);
      for (int64_t r = 0; r < num_rows; ++r) AddValuesOf<1>(head, stretch, v, first + r, next);
    });
  }

  // Tiles are added at once while sums need not shrink between them: times 1 is no rounding, so
  // that is the same as one after the other.
  template <int R, typename Rows>
  XLA_GPU_INLINE void AddValuesOf(int64_t head, const Stretch& stretch, const Rows& v,
                                  int64_t first, Prefetcher* next) {
    const auto [begin, end] = RangeOfRows(stretch, first, R);
    int64_t tile = begin / kTile * kTile;
    while (tile < end) {
      int64_t after = tile + kTile;
      while (after < end && IsOne<R>(ShrinkOf(after) + first)) after += kTile;
      AddBlock<R>(weights_ + first * kMaxStretch, v, Larger(begin, tile), Smaller(end, after),
                  p_.head_size, stride_, ShrinkOf(tile) + first,
                  sums_ + (head * rows_per_head_ + first) * stride_, next);
      tile = after;
    }
  }

  template <int R>
  static bool IsOne(const float* factors) {
    bool is_one = true;
    for (int r = 0; r < R; ++r) is_one &= factors[r] == 1.0f;
    return is_one;
  }

  // Of a stretch, what any of some rows of a kv head attends to.
  Range RangeOfRows(const Stretch& stretch, int64_t first, int64_t num_rows) const {
    if (!stretch.is_mixed) return stretch.range;
    const int64_t begin = p_.WindowBegin(positions_[first]) - stretch.position;
    const int64_t end =
        p_.WindowEnd(positions_[first + num_rows - 1], context_len_) - stretch.position;
    return {Larger(begin, stretch.range.begin), Smaller(end, stretch.range.end)};
  }

  // Transposes K at positions [begin, end) of the stretch, and at some beside them.
  void PackKeys(const CachedRows<T>& k, int64_t begin, int64_t end) {
    constexpr int kVectors = Dot<T>::kAcross;
    for (int64_t j = begin / kLanes * kLanes; j < end; j += kLanes) {
      for (int64_t w = 0; w < width_; w += kVectors * kLanes) {
        const int64_t d = w * Dot<T>::kPerLane;
        Lanes squares[kVectors][kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          Lanes keys[kVectors];
          Dot<T>::Load(k.Row(j + i) + d, p_.head_size - d, keys);
          for (int v = 0; v < kVectors; ++v) squares[v][i] = keys[v];
        }
        for (int v = 0; v < kVectors; ++v) {
          Transpose(squares[v]);
#pragma GCC unroll 16
          for (int i = 0; i < kLanes; ++i) {
            Store(squares[v][i], k_ + j * width_ + (w + v * kLanes + i) * kLanes);
          }
        }
      }
    }
  }

  // Packs V at positions [begin, end) of the stretch, and perhaps at one beside them.
  void PackValues(const CachedRows<T>& v, int64_t begin, int64_t end) {
    for (int64_t j = begin / kAtOnce<T> * kAtOnce<T>; j < end; j += kAtOnce<T>) {
      for (int64_t d = 0; d < stride_; d += Dot<T>::kDown * kLanes) {
        const int64_t place = kOrderOfValues<T>.numbers[j / kAtOnce<T>];
        Lanes columns[Dot<T>::kDown];
        v.LoadAt(place, j, d, p_.head_size - d, columns);
        std::memcpy(v_.At(place, d), columns, sizeof(columns));
      }
    }
  }

  // Whether the packed V at these positions is.
  bool IsFinite(int64_t begin, int64_t end) const {
    Lanes zeros = {};
    for (int64_t j = begin / kAtOnce<T>; j < DivideUp(end, kAtOnce<T>); ++j) {
      for (int64_t d = 0; d < stride_; d += PackedRows<T>::kColumns) {
        Lanes columns[Dot<T>::kDown];
        v_.LoadAt(kOrderOfValues<T>.numbers[j], j, d, stride_ - d, columns);
        for (const Lanes& column : columns) zeros += Dot<T>::TimesZero(column);
      }
    }
    return SumOfLanes(zeros) == 0;
  }

  void StartSplit() {
    std::memset(sums_, 0, num_rows_ * stride_ * sizeof(float));
    for (int64_t row = 0; row < num_rows_; ++row) states_[row] = {-kInfinity, Lanes{}};
  }

  void EndSplit(int64_t split) {
    constexpr int kVectors = Dot<T>::kDown;
    const float* end = kVectors > 1 ? sums_ + num_rows_ * stride_ : sums_;  // one is in order
    for (float* columns = sums_; columns < end; columns += kVectors * kLanes) {
      Lanes vectors[kVectors];
      std::memcpy(vectors, columns, sizeof(vectors));
      StoreInOrder(vectors, columns);
    }
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

  // A sink is a logit that each row has seen before it looks at any position, and that has no V.
  void StartTotals() {
    std::memset(totals_, 0, num_rows_ * stride_ * sizeof(float));
    for (int64_t row = 0; row < num_rows_; ++row) {
      const bool has_sink = p_.sinks != nullptr;
      total_max_[row] = has_sink ? p_.sinks[HeadOfRow(row)] * kLog2E : -kInfinity;
      total_weight_[row] = has_sink ? 1.0f : 0.0f;
    }
  }

  void AddToTotal(int64_t row, float found_max, float found_weight, const float* found) {
    const float max = found_max > total_max_[row] ? found_max : total_max_[row];
    const float shift = max == -kInfinity ? 0.0f : max;
    const float shrink = Exp2(Splat(total_max_[row] - shift))[0];
    const float share = Exp2(Splat(found_max - shift))[0];
    total_max_[row] = max;
    total_weight_[row] = total_weight_[row] * shrink + found_weight * share;
    float* total = totals_ + row * stride_;
    for (int64_t d = 0; d < p_.head_size; d += kLanes) {
      const Lanes more = LoadWide(found + d, p_.head_size - d) * share;
      Store(MultiplyAdd(Load<Lanes>(total + d), Splat(shrink), more), total + d);
    }
  }

  void FinishRows() {
    WithQueryType([&](auto type) { FinishRowsAs<decltype(type)>(); });
  }

  template <typename Q>
  void FinishRowsAs() {
    AskForPages<true>(static_cast<const Q*>(p_.output));
    for (int64_t row = 0; row < num_rows_; ++row) {
      Q* output = static_cast<Q*>(p_.output) + NumberOfRow(row) * p_.head_size;
      const float* total = totals_ + row * stride_;
      // A row that attends to nothing has found zeros.
      const bool attends = p_.Attends(piece_.position + TokenOfRow(row), context_len_);
      const float weight = attends ? total_weight_[row] : 1.0f;
      const int64_t kv_head = piece_.first_head + row / rows_per_head_;
      const float v_scale = p_.v_scale.IsPerPosition() ? 1.0f : p_.v_scale.At(0, 0, kv_head);
      for (int64_t d = 0; d < p_.head_size; d += kLanes) {
        Lanes result = Load<Lanes>(total + d) / weight;
        if (kIs8Bit<T>) result *= v_scale;
        result += 0.0f;  // zero has one sign, whichever sums came to it
        StoreNarrow(result, output + d, p_.head_size - d);
      }
      if (p_.lse != nullptr) {
        const double log2_of_sum = total_max_[row] + std::log2(double{total_weight_[row]});
        p_.lse[NumberOfRow(row)] = static_cast<float>(log2_of_sum * kLn2);
      }
    }
  }

  const Params& p_;
  const Piece& piece_;
  const int64_t context_len_;
  const int64_t group_;          // query heads per kv head
  const int64_t rows_per_head_;  // per kv head
  const int64_t num_rows_;
  const bool is_packed_;        // K and V are read packed
  const int64_t num_readings_;  // of K and of V: by each block of rows
  const int64_t width_;         // of queries and keys: lanes, padded to whole vectors
  const int64_t stride_;        // of values and sums: head_size, padded to whole vectors
  const int64_t row_bytes_;     // of K of a position and kv head
  const int64_t head_bytes_;    // from there to the next kv head's
  const int64_t value_offset_;  // from there to its V

  float* q_;  // [num_rows, width]
  float* k_;  // [kMaxStretch / kLanes, width, kLanes]
  PackedRows<T> v_;
  float* weights_;          // [rows_per_head, kMaxStretch]; products before
  float* shrink_;           // [kMaxTiles, rows_per_head]
  float* sums_;             // [num_rows, stride], of this split, columns likewise until it ends
  float* totals_;           // [num_rows, stride], of the splits before
  float* total_max_;        // [num_rows]
  float* total_weight_;     // [num_rows]
  RowState* states_;        // [num_rows]
  float* k_scales_;         // [kMaxStretch], of a head, if each position has its own
  float* v_scales_;         // [kMaxStretch]
  const char** keys_;       // [kMaxStretch]
  const char** next_keys_;  // [kMaxStretch], of the stretch after this
  int64_t num_next_;
  int32_t* positions_;  // [rows_per_head], of the tokens of the rows
};

template <typename Do>
void WithStorage(const Params& p, Do what) {
#ifdef XLA_GPU_PAIRS_BYTES
  if (p.dtype == DType::kBFloat16) {
    if (p.cache_dtype == DType::kFloat8E4M3) return what(PairedFloat8E4M3());
    if (p.cache_dtype == DType::kFloat8E5M2) return what(PairedFloat8E5M2());
    if (p.cache_dtype == DType::kInt8) return what(PairedInt8());
  }
#endif
  switch (p.cache_dtype) {
    case DType::kFloat32:
      return what(float());
    case DType::kFloat16:
      return what(Half());
    case DType::kBFloat16:
      return what(BFloat16());
    case DType::kFloat8E4M3:
      return what(Float8E4M3());
    case DType::kFloat8E5M2:
      return what(Float8E5M2());
    case DType::kInt8:
      return what(int8_t());
  }
}

void Attend(const Params& p, const Piece& piece, Allocate allocate) {
  WithStorage(p, [&](auto storage) { Attention<decltype(storage)>(p, piece, allocate).Attend(); });
}

void Merge(const Params& p, const Piece& whole, Allocate allocate) {
  WithStorage(p, [&](auto storage) { Attention<decltype(storage)>(p, whole, allocate).Merge(); });
}

bool IsSupported() {
#if defined(__AVX512BF16__)
  if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vbmi")) return false;
#endif
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
