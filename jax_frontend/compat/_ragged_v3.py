"""Version 3 of the TPU's ragged paged attention, which also writes the cache, for JAX; and its
variant for a head size of 64."""

from __future__ import annotations

from typing import Any

import jax

from jax_frontend._call import takes_arrays
from jax_frontend.compat._update_and_attend import PACKED_PAIRS, PACKED_ROWS, ragged
from shared_ffi.spec import shape_error

OP = "ragged_paged_attention_v3"
OP_HD64 = "ragged_paged_attention_hd64"

# The options of `update_and_attend`, and what they are called here.
_OPTIONS = {"scale": "sm_scale", "causal": "use_causal_mask", "update": "update_kv_cache"} | {
    name: name
    for name in ("sliding_window", "soft_cap", "k_scale", "v_scale", "mask_value", "out_dtype")
}
_NAMES = ("page_indices", "cu_q_lens", "attention_sink")

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


@takes_arrays(OP)
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

    It has the arguments and results of version 3 of the TPU kernel in tpu-inference, and donates
    ``kv_cache`` as it does. The kernel's variant for a head size of 64 has a cache of its own:
    ``ragged_paged_attention_hd64``. On GPUs and CPUs this is one ``kv_cache_update`` and one
    ``paged_attention``.

    Args:
        queries: ``[max_num_tokens, num_q_heads, head_dim]``, float32, float16 or bfloat16.
        keys: ``[max_num_tokens, num_kv_heads, head_dim]``, dtype of the cache.
        values: as ``keys``.
        kv_cache: ``[total_num_pages, page_size, 2 * num_kv_heads // packing, packing, head_dim]``:
            the K of kv head h in row 2h, its V in row 2h + 1. Rows and head_dim may be padded, as
            they are on the TPU.
        kv_lens: ``[max_num_seqs]`` int32, this call's tokens included.
        page_indices: ``[max_num_seqs * pages_per_seq]`` int32.
        cu_q_lens: ``[max_num_seqs + 1]`` int32.
        distribution: ``[3]`` int32. The last entry is the number of sequences; the others are not
            used.
        attention_sink: ``[num_q_heads]`` float32; see ``paged_attention``'s ``sinks``.
        use_causal_mask: False: attend to later positions, too. ``sliding_window`` still limits how
            far back a query attends.
        update_kv_cache: False: the cache holds keys and values already.
        sm_scale, sliding_window, soft_cap: as in ``paged_attention``.
        out_dtype: the dtype of the output; None: the dtype of ``queries``.
        mask_value: None or at most -10000: masked positions do not enter the softmax.
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
    given = dict(locals())
    if unknown := sorted(set(tuning) - _TUNING):
        raise TypeError(
            f"{OP}: no argument is called {unknown[0]}; got {tuning[unknown[0]]!r}. Leave it out, "
            "or correct its name"
        )
    return ragged(
        OP,
        _NAMES,
        (queries, keys, values),
        *(kv_cache, kv_lens, page_indices, cu_q_lens, distribution, attention_sink),
        kv_layout=PACKED_ROWS,
        **{ours: given[theirs] for ours, theirs in _OPTIONS.items()},
    )


@takes_arrays(OP_HD64)
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
    given = dict(locals())
    if queries.ndim != 3 or queries.shape[2] != 64:
        remedy = f"Call {OP} with heads of another size"
        rule = "[num_tokens, num_q_heads, 64]"
        raise shape_error(OP_HD64, "queries", rule, queries.shape, remedy)
    if kv_cache.ndim != 5 or kv_cache.shape[4] != 128:
        rule = "[num_pages, page_size, rows // packing, packing, 128]"
        remedy = "A row is the K of a head, then its V"
        raise shape_error(OP_HD64, "kv_cache", rule, kv_cache.shape, remedy)
    return ragged(
        OP_HD64,
        _NAMES,
        (queries, keys, values),
        *(kv_cache, kv_lens, page_indices, cu_q_lens, distribution, attention_sink),
        kv_layout=PACKED_PAIRS,
        **{ours: given[theirs] for ours, theirs in _OPTIONS.items()},
    )
