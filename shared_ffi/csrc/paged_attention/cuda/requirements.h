// Which kernels can take a call: what follows from its sizes, strides and addresses.
// kernel_choice.cuh asks.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../../gpu/lab.h"
#include "limits.h"

namespace xla_gpu::paged_attention {

// Whether tensor core kernels can read and write a call's arrays: they copy rows 16 bytes at a
// time, of int4 8.
template <typename C>
bool IsAligned(const Params& p) {
  constexpr int64_t kChunk = 16 / sizeof(C);  // numbers
  const int64_t key_chunk = ElementsOf(p.cache_dtype, kChunk);
  const int64_t value_chunk = ElementsOf(p.value_cache_dtype, kChunk);
  for (const int64_t size : {p.head_size, p.value_head_size, p.query_stride}) {
    if (size % kChunk != 0) return false;
  }
  const auto is_multiple = [](const void* address, int64_t num_bytes) {
    return reinterpret_cast<uintptr_t>(address) % num_bytes == 0;
  };
  constexpr int64_t kBytes = sizeof(C);
  return p.cache.StridesAreMultiplesOf(key_chunk, value_chunk) && is_multiple(p.query, 16) &&
         is_multiple(p.output, 16) && is_multiple(p.cache.keys, key_chunk * kBytes) &&
         is_multiple(p.cache.values, value_chunk * kBytes);
}

// Whether tensor cores can multiply a cache whose rows have scales of groups, or codes of e2m1: the
// product of a number of 4 bits and a scale of 8 bits is a number of 16 bits. But K has the type of
// the query, and float16 has no room for the powers of two of float8_e8m0. A chunk of 16 numbers
// has one scale, which is found by a shift.
inline bool HasProductsOf16Bits(const Params& p) {
  const auto fits = [&](DType dtype, const GroupScales& groups, const KvScales& rows) {
    const bool has_groups = groups.global != nullptr || groups.data != rows.data;
    if (!has_groups) return Is4Bit(dtype) || dtype == DType::kInt8;
    const int64_t size = groups.group_size;
    const bool has_shift = size % 16 == 0 && (size & (size - 1)) == 0;
    return Is4Bit(dtype) && IsQuantized(groups.dtype) && has_shift;
  };
  return fits(p.cache_dtype, p.k_groups, p.k_scale) &&
         fits(p.value_cache_dtype, p.v_groups, p.v_scale) &&
         !(p.dtype == DType::kFloat16 && p.k_groups.dtype == DType::kFloat8E8M0);
}

// Whether the offset of each position in the cache is a 32-bit number of chunks of 16 bytes, as the
// prefill and decode kernels count them: up to 64 GiB.
template <typename C>
bool OffsetsFit32BitChunks(const Params& p) {
  const int64_t last = p.cache.Offset(p.num_blocks - 1, p.block_size - 1);
  return last < int64_t{UINT32_MAX} * (16 / static_cast<int64_t>(sizeof(C)));
}

// Whether the offset of each kv head's positions is a 32-bit number of such chunks, too.
template <typename C>
bool HeadOffsetsFit32BitChunks(const Params& p) {
  const int64_t last = p.cache.Offset(p.num_blocks - 1, p.block_size - 1) +
                       (p.num_kv_heads - 1) * p.cache.head_stride;
  return last < int64_t{UINT32_MAX} * (16 / static_cast<int64_t>(sizeof(C)));
}

// Whether a row of block_tables has a 32-bit number of bytes, as the decode kernel counts them.
inline bool TableRowsFit32Bits(const Params& p) { return p.max_blocks_per_seq <= UINT32_MAX / 4; }

// Whether the prefill kernel copies whole KV tiles of a cache of 16 bits by tensor maps, if the
// driver makes them. Else its threads copy them, 16 bytes at a time.
inline bool TakesBoxes(const Params& p) {
  const bool have_boxes = p.cache_dtype == p.dtype && p.block_size % kBoxPositions == 0;
  return have_boxes && !gpu::kCopiesByThreads;
}

// The head size that the tensor core kernel of a call must have at least. Wide heads whose V is a
// part of K have a kernel of their own, which is for larger heads than any other.
inline int64_t TensorCoreHeadSize(const Params& p) {
  const bool is_wide = p.head_size > kMaxColumns;
  return is_wide && p.is_latent ? Larger(p.head_size, kMaxOwnValues + 1) : p.head_size;
}

// Whether the tensor core kernel for heads of this size has room for the V of a call.
inline bool FitsValues(int head_size, const Params& p) {
  if (head_size > kMaxOwnValues && !p.is_latent) return false;
  return p.value_head_size <= 2 * kMaxColumns;
}

// Whether the decode kernel for a cache of type C, if there is one for heads of this size, takes
// the sequences of a call that have at most FewTokens query tokens, on every GPU.
template <typename C>
bool TakesFewTokens(const Params& p) {
  return IsAligned<C>(p) && OffsetsFit32BitChunks<C>(p) && TableRowsFit32Bits(p) &&
         p.group.number <= decode::kItemRows;
}

// Whether TensorCorePrefill is compiled for KV tiles of so many positions, 64 or 32. From 10.0 on
// the compiler takes more registers, and spills some with 64. Some GPUs that run code for 8.0 have
// no shared memory for 64.
XLA_GPU_HOST_DEVICE constexpr bool HasPrefillTile(int capability, int tile) {
  return tile == 32 || capability < 100;
}

// Calls use(tile), of type std::integral_constant, with the positions of a KV tile of
// TensorCorePrefill, of which two thread blocks are to share a multiprocessor. With 64 positions,
// each read of the query feeds more products, but two of them need 132 KiB of shared memory.
// `capability`: of the GPU, 90 is 9.0. `shared_bytes`: that a thread block can have there.
inline constexpr int kWideTileBytes = 132 << 10;
template <typename Use>
void WithPrefillTile(int capability, int shared_bytes, const Use& use) {
  if (HasPrefillTile(capability, 64) && shared_bytes >= kWideTileBytes) {
    use(std::integral_constant<int, 64>());
  } else {
    use(std::integral_constant<int, 32>());
  }
}

// Whether max_query_len promises that no work item has more than `warp_rows` groups of 16 rows.
inline bool FitsQueryTile(const Params& p, int warp_rows) {
  const int64_t rows = int64_t{warp_rows} * kRowsPerWarpTile;
  return p.max_query_len != 0 && p.max_query_len <= rows / p.group.number;
}

}  // namespace xla_gpu::paged_attention
