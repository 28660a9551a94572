"""The layouts of a paged cache: which dimension of its arrays is which.

A layout names the dimensions in their order: ``n`` num_blocks, ``b`` block_size, ``h``
num_kv_heads, ``2`` K then V, ``d`` head_size, which is the last; two in parentheses are one
dimension, and one that is named several times, side by side, is several, counted through. The
kernels know strides only: all layouts are one to them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

from shared_ffi.spec import (
    CACHE_DTYPES,
    ArraySpec,
    Operands,
    dtype_error,
    shape_error,
    value_error,
)

DEFAULT = "nb(h2)d"
"""``[num_blocks, block_size, 2 * num_kv_heads, head_size]``: K of kv head h at index 2h, then V."""

SEPARATE = "nbhd"
"""The default where K and V are two arrays."""

_NAMES = {"n": "num_blocks", "b": "block_size", "h": "num_kv_heads", "2": "2", "d": "head_size"}


class KvCache(NamedTuple):
    """Sizes of a paged cache, and where in its array things lie, in elements."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    block_stride: int
    position_stride: int
    head_stride: int
    value_offset: int
    """From K to V; 0 where V is another array."""

    head_dim: int | None
    """The array's dimension along which kv heads lie, each in one piece; None: there is none."""

    def attributes(self) -> tuple[tuple[str, np.int64], ...]:
        """Of a custom call, for a cache that has not the default layout."""
        sizes = self._asdict()
        del sizes["head_dim"]
        return tuple((name, _int64(value)) for name, value in sizes.items())


def check(
    op: str,
    kv_layout: str | None,
    kv_cache: ArraySpec,
    value_cache: ArraySpec | None,
    head_size: int,
    num_kv_heads: int | None = None,
) -> tuple[KvCache, tuple[tuple[str, np.int64], ...], list[ArraySpec]]:
    """The cache, the attributes that tell a handler of it, and its arrays as a handler takes them:
    strided ones as the memory that they span.

    Args:
        op: for messages.
        kv_layout: None for the default.
        num_kv_heads: what it must be.

    Raises:
        ValueError: the layout names no array of this kind, or a shape is not that of the layout.
    """
    axes = parse(op, kv_layout, is_separate=value_cache is not None)
    strides = kv_cache.strides or _dense(kv_cache.shape)
    sizes = _sizes(axes, kv_cache.shape)
    wanted_heads = sizes.get("h") if num_kv_heads is None else num_kv_heads
    is_right = sizes.get("d") == head_size and sizes.get("h") == wanted_heads
    if not is_right or sizes["b"] < 1 or sizes["h"] < 1:
        known = {"h": num_kv_heads, "d": head_size}
        raise shape_error(op, "kv_cache", _describe(axes, known), kv_cache.shape)
    if value_cache is not None and value_cache.shape != kv_cache.shape:
        rule = f"{list(kv_cache.shape)} as kv_cache has"
        raise shape_error(op, "value_cache", rule, value_cache.shape)
    if strides[-1] != 1 or (value_cache and value_cache.strides != kv_cache.strides):
        rule = "be contiguous in head_size, and have the strides of value_cache if there is one"
        raise value_error(op, "kv_cache", rule, f"strides {list(strides)}")
    for outer, (one, other) in enumerate(pairwise(axes)):
        inner_stride = strides[outer + 1] * kv_cache.shape[outer + 1]
        if one == other and strides[outer] != inner_stride:
            rule = f"have equal distances along {_describe([one], {})[1:-1]}"
            raise value_error(op, "kv_cache", rule, f"strides {list(strides)}")
    step = _steps(axes, strides, sizes)
    head_dim = next((i for i, axis in enumerate(axes) if axis.strip("(").startswith("h")), None)
    if head_dim is not None and kv_cache.shape[head_dim] % sizes["h"] != 0:
        head_dim = None  # a part of it is no part of the heads
    cache = KvCache(
        num_blocks=sizes["n"],
        block_size=sizes["b"],
        num_kv_heads=sizes["h"],
        block_stride=step["n"],
        position_stride=step["b"],
        head_stride=step["h"],
        value_offset=step.get("2", 0),
        head_dim=head_dim,
    )
    arrays = [kv_cache] if value_cache is None else [kv_cache, value_cache]
    is_default = "".join(axes) == DEFAULT and kv_cache.strides is None
    attributes = () if is_default else cache.attributes()
    return cache, attributes, [_spanned(array) for array in arrays]


def check_dtypes(
    op: str, kv_cache: ArraySpec, value_cache: ArraySpec | None, argument: str, dtype: str
) -> None:
    """A cache has the dtype of that argument, or 8 bits; raises TypeError."""
    if kv_cache.dtype not in (dtype, *CACHE_DTYPES):
        rule = (
            f"{argument}'s dtype {dtype}, or {', '.join(CACHE_DTYPES[:-1])} or {CACHE_DTYPES[-1]}"
        )
        raise dtype_error(op, "kv_cache", rule, kv_cache.dtype)
    if value_cache is not None and value_cache.dtype != kv_cache.dtype:
        rule = f"kv_cache's dtype {kv_cache.dtype}"
        raise dtype_error(op, "value_cache", rule, value_cache.dtype)


def add_features(
    op: str,
    operands: Operands,
    cache: KvCache,
    caches: Sequence[ArraySpec],
    k_scale: ArraySpec | None,
    v_scale: ArraySpec | None,
    *,
    has_fewer_bits: bool,
    than: str,
) -> None:
    """Adds to a call's operands what a cache may have besides its first array: the array of V, and
    the scales of keys and values, which it checks.

    Args:
        caches: the arrays, as a handler takes them.
        has_fewer_bits: whether the cache has, than the argument `than`.

    Raises:
        ValueError, TypeError: a shape or a dtype is wrong, or there is nothing to scale.
    """
    for value_cache in caches[1:]:
        operands.add_feature("value_cache", value_cache, cache.head_dim)
    if k_scale is None and v_scale is None:
        return
    # No dict: sizes may be symbols.
    head_dims: list[tuple[tuple[int, ...], int | None]] = [
        ((cache.num_blocks, cache.block_size, cache.num_kv_heads), 2),
        ((cache.num_kv_heads,), 0),
        ((), None),
        ((1,), None),
    ]
    sizes = f"num_blocks={cache.num_blocks}, block_size={cache.block_size}"
    rule = f"[], [1], [num_kv_heads={cache.num_kv_heads}] or [{sizes}, num_kv_heads]"
    for argument, scales in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scales is None:
            continue
        if not has_fewer_bits:
            only = f"be None unless kv_cache has fewer bits than {than}"
            raise value_error(op, argument, only, f"shape {list(scales.shape)}")
        known = [head_dim for shape, head_dim in head_dims if shape == scales.shape]
        if not known:
            raise shape_error(op, argument, rule, scales.shape)
        if scales.dtype != "float32":
            raise dtype_error(op, argument, "dtype float32", scales.dtype)
        operands.add_feature(argument, scales, known[0])


@lru_cache
def parse(op: str, kv_layout: str | None, is_separate: bool) -> tuple[str, ...]:
    """The layout's dimensions: ``("n", "b", "(h2)", "d")``."""
    layout = kv_layout or (SEPARATE if is_separate else DEFAULT)
    axes = tuple(re.findall(r"\(h2\)|\(2h\)|\(2d\)|.", layout))
    letters = "".join(axis.strip("()") for axis, _ in groupby(axes))
    wanted = "bdhn" if is_separate else "2bdhn"
    if sorted(letters) != sorted(wanted) or axes[-1] not in ("d", "(2d)") or "(" in axes:
        rule = f"name each of {', '.join(sorted(wanted))} once, with d last, as "
        rule += "'nbhd' does where V is value_cache" if is_separate else "'nb(h2)d' or 'n2bhd' do"
        raise value_error(op, "kv_layout", rule, repr(kv_layout))
    return axes


def sizes(kv_layout: str | None, shape: Sequence[int]) -> tuple[int, int]:
    """num_blocks and block_size of an array."""
    layout = kv_layout or DEFAULT  # SEPARATE has them at the same places
    axes = parse("kv_layout", layout, is_separate="2" not in layout)
    num_blocks = math.prod(size for axis, size in zip(axes, shape, strict=True) if axis == "n")
    return num_blocks, shape[axes.index("b")]


def of_many(kv_layout: str | None, is_separate: bool) -> tuple[str, int]:
    """The layout of an array with the blocks of many, one after the other, and which dimension it
    has more than theirs."""
    layout = kv_layout or (SEPARATE if is_separate else DEFAULT)
    axes = parse("kv_layout", layout, is_separate)
    return layout.replace("n", "nn", 1), axes.index("n")


def _sizes(axes: Sequence[str], shape: Sequence[int]) -> dict[str, int]:
    """By letter; empty if the shape is not of the layout."""
    found: dict[str, int] = {}
    if len(axes) != len(shape):
        return found
    for axis, dims in groupby(zip(axes, shape, strict=True), lambda dim: dim[0]):
        size = math.prod(size for _, size in dims)
        if (axis == "2" and size != 2) or (len(axis) > 1 and size % 2 != 0):
            return {}
        found[axis.strip("(2)") or "2"] = size // 2 if len(axis) > 1 else size
    return found


def _steps(axes: Sequence[str], strides: Sequence[int], sizes: dict[str, int]) -> dict[str, int]:
    """Elements from one index of a letter to the next."""
    steps: dict[str, int] = {}
    for axis, stride in zip(axes, strides, strict=True):
        for letter in reversed(axis.strip("()")):
            steps[letter] = stride
            stride *= sizes.get(letter, 2)
    return steps


def _describe(axes: Sequence[str], known: dict[str, int | None]) -> str:
    def name(axis: str) -> str:
        letter = axis.strip("(2)") or "2"
        size, factor = known.get(letter), 2 if len(axis) > 1 else 1
        product = f"2 * {_NAMES[letter]}" if factor == 2 else _NAMES[letter]
        return product if size is None else f"{product}={factor * size}"

    return f"[{', '.join(map(name, axes))}]"


def _int64(value: int) -> np.int64:
    # A symbol stays one: as a number, it would be the one size that a program is for.
    return np.int64(value) if isinstance(value, int) else value


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _spanned(array: ArraySpec) -> ArraySpec:
    if array.strides is None:
        return array
    last = sum((size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True))
    return ArraySpec((0 if 0 in array.shape else last + 1,), array.dtype)
