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

// Numbers that a thread reads, or writes, at once.
template <typename T, int kCount>
struct alignas(kCount * sizeof(T)) Numbers {
  T number[kCount];
};

// Divides by the scale and rounds to 8 bits.
template <typename From, typename To, int kCount>
__device__ void Quantize(const void* from, float scale, void* to, int64_t place) {
  const auto numbers = *static_cast<const Numbers<From, kCount>*>(from);
  Numbers<To, kCount> rounded;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    gpu::FromFloat(gpu::ToFloat(numbers.number[i]) / scale, &rounded.number[i]);
  }
  *reinterpret_cast<Numbers<To, kCount>*>(static_cast<To*>(to) + place) = rounded;
}

// One block of threads per token; rounds to 8 bits. A thread takes kCount adjacent numbers at a
// time.
template <typename From, typename To, int kCount>
__global__ void UpdateQuantized(Params p) {
  const int64_t token = blockIdx.x;
  const int64_t slot = p.Slot(token);
  if (slot < 0 || slot >= p.NumSlots()) return;
  const int per_head = static_cast<int>(p.head_size / kCount);
  const int per_token = static_cast<int>(p.num_kv_heads) * per_head;
  const From* key = static_cast<const From*>(p.key) + token * p.key_stride;
  const From* value = static_cast<const From*>(p.value) + token * p.value_stride;
  const int64_t block = slot / p.block_size, in_block = slot % p.block_size;
  const int64_t position = p.cache.Offset(block, in_block);
  for (int i = threadIdx.x; i < per_token; i += kThreads) {
    const int head = i / per_head;
    const int64_t place = position + head * p.cache.head_stride + i % per_head * kCount;
    Quantize<From, To, kCount>(key + int64_t{i} * kCount, p.k_scale.At(block, in_block, head),
                               p.cache.keys, place);
    if (p.value_head_size == 0) continue;
    Quantize<From, To, kCount>(value + int64_t{i} * kCount, p.v_scale.At(block, in_block, head),
                               p.cache.values, place);
  }
}

using UpdateKernel = void (*)(Params);

// Whether a cache of 8 bits and its new rows can be taken `count` numbers at a time.
bool FitsQuantized(const Params& p, int64_t count) {
  for (const int64_t size : {p.head_size, p.key_stride, p.value_stride, p.cache.block_stride,
                             p.cache.position_stride, p.cache.head_stride}) {
    if (size % count != 0) return false;
  }
  const auto is_aligned = [](const void* array, int64_t num_bytes) {
    return reinterpret_cast<uintptr_t>(array) % num_bytes == 0;
  };
  const int64_t num_bytes = count * SizeOf(p.dtype);
  return is_aligned(p.key, num_bytes) && is_aligned(p.value, num_bytes) &&
         is_aligned(p.cache.keys, count) && is_aligned(p.cache.values, count);
}

template <typename From, typename To>
UpdateKernel QuantizingKernel(const Params& p) {
  constexpr int kCount = 16 / sizeof(From);
  return FitsQuantized(p, kCount) ? UpdateQuantized<From, To, kCount>
                                  : UpdateQuantized<From, To, 1>;
}

template <typename From>
UpdateKernel QuantizingKernel(const Params& p) {
  switch (p.cache_dtype) {
    case DType::kFloat8E4M3:
      return QuantizingKernel<From, Float8E4M3>(p);
    case DType::kFloat8E5M2:
      return QuantizingKernel<From, Float8E5M2>(p);
    default:
      return QuantizingKernel<From, int8_t>(p);
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
      return QuantizingKernel<float>(p);
    case DType::kFloat16:
      return QuantizingKernel<Half>(p);
    default:
      return QuantizingKernel<BFloat16>(p);
  }
}

}  // namespace

gpu::Error RunOnCuda(const Params& p, void* stream) {
  gpu::Device device;
  if (gpu::Error error = gpu::Device::Current(&device)) return error;
  return gpu::Kernel<Params>{KernelFor(p), kThreads}.Launch(device, p.num_tokens, stream, p);
}

}  // namespace xla_gpu::kv_cache_update
