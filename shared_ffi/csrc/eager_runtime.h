// The smallest XLA FFI runtime. It calls a handler for a caller that is not XLA (eager PyTorch, a
// test) through the same C API, so that the same checks and the same kernel run.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "export.h"
#include "parallel.h"
#include "xla/ffi/api/c_api.h"

namespace xla_gpu {

struct EagerBuffer {
  XLA_FFI_DataType dtype;
  void* data;
  std::vector<int64_t> shape;
};

using Attribute = std::variant<int64_t, float>;

struct EagerStatus {
  XLA_FFI_Error_Code code = XLA_FFI_Error_Code_OK;
  std::string message;
};

// Where a handler works: a CPU handler on at most `num_threads` threads, a CUDA handler on a
// stream.
struct EagerContext {
  int64_t num_threads;
  void* stream;
};

// Calls `handler` on contiguous buffers.
XLA_GPU_EXPORT EagerStatus CallHandler(
    XLA_FFI_Handler* handler, std::vector<EagerBuffer>& operands, std::vector<EagerBuffer>& results,
    const std::vector<std::pair<std::string, Attribute>>& attributes, const EagerContext& context);

// The threads of a call that CallHandler makes; nullopt if another runtime makes the call.
std::optional<Executor> ExecutorOfEagerCall(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* ctx);

}  // namespace xla_gpu
