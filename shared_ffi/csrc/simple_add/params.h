// simple_add: sum = a + b, element by element.
#pragma once

#include <cstdint>

namespace xla_gpu::simple_add {

struct Params {
  const float* a;  // [num_elements]
  const float* b;  // [num_elements]
  float* sum;      // [num_elements]
  int64_t num_elements;
};

}  // namespace xla_gpu::simple_add
