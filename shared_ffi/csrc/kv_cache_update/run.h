#pragma once

#include "../gpu/error.h"
#include "../parallel.h"
#include "params.h"

namespace xla_gpu::kv_cache_update {

void RunOnCpu(const Params& params, const Executor& executor);

// Queues the work on a CUDA stream. A slot past the end is not written.
gpu::Error RunOnCuda(const Params& params, void* stream);

}  // namespace xla_gpu::kv_cache_update
