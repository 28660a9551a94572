"""What a serving loop in JAX does around the ops."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from jax_frontend._call import Arrays
from shared_ffi import batch
from shared_ffi.batch import Batch, BlockPool, pad_batch
from shared_ffi.check_batch import BatchHistory, check_batch
from shared_ffi.paged_attention import check_metadata

__all__ = ["Batch", "BatchHistory", "BlockPool", "check_batch", "pad_batch", "slot_mapping"]

slots_of_tokens = partial(
    batch.slot_mapping, arange=partial(jnp.arange, dtype=jnp.int32), where=jnp.where
)


def slot_mapping(
    context_lens: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    num_seqs: jax.Array,
    *,
    block_size: int,
    num_tokens: int,
) -> jax.Array:
    """Computes the slots of a batch's new tokens from the metadata of ``paged_attention``.

    It works under ``jax.jit``, for steps that a program makes by itself. For arrays on the host,
    ``pad_batch`` computes the slots as well.

    Args:
        context_lens: ``[max_seqs]`` int32, as in ``paged_attention``.
        block_tables: ``[max_seqs, max_blocks_per_seq]`` int32, as there.
        query_start_loc: ``[max_seqs + 1]`` int32, as there.
        num_seqs: ``[]`` or ``[1]`` int32, as there.
        block_size: positions of a block. Static.
        num_tokens: new tokens, padding included. Static.

    Returns:
        ``[num_tokens]`` int32. -1, which writes nothing, for padding; for all tokens of a sequence
        whose lengths ``paged_attention`` would refuse, more new tokens than ``context_lens`` counts
        among them; and for a token whose block is negative, or has slots beyond int32.
        ``paged_attention`` says what is wrong.

    Raises:
        ValueError: a shape is wrong, or a size is negative or beyond int32.
        TypeError: an array is None or does not hold integers, or a size is no int.
    """
    arrays = Arrays("slot_mapping", check_metadata)
    read = arrays.int32(
        context_lens=context_lens,
        block_tables=block_tables,
        query_start_loc=query_start_loc,
        num_seqs=num_seqs,
    )
    batch.check_slot_mapping([*read.values()], block_size, num_tokens)
    metadata = [*arrays.by_name().values()]
    slots: jax.Array = slots_of_tokens(metadata, block_size=block_size, num_tokens=num_tokens)
    return slots
