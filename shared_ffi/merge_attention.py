"""The check of ``merge_attention``, which is no custom call: each frontend writes it in its own
operators, so that its compiler can fuse them."""

from __future__ import annotations

from shared_ffi.spec import ArraySpec, dtype_error, shape_error

OP = "merge_attention"


def check(outputs: ArraySpec, lses: ArraySpec) -> None:
    """Checks the stacked parts; raises ValueError (shape) or TypeError (dtype)."""
    if len(outputs.shape) != 4 or outputs.shape[0] < 1:
        rule = "[num_parts, num_tokens, num_heads, head_size], of at least one part"
        raise shape_error(OP, "outputs", rule, outputs.shape)
    if lses.shape != outputs.shape[:3]:
        rule = "[num_parts={}, num_tokens={}, num_heads={}]".format(*outputs.shape[:3])
        raise shape_error(OP, "lses", rule, lses.shape)
    if lses.dtype != "float32":
        raise dtype_error(OP, "lses", "dtype float32", lses.dtype)
