"""The helpers of a serving loop: pools of blocks, padded batches and slot mappings."""

from __future__ import annotations

from functools import partial
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


_IN_JAX = jax.jit(partial(jax_frontend.slot_mapping, block_size=4), static_argnames=("num_tokens",))


def in_jax(num_tokens: int = 24, **metadata: Any) -> np.ndarray:
    return np.asarray(_IN_JAX(**metadata, num_tokens=num_tokens))


def in_jax_x64(**metadata: Any) -> np.ndarray:
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(np.asarray(x, np.int64)) for name, x in metadata.items()}
        return in_jax(**wide)


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


FRONTENDS = [in_jax, in_jax_x64, in_torch, in_torch_xla, compiled]


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
    metadata["context_lens"][1] = 26  # the table ends at 24
    expected[1:22] = -1
    np.testing.assert_array_equal(slots(**metadata), expected)


LEAST, MOST = -(2**31), 2**31 - 1
SOME = st.sampled_from([LEAST, LEAST + 1, -5, -1, 0, 1, 2, 4, 5, 9, 24, 25, MOST - 1023, MOST])


@pytest.mark.parametrize("slots", [in_jax, in_torch])
@given(st.lists(SOME, min_size=2, max_size=2), st.lists(SOME, min_size=3, max_size=3), SOME)
def test_lengths_that_contradict_each_other_name_no_slot(
    slots: Any, lens: list[int], starts: list[int], num_seqs: int
) -> None:
    """The rule in integers that do not wrap."""
    tables = np.int32([[2**29 - 1, 3, 2**29, 7, 8, 9], [0, -1, LEAST, MOST, 4, 5]])
    expected = []
    for token in range(24):
        s = sum(num_seqs > i and starts[i + 1] <= token for i in range(2))
        slot = -1
        if s < num_seqs <= 2 and 0 <= starts[s] <= token < starts[s + 1]:
            position = lens[s] - starts[s + 1] + token
            if starts[s + 1] - starts[s] <= lens[s] <= 24:
                block = int(tables[s, position // 4])
                slot = block * 4 + position % 4 if 0 <= block < 2**29 else -1
        expected.append(slot)
    given = dict(zip(METADATA, map(np.int32, (lens, tables, starts, [num_seqs])), strict=True))
    found = slots(**given)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("slots", FRONTENDS)
@pytest.mark.parametrize(("max_seqs", "max_blocks"), [(0, 3), (2, 0), (0, 0)])
def test_slots_of_empty_tables(slots: Any, max_seqs: int, max_blocks: int) -> None:
    shapes = (max_seqs,), (max_seqs, max_blocks), (max_seqs + 1,), (1,)
    arrays = [np.zeros(shape, np.int32) for shape in shapes]
    np.testing.assert_array_equal(slots(**dict(zip(METADATA, arrays, strict=True))), [-1] * 24)


def test_the_last_slot_of_int32() -> None:
    sizes = SIZES | {"num_tokens": 2}
    batch = pad_batch([[1, 2]], [4], [[2**29 - 1]], **sizes)
    assert batch.slot_mapping.tolist() == [MOST - 1, MOST]
    for slots in (in_jax, in_torch):
        found = slots(2, **dict(zip(METADATA, batch[3:], strict=True)))
        np.testing.assert_array_equal(found, batch.slot_mapping)


def test_a_pool_gives_blocks_and_takes_them_back() -> None:
    pool, first, second = BlockPool(num_blocks=4, block_size=16), list[int](), list[int]()
    assert pool.grow(first, 20) and first == [0, 1]
    assert pool.grow(first, 32) and first == [0, 1]
    assert pool.num_missing(second, 33) == 3 and not pool.grow(second, 33)
    assert second == [] and sorted(pool.free) == [2, 3]
    assert pool.grow(second, 32) and not pool.grow(first, 33)
    pool.release(first)
    assert first == [] and sorted(pool.free) == [0, 1]


def test_a_shared_block_is_free_when_all_have_released_it() -> None:
    pool, first = BlockPool(num_blocks=4, block_size=16), list[int]()
    pool.grow(first, 40)
    second = pool.share(first[:2])
    pool.grow(second, 48)
    assert second == [0, 1, 3] and pool.free == []
    pool.release(first)
    assert pool.free == [2] and second == [0, 1, 3]
    assert not pool.grow(list[int](), 32)  # nobody gets a block that is in use
    pool.release(second)
    assert sorted(pool.free) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"block_size": 0}, "block_size must be at least 1; got 0"),
        ({"block_size": 4.0}, "block_size must have type int; got float"),
        ({"num_blocks": -1}, "num_blocks must be at least 0; got -1"),
        ({"num_blocks": True}, "num_blocks must have type int; got bool"),
    ],
)
def test_impossible_pools(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"^BlockPool: {message}\. [A-Z]"):
        BlockPool(**({"num_blocks": 4, "block_size": 16} | sizes))


@pytest.mark.parametrize("method", ["share", "release"])
@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([0, 99], r"hold blocks of the pool, from 0 to 3; got 99"),
        ([-1], r"hold blocks of the pool, from 0 to 3; got -1"),
        ([1, 2], r"hold blocks in use, once for each sequence that has them .*; got 2 in \[1, 2\]"),
        ([0, 1, 0], r"hold blocks in use, .* \(share adds one\); got 0 in \[0, 1, 0\]"),
    ],
)
def test_blocks_that_no_sequence_has(method: str, blocks: list[int], message: str) -> None:
    pool, own = BlockPool(num_blocks=4, block_size=16), list[int]()
    pool.grow(own, 32)
    given = [*blocks]
    with pytest.raises(ValueError, match=f"^BlockPool.{method}: blocks must {message}"):
        getattr(pool, method)(given)
    assert given == blocks and pool.free == [3, 2]
    again = [*own]
    pool.release(own)
    with pytest.raises(ValueError, match=r"got 0 in \[0, 1\]"):
        pool.release(again)
    assert sorted(pool.free) == [0, 1, 2, 3]


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
        (
            {"blocks": [[3, 2**29], [0]]},
            r"blocks\[0\] must be from 0 to 536870911, as slots of block_size=4 are int32; got "
            "536870912",
        ),
        ({"blocks": [[3, 1], [-1]]}, r"blocks\[1\] must be from 0 to 536870911"),
        (
            {"tokens": [[1, 2], np.array([2**40])]},
            r"tokens\[1\] must hold integers that fit int32; got 1099511627776",
        ),
        (
            {"tokens": [[1, -(2**80)], [3]]},
            r"tokens\[0\] must hold integers that fit int32; got -1",
        ),
        ({"tokens": [[1, 2.5], [3]]}, r"tokens\[0\] must have integers; got float64"),
        ({"tokens": [[1, 2], [True]]}, r"tokens\[1\] must have integers; got bool"),
        ({"context_lens": [5, 2**32 + 1]}, "context_lens must hold integers that fit int32"),
        ({"context_lens": [5.0, 1]}, "context_lens must have integers; got float64"),
        ({"block_size": 0}, "block_size must be at least 1; got 0"),
        ({"block_size": 2**31}, "block_size must be at most 2147483647; got 2147483648"),
        ({"max_seqs": 5.0}, "max_seqs must have type int; got float"),
    ],
)
def test_a_batch_that_does_not_fit(changes: dict[str, Any], message: str) -> None:
    sound = {"tokens": [[1, 2], [3]], "context_lens": [5, 1], "blocks": [[3, 1], [0]]}
    for frontend in (jax_frontend, torch_frontend):
        with pytest.raises((TypeError, ValueError), match=rf"pad_batch: {message}.*\. [A-Z]"):
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
        ({"num_tokens": 24.0}, TypeError, "num_tokens must have type int; got float"),
        ({"block_size": True}, TypeError, "block_size must have type int; got bool"),
        ({"block_size": None}, TypeError, "block_size must have type int; got NoneType"),
    ],
)
def test_slots_of_wrong_arguments(changes: Any, error: type[Exception], message: str) -> None:
    arguments = dict(zip(METADATA, batch_of(*LENS)[3:], strict=True))
    arguments |= {"block_size": 4, "num_tokens": 24} | changes
    for frontend, convert in ((jax_frontend, jnp.asarray), (torch_frontend, torch.from_numpy)):
        given = {
            name: convert(x) if isinstance(x, np.ndarray) else x for name, x in arguments.items()
        }
        with pytest.raises(error, match=rf"slot_mapping: {message}.*\. [A-Z]"):
            frontend.slot_mapping(**given)


def test_slots_of_several_sizes_in_one_program() -> None:
    def metadata(seqs: int) -> list[torch.Tensor]:
        arrays = torch.full((seqs,), 5), torch.arange(2 * seqs).reshape(seqs, 2)
        return [x.int() for x in (*arrays, torch.arange(seqs + 1), torch.tensor([seqs]))]

    for options in ({}, {"dynamic": True}):
        torch._dynamo.reset()
        compiled = torch.compile(_Slots(), fullgraph=True, backend="aot_eager", **options)
        for seqs in (3, 4, 5, 1):
            found = compiled(*metadata(seqs))
            assert found.tolist() == [4 * (2 * s + 1) for s in range(seqs)]
    seqs = torch.export.Dim("seqs", min=2, max=64)
    shapes = ({0: seqs}, {0: seqs}, {0: seqs + 1}, {})
    program = torch.export.export(_Slots(), tuple(metadata(3)), dynamic_shapes=shapes, strict=True)
    found = program.run_decompositions().module()(*metadata(7))
    assert found.tolist() == [4 * (2 * s + 1) for s in range(7)]


class _Slots(torch.nn.Module):
    def forward(
        self, lens: torch.Tensor, tables: torch.Tensor, starts: torch.Tensor, num_seqs: torch.Tensor
    ) -> torch.Tensor:
        sizes = {"block_size": 4, "num_tokens": lens.shape[0]}
        return torch_frontend.slot_mapping(lens, tables, starts, num_seqs, **sizes)


@pytest.mark.parametrize("block", [14, 15], ids=["a block", "the last block of the pool"])
@pytest.mark.parametrize("frontend", ["jax", "torch"])
def test_int8_cache_whose_scales_the_update_makes(frontend: str, block: int) -> None:
    """A prompt of 16 tokens, then one more, in steps padded to 20. As an index, the slot of padding
    is the last position of the last block."""
    rng = np.random.default_rng(0)
    key, value = rng.standard_normal((2, 17, 2, 64), np.float32)
    query = rng.standard_normal((17, 8, 64), np.float32)
    tables, pool = [[block, 3]], (16, 16, 2)
    jax_caches: Any = (jnp.zeros((16, 16, 4, 64), jnp.int8), jnp.zeros(pool), jnp.zeros(pool))
    torch_caches = tuple(torch.from_numpy(np.array(x)) for x in jax_caches)
    step = jax.jit(_int8_step, donate_argnums=0)
    for first, end in ((0, 16), (16, 17)):
        padding = 20 - (end - first)
        tokens = [np.pad(x[first:end], ((0, padding), (0, 0), (0, 0))) for x in (query, key, value)]
        positions = np.arange(first, end)
        slots = np.array([block, 3])[positions // 16] * 16 + positions % 16
        slots = np.pad(slots, (0, padding), constant_values=-1).astype(np.int32)
        metadata = [np.int32(x) for x in ([end], tables, [0, end - first], 1)]
        if frontend == "jax":
            output, jax_caches = step(jax_caches, *tokens, slots, *metadata)
        else:
            arrays = [torch.from_numpy(np.array(x)) for x in (*tokens, slots, *metadata)]
            output = _int8_step_in_torch(torch_caches, *arrays)
        rows = np.asarray(output)[: end - first]
        for row, position in zip(rows, positions, strict=True):
            expected = _attention(query[position], key[: position + 1], value[: position + 1])
            assert abs(row - expected).max() < 0.022  # with the scale of padding: 0.47
    scales = [np.asarray(x) for x in (jax_caches if frontend == "jax" else torch_caches)[1:]]
    for found, rows in zip(scales, (key, value), strict=True):
        assert np.count_nonzero(found) == 17 * 2
        assert (found[block] == abs(rows[:16]).max(-1) / np.float32(127)).all()


def _int8_step(caches: Any, query: Any, key: Any, value: Any, slots: Any, *metadata: Any) -> Any:
    caches = jax_frontend.kv_cache_update(
        caches[0], key, value, slots, k_scale_cache=caches[1], v_scale_cache=caches[2]
    )
    scales = {"k_scale": caches[1], "v_scale": caches[2]}
    return jax_frontend.paged_attention(query, caches[0], *metadata, 0.125, **scales), caches


def _int8_step_in_torch(
    caches: Any, query: Any, key: Any, value: Any, slots: Any, *metadata: Any
) -> torch.Tensor:
    torch_frontend.kv_cache_update(
        caches[0], key, value, slots, k_scale_cache=caches[1], v_scale_cache=caches[2]
    )
    scales = {"k_scale": caches[1], "v_scale": caches[2]}
    return torch_frontend.paged_attention(query, caches[0], *metadata, 0.125, **scales)


def _attention(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Attention of one token, in float64."""
    query, key, value = (x.astype(np.float64) for x in (query, key, value))
    logits = 0.125 * np.einsum("hd,shd->hs", query, key.repeat(4, 1))
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("hs,shd->hd", weights / weights.sum(-1, keepdims=True), value.repeat(4, 1))
