#pragma once

#include <vector>

#include "../../ffi/export.h"
#include "../../gpu/error.h"
#include "../../paged_attention/cuda/run.h"
#include "scratch.h"

namespace xla_gpu::varlen_attention {

// The widest heads whose gradients have a kernel.
inline constexpr int64_t kMaxGradientHeadSize = 256;

// Rows of tokens whose copies lie one after the other.
struct RowsCopy {
  const void* from;
  int64_t stride;  // elements from one token to the next
  int64_t columns;
  void* to;
};

// Queues kernels that copy the lengths of a call and rows, and those of paged_attention, which read
// the copies. `tables`: where block tables are made if there is prefix_seqs.
gpu::Error RunForwardOnCuda(Params params, const Lengths& lengths,
                            const std::vector<RowsCopy>& copies, int32_t* tables,
                            const paged_attention::Scratch& scratch, void* stream);

// Queues four kernels, or five where there are sinks or slopes, and waits for nothing.
gpu::Error RunBackwardOnCuda(const BackwardParams& params, const BackwardScratch& scratch,
                             void* stream);

// How the kernels of this build are launched.
XLA_GPU_EXPORT std::vector<paged_attention::KernelLaunch> KernelLaunches();

}  // namespace xla_gpu::varlen_attention
