"""The CPU handlers of varlen_attention and of its derivative without a framework: every case against
float64, and the promises about bits, batches and threads. test_mutation.py runs this file on faulty
kernels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from harness.arrays import DTYPES
from harness.compare import assert_same_bits
from harness.reference import as_paged
from shared_ffi import _native
from tests.cases.varlen import CASES, VarlenCase, oracle
from tests.support import varlen_calls
from tests.support.calls import call_handler, cpu_instruction_set, in_wider_rows
from tests.support.gpu import Cpu
from tests.support.varlen_calls import (
    ARRAYS,
    FEATURES,
    TARGET,
    TOLERANCES,
    as_handlers_take_it,
    assert_answers_share_their_prompt,
    assert_close,
)

F32, I32 = np.float32, np.int32
ROWS = ARRAYS[:3]


def attend(arguments: dict[str, Any], num_threads: int = 1) -> tuple[np.ndarray, ...]:
    return varlen_calls.attend(Cpu(num_threads), arguments)


def differentiate(
    arguments: dict[str, Any], dout: np.ndarray, num_threads: int = 1, forward: Any = None
) -> dict[str, np.ndarray]:
    return varlen_calls.differentiate(Cpu(num_threads), arguments, dout, forward)


@pytest.fixture(params=_native.cpu_instruction_sets(), autouse=True, scope="module")
def instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    with cpu_instruction_set(request.param):
        yield


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_varlen_attention_backward(case: VarlenCase) -> None:
    arguments, dout = case(), case.weights()
    dout[case.num_tokens :] = np.nan
    gradients = differentiate(arguments, dout)
    _, expected = oracle(arguments, dout)
    assert gradients.keys() == expected.keys()
    assert_close(gradients, case.dtype, expected, TOLERANCES)
    for name, gradient in gradients.items():
        if name in ROWS:
            assert_same_bits(
                gradient[case.num_tokens :], np.zeros_like(gradient)[case.num_tokens :]
            )
    # Many threads cut sequences into work items.
    for num_threads in (2, 64):
        again = differentiate(arguments, dout, num_threads)
        assert_same_bits((*again.values(),), (*gradients.values(),))


@st.composite
def random_varlen_cases(draw: st.DrawFn) -> VarlenCase:
    num_kv_heads, head_size = draw(st.integers(1, 3)), draw(st.integers(1, 70))
    arrays = [name for name in FEATURES if draw(st.booleans())]
    options: dict[str, Any] = {"scale": draw(st.floats(-1, 1, width=32))}
    if draw(st.booleans()):
        options["sliding_window"] = draw(st.integers(1, 150))
    if draw(st.booleans()):
        options["soft_cap"] = draw(st.sampled_from([0.5, 5.0, 64.0, 65.0, 1000.0]))
    if "causal" in arrays or draw(st.booleans()):
        options |= {} if "causal" in arrays else {"causal": False}
        options |= draw(st.sampled_from([{}, {"window_right": 0}, {"window_right": 70}]))
    return VarlenCase(
        id="random",
        lengths=tuple(draw(st.lists(st.integers(0, 140), max_size=4))),
        num_heads=num_kv_heads * draw(st.integers(1, 7)),
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        value_head_size=draw(st.integers(1, head_size)),
        dtype=draw(st.sampled_from(["float32", "float16", "bfloat16"])),
        arrays=tuple(arrays),
        options=options,
        padding=draw(st.integers(0, 3)),
    )


@given(random_varlen_cases())
def test_varlen_attention_backward_of_random_calls(case: VarlenCase) -> None:
    test_varlen_attention_backward(case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_varlen_attention_has_the_bits_of_paged_attention(case: VarlenCase) -> None:
    arguments = case()
    arrays, attributes = as_handlers_take_it(arguments, 6)
    key, value, prefix_seqs = (arrays.pop(x, None) for x in ("key", "value", "prefix_seqs"))
    attributes.pop("prefix_seqs", None)
    (_, _, lens, tables, *_), _ = as_paged(*[arguments[x] for x in ARRAYS], prefix_seqs)
    operands = [*arrays.values()]
    operands[1:1] = [key, lens.astype(I32), tables.astype(I32)]
    attributes |= {"value_cache": len(operands), "num_blocks": len(key), "block_size": 1}
    attributes |= {"num_kv_heads": key.shape[1], "value_offset": 0, "position_stride": 0}
    attributes |= {"head_stride": key.shape[2], "block_stride": key[0].size}
    attributes |= {"key_unit": key.shape[2], "value_unit": value.shape[2]}
    attributes |= {"value_head_size": value.shape[2]}
    rows = arrays["query"].shape[:2]
    results = [np.full((*rows, value.shape[2]), np.nan, key.dtype), np.full(rows, np.nan, F32)]
    call_handler("xla_gpu_paged_attention", attributes, [*operands, value], results)
    for num_threads in (1, 3):
        assert_same_bits(attend(arguments, num_threads), (*results,))


LENGTHS = (70, 0, 1, 201, 64)
BATCHES = [
    VarlenCase("plain", LENGTHS),
    VarlenCase("bfloat16", LENGTHS, dtype="bfloat16"),
    VarlenCase(
        "windows", LENGTHS, options={"sliding_window": 40, "window_right": 9, "causal": False}
    ),
    VarlenCase("ranges", LENGTHS, num_heads=14, arrays=("sinks", "bidirectional_ranges")),
]


def sequence_of(arguments: dict[str, Any], start: int, end: int) -> dict[str, Any]:
    """The call of one sequence alone."""
    own = {"query_start_loc": np.array([0, end - start], I32), "num_seqs": np.array([1], I32)}
    for name in (*ROWS, "bidirectional_ranges"):
        if name in arguments:
            own[name] = arguments[name][start:end].copy()
    return arguments | own


@pytest.mark.parametrize("case", BATCHES, ids=lambda case: case.id)
def test_varlen_attention_backward_of_a_sequence_alone(case: VarlenCase) -> None:
    arguments, dout = case(), case.weights()
    together = differentiate(arguments, dout, num_threads=3)
    for start, end in pairwise(np.cumsum((0, *case.lengths))):
        alone = differentiate(sequence_of(arguments, start, end), dout[start:end].copy())
        for name in ROWS:
            assert_same_bits(together[name][start:end], alone[name])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_varlen_attention_of_answers_that_share_their_prompt(dtype: str) -> None:
    assert_answers_share_their_prompt(Cpu(), dtype, TOLERANCES)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("name", [*ROWS, "dout"])
@pytest.mark.parametrize("case", BATCHES, ids=lambda case: case.id)
def test_varlen_attention_backward_keeps_numbers_in_their_sequence(
    case: VarlenCase, name: str, number: float
) -> None:
    """NaN or infinity in a sequence reaches its own gradients only."""
    arguments, dout = case(), case.weights()
    expected = differentiate(arguments, dout)
    start, end = sum(LENGTHS[:3]), sum(LENGTHS[:4])
    faulty = dout if name == "dout" else arguments[name]
    faulty[start] = faulty[end - 1] = number
    found = differentiate(arguments, dout, num_threads=2)
    assert not np.isfinite(found["query"][start:end].astype(F32)).all()
    for array in ROWS:
        for rows in (slice(0, start), slice(end, None)):
            assert_same_bits(found[array][rows], expected[array][rows])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("apart", [(), ("query", "dout"), ("key", "output"), ("value",), "all"])
def test_varlen_attention_of_rows_in_wider_rows(apart: tuple[str, ...] | str, dtype: str) -> None:
    """Each array may be a part of rows of its own width."""
    case = VarlenCase("rows", (40, 3, 70), head_size=24, value_head_size=16, dtype=dtype)
    arguments, dout = case(), case.weights()
    output, lse = attend(arguments)
    expected = differentiate(arguments, dout, forward=(output, lse))
    rows = {name: arguments[name] for name in ROWS} | {"output": output, "dout": dout}
    strided = {
        name: in_wider_rows(x, 5 + 8 * i)[0] if name in apart or apart == "all" else x
        for i, (name, x) in enumerate(rows.items())
    }
    layout = {"row_heads": 4, "row_head_size": 24, "row_kv_heads": 2, "row_value_head_size": 16}
    layout = layout if apart else {}
    metadata = [arguments["query_start_loc"], arguments["num_seqs"]]
    _, attributes = as_handlers_take_it(arguments, 0)
    results = [np.full_like(output, np.nan), np.full_like(lse, np.nan)]
    operands = [*[strided[name] for name in ROWS], *metadata]
    call_handler(TARGET, attributes | layout, operands, results, 2)
    assert_same_bits((*results,), (output, lse))
    gradients = [np.full_like(x, np.nan) for x in expected.values()]
    operands[3:3] = [strided["output"], lse, strided["dout"]]
    call_handler(f"{TARGET}_backward", attributes | layout, operands, gradients, 2)
    assert_same_bits((*gradients,), (*expected.values(),))


@pytest.mark.parametrize("factor", [30.0, 1e3, 1e5])
def test_varlen_attention_backward_with_large_logits(factor: float) -> None:
    """A logit's rounding is relative, and its error one of the weight. Most rows have one weight of
    1, which leaves nothing of dout . v - delta: their queries' gradients vanish."""
    case = VarlenCase("large", (130, 64, 7), padding=0)
    arguments, dout = case(), case.weights()
    arguments["query"] *= F32(factor)
    _, expected = oracle(arguments, dout)
    gradients = differentiate(arguments, dout)
    errors = {name: np.abs(x - expected[name]).max() for name, x in gradients.items()}
    assert errors["query"] <= 1e-4
    assert errors["key"] <= 1e-4 * factor
    assert errors["value"] <= 1e-4 + 2**-20 * factor


@pytest.mark.parametrize("factor", [1e4, 1e8, 1e30])
def test_varlen_attention_backward_of_an_only_weight(factor: float) -> None:
    """A sequence's only token has the weight 1, however large its logit and whatever its sign: the
    gradient of its value is that of its output."""
    case = VarlenCase("only", (1,) * 40, num_kv_heads=4, padding=0)
    arguments, dout = case(), case.weights()
    arguments["query"] *= F32(factor)
    assert_same_bits(differentiate(arguments, dout)["value"], dout)


def test_varlen_attention_backward_of_sinks_as_large_as_a_logit() -> None:
    """The weight of a sink is at most 1, however the log-sum-exp was rounded."""
    case = VarlenCase("ties", (1,), 64, 1, 1, arrays=("sinks",), padding=0)
    arguments, dout = case(), np.ones_like(case.weights())
    arguments |= {"key": np.ones((1, 1, 1), F32), "value": np.ones((1, 1, 1), F32), "scale": 1.0}
    arguments["sinks"] = np.geomspace(1e9, 1e12, 64, dtype=F32)
    arguments["query"] = arguments["sinks"].reshape(1, 64, 1)
    assert np.abs(differentiate(arguments, dout)["sinks"]).max() <= 1


def test_varlen_attention_backward_of_rows_without_weights() -> None:
    """Their log-sum-exp is -inf: the gradient of their query is zero, and the others are as if the
    derivative of their output were zero."""
    case = VarlenCase("empty", (40, 90), padding=0)
    arguments, dout = case(), case.weights()
    output, lse = attend(arguments)
    rows = [0, 17, 100]
    lse[rows], output[rows] = -np.inf, 0
    found = differentiate(arguments, dout, forward=(output, lse))
    assert_same_bits(found["query"][rows], np.zeros_like(dout[rows]))
    dout[rows] = 0
    expected = differentiate(arguments, dout)
    assert_same_bits((*found.values(),), (*expected.values(),))


def test_varlen_attention_backward_of_the_largest_sink() -> None:
    """It leaves no weight to any position."""
    case = VarlenCase("sinks", (5, 70), arrays=("sinks",), padding=0)
    arguments, dout = case(), case.weights()
    arguments["sinks"][:] = [np.inf, 3e38, -np.inf, 0]
    found = differentiate(arguments, dout)
    for name, gradient in found.items():
        rows = gradient if name == "sinks" else gradient[:, : gradient.shape[1] // 2]
        assert not (rows[:2] if name == "sinks" else rows).any()
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize("target", [TARGET, f"{TARGET}_backward"])
@pytest.mark.parametrize(
    ("starts", "num_seqs", "message"),
    [
        ([0, 5, 3, 9], 3, "query_start_loc must not decrease; got query_start_loc[2]=3 after"),
        ([-1, 5, 6, 9], 3, "query_start_loc[0] must be at least 0; got -1"),
        ([0, 5, 6, 2**31 - 1], 3, "query_start_loc[3] must be at most num_tokens=9"),
        ([0, 5, 6, 9], 4, "num_seqs must be from 0 to max_seqs=3; got 4"),
        ([0, 5, 6, 9], -1, "num_seqs must be from 0 to max_seqs=3; got -1"),
    ],
)
def test_varlen_attention_of_faulty_sequences(
    starts: list[int], num_seqs: int, message: str, target: str
) -> None:
    case = VarlenCase("faulty", (5, 1, 3), padding=0)
    arguments, dout = case(), case.weights()
    forward = attend(arguments)
    arguments |= {"query_start_loc": np.array(starts, I32), "num_seqs": np.array(num_seqs, I32)}
    op = target.removeprefix("xla_gpu_")
    with pytest.raises(ValueError, match=re.escape(f"{op}: {message}")):
        attend(arguments) if target == TARGET else differentiate(arguments, dout, 1, forward)


def test_varlen_attention_of_a_sequence_longer_than_promised() -> None:
    arguments = VarlenCase("long", (5, 1), padding=0)() | {"max_query_len": 4}
    rule = "query_start_loc must give sequence 0 at most max_query_len=4 tokens; got 5"
    with pytest.raises(ValueError, match=rule):
        attend(arguments)


@pytest.mark.parametrize(
    ("name", "shape", "rule"),
    [
        ("key", (9, 3, 32), "key must have query's num_tokens=9 and head_size=32"),
        ("key", (8, 2, 32), "key must have query's num_tokens=9 and head_size=32"),
        ("key", (9, 2, 31), "key must have query's num_tokens=9 and head_size=32"),
        ("value", (9, 4, 32), "value must have key's num_tokens=9 and num_kv_heads=2"),
        ("value", (9, 2, 33), "value must have key's num_tokens=9 and num_kv_heads=2"),
        ("query_start_loc", (0,), "query_start_loc must have an entry at least"),
        ("num_seqs", (2,), "num_seqs must be int32 [] or [1]; got int32 [2]"),
        ("output", (9, 4, 31), "output must hold num_tokens=9 rows of heads=4 * columns=32"),
        ("dout", (8, 4, 32), "dout must hold num_tokens=9 rows of heads=4 * columns=32"),
        ("lse", (9, 5), "lse must be float32 [9, 4]"),
        ("dquery", (9, 4, 31), "result dquery must be float32 [9, 4, 32]"),
        ("dkey", (9, 4, 32), "result dkey must be float32 [9, 2, 32]"),
        ("dvalue", (9, 2), "result dvalue must be float32 [9, 2, 32]"),
    ],
)
def test_varlen_attention_backward_refuses_other_shapes(
    name: str, shape: tuple[int, ...], rule: str
) -> None:
    case = VarlenCase("shapes", (5, 1, 3), padding=0)
    arguments, dout = case(), case.weights()
    output, lse = attend(arguments)
    arrays, attributes = as_handlers_take_it(arguments, 8)
    operands = {x: arrays[x] for x in ROWS} | {"output": output, "lse": lse, "dout": dout}
    operands |= arrays
    results = {f"d{x}": np.zeros_like(arrays[x]) for x in ROWS}
    for among in (operands, results):
        if name in among:
            among[name] = np.zeros(shape, among[name].dtype)
    with pytest.raises(ValueError, match=re.escape(rule)):
        call_handler(f"{TARGET}_backward", attributes, [*operands.values()], [*results.values()])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_varlen_attention_of_tokens_that_another_thread_writes(dtype: str) -> None:
    """The starts lie in the memory of a result: they are read before it is written."""
    case = VarlenCase("starts", (9, 4), num_heads=1, num_kv_heads=1, dtype=dtype, padding=0)
    arguments, dout = case(), case.weights()
    expected = differentiate(arguments, dout)
    output, lse = attend(arguments)
    arrays, attributes = as_handlers_take_it(arguments, 8)
    results = [np.zeros((len(dout), 1, 32), DTYPES[dtype]) for _ in ROWS]
    starts = results[0].reshape(-1).view(I32)[:3]
    starts[:] = arrays["query_start_loc"]
    operands = [*[arrays[x] for x in ROWS], output, lse, dout, starts, arrays["num_seqs"]]
    call_handler(f"{TARGET}_backward", attributes, operands, results)
    assert_same_bits((*results,), (*expected.values(),))
