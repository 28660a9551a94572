// Which kernels of paged_attention this build has, and which of them are used. The environment may
// choose before anything in the module is called.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>

#include "module.h"
#include "paged_attention/cpu/instruction_set.h"
#include "paged_attention/cuda/run.h"
#include "str_cat.h"
#include "varlen_attention/cuda/run.h"

namespace xla_gpu {
namespace {

namespace nb = nanobind;

constexpr char kCpuVariable[] = "XLA_GPU_CPU_ISA";
constexpr char kCudaVariable[] = "XLA_GPU_CUDA_KERNELS";

nb::builtin_exception NotOffered(const std::string& what, const std::vector<std::string>& offered,
                                 const char* where, const std::string& name) {
  std::string list;
  for (const std::string& other : offered) list += (list.empty() ? "" : ", ") + other;
  return nb::value_error(
      StrCat("shared_ffi: ", what, " must be one of ", list, where, "; got ", name).c_str());
}

void SetCpuInstructionSet(const std::string& name) {
  if (paged_attention::ChooseCpuInstructionSet(name)) return;
  throw NotOffered(StrCat("the CPU's instruction set (", kCpuVariable, ")"),
                   paged_attention::CpuInstructionSets(), " on this processor", name);
}

#ifdef XLA_GPU_CUDA
void SetCudaChoice(const std::string& name) {
  if (paged_attention::ChooseCuda(name)) return;
  throw NotOffered(StrCat("the choice of CUDA kernels (", kCudaVariable, ")"),
                   paged_attention::CudaChoices(), "", name);
}

// cmake/resources.py prints them with the build's report.
std::vector<std::tuple<std::string, int, int, int, int, int>> CudaKernels() {
  std::vector<std::tuple<std::string, int, int, int, int, int>> kernels;
  for (const auto& launches :
       {paged_attention::KernelLaunches(), varlen_attention::KernelLaunches()}) {
    for (const auto& launch : launches) {
      kernels.emplace_back(launch.kernel, launch.size, launch.cache_bytes, launch.variant,
                           launch.num_threads, launch.shared_bytes);
    }
  }
  return kernels;
}
#endif

}  // namespace

void BindKernels(nb::module_& m) {
  if (const char* name = std::getenv(kCpuVariable)) SetCpuInstructionSet(name);
#ifdef XLA_GPU_CUDA
  if (const char* name = std::getenv(kCudaVariable); name != nullptr && *name != 0) {
    SetCudaChoice(name);
  }
#endif
  m.def("cpu_instruction_sets", &paged_attention::CpuInstructionSets,
        "The instruction sets that the CPU kernels are built for and this processor has, the best "
        "first.");
  m.def("cpu_instruction_set", &paged_attention::CpuInstructionSet, "The instruction set in use.");
  m.def("set_cpu_instruction_set", &SetCpuInstructionSet, nb::arg("name"),
        "Uses another from now on, as the environment variable XLA_GPU_CPU_ISA does.");
#ifdef XLA_GPU_CUDA
  m.def("cuda_kernels", &CudaKernels,
        "(kernel, size, bytes of a cache element, groups of rows, threads, bytes of shared memory) "
        "of each attention kernel.");
  m.def(
      "set_cuda_max_blocks", &paged_attention::SetMaxBlocks, nb::arg("limit"),
      "Launches no kernel with more thread blocks, of those that would otherwise fill the GPU, as "
      "the environment variable XLA_GPU_CUDA_MAX_BLOCKS does.");
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
