// Calls without the features that few calls have. Kernels for them alone have less code.
#pragma once

#include "../params.h"

namespace xla_gpu::paged_attention {

inline bool IsPlain(const Params& p) {
  return p.is_causal && !p.is_latent && p.soft_cap == 0 && p.alibi_slopes == nullptr &&
         p.tree_mask == nullptr && p.bidirectional_ranges == nullptr;
}

// The parameters of a call that IsPlain, as the compiler sees it, too. And that ScalesAreUniform,
// if they are.
__device__ __forceinline__ Params PlainParams(const Params& p, bool scales_are_uniform) {
  Params plain = p;
  plain.is_causal = true;
  plain.window_right = 0;
  plain.causal = nullptr;
  plain.is_latent = false;
  plain.soft_cap = 0;
  plain.alibi_slopes = nullptr;
  plain.tree_mask = plain.bidirectional_ranges = nullptr;
  if (scales_are_uniform) {
    plain.k_scale.block_stride = plain.k_scale.position_stride = 0;
    plain.v_scale.block_stride = plain.v_scale.position_stride = 0;
  }
  return plain;
}

}  // namespace xla_gpu::paged_attention
