"""The packed sequences of many calls as those of one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_frontend._vmap.operands import MAX_INT32, Operand, exceeds, take


class RaggedBatch(NamedTuple):
    """The sequences of all calls, one call after the other, then one for each call, which stands
    for its stray tokens."""

    query_start_loc: jax.Array
    """``[size * (max_seqs + 1) + 1]``."""
    num_seqs: jax.Array
    is_used: jax.Array
    """``[size, max_seqs]``: the sequences of the calls that are not empty ones in the batch."""
    is_faulty: jax.Array
    """``[size]``: the calls whose last sequence must be refused, even if it has no tokens."""
    calls: jax.Array
    """``[size * num_tokens]``: for each token of the batch, the call that it comes from."""
    tokens: jax.Array
    """``[size * num_tokens]``: for each token of the batch, its number in its call."""
    rows: jax.Array
    """``[size, num_tokens]``: for each token of each call, its row in the batch. Padding has one
    past the end."""

    def take(self, operand: Operand) -> jax.Array:
        """The rows of the batch of an operand that has one for each token."""
        places = (self.calls, self.tokens) if operand.is_mapped else (self.tokens,)
        return take(operand.array, places)


def ragged_batch(size: int, operands: Mapping[str, Operand]) -> RaggedBatch | None:
    """Packs the sequences of all calls one after the other. A ragged batch has no place for padding
    between sequences, so the padding of all calls comes after the last sequence.

    A faulty ``query_start_loc`` or ``num_seqs`` leaves tokens that belong to no sequence. They come
    after the sequences of all calls, so that an error there does not reach the tokens of others.

    Args:
        size: how many calls there are.
        operands: theirs.

    Returns:
        None if int32 does not hold the batch's numbers.
    """
    num_tokens, max_seqs = operands["query"].shape[0], operands["query_start_loc"].shape[0] - 1
    if exceeds(size * num_tokens, MAX_INT32) or exceeds(size * (max_seqs + 1), MAX_INT32):
        return None
    query_start_loc = operands["query_start_loc"].broadcast(size)
    num_seqs = operands["num_seqs"].broadcast(size).reshape(size)
    num_used, starts, ends = jax.vmap(partial(_sequences, num_tokens))(query_start_loc, num_seqs)
    is_faulty = num_used != num_seqs
    ends_in_batch = jnp.cumsum(ends - starts[:, 0], dtype=jnp.int32)
    shifts = ends_in_batch - ends  # from a token's number in its call to its row

    call_tokens = jnp.arange(num_tokens, dtype=jnp.int32)[None]
    is_sound = (starts[:, :1] <= call_tokens) & (call_tokens < ends[:, None])
    # One row for the stray tokens of a call, which get the same result.
    is_stray = is_faulty[:, None] & (call_tokens >= ends[:, None])
    stray_ends = ends_in_batch[-1] + jnp.cumsum(jnp.any(is_stray, 1), dtype=jnp.int32)
    rows = jnp.where(is_stray, stray_ends[:, None] - 1, size * num_tokens)
    rows = jnp.where(is_sound, call_tokens + shifts[:, None], rows)

    batch_tokens = jnp.arange(size * num_tokens, dtype=jnp.int32)
    # Not jnp.searchsorted, which jax.export refuses where the mapped axis is a symbol.
    calls = jnp.cumsum(jnp.zeros_like(batch_tokens).at[ends_in_batch].add(1, mode="drop"))
    tokens = batch_tokens - shifts.at[calls].get(mode="clip")
    starts_in_batch = (starts[:, :-1] + shifts[:, None]).reshape(-1)
    return RaggedBatch(
        jnp.concatenate([starts_in_batch, ends_in_batch[-1:], stray_ends]),
        jnp.array(size * (max_seqs + 1), jnp.int32),
        jnp.arange(max_seqs, dtype=jnp.int32)[None] < num_used[:, None],
        is_faulty,
        calls,
        tokens,
        rows,
    )


def _sequences(
    num_tokens: int, query_start_loc: jax.Array, num_seqs: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The sequences of one call. Those that are faulty or not in use are empty.

    Returns:
        How many are neither, the start of each, ``[max_seqs + 1]``, and the end of the last one.
    """
    max_seqs = query_start_loc.shape[0] - 1
    count = jnp.where((num_seqs >= 0) & (num_seqs <= max_seqs), num_seqs, 0)
    begins, ends = query_start_loc[:-1], query_start_loc[1:]
    numbers = jnp.arange(max_seqs + 1, dtype=jnp.int32)
    has_rows = (begins >= 0) & (begins <= ends) & (ends <= num_tokens)
    first_faulty = jnp.min(numbers[:-1], initial=max_seqs, where=~has_rows)
    num_sound = jnp.minimum(count, first_faulty)
    end = jnp.max(ends, initial=0, where=numbers[:-1] < num_sound)
    return num_sound, jnp.where(numbers < num_sound, query_start_loc, end), end
