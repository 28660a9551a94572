// The Python module shared_ffi._native: the handlers, and the two things Python cannot do with them
// itself: register them with an XLA runtime that has no Python API for it, and call them directly.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "eager_runtime.h"
#include "xla/ffi/api/api.h"
#include "xla/ffi/api/c_api.h"

// Every handler, a line here and a line in kHandlers.
XLA_FFI_DECLARE_HANDLER_SYMBOL(SimpleAddCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(KvCacheUpdateCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(PagedAttentionCpu);

namespace {

namespace nb = nanobind;

constexpr struct {
  const char* platform;
  const char* target;
  XLA_FFI_Handler* handler;
} kHandlers[] = {
    {"cpu", "XlaGpuSimpleAdd", SimpleAddCpu},
    {"cpu", "xla_gpu_kv_cache_update", KvCacheUpdateCpu},
    {"cpu", "xla_gpu_paged_attention", PagedAttentionCpu},
};

// The name jax.ffi expects on a capsule.
constexpr char kCapsuleName[] = "xla._CUSTOM_CALL_TARGET";

XLA_FFI_Handler* HandlerOf(nb::capsule capsule) {
  return reinterpret_cast<XLA_FFI_Handler*>(capsule.data(kCapsuleName));
}

nb::dict Handlers() {
  nb::dict by_platform;
  for (const auto& [platform, target, handler] : kHandlers) {
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

XLA_FFI_DataType DataTypeOf(nb::dlpack::dtype dtype) {
  using Code = nb::dlpack::dtype_code;
  const auto code = static_cast<Code>(dtype.code);
  const auto is = [&](Code want, int bits) { return code == want && dtype.bits == bits; };
  if (is(Code::Float, 64)) return XLA_FFI_DataType_F64;
  if (is(Code::Float, 32)) return XLA_FFI_DataType_F32;
  if (is(Code::Float, 16)) return XLA_FFI_DataType_F16;
  if (is(Code::Bfloat, 16)) return XLA_FFI_DataType_BF16;
  if (is(Code::Int, 64)) return XLA_FFI_DataType_S64;
  if (is(Code::Int, 32)) return XLA_FFI_DataType_S32;
  if (is(Code::Int, 16)) return XLA_FFI_DataType_S16;
  if (is(Code::Int, 8)) return XLA_FFI_DataType_S8;
  if (is(Code::UInt, 64)) return XLA_FFI_DataType_U64;
  if (is(Code::UInt, 32)) return XLA_FFI_DataType_U32;
  if (is(Code::UInt, 16)) return XLA_FFI_DataType_U16;
  if (is(Code::UInt, 8)) return XLA_FFI_DataType_U8;
  if (is(Code::Bool, 8)) return XLA_FFI_DataType_PRED;
  return XLA_FFI_DataType_INVALID;
}

// Taken as they are, never converted: a result written to a copy would be lost.
using Array = nb::ndarray<nb::c_contig, nb::device::cpu>;

std::vector<xla_gpu::EagerBuffer> BuffersOf(const std::vector<Array>& arrays) {
  std::vector<xla_gpu::EagerBuffer> buffers;
  buffers.reserve(arrays.size());
  for (const Array& array : arrays) {
    std::vector<int64_t> shape(array.shape_ptr(), array.shape_ptr() + array.ndim());
    buffers.push_back({DataTypeOf(array.dtype()), array.data(), std::move(shape)});
  }
  return buffers;
}

// A handler with its attributes, to be called on arrays.
class EagerCall {
 public:
  // Attribute values are floats, passed on as float32, and ints, passed on as int64.
  EagerCall(nb::capsule handler, nb::dict attributes) : handler_(HandlerOf(handler)) {
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

  void operator()(const std::vector<Array>& operands, const std::vector<Array>& results,
                  int64_t num_threads) const {
    std::vector<xla_gpu::EagerBuffer> args = BuffersOf(operands), rets = BuffersOf(results);
    xla_gpu::EagerStatus status;
    {
      nb::gil_scoped_release release;
      status = xla_gpu::CallHandler(handler_, args, rets, attributes_, num_threads);
    }
    if (status.code == XLA_FFI_Error_Code_INVALID_ARGUMENT) {
      throw nb::value_error(status.message.c_str());
    }
    if (status.code != XLA_FFI_Error_Code_OK) throw std::runtime_error(status.message);
  }

 private:
  XLA_FFI_Handler* handler_;
  std::vector<std::pair<std::string, xla_gpu::Attribute>> attributes_;
};

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // Python caches EagerCalls until the process ends
  m.attr("ffi_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.def("handlers", &Handlers, "{platform: {target: capsule}} of every handler in this build.");
  m.def("api_version_at", &ApiVersionAt, nb::arg("address"),
        "(major, minor) of the XLA_FFI_Api at an address in this process.");
  m.def("register_at", &RegisterAt, nb::arg("address"), nb::arg("target"), nb::arg("platform"),
        nb::arg("handler"), "Registers a handler with the XLA_FFI_Api at an address.");
  nb::class_<EagerCall>(m, "EagerCall", "A handler with its attributes, callable on CPU arrays.")
      .def(nb::init<nb::capsule, nb::dict>(), nb::arg("handler"), nb::arg("attributes"))
      .def("__call__", &EagerCall::operator(), nb::arg("operands").noconvert(),
           nb::arg("results").noconvert(), nb::arg("num_threads"));
}
