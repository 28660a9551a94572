// The compiled attention kernels and their head sizes. run.cu chooses among them.
#pragma once

#include <type_traits>
#include <utility>

#include "../../gpu/launch.cuh"
#include "cuda_build.h"  // CMake writes it
#include "decode/numbers.h"
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

// Defined in tensor_core.cu, which is compiled once for each combination. T: type of the query. C:
// type of the cache.
template <typename T, typename C, int kHeadSize>
AttentionKernel TensorCoreKernelOf(const Params& p);

// Whether there is a TensorCorePrefill. Wider heads would need more registers than there are, and
// int4 is widened on its way to shared memory.
template <typename C, int kHeadSize>
inline constexpr bool kHasTensorCorePrefill = kHeadSize <= 128 && !std::is_same_v<C, Int4OrInt8>;

// Defined there, too. No rows where there is no such kernel.
template <typename T, typename C, int kHeadSize>
AttentionKernel TensorCorePrefillOf(const gpu::Device& device);

struct DecodeKernel {
  gpu::Kernel<Params, Scratch, DecodeNumbers> kernel;
  DecodeNumbers numbers;
};

// Defined in decode/kernel.cu, which is compiled once for each combination. kKib: of a
// multiprocessor.
template <typename T, typename C, int kHeadSize, int kKib>
DecodeKernel DecodeKernelOf(const Params& p);

struct PrefillKernel {
  gpu::Kernel<Params, Scratch, QueryLengths, PrefillMaps> kernel;
  int64_t rows_per_item;
};

// Defined in sm90/prefill.cu, which is compiled once for each combination.
template <typename T, typename C, int kHeadSize>
PrefillKernel PrefillKernelOf(const Params& p);

// Of16Bits, Of8Bits or Of4Bits, for a cache of type C.
template <typename C, typename Of16Bits, typename Of8Bits, typename Of4Bits>
using OfCache = std::conditional_t<std::is_same_v<C, Int4OrInt8>, Of4Bits,
                                   std::conditional_t<kIs8Bit<C>, Of8Bits, Of16Bits>>;

// Head sizes of the decode kernel, ascending.
template <typename C>
using DecodeHeadSizes = OfCache<C, std::integer_sequence<int XLA_GPU_DECODE_HEAD_SIZES>,
                                std::integer_sequence<int XLA_GPU_DECODE_HEAD_SIZES_OF_8_BITS>,
                                std::integer_sequence<int>>;

// Whether it has one that is at least kHeadSize.
template <int kHeadSize, int... kSizes>
constexpr bool HasAtLeast(std::integer_sequence<int, kSizes...>) {
  return ((kSizes >= kHeadSize) || ...);
}
template <typename C, int kHeadSize>
inline constexpr bool kHasDecodeKernel = HasAtLeast<kHeadSize>(DecodeHeadSizes<C>());

// Head sizes of the prefill kernel, ascending; empty unless the build is for sm_90a.
template <typename C>
using PrefillHeadSizes = OfCache<C, std::integer_sequence<int XLA_GPU_PREFILL_HEAD_SIZES>,
                                 std::integer_sequence<int XLA_GPU_PREFILL_HEAD_SIZES_OF_8_BITS>,
                                 std::integer_sequence<int>>;

// Head sizes of the tensor core kernel, ascending.
template <typename C>
using TensorCoreHeadSizes =
    OfCache<C, std::integer_sequence<int, XLA_GPU_TENSOR_CORE_HEAD_SIZES>,
            std::integer_sequence<int, XLA_GPU_TENSOR_CORE_HEAD_SIZES_OF_8_BITS>,
            std::integer_sequence<int XLA_GPU_TENSOR_CORE_HEAD_SIZES_OF_4_BITS>>;

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
