"""``tpu_inference`` by the name that the project has taken: vLLM JAX, vllm-jax. Programs import its
package as ``tpu_inference``."""

from __future__ import annotations

from jax_frontend.compat.tpu_inference import (
    kv_cache_update,
    ragged_paged_attention,
    ragged_paged_attention_hd64,
    ragged_paged_attention_v2,
    sharded_ragged_paged_attention,
)

__all__ = [
    "kv_cache_update",
    "ragged_paged_attention",
    "ragged_paged_attention_hd64",
    "ragged_paged_attention_v2",
    "sharded_ragged_paged_attention",
]
