"""The layout of a paged cache, and the check of its shape and strides.

A layout names the dimensions from the outermost to the innermost, one letter each: ``n``
num_blocks, ``b`` block_size, ``h`` num_kv_heads, ``2`` K then V, ``d`` head_size.

* ``(h2)``, ``(2h)`` and ``(2d)`` are one dimension that counts two things, the second one faster.
* A name that is repeated, such as ``nn``, stands for several dimensions that count one thing.

A cache of K alone, for attention whose V is a part of K, has no ``2``; where there is one kv head,
it may have no ``h``; where blocks have one position, a cache may have no ``b``. The kernels know
only strides, so all layouts are the same to them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

from shared_ffi.spec import (
    ArraySpec,
    dtype_error,
    has_shape,
    holds,
    is_4_bit,
    numbers_of,
    shape_error,
    value_error,
)

DEFAULT = "nb(h2)d"
"""``[num_blocks, block_size, 2 * num_kv_heads, head_size]``: K of kv head h at index 2h, then V."""

SEPARATE = "nbhd"
"""The default where K and V are two arrays."""

LATENT = "nbd"
"""The default where V is a part of K: a row is shared by all query heads."""

_OTHERS = ("2nbhd", "n2bhd", "n2hbd", "nbh(2d)", "nhb(2d)")
"""Layouts of other libraries, to be proposed where a cache has the wrong shape."""

_LETTERS = {DEFAULT: ("2bdhn",), SEPARATE: ("bdhn",), LATENT: ("bdn", "bdhn")}
"""By their default, the letters of layouts, sorted; ``b`` may be missing."""

_RULES = {
    DEFAULT: "name each of 2, d, h, n, and perhaps b, once, with d last, as 'nb(h2)d' or 'n2bhd' "
    "do",
    SEPARATE: "name each of d, h, n, and perhaps b, once, with d last, as 'nbhd' does where V is "
    "value_cache",
    LATENT: "name each of d, n, and perhaps b and h, once, with d last, as 'nbd' does where V is a "
    "part of K",
}

_OF_FLASHINFER = {
    ("NHD", DEFAULT): "n2bhd",
    ("HND", DEFAULT): "n2hbd",
    ("NHD", SEPARATE): "nbhd",
    ("HND", SEPARATE): "nhbd",
}
"""Its names of layouts, by the default that they take the place of."""

_AXIS = re.compile(r"\((h2|2h|2d)\)|(.)", re.DOTALL)
_NAMES = {"n": "num_blocks", "b": "block_size", "h": "num_kv_heads", "2": "2", "d": "head_size"}
_WITH_KV = {"h2": "h", "2h": "h", "2d": "d"}
"""The axes that also count K and V, and what else they count."""


class KvLayout(NamedTuple):
    """Sizes of a paged cache, and its strides in elements."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    block_stride: int
    position_stride: int
    head_stride: int
    value_offset: int
    """The distance from K to V; 0 where V is another array, or a part of K."""

    head_dim: int | None
    """The dimension to split where devices share the kv heads; None if none can be split."""

    def attributes(self) -> tuple[tuple[str, np.int64], ...]:
        """The attributes of a custom call whose cache is not in the default layout."""
        sizes = self._asdict()
        del sizes["head_dim"]
        return tuple((name, as_int64(value)) for name, value in sizes.items())


def check(
    op: str,
    kv_layout: str | None,
    kv_cache: ArraySpec,
    value_cache: ArraySpec | None,
    head_size: int,
    num_kv_heads: int | None = None,
    *,
    value_head_size: int | None = None,
    is_latent: bool = False,
) -> tuple[KvLayout, tuple[tuple[str, np.int64], ...], list[ArraySpec]]:
    """Checks layout, shapes and strides of a cache.

    Args:
        op: for messages.
        kv_layout: None for the default.
        head_size: in numbers, of which an element of the cache may hold two.
        num_kv_heads: what the cache must have; None: any number.
        value_head_size: what ``value_cache`` must have; None: any number up to `head_size`.
        is_latent: whether V is a part of K.

    Returns:
        The cache; the attributes that describe it to a handler; and its arrays as a handler takes
        them: a strided array as the one-dimensional memory that it spans.

    Raises:
        ValueError: the layout is not valid, or an array does not have its shape.
        TypeError: the layout is no string.
    """
    default = default_layout(is_separate=value_cache is not None, is_latent=is_latent)
    if not isinstance(kv_layout, str | None):
        raise dtype_error(op, "kv_layout", "type str", type(kv_layout).__name__)
    layout = default if kv_layout is None else kv_layout
    axes = _parse(op, layout, default)
    if num_kv_heads not in (None, 1) and "h" not in layout:
        rule = f"name h with num_kv_heads={num_kv_heads}"
        remedy = "Add h where the cache has its heads"
        raise value_error(op, "kv_layout", rule, repr(layout), remedy)
    sizes = _sizes(axes, kv_cache.shape)
    wanted_heads = sizes.get("h") if num_kv_heads is None else num_kv_heads
    columns = _columns(op, "kv_cache", kv_cache.dtype, head_size)
    is_right = sizes.get("d") == columns and sizes.get("h") == wanted_heads
    if not is_right or sizes["b"] < 1 or sizes["h"] < 1:
        known = {"h": num_kv_heads, "d": columns}
        rule = ", ".join(_describe(axis, known, kv_cache.dtype) for axis in axes)
        hints = _misfits(axes, kv_cache, columns, num_kv_heads)
        if kv_layout is None:
            hints = [*_other_caches(default, kv_cache, columns, num_kv_heads), *hints]
            if default == DEFAULT and _may_lack_values(kv_cache.shape, columns, num_kv_heads):
                hints.append("If it holds K alone, give V's cache as value_cache")
        hints = hints or ["Correct the cache, or name its dimensions in kv_layout"]
        raise shape_error(op, "kv_cache", f"[{rule}]", kv_cache.shape, ". ".join(hints))
    in_memory = _in_memory(kv_cache)
    strides, sizes = in_memory.strides or _dense(in_memory.shape), _sizes(axes, in_memory.shape)
    if strides[-1] != 1:
        rule = "be contiguous in head_size"
        raise value_error(op, "kv_cache", rule, f"strides {list(strides)}", _COPY)
    units: tuple[tuple[str, np.int64], ...] = ()
    if value_cache is not None:
        units = _units(op, in_memory, strides, value_cache, head_size, value_head_size)
    for outer, (axis, next_axis) in enumerate(pairwise(axes)):
        dense_stride = strides[outer + 1] * in_memory.shape[outer + 1]
        if axis == next_axis and strides[outer] != dense_stride:
            rule = f"have equal distances along {_describe(axis, {})}"
            raise value_error(op, "kv_cache", rule, f"strides {list(strides)}", _COPY)
    step = _steps(axes, strides, sizes)
    cache = KvLayout(
        num_blocks=sizes["n"],
        block_size=sizes["b"],
        num_kv_heads=sizes["h"],
        block_stride=step["n"],
        position_stride=step.get("b", 0),
        head_stride=step.get("h", 0),
        value_offset=step.get("2", 0),
        head_dim=_head_dim(axes, kv_cache.shape, sizes["h"]),
    )
    caches = [kv_cache] if value_cache is None else [kv_cache, value_cache]
    is_default = layout == DEFAULT and kv_cache.strides is None
    attributes = () if is_default else (*cache.attributes(), *units)
    return cache, attributes, [spanned(array) for array in caches]


def _units(
    op: str,
    kv_cache: ArraySpec,
    strides: tuple[int, ...],
    value_cache: ArraySpec,
    head_size: int,
    value_head_size: int | None,
) -> tuple[tuple[str, np.int64], ...]:
    """Checks the array of V beside the array of K, as it lies in memory, and its strides.

    Returns:
        The attributes that say how V's strides follow from those of K; none where they are equal.
    """
    *sizes, key_columns = kv_cache.shape
    columns = value_cache.shape[-1] if value_cache.shape else 0
    if value_head_size is None:
        most = head_size // numbers_of(value_cache.dtype)
        is_right, last = 1 <= columns <= most, f"1 to {most}"
    else:
        wanted = _columns(op, "value_cache", value_cache.dtype, value_head_size)
        is_right, last = columns == wanted, str(wanted)
    if not (is_right and has_shape(value_cache, (*sizes, columns))):
        but_for = "the head size"
        if pairs := [x.dtype for x in (kv_cache, value_cache) if numbers_of(x.dtype) > 1]:
            but_for += f", of which an element of {pairs[0]} holds two numbers"
        rule = f"[{', '.join(map(str, sizes))}, {last}], as kv_cache but for {but_for}"
        remedy = "Make both caches of the same blocks and heads"
        raise shape_error(op, "value_cache", rule, value_cache.shape, remedy)
    _columns(op, "value_cache", value_cache.dtype, columns * numbers_of(value_cache.dtype))
    value_cache = _in_memory(value_cache)
    columns = value_cache.shape[-1]
    found = value_cache.strides or _dense(value_cache.shape)
    if found == strides:
        return ()
    in_proportion = [x * columns for x in strides[:-1]]
    if found[-1] == 1 and [x * key_columns for x in found[:-1]] == in_proportion:
        common = math.gcd(key_columns, columns)
        units = {"key_unit": key_columns // common, "value_unit": columns // common}
        return tuple((name, np.int64(unit)) for name, unit in units.items())
    rule = f"have the strides of kv_cache, {list(strides)}"
    if columns != key_columns:
        rule += f", or {columns}/{key_columns} of them"
    raise value_error(op, "value_cache", rule, f"strides {list(found)}", _COPY)


def _columns(op: str, argument: str, dtype: str, head_size: int) -> int:
    """The elements of a row of the cache."""
    if is_4_bit(dtype) and not holds(head_size % 2 == 0):
        rule = f"have an even head size with dtype {dtype}, which holds pairs (int8 holds any)"
        remedy = "Pad the heads by a zero, or make the cache of int8"
        raise value_error(op, argument, rule, head_size, remedy)
    return head_size // numbers_of(dtype)


def _in_memory(array: ArraySpec) -> ArraySpec:
    """An array in units of memory: pairs of numbers, where XLA packs an array of 4 bits."""
    if not is_4_bit(array.dtype) or numbers_of(array.dtype) > 1:
        return array
    return array._replace(shape=(*array.shape[:-1], array.shape[-1] // 2))


_COPY = "Pass it as it was made, or make a copy of it that is contiguous"


def default_layout(*, is_separate: bool, is_latent: bool) -> str:
    """The layout that None stands for: where K and V are two arrays, where V is a part of K, and
    elsewhere."""
    if is_latent:
        return LATENT
    return SEPARATE if is_separate else DEFAULT


def num_blocks_and_size(op: str, kv_layout: str | None, shape: Sequence[int]) -> tuple[int, int]:
    """num_blocks and block_size of a cache with this shape."""
    if kv_layout is None:  # each default begins with them
        return shape[0], shape[1]
    kind = DEFAULT if "2" in kv_layout else SEPARATE if "h" in kv_layout else LATENT
    axes = _parse(op, kv_layout, kind)
    if len(axes) != len(shape):
        rule = ", ".join(_describe(axis, {}) for axis in axes)
        remedy = "Name its dimensions in kv_layout"
        raise shape_error(op, "kv_cache", f"[{rule}]", tuple(shape), remedy)
    totals = _totals(axes, shape)
    return totals["n"], totals.get("b", 1)


def stacked(layout: str) -> tuple[str, int]:
    """The layout of several caches that are stacked into one array with all of their blocks, and
    the dimension along which they are stacked."""
    return layout.replace("n", "nn", 1), _axes(layout).index("n")


@lru_cache
def _parse(op: str, layout: str, default: str) -> tuple[str, ...]:
    """The layout's axes; raises ValueError if it does not name each letter once, with d last.

    `default`: the layout of the same letters that None stands for.
    """
    axes = _axes(layout)
    letters = [letter for axis, _ in groupby(axes) for letter in axis]
    allowed = [*_LETTERS[default], *[each.replace("b", "") for each in _LETTERS[default]]]
    if "".join(sorted(letters)) not in allowed or axes[-1] not in ("d", "2d"):
        remedy = "Name the cache's dimensions in their order, in brackets those that are one"
        if (layout, default) in _OF_FLASHINFER:
            remedy = f"FlashInfer's {layout} is {_OF_FLASHINFER[layout, default]!r} here"
        elif missing := [x for x in _LETTERS[default][0] if x not in layout and x != "b"]:
            remedy = f"It lacks {' and '.join(missing)}"
        raise value_error(op, "kv_layout", _RULES[default], repr(layout), remedy)
    return axes


def _axes(layout: str) -> tuple[str, ...]:
    """Splits ``"nb(h2)d"`` into ``("n", "b", "h2", "d")``."""
    return tuple(pair or letter for pair, letter in _AXIS.findall(layout))


def _totals(axes: Sequence[str], shape: Sequence[int]) -> dict[str, int]:
    """The size of each axis; for one that is repeated, the product of its dimensions."""
    totals = dict.fromkeys(axes, 1)
    for axis, size in zip(axes, shape, strict=True):
        totals[axis] *= size
    return totals


def _sizes(axes: Sequence[str], shape: Sequence[int]) -> dict[str, int]:
    """The size of each letter, or nothing if the shape is not one of the layout's."""
    if len(axes) != len(shape):
        return {}
    letters = "".join(axes)
    sizes = {"2": 2} | dict.fromkeys(set("bh") - set(letters), 1)
    for axis, total in _totals(axes, shape).items():
        if axis not in _WITH_KV:
            sizes[axis] = total
        elif total % 2 == 0:
            sizes[_WITH_KV[axis]] = total // 2
        else:
            return {}
    return sizes if sizes["2"] == 2 else {}


def _fits(layout: str, shape: Sequence[int], columns: int, num_kv_heads: int | None) -> bool:
    sizes = _sizes(_axes(layout), shape)
    return sizes.get("d") == columns and num_kv_heads in (None, sizes["h"])


def _misfits(
    axes: Sequence[str], kv_cache: ArraySpec, columns: int, num_kv_heads: int | None
) -> list[str]:
    """What does not fit in a cache with the right number of dimensions: it may be right, and the
    query or the keys wrong. `num_kv_heads`: that of the keys; None: there is only the query."""
    if len(axes) != len(kv_cache.shape):
        return []
    for axis, total in _totals(axes, kv_cache.shape).items():
        if axis in _WITH_KV and total % 2 != 0:
            return [f"{total} is odd"]
    sizes, dtype = _sizes(axes, kv_cache.shape), kv_cache.dtype
    other = "query" if num_kv_heads is None else "key"
    return [
        f"{other} has {_describe(letter, {letter: wanted}, dtype)}, kv_cache {sizes[letter]}"
        for letter, wanted in (("h", num_kv_heads), ("d", columns))
        if sizes and wanted is not None and sizes[letter] != wanted
    ]


def _other_caches(
    default: str, kv_cache: ArraySpec, columns: int, num_kv_heads: int | None
) -> list[str]:
    """What a cache that does not have the default layout could be, and the argument that says so.
    `num_kv_heads`: that of the keys; None: there is only the query."""
    shape, is_update = kv_cache.shape, num_kv_heads is not None
    if default == LATENT and len(shape) > len(LATENT):
        given = "value has no columns" if is_update else "value_head_size is given"
        return [f"{given}, which says that V is a part of K: not where the cache holds both"]
    if default != DEFAULT:
        return []
    if len(shape) == len(LATENT) and shape[-1] == columns:
        argument = "key[..., :0] as value" if is_update else "value_head_size"
        return [f"If V is a part of K, give {argument}"]
    if fits := [x for x in _OTHERS if _fits(x, shape, columns, num_kv_heads)]:
        return [f"It would fit kv_layout={' or '.join(map(repr, fits))}"]
    if len(shape) == 5:
        return ["If its first dimension counts layers, give the cache of one"]
    return ["Give each of these a dimension of its own"] if len(shape) < 4 else []


def _may_lack_values(shape: Sequence[int], columns: int, num_kv_heads: int | None) -> bool:
    """Whether a cache of the wrong shape is one of K alone."""
    sizes = _sizes(_axes(SEPARATE), shape)
    if sizes.get("d") != columns:
        return False
    return sizes["h"] % 2 == 1 if num_kv_heads is None else sizes["h"] == num_kv_heads


def _steps(axes: Sequence[str], strides: Sequence[int], sizes: dict[str, int]) -> dict[str, int]:
    """The distance in elements from one index of a letter to the next."""
    steps: dict[str, int] = {}
    for axis, stride in zip(axes, strides, strict=True):
        for letter in reversed(axis):
            steps[letter] = stride
            stride *= sizes[letter]
    return steps


def _head_dim(axes: Sequence[str], shape: Sequence[int], num_kv_heads: int) -> int | None:
    if num_kv_heads == 1:
        return None
    # Half of "2h" is all of K or all of V, so it has no heads to share.
    dim = next((dim for dim, axis in enumerate(axes) if axis in ("h", "h2")), None)
    # Where heads have several dimensions, one of them does not have them all.
    return dim if dim is not None and shape[dim] % num_kv_heads == 0 else None


def _describe(axis: str, known: Mapping[str, int | None], dtype: str = "") -> str:
    """A dimension in an error message: ``2 * num_kv_heads=8``, or without a size if not known."""
    letter = _WITH_KV.get(axis, axis)
    name, size, factor = _NAMES[letter], known.get(letter), 1
    if letter == "d" and numbers_of(dtype) > 1:
        name += f" / {numbers_of(dtype)}"
    if axis in _WITH_KV:
        name, factor = f"2 * {name}", 2
    return name if size is None else f"{name}={factor * size}"


def as_int64(value: int) -> np.int64:
    """The value of an attribute. A symbolic size stays a symbol: as a number, it would fix the size
    of the whole program."""
    return np.int64(value) if isinstance(value, int) else value


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def spanned(array: ArraySpec) -> ArraySpec:
    """An array as a handler takes it: a strided one as the one-dimensional memory that it spans."""
    if array.strides is None:
        return array
    last = sum((size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True))
    return ArraySpec((0 if 0 in array.shape else last + 1,), array.dtype)
