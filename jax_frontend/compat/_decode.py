"""What the paged attention kernels of Pallas have in common: one query for each sequence, K and V
in two arrays, heads first."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_frontend.paged_attention import paged_attention
from shared_ffi.paged_attention import check_mask_value
from shared_ffi.spec import shape_error


def decode(
    op: str,
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    lengths: jax.Array,
    page_indices: jax.Array,
    *,
    soft_cap: float | None,
    mask_value: float | None,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
) -> jax.Array:
    """Attends with one query of each sequence, at its last position, and no scale.

    A sequence of length 0 is an inactive slot. Its query would stand at position -1, which causal
    attention refuses. Hence ``causal=False``; for the last position the result is the same.

    Args:
        op: the public function, for messages.
        q: ``[batch_size, num_q_heads, head_dim]``.
        k_pages, v_pages: ``[num_kv_heads, num_pages, page_size, head_dim]``.
        k_scale, v_scale: ``[num_kv_heads, num_pages, page_size]``.
    """
    check_mask_value(op, mask_value)
    if q.ndim != 3:
        rule, remedy = "[batch_size, num_q_heads, head_dim]", "It has one token of each sequence"
        raise shape_error(op, "q", rule, q.shape, remedy)
    batch_size = q.shape[0]
    if lengths.shape != (batch_size,):
        rule, remedy = f"[batch_size={batch_size}]", "It has a length for each query"
        raise shape_error(op, "lengths", rule, lengths.shape, remedy)
    return paged_attention(
        q,
        k_pages,
        lengths,
        page_indices,
        jnp.arange(batch_size + 1, dtype=jnp.int32),
        jnp.asarray(batch_size, jnp.int32),
        1.0,
        soft_cap=soft_cap,
        value_cache=v_pages,
        kv_layout="hnbd",
        causal=False,
        max_query_len=1,
        k_scale=_heads_last(k_scale),
        v_scale=_heads_last(v_scale),
    )


def _heads_last(scale: jax.Array | None) -> jax.Array | None:
    return None if scale is None else jnp.moveaxis(scale, 0, -1).astype(jnp.float32)
