// Compiled once for each type of query, type of cache, head size and size of shared memory.
#include "../kernels.cuh"
#include "kernel.cuh"

namespace xla_gpu::paged_attention::decode {

template <>
Kernel KernelOf<XLA_GPU_STORAGE, XLA_GPU_CACHE, XLA_GPU_HEAD_SIZE, XLA_GPU_KIB>(const Params& p) {
  using T = XLA_GPU_STORAGE;
  using C = XLA_GPU_CACHE;
  Numbers numbers(p, kItemRows, 16 / static_cast<int64_t>(sizeof(C)));
  auto* kernel = DecodeAttention<T, C, XLA_GPU_HEAD_SIZE, XLA_GPU_KIB, false, false>;
  using Shared = decode::Shared<T, C, XLA_GPU_HEAD_SIZE, XLA_GPU_KIB>;
  if (IsPlain<Shared>(p, numbers)) {
    kernel = numbers.StripsAreInBlocks()
                 ? DecodeAttention<T, C, XLA_GPU_HEAD_SIZE, XLA_GPU_KIB, true, true>
                 : DecodeAttention<T, C, XLA_GPU_HEAD_SIZE, XLA_GPU_KIB, true, false>;
  } else {
    numbers.tokens_of_item = 0;
  }
  return {{kernel, kBlockThreads, sizeof(Shared)}, numbers};
}

}  // namespace xla_gpu::paged_attention::decode
