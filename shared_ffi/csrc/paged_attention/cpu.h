#pragma once

#include <string>
#include <vector>

#include "../export.h"
#include "../parallel.h"
#include "params.h"

namespace xla_gpu::paged_attention {

void RunOnCpu(const Params& params, const Executor& executor);

// Instruction sets that RunOnCpu can use on this processor, the best first.
XLA_GPU_EXPORT std::vector<std::string> CpuInstructionSets();

// Uses one of them from now on; the best is the default. False if it is not among them.
XLA_GPU_EXPORT bool ChooseCpuInstructionSet(const std::string& name);

// The one in use.
XLA_GPU_EXPORT std::string CpuInstructionSet();

}  // namespace xla_gpu::paged_attention
