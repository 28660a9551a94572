// The Python module shared_ffi._native. This file hands out the handlers of
// libxla_paged_attention.so and registers them with XLA runtimes that have no Python API for it.
#include "module.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include "eager_call.h"
#include "ffi/handlers.h"
#ifdef XLA_GPU_CUDA_MAJOR
#include "cuda_build.h"  // CMake writes it
#endif
#include "xla/ffi/api/c_api.h"

namespace {

namespace nb = nanobind;

XLA_FFI_Handler* HandlerOf(nb::capsule capsule) {
  return reinterpret_cast<XLA_FFI_Handler*>(capsule.data(xla_gpu::kHandlerCapsule));
}

nb::dict Handlers() {
  nb::dict by_platform;
  for (const auto& [platform, target, handler] : xla_gpu::Handlers()) {
    if (!by_platform.contains(platform)) by_platform[platform] = nb::dict();
    nb::cast<nb::dict>(by_platform[platform])[target] =
        nb::capsule(reinterpret_cast<void*>(handler), xla_gpu::kHandlerCapsule);
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

}  // namespace

// The module, which PyInit__native below makes.
NB_MODULE(_native_of_main, m) {
  nb::set_leak_warnings(false);  // Python caches EagerCalls until the process ends
  m.attr("ffi_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
#ifdef XLA_GPU_CUDA_MAJOR
  m.attr("cuda_version") = nb::make_tuple(XLA_GPU_CUDA_MAJOR, XLA_GPU_CUDA_MINOR);
  m.attr("cuda_architectures") = XLA_GPU_ARCHITECTURES;
#else
  m.attr("cuda_version") = nb::none();  // no CUDA handlers
  m.attr("cuda_architectures") = nb::none();
#endif
  m.def("handlers", &Handlers, "{platform: {target: capsule}} of every handler in this build.");
  m.def("api_version_at", &ApiVersionAt, nb::arg("address"),
        "(major, minor) of the XLA_FFI_Api at an address in this process.");
  m.def("register_at", &RegisterAt, nb::arg("address"), nb::arg("target"), nb::arg("platform"),
        nb::arg("handler"), "Registers a handler with the XLA_FFI_Api at an address.");
  xla_gpu::BindEagerCall(m);
  xla_gpu::BindTorchRules(m);
  xla_gpu::BindEagerKernel(m);
  xla_gpu::BindUntraced(m);
  xla_gpu::BindKernels(m);
  xla_gpu::BindChecks(m);
}

// What Python calls to import the module. nanobind keeps the types of one interpreter for the whole
// process: in a second interpreter they would replace those of the first. Refused before nanobind
// begins, so that the main interpreter is as before.
extern "C" NB_EXPORT PyObject* PyInit__native() {
  if (PyInterpreterState_GetID(PyInterpreterState_Get()) != 0) {
    PyErr_SetString(PyExc_ImportError,
                    "shared_ffi: must be imported in the main interpreter of a process; got a "
                    "subinterpreter. Use a process of its own");
    return nullptr;
  }
  return PyInit__native_of_main();
}
