// Compiled for each storage type and head size on its own, so that a build uses all cores.
#include "kernels.cuh"
#include "tensor_core.cuh"

namespace xla_gpu::paged_attention {

template <>
AttentionKernel TensorCoreKernelOf<XLA_GPU_STORAGE, XLA_GPU_HEAD_SIZE>() {
  using Layout = TensorCoreLayout<XLA_GPU_STORAGE, XLA_GPU_HEAD_SIZE>;
  return {{TensorCoreAttention<XLA_GPU_STORAGE, XLA_GPU_HEAD_SIZE>, kThreads, Layout::kSharedBytes},
          kMaxRowsPerItem};
}

}  // namespace xla_gpu::paged_attention
