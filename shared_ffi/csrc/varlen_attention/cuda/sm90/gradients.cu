// Compiled for sm_90a only, once for each type and head size.
#include "../kernels.cuh"
#include "gradients.cuh"

namespace xla_gpu::varlen_attention::sm90 {
namespace {

template <bool kGeneral>
GradientKernels KernelsOf(const Params& p) {
  using T = XLA_GPU_STORAGE;
  constexpr int kHeadSize = XLA_GPU_HEAD_SIZE, kBytes = sizeof(Shared<T, kHeadSize>);
  return {{HopperKeyGradients<T, kHeadSize, kGeneral>, kBlockThreads, kBytes},
          KeyGradients<T, kHeadSize, kGeneral>::PartsOfBlock(p),
          {HopperQueryGradients<T, kHeadSize, kGeneral>, kBlockThreads, kBytes},
          QueryGradients<T, kHeadSize, kGeneral>::PartsOfBlock(p)};
}

}  // namespace

template <>
GradientKernels GradientsOf<XLA_GPU_STORAGE, XLA_GPU_HEAD_SIZE>(const Params& p) {
  return IsGeneral(p) ? KernelsOf<true>(p) : KernelsOf<false>(p);
}

}  // namespace xla_gpu::varlen_attention::sm90
