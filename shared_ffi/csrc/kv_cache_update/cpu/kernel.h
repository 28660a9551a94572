// The arithmetic of a head (../norm.h, ../rotary.h, ../hadamard.h), compiled once for each
// instruction set.
#pragma once

#include <cstdint>

#include "../../storage.h"

namespace xla_gpu::kv_cache_update {

struct HeadsKernel {
  const char* instruction_set;
  float (*sum_of_squares)(DType dtype, const void* numbers, int64_t count);
  // Writes a head times inverse_rms times its weights. `rounds_first`: to the dtype between the
  // two, as well. The head may be changed in place.
  void (*normalize)(DType dtype, const void* head, const float* weights, int64_t count,
                    float inverse_rms, bool rounds_first, void* to);
  // Writes the first 2 * num_pairs numbers of a head, rotated by as many cosines, then sines. The
  // head may be changed in place.
  void (*rotate)(DType dtype, const void* head, const float* cos_sin, int64_t num_pairs,
                 bool is_interleaved, void* to);
  // Writes a head as its transform changes it. `signs`: null where all of them are 1. `to` has room
  // for `count` floats, rounded up to kMostLanes.
  void (*transform)(DType dtype, const void* head, const float* signs, int64_t count, float* to);
  // Rounds numbers to a dtype.
  void (*narrow)(const float* numbers, int64_t count, DType dtype, void* to);
};

inline constexpr int64_t kMostLanes = 16;

// That of the instruction set in use.
const HeadsKernel& ChosenHeadsKernel();

}  // namespace xla_gpu::kv_cache_update
