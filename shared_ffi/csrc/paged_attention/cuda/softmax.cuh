// Online softmax of the tensor core kernels, on logits in the registers where the products leave
// them. A lane holds the positions 2 * (lane % 4) and the next one of each 8, for two rows that are
// 8 apart.
#pragma once

#include "leaf.cuh"
#include "page_table.cuh"
#include "query.cuh"
#include "schedule.cuh"
#include "state.cuh"

namespace xla_gpu::paged_attention {

// The row whose state a lane of a warp with two groups of 16 rows, group_rows rows apart, gets from
// Softmax::StateOfLane. first_row: the warp's first.
__device__ __forceinline__ int RowOfLane(int lane, int first_row, int group_rows) {
  return first_row + lane / 2 % 2 * group_rows + lane / 4 + lane % 2 * 8;
}

// A logit with a soft cap, in units of 1 / log2(e), given 2 * log2(e) times its share of the cap.
// tanh(x) = 1 - 2 / (1 + e^2x) has an error of about 2^-23, far less than the rounding of weights
// to 16 bits.
__device__ __forceinline__ float Capped(float exponent, float cap) {
  return gpu::Fma(-2 * cap, gpu::Reciprocal(1 + gpu::Exp2(exponent)), cap);
}

// The same for caps beyond kMaxPlainCap, of which a logit x may be a small part. For |x / cap|
// below 1/2, the polynomial for tanh(y) / y in y^2 has the least maximal relative error: 2^-26.
__device__ __forceinline__ float GentlyCapped(float x, float inverse_cap, float cap) {
  const float y = x * inverse_cap, square = y * y;
  float ratio = gpu::Fma(1.7241893e-2f, square, -5.3045664e-2f);
  ratio = gpu::Fma(ratio, square, 1.3325880e-1f);
  ratio = gpu::Fma(ratio, square, -3.3333144e-1f);
  ratio = gpu::Fma(ratio, square, 1.0f);
  return square < 0.25f ? x * ratio : Capped(y * (2 * kLog2E), cap);
}

class Softmax {
  // What logits are taken relative to where all so far are -inf. Their weights are zero, as
  // relative to any other number. It stands for -inf until State.
  static constexpr float kLowest = kNoReference;

 public:
  static constexpr RowState kNoLogits = {kLowest, 0};

  // `row`: the lane's first row in the work item.
  __device__ Softmax(const Params& p, const Item& item, int row)
      : Softmax(p, item, row, {p, item, row}, {p, item, row + 8}) {}

  // The same, given the ranges of that row and of the one 8 below.
  __device__ Softmax(const Params& p, const Item& item, int row, const RowRange& range,
                     const RowRange& range_below)
      : p_(p), item_(item), row_(row), ranges_{range, range_below} {}

  // The same, of rows that have seen something.
  __device__ Softmax(const Params& p, const Item& item, int row, const RowRange& range,
                     const RowRange& range_below, const RowState (&states)[2])
      : p_(p), item_(item), row_(row), ranges_{range, range_below}, states_{states[0], states[1]} {}
  __device__ void CopyStates(RowState (&states)[2]) const {
    states[0] = states_[0];
    states[1] = states_[1];
  }

  // Multiplies the scale of row r. Called before any logits are computed.
  __device__ void MultiplyScale(int r, float factor) { scales_[r] *= factor; }

  // r = 0: the lane's first row; r = 1: the row 8 below.
  __device__ const RowRange& Range(int r) const { return ranges_[r]; }

  // Whether row r attends to a position.
  __device__ bool Attends(int r, int32_t position) const {
    return ranges_[r].Contains(position) && !RowHoles(p_, item_, row_ + 8 * r).Contain(position);
  }

  // As LeafState, in place: with that one, ptxas spills a register of the portable kernel for 9.0.
  static __device__ __forceinline__ void AddLanes(RowState (&states)[2]) {
#pragma unroll
    for (RowState& state : states) {
      state.sum += gpu::ShuffleXor(state.sum, 1);
      state.sum += gpu::ShuffleXor(state.sum, 2);
    }
  }

  // The state, after AddLanes, of a row of two groups: lane 2 * g + r of the four that share rows
  // gets that of row r of group g.
  static __device__ __forceinline__ RowState StateOfLane(int lane, const RowState (&states)[2][2]) {
    const RowState lower = lane % 2 != 0 ? states[0][1] : states[0][0];
    const RowState upper = lane % 2 != 0 ? states[1][1] : states[1][0];
    return Finished(lane / 2 % 2 != 0 ? upper : lower);
  }

  // Calls what(n, e, j) for each logit of the lane: element e of group n, which is position j.
  template <int kBlocks, typename Do>
  static __device__ __forceinline__ void ForEach(const Do& what) {
    const int lane = threadIdx.x % gpu::kWarpSize;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) what(n, e, n * 8 + lane % 4 * 2 + e % 2);
    }
  }

  // Turns q . k into logits in units of 1 / log2(e), but for a factor that WeighLeaf multiplies
  // them by; the first is that of position `begin`. If `masked`, sets the logits of positions that
  // a row does not attend to to -inf. kSeldomBegins: faster where no range begins behind `begin`,
  // in some more registers. thread: Opaque where no register is to be kept for it.
  template <bool kSeldomBegins = false, int kBlocks>
  __device__ __forceinline__ void ToLogits(int32_t begin, bool masked, float (&logits)[kBlocks][4],
                                           unsigned thread = threadIdx.x) const {
    constexpr int kKeys = kBlocks * 8;
    if (p_.soft_cap > 0) {
      p_.soft_cap > kMaxPlainCap ? CapGently(logits) : Cap(logits);
    } else if (!ScalesLate()) {
      const float scales[2] = {scales_[0] * kLog2E, scales_[1] * kLog2E};
      ForEach<kBlocks>([&](int n, int e, int) { logits[n][e] *= scales[e / 2]; });
    }
    if (masked) {
      if constexpr (kSeldomBegins) {
        // Relative to the lane's first position, so that each is compared with a constant.
        const int lane_begin = begin + static_cast<int>(thread) % gpu::kWarpSize % 4 * 2;
        const int first[2] = {ranges_[0].begin - lane_begin, ranges_[1].begin - lane_begin};
        const int last[2] = {ranges_[0].end - lane_begin, ranges_[1].end - lane_begin};
        ForEach<kBlocks>([&](int n, int e, int) {
          if (n * 8 + e % 2 >= last[e / 2]) logits[n][e] = -kInfinity;
        });
        if (gpu::AnyInWarp(first[0] > 0 || first[1] > 0)) {  // windows begin in few tiles
          ForEach<kBlocks>([&](int n, int e, int) {
            if (n * 8 + e % 2 < first[e / 2]) logits[n][e] = -kInfinity;
          });
        }
      } else {
        int first[2], last[2];  // relative to `begin`
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          first[r] = max(ranges_[r].begin - begin, 0);
          last[r] = min(max(ranges_[r].end - begin, 0), kKeys);
        }
        ForEach<kBlocks>([&](int n, int e, int j) {
          const bool attends = first[e / 2] <= j && j < last[e / 2];
          logits[n][e] = attends ? logits[n][e] : -kInfinity;
        });
      }
      if (p_.bidirectional_ranges != nullptr ||
          (p_.tree_mask != nullptr && begin + kKeys > item_.first_position)) {
        MaskHoles(begin, logits);
      }
    }
    if (p_.alibi_slopes != nullptr) AddBias(begin, logits);
  }

  // Logits become weights 2^(logit - reference). A leaf (order.h) begins with no reference.
  // Positions are looked at in blocks of kBlockPositions: so KV tiles of any size find the same
  // references. The largest logit of the first block with any becomes the reference. Where a later
  // one exceeds it by more than 2^slack, it follows by a whole number of steps of 2, and what was
  // added so far shrinks.
  static constexpr int kBlockPositions = 32;

  __device__ __forceinline__ void BeginLeaf() { states_[0] = states_[1] = kNoLogits; }

  // The same with the reference of its first block, given logits whose scale is late. Where none
  // Exceeds it, WeighLeaf takes the block.
  template <int kBlocks>
  __device__ __forceinline__ void BeginLeaf(const float (&logits)[kBlocks][4]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      states_[r] = {fmaxf(LargestOf(logits, r) * (scales_[r] * kLog2E), kLowest), 0};
    }
  }

  // The factors of the logits.
  __device__ __forceinline__ void FactorsOf(bool scales_late, float (&factors)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) factors[r] = scales_late ? scales_[r] * kLog2E : 1.0f;
  }

  // The same. Whether a row of the warp may have to change its reference.
  template <int kBlocks>
  __device__ __forceinline__ bool Exceeds(const float (&logits)[kBlocks][4], bool scales_late,
                                          float slack, float (&factors)[2]) const {
    return gpu::AnyInWarp(LaneExceeds(logits, scales_late, slack, factors));
  }
  // The same of the positions that this lane has.
  template <int kBlocks>
  __device__ __forceinline__ bool LaneExceeds(const float (&logits)[kBlocks][4], bool scales_late,
                                              float slack, float (&factors)[2]) const {
    if (!gpu::kSoftmax) return false;
    float largest[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      largest[e] = logits[0][e];
#pragma unroll
      for (int n = 1; n < kBlocks; ++n) largest[e] = fmaxf(largest[e], logits[n][e]);
    }
    bool exceeds = false;
    FactorsOf(scales_late, factors);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float top = fmaxf(largest[2 * r], largest[2 * r + 1]) * factors[r];
      exceeds |= top > states_[r].max + slack;
    }
    return exceeds;
  }

  // Turns logits into weights, if none Exceeds. Blocks of 8 positions from kBegin to kEnd.
  template <int kBegin, int kEnd, int kBlocks>
  __device__ __forceinline__ void WeighLeaf(const float (&factors)[2],
                                            float (&logits)[kBlocks][4]) {
    static_assert(kBegin % 4 == 0 && kEnd % 4 == 0 && kEnd <= kBlocks, "whole blocks");
    if (!gpu::kSoftmax) return;
#pragma unroll
    for (int b = kBegin; b < kEnd; b += 4) {
      float pairs[2][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float(&weights)[4] = logits[b + i];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          weights[e] = gpu::Exp2(gpu::Fma(weights[e], factors[e / 2], -states_[e / 2].max));
        }
        pairs[0][i] = weights[0] + weights[1];
        pairs[1][i] = weights[2] + weights[3];
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        states_[r].sum += (pairs[r][0] + pairs[r][1]) + (pairs[r][2] + pairs[r][3]);
      }
    }
  }

  // The same if one may exceed. Adds to drops[r], in byte b, by how many powers of two the sums of
  // row r shrink before block b is added to them.
  template <int kBegin = 0, int kBlocks>
  __device__ __forceinline__ void WeighBlocks(const float (&factors)[2], float slack,
                                              float (&logits)[kBlocks][4], uint32_t (&drops)[2]) {
    Follow<kBegin>(factors, slack, logits, drops);
    WeighLeaf<kBegin, kBegin + 4>(factors, logits);
    if constexpr (kBegin + 4 < kBlocks) WeighBlocks<kBegin + 4>(factors, slack, logits, drops);
  }

  // The first step of it, for the block of 32 positions that begins with the block kBegin of 8.
  template <int kBegin, int kBlocks>
  __device__ __forceinline__ void Follow(const float (&factors)[2], float slack,
                                         const float (&logits)[kBlocks][4], uint32_t (&drops)[2]) {
    static_assert(kBlocks <= 16, "a byte a block of 32 positions");
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float top = LargestOf(logits + kBegin, r) * factors[r];
      RowState& state = states_[r];
      if (top > state.max + slack) {
        const float steps = state.max == kLowest ? 0 : ceilf(top - state.max);
        state.max = state.max == kLowest ? top : state.max + steps;
        state.sum = gpu::MultiplyFlushed(state.sum, gpu::Exp2(-steps));
        drops[r] |= static_cast<uint32_t>(fminf(steps, 255)) << kBegin / 4 * 8;
      }
    }
  }

  // The factor that the sums of a row with these drops are multiplied by before block b.
  static __device__ __forceinline__ float Shrinks(uint32_t drops, int b) {
    return __uint_as_float((127 - min(drops >> 8 * b & 0xff, 127u)) << 23);
  }
  // Multiplies sums, which are laid out as logits, with columns in place of positions. A factor of
  // 1 changes no bit of its row.
  template <int kBlocks>
  static __device__ __forceinline__ void RescaleAll(const float (&factors)[2],
                                                    float (&sums)[kBlocks][4]) {
#pragma unroll
    for (float(&block_sums)[4] : sums) {
#pragma unroll
      for (int e = 0; e < 4; ++e) block_sums[e] *= factors[e / 2];
    }
  }

  // Adds the values that are infinite or NaN to the sums of those rows that attend to them.
  // value(j, n, e) is V of position begin + j for column e of group n, and widened(value, j) what
  // is added of it. There are no branches: they would take most of the code, which is long.
  template <int kPositions, int kBlocks, typename Value, typename Widened>
  __device__ __forceinline__ void AddNonFinite(int32_t begin, float (&sums)[kBlocks][4],
                                               const Value& value, const Widened& widened) const {
#pragma unroll 1
    for (int j = 0; j < kPositions; ++j) {
      const bool attends[2] = {Attends(0, begin + j), Attends(1, begin + j)};
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const auto v = value(j, n, e);
          const float added = IsFinite(v) ? -0.0f : widened(v, j);  // -0 changes no number
          if (attends[0]) sums[n][e] += added;
          if (attends[1]) sums[n][e + 2] += added;
        }
      }
    }
  }

  // What a row has found in the leaf, given what each lane has of it.
  static __device__ __forceinline__ RowState LeafState(RowState lane) {
    lane.sum += gpu::ShuffleXor(lane.sum, 1);
    lane.sum += gpu::ShuffleXor(lane.sum, 2);
    return lane;
  }
  __device__ __forceinline__ RowState LeafState(int r) const { return LeafState(states_[r]); }

  // That of a finished row.
  static __device__ __forceinline__ RowState Finished(const RowState& state) {
    return {state.max > kLowest || state.sum > 0 ? state.max : -kInfinity, state.sum};
  }

  // Whether the scale waits for WeighLeaf, which then multiplies and subtracts the largest logit in
  // one instruction: the largest must stay the largest. ToLogits then only masks.
  __device__ __forceinline__ bool ScalesLate() const {
    return scales_[0] > 0 && ScalesLate(p_, scales_[1]);
  }
  // The same of rows with this scale, or a larger one.
  static __device__ __forceinline__ bool ScalesLate(const Params& p, float scale) {
    return scale > 0 && p.soft_cap == 0 && p.alibi_slopes == nullptr;
  }

 private:
  // Row r's largest logit of a block, given the logits from its first ones on.
  static __device__ __forceinline__ float LargestOf(const float (*block)[4], int r) {
    float largest = fmaxf(block[0][2 * r], block[0][2 * r + 1]);
#pragma unroll
    for (int i = 1; i < 4; ++i) {
      largest = fmaxf(largest, fmaxf(block[i][2 * r], block[i][2 * r + 1]));
    }
    largest = fmaxf(largest, gpu::ShuffleXor(largest, 1));
    return fmaxf(largest, gpu::ShuffleXor(largest, 2));
  }

  template <int kBlocks>
  __device__ void MaskHoles(int32_t begin, float (&logits)[kBlocks][4]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {  // one row after the other takes fewer registers
      const RowHoles holes(p_, item_, row_ + 8 * r);
      ForEach<kBlocks>([&](int n, int e, int j) {
        if (e / 2 == r && holes.Contain(begin + j)) logits[n][e] = -kInfinity;
      });
    }
  }

  template <int kBlocks>
  __device__ void AddBias(int32_t begin, float (&logits)[kBlocks][4]) const {
    const AlibiBias biases[2] = {{p_, item_, row_}, {p_, item_, row_ + 8}};
    ForEach<kBlocks>(
        [&](int n, int e, int j) { logits[n][e] = biases[e / 2].AddTo(logits[n][e], begin + j); });
  }

  // Caps the logits and turns them into units of 1 / log2(e).
  template <int kBlocks>
  __device__ void Cap(float (&logits)[kBlocks][4]) const {
    const float cap = p_.soft_cap * kLog2E;
    const float exponents[2] = {2 * kLog2E * scales_[0] / p_.soft_cap,
                                2 * kLog2E * scales_[1] / p_.soft_cap};
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) logits[n][e] = Capped(logits[n][e] * exponents[e / 2], cap);
    }
  }

  // The same for caps beyond kMaxPlainCap.
  template <int kBlocks>
  __device__ void CapGently(float (&logits)[kBlocks][4]) const {
    const float scales[2] = {scales_[0] * kLog2E, scales_[1] * kLog2E};
    const float cap = fminf(p_.soft_cap, kMaxCap) * kLog2E;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        logits[n][e] = GentlyCapped(logits[n][e] * scales[e / 2], 1 / cap, cap);
      }
    }
  }

  const Params& p_;
  const Item& item_;
  const int row_;
  float scales_[2] = {p_.scale, p_.scale};  // of q . k
  const RowRange ranges_[2];
  RowState states_[2] = {kNoLogits, kNoLogits};
};

// Finds elements that are infinite or NaN, in chunks of 16 bytes of elements of type C.
template <typename C>
class NonFinite {
 public:
  __device__ __forceinline__ void LookAt(const C* chunk) {
    struct alignas(16) Words {
      uint32_t word[4];
    };
    const Words words = *reinterpret_cast<const Words*>(chunk);
#pragma unroll
    for (const uint32_t word : words.word) {
      if constexpr (sizeof(C) == 2) {
        found_ = gpu::AddZeroTimes(word, found_, C{});
      } else {
        found_ |= (word & 0x7f7f7f7f) + (0x80 - InfinityBits(C{})) * 0x01010101;
      }
    }
  }
  __device__ __forceinline__ bool IsFound() const {
    return (found_ & (sizeof(C) == 2 ? 0x7fff7fff : 0x80808080)) != 0;
  }

 private:
  // With elements of 16 bits, NaN in the half where one was found; with 8, the upper bit of its
  // byte.
  uint32_t found_ = 0;
};

// Whether one of a KV tile's chunks of 16 bytes that a thread looks at holds an infinite or NaN
// element. chunk(i) is where chunk i begins, of elements of type C.
template <typename C, typename Chunk>
__device__ __forceinline__ bool HoldsNonFinite(int thread, int num_chunks, int num_threads,
                                               const Chunk& chunk) {
  NonFinite<C> non_finite;
  [[maybe_unused]] constexpr int kUnrolled = sizeof(C) == 2 ? 4 : 1;
#pragma unroll kUnrolled
  for (int i = thread; i < num_chunks; i += num_threads) non_finite.LookAt(chunk(i));
  return non_finite.IsFound();
}

template <typename Element>
__device__ __forceinline__ void ClearNonFinite(int thread, int count, int num_threads,
                                               const Element& element) {
#pragma unroll 1
  for (int i = thread; i < count; i += num_threads) {
    if (!IsFinite(*element(i))) *element(i) = {};
  }
}

}  // namespace xla_gpu::paged_attention
