// What the handlers share: reading the operands, results and attributes of a call.
//
// The Python checks (shared_ffi/*.py) say every rule in the user's words. A program may have been
// stored or changed since, so a handler checks again, but only what keeps memory safe: with any
// operands, results and attributes, no kernel leaves its arrays, divides by zero, overflows an
// index or runs for ever.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <initializer_list>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dtypes.h"
#include "eager/runtime.h"
#include "gpu/error.h"
#include "parallel.h"
#include "storage.h"
#include "str_cat.h"
#include "xla/ffi/api/ffi.h"

namespace xla_gpu {

namespace ffi = ::xla::ffi;

// Returns the error that `check` evaluates to, if it is one.
#define XLA_GPU_RETURN_IF_ERROR(check) \
  if (::xla::ffi::Error error = (check); error.failure()) return error

// Calls a handler. An exception becomes an error: no exception may enter the runtime, which is C to
// us. The message needs no memory on the heap.
inline XLA_FFI_Error* CallWithoutExceptions(const char* op, XLA_FFI_Handler* handler,
                                            XLA_FFI_CallFrame* frame) {
  char message[256];
  XLA_FFI_Error_Create_Args error = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, message,
                                     XLA_FFI_Error_Code_INTERNAL};
  try {
    return handler(frame);
  } catch (const std::bad_alloc&) {
    error.errc = XLA_FFI_Error_Code_RESOURCE_EXHAUSTED;
    std::snprintf(message, sizeof message,
                  "%s: the host has no memory left for the call, whose results may be incomplete; "
                  "free some, or raise the limit of the process",
                  op);
  } catch (const std::exception& exception) {
    std::snprintf(message, sizeof message, "%s: the host failed: %s", op, exception.what());
  }
  return frame->api->XLA_FFI_Error_Create(&error);
}

// Defines the C function of an op that a runtime calls: `function` with what it binds, and its
// traits if it has any.
#define XLA_GPU_DEFINE_HANDLER(symbol, op, function, ...)        \
  extern "C" XLA_FFI_Error* symbol(XLA_FFI_CallFrame* frame) {   \
    XLA_FFI_DEFINE_HANDLER(handler, function, __VA_ARGS__);      \
    return ::xla_gpu::CallWithoutExceptions(op, handler, frame); \
  }

// What a call has on every platform.
inline auto BindCall() { return ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs(); }

// Defines the handlers of an op for all platforms, of its functions OnCpu and OnCuda. CUDA graphs
// may hold what the latter queues.
#ifdef XLA_GPU_CUDA
#define XLA_GPU_DEFINE_CUDA_HANDLER(name, op)                                                  \
  XLA_GPU_DEFINE_HANDLER(name##Cuda, op, OnCuda, BindCall().Ctx<ffi::PlatformStream<void*>>(), \
                         {ffi::Traits::kCmdBufferCompatible})
#else
#define XLA_GPU_DEFINE_CUDA_HANDLER(name, op)
#endif
#define XLA_GPU_DEFINE_HANDLERS(name, op)                                  \
  XLA_GPU_DEFINE_HANDLER(name##Cpu, op, OnCpu, BindCall().Ctx<Executor>()) \
  XLA_GPU_DEFINE_CUDA_HANDLER(name, op)

using DTypes = std::initializer_list<ffi::DataType>;
inline constexpr DTypes kTensorDTypes = {ffi::F32, ffi::F16, ffi::BF16};
inline constexpr DTypes kStorageDTypes = {ffi::F32,    ffi::F16, ffi::BF16, ffi::F8E4M3FN,
                                          ffi::F8E5M2, ffi::S8,  ffi::U8,   ffi::F4E2M1FN};

// Shapes, of which an array must have one if there are any. kAnySize: a dimension of any size.
using Shapes = std::initializer_list<std::initializer_list<int64_t>>;
inline constexpr int64_t kAnySize = -1;

template <typename Range, typename Name>
std::string Join(const Range& range, const char* separator, const Name& name) {
  std::string text;
  for (const auto& element : range) text += (text.empty() ? "" : separator) + name(element);
  return text;
}

template <typename Shape>
std::string NameOf(const Shape& shape) {
  const auto name = [](int64_t n) { return n == kAnySize ? "any" : std::to_string(n); };
  return "[" + Join(shape, ", ", name) + "]";
}

inline std::string NameOf(ffi::DataType dtype) {
  return DTypeName(static_cast<XLA_FFI_DataType>(dtype));
}

inline std::string Describe(const ffi::AnyBuffer& array) {
  return NameOf(array.element_type()) + " " + NameOf(array.dimensions());
}

// Reads a call. It keeps the first thing that is wrong: read everything, then Finish.
class CallReader {
 public:
  // `operands`: what every call has, in this order. Operands of features that a call uses follow;
  // an attribute of the same name is the operand's number.
  CallReader(const char* op, const ffi::RemainingArgs& arguments, const ffi::RemainingRets& results,
             const ffi::Dictionary& attributes, std::initializer_list<std::string_view> operands)
      : op_(op), arguments_(arguments), results_(results), attributes_(attributes) {
    operands_.reserve(arguments.size());
    for (std::string_view name : operands) Add(name, static_cast<int64_t>(operands_.size()));
  }

  const ffi::Error& error() const { return error_; }

  // Also refuses attributes, operands and results that have not been read. The attribute
  // `arguments` is for XLA's partitioner alone (shared_ffi/xla/partitioning.py).
  const ffi::Error& Finish() {
    const size_t num_known = num_attributes_read_ + (Has("arguments") ? 1 : 0);
    if (num_known != attributes_.size()) {
      Fail("the call has ", attributes_.size(), " attributes, of which ", num_known, " are known");
    }
    if (operands_.size() != arguments_.size()) {
      Fail("the call must have ", operands_.size(), " operands; got ", arguments_.size());
    }
    if (num_results_read_ != results_.size()) {
      Fail("the call must have ", num_results_read_, " results; got ", results_.size());
    }
    return error_;
  }

  template <typename... Parts>
  void Fail(const Parts&... parts) {
    if (error_.failure()) return;
    error_ = ffi::Error::InvalidArgument(
        StrCat(op_, ": ", parts..., " (the program was changed, or made by another version)"));
  }

  // An attribute of a feature that the call does not use is absent.
  bool Has(std::string_view name) const { return attributes_.contains(name); }
  float Float(std::string_view name) { return Get<float>(name, "float32"); }
  // Integers are sizes, distances and numbers of operands: none is negative.
  int64_t Integer(std::string_view name) {
    const auto value = Get<int64_t>(name, "int64");
    if (value < 0) Fail("attribute ", name, " must be at least 0; got ", value);
    return std::max<int64_t>(value, 0);
  }
  int64_t Integer(std::string_view name, int64_t otherwise) {
    return IsUnread(name) ? Integer(name) : otherwise;
  }

  // Every call without an error has the operands that every call has. `name`: a literal.
  std::optional<ffi::AnyBuffer> Find(std::string_view name) {
    for (const auto& [known, operand] : operands_) {
      if (known == name) return operand;
    }
    return IsUnread(name) ? Add(name, Integer(name)) : std::nullopt;
  }
  // The memory of an operand, which must have one of these dtypes and one of these shapes; null if
  // the call does not use the feature.
  template <typename T = void, typename S = Shapes>
  const T* Operand(std::string_view name, DTypes dtypes, const S& shapes) {
    const auto operand = Find(name);
    if (!operand.has_value()) return nullptr;
    Expect("operand ", name, *operand, dtypes, shapes);
    return static_cast<const T*>(operand->untyped_data());
  }
  template <typename... Parts>
  void Refuse(std::string_view name, const Parts&... rule) {
    Fail("operand ", name, " must ", rule..., "; got ", Describe(*Find(name)));
  }

  size_t num_results() const { return results_.size(); }
  // The result of this number; null if the call does not have it.
  template <typename S = Shapes>
  void* Result(size_t number, std::string_view name, DTypes dtypes, const S& shapes) {
    auto result = results_.get<ffi::AnyBuffer>(number);
    ++num_results_read_;
    if (!result.has_value()) return nullptr;
    Expect("result ", name, **result, dtypes, shapes);
    return (**result).untyped_data();
  }

 private:
  // For an attribute that is read once, as Finish counts them. Most calls have three attributes,
  // and are asked for thirty: none is looked up once all have been read.
  bool IsUnread(std::string_view name) const {
    return num_attributes_read_ < attributes_.size() && Has(name);
  }

  std::optional<ffi::AnyBuffer> Add(std::string_view name, int64_t number) {
    const auto operand = arguments_.get<ffi::AnyBuffer>(number);
    if (!operand.has_value()) {
      Fail("operand ", name, " is missing; its number is ", number);
      return std::nullopt;
    }
    operands_.emplace_back(name, *operand);
    return *operand;
  }

  template <typename T>
  T Get(std::string_view name, std::string_view type) {
    const auto value = attributes_.get<T>(name);
    ++num_attributes_read_;
    if (value.has_value()) return *value;
    Fail("attribute ", name, " must be ", type, "; it ",
         Has(name) ? "has another type" : "is missing");
    return T{};
  }

  template <typename S>
  void Expect(std::string_view kind, std::string_view name, const ffi::AnyBuffer& got,
              DTypes dtypes, const S& shapes) {
    const auto dims = got.dimensions();
    const auto has_shape = [&](const auto& shape) {
      return std::equal(dims.begin(), dims.end(), shape.begin(), shape.end(),
                        [](int64_t dim, int64_t size) { return size == kAnySize || dim == size; });
    };
    const bool has_dtype =
        std::find(dtypes.begin(), dtypes.end(), got.element_type()) != dtypes.end();
    const bool may_have_any = shapes.size() == 0;
    if (has_dtype && (may_have_any || std::any_of(shapes.begin(), shapes.end(), has_shape))) return;
    std::string rule = Join(dtypes, " or ", [](ffi::DataType dtype) { return NameOf(dtype); });
    if (shapes.size() > 0) {
      rule += " " + Join(shapes, " or ", [](const auto& shape) { return NameOf(shape); });
    }
    Fail(kind, name, " must be ", rule, "; got ", Describe(got));
  }

  const char* const op_;
  const ffi::RemainingArgs& arguments_;
  const ffi::RemainingRets& results_;
  const ffi::Dictionary& attributes_;
  std::vector<std::pair<std::string_view, ffi::AnyBuffer>> operands_;
  size_t num_attributes_read_ = 0;
  size_t num_results_read_ = 0;
  ffi::Error error_;
};

// How many elements of an array lie in a unit of memory that kernels count, which is an element or,
// of numbers of 4 bits, a pair of them. XLA packs a dtype of 4 bits, the first number of a pair in
// the lower half of a byte.
inline int64_t ElementsInUnit(ffi::DataType dtype) { return dtype == ffi::F4E2M1FN ? 2 : 1; }

// The storage type of an operand, which must have one of kStorageDTypes. An array of uint8 holds
// pairs of int4.
inline DType StorageOf(CallReader* call, std::string_view name) {
  switch (call->Find(name)->element_type()) {
    case ffi::F32:
      return DType::kFloat32;
    case ffi::F16:
      return DType::kFloat16;
    case ffi::BF16:
      return DType::kBFloat16;
    case ffi::F8E4M3FN:
      return DType::kFloat8E4M3;
    case ffi::F8E5M2:
      return DType::kFloat8E5M2;
    case ffi::S8:
      return DType::kInt8;
    case ffi::U8:
      return DType::kInt4;
    case ffi::F4E2M1FN:
      return DType::kFloat4E2M1;
    default:
      call->Operand(name, kStorageDTypes, {});  // an error
      return {};
  }
}

// Success, or what is wrong with the values in the arrays; empty if nothing is.
inline ffi::Error ErrorOf(const char* op, const std::string& error) {
  if (error.empty()) return ffi::Error::Success();
  return ffi::Error::InvalidArgument(StrCat(op, ": ", error));
}

// Success, or the call of the CUDA runtime that failed.
inline ffi::Error Launched(const char* op, const gpu::Error& error) {
  if (!error) return ffi::Error::Success();
  return ffi::Error::Internal(StrCat(op, ": ", error.call, " failed: ", error.reason));
}

}  // namespace xla_gpu

// Lets a CPU handler bind .Ctx<Executor>(), which gives it its caller's threads.
template <>
struct xla::ffi::CtxDecoding<xla_gpu::Executor> {
  using Type = xla_gpu::Executor;

  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* ctx,
                                    DiagnosticEngine& diagnostic) {
    if (auto eager = xla_gpu::ExecutorOfEagerCall(api, ctx)) return eager;
    std::optional<ThreadPool> found = CtxDecoding<ThreadPool>::Decode(api, ctx, diagnostic);
    if (!found.has_value()) return std::nullopt;  // `diagnostic` says why
    const auto run = [pool = *found](int64_t num_threads,
                                     const std::function<void()>& work) mutable {
      for (int64_t i = 1; i < num_threads; ++i) pool.Schedule(std::function<void()>(work));
      work();
    };
    return Type{found->num_threads(), run};
  }
};
