// All that the check of a call depends on, as bytes: calls with equal bytes are equal for the
// check.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <memory_resource>
#include <string>
#include <utility>

#include "c_interface.h"

namespace xla_gpu {

namespace nb = nanobind;

// A name that is looked up in each call. Python makes no string of it again.
inline nb::handle Interned(const char* name) { return PyUnicode_InternFromString(name); }

inline bool IsTrue(nb::handle value) { return value.ptr() == Py_True; }

// A property or a method of PyTorch's tensors, found once: to look its name up takes as long as to
// call it. Tensors that reach a kernel have no other one of this name.
class TensorMember {
 public:
  // torch.Tensor, set before any call. An import would let other threads run: one could wait, with
  // the GIL, for the static object that is being made.
  static inline nb::handle tensor_type;

  explicit TensorMember(const char* name)
      : member_(nb::object(tensor_type.attr(name)).release()),
        get_(reinterpret_cast<descrgetfunc>(
            PyType_GetSlot(Py_TYPE(member_.ptr()), Py_tp_descr_get))) {}

  nb::object Get(nb::handle tensor) const {
    PyObject* value = get_(member_.ptr(), tensor.ptr(), nullptr);
    if (value == nullptr) throw nb::python_error();
    return nb::steal(value);
  }

  template <typename... Arguments>
  nb::object Call(nb::handle tensor, Arguments&&... arguments) const {
    return member_(tensor, std::forward<Arguments>(arguments)...);
  }

 private:
  nb::handle member_;  // never released: the interpreter is gone when static objects are
  descrgetfunc get_;
};

// A tensor of Python's. PyTorch's C interface reads it in a tenth of the instructions that the
// properties of the Python object take.
class PyTensor : public nb::handle {
 public:
  PyTensor() = default;  // none
  explicit PyTensor(nb::handle object) : nb::handle(object) {
    static const TensorMember cdata("_cdata");
    implementation_ = reinterpret_cast<void*>(nb::cast<uintptr_t>(cdata.Get(object)));
  }

  // An at::Tensor is one pointer, to what Python's `_cdata` names; its handle points to it.
  AtenTensorHandle tensor() const {
    return reinterpret_cast<AtenTensorHandle>(const_cast<void**>(&implementation_));
  }

  char* address() const { return static_cast<char*>(Get(Torch::Loaded().data, tensor())); }

 private:
  void* implementation_ = nullptr;
};

class Signature {
 public:
  // With `has_devices` the tensors' devices count, which they do not on the CPU.
  Signature(bool has_devices, std::pmr::memory_resource* memory)
      : has_devices_(has_devices), bytes_(memory) {
    bytes_.reserve(512);
  }

  void AddName(nb::handle name) { AddString('K', name); }

  void AddTensor(AtenTensorHandle tensor) {
    const Torch& torch = Torch::Loaded();
    const int64_t rank = Get(torch.rank, tensor);
    Append('T', Pair{Get(torch.dtype, tensor), rank});
    AddNumbers(Get(torch.sizes, tensor), rank);
    if (!Get(torch.is_contiguous, tensor)) {
      Append('D', rank);
      AddNumbers(Get(torch.strides, tensor), rank);
    }
    if (!has_devices_) return;
    Append('V', Pair{Get(torch.device_type, tensor), Get(torch.device_index, tensor)});
  }

  void AddOption(nb::handle value) {
    if (value.is_none()) {
      Append('N', 0);
    } else if (PyBool_Check(value.ptr())) {
      Append('B', IsTrue(value));
    } else if (PyLong_CheckExact(value.ptr())) {
      int overflow = 0;
      Append('I', PyLong_AsLongLongAndOverflow(value.ptr(), &overflow));
      is_complete_ = is_complete_ && overflow == 0;
    } else if (PyFloat_CheckExact(value.ptr())) {
      Append('F', PyFloat_AsDouble(value.ptr()));
    } else if (PyUnicode_CheckExact(value.ptr())) {
      AddString('S', value);
    } else {
      is_complete_ = false;
    }
  }

  const std::pmr::string& bytes() const { return bytes_; }

  // Whether the bytes tell all: they do not for a symbol, for one.
  bool is_complete() const { return is_complete_; }

 private:
  using Pair = std::array<int64_t, 2>;

  template <typename T>
  void Append(char tag, T value) {
    char entry[1 + sizeof value] = {tag};
    std::memcpy(entry + 1, &value, sizeof value);
    bytes_.append(entry, sizeof entry);
  }

  void AddNumbers(const int64_t* numbers, int64_t count) {
    bytes_.append(reinterpret_cast<const char*>(numbers), count * sizeof *numbers);
  }

  void AddString(char tag, nb::handle string) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(string.ptr(), &size);
    if (text == nullptr) throw nb::python_error();
    Append(tag, size);
    bytes_.append(text, size);
  }

  bool has_devices_;
  bool is_complete_ = true;
  std::pmr::string bytes_;
};

}  // namespace xla_gpu
