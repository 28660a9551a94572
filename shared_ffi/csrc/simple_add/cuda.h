#pragma once

#include "params.h"

namespace xla_gpu::simple_add {

// Queues the work on a CUDA stream. Null, or why that failed.
const char* RunOnCuda(const Params& params, void* stream);

}  // namespace xla_gpu::simple_add
