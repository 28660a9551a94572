// The builds of the kernel for several instruction sets, and the one in use.
#pragma once

#include <string>
#include <vector>

#include "../../ffi/export.h"
#include "kernel.h"

namespace xla_gpu::paged_attention {

// Instruction sets that the kernel is built for and this processor has, the best first.
XLA_GPU_EXPORT std::vector<std::string> CpuInstructionSets();

// Uses one of them from now on; the best is the default. False if it is not among them.
XLA_GPU_EXPORT bool ChooseCpuInstructionSet(const std::string& name);

// The one in use, and its kernel.
XLA_GPU_EXPORT std::string CpuInstructionSet();
const CpuKernel& ChosenCpuKernel();

}  // namespace xla_gpu::paged_attention
