"""check_batch: a sound step passes, and each fault of a scheduler is named."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_frontend
import torch_frontend
from jax_frontend import BatchHistory, check_batch, pad_batch

README = (Path(__file__).parents[2] / "README.md").read_text()
(EXAMPLE,) = [x for x in re.findall(r"```python\n(.*?)```", README, re.S) if "check_batch(" in x]
BEFORE_THE_CHECK = "        check_batch("
AFTER_GROWING = "            pool.grow(blocks[i], end)\n"

LINES_OF_FAULTS = [
    (
        AFTER_GROWING,
        "if done[i] > 20: pool.free.append(blocks[i][0])",
        r"block_tables\[\d, \d\] must be a block that sequence \d (alone has|has nowhere else)",
    ),
    (
        AFTER_GROWING,
        "if i == 1: pool.free.append(blocks[i][-1])",
        r"block_tables\[1, 0\] must be a block that sequence 1 alone has.* of sequence 2",
    ),
    (
        BEFORE_THE_CHECK,
        "for row, i in zip(batch.block_tables, running): row[2:] = row[0]  # too few",
        r"slot_mapping\[4\] must be 0, the slot of position 32 of sequence 0: block_tables\[0, 2\]=0",
    ),
    (
        BEFORE_THE_CHECK,
        "batch.context_lens.sub_(batch.query_start_loc.diff())",
        r"context_lens\[0\] must count the sequence's \d query tokens too",
    ),
    (
        BEFORE_THE_CHECK,
        "batch.context_lens[: len(running)] += 1",
        r"slot_mapping\[0\] must be 1, the slot of position 1 of sequence 0.*; got 0, the slot of "
        r"position 0 of sequence 0\. .*context_lens\[0\]=8",
    ),
    (
        BEFORE_THE_CHECK,
        "batch.block_tables[0, (ends[0] - 1) // 16] = 8  # of a step before",
        r"slot_mapping\[0\] must be 128, the slot of position 0 of sequence 0: "
        r"block_tables\[0, 0\]=8 \* block_size=16 \+ 0",
    ),
    (
        BEFORE_THE_CHECK,
        "batch.slot_mapping.add_(batch.slot_mapping >= 0)",
        r"slot_mapping\[0\] must be 0, the slot of position 0 .*; got 1, the slot of position 1",
    ),
    (
        BEFORE_THE_CHECK,
        "batch.slot_mapping[:] = batch.slot_mapping // 16 + batch.slot_mapping % 16",
        r"slot_mapping\[7\] must be 16, the slot of position 0 of sequence 1.*; got 1, the slot of",
    ),
    (
        BEFORE_THE_CHECK,
        "batch.slot_mapping[7] += 9 * 16",
        r"slot_mapping\[7\] must be 16, .*; got 160, which is no slot of num_blocks=9 blocks",
    ),
    (
        BEFORE_THE_CHECK,
        "batch.slot_mapping.clamp_(min=0)",
        r"slot_mapping\[\d+\] must be negative: .*; got 0, .*\. Write -1",
    ),
    (
        BEFORE_THE_CHECK,
        "batch.block_tables[: len(running)] = batch.block_tables[: len(running)].flip(0)",
        r"slot_mapping\[0\] must be 32, .* of sequence 0: .*; got 0, the slot of position 0 of "
        "sequence 2",
    ),
]
HARMLESS_LINES = [
    "for row, i in zip(batch.block_tables, running): row[len(blocks[i]) :] = -1",
    "batch.query_start_loc[len(running) + 1 :] = 0",
    "batch.num_seqs[0] = 3",
]


def run_the_example(place: str, line: str) -> None:
    assert EXAMPLE.count(place) == 1
    indent = re.match(" *", place).group()  # type: ignore[union-attr]
    whole = place + indent + line + "\n" if place.endswith("\n") else indent + line + "\n" + place
    page: dict[str, Any] = {}
    exec(EXAMPLE.replace(place, whole), page)
    (test,) = [x for name, x in page.items() if name.startswith("test_")]
    test(7)


@pytest.mark.parametrize(("place", "line", "message"), LINES_OF_FAULTS, ids=lambda x: str(x)[:40])
def test_the_example_of_the_readme_finds_faults(place: str, line: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^check_batch: {message}"):
        run_the_example(place, line)


@pytest.mark.parametrize("line", HARMLESS_LINES)
def test_the_example_of_the_readme_accepts_what_is_harmless(line: str) -> None:
    run_the_example(BEFORE_THE_CHECK, line)


SIZES: dict[str, Any] = {"block_size": 4, "num_tokens": 12, "max_seqs": 4, "max_blocks_per_seq": 4}
POOL: dict[str, Any] = {"block_size": 4, "num_blocks": 20}
NAMES = ("slot_mapping", "context_lens", "block_tables", "query_start_loc", "num_seqs")


def sound_step() -> dict[str, Any]:
    """A prompt, a chunk behind a prefix, and a sequence that decodes behind the same prefix."""
    tokens, blocks = [[0] * 5, [0] * 3, [0]], [[7, 2], [5, 3, 11], [5, 3, 9]]
    batch = pad_batch(tokens, [5, 11, 9], blocks, **SIZES)
    return dict(zip(NAMES, batch[2:], strict=True))


CONVERSIONS: dict[str, Callable[[np.ndarray], Any]] = {
    "numpy": lambda x: x,
    "int64": lambda x: x.astype(np.int64),
    "uint32": lambda x: x.astype(np.uint32),
    "list": lambda x: x.tolist(),
    "jax": jnp.asarray,
    "torch": torch.from_numpy,
}


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_a_sound_step_in_any_array(convert: Callable[[np.ndarray], Any]) -> None:
    step = sound_step()
    if convert is CONVERSIONS["uint32"]:  # has no -1
        step["slot_mapping"] = step["slot_mapping"][:9]
    check_batch(**{name: convert(x) for name, x in step.items()}, **POOL)
    step["slot_mapping"][8] += 1
    with pytest.raises(ValueError, match=r"slot_mapping\[8\] must be 36, .*; got 37"):
        check_batch(**{name: convert(x) for name, x in step.items()}, **POOL)


def test_both_frontends_have_the_same_functions() -> None:
    assert torch_frontend.check_batch is jax_frontend.check_batch is check_batch
    assert torch_frontend.BatchHistory is BatchHistory


@pytest.mark.parametrize("step", [([], [], []), ([[]], [9], [[4, 5, 6]])], ids=["none", "no token"])
def test_steps_without_tokens(step: Any) -> None:
    batch = pad_batch(*step, **SIZES)
    check_batch(*batch[2:], **POOL)
    empty = {"num_tokens": 0, "max_seqs": len(step[0]), "max_blocks_per_seq": 3, "block_size": 4}
    check_batch(*pad_batch(*step, **empty)[2:], **POOL)


def test_slots_beyond_int32() -> None:
    metadata = [[5], [[2**30, 1]], [0, 5], [1]]
    large = {"block_size": 2**16, "num_blocks": 2**31 - 1}
    slots = [2**30 * 2**16 + i for i in range(5)]
    check_batch(slots, *metadata, **large)
    slots[3] -= 2**32
    with pytest.raises(ValueError, match=rf"slot_mapping\[3\] must be {2**46 + 3}"):
        check_batch(slots, *metadata, **large)


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        (
            "slot_mapping",
            6,
            -1,
            r"slot_mapping\[6\] must be 45, the slot of position 9 of sequence 1",
        ),
        ("slot_mapping", 6, 45 + 80, "got 125, which is no slot of num_blocks=20 blocks"),
        ("slot_mapping", 0, 8, "got 8, the slot of position 4 of sequence 0"),
        ("slot_mapping", 0, 76, "got 76, in block 19, which no sequence of the batch has"),
        ("slot_mapping", 11, 2, r"slot_mapping\[11\] must be negative"),
        ("context_lens", 0, 17, r"context_lens\[0\] must be from 0 to .*; got 17"),
        ("context_lens", 1, 2, r"context_lens\[1\] must count the sequence's 3 query tokens"),
        ("query_start_loc", 2, 4, "query_start_loc must not decrease"),
        ("query_start_loc", 3, 13, r"query_start_loc\[3\] must be at most num_tokens=12; got 13"),
        ("query_start_loc", 0, 1, r"slot_mapping\[0\] must be negative: .*; got 28"),
        ("num_seqs", 0, 5, "num_seqs must be from 0 to max_seqs=4; got 5"),
        ("num_seqs", 0, 2, r"slot_mapping\[8\] must be negative"),
        ("block_tables", (1, 0), 20, r"block_tables\[1, 0\] must be from 0 to num_blocks - 1=19"),
        (
            "block_tables",
            (1, 1),
            5,
            r"block_tables\[1, 1\] must be a block that sequence 1 has nowhere",
        ),
        (
            "block_tables",
            (2, 0),
            11,
            r"block_tables\[1, 2\] must be a block that sequence 1 alone has, as it writes its "
            r"position 8 there; got 11, as block_tables\[2, 0\] of sequence 2",
        ),
        ("block_tables", (2, 0), 7, r"block_tables\[0, 0\] .* as it writes its position 0 there"),
    ],
)
def test_faults_by_name(name: str, index: Any, value: int, message: str) -> None:
    step = sound_step()
    step[name][index] = value
    with pytest.raises(ValueError, match=f"^check_batch: .*{message}"):
        check_batch(**step, **POOL)


def test_a_sequence_without_new_tokens_keeps_its_blocks() -> None:
    step = sound_step()
    slots = np.concatenate([step["slot_mapping"][:8], np.full(4, -1, np.int32)])
    step |= {"slot_mapping": slots, "query_start_loc": np.int32([0, 5, 8, 8, 8])}
    check_batch(**step, **POOL)
    step["block_tables"][2] = [2**30, -1, 30, 0]  # nobody reads it
    check_batch(**step, **POOL)
    step["block_tables"][2] = [5, 3, 11, 0]
    with pytest.raises(ValueError, match="sequence 1 alone has"):
        check_batch(**step, **POOL)


def test_blocks_before_the_window_may_be_anything() -> None:
    step = sound_step()
    step["block_tables"][1:3, :2] = [[0, 0], [-1, 7]]
    with pytest.raises(ValueError, match="check_batch"):
        check_batch(**step, **POOL)
    check_batch(**step, **POOL, sliding_window=1)
    with pytest.raises(ValueError, match=r"block_tables\[2, 1\] must be a block|of sequence 2"):
        check_batch(**step, **POOL, sliding_window=2)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"slot_mapping": np.zeros((3, 4), int)},
            ValueError,
            r"slot_mapping must have shape \[num_",
        ),
        ({"slot_mapping": None}, TypeError, "slot_mapping must be an array; got None"),
        (
            {"block_tables": [[1], [2, 3]]},
            TypeError,
            "block_tables must be an array; got rows of several lengths. Pad them",
        ),
        ({"num_seqs": 3.0}, TypeError, "num_seqs must have integers; got float64"),
        ({"context_lens": [1, 2]}, ValueError, r"block_tables must have shape \[max_seqs=2"),
        ({"block_size": 0}, ValueError, "block_size must be at least 1; got 0"),
        ({"num_blocks": 2.0}, TypeError, "num_blocks must have type int; got float"),
        ({"sliding_window": 0}, ValueError, "sliding_window must be at least 1; got 0"),
        ({"history": BatchHistory()}, ValueError, "seq_ids must be given with history; got None"),
        ({"seq_ids": "abc"}, ValueError, "history must be given with seq_ids; got None"),
        (
            {"history": BatchHistory(), "seq_ids": "aba"},
            ValueError,
            r"seq_ids must name each of the num_seqs=3 sequences once; got \['a', 'b', 'a'\]",
        ),
        (
            {"history": BatchHistory(), "seq_ids": np.arange(2)},
            ValueError,
            r"seq_ids must name each of the num_seqs=3 sequences once; got \[0, 1\]",
        ),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=rf"^check_batch: {message}"):
        check_batch(**(sound_step() | POOL | changes))


def test_under_jit() -> None:
    rule = "must have values on the host; got a value under jax.jit. Call check_batch outside of"
    with pytest.raises(TypeError, match=rule):
        jax.jit(lambda x: check_batch(**(x | POOL)))(sound_step())


class Server:
    """Makes the steps of sequences by name, and has each checked with one history."""

    def __init__(self) -> None:
        self.history = BatchHistory()

    def step(self, **sequences: tuple[int, int, list[int]]) -> None:
        """Each sequence: the end of its new tokens, their number, and its blocks."""
        ends, counts, blocks = zip(*sequences.values(), strict=True)
        batch = pad_batch([[0] * n for n in counts], ends, blocks, **SIZES)
        check_batch(*batch[2:], **POOL, history=self.history, seq_ids=[*sequences])

    def refuses(self, message: str, **sequences: tuple[int, int, list[int]]) -> None:
        with pytest.raises(ValueError, match=f"^check_batch: {message}"):
            self.step(**sequences)


def test_steps_that_follow_each_other() -> None:
    server = Server()
    server.step(a=(6, 6, [4, 5]), b=(3, 3, [7]))
    server.step(a=(7, 1, [4, 5]), b=(5, 2, [7, 2]))
    server.step(c=(9, 1, [4, 5, 3]))  # behind the tokens of a, which has ended
    server.step(d=(2, 2, [7]), c=(10, 1, [4, 5, 3]))  # b has ended, too


def test_a_block_that_was_freed_early() -> None:
    server = Server()
    server.step(a=(6, 6, [4, 5]))
    server.step(b=(3, 3, [4]))
    message = (
        r"block_tables\[0, 0\] must still hold the positions from 0 on of sequence 0 \('a'\), which "
        r"ran in step 1; got block 4, which sequence 'b' wrote in step 2\."
    )
    server.refuses(message, a=(7, 1, [4, 5]))
    server.refuses(message, a=(7, 1, [4, 5]))  # a refused step is not written down
    server.step(a=(7, 7, [4, 5]))  # computed anew
    server.refuses(r"block_tables\[0, 0\] must still hold", b=(4, 1, [4]))
    server.step(a=(8, 1, [4, 5]))


def test_a_table_of_another_step() -> None:
    server = Server()
    server.step(a=(6, 6, [4, 5]), b=(6, 6, [7, 2]))
    server.refuses(
        r"block_tables\[0, 0\] must be 4, which holds positions of sequence 0 \('a'\) from 0 on since "
        r"step 1; got 7\.",
        a=(7, 1, [7, 2]),
    )
    server.step(a=(6, 1, [4, 5]))  # a rejected draft
    server.history.forget("a")
    server.step(a=(7, 1, [8, 9]))  # moved
    server.history.forget("nobody")


def test_tokens_that_no_step_computed() -> None:
    server = Server()
    server.step(a=(6, 6, [4, 5]))
    server.refuses(
        r"context_lens\[0\] must be at most 7 for sequence 0 \('a'\), whose positions from 6 on were "
        "written in no step; got 8",
        a=(8, 1, [4, 5]),
    )
    server.step(b=(5, 1, [4, 6]))  # behind a prefix of somebody else


def test_a_history_is_of_one_cache() -> None:
    history = BatchHistory()
    check_batch(**sound_step(), **POOL, history=history, seq_ids="abc")
    with pytest.raises(ValueError, match="num_blocks must be 20, as in the history's first step; "):
        check_batch(**sound_step(), block_size=4, num_blocks=30, history=history, seq_ids="abc")
