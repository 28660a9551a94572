"""Rows of tokens that are part of wider rows, such as the query of a fused QKV projection.

An operand ``[num_tokens, num_heads, head_size]`` may have any distance from one token to the next,
as long as the heads of a token are dense. ``csrc/ffi/token_rows_operand.h`` reads what is written
here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shared_ffi.spec import ArraySpec, Scalar, shape_error, value_error

_MAX_ELEMENTS = 2**30
"""The most elements of a token, which kernels number with 32 bits."""


def check(
    op: str, argument: str, rows: ArraySpec, heads: str = "num_heads", remedy: str = ""
) -> None:
    """Checks the number of dimensions, and the size of a token. The handler checks that of symbols.

    Args:
        heads: the name of the number of heads.
        remedy: for another number of dimensions, if it is known.
    """
    if len(rows.shape) != 3:
        split = "Give tokens, heads and the numbers of a head a dimension each"
        pack = "Pack the tokens of all sequences into one dimension"
        remedy = remedy or (split if len(rows.shape) < 3 else pack)
        rule = f"[num_tokens, {heads}, head_size]"
        raise shape_error(op, argument, rule, rows.shape, remedy)
    _, num_heads, head_size = rows.shape
    if isinstance(num_heads * head_size, int) and num_heads * head_size > _MAX_ELEMENTS:
        rule = "have num_heads * head_size of at most 2**30"
        remedy = "Are its dimensions in this order?"
        raise value_error(op, argument, rule, f"{num_heads} * {head_size}", remedy)


def are_rows(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether an array of this shape and these strides, in elements, has dense heads."""
    _, num_heads, head_size = shape
    token_stride, head_stride, stride = strides
    return (
        (stride == 1 or head_size == 1)
        and (head_stride == head_size or num_heads == 1)
        and token_stride >= num_heads * head_size
    )


def as_operand(array: ArraySpec) -> ArraySpec:
    """The array as a handler takes it: ``[num_tokens, stride]`` if it has strides."""
    if array.strides is None:
        return array
    return ArraySpec((array.shape[0], array.strides[0]), array.dtype)


def attributes(rows: ArraySpec, values: ArraySpec | None = None) -> tuple[tuple[str, Scalar], ...]:
    """The attributes of a custom call with these operands, which have the same number of heads."""
    arrays = [rows] if values is None else [rows, values]
    if all(array.strides is None for array in arrays):
        return ()
    _, num_heads, head_size = rows.shape
    sizes = {"row_heads": num_heads, "row_head_size": head_size}
    if values is not None and values.strides is not None and values.shape[2] != head_size:
        sizes["row_value_head_size"] = values.shape[2]
    return tuple((name, np.int64(size)) for name, size in sizes.items())
