// The Python module shared_ffi._native: the handlers of libxla_paged_attention.so, and the two
// things Python cannot do with them itself: register them with an XLA runtime that has no Python
// API for it, and call them directly.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>
#include <map>

#include "eager_runtime.h"
#include "handlers.h"
#include "paged_attention/cpu/instruction_set.h"
#include "paged_attention/cuda/run.h"
#include "xla/ffi/api/api.h"
#include "xla/ffi/api/c_api.h"

namespace {

namespace nb = nanobind;

// The name jax.ffi expects on a capsule.
constexpr char kCapsuleName[] = "xla._CUSTOM_CALL_TARGET";

XLA_FFI_Handler* HandlerOf(nb::capsule capsule) {
  return reinterpret_cast<XLA_FFI_Handler*>(capsule.data(kCapsuleName));
}

XLA_FFI_Handler* FindHandler(const std::string& platform, const std::string& target) {
  if (XLA_FFI_Handler* handler = xla_gpu::FindHandler(platform, target)) return handler;
  throw nb::key_error((target + " has no handler for " + platform + " in this build").c_str());
}

nb::dict Handlers() {
  nb::dict by_platform;
  for (const auto& [platform, target, handler] : xla_gpu::Handlers()) {
    if (!by_platform.contains(platform)) by_platform[platform] = nb::dict();
    nb::cast<nb::dict>(by_platform[platform])[target] =
        nb::capsule(reinterpret_cast<void*>(handler), kCapsuleName);
  }
  return by_platform;
}

const XLA_FFI_Api* ApiAt(uintptr_t address) {
  return reinterpret_cast<const XLA_FFI_Api*>(address);
}

std::pair<int, int> ApiVersionAt(uintptr_t address) {
  const XLA_FFI_Api_Version& version = ApiAt(address)->api_version;
  return {version.major_version, version.minor_version};
}

void RegisterAt(uintptr_t address, const std::string& target, const std::string& platform,
                nb::capsule handler) {
  const XLA_FFI_Api* api = ApiAt(address);
  XLA_FFI_Handler_Register_Args args = {};
  args.struct_size = XLA_FFI_Handler_Register_Args_STRUCT_SIZE;
  args.name = {target.data(), target.size()};
  args.platform = {platform.data(), platform.size()};
  args.bundle.execute = HandlerOf(handler);
  if (XLA_FFI_Error* error = api->XLA_FFI_Handler_Register(&args)) {
    XLA_FFI_Error_GetMessage_Args message = {XLA_FFI_Error_GetMessage_Args_STRUCT_SIZE, nullptr,
                                             error, nullptr};
    api->XLA_FFI_Error_GetMessage(&message);
    const std::string text = message.message;
    XLA_FFI_Error_Destroy_Args destroy = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, nullptr, error};
    api->XLA_FFI_Error_Destroy(&destroy);
    throw std::runtime_error(text);
  }
}

XLA_FFI_DataType DataTypeOf(const std::string& name) {
  static const std::map<std::string, XLA_FFI_DataType> by_name = {
      {"float64", XLA_FFI_DataType_F64},
      {"float32", XLA_FFI_DataType_F32},
      {"float16", XLA_FFI_DataType_F16},
      {"bfloat16", XLA_FFI_DataType_BF16},
      {"float8_e4m3fn", XLA_FFI_DataType_F8E4M3FN},
      {"float8_e5m2", XLA_FFI_DataType_F8E5M2},
      {"int64", XLA_FFI_DataType_S64},
      {"int32", XLA_FFI_DataType_S32},
      {"int16", XLA_FFI_DataType_S16},
      {"int8", XLA_FFI_DataType_S8},
      {"uint64", XLA_FFI_DataType_U64},
      {"uint32", XLA_FFI_DataType_U32},
      {"uint16", XLA_FFI_DataType_U16},
      {"uint8", XLA_FFI_DataType_U8},
      {"bool", XLA_FFI_DataType_PRED},
  };
  const auto found = by_name.find(name);
  return found == by_name.end() ? XLA_FFI_DataType_INVALID : found->second;
}

#ifdef XLA_GPU_CUDA
// For the build's report.
std::vector<std::tuple<std::string, int, int, int, int, int>> CudaKernels() {
  std::vector<std::tuple<std::string, int, int, int, int, int>> kernels;
  for (const auto& launch : xla_gpu::paged_attention::KernelLaunches()) {
    kernels.emplace_back(launch.kernel, launch.size, launch.cache_bytes, launch.warp_rows,
                         launch.num_threads, launch.shared_bytes);
  }
  return kernels;
}
#endif

// The arrays of a call, without their memory.
std::vector<xla_gpu::EagerBuffer> BuffersOf(nb::sequence specs) {
  std::vector<xla_gpu::EagerBuffer> buffers;
  for (nb::handle spec : specs) {
    buffers.push_back({DataTypeOf(nb::cast<std::string>(spec.attr("dtype"))), nullptr,
                       nb::cast<std::vector<int64_t>>(spec.attr("shape"))});
  }
  return buffers;
}

using Addresses = std::vector<uintptr_t>;

std::vector<xla_gpu::EagerBuffer> At(const Addresses& addresses,
                                     std::vector<xla_gpu::EagerBuffer> buffers) {
  if (addresses.size() != buffers.size()) {
    throw nb::value_error("an address is needed for each operand and for each result");
  }
  for (size_t i = 0; i < buffers.size(); ++i) {
    buffers[i].data = reinterpret_cast<void*>(addresses[i]);
  }
  return buffers;
}

// A handler with its attributes, to be called on arrays of given shapes and dtypes.
class EagerCall {
 public:
  // Attribute values are floats, passed on as float32, and ints, passed on as int64.
  EagerCall(const std::string& platform, const std::string& target, nb::dict attributes,
            nb::sequence operands, nb::sequence results)
      : handler_(FindHandler(platform, target)),
        operands_(BuffersOf(operands)),
        results_(BuffersOf(results)) {
    for (auto [name, value] : attributes) {
      xla_gpu::Attribute attribute = int64_t{0};
      if (nb::isinstance<nb::float_>(value)) {
        attribute = static_cast<float>(nb::cast<double>(value));
      } else {
        attribute = nb::cast<int64_t>(value);
      }
      attributes_.emplace_back(nb::cast<std::string>(name), attribute);
    }
  }

  void operator()(const Addresses& operands, const Addresses& results, int64_t num_threads,
                  uintptr_t stream) const {
    std::vector<xla_gpu::EagerBuffer> args = At(operands, operands_), rets = At(results, results_);
    xla_gpu::EagerStatus status;
    {
      nb::gil_scoped_release release;
      status = xla_gpu::CallHandler(handler_, args, rets, attributes_,
                                    {num_threads, reinterpret_cast<void*>(stream)});
    }
    if (status.code == XLA_FFI_Error_Code_INVALID_ARGUMENT) {
      throw nb::value_error(status.message.c_str());
    }
    if (status.code != XLA_FFI_Error_Code_OK) throw std::runtime_error(status.message);
  }

 private:
  XLA_FFI_Handler* handler_;
  std::vector<xla_gpu::EagerBuffer> operands_, results_;
  std::vector<std::pair<std::string, xla_gpu::Attribute>> attributes_;
};

// Something that the environment may choose, before any function of this module does.
struct Choice {
  const char* what;
  const char* variable;
  const char* where;  // the others are not to be had
  bool (*choose)(const std::string& name);
  std::vector<std::string> (*offered)();
};

constexpr Choice kCpuInstructionSet = {"the CPU's instruction set", "XLA_GPU_CPU_ISA",
                                       "on this processor",
                                       xla_gpu::paged_attention::ChooseCpuInstructionSet,
                                       xla_gpu::paged_attention::CpuInstructionSets};
#ifdef XLA_GPU_CUDA
constexpr Choice kCudaPrefill = {"the kernel of long queries on CUDA", "XLA_GPU_CUDA_PREFILL",
                                 "in this build", xla_gpu::paged_attention::ChooseCudaPrefill,
                                 xla_gpu::paged_attention::CudaPrefills};
#endif

// Throws ValueError where that is not offered.
void Choose(const Choice& choice, const std::string& name) {
  if (choice.choose(name)) return;
  std::string offered;
  for (const std::string& other : choice.offered()) {
    offered += (offered.empty() ? "" : ", ") + other;
  }
  throw nb::value_error((std::string("shared_ffi: ") + choice.what + " (" + choice.variable +
                         ") must be one of " + offered + " " + choice.where + "; got " + name)
                            .c_str());
}

void ChooseByEnvironment(const Choice& choice) {
  if (const char* name = std::getenv(choice.variable)) Choose(choice, name);
}

}  // namespace

NB_MODULE(_native, m) {
  ChooseByEnvironment(kCpuInstructionSet);
#ifdef XLA_GPU_CUDA
  ChooseByEnvironment(kCudaPrefill);
#endif
  nb::set_leak_warnings(false);  // Python caches EagerCalls until the process ends
  m.attr("ffi_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.def("handlers", &Handlers, "{platform: {target: capsule}} of every handler in this build.");
  m.def("api_version_at", &ApiVersionAt, nb::arg("address"),
        "(major, minor) of the XLA_FFI_Api at an address in this process.");
  m.def("register_at", &RegisterAt, nb::arg("address"), nb::arg("target"), nb::arg("platform"),
        nb::arg("handler"), "Registers a handler with the XLA_FFI_Api at an address.");
  m.def("cpu_instruction_sets", &xla_gpu::paged_attention::CpuInstructionSets,
        "Those that the CPU kernels are built for and this processor has, the best first.");
  m.def("cpu_instruction_set", &xla_gpu::paged_attention::CpuInstructionSet, "The one in use.");
  m.def(
      "set_cpu_instruction_set", [](const std::string& name) { Choose(kCpuInstructionSet, name); },
      nb::arg("name"),
      "Uses another from now on, as the environment variable XLA_GPU_CPU_ISA does.");
#ifdef XLA_GPU_CUDA
  m.def("cuda_kernels", &CudaKernels,
        "(kernel, size, bytes of the cache's elements, groups of rows, threads, bytes of shared "
        "memory) of the kernels of paged_attention.");
  m.def("cuda_prefills", &xla_gpu::paged_attention::CudaPrefills,
        "Kernels of this build for long queries on CUDA, the default first.");
  m.def("cuda_prefill", &xla_gpu::paged_attention::CudaPrefill, "The one in use.");
  m.def(
      "set_cuda_prefill", [](const std::string& name) { Choose(kCudaPrefill, name); },
      nb::arg("name"),
      "Uses another from now on, as the environment variable XLA_GPU_CUDA_PREFILL does.");
#endif
  nb::class_<EagerCall>(m, "EagerCall",
                        "A handler with its attributes, callable on arrays of given specs.")
      .def(nb::init<const std::string&, const std::string&, nb::dict, nb::sequence, nb::sequence>(),
           nb::arg("platform"), nb::arg("target"), nb::arg("attributes"), nb::arg("operands"),
           nb::arg("results"))
      .def("__call__", &EagerCall::operator(), nb::arg("operands"), nb::arg("results"),
           nb::arg("num_threads") = 1, nb::arg("stream") = 0,
           "Calls it on contiguous arrays at these addresses.");
}
