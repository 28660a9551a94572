#pragma once

#include <string>
#include <vector>

#include "../../export.h"
#include "../params.h"
#include "scratch.h"

namespace xla_gpu::paged_attention {

// Queues the work on a CUDA stream; two kernels, or three, and nothing waits for them. Null, or why
// that failed. Lengths and tables are read by the kernels, which stay inside the arrays whatever
// they hold: the rows of a sequence with faulty ones are NaN.
const char* RunOnCuda(const Params& params, const Scratch& scratch, void* stream);

// Kernels of this build that can take sequences with more queries than are split: "any" takes all
// others, too; "hopper", which is not yet proven on a GPU, only what the device and the call allow.
XLA_GPU_EXPORT std::vector<std::string> CudaPrefills();

// Uses one of them from now on; "any" is the default. False if it is not among them.
XLA_GPU_EXPORT bool ChooseCudaPrefill(const std::string& name);

// The one in use.
XLA_GPU_EXPORT std::string CudaPrefill();

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
