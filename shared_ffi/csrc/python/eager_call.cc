#include "eager_call.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "ffi/dtypes.h"
#include "ffi/handlers.h"
#include "module.h"

namespace xla_gpu {
namespace {

namespace nb = nanobind;

const NamedHandler& FindHandlerOrThrow(const std::string& platform, const std::string& target) {
  if (const NamedHandler* handler = FindHandler(platform, target)) return *handler;
  throw nb::key_error((target + " has no handler for " + platform + " in this build").c_str());
}

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

// Python's function that is told of each call, for tests; null: none. Never deleted: the
// interpreter is gone when static objects are.
nb::object* observer = nullptr;

void Observe(nb::object function) {
  delete observer;
  observer = function.is_none() ? nullptr : new nb::object(std::move(function));
}

void TellObserver(const std::string& target, const std::vector<void*>& addresses) {
  nb::list numbers;
  for (void* address : addresses) numbers.append(reinterpret_cast<uintptr_t>(address));
  (*observer)(target, numbers);
}

void Call(const EagerCall& call, const std::vector<uintptr_t>& operands,
          const std::vector<uintptr_t>& results, int64_t num_threads, uintptr_t stream) {
  if (operands.size() != call.num_operands() || results.size() != call.num_results()) {
    throw nb::value_error("an address is needed for each operand and for each result");
  }
  std::vector<void*> addresses;
  for (uintptr_t address : operands) addresses.push_back(reinterpret_cast<void*>(address));
  for (uintptr_t address : results) addresses.push_back(reinterpret_cast<void*>(address));
  call.Run(addresses, {num_threads, reinterpret_cast<void*>(stream)});
}

}  // namespace

EagerCall::EagerCall(const std::string& platform, const std::string& target, nb::dict attributes,
                     nb::sequence operands, nb::sequence results)
    : handler_(FindHandlerOrThrow(platform, target)),
      call_(handler_.handler, BuffersOf(operands), BuffersOf(results), AttributesOf(attributes)) {}

void EagerCall::Run(const std::vector<void*>& addresses, const EagerContext& context) const {
  if (observer != nullptr) TellObserver(handler_.target, addresses);
  EagerStatus status;
  {
    nb::gil_scoped_release release;
    status = call_.Run(addresses, context);
  }
  if (status.code == XLA_FFI_Error_Code_INVALID_ARGUMENT) {
    throw nb::value_error(status.message.c_str());
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
      .def(nb::init<const std::string&, const std::string&, nb::dict, nb::sequence, nb::sequence>(),
           nb::arg("platform"), nb::arg("target"), nb::arg("attributes"), nb::arg("operands"),
           nb::arg("results"))
      .def("__call__", &Call, nb::arg("operands"), nb::arg("results"), nb::arg("num_threads") = 1,
           nb::arg("stream") = 0, "Calls it on contiguous arrays at these addresses.");
  m.def("observe_eager_calls", &Observe, nb::arg("function").none(),
        "Tells function(target, addresses) of each call before it is made; None: no more.");
}

}  // namespace xla_gpu
