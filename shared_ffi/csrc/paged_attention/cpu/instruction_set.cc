#include "instruction_set.h"

#include <algorithm>
#include <atomic>
#include <iterator>

#include "cpu_instruction_sets.h"  // CMake writes it

namespace xla_gpu::paged_attention {

#define XLA_GPU_DECLARE(instruction_set) extern const CpuKernel kCpuKernel_##instruction_set;
XLA_GPU_FOR_CPU_INSTRUCTION_SETS(XLA_GPU_DECLARE)

namespace {

#define XLA_GPU_ADDRESS(instruction_set) &kCpuKernel_##instruction_set,
constexpr const CpuKernel* kKernels[] = {XLA_GPU_FOR_CPU_INSTRUCTION_SETS(XLA_GPU_ADDRESS)};

const CpuKernel* BestKernel() {
  return *std::find_if(std::begin(kKernels), std::end(kKernels),
                       [](const CpuKernel* kernel) { return kernel->is_supported(); });
}

std::atomic<const CpuKernel*>& Chosen() {
  static std::atomic<const CpuKernel*> kernel{BestKernel()};
  return kernel;
}

}  // namespace

const CpuKernel& ChosenCpuKernel() { return *Chosen().load(); }

std::vector<std::string> CpuInstructionSets() {
  std::vector<std::string> names;
  for (const CpuKernel* kernel : kKernels) {
    if (kernel->is_supported()) names.push_back(kernel->instruction_set);
  }
  return names;
}

bool ChooseCpuInstructionSet(const std::string& name) {
  for (const CpuKernel* kernel : kKernels) {
    if (kernel->is_supported() && name == kernel->instruction_set) {
      Chosen() = kernel;
      return true;
    }
  }
  return false;
}

std::string CpuInstructionSet() { return ChosenCpuKernel().instruction_set; }

}  // namespace xla_gpu::paged_attention
