// paged_attention on the CPU.
#pragma once

#include "../../parallel.h"
#include "../params.h"

namespace xla_gpu::paged_attention {

void RunOnCpu(const Params& params, const Executor& executor);

}  // namespace xla_gpu::paged_attention
