"""The checks of the Walsh-Hadamard transforms of ``kv_cache_update``, and of ``hadamard``, which is
no custom call: each frontend writes it in its own operators, so that its compiler can fuse them."""

from __future__ import annotations

from typing import Any

import numpy as np

from shared_ffi.paged_attention import MAX_HEAD_SIZE
from shared_ffi.spec import (
    STORAGE_DTYPES,
    ArraySpec,
    Operands,
    check_array,
    dtype_error,
    excess_error,
    holds,
    shape_error,
    value_error,
)

OP = "hadamard"

_CHOICES = ("k", "v", "kv")


def of(op: str, hadamard: Any) -> str:
    """What is transformed: a text that contains ``k``, ``v``, both or nothing."""
    if hadamard is None:
        return ""
    if not isinstance(hadamard, str):
        raise dtype_error(op, "hadamard", "type str", type(hadamard).__name__)
    if hadamard not in _CHOICES:
        remedy = "It says whether K, which the query follows, and V are transformed"
        raise value_error(op, "hadamard", "be 'k', 'v' or 'kv'", repr(hadamard), remedy)
    return hadamard


def add(
    op: str,
    operands: Operands,
    hadamard: str,
    signs: ArraySpec | None,
    key: ArraySpec,
    value: ArraySpec,
    *,
    is_latent: bool,
) -> None:
    """Checks the transforms, `hadamard` by `of`, and adds their operand and attributes to a call's.

    Raises:
        ValueError: a shape is wrong, or an argument is given that the call may not have.
        TypeError: a dtype is wrong.
    """
    if not hadamard:
        if signs is not None:
            raise excess_error(op, "hadamard_signs", "be None without hadamard", signs)
        return
    if is_latent:
        rule = "be None where V is a part of K, whose blocks would be other ones"
        raise excess_error(op, "hadamard", rule, repr(hadamard))
    if key.dtype not in STORAGE_DTYPES:
        raise dtype_error(op, "key", "dtype float32, float16 or bfloat16 with hadamard", key.dtype)
    heads = {"key": key.shape[2], "value": value.shape[2]}
    for name, head_size in heads.items():
        if not holds(head_size <= MAX_HEAD_SIZE):
            rule = f"have a head_size of at most {MAX_HEAD_SIZE} with hadamard"
            raise value_error(op, name, rule, head_size, "paged_attention reads no larger heads")
    if signs is not None:
        if "v" in hadamard and not holds(heads["value"] == heads["key"]):
            rule = f"be None for a V with another head size, {heads['value']}, than K"
            raise excess_error(op, "hadamard_signs", rule, signs)
        remedy = "It has a sign, 1 or -1, for each number of a head"
        of_head = [("head_size", heads["key"])]
        check_array(op, "hadamard_signs", signs, of_head, "float32", remedy)
        operands.add_feature("hadamard_signs", signs, None)
    operands.attributes.extend((f"{which}_hadamard", np.int64(1)) for which in hadamard)


def check(x: ArraySpec) -> tuple[int, float]:
    """Checks the array of ``hadamard``. Returns the size of a block, the largest power of two that
    divides the last dimension, and 1 / sqrt(block) in float32.

    Raises:
        ValueError: the array has no last dimension, or it is empty.
        TypeError: the dtype is wrong.
    """
    if not x.shape or not holds(x.shape[-1] >= 1):
        remedy = "The last dimension has the numbers of a head"
        raise shape_error(OP, "x", "[..., head_size]", list(x.shape), remedy)
    if x.dtype not in STORAGE_DTYPES:
        raise dtype_error(OP, "x", "dtype float32, float16 or bfloat16", x.dtype)
    head_size = int(x.shape[-1])
    block = head_size & -head_size
    return block, float(np.float32(block**-0.5))
