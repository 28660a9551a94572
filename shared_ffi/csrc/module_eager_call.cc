// EagerCall: Python calls a handler directly, with no XLA runtime.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "dtypes.h"
#include "eager_runtime.h"
#include "handlers.h"
#include "module.h"

namespace xla_gpu {
namespace {

namespace nb = nanobind;

XLA_FFI_Handler* FindHandlerOrThrow(const std::string& platform, const std::string& target) {
  if (XLA_FFI_Handler* handler = FindHandler(platform, target)) return handler;
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

// A handler with its attributes and the specs of its arrays.
class EagerCall {
 public:
  // A float attribute is passed on as float32, an int as int64.
  EagerCall(const std::string& platform, const std::string& target, nb::dict attributes,
            nb::sequence operands, nb::sequence results)
      : call_(FindHandlerOrThrow(platform, target), BuffersOf(operands), BuffersOf(results),
              AttributesOf(attributes)) {}

  void operator()(nb::list operands, nb::list results, int64_t num_threads,
                  uintptr_t stream) const {
    if (operands.size() != call_.num_operands() || results.size() != call_.num_results()) {
      throw nb::value_error("an address is needed for each operand and for each result");
    }
    std::vector<void*> addresses;
    addresses.reserve(operands.size() + results.size());
    for (const nb::list& arrays : {operands, results}) {
      for (nb::handle address : arrays) {
        addresses.push_back(reinterpret_cast<void*>(nb::cast<uintptr_t>(address)));
      }
    }
    EagerStatus status;
    {
      nb::gil_scoped_release release;
      status = call_.Run(addresses, {num_threads, reinterpret_cast<void*>(stream)});
    }
    if (status.code == XLA_FFI_Error_Code_INVALID_ARGUMENT) {
      throw nb::value_error(status.message.c_str());
    }
    if (status.code != XLA_FFI_Error_Code_OK) throw std::runtime_error(status.message);
  }

 private:
  PreparedCall call_;
};

}  // namespace

void BindEagerCall(nb::module_& m) {
  nb::class_<EagerCall>(m, "EagerCall",
                        "A handler with its attributes, callable on arrays of given specs.")
      .def(nb::init<const std::string&, const std::string&, nb::dict, nb::sequence, nb::sequence>(),
           nb::arg("platform"), nb::arg("target"), nb::arg("attributes"), nb::arg("operands"),
           nb::arg("results"))
      .def("__call__", &EagerCall::operator(), nb::arg("operands"), nb::arg("results"),
           nb::arg("num_threads") = 1, nb::arg("stream") = 0,
           "Calls it on contiguous arrays at these addresses.");
}

}  // namespace xla_gpu
