// The CPU kernel: online softmax (Milakov and Gimelshein, arXiv:1805.02867) over tiles of the
// cache.
//
// An item of work is a run of query tokens of one sequence, with all the query heads that share a
// kv head: its rows, of one or several kv heads. For each tile of kTile positions, cut at multiples
// of kTile whatever the block size, an item
//   1. gathers the tile's K and V through the block table and widens them to float,
//   2. computes the logits of every row,
//   3. turns each row's logits into weights and rescales what the row has accumulated,
//   4. adds the weighted V.
//
// Every step treats each row by itself, in an order fixed by positions alone, so a row's bits
// depend neither on the rows beside it nor on the number of threads: results are batch-invariant.
// Vectors run across head_size or across positions, and sums over vector lanes follow one fixed
// tree; the file is compiled without contraction to fused multiply-add, so that each instruction
// set that XLA_GPU_VECTOR_CLONES names gives the same bits.
#include "cpu.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

// One copy of a function per instruction set, chosen when the library is loaded.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define XLA_GPU_VECTOR_CLONES __attribute__((target_clones("default", "avx2", "arch=x86-64-v4")))
#else
#define XLA_GPU_VECTOR_CLONES
#endif

namespace xla_gpu::paged_attention {
namespace {

constexpr int64_t kTile = 64;         // positions per step of the online softmax
constexpr int64_t kRowsPerItem = 64;  // query rows an item aims for
constexpr int64_t kLanes = 16;
constexpr int64_t kItemsPerThread = 2;     // so that threads that finish early find more to do
constexpr int64_t kTileBytes = 256 << 10;  // K and V of a tile: with the next tile, in a core's L2
constexpr int64_t kCacheLineBytes = 64;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Below this many multiply-adds, handing work to another thread costs more than it saves.
constexpr int64_t kMinParallelWork = 1 << 17;

using Lanes = float __attribute__((vector_size(kLanes * sizeof(float))));
using HalfOfLanes = float __attribute__((vector_size(kLanes / 2 * sizeof(float))));
using QuarterOfLanes = float __attribute__((vector_size(kLanes / 4 * sizeof(float))));

// Into each instruction set's copy of its caller: a plain inline function may stay a call of its
// baseline copy.
#define XLA_GPU_INLINE __attribute__((always_inline)) inline

int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

// float arrays are padded to whole vectors; the padding of Q, K and V rows is zero.
int64_t PaddedSize(int64_t size) { return DivideUp(size, kLanes) * kLanes; }

XLA_GPU_INLINE void Load(const float* from, Lanes* to) { std::memcpy(to, from, sizeof(Lanes)); }
XLA_GPU_INLINE void Store(const Lanes& from, float* to) { std::memcpy(to, &from, sizeof(Lanes)); }

XLA_GPU_INLINE float SumOfLanes(const Lanes& x) {
  HalfOfLanes halves[2];
  std::memcpy(halves, &x, sizeof(x));
  const HalfOfLanes half = halves[0] + halves[1];
  QuarterOfLanes quarters[2];
  std::memcpy(quarters, &half, sizeof(half));
  const QuarterOfLanes quarter = quarters[0] + quarters[1];
  return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

// e^x for x <= 0 or NaN, within 2 ulp; 0 where e^x would be subnormal. x = n ln 2 + r with
// |r| <= ln 2 / 2, ln 2 in two parts so that r is nearly exact; e^r by its Taylor polynomial of
// degree 7, whose remainder is below 2^-27.
XLA_GPU_INLINE float ExpOfNonPositive(float x) {
  const float shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float e = 1.0f / 5040;
  e = e * r + 1.0f / 720;
  e = e * r + 1.0f / 120;
  e = e * r + 1.0f / 24;
  e = e * r + 1.0f / 6;
  e = e * r + 0.5f;
  e = e * r + 1.0f;
  e = e * r + 1.0f;
  const float power = BitCast<float>((BitCast<uint32_t>(shifted) + 127) << 23);
  return x < -87.33654f ? 0.0f : e * power;
}

template <typename T>
XLA_GPU_VECTOR_CLONES void Widen(const T* from, int64_t size, float* to) {
  for (int64_t i = 0; i < size; ++i) to[i] = ToFloat(from[i]);
}

// Rows of the next tile, to be brought nearer while this one is computed: the processor cannot
// foresee where a block table leads.
struct Ahead {
  const char* const* rows;  // [kTile], null past the end
  int64_t offset_bytes;     // from a row's address to the bytes that will be read
  int64_t num_bytes;

  XLA_GPU_INLINE void Prefetch(int64_t j) const {
    if (rows[j] == nullptr) return;
    const char* begin = rows[j] + offset_bytes;
    for (int64_t byte = 0; byte < num_bytes; byte += kCacheLineBytes) {
      __builtin_prefetch(begin + byte, /*rw=*/0, /*locality=*/2);
    }
  }
};

// logits[r][j] = scale * (q[r] . k[j]) for kRows rows and j in [begin, end).
template <int kRows>
XLA_GPU_INLINE void LogitsOfRows(const float* q, const float* k, int64_t begin, int64_t end,
                                 int64_t size, float scale, const Ahead* ahead, float* logits) {
  for (int64_t j = begin; j < end; ++j) {
    if (ahead != nullptr) ahead->Prefetch(j);
    Lanes sums[kRows] = {};
    for (int64_t d = 0; d < size; d += kLanes) {
      Lanes key;
      Load(k + j * size + d, &key);
      for (int r = 0; r < kRows; ++r) {
        Lanes query;
        Load(q + r * size + d, &query);
        sums[r] += query * key;
      }
    }
    for (int r = 0; r < kRows; ++r) logits[r * kTile + j] = scale * SumOfLanes(sums[r]);
  }
}

XLA_GPU_VECTOR_CLONES void Logits(const float* q, const float* k, int64_t num_rows, int64_t begin,
                                  int64_t end, int64_t size, float scale, const Ahead& ahead,
                                  float* logits) {
  constexpr int kBlock = 4;
  int64_t r = 0;
  for (; r + kBlock <= num_rows; r += kBlock) {
    LogitsOfRows<kBlock>(q + r * size, k, begin, end, size, scale, r == 0 ? &ahead : nullptr,
                         logits + r * kTile);
  }
  for (; r < num_rows; ++r) {
    LogitsOfRows<1>(q + r * size, k, begin, end, size, scale, r == 0 ? &ahead : nullptr,
                    logits + r * kTile);
  }
}

// What a row has seen so far: the largest logit, and the sum of e^(logit - max).
struct RowState {
  float max = -kInfinity;
  float sum = 0;
};

// Replaces a row's logits at [begin, end) by weights e^(logit - max), zero elsewhere in the tile,
// and returns the factor by which the row's earlier sums must shrink.
XLA_GPU_VECTOR_CLONES float Weigh(float* logits, int64_t begin, int64_t end, RowState* state) {
  for (int64_t j = 0; j < begin; ++j) logits[j] = -kInfinity;
  for (int64_t j = end; j < kTile; ++j) logits[j] = -kInfinity;
  float max = state->max;
  for (int64_t j = begin; j < end; ++j) max = std::max(max, logits[j]);
  const float shift = max == -kInfinity ? 0.0f : max;  // all logits -inf: weights of 0, not NaN
  const float shrink = ExpOfNonPositive(state->max - shift);
  for (int64_t j = 0; j < kTile; ++j) logits[j] = ExpOfNonPositive(logits[j] - shift);
  Lanes sums = {};
  for (int64_t j = 0; j < kTile; j += kLanes) {
    Lanes weights;
    Load(logits + j, &weights);
    sums += weights;
  }
  state->max = max;
  state->sum = state->sum * shrink + SumOfLanes(sums);
  return shrink;
}

// Accumulate for kVectors neighbouring vectors of the output, whose sums do not wait for each
// other.
template <int kVectors>
XLA_GPU_INLINE void AccumulateVectors(const float* weights, const float* v, int64_t begin,
                                      int64_t end, int64_t size, float shrink, float* output) {
  Lanes sums[kVectors];
  for (int i = 0; i < kVectors; ++i) {
    Load(output + i * kLanes, &sums[i]);
    sums[i] *= shrink;
  }
  for (int64_t j = begin; j < end; ++j) {
    for (int i = 0; i < kVectors; ++i) {
      Lanes value;
      Load(v + j * size + i * kLanes, &value);
      sums[i] += weights[j] * value;
    }
  }
  for (int i = 0; i < kVectors; ++i) Store(sums[i], output + i * kLanes);
}

// output = output * shrink + sum of weights[j] * v[j] over j in [begin, end). The only reader of V:
// a V that the row does not attend to is not multiplied by a zero weight, which NaN would survive.
XLA_GPU_VECTOR_CLONES void Accumulate(const float* weights, const float* v, int64_t begin,
                                      int64_t end, int64_t size, float shrink, float* output) {
  constexpr int kBlock = 4;
  int64_t d = 0;
  for (; d + kBlock * kLanes <= size; d += kBlock * kLanes) {
    AccumulateVectors<kBlock>(weights, v + d, begin, end, size, shrink, output + d);
  }
  for (; d < size; d += kLanes) {
    AccumulateVectors<1>(weights, v + d, begin, end, size, shrink, output + d);
  }
}

// Query tokens [first_token, first_token + num_tokens) of a sequence; its first at `position`.
struct Run {
  int64_t sequence;
  int64_t first_token;
  int64_t num_tokens;
  int64_t position;
};

// What an item computes in, kept by each thread from one item to the next.
struct Scratch {
  std::vector<float> q;                // [num_rows, size]
  std::vector<float> k, v;             // [kTile, size]
  std::vector<float> logits;           // [num_rows, kTile], of one kv head; weights after Weigh
  std::vector<float> output;           // [num_rows, size], not yet divided by the sum of weights
  std::vector<RowState> state;         // [num_rows]
  std::vector<const char*> keys;       // [kTile], where a position's K lies; null past the end
  std::vector<const char*> next_keys;  // [kTile], of the tile after this

  void Prepare(int64_t num_rows, int64_t head_size, int64_t size) {
    for (std::vector<float>* rows : {&q, &k, &v}) {
      if (size != head_size) rows->clear();  // so that what resize adds, padding included, is zero
    }
    q.resize(num_rows * size);
    k.resize(kTile * size);
    v.resize(kTile * size);
    logits.resize(num_rows * kTile);
    output.assign(num_rows * size, 0.0f);
    state.assign(num_rows, RowState());
    keys.resize(kTile);
    next_keys.resize(kTile);
  }
};

// A run's rows of a few neighbouring kv heads. The heads take turns at each tile, so that the
// cache, where a position's heads lie side by side, is read from front to back.
template <typename T>
class Item {
 public:
  Item(const Params& p, const Run& run, int64_t first_head, int64_t num_heads, Scratch* scratch)
      : p_(p),
        run_(run),
        first_head_(first_head),
        num_heads_(num_heads),
        group_(p.num_heads / p.num_kv_heads),
        num_rows_(run.num_tokens * group_),
        size_(PaddedSize(p.head_size)),
        head_bytes_(2 * p.head_size * static_cast<int64_t>(sizeof(T))),
        scratch_(*scratch) {
    scratch_.Prepare(num_heads_ * num_rows_, p.head_size, size_);
  }

  void Compute() {
    for (int64_t row = 0; row < num_heads_ * num_rows_; ++row) {
      Widen(static_cast<const T*>(p_.query) + RowOffset(row), p_.head_size,
            &scratch_.q[row * size_]);
    }
    const int64_t begin = p_.WindowBegin(run_.position);
    const int64_t end = run_.position + run_.num_tokens;
    const int64_t first_tile = begin / kTile * kTile;
    FindKeys(first_tile, begin, end, &scratch_.next_keys);
    for (int64_t tile = first_tile; tile < end; tile += kTile) {
      scratch_.keys.swap(scratch_.next_keys);
      FindKeys(tile + kTile, begin, end, &scratch_.next_keys);
      for (int64_t head = 0; head < num_heads_; ++head) {
        ComputeTile(head, tile, std::max(begin, tile), std::min(end, tile + kTile));
      }
    }
    for (int64_t row = 0; row < num_heads_ * num_rows_; ++row) {
      T* to = static_cast<T*>(p_.output) + RowOffset(row);
      for (int64_t d = 0; d < p_.head_size; ++d) {
        FromFloat(scratch_.output[row * size_ + d] / scratch_.state[row].sum, to + d);
      }
    }
  }

 private:
  // Rows are ordered by kv head, then by token, then by query head.
  int64_t RowOffset(int64_t row) const {
    const int64_t kv_head = first_head_ + row / num_rows_;
    const int64_t token = run_.first_token + row % num_rows_ / group_;
    const int64_t head = kv_head * group_ + row % group_;
    return (token * p_.num_heads + head) * p_.head_size;
  }

  // Positions [begin, end) of the tile that starts at position `tile`: all that any row attends to.
  void ComputeTile(int64_t head, int64_t tile, int64_t begin, int64_t end) {
    for (int64_t position = begin; position < end; ++position) {
      const T* key =
          reinterpret_cast<const T*>(scratch_.keys[position - tile] + head * head_bytes_);
      Widen(key, p_.head_size, &scratch_.k[(position - tile) * size_]);
      Widen(key + p_.head_size, p_.head_size, &scratch_.v[(position - tile) * size_]);
    }
    const int64_t first_row = head * num_rows_;
    Logits(&scratch_.q[first_row * size_], scratch_.k.data(), num_rows_, begin - tile, end - tile,
           size_, p_.scale, {scratch_.next_keys.data(), head * head_bytes_, head_bytes_},
           scratch_.logits.data());
    for (int64_t row = 0; row < num_rows_; ++row) {
      const int64_t position = run_.position + row / group_;
      const int64_t row_begin = std::max(p_.WindowBegin(position), begin) - tile;
      const int64_t row_end = std::min(position + 1, end) - tile;
      if (row_begin >= row_end) continue;
      float* logits = &scratch_.logits[row * kTile];
      if (p_.soft_cap > 0) {
        for (int64_t j = row_begin; j < row_end; ++j) {
          logits[j] = p_.soft_cap * std::tanh(logits[j] / p_.soft_cap);
        }
      }
      const float shrink = Weigh(logits, row_begin, row_end, &scratch_.state[first_row + row]);
      Accumulate(logits, scratch_.v.data(), row_begin, row_end, size_, shrink,
                 &scratch_.output[(first_row + row) * size_]);
    }
  }

  // Where the K of the item's first head lies, for each position of a tile that is in
  // [begin, end). Its V follows, then the K of the next head.
  void FindKeys(int64_t tile, int64_t begin, int64_t end, std::vector<const char*>* keys) const {
    const int32_t* table = p_.block_tables + run_.sequence * p_.max_blocks_per_seq;
    const int64_t position_bytes = p_.num_kv_heads * head_bytes_;
    for (int64_t j = 0; j < kTile; ++j) {
      const int64_t position = tile + j;
      if (position < begin || position >= end) {
        (*keys)[j] = nullptr;
        continue;
      }
      const int64_t block = table[position / p_.block_size];
      const int64_t slot = block * p_.block_size + position % p_.block_size;
      (*keys)[j] =
          static_cast<const char*>(p_.kv_cache) + slot * position_bytes + first_head_ * head_bytes_;
    }
  }

  const Params& p_;
  const Run run_;
  const int64_t first_head_;  // of the kv heads
  const int64_t num_heads_;   // kv heads of this item
  const int64_t group_;       // query heads per kv head
  const int64_t num_rows_;    // per kv head
  const int64_t size_;        // head_size, padded
  const int64_t head_bytes_;  // of K and V of one position and kv head
  Scratch& scratch_;
};

// Rows that belong to no sequence: before the first sequence and after the last.
void ZeroPadding(const Params& p) {
  const int64_t row_bytes = p.num_heads * p.head_size * SizeOf(p.dtype);
  char* output = static_cast<char*>(p.output);
  const int64_t num_seqs = *p.num_seqs;
  const int64_t begin = num_seqs == 0 ? p.num_tokens : p.query_start_loc[0];
  const int64_t end = num_seqs == 0 ? p.num_tokens : p.query_start_loc[num_seqs];
  std::fill(output, output + begin * row_bytes, 0);
  std::fill(output + end * row_bytes, output + p.num_tokens * row_bytes, 0);
}

std::vector<Run> SplitIntoRuns(const Params& p) {
  const int64_t tokens_per_run = std::max<int64_t>(1, kRowsPerItem * p.num_kv_heads / p.num_heads);
  std::vector<Run> runs;
  for (int64_t s = 0; s < *p.num_seqs; ++s) {
    const int64_t start = p.query_start_loc[s], end = p.query_start_loc[s + 1];
    for (int64_t token = start; token < end; token += tokens_per_run) {
      runs.push_back(
          {s, token, std::min(tokens_per_run, end - token), p.context_lens[s] - (end - token)});
    }
  }
  return runs;
}

int64_t CountMultiplyAdds(const Params& p, const std::vector<Run>& runs) {
  int64_t positions = 0;
  for (const Run& run : runs) {
    positions += run.num_tokens * (run.position + 1 - p.WindowBegin(run.position));
  }
  return 2 * positions * p.num_heads * p.head_size;
}

// How many kv heads an item takes: as many as fill its rows, unless that would leave threads idle
// or need more cache than a core has.
int64_t HeadsPerItem(const Params& p, const std::vector<Run>& runs, int64_t num_threads) {
  int64_t rows_per_head = 1;
  for (const Run& run : runs) {
    rows_per_head = std::max(rows_per_head, run.num_tokens * p.num_heads / p.num_kv_heads);
  }
  const int64_t num_runs = std::max<int64_t>(1, static_cast<int64_t>(runs.size()));
  const int64_t to_fill = std::max<int64_t>(1, kRowsPerItem / rows_per_head);
  const int64_t to_share = DivideUp(num_runs * p.num_kv_heads, kItemsPerThread * num_threads);
  const int64_t tile_bytes_per_head = kTile * 2 * p.head_size * SizeOf(p.dtype);
  const int64_t to_fit = std::max<int64_t>(1, kTileBytes / tile_bytes_per_head);
  return std::min({to_fill, to_share, to_fit, p.num_kv_heads});
}

template <typename T>
void RunWithStorage(const Params& p, const Executor& executor) {
  ZeroPadding(p);
  const std::vector<Run> runs = SplitIntoRuns(p);
  const bool is_small = CountMultiplyAdds(p, runs) < kMinParallelWork;
  const int64_t num_threads = is_small ? 1 : std::max<int64_t>(1, executor.num_threads);
  const int64_t heads_per_item = HeadsPerItem(p, runs, num_threads);
  const int64_t items_per_run = DivideUp(p.num_kv_heads, heads_per_item);
  const int64_t num_items = static_cast<int64_t>(runs.size()) * items_per_run;
  ParallelFor({num_threads, executor.schedule}, num_items, [&](int64_t item) {
    static thread_local Scratch scratch;
    const int64_t first_head = item % items_per_run * heads_per_item;
    const int64_t num_heads = std::min(heads_per_item, p.num_kv_heads - first_head);
    Item<T>(p, runs[item / items_per_run], first_head, num_heads, &scratch).Compute();
  });
}

}  // namespace

void RunOnCpu(const Params& p, const Executor& executor) {
  switch (p.dtype) {
    case DType::kFloat32:
      return RunWithStorage<float>(p, executor);
    case DType::kFloat16:
      return RunWithStorage<Half>(p, executor);
    case DType::kBFloat16:
      return RunWithStorage<BFloat16>(p, executor);
  }
}

}  // namespace xla_gpu::paged_attention
