// The smallest XLA FFI runtime. It calls a handler for a caller that is not XLA (eager PyTorch, a
// test) through the same C API, so that the same checks and the same kernel run.
#pragma once

#include <cstdint>
#include <memory>
#include <memory_resource>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "ffi/export.h"
#include "parallel.h"
#include "xla/ffi/api/c_api.h"

namespace xla_gpu {

// The memory of what is kept from call to call. On the heap, its small blocks would lie between the
// results of calls and keep the heap from shrinking.
XLA_GPU_EXPORT std::pmr::memory_resource* LongLived();

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

// A handler with its attributes and the shapes of its contiguous arrays. It may be called by
// several threads at once.
class XLA_GPU_EXPORT EagerCall {
 public:
  EagerCall(XLA_FFI_Handler* handler, const std::vector<EagerBuffer>& operands,
            const std::vector<EagerBuffer>& results,
            std::vector<std::pair<std::string, Attribute>> attributes);
  ~EagerCall();

  size_t num_operands() const;
  size_t num_results() const;

  // Calls it on the memory that the buffers had.
  EagerStatus Run(const EagerContext& context) const;
  // Calls it on other memory: one address for each operand, then one for each result. What it needs
  // for the call is allocated as they are.
  EagerStatus Run(const std::pmr::vector<void*>& addresses, const EagerContext& context) const;

 private:
  struct Parts;
  std::shared_ptr<Parts> parts_;
};

// The threads of a call that EagerCall makes; nullopt if another runtime makes the call.
std::optional<Executor> ExecutorOfEagerCall(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* ctx);

}  // namespace xla_gpu
