#include "handlers.h"

#include "xla/ffi/api/api.h"

// Every handler, a line here and a line in Handlers().
XLA_FFI_DECLARE_HANDLER_SYMBOL(SimpleAddCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(KvCacheUpdateCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(PagedAttentionCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(SimpleAddCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(KvCacheUpdateCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(PagedAttentionCuda);

namespace xla_gpu {

const std::vector<NamedHandler>& Handlers() {
  static const std::vector<NamedHandler> handlers = {
      {"cpu", "XlaGpuSimpleAdd", SimpleAddCpu},
      {"cpu", "xla_gpu_kv_cache_update", KvCacheUpdateCpu},
      {"cpu", "xla_gpu_paged_attention", PagedAttentionCpu},
#ifdef XLA_GPU_CUDA
      {"cuda", "XlaGpuSimpleAdd", SimpleAddCuda},
      {"cuda", "xla_gpu_kv_cache_update", KvCacheUpdateCuda},
      {"cuda", "xla_gpu_paged_attention", PagedAttentionCuda},
#endif
  };
  return handlers;
}

XLA_FFI_Handler* FindHandler(const std::string& platform, const std::string& target) {
  for (const NamedHandler& handler : Handlers()) {
    if (platform == handler.platform && target == handler.target) return handler.handler;
  }
  return nullptr;
}

}  // namespace xla_gpu
