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

    The parts share the queries and divide the keys: blocks of the cache on several devices, or a
    prefix that many sequences have in common and each one's rest.

    Args:
        outputs: ``[num_parts, num_tokens, num_heads, head_size]``, or that many arrays
            ``[num_tokens, num_heads, head_size]``: what ``paged_attention`` made of each part.
        lses: ``[num_parts, num_tokens, num_heads]`` float32, or that many arrays: its
            ``return_lse``. With -inf a part does not count, so that a row may have nothing to
            attend to in some of them.

    Returns:
        The output, ``[num_tokens, num_heads, head_size]`` with the dtype of ``outputs``, and its
        log-sum-exp, ``[num_tokens, num_heads]`` float32: as if the whole had been attended to, but
        for rounding. The pair is a part again. Sums are float32. Give ``sinks``, which count in the
        log-sum-exp, to one part only.

    Raises:
        ValueError: a shape is wrong.
        TypeError: ``lses`` is not float32.

    Reference:
        Milakov and Gimelshein, arXiv:1805.02867, for two parts; any number here.
    """
    outputs, lses = jnp.asarray(outputs), jnp.asarray(lses)
    op.check(ArraySpec(outputs.shape, outputs.dtype.name), ArraySpec(lses.shape, lses.dtype.name))
    largest = lses.max(axis=0)
    shift = jnp.where(largest == -jnp.inf, 0, largest)
    weights = jnp.exp(lses - shift)
    total = weights.sum(axis=0)
    shares = weights / jnp.where(total == 0, 1, total)
    counted = jnp.where(lses[..., None] == -jnp.inf, 0, outputs.astype(jnp.float32))
    merged = (counted * shares[..., None]).sum(axis=0)
    return merged.astype(outputs.dtype), shift + jnp.log(total)
