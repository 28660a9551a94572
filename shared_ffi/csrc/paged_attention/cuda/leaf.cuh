// How a row's leaves are added up (order.h). Products and sums are rounded apart and flushed, as
// `red.global.add.f32` does: a total in memory has the bits of one in registers.
#pragma once

#include "order.h"
#include "state.cuh"

namespace xla_gpu::paged_attention {

// The reference of a row that has attended to nothing. It stands for -infinity, and subtracts from
// itself without NaN.
inline constexpr float kNoReference = -3.40282347e38f;

// By how many powers of two the weights of a leaf may exceed 1 before its reference follows, for
// weights of type T; and a part the total's reference.
template <typename T>
inline constexpr float kSlack = 16;
template <>
inline constexpr float kSlack<Half> = 12;  // 2^16 is infinite
inline constexpr float kFoldSlack = 32;

// How a part, a leaf or a whole group, is added to the total of those on its left.
struct Fold {
  float before;  // the factor of the total's sums
  float factor;  // of the part's

  __device__ __forceinline__ Fold(float before, float factor) : before(before), factor(factor) {}

  // Adds the sums of weights, and makes the total's reference that of both. A total that is empty
  // has kNoReference, and takes a part as it is.
  __device__ __forceinline__ Fold(RowState* total, const RowState& part) {
    const bool follows = part.max > total->max + kFoldSlack;
    const float reference = follows ? part.max : total->max;
    before = follows ? gpu::Exp2(total->max - reference) : 1;
    factor = gpu::Exp2(part.max - reference);
    *total = {reference, Add(total->sum, part.sum)};
  }

  // Whether the total's sums change before anything is added to them.
  __device__ __forceinline__ bool Rescales() const { return before != 1; }

  __device__ __forceinline__ float Add(float total, float part) const {
    return gpu::AddFlushed(gpu::MultiplyFlushed(total, before), gpu::MultiplyFlushed(part, factor));
  }
};

}  // namespace xla_gpu::paged_attention
