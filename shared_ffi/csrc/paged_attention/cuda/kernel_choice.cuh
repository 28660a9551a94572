// Which of the compiled kernels a call uses: by its sizes, by the GPU and by the choice of the
// process.
#pragma once

#include <optional>
#include <type_traits>
#include <utility>

#include "../../environment.h"
#include "../../gpu/launch.cuh"
#include "kernels.cuh"
#include "portable/cuda_core.cuh"

namespace xla_gpu::paged_attention {

// Calls use(C()) for the type C of the cache of queries of type T.
template <typename T, typename Use>
auto WithCacheType(const Params& p, const Use& use) {
  if (p.NeedsFloat32Rows()) {
    if constexpr (kHasTensorCores<T>) {
      if (HasProductsOf16Bits(p)) return use(ScaledCode());
    }
    return use(ScaledByte());
  }
  if (p.value_cache_dtype == DType::kInt4) return use(Int4OrInt8());
  switch (p.cache_dtype) {
    case DType::kFloat8E4M3:
      return use(Float8E4M3());
    case DType::kFloat8E5M2:
      return use(Float8E5M2());
    case DType::kInt8:
      return use(int8_t());
    case DType::kInt4:
      return use(Int4OrInt8());
    default:
      return use(T());
  }
}

// The kernel with the fewest columns that hold p.head_size.
template <typename T>
AttentionKernel CudaCoreKernel(const Params& p) {
  AttentionKernel kernel;
  WithSmallest(std::integer_sequence<int, XLA_GPU_CUDA_CORE_COLUMNS>(),
               CeilDiv(p.head_size, gpu::kWarpSize), [&](auto columns) {
                 kernel = {{portable::CudaCoreAttention<T, columns>, kThreads,
                            portable::CudaCoreSharedBytes<columns>()},
                           portable::kCoreRows};
               });
  return kernel;
}

// The kernel that runs on every GPU. T: type of the query. C: type of the cache.
template <typename T, typename C>
AttentionKernel PortableKernelFor(const gpu::Device& device, const Params& p) {
  if constexpr (kHasTensorCores<T>) {
    AttentionKernel kernel;
    const auto take = [&](auto head_size) {
      if (FitsValues(head_size, p)) kernel = portable::KernelOf<T, C, head_size>(p);
    };
    if (IsAligned<C>(p)) WithSmallest(portable::HeadSizes<C>(), TensorCoreHeadSize(p), take);
    if (kernel.rows_per_item > 0 && kernel.kernel.shared_bytes <= device.shared_bytes) {
      return kernel;
    }
  }
  return CudaCoreKernel<std::conditional_t<std::is_same_v<C, ScaledCode>, ScaledByte, C>>(p);
}

inline constexpr char kPortable[] = "portable";
enum { kByGpu, kOnlyPortable };  // the numbers of the choices

// Which kernels calls use.
inline Choice& Chosen() {
  static Choice choice("the choice of CUDA kernels", "XLA_GPU_CUDA_KERNELS", "",
                       {"by GPU", kPortable});
  return choice;
}

// Whether calls on the device use the kernels of Hopper GPUs where these apply.
inline bool UsesHopperKernels(const gpu::Device& device) {
  return Chosen().index() == kByGpu && device.capability == 90 && sm90::HeadSizes<Half>::size() > 0;
}

// Whether a kernel may begin before the one before it has ended: whether it waits for that itself.
inline bool LaunchesEarly(const gpu::Device& device) {
#ifdef XLA_GPU_LAUNCHES_EARLY
  return device.capability >= 90 && Chosen().index() != kOnlyPortable;
#else
  return false;
#endif
}

// The kernel of Hopper GPUs for all queries that are not the decode kernel's. Nothing elsewhere.
template <typename T>
std::optional<sm90::Kernel> HopperKernelFor(const gpu::Device& device, const Params& p) {
  std::optional<sm90::Kernel> found;
  if constexpr (kHasTensorCores<T>) {
    if (!UsesHopperKernels(device)) return found;
    WithCacheType<T>(p, [&](auto cache) {
      using C = decltype(cache);
      const bool takes_cache =
          !kIs8Bit<C> || (p.ScalesAreUniform() && p.cache.ValuesHaveStridesOfKeys());
      if (!IsAligned<C>(p) || !OffsetsFit32BitChunks<C>(p) || !takes_cache) return;
      WithSmallest(sm90::HeadSizes<C>(), p.head_size,
                   [&](auto head_size) { found = sm90::KernelOf<T, C, head_size>(p); });
    });
  }
  return found;
}

// The portable kernel for queries of more than one tile. Nothing if they have none of their own.
// Queries of one tile keep TensorCoreAttention. A TensorCorePrefill that left out groups without
// rows took a fifth more instructions for 64 rows, and spilled registers with 8-bit caches. Its
// turns for long queries grew.
template <typename T>
std::optional<AttentionKernel> LongPortableKernelFor(const gpu::Device& device, const Params& p) {
  std::optional<AttentionKernel> found;
  if constexpr (kHasTensorCores<T>) {
    WithCacheType<T>(p, [&](auto cache) {
      using C = decltype(cache);
      if (!IsAligned<C>(p) || !HeadOffsetsFit32BitChunks<C>(p)) return;
      WithSmallest(portable::HeadSizes<C>(), TensorCoreHeadSize(p), [&](auto head_size) {
        const auto kernel = portable::PrefillKernelOf<T, C, head_size>(device);
        if (kernel.rows_per_item > 0) found = kernel;
      });
    });
  }
  return found;
}

// The kernel for queries of few tokens. Nothing if they have none of their own. has_hopper_kernel:
// whether that of Hopper GPUs takes the others (decode::Shared::LeavesScaleOut).
template <typename T>
std::optional<decode::Kernel> DecodeKernelFor(const gpu::Device& device, const Params& p,
                                              [[maybe_unused]] bool has_hopper_kernel) {
  std::optional<decode::Kernel> found;
  if constexpr (kHasTensorCores<T>) {
    WithCacheType<T>(p, [&](auto cache) {
      using C = decltype(cache);
      if (!TakesFewTokens<C>(p)) return;
      WithSmallest(decode::HeadSizes<C>(), p.head_size, [&](auto head_size) {
#ifdef XLA_GPU_HAS_HOPPER_KERNELS
        const bool leaves_scale_out = kIs8Bit<C> && p.ScalesAreUniform();
        if (UsesHopperKernels(device) && (has_hopper_kernel || !leaves_scale_out)) {
          found = decode::KernelOf<T, C, head_size, decode::kLargeMultiprocessor>(p);
          return;
        }
#endif
        found = decode::KernelOf<T, C, head_size, decode::kAnyMultiprocessor>(p);
      });
    });
  }
  return found;
}

}  // namespace xla_gpu::paged_attention
