"""The TPU's ragged paged attention for a head size of 64, which also writes the cache, for JAX."""

from __future__ import annotations

from typing import Any

import jax

from jax_frontend._call import takes_arrays
from jax_frontend.compat._update_and_attend import PACKED_PAIRS, ragged
from shared_ffi.spec import shape_error

OP = "ragged_paged_attention_hd64"


@takes_arrays(OP)
def ragged_paged_attention_hd64(
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
    chunk_prefill_size: int | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
    debug_mode: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Writes new keys and values into the cache and attends to it: for code written for TPUs.

    It has the arguments and results of ``ragged_paged_attention_hd64`` of tpu-inference, and
    donates ``kv_cache`` as it does. ``use_causal_mask``, ``update_kv_cache`` and ``out_dtype`` are
    additions. The shape of a cache does not say whether it is this function's
    or that of ``ragged_paged_attention_v3``: with one kv head and 16 bits, both caches have the
    shape ``[total_num_pages, page_size, 1, 2, 128]``.

    Args:
        queries: ``[max_num_tokens, num_q_heads, 64]``, float32, float16 or bfloat16.
        keys: ``[max_num_tokens, num_kv_heads, 64]``, dtype of the cache.
        values: as ``keys``.
        kv_cache: ``[total_num_pages, page_size, num_kv_heads // packing, packing, 128]``: kv head h
            in row h, its K in the first half of the row, its V in the second. Rows may be padded,
            as they are on the TPU.

    The other arguments are those of ``ragged_paged_attention_v3``.

    Returns:
        The output, ``[max_num_tokens, num_q_heads, 64]``, zero for tokens of no sequence; and the
        updated cache.

    Raises:
        ValueError, TypeError: as ``paged_attention``.
    """
    if queries.ndim != 3 or queries.shape[2] != 64:
        raise shape_error(OP, "queries", "[num_tokens, num_q_heads, 64]", queries.shape)
    if kv_cache.ndim != 5 or kv_cache.shape[4] != 128:
        rule = "[num_pages, page_size, rows // packing, packing, 128]"
        raise shape_error(OP, "kv_cache", rule, kv_cache.shape)
    return ragged(
        OP,
        queries,
        keys,
        values,
        kv_cache,
        kv_lens,
        page_indices,
        cu_q_lens,
        distribution,
        attention_sink,
        kv_layout=PACKED_PAIRS,
        scale=sm_scale,
        causal=use_causal_mask,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        update=update_kv_cache,
        k_scale=k_scale,
        v_scale=v_scale,
        mask_value=mask_value,
        out_dtype=out_dtype,
    )
