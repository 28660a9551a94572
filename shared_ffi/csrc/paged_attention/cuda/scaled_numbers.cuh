// Numbers of a cache of any quantized type, and the scales of their groups, in float32: as the CPU
// has them (../cpu/float_rows.h).
#pragma once

#include "../../gpu/device.cuh"
#include "../params.h"
#include "query.cuh"

namespace xla_gpu::paged_attention {

// Codes::kNumbers plus kMore of eight codes from 8 * half on, the first in the lowest byte.
template <typename Codes, int kMore>
constexpr uint64_t HalfOfTable(int half) {
  uint64_t bytes = 0;
  for (int i = 7; i >= 0; --i) {
    bytes = bytes << 8 | static_cast<uint8_t>(Codes::kNumbers[8 * half + i] + kMore);
  }
  return bytes;
}
template <typename Codes, int kMore = 0>
inline constexpr uint64_t kLowTable = HalfOfTable<Codes, kMore>(0);
template <typename Codes, int kMore = 0>
inline constexpr uint64_t kHighTable = HalfOfTable<Codes, kMore>(1);

// The numbers of K, or of V.
class ScaledNumbers {
 public:
  __device__ __forceinline__ ScaledNumbers(DType dtype, const GroupScales& scales)
      : dtype_(dtype),
        scales_(scales),
        global_((dtype == DType::kFloat4E2M1 ? Float4E2M1Codes::kUnit : 1.0f) *
                (scales.global == nullptr ? 1.0f : *scales.global)) {}

  // What the numbers of a group are multiplied by. `first`: the offset of the row's first scale.
  __device__ __forceinline__ float Factor(int64_t first, int group) const {
    if (scales_.data == nullptr) return global_;
    return Scale(first + group * scales_.group_stride) * global_;
  }
  __device__ __forceinline__ int GroupOf(int d) const {
    return static_cast<unsigned>(d) / static_cast<unsigned>(scales_.group_size);
  }
  __device__ __forceinline__ int GroupSize() const { return static_cast<int>(scales_.group_size); }

  // Number d of a row, without its factor.
  __device__ __forceinline__ float Number(const ScaledByte* row, int d) const {
    if (Is4Bit(dtype_)) return NumberOfCode(row[d / 2].bits >> d % 2 * 4 & 15);
    const uint8_t bits = row[d].bits;
    switch (dtype_) {
      case DType::kFloat8E4M3:
        return gpu::ToFloat(Float8E4M3{bits});
      case DType::kFloat8E5M2:
        return gpu::ToFloat(Float8E5M2{bits});
      default:
        return static_cast<int8_t>(bits);
    }
  }

 private:
  __device__ __forceinline__ float Scale(int64_t offset) const {
    switch (scales_.dtype) {
      case DType::kFloat32:
        return static_cast<const float*>(scales_.data)[offset];
      case DType::kFloat16:
        return gpu::ToFloat(static_cast<const Half*>(scales_.data)[offset]);
      case DType::kBFloat16:
        return gpu::ToFloat(static_cast<const BFloat16*>(scales_.data)[offset]);
      case DType::kFloat8E4M3:
        return gpu::ToFloat(static_cast<const Float8E4M3*>(scales_.data)[offset]);
      default:
        return ::xla_gpu::ToFloat(static_cast<const Float8E8M0*>(scales_.data)[offset]);
    }
  }

  __device__ __forceinline__ float NumberOfCode(uint32_t code) const {
    const bool are_fractions = dtype_ == DType::kFloat4E2M1;
    const uint64_t low = are_fractions ? kLowTable<Float4E2M1Codes> : kLowTable<Int4Codes>;
    const uint64_t high = are_fractions ? kHighTable<Float4E2M1Codes> : kHighTable<Int4Codes>;
    return static_cast<int8_t>((code < 8 ? low : high) >> code % 8 * 8);
  }

  const DType dtype_;
  const GroupScales& scales_;
  const float global_;
};

// The logarithm of a size that is a power of two.
__device__ __forceinline__ int LogOfGroupSize(const GroupScales& scales) {
  return 31 - __clz(static_cast<int>(scales.group_size));
}

// A chunk of 16 numbers of 4 bits, or the first eight of one of int8, as the cache has them.
struct alignas(8) CodedChunk {
  uint32_t words[2] = {};
};

// K, or V, of a call that HasProductsOf16Bits: chunks of numbers, each times the scale of its
// group, as numbers of type E. The products are exact. int8 has no groups.
template <typename E>
class ScaledChunks {
 public:
  __device__ __forceinline__ ScaledChunks(DType dtype, const GroupScales& scales)
      : dtype_(dtype), scale_dtype_(scales.dtype) {
    const bool are_fractions = dtype == DType::kFloat4E2M1;
    unit_ = gpu::Pack(1, 1, E{});
    if (are_fractions) unit_ = gpu::Pack(Float4E2M1Codes::kUnit, Float4E2M1Codes::kUnit, E{});
    constexpr int kMore = gpu::kRaised;
    const uint64_t low =
        are_fractions ? kLowTable<Float4E2M1Codes, kMore> : kLowTable<Int4Codes, kMore>;
    const uint64_t high =
        are_fractions ? kHighTable<Float4E2M1Codes, kMore> : kHighTable<Int4Codes, kMore>;
    low_[0] = static_cast<uint32_t>(low), low_[1] = static_cast<uint32_t>(low >> 32);
    high_[0] = static_cast<uint32_t>(high), high_[1] = static_cast<uint32_t>(high >> 32);
  }

  // Calls use(kind), of type std::integral_constant: int8, or the dtype of the scales. That of
  // float8_e8m0 stands for codes without groups, too.
  template <typename Use>
  __device__ __forceinline__ void WithKind(const Use& use) const {
    if (dtype_ == DType::kInt8) {
      use(std::integral_constant<DType, DType::kInt8>());
    } else if (scale_dtype_ == DType::kFloat8E4M3) {
      use(std::integral_constant<DType, DType::kFloat8E4M3>());
    } else {
      use(std::integral_constant<DType, DType::kFloat8E8M0>());
    }
  }

  // The first and the last eight products of a chunk: zeros if it does not exist. more: its last
  // eight numbers, of int8.
  template <DType kKind>
  __device__ __forceinline__ void Multiply(const CodedChunk& chunk, const CodedChunk& more,
                                           uint8_t scale, bool exists,
                                           FourPairs (&products)[2]) const {
    if constexpr (kKind == DType::kInt8) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t pairs[2];
        const uint32_t word = (i < 2 ? chunk : more).words[i % 2];
        gpu::Expand(exists ? word : 0, int8_t{}, pairs, E{});
        products[i / 2].pair[i % 2 * 2] = pairs[0];
        products[i / 2].pair[i % 2 * 2 + 1] = pairs[1];
      }
      return;
    }
    const uint32_t factor = exists ? Factor<kKind>(scale) : 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t codes = chunk.words[i / 2] >> i % 2 * 16;
      const uint32_t raised =
          gpu::LookUpPositive(low_, codes) | gpu::LookUpPositive(high_, codes ^ 0x8888);
      uint32_t pairs[2];
      gpu::ExpandRaised(raised, pairs, E{});
      products[i / 2].pair[i % 2 * 2] = gpu::MultiplyPairs(pairs[0], factor, E{});
      products[i / 2].pair[i % 2 * 2 + 1] = gpu::MultiplyPairs(pairs[1], factor, E{});
    }
  }

 private:
  // A scale times the unit of the codes, twice.
  template <DType kKind>
  __device__ __forceinline__ uint32_t Factor(uint8_t scale) const {
    if constexpr (kKind == DType::kFloat8E4M3) {
      uint32_t pairs[2];
      gpu::Expand(scale * 0x0101, Float8E4M3{}, pairs, E{});
      return gpu::MultiplyPairs(pairs[0], unit_, E{});
    }
    if (!IsQuantized(scale_dtype_)) return unit_;
    const float power = ::xla_gpu::ToFloat(Float8E8M0{scale});
    return gpu::MultiplyPairs(gpu::Pack(power, power, E{}), unit_, E{});
  }

  const DType dtype_;
  const DType scale_dtype_;
  uint32_t unit_;
  uint32_t low_[2];   // of codes below 8, raised
  uint32_t high_[2];  // of the others
};

// The factors of the numbers of a row, one number after the other.
class FactorsOfRow {
 public:
  __device__ __forceinline__ FactorsOfRow(const ScaledNumbers& numbers, int64_t first)
      : numbers_(numbers), first_(first) {}

  __device__ __forceinline__ float Of(int d) {
    if (d == end_) {
      factor_ = numbers_.Factor(first_, group_++);
      end_ += numbers_.GroupSize();
    }
    return factor_;
  }

 private:
  const ScaledNumbers& numbers_;
  const int64_t first_;
  int group_ = 0;
  int end_ = 0;
  float factor_ = 0;
};

}  // namespace xla_gpu::paged_attention
