"""The names of ``jax.experimental.pallas.ops.gpu``: ``paged_attention``."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_frontend._call import takes_arrays
from jax_frontend.compat._common import decode
from shared_ffi.spec import shape_error

OP = "pallas_gpu.paged_attention"


@takes_arrays(OP)
def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array | None,
    k_scales_pages: jax.Array | None = None,
    v_scales_pages: jax.Array | None = None,
    *,
    block_h: int = 16,
    pages_per_compute_block: int = 8,
    k_splits: int = 16,
    num_warps: int = 8,
    num_stages: int = 2,
    interpret: bool = False,
    debug: bool = False,
    mask_value: float | None = None,
    attn_logits_soft_cap: float | None = None,
) -> jax.Array:
    """Attention of one query token of each sequence over a paged cache. Logits are not scaled.

    Args:
        q: ``[batch_size, num_heads, head_dim]``, float32, float16 or bfloat16.
        k_pages: ``[num_kv_heads, total_num_pages, page_size, head_dim]``, dtype of ``q``, or
            float8_e4m3fn, float8_e5m2 or int8.
        v_pages: as ``k_pages``, and of its dtype.
        block_tables: ``[batch_size, pages_per_sequence]`` int32.
        lengths: ``[batch_size]`` int32. 0 is an inactive slot, whose output is zero. None: every
            sequence fills its pages.
        k_scales_pages, v_scales_pages: ``[num_kv_heads, total_num_pages, page_size]``: factors of
            the numbers in a cache of 8 bits. They are transposed in each call.
        mask_value: None or at most -10000: masked positions do not enter the softmax.
        attn_logits_soft_cap: as ``paged_attention``'s ``soft_cap``.
        block_h, pages_per_compute_block, k_splits, num_warps, num_stages, interpret, debug: tune or
            debug the Pallas kernel; not used.

    Returns:
        ``[batch_size, num_heads, head_dim]``, dtype of ``q``.

    Raises:
        ValueError, TypeError: as ``paged_attention``.
    """
    for name, scale in (("k_scales_pages", k_scales_pages), ("v_scales_pages", v_scales_pages)):
        if scale is not None and scale.shape != k_pages.shape[:-1]:
            rule, remedy = str(list(k_pages.shape[:-1])), "It has a scale for each row of k_pages"
            raise shape_error(OP, name, rule, scale.shape, remedy)
    if lengths is None:
        capacity = block_tables.shape[1] * k_pages.shape[2]
        lengths = jnp.full(q.shape[0], capacity, jnp.int32)
    return decode(
        OP,
        q,
        k_pages,
        v_pages,
        lengths,
        block_tables,
        soft_cap=attn_logits_soft_cap,
        mask_value=mask_value,
        k_scale=k_scales_pages,
        v_scale=v_scales_pages,
    )
