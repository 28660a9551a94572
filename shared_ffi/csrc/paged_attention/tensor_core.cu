// Compiled for each storage type and head size on its own, so that a build uses all cores.
#include "kernels.cuh"
#include "tensor_core.cuh"

namespace xla_gpu::paged_attention {

template <>
AttentionKernel TensorCoreKernelOf<XLA_GPU_STORAGE, XLA_GPU_HEAD_SIZE>(bool has_cap) {
  using Layout = TensorCoreLayout<XLA_GPU_STORAGE, XLA_GPU_HEAD_SIZE>;
  return {{has_cap ? TensorCoreAttention<XLA_GPU_STORAGE, XLA_GPU_HEAD_SIZE, true>
                   : TensorCoreAttention<XLA_GPU_STORAGE, XLA_GPU_HEAD_SIZE, false>,
           kThreads, Layout::kSharedBytes},
          kMaxRowsPerItem};
}

}  // namespace xla_gpu::paged_attention
