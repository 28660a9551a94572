#include <algorithm>
#include <iterator>
#include <string>

#include "../../paged_attention/cpu/instruction_set.h"
#include "cpu_instruction_sets.h"  // CMake writes it
#include "kernel.h"

namespace xla_gpu::kv_cache_update {

#define XLA_GPU_DECLARE_HEADS(instruction_set) \
  extern const HeadsKernel kHeadsKernel_##instruction_set;
XLA_GPU_FOR_CPU_INSTRUCTION_SETS(XLA_GPU_DECLARE_HEADS)

namespace {

#define XLA_GPU_ADDRESS_OF_HEADS(instruction_set) &kHeadsKernel_##instruction_set,
constexpr const HeadsKernel* kKernels[] = {
    XLA_GPU_FOR_CPU_INSTRUCTION_SETS(XLA_GPU_ADDRESS_OF_HEADS)};

}  // namespace

const HeadsKernel& ChosenHeadsKernel() {
  const std::string name = paged_attention::CpuInstructionSet();
  return **std::find_if(std::begin(kKernels), std::end(kKernels),
                        [&](const auto* kernel) { return name == kernel->instruction_set; });
}

}  // namespace xla_gpu::kv_cache_update
