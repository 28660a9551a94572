// The derivative of varlen_attention on the CPU.
#pragma once

#include "../../parallel.h"
#include "../params.h"

namespace xla_gpu::varlen_attention {

void RunBackwardOnCpu(const BackwardParams& params, const Executor& executor);

}  // namespace xla_gpu::varlen_attention
