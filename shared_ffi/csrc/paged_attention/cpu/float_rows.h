// K or V as float32, multiplied by scales: where groups of a row have scales of their own, or
// numbers of 4 bits are fractions. A cache so gives the bits that one of float32 with the same
// numbers gives to queries of float32.
#pragma once

#include "coded_rows.h"
#include "mask.h"

namespace xla_gpu::paged_attention {
namespace {

// Memory for a KV tile and a kv head: for K, then for V, so that both fit the nearest cache. Null
// unless the call needs it.
inline char** FloatRowsOf(const Params& p, Arena* arena) {
  if (!p.NeedsFloat32Rows()) return nullptr;
  // Whole vectors are stored, also where a row or a group ends.
  const int64_t stride = RoundUp(p.head_size + kLanes, kCacheLineBytes / sizeof(float));
  float* const memory = arena->Take<float>(kMaxTile * stride);
  char** const rows = arena->Take<char*>(kMaxTile);
  for (int64_t j = 0; j < kMaxTile; ++j) rows[j] = reinterpret_cast<char*>(memory + j * stride);
  return rows;
}

// Expands K, or V.
class FloatRows {
 public:
  // Nothing is expanded if `rows` is null.
  //   row_size: numbers of a row; scale: for rows without groups
  FloatRows(char** rows, DType dtype, int64_t row_size, const KvScales& scale,
            const GroupScales& groups, Arena* arena)
      : dtype_(dtype), row_size_(row_size), scales_(groups), rows_(rows) {
    if (!AreUsed()) return;
    if (groups.data == nullptr) scales_ = InOneGroup(scale, row_size);
    num_groups_ = CeilDiv(row_size, scales_.group_size);
    gathered_ = arena->Take<char>(kMaxTile * num_groups_ * SizeOfScale());
    factors_ = arena->Take<float>(kMaxTile * num_groups_);
  }

  bool AreUsed() const { return rows_ != nullptr; }
  bool HaveScales() const { return AreUsed() && scales_.data != nullptr; }

  // The scales of block 0, position 0 and kv head 0, and the bytes from there to others.
  const char* FirstScales() const { return static_cast<const char*>(scales_.data); }
  int64_t ScalesOffset(int64_t block, int64_t position, int64_t head) const {
    return SizeOfScale() * scales_.Offset(block, position, head);
  }

#ifdef XLA_GPU_READS_CODES
  // Whether the rows can be read by way of CodedRows.
  bool AreCodes() const {
    const int64_t size = scales_.group_size;
    const bool has_shift = num_groups_ == 1 || (size & (size - 1)) == 0;
    return AreUsed() && Is4Bit(dtype_) && row_size_ % kBlock == 0 && size % kBlock == 0 &&
           has_shift;
  }

  // The first `count` rows, in the place of all those before.
  //   scales: of each row, if there are any
  CodedRows Codes(const RowPlaces& from, const RowPlaces& scales, int64_t count) const {
    ReadFactors(scales, count);
    const auto& table = dtype_ == DType::kInt4 ? kTable<Int4Codes> : kTable<Float4E2M1Codes>;
    return {from, factors_, num_groups_,
            num_groups_ == 1 ? 63 : __builtin_ctzll(scales_.group_size),
            WidenInt8(Load<Bytes>(table.numbers))};
  }
#endif

  // Expands the first `count` rows, in the place of all those before.
  //   scales: of each row, if there are any
  RowPlaces Expand(const RowPlaces& from, const RowPlaces& scales, int64_t count) const {
    ReadFactors(scales, count);
    switch (dtype_) {
      case DType::kFloat8E4M3:
        return Multiply<Float8E4M3>(from, count);
      case DType::kFloat8E5M2:
        return Multiply<Float8E5M2>(from, count);
      case DType::kInt4:
        return Multiply<Int4Codes>(from, count);
      case DType::kFloat4E2M1:
        return Multiply<Float4E2M1Codes>(from, count);
      default:
        return Multiply<int8_t>(from, count);
    }
  }

 private:
  // Numbers that are multiplied at once: those of most groups.
  static constexpr int64_t kBlock = 16;

  int64_t SizeOfScale() const { return SizeOf(scales_.dtype); }

  // Makes factors_ the scales of rows, each multiplied by the global scale and by the unit of the
  // numbers, a power of two.
  void ReadFactors(const RowPlaces& places, int64_t count) const {
    const float unit = dtype_ == DType::kFloat4E2M1 ? Float4E2M1Codes::kUnit : 1;
    if (scales_.data == nullptr) {
      for (int64_t j = 0; j < count; ++j) factors_[j] = unit;
      return;
    }
    switch (scales_.dtype) {
      case DType::kFloat32:
        return ReadFactorsAs<float>(places, count, unit);
      case DType::kFloat16:
        return ReadFactorsAs<Half>(places, count, unit);
      case DType::kBFloat16:
        return ReadFactorsAs<BFloat16>(places, count, unit);
      case DType::kFloat8E4M3:
        return ReadFactorsAs<Float8E4M3>(places, count, unit);
      default:
        return ReadFactorsAs<Float8E8M0>(places, count, unit);
    }
  }

  // A row has fewer scales than a vector, so those of all rows are converted side by side. They
  // fill whole vectors: `count` is whole steps.
  template <typename S>
  void ReadFactorsAs(const RowPlaces& places, int64_t count, float unit) const {
    const float by = unit * (scales_.global == nullptr ? 1.0f : *scales_.global);
    const int64_t num_groups = num_groups_, stride = scales_.group_stride;
    S* const gathered = reinterpret_cast<S*>(gathered_);
    for (int64_t j = 0; j < count; ++j) {
      const auto* const scales = reinterpret_cast<const S*>(places.positions[j] + places.offset);
      S* const to = gathered + j * num_groups;
      if (stride == 1) {
        ForEachBlock<8>(0, num_groups, [&](auto size, int64_t i) {
          std::memcpy(to + i, scales + i, size * sizeof(S));
        });
      } else {
        for (int64_t i = 0; i < num_groups; ++i) to[i] = scales[i * stride];
      }
    }
    for (int64_t i = 0; i < count * num_groups; i += kLanes) {
      Store(LoadWide(gathered + i, kLanes) * by, factors_ + i);
    }
  }

  // Multiplies the numbers of rows by factors_.
  template <typename T>
  RowPlaces Multiply(const RowPlaces& from, int64_t count) const {
    const int64_t row_size = row_size_, group_size = scales_.group_size;
    for (int64_t j = 0; j < count; ++j) {
      const char* const row = from.positions[j] + from.offset;
      auto* const products = reinterpret_cast<float*>(rows_[j]);
      const float* factor = factors_ + j * num_groups_;
      const auto multiply_block = [&](int64_t d, float by) __attribute__((always_inline)) {
        Lanes numbers[kBlock / kLanes];
        NumbersOf<T>::LoadBlock(row, d, numbers);
#pragma GCC unroll 4
        for (int i = 0; i < kBlock / kLanes; ++i) Store(numbers[i] * by, products + d + i * kLanes);
      };
      if (group_size == kBlock && row_size % kBlock == 0) {
        for (int64_t d = 0; d < row_size; d += kBlock) multiply_block(d, *factor++);
        continue;
      }
      for (int64_t d = 0; d < row_size; ++factor) {
        const int64_t end = Smaller(d + group_size, row_size);
        for (; d + kBlock <= end; d += kBlock) multiply_block(d, *factor);
        for (; d < end; ++d) products[d] = NumbersOf<T>::At(row, d) * *factor;
      }
    }
    return {rows_, 0};
  }

  const DType dtype_;
  const int64_t row_size_;
  GroupScales scales_;
  char** const rows_;         // [kMaxTile]
  int64_t num_groups_ = 0;    // of a row
  char* gathered_ = nullptr;  // [kMaxTile, num_groups_]: the scales
  float* factors_ = nullptr;  // the same: what the numbers are multiplied by
};

}  // namespace
}  // namespace xla_gpu::paged_attention
