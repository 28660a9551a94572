"""The example of sparse attention: attention to chosen positions and blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from examples.sparse_attention import in_jax, in_torch
from harness import reference
from harness.arrays import to_numpy, to_torch
from harness.compare import assert_close, assert_close_on_cpu, assert_same_bits
from shared_ffi.batch import Batch
from tests.cases.case import JUNK, Case, Inputs
from tests.support.backends import to_xla

F32, I32 = np.float32, np.int32


def call_jax(name: str, arrays: dict[str, Any], **options: Any) -> np.ndarray:
    return np.asarray(jax.jit(partial(getattr(in_jax, name), **options))(**arrays))


def call_jax_eagerly(name: str, arrays: dict[str, Any], **options: Any) -> np.ndarray:
    """With the NumPy arrays that ``pad_batch`` returns."""
    own = {name: jnp.asarray(x) for name, x in arrays.items() if name != "batch"}
    return np.asarray(getattr(in_jax, name)(**arrays | own, **options))


def call_torch(
    convert: Callable[[Any], torch.Tensor],
    compile_with: str | None,
    name: str,
    arrays: dict[str, Any],
    **options: Any,
) -> np.ndarray:
    def function(tensors: dict[str, Any]) -> Any:
        return getattr(in_torch, name)(**tensors, **options)

    if compile_with is not None:
        torch._dynamo.reset()
        function = torch.compile(function, backend=compile_with, fullgraph=True, dynamic=False)
    with torch.no_grad():
        return to_numpy(function(jax.tree.map(convert, arrays)))


WAYS = {
    "jax": call_jax,
    "jax_eager": call_jax_eagerly,
    "torch": partial(call_torch, to_torch, None),
    "inductor": partial(call_torch, to_torch, "inductor"),
    "torch_xla": partial(call_torch, to_xla, None),
    "openxla": partial(call_torch, to_xla, "openxla"),
}
EVERY_TEST = ("jax", "torch")


class Call(NamedTuple):
    """A call of the example's function, and of the oracle."""

    name: str
    arrays: dict[str, Any]
    options: dict[str, Any]
    inputs: Inputs
    attributes: dict[str, Any]

    def run(self, way: str) -> np.ndarray:
        return WAYS[way](self.name, self.arrays, **self.options)

    def of_sequence(self, s: int) -> tuple[Call, slice]:
        """The same for one sequence alone, and where its tokens are in the batch."""
        batch: Batch = self.arrays["batch"]
        begin, end = (int(x) for x in batch.query_start_loc[s : s + 2])
        alone = Batch(
            *(x[begin:end] for x in batch[:3]),
            *(x[s : s + 1] for x in (batch.context_lens, batch.block_tables)),
            np.array([0, end - begin], I32),
            np.ones(1, I32),
        )
        tokens = slice(begin, end)
        changed = {name: self.arrays[name][tokens] for name in ("query", "chosen")}
        if "entry_tables" in self.arrays:
            changed["entry_tables"] = self.arrays["entry_tables"][s : s + 1]
        return self._replace(arrays=self.arrays | changed | {"batch": alone}), tokens


SEQUENCES = ((1, 150), (7, 80), (0, 5), (9, 9), (1, 3), (30, 601))


def batch_of(case: Case, inputs: Inputs) -> Batch:
    """The arrays of a batch; tokens and slots are not used."""
    positions = np.zeros(len(inputs.query), I32)
    token = 0
    for q_len, context_len in case.sequences:
        positions[token : token + q_len] = np.arange(context_len - q_len, context_len)
        token += q_len
    return Batch(positions, positions, positions, *inputs[2:])


def chosen_of(limits: np.ndarray, k: int, num_real: int) -> np.ndarray:
    """For each limit some different numbers below it, negative ones between them; junk where the
    token is padding."""
    rng = np.random.default_rng(k)
    chosen = rng.choice(JUNK, (*limits.shape, k))
    for place in np.ndindex(limits.shape):
        if place[0] >= num_real:
            continue
        row = rng.choice([-1, -7, -(2**31)], k)
        numbers = rng.permutation(limits[place])[: rng.integers(k + 1)]
        row[rng.permutation(k)[: len(numbers)]] = numbers
        chosen[place] = row
    return chosen.astype(I32)


def positions_call(dtype: str, cache_dtype: str | None, scales: str | None) -> Call:
    """Top-k positions of a latent cache; what nobody chooses is NaN."""
    case = Case(
        id=f"positions-{dtype}-{cache_dtype}",
        sequences=SEQUENCES,
        num_heads=6,
        num_kv_heads=1,
        head_size=40,
        value_head_size=24,
        block_size=8,
        dtype=dtype,
        cache_dtype=cache_dtype,
        scales=scales,
        num_seqs_shape=(1,),
    )
    inputs, attributes = case.inputs(), case.attributes()
    batch = batch_of(case, inputs)
    num_real = sum(q_len for q_len, _ in case.sequences)
    chosen = chosen_of(batch.positions + 1, 70, num_real)
    if cache_dtype is None:
        is_chosen = np.zeros(inputs.kv_cache.shape[:2], bool)
        starts = inputs.query_start_loc
        for s in range(len(case.sequences)):
            of_tokens = chosen[starts[s] : starts[s + 1]]
            some = of_tokens[of_tokens >= 0]
            is_chosen[inputs.block_tables[s, some // 8], some % 8] = True
        inputs.kv_cache[~is_chosen] = np.nan
    arrays = {"query": inputs.query, "kv_cache": inputs.kv_cache, "chosen": chosen, "batch": batch}
    if "k_scale" in attributes:
        k_scale = attributes["k_scale"]
        arrays["k_scale"] = k_scale.reshape(-1, 1, 1) if scales == "per position" else k_scale
    options = {name: attributes[name] for name in ("scale", "value_head_size")}
    selected = {"selected": chosen[:, None]}
    return Call("attend_to_positions", arrays, options, inputs, attributes | selected)


def blocks_call(dtype: str, cache_dtype: str | None, scales: str | None) -> Call:
    """Blocks of its own for each kv head."""
    case = Case(
        id=f"blocks-{dtype}-{cache_dtype}",
        sequences=SEQUENCES,
        num_heads=6,
        num_kv_heads=2,
        head_size=32,
        block_size=8,
        dtype=dtype,
        cache_dtype=cache_dtype,
        scales=scales,
        kv_layout="nhb(2d)",
        num_seqs_shape=(1,),
    )
    inputs, attributes = case.inputs(), case.attributes()
    batch = batch_of(case, inputs)
    num_real = sum(q_len for q_len, _ in case.sequences)
    chosen = chosen_of(np.repeat(batch.positions[:, None] // 8 + 1, 2, 1), 9, num_real)
    in_blocks = 8 * chosen[..., None].astype(np.int64) + np.arange(8)
    selected = {"selected": in_blocks.reshape(*chosen.shape[:2], -1)}
    arrays = {"query": inputs.query, "kv_cache": inputs.kv_cache, "chosen": chosen, "batch": batch}
    arrays |= {name: attributes[name] for name in ("k_scale", "v_scale") if name in attributes}
    options = {"scale": attributes["scale"]}
    return Call("attend_to_blocks", arrays, options, inputs, attributes | selected)


CALLS = {
    f"{make.__name__}-{dtype}-{cache_dtype}": partial(make, dtype, cache_dtype, scales)
    for make, dtype, cache_dtype, scales in (
        (positions_call, "float32", None, None),
        (positions_call, "bfloat16", None, None),
        (positions_call, "float32", "int8", "per position"),
        (positions_call, "bfloat16", "int8", "one"),
        (positions_call, "float32", "float8_e4m3fn", "one"),
        (positions_call, "float16", "float8_e5m2", "per position"),
        (blocks_call, "float32", None, None),
        (blocks_call, "bfloat16", "int8", "one"),
    )
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_chosen_positions_and_blocks(call: Callable[[], Call]) -> None:
    """The right numbers, whose bits depend neither on the frontend, nor on the rest of the batch,
    nor on the order of what is chosen."""
    call = call()
    result = call.run("torch")
    assert_close_on_cpu(result, call.inputs, call.attributes)
    assert_same_bits(call.run("jax"), result)
    other_order = np.random.default_rng(0).permuted(call.arrays["chosen"], axis=-1)
    assert_same_bits(
        call._replace(arrays=call.arrays | {"chosen": other_order}).run("torch"), result
    )
    for s in (0, 1, 3, 5):
        alone, tokens = call.of_sequence(s)
        assert_same_bits(alone.run("torch"), result[tokens])


@pytest.mark.parametrize("call", ["positions_call-float32-int8", "blocks_call-float32-None"])
@pytest.mark.parametrize("way", [way for way in WAYS if way not in EVERY_TEST])
def test_in_compiled_programs(way: str, call: str) -> None:
    made = CALLS[call]()
    assert_same_bits(made.run(way), made.run("torch"))


@pytest.mark.parametrize("call", ["positions_call-float32-None", "blocks_call-float32-None"])
@pytest.mark.parametrize("way", ["jax", "jax_eager", "torch"])
def test_padding_of_a_batch_with_as_many_sequences_as_it_has_room_for(way: str, call: str) -> None:
    made = CALLS[call]()
    batch, count = made.arrays["batch"], len(SEQUENCES)
    lens, tables, starts = batch.context_lens, batch.block_tables, batch.query_start_loc
    full = batch._replace(
        context_lens=lens[:count], block_tables=tables[:count], query_start_loc=starts[: count + 1]
    )
    assert starts[count] < len(batch.positions)
    found = made._replace(arrays=made.arrays | {"batch": full}).run(way)
    assert_same_bits(found, made.run("torch"))


@pytest.mark.parametrize("cache_dtype", [None, "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("way", WAYS)
def test_window_entries_and_sinks(way: str, cache_dtype: str | None) -> None:
    """A sliding window, chosen compressed entries in a cache of their own, and a sink."""
    fields: dict[str, Any] = {
        **{"num_heads": 6, "num_kv_heads": 1, "head_size": 40, "value_head_size": 40},
        **{"block_size": 8, "num_seqs_shape": (1,)},
        **{"cache_dtype": cache_dtype, "scales": "one" if cache_dtype else None},
    }
    case = Case(id="window", sequences=SEQUENCES, sliding_window=9, sinks=True, **fields)
    inputs, attributes = case.inputs(), case.attributes()
    batch = batch_of(case, inputs)
    num_entries = [(1, max(1, context_len // 4)) for _, context_len in SEQUENCES]
    entries = Case(id="entries", sequences=tuple(num_entries), **fields).inputs()
    num_real = sum(q_len for q_len, _ in SEQUENCES)
    chosen = chosen_of((batch.positions + 1) // 4, 20, num_real)
    arrays = {
        "query": inputs.query,
        "kv_cache": inputs.kv_cache,
        "entries": entries.kv_cache,
        "chosen": chosen,
        "batch": batch,
        "entry_tables": entries.block_tables,
        "sinks": attributes["sinks"],
    }
    of_both = {name: attributes[name] for name in ("k_scale",) if name in attributes}
    scale = attributes["scale"]
    options = {"scale": scale, "window": 9, "value_head_size": 40}
    call = Call("attend_to_window_and_entries", arrays | of_both, options, inputs, attributes)
    result = call.run(way)

    near = reference.paged_attention(*inputs, **attributes, return_lse=True)
    far = reference.paged_attention(
        *inputs._replace(
            kv_cache=entries.kv_cache,
            context_lens=entries.context_lens,
            block_tables=entries.block_tables,
        ),
        scale,
        **of_both,
        causal=False,
        value_head_size=40,
        selected=chosen[:, None],
        return_lse=True,
    )
    lses = np.stack([near[1], far[1]])
    with np.errstate(invalid="ignore"):
        weights = np.nan_to_num(np.exp(lses - lses.max(0)))
    expected = (weights[..., None] * np.stack([near[0], far[0]])).sum(0)
    expected[:num_real] /= weights.sum(0)[:num_real, :, None]
    assert (expected[:num_real] != 0).any((1, 2)).all()
    assert_close(result, expected, "float32")
    if way in EVERY_TEST:
        for s in (0, 1, 3):
            alone, tokens = call.of_sequence(s)
            assert_same_bits(alone.run(way), result[tokens])
