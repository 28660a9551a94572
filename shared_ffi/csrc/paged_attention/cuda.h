#pragma once

#include <vector>

#include "params.h"
#include "scratch.h"

namespace xla_gpu::paged_attention {

// Queues the work on a CUDA stream; two kernels, and nothing waits for them. Null, or why that
// failed. Lengths and tables are read by the kernels, which stay inside the arrays whatever they
// hold: the rows of a sequence with faulty ones are NaN.
const char* RunOnCuda(const Params& params, const Scratch& scratch, void* stream);

// How a kernel of this build is launched. `size` is the instantiation's: a head size, or columns.
struct KernelLaunch {
  const char* kernel;
  int size;
  int num_threads;
  int shared_bytes;
};

std::vector<KernelLaunch> KernelLaunches();

}  // namespace xla_gpu::paged_attention
