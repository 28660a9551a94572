// The compiled attention kernels and their head sizes. kernel_choice.cuh chooses among them.
#pragma once

#include <type_traits>
#include <utility>

#include "../../gpu/launch.cuh"
#include "cuda_build.h"  // CMake writes it
#include "decode/numbers.h"
#include "requirements.h"
#include "scratch.h"
#include "sm90/maps.h"

namespace xla_gpu::paged_attention {

template <typename T, typename... Types>
inline constexpr bool kIsOneOf = (std::is_same_v<T, Types> || ...);

// Whether the build has tensor core kernels for queries of type T.
template <typename T>
inline constexpr bool kHasTensorCores = kIsOneOf<T, XLA_GPU_TENSOR_CORE_TYPES>;

struct AttentionKernel {
  gpu::Kernel<Params, Scratch, QueryLengths> kernel;
  int64_t rows_per_item = 0;  // 0: there is no such kernel
  int variant = 0;            // TensorCoreAttention: groups of 16 rows; TensorCorePrefill: its tile
};

// Whether a cache of type C may have numbers of 4 bits, which are widened on their way to shared
// memory.
template <typename C>
inline constexpr bool kHas4Bits = kIsOneOf<C, Int4OrInt8, ScaledCode>;

// Of16Bits, Of8Bits or Of4Bits, for a cache of type C. Nothing where CUDA cores multiply by scales.
template <typename C, typename Of16Bits, typename Of8Bits, typename Of4Bits>
using OfCache = std::conditional_t<
    std::is_same_v<C, ScaledByte>, std::integer_sequence<int>,
    std::conditional_t<kHas4Bits<C>, Of4Bits, std::conditional_t<kIs8Bit<C>, Of8Bits, Of16Bits>>>;

// Whether one of these sizes is at least kHeadSize.
template <int kHeadSize, int... kSizes>
constexpr bool HasAtLeast(std::integer_sequence<int, kSizes...>) {
  return ((kSizes >= kHeadSize) || ...);
}

namespace portable {

// Head sizes, ascending.
template <typename C>
using HeadSizes = OfCache<C, std::integer_sequence<int, XLA_GPU_TENSOR_CORE_HEAD_SIZES>,
                          std::integer_sequence<int, XLA_GPU_TENSOR_CORE_HEAD_SIZES_OF_8_BITS>,
                          std::integer_sequence<int XLA_GPU_TENSOR_CORE_HEAD_SIZES_OF_4_BITS>>;

// Defined in portable/tensor_core.cu, which is compiled once for each combination. T: type of the
// query. C: type of the cache.
template <typename T, typename C, int kHeadSize>
AttentionKernel KernelOf(const Params& p);

// Whether there is a TensorCorePrefill. Wider heads would need more registers than there are.
template <typename C, int kHeadSize>
inline constexpr bool kHasPrefillKernel = kHeadSize <= 128 && !kHas4Bits<C>;

// Defined there, too. No rows where there is no such kernel.
template <typename T, typename C, int kHeadSize>
AttentionKernel PrefillKernelOf(const gpu::Device& device);

}  // namespace portable

namespace decode {

struct Kernel {
  gpu::Kernel<Params, Scratch, Numbers> kernel;
  Numbers numbers;
};

// Head sizes, ascending.
template <typename C>
using HeadSizes = OfCache<C, std::integer_sequence<int XLA_GPU_DECODE_HEAD_SIZES>,
                          std::integer_sequence<int XLA_GPU_DECODE_HEAD_SIZES_OF_8_BITS>,
                          std::integer_sequence<int>>;

template <typename C, int kHeadSize>
inline constexpr bool kHasKernel = HasAtLeast<kHeadSize>(HeadSizes<C>());

// Defined in decode/kernel.cu, which is compiled once for each combination. kKib: of a
// multiprocessor.
template <typename T, typename C, int kHeadSize, int kKib>
Kernel KernelOf(const Params& p);

}  // namespace decode

namespace sm90 {

struct Kernel {
  gpu::Kernel<Params, Scratch, QueryLengths, Maps> kernel;
  int64_t rows_per_item;
};

// Head sizes, ascending; none unless the build is for sm_90a.
template <typename C>
using HeadSizes = OfCache<C, std::integer_sequence<int XLA_GPU_PREFILL_HEAD_SIZES>,
                          std::integer_sequence<int XLA_GPU_PREFILL_HEAD_SIZES_OF_8_BITS>,
                          std::integer_sequence<int>>;

// Defined in sm90/prefill.cu, which is compiled once for each combination.
template <typename T, typename C, int kHeadSize>
Kernel KernelOf(const Params& p);

}  // namespace sm90

// Calls use(n), of type std::integral_constant, for the first of these ascending sizes that is at
// least `size`. Returns whether there is one.
template <int... kSizes, typename Use>
bool WithSmallest(std::integer_sequence<int, kSizes...>, int64_t size, const Use& use) {
  [[maybe_unused]] const auto use_if_large = [&](auto n) {
    if (n < size) return false;
    use(n);
    return true;
  };
  return (use_if_large(std::integral_constant<int, kSizes>()) || ...);
}

}  // namespace xla_gpu::paged_attention
