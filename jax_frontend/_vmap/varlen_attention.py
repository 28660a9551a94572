"""``jax.vmap`` of ``varlen_attention`` and of its derivative: one batch of packed sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jax_frontend._vmap.operands import (
    MAX_INT32,
    BatchedCall,
    Operand,
    exceeds,
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
    num_tokens, max_seqs = operands["query"].shape[0], operands["query_start_loc"].shape[0] - 1
    of_heads = {name: operands[name] for name in _OF_HEADS if name in operands}
    if (
        any(x.is_mapped or "dout" in operands for x in of_heads.values())
        or exceeds(size * num_tokens, MAX_INT32)
        or exceeds(size * (max_seqs + 1), MAX_INT32)
    ):
        return None
    # ragged_batch gives sequences that are not in use 0, which stands for no prefix here.
    prefixes = jnp.zeros((size, max_seqs), jnp.int32)
    if "prefix_seqs" in operands:
        own = operands["prefix_seqs"].broadcast(size)
        prefixes = numbers_in_pool(own, max_seqs + 1) + 1
    ragged = ragged_batch(
        num_tokens,
        prefixes,
        operands["query_start_loc"].broadcast(size),
        operands["num_seqs"].broadcast(size).reshape(size),
    )
    prefixes = ragged.context_lens - 1
    # No length tells the handler that a call is faulty: the whole batch is.
    is_faulty = jnp.any(prefixes < -1)
    arrays = {name: x.array for name, x in of_heads.items()}
    arrays |= {name: ragged.take(operands[name]) for name in _OF_TOKENS if name in operands}
    arrays["query_start_loc"] = ragged.query_start_loc
    arrays["num_seqs"] = jnp.where(is_faulty, -1, jnp.int32(prefixes.shape[0]))
    if "causal" in operands:  # whatever it is for the sequence that ragged_batch adds to each call
        arrays["causal"] = flatten(jnp.pad(operands["causal"].broadcast(size), ((0, 0), (0, 1))))
    if "prefix_seqs" in operands:
        arrays["prefix_seqs"] = prefixes
    return BatchedCall(
        arrays, lambda results: [take(result, (ragged.rows,)) for result in results], {}
    )
