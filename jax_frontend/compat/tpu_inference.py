"""The functions of tpu-inference's ``kernels.ragged_paged_attention`` and ``attention_interface``.

``ragged_paged_attention`` is version 3, as in its ``v3.kernel``: it writes the cache, too.
``ragged_paged_attention_hd64`` is its variant for heads of 64, and MaxText calls
``sharded_ragged_paged_attention``, which is version 3 on a mesh. ``ragged_paged_attention_v2`` of
``v2.kernel`` only attends: ``kv_cache_update`` of ``v2.ragged_kv_cache_update`` writes the cache.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jax_frontend._call import takes_arrays
from jax_frontend.compat._common import PACKED_PAIRS, PACKED_ROWS, ragged, unit_scale
from jax_frontend.kv_cache_update import kv_cache_update as write
from jax_frontend.paged_attention import paged_attention
from shared_ffi.paged_attention import check_mask_value
from shared_ffi.spec import dtype_error, shape_error, value_error

__all__ = [
    "kv_cache_update",
    "ragged_paged_attention",
    "ragged_paged_attention_hd64",
    "ragged_paged_attention_v2",
    "sharded_ragged_paged_attention",
]

# The functions' names in messages.
_V2, _V3 = "ragged_paged_attention", "ragged_paged_attention_v3"
_HD64 = "ragged_paged_attention_hd64"
_SHARDED = "tpu_inference.sharded_ragged_paged_attention"
_UPDATE = "tpu_inference.kv_cache_update"

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


@takes_arrays(_V3)
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
    if unknown := sorted(set(tuning) - _TUNING):
        raise TypeError(
            f"{_V3}: no argument is called {unknown[0]}; got {tuning[unknown[0]]!r}. Leave it out, "
            "or correct its name"
        )
    return ragged(
        _V3,
        _NAMES,
        (queries, keys, values),
        *(kv_cache, kv_lens, page_indices, cu_q_lens, distribution, attention_sink),
        kv_layout=PACKED_ROWS,
        scale=sm_scale,
        causal=use_causal_mask,
        update=update_kv_cache,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        k_scale=k_scale,
        v_scale=v_scale,
        mask_value=mask_value,
        out_dtype=out_dtype,
    )


@takes_arrays(_HD64)
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
        remedy = f"Call {_V3} with heads of another size"
        rule = "[num_tokens, num_q_heads, 64]"
        raise shape_error(_HD64, "queries", rule, queries.shape, remedy)
    if kv_cache.ndim != 5 or kv_cache.shape[4] != 128:
        rule = "[num_pages, page_size, rows // packing, packing, 128]"
        remedy = "A row is the K of a head, then its V"
        raise shape_error(_HD64, "kv_cache", rule, kv_cache.shape, remedy)
    return ragged(
        _HD64,
        _NAMES,
        (queries, keys, values),
        *(kv_cache, kv_lens, page_indices, cu_q_lens, distribution, attention_sink),
        kv_layout=PACKED_PAIRS,
        scale=sm_scale,
        causal=use_causal_mask,
        update=update_kv_cache,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        k_scale=k_scale,
        v_scale=v_scale,
        mask_value=mask_value,
        out_dtype=out_dtype,
    )


ragged_paged_attention = ragged_paged_attention_v3


def ragged_paged_attention_v2(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    sm_scale: float | jax.Array = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
) -> jax.Array:
    """``paged_attention`` with the arguments of the TPU kernel: for code written for TPUs.

    The arguments are those of ``jax.experimental.pallas.ops.tpu.ragged_paged_attention`` and of
    ``torch.ops.xla_gpu.ragged_paged_attention``. It only attends: ``kv_cache_update`` writes the
    cache, and ``ragged_paged_attention_v3`` does both.

    Args:
        q: ``[max_num_batched_tokens, num_q_heads, head_dim]``, float32, float16 or bfloat16.
        kv_pages: ``[total_num_pages, page_size, 2 * num_kv_heads, head_dim]``; see
            ``paged_attention``'s ``kv_cache``.
        kv_lens: ``[max_num_seqs]`` int32, this call's tokens included.
        page_indices: ``[max_num_seqs, pages_per_seq]`` int32.
        cu_q_lens: ``[max_num_seqs + 1]`` int32.
        num_seqs: ``[1]`` int32.
        sm_scale: as ``paged_attention``'s ``scale``; or a float array ``[]``, which may be traced.
            It multiplies ``q``, in float32.
        sliding_window, soft_cap: as ``paged_attention``'s.
        mask_value: None or at most -10000: masked positions do not enter the softmax.
        k_scale: a factor of the logits. A cache of integers needs both.
        v_scale: a factor of the output.
        num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes: tune the TPU's kernel; not
            used.

    Returns:
        ``[max_num_batched_tokens, num_q_heads, head_dim]``, dtype of ``q``; zero for tokens of no
        sequence.

    Raises:
        ValueError, TypeError: as ``paged_attention``.
    """
    check_mask_value(_V2, mask_value)
    if isinstance(sm_scale, jax.Array):  # paged_attention's scale is a constant of the program
        q, sm_scale = _scaled(q, sm_scale), 1.0
    output = paged_attention(
        q,
        kv_pages,
        kv_lens,
        page_indices,
        cu_q_lens,
        num_seqs,
        sm_scale if k_scale is None else sm_scale * k_scale,
        sliding_window,
        soft_cap,
        k_scale=unit_scale(kv_pages, k_scale),
        v_scale=unit_scale(kv_pages, v_scale),
    )
    return output if v_scale is None else output * v_scale


def _scaled(q: jax.Array, sm_scale: jax.Array) -> jax.Array:
    if sm_scale.shape != ():
        raise shape_error(_V2, "sm_scale", "[]", sm_scale.shape, "It is one number")
    if not jnp.issubdtype(sm_scale.dtype, jnp.floating):
        remedy = "Cast sm_scale to float32"
        raise dtype_error(_V2, "sm_scale", "a float dtype", sm_scale.dtype.name, remedy)
    return (q.astype(jnp.float32) * sm_scale.astype(jnp.float32)).astype(q.dtype)


# The axes of tpu-inference's meshes that divide sequences, and those that divide heads.
_DATA = ("data", "attn_dp", "attn_dp_expert")
_HEADS = ("model", "expert", "dcp")


@takes_arrays(_SHARDED)
def sharded_ragged_paged_attention(
    mesh: Mesh,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_cache: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
    attention_sink: jax.Array | None,
    sm_scale: float,
    attention_chunk_size: int | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    update_kv_cache: bool = True,
    use_causal_mask: bool = True,
    attn_logits_soft_cap: float | None = None,
    decode_query_size: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """``ragged_paged_attention_v3`` on a mesh: tokens and pages along its axes ``data``,
    ``attn_dp`` and ``attn_dp_expert``, heads along ``model``, ``expert`` and ``dcp``. A mesh need
    not have all of them.

    Args:
        q, k, v: ``[max_num_tokens, heads, head_dim]``: ``queries``, ``keys`` and ``values`` there.
            Where there are fewer kv heads than devices along the axes of heads, each is repeated.
        kv_cache: that of ``ragged_paged_attention_v3``; with a head_dim of 64, that of
            ``ragged_paged_attention_hd64``. It has a row for each repeated head.
        kv_lens, page_indices, cu_q_lens, distribution: as there, for each part of the sequences one
            after the other.
        attention_sink: ``[num_q_heads]``, or None.
        sm_scale: factor of ``q . k``.
        attention_chunk_size: the sliding window.
        attn_logits_soft_cap: the soft cap.
        q_scale, k_scale, v_scale, update_kv_cache, use_causal_mask: as there.
        decode_query_size: tunes a TPU's kernel; not used.

    Returns:
        The output, ``[max_num_tokens, num_q_heads, head_dim]``, and the updated cache.

    Raises:
        ValueError, TypeError: as ``ragged_paged_attention_v3``; ValueError also if the kv heads
            cannot be repeated or divided evenly.
    """
    data, heads = (
        tuple(axis for axis in axes if axis in mesh.axis_names) for axes in (_DATA, _HEADS)
    )
    num_parts = math.prod(mesh.shape[axis] for axis in heads)
    if k.ndim == 3 and 0 < k.shape[1] < num_parts:
        if num_parts % k.shape[1] != 0:
            rule = f"divide or be a multiple of the {num_parts} devices that share the heads"
            remedy = "Give the mesh other numbers of devices along its axes of heads"
            raise value_error(_SHARDED, "k's num_kv_heads", rule, k.shape[1], remedy)
        k, v = (jnp.repeat(x, num_parts // x.shape[1], axis=1) for x in (k, v))
    attend = ragged_paged_attention_hd64 if q.shape[-1] == 64 else ragged_paged_attention_v3
    rows, cache = PartitionSpec(data, heads), PartitionSpec(data, None, heads)
    sinks = [] if attention_sink is None else [attention_sink]
    of_sinks = [PartitionSpec(heads) for _ in sinks]
    divided = jax.shard_map(
        partial(
            attend,
            sm_scale=sm_scale,
            sliding_window=attention_chunk_size,
            soft_cap=attn_logits_soft_cap,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            update_kv_cache=update_kv_cache,
            use_causal_mask=use_causal_mask,
        ),
        mesh=mesh,
        in_specs=(rows, rows, rows, cache, *([PartitionSpec(data)] * 4), *of_sinks),
        out_specs=(rows, cache),
        check_vma=False,
    )
    return divided(q, k, v, kv_cache, kv_lens, page_indices, cu_q_lens, distribution, *sinks)


@takes_arrays(_UPDATE)
def kv_cache_update(
    new_kv: jax.Array,
    slices: jax.Array,
    kv_cache: jax.Array,
    num_slices: jax.Array,
    *,
    page_size: int = 32,
    num_slices_per_block: int | None = None,
    mesh: Mesh | None = None,
    kv_cache_pspec: PartitionSpec | None = None,
    dynamic_validate_inputs: bool = False,
    vmem_limit_bytes: int | None = None,
) -> jax.Array:
    """Copies runs of new rows, each within a page, into the cache, which is donated.

    Args:
        new_kv: ``[num_tokens, 2 * num_kv_heads, head_dim]``, dtype of ``kv_cache``; the K of kv
            head h at index 2h, its V at 2h + 1.
        slices: ``[3, max_slices]`` int32: the first row in the cache, the first row in ``new_kv``
            and the number of rows of each run. The runs are in the order of ``new_kv``'s rows.
        kv_cache: ``[num_pages * page_size, 2 * num_kv_heads, head_dim]``.
        num_slices: ``[1]`` int32: how many of the slices are runs.
        page_size: rows of a page; only ``dynamic_validate_inputs`` needs it.
        mesh: the devices that the call is divided among, inside ``jax.shard_map``. None: the caller
            divides it, or does not.
        kv_cache_pspec: with ``mesh``, the partition of ``new_kv`` and of ``kv_cache``.
        dynamic_validate_inputs: check the runs before the call, which needs their values. Rows
            past the end of the cache are an error in any case.
        num_slices_per_block, vmem_limit_bytes: tune the TPU's kernel; not used.

    Returns:
        The updated cache.

    Raises:
        ValueError: a shape is wrong; ``mesh`` is given without ``kv_cache_pspec``; a run is wrong
            and ``dynamic_validate_inputs`` is true.
        TypeError: a dtype is wrong.
        jax.errors.JaxRuntimeError, or ValueError: as ``jax_frontend.kv_cache_update``.
    """
    if slices.ndim != 2 or slices.shape[0] != 3:
        remedy = "Its rows are places in the cache, places in new_kv, and numbers of rows"
        raise shape_error(_UPDATE, "slices", "[3, max_slices]", slices.shape, remedy)
    if num_slices.shape != (1,):
        raise shape_error(_UPDATE, "num_slices", "[1]", num_slices.shape, "It is one number")
    if mesh is not None and kv_cache_pspec is None:
        remedy = "Pass the partition of new_kv and kv_cache"
        raise value_error(_UPDATE, "kv_cache_pspec", "be given with mesh", None, remedy)
    if dynamic_validate_inputs:
        _check_values(np.asarray(slices), int(num_slices[0]), new_kv, kv_cache, page_size)
    return _update(new_kv, slices, kv_cache, num_slices, mesh=mesh, spec=kv_cache_pspec)


@partial(jax.jit, donate_argnames="kv_cache", static_argnames=("mesh", "spec"))
def _update(
    new_kv: jax.Array,
    slices: jax.Array,
    kv_cache: jax.Array,
    num_slices: jax.Array,
    *,
    mesh: Mesh | None,
    spec: PartitionSpec | None,
) -> jax.Array:
    if mesh is None:
        return _update_rows(new_kv, slices, kv_cache, num_slices)
    whole = PartitionSpec()
    divided = jax.shard_map(
        _update_rows,
        mesh=mesh,
        in_specs=(spec, whole, spec, whole),
        out_specs=spec,
        check_vma=False,
    )
    return divided(new_kv, slices, kv_cache, num_slices)


def _update_rows(
    new_kv: jax.Array, slices: jax.Array, kv_cache: jax.Array, num_slices: jax.Array
) -> jax.Array:
    slots = _slot_mapping(slices, num_slices, len(new_kv))
    pairs = new_kv.reshape(len(new_kv), -1, 2, new_kv.shape[2])
    # The rows of this cache are slots. Reshaped to pages, it would be copied.
    return write(kv_cache, pairs[:, :, 0], pairs[:, :, 1], slots, kv_layout="n(h2)d")


def _slot_mapping(slices: jax.Array, num_slices: jax.Array, num_tokens: int) -> jax.Array:
    """The row of the cache that each new row goes to; -1 if it is in no run."""
    in_cache, first, length = slices
    is_run = jnp.arange(slices.shape[1]) < num_slices
    first = jnp.where(is_run, first, jnp.iinfo(first.dtype).max)
    token = jnp.arange(num_tokens, dtype=first.dtype)
    # Not jnp.searchsorted, which JAX 0.10 refuses in a checked shard_map.
    run = jnp.sum(first[None] <= token[:, None], axis=1) - 1
    offset = token - first[run]
    # No sum of corrupt numbers names a row: it would be that of another sequence.
    is_row = (run >= 0) & (first[run] >= 0) & (offset < length[run]) & (in_cache[run] >= 0)
    return jnp.where(is_row, in_cache[run] + offset, -1)


def _check_values(
    slices: np.ndarray, num_slices: int, new_kv: jax.Array, kv_cache: jax.Array, page_size: int
) -> None:
    """Raises ValueError for the first run that is wrong."""
    if not 0 <= num_slices <= slices.shape[1]:
        rule = f"be from 0 to the {slices.shape[1]} columns of slices"
        raise value_error(_UPDATE, "num_slices", rule, num_slices, "It counts the runs")
    row, used = 0, np.zeros(len(kv_cache), bool)
    for i, (in_cache, first, length) in enumerate(slices[:, :num_slices].T.tolist()):
        page = in_cache // page_size
        rules = {
            f"have 1 to page_size={page_size} rows": 1 <= length <= page_size,
            f"lie in the {len(kv_cache)} rows of kv_cache": 0 <= in_cache <= len(kv_cache) - length,
            f"lie in one page of {page_size} rows": page == (in_cache + length - 1) // page_size,
            f"lie in the {len(new_kv)} rows of new_kv": 0 <= first <= len(new_kv) - length,
            f"begin at row {row} of new_kv, where the last ends": i == 0 or first == row,
            "name rows of the cache that no other slice names": not used[
                max(in_cache, 0) : max(in_cache + length, 0)
            ].any(),
        }
        for rule, is_kept in rules.items():
            if not is_kept:
                got = [in_cache, first, length]
                remedy = "These are its rows in the cache and in new_kv, and their number"
                raise value_error(_UPDATE, f"slices[:, {i}]", rule, got, remedy)
        used[in_cache : in_cache + length] = True
        row = first + length
