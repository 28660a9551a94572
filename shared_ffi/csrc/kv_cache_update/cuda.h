#pragma once

#include "params.h"

namespace xla_gpu::kv_cache_update {

// Queues the work on a CUDA stream. Null, or why that failed. A slot past the end is not written.
const char* RunOnCuda(const Params& params, void* stream);

}  // namespace xla_gpu::kv_cache_update
