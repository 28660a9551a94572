"""``simple_add`` for JAX."""

from __future__ import annotations

import jax

from jax_frontend import _call
from shared_ffi import simple_add as op


def simple_add(a: jax.Array, b: jax.Array) -> jax.Array:
    """Adds two arrays: the smallest op, to see that a new runtime finds the handlers.

    Args:
        a: float32, any shape.
        b: float32, a's shape; nothing is broadcast.

    Returns:
        a + b, float32.

    Raises:
        ValueError: the shapes differ.
        TypeError: a dtype is not float32.
    """
    arrays = _call.Arrays(op.OP, op.check)
    call = op.check(**arrays.read(a=a, b=b))
    (result,) = arrays.call(call)
    return result
