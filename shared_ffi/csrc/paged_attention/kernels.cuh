// The attention kernels that are compiled, to choose from.
#pragma once

#include <utility>

#include "../gpu/launch.cuh"
#include "scratch.h"
#include "tensor_core_head_sizes.h"  // CMake writes it

namespace xla_gpu::paged_attention {

struct AttentionKernel {
  gpu::Kernel<Params, Scratch> kernel;
  int64_t rows_per_item;
};

// Defined in tensor_core.cu, which is compiled once for each of them.
template <typename T, int kHeadSize>
AttentionKernel TensorCoreKernelOf();

// Those that the tensor cores' kernel is compiled for, ascending.
using TensorCoreHeadSizes = std::integer_sequence<int, XLA_GPU_TENSOR_CORE_HEAD_SIZES>;

template <typename T, int kHeadSize, int... kLarger>
AttentionKernel SmallestTensorCoreKernel(const Params& p,
                                         std::integer_sequence<int, kHeadSize, kLarger...>) {
  if constexpr (sizeof...(kLarger) > 0) {
    if (p.head_size > kHeadSize) {
      return SmallestTensorCoreKernel<T>(p, std::integer_sequence<int, kLarger...>());
    }
  }
  return TensorCoreKernelOf<T, kHeadSize>();
}

// The kernel for the smallest compiled head size that holds p's.
template <typename T>
AttentionKernel TensorCoreKernel(const Params& p) {
  return SmallestTensorCoreKernel<T>(p, TensorCoreHeadSizes());
}

template <int... kSizes>
constexpr int Largest(std::integer_sequence<int, kSizes...>) {
  int largest = 0;
  ((largest = kSizes > largest ? kSizes : largest), ...);
  return largest;
}

inline constexpr int kLargestTensorCoreHeadSize = Largest(TensorCoreHeadSizes());

}  // namespace xla_gpu::paged_attention
