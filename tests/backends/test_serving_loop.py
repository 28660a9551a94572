"""The helpers of a serving loop: pools of blocks, padded batches and slot mappings."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import jax_frontend
import torch_frontend
from jax_frontend import BlockPool, pad_batch

SIZES = {"block_size": 4, "num_tokens": 24, "max_seqs": 5, "max_blocks_per_seq": 6}
METADATA = ("context_lens", "block_tables", "query_start_loc", "num_seqs")


def in_jax(num_tokens: int = 24, **metadata: Any) -> np.ndarray:
    slots = jax.jit(
        lambda arrays: jax_frontend.slot_mapping(**arrays, block_size=4, num_tokens=num_tokens)
    )
    return np.asarray(slots(metadata))


def in_torch(num_tokens: int = 24, device: str = "cpu", **metadata: Any) -> np.ndarray:
    tensors = {name: torch.from_numpy(np.array(x)).to(device) for name, x in metadata.items()}
    return torch_frontend.slot_mapping(**tensors, block_size=4, num_tokens=num_tokens).cpu().numpy()


def in_torch_xla(**metadata: Any) -> np.ndarray:
    pytest.importorskip("torch_xla")
    return in_torch(device="xla", **metadata)


def compiled(**metadata: Any) -> np.ndarray:
    tensors = {name: torch.from_numpy(np.array(x)) for name, x in metadata.items()}
    slots = torch.compile(torch_frontend.slot_mapping, fullgraph=True, backend="aot_eager")
    return slots(**tensors, block_size=4, num_tokens=24).numpy()


FRONTENDS = [in_jax, in_torch, in_torch_xla, compiled]


@st.composite
def sequences(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Context and query lengths that fit SIZES."""
    context_lens = draw(st.lists(st.integers(0, 24), max_size=5))
    query_lens, room = [], 24
    for length in context_lens:
        query_lens.append(draw(st.integers(0, min(length, room))))
        room -= query_lens[-1]
    return context_lens, query_lens


def batch_of(context_lens: list[int], query_lens: list[int]) -> jax_frontend.Batch:
    pool = BlockPool(num_blocks=30, block_size=4)
    np.random.default_rng(0).shuffle(pool.free)
    blocks: list[list[int]] = [[] for _ in context_lens]
    for own, length in zip(blocks, context_lens, strict=True):
        assert pool.grow(own, length)
    lens = zip(context_lens, query_lens, strict=True)
    tokens = [[100 * s + p for p in range(n - q, n)] for s, (n, q) in enumerate(lens)]
    return pad_batch(tokens, context_lens, blocks, **SIZES)


@given(sequences())
def test_a_batch_places_each_token(lens: tuple[list[int], list[int]]) -> None:
    batch, written = batch_of(*lens), set()
    start = 0
    for s, (context_len, query_len) in enumerate(zip(*lens, strict=True)):
        assert batch.context_lens[s] == context_len
        for position in range(context_len - query_len, context_len):
            assert batch.positions[start] == position
            assert batch.tokens[start] == 100 * s + position
            slot = batch.block_tables[s, position // 4] * 4 + position % 4
            assert batch.slot_mapping[start] == slot and slot not in written
            written.add(slot)
            start += 1
        assert batch.query_start_loc[s + 1] == start
    assert batch.num_seqs == len(lens[0])
    assert (batch.query_start_loc[len(lens[0]) :] == start).all()
    assert (batch.slot_mapping[start:] == -1).all()


@pytest.mark.parametrize("slots", [in_jax, in_torch])
@given(sequences())
def test_slots_are_those_of_the_batch(slots: Any, lens: tuple[list[int], list[int]]) -> None:
    batch = batch_of(*lens)
    np.testing.assert_array_equal(
        slots(**dict(zip(METADATA, batch[3:], strict=True))), batch.slot_mapping
    )


LENS = ([9, 24, 5], [2, 20, 0])


@pytest.mark.parametrize("slots", FRONTENDS)
def test_slots_with_padding_that_holds_anything(slots: Any) -> None:
    batch = batch_of(*LENS)
    metadata = dict(zip(METADATA, batch[3:], strict=True))
    for name in METADATA[:3]:
        padding = metadata[name][3 + (name == "query_start_loc") :]
        padding[...] = np.resize([-(10**9), 7], padding.shape)
    if slots in (in_jax, in_torch):
        metadata["num_seqs"] = metadata["num_seqs"][0]
    np.testing.assert_array_equal(slots(**metadata), batch.slot_mapping)


@pytest.mark.parametrize("slots", FRONTENDS)
def test_tokens_without_a_place_have_no_slot(slots: Any) -> None:
    batch = batch_of(*LENS)
    metadata = dict(zip(METADATA, batch[3:], strict=True))
    expected = batch.slot_mapping.copy()
    metadata["block_tables"][0, 2] = 2**30  # times 4 is 0 in int32
    metadata["context_lens"][1] = 26  # the table ends at 24: positions 6 to 25
    table = metadata["block_tables"][1]
    positions = np.arange(6, 26)
    expected[1] = -1
    known = positions < 24
    expected[2:22] = np.where(known, table[(positions // 4).clip(0, 5)] * 4 + positions % 4, -1)
    np.testing.assert_array_equal(slots(**metadata), expected)


def test_a_pool_gives_blocks_and_takes_them_back() -> None:
    pool, first, second = BlockPool(num_blocks=4, block_size=16), list[int](), list[int]()
    assert pool.grow(first, 20) and first == [0, 1]
    assert pool.grow(first, 32) and first == [0, 1]
    assert pool.num_missing(second, 33) == 3 and not pool.grow(second, 33)
    assert second == [] and sorted(pool.free) == [2, 3]
    assert pool.grow(second, 32) and not pool.grow(first, 33)
    pool.release(first)
    assert first == [] and sorted(pool.free) == [0, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": [[1, 2], [3] * 23]}, "tokens must fit num_tokens=24; got 25"),
        ({"max_seqs": 1}, "tokens must fit max_seqs=1; got 2"),
        ({"max_blocks_per_seq": 1}, "blocks must fit max_blocks_per_seq=1; got 2"),
        (
            {"context_lens": [5]},
            "context_lens must have an entry for each of the 2 sequences; got 1",
        ),
        ({"blocks": [[0]]}, "blocks must have an entry for each of the 2 sequences; got 1"),
        (
            {"context_lens": [9, 1]},
            r"context_lens\[0\] must count at least its 2 new tokens, and at most the 8 that its 2 "
            "blocks hold; got 9",
        ),
        ({"context_lens": [1, 1]}, r"context_lens\[0\] must count at least its 2 new tokens"),
    ],
)
def test_a_batch_that_does_not_fit(changes: dict[str, Any], message: str) -> None:
    sound = {"tokens": [[1, 2], [3]], "context_lens": [5, 1], "blocks": [[3, 1], [0]]}
    for frontend in (jax_frontend, torch_frontend):
        with pytest.raises(ValueError, match=f"pad_batch: {message}"):
            frontend.pad_batch(**(sound | SIZES | changes))


def test_tensors_of_a_batch() -> None:
    sound = {"tokens": [[1, 2], [3]], "context_lens": [5, 1], "blocks": [[3, 1], [0]]}
    batch = torch_frontend.pad_batch(**sound, **SIZES, device="meta")
    assert {(x.device.type, x.dtype) for x in batch} == {("meta", torch.int32)}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"context_lens": np.zeros(4, np.int32)},
            ValueError,
            r"block_tables must have shape \[max_seqs=4",
        ),
        (
            {"query_start_loc": np.zeros(5, np.int32)},
            ValueError,
            r"query_start_loc must have shape",
        ),
        (
            {"block_tables": np.zeros((5, 6), np.float32)},
            TypeError,
            "block_tables must have dtype int32",
        ),
        ({"num_seqs": None}, TypeError, "num_seqs must be an array; got None"),
        ({"block_size": 0}, ValueError, "block_size must be at least 1; got 0"),
        ({"num_tokens": -1}, ValueError, "num_tokens must be at least 0; got -1"),
    ],
)
def test_slots_of_wrong_arguments(changes: Any, error: type[Exception], message: str) -> None:
    arguments = dict(zip(METADATA, batch_of(*LENS)[3:], strict=True))
    arguments |= {"block_size": 4, "num_tokens": 24} | changes
    for frontend, convert in ((jax_frontend, jnp.asarray), (torch_frontend, torch.from_numpy)):
        given = {
            name: convert(x) if isinstance(x, np.ndarray) else x for name, x in arguments.items()
        }
        with pytest.raises(error, match=f"slot_mapping: {message}"):
            frontend.slot_mapping(**given)
