"""Sparse attention in JAX: functions to copy, which give attention another block table."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_frontend import Batch, merge_attention, paged_attention

LAST = jnp.iinfo(jnp.int32).max


def blocks_of_tokens(batch: Batch, num_tokens: int) -> jax.Array:
    """The row of block_tables of each token's sequence; any row for padding."""
    max_seqs = len(batch.block_tables)
    is_real = jnp.arange(max_seqs) < batch.num_seqs
    ended = jnp.arange(num_tokens)[:, None] >= batch.query_start_loc[1:]
    return jnp.asarray(batch.block_tables)[(ended & is_real).sum(-1).clip(max=max_seqs - 1)]


def attend_to_positions(
    query: jax.Array,
    kv_cache: jax.Array,
    chosen: jax.Array,
    batch: Batch,
    scale: float,
    **options: Any,
) -> Any:
    """Attends to chosen positions, [num_tokens, k], of a cache with one row for all heads.

    kv_cache: [num_blocks, block_size, head_size].
    """
    num_tokens, block_size = len(query), kv_cache.shape[1]
    order = jnp.sort(jnp.where(chosen < 0, LAST, chosen))
    blocks = jnp.take_along_axis(blocks_of_tokens(batch, num_tokens), order // block_size, 1)
    return paged_attention(
        query,
        kv_cache.reshape(-1, 1, kv_cache.shape[-1]),
        (chosen >= 0).sum(-1),
        blocks * block_size + order % block_size,
        jnp.arange(num_tokens + 1),
        batch.query_start_loc[batch.num_seqs],
        scale,
        max_query_len=1,
        causal=False,  # a token may choose nothing
        **options,
    )


def attend_to_blocks(
    query: jax.Array,
    kv_cache: jax.Array,
    chosen: jax.Array,
    batch: Batch,
    scale: float,
    **options: Any,
) -> jax.Array:
    """Attends to chosen blocks, [num_tokens, num_kv_heads, k], up to the token's own position.

    kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size], whose layout is "nhb(2d)".
    """
    _, num_kv_heads, block_size, width = kv_cache.shape
    num_rows = len(query) * num_kv_heads
    order = jnp.sort(jnp.where(chosen < 0, LAST, chosen))
    blocks = jnp.take_along_axis(blocks_of_tokens(batch, len(query))[:, None], order, 2)
    newest, offset = batch.positions // block_size, batch.positions % block_size
    has_newest = (chosen == newest[:, None, None]).any(-1)
    past = jnp.where(has_newest, block_size - 1 - offset[:, None], 0)  # positions after the token
    output = paged_attention(
        query.reshape(num_rows, -1, query.shape[-1]),
        kv_cache.reshape(-1, 1, block_size, width),
        (block_size * (chosen >= 0).sum(-1) - past).reshape(-1),
        (blocks * num_kv_heads + jnp.arange(num_kv_heads)[:, None]).reshape(num_rows, -1),
        jnp.arange(num_rows + 1),
        batch.query_start_loc[batch.num_seqs] * num_kv_heads,
        scale,
        kv_layout="nhb(2d)",
        max_query_len=1,
        causal=False,  # a token may choose nothing
        **options,
    )
    return output.reshape(query.shape)


def attend_to_window_and_entries(
    query: jax.Array,
    kv_cache: jax.Array,
    entries: jax.Array,
    chosen: jax.Array,
    batch: Batch,
    entry_tables: jax.Array,
    scale: float,
    window: int,
    sinks: jax.Array,
    **options: Any,
) -> jax.Array:
    """Attends to the newest positions, to chosen compressed entries, and to a sink."""
    near = paged_attention(
        query, kv_cache, *batch[3:], scale, window, sinks=sinks, return_lse=True, **options
    )
    of_entries = batch._replace(block_tables=entry_tables)
    far = attend_to_positions(query, entries, chosen, of_entries, scale, return_lse=True, **options)
    return merge_attention(*zip(near, far, strict=True))[0]
