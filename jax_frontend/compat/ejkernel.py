"""``ragged_page_attention_v3`` and ``unified_attention``, with the arguments of ejKernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jax_frontend._call import takes_arrays
from jax_frontend.compat._common import PACKED_ROWS, ragged, refuse
from jax_frontend.paged_attention import paged_attention
from shared_ffi.spec import excess_error, shape_error, value_error

RAGGED, UNIFIED = "ejkernel.ragged_page_attention_v3", "ejkernel.unified_attention"


@takes_arrays(RAGGED)
def ragged_page_attention_v3(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    kv_cache: jax.Array,
    kv_lens: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    distribution: jax.Array,
    softmax_aux: jax.Array | None = None,
    *,
    softmax_scale: float | None = 1.0,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    chunk_prefill_size: int | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
    platform: str | None = None,
    cfg: Any = None,
    mesh: Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Writes new keys and values into the cache, which is donated, and attends to it.

    Args:
        queries: ``[total_tokens, num_q_heads, head_dim]``, float32, float16 or bfloat16.
        keys: ``[total_tokens, num_kv_heads, head_dim]``, dtype of the cache.
        values: as ``keys``.
        kv_cache: ``[num_pages, page_size, 2 * num_kv_heads // packing, packing, head_dim]``, as
            ``ragged_paged_attention_v3``'s. This is ejKernel's layout on GPUs and CPUs for every
            head_dim. For a head_dim of 64, its TPU kernel has another, which
            ``ragged_paged_attention_hd64`` reads.
        kv_lens: ``[max_num_seqs]`` int32, this call's tokens included.
        block_tables: ``[max_num_seqs * pages_per_seq]`` int32.
        query_start_loc: ``[max_num_seqs + 1]`` int32.
        distribution: ``[3]`` int32. The last entry is the number of sequences, which is what
            ejKernel's implementations read; the others are not used.
        softmax_aux: ``[num_q_heads]``: the logit of a sink, already scaled.
        softmax_scale: None: ``head_dim ** -0.5``.
        sliding_window, logits_soft_cap: as ``paged_attention``'s ``sliding_window`` and
            ``soft_cap``.
        q_scale: not used; queries are not quantized.
        k_scale, v_scale: factors of the logits and of the output.
        chunk_prefill_size, num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes, cfg:
            tune ejKernel's kernels; not used.
        platform: None or "auto".
        mesh, in_specs, out_specs: all three, for a call under ``jax.shard_map``, or none.
            ``in_specs`` has an entry for each of the nine arrays.

    Returns:
        The output, ``[total_tokens, num_q_heads, head_dim]``, dtype of ``queries``, zero for tokens
        of no sequence; and the updated cache.

    Raises:
        ValueError, TypeError: as ``paged_attention``; ValueError also for another platform.
    """
    _check_platform(RAGGED, platform)

    def attend(queries: jax.Array, keys: jax.Array, values: jax.Array, *others: Any) -> Any:
        return ragged(
            RAGGED,
            ("block_tables", "query_start_loc", "softmax_aux"),
            (queries, keys, values),
            *others,
            kv_layout=PACKED_ROWS,
            scale=queries.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
            sliding_window=sliding_window,
            soft_cap=logits_soft_cap,
            k_scale=k_scale,
            v_scale=v_scale,
        )

    return _sharded(RAGGED, attend, mesh, in_specs, out_specs)(  # type: ignore[no-any-return]
        *(queries, keys, values, kv_cache, kv_lens),
        *(block_tables, query_start_loc, distribution, softmax_aux),
    )


@takes_arrays(UNIFIED)
def unified_attention(
    queries: jax.Array,
    key_cache: jax.Array,
    value_cache: jax.Array,
    kv_lens: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    alibi_slopes: jax.Array | None = None,
    qq_bias: jax.Array | None = None,
    softmax_aux: jax.Array | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    seq_threshold_3d: int | None = None,
    num_par_softmax_segments: int | None = None,
    block_dim: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
    platform: str | None = None,
    cfg: Any = None,
    mesh: Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> jax.Array:
    """Attends to a paged cache that holds this call's keys and values already.

    Args:
        queries: ``[total_tokens, num_q_heads, head_dim]``, float32, float16 or bfloat16.
        key_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``, dtype of ``queries``.
        value_cache: as ``key_cache``.
        kv_lens: ``[num_seqs]`` int32, this call's tokens included.
        block_tables: ``[num_seqs, max_blocks_per_seq]`` int32.
        query_start_loc: ``[num_seqs + 1]`` int32.
        alibi_slopes: ``[num_q_heads]``. ejKernel adds ``slope * (j - context_len)`` to a logit, and
            ``paged_attention`` takes ``slope * (p - j)`` from it: the difference is the same for
            all positions j of a row, so the softmax does not see it. With a sink it would, so
            ``softmax_aux`` must be None; and ``logits_soft_cap``, because ejKernel's own platforms
            differ in what comes first.
        qq_bias: must be None.
        softmax_aux: ``[num_q_heads]``: the logit of a sink, already scaled.
        softmax_scale: None: ``head_dim ** -0.5``.
        causal: must be True, as in ejKernel.
        sliding_window, logits_soft_cap: as ``paged_attention``'s ``sliding_window`` and
            ``soft_cap``; 0 is None.
        seq_threshold_3d, num_par_softmax_segments, block_dim, num_warps, num_stages, cfg: tune
            ejKernel's kernels; not used.
        platform: None or "auto".
        mesh, in_specs, out_specs: all three, for a call under ``jax.shard_map``, or none.
            ``in_specs`` has an entry for each of the nine arrays.

    Returns:
        ``[total_tokens, num_q_heads, head_dim]``, dtype of ``queries``, zero for tokens of no
        sequence.

    Raises:
        ValueError, TypeError: as ``paged_attention``; ValueError also for what is not supported.
    """
    _check_platform(UNIFIED, platform)
    refuse(UNIFIED, qq_bias=qq_bias)
    if not causal:
        raise excess_error(UNIFIED, "causal", "be True", causal)
    if alibi_slopes is not None:
        with_alibi = {"softmax_aux": softmax_aux, "logits_soft_cap": logits_soft_cap or None}
        refuse(f"{UNIFIED} with alibi_slopes", **with_alibi)

    def attend(
        queries: jax.Array,
        key_cache: jax.Array,
        value_cache: jax.Array,
        kv_lens: jax.Array,
        block_tables: jax.Array,
        query_start_loc: jax.Array,
        alibi_slopes: jax.Array | None,
        qq_bias: None,
        softmax_aux: jax.Array | None,
    ) -> jax.Array:
        if kv_lens.ndim != 1:
            remedy = "The lengths of all sequences are one array"
            raise shape_error(UNIFIED, "kv_lens", "[num_seqs]", kv_lens.shape, remedy)
        return paged_attention(
            *(queries, key_cache, kv_lens, block_tables, query_start_loc),
            jnp.asarray(kv_lens.shape[0], jnp.int32),
            queries.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
            sliding_window or None,
            logits_soft_cap or None,
            value_cache=value_cache,
            sinks=None if softmax_aux is None else softmax_aux.astype("float32"),
            alibi_slopes=None if alibi_slopes is None else alibi_slopes.astype("float32"),
        )

    return _sharded(UNIFIED, attend, mesh, in_specs, out_specs)(  # type: ignore[no-any-return]
        *(queries, key_cache, value_cache, kv_lens, block_tables, query_start_loc),
        *(alibi_slopes, qq_bias, softmax_aux),
    )


def _check_platform(op: str, platform: str | None) -> None:
    if platform not in (None, "auto"):
        raise excess_error(op, "platform", "be None or 'auto'", repr(platform))


def _sharded(
    op: str, attend: Callable[..., Any], mesh: Mesh | None, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """The function, under ``jax.shard_map`` if there is a mesh."""
    given = {"mesh": mesh, "in_specs": in_specs, "out_specs": out_specs}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return attend
    if missing:
        others = " and ".join(name for name in given if name not in missing)
        remedy = "Pass all three, or none"
        raise value_error(op, missing[0], f"be given with {others}", None, remedy)
    return jax.shard_map(attend, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
