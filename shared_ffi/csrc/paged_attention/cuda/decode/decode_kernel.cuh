// The compiled decode kernels. run.cu chooses among them.
#pragma once

#include "../../../gpu/launch.cuh"
#include "decode_numbers.h"

namespace xla_gpu::paged_attention {

struct DecodeKernel {
  gpu::Kernel<Params, Scratch, DecodeNumbers> kernel;
  DecodeNumbers numbers;
};

// Defined in decode.cu, which is compiled once for each combination. T: type of the query. C: type
// of the cache. kKib: of a multiprocessor.
template <typename T, typename C, int kHeadSize, int kKib>
DecodeKernel DecodeKernelOf(const Params& p);

}  // namespace xla_gpu::paged_attention
