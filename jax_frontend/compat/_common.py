"""What functions of other libraries have in common: `update_and_attend`, for those that write the
cache, and `decode`, for those with one query of each sequence."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_frontend.batch import slots_of_tokens
from jax_frontend.kv_cache_update import kv_cache_update
from jax_frontend.paged_attention import paged_attention
from shared_ffi.paged_attention import check_mask_value
from shared_ffi.spec import (
    INTEGER_DTYPES,
    dtype_error,
    excess_error,
    shape_error,
    value_error,
)

PACKED_ROWS = "nb(h2)(h2)d"
"""``[num_pages, page_size, rows // packing, packing, width]``: the K of kv head h in row 2h, its V
in row 2h + 1."""

PACKED_PAIRS = "nbhh(2d)"
"""``[num_pages, page_size, rows // packing, packing, width]``: kv head h in row h, its K in the
first half of the row, its V in the second."""


def update_and_attend(
    op: str,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    kv_cache: jax.Array,
    kv_lens: jax.Array,
    block_tables: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    sinks: jax.Array | None,
    *,
    kv_layout: str,
    scale: float,
    causal: bool = True,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    update: bool = True,
    k_scale: float | None = None,
    v_scale: float | None = None,
    mask_value: float | None = None,
    out_dtype: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Writes new keys and values into the cache, which is donated, and attends to it.

    Args:
        op: the public function, for messages.
        kv_cache: in one of the two layouts above. It may have more heads than ``keys``, and wider
            ones: new rows are padded with zeros.
        block_tables: ``[max_seqs, max_blocks_per_seq]``.
        num_seqs: ``[]``.
        sinks: ``[num_heads]``, of any dtype.
        update: False: the cache holds keys and values already.
        k_scale, v_scale: factors of the logits and of the output. A cache of integers needs both.
        mask_value: of the other library's kernel.
        out_dtype: None: the dtype of ``queries``.
    """
    check_mask_value(op, mask_value)
    _check(op, queries, keys, values, kv_cache, kv_layout)
    if update and keys.dtype != kv_cache.dtype:  # it would be quantized without a scale
        raise dtype_error(op, "keys", f"kv_cache's dtype {kv_cache.dtype}", keys.dtype)
    return _update_and_attend(
        kv_cache,
        (queries, keys, values),
        (kv_lens, block_tables, cu_q_lens, num_seqs),
        sinks,
        (unit_scale(kv_cache, k_scale), unit_scale(kv_cache, v_scale)),
        options=_Options(
            kv_layout=kv_layout,
            scale=scale if k_scale is None else scale * k_scale,
            causal=causal,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            update=update,
            v_scale=v_scale,
            out_dtype=jnp.dtype(queries.dtype if out_dtype is None else out_dtype),
        ),
    )


def ragged(
    op: str,
    names: tuple[str, str, str],
    rows: tuple[jax.Array, jax.Array, jax.Array],
    kv_cache: jax.Array,
    kv_lens: jax.Array,
    pages: jax.Array,
    starts: jax.Array,
    distribution: jax.Array,
    sink: jax.Array | None,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """Version 3 of the TPU's kernel and its kin, which differ in the cache and in names.

    Args:
        names: what the public function calls `pages`, `starts` and `sink`.
        options: of `update_and_attend`.
    """
    pages_name, starts_name, sink_name = names
    check_starts(op, starts_name, starts, kv_lens)
    check_shape(op, "distribution", distribution, (3,), OF_DISTRIBUTION)
    if sink is not None:
        check_shape(op, sink_name, sink, rows[0].shape[1:2], OF_SINKS)
    tables = block_tables_of(op, pages_name, pages, kv_lens)
    return update_and_attend(
        op, *rows, kv_cache, kv_lens, tables, starts, distribution[2], sink, **options
    )


def unit_scale(kv_cache: jax.Array, factor: float | None) -> jax.Array | None:
    """A scale for ``paged_attention`` where the factor is applied outside of it. A cache of
    integers has to have one all the same."""
    is_integer = kv_cache.dtype.name in INTEGER_DTYPES
    return jnp.ones((), jnp.float32) if is_integer and factor is not None else None


OF_DISTRIBUTION = "Its last entry is the number of sequences"
OF_SINKS = "It has a number for each query head"


def check_shape(
    op: str, argument: str, array: jax.Array, shape: tuple[int, ...], remedy: str
) -> None:
    """Raises ValueError if an array does not have the shape."""
    if array.shape != shape:
        raise shape_error(op, argument, str(list(shape)), array.shape, remedy)


def check_starts(op: str, argument: str, starts: jax.Array, kv_lens: jax.Array) -> None:
    """Raises ValueError if an array has not one entry more than there are sequences."""
    remedy = "It has the first token of each entry of kv_lens, then the end"
    check_shape(op, argument, starts, (kv_lens.shape[0] + 1,), remedy)


def block_tables_of(op: str, argument: str, pages: jax.Array, kv_lens: jax.Array) -> jax.Array:
    """Makes ``[max_seqs, pages_per_seq]`` of the flat page indices of all sequences."""
    max_seqs = kv_lens.shape[0]
    if pages.ndim != 1 or 0 in (max_seqs, *pages.shape) or pages.shape[0] % max_seqs != 0:
        rule = f"[max_seqs={max_seqs} * pages_per_seq], of at least one page"
        raise shape_error(op, argument, rule, pages.shape, "Give each entry of kv_lens as many")
    return pages.reshape(max_seqs, -1)


def _check(
    op: str,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    kv_cache: jax.Array,
    kv_layout: str,
) -> None:
    """Checks what padding would hide from the checks of the two ops."""
    if queries.ndim != 3:
        rule, remedy = "[num_tokens, num_q_heads, head_dim]", "Pack the tokens of all sequences"
        raise shape_error(op, "queries", rule, queries.shape, remedy)
    num_tokens, num_heads, head_size = queries.shape
    if keys.ndim != 3 or (keys.shape[0], keys.shape[2]) != (num_tokens, head_size):
        rule = f"[num_tokens={num_tokens}, num_kv_heads, head_dim={head_size}]"
        remedy = "It has the tokens and the head size of queries"
        raise shape_error(op, "keys", rule, keys.shape, remedy)
    num_kv_heads = keys.shape[1]
    if num_kv_heads < 1 or num_heads % num_kv_heads != 0:
        rule = f"be a multiple of num_kv_heads={num_kv_heads}"
        remedy = "Correct the heads of queries, or those of keys"
        raise value_error(op, "queries' num_q_heads", rule, num_heads, remedy)
    check_shape(op, "values", values, keys.shape, "It has the shape of keys")
    heads, size = _heads_and_size(kv_layout, kv_cache.shape)
    if heads < num_kv_heads or size < head_size:
        factors = ("", "2 * ") if kv_layout == PACKED_PAIRS else ("2 * ", "")
        rule = (
            f"[num_pages, page_size, rows // packing, packing, width], with at least "
            f"{factors[0]}num_kv_heads={num_kv_heads} rows and a width of at least "
            f"{factors[1]}head_dim={head_size}"
        )
        raise shape_error(op, "kv_cache", rule, kv_cache.shape, "Make the cache for these keys")


def _heads_and_size(kv_layout: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """The kv heads of a cache and their size; 0 and 0 if it does not have five dimensions."""
    if len(shape) != 5:
        return 0, 0
    rows, width = math.prod(shape[2:4]), shape[4]
    return (rows, width // 2) if kv_layout == PACKED_PAIRS else (rows // 2, width)


class _Options(NamedTuple):
    """What of a call is no array."""

    kv_layout: str
    scale: float
    causal: bool
    sliding_window: int | None
    soft_cap: float | None
    update: bool
    v_scale: float | None
    out_dtype: Any


@partial(jax.jit, static_argnames="options", donate_argnames="kv_cache")
def _update_and_attend(
    kv_cache: jax.Array,
    rows: tuple[jax.Array, jax.Array, jax.Array],
    metadata: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    sinks: jax.Array | None,
    unit_scales: tuple[jax.Array | None, jax.Array | None],
    *,
    options: _Options,
) -> tuple[jax.Array, jax.Array]:
    queries, keys, values = rows
    kv_layout = options.kv_layout
    num_tokens, num_heads, head_size = queries.shape
    group = num_heads // keys.shape[1]
    # The layout describes the cache as it is: XLA would copy a cache to reshape it.
    cache_heads, cache_size = _heads_and_size(kv_layout, kv_cache.shape)
    if options.update:
        num_pages, page_size, *_ = kv_cache.shape
        slots = slots_of_tokens(
            metadata, block_size=page_size, num_tokens=num_tokens, num_blocks=num_pages
        )
        new_keys = _pad(keys, cache_heads, cache_size)
        new_values = _pad(values, cache_heads, cache_size)
        kv_cache = kv_cache_update(kv_cache, new_keys, new_values, slots, kv_layout=kv_layout)
    if sinks is not None:
        sinks = jnp.pad(sinks.astype(jnp.float32), (0, group * cache_heads - num_heads))
    output = paged_attention(
        _pad(queries, group * cache_heads, cache_size),
        kv_cache,
        *metadata,
        options.scale,
        options.sliding_window,
        options.soft_cap,
        kv_layout=kv_layout,
        sinks=sinks,
        causal=options.causal,
        k_scale=unit_scales[0],
        v_scale=unit_scales[1],
    )[:, :num_heads, :head_size]
    if options.v_scale is not None:
        output = output * options.v_scale
    return output.astype(options.out_dtype), kv_cache


def _pad(array: jax.Array, num_heads: int, head_size: int) -> jax.Array:
    """Pads ``[num_tokens, heads, size]`` with zeros at the end."""
    _, heads, size = array.shape
    return jnp.pad(array, ((0, 0), (0, num_heads - heads), (0, head_size - size)))


def refuse(op: str, **options: Any) -> None:
    """Raises ValueError for the first of these options that is not None."""
    for name, given in options.items():
        if given is not None:
            got = given if hasattr(given, "shape") else repr(given)
            raise excess_error(op, name, "be None, as it is not supported", got)


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
