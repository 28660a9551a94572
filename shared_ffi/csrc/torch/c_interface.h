// PyTorch's tensors, read through its stable C interface. Its functions are looked up on first use:
// the library is neither built nor linked with PyTorch, and works in processes without it.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "ffi/dtypes.h"

namespace xla_gpu {

// These types are those of torch/csrc/inductor/aoti_torch/c/shim.h.
using AOTITorchError = int32_t;
using AtenTensorHandle = struct AtenTensorOpaque*;

// Finds PyTorch's function of that name. It is looked for in the library itself, because Python
// loads PyTorch's libraries without making their symbols visible to the whole process.
template <typename F>
F* TorchFunction(const char* library, const char* name) {
  void* handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  void* function = dlsym(handle == nullptr ? RTLD_DEFAULT : handle, name);
  if (handle != nullptr) dlclose(handle);
  if (function == nullptr) throw std::runtime_error(std::string("PyTorch lacks ") + name);
  return reinterpret_cast<F*>(function);
}

template <typename T>
using Getter = AOTITorchError(AtenTensorHandle, T*);

template <typename T>
T Get(Getter<T>* getter, AtenTensorHandle tensor) {
  T value{};
  if (getter(tensor, &value) != 0)
    throw std::runtime_error("PyTorch's C interface failed to read a tensor");
  return value;
}

struct Torch {
  static const Torch& Loaded() {
    static const Torch torch;
    return torch;
  }

  Getter<void*>* data = Function<Getter<void*>>("aoti_torch_get_data_ptr");
  Getter<int64_t>* rank = Function<Getter<int64_t>>("aoti_torch_get_dim");
  Getter<int64_t*>* sizes = Function<Getter<int64_t*>>("aoti_torch_get_sizes");
  Getter<int64_t*>* strides = Function<Getter<int64_t*>>("aoti_torch_get_strides");
  Getter<bool>* is_contiguous = Function<Getter<bool>>("aoti_torch_is_contiguous");
  size_t (*element_size)(int32_t) = Function<size_t(int32_t)>("aoti_torch_dtype_element_size");
  Getter<int32_t>* dtype = Function<Getter<int32_t>>("aoti_torch_get_dtype");
  Getter<int32_t>* device_type = Function<Getter<int32_t>>("aoti_torch_get_device_type");
  Getter<int32_t>* device_index = Function<Getter<int32_t>>("aoti_torch_get_device_index");
  bool (*is_grad_enabled)() = Function<bool()>("aoti_torch_grad_mode_is_enabled");

  // PyTorch's numbers of the dtypes, in the order of kDTypes. They are no constants of the
  // interface.
  std::vector<int32_t> dtype_numbers = DTypeNumbers();

 private:
  template <typename F>
  static F* Function(const char* name) {
    return TorchFunction<F>("libtorch_cpu.so", name);
  }
  static std::vector<int32_t> DTypeNumbers() {
    std::vector<int32_t> numbers;
    for (const NamedDType& known : kDTypes) {
      const std::string function = std::string("aoti_torch_dtype_") + known.name;
      numbers.push_back(known.torch_number != 0 ? known.torch_number
                                                : Function<int32_t()>(function.c_str())());
    }
    return numbers;
  }
};

}  // namespace xla_gpu
