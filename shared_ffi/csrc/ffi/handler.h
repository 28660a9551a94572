// What the handlers share: reading FFI types, and wording what is wrong with them.
// The wording is that of shared_ffi/spec.py, so that a user reads the same sentence whether the
// Python check or the handler speaks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
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

// "<op>: <what the rule says>; got <value>".
template <typename... Parts>
ffi::Error InvalidArgument(const char* op, const Parts&... parts) {
  return ffi::Error::InvalidArgument(StrCat(op, ": ", parts...));
}

inline std::string ShapeName(const ffi::AnyBuffer& buffer) {
  std::string text;
  for (int64_t n : buffer.dimensions()) text += (text.empty() ? "" : ", ") + std::to_string(n);
  return "[" + text + "]";
}

inline const char* DTypeName(const ffi::AnyBuffer& buffer) {
  return DTypeName(static_cast<XLA_FFI_DataType>(buffer.element_type()));
}

// The argument must have the shape that `rule` describes, and has not.
inline ffi::Error ShapeError(const char* op, const char* argument, const std::string& rule,
                             const ffi::AnyBuffer& got) {
  return InvalidArgument(op, argument, " must have shape ", rule, "; got ", ShapeName(got));
}

// The argument must have the dtype that `rule` names, and has not.
inline ffi::Error DTypeError(const char* op, const char* argument, const std::string& rule,
                             const ffi::AnyBuffer& got) {
  return InvalidArgument(op, argument, " must have ", rule, "; got ", DTypeName(got));
}

// True, and *to set, if the tensors of every op may have this dtype.
inline bool StorageType(ffi::DataType dtype, DType* to) {
  switch (dtype) {
    case ffi::F32:
      *to = DType::kFloat32;
      return true;
    case ffi::F16:
      *to = DType::kFloat16;
      return true;
    case ffi::BF16:
      *to = DType::kBFloat16;
      return true;
    default:
      return false;
  }
}

// True, and *to set, if it is a dtype of 8 bits, which a cache may have instead.
inline bool StorageTypeOf8Bits(ffi::DataType dtype, DType* to) {
  switch (dtype) {
    case ffi::F8E4M3FN:
      *to = DType::kFloat8E4M3;
      return true;
    case ffi::F8E5M2:
      *to = DType::kFloat8E5M2;
      return true;
    case ffi::S8:
      *to = DType::kInt8;
      return true;
    default:
      return false;
  }
}

// A dimension that may have any size.
inline constexpr int64_t kAnySize = -1;

inline bool HasShape(const ffi::AnyBuffer& buffer, std::initializer_list<int64_t> shape) {
  const auto dims = buffer.dimensions();
  return dims.size() == shape.size() &&
         std::equal(dims.begin(), dims.end(), shape.begin(),
                    [](int64_t dim, int64_t size) { return size == kAnySize || dim == size; });
}

// Reads the attributes of a call. An attribute of a feature that the call does not use is absent.
class AttributeReader {
 public:
  AttributeReader(const char* op, const ffi::Dictionary& attributes)
      : op_(op), attributes_(attributes) {}

  template <typename T>
  T Get(const char* name) {
    auto value = attributes_.get<T>(name);
    if (value.has_value()) {
      ++num_read_;
      return *value;
    }
    if (error_.success()) {
      error_ = InvalidArgument(op_, "the attribute ", name, " is ",
                               attributes_.contains(name) ? "of another type" : "missing",
                               ": this program was made by another version");
    }
    return T{};
  }

  template <typename T>
  T Get(const char* name, T otherwise) {
    return attributes_.contains(name) ? Get<T>(name) : otherwise;
  }

  // Call it when all attributes that are known have been read: says whether one was missing, of
  // another type, or is left. The attribute `arguments` is for XLA's partitioner alone
  // (shared_ffi/partitioning.py).
  ffi::Error Finish() const {
    const size_t num_known = num_read_ + (attributes_.contains("arguments") ? 1 : 0);
    if (error_.success() && num_known < attributes_.size()) {
      return InvalidArgument(op_, "the call has ", attributes_.size(), " attributes, of which ",
                             num_known, " are known: this program was made by a newer version");
    }
    return error_;
  }

 private:
  const char* op_;
  const ffi::Dictionary& attributes_;
  size_t num_read_ = 0;
  ffi::Error error_;
};

// The operands of features that not every call uses. They follow the operands that every call has;
// an attribute with the feature's name is the number of its operand.
class FeatureOperands {
 public:
  FeatureOperands(const char* op, size_t num_before, const ffi::RemainingArgs& operands,
                  AttributeReader* attributes, std::initializer_list<const char*> features)
      : op_(op), num_before_(num_before), operands_(operands) {
    for (const char* feature : features) {
      const auto number = attributes->Get<int64_t>(feature, kNone);
      if (number != kNone) numbers_.emplace_back(feature, number);
    }
  }

  // Leaves *operand empty if the call does not use the feature.
  ffi::Error Find(const std::string& feature, std::optional<ffi::AnyBuffer>* operand) const {
    for (const auto& [name, number] : numbers_) {
      if (name != feature) continue;
      const auto found = operands_.get<ffi::AnyBuffer>(number - num_before_);
      if (number < static_cast<int64_t>(num_before_) || !found.has_value()) {
        return InvalidArgument(op_, name, " must be an operand of the call; got number ", number);
      }
      operand->emplace(*found);
    }
    return ffi::Error::Success();
  }

  // Refuses operands that belong to no feature.
  ffi::Error Finish() const {
    if (numbers_.size() == operands_.size()) return ffi::Error::Success();
    return InvalidArgument(op_, "the call must have ", num_before_ + numbers_.size(),
                           " operands; got ", num_before_ + operands_.size());
  }

 private:
  static constexpr int64_t kNone = -1;

  const char* op_;
  size_t num_before_;
  const ffi::RemainingArgs& operands_;
  std::vector<std::pair<std::string, int64_t>> numbers_;
};

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
    ThreadPool pool = *CtxDecoding<ThreadPool>::Decode(api, ctx, diagnostic);
    const auto run = [pool](int64_t num_threads, const std::function<void()>& work) mutable {
      for (int64_t i = 1; i < num_threads; ++i) pool.Schedule(std::function<void()>(work));
      work();
    };
    return Type{pool.num_threads(), run};
  }
};
