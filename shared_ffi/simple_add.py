"""The check of ``simple_add``, the smallest op: ``docs/adding-an-op.md`` follows it."""

from __future__ import annotations

from shared_ffi.spec import ArraySpec, Call, dtype_error, has_shape, records_options, shape_error

OP = "simple_add"
TARGET = "XlaGpuSimpleAdd"
"""Kept from programs that are older than this library. A new op's target is ``xla_gpu_<op>``."""


@records_options
def check(a: ArraySpec, b: ArraySpec) -> Call:
    """Returns the call ``a + b``, or raises ValueError (shape) or TypeError (dtype)."""
    if a.dtype != "float32":
        raise dtype_error(OP, "a", "dtype float32", a.dtype)
    if not has_shape(b, a.shape):
        raise shape_error(OP, "b", str(list(a.shape)), b.shape, "Nothing is broadcast")
    if b.dtype != "float32":
        raise dtype_error(OP, "b", "dtype float32", b.dtype)
    return Call(OP, TARGET, check, names=("a", "b"), operands=(a, b), results=(a,))
