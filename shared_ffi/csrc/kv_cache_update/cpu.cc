#include <cstring>

#include "run.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace xla_gpu::kv_cache_update {
namespace {

// Below this many bytes, handing work to another thread costs more than the copy.
constexpr int64_t kMinParallelBytes = 1 << 17;
constexpr int64_t kPartsPerThread = 4;  // so that no thread waits long for the last
constexpr int64_t kSlotsPerRun = 16;    // neighbours: tokens mostly fill slots in order

// From this many bytes on, the writes bypass the processor's caches. The caches would not keep
// them, and a write that bypasses them need not read its cache line first.
constexpr int64_t kMinStreamedBytes = 1 << 24;

void Copy(char* to, const char* from, int64_t num_bytes) { std::memcpy(to, from, num_bytes); }

void CopyPastCaches(char* to, const char* from, int64_t num_bytes) {
#ifdef __SSE2__
  if (reinterpret_cast<uintptr_t>(to) % 16 == 0 && num_bytes % 16 == 0) {
    for (int64_t i = 0; i < num_bytes; i += 16) {
      const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), x);
    }
    return;
  }
#endif
  Copy(to, from, num_bytes);
}

// Orders the writes that bypassed the caches before all later writes.
void FinishCopies() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

template <typename From, typename To>
void Quantize(void* to, const void* from, int64_t count, float scale) {
  for (int64_t i = 0; i < count; ++i) {
    FromFloat(ToFloat(static_cast<const From*>(from)[i]) / scale, static_cast<To*>(to) + i);
  }
}

using Quantizer = void (*)(void* to, const void* from, int64_t count, float scale);

template <typename From>
Quantizer QuantizerFrom(DType to) {
  switch (to) {
    case DType::kFloat8E4M3:
      return Quantize<From, Float8E4M3>;
    case DType::kFloat8E5M2:
      return Quantize<From, Float8E5M2>;
    default:
      return Quantize<From, int8_t>;
  }
}

Quantizer QuantizerFor(const Params& p) {
  switch (p.dtype) {
    case DType::kFloat32:
      return QuantizerFrom<float>(p.cache_dtype);
    case DType::kFloat16:
      return QuantizerFrom<Half>(p.cache_dtype);
    default:
      return QuantizerFrom<BFloat16>(p.cache_dtype);
  }
}

}  // namespace

// Each item owns a part of the slots. It walks all tokens in order and copies those that go to its
// slots, so the later of two tokens with one slot wins, whatever the number of threads.
void RunOnCpu(const Params& p, const Executor& executor) {
  const int64_t row_bytes = p.head_size * SizeOf(p.dtype), size = SizeOf(p.cache_dtype);
  const int64_t key_bytes = p.key_stride * SizeOf(p.dtype);
  const int64_t value_bytes = p.value_stride * SizeOf(p.dtype);
  const int64_t value_row_bytes = p.value_head_size * SizeOf(p.dtype);
  const int64_t num_bytes = p.num_tokens * p.num_kv_heads * (row_bytes + value_row_bytes);
  const bool is_parallel = executor.num_threads > 1 && num_bytes >= kMinParallelBytes;
  const int64_t num_parts = is_parallel ? kPartsPerThread * executor.num_threads : 1;
  const auto copy = num_bytes < kMinStreamedBytes ? Copy : CopyPastCaches;
  const auto quantize = p.dtype == p.cache_dtype ? nullptr : QuantizerFor(p);
  ParallelFor(executor, num_parts, [&](int64_t part) {
    for (int64_t token = 0; token < p.num_tokens; ++token) {
      const int64_t slot = p.Slot(token);
      if (slot < 0 || slot / kSlotsPerRun % num_parts != part) continue;
      const char* key = static_cast<const char*>(p.key) + token * key_bytes;
      const char* value = static_cast<const char*>(p.value) + token * value_bytes;
      const int64_t block = slot / p.block_size, in_block = slot % p.block_size;
      int64_t offset = p.cache.Offset(block, in_block);
      for (int64_t head = 0; head < p.num_kv_heads; ++head, offset += p.cache.head_stride) {
        char* k = static_cast<char*>(p.cache.keys) + offset * size;
        char* v = static_cast<char*>(p.cache.values) + p.cache.OffsetOfValue(offset) * size;
        if (quantize != nullptr) {
          quantize(k, key + head * row_bytes, p.head_size, p.k_scale.At(block, in_block, head));
          quantize(v, value + head * value_row_bytes, p.value_head_size,
                   p.v_scale.At(block, in_block, head));
          continue;
        }
        copy(k, key + head * row_bytes, row_bytes);
        if (value_row_bytes > 0) copy(v, value + head * value_row_bytes, value_row_bytes);
      }
    }
    FinishCopies();
  });
}

}  // namespace xla_gpu::kv_cache_update
