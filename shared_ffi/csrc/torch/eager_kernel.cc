// EagerKernel: an operator's kernel for PyTorch's own tensors. It calls the handler. The check runs
// once for each signature; what it found is kept. torch_frontend/operator/eager.py tells a call's
// life.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "call_memory.h"
#include "python/eager_call.h"
#include "python/module.h"
#include "rules.h"
#include "signature.h"

namespace xla_gpu {
namespace {

// A call as PyTorch makes it.
struct TorchCall {
  explicit TorchCall(bool has_devices) : signature(has_devices, &memory) {}

  CallMemory memory;
  std::pmr::vector<PyTensor> tensors{&memory};  // the operands, in the order of the schema
  PyTensor out;                                 // null: none
  Signature signature;
};

// How calls of a signature are made: the PreparedCall of torch_frontend/operator/eager.py.
struct PreparedCall {
  explicit PreparedCall(nb::handle from, std::pmr::memory_resource* memory)
      : handler(MakeEagerCall(nb::cast<nb::capsule>(from.attr("handler")),
                              nb::cast<nb::dict>(from.attr("attributes")),
                              nb::cast<nb::sequence>(from.attr("operands")),
                              nb::cast<nb::sequence>(from.attr("results")))),
        names(memory),
        copied(memory),
        elements(memory),
        out(nb::cast<int64_t>(from.attr("out_bytes")), nullptr, nullptr, 0, memory),
        written(memory),
        allocated(memory),
        num_returned(nb::cast<size_t>(from.attr("num_returned"))) {
    Fill(from.attr("names"), &names);
    Fill(from.attr("copied"), &copied);
    for (nb::handle x : from.attr("layouts")) elements.push_back(ElementsOf(x, memory));
    Fill(from.attr("written"), &written);
    for (nb::handle x : from.attr("allocated")) allocated.push_back(nb::borrow(x));
  }

  EagerCall handler;
  std::pmr::vector<std::string> names;
  std::pmr::vector<size_t> copied;
  std::pmr::vector<Elements> elements;  // of the operands
  Elements out;                         // no elements: there is no such tensor
  std::pmr::vector<size_t> written;
  std::pmr::vector<nb::object> allocated;  // functions that make a tensor each
  size_t num_returned;

 private:
  template <typename T>
  static void Fill(nb::handle from, std::pmr::vector<T>* to) {
    const auto values = nb::cast<std::vector<T>>(from);
    to->assign(values.begin(), values.end());
  }
};

// Makes a tensor's device the current one for a while, as torch.cuda.device does, by the functions
// of PyTorch that it calls: this library is built without PyTorch.
class CurrentDevice {
 public:
  CurrentDevice(nb::handle torch, nb::handle tensor) : torch_(torch) {
    static const nb::handle get_device = Interned("get_device"),
                            exchange = Interned("_exchange_device");
    index_ = tensor.attr(get_device)();
    previous_ = Cuda().attr(exchange)(index_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  ~CurrentDevice() {
    static const nb::handle restore = Interned("_maybe_exchange_device");
    try {
      Cuda().attr(restore)(previous_);
    } catch (nb::python_error& error) {
      error.discard_as_unraisable("torch.cuda._maybe_exchange_device");
    }
  }

  // PyTorch's current stream. What is queued there can be captured.
  void* stream() const {
    static const nb::handle c = Interned("_C"), get = Interned("_cuda_getCurrentRawStream");
    return reinterpret_cast<void*>(nb::cast<uintptr_t>(torch_.attr(c).attr(get)(index_)));
  }

 private:
  nb::object Cuda() const {
    static const nb::handle cuda = Interned("cuda");
    return torch_.attr(cuda);
  }

  nb::handle torch_;
  nb::object index_, previous_;
};

// Python's function that is told of each call, for tests; null: none. Never deleted: the
// interpreter is gone when static objects are.
nb::object* observer = nullptr;

void Observe(nb::object function) {
  delete observer;
  observer = function.is_none() ? nullptr : new nb::object(std::move(function));
}

void TellObserver(const std::string& op, const std::pmr::vector<void*>& addresses) {
  nb::list numbers;
  for (void* address : addresses) numbers.append(reinterpret_cast<uintptr_t>(address));
  (*observer)(op, numbers);
}

// With `keys`, the first argument of a call is its DispatchKeySet. One of `keys` needs no other
// dispatch step: the handler is called directly, because a second dispatch takes as long as a small
// op. All other calls go to `otherwise`.
class EagerKernel {
 public:
  EagerKernel(std::string op, bool is_on_cuda, nb::object rules, nb::object prepare,
              std::vector<uint64_t> keys, nb::object otherwise, bool returns_out)
      : op_(std::move(op)),
        is_on_cuda_(is_on_cuda),
        torch_(nb::module_::import_("torch")),
        raw_repr_(torch_.attr("_C").attr("DispatchKeySet").attr("raw_repr")),
        owner_of_rules_(std::move(rules)),
        rules_(*nb::cast<const TorchRules*>(owner_of_rules_)),
        prepare_(std::move(prepare)),
        keys_(std::move(keys)),
        otherwise_(std::move(otherwise)),
        returns_out_(returns_out) {}

  nb::object Call(const nb::args& args, const nb::kwargs& keywords) {
    const size_t first = keys_.empty() ? 0 : 1;
    if (first == 1) {
      const auto key = nb::cast<uint64_t>(raw_repr_(args[0]));
      if (std::find(keys_.begin(), keys_.end(), key) == keys_.end()) {
        return otherwise_(*args, **keywords);
      }
    }
    TorchCall given(/*has_devices=*/is_on_cuda_);
    Read(args, first, keywords, &given);
    // Shared, as another thread may clear the table meanwhile.
    std::shared_ptr<const PreparedCall> call;
    if (given.signature.is_complete()) {
      const auto found = calls_.find(given.signature.bytes());
      if (found != calls_.end()) call = found->second;
    }
    if (call == nullptr) call = Prepare(given, args, first, keywords);
    return Run(*call, &given);
  }

 private:
  static constexpr size_t kMostCalls = 4096;

  // The dispatcher chooses a CPU kernel if all tensors are on the CPU: their devices do not count.
  void Read(const nb::args& args, size_t first, const nb::kwargs& keywords, TorchCall* call) const {
    call->tensors.reserve(args.size() + keywords.size());
    const auto read = [&](nb::handle value) {
      if (!rules_.IsTensor(value)) return call->signature.AddOption(value);
      call->signature.AddTensor(call->tensors.emplace_back(value).tensor());
    };
    for (size_t i = first; i < args.size(); ++i) read(args[i]);
    for (auto [name, value] : keywords) {
      call->signature.AddName(name);
      if (rules_.IsTensor(value) && PyUnicode_CompareWithASCIIString(name.ptr(), "out") == 0) {
        call->out = PyTensor(value);
        call->signature.AddTensor(call->out.tensor());
      } else {
        read(value);
      }
    }
  }

  std::shared_ptr<const PreparedCall> Prepare(const TorchCall& given, const nb::args& args,
                                              size_t first, const nb::kwargs& keywords) {
    nb::list arguments;
    for (size_t i = first; i < args.size(); ++i) arguments.append(args[i]);
    auto* const memory = LongLived();
    const std::shared_ptr<const PreparedCall> call =
        std::allocate_shared<PreparedCall>(std::pmr::polymorphic_allocator<PreparedCall>(memory),
                                           prepare_(nb::tuple(arguments), keywords), memory);
    // No Python in between: it could let another thread change the table.
    if (calls_.size() >= kMostCalls) calls_.clear();
    if (given.signature.is_complete()) calls_.emplace(given.signature.bytes(), call);
    return call;
  }

  nb::object Run(const PreparedCall& call, TorchCall* given) const {
    std::pmr::vector<PyTensor>& tensors = given->tensors;
    const PyTensor& given_out = given->out;
    rules_.RefuseDerivative(op_, tensors, given_out);
    std::pmr::vector<nb::object> copies(&given->memory);
    for (size_t i : call.copied) {
      copies.push_back(tensors[i].attr("contiguous")());
      tensors[i] = PyTensor(copies.back());
    }
    std::pmr::vector<Memory> operands(&given->memory);
    std::pmr::vector<void*> addresses(&given->memory);
    operands.reserve(tensors.size());
    addresses.reserve(tensors.size() + 3);
    for (size_t i = 0; i < tensors.size(); ++i) {
      operands.push_back({tensors[i].address(), &call.elements[i]});
      addresses.push_back(operands.back().begin);
    }
    std::pmr::vector<NamedTensor> written(&given->memory);
    written.reserve(call.written.size() + 1);
    for (size_t i : call.written) {
      written.push_back({&call.names[i], tensors[i]});
      addresses.push_back(operands[i].begin);
    }
    rules_.RefuseOneMemory(op_, call.written, call.names, operands);
    if (given_out.is_valid()) {
      static const std::string name = "out";
      const Memory out = {given_out.address(), &call.out};
      written.push_back({&name, given_out});
      addresses.push_back(out.begin);
      rules_.RefuseOverlap(op_, out, call.names, operands);
    }
    rules_.BeforeWriting(op_, written);
    std::pmr::vector<nb::object> allocated(&given->memory);
    allocated.reserve(call.allocated.size());
    for (const nb::object& make : call.allocated) {
      addresses.push_back(PyTensor(allocated.emplace_back(make())).address());
    }
    if (observer != nullptr) TellObserver(op_, addresses);
    if (is_on_cuda_) {
      const CurrentDevice device(torch_, tensors[0]);
      RunOrRaise(call.handler, addresses, {1, device.stream()});
    } else {
      RunOrRaise(call.handler, addresses, {rules_.NumThreads(), nullptr});
    }
    if (given_out.is_valid()) return returns_out_ ? nb::borrow(given_out) : nb::none();
    if (call.num_returned == 0) return nb::none();
    if (call.num_returned == 1) return std::move(allocated[0]);
    nb::list returned;
    for (size_t i = 0; i < call.num_returned; ++i) returned.append(allocated[i]);
    return nb::tuple(returned);
  }

  std::string op_;
  bool is_on_cuda_;
  nb::object torch_, raw_repr_, owner_of_rules_;
  const TorchRules& rules_;
  nb::object prepare_;
  std::vector<uint64_t> keys_;
  nb::object otherwise_;
  bool returns_out_;
  std::pmr::unordered_map<std::pmr::string, std::shared_ptr<const PreparedCall>> calls_{
      LongLived()};
};

// Python's slot of a call. A method that nanobind binds would make another tuple and dictionary of
// the arguments.
PyObject* CallFromPython(PyObject* self, PyObject* arguments, PyObject* keywords) {
  try {
    if (!nb::inst_ready(self)) {
      throw std::runtime_error("EagerKernel: __init__ must come before a call");
    }
    return nb::inst_ptr<EagerKernel>(self)
        ->Call(nb::borrow<nb::args>(arguments),
               keywords == nullptr ? nb::kwargs() : nb::borrow<nb::kwargs>(keywords))
        .release()
        .ptr();
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyType_Slot slots[] = {{Py_tp_call, reinterpret_cast<void*>(CallFromPython)}, {0, nullptr}};

}  // namespace

void BindEagerKernel(nb::module_& m) {
  nb::class_<EagerKernel>(m, "EagerKernel", nb::type_slots(slots),
                          "An operator's kernel for PyTorch's tensors on the CPU or on CUDA.")
      .def(nb::init<std::string, bool, nb::object, nb::object, std::vector<uint64_t>, nb::object,
                    bool>(),
           nb::arg("op"), nb::arg("is_on_cuda"), nb::arg("rules"), nb::arg("prepare"),
           nb::arg("keys"), nb::arg("otherwise").none(), nb::arg("returns_out"));
  m.def("observe_eager_calls", &Observe, nb::arg("function").none(),
        "Tells function(op, addresses) of each call before it is made; None: no more.");
}

}  // namespace xla_gpu
