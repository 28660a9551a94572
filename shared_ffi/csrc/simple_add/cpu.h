#pragma once

#include "../parallel.h"
#include "params.h"

namespace xla_gpu::simple_add {

void RunOnCpu(const Params& params, const Executor& executor);

}  // namespace xla_gpu::simple_add
