#include "../gpu/launch.cuh"
#include "cuda.h"

namespace xla_gpu::kv_cache_update {
namespace {

constexpr int kThreads = 128;

// A block per token; a thread moves one Vector of K and the same one of V at a time.
template <typename Vector>
__global__ void Update(Params p) {
  const int64_t token = blockIdx.x;
  const int64_t slot = p.Slot(token);
  if (slot < 0 || slot >= p.num_slots) return;
  const int per_head = static_cast<int>(p.head_size * SizeOf(p.dtype) / int64_t{sizeof(Vector)});
  const int per_token = static_cast<int>(p.num_kv_heads) * per_head;
  const Vector* key = static_cast<const Vector*>(p.key) + token * per_token;
  const Vector* value = static_cast<const Vector*>(p.value) + token * per_token;
  Vector* position = static_cast<Vector*>(p.kv_cache) + slot * 2 * per_token;
  for (int i = threadIdx.x; i < per_token; i += kThreads) {
    Vector* k = position + i / per_head * 2 * per_head + i % per_head;
    k[0] = key[i];
    k[per_head] = value[i];
  }
}

template <typename Vector>
bool Fits(const Params& p) {
  const auto is_aligned = [](const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % sizeof(Vector) == 0;
  };
  return p.head_size * SizeOf(p.dtype) % int64_t{sizeof(Vector)} == 0 && is_aligned(p.key) &&
         is_aligned(p.value) && is_aligned(p.kv_cache);
}

}  // namespace

const char* RunOnCuda(const Params& p, void* stream) {
  void (*update)(Params) = Fits<uint4>(p)      ? Update<uint4>
                           : Fits<uint32_t>(p) ? Update<uint32_t>
                                               : Update<uint16_t>;
  return gpu::Kernel<Params>{update, kThreads}.Launch(p.num_tokens, stream, p);
}

}  // namespace xla_gpu::kv_cache_update
