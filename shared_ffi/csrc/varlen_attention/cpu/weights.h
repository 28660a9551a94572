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

// Takes logits q . k and derivatives dout . v of the weights, [rows, kMaxTile] each, and makes of
// them the weights P and the derivatives dY of the logits before ALiBi's bias and the scale, as
// factors of products with rows of positions (across) and with rows of queries (down).
template <typename T>
class Weights {
 public:
  Weights(const BackwardParams& b, const WorkItem& item, const RowNumbers& numbers,
          const QueryTokens& tokens, int64_t max_rows, Arena* arena)
      : b_(b),
        p_(b.forward),
        item_(item),
        numbers_(numbers),
        tokens_(tokens),
        group_(p_.group.number),
        logits_(arena->Take<float>(max_rows * kMaxTile)),
        dweights_(arena->Take<float>(max_rows * kMaxTile)),
        across_(kIsOne ? dweights_ : arena->Take<float>(max_rows * kMaxTile)),
        rows_(arena->Take<Row>(max_rows)) {}

  // [rows, kMaxTile]: they take the products.
  float* logits() { return logits_; }
  float* dweights() { return dweights_; }

  // dY of the rows from `row` on, as factors of positions.
  const float* DlogitsAcross(int64_t row) const { return across_ + row * kMaxTile; }
  // P and dY of all rows, as factors of rows.
  const float* WeightsDown() const { return logits_; }
  const float* DlogitsDown() const { return dweights_; }

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
                                 i + n - at,
                                 head,
                                 static_cast<float>(lse * double{kLog2E}),
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

  void Apply() {
    if (p_.soft_cap > 0 || p_.alibi_slopes != nullptr) {
      ApplyTo</*kIsPlain=*/false>();
    } else {
      ApplyTo</*kIsPlain=*/true>();
    }
  }

 private:
  static constexpr int kGroup = Dot<T>::kPerLane;  // rows that factors of rows combine
  static constexpr bool kIsOne = kGroup == 1;

  struct Row {
    Span range;        // positions of the tile that it attends to, but for `holes`
    Span holes;
    int64_t in_batch;  // the index in [num_tokens * num_heads]
    int64_t position;  // from the tile's first
    int64_t head;
    float shift;       // lse in units of 1 / log2(e)
    float delta;
  };

  // Of the soft cap and ALiBi.
  struct Bias {
    Lanes logits;
    Lanes dcap;  // the derivative of the cap
    Lanes distance;
  };

  Bias CapAndBias(Lanes products, const Row& row, int64_t j) const {
    const bool is_plain_cap = p_.soft_cap > 0 && p_.soft_cap <= paged_attention::kMaxPlainCap;
    const float cap = (p_.soft_cap < paged_attention::kMaxCap ? p_.soft_cap : paged_attention::kMaxCap) * kLog2E;
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

  template <bool kIsPlain>
  void ApplyTo() {
    const float scale = p_.scale * kLog2E;
    for (int64_t first = 0; first < num_rows_; first += kGroup) {
      Lanes slopes[kGroup] = {};
      for (int64_t j = 0; j < kMaxTile; j += kLanes) {
        Lanes weights[kGroup], dlogits[kGroup];
#pragma GCC unroll 2
        for (int g = 0; g < kGroup; ++g) {
          const Row& row = rows_[first + g];
          if (is_partial_ && (row.range.begin >= j + kLanes || row.range.end <= j)) {
            weights[g] = dlogits[g] = Lanes{};  // the products were not computed
            continue;
          }
          const int64_t place = (first + g) * kMaxTile + j;
          const Lanes products = Load<Lanes>(logits_ + place);
          Bias bias;
          if constexpr (kIsPlain) {
            bias.logits = products * scale;
          } else {
            bias = CapAndBias(products, row, j);
          }
          const Lanes x = bias.logits - row.shift;
          weights[g] = Exp2(x > 0 ? Lanes{} : x);  // a NaN stays
          dlogits[g] = weights[g] * (Load<Lanes>(dweights_ + place) - row.delta);
          if (is_partial_) {
            const Mask counts = LanesIn(row.range.begin - j, row.range.end - j) &
                                ~LanesIn(row.holes.begin - j, row.holes.end - j);
            weights[g] = counts ? weights[g] : Lanes{};
            dlogits[g] = counts ? dlogits[g] : Lanes{};
          }
          if constexpr (!kIsPlain) {
            slopes[g] = MultiplyAdd(dlogits[g], bias.distance, slopes[g]);
            dlogits[g] *= bias.dcap;
          }
        }
        const int64_t place = first / kGroup * kMaxTile + j;
        if constexpr (kIsOne) {
          Store(weights[0], logits_ + place);
          Store(dlogits[0], dweights_ + place);
        } else {
          for (int g = 0; g < kGroup; ++g) {
            Dot<T>::StoreFactors(dlogits[g], across_ + (first + g) * kMaxTile, j);
          }
          Store(Dot<T>::Pair(weights[0], weights[1]), logits_ + place);
          Store(Dot<T>::Pair(dlogits[0], dlogits[1]), dweights_ + place);
        }
      }
      if (!kIsPlain && item_.has_dquery && p_.alibi_slopes != nullptr) {
        for (int g = 0; g < kGroup; ++g) {
          const Row& row = rows_[first + g];
          if (!row.range.IsEmpty()) numbers_.dslope[row.in_batch] -= SumOfLanes(slopes[g]);
        }
      }
    }
  }

  const BackwardParams& b_;
  const Params& p_;
  const WorkItem& item_;
  const RowNumbers& numbers_;
  const QueryTokens& tokens_;
  const int64_t group_;
  float* const logits_;    // [rows, kMaxTile]; then P, [rows / kGroup, kMaxTile]
  float* const dweights_;  // the same of dY
  float* const across_;    // [rows, kMaxTile]
  Row* const rows_;        // [rows]
  int64_t num_rows_ = 0;
  bool is_partial_ = false;  // some row does not attend to all of the tile
};

}  // namespace
}  // namespace xla_gpu::varlen_attention
