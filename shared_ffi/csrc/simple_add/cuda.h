#pragma once

#include "../gpu/error.h"
#include "params.h"

namespace xla_gpu::simple_add {

// Queues the work on a CUDA stream.
gpu::Error RunOnCuda(const Params& params, void* stream);

}  // namespace xla_gpu::simple_add
