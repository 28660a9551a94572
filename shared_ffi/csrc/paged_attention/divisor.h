// Division by a number that does not change during a call, without a division.
#pragma once

#include <cstdint>

#include "../storage.h"

namespace xla_gpu::paged_attention {

// Divides by a number, which is positive, with a product and a shift.
struct Divisor {
  uint32_t number;  // INT32_MAX if it is larger
  uint32_t factor;
  int32_t shift;

  Divisor() = default;
  XLA_GPU_HOST_DEVICE explicit Divisor(int64_t divisor)
      : number(static_cast<uint32_t>(divisor < INT32_MAX ? divisor : INT32_MAX)), shift(0) {
    while (int64_t{1} << shift < number) ++shift;
    // 2^(31 + shift) / number, rounded up. It is below 2^32, as 2^shift is below 2 * number. The
    // rounding adds less than n / 2^(31 + shift) to a quotient of n, which is below 1 / number.
    factor = static_cast<uint32_t>(((uint64_t{1} << (31 + shift)) + number - 1) / number);
  }

  // n / number, for n from 0 to 2^31 - 1. The upper half of a product is one instruction, which the
  // compiler does not always see.
  XLA_GPU_HOST_DEVICE uint32_t Quotient(uint32_t n) const {
#ifdef __CUDA_ARCH__
    return __umulhi(2 * n, factor) >> shift;
#else
    return static_cast<uint32_t>(uint64_t{2 * n} * factor >> 32) >> shift;
#endif
  }
};

}  // namespace xla_gpu::paged_attention
