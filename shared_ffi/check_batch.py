"""The check of a step's arrays on the host. Ops take slots and tables as they are given."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shared_ffi import _native
from shared_ffi.batch import check_sizes
from shared_ffi.paged_attention import METADATA, check_metadata
from shared_ffi.spec import (
    ArraySpec,
    check_is_on_host,
    integers_on_host,
    shape_error,
    value_error,
)

_OP = "check_batch"


class BatchHistory:
    """What the steps before have written to a cache, for ``check_batch``.

    Example:
        >>> history, cache = BatchHistory(), {"block_size": 16, "num_blocks": 4}
        >>> def check(name, context_len, blocks):  # one sequence, with one new token
        ...     sizes = {"num_tokens": 1, "max_seqs": 1, "max_blocks_per_seq": 2, "block_size": 16}
        ...     batch = pad_batch([[5]], [context_len], [blocks], **sizes)
        ...     check_batch(*batch[2:], **cache, history=history, seq_ids=[name])
        >>> check("a", 1, [3])
        >>> check("b", 1, [3])  # block 3 again, though "a" has not ended
        >>> check("a", 2, [3])
        ValueError: check_batch: block_tables[0, 0] must still hold the positions from 0 on of
        sequence 0 ('a'), which ran in step 1; got block 3, which sequence 'b' wrote in step 2. ...
    """

    def __init__(self) -> None:
        self._step = 0
        self._sequences: dict[Hashable, _Seen] = {}
        self._writers = np.empty(0, object)
        """The sequence that wrote each block last."""
        self._written = np.empty(0, np.int64)
        """The step in which each block was written last."""

    def forget(self, seq_id: Hashable) -> None:
        """Tells that a sequence has ended, or that its tokens will lie in other blocks: it was
        preempted, moved, or had a shared block copied. A sequence that is not known is no error."""
        self._sequences.pop(seq_id, None)


class _Seen(NamedTuple):
    """A sequence as it was in its last step."""

    step: int
    context_len: int
    blocks: np.ndarray


def check_batch(
    slot_mapping: Any,
    context_lens: Any,
    block_tables: Any,
    query_start_loc: Any,
    num_seqs: Any,
    *,
    block_size: int,
    num_blocks: int,
    sliding_window: int | None = None,
    history: BatchHistory | None = None,
    seq_ids: Sequence[Hashable] | None = None,
) -> None:
    """Checks on the host that the arrays of a step agree, as a test of a scheduler.

    The ops find lengths that contradict each other. They cannot know that a slot or a block is
    another sequence's. This function checks also that

    * each slot is the one that lengths and table name for its token, and negative for padding;
    * no sequence has a block twice;
    * no sequence writes a block that another one of the batch has. Blocks that nobody writes may be
      shared.

    With a history, it also checks that the positions before a sequence's new tokens lie where an
    earlier step of the sequence has written them, and that no other sequence has written there
    since.

    It copies arrays that are on a device, and waits for them. 64 sequences of 8,192 tokens take
    about 3 ms, with a history 4 ms.

    Args:
        slot_mapping: ``[num_tokens]``, as in ``kv_cache_update``: ``check_batch(*batch[2:], ...)``
            takes what ``pad_batch`` returns.
        context_lens: ``[max_seqs]``, as in ``paged_attention``.
        block_tables: ``[max_seqs, max_blocks_per_seq]``, as there.
        query_start_loc: ``[max_seqs + 1]``, as there.
        num_seqs: ``[]`` or ``[1]``, as there. All five are arrays of NumPy, JAX or PyTorch, or
            lists, of integers of any width.
        block_size: positions of a block.
        num_blocks: blocks of the cache.
        sliding_window: of all layers that use these tables; entries before the window may hold
            anything then.
        history: of the steps before, to which this one is added. One for each pool of blocks.
        seq_ids: with a history, a name of each of the ``num_seqs`` sequences, which no other one
            gets until ``history.forget``.

    Raises:
        ValueError: a shape or value is wrong. The message names the entry, the sequence and the
            position, and what should be there. The history is as before then.
        TypeError: an array is None, has no integers or no values yet (under ``jax.jit``), or a size
            is no int.
    """
    window = {} if sliding_window is None else {"sliding_window": sliding_window}
    check_sizes(_OP, least=1, block_size=block_size, **window)
    check_sizes(_OP, num_blocks=num_blocks)
    arrays = (slot_mapping, context_lens, block_tables, query_start_loc, num_seqs)
    named = dict(zip(("slot_mapping", *METADATA), arrays, strict=True))
    check_is_on_host(_OP, **named)
    slots, *metadata = (integers_on_host(_OP, name, array) for name, array in named.items())
    if slots.ndim != 1:
        remedy = "It has a slot for each token"
        raise shape_error(_OP, "slot_mapping", "[num_tokens]", slots.shape, remedy)
    check_metadata(_OP, *(ArraySpec(array.shape, "int32") for array in metadata))
    # What int32 cannot hold is out of every range.
    limits = np.iinfo(np.int32)
    lens, tables, starts, count = (
        np.clip(array, limits.min, limits.max).astype(np.int32, order="C") for array in metadata
    )
    error = _native.metadata_error(
        lens,
        tables,
        starts,
        count.item(),
        token_pairs={},
        causal=None,
        num_tokens=len(slots),
        num_blocks=num_blocks,
        block_size=block_size,
        sliding_window=sliding_window or 0,
        max_query_len=0,
        is_causal=True,
    )
    if error:
        raise ValueError(f"{_OP}: {error}")
    names = _names(history, seq_ids, count.item())
    step = _Step(metadata, names, block_size, num_blocks, sliding_window)
    step.check_slots(slots)
    step.check_owners()
    if history is not None:
        step.check_history(history)
        step.write_down(history)


def _names(
    history: BatchHistory | None, seq_ids: Sequence[Hashable] | None, num_seqs: int
) -> list[Hashable]:
    """The names of the sequences; none without a history."""
    if (history is None) != (seq_ids is None):
        argument, other = ("seq_ids", "history") if seq_ids is None else ("history", "seq_ids")
        raise value_error(_OP, argument, f"be given with {other}", None, f"Pass {argument}, too")
    if seq_ids is None:
        return []
    to_list = getattr(seq_ids, "tolist", None)  # the elements of a tensor have no hash of value
    names = [*seq_ids] if to_list is None else to_list()
    if len(names) != num_seqs or len({*names}) != num_seqs:
        rule = f"name each of the num_seqs={num_seqs} sequences once"
        remedy = "Name them in the order of the batch, without padding"
        raise value_error(_OP, "seq_ids", rule, names, remedy)
    return names


class _Step:
    """The arrays of a step whose lengths agree, and the entries of its tables that count."""

    def __init__(
        self,
        metadata: Sequence[np.ndarray],
        names: list[Hashable],
        block_size: int,
        num_blocks: int,
        sliding_window: int | None,
    ) -> None:
        context_lens, block_tables, query_start_loc, num_seqs = (
            array.astype(np.int64) for array in metadata
        )
        count = num_seqs.item()
        self.names, self.block_size, self.num_blocks = names, block_size, num_blocks
        self.lens, self.tables = context_lens[:count], block_tables[:count]
        self.starts = query_start_loc[: count + 1] if count else np.zeros(1, np.int64)
        query_lens = np.diff(self.starts)
        self.firsts = self.lens - query_lens
        """The position of the first new token of each sequence."""
        self.has_new = query_lens > 0
        window = self.firsts + 1 if sliding_window is None else sliding_window
        self.needed = np.maximum(self.firsts - window + 1, 0) // block_size
        """The first entry of each table that is read."""
        columns = np.arange(self.tables.shape[1])
        counts = (columns >= self.needed[:, None]) & (
            columns < self._blocks_for(self.lens)[:, None]
        )
        # The table of a sequence without new tokens is not read, and was not checked.
        counts &= (self.tables >= 0) & (self.tables < num_blocks)
        self.rows, self.columns = np.nonzero(counts)
        self.blocks = self.tables[counts]
        is_written = self.columns >= (self.firsts // block_size)[self.rows]
        self.is_written = is_written & self.has_new[self.rows]

    def _blocks_for(self, count: Any) -> Any:
        """How many blocks hold so many positions."""
        return -(-count // self.block_size)

    def _sequence(self, s: int) -> str:
        return f"sequence {s}" + (f" ({self.names[s]!r})" if self.names else "")

    def check_slots(self, slots: np.ndarray) -> None:
        """Checks that each slot is the one that lengths and table name."""
        row, column = self.rows[self.is_written], self.columns[self.is_written]
        begin = np.maximum(column * self.block_size, self.firsts[row])
        end = np.minimum((column + 1) * self.block_size, self.lens[row])
        # From the number of a token to its slot, which is the same for all tokens of a block.
        distance = (self.blocks[self.is_written] - column) * self.block_size
        distance += (self.firsts - self.starts[:-1])[row]
        start, stop = self.starts[0], self.starts[-1]
        dtype = np.int32 if self.num_blocks * self.block_size <= 2**31 else np.int64  # for speed
        wanted = np.repeat(distance.astype(dtype), end - begin)
        wanted += np.arange(start, stop, dtype=dtype)
        for wrong in np.flatnonzero(slots[start:stop] != wanted):
            token = int(start + wrong)
            s = int(np.searchsorted(self.starts, token, side="right")) - 1
            entry, offset = divmod(int(self.firsts[s] + token - self.starts[s]), self.block_size)
            raise value_error(
                _OP,
                f"slot_mapping[{token}]",
                f"be {wanted[wrong]}, the slot of position {entry * self.block_size + offset} "
                f"of {self._sequence(s)}: block_tables[{s}, {entry}]={self.tables[s, entry]} * "
                f"block_size={self.block_size} + {offset}",
                self._slot(slots[token]),
                "Correct the slot, the table, or what the position "
                f"follows from: context_lens[{s}]={self.lens[s]} and query_start_loc[{s + 1}]="
                f"{self.starts[s + 1]}",
            )
        for first, padding in ((0, slots[:start]), (stop, slots[stop:])):
            for wrong in np.flatnonzero(padding >= 0):
                rule = "be negative: query_start_loc gives the token to no sequence, so it pads"
                got = self._slot(padding[wrong])
                raise value_error(_OP, f"slot_mapping[{first + wrong}]", rule, got, "Write -1")

    def _slot(self, slot: np.int64) -> str:
        """A slot, and whose it is."""
        block, offset = divmod(int(slot), self.block_size)
        found = np.flatnonzero(self.blocks == block)
        if slot < 0 or block >= self.num_blocks:
            return f"{slot}, which is no slot of num_blocks={self.num_blocks} blocks"
        if found.size == 0:
            return f"{slot}, in block {block}, which no sequence of the batch has"
        position = self.columns[found[0]] * self.block_size + offset
        return f"{slot}, the slot of position {position} of {self._sequence(self.rows[found[0]])}"

    def check_owners(self) -> None:
        """Checks that no sequence has a block twice, nor writes one that another has."""
        num_seqs = max(len(self.lens), 1)
        # Sorted, the entries of a block are neighbours, and a sequence's own among them.
        keys = np.sort((self.blocks * num_seqs + self.rows) * 2 + self.is_written)
        row, written = keys // 2, keys % 2 == 1
        is_shared = row[1:] // num_seqs == row[:-1] // num_seqs
        for wrong in np.flatnonzero(is_shared & (row[1:] == row[:-1])):
            block, s = divmod(int(row[wrong]), num_seqs)
            first, second = self.columns[(self.blocks == block) & (self.rows == s)][:2]
            raise value_error(
                _OP,
                f"block_tables[{s}, {second}]",
                f"be a block that {self._sequence(s)} has nowhere else, for its positions from "
                f"{second * self.block_size} on",
                f"{block}, as block_tables[{s}, {first}]",
                "Was it freed early or taken twice? Give each entry a block of its own",
            )
        for wrong in np.flatnonzero(is_shared & (written[1:] | written[:-1])):
            found = np.flatnonzero(self.blocks == row[wrong] // num_seqs)
            writer = found[self.is_written[found]][0]
            other = found[found != writer][0]
            s, column, o = self.rows[writer], self.columns[writer], self.rows[other]
            first = max(int(self.firsts[s]), column * self.block_size)
            raise value_error(
                _OP,
                f"block_tables[{s}, {column}]",
                f"be a block that {self._sequence(s)} alone has, as it writes its position {first} "
                "there",
                f"{self.blocks[writer]}, as block_tables[{o}, {self.columns[other]}] of "
                f"{self._sequence(o)}",
                "Was it freed early or taken twice? Copy a shared block before a sequence writes "
                "it",
            )

    def check_history(self, history: BatchHistory) -> None:
        """Checks what the sequences have in the cache from the steps before."""
        if history._step > 0 and len(history._written) != self.num_blocks:
            rule = f"be {len(history._written)}, as in the history's first step"
            remedy = "Begin another history with another cache"
            raise value_error(_OP, "num_blocks", rule, self.num_blocks, remedy)
        for s, name in enumerate(self.names):
            seen = history._sequences.get(name)
            if seen is None or not self.has_new[s]:
                continue
            if self.firsts[s] > seen.context_len:
                raise value_error(
                    _OP,
                    f"context_lens[{s}]",
                    f"be at most {seen.context_len + self.starts[s + 1] - self.starts[s]} for "
                    f"{self._sequence(s)}, whose positions from {seen.context_len} on were written "
                    f"in no step",
                    self.lens[s],
                    "Correct it, or call history.forget if the cache was filled by other means",
                )
            columns = slice(self.needed[s], self._blocks_for(self.firsts[s]))
            own = self.tables[s, columns]
            for wrong in np.flatnonzero(own != seen.blocks[columns]):
                column = columns.start + wrong
                raise value_error(
                    _OP,
                    f"block_tables[{s}, {column}]",
                    f"be {seen.blocks[column]}, which holds positions of {self._sequence(s)} from "
                    f"{column * self.block_size} on since step {seen.step}",
                    own[wrong],
                    "Is the row of another step or sequence? If the block was moved, call "
                    "history.forget before",
                )
            for wrong in np.flatnonzero(history._written[own] > seen.step):
                column, block = columns.start + wrong, own[wrong]
                raise value_error(
                    _OP,
                    f"block_tables[{s}, {column}]",
                    f"still hold the positions from {column * self.block_size} on of "
                    f"{self._sequence(s)}, which ran in step {seen.step}",
                    f"block {block}, which sequence {history._writers[block]!r} wrote in step "
                    f"{history._written[block]}",
                    "Was it freed early? If the positions are to be computed anew, begin at 0",
                )

    def write_down(self, history: BatchHistory) -> None:
        """Adds the step to a history."""
        if history._step == 0:
            history._writers = np.empty(self.num_blocks, object)
            history._written = np.zeros(self.num_blocks, np.int64)
        history._step += 1
        names = np.fromiter(self.names, object)
        for s in np.flatnonzero(self.has_new):
            blocks = self.tables[s, : self._blocks_for(self.lens[s])].copy()
            history._sequences[names[s]] = _Seen(history._step, int(self.lens[s]), blocks)
        blocks = self.blocks[self.is_written]
        history._written[blocks] = history._step
        history._writers[blocks] = names[self.rows[self.is_written]]
