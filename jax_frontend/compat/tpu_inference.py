"""The names of tpu-inference's ``kernels.ragged_paged_attention`` and ``attention_interface``.

``ragged_paged_attention`` is version 3, as in its ``v3.kernel``; ``ragged_paged_attention_v2`` is
the function of ``v2.kernel``, which only attends: ``kv_cache_update``, as in its
``v2.ragged_kv_cache_update``, writes the cache.
"""

from __future__ import annotations

from jax_frontend.compat._kv_cache_update_v2 import kv_cache_update
from jax_frontend.compat._ragged_v2 import ragged_paged_attention as ragged_paged_attention_v2
from jax_frontend.compat._ragged_v3 import ragged_paged_attention_hd64
from jax_frontend.compat._ragged_v3 import ragged_paged_attention_v3 as ragged_paged_attention
from jax_frontend.compat._sharded_ragged import sharded_ragged_paged_attention

__all__ = [
    "kv_cache_update",
    "ragged_paged_attention",
    "ragged_paged_attention_hd64",
    "ragged_paged_attention_v2",
    "sharded_ragged_paged_attention",
]
