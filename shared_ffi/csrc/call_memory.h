// The memory that a call needs until it ends.
#pragma once

#include <cstddef>
#include <memory_resource>

namespace xla_gpu {

// It lies on the stack, unless more is needed. A block of the heap for each array would take 70
// instructions and touch three cache lines, which are cold in a model.
class CallMemory final : public std::pmr::monotonic_buffer_resource {
 public:
  CallMemory() : monotonic_buffer_resource(bytes_, sizeof bytes_) {}

 private:
  alignas(std::max_align_t) char bytes_[2048];
};

}  // namespace xla_gpu
