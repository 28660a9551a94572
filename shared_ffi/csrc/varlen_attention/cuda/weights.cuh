// From the products of a query row and a position to the weight of the position, and to the
// gradient of their product; and which positions a row attends to.
#pragma once

#include "../../paged_attention/cuda/softmax.cuh"
#include "lengths.cuh"

namespace xla_gpu::varlen_attention {

// The positions that a query row attends to.
struct RowMask {
  int32_t begin;
  int32_t end;
  int32_t hole_begin;
  int32_t hole_end;

  RowMask() = default;
  // That of the sequence's token i; empty if that is not one of its tokens.
  __device__ RowMask(const Params& p, const QueryTokens& tokens, int64_t i) {
    *this = RowMask();
    if (i >= tokens.Count()) return;
    const Span span = p.Attended(tokens, i);
    const paged_attention::Holes holes = p.HolesOf(tokens, i);
    begin = static_cast<int32_t>(span.begin);
    end = static_cast<int32_t>(span.end);
    hole_begin = holes.begin;
    hole_end = holes.begin + static_cast<int32_t>(holes.count);
  }

  __device__ __forceinline__ bool Attends(int32_t position) const {
    const bool is_in_hole = (hole_begin <= position) & (position < hole_end);
    return (begin <= position) & (position < end) & !is_in_hole;  // without branches
  }
  // Whether it attends to any position in [from, to), but for holes.
  __device__ bool Meets(int32_t from, int32_t to) const { return begin < to && from < end; }
};

// Whether all tokens from `first` to `last` of a sequence attend to all positions in [from, to).
__device__ __forceinline__ bool AllAttend(const Params& p, const QueryTokens& tokens, int64_t first,
                                          int64_t last, int32_t from, int32_t to) {
  return p.WindowBegin(tokens.Position(last)) <= from &&
         to <= p.WindowEnd(tokens, tokens.Position(first));
}

// A query row of a sequence and kv head: its token, counted from the sequence's first, and its
// head. Rows are numbered token by token.
struct RowPlace {
  int32_t token;
  int32_t head;

  __device__ __forceinline__ RowPlace(const Params& p, int32_t kv_head, int32_t row)
      : token(static_cast<int32_t>(p.group.Quotient(row))),
        head(static_cast<int32_t>(row + (kv_head - token) * p.group.number)) {}
};

// The mask of a query row.
__device__ __forceinline__ RowMask MaskOf(const Params& p, const TokenBlock& block, int32_t kv_head,
                                          int32_t row) {
  return {p, block.Tokens(), RowPlace(p, kv_head, row).token};
}

// The first tile from `tile` up to `end` for which meets(tile) is true: a row of it attends to a
// position. All threads that meet in it call it. Without ranges no tile is asked for.
template <typename Meets>
__device__ __forceinline__ int32_t NextTile(const Params& p, int32_t tile, int32_t end,
                                            const Meets& meets) {
  if (!p.HasRanges()) return tile;
  while (tile < end && !meets(tile)) ++tile;
  return tile;
}

// Rows of a position and kv head.
template <typename T>
__device__ __forceinline__ const T* KeyRow(const Params& p, int64_t token, int32_t kv_head) {
  return static_cast<const T*>(p.cache.keys) + p.cache.Offset(token, 0) +
         kv_head * p.cache.head_stride;
}
template <typename T>
__device__ __forceinline__ const T* ValueRow(const Params& p, int64_t token, int32_t kv_head) {
  return static_cast<const T*>(p.cache.values) + p.cache.OffsetOfValue(p.cache.Offset(token, 0)) +
         kv_head * p.cache.value_head_stride;
}

// Rows of a query row, given its token in the batch.
template <typename T>
__device__ __forceinline__ const T* QueryRow(const Params& p, int64_t token, int32_t head) {
  return static_cast<const T*>(p.query) + p.QueryOffset(token, head);
}
template <typename T>
__device__ __forceinline__ const T* DoutRow(const BackwardParams& b, int64_t token, int32_t head) {
  return static_cast<const T*>(b.dout) + token * b.dout_stride + head * b.forward.value_head_size;
}

// What ALiBi needs of a query row.
struct RowBias {
  float slope;
  int32_t position;

  RowBias() = default;
  __device__ __forceinline__ RowBias(const Params& p, const TokenBlock& block,
                                     const RowPlace& place)
      : slope(p.alibi_slopes == nullptr ? 0.0f : p.AlibiSlope(place.head)),
        position(block.first_position + place.token) {}
};

// The rows [begin, end) of a sequence and kv head that may attend to one of its positions [from,
// to): all but those that windows keep from it. Rows are those of its own tokens.
__device__ __forceinline__ Span RowsThatMayAttend(const Params& p, const QueryTokens& tokens,
                                                  int32_t from, int32_t to) {
  const int64_t len = tokens.context_len, group = p.group.number, first = tokens.first_position;
  if (p.HasRanges()) return {0, tokens.Count() * group};
  const int64_t right = tokens.is_causal ? 0 : p.window_right;
  const int64_t window = p.sliding_window == 0 ? len : Smaller(p.sliding_window, len);
  return {(from - Smaller(right, from - first) - first) * group,
          (Smaller(len, to - 1 + window) - first) * group};
}

// The positions [begin, end) that the tokens from `first` to `last` of a sequence may attend to.
__device__ __forceinline__ Span PositionsThatMayBeAttended(const Params& p,
                                                           const QueryTokens& tokens, int64_t first,
                                                           int64_t last) {
  if (p.HasRanges()) return {0, tokens.context_len};
  return {p.WindowBegin(tokens.Position(first)), p.WindowEnd(tokens, tokens.Position(last))};
}

// kGeneral: for calls with a soft cap, slopes or sequences that continue others. kOnCudaCores:
// rounds logits as the forward does there.
template <bool kGeneral, bool kOnCudaCores = false>
class Weigher {
 public:
  __device__ explicit Weigher(const Params& p) : p_(p), factor_(p.scale * kLog2E) {}

  // Turns q . k into the weight and D . v into the gradient of scale * (q . k). Returns the
  // gradient of the logit.
  __device__ __forceinline__ float Weigh(const RowNumbers& row, bool attends, const RowBias& bias,
                                         int32_t position, float* product, float* of_values) const {
    float exponent, share = 1;
    if constexpr (kGeneral) {
      float logit = ToLogit(*product, &share);
      if (p_.alibi_slopes != nullptr) {
        const float distance = fabsf(static_cast<float>(bias.position - position));
        logit = gpu::Fma(-bias.slope, distance, logit);
      }
      exponent = logit - row.lse;
    } else {
      exponent = gpu::Fma(*product, factor_, -row.lse);
    }
    // At most 1, whatever rounding does to large logits. NaN stays.
    const float weight = gpu::Exp2(exponent > 0 ? 0.0f : exponent);
    const float gradient = weight * (*of_values - row.delta);
    *product = attends ? weight : 0.0f;
    *of_values = attends ? kGeneral ? gradient * share : gradient : 0.0f;
    return attends ? gradient : 0.0f;
  }

 private:
  // In units of 1 / log2(e). *share: the derivative of the soft cap.
  __device__ __forceinline__ float ToLogit(float product, float* share) const {
    const float logit = kOnCudaCores ? product * p_.scale * kLog2E : product * factor_;
    if (p_.soft_cap == 0) return logit;
    const float cap = fminf(p_.soft_cap, paged_attention::kMaxCap) * kLog2E, inverse = 1 / cap;
    const float capped =
        p_.soft_cap > paged_attention::kMaxPlainCap
            ? paged_attention::GentlyCapped(logit, inverse, cap)
            : paged_attention::Capped(product * (2 * kLog2E * p_.scale / p_.soft_cap), cap);
    const float ratio = capped * inverse;
    *share = gpu::Fma(-ratio, ratio, 1.0f);
    return capped;
  }

  const Params& p_;
  const float factor_;
};

}  // namespace xla_gpu::varlen_attention
