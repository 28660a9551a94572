// Compiled for sm_90a only, once for each type of query, type of cache and head size.
#include "hopper.cuh"
#include "kernels.cuh"

namespace xla_gpu::paged_attention {

template <>
AttentionKernel HopperKernelOf<XLA_GPU_STORAGE, XLA_GPU_CACHE, XLA_GPU_HEAD_SIZE>() {
  using Shared = HopperShared<XLA_GPU_STORAGE, XLA_GPU_CACHE, XLA_GPU_HEAD_SIZE>;
  return {{HopperAttention<XLA_GPU_STORAGE, XLA_GPU_CACHE, XLA_GPU_HEAD_SIZE>, kHopperThreads,
           static_cast<int>(sizeof(Shared))},
          kHopperRows};
}

}  // namespace xla_gpu::paged_attention
