// Which kernels of paged_attention this build has, and which of them are used.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "module.h"
#include "paged_attention/cpu/instruction_set.h"
#include "paged_attention/cuda/run.h"
#include "str_cat.h"
#include "varlen_attention/cuda/run.h"

namespace xla_gpu {
namespace {

namespace nb = nanobind;

// Raises an error, unless it is empty.
void Raise(const std::string& error) {
  if (!error.empty()) throw nb::value_error(StrCat("shared_ffi: ", error).c_str());
}

void SetCpuInstructionSet(const std::string& name) {
  Raise(paged_attention::ChooseCpuInstructionSet(name));
}

#ifdef XLA_GPU_CUDA
void SetCudaChoice(const std::string& name) { Raise(paged_attention::ChooseCuda(name)); }

// cmake/resources.py prints them with the build's report.
std::vector<std::tuple<std::string, int, std::string, int, int, int>> CudaKernels() {
  std::vector<std::tuple<std::string, int, std::string, int, int, int>> kernels;
  for (const auto& launches :
       {paged_attention::KernelLaunches(), varlen_attention::KernelLaunches()}) {
    for (const auto& launch : launches) {
      kernels.emplace_back(launch.kernel, launch.size, launch.cache, launch.variant,
                           launch.num_threads, launch.shared_bytes);
    }
  }
  return kernels;
}
#endif

}  // namespace

void BindKernels(nb::module_& m) {
  Raise(paged_attention::CpuInstructionSetError());
#ifdef XLA_GPU_CUDA
  Raise(paged_attention::CudaChoiceError());
#endif
  m.def("cpu_instruction_sets", &paged_attention::CpuInstructionSets,
        "The instruction sets that the CPU kernels are built for and this processor has, the best "
        "first.");
  m.def("cpu_instruction_set", &paged_attention::CpuInstructionSet, "The instruction set in use.");
  m.def("set_cpu_instruction_set", &SetCpuInstructionSet, nb::arg("name"),
        "Uses another from now on, as the environment variable XLA_GPU_CPU_ISA does.");
#ifdef XLA_GPU_CUDA
  m.def("cuda_kernels", &CudaKernels,
        "(kernel, size, cache, groups of rows, threads, bytes of shared memory) "
        "of each attention kernel.");
  m.def("set_cuda_max_blocks", &paged_attention::SetMaxBlocks, nb::arg("limit"),
        "Launches no kernel with more thread blocks, of those that would otherwise fill the GPU.");
  m.def(
      "cuda_kernels_in_use", &paged_attention::CudaKernelsInUse,
      "The attention kernels that calls on the current GPU use, where they apply; empty without a "
      "GPU.");
  m.def("cuda_choices", &paged_attention::CudaChoices,
        "How the attention kernels can be chosen, the default first.");
  m.def("cuda_choice", &paged_attention::CudaChoice, "How they are chosen now.");
  m.def("set_cuda_choice", &SetCudaChoice, nb::arg("name"),
        "Chooses from now on, as the environment variable XLA_GPU_CUDA_KERNELS does.");
#endif
}

}  // namespace xla_gpu
