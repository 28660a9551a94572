#pragma once

#include <vector>

#include "../../ffi/export.h"
#include "../../gpu/error.h"
#include "../../paged_attention/cuda/run.h"
#include "scratch.h"

namespace xla_gpu::varlen_attention {

// The widest heads whose gradients have a kernel.
inline constexpr int64_t kMaxGradientHeadSize = 256;

// Queues a kernel that copies the lengths of a call and makes `params` those of paged_attention,
// whose kernels may run then.
gpu::Error RunForwardOnCuda(Params params, const Lengths& lengths,
                            const paged_attention::Scratch& scratch, void* stream);

// Queues four kernels, or five where there are sinks or slopes, and waits for nothing.
gpu::Error RunBackwardOnCuda(const BackwardParams& params, const BackwardScratch& scratch,
                             void* stream);

// How the kernels of this build are launched.
XLA_GPU_EXPORT std::vector<paged_attention::KernelLaunch> KernelLaunches();

}  // namespace xla_gpu::varlen_attention
