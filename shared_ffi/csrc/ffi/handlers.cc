#include "handlers.h"

#include <string_view>

#include "xla/ffi/api/api.h"

// One line for each op: f(prefix of its handlers' symbols, custom call target). A new op's target
// is xla_gpu_<op>; shared_ffi/simple_add.py says why simple_add's is not.
// clang-format off
#define XLA_GPU_FOR_OPS(f)                       \
  f(SimpleAdd, "XlaGpuSimpleAdd")                \
  f(KvCacheUpdate, "xla_gpu_kv_cache_update")    \
  f(PagedAttention, "xla_gpu_paged_attention")   \
  f(VarlenAttention, "xla_gpu_varlen_attention") \
  f(VarlenAttentionBackward, "xla_gpu_varlen_attention_backward")

#define DECLARE(op, target)                \
  XLA_FFI_DECLARE_HANDLER_SYMBOL(op##Cpu); \
  XLA_FFI_DECLARE_HANDLER_SYMBOL(op##Cuda);
#define ON_CPU(op, target) {"cpu", target, op##Cpu},
#define ON_CUDA(op, target) {"cuda", target, op##Cuda},

XLA_GPU_FOR_OPS(DECLARE)

namespace xla_gpu {

std::initializer_list<NamedHandler> Handlers() {
  static constexpr std::initializer_list<NamedHandler> handlers = {
      XLA_GPU_FOR_OPS(ON_CPU)
#ifdef XLA_GPU_CUDA
      XLA_GPU_FOR_OPS(ON_CUDA)
#endif
  };
  return handlers;
}
// clang-format on

}  // namespace xla_gpu

XLA_FFI_Handler* xla_gpu_handler(const char* platform, const char* target) {
  for (const xla_gpu::NamedHandler& known : xla_gpu::Handlers()) {
    if (std::string_view(platform) == known.platform && std::string_view(target) == known.target) {
      return known.handler;
    }
  }
  return nullptr;
}
