#include "instruction_set.h"

#include <utility>

#include "../../environment.h"
#include "cpu_instruction_sets.h"  // CMake writes it

namespace xla_gpu::paged_attention {

#define XLA_GPU_DECLARE(instruction_set) extern const CpuKernel kCpuKernel_##instruction_set;
XLA_GPU_FOR_CPU_INSTRUCTION_SETS(XLA_GPU_DECLARE)

namespace {

#define XLA_GPU_ADDRESS(instruction_set) &kCpuKernel_##instruction_set,
constexpr const CpuKernel* kKernels[] = {XLA_GPU_FOR_CPU_INSTRUCTION_SETS(XLA_GPU_ADDRESS)};

// The kernels that this processor can run, and which of them is in use.
struct Offer {
  std::vector<const CpuKernel*> kernels;
  Choice choice;
};

Offer& Offered() {
  static Offer offer = [] {
    std::vector<const CpuKernel*> kernels;
    std::vector<std::string> names;
    for (const CpuKernel* kernel : kKernels) {
      if (!kernel->is_supported()) continue;
      kernels.push_back(kernel);
      names.push_back(kernel->instruction_set);
    }
    return Offer{std::move(kernels), Choice("the CPU's instruction set", "XLA_GPU_CPU_ISA",
                                            " on this processor", std::move(names))};
  }();
  return offer;
}

}  // namespace

const CpuKernel& ChosenCpuKernel() { return *Offered().kernels[Offered().choice.index()]; }

std::vector<std::string> CpuInstructionSets() { return Offered().choice.names(); }

std::string ChooseCpuInstructionSet(const std::string& name) {
  return Offered().choice.Choose(name);
}

std::string CpuInstructionSetError() { return Offered().choice.error(); }

std::string CpuInstructionSet() { return Offered().choice.name(); }

}  // namespace xla_gpu::paged_attention
