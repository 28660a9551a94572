// C functions through which PyTorch programs compiled ahead of time (AOTInductor) call a handler.
// They need neither Python nor PyTorch's dispatcher.
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "eager/runtime.h"
#include "ffi/dtypes.h"
#include "ffi/export.h"
#include "ffi/handlers.h"
#include "str_cat.h"
#include "torch/c_interface.h"
#include "torch/elements.h"

namespace {

using xla_gpu::AOTITorchError;
using xla_gpu::AtenTensorHandle;
using xla_gpu::Get;
using xla_gpu::Torch;

constexpr char kCpu[] = "cpu";
constexpr char kCuda[] = "cuda";

XLA_FFI_DataType DataTypeOf(const Torch& torch, AtenTensorHandle tensor) {
  const auto& numbers = torch.dtype_numbers;
  const auto found = std::find(numbers.begin(), numbers.end(), Get(torch.dtype, tensor));
  return found == numbers.end() ? XLA_FFI_DataType_INVALID
                                : xla_gpu::kDTypes[found - numbers.begin()].dtype;
}

int64_t SpannedElements(const Torch& torch, AtenTensorHandle tensor) {
  const int64_t rank = Get(torch.rank, tensor);
  const int64_t *sizes = Get(torch.sizes, tensor), *strides = Get(torch.strides, tensor);
  int64_t count = 1;
  for (int64_t i = 0; i < rank; ++i) {
    if (sizes[i] == 0) return 0;
    count += (sizes[i] - 1) * strides[i];
  }
  return count;
}

xla_gpu::EagerBuffer BufferOf(const Torch& torch, AtenTensorHandle tensor, bool is_spanned) {
  std::vector<int64_t> shape;
  if (is_spanned) {
    shape = {SpannedElements(torch, tensor)};
  } else {
    if (!Get(torch.is_contiguous, tensor)) throw std::runtime_error("a tensor is not contiguous");
    const int64_t* sizes = Get(torch.sizes, tensor);
    shape.assign(sizes, sizes + Get(torch.rank, tensor));
  }
  return {DataTypeOf(torch, tensor), Get(torch.data, tensor), std::move(shape)};
}

// Whether a tensor spans this byte.
bool Contains(const Torch& torch, AtenTensorHandle tensor, const void* byte) {
  const char* begin = static_cast<const char*>(Get(torch.data, tensor));
  const size_t element_size = torch.element_size(Get(torch.dtype, tensor));
  return byte >= begin && byte < begin + SpannedElements(torch, tensor) * element_size;
}

xla_gpu::Elements ElementsOf(const Torch& torch, AtenTensorHandle tensor) {
  return {static_cast<int64_t>(torch.element_size(Get(torch.dtype, tensor))),
          Get(torch.sizes, tensor), Get(torch.strides, tensor),
          static_cast<size_t>(Get(torch.rank, tensor))};
}

// Refuses operands that are written in place and share elements with another, as TorchRules does.
// The program's author cannot know which tensors a caller passes.
void RefuseOneMemory(const Torch& torch, const char* target,
                     const std::vector<AtenTensorHandle>& operands,
                     const std::vector<int64_t>& written) {
  for (int64_t w : written) {
    const xla_gpu::Elements elements = ElementsOf(torch, operands[w]);
    const auto address = reinterpret_cast<intptr_t>(Get(torch.data, operands[w]));
    for (size_t i = 0; i < operands.size(); ++i) {
      if (static_cast<int64_t>(i) == w) continue;
      const auto other = reinterpret_cast<intptr_t>(Get(torch.data, operands[i]));
      if (!elements.ShareBytes(ElementsOf(torch, operands[i]), other - address)) continue;
      throw std::runtime_error(xla_gpu::StrCat(target, ": operand ", w,
                                               " must not share memory with operand ", i,
                                               ": it is written in place"));
    }
  }
}

// PyTorch's own operators use as many threads: they ask OpenMP too.
int64_t NumThreads() {
  static auto* const get = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "omp_get_max_threads"));
  return get == nullptr ? 1 : get();
}

void* CurrentStream(int32_t device_index) {
  static auto* const get = xla_gpu::TorchFunction<AOTITorchError(int32_t, void**)>(
      "libtorch_cuda.so", "aoti_torch_get_current_cuda_stream");
  void* stream = nullptr;
  if (get(device_index, &stream) != 0) throw std::runtime_error("PyTorch has no current stream");
  return stream;
}

thread_local std::string last_error;

// The arguments of the operator xla_gpu::_xla_gpu_call, as AOTInductor hands them to C.
struct HandlerCall {
  // The results, scratch included. For a handler that writes in place: the tensors of which its
  // aliased operands are views, then the aliased operands that are no views.
  const AtenTensorHandle* written;
  int64_t num_written;
  const AtenTensorHandle* operands;  // without those that are in `written`
  int64_t num_operands;
  const int64_t* aliases;  // the operands that the handler writes in place; ~i: i is in `written`
  int64_t num_aliases;
  const int64_t* spanned;  // the operands that the handler gets as one array of all they span
  int64_t num_spanned;
  const char* target;
  const char** int_names;
  const int64_t* ints;
  int64_t num_ints;
  const char** float_names;
  const double* floats;
  int64_t num_floats;
};

void Call(const char* platform, const HandlerCall& a) {
  const Torch& torch = Torch::Loaded();
  XLA_FFI_Handler* handler = xla_gpu_handler(platform, a.target);
  if (handler == nullptr) {
    throw std::runtime_error(std::string(a.target) + " has no handler for " + platform +
                             " in this build of libxla_paged_attention.so");
  }
  std::vector<xla_gpu::EagerBuffer> operands, results;
  std::vector<AtenTensorHandle> tensors;
  std::vector<int64_t> in_place;
  const int64_t *aliases = a.aliases, *aliases_end = aliases + a.num_aliases;
  const int64_t num_whole = std::count_if(aliases, aliases_end, [](int64_t i) { return i < 0; });
  const AtenTensorHandle *operand = a.operands, *whole = a.written + a.num_written - num_whole;
  for (int64_t i = 0; i < a.num_operands + num_whole; ++i) {
    const bool is_spanned = std::count(a.spanned, a.spanned + a.num_spanned, i) > 0;
    const bool is_whole = std::count(aliases, aliases_end, ~i) > 0;
    tensors.push_back(is_whole ? *whole++ : *operand++);
    operands.push_back(BufferOf(torch, tensors.back(), is_spanned));
  }
  for (int64_t i = 0; i < a.num_aliases; ++i) {
    in_place.push_back(aliases[i] < 0 ? ~aliases[i] : aliases[i]);
    results.push_back(operands[in_place.back()]);
    const auto& [dtype, data, shape] = results.back();
    const bool is_empty = std::count(shape.begin(), shape.end(), 0) > 0;  // it may lie anywhere
    const bool is_in_place = is_empty || std::any_of(a.written, a.written + a.num_written,
                                                     [&, byte = data](AtenTensorHandle tensor) {
                                                       return Contains(torch, tensor, byte);
                                                     });
    if (!is_in_place)
      throw std::runtime_error(
          "the compiled program copied the cache; it must be updated in place");
  }
  RefuseOneMemory(torch, a.target, tensors, in_place);
  for (int64_t i = 0; i < a.num_written && a.num_aliases == 0; ++i) {
    results.push_back(BufferOf(torch, a.written[i], false));
  }
  std::vector<std::pair<std::string, xla_gpu::Attribute>> attributes;
  for (int64_t i = 0; i < a.num_ints; ++i) attributes.emplace_back(a.int_names[i], a.ints[i]);
  for (int64_t i = 0; i < a.num_floats; ++i) {
    attributes.emplace_back(a.float_names[i], static_cast<float>(a.floats[i]));
  }
  xla_gpu::EagerContext context = {1, nullptr};
  if (platform == kCuda) {
    context.stream = CurrentStream(Get(torch.device_index, a.operands[0]));
  } else {
    context.num_threads = NumThreads();
  }
  const xla_gpu::EagerCall call(handler, operands, results, std::move(attributes));
  const xla_gpu::EagerStatus status = call.Run(context);
  if (status.code != XLA_FFI_Error_Code_OK) throw std::runtime_error(status.message);
}

// Throws, because the C++ that AOTInductor generates prints the message of an exception. For an
// error code it would make up a message.
void CallOrThrow(const char* platform, const HandlerCall& arguments) {
  try {
    Call(platform, arguments);
  } catch (const std::exception& error) {
    last_error = error.what();
    throw;
  }
}

}  // namespace

extern "C" {

// Why the last failed call on this thread failed; empty if none has failed.
XLA_GPU_EXPORT const char* xla_gpu_last_error() { return last_error.c_str(); }

// Defines the operator's kernel for a platform under the name that AOTInductor calls. AOTInductor
// passes a place for a result, or null; the operator has no result.
#define XLA_GPU_DEFINE_CALL(name, platform)                                                      \
  XLA_GPU_EXPORT AOTITorchError name(                                                            \
      const AtenTensorHandle* written, int64_t num_written, const AtenTensorHandle* operands,    \
      int64_t num_operands, const int64_t* aliases, int64_t num_aliases, const int64_t* spanned, \
      int64_t num_spanned, const char* target, const char** int_names, int64_t,                  \
      const int64_t* ints, int64_t num_ints, const char** float_names, int64_t,                  \
      const double* floats, int64_t num_floats, AtenTensorHandle* result) {                      \
    if (result != nullptr) *result = nullptr;                                                    \
    CallOrThrow(platform, {written, num_written, operands, num_operands, aliases, num_aliases,   \
                           spanned, num_spanned, target, int_names, ints, num_ints, float_names, \
                           floats, num_floats});                                                 \
    return 0;                                                                                    \
  }

XLA_GPU_DEFINE_CALL(aoti_torch_cpu__xla_gpu_call, kCpu)
XLA_GPU_DEFINE_CALL(aoti_torch_cuda__xla_gpu_call, kCuda)

}  // extern "C"
