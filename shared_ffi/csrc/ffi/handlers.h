// Every handler of this build.
#pragma once

#include <initializer_list>

#include "export.h"
#include "xla/ffi/api/c_api.h"

namespace xla_gpu {

struct NamedHandler {
  const char* platform;  // "cpu", "cuda"
  const char* target;
  XLA_FFI_Handler* handler;
};

XLA_GPU_EXPORT std::initializer_list<NamedHandler> Handlers();

}  // namespace xla_gpu

// One of them, for programs that load the library and know its C functions only; null if this build
// has none.
extern "C" XLA_GPU_EXPORT XLA_FFI_Handler* xla_gpu_handler(const char* platform,
                                                           const char* target);
