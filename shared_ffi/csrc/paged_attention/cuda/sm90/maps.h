// Tensor maps of a paged cache, by which the prefill kernel copies boxes of K and V to shared
// memory.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>

#include "../requirements.h"

namespace xla_gpu::paged_attention::sm90 {

// A box has 64 columns of 16 bits, which is the span of the swizzle, of these positions of one
// block and kv head.
inline constexpr int kBoxColumns = 64;

// Parameters of the kernel, so that captured graphs keep them. Dimensions from the innermost:
// column, position in the block, kv head, block. What lies outside is zero in a copy.
struct Maps {
  CUtensorMap keys = {};
  CUtensorMap values = {};
  bool exist = false;
};

// The driver's function that makes a map; null where it has none. It is looked up until it is
// found.
inline auto FindEncode() -> decltype(&cuTensorMapEncodeTiled) {
  static std::atomic<decltype(&cuTensorMapEncodeTiled)> known{nullptr};
  if (const auto encode = known.load()) return encode;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                              12000, cudaEnableDefault, &found);
  if (status != cudaSuccess) cudaGetLastError();
  if (status != cudaSuccess || found != cudaDriverEntryPointSuccess) return nullptr;
  known = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  return known;
}

// The maps of a cache of 16 bits. None where the driver has none for these strides, or knows none.
inline Maps MakeMaps(const Params& p) {
  Maps maps;
  if (!TakesBoxes(p)) return maps;
  const auto encode = FindEncode();
  if (encode == nullptr) return maps;
  const auto make = [&](CUtensorMap* map, void* cache, int64_t columns, const auto& of_strides) {
    const cuuint64_t sizes[] = {
        static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(p.block_size),
        static_cast<cuuint64_t>(p.num_kv_heads), static_cast<cuuint64_t>(p.num_blocks)};
    cuuint64_t strides[3];
    const int64_t elements[] = {p.cache.position_stride, p.cache.head_stride, p.cache.block_stride};
    for (int i = 0; i < 3; ++i) strides[i] = 2 * static_cast<cuuint64_t>(of_strides(elements[i]));
    const cuuint32_t box[] = {kBoxColumns, kBoxPositions, 1, 1}, steps[] = {1, 1, 1, 1};
    const CUtensorMapDataType type = p.dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                                : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    return encode(map, type, 4, cache, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
  };
  maps.exist = make(&maps.keys, p.cache.keys, p.head_size, [](int64_t stride) { return stride; }) &&
               (p.is_latent || make(&maps.values, p.cache.values, p.value_head_size,
                                    [&](int64_t stride) { return p.cache.OffsetOfValue(stride); }));
  return maps;
}

}  // namespace xla_gpu::paged_attention::sm90
