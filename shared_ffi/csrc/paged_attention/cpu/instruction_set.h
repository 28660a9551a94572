// The builds of the kernel for several instruction sets, and the one in use.
#pragma once

#include <string>
#include <vector>

#include "../../ffi/export.h"
#include "kernel.h"

namespace xla_gpu::paged_attention {

// Instruction sets that the kernel is built for and this processor has, the best first.
XLA_GPU_EXPORT std::vector<std::string> CpuInstructionSets();

// Uses one of them from now on; XLA_GPU_CPU_ISA in the environment names the first, by default the
// best. Returns what is wrong with the name; empty: nothing.
XLA_GPU_EXPORT std::string ChooseCpuInstructionSet(const std::string& name);

// What is wrong with the environment's choice; empty: nothing.
XLA_GPU_EXPORT std::string CpuInstructionSetError();

// The one in use, and its kernel.
XLA_GPU_EXPORT std::string CpuInstructionSet();
const CpuKernel& ChosenCpuKernel();

}  // namespace xla_gpu::paged_attention
