// Whether the slots of a call of kv_cache_update are legal. No XLA headers: the CPU handler asks
// here, and so does Python for calls on CUDA.
#pragma once

#include <string>

#include "../str_cat.h"
#include "params.h"

namespace xla_gpu::kv_cache_update {

// Names the first token whose slot is past the end of the cache; empty if all slots are legal.
inline std::string SlotFault(const Params& p) {
  for (int64_t token = 0; token < p.num_tokens; ++token) {
    if (p.Slot(token) >= p.NumSlots()) {
      return StrCat("slot_mapping[", token,
                    "] must be below num_blocks * block_size=", p.NumSlots(),
                    " (negative for padding); got ", p.Slot(token));
    }
  }
  return {};
}

}  // namespace xla_gpu::kv_cache_update
