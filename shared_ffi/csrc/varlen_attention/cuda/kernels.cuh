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

// Defined in tensor_core.cu, which is compiled once for each type and head size.
template <typename T, int kHeadSize>
GradientKernels TensorCoreGradientsOf(const Params& p);

}  // namespace xla_gpu::varlen_attention
