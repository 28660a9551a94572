#include "../gpu/launch.cuh"
#include "norm.cuh"
#include "numbers.cuh"
#include "rotary.cuh"
#include "run.h"
#include "scales.cuh"

namespace xla_gpu::kv_cache_update {
namespace {

// One block of threads per token. A thread moves one Vector at a time.
template <typename Vector>
__global__ void Update(Params p) {
  const int64_t token = blockIdx.x;
  const int64_t slot = p.Slot(token);
  if (slot < 0 || slot >= p.NumSlots()) return;
  const auto vectors = [&](int64_t elements) {
    return elements * SizeOf(p.dtype) / static_cast<int64_t>(sizeof(Vector));
  };
  const int64_t offset = p.cache.Offset(slot / p.block_size, slot % p.block_size);
  const Vector* key = static_cast<const Vector*>(p.key) + token * vectors(p.key_stride);
  Vector* keys = static_cast<Vector*>(p.cache.keys);
  const int64_t per_key = vectors(p.head_size);
  ForPieces(p.num_kv_heads, per_key, [&](int head, int i) {
    keys[vectors(offset + head * p.cache.head_stride) + i] = key[head * per_key + i];
  });
  const Vector* value = static_cast<const Vector*>(p.value) + token * vectors(p.value_stride);
  Vector* values = static_cast<Vector*>(p.cache.values);
  const int64_t per_value = vectors(p.value_head_size);
  ForPieces(p.num_kv_heads, per_value, [&](int head, int i) {
    const int64_t place = p.cache.OffsetOfValue(offset + head * p.cache.head_stride);
    values[vectors(place) + i] = value[head * per_value + i];
  });
}

// One block of threads per token; rounds to 8 bits. A thread takes kCount adjacent numbers at a
// time.
template <typename From, typename To, int kCount>
__global__ void UpdateQuantized(Params p) {
  const int64_t token = blockIdx.x;
  const int64_t slot = p.Slot(token);
  if (slot < 0 || slot >= p.NumSlots()) return;
  const CachePlace place(p, slot);
  const From* key = static_cast<const From*>(p.key) + token * p.key_stride;
  ForPieces(p.num_kv_heads, p.head_size / kCount, [&](int head, int i) {
    const auto numbers = Load<From, kCount>(key + head * p.head_size + i * kCount);
    place.StoreKey<To>(numbers, head, i * kCount);
  });
  StoreValues<From, To, kCount>(p, place, token);
}

using UpdateKernel = void (*)(Params);

bool IsAligned(const void* array, int64_t num_bytes) {
  return reinterpret_cast<uintptr_t>(array) % num_bytes == 0;
}

// Whether rows can be taken `count` numbers at a time by kernels that rotate or round.
bool FitsNumbers(const Params& p, int64_t count) {
  const Rotary& r = p.rotary;
  for (const int64_t size : {p.head_size, p.value_head_size, p.key_stride, p.value_stride,
                             r.rotary_dim / 2, p.query_stride}) {
    if (size % count != 0) return false;
  }
  const int64_t num_bytes = count * SizeOf(p.dtype), cache_bytes = count * SizeOf(p.cache_dtype);
  return p.cache.StridesAreMultiplesOf(count, count) && IsAligned(p.key, num_bytes) &&
         IsAligned(p.value, num_bytes) && IsAligned(p.query, num_bytes) &&
         IsAligned(p.cache.keys, cache_bytes) && IsAligned(p.cache.values, cache_bytes) &&
         IsAligned(r.cos_sin_cache, count * SizeOf(r.dtype));
}

template <typename From, typename To>
UpdateKernel KernelOfTypes(const Params& p) {
  constexpr int kCount = 16 / sizeof(From);
  const bool fits = FitsNumbers(p, kCount);
  if (p.rotary.cos_sin_cache != nullptr) {
    return fits ? UpdateRotated<From, To, kCount> : UpdateRotated<From, To, 1>;
  }
  if constexpr (std::is_same_v<From, To>) {
    return nullptr;  // Update copies
  } else {
    return fits ? UpdateQuantized<From, To, kCount> : UpdateQuantized<From, To, 1>;
  }
}

// The kernel whose warps take a row at a time.
template <typename From, bool kHasGroups>
UpdateKernel KernelOfRows(const Params& p) {
  if (p.hadamard.IsUsed()) return UpdateNormalized<From, true, kHasGroups>;
  if (p.norms.AreUsed()) return UpdateNormalized<From, false, kHasGroups>;
  return UpdateAndScale<From, kHasGroups>;
}

template <typename From>
UpdateKernel KernelOfType(const Params& p) {
  if (p.HasGroupsOrFractions()) return KernelOfRows<From, true>(p);
  const bool makes_scales = p.k_scale_cache != nullptr || p.v_scale_cache != nullptr;
  if (makes_scales || p.norms.AreUsed() || p.hadamard.IsUsed()) return KernelOfRows<From, false>(p);
  if (p.value_cache_dtype == DType::kInt4) return UpdateInt4<From>;
  switch (p.cache_dtype) {
    case DType::kFloat8E4M3:
      return KernelOfTypes<From, Float8E4M3>(p);
    case DType::kFloat8E5M2:
      return KernelOfTypes<From, Float8E5M2>(p);
    case DType::kInt8:
      return KernelOfTypes<From, int8_t>(p);
    case DType::kInt4:
      return UpdateInt4<From>;
    default:
      return KernelOfTypes<From, From>(p);
  }
}

template <typename Vector>
bool Fits(const Params& p) {
  const int64_t count = std::max<int64_t>(1, int64_t{sizeof(Vector)} / SizeOf(p.dtype));
  for (const int64_t elements : {p.head_size, p.value_head_size, p.key_stride, p.value_stride}) {
    if (elements % count != 0) return false;
  }
  if (!p.cache.StridesAreMultiplesOf(count, count)) return false;
  for (const void* array : {p.key, p.value, static_cast<const void*>(p.cache.keys),
                            static_cast<const void*>(p.cache.values)}) {
    if (!IsAligned(array, sizeof(Vector))) return false;
  }
  return true;
}

UpdateKernel KernelFor(const Params& p) {
  if (p.dtype == p.cache_dtype && p.rotary.cos_sin_cache == nullptr && !p.norms.AreUsed() &&
      !p.hadamard.IsUsed()) {
    if (Fits<uint4>(p)) return Update<uint4>;
    if (Fits<uint32_t>(p)) return Update<uint32_t>;
    return Fits<uint16_t>(p) ? Update<uint16_t> : Update<uint8_t>;
  }
  return WithTensorType(p.dtype, [&](auto type) { return KernelOfType<decltype(type)>(p); });
}

}  // namespace

gpu::Error RunOnCuda(const Params& p, void* stream) {
  const int64_t num_blocks = p.num_tokens * BlocksOfToken(p);
  return gpu::Kernel<Params>{KernelFor(p), kThreads, HadamardBytes(p)}.Launch(num_blocks, stream,
                                                                              p);
}

}  // namespace xla_gpu::kv_cache_update
