#include "../gpu/launch.cuh"
#include "run.h"

namespace xla_gpu::kv_cache_update {
namespace {

constexpr int kThreads = 128;

// One block of threads per token. A thread moves one Vector of K and the same Vector of V at a
// time, if there is V.
template <typename Vector>
__global__ void Update(Params p) {
  const int64_t token = blockIdx.x;
  const int64_t slot = p.Slot(token);
  if (slot < 0 || slot >= p.NumSlots()) return;
  const int64_t size = SizeOf(p.dtype), vector_size = sizeof(Vector);
  const int per_head = static_cast<int>(p.head_size * size / vector_size);
  const int per_token = static_cast<int>(p.num_kv_heads) * per_head;
  const int64_t key_stride = p.key_stride * size / vector_size;
  const int64_t value_stride = p.value_stride * size / vector_size;
  const Vector* key = static_cast<const Vector*>(p.key) + token * key_stride;
  const Vector* value = static_cast<const Vector*>(p.value) + token * value_stride;
  const int64_t head_stride = p.cache.head_stride * size / vector_size;
  const int64_t position =
      p.cache.Offset(slot / p.block_size, slot % p.block_size) * size / vector_size;
  Vector* keys = static_cast<Vector*>(p.cache.keys) + position;
  Vector* values = static_cast<Vector*>(p.cache.values) + position;
  for (int i = threadIdx.x; i < per_token; i += kThreads) {
    const int64_t place = i / per_head * head_stride + i % per_head;
    keys[place] = key[i];
    if (p.value_head_size != 0) values[place] = value[i];
  }
}

// One block of threads per token; rounds to 8 bits.
template <typename From, typename To>
__global__ void UpdateQuantized(Params p) {
  const int64_t token = blockIdx.x;
  const int64_t slot = p.Slot(token);
  if (slot < 0 || slot >= p.NumSlots()) return;
  const int64_t per_token = p.num_kv_heads * p.head_size;
  const From* key = static_cast<const From*>(p.key) + token * p.key_stride;
  const From* value = static_cast<const From*>(p.value) + token * p.value_stride;
  const int64_t block = slot / p.block_size, in_block = slot % p.block_size;
  const int64_t position = p.cache.Offset(block, in_block);
  for (int64_t i = threadIdx.x; i < per_token; i += kThreads) {
    const int64_t head = i / p.head_size;
    const int64_t place = position + head * p.cache.head_stride + i % p.head_size;
    gpu::FromFloat(gpu::ToFloat(key[i]) / p.k_scale.At(block, in_block, head),
                   static_cast<To*>(p.cache.keys) + place);
    if (p.value_head_size == 0) continue;
    gpu::FromFloat(gpu::ToFloat(value[i]) / p.v_scale.At(block, in_block, head),
                   static_cast<To*>(p.cache.values) + place);
  }
}

using UpdateKernel = void (*)(Params);

template <typename From>
UpdateKernel QuantizingKernel(DType to) {
  switch (to) {
    case DType::kFloat8E4M3:
      return UpdateQuantized<From, Float8E4M3>;
    case DType::kFloat8E5M2:
      return UpdateQuantized<From, Float8E5M2>;
    default:
      return UpdateQuantized<From, int8_t>;
  }
}

template <typename Vector>
bool Fits(const Params& p) {
  for (const int64_t size : {p.head_size, p.key_stride, p.value_stride, p.cache.block_stride,
                             p.cache.position_stride, p.cache.head_stride}) {
    if (size * SizeOf(p.dtype) % int64_t{sizeof(Vector)} != 0) return false;
  }
  for (const void* array : {p.key, p.value, static_cast<const void*>(p.cache.keys),
                            static_cast<const void*>(p.cache.values)}) {
    if (reinterpret_cast<uintptr_t>(array) % sizeof(Vector) != 0) return false;
  }
  return true;
}

UpdateKernel KernelFor(const Params& p) {
  if (p.dtype == p.cache_dtype) {
    if (Fits<uint4>(p)) return Update<uint4>;
    if (Fits<uint32_t>(p)) return Update<uint32_t>;
    return Fits<uint16_t>(p) ? Update<uint16_t> : Update<uint8_t>;
  }
  switch (p.dtype) {
    case DType::kFloat32:
      return QuantizingKernel<float>(p.cache_dtype);
    case DType::kFloat16:
      return QuantizingKernel<Half>(p.cache_dtype);
    default:
      return QuantizingKernel<BFloat16>(p.cache_dtype);
  }
}

}  // namespace

gpu::Error RunOnCuda(const Params& p, void* stream) {
  gpu::Device device;
  if (gpu::Error error = gpu::Device::Current(&device)) return error;
  return gpu::Kernel<Params>{KernelFor(p), kThreads}.Launch(device, p.num_tokens, stream, p);
}

}  // namespace xla_gpu::kv_cache_update
