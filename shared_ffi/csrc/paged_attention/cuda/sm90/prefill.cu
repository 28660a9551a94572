// Compiled for sm_90a only, once for each type of query, type of cache and head size.
#include "../kernels.cuh"
#include "prefill.cuh"

namespace xla_gpu::paged_attention {

template <>
AttentionKernel PrefillKernelOf<XLA_GPU_STORAGE, XLA_GPU_CACHE, XLA_GPU_HEAD_SIZE>() {
  using Shared = PrefillShared<XLA_GPU_STORAGE, XLA_GPU_CACHE, XLA_GPU_HEAD_SIZE>;
  return {{PrefillAttention<XLA_GPU_STORAGE, XLA_GPU_CACHE, XLA_GPU_HEAD_SIZE>, kPrefillThreads,
           static_cast<int>(sizeof(Shared))},
          kPrefillRows};
}

}  // namespace xla_gpu::paged_attention
