"""Paged attention and cache updates for JAX, by the custom calls that PyTorch programs use, too.

``jax_frontend.compat`` has functions with the arguments of other libraries.
"""

try:
    import jax
except ImportError as _error:
    raise ImportError(
        "jax_frontend needs JAX, which is not installed: pip install 'xla-paged-attention[jax]'"
    ) from _error

from jax_frontend._vmap import batching as _batching  # registers the rule of jax.vmap
from jax_frontend.batch import (
    Batch,
    BatchHistory,
    BlockPool,
    check_batch,
    pad_batch,
    slot_mapping,
)
from jax_frontend.compat.tpu_inference import (
    ragged_paged_attention_hd64,
    ragged_paged_attention_v3,
)
from jax_frontend.compat.tpu_inference import ragged_paged_attention_v2 as ragged_paged_attention
from jax_frontend.hadamard import hadamard
from jax_frontend.kv_cache_update import kv_cache_update
from jax_frontend.merge_attention import merge_attention
from jax_frontend.paged_attention import paged_attention
from jax_frontend.simple_add import simple_add
from jax_frontend.varlen_attention import varlen_attention
from shared_ffi import __version__ as __version__

del jax, _batching

__all__ = [
    "Batch",
    "BatchHistory",
    "BlockPool",
    "check_batch",
    "hadamard",
    "kv_cache_update",
    "merge_attention",
    "pad_batch",
    "paged_attention",
    "ragged_paged_attention",
    "ragged_paged_attention_hd64",
    "ragged_paged_attention_v3",
    "simple_add",
    "slot_mapping",
    "varlen_attention",
]
