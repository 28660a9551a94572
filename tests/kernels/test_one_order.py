"""What makes the one order of sums one: a row's bits are its own, and the kernels have them."""

from __future__ import annotations

import random
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from harness.compare import assert_close_on_cuda, assert_same_bits
from tests.cases.case import INT8_NVFP4, NVFP4, Case, Inputs
from tests.support import gpu as gpus
from tests.support import one_order, selection, varlen_calls
from tests.support.gpu import Gpu
from tests.support.one_order import F, Part, Rows, attend, expected_of, fold, leaf_at, rows_of_case

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def rows_of(dtype: str, capability: int, deviation: float = 4, length: int = 2600) -> Rows:
    rng = np.random.default_rng(0)
    shapes = ((12, 64), (length, 64), (length, 32))
    query, keys, values = (rng.standard_normal(shape) for shape in shapes)
    keys[length // 2 :] *= 3  # references that follow
    end = np.sort(rng.integers(1, length + 1, 12))
    end[-1] = length
    return Rows(
        (query * deviation).astype(DTYPES[dtype]), keys.astype(DTYPES[dtype]),
        values.astype(DTYPES[dtype]), np.maximum(end - 900, 0), end, 64**-0.5, capability,
        sinks=rng.standard_normal(12).astype(F), holes=rng.random((12, length)) < 0.1,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("capability", [80, 90])
def test_a_row_has_its_own_bits(capability: int, dtype: str) -> None:
    """Alone, as in decoding; in chunks; and beside rows that attend to other leaves."""
    rows = rows_of(dtype, capability)
    together = attend(rows)[0]
    for step in (1, 5):
        parts = [attend(rows.of(slice(i, i + step)))[0] for i in range(0, 12, step)]
        np.testing.assert_array_equal(np.concatenate(parts), together)


def leaf_off_by_32(position: int) -> range:
    leaf = leaf_at(max(position - 32, 0))
    return range(leaf.start + 32 if position >= 32 else 0, leaf.stop + 32 if position >= 32 else 32)


def forgetful(total: Part | None, part: Part) -> Part:
    return part if total is not None and total.sum[-1] > 0 else fold(total, part)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("leaf_at", leaf_off_by_32),
        ("fold", forgetful),
        ("SLACK", {"bfloat16": F(8)}),
        ("GROUP", 1024),
        ("ROOM", F(0)),
    ],
)
def test_a_fault_changes_bits(name: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of("bfloat16", 90)
    expected = attend(rows)[0]
    monkeypatch.setattr(one_order, name, fault)
    assert (attend(rows)[0] != expected).any()


@pytest.mark.parametrize("deviation", [1, 3])
def test_errors_are_those_of_rounded_weights(deviation: float) -> None:
    """Weights of 8 bits, the largest of which is not 1: before the output is rounded."""
    rows = rows_of("bfloat16", 90, deviation)
    query, keys, values = (x.astype(np.float64) for x in (rows.query, rows.keys, rows.values))
    logits = query @ keys.T * (rows.scale * np.log2(np.e))
    positions = np.arange(len(keys))
    attends = (rows.begin[:, None] <= positions) & (positions < rows.end[:, None])
    assert rows.holes is not None and rows.sinks is not None
    logits = np.where(attends & ~rows.holes, logits, -np.inf)
    weights = np.exp2(logits - logits.max(axis=1, keepdims=True))
    divisor = weights.sum(axis=1) + np.exp2(rows.sinks - logits.max(axis=1))
    expected = weights @ values / divisor[:, None]
    error = np.sqrt(np.mean((attend(rows)[0] - expected) ** 2) / np.mean(expected**2))
    assert error < 2.5e-3


LONG: dict[str, Any] = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_size": 64,
    "block_size": 16,
    "dtype": "bfloat16",
}
# A sequence with so many rows is not split: thread blocks add up its leaves.
WHOLE = LONG | {"num_heads": 64, "num_kv_heads": 1}
WIDE = LONG | {"head_size": 576, "value_head_size": 512, "num_kv_heads": 1, "block_size": 32}
# The decode kernel alone computes it.
DECODING = LONG | {"max_query_len": 4}
CALLS: dict[str, dict[str, Any]] = {
    "leaves": LONG | {"sequences": ((70, 900), (40, 2000)), "query_factor": 4.0},
    "whole": WHOLE | {"sequences": ((129, 1300),), "query_factor": 4.0, "sinks": True},
    "window": WHOLE | {"sequences": ((129, 900),), "sliding_window": 300},
    "two-groups": WHOLE | {"sequences": ((129, 8300),), "sliding_window": 300},
    "groups": LONG | {"sequences": ((40, 16500),), "num_kv_heads": 1, "sliding_window": 16450,
                      "ranges": "blocks"},
    "peaked": WHOLE | {"sequences": ((129, 1100),), "query_factor": 40.0},
    "float16": LONG | {"sequences": ((77, 1100), (190, 600)), "dtype": "float16", "num_heads": 6,
                       "query_factor": 8.0},
    "heads-of-128": LONG | {"sequences": ((50, 1000), (66, 66)), "head_size": 128},
    "narrow": LONG | {"sequences": ((50, 1000),), "head_size": 40, "kv_layout": "nhbd",
                      "own_value_head_size": 24},
    "soft-cap": LONG | {"sequences": ((70, 600),), "soft_cap": 20.0, "query_factor": 6.0},
    "alibi": LONG | {"sequences": ((70, 600),), "alibi_slopes": True},
    "negative-scale": LONG | {"sequences": ((70, 600),), "scale": -0.2},
    "tree": LONG | {"sequences": ((50, 700), (60, 300)), "tree": "draft"},
    "ranges": LONG | {"sequences": ((70, 1000),), "ranges": "any", "sinks": True},
    "both-directions": LONG | {"sequences": ((70, 1000),), "causal": False, "window_right": 30},
    "64-rows": LONG | {"sequences": ((20, 1100), (31, 500), (9, 9)), "query_factor": 4.0},
    "float8": LONG | {"sequences": ((70, 700), (9, 600)), "cache_dtype": "float8_e4m3fn",
                      "scales": "per position", "query_factor": 4.0},
    "int8": LONG | {"sequences": ((70, 700), (1, 300)), "cache_dtype": "int8",
                    "scales": "per position", "query_factor": 4.0},
    "nvfp4": LONG | NVFP4 | {"sequences": ((70, 700), (1, 300)), "query_factor": 4.0},
    "decoding-nvfp4": DECODING | NVFP4 | {"sequences": ((1, 1500), (2, 300)), "head_size": 128,
                                          "dtype": "float16"},
    "decoding-int8-nvfp4": DECODING | INT8_NVFP4 | {"sequences": ((1, 700), (3, 1300)),
                                                    "query_factor": 4.0},
    "decoding": DECODING | {"sequences": ((1, 1500), (2, 300), (1, 257), (4, 700)),
                            "query_factor": 4.0, "sinks": True},
    "decoding-a-window": DECODING | {"sequences": ((1, 1500), (4, 900), (1, 2300)),
                                     "sliding_window": 600, "num_heads": 8},
    "decoding-a-narrow-window": DECODING | {"sequences": ((1, 1500), (4, 900)),
                                            "sliding_window": 128, "block_size": 5},
    "decoding-groups": DECODING | {"sequences": ((1, 9000), (2, 18000)), "num_kv_heads": 1},
    "decoding-heads-of-128": DECODING | {"sequences": ((1, 1500), (3, 700)), "head_size": 128,
                                         "query_factor": 4.0},
    "decoding-a-tree": DECODING | {"sequences": ((4, 700), (3, 300)), "tree": "draft"},
    "decoding-ranges": DECODING | {"sequences": ((4, 1700), (1, 900)), "ranges": "any",
                                   "sliding_window": 300},
    "latent": WIDE | {"sequences": ((14, 600),)},
    "few-latent": WIDE | {"sequences": ((1, 1300), (3, 300)), "query_factor": 4.0},
}  # fmt: skip


def cancelling(case: Case) -> Inputs:
    """The arrays of a case in which most positions before the queries come twice, with V once positive
    and once negative: what is left of their sums is what rounding leaves, so any other order of sums
    has other outputs. V of the rest is small."""
    inputs = case.inputs()
    if (
        case.kv_layout is not None
        or case.value_head_size is not None
        or case.cache_dtype is not None
    ):
        return inputs
    for s, (q_len, context_len) in enumerate(case.sequences):
        half = (context_len - q_len) // 2

        def at(positions: np.ndarray, s: int = s) -> tuple[np.ndarray, np.ndarray]:
            blocks = inputs.block_tables[s, positions // case.block_size]
            return blocks, positions % case.block_size

        pages = np.arange(min(case.attended_positions(s)), half)
        pairs = inputs.kv_cache[at(pages)]
        pairs[:, 1::2] *= -1
        inputs.kv_cache[at(pages + half)] = pairs
        rest = inputs.kv_cache[at(np.arange(2 * half, context_len))]
        rest[:, 1::2] *= 2.0**-20
        inputs.kv_cache[at(np.arange(2 * half, context_len))] = rest
    return inputs


@pytest.mark.parametrize(
    ("kernels", "capability"),
    [("portable", 80), ("portable", 86), ("portable", 90), ("by GPU", 90)],
)
@pytest.mark.parametrize("call", CALLS)
def test_kernels_add_up_in_this_order(call: str, kernels: str, capability: int, gpu: Gpu) -> None:
    """Outputs have the same bits, with KV tiles of 32, 64 and 128 positions. The log-sum-exp follows
    from the same numbers by CUDA's log2f, which may be an ulp off."""
    if gpus.ON_CUDA:
        pytest.skip("a GPU approximates 2^x")
    gpus.skip_without_code(gpu, capability)
    case = Case(id=call, return_lse=True, **CALLS[call])
    inputs, attributes = cancelling(case), case.attributes()
    gpu = type(gpu)(gpu.native, kernels, capability)
    results = [gpus.attend(gpu, inputs, **attributes, seed=seed) for seed in (0, 1)]
    for (tokens, heads), rows in rows_of_case(case, inputs, capability, most=12):
        expected, lse = expected_of(rows, inputs.query.dtype)
        for result in results:
            assert_same_bits(result[0][tokens, heads], expected)
            np.testing.assert_allclose(result[1][tokens, heads], lse, rtol=3e-7, atol=1e-6)


def chunk_of(inputs: Inputs, s: int, first: int, last: int) -> Inputs:
    """The tokens [first, last) of sequence s alone, with their context."""
    starts, lens = np.full_like(inputs.query_start_loc, last), inputs.context_lens.copy()
    starts[0], lens[0] = first, lens[s] - (inputs.query_start_loc[s + 1] - last)
    return inputs._replace(
        query_start_loc=starts,
        context_lens=lens,
        block_tables=np.roll(inputs.block_tables, -s, 0),
        num_seqs=np.ones_like(inputs.num_seqs),
    )


@pytest.mark.parametrize(
    "features",
    [
        {"dtype": "float32"},
        {"dtype": "float32", "num_heads": 12, "sinks": True, "sliding_window": 400},
        {"dtype": "float32", "head_size": 520, "ranges": "blocks"},
        WIDE | {"num_heads": 8},
        {"cache_dtype": "float8_e4m3fn", "scales": "one", "head_size": 128},
        {"cache_dtype": "int8", "scales": "per head", "head_size": 128, "num_heads": 16},
        NVFP4 | {"head_size": 128, "num_heads": 16},
    ],
    ids=["float32", "float32-window", "float32-wide", "latent", "float8", "int8", "nvfp4"],
)
@pytest.mark.parametrize(
    ("kernels", "capability"), [("portable", 80), ("portable", 90), ("by GPU", 90)]
)
def test_a_chunk_has_the_bits_of_a_whole(
    features: dict[str, Any], kernels: str, capability: int, gpu: Gpu
) -> None:
    """The last tokens of a query alone: other thread blocks and warps compute them, and other rows
    beside them. One or two are decoded."""
    gpus.skip_without_code(gpu, capability)
    case = Case(id="chunk", sequences=((40, 1400),), **LONG | features)
    inputs, attributes = case.inputs(), case.attributes()
    gpu = type(gpu)(gpu.native, kernels, capability)
    end = int(inputs.query_start_loc[1])
    whole = gpus.attend(gpu, inputs, **attributes)
    assert_close_on_cuda(whole, inputs, attributes)
    for seed, length in enumerate((1, 2, 7, 33)):
        alone = chunk_of(inputs, 0, end - length, end)
        chunk = gpus.attend(gpu, alone, seed=seed, **attributes)
        assert_same_bits(chunk[end - length : end], whole[end - length : end])


NUM_CALLS = 200 if gpus.ON_CUDA else 2000 if selection.everything else 12


def random_call(seed: int) -> Case:
    """A call of the kernels of tensor cores: lengths, features and chunks that begin anywhere."""
    rng = random.Random(seed)
    options: list[dict[str, Any]] = [
        {}, {"sliding_window": rng.randint(1, 900)}, {"sinks": True}, {"alibi_slopes": True},
        {"soft_cap": rng.choice([5.0, 30.0])}, {"ranges": rng.choice(["any", "blocks"])},
        {"tree": "draft"}, {"causal": False, "window_right": rng.choice([0, 3, 40])},
        {"scale": rng.choice([-0.2, 0.01, 2.0])},
        {"cache_dtype": rng.choice(["int8", "float8_e4m3fn"]),
         "scales": rng.choice(["one", "per head", "per position"])},
        rng.choice([NVFP4, INT8_NVFP4]),
    ]  # fmt: skip
    features = rng.choice(options)
    are_whole = rng.random() < 0.4
    sequences = []
    for _ in range(rng.randint(1, 2)):
        context = rng.choice([rng.randint(1, 300), rng.randint(200, 800), rng.randint(900, 1800)])
        q_len = rng.randint(1, min(context, 60 if "tree" in features else rng.choice([4, 40, 130])))
        sequences.append((q_len, min(q_len * 3, context) if are_whole else context))
    if are_whole and "tree" not in features:
        sequences = [(context, context) for _, context in sequences]
    num_kv_heads = rng.choice([1, 1, 2])
    return Case(
        id=f"{seed}",
        sequences=tuple(sequences),
        num_heads=num_kv_heads * rng.choice([1, 2, 3, 4, 8]),
        num_kv_heads=num_kv_heads,
        head_size=rng.choice([64, 80, 128, 128]),
        block_size=rng.choice([8, 16, 32]),
        dtype=rng.choice(["bfloat16", "bfloat16", "float16"]),
        query_factor=rng.choice([0.5, 1.0, 4.0, 12.0, 40.0]),
        **features,
    )


@pytest.mark.parametrize("seed", range(NUM_CALLS))
def test_a_row_has_the_same_bits_in_all_kernels(seed: int, gpu: Gpu) -> None:
    """Prefilled by the portable kernels and by the GPU's own, in chunks, decoded, and trained."""
    case = random_call(seed)
    inputs, attributes = case.inputs(), case.attributes()
    rng = random.Random(seed)
    outputs = []
    for kernels in ("portable", "by GPU"):
        of_kernels = type(gpu)(gpu.native, kernels, gpu.capability)
        output = gpus.attend(of_kernels, inputs, seed=seed, **attributes)
        outputs.append(output)
        for s in range(len(case.sequences) if case.tree is None else 0):
            begin, end = (int(inputs.query_start_loc[s + i]) for i in range(2))
            last = end if not case.causal or case.ranges else rng.randint(begin + 1, end)
            first = max(begin, last - rng.choice([1, 1, 3, 40]))
            chunk = chunk_of(inputs, s, first, last)
            alone = gpus.attend(of_kernels, chunk, seed=seed + 1, **attributes)
            assert_same_bits(alone[first:last], output[first:last])
    if case.scales not in ("one", "per head"):  # the kernels of Hopper leave out one scale of all
        assert_same_bits(*outputs)
    if case.cache_dtype is None and all(q == context for q, context in case.sequences):
        tokens = len(inputs.query)
        key, value = np.zeros((2, tokens, case.num_kv_heads, case.head_size), inputs.query.dtype)
        for s, (q_len, _) in enumerate(case.sequences):
            own = inputs.query_start_loc[s] + np.arange(q_len)
            pages = inputs.block_tables[s, np.arange(q_len) // case.block_size]
            rows = inputs.kv_cache[pages, np.arange(q_len) % case.block_size]
            key[own], value[own] = rows[:, ::2], rows[:, 1::2]
        arrays = {
            "query": inputs.query, "key": key, "value": value, "num_seqs": inputs.num_seqs,
            "query_start_loc": inputs.query_start_loc,
        }  # fmt: skip
        given = {name: x for name, x in attributes.items() if x is not None}
        trained, _ = varlen_calls.attend(gpu, arrays | given, seed)
        assert_same_bits(trained[: sum(q for q, _ in case.sequences)],
                         outputs[0][: sum(q for q, _ in case.sequences)])  # fmt: skip
