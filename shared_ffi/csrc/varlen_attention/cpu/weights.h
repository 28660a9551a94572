// The weights of a query tile at a KV tile, and the derivatives of its logits.
#pragma once

#include "../../paged_attention/cpu/softmax.h"
#include "kernel.h"

namespace xla_gpu::varlen_attention {
namespace {

using paged_attention::Arena;
using paged_attention::kInfinity;
using paged_attention::kLog2E;
using paged_attention::kMaxTile;
using paged_attention::Larger;
using paged_attention::Params;
using paged_attention::QueryTokens;
using paged_attention::Smaller;
using paged_attention::Span;

constexpr double kLog2EInDouble = 1.44269504088896341;

// Turns the products q . k and dout . v of some rows with a KV tile, [rows, kMaxTile] each, into
// the weights P and the derivatives dY.
class Weights {
 public:
  Weights(const BackwardParams& b, const WorkItem& item, const RowSums& numbers,
          const QueryTokens& tokens, int64_t max_rows, Arena* arena)
      : b_(b),
        p_(b.forward),
        item_(item),
        numbers_(numbers),
        tokens_(tokens),
        group_(p_.group.number),
        weights_(arena->Take<float>(max_rows * kMaxTile)),
        dlogits_(arena->Take<float>(max_rows * kMaxTile)),
        rows_(arena->Take<Row>(max_rows)) {}

  // [rows, kMaxTile]: q . k, then P.
  float* weights() { return weights_; }
  // [rows, kMaxTile]: dout . v, then dY.
  float* dlogits() { return dlogits_; }

  // The KV tile at `at`, of `count` positions, and the tokens from i on, in num_rows rows.
  void SetRows(int64_t at, int64_t count, int64_t i, int64_t num_tokens, int64_t num_rows) {
    num_rows_ = num_rows;
    is_partial_ = num_tokens * group_ < num_rows;
    for (int64_t n = 0; n < num_tokens; ++n) {
      const Span span = p_.Attended(tokens_, i + n);
      const Span holes = p_.HolesOf(tokens_, i + n).Positions();
      const Span in_tile = {Larger(span.begin - at, 0), Smaller(span.end - at, count)};
      is_partial_ |= in_tile.begin > 0 || in_tile.end < kMaxTile || !holes.IsEmpty();
      for (int64_t h = 0; h < group_; ++h) {
        const int64_t head = item_.kv_head * group_ + h;
        const int64_t in_batch = (tokens_.first + i + n) * p_.num_heads + head;
        const float lse = b_.lse[in_batch];
        const bool attends = lse != -kInfinity && !in_tile.IsEmpty();
        is_partial_ |= !attends;
        rows_[n * group_ + h] = {attends ? in_tile : Span{0, 0},
                                 {holes.begin - at, holes.end - at},
                                 in_batch,
                                 tokens_.Position(i + n) - at,
                                 head,
                                 ShiftOf(lse),
                                 numbers_.delta[in_batch]};
      }
    }
    for (int64_t row = num_tokens * group_; row < num_rows; ++row) rows_[row] = {};
  }

  // From the first to the last position of the tile that any of `count` rows attends to.
  Span PositionsOf(int64_t first, int64_t count) const {
    if (!is_partial_) return {0, kMaxTile};
    Span any = {0, 0};
    for (int64_t r = first; r < first + count; ++r) any = any.Hull(rows_[r].range);
    return any;
  }
  // From the first to the last row that attends to any of `count` positions.
  Span RowsOf(int64_t first, int64_t count) const {
    if (!is_partial_) return {0, num_rows_};
    const auto attends = [&](int64_t r) {
      return rows_[r].range.begin < first + count && first < rows_[r].range.end;
    };
    Span rows = {0, num_rows_};
    while (!rows.IsEmpty() && !attends(rows.begin)) ++rows.begin;
    while (!rows.IsEmpty() && !attends(rows.end - 1)) --rows.end;
    return rows;
  }

  // Turns products into P and dY.
  void Apply() { IsPlain() ? ApplyTo</*kIsPlain=*/true>() : ApplyTo</*kIsPlain=*/false>(); }

  // Adds a tile's part of the sums of P and of P * dP.
  void AddToDelta() { IsPlain() ? SumTerms</*kIsPlain=*/true>() : SumTerms</*kIsPlain=*/false>(); }
  // Before the first tile, for the tokens from i up to `end`.
  void ClearDelta(int64_t i, int64_t end) const {
    ForEachRow(i, end, [&](int64_t /*head*/, int64_t in_batch) {
      numbers_.weight[in_batch] = numbers_.delta[in_batch] = 0;
    });
  }
  // Makes delta of the sums of all tiles. The rounding of a large lse changes all weights by one
  // factor, which delta must not have: one weight of 1 leaves nothing of dP - delta.
  void FinishDelta(int64_t i, int64_t end) const {
    ForEachRow(i, end, [&](int64_t head, int64_t in_batch) {
      float weight = numbers_.weight[in_batch];
      if (p_.sinks != nullptr) {
        weight += WeightOf(Splat(p_.Sink(head) - ShiftOf(b_.lse[in_batch])))[0];
      }
      if (weight != 0) numbers_.delta[in_batch] /= weight;
    });
  }

 private:
  struct Row {
    Span range;  // positions of the tile that it attends to, but for `holes`
    Span holes;
    int64_t in_batch;  // the index in [num_tokens * num_heads]
    int64_t position;  // from the tile's first
    int64_t head;
    float shift;
    float delta;
  };

  // Calls function(head, index in the batch).
  template <typename Function>
  void ForEachRow(int64_t i, int64_t end, const Function& function) const {
    const int64_t first = item_.kv_head * group_;
    for (int64_t token = tokens_.first + i; token < tokens_.first + end; ++token) {
      for (int64_t head = first; head < first + group_; ++head) {
        function(head, token * p_.num_heads + head);
      }
    }
  }

  // lse in units of 1 / log2(e), or less by as much as the forward may have rounded it: so a row's
  // only weight is 1, however large its logit. One unit in the last place more could make it 0.
  static float ShiftOf(float lse) {
    return static_cast<float>(lse * (kLog2EInDouble * (lse < 0 ? 1 + 0x1p-24 : 1 - 0x1p-24)));
  }

  bool IsPlain() const { return p_.soft_cap == 0 && p_.alibi_slopes == nullptr; }

  // For the soft cap and ALiBi.
  struct Bias {
    Lanes logits;
    Lanes dcap;  // the derivative of the cap
    Lanes distance;
  };

  Bias CapAndBias(Lanes products, const Row& row, int64_t j) const {
    const bool is_plain_cap = p_.soft_cap > 0 && p_.soft_cap <= paged_attention::kMaxPlainCap;
    const float cap =
        (p_.soft_cap < paged_attention::kMaxCap ? p_.soft_cap : paged_attention::kMaxCap) * kLog2E;
    Bias bias = {products * (is_plain_cap ? p_.scale / p_.soft_cap : p_.scale * kLog2E), Splat(1),
                 Lanes{}};
    if (p_.soft_cap > 0) {
      const Lanes capped = is_plain_cap ? Tanh(bias.logits) * cap : SoftCap(bias.logits, cap);
      const Lanes tanh = is_plain_cap ? Tanh(bias.logits) : capped * (1 / cap);
      bias.logits = capped;
      bias.dcap = 1 - tanh * tanh;
    }
    if (p_.alibi_slopes != nullptr) {
      const Lanes after = LaneNumbers() + static_cast<float>(j - row.position);
      bias.distance = Max(after, -after);
      bias.logits = MultiplyAdd(bias.distance, Splat(-p_.AlibiSlope(row.head)), bias.logits);
    }
    return bias;
  }

  // The weights of a row at the positions from j on, 0 where it does not attend.
  struct Terms {
    Lanes weights;
    Lanes dweights;  // 0 there, too
    Bias bias;
  };

  template <bool kIsPlain>
  Terms TermsAt(int64_t r, int64_t j) const {
    const Row& row = rows_[r];
    // Where no row of a block attends, the products were not computed.
    if (is_partial_ && (row.range.begin >= j + kLanes || row.range.end <= j)) {
      return {Lanes{}, Lanes{}, {Lanes{}, Lanes{}, Lanes{}}};
    }
    const Lanes products = Load<Lanes>(weights_ + r * kMaxTile + j);
    Terms terms;
    if constexpr (kIsPlain) {
      terms.bias.logits = products * (p_.scale * kLog2E);
    } else {
      terms.bias = CapAndBias(products, row, j);
    }
    terms.weights = WeightOf(terms.bias.logits - row.shift);
    terms.dweights = Load<Lanes>(dlogits_ + r * kMaxTile + j);
    if (is_partial_) {
      const Mask counts = LanesIn(row.range.begin - j, row.range.end - j) &
                          ~LanesIn(row.holes.begin - j, row.holes.end - j);
      terms.weights = counts ? terms.weights : Lanes{};
      terms.dweights = counts ? terms.dweights : Lanes{};
    }
    return terms;
  }

  template <bool kIsPlain>
  void ApplyTo() {
    for (int64_t r = 0; r < num_rows_; ++r) {
      const Row& row = rows_[r];
      Lanes slopes = {};
      for (int64_t j = 0; j < kMaxTile; j += kLanes) {
        const Terms terms = TermsAt<kIsPlain>(r, j);
        Lanes dlogits = terms.weights * (terms.dweights - row.delta);
        if constexpr (!kIsPlain) {
          slopes = MultiplyAdd(dlogits, terms.bias.distance, slopes);
          dlogits *= terms.bias.dcap;
        }
        Store(terms.weights, weights_ + r * kMaxTile + j);
        Store(dlogits, dlogits_ + r * kMaxTile + j);
      }
      if (kIsPlain || !item_.has_dquery || p_.alibi_slopes == nullptr) continue;
      if (!row.range.IsEmpty()) numbers_.dslope[row.in_batch] -= SumOfLanes(slopes);
    }
  }

  template <bool kIsPlain>
  void SumTerms() {
    for (int64_t r = 0; r < num_rows_; ++r) {
      const Row& row = rows_[r];
      if (row.range.IsEmpty()) continue;
      Lanes weights = {}, products = {};
      for (int64_t j = 0; j < kMaxTile; j += kLanes) {
        const Terms terms = TermsAt<kIsPlain>(r, j);
        weights += terms.weights;
        products = MultiplyAdd(terms.weights, terms.dweights, products);
      }
      numbers_.weight[row.in_batch] += SumOfLanes(weights);
      numbers_.delta[row.in_batch] += SumOfLanes(products);
    }
  }

  // 2^x, at most 1. A NaN stays.
  static Lanes WeightOf(Lanes x) { return Exp2(x > 0 ? Lanes{} : x); }

  const BackwardParams& b_;
  const Params& p_;
  const WorkItem& item_;
  const RowSums& numbers_;
  const QueryTokens& tokens_;
  const int64_t group_;
  float* const weights_;  // [rows, kMaxTile]
  float* const dlogits_;  // [rows, kMaxTile]
  Row* const rows_;       // [rows]
  int64_t num_rows_ = 0;
  bool is_partial_ = false;  // some row does not attend to all of the tile
};

}  // namespace
}  // namespace xla_gpu::varlen_attention
