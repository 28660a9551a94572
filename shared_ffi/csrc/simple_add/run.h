#pragma once

#include "../gpu/error.h"
#include "../parallel.h"
#include "params.h"

namespace xla_gpu::simple_add {

void RunOnCpu(const Params& params, const Executor& executor);

// Queues the work on a CUDA stream.
gpu::Error RunOnCuda(const Params& params, void* stream);

}  // namespace xla_gpu::simple_add
