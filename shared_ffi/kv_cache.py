"""The checks of a paged cache's dtypes and scales. `kv_layout` has those of its shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from shared_ffi.kv_layout import KvLayout, as_int64, spanned
from shared_ffi.spec import (
    CACHE_DTYPES,
    INTEGER_DTYPES,
    NO_OVERLAP,
    STORAGE_DTYPES,
    ArraySpec,
    Operands,
    check_array,
    dtype_error,
    excess_error,
    has_shape,
    shape_error,
    value_error,
)


def check_latent(
    op: str,
    value_cache: ArraySpec | None,
    v_scale: ArraySpec | None,
    v_scale_cache: ArraySpec | None = None,
) -> None:
    """Checks that a call whose V is a part of K has nothing for V alone.

    Raises:
        ValueError: it has.
    """
    of_values = {"value_cache": value_cache, "v_scale": v_scale, "v_scale_cache": v_scale_cache}
    for argument, array in of_values.items():
        if array is not None:
            raise excess_error(op, argument, "be None where V is a part of K", array)


def check_dtypes(
    op: str, kv_cache: ArraySpec, value_cache: ArraySpec | None, argument: str, dtype: str
) -> None:
    """Checks that a cache has the dtype of `argument`, or one of CACHE_DTYPES.

    Raises:
        TypeError: it has neither, or K and V differ and are not both of INTEGER_DTYPES.
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
    are_integers = {kv_cache.dtype, value_cache.dtype} == set(INTEGER_DTYPES)
    if are_integers and dtype in STORAGE_DTYPES:
        return
    rule = f"kv_cache's dtype {kv_cache.dtype}"
    if are_integers:
        rule += f", that of {argument}, which is copied"
    elif kv_cache.dtype in INTEGER_DTYPES and dtype in STORAGE_DTYPES:
        (other,) = set(INTEGER_DTYPES) - {kv_cache.dtype}
        rule += f", or {other}"
    raise dtype_error(op, "value_cache", rule, value_cache.dtype)


def add_features(
    op: str,
    operands: Operands,
    cache: KvLayout,
    caches: Sequence[ArraySpec],
    k_scale: ArraySpec | None,
    v_scale: ArraySpec | None,
    *,
    is_quantized: bool,
    is_latent: bool,
    reference_argument: str,
    made: Mapping[str, ArraySpec | None] = MappingProxyType({}),
) -> None:
    """Adds the optional arrays of a cache to a call's operands: the array of V, and the scales of
    keys and values, which it checks.

    Args:
        caches: the cache's arrays, as a handler takes them.
        is_quantized: whether the cache has fewer bits than `reference_argument`. Only then there
            are scales; a cache of integers must have them.
        is_latent: whether V is a part of K.
        reference_argument: the name of the query, or of the keys to be written.
        made: for an op that can make scales, by its name each array that gets those that the call
            makes, in the order of K and V; None: the call does not make them.

    Raises:
        ValueError: a scale has a wrong shape, or is missing, or the cache is not scaled.
        TypeError: a scale is not float32.
    """
    for value_cache in caches[1:]:
        operands.add_feature("value_cache", value_cache, cache.head_dim)
    of_arrays = (("k_scale", k_scale, caches[0]), ("v_scale", v_scale, caches[-1]))
    for argument, scales, _ in of_arrays:
        if scales is not None and not is_quantized:
            only = f"be None unless kv_cache has fewer bits than {reference_argument}"
            raise excess_error(op, argument, only, scales)
        if scales is not None:
            _add_scales(op, operands, cache, argument, scales)
    for (given, scales, _), (argument, array) in zip(of_arrays, made.items(), strict=False):
        if array is None:
            continue
        if not is_quantized:
            only = f"be None unless kv_cache has fewer bits than {reference_argument}"
            raise excess_error(op, argument, only, array)
        if scales is not None:
            rule = f"be None with {argument}, which gets the scales that the call makes"
            raise excess_error(op, given, rule, scales)
        _add_made_scales(op, operands, cache, argument, array)
    for argument, scales, array in of_arrays:
        is_needed = is_quantized and not (is_latent and argument == "v_scale")
        is_made = made.get(f"{argument}_cache") is not None
        if scales is None and is_needed and not is_made and array.dtype in INTEGER_DTYPES:
            rule = f"be given with a cache of {array.dtype}, which holds whole numbers"
            remedy = f"{argument}=1.0 keeps whole numbers"
            if made:
                remedy += f"; {argument}_cache gets scales that the call makes"
            raise value_error(op, argument, rule, None, remedy)


def _add_scales(
    op: str, operands: Operands, cache: KvLayout, argument: str, scales: ArraySpec
) -> None:
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


def _add_made_scales(
    op: str, operands: Operands, cache: KvLayout, argument: str, array: ArraySpec
) -> None:
    names = ("num_blocks", "block_size", "num_kv_heads")
    sizes = [(name, getattr(cache, name)) for name in names]
    remedy = "It has a scale for each position and kv head"
    check_array(op, argument, array, sizes, "float32", remedy)
    check_written(op, argument, array)
    _add_scale_array(operands, argument, array, None if cache.head_dim is None else 2)


def _add_scale_array(
    operands: Operands, argument: str, array: ArraySpec, head_dim: int | None
) -> None:
    operands.add_feature(argument, spanned(array), head_dim)
    if array.strides is not None:
        names = [f"{argument}_{of}_stride" for of in ("block", "position", "head")]
        strides = (0,) * (3 - len(array.shape)) + array.strides
        operands.attributes.extend(zip(names, map(as_int64, strides), strict=True))


def check_written(op: str, argument: str, array: ArraySpec) -> None:
    """Raises ValueError if a dimension of an array that is written in place repeats the same
    elements, as ``torch.Tensor.expand`` makes it."""
    pairs = zip(array.shape, array.strides or (), strict=False)
    if any(stride == 0 and size != 1 for size, stride in pairs):
        remedy = "Make it without expand or as_strided"
        got = f"strides {list(array.strides or ())}"
        raise value_error(op, argument, NO_OVERLAP, got, remedy)
