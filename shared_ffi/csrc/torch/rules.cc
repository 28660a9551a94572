#include "rules.h"

#include <nanobind/stl/string.h>

#include <algorithm>

#include "python/module.h"

namespace xla_gpu {

TorchRules::TorchRules(nb::object torch, nb::object errors)
    : tensor_type_(torch.attr("Tensor")),
      num_threads_(torch.attr("get_num_threads")),
      is_grad_enabled_(torch.attr("is_grad_enabled")),
      is_inference_mode_enabled_(torch.attr("is_inference_mode_enabled")),
      increment_version_(torch.attr("_C").attr("_increment_version")),
      forward_ad_(torch.attr("autograd").attr("forward_ad")),
      errors_(std::move(errors)) {}

void TorchRules::RefuseDerivative(const std::string& op, const std::vector<nb::handle>& tensors,
                                  nb::handle out) const {
  static const nb::handle requires_grad = Interned("requires_grad"),
                          level = Interned("_current_level");
  const auto refuse = [&](nb::handle x) {
    if (IsTrue(x.attr(requires_grad))) Raise("derivative_error", op, "requires grad");
  };
  if (IsTrue(is_grad_enabled_())) {
    for (nb::handle x : tensors) refuse(x);
    if (out.is_valid()) refuse(out);
  }
  // Outside of forward-mode differentiation the level is -1.
  if (nb::cast<int>(forward_ad_.attr(level)) < 0) return;
  for (nb::handle x : tensors) {
    if (!forward_ad_.attr("unpack_dual")(x).attr("tangent").is_none()) {
      Raise("derivative_error", op, "has a tangent");
    }
  }
}

void TorchRules::RefuseOverlap(const std::string& op, Memory out,
                               const std::pmr::vector<std::string>& names,
                               const std::vector<Memory>& operands) const {
  for (size_t i = 0; i < operands.size(); ++i) {
    const auto [begin, num_bytes] = operands[i];
    if (begin < out.begin + out.num_bytes && out.begin < begin + num_bytes) {
      Raise("overlap_error", op, names[i]);
    }
  }
}

void TorchRules::RefuseOneMemory(const std::string& op, const std::pmr::vector<size_t>& written,
                                 const std::pmr::vector<std::string>& names,
                                 const std::vector<Memory>& operands) const {
  for (size_t w : written) {
    for (size_t i = 0; i < operands.size(); ++i) {
      if (i == w || operands[w].num_bytes == 0 || operands[i].begin != operands[w].begin) continue;
      const bool is_written = std::count(written.begin(), written.end(), i) > 0;
      const bool is_refused = is_written ? i < w : operands[i].num_bytes == operands[w].num_bytes;
      if (is_refused) Raise("one_memory_error", op, names[w], names[i]);
    }
  }
}

void TorchRules::BeforeWriting(const std::string& op,
                               const std::vector<NamedTensor>& written) const {
  static const nb::handle is_inference = Interned("is_inference");
  if (written.empty()) return;
  const bool is_inference_mode = IsTrue(is_inference_mode_enabled_());
  nb::list with_version;
  for (const auto& [name, tensor, memory] : written) {
    if (!IsTrue(tensor.attr(is_inference)())) {
      with_version.append(tensor);
    } else if (!is_inference_mode) {
      Raise("inference_tensor_error", op, *name);
    }
  }
  if (with_version.size() > 0) increment_version_(with_version);
}

void BindTorchRules(nb::module_& m) {
  nb::class_<TorchRules>(m, "TorchRules", "PyTorch's rules for the operators.")
      .def(nb::init<nb::object, nb::object>(), nb::arg("torch"), nb::arg("errors"))
      .def(
          "refuse_derivative",
          [](const TorchRules& rules, const std::string& op, nb::sequence tensors) {
            std::vector<nb::handle> handles;
            for (nb::handle tensor : tensors) handles.push_back(tensor);
            rules.RefuseDerivative(op, handles, nb::handle());
          },
          nb::arg("op"), nb::arg("tensors"),
          "Raises NotImplementedError if a tensor requires grad or has a tangent.");
}

}  // namespace xla_gpu
