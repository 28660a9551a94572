// Whether the slots and positions of a call of kv_cache_update are legal. No XLA headers: the CPU
// handler asks here, and so does Python for calls on CUDA.
#pragma once

#include <string>

#include "../str_cat.h"
#include "params.h"

namespace xla_gpu::kv_cache_update {

// Names the first token whose slot is past the end of the cache, or that has a slot and no row of
// cos_sin_cache; empty if all tokens are legal.
inline std::string TokenError(const Params& p) {
  const Rotary& rotary = p.rotary;
  for (int64_t token = 0; token < p.num_tokens; ++token) {
    const int64_t slot = p.Slot(token);
    if (slot >= p.NumSlots()) {
      return StrCat("slot_mapping[", token,
                    "] must be below num_blocks * block_size=", p.NumSlots(),
                    " (negative for padding); got ", slot,
                    ". Correct the slot, or give kv_cache more blocks");
    }
    if (slot < 0 || rotary.positions.data == nullptr) continue;
    const int64_t position = rotary.positions.At(token);
    if (!rotary.HasRow(position)) {
      return StrCat("positions[", token,
                    "] must be from 0 to max_positions - 1=", rotary.max_positions - 1,
                    ", as the token has a slot; got ", position,
                    ". Correct the position, or give cos_sin_cache more rows");
    }
  }
  return {};
}

}  // namespace xla_gpu::kv_cache_update
