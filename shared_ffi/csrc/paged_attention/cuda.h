#pragma once

#include <vector>

#include "../export.h"
#include "params.h"
#include "scratch.h"

namespace xla_gpu::paged_attention {

// Queues the work on a CUDA stream; two kernels, and nothing waits for them. Null, or why that
// failed. Lengths and tables are read by the kernels, which stay inside the arrays whatever they
// hold: the rows of a sequence with faulty ones are NaN.
const char* RunOnCuda(const Params& params, const Scratch& scratch, void* stream);

// How a kernel of this build is launched.
struct KernelLaunch {
  const char* kernel;
  int size;         // of the instantiation: a head size, or columns
  int cache_bytes;  // of an element of the cache; 0: any
  int warp_rows;    // the tensor cores' kernel: for how many groups of 16 rows
  int num_threads;
  int shared_bytes;
};

XLA_GPU_EXPORT std::vector<KernelLaunch> KernelLaunches();

}  // namespace xla_gpu::paged_attention
