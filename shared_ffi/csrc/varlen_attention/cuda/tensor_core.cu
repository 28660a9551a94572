// Compiled once for each type and head size, so that a build uses all cores.
#include "kernels.cuh"
#include "tensor_core.cuh"

namespace xla_gpu::varlen_attention {
namespace {

template <bool kGeneral>
GradientKernels KernelsOf(const Params& p) {
  using OfKeys = KeyGradientsLayout<XLA_GPU_STORAGE, XLA_GPU_HEAD_SIZE>;
  using OfQueries = QueryGradientsLayout<XLA_GPU_STORAGE, XLA_GPU_HEAD_SIZE>;
  return {{TensorCoreKeyGradients<XLA_GPU_STORAGE, XLA_GPU_HEAD_SIZE, kGeneral>, kThreads,
           OfKeys::kSharedBytes},
          OfKeys::kParts,
          {TensorCoreQueryGradients<XLA_GPU_STORAGE, XLA_GPU_HEAD_SIZE, kGeneral>, kQueryThreads,
           OfQueries::kSharedBytes},
          kBlockTokens * p.group.number / OfQueries::kTileRows};
}

}  // namespace

template <>
GradientKernels TensorCoreGradientsOf<XLA_GPU_STORAGE, XLA_GPU_HEAD_SIZE>(const Params& p) {
  return IsGeneral(p) ? KernelsOf<true>(p) : KernelsOf<false>(p);
}

}  // namespace xla_gpu::varlen_attention
