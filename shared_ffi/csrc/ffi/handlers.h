// Every handler of this build.
#pragma once

#include <initializer_list>
#include <string_view>

#include "export.h"
#include "xla/ffi/api/c_api.h"

namespace xla_gpu {

struct NamedHandler {
  const char* platform;  // "cpu", "cuda"
  const char* target;
  XLA_FFI_Handler* handler;
};

XLA_GPU_EXPORT std::initializer_list<NamedHandler> Handlers();

// Null if this build has none.
XLA_GPU_EXPORT const NamedHandler* FindHandler(std::string_view platform, std::string_view target);

}  // namespace xla_gpu

// The same for programs that load the library and know its C functions only.
extern "C" XLA_GPU_EXPORT XLA_FFI_Handler* xla_gpu_handler(const char* platform,
                                                           const char* target);
