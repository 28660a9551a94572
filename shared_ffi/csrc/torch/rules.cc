#include "rules.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <tuple>

#include "python/module.h"

namespace xla_gpu {

TorchRules::TorchRules(nb::object torch, nb::object errors)
    : tensor_type_(torch.attr("Tensor")),
      num_threads_(torch.attr("get_num_threads")),
      is_inference_mode_enabled_(torch.attr("is_inference_mode_enabled")),
      increment_version_(torch.attr("_C").attr("_increment_version")),
      errors_(std::move(errors)),
      forward_ad_(torch.attr("autograd").attr("forward_ad").attr("__dict__")) {
  TensorMember::tensor_type = nb::object(tensor_type_).release();
}

template <typename Tensor>
void TorchRules::RefuseDerivative(const std::string& op, const std::pmr::vector<Tensor>& tensors,
                                  nb::handle out) const {
  static const TensorMember requires_grad("requires_grad");
  static const nb::handle level = Interned("_current_level"), unpack = Interned("unpack_dual");
  const auto refuse = [&](nb::handle x) {
    if (IsTrue(requires_grad.Get(x))) Raise("derivative_error", op, "requires grad");
  };
  if (Torch::Loaded().is_grad_enabled()) {
    for (nb::handle x : tensors) refuse(x);
    if (out.is_valid()) refuse(out);
  }
  // Outside of forward-mode differentiation the level is -1.
  if (nb::cast<int>(forward_ad_[level]) < 0) return;
  for (nb::handle x : tensors) {
    const nb::object dual =
        CallUntraced(forward_ad_[unpack], nb::borrow<nb::args>(nb::make_tuple(x)));
    if (!dual.attr("tangent").is_none()) {
      Raise("derivative_error", op, "has a tangent");
    }
  }
}

template void TorchRules::RefuseDerivative(const std::string&, const std::pmr::vector<PyTensor>&,
                                           nb::handle) const;

void TorchRules::RefuseOverlap(const std::string& op, Memory out,
                               const std::pmr::vector<std::string>& names,
                               const std::pmr::vector<Memory>& operands) const {
  for (size_t i = 0; i < operands.size(); ++i) {
    if (out.Shares(operands[i])) Raise("overlap_error", op, names[i]);
  }
}

void TorchRules::RefuseOneMemory(const std::string& op, const std::pmr::vector<size_t>& written,
                                 const std::pmr::vector<std::string>& names,
                                 const std::pmr::vector<Memory>& operands) const {
  for (size_t w : written) {
    for (size_t i = 0; i < operands.size(); ++i) {
      // The second of two that are written to is to blame.
      if (i == w || (i > w && std::count(written.begin(), written.end(), i) > 0)) continue;
      if (operands[w].Shares(operands[i])) Raise("one_memory_error", op, names[w], names[i]);
    }
  }
}

void TorchRules::BeforeWriting(const std::string& op,
                               const std::pmr::vector<NamedTensor>& written) const {
  static const TensorMember is_inference("is_inference");
  if (written.empty()) return;
  const bool is_inference_mode = IsTrue(is_inference_mode_enabled_());
  nb::list tensors;
  for (const auto& [name, tensor] : written) {
    if (!is_inference_mode && IsTrue(is_inference.Call(tensor))) {
      Raise("inference_tensor_error", op, *name);
    }
    tensors.append(tensor);
  }
  increment_version_(tensors);  // inference tensors have none
}

Elements ElementsOf(nb::handle layout, std::pmr::memory_resource* memory) {
  const auto [bytes, sizes, strides] =
      nb::cast<std::tuple<int64_t, std::vector<int64_t>, std::vector<int64_t>>>(layout);
  if (sizes.size() != strides.size()) throw nb::value_error("each size needs a stride");
  return Elements(bytes, sizes.data(), strides.data(), sizes.size(), memory);
}

void BindTorchRules(nb::module_& m) {
  nb::class_<TorchRules>(m, "TorchRules", "PyTorch's rules for the operators.")
      .def(nb::init<nb::object, nb::object>(), nb::arg("torch"), nb::arg("errors"))
      .def(
          "refuse_derivative",
          [](const TorchRules& rules, const std::string& op, nb::sequence tensors) {
            std::pmr::vector<nb::handle> handles;
            for (nb::handle tensor : tensors) handles.push_back(tensor);
            rules.RefuseDerivative(op, handles, nb::handle());
          },
          nb::arg("op"), nb::arg("tensors"),
          "Raises NotImplementedError if a tensor requires grad or has a tangent.");
  m.def(
      "share_elements",
      [](nb::handle layout, nb::handle other, int64_t distance) {
        return ElementsOf(layout).ShareBytes(ElementsOf(other), distance);
      },
      nb::arg("layout"), nb::arg("other"), nb::arg("distance"),
      "Whether two tensors share elements. Each layout is (bytes of an element, sizes, strides); "
      "distance: bytes from the first element of the one to that of the other.");
}

}  // namespace xla_gpu
