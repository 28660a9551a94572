#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/heads.h"
#include "group_scales.h"
#include "run.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace xla_gpu::kv_cache_update {
namespace {

// Below this many bytes, handing work to another thread costs more than the copy: of 128 KB, two
// threads took 1.6 times as long as one.
constexpr int64_t kMinParallelBytes = 1 << 19;
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
void Quantize(void* to, const void* from, int64_t count, float divisor) {
  for (int64_t i = 0; i < count; ++i) {
    FromFloat(ToFloat(static_cast<const From*>(from)[i]) / divisor, static_cast<To*>(to) + i);
  }
}

template <typename From>
void QuantizeToInt4(void* to, const void* from, int64_t count, float divisor) {
  const From* numbers = static_cast<const From*>(from);
  for (int64_t i = 0; i < count; i += 2) {
    static_cast<Int4Pair*>(to)[i / 2] =
        PairOf(ToFloat(numbers[i]) / divisor, ToFloat(numbers[i + 1]) / divisor);
  }
}

template <typename From>
void QuantizeToE2M1(void* to, const void* from, int64_t count, float divisor) {
  const From* numbers = static_cast<const From*>(from);
  for (int64_t i = 0; i < count; i += 2) {
    const uint32_t low = Float4E2M1CodeOf(ToFloat(numbers[i]) / divisor);
    const uint32_t high = Float4E2M1CodeOf(ToFloat(numbers[i + 1]) / divisor);
    static_cast<uint8_t*>(to)[i / 2] = static_cast<uint8_t>(low | high << 4);
  }
}

using Quantizer = void (*)(void* to, const void* from, int64_t count, float divisor);

template <typename From>
Quantizer QuantizerFrom(DType to) {
  switch (to) {
    case DType::kFloat8E4M3:
      return Quantize<From, Float8E4M3>;
    case DType::kFloat8E5M2:
      return Quantize<From, Float8E5M2>;
    case DType::kInt4:
      return QuantizeToInt4<From>;
    case DType::kFloat4E2M1:
      return QuantizeToE2M1<From>;
    default:
      return Quantize<From, int8_t>;
  }
}

// Null where the dtypes are equal.
Quantizer QuantizerFor(DType from, DType to) {
  if (from == to) return nullptr;
  return WithTensorType(from, [&](auto type) { return QuantizerFrom<decltype(type)>(to); });
}

template <typename T>
float LargestMagnitude(const void* row, int64_t count) {
  using Bits = decltype(MagnitudeOf(T()));
  constexpr int64_t kLanes = 16;  // each has a maximum of its own, so that none waits for another
  const T* numbers = static_cast<const T*>(row);
  Bits largest[kLanes] = {};
  int64_t first = 0;
  for (; first + kLanes <= count; first += kLanes) {
    for (int64_t i = 0; i < kLanes; ++i) {
      largest[i] = std::max(largest[i], MagnitudeOf(numbers[first + i]));
    }
  }
  for (; first < count; ++first) largest[0] = std::max(largest[0], MagnitudeOf(numbers[first]));
  return ToFloat(BitCast<T>(*std::max_element(largest, largest + kLanes)));
}

// Rounds rows of K, or of V, to a cache of fewer bits.
class Rounder {
 public:
  // `made`: where the scales are written if the call makes them, else null.
  Rounder(DType from, DType to, int64_t count, const KvScales& scales, float* made,
          const ScalesOfGroups& groups)
      : quantize_(QuantizerFor(from, to)),
        from_(from),
        to_(to),
        count_(count),
        scales_(scales),
        made_(made),
        groups_(groups) {
    largest_magnitude_ =
        WithTensorType(from, [](auto type) { return &LargestMagnitude<decltype(type)>; });
  }

  bool CopiesRows() const { return quantize_ == nullptr; }

  // Writes the row of a kv head.
  void Write(const void* from, int64_t block, int64_t in_block, int64_t head, void* to) const {
    if (groups_.AreUsed()) return WriteGroups(from, groups_.Offset(block, in_block, head, 0), to);
    if (made_ == nullptr) {
      return quantize_(to, from, count_, DivisorOf(scales_.At(block, in_block, head)));
    }
    const MadeScale made(largest_magnitude_(from, count_), to_);
    made_[scales_.Offset(block, in_block, head)] = made.scale;
    if (made.is_finite) return quantize_(to, from, count_, made.divisor);
    std::memset(to, 0, ElementsOf(to_, count_) * SizeOf(to_));
  }

 private:
  // `first`: the offset of the scale of the first group.
  void WriteGroups(const void* from, int64_t first, void* to) const {
    const int64_t size = groups_.Size(), num_bytes = size * SizeOf(from_);
    const int64_t written_bytes = ElementsOf(to_, size);  // of 8 or 4 bits
    for (int64_t i = 0; i < groups_.Count(); ++i) {
      const char* const group = static_cast<const char*>(from) + i * num_bytes;
      char* const place = static_cast<char*>(to) + i * written_bytes;
      const int64_t offset = first + groups_.Offset(0, 0, 0, i);
      if (groups_.AreMade() && !groups_.Make(largest_magnitude_(group, size), offset)) {
        std::memset(place, 0, written_bytes);
      } else {
        quantize_(place, group, size, groups_.DivisorAt(offset));
      }
    }
  }

  const Quantizer quantize_;  // null where the dtypes are equal
  float (*largest_magnitude_)(const void* row, int64_t count);
  const DType from_;
  const DType to_;
  const int64_t count_;
  const KvScales scales_;
  float* const made_;
  const ScalesOfGroups groups_;
};

}  // namespace

// Each item owns a part of the slots. It walks all tokens in order and copies those that go to its
// slots, so the later of two tokens with one slot wins, whatever the number of threads. The queries
// are dealt out one by one.
void RunOnCpu(const Params& p, const Executor& executor) {
  const int64_t row_bytes = p.head_size * SizeOf(p.dtype), size = SizeOf(p.cache_dtype);
  const int64_t key_bytes = p.key_stride * SizeOf(p.dtype);
  const int64_t value_bytes = p.value_stride * SizeOf(p.dtype);
  const int64_t value_row_bytes = p.value_head_size * SizeOf(p.dtype);
  const int64_t num_bytes = p.num_tokens * p.num_kv_heads * (row_bytes + value_row_bytes);
  const int64_t query_bytes = p.num_tokens * p.num_heads * row_bytes;
  const bool is_parallel = executor.num_threads > 1 && num_bytes + query_bytes >= kMinParallelBytes;
  const int64_t num_parts = is_parallel ? kPartsPerThread * executor.num_threads : 1;
  const auto copy = num_bytes < kMinStreamedBytes ? Copy : CopyPastCaches;
  const Rounder keys(
      RowDType(p, p.hadamard.has_keys, p.cache_dtype), p.cache_dtype, p.head_size, p.k_scale,
      p.k_scale_cache,
      ScalesOfGroups(p.k_groups, p.cache_dtype, p.rounds_scales_up, p.k_group_cache));
  const Rounder values(
      RowDType(p, p.hadamard.has_values, p.value_cache_dtype), p.value_cache_dtype,
      p.value_head_size, p.v_scale, p.v_scale_cache,
      ScalesOfGroups(p.v_groups, p.value_cache_dtype, p.rounds_scales_up, p.v_group_cache));
  ParallelFor(executor, num_parts, [&](int64_t part) {
    Heads heads(p);
    for (int64_t token = 0; token < p.num_tokens; ++token) {
      if (query_bytes > 0 && token % num_parts == part) heads.ChangeQuery(token);
      const int64_t slot = p.Slot(token);
      if (slot < 0 || slot / kSlotsPerRun % num_parts != part) continue;
      const char* key = static_cast<const char*>(p.key) + token * key_bytes;
      const char* value = static_cast<const char*>(p.value) + token * value_bytes;
      const int64_t block = slot / p.block_size, in_block = slot % p.block_size;
      int64_t offset = p.cache.Offset(block, in_block);
      heads.TakeKeys(token, key);
      for (int64_t head = 0; head < p.num_kv_heads; ++head, offset += p.cache.head_stride) {
        char* k = static_cast<char*>(p.cache.keys) + offset * size;
        char* v = static_cast<char*>(p.cache.values) + p.cache.OffsetOfValue(offset) * size;
        const char* new_k = heads.Key(key + head * row_bytes, head);
        if (keys.CopiesRows()) {
          copy(k, new_k, row_bytes);
        } else {
          keys.Write(new_k, block, in_block, head, k);
        }
        const char* new_v = heads.Value(value + head * value_row_bytes);
        if (!values.CopiesRows()) {
          values.Write(new_v, block, in_block, head, v);
        } else if (value_row_bytes > 0) {
          copy(v, new_v, value_row_bytes);
        }
      }
    }
    FinishCopies();
  });
}

}  // namespace xla_gpu::kv_cache_update
