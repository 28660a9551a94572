"""``jax.vmap`` of ``paged_attention``: one ragged batch, and one pool of blocks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
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
from shared_ffi import kv_layout as _kv_layout
from shared_ffi.paged_attention import METADATA, OP, TOKEN_PAIRS

_OF_TOKENS = ("query", *TOKEN_PAIRS)
_OF_BATCH = (*_OF_TOKENS, *METADATA, "causal")


class _Pool(NamedTuple):
    block_tables: jax.Array
    """``[size, max_seqs, max_blocks_per_seq]``: one table for each call, of blocks of the pool."""
    arrays: dict[str, jax.Array]
    """The caches, scales and features of the batched call."""
    options: dict[str, Any]
    """The options that differ from those of the calls under ``vmap``."""


class _RaggedBatch(NamedTuple):
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


def batch(
    size: int, operands: Mapping[str, Operand], options: Mapping[str, Any]
) -> BatchedCall | None:
    """The calls' sequences become one ragged batch; if each call has a cache, their blocks become
    one pool."""
    query, context_lens = operands["query"], operands["context_lens"]
    num_tokens, max_seqs = query.shape[0], context_lens.shape[0]
    layout = options.get("kv_layout") or _kv_layout.default_layout(
        is_separate="value_cache" in operands, is_latent=options.get("value_head_size") is not None
    )
    pool = _pool(size, operands, layout)
    if (
        pool is None
        or exceeds(size * num_tokens, MAX_INT32)
        or exceeds(size * (max_seqs + 1), MAX_INT32)
    ):
        return None
    ragged = _ragged_batch(
        num_tokens,
        context_lens.broadcast(size),
        operands["query_start_loc"].broadcast(size),
        operands["num_seqs"].broadcast(size).reshape(size),
    )
    # An empty table for the sequence that _sequences adds to each call.
    block_tables = jnp.pad(pool.block_tables, ((0, 0), (0, 1), (0, 0)))
    arrays = {name: ragged.take(operands[name]) for name in _OF_TOKENS if name in operands}
    arrays |= {
        "context_lens": ragged.context_lens,
        "block_tables": flatten(block_tables),
        "query_start_loc": ragged.query_start_loc,
        "num_seqs": jnp.array(ragged.context_lens.shape[0], jnp.int32),
    }
    if "causal" in operands:  # whatever it is for the additional sequence
        arrays["causal"] = flatten(jnp.pad(operands["causal"].broadcast(size), ((0, 0), (0, 1))))
    return BatchedCall(
        arrays | pool.arrays,
        lambda results: [take(result, (ragged.rows,)) for result in results],
        pool.options,
    )


def _pool(size: int, operands: Mapping[str, Operand], layout: str) -> _Pool | None:
    """One pool for all calls; None if they differ in an array of which a call has only one."""
    arrays = {name: x for name, x in operands.items() if name not in _OF_BATCH}
    caches = [name for name in ("kv_cache", "value_cache") if name in arrays]
    scales = [name for name in ("k_scale", "v_scale") if name in arrays]
    per_position = [name for name in scales if len(arrays[name].shape) >= 3]
    has_own_blocks = any(arrays[name].is_mapped for name in caches)
    stacked = [*caches, *per_position] if has_own_blocks else []
    if any(x.is_mapped for name, x in arrays.items() if name not in stacked):
        return None
    block_tables = operands["block_tables"].broadcast(size)
    shared = {name: x.array for name, x in arrays.items()}
    if not has_own_blocks:
        return _Pool(block_tables, shared, {})
    num_blocks, _ = _kv_layout.num_blocks_and_size(OP, layout, arrays["kv_cache"].shape)
    if exceeds(size * num_blocks, MAX_INT32):
        return None
    layout, dim = _kv_layout.stacked(layout)
    pools = {name: jnp.moveaxis(arrays[name].broadcast(size), 0, dim) for name in caches}
    pools |= {name: flatten(arrays[name].broadcast(size)) for name in per_position}
    return _Pool(numbers_in_pool(block_tables, num_blocks), shared | pools, {"kv_layout": layout})


def _ragged_batch(
    num_tokens: int, context_lens: jax.Array, query_start_loc: jax.Array, num_seqs: jax.Array
) -> _RaggedBatch:
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
    return _RaggedBatch(lengths.reshape(-1), starts_and_end, calls, tokens, rows)


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
