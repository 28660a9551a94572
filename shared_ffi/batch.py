"""What a serving loop does around the ops: a pool of blocks, padded batches, and slot mappings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shared_ffi.paged_attention import MAX_CONTEXT_LEN, check_metadata
from shared_ffi.spec import ArraySpec, check_is_on_host, dtype_error, integers_on_host, value_error

_LARGEST = np.iinfo(np.int32).max


class BlockPool:
    """The blocks of a paged cache, on the host: which are free, and how many sequences have each
    of the others.

    Args:
        num_blocks: blocks of the cache, its first dimension.
        block_size: positions of a block.

    Raises:
        ValueError: a size is negative, beyond int32, or ``block_size`` is 0.
        TypeError: a size is no int.

    Example:
        >>> pool, blocks = BlockPool(num_blocks=4, block_size=16), []
        >>> pool.grow(blocks, context_len=20)  # 20 tokens lie in two blocks
        True
        >>> blocks, pool.free
        ([0, 1], [3, 2])
        >>> other = pool.share(blocks[:1])  # its first 16 tokens are the same
        >>> pool.release(blocks)  # the sequence has ended
        >>> other, pool.free
        ([0], [3, 2, 1])
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        check_sizes("BlockPool", num_blocks=num_blocks)
        check_sizes("BlockPool", least=1, block_size=block_size)
        self.block_size = block_size
        self.free = [*reversed(range(num_blocks))]
        """The numbers of the free blocks. The last one is taken next."""
        self._users = [0] * num_blocks
        """How many sequences have each block."""

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
        taken = [self.free.pop() for _ in range(count)]
        for block in taken:
            self._users[block] = 1
        blocks.extend(taken)
        return True

    def share(self, blocks: Sequence[int]) -> list[int]:
        """Gives blocks of a sequence to another one, too, whose tokens begin with the same ones.

        Share blocks that are full: a block must not be written while another sequence reads it.

        Returns:
            The blocks of the other sequence, to ``grow`` and to ``release``. A block is free when
            all its sequences have released it; a copy of the list is no other sequence.

        Raises:
            ValueError: no sequence has one of the blocks.
        """
        self._check_used("share", blocks)
        for block in blocks:
            self._users[block] += 1
        return [*blocks]

    def release(self, blocks: list[int]) -> None:
        """Takes back all blocks of a sequence, and empties the list.

        Raises:
            ValueError: no sequence has one of the blocks, or fewer than release it here. Nothing is
                taken back then.
        """
        self._check_used("release", blocks)
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block] == 0:
                self.free.append(block)
        blocks.clear()

    def _check_used(self, method: str, blocks: Sequence[int]) -> None:
        for block, count in Counter(blocks).items():
            if not 0 <= block < len(self._users):
                rule = f"hold blocks of the pool, from 0 to {len(self._users) - 1}"
                remedy = "Pass what grow has added"
                raise value_error(f"BlockPool.{method}", "blocks", rule, block, remedy)
            if self._users[block] < count:
                rule = "hold blocks in use, once for each sequence that has them (share adds one)"
                got = f"{block} in {[*blocks]}"
                remedy = "Was the sequence released before?"
                raise value_error(f"BlockPool.{method}", "blocks", rule, got, remedy)


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
        ValueError: the batch has no room, a sequence too few blocks or tokens, or a token or a slot
            does not fit int32.
        TypeError: tokens, lengths or blocks are no integers.
    """
    check_sizes("pad_batch", least=1, block_size=block_size)
    check_sizes(
        "pad_batch",
        num_tokens=num_tokens,
        max_seqs=max_seqs,
        max_blocks_per_seq=max_blocks_per_seq,
    )
    check_is_on_host("pad_batch", tokens=tokens, context_lens=context_lens, blocks=blocks)
    _check_lists("context_lens", context_lens, "an integer for each sequence")
    for name, lists in (("tokens", tokens), ("blocks", blocks)):
        rule = "a list of integers for each sequence"
        _check_lists(name, lists, rule)
        for integers in lists:
            _check_lists(name, integers, rule)
    query_lens = [*map(len, tokens)]
    for name, size, room, given in (
        ("tokens", "num_tokens", num_tokens, sum(query_lens)),
        ("tokens", "max_seqs", max_seqs, len(tokens)),
        ("blocks", "max_blocks_per_seq", max_blocks_per_seq, max(map(len, blocks), default=0)),
    ):
        if given > room:
            remedy = f"Leave sequences to the next step, or raise {size}"
            raise value_error("pad_batch", name, f"fit {size}={room}", given, remedy)
    for name, entries in (("context_lens", context_lens), ("blocks", blocks)):
        if len(entries) != len(tokens):
            rule = f"have an entry for each of the {len(tokens)} sequences"
            raise value_error(
                "pad_batch", name, rule, len(entries), "Make the lists of the same sequences"
            )
    lens = _as_int32("context_lens", context_lens)
    for s, (context_len, query_len, own) in enumerate(zip(lens, query_lens, blocks, strict=True)):
        if not query_len <= context_len <= min(len(own) * block_size, MAX_CONTEXT_LEN):
            rule = (
                f"count at least its {query_len} new tokens, and at most the "
                f"{len(own) * block_size} that its {len(own)} blocks hold"
            )
            is_long = context_len >= query_len
            remedy = "BlockPool.grow adds blocks" if is_long else "Count the new tokens, too"
            raise value_error("pad_batch", f"context_lens[{s}]", rule, context_len, remedy)

    batch = Batch(
        tokens=np.zeros(num_tokens, np.int32),
        positions=np.zeros(num_tokens, np.int32),
        slot_mapping=np.full(num_tokens, -1, np.int32),
        context_lens=np.zeros(max_seqs, np.int32),
        block_tables=np.zeros((max_seqs, max_blocks_per_seq), np.int32),
        query_start_loc=np.full(max_seqs + 1, sum(query_lens), np.int32),
        num_seqs=np.array([len(tokens)], np.int32),
    )
    largest = _num_blocks_with_slots(block_size) - 1
    end = 0
    for s, own in enumerate(blocks):
        start, end = end, end + query_lens[s]
        table = _as_int32(f"blocks[{s}]", own)
        if (bad := table[(table < 0) | (table > largest)]).size > 0:
            rule = f"be from 0 to {largest}, as slots of block_size={block_size} are int32"
            remedy = "Pass blocks of BlockPool"
            raise value_error("pad_batch", f"blocks[{s}]", rule, bad[0], remedy)
        batch.tokens[start:end] = _as_int32(f"tokens[{s}]", tokens[s])
        batch.positions[start:end] = np.arange(lens[s] - query_lens[s], lens[s], dtype=np.int32)
        batch.context_lens[s] = lens[s]
        batch.block_tables[s, : len(table)] = table
        batch.query_start_loc[s] = start
    sequence = np.repeat(np.arange(len(tokens)), query_lens)
    batch.slot_mapping[:end] = _slots(
        batch[3:],
        sequence,
        np.arange(end, dtype=np.int32),
        block_size=block_size,
        num_blocks=None,
        where=np.where,
    )
    return batch


def _check_lists(argument: str, given: Any, rule: str) -> None:
    if not hasattr(given, "__len__"):
        raise dtype_error("pad_batch", argument, rule, type(given).__name__)


def _as_int32(argument: str, given: Any) -> np.ndarray:
    array = integers_on_host("pad_batch", argument, given)
    lost = array[(array < -_LARGEST - 1) | (array > _LARGEST)]
    if lost.size > 0:
        remedy = "Is it the right list?"
        raise value_error("pad_batch", argument, "hold integers that fit int32", lost[0], remedy)
    return array.astype(np.int32)


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
    _, block_tables, query_start_loc, num_seqs = metadata
    max_seqs = block_tables.shape[0]
    tokens, count = arange(num_tokens), num_seqs.reshape(-1)[0]
    # No searchsorted, which jax.export refuses where the number of sequences is a symbol.
    ends = where(arange(max_seqs) < count, query_start_loc[1:], _LARGEST)
    sequence = (ends[None] <= tokens[:, None]).sum(1)
    return _slots(
        metadata, sequence, tokens, block_size=block_size, num_blocks=num_blocks, where=where
    )


def _slots(
    metadata: Sequence[Any],
    sequence: Any,
    tokens: Any,
    *,
    block_size: int,
    num_blocks: int | None,
    where: Callable[[Any, Any, Any], Any],
) -> Any:
    """The slots of tokens, whose sequences are known: what ``pad_batch`` and ``slot_mapping``
    mean by a slot.

    A token has none, -1, if it is padding, if causal ``paged_attention`` would refuse the lengths
    of its sequence, or if the table names no block for it. Lengths may hold anything: each sum of
    theirs counts only where the comparisons before it exclude that it wraps.
    """
    context_lens, block_tables, query_start_loc, num_seqs = metadata
    max_seqs, max_blocks = block_tables.shape
    if any(isinstance(size, int) and size == 0 for size in (max_seqs, max_blocks)):
        return where(tokens < 0, tokens, -1)
    count, row = num_seqs.reshape(-1)[0], sequence.clip(0, max_seqs - 1)
    start, end, context_len = query_start_loc[row], query_start_loc[row + 1], context_lens[row]
    has_slot = (sequence < count) & (count <= max_seqs)
    has_slot &= (start >= 0) & (start <= tokens) & (tokens < end)
    has_slot &= (context_len >= end - start) & (context_len <= MAX_CONTEXT_LEN)
    has_slot &= (context_len - 1) // block_size < max_blocks
    position = context_len - (end - tokens)
    # One index: torch_xla needs two of the same dtype, and a sum has another one than positions.
    column = (position // block_size).clip(0, max_blocks - 1)
    block = block_tables.reshape(-1)[row * max_blocks + column]
    # The product of another block would overflow, and name the slot of a block that exists.
    has_slot &= (block >= 0) & (block < _num_blocks_with_slots(block_size))
    if num_blocks is not None:
        has_slot &= block < num_blocks
    return where(has_slot, block * block_size + position % block_size, -1)


def _num_blocks_with_slots(block_size: int) -> int:
    """How many blocks a pool may have so that all its slots are int32."""
    return (_LARGEST + 1) // block_size


def check_slot_mapping(metadata: Sequence[ArraySpec], block_size: int, num_tokens: int) -> None:
    """Checks the arguments of ``slot_mapping``; raises ValueError (shape, value) or TypeError."""
    check_metadata("slot_mapping", *metadata)
    check_sizes("slot_mapping", least=1, block_size=block_size)
    check_sizes("slot_mapping", num_tokens=num_tokens)


def check_sizes(op: str, *, least: int = 0, **sizes: Any) -> None:
    """Checks sizes, which may be symbols; raises ValueError (value) or TypeError."""
    for name, size in sizes.items():
        is_array = hasattr(size, "dtype") and not isinstance(size, np.integer)
        if isinstance(size, bool) or is_array or not hasattr(size, "__index__"):
            raise dtype_error(op, name, "type int", type(size).__name__)
        if isinstance(size, int | np.integer) and not least <= size <= _LARGEST:
            rule = f"be at least {least}" if size < least else f"be at most {_LARGEST}"
            raise value_error(op, name, rule, size, f"It counts {_COUNTED[name]}")


_COUNTED = {
    "block_size": "the positions of a block",
    "num_blocks": "the blocks of the cache",
    "num_tokens": "the tokens that a step has room for",
    "max_seqs": "the sequences that a step has room for",
    "max_blocks_per_seq": "the blocks that a sequence has room for",
    "sliding_window": "the positions that a token attends to; leave it out if all",
    "token_budget": "the tokens of a step, at most",
    "max_new_tokens": "the tokens of an answer, at most",
}
