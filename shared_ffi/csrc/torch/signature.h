// All that the check of a call depends on, as bytes: calls with equal bytes are equal for the
// check.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory_resource>
#include <string>

namespace xla_gpu {

namespace nb = nanobind;

// A name that is looked up in each call. Python makes no string of it again.
inline nb::handle Interned(const char* name) { return PyUnicode_InternFromString(name); }

inline bool IsTrue(nb::handle value) { return value.ptr() == Py_True; }

class Signature {
 public:
  // With `has_devices` the tensors' devices count, which they do not on the CPU.
  explicit Signature(bool has_devices) : has_devices_(has_devices) { bytes_.reserve(1024); }

  void AddName(nb::handle name) { AddString('K', name); }

  void AddTensor(nb::handle tensor) {
    static const nb::handle dtype = Interned("dtype"), shape = Interned("shape"),
                            stride = Interned("stride"), device = Interned("device"),
                            is_contiguous = Interned("is_contiguous");
    Append('T', tensor.attr(dtype).ptr());  // PyTorch has one object for each dtype
    AddSizes(tensor.attr(shape));
    if (!IsTrue(tensor.attr(is_contiguous)())) AddSizes(tensor.attr(stride)());
    if (has_devices_) Append('V', PyObject_Hash(tensor.attr(device).ptr()));
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
  template <typename T>
  void Append(char tag, T value) {
    bytes_.push_back(tag);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }

  void AddSizes(nb::handle sizes) {
    const Py_ssize_t rank = PyTuple_Size(sizes.ptr());
    Append('D', rank);
    for (Py_ssize_t i = 0; i < rank; ++i) {
      Append('I', PyLong_AsLongLong(PyTuple_GetItem(sizes.ptr(), i)));
    }
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
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
