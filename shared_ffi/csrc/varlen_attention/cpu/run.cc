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

#define XLA_GPU_DECLARE(instruction_set) \
  extern const BackwardKernel kBackwardKernel_##instruction_set;
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
constexpr int64_t kProductsOfDelta = 2;

constexpr int64_t kItemsPerThread = 8;  // of a sequence that is cut, so that no thread waits long
constexpr int64_t kTokensOfChunk = 64;  // that one thread sums rows of
constexpr int64_t kMinParallelCost = 1 << 16;  // products that are worth waking another thread for

struct Item {
  WorkItem work;
  int64_t cost;
};

// Cuts the derivative into work items. A tree, which is a sequence and all that continue it, and a
// kv head are one item with five products, unless that would keep a thread longer than all threads
// need for everything with seven: then items with four compute the gradients of some positions of a
// sequence, and items with three those of some tokens. Bits do not depend on it.
class Schedule {
 public:
  Schedule(const Params& p, int64_t max_threads) : p_(p), tile_tokens_(TileTokens(p)) {
    FindTrees();
    int64_t cost = 0;
    for (const Sequences& tree : trees_) cost += CostOf(Whole(tree)) * p.num_kv_heads;
    num_threads_ = cost < kMinParallelCost ? 1 : std::max<int64_t>(1, max_threads);
    const int64_t share = cost / num_threads_;
    wanted_cost_ = std::max<int64_t>(1, share / kItemsPerThread);
    for (const Sequences& tree : trees_) {
      for (int64_t head = 0; head < p.num_kv_heads; ++head) {
        WorkItem whole = Whole(tree);
        whole.kv_head = head;
        AddGradients(whole, share);
        if (SumsDelta(p)) CutQueries(whole, &WorkItem::has_delta, &delta_items_);
      }
    }
    SortByCost(&items_);
    SortByCost(&delta_items_);
  }

  int64_t num_threads() const { return num_threads_; }
  // Items that compute delta come first.
  const std::vector<Item>& delta_items() const { return delta_items_; }
  const std::vector<Item>& items() const { return items_; }

  // The query tokens of an item.
  static int64_t NumTokens(const Params& p, const WorkItem& item) {
    int64_t count = 0;
    for (const int64_t s : item.queries) {
      count += std::min(item.tokens.end, p.QueryLen(s)) - item.tokens.begin;
    }
    return count;
  }

 private:
  static constexpr Span kAll = {0, INT64_MAX};

  // Sorts the sequences that have tokens by their trees.
  void FindTrees() {
    const int64_t num_seqs = *p_.num_seqs;
    std::vector<int64_t> roots(num_seqs);
    for (int64_t s = 0; s < num_seqs; ++s) {
      const int64_t prefix = p_.prefix_seqs == nullptr ? -1 : p_.prefix_seqs[s];
      roots[s] = prefix < 0 ? s : roots[prefix];
      if (p_.QueryLen(s) > 0) sequences_.push_back(s);
    }
    const auto is_before = [&](int64_t a, int64_t b) { return roots[a] < roots[b]; };
    std::stable_sort(sequences_.begin(), sequences_.end(), is_before);
    const auto end = sequences_.end();
    for (auto first = sequences_.begin(); first != end;) {
      const auto next = std::upper_bound(first, end, *first, is_before);
      trees_.push_back({&*first, next - first});
      first = next;
    }
  }

  // All of a tree, for the first kv head.
  static WorkItem Whole(const Sequences& tree) {
    WorkItem item = {};
    item.queries = item.keys = tree;
    item.tokens = item.positions = kAll;
    item.has_dquery = item.has_dkey = true;
    return item;
  }

  // Pairs of a row of a kv head and a position, about, that some tokens of a sequence have, and
  // some positions.
  int64_t PairsOf(const QueryTokens& tokens, const Span& of_tokens, const Span& positions) const {
    const int64_t last = std::min(of_tokens.end, tokens.Count());
    int64_t pairs = 0;
    for (int64_t i = of_tokens.begin; i < last; i += tile_tokens_) {
      const int64_t end = std::min(i + tile_tokens_, last);
      const Span any = p_.AttendedByAny(tokens, i, end - 1);
      const int64_t begin = std::max(any.begin, positions.begin);
      pairs += std::max<int64_t>(0, std::min(any.end, positions.end) - begin) * (end - i);
    }
    return pairs * p_.group.number;
  }

  // Rows that attend to nothing cost something, too.
  int64_t CostOf(const WorkItem& item) const {
    const int64_t products = item.has_delta                     ? kProductsOfDelta
                             : item.has_dquery && item.has_dkey ? kProductsOfBoth
                             : item.has_dkey                    ? kProductsOfKeys
                                                                : kProductsOfQueries;
    int64_t pairs = 0;
    for (const int64_t of_keys : item.keys) {
      const QueryTokens keys = p_.QueryTokensOf(of_keys);
      const Span positions = {keys.Position(item.positions.begin),
                              keys.Position(std::min(item.positions.end, keys.Count()))};
      for (const int64_t of_queries : item.queries) {
        if (!p_.Continues(of_queries, of_keys)) continue;
        pairs += PairsOf(p_.QueryTokensOf(of_queries), item.tokens, positions);
      }
    }
    return products * pairs + 1;
  }

  // `share`: of the cost of everything, for each thread.
  void AddGradients(const WorkItem& whole, int64_t share) {
    const int64_t cost = CostOf(whole);
    if (cost <= share * (kProductsOfKeys + kProductsOfQueries) / kProductsOfBoth) {
      items_.push_back({whole, cost});
      return;
    }
    CutKeys(whole);
    CutQueries(whole, &WorkItem::has_dquery, &items_);
  }

  // Adds the parts of a tree that compute the gradients of K and V of one sequence, or those or
  // delta of its query tokens.
  void CutKeys(WorkItem item) {
    item.has_dquery = false;
    for (const int64_t& sequence : item.queries) {
      item.keys = {&sequence, 1};
      Cut(item, &WorkItem::positions, kTilePositions, p_.QueryLen(sequence), &items_);
    }
  }
  void CutQueries(WorkItem item, bool WorkItem::* has, std::vector<Item>* items) {
    item.has_dquery = item.has_dkey = false;
    item.*has = true;
    for (const int64_t& sequence : item.keys) {
      item.queries = {&sequence, 1};
      Cut(item, &WorkItem::tokens, tile_tokens_, p_.QueryLen(sequence), items);
    }
  }
  // Adds the parts of an item that have some of its `count` tokens or positions.
  void Cut(WorkItem item, Span WorkItem::* cut, int64_t unit, int64_t count,
           std::vector<Item>* items) {
    const int64_t num_parts = std::max<int64_t>(1, CostOf(item) / wanted_cost_);
    const int64_t step = CeilDiv(CeilDiv(count, num_parts), unit) * unit;
    for (int64_t begin = 0; begin < count; begin += step) {
      item.*cut = {begin, std::min(begin + step, count)};
      items->push_back({item, CostOf(item)});
    }
  }

  static void SortByCost(std::vector<Item>* items) {
    std::stable_sort(items->begin(), items->end(),
                     [](const Item& a, const Item& b) { return a.cost > b.cost; });
  }

  const Params& p_;
  const int64_t tile_tokens_;
  int64_t num_threads_;
  int64_t wanted_cost_;             // of an item that is a part of another
  std::vector<int64_t> sequences_;  // of all trees
  std::vector<Sequences> trees_;
  std::vector<Item> items_;
  std::vector<Item> delta_items_;
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
void SumOverTokens(const BackwardParams& b, int64_t head, const RowSums& numbers) {
  const Params& p = b.forward;
  const Span tokens = TokensOf(p);
  double dsink = 0, dslope = 0;
  for (int64_t token = tokens.begin; token < tokens.end; ++token) {
    const int64_t row = token * p.num_heads + head;
    if (b.dalibi_slopes != nullptr) dslope += numbers.dslope[row];
    // A row that attends to nothing but the sink has an output and a delta of 0.
    if (b.dsinks == nullptr || numbers.delta[row] == 0) continue;
    dsink -= std::exp(std::min(0.0, double{p.sinks[head]} - b.lse[row])) * numbers.delta[row];
  }
  if (b.dsinks != nullptr) b.dsinks[head] = static_cast<float>(dsink);
  if (b.dalibi_slopes != nullptr) b.dalibi_slopes[head] = static_cast<float>(dslope);
}

}  // namespace

const BackwardKernel& ChosenBackwardKernel() {
  const std::string name = paged_attention::CpuInstructionSet();
  return **std::find_if(std::begin(kKernels), std::end(kKernels),
                        [&](const auto* kernel) { return name == kernel->instruction_set; });
}

void RunBackwardOnCpu(const BackwardParams& b, const Executor& executor) {
  const Params& p = b.forward;
  const BackwardKernel& kernel = ChosenBackwardKernel();
  ZeroPadding(b);
  const auto make_numbers = [&](bool are_used) {
    return std::unique_ptr<float[]>(are_used ? new float[p.num_tokens * p.num_heads]() : nullptr);
  };
  const auto delta = make_numbers(true), weight = make_numbers(SumsDelta(p)),
             dslope = make_numbers(b.dalibi_slopes != nullptr);
  const RowSums numbers = {delta.get(), weight.get(), dslope.get()};
  const Schedule schedule(p, executor.num_threads);
  const Executor threads = {schedule.num_threads(), executor.run};
  const int64_t columns = kernel.dquery_columns(p) * p.group.number;  // of a token
  const auto run = [&](const std::vector<Item>& items) {
    ParallelFor(threads, static_cast<int64_t>(items.size()), [&](int64_t i) {
      WorkItem item = items[i].work;
      const int64_t num_tokens = item.has_dquery ? Schedule::NumTokens(p, item) : 0;
      const std::unique_ptr<float[]> dquery(new float[num_tokens * columns]);
      item.dquery = dquery.get();
      kernel.run(b, item, numbers, paged_attention::Arena::OfThread());
    });
  };
  const Span tokens = TokensOf(p);
  ParallelFor(threads, CeilDiv(tokens.end - tokens.begin, kTokensOfChunk), [&](int64_t i) {
    const int64_t first = tokens.begin + i * kTokensOfChunk;
    kernel.sum_rows(b, first, std::min(first + kTokensOfChunk, tokens.end), numbers);
  });
  run(schedule.delta_items());
  run(schedule.items());
  if (b.dsinks == nullptr && b.dalibi_slopes == nullptr) return;
  ParallelFor(threads, p.num_heads, [&](int64_t head) { SumOverTokens(b, head, numbers); });
}

}  // namespace xla_gpu::varlen_attention
