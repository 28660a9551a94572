#pragma once

#include <string>
#include <vector>

#include "../../ffi/export.h"
#include "../../gpu/error.h"
#include "../params.h"
#include "scratch.h"

namespace xla_gpu::paged_attention {

// Queues one to five kernels on a CUDA stream and waits for nothing. The kernels read lengths and
// tables on the device, end, and stay inside the arrays whatever these hold: a sequence with faulty
// ones gets rows of NaN.
gpu::Error RunOnCuda(const Params& params, const Scratch& scratch, void* stream);

// Which attention kernels calls use. "by GPU", the default: those for this GPU. On compute
// capability 9.0 longer queries have a prefill kernel of their own, and with more shared memory the
// decode kernel has more KV tiles on their way there. "portable": those that run on every GPU, and
// no kernel that begins before another one has ended. XLA_GPU_CUDA_KERNELS=portable in the
// environment of the process chooses that, too.
XLA_GPU_EXPORT std::vector<std::string> CudaChoices();

// Chooses from now on. Returns what is wrong with the name; empty: nothing.
XLA_GPU_EXPORT std::string ChooseCuda(const std::string& name);

// What is wrong with the environment's choice; empty: nothing.
XLA_GPU_EXPORT std::string CudaChoiceError();

XLA_GPU_EXPORT std::string CudaChoice();

// The kernels that calls on the current GPU use where these apply: "decode" and "prefill", and
// "portable" for all others. Empty without a GPU.
XLA_GPU_EXPORT std::vector<std::string> CudaKernelsInUse();

// From now on no kernel has more thread blocks, of those that would otherwise fill the device.
XLA_GPU_EXPORT void SetMaxBlocks(int64_t limit);

// How a kernel of this build is launched.
struct KernelLaunch {
  const char* kernel;
  int size;           // of the template: a head size, or columns per lane
  const char* cache;  // as cmake/resources.py names it; empty: any
  // TensorCoreAttention: groups of 16 rows; TensorCorePrefill: its KV tile; DecodeAttention: see
  // kKib there.
  int variant;
  int num_threads;
  int shared_bytes;
};

XLA_GPU_EXPORT std::vector<KernelLaunch> KernelLaunches();

}  // namespace xla_gpu::paged_attention
