"""``hadamard`` for JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_frontend import _call
from shared_ffi import hadamard as op


def hadamard(x: jax.Array) -> jax.Array:
    """Multiplies heads by the orthonormal Walsh-Hadamard matrix of ``hadamard`` in
    ``kv_cache_update``. The matrix is its own inverse, so the same function undoes it.

    Attention to a cache of multiplied values gives a multiplied output. ``hadamard(output)`` undoes
    it in each step. The weights of the next projection can undo it at no cost: weights ``w`` of
    shape ``[hidden_size, num_heads, head_size]`` become ``hadamard(w)``. With ``hadamard_signs``
    these are ``hadamard(output) * signs`` and ``hadamard(w * signs)``.

    Args:
        x: ``[..., head_size]``, float32, float16 or bfloat16. The matrix extends over the largest
            power of two that divides head_size, and is repeated.

    Returns:
        Shape and dtype of ``x``. All of it is float32 and rounded once, with the bits of
        ``kv_cache_update``. The function has a derivative.

    Raises:
        ValueError: ``x`` has no dimension, or a head_size of 0.
        TypeError: ``x`` is no array, or its dtype is wrong.
    """
    arrays = _call.Arrays(op.OP, op.check)
    block, scale = op.check(**arrays.read(x=x))
    heads = arrays.by_name()["x"]
    numbers = heads.astype(jnp.float32).reshape(*heads.shape[:-1], heads.shape[-1] // block, block)
    for _ in range(block.bit_length() - 1):  # neighbours; what was 2, 4, ... apart follows
        first, second = numbers[..., ::2], numbers[..., 1::2]
        numbers = jnp.concatenate([first + second, first - second], axis=-1)
    return (numbers * np.float32(scale)).reshape(heads.shape).astype(heads.dtype)
