"""Version 3 of the TPU's ragged paged attention, which also writes the cache, for JAX."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_frontend.kv_cache_update import kv_cache_update
from jax_frontend.paged_attention import paged_attention

OP = "ragged_paged_attention_v3"

# Arguments that tune or debug the TPU kernel. They are accepted and ignored.
_TUNING = {
    "skip_kv_mask",
    "chunk_prefill_size",
    "d_block_sizes",
    "p_block_sizes",
    "m_block_sizes",
    "num_kv_pages_per_block",
    "num_queries_per_block",
    "vmem_limit_bytes",
    "debug_mode",
    "disable_bounds_checks",
    "disable_semaphore_checks",
}


def ragged_paged_attention_v3(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    kv_cache: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
    attention_sink: jax.Array | None = None,
    *,
    use_causal_mask: bool = True,
    update_kv_cache: bool = True,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    out_dtype: Any = None,
    mask_value: float | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    **tuning: Any,
) -> tuple[jax.Array, jax.Array]:
    """Writes new keys and values into the cache and attends to it: for code written for TPUs.

    It has the arguments and results of version 3 of the TPU kernel in tpu-inference and sglang-jax,
    and of its variant for a head size of 64. Like the TPU kernel, it donates ``kv_cache``. On GPUs
    and CPUs it makes one ``kv_cache_update`` and one ``paged_attention``.

    Args:
        queries: ``[max_num_tokens, num_q_heads, head_dim]``, float32, float16 or bfloat16.
        keys: ``[max_num_tokens, num_kv_heads, head_dim]``, dtype of the cache.
        values: as ``keys``.
        kv_cache: ``[total_num_pages, page_size, 2 * num_kv_heads // packing, packing, head_dim]``
            with K and V of a head side by side, and heads and head_dim padded as on the TPU; or,
            for a head_dim of 64, ``[total_num_pages, page_size, num_kv_heads // packing, packing,
            128]`` with K and V in one row.
        kv_lens: ``[max_num_seqs]`` int32, this call's tokens included.
        page_indices: ``[max_num_seqs * pages_per_seq]`` int32.
        cu_q_lens: ``[max_num_seqs + 1]`` int32.
        distribution: ``[3]`` int32. The last entry is the number of sequences; the others are not
            used.
        attention_sink: ``[num_q_heads]`` float32; see ``paged_attention``'s ``sinks``.
        use_causal_mask: False: attend to every position of the sequence, without a window.
        update_kv_cache: False: the cache holds keys and values already.
        sm_scale, sliding_window, soft_cap: as in ``paged_attention``.
        out_dtype: the dtype of the output; None: the dtype of ``queries``.
        mask_value: not used; masked positions do not enter the softmax.
        q_scale: not used; queries are not quantized.
        k_scale: the scale of the keys in the cache, a factor of the logits.
        v_scale: the scale of the values in the cache, a factor of the output.
        tuning: the TPU kernel's block sizes and debugging switches; not used.

    Returns:
        The output, ``[max_num_tokens, num_q_heads, head_dim]``, zero for tokens of no sequence; and
        the updated cache.

    Raises:
        ValueError, TypeError: as ``paged_attention``; TypeError also for an unknown argument.
    """
    if unknown := sorted(set(tuning) - _TUNING):
        raise TypeError(f"{OP}: no argument is called {unknown[0]}; got {tuning[unknown[0]]!r}")
    return _attend(
        queries,
        keys,
        values,
        kv_cache,
        kv_lens,
        page_indices,
        cu_q_lens,
        distribution,
        attention_sink,
        causal=use_causal_mask,
        update=update_kv_cache,
        scale=sm_scale if k_scale is None else sm_scale * k_scale,
        sliding_window=sliding_window if use_causal_mask else None,
        soft_cap=soft_cap,
        out_dtype=jnp.dtype(queries.dtype if out_dtype is None else out_dtype),
        v_scale=v_scale,
    )


@partial(
    jax.jit,
    static_argnames=("causal", "update", "scale", "sliding_window", "soft_cap", "out_dtype"),
    donate_argnames="kv_cache",
)
def _attend(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    kv_cache: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
    attention_sink: jax.Array | None,
    causal: bool,
    update: bool,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    out_dtype: Any,
    v_scale: float | None,
) -> tuple[jax.Array, jax.Array]:
    num_tokens, num_heads, head_size = queries.shape
    num_kv_heads = keys.shape[1]
    _, page_size, *packed_rows, width = kv_cache.shape
    rows = math.prod(packed_rows)
    # The layout describes the cache as it is: XLA would copy a cache to reshape it.
    if rows < 2 * num_kv_heads:  # K and V of a head are in one row
        layout, cache_heads, cache_size = "nbhh(2d)", rows, width // 2
    else:
        layout, cache_heads, cache_size = "nb(h2)(h2)d", rows // 2, width

    cache = kv_cache
    block_tables = page_indices.reshape(len(kv_lens), -1)
    if update:
        slots = _slots(num_tokens, page_size, kv_lens, block_tables, cu_q_lens, distribution[2])
        new_keys = _pad(keys, cache_heads, cache_size)
        new_values = _pad(values, cache_heads, cache_size)
        cache = kv_cache_update(cache, new_keys, new_values, slots, kv_layout=layout)
    group = num_heads // num_kv_heads
    sinks = attention_sink
    if sinks is not None:
        sinks = jnp.pad(sinks.astype(jnp.float32), (0, group * cache_heads - num_heads))
    output = paged_attention(
        _pad(queries, group * cache_heads, cache_size),
        cache,
        kv_lens,
        block_tables,
        cu_q_lens,
        distribution[2],
        scale,
        sliding_window,
        soft_cap,
        kv_layout=layout,
        sinks=sinks,
        causal=causal,
    )[:, :num_heads, :head_size]
    if v_scale is not None:
        output = output * v_scale
    return output.astype(out_dtype), cache


def _pad(array: jax.Array, num_heads: int, head_size: int) -> jax.Array:
    """Pads ``[num_tokens, heads, size]`` with zeros at the end."""
    _, heads, size = array.shape
    return jnp.pad(array, ((0, 0), (0, num_heads - heads), (0, head_size - size)))


def _slots(
    num_tokens: int,
    page_size: int,
    kv_lens: jax.Array,
    block_tables: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
) -> jax.Array:
    """The slot of each token; -1 for tokens that belong to no sequence."""
    tokens = jnp.arange(num_tokens)
    is_real = jnp.arange(len(kv_lens)) < num_seqs
    ends = jnp.where(is_real, cu_q_lens[1:], jnp.iinfo(jnp.int32).max)
    sequence = jnp.searchsorted(ends, tokens, side="right")
    position = kv_lens[sequence] - cu_q_lens[sequence + 1] + tokens
    page = block_tables[sequence, position // page_size]
    of_sequence = (cu_q_lens[0] <= tokens) & (tokens < cu_q_lens[num_seqs])
    return jnp.where(of_sequence, page * page_size + position % page_size, -1)
