#include "run.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "../../paged_attention/cpu/instruction_set.h"
#include "cpu_instruction_sets.h"  // CMake writes it
#include "kernel.h"

namespace xla_gpu::varlen_attention {

#define XLA_GPU_DECLARE(instruction_set) extern const BackwardKernel kBackwardKernel_##instruction_set;
XLA_GPU_FOR_CPU_INSTRUCTION_SETS(XLA_GPU_DECLARE)

namespace {

using paged_attention::CeilDiv;
using paged_attention::Params;
using paged_attention::QueryTokens;
using paged_attention::Span;

#define XLA_GPU_ADDRESS(instruction_set) &kBackwardKernel_##instruction_set,
constexpr const BackwardKernel* kKernels[] = {XLA_GPU_FOR_CPU_INSTRUCTION_SETS(XLA_GPU_ADDRESS)};

// The products of a query row with a position, for the gradients of each.
constexpr int64_t kProductsOfBoth = 5;
constexpr int64_t kProductsOfKeys = 4;
constexpr int64_t kProductsOfQueries = 3;

constexpr int64_t kItemsPerThread = 8;  // of a sequence that is cut, so that no thread waits long
constexpr int64_t kTokensOfChunk = 64;  // that one thread sums rows of
constexpr int64_t kMinParallelCost = 1 << 16;  // products that are worth waking another thread for

struct Item {
  WorkItem work;
  int64_t cost;
};

// Cuts the derivative into work items. A sequence and a kv head are one item with five products,
// unless that would keep a thread longer than all threads need for everything with seven: then
// items with four compute the gradients of some positions, and items with three those of some
// tokens. Bits do not depend on it.
class Schedule {
 public:
  Schedule(const Params& p, int64_t max_threads) : p_(p), tile_tokens_(TileTokens(p)) {
    std::vector<int64_t> pairs(*p.num_seqs);
    int64_t cost = 0;
    for (int64_t s = 0; s < *p.num_seqs; ++s) {
      const QueryTokens tokens = p.QueryTokensOf(s);
      const Span all = {0, tokens.Count()};
      pairs[s] = PairsOf(tokens, all, all);
      cost += kProductsOfBoth * pairs[s] * p.num_kv_heads;
    }
    num_threads_ = cost < kMinParallelCost ? 1 : std::max<int64_t>(1, max_threads);
    const int64_t share = cost / num_threads_;
    for (int64_t s = 0; s < *p.num_seqs; ++s) {
      const int64_t of_both = kProductsOfBoth * pairs[s];
      const bool is_cut = of_both > share * (kProductsOfKeys + kProductsOfQueries) / kProductsOfBoth;
      for (int64_t head = 0; head < p.num_kv_heads; ++head) {
        if (is_cut) {
          Cut(s, head, std::max<int64_t>(1, share / kItemsPerThread));
        } else {
          Add(s, head, {true, true}, {0, INT64_MAX}, {0, INT64_MAX});
        }
      }
    }
    std::stable_sort(items_.begin(), items_.end(),
                     [](const Item& a, const Item& b) { return a.cost > b.cost; });
  }

  int64_t num_threads() const { return num_threads_; }
  const std::vector<Item>& items() const { return items_; }

 private:
  struct Gradients {
    bool of_query;
    bool of_key;
  };

  // Pairs of a row of a kv head and a position, about, that some tokens and positions have.
  int64_t PairsOf(const QueryTokens& tokens, const Span& of_tokens, const Span& positions) const {
    int64_t pairs = 0;
    for (int64_t i = of_tokens.begin; i < of_tokens.end; i += tile_tokens_) {
      const int64_t end = std::min(i + tile_tokens_, of_tokens.end);
      const Span any = p_.AttendedByAny(tokens, i, end - 1);
      const int64_t begin = std::max(any.begin, positions.begin);
      pairs += std::max<int64_t>(0, std::min(any.end, positions.end) - begin) * (end - i);
    }
    return pairs * p_.group.number;
  }

  void Add(int64_t sequence, int64_t head, const Gradients& gradients, Span of_tokens,
           Span positions) {
    const QueryTokens tokens = p_.QueryTokensOf(sequence);
    of_tokens.end = std::min(of_tokens.end, tokens.Count());
    positions.end = std::min(positions.end, tokens.Count());
    const int64_t products = gradients.of_query && gradients.of_key ? kProductsOfBoth
                             : gradients.of_key                     ? kProductsOfKeys
                                                                    : kProductsOfQueries;
    // Rows that attend to nothing cost something, too.
    const int64_t cost = products * PairsOf(tokens, of_tokens, positions) + 1;
    items_.push_back({{sequence, head, of_tokens, positions, gradients.of_query, gradients.of_key,
                       /*dquery=*/nullptr},
                      cost});
  }

  void Cut(int64_t sequence, int64_t head, int64_t wanted_cost) {
    const int64_t count = p_.QueryTokensOf(sequence).Count();
    const Span all = {0, INT64_MAX};
    // Positions and tokens of an item whose cost is the mean of its kind.
    const auto step_of = [&](int64_t products, int64_t unit) {
      const QueryTokens tokens = p_.QueryTokensOf(sequence);
      const int64_t cost = products * PairsOf(tokens, {0, count}, {0, count});
      const int64_t num_items = std::max<int64_t>(1, cost / wanted_cost);
      return CeilDiv(CeilDiv(count, num_items), unit) * unit;
    };
    const int64_t positions = step_of(kProductsOfKeys, kTilePositions);
    for (int64_t at = 0; at < count; at += positions) {
      Add(sequence, head, {false, true}, all, {at, at + positions});
    }
    const int64_t tokens = step_of(kProductsOfQueries, tile_tokens_);
    for (int64_t i = 0; i < count; i += tokens) {
      Add(sequence, head, {true, false}, {i, i + tokens}, all);
    }
  }

  const Params& p_;
  const int64_t tile_tokens_;
  int64_t num_threads_;
  std::vector<Item> items_;  // the most expensive first
};

// The tokens of all sequences.
Span TokensOf(const Params& p) {
  if (*p.num_seqs == 0) return {0, 0};
  return {p.query_start_loc[0], p.query_start_loc[*p.num_seqs]};
}

// Rows of no sequence.
void ZeroPadding(const BackwardParams& b) {
  const Params& p = b.forward;
  const Span tokens = TokensOf(p);
  const auto zero = [&](void* array, int64_t num_heads, int64_t columns) {
    const int64_t row_bytes = num_heads * columns * SizeOf(p.dtype);
    char* const rows = static_cast<char*>(array);
    std::fill(rows, rows + tokens.begin * row_bytes, 0);
    std::fill(rows + tokens.end * row_bytes, rows + p.num_tokens * row_bytes, 0);
  };
  zero(b.dquery, p.num_heads, p.head_size);
  zero(b.dkey, p.num_kv_heads, p.head_size);
  zero(b.dvalue, p.num_kv_heads, p.value_head_size);
}

// Sums over all rows of a head, token after token.
void SumOverTokens(const BackwardParams& b, int64_t head, const RowNumbers& numbers) {
  const Params& p = b.forward;
  const Span tokens = TokensOf(p);
  double dsink = 0, dslope = 0;
  for (int64_t token = tokens.begin; token < tokens.end; ++token) {
    const int64_t row = token * p.num_heads + head;
    if (b.dalibi_slopes != nullptr) dslope += numbers.dslope[row];
    // A row that attends to nothing but the sink has an output and a delta of 0.
    if (b.dsinks == nullptr || numbers.delta[row] == 0) continue;
    dsink -= std::exp(double{p.sinks[head]} - b.lse[row]) * numbers.delta[row];
  }
  if (b.dsinks != nullptr) b.dsinks[head] = static_cast<float>(dsink);
  if (b.dalibi_slopes != nullptr) b.dalibi_slopes[head] = static_cast<float>(dslope);
}

}  // namespace

const BackwardKernel& ChosenBackwardKernel() {
  const std::string name = paged_attention::CpuInstructionSet();
  return **std::find_if(std::begin(kKernels), std::end(kKernels), [&](const auto* kernel) {
    return name == kernel->instruction_set;
  });
}

void RunBackwardOnCpu(const BackwardParams& b, const Executor& executor) {
  const Params& p = b.forward;
  const BackwardKernel& kernel = ChosenBackwardKernel();
  ZeroPadding(b);
  const int64_t num_rows = p.num_tokens * p.num_heads;
  const std::unique_ptr<float[]> delta(new float[num_rows]);
  const std::unique_ptr<float[]> dslope(b.dalibi_slopes != nullptr ? new float[num_rows]()
                                                                   : nullptr);
  const RowNumbers numbers = {delta.get(), dslope.get()};
  const Schedule schedule(p, executor.num_threads);
  const Executor threads = {schedule.num_threads(), executor.run};
  const Span tokens = TokensOf(p);
  ParallelFor(threads, CeilDiv(tokens.end - tokens.begin, kTokensOfChunk), [&](int64_t i) {
    const int64_t first = tokens.begin + i * kTokensOfChunk;
    kernel.sum_rows(b, first, std::min(first + kTokensOfChunk, tokens.end), numbers);
  });
  const int64_t columns = kernel.dquery_columns(p) * p.group.number;  // of a token
  ParallelFor(threads, static_cast<int64_t>(schedule.items().size()), [&](int64_t i) {
    WorkItem item = schedule.items()[i].work;
    const int64_t num_tokens = item.has_dquery ? item.tokens.end - item.tokens.begin : 0;
    const std::unique_ptr<float[]> dquery(new float[num_tokens * columns]);
    item.dquery = dquery.get();
    kernel.differentiate(b, item, numbers, paged_attention::Arena::OfThread());
  });
  if (b.dsinks == nullptr && b.dalibi_slopes == nullptr) return;
  ParallelFor(threads, p.num_heads, [&](int64_t head) { SumOverTokens(b, head, numbers); });
}

}  // namespace xla_gpu::varlen_attention
