// Compiled for sm_90a only, once for each type of query, type of cache and head size.
#include "decode.cuh"
#include "kernels.cuh"

namespace xla_gpu::paged_attention {

template <>
AttentionKernel DecodeKernelOf<XLA_GPU_STORAGE, XLA_GPU_CACHE, XLA_GPU_HEAD_SIZE>() {
  return {
      {DecodeAttention<XLA_GPU_STORAGE, XLA_GPU_CACHE, XLA_GPU_HEAD_SIZE>, kDecodeThreads,
       static_cast<int>(sizeof(DecodeShared<XLA_GPU_STORAGE, XLA_GPU_CACHE, XLA_GPU_HEAD_SIZE>))},
      kDecodeRows};
}

}  // namespace xla_gpu::paged_attention
