"""The check of ``merge_attention``, which is no custom call: each frontend writes it in its own
operators, so that its compiler can fuse them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shared_ffi.spec import ArraySpec, check_array, dtype_error, missing_error, shape_error

OP = "merge_attention"


_APART = "Give outputs and log-sum-exps apart: merge_attention(*zip(*parts))"
_OUTPUTS = "[num_parts, num_tokens, num_heads, head_size], of at least one part"


def parts(argument: str, given: Any) -> list[Any] | None:
    """The parts of an argument that a caller gave as a sequence of arrays; None if it is one array.

    Raises:
        TypeError: it is neither.
        ValueError: there are no parts, or their shapes differ.
    """
    if _is_array(given):
        return None
    if given is None:
        raise missing_error(OP, argument)
    is_sequence = isinstance(given, Iterable) and not isinstance(given, str)
    arrays = list(given) if is_sequence else [given]
    for array in arrays:
        if not _is_array(array):
            rule, got = "type array, or be a sequence of arrays", type(array).__name__
            if isinstance(array, list | tuple) and any(map(_is_array, array)):
                raise dtype_error(OP, argument, rule, got, _APART)  # its numbers say nothing
            raise dtype_error(
                OP, argument, rule, f"{got} {array!r}", "Pass what the parts returned"
            )
    if not arrays:
        raise shape_error(OP, argument, _OUTPUTS, (), "Pass a part at least")
    for number, array in enumerate(arrays):
        if array.shape != arrays[0].shape:
            rule = f"{list(arrays[0].shape)} as {argument}[0] has"
            is_pair = len(array.shape) != len(arrays[0].shape)
            remedy = _APART if is_pair else "All parts have the same tokens and heads"
            raise shape_error(OP, f"{argument}[{number}]", rule, tuple(array.shape), remedy)
    return arrays


def _is_array(given: Any) -> bool:
    return hasattr(given, "shape") and hasattr(given, "dtype")


def check(outputs: ArraySpec, lses: ArraySpec) -> None:
    """Checks the stacked parts; raises ValueError (shape) or TypeError (dtype)."""
    if len(outputs.shape) != 4 or outputs.shape[0] < 1:
        remedy = "Give each part the output of one call"
        if len(outputs.shape) == 3:
            remedy = "One part is a list of one array"
        raise shape_error(OP, "outputs", _OUTPUTS, outputs.shape, remedy)
    if "float" not in outputs.dtype:
        rule, remedy = "a floating-point dtype", "Cast outputs to float32"
        raise dtype_error(OP, "outputs", rule, outputs.dtype, remedy)
    sizes = zip(("num_parts", "num_tokens", "num_heads"), outputs.shape[:3], strict=True)
    remedy = "It has a number for each head of outputs, in as many parts"
    check_array(OP, "lses", lses, [*sizes], "float32", remedy)
