// Compiled once for each type of query, type of cache and head size, so that a build uses all
// cores.
#include "../kernels.cuh"
#include "prefill.cuh"
#include "tensor_core.cuh"

namespace xla_gpu::paged_attention::portable {

namespace {

constexpr bool kHasFewRows =
    !decode::kHasKernel<XLA_GPU_CACHE, XLA_GPU_HEAD_SIZE> &&
    TensorCoreLayout<XLA_GPU_STORAGE, XLA_GPU_CACHE, XLA_GPU_HEAD_SIZE>::kCanShareRows;

template <int kWarpRows>
AttentionKernel KernelOf() {
  using Layout = TensorCoreLayout<XLA_GPU_STORAGE, XLA_GPU_CACHE, XLA_GPU_HEAD_SIZE>;
  return {{TensorCoreAttention<XLA_GPU_STORAGE, XLA_GPU_CACHE, XLA_GPU_HEAD_SIZE, kWarpRows,
                               kHasFewRows>,
           kThreads, Layout::SharedBytes(kWarpRows)},
          kMaxRowsPerItem,
          kWarpRows};
}

}  // namespace

template <>
AttentionKernel KernelOf<XLA_GPU_STORAGE, XLA_GPU_CACHE, XLA_GPU_HEAD_SIZE>(const Params& p) {
  using Layout = TensorCoreLayout<XLA_GPU_STORAGE, XLA_GPU_CACHE, XLA_GPU_HEAD_SIZE>;
  if constexpr (kHasFewRows) {
    if (FitsQueryTile(p, Layout::kFewWarpRows)) return KernelOf<Layout::kFewWarpRows>();
  }
  return KernelOf<kWarps>();
}

template <>
AttentionKernel PrefillKernelOf<XLA_GPU_STORAGE, XLA_GPU_CACHE, XLA_GPU_HEAD_SIZE>(
    const gpu::Device& device) {
  AttentionKernel found;
  if constexpr (kHasPrefillKernel<XLA_GPU_CACHE, XLA_GPU_HEAD_SIZE>) {
    using T = XLA_GPU_STORAGE;
    using C = XLA_GPU_CACHE;
    WithPrefillTile(device.capability, device.shared_bytes, [&](auto tile) {
      using Layout = TensorCorePrefillLayout<T, C, XLA_GPU_HEAD_SIZE, tile>;
      found = {{TensorCorePrefill<T, C, XLA_GPU_HEAD_SIZE, tile>, kThreads,
                Layout::kSharedBytes + gpu::kMoreSharedBytes},
               kPrefillTileRows,
               tile};
    });
  }
  return found;
}

}  // namespace xla_gpu::paged_attention::portable
