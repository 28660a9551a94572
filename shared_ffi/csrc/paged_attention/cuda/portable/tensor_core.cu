// Compiled once for each type of query, type of cache and head size, so that a build uses all
// cores.
#include "../kernels.cuh"
#include "prefill.cuh"
#include "tensor_core.cuh"

namespace xla_gpu::paged_attention {

namespace {

template <typename T, typename C, int kHeadSize>
AttentionKernel PrefillOf(const gpu::Device& device) {
  AttentionKernel found;
  WithPrefillTile(device.capability, device.shared_bytes, [&](auto tile) {
    found = {{TensorCorePrefill<T, C, kHeadSize, tile>, kThreads,
              TensorCorePrefillLayout<T, C, kHeadSize, tile>::kSharedBytes},
             kPrefillTileRows,
             tile};
  });
  return found;
}

template <typename T, typename C, int kHeadSize>
AttentionKernel AttentionOf(const Params& p) {
  using Layout = TensorCoreLayout<T, C, kHeadSize>;
  constexpr bool kHasFewRows = !kHasDecodeKernel<C, kHeadSize>;
  AttentionKernel found;
  const auto take = [&](auto warp_rows) {
    found = {{TensorCoreAttention<T, C, kHeadSize, warp_rows, kHasFewRows>, kThreads,
              Layout::SharedBytes(warp_rows)},
             kMaxRowsPerItem,
             warp_rows};
  };
  take(std::integral_constant<int, kWarps>());
  if constexpr (kHasFewRows) {
    constexpr int kFew = Layout::kFewWarpRows;
    if (FitsQueryTile(p, kFew)) take(std::integral_constant<int, kFew>());
  }
  return found;
}

template <typename T, typename C, int kHeadSize>
AttentionKernel KernelOf(const gpu::Device& device, const Params& p) {
  if constexpr (kTakesAllQueries<C, kHeadSize>) {
    return PrefillOf<T, C, kHeadSize>(device);
  } else {
    return AttentionOf<T, C, kHeadSize>(p);
  }
}

template <typename T, typename C, int kHeadSize>
AttentionKernel LongKernelOf(const gpu::Device& device) {
  if constexpr (kHasTensorCorePrefill<C, kHeadSize> && !kTakesAllQueries<C, kHeadSize>) {
    return PrefillOf<T, C, kHeadSize>(device);
  }
  return {};
}

}  // namespace

template <>
AttentionKernel TensorCoreKernelOf<XLA_GPU_STORAGE, XLA_GPU_CACHE, XLA_GPU_HEAD_SIZE>(
    const gpu::Device& device, const Params& p) {
  return KernelOf<XLA_GPU_STORAGE, XLA_GPU_CACHE, XLA_GPU_HEAD_SIZE>(device, p);
}

template <>
AttentionKernel LongTensorCoreKernelOf<XLA_GPU_STORAGE, XLA_GPU_CACHE, XLA_GPU_HEAD_SIZE>(
    const gpu::Device& device) {
  return LongKernelOf<XLA_GPU_STORAGE, XLA_GPU_CACHE, XLA_GPU_HEAD_SIZE>(device);
}

}  // namespace xla_gpu::paged_attention
