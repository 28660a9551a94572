"""``jax.vmap`` of ``varlen_attention`` and of its derivative: one batch of packed sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_frontend._vmap.operands import (
    BatchedCall,
    Operand,
    flatten,
    numbers_in_pool,
    take,
)
from jax_frontend._vmap.ragged_batch import ragged_batch

_OF_TOKENS = ("query", "key", "value", "output", "lse", "dout", "bidirectional_ranges")
_OF_HEADS = ("sinks", "alibi_slopes")


def batch(
    size: int, operands: Mapping[str, Operand], options: Mapping[str, Any]
) -> BatchedCall | None:
    """The calls' sequences become those of one call. Calls that differ in the numbers of heads have
    no call like that, nor have those that sum up gradients of these numbers, each its own."""
    max_seqs = operands["query_start_loc"].shape[0] - 1
    of_heads = {name: operands[name] for name in _OF_HEADS if name in operands}
    differ = any(x.is_mapped or "dout" in operands for x in of_heads.values())
    ragged = None if differ else ragged_batch(size, operands)
    if ragged is None:
        return None
    # Stray tokens are behind starts that decrease, as in a call alone.
    starts, stray_ends = jnp.split(ragged.query_start_loc, [size * max_seqs + 1])
    stray_ends = jnp.where(ragged.is_faulty, -1, starts[-1])
    arrays = {name: x.array for name, x in of_heads.items()}
    arrays |= {name: ragged.take(operands[name]) for name in _OF_TOKENS if name in operands}
    arrays["query_start_loc"] = jnp.concatenate([starts, stray_ends])
    arrays["num_seqs"] = ragged.num_seqs
    if "causal" in operands:  # whatever it is for stray tokens
        arrays["causal"] = jnp.pad(flatten(operands["causal"].broadcast(size)), (0, size))
    if "prefix_seqs" in operands:
        prefixes = numbers_in_pool(operands["prefix_seqs"].broadcast(size), max_seqs)
        prefixes = jnp.where(ragged.is_used, prefixes, -1)
        arrays["prefix_seqs"] = jnp.pad(flatten(prefixes), (0, size), constant_values=-1)

    def unbatch(results: Sequence[jax.Array]) -> list[jax.Array]:
        of_padding = [-jnp.inf if x.ndim == 2 else 0 for x in results]  # a log-sum-exp, or rows
        return [
            take(x, (ragged.rows,), fill_value)
            for x, fill_value in zip(results, of_padding, strict=True)
        ]

    return BatchedCall(arrays, unbatch, {})
