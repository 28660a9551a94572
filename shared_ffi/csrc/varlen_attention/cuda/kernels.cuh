// The kernels of the derivative. run.cu chooses among them.
#pragma once

#include "../../gpu/launch.cuh"
#include "scratch.h"

namespace xla_gpu::varlen_attention {

using GradientKernel = gpu::Kernel<BackwardParams, BackwardScratch>;

// The kernels of a call, and how many parts of a block of tokens each has a thread block for.
struct GradientKernels {
  GradientKernel of_keys;
  int64_t parts_of_keys = 0;  // 0: there are no such kernels
  GradientKernel of_queries;
  int64_t parts_of_queries = 0;
};

// Whether a call takes the kernels for a soft cap, slopes or sequences that continue others.
inline bool IsGeneral(const Params& p) {
  return p.soft_cap > 0 || p.alibi_slopes != nullptr || p.prefix_seqs != nullptr;
}

// Defined in tensor_core.cu, which is compiled once for each type and head size.
template <typename T, int kHeadSize>
GradientKernels TensorCoreGradientsOf(const Params& p);

// The same in sm90/gradients.cu.
namespace sm90 {
template <typename T, int kHeadSize>
GradientKernels GradientsOf(const Params& p);
}  // namespace sm90

}  // namespace xla_gpu::varlen_attention
