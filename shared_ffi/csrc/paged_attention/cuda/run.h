#pragma once

#include <string>
#include <vector>

#include "../../ffi/export.h"
#include "../../gpu/error.h"
#include "../params.h"
#include "scratch.h"

namespace xla_gpu::paged_attention {

// Queues two to four kernels on a CUDA stream and waits for nothing. The kernels read lengths and
// tables on the device and stay inside the arrays whatever these hold: a sequence with faulty ones
// gets rows of NaN.
gpu::Error RunOnCuda(const Params& params, const Scratch& scratch, void* stream);

// What a kernel can be chosen for. "prefill": queries of more tokens than one query tile holds.
// "decode": queries of few tokens.
XLA_GPU_EXPORT std::vector<std::string> CudaPhases();

// The kernels of this build for a phase. "any" also runs all other sequences and is the default.
// The others are not yet proven on a GPU; they run where the device and the call allow it.
XLA_GPU_EXPORT std::vector<std::string> CudaChoices(const std::string& phase);

// Uses one of these kernels from now on. Returns false for an unknown name.
XLA_GPU_EXPORT bool ChooseCuda(const std::string& phase, const std::string& name);

// The kernel in use.
XLA_GPU_EXPORT std::string CudaChoice(const std::string& phase);

// From now on no kernel has more thread blocks, of those that would otherwise fill the device. The
// environment variable XLA_GPU_CUDA_MAX_BLOCKS does the same for a process.
XLA_GPU_EXPORT void SetMaxBlocks(int64_t limit);

// How a kernel of this build is launched.
struct KernelLaunch {
  const char* kernel;
  int size;         // of the template: a head size, or columns per lane
  int cache_bytes;  // bytes of a cache element; 0: any
  int warp_rows;    // TensorCoreAttention: groups of 16 rows
  int num_threads;
  int shared_bytes;
};

XLA_GPU_EXPORT std::vector<KernelLaunch> KernelLaunches();

}  // namespace xla_gpu::paged_attention
