"""What a serving loop does around the ops: a pool of blocks, padded batches, and slot mappings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shared_ffi.paged_attention import check_metadata
from shared_ffi.spec import ArraySpec, value_error

_LARGEST = np.iinfo(np.int32).max


class BlockPool:
    """The free blocks of a paged cache, on the host.

    Args:
        num_blocks: blocks of the cache, its first dimension.
        block_size: positions of a block.

    Example:
        >>> pool, blocks = BlockPool(num_blocks=4, block_size=16), []
        >>> pool.grow(blocks, context_len=20)  # 20 tokens lie in two blocks
        True
        >>> blocks, pool.free
        ([0, 1], [3, 2])
        >>> pool.release(blocks)  # the sequence has ended
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free = [*reversed(range(num_blocks))]
        """The numbers of the free blocks. The last one is taken next."""

    def num_missing(self, blocks: Sequence[int], context_len: int) -> int:
        """Blocks that a sequence with these blocks lacks for ``context_len`` tokens."""
        return max(0, -(-context_len // self.block_size) - len(blocks))

    def grow(self, blocks: list[int], context_len: int) -> bool:
        """Appends to a sequence's blocks until they hold ``context_len`` tokens.

        Returns:
            False if too few blocks are free. It takes none then: end or preempt a sequence.
        """
        count = self.num_missing(blocks, context_len)
        if count > len(self.free):
            return False
        blocks.extend(self.free.pop() for _ in range(count))
        return True

    def release(self, blocks: list[int]) -> None:
        """Takes back all blocks of a sequence, and empties the list."""
        self.free.extend(reversed(blocks))
        blocks.clear()


class Batch(NamedTuple):
    """The arrays of a step, padded, all of int32: the first three for the model and
    ``kv_cache_update``, and ``batch[3:]``, the metadata of ``paged_attention``.

    Attributes:
        tokens: ``[num_tokens]``, token ids, those of one sequence after another; 0 for padding.
        positions: ``[num_tokens]``, of each token in its sequence; 0 for padding.
        slot_mapping: ``[num_tokens]``, of each token in the cache; -1, which writes nothing, for
            padding.
        context_lens: ``[max_seqs]``, tokens of each sequence, those of this step included; 0 for
            padding.
        block_tables: ``[max_seqs, max_blocks_per_seq]``, the blocks of each sequence, then 0.
        query_start_loc: ``[max_seqs + 1]``, the first token of each sequence in ``tokens``, then
            the number of tokens, so that ``query_start_loc[1:] - 1`` are the last tokens.
        num_seqs: ``[1]``, sequences that are no padding.
    """

    tokens: Any
    positions: Any
    slot_mapping: Any
    context_lens: Any
    block_tables: Any
    query_start_loc: Any
    num_seqs: Any


def pad_batch(
    tokens: Sequence[Sequence[int]],
    context_lens: Sequence[int],
    blocks: Sequence[Sequence[int]],
    *,
    block_size: int,
    num_tokens: int,
    max_seqs: int,
    max_blocks_per_seq: int,
) -> Batch:
    """Builds the arrays of a step, of sizes that do not change from step to step.

    A compiled program serves all steps whose sizes are the same: choose a few values of
    ``num_tokens``, and the smallest that fits each step.

    Args:
        tokens: the new tokens of each sequence, the last of its context.
        context_lens: tokens of each sequence, the new ones included.
        blocks: blocks of each sequence, which hold all its tokens.
        block_size: positions of a block.
        num_tokens: new tokens that the batch has room for.
        max_seqs: sequences that it has room for.
        max_blocks_per_seq: blocks that it has room for in each table.

    Returns:
        NumPy arrays; ``Batch`` says what padding holds.

    Raises:
        ValueError: the batch has no room, or a sequence too few blocks or tokens.
    """
    query_lens = [*map(len, tokens)]
    for name, size, room, given in (
        ("tokens", "num_tokens", num_tokens, sum(query_lens)),
        ("tokens", "max_seqs", max_seqs, len(tokens)),
        ("blocks", "max_blocks_per_seq", max_blocks_per_seq, max(map(len, blocks), default=0)),
    ):
        if given > room:
            raise value_error("pad_batch", name, f"fit {size}={room}", given)
    for name, entries in (("context_lens", context_lens), ("blocks", blocks)):
        if len(entries) != len(tokens):
            rule = f"have an entry for each of the {len(tokens)} sequences"
            raise value_error("pad_batch", name, rule, len(entries))
    for s, (context_len, query_len, own) in enumerate(
        zip(context_lens, query_lens, blocks, strict=True)
    ):
        if not query_len <= context_len <= len(own) * block_size:
            rule = (
                f"count at least its {query_len} new tokens, and at most the "
                f"{len(own) * block_size} that its {len(own)} blocks hold"
            )
            raise value_error("pad_batch", f"context_lens[{s}]", rule, context_len)

    batch = Batch(
        tokens=np.zeros(num_tokens, np.int32),
        positions=np.zeros(num_tokens, np.int32),
        slot_mapping=np.full(num_tokens, -1, np.int32),
        context_lens=np.zeros(max_seqs, np.int32),
        block_tables=np.zeros((max_seqs, max_blocks_per_seq), np.int32),
        query_start_loc=np.full(max_seqs + 1, sum(query_lens), np.int32),
        num_seqs=np.array([len(tokens)], np.int32),
    )
    start = 0
    for s, (own, context_len) in enumerate(zip(blocks, context_lens, strict=True)):
        end = start + query_lens[s]
        positions = np.arange(context_len - query_lens[s], context_len, dtype=np.int32)
        table = np.asarray(own, np.int32)
        batch.tokens[start:end] = tokens[s]
        batch.positions[start:end] = positions
        batch.slot_mapping[start:end] = (
            table[positions // block_size] * block_size + positions % block_size
        )
        batch.context_lens[s] = context_len
        batch.block_tables[s, : len(table)] = table
        batch.query_start_loc[s] = start
        start = end
    return batch


def slot_mapping(
    metadata: Sequence[Any],
    *,
    block_size: int,
    num_tokens: int,
    num_blocks: int | None = None,
    arange: Callable[[int], Any],
    where: Callable[[Any, Any, Any], Any],
) -> Any:
    """The body of ``slot_mapping`` of each frontend, which gives its `arange`, of int32, and its
    `where`. A block from `num_blocks` on has no slot; None: the pool's size is not known.
    """
    context_lens, block_tables, query_start_loc, num_seqs = metadata
    max_seqs, max_blocks = block_tables.shape
    tokens, count = arange(num_tokens), num_seqs.reshape(-1)[0]
    # No searchsorted, which jax.export refuses where the number of sequences is a symbol.
    ends = where(arange(max_seqs) < count, query_start_loc[1:], _LARGEST)
    sequence = (ends[None] <= tokens[:, None]).sum(1)
    row = sequence.clip(0, max_seqs - 1)
    start, end = query_start_loc[row], query_start_loc[row + 1]
    position = context_lens[row] - end + tokens
    column = position // block_size
    has_slot = (sequence < count) & (count <= max_seqs) & (start <= tokens) & (tokens < end)
    has_slot &= (position >= 0) & (column < max_blocks)
    # One index: torch_xla needs two of the same dtype, and a sum has another one than positions.
    block = block_tables.reshape(-1)[row * max_blocks + column.clip(0, max_blocks - 1)]
    # The product of another block might overflow, and name the slot of a block that exists.
    has_slot &= (block >= 0) & (block < (num_blocks or _LARGEST // block_size))
    return where(has_slot, block * block_size + position % block_size, -1)


def check_slot_mapping(metadata: Sequence[ArraySpec], block_size: int, num_tokens: int) -> None:
    """Checks the arguments of ``slot_mapping``; raises ValueError (shape, value) or TypeError."""
    check_metadata("slot_mapping", *metadata)
    for name, size, least in (("block_size", block_size, 1), ("num_tokens", num_tokens, 0)):
        if isinstance(size, int) and size < least:
            raise value_error("slot_mapping", name, f"be at least {least}", size)
