"""The checks of a paged cache's dtypes and scales. `kv_layout` has those of its shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from shared_ffi.kv_layout import KvLayout, as_int64, spanned
from shared_ffi.spec import (
    CACHE_DTYPES,
    FLOAT4_DTYPES,
    GROUP_SCALE_DTYPES,
    INTEGER_DTYPES,
    NO_OVERLAP,
    STORAGE_DTYPES,
    ArraySpec,
    Call,
    Operands,
    check_array,
    dtype_error,
    excess_error,
    has_shape,
    holds,
    is_4_bit,
    shape_error,
    value_error,
)

CODES = "e2m1"
"""What `codes` says that an array of uint8 holds in the place of int4."""


def check_latent(
    op: str,
    value_cache: ArraySpec | None,
    v_scale: ArraySpec | None,
    v_global: ArraySpec | None,
    v_scale_cache: ArraySpec | None = None,
) -> None:
    """Checks that a call whose V is a part of K has nothing for V alone.

    Raises:
        ValueError: it has.
    """
    of_values = {"value_cache": value_cache, "v_scale": v_scale, "v_global": v_global}
    of_values["v_scale_cache"] = v_scale_cache
    for argument, array in of_values.items():
        if array is not None:
            raise excess_error(op, argument, "be None where V is a part of K", array)


def check_dtypes(
    op: str, kv_cache: ArraySpec, value_cache: ArraySpec | None, argument: str, dtype: str
) -> None:
    """Checks that a cache has the dtype of `argument`, or one of CACHE_DTYPES.

    Raises:
        TypeError: it has neither, or K and V differ and are not of 8-bit and of 4-bit integers or
            floats.
    """
    if kv_cache.dtype in STORAGE_DTYPES and dtype in STORAGE_DTYPES and kv_cache.dtype != dtype:
        raise dtype_error(op, argument, f"kv_cache's dtype {kv_cache.dtype}", dtype)
    if kv_cache.dtype not in (dtype, *CACHE_DTYPES):
        rule = (
            f"{argument}'s dtype {dtype}, or {', '.join(CACHE_DTYPES[:-1])} or {CACHE_DTYPES[-1]}"
        )
        raise dtype_error(op, "kv_cache", rule, kv_cache.dtype)
    if value_cache is None or value_cache.dtype == kv_cache.dtype:
        return
    may_mix = [x == "int8" or is_4_bit(x) for x in (kv_cache.dtype, value_cache.dtype)]
    is_one_int8 = (kv_cache.dtype == "int8") != (value_cache.dtype == "int8")
    if all(may_mix) and is_one_int8 and dtype in STORAGE_DTYPES:
        return
    rule = f"kv_cache's dtype {kv_cache.dtype}"
    if all(may_mix) and is_one_int8:
        rule += f", that of {argument}, which is copied"
    elif may_mix[0] and dtype in STORAGE_DTYPES:
        rule += f", or {'uint8' if kv_cache.dtype == 'int8' else 'int8'}"
    raise dtype_error(op, "value_cache", rule, value_cache.dtype)


def add_features(
    op: str,
    operands: Operands,
    cache: KvLayout,
    caches: Sequence[ArraySpec],
    k_scale: ArraySpec | None,
    v_scale: ArraySpec | None,
    *,
    codes: str | None,
    global_scales: Sequence[ArraySpec | None],
    row_sizes: Sequence[int],
    is_quantized: bool,
    is_latent: bool,
    reference_argument: str,
    made: Mapping[str, ArraySpec | None] = MappingProxyType({}),
) -> None:
    """Adds the optional arrays of a cache to a call's operands: the array of V, and the scales of
    keys and values, which it checks.

    Args:
        caches: the cache's arrays, as a handler takes them.
        codes: what an array of uint8 holds; None: int4.
        global_scales: k_global and v_global.
        row_sizes: the numbers of a row of K and of V.
        is_quantized: whether the cache has fewer bits than `reference_argument`. Only then there
            are scales; a cache of integers must have them.
        is_latent: whether V is a part of K.
        reference_argument: the name of the query, or of the keys to be written.
        made: for an op that can make scales, by its name each array that gets those that the call
            makes; None: the call does not make them.

    Raises:
        ValueError: a scale has a wrong shape, or is missing, or the cache is not scaled.
        TypeError: a scale has a wrong dtype.
    """
    _add_codes(op, operands, caches, codes, is_quantized=is_quantized)
    for value_cache in caches[1:]:
        operands.add_feature("value_cache", value_cache, cache.head_dim)
    of_arrays = (("k_scale", k_scale, caches[0]), ("v_scale", v_scale, caches[-1]))
    for (argument, scales, array), row_size in zip(of_arrays, row_sizes, strict=True):
        if scales is not None and not is_quantized:
            only = f"be None unless kv_cache has fewer bits than {reference_argument}"
            raise excess_error(op, argument, only, scales)
        if scales is not None:
            _add_scales(op, operands, cache, argument, scales, array.dtype, row_size)
    for (argument, scales, _), global_scale in zip(of_arrays, global_scales, strict=True):
        if global_scale is not None:
            of_made = made.get(f"{argument}_cache")
            _add_global_scale(op, operands, argument, scales or of_made, global_scale)
    for (given, scales, cached), row_size in zip(of_arrays, row_sizes, strict=True):
        argument = f"{given}_cache"
        made_scales = made.get(argument)
        if made_scales is None:
            continue
        if not is_quantized:
            only = f"be None unless kv_cache has fewer bits than {reference_argument}"
            raise excess_error(op, argument, only, made_scales)
        if scales is not None:
            rule = f"be None with {argument}, which gets the scales that the call makes"
            raise excess_error(op, given, rule, scales)
        _add_made_scales(op, operands, cache, argument, made_scales, cached.dtype, row_size)
    for argument, scales, array in of_arrays:
        is_needed = is_quantized and not (is_latent and argument == "v_scale")
        is_made = made.get(f"{argument}_cache") is not None
        are_integers = array.dtype in INTEGER_DTYPES and (codes is None or array.dtype == "int8")
        if scales is None and is_needed and not is_made and are_integers:
            rule = f"be given with a cache of {array.dtype}, which holds whole numbers"
            remedy = f"{argument}=1.0 keeps whole numbers"
            if made:
                remedy += f"; {argument}_cache gets scales that the call makes"
            raise value_error(op, argument, rule, None, remedy)


def _add_codes(
    op: str,
    operands: Operands,
    caches: Sequence[ArraySpec],
    codes: str | None,
    *,
    is_quantized: bool,
) -> None:
    are_floats = any(array.dtype in FLOAT4_DTYPES for array in caches)
    if codes is None and not are_floats:
        return
    if not isinstance(codes, str | None):
        raise dtype_error(op, "codes", "type str", type(codes).__name__)
    if codes not in (CODES, None):
        remedy = "None stands for whole numbers from -8 to 7"
        raise value_error(op, "codes", f"be {CODES!r} or None", codes, remedy)
    if not are_floats and all(array.dtype != "uint8" for array in caches):
        raise excess_error(op, "codes", "be None unless K or V has dtype uint8", codes)
    if is_quantized:
        operands.attributes.append((CODES, np.int64(1)))


def check_on_cuda(call: Call) -> None:
    """Raises ValueError for dtypes of 4 bits, which were tried on CPUs alone."""
    for argument, spec in zip(call.names, call.operands, strict=True):
        if argument in ("kv_cache", "value_cache") and spec.dtype in FLOAT4_DTYPES:
            remedy = f"Hold pairs of its numbers in uint8, and give codes={CODES!r}"
            raise value_error(
                call.op, argument, "have no dtype of 4 bits on CUDA", spec.dtype, remedy
            )


def _add_global_scale(
    op: str, operands: Operands, argument: str, scales: ArraySpec | None, array: ArraySpec
) -> None:
    name = argument.replace("scale", "global")
    if scales is None or len(scales.shape) != 4:
        rule = f"be None unless {argument} has groups, [..., num_kv_heads, groups]"
        raise excess_error(op, name, rule, array)
    if not (has_shape(array, ()) or has_shape(array, (1,))):
        raise shape_error(op, name, "[] or [1]", array.shape, "It is one number")
    if array.dtype != "float32":
        raise dtype_error(op, name, "dtype float32", array.dtype)
    operands.add_feature(name, array, None)


def _add_scales(
    op: str,
    operands: Operands,
    cache: KvLayout,
    argument: str,
    scales: ArraySpec,
    dtype: str,
    row_size: int,
) -> None:
    if len(scales.shape) == 4:
        _add_group_scales(op, operands, cache, argument, scales, dtype, row_size)
        return
    # A list of pairs: symbolic sizes cannot be keys of a dict.
    head_dims: list[tuple[tuple[int, ...], int | None]] = [
        ((cache.num_blocks, cache.block_size, cache.num_kv_heads), 2),
        ((cache.num_kv_heads,), 0),
        ((), None),
        ((1,), None),
    ]
    sizes = f"num_blocks={cache.num_blocks}, block_size={cache.block_size}"
    rule = f"[], [1], [num_kv_heads={cache.num_kv_heads}] or [{sizes}, num_kv_heads]"
    known = [head_dim for shape, head_dim in head_dims if has_shape(scales, shape)]
    if not known:
        remedy = "It is one number, or has one for each kv head, or for each position and kv head"
        raise shape_error(op, argument, rule, scales.shape, remedy)
    if scales.dtype != "float32":
        raise dtype_error(op, argument, "dtype float32", scales.dtype)
    _add_scale_array(operands, argument, scales, None if cache.head_dim is None else known[0])


def are_of_groups(scales: Any) -> bool:
    """Whether scales are of groups of a row's numbers. A float32 one of a whole row is one of its
    position."""
    return len(scales.shape) == 4 and (scales.shape[3] != 1 or scales.dtype != "float32")


def _add_group_scales(
    op: str,
    operands: Operands,
    cache: KvLayout,
    argument: str,
    scales: ArraySpec,
    dtype: str,
    row_size: int,
) -> None:
    sizes = [("num_blocks", cache.num_blocks), ("block_size", cache.block_size)]
    sizes += [("num_kv_heads", cache.num_kv_heads), ("groups", groups := scales.shape[3])]
    remedy = "It has scales of groups for each position and kv head"
    check_array(op, argument, scales, sizes, " or ".join(GROUP_SCALE_DTYPES), remedy)
    numbers = 2 if is_4_bit(dtype) else 1
    if not (holds(groups >= 1) and holds(row_size % (groups * numbers) == 0)):
        what = "numbers" if numbers == 1 else "pairs of numbers"
        rule = f"have a number of groups that divides the {row_size // numbers} {what} of a row"
        raise value_error(op, argument, rule, groups, "All groups of a row have one size")
    _add_scale_array(operands, argument, scales, None if cache.head_dim is None else 2)


def _add_made_scales(
    op: str,
    operands: Operands,
    cache: KvLayout,
    argument: str,
    array: ArraySpec,
    dtype: str,
    row_size: int,
) -> None:
    check_written(op, argument, array)
    if len(array.shape) == 4:
        _add_group_scales(op, operands, cache, argument, array, dtype, row_size)
        return
    names = ("num_blocks", "block_size", "num_kv_heads")
    sizes = [(name, getattr(cache, name)) for name in names]
    remedy = "It has a scale for each position and kv head"
    check_array(op, argument, array, sizes, "float32", remedy)
    _add_scale_array(operands, argument, array, None if cache.head_dim is None else 2)


def _add_scale_array(
    operands: Operands, argument: str, array: ArraySpec, head_dim: int | None
) -> None:
    operands.add_feature(argument, spanned(array), head_dim)
    if array.strides is not None:
        names = [f"{argument}_{of}_stride" for of in ("block", "position", "head", "group")]
        strides = (0,) * (3 - len(array.shape)) + array.strides
        operands.attributes.extend(zip(names, map(as_int64, strides), strict=False))
        if len(array.shape) == 4:
            operands.attributes.append((f"{argument}_groups", as_int64(array.shape[3])))


def check_written(op: str, argument: str, array: ArraySpec) -> None:
    """Raises ValueError if a dimension of an array that is written in place repeats the same
    elements, as ``torch.Tensor.expand`` makes it."""
    pairs = zip(array.shape, array.strides or (), strict=False)
    if any(stride == 0 and size != 1 for size, stride in pairs):
        remedy = "Make it without expand or as_strided"
        got = f"strides {list(array.strides or ())}"
        raise value_error(op, argument, NO_OVERLAP, got, remedy)
