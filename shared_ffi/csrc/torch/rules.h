// The rules that PyTorch has for an operator that has no derivative and may write to its arguments:
// gradients, inference tensors, versions, overlapping memory. They are here and nowhere else.
// Kernels ask for them here, Python's fake and XLA kernels through shared_ffi._native.TorchRules.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory_resource>
#include <string>
#include <vector>

#include "elements.h"
#include "python/untraced.h"
#include "signature.h"

namespace xla_gpu {

// Where a tensor's elements lie.
struct Memory {
  char* begin;
  const Elements* elements;

  bool Shares(const Memory& other) const {
    const auto address = [](const Memory& of) { return reinterpret_cast<intptr_t>(of.begin); };
    return elements->ShareBytes(*other.elements, address(other) - address(*this));
  }
};

// A tensor that a call writes to, with its name in messages.
struct NamedTensor {
  const std::string* name;
  nb::handle tensor;
};

// The elements of a layout: bytes of an element, sizes, strides.
Elements ElementsOf(nb::handle layout,
                    std::pmr::memory_resource* memory = std::pmr::get_default_resource());

class TorchRules {
 public:
  // `torch` is the module: this library is built without PyTorch. `errors` is
  // torch_frontend/operator/errors.py, which words the exceptions.
  TorchRules(nb::object torch, nb::object errors);

  bool IsTensor(nb::handle value) const {
    return PyObject_TypeCheck(value.ptr(), reinterpret_cast<PyTypeObject*>(tensor_type_.ptr()));
  }

  int64_t NumThreads() const { return nb::cast<int64_t>(num_threads_()); }

  // Refuses tensors that require grad or have a tangent. `out`: null if there is none.
  template <typename Tensor>
  void RefuseDerivative(const std::string& op, const std::pmr::vector<Tensor>& tensors,
                        nb::handle out) const;

  // Refuses `out` if it shares an element with an operand.
  void RefuseOverlap(const std::string& op, Memory out, const std::pmr::vector<std::string>& names,
                     const std::pmr::vector<Memory>& operands) const;

  // Refuses an operand that is written to and shares an element with another operand.
  void RefuseOneMemory(const std::string& op, const std::pmr::vector<size_t>& written,
                       const std::pmr::vector<std::string>& names,
                       const std::pmr::vector<Memory>& operands) const;

  // Refuses inference tensors outside of inference mode, as PyTorch's own operators do. Increments
  // the versions of the others, by which autograd knows that their former values are lost.
  void BeforeWriting(const std::string& op, const std::pmr::vector<NamedTensor>& written) const;

 private:
  template <typename... Parts>
  [[noreturn]] void Raise(const char* error, const Parts&... parts) const {
    const nb::object exception =
        CallUntraced(errors_.attr(error), nb::borrow<nb::args>(nb::make_tuple(parts...)));
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
    throw nb::python_error();
  }

  nb::object tensor_type_, num_threads_, is_inference_mode_enabled_, increment_version_, errors_;
  nb::dict forward_ad_;  // what the module of this name has
};

}  // namespace xla_gpu
