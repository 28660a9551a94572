"""``merge_attention`` for JAX."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from shared_ffi import merge_attention as op
from shared_ffi.spec import ArraySpec


def merge_attention(
    outputs: jax.Array | Sequence[jax.Array], lses: jax.Array | Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Attention over a whole context, from attention over its parts.

    The parts have the same queries and different keys: the blocks of the cache on several devices,
    say, or a prefix that many sequences share and the rest of each sequence.

    Args:
        outputs: ``[num_parts, num_tokens, num_heads, head_size]``, or a sequence of ``num_parts``
            arrays: the outputs of ``paged_attention``, one for each part.
        lses: ``[num_parts, num_tokens, num_heads]`` float32, or a sequence of ``num_parts`` arrays:
            their log-sum-exp (``return_lse``). A row whose log-sum-exp is -inf does not count: it
            had nothing to attend to in that part.

    Returns:
        The output, ``[num_tokens, num_heads, head_size]`` with the dtype of ``outputs``, and its
        log-sum-exp, ``[num_tokens, num_heads]`` float32. Up to rounding they are those of attention
        over the whole context. The pair can be merged again. Sums are float32. Give ``sinks`` to
        one part only: they count in its log-sum-exp.

    Raises:
        ValueError: a shape is wrong.
        TypeError: an argument is no array, ``lses`` is not float32, or ``outputs`` holds integers.

    Reference:
        Milakov and Gimelshein, arXiv:1805.02867, for two parts; any number here.
    """
    outputs, lses = (
        jnp.asarray(given if (parts := op.parts(argument, given)) is None else parts)
        for argument, given in (("outputs", outputs), ("lses", lses))
    )
    op.check(ArraySpec(outputs.shape, outputs.dtype.name), ArraySpec(lses.shape, lses.dtype.name))
    largest = lses.max(axis=0, keepdims=True)
    shift = jnp.where(largest == -jnp.inf, 0, largest)
    weights = jnp.where(lses == shift, 1, jnp.exp(lses - shift))  # shift may be infinite
    total = weights.sum(axis=0, keepdims=True)
    shares = weights / jnp.where(total == 0, 1, total)
    counted = jnp.where(lses[..., None] == -jnp.inf, 0, outputs.astype(jnp.float32))
    merged = (counted * shares[..., None]).sum(axis=0)
    return merged.astype(outputs.dtype), (shift + jnp.log(total))[0]
