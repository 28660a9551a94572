#include "../gpu/launch.cuh"
#include "run.h"

namespace xla_gpu::simple_add {
namespace {

constexpr int kThreads = 256;

__global__ void Add(Params p) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < p.num_elements) p.sum[i] = p.a[i] + p.b[i];
}

}  // namespace

gpu::Error RunOnCuda(const Params& p, void* stream) {
  const gpu::Kernel<Params> add{Add, kThreads};
  return add.Launch((p.num_elements + kThreads - 1) / kThreads, stream, p);
}

}  // namespace xla_gpu::simple_add
