#include "untraced.h"

#include <utility>

#include "module.h"

namespace xla_gpu {
namespace {

namespace nb = nanobind;

// A function as CallUntraced calls it.
class Untraced {
 public:
  explicit Untraced(nb::object function) : function_(std::move(function)) {}

  nb::object Call(const nb::args& arguments, const nb::kwargs& keywords) const {
    return CallUntraced(function_, arguments, keywords);
  }

 private:
  nb::object function_;
};

}  // namespace

nb::object CallUntraced(nb::handle function, const nb::args& arguments,
                        const nb::kwargs& keywords) {
  // Before it is imported, it traces nothing. To import it takes seconds.
  if (PyDict_GetItemString(PyImport_GetModuleDict(), "torch._dynamo") == nullptr) {
    return function(*arguments, **keywords);
  }
  // Not initialized where it is declared: another thread would wait for that with Python's lock.
  // Never deleted: the interpreter is gone when static objects are.
  static nb::object* call = nullptr;
  if (call == nullptr) {
    const nb::object disable = nb::module_::import_("torch.compiler").attr("disable");
    call = new nb::object(disable(nb::module_::import_("operator").attr("call")));
  }
  return (*call)(function, *arguments, **keywords);
}

void BindUntraced(nb::module_& m) {
  nb::class_<Untraced>(m, "Untraced",
                       "A function that PyTorch's tracer Dynamo does not enter, for operators.")
      .def(nb::init<nb::object>(), nb::arg("function"))
      .def("__call__", &Untraced::Call);
}

}  // namespace xla_gpu
