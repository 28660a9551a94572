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
  if (slot < 0 || slot >= p.NumSlots()) return;
  const int64_t size = SizeOf(p.dtype), vector_size = sizeof(Vector);
  const int per_head = static_cast<int>(p.head_size * size / vector_size);
  const int per_token = static_cast<int>(p.num_kv_heads) * per_head;
  const Vector* key = static_cast<const Vector*>(p.key) + token * per_token;
  const Vector* value = static_cast<const Vector*>(p.value) + token * per_token;
  const int64_t head_stride = p.cache.head_stride * size / vector_size;
  const int64_t position =
      p.cache.Offset(slot / p.block_size, slot % p.block_size) * size / vector_size;
  Vector* keys = static_cast<Vector*>(p.cache.keys) + position;
  Vector* values = static_cast<Vector*>(p.cache.values) + position;
  for (int i = threadIdx.x; i < per_token; i += kThreads) {
    const int64_t place = i / per_head * head_stride + i % per_head;
    keys[place] = key[i];
    values[place] = value[i];
  }
}

template <typename Vector>
bool Fits(const Params& p) {
  for (const int64_t size :
       {p.head_size, p.cache.block_stride, p.cache.position_stride, p.cache.head_stride}) {
    if (size * SizeOf(p.dtype) % int64_t{sizeof(Vector)} != 0) return false;
  }
  for (const void* array : {p.key, p.value, static_cast<const void*>(p.cache.keys),
                            static_cast<const void*>(p.cache.values)}) {
    if (reinterpret_cast<uintptr_t>(array) % sizeof(Vector) != 0) return false;
  }
  return true;
}

}  // namespace

const char* RunOnCuda(const Params& p, void* stream) {
  void (*update)(Params) = Fits<uint4>(p)      ? Update<uint4>
                           : Fits<uint32_t>(p) ? Update<uint32_t>
                                               : Update<uint16_t>;
  return gpu::Kernel<Params>{update, kThreads}.Launch(p.num_tokens, stream, p);
}

}  // namespace xla_gpu::kv_cache_update
