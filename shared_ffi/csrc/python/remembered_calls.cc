// RememberedCalls: the kernel of an operator of PyTorch, which makes a call that it has met before
// without Python's check.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "eager_call.h"
#include "module.h"

namespace xla_gpu {
namespace {

namespace nb = nanobind;

// A name that is looked up in each call. Python makes no string of it again.
nb::handle Interned(const char* name) { return PyUnicode_InternFromString(name); }

struct Names {
  nb::handle current_level = Interned("_current_level"), data_ptr = Interned("data_ptr"),
             dtype = Interned("dtype"), is_contiguous = Interned("is_contiguous"),
             is_inference = Interned("is_inference"), raw_repr = Interned("raw_repr"),
             requires_grad = Interned("requires_grad"), shape = Interned("shape"),
             stride = Interned("stride");
};

const Names& Name() {
  static const Names names;
  return names;
}

// What PyTorch offers, handed over by Python: this library is built without PyTorch.
struct PyTorch {
  nb::object tensor_type, is_grad_enabled, is_inference_mode_enabled, get_num_threads,
      increment_version, forward_ad;

  explicit PyTorch(nb::handle from)
      : tensor_type(from.attr("tensor_type")),
        is_grad_enabled(from.attr("is_grad_enabled")),
        is_inference_mode_enabled(from.attr("is_inference_mode_enabled")),
        get_num_threads(from.attr("get_num_threads")),
        increment_version(from.attr("increment_version")),
        forward_ad(from.attr("forward_ad")) {}

  bool IsTensor(nb::handle value) const {
    return PyType_IsSubtype(Py_TYPE(value.ptr()),
                            reinterpret_cast<PyTypeObject*>(tensor_type.ptr())) != 0;
  }
  // Outside of forward-mode differentiation the level is -1.
  bool HasTangents() const { return nb::cast<int>(forward_ad.attr(Name().current_level)) >= 0; }
};

char* AddressOf(nb::handle tensor) {
  return reinterpret_cast<char*>(nb::cast<uintptr_t>(tensor.attr(Name().data_ptr)()));
}

bool IsTrue(nb::handle value) { return value.ptr() == Py_True; }

// All that the check of a call depends on, as bytes: two calls with equal bytes are equal for it.
class Signature {
 public:
  Signature() { bytes_.reserve(1024); }

  void Add(nb::handle name) { AddString('K', name); }

  void AddTensor(nb::handle tensor) {
    Append('T', tensor.attr(Name().dtype).ptr());  // PyTorch has one object for each dtype
    AddSizes(tensor.attr(Name().shape));
    if (!IsTrue(tensor.attr(Name().is_contiguous)())) AddSizes(tensor.attr(Name().stride)());
  }

  // Returns whether it can: a symbol, for one, cannot be told by its bytes.
  bool AddOption(nb::handle value) {
    if (value.is_none()) {
      Append('N', 0);
    } else if (PyBool_Check(value.ptr())) {
      Append('B', IsTrue(value));
    } else if (PyLong_CheckExact(value.ptr())) {
      int overflow = 0;
      Append('I', PyLong_AsLongLongAndOverflow(value.ptr(), &overflow));
      return overflow == 0;
    } else if (PyFloat_CheckExact(value.ptr())) {
      Append('F', PyFloat_AsDouble(value.ptr()));
    } else if (PyUnicode_CheckExact(value.ptr())) {
      return AddString('S', value);
    } else {
      return false;
    }
    return true;
  }

  const std::string& bytes() const { return bytes_; }

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

  bool AddString(char tag, nb::handle string) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(string.ptr(), &size);
    if (text == nullptr) throw nb::python_error();
    Append(tag, size);
    bytes_.append(text, size);
    return true;
  }

  std::string bytes_;
};

// The arguments of a call.
struct Given {
  std::vector<nb::handle> tensors;  // the operands, in the order in which they were given
  nb::handle out;                   // null: none
  Signature signature;
};

// A call that has passed its check, on tensors that the handler takes as they lie.
struct Prepared {
  EagerCall* call;
  nb::object owner;            // of the call
  std::vector<int64_t> spans;  // the bytes from the first to the last element of each operand
  int64_t out_bytes;
  std::vector<size_t> written;  // the operands that are written in place
  std::vector<std::pair<nb::object, nb::object>> new_results;  // shape and dtype
  bool returns_out;
};

class RememberedCalls {
 public:
  RememberedCalls(nb::object torch, nb::object slow, nb::object prepare, std::vector<uint64_t> keys)
      : torch_(torch),
        slow_(std::move(slow)),
        prepare_(std::move(prepare)),
        keys_(std::move(keys)) {}

  nb::object operator()(nb::args args, nb::kwargs keywords) {
    const size_t first = keys_.empty() ? 0 : 1;
    if (first == 1) {
      const auto key = nb::cast<uint64_t>(args[0].attr(Name().raw_repr)());
      if (std::find(keys_.begin(), keys_.end(), key) == keys_.end()) return Slow(args, keywords);
    }
    Given given;
    if (!Read(args, first, keywords, &given)) return Slow(args, keywords);
    const auto found = calls_.find(given.signature.bytes());
    if (found == calls_.end()) {
      nb::object result = Slow(args, keywords);
      Remember(given, args, first, keywords);
      return result;
    }
    const std::shared_ptr<const Prepared> call = found->second;  // the table may change meanwhile
    nb::object result;
    return call != nullptr && Run(*call, given, &result) ? result : Slow(args, keywords);
  }

 private:
  static constexpr size_t kMostCalls = 4096;

  nb::object Slow(const nb::args& args, const nb::kwargs& keywords) {
    return slow_(*args, **keywords);
  }

  bool Read(const nb::args& args, size_t first, const nb::kwargs& keywords, Given* given) const {
    for (size_t i = first; i < args.size(); ++i) {
      if (!ReadArgument(args[i], given)) return false;
    }
    for (auto [name, value] : keywords) {
      given->signature.Add(name);
      const bool is_out =
          torch_.IsTensor(value) && PyUnicode_CompareWithASCIIString(name.ptr(), "out") == 0;
      if (is_out) {
        given->out = value;
        given->signature.AddTensor(value);
      } else if (!ReadArgument(value, given)) {
        return false;
      }
    }
    return !given->tensors.empty();
  }

  bool ReadArgument(nb::handle value, Given* given) const {
    if (!torch_.IsTensor(value)) return given->signature.AddOption(value);
    given->tensors.push_back(value);
    given->signature.AddTensor(value);
    return true;
  }

  void Remember(const Given& given, const nb::args& args, size_t first,
                const nb::kwargs& keywords) {
    nb::list arguments;
    for (size_t i = first; i < args.size(); ++i) arguments.append(args[i]);
    std::shared_ptr<const Prepared> call = PreparedFrom(prepare_(nb::tuple(arguments), keywords));
    // No Python in between: it could let another thread change the table.
    if (calls_.size() >= kMostCalls) calls_.clear();
    calls_[given.signature.bytes()] = std::move(call);
  }

  // Null if the call cannot be made without Python.
  static std::shared_ptr<const Prepared> PreparedFrom(nb::object found) {
    if (found.is_none() || !nb::isinstance<EagerCall>(found.attr("call"))) return nullptr;
    auto call = std::make_shared<Prepared>();
    call->owner = found.attr("call");
    call->call = nb::cast<EagerCall*>(call->owner);
    call->spans = nb::cast<std::vector<int64_t>>(found.attr("spans"));
    call->out_bytes = nb::cast<int64_t>(found.attr("out_bytes"));
    call->written = nb::cast<std::vector<size_t>>(found.attr("written"));
    for (nb::handle spec : found.attr("new_results")) {
      call->new_results.emplace_back(spec[0], spec[1]);
    }
    call->returns_out = nb::cast<bool>(found.attr("returns_out"));
    return call;
  }

  // Returns whether it has made the call. It has not where Python has to say what is wrong.
  bool Run(const Prepared& call, const Given& given, nb::object* result) const {
    if (HasDerivative(given)) return false;
    std::vector<void*> addresses;
    addresses.reserve(call.call->num_operands() + call.call->num_results());
    for (nb::handle tensor : given.tensors) addresses.push_back(AddressOf(tensor));
    std::vector<nb::handle> written;
    for (size_t i : call.written) {
      if (std::count(addresses.begin() + given.tensors.size(), addresses.end(), addresses[i]) > 0) {
        return false;  // two tensors that are written to begin at one place
      }
      written.push_back(given.tensors[i]);
      addresses.push_back(addresses[i]);
    }
    if (given.out.is_valid()) {
      char* const out = AddressOf(given.out);
      for (size_t i = 0; i < given.tensors.size(); ++i) {
        char* const operand = static_cast<char*>(addresses[i]);
        if (operand < out + call.out_bytes && out < operand + call.spans[i]) return false;
      }
      written.push_back(given.out);
      addresses.push_back(out);
    }
    if (!BeforeWriting(written)) return false;
    nb::list results;
    for (const auto& [shape, dtype] : call.new_results) {
      results.append(given.tensors[0].attr("new_empty")(shape, nb::arg("dtype") = dtype));
      addresses.push_back(AddressOf(results[results.size() - 1]));
    }
    call.call->Run(addresses, {nb::cast<int64_t>(torch_.get_num_threads()), nullptr});
    if (call.returns_out) {
      *result = nb::borrow(given.out);
    } else if (results.size() == 0) {
      *result = nb::none();
    } else {
      *result = results.size() == 1 ? nb::object(results[0]) : nb::object(nb::tuple(results));
    }
    return true;
  }

  bool HasDerivative(const Given& given) const {
    if (torch_.HasTangents()) return true;
    if (!IsTrue(torch_.is_grad_enabled())) return false;
    const auto requires_grad = [](nb::handle x) { return IsTrue(x.attr(Name().requires_grad)); };
    return std::any_of(given.tensors.begin(), given.tensors.end(), requires_grad) ||
           (given.out.is_valid() && requires_grad(given.out));
  }

  // Increments the versions of the tensors. Returns false if one must not be written to.
  bool BeforeWriting(const std::vector<nb::handle>& written) const {
    if (written.empty()) return true;
    const bool is_inference = IsTrue(torch_.is_inference_mode_enabled());
    nb::list with_version;
    for (nb::handle tensor : written) {
      if (!IsTrue(tensor.attr(Name().is_inference)())) {
        with_version.append(tensor);
      } else if (!is_inference) {
        return false;
      }
    }
    if (with_version.size() > 0) torch_.increment_version(with_version);
    return true;
  }

  PyTorch torch_;
  nb::object slow_, prepare_;
  std::vector<uint64_t> keys_;
  std::unordered_map<std::string, std::shared_ptr<const Prepared>> calls_;
};

}  // namespace

void BindRememberedCalls(nb::module_& m) {
  nb::class_<RememberedCalls>(
      m, "RememberedCalls",
      "A kernel of an operator of PyTorch that makes known calls without Python's check.")
      .def(nb::init<nb::object, nb::object, nb::object, std::vector<uint64_t>>(), nb::arg("torch"),
           nb::arg("slow"), nb::arg("prepare"), nb::arg("keys"))
      .def("__call__", &RememberedCalls::operator());
}

}  // namespace xla_gpu
