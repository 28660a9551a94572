"""Version 3 of ragged paged attention, with the arguments of sglang-jax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_frontend._call import takes_arrays
from jax_frontend.compat._common import (
    OF_DISTRIBUTION,
    OF_SINKS,
    PACKED_ROWS,
    check_shape,
    check_starts,
    refuse,
    update_and_attend,
)
from shared_ffi.spec import shape_error, value_error

OP = "sglang_jax.ragged_paged_attention"


@takes_arrays(OP)
def ragged_paged_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    kv_cache_fused: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    cu_kv_lens: jax.Array,
    distribution: jax.Array,
    custom_mask: jax.Array | None = None,
    attention_sink: jax.Array | float | None = None,
    *,
    causal: int = 1,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    xai_temperature_len: float | None = None,
    softmax_dtype: Any = None,
    chunk_prefill_size: int | None = None,
    d_block_sizes: tuple[int, int, int, int] | None = None,
    p_block_sizes: tuple[int, int, int, int] | None = None,
    m_block_sizes: tuple[int, int, int, int] | None = None,
    vmem_limit_bytes: int | None = None,
    out_dtype: Any = None,
    skip_kv_mask: bool = False,
    disable_semaphore_checks: bool = True,
    debug_mode: bool = False,
    mask_aligned_to_cu_kv: bool = False,
    max_pages_per_seq: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Writes new keys and values into the cache, which is donated, and attends to it.

    The arguments and results are those of ``ragged_paged_attention`` in sglang-jax's
    ``ragged_paged_attention_v3``.

    Args:
        queries: ``[max_num_tokens, num_q_heads, head_dim]``, float32, float16 or bfloat16.
        keys: ``[max_num_tokens, num_kv_heads, head_dim]``, dtype of the cache.
        values: as ``keys``.
        kv_cache_fused: ``[num_pages, page_size, 2 * num_kv_heads // packing, packing, head_dim]``,
            as ``ragged_paged_attention_v3``'s ``kv_cache``.
        kv_lens: ``[max_num_seqs]`` int32, this call's tokens included.
        page_indices: ``[num_page_indices]`` int32: the pages of all sequences, one sequence after
            the other. Sequence s has those from ``ceil(cu_kv_lens[s] / page_size)``.
        cu_q_lens, cu_kv_lens: ``[max_num_seqs + 1]`` int32.
        distribution: ``[3]`` int32. The last entry is the number of sequences; the others are not
            used.
        custom_mask: must be None.
        attention_sink: ``[num_q_heads]``, or one number for all heads.
        causal: 0: attend to later positions, too.
        sm_scale, sliding_window, soft_cap, out_dtype: as in ``ragged_paged_attention_v3``.
        q_scale, k_scale, v_scale: as there; queries are not quantized.
        mask_value: None or at most -10000: masked positions do not enter the softmax.
        xai_temperature_len: must be None.
        softmax_dtype: None or float32, which the softmax has in any case.
        mask_aligned_to_cu_kv: says how ``custom_mask`` is packed; not used.
        max_pages_per_seq: an addition: no sequence has more pages than this. A page table with
            ``[max_num_seqs, max_pages_per_seq]`` entries is built in each call. None:
            ``num_page_indices``.

    The arguments from ``chunk_prefill_size`` to ``debug_mode`` tune or debug the TPU's kernel and
    are not used.

    Returns:
        The output, ``[max_num_tokens, num_q_heads, head_dim]``, zero for tokens of no sequence; and
        the updated cache.

    Raises:
        ValueError, TypeError: as ``paged_attention``; ValueError also for an option that must be
            None.
    """
    if causal not in (0, 1):
        remedy = "0 attends to later positions, too"
        raise value_error(OP, "causal", "be 0 or 1", causal, remedy)
    refuse(OP, custom_mask=custom_mask, xai_temperature_len=xai_temperature_len)
    if softmax_dtype is not None and jnp.dtype(softmax_dtype) != jnp.float32:
        refuse(OP, softmax_dtype=jnp.dtype(softmax_dtype).name)
    check_shape(OP, "distribution", distribution, (3,), OF_DISTRIBUTION)
    check_starts(OP, "cu_q_lens", cu_q_lens, kv_lens)
    check_starts(OP, "cu_kv_lens", cu_kv_lens, kv_lens)
    if page_indices.ndim != 1 or page_indices.shape[0] == 0:
        rule = "[num_page_indices], of at least one page"
        remedy = "It has the pages of one sequence after another"
        raise shape_error(OP, "page_indices", rule, page_indices.shape, remedy)
    if kv_cache_fused.ndim != 5:
        rule = "[num_pages, page_size, rows // packing, packing, width]"
        remedy = "Rows are the K of a head, then its V"
        raise shape_error(OP, "kv_cache_fused", rule, kv_cache_fused.shape, remedy)
    if attention_sink is not None:
        attention_sink = jnp.asarray(attention_sink)
        if attention_sink.ndim == 0:
            attention_sink = jnp.broadcast_to(attention_sink, queries.shape[1:2])
        check_shape(OP, "attention_sink", attention_sink, queries.shape[1:2], OF_SINKS)
    num_pages = page_indices.shape[0]
    if max_pages_per_seq is not None:
        num_pages = min(num_pages, max_pages_per_seq)
    starts = -(-cu_kv_lens[:-1] // kv_cache_fused.shape[1])
    places = starts[:, None] + jnp.arange(num_pages, dtype=starts.dtype)[None]
    return update_and_attend(
        OP,
        queries,
        keys,
        values,
        kv_cache_fused,
        kv_lens,
        # A place past either end is no page: -1 is an error where a query attends to it.
        jnp.asarray(page_indices)
        .at[places]
        .get(mode="fill", fill_value=-1, wrap_negative_indices=False),
        cu_q_lens,
        distribution[2],
        attention_sink,
        kv_layout=PACKED_ROWS,
        scale=sm_scale,
        causal=causal == 1,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        k_scale=k_scale,
        v_scale=v_scale,
        mask_value=mask_value,
        out_dtype=out_dtype,
    )
