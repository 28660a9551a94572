// Which bytes a strided tensor's elements lie in, and whether two tensors share any.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory_resource>
#include <numeric>
#include <vector>

namespace xla_gpu {

// The bytes of a tensor's elements, counted from its first byte: runs of `width` bytes, one for
// each choice of a multiple of each stride. No stride is negative, as PyTorch's are not.
class Elements {
 public:
  struct Dimension {
    int64_t size;    // at least 2
    int64_t stride;  // in bytes, at least `width`
  };

  // The elements of a tensor of `rank` dimensions; strides count elements.
  Elements(int64_t element_bytes, const int64_t* sizes, const int64_t* strides, size_t rank,
           std::pmr::memory_resource* memory = std::pmr::get_default_resource())
      : dimensions_(memory), width_(element_bytes) {
    if (std::count(sizes, sizes + rank, 0) > 0) width_ = 0;
    if (width_ == 0) return;
    dimensions_.reserve(rank);
    for (size_t i = 0; i < rank; ++i) {
      if (sizes[i] > 1 && strides[i] > 0) {
        dimensions_.push_back({sizes[i], strides[i] * element_bytes});
      }
    }
    std::sort(dimensions_.begin(), dimensions_.end(),
              [](const Dimension& a, const Dimension& b) { return a.stride > b.stride; });
    while (!dimensions_.empty() && dimensions_.back().stride <= width_) {
      width_ += (dimensions_.back().size - 1) * dimensions_.back().stride;
      dimensions_.pop_back();
    }
    num_bytes_ = width_;
    for (const auto& [size, stride] : dimensions_) {
      num_bytes_ += (size - 1) * stride;
      common_stride_ = std::gcd(common_stride_, stride);
    }
  }

  // From the first to the last byte.
  int64_t num_bytes() const { return num_bytes_; }

  // Whether two tensors share a byte; `distance`: from the first byte of this one to that of the
  // other. Exact for all that takes kMaxSteps steps, and where the places modulo a common divisor
  // of the strides tell the two apart: so for all views whose strides agree from the outside in,
  // such as columns, heads, halves or ranges of blocks of one tensor. Others are said to share one:
  // to refuse a call that would be right is better than to lose what it writes.
  bool ShareBytes(const Elements& other, int64_t distance) const {
    if (width_ == 0 || other.width_ == 0 || !AreNear(num_bytes_, other.num_bytes_, distance)) {
      return false;
    }
    if (const int64_t common = std::gcd(common_stride_, other.common_stride_); common > 0) {
      const int64_t place = (distance % common + common) % common;
      if (width_ <= place && place + other.width_ <= common) return false;
    }
    int64_t steps_left = kMaxSteps;
    return Meet({*this}, {other}, distance, &steps_left);
  }

 private:
  static constexpr int64_t kMaxSteps = 1000;  // 10 microseconds

  // The dimensions of a tensor from one on.
  struct Part {
    const Dimension* first;
    const Dimension* end;
    int64_t width;
    int64_t num_bytes;

    Part(const Elements& all)
        : first(all.dimensions_.data()),
          end(first + all.dimensions_.size()),
          width(all.width_),
          num_bytes(all.num_bytes_) {}
    int64_t size() const { return first == end ? 1 : first->size; }
    int64_t stride() const { return first == end ? 0 : first->stride; }
    Part Inner() const {
      Part inner = *this;
      inner.num_bytes -= (size() - 1) * stride();
      ++inner.first;
      return inner;
    }
  };

  // Whether [0, a) and [distance, distance + b) meet.
  static bool AreNear(int64_t a, int64_t b, int64_t distance) {
    return distance < a && -b < distance;
  }

  // Whether parts of two tensors share a byte.
  static bool Meet(const Part& a, const Part& b, int64_t distance, int64_t* steps_left) {
    if (!AreNear(a.num_bytes, b.num_bytes, distance)) return false;
    if (a.first == a.end && b.first == b.end) return true;
    if (--*steps_left < 0) return true;
    // The numbers along the outermost stride of either; only their difference matters where both
    // have this stride.
    const int64_t stride = std::max(a.stride(), b.stride());
    const bool is_of_a = a.stride() == stride, is_of_b = b.stride() == stride;
    const Part inner_a = is_of_a ? a.Inner() : a, inner_b = is_of_b ? b.Inner() : b;
    // The first difference that brings the two near each other.
    const int64_t lowest = is_of_a ? 1 - a.size() : 0, highest = is_of_b ? b.size() - 1 : 0;
    const int64_t first = FloorDiv(-inner_b.num_bytes - distance, stride) + 1;
    for (int64_t n = std::max(lowest, first); n <= highest; ++n) {
      const int64_t inner_distance = distance + n * stride;
      if (inner_distance >= inner_a.num_bytes) break;
      if (Meet(inner_a, inner_b, inner_distance, steps_left)) return true;
    }
    return false;
  }

  static int64_t FloorDiv(int64_t a, int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }

  std::pmr::vector<Dimension> dimensions_;  // the largest stride first
  int64_t width_;
  int64_t num_bytes_ = 0;
  int64_t common_stride_ = 0;  // the greatest common divisor of the strides
};

}  // namespace xla_gpu
