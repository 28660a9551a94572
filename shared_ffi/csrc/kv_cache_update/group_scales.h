// Scales of groups of a row: their types, and those that a call makes. No XLA headers: kernels
// include this.
#pragma once

#include "scales.h"

namespace xla_gpu::kv_cache_update {

// Calls function(S()) for the type S of scales of groups.
template <typename Function>
XLA_GPU_HOST_DEVICE inline auto WithScaleType(DType dtype, const Function& function) {
  switch (dtype) {
    case DType::kFloat32:
      return function(float());
    case DType::kFloat16:
      return function(Half());
    case DType::kBFloat16:
      return function(BFloat16());
    case DType::kFloat8E4M3:
      return function(Float8E4M3());
    default:
      return function(Float8E8M0());
  }
}

// The largest power of two that a cache holds.
XLA_GPU_HOST_DEVICE inline float LargestPower(DType dtype) {
  switch (dtype) {
    case DType::kFloat8E4M3:
      return 256.0f;
    case DType::kFloat8E5M2:
      return 32768.0f;
    case DType::kInt8:
      return 64.0f;
    default:
      return 4.0f;
  }
}

// The scales of groups of K, or of V.
class ScalesOfGroups {
 public:
  // `made`: where the call writes those that it makes, else null.
  XLA_GPU_HOST_DEVICE ScalesOfGroups(const GroupScales& scales, DType cache_dtype, bool rounds_up,
                                     void* made)
      : scales_(scales),
        cache_dtype_(cache_dtype),
        rounds_up_(rounds_up),
        made_(made),
        global_(scales.global == nullptr ? 1.0f : *scales.global) {}

  XLA_GPU_HOST_DEVICE bool AreUsed() const { return scales_.data != nullptr; }
  XLA_GPU_HOST_DEVICE bool AreMade() const { return made_ != nullptr; }
  XLA_GPU_HOST_DEVICE int64_t Count() const { return scales_.num_groups; }
  XLA_GPU_HOST_DEVICE int64_t Size() const { return scales_.group_size; }

  XLA_GPU_HOST_DEVICE int64_t Offset(int64_t block, int64_t position, int64_t head,
                                     int64_t group) const {
    return scales_.Offset(block, position, head) + group * scales_.group_stride;
  }

  // What the numbers of a group are divided by.
  XLA_GPU_HOST_DEVICE float DivisorAt(int64_t offset) const {
    return WithScaleType(scales_.dtype, [&](auto type) {
      return DivisorOf(ToFloat(static_cast<const decltype(type)*>(scales_.data)[offset]) * global_);
    });
  }

  // Makes the scale of a group with this largest magnitude; whether that is finite. The scale is
  // NaN if it is not.
  XLA_GPU_HOST_DEVICE bool Make(float largest, int64_t offset) const {
    const MadeScale made(largest, cache_dtype_);
    WithScaleType(scales_.dtype, [&](auto type) {
      using S = decltype(type);
      S* const to = static_cast<S*>(made_) + offset;
      if constexpr (std::is_same_v<S, Float8E8M0>) {
        const float down = made.is_finite ? largest / LargestPower(cache_dtype_) : made.scale;
        FromFloat((rounds_up_ ? made.scale : down) / global_, rounds_up_, to);
      } else if constexpr (std::is_same_v<S, Half>) {
        const float scale = made.scale / global_;  // a NaN stays one
        FromFloat(scale > 65504.0f ? 65504.0f : scale < -65504.0f ? -65504.0f : scale, to);
      } else {
        FromFloat(made.scale / global_, to);
      }
    });
    return made.is_finite;
  }

 private:
  const GroupScales scales_;
  const DType cache_dtype_;
  const bool rounds_up_;
  void* const made_;
  const float global_;
};

}  // namespace xla_gpu::kv_cache_update
