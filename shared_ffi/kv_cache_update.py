"""The check of ``kv_cache_update``. ``csrc/kv_cache_update/params.h`` says what the op means."""

from __future__ import annotations

from typing import Any

import numpy as np

from shared_ffi import _native, token_rows
from shared_ffi import hadamard as _hadamard
from shared_ffi import kv_cache as _kv_cache
from shared_ffi import kv_layout as _kv_layout
from shared_ffi import norms as _norms
from shared_ffi.spec import (
    CACHE_DTYPES,
    STORAGE_DTYPES,
    ArraySpec,
    Call,
    Operands,
    check_array,
    check_is_on_host,
    dtype_error,
    excess_error,
    flag,
    has_shape,
    holds,
    numbers_of,
    on_host,
    records_options,
    shape_error,
    value_error,
)

OP = "kv_cache_update"
TARGET = "xla_gpu_kv_cache_update"

WRITTEN = ("kv_cache", "value_cache", "k_scale_cache", "v_scale_cache", "query")
"""What the op writes in place, in the order of its results."""


@records_options
def check(
    kv_cache: ArraySpec,
    key: ArraySpec,
    value: ArraySpec,
    slot_mapping: ArraySpec,
    *,
    value_cache: ArraySpec | None = None,
    kv_layout: str | None = None,
    k_scale: ArraySpec | None = None,
    v_scale: ArraySpec | None = None,
    k_scale_cache: ArraySpec | None = None,
    v_scale_cache: ArraySpec | None = None,
    query: ArraySpec | None = None,
    positions: ArraySpec | None = None,
    cos_sin_cache: ArraySpec | None = None,
    interleaved: bool = False,
    q_norm: ArraySpec | None = None,
    k_norm: ArraySpec | None = None,
    norm_eps: float | None = None,
    norm_offset: int = 0,
    norm_after_rope: bool = False,
    v_norm: bool = False,
    norm_round_first: bool = False,
    hadamard: str | None = None,
    hadamard_signs: ArraySpec | None = None,
    codes: str | None = None,
    k_global: ArraySpec | None = None,
    v_global: ArraySpec | None = None,
    round_scales_up: bool = False,
) -> Call:
    """Returns the in-place call, or raises ValueError (shape) or TypeError (dtype)."""
    remedy = "kv_cache comes first, then key" if len(kv_cache.shape) == 3 < len(key.shape) else ""
    token_rows.check(OP, "key", key, "num_kv_heads", remedy)
    num_tokens, num_kv_heads, head_size = key.shape
    is_copied = key.dtype == kv_cache.dtype
    if key.dtype not in STORAGE_DTYPES and not (is_copied and key.dtype in CACHE_DTYPES):
        rule = "dtype float32, float16 or bfloat16, or that of a quantized kv_cache"
        raise dtype_error(OP, "key", rule, key.dtype)
    columns = value.shape[-1] if value.shape else 0
    is_latent = columns == 0 and head_size != 0
    has_own_columns = is_latent or value_cache is not None
    if not has_shape(value, (num_tokens, num_kv_heads, columns if has_own_columns else head_size)):
        last = f"head_size={head_size}" if value_cache is None else "value_head_size"
        rule = f"[num_tokens={num_tokens}, num_kv_heads={num_kv_heads}, {last}]"
        remedy = "It has the tokens and heads of key"
        if value_cache is None and value.shape[:-1] == key.shape[:-1]:
            remedy = "A V with another head size has a cache of its own, value_cache"
            if len(kv_cache.shape) == len(_kv_layout.LATENT):
                remedy = "Where V is a part of K, give key[..., :0] as value"
        raise shape_error(OP, "value", rule, value.shape, remedy)
    token_rows.check(OP, "value", value)
    if value.dtype != key.dtype:
        raise dtype_error(OP, "value", f"key's dtype {key.dtype}", value.dtype)
    if is_latent:
        _kv_cache.check_latent(OP, value_cache, v_scale, v_global, v_scale_cache)
    cache, layout, caches = _kv_layout.check(
        OP,
        kv_layout,
        kv_cache,
        value_cache,
        head_size * numbers_of(key.dtype),
        num_kv_heads,
        value_head_size=columns * numbers_of(key.dtype),
        is_latent=is_latent,
    )
    _kv_cache.check_dtypes(OP, kv_cache, value_cache, "key", key.dtype)
    for argument, array in (("kv_cache", kv_cache), ("value_cache", value_cache)):
        if array is not None:
            _kv_cache.check_written(OP, argument, array)
    # Where there is one kv head, devices can share the heads of the query alone.
    rows_head_dim = None if cache.num_kv_heads == 1 else 1
    operands = Operands([*layout, *token_rows.attributes(key, value)])
    operands.add("kv_cache", caches[0], cache.head_dim)
    operands.add("key", token_rows.as_operand(key), rows_head_dim)
    operands.add("value", token_rows.as_operand(value), rows_head_dim)
    operands.add("slot_mapping", slot_mapping)
    _kv_cache.add_features(
        OP,
        operands,
        cache,
        caches,
        k_scale,
        v_scale,
        codes=codes,
        global_scales=(k_global, v_global),
        row_sizes=(head_size, columns),
        is_quantized=not is_copied,
        is_latent=is_latent,
        reference_argument="key",
        made={"k_scale_cache": k_scale_cache, "v_scale_cache": v_scale_cache},
    )
    if flag(OP, "round_scales_up", round_scales_up):
        made_scales = (k_scale_cache, v_scale_cache)
        if all(x is None or x.dtype != "float8_e8m0fnu" for x in made_scales):
            rule = "be False unless the call makes scales of float8_e8m0fnu"
            raise excess_error(OP, "round_scales_up", rule, round_scales_up)
        operands.attributes.append(("round_scales_up", np.int64(1)))
    of_tokens = [("num_tokens", num_tokens)]
    remedy = "It has a slot for each token of key"
    check_array(OP, "slot_mapping", slot_mapping, of_tokens, "int32 or int64", remedy)
    rotary = {"positions": positions, "cos_sin_cache": cos_sin_cache}
    interleaved = flag(OP, "interleaved", interleaved)
    transformed = _hadamard.of(OP, hadamard)
    if query is not None and cos_sin_cache is None and q_norm is None and "k" not in transformed:
        rule = "be None without cos_sin_cache, q_norm and a hadamard of K"
        raise excess_error(OP, "query", rule, query)
    if any(array is not None for array in rotary.values()) or interleaved:
        _check_rotary(key, **rotary, interleaved=interleaved, is_latent=is_latent)
    if query is not None:
        _check_query(query, key)
        operands.add_feature("query", token_rows.as_operand(query), 1)
        if query.strides is not None:
            operands.attributes.append(("query_heads", np.int64(query.shape[1])))
    for name, array in rotary.items():
        if array is not None:
            operands.add_feature(name, array, None)
    if interleaved:
        operands.attributes.append(("interleaved", np.int64(1)))
    norms = _norms.Norms(
        q_norm, k_norm, norm_eps, norm_offset, norm_after_rope, v_norm, norm_round_first
    )
    is_rotated = cos_sin_cache is not None
    _norms.add(OP, operands, norms, key, query, is_rotated=is_rotated, is_latent=is_latent)
    _hadamard.add(OP, operands, transformed, hadamard_signs, key, value, is_latent=is_latent)
    written = [i for i, name in enumerate(operands.names) if name in WRITTEN]
    return Call(
        OP,
        TARGET,
        check,
        names=tuple(operands.names),
        operands=tuple(operands.specs),
        results=tuple(operands.specs[operand] for operand in written),
        attributes=tuple(operands.attributes),
        aliases=tuple((operand, result) for result, operand in enumerate(written)),
        num_shared_heads=(
            0 if norms.are_over_heads else _num_shared_heads(key, value, query, cache)
        ),
        head_dims=(*operands.head_dims, *(operands.head_dims[operand] for operand in written)),
    )


def _check_rotary(
    key: ArraySpec,
    positions: ArraySpec | None,
    cos_sin_cache: ArraySpec | None,
    *,
    interleaved: bool,
    is_latent: bool,
) -> None:
    """Checks the arguments of the rotary embedding, of which there is at least one."""
    if cos_sin_cache is None:
        if positions is None:
            raise excess_error(OP, "interleaved", "be False without cos_sin_cache", interleaved)
        raise excess_error(OP, "positions", "be None without cos_sin_cache", positions)
    if positions is None:
        remedy = "Pass the position of each token, as pad_batch makes it"
        raise value_error(OP, "positions", "be given with cos_sin_cache", None, remedy)
    if is_latent:
        rule = "be None where V is a part of K, of which other numbers are rotated (rotate before)"
        raise excess_error(OP, "cos_sin_cache", rule, cos_sin_cache)
    num_tokens, _, head_size = key.shape
    if key.dtype not in STORAGE_DTYPES:
        rule = "dtype float32, float16 or bfloat16 with cos_sin_cache"
        raise dtype_error(OP, "key", rule, key.dtype)
    table = cos_sin_cache.shape
    is_table = len(table) == 2 and holds(table[1] >= 2) and holds(table[1] <= head_size)
    if not is_table or not holds(table[1] % 2 == 0):
        rule = f"[max_positions, rotary_dim], with an even rotary_dim from 2 to {head_size}"
        remedy = "It is the cosines and sines of a position in one row"
        raise shape_error(OP, "cos_sin_cache", rule, table, remedy)
    if cos_sin_cache.dtype not in ("float32", key.dtype):
        rule = f"dtype float32, or key's dtype {key.dtype}"
        raise dtype_error(OP, "cos_sin_cache", rule, cos_sin_cache.dtype)
    remedy = "It has a position for each token of key"
    of_tokens = [("num_tokens", num_tokens)]
    check_array(OP, "positions", positions, of_tokens, "int32 or int64", remedy)


def _check_query(query: ArraySpec, key: ArraySpec) -> None:
    num_tokens, num_kv_heads, head_size = key.shape
    num_heads = query.shape[1] if len(query.shape) == 3 else 0
    is_multiple = holds(num_heads >= 1) and holds(num_heads % num_kv_heads == 0)
    if not is_multiple or not has_shape(query, (num_tokens, num_heads, head_size)):
        rule = (
            f"[num_tokens={num_tokens}, a multiple of num_kv_heads={num_kv_heads}, "
            f"head_size={head_size}]"
        )
        raise shape_error(OP, "query", rule, query.shape, "It has the tokens and head size of key")
    token_rows.check(OP, "query", query)
    if query.dtype != key.dtype:
        raise dtype_error(OP, "query", f"key's dtype {key.dtype}", query.dtype)
    if query.strides is not None and not token_rows.are_rows(query.shape, query.strides):
        rule = "have tokens with dense heads that do not overlap: it is written in place"
        raise value_error(OP, "query", rule, f"strides {list(query.strides)}", "Make a copy")


def _num_shared_heads(
    key: ArraySpec, value: ArraySpec, query: ArraySpec | None, cache: _kv_layout.KvLayout
) -> int:
    """See Call. Strided rows are a part of an array whose heads are not known here."""
    if any(rows is not None and rows.strides for rows in (key, value, query)):
        return 0
    if cache.num_kv_heads == 1:
        return 0 if query is None else query.shape[1]
    return 0 if cache.head_dim is None else cache.num_kv_heads


def check_values(
    kv_cache: Any,
    slot_mapping: Any,
    *,
    kv_layout: str | None = None,
    positions: Any = None,
    cos_sin_cache: Any = None,
) -> None:
    """Checks that no slot lies past the end of the cache, and that ``cos_sin_cache`` has a row for
    the position of each token with a slot.

    The CPU handler calls the same native function. The CUDA handler reports nothing, does not write
    such a token's key and value, and makes its query NaN if it is the position that is wrong.

    Raises:
        ValueError: the CPU handler's message, which names the token.
    """
    num_blocks, block_size = _kv_layout.num_blocks_and_size(OP, kv_layout, kv_cache.shape)
    check_is_on_host(f"{OP}.check_values", slot_mapping=slot_mapping, positions=positions)
    slots = np.ascontiguousarray(on_host(slot_mapping), np.int64)
    rows, max_positions = None, 0
    if positions is not None and cos_sin_cache is not None:
        rows = np.ascontiguousarray(on_host(positions), np.int64)
        max_positions = cos_sin_cache.shape[0]
    sizes = {"num_blocks": num_blocks, "block_size": block_size, "max_positions": max_positions}
    if error := _native.token_error(slots, rows, **sizes):
        raise ValueError(f"{OP}: {error}")
