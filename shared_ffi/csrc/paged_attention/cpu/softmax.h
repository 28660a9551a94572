// The online softmax (Milakov and Gimelshein, arXiv:1805.02867): turns the products of a KV tile
// into weights 2^(logit - max), step by step, and finds by how much earlier sums must be rescaled.
// Logits are in units of 1 / log2(e).
#pragma once

#include "mask.h"

namespace xla_gpu::paged_attention {
namespace {

// The maximum stays while logits exceed it by at most this: then nothing is rescaled.
constexpr float kMaxGrowth = 8;
constexpr float kInfinity = __builtin_inff();

// Rows of a block, at most, whose products with a packed tile become weights at once. With 32
// registers of 16 lanes there is room for a step of 8 rows, and none waits for the largest of its
// row.
constexpr int kWeighedRows = kLanes == 16 ? 8 : kBlockRows;

// What a row has seen of a split so far: about the largest logit, and for each lane the sum of
// 2^(logit - max).
struct RowSums {
  float max;
  Lanes sums;
};

// Replaces the products q . k of R rows with the step at `step` by weights, which are zero outside
// of the rows' ranges. A logit is the product times `scale`, in units of soft_cap if that is not 0.
//   products: [R, kMaxTile]; receives the weights, as Dot stores factors, times v_scales if there
//   are any; ranges, states, rescale: [R]; v_scales: [kStep]
template <int R, typename T, bool kIsScaled = false>
void Weigh(float* products, int64_t step, const Range* ranges, float scale, float soft_cap,
           RowSums* states, float* rescale, const float* v_scales = nullptr) {
  constexpr int kVectors = kStep / kLanes;
  Lanes x[R][kVectors], largest[R], shift[R];
  bool is_partial = false;
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    is_partial |= ranges[r].begin > 0 || ranges[r].end < kStep;
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      x[r][i] = Load<Lanes>(products + r * kMaxTile + step + i * kLanes) * scale;
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
    rescale[r] = 1;
    if (max[0] == states[r].max) continue;
    const Lanes factor = Exp2(before - shift[r]);
    states[r] = {max[0], states[r].sums * factor};
    rescale[r] = factor[0];
  }
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Lanes weights = Exp2(x[r][i] - shift[r]);
      float* row = products + r * kMaxTile;
      if constexpr (kIsScaled) {
        // A weight of zero stays zero, whatever the scale.
        const Lanes scaled = weights == 0 ? weights : weights * Load<Lanes>(v_scales + i * kLanes);
        Dot<T>::StoreFactors(scaled, row, step + i * kLanes);
        states[r].sums += weights;
      } else {
        states[r].sums += Dot<T>::StoreFactors(weights, row, step + i * kLanes);
      }
    }
  }
}

// The scales of an 8-bit cache, where each position has its own.
template <typename T>
class PositionScales {
 public:
  PositionScales(const Rows& rows, Arena* arena)
      : rows_(rows), k_(arena->Take<float>(kMaxTile)), v_(arena->Take<float>(kMaxTile)) {}

  bool HasK() const { return kIs8Bit<T> && rows_.p.k_scale.IsPerPosition(); }
  bool HasV() const { return kIs8Bit<T> && rows_.p.v_scale.IsPerPosition(); }
  const float* v() const { return v_; }

  // Reads the scales of a kv head at the positions of a tile that any row attends to.
  void Load(const KvTile& tile, int64_t kv_head) {
    if (!HasK() && !HasV()) return;
    const Params& p = rows_.p;
    const int32_t* table = p.block_tables + rows_.item.sequence * p.max_blocks_per_seq;
    for (int64_t j = 0; j < kMaxTile; ++j) {
      const bool is_attended = tile.range.begin <= j && j < tile.range.end;
      const int64_t position = tile.position + j, offset = position % p.block_size;
      const int64_t block = is_attended ? table[position / p.block_size] : 0;
      k_[j] = is_attended ? p.k_scale.At(block, offset, kv_head) : 1.0f;
      v_[j] = is_attended ? p.v_scale.At(block, offset, kv_head) : 1.0f;
    }
  }

  // Multiplies the products of some rows with the step at `step` by the scales of K.
  void ScaleProducts(float* products, int64_t num_rows, int64_t step) const {
    for (int64_t r = 0; r < num_rows; ++r) {
      float* row = products + r * kMaxTile + step;
      for (int64_t j = 0; j < kStep; j += kLanes) {
        xla_gpu::Store(xla_gpu::Load<Lanes>(row + j) * xla_gpu::Load<Lanes>(k_ + step + j),
                       row + j);
      }
    }
  }

 private:
  const Rows& rows_;
  float* const k_;  // [kMaxTile]
  float* const v_;  // [kMaxTile]
};

// The weights of the rows at hand at a KV tile.
template <typename T>
class Softmax {
 public:
  Softmax(const Rows& rows, const AttentionMask& mask, Arena* arena)
      : rows_(rows),
        mask_(mask),
        scales_(rows, arena),
        max_rows_(Smaller(rows.per_head, kMaxChunk)),
        weights_(arena->Take<float>(max_rows_ * kMaxTile)),
        rescale_(arena->Take<float>(kMaxTile / kStep * max_rows_)) {}

  // [tile.rows, kMaxTile]: takes the products, then holds the weights.
  float* weights() { return weights_; }
  const float* Weights(const KvTile& tile, int64_t row) const {
    return weights_ + (row - tile.rows.begin) * kMaxTile;
  }

  // The factors of the sums of the rows from `row` on before the step at `step` is added.
  const float* Rescale(const KvTile& tile, int64_t step, int64_t row) const {
    return rescale_ + step / kStep * max_rows_ + row - tile.rows.begin;
  }

  // Turns the products of the rows at hand with a tile into weights, by blocks of kRows rows.
  //   head: of the item's kv heads; states: [rows of a kv head]
  template <int kRows>
  void Apply(const KvTile& tile, int64_t head, RowSums* states) {
    const Params& p = rows_.p;
    const int64_t kv_head = rows_.item.first_kv_head + head;
    const bool is_plain_cap = p.soft_cap > 0 && p.soft_cap <= kMaxPlainCap;
    float scale = is_plain_cap ? p.scale / p.soft_cap : p.scale * kLog2E;
    if (kIs8Bit<T> && !scales_.HasK()) scale *= p.k_scale.At(0, 0, kv_head);
    scales_.Load(tile, kv_head);
    const bool has_holes = mask_.HasHoles(tile);
    const bool logits_are_final =
        has_holes || p.alibi_slopes != nullptr || p.soft_cap > kMaxPlainCap;
    ForEachBlock<kRows>(tile.rows.begin, tile.rows.end, [&](auto num_rows, int64_t first) {
      const Range all = mask_.RangeOf(tile, first, num_rows);
      if (all.begin >= all.end) return;
      const int64_t of_chunk = first - tile.rows.begin;
      float* products = weights_ + of_chunk * kMaxTile;
      for (int64_t step = all.begin / kStep * kStep; step < all.end; step += kStep) {
        if (scales_.HasK()) scales_.ScaleProducts(products, num_rows, step);
        Range ranges[num_rows];
        for (int r = 0; r < num_rows; ++r) {
          const auto [begin, end] = mask_.RangeOf(tile, first + r, 1);
          ranges[r] = {begin - step, end - step};
        }
        if (logits_are_final) {
          CapAndBias(tile.position + step, head, first, num_rows, scale, products + step);
        }
        if (has_holes) {
          for (int r = 0; r < num_rows; ++r) {
            MaskHoles(tile.position + step, ranges[r], first + r, products + r * kMaxTile + step);
          }
        }
        const float remaining_scale = logits_are_final ? 1 : scale,
                    cap_left = logits_are_final ? 0 : p.soft_cap;
        float* rescale = rescale_ + step / kStep * max_rows_ + of_chunk;
        if (scales_.HasV()) {
          Weigh<num_rows, T, kIs8Bit<T>>(products, step, ranges, remaining_scale, cap_left,
                                         states + first, rescale, scales_.v() + step);
        } else {
          Weigh<num_rows, T>(products, step, ranges, remaining_scale, cap_left, states + first,
                             rescale);
        }
      }
    });
  }

 private:
  // Sets a row's logits of the positions in its range that it leaves out to -inf.
  //   position: of the step; range, logits: of the step's positions
  __attribute__((noinline)) void MaskHoles(int64_t position, const Range& range, int64_t row,
                                           float* logits) const {
    const Holes holes = mask_.HolesOf(row);
    for (int64_t j = Larger(0, range.begin); j < Smaller(kStep, range.end); ++j) {
      if (holes.Contain(position + j)) logits[j] = -kInfinity;
    }
  }

  // Turns the products of some rows with a step into capped logits with ALiBi's bias. Not inlined:
  // few calls have slopes, a large cap or holes in their masks.
  //   position: of the step; products: [num_rows, kMaxTile]
  __attribute__((noinline)) void CapAndBias(int64_t position, int64_t head, int64_t first,
                                            int64_t num_rows, float scale, float* products) const {
    const Params& p = rows_.p;
    const float cap = (p.soft_cap < kMaxCap ? p.soft_cap : kMaxCap) * kLog2E;
    for (int64_t row = first; row < first + num_rows; ++row, products += kMaxTile) {
      const int64_t query_head = rows_.Head(head * rows_.per_head + row);
      const float slope = p.alibi_slopes == nullptr ? 0.0f : p.AlibiSlope(query_head);
      const auto query_position = static_cast<float>(mask_.Position(row) - position);
      for (int64_t j = 0; j < kStep; j += kLanes) {
        Lanes x = Load<Lanes>(products + j) * scale;
        if (p.soft_cap > kMaxPlainCap) {
          x = SoftCap(x, cap);
        } else if (p.soft_cap > 0) {
          x = Tanh(x) * cap;
        }
        const Lanes after = LaneNumbers() + (j - query_position);
        Store(MultiplyAdd(Max(after, -after), Splat(-slope), x), products + j);
      }
    }
  }

  const Rows& rows_;
  const AttentionMask& mask_;
  PositionScales<T> scales_;
  const int64_t max_rows_;  // of a chunk
  float* const weights_;    // [max_rows, kMaxTile]
  float* const rescale_;    // [kMaxTile / kStep, max_rows]
};

}  // namespace
}  // namespace xla_gpu::paged_attention
