"""The handlers of varlen_attention and of its derivative without a framework."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from harness.compare import assert_same_bits
from shared_ffi import _native
from tests.cases.varlen import CASES, VarlenCase, oracle
from tests.support.calls import call_handler, cpu_instruction_set

F32 = np.float32
ARRAYS = ("query", "key", "value", "query_start_loc", "num_seqs")
FEATURES = ("sinks", "alibi_slopes", "bidirectional_ranges", "causal")
TARGET = "xla_gpu_varlen_attention"


@pytest.fixture(params=_native.cpu_instruction_sets(), autouse=True, scope="module")
def instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    with cpu_instruction_set(request.param):
        yield


def as_handlers_take_it(
    arguments: dict[str, Any], count: int
) -> tuple[dict[str, Any], dict[str, int | float]]:
    """The arrays of a call by name, and its attributes. `count`: operands that every call has."""
    given = dict(arguments)
    arrays = {name: given.pop(name) for name in ARRAYS}
    for name in FEATURES:
        if isinstance(given.get(name), np.ndarray):
            arrays[name] = given.pop(name)
    features = [name for name in arrays if name not in ARRAYS]
    attributes: dict[str, Any] = {name: count + i for i, name in enumerate(features)}
    causal = "causal" not in arrays and given.pop("causal", True)
    right = given.pop("window_right", None)
    if not causal:
        attributes["window_right"] = 2**63 - 1 if right is None else right
    attributes |= {"sliding_window": 0, "soft_cap": 0.0} | given
    return arrays, attributes


def attend(arguments: dict[str, Any], num_threads: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """The output and its log-sum-exp."""
    arrays, attributes = as_handlers_take_it(arguments, 5)
    query, value = arrays["query"], arrays["value"]
    rows = query.shape[:2]
    results = [np.full((*rows, value.shape[2]), np.nan, query.dtype), np.full(rows, np.nan, F32)]
    call_handler(TARGET, attributes, [*arrays.values()], results, num_threads)
    return results[0], results[1]


def differentiate(
    arguments: dict[str, Any],
    dout: np.ndarray,
    num_threads: int = 1,
    forward: Sequence[np.ndarray] = (),
) -> dict[str, np.ndarray]:
    """The gradients by argument."""
    output, lse = forward or attend(arguments)
    arrays, attributes = as_handlers_take_it(arguments, 8)
    operands = [*arrays.values()]
    operands[3:3] = [output, lse, dout]
    results = {
        name: np.full_like(x, np.nan)
        for name, x in arrays.items()
        if name in ("query", "key", "value", "sinks", "alibi_slopes")
    }
    call_handler(f"{TARGET}_backward", attributes, operands, [*results.values()], num_threads)
    return results


# Shares of the largest gradient.
TOLERANCES = {"float32": 1e-5, "float16": 2**-10, "bfloat16": 2**-8}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_derivative(case: VarlenCase) -> None:
    arguments, dout = case(), case.weights()
    dout[case.num_tokens :] = np.nan
    gradients = differentiate(arguments, dout)
    _, expected = oracle(arguments, dout)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        largest = max(1, np.abs(expected[name]).max(initial=0))
        error = np.abs(gradient.astype(np.float64) - expected[name]).max(initial=0)
        assert error <= TOLERANCES[case.dtype] * largest, (name, error, largest)
        if name in ARRAYS:
            assert not gradient[case.num_tokens :].any()
    for num_threads in (2, 5):
        for name, gradient in differentiate(arguments, dout, num_threads).items():
            assert_same_bits(gradient, gradients[name])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_output_has_the_bits_of_paged_attention(case: VarlenCase) -> None:
    arguments = case()
    arrays, attributes = as_handlers_take_it(arguments, 6)
    key, value = arrays.pop("key"), arrays.pop("value")
    lens = np.diff(arrays["query_start_loc"])
    tables = arrays["query_start_loc"][:-1, None] + np.arange(case.num_tokens, dtype=np.int32)
    operands = [*arrays.values()]
    operands[1:1] = [key, lens, tables]
    attributes |= {"value_cache": len(operands), "num_blocks": len(key), "block_size": 1}
    attributes |= {"num_kv_heads": key.shape[1], "value_offset": 0, "position_stride": 0}
    attributes |= {"head_stride": key.shape[2], "block_stride": key[0].size}
    attributes |= {"key_unit": key.shape[2], "value_unit": value.shape[2]}
    attributes |= {"value_head_size": value.shape[2]}
    rows = arrays["query"].shape[:2]
    results = [np.full((*rows, value.shape[2]), np.nan, key.dtype), np.full(rows, np.nan, F32)]
    call_handler("xla_gpu_paged_attention", attributes, [*operands, value], results)
    for num_threads in (1, 3):
        for one, other in zip(attend(arguments, num_threads), results, strict=True):
            assert_same_bits(one, other)
