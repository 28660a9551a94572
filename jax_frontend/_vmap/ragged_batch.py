"""The packed sequences of many calls as those of one."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_frontend._vmap.operands import Operand, take


class RaggedBatch(NamedTuple):
    context_lens: jax.Array
    query_start_loc: jax.Array
    calls: jax.Array
    """``[size * num_tokens]``: for each token of the batch, the call that it comes from."""
    tokens: jax.Array
    """``[size * num_tokens]``: for each token of the batch, its number in its call."""
    rows: jax.Array
    """``[size, num_tokens]``: for each token of each call, its row in the batch."""

    def take(self, operand: Operand) -> jax.Array:
        """The rows of the batch of an operand that has one for each token."""
        places = (self.calls, self.tokens) if operand.is_mapped else (self.tokens,)
        return take(operand.array, places)


def ragged_batch(
    num_tokens: int, context_lens: jax.Array, query_start_loc: jax.Array, num_seqs: jax.Array
) -> RaggedBatch:
    """Packs the sequences of all calls one after the other. A ragged batch has no place for padding
    between sequences, so the padding of all calls comes after the last sequence.

    Args:
        num_tokens: of each call.
        context_lens: ``[size, max_seqs]``, a row for each call, as in the other arrays.
        query_start_loc: ``[size, max_seqs + 1]``.
        num_seqs: ``[size]``.
    """
    size = num_seqs.shape[0]
    lengths, starts, ends = jax.vmap(partial(_sequences, num_tokens))(
        context_lens, query_start_loc, num_seqs
    )
    ends_in_batch = jnp.cumsum(ends - starts[:, 0], dtype=jnp.int32)
    shifts = ends_in_batch - ends  # from a token's number in its call to its row
    starts_in_batch = (starts + shifts[:, None]).reshape(-1)

    call_tokens = jnp.arange(num_tokens, dtype=jnp.int32)[None]
    is_real = (starts[:, :1] <= call_tokens) & (call_tokens < ends[:, None])
    padding = size * num_tokens - 1  # the last row, which is padding if any row is
    rows = jnp.where(is_real, call_tokens + shifts[:, None], padding)

    batch_tokens = jnp.arange(size * num_tokens, dtype=jnp.int32)
    # Not jnp.searchsorted, which jax.export refuses where the mapped axis is a symbol.
    calls = jnp.cumsum(jnp.zeros_like(batch_tokens).at[ends_in_batch].add(1, mode="drop"))
    tokens = batch_tokens - shifts.at[calls].get(mode="clip")
    starts_and_end = jnp.concatenate([starts_in_batch, ends_in_batch[-1:]])
    return RaggedBatch(lengths.reshape(-1), starts_and_end, calls, tokens, rows)


def _sequences(
    num_tokens: int, context_lens: jax.Array, query_start_loc: jax.Array, num_seqs: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The sequences of one call, and one more for its stray tokens.

    A faulty ``query_start_loc`` or ``num_seqs`` leaves tokens that belong to no sequence. The
    additional sequence takes them, with a length that the handler refuses, so that the error does
    not reach the tokens of other calls. Sequences that are not in use are empty.

    Returns:
        The length and the start of each sequence, ``[max_seqs + 1]``, and the end of the last one.
    """
    max_seqs = context_lens.shape[0]
    count = jnp.where((num_seqs >= 0) & (num_seqs <= max_seqs), num_seqs, -1)
    begins, ends = query_start_loc[:-1], query_start_loc[1:]
    numbers = jnp.arange(max_seqs + 1, dtype=jnp.int32)
    has_rows = (begins >= 0) & (begins <= ends) & (ends <= num_tokens)
    first_faulty = jnp.min(numbers[:-1], initial=max_seqs, where=~has_rows)
    num_sound = jnp.maximum(0, jnp.minimum(count, first_faulty))
    is_faulty = num_sound != count
    end = jnp.max(ends, initial=0, where=numbers[:-1] < num_sound)
    starts = jnp.where(numbers < num_sound, query_start_loc, end)
    lengths = jnp.where(numbers[:-1] < num_sound, context_lens, 0)
    return (
        jnp.append(lengths, jnp.where(is_faulty, -1, 0)),
        starts,
        jnp.where(is_faulty, num_tokens, end),
    )
