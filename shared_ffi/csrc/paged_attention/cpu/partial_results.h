// What a row finds in one split (SplitSums), and what all splits come to (Totals): the log-sum-exp
// merge, and the result that is written.
#pragma once

#include <cmath>

#include "softmax.h"

namespace xla_gpu::paged_attention {
namespace {

constexpr double kLn2 = 0.693147180559945309;

// Floats of a row of V or of sums, padded to whole vectors.
template <typename T>
int64_t PaddedColumns(const Params& p) {
  return RoundUp(p.value_head_size, Dot<T>::kDown * kLanes);
}

// The totals of all rows over the splits so far.
template <typename T>
class Totals {
 public:
  // `only`: the sums of the only split, which the totals take over; null: there may be several. A
  // sink is a logit without V that each row has seen before any position.
  Totals(const Rows& rows, float* only, Arena* arena)
      : rows_(rows),
        width_(PaddedColumns<T>(rows.p)),
        max_(arena->Take<float>(rows.count)),
        weight_(arena->Take<float>(rows.count)),
        is_only_(only != nullptr),
        values_(is_only_ ? only : arena->Take<float>(rows.count * width_)) {
    const bool has_sinks = rows.p.sinks != nullptr;
    if (!is_only_) std::memset(values_, 0, rows.count * width_ * sizeof(float));
    for (int64_t row = 0; row < rows.count; ++row) {
      max_[row] = has_sinks ? rows.p.Sink(rows.Head(row)) : -kInfinity;
      weight_[row] = has_sinks ? 1.0f : 0.0f;
    }
  }

  // Merges the partial result of a row and the next split.
  void Add(int64_t row, float max_of_split, float weight, const float* values) {
    const float max = max_of_split > max_[row] ? max_of_split : max_[row];
    const float shift = max == -kInfinity ? 0.0f : max;
    const Lanes factors = Exp2(Lanes{max_[row] - shift, max_of_split - shift});
    const float rescale = factors[0], share = factors[1];
    max_[row] = max;
    weight_[row] = weight_[row] * rescale + weight * share;
    if (is_only_ && share == 1) return;
    float* total = values_ + row * width_;
    for (int64_t d = 0; d < rows_.p.value_head_size; d += kLanes) {
      const Lanes more = LoadWide(values + d, rows_.p.value_head_size - d) * share;
      Store(is_only_ ? more : MultiplyAdd(Load<Lanes>(total + d), Splat(rescale), more), total + d);
    }
  }

  // Writes output and log-sum-exp of all rows.
  void Write() const {
    WithQueryType<T>(rows_.p, [&](auto type) {
      using Q = decltype(type);
      WriteTo(static_cast<Q*>(rows_.p.output));
    });
  }

 private:
  template <typename Q>
  void WriteTo(Q* output) const {
    const Params& p = rows_.p;
    const QueryTokens tokens = p.QueryTokensOf(rows_.item.sequence);
    const auto prefetch = [&](int64_t row) {
      if (row >= rows_.count) return;
      PrefetchRow<true>(output + rows_.InBatch(row) * p.value_head_size,
                        p.value_head_size * sizeof(Q));
    };
    for (int64_t row = 0; row < kRowsAhead; ++row) prefetch(row);
    for (int64_t row = 0; row < rows_.count; ++row) {
      prefetch(row + kRowsAhead);
      const int64_t in_batch = rows_.InBatch(row);
      const float* total = values_ + row * width_;
      // A row that attends to nothing has sums of zero.
      const bool attends = p.Attends(tokens, rows_.Token(row) - tokens.first);
      const float weight = attends ? weight_[row] : 1.0f;
      const float v_scale =
          p.v_scale.IsPerPosition() ? 1.0f : p.v_scale.At(0, 0, rows_.KvHead(row));
      for (int64_t d = 0; d < p.value_head_size; d += kLanes) {
        Lanes result = Load<Lanes>(total + d) / weight;
        if (kIs8Bit<T>) result *= v_scale;
        result += 0.0f;  // turns -0 into 0: the sign of zero depends on how the sums were made
        StoreNarrow(result, output + in_batch * p.value_head_size + d, p.value_head_size - d);
      }
      if (p.lse != nullptr) {
        const double log2_of_sum = max_[row] + std::log2(double{weight_[row]});
        p.lse[in_batch] = p.Lse(rows_.Head(row), static_cast<float>(log2_of_sum * kLn2));
      }
    }
  }

  const Rows& rows_;
  const int64_t width_;
  float* const max_;     // [rows]
  float* const weight_;  // [rows]
  const bool is_only_;   // values_ are those of the only split
  float* const values_;  // [rows, width]
};

// The sums of all rows over one split. An item's only split is summed in the output where rows lie
// there in the same way: a decode step in float32 touches fewer cache lines.
template <typename T>
class SplitSums {
 public:
  SplitSums(const Rows& rows, Arena* arena)
      : rows_(rows),
        width_(PaddedColumns<T>(rows.p)),
        states_(arena->Take<RowSums>(rows.count)),
        values_(FitOutput() ? static_cast<float*>(rows.p.output) + rows.InBatch(0) * width_
                            : arena->Take<float>(rows.count * width_)) {}

  int64_t width() const { return width_; }
  RowSums* States(int64_t row) { return states_ + row; }
  float* Values(int64_t row) { return values_ + row * width_; }

  void Clear() {
    std::memset(values_, 0, rows_.count * width_ * sizeof(float));
    for (int64_t row = 0; row < rows_.count; ++row) states_[row] = {-kInfinity, Lanes{}};
  }

  // Ends the split: puts columns, which are in the order of Dot::LoadDown, in their own order, then
  // calls take(row, max, weight, values) for each row.
  template <typename Take>
  void Finish(const Take& take) {
    constexpr int kVectors = Dot<T>::kDown;
    const float* end = kVectors > 1 ? values_ + rows_.count * width_ : values_;  // 1: in order
    for (float* columns = values_; columns < end; columns += kVectors * kLanes) {
      Lanes vectors[kVectors];
      std::memcpy(vectors, columns, sizeof(vectors));
      StoreInOrder(vectors, columns);
    }
    for (int64_t row = 0; row < rows_.count; ++row) {
      take(row, states_[row].max, SumOfLanes(states_[row].sums), Values(row));
    }
  }

 private:
  bool FitOutput() const {
    return std::is_same_v<T, float> && rows_.p.dtype == DType::kFloat32 &&
           width_ == rows_.p.value_head_size && rows_.AreSideBySide() && rows_.item.HasOneSplit();
  }

  const Rows& rows_;
  const int64_t width_;
  RowSums* const states_;  // [rows]
  float* const values_;    // [rows, width]
};

}  // namespace
}  // namespace xla_gpu::paged_attention
