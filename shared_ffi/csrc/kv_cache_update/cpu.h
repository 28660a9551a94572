#pragma once

#include "../parallel.h"
#include "params.h"

namespace xla_gpu::kv_cache_update {

void RunOnCpu(const Params& params, const Executor& executor);

}  // namespace xla_gpu::kv_cache_update
