#include "eager_call.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>

#include "ffi/dtypes.h"
#include "module.h"

namespace xla_gpu {
namespace {

namespace nb = nanobind;

// Buffers of the given ArraySpecs, as yet without memory.
std::vector<EagerBuffer> BuffersOf(nb::sequence specs) {
  std::vector<EagerBuffer> buffers;
  for (nb::handle spec : specs) {
    buffers.push_back({DTypeNamed(nb::cast<std::string>(spec.attr("dtype"))), nullptr,
                       nb::cast<std::vector<int64_t>>(spec.attr("shape"))});
  }
  return buffers;
}

std::vector<std::pair<std::string, Attribute>> AttributesOf(nb::dict attributes) {
  std::vector<std::pair<std::string, Attribute>> values;
  for (auto [name, value] : attributes) {
    Attribute attribute = int64_t{0};
    if (nb::isinstance<nb::float_>(value)) {
      attribute = static_cast<float>(nb::cast<double>(value));
    } else {
      attribute = nb::cast<int64_t>(value);
    }
    values.emplace_back(nb::cast<std::string>(name), attribute);
  }
  return values;
}

void Call(const EagerCall& call, const std::vector<uintptr_t>& operands,
          const std::vector<uintptr_t>& results, int64_t num_threads, uintptr_t stream) {
  if (operands.size() != call.num_operands() || results.size() != call.num_results()) {
    throw nb::value_error("an address is needed for each operand and for each result");
  }
  std::pmr::vector<void*> addresses;
  for (uintptr_t address : operands) addresses.push_back(reinterpret_cast<void*>(address));
  for (uintptr_t address : results) addresses.push_back(reinterpret_cast<void*>(address));
  RunOrRaise(call, addresses, {num_threads, reinterpret_cast<void*>(stream)});
}

}  // namespace

EagerCall MakeEagerCall(nb::capsule handler, nb::dict attributes, nb::sequence operands,
                        nb::sequence results) {
  return EagerCall(reinterpret_cast<XLA_FFI_Handler*>(handler.data(kHandlerCapsule)),
                   BuffersOf(operands), BuffersOf(results), AttributesOf(attributes));
}

void RunOrRaise(const EagerCall& call, const std::pmr::vector<void*>& addresses,
                const EagerContext& context) {
  EagerStatus status;
  {
    nb::gil_scoped_release release;
    status = call.Run(addresses, context);
  }
  if (status.code == XLA_FFI_Error_Code_INVALID_ARGUMENT) {
    PyErr_SetString(PyExc_ValueError, status.message.c_str());
    throw nb::python_error();
  }
  if (status.code == XLA_FFI_Error_Code_RESOURCE_EXHAUSTED) {
    PyErr_SetString(PyExc_MemoryError, status.message.c_str());
    throw nb::python_error();
  }
  if (status.code != XLA_FFI_Error_Code_OK) throw std::runtime_error(status.message);
}

void BindEagerCall(nb::module_& m) {
  nb::class_<EagerCall>(m, "EagerCall",
                        "A handler with its attributes, callable on arrays of given specs.")
      .def(
          "__init__",
          [](EagerCall* self, nb::capsule handler, nb::dict attributes, nb::sequence operands,
             nb::sequence results) {
            new (self) EagerCall(MakeEagerCall(handler, attributes, operands, results));
          },
          nb::arg("handler"), nb::arg("attributes"), nb::arg("operands"), nb::arg("results"))
      .def("__call__", &Call, nb::arg("operands"), nb::arg("results"), nb::arg("num_threads") = 1,
           nb::arg("stream") = 0, "Calls it on contiguous arrays at these addresses.");
}

}  // namespace xla_gpu
