"""The check of ``merge_attention``. There is no custom call: each frontend writes the op in its own
operators, so that its compiler can fuse them."""

from __future__ import annotations

from shared_ffi.spec import ArraySpec, dtype_error, shape_error

NAME = "merge_attention"


def check(outputs: ArraySpec, lses: ArraySpec) -> None:
    """Checks the stacked parts; raises ValueError (shape) or TypeError (dtype)."""
    if len(outputs.shape) != 4 or outputs.shape[0] < 1:
        rule = "[num_parts, num_tokens, num_heads, head_size], of at least one part"
        raise shape_error(NAME, "outputs", rule, outputs.shape)
    if lses.shape != outputs.shape[:3]:
        rule = "[num_parts={}, num_tokens={}, num_heads={}]".format(*outputs.shape[:3])
        raise shape_error(NAME, "lses", rule, lses.shape)
    if lses.dtype != "float32":
        raise dtype_error(NAME, "lses", "dtype float32", lses.dtype)
